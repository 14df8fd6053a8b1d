"""Many prompts at a time: the part of their handles that asyncio and plain threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from protocol.errors import RuntimeClosedError
from runtime.bridge.iterator_handle import IteratorHandle
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.generation.many_prompts import ManyPrompt, check_max_concurrent, is_list, with_settings
from runtime.generation.merged_streams import Merged
from runtime.generation.text import Prompt

_CLOSED = "these generations were closed, or their runtime was; begin others with generate_many() or stream_many()"

T = TypeVar("T")
M = TypeVar("M")


class MergedSource(Generic[T]):
    """The items of many generations, as a source for a bridge stream.

    Attributes:
        error: of the generation that failed, if one did.
        merged: the generations' own iterator, in the trio thread.
    """

    def __init__(self, merged: Merged[T]) -> None:
        self.error: Exception | None = None
        self.merged = merged

    async def receive(self) -> Sequence[tuple[int, T]]:
        # An exception is for the consumer; raised from here, it would end the trio loop.
        try:
            item = await self.merged.next_item()
        except Exception as error:
            self.error = error
            return ()
        return () if item is None else (item, *self.merged.ready_items())

    def drain(self) -> Sequence[tuple[int, T]]:
        return ()

    def close(self) -> None:
        self.merged.close()


class MergedHandle(IteratorHandle[MergedSource[T], tuple[int, T], tuple[int, T]]):
    """A handle on many generations from outside the trio thread; gives pairs (index of the prompt, item)."""

    _num_finished = 0  # prompts whose last item was given

    def __init__(self, bridge: RuntimeBridge[Any], begin: Callable[[], Merged[T]]) -> None:
        super().__init__(bridge, lambda: MergedSource(begin()))

    def __repr__(self) -> str:
        return f"<outrider {self._bridge.face}.{type(self).__name__}, {self._state}>"

    @property
    def _state(self) -> str:
        """For a repr."""
        source = self._bridge_stream.source
        of = "" if source is None else f" of {source.merged.num_prompts}"
        return f"{'over or closed' if self._is_closed else 'under way'}: {self._num_finished}{of} given"

    @property
    def _has_ended_early(self) -> bool:
        """Whether this was closed or has failed, so that the next call raises the reason."""
        source = self._bridge_stream.source
        return self._is_closed and (source is None or self._num_finished < source.merged.num_prompts)

    def _must_request(self, source: MergedSource[T]) -> bool:
        return self._num_finished < source.merged.num_prompts and not self._is_closed and not self._arrived

    def _take_next(self, source: MergedSource[T]) -> tuple[int, T] | None:
        if self._num_finished == source.merged.num_prompts:
            self._close()
            return None
        if self._is_closed or not self._arrived:
            self._close()
            raise source.error or RuntimeClosedError(_CLOSED)
        item = self._arrived.popleft()
        self._num_finished += source.merged.is_last(item[1])
        if self._num_finished == source.merged.num_prompts:
            self._close()
        return item


def prepare_generations(
    begin: Callable[..., M], prompts: Iterable[ManyPrompt], max_concurrent: int, arguments: Mapping[str, Any]
) -> Callable[[], M]:
    """A function that begins the generations of many prompts; to be called in the trio thread.

    Args:
        begin: `generate_many` or `stream_many` of the trio runtime.
        prompts: iterated over now, in the caller's thread.

    Raises: SettingsError: `max_concurrent` is out of its range.
    """
    check_max_concurrent(max_concurrent)
    copies = [_copy_with_settings(prompt) for prompt in prompts] if is_list(prompts) else prompts
    return partial(begin, copies, max_concurrent=max_concurrent, **arguments)


def copy_prompt(prompt: Prompt) -> Prompt:
    """A copy of a prompt that the caller cannot change any more, and that any thread can read."""
    if hasattr(prompt, "tolist"):
        listed: Prompt = prompt.tolist()
        return listed
    if isinstance(prompt, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    return prompt


def _copy_with_settings(prompt: ManyPrompt) -> ManyPrompt:
    alone, settings = with_settings(prompt)
    return (copy_prompt(alone), dict(settings)) if settings else copy_prompt(alone)
