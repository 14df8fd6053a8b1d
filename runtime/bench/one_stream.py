"""The benchmark of one stream: mlx-lm and this runtime decode the same prompts with the same models, in turn.

Compare only ratios within one such benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from actors.distributed.rank_group import RankGroup
from actors.mlx.model import MLXModel
from protocol.errors import SettingsError
from protocol.open_options import PREFIX_CACHE_BYTES
from protocol.reprs import shown
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integers, validator
from runtime.bench.benchmark import (
    BUSY,
    FAILURE,
    HIT_RATE,
    LABEL,
    LOOKAHEAD,
    SAME_TEXTS,
    TOKENS_PER_ROUND,
    Benchmark,
    Entry,
    Plan,
    Progress,
    about_models,
    failures,
    share,
    speeds_plot,
    spread_figures,
    without_repeats,
)
from runtime.bench.contenders import PLAIN, PLAIN_ON_RANKS, Contender, ContenderRunner, Lookahead, Prompts, Run
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import Source
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Figure, Record, ratio, table_of
from runtime.measuring.loaded_models import ONLY_DRAFT, TARGET, LoadedModels
from runtime.measuring.plots import Plot
from runtime.measuring.reports import Report


@attrs.frozen(kw_only=True)
class OneStreamPlan(Plan):
    """What to measure.

    Attributes:
        num_draft_tokens: proposal lengths for mlx-lm's speculative decoding, each in [1, 64].
        lookaheads: of this runtime, each in [0, 64] or "auto".
        drafts: names of the drafters, if there are several. All are compared with the same plain decoding.
        mlx_lm_drafts: names of the drafters, "" for a single one, that mlx-lm can also speculate with.
        is_on_ranks: whether the target is sharded over ranks, where mlx-lm's decoding is left out.
    """

    num_draft_tokens: tuple[int, ...] = attrs.field(
        default=tuple(range(1, 9)), converter=without_repeats, validator=validator(check_integers, 1, MAX_LOOKAHEAD)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=(0, 1, 2, 3, 4, 6, 8, "auto"),
        converter=without_repeats,
        validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True),
    )
    drafts: tuple[str, ...] = ("",)
    mlx_lm_drafts: tuple[str, ...] = ("",)
    is_on_ranks: bool = False

    @property
    def plain(self) -> Contender:
        """The plain decoding that the others are compared with: mlx-lm's, or on ranks this runtime's."""
        return PLAIN_ON_RANKS if self.is_on_ranks else PLAIN

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All contenders, first `plain`."""
        ours = [
            Contender("outrider", lookahead, draft="" if lookahead == 0 else draft)
            for draft in self.drafts
            for lookahead in self.lookaheads
        ]
        of_mlx_lm = [
            Contender("mlx-lm", k, draft=draft)
            for draft in ([] if self.is_on_ranks else self.mlx_lm_drafts)
            for k in self.num_draft_tokens
        ]
        return tuple(dict.fromkeys((self.plain, *of_mlx_lm, *ours)))


def _draft(entry: Entry) -> str | None:
    contender = entry.contender
    return None if contender.lookahead == 0 else contender.draft or entry.benchmark.about.draft


COPIED, STALE = ("accepted_copied", "rejected_copied"), ("accepted_stale", "rejected_stale")


def _rest(entry: Entry, name: str, *others: str) -> float | None:
    """The sum of a counter, less those of others."""
    whole = entry.total(name)
    return None if whole is None else whole - (entry.total(*others) or 0)


def best_speculative(entry: Entry) -> Contender | None:
    """mlx-lm's fastest speculative decoding of the same turns, chosen in hindsight."""
    contenders = [each for each in entry.benchmark.contest.contenders if each.engine == "mlx-lm" and each != PLAIN]
    medians = {each: entry.by(each).spread.median or 0.0 for each in contenders}
    best = max(medians, key=lambda each: medians[each], default=None)
    return best if best is not None and medians[best] else None


def _accepted(row: Record) -> str:
    stale = "" if row.stale_acceptance is None else f" ({row.stale_acceptance:.0%})"
    copied = "" if row.copy_acceptance is None else f", copies {row.copy_acceptance:.0%}"
    if row.model_acceptance is None:
        return copied.removeprefix(", ") or "–"
    return f"{row.model_acceptance:.0%}{stale}{copied}"


class OneStream(Benchmark[OneStreamPlan]):
    """Speeds are in tokens per second from the end of the first round on, over all prompts of a repeat."""

    with_prompts = False
    prefix_cache_bytes = PREFIX_CACHE_BYTES
    figures = (
        LABEL,
        Figure("engine", lambda entry: entry.contender.engine),
        # The drafter, by its name or path; None for plain decoding.
        Figure("draft", _draft),
        LOOKAHEAD,
        *spread_figures("speeds", "tokens/s"),
        Figure("vs_plain", lambda entry: entry.versus(entry.benchmark.plan.plain), "× plain", ".2f"),
        Figure("vs_best_speculative", lambda entry: entry.versus(best_speculative(entry)), "× best", ".2f"),
        Figure("acceptance", share("accepted", "proposed"), "accepted", _accepted),
        Figure(
            "model_acceptance",
            lambda entry: ratio(_rest(entry, "accepted", "accepted_copied"), _rest(entry, "proposed", *COPIED)),
        ),
        Figure("copy_acceptance", share("accepted_copied", *COPIED)),
        Figure(
            "fresh_acceptance",
            lambda entry: ratio(
                _rest(entry, "accepted", "accepted_stale", "accepted_copied"),
                _rest(entry, "proposed", *STALE, *COPIED),
            ),
        ),
        Figure("stale_acceptance", share("accepted_stale", *STALE)),
        TOKENS_PER_ROUND,
        HIT_RATE,
        *BUSY,
        # Tokens per second if drafting were free, that is if the target's passes followed each other without a gap.
        Figure("limit", share("num_timed", "verify_seconds")),
        Figure("of_limit", share("verify_seconds", "seconds"), "of limit", ".2f"),
        *SAME_TEXTS,
        # The runtime's estimates of prices after the last run.
        Figure("estimates", lambda entry: next((run.estimates for run in reversed(entry.runs.values())), None)),
        FAILURE,
    )

    def _contest(self) -> Contest[Contender, int, Run]:
        plan = self.plan
        return Contest(plan.contenders, range(len(self._turns)), plan.repeats, warm_up=[0])

    @property
    def _turns(self) -> list[tuple[int, int]]:
        """By case: (prompt, turn)."""
        return [(i, turn) for i, prompt in enumerate(self.plan.prompts) for turn in range(len(prompt.turns))]

    async def _prepare(
        self, runner: ContenderRunner, models: LoadedModels, first_turns: Prompts, on_progress: Progress
    ) -> Prompts:
        """A prompt for each turn. The answers before it are those of plain decoding, for all contenders."""
        plan, found, answers = self.plan, list[tuple[int, ...]](), list[str]()
        has_template = bool(getattr(models.tokenizer, "has_chat_template", False))
        for i, turn in self._turns:
            prompt = plan.prompts[i]
            if turn > 0:
                run = await runner.run(plan.plain, [found[-1]], plan.max_tokens, with_prompts=False)
                answers.append(models.tokenizer.decode(list(run.texts[0])))
            else:
                answers = []
            found += models.encoded([prompt.at(turn, answers, has_template=has_template)], plan.max_tokens)
        return found

    def _prompts_of(self, case: int, prompts: Prompts) -> Prompts:
        return [prompts[case]]

    def _described(self, case: int) -> str:
        return f"prompt {case + 1} of {len(self._turns)}"

    def expected(self, entry: Entry, case: int) -> Sequence[tuple[int, ...]]:
        """The plain text, which is the same in all repeats."""
        return next(turn[self.plan.plain].texts for (_, other), turn in entry.complete.items() if other == case)

    def result(self) -> Record:
        best = best_speculative(self.entries(self.contest.cases)[0])
        return Record(
            **self._facts_of_models(),
            num_prompts=len(self.plan.prompts),
            num_ranks=self.about.num_ranks,
            best_speculative=None if best is None else best.name,
            rows=self.rows(self.contest.cases),
            categories=list(self._categories()),
        )

    def _categories(self) -> Iterator[Record]:
        of_case = [self.plan.prompts[i].category for i, _ in self._turns]
        for category in dict.fromkeys(filter(None, of_case)):
            cases = [case for case, each in enumerate(of_case) if each == category]
            yield Record(category=category, num_prompts=len(cases), rows=self.rows(cases))

    def report(self, result: Record) -> Report:
        def stands_out(row: Record) -> bool:
            return bool(row.name == result.best_speculative or (row.engine, row.lookahead) == ("outrider", "auto"))

        return Report(
            table_of(self.figures, result.rows, is_bold=stands_out),
            about=[("bench", list(about_models(result, result.num_prompts)))],
            notes=[*_notes(result), *failures(result)],
            details=[
                *((each.category, [(row.name, _speed(row)) for row in each.rows]) for each in result.categories),
                *((f"measured by {row.name}", list(_estimates(row))) for row in _rows_with_estimates(result)),
            ],
        )

    def plot(self, result: Record) -> Plot:
        unit = "tokens per second (× plain)"
        return speeds_plot(result, unit, lambda row: str(row.name), lambda row: row.engine == "outrider")

    async def measure(
        self,
        target: Source,
        draft: Source | list[Source],
        *,
        group: RankGroup | None = None,
        on_progress: Progress = lambda _: None,
    ) -> Record:
        """Have all contenders decode all prompts, in turn.

        Args:
            target, draft: as for `runtime.open`; or a list of drafters, to compare them. With prompt lookup, a trained
                drafter or another vocabulary, mlx-lm decodes plainly only.
            group: the ranks that the target is sharded over, as for `runtime.open`. mlx-lm's decoding is left out then:
                it would have to run on all ranks at once, and does not speculate there.
            on_progress: called with a description of each step before it starts.

        Raises:
            SettingsError: a dtype was given for models that are loaded already, or for ranks; or the group cannot be
                led.
            PromptError: a prompt cannot be encoded, or is too long for a context together with the tokens to generate.
            ModelError: a model cannot be loaded, or mlx-lm cannot decode plainly with the target.
            VocabularyMismatchError: target and draft model have different vocabularies, which cannot be translated.
            RankError: a rank has ended, hangs, differs or fails before anything is measured. Later it is the cause of a
                `RuntimeBrokenError`.

        Cancellation: takes effect after the current forward passes; `result` has what was measured.
        """
        named = named_drafts(draft) if isinstance(draft, list) else {}
        drafts = named if len(named) > 1 else {ONLY_DRAFT: draft[0] if isinstance(draft, list) else draft}
        return await self._measure(target, drafts, on_progress, group)

    def _note_models(self, models: LoadedModels) -> None:
        names = tuple(models.drafts) if len(models.drafts) > 1 else ("",)
        of_mlx_lm = tuple(name for name in names if isinstance(models.models.get(name or ONLY_DRAFT), MLXModel))
        is_on_ranks = models.group is not None
        self.plan = attrs.evolve(self.plan, drafts=names, mlx_lm_drafts=of_mlx_lm, is_on_ranks=is_on_ranks)
        self.contest = self._contest()


def named_drafts(drafts: Sequence[Source]) -> dict[str, Source]:
    """Drafters by name: the last part of a path or hub id, or all of it where two of them share that part."""
    paths = [name_of(draft) for draft in drafts]
    parts = [path.rstrip("/").rpartition("/")[2] for path in paths]
    is_clear = [parts.count(part) == 1 and part != TARGET for part in parts]
    names = [part if clear else path for part, path, clear in zip(parts, paths, is_clear, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"draft must be other drafters, to compare them, and {shown(name)} is there twice")
    return dict(zip(names, drafts, strict=True))


# --- the report -----------------------------------------------------------------------------------


def _notes(result: Record) -> Iterator[str]:
    if result.num_ranks > 1:
        yield (
            "mlx-lm's own decoding is left out: on a target that is sharded over ranks it would have to run on all of "
            "them at once, and it does not speculate there. × plain is over this runtime's plain decoding."
        )
    yield (
        "Speeds are medians over repeats, timed from the end of the first round, with the slowest and the fastest. "
        "× best: over mlx-lm's fastest speculative row, chosen in hindsight"
        + (f" ({result.best_speculative})." if result.best_speculative else " (there is none).")
    )
    yield (
        "busy: share of the time in which the target's and the drafter's threads worked. of limit: speed over what "
        "the target's passes alone would give if drafting were free. same: texts equal to "
        + ("the plain greedy ones." if result.num_ranks > 1 else "mlx-lm's plain greedy ones.")
    )
    if any(row.stale_acceptance is not None for row in result.rows):
        yield (
            "accepted: in brackets, of the tokens that a trained drafter had drafted ahead, without hidden states that "
            "the target had given by the time they were proposed."
        )


def _speed(row: Record) -> str:
    if row.median is None:
        return "–"
    plain = "" if row.vs_plain is None else f", {row.vs_plain:.2f} × plain"
    return f"{row.median:.1f} tokens/s{plain}, {_accepted(row)} accepted"


def _rows_with_estimates(result: Record) -> list[Record]:
    rows = [row for row in result.rows if row.estimates]
    return [row for row in rows if row.lookahead == "auto"] or rows[-1:]


def _estimates(row: Record) -> Iterator[tuple[str, str]]:
    for name, value in (row.estimates or {}).items():
        if value is None:
            text = "–"
        elif isinstance(value, tuple):
            text = ", ".join(f"{seconds * 1e3:.2f} ms for {width}" for width, seconds in value)
        elif "seconds" in name and "per_second" not in name:
            text = f"{value * 1e3:.2f} ms"
        else:
            text = f"{value:.3g}"
        yield name.replace("_seconds", "").replace("_", " "), text
