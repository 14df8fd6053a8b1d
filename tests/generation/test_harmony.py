"""gpt-oss' answers in the library: streams, conversations with tools, stop strings, and required calls."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from chat_models import says
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import llama
from sweeps import sweep
from transformers import AutoTokenizer

import runtime
from runtime.generation.answers.message_format import HARMONY
from runtime.generation.grammar import Grammar
from runtime.generation.reasoning import ReasoningTracker, marks_of
from runtime.generation.tool_calls.call_format import call_format
from runtime.generation.tool_calls.call_grammar import call_grammar
from runtime.generation.tool_calls.tools import tools_of

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
ANALYSIS = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"number": 4}'
FINAL = "<|channel|>final<|message|>It is 8, so 8."


@functools.cache
def tokenizer() -> TokenizerWrapper:
    base = AutoTokenizer.from_pretrained(str(runtime.DEMO_TARGET))
    # The scripted model counts its turns by a token for the role.
    base.add_tokens([*HARMONY.marks, "<|assistant|>"], special_tokens=True)
    base.chat_template = TEMPLATE
    return TokenizerWrapper(base)


def target() -> tuple[Any, Any]:
    return llama(0, vocab_size=len(tokenizer())), tokenizer()


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: to double.
    """
    return 2 * number


async def test_a_conversation_calls_tools_and_keeps_reasoning_apart() -> None:
    async with runtime.open(target()) as rt:
        processor = says(tokenizer(), ANALYSIS + CALL, ANALYSIS + FINAL, lead="<|start|>assistant")
        conversation = rt.conversation(tools=[double], logits_processors=(processor,), max_tokens=80)
        completion = await conversation.generate("Twice four?")
        assert (completion.thinking, completion.content) == ("Look it up.", "It is 8, so 8.")
        _, called, result, said = conversation.messages
        assert called["tool_calls"][0]["function"] == {"name": "double", "arguments": '{"number": 4}'}
        assert (called["reasoning_content"], called["content"], result["content"]) == ("Look it up.", "", "8")
        assert (said["content"], said["reasoning_content"]) == ("It is 8, so 8.", "Look it up.")


async def test_a_stream_marks_the_reasoning_and_stops_in_the_content() -> None:
    async with runtime.open(target()) as rt:
        processor = says(tokenizer(), ANALYSIS + FINAL.replace("8,", "it,"), lead="<|start|>assistant")
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
        (ANALYSIS + CALL, "required", True),
        (CALL, "double", True),
        (ANALYSIS + FINAL, "required", False),
        (ANALYSIS + FINAL, "auto", True),
        (CALL, "auto", True),
        (CALL.replace("4", '"four"'), "required", False),
    ],
)
def test_a_grammar_holds_the_model_to_calls_in_their_channel(text: str, choice: str, is_allowed: bool) -> None:
    properties = {"number": {"type": "integer"}}
    function = {"name": "double", "strict": True, "parameters": {"type": "object", "properties": properties}}
    tools, format = tools_of([function], choice), call_format(tokenizer())
    marks = marks_of(ReasoningTracker(tokenizer(), ()))
    grammar = Grammar(call_grammar(tools, format, tokenizer(), **marks), tokenizer())
    tokens, is_let_through = [0], True
    for token in (*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id):
        logits = np.array(grammar(mx.array(tokens), mx.zeros((1, len(tokenizer())))))
        is_let_through = is_let_through and bool(logits[0, token] == 0)
        if not is_let_through:
            break
        tokens.append(token)
    assert is_let_through is is_allowed
