"""Python functions as tools: their schemas, and calling them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from transformers.utils.chat_template_utils import get_json_schema

from protocol.errors import ConversationBusyError, SettingsError
from protocol.reprs import shown
from runtime.generation.tool_calls.events import ToolCall

CallFunction = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function that is not async."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool in OpenAI's form, from its signature and its docstring.

    Each parameter needs a type that JSON can have, and a line in the docstring's section "Args:".

    Raises: SettingsError: the function does not meet this.
    """
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise SettingsError(f"a tool must be a function with a name, got {shown(function)}; wrap it in a function")
    # It raises its own errors, and others for types that it does not know.
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise SettingsError(
            f"the function {name!r} cannot be described to a model: {error}; give each parameter a type, and describe "
            'the function and each of them (section "Args:") in its docstring'
        ) from error
    schema["function"].pop("return", None)
    return schema


def _refuse(awaitable: Any) -> NoReturn:
    if inspect.iscoroutine(awaitable):
        awaitable.close()  # else Python warns that it was never awaited
    raise TypeError("the tool is async, and nothing awaits it here; use runtime.aio.open")


# Most rounds of calls in one turn, after which `generate` leaves an answer as it is, with its calls.
MAX_TOOL_ROUNDS = 8


class Functions:
    """The functions that the model may call in a conversation, for one answer at a time."""

    _is_calling = False

    def __init__(self, functions: Sequence[Callable[..., Any]], *, may_be_async: bool = True) -> None:
        """Check the functions of a conversation.

        Raises: SettingsError: as `schema_of`; also if one is no function, two have one name, or one is async and the
            caller cannot await it.
        """
        if isinstance(functions, (str, bytes, Mapping)) or not isinstance(functions, Sequence):
            raise SettingsError(f"tools must be a list of functions, got {shown(functions)}")
        self._functions: dict[str, Callable[..., Any]] = {}
        self.listed = tuple(functions)
        self._may_be_async = may_be_async
        self.schemas: list[dict[str, Any]] = []  # in OpenAI's form
        for function in self.listed:
            if not callable(function):
                raise SettingsError(
                    f"a conversation calls its tools, which must be functions, got {shown(function)}; for tools that "
                    "you call yourself, use stream() with messages"
                )
            schema = schema_of(function)
            name = schema["function"]["name"]
            if name in self._functions:
                raise SettingsError(f"two tools have the name {name!r}; give each its own")
            if not may_be_async and inspect.iscoroutinefunction(function):
                raise SettingsError(f"the tool {name!r} is async, and nothing awaits it here; use runtime.aio.open")
            self._functions[name] = function
            self.schemas.append(schema)

    def check_idle(self, what: str, is_answering: bool, how_to_close: str) -> None:
        """Raises: ConversationBusyError: `what` has to wait for the end of an answer, or for results of functions."""
        if is_answering:
            raise ConversationBusyError(
                f"cannot {what} while an answer is under way; read it to its end, or close its stream with "
                f"{how_to_close}"
            )
        if self._is_calling:
            raise ConversationBusyError(
                f"cannot {what} while the conversation's functions are being called; wait for them, or cancel the call"
            )

    async def results(self, calls: Sequence[ToolCall], call_function: CallFunction) -> list[dict[str, Any]]:
        """Call functions, one after the other, and return the messages with their results."""
        messages = []
        self._is_calling = True
        try:
            for call in calls:
                text = await self._called(call, call_function)
                # Half characters, such as in names of files, would make each later prompt invalid.
                text = text.encode(errors="backslashreplace").decode()
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        finally:
            self._is_calling = False
        return messages

    async def _called(self, call: ToolCall, call_function: CallFunction) -> str:
        """The result for the model: text as it is, anything else as JSON, or the error."""
        if (function := self._functions.get(call.name)) is None:
            return f"Error: there is no function {call.name!r}"
        # The user's code, with arguments that a model wrote.
        try:
            if inspect.iscoroutinefunction(function):
                result = function(**call.values)
            else:
                result = await call_function(partial(function, **call.values))
            # A function that wraps an async one is not async itself.
            if inspect.isawaitable(result):
                result = await result if self._may_be_async else _refuse(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"
