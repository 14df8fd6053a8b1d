"""The benchmark compares drafters of all kinds in one run, with the same plain decoding."""

from __future__ import annotations

import attrs
import pytest
from command_line import json_of, ran
from models import llama, near
from sweeps import sweep

import runtime
from runtime.bench.contenders import Contender
from runtime.bench.one_stream import OneStream, OneStreamPlan, named_drafts

SMALL = {"max_tokens": 16, "repeats": 1, "num_draft_tokens": (2,), "lookaheads": (0, 2, "auto")}


@sweep(
    ("drafts", "names"),
    [
        (["org/small", "ngram"], ["small", "ngram"]),
        (["a/draft", "b/draft/", "c"], ["a/draft", "b/draft/", "c"]),
        (["org/target", "x"], ["org/target", "x"]),
        (["mtp"], ["mtp"]),
    ],
)
def test_drafters_are_named_by_the_last_part_that_tells_them_apart(drafts, names):
    assert list(named_drafts(drafts)) == names
    assert list(named_drafts(drafts).values()) == drafts


def test_a_drafter_that_is_there_twice_is_refused():
    with pytest.raises(runtime.SettingsError, match="'org/small' is there twice"):
        named_drafts(["org/small", "ngram", "org/small"])


def test_on_ranks_this_runtimes_plain_decoding_is_what_the_others_are_compared_with():
    plan = OneStreamPlan(is_on_ranks=True, lookaheads=["auto", 0])
    assert plan.contenders == (Contender("outrider", 0), Contender("outrider", "auto"))
    assert attrs.evolve(plan, lookaheads=[2]).contenders == (Contender("outrider", 0), Contender("outrider", 2))


@pytest.mark.slow
async def test_draft_models_and_lookup_are_compared_with_the_same_plain_decoding():
    target = llama()
    drafts = [(near(target, noise=0.02), None), "ngram"]
    plan = OneStreamPlan(prompts=[[1, 2, 3, 1, 2, 3, 1]], **SMALL)
    result = await OneStream(plan).measure((target, None), drafts)
    assert [(row.name, row.draft) for row in result.rows] == [
        ("mlx-lm plain", None),
        ("mlx-lm speculative 2, Model", "Model"),
        ("outrider lookahead 0", None),
        ("outrider lookahead 2, Model", "Model"),
        ("outrider lookahead auto, Model", "Model"),
        ("outrider lookahead 2, ngram", "ngram"),
        ("outrider lookahead auto, ngram", "ngram"),
    ]
    assert result.is_complete
    assert result.dtypes == {"target": ("float32",), "Model": ("float32",)}
    for row in result.rows:
        assert (row.failure, row.same_texts, row.num_texts) == (None, 1, 1)
        assert row.vs_plain == row.median / result.rows[0].median
        assert row.stale_acceptance is None


@pytest.mark.slow
async def test_one_drafter_in_a_list_is_the_only_one():
    target = llama()
    plan = OneStreamPlan(prompts=[[1, 2, 3]], max_tokens=16, repeats=1, num_draft_tokens=(2,), lookaheads=(2,))
    result = await OneStream(plan).measure((target, None), [(near(target, noise=0.02), None)])
    assert [row.name for row in result.rows] == ["mlx-lm plain", "mlx-lm speculative 2", "outrider lookahead 2"]
    assert [row.draft for row in result.rows] == [None, "Model", "Model"]


@pytest.mark.slow
def test_the_command_compares_a_trained_drafter_with_lookup(capsys):
    small = ["--prompt", "def quicksort(items):\n    if len(items)", "-m", "16", "--repeats", "1"]
    small += ["--num-draft-tokens", "none", "--lookahead", "2"]
    said = json_of(capsys, "bench", "--draft", str(runtime.DEMO_TRAINED_DRAFT), "--draft", "ngram", *small, "--json")
    assert [row["draft"] for row in said["rows"]] == [None, "trained_draft", "ngram"]
    assert said["draft"] == f"{runtime.DEMO_TRAINED_DRAFT}, ngram"
    plain, trained, lookup = said["rows"]
    assert plain["acceptance"] is None
    assert trained["acceptance"] > 0
    assert lookup["stale_acceptance"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "ngram", "--draft", "none"], "--draft none is for plain decoding"),
        (["--draft", "ngram", "--draft", "x/y", "--streams", "2"], "--streams measures one drafter, got 2"),
    ],
)
def test_drafters_that_cannot_be_compared_are_refused(arguments, said, capsys):
    assert said in ran(capsys, "bench", *arguments, status=2).err
