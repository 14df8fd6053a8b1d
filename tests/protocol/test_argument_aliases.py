"""An argument's name in another library is answered with its name here."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from mlx_lm import chat, server
from models import llama
from sweeps import sweep

import runtime
from protocol.argument_aliases import ALIASES, NOTES
from protocol.open_options import OpenOptions
from protocol.options import options_of
from protocol.settings import Settings, settings_from
from runtime.cli import main as cli
from runtime.cli.flags import flag, hint_for
from runtime.server.openai.requests import CompletionRequest

SETTINGS = {field.name for field in attrs.fields(Settings)}
MISSING = "target is missing; give a path, a hub id or a pair (model, tokenizer)"


def test_the_table_leads_from_removed_names_to_existing_ones() -> None:
    assert set(ALIASES.values()) <= SETTINGS | set(options_of(OpenOptions))
    assert not set(ALIASES) & (SETTINGS | set(options_of(OpenOptions)))
    assert set(NOTES) <= set(ALIASES)


OPEN = [
    ({"assistant_model": 1}, "open() has no option 'assistant_model'; it is draft= here"),
    ({"model": 1}, "open() has no option 'model'; it is target= here"),
    (
        {"copy_corpus": 1},
        "open() has no option 'copy_corpus'; it was removed; drafts are copied from the stream's own ",
    ),
    ({"prompt_lookup_num_tokens": 1}, 'it is draft= here (draft="ngram")'),
    ({"num_draft_tokens": 1}, "it is lookahead=, a setting of stream() and the like"),
    ({"temperature": 1}, "it is a setting of stream() and the like"),
    ({"kv_bit": 1}, "did you mean 'kv_bits'?"),
    ({}, MISSING),
]


@sweep(("options", "said"), OPEN)
async def test_every_way_to_open_says_what_an_option_is_called(options: dict[str, Any], said: str) -> None:
    async def under_asyncio() -> None:
        async with runtime.aio.open(**options):
            pass

    with pytest.raises(runtime.SettingsError, match=re.escape(said)):
        await runtime.keep_open(**options)
    if options:
        with pytest.raises(runtime.SettingsError, match=re.escape(said)):
            await runtime.keep_open("/no/such/model", **options)
    for ask in (partial(runtime.open_sync, **options), partial(asyncio.run, under_asyncio())):
        with pytest.raises(runtime.SettingsError, match=re.escape(said)):
            await trio.to_thread.run_sync(ask)


@sweep(
    ("options", "said"),
    [
        ({"model": "x"}, "there is no setting 'model'; it is target= of open()"),
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
        ("kv_bits", "it is kv_bits= of open()"),
        ("num_assistant_tokens", "did you mean 'lookahead'?"),
        ("temp", "did you mean 'temperature'?"),
    ],
)
def test_a_stream_says_what_a_setting_is_called(name: str, hint: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        settings_from({name: 1})
    assert str(refusal.value) == f"there is no setting {name!r}; {hint}"


def flags_of_mlx_lm(command: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The flags of one of mlx-lm's commands."""
    if command != "serve":
        # The package has a function named `generate`, too.
        module: Any = importlib.import_module("mlx_lm.generate") if command == "generate" else chat
        parsers = [module.setup_arg_parser()]
    else:
        parsers = []
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser: parsers.append(parser) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            server.main()
        monkeypatch.undo()
    return {flag for action in parsers[0]._actions for flag in action.option_strings}


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_every_flag_of_mlx_lm_is_accepted_or_answered_with_a_hint(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (commands,) = [each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction)]
    ours = commands.choices[command]._option_string_actions
    flags = flags_of_mlx_lm(command, monkeypatch)
    assert len(flags) > 10
    prompt = ["hi"] if command == "generate" else []
    for flag_name in flags - set(ours):
        with pytest.raises(SystemExit):
            cli.main([command, *prompt, flag_name])
        said = capfd.readouterr().err.rstrip()
        assert f"unrecognized arguments: {flag_name}; " in said
        for named in re.findall(r"did you mean (\S+)\?", said):
            assert named in ours, flag_name


@sweep(
    ("arguments", "hint"),
    [
        (["generate", "hi", "--num-draft-tokens", "3"], "did you mean --lookahead?"),
        (["bench", "--model=x"], "did you mean --target?"),
        (["serve", "--repeat-penalty=3"], 'each request sets this, by its field "repetition_penalty"'),
        (["serve", "--max-new-tokens", "9"], "did you mean --max-tokens?"),
        (["chat", "--extra-eos-token", "x"], "--stop ends a text at a string"),
        (["generate", "hi", "--system-prompt", "x"], "did you mean --system?"),
        (["generate", "hi", "-qa"], "--model-config '{\"quantize_activations\": true}' does it"),
        (["serve", "--copy-corpus", "1GB"], "it was removed; drafts are copied from the stream's own text"),
    ],
)
def test_a_command_says_what_a_flag_is_called(arguments: list[str], hint: str, capfd: Any) -> None:
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
