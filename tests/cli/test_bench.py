"""`outrider bench`: threads, texts and cancellation on real models, and what the command prints and refuses.

No speed is asserted: speeds of tiny models mean nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import models
import pytest
import trio
from command_line import json_of, ran
from interrupts import Interrupted
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import greedy, llama, mamba, near
from our_threads import outrider_threads

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from runtime.bench import loaded_models
from runtime.bench.contenders import Contender, Length, take_until_cancelled
from runtime.bench.loaded_models import EventSwitch, LoadedModels
from runtime.bench.one_stream import OneStream
from runtime.bench.prompt_files import BenchPrompt
from runtime.cli import bench_command
from runtime.cli import main as cli
from runtime.loading.blas import THREAD_VARIABLES, VARIABLE, candidates

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

PROMPTS = ([1, 2, 3], [5, 8, 13, 21])


def small(**changes: Any) -> OneStream:
    """A benchmark that takes a moment."""
    settings: dict[str, Any] = {"prompts": PROMPTS, "num_draft_tokens": (1, 3), "lookaheads": (0, 2, "auto")}
    return OneStream(**settings | {"max_tokens": 16, "repeats": 2} | changes)


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_mlx_lm_quantises_its_caches_as_the_runtime_does(num_draft_tokens, monkeypatch):
    import runtime.bench.contenders

    asked: list[dict[str, Any]] = []

    def steps(*_: Any, **keywords: Any) -> Iterator[tuple[int, ...]]:
        asked.append(keywords)
        return iter(())

    for name in ("generate_step", "speculative_generate_step"):
        monkeypatch.setattr(runtime.bench.contenders, name, steps)
    options = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=9)
    target, draft = object(), object()
    assert list(runtime.bench.contenders.mlx_lm_steps(target, draft, (1,), num_draft_tokens, Length(16), options)) == []
    (keywords,) = asked
    assert (keywords["kv_bits"], keywords["kv_group_size"], keywords["quantized_kv_start"]) == (8, 32, 9)


# --- real models ----------------------------------------------------------------------------------


async def test_everyone_runs_and_writes_plain_decodings_text(pair, monkeypatch):
    opened = []

    def running(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return real(*arguments, **options)

    real = loaded_models.running
    monkeypatch.setattr(loaded_models, "running", running)
    target, draft = pair
    measured = small()
    result = await measured.measure((target, None), (draft, None))
    assert len(opened) == 3  # each of ours has a runtime of its own for the whole benchmark
    assert [row["name"] for row in result["rows"]] == [contender.name for contender in measured.contenders]
    assert (result["is_complete"], result["repeats_done"]) == (True, 2)
    assert result["dtypes"] == {"target": ("float32",), "draft": ("float32",)}
    assert " ".join(sorted(result)) == (
        "best_speculative categories draft dtypes is_complete machine max_tokens num_prompts num_ranks repeats "
        "repeats_done rows target temperature"
    )
    expected = [tuple(greedy(target, prompt, 16)) for prompt in PROMPTS]
    for (_, prompt), turn in measured.turns.items():
        for contender, run in turn.items():
            assert run.texts == (expected[prompt],), contender
    for row in result["rows"]:
        assert " ".join(sorted(row)) == (
            "acceptance copy_acceptance draft engine failure high hit_rate lookahead low median name num_texts "
            "same_texts speeds tokens_per_round vs_best_speculative vs_plain"
        )
        assert (row["same_texts"], row["num_texts"], row["failure"]) == (4, 4, None)
        assert len(row["speeds"]) == 2
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert row["vs_plain"] == row["median"] / result["rows"][0]["median"]
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["mlx-lm plain"]["acceptance"] is rows["outrider lookahead 0"]["acceptance"] is None
    for name in ("mlx-lm speculative 3", "outrider lookahead 2"):
        assert 0 < rows[name]["acceptance"] <= 1


async def test_mlx_lms_proposals_are_those_that_its_target_judged(pair):
    # A drafter that is always wrong: each round proposes k tokens, or as many as are still due, and yields one.
    target, _ = pair
    measured = partial(small, num_draft_tokens=(3,), lookaheads=(3,), prompts=PROMPTS[:1], repeats=1)
    result = await measured().measure((target, None), (models.Shifted(llama()), None))
    for row in result["rows"][1:]:
        assert (row["acceptance"], row["tokens_per_round"]) == (0.0, 1.0)
    # A drafter that is always right: 16 tokens are four rounds of three and one.
    result = await measured().measure((target, None), (target, None))
    for row in result["rows"][1:]:
        assert (row["acceptance"], row["tokens_per_round"]) == (1.0, 4.0)


class Watched(models.Wrapped):
    """A model that records the thread and the role of each call."""

    calls: ClassVar[list[tuple[str, str, bool]]] = []

    def __init__(self, model: Any, role: str) -> None:
        super().__init__(model)
        self._role = role

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        evaluates_layers = type(self.layers[0]).__name__.startswith("Evaluating")
        self.calls.append((self._role, threading.current_thread().name, evaluates_layers))
        return super().__call__(inputs, cache)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    monkeypatch.setattr(Watched, "calls", [])
    return Watched.calls


async def test_mlx_lm_has_the_models_for_itself_on_one_thread_and_as_they_are(calls):
    target = llama()
    seen: dict[str, set[tuple[str, str, bool]]] = {}
    since = 0
    name = ""

    def look(what: str) -> None:
        nonlocal since, name
        if name:
            seen.setdefault(name, set()).update(calls[since:])
        name, since = next((n for n in names if f": {n} (" in what), ""), len(calls)

    # Outrider runs before mlx-lm and between its runs, with a drafter far ahead: the second turn is reversed.
    measured = small(num_draft_tokens=(2,), lookaheads=(8, 0), repeats=1)
    names = [contender.name for contender in measured.contenders]
    kinds = [type(layer) for layer in target.layers]
    drafter = Watched(near(target, noise=0.1), "draft")
    await measured.measure((Watched(target, "target"), None), (drafter, None), on_progress=look)
    look("")
    assert seen["mlx-lm plain"] == {("target", "outrider-target", False)}
    assert seen["mlx-lm speculative 2"] == {("target", "outrider-target", False), ("draft", "outrider-target", False)}
    ours = {("target", "outrider-target", True), ("draft", "outrider-draft", True)}
    assert seen["outrider lookahead 8"] == ours
    assert seen["outrider lookahead 0"] == {("target", "outrider-target", True)}
    assert [type(layer) for layer in target.layers] == kinds


async def test_the_next_begins_when_nothing_of_the_last_is_under_way_any_more(pair):
    # A late draft step that ends some time after the text.
    ours, events, late, log = Contender("outrider", 0), EventSwitch(), threading.Event(), []
    async with AsyncExitStack() as stack:
        workers: dict[str, Any] = {}
        made = {}
        for role, model in zip(("target", "draft"), pair, strict=True):
            workers[role] = await stack.enter_async_context(ThreadWorker(role, on_event=events))
            made[role] = await workers[role].run(Job("load", partial(MLXModel, model, CacheOptions())))
        stage = LoadedModels(made, workers, events)
        await stage.open_runtimes(stack, [ours])
        (rt, _) = stage._runtimes[ours.runtime]

        async def end_it_late() -> None:
            while not rt.num_streams:
                await trio.lowlevel.checkpoint()
            while rt.num_streams:
                await trio.lowlevel.checkpoint()
            log.append("ended")
            late.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers["draft"].run, Job("draft", late.wait))
            nursery.start_soon(end_it_late)
            try:
                await stage.run(ours, [(1, 2, 3)], Length(16), with_prompts=False)
            finally:
                log.append("returned")
                late.set()
    assert log == ["ended", "returned"]


async def test_a_target_that_mlx_lm_cannot_rewind_is_noted_and_the_others_go_on():
    target = mamba()
    result = await small(repeats=1).measure((target, None), (near(target, noise=0.02), None))
    rows = {row["name"]: row for row in result["rows"]}
    for k in (1, 3):
        row = rows[f"mlx-lm speculative {k}"]
        assert "trimmable" in str(row["failure"])
        assert (row["median"], row["num_texts"]) == (None, 0)
    assert result["is_complete"]
    assert rows["outrider lookahead 2"]["same_texts"] == 2


async def test_a_target_that_cannot_decode_at_all_ends_it_and_leaves_no_thread():
    class Broken(models.Wrapped):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if inputs.shape[1] > 1 or cache[0].offset > 4:
                raise ValueError("no such kernel")
            return super().__call__(inputs, cache)

    class Late(Broken):
        """Fails once it generates a text, but not in the probe."""

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if inputs.shape in ((1, 2), (1, 8)):
                return models.Wrapped.__call__(self, inputs, cache)
            return super().__call__(inputs, cache)

    with pytest.raises(runtime.ModelError, match="mlx-lm cannot decode with the target: no such kernel"):
        await small().measure((Late(llama()), None), (llama(), None))
    assert not outrider_threads()


async def test_texts_that_do_not_fit_are_refused_before_anything_runs(calls):
    target, draft = llama(max_position_embeddings=64), llama(max_position_embeddings=24)
    measured = small(prompts=[[1] * 9])
    with pytest.raises(runtime.PromptError, match="a prompt of 9 tokens and max_tokens=16 do not fit a context of 24"):
        await measured.measure((target, None), (draft, None))
    assert not outrider_threads()


async def test_models_that_are_there_already_are_not_cast(pair):
    target, draft = pair
    with pytest.raises(runtime.SettingsError, match="dtype is for models that are loaded here"):
        await small(dtype="bfloat16").measure((target, None), (draft, None))


class OnThread:
    """A worker that runs its jobs on any thread."""

    async def run(self, job: Any) -> Any:
        return await trio.to_thread.run_sync(job.call)


async def test_mlx_lms_generator_ends_where_it_ran_when_it_is_cancelled():
    given: list[int] = []
    ended_on: list[int] = []
    ran_on: list[int] = []

    def generate() -> Iterator[tuple[int, bool]]:
        ran_on.append(threading.get_ident())
        try:
            for token in range(1000):
                given.append(token)
                # Each token takes a turn of trio's loop, as a real one takes time, so that the cancellation arrives in
                # between.
                trio.from_thread.run_sync(scope.cancel if token == 3 else threading.get_ident)
                yield token, False
        finally:
            ended_on.append(threading.get_ident())

    with trio.CancelScope() as scope:
        await take_until_cancelled(OnThread(), generate)
    assert scope.cancelled_caught
    assert len(given) < 1000
    assert ended_on == ran_on
    assert ended_on[0] != threading.get_ident()


# --- the command ----------------------------------------------------------------------------------


def arguments(saved: tuple[str, str], *more: str) -> list[str]:
    small = ["--prompt", "w1 w2 w3", "--max-tokens", "16", "--repeats", "1"]
    who = ["--num-draft-tokens", "1,3", "--lookahead", "0,2,auto"]
    return ["bench", "--target", saved[0], "--draft", saved[1], *small, *who, *more]


def test_the_output_has_everyone_what_it_was_measured_on_and_what_its_columns_mean(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = ran(capsys, *arguments(saved))
    assert err == ""
    about, table, notes = out.split("\n\n", 2)
    assert about.startswith("bench\ntarget")
    assert [f"{saved[0]}, float32" in about, "1 of 16 tokens, temperature 0" in about, "1 of 1" in about] == [True] * 3
    if sys.platform == "linux":
        assert f"linear algebra {runtime.loading.blas.blas_in_use()}" in " ".join(about.split())
    rows = table.splitlines()[3:]
    assert [row.split("  ")[0] for row in rows] == [contender.name for contender in small().contenders]
    assert all(re.search(r"\d\.\d \(\d+–\d+\) .* 1/1$", row) for row in rows)
    assert notes.startswith("Speeds are medians over repeats")


def test_a_drafter_of_each_kind_is_compared_with_the_same_plain_decoding(capsys):
    few = ["--prompt", "def quicksort(items):\n    if len(items)", "-m", "16", "--repeats", "1", "--lookahead", "2"]
    drafts = ["--draft", str(runtime.DEMO_TRAINED_DRAFT), "--draft", "ngram"]
    said = json_of(capsys, "bench", *drafts, *few, "--json", "--dtype", "float32")
    assert [(row["name"], row["draft"]) for row in said["rows"]] == [
        ("mlx-lm plain", None),
        ("outrider lookahead 2, trained_draft", "trained_draft"),
        ("outrider lookahead 2, ngram", "ngram"),
    ]
    assert said["draft"] == f"{runtime.DEMO_TRAINED_DRAFT}, ngram"
    assert said["dtypes"] == {"target": ["float32"], "trained_draft": ["float32"]}
    plain, trained, _ = said["rows"]
    assert plain["acceptance"] is None
    assert trained["acceptance"] > 0
    assert {row["same_texts"] for row in said["rows"]} == {1}


def test_the_bundled_prompts_are_measured_by_kind_against_plain_decoding(saved, capsys, monkeypatch):
    plans: list[OneStream] = []

    async def measure(self: OneStream, *_: Any, **__: Any) -> None:
        plans.append(self)

    monkeypatch.setattr(OneStream, "measure", measure)
    given = ["bench", "--target", saved[0], "--draft", "ngram", "--prompts"]
    ran(capsys, *given)
    ran(capsys, *given, "bundled", "--repeats", "2", "--lookahead", "2")
    for plan, repeats, lookaheads in zip(plans, (1, 2), (("auto",), (2,)), strict=True):
        assert (plan.max_tokens, plan.repeats, plan.num_draft_tokens, plan.lookaheads) == (128, repeats, (), lookaheads)
        assert len(plan.prompts) == 40


def test_a_report_for_an_issue_has_the_figures_and_nothing_private(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_API_KEY", "s3cret")
    assert cli.main(arguments(saved, "--report", str(tmp_path / "mine.md"))) == 0
    said, page = json.loads((tmp_path / "mine.json").read_text()), (tmp_path / "mine.md").read_text()
    assert [row["name"] for row in said["results"]["rows"]] == [contender.name for contender in small().contenders]
    assert (said["kind"], said["results"]["target"]) == ("bench", "<path>")
    assert {"processor", "memory", "system", "packages"} < said["machine"].keys()
    assert said["versions"]["mlx"] in said["machine"]["packages"]
    assert page.startswith(f"## outrider bench\n\n{said['contents']}\n")
    assert "| outrider lookahead auto |" in page
    for written in (page, json.dumps(said)):
        assert not [secret for secret in (*saved, str(Path.home()), "s3cret", "w1 w2") if secret in written]


async def test_answers_end_where_the_model_ends_them_and_conversations_go_on_from_plain_answers(saved, monkeypatch):
    prompts = [BenchPrompt(("w1 w2", "w3"), "talk", is_chat=True), BenchPrompt(([1, 2, 3],), "ids")]
    free, measured = (small(prompts=prompts, num_draft_tokens=(2,), lookaheads=("auto",), repeats=1) for _ in range(2))
    await free.measure(*saved)
    end = free.turns[0, 0][free.contenders[0]].texts[0][4]
    monkeypatch.setattr(TokenizerWrapper, "eos_token_ids", property(lambda _: {end}), raising=False)
    result = await measured.measure(*saved)
    for contender in measured.contenders:
        texts = [measured.turns[0, case][contender].texts[0] for case in range(3)]
        assert texts[0].index(end) == len(texts[0]) - 1 <= 4
        assert len(texts[2]) == 16
    assert [row["num_prompts"] for row in result["categories"]] == [2, 1, 3]
    assert all(row["same_texts"] == row["num_texts"] for row in (*result["rows"], *result["categories"]))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_what_was_measured_is_shown(number, status, saved, monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "Display", type("_", (Interrupted,), {"at": "repeat 2 of 9", "number": number}))
    monkeypatch.setenv("COLUMNS", "200")
    asked = arguments(saved, "--repeats", "9", "--num-draft-tokens", "1", "--lookahead", "auto")
    if number == signal.SIGINT:
        out, err = ran(capsys, *asked, status=status)
        assert err == ""
        assert "1 of 9, the last perhaps in part: it was interrupted" in out
        assert "outrider lookahead auto" in out
    else:
        said = json_of(capsys, *asked, "--json", status=status)
        assert (said["repeats"], said["repeats_done"], said["is_complete"]) == (9, 1, False)
    assert not outrider_threads()


def test_a_signal_before_anything_was_measured_says_so(saved, monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "Display", type("_", (Interrupted,), {"at": "warming up"}))
    assert ran(capsys, *arguments(saved), status=130) == ("", "outrider: nothing was measured yet\n")


def test_a_signal_that_comes_when_all_is_measured_interrupts_nothing(saved, monkeypatch, capsys):
    measure = OneStream.measure

    async def measure_then_signal(*arguments: Any, **options: Any) -> Any:
        await measure(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()  # as long as it takes to close the models
        raise AssertionError

    monkeypatch.setattr(OneStream, "measure", measure_then_signal)
    assert json_of(capsys, *arguments(saved, "--json"))["is_complete"]


NO_OPENBLAS = sys.platform != "linux" or not any(map(os.path.exists, candidates(os.uname().machine)))


@pytest.mark.skipif(NO_OPENBLAS, reason="no OpenBLAS here: on Linux, install libopenblas0-pthread to have this tested")
def test_a_model_that_computes_alone_has_all_cores_unless_the_user_decides(saved):
    def machine(**variables: str) -> dict[str, str]:
        code = f"import sys; from runtime.cli.main import main; sys.exit(main({asked!r}))"
        inherited = {name: value for name, value in os.environ.items() if name not in (VARIABLE, *THREAD_VARIABLES)}
        environment = inherited | {"PYTHONPATH": str(ROOT)} | variables
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        said: dict[str, str] = json.loads(done.stdout)["machine"]
        return said

    asked = arguments(saved, "--json", "--blas", "openblas", "--num-draft-tokens", "none", "--lookahead", "2")
    cores = runtime.loading.blas.num_usable_cores()
    shared = machine()
    assert shared["linear algebra"].startswith("OpenBLAS")
    expected = f"{cores} for a model that computes alone, shared by models that compute at the same time"
    assert shared["BLAS threads"] == expected
    decided = machine(OPENBLAS_NUM_THREADS="1")
    assert decided["linear algebra"].endswith(", 1 thread)")
    assert "BLAS threads" not in decided
