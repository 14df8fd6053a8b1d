"""Saved sequences: copies a session's cached sequence from an actor to a file, and gives a saved one to an actor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs

from actors.actor import ModelActor
from actors.mlx.cache_kinds import MisfitError
from actors.mlx.model import MLXModel
from actors.mlx.sequence_state import SequenceRecord, SequenceState, StatefulSequence, StateRecorder, recall
from actors.persistence.fingerprint import Fingerprint, fingerprint
from actors.prefix_cache import PrefixCache
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.worker import Job, JobError
from protocol.errors import OutriderError, RewindError, SessionFileError
from protocol.trace import ActorName as ActorName

logger = logging.getLogger("outrider")

T = TypeVar("T")

SavableModel = MLXModel | TrainedDrafter
"""A model whose sequences can be saved."""

_TRAINED_VERSION = 1  # changes when the state of a trained drafter does: older files then count as another model's


@attrs.frozen
class SavedModelState:
    """A model's part of a saved session."""

    fingerprint: Fingerprint  # of rank 0's part, where the model is sharded
    sequence: SequenceRecord | None  # what the model had cached of the text
    num_ranks: int = 1


@attrs.frozen
class FilledSequence:
    """A sequence with `tokens` from a file, which no session knows of yet."""

    sequence: StatefulSequence
    tokens: tuple[int, ...]
    alongside_model: bool


async def save(actor: ModelActor[Any], text: tuple[int, ...]) -> SavedModelState:
    """An actor's model, and what its prefix cache has of just this text. Cancellation: waits for the running job.

    Raises: RewindError: a cache holds another number of tokens than it should.
    """
    model = _savable(actor)
    prefix_cache = await actor.settled_prefix_cache()
    state = await _run(actor, Job("save", partial(_find, model, actor.name, prefix_cache, text)))
    recorded = None if state is None else await copy(actor, state)
    return SavedModelState(await identify(actor), recorded, model.num_ranks)


async def copy(actor: ModelActor[Any], state: SequenceState) -> SequenceRecord:
    """Copy a state for a file, layer by layer, with other work in between. Cancellation: waits for the running job."""
    recorder = StateRecorder(state, actor.name)
    while (recorded := await _run(actor, Job("save", recorder.step))) is None:
        pass
    return recorded


async def identify(actor: ModelActor[Any]) -> Fingerprint:
    """The fingerprint of an actor's model. Cancellation: waits for the running job."""
    return await _run(actor, Job("save", partial(_fingerprint, _savable(actor))))


async def fill(actor: ModelActor[Any], recorded: SequenceRecord, *, alongside_model: bool) -> FilledSequence:
    """A new sequence of an actor's model with a state from a file, before `keep`. Cancellation: waits for the job.

    Raises: SessionFileError: this is not the state of a sequence of this model.
    """
    with _misfits_named(actor):
        return await _run(actor, Job("open", partial(_fill, _savable(actor), recorded, alongside_model)))


async def discard(actor: ModelActor[Any], filled: FilledSequence) -> None:
    """Close a sequence that is not kept. If the model is sharded, this tells the other ranks."""
    await _run(actor, Job("close", filled.sequence.close))


async def keep(actor: ModelActor[Any], filled: FilledSequence) -> None:
    """Put a sequence into the prefix cache, for the session that will continue its text."""
    await _run(actor, Job("close", partial(_put, await actor.settled_prefix_cache(), filled)))


async def restore(actor: ModelActor[Any], recorded: SequenceRecord, *, alongside_model: bool) -> None:
    """`fill` and `keep` in one job, which leaves nothing behind if nobody waits for its end."""
    prefix_cache = await actor.settled_prefix_cache()

    def call() -> None:
        _put(prefix_cache, _fill(_savable(actor), recorded, alongside_model))

    with _misfits_named(actor):
        await _run(actor, Job("open", call))


@contextmanager
def _misfits_named(actor: ModelActor[Any]) -> Iterator[None]:
    try:
        yield
    except (MisfitError, RewindError, JobError) as error:
        why = error.__cause__ if isinstance(error, JobError) else error
        raise SessionFileError(f"the file's cached tokens do not fit this {actor.name} model: {why}") from why


def _savable(actor: ModelActor[Any]) -> SavableModel:
    if not isinstance(actor.model, SavableModel):
        raise SessionFileError(
            f"the {actor.name} is a {type(actor.model).__name__}; only the caches of MLX models can be saved or loaded"
        )
    return actor.model


def _fingerprint(model: SavableModel) -> Fingerprint:
    if isinstance(model, MLXModel):
        return fingerprint(model.module)
    # Its caches are made from the target's hidden states.
    beside = [_TRAINED_VERSION, model.feature_layers, attrs.asdict(fingerprint(model.target))]
    return fingerprint(model.module, model.arrays, beside)


def _find(
    model: SavableModel, name: ActorName, prefix_cache: PrefixCache, text: tuple[int, ...]
) -> SequenceState | None:
    if (match := prefix_cache.find_longest_match(text)) is None:
        return None
    assert isinstance(match.sequence, StatefulSequence)
    state = match.sequence.take_state(match.tokens)
    if state is not None and match.num_reusable < len(match.tokens):
        state = _cut(model, state, match.num_reusable)
    if state is None:
        logger.warning("the %s has caches of a class that is not known, or lacks features: they are not saved", name)
    return state


def _cut(model: SavableModel, state: SequenceState, length: int) -> SequenceState | None:
    """The first `length` tokens or fewer of a state, as far as caches can go back; the rest is another text's."""
    with closing(model.open_sequence(alongside_model=False)) as sequence:
        sequence.put_state(state)
        tokens = state.tokens[:length]
        tokens = sequence.settle(tokens, tokens)
        if (num_reusable := sequence.reusable_length(len(tokens), len(tokens))) == 0:
            return None
        sequence.reuse(num_reusable)
        return sequence.take_state(tokens[:num_reusable])


def _fill(model: SavableModel, recorded: SequenceRecord, alongside_model: bool) -> FilledSequence:
    state = recall(recorded)
    sequence = model.open_sequence(alongside_model=alongside_model)
    try:
        sequence.put_state(state)
    except (MisfitError, RewindError):
        sequence.close()
        raise
    return FilledSequence(sequence, state.tokens, alongside_model)


def _put(prefix_cache: PrefixCache, filled: FilledSequence) -> None:
    prefix_cache.put(filled.sequence, filled.tokens, filled.tokens, alongside_model=filled.alongside_model)


async def _run(actor: ModelActor[Any], job: Job[T]) -> T:
    """Run a job. Outrider's own errors are raised as they are, and not as a `JobError`."""
    try:
        return await actor.worker.run(job)
    except JobError as error:
        if isinstance(error.__cause__, (OutriderError, MisfitError)):
            raise error.__cause__ from None
        raise
