"""What a drafter does next: for each session by its phase, and which sessions take part in the next job.

    phase      what it means                                    what comes next
    OPENING    the session has no cache                         OPEN; or at first REST, if its prompt may wait
    READING    the cache lacks too much of the text             READ_PROMPT and READ; then ANNOUNCE
    READY      it is the drafter's turn to propose              DRAFT; READ if the cache has fallen far behind
    VERIFYING  a proposal awaits its verdict                    likewise
    RESTING    the target decodes alone, or verifies copies     nothing; or OPEN, READ and CATCH_UP
    LEAVING    nothing more is drafted                          nothing: verdicts drop what was drawn
    LEFT       the session is over, or the target's alone       CLOSE

A phase follows from what is known of the session (`Facts`), so nothing has to be kept in step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from protocol.session_state import SessionPhase

# A drafter is ready with at most this many unread committed tokens, which its next draft step reads.
MAX_BEHIND_WHEN_READY = 8
# Committed tokens that the model has not read, such as copied ones, are read once there are more than this many.
MAX_UNREAD = 128


# --- one session ----------------------------------------------------------------------------------


class DraftPhase(enum.Enum):
    """See the module's table."""

    OPENING = "opening"
    READING = "reading"
    READY = "ready"
    VERIFYING = "verifying"
    RESTING = "resting"
    LEAVING = "leaving"
    LEFT = "left"


class Standing(enum.Enum):
    """Whether the target waits for the drafter's proposals: not yet, yes, or no longer, because one came too late."""

    NEW = "new"
    READY = "ready"
    LATE = "late"


class Task(enum.IntEnum):
    """A job for a session.

    OPEN and CLOSE concern its cache and take next to no time. READ_PROMPT and READ take as long as a chunk of the text,
    or less. CATCH_UP reads in a rest what was committed, and compares it with what the drafter would have guessed.
    DRAFT is a draft step, the only job that sessions share.
    """

    OPEN = 0
    CLOSE = 1
    READ_PROMPT = 2
    READ = 3
    CATCH_UP = 4
    DRAFT = 5

    @property
    def is_brief(self) -> bool:
        """Whether it takes next to no time."""
        return self in (Task.OPEN, Task.CLOSE)


class Notice(enum.Enum):
    """Something to tell the target, which needs no job.

    LEAVE: the drafter drafts no more for the session. REST: it begins with a rest, in which its prompt is not read.
    REST_WITHOUT_FEATURES: it rests until verdicts bring hidden states. ANNOUNCE: it is ready.
    """

    LEAVE = "leave"
    REST = "rest"
    REST_WITHOUT_FEATURES = "rest without features"
    ANNOUNCE = "announce"


@attrs.frozen
class Facts:
    """What is known of a session at its drafter."""

    turn: SessionPhase = SessionPhase.PROPOSING
    standing: Standing = Standing.READY  # see `Standing`
    is_leaving: bool = False  # whether nothing more is drafted; see `protocol.lookahead_tree.withdrawal`
    is_past_context: bool = False  # whether the text has outgrown the drafter
    is_open: bool = True  # whether the session has a cache
    begins_with_rest: bool = False  # whether its prompt is not to be read before a rest is over
    awaits_features: bool = False  # whether the drafter reads hidden states of the target, and has none of the prompt
    lacks_features: bool = False  # whether the target has none of the prompt either, because it had cached it
    has_read_prompt: bool = True  # whether the cache has held all of the prompt that is read without logits
    # Whether it must read before it drafts what its cache has lost in a shared pass that failed.
    has_lost_tokens: bool = False
    is_idle: bool = False  # whether the drafter rests, or only proposes copies
    catches_up: bool = False  # whether it is to read, while it is idle, what the target has committed
    num_behind: int = 1  # committed tokens that the cache lacks, >= 0

    @property
    def is_ready(self) -> bool:
        """Whether the target waits for proposals."""
        return self.standing is Standing.READY


def phase_of(facts: Facts) -> DraftPhase:
    """The phase of a session."""
    if facts.turn in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED):
        return DraftPhase.LEFT
    if facts.is_leaving or facts.is_past_context:
        return DraftPhase.LEAVING
    must_read = not facts.has_read_prompt or facts.awaits_features or facts.has_lost_tokens  # even in a rest
    if facts.is_open and (must_read or not facts.is_ready):
        return DraftPhase.READING
    if facts.is_ready and facts.is_idle:
        return DraftPhase.RESTING
    if not facts.is_open:
        return DraftPhase.OPENING
    return DraftPhase.VERIFYING if facts.turn is SessionPhase.VERIFYING else DraftPhase.READY


def next_step(facts: Facts) -> Task | Notice | None:
    """What the drafter does next for a session; None for nothing until something changes."""
    match phase_of(facts):
        case DraftPhase.LEFT:
            return Task.CLOSE
        case DraftPhase.LEAVING:
            return None if facts.is_leaving else Notice.LEAVE
        case DraftPhase.OPENING:
            return Notice.REST if facts.begins_with_rest and facts.standing is Standing.NEW else Task.OPEN
        case DraftPhase.READING:
            return _next_reading(facts)
        case DraftPhase.RESTING if not facts.catches_up:
            return None
        case DraftPhase.RESTING if not facts.is_open:
            return Task.OPEN
        case DraftPhase.RESTING:
            return Task.READ if facts.num_behind > MAX_UNREAD else Task.CATCH_UP
        case DraftPhase.READY | DraftPhase.VERIFYING:
            return Task.READ if facts.num_behind > MAX_UNREAD else Task.DRAFT


def _next_reading(facts: Facts) -> Task | Notice | None:
    if facts.awaits_features:
        # Only the next verdicts bring features: the target must not wait. If it verifies, that is a late, empty
        # proposal.
        may_rest = not facts.is_ready and facts.turn is not SessionPhase.VERIFYING
        return Notice.REST_WITHOUT_FEATURES if facts.lacks_features and may_rest else None
    if not facts.has_read_prompt:
        return Task.READ_PROMPT
    if facts.has_lost_tokens or facts.num_behind > MAX_BEHIND_WHEN_READY:
        return Task.READ
    return Notice.ANNOUNCE


# --- all sessions ---------------------------------------------------------------------------------


@attrs.frozen
class Waiting:
    """A session that waits for the drafter."""

    task: Task  # what for
    since: int  # how many jobs had begun when its wait began, not counting those that open and close caches
    num_read: int = 0  # tokens that were read for other sessions since then
    alone: bool = False  # whether no other session may share its draft step


def next_job(waiting: Sequence[Waiting], most: int, chunk_tokens: int) -> tuple[int, ...]:
    """The sessions of the next job, those that waited longest first: caches are opened and closed at once; a step waits
    for `chunk_tokens` that are read at most, unless more than `most` sessions draft, so that short prompts join it.
    """
    order = sorted(range(len(waiting)), key=lambda index: (waiting[index].since, waiting[index].task))
    brief = [index for index in order if waiting[index].task.is_brief]
    drafting = [index for index in order if waiting[index].task is Task.DRAFT]
    overdue = [index for index in drafting if waiting[index].num_read >= chunk_tokens]
    for first in (*brief, *overdue, *order):
        if first not in drafting or waiting[first].alone:
            return (first,)
        return tuple([index for index in drafting if not waiting[index].alone][:most])
    return ()
