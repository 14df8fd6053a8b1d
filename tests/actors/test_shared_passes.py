"""Several texts in one pass: each text is what it is alone, in every family that takes rows."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import ARCHITECTURES, VOCAB_SIZE, build
from completions import ids
from mlx_lm.models.base import create_causal_mask
from models import Wrapped, greedy
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.row_caches import MAX_WIDTH, RowKVCache, RowRingCache
from actors.mlx.shared_passes import RowBatch
from actors.model import Feed, RewindMode
from protocol.trace import Event, Span

NUM_TOKENS = 20
PROMPT_LENGTHS = (9, 23, 40)


class Text:
    """One text that is decoded greedily, with a drafter that is right as often as `luck` says."""

    def __init__(self, model: MLXModel, prompt: Sequence[int], truth: Sequence[int]) -> None:
        self.sequence = model.open_sequence(alongside_model=False)
        self.tokens, self.num_prompt, self.truth = list(prompt), len(prompt), truth
        self.sequence.feed(tuple(prompt[:-1]), 0)
        self.drafted: list[int] = []

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def draft(self, draws: random.Random, luck: float, most: int = 4) -> Feed:
        done = len(self.generated)
        true = self.truth[done : done + draws.randint(0, most)]
        self.drafted = [token if draws.random() < luck else (token + 1) % VOCAB_SIZE for token in true]
        missing = self.tokens[self.sequence.length :]
        tokens = (*missing, *self.drafted)
        assert self.sequence.prepare(len(tokens), len(self.tokens)) is not RewindMode.SINGLE
        return Feed(self.sequence, tokens, 1 + len(self.drafted))

    def judge(self, logits: mx.array) -> None:
        chosen = mx.argmax(logits, axis=-1).tolist()
        accepted = next((i for i, token in enumerate(self.drafted) if token != chosen[i]), len(self.drafted))
        start = len(self.tokens)
        self.tokens += chosen[: accepted + 1]
        self.sequence.rewind(start + accepted)


def feed_ahead(wrapped: MLXModel, texts: list[Text]) -> list[mx.array]:
    """Feed the last token of each text as if it were not known. Returns: (1, V) logits of each."""
    logits = wrapped.feed_ahead([text.sequence for text in texts], mx.array([text.tokens[-1] for text in texts]))
    return [logits[i : i + 1] for i in range(len(texts))]


# Seeds of prompts after which the texts of a family do not depend on rounding, where the first does not do.
PROMPT_SEEDS = {"apertus": 3, "plamo": 2, "qwen3_next": 2}


def texts_of(name: str, model: nn.Module, wrapped: MLXModel, num_tokens: int = NUM_TOKENS) -> list[Text]:
    draws = random.Random(PROMPT_SEEDS.get(name, 1))
    prompts = [[draws.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    return [Text(wrapped, prompt, greedy(model, prompt, num_tokens + 4)) for prompt in prompts]


# One family of each kind of cache; the others are slow tests.
QUICK = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next", "falcon_h1", "mamba2")


@sweep("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in QUICK)])
def test_each_text_is_what_it_is_alone(name: str) -> None:
    model = build(name)
    wrapped = MLXModel(model, CacheOptions())
    if name not in QUICK and wrapped.sharing_obstacle() is not None:
        return  # its texts take turns
    num_tokens = NUM_TOKENS if name in QUICK else NUM_TOKENS // 4
    texts, draws = texts_of(name, model, wrapped, num_tokens), random.Random(2)
    has_shared = False
    while any(len(text.generated) < num_tokens for text in texts):
        # Now and then a text takes no part, or another one joins again.
        present = [text for text in texts if draws.random() < 0.9] or texts[:1]
        most = draws.choice((0, 4))
        logits = wrapped.feed_together([text.draft(draws, 0.7, most) for text in present])
        for text, rows in zip(present, logits, strict=True):
            text.judge(rows)
        if most == 0:
            for text, rows in zip(present, feed_ahead(wrapped, present), strict=True):
                text.judge(rows)
        has_shared = has_shared or all(text.sequence.is_row for text in texts)
        if draws.random() < 0.1:
            draws.choice(texts).sequence.leave_batch()
    assert has_shared
    for text in texts:
        assert text.generated[:num_tokens] == list(text.truth[:num_tokens])
        text.sequence.check(text.sequence.length)
        text.sequence.close()


@sweep("name", ["llama", "gemma3_text", "lfm2", "qwen3_next"])
def test_the_last_text_of_a_batch_goes_on_alone(name: str) -> None:
    model = build(name)
    wrapped = MLXModel(model, CacheOptions())
    texts, draws = texts_of(name, model, wrapped), random.Random(3)

    def take_turn(present: list[Text]) -> None:
        logits = wrapped.feed_together([text.draft(draws, 0.5) for text in present])
        for text, rows in zip(present, logits, strict=True):
            text.judge(rows)

    while len(texts[-1].generated) < NUM_TOKENS:
        take_turn(texts)
        if len(texts) > 1 and len(texts[0].generated) > 8:
            assert texts[0].sequence.is_row
            texts.pop(0).sequence.close()
    assert len(texts) == 1
    assert not texts[0].sequence.is_row
    assert texts[0].generated[:NUM_TOKENS] == list(texts[0].truth[:NUM_TOKENS])
    texts[0].sequence.close()


@sweep("window_size", [None, 3, 8])
def test_a_row_of_keys_and_values_has_the_mask_that_its_text_has_alone(window_size: int | None) -> None:
    rows, lengths, width = RowKVCache(), (2, 9, 5), 4
    rows.begin(lengths, [width] * len(lengths))
    masks = rows.make_mask(width, window_size=window_size)
    for (mask,), length in zip(masks, lengths, strict=True):
        assert mx.array_equal(mask[:, : length + width], create_causal_mask(width, length, window_size=window_size))
        assert not mx.any(mask[:, length + width :])


class Positions:
    """A cache of one text whose keys are the positions of its tokens."""

    keys: mx.array
    values: mx.array
    offset = _idx = 0

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


@sweep("window", [8, 180, 300])
def test_a_ring_shows_each_row_its_window_and_no_slots_that_nobody_has_filled(window: int) -> None:
    draws, ring, lengths = random.Random(window), RowRingCache(window), [0, 0, 0]
    for _ in lengths:
        ring.join(None, 0)
    while min(lengths) < 2 * (window + MAX_WIDTH):
        most = draws.choice((1, 6, MAX_WIDTH))
        widths = [draws.randint(0, most), draws.randint(0, most), most]
        ring.begin(lengths, widths)
        mask = np.array(ring.make_mask(most))
        positions = mx.array(lengths)[:, None] + mx.arange(most)
        keys, _ = ring.update_and_fetch(*[positions[:, None, :, None].astype(mx.float32)] * 2)
        held = np.array(keys)[:, 0, :, 0]
        assert held.shape[1] == min(max(lengths) + most, window + MAX_WIDTH)
        for row, width in enumerate(widths):
            for i in range(width):
                end = lengths[row] + i + 1
                assert sorted(held[row][mask[row, 0, i]]) == list(range(max(0, end - window), end))
            lengths[row] += width - draws.randint(0, width // 2)  # the others are rejected
        if lengths[0] > 0 and draws.random() < 0.2:
            single = Positions()
            ring.copy_to(0, lengths[0], single)
            ring.remove(0)
            ring.join(single, lengths[0])
            lengths.append(lengths.pop(0))


class Counting(Wrapped):
    """A model whose passes are counted."""

    num_passes = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.num_passes += 1
        return super().__call__(*arguments, **keywords)


@sweep("name, shared_before", [("llama", True), ("gemma3_text", False), ("lfm2", True)])
def test_tokens_that_are_not_computed_yet_are_read_in_one_pass(name: str, shared_before: bool) -> None:
    model = build(name)
    counting = Counting(model)
    wrapped = MLXModel(counting, CacheOptions())
    assert wrapped.sharing_obstacle() is None
    texts, draws = texts_of(name, model, wrapped), random.Random(4)
    feeds = [each.draft(draws, 1.0, most=0) for each in texts]
    fed = wrapped.feed_together(feeds) if shared_before else [wrapped.feed_together([feed])[0] for feed in feeds]
    for text, rows in zip(texts, fed, strict=True):
        text.judge(rows)
    for step in range(6):
        if step == 3:
            texts.pop(0).sequence.close()
        num_passes = counting.num_passes
        for text, rows in zip(texts, feed_ahead(wrapped, texts), strict=True):
            text.judge(rows)
        assert counting.num_passes == num_passes + 1
    for text in texts:
        assert text.generated == list(text.truth[: len(text.generated)])
        text.sequence.close()


@pytest.mark.parametrize(("name", "shares"), [("llama", True), ("mamba", False)])
async def test_streams_whose_texts_cannot_share_take_turns_and_no_pass_is_called_shared(name, shares):
    events: list[Event] = []
    async with runtime.open((build(name), None), trace=events.append) as rt:
        await rt.generate_many([[1, 2, 3], [4, 5, 6, 7], [8, 9]], max_tokens=24, ignore_eos=True)
        rows_per_pass = rt.statistics().rows_per_pass
    assert (rows_per_pass > 1) == any(isinstance(event, Span) and event.shares for event in events) == shares


def louder(tokens: Any, logits: Any) -> Any:
    return logits * 1.5


PLAIN_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "rejection": {"temperature": 0.8, "seed": 3, "acceptance": "rejection"},
    "processor": {"logits_processors": [louder], "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 2},
    "stops": {"stop_tokens": list(range(0, VOCAB_SIZE, 31))},
}


async def test_streams_without_a_drafter_go_a_pass_ahead_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, feed_ahead = Counter[str](), RowBatch.feed_ahead

    def recorded(batch: RowBatch, keys: Any, tokens: Any, recorder: Any) -> mx.array:
        ahead[kind] += 1
        return feed_ahead(batch, keys, tokens, recorder)

    monkeypatch.setattr(RowBatch, "feed_ahead", recorded)
    lengths = [([1, 2, 3], 7), ([4, 5, 6, 7], 20), ([8, 9], 20), ([3, 3, 7], 15)]
    async with runtime.open((build("llama"), None)) as rt:
        for kind, changes in PLAIN_SETTINGS.items():
            settings = {**changes, "ignore_eos": True}
            asked = [(prompt, {**settings, "max_tokens": length}) for prompt, length in lengths]
            alone = [ids(await rt.generate(prompt, **own)) for prompt, own in asked]
            assert [ids(each) for each in await rt.generate_many(asked)] == alone, kind
            assert ahead[kind]


@pytest.mark.parametrize("beyond", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1])
def test_an_id_beyond_the_vocabulary_is_read_as_the_last_id(beyond: int) -> None:
    model = MLXModel(build("llama"), CacheOptions())

    def logits_after(token: int) -> list[mx.array]:
        sequences = [model.open_sequence(alongside_model=False) for _ in range(2)]
        for sequence in sequences:
            sequence.feed((3, 1, 4), 0)
        logits = model.feed_together([Feed(sequences[0], (token, 5), 2), Feed(sequences[1], (7,), 1)])
        assert all(sequence.is_row for sequence in sequences)
        mx.eval(logits)
        for sequence in sequences:
            sequence.close()
        return logits

    for found, expected in zip(logits_after(beyond), logits_after(VOCAB_SIZE - 1), strict=True):
        assert mx.array_equal(found, expected)


def test_a_text_whose_caches_cannot_be_taken_out_of_a_batch_is_lost_and_the_others_go_on(monkeypatch):
    wrapped = MLXModel(build("llama"), CacheOptions())
    texts = [wrapped.open_sequence(alongside_model=False) for _ in range(3)]
    for text in texts:
        text.feed((1, 2, 3), 0)
    before = wrapped.feed_together([Feed(text, (4,), 1) for text in texts])
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        with pytest.raises(MemoryError):
            texts[0].leave_batch()
    assert (texts[0].length, texts[0].is_row) == (0, False)
    texts[0].feed((1, 2, 3), 0)
    after = wrapped.feed_together([Feed(texts[0], (4,), 1), Feed(texts[1], (5,), 1), Feed(texts[2], (5,), 1)])
    assert mx.allclose(after[0], before[0], atol=1e-4)
    assert mx.allclose(after[1], after[2], atol=1e-4)
    for text in texts:
        text.close()


def no_memory(*_: Any) -> None:
    raise MemoryError
