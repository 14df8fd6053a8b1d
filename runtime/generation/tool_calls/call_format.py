"""The formats of tool calls: the markers around calls, as mlx-lm detects them, and the layout of a call.

A call is written here, by its layout; `call_reader` reads it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from runtime.generation.answers.message_format import HARMONY, HARMONY_CALL, message_format
from runtime.generation.tool_calls.argument_values import kind_of

# Names of functions, also of such as the model was not offered.
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@attrs.frozen
class ParsedCall:
    """A call that was read; the id is None if the model writes none."""

    name: str
    arguments: str
    id: str | None = None


@attrs.frozen
class CallLayout:
    """The layout of one call, from which both the grammar and the reader come.

    In these texts, "{name}" is the function's name, "{key}" an argument's, "{type}" its type, "{number}" a whole
    number, "{id}" the call's id; a NUL character is an optional newline, in which versions of a format differ.

    A reader takes any white space where the layout has some, and at the ends of these texts. Only a newline beside an
    argument's value is exactly one, which may be missing: further white space belongs to the value.
    """

    head: str  # before and
    tail: str  # after the arguments
    key: str = ""  # before each argument; "" if the arguments are one JSON object
    value_end: str = ""
    between_arguments: str = ""
    # How an argument is written: "json"; "text": a string as plain text up to `value_end`, anything else as JSON;
    # "python": as in Python; or a quotation mark: a string between two of these, anything else as JSON.
    values: Literal["json", "text", "python"] | str = "json"
    block: tuple[str, str] = ("", "")  # around the calls of a block
    between_calls: str | None = None  # None if a model writes each call in a block of its own
    quotation: tuple[str, str] = ("", "")  # around a text that needs it
    whole_arguments: tuple[str, str] = ("", "")  # around all arguments as one JSON object, which may stand for them
    # Further heads and layouts, which are read, and not written.
    other_heads: tuple[str, ...] = ()
    others: tuple[CallLayout, ...] = ()

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object, of its name and its arguments."""
        return self.head.lstrip().startswith('{"')

    @property
    def opening(self) -> str:
        """The tag with which a call begins, which tells it apart without the marker of its block; "" without one."""
        begin = self.head.lstrip().partition("{")[0]
        return begin if begin.startswith("<") else ""


_OBJECT = CallLayout('\n{"name": "{name}", "arguments": ', "}\n")
_MISTRAL_LIST = CallLayout('{"name": "{name}", "arguments": ', "}", block=("[", "]"), between_calls=", ")

_in_text = partial(CallLayout, values="text")
_GLM = _in_text("{name}\0", "", "<arg_key>{key}</arg_key>\0<arg_value>", "</arg_value>\0", others=(_OBJECT,))
_LAYOUTS = {
    "json_tools": _OBJECT,
    "kimi_k2": CallLayout(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        between_calls="",
        other_heads=("<|tool_call_begin|>{name}:{number}<|tool_call_argument_begin|>",),
    ),
    "mistral": CallLayout("{name}[ARGS]", "", other_heads=("{name}[CALL_ID]{id}[ARGS]",), others=(_MISTRAL_LIST,)),
    "qwen3_coder": _in_text("\n<function={name}>\n", "</function>\n", "<parameter={key}>\n", "\n</parameter>\n"),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": _in_text(
        *("{name}\0", ""),
        *("<longcat_arg_key>{key}</longcat_arg_key>\0<longcat_arg_value>", "</longcat_arg_value>\0"),
        others=(_OBJECT,),
    ),
    "minimax_m2": _in_text(
        *('<invoke name="{name}">\n', "</invoke>\n", '<parameter name="{key}">', "</parameter>\n"),
        block=("\n", ""),
        between_calls="",
    ),
    "minicpm5": _in_text('"{name}">', "", '<param name="{key}">', "</param>", quotation=("<![CDATA[", "]]>")),
    "muse_spark": _in_text(
        *('<atem:invoke name="{name}">\n', "</atem:invoke>\n"),
        *('<atem:parameter name="{key}">', "</atem:parameter>\n"),
        block=("\n", ""),
        between_calls="",
    ),
    "kimi_k3": _in_text(
        *('<|open|>call tool="{name}" index="{number}"<|sep|>', "<|close|>call<|sep|>"),
        *('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
        between_calls="",
        whole_arguments=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    ),
    "pythonic": CallLayout(
        *("{name}(", ")", "{key}="), between_arguments=", ", values="python", block=("[", "]"), between_calls=", "
    ),
    "function_gemma": CallLayout("call:{name}{", "}", "{key}:", between_arguments=",", values="<escape>"),
    "gemma4": CallLayout("call:{name}{", "}", "{key}:", between_arguments=",", values='<|"|>'),
}

# Of Llama 3, whose template asks for it in these words. mlx-lm has no parser for it.
_LLAMA = CallLayout('{name}", "parameters": ', "}")
_LLAMA_WORDS = '{"name": function name, "parameters": dictionary of argument name and its value}'
# Of gpt-oss, whose calls are messages.
_HARMONY = CallLayout("{name} <|constrain|>json<|message|>", "")


@attrs.frozen
class CallFormat:
    """The format of a model's calls."""

    name: str  # of mlx-lm's parser: a module of `mlx_lm.tool_parsers`
    start: str  # the markers around a block of calls
    end: str  # "" if the block ends with the answer
    layout: CallLayout | None  # by which calls are read; None for a parser that is not known here, as the user's own
    _parse: Callable[[str, Any], Any]
    # Whether calls are JSON objects without the markers, where an answer begins or after a call. "always": the markers
    # are ordinary text, for a grammar.
    bare: Literal["never", "sometimes", "always"] = "never"
    is_parallel: bool = True  # whether an answer may have several calls; those after the first are text if not

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedCall] | None:
        """The calls of a block without its markers, as the format's parser reads them: at least one. None if the text
        is malformed, or calls a function that is no tool.
        """
        # Third-party code, on whatever a model wrote.
        try:
            parsed = self._parse(text, list(tools))
        except Exception:
            return None
        names = {tool["function"]["name"] for tool in tools}
        read = [_checked_call(call, names) for call in (parsed if isinstance(parsed, list) else [parsed])]
        known = [call for call in read if call is not None]
        return known if known and len(known) == len(read) else None

    def new_id(self) -> str:
        """A random id for a call, which other clients cannot guess."""
        # Mistral's templates refuse ids that are not of nine letters and digits.
        return secrets.token_hex(5)[:9] if self.name == "mistral" else f"call_{secrets.token_hex(12)}"


def _read_elsewhere(text: str, tools: Any) -> Any:
    raise NotImplementedError("these calls are read by their layout, or by a MessageReader")


def _checked_call(call: Any, names: Collection[str]) -> ParsedCall | None:
    """One call as a parser has read it, normalised; None if it is not a call of a tool."""
    if not isinstance(call, Mapping):
        return None
    name, arguments, id = call.get("name"), call.get("arguments"), call.get("id")
    if not isinstance(name, str) or name not in names:
        return None
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            return None
        written = _json(arguments, allow_nan=False)
        written.encode()
    except (TypeError, ValueError, RecursionError):  # a Python value that JSON does not have, or half a character
        return None
    return ParsedCall(name, written, id if isinstance(id, str) and id else None)


def written_layout(format: CallFormat, template: Any) -> CallLayout | None:
    """The layout that a model with this chat template writes; None if it is not known.

    The template tells the two versions of Mistral's format apart.
    """
    if format.layout is _LAYOUTS["mistral"] and not (isinstance(template, str) and "[ARGS]" in template):
        return _MISTRAL_LIST
    return format.layout


def call_format(tokenizer: TokenizerWrapper | None) -> CallFormat | None:
    """The format of a model's calls; None if none is known for its tokenizer."""
    if tokenizer is None:
        return None
    if message_format(tokenizer) == HARMONY:
        return CallFormat("harmony", HARMONY_CALL, "", _HARMONY, _read_elsewhere)
    if not getattr(tokenizer, "has_tool_calling", False):
        template = getattr(tokenizer, "chat_template", None)
        is_llama = isinstance(template, str) and _LLAMA_WORDS in template
        return CallFormat("llama", '{"name": "', "", _LLAMA, _read_elsewhere, "always") if is_llama else None
    parser: Any = tokenizer.tool_parser
    package, _, name = parser.__module__.rpartition(".")
    # A parser module that re-exports another's function, such as Laguna's, has that module's layout.
    layout = _LAYOUTS.get(name) if package == "mlx_lm.tool_parsers" else None
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    assert isinstance(start, str)
    may_be_bare = layout is not None and any(each.is_object for each in (layout, *layout.others))
    return CallFormat(name, start, end or "", layout, parser, "sometimes" if may_be_bare else "never")


# --- writing --------------------------------------------------------------------------------------

Written = tuple[str, Mapping[str, Any]]
"""A call to be written: the function's name, and its arguments."""


def calls_as_json(calls: Sequence[Written]) -> str:
    """The text of calls for models whose own format is not known."""
    return "\n".join(_json({"name": name, "arguments": arguments}) for name, arguments in calls)


def written_calls(format: CallFormat, layout: CallLayout, calls: Sequence[Written]) -> str:
    """The text of calls in a layout of the format."""
    texts = [_call(layout, name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    begin, end = layout.block
    if layout.between_calls is not None:
        texts = [layout.between_calls.join(texts)]
    return "\n".join(f"{format.start}{begin}{text}{end}{format.end}" for text in texts)


def _call(layout: CallLayout, name: str, arguments: Mapping[str, Any], number: int) -> str:
    parts = (layout.head, layout.tail, layout.key, layout.value_end)
    head, tail, begin, end = (part.replace("\0", "\n") for part in parts)  # with the optional newlines
    head = head.replace("{name}", name).replace("{number}", str(number))
    if not begin:
        return f"{head}{_json(arguments)}{tail}"
    listed = []
    for key, value in arguments.items():
        kind = kind_of(_json(value)) or "null"
        named = begin.replace("{key}", key).replace("{type}", "number" if kind == "integer" else kind)
        listed.append(f"{named}{_value(layout, value)}{end}")
    return f"{head}{layout.between_arguments.join(listed)}{tail}"


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


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)
