"""The submission: complete, the same bytes for the same commit, and usable where there is no git."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="no git checkout: the submission is made of a commit"
)
IMPORTS = """
import json, sys
sys.path.insert(0, "research_topic_2")
import compile_overlap, passes, benchmark, compare, sweep
import torch
from rankmixer import plugins, record
print(json.dumps([compile_overlap.__file__, record.environment(torch.device("cpu"))["git_commit"], callable(plugins.load_plugin())]))
"""


def package(root, out):
    return subprocess.run(["bash", str(root / "scripts" / "package_submission.sh"), str(out)], text=True, capture_output=True,
                          env={**os.environ, "PYTHON": sys.executable})  # fmt: skip


def git(root, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone whose last commit is the working tree, with its report made anew: what is tested is what stands here."""
    root = tmp_path_factory.mktemp("clone")
    git(ROOT, "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(root))
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())
            (root / name).chmod((ROOT / name).stat().st_mode)
    if all(map(importlib.util.find_spec, ("matplotlib", "markdown_it"))):
        subprocess.run([sys.executable, str(root / "scripts" / "report.py")], check=True)
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "as it stands")
    return root


@pytest.fixture(scope="module")
def unpacked(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    result = package(clone, folder / "one.zip")
    assert result.returncode == 0, result.stdout + result.stderr
    with zipfile.ZipFile(folder / "one.zip") as archive:
        archive.extractall(folder)
        for entry in archive.infolist():
            (folder / entry.filename).chmod(entry.external_attr >> 16)
    return folder


def test_the_same_commit_gives_the_same_bytes(clone, unpacked):
    assert package(clone, unpacked / "two.zip").returncode == 0
    assert (unpacked / "two.zip").read_bytes() == (unpacked / "one.zip").read_bytes()


def test_the_two_commands_of_the_readme_are_there(unpacked):
    tree = unpacked / "compile-overlap"
    readme = (tree / "README.md").read_text()
    for command in ("bash scripts/demo.sh", "bash scripts/test.sh"):
        assert command in readme
        assert subprocess.run(["bash", "-n", str(tree / command.split()[1])]).returncode == 0


def test_the_tree_imports_and_knows_its_commit_without_git(clone, unpacked):
    environment = {**os.environ, "PYTHONPATH": str(unpacked / "compile-overlap")}
    environment.pop("GIT_COMMIT", None)
    environment.pop("A2A_FFN_KERNEL_PLUGIN", None)
    result = subprocess.run([sys.executable, "-c", IMPORTS], cwd=unpacked / "compile-overlap", env=environment,
                            capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stderr
    file, commit, plugin = json.loads(result.stdout)
    assert Path(file).is_relative_to(unpacked) and commit == git(clone, "rev-parse", "HEAD") and plugin


@pytest.mark.parametrize("flag, status, words", [("--help", 0, "Makes the submission"), ("-h", 0, "OUT.zip"), ("--out", 2, "must be")])
def test_a_flag_is_no_file(flag, status, words, tmp_path):
    command = ["bash", str(ROOT / "scripts" / "package_submission.sh"), flag]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == status and words in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(clone, tmp_path):
    broken = tmp_path / "broken"
    git(clone, "clone", "--quiet", str(clone), str(broken))
    git(broken, "rm", "--quiet", "-r", "research_topic_2/scripts/run_prod_cross.sh", "reports/results/*.trace.json")
    git(broken, "commit", "--quiet", "-m", "without them")
    result = package(broken, tmp_path / "out.zip")
    assert result.returncode == 1 and not (tmp_path / "out.zip").exists()
    assert "error: cross-node launch: nothing matches research_topic_2/scripts/run_prod_cross.sh" in result.stderr
    assert "error: traces: nothing matches reports/results/*/traces/*.trace.json" in result.stderr


def test_a_stale_report_is_refused(clone, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("markdown_it")
    stale = tmp_path / "stale"
    git(clone, "clone", "--quiet", str(clone), str(stale))
    text = stale / "reports" / "text" / "90-limitations.md"
    text.write_text(text.read_text() + "- Another one.\n")
    git(stale, "commit", "--quiet", "-am", "text without its report")
    result = package(stale, tmp_path / "out.zip")
    assert result.returncode == 1 and "stale: report.md, report.html: run" in result.stdout
