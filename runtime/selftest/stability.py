"""Checks of how streams, cancellations, threads and failures end, and of the memory that is left in use."""

from __future__ import annotations

import gc
import math
import random
import time
from typing import Any

import mlx.core as mx
import trio

import runtime
from runtime.bench.small_models import VOCAB_SIZE, WrappedModel, small_model
from runtime.engine.runtime import Runtime
from runtime.selftest.baselines import threads_at_work
from runtime.selftest.checks import Finding, passed_if
from runtime.selftest.subject import Subject, ids, running_pair

NUM_OPENINGS = 8
# Memory may grow by as much as the caches of one text, over any number of streams.
MAX_GROWTH_BYTES = 64 * 2**20
# Until cancelled sessions are closed: far more than one forward pass takes.
SECONDS_TO_PUT_AWAY = 60.0
# Streams after which memory is first measured.
NUM_FIRST_STREAMS = 12
PROMPT = tuple(1 + i % 60 for i in range(24))
# The shape of an array of 256 TiB, more than an address space has.
TOO_LARGE = (2**23, 2**23)

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lookahead": 0},
    {"lookahead": 4},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "acceptance": "rejection"},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9, "min_p": 0.02},
    {"reuse_prefix": True},
    {"logprobs": 3},
)


def streams(subject: Subject) -> Finding:
    """Streams of all kinds, several at a time, some of which are cancelled at any moment, leave nothing behind."""
    target, draft = subject.load("target"), subject.load("draft")
    prompts = subject.prompts(target[1])
    draws, ends_at = random.Random(0), time.monotonic() + subject.seconds
    num_read = num_cancelled = 0
    left_behind: list[int] = []

    async def read(rt: Runtime) -> None:
        nonlocal num_read, num_cancelled
        patience_s = draws.choice((None, None, draws.random(), draws.random() * 0.05))
        with trio.move_on_after(math.inf if patience_s is None else patience_s) as scope:
            await rt.generate(draws.choice(prompts), max_tokens=subject.max_tokens, **draws.choice(_SETTINGS))
        num_cancelled += scope.cancelled_caught
        num_read += not scope.cancelled_caught

    async def read_some(rt: Runtime, num_streams: int) -> int:
        """Read streams, three at a time. Returns: memory in use afterwards, in bytes."""
        for _ in range(-(-num_streams // 3)):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(read, rt)
        # Not `num_streams`, which leaves out sessions that are cancelled and not yet closed.
        with trio.move_on_after(SECONDS_TO_PUT_AWAY) as limit:
            while rt._sessions:  # noqa: ASYNC110  (nothing announces that the last one is closed)
                await trio.sleep(0.01)
        if limit.cancelled_caught:
            left_behind.append(len(rt._sessions))
        gc.collect()
        return mx.get_active_memory()

    async def run() -> tuple[bool, int]:
        async with running_pair(target, draft) as rt:
            before = await read_some(rt, NUM_FIRST_STREAMS)
            growth = await read_some(rt, NUM_FIRST_STREAMS) - before
            while time.monotonic() < ends_at:
                growth = await read_some(rt, 3) - before
            text = await rt.generate(prompts[0], max_tokens=4, lookahead=2)
            return rt.health().ok and len(text.tokens) > 0, growth

    is_sound, growth = trio.run(run)
    return passed_if(
        is_sound and not left_behind and growth <= MAX_GROWTH_BYTES,
        f"{num_read} streams were read and {num_cancelled} cancelled, and nothing was left behind",
        "after streams and cancellations "
        + ("streams were left" if left_behind else "memory had grown" if is_sound else "a model did not work"),
        num_read=num_read,
        num_cancelled=num_cancelled,
        growth_bytes=growth,
    )


def opening(subject: Subject) -> Finding:
    """A runtime can be opened and closed many times, and leaves neither threads nor memory."""
    target, draft = subject.load("target"), subject.load("draft")
    prompt = subject.prompts(target[1])[0]
    seconds: list[float] = []
    memory: list[int] = []
    for _ in range(NUM_OPENINGS):
        began = time.monotonic()
        with runtime.open_sync(target, draft=draft) as rt:
            rt.generate(prompt, max_tokens=4)
        seconds.append(time.monotonic() - began)
        gc.collect()
        memory.append(mx.get_active_memory())
    at_work, growth = threads_at_work(), memory[-1] - memory[1]
    wrong = [f"these threads were still at work: {', '.join(at_work)}"] if at_work else []
    if growth > MAX_GROWTH_BYTES:
        wrong.append(f"memory had grown by {growth / 1e6:.0f} MB")
    return passed_if(
        not wrong,
        f"a runtime was opened, used and closed {NUM_OPENINGS} times",
        f"after a runtime was closed, {' and '.join(wrong)}",
        seconds=seconds,
        growth_bytes=growth,
    )


def memory_can_be_refused() -> bool:
    """Whether MLX raises an error if an allocation fails. Its CPU backend writes to the null pointer instead."""
    return mx.default_device().type == mx.DeviceType.gpu


def with_too_much_memory(logits: mx.array) -> mx.array:
    """The logits, plus an array for which there is not enough memory once they are evaluated."""
    return logits + mx.sum(mx.zeros(TOO_LARGE))


class _Failing(WrappedModel):
    """A model whose forward passes fail after the next `num_passes`; None for never."""

    num_passes: int | None = None

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if self.num_passes is not None:
            self.num_passes -= 1
            if self.num_passes < 0:
                raise RuntimeError("a failure on purpose")
        return super().__call__(inputs, cache)


class _Hungry(WrappedModel):
    """A model that needs more memory than there is for a pass over `MANY` tokens or more."""

    MANY = 64

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(inputs, cache)
        if inputs.shape[1] >= self.MANY:
            # Here and now, since nothing evaluates the logits of a prompt.
            mx.eval(with_too_much_memory(logits))
        return logits


def failures(subject: Subject) -> Finding:
    """A model that fails ends as it should: a drafter costs no text, and a target ends its runtime with an error."""
    wrong: list[str] = []
    healthy = small_model("llama", 0)

    async def with_failing_drafter() -> None:
        drafter = _Failing(small_model("llama", 1))
        async with runtime.open((healthy, None), (drafter, None)) as rt:
            plain = await rt.generate(PROMPT, max_tokens=24, lookahead=0)
            drafter.num_passes = 6
            drafted = await rt.generate(PROMPT, max_tokens=24, lookahead=2)
            if ids(plain) != ids(drafted):
                wrong.append("a drafter that fails changes the text")

    async def with_failing_target() -> None:
        target = _Failing(small_model("llama", 0))
        async with runtime.open((target, None)) as rt:
            target.num_passes = 6
            try:
                await rt.generate(PROMPT, max_tokens=24)
            except runtime.RuntimeBrokenError:
                return
            wrong.append("a target that fails gives a text")

    trio.run(with_failing_drafter)
    trio.run(with_failing_target)
    # The threads of both have ended after an error; a new runtime must work all the same.
    with runtime.open_sync((healthy, None)) as rt:
        if len(rt.generate(PROMPT, max_tokens=8).tokens) != 8:
            wrong.append("after a failure a new runtime gives no text")
    return passed_if(
        not wrong, "models that fail end as they should", f"after failures: {'; '.join(wrong)}", found=wrong
    )


def device_isolation(subject: Subject) -> Finding:
    """MLX's default device and stream are the same before, during and after a runtime, on the main thread."""
    target, draft = subject.load("target"), subject.load("draft")
    prompt = subject.prompts(target[1])[0]
    before = mx.default_device(), mx.default_stream(mx.default_device())
    changed: list[str] = []

    def look(when: str) -> None:
        if (mx.default_device(), mx.default_stream(mx.default_device())) != before:
            changed.append(when)

    with runtime.open_sync(target, draft=draft) as rt:
        look("once a runtime is open")
        for _ in rt.stream(prompt, max_tokens=16):
            look("while it streams")
        own = mx.sum(mx.ones(64))  # the user's own computation, beside the models'
        if own.item() != 64:
            changed.append("the result of a computation beside it")
    look("once it is closed")
    return passed_if(
        not changed,
        f"MLX's default device is {before[0].type.name} before, while and after a runtime is open",
        f"changed: {', '.join(dict.fromkeys(changed))}",
        changed=list(dict.fromkeys(changed)),
    )


def failing_allocation(subject: Subject) -> Finding:
    """A stream whose prompt or logits processor needs more memory than there is ends alone."""
    if not memory_can_be_refused():
        return Finding("skipped", "on a CPU, MLX ends the process where memory is refused")
    model = _Hungry(small_model("llama", 0))

    @runtime.stateless
    def wants_too_much(tokens: mx.array, logits: mx.array) -> mx.array:
        return with_too_much_memory(logits)

    cases: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "a logits processor": (PROMPT, {"logits_processors": [wants_too_much]}),
        "a prompt": (PROMPT * 4, {"prefill_step_size": 512}),
    }
    wrong: list[str] = []

    async def run(case: str) -> None:
        prompt, settings = cases[case]
        beside: list[int] = []
        async with runtime.open((model, None)) as rt:

            async def read() -> None:
                try:
                    beside.extend(ids(await rt.generate(PROMPT, max_tokens=48)))
                except runtime.OutriderError:
                    wrong.append(f"{case} ended the stream beside its own")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                try:
                    await rt.generate(prompt, max_tokens=8, **settings)
                except runtime.OutriderError:
                    pass
                else:
                    wrong.append(f"{case} got 256 TiB")
            try:
                again = ids(await rt.generate(PROMPT, max_tokens=8))
            except runtime.OutriderError:
                wrong.append(f"{case} ended the runtime")
            else:
                if again != beside[:8]:
                    wrong.append(f"{case} changed a later text")

    for case in cases:
        trio.run(run, case)
    return passed_if(
        not wrong,
        "a stream that needs too much memory ends alone",
        f"where memory is refused: {'; '.join(wrong)}",
        found=wrong,
    )


# The prompt must be one for these models.
assert max(PROMPT) < VOCAB_SIZE
