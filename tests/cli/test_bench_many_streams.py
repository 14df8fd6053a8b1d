"""The benchmark of many streams: order of the runs, and how figures are computed. No speed is asserted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from command_line import ran
from models import greedy
from our_threads import outrider_threads

import runtime
from runtime.bench.contenders import Contender, Run
from runtime.bench.loaded_models import LoadedModels
from runtime.bench.many_streams import ManyStreams

pytestmark = pytest.mark.slow

PROMPTS = ([1, 2, 3], [5, 8, 13, 21], [34, 55])


def small(**changes: Any) -> ManyStreams:
    """A benchmark that takes a moment."""
    settings: dict[str, Any] = {"prompts": PROMPTS, "streams": (1, 3), "max_tokens": 16, "repeats": 2}
    return ManyStreams(**settings | changes)


# --- real models ----------------------------------------------------------------------------------


async def test_every_stream_has_the_text_that_its_prompt_has_alone(pair):
    target, draft = pair
    measured = small(streams=(1, 4), lookaheads=("auto", 2), repeats=1)
    result = await measured.measure((target, None), (draft, None))
    assert (result["is_complete"], result["repeats_done"], result["streams"]) == (True, 1, [1, 4])
    alone = [tuple(greedy(target, prompt, 16)) for prompt in PROMPTS]
    for (_, index), turn in measured.turns.items():
        streams = (1, 4)[index]
        assert set(turn) == set(measured.contenders)
        for way, group in turn.items():
            # The fourth stream begins with the first prompt again.
            assert group.texts == (*alone, alone[0])[:streams], way
    assert " ".join(sorted(result)) == (
        "draft dtypes is_complete machine max_tokens num_ranks repeats repeats_done rows streams target temperature"
    )
    for row in result["rows"]:
        assert " ".join(sorted(row)) == (
            "acceptance failure first_token high hit_rate kind lookahead low median name num_texts rows_per_pass "
            "same_texts speeds streams tokens_per_round vs_batched vs_in_turns vs_one_after_another"
        )
        assert (row["same_texts"], row["num_texts"], row["failure"]) == (row["streams"], row["streams"], None)
        assert None not in (row["median"], row["first_token"])
        if row["kind"] == "batched":
            assert row["tokens_per_round"] is None
        else:
            assert row["tokens_per_round"] >= 1
            assert row["rows_per_pass"] == 1 or (row["kind"] == "at once" and row["streams"] > 1)
    assert not outrider_threads()


async def test_all_begin_at_once_or_each_when_the_one_before_has_ended(pair):
    target, draft = pair
    measured = small(streams=(3,), repeats=1)
    most: dict[str, int] = {}
    real: Callable[..., Any] = LoadedModels._run_outrider

    async def watched(self: LoadedModels, way: Contender, *arguments: Any) -> Run:
        rt, events = self._runtimes[way.runtime]
        events.listen(lambda _: most.__setitem__(way.kind, max(most.get(way.kind, 0), rt.num_streams)))
        return await real(self, way, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModels, "_run_outrider", watched)
        await measured.measure((target, None), (draft, None))
    assert most["at once"] == most["in turns"] == 3


async def test_caches_that_mlx_lm_cannot_batch_are_noted_only(pair, monkeypatch):
    target, draft = pair

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no cache to merge")

    monkeypatch.setattr(runtime.bench.contenders, "BatchGenerator", refuse)
    result = await small(repeats=1).measure((target, None), (draft, None))
    assert result["is_complete"]
    assert [row["failure"] for row in result["rows"] if row["kind"] == "batched"] == ["no cache to merge"] * 2
    assert {row["same_texts"] for row in result["rows"] if row["streams"] == 3 and row["kind"] != "batched"} == {3}


# --- the command ----------------------------------------------------------------------------------


def arguments(saved: tuple[str, str], *more: str) -> list[str]:
    small = ["--streams", "1,2", "--prompt", "w1 w2 w3", "--prompt", "w4 w5", "--max-tokens", "16", "--repeats", "1"]
    return ["bench", "--target", saved[0], "--draft", saved[1], *small, *more]


def test_the_output_has_every_way_for_every_number_of_streams(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = ran(capsys, *arguments(saved))
    assert err == ""
    about, table, notes = out.split("\n\n", 2)
    assert "each of 16 tokens, temperature 0" in about
    rows = [re.split(r" {2,}", line)[:2] for line in table.splitlines()[3:]]
    ways = ("one by one", "in turns", "at once", "batched")
    assert rows == [[n, way] for n in "12" for way in ways]
    assert all(line.endswith(f"{n}/{n}") for n, line in zip("11112222", table.splitlines()[3:], strict=True))
    assert notes.startswith("Speeds are tokens of all streams per second")
