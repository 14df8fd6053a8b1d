"""A drafter at another rank drafts what it would draft here; only the messages' way is missing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import models
import pytest
from drafted_runtime import PROMPTS, check_greedy, check_reuse, check_seeded, drafted
from drafters_elsewhere import RankInThisProcess, at_another_rank
from models import VOCAB_SIZE, greedy
from scripted import ids, priced
from trained_drafters import KINDS, make

import runtime
from actors.distributed.drafting.draft_values import (
    MAX_DRAWN_FROM,
    array_from,
    array_message,
    opened_fields,
    opened_from,
    outcome_fields,
    outcome_from,
)
from actors.drafters.draft_steps import Drafted
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.workers.simulated_worker import SimulatedWorker
from protocol.acceptance import distribution, likeliest_only
from protocol.cached_tokens import FeedPlan
from protocol.draft_rank_messages import DraftFailure, DraftRequest
from protocol.errors import RankError
from protocol.lookahead_tree import Guess
from protocol.messages import Open
from protocol.rank_messages import decode, encode
from protocol.settings import Settings
from runtime.engine.running import running

NUM_TOKENS = 24
DRAFTERS: dict[str, Callable[[], Any]] = {
    # A drafter that is trimmed, and one that goes back to checkpoints.
    "llama": lambda: models.near(models.llama(), noise=0.05),
    "mamba": models.mamba,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "rejection": {"temperature": 0.9, "seed": 5, "acceptance": "rejection", "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
    # User code, which runs here; the logits come to it.
    "processor": {
        "logits_processors": (runtime.stateless(lambda _, logits: logits * 0.5),),
        "temperature": 1.0,
        "seed": 7,
    },
}


@asynccontextmanager
async def opened(draft: Any, *, is_elsewhere: bool) -> AsyncIterator[tuple[runtime.Runtime, RankInThisProcess | None]]:
    """A runtime in simulated time, so that two of them draft and verify at the same moments."""
    workers = [SimulatedWorker(role, priced(draft=1.0, verify=4.0)) for role in ("target", "draft")]
    target, drafter = (MLXModel(built, CacheOptions()) for built in (models.llama(), draft))
    remote, rank = at_another_rank(drafter) if is_elsewhere else (drafter, None)
    async with running((target, workers[0]), (remote, workers[1]), max_batch=1) as rt:
        yield rt, rank


@pytest.mark.parametrize(
    ("draft", "name"), [*(("llama", name) for name in SETTINGS), ("mamba", "greedy"), ("mamba", "rejection")]
)
async def test_texts_and_acceptance_are_those_of_a_drafter_here(draft: str, name: str, autojump_clock: Any) -> None:
    found = []
    for is_elsewhere in (False, True):
        async with opened(DRAFTERS[draft](), is_elsewhere=is_elsewhere) as (rt, _):
            completions = [
                await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True, **SETTINGS[name])
                for prompt in PROMPTS[:2]
            ]
        assert all(completion.statistics.draft_failures == 0 for completion in completions)
        assert sum(completion.statistics.proposed for completion in completions) > 0
        found.append([(ids(each.tokens), each.statistics.proposed, each.statistics.accepted) for each in completions])
    assert found[0] == found[1]
    if draft == "llama":
        assert sum(accepted for *_, accepted in found[1]) > 0


async def test_a_draft_step_is_one_request(autojump_clock: Any) -> None:
    async with opened(DRAFTERS["llama"](), is_elsewhere=True) as (rt, rank):
        assert rank is not None
        completion = await rt.generate(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
        steps = [name for name in rank.asked if name not in ("open", "close", "feed")]
        assert set(steps) == {"take_step"}
        assert len(steps) >= completion.statistics.proposed
        # Logits alone would be this many bytes a step.
        assert rank.num_bytes < len(steps) * VOCAB_SIZE * 4


async def test_a_text_is_reused_where_it_is(autojump_clock: Any) -> None:
    async with opened(DRAFTERS["llama"](), is_elsewhere=True) as (rt, rank):
        assert rank is not None
        for prompt in (PROMPTS[2], [*PROMPTS[2], 3, 4], [*PROMPTS[2], 8, 9]):
            completion = await rt.generate(prompt, max_tokens=8, lookahead=2, ignore_eos=True, reuse_prefix=True)
            assert ids(completion.tokens) == greedy(models.llama(), prompt, 8)
            assert completion.statistics.draft_failures == 0
        assert rank.asked.count("open") == 1
        assert rank.asked.count("reuse") >= 2


async def test_a_rest_is_caught_up_with_elsewhere(autojump_clock: Any) -> None:
    """A drafter that is dear and always wrong is left to rest; it then reads what was decoded without it."""
    async with opened(models.llama(9), is_elsewhere=True) as (rt, rank):
        assert rank is not None
        completion = await rt.generate(PROMPTS[0], max_tokens=200, ignore_eos=True)
        assert ids(completion.tokens) == greedy(models.llama(), PROMPTS[0], 200)
        assert completion.statistics.draft_failures == 0
        assert "catch_up" in rank.asked


async def test_a_lost_rank_costs_no_token(autojump_clock: Any, caplog: Any) -> None:
    async with opened(DRAFTERS["llama"](), is_elsewhere=True) as (rt, rank):
        assert rank is not None
        found = []
        with caplog.at_level(logging.WARNING, "outrider"):
            async with rt.stream(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True) as stream:
                async for token in stream:
                    found.append(token.id)
                    rank.is_lost = token.index >= 4
        assert found == greedy(models.llama(), PROMPTS[0], NUM_TOKENS)
        assert stream.statistics().accepted > 0
        assert stream.statistics().draft_failures == 1
        assert "the drafter is lost: rank 1 has ended, or cannot be reached any more (the other end" in caplog.text


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
async def test_a_trained_drafter_is_given_its_features_elsewhere(
    kind: str, tmp_path: Path, autojump_clock: Any
) -> None:
    target, price = make(kind, tmp_path), priced(draft=1.0, verify=4.0, load=0.0)
    async with drafted(tmp_path, target, price=price, is_elsewhere=True, max_batch=4) as rt:
        await check_greedy(rt, target, 3)
        await check_seeded(rt, 2)
        await check_reuse(rt, target)


@pytest.mark.parametrize("kind", KINDS)
async def test_it_drafts_what_it_would_draft_here(kind: str, tmp_path: Path, autojump_clock: Any) -> None:
    # At such a temperature both choose by the noise alone, so even random weights agree.
    settings: dict[str, Any] = {"temperature": 30.0, "lookahead": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    found = []
    for is_elsewhere in (False, True):
        target = make(kind, tmp_path)
        price = priced(draft=1.0, verify=4.0, load=0.0)
        async with drafted(tmp_path, target, price=price, is_elsewhere=is_elsewhere, max_batch=1) as rt:
            for acceptance in ("match", "rejection"):
                completion = await rt.generate(PROMPTS[0], seed=2, acceptance=acceptance, **settings)
                statistics = completion.statistics
                assert statistics.draft_failures == 0
                assert statistics.accepted > 0
                found.append((is_elsewhere, ids(completion.tokens), statistics.accepted, statistics.proposed))
    assert [each[1:] for each in found[:2]] == [each[1:] for each in found[2:]]


# --- messages -------------------------------------------------------------------------------------


def test_a_session_is_told_with_all_that_drafting_depends_on() -> None:
    settings = Settings(
        temperature=0.7,
        draft_temperature=0.4,
        top_k=5,
        seed=2**63,
        logit_bias={3: -float("inf"), 70: 1.5},
        repetition_penalty=1.2,
        repetition_context_size=None,
        xtc_special_tokens=(1, 2),
        acceptance="rejection",
        stop=("end",),
    )
    told = Open(4, (1, 2), settings, 2**64 - 1, frozenset({5, 9}))
    request = decode(encode(DraftRequest(0, "take_step", 0, (opened_fields(told),))))
    assert isinstance(request, DraftRequest)
    found = opened_from(request.arguments[0])
    assert (found.session, found.seed, found.stop_tokens) == (4, 2**64 - 1, frozenset({5, 9}))
    assert found.settings == attrs.evolve(settings, stop=())


@pytest.mark.parametrize("width", [80, MAX_DRAWN_FROM, 3 * MAX_DRAWN_FROM])
@pytest.mark.parametrize("num_left", [1, 20, MAX_DRAWN_FROM])
def test_a_distribution_arrives_as_it_was(width: int, num_left: int) -> None:
    logits = mx.random.normal((1, width), key=mx.random.key(width + num_left))
    probs = distribution(likeliest_only(logits, min(num_left, width))[0], 1.0)
    guess = Guess(3, 0.5, probs, raw=0.25, staleness=2)
    drafted_there = Drafted((guess, Guess(4, 0.1, rank=1, raw=0.1)), True, FeedPlan(2, (7,)))
    fields = outcome_fields(drafted_there)
    found = outcome_from(fields, FeedPlan(2, (7,)))
    assert found == drafted_there
    assert isinstance(found, Drafted)
    arrived = found.guesses[0].probs
    assert arrived is not None
    assert mx.array_equal(arrived, probs)
    if width > MAX_DRAWN_FROM:
        ids_and_values = [len(each.data) for each in fields[2][0][2][1:]]
        assert ids_and_values == [4 * num_left, 4 * num_left]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_an_array_arrives_as_it_was(dtype: Any) -> None:
    array = mx.random.normal((3, 5), key=mx.random.key(1)).astype(dtype)
    found = array_from(array_message(array))
    assert found.dtype == dtype
    assert mx.array_equal(found, array)


def test_an_operation_that_fails_says_which_rank_and_what() -> None:
    remote, _ = at_another_rank(MLXModel(models.llama(), CacheOptions()))
    sequence = remote.open_sequence(beside_another=True)
    sequence.feed((1, 2, 3), 0)
    with pytest.raises(runtime.OutriderError, match="asked to rewind to 5 tokens a cache that holds 3"):
        sequence.rewind(5)
    with pytest.raises(RankError, match="rank 1 failed in feed: TypeError: "):
        sequence.feed((None,), 1)  # type: ignore[arg-type]
    sequence.close()
    with pytest.raises(RankError, match="rank 1 failed in close: KeyError"):
        sequence.close()


def test_an_answer_that_was_given_up_is_skipped() -> None:
    remote, rank = at_another_rank(MLXModel(models.llama(), CacheOptions()))
    rank.link.put(DraftFailure(rank.link.next_number(), "ValueError", "late"))
    sequence = remote.open_sequence(beside_another=True)
    assert partial(sequence.feed, (1, 2), 0)() is None
    assert sequence.length == 2


def test_a_failed_operation_tells_how_long_the_text_is_there() -> None:
    """Features that come with an operation may shorten the text. If only successes told, it would be asked for ever."""
    remote, rank = at_another_rank(MLXModel(models.llama(), CacheOptions()))
    sequence = remote.open_sequence(beside_another=True)
    sequence.feed((1, 2, 3), 0)
    rank._drafting._texts[0].sequence.rewind(1)
    with pytest.raises(RankError, match="TypeError"):
        sequence.feed((None,), 1)  # type: ignore[arg-type]
    assert sequence.length == 1
