"""Model options of the commands: caches, devices, chat templates, and error messages in terms of flags."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import piped, ran, save_model
from sweeps import sweep

import runtime
from actors.mlx.shared_passes import SharedPasses
from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.options import options_of
from runtime.cli import main as cli
from runtime.cli.arguments.models import OPTIONS
from runtime.cli.flags import in_flags

# In words of the tiny model's vocabulary.
TEMPLATE = (
    "{% for m in messages %}{{ 'w7 ' if m.role == 'system' else 'w8 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)
PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target without a chat template."""
    return str(save_model(tmp_path_factory.mktemp("models") / "base", context=10_000))


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a chat template."""
    where = save_model(tmp_path_factory.mktemp("models") / "instruct", context=10_000)
    file = where / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    (where / "chat_template.jinja").write_text(TEMPLATE)
    return str(where)


def generated(capfd: Any, *arguments: str) -> tuple[list[int], int, str]:
    """The tokens that `generate` writes, the length of the prompt, and its stderr."""
    out, err = ran(capfd, "generate", *arguments, "--max-tokens", "6", "--json")
    said = json.loads(out)
    return said["tokens"], said["statistics"]["prompt_tokens"], err


def expected(target: str, prompt: Any) -> list[int]:
    return [token.id for token in runtime.generate_sync(prompt, target=target, max_tokens=6).tokens]


@sweep(("arguments", "num_tokens"), [([], 400), (["--raw"], 256), (["-m", "7"], 7), (["--raw", "-m", "300"], 300)])
def test_what_ends_a_text_that_does_not_end_by_itself(arguments, num_tokens, instruct, capfd):
    # Its context has room for 400 tokens after the prompt.
    config = ["--model-config", '{"max_position_embeddings": 405}']
    out = ran(capfd, "generate", PROMPT, "--target", instruct, *config, "--ignore-eos", *arguments, "--json").out
    assert json.loads(out)["statistics"]["generated_tokens"] == num_tokens


def test_commands_of_one_stream_do_not_find_out_whether_texts_could_share_passes(instruct, capfd, monkeypatch):
    probes: list[SharedPasses] = []
    monkeypatch.setattr(SharedPasses, "_agrees", lambda passes: not probes.append(passes))
    tokens, *_ = generated(capfd, PROMPT, "--target", instruct)
    status, out, _ = piped(capfd, monkeypatch, "--target", instruct, "--max-tokens", "6", lines=PROMPT)
    assert (status, len(out.split()), probes) == (0, 6, [])
    assert tokens == expected(instruct, [{"role": "user", "content": PROMPT}])
    with runtime.open_sync(instruct):  # may have several streams
        assert probes


# --- chat templates -------------------------------------------------------------------------------


def test_a_prompt_is_asked_through_the_chat_template_where_there_is_one(instruct, capfd):
    messages = [{"role": "user", "content": PROMPT}]
    tokens = expected(instruct, messages)
    assert generated(capfd, PROMPT, "--target", instruct) == (tokens, 5, "")
    assert generated(capfd, PROMPT, "--target", instruct, "--chat") == (tokens, 5, "")
    system = [{"role": "system", "content": "w4"}, *messages]
    assert generated(capfd, PROMPT, "--target", instruct, "--system", "w4") == (expected(instruct, system), 7, "")


def test_a_raw_prompt_is_continued_as_it_is(instruct, capfd):
    assert generated(capfd, "--prompt", PROMPT, "--target", instruct, "--raw") == (expected(instruct, PROMPT), 3, "")


@pytest.mark.parametrize(
    "command", [["generate", PROMPT, "--chat"], ["generate", PROMPT, "--system", "w4"], ["chat", "--system", "w4"]]
)
def test_what_needs_a_chat_template_is_refused_where_there_is_none(command, base, capfd):
    out, err = ran(capfd, *command, "--target", base, status=2)
    assert (out, err.count("\n")) == ("", 1)
    flag = next(word for word in command if word.startswith("--"))
    assert f"error: {flag} needs a chat template, and the target's tokenizer has none" in err


# --- options of open ------------------------------------------------------------------------------

EVERY = ("generate hi", "chat", "serve --port 0")
SERVED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "lookahead": 3}
CACHES: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 9, "rewind": "none"}
LOADED: dict[str, Any] = {"quantize": {"bits": 8, "group_size": 32}, "model_config": {"rope_theta": 3.0}}
READ = {"eos_token": "w7", "chat_template": "{{ messages }}"}
TARGET = runtime.ModelSpec("org/model", revision="v2", trust_remote_code=True, tokenizer_config=READ, **LOADED)
SMALL: dict[str, Any] = {"adapter_path": "a", "revision": "main", "quantize": {"mode": "mxfp4"}}
DRAFT = runtime.ModelSpec("org/small", trust_remote_code=True, **SMALL)


TEMPLATED = runtime.ModelSpec("org/model", tokenizer_config={"chat_template": "{{ messages }}"})


def flags_of(values: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


REACHES: list[tuple[Sequence[str], str, dict[str, Any]]] = [
    (EVERY, f"{flags_of(CACHES)} --work-ahead never", {**CACHES, "work_ahead": "never", "generation_config": "auto"}),
    (EVERY, "--max-kv-size none", {"max_kv_size": None}),
    (EVERY[1:], "--prefix-cache-bytes 5MB", {"prefix_cache_bytes": 5_000_000}),
    (EVERY[2:], "", {"max_streams": "auto"}),
    (EVERY[2:], "--max-streams 3 --max-batch 2", {"max_streams": 3, "max_batch": 2}),
    (EVERY[2:], flags_of(SERVED), {"defaults": SERVED}),
    (EVERY[:1], "--target org/model --chat-template '{{ messages }}'", {"target": TEMPLATED}),
    (
        EVERY,
        "--target org/model --draft org/small --trust-remote-code --revision v2 --quantize 8:32 --draft-quantize mxfp4 "
        "--draft-revision main --draft-adapter-path a --chat-template template.jinja "
        """--tokenizer-config '{"eos_token": "w7"}' --model-config '{"rope_theta": 3.0}' """
        """--chat-template-args '{"enable_thinking": false}'""",
        {"target": TARGET, "draft": DRAFT, "chat_template_args": {"enable_thinking": False}},
    ),
]


@sweep(
    ("command", "flags", "wanted"),
    [(command, flags, wanted) for commands, flags, wanted in REACHES for command in commands],
)
def test_options_of_open_reach_it(command, flags, wanted, opened, tmp_path, monkeypatch):
    opened.clear()
    monkeypatch.chdir(tmp_path)
    Path("template.jinja").write_text("{{ messages }}")
    assert cli.main(shlex.split(f"{command} {flags}")) == 1
    assert {name: opened[name] for name in wanted} == wanted
    always = {"target", "draft", "trace", "max_streams", "max_batch", "defaults", "generation_config"}
    assert opened.keys() <= {*wanted, *always}


def test_every_option_of_open_is_somewhere_on_the_command_line():
    # --max-streams and --max-batch belong to `serve`, --trace to `generate`; defaults of settings are for programs;
    # commands join the group of `mlx.launch`.
    elsewhere = {"group", "target", "draft", "max_streams", "max_batch", "trace", "defaults", "generation_config"}
    assert set(OPTIONS) | elsewhere == set(options_of(OpenOptions))


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["serve", "--port", "0"]])
def test_a_device_becomes_the_default_of_mlx_before_the_models_are_loaded(command, opened, monkeypatch):
    defaults: list[mx.Device] = []
    monkeypatch.setattr(mx, "set_default_device", defaults.append)
    assert cli.main([*command, "--device", "cpu"]) == 1
    assert defaults == [mx.Device(mx.cpu)]
    assert "device" not in opened
    assert cli.main(command) == 1
    assert len(defaults) == 1


def test_a_device_that_is_not_there_is_refused(monkeypatch, capfd):
    monkeypatch.setattr(mx, "is_available", lambda device: device.type == mx.DeviceType.cpu)
    _, err = ran(capfd, "generate", "hi", "--device", "gpu", status=2)
    assert "--device gpu is not available in this MLX; leave it out for its default" in err


def test_what_a_model_does_not_take_is_said_in_flags(base, capfd):
    _, err = ran(capfd, "generate", PROMPT, "--target", base, "--kv-bits", "2", status=1)
    assert "error: --kv-bits 2 with --kv-group-size 64 does not fit this model: " in err


# --- messages -------------------------------------------------------------------------------------


@sweep(
    ("in_python", "here"),
    [
        ("kv_bits=8 needs kv_bits and reuse_prefix", "--kv-bits 8 needs --kv-bits and reuse_prefix"),
        ('rewind="trim" needs caches; use "auto"', '--rewind trim needs caches; use "auto"'),
        ("ignore_eos=True is one, and temperature=0.5.", "--ignore-eos is one, and --temperature 0.5."),
        ("stop must be a text; its temperature, got None", "--stop must be a text; its temperature, got None"),
        ("grace_s must be a number", "--grace-seconds must be a number"),
        *[(other, other) for other in ("must be 'max_tokens=3', /max_tokens=3", "my_kv_bits of {kv_group_sizes}")],
    ],
)
def test_a_message_names_options_by_their_flags(in_python, here):
    assert in_flags(SettingsError(in_python)) == here


@sweep("command", ["generate", "chat", "serve", "doctor", "bench"])
def test_every_help_has_examples_that_can_be_parsed(command, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = ran(capfd, command, "--help-all").out
    assert max(map(len, text.splitlines())) <= 80
    examples = text.partition("examples:\n")[2].replace("\\\n", " ")
    lines = [line.strip() for line in examples.splitlines() if line.startswith("  ")]
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line.partition(" < ")[0])
        given = words[words.index("outrider") + 1 :]
        assert given[0] == command
        cli._parser().parse_args(given)
