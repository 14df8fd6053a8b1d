"""A target that writes the texts of an acceptance trace, and a drafter and grammars that propose what was traced there.

Tokens are renumbered, so that a vocabulary of a few thousand does: what was drafted wrongly is one token that no text
has.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import mlx.core as mx
import trio
import trio.testing
from scenario import Scenario
from simulation import simulated_runtime
from trained_scripts import RecordingTarget, TrainedDraft

from protocol.copying import Forced
from protocol.trace import Events
from runtime.bench.acceptance_trace import TracedText

WRONG = 0
UNKNOWN = (WRONG, 0.1)  # what the drafter says where nothing was traced


def read_trace(path: Path) -> list[TracedText]:
    """The texts of a file that `write_trace` wrote."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        prompt, text = (tuple(fields[name]) for name in ("prompt", "text"))
        drafts, forced = (tuple([tuple(map(tuple, chain)) for chain in fields[name]]) for name in ("drafts", "forced"))
        forbidden = tuple(map(tuple, fields["forbidden"]))
        found.append(TracedText(fields["category"], prompt, text, drafts, forced, forbidden))
    return found


class Texts:
    """The renumbered texts of a trace."""

    def __init__(self, traced: Sequence[TracedText]) -> None:
        numbers: dict[int, int] = {}

        def renumbered(tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple([numbers.setdefault(token, 1 + len(numbers)) for token in tokens])

        self.texts = []
        for each in traced:
            prompt, text = renumbered(each.prompt), renumbered(each.text)
            drafts, forced = (_renumbered(chains, each.text, text) for chains in (each.drafts, each.forced))
            forbidden = tuple(map(renumbered, each.forbidden))
            self.texts.append(TracedText(each.category, prompt, text, drafts, forced, forbidden))
        self.vocab_size = 1 + len(numbers)

    def of(self, tokens: Sequence[int]) -> TracedText | None:
        """The text to which a sequence belongs; None for the tokens of a probe."""
        found = [text for text in self.texts if tuple(tokens[: len(text.prompt)]) == text.prompt]
        # One prompt may begin with another.
        return max(found, key=lambda text: len(text.prompt), default=None)


Saying = TypeVar("Saying", int, float)


def _renumbered(
    chains: Iterable[Sequence[tuple[int, Saying]]], before: Sequence[int], text: Sequence[int]
) -> tuple[tuple[tuple[int, Saying], ...], ...]:
    """Chains from each position of a text, with the numbers of the text's tokens."""

    def number(at: int, token: int) -> int:
        return text[at] if at < len(text) and before[at] == token else WRONG

    return tuple(
        tuple((number(at + place, token), saying) for place, (token, saying) in enumerate(chain))
        for at, chain in enumerate(chains)
    )


@attrs.define
class TracedForcedText:
    """What is forced in one text. After a wrong token the trace says nothing: the grammar then forces as many tokens as
    after the right one, all wrong, and allows all copies.
    """

    traced: TracedText
    _size: int = 0

    def append(self, tokens: Sequence[int]) -> None:
        self._size += len(tokens)

    def after(self, beyond: Sequence[int]) -> list[Forced]:
        at, text = self._size + len(beyond), self.traced.text
        if at >= len(text):
            return []
        is_right = tuple(beyond) == text[self._size : at]
        return [Forced(token if is_right else WRONG, doubt) for token, doubt in self.traced.forced[at]]

    def num_allowed(self, beyond: Sequence[int], tokens: Sequence[int]) -> int:
        at, text = self._size, self.traced.text
        for place, token in enumerate((*beyond, *tokens), -len(beyond)):
            if at >= len(text) or (place >= 0 and token in self.traced.forbidden[at]):
                return max(0, place)
            if token != text[at]:
                break
            at += 1
        return len(tokens)


class TracedGrammar:
    """Forces in a text what the traced grammar forced; see `protocol.logits_processors.Forcing`. Changes no logits."""

    def __init__(self, text: TracedText) -> None:
        self._text = text

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    def save(self) -> None:
        pass

    def restore(self, state: None) -> None:
        pass

    def forced_text(self) -> TracedForcedText:
        return TracedForcedText(self._text)


def traced_target(texts: Texts) -> RecordingTarget:
    """Writes each text after its prompt."""

    def row(tokens: Sequence[int]) -> list[float]:
        row, text = [0.0] * texts.vocab_size, texts.of(tokens)
        at = -1 if text is None else len(tokens) - len(text.prompt)
        row[WRONG if text is None or not 0 <= at < len(text.text) else text.text[at]] = 10.0
        return row

    return RecordingTarget(row, vocab_size=texts.vocab_size)


def traced_draft(texts: Texts) -> TrainedDraft:
    """Says what the traced drafter said, with as many hidden states of its own."""

    def row(tokens: Sequence[int], staleness: int) -> list[float]:
        token, sure = said(texts.of(tokens), tokens, staleness)
        other = math.log(max(1.0 - sure, 1e-9) / (texts.vocab_size - 1))
        row = [other] * texts.vocab_size
        row[token] = max(math.log(max(sure, 1e-9)), other + 1e-3)
        return row

    return TrainedDraft(row, vocab_size=texts.vocab_size)


def said(text: TracedText | None, tokens: Sequence[int], staleness: int) -> tuple[int, float]:
    """The token that follows in a text, as the drafter said, and how sure it was of it."""
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
    """Tokens per T_v(1), of which plain decoding has 1, when texts are generated one after another in a scenario."""

    async def main() -> float:
        pair = traced_target(texts), traced_draft(texts)
        async with simulated_runtime(scenario, Events(), pair=pair, prompts_are_free=True) as runtime:
            began = trio.current_time()
            for text in texts.texts:
                settings: dict[str, Any] = {"max_tokens": len(text.text), "lookahead": lookahead}
                processors = (TracedGrammar(text),) if text.forced else ()
                completion = await runtime.generate(text.prompt, logits_processors=processors, **settings)
                assert tuple(token.id for token in completion.tokens) == text.text
            return sum(len(text.text) for text in texts.texts) / (trio.current_time() - began)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
