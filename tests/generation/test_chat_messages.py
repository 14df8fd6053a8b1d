"""Chat messages are checked before any model work; errors name the message, the fault and the remedy."""

import functools
import re
from typing import Any

import pytest
import transformers.tokenization_utils_base
from mlx_lm.tokenizer_utils import TokenizerWrapper
from sample_tokenizers import word_tokenizer
from sweeps import sweep

import runtime
from runtime.generation.text import ROLES, encode_prompt

WORDS = ["<unk>", *ROLES, "hello", "world", ":", "called"]
CHAT = """\
{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}\
{% else %}called{% endif %} {% endfor %}assistant :"""


@functools.cache
def words(template: str = CHAT) -> TokenizerWrapper:
    return word_tokenizer(WORDS, chat_template=template)


def said(messages: Any, template: str = CHAT) -> str:
    return " ".join(WORDS[token] for token in encode_prompt(messages, words(template), len(WORDS)))


USER = {"role": "user", "content": "hello"}

BAD = [
    ([{}], "messages[0] has no role; give it one of 'system', 'developer', 'user', 'assistant', 'tool'"),
    ([USER, {"content": "x"}], "messages[1] has no role"),
    *(([{"role": odd, "content": "x"}], f"messages[0] has the role {odd}") for odd in (None, 5)),
    (
        [{"role": "users", "content": "x"}],
        "messages[0] has the role 'users', which is unknown; give it one of 'system'",
    ),
    ([USER, {"role": "user"}], 'messages[1] has no content; give it a text, "" for an empty one'),
    ([{"role": "user", "content": None}], "messages[0] has the content None"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0] has the content None"),
    ([{"role": "user", "content": 5}], "messages[0].content must be a text or a list of text parts, got 5"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content must be a text or a list"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0] must be a mapping, got 'x'; give parts of the form"),
    (
        [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
        "messages[1].content[1] is of type 'image_url', and only text can be read; give parts of the form",
    ),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0] is of type None"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a text, got None"),
    ([{"role": "user", "content": "\ud800"}], "not valid text"),
    ([{"role": "x" * 9999, "content": "x"}], "which is unknown"),
    ([USER, "not a message"], "got 'not a message'"),
    ([USER, 5], "got 5"),
]


@sweep(("messages", "says"), BAD)
def test_an_invalid_message_is_refused_with_its_place_and_the_remedy(messages, says):
    with pytest.raises(runtime.PromptError, match=re.escape(says)) as caught:
        encode_prompt(messages, words(), len(WORDS))
    assert len(str(caught.value)) < 400


NONE: list[dict[str, Any]] = [{}, {"content": None}]


@sweep(
    ("messages", "text"),
    [
        ([{"role": role, "content": "hello"} for role in ROLES], " ".join(f"{role} : hello" for role in ROLES)),
        *(([{"role": "user", "content": empty}], "user :") for empty in ("", [])),
        ([{"role": "user", "content": [{"type": "text", "text": half} for half in ("hel", "lo")]}], "user : hello"),
        *(([{"role": "assistant", **none, "tool_calls": [{"function": {}}]}], "assistant : called") for none in NONE),
        ([USER | {"name": "me", "extra": 5}], "user : hello"),
    ],
)
def test_messages_that_can_be_reach_the_template(messages, text):
    before = repr(messages)
    assert said(messages) == f"{text} assistant :"
    assert repr(messages) == before


def test_a_role_that_a_template_speaks_of_is_known_to_it():
    template = CHAT.replace("{% for", "{% if messages[0].role == 'tool_list' %}called {% endif %}{% for")
    assert said([{"role": "tool_list", "content": "hello"}], template).startswith("called")


@sweep(
    ("error", "says"),
    [
        *[("messages[5].content.strip()", "no element 5"), ("1 / 0", "division"), ("messages[0].content + 5", "str")],
        ("raise_exception('roles must alternate')", "roles must alternate"),
    ],
)
def test_whatever_a_template_raises_is_about_the_prompt(error, says):
    with pytest.raises(runtime.PromptError, match=f"the chat template does not take these messages: .*{says}"):
        encode_prompt([USER], words("{{ " + error + " }}"), len(WORDS))


# --- long prompts ---------------------------------------------------------------------------------


def test_only_the_runtime_speaks_of_a_prompt_that_is_long(monkeypatch):
    def warn(message: str, *_: Any, **__: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(transformers.tokenization_utils_base.logger, "warning", warn)
    short = word_tokenizer(WORDS, chat_template=CHAT, model_max_length=4)
    text = "hello world " * 10
    assert len(encode_prompt(text, short, len(WORDS))) == 20
    assert len(encode_prompt([{"role": "user", "content": text}], short, len(WORDS))) == 24
