"""How templates begin answers, how an answer continues a message, and the names of switches for reasoning."""

import functools
from typing import Any

import pytest
from chat_models import demo_with
from mlx_lm.tokenizer_utils import TokenizerWrapper
from sweeps import sweep
from template_families import TEMPLATES, templated

import runtime
from runtime.generation.chat_template.known import asks_for_reasoning, thinking_switch
from runtime.generation.chat_template.rendering import render_chat_template
from runtime.generation.reasoning import ReasoningTracker

USER = {"role": "user", "content": "one"}
THINK = ("<think>", "</think>")
_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
_TAGLESS = _TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@functools.cache
def speaking(template: str) -> TokenizerWrapper:
    """The demo pair's tokenizer with a template and tags."""
    return demo_with(*THINK, "<|user|>", "<|assistant|>", template=template)


# As Qwen3.5's: messages have an empty reasoning, and a prompt ends within one.
_OPENING = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"""
# As Qwen3's: a prompt leaves the reasoning to the model.
_CLOSED = _OPENING.replace("{% else %}<think>\n", "")
# As gpt-oss': the header goes on in front of the text.
_CHANNELS = _TURNS.replace("{{ m.content", "{% if m.role == 'assistant' %}final:{% endif %}{{ m.content")
_CHANNELS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_NO_PROMPT = "{% for m in messages %}{{ m.content | trim }}{{ '[/I]' if m.role == 'user' }}{% endfor %}"


@sweep("text", ["```python\n", "Answer:\n\n", "", "  x", "def f():\n    "])
@sweep(
    ("template", "lead"),
    [
        *[(_TAGLESS, "<|assistant|>"), (_CLOSED, "<|assistant|>"), (_CHANNELS, "<|assistant|>final:")],
        *[(_OPENING, "<|assistant|><think>\n\n</think>\n\n"), (_NO_PROMPT, "[/I]")],
    ],
)
def test_a_continued_message_is_kept_to_the_character(template, lead, text):
    """huggingface/transformers #35433."""
    begun = {"role": "assistant", "content": text, "prefix": True}
    rendered = render_chat_template([USER, begun], templated(template, *THINK))
    assert rendered.partition("one")[2].removeprefix("<|end|>\n") == lead + text


@sweep("template", [_OPENING, _CLOSED, _TAGLESS])
@sweep("text", ["<think>\nHm", "<think>Hm.</think>Yes"])
def test_a_continued_message_may_begin_with_its_reasoning(template, text):
    tokenizer = speaking(template)
    rendered = render_chat_template([USER, {"role": "assistant", "content": text, "prefix": True}], tokenizer)
    assert rendered.endswith(f"<|assistant|>{text}")
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    assert ReasoningTracker(tokenizer, prompt).is_thinking is ("</think>" not in text)


@sweep(
    ("template", "reasoned"),
    [
        (_OPENING, "<|assistant|><think>\nwhy</think>"),  # which is open already
        (_CLOSED, "<|assistant|><think>why</think>"),
        (_TAGLESS, "<|assistant|><think>why</think>"),
    ],
)
def test_a_continued_message_keeps_its_reasoning(template, reasoned):
    begun = {"role": "assistant", "reasoning_content": "why", "prefix": True}
    for text, expected in (("It ", f"{reasoned}It "), ("", reasoned), ("<think>Hm", "<|assistant|><think>Hm")):
        rendered = render_chat_template([QUESTION, {**begun, "content": text}], speaking(template))
        assert rendered.endswith(f"mean?<|end|>\n{expected}")
    # Where none is wanted, the text follows what the template writes for that.
    off = render_chat_template([QUESTION, {**begun, "content": "It"}], speaking(_CLOSED), enable_thinking=False)
    assert "why" not in off


# --- where reasoning opens ------------------------------------------------------------------------

_ENDLESS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
_ENDLESS += "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if thinking }}{% endif %}"


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


QUESTION = {"role": "user", "content": "What does <think> mean?"}


@sweep(
    ("messages", "switches", "is_open"),
    [
        *[([QUESTION], {}, False), ([QUESTION], {"thinking": True}, True)],
        *(([USER, says(said), USER], {}, False) for said in ("Models write <think> first.", "<think> was cut")),
        *(([USER, says(begun, prefix=True)], {}, True) for begun in ("<think>Hm", "<think>Hm, <think>")),
        *(([USER, says(begun, prefix=True)], {}, False) for begun in ("I write <think> first", "<think>Hm</think>Yes")),
    ],
)
def test_only_where_an_answer_begins_a_tag_opens_its_reasoning(messages, switches, is_open):
    """vllm-project/vllm #32490: turns without an end token."""
    tokenizer = speaking(_ENDLESS)
    prompt = tokenizer.encode(render_chat_template(messages, tokenizer, **switches), add_special_tokens=False)
    assert ReasoningTracker(tokenizer, prompt).is_thinking is is_open


TAGS = [
    *[("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>")],
    *[("<|inner_prefix|>", "<|inner_suffix|>"), ("<|thought_begin|>", "<|thought_end|>")],
    *[("◁think▷", "◁/think▷"), ("<think:opensource>", "</think:opensource>"), ("<seed:think>", "</seed:think>")],
]


@sweep("is_begun", [False, True])
@sweep(("opening", "closing", "are_tokens"), [*((*tags, True) for tags in TAGS), (*TAGS[0], False), (*THINK, False)])
def test_the_tags_of_every_family_are_those_of_reasoning(opening, closing, are_tokens, is_begun):
    # Tags that are ordinary text are known by the template, which has one of them at least.
    template = _TAGLESS.replace("trim", f"trim | replace('{closing}', '')")
    template += f"{{% if is_begun %}}{opening}\n{{% endif %}}"
    tokenizer = demo_with(*([opening, closing] if are_tokens else []), template=template)
    asked = [{"role": "user", "content": f"What does {opening} mean?"}]
    rendered = render_chat_template(asked, tokenizer, is_begun=is_begun)
    answer = ReasoningTracker(tokenizer, tokenizer.encode(rendered, add_special_tokens=False))
    assert answer.is_thinking is is_begun
    text = ("" if is_begun else opening) + f"\nHm.{closing}\nA tag: {closing}"
    for token in tokenizer.encode(text, add_special_tokens=False):
        answer.texts.append(tokenizer.decode([token]))
        answer.mark(token, answer.texts[-1])
    answer.is_over = True
    assert (answer.thinking.strip(), answer.said.strip()) == ("Hm.", f"A tag: {closing}")


@sweep("tags", [THINK, *TAGS])
def test_reasoning_is_on_unless_it_is_switched_off_whatever_the_tags(tags):
    """mlx-lm switches it off where it does not know the tags."""
    template = _OPENING.replace(THINK[0], tags[0]).replace(THINK[1], tags[1])
    tokenizer = templated(template, *tags)
    assert render_chat_template([USER], tokenizer).endswith(f"<|assistant|>{tags[0]}\n")
    assert render_chat_template([USER], tokenizer, enable_thinking=False).rstrip().endswith(tags[1])


def test_markers_around_an_answer_are_no_part_of_it():
    tokenizer = demo_with(*TAGS[2], "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    answer = ReasoningTracker(tokenizer, [1])
    said = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    for token in tokenizer.encode(said, add_special_tokens=False):
        answer.texts.append(tokenizer.decode([token]))
        answer.mark(token, answer.texts[-1])
    assert (answer.thinking, answer.said) == ("Hm.", "Yes.")


# --- switches -------------------------------------------------------------------------------------


def _switched(condition: str, more: str = "") -> str:
    prompt = f"{{% if add_generation_prompt %}}<|assistant|>{{% if {condition} %}}<on>{{% endif %}}{{% endif %}}"
    return more + _TURNS + prompt


@sweep(
    ("template", "name"),
    [
        (_switched("enable_thinking is not false"), "enable_thinking"),
        *((_switched(f"thinking | default({default})"), "thinking") for default in ("false", "true")),
        (_switched("thinking_mode | default('enabled') == 'enabled'"), "thinking_mode"),
        (_switched("thinking_mode | default('chat') == 'thinking'"), "thinking_mode"),
        (_switched("thinking_budget | default(-1) != 0"), "thinking_budget"),
        (_switched("not (disable_thinking | default(false))"), "disable_thinking"),
        (_switched("enable_reasoning | default(true)"), "enable_reasoning"),
        (_switched("reasoning", "{% set reasoning = reasoning | default(true) %}"), "reasoning"),
        (_switched("reasoning_effort | default('no_think') in ('high', 'low')"), "reasoning_effort"),
        (_switched("reasoning_effort | default('high') != 'none'"), "reasoning_effort"),
    ],
)
def test_thinking_is_switched_by_the_templates_own_name(template, name):
    """sgl-project/sglang #9488."""
    tokenizer = templated(template, *THINK)
    switch = thinking_switch(tokenizer)
    assert switch.name == name
    assert render_chat_template([USER], tokenizer, enable_thinking=True).endswith("<on>")
    assert render_chat_template([USER], tokenizer, enable_thinking=False).endswith("<|assistant|>")
    if name != "enable_thinking":  # a value under the own name comes first
        assert render_chat_template([USER], tokenizer, **{"enable_thinking": False, name: switch.on}).endswith("<on>")
    asked = [{"enable_thinking": True}, {name: switch.on}, {name: switch.off}, {}]
    assert [asks_for_reasoning(tokenizer, switches) for switches in asked] == [True, True, False, None]


@sweep("template", [_TAGLESS, "{{ reasoning_effort }}" + _TAGLESS, "{{ preserve_thinking }}" + _TAGLESS])
def test_what_a_template_only_writes_down_is_no_switch(template):
    tokenizer = templated(template)
    assert thinking_switch(tokenizer) is None
    assert asks_for_reasoning(tokenizer, {"reasoning_effort": "low"}) is True
    assert asks_for_reasoning(tokenizer, {"reasoning_effort": "none"}) is False
    assert render_chat_template([USER], tokenizer, enable_thinking=True).endswith("<|assistant|>")


def test_a_message_that_the_template_leaves_out_cannot_be_continued():
    begun = {"role": "assistant", "content": "x", "prefix": True}
    with pytest.raises(runtime.PromptError, match=r"the final message does not appear in the chat; leave it out"):
        render_chat_template([USER, begun], templated(TEMPLATES["chatml"].replace("messages", "messages[:1]")))
