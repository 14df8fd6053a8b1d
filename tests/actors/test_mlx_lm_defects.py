"""Defects of mlx-lm's speculative decoding: reproduced there, and absent here.

These concern caches that outlive a round. Rotating caches that fill, recurrent models, sampling, empty prompts and
endless texts are in `test_facts`.
"""

from __future__ import annotations

from typing import Any

import architectures
import mlx.core as mx
import mlx.nn as nn
import pytest
from completions import ids
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from models import Shifted, Wrapped, greedy, llama, near, prompt_of
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.model import CachedSequence, FeedsEach
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from runtime.engine.running import running

PROMPT = prompt_of(9, vocab_size=architectures.VOCAB_SIZE)
NUM_TOKENS = 24
LOOKAHEAD = 3


def theirs(target: nn.Module, draft: nn.Module, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """mlx-lm's speculative text."""
    steps = speculative_generate_step(
        mx.array(prompt), target, draft, num_draft_tokens=LOOKAHEAD, max_tokens=num_tokens, **options
    )
    return [token for token, _, _ in steps]


class RecordingModel(FeedsEach):
    """An `MLXModel` that records the tokens fed to its sequence, and checks its caches against them at every step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._model = MLXModel(model, CacheOptions(**options))
        self.vocab_size = self._model.vocab_size
        self.context_length = self._model.context_length
        # After every step: the cached tokens, and the caches.
        self.cached_tokens: list[tuple[int, ...]] = []
        self.kinds: list[set[type]] = []

    def open_sequence(self, *, beside_another: bool) -> RecordedSequence:
        return RecordedSequence(self._model.open_sequence(beside_another=beside_another), self)


class RecordedSequence(CachedSequence):
    def __init__(self, sequence: MLXSequence, record: RecordingModel) -> None:
        self._sequence = sequence
        self._tokens: tuple[int, ...] = ()
        self._record = record

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        logits = self._sequence.feed(tokens, num_logits)
        self._note(self._tokens + tokens)
        return logits

    def feed_lazy(self, token: mx.array) -> mx.array:
        logits = self._sequence.feed_lazy(token)
        self._note((*self._tokens, int(token.item())))
        return logits

    def prepare(self, num_tokens: int, settled: int) -> Any:
        return self._sequence.prepare(num_tokens, settled)

    def rewind(self, length: int) -> int:
        length = self._sequence.rewind(length)
        self._note(self._tokens[:length])
        return length

    def forget(self) -> None:
        self._sequence.forget()

    @property
    def length(self) -> int:
        return self._sequence.length

    def check(self, length: int) -> None:
        assert length == len(self._tokens)
        self._sequence.check(length)

    def close(self) -> None:
        self._sequence.close()

    def _note(self, tokens: tuple[int, ...]) -> None:
        self._sequence.check(len(tokens))
        assert {cache.offset for cache in self._sequence.cache} == {len(tokens)}
        self._tokens = tokens
        self._record.cached_tokens.append(tokens)
        self._record.kinds.append({type(cache) for cache in self._sequence.cache})


async def recorded(
    target: nn.Module, draft: nn.Module, num_tokens: int, **options: Any
) -> tuple[Any, RecordingModel, RecordingModel]:
    """The completion of the prompt, and the records of the two models."""
    async with ThreadWorker("target") as targets, ThreadWorker("draft") as drafts:
        ours = await targets.run(Job("load", lambda: RecordingModel(target, **options)))
        helpers = await drafts.run(Job("load", lambda: RecordingModel(draft, **options)))
        async with running((ours, targets), (helpers, drafts)) as rt:
            completion = await rt.generate(PROMPT, max_tokens=num_tokens, lookahead=LOOKAHEAD)
    assert completion.statistics.draft_failures == 0
    return completion, ours, helpers


# --- a model with more caches than layers ---------------------------------------------------------


@pytest.mark.parametrize("num_loops", [2, 3])
async def test_a_model_with_more_caches_than_layers(num_loops: int) -> None:
    """mlx-lm splits a list of both models' caches after as many as the target has layers."""
    target = architectures.build("nanbeige", num_loops=num_loops)
    draft = near(target, noise=0.05)
    right = greedy(target, PROMPT, NUM_TOKENS)
    assert len(make_prompt_cache(target)) == num_loops * len(target.layers)

    assert theirs(target, draft, PROMPT, NUM_TOKENS) == right
    caches = make_prompt_cache(target) + make_prompt_cache(draft)
    assert theirs(target, draft, PROMPT, NUM_TOKENS, prompt_cache=caches) != right

    async with runtime.open((target, None), (draft, None)) as rt:
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=LOOKAHEAD)
    assert ids(completion) == right
    assert 0 < completion.statistics.accepted < completion.statistics.proposed
    assert completion.statistics.n1_rounds == 0


# --- caches that are quantised in mid-text --------------------------------------------------------


@pytest.mark.parametrize("start", [0, 5, len(PROMPT) + 8])
async def test_caches_that_are_quantised_on_the_way(start: int) -> None:
    """mlx-lm replaces the caller's caches; the caller keeps those of the moment before."""
    target = architectures.build("qwen3", head_dim=32)
    draft = near(target, noise=0.05)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    right = greedy(target, PROMPT, NUM_TOKENS, **options)

    caches = make_prompt_cache(target) + make_prompt_cache(draft)
    theirs(target, draft, PROMPT, NUM_TOKENS, prompt_cache=caches, **options)
    assert {type(cache) for cache in caches} == {KVCache}
    assert all(cache.offset < len(PROMPT) + NUM_TOKENS - 1 - LOOKAHEAD for cache in caches)

    completion, *models = await recorded(target, draft, NUM_TOKENS, **options)
    assert ids(completion) == right
    assert 0 < completion.statistics.accepted < completion.statistics.proposed
    for model in models:
        for cached_tokens, kinds in zip(model.cached_tokens, model.kinds, strict=True):
            assert kinds == {QuantizedKVCache if len(cached_tokens) >= start else KVCache}
        assert {QuantizedKVCache} in model.kinds


# --- what is left in the caches -------------------------------------------------------------------


async def test_a_second_turn() -> None:
    """In mlx-lm, a text that ends on a bonus token leaves the target's cache one token short, the drafter's two."""
    model = llama()
    turn = prompt_of(4, seed=3)

    caches = make_prompt_cache(model) + make_prompt_cache(model)
    first = theirs(model, model, PROMPT, 8, prompt_cache=caches)
    assert first == greedy(model, PROMPT, 8)
    said = PROMPT + first + turn
    right = greedy(model, said, NUM_TOKENS)
    lengths = [cache.offset for cache in caches]
    assert lengths == [len(PROMPT) + 7] * 2 + [len(PROMPT) + 6] * 2
    assert theirs(model, model, turn, NUM_TOKENS, prompt_cache=caches) != right

    # With the caches of plain decoding, a text can be continued like this.
    cache = make_prompt_cache(model)
    assert greedy(model, PROMPT, 8, prompt_cache=cache) == first
    assert greedy(model, turn, NUM_TOKENS, prompt_cache=cache) == right

    async with runtime.open((model, None), (model, None)) as rt:
        assert ids(await rt.generate(PROMPT, max_tokens=8, lookahead=LOOKAHEAD)) == first
        assert ids(await rt.generate(said, max_tokens=NUM_TOKENS, lookahead=LOOKAHEAD)) == right


@sweep("num_tokens", range(1, 14))
async def test_where_all_is_accepted_both_caches_hold_the_text_wherever_it_ends(num_tokens: int) -> None:
    model = llama()
    text = (*PROMPT, *greedy(model, PROMPT, num_tokens + 20))
    completion, target, draft = await recorded(model, model, num_tokens)
    assert completion.statistics.rejected == 0
    assert (*PROMPT, *ids(completion)) == text[: len(PROMPT) + num_tokens]
    # A missing token or a repeated one would show.
    for cached_tokens in target.cached_tokens + draft.cached_tokens:
        assert cached_tokens == text[: len(cached_tokens)]
    # The last token has never been read; there was no need to.
    assert len(target.cached_tokens[-1]) == len(PROMPT) + num_tokens - 1


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.2])
async def test_after_every_step_both_caches_hold_the_recorded_tokens(noise: float) -> None:
    model = llama()
    text = (*PROMPT, *greedy(model, PROMPT, NUM_TOKENS))
    completion, target, draft = await recorded(model, near(model, noise=noise), NUM_TOKENS)
    assert completion.statistics.rejected > 0
    assert (*PROMPT, *ids(completion)) == text
    assert target.cached_tokens[-1] == text[:-1]
    # The drafter's cache went back to the text, however far it had run ahead.
    assert max(common(cached_tokens, text) for cached_tokens in draft.cached_tokens) >= len(text) - 1 - LOOKAHEAD


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- errors in the middle of a round --------------------------------------------------------------


class NoSuchKernel(RuntimeError):
    pass


class Failing(Wrapped):
    """Fails at the n-th call after it was armed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._calls_left: int | None = None

    def arm(self, n: int) -> None:
        self._calls_left = n

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left == 0:
                raise NoSuchKernel("no such kernel")
        return super().__call__(inputs, cache)


def test_there_an_error_in_mid_round_takes_tokens_out_of_the_cache_that_were_committed() -> None:
    target = Failing(llama())
    draft = Shifted(llama())
    target_caches, draft_caches = make_prompt_cache(target), make_prompt_cache(draft)
    steps = speculative_generate_step(
        mx.array(PROMPT), target, draft, num_draft_tokens=LOOKAHEAD, prompt_cache=target_caches + draft_caches
    )
    given = [next(steps)[0] for _ in range(3)]
    target.arm(1)
    with pytest.raises(NoSuchKernel):
        next(steps)
    should_hold = len(PROMPT) + len(given) - 1
    # mlx-lm's caches are off by what the round before had to rewind.
    assert [cache.offset for cache in target_caches] == [should_hold - LOOKAHEAD] * 2


@sweep("noise", [0.0, 0.05])
@sweep("n", range(1, 10))
async def test_here_such_a_round_is_computed_again_and_the_text_is_right(n: int, noise: float) -> None:
    model = llama()
    right = greedy(model, PROMPT, 48)
    target = Failing(model)
    async with runtime.open((target, None), (near(model, noise=noise), None)) as rt:
        target.arm(n)
        if n > 1:
            assert ids(await rt.generate(PROMPT, max_tokens=48, lookahead=LOOKAHEAD)) == right
            return
        # Nothing was drafted for the prompt.
        with pytest.raises(runtime.StreamFailedError, match="no such kernel") as failed:
            await rt.generate(PROMPT, max_tokens=48, lookahead=LOOKAHEAD)
        assert isinstance(failed.value.__cause__, NoSuchKernel)


@sweep("n", [1, 2, 5, 9])
async def test_here_an_error_of_the_drafter_costs_its_help_and_not_the_text(n: int) -> None:
    model = llama()
    draft = Failing(near(model, noise=0.05))
    async with runtime.open((model, None), (draft, None)) as rt:
        draft.arm(n)
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=LOOKAHEAD)
    assert ids(completion) == greedy(model, PROMPT, NUM_TOKENS)
    assert completion.statistics.draft_failures == 1


# --- the tokens that processors see ---------------------------------------------------------------


async def test_penalties() -> None:
    """In mlx-lm, a penalty sees only the last token of the prompt, which changes the text."""
    model = llama()
    penalties = {"repetition_penalty": 1.6, "repetition_context_size": 40}
    right = greedy(model, PROMPT, NUM_TOKENS, logits_processors=make_logits_processors(**penalties))
    assert theirs(model, model, PROMPT, NUM_TOKENS, logits_processors=make_logits_processors(**penalties)) != right
    for draft in (model, near(model, noise=0.05)):
        async with runtime.open((model, None), (draft, None)) as rt:
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=LOOKAHEAD, **penalties)
        assert ids(completion) == right


async def test_a_processor_that_keeps_a_state() -> None:
    """In mlx-lm, the processor is called for drafts as for the text, and its state is never restored."""
    model = llama()

    class EverySecond:
        """Bans the best token at every second call."""

        def __init__(self) -> None:
            self.num_calls = 0

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            self.num_calls += 1
            best = mx.argmax(logits, axis=-1, keepdims=True)
            return mx.where((mx.arange(logits.shape[-1]) == best) & (self.num_calls % 2 == 0), -mx.inf, logits)

        def save(self) -> int:
            return self.num_calls

        def restore(self, state: int) -> None:
            self.num_calls = state

    right = greedy(model, PROMPT, NUM_TOKENS, logits_processors=[EverySecond()])
    draft = near(model, noise=0.05)
    assert theirs(model, draft, PROMPT, NUM_TOKENS, logits_processors=[EverySecond()]) != right
    async with runtime.open((model, None), (draft, None)) as rt:
        completion = await rt.generate(
            PROMPT, max_tokens=NUM_TOKENS, lookahead=LOOKAHEAD, logits_processors=[EverySecond()]
        )
    assert ids(completion) == right
    assert completion.statistics.accepted > 0


# --- invalid requests -----------------------------------------------------------------------------


async def test_what_cannot_be_asked_for_is_refused_with_what_can() -> None:
    """In mlx-lm, both cause errors about shapes. Here the messages name a remedy, and the remedy works."""
    model = llama(max_position_embeddings=32)
    async with runtime.open((model, None), (model, None)) as rt:
        with pytest.raises(runtime.SettingsError, match="at least 1, or None for no limit, got -1"):
            rt.stream(PROMPT, max_tokens=-1)
        with pytest.raises(runtime.PromptError, match="at least one token"):
            rt.stream([])
        assert rt.num_streams == 0
        completion = await rt.generate(PROMPT[:1], max_tokens=None, lookahead=LOOKAHEAD)
    assert ids(completion) == greedy(model, PROMPT[:1], 31)
