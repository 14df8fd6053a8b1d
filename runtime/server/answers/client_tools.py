"""The tools of any API as functions: all that a model calls here, and that a client runs.

A tool that a service would run is left out: nobody runs it here. It is named in the response's header, and a request
that asks for a call of it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.server.errors import ErrorResponse


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object of some properties."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}


def _edits(*further: str, inserted: str, **properties: Any) -> dict[str, Any]:
    """The arguments of a tool that views and edits files, as Anthropic documents them."""
    return _object(
        ("command",),
        command={"type": "string", "enum": ["view", "create", "str_replace", "insert", *further]},
        path=_TEXT,
        view_range={"type": "array", "items": _WHOLE},
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line=_WHOLE,
        **({} if inserted == "new_str" else {inserted: _TEXT}),
        **properties,
    )


# Anthropic's tools that the client runs, by the beginning of their type: what they do, and their arguments.
_ANTHROPIC: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a bash session, which goes on from call to call. restart: true begins a new session.",
        _object((), command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_2024": ("View, create and edit files.", _edits("undo_edit", inserted="new_str")),
    "text_editor_20250124": ("View, create and edit files.", _edits("undo_edit", inserted="new_str")),
    "text_editor_": ("View, create and edit files.", _edits(inserted="insert_text")),
    "memory_": (
        "View, create and edit the files of the memory, which are below /memories.",
        _edits("delete", "rename", inserted="insert_text", old_path=_TEXT, new_path=_TEXT),
    ),
}


def anthropic_function(type: str | None) -> tuple[str, dict[str, Any]] | None:
    """The description and the arguments of a tool of Anthropic's that the client runs; None for any other type."""
    return next((found for begin, found in _ANTHROPIC.items() if (type or "").startswith(begin)), None)


# The arguments of `local_shell` in OpenAI's responses.
SHELL_ARGUMENTS = _object(
    ("command",),
    command={"type": "array", "items": _TEXT},
    working_directory=_TEXT,
    timeout_ms=_WHOLE,
    env={"type": "object", "additionalProperties": _TEXT},
    user=_TEXT,
)

_CUSTOM_ARGUMENTS = _object(("input",), input=_TEXT)


def custom_function(name: str | None, description: str | None, format: Any) -> dict[str, Any]:
    """A custom tool of OpenAI's, whose input is any text, as a function of one text.

    A grammar for the input is part of the description: a constrained call is a JSON object, which it does not describe.
    """
    match format:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            rule = f"The input must match this grammar ({syntax}):\n{definition}"
            description = f"{description}\n\n{rule}" if description else rule
    return {"name": name, "description": description, "parameters": _CUSTOM_ARGUMENTS}


def custom_arguments(input: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({"input": input}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a call of a custom tool; of a call with other arguments, all that the model wrote."""
    values = json.loads(arguments)
    return str(values["input"]) if set(values) == {"input"} and isinstance(values["input"], str) else arguments


# --- tools that are left out ----------------------------------------------------------------------


def callable_in_chat(tool: Any) -> bool:
    """Whether a tool of a chat is a function; one of no known form counts as a function, and is refused later."""
    return not isinstance(tool, Mapping) or tool.get("type", "function") == "function"


def label_of(tool: Any) -> str:
    """The type of a tool that is left out, and its name where the type does not say it."""
    type, name = _type_and_name(tool)
    return f"{type}.{name}" if isinstance(name, str) and name not in str(type) else str(type)


def check_choice(choice: Any, offered: Sequence[Any], left_out: Sequence[Any]) -> None:
    """Check that the call for which a request asks can be written.

    Args:
        choice: "none", "auto", "required", or a tool's name or type.
        offered, left_out: the tools of the request that the model may call, and the others.

    Raises: ErrorResponse: it would be the call of a tool that is left out.
    """
    if choice in ("none", "auto") or any(choice in ("required", _type_and_name(tool)[1]) for tool in offered):
        return
    if asked := [tool for tool in left_out if choice == "required" or choice in _type_and_name(tool)]:
        raise ErrorResponse(
            400,
            f"{', '.join(map(label_of, asked))[:200]} cannot be called here, and tool_choice asks for it: the model "
            "calls functions, which the client runs; offer a function, or leave tool_choice out",
            param="tool_choice",
        )


def _type_and_name(tool: Any) -> tuple[Any, Any]:
    if not isinstance(tool, Mapping):
        return tool.type, tool.name
    inner = tool.get("function") or tool.get("custom")
    return tool.get("type"), tool.get("name") or (inner.get("name") if isinstance(inner, Mapping) else None)
