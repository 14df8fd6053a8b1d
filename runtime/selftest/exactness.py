"""Checks of texts: the target's own in float32, the same for the same seed, and never drawn from NaN or infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import trio
from mlx.nn.layers.base import Module

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.sampling.logit_check import LogitCheck
from protocol.randomness import Purpose, key_for
from protocol.tensor import Tensor
from runtime.bench.small_models import FAMILIES, VOCAB_SIZE, nearby_model, small_model
from runtime.generation.token_stream import Completion
from runtime.selftest.baselines import in_parallel, on_thread, plain_text, prefill_and_step
from runtime.selftest.checks import Finding, passed_if
from runtime.selftest.subject import Subject, ids, running_pair

LOOKAHEADS: tuple[int | Literal["auto"], ...] = (0, 1, 4, "auto")
SEED = 20_26
NUM_CONCURRENT_PASSES = 40

# Families whose texts can share passes: with keys and values, with a sliding window, and also with recurrent layers.
ROW_FAMILIES = ("llama", "gemma3_text", "lfm2", "qwen3_next")
# Lengths of prompts: some are longer than the window, and some texts grow beyond it.
ROW_LENGTHS = (5, 12, 21, 40)

TOO_LARGE_IN_FLOAT32 = Finding("skipped", "in float32 the models are larger than this device recommends")


def greedy_equality(subject: Subject) -> Finding:
    """Greedy text in float32 is mlx-lm's own, for every lookahead, with and without chained draft steps."""
    if (pair := subject.load_in_float32()) is None:
        return TOO_LARGE_IN_FLOAT32
    target, draft = pair
    prompts = subject.prompts(target[1])
    expected = [plain_text(target[0], prompt, subject.max_tokens) for prompt in prompts]
    differences: list[dict[str, Any]] = []

    async def compare() -> None:
        for chains in (False, True):
            async with running_pair(target, draft, chains=chains) as rt:
                for lookahead in LOOKAHEADS:
                    for index, prompt in enumerate(prompts):
                        completion = await rt.generate(prompt, max_tokens=subject.max_tokens, lookahead=lookahead)
                        if (place := first_difference(completion, expected[index])) is not None:
                            differences.append(
                                {"prompt": index, "lookahead": lookahead, "chains": chains, "position": place}
                            )

    trio.run(compare)
    num_texts = 2 * len(LOOKAHEADS) * len(prompts)
    return passed_if(
        not differences,
        f"{num_texts} greedy texts in float32 are mlx-lm's own, token for token",
        f"{len(differences)} of {num_texts} greedy texts in float32 differ from mlx-lm's own",
        differences=differences,
    )


def seeded_equality(subject: Subject) -> Finding:
    """A seed gives the same text again, and under the match rule the same text with any lookahead."""
    if (pair := subject.load_in_float32()) is None:
        return TOO_LARGE_IN_FLOAT32
    target, draft = pair
    prompt = subject.prompts(target[1])[0]
    settings: dict[str, Any] = {"max_tokens": subject.max_tokens, "temperature": 0.8, "seed": SEED}
    differences: list[str] = []

    async def compare() -> None:
        async with running_pair(target, draft) as rt:
            plain = ids(await rt.generate(prompt, lookahead=0, **settings))
            for lookahead in (1, 4, 4, "auto"):
                if ids(await rt.generate(prompt, lookahead=lookahead, **settings)) != plain:
                    differences.append(f"match, lookahead {lookahead}")
            settings.update(acceptance="rejection", lookahead=4)
            twice = [await rt.generate(prompt, **settings) for _ in range(2)]
            # If the target did not wait for its drafter, other tokens are drawn.
            was_in_time = not any(completion.statistics.draft_timeouts for completion in twice)
            if was_in_time and ids(twice[0]) != ids(twice[1]):
                differences.append("rejection, the same settings twice")

    trio.run(compare)
    return passed_if(
        not differences,
        "a seed gives the same text each time, with and without a drafter",
        f"texts of one seed differ: {'; '.join(differences)}",
        differences=differences,
    )


def concurrent_logits(subject: Subject) -> Finding:
    """Two models that compute at the same time, each on its thread, compute the same bits as one after the other."""
    models = {"target": subject.load("target")[0], "draft": subject.load("draft")[0]}
    inputs = mx.array([[1 + i % 50 for i in range(24)]])
    mx.eval(inputs)

    def logits_of(role: str) -> list[bytes]:
        model, found = models[role], []
        for _ in range(NUM_CONCURRENT_PASSES):
            first, second = prefill_and_step(model, inputs)
            found.append(bytes_of(first) + bytes_of(second))
        return found

    serial = {role: on_thread(lambda role=role: logits_of(role)) for role in models}  # type: ignore[misc]
    concurrent = in_parallel({role: lambda role=role: logits_of(role) for role in models})  # type: ignore[misc]
    num_wrong = {role: sum(a != b for a, b in zip(serial[role], concurrent[role], strict=True)) for role in models}
    return passed_if(
        not any(num_wrong.values()),
        f"{NUM_CONCURRENT_PASSES} passes of each model beside the other gave the bits that they give alone",
        f"{sum(num_wrong.values())} of {2 * NUM_CONCURRENT_PASSES} passes gave other bits beside another model",
        num_wrong=num_wrong,
    )


def noise(subject: Subject) -> Finding:
    """The noise that target and drafter share under the match rule is the same on two threads."""

    def draw() -> list[bytes]:
        return [
            bytes_of(mx.random.gumbel((vocab_size,), key=key_for(SEED, Purpose.NOISE, position)))
            for position in range(20)
            for vocab_size in (100, 4101, 151_936)
        ]

    drawn = in_parallel({"target": draw, "draft": draw})
    return passed_if(
        drawn["target"] == drawn["draft"],
        "random noise of one key is the same on both threads",
        "random noise of one key differs between two threads: sampled texts with a drafter are not those without",
    )


def not_a_number(subject: Subject) -> Finding:
    """Logits that are no numbers are noticed in each number format."""
    unnoticed = []
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for value in (float("nan"), float("inf")):
            for width in (7, 4101, 151_936):
                row = mx.zeros((3, width), dtype)
                row[1, width // 2] = value
                check = LogitCheck.of(row, row)
                mx.eval(*check.arrays())
                if check.num_sound() != 1:
                    unnoticed.append(f"{value} in {str(dtype).removeprefix('mlx.core.')}, {width} wide")
    return passed_if(
        not unnoticed,
        "a logit that is no number is noticed in float32, float16 and bfloat16",
        f"logits that are no numbers go unnoticed: {'; '.join(unnoticed)}",
        unnoticed=unnoticed,
    )


def kernels(subject: Subject) -> Finding:
    """Families with kernels and caches of their own give mlx-lm's text, as target and as drafter."""
    different, failed = [], {}
    prompt = tuple(1 + i % 60 for i in range(37))
    for family in FAMILIES:
        try:
            target, draft = small_model(family, 0), small_model(family, 1)
            expected = plain_text(target, prompt, 24)

            async def generate(target: Module = target, draft: Module = draft) -> Completion:
                async with runtime.open((target, None), (draft, None)) as rt:
                    return await rt.generate(prompt, max_tokens=24, lookahead=3)

            if ids(trio.run(generate)) != expected:
                different.append(family)
        except (RuntimeError, ValueError, runtime.OutriderError) as error:  # MLX raises the first two
            failed[family] = f"{type(error).__name__}: {error}"
    return passed_if(
        not different and not failed,
        f"{len(FAMILIES)} families with caches and kernels of their own give mlx-lm's text",
        f"other texts than mlx-lm's: {', '.join(different) or 'none'}; errors: {', '.join(failed) or 'none'}",
        families=list(FAMILIES),
        different=different,
        failed=failed,
    )


def rows(subject: Subject) -> Finding:
    """Texts that share passes are in float32 what each is alone, greedily and sampled, whatever the kind of cache."""
    differences: list[dict[str, Any]] = []
    obstacles: dict[str, str] = {}
    shared: dict[str, float] = {}

    def compare(named: str, target: Module, draft: Module, prompts: Sequence[Sequence[int]]) -> None:
        if (obstacle := on_thread(lambda: MLXModel(target, CacheOptions()).sharing_obstacle())) is not None:
            obstacles[named] = obstacle
            return
        found, shared[named] = trio.run(_texts_at_once, target, draft, prompts, subject.max_tokens)
        differences.extend({"models": named} | difference for difference in found)

    for family in ROW_FAMILIES:
        prompts = [
            tuple((7 * index + i) % VOCAB_SIZE for i in range(length)) for index, length in enumerate(ROW_LENGTHS)
        ]
        compare(family, small_model(family, 0), nearby_model(family, 0), prompts)
    shared_families = set(shared)
    if (pair := subject.load_in_float32()) is not None:
        (target, tokenizer), (draft, _) = pair
        long = subject.prompts(tokenizer)[-1]
        # If the target's texts take turns, that is no failure of the device.
        compare("target", target, draft, [long[: max(1, len(long) * part // 4)] for part in (1, 2, 4)])
    num_texts = 2 * (len(shared_families) * len(ROW_LENGTHS) + 3 * ("target" in shared))
    took_turns = [family for family in ROW_FAMILIES if family not in shared_families]
    own = f"; the target's texts take turns: {obstacles['target']}" if "target" in obstacles else ""
    wrong = f"{len(differences)} of {num_texts} texts that shared passes differ from what each is alone"
    return passed_if(
        not differences and not took_turns and all(rows_per_pass > 1 for rows_per_pass in shared.values()),
        f"{num_texts} texts that shared passes are in float32 what each is alone{own}",
        f"{wrong}; took turns: {', '.join(took_turns) or 'none'}{own}",
        differences=differences,
        obstacles=obstacles,
        rows_per_pass=shared,
    )


async def _texts_at_once(
    target: Module, draft: Module, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[dict[str, Any]], float]:
    """Compare texts that share passes with what each is alone. Returns: differences, and mean texts in a pass."""
    texts: dict[int, dict[float, list[Completion]]] = {}
    rows_per_pass = 0.0
    for max_batch in (1, len(prompts)):
        async with runtime.open((target, None), (draft, None), max_batch=max_batch, prefix_cache_bytes=0) as rt:
            for temperature in (0.0, 0.8):
                # Some have no drafts, and share passes with the proposals of others.
                asked: list[Any] = [
                    (prompt, {"seed": SEED + index, "lookahead": (3, "auto", 0)[index % 3]})
                    for index, prompt in enumerate(prompts)
                ]
                shape: dict[str, Any] = {"temperature": temperature, "acceptance": "match", "max_tokens": max_tokens}
                done = await rt.generate_many(asked, max_concurrent=max_batch, **shape)
                texts.setdefault(max_batch, {})[temperature] = done
            rows_per_pass = rt.statistics().rows_per_pass or 0.0
    differences = [
        {"text": index, "temperature": temperature, "position": place}
        for temperature, alone in texts[1].items()
        for index, (one, other) in enumerate(zip(alone, texts[len(prompts)][temperature], strict=True))
        if (place := first_difference(other, ids(one))) is not None
    ]
    return differences, rows_per_pass


# --- helpers --------------------------------------------------------------------------------------


def first_difference(completion: Completion, expected: Sequence[int]) -> int | None:
    """The index of the first token that differs from the expected text's; None if none does.

    A text may end early with an end-of-text token, after which plain decoding goes on.
    """
    text = ids(completion)
    if (place := next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)) is not None:
        return place
    return None if len(text) == len(expected) or completion.finish_reason == "stop" else len(text)


def bytes_of(array: mx.array) -> bytes:
    """The bits of an array, evaluated and copied."""
    return bytes(Tensor.of(array).data)
