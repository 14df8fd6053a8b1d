"""The benchmark of many streams: order of the runs, and how figures are computed. No speed is asserted."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import trio
from command_line import ran, refusal
from models import greedy, mamba, near
from our_threads import outrider_threads
from plot_texts import texts_of
from sweeps import sweep

import runtime
from runtime.bench.contenders import BATCHED, Contender, ContenderRunner, Run, run_of, window_of
from runtime.bench.many_streams import ManyStreams, StreamsPlan, streams_contender
from runtime.loading.demo import STREAM_PROMPTS
from runtime.measuring.timing import TimedToken

pytestmark = pytest.mark.slow

PROMPTS = ([1, 2, 3], [5, 8, 13, 21], [34, 55])
ONE_BY_ONE, IN_TURNS, AT_ONCE = (
    streams_contender("one after another", "auto"),
    streams_contender("in turns", "auto"),
    streams_contender("at once", "auto"),
)


def small(**changes: Any) -> StreamsPlan:
    """A plan that takes a moment."""
    settings: dict[str, Any] = {"prompts": PROMPTS, "streams": (1, 3), "max_tokens": 16, "repeats": 2}
    return StreamsPlan(**settings | changes)


# --- plans ----------------------------------------------------------------------------------------


def test_each_lookahead_is_measured_one_after_another_and_at_once_and_batches_come_last():
    assert StreamsPlan().contenders == (ONE_BY_ONE, IN_TURNS, AT_ONCE, BATCHED)
    ways = small(lookaheads=(0, "auto")).contenders
    assert ways == (
        streams_contender("one after another", 0),
        streams_contender("in turns", 0),
        streams_contender("at once", 0),
        ONE_BY_ONE,
        IN_TURNS,
        AT_ONCE,
        BATCHED,
    )
    assert [way.name for way in ways[2:5]] == [
        "outrider at once, lookahead 0", "outrider one after another", "outrider in turns"
    ]  # fmt: skip


def test_by_default_up_to_sixteen_streams_have_a_prompt_each():
    assert StreamsPlan().streams == (1, 2, 4, 8, 16)
    assert len(set(STREAM_PROMPTS)) == len(STREAM_PROMPTS) == 16


# --- figures --------------------------------------------------------------------------------------


def moments(*at: float) -> list[TimedToken]:
    return [TimedToken(i, False, moment) for i, moment in enumerate(at)]


def test_a_group_is_timed_to_its_last_token_and_waits_within_streams():
    texts = [moments(11.0, 12.0, 15.0), moments(14.0, 14.5)]
    group = run_of(texts, 10.0, window_of(texts, 10.0, with_prompts=True))
    assert (group.num_tokens, group.seconds, group.first_tokens, group.longest_wait) == (5, 5.0, (1.0, 4.0), 3.0)
    assert group.texts == ((0, 1, 2), (0, 1))
    assert group.target_seconds is group.rounds is None


def a_group(seconds: float, texts: tuple[tuple[int, ...], ...] = ((7, 8), (9, 9)), **changes: Any) -> Run:
    return Run(
        **{"texts": texts, "seconds": seconds, "num_timed": 4, "first_tokens": (0.5, 1.5), "longest_wait": 0.25}
        | changes
    )


OF_OURS = {
    "rounds": 2, "proposed": 6, "accepted": 3, "hits": 1, "misses": 3, "drafted": 8, "passes": 2, "pass_rows": 2,
    "target_seconds": 0.5, "draft_seconds": 0.25,
}  # fmt: skip


def scripted(**changes: Any) -> ManyStreams:
    """Two repeats of two streams: in sequence they take a second, at once half of it, in a batch a quarter."""
    measured = ManyStreams(small(streams=(2,), **changes))
    measured.alone = [(7, 8), (9, 9), (1,)]
    for repeat in range(2):
        measured.contest.turns[repeat, 2] = {
            ONE_BY_ONE: a_group(1.0 + repeat, **OF_OURS),
            IN_TURNS: a_group(0.75, **OF_OURS),
            AT_ONCE: a_group(0.5, longest_wait=0.5 + repeat, peak_bytes=100 - repeat, **OF_OURS | {"passes": 1}),
            BATCHED: a_group(0.25, ((7, 8), (9, repeat))),
        }
    return measured


def test_streams_are_held_to_the_same_ones_one_after_another_and_to_batches():
    one_by_one, in_turns, at_once, batched = scripted().result().rows
    assert (one_by_one.speeds, one_by_one.median, one_by_one.low, one_by_one.high) == ((4.0, 2.0), 3.0, 2.0, 4.0)
    assert (one_by_one.vs_one_after_another, at_once.vs_one_after_another) == (1.0, 8 / 3)
    assert (in_turns.vs_in_turns, at_once.vs_in_turns, one_by_one.vs_in_turns) == (1.0, 1.5, 3 / (16 / 3))
    assert (batched.vs_one_after_another, batched.vs_batched, at_once.vs_batched) == (None, 1.0, 0.5)
    assert batched.vs_in_turns is None


def test_the_rest_is_counted_over_all_groups():
    one_by_one, _, at_once, batched = scripted().result().rows
    assert (one_by_one.rows_per_pass, at_once.rows_per_pass, batched.rows_per_pass) == (1.0, 2.0, None)
    assert (at_once.peak_bytes, batched.peak_bytes) == (100, 0)
    assert (at_once.target_busy, at_once.draft_busy) == (1.0, 0.5)
    assert (at_once.tokens_per_round, at_once.proposal, at_once.acceptance) == (2.0, 3.0, 0.5)
    assert (at_once.hit_rate, at_once.drafted_per_token) == (0.25, 2.0)
    assert (at_once.first_token, at_once.longest_wait, one_by_one.longest_wait) == (1.0, 1.5, 0.25)
    assert (batched.target_busy, batched.proposal, batched.acceptance, batched.hit_rate) == (None,) * 4


def test_texts_that_differ_from_those_alone_are_counted_if_greedy():
    assert [(row.same_texts, row.num_texts) for row in scripted().result().rows] == [(4, 4)] * 3 + [(2, 4)]
    assert {row.same_texts for row in scripted(temperature=0.5).result().rows} == {None}


def test_more_streams_than_prompts_are_compared_with_the_prompts_again():
    measured = scripted()
    measured.alone = [(7, 8)]
    assert measured.result().rows[1].same_texts == 2


# --- real models ----------------------------------------------------------------------------------


async def test_every_stream_has_the_text_that_its_prompt_has_alone(pair):
    target, draft = pair
    gc.collect()  # what earlier tests have left, and would be freed while memory is measured
    measured = ManyStreams(small(streams=(1, 4), lookaheads=("auto", 2), repeats=1))
    result = await measured.measure((target, None), (draft, None))
    assert (result.is_complete, result.repeats_done, result.streams) == (True, 1, (1, 4))
    alone = [tuple(greedy(target, prompt, 16)) for prompt in PROMPTS]
    assert measured.alone == alone
    for (_, streams), turn in measured.contest.turns.items():
        assert set(turn) == set(measured.plan.contenders)
        for way, group in turn.items():
            # The fourth stream begins with the first prompt again.
            assert group.texts == (*alone, alone[0])[:streams], way
    for row in result.rows:
        assert (row.same_texts, row.num_texts, row.failure) == (row.streams, row.streams, None)
        assert None not in (row.median, row.first_token, row.longest_wait)
        if row.kind == "batched":
            assert (row.target_busy, row.tokens_per_round) == (None, None)
        else:
            assert 0 < row.target_busy <= 1
            assert row.tokens_per_round >= 1
            assert row.peak_bytes > 0
            assert row.rows_per_pass == 1 or (row.kind == "at once" and row.streams > 1)
    assert not outrider_threads()


async def test_all_begin_at_once_or_each_when_the_one_before_has_ended(pair):
    target, draft = pair
    measured = ManyStreams(small(streams=(3,), repeats=1))
    most: dict[str, int] = {}
    real: Callable[..., Any] = ContenderRunner._run_outrider

    async def watched(self: ContenderRunner, way: Contender, *arguments: Any) -> Run:
        rt, events = self._runtimes[way.runtime]
        events.listen(lambda _: most.__setitem__(way.kind, max(most.get(way.kind, 0), rt.num_streams)))
        return await real(self, way, *arguments)  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContenderRunner, "_run_outrider", watched)
        await measured.measure((target, None), (draft, None))
    assert most["at once"] == most["in turns"] == 3


async def test_caches_that_mlx_lm_cannot_batch_are_noted_only(pair, monkeypatch):
    target, draft = pair

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no cache to merge")

    monkeypatch.setattr(runtime.bench.contenders, "BatchGenerator", refuse)
    result = await ManyStreams(small(repeats=1)).measure((target, None), (draft, None))
    assert result.is_complete
    assert [row.failure for row in result.rows if row.kind == "batched"] == ["no cache to merge"] * 2
    assert {row.same_texts for row in result.rows if row.streams == 3 and row.kind != "batched"} == {3}


async def test_streams_of_a_recurrent_target_are_measured_too():
    target = mamba()
    result = await ManyStreams(small(repeats=1)).measure((target, None), (near(target, noise=0.02), None))
    assert [row.same_texts for row in result.rows if row.kind == "at once"] == [1, 3]


async def test_a_cancellation_keeps_what_was_measured_and_leaves_no_thread(pair):
    target, draft = pair
    measured = ManyStreams(small(repeats=5))
    with trio.CancelScope() as scope:

        def look(what: str) -> None:
            if what.startswith("repeat 2 of 5, 3 streams"):
                scope.cancel()

        await measured.measure((target, None), (draft, None), on_progress=look)
    assert scope.cancelled_caught
    result = measured.result()
    assert (result.repeats_done, result.is_complete) == (2, False)
    assert [len(row.speeds) for row in result.rows] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert not outrider_threads()


# --- the command ----------------------------------------------------------------------------------


def arguments(saved: tuple[str, str], *more: str) -> list[str]:
    small = ["--streams", "1,2", "--prompt", "w1 w2 w3", "--prompt", "w4 w5", "--max-tokens", "16", "--repeats", "1"]
    return ["bench", "--target", saved[0], "--draft", saved[1], *small, *more]


def test_the_table_has_every_way_for_every_number_of_streams(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = ran(capsys, *arguments(saved, "--plot", str(tmp_path / "streams.svg")))
    assert err == ""
    for way in ("one by one", "in turns", "at once", "BatchGenerator"):
        assert sum(way in line and " ms" in line for line in out.splitlines()) == 2
    assert "each of 16 tokens, temperature 0" in out
    assert "1 of 1" in out
    texts = texts_of(tmp_path / "streams.svg")
    for streams in ("1 stream, ", "2 streams, "):
        assert sum(text.startswith(streams) for text in texts) == 4


def test_json_has_all_that_was_measured(saved, capsys):
    out, err = ran(capsys, *arguments(saved, "--json", "--lookahead", "0,2"))
    assert (out.count("\n"), err) == (1, "")
    said = json.loads(out)
    assert " ".join(sorted(said)) == (
        "clock draft dtypes is_complete machine max_tokens repeats repeats_done rows streams target temperature"
    )
    assert (said["is_complete"], said["streams"], len(said["rows"])) == (True, [1, 2], 2 * 7)
    for row in said["rows"]:
        assert " ".join(sorted(row)) == (
            "acceptance draft_busy drafted_per_token failure first_token high hit_rate kind longest_wait lookahead low "
            "median name num_texts peak_bytes proposal rows_per_pass same_texts speeds streams target_busy "
            "tokens_per_round vs_batched vs_in_turns vs_one_after_another"
        )
        assert row["same_texts"] == row["num_texts"] == row["streams"]


@sweep(
    ("more", "complaint"),
    [
        (["--streams", "0"], "streams must be whole numbers between 1 and 256, got 0 among them"),
        (["--streams", "2,many"], "got 'many' among them"),
        (["--num-draft-tokens", "2"], "mlx-lm's BatchGenerator cannot speculate"),
        (["--lookahead", "2,always"], "got 'always' among them"),
        (["--lookahead", "65"], "--lookahead must be whole numbers between 0 and 64"),
        (["--kv-bits", "8"], "--kv-bits is not for many streams: mlx-lm's BatchGenerator cannot quantise caches"),
    ],
)
def test_an_argument_that_makes_no_sense_is_one_line(more, complaint, saved, capsys):
    assert complaint in refusal(capsys, *arguments(saved, *more))
