"""A drafter at the other end of a link drafts what it would draft here; only the way of the bytes is missing."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import models
import pytest
import trio
from drafted_runtime import PROMPTS, drafted
from drafters_elsewhere import elsewhere, simulated_worker
from models import greedy
from scripted import ids, priced
from simulated_worker import SimulatedWorker
from sweeps import sweep
from trained_drafters import make

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from protocol.drafter_wire import DraftNews, decode, encode
from protocol.messages import Close, Proposal, Ready, Rest, Rested, Verdict, Withdraw
from protocol.trace import Events
from runtime.engine.opening import running

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
}
PRICE = priced(draft=1.0, verify=4.0)


@asynccontextmanager
async def opened(
    draft: Any, *, is_elsewhere: bool = True, listener: Callable[[runtime.Event], None] | None = None
) -> AsyncIterator[tuple[runtime.Runtime, Any]]:
    """A runtime in simulated time, so that two of them draft and verify at the same moments; and the ends of a link."""
    events = Events()
    if listener is not None:
        events.listen(listener)
    target, drafter = (MLXModel(built, CacheOptions()) for built in (models.llama(), draft))
    at_target = target, SimulatedWorker("target", PRICE, events)
    if not is_elsewhere:
        async with running(at_target, (drafter, SimulatedWorker("draft", PRICE, events)), events=events) as rt:
            yield rt, None
        return
    async with (
        elsewhere(drafter, simulated_worker(PRICE), target.vocab_size) as (there, *links),
        running(at_target, there, events=events) as rt,
    ):
        yield rt, links


@sweep(
    ("draft", "name"),
    [
        ("llama", "penalties"),
        ("llama", "rejection"),
        ("mamba", "rejection"),
        *(pytest.param("llama", name, marks=pytest.mark.slow) for name in ("greedy", "seeded")),
    ],
)
async def test_texts_and_acceptance_are_those_of_a_drafter_here(draft: str, name: str, autojump_clock: Any) -> None:
    found, estimates = [], []
    for is_elsewhere in (False, True):
        async with opened(DRAFTERS[draft](), is_elsewhere=is_elsewhere) as (rt, _):
            asked = {"max_tokens": NUM_TOKENS, "lookahead": 3, "ignore_eos": True, **SETTINGS[name]}
            completion = await rt.generate(PROMPTS[0], **asked)
            statistics = rt.statistics()
        assert statistics.draft_failures == 0
        assert statistics.proposed > 0
        assert statistics.draft_busy > 0
        counts = completion.statistics
        found.append((ids(completion.tokens), counts.proposed, counts.accepted, counts.lookahead_hits))
        estimates.append(attrs.astuple(statistics.estimates, filter=lambda _, value: isinstance(value, float)))
    assert found[0] == found[1]
    assert estimates[0] == pytest.approx(estimates[1])
    if draft == "llama":
        assert counts.accepted > 0


async def test_several_streams_share_draft_steps_there(autojump_clock: Any) -> None:
    seen: list[runtime.Event] = []
    async with opened(DRAFTERS["llama"](), listener=seen.append) as (rt, _):
        completions = await rt.generate_many(PROMPTS, max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
    expected = [greedy(models.llama(), prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [ids(each.tokens) for each in completions] == expected
    assert all(each.statistics.accepted > 0 for each in completions)
    assert any(len(event.shares) == len(PROMPTS) for event in seen if isinstance(event, runtime.Span))
    assert {event.kind for event in seen if isinstance(event, runtime.Instant)} >= {"open", "proposal", "hit"}


async def test_user_code_stays_here_and_the_text_is_the_same(autojump_clock: Any) -> None:
    asked: dict[str, Any] = {
        "logits_processors": (runtime.stateless(lambda _, logits: logits * 0.5),),
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    async with opened(DRAFTERS["llama"]()) as (rt, _):
        plain = await rt.generate(PROMPTS[0], lookahead=0, **asked)
        completion = await rt.generate(PROMPTS[0], lookahead=3, **asked)
    assert ids(completion.tokens) == ids(plain.tokens)
    assert completion.statistics.proposed > 0
    assert completion.statistics.draft_failures == 0


async def test_a_rest_is_caught_up_with_there(autojump_clock: Any) -> None:
    """A drafter that is dear and always wrong is left to rest; it is told of many rounds at once."""
    async with opened(models.llama(9)) as (rt, (near, link)):
        completion = await rt.generate(PROMPTS[0], max_tokens=100, ignore_eos=True)
        assert ids(completion.tokens) == greedy(models.llama(), PROMPTS[0], 100)
        assert completion.statistics.draft_failures == 0
        assert completion.statistics.resting_rounds > 0
        sent = [type(decode(data)) for data in link.sent]
        assert sent.count(Rest) > 0
        told = [type(decode(data)) for data in near.sent]
        assert told.count(Rested) > 0
        assert told.count(Verdict) < completion.statistics.rounds


async def test_a_rounds_messages_are_few(autojump_clock: Any) -> None:
    async with opened(DRAFTERS["llama"]()) as (rt, (_, link)):
        completion = await rt.generate(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
        sent = [message for data in link.sent if not isinstance(message := decode(data), DraftNews)]
    assert {type(message) for message in sent} == {Ready, Proposal}
    assert len(sent) <= 2 + completion.statistics.rounds


# --- a drafter that is lost -----------------------------------------------------------------------

GARBAGE = {
    "the end of the link": None,
    "no message": b"\xff\x00",
    "a message of the other direction": encode(Close(0)),
    "a token outside the vocabulary": encode(Proposal(0, 0, 5, (10**6,))),
    "a proposal of a round to come": encode(Proposal(0, 10**6, 10**6, (1,))),
    "a proposal without its distributions": encode(Proposal(0, 0, 5, (1, 2), reach=(0.5, 0.5))),
}


@sweep(("name", "garbage"), [*(("greedy", each) for each in list(GARBAGE)[:-1]), ("rejection", list(GARBAGE)[-1])])
async def test_a_drafter_that_is_lost_costs_no_token(name, garbage, autojump_clock, caplog):
    asked = {"max_tokens": NUM_TOKENS, "lookahead": 3, "ignore_eos": True, **SETTINGS[name]}
    async with opened(DRAFTERS["llama"]()) as (rt, (_, link)):
        found = []
        with caplog.at_level(logging.WARNING, "outrider"):
            async with rt.stream(PROMPTS[0], **asked) as stream:
                async for token in stream:
                    found.append(token.id)
                    if token.index == 4:
                        if (data := GARBAGE[garbage]) is None:
                            link.cut()
                        else:
                            link.send(data)
        assert len(found) == NUM_TOKENS
        if name == "greedy":
            assert found == greedy(models.llama(), PROMPTS[0], NUM_TOKENS)
        assert stream.statistics().accepted > 0
        assert stream.statistics().draft_failures == 1
        assert rt.health().draft is False
        assert caplog.text.count("the drafter is lost: the other end") == 1
        # Streams that begin afterwards are not drafted for.
        later = await rt.generate(PROMPTS[1], **asked)
        assert later.statistics.proposed == later.statistics.draft_failures == 0
        await rt.detach_draft()
        assert rt.health().draft is None


async def test_a_drafter_that_is_detached_proposes_what_it_has_drawn(autojump_clock: Any) -> None:
    async with opened(DRAFTERS["llama"]()) as (rt, (_, link)):
        async with rt.stream(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True) as stream:
            found = [(await anext(stream)).id]
            await trio.sleep(1.5)  # after the verdict, a step of three is done
            num_sent = sum(isinstance(decode(data), Proposal) for data in link.sent)
            await rt.detach_draft()
            found += [token.id async for token in stream]
        assert found == greedy(models.llama(), PROMPTS[0], NUM_TOKENS)
        assert sum(isinstance(decode(data), Proposal) for data in link.sent) == num_sent + 1
        assert not any(isinstance(decode(data), Withdraw) for data in link.sent)
        assert stream.statistics().draft_failures == 0


# --- trained drafters -----------------------------------------------------------------------------


@sweep("kind", ["mtp_deep", "dspark", "gemma4"])
async def test_it_drafts_what_it_would_draft_here(kind: str, tmp_path: Path, autojump_clock: Any) -> None:
    # At such a temperature both choose by the noise alone, so even random weights agree.
    settings: dict[str, Any] = {"temperature": 30.0, "lookahead": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    found: dict[bool, list[Any]] = {False: [], True: []}
    for is_elsewhere, results in found.items():
        target = make(kind, tmp_path)
        price = priced(draft=1.0, verify=4.0, load=0.0)
        async with drafted(tmp_path, target, price=price, is_elsewhere=is_elsewhere, max_batch=1) as rt:
            for acceptance in ("match", "rejection"):
                completion = await rt.generate(PROMPTS[0], seed=2, acceptance=acceptance, **settings)
                statistics = completion.statistics
                assert statistics.draft_failures == 0
                assert statistics.accepted > 0
                results.append((ids(completion.tokens), statistics.accepted, statistics.proposed))
    assert found[False] == found[True]
