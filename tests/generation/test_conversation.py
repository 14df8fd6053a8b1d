"""Conversations: the prompt of each turn, the messages that are kept, and the ends of turns."""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
from architectures import build
from chat_models import THINKING_TEMPLATE, demo_with, pair, says, target, tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import read_into
from sweeps import sweep

import runtime
from protocol.messages import Open
from protocol.settings import Settings
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText, apply_chat_template


@functools.cache
def recurrent() -> nn.Module:
    return build("lfm2", vocab_size=4101)


@runtime.stateless
def speaks(tokens: mx.array, logits: mx.array) -> mx.array:
    """Never ends the text, and never says a special token."""
    ids = mx.arange(logits.shape[-1])
    return mx.where((ids < 4096) & (ids != 0), logits, -mx.inf)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **more}


SETTINGS: dict[str, Any] = {"max_tokens": 9, "logits_processors": (speaks,), "lookahead": 3}


# --- turns ----------------------------------------------------------------------------------------


@sweep("of", [target, recurrent])
async def test_a_turn_reads_only_what_is_new_since_the_reset(of):
    async with runtime.open(*pair(of())) as rt:
        conversation = rt.conversation("You are brief.", **SETTINGS)
        assert repr(conversation) == "<outrider Conversation: 1 messages>"
        messages = [{"role": "system", "content": "You are brief."}]
        assert conversation.messages == messages
        known = 0
        for text in ("def f(x):", "import os, and more of it", "class A"):
            completion = await conversation.generate(text)
            # Without a conversation, and without a prefix cache.
            alone = await rt.generate([*messages, user(text)], **SETTINGS)
            assert completion.text == alone.text
            assert completion.statistics.prompt_tokens == alone.statistics.prompt_tokens
            messages += [user(text), assistant(completion.text)]
            assert conversation.messages == messages
            assert completion.statistics.cached_tokens >= known
            known = completion.statistics.prompt_tokens - 1
        conversation.reset()
        assert conversation.messages == messages[:1]
        again = await conversation.generate("def f(x):")
        assert again.text == messages[2]["content"]


async def test_messages_are_a_copy_and_grow_with_what_is_given():
    async with runtime.open(*pair()) as rt:
        conversation = rt.conversation(**SETTINGS)
        async with conversation.stream("import") as stream:
            assert conversation.messages == []
            text = ""
            async for token in stream:
                text += token.text
                assert conversation.messages == [user("import"), assistant(text)]
        conversation.messages[0]["content"] = "something else"
        conversation.messages.clear()
        assert conversation.messages == [user("import"), assistant(text)]


# --- ends of turns --------------------------------------------------------------------------------


async def test_what_was_withheld_of_a_turn_that_is_broken_off_is_remembered():
    wrapped = tokenizer(THINKING_TEMPLATE, thinks=True)
    processor = says(wrapped, "<think>Hm, os</think>import os, too")
    async with runtime.open(*pair(thinks=True, template=THINKING_TEMPLATE)) as rt:
        for stop, tail, before, after in (
            ("</think>?", "</think>", {"reasoning_content": "Hm, os"}, assistant("", reasoning_content="Hm, os")),
            ("ort os, however", "ort os", {"content": "imp"}, assistant("import os", reasoning_content="Hm, os")),
        ):
            conversation = rt.conversation(logits_processors=(processor,), lookahead=3, stop=stop)
            async with conversation.stream("What now?") as stream:
                async for _ in stream:
                    if stream.tail == tail:
                        break
                # While more text may come, it is not known yet what is withheld.
                assert conversation.messages[-1].items() >= before.items()
            assert stream.tail == tail
            assert conversation.messages[-1] == after


async def test_no_moment_shows_an_exchange_twice():
    seen: list[int] = []

    class Watched(runtime.Conversation):
        """A conversation that lets another thread look after every assignment."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if seen:
                seen.append(len(self.messages))

    async with runtime.open(*pair()) as rt:
        conversation = rt.conversation(**SETTINGS)
        await conversation.generate("import")
        conversation.__class__ = Watched
        seen.append(2)
        await conversation.generate("os")
        assert set(seen) == {2}
        conversation.reset()
        assert set(seen) == {2, 0}


async def test_a_turn_that_ends_before_its_first_token_leaves_the_conversation_as_it_was():
    # Idle reading that gives way to the dropped stream would keep it, by the frames of its cancellation, until it ends.
    async with runtime.open(*pair(), idle_reading=False) as rt:
        conversation = rt.conversation(**SETTINGS)
        await conversation.generate("import")
        before = conversation.messages
        with trio.move_on_after(0):
            await conversation.generate("never heard")
        assert conversation.messages == before
        await conversation.stream("nor this").aclose()
        assert conversation.messages == before
        with pytest.warns(ResourceWarning, match="dropped unread"):
            conversation.stream("nor this one, which nobody holds")
        assert conversation.messages == before
        await conversation.generate("os")
        assert [message["content"] for message in conversation.messages[::2]] == ["import", "os"]


async def test_a_turn_that_fails_is_remembered_as_far_as_it_was_given():
    num_calls = 0

    @runtime.stateless
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 4:
            raise ValueError("no more")
        return speaks(tokens, logits)

    async with runtime.open(*pair()) as rt:
        conversation = rt.conversation(**SETTINGS | {"logits_processors": (fails,), "lookahead": 0})
        got: list[int] = []
        with pytest.raises(runtime.OutriderError, match="no more"):
            await read_into(got, conversation.stream("import"))
        assert got
        assert conversation.messages == [user("import"), assistant(tokenizer().decode(got))]
        assert (await conversation.generate("os", logits_processors=(speaks,))).text


# --- invalid conversations ------------------------------------------------------------------------


async def test_what_is_wrong_is_said_as_the_conversation_is_made():
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"temprature": 1}, runtime.SettingsError, "there is no setting 'temprature'"),
        ({"thinkng": True}, runtime.SettingsError, "there is no setting 'thinkng'; did you mean 'thinking'"),
        ({"max_tokens": 0}, runtime.SettingsError, "max_tokens must be"),
        ({"stop_tokens": [10**6]}, runtime.SettingsError, "vocabulary"),
        ({"reuse_prefix": False}, runtime.SettingsError, "always reuses"),
        ({"system": ["You are brief."]}, runtime.PromptError, "system must be text"),
        ({"thinking": "yes"}, runtime.SettingsError, "thinking must be True, False"),
        ({"thinking": False}, runtime.SettingsError, "thinking=False has no effect"),
    ]
    async with runtime.open(*pair()) as rt:
        for options, error, message in wrong:
            with pytest.raises(error, match=message):
                rt.conversation(**options)
        conversation = rt.conversation(reuse_prefix=True)
        with pytest.raises(runtime.SettingsError, match="temperature"):
            conversation.stream("import", temperature=-1)
        with pytest.raises(runtime.PromptError, match="is text, got list"):
            conversation.stream([1, 2, 3])
        assert conversation.messages == []


async def test_leaving_a_conversation_ends_its_answer():
    async with runtime.open(*pair()) as rt:
        async with rt.conversation(**SETTINGS) as conversation:
            stream = conversation.stream("What now?")
            assert await anext(stream)
        assert stream.is_closed


# --- base models ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_without_a_chat_template_a_conversation_is_a_running_text():
    async with runtime.open(runtime.DEMO_DRAFT) as rt:
        conversation = rt.conversation("# A stack.\n", max_tokens=12, ignore_eos=True)
        text = "# A stack.\n"
        for said in ("class Stack:\n", "\n    def pop(self):", ""):
            completion = await conversation.generate(said)
            alone = await rt.generate(text + said, max_tokens=12, ignore_eos=True)
            assert completion.text == alone.text
            text += said + completion.text
        assert "".join(message["content"] for message in conversation.messages) == text
        assert completion.statistics.cached_tokens > 0
        with pytest.raises(runtime.SettingsError, match="thinking=True has no effect"):
            rt.conversation(thinking=True)


# --- reasoning ------------------------------------------------------------------------------------


def parts(text: str, wrapped: TokenizerWrapper, *, prompt: str = "") -> tuple[ReasoningTracker, list[bool]]:
    """The reasoning tracker of a text, and which of its tokens are reasoning."""
    answer = ReasoningTracker(wrapped, wrapped.encode(prompt, add_special_tokens=False))
    ids = wrapped.encode(text, add_special_tokens=False)
    answer.texts += [wrapped.decode([id]) for id in ids]
    return answer, [answer.mark(id, text) for id, text in zip(ids, answer.texts, strict=True)]


ASKED = "<|user|>What is <think>?<|endoftext|><|assistant|>"


@sweep(
    ("text", "prompt", "thinking", "said"),
    [
        *(("import os", prompt, "", "import os") for prompt in ("", "<think>x</think>", ASKED)),
        ("<think>\nHm.\n</think>\n\nimport os", "", "\nHm.\n", "\n\nimport os"),
        ("Hm.\n</think>import os", "<|assistant|><think>\n", "Hm.\n", "import os"),
        ("<think>Hm", "", "Hm", ""),
        ("<think>b</think>\n<think>d</think>e", "", "bd", "\ne"),
        *((text, "", "", text) for text in ("Use <think> in it. </think>", "a</think>b")),
        ("<think>a<think>b</think>c", "", "a<think>b", "c"),
    ],
)
def test_what_stands_between_tags_is_thinking(text, prompt, thinking, said):
    answer, flags = parts(text, tokenizer(THINKING_TEMPLATE, thinks=True), prompt=prompt)
    assert (answer.thinking, answer.said, answer.text) == (thinking, said, text)
    assert any(flags) == bool(thinking)
    assert answer.num_tokens == len(flags)


def test_tags_of_several_tokens():
    wrapped = demo_with("<|channel>", "<channel|>")
    assert len(wrapped.think_start_tokens) > 1
    text = "\n<|channel>thought\nHm.<channel|>import"
    answer, flags = parts(text, wrapped)
    ids = wrapped.encode(text, add_special_tokens=False)
    assert (answer.thinking, answer.said) == ("\nHm.", "\nimport")
    assert flags[:2] == [False, False]
    assert flags[-1] is False
    assert all(flags[1 + len(wrapped.think_start_tokens) : ids.index(wrapped.think_end_tokens[0]) + 1])


@sweep(
    ("stop", "thinking", "said"),
    [
        *((stop, "see", "ok then") for stop in (">\n\n\n", "</think></think>", "<thinker>", "then!")),
        *[("ee</th", "s", ""), ("</think>ok t", "see", ""), ("k t", "see", "o")],
    ],
)
def test_thinking_is_told_apart_though_a_tag_might_begin_a_stop_string(stop, thinking, said):
    wrapped = tokenizer(THINKING_TEMPLATE, thinks=True)
    opened = Open(0, (1,), Settings(stop=stop), 0, frozenset())
    text, answer = GrowingText(wrapped, opened), ReasoningTracker(wrapped, [1])
    ids = wrapped.encode("<think>see</think>ok then", add_special_tokens=False)
    for i, id in enumerate(ids):
        given = text.add(id, is_last=i + 1 == len(ids))
        answer.texts.append(given)
        answer.mark(id, text.readable)
        if text.stop is not None:
            break
    assert (answer.thinking, answer.said) == (thinking, said)


async def test_thinking_is_told_apart_and_not_repeated_in_the_next_turn():
    wrapped = tokenizer(THINKING_TEMPLATE, thinks=True)
    processor = says(wrapped, "<think>\nHm, os.\n</think>\n\nimport os", "import sys")
    async with runtime.open(*pair(thinks=True, template=THINKING_TEMPLATE)) as rt:
        conversation = rt.conversation(logits_processors=(processor,), lookahead=3)
        completion = await conversation.generate("What now?")
        assert completion.text == "<think>\nHm, os.\n</think>\n\nimport os"
        assert completion.thinking == "\nHm, os.\n"
        reasoning = [token.text for token in completion.tokens if token.is_thinking]
        assert "".join(reasoning) == "<think>\nHm, os.\n</think>"
        assert conversation.messages == [user("What now?"), assistant("import os", reasoning_content="Hm, os.")]
        second = await conversation.generate("And now?")
        assert (second.text, second.thinking) == ("import sys", "")
        prompt = apply_chat_template([user("What now?"), assistant("import os"), user("And now?")], wrapped)
        assert second.statistics.prompt_tokens == len(prompt)
        # All of the first prompt. The reasoning after it is left out.
        assert second.statistics.cached_tokens == completion.statistics.prompt_tokens


async def test_thinking_can_be_switched_where_the_template_has_a_switch():
    async with runtime.open(*pair(thinks=True, template=THINKING_TEMPLATE)) as rt:
        sizes = []
        for thinking in (None, True, False):
            conversation = rt.conversation(thinking=thinking, **SETTINGS)
            sizes.append((await conversation.generate("import")).statistics.prompt_tokens)
        assert sizes[0] == sizes[1] < sizes[2]


@pytest.mark.slow
async def test_a_conversation_that_has_outgrown_the_context_says_that_it_is_the_conversation():
    async with runtime.open(runtime.DEMO_DRAFT) as rt:
        conversation = rt.conversation(max_tokens=None, ignore_eos=True)
        with pytest.raises(runtime.PromptError, match=r"^prompt is too long: \d+ tokens > 1023 maximum"):
            conversation.stream("word " * 2000)
        await conversation.generate("word " * 700, max_tokens=4)
        before = conversation.messages
        too_long = r"^the conversation has become too long: .*or reset the conversation"
        with pytest.raises(runtime.PromptError, match=too_long):
            conversation.stream("word " * 700)
        assert conversation.messages == before
        conversation.reset()
        await conversation.generate("word", max_tokens=1)
