"""What rank 0 and a drafting rank say to each other in the fields of messages: sessions, guesses and arrays."""

from __future__ import annotations

from typing import Any, cast

import attrs
import mlx.core as mx

from actors.drafters.draft_steps import CannotLookAhead, Drafted, RewoundToCheckpoint, StepOutcome
from actors.tensor import Tensor
from protocol.cached_tokens import FeedPlan
from protocol.draft_rank_messages import Array
from protocol.lookahead_tree import Guess
from protocol.messages import Open
from protocol.settings import Settings

# Tokens that a drafted one is drawn from under the rejection rule. Rank 0 needs the whole distribution, since the
# recovered token comes from what it leaves of the target's.
MAX_DRAWN_FROM = 1024

# Settings that nobody draws by. User code among them runs at rank 0.
_NOT_SENT = {"logits_processors", "sampler", "prediction", "prompt_cache_file", "stop"}


def array_message(array: mx.array) -> Array:
    """An array for a message. To be called on a thread that may evaluate it."""
    tensor = Tensor.of(array)
    return Array(tensor.dtype, tensor.shape, tensor.data)


def array_from(message: Array) -> mx.array:
    """The array of a message, evaluated."""
    return Tensor(message.dtype, message.shape, memoryview(message.data)).array()


# --- sessions -------------------------------------------------------------------------------------


def opened_fields(opened: Open) -> list[Any]:
    """What a drafter needs to know of a session: its number, seed, stop tokens and settings."""
    settings = {
        field.name: getattr(opened.settings, field.name)
        for field in attrs.fields(Settings)
        if field.name not in _NOT_SENT and getattr(opened.settings, field.name) != field.default
    }
    settings["logit_bias"] = list(opened.settings.logit_bias.items())  # keys of JSON's objects are strings
    return [opened.session, opened.seed, sorted(opened.stop_tokens), settings]


def opened_from(fields: list[Any]) -> Open:
    """A session as far as `opened_fields` has said it. Its prompt is another one."""
    session, seed, stop_tokens, settings = fields
    settings = Settings(**settings | {"logit_bias": dict(settings["logit_bias"])})
    return Open(session, (0,), settings, seed, frozenset(stop_tokens))


# --- guesses --------------------------------------------------------------------------------------


def outcome_fields(outcome: StepOutcome) -> list[Any]:
    """The outcome of a draft step. To be called on the drafter's thread."""
    match outcome:
        case Drafted():
            return ["drafted", outcome.can_look_ahead, [_guess_fields(guess) for guess in outcome.guesses]]
        case RewoundToCheckpoint():
            return ["rewound", outcome.length, outcome.wanted]
        case CannotLookAhead():
            return ["stays", outcome.length]


def outcome_from(fields: list[Any], fed: FeedPlan) -> StepOutcome:
    """The outcome that `outcome_fields` has said.

    Args:
        fields: those.
        fed: what the step had to feed.
    """
    match fields:
        case ["drafted", can_look_ahead, guesses]:
            return Drafted(tuple(map(_guess_from, guesses)), can_look_ahead, fed)
        case ["rewound", length, wanted]:
            return RewoundToCheckpoint(length, wanted)
        case _:
            return CannotLookAhead(fields[1])


def _guess_fields(guess: Guess) -> list[Any]:
    probs = None if guess.probs is None else _distribution_fields(guess.probs)
    return [guess.token, guess.confidence, probs, guess.rank, guess.raw, guess.staleness]


def _guess_from(fields: list[Any]) -> Guess:
    token, confidence, probs, rank, raw, staleness = fields
    return Guess(token, confidence, None if probs is None else _distribution_from(*probs), rank, raw, staleness)


def _distribution_fields(probs: mx.array) -> list[Any]:
    """A distribution (V,) with at most `MAX_DRAWN_FROM` entries above zero: its width, their ids, and their values.

    There are no ids if all entries are there.
    """
    if probs.size <= MAX_DRAWN_FROM:
        return [probs.size, None, array_message(probs)]
    ids = mx.argpartition(-probs, kth=MAX_DRAWN_FROM - 1)[:MAX_DRAWN_FROM]
    values = probs[ids]
    mx.eval(ids, values)
    # Those that a filter has left, of which there may be very few.
    left = [i for i, value in enumerate(cast(list[float], values.tolist())) if value > 0.0]
    if 0 < len(left) < MAX_DRAWN_FROM:
        ids, values = ids[mx.array(left)], values[mx.array(left)]
    return [probs.size, array_message(ids.astype(mx.uint32)), array_message(values)]


def _distribution_from(width: int, ids: Array | None, values: Array) -> mx.array:
    given = array_from(values)
    if ids is None:
        return given
    probs = mx.zeros((width,), given.dtype)
    probs[array_from(ids)] = given
    mx.eval(probs)
    return probs
