"""Reading prompts at the target: each pass reads a chunk of one prompt, or several short prompts whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from actors.model import CachedSequence, Model
from actors.prefill import can_read_together, next_chunk
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Worker
from protocol.prefill_chunks import PrefillChunkSize, read_together
from protocol.trace import Share


class Reading:
    """The prompts that are being read, in the order in which they came.

    Attributes:
        prompts: their sessions.
        running: those whose prompts the running pass reads.
        pass_over: set once that pass is over.
    """

    def __init__(
        self, model: Model, worker: Worker, chunk_size: PrefillChunkSize, num_shared: Callable[[], int]
    ) -> None:
        """No prompt so far.

        Args:
            model: lives on the worker's thread.
            worker: runs the passes.
            chunk_size: of the model; updated.
            num_shared: returns how many texts may share a pass, >= 1.
        """
        self._model = model
        self._worker = worker
        self._chunk_size = chunk_size
        self._num_shared = num_shared
        self.prompts: dict[TargetSession, None] = {}
        self.running: Sequence[TargetSession] = ()
        self.pass_over = trio.Event()

    async def run_pass(self) -> None:
        """Read a chunk of the first prompt, or that prompt whole together with others of like length.

        An error ends the session of a prompt that was read alone. Prompts that were read together are read again, each
        alone.
        """
        self.running, self.pass_over = self._chosen(), trio.Event()
        try:
            await (self._read_chunk(self.running[0]) if len(self.running) == 1 else self._read_whole(self.running))
        finally:
            for session in self.running:
                if session in self.prompts and (session.failure is not None or not _num_left(session)):
                    del self.prompts[session]
                    session.prompt_is_read.set()
            self.running = ()
            self.pass_over.set()

    def _chosen(self) -> list[TargetSession]:
        first, *others = self.prompts
        if self._num_shared() == 1 or not _can_share(first):
            return [first]
        fitting = [first, *filter(_can_share, others)]
        indices = read_together([_num_left(each) for each in fitting], self._chunk_size(), self._model.widest_row)
        return [fitting[index] for index in indices[: self._num_shared()]]

    async def _read_chunk(self, session: TargetSession) -> None:
        sequence, opened = session.sequence, session.shared.opened
        assert sequence is not None
        chunk = next_chunk(sequence, session.cached_tokens, opened, self._chunk_size)
        job = Job("prefill", partial(chunk.feed, sequence), session.id, len(chunk.plan.feed))
        try:
            await self._worker.run(job)
        except JobError as error:
            session.failure = error
            return
        self._chunk_size.observe(job.num_tokens, job.seconds)
        session.cached_tokens.follow(chunk.plan)

    async def _read_whole(self, sessions: Sequence[TargetSession]) -> None:
        plans = [
            session.cached_tokens.plan(session.shared.opened.prompt[: session.shared.opened.num_read], num_logits=0)
            for session in sessions
        ]
        shares = tuple(Share(session.id, 0, len(plan.feed)) for session, plan in zip(sessions, plans, strict=True))
        sequences = [session.sequence for session in sessions if session.sequence is not None]
        call = partial(_read_together, self._model, sequences, [plan.feed for plan in plans])
        job = Job("prefill", call, num_tokens=sum(len(plan.feed) for plan in plans), shares=shares)
        try:
            is_read = await self._worker.run(job)
        except JobError:
            is_read = False
        for session, plan in zip(sessions, plans, strict=True):
            if is_read:
                session.cached_tokens.follow(plan)
            else:
                session.reads_alone = True
        if is_read:
            self._chunk_size.observe(job.num_tokens, job.seconds)


def _read_together(model: Model, sequences: Sequence[CachedSequence], tokens: Sequence[tuple[int, ...]]) -> bool:
    """Returns: whether texts of the model can share passes, so that these were read."""
    if model.sharing_obstacle() is not None:
        return False
    try:
        model.read_together(sequences, tokens)
    except BaseException:
        for sequence in sequences:
            sequence.forget()
        raise
    return True


def _can_share(session: TargetSession) -> bool:
    assert session.sequence is not None
    return not session.reads_alone and can_read_together(session.sequence, session.shared.opened)


def _num_left(session: TargetSession) -> int:
    return session.shared.opened.num_read - len(session.cached_tokens)
