"""The target at the other ranks: repeats the operations that rank 0 announces."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from actors.distributed.exchange import time_exchange
from actors.distributed.leading_model import shared_tokens
from actors.distributed.rank_group import RankGroup
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.model import Feed
from protocol.errors import RankError
from protocol.rank_messages import Operation
from protocol.text_ledger import TextLedger


class FollowingModel:
    """A rank's part of the target, and its sequences by their numbers. To be used on the model's thread."""

    def __init__(self, model: MLXModel, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._sequences: dict[int, MLXSequence] = {}
        self._ledger = TextLedger()

    def run(self, operation: Operation) -> None:
        """Repeat an operation. Logits are not computed: only rank 0 chooses tokens.

        Raises:
            RankError: this rank is out of step with rank 0.
            Whatever the model raises.
        """
        for text in operation.texts:
            if (own := self._ledger.entry(text[0])) != text or self._sequences[text[0]].length != text[1]:
                raise RankError(
                    f"rank {self._group.rank} is out of step before {operation.name}: its sequence {text[0]} holds "
                    f"{self._sequences[text[0]].length} tokens (checksum {own[2]:08x}), rank 0's {text[1]} "
                    f"(checksum {text[2]:08x})"
                )
        if operation.sequence is None:
            self._run_model(operation.name, operation.arguments)
        else:
            self._run_sequence(operation.name, operation.sequence, operation.arguments)

    def _run_model(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name, arguments:
            case "feed_together", (fed,):
                self._model.feed_together(
                    [Feed(self._sequences[number], tuple(tokens), num_logits) for number, tokens, num_logits in fed]
                )
                for number, tokens, _ in fed:
                    self._ledger.feed(number, tokens)
            case "feed_ahead", (numbers,):
                shared = shared_tokens(mx.zeros((len(numbers),), mx.int32), self._group)
                self._model.feed_ahead({self._sequences[n]: shared[i : i + 1] for i, n in enumerate(numbers)})
            case "abandon_shared", ():
                self._model.abandon_shared()
            case "sharing_obstacle", ():
                self._model.sharing_obstacle()
            case "anatomy", ():
                self._model.anatomy()
            case "time_exchange", (width, repeats):
                time_exchange(self._model.open_sequence(beside_another=False), width, repeats)
            case "agree_on_sharing", (obstacle,):
                if (own := self._model.sharing_obstacle()) != obstacle:
                    raise RankError(
                        f"rank {self._group.rank} finds about texts sharing a pass: {own or 'they can'}; rank 0 finds: "
                        f"{obstacle or 'they can'}"
                    )
            case _:
                raise RankError(f"rank {self._group.rank} does not know the operation {name}{arguments}")

    def _run_sequence(self, name: str, number: int, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            self._sequences[number] = sequence = self._model.open_sequence(beside_another=False)
            sequence.record_features(False)
            self._ledger.open(number)
            return
        sequence = self._sequences[number]
        match name, arguments:
            case "feed", (tokens, num_logits):
                sequence.feed(tuple(tokens), num_logits)
                self._ledger.feed(number, tokens)
            case "feed_lazy", ():
                token = shared_tokens(mx.zeros((1,), mx.int32), self._group)
                sequence.feed_lazy(token)
                self._ledger.feed_later(number, token)
            case "prepare", (num_tokens, settled):
                sequence.prepare(num_tokens, settled)
            case "rewind", (length,):
                self._ledger.cut(number, sequence.rewind(length))
            case "leave_batch", ():
                sequence.leave_batch()
            case "forget", ():
                sequence.forget()
                self._ledger.cut(number, 0)
            case "close", ():
                sequence.close()
                del self._sequences[number]
                self._ledger.close(number)
            case "add_prefix_checkpoint", ():
                sequence.add_prefix_checkpoint()
            case "reuse", (length,):
                sequence.reuse(length)
                self._ledger.cut(number, length)
            case _:
                raise RankError(f"rank {self._group.rank} does not know the operation {name}{arguments}")
