"""The layouts of calls: the text that a model writes between the markers of a block, for grammars.

In these texts, "{name}" is the function's name, "{key}" an argument's, "{type}" its type, "{number}" a whole number.
OPTIONAL_NEWLINE may be a newline, or nothing: some versions of a format have one there, and the parser does not mind.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

OPTIONAL_NEWLINE = "\0"


@attrs.frozen
class CallLayout:
    """The layout of one call.

    Attributes:
        head: before the arguments.
        tail: after them.
        key: before each argument; None where the arguments are one JSON object.
        value_end: after each argument.
        between_arguments: between two of them.
        values: how an argument is written: "json"; "text", where a string is text as it is, up to `value_end`, and
            everything else JSON; or a quotation mark for strings, everything else being JSON.
        block: before the first and after the last call of a block.
        between_calls: between two calls of one block; None where a block has one call, and further calls their own.
    """

    head: str
    tail: str
    key: str | None = None
    value_end: str = ""
    between_arguments: str = ""
    values: Literal["json", "text"] | str = "json"
    block: tuple[str, str] = ("", "")
    between_calls: str | None = None


_JSON_TOOLS = CallLayout('\n{"name": "{name}", "arguments": ', "}\n")
_MISTRAL = CallLayout("{name}[ARGS]", "")
_MISTRAL_LIST = CallLayout('{"name": "{name}", "arguments": ', "}", block=("[", "]"), between_calls=", ")

_LAYOUTS = {
    "json_tools": _JSON_TOOLS,
    "kimi_k2": CallLayout(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between_calls="",
    ),
    "qwen3_coder": CallLayout(
        "\n<function={name}>\n", "</function>\n", "<parameter={key}>\n", "\n</parameter>\n", values="text"
    ),
    "glm47": CallLayout("{name}\0", "", "<arg_key>{key}</arg_key>\0<arg_value>", "</arg_value>\0", values="text"),
    "longcat": CallLayout(
        "{name}\0",
        "",
        "<longcat_arg_key>{key}</longcat_arg_key>\0<longcat_arg_value>",
        "</longcat_arg_value>\0",
        values="text",
    ),
    "minimax_m2": CallLayout(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        '<parameter name="{key}">',
        "</parameter>\n",
        values="text",
        block=("\n", ""),
        between_calls="",
    ),
    "minicpm5": CallLayout('"{name}">', "", '<param name="{key}">', "</param>", values="text"),
    "muse_spark": CallLayout(
        '<atem:invoke name="{name}">\n',
        "</atem:invoke>\n",
        '<atem:parameter name="{key}">',
        "</atem:parameter>\n",
        values="text",
        block=("\n", ""),
        between_calls="",
    ),
    "kimi_k3": CallLayout(
        '<|open|>call tool="{name}" index="{number}"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument key="{key}" type="{type}"<|sep|>',
        "<|close|>argument<|sep|>",
        values="text",
        between_calls="",
    ),
    "pythonic": CallLayout("{name}(", ")", "{key}=", between_arguments=", ", block=("[", "]"), between_calls=", "),
    "function_gemma": CallLayout("call:{name}{", "}", "{key}:", between_arguments=",", values="<escape>"),
    "gemma4": CallLayout("call:{name}{", "}", "{key}:", between_arguments=",", values='<|"|>'),
}


def call_layout(name: str, template: Any) -> CallLayout | None:
    """The layout of a format.

    Args:
        name: of the format; see `CallFormat`.
        template: the tokenizer's chat template; two versions of Mistral's format differ in it.

    Returns: None for a format that has no layout here, such as a parser of the user's own.
    """
    if name == "mistral":
        return _MISTRAL if isinstance(template, str) and "[ARGS]" in template else _MISTRAL_LIST
    return _LAYOUTS.get(name)
