"""Names that other systems have: whoever gives one here is told what it is called."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest

import runtime
from protocol.settings import Settings, settings_from
from protocol.synonyms import NOTES, OPEN_ARGUMENTS, SYNONYMS, meant
from runtime import cli

SETTINGS = {field.name for field in attrs.fields(Settings)}


def test_the_table_leads_to_names_that_there_are_and_from_names_that_there_are_not() -> None:
    assert set(SYNONYMS.values()) <= SETTINGS | set(OPEN_ARGUMENTS)
    assert not set(SYNONYMS) & (SETTINGS | set(OPEN_ARGUMENTS))
    assert set(NOTES) <= set(SYNONYMS)


def test_the_arguments_of_open_are_those_that_it_has() -> None:
    parameters = inspect.signature(runtime.open).parameters.values()
    assert set(OPEN_ARGUMENTS) == {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("draft_model", "it is draft= here"),
        ("assistant_model", "it is draft= here"),
        ("target_model", "it is target= here"),
        ("model", "it is target= here"),
        ("method", 'it is draft= here (draft="ngram" looks up, any other names a draft model)'),
        ("num_draft_tokens", "it is lookahead=, a setting of stream() and the like"),
        ("num_speculative_tokens", "it is lookahead=, a setting of stream() and the like"),
        ("spec_k", "it is lookahead=, a setting of stream() and the like"),
        ("temp", "it is temperature=, a setting of stream() and the like"),
        ("max_new_tokens", "it is max_tokens=, a setting of stream() and the like"),
        ("temperature", "it is a setting of stream() and the like"),
        ("kv_bit", "did you mean 'kv_bits'?"),
    ],
)
async def test_open_says_what_it_is_called(name: str, hint: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        async with runtime.open("/no/such/model", **{name: 1}):
            pass
    assert str(refusal.value) == f"open() has no option {name!r}; {hint}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("draft_model", "it is draft= of open()"),
        ("target_model", "it is target= of open()"),
        ("model", "it is target= of open()"),
        ("method", "it is draft= of open()"),
        ("kv_bits", "it is kv_bits= of open()"),
        ("draft", "it is draft= of open()"),
        ("spec_k", "did you mean 'lookahead'?"),
        ("num_speculative_tokens", "did you mean 'lookahead'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("temp", "did you mean 'temperature'?"),
    ],
)
def test_a_stream_says_what_it_is_called(name: str, hint: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        settings_from({name: 1})
    assert str(refusal.value) == f"there is no setting {name!r}; {hint}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "hi", "--spec-k", "3"], "did you mean --lookahead?"),
        (["generate", "hi", "--num-speculative-tokens", "3"], "did you mean --lookahead?"),
        (["generate", "hi", "--target-model", "x"], "did you mean --target?"),
        (["chat", "--assistant-model", "x"], "did you mean --draft?"),
        (["serve", "--method", "ngram"], "did you mean --draft?"),
        (["bench", "--target-model=x"], "did you mean --target?"),
        (["generate", "hi", "--extra-eos-token", "x"], "--stop ends a text before another one"),
        (["generate", "hi", "--adapter-path", "x"], "an adapter is fused into its model first, by mlx_lm.fuse"),
    ],
)
def test_a_command_says_what_it_is_called(arguments: list[str], hint: str, capfd: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capfd.readouterr().err.rstrip().endswith(f"; {hint}")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("--temp", "--temperature"),
        ("-t", "--temperature"),
        ("-m", "--max-tokens"),
        ("--max-new-tokens", "--max-tokens"),
        ("--num-draft-tokens", "--lookahead"),
    ],
)
def test_mlx_lm_s_flags_are_understood(command: str, alias: str, name: str, capfd: Any) -> None:
    prompt = ["hi"] if command == "generate" else []
    assert cli.main([command, *prompt, alias, "x"]) == 2
    assert capfd.readouterr().err.startswith(f"outrider: error: {name} must be ")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "doctor", "bench"])
def test_mlx_lm_s_names_of_models_are_understood(command: str, capfd: Any) -> None:
    prompt = ["-p", "hi"] if command == "generate" else ["--port", "0"] if command == "serve" else []
    assert cli.main([command, *prompt, "--model", "/no/target", "--draft-model", "/no/draft"]) == 1
    assert capfd.readouterr().err.startswith("outrider: error: target '/no/target' does not exist")


def test_what_is_spelt_alike_is_found_where_no_other_name_is_known() -> None:
    assert meant("temprature", ["temperature", "seed"]) == "temperature"
    assert meant("temp", ["seed"]) is None
    # What it is called here comes before what looks like it.
    assert meant("temp", ["stop", "temperature"]) == "temperature"
