"""What a program on asyncio holds: a runtime, whose models are at work elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from protocol.errors import WrongEventLoopError
from protocol.settings import MISSING
from runtime.aio.conversation import Conversation
from runtime.aio.many_prompts import Completions, TokenStreams
from runtime.aio.thread import AioThread, asyncio_loop, result_of
from runtime.aio.token_stream import TokenStream
from runtime.bridge.deferred_opening import evaluate_here
from runtime.bridge.handles import Commits, RuntimeHandle, own
from runtime.bridge.many_prompts import MergedSource, begin_many
from runtime.engine import runtime as engine
from runtime.generation import token_stream
from runtime.generation.many_prompts import ManyPrompt
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile, complete
from runtime.loading.model_sources import Device, Source

T = TypeVar("T")


class Runtime(RuntimeHandle[AioThread[engine.Runtime]]):
    """Two models at work, for one asyncio loop; made by `runtime.aio.open`."""

    def stream(self, prompt: Prompt, **settings: Any) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`.

        Raises: before any model work; as there, but that the prompt is looked at off the loop, since tokenising a long
            one takes time: a `PromptError` comes out of `async with`, `opened` or the first `__anext__`. And:
            WrongEventLoopError: this is not the loop that the runtime was opened in.
        """
        self._check(settings)
        return self._begin(partial(self._runtime.stream, own(prompt), **settings))

    async def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the generation; what was generated until then is lost.
        """
        return await complete(cast(Any, self.stream(prompt, **settings)))

    def generate_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> Completions:
        """Generate a whole text for each of many prompts.

        Args, Returns: as `runtime.Runtime.generate_many`, for asyncio.

        Raises: as `stream`; what is wrong with a prompt, or settings of its own, comes when the completions are
            waited for.
        """
        self._check(settings)
        begin = begin_many(self._runtime.generate_many, prompts, max_concurrent, settings)
        return Completions(self._relay(lambda: MergedSource(begin())), self._check_loop)

    def stream_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all of them as they come.

        Args, Returns: as `runtime.Runtime.stream_many`, for asyncio.

        Raises: as `generate_many`.
        """
        self._check(settings)
        begin = begin_many(self._runtime.stream_many, prompts, max_concurrent, settings)
        return TokenStreams(self._relay(lambda: MergedSource(begin())), self._check_loop)

    def conversation(self, system: str | None = None, *, thinking: bool | None = None, **settings: Any) -> Conversation:
        """Begin a conversation; nothing is generated until something is said.

        Args, Returns: as `runtime.Runtime.conversation`, for asyncio.

        Raises: as `stream`; what the chat template does not take comes out of the first turn.
        """
        self._check(settings)
        make = partial(self._runtime.conversation, system, thinking=thinking, **settings)
        return Conversation(self, make)

    async def load(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> Conversation:
        """A conversation from a file of `Conversation.save`, of either kind, to go on with where it was left.

        Args, Raises: as `runtime.Runtime.load`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no conversation then.
        """
        made = await self._done_in_trio(partial(self._runtime.load, path, any_draft=any_draft, **settings))
        return Conversation(self, self._anew(made), made)

    async def load_stream(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> TokenStream:
        """A stream from a file of `TokenStream.save`, of either kind, to go on behind the last token that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no stream then.
        """
        made = await self._done_in_trio(partial(self._runtime.load_stream, path, any_draft=any_draft, **settings))
        stream = self._begin(lambda: made)
        await stream.opened()
        return stream

    async def attach_draft(self, draft: Source = MISSING, *, draft_device: Device = None, **unknown: Any) -> None:
        """Load a draft model into the open runtime; streams that begin afterwards are drafted.

        Args, Raises, Cancellation: as `runtime.Runtime.attach_draft`.
        """
        evaluate_here(draft)
        await self._done_in_trio(partial(self._runtime.attach_draft, draft, draft_device=draft_device, **unknown))

    async def detach_draft(self) -> None:
        """Let go of the draft model, its memory and its thread; see `runtime.Runtime.detach_draft`.

        Cancellation: it is detached in any case, and the cancellation strikes once that is done.
        """
        await self._done_in_trio(self._runtime.detach_draft)

    async def aclose(self) -> None:
        """Close the runtime: end every stream, wait for the forward passes that are running (at most one a model), and
        join the threads. Closing twice is closing once; whoever closes it a second time waits for the same end.

        Raises: WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: the runtime is closed in any case; the cancellation strikes once that is done.
        """
        self._check_loop()
        await self._thread.end()

    def _begin(self, open_stream: Callable[[], token_stream.TokenStream]) -> TokenStream:
        """Relay what a stream gives that is opened in trio's thread."""
        return TokenStream(
            self._relay(lambda: Commits(open_stream())), self._nothing_yet, self._check_loop, self._done_in_trio
        )

    async def _done_in_trio(self, do: Callable[[], Awaitable[T]]) -> T:
        self._check_loop()
        return await result_of(self._errand(do))

    def _check(self, settings: dict[str, Any]) -> None:
        self._check_loop()
        self._runtime._check_asked(settings)

    def _check_loop(self) -> None:
        if asyncio_loop() is not self._thread.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )
