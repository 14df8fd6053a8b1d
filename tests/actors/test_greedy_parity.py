"""Greedy text equals mlx-lm's plain greedy text, token for token, for every drafter and lookahead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from completions import ids
from mlx_lm.models.cache import KVCache
from models import (
    VOCAB_SIZE,
    Padded,
    Rereading,
    Shifted,
    Wrapped,
    gemma2,
    gemma3_text,
    greedy,
    llama,
    mamba,
    near,
    prompt_of,
    sliding_llama,
)
from sweeps import sweep

import runtime
from protocol.trace import Event, Instant, Span

LOOKAHEADS = [0, 1, 3, 8, "auto"]
PREFILL_STEP_SIZE = 7
FAMILIES = {"llama": llama, "gemma2": gemma2}

DRAFTERS: dict[str, Callable[[nn.Module, Callable[..., nn.Module]], nn.Module]] = {
    "right": lambda target, build: target,
    "wrong": lambda target, build: Shifted(target),
    "near": lambda target, build: near(target, noise=0.05),
    "random": lambda target, build: build(seed=77, hidden_size=16, num_hidden_layers=1),
}


@functools.cache
def family(name: str) -> nn.Module:
    return FAMILIES[name]()


@functools.cache
def family_text(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy(family(name), prompt, num_tokens)


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


# --- families, drafters, lookaheads ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_lookahead_gives_the_greedy_text(name: str, drafter: str) -> None:
    target = family(name)
    draft = DRAFTERS[drafter](target, FAMILIES[name])
    async with runtime.open((target, None), (draft, None)) as rt:
        for i, lookahead in enumerate(LOOKAHEADS):
            for length in (1 + i % 2, 3 * PREFILL_STEP_SIZE + 2):
                prompt = prompt_of(length)
                completion = await rt.generate(
                    prompt, max_tokens=20, lookahead=lookahead, prefill_step_size=PREFILL_STEP_SIZE
                )
                assert ids(completion) == family_text(name, tuple(prompt), 20), f"lookahead {lookahead}, {length} ids"
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


async def test_prompts_that_just_fit_a_prefill_chunk_and_those_that_do_not() -> None:
    async with runtime.open((family("llama"), None), (near(family("llama"), noise=0.05), None)) as rt:
        for length in (1, 2, PREFILL_STEP_SIZE, PREFILL_STEP_SIZE + 1, 2 * PREFILL_STEP_SIZE + 1, 50):
            prompt = prompt_of(length, seed=length)
            completion = await rt.generate(prompt, max_tokens=16, prefill_step_size=PREFILL_STEP_SIZE)
            assert ids(completion) == family_text("llama", tuple(prompt), 16), length


async def test_a_target_without_a_drafter_gives_its_own_text() -> None:
    completion = await complete(family("gemma2"), None, PROMPT, max_tokens=20)
    assert ids(completion) == family_text("gemma2", PROMPT, 20)
    assert completion.statistics.proposed == 0


async def test_scaled_rotary_embeddings_work_on_other_threads() -> None:
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": "llama3", **factors, "original_max_position_embeddings": 64}
    target, draft = llama(rope_scaling=scaling), llama(seed=5, rope_scaling=scaling)
    assert ids(await complete(target, draft, PROMPT, max_tokens=20)) == greedy(target, PROMPT, 20)


# --- vocabularies of different widths -------------------------------------------------------------


async def test_a_target_with_padding_rows_that_the_drafter_lacks() -> None:
    target, draft = Padded(family("llama"), 16), near(family("llama"), noise=0.05)
    for lookahead, completion in await completions(target, draft, PROMPT, max_tokens=20):
        assert ids(completion) == family_text("llama", PROMPT, 20)
        if lookahead != "auto":
            assert completion.statistics.accepted > 0


class Tempting(Padded):
    """A padded model whose padding rows always win."""

    PAD_LOGIT = 1e9


async def test_padding_rows_of_the_drafter_are_not_drafted_however_likely() -> None:
    draft = Tempting(family("llama"), 16)
    for lookahead, completion in await completions(family("llama"), draft, PROMPT, max_tokens=20):
        assert ids(completion) == family_text("llama", PROMPT, 20)
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
    text = family_text("llama", PROMPT, 20)
    assert max(PROMPT) >= VOCAB_SIZE // 2, "the prompt should have such an id"
    assert max(text) >= VOCAB_SIZE // 2, "the text should have such an id"
    completion = await complete(family("llama"), draft, PROMPT, max_tokens=20, lookahead=3)
    assert ids(completion) == text
    assert draft._strangers == []


# --- sliding windows and recurrent state ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "window", "lookahead", "drafter"),
    [
        *((gemma3_text, *case) for case in [(8, 1, "near"), (8, 5, "wrong"), (16, 3, "right"), (32, "auto", "near")]),
        *((sliding_llama, *case) for case in [(8, 5, "near"), (8, 3, "right"), (32, 8, "wrong"), (32, 8, "near")]),
    ],
)
async def test_a_sliding_window_target_keeps_the_greedy_text_across_the_window(
    build: Callable[..., nn.Module], window: int, lookahead: Any, drafter: str
) -> None:
    target = build(window=window)
    prompt = prompt_of(5)
    completion = await complete(target, DRAFTERS[drafter](target, build), prompt, max_tokens=64, lookahead=lookahead)
    assert ids(completion) == greedy(target, prompt, 64)
    statistics = completion.statistics
    # Trimmed, also when the window was full.
    assert statistics.n1_rounds == statistics.replayed_tokens == 0
    # What the rules propose between models as small as these, and look up, depends on the machine's clock.
    if lookahead != "auto":
        assert drafter != "right" or statistics.accepted > statistics.rejected == 0
        assert drafter != "wrong" or statistics.rejected > 0


async def test_a_sliding_window_target_whose_prompt_fills_the_window_already() -> None:
    target = gemma3_text(window=8)
    prompt = prompt_of(40)
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


async def test_a_sliding_window_drafter_costs_no_token_and_stays_right_across_the_window() -> None:
    # The same weights with full attention: target and drafter agree up to the window.
    full, prompt = llama(), prompt_of(5)
    text = greedy(full, prompt, 48)
    for lookahead, completion in await completions(full, sliding_llama(window=16), prompt, max_tokens=48):
        assert ids(completion) == text
        assert completion.statistics.n1_rounds == 0
        assert completion.statistics.draft_failures == 0
        if lookahead != "auto":
            assert completion.statistics.accepted > 0


@sweep("drafter", ["right", "wrong", "near"])
@sweep("rewind", ["auto", *(pytest.param(rewind, marks=pytest.mark.slow) for rewind in ("checkpoint", "none"))])
async def test_a_recurrent_target_keeps_the_greedy_text(drafter: str, rewind: str) -> None:
    target = mamba()
    draft = near(target, noise=0.02) if drafter == "near" else DRAFTERS[drafter](target, mamba)
    text = greedy(target, PROMPT, 40)
    for lookahead, completion in await completions(target, draft, PROMPT, rewind=rewind, max_tokens=40):
        assert ids(completion) == text
        statistics = completion.statistics
        assert statistics.draft_failures == 0
        if rewind == "none":
            assert statistics.n1_rounds == statistics.proposed
            assert statistics.rounds == 40
        else:
            assert statistics.n1_rounds == 0
        if lookahead == "auto":  # which depends on the machine's clock, as above
            continue
        if rewind == "none":
            # Nothing is proposed for the last token: no token of the verdict's own could follow it.
            assert statistics.proposed == 39
        else:
            assert (statistics.replayed_tokens > 0) == (drafter != "right")
        if drafter == "right":
            assert (statistics.rejected, statistics.replayed_tokens, statistics.acceptance_rate) == (0, 0, 1)
        elif drafter == "near":
            assert 0 < statistics.acceptance_rate < 1


async def test_a_recurrent_drafter_is_as_good_as_its_guesses() -> None:
    # The drafter's text is the target's, so every guess made in the right state is right.
    draft = mamba()
    text = greedy(draft, PROMPT, 30)
    for lookahead, completion in await completions(Rereading(draft), draft, PROMPT, max_tokens=30):
        assert ids(completion) == text
        assert completion.statistics.draft_failures == 0
        if lookahead != "auto":
            assert completion.statistics.rejected == 0
            assert completion.statistics.accepted > 0


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
    target = Watched(family("llama"))
    draft = Watched(DRAFTERS[drafter](family("llama"), llama))
    for lookahead, completion in await completions(target, draft, PROMPT, rewind="none", max_tokens=24):
        assert ids(completion) == family_text("llama", PROMPT, 24)
        assert completion.statistics.n1_rounds == completion.statistics.proposed
        assert completion.statistics.rounds == 24
        if lookahead != "auto":
            assert completion.statistics.proposed == 23
    assert target._given_up == draft._given_up == []


@sweep("rewind", ["auto", "trim"])
async def test_rewind_auto_and_trim_do_rewind_both(rewind: str) -> None:
    target, draft = Watched(family("llama")), Watched(near(family("llama"), noise=0.05))
    completion = await complete(target, draft, PROMPT, rewind=rewind, max_tokens=24, lookahead=3)
    assert ids(completion) == family_text("llama", PROMPT, 24)
    assert completion.statistics.n1_rounds == 0
    assert sum(target._given_up) > 0
    assert sum(draft._given_up) > 0


@pytest.mark.parametrize("drafter", ["right", "wrong", "near"])
async def test_after_every_round_the_targets_caches_hold_the_text_but_its_last_token(drafter: str) -> None:
    target = Watched(family("llama"))
    cached_tokens: list[set[int]] = []
    right: list[int] = []
    num_tokens = len(PROMPT)

    def look(event: Event) -> None:
        nonlocal num_tokens
        # The target's thread is idle at that moment.
        if isinstance(event, Instant) and event.kind == "verdict":
            num_tokens += event.num_tokens + 1
            right.append(num_tokens - 1)
            cached_tokens.append({cache.offset for cache in target._caches})

    draft = DRAFTERS[drafter](family("llama"), llama)
    async with runtime.open((target, None), (draft, None), trace=look) as rt:
        await rt.generate(PROMPT, max_tokens=24, lookahead=3)
    assert len(cached_tokens) >= 24 / 4
    assert cached_tokens == [{length} for length in right]


class Stubborn(KVCache):
    """A cache that cannot be trimmed."""

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        raise AssertionError(f"asked to give up {n} tokens")


class StubbornModel(Wrapped):
    def make_cache(self) -> list[Any]:
        return [Stubborn() for _ in self.layers]


@pytest.mark.parametrize("who", ["target", "draft", "both"])
async def test_caches_that_refuse_everything_give_the_greedy_text(who: str) -> None:
    target, draft = family("llama"), near(family("llama"), noise=0.05)
    if who != "draft":
        target = StubbornModel(target)
    if who != "target":
        draft = StubbornModel(draft)
    completion = await complete(target, draft, PROMPT, max_tokens=24, lookahead=3)
    assert ids(completion) == family_text("llama", PROMPT, 24)
    assert completion.statistics.n1_rounds == (0 if who == "draft" else 23)
    assert completion.statistics.accepted > 0
    assert completion.statistics.draft_failures == 0


async def test_rewind_trim_is_refused_where_a_cache_cannot_be_trimmed() -> None:
    for target, draft in [(mamba(), None), (llama(), mamba())]:
        with pytest.raises(runtime.ModelError, match=r'rewind="trim".*ArraysCache.*"auto"'):
            await complete(target, draft, [1], rewind="trim")


# --- the demo pair --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 3, "auto"])
async def test_the_demo_pair_gives_the_targets_greedy_text(demo_pair: Any, lookahead: Any) -> None:
    (target, tokenizer), _ = demo_pair
    prompt = "def quicksort(items):"
    text = greedy(target, tokenizer.encode(prompt), 24)
    # The target may end the text earlier.
    text = text[: next((i + 1 for i, token in enumerate(text) if token in tokenizer.eos_token_ids), len(text))]
    async with runtime.open(*demo_pair) as rt:
        completion = await rt.generate(prompt, max_tokens=24, lookahead=lookahead)
    assert ids(completion) == text
    assert completion.text == tokenizer.decode(text if completion.finish_reason == "length" else text[:-1])


@pytest.mark.slow
async def test_the_demo_pairs_drafter_drafts_while_the_target_verifies() -> None:
    """The demo pair as it is, in bfloat16; with a fixed lookahead, because a busy machine's drafter may rest."""
    events: list[Event] = []
    async with runtime.open(runtime.DEMO_TARGET, runtime.DEMO_DRAFT, trace=events.append) as rt:
        await rt.generate("def quicksort(items):", max_tokens=24, ignore_eos=True, lookahead=3)
    spans = [event for event in events if isinstance(event, Span)]
    verifies = [span for span in spans if span.kind == "verify"]
    drafts = [span for span in spans if span.kind == "draft"]
    assert verifies
    assert [draft for draft in drafts if any(verify.began <= draft.began < verify.ended for verify in verifies)]
