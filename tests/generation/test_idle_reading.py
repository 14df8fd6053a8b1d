"""Idle reading: what the next turn of a chat will begin with is read while no stream is at work, and gives way."""

from __future__ import annotations

from typing import Any

import trio
from asgi import CHAT, HELLO, Letters, Served, saying, simulated_server
from scripted import ScriptedModel, Simulation, priced, run, simulated
from sweeps import sweep

from protocol.trace import Span

LETTERS = Letters(thinks=True)
# What a prompt is after the first answer, whose reasoning the template leaves out.
QUESTION = "user:hello."
BEGIN = QUESTION + "assistant:yes."


def answering(text: str = "<t>hm</t>yes") -> ScriptedModel:
    start = len(LETTERS.apply_chat_template(HELLO["messages"], add_generation_prompt=True))
    return ScriptedModel(saying(text, start))


def read(simulation: Simulation) -> int:
    spans = [event for event in simulation.events if isinstance(event, Span)]
    return sum(span.num_tokens for span in spans if (span.actor, span.kind) == ("target", "prefill"))


@sweep("is_on", [True, False])
def test_what_the_next_turn_begins_with_is_read_without_its_reasoning(is_on: bool) -> None:
    async def main() -> None:
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

    run(main)


def test_a_stream_that_begins_waits_for_one_pass_and_what_was_read_is_kept() -> None:
    async def main() -> None:
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

    run(main)


def test_what_fails_while_nobody_waits_for_it_ends_nothing_else() -> None:
    async def main() -> None:
        async with simulated(answering(), tokenizer=LETTERS, idle_reading=True) as simulation:
            simulation.runtime.expect(lambda: str(1 / 0))
            simulation.runtime.expect(lambda: [10**9])
            await trio.sleep(1000)
            assert (await simulation.runtime.conversation().generate("hello")).content == "yes"

    run(main)


def test_a_chat_on_a_server_is_read_ahead_and_a_failed_one_is_not() -> None:
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
