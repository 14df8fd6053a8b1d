"""Many prompts at a time, for the handles of asyncio and of plain threads: what both have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from protocol.errors import RuntimeClosedError
from runtime.bridge.handles import own
from runtime.bridge.stream import BridgeStream
from runtime.generation.many_prompts import ManyPrompt, check_max_concurrent, is_list, with_settings
from runtime.generation.merged_streams import Merged

_CLOSED = "these generations were closed, or their runtime was; begin others with generate_many() or stream_many()"

T = TypeVar("T")
M = TypeVar("M")


class MergedSource(Generic[T]):
    """What comes of many prompts, as a source for a relay.

    Attributes:
        error: of the generation that failed, if one did.
    """

    def __init__(self, merged: Merged[T]) -> None:
        self.error: Exception | None = None
        self._merged = merged

    async def take(self) -> Sequence[tuple[int, T]]:
        """See `Source.take`."""
        # Whatever reading a text raises is for who wanted it; here, it would end trio.
        try:
            following = await self._merged.next_item()
        except Exception as error:
            self.error = error
            return ()
        return () if following is None else (following, *self._merged.ready_items())

    def rest(self) -> Sequence[tuple[int, T]]:
        """See `Source.rest`."""
        return ()

    def close(self) -> None:
        """See `Source.close`."""
        self._merged.close()

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return self._merged.num_prompts

    def is_last(self, item: T) -> bool:
        """Whether nothing more comes of an item's prompt."""
        return self._merged.is_last(item)


class MergedHandle(Generic[T]):
    """Holds on to many generations from outside trio's thread; a subclass waits for what they give."""

    def __init__(self, relay: BridgeStream[MergedSource[T], tuple[int, T]]) -> None:
        """Nothing was given so far.

        Args:
            relay: of what comes; it must not know this object.
        """
        self._relay = relay
        self._arrived: deque[tuple[int, T]] = deque()
        self._num_given = 0  # prompts, with all that came of them
        self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self._relay.hang_up()

    @property
    def _state(self) -> str:
        """In words, for a repr."""
        source = self._relay.source
        of = "" if source is None else f" of {source.num_prompts}"
        return f"{'over or closed' if self._is_closed else 'under way'}: {self._num_given}{of} given"

    def _begun(self) -> MergedSource[T]:
        """The source, once the relay has begun.

        Raises: what beginning the generations raised.
        """
        if self._relay.failure is not None:
            self._close()
            raise self._relay.failure
        assert self._relay.source is not None
        return self._relay.source

    def _must_ask(self, source: MergedSource[T]) -> bool:
        """Whether the next item is still to come from trio's thread."""
        return self._num_given < source.num_prompts and not self._is_closed and not self._arrived

    def _following(self, source: MergedSource[T]) -> tuple[int, T] | None:
        """The next item, after what was asked for has come; None once all have been given.

        Raises: why nothing more comes of generations that are not over.
        """
        if self._num_given == source.num_prompts:
            self._close()
            return None
        if self._is_closed or not self._arrived:
            self._close()
            raise source.error or RuntimeClosedError(_CLOSED)
        following = self._arrived.popleft()
        self._num_given += source.is_last(following[1])
        if self._num_given == source.num_prompts:
            self._close()
        return following

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._relay.hang_up()


def begin_many(
    begin: Callable[..., M], prompts: Iterable[ManyPrompt], max_concurrent: int, settings: Mapping[str, Any]
) -> Callable[[], M]:
    """What begins the generations of many prompts, in trio's thread.

    Args:
        begin: `generate_many` or `stream_many` of trio's runtime.
        prompts: gone through here, in the caller's thread.
        max_concurrent, settings: as for those two.

    Raises: SettingsError: `max_concurrent` is out of its range.
    """
    check_max_concurrent(max_concurrent)
    owned = [_own_with_settings(prompt) for prompt in prompts] if is_list(prompts) else prompts
    return partial(begin, owned, max_concurrent=max_concurrent, **settings)


def _own_with_settings(prompt: ManyPrompt) -> ManyPrompt:
    alone, settings = with_settings(prompt)
    return (own(alone), dict(settings)) if settings else own(alone)
