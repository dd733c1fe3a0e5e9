"""Files that the report cannot be made from are named, those of a sweep are read, and all that is made is checked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("markdown_it")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import report  # noqa: E402

REPORTS = ROOT / "reports"
OVERLAP = "results/h200x2-torch-2.11.0-shm/overlap.json"
TRACE = "results/h200x2-torch-2.11.0-shm/traces/kernel.trace.json"


def _one_kernel(begin, duration):
    return {"kernels": [{"name": "gemm", "begin_us": begin, "duration_us": duration}], "dependencies": None}


def test_a_record_that_is_cut_off_is_named(tmp_path):
    shutil.copytree(REPORTS, tmp_path / "reports")
    file = tmp_path / "reports" / OVERLAP
    file.write_text(file.read_text()[:3000])
    with pytest.raises(ValueError, match="overlap.json: is no JSON"):
        report.build(tmp_path / "reports", tmp_path / "figures")
    file.unlink()
    (tmp_path / "reports" / "results" / "sweep.jsonl").write_text("{}\n{\n")
    with pytest.raises(ValueError, match="sweep.jsonl: a line is no JSON"):
        report.build(tmp_path / "reports", tmp_path / "figures")


def test_a_value_that_cannot_be_printed_is_named(tmp_path):
    folder = tmp_path / "reports"
    shutil.copytree(REPORTS, folder)
    file = folder / OVERLAP
    content = json.loads(file.read_text())
    content["measurements"]["kernel"]["tokens_per_s"] = "many"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"reports/text/.*md: cannot be written \(TypeError.*{OVERLAP}"):
        report.build(folder, tmp_path / "figures")


@pytest.mark.parametrize(
    "name, change",
    [
        ("schema", lambda content: {**content, "schema": 99}),
        ("record field environment", lambda content: {**content, "environment": None}),
        ("environment field 'git_commit' is missing", lambda content: {**content, "environment": {"torch": "", "device": ""}}),
        ("measurements", lambda content: {**content, "measurements": {}}),
        ("configuration.dim", lambda content: {**content, "configuration": {"dim": {"value": "many"}}}),
        ("exchange.exchanges=None", lambda content: {**content, "exchange": {"exchanges": None}}),
        ("kind", lambda content: {**content, "kind": "others"}),
        ("record", lambda content: [content]),
    ],
)
def test_a_record_of_another_schema_is_refused_by_name(name, change, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "reports"
    shutil.copytree(REPORTS, folder)
    assert report.unfit(folder) == []
    file = folder / OVERLAP
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    (folder / "results" / "sweep.jsonl").write_text("{}\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    assert report.main() == 2
    named, sweep = capsys.readouterr().err.splitlines()
    assert f"{OVERLAP}: is no record ({name}" in named and "sweep.jsonl': line 1 is no record of a sweep" in sweep


@pytest.mark.parametrize(
    "problem, change",
    [
        ("notes.json", lambda folder: (folder / "notes.json").unlink()),
        ("notes.json: is no JSON", lambda folder: (folder / "notes.json").write_text("[1")),
        ("commits.json: is no JSON", lambda folder: (folder / "commits.json").write_text("")),
        ("folder.json", lambda folder: (folder / "results" / "folder.json").mkdir()),
    ],
)
def test_what_no_report_can_be_made_from_is_named(problem, change, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "reports"
    shutil.copytree(REPORTS, folder)
    (folder / "commits.json").unlink()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    change(folder)
    assert report.main() == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, change",
    [
        ("is no JSON", lambda content, text: text[:2000]),
        ("is no record (ranks=[]", lambda content, text: json.dumps({**content, "ranks": []})),
        ("is no record (ranks field span_us", lambda content, text: text.replace('"span_us": ', '"span_us": null, "span": ')),
        ("is no record (configuration.seed", lambda content, text: json.dumps({**content, "configuration": {"seed": 1}})),
        ("is no trace (kernels[0]", lambda content, text: json.dumps({**content, "kernels": [{"name": "gemm"}]})),
        ("is no trace (kernels: end after 0 us", lambda content, text: json.dumps({**content, **_one_kernel(0, 0)})),
        ("is no trace (kernels: end after 3e+09", lambda content, text: json.dumps({**content, **_one_kernel(1e9, 2e9)})),
    ],
)
def test_a_trace_that_is_none_is_refused_by_name(name, change, tmp_path):
    (tmp_path / "results").mkdir()
    text = (REPORTS / TRACE).read_text()
    (tmp_path / "results" / "kernel.trace.json").write_text(change(json.loads(text), text))
    (problem,) = report.unfit(tmp_path)
    assert f"kernel.trace.json: {name}" in problem


def test_the_check_compares_every_file(tmp_path):
    folder = tmp_path / "reports"
    shutil.copytree(REPORTS, folder)
    markdown, _ = report.build(folder, folder / "figures")
    report.write(folder, markdown, folder / "figures")
    assert report.stale(folder) == []
    for name in ("report.md", "report.html", "figures/roofline.svg"):
        (folder / name).write_text((folder / name).read_text() + " ")
    (folder / "commits.json").write_text(json.dumps(["f" * 40]))  # as no git history, or none at all, has it
    assert {"report.md", "report.html", "figures/roofline.svg", "commits.json"} <= set(report.stale(folder))


def test_the_bytes_are_the_same_in_other_locales_and_with_a_style_of_the_user_s(tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.grid: True\nlines.linewidth: 5\n")
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    elsewhere = {"MPLCONFIGDIR": str(tmp_path), "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    command = [sys.executable, ROOT / "scripts" / "report.py", "--check"]
    done = subprocess.run(command, env={**os.environ, **ascii_only, **elsewhere}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the report is what the records say\n"), done.stdout + done.stderr


def test_a_sweep_that_was_cut_off_is_a_table_a_comparison(tmp_path):
    from test_sweep import _record

    shutil.copytree(REPORTS / "text", tmp_path / "text")
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "results").mkdir()
    lines = [_record(4.0, 2.0, batch) for batch in (1, 2)]
    unfinished = json.dumps(_record(4.0, 2.0, batch=3))[:200]
    (tmp_path / "results" / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + unfinished)
    markdown, _ = report.build(tmp_path, tmp_path / "figures")
    assert (
        "**forward, compiled: ratio to none, shape by shape**" in markdown and "| (2, 16, 128, 2) | 2.00 |" in markdown
    )
