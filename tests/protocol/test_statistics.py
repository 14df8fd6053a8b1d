"""Statistics count the tokens that the consumer was given, and every rate is defined from the beginning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedModel, agreeing, simulated, truthful
from sweeps import sweep

from protocol.prices import Estimates
from protocol.session_state import Commit
from protocol.statistics import Counts, Statistics


def commit(*tokens: int, num_from_draft: int = 0, num_rejected: int = 0, **more) -> Commit:
    return Commit(1, 0, 3, tokens, num_from_draft=num_from_draft, num_rejected=num_rejected, **more)


def given_all(*commits: Commit) -> Counts:
    counts = Counts()
    for each in commits:
        for index in range(len(each.tokens)):
            counts.give(each, index)
    return counts


ESTIMATES = Estimates(
    verify_seconds=0.5,
    verify_seconds_per_token=0.125,
    draft_seconds=0.0625,
    contention=0.25,
    plain_seconds=0.5625,
    tokens_per_second=4.0,
    acceptance=0.75,
)


def snapshot(counts: Counts, **changes) -> Statistics:
    times = {
        "elapsed": 4.0,
        "generation_seconds": 2.0,
        "num_untimed": 1,
        "time_to_first_token": 0.5,
        "peak_memory": 1000,
    }
    return counts.snapshot(**times | {"estimates": ESTIMATES} | changes)


def judged(accepted: int, rejected: int = 0) -> dict[str, Any]:
    proposed = range(accepted + rejected)
    by_place = {"accepted_at": Counter(proposed[:accepted]), "proposed_at": Counter(proposed)}
    return {"accepted": accepted, "rejected": rejected, **by_place}


# --- tokens ---------------------------------------------------------------------------------------


@sweep(("kind", "other"), [("copy", "grammar"), ("grammar", "copy")])
def test_what_was_copied_or_forced_counts_apart_from_what_a_model_has_drafted(kind, other):
    drafters = (kind, kind, "model", "model", kind)
    counts = given_all(
        commit(4, 5, 6, 9, num_from_draft=3, num_rejected=2, drafters=drafters),
        commit(7, num_from_draft=1, drafters=(kind, kind), finish_reason="stop"),  # the rest was not judged
    )
    of_kind = {
        "copy": (counts.accepted_copied, counts.rejected_copied),
        "grammar": (counts.accepted_grammar, counts.rejected_grammar),
    }
    assert (counts.accepted, counts.rejected, of_kind[kind], of_kind[other]) == (4, 2, (3, 1), (0, 0))
    statistics = snapshot(counts)
    acceptance = {"copy": statistics.copy_acceptance, "grammar": statistics.grammar_acceptance}
    assert acceptance == {kind: 3 / 4, other: None}
    assert statistics.model_acceptance == 1 / 2
    assert statistics.acceptance_rate == 4 / 6
    assert statistics.fresh_acceptance == statistics.model_acceptance
    assert {"copy": "3 of them copied", "grammar": "3 of them forced"}[kind] in repr(statistics)


@sweep(("num_stale", "accepted", "rejected"), [(0, 0, 0), (1, 1, 0), (2, 2, 0), (4, 2, 2), (5, 2, 3)])
def test_stale_drafts_are_counted_apart(num_stale, accepted, rejected):
    counts = given_all(commit(4, 5, 9, num_from_draft=2, num_rejected=3, num_stale=num_stale))
    assert (counts.accepted_stale, counts.rejected_stale) == (accepted, rejected)
    taken = snapshot(counts)
    assert taken.stale_acceptance == (accepted / num_stale if num_stale else None)
    assert taken.fresh_acceptance == ((2 - accepted) / (5 - num_stale) if num_stale < 5 else None)


def test_single_steps_and_rested_rounds_count_as_rounds():
    counts = given_all(commit(4, num_from_draft=1, single_step=True), commit(9, num_rejected=1, single_step=True))
    assert (counts.rounds, counts.n1_rounds) == (2, 2)
    assert (snapshot(counts).accepted_by_position, snapshot(counts).proposed_by_position) == ((1,), (2,))
    counts = given_all(commit(4, resting=True), commit(5, num_rejected=1), commit(6, resting=True))
    assert counts == Counts(generated_tokens=3, rounds=3, resting_rounds=2, **judged(0, 1))


def test_a_step_that_settles_a_replay_is_no_fallback():
    counts = given_all(commit(4, num_from_draft=1, single_step=True, settles=True))
    assert counts == Counts(generated_tokens=1, rounds=1, settling_rounds=1, **judged(1))


@sweep(
    ("num_given", "expected"),
    [
        (0, Counts()),
        (1, Counts(generated_tokens=1, rounds=1, **judged(1))),
        (2, Counts(generated_tokens=2, rounds=1, **judged(2))),
        (3, Counts(generated_tokens=3, rounds=1, **judged(2, 4))),
    ],
)
def test_what_the_consumer_was_not_given_is_not_counted(num_given, expected):
    counts = Counts()
    for index in range(num_given):
        counts.give(commit(4, 5, 9, num_from_draft=2, num_rejected=4), index)
    assert counts == expected


commits = st.builds(
    lambda num_from_draft, own, num_rejected, single_step: commit(
        *range(num_from_draft + own),
        num_from_draft=num_from_draft,
        num_rejected=num_rejected if own else 0,
        bonus=bool(own and num_from_draft and not num_rejected),
        single_step=single_step,
    ),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
).filter(lambda each: each.tokens)


@given(each=st.lists(commits, max_size=8))
def test_the_counts_of_a_whole_text_are_the_sums_over_its_commits(each):
    counts = given_all(*each)
    assert counts.generated_tokens == sum(len(c.tokens) for c in each)
    assert counts.accepted == sum(c.num_from_draft for c in each)
    assert counts.rejected == sum(c.num_rejected for c in each)
    assert counts.bonus == sum(c.bonus for c in each)
    assert counts.rounds == len(each)
    assert counts.n1_rounds == sum(c.single_step for c in each)
    assert counts.accepted_at == Counter(i for c in each for i in range(c.num_from_draft))
    assert counts.proposed_at == Counter(i for c in each for i in range(c.num_from_draft + c.num_rejected))


def test_every_count_is_added():
    fields = [field.name for field in attrs.fields(Counts)]
    counts = Counts(**{name: i + 1 for i, name in enumerate(fields)})
    counts.add(Counts(**{name: 100 * (i + 1) for i, name in enumerate(fields)}))
    # Of two longest waits the longer one is the longest of both.
    times = {name: 100 if name == "longest_wait_seconds" else 101 for name in fields}
    assert attrs.asdict(counts) == {name: times[name] * (i + 1) for i, name in enumerate(fields)}


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_carries_every_count_and_its_times():
    for_rates = {
        "accepted_at",
        "proposed_at",
        "pass_shares",
        "prefilled_tokens",
        "prefill_seconds",
        "target_seconds",
        "draft_seconds",
    }
    numbers = {field.name: i + 1 for i, field in enumerate(attrs.fields(Counts)) if field.name not in for_rates}
    taken = snapshot(Counts(**numbers))
    assert {name: getattr(taken, name) for name in numbers} == numbers
    assert (taken.elapsed, taken.time_to_first_token, taken.peak_memory) == (4.0, 0.5, 1000)
    assert taken.estimates is ESTIMATES


def test_rates_are_the_quotients_that_their_names_say():
    counts = Counts(
        prompt_tokens=30,
        generated_tokens=21,
        accepted=12,
        rejected=4,
        bonus=3,
        rounds=6,
        prefilled_tokens=28,
        prefill_seconds=0.5,
        target_seconds=3.0,
        draft_seconds=1.0,
    )
    taken = snapshot(counts, elapsed=4.0, generation_seconds=2.0)
    assert taken.proposed == 16
    assert taken.acceptance_rate == 0.75
    assert taken.tokens_per_round == 3.5
    assert taken.prompt_tps == 56.0
    assert taken.generation_tps == 10.0  # the first token began the two seconds
    assert taken.target_busy == 0.75
    assert taken.draft_busy == 0.25


def test_a_worker_is_never_busier_than_the_clock():
    # A job that spans the moment of the snapshot is counted whole.
    taken = snapshot(Counts(target_seconds=4.001, draft_seconds=9.0), elapsed=4.0)
    assert (taken.target_busy, taken.draft_busy) == (1.0, 1.0)


@given(passes=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=8))
def test_passes_of_all_streams_are_counted_once_and_their_rows_for_each(passes):
    streams = [Counts() for _ in range(4)]
    for members in passes:
        for index, stream in enumerate(sorted(members)):
            streams[stream].take_part(len(members), is_first=index == 0)
    whole = Counts()
    for counts in streams:
        whole.add(counts)
    taken = snapshot(whole)
    assert (taken.passes, taken.pass_rows) == (len(passes), sum(map(len, passes)))
    assert taken.rows_per_pass == pytest.approx(taken.pass_rows / taken.passes)
    for index, counts in enumerate(streams):
        sizes = [len(members) for members in passes if index in members]
        if sizes:
            assert min(sizes) - 1e-9 <= snapshot(counts).rows_per_pass <= max(sizes) + 1e-9
        else:
            assert snapshot(counts).rows_per_pass is None


def test_waits_are_added_and_the_longest_is_kept():
    counts = Counts()
    for seconds in (0.25, 0.5, -1e-9):
        counts.wait(seconds)
    assert (counts.wait_seconds, counts.longest_wait_seconds) == (0.75, 0.5)


@sweep("elapsed", [0.0, 4.0])
@sweep("num_tokens", [0, 1])
def test_no_rate_is_made_up_before_there_is_anything_to_divide(elapsed, num_tokens):
    counts = given_all(*[commit(4)] * num_tokens)
    taken = snapshot(counts, elapsed=elapsed, generation_seconds=elapsed, time_to_first_token=None)
    assert taken.generation_tps is None
    assert (taken.proposed, taken.acceptance_rate, taken.prompt_tps) == (0, None, 0.0)
    assert (taken.fresh_acceptance, taken.stale_acceptance) == (None, None)
    assert taken.tokens_per_round == num_tokens
    assert (taken.target_busy, taken.draft_busy) == (0.0, 0.0)
    assert taken.time_to_first_token is None


def test_every_figure_is_in_the_docstring():
    documented = (Statistics.__doc__ or "").split("Attributes:")[1]
    names = {name.strip() for line in documented.splitlines() if ": " in line for name in line.split(":")[0].split(",")}
    assert {field.name for field in attrs.fields(Statistics)} <= names


# --- of streams, in simulated time ----------------------------------------------------------------


def simulated_pair() -> Any:
    return simulated(ScriptedModel(truthful), ScriptedModel(truthful))


async def test_the_first_rounds_tokens_are_no_part_of_the_speed(autojump_clock: Any) -> None:
    async with simulated_pair() as simulation, simulation.runtime.stream([1], max_tokens=30, lookahead=4) as stream:
        began = size = None
        async for token in stream:
            taken = stream.statistics()
            if taken.rounds == 1:
                began, size = trio.current_time(), token.index + 1
                assert taken.generation_tps is None
            elif began is not None and trio.current_time() > began:
                seconds = trio.current_time() - began
                assert taken.generation_tps == pytest.approx((token.index + 1 - size) / seconds)
        assert taken.rounds > 3


@sweep("max_batch", [1, 2, 8])
@sweep("lookahead", [0, 2])
async def test_the_passes_of_streams_add_up_to_those_that_the_target_has_run(
    max_batch: int, lookahead: int, autojump_clock: Any
) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.5)), max_batch=max_batch) as simulation:
        completions = await simulation.runtime.generate_many([[1], [2], [3], [4]], max_tokens=20, lookahead=lookahead)
        spans = [span for span in simulation.spans("target") if span.kind in ("verify", "decode")]
        whole, streams = simulation.runtime.statistics(), [completion.statistics for completion in completions]
    assert whole.passes == sum(stream.passes for stream in streams) == len(spans)
    assert whole.pass_rows == sum(stream.pass_rows for stream in streams) == sum(len(s.shares) or 1 for s in spans)
    for name in ("prompt_tokens", "generated_tokens", "proposed", "accepted", "bonus", "rounds", "lookahead_hits"):
        assert getattr(whole, name) == sum(getattr(stream, name) for stream in streams)
    assert whole.rows_per_pass == pytest.approx(whole.pass_rows / whole.passes)
    assert (whole.rows_per_pass > 1) == (max_batch > 1)
    assert whole.wait_seconds == pytest.approx(sum(stream.wait_seconds for stream in streams))
    longest = max(stream.longest_wait_seconds for stream in streams)
    assert whole.longest_wait_seconds == longest
    # Where all share every pass, nobody waits.
    assert longest > 0 or (max_batch >= len(streams) and lookahead == 0)


async def test_a_pass_whose_stream_was_closed_meanwhile_is_counted_for_the_runtime(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        stream = simulation.runtime.stream([1], max_tokens=50)
        await anext(stream)
        await stream.aclose()
        await trio.sleep(100)
        num_passes = sum(span.kind in ("verify", "decode") for span in simulation.spans("target"))
        assert simulation.runtime.statistics().passes == num_passes > stream.statistics().rounds
