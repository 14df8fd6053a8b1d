"""Stop strings end an answer in its content, and not in its reasoning or its calls (vllm-project/vllm #52393)."""

from __future__ import annotations

from typing import Any

from chat_models import BEGUN_TEMPLATE, THINKING_TEMPLATE, pair, says, tokenizer
from sweeps import sweep
from tool_call_cases import TOOLS, call_format

import runtime
from runtime.generation.text import ContentStops
from runtime.generation.tool_calls.answer_reader import AnswerReader

TAGS = ("<think>", "</think>")
JSON_CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 9.8, "b": 1}}</tool_call>'
GLM_CALL = "<tool_call>search<arg_key>query</arg_key><arg_value>9.8 or</arg_value></tool_call>"

WHOLE: Any = None  # nothing is found


@sweep(
    ("options", "text", "stops", "given", "found"),
    [
        ({"is_thinking": True}, "9.8 <9.8?</think>\n\nIt is 9.80.", "9.8", "9.8 <9.8?</think>\n\nIt is ", "9.8"),
        ({}, "<think>9.8</think>9.", "9.8", WHOLE, None),
        ({}, "<think>9.8", "9.8", WHOLE, None),
        ({}, "9.8<think>9.8</think>", "9.8", "", "9.8"),
        ({}, "a <think>9.8", "9.8", "a <think>", "9.8"),  # a word
        ({"is_thinking": True}, "a\n\nb\n</think>\n\nc\n\nd", "\n\n", "a\n\nb\n</think>\n\nc", "\n\n"),
        ({"is_thinking": True}, "a</think>b", "</think>", "a", "</think>"),
        ({"is_thinking": True}, "a 9.8</think>b 9.8", ["</think>x", "9.8"], "a 9.8</think>b ", "9.8"),
        ({"format": "json_tools"}, f"I: {JSON_CALL}\n9.8", "9.8", f"I: {JSON_CALL}\n", "9.8"),
        ({"format": "json_tools"}, f"9. {JSON_CALL[:50]}", "9.8", WHOLE, None),
        ({"format": "json_tools"}, f"9.8 {JSON_CALL}", "9.8", "", "9.8"),
        ({"format": "json_tools"}, f"A {JSON_CALL}", "<tool_call>", "A ", "<tool_call>"),
        (
            {"format": "json_tools"},
            "<tool_call>nothing</tool_call> 9.8",
            "9.8",
            "<tool_call>nothing</tool_call> ",
            "9.8",
        ),
        ({"format": "glm47"}, f"a {GLM_CALL}{GLM_CALL}", "9.8", WHOLE, None),
        ({"format": "glm47"}, f"a {GLM_CALL[:60]}", "9.8", WHOLE, None),
        ({"format": "glm47"}, f"{GLM_CALL}b 9.8", "9.8", f"{GLM_CALL}b ", "9.8"),
    ],
)
def test_stop_strings_are_found_in_the_content_alone(
    options: Any, text: str, stops: str | list[str], given: str | None, found: str | None
) -> None:
    format = call_format(options["format"]) if "format" in options else None
    for size in (1, 2, 3, 7, len(text)):
        reader = AnswerReader(tags=TAGS, is_thinking="is_thinking" in options, format=format, tools=TOOLS)
        search, pieces = ContentStops([stops] if isinstance(stops, str) else stops, reader), ""
        for begin in range(0, len(text), size):
            pieces += search.add(text[begin : begin + size])
            if search.found is None:
                assert pieces + search.withheld == text[: begin + size]
        pieces += search.finish()
        assert (pieces, search.found) == (text if given is None else given, found)
        assert search.withheld == ""


def test_only_what_may_become_a_stop_string_a_tag_or_a_call_is_withheld() -> None:
    search = ContentStops(["9.8"], AnswerReader(tags=TAGS, format=call_format("glm47"), tools=TOOLS))
    for piece, given in (
        ("<th", ""),
        ("ink>9.", "<think>9."),
        ("8</think>9", "8</think>"),
        (".7 ", "9.7"),
        ("b<tool_call>sea", " b"),
        ("son, so", "<tool_call>season, so"),
    ):
        assert search.add(piece) == given


@sweep("draft", ["ngram", "model", None])
@sweep(("template", "lead"), [(THINKING_TEMPLATE, ""), (BEGUN_TEMPLATE, "<think>\n")])
async def test_a_stop_string_in_the_reasoning_ends_no_stream(template: str, lead: str, draft: str | None) -> None:
    said = "The cat, the dog, the cat.</think>\n\nIt is the dog, the cat."
    processor = says(tokenizer(template, thinks=True), said if lead else f"<think>{said}", lead=lead)
    target, drafter = pair(thinks=True, template=template)
    async with runtime.open(target, drafter if draft == "model" else draft) as rt:
        settings: Any = {"logits_processors": (processor,), "stop": "the dog", "max_tokens": 60}
        completion = await rt.generate([{"role": "user", "content": "Which?"}], **settings)
    assert (completion.thinking.strip(), completion.content.strip()) == ("The cat, the dog, the cat.", "It is")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "the dog")
