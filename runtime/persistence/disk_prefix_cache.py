"""The prefix cache of one model on disk: what leaves the one in memory, and comes back, also after a restart.

Two files for each cached sequence, in the container of saved sessions. The larger one has the sequence, and the smaller
one what a search needs: its tokens. Each is written atomically and has a checksum of its own. The smaller one is
written last and deleted first, so that a sequence is found only while it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from actors.actor import ModelActor
from actors.mlx.sequence_state import SequenceRecord, SequenceState, StatefulSequence
from actors.model import ReusableSequence
from actors.persistence import saved_sequence
from actors.persistence.fingerprint import Fingerprint
from actors.prefix_cache import common_length, pack
from actors.workers.thread_worker import HangError
from actors.workers.worker import Job, JobError
from protocol.errors import RankError, RewindError, SessionFileError, SettingsError
from protocol.reprs import shown_path
from protocol.tensor import Tensor
from protocol.validation import must_be
from runtime.persistence import session_file
from runtime.persistence.session_file import Contents

logger = logging.getLogger("outrider")

# Shorter texts are read faster than a file.
MIN_TOKENS = 32

_SEQUENCE, _INDEX = ".outrider-prefix", ".outrider-prefix-index"

# Seconds after which an unfinished file is taken for that of a writer that was killed; others may still be written.
_ABANDONED_S = 3600


@attrs.frozen(eq=False)
class StoredPrefix:
    """What a search needs of a stored sequence."""

    tokens: tuple[int, ...]
    num_prompt: int  # how many of them were the prompt of their text
    lengths: tuple[int, ...]  # at which another text can continue
    can_be_cut: bool  # whether another text can continue anywhere
    packed: bytes  # the tokens, as `pack` gives them

    @property
    def key(self) -> str:
        """Names the sequence among those of its model."""
        return hashlib.sha256(self.packed).hexdigest()[:32]

    def num_reusable(self, num_common: int) -> int:
        """How many tokens can be reused by a text whose first `num_common` tokens are the same."""
        if self.can_be_cut:
            return num_common
        return max((length for length in self.lengths if length <= num_common), default=0)


def check_folder(folder: Any) -> Path:
    """The folder of a prefix cache, made if it is missing; readable by its owner alone, since it has texts.

    Raises: SettingsError: it is no path, or cannot be made.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise must_be("prefix_cache_dir", "the path of a directory or None", folder)
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"prefix_cache_dir {shown_path(str(folder))} cannot be made: {error.strerror}; give another directory"
        ) from error
    return path


@attrs.frozen(eq=False)
class _Evicted:
    """A sequence that has left the cache in memory, and is not written yet."""

    stored: StoredPrefix
    state: SequenceState
    num_bytes: int


class PrefixFiles:
    """The files of one model in a folder that several models and processes may share. May be used in any thread."""

    def __init__(
        self, folder: Path, max_bytes: int, fingerprint: Fingerprint, cache_options: Mapping[str, Any]
    ) -> None:
        """The folder must exist; of all files in it, the least recently used are deleted beyond `max_bytes`."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._model = {"fingerprint": attrs.asdict(fingerprint), "cache_options": dict(cache_options)}
        self._prefix = hashlib.sha256(json.dumps(self._model, sort_keys=True).encode()).hexdigest()[:16]

    def scan(self) -> list[StoredPrefix]:
        """The model's sequences in the folder. Deletes what is damaged, and what writers that were killed have left."""
        found = []
        for path in self._folder.glob(f"{self._prefix}-*{_INDEX}"):
            try:
                found.append(self._stored(session_file.read(path)))
            except SessionFileError as error:
                _warn(error)
                self._delete(path.with_suffix(_SEQUENCE))
        before = time.time() - _ABANDONED_S
        for path, stat in self._stats(".outrider-*.tmp"):
            if stat.st_mtime < before:
                _unlink(path)
        for path, stat in self._stats(f"{self._prefix}-*{_SEQUENCE}"):
            if stat.st_mtime < before and not path.with_suffix(_INDEX).exists():
                _unlink(path)
        return found

    def write(self, stored: StoredPrefix, recorded: SequenceRecord) -> set[str]:
        """Write a sequence, and delete others beyond the bound.

        Returns: the keys of the model's sequences that are in the folder then; that of the written one is not among
            them if it alone exceeds the bound. Raises: as `session_file.write`.
        """
        if sum(len(tensor.data) for tensor in recorded.tensors.values()) > self._max_bytes:
            return self._keys()
        path = self._path(stored.key)
        session_file.write(path, Contents({**self._model, "sequence": recorded.description}, recorded.tensors))
        tokens = Tensor("U32", (len(stored.tokens),), memoryview(array("I", stored.tokens)).cast("B"))
        content = {"num_prompt": stored.num_prompt, "lengths": stored.lengths, "can_be_cut": stored.can_be_cut}
        session_file.write(path.with_suffix(_INDEX), Contents({**self._model, **content}, {"tokens": tokens}))
        self._trim()
        return self._keys()

    def read(self, stored: StoredPrefix) -> SequenceRecord:
        """Read a sequence, and count that as a use of it.

        Raises: SessionFileError: it is gone, damaged, or of another model.
        """
        path = self._path(stored.key)
        contents = session_file.read(path)
        self._check_model(contents, path)
        self.touch(stored)
        return SequenceRecord(contents.content.get("sequence"), contents.tensors)

    def touch(self, stored: StoredPrefix) -> bool:
        """Count a use of a sequence. Returns: whether it is there."""
        try:
            os.utime(self._path(stored.key))
        except OSError:
            return False
        return True

    def delete(self, stored: StoredPrefix) -> None:
        """Delete a sequence; nothing happens if it is gone."""
        self._delete(self._path(stored.key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}-{key}{_SEQUENCE}"

    def _keys(self) -> set[str]:
        return {path.stem.rpartition("-")[2] for path in self._folder.glob(f"{self._prefix}-*{_SEQUENCE}")}

    def _check_model(self, contents: Contents, path: Path) -> None:
        content = contents.content
        if not isinstance(content, dict) or any(content.get(name) != value for name, value in self._model.items()):
            raise SessionFileError(f"{session_file.named(path)} is of another model; it is left out")

    def _stored(self, contents: Contents) -> StoredPrefix:
        self._check_model(contents, self._folder)
        tensor = contents.tensors.get("tokens")
        match contents.content:
            case {"num_prompt": int(num_prompt), "lengths": list(lengths), "can_be_cut": bool(can_be_cut)}:
                if tensor is not None and tensor.dtype == "U32" and all(type(length) is int for length in lengths):
                    tokens = tuple(tensor.data.cast("I").tolist())
                    return StoredPrefix(tokens, num_prompt, tuple(lengths), can_be_cut, pack(tokens))
        raise SessionFileError(f"an index in {session_file.named(self._folder)} is not as it should be")

    def _trim(self) -> None:
        """Delete the least recently used sequences, of all models, until the folder is within its bound."""
        files = sorted(self._stats(f"*{_SEQUENCE}"), key=lambda pair: pair[1].st_mtime_ns)
        num_bytes = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if num_bytes <= self._max_bytes:
                return
            self._delete(path)
            num_bytes -= stat.st_size

    def _stats(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                yield path, path.stat()

    def _delete(self, path: Path) -> None:
        for each in (path.with_suffix(_INDEX), path):
            _unlink(each)


def _warn(error: Exception) -> None:
    # The remedy of a `SessionFileError` is for files that a user has saved.
    logger.warning("a stored prefix is left out: %s", str(error).partition("; ")[0])


def _unlink(path: Path) -> None:
    """Delete a file, if it is there and another user does not own it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@attrs.define(eq=False)
class DiskPrefixCache:
    """See `PrefixStore`. Bytes are copied by the model's thread, a layer at a time, and written by another thread.

    Finds nothing until `run` has looked.
    """

    _actor: ModelActor[Any]  # with a `SavableModel`
    _folder: Path
    _max_bytes: int
    _files: PrefixFiles | None = attrs.field(init=False, default=None)
    _stored: dict[str, StoredPrefix] = attrs.field(init=False, factory=dict)
    # Those that wait: the model's thread adds and drops them, and trio's takes the first one and writes it.
    _evicted: deque[_Evicted] = attrs.field(init=False, factory=deque)
    _is_writing: bool = attrs.field(init=False, default=False)
    _has_evicted: trio.Event = attrs.field(init=False, factory=trio.Event)
    _writing: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _trio_token: trio.lowlevel.TrioToken = attrs.field(init=False, factory=trio.lowlevel.current_trio_token)

    def __attrs_post_init__(self) -> None:
        self._actor.prefix_cache.store = self

    def evict(self, sequence: ReusableSequence, tokens: tuple[int, ...], num_prompt: int) -> None:
        if not isinstance(sequence, StatefulSequence) or len(tokens) < MIN_TOKENS:
            return
        try:
            state = sequence.take_state(tokens)
        except (RewindError, RankError) as error:
            logger.warning("a cached prefix is not stored: %s", error)
            return
        if state is None:
            return
        length = len(tokens) - 1
        can_be_cut = state.features is None and sequence.reusable_length(length, length) == length
        stored = StoredPrefix(tokens, num_prompt, state.lengths, can_be_cut, pack(tokens))
        self._evicted.append(_Evicted(stored, state, sequence.num_bytes))
        self._trio_token.run_sync_soon(lambda: self._has_evicted.set())

    def shrink(self, max_bytes: float) -> None:
        sizes = [each.num_bytes for each in tuple(self._evicted)]
        while sum(sizes) > max_bytes and len(sizes) + self._is_writing > 1:
            with contextlib.suppress(IndexError):  # taken meanwhile
                self._evicted.popleft()
            del sizes[0]

    async def run(self) -> None:
        """See `PrefixStore.run`. Looks at the folder first.

        Cancellation: a file that is being written is completed; what was not written, `flush` writes.
        """
        async with self._writing:
            await self._open()
        while self._files is not None:
            await self._has_evicted.wait()
            self._has_evicted = trio.Event()
            await self.flush()

    async def _open(self) -> None:
        """Look at the folder, if that was not done."""
        if self._files is not None or self._actor.prefix_cache.store is None:
            return
        assert isinstance(self._actor.model, saved_sequence.SavableModel)
        try:
            fingerprint = await saved_sequence.identify(self._actor)
        except (JobError, HangError, RankError) as error:
            logger.warning("there is no prefix cache on disk for the %s: %s", self._actor.name, error)
            self._actor.prefix_cache.store = None
            return
        files = PrefixFiles(self._folder, self._max_bytes, fingerprint, self._actor.model.cache_options)
        for stored in await trio.to_thread.run_sync(files.scan):
            self._stored[stored.key] = stored
        self._files = files

    async def flush(self) -> None:
        """See `PrefixStore.flush`. What was not written before a cancellation waits for the next call."""
        async with self._writing:
            if self._evicted:
                await self._open()  # a runtime may be closed before `run` has come so far
            while self._evicted and self._files is not None:
                self._is_writing = True
                try:
                    await self._write_next(self._files)
                finally:
                    self._is_writing = False

    async def _write_next(self, files: PrefixFiles) -> None:
        evicted = self._evicted.popleft()
        stored = evicted.stored
        if stored.key in self._stored and files.touch(stored):
            return
        try:
            try:
                recorded = await saved_sequence.copy(self._actor, evicted.state)
            except trio.Cancelled:
                self._evicted.appendleft(evicted)
                raise
            del evicted  # the file is written from the copy
            present = await trio.to_thread.run_sync(files.write, stored, recorded)
        except (JobError, HangError, SessionFileError, RankError) as error:
            logger.warning("a cached prefix is not stored: %s", error)
            return
        self._stored[stored.key] = stored
        self._stored = {key: each for key, each in self._stored.items() if key in present}
        if stored.can_be_cut and stored.key in present:
            # A longer text replaces its own beginnings.
            for other in list(self._stored.values()):
                if other is not stored and stored.packed.startswith(other.packed):
                    del self._stored[other.key]
                    await trio.to_thread.run_sync(files.delete, other)

    async def bring_back(self, prompt: tuple[int, ...], *, alongside_model: bool) -> None:
        files, read = self._files, prompt[:-1]
        best, num_reusable = self._best(read)
        if files is None or best is None:
            return
        cache = self._actor.prefix_cache
        try:
            match = await self._actor.worker.run(Job("open", partial(cache.find_longest_match, read)))
            if match is not None and match.num_reusable >= num_reusable:
                return
            recorded = await trio.to_thread.run_sync(files.read, best)
            with trio.CancelScope(shield=True):  # until the sequence is kept, nobody else would close it
                filled = await saved_sequence.fill(self._actor, recorded, alongside_model=alongside_model)
                if filled.tokens != best.tokens:
                    await saved_sequence.discard(self._actor, filled)
                    raise SessionFileError("its tokens are not those of its index")
                put = partial(cache.put, filled.sequence, filled.tokens, filled.tokens)
                call = partial(put, alongside_model=alongside_model, num_prompt=best.num_prompt)
                await self._actor.worker.run(Job("close", call))
        except (SessionFileError, JobError, RankError) as error:
            # Another process may have deleted it, for its own bound.
            if not isinstance(error.__cause__, FileNotFoundError):
                _warn(error)
            # What the model's thread raises, such as for want of memory, says nothing about the file.
            if isinstance(error, SessionFileError) and not isinstance(error.__cause__, RuntimeError):
                self._stored.pop(best.key, None)
                await trio.to_thread.run_sync(files.delete, best)

    def _best(self, read: tuple[int, ...]) -> tuple[StoredPrefix | None, int]:
        """The stored sequence of which a text can reuse most tokens, the shortest of several, and their number."""
        packed, best, most = pack(read), None, MIN_TOKENS - 1
        for stored in sorted(self._stored.values(), key=lambda each: len(each.packed)):
            if (num_reusable := stored.num_reusable(common_length(stored.packed, packed))) > most:
                best, most = stored, num_reusable
        return best, most
