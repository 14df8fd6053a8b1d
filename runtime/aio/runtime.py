"""What a program on asyncio holds: a runtime, whose models are at work elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Never, TypeVar, Unpack, cast

from protocol.errors import WrongEventLoopError
from protocol.settings import MISSING, SettingsLike, with_overrides
from protocol.settings_keywords import SettingsArguments
from runtime.aio.conversation import Conversation
from runtime.aio.many_prompts import Completions, TokenStreams
from runtime.aio.thread import AioThread, asyncio_loop, result_of
from runtime.aio.token_stream import TokenStream
from runtime.bridge.deferred_opening import evaluate_here
from runtime.bridge.handles import Commits, RuntimeHandle, own
from runtime.bridge.many_prompts import MergedSource, begin_many
from runtime.engine import runtime as engine
from runtime.generation import token_stream
from runtime.generation.conversation import turn_settings
from runtime.generation.many_prompts import ManyPrompt
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile, complete
from runtime.loading.model_sources import Device, Source

T = TypeVar("T")


class Runtime(RuntimeHandle[AioThread[engine.Runtime]]):
    """Two models at work, for one asyncio loop; made by `runtime.aio.open`."""

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`.

        Raises: before any model work; as there, but that the prompt is looked at off the loop, since tokenising a long
            one takes time: a `PromptError` comes out of `async with`, `opened` or the first `__anext__`. And:
            WrongEventLoopError: this is not the loop that the runtime was opened in.
        """
        keywords = with_overrides(settings, overrides)
        self._check(keywords)
        return self._begin(partial(self._runtime.stream, own(prompt), **keywords))

    async def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the generation; what was generated until then is lost.
        """
        return await complete(cast(Any, self.stream(prompt, settings, **overrides)))

    def generate_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[SettingsArguments],
    ) -> Completions:
        """Generate a whole text for each of many prompts.

        Args, Returns: as `runtime.Runtime.generate_many`, for asyncio.

        Raises: as `stream`; what is wrong with a prompt, or settings of its own, comes when the completions are
            waited for.
        """
        keywords = with_overrides(settings, overrides)
        self._check(keywords)
        begin = begin_many(self._runtime.generate_many, prompts, max_concurrent, keywords)
        return Completions(self._relay(lambda: MergedSource(begin())), self._check_loop)

    def stream_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[SettingsArguments],
    ) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all of them as they come.

        Args, Returns: as `runtime.Runtime.stream_many`, for asyncio.

        Raises: as `generate_many`.
        """
        keywords = with_overrides(settings, overrides)
        self._check(keywords)
        begin = begin_many(self._runtime.stream_many, prompts, max_concurrent, keywords)
        return TokenStreams(self._relay(lambda: MergedSource(begin())), self._check_loop)

    def conversation(
        self,
        system: str | None = None,
        settings: SettingsLike | None = None,
        *,
        thinking: bool | None = None,
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Begin a conversation; nothing is generated until something is said.

        Args, Returns: as `runtime.Runtime.conversation`, for asyncio.

        Raises: as `stream`; what the chat template does not take comes out of the first turn.
        """
        keywords = turn_settings(settings, overrides)
        self._check(keywords)
        make = partial(self._runtime.conversation, system, thinking=thinking, **keywords)
        return Conversation(self, make)

    async def load(
        self, path: SessionFile, *, any_draft: bool = False, **overrides: Unpack[SettingsArguments]
    ) -> Conversation:
        """A conversation from a file of `Conversation.save`, of either kind, to go on with where it was left.

        Args, Raises: as `runtime.Runtime.load`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no conversation then.
        """
        made = await self._done_in_trio(partial(self._runtime.load, path, any_draft=any_draft, **overrides))
        return Conversation(self, self._anew(made), made)

    async def load_stream(
        self, path: SessionFile, *, any_draft: bool = False, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """A stream from a file of `TokenStream.save`, of either kind, to go on behind the last token that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no stream then.
        """
        made = await self._done_in_trio(partial(self._runtime.load_stream, path, any_draft=any_draft, **overrides))
        stream = self._begin(lambda: made)
        await stream.opened()
        return stream

    async def attach_draft(self, draft: Source = MISSING, *, draft_device: Device = None, **unknown: Never) -> None:
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
        self._runtime.check_settings(settings)

    def _check_loop(self) -> None:
        if asyncio_loop() is not self._thread.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )
