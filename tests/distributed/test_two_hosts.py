"""The cross-node command on two hosts, which are network namespaces with addresses of their own: the checks pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import netns  # noqa: E402


@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_the_printed_command_on_two_hosts(tmp_path):
    command = [sys.executable, str(SCRIPTS / "cross_cpu.py"), str(tmp_path), "--quick", "--limit", "300"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("A2A_FFN_")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=380)
    if process.returncode == 2:
        pytest.skip(f"no namespaces here: {errors.strip()}")
    log = (tmp_path / "quick.log").read_text()
    assert process.returncode == 0, output + log
    record = json.loads((tmp_path / "quick.json").read_text())
    assert record["world_size"] == 4 and record["pass"] == "forward+backward"
    assert record["configuration"]["overlap"]["value"] == "kernel" and record["plugin"]
    assert record["checks"]["ran"] and record["checks"]["gradients"]
    assert "check: forward of kernel equals none" in log and "falling back" not in log
    assert "quick" in (tmp_path / "table.log").read_text()
    assert not [name for name in netns.namespaces() if f"-{process.pid}-" in name]
