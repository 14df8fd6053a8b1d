"""A model's part in a saved session: its fingerprint, and what it has cached of the text."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeVar

import attrs

from actors.actor import ModelActor
from actors.fingerprint import Fingerprint, fingerprint
from actors.kept_lines import KeptLines
from actors.line_state import LineRecord, recall, record
from actors.mlx_cache_state import MisfitError
from actors.mlx_line import MLXLine
from actors.mlx_model import MLXModel
from actors.worker import Job, JobError
from protocol.errors import OutriderError, RewindError, SessionFileError
from protocol.trace import Actor as ActorName

logger = logging.getLogger("outrider")

T = TypeVar("T")


@attrs.frozen
class SavedModel:
    """What a file has of a model.

    Attributes:
        fingerprint: which model it was.
        line: what it had cached; None for nothing.
    """

    fingerprint: Fingerprint
    line: LineRecord | None


@attrs.frozen
class FilledLine:
    """A line that holds what a file had, and that no session knows of yet."""

    line: MLXLine
    tokens: tuple[int, ...]
    beside_another: bool


async def save(actor: ModelActor[Any], text: tuple[int, ...]) -> SavedModel:
    """A model and what it has cached of a text, as they are now.

    Cancellation: waits for the job that is running.

    Raises: RewindError: a cache does not hold what it should.
    """
    kept = await actor.settled()
    return await _run(actor, Job("save", partial(_save, _real(actor), actor.name, kept, text)))


async def identify(actor: ModelActor[Any]) -> Fingerprint:
    """Which model an actor has. Cancellation: waits for the job that is running."""
    return await _run(actor, Job("load", partial(fingerprint, _real(actor).module)))


async def fill(actor: ModelActor[Any], recorded: LineRecord, *, beside_another: bool) -> FilledLine:
    """A line of an actor's model with what a file has. No session knows of it before it is kept.

    Cancellation: waits for the job that is running.

    Raises: SessionFileError: the file has something else than such a line.
    """
    try:
        return await _run(actor, Job("load", partial(_fill, _real(actor), recorded, beside_another)))
    except (MisfitError, RewindError, JobError) as error:
        why = error.__cause__ if isinstance(error, JobError) else error
        raise SessionFileError(f"what the file has cached of the {actor.name} is none of this model's: {why}") from why


async def keep(actor: ModelActor[Any], filled: FilledLine) -> None:
    """Keep a line for the session that will ask for its text."""
    kept = await actor.settled()
    call = partial(kept.put_away, filled.line, filled.tokens, filled.tokens, beside_another=filled.beside_another)
    await _run(actor, Job("load", call))


def _real(actor: ModelActor[Any]) -> MLXModel:
    if not isinstance(actor.model, MLXModel):
        raise SessionFileError(f"the {actor.name} is no model of MLX, and nothing of another can be saved or loaded")
    return actor.model


# --- on the model's thread ------------------------------------------------------------------------


def _save(model: MLXModel, name: ActorName, kept: KeptLines, text: tuple[int, ...]) -> SavedModel:
    identity = fingerprint(model.module)
    if (found := kept.nearest(text)) is None:
        return SavedModel(identity, None)
    assert isinstance(found.line, MLXLine)
    state = found.line.take_state(found.tokens)
    if state is not None and found.reach < len(found.tokens):
        # What comes after it is of another text, and no business of whoever gets the file.
        copy = model.open_line(beside_another=False)
        copy.put_state(state)
        copy.resume(found.reach)
        state = copy.take_state(found.tokens[: found.reach])
    if state is None:
        logger.warning("the %s has caches of a class that nothing is known of: they are not saved", name)
        return SavedModel(identity, None)
    return SavedModel(identity, record(state, name))


def _fill(model: MLXModel, recorded: LineRecord, beside_another: bool) -> FilledLine:
    state = recall(recorded)
    line = model.open_line(beside_another=beside_another)
    line.put_state(state)
    return FilledLine(line, state.tokens, beside_another)


async def _run(actor: ModelActor[Any], job: Job[T]) -> T:
    try:
        return await actor.worker.run(job)
    except JobError as error:
        if isinstance(error.__cause__, (OutriderError, MisfitError)):
            raise error.__cause__ from None
        raise
