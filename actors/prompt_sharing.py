"""Prompts that several sessions of one actor begin with at the same time: one reads, the others go on from copies."""

from __future__ import annotations

import attrs
import trio

from actors.model import Fork
from protocol.messages import Features, Open


@attrs.frozen
class _Prompt:
    """What must be equal, so that a session may begin with what another one has read.

    Attributes:
        tokens: those that are read without logits.
        pass_tokens: the setting; some caches depend on how a text is divided into passes.
        beside_another: see `Model.open_sequence`.
        is_scored: whether the session scores. It records no features for others.
    """

    tokens: tuple[int, ...]
    pass_tokens: int | str
    beside_another: bool
    is_scored: bool

    @classmethod
    def of(cls, opened: Open, *, beside_another: bool) -> _Prompt:
        """The prompt of a session."""
        tokens = opened.prompt[: opened.num_read]
        return cls(tokens, opened.settings.prefill_step_size, beside_another, opened.num_scored > 0)


@attrs.frozen(eq=False)
class ReadPrompt:
    """A prompt that was read by one session, for others.

    Attributes:
        fork: opens a sequence that holds it.
        features: the target's hidden states of all of it, if a drafter reads those.
    """

    fork: Fork
    features: Features | None = None


class PromptReading:
    """A prompt that one session reads, and that others may wait for.

    Attributes:
        num_waiting: sessions that wait.
    """

    def __init__(self, prompt: _Prompt, readings: dict[_Prompt, PromptReading]) -> None:
        """The session begins; `readings` has those that are under way."""
        self.num_waiting = 0
        self._prompt = prompt
        self._readings = readings
        self._read: ReadPrompt | None = None
        self._is_over = trio.Event()
        readings[prompt] = self

    async def wait(self) -> ReadPrompt | None:
        """The prompt, once it was read; None if it was not read to its end, or cannot be copied."""
        self.num_waiting += 1
        try:
            await self._is_over.wait()
        finally:
            self.num_waiting -= 1
        return self._read

    def end(self, read: ReadPrompt | None = None) -> None:
        """Give those that wait the prompt; or None, so that one of them reads it. Once."""
        del self._readings[self._prompt]
        self._read = read
        self._is_over.set()


class PromptReadings:
    """The prompts that the sessions of one actor are reading. To be used in trio's thread."""

    def __init__(self) -> None:
        self._by_prompt: dict[_Prompt, PromptReading] = {}

    async def join(self, opened: Open, *, beside_another: bool) -> ReadPrompt | PromptReading:
        """Wait for the session that reads the same prompt, if there is one.

        Returns: the prompt, if another session has read it. Otherwise this session is to read it, and to end the
            reading that is returned, whatever happens.

        Cancellation: leaves the others waiting.
        """
        prompt = _Prompt.of(opened, beside_another=beside_another)
        while (reading := self._by_prompt.get(prompt)) is not None:
            if (read := await reading.wait()) is not None:
                return read
        return PromptReading(prompt, self._by_prompt)
