"""A runtime for asyncio, whose models work in the threads of a trio loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Never, Unpack, cast

from protocol.argument_aliases import MISSING
from protocol.scores import Score
from protocol.settings import SettingsLike, with_overrides
from protocol.settings_keywords import ScoreArguments, SettingsArguments
from runtime.aio.bridge import AioBridge
from runtime.aio.conversation import Conversation
from runtime.aio.many_prompts import Completions, TokenStreams
from runtime.aio.token_stream import TokenStream
from runtime.bridge.handles import RuntimeHandle, copy_prompt
from runtime.bridge.many_prompts import prepare_generations
from runtime.bridge.opener import evaluate_on_this_thread
from runtime.generation.conversation import turn_settings
from runtime.generation.many_prompts import ManyPrompt
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile, complete
from runtime.generation.tool_calls.functions import Functions
from runtime.generation.tool_calls.tools import StreamArguments, split_tools
from runtime.loading.model_sources import Source


class Runtime(RuntimeHandle[AioBridge]):
    """A target and a draft model at work, for one asyncio loop; made by `runtime.aio.open`."""

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`.

        Raises: as there, before any model work. But the prompt is checked off the loop, since tokenising a long prompt
            takes time: `async with`, `opened` or the first `__anext__` raises its `PromptError`. And:
            WrongEventLoopError: this is not the loop that the runtime was opened in.
        """
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        begin = partial(self._bridge.runtime.stream, copy_prompt(prompt), **keywords, **tools)
        return TokenStream(self._bridge, begin)

    async def score(
        self, prompt: Prompt, continuation: str | Sequence[int], **options: Unpack[ScoreArguments]
    ) -> Score:
        """The log-probability of each token of a continuation; see `runtime.Runtime.score`.

        Raises: as there, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: strikes between two passes.
        """
        score = partial(self._bridge.runtime.score, **options)
        return await self._bridge.call(partial(score, copy_prompt(prompt), continuation))

    async def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Cancellation: ends the generation; the text generated so far is lost.
        """
        return await complete(cast(Any, self.stream(prompt, settings, **overrides)))

    def generate_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[StreamArguments],
    ) -> Completions:
        """Generate a whole text for each of many prompts.

        Args, Returns: as `runtime.Runtime.generate_many`, for asyncio.

        Raises: as `stream`. An error in a prompt, or in settings of its own, is raised when the completions are
            awaited.
        """
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        begin = prepare_generations(self._bridge.runtime.generate_many, prompts, max_concurrent, {**keywords, **tools})
        return Completions(self._bridge, begin)

    def stream_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[StreamArguments],
    ) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all texts as they come.

        Args, Returns: as `runtime.Runtime.stream_many`, for asyncio.

        Raises: as `generate_many`.
        """
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        begin = prepare_generations(self._bridge.runtime.stream_many, prompts, max_concurrent, {**keywords, **tools})
        return TokenStreams(self._bridge, begin)

    def conversation(
        self,
        system: str | None = None,
        settings: SettingsLike | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Begin a conversation; nothing is generated before the first turn.

        Args, Returns: as `runtime.Runtime.conversation`, for asyncio; see `Conversation.call_tools` for where functions
            are called.

        Raises: as `stream`. What the chat template does not accept is an error of the first turn.
        """
        keywords = turn_settings(settings, overrides)
        self._bridge.check_settings(keywords)
        functions = Functions(tools)
        make = partial(self._bridge.runtime.conversation, system, thinking=thinking, tools=functions.listed, **keywords)
        return Conversation(self._bridge, functions, make)

    async def load(
        self,
        path: SessionFile,
        *,
        any_draft: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Load a conversation from a file of `Conversation.save`, written here or in trio, and continue it.

        Args, Raises: as `runtime.Runtime.load`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the running job; no conversation is returned.
        """
        functions = Functions(tools)
        load = partial(self._bridge.runtime.load, path, any_draft=any_draft, tools=functions.listed, **overrides)
        loaded = await self._bridge.call(load)
        return Conversation(self._bridge, functions, loaded.make_new, loaded)

    async def load_stream(
        self, path: SessionFile, *, any_draft: bool = False, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Load a stream from a file of `TokenStream.save`, written here or in trio; it continues after the last token
        that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the running job; no stream is returned.
        """
        load = partial(self._bridge.runtime.load_stream, path, any_draft=any_draft, **overrides)
        loaded = await self._bridge.call(load)
        stream = TokenStream(self._bridge, lambda: loaded)
        await stream.opened()
        return stream

    async def attach_draft(self, draft: Source = MISSING, **unknown: Never) -> None:
        """Load a draft model into the open runtime. Streams that begin afterwards use it.

        Args, Raises, Cancellation: as `runtime.Runtime.attach_draft`.
        """
        evaluate_on_this_thread(draft)
        attach = partial(self._bridge.runtime.attach_draft, draft, **unknown)
        await self._bridge.call(attach)

    async def detach_draft(self) -> None:
        """Release the draft model, its memory and its thread; see `runtime.Runtime.detach_draft`.

        Cancellation: the draft model is detached in any case; the cancellation is raised after that.
        """
        await self._bridge.call(self._bridge.runtime.detach_draft)

    async def aclose(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing twice is closing once; a second call waits for the first.

        Raises: WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: the runtime is closed in any case; the cancellation is raised after that.
        """
        self._bridge.check_loop()
        await self._bridge.thread.stop_and_join()
