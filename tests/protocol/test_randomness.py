"""Every random number is a function of (seed, purpose, position), and no two of them are related."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
import scipy
from sweeps import sweep

from protocol.randomness import Purpose, _mix, key_for, seed_of_prediction

SMALLEST_P_VALUE = 1e-4
SEEDS = (0, 1, 2, 3, 4, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 2, 2**64 - 1)


def uniforms(seed: int, purpose: Purpose, positions: range) -> np.ndarray:
    keys = mx.stack([key_for(seed, purpose, position) for position in positions])
    return np.array(mx.vmap(lambda key: mx.random.uniform(key=key))(keys))


def test_keys_differ_between_seeds_purposes_and_positions():
    positions = [*range(40), 2**16, 2**20, 2**32, 2**40]
    keys = {
        tuple(key_for(seed, purpose, position).tolist())
        for seed, purpose, position in itertools.product(SEEDS, Purpose, positions)
    }
    assert len(keys) == len(SEEDS) * len(Purpose) * len(positions)


def test_a_key_is_the_same_each_time_whatever_was_drawn_in_between():
    keys = [key_for(5, purpose, 17).tolist() for purpose in Purpose]
    mx.random.seed(99)
    mx.random.normal((10,))
    assert [key_for(5, purpose, 17).tolist() for purpose in reversed(Purpose)] == keys[::-1]


def test_numbers_are_spread_as_splitmix64_spreads_them():
    # The first three numbers of the published generator for seed 0.
    golden = 0x9E3779B97F4A7C15
    first_three = [_mix(i * golden % 2**64) for i in range(3)]
    assert first_three == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@sweep("purpose", list(Purpose))
def test_numbers_over_positions_are_uniform(purpose):
    assert scipy.stats.kstest(uniforms(6, purpose, range(1500)), "uniform").pvalue > SMALLEST_P_VALUE


def assert_unrelated(one: np.ndarray, other: np.ndarray) -> None:
    table = np.histogram2d(one, other, bins=4, range=[[0, 1], [0, 1]])[0]
    assert scipy.stats.chi2_contingency(table).pvalue > SMALLEST_P_VALUE


@sweep(("one", "other"), list(itertools.combinations(Purpose, 2)))
def test_two_decisions_about_one_position_are_unrelated(one, other):
    assert_unrelated(uniforms(7, one, range(1000)), uniforms(7, other, range(1000)))


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_decisions_about_near_positions_are_unrelated(distance):
    numbers = uniforms(8, Purpose.ACCEPT, range(1000 + distance))
    assert_unrelated(numbers[:1000], numbers[distance:])


@pytest.mark.parametrize(("one", "other"), [(9, 10), (0, 1), (0, 2**64 - 1)])
def test_near_seeds_give_unrelated_numbers(one, other):
    assert_unrelated(uniforms(one, Purpose.NOISE, range(1000)), uniforms(other, Purpose.NOISE, range(1000)))


def test_seeds_of_predictions_differ_between_seeds_and_predictions_and_are_unrelated():
    predictions = [(1,), (1, 2), (2, 1), (1, 2, 0), (2**31,)]
    seeds = [seed_of_prediction(seed, each) for seed in SEEDS for each in predictions]
    assert len(set(seeds)) == len(SEEDS) * len(predictions)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of_prediction(3, [1, 2]) == seed_of_prediction(3, (1, 2))
    for one, other in itertools.pairwise((3, seed_of_prediction(3, (1,)), seed_of_prediction(3, (2,)))):
        assert_unrelated(uniforms(one, Purpose.ACCEPT, range(1000)), uniforms(other, Purpose.ACCEPT, range(1000)))
