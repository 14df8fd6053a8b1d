"""Runs of draft steps: how long they are, what ends them, and that the session state is right whenever they end."""

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
from cache_subjects import ATOL, SUBJECTS, TEXT, VOCAB_SIZE, subject
from delays import COSTS, cycled_prices, tuples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted import (
    CACHES,
    ScriptedModel,
    Simulation,
    agreeing,
    always,
    collect,
    continuation,
    hashed,
    ids,
    never,
    plain_text,
    priced,
    prompt_with_distinct_continuation,
    right_where,
    run,
    simulated,
    spike,
    text_of,
    truthful,
    within,
)
from sweeps import sweep

from actors.drafters.draft_steps import Drafted, DraftInput, DraftSteps, guesses_together
from actors.sampling.logits_pipeline import NO_HISTORY
from actors.session import Session
from protocol.acceptance import likeliest
from protocol.auto_policy import AutoPolicy
from protocol.cached_tokens import CachedTokens
from protocol.errors import NotANumberError
from protocol.lookahead_policy import ChainPolicy, DraftBudget, PolicyView
from protocol.lookahead_tree import Node
from protocol.messages import Open, Proposal, Sparse
from protocol.prices import Prices
from protocol.settings import Settings
from protocol.trace import Event, Span

PROMPT = [5, 6, 7]


def runs_of(simulation: Simulation) -> list[int]:
    """The number of steps in each of the draft worker's runs."""
    return [len(done) for done in simulation.draft_worker.runs]


# --- how many steps a run has ---------------------------------------------------------------------


@sweep("chains", [False, True])
@sweep("lookahead", [1, 2, 3, 5, 8])
async def test_a_proposal_is_one_job_and_what_is_drafted_beside_a_verify_another(lookahead, chains, autojump_clock):
    price = priced(draft=1.0, verify=1024.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price, chains=chains) as simulation:
        assert await text_of(simulation, PROMPT, max_tokens=100, lookahead=lookahead) == continuation(PROMPT, 100)
    # The first proposal; then as far ahead as is of use; then, in each round, as many as the verdict accepted.
    first, second, *others = runs_of(simulation)
    assert (first, second) == (lookahead, lookahead + 1)
    rounds = len(simulation.spans("target", "verify"))
    assert others[: rounds - 3] == [lookahead + 1] * min(len(others), rounds - 3)
    assert len(others) <= rounds


@pytest.mark.parametrize("draft_price", [0.25, 1.0])
async def test_a_right_drafter_needs_at_most_one_job_a_round_alone(draft_price: float, autojump_clock: Any) -> None:
    price = priced(draft=draft_price, verify=32.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price) as simulation:
        # Until the prices are known, it asks after each step.
        await text_of(simulation, PROMPT, max_tokens=100)
        before, rounds_before = len(runs_of(simulation)), len(simulation.spans("target", "verify"))
        await text_of(simulation, [1, 2, 3], max_tokens=400)
        runs, rounds = runs_of(simulation)[before:], len(simulation.spans("target", "verify")) - rounds_before
    assert len(runs) <= rounds + 1  # one more for the proposal that is cut to the end of the text
    assert sum(runs) >= 400


@pytest.mark.parametrize("chains", [False, True])
async def test_steps_end_with_the_text(chains: bool, autojump_clock: Any) -> None:
    prompt = prompt_with_distinct_continuation(12)
    for length in range(1, 10):
        stop = continuation(prompt, length)[-1:]
        draft, price = ScriptedModel(truthful), priced(draft=0.5, verify=64.0)
        async with simulated(ScriptedModel(truthful), draft, price=price, chains=chains) as simulation:
            text = await text_of(simulation, prompt, stop_tokens=stop, lookahead=8, max_tokens=40)
        assert text == continuation(prompt, length)
        # Nothing is drafted after a stop token. The length of the text alone is no bound.
        assert len(simulation.spans("draft", "draft")) == length
        # A step that was launched before the stop token was known may have been fed.
        assert max(len(sequence.tokens) for sequence in draft.sequences) <= len(prompt) + length - 1 + chains


# --- what ends a run ------------------------------------------------------------------------------


class CopiesFirst(AutoPolicy):
    """Drafts after the end of a copy, and then from the committed text on, along the tokens that were copied."""

    def expansion(self, view: PolicyView) -> Node | None:
        chain = view.tree.chain()
        return next((node for node in (*chain[-1:], view.tree.root) if view.is_open(node)), None)

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        return DraftBudget(8)


async def test_draft_steps_end_at_a_copied_token_that_is_expanded_already(autojump_clock: Any) -> None:
    def cycle(history: Sequence[int]) -> Sequence[float]:
        return spike(history[-1] % 4 + 1)

    def make_policy(settings: Settings, prices: Prices) -> AutoPolicy:
        return CopiesFirst(prices, prices.calibration(settings.calibration_key))

    prompt = [1, 2, 3, 4, 1, 2, 3, 4]
    async with simulated(ScriptedModel(cycle), ScriptedModel(cycle), make_policy=make_policy) as simulation:
        completion = await simulation.runtime.generate(prompt, max_tokens=60)
    assert ids(completion.tokens) == plain_text(cycle, prompt, 60)
    assert completion.statistics.accepted_copied > 0
    assert completion.statistics.draft_failures == 0


@sweep("chains", [False, True])
@sweep("verify", [0.5, 1.25, 2.5, 3.75])
async def test_a_verdict_that_goes_another_way_ends_them_with_the_step_that_is_running(verify, chains, autojump_clock):
    # A proposal takes four steps, and five more are of use; all are wrong from the first token on.
    price = priced(prefill=0.0, draft=1.0, verify=verify)
    draft = ScriptedModel(agreeing(0.0))
    async with simulated(ScriptedModel(truthful), draft, price=price, chains=chains) as simulation:
        assert await text_of(simulation, PROMPT, max_tokens=24, lookahead=4) == continuation(PROMPT, 24)
        runs, misses = filter(None, simulation.draft_worker.runs), simulation.instants("miss")
        struck = [(done, miss.at) for done in runs for miss in misses if done[0].began < miss.at < done[-1].ended]
        assert len(struck) > 5
        for done, at in struck:
            assert done[-1].began < at


async def test_a_verdict_that_goes_their_way_does_not_end_them(autojump_clock: Any) -> None:
    price = priced(prefill=0.0, draft=2.0, verify=5.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price) as simulation:
        await text_of(simulation, PROMPT, max_tokens=40, lookahead=3)
        passed = [
            (done, hit.at)
            for done in simulation.draft_worker.runs
            for hit in simulation.instants("hit")
            if done[0].began < hit.at < done[-1].began
        ]
        assert passed


@sweep("at", [0.5, 1.0, 2.25, 5.0, 7.5])
@sweep("chains", [False, True])
async def test_a_stream_that_is_closed_ends_them_with_the_step_that_is_running(at, chains, autojump_clock):
    price = priced(prefill=0.0, draft=1.0, verify=64.0)
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=price, chains=chains) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=100, lookahead=8)
        await trio.sleep(at)
        await stream.aclose()
        await trio.sleep(10)
        drafts = simulation.spans("draft", "draft")
        assert all(draft.began <= at for draft in drafts)
        (close,) = simulation.spans("draft", "close")
        assert close.ended == drafts[-1].ended


async def test_a_text_that_ends_ends_them(autojump_clock: Any) -> None:
    # While the last verdict is on its way, the drafter is busy beyond what it will say.
    prompt = prompt_with_distinct_continuation(12)
    stop = continuation(prompt, 3)[-1:]
    price = priced(prefill=0.0, draft=1.0, verify=4.5)
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.0)), price=price) as simulation:
        assert await text_of(simulation, prompt, stop_tokens=stop, lookahead=8) == continuation(prompt, 3)
        ended = simulation.instants("finish")[0].at
        assert all(draft.began <= ended for draft in simulation.spans("draft", "draft"))


async def test_steps_are_expected_to_end_when_they_do_however_many_share_them(autojump_clock: Any) -> None:
    errors: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Span) and event.kind == "draft" and event.began > 100.0:  # prices are learned by then
            parts = [session.part for session in simulation.runtime._draft._sessions.values()]
            errors.extend(part.expected_end_s - event.ended for part in parts if part is not None)

    async with simulated(
        ScriptedModel(truthful),
        ScriptedModel(truthful),
        price=lambda job: 1.0 + job.num_tokens,
        make_policy=lambda *_: ChainPolicy(2, overlaps=False),
        listener=listen,
    ) as simulation:
        await simulation.runtime.generate_many([[1, 2, 3], [2, 3, 4]], max_tokens=80)
    assert len(errors) > 30
    assert max(map(abs, errors)) < 0.5  # a step takes 3 s or more


# --- the session state ----------------------------------------------------------------------------


# Generations whose draft steps are interrupted in the middle, or reported late.
INTERRUPTED = st.builds(
    SimpleNamespace,
    right=tuples(st.booleans(), 8) | st.just((True,)),
    lookahead=st.sampled_from([1, 2, 3, 5, 8, "auto", "auto"]),
    max_tokens=st.integers(1, 40),
    stop_at=st.none() | st.integers(0, 20),
    num_sessions=st.sampled_from([1, 1, 2]),
    costs=tuples(st.sampled_from(COSTS), 6),
    draft_costs=tuples(st.sampled_from([0.0, 0.25, 1.0, 3.0]), 6),
    report_delays=st.none() | tuples(st.sampled_from([0.0, 0.125, 0.75, 4.0, 30.0]), 6),
    chains=st.booleans(),
    target_undo=st.sampled_from([always, never, within(12)]),
    draft_cache=st.sampled_from(sorted(CACHES)),
    draft_fails_at=st.none() | st.none() | st.integers(1, 30),
    schedule=st.integers(0, 2**32),
)


async def play(scenario: Any) -> None:
    """Assert that the text is right. The workers compare states and sequences; `simulated` checks the sequences."""
    report_delays = None if scenario.report_delays is None else itertools.cycle(scenario.report_delays).__next__
    draft = ScriptedModel(
        right_where(scenario.right),
        fails=None if scenario.draft_fails_at is None else {"feed": {scenario.draft_fails_at}},
        **CACHES[scenario.draft_cache],
    )
    async with simulated(
        ScriptedModel(truthful, undo=scenario.target_undo),
        draft,
        price=cycled_prices(scenario.costs),
        draft_price=cycled_prices(scenario.draft_costs),
        schedule=scenario.schedule,
        chains=scenario.chains,
        report_delay=report_delays,
    ) as simulation:

        async def one(prompt: list[int]) -> None:
            stop = [] if scenario.stop_at is None else continuation(prompt, scenario.stop_at + 1)[-1:]
            asked = {"max_tokens": scenario.max_tokens, "stop_tokens": stop, "lookahead": scenario.lookahead}
            stream = simulation.runtime.stream(prompt, **asked)
            assert await collect(stream) == continuation(prompt, scenario.max_tokens, stop)
            assert stream.statistics().draft_failures <= (scenario.draft_fails_at is not None)

        async with trio.open_nursery() as nursery:
            for n in range(scenario.num_sessions):
                nursery.start_soon(one, [n, 1, 2])


# A shared step fails, and the caches that have lost the text can drop no token of it once it is read again.
LOST = SimpleNamespace(
    right=(True,), lookahead=1, max_tokens=7, stop_at=None, num_sessions=2, costs=(0.25,), draft_costs=(0.0,),
    report_delays=None, chains=False, target_undo=always, draft_cache="of nothing known", draft_fails_at=9, schedule=0,
)  # fmt: skip


@given(INTERRUPTED)
@example(LOST)
@settings(max_examples=100)
def test_the_session_state_is_right_whatever_ends_the_steps_and_whenever(scenario: Any) -> None:
    run(play, scenario)


SEEDED = {"temperature": 0.8, "acceptance": "match", "seed": 4}


@sweep("lookahead, settings, report_delay", [(1, {}, 0.5), (6, SEEDED, None), ("auto", SEEDED, 0.5)])
def test_launching_steps_early_changes_neither_text_nor_proposals(lookahead, settings, report_delay):
    target = hashed("target", 6.0)

    async def main(chains: bool) -> tuple[list[int], list[Any]]:
        async with simulated(
            ScriptedModel(target),
            ScriptedModel(hashed("draft", 3.0, near=target)),
            price=priced(draft=1.0, verify=6.5),
            chains=chains,
            report_delay=None if report_delay is None else lambda: report_delay,
        ) as simulation:
            text = await text_of(simulation, PROMPT, max_tokens=40, lookahead=lookahead, **settings)
            return text, [(each.round, each.tokens) for each in simulation.instants("proposal")]

    (text, proposed), (chained_text, chained) = run(main, False), run(main, True)
    assert chained_text == text
    if report_delay is None and lookahead != "auto":
        assert chained == proposed


# --- on real caches -------------------------------------------------------------------------------


class OnThread:
    """Draft steps on a real cache, with the session state that the drafter would keep."""

    def __init__(self, name: str, *, chains: bool, num_prefilled: int, settled: int, **settings: Any) -> None:
        self.subject = subject(name)
        self.num_prefilled = num_prefilled
        self.sequence = self.subject.open_sequence("auto")
        self.cached_tokens = CachedTokens()
        self.opened = Open(0, tuple(TEXT), Settings(**settings), 7, frozenset())
        self.committed = TEXT[:settled]
        self.session = Session(self.opened, trio.open_memory_channel(0)[0])
        self.steps = DraftSteps(self.sequence, settled, self.session, VOCAB_SIZE, lambda: 0.0, chains)
        plan = self.cached_tokens.plan(TEXT[:num_prefilled], num_logits=0)
        self.sequence.feed(plan.feed, 0)
        self.cached_tokens.follow(plan)

    def draft(self, beyond: Sequence[int], draft_budget: int, max_steps: int) -> list[Drafted]:
        """The results of steps that are interrupted after so many; run again where the cache falls back."""
        while True:
            plan = self.cached_tokens.plan(self.committed, beyond)
            tail = self.session.logits_pipeline.history(self.committed, beyond)
            step, found = self.steps.begin(DraftInput(plan, 0, tail, DraftBudget(draft_budget))), list[Drafted]()
            if step.result.guess is not None or not step.result.can_look_ahead:
                break
            self.cached_tokens.follow(step.result.fed)
            self.sequence.check(len(self.cached_tokens))
        while step.result.guess is not None:
            found.append(step.result)
            self.cached_tokens.follow(step.result.fed)
            self.sequence.check(len(self.cached_tokens))
            if step.next_call is None or len(found) == max_steps:
                break
            step = step.next_call()
        if step.result.guess is None:
            assert not step.result.can_look_ahead
            self.cached_tokens.follow(step.result.fed)
        self.sequence.check(len(self.cached_tokens))
        return found


def choices(found: Sequence[Drafted]) -> list[int]:
    return [drafted.guess.token for drafted in found]


@sweep("settings", [{}, {"temperature": 0.7, "acceptance": "match"}])
@sweep("name", SUBJECTS)
def test_steps_that_are_launched_early_guess_the_same(name: str, settings: dict[str, Any]) -> None:
    settled = 4 if settings else 12
    one, other = (OnThread(name, chains=c, num_prefilled=3, settled=settled, **settings) for c in (False, True))
    found, chained = one.draft((), 6, 99), other.draft((), 6, 99)
    assert len(found) == len(chained) > 0
    assert one.cached_tokens.tokens == other.cached_tokens.tokens
    for drafted, same in zip(found, chained, strict=True):
        assert drafted.can_look_ahead == same.can_look_ahead
        assert drafted.guess.token == same.guess.token
        assert drafted.guess.raw == pytest.approx(same.guess.raw, abs=ATOL)


@sweep("name", SUBJECTS)
def test_steps_that_are_interrupted_leave_the_cache_as_the_session_state_says(name: str) -> None:
    dice = random.Random(5)
    for max_steps, chains in ((1, True), (4, False)):
        thread = OnThread(name, chains=chains, num_prefilled=3, settled=5)
        for _ in range(3):
            found = thread.draft((), 5, max_steps)
            # The text follows the draft for a while, and then differs.
            along = choices(found)[: dice.randrange(len(found) + 1)]
            thread.committed = [*thread.committed, *along, dice.randrange(VOCAB_SIZE)]
            thread.steps = attrs.evolve(thread.steps, settled=len(thread.committed))
        again = thread.draft((), 0, 1)
        (expected,) = thread.subject.rows(thread.num_prefilled, [tuple(thread.committed)])
        token, share = likeliest(expected[None, :VOCAB_SIZE])
        assert again[0].guess.token == token.item()
        assert again[0].guess.raw == pytest.approx(share.item(), abs=10 * ATOL)


def test_under_rejection_no_step_is_launched_before_the_last_is_read() -> None:
    thread = OnThread("KVCache", chains=True, num_prefilled=3, settled=5, temperature=1.0, acceptance="rejection")
    for max_steps in range(1, 5):
        found = thread.draft((), 5, max_steps)
        # The last choice is not in the cache.
        assert len(thread.cached_tokens) == 5 + len(found) - 1


@sweep("most", [1, 5])
def test_a_draw_from_few_tokens_comes_with_the_probabilities_of_the_likeliest(most: int) -> None:
    thread = OnThread("KVCache", chains=False, num_prefilled=3, settled=5, temperature=1.0, acceptance="rejection")
    (whole,) = thread.draft((), 0, 1)
    thread.steps = attrs.evolve(thread.steps, max_drawn_from=most)
    (cut,) = thread.draft((), 0, 1)
    choice, probs = cut.guess, whole.guess.probs
    assert isinstance(probs, mx.array)
    assert isinstance(choice.probs, Sparse)
    likely = mx.argsort(-probs)[:most].tolist()
    assert choice.token in likely
    assert sorted(choice.probs.tokens.tolist()) == sorted(likely)
    expected = probs[choice.probs.tokens] / probs[choice.probs.tokens].sum()
    assert choice.probs.values.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@sweep("settings, may_be_cut", [({}, True), (SEEDED, True), ({"temperature": 1.0, "acceptance": "rejection"}, False)])
async def test_where_tokens_are_drawn_no_proposal_is_cut_for_what_was_drafted_after_them(
    settings: dict[str, Any], may_be_cut: bool, autojump_clock: Any
) -> None:
    target = hashed("target", 6.0)
    async with simulated(
        ScriptedModel(target), ScriptedModel(hashed("draft", 1.0, near=target)), price=priced(draft=0.25, verify=8.0)
    ) as simulation:
        await text_of(simulation, PROMPT, max_tokens=40, lookahead="auto", **settings)
    received = simulation.target_worker.sessions.received[0]
    proposals = [message for message in received if isinstance(message, Proposal) and message.tokens]
    assert proposals
    # The target cuts a proposal by how likely each of its tokens is reached.
    assert [len(each.reach) for each in proposals] == [len(each.tokens) * may_be_cut for each in proposals]


# --- several texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.8, "acceptance": "match"}, {"temperature": 0.8, "acceptance": "match", "top_k": 5}]
)
@pytest.mark.parametrize("width", [VOCAB_SIZE, VOCAB_SIZE - 3, VOCAB_SIZE + 8])
def test_guesses_of_several_texts_are_those_of_each_alone(asked: dict[str, Any], width: int) -> None:
    steps = []
    for seed in range(4):
        opened = Open(seed, tuple(TEXT), Settings(**asked), seed, frozenset())
        sequence: Any = object()
        session = Session(opened, trio.open_memory_channel(0)[0])
        steps.append(DraftSteps(sequence, 1, session, VOCAB_SIZE, lambda: 0.0, False))
    assert len({each.kind for each in steps}) == 1
    logits = [3 * mx.random.normal((1, width), key=mx.random.key(seed)) for seed in range(4)]
    together = guesses_together(steps, logits, [9, 5, 7, 20])
    for each, row, position, guess in zip(steps, logits, [9, 5, 7, 20], together.read(), strict=True):
        assert [guess] == each.guess(row, position, 0, NO_HISTORY).read()
    logits[2][0, 1] = mx.nan
    logit_check = guesses_together(steps, logits, [9, 5, 7, 20]).logit_check
    with pytest.raises(NotANumberError, match="position 7"):
        logit_check.check(2, 7, "draft")
    for row in (0, 1, 3):
        logit_check.check(row, 0, "draft")
