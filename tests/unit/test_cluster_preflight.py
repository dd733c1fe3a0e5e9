"""`preflight.py --target cluster`: each thing that is wrong is one line with rank, host and value."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rankmixer import cluster

from compile_overlap import topology

PREFLIGHT = Path(__file__).resolve().parents[2] / "research_topic_2" / "preflight.py"


def launch_of_two(software=cluster.software()):
    """What two ranks on two hosts find where all is well."""
    gpu = {"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory_gib": 140, "numa": 0, "peers": []}
    findings = []
    for rank, host in enumerate(("node-a", "node-b")):
        own = {**topology.found(rank, 0), **copy.deepcopy(software), "host": host, "hostname": host}
        own |= {"driver": "580.1", "gpus": [dict(gpu)], "environment": {"A2A_FFN_CHUNKS": "4"}}
        own |= {"address": f"10.0.0.{rank + 1}", "port": 1, "address_problem": "", "listen_problem": "", "gloo_problem": ""}
        findings.append(own)
    return findings, [[{"rank": 1 - rank, "skew_s": 0.01, "uncertain_s": 0.001}] for rank in range(2)]


def lines_of(findings, reached, tokens=64, device="cuda"):
    return cluster.problems(findings, reached, tokens, device, 30)


def test_nothing_is_wrong_with_a_launch_that_agrees():
    assert lines_of(*launch_of_two()) == []


def _set(*keys, value):
    def change(own):
        for key in keys[:-1]:
            own = own[key]
        own[keys[-1]] = value

    return change


@pytest.mark.parametrize("change, expected", [
    (_set("versions", "torch", value="2.6.0"), "torch 2.6.0; rank 0 has "),
    (_set("versions", "triton", value=None), "triton None; rank 0 has "),
    (_set("driver", value="535.1"), "driver 535.1; rank 0 has 580.1"),
    (_set("sources", "passes/base.py", value="abc"), "1 source file(s) differ from rank 0's, the first is passes/base.py: abc"),
    (_set("environment", value={}), "A2A_FFN_CHUNKS = None; rank 0 has 4"),
    (_set("environment", "NCCL_P2P_DISABLE", value="1"), "NCCL_P2P_DISABLE = 1; rank 0 has None"),
    (_set("gpus", value=[]), "LOCAL_RANK = 0: the host has 0 GPU(s)"),
    (_set("gpus", 0, "capability", value=[8, 0]), "NVIDIA H200: compute capability 8.0, 9.0 is needed"),
    (_set("gpus", 0, "name", value="H100"), "H100; rank 0 has NVIDIA H200"),
    (_set("address", value="127.0.0.1"), "address 127.0.0.1: other hosts cannot reach the loopback"),
    (_set("address", value=""), "no way to MASTER_ADDR"),
    (_set("listen_problem", value="cannot listen on 10.0.0.9: gone"), "cannot listen on 10.0.0.9: gone"),
])  # fmt: skip
def test_each_difference_is_named(change, expected):
    findings, reached = launch_of_two()
    change(findings[1])
    (line,) = lines_of(findings, reached)
    assert line[0] == 1 and line[1].startswith(expected)
    text = cluster.report(findings, [line], topology)
    assert f"FAIL rank 1 (node-b): {expected}" in text and text.endswith("preflight cluster: FAIL")


def test_a_rank_that_is_missing_and_tokens_that_do_not_divide_are_named():
    findings, _ = launch_of_two()
    found = lines_of([findings[0], None], [], tokens=15)
    assert found == [(1, "said nothing within 30 s"), (0, "P = 2 ranks: must divide T = 15 (--tokens)")]
    assert "FAIL rank 1 (unknown host): said nothing" in cluster.report([findings[0], None], found, topology)


def test_clocks_and_connections():
    findings, reached = launch_of_two()
    reached[0][0]["skew_s"] = -7.5
    reached[1][0] = {"rank": 0, "problem": "TimeoutError: timed out"}
    assert lines_of(findings, reached) == [
        (1, "clock -7.5 s from rank 0's, at most 2 s is allowed"),
        (1, "cannot reach rank 0 (node-a) at 10.0.0.1:1: TimeoutError: timed out"),
    ]


def test_a_listener_is_reached_and_a_closed_port_is_not():
    with cluster.Listener("127.0.0.1") as listener:
        other = {"rank": 1, "address": "127.0.0.1", "port": listener.port}
        answer = cluster._connect(other)
    assert abs(answer["skew_s"]) < 1
    assert "ConnectionRefusedError" in cluster._connect(other)["problem"]
    assert cluster.Listener("192.0.2.77").problem.startswith("cannot listen on 192.0.2.77")


def test_an_interface_that_is_not_there(monkeypatch):
    own = topology.found()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    assert cluster.own_address(own) == ("127.0.0.1", "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    assert "NCCL_SOCKET_IFNAME=ib9: no such interface" in cluster.own_address(own)[1]


def test_gloo_on_a_host_whose_name_is_the_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "is 127.0.1.1, which other hosts cannot reach" in cluster.gloo_problem()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert cluster.gloo_problem() == ""


def test_two_ranks_with_different_settings_end_with_status_1():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}, "A2A_FFN_CHUNKS": str(2 + rank)}
        environment["PYTHONPATH"] = str(PREFLIGHT.parents[1])
        command = [sys.executable, str(PREFLIGHT), "--target", "cluster", "--device", "cpu", "--tokens", "16",
                   "--timeout", "120"]  # fmt: skip
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=150)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert f"FAIL rank 1 ({socket.gethostname()}): A2A_FFN_CHUNKS = 3; rank 0 has 2" in outputs[0]
    assert outputs[1] == ""
