"""Many prompts at a time, for plain threads: the tokens of their texts as they come."""

from __future__ import annotations

from collections.abc import Callable

from runtime.bridge.many_prompts import MergedHandle, MergedSource
from runtime.generation.merged_streams import Merged
from runtime.generation.token_reader import Token
from runtime.sync.bridge import SyncBridge
from runtime.sync.iteration import BlockingIteration


class TokenStreams(BlockingIteration[MergedSource[Token], tuple[int, Token], tuple[int, Token]], MergedHandle[Token]):
    """The tokens of many prompts as they come: an iterator over (index of the prompt, token), and a context manager.

    `runtime.TokenStreams` for plain threads; one thread at a time reads it.

    Cancellation: leaving `with`, `close` (which another thread may call while one waits for a token), a Ctrl-C while
    waiting, and dropping the last reference (which is what `break` does to one that has no other) all end every
    generation. Each returns at once; the models are free after the forward pass that is running.
    """

    def __init__(self, bridge: SyncBridge, begin: Callable[[], Merged[Token]]) -> None:
        """Made by `Runtime.stream_many`.

        Args:
            bridge: to the runtime; keeps it from closing by itself when its own handle is dropped.
            begin: begins the generations in the trio thread.

        Raises: what beginning the generations raised.
        """
        super().__init__(bridge, lambda: MergedSource(begin()))

    def __repr__(self) -> str:
        return f"<outrider sync.TokenStreams, {self._state}>"
