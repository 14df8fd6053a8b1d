"""The command `serve` as a process with the demo pair: official clients, signals, and addresses."""

import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import HANGS_S, ROOT, environment, ran
from served_command import MODEL, PROMPT, Server, serving, until
from sweeps import sweep

import runtime
from runtime.cli import serve_command
from runtime.terminal.display import print_message

ENDLESS: dict[str, Any] = {"ignore_eos": True}

# --- OpenAI's client ------------------------------------------------------------------------------


def test_a_completion_is_the_text_of_the_runtime(client, expected):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24)
    assert (answer.choices[0].text, answer.usage.completion_tokens, answer.model) == (expected, 24, MODEL)
    assert answer.usage.model_extra["proposed_tokens"] >= answer.usage.model_extra["accepted_tokens"]
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == 24


def test_a_chat_is_answered_whole_and_streaming_alike(client):
    messages = [{"role": "system", "content": "# Python\n"}, {"role": "user", "content": PROMPT}]
    asked: Any = {"model": MODEL, "messages": messages, "max_completion_tokens": 16}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    with client.chat.completions.stream(**asked) as helped:
        texts = [event.delta for event in helped if event.type == "content.delta"]
    assert "".join(texts) == answer.choices[0].message.content


def test_errors_come_as_the_client_knows_them(client, server):
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature must be at least 0, got -1") as bad:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no model") as missing:
        client.completions.create(model="gpt", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match='no field "zzz" here'):
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"zzz": 1})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
        stranger.completions.create(model=MODEL, prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="shorten it") as long:
        client.completions.create(model=MODEL, prompt="x = 1\n" * 50_000)
    assert long.value.code == "context_length_exceeded"


# --- how it ends ----------------------------------------------------------------------------------


@contextmanager
def streaming(server: Server, **asked: Any) -> Iterator[Iterator[str]]:
    """The lines of a streamed answer, after the first has come."""
    asked = {"prompt": PROMPT, "stream": True, **asked}
    with httpx.stream("POST", f"{server.url}v1/completions", json=asked, timeout=HANGS_S) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield lines


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_clients_that_come_all_at_once_while_the_server_is_busy_are_connected(server):
    most = Path("/proc/sys/net/core/somaxconn")
    number = min(300, int(most.read_text(encoding="utf-8")) if most.exists() else 100)
    clients = []
    server.process.send_signal(signal.SIGSTOP)  # accepts none of them
    try:
        # One that finds the queue full is sent away, and comes again after a second at the earliest.
        clients = [socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), HANGS_S) for _ in range(number)]
    finally:
        server.process.send_signal(signal.SIGCONT)
        for client in clients:
            client.close()
    assert server.health()["ok"] is True


@pytest.mark.slow
def test_a_server_that_is_told_to_end_lets_answers_come_to_their_end(expected):
    with serving("--grace-seconds", str(HANGS_S)) as server:
        with streaming(server, max_tokens=100_000, **ENDLESS), streaming(server, max_tokens=24) as lines:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.health()["status"] == "draining")
            new = httpx.post(f"{server.url}v1/completions", json={"prompt": PROMPT}, timeout=HANGS_S)
            code = new.json()["error"]["code"]
            assert (new.status_code, new.headers["connection"], code) == (503, "close", "draining")
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert expected.endswith(text)
        assert server.ends() == 0
    said = "".join(server.said)
    assert "stopping: finishing 2 requests (at most" in said
    assert said.count('"GET /health" 503') == 1
    last_lines = r"200 tokens=\d+\+\d+ seconds=[\d.]+ unfinished\noutrider: the server has ended\n$"
    assert re.search(f'"POST /v1/completions" {last_lines}', said)


def drain(lines: Iterator[str], meanwhile: Callable[[], None] = lambda: None) -> None:
    for _ in lines:
        meanwhile()


@pytest.mark.slow
def test_answers_that_take_too_long_are_cut_off():
    host = ("--host", "::1") if has_ipv6() else ()
    with serving("--grace-seconds", "0", "--no-access-log", *host) as server:
        assert server.url.startswith("http://[::1]:" if host else "http://127.0.0.1:")
        with streaming(server, max_tokens=100_000, **ENDLESS) as lines:
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.TransportError):
                drain(lines)
        assert server.ends() == 0
    assert "POST" not in "".join(server.said)


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing():
    with serving("--grace-seconds", "10000") as server:
        with streaming(server, max_tokens=100_000, **ENDLESS) as lines:
            server.process.send_signal(signal.SIGINT)
            heard_at = time.monotonic()

            def insist() -> None:
                # A second signal that comes at once counts as an echo of the first.
                if time.monotonic() > heard_at + 1.0:
                    server.process.send_signal(signal.SIGINT)

            with pytest.raises(httpx.TransportError):
                drain(lines, insist)
        assert server.ends() == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_server_whose_target_fails_ends_with_its_own_status():
    failing = """
import sys
from actors.mlx.sequence import MLXSequence
from runtime.cli import main as cli
feed_lazy, num_passes = MLXSequence.feed_lazy, 0
def fail(line, *arguments):
    raise RuntimeError("the device is gone")
def fail_later(line, token):
    global num_passes
    num_passes += 1
    if num_passes > 40:
        MLXSequence.feed = fail  # what is asked whether the model is there
        fail(line)
    return feed_lazy(line, token)
MLXSequence.feed_lazy = fail_later
sys.exit(cli.main(sys.argv[1:]))
"""
    with (
        serving("--draft", "none", "--grace-seconds", str(HANGS_S), program=("-c", failing)) as server,
        streaming(server, max_tokens=1000, **ENDLESS) as lines,
    ):
        assert " is served at" in server.said[0]  # no drafter is named to who wants none
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "models_unavailable"
        assert server.ends() == 1
    cause = "the target model failed, and the runtime with it: the device is gone"
    assert f"outrider: error: the server has ended, start it again: {cause}\n" in server.said
    assert "stopping" not in server.said  # nothing more can end well


def test_a_known_drafter_is_named_and_a_signal_ends_an_idle_server(monkeypatch, capfd):
    def print_and_stop(message: str) -> None:
        print_message(message)
        if " is served at" in message:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(serve_command, "print_message", print_and_stop)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    out, err = ran(capfd, "serve", "--port", "0", "--target", str(runtime.DEMO_TARGET))
    named, served, ended = err.splitlines()
    assert out == ""
    assert named.startswith(f"outrider: target decodes without a drafter; {runtime.DEMO_TRAINED_DRAFT} (")
    assert " is served at http://127.0.0.1:" in served
    assert ended == "outrider: the server has ended"


# --- before it begins -----------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named(capfd):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = ran(capfd, "serve", "--port", str(port), status=1).err
    assert f"cannot listen at 127.0.0.1, port {port}" in said
    assert "choose another --port" in said


@sweep(
    "origin",
    ["https://example.org", "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdef", "null", "*"],
)
def test_origins_are_taken_as_browsers_send_them(origin, capfd):
    given = ["--target", "/no/such/model", "--allow-origin", origin]
    assert "/no/such/model" in ran(capfd, "serve", "--port", "0", *given, status=1).err


def test_what_the_server_needs_and_is_not_installed_is_named(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "serve needs starlette; pip install 'outrider[serve]'" in ran(capfd, "serve", "--port", "0", status=2).err


def test_help_brings_in_neither_mlx_nor_a_server():
    program = (
        "import sys\nfrom runtime.cli.main import main\n"
        "try:\n    main(['serve', '--help-all'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'mlx', 'starlette', 'h11', 'pydantic'} & set(sys.modules)))"
    )
    how: Any = {"capture_output": True, "text": True, "check": True, "env": environment(), "cwd": ROOT}
    ran = subprocess.run([sys.executable, "-c", program], **how)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert "--max-waiting N" in ran.stdout
