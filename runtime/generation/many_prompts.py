"""Many prompts at a time: checks of the prompts, and an iterator over their completions."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
)
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar, cast

import attrs
import outcome
import trio

from protocol.errors import PromptError, RuntimeBrokenError, RuntimeClosedError, StreamBusyError
from protocol.messages import Open
from protocol.reprs import shown
from protocol.settings import Settings, SettingsLike, keywords_of
from protocol.validation import check_integer, must_be
from runtime.generation.text import Prompt
from runtime.generation.token_stream import Completion, SingleConsumer, TokenStream, complete
from runtime.generation.tool_calls.tools import Tools

CLOSED = "these generations were closed, or their runtime was; begin others with generate_many()"

ManyPrompt = Prompt | tuple[Prompt, SettingsLike]
"""One of many prompts, alone or with its own settings."""

ManyPrompts = Iterable[ManyPrompt] | AsyncIterable[ManyPrompt]

OnError = Literal["raise", "return"]

# The beginning of a generation: the message that opens its session, and the tools that the model may call.
Generation = tuple[Open, Tools | None]
# Checks the prompt at an index. Raises PromptError or SettingsError; the message has the index.
CheckPrompt = Callable[[int, Any], Generation]

T = TypeVar("T")
C = TypeVar("C", bound=Completion | Exception)


def is_list(prompts: Any) -> bool:
    """Whether a value can be a list of prompts. Text and a single message are iterable too, but are one prompt."""
    return hasattr(prompts, "__iter__") and not isinstance(prompts, (str, bytes, Mapping))


def is_async(prompts: Any) -> bool:
    """Whether a value is an async iterable."""
    return hasattr(prompts, "__aiter__")


def with_settings(prompt: ManyPrompt) -> tuple[Prompt, Mapping[str, Any]]:
    """A prompt, and its own settings."""
    # A tuple may also be two chat messages; then its first item is a mapping as well.
    if isinstance(prompt, tuple) and len(prompt) == 2:
        alone, settings = prompt
        if isinstance(settings, Settings):
            return cast(Prompt, alone), keywords_of(settings, "settings")
        if isinstance(settings, Mapping) and not isinstance(alone, Mapping):
            return cast(Prompt, alone), settings
    return cast(Prompt, prompt), {}


def check_arguments(max_concurrent: int, on_error: str) -> None:
    """Raises: SettingsError: an argument of `generate_many` is out of its range."""
    check_integer("max_concurrent", max_concurrent, 1)
    if on_error not in ("raise", "return"):
        raise must_be("on_error", '"raise" or "return"', on_error)


class Completions(SingleConsumer, Generic[C]):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `await` gives the list of them, in the order of the prompts. `async for` gives pairs (index of the prompt,
    completion), each as soon as it is finished. Use one or the other, in one task. With `on_error="return"`, the error
    of a generation is given in the place of its completion.

    The generations start as soon as this object exists. If nobody takes the finished completions, up to
    `max_concurrent` of them are kept, and then no further generation begins, and no further prompt is taken from an
    async iterable. One task iterates over it, so an async generator may have a timeout, a cancel scope or a nursery
    open around its `yield`. One that is left early is closed.

    Failure: unless errors are returned, the first generation that fails cancels the others, as does a runtime that
    breaks or is closed, and an iterable that raises. The error is raised once the completions that were finished before
    have been given. A note on the error names the prompt.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `await` or `__anext__`, and dropping
    the last reference (which is what `break` does) all end every generation. Each returns at once; the models are
    free after the forward pass that is running.

    Attributes:
        num_prompts: the number of prompts; None for an async iterable.
    """

    _busy = "another task is waiting for the next completion; each is given once, to one task"

    _gathered: list[C] | None = None
    _is_gathering = False
    _num_finished = 0  # completions that were given
    _is_over = False  # all were given

    def __init__(
        self,
        prompts: ManyPrompts,
        check: CheckPrompt,
        begin: Callable[[Open, Tools | None], TokenStream],
        max_concurrent: int,
        on_error: OnError,
        *,
        start_soon: Callable[..., None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Runtime.generate_many`; `start_soon` starts a task that outlives the caller's, and `run_soon` calls
        a function in trio's thread, from any thread.

        Raises: PromptError, SettingsError: `prompts` is no list of prompts; with "raise" also if one is invalid.
        """
        self.num_prompts: int | None = None
        if is_async(prompts):
            items = aiter(cast(AsyncIterable[ManyPrompt], prompts))
        elif is_list(prompts):
            listed: list[Any] = list(cast(Iterable[ManyPrompt], prompts))
            if on_error == "raise":
                # Before any model work, and not again.
                listed = [check(index, prompt) for index, prompt in enumerate(listed)]
                check = _checked_already
            items, self.num_prompts = _one_by_one(listed), len(listed)
        else:
            raise PromptError(
                f"prompts must be a sequence of prompts, got {shown(prompts)}; for a single one use generate()"
            )
        finished, self._finished = trio.open_memory_channel[tuple[int, Any]](max_concurrent)
        # Its tasks must not refer to this object: its last reference could then never be dropped.
        self._work = _Work(begin, check, on_error == "return", items, finished, trio.Semaphore(max_concurrent))
        self._run_soon = run_soon
        start_soon(self._work.run)

    def __repr__(self) -> str:
        return f"<outrider Completions, {self.state}>"

    @property
    def state(self) -> str:
        """How far the generations have come, for a representation."""
        how = "over" if self._is_over else "closed" if self._is_closed else "under way"
        of = "" if self.num_prompts is None else f" of {self.num_prompts}"
        return f"{how}: {self._num_finished}{of} given"

    def __await__(self) -> Generator[Any, None, list[C]]:
        """All completions, in the order of the prompts. Awaiting again gives the same ones.

        Raises:
            StreamBusyError: they are being awaited, or given one by one, already.
            RuntimeClosedError: the runtime or this was closed before all were finished.
            RuntimeBrokenError, RewindError: the error of a stream, with a note that names the prompt.
            PromptError, SettingsError: a prompt or its settings are invalid; the message has its index.
            Exception: what the iterable of the prompts has raised.
        """
        return self.gather().__await__()

    async def __anext__(self) -> tuple[int, C]:
        """The next finished completion, with the index of its prompt.

        Raises: as when awaited; StopAsyncIteration: all have been given; StreamBusyError: another task is waiting for
            one, or for all of them.

        Cancellation: ends all generations.
        """
        if self._is_gathering and not self._has_ended_early:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")
        if (following := await self._receive(self._next_finished)) is None:
            raise StopAsyncIteration
        return following

    async def gather(self) -> list[C]:
        """As awaiting this."""
        if self._gathered is not None:
            await trio.lowlevel.checkpoint()
            return self._gathered
        is_taken = self._is_waiting or self._num_finished > 0 or self._is_gathering
        if is_taken and not self._has_ended_early:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        completions: dict[int, C] = {}
        while (following := await self._receive(self._next_finished)) is not None:
            index, completion = following
            completions[index] = completion
        self._gathered = [completions[index] for index in sorted(completions)]
        return self._gathered

    def __del__(self) -> None:
        if hasattr(self, "_work") and not self._is_closed:
            self._run_soon(self._work.scope.cancel)

    @property
    def _has_ended_early(self) -> bool:
        """Whether this was closed or has failed, so that the next call raises the reason."""
        return self._is_closed and not self._is_over

    async def _next_finished(self) -> tuple[int, C] | None:
        if self._is_over:
            await trio.lowlevel.checkpoint()
            return None
        if self._is_closed:
            raise self._work.error or RuntimeClosedError(CLOSED)
        try:
            following = await self._finished.receive()
        except trio.ClosedResourceError:
            raise RuntimeClosedError(CLOSED) from None  # by another task, while this one was waiting
        except trio.EndOfChannel:
            self._is_over = self._work.is_complete
            self.close()
        else:
            self._num_finished += 1
            return following
        # Outside of the handler, so that the channel's end is not shown as the context of the error.
        if self._is_over:
            return None
        raise self._work.error or RuntimeClosedError("the runtime was closed before all prompts were done")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._finished.close()
            self._work.scope.cancel()


async def _one_by_one(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


def _checked_already(_: int, generation: Any) -> Generation:
    return cast(Generation, generation)


@attrs.define(eq=False)
class _Work:
    """The generations: one task begins them, each once there is room, and each goes on in a task of its own."""

    _begin: Callable[[Open, Tools | None], TokenStream]
    _check: CheckPrompt
    _returns_errors: bool
    _prompts: AsyncIterator[Any]  # or their checked generations; only ever used in one task
    _finished: trio.MemorySendChannel[tuple[int, Any]]
    _room: trio.Semaphore  # for generations that may begin
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    error: Exception | None = attrs.field(init=False, default=None)  # of the first that failed, or of the iterable
    is_complete: bool = attrs.field(init=False, default=False)  # each prompt has its completion or its error
    _num_taken: int = attrs.field(init=False, default=0)

    # A Ctrl-C must interrupt the user's task and not this one.
    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        with self._finished, self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_prompts, nursery)
            self.is_complete = not self.scope.cancel_called

    @trio.lowlevel.enable_ki_protection
    async def _take_prompts(self, nursery: trio.Nursery) -> None:
        def give(prompt: Any) -> None:
            index = self._num_taken
            self._num_taken += 1
            # Begun here, and so in the order of the prompts.
            stream = outcome.capture(lambda: self._begin(*self._check(index, prompt)))
            nursery.start_soon(self._finish, index, stream)

        async def has_room() -> bool:
            await self._room.acquire()
            return True

        try:
            await feed(self._prompts, has_room, give, trio.Cancelled)
        except Exception as error:
            self._fail(error)
        except BaseExceptionGroup as group:
            cancelled, others = group.split(trio.Cancelled)
            if others is not None and not isinstance(others, Exception):
                raise
            if others is not None:
                self._fail(others)
            # Whatever has cancelled this task, the runtime must not end with it.
            self.scope.cancel()
            if cancelled is not None:
                raise cancelled from None
        except trio.Cancelled:
            self.scope.cancel()
            raise

    @trio.lowlevel.enable_ki_protection
    async def _finish(self, index: int, stream: outcome.Outcome[TokenStream]) -> None:
        # Any error is for the consumer; raised here, it would end the runtime.
        try:
            item: Any = await complete(stream.unwrap())
        except (RuntimeClosedError, RuntimeBrokenError) as error:
            return self._fail(error)
        except Exception as error:
            if not self._returns_errors:
                return self._fail(error, index)
            item = error
        with suppress(trio.BrokenResourceError):  # the consumer is gone
            await self._finished.send((index, item))
            self._room.release()

    def _fail(self, error: Exception, index: int | None = None) -> None:
        if self.error is not None:
            return
        self.error = error
        if index is not None:
            error.add_note(f"prompts[{index}] failed, and the generations for the others were cancelled")
        self.scope.cancel()


async def feed(
    items: AsyncIterator[T],
    wanted: Callable[[], Awaitable[bool]],
    give: Callable[[T], None],
    cancelled: type[BaseException],
) -> bool:
    """Give the items of an iterator, one for each `wanted`, and close a generator however this ends.

    An async generator may have a timeout, a cancel scope or a nursery open around its `yield`. They belong to the task
    that advances it, so a whole iteration needs one task, and that task must not open scopes of its own meanwhile. They
    also cancel this task where it waits between two items; the generator then gets the cancellation at its `yield`.

    Args:
        wanted: waits for the next item to be wanted; False ends this.
        cancelled: what a cancellation raises in the event loop.

    Returns: whether there are no more items.

    Raises: as the iterator, and `wanted`.
    """
    generator = items if isinstance(items, AsyncGenerator) else None
    held: list[T] = []
    try:
        while True:
            try:
                if not await wanted():
                    return False
            except cancelled as error:
                # One that goes on after its cancellation is cancelled again; once is enough.
                if generator is None or held:
                    raise
                held.append(await generator.athrow(error))
            else:
                give(held.pop() if held else await anext(items))
    except StopAsyncIteration:
        return True
    finally:
        if generator is not None:
            try:
                await generator.aclose()
            except BaseExceptionGroup as group:
                # Nurseries and task groups wrap what ends the generator.
                if (others := group.split(GeneratorExit)[1]) is not None:
                    raise others from None
