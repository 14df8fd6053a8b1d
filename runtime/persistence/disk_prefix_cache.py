"""The prefix cache on disk of one model: what leaves its prefix cache in memory, and comes back after a restart."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from actors.actor import ModelActor
from actors.mlx.sequence_state import SequenceState, StatefulSequence
from actors.model import CachedSequence
from actors.persistence import saved_sequence
from actors.prefix_cache import common_length, may_serve, pack
from actors.workers.thread_worker import HangError
from actors.workers.worker import Job, JobError
from protocol.errors import RankError, RewindError, SessionFileError
from runtime.persistence.prefix_files import PrefixFiles, StoredPrefix

logger = logging.getLogger("outrider")

# Shorter texts are read faster than a file.
MIN_TOKENS = 32

# Evicted sequences that may wait for the disk; beyond, the oldest is dropped.
_MAX_WAITING = 16


@attrs.frozen(eq=False)
class _Evicted:
    """A sequence that has left memory, and has not been written yet."""

    stored: StoredPrefix
    state: SequenceState


class DiskPrefixCache:
    """See `PrefixStore`. Bytes are copied by the model's thread, a layer at a time, and written by another thread."""

    def __init__(self, actor: ModelActor[Any], folder: Path, max_bytes: int) -> None:
        """For an actor, as the store of its prefix cache. Nothing is found before `run` has looked.

        Args:
            actor: its model is a `SavableModel`.
            folder, max_bytes: see `PrefixFiles`.
        """
        self._actor = actor
        self._folder = folder
        self._max_bytes = max_bytes
        self._files: PrefixFiles | None = None
        self._stored: dict[str, StoredPrefix] = {}
        self._evicted: deque[_Evicted] = deque()
        self._has_evicted = trio.Event()
        self._writing = trio.Lock()
        self._trio_token = trio.lowlevel.current_trio_token()
        actor.prefix_cache.store = self

    def evict(self, sequence: CachedSequence, tokens: tuple[int, ...], num_prompt: int) -> None:
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
        self._evicted.append(_Evicted(stored, state))
        self._trio_token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._has_evicted.set()

    async def run(self) -> None:
        """See `PrefixStore.run`. Looks at the folder first.

        Cancellation: a file that is being written is completed; what was not written, `flush` writes.
        """
        async with self._writing:
            await self._open()
        while self._files is not None:
            await self._has_evicted.wait()
            self._has_evicted = trio.Event()
            while len(self._evicted) > _MAX_WAITING:
                del self._evicted[1]  # the first one may be being written
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
        """See `PrefixStore.flush`.

        Cancellation: what was not written yet waits for the next call.
        """
        async with self._writing:
            if self._evicted:
                await self._open()  # a runtime may be closed before `run` has come so far
            while self._evicted and self._files is not None:
                await self._write(self._evicted[0], self._files)
                self._evicted.popleft()

    async def _write(self, evicted: _Evicted, files: PrefixFiles) -> None:
        stored = evicted.stored
        if stored.key in self._stored:
            files.touch(stored)
            return
        try:
            recorded = await saved_sequence.copy(self._actor, evicted.state)
            await trio.to_thread.run_sync(files.write, stored, recorded)
        except (JobError, HangError, SessionFileError, RankError) as error:
            logger.warning("a cached prefix is not stored: %s", error)
            return
        self._stored[stored.key] = stored
        if stored.can_be_cut:
            # A longer text has replaced its own beginning.
            for other in list(self._stored.values()):
                if other is not stored and stored.packed.startswith(other.packed):
                    del self._stored[other.key]
                    await trio.to_thread.run_sync(files.delete, other)

    async def bring_back(self, prompt: tuple[int, ...], *, beside_another: bool) -> None:
        files, read = self._files, prompt[:-1]
        best, num_reusable = self._best(read)
        if files is None or best is None:
            return
        cache = self._actor.prefix_cache
        try:
            match = await self._actor.worker.run(Job("load", partial(cache.find_longest_match, read)))
            if match is not None and match.num_reusable >= num_reusable:
                return
            recorded = await trio.to_thread.run_sync(files.read, best)
            with trio.CancelScope(shield=True):  # until the sequence is kept, nobody else would close it
                filled = await saved_sequence.fill(self._actor, recorded, beside_another=beside_another)
                if filled.tokens != best.tokens:
                    await saved_sequence.discard(self._actor, filled)
                    raise SessionFileError("its tokens are not those of its index")
                put = partial(cache.put, filled.sequence, filled.tokens, filled.tokens)
                call = partial(put, beside_another=beside_another, num_prompt=best.num_prompt)
                await self._actor.worker.run(Job("load", call))
        except (SessionFileError, JobError, RankError) as error:
            logger.warning("a stored prefix is left out: %s", error)
            if isinstance(error, RankError) or isinstance(error.__cause__, RankError):
                return  # nothing is wrong with the file
            self._stored.pop(best.key, None)
            await trio.to_thread.run_sync(files.delete, best)

    def _best(self, read: tuple[int, ...]) -> tuple[StoredPrefix | None, int]:
        """The stored sequence with most reusable tokens of a text, and their number."""
        packed, best, most = pack(read), None, MIN_TOKENS - 1
        for stored in self._stored.values():
            num_common = common_length(stored.packed, packed)
            num_reusable = stored.num_reusable(num_common)
            if num_reusable > most and may_serve(stored.num_prompt, len(stored.tokens), num_common, num_reusable):
                best, most = stored, num_reusable
        return best, most
