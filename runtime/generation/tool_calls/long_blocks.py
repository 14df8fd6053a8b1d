"""Long blocks of calls, which a parser is given only where it reads them in time proportional to their length.

mlx-lm's parsers search for calls with patterns that begin anew at each opening marker. On a text of many openings that
are never closed, they take time that grows with the square of its length: minutes for 100,000 characters, in which no
other stream gets a token. So a long block must have the form of its format exactly, which is checked in one go by
patterns without backtracking. A short one may be as sloppy as its parser takes it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Check = Callable[[str, Sequence[Mapping[str, Any]]], bool]

# Characters up to which any block is parsed.
SHORT = 1024
# Commas, brackets and the like in a value that is not JSON. Some parsers then read it as Python, 4 µs for each of them.
_MAX_SIGNS = 10_000
_SIGN = re.compile(r"[^\w\s]")
# Characters of a block of Python literals, without the contents of its strings.
_MAX_CODE_CHARS = 8192
# Characters that are searched and replaced for all strings of a block together.
_MAX_REPLACED = 80_000_000
_MAX_DEPTH = 200


def is_parseable(format: str, text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parser reads a block in time proportional to its length, whatever it reads there.

    Args:
        format: the parser's name.
        text: of the block, without its markers.
        tools: of the request, in OpenAI's form.
    """
    check = _CHECKS.get(format)
    return check is None or len(text) <= SHORT or check(text, tools)


# --- formats ----------------------------------------------------------------------------------------


def _up_to(*ends: str) -> str:
    """A pattern of the text before the first of some markers, all of which begin with "<"."""
    rest = "|".join(re.escape(end.removeprefix("<")) for end in ends)
    return rf"(?:[^<]++|<(?!{rest}))*+"


def _has_form(pattern: str, parameter: str | None = None) -> Check:
    """A check that a text has a form.

    Args:
        pattern: of the whole text, with "@" for each parameter.
        parameter: the pattern of one, with groups for name and value; None where no value is read as Python.
    """
    form = re.compile(pattern if parameter is None else pattern.replace("@", parameter))
    part = None if parameter is None else re.compile(parameter)

    def check(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        if form.fullmatch(text) is None:
            return False
        if part is None:
            return True
        structured = _parameters(tools, lambda schema: schema.get("type") != "string")
        return all(_is_quick(value) for name, value in part.findall(text) if name.strip("\"' ") in structured)

    return check


def _key_value_check(prefix: str) -> Check:
    """A check of a name and pairs of tagged keys and values, in place of which there may be JSON."""
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    pattern = rf"<{key}>([^<]*+)</{key}>(?:\\n|\s)*+<{value}>({_up_to(f'</{value}>')})</{value}>\s*+"
    pair, form = re.compile(pattern), re.compile(rf"([^<]*+)(?:{pattern})++")

    def check(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        if f"<{key}>" not in text:
            return _is_named_json(text)
        if (block := form.fullmatch(text)) is None:
            return False
        # The parser leaves an argument as it is if the tool's schema says that it is a string.
        called = [tool for tool in tools if tool["function"]["name"] == block[1].strip()]
        texts = _parameters(called[:1], lambda schema: schema.get("type") == "string")
        return all(key.strip() in texts or _is_quick(value) for key, value in pair.findall(text))

    return check


def _parameters(tools: Sequence[Mapping[str, Any]], is_meant: Callable[[Mapping[str, Any]], bool]) -> set[str]:
    """The names of parameters of some functions, by their schemas."""
    described = [(tool["function"].get("parameters") or {}).get("properties") for tool in tools]
    properties = [item for each in described if isinstance(each, Mapping) for item in each.items()]
    return {key for key, schema in properties if isinstance(schema, Mapping) and is_meant(schema)}


_NAMED = re.compile(r"\s*+(?:[\w.-]{1,256}+\s++)?(?=[{\[])")


def _is_named_json(text: str) -> bool:
    """Whether a text is JSON, perhaps after a name."""
    named = _NAMED.match(text)
    return named is not None and _is_json(text[named.end() :])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_quick(value: str) -> bool:
    """Whether a parser reads a value in little time: as JSON, or as Python with few signs."""
    return len(value) <= _MAX_SIGNS or len(_SIGN.findall(value)) <= _MAX_SIGNS or _is_json(value)


_K2_ARGUMENTS = rf"<\|tool_call_argument_begin\|>(?P<value>{_up_to('<|tool_call')})"
_K2 = re.compile(
    rf"\s*+(?:<\|tool_call_begin\|>)?+[^<]{{1,512}}+{_K2_ARGUMENTS}(?:<\|tool_call_end\|>\s*+|\Z)", re.DOTALL
)


def _is_kimi_k2(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    at = 0
    while at < len(text):
        if (call := _K2.match(text, at)) is None or not _is_quick(call["value"]):
            return False
        at = call.end()
    return True


_SPACE = re.compile(r"\s*+")
_MISTRAL_HEAD = re.compile(r"(?:\s|\[TOOL_CALLS\])*+[\w-]{1,256}+\s*+\[ARGS\]\s*+")


def _is_mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    if text.lstrip().startswith("["):
        return _is_json(text) or (text.lstrip().startswith("[TOOL_CALLS]") and _is_headed(text))
    return _is_headed(text)


def _is_headed(text: str) -> bool:
    """Whether a text is names with JSON, as newer models of Mistral write them."""
    decoder, at = json.JSONDecoder(), 0
    while _SPACE.fullmatch(text, at) is None:
        if (head := _MISTRAL_HEAD.match(text, at)) is None:
            return False
        try:
            _, at = decoder.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            return False
    return True


_GEMMA_STRING = re.compile(r'<\|"\|>.*?<\|"\|>', re.DOTALL)
_GEMMA_HEAD = re.compile(r"\s*+call:[\w-]{1,256}+\s*+")


def _is_gemma4(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    code, num_strings = _GEMMA_STRING.subn("", text)
    if '<|"|>' in code or len(code) > _MAX_CODE_CHARS or num_strings * len(text) > _MAX_REPLACED:
        return False
    depth, at = 0, 0
    for brace in re.finditer(r"[{}]", code):
        if depth == 0 and (brace[0] == "}" or _GEMMA_HEAD.fullmatch(code[at : brace.start()]) is None):
            return False
        depth += 1 if brace[0] == "{" else -1
        at = brace.end()
        if depth > _MAX_DEPTH:
            return False
    return depth == 0 and at > 0 and not code[at:].strip()


# Strings on one line, without escapes that may be invalid. So if the text is valid Python with each string replaced by
# a number, it is valid with the strings, too.
_PYTHON_STRING = re.compile(r""""(?:[^"\\\n\x00]|\\[^xuUN\n\x00])*+"|'(?:[^'\\\n\x00]|\\[^xuUN\n\x00])*+'""")
_PYTHON_FORM = re.compile(rf"""(?:[^"'\x00]++|{_PYTHON_STRING.pattern})*+""")
_LITERALS = (ast.List, ast.Tuple, ast.Dict, ast.Constant, ast.Load, ast.keyword, ast.UnaryOp, ast.USub, ast.UAdd)


def _is_pythonic(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text is a list of calls with literal arguments. For any other text, the parser uses slow patterns."""
    if _PYTHON_FORM.fullmatch(text) is None:
        return False
    code = _PYTHON_STRING.sub("0", text.strip())
    if len(code) > _MAX_CODE_CHARS or not (code.startswith("[") and code.endswith("]")):
        return False
    try:
        calls = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not isinstance(calls, ast.List):
        return False
    return all(isinstance(call, ast.Call) and _has_literals(call) for call in calls.elts)


def _has_literals(call: ast.Call) -> bool:
    inside = [node for keyword in call.keywords for node in ast.walk(keyword)]
    names = [node.id for node in inside if isinstance(node, ast.Name)]
    signed = [node.operand for node in inside if isinstance(node, ast.UnaryOp)]
    return (
        not call.args
        and set(names) <= {"true", "false", "null"}
        and all(isinstance(node, (*_LITERALS, ast.Name)) for node in inside)
        and all(isinstance(operand, ast.Constant) for operand in signed)
    )


_TAG_NAME = r"""(?:"[^"]*+"|'[^']*+'|[^\s"'<>]++)"""
_CHECKS: dict[str, Check] = {
    "function_gemma": _has_form(r"\s*+(?:call:\w++\{[^}]*+\}\s*+)++"),
    "gemma4": _is_gemma4,
    "glm47": _key_value_check(""),
    "kimi_k2": _is_kimi_k2,
    "kimi_k3": _has_form(
        r"\s*+(?:<\|open\|>call[^<]{0,512}+<\|sep\|>\s*+"
        rf"(?:<\|open\|>(?P<kind>argument|json)[^<]{{0,512}}+<\|sep\|>{_up_to('<|open|>', '<|close|>')}"
        r"<\|close\|>(?P=kind)<\|sep\|>\s*+)*+"
        r"<\|close\|>call<\|sep\|>\s*+)++"
    ),
    "laguna": _key_value_check(""),
    "longcat": _key_value_check("longcat_"),
    "minicpm5": _has_form(
        rf"\s*+{_TAG_NAME}\s*+>\s*+(?:@\s*+)*+",
        rf"<param\s++name\s*+=\s*+({_TAG_NAME})\s*+>({_up_to('</param>')})</param>",
    ),
    "minimax_m2": _has_form(
        r"\s*+(?:<invoke name=[^<>]{1,512}+>\s*+(?:@\s*+)*+</invoke>\s*+)++",
        rf"<parameter name=([^<>]{{1,512}}+)>({_up_to('</parameter>', '</invoke>')})</parameter>",
    ),
    "mistral": _is_mistral,
    "muse_spark": _has_form(
        r"\s*+(?:<atem:invoke\s[^<>]{0,512}+>\s*+"
        rf"(?:<atem:parameter\s[^<>]{{0,512}}+>{_up_to('<atem:', '</atem:')}</atem:parameter>\s*+)*+"
        r"</atem:invoke>\s*+)++"
    ),
    "pythonic": _is_pythonic,
    # Its pattern ends at the end of the text, before which there may be one line break.
    "qwen3_coder": _has_form(
        r"\s*+<function=[^\s<>]{1,512}+>?+\s*+(?:@\s*+)*+</function>\n?",
        rf"<parameter=([^<>]{{1,512}}+)>({_up_to('</parameter>')})</parameter>",
    ),
}
