"""Scores: the log-probabilities of continuations, under every kind of cache, and however they begin and end."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
import trio
import trio.testing
from asgi import Letters, looping
from blocking_models import BlockingModel, released_on_exit
from cache_subjects import ATOL, SUBJECTS, TEXT, Subject, subject
from completions import ids
from faces import got, on_every_face, within
from greedy_pair import PROMPT, drafter, target, text
from models import VOCAB_SIZE, Failing, Wrapped, gemma3_text, llama, mamba, prompt_of
from our_threads import outrider_threads
from sample_tokenizers import demo
from scripted import ScriptedModel, simulated
from sweeps import sweep

import runtime
from actors.target import reading
from protocol.scores import Score, ScoredToken, token_scores
from protocol.trace import Event, Span

CONTINUATION = tuple(prompt_of(12, seed=7))


@functools.cache
def reference(name: str, num_prompt: int, num_tokens: int) -> list[list[float]]:
    """mlx-lm's log-probabilities of all tokens, at the positions behind a prompt; one token per pass there."""
    text = tuple(TEXT[: num_prompt + num_tokens])
    rows = subject(name).rows(num_prompt - 1, [text[:end] for end in range(num_prompt, num_prompt + num_tokens)])
    logits = mx.stack(rows).astype(mx.float32)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()


def options_of(subject: Subject) -> dict[str, Any]:
    options, named = subject.options, ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: getattr(options, name) for name in named if getattr(options, name) is not None}


def logprobs(score: runtime.Score) -> list[float]:
    return [token.logprob for token in score.tokens]


class Passes:
    """A trace: how many tokens the target has read in each pass."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Span) and (event.actor, event.kind) == ("target", "prefill"):
            self.num_tokens.append(event.num_tokens)


# --- the figures ----------------------------------------------------------------------------------


@sweep("name", SUBJECTS)
async def test_scores_are_those_of_mlx_lms_logits(name):
    num_prompt, num_tokens = 21, 12
    expected = reference(name, num_prompt, num_tokens)
    tokens = TEXT[num_prompt : num_prompt + num_tokens]
    async with runtime.open((subject(name).model, None), **options_of(subject(name))) as rt:
        score = await rt.score(TEXT[:num_prompt], tokens, logprobs=3)
        without = await rt.score(TEXT[:num_prompt], tokens, reuse_prefix=False)
    assert [token.id for token in score.tokens] == list(tokens)
    for token, row in zip(score.tokens, expected, strict=True):
        best = sorted(range(len(row)), key=lambda id: -row[id])[:3]
        assert token.logprob == pytest.approx(row[token.id], abs=ATOL)
        assert [top.id for top in token.top_logprobs] == best
        assert [top.logprob for top in token.top_logprobs] == pytest.approx([row[id] for id in best], abs=ATOL)
        assert token.is_greedy == (token.id == best[0])
    assert logprobs(without) == pytest.approx(logprobs(score), abs=ATOL)
    assert all(token.top_logprobs == () for token in without.tokens)
    assert score.logprob == pytest.approx(math.fsum(logprobs(score)))
    assert score.perplexity == pytest.approx(math.exp(-score.logprob / num_tokens))
    assert (score.num_prompt_tokens, score.cached_tokens, without.cached_tokens) == (num_prompt, 0, 0)


def test_a_perplexity_that_no_float_holds_is_infinite():
    tokens = (ScoredToken(1, "a", -1000.0, False, 2), ScoredToken(2, "b", -900.0, False, 2))
    assert Score(tokens, 1).perplexity == math.inf


async def test_other_tasks_have_their_turn_while_the_texts_of_likely_tokens_are_decoded(autojump_clock):
    class Counting(Letters):
        """Counts the calls between two steps of tasks."""

        num_calls = most_calls = 0

        def decode(self, tokens: Sequence[int]) -> str:
            self.num_calls += 1
            self.most_calls = max(self.most_calls, self.num_calls)
            return super().decode(tokens)

    tokenizer = Counting()

    class Steps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            tokenizer.num_calls = 0

    async with simulated(ScriptedModel(looping), tokenizer=tokenizer) as simulation:
        trio.lowlevel.add_instrument(Steps())
        score = await simulation.runtime.score("a", [1] * 40, logprobs=20)
        assert len(score.tokens[0].top_logprobs) == 20
    assert 40 < tokenizer.most_calls < 160


@sweep("bound", ["prefill_step_size", "logits of a pass"])
async def test_long_texts_are_read_in_passes_of_bounded_size(bound, monkeypatch):
    whole, passes = prompt_of(60), Passes()
    defaults = {"prefill_step_size": 8} if bound == "prefill_step_size" else {}
    async with runtime.open((target(), None)) as rt:
        expected = await rt.score(whole[:1], whole[1:])
    if not defaults:
        monkeypatch.setattr(reading, "MAX_SCORED_LOGITS", 5 * VOCAB_SIZE + 1)
    async with runtime.open((target(), None), defaults=defaults, trace=passes) as rt:
        assert logprobs(await rt.score(whole[:1], whole[1:])) == pytest.approx(logprobs(expected), abs=ATOL)
    assert sum(passes.num_tokens) == 59  # the last token need not be read
    assert max(passes.num_tokens) == (8 if defaults else 5)


@sweep("num_top", [1, 3, 5, 9])
def test_of_equally_likely_tokens_the_lower_ids_come_first(num_top):
    row = [0.0, 2.0, -math.inf, 2.0, 1.0]
    (score,) = token_scores(mx.array([row]), [4], num_top)
    assert [id for id, _ in score.top][: min(num_top, 4)] == [1, 3, 4, 0][:num_top]
    assert len(score.top) == min(num_top, 5)
    assert (score.rank, score.is_greedy) == (3, False)


# --- prefixes -------------------------------------------------------------------------------------


@sweep("make_model", [llama, gemma3_text, mamba])
async def test_continuations_of_one_prompt_read_it_once(make_model):
    passes = Passes()
    async with runtime.open((make_model(), None)) as rt:
        expected = await rt.score(PROMPT, CONTINUATION, reuse_prefix=False)
    async with runtime.open((make_model(), None), trace=passes) as rt:
        await rt.score(PROMPT, CONTINUATION[::-1])
        passes.num_tokens.clear()
        score = await rt.score(PROMPT, CONTINUATION)
    assert score.cached_tokens == len(PROMPT) - 1
    assert sum(passes.num_tokens) == len(CONTINUATION)
    assert logprobs(score) == pytest.approx(logprobs(expected), abs=ATOL)


async def test_streams_and_scores_reuse_what_the_other_has_read():
    async with runtime.open((target(), None), (drafter(), None)) as rt:
        await rt.score(PROMPT, CONTINUATION)
        completion = await rt.generate([*PROMPT, *CONTINUATION], max_tokens=12, reuse_prefix=True)
        assert completion.statistics.cached_tokens == len(PROMPT) + len(CONTINUATION) - 1
        score = await rt.score([*PROMPT, *CONTINUATION], ids(completion))
        assert score.cached_tokens == len(PROMPT) + len(CONTINUATION) - 1
        assert score.is_greedy


# --- texts ----------------------------------------------------------------------------------------


def lm_eval_pair(context: str, continuation: str) -> tuple[list[int], list[int]]:
    """How lm-evaluation-harness tokenises both."""
    if num_spaces := len(context) - len(context.rstrip()):
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    encode = demo().encode
    return encode(context), encode(context + continuation)[len(encode(context)) :]


async def test_texts_are_tokenised_as_one_and_split_as_the_harness_does():
    async with runtime.open(runtime.DEMO_TARGET) as rt:
        begun = "def add(a, b):"
        texts = [(begun, " return a + b"), (f"{begun} ", "return a + b"), (f"{begun}\n    ", "return a + b\n")]
        for prompt, continuation in [*texts, ("x", " = 🙂")]:
            expected_prompt, expected = lm_eval_pair(prompt, continuation)
            score = await rt.score(prompt, continuation, logprobs=1)
            assert [token.id for token in score.tokens] == expected
            assert score.num_prompt_tokens == len(expected_prompt)
            spaces = prompt[len(prompt.rstrip()) :]
            assert "".join(token.text for token in score.tokens) == spaces + continuation
            assert all(len(token.top_logprobs) == 1 for token in score.tokens)
            # After ids it is tokenised alone.
            score = await rt.score(rt.encode(prompt), continuation)
            assert [token.id for token in score.tokens] == demo().encode(continuation, add_special_tokens=False)
            assert "".join(token.text for token in score.tokens) == continuation
        half = demo().encode("🙂", add_special_tokens=False)[:2]
        assert [token.text for token in (await rt.score("x", half)).tokens] == ["", "\ufffd"]


# --- errors ---------------------------------------------------------------------------------------


TOO_MANY = "tokens > 512 maximum"
NOT_SCORED: list[tuple[Any, Any, type[Exception], str]] = [
    ([1, 2], [], runtime.PromptError, "as a continuation, the prompt is empty"),
    ([], [1], runtime.PromptError, "the prompt is empty"),
    ([1, 2], [VOCAB_SIZE], runtime.PromptError, "as a continuation, prompt token 80 is outside"),
    ([1, -1], [1], runtime.PromptError, "prompt token -1 is outside"),
    ([1], [0.5], runtime.PromptError, "whole numbers, got 0.5"),
    ([1], None, runtime.PromptError, "as a continuation, a prompt is text, token ids"),
    ([1], [{"role": "user", "content": "x"}], runtime.PromptError, "got chat messages"),
    ([1], "x", runtime.PromptError, "without a tokenizer, so a continuation must be token ids"),
    ([1] * 500, [2] * 13, runtime.PromptTooLongError, f"513 {TOO_MANY}; the prompt has 500 and the continuation 13"),
    ([1], [2] * 600, runtime.PromptTooLongError, "prompt is too long: 600 tokens"),
]


async def test_what_cannot_be_scored_is_told_before_any_pass():
    passes = Passes()
    async with runtime.open((target(), None), trace=passes) as rt:
        for prompt, continuation, error, message in NOT_SCORED:
            with pytest.raises(error, match=message):
                await rt.score(prompt, continuation)
        assert rt.num_streams == 0
    assert passes.num_tokens == []


async def test_texts_that_cannot_be_scored():
    async with runtime.open(runtime.DEMO_TARGET) as rt:
        with pytest.raises(runtime.PromptError, match="as a continuation, the prompt is empty"):
            await rt.score("x", "")
        words = ("return", "self", "def")
        one_token = [word for word in words if len(demo().encode(word)) == len(demo().encode(word[0]))]
        with pytest.raises(runtime.PromptError, match="has no token of its own, because it joins the prompt's last"):
            await rt.score(one_token[0][0], one_token[0][1:])
        with pytest.raises(runtime.SettingsError, match="logprobs must be a whole number between 0 and 128, got 129"):
            await rt.score("x", " y", logprobs=129)


async def test_a_text_that_just_fits_is_scored_until_the_runtime_closes():
    async with runtime.open((target(), None)) as rt:
        assert len((await rt.score([1] * 500, [2] * 12)).tokens) == 12
    with pytest.raises(runtime.RuntimeClosedError, match="this runtime was closed"):
        await rt.score(PROMPT, CONTINUATION)


class Poisoned(Wrapped):
    """A model whose logits after one token are no numbers."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(inputs, cache)
        return mx.where((inputs == 13)[..., None], mx.nan, logits)


async def test_logits_that_are_no_numbers_end_the_score_and_no_stream():
    async with runtime.open((Poisoned(llama()), None)) as rt:
        with pytest.raises(runtime.NotANumberError, match="for the token at position 4;"):
            await rt.score([1, 2], [3, 13, 5])
        assert len((await rt.score([1, 2], [3, 5, 13])).tokens) == 3


async def test_a_target_that_fails_ends_the_score_with_its_error():
    model = Failing(llama())
    async with runtime.open((model, None)) as rt:
        model.fails = True
        with pytest.raises(runtime.RuntimeBrokenError, match="out of memory"):
            await rt.score(PROMPT, CONTINUATION)


# --- beside streams, and cancelled ------------------------------------------------------------------


async def test_scores_and_streams_at_the_same_time_have_each_their_own():
    async with runtime.open((target(), None), (drafter(), None)) as rt:
        expected = logprobs(await rt.score(PROMPT, CONTINUATION, reuse_prefix=False))
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                assert ids(await rt.generate(PROMPT, max_tokens=40)) == text(40)

            async def score() -> None:
                score = await rt.score(PROMPT, CONTINUATION)
                assert logprobs(score) == pytest.approx(expected, abs=ATOL)

            for _ in range(3):
                nursery.start_soon(generate)
                nursery.start_soon(score)


class CancelAt:
    """A trace that cancels a scope at the nth event."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.scope = trio.CancelScope()
        self.spans: list[tuple[str, int | None]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Span):
            self.spans.append((event.kind, event.session))
        self._left -= 1
        if self._left == 0:
            self.scope.cancel()


async def test_cancelling_at_any_event_leaves_the_runtime_in_order():
    for nth in itertools.count(1):
        trace = CancelAt(nth)
        async with runtime.open((target(), None), defaults={"prefill_step_size": 16}, trace=trace) as rt:
            with trace.scope:
                await rt.score(PROMPT, CONTINUATION)
            assert rt.num_streams == 0
            assert ids(await rt.generate(PROMPT, max_tokens=8, reuse_prefix=True)) == text(8)
            for kind in ("open", "close"):
                assert trace.spans.count((kind, 0)) <= 1
            assert trace.spans.count(("open", 0)) == trace.spans.count(("close", 0))
        assert outrider_threads() == []
        if not trace.scope.cancelled_caught:
            break
    assert nth > 5


async def test_closing_the_runtime_ends_a_score():
    model = BlockingModel(llama())
    async with runtime.open((model, None)) as rt:
        with released_on_exit(model):
            model.block()
            async with trio.open_nursery() as nursery:

                async def score() -> None:
                    with pytest.raises(runtime.RuntimeClosedError, match="this runtime was closed"):
                        await rt.score(PROMPT, CONTINUATION)

                nursery.start_soon(score)
                await model.blocked_in_trio()
                await rt.aclose()


# --- other faces ----------------------------------------------------------------------------------


@on_every_face
async def test_scores_are_the_models_on_every_face(open):
    logits = target()(mx.array([[*PROMPT, *CONTINUATION]])).astype(mx.float32)[0, len(PROMPT) - 1 : -1]
    rows = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    async with within(open((target(), None))) as rt:
        score = await got(rt.score(PROMPT, CONTINUATION, logprobs=2))
        expected = [row[token] for row, token in zip(rows, CONTINUATION, strict=True)]
        assert logprobs(score) == pytest.approx(expected, abs=ATOL)
        assert [len(token.top_logprobs) for token in score.tokens] == [2] * len(CONTINUATION)
        with pytest.raises(runtime.PromptError, match="as a continuation, the prompt is empty"):
            await got(rt.score(PROMPT, []))
