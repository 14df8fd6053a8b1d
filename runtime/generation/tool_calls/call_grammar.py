"""Grammars that hold a model to its tools: to their schemas, in the layout of the model's own format of calls.

Fixed text is a special token if the tokenizer has one for it, and each JSON schema has a grammar of its own. For a
string that is written without quotation marks only `enum` and `const` are enforced: it ends where its marker begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from protocol.errors import SettingsError
from runtime.generation.answers.message_format import FINALS, HARMONY_FINAL, MUSE_TAGS
from runtime.generation.grammar_vocabulary import special_tokens
from runtime.generation.json_schema import grammar_of_schema
from runtime.generation.tool_calls.argument_values import argument_type
from runtime.generation.tool_calls.call_format import CallFormat, CallLayout, written_layout
from runtime.generation.tool_calls.tools import Tools

_OPTIONAL_NEWLINE = "\0"


# Most calls of an answer that must be calls. Small models repeat theirs until they are cut off.
_MAX_CALLS = 16

_PLACEHOLDERS = re.compile("({number}|" + _OPTIONAL_NEWLINE + ")")
_TERMS = {"{number}": "/[0-9]{1,4}/", _OPTIONAL_NEWLINE: '"\\n"?'}


def call_grammar(
    tools: Tools,
    format: CallFormat,
    tokenizer: Any,
    *,
    tags: tuple[str, str] | None = None,
    is_thinking: bool = False,
    content: Mapping[str, Any] | bool | None = None,
    loose: Collection[str] = (),
) -> str:
    """The grammar of an answer, in llguidance's own format, as `Grammar` takes it.

    If a function must be called, the answer has up to 16 calls, and no other text but reasoning.

    Args:
        tags, is_thinking: of the reasoning, which is not constrained, and whether the answer begins within it.
        content: the JSON schema of an answer that calls nothing; None for any text, and if a call is required.
        loose: names of functions whose arguments may be any JSON where the format has JSON. Others have only the
            arguments that are listed, unless their schema says otherwise.

    Raises: SettingsError: the format has no layout, a schema cannot be followed, or llguidance is not installed.
    """
    layout = written_layout(format, getattr(tokenizer, "chat_template", None))
    if layout is None:
        raise SettingsError(
            f"no grammar is known for the calls of this model, whose parser is {format.name!r}; leave tool_choice at "
            '"auto", and strict and parallel_tool_calls out'
        )
    writer = _Writer(special_tokens(tokenizer))
    functions = [tool["function"] for tool in tools.callable]
    calls = [_call(writer, layout, each, is_loose=each["name"] in loose) for each in functions]
    call = writer.rule(" | ".join(calls))
    is_one = not tools.is_parallel or tools.choice not in ("auto", "required")
    has_several = layout.between_calls is not None and not is_one
    is_text = not tools.must_call and content is None
    more = "*" if is_text else f"{{0,{_MAX_CALLS - 1}}}"
    several = f" ({writer.text(layout.between_calls or '')} {call}){more}" if has_several else ""
    begin, end = layout.block
    rest = f"{writer.text(begin)} {call}{several} {writer.text(end + format.end)}"
    block = writer.rule(f"{writer.text(format.start)} {rest}")
    answer = block if is_one or has_several else f'{block} ("\\n"? {block}){more}'
    if tags == MUSE_TAGS:
        names = " | ".join(writer.text(tool["function"]["name"]) for tool in tools.callable)
        answer = f'(" to=" ({names}) {writer.text("<|message|>")})? {answer}'
    # Where answers consist of messages, a text has a header.
    final = writer.text(FINALS.get(tags, "") or (HARMONY_FINAL if format.name == "harmony" else ""))
    if is_text and final:
        answer = f"{final} TEXT | {answer}"
    elif is_text:
        begun = writer.rule(f"{writer.until(format.start)} {rest}")
        answer = f"{begun}{'?' if is_one else '*'} TEXT"
    elif content is not None:
        answer = f"{final} {writer.schema(content)} | {answer}"
    return writer.grammar(f"{_reasoning(writer, tags, is_thinking=is_thinking)} ({answer})")


def reasoning_before(grammar: str, *, tokenizer: Any, tags: tuple[str, str] | None, is_thinking: bool) -> str:
    """The grammar of an answer that may reason, or has begun to, before its content, whose grammar is given."""
    writer = _Writer(special_tokens(tokenizer))
    final = writer.text(FINALS.get(tags, ""))
    content = writer.part(grammar)
    return writer.grammar(f"{_reasoning(writer, tags, is_thinking=is_thinking)} {final} {content}")


def _reasoning(writer: _Writer, tags: tuple[str, str] | None, *, is_thinking: bool) -> str:
    if tags is None:
        return ""
    rest = f"{writer.until(tags[1])} SPACE"
    return rest if is_thinking else f"({writer.text(tags[0])} {rest})?"


def _call(writer: _Writer, layout: CallLayout, function: Mapping[str, Any], *, is_loose: bool) -> str:
    parameters = {"type": "object", **function["parameters"]}
    properties = parameters.get("properties")
    if "properties" in parameters and not isinstance(properties, Mapping):  # null, or an empty list
        parameters["properties"] = properties = {}
    head = writer.text(layout.head.replace("{name}", function["name"]))
    tail = writer.text(layout.tail)
    if not layout.key:
        return writer.rule(f"{head} {writer.schema({'type': 'object'} if is_loose else parameters)} {tail}")
    required = parameters.get("required")
    required = set(required) if isinstance(required, list) else set()
    arguments = [
        (_argument(writer, layout, key, parameters, is_loose=is_loose), key in required) for key in properties or ()
    ]
    return writer.rule(f"{head} {_in_order(writer, arguments, writer.text(layout.between_arguments))} {tail}")


def _argument(writer: _Writer, layout: CallLayout, key: str, parameters: Mapping[str, Any], *, is_loose: bool) -> str:
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    schema = parameters["properties"][key]
    types = argument_type(schema, parameters).types
    kind = "string" if "string" in types else min(types)
    head = writer.text(layout.key.replace("{key}", key).replace("{type}", "number" if kind == "integer" else kind))
    end = writer.text(layout.value_end)
    value_schema = True if is_loose or not isinstance(schema, Mapping) else {**schema, **definitions}
    if layout.values in ("json", "python") or kind != "string":
        if layout.values not in ("json", "text", "python") and types == {"array"}:
            items = schema.get("items") if isinstance(schema, Mapping) else None
            if items is not None and argument_type(items, parameters).types == {"string"}:
                item = f"{writer.text(layout.values)} {writer.until(layout.values)}"
                return writer.rule(f'{head} "[" ({item} ("," {item})*)? "]" {end}')
        return writer.rule(f"{head} {writer.schema(value_schema)} {end}")
    quotation = "" if layout.values == "text" else layout.values
    choices = None
    if isinstance(schema, Mapping) and not is_loose:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
        body = " | ".join(writer.text(quotation + text + quotation + layout.value_end) for text in texts)
        return writer.rule(f"{head} ({body})")
    closing = writer.until((quotation or layout.value_end).replace(_OPTIONAL_NEWLINE, ""))
    rest = end if quotation else ('"\\n"?' if _OPTIONAL_NEWLINE in layout.value_end else "")
    return writer.rule(f"{head} {writer.text(quotation)} {closing} {rest}")


def _in_order(writer: _Writer, arguments: Sequence[tuple[str, bool]], between: str) -> str:
    """Arguments in their order, of which some are required, with text between any two."""
    # Rules for the remaining arguments: if one came before, and if none did.
    after, first = "", ""
    for rule, is_required in reversed(arguments):
        begun = f"{rule} {after}"
        if not is_required:
            begun = f"{begun} | {first}" if first else f"({begun})?"
        after = f"{between} {rule} {after}" if is_required else f"({between} {rule})? {after}"
        first, after = writer.rule(begun), writer.rule(after)
    return first


@attrs.define
class _Writer:
    """Writes a grammar in llguidance's variant of Lark."""

    _special_tokens: Mapping[str, int]
    _rules: list[str] = attrs.field(init=False, factory=list)
    _parts: list[dict[str, Any]] = attrs.field(init=False, factory=list)

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any] | bool) -> str:
        """The JSON of a schema. Raises: SettingsError: it cannot be followed."""
        return self.part(grammar_of_schema(schema, is_closed=True))

    def part(self, grammar: str) -> str:
        """A grammar in llguidance's own format, as a part of this one."""
        name = f"part_{len(self._parts)}"
        # A grammar in Lark's syntax is llguidance's own format, too.
        [inner] = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        self._parts.append({**inner, "name": name})
        return f"@{name}"

    def text(self, text: str) -> str:
        terms = []
        for part in _PLACEHOLDERS.split(text):
            terms += [_TERMS[part]] if part in _TERMS else self._terms(part)
        return " ".join(terms)

    def until(self, text: str) -> str:
        """Any text up to the first `text`, which is included."""
        first, *rest = self._terms(text)
        if not first.startswith('"'):
            return " ".join(["TEXT", first, *rest])
        # Lazy: it ends at the first occurrence.
        return " ".join([self.rule(f"TEXT {first}", "[lazy]"), *rest])

    def grammar(self, start: str) -> str:
        lines = [f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\r\n]{0,8}/"]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._parts]})

    def _terms(self, text: str) -> list[str]:
        found = sorted((token for token in self._special_tokens if token in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        return [
            f"<[{self._special_tokens[part]}]>"
            if part in self._special_tokens
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
