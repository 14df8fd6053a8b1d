"""A drafter that fails because of a token that it drew leaves texts with the target's distribution.

One token is fatal: a drafter that reads it fails, or is late. If what it had drawn were dropped then, that token would
become rarer; for each moment of a failure, a test shows that this would be seen in as many texts. The models are
scripts over 16 tokens in simulated time, and every session has a seed, so each test compares fixed outcomes with the
theory.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
from delays import RestingPolicy
from distributions import SIGNIFICANCE, outcomes, p_value, random_price
from drafters_elsewhere import elsewhere
from other_vocabularies import TranslatedScript
from scripted import Price, Script, ScriptedFailure, ScriptedModel, Undo, always, ids, never, priced, run
from simulated_worker import SimulatedWorker
from trained_scripts import RecordingTarget, TrainedDraft

from actors.drafters.draft_actor import DraftActor
from actors.drafters.drafter import DrafterSession, MakePolicy, policy_by_settings
from actors.remote.remote_drafter import RemoteDrafter
from actors.workers.worker import Job
from protocol.lookahead_policy import ChainPolicy
from protocol.lookahead_tree import Node
from protocol.messages import Withdraw
from protocol.session_state import SessionPhase
from protocol.vocabulary_map import VocabularyMap
from runtime import stateless
from runtime.engine.drafter_slot import LoadedDrafter
from runtime.engine.opening import running

PROMPT = [5, 6, 7]
VOCAB_SIZE = 16  # with fewer, texts would not share passes
# Of these the first is fatal to a drafter that reads it.
COIN, DRAFTED_COIN = ([0.5, 0.3, *[0.2 / 14] * 14], [0.5, 0.2, *[0.3 / 14] * 14])
# Where nothing is to happen, most drafted tokens stand.
STEADY = [0.005, 0.005, 0.92, *[0.07 / 13] * 13]


@attrs.frozen
class Moment:
    """When the drafter reads a fatal token. `coins` are the places in the text, from 1 on, where the models say
    `COIN`.
    """

    phase: SessionPhase
    lookahead: int
    coins: tuple[int, ...]
    prices: tuple[Price, Price]
    make_policy: MakePolicy = policy_by_settings
    undo: Undo = always

    @property
    def compared(self) -> slice:
        """Which tokens of a text are compared with the theory."""
        return slice(max(0, self.coins[0] - 3), max(3, self.coins[0]))

    @property
    def expected(self) -> dict[tuple[int, ...], float]:
        """The probabilities of these tokens, those beyond the third counted as one."""
        rows = [COIN if number + 1 in self.coins else STEADY for number in range(16)[self.compared]]
        kinds = [[*row[:3], sum(row[3:])] for row in rows]
        return {tokens: math.prod(row[t] for row, t in zip(kinds, tokens, strict=True)) for tokens in ALL_KINDS}


ALL_KINDS = list(itertools.product(range(4), repeat=3))


def at_random(seed: int, part: float = 1.0) -> Price:
    """Random prices, but that both models have read the prompt at once."""
    price = random_price(seed, part)
    return lambda job: 0.0 if job.kind in ("open", "prefill") else price(job)


READ = priced(prefill=0.0)
MOMENTS = {
    "on the drafter's turn": Moment(SessionPhase.PROPOSING, 4, (3,), (READ, READ)),
    # Two tokens are judged, a third guesses the target's own, and the fourth would be proposed next.
    "while the target verifies": Moment(SessionPhase.VERIFYING, 2, (4,), (READ, READ)),
    # The fifth token is the target's own in any case, and after it the sixth would be proposed.
    "while the drafter rests": Moment(
        SessionPhase.RESTING,
        3,
        (6,),
        (priced(prefill=0.0, verify=3.5), priced(prefill=0.0, draft=1.0)),
        lambda settings, _: RestingPolicy(3, turns=itertools.chain([False, True], itertools.repeat(False))),
    ),
    "at any time": Moment(SessionPhase.PROPOSING, 2, tuple(range(1, 16)), (at_random(1), at_random(2, 0.3))),
}


# All of a proposal but the first token is proposed again, and more after it.
verifying = MOMENTS["while the target verifies"]
MOMENTS["while the target judges one by one"] = attrs.evolve(verifying, lookahead=3, coins=(3,), undo=never)

QUICK = ("on the drafter's turn",)


class Failing:
    """The scripts of both models, and a logits processor. What concerns the drafter fails after a fatal token."""

    def __init__(self, how: str, coins: Container[int]) -> None:
        self.how = how
        self.coins = coins
        self.is_drafting = False

    def target(self, history: Sequence[int]) -> Sequence[float]:
        self.is_drafting = False
        return self._logits(history, COIN)

    def draft(self, history: Sequence[int]) -> Sequence[float]:
        self.is_drafting = True
        if self.how == "raises" and self._is_fatal(history):
            raise ScriptedFailure(f"after {history[-1]}")
        is_nonsense = self.how == "NaN" and self._is_fatal(history)
        return [math.nan] * VOCAB_SIZE if is_nonsense else self._logits(history, DRAFTED_COIN)

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if not (self.is_drafting and self._is_fatal(tokens.tolist())):
            return logits
        if self.how == "processor":
            raise ValueError("not after this one")
        return logits * math.nan

    def _logits(self, history: Sequence[int], coin: Sequence[float]) -> list[float]:
        return [math.log(p) for p in (coin if len(history) + 1 - len(PROMPT) in self.coins else STEADY)]

    def is_fatal_at(self, node: Node) -> bool:
        return node.position + 1 - len(PROMPT) in self.coins and node.token == 0

    def _is_fatal(self, history: Sequence[int]) -> bool:
        return len(history) - len(PROMPT) in self.coins and history[-1] == 0


def translated(script: Script) -> ScriptedModel:
    """A drafter that has the same tokens by other ids."""

    def own_script(history: Sequence[int]) -> Sequence[float]:
        return script([VOCAB_SIZE - 1 - own for own in history])[::-1]

    own = {token: VOCAB_SIZE - 1 - token for token in range(VOCAB_SIZE)}
    return TranslatedScript(own_script, VocabularyMap(own, tuple((t,) for t in own.values()), None, VOCAB_SIZE))


DRAFTERS: dict[str, Callable[[Script], Any]] = {
    "a draft model": lambda script: ScriptedModel(script, vocab_size=VOCAB_SIZE),
    "a trained drafter": lambda script: TrainedDraft(lambda history, _: script(history), vocab_size=VOCAB_SIZE),
    "another vocabulary": translated,
    "another process": lambda script: ScriptedModel(script, vocab_size=VOCAB_SIZE),
    "a short context": lambda script: ScriptedModel(script, vocab_size=VOCAB_SIZE, context_length=len(PROMPT) + 2),
}


@asynccontextmanager
async def drafted_by(
    model: Any, worker: SimulatedWorker, make_policy: MakePolicy = policy_by_settings, *, is_elsewhere: bool
) -> AsyncIterator[LoadedDrafter]:
    """A drafter for `running`."""
    if not is_elsewhere:
        yield model, worker
        return
    async with elsewhere(model, lambda _: worker, VOCAB_SIZE, make_policy=make_policy, traces=False) as (there, *_):
        yield there


async def sampled(
    num_texts: int,
    moment: Moment,
    kind: str = "a draft model",
    how: str = "raises",
    num_together: int = 1,
    prediction: Sequence[int] = (),
) -> tuple[float, Counter[SessionPhase]]:
    """Generate texts with the seeds 0, 1, …, copied from a prediction if sessions copy.

    Returns: the p-value of their tokens that are compared, and the phases in which their drafters failed.
    """
    failing, phases = Failing(how, moment.coins), Counter[SessionPhase]()
    texts: Counter[tuple[int, ...]] = Counter()
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": moment.compared.stop + 2,
        "prediction": prediction,
        "lookahead": moment.lookahead,
        "acceptance": "rejection",
    }
    if "processor" in how:
        settings["logits_processors"] = [stateless(failing.process)]
    fail = DraftActor._fail

    def watched(actor: DraftActor, session: Any, error: Exception) -> None:
        phases[session.state.phase] += not session.is_leaving
        fail(actor, session, error)

    def draft_price(job: Job[Any]) -> float:
        """A step that reads the fatal token takes very long, if that is how it fails."""
        running = None if how != "late" or job.kind != "draft" else rt._draft._sessions[job.session].part
        is_slow = running is not None and running.node is not None and failing.is_fatal_at(running.node)
        return 1000.0 if is_slow else moment.prices[1](job)

    make_target = RecordingTarget if kind == "a trained drafter" else ScriptedModel
    target = make_target(failing.target, vocab_size=VOCAB_SIZE, undo=moment.undo)
    workers = SimulatedWorker("target", moment.prices[0]), SimulatedWorker("draft", draft_price)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DraftActor, "_fail", watched)
        monkeypatch.setattr(DraftActor, "rest_rounds", 1)
        # A drafter that hangs would be late for the texts that follow.
        for seeds in ([seed] for seed in range(num_texts)) if how == "late" else [range(num_texts)]:
            async with (
                drafted_by(
                    DRAFTERS[kind](failing.draft), workers[1], moment.make_policy, is_elsewhere="process" in kind
                ) as at_draft,
                running((target, workers[0]), at_draft, make_policy=moment.make_policy) as rt,
            ):
                requests = [(PROMPT, {"seed": seed}) for seed in seeds]
                found = await rt.generate_many(requests, max_concurrent=num_together, **settings)
                texts.update(tuple(min(token.id, 3) for token in each.tokens[moment.compared]) for each in found)
    return p_value(texts, moment.expected), phases


@pytest.fixture(autouse=True)
def _unwarned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "outrider")  # hundreds of failures are warned of


def leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop what was drawn."""
    monkeypatch.setattr("actors.drafters.drafter.withdrawal", lambda session, tree, at_once=False: Withdraw(session))


def check(moment: Moment, *args: Any, num_texts: int = 200) -> Counter[SessionPhase]:
    """Compare texts with the theory. Returns: as `sampled`, phases."""
    found, phases = run(lambda: sampled(num_texts, moment, *args))
    assert found > SIGNIFICANCE
    assert sum(phases.values()) > num_texts / 4
    return phases


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in MOMENTS]
)
def test_a_token_that_makes_its_drafter_fail_is_as_frequent_as_it_should_be(moment, monkeypatch):
    num_texts = 160 if moment in QUICK else 200
    phases = check(MOMENTS[moment], num_texts=num_texts)
    assert phases[MOMENTS[moment].phase] > max(phases.values()) / 2
    leave_at_once(monkeypatch)
    assert run(lambda: sampled(num_texts, MOMENTS[moment]))[0] < 1e-6


# Most moments of another process, whose messages take their time.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "how", "num_together"),
    [
        ("another vocabulary", "while the target judges one by one", "raises", 3),
        ("another process", "while the target verifies", "raises", 3),
        ("another process", "while the drafter rests", "raises", 3),
        ("a draft model", "while the target verifies", "NaN", 1),
        ("a draft model", "while the target verifies", "processor", 3),
    ],
)
def test_a_drafter_of_any_kind_that_fails_in_any_way_leaves_the_distribution(kind, moment, how, num_together):
    check(MOMENTS[moment], kind, how, num_together)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [("another process", "never"), ("a short context", "never"), ("a draft model", "NaN by a processor")],
)
def test_without_failures_texts_have_the_targets_distribution(kind: str, how: str) -> None:
    found, phases = run(lambda: sampled(200, MOMENTS["at any time"], kind, how, 3))
    assert found > SIGNIFICANCE
    assert not phases


@pytest.mark.slow
def test_a_failing_drafter_leaves_the_distribution_where_tokens_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterSession, "copies", True)
    # The fatal token is copied, too.
    prediction = [PROMPT[-1], *[0, 2, 2, 0] * 6]
    found, phases = run(lambda: sampled(400, MOMENTS["at any time"], prediction=prediction))
    assert found > SIGNIFICANCE
    assert sum(phases.values()) > 100


@pytest.mark.slow
def test_a_token_that_makes_its_drafter_late_is_as_frequent_as_it_should_be() -> None:
    # The step after the third token hangs. The second is judged, and then the third.
    moment = MOMENTS["while the target judges one by one"]
    assert run(lambda: sampled(200, moment, "a draft model", "late"))[0] > SIGNIFICANCE


@pytest.mark.slow
def test_a_trained_drafter_that_fails_leaves_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first token is the target's own, which gives the hidden states, so that all is one place further on.
    moment = attrs.evolve(MOMENTS["while the target verifies"], coins=(5,), make_policy=lambda *_: ChainPolicy(2))
    phases = check(moment, "a trained drafter")
    assert phases[SessionPhase.VERIFYING] > 80
    leave_at_once(monkeypatch)
    assert run(lambda: sampled(200, moment, "a trained drafter"))[0] < 1e-6


# --- a drafter that is detached -------------------------------------------------------------------


async def detached(num_texts: int, after_s: float, is_elsewhere: bool) -> float:
    """The p-value of the first three tokens of texts whose drafter is detached. The first token of all ends a text."""
    texts: Counter[tuple[int, ...]] = Counter()
    script, drafted = (lambda _, row=row: [math.log(p) for p in row] for row in (COIN, DRAFTED_COIN))
    for seed in range(num_texts):
        target, draft = (ScriptedModel(each, vocab_size=VOCAB_SIZE) for each in (script, drafted))
        workers = [SimulatedWorker(role, priced(prefill=0.0, draft=1.0)) for role in ("target", "draft")]
        async with (
            drafted_by(draft, workers[1], is_elsewhere=is_elsewhere) as at_draft,
            running((target, workers[0]), at_draft) as rt,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(call_after, after_s, rt.detach_draft)
            settings: dict[str, Any] = {"temperature": 1.0, "acceptance": "rejection", "stop_tokens": (0,)}
            found = await rt.generate(PROMPT, seed=seed, lookahead=4, max_tokens=6, **settings)
        texts[tuple(min(token, 3) for token in ids(found.tokens)[:3])] += 1
    return p_value(texts, outcomes([[*COIN[:3], sum(COIN[3:])]] * 4, 3, stop=(0,)))


def withdraw_at_once(drafter: RemoteDrafter) -> None:
    for session in list(drafter._sessions.values()):
        drafter._withdraw(session)


async def call_after(seconds: float, call: Callable[[], Awaitable[None]]) -> None:
    await trio.sleep(seconds)
    await call()


@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ends_of_text_are_as_frequent_where_the_drafter_is_detached(is_elsewhere, monkeypatch):
    # After one token is drawn. If it ends the text, it is proposed before the drafter is detached.
    assert run(detached, 100, 1.5, is_elsewhere) > SIGNIFICANCE
    leave_at_once(monkeypatch)
    monkeypatch.setattr(RemoteDrafter, "withdraw_from_all", withdraw_at_once)
    assert run(detached, 60, 1.5, is_elsewhere) < 1e-6
