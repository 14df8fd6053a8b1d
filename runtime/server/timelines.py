"""What the models did for the answers that somebody looks at: as it happens, and as a page afterwards."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import trio

from protocol.trace import Event, Instant, Span
from runtime.tracing.drafter_states import DrafterState, drafter_state
from runtime.tracing.timeline import render, texts_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Of the answers that were looked at last, so many are remembered, and of each so much: some 3,000 tokens.
MOST_ANSWERS = 32
MOST_EVENTS = 30_000


class Record:
    """What happened in one generation."""

    def __init__(self, opened: list[Instant], began: float) -> None:
        """From its beginning, as far as it has begun.

        Args:
            opened: what has happened by now.
            began: when its stream did, in seconds on the clock of events.
        """
        self.events: list[Event] = list(opened)
        self.num_lost = 0
        self._began = began
        self._num_told = 0
        self._drafter: DrafterState | None = None

    def add(self, event: Event) -> None:
        """Take note of an event; beyond so many, only of that."""
        if len(self.events) == MOST_EVENTS:
            self.num_lost += 1
            return
        self.events.append(event)

    def news(self) -> dict[str, list[dict[str, Any]]]:
        """The spans and the changes of the drafter's state since the last call, in seconds since the stream began.

        See `Speculation` in `runtime.server.openai.responses`.
        """
        fresh, self._num_told = self.events[self._num_told :], len(self.events)
        spans, changes = [], []
        for event in fresh:
            if isinstance(event, Span):
                spans.append(
                    {
                        "actor": event.actor,
                        "kind": event.kind,
                        "began": round(event.began - self._began, 6),
                        "ended": round(event.ended - self._began, 6),
                        "round": event.round,
                    }
                )
            elif (state := drafter_state(self._drafter, event)) != self._drafter:
                self._drafter = state
                changes.append({"at": round(event.at - self._began, 6), "state": state})
        return {"spans": spans, "drafter": changes}


class Timelines:
    """Keeps records of the generations that are watched; to be given to `runtime.open` as its trace."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._records: OrderedDict[str, tuple[int, Record]] = OrderedDict()
        self._by_session: dict[int, Record] = {}
        self._opened: list[Instant] = []  # of the session that was opened last

    def __call__(self, event: Event) -> None:
        """Take note of an event, if anybody watches."""
        if event.session is None:
            return
        if (record := self._by_session.get(event.session)) is not None:
            record.add(event)
        elif isinstance(event, Instant) and event.kind == "open":
            if self._opened and self._opened[0].session != event.session:
                self._opened.clear()
            self._opened.append(event)

    def watch(self, id: str, session: int, began: float) -> Record:
        """Keep a record of a session from now on.

        Args:
            id: to find the record by, later.
            session: that was begun just now: nothing else may have happened since but its opening.
            began: when that was; see `Record`.
        """
        opened = [instant for instant in self._opened if instant.session == session]
        record = self._by_session[session] = Record(opened, began)
        self._records[id] = session, record
        if len(self._records) > MOST_ANSWERS:
            _, (oldest, _) = self._records.popitem(last=False)
            self._by_session.pop(oldest, None)
        return record

    async def page(self, id: str, tokenizer: TokenizerWrapper | None) -> str | None:
        """The timeline of a generation as HTML; None where it is not remembered.

        Cancellation: nothing has happened.
        """
        if id not in self._records:
            return None
        _, record = self._records[id]
        events = list(record.events)
        texts = await texts_of(events, tokenizer)
        return await trio.to_thread.run_sync(lambda: render(events, texts, num_lost=record.num_lost))
