"""Texts of a target that is sharded over ranks: those of one process; and saved, where each rank has a part of them."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import rank_programs
from ranks import ranks

from actors.distributed.sharded_model import Announcer, TakenParts
from actors.mlx.cache_kinds import LayerState
from actors.mlx.sequence_state import SequenceState, StateRecorder, recall
from actors.persistence import rank_parts
from protocol.errors import RankError
from protocol.rank_messages import OperationResult, RankMessage, decode, encode


@pytest.mark.parametrize(("size", "cases"), [
    (2, {"llama": ("drafted", "beside cancelled")}),
    pytest.param(2, {"qwen3_5": ("drafted",)}, marks=pytest.mark.slow),
    pytest.param(2, {"deepseek_v3": ("plain",), "qwen3_next": ("drafted",)}, marks=pytest.mark.slow),
    pytest.param(3, {"gpt_oss": ("drafted",)}, marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_give_the_texts_of_one_process(size: int, cases: dict[str, tuple[str, ...]]) -> None:
    """Each family runs drafted, without a drafter, or beside streams that are cancelled."""
    with ranks(rank_programs.equal_texts, size, cases) as (first, *others):
        for name, runs in cases.items():
            for run in runs:
                *which, alone, sharded = first.result()
                assert which == [name, run]
                assert sharded == alone
                assert alone.get("cached", [1]) > [0]
        assert [rank.join() for rank in (first, *others)] == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("qwen3_5", 2), ("qwen3_next", 2), ("gpt_oss", 2)])
def test_a_loaded_text_goes_on_as_before_and_a_misfit_changes_nothing(name: str, size: int, tmp_path: Path):
    with ranks(rank_programs.save_and_go_on, size, name, str(tmp_path)) as (first, *others):
        expected, found, errors = first.result()
        assert [rank.join() for rank in (first, *others)] == [0] * size
    cached = found.pop("cached")
    assert found == expected
    # All but the last token that was given; or some, in caches that can only go back to checkpoints.
    given = len(rank_programs.PROMPTS[3]) + rank_programs.NUM_TOKENS_SAVED
    assert cached["text"] >= (given - 1 if name == "llama" else 1)
    assert cached.get("conversation", 1) > 0
    assert cached["prefix"] >= len(rank_programs.LONG_PROMPT) - 16
    for how, says in {
        "other number of ranks": f"was saved with its target on 9 ranks, and here it is on {size} ranks",
        "no parts": f"its number of parts is 1, and the target is sharded over {size} ranks",
        "part of another model": "on rank 1: its part is that of another rank, or of another model",
        "damaged part": f"on rank {size - 1}: it has ",
        "one machine": f"was saved with its target on {size} ranks, and here it is on one machine; load it on {size}",
    }.items():
        assert says in errors[how]


# --- on the way between ranks ---------------------------------------------------------------------


class Wire:
    """As much of a group as a part of a saved text takes: messages go through bytes, and come out at the other end."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: deque[RankMessage] = deque()
        self.error = None

    def check(self) -> None:
        pass

    def fail(self, reason: str) -> RankError:
        return RankError(reason)

    def send(self, message: RankMessage, *, to: int | None = None, to_target: bool = False) -> None:
        self.sent.append(decode(encode(message)))

    def receive(self, timeout_s: float | None = None) -> tuple[int, Any]:
        if not self.sent:
            raise TimeoutError
        return 1, self.sent.popleft()


def a_part() -> SequenceState:
    keys = mx.arange(24, dtype=mx.float32).reshape(1, 2, 3, 4)
    nothing = mx.zeros((0, 4), mx.bfloat16)
    return SequenceState((7, 8, 9), (LayerState("KVCache", (keys, -keys, 3)), LayerState("ArraysCache", (nothing,))))


def test_a_part_arrives_layer_by_layer_as_it_was():
    wire: Any = Wire()
    recorder = StateRecorder(a_part(), "target", rank=1)
    sent = [rank_parts.send_step(recorder, wire, {"family": "llama"}) for _ in range(3)]
    assert sent == [False, False, True]  # two layers, and the description
    record = rank_parts.receive_record(wire)
    assert json.loads(json.dumps(record.description))["fingerprint"] == {"family": "llama"}
    assert all(".rank-1." in name for name in record.tensors)
    arrived = recall(record, (7, 8, 9))
    for one, other in zip(arrived.layers, a_part().layers, strict=True):
        assert one.kind == other.kind
        assert all(mx.array_equal(*pair) for pair in zip(one.state[:2], other.state[:2], strict=True))


def test_another_message_than_a_part_is_an_error():
    with pytest.raises(RankError, match="rank 1 has sent OperationResult and not its part of a saved text"):
        rank_parts.added(rank_parts.NO_PART, OperationResult(None), 1)


def test_a_rank_that_sends_nothing_of_a_saved_text_is_named():
    wire: Any = Wire()
    with pytest.raises(RankError, match="rank 1, 2 has sent nothing of a saved text for 60 s"):
        rank_parts.received(wire, {2, 1})


def test_ranks_are_told_which_states_they_need_not_keep_any_more():
    wire: Any = Wire()
    announcer = Announcer(wire)
    parts = TakenParts(announcer, 7)
    with announcer.announced("abandon_shared"):
        pass
    del parts
    with announcer.announced("abandon_shared"):
        pass
    named = [[(one.name, one.arguments) for one in message.operations] for message in wire.sent]
    assert named == [[("abandon_shared", ())], [("drop_state", (7,)), ("abandon_shared", ())]]
