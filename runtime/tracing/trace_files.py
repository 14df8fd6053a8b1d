"""Trace files: recorders that write events as Chrome trace JSON or as a timeline page.

A recorder opens its file when the runtime opens and finishes it when the runtime ends, however that ends. The event
loop only appends events to a list; one of trio's threads turns them into JSON and writes it, `EVENTS_PER_WRITE` events
at a time. So a Chrome trace of a long run takes little memory, has all but the last few hundred events if the process
is killed, and adds next to nothing to the end of a run. A timeline page is rendered as a whole at the end, so it is
limited to `MAX_PAGE_EVENTS` events.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import trio

from protocol.errors import SettingsError
from protocol.reprs import shown, shown_path
from protocol.trace import ActorName, Event, Instant, Span
from runtime.tracing.timeline import render, texts_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

logger = logging.getLogger("outrider")

TracePath = str | os.PathLike[str]
Trace = Callable[[Event], None] | TracePath | None

# Events that are written together: some milliseconds of a thread's time.
EVENTS_PER_WRITE = 256

# Events that may wait for a slow disk. Further ones are dropped and counted.
MAX_WAITING_EVENTS = 100_000

# About 20,000 tokens: browsers get slow beyond that.
MAX_PAGE_EVENTS = 200_000


def check_trace(trace: Any) -> Callable[[Event], None] | TraceWriter | None:
    """The receiver of events for an option `trace`: a function itself; for a path, a recorder that is not entered yet.

    Raises: SettingsError: `trace` is neither a function nor a path.
    """
    if trace is None or callable(trace):
        return trace  # type: ignore[no-any-return]
    if isinstance(trace, (str, os.PathLike)) and isinstance(os.fspath(trace), str):
        return TimelineFile(trace) if Path(trace).suffix.lower() in (".html", ".htm") else ChromeFile(trace)
    raise SettingsError(f"trace must be a function of one event or the path of a file to write, got {shown(trace)}")


class TraceWriter(ABC):
    """A writer of events to a file: an async context manager that is called with each event.

    Entering opens the file. Leaving writes the remaining events and closes the file, also under cancellation and after
    a Ctrl-C. An error in between is logged as a warning: a full disk is no reason to end a generation.
    """

    max_events: ClassVar[int]  # most that may wait to be written; further ones are dropped and counted

    def __init__(self, path: TracePath) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._events: list[Event] = []
        self._num_lost = 0
        self._is_writing = False
        self._is_ending = False
        self._has_failed = False
        self._ended = trio.Event()
        # A limiter of its own: a trace is finished even if the program keeps all of trio's threads busy.
        self._limiter = trio.CapacityLimiter(1)

    async def __aenter__(self) -> TraceWriter:
        """Open the file. Raises: SettingsError: it cannot be written."""
        try:
            self._file = self._open()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(
                f"the trace cannot be written to {shown_path(str(self.path))}: {reason}; name a file in a directory "
                "that exists and can be written"
            ) from error
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
        self._is_ending = True
        self._write_soon()
        interrupt: KeyboardInterrupt | None = None
        with trio.CancelScope(shield=True):
            # A Ctrl-C waits as well: it would cut the file off in the middle.
            while not self._ended.is_set():
                try:
                    await self._ended.wait()
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def __call__(self, event: Event) -> None:
        """Record an event; never waits."""
        if self._has_failed or self._is_ending:
            return
        if len(self._events) >= self.max_events:
            self._num_lost += 1
            return
        self._events.append(event)
        if self._has_enough():
            self._write_soon()

    def _write_soon(self) -> None:
        if not self._is_writing:
            self._is_writing = True
            # A system task belongs to no nursery: neither a cancellation nor a Ctrl-C reaches it.
            trio.lowlevel.spawn_system_task(self._write, name=f"outrider trace {self.path}")

    async def _write(self) -> None:
        await self._unless_failed(self._write_waiting)
        if not self._is_ending:
            self._is_writing = False
            return
        await self._unless_failed(self._write_end)
        self._has_failed = False  # the file is closed even where writing it has failed
        await self._unless_failed(self._close)
        self._ended.set()

    async def _unless_failed(self, action: Callable[[], Awaitable[None]]) -> None:
        if self._has_failed:
            return
        try:
            await action()
        except OSError as error:
            self._has_failed = True
            self._events.clear()
            logger.warning("the trace in %s is not whole: %s", self.path, error.strerror or error)

    async def _on_a_thread(self, call: Callable[..., object], *args: Any) -> None:
        await trio.to_thread.run_sync(call, *args, limiter=self._limiter)

    def _put(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text)

    async def _close(self) -> None:
        assert self._file is not None
        await self._on_a_thread(self._file.close)
        if self._num_lost:
            logger.warning("the trace in %s lacks %d events, which were too many for it", self.path, self._num_lost)

    def _open(self) -> IO[str]:
        return Path(os.path.expanduser(self.path)).open("w", encoding="utf-8")

    def _has_enough(self) -> bool:
        """Whether enough events have come to write some now."""
        return False

    async def _write_waiting(self) -> None:
        """Write the events so far, if this file is written piece by piece."""
        return

    @abstractmethod
    async def _write_end(self) -> None:
        """Write the rest."""


class ChromeFile(TraceWriter):
    """A trace for Perfetto and chrome://tracing, which also read a file whose end is missing."""

    max_events = MAX_WAITING_EVENTS

    def __init__(self, path: TracePath) -> None:
        super().__init__(path)
        self._chrome = ChromeTrace()

    def _has_enough(self) -> bool:
        return len(self._events) >= EVENTS_PER_WRITE

    async def _write_waiting(self) -> None:
        while self._has_enough() or (self._is_ending and self._events):
            # One batch at a time: other threads wait for the GIL while a batch is turned into JSON.
            batch, self._events = self._events[:EVENTS_PER_WRITE], self._events[EVENTS_PER_WRITE:]
            await self._on_a_thread(self._put_events, batch)

    async def _write_end(self) -> None:
        await self._on_a_thread(self._put, self._chrome.end())

    def _put_events(self, events: Sequence[Event]) -> None:
        self._put("".join(self._chrome.add(event) for event in events))


_LANES: dict[ActorName, int] = {"target": 1, "draft": 2}
_FIRST_STREAM_LANE = 16


class ChromeTrace:
    """Events in Chrome's trace event format, as text that grows by each event.

    Each actor is a thread, and so is each stream that runs at the same time as others: its proposals wait there for
    their verify, to which a flow arrow leads, and a counter shows how many tokens of them were accepted and rejected. A
    pass that several streams share is one entry, which has the part of each among its facts.

    Source: "Trace Event Format", the array form, whose end may be missing.
    """

    def __init__(self) -> None:
        self._beginning = _BEGINNING
        self._num_flows = 0
        self._proposals: dict[int, Instant] = {}  # by session; those that were not verified yet
        self._lanes: dict[int, int] = {}  # by session that is under way; from 0
        self._named: set[int] = set()  # lanes whose names were written

    def add(self, event: Event) -> str:
        """The text that an event adds."""
        return self._begin() + "".join(",\n" + json.dumps(entry) for entry in self._entries(event))

    def end(self) -> str:
        """The text that completes the JSON."""
        return self._begin() + "\n]\n"

    def _begin(self) -> str:
        beginning, self._beginning = self._beginning, ""
        return beginning

    def _entries(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Span):
            yield self._complete(event)
            if event.kind == "verify":
                for session in event.sessions:
                    proposal = self._proposals.pop(session, None)
                    if proposal is not None and proposal.round == event.round_of(session):
                        yield from self._verified(proposal, event)
            elif event.kind == "close" and event.actor == "target" and event.session is not None:
                self._lanes.pop(event.session, None)
                self._proposals.pop(event.session, None)
        else:
            yield self._instant(event)
            if event.kind == "proposal":
                self._proposals[event.session] = event
            elif event.commit is not None:
                yield from self._counted(event)

    def _complete(self, span: Span) -> dict[str, Any]:
        facts: dict[str, Any] = {"session": span.session, "round": span.round, "tokens": span.num_tokens or None}
        if span.shares:
            # Keys that name the sessions, so that a viewer's search for one finds the passes that it shared.
            shares = {f"session {s.session}": {"round": s.round, "tokens": s.num_tokens} for s in span.shares}
            facts |= {"sessions": len(shares), "shares": shares}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        during = _during(span.began, span.ended)
        return _entry("X", span.kind, _LANES[span.actor], cat=span.actor, **during, args=known)

    def _instant(self, instant: Instant) -> dict[str, Any]:
        facts: dict[str, Any] = {"session": instant.session, "round": instant.round, "tokens": instant.num_tokens}
        if instant.kind == "proposal":
            facts["proposed"] = instant.tokens
        if (commit := instant.commit) is not None:
            facts |= {"committed": commit.tokens, "from_draft": commit.num_from_draft, "rejected": commit.num_rejected}
            facts |= {} if commit.finish_reason is None else {"finish_reason": commit.finish_reason}
        lane, at = _LANES[instant.actor], _microseconds(instant.at)
        return _entry("i", instant.kind, lane, cat=instant.actor, s="t", ts=at, args=facts)

    def _verified(self, proposal: Instant, verify: Span) -> Iterator[dict[str, Any]]:
        """A proposal while it waits for its verify, and the arrow from one to the other."""
        lane = self._lane(proposal.session)
        if lane not in self._named:
            self._named.add(lane)
            yield from _thread(_FIRST_STREAM_LANE + lane, f"proposals of stream {lane + 1}")
        self._num_flows += 1
        facts = {"session": proposal.session, "round": proposal.round, "proposed": proposal.tokens}
        waiting = _during(proposal.at, verify.began)
        thread, flow = _FIRST_STREAM_LANE + lane, {"cat": "proposal", "id": self._num_flows}
        yield _entry("X", "proposal", thread, cat="proposal", **waiting, args=facts)
        yield _entry("s", "judged", thread, **flow, ts=waiting["ts"])
        yield _entry("f", "judged", _LANES["target"], **flow, bp="e", ts=_microseconds(verify.began))

    def _counted(self, verdict: Instant) -> Iterator[dict[str, Any]]:
        commit = verdict.commit
        assert commit is not None
        by_whom = Counter(map(commit.drafted_by, range(commit.num_from_draft)))
        counts = {
            "accepted": by_whom["model"],
            "copied": by_whom["copy"],
            "forced": by_whom["grammar"],
            "rejected": commit.num_rejected,
            "target's own": len(commit.tokens) - commit.num_from_draft,
        }
        name = f"tokens a round, stream {self._lane(verdict.session) + 1}"
        yield _entry("C", name, _LANES["target"], ts=_microseconds(verdict.at), args=counts)

    def _lane(self, session: int) -> int:
        """A lane that no other session has now; there are as many lanes as sessions ever ran at once."""
        if session not in self._lanes:
            taken = set(self._lanes.values())
            self._lanes[session] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        return self._lanes[session]


def _entry(phase: str, name: str, lane: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": 1, "tid": lane, **fields}


def _thread(lane: int, name: str) -> list[dict[str, Any]]:
    return [
        _entry("M", "thread_name", lane, ts=0, args={"name": name}),
        _entry("M", "thread_sort_index", lane, ts=0, args={"sort_index": lane}),
    ]


def _microseconds(seconds: float) -> float:
    """Microseconds with whole nanoseconds."""
    return round(seconds * 1e9) / 1000


def _during(began: float, ended: float) -> dict[str, float]:
    """Begin and duration in microseconds, from whole nanoseconds, so that adjacent spans do not overlap."""
    nanoseconds = round(began * 1e9), round(ended * 1e9)
    return {"ts": nanoseconds[0] / 1000, "dur": max(0, nanoseconds[1] - nanoseconds[0]) / 1000}


# The names of the process and of the actors' threads.
_BEGINNING = "[\n" + ",\n".join(
    json.dumps(entry)
    for entry in (
        _entry("M", "process_name", 0, ts=0, args={"name": "outrider"}),
        *_thread(_LANES["target"], "target"),
        *_thread(_LANES["draft"], "draft"),
    )
)


class TimelineFile(TraceWriter):
    """The timeline page; see `runtime.tracing.timeline`.

    Attributes:
        tokenizer: decodes the tokens; None shows their ids. Set it before leaving the recorder.
    """

    max_events = MAX_PAGE_EVENTS

    def __init__(self, path: TracePath) -> None:
        super().__init__(path)
        self.tokenizer: TokenizerWrapper | None = None

    async def _write_end(self) -> None:
        # Not on a thread: another runtime may use the same tokenizer, and two threads must not use it at once.
        texts = await texts_of(self._events, self.tokenizer)
        await self._on_a_thread(lambda: self._put(render(self._events, texts, num_lost=self._num_lost)))
