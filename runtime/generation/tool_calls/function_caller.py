"""The functions of a conversation at work: the calls of an answer become messages with their results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from protocol.errors import ConversationBusyError
from runtime.generation.tool_calls.events import ToolCall
from runtime.generation.tool_calls.functions import (
    Functions,
    error_text,
    is_async,
    result_message,
    result_text,
    unknown_text,
)

# Rounds of calls in one turn, after which `generate` leaves an answer as it is, with its calls.
MAX_TOOL_ROUNDS = 8


class FunctionCaller:
    """Calls the functions of one conversation, for one answer at a time.

    Attributes:
        functions: that the model may call.
    """

    def __init__(self, functions: Functions) -> None:
        """Nothing is called yet."""
        self.functions = functions
        self._is_calling = False

    def check_idle(self, what: str) -> None:
        """Raises: ConversationBusyError: functions are being called, and `what` has to wait for their results."""
        if self._is_calling:
            raise ConversationBusyError(
                f"cannot {what} while the conversation's functions are being called; wait for them, or cancel the call"
            )

    async def results(
        self, calls: Sequence[ToolCall], call_function: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> list[dict[str, Any]]:
        """Call functions, one after the other, and return the messages with their results.

        Args:
            calls: of the model.
            call_function: calls a function that is not async; async ones are awaited here.
        """
        with self._calling():
            return [result_message(call, await self._result_of(call, call_function)) for call in calls]

    async def _result_of(self, call: ToolCall, call_function: Callable[[Callable[[], Any]], Awaitable[Any]]) -> str:
        function = self.functions.function_of(call)
        if function is None:
            return unknown_text(call)
        # The user's code, with arguments that a model wrote.
        try:
            if is_async(function):
                return result_text(await function(**call.values))
            return result_text(await call_function(partial(function, **call.values)))
        except Exception as error:
            return error_text(error)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False
