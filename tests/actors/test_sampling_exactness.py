"""Sampled text has the target's distribution, for every drafter, every lookahead and any timing.

The models are Markov chains over four tokens, so the distribution of the text is known. The real actors run on them;
the drafter works ahead, and jobs take random times. Every session has a seed, so each test compares one fixed outcome
with the theory: if it passes once, it always passes.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import pytest
from distributions import DRAFT, PROMPT, SIGNIFICANCE, TARGET, outcomes, p_value, pooled_p_value, random_price
from other_vocabularies import TranslatedScript
from scripted import RefusingModel, ScriptedModel, always, hashed, ids, markov, never, run, simulated, within
from sweeps import sweep

from actors.drafters.drafter import DrafterSession
from actors.model import Feed
from protocol.lookahead_policy import ChainPolicy, PolicyView
from protocol.lookahead_tree import Node
from protocol.vocabulary_map import VocabularyMap
from runtime import Token, stateless

NARROW_DRAFT = tuple((0.5, 0.2, 0.3) for _ in range(4))
WIDE_DRAFT = tuple((0.2, 0.1, 0.1, 0.2, 0.1, 0.3) for _ in range(4))
# Of the target's tokens, the drafter has 0, 1 and 3 by other ids, and reads 2 as two of its own. Its 4 begins like 0.
OTHER_VOCABULARY = VocabularyMap({0: 2, 1: 0, 3: 1}, ((2,), (0,), (3, 4), (1,)), None, 4, {4: 0})
OTHER_DRAFT = (
    (0.3, 0.2, 0.1, 0.3, 0.1),
    (0.1, 0.2, 0.4, 0.1, 0.2),
    (0.2, 0.3, 0.2, 0.1, 0.2),
    (0.0, 0.0, 0.0, 0.1, 0.9),
    (0.4, 0.1, 0.3, 0.2, 0.0),
)
# A prompt for lookups: after each token each other one, and then some again.
QUOTABLE = [0, 1, 2, 3, 0, 2, 1, 3, 1, 0, 3, 2, 0, 3, 1, 3, 0, 0, 1, 3, 2, 1, 1, 2, 2, 3, 3, 1]

NUM_SESSIONS = 150


def at_temperature(table: Sequence[Sequence[float]], temperature: float) -> list[list[float]]:
    powers = [[p ** (1 / temperature) for p in row] for row in table]
    return [[p / sum(row) for p in row] for row in powers]


def successors(
    texts: Sequence[Sequence[int]], table: Sequence[Sequence[float]] = TARGET, *, num_before: int = 2
) -> list[tuple[Mapping[Any, int], Mapping[Any, float]]]:
    """For each few successive tokens, what followed them, and what should: that depends on the last of them only."""
    after: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        for end in range(num_before, len(text)):
            after.setdefault(tuple(text[end - num_before : end]), Counter())[text[end]] += 1
    return [(counts, dict(enumerate(table[before[-1]]))) for before, counts in after.items() if counts.total() >= 20]


def assert_drawn_of_target(tokens: Sequence[Sequence[Token]]) -> None:
    """Texts that are not over before their third token."""
    texts = [ids(text) for text in tokens]
    assert p_value(Counter(tuple(text[:2]) for text in texts), outcomes(TARGET, 2)) > SIGNIFICANCE
    assert pooled_p_value(successors([PROMPT + text for text in texts])) > SIGNIFICANCE


def share_drafted(tokens: Sequence[Sequence[Token]]) -> float:
    return sum(token.from_draft for text in tokens for token in text) / sum(map(len, tokens))


async def sample(
    num_sessions: int,
    target: ScriptedModel,
    draft: ScriptedModel | Literal["ngram"] | None,
    *,
    prompt: Sequence[int] = PROMPT,
    price_seed: int = 0,
    draft_part: float = 1.0,
    **settings: Any,
) -> list[tuple[Token, ...]]:
    """Texts of sessions with the seeds 0, 1, …; three at a time on one runtime.

    The mean duration of a draft step is `draft_part` of a target pass.
    """
    asked = {"temperature": 1.0, "acceptance": "rejection", **settings}
    price, draft_price = random_price(price_seed), random_price(price_seed + 1, draft_part)
    async with simulated(target, draft, price=price, draft_price=draft_price) as simulation:
        requests = [(prompt, {"seed": seed}) for seed in range(num_sessions)]
        found = await simulation.runtime.generate_many(requests, max_concurrent=3, **asked)
        return [each.tokens for each in found]


def target(**changes: Any) -> ScriptedModel:
    return ScriptedModel(markov(TARGET), vocab_size=4, **changes)


def drafter(
    table: Sequence[Sequence[float]] = DRAFT, vocabulary_map: VocabularyMap | None = None, **changes: Any
) -> ScriptedModel:
    if vocabulary_map is not None:
        return TranslatedScript(markov(table), vocabulary_map, **changes)
    return ScriptedModel(markov(table), vocab_size=len(table[0]), **changes)


# --- the rejection rule ---------------------------------------------------------------------------

SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lookahead 2": ({}, {}, {"lookahead": 2}),
    # Otherwise the drafter would rest, and a rest is longer than these texts; so it is with most seeds of the prices.
    "lookahead auto": ({}, {}, {"lookahead": "auto", "draft_part": 0.02, "price_seed": 12}),
    "a target that cannot rewind": ({"undo": never}, {}, {"lookahead": 2}),
    "caches that fill": ({"undo": within(5)}, {"undo": within(6)}, {"lookahead": 2}),
    "a drafter with fewer tokens that cannot rewind": ({}, {"table": NARROW_DRAFT, "undo": never}, {"lookahead": 2}),
    "a drafter with more tokens that fails": (
        {},
        {"table": WIDE_DRAFT, "fails": {"feed": range(5, 10**9, 11)}},
        {"lookahead": 2},
    ),
    "a drafter of another vocabulary": (
        {},
        {"table": OTHER_DRAFT, "vocabulary_map": OTHER_VOCABULARY},
        {"lookahead": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_under_rejection_texts_have_the_targets_distribution(situation: str) -> None:
    of_target, of_draft, settings = SITUATIONS[situation]
    models = target(**of_target), drafter(**of_draft)
    # The common case is tested with more sessions.
    num_sessions = 2 * NUM_SESSIONS if situation == "lookahead 2" else NUM_SESSIONS
    tokens = run(lambda: sample(num_sessions, *models, max_tokens=6, **settings))
    assert_drawn_of_target(tokens)
    assert share_drafted(tokens) > 0.2


@pytest.mark.slow
@sweep("max_tokens, stop", [(1, ()), (2, ()), (2, (1,)), (3, (1,)), (3, (0, 3))])
def test_under_rejection_texts_that_end_have_the_targets_distribution(max_tokens: int, stop: tuple[int, ...]) -> None:
    asked = {"max_tokens": max_tokens, "stop_tokens": stop, "lookahead": 2}
    tokens = run(lambda: sample(NUM_SESSIONS, target(), drafter(), **asked))
    counts = Counter(tuple(ids(text)) for text in tokens)
    assert p_value(counts, outcomes(TARGET, max_tokens, stop)) > SIGNIFICANCE


@pytest.mark.slow
def test_under_rejection_a_stop_far_ahead_of_the_text_changes_nothing_before_it() -> None:
    # Half of all drafts contain the stop token, and end there.
    tokens = run(lambda: sample(250, target(), drafter(), max_tokens=12, stop_tokens=(2,), lookahead=4))
    texts = [tuple(ids(text)) for text in tokens]
    assert p_value(Counter(text[:2] for text in texts), outcomes(TARGET, 2, (2,))) > SIGNIFICANCE
    assert pooled_p_value(successors([PROMPT + list(text) for text in texts])) > SIGNIFICANCE
    stopped = dict.fromkeys(range(6), 0.0)
    for text, p in outcomes(TARGET, 5, (2,)).items():
        stopped[len(text) if text[-1] == 2 else 0] += p
    lengths = Counter(len(text) if len(text) <= 5 and text[-1] == 2 else 0 for text in texts)
    assert p_value(lengths, stopped) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "lookahead", "undo"), [("ngram", 3, never), ("copies", 3, always), ("copies", "auto", always)]
)
def test_under_rejection_texts_have_the_targets_distribution_whatever_is_looked_up_or_copied(
    draft: Any, lookahead: Any, undo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert QUOTABLE[-1] == PROMPT[-1], "what comes next hangs on the last token alone"
    models, asked = (target(undo=undo), "ngram"), {"prompt": QUOTABLE, "max_tokens": 6, "lookahead": lookahead}
    if draft == "copies":
        copy_at_a_fixed_lookahead(monkeypatch)
        models, asked = (target(undo=undo), drafter()), {**asked, "draft_part": 0.1}
    tokens = run(lambda: sample(2 * NUM_SESSIONS, *models, **asked))
    assert_drawn_of_target(tokens)
    if lookahead != "auto":  # which may find that it does not pay
        drafters = Counter(token.drafted_by for text in tokens for token in text)
        assert share_drafted(tokens) > 0.1
        assert draft == "ngram" or min(drafters["model"], drafters["copy"]) > 50


def test_an_earlier_answer_of_the_same_seed_is_a_prediction_like_any_other() -> None:
    likely, other = (0.5, 0.2, 0.1, 0.2), (0.1, 0.1, 0.6, 0.2)
    counts = Counter[tuple[int, ...]]()

    async def main() -> None:
        models = [ScriptedModel(markov([row] * 4), vocab_size=4) for row in (likely, other, likely)]
        asked: dict[str, Any] = {"acceptance": "rejection", "temperature": 1.0, "lookahead": 1}
        async with simulated(*models[:2]) as first, simulated(models[2], "ngram") as second:
            prompts: list[Any] = [(PROMPT, {"seed": seed}) for seed in range(300)]
            answers = await first.runtime.generate_many(prompts, max_tokens=1, **asked)
            pairs = zip(prompts, answers, strict=True)
            again = [(PROMPT, {**seed, "prediction": ids(answer.tokens)}) for (_, seed), answer in pairs]
            found = await second.runtime.generate_many(again, max_tokens=2, **asked)
            counts.update(tuple(ids(each.tokens)[:1]) for each in found)

    run(main)
    assert p_value(counts, {(token,): p for token, p in enumerate(likely)}) > SIGNIFICANCE


def copy_at_a_fixed_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose copies at a fixed lookahead, too, each of them beside a draw of the same place."""
    proposal, expansion = ChainPolicy.proposal, ChainPolicy.expansion

    def propose(policy: ChainPolicy, view: PolicyView) -> list[Node] | None:
        return None if view.is_open(view.tree.root) else proposal(policy, view)

    def expand(policy: ChainPolicy, view: PolicyView) -> Node | None:
        return view.tree.root if view.is_open(view.tree.root) else expansion(policy, view)

    monkeypatch.setattr(DrafterSession, "copies", True)
    monkeypatch.setattr(ChainPolicy, "proposal", propose)
    monkeypatch.setattr(ChainPolicy, "expansion", expand)


def judged(texts: Sequence[Sequence[Token]]) -> list[tuple[int, Token]]:
    """At lookahead 1: the tokens for which there was a guess, each with the token before it."""
    pairs = []
    for tokens in texts:
        last, is_bonus = PROMPT[0], False
        # Nothing is proposed for the last position.
        for token in tokens[:-1]:
            if not is_bonus:
                pairs.append((last, token))
            # The token after an accepted guess is the target's own.
            is_bonus = token.from_draft
            last = token.id
    return pairs


@pytest.mark.slow
def test_under_rejection_a_drafted_token_stands_as_often_as_the_distributions_overlap(monkeypatch):
    # Wait for each draft, however long it takes.
    monkeypatch.setattr("protocol.deadlines.MIN_PROPOSAL_WAIT_S", 1e9)
    texts = run(lambda: sample(8, target(), drafter(), max_tokens=375, lookahead=1))
    pairs = judged(texts)
    overlaps = [sum(map(min, TARGET[last], DRAFT[last])) for last, _ in pairs]
    accepted = sum(token.from_draft for _, token in pairs)
    variance = sum(overlap * (1 - overlap) for overlap in overlaps)
    assert variance > 100
    assert abs(accepted - sum(overlaps)) < 4 * math.sqrt(variance)
    assert pooled_p_value(successors(list(map(ids, texts)))) > SIGNIFICANCE


@pytest.mark.slow
def test_under_rejection_the_recovered_token_does_not_know_which_one_was_drafted(monkeypatch):
    # Wait for each draft, however long it takes.
    monkeypatch.setattr("protocol.deadlines.MIN_PROPOSAL_WAIT_S", 1e9)

    # Tables in which drawing both from the same noise would show: one row, rotated by its context.
    def turned(row: Sequence[float]) -> list[list[float]]:
        return [[row[(token - last) % 4] for token in range(4)] for last in range(4)]

    target_row, draft_row = (0.14, 0.00, 0.18, 0.68), (0.02, 0.49, 0.00, 0.49)
    models = (ScriptedModel(markov(turned(row)), vocab_size=4) for row in (target_row, draft_row))
    texts = run(lambda: sample(8, *models, max_tokens=200, lookahead=1))
    counts = Counter((token.id - last) % 4 for last, token in judged(texts))
    assert counts.total() > 800
    assert p_value(counts, dict(enumerate(target_row))) > SIGNIFICANCE


# --- passes that fail -----------------------------------------------------------------------------


@pytest.mark.slow
def test_where_passes_over_drafted_tokens_fail_texts_have_the_targets_distribution() -> None:
    num_drafted = itertools.count(1)

    def every_third_with_drafts(feeds: Sequence[Feed]) -> bool:
        return any(feed.num_logits > 1 for feed in feeds) and next(num_drafted) % 3 == 0

    models = RefusingModel(markov(TARGET), every_third_with_drafts, vocab_size=len(TARGET)), drafter(DRAFT)
    asked = {"max_tokens": 5, "lookahead": 3, "acceptance": "rejection"}
    texts = [ids(text) for text in run(lambda: sample(450, *models, draft_part=0.1, **asked))]
    assert len(models[0].failures) > 100
    assert p_value(Counter(tuple(text[:3]) for text in texts), outcomes(TARGET, 3)) > SIGNIFICANCE


# --- a drafter with another rule ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "draft_temperature"), [("rejection", 0.0), ("rejection", 0.4), ("match", 3.0)])
def test_whatever_temperature_the_drafter_has_texts_have_the_targets_distribution(acceptance, draft_temperature):
    settings: dict[str, Any] = {"acceptance": acceptance, "draft_temperature": draft_temperature, "temperature": 0.7}
    tokens = run(lambda: sample(2 * NUM_SESSIONS, target(), drafter(), max_tokens=5, lookahead=2, **settings))
    texts, table = [ids(text) for text in tokens], at_temperature(TARGET, 0.7)
    assert p_value(Counter(tuple(text[:2]) for text in texts), outcomes(table, 2)) > SIGNIFICANCE
    assert pooled_p_value(successors([PROMPT + text for text in texts], table, num_before=1)) > SIGNIFICANCE
    assert share_drafted(tokens) > 0.1


@pytest.mark.slow
def test_with_its_temperature_a_greedy_drafter_proposes_what_it_holds_likeliest() -> None:
    texts = run(lambda: sample(8, target(), drafter(), max_tokens=125, lookahead=1, draft_temperature=0.0))
    pairs = judged(texts)
    likeliest = {last: max(range(4), key=row.__getitem__) for last, row in enumerate(DRAFT)}
    drafted = [(last, token.id) for last, token in pairs if token.from_draft]
    assert drafted
    assert all(token == likeliest[last] for last, token in drafted)


@pytest.mark.slow
@pytest.mark.parametrize("is_marked", [False, True])
def test_what_a_sampler_draws_at_random_has_the_targets_distribution(is_marked: bool) -> None:
    mx.random.seed(7)

    def drawn(logprobs: mx.array) -> mx.array:
        return mx.random.categorical(logprobs)

    async def sampled() -> list[tuple[Token, ...]]:
        prices = {"price": random_price(1), "draft_price": random_price(2, 0.1)}
        async with simulated(target(), drafter(), **prices) as simulation:
            sampler = stateless(drawn) if is_marked else drawn
            prompts = [PROMPT] * (2 * NUM_SESSIONS)
            found = await simulation.runtime.generate_many(prompts, max_tokens=5, lookahead=2, sampler=sampler)
            return [each.tokens for each in found]

    tokens = run(sampled)
    assert_drawn_of_target(tokens)
    # Two independent draws are equal in about one case of four.
    assert (share_drafted(tokens) > 0.05) == is_marked


# --- filters --------------------------------------------------------------------------------------


def left_over(row: Sequence[float], keep: Callable[[int, float], bool]) -> list[float]:
    kept = [p if keep(token, p) else 0.0 for token, p in enumerate(row)]
    return [p / sum(kept) for p in kept]


def filtered(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """With `min_p` 0.4; and, in half of all cases, only the least likely of the tokens above 0.25 (XTC)."""
    rows = []
    for row in table:
        row = left_over(row, lambda _, p, row=row: p >= 0.4 * max(row))
        above = [p for p in row if p > 0.25]
        without = left_over(row, lambda _, p, above=above: not above or p <= min(above))
        rows.append([(p + q) / 2 for p, q in zip(row, without, strict=True)])
    return rows


FILTERS: dict[str, Any] = {"min_p": 0.4, "xtc_probability": 0.5, "xtc_threshold": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "lookahead"), [("rejection", 2), ("match", 0)])
def test_filtered_texts_have_the_targets_filtered_distribution(acceptance: str, lookahead: Any) -> None:
    asked = {"max_tokens": 4, "lookahead": lookahead, "acceptance": acceptance, **FILTERS}
    tokens = run(lambda: sample(2 * NUM_SESSIONS, target(), drafter(), **asked))
    texts = [ids(text) for text in tokens]
    assert p_value(Counter(tuple(text[:2]) for text in texts), outcomes(filtered(TARGET), 2)) > SIGNIFICANCE
    # Without the random choice, or with one choice for the whole text, the distribution would differ.
    coinless = [[q if q > 0 else 1e-9 for q in row] for row in TARGET]
    assert pooled_p_value([(Counter(tuple(text[:2]) for text in texts), outcomes(coinless, 2))]) < SIGNIFICANCE
    assert lookahead != 2 or share_drafted(tokens) > 0.1


def biased_target(bias: float) -> ScriptedModel:
    """A target whose probabilities are those of `TARGET`, with this share of `DRAFT` mixed in."""
    rows = [
        [(1 - bias) * p + bias * q for p, q in zip(target_row, draft_row, strict=True)]
        for target_row, draft_row in zip(TARGET, DRAFT, strict=True)
    ]
    rows[0] = list(TARGET[0])  # no token that the target never says
    return ScriptedModel(markov(rows), vocab_size=4)


def test_a_bias_of_a_fifth_towards_the_draft_would_be_seen() -> None:
    tokens = run(lambda: sample(NUM_SESSIONS, biased_target(0.2), None, max_tokens=6))
    assert pooled_p_value(successors([PROMPT + ids(text) for text in tokens])) < SIGNIFICANCE


# --- the coupled match rule -----------------------------------------------------------------------

HASHED_TARGET = hashed("target", 6.0)
MATCH: dict[str, Any] = {"temperature": 0.8, "acceptance": "match", "max_tokens": 30}
DRAFTERS = {
    "the target": HASHED_TARGET,
    "a near one": hashed("draft", 3.0, near=HASHED_TARGET),
    "a stranger": hashed("stranger", 6.0),
}


async def matched(
    draft: ScriptedModel | Literal["ngram"] | None, price_seed: int = 0, undo: Any = always, **settings: Any
) -> list[list[int]]:
    target = ScriptedModel(HASHED_TARGET, undo=undo)
    return [ids(text) for text in await sample(4, target, draft, price_seed=price_seed, **{**MATCH, **settings})]


@functools.cache
def texts_alone() -> list[list[int]]:
    texts: list[list[int]] = run(lambda: matched(None))
    assert len({tuple(text) for text in texts}) == 4
    return texts


@sweep(
    "kind, lookahead, price_seed",
    [(kind, lookahead, (i + j) % 2) for i, kind in enumerate(DRAFTERS) for j, lookahead in enumerate([1, 3, "auto"])],
)
def test_under_match_a_seeds_text_does_not_depend_on_drafting(kind: str, lookahead: Any, price_seed: int) -> None:
    draft = ScriptedModel(DRAFTERS[kind])
    assert run(lambda: matched(draft, price_seed, lookahead=lookahead)) == texts_alone()


QUOTING: dict[str, Any] = {"prompt": QUOTABLE, "acceptance": "match", "max_tokens": 40}


@functools.cache
def quotations_alone() -> list[list[int]]:
    return [ids(text) for text in run(lambda: sample(4, target(), None, **QUOTING))]


@sweep("lookahead, undo", [(1, never), (4, always), (4, within(9)), ("auto", always), ("auto", never)])
def test_under_match_a_seeds_text_does_not_depend_on_lookups(lookahead: Any, undo: Any) -> None:
    # Narrow enough to repeat itself.
    narrow = ScriptedModel(markov(TARGET), vocab_size=4, undo=undo)
    looked_up = run(lambda: sample(4, narrow, "ngram", lookahead=lookahead, **QUOTING))
    assert [ids(text) for text in looked_up] == quotations_alone()
    # These prices ignore the width of a pass, so auto's decision about lookups is noise.
    assert sum(token.from_draft for text in looked_up for token in text) > (0 if lookahead == "auto" else 10)


@pytest.mark.parametrize(("of_target", "of_draft"), [(never, always), (always, never), (within(9), within(14))])
def test_under_match_a_seeds_text_does_not_depend_on_how_caches_rewind(of_target: Any, of_draft: Any) -> None:
    draft = ScriptedModel(DRAFTERS["a near one"], undo=of_draft)
    assert run(lambda: matched(draft, undo=of_target, lookahead=3)) == texts_alone()


def test_under_match_a_seeds_text_survives_its_drafter() -> None:
    for n in range(1, 120, 29):
        draft = ScriptedModel(DRAFTERS["a near one"], fails={"feed": {n, n + 30}})
        assert run(lambda draft=draft: matched(draft, lookahead=3)) == texts_alone()


def test_under_match_a_drafter_that_is_the_target_is_always_right() -> None:
    models = ScriptedModel(HASHED_TARGET), ScriptedModel(HASHED_TARGET)
    # So fast that it is never late.
    tokens = run(lambda: sample(4, *models, **MATCH, lookahead=3, draft_part=0.02))
    # With guesses that are all right, the target's own tokens are bonus tokens and the last one.
    for text in tokens:
        flags = [token.from_draft for token in text]
        assert not any(not before and not after for before, after in itertools.pairwise(flags[:-1]))
