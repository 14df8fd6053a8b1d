"""Chats that a template refuses, or texts of which it leaves out, are repaired; all others are rendered as they are."""

import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from sweeps import sweep
from template_families import NEMO, TEMPLATES, templated

import runtime
from runtime.generation.chat_template.rendering import for_template, render_chat_template


def message_of(role: str, text: str = "first") -> dict[str, Any]:
    return {"role": role, "content": text}


system, developer, user, says = (partial(message_of, role) for role in ("system", "developer", "user", "assistant"))


def calls(*arguments: Any, ids: Sequence[str | None] = ("callid001", "callid002"), **more: Any) -> dict[str, Any]:
    listed = []
    for id, argument in zip(ids, arguments, strict=False):
        call = {"type": "function", "function": {"name": "look", "arguments": argument}}
        listed.append(call if id is None else {**call, "id": id})
    return {"role": "assistant", "content": "", **more, "tool_calls": listed}


def result(text: str, id: str | None = "callid001") -> dict[str, Any]:
    return {"role": "tool", "content": text} if id is None else {"role": "tool", "content": text, "tool_call_id": id}


def tool(parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "parameters": parameters or {"type": "object", "properties": {}}, **more}
    return {"type": "function", "function": function}


FINE = '{"city": "Lima"}'
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
TOOLS = [tool(CITY, description="looks")]
ANSWERED = (user("one"), says("two"))
CALLED = (user("one"), calls(FINE), result("sunny"))

# Chats, and the texts that a prompt must have. Sources: ai-dynamo/dynamo #10206, vllm #6862, llama.cpp #5665,
# adk-python #1373, mlx-lm #1375, omlx #854, sglang #28035, vllm #9019.
CHATS: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
    "a system message": ([system(), user("one")], "first one"),
    "a developer's": ([developer("first"), user("one")], "first one"),
    "only a system message": ([system()], "first"),
    "two system messages": ([system(), system("second"), user("one")], "first second one"),
    "a developer's behind it": ([system(), developer("second"), user("one")], "first second one"),
    "three, in turn": ([system(), developer("second"), system("third"), user("one")], "first second third one"),
    "a later one": ([system(), *ANSWERED, system("second"), user("three")], "first second three"),
    "a later one of the developer's": ([system(), *ANSWERED, developer("second"), user("three")], "first second three"),
    "only a later one": ([*ANSWERED, system("first"), user("three")], "first three"),
    "one at the end": ([user("one"), system("first")], "one first"),
    "two questions": ([user("one"), user("two")], "one two"),
    "two answers": ([*ANSWERED, says("three"), user("four")], "one two three four"),
    "an answer first": ([says("zero"), user("one")], "zero one"),
    "a question behind a result": ([*CALLED, user("three")], "one sunny three"),
    "a question in place of a result": ([user("one"), calls(FINE), user("three")], "one Lima three"),
    "a result without its call": ([result("sunny"), user("one")], "sunny one"),
    "a result behind an answer": ([*ANSWERED, result("sunny"), user("three")], "two sunny three"),
    "a result of another call": ([*CALLED[:2], result("sunny", "other0001"), user("three")], "sunny three"),
    "two calls": ([user("one"), calls(FINE, FINE), result("sunny"), result("rainy", "callid002")], "sunny rainy"),
    "two answers with a call each": (
        [user("one"), calls(FINE), calls(FINE, ids=["callid002"]), result("sunny"), result("rainy", "callid002")],
        "one sunny rainy",
    ),
    "a result of another call before its own": (
        [user("one"), calls(FINE), result("sunny", "other0001"), result("rainy")],
        "one sunny rainy",
    ),
    "a text beside a call": ([user("one"), calls(FINE, content="beside"), result("sunny")], "one beside sunny"),
    "a call first": ([system(), calls(FINE), result("sunny"), user("three")], "Lima sunny three"),
    "other ids": ([user("one"), calls(FINE, ids=["toolu_01A"]), result("sunny", "toolu_01A")], "one sunny"),
    "no ids": ([user("one"), calls(FINE, FINE, ids=[None, None]), result("sunny", None)], "one sunny"),
    "half a call": ([user("one"), calls('{"city": "Lis'), result("bad"), says("two"), user("three")], "one bad three"),
    "no content": ([user("one"), calls(FINE, content=None), result("sunny")], "one sunny"),
    "no calls": ([user("one"), {**says("two"), "tool_calls": []}, user("three")], "one two three"),
    "an empty answer": ([user("one"), says(""), user("three")], "one three"),
    "a system message before an answer": ([system(), *ANSWERED], "first one two"),
    "a system message before a result": ([system(), *CALLED], "first one sunny"),
}
ARGUMENTS = ['{"city": "Lis', "[1]", "null", '"x"', "{} trailing", "", "   ", "5", None]


@sweep("tools", [None, TOOLS])
@sweep("chat", CHATS)
@sweep("family", TEMPLATES)
def test_every_family_takes_every_chat_and_keeps_its_texts_and_what_it_takes_whole_as_it_is(family, chat, tools):
    messages, words = CHATS[chat]
    before, tokenizer = json.dumps(messages), templated(TEMPLATES[family])
    text = render_chat_template(messages, tokenizer, tools=tools)
    # Behind the tools, which may have the same words. A system message may have come to the front.
    found = [text.find(word) for word in words.split()]
    assert -1 not in found
    # So may the result of another call have come behind its neighbours.
    if chat == "a result of another call before its own":
        found.sort()
    if not (chat == "one at the end" and found[1] < found[0]):
        assert found == sorted(found)
    assert json.dumps(messages) == before
    try:
        how: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        plain = tokenizer.apply_chat_template(for_template(messages), **how)
    except Exception:
        return
    num_calls = sum(len(message.get("tool_calls", ())) for message in messages)
    if all(word in plain for word in words.split()) and plain.count("<call>") == num_calls:
        assert text == plain


@sweep("arguments", ARGUMENTS)
@sweep("family", TEMPLATES)
def test_a_malformed_call_stays_beside_a_good_one(family, arguments):
    """local-inference-lab/vllm #684."""
    results = result("sunny"), result("bad", "callid002")
    messages = [user("one"), calls(FINE, arguments), *results, says("x"), user("end")]
    text = render_chat_template(messages, templated(TEMPLATES[family]), tools=TOOLS)
    assert re.search("city.{1,6}Lima", text)
    assert all(word in text for word in ("sunny", "bad", "end"))
    if isinstance(arguments, str) and "Lis" in arguments:
        assert "Lis" in text


TOOLS_TO_FILL = [
    tool(CITY),
    tool({"type": "object"}, description="looks"),
    tool({"type": "object", "properties": {"city": {"type": "string"}}}, description="looks"),
    tool({"type": "object", "properties": {"city": {"type": ["string", "null"]}}}),
    tool({"type": "object", "properties": {"city": True}}),
    tool({"type": "object", "properties": {"at": {"type": "array", "items": {"properties": {"x": {}}}}}}),
]


@sweep("given", TOOLS_TO_FILL)
@sweep("family", ["gpt-oss", "hermes", "seed-oss", "chatml"])
def test_tools_are_filled_where_a_template_cannot_do_without(family, given):
    assert "look" in render_chat_template([user("one")], templated(TEMPLATES[family]), tools=[given])


@sweep("continues", [True, False])
def test_a_system_message_stays_in_a_chat_that_ends_with_an_answer(continues):
    chat = [system(), user("one"), {**says("two"), "tool_calls": [], "prefix": continues}]
    text = render_chat_template(chat, templated(NEMO))
    assert -1 < text.find("first") < text.find("one") < text.find("two")


@sweep("family", TEMPLATES)
def test_repairs_for_an_error_keep_a_call_whose_words_are_elsewhere_too(family):
    chat = [system("in Lima"), user("to Lima"), calls(FINE)]
    text = render_chat_template(chat, templated(TEMPLATES[family]))
    assert text.count("Lima") == 3


def test_calls_that_a_template_leaves_out_are_written_as_the_model_writes_them():
    chat = [
        *(user("one"), calls(FINE, '{"city": "Lis', content="beside"), result("sunny"), result("bad", "callid002")),
        *(says("two"), user("three"), calls("{}")),
    ]
    text = render_chat_template(chat, templated(TEMPLATES["lfm2"]), add_generation_prompt=False)
    written = "[look(city='Lima'), look(arguments='{\"city\": \"Lis')]"
    assert text == (
        f"<|tool_list_start|><|user|>one<|assistant|>beside<|tool_call_start|>{written}<|tool_call_end|>"
        "<|tool|>sunny<|tool|>bad<|assistant|>two<|user|>three"
        "<|assistant|><|tool_call_start|>[look()]<|tool_call_end|>"
    )


def test_calls_of_no_known_format_are_written_as_json_where_the_template_leaves_them_out():
    without_format = templated(TEMPLATES["lfm2"].replace("<|tool_list_start|>", ""))
    written = '{"name": "look", "arguments": {"city": "Lima"}}'
    text = render_chat_template(CALLED, without_format)
    assert text == f"<|user|>one<|assistant|>{written}<|tool|>sunny<|assistant|>"


def test_reasoning_joins_the_text_beside_a_call_where_one_alone_is_taken():
    chat = [user("one"), calls(FINE, content="two", reasoning_content="why"), result("sunny")]
    text = render_chat_template(chat, templated(TEMPLATES["gpt-oss"]), tools=TOOLS)
    assert "why\n\ntwo" in text
    assert f"<call>look{FINE}</call>" in text


def test_short_ids_are_the_same_for_call_and_result_and_in_the_next_request():
    """ml-explore/mlx-lm #1375."""

    def ids(*turns: dict[str, Any]) -> list[str]:
        text = render_chat_template([user("one"), *turns], templated(TEMPLATES["mistral"]))
        return re.findall("<id>(.*?)</id>", text)

    first = (calls(FINE, FINE, ids=["call_0", "call_1"]), result("a", "call_1"), result("b", "call_0"), says("two"))
    one, other, of_other, of_one = ids(*first)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in (one, other))
    assert (one, other) == (of_one, of_other)
    assert one != other
    # A client that counts its calls from the start in each message.
    later = ids(*first, user("three"), calls(FINE, ids=["call_0"]), result("c", "call_0"))
    assert (later[:4], later[4]) == ([one, other, other, one], later[5])
    assert later[4] not in (one, other)
    assert ids(calls(FINE, ids=["abc123def"]), result("a", "abc123def")) == ["abc123def"] * 2


@sweep("family", TEMPLATES)
def test_a_longer_chat_begins_as_the_shorter_one(family):
    """What a template needs is found out once, so an oddity in a later turn does not change the turns before it."""
    turns = [
        *(system(), user("one"), calls(FINE, ids=["call_a"]), result("sunny", "call_a"), says("two")),
        *(user("three"), calls('{"city": "Lis', ids=["call_b"]), result("bad", "call_b"), user("four"), says("five")),
        *(user("six"), user("seven"), says("eight"), result("lost", "call_z"), user("nine")),
    ]
    ends = [end for end in range(2, len(turns) + 1) if end == len(turns) or turns[end]["role"] == "assistant"]
    prompts = [
        render_chat_template(turns[:end], templated(TEMPLATES[family]), tools=TOOLS, add_generation_prompt=False)
        for end in ends
    ]
    for shorter, longer in itertools.pairwise(prompts):
        assert longer.startswith(shorter)


EFFORT = """\
{%- set effort = reasoning_effort | default('LEVEL') %}
{%- if effort not in LEVELS %}{{ raise_exception('an effort') }}{% endif %}[{{ effort }}]""" + TEMPLATES["chatml"]


@sweep(
    ("levels", "asked", "taken"),
    [
        *((("xhigh", "medium", "low"), asked, "xhigh") for asked in ("high", "max", "", "much")),
        *((("xhigh", "medium", "low"), asked, "low") for asked in ("minimal", "low", "none")),
        *[(("high", "low"), "medium", "high"), (("high", "low"), "HIGH", "high"), (("deep",), "high", "deep")],
    ],
)
def test_an_effort_is_the_nearest_that_the_template_takes(levels, asked, taken):
    """QwenLM/Qwen3.8 #217."""
    template = EFFORT.replace("LEVELS", str(list(levels))).replace("LEVEL", levels[0])
    for messages in ([user("one")], [system(), user("one")]):
        text = render_chat_template(messages, templated(template), reasoning_effort=asked)
        assert text.startswith(f"[{taken}]")


def test_another_tool_template_is_probed_by_itself():
    both = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["qwen3.5"]}
    tokenizer = templated(TEMPLATES["chatml"], "<both>")
    tokenizer._tokenizer.chat_template = both
    two = [system(), system("second"), user("one")]
    assert render_chat_template(two, tokenizer).count("<|system|>") == 2
    assert render_chat_template(two, tokenizer, tools=TOOLS).count("<|system|>") == 1


@sweep("calls", [["x"], [{"id": "callid001"}], {"id": "callid001"}, 5])
@sweep("family", TEMPLATES)
def test_calls_of_no_known_form_are_text_or_an_error_of_the_prompt(family, calls):
    chat = [user("one"), {**says(""), "tool_calls": calls}, result("sunny")]
    with contextlib.suppress(runtime.PromptError):
        assert "one" in render_chat_template(chat, templated(TEMPLATES[family]))


def test_a_message_with_calls_is_not_continued():
    with pytest.raises(runtime.PromptError, match="cannot continue a message with tool calls"):
        render_chat_template([user("one"), calls(FINE, prefix=True)], templated(TEMPLATES["chatml"]))
