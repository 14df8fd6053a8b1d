"""The target at the other ranks: repeats the operations that rank 0 announces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import attrs
import mlx.core as mx

from actors.distributed.exchange import time_exchange
from actors.distributed.leading_model import shared_tokens
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharding import never_computed
from actors.mlx.cache_kinds import MisfitError
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import Recorder, SequenceState, recall
from actors.model import Feed
from actors.persistence.fingerprint import fingerprint
from actors.persistence.rank_parts import receive_record, send_step
from protocol.errors import RankError, RewindError
from protocol.rank_messages import Answer, Operation
from protocol.text_ledger import TextLedger


class FollowingModel:
    """A rank's part of the target, and its sequences by their numbers. To be used on the model's thread."""

    def __init__(self, model: MLXModel, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._sequences: dict[int, MLXSequence] = {}
        self._ledger = TextLedger()
        # This rank's parts of states that rank 0 has taken, and those that are being copied for a file.
        self._states: dict[int, SequenceState] = {}
        self._recorders: dict[int, Recorder] = {}

    def run(self, operation: Operation) -> None:
        """Repeat an operation. Logits are not computed: only rank 0 chooses tokens.

        Raises:
            RankError: this rank is out of step with rank 0.
            Whatever the model raises.
        """
        for text in operation.texts:
            own, length = self._ledger.entry(text.sequence), self._sequences[text.sequence].length
            if own != text or length != text.length:
                raise RankError(
                    f"rank {self._group.rank} is out of step before {operation.name}: its sequence {text.sequence} "
                    f"holds {length} tokens (checksum {own.checksum:08x}), rank 0's {text.length} (checksum "
                    f"{text.checksum:08x})"
                )
        self._group.note(operation.name)
        if operation.sequence is None:
            self._run_model(operation.name, operation.arguments)
        else:
            self._run_sequence(operation.name, operation.sequence, operation.arguments)
        self._group.note(None)

    def _run_model(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name, arguments:
            case "feed_together", (fed,):
                self._model.feed_together(
                    [Feed(self._sequences[number], tuple(tokens), *options) for number, tokens, *options in fed]
                )
                for number, tokens, *_ in fed:
                    self._ledger.feed(number, tokens)
            case "read_together", (numbers, tokens):
                self._model.read_together([self._sequences[n] for n in numbers], [tuple(read) for read in tokens])
                for number, read in zip(numbers, tokens, strict=True):
                    self._ledger.feed(number, tuple(read))
            case "feed_ahead", (numbers,):
                shared = shared_tokens(mx.zeros((len(numbers),), mx.int32), self._group)
                mx.async_eval(self._model.feed_ahead([self._sequences[n] for n in numbers], shared))
                for i, number in enumerate(numbers):
                    self._ledger.feed_later(number, shared[i : i + 1])
            case "abandon_shared" | "sharing_obstacle" | "anatomy", ():
                getattr(self._model, name)()
            case "record", (state, step):
                self._record(state, is_first=step == 0)
            case "drop_state", (state,):
                del self._states[state]
                self._recorders.pop(state, None)
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
            sequence.features.want(False)
            self._ledger.open(number)
            return
        sequence = self._sequences[number]
        match name, arguments:
            case "feed", (tokens, num_logits):
                sequence.feed(tuple(tokens), num_logits)
                self._ledger.feed(number, tokens)
            case "prepare" | "leave_batch" | "add_prefix_checkpoint", _:
                getattr(sequence, name)(*arguments)
            case "rewind", (length,):
                self._ledger.cut(number, sequence.rewind(length))
            case "forget", ():
                sequence.forget()
                self._ledger.cut(number, 0)
            case "close", ():
                sequence.close()
                del self._sequences[number]
                self._ledger.close(number)
            case "reuse", (length,):
                sequence.reuse(length)
                self._ledger.cut(number, length)
            case "take_state", (state, length):
                # Which tokens they are, rank 0 knows. It may find out only afterwards.
                if (taken := sequence.take_state((0,) * length)) is None:
                    raise RankError(f"rank {self._group.rank} has caches that cannot be saved, and rank 0's can")
                self._states[state] = taken
            case "put_state", (tokens,):
                self._put_state(number, tokens, self._received_state)
            case "put_state", (tokens, state):
                self._put_state(number, tokens, lambda tokens: attrs.evolve(self._states[state], tokens=tokens))
            case _:
                raise RankError(f"rank {self._group.rank} does not know the operation {name}{arguments}")

    # --- saved texts ------------------------------------------------------------------------------

    def _record(self, state: int, is_first: bool) -> None:
        """Copy the next layer of a state, and send it to rank 0, unless all were sent: other ranks may have more."""
        if is_first:
            assert self._group.mlx is not None
            self._recorders[state] = Recorder(self._states[state], "target", rank=self._group.mlx.rank())
        if (recorder := self._recorders.get(state)) is not None and send_step(recorder, self._group, self._identity):
            del self._recorders[state]

    def _put_state(self, number: int, tokens: list[int], state: Callable[[tuple[int, ...]], SequenceState]) -> None:
        try:
            found = state(tuple(tokens))
            with never_computed():
                self._sequences[number].put_state(found)
        except (MisfitError, RewindError) as error:
            self._group.send(Answer(str(error)))
            return
        self._ledger.feed(number, tokens)
        self._group.send(Answer(None))

    def _received_state(self, tokens: tuple[int, ...]) -> SequenceState:
        """The part of a saved text that rank 0 sends to this rank.

        Raises: MisfitError: it is not a part of this model.
        """
        record = receive_record(self._group)
        saved = record.description.get("fingerprint") if isinstance(record.description, dict) else None
        if saved != self._identity:
            raise MisfitError("its part is that of another rank, or of another model")
        return recall(record, tokens)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return attrs.asdict(fingerprint(self._model.module))
