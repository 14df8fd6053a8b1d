"""A conversation for asyncio, whose turns are generated in the trio thread."""

from __future__ import annotations

import asyncio
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
from runtime.generation.tool_calls.functions import MAX_TOOL_ROUNDS, Functions


class Conversation(ConversationHandle[TokenStream]):
    """Turns with a model, each of which continues those before; made by `Runtime.conversation`.

    `runtime.Conversation` for asyncio: chat templates are rendered, and prompts tokenised, in the trio thread.
    """

    _bridge: AioBridge
    _how_to_close = "aclose()"

    def __init__(
        self,
        bridge: AioBridge,
        functions: Functions,
        make_conversation: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args: as `ConversationHandle`.
        """
        super().__init__(bridge, partial(TokenStream, bridge), functions, make_conversation, conversation)

    def __repr__(self) -> str:
        return f"<outrider aio.Conversation: {len(self.messages)} messages>"

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a turn, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for asyncio. A `text` of None goes on after `call_tools`.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed, or functions are being called.
        """
        return self._begin_turn(text, turn_settings(settings, overrides))

    async def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Begin a turn, and wait for the whole answer.

        Where the answer calls functions, they are called, and the model goes on with their results, for at most
        `MAX_TOOL_ROUNDS` rounds.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Returns: the last answer. It has calls only where the rounds are used up; they are `pending_calls` then.

        Cancellation: ends the answer; the tokens that were given of it are part of the conversation. See also
            `call_tools`.
        """
        completion = await complete(cast(Any, self.stream(text, settings, **overrides)))
        for _ in range(MAX_TOOL_ROUNDS):
            if not await self.call_tools():
                break
            completion = await complete(cast(Any, self.stream(None, settings, **overrides)))
        return completion

    async def call_tools(self) -> bool:
        """Call the functions that the last answer calls, one after the other; the model is told the results next.

        An async function is awaited here, in the asyncio loop; any other is called in a thread of the loop's default
        executor. Results and errors become text, as by `runtime.Conversation.call_tools`.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises:
            ConversationBusyError: an answer is under way, or another task calls the functions. Until they have
                returned, nothing else can be done with the conversation.
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: cancels an async function; one in a thread goes on by itself. The conversation is as it was.
        """
        self._bridge.check_loop()
        self._check_idle("call its tools")
        results = await self._caller.results(self.pending_calls, asyncio.to_thread)
        self._add_results(results)
        return bool(results)

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

        Raises: ConversationBusyError: a turn is neither over nor closed, or functions are being called.
        """
        self._bridge.check_loop()
        self._forget()
