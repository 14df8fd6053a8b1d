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
from runtime.sync.bridge import SyncBridge
from runtime.sync.token_stream import TokenStream, complete


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which continues those before; made by `Runtime.conversation`.

    `runtime.Conversation` for plain threads; one thread at a time uses it.
    """

    _bridge: SyncBridge
    _how_to_close = "close()"

    def __init__(self, bridge: SyncBridge, conversation: TrioConversation) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args:
            bridge: to the runtime; keeps it from closing by itself when its own handle is dropped.
            conversation: the trio conversation.
        """
        super().__init__(bridge, partial(TokenStream, bridge), conversation.make_new, conversation)

    def __repr__(self) -> str:
        return f"<outrider sync.Conversation: {len(self.messages)} messages>"

    def stream(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Say something, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for plain threads.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        return self._begin_turn(text, turn_settings(settings, overrides))

    def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Say something, and return the whole answer.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Interrupting: a Ctrl-C ends the answer; the part of it that was given belongs to the conversation.
        """
        return complete(self.stream(text, settings, **overrides))

    def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for a `load`, here or elsewhere; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Interrupting: a Ctrl-C leaves the old file, or, at the very last, the whole new one.
        """
        self._check_idle("save the conversation")
        return self._bridge.call(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._forget()
