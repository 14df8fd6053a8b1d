"""Statistics: counts and rates as frozen snapshots, the counters behind them, and advice on what would be faster.

Tokens are counted when the consumer is given them. Other work, such as tokens drafted past a stop, shows in the busy
fractions only.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import attrs

from protocol.prices import Estimates
from protocol.session_state import Commit

# No advice is given before this many rounds, or drafted tokens.
MIN_ROUNDS = 10
MIN_PROPOSED = 30

MIN_SPEED_UP = 0.95  # a loss of a few per cent against plain decoding may be noise
LOW_ACCEPTANCE = 0.3
MAX_SHARE_OF_ROUNDS = 0.8  # advice on rounds of one kind is given if they are more than this share of all rounds


# The key of a field's metadata for the function that combines the counters of two streams; by default they are added.
_COMBINE = "combine"


@attrs.define
class ShownCounts:
    """The counters that `Statistics` shows as they are, and describes."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    parted_tokens: int = 0
    mismatched_tokens: int = 0
    evicted_tokens: int = 0
    generated_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    accepted_stale: int = 0
    rejected_stale: int = 0
    accepted_copied: int = 0
    rejected_copied: int = 0
    accepted_grammar: int = 0
    rejected_grammar: int = 0
    bonus: int = 0
    rounds: int = 0
    n1_rounds: int = 0
    settling_rounds: int = 0
    resting_rounds: int = 0
    replayed_tokens: int = 0
    draft_replayed_tokens: int = 0
    stale_proposals: int = 0
    lookahead_hits: int = 0
    lookahead_misses: int = 0
    draft_failures: int = 0
    draft_timeouts: int = 0
    passes: int = 0
    pass_rows: int = 0
    wait_seconds: float = 0.0
    longest_wait_seconds: float = attrs.field(default=0.0, metadata={_COMBINE: max})
    prefilled_tokens: int = 0


@attrs.frozen(kw_only=True)
class Statistics(ShownCounts):
    """A snapshot, of one stream or of a whole runtime.

    Attributes:
        prompt_tokens: prompt length in tokens.
        cached_tokens: prompt tokens that the target need not read, since they were still cached.
        parted_tokens: prompt tokens that are read again although a cached text has them, too: its cache cannot go back
            to where the texts part, as with recurrent layers between two checkpoints.
        mismatched_tokens: prompt tokens that are read again although a cached text has them, too: the settings do not
            let it be reused. `reuse_prefix` is off, only one of both has a drafter, or quantised caches were read in
            other passes.
        evicted_tokens: prompt tokens that are read again because the caches of a text that has them had to go: they
            took more than `prefix_cache_bytes`, or streams needed the memory.
        prefilled_tokens: prompt tokens that the target's prefill has read so far. The first round reads the last token,
            so the prompt is read once `cached_tokens + prefilled_tokens >= prompt_tokens - 1`.
        generated_tokens: tokens given to the consumer.
        proposed: drafted tokens that were judged: accepted + rejected.
        accepted: proposed tokens that were accepted.
        rejected: proposed tokens that were rejected.
        bonus: tokens of the target's own after a full acceptance.
        rounds: verify passes that gave the consumer a token.
        n1_rounds: rounds in which the caches could undo nothing (lookahead 1, nothing rewound).
        resting_rounds: rounds that were left to the target alone, because speculating did not pay or the drafter was
            late; with a drafter that reads the target's hidden states, also the first round.
        settling_rounds: rounds that fed committed tokens only, to settle tokens that had to be replayed.
        replayed_tokens: committed tokens that the target processed again after restoring a checkpoint.
        draft_replayed_tokens: committed tokens that the drafter processed again, likewise.
        stale_proposals: messages that were dropped because their round was over.
        lookahead_hits: verdicts whose text had been drafted for already.
        lookahead_misses: verdicts whose text had not.
        draft_failures: drafters that failed; the rest was decoded without them.
        draft_timeouts: how often the target stopped waiting for a drafter that was late with a proposal or was still
            reading the prompt, and went on alone until the drafter had caught up.
        accepted_stale, rejected_stale: accepted and rejected tokens that a trained drafter had drafted ahead without
            hidden states of the target that came before they were proposed.
        accepted_copied, rejected_copied: accepted and rejected tokens that were copied from earlier in the text.
        accepted_grammar, rejected_grammar: the same of tokens that a grammar forces.
        accepted_by_position, proposed_by_position: `accepted` and `proposed` by place in the proposal, as long as the
            longest one. The first of `proposed_by_position` is the number of proposals.
        acceptance_rate: accepted / proposed, in [0, 1]; None if nothing was proposed.
        copy_acceptance, grammar_acceptance, model_acceptance: the same for the tokens that were copied, for those that
            a grammar forces, and for those of the draft model or trained drafter. None if none was proposed.
        fresh_acceptance, stale_acceptance: the same for the model's tokens that were not stale in this sense, and for
            those that were.
        tokens_per_round: generated_tokens / rounds; 0 before the first.
        prompt_tps: prompt tokens per second of the target's prefill.
        generation_tps: generated tokens per second, from the end of the first round to the last token. The tokens of
            one round arrive together, so no time can be measured for those of the first. None until a second round has
            given a token. For a whole runtime: all tokens over its whole life.
        time_to_first_token: seconds from the call to the first token; None before it.
        target_busy, draft_busy: fraction of the elapsed time in which the worker had a job, in [0, 1].
        passes: the target's passes that verify or decode. One that several streams share is counted for the stream
            that comes first in it, so that the passes of all streams add up to the runtime's.
        pass_rows: rounds that had a part in these passes. Those of all streams add up to the runtime's; more than
            `rounds` where a pass gave the consumer no token.
        rows_per_pass: mean number of streams in a pass, >= 1: `pass_rows` over the passes they took, where a round in
            a pass of n streams took 1/n of it. None before the first pass.
        wait_seconds: seconds from when a round was ready for a pass until its pass began, summed over the rounds.
        longest_wait_seconds: the longest of these waits. Of a whole runtime: the longest of any stream.
        elapsed: seconds from the call to the last token, or to now while the stream runs.
        peak_memory: the most bytes that MLX has held at once in this process.
        estimates: what the runtime has measured of its models so far.
        advice: sentences on what would be faster, most important first; usually empty.
    """

    proposed: int
    rows_per_pass: float | None
    accepted_by_position: tuple[int, ...]
    proposed_by_position: tuple[int, ...]
    acceptance_rate: float | None
    copy_acceptance: float | None
    grammar_acceptance: float | None
    model_acceptance: float | None
    fresh_acceptance: float | None
    stale_acceptance: float | None
    tokens_per_round: float
    prompt_tps: float
    generation_tps: float | None
    time_to_first_token: float | None
    target_busy: float
    draft_busy: float
    elapsed: float
    peak_memory: int
    estimates: Estimates
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        said = [f"{self.generated_tokens} tokens in {self.rounds} rounds after a prompt of {self.prompt_tokens}"]
        if self.generation_tps is not None:
            said.append(f"{self.generation_tps:.1f} tokens/s")
        if self.acceptance_rate is not None:
            said.append(f"{self.acceptance_rate:.0%} of {self.proposed} proposed accepted")
            if self.copy_acceptance is not None:
                said.append(f"{self.accepted_copied} of them copied")
            if self.grammar_acceptance is not None:
                said.append(f"{self.accepted_grammar} of them forced")
        if self.time_to_first_token is not None:
            said.append(f"first token after {self.time_to_first_token:.3g} s")
        if self.rows_per_pass is not None and self.rows_per_pass > 1:
            said.append(f"{self.rows_per_pass:.1f} streams a pass")
        return f"<outrider Statistics: {', '.join(said)}>"


@attrs.define
class Counts(ShownCounts):
    """Counters that only grow, and that can be added up over streams; see `Statistics`."""

    accepted_at: Counter[int] = attrs.field(factory=Counter)  # accepted tokens by place in the proposal
    proposed_at: Counter[int] = attrs.field(factory=Counter)  # judged ones likewise
    pass_shares: float = 0.0  # passes that the rounds took: a round in a pass of n streams took 1/n of it
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0

    def give(self, commit: Commit, index: int) -> None:
        """Count the token at `index` of a commit, which the consumer is given."""
        self.generated_tokens += 1
        if index == 0:
            self.rounds += 1
            self.n1_rounds += commit.single_step and not commit.settles
            self.settling_rounds += commit.settles
            self.resting_rounds += commit.resting
        if index < commit.num_from_draft:
            self.accepted += 1
            self.accepted_stale += index < commit.num_stale
            drafter = commit.drafted_by(index)
            self.accepted_copied += drafter == "copy"
            self.accepted_grammar += drafter == "grammar"
            self.accepted_at[index] += 1
            self.proposed_at[index] += 1
        else:
            self.rejected += commit.num_rejected
            self.proposed_at.update(range(index, index + commit.num_rejected))
            self.rejected_stale += max(0, commit.num_stale - commit.num_from_draft)
            if commit.num_rejected:
                rejected = commit.drafters[commit.num_from_draft :]
                self.rejected_copied += rejected.count("copy")
                self.rejected_grammar += rejected.count("grammar")
            self.bonus += commit.bonus

    def take_part(self, num_rows: int, *, is_first: bool) -> None:
        """Count a round's part in a pass of `num_rows` rounds, this one included; `is_first` if it is counted here."""
        self.passes += is_first
        self.pass_rows += 1
        self.pass_shares += 1.0 / num_rows

    def wait(self, seconds: float) -> None:
        """Count the time that a round has waited for its pass; a clock's rounding below 0 counts as 0."""
        self.wait_seconds += max(0.0, seconds)
        self.longest_wait_seconds = max(self.longest_wait_seconds, seconds)

    def add(self, other: Counts) -> None:
        """Add other counters to these; of waits, the longest is kept."""
        for field in attrs.fields(Counts):
            combine = field.metadata.get(_COMBINE, operator.add)
            setattr(self, field.name, combine(getattr(self, field.name), getattr(other, field.name)))

    def snapshot(
        self,
        *,
        elapsed: float = 0.0,
        generation_seconds: float = 0.0,
        num_untimed: int = 0,
        time_to_first_token: float | None = None,
        peak_memory: int = 0,
        estimates: Estimates,
        lookahead: int | Literal["auto"] | None = 0,
    ) -> Statistics:
        """The statistics of these counters.

        Args:
            elapsed: seconds since the stream or the runtime began, `generation_seconds` of them generating tokens.
            num_untimed: generated tokens that had come before that part began.
            lookahead: see `advise`.
        """
        proposed, copied = self.accepted + self.rejected, self.accepted_copied + self.rejected_copied
        forced = self.accepted_grammar + self.rejected_grammar
        by_model, proposed_stale = proposed - copied - forced, self.accepted_stale + self.rejected_stale
        accepted_by_model = self.accepted - self.accepted_copied - self.accepted_grammar
        places = sorted(self.proposed_at)
        num_timed = self.generated_tokens - num_untimed
        statistics = Statistics(
            **{field.name: getattr(self, field.name) for field in attrs.fields(ShownCounts)},
            proposed=proposed,
            accepted_by_position=tuple(self.accepted_at[place] for place in places),
            proposed_by_position=tuple(self.proposed_at[place] for place in places),
            acceptance_rate=_share(self.accepted, proposed),
            copy_acceptance=_share(self.accepted_copied, copied),
            grammar_acceptance=_share(self.accepted_grammar, forced),
            model_acceptance=_share(accepted_by_model, by_model),
            fresh_acceptance=_share(accepted_by_model - self.accepted_stale, by_model - proposed_stale),
            stale_acceptance=_share(self.accepted_stale, proposed_stale),
            rows_per_pass=self.pass_rows / self.pass_shares if self.pass_shares else None,
            tokens_per_round=_ratio(self.generated_tokens, self.rounds),
            prompt_tps=_ratio(self.prefilled_tokens, self.prefill_seconds),
            generation_tps=num_timed / generation_seconds if num_timed > 0 and generation_seconds > 0 else None,
            time_to_first_token=time_to_first_token,
            target_busy=min(1.0, _ratio(self.target_seconds, elapsed)),
            draft_busy=min(1.0, _ratio(self.draft_seconds, elapsed)),
            elapsed=elapsed,
            peak_memory=peak_memory,
            estimates=estimates,
        )
        return attrs.evolve(statistics, advice=tuple(advise(statistics, lookahead)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


# --- advice ---------------------------------------------------------------------------------------


def advise(s: Statistics, lookahead: int | Literal["auto"] | None) -> Iterator[str]:
    """Sentences on what would be faster, most important first; none if nothing stands out, or nothing is known yet.

    `lookahead` is the setting: 0 if nothing is drafted, None for several streams with different settings.
    """
    if lookahead == 0 or s.rounds < MIN_ROUNDS:
        return
    draft_s, decode_s = s.estimates.draft_seconds, s.estimates.verify_seconds
    if s.draft_failures:
        yield "the drafter failed, and the rest was decoded without it; the warnings of the logger 'outrider' say why"
    if s.draft_timeouts:
        yield (
            f"the target went on alone {s.draft_timeouts} times because the drafter was late, with a proposal or with "
            "the prompt; use a smaller draft model, or see what else keeps its device busy"
        )
    is_plausible = s.estimates.is_plausible
    if is_plausible and 0 < decode_s <= draft_s:
        yield (
            f"a draft step takes {_duration(draft_s)} and a decoding step of the target {_duration(decode_s)}, so "
            'drafting cannot pay; use a smaller draft model, or draft="ngram"'
        )
    speed_up = modelled_speed_up(s) if is_plausible else None
    if isinstance(lookahead, int) and speed_up is not None and speed_up < MIN_SPEED_UP:
        yield (
            f"lookahead={lookahead} decodes about {speed_up:.1f}× as fast as plain decoding would, by what the passes "
            'cost here; use lookahead="auto"'
        )
    num_of_others = s.accepted_copied + s.rejected_copied + s.accepted_grammar + s.rejected_grammar
    num_of_model = s.proposed - num_of_others
    if s.model_acceptance is not None and s.model_acceptance < LOW_ACCEPTANCE and num_of_model >= MIN_PROPOSED:
        yield (
            f"only {s.model_acceptance:.0%} of {num_of_model} drafted tokens were accepted; use a draft model that is "
            "closer to the target, or was trained on such texts"
        )
    if s.n1_rounds > MAX_SHARE_OF_ROUNDS * s.rounds:
        yield (
            f"in {s.n1_rounds} of {s.rounds} rounds the caches could undo nothing (N=1), and speculation gains nothing "
            'then; open the models with rewind="auto" and without max_kv_size'
        )
    # If the drafter was late, an earlier sentence says so.
    if s.resting_rounds > MAX_SHARE_OF_ROUNDS * s.rounds and not s.draft_timeouts:
        yield (
            f"{s.resting_rounds} of {s.rounds} rounds were left to the target alone, since speculating does not pay "
            "here; without a draft nothing would be slower"
        )


def modelled_speed_up(s: Statistics) -> float | None:
    """Speed of these rounds by measured prices, not the clock, as a multiple of plain decoding's; None if unknown."""
    prices, num_verdicts = s.estimates, s.lookahead_hits + s.lookahead_misses
    plain_s = prices.plain_seconds or prices.verify_seconds
    if plain_s <= 0 or prices.verify_seconds <= 0 or s.rounds == 0:
        return None
    num_drafted = s.proposed / s.rounds
    verify_s = prices.verify_seconds + num_drafted * prices.verify_seconds_per_token
    drafting_s = num_drafted * prices.draft_seconds
    # On a miss the target waits for the drafter; on a hit only if the drafter cannot keep pace.
    miss_rate = s.lookahead_misses / num_verdicts if num_verdicts else 1.0
    waiting_s = max(miss_rate * drafting_s, drafting_s - verify_s)
    contention_s = min(1.0, prices.contention) * (1.0 - miss_rate) * min(drafting_s, verify_s)
    return s.tokens_per_round * plain_s / (verify_s + waiting_s + contention_s)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
