"""A `Settings` instead of keywords, wherever a generation takes settings; and keywords beside it."""

from __future__ import annotations

import functools
from typing import Any

import mlx.nn as nn
import pytest
from faces import all_of, got, on_every_face, within
from models import VOCAB_SIZE, llama
from sweeps import sweep

import runtime
import runtime.aio

PROMPT = [1, 2, 3]
# Settings that differ from the runtime's defaults, so that an ignored field shows.
FIVE = runtime.Settings(max_tokens=5, ignore_eos=True)
DEFAULTS = {"max_tokens": 2}


@functools.cache
def target() -> nn.Module:
    return llama()


async def test_trios_runtime_takes_settings_and_keywords_that_override_them() -> None:
    async with runtime.open((target(), None), defaults=DEFAULTS) as rt:
        assert len([token async for token in rt.stream(PROMPT, FIVE)]) == 5
        assert len([token async for token in rt.stream(PROMPT, FIVE, max_tokens=3)]) == 3
        assert len([token async for token in runtime.stream(PROMPT, FIVE)]) == 5
        assert len((await rt.generate(PROMPT, settings=FIVE, max_tokens=4)).tokens) == 4
        assert len((await rt.generate(PROMPT)).tokens) == 2
        many = await rt.generate_many(
            [PROMPT, (PROMPT, {"max_tokens": 3}), (PROMPT, runtime.Settings(max_tokens=1))], FIVE
        )
        assert [len(completion.tokens) for completion in many] == [5, 3, 1]
        indices = [index async for index, _ in rt.stream_many([PROMPT, PROMPT], FIVE, max_tokens=4)]
        assert sorted(indices) == [0] * 4 + [1] * 4


async def test_a_settings_object_sets_every_field_and_a_mapping_those_that_it_names() -> None:
    async with runtime.open((target(), None), defaults={"max_tokens": 2, "lookahead": 0}) as rt:
        async with rt.stream(PROMPT, {"seed": 1}) as stream:
            settings = rt._sessions.by_id[stream.session].opened.settings
        assert settings == runtime.Settings(max_tokens=2, lookahead=0, seed=1)
        async with rt.stream(PROMPT, runtime.Settings(seed=1)) as stream:
            settings = rt._sessions.by_id[stream.session].opened.settings
        assert settings == runtime.Settings(seed=1)


async def test_conversations_take_settings_and_reuse_what_was_read_all_the_same() -> None:
    async with runtime.open(runtime.DEMO_DRAFT, defaults=DEFAULTS) as rt:
        conversation = rt.conversation(None, FIVE)
        assert len((await conversation.generate("def f(")).tokens) == 5
        answer = await conversation.generate("def g(", runtime.Settings(max_tokens=4, ignore_eos=True))
        assert (len(answer.tokens), answer.statistics.cached_tokens > 0) == (4, True)
        async with conversation.stream("x", FIVE, max_tokens=3) as stream:
            assert len([token async for token in stream]) == 3


@on_every_face
async def test_asyncio_and_plain_threads_take_settings_too(open: Any) -> None:
    async with within(open(runtime.DEMO_DRAFT, defaults=DEFAULTS)) as rt:
        assert len(await all_of(rt.stream("def f(", FIVE))) == 5
        assert len((await got(rt.generate("def f(", FIVE, max_tokens=4))).tokens) == 4
        assert len((await got(rt.generate("def f("))).tokens) == 2
        many = await got(rt.generate_many(["def f(", ("def g(", runtime.Settings(max_tokens=1))], FIVE))
        assert [len(completion.tokens) for completion in many] == [5, 1]
        with pytest.raises(runtime.SettingsError, match=r"prompts\[0\]: max_tokens must be"):
            await got(rt.generate_many([("def f(", {"max_tokens": 0})]))
        assert len(await all_of(rt.stream_many(["def f("], FIVE))) == 5
        conversation = rt.conversation(settings=FIVE)
        assert len((await got(conversation.generate("def f("))).tokens) == 5
        assert len(await all_of(conversation.stream("def g(", FIVE, max_tokens=3))) == 3


def test_scripts_take_settings_and_defaults_too() -> None:
    generate = functools.partial(runtime.generate_sync, "def f(", target=runtime.DEMO_DRAFT)
    assert len(generate(FIVE, max_tokens=3).tokens) == 3
    assert len(generate(defaults={"max_tokens": 4}).tokens) == 4


@sweep("settings", [20, "greedy", [("max_tokens", 2)]])
async def test_what_is_no_settings_is_said_to_be_none(settings: Any) -> None:
    async with runtime.open((target(), None)) as rt:
        for begin in (rt.stream, rt.generate_many, rt.stream_many):
            with pytest.raises(runtime.SettingsError, match=r"settings must be runtime\.Settings or a mapping"):
                begin(PROMPT, settings)  # type: ignore[operator]


async def test_settings_are_checked_with_what_overrides_them() -> None:
    async with runtime.open((target(), None)) as rt:
        with pytest.raises(runtime.SettingsError, match=r"stop_tokens .* outside the target's vocabulary"):
            rt.stream(PROMPT, runtime.Settings(stop_tokens=(VOCAB_SIZE,)))
        with pytest.raises(runtime.SettingsError, match=r"prompts\[1\]: stop_tokens .* outside"):
            rt.generate_many([PROMPT, (PROMPT, runtime.Settings(stop_tokens=(VOCAB_SIZE,)))])
        with pytest.raises(runtime.SettingsError, match="there is no setting 'max_token'"):
            rt.stream(PROMPT, FIVE, max_token=3)  # type: ignore[call-arg]


async def test_the_former_name_of_keep_open_still_works_and_names_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"runtime.keep_open.*`outrider serve`") as caught:
        serve = runtime.serve
    assert serve is runtime.keep_open
    assert caught[0].filename == __file__
