"""Figures of the benchmarks: the order of the runs, which turns count, and how figures are computed from them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sweeps import sweep

import runtime
from runtime.bench.benchmark import Benchmark, Case, named_drafts, running_order, time_left
from runtime.bench.contenders import BATCHED, PLAIN, Contender, Length, Run
from runtime.bench.figures import failures, ratio, share, total
from runtime.bench.many_streams import ManyStreams, streams_contender
from runtime.bench.one_stream import OneStream
from runtime.bench.overhead import CONTENDERS, Overhead, contenders_of
from runtime.bench.prompt_files import BenchPrompt

ABOUT = {"target": "t", "draft": "d", "dtypes": {"target": ["float32"]}, "machine": {"device": "cpu"}, "num_ranks": 1}
MLX_LM, OURS = Contender("mlx-lm", 2), Contender("outrider", "auto")

# --- computing ------------------------------------------------------------------------------------


def test_sums_and_ratios_of_what_is_not_known_are_not_known() -> None:
    runs = [Run((), 1.0, 1, counts={"a": 1, "b": 2}), Run((), 1.0, 1, counts={"a": 3})]
    assert (total(runs, "a"), total(runs[:1], "a", "b"), total(runs, "b"), total([], "a")) == (4, 3, None, None)
    assert (ratio(1, 2), ratio(None, 2), ratio(1, None), ratio(1, 0)) == (0.5, None, None, None)
    assert (share(runs[:1], "a", "a", "b"), share(runs, "a", "b")) == (1 / 3, None)


def test_every_turn_has_everyone_once_begins_elsewhere_and_every_other_goes_backwards() -> None:
    everyone = ("a", "b", "c", "d")
    turns = [running_order(everyone, turn) for turn in range(2 * len(everyone))]
    for turn in turns:
        assert sorted(turn) == [*everyone]
    assert {turn[0] for turn in turns} == {*everyone}
    # No contender always follows the same one.
    neighbours = {pair for turn in turns[:2] for pair in itertools.pairwise(turn)}
    assert any((b, a) in neighbours for a, b in neighbours)


@sweep(
    ("seconds", "done", "said"), [(3.0, 0.0, ""), (10.0, 0.25, ", about 30 s left"), (60.0, 0.25, ", about 3 min left")]
)
def test_the_time_that_is_left_follows_from_what_is_done(seconds: float, done: float, said: str) -> None:
    assert time_left(seconds, done) == said


def prepared(benchmark: Benchmark, num_cases: int, **more: Any) -> Any:
    """A benchmark whose models are loaded, with cases of all contenders."""
    benchmark.about = ABOUT
    benchmark.cases = [Case("", benchmark.contenders, (), Length(16), **more) for _ in range(num_cases)]
    return benchmark


# --- one stream -----------------------------------------------------------------------------------


def small(**changes: Any) -> OneStream:
    prompts = ([1, 2, 3], [5, 8, 13, 21])
    settings = {"prompts": prompts, "num_draft_tokens": (2,), "lookaheads": ("auto",), "max_tokens": 16, "repeats": 2}
    return OneStream(**settings | changes)


def a_run(seconds: float, text: tuple[int, ...] = (7, 8, 9), **counts: int) -> Run:
    return Run((text,), seconds, num_timed=10, counts={"rounds": 2, "accepted": 0, "rejected": 0} | counts)


def scripted(**changes: Any) -> OneStream:
    """Two repeats of two prompts. Plain decoding takes a second, then two; mlx-lm's best half a second, Outrider a
    quarter.
    """
    measured: OneStream = prepared(small(**changes), 2)
    of_ours = {"lookahead_hits": 3, "lookahead_misses": 1, "accepted_copied": 2, "rejected_copied": 0, "passes": 2}
    for repeat, prompt in itertools.product(range(2), range(2)):
        measured.turns[repeat, prompt] = {
            PLAIN: a_run(1.0 + repeat),
            MLX_LM: a_run(0.5, accepted=4, rejected=6),
            OURS: a_run(0.25, accepted=6, rejected=2, **of_ours),
        }
    return measured


def test_contenders_are_those_that_can_run_each_once() -> None:
    plan = small(num_draft_tokens=[2, 2], lookaheads=["auto", 0, "auto"])
    assert plan.contenders == [PLAIN, MLX_LM, OURS, Contender("outrider", 0)]
    assert plan.contenders_of(is_on_ranks=True) == [Contender("outrider", 0), OURS]
    several = [each.name for each in plan.contenders_of(("small", "ngram"), ("small",))]
    assert several == [
        "mlx-lm plain", "mlx-lm speculative 2, small", "outrider lookahead auto, small", "outrider lookahead 0",
        "outrider lookahead auto, ngram",
    ]  # fmt: skip


def test_a_plan_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(runtime.PromptError, match="there is no prompt to measure with"):
        small(prompts=())


def test_a_repeat_is_the_tokens_of_its_prompts_over_their_seconds_and_ratios_are_of_medians() -> None:
    result = scripted().result()
    plain, best, ours = result["rows"]
    assert plain["speeds"] == [10.0, 5.0]
    assert (plain["median"], plain["low"], plain["high"]) == (7.5, 5.0, 10.0)
    assert [row["vs_plain"] for row in result["rows"]] == [1.0, 20 / 7.5, 40 / 7.5]
    assert [row["vs_best_speculative"] for row in result["rows"]] == [7.5 / 20, 1.0, 2.0]
    assert result["best_speculative"] == "mlx-lm speculative 2"
    assert [row["acceptance"] for row in result["rows"]] == [None, 0.4, 0.75]
    assert [row["copy_acceptance"] for row in result["rows"]] == [None, None, 1.0]
    assert {row["tokens_per_round"] for row in result["rows"]} == {1.5}
    assert (best["hit_rate"], ours["hit_rate"]) == (None, 0.75)


def test_texts_are_compared_with_plain_decodings_if_they_are_greedy() -> None:
    measured = scripted()
    measured.turns[1, 0][OURS] = a_run(0.25, (7, 8, 1))
    assert [(row["same_texts"], row["num_texts"]) for row in measured.result()["rows"]] == [(4, 4), (4, 4), (3, 4)]
    assert {row["same_texts"] for row in scripted(temperature=0.5).result()["rows"]} == {None}


def test_a_turn_that_was_cut_short_counts_for_nobody() -> None:
    measured = scripted()
    del measured.turns[1, 1][OURS]
    assert (measured.is_complete, measured.repeats_done) == (False, 2)
    assert {row["num_texts"] for row in measured.result()["rows"]} == {3}
    del measured.turns[1, 0]
    assert measured.repeats_done == 1


def test_nothing_measured_is_no_figure_and_no_error() -> None:
    for empty in (small(), ManyStreams(), Overhead()):
        result = empty.result()
        assert (result["repeats_done"], result["is_complete"]) == (0, False)
        assert {row["median"] for row in result["rows"]} == {None}
        empty.about = ABOUT
        assert {row[-1] for _, table in empty.report(empty.result()).tables for row in table.rows} <= {"0/0", "–"}


def test_who_cannot_run_holds_up_nobody() -> None:
    measured = scripted()
    measured.failures[MLX_LM] = "no cache to trim"
    for turn in measured.turns.values():
        del turn[MLX_LM]
    result = measured.result()
    assert result["is_complete"]
    assert failures(result) == ["mlx-lm speculative 2 cannot run: no cache to trim"]
    assert (result["rows"][2]["vs_plain"], result["best_speculative"]) == (40 / 7.5, None)
    (_, table), *_ = measured.report(result).tables
    assert table.rows[1] == ("mlx-lm speculative 2", "failed", "–", "–", "–", "–", "0/0")


def test_kinds_of_text_have_medians_of_their_prompts_with_quartiles() -> None:
    talk, code = BenchPrompt(("one", "two"), "talk", is_chat=True), BenchPrompt(([1, 2],), "code")
    measured = prepared(small(prompts=[talk, code], repeats=1, num_draft_tokens=()), 3)
    # Speeds of 10, 10 and 10 tokens per second plainly, and of 20, 40 and 10.
    for case, seconds in enumerate((0.5, 0.25, 1.0)):
        copied = {"accepted": 2, "accepted_copied": case, "rejected_copied": 0, "passes": 4}
        measured.turns[0, case] = {PLAIN: a_run(1.0), OURS: a_run(seconds, **copied)}
    result = measured.result()
    found = {row["category"]: row for row in result["categories"]}
    assert list(found) == ["talk", "code", "all"]
    talk_row = found["talk"]
    assert (talk_row["num_prompts"], talk_row["plain"], talk_row["ours"]) == (2, 10.0, 30.0)
    assert (talk_row["ratio"], talk_row["ratio_low"], talk_row["ratio_high"]) == (3.0, 2.5, 3.5)
    assert (talk_row["accepted_per_pass"], talk_row["from_drafter"], talk_row["from_copies"]) == (0.5, 0.5, 1 / 6)
    assert (found["code"]["ratio"], found["code"]["ratio_low"], found["all"]["ratio"]) == (1.0, None, 2.0)
    _, (title, table) = measured.report(result).tables
    assert title == "By kind of text"
    assert table.rows[0] == ("talk", "2", "10.0", "30.0", "3.00 (2.50–3.50)", "0.50", "50%", "17%", "2/2")


def test_an_answer_of_one_token_has_no_speed_and_hides_no_other() -> None:
    prompts = [BenchPrompt(("hi",), "talk", is_chat=True)] * 2
    measured = prepared(small(prompts=prompts, num_draft_tokens=()), 2)
    for case, timed in enumerate((0, 10)):
        run = Run(((7,),), 0.0 if timed == 0 else 1.0, timed)
        measured.turns[0, case] = {PLAIN: run, OURS: run}
    (row,) = measured.result()["categories"]
    assert (row["num_prompts"], row["ratio"]) == (1, 1.0)


@sweep(
    ("drafts", "names"),
    [
        (["org/small", "ngram"], ["small", "ngram"]),
        (["a/draft", "b/draft/", "c"], ["a/draft", "b/draft/", "c"]),
        (["org/target", "x"], ["org/target", "x"]),
        (["mtp"], ["mtp"]),
    ],
)
def test_drafters_are_named_by_the_last_part_that_tells_them_apart(drafts: list[Any], names: list[str]) -> None:
    assert named_drafts(drafts) == dict(zip(names, drafts, strict=True))


def test_a_drafter_that_is_there_twice_is_refused() -> None:
    with pytest.raises(runtime.SettingsError, match="'org/small' is there twice"):
        named_drafts(["org/small", "ngram", "org/small"])


# --- many streams, and the runtime itself ---------------------------------------------------------

ONE_BY_ONE, IN_TURNS, AT_ONCE = (
    streams_contender(kind, "auto") for kind in ("one after another", "in turns", "at once")
)


def test_streams_are_held_to_the_same_ones_in_other_ways() -> None:
    measured = prepared(ManyStreams(streams=(2,), repeats=2), 1, expected=[(7, 8), (7, 8)])

    def streams(seconds: float, text: tuple[int, ...] = (7, 8), **counts: int) -> Run:
        return Run(((7, 8), text), seconds, num_timed=4, first_tokens=(0.5, 1.5), counts=counts)

    for repeat in range(2):
        counts = {"rounds": 2, "accepted": 3, "rejected": 3, "passes": 2, "pass_rows": 2}
        measured.turns[repeat, 0] = {
            ONE_BY_ONE: streams(1.0 + repeat, **counts),
            IN_TURNS: streams(0.75, **counts),
            AT_ONCE: streams(0.5, **counts | {"passes": 1}),
            BATCHED: streams(0.25, (7, repeat)),
        }
    one_by_one, in_turns, at_once, batched = measured.result()["rows"]
    assert (one_by_one["speeds"], at_once["vs_one_after_another"]) == ([4.0, 2.0], 8 / 3)
    assert (in_turns["vs_in_turns"], at_once["vs_in_turns"], at_once["vs_batched"]) == (1.0, 1.5, 0.5)
    assert (batched["vs_one_after_another"], batched["vs_in_turns"], batched["vs_batched"]) == (None, None, 1.0)
    assert (one_by_one["rows_per_pass"], at_once["rows_per_pass"], batched["rows_per_pass"]) == (1.0, 2.0, None)
    assert (at_once["tokens_per_round"], at_once["acceptance"], at_once["first_token"]) == (2.0, 0.5, 1.0)
    assert [row["same_texts"] for row in (one_by_one, batched)] == [4, 2]
    (_, table), *_ = measured.report(measured.result()).tables
    assert table.rows[2] == ("2", "at once", "8.0 (8.0–8.0)", "2.67", "1.50", "0.50", "2.00", "1000 ms", "4/4")


def test_one_stream_is_compared_with_generate_step_and_more_with_batches() -> None:
    overhead = Overhead(streams=(1, 2), repeats=3)
    overhead.about = ABOUT
    overhead.cases = [Case("", contenders_of(streams), (), Length(16)) for streams in (1, 2)]
    for repeat, factor in enumerate((1.0, 3.0)):
        for place, streams in enumerate((1, 2)):
            overhead.turns[repeat, place] = {
                contender: Run((), 1e-6 * factor * (10 + 5 * place + i), 1)
                for i, contender in enumerate(contenders_of(streams))
            }
    overhead.turns[2, 0] = {CONTENDERS[0]: Run((), 1.0, 1)}  # interrupted
    result = overhead.result()
    assert (result["repeats_done"], result["is_complete"]) == (2, False)
    names = [row["name"] for row in result["rows"]]
    ours = ["outrider plain", "outrider resting", "outrider lookahead 2"]
    assert names == ["mlx-lm generate_step", "mlx-lm BatchGenerator", *ours, "mlx-lm BatchGenerator", *ours]
    assert result["rows"][-1]["vs_mlx_lm"] == pytest.approx(18 / 15)
    (_, table), *_ = overhead.report(result).tables
    assert table.rows[0] == ("1", "mlx-lm generate_step", "20.0 (10–30)", "1.00")
