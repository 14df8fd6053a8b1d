"""A conversation for plain threads, whose turns are generated in the trio thread."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from protocol.settings import SettingsLike
from protocol.settings_keywords import SettingsArguments
from runtime.bridge.handles import ConversationHandle
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import turn_settings
from runtime.generation.token_stream import Completion, SessionFile
from runtime.generation.tool_calls.functions import MAX_TOOL_ROUNDS, Functions
from runtime.sync.bridge import SyncBridge
from runtime.sync.token_stream import TokenStream, complete


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which continues those before; made by `Runtime.conversation`.

    `runtime.Conversation` for plain threads; one thread at a time uses it.
    """

    _bridge: SyncBridge
    _how_to_close = "close()"

    def __init__(self, bridge: SyncBridge, functions: Functions, conversation: TrioConversation) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args:
            bridge: to the runtime; keeps it from closing by itself when its own handle is dropped.
            functions: that the model may call.
            conversation: the trio conversation.
        """
        super().__init__(bridge, partial(TokenStream, bridge), functions, conversation.make_new, conversation)

    def __repr__(self) -> str:
        return f"<outrider sync.Conversation: {len(self.messages)} messages>"

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a turn, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for plain threads. A `text` of None goes on after `call_tools`.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed, or functions are being called.
        """
        return self._begin_turn(text, turn_settings(settings, overrides))

    def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Begin a turn, and return the whole answer.

        Where the answer calls functions, they are called, and the model goes on with their results, for at most
        `MAX_TOOL_ROUNDS` rounds.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Returns: the last answer. It has calls only where the rounds are used up; they are `pending_calls` then.

        Interrupting: a Ctrl-C ends the answer; the part of it that was given belongs to the conversation. See also
            `call_tools`.
        """
        completion = complete(self.stream(text, settings, **overrides))
        for _ in range(MAX_TOOL_ROUNDS):
            if not self.call_tools():
                break
            completion = complete(self.stream(None, settings, **overrides))
        return completion

    def call_tools(self) -> bool:
        """Call the functions that the last answer calls, in this thread, one after the other; the model is told the
        results next. Results and errors become text, as by `runtime.Conversation.call_tools`.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises: ConversationBusyError: an answer is under way, or the functions are being called. Until they have
            returned, nothing else can be done with the conversation.

        Interrupting: a Ctrl-C ends the function that is running. The conversation is as it was.
        """
        self._check_idle("call its tools")
        results = self._caller.results_here(self.pending_calls)
        self._add_results(results)
        return bool(results)

    def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for a `load`, here or elsewhere; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Interrupting: a Ctrl-C leaves the old file, or, at the very last, the whole new one.
        """
        self._check_idle("save the conversation")
        return self._bridge.call(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system message.

        Raises: ConversationBusyError: a turn is neither over nor closed, or functions are being called.
        """
        self._forget()
