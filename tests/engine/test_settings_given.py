"""Settings of a stream: the `defaults` of `open`, a `Settings` or a mapping, keywords, and a prompt's own."""

import re
from functools import partial
from typing import Any

import pytest
from faces import all_of, got, on_every_face, within
from greedy_pair import target
from models import VOCAB_SIZE
from sweeps import sweep

import runtime
import runtime.aio

PROMPT = [1, 2, 3]


def texts(completions: list[runtime.Completion]) -> list[list[int]]:
    return [[token.id for token in completion.tokens] for completion in completions]


async def test_a_conversation_has_them_too_and_still_reuses_what_it_has_read() -> None:
    defaults = runtime.Settings(max_tokens=4, ignore_eos=True)
    async with runtime.open(runtime.DEMO_DRAFT, defaults=defaults) as rt:
        conversation = rt.conversation()
        assert len((await conversation.generate("def f(")).tokens) == 4
        assert (await conversation.generate("def g(")).statistics.cached_tokens > 0
        assert len((await rt.conversation(max_tokens=3).generate("def f(")).tokens) == 3
        with pytest.raises(runtime.SettingsError, match="always reuses what it has read"):
            rt.conversation(reuse_prefix=False)


@sweep("own", [{}, {"logits_processors": [runtime.stateless(lambda _, logits: logits * 2 - logits[..., ::-1])]}])
async def test_a_loaded_conversation_goes_on_as_it_was_saved_whatever_the_defaults(tmp_path: Any, own: Any) -> None:
    async with runtime.open(runtime.DEMO_DRAFT) as rt:
        conversation = rt.conversation(max_tokens=4, ignore_eos=True, **own)
        await conversation.generate("def f(")
        await conversation.save(tmp_path / "session")
        expected = await conversation.generate("def g(")
    defaults = {"max_tokens": 9, "logit_bias": {5: 100.0}, "logits_processors": [runtime.stateless(lambda _, x: -x)]}
    async with runtime.open(runtime.DEMO_DRAFT, defaults=defaults) as rt:
        loaded = await rt.load(tmp_path / "session", **own)
        assert texts([await loaded.generate("def g(")]) == texts([expected])


@sweep(
    ("defaults", "says"),
    [({"stop_tokens": [VOCAB_SIZE]}, "outside the target's vocabulary"), ({"stop": "x"}, "without a tokenizer")],
)
async def test_defaults_that_do_not_fit_the_model_keep_the_block_from_being_entered(defaults: Any, says: str) -> None:
    with pytest.raises(runtime.SettingsError, match=says):
        async with runtime.open((target(), None), defaults=defaults):
            raise AssertionError("should not be reached")


# --- settings per prompt --------------------------------------------------------------------------


async def test_each_prompt_may_have_settings_of_its_own() -> None:
    async with runtime.open((target(), None)) as rt:
        alone = [
            await rt.generate(PROMPT, max_tokens=6, temperature=1.0, seed=1),
            await rt.generate(PROMPT, max_tokens=6, temperature=1.0, seed=2),
            await rt.generate([4], max_tokens=2, temperature=1.0, seed=1),
        ]
        asked = [PROMPT, (PROMPT, {"seed": 2}), ([4], {"max_tokens": 2})]
        together = await rt.generate_many(asked, max_tokens=6, temperature=1.0, seed=1)
        assert texts(together) == texts(alone)


# Settings that differ from the runtime's defaults, so that an ignored field shows.
FIVE = runtime.Settings(max_tokens=5, ignore_eos=True)
DEFAULTS = {"max_tokens": 2}


async def test_a_settings_object_sets_every_field_and_a_mapping_those_that_it_names() -> None:
    async with runtime.open((target(), None), defaults={"max_tokens": 2, "lookahead": 0}) as rt:
        async with rt.stream(PROMPT, {"seed": 1}) as stream:
            settings = rt._sessions.by_id[stream.session].opened.settings
        assert settings == runtime.Settings(max_tokens=2, lookahead=0, seed=1)
        async with rt.stream(PROMPT, runtime.Settings(seed=1)) as stream:
            settings = rt._sessions.by_id[stream.session].opened.settings
        assert settings == runtime.Settings(seed=1)


@on_every_face
async def test_a_runtime_takes_settings_and_keywords_that_override_them(open: Any) -> None:
    async with within(open(runtime.DEMO_DRAFT, defaults=DEFAULTS)) as rt:
        assert len(await all_of(rt.stream("def f(", FIVE))) == 5
        assert len((await got(rt.generate("def f(", FIVE, max_tokens=4))).tokens) == 4
        assert len((await got(rt.generate("def f("))).tokens) == 2
        if isinstance(rt, runtime.Runtime):
            assert len([token async for token in runtime.stream("def f(", FIVE)]) == 5
        own = [("def g(", {"max_tokens": 3}), ("def h(", runtime.Settings(max_tokens=1))]
        many = await got(rt.generate_many(["def f(", *own], FIVE))
        assert [len(completion.tokens) for completion in many] == [5, 3, 1]
        with pytest.raises(runtime.SettingsError, match=r"prompts\[0\]: max_tokens must be"):
            await got(rt.generate_many([("def f(", {"max_tokens": 0})]))
        conversation = rt.conversation(settings=FIVE)
        assert len((await got(conversation.generate("def f("))).tokens) == 5
        assert len(await all_of(conversation.stream("def g(", FIVE, max_tokens=3))) == 3


async def test_settings_that_cannot_be_are_refused_at_once_and_with_the_place_of_their_prompt() -> None:
    no_settings, outside = "settings must be runtime.Settings or a mapping", runtime.Settings(stop_tokens=(VOCAB_SIZE,))
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    async with runtime.open((target(), None)) as rt:
        many, one = rt.generate_many, partial(rt.stream, PROMPT)
        for begin, says in (
            *((partial(many, [PROMPT], wrong), no_settings) for wrong in (20, "greedy", [("max_tokens", 2)])),
            *((partial(one, wrong), no_settings) for wrong in (20, "greedy", [("max_tokens", 2)])),
            (partial(one, outside), f"stop_tokens [{VOCAB_SIZE}] are outside the target's vocabulary"),
            (partial(one, FIVE, max_token=3), "there is no setting 'max_token'"),
            (partial(one, tool_choise="auto"), "did you mean 'tool_choice'"),
            (partial(many, [PROMPT], max_concurent=2), "did you mean 'max_concurrent'"),
            (partial(many, [PROMPT, (PROMPT, outside)]), f"prompts[1]: stop_tokens [{VOCAB_SIZE}] are outside"),
            (partial(many, [[1], ([2], {"max_tokens": 0})]), "prompts[1]: max_tokens must be a whole number"),
            (partial(many, [([2], {"xyzzy": 0})]), "prompts[0]: there is no setting 'xyzzy'"),
            (partial(many, [[1], ([], {"max_tokens": 5})]), "prompts[1]: the prompt is empty"),
            (partial(many, [([1], 5)]), "prompts[0]: a prompt of token ids must hold whole numbers, got [1]"),
            (partial(many, [messages]), "prompts[0]: the target was opened without a tokenizer"),  # and are one prompt
        ):
            with pytest.raises(runtime.OutriderError, match=re.escape(says)):
                begin()
        assert rt.num_streams == 0
