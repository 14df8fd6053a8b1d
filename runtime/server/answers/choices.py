"""The choices of a response: the generations of one request, each with its own serializer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.statistics import Statistics
from runtime.server.answers.serializer import Serializer

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token
    from runtime.generation.token_stream import TokenStream


@attrs.define
class Choice:
    """One generation of a request, which has begun.

    Attributes:
        serializer: of its part of the response.
        stream: gives its tokens; None where nothing is to be generated.
        statistics: of the generation so far.
        num_prompt_tokens: tokens of its prompt.
        tokens: all of its tokens, for a response as one body.
    """

    serializer: Serializer
    stream: TokenStream | None
    statistics: Callable[[], Statistics]
    num_prompt_tokens: int = 0
    tokens: Sequence[Token] = ()

    def finish(self, tokens: Sequence[Token]) -> None:
        """Keep all tokens, and the statistics as they are now, from which another thread may make the response."""
        self.tokens, statistics = tokens, self.statistics()
        self.statistics = lambda: statistics


Begin = Callable[[Sequence[Choice]], Choice]
"""Begins one choice of a response; it is given those before it. Raises OutriderError where it cannot."""


class Choices:
    """The choices of one response, which begin in order and a few at a time; a context manager that ends all of them.

    The models take up generations in the order in which they were begun. So a request for many texts does not keep the
    requests of others waiting for all of them.

    Attributes:
        begun: those that have begun, in order.
    """

    def __init__(self, begins: Iterable[Begin], max_at_once: int | None) -> None:
        """None has begun.

        Args:
            begins: begin one each, at least one.
            max_at_once: how many generations may be at work or wait for the models, >= 1; None for all.
        """
        self.begun: list[Choice] = []
        self._begins = iter(begins)
        self._max_at_once = math.inf if max_at_once is None else max_at_once
        self._is_closed = False

    async def begin_first(self) -> None:
        """Begin as many as may be at work at once; at least one.

        Raises: OutriderError: one cannot begin.
        """
        while len(self.begun) < self._max_at_once and await self.begin_next() is not None:
            pass

    async def begin_next(self) -> int | None:
        """Begin the next one, once another has ended. Returns its index; None if there is none.

        Raises: OutriderError: it cannot begin.

        Cancellation: nothing has begun.
        """
        # To begin one takes a while where the prompt is long.
        await trio.lowlevel.checkpoint()
        begin = None if self._is_closed else next(self._begins, None)
        if begin is None:
            return None
        self.begun.append(begin(self.begun))
        return len(self.begun) - 1

    def close(self) -> None:
        """End all generations, and begin no other."""
        self._is_closed = True
        for choice in self.begun:
            if choice.stream is not None:
                choice.stream.close()

    def __enter__(self) -> Choices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
