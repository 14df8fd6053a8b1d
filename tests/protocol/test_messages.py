"""Messages are values: frozen, compared by their fields, and rejected if their fields make no sense."""

from __future__ import annotations

import attrs
import mlx.core as mx
import pytest
from sweeps import sweep

from protocol.messages import Close, Open, Proposal, Verdict, Withdraw
from protocol.settings import Settings

OPEN = Open(session=1, prompt=(5, 6), settings=Settings(), seed=3, stop_tokens=frozenset({2}), context_length=64)
PROPOSAL = Proposal(session=1, round=0, start=2, tokens=(7, 8))
VERDICT = Verdict(session=1, round=0, start=2, num_accepted=1, token=9)
EVERY_MESSAGE = [OPEN, PROPOSAL, VERDICT, Withdraw(1), Close(1)]


@sweep(
    ("message", "name", "least", "wrong"),
    [
        *((message, "session", 0, (-1,)) for message in EVERY_MESSAGE),
        *((message, "round", 0, (-1,)) for message in (PROPOSAL, VERDICT)),
        *((message, "start", 1, (0, -3)) for message in (PROPOSAL, VERDICT)),  # after a prompt
        (OPEN, "seed", 0, (-1,)),
        (OPEN, "context_length", 1, (0, -1)),
        (VERDICT, "num_accepted", 0, (-1,)),
        (VERDICT, "token", 0, (-1,)),
    ],
)
def test_a_number_below_its_bound_is_refused(message, name, least, wrong):
    assert getattr(attrs.evolve(message, **{name: least}), name) == least
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            attrs.evolve(message, **{name: value})


@sweep(("message", "name"), [(OPEN, "prompt"), (PROPOSAL, "tokens")])
@sweep("value", [[5, 6], "56", 5, None, (5, -1), (5, 6.0), ("5",)])
def test_tokens_are_a_tuple_of_ids(message, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a tuple of token ids >= 0"):
        attrs.evolve(message, **{name: value})


# --- Open -----------------------------------------------------------------------------------------


def test_a_session_needs_a_prompt_and_is_drafted_and_unbounded_unless_it_says_otherwise():
    opened = Open(session=0, prompt=(1,), settings=Settings(), seed=0, stop_tokens=frozenset())
    assert (opened.drafted, opened.context_length) == (True, None)
    with pytest.raises(ValueError, match="a prompt of at least one token"):
        attrs.evolve(OPEN, prompt=())


# --- Proposal -------------------------------------------------------------------------------------


def test_a_proposal_has_a_value_for_each_token_or_none_at_all():
    probs = mx.array([0.5, 0.5])
    for fitting in ((probs, probs), (), (None, probs)):
        assert attrs.evolve(PROPOSAL, probs=fitting).probs == fitting
    for name, value in (("probs", probs), ("probs", None), ("reach", 0.5), ("drafters", "copy")):
        for num_values in (1, 3):
            with pytest.raises(ValueError, match=f"{name} must have 2 values, one for each token, got {num_values}"):
                attrs.evolve(PROPOSAL, **{name: (value,) * num_values})


def test_as_many_tokens_are_stale_as_there_are_at_most():
    stale = attrs.evolve(PROPOSAL, num_stale=2)
    assert [stale.cut(length).num_stale for length in range(3)] == [0, 1, 2]
    for num_stale in (-1, 3):
        with pytest.raises(ValueError, match="stale"):
            attrs.evolve(PROPOSAL, num_stale=num_stale)


def test_distributions_have_no_part_in_comparing_and_printing():
    # Comparing arrays would be an MLX computation on the thread that compares.
    with_probs = attrs.evolve(PROPOSAL, probs=(mx.array([0.5, 0.5]),) * 2)
    assert with_probs == PROPOSAL
    assert hash(with_probs) == hash(PROPOSAL)
    assert repr(with_probs) == repr(PROPOSAL)


# --- Verdict --------------------------------------------------------------------------------------


def test_a_verdict_commits_something():
    assert attrs.evolve(VERDICT, num_accepted=1, token=None).token is None
    assert attrs.evolve(VERDICT, num_accepted=0, token=0).token == 0
    with pytest.raises(ValueError, match="at least one token"):
        attrs.evolve(VERDICT, num_accepted=0, token=None)
