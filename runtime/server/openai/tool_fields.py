"""The fields of a chat request that are about tools, in their newer and their older form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.errors import SettingsError
from runtime.generation.tool_calls.tools import Tools, tools_of
from runtime.server.errors import ErrorResponse, short_json

if TYPE_CHECKING:
    from runtime.server.openai.requests.chat import ChatRequest
    from runtime.server.openai.requests.messages import Message

# The one call of a message in the older form needs an id in the newer.
_OLD_CALL_ID = "call_0"


def tools_of_request(request: ChatRequest) -> Tools | None:
    """The tools of a request; None where the model may call nothing.

    Raises: ErrorResponse: a tool or the choice is invalid.
    """
    if request.functions is not None:
        listed: list[Any] | None = [{"type": "function", "function": function} for function in request.functions]
        choice = _choice(request.function_call, "function_call")
        is_parallel = None
    else:
        listed, choice = request.tools, _choice(request.tool_choice, "tool_choice")
        is_parallel = request.parallel_tool_calls
    try:
        tools = tools_of(listed, choice, is_parallel=is_parallel)
    except SettingsError as error:
        raise ErrorResponse(400, str(error), param="tools") from error
    return tools


def calls_and_results(message: Message) -> dict[str, Any]:
    """What a message for a chat template has of calls and their results: in the newer form, which templates know."""
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = message.tool_calls
    elif message.function_call is not None:
        fields["tool_calls"] = [{"id": _OLD_CALL_ID, "type": "function", "function": message.function_call}]
    if message.role in ("tool", "function"):
        fields["role"] = "tool"
        id = message.tool_call_id or (_OLD_CALL_ID if message.role == "function" else None)
        fields |= {key: value for key, value in (("tool_call_id", id), ("name", message.name)) if value is not None}
    return fields


def _choice(given: Any, field: str) -> str:
    """A choice as one word: what the model must do, or the name of the function that it must call."""
    match given:
        case None:
            return "auto"
        case str():
            return given
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise ErrorResponse(
        400,
        f'{field} must be "none", "auto", "required" or {{"type": "function", "function": {{"name": "…"}}}}, '
        f"got {short_json(given)}",
        param=field,
    )
