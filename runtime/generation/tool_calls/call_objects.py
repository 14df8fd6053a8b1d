"""The reader of calls that are JSON objects, and of JSON values."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping

import attrs

from runtime.generation.tool_calls.argument_values import ToolArguments, kind_of
from runtime.generation.tool_calls.call_format import NAME, ParsedCall
from runtime.generation.tool_calls.incoming_text import IncomingText, MalformedError, ParsingSteps

# Characters of names of functions.
OF_NAMES = frozenset(string.ascii_letters + string.digits + "_.:-")
_OF_WORDS = OF_NAMES | {"+"}
_MEMBERS = frozenset(("name", "id", "type", "arguments"))  # of a call


@attrs.define
class ObjectReader:
    """Reads objects."""

    _text: IncomingText
    _known: Mapping[str, ToolArguments]
    has_begun: bool = False  # whether the object that was read last has its name, and more than that

    def is_next(self) -> ParsingSteps[bool]:
        """Pass the beginning of an object with members, if it comes next."""
        return (yield from self._has_next("{", '"'))

    def is_call_next(self) -> ParsingSteps[bool]:
        """Pass the beginning of a call of a tool, if it comes next. Any other object may be an answer in JSON."""
        text = self._text
        if not (yield from self.is_next()):
            return False
        # As Llama 3 writes it.
        if (yield from text.accept("type")) and not (yield from self._has_next('"', ":", '"function"', ",", '"')):
            return False
        if not (yield from self._has_next('name"', ":", '"')):
            return False
        name = yield from text.matching(OF_NAMES)
        if name not in self._known or not (yield from self._has_next('"', ",", '"')):
            return False
        key = "parameters" if (yield from text.peek()) == "p" else "arguments"
        if not (yield from self._has_next(f'{key}"', ":")):
            return False
        yield from text.space()
        yield from text.accept('"')
        return (yield from text.peek()) == "{"

    def call(
        self, stream: Callable[[str, str | None], ParsingSteps[None]] | None = None
    ) -> ParsingSteps[ParsedCall | None]:
        """A call: an object with a name and arguments, in any order; without `stream`, it has no other members.

        Args:
            stream: reads the arguments of a call with this name and id while it is written.

        Returns: None if it was streamed. Raises: MalformedError: it is no call.
        """
        text, self.has_begun = self._text, False
        members: dict[str, str] = {}
        is_given, comma = False, ""
        yield from text.expect("{")
        yield from text.space()
        while not (yield from text.accept("}")):
            yield from text.expect(comma)
            yield from text.space()
            key = json.loads((yield from self._string()))
            key = "arguments" if key == "parameters" else key
            yield from text.space()
            yield from text.expect(":")
            yield from text.space()
            if key in members:
                raise MalformedError
            can_stream = key == "arguments" and "name" in members and (yield from text.peek()) == "{"
            if can_stream and stream is not None:
                is_given, members[key], self.has_begun = True, "", True
                yield from stream(self._name(members), _id(members))
            else:
                members[key] = yield from self.value()
                self.has_begun = "name" in members
            comma = ","
            yield from text.space()
        if is_given:
            return None
        has_others = not members.keys() <= _MEMBERS
        name, arguments = self._name(members), members.get("arguments", "null")
        arguments = json.loads(arguments) if arguments.startswith('"') else arguments
        # Other members may be its arguments.
        if arguments == "null" and not has_others and name in self._known and not self._known[name].required:
            arguments = "{}"
        if kind_of(arguments.strip()) != "object" or (has_others and stream is None):
            raise MalformedError
        return ParsedCall(name, arguments, _id(members))

    def value(self) -> ParsingSteps[str]:
        """The next JSON value, as it is written. Raises: MalformedError: there is none."""
        text = self._text
        first = yield from text.peek()
        if first == '"':
            return (yield from self._string())
        begin = text.take()
        yield from (text.json() if first in ("{", "[") else text.matching(_OF_WORDS))
        value = text.since(begin, text.take())
        if kind_of(value) is None:
            raise MalformedError
        return value

    def _string(self) -> ParsingSteps[str]:
        yield from self._text.expect('"')
        value = '"' + (yield from self._text.string('"')) + '"'
        if kind_of(value) is None:
            raise MalformedError
        return value

    def _name(self, members: Mapping[str, str]) -> str:
        name = json.loads(members.get("name", "null"))
        if not isinstance(name, str) or not (name in self._known or NAME.fullmatch(name)):
            raise MalformedError
        return name

    def _has_next(self, *parts: str) -> ParsingSteps[bool]:
        """Pass these texts, with any white space before each; whether all of them come next."""
        for part in parts:
            yield from self._text.space()
            if not (yield from self._text.accept(part)):
                return False
        return True


def _id(members: Mapping[str, str]) -> str | None:
    id = json.loads(members.get("id", "null"))
    return id if isinstance(id, str) and id else None
