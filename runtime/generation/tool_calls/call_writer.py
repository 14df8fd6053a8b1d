"""Calls as a model writes them, by the layout of its format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.generation.tool_calls.argument_values import kind_of
from runtime.generation.tool_calls.call_format import CallFormat, CallLayout


def written_calls(format: CallFormat, layout: CallLayout, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, each a function's name and its arguments, in a layout of the format."""
    texts = [_call(layout, name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    begin, end = layout.block
    if layout.between_calls is not None:
        texts = [layout.between_calls.join(texts)]
    return "\n".join(f"{format.start}{begin}{text}{end}{format.end}" for text in texts)


def _call(layout: CallLayout, name: str, arguments: Mapping[str, Any], number: int) -> str:
    if layout.key is None:
        body = _json(arguments)
    else:
        listed = [_argument(layout, layout.key, key, value) for key, value in arguments.items()]
        body = layout.between_arguments.join(listed)
    head = layout.head.replace("{name}", name).replace("{number}", str(number))
    return f"{_with_newlines(head)}{body}{_with_newlines(layout.tail)}"


def _argument(layout: CallLayout, begin: str, key: str, value: Any) -> str:
    kind = kind_of(_json(value)) or "null"
    begin = begin.replace("{key}", key).replace("{type}", "number" if kind == "integer" else kind)
    return f"{_with_newlines(begin)}{_value(layout, value)}{_with_newlines(layout.value_end)}"


def _value(layout: CallLayout, value: Any) -> str:
    match layout.values:
        case "python":
            return repr(value)
        case "text" if isinstance(value, str):
            begin, end = layout.quotation if any(character in value for character in "<&\n") else ("", "")
            return f"{begin}{value}{end}"
        case "text" | "json":
            return _json(value)
    return _quoted(value, layout.values)


def _quoted(value: Any, quotation: str) -> str:
    """A value in Gemma's syntax, whose strings have quotation marks of their own."""
    if isinstance(value, str):
        return f"{quotation}{value}{quotation}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_quoted(each, quotation)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(each, quotation) for each in value) + "]"
    return _json(value)


def _with_newlines(text: str) -> str:
    """A text of a layout with its optional newlines."""
    return text.replace("\0", "\n")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
