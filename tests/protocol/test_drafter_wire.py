"""What a runtime and a drafter elsewhere say to each other, as bytes and back."""

from __future__ import annotations

import json
from typing import Any

import attrs
import mlx.core as mx
import pytest

from protocol.acceptance import distribution, likeliest_only
from protocol.drafter_wire import MAX_DRAWN_FROM, VERSION, LoadDrafter, decode, encode
from protocol.errors import ProtocolError, SettingsError
from protocol.logits_processors import stateless
from protocol.messages import Features, Open, PromptFeatures, Proposal, Sparse, Verdict
from protocol.settings import Settings


def test_another_version_is_refused_by_name() -> None:
    line = json.loads(encode(LoadDrafter(VERSION, None, None, 80, {}, {})))
    line[1] = 99
    with pytest.raises(ProtocolError, match=rf"version 99 .* this one version {VERSION}; install the same release"):
        decode(json.dumps([*line, "a field of the future"]).encode())


def test_a_session_is_told_with_all_that_drafting_depends_on() -> None:
    settings = Settings(
        temperature=0.7,
        draft_temperature=0.4,
        top_k=5,
        seed=2**63,
        logit_bias={3: -float("inf"), 70: 1.5},
        repetition_penalty=1.2,
        repetition_context_size=None,
        xtc_special_tokens=(1, 2),
        acceptance="rejection",
        prediction=(4, 5),
        stop=("end",),
        logits_processors=(stateless(lambda _, logits: logits),),
    )
    told = Open(4, (1, 2), settings, 2**64 - 1, frozenset({5, 9}), 100)
    found = decode(encode(told))
    assert found == attrs.evolve(told, settings=attrs.evolve(settings, stop=(), logits_processors=()))


@pytest.mark.parametrize("width", [80, MAX_DRAWN_FROM + 1])
@pytest.mark.parametrize("num_left", [1, 20])
def test_a_distribution_arrives_as_it_was(width: int, num_left: int) -> None:
    logits = mx.random.normal((1, width), key=mx.random.key(width + num_left))
    probs = distribution(likeliest_only(logits, num_left)[0][0], 1.0)
    likely = mx.argsort(-probs)[:40].astype(mx.uint32)
    values = probs[likely]
    mx.eval(probs, likely, values)
    data = encode(Proposal(0, 0, 1, (3, 4, 5), (probs, Sparse(width, likely, values), None)))
    found = decode(data)
    assert isinstance(found, Proposal)
    whole, sparse, nothing = found.probs
    assert isinstance(whole, mx.array)
    assert isinstance(sparse, Sparse)
    assert mx.array_equal(whole, probs)
    dense = mx.zeros((sparse.size,))
    dense[sparse.tokens] = sparse.values
    assert mx.array_equal(dense, probs)
    assert sparse.tokens.size == num_left  # what a filter has left, and no more
    assert nothing is None


@pytest.mark.parametrize(
    "probs",
    [
        mx.array([0.5, 0.2]),
        mx.array([1.5, -0.5]),
        mx.array([float("nan"), 1.0]),
        Sparse(5, mx.array([7], mx.uint32), mx.array([1.0])),
    ],
)
def test_what_is_no_distribution_is_refused(probs: Any) -> None:
    with pytest.raises(ProtocolError, match="distribution"):
        decode(encode(Proposal(0, 0, 1, (1,), (probs,))))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_features_arrive_as_they_were(dtype: Any) -> None:
    values = mx.random.normal((3, 5), key=mx.random.key(1)).astype(dtype)
    for message in (PromptFeatures(2, Features(4, values)), Verdict(2, 0, 7, 0, 1, features=Features(4, values))):
        found: Any = decode(encode(message))
        assert found.features.start == 4
        assert found.features.values.dtype == dtype
        assert mx.array_equal(found.features.values, values)


def test_what_json_has_not_is_an_error_of_whoever_gives_it() -> None:
    with pytest.raises(SettingsError, match="a drafter in another process cannot be given this"):
        encode(LoadDrafter(VERSION, {"path": "a", "tokenizer_config": {"eos": object()}}, None, 80, {}, {}))
