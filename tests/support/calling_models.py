"""A scripted chat model that calls tools, as Qwen does, and with real weights behind its script."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from chat_models import ROLES
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from models import llama, near
from transformers import AutoTokenizer

import runtime

TEMPLATE = """\
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
    base = AutoTokenizer.from_pretrained(str(runtime.DEMO_TARGET))
    base.add_tokens([*ROLES, *(["<think>", "</think>"] if thinks else []), "<|tool|>"], special_tokens=True)
    base.chat_template = TEMPLATE
    return TokenizerWrapper(
        base,
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
    )


@functools.cache
def _models() -> tuple[Any, Any]:
    target = llama(0, vocab_size=4102)
    return target, near(target, noise=0.05)


def calling_pair(*, thinks: bool = True) -> Iterator[Any]:
    """A target and a draft model, as the loader gives them."""
    target, draft = _models()
    return iter([(target, calling_tokenizer(thinks=thinks)), (draft, None)])
