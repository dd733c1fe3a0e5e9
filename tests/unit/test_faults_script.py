"""`scripts/faults.py`: what is recorded and printed of each rank."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import faults  # noqa: E402

IMPORTING = "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'\n"


class Process:
    """Ended with a status, or to be killed."""

    def __init__(self, status):
        self._status = status

    def status(self):
        return self._status

    def end(self):
        return -9 if self._status is None else self._status


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """A run of three ranks whose last one stalls, and is stopped by the script."""

    def started(table, name, fault, folder):
        (folder / "fault").touch()
        (folder / "0.log").write_text(f"{IMPORTING}a warning\n")
        (folder / "1.txt").write_text("RankFault: rank 2 died or stalled")
        (folder / "2.log").write_text(IMPORTING)
        return [Process(status) for status in (1, 1, None)]

    monkeypatch.setattr(faults._Table, "_started", started)
    table = faults._Table(SimpleNamespace(device="cpu", ranks=3), tmp_path)
    return table.run("stalls", faults.FAULTS["stalls"])


def test_who_is_stopped_is_said_and_what_imports_print_is_not(stalled):
    ranks, hung = stalled
    assert [rank["message"] for rank in ranks] == ["a warning", "RankFault: rank 2 died or stalled", faults.STOPPED]
    assert ranks[2]["status"] == -9 and ranks[2]["seconds"] is None and hung == []


def test_no_seconds_are_printed_of_a_rank_that_did_not_end(stalled, capsys):
    ranks, _ = stalled
    faults._print({"name": "stalls", "fault": "rank 2 sleeps", "ranks": ranks, "problems": [],
                   "rerun": {"ok": True, "seconds": 1.0}})  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  rank 0: status 1 after ") and lines[1].endswith(" s; a warning")
    assert lines[3] == "  rank 2: status -9; stopped by this script"
