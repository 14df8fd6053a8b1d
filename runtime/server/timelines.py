"""Timelines: the models' activity for the streams that a client watches, in chunks and as a page afterwards."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import attrs
from typing_extensions import TypedDict

from protocol.trace import Event, Instant, Span
from runtime.tracing.timeline import DRAFTER_STATES, DrafterState

# How many of the latest timelines are kept, and how many events of each: those of some 3,000 tokens.
MAX_TIMELINES = 32
MAX_EVENTS = 30_000


class WorkSpan(TypedDict):
    """A job of a model: its start and end in seconds since the stream began, and how many streams shared it."""

    actor: Literal["target", "draft"]
    kind: str
    began: float
    ended: float
    round: int | None
    streams: int


class DrafterChange(TypedDict):
    """A change of the drafter's state, at a time in seconds since the stream began.

    "resting": it leaves rounds to the target, where plain decoding is faster; "overdue": it took too long, and the
    target goes on without it; "left": it takes no further part in this stream.
    """

    at: float
    state: DrafterState


class ModelActivity(TypedDict):
    """Jobs of the models and changes of the drafter's state, since the last chunk."""

    spans: list[WorkSpan]
    drafter: list[DrafterChange]


@attrs.define
class Timeline:
    """The events of one stream, including passes that it shared with others."""

    session: int
    events: list[Event]
    _began: float  # when the stream began, on the clock of events
    num_lost: int = 0  # events beyond `MAX_EVENTS`
    _num_reported: int = 0
    _drafter_state: DrafterState | None = None

    def add(self, event: Event) -> None:
        """Record an event, or count it as lost."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_lost += 1

    def new_activity(self) -> ModelActivity:
        """The models' jobs and the changes of the drafter's state since the last call."""
        new_events = self.events[self._num_reported :]
        self._num_reported += len(new_events)
        spans: list[WorkSpan] = []
        changes: list[DrafterChange] = []
        for event in new_events:
            if isinstance(event, Span):
                spans.append(
                    {
                        "actor": event.actor,
                        "kind": event.kind,
                        "began": self._seconds(event.began),
                        "ended": self._seconds(event.ended),
                        "round": event.round_of(self.session),
                        "streams": len(event.sessions),
                    }
                )
            elif (state := DRAFTER_STATES.get(event.kind)) is not None and state != self._drafter_state:
                self._drafter_state = state
                changes.append({"at": self._seconds(event.at), "state": state})
        return {"spans": spans, "drafter": changes}

    def _seconds(self, at: float) -> float:
        """Seconds since the stream began, to the microsecond."""
        return round(at - self._began, 6)


class Timelines:
    """The timelines of the streams that are watched; pass it to `runtime.open` as `trace`."""

    def __init__(self) -> None:
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()  # by the id of the response
        self._by_session: dict[int, Timeline] = {}
        self._opened: list[Instant] = []  # events of the session that was opened last

    def __call__(self, event: Event) -> None:
        """Record an event for the sessions that are watched; a pass that several share, for each of them."""
        if isinstance(event, Span):
            for session in event.sessions:
                if session in self._by_session:
                    self._by_session[session].add(event)
        elif event.session in self._by_session:
            self._by_session[event.session].add(event)
        elif event.kind == "open":
            if self._opened and self._opened[0].session != event.session:
                self._opened.clear()
            self._opened.append(event)

    def watch(self, id: str, session: int, began: float) -> Timeline:
        """Record a session from now on, for a response: one that was opened just now, and has had no other event yet.

        Args:
            began: when its stream began, in seconds on the clock of events.
        """
        opened: list[Event] = [instant for instant in self._opened if instant.session == session]
        timeline = self._timelines[id] = self._by_session[session] = Timeline(session, opened, began)
        if len(self._timelines) > MAX_TIMELINES:
            _, oldest = self._timelines.popitem(last=False)
            self._by_session.pop(oldest.session, None)
        return timeline

    def get(self, id: str) -> Timeline | None:
        """The timeline of a response; None if there is none, or no longer."""
        return self._timelines.get(id)
