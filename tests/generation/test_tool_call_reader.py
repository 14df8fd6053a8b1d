"""Tool calls are told apart from text, in every format of mlx-lm's, however long and cut; nothing is lost."""

import json
import pkgutil
from collections.abc import Iterable
from typing import Any

import attrs
import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep
from tool_call_cases import BLOCKS, FORMATS, MALFORMED, TOOLS, block, call_format, call_in

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.events import Answer, Delta
from runtime.generation.tool_calls.incoming_text import Markers

TAGS = ("<t>", "</t>")


def events_of(
    pieces: Iterable[str], format: str | CallFormat | None, *, is_complete: bool = True, **options: Any
) -> list[Delta]:
    counter = iter(range(1000))
    reader = AnswerReader(
        format=call_format(format) if isinstance(format, str) else format,
        tools=TOOLS,
        new_id=lambda: f"id{next(counter)}",
        **options,
    )
    events = [event for piece in pieces for event in reader.add(piece)]
    return events + reader.finish(is_complete=is_complete)


def joined(events: Iterable[Delta]) -> list[Any]:
    """Events, with consecutive texts as one."""
    parts: list[Any] = []
    for event in events:
        match event:
            case Delta("content" | "reasoning" as kind, text):
                if parts and parts[-1][0] == kind:
                    parts[-1][1] += text
                elif text:
                    parts.append([kind, text])
            case Delta("call_arguments", text, index=index):
                if parts[-1][:2] == ["call_arguments", index]:
                    parts[-1][2] += text
                else:
                    parts.append(["call_arguments", index, text])
            case Delta("call_began" | "call_ended" as kind, index=index, call=call):
                parts.append([kind, index, call])
            case Delta("call_broken", text, index=index):
                parts.append(["call_broken", index, text])
    return parts


def answer_of(events: Iterable[Delta]) -> Answer:
    answer = Answer()
    answer.add(events)
    return answer


def source(events: Iterable[Delta]) -> str:
    return "".join(event.source for event in events)


def cut_off(events: Iterable[Delta]) -> str:
    """The text of the call within which the answer was cut off; "" without one."""
    return "".join(event.text for event in events if event.kind == "call_broken" and event.call is not None)


def in_pieces(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def test_every_parser_of_mlx_lms_has_a_call_here():
    assert {each.name for each in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)} == set(FORMATS)


@sweep(("format", "body", "calls"), BLOCKS)
def test_calls_are_told_apart_in_pieces_of_every_size(format, body, calls):
    text = "Let me see.\n\n" + block(format, body)
    whole = events_of([text], format)
    answer = answer_of(whole)
    assert [(call.name, call.values) for call in answer.calls] == calls
    assert answer.content == "Let me see."
    assert source(whole) == text
    for size in range(1, len(text)):
        events = events_of(in_pieces(text, size), format)
        assert joined(events) == joined(whole)
        assert source(events) == text


@sweep(("format", "body"), MALFORMED)
@sweep("is_complete", [True, False])
def test_a_malformed_call_is_text_and_no_call(format, body, is_complete):
    num_calls = body.count("<|tool_call_end|>")
    for text in (f"So: {block(format, body)}", f"So: {block(format, body)} and on"):
        whole = events_of([text], format, is_complete=is_complete)
        answer = answer_of(whole)
        assert source(whole) == text
        if num_calls:  # those before it are calls
            assert len(answer.calls) <= num_calls
            assert "and then" in answer.content + cut_off(whole) or not answer.calls
        else:
            assert (answer.content + cut_off(whole), answer.calls) == (text, [])
        for size in (1, 2, 3, 7):
            assert joined(events_of(in_pieces(text, size), format, is_complete=is_complete)) == joined(whole)


@pytest.mark.parametrize("format", ["json_tools", "kimi_k2", "mistral"])
def test_arguments_come_as_they_are_written(format):
    body = next(body for each, body, _ in BLOCKS if each == format)
    text = block(format, body)
    reader = AnswerReader(format=call_format(format), tools=TOOLS)
    arguments = ""
    for i, character in enumerate(text, start=1):
        for event in reader.add(character):
            if event.kind == "call_arguments":
                arguments += event.text
        begin = text.index('{"a"')
        written = text[begin:i]
        assert arguments == written[: len('{"a": 12234585, "b": 48838483920}')]
    assert json.loads(arguments) == {"a": 12234585, "b": 48838483920}


@sweep(("format", "body", "calls"), BLOCKS)
def test_a_call_that_is_cut_off_is_no_call(format, body, calls):
    known = call_format(format)
    text = known.start + body
    for end in range(len(text)):
        events = events_of([text[:end]], format, is_complete=False)
        answer = answer_of(events)
        assert source(events) == text[:end]
        if len(calls) > 1 or known.name == "mistral" or "<|tool_call_end|>" in text[:end]:
            # Whole calls of the block may precede the cut.
            assert len(answer.calls) <= len(calls)
        else:
            assert (answer.content + cut_off(events), answer.calls) == (text[:end], [])


def test_an_unclosed_block_counts_where_the_model_ended_the_text():
    text = '<tool_call>{"name": "multiply", "arguments": {"a": 1}}'
    assert [call.name for call in answer_of(events_of([text], "json_tools")).calls] == ["multiply"]
    assert cut_off(events_of([text], "json_tools", is_complete=False)) == text
    text = "<tool_call><function=multiply></function>"
    assert [call.name for call in answer_of(events_of([text], "qwen3_coder")).calls] == ["multiply"]


def test_a_call_that_is_cut_off_has_its_name_and_the_arguments_so_far():
    text = '<tool_call>{"name": "multiply", "arguments": {"a": 1, "b'
    answer = answer_of(events_of([text], "json_tools", is_complete=False))
    assert (answer.content, answer.calls) == ("", [])
    assert (answer.cut_call.name, answer.cut_call.arguments) == ("multiply", '{"a": 1, "b')
    assert answer_of(events_of([text], "json_tools")).cut_call is None


def test_whitespace_around_calls_is_not_content():
    call = block("json_tools", '{"name": "multiply", "arguments": {}}')
    events = events_of([f"Yes.\n\n{call}\n{call}\n"], "json_tools")
    answer = answer_of(events)
    assert (answer.content, len(answer.calls)) == ("Yes.", 2)
    assert answer_of(events_of([f"{call}\n\nDone. "], "json_tools")).content == "\n\nDone. "
    assert answer_of(events_of([" no call \n"], "json_tools")).content == " no call \n"


def test_calls_have_consecutive_numbers_and_ids_of_their_own():
    call = block("json_tools", '{"name": "multiply", "arguments": {}}')
    events = events_of([call * 3], "json_tools")
    assert [(event.index, event.call.id) for event in events if event.kind == "call_began"] == [
        (0, "id0"),
        (1, "id1"),
        (2, "id2"),
    ]
    [name, body, _] = BLOCKS[[format for format, _, _ in BLOCKS].index("kimi_k2")]
    assert answer_of(events_of([block(name, body)], name)).calls[0].id == "functions.multiply:0"
    format = call_format("mistral")
    assert len({format.new_id() for _ in range(100)}) == 100
    assert {len(format.new_id()) for _ in range(100)} == {9}


def test_a_block_ends_the_reasoning_and_tags_in_a_call_are_arguments():
    call = block("json_tools", '{"name": "search", "arguments": {"query": "<t>x</t>"}}')
    events = events_of([f"hm\n{call}<t> so </t> yes"], "json_tools", tags=TAGS, is_thinking=True)
    answer = answer_of(events)
    assert (answer.reasoning, answer.content) == ("hmso", "yes")
    assert answer.calls[0].values == {"query": "<t>x</t>"}
    assert source(events) == f"hm\n{call}<t> so </t> yes"


# --- any text -----------------------------------------------------------------------------------------


def fragments(format: str) -> list[str]:
    known = call_format(format)
    bodies = [body for each, body, _ in BLOCKS if each == format]
    words = [known.start, known.end or "x", *bodies, *(known.start + body + known.end for body in bodies)]
    words += [body[:cut] for body in bodies for cut in (3, len(body) // 2, len(body) - 1)]
    return [*words, "<t>", "</t>", " ", "\n", "a", "{", "}", '"', "\\", "[", "]", ":", ",", "<", "</"]


@pytest.mark.parametrize("format", [None, *FORMATS])
@settings(max_examples=30)
@given(data=st.data())
def test_text_and_calls_always_give_back_what_was_generated(format, data):
    words = fragments(format or "json_tools")
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    is_complete, is_thinking = data.draw(st.booleans()), data.draw(st.booleans())
    options: dict[str, Any] = {"is_complete": is_complete, "tags": TAGS, "is_thinking": is_thinking}
    whole = events_of([text], format, **options)
    assert source(whole) == text
    size = data.draw(st.integers(1, 9))
    cut = events_of(in_pieces(text, size), format, **options)
    assert source(cut) == text
    assert joined(cut) == joined(whole)
    # Each call that begins ends or breaks, with the arguments that were given.
    parts = joined(whole)
    for began, arguments, ended in zip(parts, parts[1:], parts[2:], strict=False):
        if began[0] == "call_began" and ended[0] == "call_ended":
            assert (ended[2].id, ended[2].name, ended[2].arguments) == (began[2].id, began[2].name, arguments[2])
    num_begun = sum(part[0] == "call_began" for part in parts)
    assert num_begun == sum(part[0] in ("call_ended", "call_broken") for part in parts)
    for call in answer_of(whole).calls:
        assert isinstance(call.values, dict)


# --- long blocks ----------------------------------------------------------------------------------


@sweep("name", FORMATS)
def test_a_text_of_many_openings_is_searched_in_linear_time(name, monkeypatch):
    num_searched, search = 0, Markers.search

    def counted(self: Markers, text: str, begin: int) -> Any:
        nonlocal num_searched
        at, found = search(self, text, begin)
        num_searched += at - begin + 1
        return at, found

    monkeypatch.setattr(Markers, "search", counted)
    start, body = call_format(name).start, next(body for each, body, _ in BLOCKS if each == name)
    # Many openings that are never closed: of blocks, and of whatever is in one.
    for unit in (start, *(start + body[:cut] for cut in range(1, len(body), 19)), body[len(body) // 2 :]):
        text = start + body[: len(body) // 2] + unit * (5_000 // len(unit))
        num_searched = 0
        events_of(in_pieces(text, 5), name)
        assert num_searched < 60 * len(text)


@sweep("name", FORMATS)
def test_a_long_call_in_small_pieces_is_read_as_it_was_written(name):
    place = "London; the (big) city [on the Thames], where a<b and 1=1. \n" * 500
    written = place.replace("\n", "\\n") if name == "pythonic" else place
    text = block(name, call_in(name, "get_current_temperature", {"location": written}))
    [call] = answer_of(events_of(in_pieces(text, 3), name)).calls
    assert (call.name, call.values) == ("get_current_temperature", {"location": place})


@sweep(
    ("parsed", "calls"),
    [
        *(({"name": "multiply", "arguments": a}, [("multiply", {"a": 1})]) for a in ({"a": 1}, '{"a": 1}')),
        ([{"name": "multiply", "arguments": {}}] * 2, [("multiply", {})] * 2),
        *[([], []), ({"name": "divide", "arguments": {}}, [])],  # no tool
        ([{"name": "multiply", "arguments": "no object"}, {"name": "multiply", "arguments": {}}], []),
        ({"name": "multiply", "arguments": {"a": float("nan")}}, []),
    ],
)
def test_a_parser_of_ones_own_reads_blocks_of_any_length(parsed, calls):
    format = attrs.evolve(call_format("function_gemma"), name="mine", layout=None, parse=lambda *_: parsed)
    text = block("function_gemma", "x" * 3000)
    answer = answer_of(events_of(in_pieces(f"So: {text}", 7), format))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert answer.content == ("So:" if calls else f"So: {text}")
