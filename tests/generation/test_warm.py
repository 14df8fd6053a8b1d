"""`Runtime.warm`: a prompt is read by both models and kept, and nothing is generated."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from scripted import ScriptedModel, Simulation, agreeing, continuation, ids, priced, run, simulated
from sweeps import sweep

import runtime
from protocol.trace import Span

PROMPT = [7, *range(40)]
SETTINGS = {"reuse_prefix": True, "prefill_step_size": 8}


def read(simulation: Simulation, actor: str = "target") -> int:
    """How many tokens of prompts an actor has read."""
    return sum(
        e.num_tokens for e in simulation.events if isinstance(e, Span) and (e.actor, e.kind) == (actor, "prefill")
    )


async def goes_on(simulation: Simulation, num_cached: int, prompt: Any = PROMPT) -> None:
    """Asserts that a text is right, and how much of its prompt need not be read."""
    completion = await simulation.runtime.generate(prompt, max_tokens=6, lookahead=2, **SETTINGS)
    assert ids(completion.tokens) == continuation(prompt, 6)
    assert completion.statistics.cached_tokens == num_cached


@sweep("draft", [ScriptedModel, "ngram", None])
def test_a_prompt_is_read_once_by_each_model_and_no_token_is_generated(draft: Any) -> None:
    async def main() -> None:
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

    run(main)


@sweep("after_s", [0.5, 3.0, 4.5])
def test_what_was_read_by_the_time_of_a_cancellation_is_kept(after_s: float) -> None:
    async def main() -> None:
        models = ScriptedModel(agreeing(1.0)), ScriptedModel(agreeing(0.8))
        async with simulated(*models, price=priced(prefill=1.0)) as simulation:
            with trio.move_on_after(after_s):
                await simulation.runtime.warm(PROMPT, **SETTINGS)
            # The pass that runs is finished.
            await goes_on(simulation, min(40, 8 * int(after_s + 1)))

    run(main)


@sweep("max_streams", [None, 1])
def test_nobody_waits_for_a_drafter_that_reads_slowly_or_hangs(max_streams: int | None) -> None:
    async def main() -> None:
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

    run(main)


def test_it_waits_for_its_turn_and_ends_with_its_runtime() -> None:
    async def main() -> None:
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

    run(main)
