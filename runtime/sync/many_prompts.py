"""What a plain thread holds of many generations at a time: their tokens as they come."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from protocol.errors import StreamBusyError
from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.bridge.stream import BridgeStream
from runtime.generation.token_reader import Token
from runtime.sync.thread import settled

if TYPE_CHECKING:
    from runtime.sync import Runtime


class TokenStreams(MergedHandle[Token]):
    """The tokens of many prompts as they come: an iterator over (index of the prompt, token), and a context manager.

    As `runtime.TokenStreams`, for plain threads; one thread at a time reads it.

    Cancellation: leaving `with`, `close` (which another thread may call while one waits for a token), a Ctrl-C while
    waiting, and dropping the last reference (which is what `break` does where there is no other) all end every
    generation. Each returns at once; the models are free after the forward pass that is running.
    """

    def __init__(self, relay: BridgeStream[MergedSource[Token], tuple[int, Token]], runtime: Runtime) -> None:
        """Made by `Runtime.stream_many`; as `MergedHandle`, and:

        Args:
            runtime: kept for as long as this: it is closed when nobody holds on to it any more.

        Raises: what beginning the generations raises.
        """
        super().__init__(relay)
        self._runtime = runtime
        self._in_use = threading.Lock()
        try:
            settled(relay.begun)
            self._begun()
        except BaseException:  # a Ctrl-C, too
            self._close()
            raise

    def __repr__(self) -> str:
        return f"<outrider sync.TokenStreams, {self._state}>"

    def __iter__(self) -> TokenStreams:
        return self

    def __next__(self) -> tuple[int, Token]:
        """The next token, with the index of its prompt.

        Raises: as `runtime.TokenStreams.__anext__`; `StreamBusyError` where another thread is waiting for a token.

        Interrupting: a Ctrl-C ends all generations.
        """
        is_ours = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                return self._next()
        except BaseException:
            # Whatever it is, the end of the texts included: nothing more comes.
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError("another thread is waiting for the next token; each is given once, to one thread")

    def close(self) -> None:
        """End all generations. Returns at once; closing twice is closing once. Any thread may close it."""
        self._close()

    def __enter__(self) -> TokenStreams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _next(self) -> tuple[int, Token]:
        source = self._begun()
        if self._must_ask(source):
            arrived = settled(self._relay.ask())
            self._arrived.extend(arrived)
        if (following := self._following(source)) is None:
            raise StopIteration
        return following
