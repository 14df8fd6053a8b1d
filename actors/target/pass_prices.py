"""What finished passes of the target say about prices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from actors.target.target_session import TargetSession
from actors.workers.worker import Job, Worker
from protocol.prices import Prices

# After this many passes that were launched ahead, one is not, and launches none, to measure what such a pass costs: on
# a CPU, MLX returns from launching a pass only when most of it is computed.
MEASURED_EVERY = 32


class PassPrices:
    """Learns from each finished pass what passes and rounds cost, and decides when one must be measured."""

    def __init__(self, prices: Prices, worker: Worker) -> None:
        self._prices = prices
        self._worker = worker
        self._num_ahead = 0  # passes in succession that were launched ahead
        self._measures_next = False
        self._num_before = 0  # sessions at the end of the last pass
        # When the last pass ended, and the worker's busy seconds by then: in the first if that pass was without drafts,
        # in the second if it was over proposals.
        self._last_plain: tuple[float, float] | None = None
        self._last_drafted: tuple[float, float] | None = None
        # Of the last pass over proposals: its seconds for each session, those that drafted tokens added for each that
        # had some, the share of these sessions, and whether it computed one row of one token.
        self._plain_s = self._added_s = self._drafting_share = 0.0
        self._was_single = False

    def may_go_ahead(self, num_rows: int) -> bool:
        """Whether a pass of so many rows may launch the next one."""
        return num_rows == 1 or (self._num_ahead < MEASURED_EVERY and not self._measures_next)

    def begin_pass(self, *, is_plain: bool) -> None:
        """Note that a pass begins."""
        if is_plain:
            self._last_drafted = None
        else:
            self._last_plain = None

    def forget(self) -> None:
        """Forget the last pass: one has failed."""
        self._last_plain, self._last_drafted, self._num_ahead, self._measures_next = None, None, 0, False

    def pause(self) -> None:
        """Note that there is nothing to do for now, so that this time is not counted as part of a plain round."""
        self._last_plain = None

    def learn_plain(
        self, job: Job[Any], sessions: Sequence[TargetSession], num_sessions: int, num_rows: int, *, is_ahead: bool
    ) -> None:
        """Learn from a pass without drafts over `num_rows` rows; `is_ahead` if it has launched the next one.

        One that was launched ahead began before its job, so it does not show what a pass costs. If it has launched
        another in its own time, it shows what a plain round costs; of several of the `num_sessions` texts, nearly all
        are such passes. The first of them computes two passes, and the last one next to nothing.
        """
        was_ahead = self._num_ahead > 0
        self._measures_next = not is_ahead and self._num_ahead >= MEASURED_EVERY
        self._num_ahead = self._num_ahead + 1 if is_ahead else 0
        if self._is_typical(sessions, num_sessions) and not (was_ahead or is_ahead) and num_sessions > 1:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        last, self._last_plain = self._last_plain, (job.ended, self._worker.busy_seconds)
        is_steady = was_ahead == is_ahead and (is_ahead or len(sessions) == 1)
        if last is not None and num_rows == len(sessions) and is_steady:
            self._prices.observe_plain_round(job.seconds + self._idle_s(last, job), num_texts=len(sessions))

    def learn_verified(
        self, job: Job[Any], sessions: Sequence[TargetSession], num_sessions: int, num_computed: int, width: int
    ) -> None:
        """Learn from a pass of any other kind, which has computed `width` tokens for each of `num_computed` texts."""
        rows = [row for session in sessions if (row := session.row) is not None]
        proposals = [proposal for row in rows if (proposal := row.proposal) is not None and proposal.tokens]
        last, self._last_drafted = self._last_drafted, (job.ended, self._worker.busy_seconds)
        if last is not None and proposals and all(each.needs_no_model for each in proposals):
            self._prices.observe_gap(min(job.seconds, self._idle_s(last, job)))
        if self._is_typical(sessions, num_sessions):
            self._prices.observe_verify_pass(num_computed * width, job.began, job.ended)
        # The time that drafted tokens added to the pass is charged to the sessions that had some.
        plain_s = min(job.seconds, self._prices.verify(num_computed)) if proposals else job.seconds
        self._plain_s, self._added_s = plain_s / len(sessions), (job.seconds - plain_s) / max(1, len(proposals))
        self._drafting_share = len(proposals) / len(sessions)
        self._was_single = len(sessions) == num_computed * width == 1

    def round_s(self, session: TargetSession, num_sessions: int) -> float:
        """The seconds of a session's round, whose verdict the last pass over proposals has brought."""
        busy_s = self._worker.busy_seconds - session.busy_before_s
        idle_s = max(0.0, self._worker.clock() - session.round_began_s - busy_s)
        added_s = self._added_s if session.row is not None and session.row.proposed else 0.0
        # Idle time is charged to the sessions with drafts, too: plain decoding would have used it for a pass ahead.
        return self._plain_s + added_s + idle_s / (num_sessions * (self._drafting_share or 1.0))

    def learn_round(self, session: TargetSession, num_tokens: int, round_s: float, *, was_proposed: bool) -> None:
        """Learn what a session's round in the last pass over proposals cost, which has committed `num_tokens`."""
        if was_proposed:
            self._prices.observe_round(num_tokens, round_s)
        elif session.was_plain and self._was_single:
            # Not the first plain round after a proposal: it cannot be a pass ahead, and its cost is unavoidable.
            self._prices.observe_plain_round(round_s)

    def _is_typical(self, sessions: Sequence[TargetSession], num_sessions: int) -> bool:
        """Whether the last pass copied no caches, as one does where sessions join or leave. To be asked once a pass."""
        num_before, self._num_before = self._num_before, num_sessions
        is_new = len(sessions) > 1 and not all(session.has_shared for session in sessions)
        return not is_new and num_sessions >= num_before

    def _idle_s(self, last: tuple[float, float], job: Job[Any]) -> float:
        """Seconds for which the worker was idle between the last pass and a job that has just ended."""
        ended_s, busy_s = last
        return max(0.0, job.ended - ended_s - (self._worker.busy_seconds - busy_s))


def passes_in_a_row(sessions: Sequence[TargetSession], num_rounds: float) -> int:
    """Most passes in a row, at most `num_rounds`: commits must fit into channels, and prices be measured."""
    if any(session.shared.logits_pipeline.needs_text for session in sessions):
        return 1
    room = min(session.shared.room for session in sessions)
    return int(max(1, min(num_rounds, room, MEASURED_EVERY)))


def num_computed_by(sessions: Sequence[TargetSession], texts: Iterable[TargetSession]) -> int:
    """How many sequences a pass over some sessions computed: if any is a row of the batch, all other rows, too."""
    if not any(session.is_row for session in sessions):
        return len(sessions)
    return len({*sessions, *(session for session in texts if session.is_row)})
