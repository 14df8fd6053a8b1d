"""The doctor's report on a model or a pair, compared with the facts."""

import itertools
import math
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import attrs
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import models
import pytest
from doctor_reports import sections
from mlx.utils import tree_flatten
from models import VOCAB_SIZE, gemma3_text, greedy, llama, mamba, save
from other_vocabularies import byte_level
from our_threads import outrider_threads
from sample_tokenizers import demo
from sweeps import sweep

import runtime
from actors.distributed.joining import BACKENDS
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.model import RewindMode
from actors.trained.drafter_model import TrainedDrafter
from protocol.errors import RankError
from protocol.rank_messages import CloseTarget, Describe, Description, RankLoaded, RankMessage
from runtime.cli import main as cli
from runtime.doctor.agreement import BEGINNINGS, agreement, agreement_rows
from runtime.doctor.ranks import examine_ranks, take_part_in_examination
from runtime.doctor.report import Diagnosis, ExaminedModel, described_layers, examine, report
from runtime.measuring.pass_times import CONTEXT_TOKENS, WIDTHS, PassTime, medians, time_passes

NUM_TIMES = 3


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing else to do, and a screen on which nothing is wrapped; passes are timed less often."""
    monkeypatch.setattr("runtime.measuring.pass_times.REPEATS", NUM_TIMES)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.9, 0.9, 0.9))
    monkeypatch.setattr("runtime.terminal.display.LOG_INTERVAL_S", math.inf)  # no progress of a slow one


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "target", llama())


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, str]]:
    """The report that `outrider doctor` prints; asserts that it succeeds."""
    assert cli.main(["doctor", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return sections(printed.out)


def rows(diagnosis: Diagnosis, section: str) -> dict[str, str]:
    return dict(dict(report(diagnosis))[section])


def assert_measured(passes: dict[int, PassTime]) -> None:
    """Assert that each width was timed, and that the figures are consistent."""
    assert tuple(passes) == WIDTHS
    for each in passes.values():
        assert 0 < each.building < each.low <= each.median <= each.high


# --- the command ----------------------------------------------------------------------------------


def test_a_pair(capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path) -> None:
    found = doctor(capsys, target, "--draft", save(tmp_path / "draft", llama(num_hidden_layers=1)))
    assert list(found) == ["target", "draft", "pair", "machine", "conclusion"]
    for section, layers, symbol in (("target", 2, "T_v"), ("draft", 1, "T_d")):
        about = found[section]
        assert about["family"] == "llama"
        assert "float32" in about["weights"]
        assert about["caches"] == f"{layers} × KVCache"
        assert about["rewinds by"].startswith("trim")
        assert "a checkpoint keeps" not in about
        for width in WIDTHS:
            name = "a pass of 1 token" if width == 1 else f"a pass of {width} tokens"
            assert about[name].startswith(f"{symbol}({width}) = ")
        assert about["each further token"].endswith(f"% of {symbol}(1)")
        assert re.fullmatch(r"held for \d+\.\d\d ms to build a pass, [\d,]+ µs a layer", about["Python's lock"])
    assert found["pair"]["vocabularies"] == f"the same, {VOCAB_SIZE} tokens"
    assert found["pair"]["cost ratio"].startswith("T_d(1) / T_v(1) = ")
    assert found["machine"]["device"] in ("cpu", "gpu")


def test_a_model_alone_is_told_what_could_draft_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = save(tmp_path / "target", llama(hidden_size=256))
    draft = save(tmp_path / "draft", llama())
    assert cli.main(["doctor", "--target", target]) == 0
    conclusion = capsys.readouterr().out.partition("conclusion")[2]
    assert f"--draft {draft} (" in conclusion
    assert "--draft ngram" in conclusion


def test_options_of_caches_reach_the_model(capsys: pytest.CaptureFixture[str], target: str) -> None:
    found = doctor(capsys, target, "--rewind", "none")["target"]
    assert found["rewinds by"].startswith("nothing (N=1): ")
    assert found["several streams"] == 'take turns, a pass for each, because rewind="none" is for one text a pass'


def test_different_vocabularies_are_said_to_be_different(capsys, target, tmp_path):
    found = doctor(capsys, target, "--draft", save(tmp_path / "draft", llama(seed=1), word="v"))
    assert found["pair"]["vocabularies"].startswith("DIFFERENT: ")
    assert f"{VOCAB_SIZE} of {VOCAB_SIZE} ids differ (id 0 is 'w0' and 'v0'" in found["pair"]["vocabularies"]
    # The rest of the report is complete.
    assert "cost ratio" in found["pair"]


def test_what_cannot_be_examined_is_one_line(capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for status, arguments, complaint in (
        (1, [nowhere], f"outrider: error: target '{nowhere}' does not exist; give "),
        (1, [target, "--draft", nowhere], f"outrider: error: draft '{nowhere}' does not exist; give "),
        (1, [str(tmp_path)], "has no config.json; give a directory"),
        (2, [target, "--kv-bits", "7"], "--kv-bits must be 2, 3, 4, 5, 6, 8 or None, got 7"),
        # Models are checked before ranks are examined.
        (2, ["--distributed", target, "--draft", "ngram"], "draft must be a model here"),
    ):
        assert cli.main(["doctor", *arguments]) == status
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert complaint in line


def test_a_process_on_its_own_is_told_which_backends_it_has(capsys: pytest.CaptureFixture[str], target: str) -> None:
    found = doctor(capsys, "--distributed")
    assert list(found) == ["ranks"]
    expected = [name for name in BACKENDS if mx.distributed.is_available(backend=name)]
    assert expected
    assert found["ranks"]["backends"].partition(";")[0] == ", ".join(expected)
    assert socket.gethostname() in found["ranks"]["rank 0"]
    assert found["ranks"]["note"].startswith("there is only this rank; mlx.launch starts several")
    # A model that is named is examined as without ranks.
    found = doctor(capsys, "--distributed", "--target", target)
    assert list(found) == ["ranks", "target", "machine", "conclusion"]
    assert "a pass exchanges" not in found["target"]


# --- models under examination ---------------------------------------------------------------------


SHARED, IN_TURN = "share passes", "take turns, a pass for each, because "
NO_PADDING = "this family's recurrent layers do not tell padding from text"
HYBRID = {"ArraysCache": 1, "KVCache": 1}


@sweep(
    ("build", "kinds", "window", "rewind_mode", "streams"),
    [
        (llama, {"KVCache": 2}, None, RewindMode.TRIM, SHARED),
        # The text at which passes are timed may or may not exceed the window.
        (lambda: gemma3_text(window=16), {"SlidingWindowCache(16)": 3, "KVCache": 1}, 16, RewindMode.TRIM, SHARED),
        (lambda: gemma3_text(window=128), {"SlidingWindowCache(128)": 3, "KVCache": 1}, 128, RewindMode.TRIM, SHARED),
        (mamba, {"ArraysCache": 2}, None, RewindMode.CHECKPOINT, IN_TURN + NO_PADDING),
        (lambda: architectures.build("lfm2"), HYBRID, None, RewindMode.CHECKPOINT, SHARED),
        (lambda: architectures.build("qwen3_next"), HYBRID, None, RewindMode.CHECKPOINT, SHARED),
        (
            lambda: architectures.build("deepseek_v41"),  # of whose caches nothing is known
            {"LayerCache": 3},
            None,
            RewindMode.SINGLE,
            IN_TURN + "caches of the kind LayerCache hold one text",
        ),
    ],
)
async def test_caches_rewinds_and_shared_passes_are_those_of_the_model(build, kinds, window, rewind_mode, streams):
    model = build()
    diagnosis = await examine((model, None))
    anatomy, said = diagnosis.target.anatomy, rows(diagnosis, "target")
    assert (anatomy.cache_kinds, anatomy.window, anatomy.rewind_mode) == (kinds, window, rewind_mode)
    assert_measured(diagnosis.target.passes)
    begins = {RewindMode.TRIM: "trim: ", RewindMode.CHECKPOINT: "checkpoint: ", RewindMode.SINGLE: "nothing (N=1): "}
    assert said["rewinds by"].startswith(begins[rewind_mode])
    assert said["several streams"] == streams
    if window is not None:
        assert anatomy.rewind_mode_beyond_window is RewindMode.TRIM
        assert said[f"beyond {window} tokens"].startswith("trim: ")
    assert ("a checkpoint keeps" in said) == (rewind_mode is RewindMode.CHECKPOINT)
    if rewind_mode is RewindMode.CHECKPOINT:
        assert said["a checkpoint keeps"] == f"{anatomy.checkpoint_bytes:,} bytes"
    if build is mamba:
        # Per layer, the last inputs of a convolution and the state itself, both in float32.
        args = model.args
        state = args.intermediate_size * (args.conv_kernel - 1 + args.state_size)
        assert anatomy.checkpoint_bytes == args.num_hidden_layers * state * 4


async def test_the_cost_of_width_is_the_same_figure_in_the_table_and_the_conclusion() -> None:
    diagnosis = await examine((llama(), None))
    seconds = {1: 0.020, 2: 0.027, 3: 0.031, 5: 0.050, 9: 0.070}
    passes = {width: PassTime(each, each, each, each / 2, 1) for width, each in seconds.items()}
    findings = attrs.evolve(diagnosis.findings, verify_seconds=medians(passes), blas=None)
    diagnosis = attrs.evolve(diagnosis, target=attrs.evolve(diagnosis.target, passes=passes), findings=findings)
    assert rows(diagnosis, "target")["each further token"] == "adds 31% of T_v(1)"
    assert rows(diagnosis, "conclusion")["note"].startswith("each further token of a pass costs 31% of the first")


def test_a_busy_machine_is_said_at_the_start_and_in_the_report(target, monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert "load" not in doctor(capsys, target)["machine"]
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert cli.main(["doctor", target]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("outrider: the machine is busy: a load of 2.5 on 4 cores; times will be too long")
    assert sections(printed.out)["machine"]["load"].startswith("2.5 on 4 cores when this began")


def test_slow_passes_are_timed_once_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=10.0)
    monkeypatch.setattr("runtime.measuring.pass_times.time.perf_counter", lambda: next(clock))
    passes = time_passes(MLXModel(llama(), CacheOptions()), WIDTHS)
    assert [each.num_passes for each in passes.values()] == [1] * len(WIDTHS)


async def test_a_pair_without_tokenizers_is_timed_and_not_compared() -> None:
    steps: list[str] = []
    ours, theirs = llama(), mamba()
    layers = [type(layer) for model in (ours, theirs) for layer in model.layers]
    before = outrider_threads()
    diagnosis = await examine((ours, None), (theirs, None), on_progress=steps.append)
    # What does not depend on speed comes first.
    assert steps == ["loading the target", "loading the draft", "timing the target", "timing the draft"]
    # No thread is left, and the layers are what they were.
    assert outrider_threads() == before
    assert [type(layer) for model in (ours, theirs) for layer in model.layers] == layers
    assert diagnosis.findings.same_vocabulary is None
    assert isinstance(diagnosis.draft, ExaminedModel)
    assert [diagnosis.target.anatomy.family, diagnosis.draft.anatomy.family] == ["llama", "mamba"]
    assert_measured(diagnosis.target.passes)
    assert_measured(diagnosis.draft.passes)
    assert rows(diagnosis, "pair")["vocabularies"] == "not compared: no tokenizer to compare"


async def test_a_draft_model_of_another_vocabulary_can_propose_what_both_have() -> None:
    other = byte_level(2500)
    pair = (llama(vocab_size=4096), demo()), (llama(vocab_size=2500), other.tokenizer)
    diagnosis = await examine(*pair)
    assert diagnosis.findings.same_vocabulary is False
    assert diagnosis.findings.is_translated
    said = rows(diagnosis, "pair")["vocabularies"]
    assert said == "translated: the draft model can propose 2,500 of the target's 4,096 tokens"
    (_, conclusion) = report(diagnosis)[-1]
    assert "does not share a vocabulary" not in dict(conclusion)["in short"]
    advice = "a draft model of the target's vocabulary, if there is one: more of its drafts are accepted"
    assert ("try", advice) in conclusion


async def test_the_weights_are_counted() -> None:
    model = llama()
    leaves = [leaf for _, leaf in tree_flatten(model.parameters())]
    model.set_dtype(mx.bfloat16)
    anatomy = (await examine((model, None))).target.anatomy
    assert anatomy.num_parameters == sum(leaf.size for leaf in leaves)
    assert anatomy.num_bytes == 2 * anatomy.num_parameters
    assert anatomy.dtypes == ("bfloat16",)


class Counting(models.Wrapped):
    """A model that records (tokens in the cache, tokens fed) of each pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._passes: list[tuple[int, int]] = []

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        offset = cache[0].offset if isinstance(cache[0].offset, int) else -1  # of several rows
        self._passes.append((offset, inputs.shape[1]))
        return super().__call__(inputs, cache)


async def test_every_width_is_fed_equally_often_and_in_turn_after_the_same_text() -> None:
    model = Counting(llama())
    await examine((model, None))
    # Before come the passes that find out what the model is.
    fed, num_turns = tuple(model._passes), 0
    while sorted(fed[: len(fed) - num_turns * len(WIDTHS)][-len(WIDTHS) :]) == [(CONTEXT_TOKENS, n) for n in WIDTHS]:
        num_turns += 1
    assert num_turns == 1 + NUM_TIMES  # one to warm up


# --- cleaning up ----------------------------------------------------------------------------------


class Broken(models.Wrapped):
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if inputs.shape[1] == WIDTHS[-1]:
            raise ValueError("no such kernel")
        return super().__call__(inputs, cache)


async def test_a_model_that_fails_while_it_is_timed_is_named_and_leaves_no_thread() -> None:
    before = outrider_threads()
    with pytest.raises(runtime.ModelError, match=r"draft 'Broken' failed .* no such kernel") as raised:
        await examine((llama(), None), (Broken(llama()), None))
    assert isinstance(raised.value.__cause__, ValueError)
    assert outrider_threads() == before


# --- a trained drafter ----------------------------------------------------------------------------


@sweep(
    ("layers", "said"),
    [
        ((2,), "what enters layer 2 of 6"),
        ((0, 2, 5), "what enters layers 0, 2 and 5 of 6"),
        ((6,), "what the last of 6 layers gives"),
        ((1, 6), "what enters layer 1 of 6, what the last of 6 layers gives"),
    ],
)
def test_what_it_reads_is_said(layers, said):
    assert described_layers(layers, 6) == said


def test_a_slow_target_is_not_made_to_write_for_minutes():
    nothing: Any = None
    rows = agreement_rows(nothing, [(1, 2), (3,)], nothing, decode_s=1.0)
    assert rows == (("agrees", "not measured: 120 tokens of the target take 120 s"),)


@pytest.mark.slow
async def test_the_bundled_trained_drafter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.doctor.report.BEGINNINGS", BEGINNINGS[:1])
    monkeypatch.setattr("runtime.doctor.agreement.NUM_TOKENS", 30)
    monkeypatch.setattr("runtime.measuring.pass_times.REPEATS", 2)
    diagnosis = await examine(runtime.DEMO_TARGET, runtime.DEMO_TRAINED_DRAFT)
    found = diagnosis.draft
    rows = dict(found.rows)
    assert (rows["kind"], rows["reads"]) == ("EAGLE-3", "what enters layers 2, 3 and 4 of 7")
    assert rows["proposes"] == "2,048 of the target's 4,096 tokens"
    assert rows["weights"].startswith("5.")
    assert " MB, " in rows["weights"]
    assert rows["a draft step"].startswith("T_d(1) = ")
    assert rows["reading 9 tokens"].startswith("T_d(9) = ")
    agreed = {name: row for name, row in rows.items() if name.startswith("agrees")}
    shares = {name: int(row.removeprefix("with ").partition("%")[0]) for name, row in agreed.items()}
    assert list(shares) == [
        "agrees", "agrees, read a layer earlier", "agrees, read a layer later", "agrees at 8 bits", "agrees at 4 bits",
    ]  # fmt: skip
    assert shares["agrees"] > 50
    assert abs(shares["agrees"] - shares["agrees at 8 bits"]) < 10
    assert all(" ms" in row for name, row in agreed.items() if "bits" in name)
    # Wider passes read hidden states of the target, and so are real passes.
    assert found.passes[9].median > 0
    assert diagnosis.findings.suggestions == ()
    sections = dict(report(diagnosis))
    assert [name for name, _ in sections["pair"]] == ["cost ratio"]
    assert sections["conclusion"][-1][0] == "in short"


def test_a_drafter_agrees_less_where_it_reads_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = 30
    monkeypatch.setattr("runtime.doctor.agreement.NUM_TOKENS", num_tokens)
    built, _ = mlx_lm.load(str(runtime.DEMO_TARGET))
    target = MLXModel(built, CacheOptions())
    drafter = TrainedDrafter(runtime.DEMO_TRAINED_DRAFT, built, target.vocab_size)
    text = tuple(int(token) for token in mx.random.randint(1, 4000, (num_tokens + 9,), key=mx.random.key(1)).tolist())
    # Of a text at random nothing is named; of the target's own, most is.
    assert agreement(drafter, target, [text], drafter.feature_layers) < 0.1
    prompt = [5, 6, 7, 8]
    own = (*prompt, *greedy(built, prompt, num_tokens))
    right, wrong = (agreement(drafter, target, [own], layers) for layers in (drafter.feature_layers, (5, 6, 7)))
    assert right > wrong + 0.1


# --- ranks ----------------------------------------------------------------------------------------


def group(rank: int, *received: tuple[int, RankMessage]) -> Any:
    """A group of three, as far as it is used; `sent` has what this rank sends."""
    coming, sent = iter(received), []
    return SimpleNamespace(
        rank=rank, size=3, sent=sent, send=sent.append, receive=lambda: next(coming),
        connect_mlx=lambda: None, run=lambda name, call: call(), fail=RankError,
    )  # fmt: skip


def test_descriptions_are_listed_by_rank_in_whatever_order_they_come() -> None:
    first = group(0, (2, Description({"host": "c"})), (1, Description({"host": "b"})))
    assert [said for name, said in examine_ranks(first)[1] if name.startswith("rank ")][1:] == ["b", "c"]
    assert first.sent == [Describe()]


def test_a_rank_that_asks_or_answers_something_else_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was to be asked what it is, and rank 0 sent CloseTarget"):
        take_part_in_examination(group(1, (0, CloseTarget())))
    with pytest.raises(RankError, match="rank 2 was to say what it is, and sent RankLoaded"):
        examine_ranks(group(0, (2, RankLoaded({}))))
