"""Prompts that several sessions of one actor begin with at the same time: one reads, the others go on from copies."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from actors.model import Fork
from protocol.messages import Features, Open


@attrs.frozen
class SharedPrompt:
    """What two sessions must have in common for one to go on from what the other has read. A session that scores
    records no features for others.
    """

    tokens: tuple[int, ...]
    pass_tokens: int | str  # some caches depend on how a text is divided into passes
    beside_another: bool
    is_scored: bool

    @classmethod
    def of(cls, opened: Open, *, beside_another: bool) -> SharedPrompt:
        """The prompt of a session."""
        tokens = opened.prompt[: opened.num_read]
        return cls(tokens, opened.settings.prefill_step_size, beside_another, opened.num_scored > 0)


@attrs.frozen(eq=False)
class ReadPrompt:
    """A prompt that a session has read, for others, and all of its features, if a drafter reads those."""

    fork: Fork
    features: Features | None = None


class PromptReading:
    """A prompt that one session of an actor reads, and that others may wait for. To be used in trio's thread."""

    def __init__(self, prompt: SharedPrompt, readings: dict[SharedPrompt, PromptReading]) -> None:
        """Begin to read, and join `readings`, which has those that are under way, until `end`."""
        self._prompt = prompt
        self._readings = readings
        self._waiting: dict[object, Callable[[ReadPrompt | None], None]] = {}
        readings[prompt] = self

    @property
    def num_waiting(self) -> int:
        """Sessions that wait."""
        return len(self._waiting)

    def wait_for(self, session: object, on_end: Callable[[ReadPrompt | None], None]) -> None:
        """Have a function called with the prompt once it was read; with None if it was not, or cannot be copied."""
        self._waiting[session] = on_end

    def wait_no_more(self, session: object) -> None:
        """Take a `wait_for` back; harmless once the reading has ended."""
        self._waiting.pop(session, None)

    def end(self, read: ReadPrompt | None = None) -> None:
        """Give those that wait the prompt; or None, so that one of them reads it. To be called exactly once."""
        del self._readings[self._prompt]
        waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(read)
