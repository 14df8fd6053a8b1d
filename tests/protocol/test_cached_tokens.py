"""Cached tokens, compared with a model that is simple enough to be evidently right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sweeps import sweep

from protocol.cached_tokens import CachedTokens, FeedPlan
from protocol.errors import ProtocolError

# Few ids, so that texts agree by chance as often as they differ.
TOKENS = st.integers(0, 1)


def holding(*tokens: int) -> CachedTokens:
    held = CachedTokens()
    held.follow(FeedPlan(0, tokens))
    return held


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- plans ----------------------------------------------------------------------------------------


@sweep(("committed", "beyond"), [([], ()), ([1], ()), ([], (1,)), ([1, 2], (3,))])
def test_more_logits_than_tokens_are_an_error(committed, beyond):
    total = len(committed) + len(beyond)
    with pytest.raises(ProtocolError, match=f"cannot have {total + 1} rows of logits from {total} tokens"):
        CachedTokens().plan(committed, beyond, num_logits=total + 1)


class Counted(list):
    """A list that counts how many of its items were read one by one."""

    num_looks = 0

    def __getitem__(self, index):
        self.num_looks += not isinstance(index, slice)
        return super().__getitem__(index)


def test_a_plan_looks_at_what_is_new_and_not_at_the_whole_text():
    held, committed = CachedTokens(), Counted(range(1000))
    held.follow(held.plan(committed))
    held.plan(committed)  # compares the tokens that were fed, once
    committed.num_looks = 0
    for token in range(1000, 1100):
        committed.append(token)
        held.follow(held.plan(committed, (7, 7, 7)))
    # One comparison finds that the drafted token differs; one is for the token before it, known to agree from then on.
    assert committed.num_looks <= 2 * 100


def test_a_plan_that_is_followed_late_says_what_is_cached_now():
    held = holding(1, 2)
    early = held.plan([1], (9,))
    held.plan([1, 2])
    held.follow(early)
    assert held.plan([1, 2, 3]) == FeedPlan(1, (2, 3))


# --- any history ----------------------------------------------------------------------------------


class AnyHistory(RuleBasedStateMachine):
    """Plans (carried out or not), rewinds, and a committed text that grows, in any order."""

    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=6))
    def open(self, prompt):
        self.committed = prompt
        self.held = CachedTokens()
        self.model: list[int] = []
        # Plans whose jobs have not run yet, each with the cached tokens after it.
        self.under_way: list[tuple[FeedPlan, list[int]]] = []

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=4))
    def commit(self, tokens):
        self.committed += tokens

    @rule(num_drafted=st.integers(1, 4))
    def commit_what_is_held(self, num_drafted):
        """Commit cached tokens, as when drafted tokens are accepted."""
        if self.model[: len(self.committed)] == self.committed:
            self.committed += self.model[len(self.committed) :][:num_drafted]

    @rule(
        beyond=st.lists(TOKENS, max_size=5),
        num_logits=st.integers(0, 4),
        is_followed=st.booleans(),
        fed_besides=st.lists(TOKENS, max_size=3),
    )
    def plan(self, beyond, num_logits, is_followed, fed_besides):
        text = self.committed + beyond
        num_logits = min(num_logits, len(text))
        plan = self.held.plan(self.committed, tuple(beyond), num_logits=num_logits)
        assert plan.keep == min(common_prefix(self.model, text), len(text) - num_logits)
        assert self.model[: plan.keep] + list(plan.feed) == text
        if is_followed:
            # The target feeds a proposal behind the plan.
            self.held.follow(FeedPlan(plan.keep, plan.feed + tuple(fed_besides)))
            self.model = text + fed_besides
            self.under_way = []
        else:
            self.under_way.append((plan, text))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def follow_late(self, data):
        """Follow a plan late, as when text was committed, and planned for, while the job was running."""
        plan, self.model = data.draw(st.sampled_from(self.under_way))
        self.held.follow(plan)
        self.under_way = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewind(self, data):
        length = data.draw(st.integers(0, len(self.model)))
        self.held.rewind(length)
        self.model = self.model[:length]
        self.under_way = []

    @rule()
    def rewind_as_planned_and_feed_nothing(self):
        """Rewind only, as when drafting turns out to be impossible."""
        plan = self.held.plan(self.committed, num_logits=0)
        self.held.rewind(plan.keep)
        self.model = self.model[: plan.keep]
        self.under_way = []

    @invariant()
    def holds_what_was_asked_for(self):
        assert self.held.tokens == tuple(self.model)
        assert len(self.held) == len(self.model)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30)
