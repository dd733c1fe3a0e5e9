"""Which record the report speaks of: the newest comparable one, whatever its name."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("markdown_it")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import report  # noqa: E402
from reporting.citations import Results  # noqa: E402
from reporting.newest import Newest  # noqa: E402

REPORTS = ROOT / "reports"
PEERS = "h200x2-torch-2.11.0/peers.json"
OTHER = "b" * 40


def with_record(folder, name, seconds, commit=OTHER, torch="2.11.0+cu130", **settings):
    """The reports with another record, of another median of `kernel:peers`."""
    if not folder.exists():
        shutil.copytree(REPORTS, folder)
    content = json.loads((REPORTS / "results" / PEERS).read_text())
    content["measurements"]["kernel:peers"]["slowest_rank"]["p50_s"] = seconds
    content["environment"] |= {"git_commit": commit, "torch": torch}
    for setting, value in settings.items():
        content["configuration"][setting] = {"value": value, "default": None, "overridden": True}
    (folder / "results" / name).parent.mkdir(exist_ok=True)
    (folder / "results" / name).write_text(json.dumps(content))
    return Newest(Results(folder / "results"))("NVLink", ["none", "kernel by peers"])


def test_the_newest_comparable_record_is_the_one_that_is_cited(tmp_path):
    old = json.loads((REPORTS / "commits.json").read_text())[0]
    before, folder = Newest(Results(REPORTS / "results"))("NVLink", ["none", "kernel by peers"]).file, tmp_path / "reports"
    assert with_record(folder, "h200x2-torch-2.11.0/z.json", 0.001, commit=old).file == before
    assert with_record(folder, "h200x2-torch-2.11.0/graphs.json", 0.001, cuda_graph=True).file == before
    assert with_record(folder, "h200x2-torch-2.11.0-shm/new.json", 0.001).file == before
    assert with_record(folder, "h200x2-torch-2.6.0/new.json", 0.001, torch="2.6.0+cu124").file == before
    assert with_record(folder, "h200x2-torch-2.11.0/any name.json", 0.0023456, rounds=9).file.endswith("any name.json")
    newest = with_record(folder, "some folder/new.json", 0.0034567, commit=old, torch="2.13.0")
    assert newest.file == "results/some folder/new.json"
    markdown, _ = report.build(folder, tmp_path / "figures")
    assert "through the peers' memory it takes\n  3.457 ms" in markdown and "(torch 2.13.0, compiled)" in markdown


def test_what_a_mode_went_through_is_its_plan_s_word(tmp_path):
    record = with_record(tmp_path / "reports", "h200x2-torch-2.11.0/new.json", 0.001)
    content = record.get()
    assert (record.mode("kernel by NCCL"), record.mode("kernel by peers")) == ("kernel", "kernel:peers")
    content["plans"] = {"kernel": "32 r1 a2 b1 s0 peers"}
    assert record.mode("kernel by NCCL") is None and record.by_peers("kernel")
    content["summary"]["kernel:TRANSPORT=collectives"] = {}
    del content["summary"]["kernel:peers"]
    assert record.mode("kernel by NCCL") == "kernel:TRANSPORT=collectives"
    assert record.mode("kernel by peers") == "kernel" and record.mode("kernel:peers") is None


def test_two_nodes_on_one_host_are_links_of_their_own():
    newest = Newest(Results(REPORTS / "results"))
    for link, name in (("sockets", "sockets"), ("host shared memory", "shm")):
        assert newest(f"{link} of two nodes on one host", ["none", "kernel"]).file.split("/")[1] == f"h200x2-two-nodes-{name}"
        assert "nodes" not in newest(link if name == "shm" else "NVLink", ["none", "kernel"]).file


def test_traces_that_are_compared_are_of_one_commit(tmp_path):
    newest = Newest(Results(REPORTS / "results"))
    modes = ["kernel:naive", "kernel by NCCL"]
    assert [each.get("mode") for each in newest.traces("NVLink", modes)] == ["kernel:naive", "kernel"]
    assert not any(newest.traces("NVLink", ["kernel by peers"]))
    later = REPORTS / "results" / "h200x2-torch-2.11.0" / "traces" / "kernel.trace.json"
    shutil.copytree(REPORTS, tmp_path / "reports")
    content = json.loads(later.read_text())
    content["environment"]["git_commit"] = OTHER
    (tmp_path / "reports" / "results" / "h200x2-torch-2.11.0" / "later.trace.json").write_text(json.dumps(content))
    newest = Newest(Results(tmp_path / "reports" / "results"))
    pair, (alone,) = newest.traces("NVLink", modes), newest.traces("NVLink", ["kernel"])
    assert {each.get("environment", "git_commit") for each in pair} == {"86b03517e5188b89b7767806044e0bbee1c3d1f7"}
    assert alone.file.endswith("later.trace.json")
