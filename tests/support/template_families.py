"""Small chat templates that refuse or leave out what those of real families do; each is in the style of its family."""

import functools

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import pythonic
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

_END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_CALLS = """\
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor -%}"""
_ITEMS = """\
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}</call>
{%- endfor -%}"""
_TURN = "<|{{ m.role }}|>{{ m.content or '' }}" + _CALLS + "\n"
_TOOLS = "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}"
_ALTERNATE = """\
{%- set ns = namespace(index=0) %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor -%}"""


def _each(body: str) -> str:
    return _TOOLS + "{%- for m in messages %}" + body + "{%- endfor -%}" + _END


TEMPLATES = {
    "chatml": _each(_TURN),
    "qwen3": _each(_TURN.replace("m.content or ''", "m.content.split('</think>')[-1]")),
    "qwen3.5": _each(
        "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message is first') }}{% endif %}"
        "{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('a role') }}{% endif %}"
        + _TURN.replace(_CALLS, _ITEMS)
    ),
    "qwen3-coder": _each(_TURN.replace(_CALLS, _ITEMS)),
    "mistral": _ALTERNATE
    + _each(
        "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message is first') }}{% endif %}"
        "{%- if m.role == 'developer' %}{{ raise_exception('a role') }}{% endif %}"
        "{%- set ids = [m.tool_call_id] if m.role == 'tool' else (m.tool_calls or []) | map(attribute='id') | list %}"
        "{%- for id in ids %}"
        "{%- if id is not string or id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        "<id>{{ id }}</id>{% endfor %}" + _TURN
    ),
    "ministral3": _each(
        "{%- if m.role == 'assistant' and not m.content and m.tool_calls is not defined %}"
        "{{ raise_exception('an answer has a text or calls') }}{% endif %}" + _TURN
    ),
    "gemma2": _each(
        "{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('a role') }}{% endif %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content | trim }}\n"
    ),
    "gpt-oss": "{%- for tool in tools or [] %}{{ tool.function.name + tool.function.description }}\n{% endfor -%}"
    + """\
{%- set ns = namespace(calls=false) %}
{%- for m in messages %}
{%- if m.role in ('system', 'developer') %}{% if loop.first %}<|developer|>{{ m.content }}\n{% endif %}
{%- elif m.role == 'tool' %}{% if not ns.calls %}{{ raise_exception('no call') }}{% endif %}<|tool|>{{ m.content }}\n
{%- else %}<|{{ m.role }}|>{{ m.content or '' }}
{%- if m.tool_calls and m.content and m.reasoning_content %}{{ raise_exception('two texts') }}{% endif %}
{%- if m.tool_calls %}{% set ns.calls = true %}<call>{{ m.tool_calls[0].function.name }}
{{- m.tool_calls[0].function.arguments | tojson }}</call>{% endif %}\n
{%- endif %}
{%- endfor -%}"""
    + _END,
    "minimax": _TOOLS
    + """\
{%- set ns = namespace(calls=false) %}
{%- for m in messages %}
{%- if m.role == 'tool' and not ns.calls %}{{ raise_exception('no call') }}{% endif %}
{%- if m.tool_calls %}{% set ns.calls = true %}{% endif %}
{%- if m.role != 'developer' and (m.role != 'system' or loop.first) %}"""
    + _TURN.replace(_CALLS, _ITEMS)
    + "{%- endif %}{%- endfor -%}"
    + _END,
    "deepseek-r1": """\
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor -%}
{{ ns.system }}"""
    + _TOOLS
    + "{%- for m in messages if m.role in ('user', 'assistant', 'tool') %}"
    + _TURN
    + "{%- endfor -%}"
    + _END.replace("assistant|>", "assistant|><think>\n"),
    "glm": _each("{%- if m.role != 'developer' %}" + _TURN.replace(_CALLS, _ITEMS) + "{% endif %}"),
    "seed-oss": "{%- for tool in tools or [] %}{{ tool.function.name }}"
    "{%- for name, schema in tool.function.parameters.properties | items %} {{ name }}: {{ schema.type }}{% endfor %}\n"
    "{% endfor %}{%- for m in messages %}" + _TURN.replace(_CALLS, _ITEMS) + "{%- endfor -%}" + _END,
    "hermes": "{%- for tool in tools or [] %}{{ tool.function.name + ': ' + tool.function.description }}"
    "{%- for name, schema in tool.function.parameters.properties | items %} {{ name + schema.description }}{% endfor %}"
    "\n{% endfor %}{%- for m in messages %}" + _TURN + "{%- endfor -%}" + _END,
    "llama3": _each(
        "{%- if loop.index0 == 1 and messages[0].role == 'system' and m.tool_calls %}{% continue %}{% endif %}"
        "{%- if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        + _TURN.replace("m.content or ''", "('' if m.tool_calls else m.content or '') | trim")
    ),
    "gemma4": _TOOLS
    + """\
{%- set ns = namespace(ids=[]) %}
{%- for m in messages %}
{%- set ids = (m.tool_calls or []) | map(attribute='id') | list %}
{%- set ns.ids = ns.ids + ids if m.role in ('assistant', 'tool') else [] %}
{%- if m.role != 'tool' or m.tool_call_id in ns.ids %}"""
    + _TURN
    + "{% endif %}{%- endfor -%}"
    + _END,
    "lfm2": _each(_TURN.replace(_CALLS, "")).replace("{%- for tool", "<|tool_list_start|>{%- for tool"),
    "phi": _each("{%- if m.role in ('system', 'user', 'assistant') and m.content %}" + _TURN + "{% endif %}"),
    "functionary": _each(
        _TURN.replace(
            "call.function.name }} {{ call.function.arguments | tojson", "call.function.name + call.function.arguments"
        )
    ),
}

# Writes the system message with the last message, if that is the user's; so a longer chat does not begin as a shorter.
NEMO = _each(
    "{%- if m.tool_calls is defined and not m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    "{%- if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
    "{%- if m.role != 'system' %}" + _TURN + "{% endif %}"
)


@functools.cache
def templated(template: str, *tokens: str) -> TokenizerWrapper:
    """A tokenizer with a chat template, and with some special tokens; it knows no other word.

    As in mlx-lm, a marker in the template tells the format of LFM2's calls; other templates have calls of no format.
    """
    inner = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", chat_template=template)
    fast.add_tokens(list(tokens), special_tokens=True)
    if "<|tool_list_start|>" not in template:
        return TokenizerWrapper(fast)
    return TokenizerWrapper(
        fast,
        tool_parser=pythonic.parse_tool_call,
        tool_call_start=pythonic.tool_call_start,
        tool_call_end=pythonic.tool_call_end,
    )
