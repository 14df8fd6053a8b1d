"""Which rank a process is, by the environment."""

import json
from pathlib import Path

import pytest
from sweeps import sweep

import runtime
from actors.distributed.rank_address import RankAddress, rank_address


def hostfile(tmp_path: Path, hosts: object) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(hosts))
    return str(path)


def test_a_process_on_its_own_is_no_rank():
    assert rank_address({"PATH": "/bin"}) is None


def test_a_ring_has_its_control_port_after_the_last_port_of_the_ring(tmp_path):
    hosts = [["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5002", "10.0.0.2:5003"]]
    environment = {"MLX_RANK": "1", "MLX_HOSTFILE": hostfile(tmp_path, hosts)}
    assert rank_address(environment) == RankAddress(1, 2, "10.0.0.1", 5004)


def test_other_backends_name_rank_0_themselves(tmp_path):
    devices = hostfile(tmp_path, [[None, "rdma_en5"], ["rdma_en5", None]])
    jaccl = {"MLX_RANK": "0", "MLX_IBV_DEVICES": devices, "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}
    assert rank_address(jaccl) == RankAddress(0, 2, "10.0.0.1", 32324)
    nccl = {"MLX_RANK": "2", "MLX_WORLD_SIZE": "4", "NCCL_HOST_IP": "10.0.0.9", "NCCL_PORT": "12345"}
    assert rank_address(nccl) == RankAddress(2, 4, "10.0.0.9", 12346)


def test_the_control_address_can_be_named():
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OUTRIDER_CONTROL": "leader:900"}
    assert rank_address(mpi) == RankAddress(1, 3, "leader", 900)


def test_the_only_process_of_a_launcher_is_no_rank(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("")
    assert rank_address({"MLX_RANK": "0", "MLX_HOSTFILE": str(empty)}) is None
    assert rank_address({"MLX_RANK": "0", "MLX_HOSTFILE": hostfile(tmp_path, [["10.0.0.1:5000"]])}) is None
    assert rank_address({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


@sweep(
    ("environment", "expected"),
    [
        ({"MLX_RANK": "one"}, "MLX_RANK must be an integer, got 'one'"),
        ({"MLX_RANK": "1"}, "nothing says how many ranks there are; set MLX_WORLD_SIZE"),
        ({"MLX_RANK": "2", "MLX_WORLD_SIZE": "2"}, "MLX_RANK must be between 0 and 1, got 2"),
        ({"MLX_RANK": "1", "MLX_WORLD_SIZE": "2"}, "nothing says where rank 0 is; set OUTRIDER_CONTROL"),
        (
            {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "OUTRIDER_CONTROL": "here"},
            "OUTRIDER_CONTROL must have host:port, got 'here'",
        ),
        ({"MLX_RANK": "1", "MLX_HOSTFILE": "/nowhere.json"}, "cannot be read as JSON"),
    ],
)
def test_an_environment_that_cannot_be_understood_is_refused(environment, expected):
    with pytest.raises(runtime.SettingsError, match=expected):
        rank_address(environment)


@sweep("hosts", [{}, [], ["10.0.0.1:5000"], [[]], [["10.0.0.1"], ["10.0.0.2"]]])
def test_a_hostfile_of_another_form_is_refused(tmp_path, hosts):
    with pytest.raises(runtime.SettingsError, match="MLX_HOSTFILE"):
        rank_address({"MLX_RANK": "0", "MLX_HOSTFILE": hostfile(tmp_path, hosts)})


def test_joining_is_refused_where_there_are_no_ranks(monkeypatch):
    monkeypatch.delenv("MLX_RANK", raising=False)
    with pytest.raises(runtime.SettingsError, match="not one of several ranks"):
        runtime.join_ranks()
    with pytest.raises(runtime.SettingsError, match="timeout_s must be above 0, got 0"):
        runtime.join_ranks(0)
