"""A conversation for asyncio, whose turns are generated in the trio thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack, cast

from protocol.settings import SettingsLike
from protocol.settings_keywords import SettingsArguments
from runtime.aio.bridge import AioBridge
from runtime.aio.token_stream import TokenStream
from runtime.bridge.handles import ConversationHandle
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import turn_settings
from runtime.generation.token_stream import Completion, SessionFile, complete


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which continues those before; made by `Runtime.conversation`.

    `runtime.Conversation` for asyncio: chat templates are rendered, and prompts tokenised, in the trio thread.
    """

    _bridge: AioBridge
    _how_to_close = "aclose()"

    def __init__(
        self,
        bridge: AioBridge,
        make_conversation: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args: as `ConversationHandle`.
        """
        super().__init__(bridge, partial(TokenStream, bridge), make_conversation, conversation)

    def __repr__(self) -> str:
        return f"<outrider aio.Conversation: {len(self.messages)} messages>"

    def stream(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Say something, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for asyncio.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        return self._begin_turn(text, turn_settings(settings, overrides))

    async def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Say something, and return the whole answer.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Cancellation: ends the answer. The text generated so far is lost, but for what was given of it.
        """
        return await complete(cast(Any, self.stream(text, settings, **overrides)))

    async def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for `Runtime.load`, here or in trio; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Cancellation: leaves the old file, or, at the very last, the whole new one.
        """
        self._bridge.check_loop()
        self._check_idle("save the conversation")
        return await self._bridge.call(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._bridge.check_loop()
        self._forget()
