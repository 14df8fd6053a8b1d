"""The acceptance rules: exact cases by enumeration, random draws by statistics with fixed seeds.

p is the target's distribution, q the draft's. With fixed seeds, a statistical test either always passes or always
fails. Its threshold is far below what a correct implementation is likely to reach.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import scipy
from distributions import SIGNIFICANCE, p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.acceptance import (
    Judgement,
    ProposedRows,
    count_accepted,
    distribution,
    draw,
    judge,
    likeliest_only,
    residual,
    scores,
)
from protocol.errors import ProtocolError
from protocol.randomness import Purpose, key_for, keys_for


def choices(logits: mx.array, temperature: float, seed: int, start: int, noise_size: int) -> mx.array:
    decisions = [(seed, start + i) for i in range(logits.shape[0])]
    return mx.argmax(scores(logits, temperature, decisions, noise_size), axis=-1)


def judge_by_match(
    logits: mx.array, drafted: Any, *, temperature: float = 0.0, seed: int = 1, start: int = 1
) -> Judgement:
    rows = ProposedRows(seed, start, logits.shape[0], drafted)
    return judge(logits, [rows], "match", temperature).read()[0]


def judge_by_rejection(logits: mx.array, drafted: Any, draft_probs: Any, *, temperature: float = 1.0) -> Judgement:
    return judge_each(logits, [drafted], draft_probs, temperature=temperature, seed=1, starts=[1])[0]


def judge_each(
    logits: mx.array, drafted: Any, draft_probs: Any, *, temperature: float = 1.0, seed: int, starts: Sequence[int]
) -> list[Judgement]:
    """Judge a proposal for each start, all over the same rows, by rejection.

    `test_texts_that_are_judged_together_are_judged_as_alone` shows that it makes no difference to judge them together.
    """
    rows = [
        ProposedRows(seed, start, logits.shape[0], tokens, draft_probs)
        for start, tokens in zip(starts, drafted, strict=True)
    ]
    return judge(mx.tile(logits, (len(rows), 1)), rows, "rejection", temperature).read()


deterministic = settings(max_examples=40)


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu():
    # Double precision exists on the CPU only.
    with mx.stream(mx.cpu):
        yield


def all_distributions(size: int, parts: int) -> np.ndarray:
    """Every distribution over `size` tokens whose probabilities are multiples of 1/parts."""
    counts = [c for c in itertools.product(range(parts + 1), repeat=size) if sum(c) == parts]
    return np.array(counts, dtype=np.float64) / parts


def normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)


def doubles(values: np.ndarray | list[float]) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.float64), dtype=mx.float64)


def logits_of(probs: list[float] | np.ndarray) -> mx.array:
    """(V,) logits whose softmax at temperature 1 is `probs`; a zero becomes -inf."""
    return mx.log(mx.array(np.asarray(probs), dtype=mx.float32))


def assert_drawn_from(tokens: list[int] | np.ndarray, probs: list[float] | np.ndarray) -> None:
    """Assert, by a chi-square test, that tokens come from a distribution."""
    assert p_value(Counter(np.asarray(tokens).tolist()), dict(enumerate(probs))) > SIGNIFICANCE


# --- rejection, exactly ---------------------------------------------------------------------------


@sweep(("size", "parts"), [(2, 10), (3, 5), (4, 4), (4, 3)])
def test_accepted_and_recovered_mass_add_up_to_the_targets_distribution(size, parts):
    every = all_distributions(size, parts)
    # All pairs, also equal and disjoint ones; a token that q never draws is never accepted.
    p, q = np.repeat(every, len(every), axis=0), np.tile(every, (len(every), 1))
    accepted = np.minimum(p, q)
    left = residual(doubles(p), doubles(q))
    assert left.dtype == mx.float64
    recovered = normalised(np.array(left))
    rejected = 1 - accepted.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(accepted + rejected * recovered, p, rtol=0, atol=1e-9)


@sweep(("target_prob", "draft_prob"), [(0.1, 0.7), (0.3, 0.4), (1 / 3, 2 / 3), (1e-6, 0.5)])
def test_the_bound_of_acceptance_is_p_over_q_to_twelve_digits(target_prob, draft_prob):
    bound = target_prob / draft_prob
    for uniform, expected in ((bound * (1 - 1e-12), 1), (bound * (1 + 1e-12), 0)):
        assert count_accepted(doubles([target_prob]), doubles([draft_prob]), doubles([uniform])).item() == expected


@sweep("count", [1, 2, 5, 6])
def test_a_token_may_be_drawn_from_the_likeliest_alone(count):
    logits = mx.array([[0.5, -2.0, 3.0, -mx.inf, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    left, ids = likeliest_only(logits, count)
    for i, (row, kept) in enumerate(zip(np.array(logits), np.array(left), strict=True)):
        best = np.argsort(-row)[:count]
        assert np.array_equal(kept[best], row[best])
        assert np.all(np.isneginf(np.delete(kept, best)))
        assert ids is None if count >= 5 else set(np.array(ids)[i]) == set(best)


@sweep(
    ("p", "q", "expected"),
    [
        ([0.5, 0.3, 0.2, 0.0], [0.1, 0.4, 0.1, 0.4], [0.4, 0, 0.1, 0]),  # what p has beyond q
        ([0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5], [0.25, 0.75, 0, 0]),  # disjoint
        ([0.25, 0.75, 0], [0, 0, 0], [0.25, 0.75, 0]),  # a bonus token
        *((p, p, p) for p in all_distributions(3, 7)),  # equal
    ],
)
def test_the_residual_is_what_p_has_beyond_q_or_p_where_that_is_nothing(p, q, expected):
    np.testing.assert_allclose(np.array(residual(doubles(p), doubles(q))), expected, atol=1e-15)


# --- count_accepted -------------------------------------------------------------------------------


def test_an_impossible_token_is_rejected_an_equally_likely_one_accepted():
    assert count_accepted(mx.array([0.0]), mx.array([0.5]), mx.array([0.0])).item() == 0
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    assert count_accepted(mx.array([0.3]), mx.array([0.3]), mx.array([largest])).item() == 1


# --- draws ----------------------------------------------------------------------------------------


def draw_each(probs: Any, purpose: Purpose, *, seed: int, positions: Iterable[int]) -> np.ndarray:
    """A draw at each position, all in one evaluation."""
    keys = keys_for(purpose, [(seed, position) for position in positions])
    return np.array(mx.vmap(lambda key: draw(mx.array(probs), key))(keys))


def test_a_draw_needs_no_normalised_weights():
    probs = mx.array([0.1, 0.2, 0.3, 0.4])
    keys = [key_for(11, Purpose.DRAFT, position) for position in range(100)]
    assert mx.array_equal(*(mx.stack([draw(weights, key) for key in keys]) for weights in (probs, probs * 8)))


def test_a_distribution_is_the_softmax_in_single_precision_whatever_the_models():
    logits = mx.array([[1.0, 2.0, -1.0, 0.5]], dtype=mx.bfloat16)
    probs = distribution(logits, 0.5)
    assert probs.dtype == mx.float32
    expected = normalised(np.exp(np.array([[2.0, 4.0, -2.0, 1.0]])))
    np.testing.assert_allclose(np.array(probs), expected, rtol=1e-6)


@sweep("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 5e-324])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    logits = mx.array([[1.0, 3.0, 2.0, 3.5, -4.0]])
    assert choices(logits, temperature, seed=1, start=2, noise_size=5).tolist() == [3]
    assert judge_by_rejection(logits, (), (), temperature=temperature).token == 3


# --- rejection, judged ----------------------------------------------------------------------------

TARGET_ROWS = [
    [0.40, 0.05, 0.25, 0.00, 0.30],
    [0.10, 0.20, 0.30, 0.25, 0.15],
    [0.00, 0.00, 0.50, 0.50, 0.00],
    [0.30, 0.30, 0.20, 0.10, 0.10],
]
DRAFT_ROWS = [
    [0.10, 0.40, 0.20, 0.30, 0.00],
    [0.10, 0.25, 0.25, 0.30, 0.10],
    [0.25, 0.25, 0.25, 0.25, 0.00],
]


def draws(rows, *, seed, starts) -> list[tuple[int, ...]]:
    """A proposal for each start, drawn from `rows` as the drafter does; all in one evaluation."""
    if not rows:
        return [() for _ in starts]
    drawn = [
        draw_each(row, Purpose.DRAFT, seed=seed, positions=(start + i for start in starts))
        for i, row in enumerate(rows)
    ]
    return list(zip(*(tokens.tolist() for tokens in drawn), strict=True))


def judge_fresh_draws(target_rows, draft_rows, *, seed, starts) -> list[tuple[tuple[int, ...], Judgement]]:
    """A proposal drawn from `draft_rows` for each start, with its judgement."""
    logits = mx.stack([logits_of(row) for row in target_rows])
    draft_probs = tuple(mx.array(row) for row in draft_rows)
    drafted = draws(draft_rows, seed=seed, starts=starts)
    return list(zip(drafted, judge_each(logits, drafted, draft_probs, seed=seed, starts=starts), strict=True))


def first_tokens(target_rows, draft_rows, *, seed, starts) -> list[int]:
    """The first token that a proposal for each start commits."""
    return [
        drafted[0] if judgement.num_accepted else judgement.token
        for drafted, judgement in judge_fresh_draws(target_rows, draft_rows, seed=seed, starts=starts)
    ]


@sweep(
    "draft_row",
    [
        pytest.param(DRAFT_ROWS[0], id="overlapping"),
        pytest.param(TARGET_ROWS[0], id="equal"),
        pytest.param([0.0, 0.0, 0.0, 1.0, 0.0], id="disjoint"),
        pytest.param([0.0, 1.0, 0.0, 0.0, 0.0], id="always-the-same-token"),
        pytest.param([0.7, 0.3], id="narrower"),
    ],
)
def test_the_first_token_is_a_sample_of_p_for_any_q(draft_row):
    assert_drawn_from(first_tokens(TARGET_ROWS[:2], [draft_row], seed=31, starts=range(1000)), TARGET_ROWS[0])


def test_a_verdict_lacks_its_token_only_without_a_row_for_it():
    sure = logits_of([[0.0, 1.0, 0.0]])
    accept = judge_by_rejection(sure, (1,), (mx.array([0.0, 1.0, 0.0]),))
    assert accept == Judgement(1, None)
    reject = judge_by_rejection(sure, (0,), (mx.array([1.0, 0.0, 0.0]),))
    assert reject == Judgement(0, 1)
    bonus = judge_by_rejection(mx.concatenate([sure, sure]), (1,), (mx.array([0.0, 1.0, 0.0]),))
    assert bonus == Judgement(1, 1)


def test_each_decision_takes_the_number_for_its_purpose_and_position():
    p, q = TARGET_ROWS[:3], DRAFT_ROWS[:2]
    target_probs = [distribution(logits_of(row), 1.0) for row in p]
    draft_probs = [mx.array(row) for row in q]
    for start, (drafted, judgement) in enumerate(judge_fresh_draws(p, q, seed=48, starts=range(200))):
        num_accepted = 0
        for i, token in enumerate(drafted):
            uniform = mx.random.uniform(key=key_for(48, Purpose.ACCEPT, start + i))
            if not (uniform * draft_probs[i][token] < target_probs[i][token]).item():
                break
            num_accepted += 1
        weights = target_probs[num_accepted]
        if num_accepted < len(drafted):
            weights = residual(weights, draft_probs[num_accepted])
        token_after = draw(weights, key_for(48, Purpose.RECOVER, start + num_accepted)).item()
        assert judgement == Judgement(num_accepted, token_after)


def test_the_temperature_is_applied_to_the_target():
    judgements = judge_each(logits_of([[0.8, 0.2]]), [()] * 1500, (), temperature=2.0, seed=47, starts=range(1500))
    assert_drawn_from([judgement.token for judgement in judgements], normalised(np.sqrt([0.8, 0.2])))


@sweep(("num_rows", "num_drafted"), [(0, 0), (0, 1), (2, 0), (1, 2), (4, 2), (3, 1)])
def test_rows_that_fit_no_proposal_are_an_error(num_rows, num_drafted):
    logits = mx.zeros((num_rows, 4))
    drafted = (1,) * num_drafted
    probs = (mx.array([0.25] * 4),) * num_drafted
    needed = f"{num_drafted} drafted tokens need {num_drafted} or {num_drafted + 1} rows of logits"
    with pytest.raises(ProtocolError, match=needed):
        judge_by_rejection(logits, drafted, probs)
    with pytest.raises(ProtocolError, match=f"got {num_rows}"):
        judge_by_match(logits, drafted)


@sweep(("num_drafted", "num_probs"), [(2, 1), (1, 2), (1, 0), (0, 1)])
def test_drafted_tokens_without_a_distribution_each_are_an_error(num_drafted, num_probs):
    logits, probs = mx.zeros((num_drafted + 1, 4)), (mx.array([0.25] * 4),) * num_probs
    needed = f"{num_drafted} drafted tokens need as many distributions, got {num_probs}"
    with pytest.raises(ProtocolError, match=needed):
        judge_by_rejection(logits, (1,) * num_drafted, probs)


@sweep("nothing", [math.nan, 0.0])
def test_a_token_drawn_from_nothing_is_rejected_those_before_are_judged(nothing):
    logits, draft_probs = logits_of(TARGET_ROWS[:3]), tuple(map(mx.array, DRAFT_ROWS[:2]))
    spoilt = (draft_probs[0], mx.full((5,), nothing))
    for start, drafted in enumerate(draws(DRAFT_ROWS[:2], seed=51, starts=range(60))):
        whole = ProposedRows(51, start, 3, drafted, spoilt)
        short = ProposedRows(51, start, 2, drafted[:1], draft_probs[:1])
        assert judge(logits, [whole], "rejection", 1.0).read() == judge(logits[:2], [short], "rejection", 1.0).read()


# --- the power of these tests ---------------------------------------------------------------------

# With so many draws, the chi-square test sees a bias of 5 %: its noncentrality is 50, and `SIGNIFICANCE` is the
# p-value of a statistic of 21 at three degrees of freedom.
NUM_DRAWS = 30_000
PROBS = [0.40, 0.05, 0.25, 0.00, 0.30]
# One probability is greater by 5 % of itself, at the expense of the others in proportion.
BIASED_PROBS = [0.42, *(p * 0.58 / 0.60 for p in PROBS[1:])]


def coupled_choices(probs: list[float], starts: range) -> np.ndarray:
    rows = mx.broadcast_to(logits_of(probs), (len(starts), 5))
    return np.array(choices(rows, 1.0, seed=58, start=starts[0], noise_size=5))


def independent_draws(probs: list[float], starts: range) -> np.ndarray:
    return draw_each(probs, Purpose.RECOVER, seed=59, positions=starts)


def judged_by_rejection(probs: list[float], starts: range) -> np.ndarray:
    return np.array(first_tokens([probs], DRAFT_ROWS[:1], seed=60, starts=starts))


@pytest.mark.parametrize(
    "sampler", [coupled_choices, independent_draws, pytest.param(judged_by_rejection, marks=pytest.mark.slow)]
)
def test_a_bias_of_a_twentieth_is_seen(sampler):
    def tokens(probs: list[float]) -> np.ndarray:
        return np.concatenate([sampler(probs, range(start, start + 3000)) for start in range(1, NUM_DRAWS, 3000)])

    assert_drawn_from(tokens(PROBS), PROBS)
    with pytest.raises(AssertionError):
        assert_drawn_from(tokens(BIASED_PROBS), PROBS)


# --- rejection of looked-up tokens ----------------------------------------------------------------


@sweep("num_rows", [3, 4])
@sweep("certain", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_an_undrawn_token_is_judged_as_drawn_from_itself_alone(num_rows, certain):
    logits = mx.stack([logits_of(row) for row in TARGET_ROWS[:num_rows]])
    # The draft has fewer ids than the target; a looked-up token may be any of the target's.
    drawn_from = [mx.array(normalised(np.array(row[:4]))) for row in DRAFT_ROWS]
    one_hot, padded = [mx.array(row) for row in np.eye(5)], [mx.pad(row, (0, 1)) for row in drawn_from]
    left_out = tuple(None if i in certain else drawn_from[i] for i in range(3))
    proposals: tuple[list[ProposedRows], list[ProposedRows]] = ([], [])
    for start in range(1, 120):
        # Every second draft is the target's preferred token, so that all three tokens may be accepted.
        likely = (0, 2, 3)
        drafted = tuple(likely[i] if start % 2 else (start // 2 + i) % (5 if i in certain else 4) for i in range(3))
        written_out = tuple(one_hot[token] if i in certain else padded[i] for i, token in enumerate(drafted))
        for proposed, probs in zip(proposals, (written_out, left_out), strict=True):
            proposed.append(ProposedRows(61, start, num_rows, drafted, probs))
    rows = mx.tile(logits, (119, 1))
    judged, expected = (judge(rows, proposed, "rejection", 1.0).read() for proposed in proposals)
    assert judged == expected
    assert {judgement.num_accepted for judgement in judged} == {0, 1, 2, 3}


# --- match at temperature 0 -----------------------------------------------------------------------


@sweep(("length", "num_rows"), [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 4)])
def test_a_greedy_proposal_stands_as_far_as_it_is_the_targets_argmax(length, num_rows):
    for chosen in itertools.product(range(3), repeat=num_rows):
        logits = mx.array(np.eye(3)[list(chosen)], dtype=mx.float32)
        for drafted in itertools.product(range(3), repeat=length):
            agreed = next((i for i in range(length) if drafted[i] != chosen[i]), length)
            judgement = judge_by_match(logits, drafted)
            assert judgement == Judgement(agreed, chosen[agreed] if agreed < len(chosen) else None)


# --- match above temperature 0 --------------------------------------------------------------------


@sweep("temperature", [0.5, 1.0, 1.7])
def test_a_coupled_choice_is_a_sample_of_p(temperature):
    probs = np.array([0.4, 0.05, 0.25, 0.0, 0.3])
    rows = mx.broadcast_to(logits_of(probs), (3000, 5))
    chosen = choices(rows, temperature, seed=51, start=0, noise_size=5)
    assert_drawn_from(np.array(chosen), normalised(probs ** (1 / temperature)))


@given(
    rows=st.integers(1, 6), size=st.integers(1, 9), padding=st.integers(0, 9), seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 10**6),
)  # fmt: skip
@deterministic
def test_a_coupled_choice_is_the_same_however_far_a_vocabulary_is_padded(rows, size, padding, seed, start):
    logits = mx.random.normal((rows, size), key=mx.random.key(seed % 1000))
    padded = mx.concatenate([logits, mx.full((rows, padding), -math.inf)], axis=1)
    noise_size = size + padding
    narrow = choices(logits, 0.8, seed, start, noise_size).tolist()
    assert choices(padded, 0.8, seed, start, noise_size).tolist() == narrow


@given(
    drafted=st.lists(st.integers(0, 3), max_size=4),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(1, 1000),
)
@deterministic
def test_what_a_match_commits_does_not_depend_on_what_was_drafted(drafted, temperature, seed, start):
    logits = mx.random.normal((len(drafted) + 1, 4), key=mx.random.key(7))
    own = choices(logits, temperature, seed, start, 4).tolist()
    judgement = judge_by_match(logits, tuple(drafted), temperature=temperature, seed=seed, start=start)
    committed = [*drafted[: judgement.num_accepted], judgement.token]
    assert committed == own[: len(committed)]


@sweep("closeness", [0.02, 0.2, 1.0, 5.0])
def test_coupled_choices_agree_at_least_as_often_as_the_bound_says(closeness):
    random = np.random.default_rng(55)
    p = normalised(random.gamma(1.0, size=12))
    q = normalised(p + closeness * random.gamma(0.3, size=12))
    total_variation = np.abs(p - q).sum() / 2
    bound = (1 - total_variation) / (1 + total_variation)
    theirs, ours = (
        np.array(choices(mx.broadcast_to(logits_of(probs), (3000, 12)), 1.0, seed=56, start=0, noise_size=12))
        for probs in (p, q)
    )
    agreed = int((theirs == ours).sum())
    assert scipy.stats.binomtest(agreed, 3000, bound, alternative="less").pvalue > SIGNIFICANCE


@sweep("rule", ["match", "rejection"])
@sweep("temperature", [0.4, 1.0, 2.0])
def test_texts_that_are_judged_together_are_judged_as_alone(rule: Any, temperature: float) -> None:
    """Proposals of different lengths, with and without a row for a bonus token, drawn or determined."""
    size, draws = 40, np.random.default_rng(5)
    for trial in range(12):
        proposed, rows = [], []
        for length in (0, 3, 1, 4, 2):
            num_rows = length + (length == 0 or bool(draws.integers(2)))
            probs = tuple(
                None if draws.random() < 0.3 else mx.softmax(mx.array(draws.normal(size=size - 3), mx.float32))
                for _ in range(length)
            )
            drafted = tuple(int(token) for token in draws.integers(0, size - 3, length))
            proposed.append(ProposedRows(trial, 10 * length, num_rows, drafted, probs))
            rows.append(mx.array(draws.normal(size=(num_rows, size)), mx.float32))
        together = judge(mx.concatenate(rows), proposed, rule, temperature).read()
        alone = [judge(own, [each], rule, temperature).read()[0] for own, each in zip(rows, proposed, strict=True)]
        assert together == alone
