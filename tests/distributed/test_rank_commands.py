"""The command line under `mlx.launch`: rank 0 runs the command, and the others follow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import HANGS_S, environment
from models import llama, save
from ranks import free_ports, kernels_of

import runtime
from runtime.cli.main import main

TWO_RANKS = {"MLX_RANK": "0", "MLX_WORLD_SIZE": "2", "OUTRIDER_CONTROL": "127.0.0.1:1"}


@pytest.mark.parametrize("draft", [["ngram"], ["model", "--draft-rank", "1"]], ids=["", "draft-rank"])
def test_generate_gives_the_text_of_one_process(tmp_path: Path, draft: list[str]):
    model = save(tmp_path / "model", llama(num_attention_heads=4, num_key_value_heads=2))
    ports = free_ports(2)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    command = [sys.executable, "-m", "runtime", "generate", "w1 w2 w3", "-m", "8", "--target", str(model)]
    processes = [
        subprocess.Popen(
            [*command, "--raw", "--draft", *draft],
            cwd=tmp_path,
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
