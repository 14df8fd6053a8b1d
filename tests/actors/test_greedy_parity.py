"""Greedy text equals mlx-lm's plain greedy text, token for token, for every drafter and lookahead."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from completions import ids
from models import VOCAB_SIZE, Padded, Shifted, Wrapped, gemma3_text, greedy, llama, mamba, near, prompt_of
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


async def complete(
    target: nn.Module, draft: nn.Module | None, prompt: Sequence[int], *, rewind: str = "auto", **settings: Any
) -> runtime.Completion:
    async with runtime.open((target, None), None if draft is None else (draft, None), rewind=rewind) as rt:
        return await rt.generate(prompt, **settings)


async def completions(
    target: nn.Module, draft: nn.Module, prompt: Sequence[int], *, rewind: str = "auto", **settings: Any
) -> list[tuple[Any, runtime.Completion]]:
    """The completions of one runtime at several lookaheads, each with its lookahead."""
    async with runtime.open((target, None), (draft, None), rewind=rewind) as rt:
        return [(each, await rt.generate(prompt, lookahead=each, **settings)) for each in (1, 3, "auto")]


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


class Tempting(Padded):
    """A padded model whose padding rows always win."""

    PAD_LOGIT = 1e9


async def test_padding_rows_of_the_drafter_are_not_drafted_however_likely() -> None:
    draft = Tempting(small_llama(), 16)
    for lookahead, completion in await completions(small_llama(), draft, PROMPT, max_tokens=20):
        assert ids(completion) == llama_text(PROMPT, 20)
        # Without its padding, the drafter is the target itself. With "auto", looked-up tokens are proposed as well.
        if lookahead != "auto":
            assert completion.statistics.rejected == 0
            assert completion.statistics.accepted > 0


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


# --- sliding windows and recurrent state ----------------------------------------------------------


async def test_a_sliding_window_target_whose_prompt_fills_the_window_already() -> None:
    target, prompt = gemma3_text(window=8), prompt_of(40)
    text = greedy(target, prompt, 32)
    async with runtime.open((target, None), (near(target, noise=0.05), None)) as rt:
        for lookahead in (3, 8):
            asked = {"max_tokens": 32, "lookahead": lookahead, "prefill_step_size": PREFILL_STEP_SIZE}
            completion = await rt.generate(prompt, **asked)
            assert ids(completion) == text
            # Rejected tokens were trimmed: none of the others was read again.
            assert completion.statistics.rejected > 0
            assert completion.statistics.n1_rounds == completion.statistics.replayed_tokens == 0
            assert completion.statistics.rounds < 32


# --- rewind ---------------------------------------------------------------------------------------


class Watched(Wrapped):
    """Records the numbers of tokens that its caches are asked to trim."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._given_up: list[int] = []
        self._caches: list[Any] = []  # the latest

    def make_cache(self) -> list[Any]:
        caches = self._caches = super().make_cache()
        for cache in caches:
            cache.trim = self._watch(cache.trim)
        return caches

    def _watch(self, trim: Callable[[int], int]) -> Callable[[int], int]:
        def watched(num_tokens: int) -> int:
            self._given_up.append(num_tokens)
            return trim(num_tokens)

        return watched


@sweep("drafter", ["right", "near"])
async def test_rewind_none_gives_the_greedy_text_and_rewinds_nothing(drafter: str) -> None:
    target, draft = Watched(small_llama()), Watched(DRAFTERS[drafter](small_llama()))
    for lookahead, completion in await completions(target, draft, PROMPT, rewind="none", max_tokens=24):
        assert ids(completion) == llama_text(PROMPT, 24)
        assert completion.statistics.n1_rounds == completion.statistics.proposed
        assert completion.statistics.rounds == 24
        if lookahead != "auto":
            assert completion.statistics.proposed == 23
    assert target._given_up == draft._given_up == []


@sweep("rewind", ["auto", "trim"])
async def test_rewind_auto_and_trim_do_rewind_both(rewind: str) -> None:
    target, draft = Watched(small_llama()), Watched(near(small_llama(), noise=0.05))
    completion = await complete(target, draft, PROMPT, rewind=rewind, max_tokens=24, lookahead=3)
    assert ids(completion) == llama_text(PROMPT, 24)
    assert completion.statistics.n1_rounds == 0
    assert sum(target._given_up) > 0
    assert sum(draft._given_up) > 0


async def test_rewind_trim_is_refused_where_a_cache_cannot_be_trimmed() -> None:
    for target, draft in [(mamba(), None), (llama(), mamba())]:
        with pytest.raises(runtime.ModelError, match=r'rewind="trim".*ArraysCache.*"auto"'):
            await complete(target, draft, [1], rewind="trim")


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
