"""Every committed record is valid and says where it comes from."""

import json
from pathlib import Path

import pytest
import results_file
from rankmixer import record

FILES = sorted((Path(__file__).resolve().parents[2] / "reports" / "results").rglob("*.json"))
TRACES = [path for path in FILES if path.name.endswith(".trace.json")]
SIMULATED = [path for path in FILES if path.parent.name == "simulated"]
RECORDS = [path for path in FILES if path not in (*TRACES, *SIMULATED)]
SWEEPS = sorted((Path(__file__).resolve().parents[2] / "reports" / "results").rglob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_record(path):
    content = json.loads(path.read_text())
    record.validate(content)
    assert len(content["environment"]["git_commit"]) == 40


@pytest.mark.parametrize("path", SIMULATED, ids=lambda path: path.name)
def test_simulated(path):
    assert record.validate(json.loads(path.read_text()))["simulated"] is True


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_trace(path):
    content = json.loads(path.read_text())
    assert content["kind"] == "trace" and content["kernels"]
    assert all(0 <= rank["hidden_fraction"] <= 1 for rank in content["ranks"])
    assert len(content["environment"]["git_commit"]) == 40


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_sweep(path):
    lines = results_file.read(path)
    for line in lines:
        record.validate(line)
        assert len(line["environment"]["git_commit"]) == 40
        results_file.require_same(path, lines, line)


def test_there_are_records():
    assert len(RECORDS) >= 10
