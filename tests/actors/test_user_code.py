"""A user's processors and samplers: their errors end only their own stream, and they delay no other stream."""

import threading
from typing import Any

import mlx.core as mx
import pytest
import trio
import trio.testing
from completions import ids
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from models import VOCAB_SIZE, Wrapped, llama, mamba, near, prompt_of, sliding_llama
from sweeps import sweep

import runtime
from actors.sampling.logits_pipeline import LogitsPipeline
from protocol.messages import Open
from protocol.settings import Settings

NUM_TOKENS = 8
PROMPT = prompt_of(11)
TARGET = llama()
NEAR = near(TARGET, noise=0.05)
PLAIN = [token for token, _ in generate_step(mx.array(PROMPT), TARGET, max_tokens=NUM_TOKENS)]

# Other threads cannot evaluate an array that this thread has built and not evaluated.
LAZY_HERE = mx.zeros((VOCAB_SIZE,)) + 0


@runtime.stateless
def harmless(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


@runtime.stateless
def foreign(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + LAZY_HERE


def unmarked(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + LAZY_HERE


@pytest.mark.parametrize("lookahead", [0, 3])
async def test_what_a_processor_returned_and_is_of_no_use_ends_its_stream_alone(lookahead: int) -> None:
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        for processor, says in (
            (foreign, r"processor foreign returned .* evaluated: RuntimeError.*mx\.eval"),
            (unmarked, r"processor unmarked returned .* evaluated: RuntimeError.*mx\.eval"),
            (runtime.stateless(lambda tokens, logits: logits * float("nan")), "not numbers"),
        ):
            with pytest.raises(runtime.ProcessorError, match=says):
                await rt.generate(PROMPT, lookahead=lookahead, logits_processors=[harmless, processor, harmless])
            assert ids(await rt.generate(PROMPT, max_tokens=NUM_TOKENS)) == PLAIN


def logits_pipeline(*processors: Any) -> LogitsPipeline:
    return LogitsPipeline(Open(0, (1, 2), Settings(logits_processors=processors), seed=0, stop_tokens=frozenset()))


def process(*processors: Any) -> mx.array:
    shaped = logits_pipeline(*processors)
    return shaped.process(mx.zeros((1, VOCAB_SIZE)), shaped.history([1, 2]), 2)


@sweep("result", [None, 3, mx.zeros((VOCAB_SIZE,)), mx.zeros((1, VOCAB_SIZE - 1))])
def test_logits_must_be_an_array_of_their_shape(result: Any) -> None:
    with pytest.raises(runtime.ProcessorError, match=r"must return logits of shape \(1, 80\), got"):
        process(lambda tokens, logits: result)


@sweep("dtype", [mx.int32, mx.bool_, mx.complex64, mx.float16, mx.bfloat16, mx.float32])
def test_logits_must_be_floating_point_numbers(dtype: mx.Dtype) -> None:
    if mx.issubdtype(dtype, mx.floating):
        assert process(lambda tokens, logits: logits.astype(dtype)).dtype == dtype
        return
    with pytest.raises(runtime.ProcessorError, match=f"must return floating-point logits, got {dtype}"):
        process(lambda tokens, logits: logits.astype(dtype))


def test_what_the_model_cannot_evaluate_is_not_said_to_be_the_processors() -> None:
    made: list[mx.array] = []
    thread = threading.Thread(target=lambda: made.append(mx.zeros((1, VOCAB_SIZE)) + 0))
    thread.start()
    thread.join()
    shaped = logits_pipeline(harmless)
    with pytest.raises(RuntimeError, match="Stream"):
        shaped.process(made[0], shaped.history([1, 2]), 2)


class Gate:
    """A processor with a state. Its first call waits until the gate is opened."""

    def __init__(self) -> None:
        self.is_entered = trio.Event()
        self.is_open = threading.Event()
        self.was_let_through = False
        self.can_save = True
        self.length = 0
        self._token = trio.lowlevel.current_trio_token()
        self._is_first = True

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._is_first:
            self._is_first = False
            self._token.run_sync_soon(self.is_entered.set)
            # If trio's thread waited for this call, nobody would open the gate: then the test fails instead of hanging.
            self.was_let_through = self.is_open.wait(timeout=20)
        self.length = len(tokens)
        return logits

    def save(self) -> int:
        if not self.can_save:
            raise ValueError("I forgot")
        return self.length

    def restore(self, state: int) -> None:
        self.length = state


@pytest.mark.parametrize("draft", [None, (NEAR, None)])
async def test_others_may_begin_and_be_cancelled_beside_a_busy_processor(draft: Any) -> None:
    gate = Gate()
    settings: dict[str, Any] = {"max_tokens": NUM_TOKENS, "lookahead": 2, "logits_processors": [gate]}
    async with runtime.open((TARGET, None), draft) as rt:
        first, third = rt.stream(PROMPT, **settings), rt.stream(PROMPT, **settings)
        await gate.is_entered.wait()
        second = rt.stream(PROMPT, **settings)
        await third.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert rt.num_streams == 2
        gate.is_open.set()
        assert [token.id async for token in first] == PLAIN
        assert [token.id async for token in second] == PLAIN
    assert gate.was_let_through


async def test_a_busy_processors_state_is_taken_on_the_models_thread() -> None:
    gate = Gate()
    settings: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logits_processors": [gate]}
    async with runtime.open((TARGET, None)) as rt:
        first = rt.stream(PROMPT, **settings)
        await gate.is_entered.wait()
        gate.can_save = False
        second = rt.stream(PROMPT, **settings)
        gate.is_open.set()
        for stream in (first, second):
            with pytest.raises(runtime.ProcessorError, match=r"Gate raised ValueError in save\(\): I forgot"):
                await anext(stream)
        with pytest.raises(runtime.ProcessorError, match=r"in save\(\)"):
            rt.stream(PROMPT, **settings)
        assert ids(await rt.generate(PROMPT, max_tokens=NUM_TOKENS)) == PLAIN


# --- samplers -------------------------------------------------------------------------------------


def second(logprobs: mx.array) -> mx.array:
    """The second most likely token."""
    assert logprobs.shape == (1, VOCAB_SIZE)
    assert abs(mx.logsumexp(logprobs).item()) < 1e-4
    return mx.argsort(logprobs, axis=-1)[:, -2]


def plain(sampler: Any, model: Any = TARGET) -> list[int]:
    return [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS, sampler=sampler)]


@pytest.mark.parametrize("build", [llama, sliding_llama, mamba])
async def test_a_sampler_chooses_as_it_does_in_plain_decoding_however_far_is_drafted_ahead(build: Any) -> None:
    model = build()
    expected = plain(second, model)
    assert expected != plain(None, model)
    async with runtime.open((model, None), (near(model, noise=0.02), None)) as rt:
        for lookahead in (0, 1, 3, "auto"):
            asked = {"max_tokens": NUM_TOKENS, "lookahead": lookahead, "sampler": runtime.stateless(second)}
            completion = await rt.generate(PROMPT, **asked)
            assert ids(completion) == expected
            assert completion.statistics.draft_failures == 0
            assert completion.statistics.accepted > 0 or lookahead != 3


@pytest.mark.parametrize("draft", ["ngram", None])
async def test_a_sampler_goes_with_processors_lookup_and_log_probabilities(draft: Any) -> None:
    forbidden = plain(second)[0]
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logit_bias": {forbidden: -float("inf")}, "logprobs": 2}
    async with runtime.open((TARGET, None), draft) as rt:
        completion = await rt.generate(PROMPT, **asked, logits_processors=[harmless], sampler=runtime.stateless(second))
    processors = make_logits_processors(logit_bias=asked["logit_bias"])
    steps = generate_step(mx.array(PROMPT), TARGET, max_tokens=NUM_TOKENS, sampler=second, logits_processors=processors)
    assert ids(completion) == [token for token, _ in steps]
    assert [token.top_logprobs[1].id for token in completion.tokens] == ids(completion)


@pytest.mark.slow
async def test_mlx_lms_samplers_run_on_the_models_threads() -> None:
    sampler = runtime.stateless(make_sampler(temp=0.9, top_p=0.95, min_p=0.01, top_k=30, xtc_probability=0.5))
    async with runtime.open((TARGET, None), (TARGET, None)) as rt:
        texts = [ids(await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=2, sampler=sampler)) for _ in range(4)]
    assert len({tuple(text) for text in texts}) > 1


async def test_an_unmarked_sampler_is_called_once_for_each_token_of_the_text(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def counting(logprobs: mx.array) -> mx.array:
        calls.append(len(calls))
        return mx.argsort(logprobs, axis=-1)[:, -1 - len(calls) % 3]

    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3, sampler=counting)
    assert len(calls) == NUM_TOKENS
    assert completion.statistics.proposed == 0
    calls.clear()
    assert ids(completion) == plain(counting)
    assert "the sampler" in caplog.text
    assert "runtime.stateless" in caplog.text


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
async def test_a_processor_that_fails_on_drafted_text_costs_no_token(acceptance: str) -> None:
    good = set(PROMPT + PLAIN)
    bad_texts = 0

    @runtime.stateless
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal bad_texts
        if threading.current_thread().name == "outrider-target" and (bad := set(tokens.tolist()) - good):
            bad_texts += 1
            raise ValueError(f"no text of mine has {bad}")
        return logits

    class Elsewhere(Wrapped):
        """The target's text, but for every third token."""

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            begin = cache[0].offset
            logits = super().__call__(inputs, cache)
            is_wrong = (mx.arange(begin, begin + inputs.shape[1]) % 3 == 0)[None, :, None]
            return mx.where(is_wrong, mx.roll(logits, 1, axis=-1), logits)

    settings: Any = {"temperature": 1e-6, "acceptance": acceptance, "seed": 1, "max_tokens": NUM_TOKENS, "lookahead": 3}
    async with runtime.open((TARGET, None), (Elsewhere(TARGET), None)) as rt:
        found = [await rt.generate(PROMPT, logits_processors=[each], **settings) for each in (process, harmless)]
    assert [ids(completion) for completion in found] == [PLAIN, PLAIN]
    assert bad_texts > 0
    # No token before the failure is left out.
    failing, other = (completion.statistics for completion in found)
    assert (failing.accepted, failing.rounds) == (other.accepted, other.rounds)
    assert failing.accepted > 0


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (lambda logprobs: 1 // 0, "raised ZeroDivisionError"),
    "cannot be evaluated": (lambda logprobs: mx.argmax(logprobs + LAZY_HERE, axis=-1), "cannot be evaluated"),
    "no array": (lambda logprobs: 3, "must return an array of one whole number.* got a int"),
    "logits": (lambda logprobs: logprobs, r"must return .* got shape \(1, 80\)"),
    "no id": (lambda logprobs: mx.array([0.5]), "must return .*float32"),
    "beyond the vocabulary": (lambda logprobs: mx.array([VOCAB_SIZE]), r"must return ids in \[0, 79\], got 80"),
    "below it": (lambda logprobs: mx.array([-1]), r"must return ids in \[0, 79\], got -1"),
}


async def test_what_goes_wrong_in_a_sampler_ends_its_stream_alone() -> None:
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        for sampler, says in WRONG.values():
            for marked in (runtime.stateless(sampler), sampler):
                with pytest.raises(runtime.ProcessorError, match=f"the sampler <lambda> (returned .*)?{says}"):
                    await rt.generate(PROMPT, lookahead=3, sampler=marked)
            assert ids(await rt.generate(PROMPT, max_tokens=NUM_TOKENS)) == PLAIN


@sweep("kind", [ValueError, SystemExit, KeyboardInterrupt])
@sweep("where", ["processor", "sampler", "model"])
async def test_code_that_raises_anything_ends_its_stream_only(kind: type[BaseException], where: str) -> None:
    def leave(*arguments: mx.array, cache: Any = None) -> mx.array:
        raise kind("enough")

    class Leaving(Wrapped):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            # Not in a pass over two tokens, as the probe's.
            return leave() if is_leaving and inputs.shape[1] == 1 else super().__call__(inputs, cache)

    is_leaving = False
    code = {"processor": {"logits_processors": [leave]}, "sampler": {"sampler": leave}, "model": {}}[where]
    async with runtime.open((Leaving(llama()), None)) as rt:
        other, is_leaving = rt.stream(PROMPT, max_tokens=NUM_TOKENS), where == "model"
        expected = runtime.StreamFailedError if is_leaving else runtime.ProcessorError
        with pytest.raises(expected, match=f"{kind.__name__}: enough") as raised:
            await rt.generate(PROMPT, max_tokens=NUM_TOKENS, **code)
        assert type(raised.value.__cause__) is kind
        is_leaving = False
        if where != "model":
            assert [token.id async for token in other] == PLAIN
        await other.aclose()
        assert ids(await rt.generate(PROMPT, max_tokens=NUM_TOKENS)) == PLAIN
        assert rt.health().ok


@sweep("has_sampler", [False, True])
async def test_a_sampler_is_not_asked_to_choose_by_what_is_no_number(has_sampler: bool) -> None:
    """And a model that gives no number is opened."""

    def careful(logprobs: mx.array) -> mx.array:
        assert not mx.isnan(logprobs).any().item()
        return mx.argmax(logprobs, axis=-1)

    class Spoilt(Wrapped):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(inputs, cache) * float("nan")

    async with runtime.open((Spoilt(llama()), None)) as rt:
        with pytest.raises(runtime.NotANumberError):
            await rt.generate(PROMPT, sampler=careful if has_sampler else None)
