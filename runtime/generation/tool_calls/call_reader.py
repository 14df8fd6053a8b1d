"""The reader of one block of calls, by the layout of its format.

A call is read exactly as it was written, or not at all. White space of a string belongs to it. An end marker ends a
string only before what may follow it: another argument, or the end of the call. A text that could be two different
calls is none.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from runtime.generation.tool_calls.argument_values import (
    ANY,
    ArgumentType,
    LiteralReader,
    ToolArguments,
    is_json,
    json_object,
    kind_of,
)
from runtime.generation.tool_calls.call_format import NAME, CallFormat, CallLayout, ParsedCall
from runtime.generation.tool_calls.call_objects import OF_NAMES, ObjectReader
from runtime.generation.tool_calls.incoming_text import IncomingText, MalformedError, Markers, ParsingSteps

if TYPE_CHECKING:
    from runtime.generation.tool_calls.answer_reader import AnswerReader

_MAX_CHARS = 256  # of a key, a type or an id
_PARTS = re.compile(r"(\{name\}:\{number\}|\{\w+\}|[\s\0]+)")
_NUMBERED_NAME = re.compile(r"(.+):\d{1,9}")
_FENCE = "```"


@attrs.define
class CutOffError(Exception):
    """The answer ends within a call."""

    call: ParsedCall | None  # as far as it was written, unless it was given


_UNKNOWN = ToolArguments({})


class CallReader:
    """Reads blocks of calls, and gives its calls to `sink`, with the text before the cursor each time."""

    def __init__(
        self, text: IncomingText, format: CallFormat, tools: Sequence[Mapping[str, Any]], sink: AnswerReader
    ) -> None:
        self._text, self._format, self._tools, self._sink = text, format, tools, sink
        self._known = {tool["function"]["name"]: ToolArguments.of(tool["function"]) for tool in tools}
        self._objects = ObjectReader(text, self._known)
        self._layouts = () if format.layout is None else (format.layout, *format.layout.others)
        opening = "" if format.layout is None else format.layout.opening
        start = "" if format.bare == "always" else format.start
        # With which a block may begin; and calls without a marker, where an answer begins or after a call.
        self.markers = tuple(dict.fromkeys(marker for marker in (start, opening) if marker))
        self.bare_markers = () if format.bare == "never" else ("{", "[", _FENCE)
        self.end = format.end  # with which a block ends; "" if nothing marks its end
        # Of the block that is being read.
        self.is_in_call = False  # whether the text so far has the head of a call that is not over
        self.num_retried = 0  # characters that were read twice
        self._has_begun = False
        self._calls: list[ParsedCall] = []  # complete, and not given yet
        self._is_bare = False  # whether it begins without its marker
        self._pairs_markers = True  # whether each argument that begins in a string also ends in it
        self._has_unpaired = False  # whether an argument has begun in a string that did not end

    @property
    def has_begun(self) -> bool:
        """Whether an argument of the block has begun."""
        return self._has_begun or self._objects.has_begun

    @property
    def ends_of_block(self) -> tuple[str, ...]:
        """Markers without which a call, within which the text so far ends, is not over; none outside of calls, or if
        nothing marks their end.
        """
        return (self.end,) if self.is_in_call and self.end and not self._is_bare else ()

    def read(self) -> ParsingSteps[None]:
        """Read the block at the cursor, and give its calls.

        Raises:
            MalformedError: it is none, from the text on that was not given.
            CutOffError: the answer ends within it.
        """
        self.num_retried, self._has_begun, self._pairs_markers = 0, False, True
        self._objects.has_begun = False
        try:
            try:
                yield from self._read_block()
            except MalformedError:
                # Markers that do not pair may be words of the string.
                if not (self._text.is_over and self._has_unpaired):
                    raise
                self.num_retried = self._text.num_passed
                self._text.back()
                self._pairs_markers = self._text.has_run_out = False
                yield from self._read_block()
        finally:
            self.is_in_call = False

    def _read_block(self) -> ParsingSteps[None]:
        self._calls, self._has_unpaired = [], False
        self._is_bare = self._format.bare == "always" or not (yield from self._text.accept(self._format.start))
        if self._is_bare and self.bare_markers:
            yield from self._read_bare()
        elif not self._layouts:
            yield from self._read_by_parser()
        elif (begun := (yield from self._begun(is_bare=self._is_bare))) is not None:
            self.is_in_call = True
            yield from self._read_calls(*begun)
        else:
            raise MalformedError

    def _begun(self, *, is_bare: bool) -> ParsingSteps[tuple[CallLayout, ParsedCall] | None]:
        """The layout and the head of the first call of a block, after its marker; None if none follows."""
        place = self._text.take()
        for layout in self._layouts:
            yield from self._text.space()
            if (yield from self._text.accept(layout.block[0].strip())):
                yield from self._text.space()
                if (head := (yield from self._head(layout, is_bare=is_bare))) is not None:
                    return layout, head
            self._text.back(place)
        return None

    def _read_by_parser(self) -> ParsingSteps[None]:
        """A block up to its end marker, by a parser that is not known here."""
        text, end = self._text, self.end
        self.is_in_call = True
        begin = text.take()
        found = yield from text.seek(Markers((end,) if end else ()))
        body = text.since(begin, text.take())
        yield from text.accept(found)
        if not found and end and not text.is_complete:
            raise MalformedError
        if not body.strip() or (calls := self._format.parse(body, self._tools)) is None:
            raise MalformedError
        self._sink.give_calls(calls)

    # --- calls without markers --------------------------------------------------------------------

    def _read_bare(self) -> ParsingSteps[None]:
        """An object that is a call, a list of such, or a fence with either, which ends the answer.

        What only begins as such may be an answer in JSON.
        """
        text = self._text
        is_fenced = yield from text.accept(_FENCE)
        if is_fenced:
            yield from text.accept("json")
        yield from text.space()
        is_list = yield from text.accept("[")
        is_next = True
        while is_next:
            if not (yield from text.follows(self._objects.is_call_next())):
                raise MalformedError
            self.is_in_call = True
            yield from text.space()
            call = yield from self._objects.call()
            assert call is not None
            self._calls.append(call)
            after = text.take()
            yield from text.space()
            is_next = (yield from text.accept(",")) if is_list else is_fenced and (yield from text.peek()) == "{"
        if is_list:
            yield from text.expect("]")
            after = text.take()
        yield from text.space()
        if is_fenced:
            # With a text behind it, a fence is an example, and no broken call.
            self._objects.has_begun = False
            yield from text.accept(_FENCE)
            yield from text.space()
            if (yield from text.more()) or not text.is_complete:
                raise MalformedError
        elif not self.end or not (yield from text.accept(self.end)):
            text.back(after)
        if len(self._calls) > 1 and not self._format.is_parallel:
            raise MalformedError
        if not all(self._known[call.name].may_take(call.arguments) for call in self._calls):
            raise MalformedError
        self._sink.give_calls(self._calls)
        self._sink.end_block()

    # --- calls ------------------------------------------------------------------------------------

    def _read_calls(self, layout: CallLayout, head: ParsedCall) -> ParsingSteps[None]:
        text = self._text
        while True:
            is_given = not layout.key
            if layout.is_object:
                is_given = yield from self._read_object()
            elif is_given:
                self._sink.begin_call(head.name, head.id)
                yield from self._read_streamed()
                yield from text.space()
                yield from self._expect(layout.tail.strip())
            else:
                arguments = yield from self._read_arguments(layout, head)
                self._calls.append(attrs.evolve(head, arguments=arguments))
            # The end of such a call needs nothing after it.
            is_over = is_given and not layout.is_object
            if is_over:
                self._sink.end_call()
            after = text.take()
            if (yield from self._closes(layout)):
                break
            text.back(after)
            if (yield from self._next_head(layout)) is None:
                text.back(after)
                if is_over and not self.end:
                    return
                call = None if is_given else self._calls.pop()
                if call is not None and not layout.tail.strip():
                    # Further arguments may have been meant.
                    call = attrs.evolve(call, arguments=call.arguments[:-1])
                self._fail(call)
            text.back(after)
            if layout.is_object:
                self._end_object(is_given=is_given)
            found = yield from self._next_head(layout)
            assert found is not None
            head = found
        if layout.is_object:
            self._end_object(is_given=is_given)
        elif not is_over:
            self._sink.give_calls(self._calls)
        self._sink.end_block()

    def _end_object(self, *, is_given: bool) -> None:
        if is_given:
            self._sink.end_call()
        else:
            self._sink.give_calls(self._calls)
            self._calls = []

    def _closes(self, layout: CallLayout) -> ParsingSteps[bool]:
        """Pass the end of the block, if it comes next."""
        text = self._text
        yield from text.space()
        closer = layout.block[1].strip()
        if closer:
            if not (yield from text.accept(closer)):
                return False
            after = text.take()
            yield from text.space()
        if (end := self.end) and (yield from text.accept(end)):
            return True
        if not end or self._is_bare:
            if closer:
                text.back(after)
            return bool(closer) or self._is_bare
        return text.is_over and text.is_complete and not (yield from text.peek())

    def _next_head(self, layout: CallLayout) -> ParsingSteps[ParsedCall | None]:
        """Pass the head of another call of the block, if it comes next."""
        if layout.between_calls is None and layout.values == "text" and not layout.opening:
            return None  # a value may hold its own end marker, and a tool's name after it
        yield from self._text.space()
        between = (layout.between_calls or "").strip()
        if not (yield from self._text.accept(between)):
            return None
        yield from self._text.space()
        return (yield from self._head(layout, is_bare=self._is_bare))

    def _head(self, layout: CallLayout, *, is_bare: bool) -> ParsingSteps[ParsedCall | None]:
        text = self._text
        if layout.is_object:
            return ParsedCall("", "") if (yield from text.follows(self._objects.is_next())) else None
        place = text.take()
        for head in (layout.head, *layout.other_heads):
            parts = yield from self._parts(head)
            if parts is not None and not layout.key:
                yield from text.space()
                parts = parts if (yield from text.peek()) == "{" else None
            if parts is not None:
                name = parts["name"]
                if layout.values == "text" and not (yield from self._goes_on(layout)):
                    text.back(place)
                    continue
                # Without a marker after it, any word could be a name.
                must_be_known = is_bare or head.strip("\0").endswith("{name}")
                if name in self._known or (not must_be_known and NAME.fullmatch(name)):
                    return ParsedCall(name, "", parts.get("id"))
            text.back(place)
        return None

    def _goes_on(self, layout: CallLayout) -> ParsingSteps[bool]:
        """Whether an argument follows the head of a call, or the call's end, or the end of the answer."""
        text = self._text
        place, had_run_out = text.take(), text.has_run_out
        text.has_run_out = False
        for begin in (layout.key.partition("{")[0], layout.whole_arguments[0], layout.tail.strip() or self.end):
            yield from text.space()
            is_next = begin and (yield from text.accept(begin))
            text.back(place)
            if is_next:
                break
        is_end, text.has_run_out = text.has_run_out, text.has_run_out or had_run_out
        return bool(is_next) or is_end

    def _parts(self, layout: str) -> ParsingSteps[dict[str, str] | None]:
        """Pass a text with these parts, and return them by name; None if it does not come next."""
        text, found = self._text, dict[str, str]()
        parts = [part for part in _PARTS.split(layout.strip("\0 \n")) if part]
        for part, following in zip(parts, [*parts[1:], ""], strict=True):
            if part.isspace() or part == "\0":
                yield from text.space()
            elif part == "{name}:{number}":
                word = yield from text.matching(OF_NAMES)
                if (numbered := _NUMBERED_NAME.fullmatch(word)) is None:
                    return None
                is_function = "functions." in layout
                found |= {"name": numbered[1], "id": "functions." * is_function + word}
            elif part == "{name}":
                found["name"] = yield from text.matching(OF_NAMES)
                yield from text.space()
            elif part == "{number}":
                if not (yield from text.matching(OF_NAMES)).isdigit():
                    return None
            elif part.startswith("{") and len(part) > 1:
                value = yield from text.run(following[0] + "\n", _MAX_CHARS)
                found[part[1:-1]] = html.unescape(value) if "&" in value and 'key="' in layout else value
                if not value:
                    return None
            elif not (yield from text.accept(part)):
                return None
        return found

    def _expect(self, text: str) -> ParsingSteps[None]:
        if not (yield from self._text.accept(text)):
            self._fail(None)

    def _fail(self, call: ParsedCall | None) -> NoReturn:
        """Raises: CutOffError: because of the end of the answer; MalformedError: because of another text."""
        if not self._text.is_over or self._text.is_complete or not self._text.has_run_out:
            raise MalformedError
        if self._calls:
            self._sink.give_calls(self._calls)
        raise CutOffError(call)

    # --- arguments that are one JSON object -------------------------------------------------------

    def _read_object(self) -> ParsingSteps[bool]:
        """A call that is an object; whether it was given already."""
        try:
            call = yield from self._objects.call(self._stream_call)
        except MalformedError:
            self._fail(None)
        if call is not None:
            self._calls.append(call)
        return call is None

    def _stream_call(self, name: str, id: str | None) -> ParsingSteps[None]:
        self._sink.begin_call(name, id)
        yield from self._read_streamed()

    def _read_streamed(self) -> ParsingSteps[None]:
        """The JSON object of a call that was begun."""
        arguments: list[str] = []
        if not (yield from self._text.json(lambda: arguments.append(self._sink.add_arguments()))):
            self._fail(None)
        if not is_json("".join(arguments)):
            raise MalformedError

    # --- arguments that are written one by one ----------------------------------------------------

    def _read_arguments(self, layout: CallLayout, head: ParsedCall) -> ParsingSteps[str]:
        """The arguments of a call, and its tail."""
        text, tool = self._text, self._known.get(head.name, _UNKNOWN)
        values: dict[str, str] = {}
        try:
            yield from text.space()
            whole, end = layout.whole_arguments
            if whole and (yield from text.accept(whole)):
                arguments = yield from self._objects.value()
                yield from text.space()
                yield from text.expect(end)
                if kind_of(arguments) != "object":
                    raise MalformedError
            else:
                reader = self._read_texts if layout.values == "text" else self._read_literals
                yield from reader(layout, tool, values)
                arguments = json_object(values)
            yield from text.space()
            yield from text.expect(layout.tail.strip())
        except MalformedError:
            self._fail(attrs.evolve(head, arguments=json_object(values)[:-1]))
        return arguments

    def _read_literals(self, layout: CallLayout, tool: ToolArguments, values: dict[str, str]) -> ParsingSteps[None]:
        text = self._text
        self._has_begun = True
        reader = LiteralReader(text, "" if layout.values == "python" else layout.values)
        known = sorted(tool.types, key=len, reverse=True)
        while (yield from text.peek()) != layout.tail:
            key = yield from reader.key(layout.key.removeprefix("{key}"), known)
            value = yield from reader.value()
            if key in values:
                raise MalformedError
            values[key] = value
            yield from reader.separator(layout.tail)

    def _read_texts(self, layout: CallLayout, tool: ToolArguments, values: dict[str, str]) -> ParsingSteps[None]:
        text = self._text
        while True:
            yield from text.space()
            place = text.take()
            if (parts := (yield from self._parts(layout.key))) is None:
                text.back(place)
                return
            key = parts["key"]
            if key in values:
                raise MalformedError
            kind = tool.types.get(key, ANY)
            if "type" in parts:
                kind = _STRING if parts["type"] == "string" else _NO_STRING
            written = yield from self._read_json(layout, kind)
            if not written:
                written = yield from self._read_text(layout, tool, values, key, kind)
            if (value := kind.json_of(written)) is None:
                raise MalformedError
            values[key] = value

    def _read_json(self, layout: CallLayout, kind: ArgumentType) -> ParsingSteps[str]:
        """An argument that can only be JSON, and its end marker; "" if it is neither an object nor a list."""
        text = self._text
        place = text.take()
        if "string" not in kind.types:
            self._has_begun = True
            yield from text.space()
            if (yield from text.peek()) in ("{", "["):
                try:
                    value = yield from self._objects.value()
                    yield from text.space()
                    if (yield from text.accept(_stripped(layout.value_end))):
                        return value
                except MalformedError:
                    pass  # it may be written as in Python
        text.back(place)
        return ""

    def _read_text(
        self, layout: CallLayout, tool: ToolArguments, values: dict[str, str], key: str, kind: ArgumentType
    ) -> ParsingSteps[str]:
        """The text of an argument, and its end marker."""
        text, end, opening = self._text, _stripped(layout.value_end), layout.key.partition("{")[0]
        place = text.take()
        yield from text.space()
        if is_quoted := bool(layout.quotation[0]) and (yield from text.accept(layout.quotation[0])):
            end = layout.quotation[1] + end
        else:
            text.back(place)
            if layout.key.endswith("\n") and not (yield from text.accept("\r\n")):
                yield from text.accept("\n")
        begin, num_open, num_ends, is_ambiguous = text.take(), 0, 0, False
        self._has_begun = True
        pairs = self._pairs_markers and not is_quoted
        markers = Markers((end, opening, *self.markers) if pairs else (end, *self.markers))
        while found := (yield from text.seek(markers)):
            at = text.take()
            if found == opening:
                if (yield from self._parts(layout.key)) is not None:
                    num_open += 1
                    self._has_unpaired = True
                    continue
                text.back(at)
            # What follows may be another call, where one lacks its end.
            if found in self.markers and not num_open and (num_ends or not (self._pairs_markers or is_quoted)):
                raise MalformedError
            text.at += len(found)
            if found != end:
                continue
            after = text.take()
            following = yield from text.follows(self._next_argument(layout))
            next_key = "" if following is None else following["key"]
            is_possible = next_key not in ("", *values, key) and tool.may_have(next_key)
            if num_open:
                num_open -= 1
                is_ambiguous |= is_possible or (yield from text.follows(self._ends_before_call(layout)))
                continue
            num_ends += 1
            if following is None:
                # A value of another type is whole here, or goes on.
                is_whole = num_ends == 1 and kind.is_json(text.since(begin, at))
                if not (is_whole or (yield from self._may_end_call(layout, end))):
                    continue
                text.back(after)
            value = text.since(begin, at)
            # An argument that the call cannot have may be part of a string, or a mistake.
            if is_ambiguous or not (following is None or is_possible or kind.is_json(value)):
                raise MalformedError
            if not self._pairs_markers and self._may_lack_end(layout, tool, value, (*values, key)):
                raise MalformedError
            self._has_unpaired = False
            return value if is_quoted else _without_newline(value, layout)
        if "string" in kind.types:
            so_far = text.since(begin, text.take())
            so_far = so_far[: Markers((end,)).search(so_far, max(0, len(so_far) - len(end)))[0]]
            values[key] = json.dumps(_without_newline(so_far, layout), ensure_ascii=False)[:-1]
        raise MalformedError

    def _may_lack_end(self, layout: CallLayout, tool: ToolArguments, value: str, known: Collection[str]) -> bool:
        """Whether an argument has begun in a string that may be another one of the call itself."""
        opening, _, rest = layout.key.partition("{key}")
        keys = {part.partition(rest[:1])[0] for part in value.split(opening)[1:]}
        return any(tool.may_have(each) for each in keys.difference(known))

    def _may_end_call(self, layout: CallLayout, end: str) -> ParsingSteps[bool]:
        """Whether the end of a string, before the cursor, ends the call; if not, the cursor is where to read on."""
        text = self._text
        after = text.take()
        yield from text.space()
        if not (yield from text.accept(layout.tail.strip())):
            text.back(after)
            return False
        tail = text.take()
        if not (yield from self._closes(layout)):
            text.back(tail)
            has_next = (yield from self._next_head(layout)) is not None
            text.back(after)
            return has_next
        # The string may also have had the end of a call in it. Then that end comes again before another block. If
        # what looks like a block comes first, it may be either.
        markers, has_block = Markers((*self.markers, end)), False
        while found := (yield from text.seek(markers)):
            place = text.take()
            if found == end:
                text.at += len(end)
                if (yield from self._ends_argument(layout)):
                    if has_block:
                        raise MalformedError
                    text.back(place)
                    return False
            else:
                is_bare = not (yield from text.accept(self._format.start))
                if (yield from self._begun(is_bare=is_bare)) is not None:
                    return True
                has_block = True
            text.back(place)
            text.at += len(found)
        return True

    def _next_argument(self, layout: CallLayout) -> ParsingSteps[dict[str, str] | None]:
        yield from self._text.space()
        return (yield from self._parts(layout.key))

    def _ends_argument(self, layout: CallLayout) -> ParsingSteps[bool]:
        """Whether another argument follows, or the end of the call and of the block."""
        text = self._text
        if (yield from text.follows(self._next_argument(layout))) is not None:
            return True
        yield from text.space()
        if not (yield from text.accept(layout.tail.strip())):
            return False
        place = text.take()
        yield from text.space()
        if self._is_bare or (yield from text.accept(self.end)):
            return True
        text.back(place)
        return (yield from self._next_head(layout)) is not None

    def _ends_before_call(self, layout: CallLayout) -> ParsingSteps[bool]:
        """Whether the end of the call comes next, and another call of the block."""
        yield from self._text.space()
        has_ended = yield from self._text.accept(layout.tail.strip())
        return has_ended and (yield from self._next_head(layout)) is not None


_STRING = ArgumentType(frozenset(("string",)))
_NO_STRING = ArgumentType(ANY.types - _STRING.types)


def _stripped(text: str) -> str:
    return text.strip("\0 \n")


def _without_newline(text: str, layout: CallLayout) -> str:
    """The text without the newline that the layout has before an end marker."""
    if not layout.value_end.startswith("\n") or not text.endswith("\n"):
        return text
    return text[:-1].removesuffix("\r")
