"""The command line under `mlx.launch`: rank 0 runs the command, and the others follow."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import rank_programs
from command_line import HANGS_S, environment
from doctor_reports import sections
from models import llama, save
from ranks import free_ports, ranks
from served_command import until

import runtime
from runtime.cli.main import main

pytestmark = pytest.mark.slow

# Takes so long that the server is seen draining meanwhile, also on a busy machine.
NUM_TOKENS = 300

TWO_RANKS = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2", "OUTRIDER_CONTROL": "127.0.0.1:1"}


@pytest.mark.parametrize("draft", [["ngram"], ["model", "--draft-rank", "1"]], ids=["", "draft-rank"])
def test_generate_gives_the_text_of_one_process(tmp_path: Path, draft: list[str]):
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    ports, hostfile = free_ports(2), tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    command = [sys.executable, "-m", "runtime", "generate", "w1 w2 w3", "-m", "8", "--target", str(model)]
    processes = [
        subprocess.Popen(
            [*command, "--raw", "--draft", *draft],
            cwd=tmp_path,
            env=environment() | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
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


def test_doctor_examines_the_ranks_and_a_target_over_them(tmp_path: Path) -> None:
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    arguments = "doctor", "--distributed", "--target", model, "--draft", model
    with ranks(rank_programs.command, 2, arguments) as (first, second):
        status, printed, errors = first.result()
        assert (status, errors) == (0, "")
        assert second.result() == (0, "", "")
        assert [first.join(), second.join()] == [0, 0]
    found = sections(printed)
    assert list(found) == ["ranks", "target", "draft", "pair", "machine", "conclusion"]
    about = found["ranks"]
    assert "ring (in use)" in about["backends"]
    assert re.fullmatch(r"outrider \S+, mlx \S+, mlx-lm \S+; the same on all", about["versions"])
    assert about["rank 0"] == about["rank 1"]
    assert socket.gethostname() in about["rank 1"]
    times = r"[\d,]+\.\d\d ms \([\d,]+\.\d\d–[\d,]+\.\d\d\)"
    about = found["target"]
    assert re.fullmatch(rf"T_v\(1\) = {times}, of it exchange [\d,]+\.\d\d ms", about["a pass of 1 token"])
    # Two for each of two layers, of hidden states with 32 numbers in float32.
    assert about["a pass exchanges"] == "512 bytes a token, by 4 × all_sum"
    assert "exchange" not in found["draft"]["a pass of 1 token"]
    assert re.search(r"\d+% of a pass of 1 token, \d+% of one of 9, is exchange between 2 ranks", printed)


def test_bench_compares_lookaheads_over_the_ranks(tmp_path: Path):
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    arguments = "bench", "--target", model, "--draft", model, "--repeats", "1", "-p", "w1 w2 w3", "-m", "16"
    with ranks(rank_programs.command, 2, (*arguments, "--lookahead", "2")) as (first, second):
        status, printed, errors = first.result()
        assert (status, errors) == (0, "")
        assert second.result() == (0, "", "")
        assert [first.join(), second.join()] == [0, 0]
    rows = [line for line in printed.splitlines() if line.startswith("outrider lookahead")]
    assert [row.split("  ")[0] for row in rows] == [f"outrider lookahead {k}" for k in ("0", "2")]
    # As many texts as there are, and each is the plain one.
    assert all(row.endswith("1/1") for row in rows)
    assert "mlx-lm's own decoding is left out" in printed
    assert "mlx-lm plain" not in printed


def test_a_rank_that_fails_is_named(tmp_path: Path):
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    arguments = "doctor", "--distributed", "--target", model
    with ranks(rank_programs.command, 2, arguments, True) as (first, second):
        status, _, errors = first.result()
        assert "rank 1 failed in time_exchange: ValueError: no such kernel" in errors
        assert [status, second.result()[0]] == [1, 1]
        assert [first.join(), second.join()] == [0, 0]


@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1))],
    ids=["SIGTERM to rank 0", "Ctrl-C in the terminal of all"],
)
def test_a_server_gives_the_answer_that_it_has_begun_and_ends_on_all_ranks(number, told, tmp_path):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    model = save(tmp_path / "model", llama(**config))
    asked: dict[str, Any] = {"prompt": "w1 w2 w3", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    arguments = ("--target", model, "--port", "0", "--draft", "ngram", "--grace-seconds", str(HANGS_S))
    with ranks(rank_programs.serve, 2, *arguments) as started:
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
        (["doctor"], "doctor examines models on one machine, got several ranks; give --distributed"),
        (
            ["distill", "--target", "m", "--data", "d", "--out", "o"],
            "distill runs on one machine, got several ranks; run it without mlx.launch",
        ),
        (["bench", "--streams", "2"], "--streams compares with mlx-lm's BatchGenerator"),
        (["bench", "--num-draft-tokens", "2"], "--num-draft-tokens is for mlx-lm's speculative decoding"),
        (["bench", "--dtype", "float32"], "--dtype would cast rank 0's part of the target alone"),
        (["serve", "--config", "models.toml"], "--config names several models, and ranks share one target"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_join(monkeypatch, capsys, arguments, expected):
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err
