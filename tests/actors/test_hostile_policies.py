"""Whatever a lookahead policy decides, the text is the target's.

Under the rejection rule, a policy may use everything that is known before a token is drawn, and the distribution that
it is drawn from. The policies here use that knowledge in extreme ways, and with arbitrary rests. The distribution of a
long text shows whether they do harm. Another policy uses what it may not, which shows that the tests would detect it.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from distributions import DRAFT, PROMPT, SIGNIFICANCE, TARGET, pooled_p_value, random_price
from scripted import (
    CACHES,
    ScriptedModel,
    agreeing,
    always,
    continuation,
    hashed,
    markov,
    run,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep
from trained_scripts import RecordingTarget, TrainedDraft

from actors.drafters.drafter import policy_by_settings
from protocol.lookahead_policy import EMPTY_BUDGET, DraftBudget, Policy, PolicyView
from protocol.lookahead_tree import Node
from protocol.prices import Prices
from protocol.settings import Settings

# Near the target, so that much of a proposal is accepted and the policy's choices matter.
NEAR = tuple(tuple(0.6 * p + 0.4 * q for p, q in zip(*rows, strict=True)) for rows in zip(TARGET, DRAFT, strict=True))
# Of a trained drafter that reads more than one hidden state of its own.
STALE = tuple(tuple(0.2 * p + 0.8 * q for p, q in zip(*rows, strict=True)) for rows in zip(TARGET, DRAFT, strict=True))
DEEPEST = 4
NUM_TOKENS = 1500

Allows = Callable[[PolicyView, Node], bool]


@attrs.define
class Hostile(Policy):
    """A policy that drafts, waits and rests at random, and proposes only what it allows.

    Attributes:
        allows: whether the successor of a node may be proposed; asked before that is drawn.
        admits: whether a node that is drawn may be proposed.
    """

    allows: Allows = lambda view, node: True
    admits: Callable[[Node], bool] = lambda node: True
    rests: bool = True
    works_ahead: bool = True
    num_held_back: int = 0
    longest_run: int = 0
    _dice: random.Random = attrs.field(factory=lambda: random.Random(0))
    _allowed: dict[int, bool] = attrs.field(factory=dict)

    def proposal(self, view: PolicyView) -> list[Node] | None:
        if self._open(view) and self._dice.random() < 0.4:
            return None
        chain = view.tree.chain()[: view.max_proposal]
        nodes = []
        for node in chain:
            if not (self._allowed[node.parent.trail] and self.admits(node)):
                self.num_held_back += 1
                break
            nodes.append(node)
        return nodes

    def expansion(self, view: PolicyView) -> Node | None:
        nodes = self._open(view)
        if not nodes or (view.verdict_due_s is not None and self._dice.random() < 0.1):
            return None
        node = self._dice.choice(nodes)
        # Decided before the token is drawn, and only once.
        self._allowed.setdefault(node.trail, self.allows(view, node))
        return node

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        return EMPTY_BUDGET

    def _open(self, view: PolicyView) -> list[Node]:
        return [n for n in view.tree.frontier() if view.tree.depth(n) < DEEPEST and view.is_open(n)]

    def should_rest(self) -> bool:
        return self.rests and self._dice.random() < 0.02

    def should_rest_on(self, num_behind: int, num_rounds: int) -> bool:
        return self._dice.random() < 0.3


# Knowledge that a policy may use.
LEGAL: dict[str, tuple[Allows, Callable[[Node], bool]]] = {
    "the text before": (lambda view, node: node.trail % 2 == 0, lambda node: True),
    "the time": (lambda view, node: int(view.now_s * 2) % 3 == 0, lambda node: True),
    "whose turn it is": (lambda view, node: view.verdict_due_s is None, lambda node: True),
    "its confidence": (lambda view, node: True, lambda node: node.guess.raw > 0.28),
}


def goes_by_the_token(node: Node) -> bool:
    """What a policy may not do."""
    return node.token in (0, 2)


def sampled(policy: Hostile, *, report_delay: float | None = None, is_trained: bool = False) -> list[int]:
    """A long text under the rejection rule."""
    near, stale = markov(NEAR), markov(STALE)

    async def main() -> list[int]:
        kind, drafting = ScriptedModel, ScriptedModel(near, vocab_size=4)
        if is_trained:
            kind = RecordingTarget
            drafting = TrainedDraft(lambda text, staleness: (stale if staleness > 1 else near)(text), vocab_size=4)
        async with simulated(
            kind(markov(TARGET), vocab_size=4),
            drafting,
            price=random_price(1),
            draft_price=lambda job: 0.25 + (len(drafting.sequences[0].fed) * 7 % 11 if drafting.sequences else 0) / 8,
            make_policy=lambda settings, prices: policy,
            report_delay=None if report_delay is None else lambda: report_delay,
        ) as simulation:
            asked = {"temperature": 1.0, "acceptance": "rejection", "seed": 1}
            text = await text_of(simulation, PROMPT, max_tokens=NUM_TOKENS, **asked)
            policy.longest_run = max(len(done) for done in simulation.draft_worker.runs)
            return text

    return run(main)


# Keys by which the tokens of a text are grouped: a bias may exist at each position and vanish over all of them.
APART: tuple[Callable[[int, list[int]], Any], ...] = (
    lambda i, text: None,
    lambda i, text: i % 2,
    lambda i, text: text[i - 2],
    lambda i, text: (i % 2, text[i - 2]),
)


def likelihood(text: Sequence[int]) -> float:
    """The p-value of a text under the target's distribution: the lowest of several tests."""
    whole = PROMPT + list(text)
    assert [pair for pair in itertools.pairwise(whole) if TARGET[pair[0]][pair[1]] == 0] == []
    p_values = []
    for apart in APART:
        after: dict[Any, Counter[int]] = {}
        for i in range(2, len(whole)):
            after.setdefault((whole[i - 1], apart(i, whole)), Counter())[whole[i]] += 1
        samples = [(seen, dict(enumerate(TARGET[last]))) for (last, _), seen in after.items() if seen.total() >= 20]
        p_values.append(pooled_p_value(samples))
    return len(p_values) * min(p_values)


@pytest.mark.slow
@pytest.mark.parametrize("what", LEGAL)
def test_a_policy_may_go_by_all_that_is_known_before_a_token_is_drawn(what: str) -> None:
    allows, admits = LEGAL[what]
    policy = Hostile(allows, admits)
    assert likelihood(sampled(policy)) > SIGNIFICANCE
    assert policy.num_held_back > 100


@pytest.mark.slow
def test_a_policy_that_knows_the_token_shows_in_the_text() -> None:
    # Rests would leave fewer drafts.
    assert likelihood(sampled(Hostile(admits=goes_by_the_token, rests=False))) < SIGNIFICANCE


@attrs.define
class Straying(Hostile):
    """After a step it continues by itself for a random number of steps, while the drafter is confident."""

    min_confidence: float = 0.0

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        def calibrate(copy_kind: int | None, raw: float, staleness: int) -> float:
            return 1.0 if raw > 0.28 else 0.5

        return DraftBudget(self._dice.randrange(5), 1.0, (self.min_confidence,), calibrate=calibrate)

    def proposal(self, view: PolicyView) -> list[Node] | None:
        # Where it continued by itself, it allows what comes.
        for node in view.tree.chain():
            self._allowed.setdefault(node.parent.trail, True)
        return super().proposal(view)


@pytest.mark.slow
@pytest.mark.parametrize(("min_confidence", "report_delay"), [(0.0, None), (0.7, 0.25), (0.0, 2.0)])
def test_a_drafter_may_go_on_by_how_sure_it_was(min_confidence: float, report_delay: float | None) -> None:
    policy = Straying(min_confidence=min_confidence)
    assert likelihood(sampled(policy, report_delay=report_delay)) > SIGNIFICANCE
    assert policy.longest_run > 1


@pytest.mark.slow
def test_a_trained_drafter_may_propose_what_it_drafted_on_hidden_states_of_its_own() -> None:
    assert likelihood(sampled(Hostile(), is_trained=True)) > SIGNIFICANCE


# --- the other rules ------------------------------------------------------------------------------

HASHED_TARGET = hashed("target", 6.0)
HASHED_DRAFT = hashed("draft", 3.0, near=HASHED_TARGET)


async def text_under(
    policy: Hostile | None, script: Any, of_draft: Any, *, undo: Any = always, keeps_states: bool = False, **more: Any
) -> list[int]:
    """The text under a policy; without a policy, the target's alone."""
    target = ScriptedModel(script, undo=undo, keeps_states=keeps_states)
    draft = None if policy is None else ScriptedModel(of_draft, undo=undo, keeps_states=keeps_states)
    async with simulated(
        target, draft, price=random_price(3), draft_price=random_price(4), make_policy=lambda settings, prices: policy
    ) as simulation:
        return await text_of(simulation, [5, 6, 7], max_tokens=60, **more)


POLICIES = {**LEGAL, "the token": (lambda view, node: True, goes_by_the_token)}
# Each policy with a cache, and the one that goes by the tokens with all.
CASES = [
    *zip([what for what in LEGAL if what != "its confidence"], itertools.cycle(CACHES)),
    *(("the token", caches) for caches in CACHES),
]


@sweep("what, caches", CASES)
def test_the_greedy_text_does_not_depend_on_the_policy(what: str, caches: str) -> None:
    policy = Hostile(*POLICIES[what])
    assert run(lambda: text_under(policy, truthful, agreeing(0.6), **CACHES[caches])) == continuation([5, 6, 7], 60)


@pytest.mark.slow
def test_under_match_a_seeds_text_does_not_depend_on_the_policy() -> None:
    settings = {"temperature": 0.8, "seed": 11, "acceptance": "match"}
    alone = run(lambda: text_under(None, HASHED_TARGET, HASHED_DRAFT, **settings))
    for what, caches in CASES:
        policy, asked = Hostile(*POLICIES[what]), {**CACHES[caches], **settings}
        text = run(lambda p=policy, a=asked: text_under(p, HASHED_TARGET, HASHED_DRAFT, **a))
        assert text == alone, (what, caches)


# --- neighbours in shared passes ------------------------------------------------------------------


@pytest.mark.slow
def test_neighbours_with_their_own_draws_leave_shared_texts_alone() -> None:
    """What a neighbour drew decides when passes begin, how wide they are, and what is left out of a proposal."""
    num_tokens = 2 * NUM_TOKENS // 3
    neighbours = [Hostile(admits=goes_by_the_token, dice=random.Random(n)) for n in range(2)]
    free = iter(neighbours)

    def make_policy(settings: Settings, prices: Prices) -> Policy:
        return policy_by_settings(settings, prices) if settings.max_tokens == num_tokens else next(free)

    async def main() -> tuple[list[int], float]:
        target, draft = (ScriptedModel(markov(table), vocab_size=4) for table in (TARGET, NEAR))
        settings: dict[str, Any] = {"temperature": 1.0, "acceptance": "rejection"}
        prices = {"price": random_price(1), "draft_price": random_price(2, 0.1)}
        async with simulated(target, draft, **prices, make_policy=make_policy) as simulation:
            async with trio.open_nursery() as nursery:
                for seed in (5, 6):
                    neighbour = partial(text_of, simulation, PROMPT, max_tokens=10 * num_tokens, seed=seed, **settings)
                    nursery.start_soon(neighbour)
                text = await text_of(simulation, PROMPT, max_tokens=num_tokens, seed=1, **settings)
                nursery.cancel_scope.cancel()
            passes = [span for span in simulation.spans("target", "verify") if 0 in span.sessions or 2 in span.sessions]
            return text, sum(len(span.sessions) > 1 for span in passes) / len(passes)

    text, share_of_shared = run(main)
    assert likelihood(text) > SIGNIFICANCE
    assert share_of_shared > 0.5
    assert min(neighbour.num_held_back for neighbour in neighbours) > 50
