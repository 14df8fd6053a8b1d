"""Answers of several messages with headers, and markers of an answer's structure.

gpt-oss' channels: ml-explore/mlx-lm #875 and #1867; Kimi K3's markers: vllm-project/vllm #51412.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from sweeps import sweep
from tool_call_cases import TOOLS, call_format
from transformers import AutoTokenizer

import runtime
from runtime.generation.answers.message_format import HARMONY, MUSE_SPARK
from runtime.generation.answers.message_reader import MessageReader, Reader
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import call_format as format_of
from runtime.generation.tool_calls.events import Answer, Delta


class HarmonyTokenizer:
    def get_added_vocab(self) -> dict[str, int]:
        return dict.fromkeys(HARMONY.marks, 0)


def harmony(begun: str = "", *, has_tools: bool = True) -> Reader:
    format = format_of(cast(Any, HarmonyTokenizer())) if has_tools else None
    return MessageReader(HARMONY, begun, format=format, tools=TOOLS if has_tools else ())


def muse() -> Reader:
    return MessageReader(MUSE_SPARK, format=call_format("muse_spark"), tools=TOOLS)


def kimi() -> Reader:
    dropped = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    tags = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    return AnswerReader(tags=tags, dropped=dropped, format=call_format("kimi_k3"), tools=TOOLS)


def events_of(reader: Reader, text: str, size: int, *, is_complete: bool = True) -> list[Delta]:
    events = [event for at in range(0, len(text), size) for event in reader.add(text[at : at + size])]
    return events + reader.finish(is_complete=is_complete)


ONE = '{"a": 1}'
ROME = ("get_current_temperature", '{"location": "Rome"}')
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
INVOKE = (
    '<atem:function_calls>\n<atem:invoke name="get_current_temperature">\n<atem:parameter name="location">Rome'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)


@sweep(
    ("new", "text", "reasoning", "content", "calls"),
    [
        (harmony, f"{ANALYSIS}Add.{NEXT}{FINAL}4", "Add.", "4", []),
        (harmony, f"{ANALYSIS}Add.{NEXT}{FINAL}4<|return|>", "Add.", "4", []),
        (harmony, f"<|start|>assistant{FINAL}4", "", "4", []),
        # Messages without a role, and with white space between them.
        (harmony, f"{ANALYSIS}Add.<|end|>{FINAL}4<|return|>", "Add.", "4", []),
        (harmony, f"{ANALYSIS}Add.<|end|>\n<|start|>assistant{FINAL}4<|return|>\n", "Add.", "4", []),
        (harmony, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\n\nb", "c", []),
        (harmony, f'{ANALYSIS}a{NEXT}{CALL}{{"query": "x"}}', "a", "", [("search", '{"query": "x"}')]),
        (harmony, f"{CALL}{ONE}<|call|>", "", "", [("search", ONE)]),
        (harmony, f'{CALL}{{"a": "<|call|>"}}', "", "", [("search", '{"a": "<|call|>"}')]),
        (
            harmony,
            f"{CALL}{{}}<|call|><|start|>assistant{CALL}{ONE}",
            "",
            "",
            [("search", "{}"), ("search", ONE)],
        ),
        (harmony, f"{CALL}<|call|>", "", "", [("search", "{}")]),
        (
            harmony,
            ' to=functions.search<|channel|>commentary json<|message|>{"a": 1}',
            "",
            "",
            [("search", ONE)],
        ),
        (harmony, '<|channel|>analysis to=search code<|message|>{"a": 1}', "", "", [("search", ONE)]),
        (
            harmony,
            f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{ONE}",
            "",
            "I look.",
            [("search", ONE)],
        ),
        (harmony, f"{ANALYSIS}a{NEXT}<|channel|>analysis to=python code<|message|>1 + 1", "a\n\n1 + 1", "", []),
        (harmony, f"{CALL}not JSON", "", f"{CALL}not JSON", []),
        (harmony, f"{CALL}[1]", "", f"{CALL}[1]", []),
        (harmony, f"{CALL}{{}}".replace("search", "rm"), "", f"{CALL}{{}}".replace("search", "rm"), []),
        (lambda: harmony(has_tools=False), f"{CALL}{{}}", "", f"{CALL}{{}}", []),
        # Words about markers, and texts without any.
        (
            harmony,
            f"{FINAL}A <|end|> ends, {FINAL} begins.",
            "",
            f"A <|end|> ends, {FINAL} begins.",
            [],
        ),
        (harmony, f"The {FINAL} text.", "", f"The {FINAL} text.", []),
        (harmony, "assistant", "", "assistant", []),
        (harmony, ONE, "", ONE, []),
        (harmony, f"{ANALYSIS}a{NEXT}{ONE}", "a", ONE, []),
        # What the prompt has begun.
        (lambda: harmony(FINAL + "It "), "is 4", "", "is 4", []),
        (lambda: harmony(ANALYSIS), f"a{NEXT}{FINAL}b", "a", "b", []),
        (lambda: harmony("<|channel|>"), "analysis<|message|>a", "a", "", []),
        (muse, " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "a", "b", []),
        (
            muse,
            f" to=get_current_temperature<|message|>{INVOKE}<|eot|>",
            "",
            "",
            [ROME],
        ),
        (
            muse,
            f" to=self<|message|>a<|eom|><|start|>assistant to=get_current_temperature<|message|>{INVOKE}<|eom|>"
            f"<|start|>assistant to=get_current_temperature<|message|>{INVOKE}",
            "a",
            "",
            [ROME] * 2,
        ),
        (muse, INVOKE, "", "", [ROME]),
        (muse, f" to=user<|message|>A {INVOKE[:20]} begins.", "", f"A {INVOKE[:20]} begins.", []),
        (
            kimi,
            "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b \nc<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
            *("a", "b \nc", []),
        ),
        (kimi, "<|open|>response<|sep|>b<|close|>respond", "", "b<|close|>respond", []),
    ],
)
def test_messages_are_reasoning_content_and_calls(
    new: Any, text: str, reasoning: str, content: str, calls: Any
) -> None:
    for size in (1, 2, 3, 5, 11, len(text)):
        events, answer = events_of(new(), text, size), Answer()
        answer.add(events)
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in answer.calls] == calls
        assert len({call.id for call in answer.calls}) == len(calls)
        assert "".join(event.source for event in events) == text


def test_each_cut_of_an_answer_gives_what_was_written_so_far() -> None:
    text = f"{ANALYSIS}Hm, a.{NEXT}{FINAL}Yes.{NEXT}{CALL}{ONE}"
    ends = [each.end() for each in re.finditer(r"<\|\w+\|>|.", text)]
    for end in ends[:-1]:
        answer = Answer()
        answer.add(events_of(harmony(), text[:end], 3, is_complete=False))
        assert answer.reasoning == text[len(ANALYSIS) : min(end, text.index(NEXT))]
        assert answer.content == text[text.index(FINAL) + len(FINAL) : min(end, text.rindex(NEXT))]
        if end >= text.index(CALL) + len(CALL):
            assert (answer.cut_call.name, answer.cut_call.arguments) == ("search", text[text.index(ONE) : end])


def test_text_and_arguments_come_as_they_are_written() -> None:
    reader, came = harmony(), []
    for piece in (f"{ANALYSIS}Hm", "!", NEXT + CALL, '{"a":', ' "x"', "}"):
        came.append([delta.text for delta in reader.add(piece)])
    assert came == [["Hm"], ["!"], [""], ['{"a":'], [' "x"'], ["}"]]
    assert reader.is_in_block


@sweep("tags", [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|inner_prefix|>", "<|inner_suffix|>")])
def test_tags_that_are_special_tokens_mark_the_reasoning(tags: tuple[str, str]) -> None:
    base = AutoTokenizer.from_pretrained(str(runtime.DEMO_TARGET))
    base.add_tokens(list(tags), special_tokens=True)
    tokenizer = TokenizerWrapper(base)
    for prompt, text in (("", f"{tags[0]}a{tags[1]}b"), (tags[0], f"a{tags[1]}b")):
        answer = ReasoningTracker(tokenizer, tokenizer.encode(prompt, add_special_tokens=False))
        assert answer.is_thinking is bool(prompt)
        for token in tokenizer.encode(text, add_special_tokens=False):
            answer.add(token, tokenizer.decode([token]), tokenizer.decode([token]))
        assert (answer.thinking, answer.said) == ("a", "b")


LLAMA_WORDS = '{"name": function name, "parameters": dictionary of argument name and its value}'


@sweep(
    ("text", "content", "names"),
    [
        ('{"name": "search", "parameters": {"query": "a } b"}}', "", ["search"]),
        ('\n{"name": "search", "arguments": {}}\n{"name": "multiply", "parameters": {}}', "", ["search", "multiply"]),
        ('{"type": "function", "name": "search", "parameters": {"query": "a"}}', "", ["search"]),
        ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ('So {"name": "search", "parameters": {}} it is', 'So {"name": "search", "parameters": {}} it is', []),
    ],
)
def test_llamas_calls_have_no_markers_and_count_where_an_answer_begins(text: str, content: str, names: list[str]):
    format = format_of(cast(Any, SimpleNamespace(chat_template=f"Respond in the format {LLAMA_WORDS}.")))
    for size in (1, 3, len(text)):
        events, answer = events_of(AnswerReader(format=format, tools=TOOLS), text, size), Answer()
        answer.add(events)
        assert (answer.content, [call.name for call in answer.calls]) == (content, names)
        assert "".join(event.source for event in events) == text
