"""The benchmark of one stream: mlx-lm and this runtime decode the same prompts with the same models, in turn.

Compare only ratios within one such benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from actors.mlx.model import MLXModel
from protocol.open_options import PREFIX_CACHE_BYTES
from protocol.settings import MAX_LOOKAHEAD
from runtime.bench import figures
from runtime.bench.benchmark import Benchmark, Case, Cases, OnProgress, integers, without_repeats
from runtime.bench.contenders import PLAIN, PLAIN_ON_RANKS, Contender, Length, Lookahead, PromptIds
from runtime.bench.figures import Report, TableRow, column
from runtime.bench.loaded_models import ONLY_DRAFT, LoadedModels
from runtime.terminal.tables import Table


@attrs.define(kw_only=True, eq=False)
class OneStream(Benchmark):
    """Speeds are in tokens per second from the end of the first round on, over all prompts of a repeat.

    Answers to chat messages end where the model ends them, and after `max_tokens` at the latest; texts that are
    continued have `max_tokens`.

    Attributes:
        num_draft_tokens: proposal lengths for mlx-lm's speculative decoding, each in [1, 64].
        lookaheads: of this runtime, each in [0, 64] or "auto".
    """

    with_prompts = False
    prefix_cache_bytes = PREFIX_CACHE_BYTES
    num_draft_tokens: tuple[int, ...] = integers(tuple(range(1, 9)), 1, MAX_LOOKAHEAD)
    lookaheads: tuple[Lookahead, ...] = integers((0, 1, 2, 3, 4, 6, 8, "auto"), 0, MAX_LOOKAHEAD, or_auto=True)

    def __attrs_post_init__(self) -> None:
        self.contenders = self.contenders_of()

    def contenders_of(
        self, drafts: Sequence[str] = ("",), mlx_lm_drafts: Sequence[str] = ("",), *, is_on_ranks: bool = False
    ) -> list[Contender]:
        """All contenders; the first decodes plainly, and all are compared with it.

        Args:
            drafts: names of the drafters; "" for a single one.
            mlx_lm_drafts: those that mlx-lm can also speculate with. It does not decode on ranks.
        """
        plain, mlx_lm_drafts = (PLAIN_ON_RANKS, ()) if is_on_ranks else (PLAIN, mlx_lm_drafts)
        of_mlx_lm = [Contender("mlx-lm", k, draft=draft) for draft in mlx_lm_drafts for k in self.num_draft_tokens]
        ours = [Contender("outrider", k, draft="" if k == 0 else draft) for draft in drafts for k in self.lookaheads]
        return list(without_repeats([plain, *of_mlx_lm, *ours]))

    def _contenders_with(self, models: LoadedModels) -> Sequence[Contender]:
        names = tuple(models.drafts) if len(models.drafts) > 1 else ("",)
        of_mlx_lm = [name for name in names if isinstance(models.models.get(name or ONLY_DRAFT), MLXModel)]
        return self.contenders_of(names, of_mlx_lm, is_on_ranks=models.group is not None)

    async def _prepare(self, models: LoadedModels, prompts: PromptIds, on_progress: OnProgress) -> Cases:
        """A case for each turn. The answers before it are those of plain decoding, for all contenders."""
        cases, num_turns = list[Case](), len(self._kinds)
        ends = frozenset(getattr(models.tokenizer, "eos_token_ids", ()))
        for number, prompt in enumerate(self.prompts, start=1):
            length = Length(self.max_tokens, self.temperature, ends if prompt.has_answers else frozenset())
            answers: list[str] = []
            for turn in range(len(prompt.turns)):
                if turn > 0:
                    on_progress(f"answering turn {turn} of prompt {number} plainly")
                    plain = await models.run(self.contenders[0], cases[-1].prompts, length)
                    answers.append(models.tokenizer.decode([token for token in plain.texts[0] if token not in ends]))
                text = prompt.at(turn, answers, has_template=models.has_template)
                encoded = models.encoded([text], self.max_tokens)
                cases.append(Case(f"prompt {len(cases) + 1} of {num_turns}", self.contenders, encoded, length))
        return cases[:1], cases

    @property
    def _kinds(self) -> list[str]:
        """The kind of text of each case."""
        return [prompt.category for prompt in self.prompts for _ in prompt.turns]

    @property
    def _all(self) -> Sequence[int]:
        return range(len(self.cases))

    def result(self) -> dict[str, Any]:
        """See `Benchmark.result`. `categories` has a row for each kind of text and contender of this runtime."""
        best = self._best_speculative()
        return {
            **self._facts(),
            "num_prompts": len(self.prompts),
            "best_speculative": None if best is None else best.name,
            "rows": [self._row(contender, best) for contender in self.contenders],
            "categories": list(self._categories()),
        }

    def _best_speculative(self) -> Contender | None:
        """mlx-lm's fastest speculative decoding, chosen in hindsight."""
        speculative = [each for each in self.contenders if each.engine == "mlx-lm" and each != PLAIN]
        medians = {each: figures.median(self.values(each, self._all)) or 0.0 for each in speculative}
        best = max(medians, key=lambda each: medians[each], default=None)
        return best if best is not None and medians[best] else None

    def _row(self, contender: Contender, best: Contender | None) -> TableRow:
        runs = self.runs(contender, self._all).values()
        return {
            **self.speed_row(contender, self._all),
            "engine": contender.engine,
            "draft": None if contender.lookahead == 0 else contender.draft or self.about.get("draft"),
            "vs_plain": self.versus(contender, self.contenders[0], self._all),
            "vs_best_speculative": None if best is None else self.versus(contender, best, self._all),
            "copy_acceptance": figures.share(runs, "accepted_copied", "accepted_copied", "rejected_copied"),
        }

    def _categories(self) -> Iterator[TableRow]:
        kinds = without_repeats(filter(None, self._kinds))
        cases_of = {kind: [case for case in self._all if self._kinds[case] == kind] for kind in kinds}
        for kind, cases in (cases_of | ({"all": self._all} if len(kinds) > 1 else {})).items():
            for contender in self.contenders:
                if contender.engine == "outrider" and contender != self.contenders[0]:
                    yield {"category": kind, "name": contender.name, **self._of_kind(contender, cases)}

    def _of_kind(self, contender: Contender, cases: Sequence[int]) -> TableRow:
        """Medians over the prompts of a kind, ratios with quartiles, and who proposed the tokens of the texts."""
        speeds = [
            [self.value(list(self.runs(each, [case]).values())) for each in (self.contenders[0], contender)]
            for case in cases
        ]
        measured = [(plain, ours) for plain, ours in speeds if plain and ours]
        ratios = [ours / plain for plain, ours in measured]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (None, None, None)
        runs = self.runs(contender, cases).values()
        accepted, copied = figures.total(runs, "accepted"), figures.total(runs, "accepted_copied")
        drafted = None if accepted is None or copied is None else accepted - copied
        num_tokens = sum(run.num_tokens for run in runs)
        return {
            "num_prompts": len(measured),
            "plain": figures.median([plain for plain, _ in measured]),
            "ours": figures.median([ours for _, ours in measured]),
            "ratio": figures.median(ratios),
            "ratio_low": low,
            "ratio_high": high,
            "accepted_per_pass": figures.share(runs, "accepted", "passes"),
            "from_drafter": figures.ratio(drafted, num_tokens),
            "from_copies": figures.ratio(copied, num_tokens),
            **self.same_texts(contender, cases),
        }

    def report(self, result: Mapping[str, Any]) -> Report:
        tables = [("Figures", figures.table(result["rows"], _FIGURES))]
        if result["categories"]:
            tables.append(("By kind of text", _by_kind(result["categories"])))
        sections = [("bench", list(figures.about_models(result, result["num_prompts"])))]
        return Report(sections, tables, [*_notes(result), *figures.failures(result)])


_FIGURES = (
    column("", "name"),
    ("tokens/s", figures.spread_cell),
    column("× plain", "vs_plain", ".2f"),
    column("× best", "vs_best_speculative", ".2f"),
    column("accepted", "acceptance", ".0%"),
    column("a\nround", "tokens_per_round", ".2f"),
    ("same", figures.same_cell),
)


def _ratio_cell(row: TableRow) -> str:
    quartiles = "" if row["ratio_low"] is None else f" ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
    return "–" if row["ratio"] is None else f"{row['ratio']:.2f}{quartiles}"


_BY_KIND = (
    column("texts", "num_prompts"),
    column("plain", "plain", ".1f"),
    column("ours", "ours", ".1f"),
    ("× plain", _ratio_cell),
    column("accepted\na pass", "accepted_per_pass", ".2f"),
    column("drafted", "from_drafter", ".0%"),
    column("copied", "from_copies", ".0%"),
    ("same", figures.same_cell),
)


def _by_kind(rows: Sequence[TableRow]) -> Table:
    several = len({row["name"] for row in rows}) > 1

    def kind(row: TableRow) -> str:
        return f"{row['category']}, {row['name'].removeprefix('outrider ')}" if several else str(row["category"])

    return figures.table(rows, [("", kind), *_BY_KIND])


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    is_on_ranks = result["num_ranks"] > 1
    if is_on_ranks:
        yield (
            "mlx-lm's own decoding is left out: on a target that is sharded over ranks it would have to run on all of "
            "them at once, and it does not speculate there. × plain is over this runtime's plain decoding."
        )
    best = result["best_speculative"]
    plain_texts = "the plain greedy ones" if is_on_ranks else "mlx-lm's plain greedy ones"
    yield (
        "Speeds are medians over repeats, timed from the end of the first round, with the slowest and the fastest. "
        f"× best: over mlx-lm's fastest speculative row, chosen in hindsight ({best or 'there is none'}). accepted: of "
        f"the proposed tokens. a round: tokens that it gave. same: texts equal to {plain_texts}."
    )
    if result["categories"]:
        yield (
            "By kind of text: medians over the texts, and ratios with their quartiles. accepted a pass: drafted tokens "
            "that a pass of the target confirmed. drafted, copied: share of the texts' tokens that came from the "
            "drafter, and that were copied from earlier in the text; the others are the target's own."
        )
