"""Reading prompts at the target: a pass reads a chunk of one prompt, or several short prompts whole.

Tokens that a session scores are read in chunks, too, and scored as they are read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs

from actors.model import CachedSequence, Model
from actors.prefill import can_read_together, prefill_chunk, reads_in_one_pass, tokens_per_pass
from actors.sampling.logits_pipeline import LogitCheck
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Worker
from protocol.cached_tokens import FeedPlan
from protocol.prefill_chunks import PrefillChunkSize, read_together
from protocol.scores import TokenScore, token_scores
from protocol.session_state import SessionPhase
from protocol.trace import Share

# A prompt is read to its end if at most this many more chunks are left: only unread ones can be read together.
MAX_CHUNKS_IN_A_ROW = 4
# Most logits of a pass that scores: 64 MiB in float32. A long text with a large vocabulary would take gigabytes.
MAX_SCORED_LOGITS = 2**24


@attrs.define(eq=False)
class PromptReading:
    """The prompts that are being read, in the order in which they have their turns."""

    _model: Model
    _worker: Worker
    _chunk_size: PrefillChunkSize  # is updated
    _max_batch: int  # how many texts may share a pass, >= 1
    # Runs the pass that reads all that is left of a prompt, and gives the first token of its text.
    _begin_text: Callable[[TargetSession], Awaitable[None]]
    # A pass that scores costs more than one that only reads.
    _score_size: PrefillChunkSize = attrs.field(factory=PrefillChunkSize, init=False)
    prompts: dict[TargetSession, None] = attrs.field(factory=dict, init=False)  # their sessions

    @property
    def wanted(self) -> list[TargetSession]:
        """The sessions whose prompts somebody still wants to be read."""
        return [session for session in self.prompts if not session.shared.is_unwanted]

    async def run(self) -> Sequence[TargetSession]:
        """Read a chunk of the first wanted prompt, or all of it together with prompts of similar length; then further
        prompts whole, as long as the turn has no more tokens than a pass may have, and takes no longer: if those
        waited, the texts that were read would first have a pass without them, at nearly the price of one with them.

        An error ends the session of a prompt that was read alone; those read together are read again, each alone.

        Returns: the sessions whose prompts were read. A prompt with much left to read goes behind the others.
        """
        for session in self.prompts:
            session.notice_loss()
        read, num_tokens, began_s = list[TargetSession](), 0, self._worker.clock()
        while chosen := self._chosen():
            num_more, seconds = sum(session.num_to_read for session in chosen), self._worker.clock() - began_s
            if read and not self._chunk_size.may_go_on(num_tokens, seconds, num_more):
                break
            num_tokens += num_more
            await self._run_pass(chosen)
            read += chosen
        return read

    async def _run_pass(self, chosen: Sequence[TargetSession]) -> None:
        for session in chosen:
            del self.prompts[session]
        if len(chosen) > 1:
            await self._read_whole(chosen)
            return
        (session,) = chosen
        if self._can_begin(session):
            await self._begin_text(session)
            return
        await self._read_chunk(session)
        goes_on = tokens_per_pass(session) == "auto" and session.failure is None
        if goes_on and 0 < session.num_to_read <= MAX_CHUNKS_IN_A_ROW * self._chunk_size():
            self.prompts = {session: None, **self.prompts}

    def _chosen(self) -> list[TargetSession]:
        """The sessions of the next pass; none if none is wanted: another thread may set `is_unwanted` at any time."""
        if not (wanted := self.wanted):
            return []
        fitting = [each for each in wanted if not each.reads_alone and can_read_together(each)]
        if self._max_batch == 1 or wanted[0] not in fitting:
            return wanted[:1]
        lengths = [each.num_to_read for each in fitting]
        indices = read_together(lengths, self._chunk_size.most_tokens, self._model.widest_row)
        return [fitting[index] for index in indices[: self._max_batch]]

    def _can_begin(self, session: TargetSession) -> bool:
        """Whether the next pass can read the rest of a prompt and give the first token; not for a proposal's round."""
        opened, num_left, phase = session.opened, session.num_to_read, session.state.phase
        assert session.sequence is not None
        waits = phase in (SessionPhase.PROPOSING, SessionPhase.VERIFYING)
        reads_alone = self._max_batch == 1 and not opened.drafted  # then the text is decoded as `generate_step` does
        return (
            not (waits or reads_alone or opened.only_reads or opened.num_scored or session.reads_again)
            and not session.sequence.computes_all_logits
            and self._chunk_size.of(num_left) == num_left
            and reads_in_one_pass(session)
        )

    async def _read_chunk(self, session: TargetSession) -> None:
        try:
            opened = session.opened
            # What was scored already may have to be read again.
            if len(session.cached_tokens) < (end := opened.num_read + len(session.shared.scores)):
                await prefill_chunk(self._worker, session, opened.prompt[:end], self._chunk_size)
            else:
                await self._score_chunk(session)
        except JobError as error:
            session.failure = error

    async def _score_chunk(self, session: TargetSession) -> None:
        """Feed the next of the tokens to score, and score the token after each. The tokens before them were read."""
        sequence, cached_tokens, opened = session.sequence, session.cached_tokens, session.opened
        assert sequence is not None
        pass_tokens = tokens_per_pass(session)
        size = self._score_size() if pass_tokens == "auto" else pass_tokens
        begin = len(cached_tokens)
        end = begin + min(size, max(1, MAX_SCORED_LOGITS // self._model.vocab_size))
        plan = cached_tokens.plan(opened.prompt[: min(end, len(opened.prompt) - 1)], num_logits=0)
        scored = opened.prompt[begin + 1 : begin + 1 + len(plan.feed)]
        call = partial(_score, sequence, plan.feed, scored, session.settings.logprobs, begin)
        job = Job("prefill", call, session.id, len(plan.feed))
        scores = await self._worker.run(job)
        session.shared.scores += scores
        self._score_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)

    async def _read_whole(self, sessions: Sequence[TargetSession]) -> None:
        plans = [
            session.cached_tokens.plan(session.opened.prompt[: session.opened.num_read], num_logits=0)
            for session in sessions
        ]
        sequences = [session.sequence for session in sessions if session.sequence is not None]
        shares = [Share(session.id, 0, len(plan.feed)) for session, plan in zip(sessions, plans, strict=True)]
        job = Job("prefill", partial(_read_together, self._model, sequences, plans), shares=tuple(shares))
        job.num_tokens = sum(share.num_tokens for share in shares)
        try:
            await self._worker.run(job)
        except JobError:
            for session in sessions:
                session.reads_alone = True
            return
        for session, plan in zip(sessions, plans, strict=True):
            session.cached_tokens.follow(plan)
        self._chunk_size.observe(job.num_tokens, job.seconds)


def _read_together(model: Model, sequences: Sequence[CachedSequence], plans: Sequence[FeedPlan]) -> None:
    try:
        model.read_together(sequences, [plan.feed for plan in plans])
    except BaseException:
        for sequence in sequences:
            sequence.forget()
        raise


def _score(
    sequence: CachedSequence, feed: tuple[int, ...], tokens: tuple[int, ...], num_top: int, begin: int
) -> tuple[TokenScore, ...]:
    """Feed tokens from position `begin` on, and score the one after each. Raises: NotANumberError: of the logits."""
    logits = sequence.feed(feed, len(feed))
    assert logits is not None, "rows of logits were asked for"
    check = LogitCheck.of(logits, logits)
    scores = token_scores(logits, tokens, num_top)
    if (num_sound := check.num_sound()) < len(tokens):
        check.check(num_sound, begin + 1 + num_sound, "target")
    return scores
