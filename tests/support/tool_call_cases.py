"""Calls in every format that mlx-lm has a parser for, mlx-lm's own test strings among them."""

import importlib
import json
from types import SimpleNamespace
from typing import Any, cast

from runtime.generation.tool_calls import call_format as call_formats
from runtime.generation.tool_calls.call_format import CallFormat


def tool(name: str, /, **types: str) -> dict[str, Any]:
    """A tool in OpenAI's form, whose parameters have these types."""
    properties = {key: {"type": type} for key, type in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


TOOLS = [
    tool("multiply", a="number", b="number"),
    tool("get_current_temperature", location="string"),
    tool("search", filters="object", tags="array", query="string"),
    tool("schedule", name="string", deadline="string"),
]


def call_format(name: str) -> CallFormat:
    """The format of one of mlx-lm's parsers."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    tokenizer = SimpleNamespace(
        has_tool_calling=True,
        tool_parser=module.parse_tool_call,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
    )
    format = call_formats.call_format(cast(Any, tokenizer))
    assert format is not None
    return format


# Of each format: the text before a call and after it; before an argument and after it, unless they are one JSON object;
# between two of them, and around a string.
_FORMS = {
    "function_gemma": ("call:NAME{", "}", "KEY:", "", ",", "<escape>"),
    "gemma4": ("call:NAME{", "}", "KEY:", "", ",", '<|"|>'),
    "glm47": ("NAME\n", "", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "json_tools": ('\n{"name": "NAME", "arguments": ', "}\n"),
    "kimi_k2": ("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": (
        *('<|open|>call tool="NAME" index="1"<|sep|>', "<|close|>call<|sep|>"),
        *('<|open|>argument key="KEY" type="TYPE"<|sep|>', "<|close|>argument<|sep|>"),
    ),
    "laguna": ("NAME\n", "", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "longcat": ("NAME\n", "", "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    "minicpm5": ('"NAME">', "", '<param name="KEY">', "</param>"),
    "minimax_m2": ('\n<invoke name="NAME">\n', "</invoke>\n", '<parameter name="KEY">', "</parameter>\n"),
    "mistral": ("NAME[ARGS]", ""),
    "muse_spark": (
        *('\n<atem:invoke name="NAME">\n', "</atem:invoke>\n"),
        *('<atem:parameter name="KEY">', "</atem:parameter>\n"),
    ),
    "pythonic": ("[NAME(", ")]", "KEY=", "", ", ", '"'),
    "qwen3_coder": ("\n<function=NAME>\n", "</function>\n", "<parameter=KEY>\n", "\n</parameter>\n"),
}
FORMATS = list(_FORMS)


def call_in(format: str, name: str, arguments: dict[str, Any]) -> str:
    """The text of a call in a format, without the markers of its block."""
    begin, end, *of_arguments = (part.replace("NAME", name) for part in _FORMS[format])
    if not of_arguments:
        return begin + json.dumps(arguments) + end
    before, after, between, quotation = (*of_arguments, "", "")[:4]
    types: dict[type, str] = {str: "string", bool: "boolean"}
    written = [
        before.replace("KEY", key).replace("TYPE", types.get(type(value), "number"))
        + (f"{quotation}{value}{quotation}" if isinstance(value, str) else json.dumps(value))
        + after
        for key, value in arguments.items()
    ]
    return begin + between.join(written) + end


def block(format: str, body: str) -> str:
    """A block of calls, with its markers."""
    known = call_format(format)
    return known.start + body + known.end


_PRODUCT = ("multiply", {"a": 12234585, "b": 48838483920})
_LONDON = ("get_current_temperature", {"location": "London"})
_K2 = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

# Format, the text of a block without its markers, and the calls in it.
BLOCKS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    *((format, call_in(format, *call), [call]) for format in FORMATS for call in (_PRODUCT, _LONDON)),
    ("glm47", '{"name": "multiply", "arguments": {"a": 12234585, "b": 48838483920}}', [_PRODUCT]),
    ("json_tools", '\n{"arguments": {"a": 12234585, "b": 48838483920}, "name": "multiply"}\n', [_PRODUCT]),
    ("json_tools", '{"name": "multiply", "arguments": {"a": 12234585, "b": 48838483920}, "id": "x"}', [_PRODUCT]),
    (
        "json_tools",
        '{"name": "search", "arguments": {"query": "</tool_call> \\"{["}}',
        [("search", {"query": '</tool_call> "{['})],
    ),
    ("longcat", '{"name": "multiply", "arguments": {"a": 12234585, "b": 48838483920}}', [_PRODUCT]),
    (
        "pythonic",
        '[multiply(a=12234585, b=48838483920), get_current_temperature(location="London")]',
        [_PRODUCT, _LONDON],
    ),
    ("mistral", '[{"name": "multiply", "arguments": {"a": 12234585, "b": 48838483920}}]', [_PRODUCT]),
    (
        "mistral",
        'multiply[ARGS]{"a": 12234585, "b": 48838483920}'
        '[TOOL_CALLS]get_current_temperature[ARGS]{"location": "London"}',
        [_PRODUCT, _LONDON],
    ),
    (
        "qwen3_coder",
        "<function=search><parameter=filters>{'category': 'books', 'in_stock': True}</parameter>"
        "<parameter=tags>['fiction', 'new']</parameter></function>",
        [("search", {"filters": {"category": "books", "in_stock": True}, "tags": ["fiction", "new"]})],
    ),
    (
        "qwen3_coder",
        "<function=schedule>\n<parameter=name>\ndeploy\n</parameter>\n"
        "<parameter=deadline>\n2025-06-15T10:30:00Z\n</parameter>\n</function>",
        [("schedule", {"name": "deploy", "deadline": "2025-06-15T10:30:00Z"})],
    ),
    (
        "gemma4",
        'call:configure{settings:{enabled:true,name:<|"|>test<|"|>}}',
        [("configure", {"settings": {"enabled": True, "name": "test"}})],
    ),
    (
        "gemma4",
        'call:glob{pattern:<|"|>README*.md<|"|>}call:glob{pattern:<|"|>use {key: value}<|"|>}',
        [("glob", {"pattern": "README*.md"}), ("glob", {"pattern": "use {key: value}"})],
    ),
    (
        "kimi_k2",
        _K2.format("search", 0, '{"query": "weather"}') + _K2.format("read_file", 1, '{"path": "/tmp/test.txt"}'),
        [("search", {"query": "weather"}), ("read_file", {"path": "/tmp/test.txt"})],
    ),
    (
        "minimax_m2",
        '<invoke name="search">\n<parameter name="query">weather</parameter>\n</invoke>\n'
        '<invoke name="read_file">\n<parameter name="path">/tmp/test.txt</parameter>\n</invoke>',
        [("search", {"query": "weather"}), ("read_file", {"path": "/tmp/test.txt"})],
    ),
    (
        "kimi_k3",
        '<|open|>call tool="multiply" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"a": 12234585, "b": 48838483920}<|close|>json<|sep|><|close|>call<|sep|>',
        [_PRODUCT],
    ),
    (
        "minicpm5",
        '"multiply"><param name="a">12234585</param><param name="b"><![CDATA[48838483920]]></param>',
        [_PRODUCT],
    ),
]

# Format, and the text of a block that is no call.
MALFORMED = [
    ("json_tools", '{"name": "multiply", "arguments": {"a": 1'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": foo}}'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": "x\ny"}}'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": 1}'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": NaN}}'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": 1]}'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": 1}} and more'),
    ("json_tools", '{"name": "multiply", "arguments": {"a": 1}, "arguments": {"a": 2}}'),
    ("json_tools", '{"name": "multiply"}'),
    ("json_tools", "[1, 2]"),
    ("json_tools", "nothing"),
    ("json_tools", ""),
    ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>{"),
    ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>{} or"),
    ("kimi_k2", _K2.format("x", 0, "{}") + "and then"),
    ("kimi_k2", "functions.x"),
    ("mistral", 'multiply[ARGS]{"a": 1'),
    ("mistral", "I think"),
    ("mistral", '[{"name": "multiply", "arguments": '),
    ("pythonic", "multiply of 1 and 2"),
    ("gemma4", "multiply"),
    ("function_gemma", "multiply"),
    ("glm47", "some words"),
    ("longcat", "some words"),
    ("minimax_m2", "some words"),
    ("minimax_m2", '<invoke name="x"></invoke><invoke name="y">'),
    ("minicpm5", "some words"),
    ("muse_spark", "some words"),
    ("qwen3_coder", "some words"),
    ("kimi_k3", "some words"),
    (
        "kimi_k3",
        '<|open|>call tool="x" index="1"<|sep|><|close|>call<|sep|><|open|>call index="2"<|sep|><|close|>call<|sep|>',
    ),
]
