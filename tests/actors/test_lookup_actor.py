"""`draft="ngram"`: the target's own text, sooner if it repeats itself, and never much later; first in simulated time.

Times that are compared with == are made of powers of two.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from completions import open_and_close
from models import greedy, llama, mamba, prompt_of
from our_threads import outrider_thread_names, outrider_threads
from scripted import (
    VOCAB_SIZE,
    Price,
    Script,
    ScriptedModel,
    ScriptedSequence,
    Simulation,
    digest,
    fraction,
    next_token,
    plain_text,
    priced,
    simulated,
    spike,
    text_of,
    truthful,
)
from sweeps import sweep

import runtime
from actors.drafters.drafter import MAX_IDLE_ROUNDS
from protocol.auto_policy import UNPRICED_LOOKAHEAD
from protocol.messages import Proposal

PREFILL, VERIFY = 4.0, 32.0
PRICE = priced(prefill=PREFILL, verify=VERIFY, decode=VERIFY)
LOOKAHEADS = [1, 2, 4, 9, 64, "auto"]


# --- texts ----------------------------------------------------------------------------------------


def counting(period: int) -> Script:
    """0, 1, 2, … and again from 0."""
    return lambda history: spike((history[-1] + 1) % period)


def slipping(often: float) -> Script:
    """A phrase of eleven words that is said again and again, with an occasional error."""

    def logits(history: Sequence[int]) -> Sequence[float]:
        slips = fraction("slip", history) < often
        return spike(digest("slipped", history) % VOCAB_SIZE if slips else 3 * (len(history) % 11))

    return logits


def quoting(begin: int) -> Script:
    """New words up to a position; from there on the same words again."""
    return lambda history: spike(next_token(history) if len(history) < begin else history[len(history) - begin])


def never_the_same(num_words: int) -> list[int]:
    """A text in which two words in a row are never followed by the same third twice, so that every lookup is wrong.

    It is a de Bruijn sequence of order three by Martin's rule: the greatest word that has not yet followed the last
    two.
    """
    text = [0, 0]
    seen: set[tuple[int, ...]] = set()
    while True:
        new = [(*text[-2:], word) for word in range(num_words - 1, -1, -1) if (*text[-2:], word) not in seen]
        if not new:
            return text
        seen.add(new[0])
        text.append(new[0][-1])


def reciting(text: Sequence[int]) -> Script:
    return lambda history: spike(text[len(history)])


SCRIPTS = {
    "news": truthful,
    "one word": lambda history: spike(5),
    "a cycle": counting(7),
    "a phrase with slips": slipping(0.15),
    "a phrase with many slips": slipping(0.5),
    "a quotation": quoting(30),
    "lookups that mislead": reciting(never_the_same(6)),
}


def sloped(slope: float) -> Price:
    """Passes that take one second, and `slope` more for each further token."""
    return lambda job: (
        1.0 + slope * (job.num_tokens - 1) if job.kind in ("verify", "decode") else 0.0  # prompts are free
    )


def sizes(simulation: Simulation) -> list[int]:
    """The number of tokens of each proposal."""
    return [instant.num_tokens for instant in simulation.instants("proposal")]


# --- the text -------------------------------------------------------------------------------------


@sweep(
    "kind, lookahead",
    [(kind, LOOKAHEADS[n]) for i, kind in enumerate(SCRIPTS) for n in range(i % 2, len(LOOKAHEADS), 2)],
)
async def test_the_text_is_the_targets_own(kind: str, lookahead: Any, autojump_clock: Any) -> None:
    prompt = never_the_same(6)[:9]
    async with simulated(ScriptedModel(SCRIPTS[kind]), "ngram") as simulation:
        text = await text_of(simulation, prompt, max_tokens=60, lookahead=lookahead)
    assert text == plain_text(SCRIPTS[kind], prompt, 60)


@sweep("lookahead", [0, 3])
async def test_a_fixed_lookahead_never_rests_and_of_zero_never_looks_up(lookahead: int, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(counting(VOCAB_SIZE)), "ngram", price=PRICE) as simulation:
        assert await text_of(simulation, [0], max_tokens=30, lookahead=lookahead) == list(range(1, 31))
        assert sizes(simulation) == [0] * 30 * bool(lookahead)
        statistics = simulation.runtime.statistics()
    assert statistics.proposed == statistics.resting_rounds == 0


# --- what is proposed, and when -------------------------------------------------------------------


# At a fixed lookahead, two words must have come before: those are 0 and 1, the first two that are generated. Where
# prices decide, a single one may be enough.
@sweep(
    "settings, expected",
    [
        ({"max_tokens": 15, "lookahead": 4}, [(7, ()), (8, ()), (9, (2, 3, 4, 5)), (14, (0, 1, 2, 3)), (19, (5, 6))]),
        ({"max_tokens": 5}, [(7, ()), (8, (1, 2)), (11, ())]),
    ],
)
async def test_what_is_proposed_is_what_came_after_the_same_words_before(settings, expected, autojump_clock):
    async with simulated(ScriptedModel(counting(7)), "ngram", price=sloped(0.0)) as simulation:
        received = await proposals(simulation, list(range(7)), **settings)
    assert [(p.start, p.tokens) for p in received] == expected
    assert all(p.probs == () for p in received)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "seed": 3}, {"temperature": 0.6, "lookahead": "auto"}])
async def test_a_prediction_is_proposed_from_the_first_token_on_and_after_an_error(settings, autojump_clock):
    prompt, length = [1, 2, 3], 40
    text = plain_text(truthful, prompt, length)
    # One token of the prediction is wrong.
    prediction = [*text[:20], (text[20] + 1) % VOCAB_SIZE, *text[21:]]
    settings = {"lookahead": 8, **settings, "max_tokens": length, "prediction": prediction}
    async with simulated(ScriptedModel(truthful), "ngram") as simulation:
        received = await proposals(simulation, prompt, **settings)
        assert await text_of(simulation, prompt, **settings) == text
        statistics = simulation.runtime.statistics()
    assert received[0].tokens == tuple(text[: len(received[0].tokens)]) != ()
    assert statistics.accepted > 0.6 * 2 * length


@sweep(
    "is_model, lookahead", [(True, 1), (False, 2), (True, 4), (False, 9), (False, 64), (False, "auto"), (True, "auto")]
)
async def test_a_prediction_that_misleads_changes_nothing_of_the_text(is_model, lookahead, autojump_clock):
    whole = never_the_same(6)
    draft: Any = ScriptedModel(truthful) if is_model else "ngram"
    async with simulated(ScriptedModel(slipping(0.2)), draft) as simulation:
        text = await text_of(simulation, whole[:9], max_tokens=60, lookahead=lookahead, prediction=whole[9:200])
    assert text == plain_text(slipping(0.2), whole[:9], 60)


async def proposals(simulation: Simulation, prompt: Sequence[int], **settings: Any) -> list[Proposal]:
    """The proposals of a whole generation."""
    await text_of(simulation, prompt, **settings)
    (received,) = simulation.target_worker.sessions.received.values()
    return [message for message in received if isinstance(message, Proposal)]


async def test_what_was_looked_up_is_proposed_as_no_draw_where_draws_are_judged(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(counting(3)), "ngram") as simulation:
        asked = {"max_tokens": 6, "lookahead": 3, "temperature": 0.5, "acceptance": "rejection"}
        received = await proposals(simulation, [0, 1, 2, 0, 1], **asked)
    assert received[0].tokens == (2, 0, 1)
    assert received[0].probs == (None, None, None)


@pytest.mark.parametrize("lookahead", [2, 4, "auto"])
async def test_a_verdict_is_answered_at_its_instant_so_the_target_never_waits(lookahead, autojump_clock):
    prompt = list(range(7)) * 2
    async with simulated(ScriptedModel(counting(7)), "ngram", price=PRICE) as simulation:
        await text_of(simulation, prompt, max_tokens=60, lookahead=lookahead)
        took = trio.current_time()
        verifies = simulation.spans("target", "verify")
    assert verifies[0].began == PREFILL
    assert all(before.ended == after.began for before, after in itertools.pairwise(verifies))
    assert took == PREFILL + len(verifies) * VERIFY


@pytest.mark.parametrize(("draft", "asked"), [("ngram", False), (ScriptedModel(truthful), True), (None, False)])
async def test_a_target_leaves_room_for_a_model_only_where_there_is_one(draft, asked, autojump_clock):
    class Neighbourly(ScriptedModel):
        def open_sequence(self, *, alongside_model: bool) -> ScriptedSequence:
            opened.append(alongside_model)
            return super().open_sequence(alongside_model=alongside_model)

    opened: list[bool] = []
    async with simulated(Neighbourly(truthful), draft) as simulation:
        await text_of(simulation, [1, 2, 3], max_tokens=2)
    assert opened == [asked]


@sweep("max_tokens", [1, 2, 3, 4, 7, 12])
@sweep("lookahead", [1, 3, 8, "auto"])
async def test_nothing_is_proposed_that_could_not_be_used(lookahead: Any, max_tokens: int, autojump_clock: Any) -> None:
    prompt = list(range(4)) * 2
    async with simulated(ScriptedModel(counting(4)), "ngram") as simulation:
        received = await proposals(simulation, prompt, max_tokens=max_tokens, lookahead=lookahead)
    # The last token is the verdict's own.
    assert all(p.start + len(p.tokens) < len(prompt) + max_tokens for p in received)


@sweep("stop", range(5))
async def test_nothing_is_proposed_after_the_end_of_the_text(stop: int, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(counting(5)), "ngram") as simulation:
        prompt = [0, 1, 2, 3, 4, 0, 1]
        received = await proposals(simulation, prompt, max_tokens=20, lookahead=9, stop_tokens=[stop])
    assert all(stop not in p.tokens[:-1] for p in received)
    assert received[0].tokens == tuple(plain_text(counting(5), prompt, (stop - 2) % 5 + 1))


# --- auto: prices, and rests ----------------------------------------------------------------------


async def test_before_a_pass_was_priced_little_is_proposed(autojump_clock: Any) -> None:
    prompt = list(range(9)) * 9
    async with simulated(ScriptedModel(counting(9)), "ngram", price=sloped(0.0)) as simulation:
        await text_of(simulation, prompt, max_tokens=100)
        first, *others = sizes(simulation)
    assert first == UNPRICED_LOOKAHEAD
    assert max(others) > 3 * UNPRICED_LOOKAHEAD


async def seconds(script: Script, price: Price, num_tokens: int, draft: Any = "ngram", **settings: Any) -> float:
    async with simulated(ScriptedModel(script), draft, price=price) as simulation:
        began = trio.current_time()
        await text_of(simulation, [0, 0], max_tokens=num_tokens, **settings)
        return trio.current_time() - began


@pytest.mark.parametrize("slope", [0.06, 1.0])
async def test_lookups_that_mislead_cost_next_to_nothing(slope: float, autojump_clock: Any) -> None:
    text, price = never_the_same(8), sloped(slope)
    plain = await seconds(reciting(text), price, 500, draft=None)
    always = await seconds(reciting(text), price, 500, lookahead=2)
    auto = await seconds(reciting(text), price, 500)
    assert always > (1 + slope) * plain
    assert auto < 1.02 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("often", "slope"), [(0.05, 0.3), (0.2, 0.06), (0.5, 0.0)])
async def test_auto_keeps_up_with_plain_decoding_and_with_the_best_fixed_lookahead(often, slope, autojump_clock):
    price, script = sloped(slope), slipping(often)
    auto = await seconds(script, price, 1000)
    assert auto < 1.01 * await seconds(script, price, 1000, draft=None)
    for lookahead in (1, 2, 4, 8):
        assert auto < 1.05 * await seconds(script, price, 1000, lookahead=lookahead)


async def test_where_nothing_is_found_the_target_is_left_alone_for_good(autojump_clock: Any) -> None:
    num_tokens = 60
    async with simulated(ScriptedModel(counting(VOCAB_SIZE)), "ngram", price=PRICE) as simulation:
        await text_of(simulation, [0], max_tokens=num_tokens)
        assert sizes(simulation) == [0] * MAX_IDLE_ROUNDS
        assert len(simulation.instants("rest")) == 1
        assert trio.current_time() == num_tokens * VERIFY
        assert len(simulation.spans("target", "decode")) == num_tokens - MAX_IDLE_ROUNDS
        statistics = simulation.runtime.statistics()
    assert statistics.resting_rounds == num_tokens - MAX_IDLE_ROUNDS
    assert (statistics.proposed, statistics.lookahead_hits) == (0, 0)


async def test_a_target_that_is_left_alone_works_ahead_of_what_is_read(autojump_clock: Any) -> None:
    num_tokens = 60
    async with simulated(ScriptedModel(counting(VOCAB_SIZE)), "ngram", price=PRICE) as simulation:
        stream = simulation.runtime.stream([0], max_tokens=num_tokens)
        cached_tokens = []
        async for token in stream:
            (sequence,) = simulation.target.sequences
            cached_tokens.append(len(sequence.tokens) - token.index - 1)
    # At first without the last token, with it during rests; and without it at the end, where no token follows.
    assert cached_tokens == [0] * MAX_IDLE_ROUNDS + [1] * (num_tokens - MAX_IDLE_ROUNDS - 1) + [0]


async def test_a_rest_ends_soon_after_something_is_found(autojump_clock: Any) -> None:
    begin = 50

    def quoted(history: Sequence[int]) -> Sequence[float]:
        return spike(len(history) % begin)

    async with simulated(ScriptedModel(quoted), "ngram", price=PRICE) as simulation:
        await text_of(simulation, [0], max_tokens=2 * begin - 1)
        (received,) = simulation.target_worker.sessions.received.values()
        (rest,) = simulation.instants("rest")
    assert rest.round == MAX_IDLE_ROUNDS
    awake = next(m for m in received if isinstance(m, Proposal) and m.tokens)
    # The first word of the quotation must be there before a lookup can find it.
    assert begin + 1 < awake.start <= begin + 1 + 3
    assert awake.tokens[0] == awake.start % begin


# --- on real models and threads -------------------------------------------------------------------


@sweep("lookahead", [3, "auto"])
async def test_the_text_is_the_greedy_one_and_there_is_no_thread_but_the_targets(lookahead: Any) -> None:
    # With this seed it repeats itself.
    target, seen, text = mamba(6), list[list[str]](), list[int]()
    async with runtime.open((target, None), "ngram") as rt:
        async for token in rt.stream(prompt_of(9) * 4, max_tokens=50, lookahead=lookahead):
            seen.append(outrider_thread_names())
            text.append(token.id)
        statistics = rt.statistics()
    assert text == greedy(target, prompt_of(9) * 4, 50)
    assert seen == [["outrider-target"]] * 50
    assert 0 < statistics.accepted <= statistics.proposed
    assert statistics.draft_busy == statistics.draft_failures == 0
    assert outrider_threads() == []


@sweep("target, draft, says", [
    ("ngram", "ngram", 'target must be a model here, and "ngram" has none'),
    *((llama(), draft, "ngram' does not exist") for draft in ("./ngram", Path("ngram"), "models/with/ngram")),
])  # fmt: skip
async def test_prompt_lookup_is_no_target_and_a_path_of_that_name_is_a_path(target: Any, draft: Any, says: str) -> None:
    with pytest.raises((runtime.SettingsError, runtime.ModelError), match=says):
        await open_and_close(target if target == "ngram" else (target, None), draft)
    assert outrider_threads() == []
