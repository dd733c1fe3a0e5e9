"""Calls whose shapes change leave nothing behind: layers, answers, memory and file handles stay within their bounds."""

import copy
import gc
import importlib.util
import json
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from archive_double import ArchiveFFN
from rankmixer import record

import compile_overlap
from compile_overlap import calls, compiler

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "reports" / "results" / "cpu-faults" / "endurance.json"
CALLS, WARM = 300, 60
MOST_GROWTH = 8 << 20  # bytes; the allocator's arenas settle within it


@pytest.fixture
def ffn(monkeypatch):
    monkeypatch.setenv("A2A_FFN_RECIPE", "eager_exact")
    monkeypatch.setenv("A2A_FFN_BIAS", "add")
    monkeypatch.setenv("A2A_FFN_CHUNKS", "2")
    monkeypatch.setenv("A2A_FFN_STRICT", "1")
    compile_overlap.reset()
    torch.manual_seed(0)
    yield ArchiveFFN(4, 16, 2)
    compile_overlap.reset()


def _resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _compiled_functions():
    """What Dynamo keeps of compiled code, as globals of the function that it compiled."""
    gc.collect()
    return sum(name.startswith("__compiled_fn") for name in vars(compiler))


def _answers():
    return sum(len(answers) for known in calls._ANSWERS.values() for answers in known.values())


def test_calls_leave_nothing_behind(ffn):
    """Two batch sizes, and one of them with backward, in turn."""
    compiled, before = torch._dynamo.utils.counters["stats"], None
    for call in range(CALLS):
        x = torch.randn(2 + (call % 3 == 1), 4, 16)
        if call % 3:
            with torch.no_grad():
                ffn(x, overlap="kernel")
        else:
            ffn(x.requires_grad_(), overlap="kernel").sum().backward()
            ffn.zero_grad(set_to_none=True)
        if call == WARM:
            gc.collect()
            before = compiled["unique_graphs"], len(os.listdir("/proc/self/fd")), _resident()
    gc.collect()
    graphs, handles, resident = before
    assert (compiled["unique_graphs"], len(os.listdir("/proc/self/fd"))) == (graphs, handles)
    assert len(compiler._LAYERS) == _answers() == 3
    assert _resident() - resident < MOST_GROWTH


def test_the_oldest_layer_is_dropped_and_freed(ffn, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "MAX_LAYERS", 2)
    made, before = [], _compiled_functions()
    real = compiler.new_layer
    monkeypatch.setattr(compiler, "new_layer", lambda *a: made.append(weakref.ref(real(*a))) or made[-1]())
    with torch.no_grad():
        for rows in (2, 3, 2, 4, 3, 2):  # 4 drops 2's, and the last 2 drops 3's although it was used last
            x = torch.randn(rows, 4, 16)
            assert torch.equal(ffn(x, overlap="kernel"), ffn(x))
            assert len(compiler._LAYERS) == _answers() <= 2
    assert [layer() is None for layer in made] == [True, True, False, False]
    assert _compiled_functions() == before + 2
    assert caplog.text.count("the oldest is dropped") == 1


def test_layers_of_another_group_drop_none(monkeypatch):
    """A rank may have other groups than its peers, who must drop the same layers."""
    monkeypatch.setattr(compiler, "MAX_LAYERS", 2)
    monkeypatch.setattr(compiler, "_LAYERS", {("a", 1): "oldest", ("b", 1): "other", (None, 1): "own", ("a", 2): "newer"})
    assert compiler.drop_oldest("b") is compiler.drop_oldest(None) is None
    assert compiler.drop_oldest("a") == "oldest" and list(compiler._LAYERS) == [("b", 1), (None, 1), ("a", 2)]


@pytest.mark.parametrize("count", ["resident_bytes", "files", "layers", "compilations"])
def test_growth_beyond_its_bound_is_refused(count):
    content = json.loads(RECORD.read_text())
    assert record.validate(content)["calls"] >= 10000
    changed = copy.deepcopy(content)
    changed["ranks"][-1]["last"][count] += content["bounds"][count] + 2**20
    with pytest.raises(ValueError, match=f"{count} grew by"):
        record.validate(changed)


@pytest.mark.parametrize(
    "script, arguments, words",
    [
        ("endurance", "--calls 15", "--calls 15, --keep None: must be at least 16, the configurations, and 1"),
        ("endurance", "--calls 3 --batch-sizes 5,6", "at least 4, the configurations"),
        ("endurance", "--keep 0", "--keep 0: must be"),
        ("endurance", "--batch-sizes 2,0", "argument --batch-sizes"),
        ("faults", "--only peers-dies", "none of these can be made with --device cpu"),
    ],
)
def test_what_nothing_can_be_measured_of_is_refused(script, arguments, words, monkeypatch, capsys):
    """Before a process group or a rank is made."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    spec = importlib.util.spec_from_file_location(f"script_{script}", ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert words in capsys.readouterr().err + str(end.value.code)
