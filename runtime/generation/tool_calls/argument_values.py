"""Values of arguments: their types, as a tool's schema has them, and the JSON that a text stands for.

Texts are plain, or in the syntax of Python's or of Gemma's: strings, numbers, constants, lists and mappings.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from runtime.generation.json_schema import follows_schema
from runtime.generation.tool_calls.incoming_text import IncomingText, MalformedError, Markers, ParsingSteps

_TYPES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
# Names of types in schemas that no library has checked.
_OTHER_NAMES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"}
_OTHER_NAMES |= {"dict": "object", "list": "array"}

# Schemas that are followed one within the other.
_MAX_NESTED = 16

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_KINDS_OF_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}
# As chat templates write these values by Python's `str`.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


@attrs.frozen
class ArgumentType:
    """The values that an argument may have: their types in JSON, and the texts among its choices, if it has some."""

    types: frozenset[str] = _TYPES
    texts: frozenset[str] = frozenset()

    def json_of(self, text: str) -> str | None:
        """The JSON of a value that was written as plain text; None if the text is no such value.

        A text that may be a string or something else is something else if it is JSON of it.
        """
        if "string" in self.types:
            kind = kind_of(text)
            if text in self.texts or kind in (None, "string") or not self._has(kind):
                return json.dumps(text, ensure_ascii=False)
            return text
        written = text.strip()
        if kind_of(written) is not None:
            return written
        if kind_of(constant := _CONSTANTS.get(written, "")) in self.types:
            return constant
        return _of_python_literal(written) if self.types & {"object", "array"} else None

    def is_json(self, text: str) -> bool:
        """Whether a text can be only JSON, and is."""
        return "string" not in self.types and kind_of(text.strip()) is not None

    def _has(self, kind: str | None) -> bool:
        return kind in self.types or (kind == "integer" and "number" in self.types)


ANY = ArgumentType()


def argument_type(
    schema: Any, root: Mapping[str, Any], known: dict[int, ArgumentType] | None = None, max_nested: int = _MAX_NESTED
) -> ArgumentType:
    """The type of an argument with a schema, whose references are within `root`.

    A schema in `known` is not read again, however often it is referred to. One that refers to itself is of any type
    there.
    """
    if not isinstance(schema, Mapping) or max_nested < 0:
        return ANY
    known = {} if known is None else known
    if (found := known.get(id(schema))) is None:
        known[id(schema)] = ANY  # while it is being read
        found = known[id(schema)] = _read_type(schema, root, known, max_nested - 1)
    return found


@attrs.frozen
class ToolArguments:
    """The arguments of a function: their types, the required ones, and whether there may be others."""

    types: Mapping[str, ArgumentType]
    required: frozenset[str] = frozenset()
    is_open: bool = True
    strict_schema: Mapping[str, Any] | None = None  # which its arguments are promised to follow

    @staticmethod
    def of(function: Mapping[str, Any]) -> ToolArguments:
        """Those of a function in OpenAI's form."""
        schema, known = function.get("parameters") or {}, dict[int, ArgumentType]()
        properties, required = schema.get("properties"), schema.get("required")
        listed = properties.items() if isinstance(properties, Mapping) else ()
        return ToolArguments(
            {key: argument_type(each, schema, known) for key, each in listed},
            frozenset(map(str, required)) if isinstance(required, list) else frozenset(),
            not properties or schema.get("additionalProperties", False) is not False,
            {"type": "object", **schema} if function.get("strict") is True else None,
        )

    def may_have(self, key: str) -> bool:
        """Whether there may be an argument of this name."""
        return self.is_open or key in self.types

    def may_take(self, arguments: str) -> bool:
        """Whether arguments that no grammar has held to the schema follow it, if they must."""
        return self.strict_schema is None or follows_schema(arguments, self.strict_schema)


def _read_type(
    schema: Mapping[str, Any], root: Mapping[str, Any], known_types: dict[int, ArgumentType], max_nested: int
) -> ArgumentType:
    types, texts = _TYPES, frozenset[str]()
    if isinstance(reference := schema.get("$ref"), str):
        found = argument_type(_target(reference, root), root, known_types, max_nested)
        types, texts = found.types, found.texts
    if (named := schema.get("type")) is not None:
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        known = {_OTHER_NAMES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
        if known <= _TYPES and known:
            types &= frozenset(known | ({"integer"} if "number" in known else set()))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        texts |= {choice for choice in choices if isinstance(choice, str)}
        types &= {"string" if isinstance(each, str) else kind_of(json.dumps(each)) or "null" for each in choices}
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list) and parts:
            found_all = [argument_type(part, root, known_types, max_nested) for part in parts]
            combine = frozenset.intersection if keyword == "allOf" else frozenset.union
            types &= combine(*(found.types for found in found_all))
            texts = texts.union(*(found.texts for found in found_all))
    if types == _TYPES and isinstance(schema.get("properties"), Mapping):
        types = frozenset(("object",))
    elif types == _TYPES and "items" in schema:
        types = frozenset(("array",))
    return ArgumentType(types or _TYPES, texts)


def _target(reference: str, root: Any) -> Any:
    """What a reference refers to; None if it cannot be followed."""
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def kind_of(text: str) -> str | None:
    """The type of a value that is written as strict JSON, without white space around it; None if it is not."""
    if not text:
        return None
    if (number := _NUMBER.fullmatch(text)) is not None:
        return "number" if number[2] or number[3] else "integer"
    if (kind := _KINDS_OF_WORDS.get(text)) is not None:
        return kind
    kind = {'"': "string", "{": "object", "[": "array"}.get(text[0])
    return kind if kind is not None and is_json(text) else None


def is_json(text: str) -> bool:
    """Whether a text is strict JSON: without NaN, and without half a character."""
    try:
        value = json.loads(text, parse_constant=_no_json, parse_int=str, parse_float=str)
        # An escaped surrogate is half a character, if the other half is missing.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _no_json(name: str) -> Any:
    raise ValueError(name)


def _of_python_literal(text: str) -> str | None:
    """The JSON of a dictionary or a list in Python's syntax, as some chat templates write it; None if it is not one."""
    if text[:1] not in ("{", "["):
        return None
    incoming = IncomingText()
    incoming.feed(text)
    incoming.end(is_complete=True)
    reader = LiteralReader(incoming, "").value()
    try:
        while True:  # the whole text is there, so that it never waits
            next(reader)
    except StopIteration as end:
        written: str = end.value
    except MalformedError:
        return None
    return written if incoming.num_passed == len(text) else None


# --- in the syntax of Python's, or of Gemma's ------------------------------------------------------------

_MAX_DEPTH = 64
_MAX_KEY_CHARS = 256

_OF_WORDS = frozenset(string.ascii_letters + string.digits + "+-._")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\r\n|[\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\r\n": ""}
_ESCAPED |= {character: character for character in "\\'\""}


@attrs.define
class LiteralReader:
    """Reads values."""

    _text: IncomingText
    _quotation: str  # the quotation mark of strings; "" for those of Python, which have escapes

    def value(self, depth: int = 0) -> ParsingSteps[str]:
        """The JSON of the next value. Raises: MalformedError: there is none."""
        text = self._text
        if depth > _MAX_DEPTH:
            raise MalformedError
        yield from text.space()
        if (plain := (yield from self._string())) is not None:
            return _json_string(plain)
        if (yield from text.accept("[")):
            return f"[{', '.join((yield from self._list(']', depth)))}]"
        if not self._quotation and (yield from text.accept("(")):
            values = yield from self._list(")", depth)
            if len(values) == 1:  # parentheses, or a tuple of one value
                raise MalformedError
            return f"[{', '.join(values)}]"
        if (yield from text.accept("{")):
            return (yield from self._mapping(depth))
        word = yield from text.matching(_OF_WORDS)
        word = _CONSTANTS.get(word, word)
        if kind_of(word) is None:
            raise MalformedError
        return word

    def key(self, stop: str, known: Collection[str] = ()) -> ParsingSteps[str]:
        """A key without quotation marks, and `stop` after it. Raises: MalformedError: there is none."""
        text = self._text
        for name in known:
            place = text.at
            if (yield from text.accept(name)) and (yield from text.accept(stop)):
                return name
            text.at = place
        key: str = yield from text.run(f"{stop}{{}}[]()<>,\"'\n", _MAX_KEY_CHARS)
        if not key.strip() or not (yield from text.accept(stop)):
            raise MalformedError
        return key.strip()

    def _list(self, end: str, depth: int) -> ParsingSteps[list[str]]:
        text, values = self._text, list[str]()
        yield from text.space()
        while not (yield from text.accept(end)):
            values.append((yield from self.value(depth + 1)))
            yield from self.separator(end)
        return values

    def _mapping(self, depth: int) -> ParsingSteps[str]:
        text, values = self._text, dict[str, str]()
        yield from text.space()
        while not (yield from text.accept("}")):
            if (key := (yield from self._string(":"))) is not None:
                yield from text.space()
                yield from text.expect(":")
            elif self._quotation:
                key = yield from self.key(":")
            else:
                raise MalformedError
            if key in values:
                raise MalformedError
            _json_string(key)
            values[key] = yield from self.value(depth + 1)
            yield from self.separator("}")
        return json_object(values)

    def separator(self, end: str) -> ParsingSteps[None]:
        """A comma, unless the end comes next."""
        text = self._text
        yield from text.space()
        if (yield from text.peek()) != end:
            yield from text.expect(",")
        yield from text.space()

    # --- strings ----------------------------------------------------------------------------------

    def _string(self, followers: str = ",]})") -> ParsingSteps[str | None]:
        text = self._text
        if self._quotation:
            if (yield from text.accept(self._quotation)):
                return (yield from self._marked(followers))
            # JSON, which some models write here.
            if (yield from text.peek()) != '"':
                return None
        for quotation in ('"""', "'''", '"', "'"):
            if (yield from text.accept(quotation)):
                return _unescaped((yield from text.string(quotation)))
        return None

    def _marked(self, followers: str) -> ParsingSteps[str]:
        """A string up to the quotation mark that is followed by what may follow a string."""
        text, markers = self._text, Markers((self._quotation,))
        begin = text.take()
        while (yield from text.seek(markers)):
            end = text.take()
            text.at += len(self._quotation)
            after = text.take()
            yield from text.space()
            follower = yield from text.peek()
            text.back(after)
            if follower and follower in followers:
                return text.since(begin, end)
        raise MalformedError


def json_object(values: dict[str, str]) -> str:
    """A JSON object of values that are JSON."""
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()) + "}"


def _json_string(text: str) -> str:
    """Raises: MalformedError: the text has half a character."""
    written = json.dumps(text, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError as error:
        raise MalformedError from error
    return written


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_unescaped_character, text)
    # JSON writes a character beyond 16 bits as two escapes.
    return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _unescaped_character(found: re.Match[str]) -> str:
    escape = found[1]
    if escape in _ESCAPED:
        return _ESCAPED[escape]
    if escape in ("N", "x", "u", "U", "/", "8", "9"):  # a character by name, an incomplete escape, or one of JSON
        raise MalformedError
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    if len(escape) > 1:
        if (number := int(escape[1:], 16)) > 0x10FFFF:
            raise MalformedError
        return chr(number)
    return found[0]  # as in Python, no escape
