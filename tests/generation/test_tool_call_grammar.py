"""A grammar holds a model to its tools, in every format of mlx-lm's: what it lets through is a call as asked for."""

import functools
import json
import random
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import closed_object
from sweeps import sweep
from tool_call_cases import FORMATS, block, call_format, call_in
from transformers import AutoTokenizer

import runtime
from runtime.generation.grammar import Grammar
from runtime.generation.json_schema import closed
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.call_grammar import call_grammar
from runtime.generation.tool_calls.events import Answer
from runtime.generation.tool_calls.tools import Tools, tools_of

CITY = {"type": "string", "enum": ["Lisbon", "Oslo"]}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
FORECAST = closed_object(city=CITY, days=DAYS, note={"type": "string"}, exact={"type": "boolean"})


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


WEATHER = function("get_weather", {**FORECAST, "required": ["city", "days"]}, strict=True)
CLOCK = function("clock")
BAD = function("f", {"type": "object", "not": {"required": ["a"]}})
TAGS = ("<think>", "</think>")


@functools.cache
def tokenizer(format: str, *, has_special_markers: bool) -> TokenizerWrapper:
    """The demo pair's tokenizer, with the markers of a format as tokens or as text."""
    known = call_format(format)
    base = AutoTokenizer.from_pretrained(str(runtime.DEMO_TARGET))
    markers = [known.start, known.end, "[ARGS]", '<|"|>', "<|tool_call_begin|>", "<|sep|>"]
    base.add_tokens([*TAGS, *filter(None, markers if has_special_markers else [])], special_tokens=True)
    base.chat_template = "[ARGS]"
    return TokenizerWrapper(base, tool_parser=known._parse, tool_call_start=known.start, tool_call_end=known.end)


@functools.cache
def _names(of: TokenizerWrapper) -> list[str]:
    return [str(name) for name in of.convert_ids_to_tokens(list(range(len(of))))]


class Writer:
    """Writes texts that the grammar of some tools allows: wanted text where it allows that, else any token."""

    def __init__(
        self, tools: Tools, name: str = "json_tools", *, has_special_markers: bool = True, seed: int = 0, **options: Any
    ) -> None:
        self._tools, self._format = tools, call_format(name)
        self._of = tokenizer(name, has_special_markers=has_special_markers)
        self._grammar = Grammar(call_grammar(tools, self._format, self._of, **options), self._of)
        self._dice = random.Random(seed)

    def write(self, wanted: str = "", max_tokens: int = 300) -> tuple[str, bool]:
        """A text, and whether it is complete."""
        tokens = [0]
        queue = self._of.encode(wanted, add_special_tokens=False)
        self._grammar.restore(None)
        for _ in range(max_tokens):
            logits = self._grammar(mx.array(tokens), mx.zeros((1, len(self._of))))
            allowed = np.flatnonzero(np.array(logits[0]) == 0).tolist()
            if self._of.eos_token_id in allowed and not queue:
                return self._of.decode(tokens[1:]), True
            if queue and queue[0] in allowed:
                tokens.append(queue.pop(0))
                continue
            queue = []
            # Short tokens, and closing ones, so that free text ends.
            choices = self._dice.sample(allowed, min(len(allowed), 40))
            tokens.append(min(choices, key=lambda token: len(_names(self._of)[token]) > 3))
        return self._of.decode(tokens[1:]), False

    def answer(self, text: str) -> Answer:
        """What is read of a text."""
        reader, answer = AnswerReader(format=self._format, tools=self._tools.listed), Answer()
        answer.add([*reader.add(text), *reader.finish(is_complete=True)])
        return answer


CALL = ("get_weather", {"city": "Oslo", "days": 3, "note": "a b", "exact": True})
CALLS = {name: block(name, call_in(name, *CALL)) for name in FORMATS}


@pytest.mark.slow
@sweep("has_special_markers", [True, False])
@sweep("name", FORMATS)
def test_a_call_in_the_models_own_format_is_let_through_as_it_is(name, has_special_markers):
    writer = Writer(tools_of([WEATHER, CLOCK], "required"), name, has_special_markers=has_special_markers)
    assert writer.write(CALLS[name]) == (CALLS[name], True)
    [call] = writer.answer(CALLS[name]).calls
    assert (call.name, call.values) == CALL


@sweep("name", FORMATS)
def test_whatever_is_let_through_is_a_call_as_asked_for(name):
    writer = Writer(tools_of([WEATHER, CLOCK], "get_weather"), name, seed=1)
    for _ in range(6):
        text, is_complete = writer.write(max_tokens=150)
        if is_complete:
            break
    assert is_complete
    answer = writer.answer(text)
    assert (answer.content, len(answer.calls)) == ("", 1), text
    assert answer.calls[0].name == "get_weather"
    jsonschema.validate(answer.calls[0].values, WEATHER["function"]["parameters"])


@sweep("name", ["json_tools", "qwen3_coder", "minicpm5"])
@sweep("has_special_markers", [True, False])
def test_with_auto_text_is_free_and_a_call_is_held_to_its_schema(name, has_special_markers):
    tools = tools_of([WEATHER, CLOCK])
    assert tools.needs_grammar
    writer = Writer(tools, name, has_special_markers=has_special_markers)
    two_calls = "Let me see. " + CALLS[name] + "\nand " + CALLS[name]
    for wanted in ("No call < at all.", two_calls):
        assert writer.write(wanted) == (wanted, True)
    assert len(writer.answer(two_calls).calls) == 2
    assert "Paris" not in writer.write(CALLS[name].replace("Oslo", "Paris"))[0]


def test_the_reasoning_stays_free():
    tools = tools_of([WEATHER], "required")
    whole = "<think>Which city?\n</think>\n\n" + CALLS["json_tools"]
    for begun in ("", "<think>"):
        wanted = whole.removeprefix(begun)
        assert Writer(tools, tags=TAGS, is_thinking=bool(begun)).write(wanted) == (wanted, True)
    text, _ = Writer(tools, tags=TAGS).write("I think", max_tokens=30)
    assert text.startswith(("<think>", "<tool_call>"))


def test_without_parallel_calls_there_is_one():
    for choice in ("auto", "required"):
        for is_parallel in (True, False):
            tools = tools_of([CLOCK], choice, is_parallel=is_parallel)
            if is_parallel is (choice == "auto"):
                assert tools_of([CLOCK], choice) == tools
            call = block("json_tools", call_in("json_tools", "clock", {}))
            text, _ = Writer(tools).write(call + "\n" + call, max_tokens=120)
            assert (text.count("<tool_call>") == 2) is is_parallel


MANY_CALLS = {
    "json_tools": block("json_tools", call_in("json_tools", "clock", {})) * 20,
    "kimi_k2": "<|tool_calls_section_begin|>" + call_in("kimi_k2", "clock", {}) * 20,
    "pythonic": "<|tool_call_start|>[" + ", ".join(["clock()"] * 20),
}


@sweep("name", MANY_CALLS)
@sweep("content", [None, {"const": 1}])
def test_an_answer_that_must_be_calls_has_sixteen_at_most(name, content):
    tools = tools_of([CLOCK], "auto" if content else "required", is_parallel=True)
    writer = Writer(tools, name, content=content)
    text, is_complete = writer.write(MANY_CALLS[name], max_tokens=900)
    assert is_complete
    assert len(writer.answer(text).calls) == 16


def test_more_tools_than_a_grammar_holds_a_model_to_are_refused_at_once():
    many = [function(f"f{i}") for i in range(257)]
    for given in ({"choice": "required"}, {"is_parallel": False}):
        with pytest.raises(runtime.SettingsError, match="hold a model to 256 tools at most, got 257; leave some out"):
            tools_of(many, **given)
        assert tools_of(many[1:], **given) is not None
    assert tools_of(many) is not None
    assert tools_of(many, "f7") is not None


def test_an_answer_is_json_or_a_call_where_both_were_asked_for():
    writer = Writer(tools_of([WEATHER]), content=closed_object(a={"const": 1}))
    assert writer.write('{"a": 1}') == ('{"a": 1}', True)
    assert writer.write(CALLS["json_tools"])[0] == CALLS["json_tools"]


def test_a_schema_that_cannot_be_followed_is_an_error_or_any_json():
    tools = tools_of([BAD], "required")
    with pytest.raises(runtime.SettingsError):
        Writer(tools)
    writer = Writer(tools, loose=["f"])
    text, _ = writer.write('<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>')
    assert writer.answer(text).calls[0].values == {"b": [1]}


def test_a_function_has_no_other_arguments_than_the_listed_ones():
    nested = {"type": "object", "properties": {"b": {"type": "integer"}}}
    of_numbers = {"a": {"type": "integer"}}, '{"a": 1, "x": 2}'
    for properties, said in (({}, '{"x": 1}'), (None, '{"x": 1}'), of_numbers, ({"a": nested}, '{"a": {"x": 1}}')):
        writer = Writer(tools_of([function("f", {"type": "object", "properties": properties})], "required"))
        text, _ = writer.write(f'<tool_call>\n{{"name": "f", "arguments": {said}}}\n</tool_call>')
        assert len(writer.answer(text).calls) == 1
        assert '"x"' not in text


def test_a_function_whose_schema_is_left_out_frees_no_other():
    writer = Writer(tools_of([BAD, WEATHER], "required"), loose=["f"])
    assert "Paris" not in writer.write(CALLS["json_tools"].replace("Oslo", "Paris"))[0]


def test_a_format_of_the_users_own_has_no_grammar():
    def parse(text: str, tools: Any) -> Any:
        return json.loads(text)

    format = CallFormat("mine", "<call>", "</call>", None, parse)
    tools = tools_of([CLOCK], "required")
    with pytest.raises(runtime.SettingsError, match="no grammar is known for the calls of this model"):
        call_grammar(tools, format, tokenizer("json_tools", has_special_markers=True))


@sweep("choice", ["auto", "required"])
def test_only_allowed_tools_are_called(choice):
    tools = tools_of([WEATHER, CLOCK, {"name": "stop"}], choice, allowed=["clock", "stop"])
    assert len(tools.template_variables["tools"]) == 3
    writer = Writer(tools)
    for name in ("clock", "stop"):
        text, is_complete = writer.write(block("json_tools", call_in("json_tools", name, {})))
        assert is_complete
        assert [call.name for call in writer.answer(text).calls] == [name]
    assert "get_weather" not in writer.write(CALLS["json_tools"])[0]


# --- schemas --------------------------------------------------------------------------------------

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
CLOSED: dict[str, Any] = {"additionalProperties": False}
REFERENCE: dict[str, Any] = {"$ref": "#/$defs/A"}


@sweep(
    ("schema", "expected"),
    [
        (A, {**A, **CLOSED}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, **CLOSED}),
        ({"properties": {"o": A}}, {"properties": {"o": {**A, **CLOSED}}, **CLOSED}),
        ({"type": "array", "items": A}, {"type": "array", "items": {**A, **CLOSED}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [{**A, **CLOSED}, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [{**A, **CLOSED}]}),
        ({**REFERENCE, "$defs": {"A": A}}, {**REFERENCE, "$defs": {"A": {**A, **CLOSED}}}),
        ({"type": "object", "additionalProperties": A}, {"type": "object", "additionalProperties": {**A, **CLOSED}}),
    ],
)
def test_an_object_with_listed_properties_has_no_others(schema, expected):
    assert closed(schema) == expected


@sweep(
    "schema",
    [
        {"type": "object"},
        True,
        *({**A, "additionalProperties": others} for others in (True, {"type": "string"})),
        {**A, "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": True}, "required": ["b"]},
        {"type": "object", "properties": {"a": True}, "minProperties": 2},
        # Each part would forbid the properties of the others.
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {**A, "if": {"required": ["a"]}, "then": B},
        {"anyOf": [A, B], "allOf": [{"required": ["c"]}]},
        {**B, **REFERENCE, "$defs": {"A": A}},
        {"allOf": [REFERENCE, B], "$defs": {"A": A}},
        {"allOf": [REFERENCE, B], "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": A}},
        {"not": REFERENCE, "$defs": {"A": A}},
    ],
)
def test_an_object_that_may_have_others_stays_open(schema):
    assert closed(schema) == schema
