"""The pass that reads the rest of a prompt gives the first token, unless the first round is to verify a proposal."""

from typing import Any

import pytest
import trio
from scripted import ScriptedModel, agreeing, continuation, ids, priced, run, simulated, truthful
from sweeps import sweep
from trained_scripts import RecordingTarget, TrainedDraft

from actors.workers.worker import Job
from protocol.errors import StreamFailedError

PROMPT = [5, 6, 7, 8, 9]
PREFILL, DRAFT, DECODE = 4.0, 1.0, 8.0
NUM_TOKENS = 20


def price_of(job: Job[Any]) -> float:
    # To hand over features takes no time.
    usual = priced(prefill=PREFILL, draft=DRAFT, verify=DECODE)
    return usual(job) if job.num_tokens else 0.0


def pair(kind: str, **target: Any) -> tuple[ScriptedModel, ScriptedModel | None]:
    """A target and a drafter that is right seven times of ten."""
    if kind == "reads features":
        right = agreeing(0.7)
        return RecordingTarget(truthful, **target), TrainedDraft(lambda history, staleness: right(history))
    return ScriptedModel(truthful, **target), ScriptedModel(agreeing(0.7)) if kind == "draft model" else None


@sweep("lookahead", [0, 3, "auto"])
@sweep("kind, lookahead_of_first", [("none", 0), ("reads features", 0), ("draft model", 3)])
async def test_the_first_token_takes_a_pass_unless_a_proposal_is_verified_with_it(
    kind: str, lookahead_of_first: int, lookahead: Any, autojump_clock: Any
) -> None:
    async with simulated(*pair(kind), price=price_of) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead)
        assert ids(completion.tokens) == continuation(PROMPT, NUM_TOKENS)
        statistics, first = completion.statistics, simulation.rounds()[0]
    is_one_pass = lookahead_of_first == 0 or lookahead == 0
    assert first.begins_text == is_one_pass
    assert statistics.prefilled_tokens == len(PROMPT) - 1
    assert statistics.rounds == statistics.passes == len(simulation.rounds())
    if is_one_pass:
        assert (first.num_tokens, statistics.time_to_first_token) == (len(PROMPT), PREFILL)
        assert statistics.prompt_tps == (len(PROMPT) - 1) / PREFILL
    if kind == "reads features" and lookahead == 3:
        assert statistics.accepted > NUM_TOKENS // 3


async def test_a_target_that_decodes_each_text_alone_reads_the_last_token_by_itself(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), price=price_of, max_batch=1) as simulation:
        await simulation.runtime.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=0)
        assert [span.num_tokens for span in simulation.spans("target", "prefill")] == [len(PROMPT) - 1]
        assert [span.num_tokens for span in simulation.rounds()] == [1] * NUM_TOKENS


@sweep("kind", ["none", "reads features"])
def test_a_text_whose_first_pass_fails_ends_alone(kind: str) -> None:
    async def main() -> None:
        prompts = [[number] * length for number, length in enumerate((3, 9, 30, 90))]  # not read together
        async with simulated(*pair(kind, fails={"feed": {2}}), price=price_of, max_batch=4) as simulation:
            found = await simulation.runtime.generate_many(prompts, max_tokens=NUM_TOKENS, on_error="return")
            assert simulation.runtime.health().ok
        failed = [each for each in found if isinstance(each, StreamFailedError)]
        assert len(failed) == 1
        for prompt, each in zip(prompts, found, strict=True):
            assert each in failed or ids(each.tokens) == continuation(prompt, NUM_TOKENS)

    run(main)


@sweep("kind", ["none", "reads features"])
async def test_a_prompt_whose_stream_is_cancelled_in_that_pass_is_cached(kind: str, autojump_clock: Any) -> None:
    async with simulated(*pair(kind), price=price_of) as simulation:
        with trio.move_on_after(PREFILL / 2):
            await simulation.runtime.generate(PROMPT, max_tokens=NUM_TOKENS, reuse_prefix=True)
        began = trio.current_time()
        assert began == PREFILL / 2
        completion = await simulation.runtime.generate([*PROMPT, 3], max_tokens=NUM_TOKENS, reuse_prefix=True)
        assert ids(completion.tokens) == continuation([*PROMPT, 3], NUM_TOKENS)
        assert completion.statistics.cached_tokens == len(PROMPT)


async def test_a_text_that_begins_beside_others_delays_them_by_one_pass(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), price=price_of) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=NUM_TOKENS)
        await anext(stream)
        completion = await simulation.runtime.generate([1, 2, 3], max_tokens=1)
        assert ids(completion.tokens) == continuation([1, 2, 3], 1)
        assert [(await anext(stream)).id for _ in range(NUM_TOKENS - 1)] == continuation(PROMPT, NUM_TOKENS)[1:]
        begun = [span for span in simulation.rounds() if span.begins_text]
        assert [span.num_tokens for span in begun] == [len(PROMPT), 3]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
