"""The command line: output, streams, and exit statuses."""

import contextlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from command_line import at_a_terminal, broken_weights, json_of, outrider, ran, read_all, refusal, save_model
from sweeps import sweep

import runtime
import runtime.terminal.display
from protocol.trace import Event, Span
from runtime.cli import generate_command
from runtime.cli import main as cli
from runtime.terminal.display import rows_of
from runtime.terminal.signals import ECHO_S, SignalScope

PROMPT = "w1 w2 w3"
no_utf8 = partial(io.TextIOWrapper, io.BytesIO(b"def \xff"), encoding="utf-8")


def run_here(capture: Any, *arguments: str, status: int = 0) -> Any:
    return ran(capture, "generate", *arguments, status=status)


def json_here(capture: Any, *arguments: str, status: int = 0) -> Any:
    return json_of(capture, "generate", *arguments, status=status)


def refused_here(capture: Any, *arguments: str, status: int = 2) -> str:
    return refusal(capture, "generate", *arguments, status=status)


# --- text -----------------------------------------------------------------------------------------


CUT = "outrider: the text was cut off after 5 tokens; raise --max-tokens for more\n"


def test_a_pipe_gets_the_text_byte_for_byte_and_stderr_says_alone_that_it_was_cut(endless, short, capfd):
    expected = runtime.generate_sync(PROMPT, target=endless, max_tokens=5).text
    assert run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "5") == (expected, CUT)
    assert len(expected.split()) == 5
    full = "outrider: the text was cut off, since the model's context of 32 tokens is full; shorten the prompt\n"
    assert run_here(capfd, PROMPT, "--target", short, "--ignore-eos").err == full


@sweep(
    ("arguments", "ending"),
    [
        (["-m", "5"], "cut off, by --max-tokens or the context"),
        (["-m", "9", "--stop", " "], "at the stop string ' '"),
        (["-m", "9", "--stop-tokens", ",".join(map(str, range(64)))], "at the stop token"),
    ],
)
def test_the_statistics_say_how_the_text_ended(arguments, ending, endless, capfd):
    err = run_here(capfd, PROMPT, "--target", endless, *arguments, "--stats").err
    (line,) = [line for line in err.splitlines() if line.startswith("end ")]
    assert line.removeprefix("end").strip().startswith(ending)


@sweep(
    ("arguments", "proposes"),
    [
        ([], True),
        (["--draft", "ngram"], True),
        (["--draft", "none"], False),
        (["--target", str(runtime.DEMO_TARGET)], False),
    ],
)
def test_the_demo_pair_is_the_default_unless_a_target_or_another_drafter_is_named(arguments, proposes, capfd):
    # With a fixed lookahead, because "auto" may let the drafter rest on a busy machine.
    said = json_here(capfd, "import os\n" * 4, *arguments, "--max-tokens", "12", "--lookahead", "2", "--json")
    assert said["statistics"]["generated_tokens"] == 12
    assert (said["statistics"]["proposed"] > 0) == proposes
    assert said["text"]


@pytest.mark.slow
def test_a_text_keeps_to_the_json_schema_in_a_file(tmp_path, capfd):
    schema = {"type": "object", "properties": {"größe": {"enum": [1, 2]}}, "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema | {"required": ["größe"]}), encoding="utf-8")
    asked = ["x = json.dumps(", "--json-schema", str(tmp_path / "schema.json")]
    assert json_here(capfd, *asked) in ({"größe": 1}, {"größe": 2})
    # The text is cut off and no JSON.
    cut_off = [*asked, "--target", "demo", "--max-tokens", "3"]
    said = "outrider: error: the JSON is incomplete, cut off at 3 tokens; raise --max-tokens\n"
    assert run_here(capfd, *cut_off, status=1).err == said
    out, err = run_here(capfd, *cut_off, "--json", status=1)
    assert (json.loads(out)["finish_reason"], err) == ("length", said)


@sweep(
    ("content", "complaint"),
    [
        (None, "cannot read the JSON schema from {}: No such file or directory"),
        (b"\xff", "the JSON schema in {} is not valid text"),
        (b"{", "the JSON schema { is not JSON: "),
        (b'{"not": {}}', "cannot be followed: Unimplemented keys"),
        (b'{"type": "nothing"}', "outrider: error: --json-schema {}: "),
    ],
)
def test_a_schema_that_is_none_is_refused_before_a_model_is_loaded(content, complaint, tmp_path, capfd):
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    error = refused_here(capfd, "x", "--json-schema", str(file), "--target", "./no/such/model")
    assert complaint.replace("{}", str(file), 1 if content != b"{" else 0) in error


def test_json_is_one_object_with_everything_in_it(endless, capfd):
    out, err = run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "5", "--json")
    said = json.loads(out)
    expected = runtime.generate_sync(PROMPT, target=endless, max_tokens=5)
    assert list(said) == ["text", "tokens", "finish_reason", "stop_reason", "interrupted", "statistics"]
    assert (said["text"], said["tokens"]) == (expected.text, [token.id for token in expected.tokens])
    assert (said["finish_reason"], said["interrupted"]) == ("length", False)
    assert said["statistics"].keys() == attrs.fields_dict(runtime.Statistics).keys()
    assert (said["statistics"]["prompt_tokens"], said["statistics"]["generated_tokens"]) == (3, 5)
    assert out.count("\n") == 1
    assert err == ""


def test_settings_on_the_command_line_are_those_of_python(endless, capfd):
    biased: dict[str, Any] = {"logit_bias": {3: -math.inf, 4: 1.5}, "repetition_penalty": 1.3, "stop_tokens": [7, 9]}
    sampled: dict[str, Any] = {"temperature": 1.2, "seed": 3, "top_p": 0.9, "top_k": 30, "min_p": 0.01}
    words = runtime.generate_sync(PROMPT, target=endless, max_tokens=5).text.split()
    stopped = {"stop": [f"{words[3]} {words[4]}", "nothing like it"]}
    for options, settings in (
        ("--logit-bias 3=-inf,4=1.5 --repetition-penalty 1.3 --stop-tokens 7,9 --ignore-eos", biased),
        ("--temperature 1.2 --seed 3 --top-p 0.9 --top-k 30 --min-p 0.01", sampled),
        (f"--stop '{words[3]} {words[4]}' --stop 'nothing like it'", stopped),
    ):
        said = json_here(capfd, PROMPT, "--target", endless, "--max-tokens", "12", "--json", *shlex.split(options))
        settings["ignore_eos"] = "--ignore-eos" in options
        expected = runtime.generate_sync(PROMPT, target=endless, max_tokens=12, **settings)
        assert said["tokens"] == [token.id for token in expected.tokens]
        assert said["text"] == expected.text
    assert (said["finish_reason"], said["stop_reason"]) == ("stop", stopped["stop"][0])


def test_log_probabilities_come_with_json_and_are_json(endless, capfd):
    options = ["--max-tokens", "2", "--json", "--logprobs", "128", "--logit-bias", "3=-inf"]
    out = run_here(capfd, PROMPT, "--target", endless, *options).out
    for of_token in json.loads(out, parse_constant=pytest.fail)["logprobs"]:
        tops = {top["id"]: top["logprob"] for top in of_token["top_logprobs"]}
        assert tops.pop(3) is None
        assert of_token["logprob"] == max(tops.values())


def test_a_character_that_the_encoding_lacks_is_replaced(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        runtime.terminal.display.Output().write_now("né")
    assert (tmp_path / "out").read_text() == "n?"


# --- prompts --------------------------------------------------------------------------------------


def test_a_dash_reads_the_prompt_from_stdin_as_it_is(endless, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n\nw4 w5\n"))
    said = json_here(capfd, "-", "--target", endless, "--max-tokens", "5", "--json")
    assert said["text"] == runtime.generate_sync(f"{PROMPT} w4 w5", target=endless, max_tokens=5).text
    assert said["statistics"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "stdin", "complaint"),
    [
        ("def \udcff", None, "the prompt is not valid text: 'utf-8' codec can't encode"),
        ("-", no_utf8, "the prompt is not valid text: 'utf-8' codec can't decode byte 0xff"),
        ("-", lambda: None, "stdin is closed"),
        ("w1 " * 32, None, "prompt is too long: 32 tokens > 31 maximum"),
        ("-", io.StringIO, "the prompt is empty; give a text to continue or a question"),
    ],
)
def test_a_prompt_that_is_none_gets_one_line(prompt, stdin, complaint, short, monkeypatch, capfd):
    if stdin is not None:
        monkeypatch.setattr(sys, "stdin", stdin())
    assert complaint in refused_here(capfd, prompt, "--target", short)


# --- statistics -----------------------------------------------------------------------------------


def test_stats_end_with_a_table_on_stderr(endless, capfd):
    arguments = [PROMPT, "--target", endless, "--draft", endless, "--max-tokens", "12", "--lookahead", "3"]
    out, err = run_here(capfd, *arguments, "--stats")
    assert len(out.split()) == 12
    rows = {line[:16].strip(): line[16:].strip() for line in err.splitlines()}
    assert rows["tokens"] == "12 after a prompt of 3"
    assert rows["speed"].endswith(" tokens/s")
    assert rows["first token"].startswith("after ")
    assert (rows["acceptance"], rows["tokens per round"]) == ("100.0% (9 of 9 proposed)", "4.00 in 3 rounds")
    assert rows["lookahead"].endswith(" misses")
    assert rows["busy"].startswith("target ")
    assert rows["peak memory"].endswith("B")
    assert not any(line.endswith(" ") for line in err.splitlines())


def test_statistics_begin_a_line_where_the_text_goes_to_the_same_file(endless, tmp_path, monkeypatch, capfd):
    expected = runtime.generate_sync(PROMPT, target=endless, max_tokens=5).text
    with (tmp_path / "out").open("a") as out:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, out)
        run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "5", "--stats")
    assert (tmp_path / "out").read_text().startswith(f"{expected}\n{CUT}end ")


def statistics(**changes: Any) -> runtime.Statistics:
    numbers = dict.fromkeys(attrs.fields_dict(runtime.Statistics), 0)
    return runtime.Statistics(**numbers | {"time_to_first_token": None, "advice": ()} | changes)


COPIES = {"copy_acceptance": 0.75, "accepted": 9, "accepted_copied": 3, "rejected_copied": 1}
FRESH = {"acceptance_rate": 0.7, "fresh_acceptance": 0.75, "stale_acceptance": 0.625}
STALE = {"acceptance_rate": 0.7, "fresh_acceptance": None, "stale_acceptance": 0.7}
SHARED = {"rows_per_pass": 2.5, "pass_rows": 40, "wait_seconds": 0.4, "longest_wait_seconds": 1.2}


@sweep(
    ("numbers", "name", "value"),
    [
        ({}, "first token", "none came"),
        ({"time_to_first_token": 0.0123}, "first token", "after 12 ms"),
        ({"time_to_first_token": 1.234}, "first token", "after 1.23 s"),
        ({"acceptance_rate": None}, "acceptance", "nothing was proposed"),
        ({"generation_tps": None}, "speed", "not known after a single round"),
        ({"acceptance_rate": 0.0, "proposed": 4}, "acceptance", "0.0% (0 of 4 proposed)"),
        ({"model_acceptance": 0.712, "accepted": 89, "proposed": 125}, "acceptance", "71.2% (89 of 125 proposed)"),
        (COPIES, "copies", "75.0% (3 of 4 proposed)"),
        (FRESH, "fresh and stale", "75.0% and 62.5% of the drafts"),
        (STALE, "fresh and stale", "– and 70.0% of the drafts"),
        (SHARED, "shared passes", "2.50 streams a pass; a round waited 10 ms, at most 1.20 s"),
        ({"resting_rounds": 1234}, "undrafted", "1,234 rounds, decoded by the target alone"),
        ({"draft_timeouts": 3}, "late drafter", "3 times, and the target went on without it"),
        ({"draft_failures": 2}, "failed drafter", "2 times, and the target went on without it"),
        ({"advice": ('use lookahead="auto"',)}, "advice", 'use lookahead="auto"'),
        ({"peak_memory": 12_345_000_000}, "peak memory", "12.35 GB"),
    ],
)
def test_figures_that_are_counted_or_not_always_there(numbers, name, value):
    assert dict(rows_of(statistics(**numbers)))[name] == value


# --- errors ---------------------------------------------------------------------------------------


@sweep(
    ("arguments", "usage", "message"),
    [
        (["generate", "--max-tokns", "5", "hi"], "outrider generate ", "--max-tokns hi; did you mean --max-tokens?"),
        (["chat", "--temperatur=1"], "outrider chat ", "--temperatur=1; did you mean --temperature?"),
        (["chat", "--target-device=gpu"], "outrider chat ", "this is the process's device: use --device"),
        (["doctor", "--xyzzy"], "outrider doctor ", "unrecognized arguments: --xyzzy\n"),
        (["generat", "hi"], "outrider ", "there is no command 'generat'; did you mean generate?"),
        (["selftest"], "outrider ", "outrider selftest was removed; use `outrider doctor --check`"),
        (["xyzzy"], "outrider ", "there is no command 'xyzzy'; the commands are generate, "),
    ],
)
def test_a_misspelt_word_gets_the_command_s_usage_and_a_suggestion(arguments, usage, message, capfd):
    out, err = ran(capfd, *arguments, status=2)
    assert out == ""
    assert err.startswith(f"usage: {usage}")
    assert message in err


@sweep(
    "damage",
    [
        broken_weights,
        lambda model: (model / "config.json").write_text("{"),
        lambda model: (model / "config.json").unlink(),
    ],
)
@sweep("role", ["target", "draft"])
def test_a_model_that_cannot_be_loaded_gets_one_line(role, damage, endless, tmp_path, capfd):
    damaged = save_model(tmp_path / "damaged", context=32)
    damage(damaged)
    models = ["--target", endless, "--draft", endless, f"--{role}", str(damaged)]  # the last one of a name counts
    err = refused_here(capfd, PROMPT, *models, "--stats", "--json", status=1)
    assert role in err
    assert str(damaged) in err


@sweep(
    ("command", "said"),
    [
        ("generate x --target /no/such/model", "target '/no/such/model' does not exist; give a directory with a model"),
        (f"generate x --target /{'x' * 5000}", "target '/xxx"),
        (f"generate x --adapter-path / --target {runtime.DEMO_DRAFT}", "the adapter of the target, '/', has no "),
        ("chat --target /nowhere", "target '/nowhere' does not exist"),
        ("serve --port 0 --target demo --draft none --memory-limit 1kB", "the weights of the models take 25.2 MB, and"),
        ("bench --target demo --draft /no/such/model", "draft '/no/such/model' does not exist; give a directory"),
    ],
)
def test_a_model_that_cannot_be_is_named_in_one_line(command, said, capfd):
    assert refusal(capfd, *command.split(), status=1).startswith(f"outrider: error: {said}")


def test_a_message_of_several_lines_becomes_one(capfd):
    runtime.terminal.display.print_message("error: not found:\n\n    try this\nor that\n")
    assert capfd.readouterr().err == "outrider: error: not found: try this or that\n"


def test_a_stdout_that_takes_nothing_is_an_error(endless, monkeypatch, capfd):
    for arguments in ([], ["--json"]):
        with Path(os.devnull).open() as read_only:
            monkeypatch.setattr(sys, "stdout", read_only)
            found = run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "2", *arguments, status=1)
        assert found.err == "outrider: error: cannot write to stdout: Bad file descriptor\n"
    monkeypatch.setattr(sys, "stdout", None)
    found = run_here(capfd, PROMPT, "--target", endless, status=1)
    assert found.err == "outrider: error: cannot write to stdout: Bad file descriptor\n"


def test_warnings_come_after_the_text_without_their_tracebacks(capfd):
    with runtime.terminal.display.warnings_at_the_end():
        try:
            raise ValueError("no more room")
        except ValueError as error:
            logging.getLogger("outrider").warning("drafting failed: %s", error, exc_info=error)
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "outrider: warning: drafting failed: no more room\n"


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_a_stdout_that_takes_no_help_is_an_error(arguments, monkeypatch, capfd):
    with Path(os.devnull).open("w") as stdout, Path(os.devnull).open() as read_only:
        os.dup2(read_only.fileno(), stdout.fileno())
        monkeypatch.setattr(sys, "stdout", stdout)
        assert ran(capfd, *arguments, status=1).err == "outrider: error: cannot write to stdout: Bad file descriptor\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert ran(capfd, *arguments, status=1).err == "outrider: error: cannot write to stdout: it is closed\n"


def test_without_a_command_all_are_listed(capfd):
    err = " ".join(ran(capfd, status=2).err.split())
    for command in cli.COMMANDS.values():
        assert f" {command.name} {command.help}" in err


def test_help_names_every_option_and_its_default(capfd):
    text = " ".join(ran(capfd, "generate", "--help-all").out.split())
    # Functions and long lists exist only in Python; and a single generation has nothing to reuse.
    beyond = {"logits_processors", "prediction", "reuse_prefix", "sampler"}
    settings = [field.name.replace("_", "-") for field in attrs.fields(runtime.Settings) if field.name not in beyond]
    for option in ("target", "draft", *settings, "json", "stats", "trace", "timeline"):
        assert f"--{option}" in text
    assert "(default: 32768 for an answer, 256 for a continued text)" in text


@sweep("command", ["generate", "chat", "serve", "batch", "doctor", "bench"])
def test_a_short_help_has_ten_options_that_exist(command, capfd):
    texts = [ran(capfd, command, flag).out for flag in ("--help", "--help-all")]
    short, full = (re.findall(r"^  (-.*?)(?:   |$)", text, re.MULTILINE) for text in texts)
    named = {word for each in short for word in re.findall(r"--[\w-]+", each)}
    examples = texts[0].partition("examples:")[2].replace("--hostfile", "")  # of mlx.launch
    assert named >= set(re.findall(r"--\w[\w-]*", examples))
    assert named >= {"--help-all", *cli.COMMANDS[command].common.split()}
    assert len(short) <= 12
    assert len(full) >= 2 * len(short) - 2


def test_version(monkeypatch, capfd):
    monkeypatch.setattr(importlib.metadata, "version", {"outrider": "1.2.3"}.__getitem__)
    assert ran(capfd, "--version") == ("outrider 1.2.3\n", "")


# --- interrupted ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_signal_ends_the_text_in_mid_generation_and_statistics_are_printed(endless):
    arguments = ["generate", PROMPT, "--target", endless, "--draft", endless, "--max-tokens", "none", "--stats"]
    async with outrider(*arguments, stdout=-1, stderr=-1) as process:
        # The text is streamed: it has no end.
        first = await process.stdout.receive_some()
        assert first.startswith(b" w")
        process.send_signal(signal.SIGTERM)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, process.stdout)
            err = await read_all(process.stderr)
    assert process.returncode == 143
    assert "Traceback" not in err
    assert re.match(r"end +early, before the text was over\ntokens ", err)
    assert "peak memory" in err


class Interrupted(runtime.terminal.display.Display):
    """A display that sends a signal to the process at the first event of a kind."""

    kind = ""
    number = signal.SIGINT
    is_sent = False

    def on_event(self, event: Event) -> None:
        if event.kind == self.kind and not self.is_sent:
            self.is_sent = True
            signal.raise_signal(self.number)


SIGNALS = itertools.cycle([(signal.SIGINT, 130), (signal.SIGTERM, 143)])


KINDS = ["load", "open", "prefill", "draft", "proposal", "verify", "verdict", "hit"]


@sweep(("kind", "number", "status"), [(kind, *each) for kind, each in zip(KINDS, SIGNALS, strict=False)])
def test_a_signal_at_any_event_leaves_json_that_says_so(kind, number, status, endless, monkeypatch, capfd):
    monkeypatch.setattr(generate_command, "Display", type("_", (Interrupted,), {"kind": kind, "number": number}))
    # Not "auto", which may let so slow a drafter rest as long as the machine is busy.
    models = ["--target", endless, "--draft", endless, "--lookahead", "3"]
    out, err = run_here(capfd, PROMPT, *models, "--max-tokens", "none", "--json", "--stats", status=status)
    said = json.loads(out)
    assert (said["finish_reason"], said["interrupted"]) == (None, True)
    if kind == "load":
        assert said["statistics"] is None
        assert err == ""
    else:
        assert said["statistics"]["generated_tokens"] == len(said["tokens"])
        assert err.startswith("end               early, before the text was over\ntokens ")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("outrider")] == []


async def test_a_signal_that_comes_when_the_text_is_whole_interrupts_nothing(autojump_clock):
    generated = generate_command.Generated()

    async def work() -> None:
        generated.finish_reason = "length"
        signal.raise_signal(signal.SIGINT)
        await trio.sleep(1)  # as the exit from a runtime may take
        raise AssertionError("the signal was not heard")

    await SignalScope(generated, runtime.terminal.display.Display()).run(work)
    assert runtime.terminal.display.exit_status(generated) == 0
    assert not json.loads(generated.as_json())["interrupted"]


def test_a_signal_while_the_prompt_is_typed_ends_it(monkeypatch, capfd):
    class Typing(io.StringIO):
        def read(self, _: int | None = -1) -> str:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the signal was not heard")

    monkeypatch.setattr(sys, "stdin", Typing())
    assert run_here(capfd, "-", status=130) == ("", "")


def test_a_signal_during_a_load_is_acknowledged_and_wins_over_a_failure(tmp_path, monkeypatch, capfd):
    # A load that blocks until a person closes the other side, and then fails.
    model = save_model(tmp_path / "model", context=32)
    broken_weights(model)
    os.mkfifo(model / "generation_config.json")
    with at_a_terminal(monkeypatch, "stderr") as screen:

        def person() -> None:
            with os.fdopen(os.open(model / "generation_config.json", os.O_WRONLY)):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                screen.wait_for("stopping once the models are loaded")

        threading.Thread(target=person, daemon=True).start()
        said = json_here(capfd, PROMPT, "--target", str(model), "--json", "--stats", status=130)
    assert "loading model" in screen.text
    assert "error" not in screen.text
    assert "Traceback" not in screen.text
    assert (said["text"], said["tokens"], said["interrupted"]) == ("", [], True)
    assert said["finish_reason"] is said["stop_reason"] is said["statistics"] is None


async def test_a_second_signal_ends_the_process_at_once_unless_it_is_an_echo(autojump_clock):
    generated, statuses = generate_command.Generated(), []

    async def work() -> None:
        with trio.CancelScope(shield=True):  # a load is shielded
            signal.raise_signal(signal.SIGINT)
            await trio.sleep(ECHO_S / 2)
            signal.raise_signal(signal.SIGINT)
            await trio.sleep(ECHO_S)
            assert statuses == []
            signal.raise_signal(signal.SIGTERM)
            await trio.sleep(1)
            assert statuses == [143]

    await SignalScope(generated, runtime.terminal.display.Display(), statuses.append).run(work)
    assert generated.signal == signal.SIGINT
    assert statuses == [143]


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_that_leaves_ends_it_quietly(endless, monkeypatch, capfd):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        threading.Thread(target=lambda: os.read(reading, 10) and os.close(reading), daemon=True).start()
        assert run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "none", status=141).err == ""


@sweep(("flag", "unbuffered"), [("--version", "1"), ("--help", "")])
async def test_nothing_complains_of_a_reader_that_has_left(flag, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    async with outrider(flag, stdout=-1, stderr=-1) as process:
        await process.stdout.aclose()
        assert await read_all(process.stderr) == ""
    assert process.returncode == 141


async def test_a_reader_that_stops_reading_does_not_keep_a_signal_from_being_heard(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 1024)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        output = runtime.terminal.display.Output()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(output.write, "y")
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        # Unblock the thread that is still writing.
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(reading, 65536):
                pass
    os.close(reading)


# --- terminals ------------------------------------------------------------------------------------


def test_a_terminal_shows_the_prompt_dimmed_then_the_text_and_ends_the_line(endless, monkeypatch, capfd):
    expected = runtime.generate_sync(PROMPT, target=endless, max_tokens=5).text
    with at_a_terminal(monkeypatch, "stdout") as screen:
        assert run_here(capfd, PROMPT, "--target", endless, "--max-tokens", "5") == ("", CUT)
    assert screen.text == f"\x1b[2m{PROMPT}\x1b[0m{expected}\r\n"


def test_a_terminal_on_stderr_shows_progress_and_the_pipe_stays_clean(endless, monkeypatch, capfd):
    expected = runtime.generate_sync("w1 " * 1200, target=endless, max_tokens=5).text
    sizes = ["--max-tokens", "5", "--prefill-step-size", "512"]
    with at_a_terminal(monkeypatch, "stderr") as screen:
        assert run_here(capfd, "w1 " * 1200, "--target", endless, *sizes, "--stats").out == expected
    shown = screen.text
    assert "loading endless" in shown
    for done in ("0", "512", "1,024", "1,199"):
        assert f"{done} of 1,199 tokens" in shown
    # When the table comes, the progress line is erased and the cursor is shown again.
    moving, _, table = shown.rpartition("\x1b[2K")
    assert "1,199" in moving
    assert "1,199" not in table
    assert moving.count("\x1b[?25l") == moving.count("\x1b[?25h") > 0
    assert "5 after a prompt of 1,200" in table


def test_a_display_shows_nothing_where_stderr_is_no_terminal(capfd):
    with runtime.terminal.display.Display() as display:
        display.show_loading([runtime.DEMO_TARGET])
        display.show_stopping()
        display.show_prefill(5000, 2048)
        display.on_event(Span("target", "prefill", 0, 0.0, 1.0, 2048))
    assert capfd.readouterr() == ("", "")


def test_a_long_activity_is_logged_where_stderr_is_no_terminal(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(runtime.terminal.display.time, "monotonic", lambda: now[0])
    with runtime.terminal.display.Display() as display:
        for now[0] in (0.0, 20.0, 30.0, 40.0, 59.0, 61.0):
            display.show_activity(f"at {now[0]:.0f} s")
    assert capfd.readouterr() == ("", "outrider: at 30 s\noutrider: at 61 s\n")


def test_distill_trains_for_the_demo_target_by_default(tmp_path, capfd):
    missing = str(tmp_path / "missing.txt")
    default, error = ran(capfd, "distill", "--data", missing, "--out", str(tmp_path / "out"), status=2).err.splitlines()
    assert default.startswith("outrider: the target is the bundled demo pair (--target demo), since none is named")
    assert error == f"outrider: error: '{missing}' cannot be read: No such file or directory"
