"""The format in which a model writes tool calls, as mlx-lm detects it: markers around calls, and a parser."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pkgutil import iter_modules
from typing import Any

import attrs
from mlx_lm import tool_parsers
from mlx_lm.tokenizer_utils import TokenizerWrapper

from runtime.generation.tool_calls.message_format import HARMONY, HARMONY_CALL, message_format
from runtime.generation.tool_calls.parser_process import ParserProcess


@attrs.frozen
class ParsedCall:
    """A call that a parser has read; the id is None if the model writes none."""

    name: str
    arguments: str
    id: str | None = None


@attrs.frozen
class JsonLayout:
    """The layout of calls whose arguments are a JSON object, so that they can be given while they are written.

    Attributes:
        head: the beginning of a call, up to the brace of its arguments, with the groups "name" and perhaps "id".
        end: the text that ends one call of several in a block; "" if the arguments' last brace ends it; None if a block
            has one call.
    """

    head: re.Pattern[str]
    end: str | None = None


# Characters up to which any block is parsed in this process.
SHORT = 1024
# Names of mlx-lm's parsers that search for calls. A parser of the user's own has none of these names.
_SEARCHING = {each.name for each in iter_modules(tool_parsers.__path__)} - {"json_tools"}
_LONG_BLOCKS = ParserProcess()

# In blocks of these formats, a parser skips what it cannot read. The pattern tells how many calls there are.
_CALLS = {
    "kimi_k3": re.compile(r"<\|open\|>call\b"),
    "minimax_m2": re.compile(r"<invoke name="),
    "muse_spark": re.compile(r"<atem:invoke\b"),
}

_LAYOUTS = {
    "json_tools": JsonLayout(
        re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
    ),
    "kimi_k2": JsonLayout(
        re.compile(
            r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>|]+?):\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        end="<|tool_call_end|>",
    ),
    "mistral": JsonLayout(re.compile(r"(?:\s|\[TOOL_CALLS\])*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"), end=""),
}


@attrs.frozen
class CallFormat:
    """The format of a model's calls.

    Attributes:
        name: of mlx-lm's parser: a module of `mlx_lm.tool_parsers`.
        start, end: the markers around a block of calls; `end` is "" if the block ends with the answer.
        layout: None if arguments can be given only with the whole call.
    """

    name: str
    start: str
    end: str
    layout: JsonLayout | None
    _parse: Callable[[str, Any], Any]

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedCall] | None:
        """The calls of a block.

        Args:
            text: of the block, without the markers.
            tools: of the request; for some formats, only they have the types of arguments.

        Returns: at least one call; None if the text is malformed, or reading it takes too long (`ParserProcess`).
        """
        # Third-party code, on whatever a model wrote.
        try:
            if len(text) > SHORT and self.name in _SEARCHING:
                parsed = _LONG_BLOCKS.parse(self.name, text, tools)
            else:
                parsed = self._parse(text, list(tools))
        except Exception:
            return None
        calls = parsed if isinstance(parsed, list) else [parsed]
        names = {tool["function"]["name"] for tool in tools}
        read = [checked_call(call, names) for call in calls]
        known = [call for call in read if call is not None]
        if not read or len(known) < len(read):
            return None
        if (pattern := _CALLS.get(self.name)) is not None and len(pattern.findall(text)) != len(known):
            return None
        return known

    def new_id(self) -> str:
        """A random id for a call, which other clients cannot guess."""
        # Mistral's templates refuse ids that are not of nine letters and digits.
        return secrets.token_hex(5)[:9] if self.name == "mistral" else f"call_{secrets.token_hex(12)}"


def call_format(tokenizer: TokenizerWrapper | None) -> CallFormat | None:
    """The format of a model's calls; None if none is known for its tokenizer."""
    if tokenizer is None:
        return None
    if message_format(tokenizer) == HARMONY:
        return CallFormat("harmony", HARMONY_CALL, "", None, _read_by_message_reader)
    if not getattr(tokenizer, "has_tool_calling", False):
        return None
    parser: Any = tokenizer.tool_parser
    name = parser.__module__.rpartition(".")[2]
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    assert isinstance(start, str)
    return CallFormat(name, start, end or "", _LAYOUTS.get(name), parser)


def _read_by_message_reader(text: str, tools: Any) -> Any:
    raise NotImplementedError("a `MessageReader` reads these calls")


def checked_call(call: Any, names: Collection[str]) -> ParsedCall | None:
    """One call as a parser has read it, normalised; None if it is not a call."""
    if not isinstance(call, Mapping):
        return None
    name, arguments, id = call.get("name"), call.get("arguments"), call.get("id")
    if not isinstance(name, str) or not name:
        return None
    # GLM's parser reads any text as a call with one argument of this name.
    if name not in names and isinstance(arguments, Mapping) and arguments.keys() == {"raw"}:
        return None
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, Mapping):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
    except (TypeError, ValueError, RecursionError):  # a Python value that JSON does not have, or half a character
        return None
    return ParsedCall(name, written, id if isinstance(id, str) and id else None)
