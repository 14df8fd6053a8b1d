"""Greedy text equals mlx-lm's plain greedy text, token for token, for every drafter and lookahead."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from completions import ids, open_and_close
from models import VOCAB_SIZE, Shifted, Wrapped, greedy, llama, mamba, near, prompt_of
from sweeps import sweep

import runtime
from protocol.trace import Event, Span

LOOKAHEADS = [0, 1, 3, 8, "auto"]
PREFILL_STEP_SIZE = 7

DRAFTERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "right": lambda target: target,
    "wrong": Shifted,
    "near": lambda target: near(target, noise=0.05),
    "random": lambda _: llama(seed=77, hidden_size=16, num_hidden_layers=1),
}


@functools.cache
def small_llama() -> nn.Module:
    return llama()


@functools.cache
def llama_text(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy(small_llama(), prompt, num_tokens)


PROMPT = tuple(prompt_of(9))


async def complete(target: nn.Module, draft: nn.Module, prompt: Sequence[int], **settings: Any) -> runtime.Completion:
    async with runtime.open((target, None), (draft, None)) as rt:
        return await rt.generate(prompt, **settings)


# --- drafters and lookaheads ----------------------------------------------------------------------


@pytest.mark.slow
@sweep("drafter", DRAFTERS)
async def test_every_lookahead_gives_the_greedy_text(drafter: str) -> None:
    target = small_llama()
    draft = DRAFTERS[drafter](target)
    async with runtime.open((target, None), (draft, None)) as rt:
        for i, lookahead in enumerate(LOOKAHEADS):
            for length in (1 + i % 2, 3 * PREFILL_STEP_SIZE + 2):
                prompt = prompt_of(length)
                asked = {"max_tokens": 20, "lookahead": lookahead, "prefill_step_size": PREFILL_STEP_SIZE}
                completion = await rt.generate(prompt, **asked)
                assert ids(completion) == llama_text(tuple(prompt), 20), f"lookahead {lookahead}, {length} ids"
                statistics = completion.statistics
                assert statistics.accepted == sum(token.from_draft for token in completion.tokens)
                assert statistics.n1_rounds == 0
                if lookahead == 0:
                    assert statistics.proposed == 0
                # What the rules and the lookup do for such small models depends on the machine's clock.
                elif lookahead != "auto":
                    assert statistics.proposed > 0
                    if drafter == "right":
                        assert statistics.rejected == 0
                    elif drafter == "wrong":
                        assert statistics.accepted == 0
        if drafter == "near":
            # Otherwise the intended mixture of acceptances and rejections did not happen.
            assert 0.1 < rt.statistics().acceptance_rate < 0.95


async def test_scaled_rotary_embeddings_work_on_other_threads() -> None:
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": "llama3", **factors, "original_max_position_embeddings": 64}
    target, draft = llama(rope_scaling=scaling), llama(seed=5, rope_scaling=scaling)
    assert ids(await complete(target, draft, PROMPT, max_tokens=20)) == greedy(target, PROMPT, 20)


# --- vocabularies of different widths -------------------------------------------------------------


class OnlyItsOwnIds(Wrapped):
    """Records ids that its embedding has no row for; there it would read beyond its memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._strangers: list[int] = []

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._strangers += [i for i in inputs.flatten().tolist() if i >= self.args.vocab_size]
        return super().__call__(mx.minimum(inputs, self.args.vocab_size - 1), cache)


async def test_ids_that_the_drafter_has_no_embedding_for_are_never_looked_up_in_it() -> None:
    draft = OnlyItsOwnIds(llama(seed=4, vocab_size=VOCAB_SIZE // 2))
    text = llama_text(PROMPT, 20)
    assert max(PROMPT) >= VOCAB_SIZE // 2, "the prompt should have such an id"
    assert max(text) >= VOCAB_SIZE // 2, "the text should have such an id"
    completion = await complete(small_llama(), draft, PROMPT, max_tokens=20, lookahead=3)
    assert ids(completion) == text
    assert draft._strangers == []


# --- rewind ---------------------------------------------------------------------------------------


async def test_rewind_trim_is_refused_where_a_cache_cannot_be_trimmed() -> None:
    for target, draft in [(mamba(), None), (llama(), (mamba(), None))]:
        with pytest.raises(runtime.ModelError, match=r'rewind="trim".*ArraysCache.*"auto"'):
            await open_and_close((target, None), draft, rewind="trim")


# --- the demo pair --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_demo_pairs_text_is_the_targets_and_is_drafted_while_the_target_verifies(demo_pair: Any) -> None:
    """With a fixed lookahead, because a busy machine's drafter may rest."""
    (target, tokenizer), _ = demo_pair
    prompt, events = "def quicksort(items):", list[Event]()
    text = greedy(target, tokenizer.encode(prompt), 24)
    async with runtime.open(*demo_pair, trace=events.append) as rt:
        completion = await rt.generate(prompt, max_tokens=24, ignore_eos=True, lookahead=3)
    assert ids(completion) == text
    assert completion.text == tokenizer.decode(text)
    spans = [event for event in events if isinstance(event, Span)]
    verifies = [span for span in spans if span.kind == "verify"]
    drafts = [span for span in spans if span.kind == "draft"]
    assert [draft for draft in drafts if any(verify.began <= draft.began < verify.ended for verify in verifies)]
