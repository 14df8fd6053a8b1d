"""What is read ahead: by `Runtime.warm`, and while no stream is at work, what the next turn of a chat begins with."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import trio
from asgi import CHAT, HELLO, Letters, Served, saying, simulated_server
from scripted import ScriptedModel, Simulation, agreeing, continuation, ids, priced, simulated
from sweeps import sweep

import runtime

PROMPT = [7, *range(40)]
SETTINGS = {"reuse_prefix": True, "prefill_step_size": 8}


def read(simulation: Simulation, actor: str = "target") -> int:
    """How many tokens of prompts an actor has read."""
    return sum(span.num_tokens for span in simulation.spans(actor, "prefill"))


async def goes_on(simulation: Simulation, num_cached: int, prompt: Any = PROMPT) -> None:
    """Asserts that a text is right, and how much of its prompt need not be read."""
    completion = await simulation.runtime.generate(prompt, max_tokens=6, lookahead=2, **SETTINGS)
    assert ids(completion.tokens) == continuation(prompt, 6)
    assert completion.statistics.cached_tokens == num_cached


@sweep("draft", [ScriptedModel, "ngram", None])
async def test_a_prompt_is_read_once_by_each_model_and_no_token_is_generated(draft, autojump_clock):
    drafter = draft(agreeing(0.8)) if draft is ScriptedModel else draft
    async with simulated(ScriptedModel(agreeing(1.0)), drafter) as simulation:
        warmed = await simulation.runtime.warm(PROMPT, **SETTINGS)
        assert (warmed.prompt_tokens, warmed.cached_tokens, warmed.generated_tokens) == (41, 0, 0)
        assert (read(simulation), simulation.runtime.num_streams) == (40, 0)
        assert read(simulation, "draft") == (40 if drafter not in (None, "ngram") else 0)
        again = await simulation.runtime.warm(PROMPT, **SETTINGS)
        assert (again.prompt_tokens, again.cached_tokens) == (41, 40)
        await goes_on(simulation, 40)
        await goes_on(simulation, 41, [*PROMPT, 5, 6])
        assert read(simulation, "draft") <= 42


@sweep("after_s", [0.5, 3.0, 4.5])
async def test_what_was_read_by_the_time_of_a_cancellation_is_kept(after_s, autojump_clock):
    models = ScriptedModel(agreeing(1.0)), ScriptedModel(agreeing(0.8))
    async with simulated(*models, price=priced(prefill=1.0)) as simulation:
        with trio.move_on_after(after_s):
            await simulation.runtime.warm(PROMPT, **SETTINGS)
        # The pass that runs is finished.
        await goes_on(simulation, min(40, 8 * int(after_s + 1)))


@sweep("max_streams", [None, 1])
async def test_nobody_waits_for_a_drafter_that_reads_slowly_or_hangs(max_streams, autojump_clock):
    models = ScriptedModel(agreeing(1.0)), ScriptedModel(agreeing(0.8))
    seconds = {"prefill": 1000.0}
    prices = {"price": priced(prefill=1.0), "draft_price": lambda job: seconds.get(job.kind, 0.5)}
    async with simulated(*models, max_streams=max_streams, **prices) as simulation:
        began = trio.current_time()
        await simulation.runtime.warm(PROMPT, **SETTINGS)
        assert trio.current_time() - began == 5.0
        assert simulation.runtime.num_streams == 0
        await trio.sleep(6000)
        assert (read(simulation), read(simulation, "draft")) == (40, 40)
        # With room for one stream, the drafter ends its reading after the running pass, and keeps what it has read.
        seconds["prefill"] = 1e5
        await simulation.runtime.warm(PROMPT[1:], **SETTINGS)
        with trio.fail_after(200 if max_streams is None else 1.1e5):
            await goes_on(simulation, 39, PROMPT[1:])
        assert read(simulation, "draft") == (40 if max_streams is None else 48)


async def test_it_waits_for_its_turn_and_ends_with_its_runtime(autojump_clock):
    async with simulated(ScriptedModel(agreeing(1.0)), max_streams=1) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=500)
        await stream.__anext__()
        with trio.move_on_after(100):
            await simulation.runtime.warm([*PROMPT, 1], **SETTINGS)
            raise AssertionError("should not be reached")
        await stream.aclose()
        await simulation.runtime.warm([*PROMPT, 1], **SETTINGS)
        with pytest.raises(runtime.PromptError, match="empty"):
            await simulation.runtime.warm([])
        with pytest.raises(runtime.SettingsError, match="max_tokns"):
            await simulation.runtime.warm(PROMPT, max_tokns=3)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(runtime.RuntimeClosedError):
                    await simulation.runtime.warm([*range(50)], **SETTINGS)

            nursery.start_soon(wait)
            await trio.sleep(1.5)
            await simulation.runtime.aclose()


# --- while no stream is at work -------------------------------------------------------------------

LETTERS = Letters(thinks=True)
# What a prompt is after the first answer, whose reasoning the template leaves out.
QUESTION = "user:hello."
BEGIN = QUESTION + "assistant:yes."


def answering(text: str = "<t>hm</t>yes") -> ScriptedModel:
    start = len(LETTERS.apply_chat_template(HELLO["messages"], add_generation_prompt=True))
    return ScriptedModel(saying(text, start))


@sweep("is_on", [True, False])
async def test_what_the_next_turn_begins_with_is_read_without_its_reasoning(is_on, autojump_clock):
    async with simulated(answering(), tokenizer=LETTERS, idle_reading=is_on) as simulation:
        conversation = simulation.runtime.conversation()
        assert (await conversation.generate("hello")).content == "yes"
        before = read(simulation)
        await trio.sleep(1000)
        num_read_ahead = read(simulation) - before
        assert (num_read_ahead > 0) is is_on
        async with conversation.stream("more", max_tokens=1) as stream:
            await stream.__anext__()
        # Up to the words of the user, but for a token that they may change.
        begun = len(BEGIN) if is_on else len(QUESTION)
        assert begun <= stream.statistics().cached_tokens <= begun + len("assistant:")
        await trio.sleep(1000)


@sweep("plugged", [True, False, None])
async def test_nothing_is_read_ahead_on_battery(plugged, monkeypatch, autojump_clock):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=plugged))
    async with simulated(answering(), tokenizer=LETTERS, idle_reading=True) as simulation:
        await simulation.runtime.conversation().generate("hello")
        before = read(simulation)
        await trio.sleep(1000)
        assert (read(simulation) > before) is (plugged is not False)


async def test_a_stream_that_begins_waits_for_one_pass_and_what_was_read_is_kept(autojump_clock):
    models = answering("<t>hm</t>" + "yes and " * 20)
    price = priced(prefill=10.0)
    async with simulated(models, tokenizer=LETTERS, idle_reading=True, price=price) as simulation:
        conversation = simulation.runtime.conversation(prefill_step_size=8, max_tokens=400)
        await conversation.generate("hello")
        await trio.sleep(15)  # in the second pass, or the only one
        before, began = read(simulation), trio.current_time()
        assert simulation.runtime.num_streams == 1
        stream = simulation.runtime.stream([1, 2], max_tokens=1)
        await stream.__anext__()
        # One pass that was running, the prompt's own, and one for the token.
        assert trio.current_time() - began <= 10 + 10 + 5
        assert read(simulation) > before
        # What was expected then is not read any more.
        after = read(simulation)
        await trio.sleep(1000)
        assert read(simulation) == after


async def test_what_fails_while_nobody_waits_for_it_ends_nothing_else(autojump_clock):
    async with simulated(answering(), tokenizer=LETTERS, idle_reading=True) as simulation:
        simulation.runtime.expect(lambda: str(1 / 0))
        simulation.runtime.expect(lambda: [10**9])
        await trio.sleep(1000)
        assert (await simulation.runtime.conversation().generate("hello")).content == "yes"


def test_a_chat_on_a_server_is_read_ahead_and_a_failed_one_is_not():
    async def test(server: Served) -> None:
        assert (await server.ask(CHAT, HELLO)).text == "yes"
        before = read(server.simulation)
        await trio.sleep(1000)
        assert read(server.simulation) > before
        said: list[Any] = [*HELLO["messages"], {"role": "assistant", "content": "yes"}]
        said.append({"role": "user", "content": "more"})
        answer = await server.ask(CHAT, {"messages": said, "max_tokens": 1})
        cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(BEGIN) <= cached < len(BEGIN + "user:more.")

    simulated_server(test, answering(), tokenizer=LETTERS, idle_reading=True)
