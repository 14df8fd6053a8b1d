"""A model's session in a saved session: its fingerprint, and what it has cached of the text."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import trio

from actors.actor import ActorSession, ModelActor
from actors.drafters.draft_session import DraftSession
from actors.mlx.cache_state import MisfitError
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import SequenceRecord, SequenceState, recall, record
from actors.persistence.fingerprint import Fingerprint, fingerprint
from actors.prefix_cache import PrefixCache, common_length, pack
from actors.workers.worker import Job, JobError, Step, Steps
from protocol.errors import OutriderError, RewindError, SessionFileError
from protocol.trace import Actor as ActorName

logger = logging.getLogger("outrider")

T = TypeVar("T")

# Looks at a line that is at work, before it is given up to know which tokens it holds.
_MOST_TRIES = 3


@attrs.frozen
class SavedModelState:
    """What a file has of a model.

    Attributes:
        fingerprint: which model it was.
        line: what it had cached; None for nothing.
    """

    fingerprint: Fingerprint
    sequence: SequenceRecord | None


@attrs.frozen
class FilledSequence:
    """A line that holds what a file had, and that no session knows of yet."""

    sequence: MLXSequence
    tokens: tuple[int, ...]
    beside_another: bool


@attrs.frozen
class _Snapshot:
    """What a line held between two jobs.

    Attributes:
        state: of its tokens, only the number; None for nothing.
        tokens: that it held, or None where its session may not know yet.
        busy_seconds: of the worker, then.
    """

    state: SequenceState | None
    tokens: tuple[int, ...] | None
    busy_seconds: float


def _look(
    actor: ModelActor[Any],
    session: ActorSession,
    hear: Callable[[_Snapshot], None],
    _job: Job[Any],
    state: SequenceState | None,
    _goes_on: bool,
) -> None:
    # Of draft steps the session has heard by now, as each was done.
    tokens = (
        session.cached_tokens.tokens
        if isinstance(session, DraftSession) and session.running_steps is not None
        else None
    )
    hear(_Snapshot(state, tokens, actor.worker.busy_seconds))


async def take(actor: ModelActor[Any], session_id: int) -> SequenceState | None:
    """What a session that is under way has in an actor's model, between two of its jobs; the session goes on.

    Returns: None where it takes no session, or has nothing that another text could begin with.

    Cancellation: waits for the job that is running.

    Raises: RewindError: a cache does not hold what it should.
    """
    for _ in range(_MOST_TRIES):
        session = actor.session_of(session_id)
        if session is None or session.is_broken or not isinstance(session.sequence, MLXSequence):
            return None
        heard: list[_Snapshot] = []
        look = partial(_look, actor, session, heard.append)
        await _as_own_errors(actor.worker.run_steps(Steps("save", partial(_take, session.sequence), look)))
        (seen,) = heard
        if seen.state is None:
            return None
        tokens = seen.tokens
        if tokens is None:
            # The session's task may not have heard yet of its own job before this one. No other may have ended since.
            await trio.lowlevel.checkpoint()
            tokens = session.cached_tokens.tokens if actor.worker.busy_seconds == seen.busy_seconds else ()
        if len(tokens) == len(seen.state.tokens):
            return attrs.evolve(seen.state, tokens=tokens)
    return None


async def let_pass(actor: ModelActor[Any]) -> None:
    """Wait until the jobs that wait for an actor's worker are done, and heard of.

    Cancellation: waits for the job that is running.
    """
    await _run(actor, Job("save", lambda: None))
    await trio.lowlevel.checkpoint()


async def save(actor: ModelActor[Any], text: tuple[int, ...], taken: SequenceState | None = None) -> SavedModelState:
    """A model and what it has cached of a text, as they are now.

    Args:
        actor: whose model.
        text: what else was cached, if anything is, is not saved.
        taken: of the session that is at work on the text; None for what is kept of texts that are over.

    Cancellation: waits for the job that is running.

    Raises: RewindError: a cache does not hold what it should.
    """
    if taken is not None:
        return await _run(actor, Job("save", partial(_save_taken, _real(actor), actor.name, taken, text)))
    kept = await actor.settled_prefix_cache()
    return await _run(actor, Job("save", partial(_save, _real(actor), actor.name, kept, text)))


async def identify(actor: ModelActor[Any]) -> Fingerprint:
    """Which model an actor has. Cancellation: waits for the job that is running."""
    return await _run(actor, Job("load", partial(fingerprint, _real(actor).module)))


async def fill(actor: ModelActor[Any], recorded: SequenceRecord, *, beside_another: bool) -> FilledSequence:
    """A line of an actor's model with what a file has. No session knows of it before it is kept.

    Cancellation: waits for the job that is running.

    Raises: SessionFileError: the file has something else than such a line.
    """
    try:
        return await _run(actor, Job("load", partial(_fill, _real(actor), recorded, beside_another)))
    except (MisfitError, RewindError, JobError) as error:
        why = error.__cause__ if isinstance(error, JobError) else error
        raise SessionFileError(f"what the file has cached of the {actor.name} is none of this model's: {why}") from why


async def keep(actor: ModelActor[Any], filled: FilledSequence) -> None:
    """Keep a line for the session that will ask for its text."""
    kept = await actor.settled_prefix_cache()
    call = partial(kept.put, filled.sequence, filled.tokens, filled.tokens, beside_another=filled.beside_another)
    await _run(actor, Job("load", call))


def _real(actor: ModelActor[Any]) -> MLXModel:
    if not isinstance(actor.model, MLXModel):
        raise SessionFileError(f"the {actor.name} is no model of MLX, and nothing of another can be saved or loaded")
    return actor.model


# --- on the model's thread ------------------------------------------------------------------------


def _save(model: MLXModel, name: ActorName, kept: PrefixCache, text: tuple[int, ...]) -> SavedModelState:
    identity = fingerprint(model.module)
    if (found := kept.find_longest_match(text)) is None:
        return SavedModelState(identity, None)
    assert isinstance(found.sequence, MLXSequence)
    state = found.sequence.take_state(found.tokens)
    if state is not None and found.num_reusable < len(found.tokens):
        state = _cut(model, state, found.num_reusable)
    if state is None:
        logger.warning("the %s has caches of a class that nothing is known of: they are not saved", name)
        return SavedModelState(identity, None)
    return SavedModelState(identity, record(state, name))


def _take(sequence: MLXSequence) -> Step[SequenceState | None]:
    """What a line holds, if it is of use to another text; of its tokens, only the number."""
    if sequence.reusable_length(sequence.length, sequence.length) == 0:
        return Step(None)
    return Step(sequence.take_state((0,) * sequence.length))


def _save_taken(model: MLXModel, name: ActorName, taken: SequenceState, text: tuple[int, ...]) -> SavedModelState:
    identity = fingerprint(model.module)
    # The last token is to be read in any case, since its logits are wanted.
    common = common_length(pack(taken.tokens), pack(text[:-1]))
    state = taken if common == len(taken.tokens) else _cut(model, taken, common)
    return SavedModelState(identity, None if state is None else record(state, name))


def _cut(model: MLXModel, state: SequenceState, length: int) -> SequenceState | None:
    """A state without what comes after some length, or after the nearest below it that can be gone back to, if any.

    That is of another text, and no business of whoever gets the file.
    """
    copy = model.open_sequence(beside_another=False)
    copy.put_state(state)
    if (reach := copy.reusable_length(length, length)) == 0:
        return None
    copy.reuse(reach)
    return copy.take_state(state.tokens[:reach])


def _fill(model: MLXModel, recorded: SequenceRecord, beside_another: bool) -> FilledSequence:
    state = recall(recorded)
    sequence = model.open_sequence(beside_another=beside_another)
    sequence.put_state(state)
    return FilledSequence(sequence, state.tokens, beside_another)


async def _run(actor: ModelActor[Any], job: Job[T]) -> T:
    return await _as_own_errors(actor.worker.run(job))


async def _as_own_errors(work: Awaitable[T]) -> T:
    try:
        return await work
    except JobError as error:
        if isinstance(error.__cause__, (OutriderError, MisfitError)):
            raise error.__cause__ from None
        raise
