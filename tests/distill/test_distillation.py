"""From texts to a drafter's folder, as Speculators has it: gone on with after a cancellation, and used as a draft."""

import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
from architectures import VOCAB_SIZE, build
from models import greedy

import runtime
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.eagle3 import load_eagle3
from protocol.errors import ModelError, SettingsError
from runtime.distill import continuations, distillation, training
from runtime.distill.continuations import PROMPT_SHARE, Continuations, Continuing
from runtime.distill.evaluation import Evaluation
from runtime.distill.options import DistillOptions


class Tokens:
    """A tokenizer: a token a character, within the small vocabulary."""

    eos_token_id = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) % VOCAB_SIZE for character in text]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DistillOptions:
    """Of a tiny target, which is "loaded" from memory."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(48 + i * i % 71) for i in range(800)))
    monkeypatch.setattr(distillation, "load_target", lambda name: (build(name), Tokens()))
    monkeypatch.setattr(distillation, "BATCHES_PER_EVALUATION", 6)
    monkeypatch.setattr(distillation, "LEARNING_PER_EVALUATION", 0.0)
    files = {"data": (text,), "out": tmp_path / "drafter"}
    return DistillOptions(target="llama", **files, window=16, batch_tokens=64, learning_rate=3e-3)


async def train(options: DistillOptions, *, num_evaluations: int) -> list[Evaluation]:
    """Train until there were so many evaluations, then cancel."""
    seen: list[Evaluation] = []
    with trio.CancelScope() as scope:

        def on_evaluation(evaluation: Evaluation) -> None:
            seen.append(evaluation)
            if len(seen) == num_evaluations:
                scope.cancel()

        await distillation.distill(options, on_progress=lambda what: None, on_evaluation=on_evaluation)
    return seen


@pytest.mark.parametrize("draft_vocab_size", [None, VOCAB_SIZE // 2])
async def test_the_folder_is_a_drafter_of_the_target(options: DistillOptions, draft_vocab_size: int | None) -> None:
    options = attrs.evolve(options, draft_vocab_size=draft_vocab_size)
    seen = await train(options, num_evaluations=2)
    assert [evaluation.batches for evaluation in seen] == [6, 12]
    first, second = (evaluation.loss for evaluation in seen)
    assert second < first
    loaded = load_eagle3(DrafterFiles.read(options.out))
    assert loaded.model.config.draft_vocab_size == (draft_vocab_size or VOCAB_SIZE)
    assert (loaded.target_ids is None) == (draft_vocab_size is None)
    weights = mx.load(str(options.out / "model.safetensors"))
    if draft_vocab_size is not None:
        assert int(weights["t2d"].sum().item()) == draft_vocab_size
    assert "| all | 0." in (options.out / "README.md").read_text()
    log = [json.loads(line) for line in (options.out / "training" / "log.jsonl").read_text().splitlines()]
    assert [entry["batches"] for entry in log] == [6, 12]
    built = build("llama")
    async with runtime.open((built, None), options.out) as rt:
        stream = rt.stream([1, 2, 3, 4], max_tokens=20, lookahead=2, ignore_eos=True)
        assert [token.id async for token in stream] == greedy(built, [1, 2, 3, 4], 20)
        assert stream.statistics().proposed > 0


class Clock:
    """A clock by which each batch, learnt or drafted for, takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture
def three_held_out(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> DistillOptions:
    """Options with three batches of held-out text, and a minute."""
    monkeypatch.setattr(training, "time", Clock())
    return attrs.evolve(options, batch_tokens=16, max_minutes=1)


async def test_held_out_text_counts_in_the_minutes(three_held_out: DistillOptions) -> None:
    seen = await train(three_held_out, num_evaluations=1000)
    # Six batches are learnt, and three drafted for.
    assert seen[0].minutes == 0.15
    assert 57 / 60 <= seen[-1].minutes <= 1.0


async def test_an_evaluation_takes_a_small_part_of_a_limited_time(three_held_out, monkeypatch):
    monkeypatch.setattr(distillation, "EVALUATION_SHARE", 2 / 60)
    seen = await train(three_held_out, num_evaluations=1)
    assert seen[0].minutes == round(8 / 60, 2)


async def test_a_cancellation_comes_between_two_batches_of_held_out_text(three_held_out: DistillOptions) -> None:
    said: list[str] = []
    with trio.CancelScope() as scope:

        def on_progress(what: str) -> None:
            said.append(what)
            if what.startswith("drafting for held-out text: 33%"):
                scope.cancel()

        await distillation.distill(three_held_out, on_progress=on_progress, on_evaluation=lambda _: None)
    assert scope.cancelled_caught
    assert "67%" not in said[-1]
    assert said[-1].startswith("drafting for held-out text: 33%")
    # What was learnt before is evaluated by the next run.
    (seen,) = await train(three_held_out, num_evaluations=1)
    assert seen.batches == 7


async def test_a_batch_that_takes_long_is_learnt_in_parts(options, monkeypatch):
    clock, said = Clock(), list[str]()
    monkeypatch.setattr(training, "time", clock)  # a part takes a second
    monkeypatch.setattr(distillation, "PART_S", 1.0)
    options = attrs.evolve(options, batch_tokens=64, max_minutes=0.1)
    seen = []
    await distillation.distill(options, on_progress=said.append, on_evaluation=seen.append)
    learning = [what.partition(",")[0] for what in said if what.startswith("learning")]
    assert learning == [
        *("learning: batch 1", *(f"learning: batch 1 ({percent}% of it)" for percent in (25, 50, 75))),
        *("learning: batch 2", "learning: batch 2 (25% of it)"),
    ]  # fmt: skip
    # When the time is up, what was added of the second batch is learnt, too.
    assert (seen[0].batches, seen[0].tokens) == (2, 64 + 32)


async def test_another_training_in_the_folder_is_refused(options: DistillOptions) -> None:
    await train(options, num_evaluations=1)
    with pytest.raises(SettingsError, match="has the seed 0, and this one 1"):
        await train(attrs.evolve(options, seed=1), num_evaluations=1)


async def test_a_training_for_another_target_is_refused_before_the_target_writes(options: DistillOptions) -> None:
    options = attrs.evolve(options, continuations=4)
    with trio.CancelScope() as scope:
        # The first windows are written, and nothing is learnt.
        def on_progress(what: str) -> None:
            if what == "preparing the drafter":
                scope.cancel()

        await distillation.distill(options, on_progress=on_progress, on_evaluation=lambda _: None)
    with pytest.raises(SettingsError, match="has the target 'llama', and this one 'qwen3'"):
        await train(attrs.evolve(options, target="qwen3"), num_evaluations=1)


async def test_a_target_without_hidden_states_is_refused_before_texts_are_read(options: DistillOptions) -> None:
    options = attrs.evolve(options, target="gemma3n", data=(options.out / "not there",))
    with pytest.raises(ModelError, match="is not one vector for each token"):
        await train(options, num_evaluations=1)


async def test_an_output_folder_that_cannot_be_made_is_named(options: DistillOptions) -> None:
    with pytest.raises(SettingsError, match=r"identity\.json' cannot be written: Not a directory"):
        await train(attrs.evolve(options, out=options.data[0] / "drafter"), num_evaluations=1)


async def test_a_full_disk_leaves_what_was_saved_before_and_training_goes_on_there(options, monkeypatch):
    def files() -> list[Path]:
        return [file for file in options.out.rglob("*") if file.is_file() and file.parent.name != "states"]

    await train(options, num_evaluations=1)
    assert any((options.out / "training" / "states").iterdir())
    saved = {file: file.read_bytes() for file in files()}

    def full(file: str, *_: Any) -> None:
        Path(file).write_bytes(b"a part")
        raise RuntimeError("[write] Unable to write 1079744 bytes to file.")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        with pytest.raises(SettingsError, match=r"\.safetensors' cannot be written: .* Unable to write .*; once"):
            await train(options, num_evaluations=1)
    assert {file: file.read_bytes() for file in files()} == saved
    (seen,) = await train(options, num_evaluations=1)
    assert seen.batches == 12


async def test_a_drafter_can_be_trained_further(options: DistillOptions, tmp_path: Path) -> None:
    options = attrs.evolve(options, learning_rate=1e-2)
    before = await train(options, num_evaluations=14)
    further = attrs.evolve(options, init=options.out, out=tmp_path / "further")
    (first,) = await train(further, num_evaluations=1)
    # It shows what there is to begin with.
    assert (first.batches, first.loss) == (0, None)
    # The weights were rounded to bfloat16.
    assert first.accepted == pytest.approx(max(evaluation.accepted for evaluation in before), abs=0.1)
    assert first.accepted > before[0].accepted + 0.2
    with pytest.raises(SettingsError, match="draft_vocab_size is that of the drafter that init names"):
        attrs.evolve(further, draft_vocab_size=8)


async def test_a_drafter_of_another_target_is_refused(options: DistillOptions, tmp_path: Path) -> None:
    await train(options, num_evaluations=1)
    config = json.loads((options.out / "config.json").read_text())
    config["target_hidden_size"] = 48
    (options.out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        await train(attrs.evolve(options, init=options.out, out=tmp_path / "further"), num_evaluations=1)


async def test_training_ends_by_itself(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is gain enough.
    monkeypatch.setattr(training, "LEAST_GAIN", 10.0)
    monkeypatch.setattr(distillation, "BATCHES_PER_EVALUATION", 1)
    seen = await train(options, num_evaluations=1000)
    assert len(seen) == training.PATIENCE * (training.MAX_REDUCTIONS + 1)
    assert not (options.out / "training" / "states").exists()
    assert seen[-1].learning_rate == pytest.approx(3e-3 * training.REDUCTION ** (training.MAX_REDUCTIONS + 1))


def test_continuations_are_the_targets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "NUM_READ_AT_ONCE", 3)
    target = build("llama")
    windows = mx.random.randint(0, VOCAB_SIZE, (3, 16), key=mx.random.key(1))

    def continued(temperature: float, seconds: float) -> tuple[mx.array, int]:
        """The windows, and how often the target was asked to write for so long."""
        continuing = Continuing(target, windows, temperature=temperature, seed=2)
        for num_times in range(1, 17):
            if (written := continuing.write(seconds)) is not None:
                assert continuing.share == 1.0
                return written, num_times
        raise AssertionError

    written, num_times = continued(0.0, 0.0)
    num_given = int(16 * PROMPT_SHARE)
    assert num_times == 16 - num_given + 2  # the beginnings in two parts, a token each time, and all together
    for given, whole in zip(windows.tolist(), written.tolist(), strict=True):
        assert whole[:num_given] == given[:num_given]
        assert whole[num_given:] == greedy(target, given[:num_given], 16 - num_given)
    (in_parts, _), (at_once, num_times) = continued(0.8, 0.0), continued(0.8, 3600.0)
    assert num_times == 1
    assert mx.array_equal(in_parts, at_once)
    kept = Continuations(tmp_path)
    assert kept.temperature == 0.0
    kept.add(written)
    assert kept.temperature > 0.0
    kept.add(at_once)
    read = Continuations(tmp_path)
    assert read.num_windows == 6
    assert all(mx.array_equal(a, b) for a, b in zip(kept.batches, read.batches, strict=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 4}, "window must be"),
        ({"batch_tokens": 8}, "batch_tokens must be"),
        ({"continuations": -1}, "continuations must be"),
        ({"learning_rate": 0}, "learning_rate must be"),
        ({"max_minutes": 0}, "max_minutes must be"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"data": ()}, "data is missing"),
    ],
)
def test_options_out_of_range_are_refused(options: DistillOptions, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        attrs.evolve(options, **changes)


async def test_a_window_beyond_the_targets_context_is_refused_before_anything_is_read(options: DistillOptions) -> None:
    options = attrs.evolve(options, window=513, batch_tokens=1024, data=(options.out / "not there",))
    with pytest.raises(SettingsError, match="window must be at most the target's context of 512 tokens, got 513"):
        await train(options, num_evaluations=1)
