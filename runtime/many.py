"""Many prompts at a time: their completions, in the prompts' order or as they finish."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import trio

from protocol.errors import PromptError, RuntimeBrokenError, RuntimeClosedError, SettingsError, StreamBusyError
from protocol.messages import Open
from protocol.reprs import shown
from runtime.sources import check_integer
from runtime.streaming import Completion
from runtime.text import Prompt

# A prompt, alone or with settings of its own by name.
ManyPrompt = Prompt | tuple[Prompt, Mapping[str, Any]]

_CLOSED = "these generations were closed; begin others with generate_many()"


def check_max_concurrent(value: Any) -> None:
    """See `Runtime.generate_many`.

    Raises: SettingsError: it is no whole number of at least 1.
    """
    check_integer("max_concurrent", value, 1)


def is_list(prompts: Any) -> bool:
    """Whether these can be many prompts; text and a single message can be gone through too, and are one."""
    return hasattr(prompts, "__iter__") and not isinstance(prompts, (str, bytes, Mapping))


def with_settings(prompt: ManyPrompt) -> tuple[Prompt, Mapping[str, Any]]:
    """A prompt, and the settings of its own."""
    # Two chat messages may stand in a tuple too: then the first is a mapping as well.
    if isinstance(prompt, tuple) and len(prompt) == 2:
        own, settings = prompt
        if isinstance(settings, Mapping) and not isinstance(own, Mapping):
            return cast(Prompt, own), settings
    return cast(Prompt, prompt), {}


def check_each(prompts: Iterable[ManyPrompt], check: Callable[[Prompt, Mapping[str, Any]], Open]) -> list[Open]:
    """What begins the generation of each prompt, once every prompt has been checked with its settings.

    Raises: PromptError, SettingsError: one will not do, and which; or they are no list of prompts.
    """
    if not is_list(prompts):
        raise PromptError(
            f"prompts must be a sequence of prompts, got {shown(prompts)}; for a single one use generate()"
        )
    checked = []
    for index, prompt in enumerate(prompts):
        try:
            checked.append(check(*with_settings(prompt)))
        except (PromptError, SettingsError) as error:
            kind = PromptError if isinstance(error, PromptError) else SettingsError
            raise kind(f"prompts[{index}]: {error}") from error.__cause__
    return checked


class Completions:
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `await` gives the list of them, in the order of the prompts. `async for` gives pairs (index of the prompt,
    completion), each as soon as it is finished. It is one or the other, by one task.

    The generations are under way from the moment that this exists. Where nobody takes what is finished, they wait:
    `max_concurrent` completions are kept ready, and no further generation begins until there is room.

    Failure: the first generation that fails cancels the rest and ends this with its error, once what was ready before
    is given. A note on the error says which prompt it was.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `await` or `__anext__`, and dropping
    the last reference (which is what `break` does) all end every generation. Each returns at once; the models are
    free after the forward pass that is running.
    """

    def __init__(
        self,
        opened: Sequence[Open],
        complete: Callable[[Open], Awaitable[Completion]],
        max_concurrent: int,
        *,
        start_soon: Callable[[Callable[[], Awaitable[None]]], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Runtime.generate_many`.

        Args:
            opened: what begins each generation, in the order of the prompts.
            complete: does one of them.
            max_concurrent: how many at a time, >= 1.
            start_soon: starts a task that outlives the caller's.
            run_soon: has a function called in trio's thread; may be called from any thread, at any moment.
        """
        send, self._finished = trio.open_memory_channel[tuple[int, Completion]](max_concurrent)
        # It must not know this object, or the last reference to it could never be dropped.
        self._work = _Work(enumerate(opened), complete, min(max_concurrent, len(opened)), send)
        self._run_soon = run_soon
        self._num_left = len(opened)
        self._gathered: list[Completion] | None = None
        self._is_gathering = False
        self._is_waiting = False
        self._is_closed = False
        self._num_prompts = len(opened)
        start_soon(self._work.run)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed and self._num_left else "over" if self._is_closed else "under way"
        return f"<outrider Completions, {state}: {self._num_prompts - self._num_left} of {self._num_prompts} given>"

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; awaited again, the same ones.

        Raises:
            StreamBusyError: they are being awaited, or given one by one, already.
            RuntimeClosedError: the runtime or this was closed before all were finished.
            RuntimeBrokenError, RewindError: what a stream raises; see `Failure` above.
        """
        return self._gather().__await__()

    def __aiter__(self) -> Completions:
        return self

    async def __anext__(self) -> tuple[int, Completion]:
        """The next that is finished: the index of its prompt, and what came of it.

        Raises:
            StopAsyncIteration: all have been given.
            StreamBusyError: another task is waiting for one, or for all of them.
            RuntimeClosedError, RuntimeBrokenError, RewindError: as when awaited.

        Cancellation: ends all generations.
        """
        if self._is_gathering and not self._has_ended_early:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")
        if (following := await self._next()) is None:
            raise StopAsyncIteration
        return following

    async def aclose(self) -> None:
        """End all generations. Returns at once; closing twice is closing once.

        Cancellation: a checkpoint; it is closed in any case.
        """
        self._close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Completions:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._run_soon(self._work.scope.cancel)

    @property
    def _has_ended_early(self) -> bool:
        """Closed or failed, so that whoever asks gets the reason."""
        return self._is_closed and self._num_left > 0

    async def _gather(self) -> list[Completion]:
        if self._gathered is not None:
            await trio.lowlevel.checkpoint()
            return self._gathered
        is_begun = self._is_gathering or self._is_waiting or self._num_left < self._num_prompts
        if is_begun and not self._has_ended_early:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        gathered: dict[int, Completion] = {}
        while (following := await self._next()) is not None:
            index, completion = following
            gathered[index] = completion
        self._gathered = [gathered[index] for index in range(self._num_prompts)]
        return self._gathered

    async def _next(self) -> tuple[int, Completion] | None:
        """The next that is finished; None once all have been given."""
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for the next completion; each is given once, to one task")
        if self._num_left == 0:
            await trio.lowlevel.checkpoint()
            return None
        if self._is_closed:
            raise self._work.error or RuntimeClosedError(_CLOSED)
        self._is_waiting = True
        try:
            following: tuple[int, Completion] | None = await self._finished.receive()
        except trio.EndOfChannel:
            following = None  # not all are given, and nothing more comes
        except trio.ClosedResourceError:
            raise RuntimeClosedError(_CLOSED) from None  # by another task, while this one was waiting
        except trio.Cancelled:
            self._close()
            raise
        finally:
            self._is_waiting = False
        if following is None:
            self._close()
            raise self._work.error or RuntimeClosedError(
                f"the runtime was closed before {self._num_left} of {self._num_prompts} prompts were done"
            )
        self._num_left -= 1
        if self._num_left == 0:
            self._close()
        return following

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._finished.close()
            self._work.scope.cancel()


class _Work:
    """The generations themselves, in tasks of the runtime's.

    Attributes:
        scope: cancels all of them.
        error: of the first that failed.
    """

    def __init__(
        self,
        todo: Iterator[tuple[int, Open]],
        complete: Callable[[Open], Awaitable[Completion]],
        num_tasks: int,
        finished: trio.MemorySendChannel[tuple[int, Completion]],
    ) -> None:
        self.scope = trio.CancelScope()
        self.error: Exception | None = None
        self._todo = todo
        self._complete = complete
        self._num_tasks = num_tasks
        self._finished = finished

    # A Ctrl-C belongs to the user's task.
    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Do all of them; nothing that one of them raises comes out here."""
        with self._finished, self.scope:
            async with trio.open_nursery() as nursery:
                for _ in range(self._num_tasks):
                    nursery.start_soon(self._do_in_turn)

    @trio.lowlevel.enable_ki_protection
    async def _do_in_turn(self) -> None:
        for index, opened in self._todo:
            # Whatever reading a text raises is for who wanted it; here, it would end the runtime.
            try:
                completion = await self._complete(opened)
            except Exception as error:
                self._fail(index, error)
                return
            try:
                await self._finished.send((index, completion))
            except trio.BrokenResourceError:
                return  # nobody wants it any more

    def _fail(self, index: int, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        if not isinstance(error, (RuntimeClosedError, RuntimeBrokenError)):
            error.add_note(f"prompts[{index}] failed, and the generations for the others were cancelled")
        self.scope.cancel()
