"""Settings are checked completely before they are used, in the library, on the command line and in requests."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings, settings_from
from runtime.cli import main as cli
from runtime.cli.flags import flag
from runtime.server.answers.body import parse_request
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests import CompletionRequest


def test_settings_are_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Settings().seed = 3


# --- one table of bad values ----------------------------------------------------------------------

LIMIT = "be a whole number of at least 1, or None for no limit"
PENALTY = "be a finite number, or None for no penalty"
CONTEXT = "be a whole number of at least 1, or None for the whole text"
RULES = 'be "auto", "match" or "rejection"'
PROPOSAL = 'be a whole number between 0 and 64, or "auto"'
SEED = f"be a whole number between 0 and {2**64 - 1}, or None for a fresh seed"
IDS, ID = "be a sequence of token ids", "be token ids of at least 0"

BAD: list[tuple[str, Any, str]] = [
    *(("thinking_budget", value, LIMIT.replace("1", "0")) for value in (-2, 2.5, True, "many")),
    *(("max_tokens", value, LIMIT) for value in (0, -(10**30), 2.5, True, "many", math.inf)),
    *(("temperature", value, "be a finite number of at least 0") for value in (-1, -5e-324, math.nan, None, "hot", 1j)),
    ("temperature", 10**400, "be a finite number of at least 0"),
    ("draft_temperature", -1, "be a finite number of at least 0, or None for the temperature"),
    ("top_p", 1.5, "be a number between 0 and 1"),
    ("min_p", -0.1, "be a number between 0 and 1"),
    ("min_tokens_to_keep", 0, "be a whole number of at least 1"),
    *(("top_k", value, "be a whole number of at least 0") for value in (-2, "ten")),
    ("xtc_probability", 2, "be a number between 0 and 1"),
    ("xtc_threshold", 0.6, "be a number between 0 and 0.5"),
    ("xtc_special_tokens", (1, "x"), ID),
    *(("seed", value, SEED) for value in (-2, 2**64, 1.5, "auto")),
    ("stop", 3, "be a text or a sequence of texts"),
    ("stop", [1], "be texts, got 1 among them; ids go into stop_tokens"),
    *(("stop_tokens", value, IDS) for value in (3, "12", 1.5, True)),
    *(("stop_tokens", (4, value), ID) for value in (-2, 1.5, "x", True)),
    *(("ignore_eos", value, "be True or False") for value in (0, "maybe", None, [])),
    ("logit_bias", "1", "map token ids to numbers"),
    ("logit_bias", {"a": 1}, "have token ids of at least 0 for keys"),
    *(("logit_bias", {1: value}, "have numbers for values, or -inf") for value in (math.inf, math.nan, 10**400, True)),
    ("repetition_penalty", -1, "be a finite number of at least 0, or None for no penalty"),
    *(("repetition_penalty", value, "be 0 for no penalty, or at least 0.01") for value in (1e-300, 0.0099)),
    ("presence_penalty", math.inf, PENALTY),
    ("frequency_penalty", "much", PENALTY),
    ("repetition_context_size", 0, CONTEXT),
    ("presence_context_size", "all", CONTEXT),
    ("frequency_context_size", 1.5, CONTEXT),
    ("logits_processors", 5, "be a sequence of functions"),
    ("logits_processors", (3,), "be functions"),
    *(("sampler", value, "be a function") for value in (3, "greedy", ())),
    ("logprobs", 129, "be a whole number between 0 and 128"),
    *(("prefill_step_size", value, 'be a whole number of at least 1, or "auto"') for value in (0, None, "Auto")),
    *(("acceptance", value, RULES) for value in ("", "Match", "block", None, True, ["match"])),
    *(("lookahead", value, PROPOSAL) for value in (65, -1, None, "Auto", 3.5)),
    ("prediction", (-1,), ID),
    ("reuse_prefix", 1, "be True or False"),
    ("prompt_cache_file", "", "be the path of a file or None"),
]
# Settings that requests have in another form.
IN_ANOTHER_FORM = {"stop", "logit_bias", "logprobs"}


def typed(form: str | None, value: Any) -> str | None:
    """The text of a value as that of a flag of some form; None if it cannot be typed so that it is wrong."""
    if form in (None, "", "TEXT", "FILE") or isinstance(value, list):
        return None
    if isinstance(value, dict):
        return ",".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return None if form == "IDS" else str(value)


def is_json(value: Any) -> bool:
    """Whether a request can have a value; null is as if a field was not sent."""
    return isinstance(value, (str, list, tuple)) or (isinstance(value, (int, float)) and abs(value) < 1e100)


def test_the_table_has_every_setting() -> None:
    assert {name for name, *_ in BAD} == {field.name for field in attrs.fields(Settings)}


@sweep(("name", "value", "says"), BAD)
def test_a_bad_value_is_refused_by_name_with_its_bound_everywhere(name: str, value: Any, says: str, capfd: Any) -> None:
    with pytest.raises(SettingsError, match=f"^{name} must {re.escape(says)}"):
        settings_from({name: value})
    option = options_of(Settings)[name]
    if (text := typed(option.form, value)) is not None:
        assert cli.main(["generate", "hi", f"{flag(name)}={text}", "--target", "/no/such/model"]) == 2
        assert capfd.readouterr().err.startswith(f"outrider: error: {flag(name)} must {says.partition(' ')[0]} ")
    # A request for no tokens has its prompt read.
    means_something = (name, value) == ("max_tokens", 0)
    if option.in_requests and name not in IN_ANOTHER_FORM and is_json(value) and not means_something:
        body = json.dumps({"prompt": "hi", name: value}).encode()
        with pytest.raises((ErrorResponse, SettingsError)) as refused:
            settings_from(dict(parse_request(CompletionRequest, body).generation().settings))
        assert name in str(refused.value)


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    *(("rewind", value, "one of 'auto', 'trim', 'checkpoint', 'none'") for value in ("never", None, ["auto"])),
    *(("max_kv_size", value, "a whole number of at least 5") for value in (4, 0, True, 8.5, "eight", math.nan)),
    *(("kv_bits", value, "2, 3, 4, 5, 6, 8 or None") for value in (0, 1, 7, 16, -8, 2.5, "eight", [8])),
    *(("kv_group_size", value, "32, 64 or 128") for value in (0, 31, 65, None, "big", -32)),
    *(("quantized_kv_start", value, "a whole number of at least 0") for value in (-1, None, True, 0.5, "late")),
    *(("max_streams", value, "a whole number of at least 1") for value in (0, True, "many")),
    *(("max_batch", value, "a whole number of at least 1") for value in (0, None)),
    *(("prefix_cache_bytes", value, "a whole number of at least 0") for value in (-1, 1.5, "much", None, True)),
    ("idle_reading", 1, "True or False"),
    *(("prefix_cache_dir_bytes", value, "a whole number of at least 0") for value in (-1, "much")),
    ("generation_config", "always", "one of 'auto', 'none'"),
    ("draft_process", 1, "True or False"),
    ("draft_device", "tpu", '"cpu", "gpu" or None'),
    ("work_ahead", "often", "one of 'auto', 'always', 'never'"),
]


@sweep(("name", "value", "bound"), BAD_OPTIONS)
def test_a_bad_option_of_open_is_refused_by_name_with_its_bound(name: str, value: Any, bound: str, capfd: Any) -> None:
    with pytest.raises(SettingsError, match=f"^{name} must be {re.escape(bound)}"):
        OpenOptions(**{"target": "/no/such/model", name: value})
    is_typed = name not in ("max_streams", "max_batch") and value != 1.5  # which is a size where it is typed
    text = typed(options_of(OpenOptions)[name].form, value) if is_typed else None
    if text is not None:
        assert cli.main(["chat", f"{flag(name)}={text}", "--target", "demo"]) == 2
        assert capfd.readouterr().err.startswith(f"outrider: error: {flag(name)} must be ")


def test_options_of_open_that_exclude_each_other_are_refused() -> None:
    for options in ({"kv_bits": 8, "max_kv_size": 16}, {"draft_process": True, "draft_rank": 1}):
        with pytest.raises(SettingsError, match="{} and {} exclude each other".format(*options)):
            OpenOptions(target="/no/such/model", **options)


# --- numbers --------------------------------------------------------------------------------------


@sweep(
    "name",
    [
        *("max_tokens", "thinking_budget", "seed", "draft_temperature"),
        *(name for name, *_, says in BAD if says == CONTEXT),
    ],
)
def test_none_is_taken_where_it_means_something(name):
    assert getattr(settings_from({name: None}), name) is None


# --- temperature ----------------------------------------------------------------------------------


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


def test_an_unknown_setting_is_refused_with_those_there_are_also_beside_a_bad_value():
    with pytest.raises(SettingsError, match="there is no setting 'zzz'; the settings are max_tokens, temperature, "):
        settings_from({"seed": -1, "zzz": 1})


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
@settings(max_examples=200)
def test_whatever_is_asked_for_is_taken_as_it_is_or_refused_by_name(keywords):
    outcome = taken_or_refused(keywords)
    if isinstance(outcome, SettingsError):
        assert any(re.match(rf"(a text in )?{name} must (be|have|map) ", str(outcome)) for name in keywords)
        return
    for name, value in keywords.items():
        assert getattr(outcome, name) == as_kept(name, value)
    assert outcome.rule in ("match", "rejection")
