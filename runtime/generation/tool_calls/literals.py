"""Values in the syntax of Python's, or of Gemma's: strings, numbers, constants, lists and mappings."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection

import attrs

from runtime.generation.tool_calls.argument_values import kind_of
from runtime.generation.tool_calls.incoming_text import IncomingText, MalformedError, Markers, Steps

_MAX_DEPTH = 64
_MAX_KEY_CHARS = 256

_OF_WORDS = frozenset(string.ascii_letters + string.digits + "+-._")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_PARTS_OF_STRINGS = {quotation: Markers((quotation, "\\")) for quotation in ('"', "'", '"""', "'''")}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\r\n|[\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\r\n": ""}
_ESCAPED |= {character: character for character in "\\'\""}


@attrs.define
class LiteralReader:
    """Reads values.

    Attributes:
        quotation: the quotation mark of strings; "" for those of Python, which have escapes.
    """

    _text: IncomingText
    _quotation: str

    def value(self, depth: int = 0) -> Steps[str]:
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

    def key(self, stop: str, known: Collection[str] = ()) -> Steps[str]:
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

    def _list(self, end: str, depth: int) -> Steps[list[str]]:
        text, values = self._text, list[str]()
        yield from text.space()
        while not (yield from text.accept(end)):
            values.append((yield from self.value(depth + 1)))
            yield from self._separator(end)
        return values

    def _mapping(self, depth: int) -> Steps[str]:
        text, values = self._text, dict[str, str]()
        yield from text.space()
        while not (yield from text.accept("}")):
            if (key := (yield from self._string(":"))) is not None:
                yield from text.space()
                if not (yield from text.accept(":")):
                    raise MalformedError
            elif self._quotation:
                key = yield from self.key(":")
            else:
                raise MalformedError
            if key in values:
                raise MalformedError
            values[key] = yield from self.value(depth + 1)
            yield from self._separator("}")
        return json_object(values)

    def _separator(self, end: str) -> Steps[None]:
        """A comma, unless the end comes next."""
        text = self._text
        yield from text.space()
        if (yield from text.peek()) != end and not (yield from text.accept(",")):
            raise MalformedError
        yield from text.space()

    # --- strings ----------------------------------------------------------------------------------

    def _string(self, followers: str = ",]})") -> Steps[str | None]:
        text = self._text
        if self._quotation:
            if (yield from text.accept(self._quotation)):
                return (yield from self._marked(followers))
            # JSON, which some models write here.
            if (yield from text.peek()) != '"':
                return None
        for quotation in ('"""', "'''", '"', "'"):
            if (yield from text.accept(quotation)):
                return (yield from self._quoted(quotation))
        return None

    def _marked(self, followers: str) -> Steps[str]:
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

    def _quoted(self, quotation: str) -> Steps[str]:
        text = self._text
        begin, parts = text.take(), _PARTS_OF_STRINGS[quotation]
        while found := (yield from text.seek(parts)):
            end = text.take()
            text.at += len(found)
            if found == quotation:
                return _unescaped(text.since(begin, end))
            # The next character is escaped.
            if (yield from text.more()):
                text.at += 1
        raise MalformedError


def json_object(values: dict[str, str]) -> str:
    """A JSON object of values that are JSON."""
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()) + "}"


def _json_string(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError as error:  # half a character
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
