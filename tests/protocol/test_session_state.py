"""Session state: the table by enumeration, commits against a naive model, and two copies over an unreliable channel."""

from __future__ import annotations

import itertools
from collections import deque

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sweeps import sweep

import protocol.session_state
from protocol.errors import ProtocolError
from protocol.messages import Close, Open, Overdue, Proposal, Rest, Rested, Verdict, Withdraw
from protocol.session_state import TRANSITIONS, Commit, SessionPhase, SessionState
from protocol.settings import Settings
from protocol.stop_strings import Stop

SESSION = 7
PROMPT = (1, 2, 3)


def opened(*, prompt=PROMPT, max_tokens=None, stop_tokens=(), context_length=None, drafted=True, **begins) -> Open:
    return Open(
        session=SESSION,
        prompt=prompt,
        settings=Settings(max_tokens=max_tokens),
        seed=0,
        stop_tokens=frozenset(stop_tokens),
        context_length=context_length,
        drafted=drafted,
        **begins,
    )


def new_state(**changes) -> SessionState:
    return SessionState(opened(**changes))


def proposal(of: SessionState, *tokens: int) -> Proposal:
    """A proposal for the round that is under way."""
    return Proposal(SESSION, of.round, of.next_position, tokens)


def verdict(of: SessionState, num_accepted: int, token: int | None, *, single_step: bool = False) -> Verdict:
    """A verdict on the round that is under way."""
    return Verdict(SESSION, of.round, of.next_position, num_accepted, token, single_step)


def a_round(of: SessionState, proposed: tuple[int, ...], num_accepted: int, token: int | None, **more) -> Commit:
    """A whole round; returns its commit."""
    assert of.propose(proposal(of, *proposed))
    commit = of.apply(verdict(of, num_accepted, token, **more))
    assert commit is not None
    return commit


def snapshot(of: SessionState):
    """A copy's state, except the count of stale messages."""
    return of.phase, of.round, tuple(of.committed), of.outstanding, of.finish_reason, of.rests_until


def in_state(state: SessionPhase) -> SessionState:
    of = new_state()
    a_round(of, (4, 5), 2, 6)
    match state:
        case SessionPhase.VERIFYING:
            of.propose(proposal(of, 8, 9))
        case SessionPhase.RESTING:
            of.rest(Rest(SESSION, of.round + 2))
        case SessionPhase.UNDRAFTED:
            of.withdraw(Withdraw(SESSION))
        case SessionPhase.CLOSED:
            of.close(Close(SESSION))
    assert of.phase is state
    return of


# --- the table ------------------------------------------------------------------------------------

EVENTS = {
    Proposal: lambda of: of.propose(proposal(of, 8, 9)),
    Verdict: lambda of: of.apply(verdict(of, 0, 5)),
    Rested: lambda of: of.follow(Rested(SESSION, of.round, of.next_position, (5,))),
    Rest: lambda of: of.rest(Rest(SESSION, max(of.round, of.rests_until) + 2)),
    Overdue: lambda of: of.rest(Overdue(SESSION, max(of.round, of.rests_until) + 2)),
    Withdraw: lambda of: of.withdraw(Withdraw(SESSION)),
    Close: lambda of: of.close(Close(SESSION)),
}

# Messages that are not in the table and no errors, with the value that each returns and how often it is counted.
DROPPED = {
    (SessionPhase.VERIFYING, Proposal): (False, 1),
    (SessionPhase.RESTING, Proposal): (False, 1),
    (SessionPhase.UNDRAFTED, Proposal): (False, 1),
    (SessionPhase.CLOSED, Proposal): (False, 1),
    (SessionPhase.CLOSED, Verdict): (None, 1),
    (SessionPhase.CLOSED, Rested): (False, 1),
    (SessionPhase.UNDRAFTED, Rest): (False, 0),
    (SessionPhase.CLOSED, Rest): (False, 0),
    (SessionPhase.UNDRAFTED, Overdue): (False, 0),
    (SessionPhase.CLOSED, Overdue): (False, 0),
    (SessionPhase.UNDRAFTED, Withdraw): (None, 0),
    (SessionPhase.CLOSED, Withdraw): (None, 0),
    (SessionPhase.CLOSED, Close): (None, 0),
}

ERRORS = {
    (SessionPhase.PROPOSING, Verdict),
    (SessionPhase.PROPOSING, Rested),
    (SessionPhase.VERIFYING, Rested),
    (SessionPhase.VERIFYING, Rest),
}


@sweep(("state", "event"), itertools.product(SessionPhase, EVENTS))
def test_a_message_moves_as_the_table_says_is_dropped_or_is_an_error(state, event):
    of = in_state(state)
    before = snapshot(of)
    if (state, event) in TRANSITIONS:
        assert EVENTS[event](of) is not False
        assert of.phase is TRANSITIONS[state, event]
        assert of.num_stale == 0
        return
    if (state, event) in ERRORS:
        with pytest.raises(ProtocolError, match=f"is {state.value}"):
            EVENTS[event](of)
    else:
        answer, count = DROPPED[state, event]
        assert EVENTS[event](of) is answer
        assert of.num_stale == count
    assert snapshot(of) == before


def test_the_docstring_draws_the_table_as_it_is():
    # VERIFYING   Verdict  PROPOSING   …
    drawn = set()
    for line in (protocol.session_state.__doc__ or "").splitlines():
        match line.split():
            case [state, event, following, *_] if (
                state in SessionPhase.__members__ and following in SessionPhase.__members__
            ):
                drawn.add((SessionPhase[state], event, SessionPhase[following]))
            case ["any", "Close", "CLOSED"]:
                drawn |= {
                    (state, "Close", SessionPhase.CLOSED) for state in SessionPhase if state is not SessionPhase.CLOSED
                }
    assert drawn == {(state, event.__name__, following) for (state, event), following in TRANSITIONS.items()}


# --- messages that must not occur -----------------------------------------------------------------


HANDLERS = (
    (SessionState.propose, Proposal(SESSION, 1, len(PROMPT) + 3, (8,))),
    (SessionState.apply, Verdict(SESSION, 1, len(PROMPT) + 3, 0, 5)),
)


@sweep("state", list(SessionPhase))
@sweep("changes", [{"session": SESSION + 1}, {"round": 2}, {"session": SESSION + 1, "round": 0}])
def test_another_sessions_or_a_later_rounds_message_is_an_error_while_there_are_rounds(state, changes):
    for handler, message in HANDLERS:
        of = in_state(state)
        before = snapshot(of)
        if state is SessionPhase.CLOSED and "session" not in changes:
            continue
        with pytest.raises(ProtocolError, match="session 7"):
            handler(of, attrs.evolve(message, **changes))
        assert snapshot(of) == before
        assert of.num_stale == 0


@sweep("changes", [{"session": SESSION + 1}, {"start": 5}, {"start": 7}, {"round": 3}])
def test_what_was_committed_in_a_rest_is_of_this_rest_and_goes_on_here(changes):
    of = in_state(SessionPhase.RESTING)  # until round 3
    rested = Rested(SESSION, 2, of.next_position, (5, 6))
    with pytest.raises(ProtocolError, match="rests until 3"):
        of.follow(attrs.evolve(rested, **changes))
    assert of.follow(rested)
    assert (of.phase, of.round, of.committed[-2:]) == (SessionPhase.PROPOSING, 3, [5, 6])


@sweep("off_by", [-1, 1])
@sweep(
    ("state", "handler", "message"), [(SessionPhase.PROPOSING, *HANDLERS[0]), (SessionPhase.VERIFYING, *HANDLERS[1])]
)
def test_a_message_from_another_position_is_an_error(state, handler, message, off_by):
    with pytest.raises(ProtocolError, match="round 1 at position 6"):
        handler(in_state(state), attrs.evolve(message, start=message.start + off_by))


@sweep("proposed", [None, (), (8,), (8, 9)])
def test_a_verdict_that_accepts_more_than_was_proposed_is_an_error(proposed):
    of = new_state(drafted=proposed is not None)
    if proposed is not None:
        of.propose(proposal(of, *proposed))
    most = len(proposed or ())
    with pytest.raises(ProtocolError, match=f"accepts more than the {most} tokens"):
        of.apply(verdict(of, most + 1, 5))
    assert of.committed == list(PROMPT)


# --- the drafter rests ----------------------------------------------------------------------------


@sweep("drafted, first, second", [(True, "RESTING", "PROPOSING"), (False, "UNDRAFTED", "UNDRAFTED")])
def test_a_session_can_begin_with_a_round_of_the_target(drafted, first, second):
    of = new_state(target_begins=True, drafted=drafted)
    assert of.phase is SessionPhase[first]
    commit = of.apply(Verdict(SESSION, 0, len(PROMPT), 0, 5))
    assert commit is not None
    assert commit.resting == drafted
    assert (of.phase, of.round) == (SessionPhase[second], 1)


# --- the end of the text --------------------------------------------------------------------------


@given(
    proposed=st.lists(st.integers(0, 4), max_size=5).map(tuple),
    accepts=st.integers(0, 5),
    token=st.none() | st.integers(0, 4),
    stop_tokens=st.frozensets(st.integers(0, 4), max_size=2),
    max_tokens=st.none() | st.integers(1, 7),
    room=st.none() | st.integers(1, 7),
    single_step=st.booleans(),
)
@settings(max_examples=300)
def test_a_commit_is_what_reading_token_by_token_would_give(
    proposed, accepts, token, stop_tokens, max_tokens, room, single_step
):
    # A single step judges one of the tokens that were proposed.
    judged = proposed[:1] if single_step else proposed
    num_accepted = min(accepts, len(judged))
    if num_accepted == 0 and token is None:
        token = 0
    context_length = None if room is None else len(PROMPT) + room
    of = new_state(stop_tokens=stop_tokens, max_tokens=max_tokens, context_length=context_length)
    commit = a_round(of, proposed, num_accepted, token, single_step=single_step)

    read: list[int] = []
    finish_reason = None
    own = [] if token is None else [token]
    for following in [*proposed[:num_accepted], *own]:
        read.append(following)
        if following in stop_tokens:
            finish_reason = "stop"
        elif len(read) in (max_tokens, room):
            finish_reason = "length"
        if finish_reason:
            break
    own_is_read = len(read) > num_accepted
    assert commit == Commit(
        SESSION,
        round=0,
        start=len(PROMPT),
        tokens=tuple(read),
        num_from_draft=min(len(read), num_accepted),
        num_rejected=len(judged) - num_accepted if own_is_read else 0,
        bonus=own_is_read and 0 < len(judged) == num_accepted,
        single_step=single_step,
        finish_reason=finish_reason,
    )


# --- the end of the text: stop strings and stop tokens --------------------------------------------


@given(
    proposed=st.lists(st.integers(0, 9), max_size=5, unique=True).map(tuple),
    accepts=st.integers(0, 5),
    own=st.booleans(),
    single_step=st.booleans(),
    data=st.data(),
)
@settings(max_examples=120)
def test_a_stop_string_cuts_as_a_stop_token_in_its_last_place_does(proposed, accepts, own, single_step, data):
    num_accepted = min(accepts, 1 if single_step else 5, len(proposed))
    token = 10 if own or num_accepted == 0 else None
    tokens = [*proposed[:num_accepted], *([] if token is None else [token])]
    num_tokens = data.draw(st.integers(1, len(tokens)))

    by_token = new_state(stop_tokens=[tokens[num_tokens - 1]])
    expected = a_round(by_token, proposed, num_accepted, token, single_step=single_step)
    by_string = new_state()
    by_string.propose(proposal(by_string, *proposed))
    said = attrs.evolve(
        verdict(by_string, num_accepted, token, single_step=single_step), stop=Stop("the end", num_tokens)
    )
    assert by_string.apply(said) == attrs.evolve(expected, stop_reason="the end")
    assert snapshot(by_string) == snapshot(by_token)
    assert by_string.phase is SessionPhase.CLOSED


@pytest.mark.parametrize(("max_tokens", "stop_tokens", "most"), [(None, (), 3), (2, (), 2), (None, (4,), 1)])
def test_a_stop_string_beyond_what_is_committed_is_an_error(max_tokens, stop_tokens, most):
    of = new_state(max_tokens=max_tokens, stop_tokens=stop_tokens)
    of.propose(proposal(of, 4, 5))
    before = snapshot(of)
    with pytest.raises(ProtocolError, match=f"beyond the {most} tokens"):
        of.apply(attrs.evolve(verdict(of, 2, 6), stop=Stop("the end", most + 1)))
    assert snapshot(of) == before


@sweep(("token", "named", "stop_reason"), [(9, (9,), 9), (9, (8, 9), 9), (9, (), None), (7, (), None), (7, (7,), 7)])
def test_only_a_stop_token_of_the_user_is_a_reason(token, named, stop_reason):
    of = SessionState(attrs.evolve(opened(stop_tokens={7, *named}), settings=Settings(stop_tokens=named)))
    of.withdraw(Withdraw(SESSION))
    commit = of.apply(verdict(of, 0, token))
    assert commit.stop_reason == stop_reason
    assert commit.finish_reason == ("stop" if token in (7, *named) else None)


# --- two copies and an unreliable channel ---------------------------------------------------------


class TwoCopies(RuleBasedStateMachine):
    """The drafter's copy and the target's, over a channel that delays and duplicates messages.

    At any time the target may go on alone, also while a proposal is under way or has arrived.

    Messages in one direction arrive in the order in which they were sent, as over a memory channel, except a
    withdrawal, which may overtake others. A message that has arrived may arrive again, at any later time, any number of
    times. The target is greedy: its token at a position depends on the position alone.

    Nothing may raise, the text must be the target's, and the dropped messages must be exactly those that came too late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drafter: SessionState | None = None

    @initialize(
        text=st.lists(st.integers(0, 5), min_size=1, max_size=9),
        max_tokens=st.none() | st.integers(1, 14),
        room=st.none() | st.integers(1, 14),
        stop_tokens=st.frozensets(st.integers(0, 5), max_size=1),
        string_ends_at=st.none() | st.integers(1, 14),
        may_close=st.booleans(),
    )
    def open(self, text, max_tokens, room, stop_tokens, string_ends_at, may_close):
        begun = opened(
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            context_length=None if room is None else len(PROMPT) + room,
        )
        self.drafter, self.target = SessionState(begun), SessionState(begun)
        self.text, self.string_ends_at = text, string_ends_at
        self.to_target: deque[Proposal | Rest | Withdraw] = deque()
        self.to_drafter: deque[Verdict | Rested | Overdue] = deque()
        self.untold: tuple[int, ...] = ()  # that the target has committed in a rest
        self.arrived: list[tuple[SessionState, Proposal | Rest | Rested | Overdue | Verdict | Withdraw]] = []
        self.late = {"drafter": 0, "target": 0}
        self.commits: list[Commit] = []
        self.may_close, self.is_closed_from_outside = may_close, False
        self.has_withdrawn = False
        self.last_overdue: Overdue | None = None
        self.whole, self.finish_reason = self.read_to_the_end(max_tokens, room, stop_tokens)

    def true_token(self, position: int) -> int:
        return self.text[(position - len(PROMPT)) % len(self.text)]

    def read_to_the_end(self, max_tokens, room, stop_tokens):
        """The text that plain decoding would give, and why it ends; cut long after any session here has ended."""
        tokens: list[int] = []
        while len(tokens) < 1000:
            tokens.append(self.true_token(len(PROMPT) + len(tokens)))
            if tokens[-1] in stop_tokens or len(tokens) == self.string_ends_at:
                return tokens, "stop"
            if len(tokens) in (max_tokens, room):
                return tokens, "length"
        return tokens, None

    # Steps of the drafter.

    @precondition(lambda self: self.drafter.phase is SessionPhase.PROPOSING)
    @rule(num_right=st.integers(0, 4), wrong=st.lists(st.integers(0, 5), max_size=3))
    def propose(self, num_right, wrong):
        start = self.drafter.next_position
        tokens = [self.true_token(start + i) for i in range(num_right)]
        if wrong and wrong[0] == self.true_token(start + num_right):
            wrong = [(wrong[0] + 1) % 6, *wrong[1:]]
        message = proposal(self.drafter, *tokens, *wrong)
        assert self.drafter.propose(message)
        self.to_target.append(message)

    @precondition(lambda self: self.drafter.phase in (SessionPhase.PROPOSING, SessionPhase.RESTING))
    @rule(num_rounds=st.integers(1, 4))
    def rest(self, num_rounds):
        # Also in a rest: whether the target is still in it when the prolongation arrives depends on the channel.
        message = Rest(SESSION, max(self.drafter.round, self.drafter.rests_until) + num_rounds)
        assert self.drafter.rest(message)
        assert self.drafter.phase is SessionPhase.RESTING
        self.to_target.append(message)

    @precondition(
        lambda self: self.target.phase in (SessionPhase.PROPOSING, SessionPhase.VERIFYING, SessionPhase.RESTING)
    )
    @rule(num_rounds=st.integers(1, 4))
    def go_on_alone(self, num_rounds):
        # It waits no longer for a proposal, or its pass over one has failed.
        message = Overdue(SESSION, max(self.target.round, self.target.rests_until) + num_rounds)
        assert self.target.rest(message)
        assert self.target.phase is SessionPhase.RESTING
        self.to_drafter.append(message)
        self.last_overdue = message

    @precondition(lambda self: not self.has_withdrawn)
    @rule(overtakes=st.booleans())
    def withdraw(self, overtakes):
        message = Withdraw(SESSION)
        on_the_table = self.drafter.outstanding
        self.drafter.withdraw(message)
        assert self.drafter.outstanding is on_the_table
        self.has_withdrawn = True
        if overtakes:
            self.to_target.appendleft(message)
        else:
            self.to_target.append(message)

    # Steps of the target.

    @precondition(
        lambda self: self.target.phase in (SessionPhase.VERIFYING, SessionPhase.RESTING, SessionPhase.UNDRAFTED)
    )
    @rule(single_step=st.booleans(), is_told=st.booleans())
    def verify(self, single_step, is_told):
        start, outstanding = self.target.next_position, self.target.outstanding
        proposed = outstanding.tokens if outstanding else ()
        judged = proposed[:1] if single_step else proposed
        right = [token == self.true_token(start + i) for i, token in enumerate(judged)]
        num_accepted = right.index(False) if False in right else len(right)
        token = self.true_token(start + num_accepted)
        if single_step and num_accepted:
            token = None
        message = verdict(self.target, num_accepted, token, single_step=single_step)
        if self.string_ends_at is not None:
            # Only the target can know this.
            nth = self.string_ends_at - self.target.num_generated
            if nth <= len(self.target.preview(message).tokens):
                message = attrs.evolve(message, stop=Stop("end", nth))
        is_awaited = self.target.phase is not SessionPhase.UNDRAFTED
        commit = self.target.apply(message)
        assert commit is not None
        self.commits.append(commit)
        if is_awaited and commit.resting and self.target.phase is SessionPhase.RESTING:
            self.untold += commit.tokens
            if is_told:
                self.tell(commit.round, self.target.next_position)
        elif is_awaited:
            self.tell(commit.round - 1, commit.start)
            self.to_drafter.append(message)

    def tell(self, round: int, end: int) -> None:
        if self.untold:
            self.to_drafter.append(Rested(SESSION, round, end - len(self.untold), self.untold))
            self.untold = ()

    # Steps of the channel.

    @precondition(lambda self: self.to_target)
    @rule()
    def deliver_to_target(self):
        self.deliver(self.target, self.to_target.popleft())

    @precondition(lambda self: self.to_drafter)
    @rule()
    def deliver_to_drafter(self):
        self.deliver(self.drafter, self.to_drafter.popleft())

    def deliver(self, to: SessionState, message: Proposal | Rest | Rested | Overdue | Verdict | Withdraw) -> None:
        """The first arrival of a message."""
        if isinstance(message, Withdraw):
            on_the_table = to.outstanding
            to.withdraw(message)
            assert to.outstanding is on_the_table
            assert to.phase in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED)
        elif isinstance(message, Rest | Overdue):
            # Both sides may have sent one at the same time; then the later end holds.
            is_over = to.phase in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED) or message.until <= max(
                to.round, to.rests_until
            )
            assert to.rest(message) is not is_over
        else:
            # A proposal may come to a target that continues alone, for a round or for good.
            is_late = to.phase is SessionPhase.CLOSED or (
                isinstance(message, Proposal) and (to.phase is not SessionPhase.PROPOSING or message.round < to.round)
            )
            assert bool(hear(to, message)) is not is_late
            self.late["target" if to is self.target else "drafter"] += is_late
        self.arrived.append((to, message))

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def deliver_again(self, data):
        to, message = data.draw(st.sampled_from(self.arrived))
        before = snapshot(to)
        if isinstance(message, Withdraw):
            to.withdraw(message)
        elif isinstance(message, Rest | Overdue):
            assert not to.rest(message)
        else:
            assert not hear(to, message)
            self.late["target" if to is self.target else "drafter"] += 1
        assert snapshot(to) == before

    # Both, undisturbed. Alone, the other rules seldom come to a second round.

    @rule(num_steps=st.integers(1, 6))
    def go_on(self, num_steps):
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        """Do the next thing, if there is anything to do."""
        if self.to_target:
            self.deliver_to_target()
        elif self.to_drafter:
            self.deliver_to_drafter()
        elif self.target.phase in (SessionPhase.VERIFYING, SessionPhase.RESTING, SessionPhase.UNDRAFTED):
            self.verify(single_step=False, is_told=True)
        elif self.target.phase is self.drafter.phase is SessionPhase.PROPOSING:
            self.propose(num_right=1, wrong=[0])

    # Steps of the consumer.

    @precondition(lambda self: self.may_close and not self.is_closed_from_outside)
    @rule(whom=st.sampled_from([("drafter",), ("target",), ("drafter", "target")]))
    def close(self, whom):
        self.is_closed_from_outside = True
        for name in whom:
            getattr(self, name).close(Close(SESSION))

    # Invariants.

    @invariant()
    def text_is_the_targets(self):
        if self.drafter is None:
            return
        assert self.target.committed == [*PROMPT, *self.whole][: len(self.target.committed)]
        assert self.drafter.committed == self.target.committed[: len(self.drafter.committed)]

    @invariant()
    def dropped_are_the_late(self):
        if self.drafter is not None:
            assert {"drafter": self.drafter.num_stale, "target": self.target.num_stale} == self.late

    @invariant()
    def commits_make_the_text(self):
        if self.drafter is None:
            return
        assert [t for commit in self.commits for t in commit.tokens] == self.target.committed[len(PROMPT) :]
        assert [commit.round for commit in self.commits] == list(range(self.target.round))

    @invariant()
    def what_is_on_the_table_is_of_this_round(self):
        for of in (self.drafter, self.target) if self.drafter is not None else ():
            if of.outstanding is not None:
                assert of.phase not in (SessionPhase.PROPOSING, SessionPhase.RESTING)
                assert (of.outstanding.round, of.outstanding.start) == (of.round, of.next_position)
            else:
                assert of.phase is not SessionPhase.VERIFYING

    @invariant()
    def the_target_is_no_further_than_the_drafter_let_it_go(self):
        if self.drafter is None or self.has_withdrawn or self.is_closed_from_outside:
            return
        # The target alone, or without waiting for the drafter any longer.
        alone_until = 0 if self.last_overdue is None else self.last_overdue.until
        match self.drafter.phase:
            case SessionPhase.PROPOSING:
                assert self.drafter.round <= self.target.round <= max(self.drafter.round, alone_until)
            case SessionPhase.VERIFYING:
                assert self.drafter.round <= self.target.round <= max(self.drafter.round + 1, alone_until)
            case SessionPhase.RESTING:
                assert self.drafter.round <= self.target.round <= max(self.drafter.rests_until, alone_until)

    def teardown(self) -> None:
        if self.drafter is None:
            return
        self.run_to_the_end()
        self.text_is_the_targets()
        self.dropped_are_the_late()
        self.commits_make_the_text()
        if self.is_closed_from_outside or self.finish_reason is None:
            return
        assert self.target.committed == [*PROMPT, *self.whole]
        assert (self.target.phase, self.target.finish_reason) == (SessionPhase.CLOSED, self.finish_reason)
        if not self.has_withdrawn:
            # Except a rest that the drafter asked for after the end.
            assert snapshot(self.drafter)[:-1] == snapshot(self.target)[:-1]

    def run_to_the_end(self) -> None:
        """Let both continue, undisturbed, while there is anything to do."""
        for _ in range(200):
            self.step()


def hear(of: SessionState, message: Proposal | Verdict | Rested) -> Commit | bool | None:
    if isinstance(message, Rested):
        return of.follow(message)
    return of.propose(message) if isinstance(message, Proposal) else of.apply(message)


TestTwoCopies = TwoCopies.TestCase
TestTwoCopies.settings = settings(max_examples=70, stateful_step_count=40)
