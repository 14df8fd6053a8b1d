"""Settings are checked completely before they are used."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import OutriderError, SettingsError
from protocol.settings import Settings, settings_from

NOT_A_NUMBER_OF_TOKENS = [True, 1.0, "3", [], math.nan, math.inf, Fraction(2)]


def test_settings_are_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().seed = 3  # type: ignore[misc]


def test_a_settings_error_is_the_projects_own_and_a_value_error():
    assert issubclass(SettingsError, OutriderError)
    assert issubclass(SettingsError, ValueError)


# --- whole numbers --------------------------------------------------------------------------------

WHOLE_NUMBERS = {
    "max_tokens": (1, None),
    "seed": (0, 2**64 - 1),
    "prefill_step_size": (1, None),
    "lookahead": (0, 64),
}


@sweep(("name", "bounds"), WHOLE_NUMBERS.items())
def test_whole_numbers_are_taken_up_to_their_bounds_and_refused_beyond_them(name, bounds):
    low, high = bounds
    for value in (low, low + 1, high if high is not None else 10**30):
        assert getattr(settings_from({name: value}), name) == value
    allowed = f"of at least {low}" if high is None else f"between {low} and {high}"
    for value in (low - 1, -(10**30), *([high + 1, 10**30] if high is not None else [])):
        with pytest.raises(SettingsError, match=rf"^{name} must be a whole number {allowed}.*, got {value}(;|$)"):
            settings_from({name: value})


@sweep("name", WHOLE_NUMBERS)
@sweep("value", NOT_A_NUMBER_OF_TOKENS)
def test_nothing_but_an_int_is_a_whole_number(name, value):
    with pytest.raises(SettingsError, match=f"^{name} must be a whole number"):
        settings_from({name: value})


@sweep(
    ("name", "meaning"),
    [
        ("max_tokens", "no limit"),
        ("seed", "a fresh seed"),
        ("repetition_context_size", "the whole text"),
        ("presence_context_size", "the whole text"),
        ("frequency_context_size", "the whole text"),
        ("draft_temperature", "the temperature"),
    ],
)
def test_none_is_taken_where_it_means_something_and_the_error_says_what(name, meaning):
    assert getattr(settings_from({name: None}), name) is None
    with pytest.raises(SettingsError, match=f"or None for {meaning}"):
        settings_from({name: -1})


@sweep("name", ["prefill_step_size", "lookahead", "temperature", "ignore_eos", "acceptance"])
def test_none_is_refused_elsewhere(name):
    with pytest.raises(SettingsError, match=rf"^{name} must be .* got None"):
        settings_from({name: None})


def test_only_lookahead_and_the_prefill_step_may_be_auto_among_the_numbers():
    assert Settings(lookahead="auto").lookahead == "auto"
    assert Settings(prefill_step_size="auto").prefill_step_size == "auto"
    for name in ("max_tokens", "seed", "temperature"):
        with pytest.raises(SettingsError, match=rf"^{name} must be .*got 'auto'"):
            settings_from({name: "auto"})
    with pytest.raises(SettingsError, match="or \"auto\", got 'Auto'"):
        settings_from({"lookahead": "Auto"})


def test_a_bias_is_a_finite_number_or_minus_infinity():
    assert Settings(logit_bias={1: -math.inf, 2: 10**300}).logit_bias == {1: -math.inf, 2: 1e300}
    for bias in (math.inf, math.nan, 10**400, -(10**400), True, "1", None):
        with pytest.raises(SettingsError, match=r"^logit_bias must have numbers for values, or -inf, got "):
            Settings(logit_bias={1: bias})


# --- temperature ----------------------------------------------------------------------------------


@sweep("value", [-1, -5e-324, math.nan, math.inf, True, "0.5", None, 1j, [0.5], 10**400])
def test_a_temperature_is_any_finite_number_from_zero(value):
    for finite in (0, -0.0, 1, 0.7, 1e-3, 100.0):
        assert Settings(temperature=finite).temperature == finite
    with pytest.raises(SettingsError, match=r"^temperature must be a finite number of at least 0, got .*; use 0 for"):
        Settings(temperature=value)


def test_the_drafter_takes_the_temperature_unless_given_its_own():
    assert Settings(temperature=0.7).drafting_temperature == 0.7
    assert Settings(temperature=0.7, draft_temperature=0).drafting_temperature == 0
    assert Settings(temperature=0.7, draft_temperature=1.5).drafting_temperature == 1.5
    assert Settings(draft_temperature=1.5).drafting_temperature == 0


# --- a sampler ------------------------------------------------------------------------------------


def greedy(logprobs):
    return logprobs


def test_a_sampler_goes_by_the_match_rule():
    assert Settings(sampler=greedy).rule == "match"
    assert Settings(sampler=greedy, acceptance="match").rule == "match"


@sweep("value", [3, "greedy", (), 0.5])
def test_a_sampler_that_cannot_be_called_is_refused(value):
    with pytest.raises(
        SettingsError, match=r"^sampler must be a function f\(logprobs\), or None for the temperature, got"
    ):
        Settings(sampler=value)


@sweep(
    "beside",
    [{"temperature": 0.5}, {"draft_temperature": 0}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 2}, {"seed": 0}],
)
def test_what_a_sampler_takes_the_place_of_is_refused_beside_it(beside):
    with pytest.raises(SettingsError, match=f"a sampler chooses by itself, so {', '.join(beside)} would"):
        Settings(sampler=greedy, **beside)


def test_by_a_sampler_nothing_can_be_rejected():
    with pytest.raises(SettingsError, match='acceptance="rejection" cannot judge'):
        Settings(sampler=greedy, acceptance="rejection")


# --- stop tokens, flags, rules --------------------------------------------------------------------


# A generator's representation differs from process to process.
@sweep("value", [(), (0,), [5, 3, 5], {3}, range(3), pytest.param((i for i in (4, 5)), id="generator")])
def test_stop_tokens_are_any_ids_in_a_row(value):
    expected = tuple(value) if isinstance(value, (tuple, list, set, range)) else (4, 5)
    assert Settings(stop_tokens=value).stop_tokens == expected


@sweep("value", [3, "12", b"12", 1.5, True])
def test_stop_tokens_that_are_no_sequence_are_refused(value):
    with pytest.raises(SettingsError, match=r"^stop_tokens must be a sequence of token ids, got"):
        Settings(stop_tokens=value)


@sweep("value", [-1, True, 1.0, "7", None, math.nan])
def test_stop_tokens_that_are_no_ids_are_refused_one_by_one(value):
    with pytest.raises(SettingsError, match=r"^stop_tokens must be token ids of at least 0, got .* among them"):
        Settings(stop_tokens=[4, value, 5])


@sweep("value", [0, 1, "yes", None, [], 1.0])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(SettingsError, match=r"^ignore_eos must be True or False, got"):
        Settings(ignore_eos=value)


@sweep("value", ["", "Match", "block", "greedy", None, True, 0, ["match"]])
def test_an_unknown_acceptance_rule_is_refused_with_those_there_are(value):
    with pytest.raises(SettingsError, match=r'^acceptance must be "auto", "match" or "rejection", got'):
        Settings(acceptance=value)


@sweep(
    ("acceptance", "temperature", "seed", "rule"),
    [
        *((rule, 0.0, seed, "match") for rule in ("auto", "match", "rejection") for seed in (None, 1)),
        ("auto", 0.8, None, "rejection"),
        ("auto", 0.8, 0, "match"),
        ("auto", 0.8, 1, "match"),
        *((rule, 0.8, seed, rule) for rule in ("match", "rejection") for seed in (None, 1)),
    ],
)
def test_the_rule_in_force(acceptance, temperature, seed, rule):
    assert Settings(acceptance=acceptance, temperature=temperature, seed=seed).rule == rule


# --- by keyword -----------------------------------------------------------------------------------


def test_settings_from_keywords_are_settings():
    assert settings_from({}) == Settings()
    assert settings_from({"seed": 4, "lookahead": 2}) == Settings(seed=4, lookahead=2)


@sweep(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("sed", "seed"),
        ("temp", "temperature"),
        ("num_draft_tokens", "lookahead"),
    ],
)
def test_a_misspelled_setting_is_refused_with_what_was_meant(name, meant):
    with pytest.raises(SettingsError, match=f"^there is no setting '{name}'; did you mean '{meant}'\\?$"):
        settings_from({name: 1})
    with pytest.raises(SettingsError, match=f"^there is no setting '{name}'; did you mean '{meant}'\\?$"):
        Settings(**{name: 1})


def test_an_unknown_setting_is_refused_with_those_there_are_also_beside_a_bad_value():
    with pytest.raises(SettingsError, match="there is no setting 'zzz'; the settings are max_tokens, temperature, "):
        settings_from({"seed": -1, "zzz": 1})


@sweep("penalty", [1e-300, 0.0099])
def test_a_repetition_penalty_that_logits_cannot_be_divided_by_is_refused(penalty: float) -> None:
    with pytest.raises(SettingsError, match=r"^repetition_penalty must be 0 for no penalty, or at least 0.01, got "):
        Settings(repetition_penalty=penalty)
    assert [Settings(repetition_penalty=each).repetition_penalty for each in (None, 0, 0.01)] == [None, 0, 0.01]


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=2),
    st.lists(st.integers(-2, 5), max_size=3), st.complex_numbers(),
    st.sampled_from(["auto", "match", "rejection"]),
)  # fmt: skip


def taken_or_refused(keywords) -> Settings | SettingsError:
    try:
        return settings_from(keywords)
    except SettingsError as error:
        return error


def as_kept(name, value):
    """A value as settings keep it: lists as tuples, and None as an empty list or mapping, as in mlx-lm."""
    if name in ("xtc_special_tokens", "stop", "stop_tokens", "logits_processors", "prediction"):
        return () if value is None else (value,) if isinstance(value, str) else tuple(value)
    return {} if name == "logit_bias" and value is None else value


@given(keywords=st.dictionaries(st.sampled_from([f.name for f in attrs.fields(Settings)]), anything, max_size=4))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_whatever_is_asked_for_is_taken_as_it_is_or_refused_by_name(keywords):
    outcome = taken_or_refused(keywords)
    if isinstance(outcome, SettingsError):
        assert any(re.match(rf"(a text in )?{name} must (be|have|map) ", str(outcome)) for name in keywords)
        return
    for name, value in keywords.items():
        assert getattr(outcome, name) == as_kept(name, value)
    assert outcome.rule in ("match", "rejection")
