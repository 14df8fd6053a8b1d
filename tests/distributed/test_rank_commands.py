"""The command line under `mlx.launch`: rank 0 runs the command, and the others follow."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import rank_programs
from command_line import HANGS_S, environment
from models import llama, save
from ranks import free_ports, kernels_of, ranks
from served_command import until

import runtime
from runtime.cli.main import main

# Takes so long that the server is seen draining meanwhile.
NUM_TOKENS = 200

TWO_RANKS = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2", "OUTRIDER_CONTROL": "127.0.0.1:1"}


def test_generate_gives_the_text_of_one_process(tmp_path: Path):
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    ports = free_ports(2)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    command = [sys.executable, "-m", "runtime", "generate", "w1 w2 w3", "-m", "8", "--target", str(model)]
    processes = [
        subprocess.Popen(
            [*command, "--draft", "ngram", "--raw"],
            env=environment() | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile), "TMPDIR": str(kernels_of(rank))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=HANGS_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    expected = runtime.generate_sync("w1 w2 w3", target=model, max_tokens=8)
    assert [out for out, _ in said] == [expected.text, ""]


@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, (0, 1)), (signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1))],
    ids=["SIGTERM to all", "SIGTERM to rank 0", "Ctrl-C in the terminal of all"],
)
def test_a_server_gives_the_answer_that_it_has_begun_and_ends_on_all_ranks(
    number: signal.Signals, told: tuple[int, ...], tmp_path: Path
):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    model = save(tmp_path / "model", llama(**config))
    asked: dict[str, Any] = {"prompt": "w1 w2 w3", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    arguments = ("serve", "--target", model, "--port", "0", "--draft", "ngram", "--grace-seconds", str(HANGS_S))
    with ranks(rank_programs.command, 2, *arguments) as started:
        until(lambda: "served at" in started[0].errors.read_text())
        (url,) = re.findall(r"served at (http://\S+)", started[0].errors.read_text())
        with httpx.stream("POST", f"{url}v1/completions", json=asked, timeout=HANGS_S) as answer:
            lines = answer.iter_lines()
            said = [next(lines)]
            for rank in told:
                os.kill(started[rank].process.pid, number)
            until(lambda: httpx.get(f"{url}health", timeout=HANGS_S).json()["status"] == "draining")
            said += lines
        events = [line.removeprefix("data: ") for line in said if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert [rank.result() for rank in started] == [0, 0]
        assert [rank.join() for rank in started] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bench"], "bench runs on one machine, got several ranks; run it without mlx.launch"),
        (["serve", "--config", "models.toml"], "--config names several models, and ranks share one target"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_join(monkeypatch, capsys, arguments, expected):
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err
