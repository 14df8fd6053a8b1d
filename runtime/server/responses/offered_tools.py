"""The tools of a request to `/v1/responses`, as functions of a chat, and the items of their calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs

from runtime.generation.tool_calls.events import ToolCall
from runtime.server.answers.chat import check_choice, function_of

# The types of tools that a model can call here, besides namespaces of these.
CALLABLE = ("function", "custom", "local_shell")

_TEXT = {"type": "string"}
_SHELL_ARGUMENTS: dict[str, Any] = {
    "command": {"type": "array", "items": _TEXT},
    "working_directory": _TEXT,
    "timeout_ms": {"type": "integer"},
    "env": {"type": "object", "additionalProperties": _TEXT},
    "user": _TEXT,
}
_NO_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
_MAX_NAME = 128


@attrs.frozen
class OfferedTool:
    """A tool of a request, which the model calls as a function.

    Attributes:
        name, namespace: as in the request.
        offered: the function; its name differs from every other one's.
    """

    type: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None
    offered: dict[str, Any]

    @property
    def place(self) -> dict[str, str]:
        """The name of a call of the tool, and its namespace, if it is in one."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}

    def item(self, call: ToolCall, *, is_whole: bool) -> tuple[str, dict[str, Any]] | None:
        """A call as an item of the output, of a tool that is no function; one that is cut off is empty.

        Returns: the first part of its id, and its fields. None if the arguments are not those of such an item.
        """
        if self.type == "custom":
            values = call.values if is_whole else {"input": ""}
            is_text = values.keys() == {"input"} and isinstance(values["input"], str)
            text = values["input"] if is_text else call.arguments  # all that the model wrote
            return "ctc", {"type": "custom_tool_call", "call_id": call.id, **self.place, "input": text}
        values = call.values if is_whole else {"command": []}
        known = {name: each for name, each in values.items() if name in _SHELL_ARGUMENTS}
        command = known.get("command")
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            return None
        return "lsh", {"type": "local_shell_call", "call_id": call.id, "action": {"type": "exec", "env": {}, **known}}


@attrs.frozen
class OfferedTools:
    """The tools of a request that a model may call, by the names of their functions, and those that are left out."""

    by_name: dict[str, OfferedTool]
    listed: Sequence[OfferedTool]
    left_out: Sequence[Any]

    @classmethod
    def of(cls, tools: Iterable[Any]) -> OfferedTools:
        """The tools of a request. Those of a namespace are told apart by its name in front of theirs."""
        given = list(_flat(tools))
        names = {tool.name for namespace, tool in given if namespace is None}
        listed, left_out = [], []
        for namespace, tool in given:
            if tool.type not in CALLABLE:
                left_out.append(tool)
                continue
            name = tool.name or (tool.type if tool.type == "local_shell" else "")
            unique = name
            if namespace is not None:
                full, number = _full_name(name, namespace), 1
                unique = full
                while unique in names:
                    number += 1
                    unique = f"{full[: _MAX_NAME - 5]}_{number}"
                names.add(unique)
            listed.append(OfferedTool(tool.type, name, namespace, _function(tool, unique)))
        return cls({tool.offered["function"].get("name"): tool for tool in listed}, listed, left_out)

    def name_of(self, name: str, namespace: str | None) -> str:
        """The name of the function that a call in the history is one of; the tool may no longer be there."""
        found = self._found(name, namespace)
        if len(found) == 1:
            return str(found[0].offered["function"]["name"])
        return name if namespace is None else _full_name(name, namespace)

    def chosen(self, choice: Any) -> tuple[list[dict[str, Any]], Any]:
        """The functions of the chat and its `tool_choice`.

        Raises: ErrorResponse: the choice asks for a call of a tool that is left out.
        """
        functions = [tool.offered for tool in self.listed]
        found = [] if choice is None or isinstance(choice, str) else self._chosen_by(choice)
        named = [function_of(name=tool.offered["function"]["name"]) for tool in found]
        if choice is None or isinstance(choice, str):
            wanted = choice or "auto"
        elif choice.type == "allowed_tools":
            wanted = choice.mode or "auto"
            if named:
                return functions, {"type": choice.type, choice.type: {"mode": wanted, "tools": named}}
            # All that is allowed is left out.
            functions = []
        elif len(named) == 1:
            return functions, named[0]
        else:
            wanted = choice.name or choice.type
        check_choice(wanted, functions, self.left_out)
        return functions, wanted

    def _chosen_by(self, choice: Any) -> list[OfferedTool]:
        """The tools that a choice, or an entry of one, names."""
        if choice.type == "allowed_tools":
            return [tool for each in choice.tools or () for tool in self._chosen_by(each)]
        if choice.type == "namespace":
            return [tool for tool in self.listed if tool.namespace == choice.name]
        return self._found(choice.name or choice.type, getattr(choice, "namespace", None))

    def _found(self, name: str, namespace: str | None) -> list[OfferedTool]:
        """The tool of a name; without a namespace, the one outside of all, else all of that name, or offered by it."""
        found = [tool for tool in self.listed if (tool.name, tool.namespace) == (name, namespace)]
        if found or namespace is not None:
            return found
        return [tool for tool in self.listed if name in (tool.name, tool.offered["function"].get("name"))]


def _flat(tools: Iterable[Any]) -> Iterator[tuple[str | None, Any]]:
    """Each tool with the name of its namespace."""
    for tool in tools:
        if tool.type == "namespace":
            yield from ((tool.name or "", inner) for inner in tool.tools or ())
        else:
            yield None, tool


def _function(tool: Any, name: str) -> dict[str, Any]:
    description = tool.description
    if tool.type == "function":
        return function_of(name=name or None, description=description, parameters=tool.parameters, strict=tool.strict)
    if tool.type == "local_shell":
        required, properties = "command", _SHELL_ARGUMENTS
        description = "Run a command on the user's machine."
    else:
        # The input is any text. A grammar for it is part of the description: a constrained call is a JSON object,
        # which the grammar does not describe.
        required, properties = "input", {"input": _TEXT}
        match tool.format:
            case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
                rule = f"The input must match this grammar ({syntax}):\n{definition}"
                description = f"{description}\n\n{rule}" if description else rule
    schema = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return function_of(name=name, description=description, parameters=schema)


def _full_name(name: str, namespace: str) -> str:
    joint = "" if not namespace or namespace.endswith("_") else "__"
    return _NO_NAME.sub("_", f"{namespace}{joint}{name}")[-_MAX_NAME:]
