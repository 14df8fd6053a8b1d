"""A sharded target: a model and its sequences, whose operations rank 0 announces, and the other ranks repeat."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.distributed.exchange import Exchange, time_exchange
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharding import never_computed
from actors.mlx.cache_kinds import MisfitError
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation
from actors.mlx.model import Anatomy, MLXModel, S
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import SequenceRecord, SequenceState, StateRecorder, recall
from actors.model import Feed, ReusableSequence
from actors.persistence.fingerprint import fingerprint
from actors.persistence.rank_parts import NO_PART, added, errors_of, receive_record, received, send_record, send_step
from protocol.errors import ModelError, RankError, RewindError, SessionFileError
from protocol.rank_messages import OperationResult, RankOperation, RankOperations
from protocol.text_ledger import TextLedger


class Announcer:
    """Sends the operations of one target from rank 0 to the others. On these, it only keeps the ledger."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.ledger = TextLedger()
        # Numbers of states that the other ranks need not keep any more; any thread may add some.
        self.unused_states: deque[int] = deque()
        self.numbers = count()  # for sequences and states
        self._is_inside = False
        self._held_back: list[RankOperation] = []

    @property
    def followers(self) -> list[int]:
        """The other ranks of the target, in the order of their parts."""
        return self.group.target_ranks(self.group.draft_rank)[1:]

    @contextmanager
    def announced(
        self,
        name: str,
        sequence: int | None = None,
        *arguments: Any,
        reads: Sequence[int] = (),
        holds_back: bool = False,
    ) -> Iterator[bool]:
        """Announce the operation that the block runs; see `RankOperation`. Those inside it are not announced: each rank
        calls them. `reads` are the sequences that a pass reads. With `holds_back`, it may wait for the next one.

        Yields: whether this is the outermost one. Raises: RankError: the group is broken, or the operation has failed,
        which breaks it: the others have done their part.
        """
        if self._is_inside:
            yield False
            return
        self.group.check()
        if self.group.rank == 0:
            while self.unused_states:
                self._held_back.append(RankOperation("drop_state", None, (self.unused_states.popleft(),)))
            self._held_back.append(RankOperation(name, sequence, arguments, tuple(map(self.ledger.entry, reads))))
            if not holds_back:
                held_back, self._held_back = self._held_back, []
                self.group.send(RankOperations(tuple(held_back)), to_target=True)
        self._is_inside = True
        try:
            yield True
        except RankError:
            raise
        # Of whatever kind: the ranks are out of step.
        except Exception as error:
            explained = self.group.explain(error, is_out_of_step=True)
            if not isinstance(explained, RankError):
                explained = self.group.fail(f"rank {self.group.rank} failed in {name}: {type(error).__name__}: {error}")
            raise explained from error
        finally:
            self._is_inside = False


class TakenParts:
    """The parts of a state that the other ranks keep for as long as rank 0 has this object; see `OtherParts`."""

    def __init__(self, announcer: Announcer, number: int) -> None:
        """Stand for the state that the ranks have taken under a number."""
        self.number = number
        self._announcer = announcer
        # The state may be dropped in any thread. The ranks are told with the next operation.
        weakref.finalize(self, announcer.unused_states.append, number).atexit = False

    def copied(self) -> Iterator[tuple[SequenceRecord, ...] | None]:
        parts = dict.fromkeys(self._announcer.followers, NO_PART)
        for step in count():
            if not (waiting := {rank for rank, part in parts.items() if part.description is None}):
                break
            with self._announcer.announced("record", None, self.number, step):
                while waiting:
                    rank, message = received(self._announcer.group, waiting)
                    parts[rank] = added(parts[rank], message, rank)
                    waiting.discard(rank)
            yield None
        yield tuple(parts.values())


def _announced(name: str, *, holds_back: bool = False) -> Any:
    """`MLXSequence`'s method of a name, announced. It feeds nothing, and may drop tokens."""
    method = getattr(MLXSequence, name)

    def announced(self: ShardedSequence, *arguments: Any) -> Any:
        with self._announcer.announced(name, self.number, *arguments, holds_back=holds_back):
            result = method(self, *arguments)
            self._announcer.ledger.cut(self.number, self.length)
            return result

    return announced


class ShardedSequence(MLXSequence):
    """One rank's part of a sequence; see `CachedSequence`. Made by `ShardedModel.open_sequence`."""

    _announcer: Announcer
    number: int
    # The stages of a pipeline exchange results of one shape.
    computes_all_logits = True

    def enter(self, announcer: Announcer, number: int) -> None:
        """Announce the sequence, and from now on what is done with it."""
        self._announcer, self.number = announcer, number
        with announcer.announced("open", self.number):
            announcer.ledger.open(self.number)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        with self._announcer.announced("feed", self.number, tokens, num_logits, reads=[self.number]) as is_outermost:
            logits = super().feed(tokens, num_logits)
            if is_outermost:
                self._announcer.ledger.feed(self.number, tokens)
            return logits

    prepare = _announced("prepare", holds_back=True)
    rewind = _announced("rewind")
    forget = _announced("forget")
    add_prefix_checkpoint = _announced("add_prefix_checkpoint")
    reuse = _announced("reuse")

    def leave_batch(self) -> None:
        """Announced only if it changes something."""
        if self.is_row:
            with self._announcer.announced("leave_batch", self.number):
                super().leave_batch()

    def close(self) -> None:
        if self._announcer.group.error is not None:
            super().close()  # the other ranks have closed theirs
            return
        with self._announcer.announced("close", self.number):
            super().close()
            self._announcer.ledger.close(self.number)

    def copy(self, length: int, number: int | None = None) -> ShardedSequence:
        """`number` is that of the copy at rank 0, if this is another rank."""
        announcer, copy = self._announcer, self._empty_alike()
        number = next(announcer.numbers) if number is None else number
        with announcer.announced("copy", self.number, length, number):
            copy._announcer, copy.number = announcer, number
            announcer.ledger.copy(self.number, number)
            return self._copied_to(copy, length)

    def share(self, other: ReusableSequence, num_common: int) -> None:
        assert isinstance(other, ShardedSequence)
        with self._announcer.announced("share", self.number, other.number, num_common):
            super().share(other, num_common)

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """The other ranks keep their parts."""
        announcer = self._announcer
        if (state := super().take_state(tokens)) is None:
            return None
        number = next(announcer.numbers)
        with announcer.announced("take_state", self.number, number, len(tokens)):
            return attrs.evolve(state, others=TakenParts(announcer, number))

    def put_state(self, state: SequenceState) -> None:
        """The other ranks put their parts, which they have kept or are sent now."""
        announcer, others = self._announcer, state.others
        followers = announcer.followers
        kept = (others.number,) if isinstance(others, TakenParts) else ()
        records = others if isinstance(others, tuple) else ()
        if not kept and len(records) != len(followers):
            raise MisfitError(
                f"its number of parts is {len(records) + 1}, and the target is sharded over {len(followers) + 1} ranks"
            )
        with announcer.announced("put_state", self.number, state.tokens, *kept):
            for rank, record in zip(followers, records, strict=False):
                send_record(record, announcer.group, to=rank)
            errors = []
            try:
                with never_computed():
                    super().put_state(attrs.evolve(state, others=None))
                announcer.ledger.feed(self.number, state.tokens)
            except (MisfitError, RewindError) as error:
                errors = [str(error)]
            # In any case: all ranks have to be in step afterwards.
            errors += errors_of(announcer.group, followers)
        if errors:
            self.forget()
            raise MisfitError(errors[0])


class ShardedModel(MLXModel):
    """One rank's part of a target."""

    def __init__(
        self,
        model: Module,
        options: CacheOptions,
        group: RankGroup,
        named: str = "the model",
        layer_evaluation: LayerEvaluation | None = None,
    ) -> None:
        """As `MLXModel`, which feeds the part some tokens: all ranks must make theirs at the same time."""
        super().__init__(model, options, named, layer_evaluation)
        self._announcer = Announcer(group)

    @property
    def num_ranks(self) -> int:
        return 1 + len(self._announcer.followers)

    def open_sequence(self, *, alongside_model: bool, number: int | None = None) -> ShardedSequence:
        """As `MLXModel`'s; `number` is that at rank 0, if this is another rank."""
        sequence = super().open_sequence_of(ShardedSequence, alongside_model=alongside_model)
        sequence.enter(self._announcer, next(self._announcer.numbers) if number is None else number)
        return sequence

    @property
    def ledger(self) -> TextLedger:
        """What each of this rank's sequences was fed."""
        return self._announcer.ledger

    def open_sequence_of(self, kind: type[S], *, alongside_model: bool) -> S:
        """Raises: SessionFileError: always, since the other ranks have sequences of one class."""
        raise SessionFileError("the target is sharded over several ranks, which cannot continue a prompt cache file")

    def record_features(self, layer_ids: Sequence[int] | None) -> None:
        """Raises: ModelError: this rank is a stage of a pipeline, and has only some of the layers."""
        if layer_ids is not None and getattr(getattr(self.module, "model", None), "pipeline_size", 1) > 1:
            raise ModelError(
                "a trained drafter reads layers of the whole target, and this one is a pipeline over several ranks; "
                "draft with a draft model or by prompt lookup"
            )
        super().record_features(layer_ids)

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        numbers = [_number(feed.sequence) for feed in feeds]
        fed = [(number, feed.tokens, feed.num_logits, feed.alone) for number, feed in zip(numbers, feeds, strict=True)]
        with self._announcer.announced("feed_together", None, fed, reads=numbers):
            logits = super().feed_together(feeds)
            for number, tokens, *_ in fed:
                self._announcer.ledger.feed(number, tokens)
            return logits

    def read_together(self, sequences: Sequence[Any], tokens: Sequence[tuple[int, ...]]) -> None:
        numbers = [_number(sequence) for sequence in sequences]
        with self._announcer.announced("read_together", None, numbers, list(tokens), reads=numbers):
            super().read_together(sequences, tokens)
            for number, read in zip(numbers, tokens, strict=True):
                self._announcer.ledger.feed(number, read)

    def feed_ahead(self, sequences: Sequence[Any], tokens: mx.array) -> mx.array:
        """A collective sends the tokens, since they may not be computed yet."""
        numbers = [_number(sequence) for sequence in sequences]
        with self._announcer.announced("feed_ahead", None, numbers, reads=numbers):
            shared = self._shared(tokens)
            logits = super().feed_ahead(sequences, shared)
            for i, number in enumerate(numbers):
                self._announcer.ledger.feed_later(number, shared[i : i + 1])
            return logits

    def _shared(self, tokens: mx.array) -> mx.array:
        """Rank 0's tokens, (n,) ids, on every rank; lazy. Other ranks give any array of that shape."""
        group = self._announcer.group
        given = tokens.astype(mx.int32) if group.rank == 0 else mx.zeros(tokens.shape, mx.int32)
        shared = mx.distributed.all_sum(given, group=group.mlx)
        # Submitted now, on every rank, since only the first stage of a pipeline reads the tokens.
        mx.async_eval(shared)
        # A collective that fails leaves its result unwritten, and MLX computes on with it until the error is read. An
        # embedding reads memory wherever an id points it to.
        return mx.clip(shared, 0, self.vocab_size - 1)

    def abandon_shared(self) -> None:
        with self._announcer.announced("abandon_shared"):
            super().abandon_shared()

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        """The other ranks must find the same."""
        with self._announcer.announced("sharing_obstacle"):
            obstacle = super().sharing_obstacle(rewinds_passes=rewinds_passes)
        with self._announcer.announced("agree_on_sharing", None, obstacle):
            return obstacle

    def anatomy(self) -> Anatomy:
        """Weights and caches are those of this rank."""
        with self._announcer.announced("anatomy"):
            return super().anatomy()

    def time_exchange(self, width: int, repeats: int) -> Exchange:
        """What a pass over `width` tokens exchanges with the other ranks, timed `repeats` times."""
        with self._announcer.announced("time_exchange", None, width, repeats):
            return time_exchange(super().open_sequence_of(MLXSequence, alongside_model=False), width, repeats)


def _number(sequence: Any) -> int:
    assert isinstance(sequence, ShardedSequence)
    return sequence.number


class FollowingModel:
    """The target on another rank's model thread, and its sequences by number: repeats what rank 0 announces."""

    def __init__(self, model: ShardedModel, group: RankGroup) -> None:
        self._model = model
        self._group = group
        self._sequences: dict[int, ShardedSequence] = {}
        # This rank's parts of states that rank 0 has taken, and those that are being copied for a file.
        self._states: dict[int, SequenceState] = {}
        self._recorders: dict[int, StateRecorder] = {}

    def run(self, operation: RankOperation) -> None:
        """Repeat an operation, without logits: only rank 0 chooses tokens. Raises: RankError: it is out of step."""
        for text in operation.texts:
            own, length = self._model.ledger.entry(text.sequence), self._sequences[text.sequence].length
            if own != text or length != text.length:
                raise RankError(
                    f"rank {self._group.rank} is out of step before {operation.name}: its sequence {text.sequence} "
                    f"holds {length} tokens (checksum {own.checksum:08x}), rank 0's {text.length} (checksum "
                    f"{text.checksum:08x})"
                )
        self._group.note(operation.name)
        self._repeat(operation.name, operation.sequence, operation.arguments)
        self._group.note(None)

    def _repeat(self, name: str, number: Any, arguments: tuple[Any, ...]) -> None:
        model, sequences = self._model, self._sequences
        sequence: Any = sequences.get(number)
        match name, arguments:
            case "feed_together", (fed,):
                model.feed_together([Feed(sequences[n], tuple(tokens), *options) for n, tokens, *options in fed])
            case "read_together", (numbers, tokens):
                model.read_together([sequences[n] for n in numbers], [tuple(read) for read in tokens])
            case "feed_ahead", (numbers,):
                given = mx.zeros((len(numbers),), mx.int32)
                mx.async_eval(model.feed_ahead([sequences[n] for n in numbers], given))
            case "abandon_shared" | "sharing_obstacle" | "anatomy" | "time_exchange", _:
                getattr(model, name)(*arguments)
            case "record", (state, step):
                self._record(state, is_first=step == 0)
            case "drop_state", (state,):
                del self._states[state]
                self._recorders.pop(state, None)
            case "agree_on_sharing", (obstacle,):
                if (own := model.sharing_obstacle()) != obstacle:
                    raise RankError(
                        f"rank {self._group.rank} finds about texts sharing a pass: {own or 'they can'}; rank 0 finds: "
                        f"{obstacle or 'they can'}"
                    )
            case "open", ():
                sequences[number] = model.open_sequence(alongside_model=False, number=number)
                sequences[number].recorded.want(False)
            case "feed", (tokens, num_logits):
                sequence.feed(tuple(tokens), num_logits)
            case "copy", (length, copy):
                sequences[copy] = sequence.copy(length, copy)
                sequences[copy].recorded.want(False)
            case "share", (other, num_common):
                sequence.share(sequences[other], num_common)
            case "prepare" | "leave_batch" | "add_prefix_checkpoint" | "rewind" | "forget" | "reuse", _:
                getattr(sequence, name)(*arguments)
            case "close", ():
                sequences.pop(number).close()
            case "take_state", (state, length):
                # Only rank 0 knows the ids, and maybe not yet.
                if (taken := MLXSequence.take_state(sequence, (0,) * length)) is None:
                    raise RankError(f"rank {self._group.rank} has caches that cannot be saved, and rank 0's can")
                self._states[state] = taken
            case "put_state", (tokens, *kept):
                self._group.send(OperationResult(self._put_state(sequence, tuple(tokens), *kept)))
            case _:
                raise RankError(f"rank {self._group.rank} does not know the operation {name}{arguments}")

    # --- saved texts ------------------------------------------------------------------------------

    def _record(self, state: int, is_first: bool) -> None:
        """Copy the next layer of a state, and send it to rank 0, unless all were sent: other ranks may have more."""
        if is_first:
            assert self._group.mlx is not None
            self._recorders[state] = StateRecorder(self._states[state], "target", rank=self._group.mlx.rank())
        if (recorder := self._recorders.get(state)) is not None and send_step(recorder, self._group, self._identity):
            del self._recorders[state]

    def _put_state(self, sequence: ShardedSequence, tokens: tuple[int, ...], kept: int | None = None) -> str | None:
        """Put this rank's part of a state into a sequence: what it has `kept` under a number, or what rank 0 sends.
        Returns: why it is not a part for this model; None if it is.
        """
        try:
            if kept is not None:
                state = attrs.evolve(self._states[kept], tokens=tokens)
            else:
                record = receive_record(self._group)
                saved = record.description.get("fingerprint") if isinstance(record.description, dict) else None
                if saved != self._identity:
                    raise MisfitError("its part is that of another rank, or of another model")
                state = recall(record, tokens)
            with never_computed():
                MLXSequence.put_state(sequence, state)
        except (MisfitError, RewindError) as error:
            return str(error)
        self._model.ledger.feed(sequence.number, tokens)
        return None

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return attrs.asdict(fingerprint(self._model.module))
