"""Traces of acceptance: at each position of real texts, what drafter and grammar would propose, and how sure they are.

What would be copied there follows from prompt and text, but for what a grammar forbids.

A trace says what speculation can gain, without saying anything about a machine: replayed with the times of passes of
some device, it predicts the speed there (`tests/protocol/test_acceptance_traces.py`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.logits_processors import ForcedText
from protocol.lookahead_policy import ChainPolicy, PolicyView
from protocol.lookahead_tree import Guess, Node
from protocol.prices import Prices
from protocol.settings import NGRAM, Settings
from runtime.bench import figures
from runtime.bench.benchmark import Benchmark, Cases, OnProgress, without_repeats
from runtime.bench.contenders import PromptIds
from runtime.bench.figures import Report, TableRow, column
from runtime.bench.loaded_models import LoadedModels
from runtime.generation.grammar import Grammar
from runtime.loading.model_sources import ModelSource
from runtime.terminal.display import write_file

DEPTH = 8  # tokens that the drafter drafts from a position on
SHOWN_DEPTHS = ("first", "second", "third", "fourth")

DraftedToken = tuple[int, float]  # a token, and the drafter's confidence in it, in [0, 1]
ForcedToken = tuple[int, int]  # a token and its doubt, as of `protocol.copying.Forced`


@attrs.frozen
class TracedText:
    """A greedy text, and what the drafter and the text's grammar would say at each position of it.

    Attributes:
        drafts: for each position of `text`, the drafter's choices from there on, at most `DEPTH`; none where the target
            did not wait for the drafter.
        forced: for each position, the tokens that the grammar forces from there on, if any; () without a grammar.
        forbidden: for each position, the tokens that the grammar forbids there, of those that might be copied: those
            that followed the token before it earlier in prompt or text; () without a grammar.
    """

    category: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    drafts: tuple[tuple[DraftedToken, ...], ...]
    forced: tuple[tuple[ForcedToken, ...], ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()

    def num_right(self, position: int) -> int:
        """How many of the choices at a position are right, from the first on."""
        pairs = zip(self.drafts[position], self.text[position:], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))


def traced(
    category: str, prompt: Sequence[int], text: Sequence[int], rounds: Iterable[tuple[int, Sequence[DraftedToken]]]
) -> TracedText:
    """The trace of a text whose rounds began at some of its positions with these drafts.

    Where the token was drafted by an earlier round, the choices are those of that round: a trained drafter, which had
    fewer hidden states of the target then, might do better.
    """
    drafts: list[tuple[DraftedToken, ...]] = [()] * len(text)
    for begin, chain in rounds:
        for place, ((token, _), actual) in enumerate(zip(chain, text[begin:], strict=False)):
            drafts[begin + place] = tuple(chain[place:])
            if token != actual:
                break
    return TracedText(category, tuple(prompt), tuple(text), tuple(drafts))


def with_grammar(found: TracedText, forced_text: ForcedText) -> TracedText:
    """A trace with what the grammar forces and forbids; `forced_text` is at the beginning of the text."""
    forced, forbidden = list[tuple[ForcedToken, ...]](), list[tuple[int, ...]]()
    before, followers = found.prompt[-1], defaultdict[int, set[int]](set)
    for one, other in pairwise(found.prompt):
        followers[one].add(other)
    for token in found.text:
        forced.append(tuple([(each.token, each.doubt) for each in forced_text.after(())]))
        forbidden.append(tuple([each for each in sorted(followers[before]) if not forced_text.num_allowed((), [each])]))
        followers[before].add(token)
        forced_text.append([token])
        before = token
    return attrs.evolve(found, forced=tuple(forced), forbidden=tuple(forbidden))


def write_trace(path: Path, texts: Iterable[TracedText]) -> None:
    """Write one JSON object a line. Raises: OutputError: the file cannot be written."""
    write_file(path, "".join(json.dumps(attrs.asdict(text), separators=(",", ":")) + "\n" for text in texts))


@attrs.frozen
class _RecordingPolicy(ChainPolicy):
    """Proposes what the drafter itself has drafted, without copies and forced tokens, and notes it."""

    rounds: list[tuple[int, list[DraftedToken]]] = attrs.field(factory=list)  # positions in the whole text, and drafts

    def copied(self, guesses: Iterable[Guess], *, then_drafts: bool) -> list[Guess]:
        return []

    def proposal(self, view: PolicyView) -> list[Node] | None:
        nodes = super().proposal(view)
        if nodes:
            drafted = [(node.token, round(node.guess.raw, 4)) for node in nodes if node.guess is not None]
            self.rounds.append((nodes[0].position, drafted))
        return nodes


@attrs.define(kw_only=True, eq=False)
class AcceptanceTrace(Benchmark):
    """The traces of the first turns of some prompts, in a `file`. Each is decoded once, and no speed is measured."""

    follows_schemas = True
    file: Path
    repeats: int = attrs.field(default=1, init=False)
    _texts: list[TracedText] = attrs.field(init=False, factory=list)
    _num_written: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        if self.temperature > 0:
            raise SettingsError(f"a trace of acceptance is of greedy texts, got temperature={self.temperature:g}")

    async def measure(self, target: ModelSource, *drafts: ModelSource, **options: Any) -> dict[str, Any]:
        """Decode all prompts, and write the texts that are finished, also upon a cancellation; see `Benchmark.measure`.

        Raises: SettingsError: the drafter has no model; OutputError: of the file.
        """
        if drafts[0] == NGRAM:
            raise SettingsError("a trace of acceptance needs a drafter with a model; copies follow from the text")
        try:
            await super().measure(target, *drafts, **options)
        finally:
            if self._texts:
                write_trace(self.file, self._texts)
            self._num_written = len(self._texts)
        return self.result()

    async def _prepare(self, models: LoadedModels, prompts: PromptIds, on_progress: OnProgress) -> Cases:
        """Do everything: there is nothing to measure afterwards."""
        rounds = list[tuple[int, list[DraftedToken]]]()

        def make_policy(settings: Settings, prices: Prices) -> _RecordingPolicy:
            return _RecordingPolicy(DEPTH, overlaps=False, rounds=rounds)

        ends = tuple(getattr(models.tokenizer, "eos_token_ids", ()))
        grammars = [
            None if prompt.schema is None else Grammar.from_json_schema(prompt.schema, models.tokenizer)
            for prompt in self.prompts
        ]
        async with AsyncExitStack() as stack:
            stack.enter_context(models.evaluating_layers())
            runtime, _ = await models.open_runtime(stack, prefix_cache_bytes=0, make_policy=make_policy)
            for number, (prompt, ids, grammar) in enumerate(zip(self.prompts, prompts, grammars, strict=True), 1):
                on_progress(f"decoding text {number} of {len(prompts)}")
                stop_tokens = ends if prompt.has_answers or grammar is not None else ()
                settings: dict[str, Any] = {"max_tokens": self.max_tokens, "stop_tokens": stop_tokens}
                if grammar is not None:
                    settings["logits_processors"] = (grammar,)
                rounds.clear()
                completion = await runtime.generate(ids, lookahead=DEPTH, **settings)
                text = [token.id for token in completion.tokens]
                begun = [(position - len(ids), drafted) for position, drafted in rounds]
                found = traced(prompt.category, ids, text, begun)
                self._texts.append(found if grammar is None else with_grammar(found, grammar.forced_text()))
        return [], []

    @property
    def is_complete(self) -> bool:
        return self._num_written == len(self.prompts)

    @property
    def repeats_done(self) -> int:
        return int(self._num_written > 0)

    def result(self) -> dict[str, Any]:
        """See `Benchmark.result`; there is a row for each kind of text."""
        kinds = without_repeats(text.category for text in self._texts)
        by_kind = {kind or "all": [text for text in self._texts if text.category == kind] for kind in kinds}
        rows = [_row(kind, texts) for kind, texts in (by_kind | {"all": self._texts}).items()]
        return {**self._facts(), "file": str(self.file), "rows": rows}

    def report(self, result: Mapping[str, Any]) -> Report:
        rows = [{**row, **dict(zip(SHOWN_DEPTHS, row["acceptance"], strict=True))} for row in result["rows"]]
        columns = (
            *(column("", "category"), column("texts", "num_texts"), column("tokens", "num_tokens")),
            *(column(depth, depth, ".2f") for depth in SHOWN_DEPTHS),
            column("says", "confidence", ".2f"),
            column("forced", "forced", ".2f"),
        )
        note = (
            f"Wrote {result['file']}. first, second, …: how often the drafter's choice there is the target's, if all "
            "before it were. says: its own mean confidence in the first one. forced: how often the token is one that a "
            "schema forces."
        )
        sections = [("trace", list(figures.about_models(result, len(self._texts))))]
        return Report(sections, [("Acceptance", figures.table(rows, columns))], [note])


def _row(kind: str, texts: Sequence[TracedText]) -> TableRow:
    places = [(len(text.drafts[at]), text.num_right(at)) for text in texts for at in range(len(text.text))]
    acceptance = []
    for depth in range(len(SHOWN_DEPTHS)):
        reached = [num_right for num_drafted, num_right in places if num_drafted > depth and num_right >= depth]
        acceptance.append(figures.ratio(sum(num_right > depth for num_right in reached), len(reached)))
    confidences = [chain[0][1] for text in texts for chain in text.drafts if chain]
    with_grammars = [text for text in texts if text.forced]
    num_forced = sum(
        bool(chain) and chain[0][0] == token
        for text in with_grammars
        for chain, token in zip(text.forced, text.text, strict=True)
    )
    return {
        "category": kind,
        "num_texts": len(texts),
        "num_tokens": sum(len(text.text) for text in texts),
        "acceptance": acceptance,
        "confidence": figures.ratio(sum(confidences), len(confidences)),
        "forced": figures.ratio(num_forced, sum(len(text.text) for text in with_grammars)),
    }
