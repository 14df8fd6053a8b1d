"""A stream of tokens for plain threads, whose text is generated in the trio thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from protocol.session_state import Commit
from runtime.bridge.handles import CommitSource, StreamHandle
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion, SessionFile, completion_of
from runtime.generation.token_stream import TokenStream as TrioTokenStream
from runtime.sync.bridge import SyncBridge
from runtime.sync.iteration import BlockingIteration


class TokenStream(BlockingIteration[CommitSource, Commit, Token], StreamHandle):
    """The tokens of one generation: an iterator, and a context manager.

    `runtime.TokenStream` for plain threads; one thread at a time reads it. The generation starts when the stream is
    made, and runs ahead of its consumer as far as its buffer allows.

    Cancellation: leaving `with`, `close` (which another thread may call while one waits for a token), a Ctrl-C while
    waiting, and dropping the last reference (which is what `break` does to a stream that has no other) all end the
    generation. Each returns at once; the models are free after the forward pass that is running.
    """

    _how_to_close = "close()"

    def __init__(self, bridge: SyncBridge, open_stream: Callable[[], TrioTokenStream]) -> None:
        """Made by `Runtime.stream`.

        Args:
            bridge: to the runtime; keeps it from closing by itself when its own handle is dropped.
            open_stream: opens the stream in the trio thread.

        Raises: what opening the stream raised.
        """
        super().__init__(bridge, lambda: CommitSource(open_stream()))

    def __repr__(self) -> str:
        return f"<outrider sync.TokenStream, {self._state}>"

    def save(self, path: SessionFile) -> int:
        """Save the stream to a file, for a `load_stream`, here or elsewhere; see `runtime.TokenStream.save`.

        Args, Returns, Raises: as there. A file object is used in another thread.

        Interrupting: a Ctrl-C leaves the old file, or, at the very last, the whole new one. The stream goes on.
        """
        return self._bridge.call(self._make_save(path))


def complete(stream: TokenStream) -> Completion:
    """Read a stream to its end.

    Raises: as `TokenStream.__next__`.

    Interrupting: a Ctrl-C ends the generation; the text generated so far is lost.
    """
    with stream:
        return completion_of(cast(Any, stream), list(stream))
