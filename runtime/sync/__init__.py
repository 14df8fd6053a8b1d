"""Outrider without an event loop: the same runtime, for scripts, notebooks and plain threads.

with runtime.open_sync("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio and the models run in threads of their own, so that this also works where another event loop is running, as in a
notebook. It blocks that loop, as any long computation in a notebook does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Never, Unpack

import trio

from protocol.argument_aliases import MISSING
from protocol.errors import WrongEventLoopError
from protocol.scores import Score
from protocol.settings import SettingsLike, settings_from, with_overrides
from protocol.settings_keywords import ScoreArguments, SettingsArguments
from runtime.bridge.handles import RuntimeHandle, copy_prompt
from runtime.bridge.many_prompts import prepare_generations
from runtime.bridge.opener import evaluate_on_this_thread, make_opener
from runtime.engine.open_options import OpenArguments, OpenArgumentsAndSettings
from runtime.engine.opening import OPTIONS
from runtime.engine.runtime import Runtime as TrioRuntime
from runtime.generation.conversation import Conversation as TrioConversation
from runtime.generation.conversation import turn_settings
from runtime.generation.many_prompts import ManyPrompt
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile
from runtime.generation.tool_calls.functions import Functions
from runtime.generation.tool_calls.tools import StreamArguments, split_tools
from runtime.loading.model_sources import Source
from runtime.sync.bridge import SyncBridge, check_not_in_trio
from runtime.sync.conversation import Conversation
from runtime.sync.many_prompts import TokenStreams
from runtime.sync.thread import SyncThread
from runtime.sync.token_stream import TokenStream, complete

__all__ = ["Conversation", "Runtime", "TokenStream", "TokenStreams", "generate_sync", "open_sync"]


def open_sync(target: Source = MISSING, draft: Source | None = None, **options: Unpack[OpenArguments]) -> Runtime:
    """`runtime.open` without an event loop: load the models, and serve them until the runtime is closed.

    `with runtime.open_sync(…) as rt` closes the runtime at the end of the block. `rt = runtime.open_sync(…)` leaves
    that to `rt.close()`, or to dropping the last reference to the runtime, its streams and its conversations.

    Args: as for `runtime.open`. A trace function and logits processors are called in other threads.

    Returns: a `Runtime`, which several threads may use at once.

    Raises: as `runtime.open`, and:
        WrongEventLoopError: an event loop is running in this thread, and would be blocked. A notebook's loop is an
            exception: the user of a cell waits for it in any case.

    Interrupting: a Ctrl-C while loading is raised after the load, once the models are released.
    """
    check_no_event_loop("open_sync")
    open_runtime = make_opener(target, draft, dict(options), handle_module=__name__)
    thread: SyncThread[TrioRuntime] = SyncThread(open_runtime, "outrider-trio")
    return Runtime(SyncBridge(thread, thread.start()))


def generate_sync(
    prompt: Prompt,
    settings: SettingsLike | None = None,
    *,
    target: Source = MISSING,
    draft: Source | None = None,
    **keywords: Unpack[OpenArgumentsAndSettings],
) -> Completion:
    """Load the models, generate one text, and release the models.

    Args:
        prompt: text, token ids or chat messages.
        settings: as for `Runtime.stream`.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open`, and settings, each of which replaces that of `settings`.

    Raises: as those two, and `WrongEventLoopError` as `open_sync`.

    Interrupting: a Ctrl-C is raised once the running forward pass has finished.
    """
    check_no_event_loop("generate_sync")
    options: dict[str, Any] = {name: value for name, value in keywords.items() if name in OPTIONS}
    overrides: dict[str, Any] = {name: value for name, value in keywords.items() if name not in OPTIONS}
    settings_from(with_overrides(settings, overrides))  # before the models are loaded
    with open_sync(target, draft, **options) as runtime:
        return runtime.generate(prompt, settings, **overrides)


class Runtime(RuntimeHandle[SyncBridge]):
    """A target and a draft model at work, for plain threads: a context manager, made by `open_sync`."""

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`, for plain threads.

        Raises: as there, and:
            WrongEventLoopError: trio is running in this thread, and would be blocked.

        Interrupting: a Ctrl-C ends the generation.
        """
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        begin = partial(self._bridge.runtime.stream, copy_prompt(prompt), **keywords, **tools)
        return TokenStream(self._bridge, begin)

    def score(self, prompt: Prompt, continuation: str | Sequence[int], **options: Unpack[ScoreArguments]) -> Score:
        """The log-probability of each token of a continuation; see `runtime.Runtime.score`.

        Raises: as there, and:
            WrongEventLoopError: trio is running in this thread, and would be blocked.

        Interrupting: a Ctrl-C strikes between two passes.
        """
        score = partial(self._bridge.runtime.score, **options)
        return self._bridge.call(partial(score, copy_prompt(prompt), continuation))

    def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; the errors of a running stream are raised here too.

        Interrupting: a Ctrl-C ends the generation; the text generated so far is lost.
        """
        return complete(self.stream(prompt, settings, **overrides))

    def generate_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[StreamArguments],
    ) -> list[Completion]:
        """Generate a whole text for each of many prompts.

        Args: as `runtime.Runtime.generate_many`.

        Returns: the completions, in the order of the prompts, once all are finished.

        Raises: as there; the first generation that fails ends the others.

        Interrupting: a Ctrl-C ends all generations; the texts generated so far are lost.
        """
        tools, keywords = split_tools(overrides)
        keywords = with_overrides(settings, keywords)
        self._bridge.check_settings(keywords)
        begin = prepare_generations(self._bridge.runtime.generate_many, prompts, max_concurrent, {**keywords, **tools})

        async def complete_all() -> list[Completion]:
            return await begin()

        return self._bridge.call(complete_all)

    def stream_many(
        self,
        prompts: Iterable[ManyPrompt],
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        **overrides: Unpack[StreamArguments],
    ) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all texts as they come.

        Args: as `runtime.Runtime.generate_many`.

        Returns: an iterator over pairs (index of the prompt, token), and a context manager.

        Raises: as `runtime.Runtime.generate_many`, and:
            WrongEventLoopError: trio is running in this thread, and would be blocked.

        Interrupting: a Ctrl-C ends all generations.
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

        Args, Returns: as `runtime.Runtime.conversation`, for plain threads; functions are called in the thread that
            uses the conversation.

        Raises: as there, and:
            SettingsError: a function is async, and nothing would await it.
        """
        keywords = turn_settings(settings, overrides)
        self._bridge.check_settings(keywords)
        functions = Functions(tools, may_be_async=False)

        async def make() -> TrioConversation:
            return self._bridge.runtime.conversation(system, thinking=thinking, tools=functions.listed, **keywords)

        return Conversation(self._bridge, functions, self._bridge.call(make))

    def load(
        self,
        path: SessionFile,
        *,
        any_draft: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Load a conversation from a file of `Conversation.save`, written here or elsewhere, and continue it.

        Args, Raises: as `runtime.Runtime.load` and `conversation`.

        Interrupting: a Ctrl-C waits for the running job; no conversation is returned.
        """
        functions = Functions(tools, may_be_async=False)
        load = partial(self._bridge.runtime.load, path, any_draft=any_draft, tools=functions.listed, **overrides)
        return Conversation(self._bridge, functions, self._bridge.call(load))

    def load_stream(
        self, path: SessionFile, *, any_draft: bool = False, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Load a stream from a file of `TokenStream.save`, written here or elsewhere; it continues after the last token
        that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`.

        Interrupting: a Ctrl-C waits for the running job; no stream is returned.
        """
        loaded = self._bridge.call(partial(self._bridge.runtime.load_stream, path, any_draft=any_draft, **overrides))
        return TokenStream(self._bridge, lambda: loaded)

    def attach_draft(self, draft: Source = MISSING, **unknown: Never) -> None:
        """Load a draft model into the open runtime. Streams that begin afterwards use it.

        Args, Raises: as `runtime.Runtime.attach_draft`.

        Interrupting: a Ctrl-C waits for the load; the runtime stays as it was.
        """
        evaluate_on_this_thread(draft)
        attach = partial(self._bridge.runtime.attach_draft, draft, **unknown)
        self._bridge.call(attach)

    def detach_draft(self) -> None:
        """Release the draft model, its memory and its thread; see `runtime.Runtime.detach_draft`.

        Interrupting: the draft model is detached in any case.
        """
        self._bridge.call(self._bridge.runtime.detach_draft)

    def close(self) -> None:
        """Close the runtime: end every stream, wait for the running forward passes (at most one a model), and join the
        threads. Closing twice is closing once; a second call waits for the first.

        Raises: WrongEventLoopError: trio is running in this thread, and would be blocked.

        Interrupting: the runtime is closed in any case; a Ctrl-C is raised after that.
        """
        check_not_in_trio("close()")
        self._bridge.thread.stop_and_join()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bridge.thread.stop_and_join()


def check_no_event_loop(what: str) -> None:
    """Raises: WrongEventLoopError: an event loop other than a notebook's is running here, and `what` would block it."""
    if trio.lowlevel.in_trio_run():
        name, module = "trio", "runtime"
    else:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if "ipykernel" in sys.modules:
            return
        name, module = "asyncio", "runtime.aio"
    raise WrongEventLoopError(
        f"{what} would block the event loop that is running here, {name}'s; write instead: "
        f"async with {module}.open(target, draft) as rt: completion = await rt.generate(prompt)"
    )
