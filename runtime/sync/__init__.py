"""Outrider without an event loop: the same runtime, for scripts, notebooks and plain threads.

with runtime.open_sync("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio, and everything that works on it, runs in a thread of its own, so that this can be used where an event loop is
running that is not ours, as in a notebook. It blocks that loop, as anything does there that takes its time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import trio

from protocol.errors import WrongEventLoopError
from protocol.settings import MISSING, settings_from
from runtime.bridge.deferred_opening import deferred_opening, evaluate_here
from runtime.bridge.handles import Commits, RuntimeHandle, own
from runtime.bridge.many_prompts import MergedSource, begin_many
from runtime.engine import runtime as engine
from runtime.engine.opening import OPTIONS
from runtime.generation import token_stream
from runtime.generation.many_prompts import ManyPrompt
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SessionFile, completion_of
from runtime.loading.model_sources import Device, Source
from runtime.sync.conversation import Conversation
from runtime.sync.many_prompts import TokenStreams
from runtime.sync.thread import SyncThread, result_of
from runtime.sync.token_stream import TokenStream

__all__ = ["Conversation", "Runtime", "TokenStream", "TokenStreams", "generate_sync", "open_sync"]

T = TypeVar("T")


def open_sync(target: Source = MISSING, draft: Source | None = None, **options: Any) -> Runtime:
    """`runtime.open` without an event loop: load the models, and keep them at work until the runtime is closed.

    `with runtime.open_sync(…) as rt` closes it as the block is left; after `rt = runtime.open_sync(…)`, `rt.close()`
    does, or dropping the last reference to it and to its streams and conversations.

    Args: as for `runtime.open`. A trace function and logits processors are called in other threads.

    Returns: a `Runtime`, which any thread may use, several at once.

    Raises: as `runtime.open`, and:
        WrongEventLoopError: an event loop is running here, which this would block. A notebook's is let pass, since
            whoever runs a cell waits for it.

    Interrupting: a Ctrl-C while loading is raised once the models are let go of, after the load.
    """
    check_no_event_loop("open_sync")
    make = deferred_opening(target, draft, options, handle=__name__)
    thread: SyncThread[engine.Runtime] = SyncThread(make, "outrider-trio")
    return Runtime(thread, thread.start())


def generate_sync(
    prompt: Prompt, *, target: Source = MISSING, draft: Source | None = None, **keywords: Any
) -> Completion:
    """Load the models, generate one text, and let go of everything again.

    Args:
        prompt: text, token ids or chat messages.
        target, draft: as for `runtime.open`.
        **keywords: options of `runtime.open` and settings of `Runtime.stream`.

    Raises: as those two, and `WrongEventLoopError` as `open_sync`.

    Interrupting: Ctrl-C raises KeyboardInterrupt once the forward pass that is running has finished.
    """
    check_no_event_loop("generate_sync")
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    settings = {name: value for name, value in keywords.items() if name not in OPTIONS}
    settings_from(settings)  # before the models are loaded
    with open_sync(target, draft, **options) as runtime:
        return runtime.generate(prompt, **settings)


class Runtime(RuntimeHandle[SyncThread[engine.Runtime]]):
    """Two models at work, for plain threads; made by `open_sync`. A context manager."""

    def stream(self, prompt: Prompt, **settings: Any) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`, for plain threads.

        Raises: as there, and:
            WrongEventLoopError: this is a trio program, whose event loop would stand still.

        Interrupting: a Ctrl-C ends the generation.
        """
        self._check(settings)
        return self._begin(partial(self._runtime.stream, own(prompt), **settings))

    def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Interrupting: a Ctrl-C ends the generation; what was generated until then is lost.
        """
        return self._complete(self.stream(prompt, **settings))

    def generate_many(
        self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any
    ) -> list[Completion]:
        """Generate a whole text for each of many prompts.

        Args: as `runtime.Runtime.generate_many`.

        Returns: the completions, in the order of the prompts, once all are finished.

        Raises: as there; the first generation that fails ends the others.

        Interrupting: a Ctrl-C ends all of them; what was generated until then is lost.
        """
        self._check(settings)
        begin = begin_many(self._runtime.generate_many, prompts, max_concurrent, settings)

        async def complete_all() -> list[Completion]:
            return await begin()

        return self._done_in_trio(complete_all)

    def stream_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all of them as they come.

        Args: as `runtime.Runtime.generate_many`.

        Returns: an iterator over pairs (index of the prompt, token), and a context manager.

        Raises: as `runtime.Runtime.generate_many`, and:
            WrongEventLoopError: this is a trio program, whose event loop would stand still.

        Interrupting: a Ctrl-C ends all generations.
        """
        self._check(settings)
        begin = begin_many(self._runtime.stream_many, prompts, max_concurrent, settings)
        return TokenStreams(self._relay(lambda: MergedSource(begin())), self)

    def conversation(self, system: str | None = None, *, thinking: bool | None = None, **settings: Any) -> Conversation:
        """Begin a conversation; nothing is generated until something is said.

        Args, Returns: as `runtime.Runtime.conversation`, for plain threads.

        Raises: as there.
        """
        self._check(settings)

        async def make() -> Any:
            return self._runtime.conversation(system, thinking=thinking, **settings)

        return Conversation(self, self._done_in_trio(make))

    def load(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> Conversation:
        """A conversation from a file of `Conversation.save`, of any kind, to go on with where it was left.

        Args, Raises: as `runtime.Runtime.load`.

        Interrupting: a Ctrl-C waits for the job that is running; there is no conversation then.
        """
        made = self._done_in_trio(partial(self._runtime.load, path, any_draft=any_draft, **settings))
        return Conversation(self, made)

    def load_stream(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> TokenStream:
        """A stream from a file of `TokenStream.save`, of any kind, to go on behind the last token that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`.

        Interrupting: a Ctrl-C waits for the job that is running; there is no stream then.
        """
        made = self._done_in_trio(partial(self._runtime.load_stream, path, any_draft=any_draft, **settings))
        return self._begin(lambda: made)

    def attach_draft(self, draft: Source = MISSING, *, draft_device: Device = None, **unknown: Any) -> None:
        """Load a draft model into the open runtime; streams that begin afterwards are drafted.

        Args, Raises: as `runtime.Runtime.attach_draft`.

        Interrupting: a Ctrl-C waits for the load; the runtime is as it was.
        """
        evaluate_here(draft)
        self._done_in_trio(partial(self._runtime.attach_draft, draft, draft_device=draft_device, **unknown))

    def detach_draft(self) -> None:
        """Let go of the draft model, its memory and its thread; see `runtime.Runtime.detach_draft`.

        Interrupting: it is detached in any case.
        """
        self._done_in_trio(self._runtime.detach_draft)

    def close(self) -> None:
        """Close the runtime: end every stream, wait for the forward passes that are running (at most one a model), and
        join the threads. Closing twice is closing once; whoever closes it a second time waits for the same end.

        Raises: WrongEventLoopError: this is a trio program, whose event loop would stand still.

        Interrupting: the runtime is closed in any case; a Ctrl-C is raised once that is done.
        """
        _check_not_in_trio("close()")
        self._thread.end()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.end()

    def __del__(self) -> None:
        self._thread.stop()

    def _begin(self, open_stream: Callable[[], token_stream.TokenStream]) -> TokenStream:
        """Relay what a stream gives that is opened in trio's thread."""
        return TokenStream(self._relay(lambda: Commits(open_stream())), self._nothing_yet, self)

    def _complete(self, stream: TokenStream) -> Completion:
        with stream:
            return completion_of(cast(Any, stream), list(stream))

    def _done_in_trio(self, do: Callable[[], Awaitable[T]]) -> T:
        _check_not_in_trio("this")
        return result_of(self._errand(do))

    def _check(self, settings: dict[str, Any]) -> None:
        _check_not_in_trio("this")
        self._runtime._check_asked(settings)


def check_no_event_loop(what: str) -> None:
    """Raises: WrongEventLoopError: an event loop is running in this thread, and `what` would block it."""
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


def _check_not_in_trio(what: str) -> None:
    # The trio of ours included: what waits for it in its own thread, such as a trace function, would wait for ever.
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoopError(
            f"{what} would block this trio program; use `async with runtime.open(…) as rt` and `await rt.generate(…)`"
        )
