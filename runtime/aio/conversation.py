"""What a program on asyncio holds of a conversation, whose turns are generated in trio's thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from runtime.aio.token_stream import TokenStream
from runtime.bridge.handles import ConversationHandle
from runtime.generation import conversation
from runtime.generation.token_stream import Completion, SessionFile, complete

if TYPE_CHECKING:
    from runtime.aio.runtime import Runtime


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which goes on from those before; made by `Runtime.conversation`.

    As `runtime.Conversation`, for asyncio: chat templates are filled in, and their texts tokenised, off the loop.
    """

    _how_to_close = "aclose()"

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], conversation.Conversation],
        made: conversation.Conversation | None = None,
    ) -> None:
        """See `Runtime.conversation` and `Runtime.load`; the rest as `ConversationHandle`.

        Args:
            runtime: whose.
        """
        super().__init__(make, made)
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<outrider aio.Conversation: {len(self.messages)} messages>"

    def stream(self, text: str, **overrides: Any) -> TokenStream:
        """Say something, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for asyncio.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        self._runtime._check(overrides)
        self._check_idle("say something")
        stream = self._runtime._begin(partial(self._open, text, overrides))
        self._last = weakref.ref(stream)
        return stream

    async def generate(self, text: str, **overrides: Any) -> Completion:
        """Say something, and have the whole answer.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the answer; what was generated until then is lost, but not what was given of it.
        """
        return await complete(cast(Any, self.stream(text, **overrides)))

    async def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for `Runtime.load`, here or in trio; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Cancellation: leaves what was there, or, at the very last, the whole new file.
        """
        self._runtime._check_loop()
        self._check_idle("save the conversation")
        return await self._runtime._done_in_trio(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system's message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._runtime._check_loop()
        self._forget()
