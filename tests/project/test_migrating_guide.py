"""The guide "migrating from mlx-lm": it has every flag and argument of mlx-lm's, and its flags are accepted here."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm import chat, sample_utils, server
from sweeps import sweep

from runtime.cli import main as cli

# The package has a function of this name, too.
generate: Any = importlib.import_module("mlx_lm.generate")

GUIDE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def server_parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser that `mlx_lm.server` makes when it is called."""
    parsers = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        parsers.append(parser)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(InterruptedError):
            server.main()
    return parsers[0]


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    if command == "mlx_lm.server":
        return server_parser(monkeypatch)
    return (generate if command == "mlx_lm.generate" else chat).setup_arg_parser()


def table(head: str) -> dict[str, str]:
    """The rows of the table whose first column has a head: what each code in that column is here."""
    lines = GUIDE.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {head} |")]
    rows: dict[str, str] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        _, names, here, _ = re.split(r"(?<!\\)\|", line)
        rows |= dict.fromkeys(re.findall(r"`([^`]+)`", names), here.strip())
    return rows


COMMANDS = {"mlx_lm.generate": "generate", "mlx_lm.chat": "chat", "mlx_lm.server": "serve"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_guide_has_every_flag_and_no_other(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {flag for action in parser_of(command, monkeypatch)._actions for flag in action.option_strings}
    assert set(table(f"`{command}`")) == flags - {"-h", "--help"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_accepted_unless_the_guide_says_that_there_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commands,) = [each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction)]
    ours = commands.choices[COMMANDS[command]]._option_string_actions
    for flag, here in table(f"`{command}`").items():
        assert (flag in ours) != here.startswith("none"), flag
        for named in re.findall(r"`(--?[a-z-]+)", here):
            assert named in ours, (flag, named)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_without_effect_is_accepted_and_says_why(command: str, capfd: Any) -> None:
    without = [flag for flag, here in table(f"`{command}`").items() if here.startswith("without effect")]
    with_value = {"--verbose", "--log-level", "--prompt-cache-size", "--prompt-concurrency"}
    for flag in without:
        prompt = ["hi"] if command == "mlx_lm.generate" else []
        value = ["1"] if flag in with_value else []
        assert cli.main([COMMANDS[command], *prompt, flag, *value, "--target", "/no/such", "--device", "tpu"]) == 2
        said = capfd.readouterr().err
        assert f"{flag} has no effect: " in said
        assert "--device must be" in said
    assert without


def parameters(*functions: Callable[..., Any]) -> set[str]:
    named = [inspect.signature(function).parameters.values() for function in functions]
    return {one.name for each in named for one in each if one.kind is not one.VAR_KEYWORD and one.name != "self"}


@sweep(
    ("head", "functions"),
    [
        ("argument of `load`", [mlx_lm.load]),
        (
            "argument of `generate`, `stream_generate`, `generate_step`, `speculative_generate_step`",
            [
                generate.generate,
                generate.stream_generate,
                generate.generate_step,
                generate.speculative_generate_step,
            ],
        ),
        (
            "argument of `make_sampler`, `make_logits_processors`",
            [sample_utils.make_sampler, sample_utils.make_logits_processors],
        ),
        ("argument of `batch_generate`, `BatchGenerator`", [generate.batch_generate, generate.BatchGenerator.__init__]),
    ],
)
def test_the_guide_has_every_argument_and_no_other(head: str, functions: list[Callable[..., Any]]) -> None:
    assert set(table(head)) - {"mlx_lm.convert -q"} == parameters(*functions)
