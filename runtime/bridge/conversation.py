"""A handle on a conversation in trio's thread, for callers elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Self, Unpack

from protocol.settings import SettingsLike
from protocol.settings_keywords import SettingsArguments
from runtime.bridge.portal import Call, Portal
from runtime.bridge.streams import TokenStream
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import Message, turn_settings
from runtime.generation.token_stream import Completion, SessionFile
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.generation.tool_calls.events import ToolCall
from runtime.generation.tool_calls.functions import MAX_TOOL_ROUNDS, FunctionCaller, Functions
from runtime.generation.tool_calls.messages import calls_without_results


class Conversation:
    """`runtime.Conversation` for asyncio: chat templates are rendered, and prompts tokenised, in trio's thread."""

    def __init__(
        self,
        portal: Portal,
        functions: Functions,
        system: str | None,
        make: Callable[[], TrioConversation],
        conversation: TrioConversation | None = None,
    ) -> None:
        """`make` makes the conversation in trio's thread, now and after `reset`; `conversation` is one that was loaded.

        The functions are called in the caller's thread or loop.
        """
        self._portal = portal
        self._caller = FunctionCaller(functions)
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._make = make
        self._made: Call[TrioConversation] = portal.begin(make if conversation is None else lambda: conversation)
        self._last: weakref.ref[TokenStream] | None = None  # weak, since dropping the stream is a way to end it

    def __repr__(self) -> str:
        return f"<outrider {self._portal.thread.face}.Conversation: {len(self.messages)} messages>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the answer that is under way, if any."""
        self._close_answer()

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages so far, oldest first, the system message included. A turn is part of them once a token
        of its answer was given.
        """
        conversation = self._made.value
        known = self._system if conversation is None else conversation.messages
        return [dict(message) for message in known]

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer whose results the model was not told yet; empty during an answer."""
        return () if self._is_answering else calls_without_results(self.messages)

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a turn, and stream the answer; see `runtime.Conversation.stream`. ConversationBusyError also while
        functions are being called.
        """
        keywords = turn_settings(settings, overrides)
        self._portal.check_open()
        self._portal.runtime.check_settings(keywords)
        self._check_idle("say something")
        made = self._made

        def begin() -> TrioTokenStream:
            return made_conversation(made).stream(text, **keywords)

        stream = TokenStream(self._portal, begin)
        self._last = weakref.ref(stream)
        return stream

    async def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Begin a turn, and wait for the whole answer; see `runtime.Conversation.generate`, and `call_tools` here."""
        completion = await self.stream(text, settings, **overrides).read_whole()
        for _ in range(MAX_TOOL_ROUNDS):
            if not await self.call_tools():
                break
            completion = await self.stream(None, settings, **overrides).read_whole()
        return completion

    async def call_tools(self) -> bool:
        """Call the functions that the last answer calls, one after the other; the next prompt has their results.

        In asyncio, an async function is awaited in the loop, and any other called in a thread of its default executor;
        without an event loop, functions are called in this thread. See `runtime.Conversation.call_tools`.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises: ConversationBusyError: an answer is under way, or the functions are being called.

        Cancellation: cancels an async function; one in a thread goes on by itself. Without an event loop, a Ctrl-C
            interrupts the running function. The conversation is as it was.
        """
        self._portal.thread.check_caller()
        self._check_idle("call its tools")
        results = await self._caller.results(self.pending_calls, self._portal.thread.call_function)
        if results:
            made_conversation(self._made).add_results(results)
        return bool(results)

    async def save(self, path: SessionFile) -> int:
        """See `runtime.Conversation.save`. ConversationBusyError also while functions are being called."""
        self._portal.thread.check_caller()
        self._check_idle("save the conversation")
        made = self._made
        return await self._portal.call(lambda: made_conversation(made).save(path))

    def reset(self) -> None:
        """Forget everything but the system message. Raises: as `save`."""
        self._portal.thread.check_caller()
        self._check_idle("forget what was said")
        self._made, self._last = self._portal.begin(self._make), None

    async def made(self) -> None:
        """Wait until the conversation was made. Raises: what its chat template does not accept."""
        await self._made.result()

    def _close_answer(self) -> None:
        if self._last is not None and (stream := self._last()) is not None:
            stream._close()

    @property
    def _is_answering(self) -> bool:
        stream = None if self._last is None else self._last()
        return stream is not None and not stream.is_closed

    def _check_idle(self, what: str) -> None:
        self._caller.check_idle(what, self._is_answering, self._portal.thread.how_to_close)


def made_conversation(made: Call[TrioConversation]) -> TrioConversation:
    """The conversation that a call has made. Raises: why it could not be made."""
    if made.value is None:
        assert made.error is not None, "calls are made in order"
        raise made.error
    return made.value
