"""Checks of exactness on this device, for `outrider doctor --check`.

Each check is a function from the models under test to sentences about what is wrong. To add one, add it to `CHECKS`,
with a test in which it fails on a runtime that was broken on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

import runtime
from actors.mlx.memory import recommended_working_set
from actors.sampling.logits_pipeline import LogitCheck
from protocol.errors import ModelError, OutriderError
from protocol.settings import AUTO_DRAFT, MTP, NGRAM
from runtime.bench.small_models import FAMILIES, VOCAB_SIZE, nearby_model, small_model, weights_of
from runtime.generation.token_stream import Completion
from runtime.loading.demo import DEMO_PROMPTS
from runtime.loading.model_sources import ModelSource, read_lazily

MAX_TOKENS = 32
LOOKAHEADS: tuple[int | Literal["auto"], ...] = (0, 1, 4, "auto")
SEED = 20_26
# Families whose texts can share passes: with keys and values, with a sliding window, and also with recurrent layers.
ROW_FAMILIES = ("llama", "gemma3_text", "lfm2", "qwen3_next")
# Lengths of prompts: some are longer than the window, and some texts grow beyond it.
ROW_LENGTHS = (5, 12, 21, 40)
NUM_DRAWN_TEXTS = 400
# Standard deviations of a chi-square statistic above its mean that no exact sampler shows.
MAX_DEVIATION = 6.0


@attrs.frozen
class Subject:
    """The models under test: the target in float32 on this thread, its drafter, and prompts as token ids."""

    target: tuple[Module, Any]
    draft: ModelSource
    prompts: Sequence[tuple[int, ...]]


def load_subject(target: ModelSource, draft: ModelSource | None) -> Subject:
    """Load a target, and cast it to float32, in which its text does not depend on the width of passes.

    Raises: ModelError: it cannot be loaded, or is too large in float32.
    """
    model, tokenizer = read_lazily(target)
    needed = sum(
        4 * weight.size if mx.issubdtype(weight.dtype, mx.floating) else weight.nbytes
        for _, weight in weights_of(model)
    )
    if (limit := recommended_working_set()) is not None and needed > limit:
        raise ModelError(
            f"the checks need the target in float32, which takes {needed / 1e9:.1f} GB, and this device recommends to "
            f"use at most {limit / 1e9:.1f}; check it with a smaller target of the same family"
        )
    model.set_dtype(mx.float32)
    mx.eval(model)
    texts = (DEMO_PROMPTS[0], "".join(DEMO_PROMPTS))
    prompts = [(1, 2, 3, 1, 2)] if tokenizer is None else [tuple(tokenizer.encode(text)) for text in texts]
    # The texts must be right with any drafter; "mtp" needs the target's files.
    if draft is None or str(draft) in (AUTO_DRAFT, MTP):
        draft = NGRAM
    return Subject((model, tokenizer), draft, prompts)


def greedy_texts(subject: Subject) -> Iterable[str]:
    """Greedy texts in float32 are mlx-lm's own, for every lookahead."""
    expected = [_plain_text(subject.target[0], prompt, MAX_TOKENS) for prompt in subject.prompts]

    with runtime.open_sync(subject.target, subject.draft) as rt:
        for lookahead in LOOKAHEADS:
            for number, (prompt, should) in enumerate(zip(subject.prompts, expected, strict=True), start=1):
                text = rt.generate(prompt, max_tokens=MAX_TOKENS, lookahead=lookahead)
                if (place := _first_difference(text, should)) is not None:
                    yield f"with lookahead {lookahead}, text {number} differs from mlx-lm's at token {place}"


def seeded_texts(subject: Subject) -> Iterable[str]:
    """A seed gives the same text each time, and under the match rule the same text with any lookahead."""
    prompt = subject.prompts[0]
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": SEED}
    with runtime.open_sync(subject.target, subject.draft) as rt:
        matched = {each: rt.generate(prompt, lookahead=each, **settings) for each in LOOKAHEADS}
        again = [rt.generate(prompt, lookahead=4, acceptance="rejection", **settings) for _ in range(2)]
    for lookahead, text in matched.items():
        if _ids(text) != _ids(matched[0]):
            yield f"with lookahead {lookahead}, a seed gives another text than without a drafter"
    # If the target did not wait for its drafter, other tokens are drawn.
    if _ids(again[0]) != _ids(again[1]) and not any(text.statistics.draft_timeouts for text in again):
        yield "under the rejection rule, the same seed gave two texts"


def first_tokens(_: Subject) -> Iterable[str]:
    """Under the rejection rule, the first two tokens have the target's distribution, whatever the drafter proposes."""
    target, draft, prompt, temperature = small_model("llama", 0), small_model("llama", 1), (1, 2, 3, 4), 4.0
    first = mx.softmax(target(mx.array([prompt]))[0, -1] / temperature)
    followed = mx.array([[*prompt, token] for token in range(VOCAB_SIZE)])
    second = first @ mx.softmax(target(followed)[:, -1] / temperature, axis=-1)
    settings: dict[str, Any] = {"temperature": temperature, "acceptance": "rejection", "lookahead": 2, "max_tokens": 2}
    asked: list[Any] = [(prompt, {"seed": seed}) for seed in range(NUM_DRAWN_TEXTS)]
    with runtime.open_sync((target, None), (draft, None), prefix_cache_bytes=0) as rt:
        texts = rt.generate_many(asked, max_concurrent=8, **settings)
    for place, law in enumerate((first, second)):
        deviation = chi_square_deviation(Counter(_ids(text)[place] for text in texts), cast(list[float], law.tolist()))
        if deviation > MAX_DEVIATION:
            yield f"token {place + 1} of {NUM_DRAWN_TEXTS} texts is {deviation:.0f} standard deviations from its law"


def chi_square_deviation(counts: Counter[int], law: Sequence[float]) -> float:
    """How many standard deviations the chi-square statistic of drawn tokens lies above its mean."""
    bins = [(counts[token], share * counts.total()) for token, share in enumerate(law)]
    # Tokens that are expected fewer than five times are counted together.
    rare = [each for each in bins if each[1] < 5]
    bins = [each for each in bins if each[1] >= 5]
    if rare:
        found, expected = map(sum, zip(*rare, strict=True))
        bins += [(found, expected)] if found or expected else []
    statistic = sum((found - expected) ** 2 / max(expected, 1e-9) for found, expected in bins)
    freedom = max(1, len(bins) - 1)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def rewinds(_: Subject) -> Iterable[str]:
    """Each kind of cache is right after rejections: families with a drafter that is nearly always wrong."""
    prompt = tuple(1 + i % 60 for i in range(37))
    for family in FAMILIES:
        target, draft = small_model(family, 0), small_model(family, 1)
        try:
            expected = _plain_text(target, prompt, 24)
            with runtime.open_sync((target, None), (draft, None)) as rt:
                text = rt.generate(prompt, max_tokens=24, lookahead=3)
            if (place := _first_difference(text, expected)) is not None:
                yield f"a text of {family} differs from mlx-lm's at token {place}"
        except (RuntimeError, ValueError, OutriderError) as error:  # MLX raises the first two
            yield f"{family} failed with {type(error).__name__}: {error}"


def shared_passes(subject: Subject) -> Iterable[str]:
    """Texts that share passes are in float32 what each is alone, greedily and sampled, whatever the kind of cache."""
    for family in ROW_FAMILIES:
        target, draft = small_model(family, 0), nearby_model(family, 0)
        prompts = [tuple((7 * n + i) % VOCAB_SIZE for i in range(length)) for n, length in enumerate(ROW_LENGTHS)]
        yield from _compare_shared(family, (target, None), (draft, None), prompts)
    # If the target's texts take turns, that is no fault of the device.
    long = subject.prompts[-1]
    parts = [long[: max(1, len(long) * part // 4)] for part in (1, 2, 4)]
    yield from _compare_shared("the target", subject.target, subject.draft, parts, must_share=False)


def _compare_shared(
    named: str, target: ModelSource, draft: ModelSource, prompts: Sequence[tuple[int, ...]], *, must_share: bool = True
) -> Iterable[str]:
    # Some have no drafts, and share passes with the proposals of others.
    asked: list[Any] = [
        (prompt, {"seed": SEED + index, "lookahead": (3, "auto", 0)[index % 3]}) for index, prompt in enumerate(prompts)
    ]

    def generate(max_batch: int) -> tuple[list[Completion], float]:
        texts: list[Completion] = []
        with runtime.open_sync(target, draft, max_batch=max_batch, prefix_cache_bytes=0) as rt:
            for temperature in (0.0, 0.8):
                shape: dict[str, Any] = {"temperature": temperature, "acceptance": "match", "max_tokens": MAX_TOKENS}
                texts += rt.generate_many(asked, max_concurrent=max_batch, **shape)
            return texts, rt.statistics().rows_per_pass or 0.0

    alone, _ = generate(1)
    together, rows_per_pass = generate(len(prompts))
    for number, (text, other) in enumerate(zip(alone, together, strict=True), start=1):
        if (place := _first_difference(other, _ids(text))) is not None:
            yield f"text {number} of {named} differs from what it is alone at token {place}"
    if must_share and rows_per_pass <= 1:
        yield f"no two texts of {named} shared a pass"


def not_a_number(_: Subject) -> Iterable[str]:
    """Logits that are no numbers are noticed in each number format."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for value in (float("nan"), float("inf")):
            for width in (7, 4101, 151_936):
                row = mx.zeros((3, width), dtype)
                row[1, width // 2] = value
                check = LogitCheck.of(row, row)
                mx.eval(*check.arrays)
                if check.num_sound() != 1:
                    yield f"{value} goes unnoticed in {str(dtype).removeprefix('mlx.core.')}, {width} wide"


# What each check found right, by the sentence that says so.
CHECKS: dict[str, Callable[[Subject], Iterable[str]]] = {
    "greedy texts are mlx-lm's, with every lookahead": greedy_texts,
    "a seed gives the same text, with and without a drafter": seeded_texts,
    "the rejection rule draws from the target's distribution": first_tokens,
    "caches of every kind are right after rejections": rewinds,
    "texts that share passes are what each is alone": shared_passes,
    "logits that are no numbers are noticed": not_a_number,
}


def run_checks(
    target: ModelSource, draft: ModelSource | None, on_progress: Callable[[str], None] = lambda _: None
) -> dict[str, list[str]]:
    """Run all checks on a model or a pair; see `load_subject`. Returns: by check, what is wrong, if anything is."""
    subject = load_subject(target, draft)
    found = {}
    for number, (name, check) in enumerate(CHECKS.items(), start=1):
        on_progress(f"check {number} of {len(CHECKS)}: {name}")
        try:
            found[name] = list(check(subject))
        except (RuntimeError, ValueError, OutriderError) as error:  # MLX raises the first two
            found[name] = [f"the check ended with {type(error).__name__}: {error}"]
    return found


def _first_difference(completion: Completion, expected: Sequence[int]) -> int | None:
    """The index of the first token that differs from the expected text's; None if none does.

    A text may end early with an end-of-text token, after which plain decoding goes on.
    """
    text = _ids(completion)
    if (place := next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)) is not None:
        return place
    return None if len(text) == len(expected) or completion.finish_reason == "stop" else len(text)


def _ids(completion: Completion) -> list[int]:
    return [token.id for token in completion.tokens]


def _plain_text(model: Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy text of mlx-lm's plain decoding; no end-of-text token ends it."""
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens)]
