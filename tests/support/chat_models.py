"""Scripted chat models with real weights behind their scripts: tokenizers, chat templates, answers and calls."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from models import llama, near
from transformers import AutoTokenizer

import runtime

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
<|{{ message.role }}|>{{ message.content }}<|endoftext|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


# Like Qwen's template: an empty reasoning block before the answer turns reasoning off.
THINKING_TEMPLATE = TEMPLATE.replace(
    "<|assistant|>{%", "<|assistant|>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{%"
)


# Like DeepSeek's template: the prompt ends with the opening tag.
BEGUN_TEMPLATE = TEMPLATE.replace("<|assistant|>{%", "<|assistant|><think>\n{%")


ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


@functools.cache
def tokenizer(template: str | None = TEMPLATE, *, thinks: bool = False) -> TokenizerWrapper:
    """The demo pair's tokenizer with a chat template and the tokens that it needs."""
    return demo_with(*ROLES, *(["<think>", "</think>"] if thinks else []), template=template)


def demo_with(*tokens: str, template: str | None = None, **options: Any) -> TokenizerWrapper:
    """The demo pair's tokenizer with some special tokens and a chat template; options of `TokenizerWrapper`."""
    base = AutoTokenizer.from_pretrained(str(runtime.DEMO_TARGET))
    base.add_tokens(list(tokens), special_tokens=True)
    base.chat_template = template
    return TokenizerWrapper(base, **options)


VOCAB_SIZE = 4101
# A `logit_bias` with which a text neither ends nor has a special token.
QUIET = dict.fromkeys((0, *range(4096, VOCAB_SIZE)), -math.inf)


@functools.cache
def target(seed: int = 0) -> nn.Module:
    return llama(seed, vocab_size=VOCAB_SIZE)


def says(of: TokenizerWrapper, *answers: str, lead: str = "") -> runtime.LogitsProcessor:
    """Makes the model give these answers, turn by turn; `lead` is how the template begins each."""
    mark = of.convert_tokens_to_ids("<|assistant|>")
    lines = [of.encode(answer + "<|endoftext|>", add_special_tokens=False) for answer in answers]
    num_led = len(of.encode(lead, add_special_tokens=False))

    @runtime.stateless
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        ids = tokens.tolist()
        line = lines[ids.count(mark) - 1]
        num_said = ids[::-1].index(mark) - num_led
        # A drafter may ask what comes after the end.
        wanted = line[min(num_said, len(line) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, 0.0, -mx.inf)[None]

    return processor


@functools.cache
def _draft() -> nn.Module:
    return near(target(), noise=0.05)


def pair(of: nn.Module | None = None, *, thinks: bool = False, template: str | None = TEMPLATE) -> Iterator[Any]:
    model, draft = (target(), _draft()) if of is None else (of, near(of, noise=0.05))
    return iter([(model, tokenizer(template, thinks=thinks)), (draft, None)])


# --- a model that calls tools, as Qwen does --------------------------------------------------------

CALLING_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|endoftext|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


@functools.cache
def calling_tokenizer(*, thinks: bool = True) -> TokenizerWrapper:
    """The demo pair's tokenizer with a chat template that has tools."""
    return demo_with(
        *ROLES,
        *(["<think>", "</think>"] if thinks else []),
        "<|tool|>",
        template=CALLING_TEMPLATE,
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
    )


@functools.cache
def _calling_models() -> tuple[Any, Any]:
    target = llama(0, vocab_size=4102)
    return target, near(target, noise=0.05)


def calling_pair(*, thinks: bool = True) -> Iterator[Any]:
    """A target and a draft model, as the loader gives them."""
    target, draft = _calling_models()
    return iter([(target, calling_tokenizer(thinks=thinks)), (draft, None)])
