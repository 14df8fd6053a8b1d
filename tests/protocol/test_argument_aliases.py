"""An argument's name in another library is answered with its name here."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from models import llama
from sweeps import sweep

import runtime
from protocol.argument_aliases import ALIASES, NOTES, meant
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings, settings_from
from runtime.cli import main as cli
from runtime.cli.flags import flag, hint_for
from runtime.server.openai.requests import CompletionRequest

SETTINGS = {field.name for field in attrs.fields(Settings)}


def test_the_table_leads_from_removed_names_to_existing_ones() -> None:
    assert set(ALIASES.values()) <= SETTINGS | set(options_of(OpenOptions))
    assert not set(ALIASES) & (SETTINGS | set(options_of(OpenOptions)))
    assert set(NOTES) <= set(ALIASES)


@sweep(
    ("name", "hint"),
    [
        ("assistant_model", "it is draft= here"),
        ("model", "it is target= here"),
        ("method", 'it is draft= here (draft="ngram" looks up, any other names a draft model)'),
        ("num_draft_tokens", "it is lookahead=, a setting of stream() and the like"),
        ("temperature", "it is a setting of stream() and the like"),
        ("kv_bit", "did you mean 'kv_bits'?"),
    ],
)
@sweep("models", [("/no/such/model",), ()])
async def test_open_says_what_it_is_called(models: tuple[str, ...], name: str, hint: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        async with runtime.open(*models, **{name: 1}):
            pass
    assert str(refusal.value) == f"open() has no option {name!r}; {hint}"


MISSING = "target is missing; give a path, a hub id or a pair (model, tokenizer)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_model": "x"}, "open() has no option 'target_model'; it is target= here"),
        ({"draft_model": "x"}, "open() has no option 'draft_model'; it is draft= here"),
        ({}, MISSING),
    ],
)
async def test_every_way_to_open_says_what_is_missing(options: dict[str, Any], said: str) -> None:
    async def under_asyncio() -> None:
        async with runtime.aio.open(**options):
            pass

    with pytest.raises(runtime.SettingsError, match=re.escape(said)):
        await runtime.keep_open(**options)
    for ask in (partial(runtime.open_sync, **options), partial(asyncio.run, under_asyncio())):
        with pytest.raises(runtime.SettingsError, match=re.escape(said)):
            await trio.to_thread.run_sync(ask)


@sweep(
    ("options", "said"),
    [
        ({"model": "x"}, "there is no setting 'model'; it is target= of open()"),
        ({"target_model": "x"}, "there is no setting 'target_model'; it is target= of open()"),
        ({"continue_final_message": True}, "there is no setting 'continue_final_message'; give the last message as {"),
        # Before a model is loaded: there is none at this path.
        ({"target": "/no/such/model", "draft_model": "x"}, "there is no setting 'draft_model'; it is draft= of open()"),
        ({}, MISSING),
    ],
)
def test_a_single_text_says_what_its_models_are_called(options: dict[str, Any], said: str) -> None:
    with pytest.raises(runtime.SettingsError, match=re.escape(said)):
        runtime.generate_sync("hi", **options)


@sweep(
    ("options", "said"),
    [
        ({"draft_model": "x"}, "attach_draft() has no option 'draft_model'; it is draft= here"),
        ({"model": "x"}, "attach_draft() has no option 'model'; the options are draft"),
        ({"device": "cpu"}, "attach_draft() has no option 'device'; MLX has one default device for the whole process"),
        ({}, "draft is missing; give a path, a hub id or a pair (model, tokenizer)"),
    ],
)
def test_attaching_a_drafter_says_what_it_is_called(options: dict[str, Any], said: str) -> None:
    async def under_asyncio() -> None:
        async with runtime.aio.open((llama(seed=1), None)) as rt:
            await rt.attach_draft(**options)

    with runtime.open_sync((llama(seed=1), None)) as rt, pytest.raises(runtime.SettingsError, match=re.escape(said)):
        rt.attach_draft(**options)
    with pytest.raises(runtime.SettingsError, match=re.escape(said)):
        asyncio.run(under_asyncio())


@sweep(
    ("name", "hint"),
    [
        ("draft_model", "it is draft= of open()"),
        ("kv_bits", "it is kv_bits= of open()"),
        ("spec_k", "did you mean 'lookahead'?"),
        ("temp", "did you mean 'temperature'?"),
    ],
)
def test_a_stream_says_what_it_is_called(name: str, hint: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        settings_from({name: 1})
    assert str(refusal.value) == f"there is no setting {name!r}; {hint}"


@sweep(
    ("arguments", "hint"),
    [
        (["generate", "hi", "--spec-k", "3"], "did you mean --lookahead?"),
        (["chat", "--assistant-model", "x"], "did you mean --draft?"),
        (["serve", "--method", "ngram"], "did you mean --draft?"),
        (["bench", "--target-model=x"], "did you mean --target?"),
        (["serve", "--repeat-penalty=3"], 'each request sets this, by its field "repetition_penalty"'),
        (["serve", "--max-new-tokens", "9"], "did you mean --max-tokens?"),
        (["chat", "--extra-eos-token", "x"], "--stop ends a text at a string"),
        (["generate", "hi", "--image", "x"], "models read text alone"),
    ],
)
def test_a_command_says_what_it_is_called(arguments: list[str], hint: str, capfd: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capfd.readouterr().err.rstrip().endswith(f"; {hint}")


@pytest.mark.parametrize("name", ["num_draft_tokens", "temp"])
def test_a_command_without_a_setting_suggests_no_flag_in_its_place(name: str, capfd: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", f"--{name.replace('_', '-')}=1"])
    assert "; " not in capfd.readouterr().err


def test_a_server_says_of_just_those_settings_that_requests_set_them() -> None:
    hints = {name: hint_for(flag(name), ["--port"], by_request=True) or "" for name in SETTINGS}
    said = {name for name, hint in hints.items() if hint.startswith("each request sets this")}
    assert said == SETTINGS & set(CompletionRequest.model_fields)


@sweep("command", ["generate", "chat"])
@sweep(
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


@sweep("command", ["generate", "chat", "serve", "doctor", "bench"])
def test_mlx_lm_s_names_of_models_are_understood(command: str, capfd: Any) -> None:
    prompt = ["-p", "hi"] if command == "generate" else ["--port", "0"] if command == "serve" else []
    assert cli.main([command, *prompt, "--model", "/no/target", "--draft-model", "/no/draft"]) == 1
    assert capfd.readouterr().err.startswith("outrider: error: target '/no/target' does not exist")


def test_what_is_spelt_alike_is_found_where_no_other_name_is_known() -> None:
    assert meant("temprature", ["temperature", "seed"]) == "temperature"
    assert meant("temp", ["seed"]) is None
    # An alias comes before a name with a similar spelling.
    assert meant("temp", ["stop", "temperature"]) == "temperature"
