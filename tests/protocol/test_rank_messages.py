"""Messages between ranks, as bytes and back."""

from __future__ import annotations

import pytest
from sweeps import sweep

from protocol.errors import ProtocolError
from protocol.rank_messages import (
    Answer,
    Beat,
    Broken,
    CloseTarget,
    ConnectRanks,
    ForDrafter,
    Hello,
    Loaded,
    Measure,
    Measured,
    OpenTarget,
    Operation,
    Operations,
    Present,
    Recorded,
    Welcome,
    decode,
    encode,
)
from protocol.tensor import Tensor
from protocol.text_ledger import TextEntry


@sweep(
    "message",
    [
        Hello(1, 3, {"mlx": "0.32.4"}),
        Welcome(),
        Beat(),
        Beat("feed_together", 61.5),
        OpenTarget({"rewind": "auto", "kv_bits": None}),
        OpenTarget({}, 2),
        Present(),
        ConnectRanks(),
        Loaded({"config.json": "1f"}),
        Operations((Operation("rewind", 3, (17,)), Operation("feed", 3, (5, 1), (TextEntry(3, 17, 123456),)))),
        Recorded(
            {"one": Tensor("F32", (1, 2), memoryview(b"\n\x00[]\n12 ")), "none": Tensor("U8", (0,), memoryview(b""))}
        ),
        Recorded({}, {"layers": [{"kind": "KVCache", "state": [{"tensor": "target.rank-1.0"}, 3]}]}),
        Answer(None),
        Answer("it has\ntwo lines"),
        CloseTarget(),
        Measure("link", (0, 1, 4096, 6)),
        Measured((0.5, 0.25)),
        Measured(description={"host": "here"}),
        Broken("rank 1 hangs"),
        ForDrafter(b"\n[]\n{}\0"),
        ForDrafter(b""),
    ],
)
def test_a_message_comes_back_from_its_bytes(message):
    assert decode(encode(message)) == message


@sweep(
    "data",
    [
        b"[]",
        b'["Nothing"]',
        b'["Beat", 1]',
        b'["Hello", 1]',
        b'["Hello","x",2,{}]',
        b'["Hello",1,2,5]',
        b'["Hello",1,2,{"mlx":3}]',
        b'["Operations", 1]',
        b'{"__tensor__": 1}',
        b'["ForDrafter", {"__tensor__": ["U8", [9], 9]}]\nshort',
        b'["ForDrafter", 3]',
        b'["Beat", null, 0.0]\ntoo long',
        b'["Recorded",{"a":{"__tensor__":["F32",[2],4]}},null]\n1234',
        b'["Recorded",{"a":{"__tensor__":["U8",[-1],-1]}},null]',
        b'["Recorded",{"a":3},null]',
        b'["Measure", "sum", 4]',
        b'["Measured", ["1"], {}]',
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(ProtocolError, match="is no message of another rank"):
        decode(data)


def test_a_verify_pass_is_a_small_message():
    """Announcing a pass costs less than a network packet."""
    prepare = Operation("prepare", 12, (5, 1000))
    feed = Operation("feed_together", None, ([(12, (100_000,) * 5, 5)],), (TextEntry(12, 1000, 2**32 - 1),))
    assert len(encode(Operations((prepare, feed)))) < 200
