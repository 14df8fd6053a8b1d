"""What a plain thread holds of a conversation, whose turns are generated in trio's thread."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime.bridge.handles import ConversationHandle
from runtime.generation import conversation
from runtime.generation.token_stream import Completion, SessionFile
from runtime.sync.token_stream import TokenStream

if TYPE_CHECKING:
    from runtime.sync import Runtime


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which goes on from those before; made by `Runtime.conversation`.

    As `runtime.Conversation`, for plain threads, of which one at a time uses it.
    """

    _how_to_close = "close()"

    def __init__(self, runtime: Runtime, made: conversation.Conversation) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args:
            runtime: whose.
            made: the conversation itself.
        """
        super().__init__(runtime._anew(made), made)
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<outrider sync.Conversation: {len(self.messages)} messages>"

    def stream(self, text: str, **overrides: Any) -> TokenStream:
        """Say something, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for plain threads.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        self._runtime._check(overrides)
        self._check_idle("say something")
        stream = self._runtime._begin(partial(self._open, text, overrides))
        self._last = weakref.ref(stream)
        return stream

    def generate(self, text: str, **overrides: Any) -> Completion:
        """Say something, and have the whole answer.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Interrupting: a Ctrl-C ends the answer; what was given of it by then is part of the conversation.
        """
        return self._runtime._complete(self.stream(text, **overrides))

    def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for a `load`, here or elsewhere; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Interrupting: a Ctrl-C leaves what was there, or, at the very last, the whole new file.
        """
        self._check_idle("save the conversation")
        return self._runtime._done_in_trio(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system's message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._forget()
