"""A target that writes the texts of an acceptance trace, and a drafter that says there what the traced one said.

Tokens are renumbered, so that a vocabulary of a few thousand does: what was drafted wrongly is one token that no text
has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio
import trio.testing
from scenario import Scenario
from scripted_sequence import ReadsFeatures, RecordsEmptyFeatures, ScriptedSequence
from simulated_worker import Contention, SimulatedWorker
from simulation import rows_of

from actors.model import FeedsEach
from actors.warm_up import warm_up
from actors.workers.worker import Job
from protocol.prices import Prices
from runtime.bench.acceptance_trace import TracedText
from runtime.engine.events import Events
from runtime.engine.opening import running

WRONG = 0
UNKNOWN = (WRONG, 0.1)  # what the drafter says where nothing was traced
TIMEOUT = 1e9


class Texts:
    """The renumbered texts of a trace."""

    def __init__(self, traced: Sequence[TracedText]) -> None:
        numbers: dict[int, int] = {}

        def renumbered(tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple([numbers.setdefault(token, 1 + len(numbers)) for token in tokens])

        self.texts = []
        for each in traced:
            prompt, text = renumbered(each.prompt), renumbered(each.text)
            drafts = [
                tuple(
                    (text[at + place] if each.text[at + place : at + place + 1] == (token,) else WRONG, sure)
                    for place, (token, sure) in enumerate(chain)
                )
                for at, chain in enumerate(each.drafts)
            ]
            self.texts.append(TracedText(each.category, prompt, text, tuple(drafts)))
        self.vocab_size = 1 + len(numbers)

    def of(self, tokens: Sequence[int]) -> TracedText | None:
        """The text to which a sequence belongs; None for the tokens of a probe."""
        found = [text for text in self.texts if tuple(tokens[: len(text.prompt)]) == text.prompt]
        # One prompt may begin with another.
        return max(found, key=lambda text: len(text.prompt), default=None)


class _Sequence(ScriptedSequence):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def row(self, length: int) -> Sequence[float]:
        return self._model.row(self.tokens[:length], self.staleness_at(length))


class _RecordingSequence(RecordsEmptyFeatures, _Sequence):
    pass


class _TrainedSequence(ReadsFeatures, _Sequence):
    pass


class TracedTarget(FeedsEach):
    """Writes each text after its prompt."""

    context_length = None

    def __init__(self, texts: Texts) -> None:
        self._texts, self.vocab_size = texts, texts.vocab_size

    def open_sequence(self, *, beside_another: bool) -> ScriptedSequence:
        return _RecordingSequence(self)

    def row(self, tokens: Sequence[int], staleness: int) -> list[float]:
        row, text = [0.0] * self.vocab_size, self._texts.of(tokens)
        at = -1 if text is None else len(tokens) - len(text.prompt)
        row[WRONG if text is None or not 0 <= at < len(text.text) else text.text[at]] = 10.0
        return row


class TracedDraft(FeedsEach):
    """Says what the traced drafter said, with as many hidden states of its own."""

    context_length = None

    def __init__(self, texts: Texts) -> None:
        self._texts, self.vocab_size = texts, texts.vocab_size

    def open_sequence(self, *, beside_another: bool) -> ScriptedSequence:
        return _TrainedSequence(self)

    def row(self, tokens: Sequence[int], staleness: int) -> list[float]:
        token, sure = self._said(tokens, staleness)
        other = math.log(max(1.0 - sure, 1e-9) / (self.vocab_size - 1))
        row = [other] * self.vocab_size
        row[token] = max(math.log(max(sure, 1e-9)), other + 1e-3)
        return row

    def _said(self, tokens: Sequence[int], staleness: int) -> tuple[int, float]:
        text = self._texts.of(tokens)
        if text is None:
            return UNKNOWN
        at = len(tokens) - len(text.prompt)
        written = tokens[len(text.prompt) :]
        agreed = next((i for i, (one, other) in enumerate(zip(written, text.text, strict=False)) if one != other), at)
        begin = max(0, min(agreed, at - staleness, len(text.text) - 1))
        chain = text.drafts[begin]
        if at - begin >= len(chain):
            begin, chain = agreed, text.drafts[agreed] if agreed < len(text.text) else ()
        return chain[at - begin] if 0 <= at - begin < len(chain) else UNKNOWN


def replay(texts: Texts, scenario: Scenario, lookahead: int | Literal["auto"]) -> float:
    """Replay a trace, one text after another on one runtime, with the prices of a scenario. Prompts take no time. Needs
    no event loop.

    Returns: tokens per T_v(1); plain decoding has 1.
    """

    async def main() -> float:
        async with _runtime(texts, scenario) as runtime:
            began = trio.current_time()
            for text in texts.texts:
                completion = await runtime.generate(text.prompt, max_tokens=len(text.text), lookahead=lookahead)
                assert tuple(token.id for token in completion.tokens) == text.text
            return sum(len(text.text) for text in texts.texts) / (trio.current_time() - began)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def _runtime(texts: Texts, scenario: Scenario) -> Any:
    events, contention = Events(), Contention(scenario.contention)

    def target_price(job: Job[Any]) -> float:
        num_rows = rows_of(job)
        return scenario.verify_seconds(num_rows) if num_rows and job.kind != "prefill" else 0.0

    def draft_price(job: Job[Any]) -> float:
        return scenario.draft_seconds(job.num_tokens) if job.num_tokens and job.kind != "prefill" else 0.0

    target = SimulatedWorker("target", target_price, events, contention)
    draft = SimulatedWorker("draft", draft_price, events, contention)
    prices, models = Prices(), ((TracedTarget(texts), target), (TracedDraft(texts), draft))
    with trio.fail_after(TIMEOUT):
        await warm_up(*models, prices)
        async with running(*models, events=events, prices=prices) as runtime:
            yield runtime
