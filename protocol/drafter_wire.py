"""What a runtime and a drafter in another process say to each other, as bytes and back.

The messages of `protocol.messages` travel as they are, and beside them those of the link:

                   <──  DraftNews, the first message
    LoadDrafter    ──>
                   <──  DrafterLoaded, or DrafterNotLoaded
    TargetNews     ──>  after a message of a session, and as a heartbeat
                   <──  DraftNews, likewise

Settings travel without user code: the drafter drafts without it, which changes no text, as every rule is exact for any
draft. Clocks differ, so moments travel as seconds that have passed since. Anything else is a `ProtocolError`, after
which the link is not used.
"""

from __future__ import annotations

from array import array
from typing import Any, NewType, cast, get_args

import attrs
import mlx.core as mx

from protocol.errors import ProtocolError, SettingsError
from protocol.messages import Distribution, Features, Message, Sparse
from protocol.prices import Measurement
from protocol.session_state import Commit
from protocol.settings import Settings
from protocol.tensor import Tensor
from protocol.trace import Event
from protocol.wire import Codec, Form, whole

Version = NewType("Version", int)  # both ends must speak the same version
VERSION = Version(10)
# How many tokens a drafted one is drawn from under the rejection rule: the residual needs all of the distribution.
MAX_DRAWN_FROM = 1024
MAX_VOCAB_SIZE = 2**24  # a vocabulary of more tokens is nonsense
MAX_MISSING = 1e-2  # by how much the sum of a distribution may differ from 1

# Settings that no drafter needs, user code among them; and attributes of messages that it does not look at.
_SETTINGS_NOT_SENT = {"logits_processors", "sampler", "prompt_cache_file", "stop", "thinking_budget"}
_NOT_SENT = {"drafted", "num_scored", "only_reads", "likelihoods", "commit"}


@attrs.frozen
class LoadDrafter:
    """The drafter to load at the other end."""

    version: Version
    target: dict[str, Any] | None  # what to load, as by `runtime.remote.draft_process`; None where the other end knows
    draft: dict[str, Any] | None
    vocab_size: int  # width of the target's logits
    cache_options: dict[str, Any]  # of the drafter's caches, by name
    options: dict[str, Any]  # of `open`, those that concern the drafter
    traces: bool = False  # whether decisions are wanted for a trace


@attrs.frozen
class DrafterLoaded:
    """The drafter is loaded and timed; see `Model` for its attributes."""

    vocab_size: int
    context_length: int | None
    feature_layers: tuple[int, ...] | None  # layers of the target whose inputs the drafter reads; None if it reads none


@attrs.frozen
class DrafterNotLoaded:
    """The drafter cannot be loaded: `kind` is the name of a class of `protocol.errors`."""

    kind: str
    reason: str


@attrs.frozen
class TargetNews:
    """News for the drafter's end, beside messages."""

    measured: tuple[Measurement, ...] = ()  # at the target since the last news; `ended_s` is how many seconds ago
    num_texts: int = 1  # see `Prices`


@attrs.frozen
class DraftNews:
    """News for the runtime's end, beside messages. For acceptance and what follows it, see `Prices.take_drafter`."""

    measured: tuple[Measurement, ...] = ()  # as in `TargetNews`, of the drafter
    events: tuple[Event, ...] = ()  # of the drafter since the last news; moments are how many seconds ago
    counts: tuple[tuple[int, ...], ...] = ()  # (session, growth of its `COUNTED` since the last news), of some
    acceptance: float = 0.0
    hit_rate: float | None = None
    drafts_together: bool = False
    is_alive: bool = True  # see `Actor.is_alive`
    warnings: tuple[str, ...] = ()  # for the log


# What a drafter counts of a session.
COUNTED = ("draft_failures", "lookahead_hits", "lookahead_misses", "draft_replayed_tokens", "stale_proposals")

LinkMessage = Message | LoadDrafter | DrafterLoaded | DrafterNotLoaded | TargetNews | DraftNews


def _read_settings(values: Any) -> Settings:
    bias = {whole(token): value for token, value in values["logit_bias"]}
    return Settings(**values | {"logit_bias": bias})


def _write_settings(settings: Settings) -> dict[str, Any]:
    values = {
        field.name: getattr(settings, field.name)
        for field in attrs.fields(Settings)
        if field.name not in _SETTINGS_NOT_SENT and getattr(settings, field.name) != field.default
    }
    # Keys of JSON's objects are strings.
    return values | {"logit_bias": list(settings.logit_bias.items())}


def _read_features(value: Any) -> Features:
    start, tensor = value
    if len(tensor.shape) != 2 or not tensor.dtype.endswith(("F16", "F32")):
        raise ValueError(f"features have two dimensions, got {tensor.dtype}{tensor.shape}")
    return Features(whole(start), tensor.array())


def _array(values: mx.array, code: str) -> array[Any]:
    # It is evaluated and no view of another array, so its bytes can be read in any thread.
    return array(code, bytes(cast(Any, memoryview(cast(Any, values)))))


def _tensor(values: array[Any]) -> Tensor:
    return Tensor({"I": "U32", "f": "F32"}[values.typecode], (len(values),), memoryview(values).cast("B"))


def _write_distribution(probs: Distribution) -> list[Any]:
    if not isinstance(probs, Sparse):
        return [probs.size, None, _tensor(_array(probs, "f"))]
    tokens, values = _array(probs.tokens, "I"), _array(probs.values, "f")
    left = [i for i, prob in enumerate(values) if prob > 0.0]  # few, if there is a filter
    tokens, values = (array(each.typecode, map(each.__getitem__, left)) for each in (tokens, values))
    return [probs.size, _tensor(tokens), _tensor(values)]


def _read_distribution(value: Any) -> Distribution:
    size, tokens, values = value
    given = array("f", bytes(values.data))
    if values.dtype != "F32" or not abs(sum(given) - 1.0) <= MAX_MISSING or min(given) < 0.0:
        raise ValueError("the probabilities of a distribution are no such, or do not add up to 1")
    if tokens is None:
        return mx.array(cast(Any, memoryview(given)))
    ids = array("I", bytes(tokens.data))
    if tokens.dtype != "U32" or len(ids) != len(given) or max(ids) >= whole(size, 1, MAX_VOCAB_SIZE):
        raise ValueError(f"a distribution over {size} tokens has others, or not as many as probabilities")
    return Sparse(size, mx.array(cast(Any, memoryview(ids))), mx.array(cast(Any, memoryview(given))))


def _read_version(version: Any) -> Version:
    if version != VERSION:
        raise ProtocolError(
            f"the other end of a drafter's link speaks version {version!r:.20} of its protocol, and this one version "
            f"{VERSION}; install the same release of Outrider on both"
        )
    return VERSION


_CODEC: Codec[LinkMessage] = Codec(
    get_args(LinkMessage),
    "of a drafter's link",
    {
        Version: Form(_read_version),
        Settings: Form(_read_settings, _write_settings),
        Features: Form(_read_features, lambda features: [features.start, Tensor.of(features.values)]),
        Distribution: Form(_read_distribution, _write_distribution),
    },
    _NOT_SENT,
    {"Commit": Commit},
)


def encode(message: LinkMessage) -> bytes:
    """A message as bytes, on a thread that may evaluate its features. Raises: SettingsError: JSON lacks a value."""
    try:
        return _CODEC.encode(message)
    except TypeError as error:
        raise SettingsError(f"a drafter in another process cannot be given this: {error}") from error


decode = _CODEC.decode
