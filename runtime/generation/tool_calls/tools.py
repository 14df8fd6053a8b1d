"""Tools: the functions that a model may call in a request, and Python functions as tools, which conversations call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils.chat_template_utils import get_json_schema

from protocol.errors import ConversationBusyError, PromptError, SettingsError
from protocol.reprs import shown
from protocol.settings_keywords import SettingsArguments
from runtime.generation.tool_calls.call_format import NAME, CallFormat, call_format
from runtime.generation.tool_calls.events import ToolCall

# Longer lists fill any context.
MAX_TOOLS = 1024
# Most tools of a grammar: they take a second to compile, and llguidance gives up at some thousand arguments.
_MAX_HELD_TOOLS = 256


@attrs.frozen
class Tools:
    """The functions that a model may call in an answer."""

    # In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
    listed: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required"] | str = "auto"  # a name: it must call that function
    is_parallel: bool = True  # whether the answer may have more than one call
    allowed: frozenset[str] | None = None  # names of those that may be called; all are described to the model

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != "auto"

    @property
    def callable(self) -> list[Mapping[str, Any]]:
        """The functions that may be called."""
        named = self.allowed if self.choice in ("auto", "required") else {self.choice}
        return [tool for tool in self.listed if named is None or tool["function"]["name"] in named]

    @property
    def is_strict(self) -> bool:
        """Whether a function asks for calls that follow its schema."""
        return any(tool["function"].get("strict") for tool in self.listed)

    @property
    def not_strict(self) -> dict[str, Any]:
        """By their names, the schemas that may be left out of a grammar, of the functions that `choice` allows."""
        functions = [tool["function"] for tool in self.callable]
        return {function["name"]: function["parameters"] for function in functions if not function.get("strict")}

    def alone(self, name: str) -> Tools:
        """One of the functions, which must be called."""
        listed = tuple(tool for tool in self.listed if tool["function"]["name"] == name)
        return Tools(listed, choice=name, is_parallel=False)

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must hold the model to a call, to a schema, to one call, or to the allowed functions."""
        return self.must_call or not self.is_parallel or self.is_strict or self.allowed is not None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return {"tools": [dict(tool) for tool in self.listed]}


class StreamArguments(SettingsArguments, total=False):
    """The keyword arguments of `Runtime.stream`: settings, and tools.

    Attributes:
        tools: functions that the model may call: Python functions, whose signature and docstring are described to the
            model; or in OpenAI's form. The stream calls none of them.
        tool_choice: "auto", the default: the model decides; "required": it must call one; the name of one that it must
            call; "none": as without tools.
        parallel_tool_calls: whether there may be several calls in one answer; by default only with "auto". If a call is
            required, 16 at most.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: str
    parallel_tool_calls: bool


# The arguments beside the settings.
TOOL_ARGUMENTS = tuple(
    name for name in StreamArguments.__annotations__ if name not in SettingsArguments.__annotations__
)


def taken_tools(arguments: dict[str, Any]) -> Tools | None:
    """Take the tools out of keyword arguments, which leaves the settings.

    Raises: SettingsError: as `tools_of`, and as `schema_of`.
    """
    listed = arguments.pop("tools", None)
    choice = arguments.pop("tool_choice", "auto")
    is_parallel = arguments.pop("parallel_tool_calls", None)
    if isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)):
        listed = [schema_of(tool) if callable(tool) else tool for tool in listed]
    return tools_of(listed, choice, is_parallel=is_parallel)


def split_tools(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keyword arguments of a stream into those about tools, which are checked, and the settings.

    Raises: SettingsError: as `taken_tools`.
    """
    taken_tools(settings := dict(arguments))
    return {name: value for name, value in arguments.items() if name not in settings}, settings


def tools_of(
    listed: Sequence[Mapping[str, Any]] | None,
    choice: str = "auto",
    *,
    is_parallel: bool | None = None,
    allowed: Sequence[str] | None = None,
) -> Tools | None:
    """The tools of a request, checked; None if the model may call nothing.

    Args:
        listed: in OpenAI's form, or without the "type" around the function.
        choice, allowed: as of `Tools`, or "none".
        is_parallel: None: only with "auto", since a model that must call and may go on often repeats its call.

    Raises: SettingsError: a tool is not of that form, two have one name, the choice or `allowed` names none, or they
        are too many.
    """
    if listed is not None and (isinstance(listed, (str, bytes, Mapping)) or not isinstance(listed, Sequence)):
        raise SettingsError(f"tools must be a list, got {shown(listed)}; put a single tool in a list")
    if len(listed or ()) > MAX_TOOLS:
        raise SettingsError(f"there may be {MAX_TOOLS} tools at most, got {len(listed or ())}; leave some out")
    checked = tuple(_checked_tool(f"tools[{i}]", tool) for i, tool in enumerate(listed or ()))
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise SettingsError(f"two tools have the name {name!r}; give each its own")
    if choice == "none" or (choice == "auto" and not checked):
        return None
    if not isinstance(choice, str) or choice not in ("auto", "required", *names):
        known = ", ".join(map(repr, names[:20])) or "none were given"
        raise SettingsError(
            f'tool_choice must be "none", "auto", "required" or the name of a tool ({known}), got {shown(choice)}'
        )
    if not checked:
        raise SettingsError(f"tool_choice {choice!r} needs tools; give some, or leave it out")
    if allowed is not None and not (allowed and set(allowed) <= set(names)):
        known = ", ".join(map(repr, names[:20]))
        raise SettingsError(f"the allowed tools must be some of the tools ({known}), got {shown(list(allowed))}")
    only = None if allowed is None or set(allowed) == set(names) else frozenset(allowed)
    tools = Tools(checked, choice, choice == "auto" if is_parallel is None else bool(is_parallel), only)
    if tools.needs_grammar and len(tools.callable) > _MAX_HELD_TOOLS:
        raise SettingsError(
            f"a grammar can hold a model to {_MAX_HELD_TOOLS} tools at most, got {len(tools.callable)}; leave some "
            'out, or leave tool_choice at "auto", and strict and parallel_tool_calls out'
        )
    return tools


def check_callable(tools: Tools, tokenizer: TokenizerWrapper | None) -> CallFormat | None:
    """The format in which the model may call. None if it has none: all of its text is content then, as in mlx-lm.

    Raises: PromptError: it has none, and the choice asks for a call.
    """
    format = call_format(tokenizer)
    if format is None and tools.must_call:
        raise PromptError(
            f"tool_choice {tools.choice!r} asks for a call, and mlx-lm knows no format of calls for this model's "
            'tokenizer; take a model whose chat template has tools, or "auto"'
        )
    return format and attrs.evolve(format, is_parallel=tools.is_parallel)


def _checked_tool(where: str, tool: Any) -> dict[str, Any]:
    form = 'give {"type": "function", "function": {"name": "…", "parameters": {…}}}'
    if not isinstance(tool, Mapping):
        raise SettingsError(f"{where} must be a mapping, got {shown(tool)}; {form}")
    if tool.get("type", "function") != "function":
        raise SettingsError(f"{where} is of type {shown(tool['type'])}, and only functions can be called; {form}")
    function = tool.get("function", tool if "name" in tool else None)
    if not isinstance(function, Mapping):
        raise SettingsError(f"{where} has no function; {form}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingsError(
            f"{where} must have a name of 1 to 128 letters, digits and any of _.:- for its function, got {shown(name)}"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise SettingsError(f"{where}.parameters must be a JSON schema, got {shown(parameters)}; {form}")
    # Some templates and parsers need the parameters.
    return {
        "type": "function",
        "function": {
            **{key: value for key, value in function.items() if key != "type" and value is not None},
            "parameters": dict(parameters) if parameters else {"type": "object", "properties": {}},
        },
    }


# --- Python functions as tools --------------------------------------------------------------------


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
