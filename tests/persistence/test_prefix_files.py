"""The prefix cache on disk: back after a restart, bounded, and never wrong, wherever a writer is killed."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
from models import greedy, llama, prompt_of
from polling import until_in_trio

import runtime
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import SequenceRecord
from actors.persistence import saved_sequence
from actors.persistence.fingerprint import Fingerprint
from actors.prefix_cache import pack
from protocol.errors import SessionFileError
from protocol.tensor import Tensor
from runtime.persistence import session_file
from runtime.persistence.disk_prefix_cache import DiskPrefixCache, PrefixFiles, StoredPrefix

MODEL = Fingerprint("llama", 1, "configuration", "layout", "weights")
NUM_TOKENS = 8
PROMPT = prompt_of(80)


# --- through a runtime ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(1)


async def answer(rt: runtime.Runtime, prompt: list[int]) -> tuple[list[int], int]:
    """The text after a prompt, and how many of its tokens were cached."""
    # Where "auto" found that drafting does not pay, the drafter would not read the prompt.
    stream = rt.stream(prompt, max_tokens=NUM_TOKENS, reuse_prefix=True, ignore_eos=True, lookahead=2)
    text = [token.id async for token in stream]
    return text, stream.statistics().cached_tokens


def stored_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.outrider-prefix"))


def cache_of(rt: runtime.Runtime) -> DiskPrefixCache:
    store = rt._target.prefix_cache.store
    return store


@pytest.mark.parametrize("drafted", [False, True])
async def test_a_text_is_continued_after_a_restart_from_what_was_cached_before(tmp_path, model, drafted):
    prompt, folder = prompt_of(80), tmp_path / "made" / "here"
    draft = (llama(2), None) if drafted else None
    async with runtime.open((model, None), draft, prefix_cache_dir=folder) as rt:
        first, num_cached = await answer(rt, prompt)
    assert (first, num_cached) == (greedy(model, prompt, NUM_TOKENS), 0)
    assert folder.stat().st_mode & 0o077 == 0
    num_models = 1 + drafted
    assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0, 0] * num_models
    longer = [*prompt, *first, *prompt_of(8, seed=3)]
    async with runtime.open((model, None), draft, prefix_cache_dir=folder) as rt:
        for actor in (rt._target, rt._draft)[:num_models]:
            await until_in_trio(lambda actor=actor: actor.prefix_cache.store._stored != {})
        assert await answer(rt, longer) == (greedy(model, longer, NUM_TOKENS), len(prompt) + NUM_TOKENS - 1)
        # The same prompt again needs only a part of it.
        assert await answer(rt, prompt) == (first, len(prompt) - 1)
        files = cache_of(rt)._files
    # The longer text has taken the place of its beginning.
    assert len(files.scan()) == 1


@pytest.fixture
async def text(tmp_path: Path, model: Any) -> list[int]:
    """The text after `PROMPT`, by a runtime that has stored what it had cached."""
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        return (await answer(rt, PROMPT))[0]


async def test_what_a_cancelled_request_has_brought_back_is_kept(tmp_path, model, text, monkeypatch):
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: cache_of(rt)._stored != {})
        fill = saved_sequence.fill
        with trio.CancelScope() as scope:

            async def fill_and_leave(*arguments: Any, **options: Any) -> saved_sequence.FilledSequence:
                filled = await fill(*arguments, **options)
                scope.cancel()
                return filled

            monkeypatch.setattr(saved_sequence, "fill", fill_and_leave)
            await cache_of(rt).bring_back(tuple(PROMPT), alongside_model=False)
        monkeypatch.undo()
        tmp_path.rename(tmp_path.with_name("gone"))  # it comes from memory now
        assert await answer(rt, PROMPT) == (text, len(PROMPT) - 1)


async def test_what_is_not_the_text_of_its_index_is_closed(tmp_path, model, text, monkeypatch):
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: cache_of(rt)._stored != {})
        fill, closed = saved_sequence.fill, []

        async def fill_another(*arguments: Any, **options: Any) -> saved_sequence.FilledSequence:
            filled = await fill(*arguments, **options)
            monkeypatch.setattr(filled.sequence, "close", lambda: closed.append(filled.sequence))
            return attrs.evolve(filled, tokens=filled.tokens[1:])

        monkeypatch.setattr(saved_sequence, "fill", fill_another)
        assert await answer(rt, PROMPT) == (text, 0)
    assert len(closed) == 1


async def test_of_several_with_the_same_beginning_the_smallest_file_is_read(tmp_path: Path, model: Any) -> None:
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        for num_more in (100, 9, 40):
            await answer(rt, [*PROMPT, *prompt_of(num_more, seed=num_more)])
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: len(cache_of(rt)._stored) == 3)
        for order in permutations(cache_of(rt)._stored.items()):
            cache_of(rt)._stored = dict(order)
            best, num_reusable = cache_of(rt)._best((*PROMPT, 1))
            assert (len(best.tokens), num_reusable) == (len(PROMPT) + 9 + NUM_TOKENS - 1, len(PROMPT))


SlowDisk = tuple[threading.Event, threading.Event]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """Has files written only once the second event is set; the first one says that a write has begun."""
    begun, may_end, write = threading.Event(), threading.Event(), PrefixFiles.write

    def write_slowly(files: PrefixFiles, *arguments: Any) -> set[str]:
        begun.set()
        assert may_end.wait(60)
        return write(files, *arguments)

    monkeypatch.setattr(PrefixFiles, "write", write_slowly)
    return begun, may_end


async def test_streams_go_on_while_a_file_is_written(tmp_path: Path, model: Any, slow_disk: SlowDisk) -> None:
    begun, may_end = slow_disk
    async with runtime.open((model, None), prefix_cache_dir=tmp_path, prefix_cache_bytes=100_000) as rt:
        for seed in range(2):
            await answer(rt, prompt_of(80, seed=seed))
        await until_in_trio(begun.is_set)
        prompt = prompt_of(40, seed=9)
        assert await answer(rt, prompt) == (greedy(model, prompt, NUM_TOKENS), 0)
        assert stored_in(tmp_path) == []
        may_end.set()
    # The second text had to leave, too, and there was no room in which it could have waited.
    assert len(stored_in(tmp_path)) == 2


async def test_what_waits_for_a_slow_disk_is_within_the_memory_of_the_cache_and_one_text(tmp_path, model, slow_disk):
    begun, may_end = slow_disk
    max_bytes = 300_000
    async with runtime.open((model, None), prefix_cache_dir=tmp_path, prefix_cache_bytes=max_bytes) as rt:
        await answer(rt, prompt_of(80))
        await rt._target.settled_prefix_cache()
        cache, num_entries = rt._target.prefix_cache, []
        num_bytes = cache.num_bytes
        before = mx.get_active_memory() - num_bytes
        for seed in range(1, 12):
            await answer(rt, prompt_of(80, seed=seed))
            await rt._target.settled_prefix_cache()
            assert mx.get_active_memory() - before <= max_bytes + num_bytes
            num_entries.append(len(cache))
            if begun.is_set():
                # Short texts leave room for one that waits.
                await answer(rt, prompt_of(40, seed=100 + seed))
        assert max(num_entries) > 1
        may_end.set()
    # Those of the cache, the one that was being written, and those for which there was room.
    assert num_entries[-1] + 1 <= len(stored_in(tmp_path)) < 12


async def test_what_the_bound_has_deleted_is_forgotten_and_written_again(tmp_path, model, caplog):
    bounds = {"prefix_cache_bytes": 100_000, "prefix_cache_dir_bytes": 60_000}
    async with runtime.open((model, None), prefix_cache_dir=tmp_path, **bounds) as rt:
        cache = cache_of(rt)
        for seed in (0, 1, 2, 3, 0, 4):
            await answer(rt, prompt_of(80, seed=seed))
            # The text before is evicted when this one is put away, after its answer.
            await until_in_trio(lambda: not (rt._target._sessions or cache._evicted or cache._is_writing))
            assert {path.stem.rpartition("-")[2] for path in stored_in(tmp_path)} == set(cache._stored)
        assert tuple(PROMPT) in {stored.tokens[: len(PROMPT)] for stored in cache._stored.values()}
    assert "left out" not in caplog.text


async def test_a_runtime_that_is_closed_before_it_has_looked_at_the_folder_writes_there(tmp_path, model, monkeypatch):
    async def never(_: DiskPrefixCache) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(DiskPrefixCache, "run", never)
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await answer(rt, prompt_of(80))
        assert cache_of(rt)._files is None
    assert len(stored_in(tmp_path)) == 1


async def test_models_that_share_a_folder_find_their_own(tmp_path: Path, model: Any) -> None:
    others: list[tuple[Any, dict[str, Any]]] = [(model, {}), (llama(7), {}), (model, {"max_kv_size": 200})]
    for pair, options in others:
        async with runtime.open((pair, None), prefix_cache_dir=tmp_path, **options) as rt:
            await until_in_trio(lambda: cache_of(rt)._files is not None)
            assert (await answer(rt, PROMPT))[1] == 0
    async with runtime.open((others[1][0], None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: cache_of(rt)._files is not None)
        assert await answer(rt, PROMPT) == (greedy(others[1][0], PROMPT, NUM_TOKENS), len(PROMPT) - 1)


async def test_what_another_process_has_deleted_is_read_again_without_a_warning(tmp_path, model, text, caplog):
    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: cache_of(rt)._stored != {})
        stored_in(tmp_path)[0].unlink()
        assert await answer(rt, PROMPT) == (text, 0)
    assert "left out" not in caplog.text


async def test_a_prefix_that_finds_no_memory_stays_on_the_disk(tmp_path, model, text, monkeypatch):
    def put_state(*_: Any) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 1 bytes.")

    async with runtime.open((model, None), prefix_cache_dir=tmp_path) as rt:
        await until_in_trio(lambda: cache_of(rt)._stored != {})
        monkeypatch.setattr(MLXSequence, "put_state", put_state)
        assert await answer(rt, PROMPT) == (text, 0)
        assert len(cache_of(rt)._stored) == len(stored_in(tmp_path)) == 1


async def test_a_damaged_file_is_left_out_and_the_text_is_right(tmp_path, model, text, caplog):
    [path] = stored_in(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    async with runtime.open((model, None), prefix_cache_dir=tmp_path, prefix_cache_bytes=0) as rt:
        await until_in_trio(lambda: cache_of(rt)._stored != {})
        assert await answer(rt, PROMPT) == (text, 0)
        assert cache_of(rt)._stored == {}
    assert "a stored prefix is left out: session file" in caplog.text
    assert "; " not in caplog.messages[-1]  # no remedy
    assert list(tmp_path.iterdir()) == []


# --- the files ------------------------------------------------------------------------------------


def sequence(seed: int, num_bytes: int = 400) -> tuple[StoredPrefix, SequenceRecord]:
    """A sequence of made-up bytes."""
    tokens = tuple(prompt_of(40, seed=seed))
    stored = StoredPrefix(tokens, 30, (20, 40), can_be_cut=False, packed=pack(tokens))
    views = [memoryview(bytes([seed, n]) * (num_bytes // 2)) for n in range(3)]
    data = {f"target.{n}": Tensor("U8", (num_bytes,), view) for n, view in enumerate(views)}
    return stored, SequenceRecord({"tokens": {"tensor": "target.0"}, "seed": seed}, data)


def contents(files: PrefixFiles) -> dict[tuple[int, ...], Any]:
    """Every sequence that is found and can be read, by its tokens."""
    return {stored.tokens: plain(files.read(stored)) for stored in files.scan()}


def plain(record: SequenceRecord) -> Any:
    return record.description, {name: bytes(tensor.data) for name, tensor in record.tensors.items()}


def expected(*seeds: int) -> dict[tuple[int, ...], Any]:
    return {stored.tokens: plain(record) for stored, record in map(sequence, seeds)}


def files_in(folder: Path, max_bytes: int = 10**9, model: Fingerprint = MODEL) -> PrefixFiles:
    return PrefixFiles(folder, max_bytes, model, {"kv_bits": None})


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Run a function in a child process that is killed before its `step`-th system call on files. Whether it was."""
    if (child := os.fork()) == 0:
        count = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def call_or_die(*arguments: Any, **keywords: Any) -> Any:
                nonlocal count
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return call(*arguments, **keywords)

            return call_or_die

        for module, names in (
            (os, ("fsync", "replace", "fchmod", "unlink", "open", "close", "utime")),
            (tempfile, ("mkstemp",)),
            (session_file, ("_write_all",)),
        ):
            for name in names:
                setattr(module, name, counted(getattr(module, name)))
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)  # never back into the tests
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_killed_writer_leaves_the_old_files(tmp_path: Path) -> None:
    whole, step = expected(1, 2), 0
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        files = files_in(folder)
        files.write(*sequence(1))
        was_killed = killed_at(step, partial(files_in(folder).write, *sequence(2)))
        found = contents(files_in(folder))
        assert found in (expected(1), whole)
        files_in(folder).write(*sequence(2))
        assert contents(files_in(folder)) == whole
        if not was_killed:
            assert found == whole
            break
        step += 1
    assert step > 15


@pytest.mark.parametrize("suffix", [".outrider-prefix", ".outrider-prefix-index"])
def test_a_file_that_is_cut_or_altered_anywhere_is_never_read_wrongly(tmp_path: Path, suffix: str) -> None:
    files = files_in(tmp_path)
    files.write(*sequence(1))
    saved = {path: path.read_bytes() for path in tmp_path.iterdir()}
    [path] = tmp_path.glob(f"*{suffix}")
    data = saved[path]
    damaged = [data[:length] for length in range(0, len(data), 7)]
    damaged += [data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in range(0, len(data), 11)]
    for each in damaged:
        for other, content in saved.items():
            other.write_bytes(content)
        path.write_bytes(each)
        found = {}
        for stored in files_in(tmp_path).scan():
            with pytest.raises(SessionFileError):
                found[stored.tokens] = files.read(stored)
        assert found == {}


def test_a_file_under_the_name_of_another_model_s_is_left_out(tmp_path: Path) -> None:
    files, other = files_in(tmp_path), files_in(tmp_path, model=attrs.evolve(MODEL, weights="others"))
    files.write(*sequence(1))
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace(files._prefix, other._prefix))
    assert contents(files) == {}
    assert contents(other) == {}
    assert list(tmp_path.iterdir()) == []


def test_beyond_the_bound_the_least_recently_used_sequences_are_deleted(tmp_path: Path) -> None:
    num_bytes = 0
    for number, seed in enumerate((1, 2, 3)):
        files_in(tmp_path).write(*sequence(seed, 40_000))
        num_bytes = max(num_bytes, *(path.stat().st_size for path in stored_in(tmp_path)))
        for path in stored_in(tmp_path):
            if sequence(seed)[0].key in path.name:
                os.utime(path, (number, number))
    files = files_in(tmp_path, 3 * num_bytes + 100)
    files.read(sequence(1)[0])
    files.write(*sequence(4, 40_000))
    assert {stored.tokens for stored in files.scan()} == {sequence(seed)[0].tokens for seed in (1, 3, 4)}
    # One that is larger than all is not written.
    files.write(*sequence(5, 4 * num_bytes))
    assert len(stored_in(tmp_path)) == 3
    assert len(list(tmp_path.iterdir())) == 6


def test_what_killed_writers_have_left_is_deleted_once_it_is_old(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(*sequence(1))
    [index] = tmp_path.glob("*-index")
    index.unlink()
    for name in (".outrider-old.tmp", ".outrider-new.tmp"):
        (tmp_path / name).write_bytes(b"x")
    for path in (tmp_path / ".outrider-old.tmp", *stored_in(tmp_path)):
        os.utime(path, (1, 1))
    assert files.scan() == []
    assert [path.name for path in tmp_path.iterdir()] == [".outrider-new.tmp"]
