"""The scripts that trace and measure: which call is kept, what is written, which records are refused."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "research_topic_2"), str(ROOT / "scripts")]

import compare  # noqa: E402
import draw_trace  # noqa: E402
import measure  # noqa: E402
import trace_overlap  # noqa: E402
from rankmixer import cli, record  # noqa: E402
from rankmixer.runtime import Runtime  # noqa: E402
from rankmixer.workload import Workload  # noqa: E402
from test_measure import MAIN, NETWORK, NVJET, SEND_RECV, SYNCS, kineto  # noqa: E402

SMALL = (
    "--device cpu --no-compile --batch-size 2 --tokens 4 --dim 8 --k 2 --warmup 0 --num-tests 3 --no-l2-flush".split()
)


def workload_of(tmp_path, *arguments):
    parser = cli.build_parser()
    trace_overlap.add_trace_options(parser, str(tmp_path))
    options = parser.parse_args([*SMALL, "--iterations", "3", *arguments])
    cli.validate(options, 1, torch.device("cpu"))
    return parser, Workload(options, Runtime(0, 1, torch.device("cpu"), None))


def three_calls(*lengths):
    """A trace whose calls take `lengths`: a pack, an exchange beside a GEMM, and a GEMM."""
    calls = []
    for index, length in enumerate(lengths):
        rows = (
            ("pack", 0, 4, MAIN, -20), (SEND_RECV, 6, 26, NETWORK, -10), (NVJET, 5, 15, MAIN, -5), (NVJET, 28, length, MAIN, 20),
        )  # fmt: skip
        for entry in kineto(*rows, syncs=SYNCS)["traceEvents"]:
            moved = {"ts": entry["ts"] + 5000 * index} if "ts" in entry else {}
            args = {key: value + 1000 * index if "corr" in key else value for key, value in entry["args"].items()}
            calls.append({**entry, **moved, "args": args})
    first = [entry for entry in calls if 1000 <= entry.get("ts", 1000) % 5000]  # of each pair, the second call
    return {"traceEvents": first}


def trace(monkeypatch, tmp_path, content, *arguments):
    monkeypatch.setattr(trace_overlap, "profiled", lambda run: run() and content)
    parser, workload = workload_of(tmp_path, *arguments)
    return parser, workload, lambda mode="none", **kw: trace_overlap.trace_mode(workload, mode, **kw)


def test_the_fastest_call_after_the_first_is_kept(monkeypatch, tmp_path):
    *_, run = trace(monkeypatch, tmp_path, three_calls(40, 60, 50))
    calls, figures = run(alone_us=[10.0])
    assert calls[0].span == 50 and figures[0]["inflation"] == 2.0 and figures[0]["dependencies"] == "trace"


def test_a_trace_without_all_calls_is_refused(monkeypatch, tmp_path):
    *_, run = trace(monkeypatch, tmp_path, three_calls(40, 60))
    with pytest.raises(ValueError, match=r"no trace on rank\(s\) \[0\]: 2 calls found, 3 were made"):
        run()
    *_, run = trace(monkeypatch, tmp_path, {"traceEvents": []})
    with pytest.raises(ValueError, match="must hold a kernel named 'spin_kernel'"):
        run()


def test_files_of_a_trace(monkeypatch, tmp_path):
    parser, workload, run = trace(monkeypatch, tmp_path, three_calls(40, 60, 50))
    calls, figures = run()
    text, files = trace_overlap.write_trace(parser, workload.options, workload, "kernel:chunks=2", calls, figures)
    assert sorted(files) == ["perfetto", "picture", "text", "trace"]
    assert {path.name for path in tmp_path.iterdir()} == set(files.values())
    content = json.loads((tmp_path / "kernel-chunks=2.trace.json").read_text())
    assert content["kind"] == "trace" and content["ranks"] == figures and len(content["kernels"]) == 4
    assert "  nccl 6..26 beside: " + NVJET[:44] + " 9" in text.splitlines()
    assert json.loads((tmp_path / files["perfetto"]).read_text())["traceEvents"]
    assert (tmp_path / files["picture"]).read_text().startswith("<svg")


@pytest.mark.parametrize("mode, sizes", [
    ("kernel:chunks=2", (2, 2)), ("kernel:naive", None), ("kernel:DISABLE_PASSES=pin-order", None), ("with-sm", None),
    ("none", None),
])  # fmt: skip
def test_events_are_named_where_our_schedule_is_followed(tmp_path, mode, sizes):
    _, workload = workload_of(tmp_path)
    plan = trace_overlap.followed_plan(workload, mode)
    assert (plan.sizes if plan else None) == sizes


def test_trace_options_are_checked(tmp_path):
    parser, _ = workload_of(tmp_path)
    with pytest.raises(ValueError, match="iterations=1: must be at least 2"):
        trace_overlap.check_trace_options(parser.parse_args(["--iterations", "1"]))


@pytest.mark.parametrize("plugin", ["compile_overlap", None, "sequential_plugin"])
def test_only_our_plugin_has_a_schedule(monkeypatch, tmp_path, plugin):
    monkeypatch.delenv("A2A_FFN_KERNEL_PLUGIN")
    if plugin:
        monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", plugin)
    _, workload = workload_of(tmp_path)
    assert (trace_overlap.followed_plan(workload, "kernel") is None) == (plugin == "sequential_plugin")


def test_a_trace_needs_a_gpu(capsys):
    assert trace_overlap.main(["--device", "cpu"]) == 2
    assert "device='cpu': a trace needs CUDA devices" in capsys.readouterr().err


@pytest.mark.parametrize("modes, message", [("none,kernel", "kernel:sequential too"), ("kernel", "none among")])
def test_measure_refuses_modes_without_its_baselines(capsys, modes, message):
    assert measure.main([*SMALL, "--modes", modes]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One process on CPU: no exchanges, no device traces."""
    folder = tmp_path_factory.mktemp("measured")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("A2A_FFN_KERNEL_PLUGIN", "sequential_plugin")
    assert measure.main([*SMALL, "--rounds", "1", "--output", str(folder)]) == 0
    monkeypatch.undo()
    return json.loads((folder / "measurement.json").read_text())


def test_a_measurement_on_cpu_says_that_it_has_no_traces(measured):
    assert measured["kind"] == "overlap-measurement" and measured["traces"] == {"kernel": None}
    assert "CPU" in measured["trace_note"]
    figures = measured["hiding"]["kernel"]["slowest_rank"]
    assert figures["hidden_fraction"] is None and figures["times_s"]["comm"] is None and figures["speedup"] > 0
    assert measured["configuration"]["modes"]["value"] == "none,kernel:sequential,kernel"
    assert "hidden = " not in measure.table(measured)


def test_the_table_says_how_its_figures_are_defined(measured):
    text = measure.table({**measured, "trace_note": None})
    assert "hidden = (T_none - T) / T_comm" in text and "E Flux = 1 - (T - T_best) / (T_none - T_best)" in text
    assert all(len(row) == 3 for value in measured["measurements"].values() for row in value["samples_s"])


def with_trace(content, **change):
    figures = {"hidden_us": 1.0, "communication_us": 2.0, "span_us": 3.0, **change}
    return {**content, "traces": {"kernel": {"ranks": [figures]}}}


def test_measurement_records_are_checked(measured):
    record.validate(with_trace(measured))
    broken = copy.deepcopy(measured)
    broken["hiding"]["kernel"]["slowest_rank"]["hidden_fraction"] = 0.5
    with pytest.raises(ValueError, match="hiding.kernel.slowest_rank.hidden_fraction=0.5: the times' is None"):
        record.validate(broken)
    broken["hiding"]["kernel"]["slowest_rank"]["times_s"]["overlap"] = 1.0
    with pytest.raises(ValueError, match="must be the medians of none and kernel"):
        record.validate(broken)
    with pytest.raises(ValueError, match="trace_note must say why"):
        record.validate({**measured, "trace_note": None})
    with pytest.raises(ValueError, match="0 <= hidden_us <= communication_us <= span_us"):
        record.validate(with_trace(measured, hidden_us=2.5))
    with pytest.raises(ValueError, match=r"traces=\[\]: must be of the modes \['kernel'\]"):
        record.validate({**measured, "traces": {}})


def test_the_fractions_of_a_measurement_follow_from_its_times(measured):
    content = copy.deepcopy(measured)
    content["measurements"][compare.EXCHANGES] = content["measurements"]["none"]
    hiding = measure._hiding(content["measurements"], "kernel")
    record.validate({**content, "hiding": {"kernel": hiding}})
    times, fraction = hiding["slowest_rank"]["times_s"], hiding["slowest_rank"]["hidden_fraction"]
    assert fraction == (times["serial"] - times["overlap"]) / times["comm"] and len(hiding["ranks"]) == 1
    hiding["slowest_rank"]["hidden_fraction"] = -fraction + 0.125
    with pytest.raises(ValueError, match="the times' is"):
        record.validate({**content, "hiding": {"kernel": hiding}})


@pytest.mark.parametrize("direction", ["", "_backward"])
def test_committed_traces_are_drawn_with_the_same_bytes(monkeypatch, tmp_path, direction):
    monkeypatch.chdir(ROOT)
    folder = "reports/results/h200x2-torch-2.11.0/traces"
    modes = ("kernel:naive", "kernel:chunks=4", "kernel")
    traces = [f"{folder}/{mode.replace(':', '-')}{direction}.trace.json" for mode in modes]
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert draw_trace.main([*traces, "--output", str(picture)]) == 0
    text = pictures[0].read_text()
    assert pictures[1].read_text() == text and folder in text
    passed = "forward+backward" if direction else "forward"
    assert all(f"{mode}, {passed}" in text for mode in modes)


def test_what_cannot_be_drawn_is_said(tmp_path, capsys):
    file = tmp_path / "trace.json"
    file.write_text("{}")
    assert draw_trace.main([str(file), "--output", "drawn.pdf"]) == 2
    assert draw_trace.main([str(file), "--output", "drawn.svg"]) == 2
    error = capsys.readouterr().err
    assert "must end in .svg or .png" in error and "is not a trace of trace_overlap.py" in error
