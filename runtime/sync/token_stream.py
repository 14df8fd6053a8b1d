"""What a consumer in a plain thread holds: a stream of tokens, whose text is generated in trio's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from protocol.errors import StreamBusyError
from protocol.session_state import Commit
from protocol.statistics import Statistics
from runtime.bridge.handles import Commits, StreamHandle
from runtime.bridge.stream import BridgeStream
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import SessionFile
from runtime.sync.thread import settled

if TYPE_CHECKING:
    from runtime.sync import Runtime


class TokenStream(StreamHandle):
    """The tokens of one generation: an iterator, and a context manager.

    As `runtime.TokenStream`, for plain threads; one thread at a time reads it. The generation is under way from the
    moment the stream exists, as far ahead as its buffer goes.

    Cancellation: leaving `with`, `close` (which another thread may call while one waits for a token), a Ctrl-C while
    waiting, and dropping the last reference (which is what `break` does to a stream that has no other) all end the
    generation. Each returns at once; the models are free after the forward pass that is running.
    """

    _how_to_close = "close()"

    def __init__(
        self, relay: BridgeStream[Commits, Commit], unopened: Callable[[], Statistics], runtime: Runtime
    ) -> None:
        """Made by `Runtime.stream`; as `StreamHandle`, and:

        Args:
            runtime: kept for as long as this stream: it is closed when nobody holds on to it any more.

        Raises: what opening the stream raises.
        """
        super().__init__(relay, unopened)
        self._runtime = runtime
        self._in_use = threading.Lock()
        try:
            settled(relay.begun)
            self._begun()
        except BaseException:  # a Ctrl-C, too
            self._close()
            raise

    def __repr__(self) -> str:
        return f"<outrider sync.TokenStream, {self._state}>"

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Token:
        """The next token.

        Raises: as `runtime.TokenStream.__anext__`; `StreamBusyError` where another thread is waiting for a token.

        Interrupting: a Ctrl-C ends the generation.
        """
        is_ours = self._is_unread = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                return self._next()
        except BaseException:
            # Whatever it is, the end of the text included: nothing more comes.
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError("another thread is waiting for this stream's next token; a stream has one consumer")

    def save(self, path: SessionFile) -> int:
        """Save the stream to a file, for a `load_stream`, here or elsewhere; see `runtime.TokenStream.save`.

        Args, Returns, Raises: as there. A file object is used in another thread.

        Interrupting: a Ctrl-C leaves what was there, or, at the very last, the whole new file. The stream goes on.
        """
        return self._runtime._done_in_trio(self._writing(path))

    def close(self) -> None:
        """End the generation. Returns at once; closing twice is closing once. Any thread may close it."""
        self._close()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _next(self) -> Token:
        source = self._begun()
        if self._must_ask(source):
            arrived = settled(self._relay.ask())
            self._commits.extend(arrived)
        if not self._has_next(source):
            raise StopIteration
        token = source.reading.next_token()
        if token.finish_reason is not None:
            self._close()
        return token
