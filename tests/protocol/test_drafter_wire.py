"""What a runtime and a drafter elsewhere say to each other, as bytes and back."""

from __future__ import annotations

import json
from typing import Any

import attrs
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.acceptance import distribution, likeliest_only
from protocol.copying import Copied
from protocol.drafter_wire import (
    MAX_DRAWN_FROM,
    VERSION,
    CorpusCopy,
    DrafterLoaded,
    DrafterNotLoaded,
    DraftNews,
    LoadDrafter,
    TargetNews,
    decode,
    encode,
)
from protocol.errors import ProtocolError, SettingsError
from protocol.logits_processors import stateless
from protocol.messages import (
    Close,
    Due,
    Features,
    Open,
    Overdue,
    PromptFeatures,
    Proposal,
    Ready,
    Rest,
    Rested,
    Sparse,
    Verdict,
    Withdraw,
)
from protocol.prices import Measurement
from protocol.settings import Settings
from protocol.stop_strings import Stop
from protocol.trace import Instant, Share, Span

ids = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 2**31), max_size=8).map(tuple)
starts = st.integers(1, 2**40)
seconds = st.floats(0, 1e6)
shares = st.floats(0, 1)
measurements = st.lists(
    st.builds(
        Measurement,
        st.sampled_from(["draft", "verify", "gap", "plain", "round", "rate"]),
        ids,
        seconds,
        seconds,
        st.booleans(),
    ),
    max_size=3,
).map(tuple)
spans = st.builds(
    Span,
    st.just("draft"),
    st.sampled_from(["draft", "prefill"]),
    st.none() | ids,
    seconds,
    seconds,
    ids,
    st.none() | ids,
    st.lists(st.builds(Share, ids, ids, ids), max_size=2).map(tuple),
)
instants = st.builds(Instant, st.just("draft"), st.sampled_from(["hit", "rest"]), ids, seconds, ids, ids, tokens)
messages = st.one_of(
    st.builds(Ready, ids),
    st.builds(Withdraw, ids),
    st.builds(Close, ids),
    st.builds(Due, ids, ids, st.booleans()),
    st.builds(Overdue, ids, starts),
    st.builds(Rest, ids, starts),
    st.builds(Rested, ids, ids, starts, tokens),
    tokens.flatmap(lambda drafted: st.builds(Proposal, ids, ids, starts, st.just(drafted))),
    st.builds(
        Verdict,
        ids,
        ids,
        starts,
        st.integers(1, 1),
        st.none() | ids,
        st.booleans(),
        st.booleans(),
        stop=st.none() | st.builds(Stop, st.text(max_size=5), st.integers(1, 9)),
        num_judged=st.none() | st.integers(1, 64),
    ),
    st.builds(TargetNews, measurements, starts),
    st.builds(CorpusCopy, ids, starts, st.lists(st.builds(Copied, ids, ids, ids, ids), max_size=3).map(tuple)),
    st.builds(
        DraftNews,
        measurements,
        st.lists(spans | instants, max_size=3).map(tuple),
        st.lists(st.tuples(ids, ids), max_size=2).map(tuple),
        shares,
        st.none() | shares,
        st.booleans(),
        st.booleans(),
        st.lists(st.text(max_size=5), max_size=2).map(tuple),
    ),
    st.builds(DrafterLoaded, starts, st.none() | starts, st.none() | tokens),
    st.builds(DrafterNotLoaded, st.text(max_size=5), st.text(max_size=5)),
    st.just(LoadDrafter(VERSION, {"path": "a"}, None, 80, {"rewind": "auto"}, {"max_batch": 4}, True)),
)


@given(messages)
@settings(deadline=None, max_examples=50)
def test_a_message_comes_back_from_its_bytes(message: Any) -> None:
    assert decode(encode(message)) == message


@given(messages, st.data())
@settings(deadline=None, max_examples=60)
def test_damaged_bytes_are_refused_or_another_sound_message(message: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        found = decode(bytes(damaged))
    except ProtocolError:
        return
    assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"7",
        b"[]",
        b'["Nothing"]',
        b'["Ready"]',
        b'["Ready", 1, 2]',
        b'["Ready", true]',
        b'["Ready", 1]\nand more',
        b'["Verdict", 0, 0, 1, 0, null, false, false, null, null, null]',
        b'["Proposal", 0, 0, 1, [5], [[80, null, {"__tensor__": ["F32", [80], 320]}]], [], 0]\nshort',
        b"[" * 100_000,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="is no message of a drafter's link"):
        decode(data)


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
    told = Open(4, (1, 2), settings, 2**64 - 1, frozenset({5, 9}), 100, num_resumed=1)
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


def test_a_prompt_without_features_is_told_of() -> None:
    found: Any = decode(encode(PromptFeatures(2, None)))
    assert found.features is None


def test_what_json_has_not_is_an_error_of_whoever_gives_it() -> None:
    with pytest.raises(SettingsError, match="a drafter in another process cannot be given this"):
        encode(LoadDrafter(VERSION, {"path": "a", "tokenizer_config": {"eos": object()}}, None, 80, {}, {}))


def test_a_proposal_is_a_small_message() -> None:
    assert len(encode(Proposal(3, 1000, 5000, (100_000,) * 5, (), (0.5,) * 5))) < 200
