"""Answers of several messages with headers, and markers of an answer's structure.

gpt-oss' channels, also in streams, conversations with tools and required calls: ml-explore/mlx-lm #875 and #1867;
Kimi K3's markers: vllm-project/vllm #51412.
"""

import functools
import re
from types import SimpleNamespace
from typing import Any, cast

from chat_models import demo_with, says
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import llama
from sweeps import sweep
from tool_call_cases import TOOLS, call_format

import runtime
from runtime.generation.answers.message_format import HARMONY, MUSE_SPARK
from runtime.generation.answers.message_reader import MessageReader, Reader
from runtime.generation.grammar import Grammar
from runtime.generation.reasoning import ReasoningTracker, marks_of
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import call_format as format_of
from runtime.generation.tool_calls.call_grammar import call_grammar
from runtime.generation.tool_calls.events import Answer, Delta
from runtime.generation.tool_calls.tools import tools_of


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
INVOKED = f"<|eom|><|start|>assistant to=get_current_temperature<|message|>{INVOKE}"
KIMI = "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>"


@sweep(
    ("new", "text", "reasoning", "content", "calls"),
    [
        *((harmony, f"{ANALYSIS}Add.{NEXT}{FINAL}4{end}", "Add.", "4", []) for end in ("", "<|return|>")),
        (harmony, f"<|start|>assistant{FINAL}4", "", "4", []),
        # Messages without a role, and with white space between them.
        (harmony, f"{ANALYSIS}Add.<|end|>{FINAL}4<|return|>", "Add.", "4", []),
        (harmony, f"{ANALYSIS}Add.<|end|>\n<|start|>assistant{FINAL}4<|return|>\n", "Add.", "4", []),
        (harmony, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\n\nb", "c", []),
        (harmony, f'{ANALYSIS}a{NEXT}{CALL}{{"query": "x"}}', "a", "", [("search", '{"query": "x"}')]),
        (harmony, f"{CALL}{ONE}<|call|>", "", "", [("search", ONE)]),
        (harmony, f'{CALL}{{"a": "<|call|>"}}', "", "", [("search", '{"a": "<|call|>"}')]),
        (harmony, f"{CALL}{{}}<|call|><|start|>assistant{CALL}{ONE}", "", "", [("search", "{}"), ("search", ONE)]),
        (harmony, f"{CALL}<|call|>", "", "", [("search", "{}")]),
        (harmony, ' to=functions.search<|channel|>commentary json<|message|>{"a": 1}', "", "", [("search", ONE)]),
        (harmony, '<|channel|>analysis to=search code<|message|>{"a": 1}', "", "", [("search", ONE)]),
        (harmony, f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{ONE}", "", "I look.", [("search", ONE)]),
        (harmony, f"{ANALYSIS}a{NEXT}<|channel|>analysis to=python code<|message|>1 + 1", "a\n\n1 + 1", "", []),
        (lambda: harmony(has_tools=False), f"{CALL}{{}}", "", f"{CALL}{{}}", []),
        # Odd calls, words about markers, and texts without any.
        *(
            (harmony, odd, "", odd, [])
            for odd in (f"{CALL}not JSON", f"{CALL}[1]", f"{CALL}{{}}".replace("search", "rm"))
        ),
        (harmony, f"{FINAL}A <|end|> ends, {FINAL} begins.", "", f"A <|end|> ends, {FINAL} begins.", []),
        *((harmony, text, "", text, []) for text in (f"The {FINAL} text.", "assistant", ONE)),
        (harmony, f"{ANALYSIS}a{NEXT}{ONE}", "a", ONE, []),
        # What the prompt has begun.
        (lambda: harmony(FINAL + "It "), "is 4", "", "is 4", []),
        (lambda: harmony(ANALYSIS), f"a{NEXT}{FINAL}b", "a", "b", []),
        (lambda: harmony("<|channel|>"), "analysis<|message|>a", "a", "", []),
        (muse, " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "a", "b", []),
        (muse, f" to=get_current_temperature<|message|>{INVOKE}<|eot|>", "", "", [ROME]),
        (muse, f" to=self<|message|>a{INVOKED}{INVOKED}", "a", "", [ROME] * 2),
        (muse, INVOKE, "", "", [ROME]),
        (muse, f" to=user<|message|>A {INVOKE[:20]} begins.", "", f"A {INVOKE[:20]} begins.", []),
        (kimi, f"{KIMI}response<|sep|>b \nc<|close|>response<|sep|><|close|>message<|sep|>", "a", "b \nc", []),
        (kimi, "<|open|>response<|sep|>b<|close|>respond", "", "b<|close|>respond", []),
    ],
)
def test_messages_are_reasoning_content_and_calls(new, text, reasoning, content, calls):
    for size in (1, 2, 3, 5, 11, len(text)):
        events, answer = events_of(new(), text, size), Answer()
        answer.add(events)
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in answer.calls] == calls
        assert len({call.id for call in answer.calls}) == len(calls)
        assert "".join(event.source for event in events) == text


def test_each_cut_of_an_answer_gives_what_was_written_so_far():
    text = f"{ANALYSIS}Hm, a.{NEXT}{FINAL}Yes.{NEXT}{CALL}{ONE}"
    ends = [each.end() for each in re.finditer(r"<\|\w+\|>|.", text)]
    for end in ends[:-1]:
        answer = Answer()
        answer.add(events_of(harmony(), text[:end], 3, is_complete=False))
        assert answer.reasoning == text[len(ANALYSIS) : min(end, text.index(NEXT))]
        assert answer.content == text[text.index(FINAL) + len(FINAL) : min(end, text.rindex(NEXT))]
        if end >= text.index(CALL) + len(CALL):
            assert (answer.cut_call.name, answer.cut_call.arguments) == ("search", text[text.index(ONE) : end])


def test_text_and_arguments_come_as_they_are_written():
    reader, came = harmony(), []
    for piece in (f"{ANALYSIS}Hm", "!", NEXT + CALL, '{"a":', ' "x"', "}"):
        came.append([delta.text for delta in reader.add(piece)])
    assert came == [["Hm"], ["!"], [""], ['{"a":'], [' "x"'], ["}"]]
    assert reader.is_in_block


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
def test_llamas_calls_have_no_markers_and_count_where_an_answer_begins(text, content, names):
    format = format_of(cast(Any, SimpleNamespace(chat_template=f"Respond in the format {LLAMA_WORDS}.")))
    for size in (1, 3, len(text)):
        events, answer = events_of(AnswerReader(format=format, tools=TOOLS), text, size), Answer()
        answer.add(events)
        assert (answer.content, [call.name for call in answer.calls]) == (content, names)
        assert "".join(event.source for event in events) == text


# --- in the library -------------------------------------------------------------------------------

TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == "assistant" %}<|assistant|>{% endif -%}
{%- if m.tool_calls -%}
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|><|start|>assistant{% endif -%}
"""
LOOKED_UP = f"{ANALYSIS}Look it up.{NEXT}"
DOUBLES = CALL.replace("search", "double") + '{"number": 4}'
SAID = f"{FINAL}It is 8, so 8."


@functools.cache
def tokenizer() -> TokenizerWrapper:
    # The scripted model counts its turns by a token for the role.
    return demo_with(*HARMONY.marks, "<|assistant|>", template=TEMPLATE)


def target() -> tuple[Any, Any]:
    return llama(0, vocab_size=len(tokenizer())), tokenizer()


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: to double.
    """
    return 2 * number


async def test_a_conversation_calls_tools_and_keeps_reasoning_apart():
    async with runtime.open(target()) as rt:
        processor = says(tokenizer(), LOOKED_UP + DOUBLES, LOOKED_UP + SAID, lead="<|start|>assistant")
        conversation = rt.conversation(tools=[double], logits_processors=(processor,), max_tokens=80)
        completion = await conversation.generate("Twice four?")
        assert (completion.thinking, completion.content) == ("Look it up.", "It is 8, so 8.")
        _, called, result, said = conversation.messages
        assert called["tool_calls"][0]["function"] == {"name": "double", "arguments": '{"number": 4}'}
        assert (called["reasoning_content"], called["content"], result["content"]) == ("Look it up.", "", "8")
        assert (said["content"], said["reasoning_content"]) == ("It is 8, so 8.", "Look it up.")


async def test_a_stream_marks_the_reasoning_and_stops_in_the_content():
    async with runtime.open(target()) as rt:
        processor = says(tokenizer(), LOOKED_UP + SAID.replace("8,", "it,"), lead="<|start|>assistant")
        settings: Any = {"logits_processors": (processor,), "max_tokens": 80}
        messages = [{"role": "user", "content": "Twice four?"}]
        whole = await rt.generate(messages, **settings)
        marked = "".join(token.text for token in whole.tokens if token.is_thinking)
        assert marked == "<|message|>Look it up.<|end|><|start|>"
        stopped = await rt.generate(messages, stop="it", **settings)
        assert (stopped.thinking, stopped.content, stopped.stop_reason) == ("Look it up.", "It is ", "it")


@sweep(
    ("text", "choice", "is_allowed"),
    [
        *[(LOOKED_UP + DOUBLES, "required", True), (DOUBLES, "double", True), (DOUBLES, "auto", True)],
        *[(LOOKED_UP + SAID, "required", False), (LOOKED_UP + SAID, "auto", True)],
        (DOUBLES.replace("4", '"four"'), "required", False),
    ],
)
def test_a_grammar_holds_the_model_to_calls_in_their_channel(text, choice, is_allowed):
    properties = {"number": {"type": "integer"}}
    function = {"name": "double", "strict": True, "parameters": {"type": "object", "properties": properties}}
    tools, format = tools_of([function], choice), format_of(tokenizer())
    marks = marks_of(ReasoningTracker(tokenizer(), ()))
    grammar = Grammar(call_grammar(tools, format, tokenizer(), **marks), tokenizer())
    tokens = [*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id]
    assert grammar.allows(tokens) is is_allowed
