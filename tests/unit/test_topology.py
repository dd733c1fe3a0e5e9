"""What is found on hosts, how it is told, and how ranks leave it for each other."""

import json
import subprocess

import pytest
import torch

from compile_overlap import topology


def rank(number, host, obstacle=None, gpus=2):
    card = {"name": "mlx5_0:1", "state": "ACTIVE", "rate": "400 Gb/sec", "layer": "InfiniBand", "networks": ["ib0"], "numa": 1}
    return {
        "rank": number, "local_rank": number % 2, "host": host, "hostname": host, "cpus": 8, "numa_nodes": 2,
        "driver": "580.1",
        "gpus": [{"index": i, "name": "H200", "capability": [9, 0], "memory_gib": 140, "numa": 0,
                  "peers": [j for j in range(gpus) if j != i]} for i in range(gpus)],
        "peers_obstacle": obstacle, "cards": [card],
        "networks": [{"name": "eth0", "state": "up", "speed_mbit": 25000, "numa": None, "addresses": ["10.0.0.1"]}],
        "master": {"master": "10.0.0.1", "interface": "eth0", "address": "10.0.0.1"},
    }  # fmt: skip


FOUR = [rank(0, "a"), rank(1, "a"), rank(2, "b"), rank(3, "b")]


def test_what_is_found_here_is_json_and_holds_the_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    own = json.loads(json.dumps(topology.found(rank=3, local_rank=0)))
    assert own["rank"] == 3 and own["master"] == {"master": "127.0.0.1", "interface": "lo", "address": "127.0.0.1"}
    assert any("127.0.0.1" in each["addresses"] for each in own["networks"])
    assert len(own["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_an_address_that_cannot_be_looked_up_is_said(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "256.0.0.1")
    assert topology.found()["master"]["error"]


@pytest.mark.parametrize("findings, per_host, expected", [
    (FOUR, None, "on two levels"), (FOUR[:2], None, "through the peers' memory"), (FOUR[:2], 1, "rank 0: a rank is alone"),
    (FOUR[:3], None, "rank 2: a rank is alone"), ([*FOUR[:3], rank(3, "b", "no CUDA device")], None, "rank 3: no CUDA device"),
])  # fmt: skip
def test_how_a_group_exchanges(findings, per_host, expected):
    assert expected in topology.exchange_of(findings, per_host)


def test_the_table_names_hosts_gpus_cards_and_networks():
    text = topology.describe(FOUR)
    assert text.startswith("2 host(s), 4 rank(s)\n")
    assert "host 1   b (b), ranks 2, 3" in text
    for part in ("H200, SM90, 140 GiB, NUMA 0, reads the memory of 1", "mlx5_0:1 ACTIVE, 400 Gb/sec, InfiniBand, NUMA 1, ib0",
                 "eth0 10.0.0.1, 25 Gbit/s, NUMA unknown, towards MASTER_ADDR"):
        assert text.count(part) == 2
    assert "4 host(s), 4 rank(s), pretended: 1 rank(s) each" in topology.describe(FOUR, 1)


@pytest.mark.parametrize("arguments, environment, message", [
    (("--timeout", "nan"), {}, "--timeout nan: must be"), (("--timeout", "-1"), {}, "--timeout -1.0: must be"),
    ((), {"A2A_FFN_RANKS_PER_HOST": "x"}, "A2A_FFN_RANKS_PER_HOST = x: must be"),
    ((), {"A2A_FFN_RANKS_PER_HOST": "3", "WORLD_SIZE": "4"}, "= 3: must be a divisor of the group's ranks, P = 4"),
])  # fmt: skip
def test_mistakes_have_status_2_and_no_traceback(monkeypatch, capsys, arguments, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        topology.main(list(arguments))
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_one_rank_may_pretend_any_host_and_a_file_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("A2A_FFN_RANKS_PER_HOST", "2")
    assert topology.main(["--json", str(tmp_path / "found.json")]) == 0 and (tmp_path / "found.json").exists()
    assert topology.main(["--json", str(tmp_path)]) == 1
    assert f"error: --json {tmp_path}: [Errno 21]" in capsys.readouterr().err


def test_nvidia_smi_without_a_gpu(monkeypatch):
    def answers(text):
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, stdout=text))
        return topology._driver()

    assert answers("No devices were found\n") == (None, {})
    assert answers("GPU-1, 00000000:1A:00.0, 580.1\n") == ("580.1", {"1": "0000:1a:00.0"})


def test_a_rank_that_says_nothing_is_none_after_the_limit():
    board = topology.Board.__new__(topology.Board)
    board.store, board.rank, board.size = torch.distributed.HashStore(), 0, 3
    board.store.set("found 2", json.dumps({"rank": 2}))
    assert board.gather("found", {"rank": 0}, limit_s=0.5) == [{"rank": 0}, None, {"rank": 2}]
