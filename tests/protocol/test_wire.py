"""Messages between processes as bytes: every kind of either codec, nonsense, and frames."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol import drafter_wire, rank_messages
from protocol.errors import ProtocolError
from protocol.messages import Features, Open, Proposal
from protocol.rank_messages import RankOperation, RankOperations, TextEntry
from protocol.session_state import Commit
from protocol.settings import Settings
from protocol.tensor import Tensor
from protocol.wire import MAX_FRAME_BYTES, Frames

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    Any: st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)),
    int: st.integers(1, 2**40),
    float: st.floats(0, 1e6),
    bool: st.booleans(),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=20),
    Tensor: st.binary(max_size=9).map(lambda data: Tensor("U8", (1, len(data)), memoryview(data))),
    Settings: st.just(Settings(temperature=0.5)),
    Features: st.nothing(),
    drafter_wire.Version: st.just(drafter_wire.VERSION),
}
# Fields that must go with others, and those that stay here.
LEFT_OUT = {Open: ("drafted", "num_scored", "only_reads"), Proposal: ("probs", "reach", "num_stale", "drafters")}
STAY = ("likelihoods", "commit")


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as fields are annotated with it."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint in SIMPLE:
        return SIMPLE[hint]
    if origin in (Union, UnionType):
        return st.one_of(st.none() if kind is type(None) else values(kind) for kind in inner)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), values(inner[1]), max_size=2)
    if origin in (tuple, frozenset):
        return st.lists(values(inner[0]), max_size=3).map(origin)
    hints, left_out = get_type_hints(hint, localns={"Commit": Commit}), (*STAY, *LEFT_OUT.get(hint, ()))
    fields = st.fixed_dictionaries(
        {field.name: values(hints[field.name]) for field in attrs.fields(hint) if field.name not in left_out}
    )

    def made(values: dict[str, Any]) -> Any:
        try:
            return hint(**values)
        except ValueError:  # such as a verdict that accepts more tokens than it judges
            reject()

    return fields.map(made)


def messages(kinds: Any, codec: Any) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(get_args(kinds)).flatmap(values), st.just(codec))


sent = messages(drafter_wire.LinkMessage, drafter_wire) | messages(rank_messages.RankMessage, rank_messages)


@given(sent)
@settings(max_examples=100)
def test_a_message_comes_back_from_its_bytes(sent: Any) -> None:
    message, codec = sent
    assert codec.decode(codec.encode(message)) == message


@given(sent, st.data())
@settings(max_examples=100)
def test_damaged_bytes_are_refused_or_another_sound_message(sent: Any, data: st.DataObject) -> None:
    message, codec = sent
    damaged = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        found = codec.decode(bytes(damaged))
    except ProtocolError:
        return
    assert codec.decode(codec.encode(found)) == found


@sweep(
    "data",
    [
        b"",
        b"\xff",
        b"7",
        b"[]",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"__tensor__": 1}',
        b'["Nothing"]',
        b'["Ready"]',
        b'["Ready", 1, 2]',
        b'["Ready", true]',
        b'["Ready", -1]',
        b'["Ready", 1]\nand more',
        b'["Verdict", 0, 0, 1, 0, null, false, false, null, null, null]',
        b'["Proposal", 0, 0, 1, [5], [[80, null, {"__tensor__": ["F32", [80], 320]}]], [], 0]\nshort',
        b'["DrafterLoaded", 80, null, 5]',
        b'["TargetNews", [["verify", 1, -1.0, 0.0, false]], 1]',
        b'["TargetNews", [["lunch", 1, 1.0, 0.0, false]], 1]',
        b'["Beat", 1]',
        b'["Beat", null, 0.0]\ntoo long',
        b'["Hello", "x", 2, {}]',
        b'["Hello", 1, 2, 5]',
        b'["Hello", 1, 2, {"mlx": 3}]',
        b'["RankOperations", 1]',
        b'["ForDrafter", 3]',
        b'["ForDrafter", {"__tensor__": ["U8", [9], 9]}]\nshort',
        b'["Recorded", {"a": {"__tensor__": ["F32", [2], 4]}}, null]\n1234',
        b'["Recorded", {"a": {"__tensor__": ["U8", [-1], -1]}}, null]',
        b'["Recorded", {"a": 3}, null]',
        b'["Describe", 4]',
        b'["Description", ["1"]]',
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    for codec in (drafter_wire, rank_messages):
        with pytest.raises(ProtocolError, match="is no message of"):
            codec.decode(data)


def test_a_short_message_comes_between_the_parts_of_a_long_one() -> None:
    frames, long = Frames(), bytes(range(256)) * (MAX_FRAME_BYTES // 100)
    first, *others = Frames.framed(long)
    for frame in (first, *Frames.framed(b"short"), *others):
        frames.add(frame[:3])
        frames.add(frame[3:])
    assert [frames.take(), frames.take(), frames.take()] == [b"short", long, None]


def test_a_long_message_is_bounded_though_its_parts_are_short() -> None:
    frames = Frames()
    frames.add(b"".join(Frames.framed(bytes(3 * MAX_FRAME_BYTES))))
    with pytest.raises(ProtocolError, match=f"a message of {2 * MAX_FRAME_BYTES} bytes was announced"):
        frames.take(2 * MAX_FRAME_BYTES - 1)


def test_what_is_sent_often_is_small() -> None:
    """Less than a network packet."""
    prepare = RankOperation("prepare", 12, (5, 1000))
    feed = RankOperation("feed_together", None, ([(12, (100_000,) * 5, 5)],), (TextEntry(12, 1000, 2**32 - 1),))
    assert len(rank_messages.encode(RankOperations((prepare, feed)))) < 200
    assert len(drafter_wire.encode(Proposal(3, 1000, 5000, (100_000,) * 5, (), (0.5,) * 5))) < 200
