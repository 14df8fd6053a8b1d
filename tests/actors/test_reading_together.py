"""Prompts that are read in one pass: each text is what it is alone, and what fails is read again, each alone."""

import random
from typing import Any

import mlx.core as mx
import pytest
import trio
from architectures import VOCAB_SIZE, build
from models import greedy
from scripted import VOCAB_SIZE as SCRIPTED_VOCAB_SIZE
from scripted import ScriptedModel, collect, continuation, simulated, texts_of, truthful
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.mlx.shared_passes import RowBatch
from actors.model import Feed
from actors.workers.worker import Job
from protocol.errors import RuntimeClosedError, StreamFailedError
from protocol.prefill_chunks import MAX_PASS_S, PrefillChunkSize
from protocol.target_queue import TargetQueue
from protocol.trace import Span

NUM_TOKENS = 8
PROMPTS = [[5, 6, 7, 8], [9, 2, 4], [1, 1, 3, 8], [4, 4, 4], [7, 1, 2, 2]]


def prompts_of(count: int, length: int) -> list[list[int]]:
    draws = random.Random(1)
    return [[draws.randrange(VOCAB_SIZE) for _ in range(length + draws.randint(-3, 3))] for _ in range(count)]


def prompt_passes(events: list[Any]) -> list[Span]:
    return [each for each in events if isinstance(each, Span) and each.kind == "prefill" and each.actor == "target"]


@sweep("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next", "falcon_h1"])
async def test_each_text_is_what_it_is_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillChunkSize, "_next", lambda _: (128, 0.0))  # whatever was measured
    model, prompts = build(name), prompts_of(6, 20)
    events: list[Any] = []
    async with runtime.open((model, None), trace=events.append) as rt:
        completions = await rt.generate_many(prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert [[token.id for token in each.tokens] for each in completions] == expected
    passes = prompt_passes(events)
    assert len(passes) == 2
    assert sum(each.num_read for each in passes) == sum(len(prompt) - 1 for prompt in prompts)


@sweep("name", ["llama", "gemma3_text", "lfm2"])
def test_texts_of_two_passes_become_one_batch_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join = [], MLXSequence.join

    def note(sequence: MLXSequence, batch: RowBatch) -> None:
        joined.append(sequence)
        join(sequence, batch)

    monkeypatch.setattr(MLXSequence, "join", note)
    model, prompts = build(name), prompts_of(5, 40)
    wrapped = MLXModel(model, CacheOptions())
    sequences = [wrapped.open_sequence(alongside_model=False) for _ in prompts]
    for part in (slice(0, 2), slice(2, 5)):
        wrapped.read_together(sequences[part], [tuple(prompt) for prompt in prompts[part]])
    for token in (3, 4):
        rows = wrapped.feed_together([Feed(sequence, (token,), 1) for sequence in sequences])
    assert joined == sequences  # to read their prompts, and not again
    assert len({id(sequence.batch) for sequence in sequences}) == 1
    for sequence, prompt, found in zip(sequences, prompts, rows, strict=True):
        sequence.leave_batch()
        sequence.check(len(prompt) + 2)
        alone = wrapped.open_sequence(alongside_model=False)
        alone.feed(tuple(prompt), 0)
        for each in (found, sequence.feed((5,), 1)):
            expected = alone.feed((3, 4) if each is found else (5,), 1)
            assert mx.allclose(each, expected, atol=1e-4)


# --- scripted ---------------------------------------------------------------------------------------

EXPECTED = [continuation(prompt, NUM_TOKENS) for prompt in PROMPTS]


class FailsTogether(ScriptedModel):
    """Cannot read prompts together, for want of memory."""

    num_tries = 0

    def read_together(self, sequences: Any, tokens: Any) -> None:
        self.num_tries += 1
        super().read_together(sequences[:1], tokens[:1])
        raise MemoryError("too much at once")


async def test_prompts_that_cannot_be_read_together_are_read_one_by_one(autojump_clock: Any) -> None:
    target = FailsTogether(truthful)
    async with simulated(target, None) as simulation:
        assert await texts_of(simulation, PROMPTS, max_tokens=NUM_TOKENS) == EXPECTED
    assert target.num_tries == 1


async def test_a_prompt_that_another_thread_gives_up_as_it_is_about_to_be_read_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    begin_reading = TargetQueue.begin_reading

    def give_up(queue: TargetQueue) -> None:
        simulation.runtime._sessions._end_soon(0)  # as where a thread drops the last reference to the stream
        begin_reading(queue)

    monkeypatch.setattr(TargetQueue, "begin_reading", give_up)
    async with simulated(ScriptedModel(truthful)) as simulation:
        with pytest.raises(RuntimeClosedError):
            await collect(simulation.runtime.stream(PROMPTS[0]))
        assert await collect(simulation.runtime.stream(PROMPTS[1], max_tokens=8)) == continuation(PROMPTS[1], 8)


async def test_tokens_that_were_read_together_are_counted_for_their_own_text(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), None) as simulation:
        completions = await simulation.runtime.generate_many(PROMPTS, max_tokens=2)
        found = [completion.statistics.prefilled_tokens for completion in completions]
        assert found == [len(prompt) - 1 for prompt in PROMPTS]
        assert simulation.runtime.statistics().prefilled_tokens == sum(found)


async def test_the_last_of_many_prompts_is_nearly_as_quick_as_in_a_batch(autojump_clock: Any) -> None:
    num_prompts, length, token_s, decode_s = 16, 60, 0.00017, 0.012

    def price(job: Job[Any]) -> float:
        return {"prefill": token_s * job.num_tokens, "verify": decode_s, "decode": decode_s}.get(job.kind, 0.0)

    prompts = [[(7 * i + j) % SCRIPTED_VOCAB_SIZE for j in range(length)] for i in range(num_prompts)]
    async with simulated(ScriptedModel(truthful), None, price=price) as simulation:
        # What is measured when a runtime is opened: wide passes are dearer there, since they compute logits.
        for rows in (1, 8, 64) * 2:
            simulation.runtime._target.prices.verify.observe(rows, 0.0, decode_s + 2 * token_s * rows)
        completions = await simulation.runtime.generate_many(prompts, max_tokens=2)
        firsts = [completion.statistics.time_to_first_token or 0.0 for completion in completions]
        assert len(simulation.spans("target", "prefill")) <= 3
        assert max(firsts) <= 1.15 * (num_prompts * (length - 1) * token_s + decode_s)


async def test_a_text_that_decodes_waits_for_no_longer_than_one_pass_of_a_long_prompt(autojump_clock: Any) -> None:
    def pass_s(num_tokens: int) -> float:
        return 0.04 + 0.0001 * num_tokens

    def price(job: Job[Any]) -> float:
        return pass_s(job.num_tokens) if job.kind in ("prefill", "verify", "decode") else 0.0

    gaps: list[float] = []
    async with simulated(ScriptedModel(truthful), None, price=price) as simulation:
        for rows in (1, 8, 64) * 2:
            simulation.runtime._target.prices.verify.observe(rows, 0.0, pass_s(rows))

        async def decode() -> None:
            async with simulation.runtime.stream(PROMPTS[0], max_tokens=200) as stream:
                last_s = trio.current_time()
                async for _ in stream:
                    gaps.append(trio.current_time() - last_s)
                    last_s = trio.current_time()

        async def read(number: int) -> None:
            prompt = [(7 * number + place) % SCRIPTED_VOCAB_SIZE for place in range(9)]
            # Each prompt has a pass to itself.
            stream = simulation.runtime.stream(prompt, max_tokens=1, prefill_step_size=64)
            assert await collect(stream) == continuation(prompt, 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode)
            for number in range(60):
                if number % 20 == 0:
                    await trio.sleep(1.0)
                nursery.start_soon(read, number)
    assert max(gaps) <= MAX_PASS_S + pass_s(8)


async def test_a_prompt_that_fails_is_read_once(autojump_clock: Any) -> None:
    target = ScriptedModel(truthful, fails={"feed": {1}})
    async with simulated(target, None, price=lambda job: 0.001) as simulation:
        with pytest.raises(StreamFailedError):
            await collect(simulation.runtime.stream(PROMPTS[0]))
        assert len(simulation.spans("target", "prefill")) == 1
        assert await texts_of(simulation, PROMPTS, max_tokens=NUM_TOKENS) == EXPECTED
