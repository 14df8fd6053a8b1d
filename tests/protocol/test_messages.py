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

every_message = sweep("message", EVERY_MESSAGE)


@every_message
def test_a_message_cannot_be_changed(message):
    for field in attrs.fields(type(message)):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(message, field.name, getattr(message, field.name))


@every_message
def test_a_message_names_its_session_and_equals_its_copy(message):
    assert message.session == 1
    assert attrs.evolve(message) == message
    assert hash(attrs.evolve(message)) == hash(message)
    assert attrs.evolve(message, session=2) != message


@every_message
def test_a_session_is_numbered_from_zero(message):
    assert attrs.evolve(message, session=0).session == 0
    with pytest.raises(ValueError, match="session"):
        attrs.evolve(message, session=-1)


@pytest.mark.parametrize("message", [PROPOSAL, VERDICT], ids=["Proposal", "Verdict"])
def test_a_round_is_numbered_from_zero_and_starts_after_a_prompt(message):
    assert attrs.evolve(message, round=0, start=1).start == 1
    for changes in ({"round": -1}, {"start": 0}, {"start": -3}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            attrs.evolve(message, **changes)


# --- Open -----------------------------------------------------------------------------------------


def test_a_session_is_drafted_and_unbounded_unless_it_says_otherwise():
    opened = Open(session=0, prompt=(1,), settings=Settings(), seed=0, stop_tokens=frozenset())
    assert opened.drafted
    assert opened.context_length is None


def test_a_session_needs_a_prompt():
    with pytest.raises(ValueError, match="a prompt of at least one token"):
        attrs.evolve(OPEN, prompt=())


@sweep("value", [[5, 6], "56", 5, None, (5, -1), (5, 6.0), ("5",)])
def test_a_prompt_is_a_tuple_of_ids(value):
    with pytest.raises(ValueError, match="prompt must be a tuple of token ids >= 0"):
        attrs.evolve(OPEN, prompt=value)


@pytest.mark.parametrize("changes", [{"seed": -1}, {"context_length": 0}, {"context_length": -1}])
def test_a_seed_or_a_context_below_its_bound_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        attrs.evolve(OPEN, **changes)


# --- Proposal -------------------------------------------------------------------------------------


def test_a_proposal_may_be_of_nothing():
    assert attrs.evolve(PROPOSAL, tokens=()).tokens == ()


@sweep("value", [[7, 8], "78", None, (7, -1), (7.0,)])
def test_proposed_tokens_are_a_tuple_of_ids(value):
    with pytest.raises(ValueError, match="tokens must be a tuple of token ids >= 0"):
        attrs.evolve(PROPOSAL, tokens=value)


def test_a_proposal_has_a_distribution_for_each_token_or_none_at_all():
    probs = mx.array([0.5, 0.5])
    assert attrs.evolve(PROPOSAL, probs=(probs, probs)).probs == (probs, probs)
    assert attrs.evolve(PROPOSAL, probs=()).probs == ()
    assert attrs.evolve(PROPOSAL, probs=(None, probs)).probs == (None, probs)
    for num_probs in (1, 3):
        with pytest.raises(ValueError, match=f"2 tokens need as many distributions, got {num_probs}"):
            attrs.evolve(PROPOSAL, probs=(probs,) * num_probs)
        with pytest.raises(ValueError, match=f"2 tokens need as many distributions, got {num_probs}"):
            attrs.evolve(PROPOSAL, probs=(None,) * num_probs)


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


@pytest.mark.parametrize("changes", [{"num_accepted": -1}, {"token": -1}])
def test_a_verdict_has_no_negative_numbers(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        attrs.evolve(VERDICT, **changes)
