"""The ranks of one target: control connections between them, heartbeats, and the end of all when one fails."""

from __future__ import annotations

import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import outcome

from actors.distributed.connection import RankConnection
from actors.distributed.draft_rank_link import DraftRankLink
from actors.distributed.rank_address import left_out
from actors.remote.link import BEAT_S, SILENCE_S
from actors.workers.thread_pool import run_on_thread
from protocol.errors import OutriderError, ProtocolError, RankError, SettingsError
from protocol.rank_messages import Beat, Broken, RankMessage

CONNECT_TIMEOUT_S = 60.0  # longest time that MLX may take to connect ranks that are all there, in seconds
# How long a thread may take to notice that the group is broken, in seconds. A collective that hangs never does.
GRACE_S = 1.0
LATE = "has not ended in time: the ranks wait for each other"

T = TypeVar("T")

# Parts of the text of MLX errors that may leave the ranks out of step, wherever they are raised: errors of its
# distributed engine, and that of a device which has dropped submitted computations, collectives among them.
_OUT_OF_STEP = ("[ring]", "[jaccl]", "[mpi]", "NCCL", "failed with errno", "Command buffer execution failed")


class RankGroup:
    """The ranks, seen from one of them; made by `join_ranks`.

    Rank 0 is connected to every other rank, and these only to rank 0. A thread receives messages, and sends heartbeats.
    Once a rank has ended, hangs or reports an error, the group is broken for good, on all ranks. Only a drafting rank
    is lost by itself, and the others go on.

    Attributes:
        rank: of this process, in [0, size).
        size: number of ranks.
        mlx: the ranks of the target as MLX's group; None until `connect_mlx`.
        is_led: whether a runtime at this rank leads the group; there is one at a time.
        drafter: the link between rank 0 and the rank that drafts for it, at either end; None if there is none.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, RankConnection]) -> None:
        """Take over the connections, by the rank at the other end, and watch them."""
        self.rank, self.size = rank, size
        self.mlx: mx.distributed.Group | None = None
        self.is_led = False
        self.drafter: DraftRankLink | None = None
        self._mlx_without: int | None = None
        self._connections: Mapping[int, RankConnection] = dict(connections)
        self._inbox: queue.SimpleQueue[tuple[int, RankMessage] | None] = queue.SimpleQueue()
        self._dropped: list[RankConnection] = []  # for the thread to close
        self._lock = threading.Lock()
        # The first is set before the callbacks are called, the second after that.
        self._failure: RankError | None = None
        self._error: RankError | None = None
        self._is_broken = threading.Event()
        self._others_are_told = threading.Event()
        self._callbacks: list[Callable[[RankError], None]] = []
        self.is_hanging: Callable[[], bool] | None = None  # tells, in any thread, whether this rank's own model hangs
        # The operation that this rank is in, and since when; and what the others have said of theirs.
        self._at_work: tuple[str | None, float] = (None, time.monotonic())
        self._heard: dict[int, Beat] = {}
        # A daemon, since a process may end without closing the group; it runs nothing of MLX's.
        self._thread = threading.Thread(target=self._watch, name="outrider-ranks", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "broken" if self.error is not None else "connected"
        return f"<outrider RankGroup, {state}: rank {self.rank} of {self.size}>"

    @property
    def draft_rank(self) -> int | None:
        """At rank 0, the rank that drafts for the runtime that is open; None if there is none."""
        return None if self.drafter is None else self.drafter.rank

    def target_ranks(self, draft_rank: int | None) -> list[int]:
        """The ranks that hold the target, if one of them drafts and does nothing else; all if that is None."""
        return [rank for rank in range(self.size) if rank != draft_rank]

    def check_mlx(self, draft_rank: int | None) -> None:
        """Raises: SettingsError: MLX's group, which is made only once, has other ranks than the target now."""
        if self.mlx is not None and draft_rank != self._mlx_without:
            raise SettingsError(
                f"the ranks were connected with draft_rank={self._mlx_without}, which holds for as long as they run, "
                f"got draft_rank={draft_rank}; start them again"
            )

    def connect_mlx(self, draft_rank: int | None = None) -> None:
        """Make MLX's group of the target's ranks, all but `draft_rank`, if it was not made before; all call this at the
        same time. Raises: RankError: MLX cannot, another rank has failed meanwhile, or the time is up.
        """
        if self.mlx is not None:
            return

        def connect() -> mx.distributed.Group:
            with left_out(draft_rank):
                group = mx.distributed.init(strict=True)
            mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))  # until all ranks have made it
            return group

        late = f"has not got MLX's group within {CONNECT_TIMEOUT_S:g} s"
        try:
            # On a thread, since MLX waits for the other ranks without end, and ignores Ctrl-C meanwhile.
            group = self.run("outrider-connects", connect, CONNECT_TIMEOUT_S, late)
        except (RuntimeError, ValueError) as error:
            raise self.fail(f"rank {self.rank} cannot make MLX's group: {error}") from error
        ranks = self.target_ranks(draft_rank)
        if (group.rank(), group.size()) != (ranks.index(self.rank), len(ranks)):
            raise self.fail(
                f"rank {self.rank} of {self.size} is rank {group.rank()} of {group.size()} in MLX's group; start all "
                "ranks by mlx.launch"
            )
        self.mlx, self._mlx_without = group, draft_rank

    def run(self, name: str, work: Callable[[], T], timeout_s: float | None = None, late: str = LATE) -> T:
        """Do a piece of work on a thread, and wait for its result until it ends or the group is broken. Raises: what
        the work raises, and RankError: the group is broken, or the time is up, which breaks it for the reason `late`.
        """
        results: list[T] = []
        ended: queue.SimpleQueue[outcome.Outcome[None] | None] = queue.SimpleQueue()
        thread = run_on_thread(name, lambda: results.append(work()), ended.put)
        with self.on_error(lambda _: ended.put(None)):
            try:
                result = ended.get(timeout=timeout_s) or ended.get(timeout=GRACE_S)
            except queue.Empty:
                thread.abandon()
                raise self.fail(f"rank {self.rank} {late}") from None
            except KeyboardInterrupt:
                thread.abandon()
                self.fail(f"rank {self.rank} was interrupted")
                raise
        if result is not None:
            result.unwrap()
        return results[0]

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: RankMessage, *, to: int | None = None, to_target: bool = False) -> None:
        """Send a message to rank 0, or from there to all, the target's ranks, or one. Raises: RankError."""
        self.check()
        for rank, connection in self._connections.items():
            if to not in (None, rank) or (to_target and rank == self.draft_rank):
                continue
            try:
                connection.send(message)
            except OSError as error:
                lost = self._lose(rank, f"takes no message ({error})")
                if rank != self.draft_rank:
                    raise lost from error

    def receive(self, timeout_s: float | None = None) -> tuple[int, Any]:
        """The next `RankMessage`, and the rank that sent it; in one thread at a time.

        Raises: RankError: the group is broken, and all messages from before are received. TimeoutError: none has come.
        """
        try:
            received = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no message of another rank has come within {timeout_s} s") from None
        if received is None:
            self._inbox.put(None)
            self.check()
            raise RankError("the group of ranks was closed")
        return received

    @contextmanager
    def drafted_by(self, rank: int | None) -> Iterator[None]:
        """While in force, a rank drafts for rank 0; None for none. Both call this, each with the other's number, in
        trio's thread. If one has lost the other, the group is broken afterwards.
        """
        if rank is not None:
            self.drafter = DraftRankLink(rank, self._connections[rank], drop=partial(self._drop, rank))
        try:
            yield
        finally:
            drafter, self.drafter = self.drafter, None
            if drafter is not None and drafter.error is not None:
                self.fail(str(drafter.error))

    # --- failure ----------------------------------------------------------------------------------

    @property
    def error(self) -> RankError | None:
        """Why the group is broken; None while it is not."""
        return self._failure

    def check(self) -> None:
        """Raises: RankError: the group is broken."""
        if self._error is not None:
            raise _again(self._error)

    def fail(self, reason: str) -> RankError:
        """Break the group on all ranks, for a reason that names one. Returns: the error, or that of an earlier call."""
        with self._lock:
            if self._failure is not None:
                return _again(self._failure)
            failure = self._failure = RankError(f"the ranks cannot go on: {reason}")
            callbacks, self._callbacks = self._callbacks, []
        # Before the callbacks: this process may end as soon as they are called, and the others should know why.
        untold = []
        for connection in self._connections.values():
            with suppress(OSError):  # it has gone, too
                if not connection.send_unless_busy(Broken(reason)):
                    untold.append(connection)
        for callback in reversed(callbacks):
            callback(failure)
        # Only now: the model's thread raises this as soon as it sees it, and streams should be told before.
        self._error = failure
        self._is_broken.set()
        for connection in untold:
            with suppress(OSError):
                connection.send(Broken(reason))
        self._inbox.put(None)
        if (drafter := self.drafter) is not None:
            drafter.lose(reason)
        self._others_are_told.set()
        return _again(failure)

    def explain(self, error: BaseException, *, is_out_of_step: bool = False) -> BaseException:
        """The reason behind an error of the target's on this rank, which may well be another rank.

        MLX says that a connection was lost, but not whose. So this waits until the heartbeats tell; if they do not, the
        error here is the reason. An error that leaves the ranks in step is given back as it is, unless it has ended an
        operation that the others repeat (`is_out_of_step`).
        """
        if not isinstance(error, RuntimeError) or isinstance(error, OutriderError):
            return error
        if not (is_out_of_step or any(named in str(error) for named in _OUT_OF_STEP)):
            return error if self._failure is None else _again(self._failure)
        self._is_broken.wait(SILENCE_S + BEAT_S)
        return self.fail(f"rank {self.rank} failed: {type(error).__name__}: {error}")

    @contextmanager
    def on_error(self, call: Callable[[RankError], None]) -> Iterator[None]:
        """While in force, have the group call a function, from any thread, once it is broken; at once if it is already.
        The last one is called first: streams are told why they end before the worker under them ends.
        """
        with self._lock:
            if (broken := self._failure) is None:
                self._callbacks.append(call)
        if broken is not None:
            call(broken)
        try:
            yield
        finally:
            with self._lock:
                if call in self._callbacks:
                    self._callbacks.remove(call)

    def note(self, operation: str | None) -> None:
        """Note which operation this rank is in; None for none. The other ranks hear of it with the next heartbeat."""
        self._at_work = operation, time.monotonic()

    def _lose(self, rank: int, how: str) -> RankError:
        reason, link = f"rank {rank} {how}", self._link_to(rank)
        if link is None:
            return self.fail(reason)
        self._drop(rank)
        return link.lose(reason)

    def _link_to(self, rank: int) -> DraftRankLink | None:
        """The link of the drafter, if a rank is its other end and the target is open; None otherwise."""
        link = self.drafter
        return None if link is None or rank != link.rank or link.has_closed_target else link

    def _drop(self, rank: int) -> None:
        with self._lock:
            # A new mapping, since other threads may be going through the old one.
            connections = dict(self._connections)
            if (dropped := connections.pop(rank, None)) is not None:
                self._connections = connections
                self._dropped.append(dropped)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        silent_s = dict.fromkeys(self._connections, 0.0)
        next_beat = looked = time.monotonic()
        while not self._others_are_told.is_set():
            while self._dropped:
                self._dropped.pop().close()
            readable, _, _ = select.select(list(self._connections.values()), (), (), BEAT_S / 2)
            now = time.monotonic()
            for rank, connection in self._connections.items():
                # Time in which this process itself stood still counts for little.
                silent_s[rank] += min(now - looked, 2 * BEAT_S)
                if connection in readable:
                    silent_s[rank] = 0.0
                    self._take_from(rank, connection)
                elif silent_s[rank] > SILENCE_S:
                    self._lose(rank, f"hangs: it has sent no heartbeat for {SILENCE_S:g} s")
            looked = now
            if (is_hanging := self.is_hanging) is not None and is_hanging():
                others = "; ".join(
                    f"rank {rank} {f'is in {beat.operation}' if beat.operation else 'waits'}, for {beat.seconds:.0f} s"
                    for rank, beat in sorted(self._heard.items())
                )
                self.fail(f"a pass of rank {self.rank} has not ended: the ranks wait for each other ({others})")
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._beat()
        for connection in (*self._connections.values(), *self._dropped):
            connection.close()

    def _take_from(self, rank: int, connection: RankConnection) -> None:
        try:
            messages = connection.receive_available()
        except (OSError, ProtocolError) as error:
            self._lose(rank, f"has ended, or cannot be reached any more ({error})")
            return
        for message in messages:
            if isinstance(message, Beat):
                self._heard[rank] = message
            elif (link := self._link_to(rank)) is not None:
                if isinstance(message, Broken):
                    self._drop(rank)
                    link.lose(message.reason)
                else:
                    link.put(message)
            elif isinstance(message, Broken):
                self.fail(message.reason)
            else:
                self._inbox.put((rank, message))

    def _beat(self) -> None:
        operation, since = self._at_work
        beat = Beat(operation, round(time.monotonic() - since, 1))
        for rank, connection in self._connections.items():
            try:
                # A message on its way tells as much, and a rank that accepts nothing must not delay beats to others.
                connection.send_unless_busy(beat)
            except OSError as error:
                self._lose(rank, f"has ended, or cannot be reached any more ({error})")


def _again(error: RankError) -> RankError:
    """A fresh exception that says the same: each is raised once."""
    return RankError(*error.args)
