"""The sessions of one runtime: how they begin at the actors, what is counted for them, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.session import Session
from actors.target.target_actor import TargetActor
from protocol.errors import OutriderError, RuntimeBrokenError
from protocol.messages import Close, Open
from protocol.prices import Prices
from protocol.session_state import Commit
from protocol.statistics import Counts
from protocol.trace import Event, Span
from runtime.engine.admission import StreamAdmission
from runtime.engine.drafter_slot import DrafterSlot
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText, StopFinder
from runtime.generation.token_reader import Arrivals, Progress, TokenReader
from runtime.generation.token_stream import SessionFile, TokenStream
from runtime.persistence.saved_session import SavedStream

# Rounds that may wait for a slow consumer before the models wait with them.
BUFFERED_ROUNDS = 16

SaveStream = Callable[[Open, Arrivals, SessionFile, Callable[[], Progress]], Awaitable[int]]
"""Saves a stream to a file: what opened it, its arrivals, the file, and how far its consumer has read it."""


class Sessions:
    """The sessions of one runtime, and whether the runtime still takes any.

    A session begins at both actors as soon as it is admitted. It ends when its text is over, when its consumer closes
    or drops the stream, or with the runtime. Whatever ends it, its counts move to those of past sessions.

    Attributes:
        by_id: the sessions that have not ended yet.
        past: the summed counts of those that have.
        has_failed: set once the target has failed and every session has its error.
    """

    def __init__(
        self,
        target: TargetActor,
        drafter: DrafterSlot,
        tokenizer: TokenizerWrapper | None,
        prices: Prices,
        max_streams: int | None,
        save_stream: SaveStream,
    ) -> None:
        """No session so far.

        Args:
            target: the actor that sessions begin at.
            drafter: its actor is the other one, if there is a drafter.
            tokenizer: the target's.
            prices: the measured costs, for the streams' statistics.
            max_streams: see `open`.
            save_stream: see `SaveStream`.
        """
        self.by_id: dict[int, Session] = {}
        self.past = Counts()
        self.has_failed = trio.Event()
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._prices = prices
        self._save_stream = save_stream
        self._admission = StreamAdmission(
            max_streams, self._begin_at_actors, lambda: self._closed is None and target.is_serving
        )
        self._trio_token = trio.lowlevel.current_trio_token()
        self._scopes: set[trio.CancelScope] = set()  # of calls that end with the runtime, see `while_open`
        # Held while a session's counts move to `past`: another thread may be adding all of them up.
        self._counts_lock = threading.Lock()
        self._closed: OutriderError | None = None

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def is_open(self) -> bool:
        """Whether the runtime still takes sessions."""
        return self._closed is None

    @property
    def num_streams(self) -> int:
        """See `Runtime.num_streams`."""
        # Another thread may be asking. A session that is over is put away in the next turn of the event loop.
        wanted = sum(not session.is_unwanted for session in list(self.by_id.values()))
        return wanted - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """See `Runtime.num_waiting`."""
        return self._admission.num_waiting

    def counts(self) -> Counts:
        """The counts of all sessions so far, added up. May be called in any thread."""
        counts = Counts()
        with self._counts_lock:
            counts.add(self.past)
            for session in list(self.by_id.values()):
                counts.add(session.counts)
        return counts

    def check_open(self) -> None:
        """Raises: RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed."""
        if self._closed is not None:
            # A new object each time: a traceback grows on an exception that is raised again.
            raise _again(self._closed)

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Run a block that asks the models for something; closing the runtime cancels it.

        Raises: as `check_open`, also where the runtime was closed in the middle of the block.
        """
        self.check_open()
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.remove(scope)
        if scope.cancelled_caught:
            assert self._closed is not None
            raise _again(self._closed)

    def begin(self, opened: Open, saved: SavedStream | None = None) -> TokenStream:
        """Begin a generation, or resume one that was saved.

        Args:
            opened: what opens the session.
            saved: the saved stream that it resumes, or None.

        Raises: as `check_open`.
        """
        self.check_open()
        reasoning = ReasoningTracker(self._tokenizer, opened.prompt[: opened.num_prompt])
        send, receive = trio.open_memory_channel[Commit](BUFFERED_ROUNDS)
        session = Session(opened, send)
        session.counts.prompt_tokens = len(opened.prompt)
        if opened.settings.stop and self._tokenizer is not None:
            session.find_stop = find_stop = StopFinder(self._tokenizer, opened)
            find_stop.resume(opened.prompt[opened.num_prompt :])
        reader = TokenReader(
            session,
            GrowingText(self._tokenizer, opened),
            reasoning,
            clock=self._target.worker.clock,
            on_token=session.counts.give,
            estimates=self._prices.estimates,
        )
        arrivals = Arrivals(session, receive, partial(self._end_soon, opened.session))
        if saved is not None:
            reader.resume(saved.progress)
            arrivals.resume(saved.progress.commits)
        self.by_id[opened.session] = session
        if saved is not None and saved.is_over:
            session.end()
        else:
            self._admission.enter(session)
        stream = TokenStream(reader, arrivals, partial(self._save_stream, opened, arrivals))
        if reader.finish_reason is not None:
            stream.close()
        return stream

    def run_soon(self, call: Callable[[], None]) -> None:
        """Have a function called in trio's thread; may be called from any thread, at any moment."""
        try:
            self._trio_token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # and with the event loop everything ended

    def attribute(self, event: Event) -> None:
        """Count a worker's time for the session that it was spent on, and the target's passes for those in them."""
        if not isinstance(event, Span):
            return
        self._count_pass(event)
        for id in event.sessions:
            if id not in self.by_id:
                continue
            counts, seconds = self.by_id[id].counts, event.fraction_of(id) * (event.ended - event.began)
            if event.actor == "draft":
                counts.draft_seconds += seconds
                continue
            counts.target_seconds += seconds
            if event.kind == "prefill":
                counts.prefilled_tokens += event.num_tokens
                counts.prefill_seconds += seconds

    def _count_pass(self, span: Span) -> None:
        """Count a pass of the target that verifies or decodes, also one whose session has ended meanwhile."""
        if span.kind not in ("verify", "decode"):
            return
        for index, id in enumerate(span.sessions):
            counts = self.by_id[id].counts if id in self.by_id else self.past
            counts.take_part(len(span.sessions), is_first=index == 0)

    def fail(self, error: OutriderError) -> None:
        """End every session with the target's error, and take no others."""
        cause = error.__cause__ or error
        self.close(RuntimeBrokenError(f"the target model failed, and the runtime with it: {cause}"), cause)
        self.has_failed.set()

    def close(self, error: OutriderError, cause: BaseException | None = None) -> None:
        """End every session with an error, and take no others; nothing happens where this was done before."""
        if self._closed is not None:
            return
        error.__cause__ = cause
        self._closed = error
        for scope in self._scopes:
            scope.cancel()
        for id, session in list(self.by_id.items()):
            session.end(_again(error))
            self._end(id)

    def _begin_at_actors(self, session: Session) -> None:
        draft = self._drafter.actor
        if (draft is None or not draft.is_serving) and session.opened.drafted:
            # The drafter was detached while this session waited for admission, or everything is about to end.
            session.opened = attrs.evolve(session.opened, drafted=False)
        self._target.open_session(session)
        if draft is not None and session.opened.drafted:
            draft.open_session(session)

    def _end_soon(self, id: int) -> None:
        """End a session, from any thread; harmless where it is over."""
        if (unwanted := self.by_id.get(id)) is not None:
            unwanted.is_unwanted = True
        self.run_soon(partial(self._end, id))

    def _end(self, id: int) -> None:
        """End a session; harmless where it is over."""
        with self._counts_lock:
            if (session := self.by_id.pop(id, None)) is None:
                return
            self.past.add(session.counts)
        self._admission.give_up(id)
        self._target.close_session(Close(id))
        if self._drafter.actor is not None:
            self._drafter.actor.close_session(Close(id))


def _again(error: OutriderError) -> OutriderError:
    """A fresh exception that says the same, with the same cause."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
