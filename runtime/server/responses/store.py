"""The responses that the server keeps in memory, so that later requests can continue them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress

import attrs


@attrs.frozen
class StoredResponse:
    """A response that is kept, as JSON."""

    body: bytes
    messages: bytes  # of its chat, up to and with the answer, without the instructions
    items: dict[str, bytes]  # of its output, by their ids

    @property
    def num_bytes(self) -> int:
        """Size of its JSON."""
        return len(self.body) + len(self.messages) + sum(map(len, self.items.values()))


@attrs.define(eq=False)
class ResponseStore:
    """Responses by id, within bounds; the one that was used least recently is dropped first.

    Other threads may call its methods: those that parse bodies of requests, and those that make responses.
    """

    _max_responses: int
    _max_bytes: int  # of all of their JSON together
    _responses: OrderedDict[str, StoredResponse] = attrs.field(init=False, factory=OrderedDict)
    _owners: dict[str, str] = attrs.field(init=False, factory=dict)  # ids of responses by ids of their items
    _num_bytes: int = attrs.field(init=False, default=0)
    # Not for `get` and `item`: they use single operations on dictionaries.
    _changing: threading.RLock = attrs.field(init=False, factory=threading.RLock)

    def put(self, id: str, response: StoredResponse) -> None:
        """Keep a response, with a new id; one that is larger than the bound is not kept, and drops no other."""
        if response.num_bytes > self._max_bytes:
            return
        with self._changing:
            self._responses[id] = response
            self._owners |= dict.fromkeys(response.items, id)
            self._num_bytes += response.num_bytes
            while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
                self.delete(next(iter(self._responses)))

    def get(self, id: str) -> StoredResponse | None:
        """A response, which counts as used now; None if it is not kept."""
        response = self._responses.get(id)
        with suppress(KeyError):  # another thread may drop it at this moment
            self._responses.move_to_end(id)
        return response

    def item(self, id: str) -> bytes | None:
        """An item of the output of any response, as JSON; None if it is not kept."""
        response = self._responses.get(self._owners.get(id, ""))
        return None if response is None else response.items.get(id)

    def delete(self, id: str) -> bool:
        """Drop a response. Returns whether it was kept."""
        with self._changing:
            if (response := self._responses.pop(id, None)) is None:
                return False
            self._num_bytes -= response.num_bytes
            for item in response.items:
                self._owners.pop(item, None)
            return True
