"""Hidden states come from files as from the target, and where there is no file, from the target."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import VOCAB_SIZE, build
from sweeps import sweep

from runtime.distill import hidden_states
from runtime.distill.hidden_states import HiddenStates, StateFiles

WINDOWS = mx.random.randint(0, VOCAB_SIZE, (5, 24), key=mx.random.key(3))
LAYERS = (0, 1)
# Features of two layers, and the last hidden state: of 24 tokens with a width of 32, in bfloat16.
BYTES_OF_WINDOW = 24 * 3 * 32 * 2


class Counting:
    """A target that counts the windows that it reads, and the clock: it takes a second for each."""

    def __init__(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_windows, self.seconds = 0, 0.0
        self.target, call = target, type(target).__call__

        def counting(model: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.num_windows += tokens.shape[0]
            self.seconds += tokens.shape[0]
            return call(model, tokens, *args, **kwargs)

        monkeypatch.setattr(type(target), "__call__", counting)
        monkeypatch.setattr(hidden_states, "time", self)

    def monotonic(self) -> float:
        return self.seconds

    def states(self, files: StateFiles | None) -> HiddenStates:
        states = HiddenStates(self.target, LAYERS, files)
        self.num_windows = 0
        return states


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(build("llama"), monkeypatch)


def files(folder: Path, num_windows: int = 100, identity: str = "llama") -> StateFiles:
    return StateFiles(folder / "states", num_windows * BYTES_OF_WINDOW, identity)


def assert_same(found: tuple[mx.array, mx.array], expected: tuple[mx.array, mx.array]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert mx.abs(one - other).max() < 0.02 * mx.abs(other).max()


def test_what_was_computed_once_is_read_from_files(target: Counting, tmp_path: Path) -> None:
    expected = target.states(None).read(WINDOWS)
    states = target.states(files(tmp_path))
    for one, other in zip(states.read(WINDOWS[:3]), expected, strict=True):
        assert mx.array_equal(one, other[:3])
    assert target.num_windows == 3
    # Two windows are new: the rows stay in their order.
    mixed = mx.array([4, 1, 3, 0, 2])
    assert_same(states.read(WINDOWS[mixed]), (expected[0][mixed], expected[1][mixed]))
    assert target.num_windows == 5
    # The next run.
    assert_same(target.states(files(tmp_path)).read(WINDOWS), expected)
    assert target.num_windows == 0
    # Another target's are not taken.
    target.states(files(tmp_path, identity="another")).read(WINDOWS)
    assert target.num_windows == 5


def test_what_exceeds_the_bound_is_computed_again(target: Counting, tmp_path: Path) -> None:
    states = target.states(files(tmp_path, num_windows=2))
    for num_computed in (5, 8, 11):
        states.read(WINDOWS)
        assert target.num_windows == num_computed
    assert sum(file.stat().st_size for file in (tmp_path / "states").iterdir()) == 2 * BYTES_OF_WINDOW
    # The bound holds over several runs.
    target.states(files(tmp_path, num_windows=3)).read(WINDOWS)
    assert target.num_windows == 3
    assert len([*(tmp_path / "states").iterdir()]) == 3


def test_a_file_that_is_cut_off_is_written_again(target: Counting, tmp_path: Path) -> None:
    expected = target.states(files(tmp_path)).read(WINDOWS)
    first, *_ = (tmp_path / "states").iterdir()
    first.write_bytes(first.read_bytes()[:100])
    (tmp_path / "states" / "partial").write_bytes(b"of a process that was killed")
    states = target.states(files(tmp_path))
    for _ in range(2):
        assert_same(states.read(WINDOWS), expected)
        assert target.num_windows == 1
        assert not (tmp_path / "states" / "partial").exists()


@sweep("what", ["reserved", "full", "no folder"])
def test_a_disk_without_room_ends_no_training(what, target, tmp_path, monkeypatch):
    if what == "reserved":
        monkeypatch.setattr(hidden_states, "RESERVED_BYTES", shutil.disk_usage(tmp_path).total)
    elif what == "full":

        def write_bytes(file: Path, content: Any) -> None:
            file.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
    else:
        (tmp_path / "states").write_text("a file")
    states = target.states(files(tmp_path))
    for num_computed in (5, 10):
        states.read(WINDOWS)
        assert target.num_windows == num_computed
    assert what == "no folder" or not any((tmp_path / "states").iterdir())


def test_files_that_are_slower_than_the_target_are_not_read(target, tmp_path, monkeypatch):
    load = StateFiles.load

    def slow(kept: StateFiles, *args: Any) -> mx.array | None:
        target.seconds += 2.0
        return load(kept, *args)

    monkeypatch.setattr(StateFiles, "load", slow)
    states = target.states(files(tmp_path))
    for num_computed in (5, 5, 10):  # that they are slower shows when they are first read
        states.read(WINDOWS)
        assert target.num_windows == num_computed
    assert not states.are_kept


@sweep("name, are_kept", [*((name, True) for name in ("llama", "lfm2", "qwen3", "gemma3_text")), ("gemma2", False)])
def test_states_are_kept_where_norm_and_head_make_the_logits(name: str, are_kept: bool, tmp_path: Path) -> None:
    target = build(name)
    states = HiddenStates(target, LAYERS, files(tmp_path))
    assert states.are_kept == are_kept
    expected = HiddenStates(target, LAYERS).read(WINDOWS)
    for _ in range(2):
        assert_same(states.read(WINDOWS), expected)
