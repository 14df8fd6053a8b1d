"""Chat messages with tool calls and their results, in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from runtime.generation.tool_calls.events import Answer, ToolCall

if TYPE_CHECKING:
    from runtime.generation.reasoning import ReasoningTracker


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of messages as chat templates take them.

    The arguments of calls are objects, not JSON as in OpenAI's form, and each result has its function's name. Empty
    lists of calls are left out, as some templates take any list for calls.
    """
    names: dict[Any, Any] = {}
    given = []
    for message in messages:
        message = dict(message)
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            message["tool_calls"] = [_call(call, names) for call in calls]
            if not calls:
                del message["tool_calls"]
        id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(id, str) and id in names:
            message.setdefault("name", names[id])
        given.append(message)
    return given


def reply_message(answer: ReasoningTracker, parts: Answer | None, *, has_template: bool) -> dict[str, Any]:
    """The message of an answer; `parts` has its calls told apart, and is None without tools."""
    if parts is not None and parts.calls:
        return parts.message
    answer = answer.remembered()
    if not has_template:
        return {"role": "assistant", "content": answer.text}
    if thinking := answer.thinking.strip():
        # Templates write the line breaks around the reasoning themselves.
        return {"role": "assistant", "content": answer.said.lstrip(), "reasoning_content": thinking}
    # Empty reasoning leaves its line breaks behind.
    return {"role": "assistant", "content": answer.said.lstrip() if answer.has_tags else answer.said}


def calls_without_results(messages: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls of the last message, if it is an answer that has some."""
    last = messages[-1] if messages else {}
    calls = last.get("tool_calls", ()) if last.get("role") == "assistant" else ()
    return tuple(ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls)


def _call(call: Any, names: dict[Any, Any]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(id := call.get("id"), str):
        names[id] = function.get("name")
    if isinstance(arguments := function.get("arguments"), str):
        # A malformed call of the model's stays text.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments or "{}")
    return {**call, "function": function}
