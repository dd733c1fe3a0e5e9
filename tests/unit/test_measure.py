"""Figures of device traces with known answers, the committed traces, and traces that are none."""

import json
import re
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest

from compile_overlap.layout import Layout
from compile_overlap.measure import Call, Times, calls_of, combine, slowest, time_figures, trace_figures
from compile_overlap.measure.critical_path import by_kind, critical_path
from compile_overlap.measure.events import Event, kind_of, on_streams
from compile_overlap.measure.naming import named, schedules_of
from compile_overlap.measure.perfetto import chrome_trace
from compile_overlap.measure.picture import draw
from compile_overlap.measure.records import call_from_record, call_to_record
from compile_overlap.schedule import Plan

TRACES = sorted((Path(__file__).resolve().parents[2] / "reports" / "results").rglob("*.trace.json"))
MAIN, NETWORK = 7, 20
NVJET, SEND_RECV = (
    "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
)
EPILOGUE = "triton_red_fused_add_mul_native_layer_norm_silu_split_unsqueeze_4"


@pytest.mark.parametrize("name, kind", [
    (NVJET, "gemm"), ("sm90_xmma_gemm_bf16bf16", "gemm"), ("_chunk_bmm", "gemm"), ("_gemm_combine", "gemm-combine"),
    (EPILOGUE, "epilogue"), ("_exact_gated_norm", "epilogue"), ("_columns", "epilogue"), (SEND_RECV, "nccl"),
    ("Memcpy PtoP (Device -> Device)", "copy"), ("Memcpy DtoD (Device -> Device)", "local-copy"), ("_store_rows", "store"),
    ("_collect", "wait"),
    ("c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int)", "wait"), ("void put_signal_kernel", "signal"),
    ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", "barrier"), ("triton_poi_fused_clone_1", "other"),
])  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_copies_beside_the_computation_are_communication():
    copy = "Memcpy DtoD (Device -> Device)"
    events = [
        Event(NVJET, "gemm", 0, 9, MAIN),
        Event(copy, kind_of(copy), 1, 3, 30),
        Event(copy, kind_of(copy), 9, 10, MAIN),
    ]
    assert [event.kind for event in on_streams(events)] == ["gemm", "copy", "local-copy"]
    assert [event.kind for event in on_streams(events[1:2])] == ["copy"]


def pipeline(launched=lambda index: None):
    """GEMM 10..30, exchange 0..10 before it and 20..45 beside it, a wait until 60, a GEMM 60..70."""
    rows = [
        (SEND_RECV, 0, 10, NETWORK), (NVJET, 10, 30, MAIN), (SEND_RECV, 20, 45, NETWORK),
        ("c10d::symmetric_memory::wait_signal_kernel", 45, 60, MAIN), ("_gemm_combine", 60, 70, MAIN),
    ]  # fmt: skip
    return tuple(
        Event(name, kind_of(name), begin, end, stream, launched(index))
        for index, (name, begin, end, stream) in enumerate(rows)
    )


def test_figures_of_a_known_call():
    figures = trace_figures(Call(pipeline()), alone_us=25.0)
    assert (figures["span_us"], figures["computation_us"], figures["communication_us"]) == (70, 30, 50)
    assert (figures["hidden_us"], figures["hidden_fraction"], figures["inflation"]) == (10, 0.2, 2.0)
    assert figures["combine_excess_us"] is None and figures["exposed_us"] == 40
    assert figures["idle_us"] == 40 and figures["gemm_us"] == 30


def test_a_combine_that_takes_longer_than_with_local_stores_is_exposed():
    (*others, combine) = pipeline()
    labelled = Call((*others, Event(combine.name, combine.kind, 60, 70, MAIN, None, "combine 0")))
    figures = trace_figures(labelled, local_combine_us={"combine 0": 8.0})
    assert figures["combine_excess_us"] == 2 and figures["exposed_us"] == 42
    assert trace_figures(labelled, local_combine_us={"combine 1": 8.0})["combine_excess_us"] is None
    assert trace_figures(Call(others[:3]))["combine_excess_us"] == 0


def test_local_stores_are_timed_for_each_chunk_and_direction(monkeypatch):
    monkeypatch.setattr(combine, "_median_us", lambda layout, size, backward, *_: size + 100.0 * backward)
    layout, plan = Layout(P=2, B=4, T=16, D=8, H=16), Plan((2, 6), peers=True)
    forward = combine.local_combine_us(layout, plan, None, None, backward=False)
    assert forward == {"combine 0": 2, "combine 1": 6}
    both = combine.local_combine_us(layout, plan, None, None, backward=True)
    assert both == {**forward, "dispatch' 0": 102, "dispatch' 1": 106}


def test_slowest_rank():
    assert slowest([{"span_us": 3.0}, {"span_us": 5.0}, {"span_us": 4.0}]) == 1


def test_time_figures_keep_their_signs():
    figures = time_figures(Times(serial=10.0, overlap=12.0, compute=7.0, comm=4.0, own=11.0, own_compute=6.0))
    assert figures["hidden_fraction"] == -0.5 and figures["hidden_fraction_own"] == -0.25
    assert figures["e_overlap"] == -0.5 and figures["exposed_s"] == 6.0
    assert figures["e_overlap_flux"] == 1 - 6 / 4
    ideal = time_figures(Times(serial=10.0, overlap=6.0, compute=7.0, comm=4.0, own=10.0, own_compute=6.0))
    assert ideal["e_overlap"] == 1 and ideal["e_overlap_flux"] == 1
    alone = time_figures(Times(serial=10.0, overlap=9.0, compute=9.5))
    assert alone["hidden_fraction"] is alone["hidden_fraction_own"] is alone["e_overlap"] is None
    assert alone["exposed_s"] == -0.5


def test_times_reject():
    with pytest.raises(ValueError, match="overlap = 0.0: must be a positive number of seconds"):
        Times(serial=1.0, overlap=0.0, compute=1.0)


def kineto(*rows, syncs=(), ranges=()):
    """A trace of two calls: `rows` are (name, begin, end, stream, launched), correlations count up in each call."""
    entries = []
    for call in range(2):
        start = 1000.0 * call
        entries.append(
            {"ph": "X", "cat": "kernel", "name": "at::cuda::spin_kernel(long)", "ts": start, "dur": 5, "args": {}}
        )
        entries += [
            {
                "ph": "X",
                "cat": "gpu_memset",
                "name": "Memset (Device)",
                "ts": start + 900,
                "dur": 5,
                "args": {"stream": MAIN},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce_Sum",
                "ts": start + 910,
                "dur": 5,
                "args": {},
            },
            {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:all_to_all", "ts": start, "dur": 500, "args": {}},
        ]
        for index, (name, begin, end, stream, launched) in enumerate(rows):
            correlation = 100 * call + 10 * index + 10
            cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            args = {"stream": stream, "correlation": correlation}
            entries.append(
                {"ph": "X", "cat": cat, "name": name, "ts": start + 100 + begin, "dur": end - begin, "args": args}
            )
            entries.append({
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 99 + launched, "dur": 1, "tid": 1,
                "args": {"correlation": correlation},
            })  # fmt: skip
        for waiting, after, awaited, before in syncs:
            args = {
                "cuda_sync_kind": "Stream Wait Event", "stream": waiting, "correlation": 100 * call + after,
                "wait_on_stream": awaited, "wait_on_cuda_event_record_corr_id": 100 * call + before,
            }  # fmt: skip
            entries.append(
                {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "ts": start, "dur": 0, "args": args}
            )
        for name, begin, end in ranges:
            place = {"ts": start + 100 + begin, "dur": end - begin, "tid": 1}
            entries.append({"ph": "X", "cat": "user_annotation", "name": name, **place, "args": {}})
    return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {}}, *entries]}


ROWS = (
    ("pack", 0, 4, MAIN, -20), (SEND_RECV, 6, 26, NETWORK, -10), (NVJET, 5, 15, MAIN, -5), (NVJET, 28, 40, MAIN, 20),
    ("Memcpy DtoD (Device -> Device)", 16, 20, 30, 0),
)  # fmt: skip
# The exchange waits for the pack; the second GEMM, launched by correlation 40, for the exchange.
SYNCS = ((NETWORK, 15, MAIN, 14), (MAIN, 35, NETWORK, 32))


def test_calls_of_a_trace():
    ranges = (("dispatch 0", -12, -8), ("ProfilerStep#1", -50, 50))
    first, second = calls_of(kineto(*ROWS, syncs=SYNCS, ranges=ranges))
    assert first.events == second.events and second.origin - first.origin == 1000
    assert [event.kind for event in first.events] == ["other", "gemm", "nccl", "copy", "gemm"]
    assert [event.label for event in first.events] == [None, None, "dispatch 0", None, None]
    assert first.events[2].launched == -10 and first.events[0].begin == 0 and first.span == 40
    assert first.dependencies == ((), (0,), (0,), (), (1, 2))
    path = critical_path(first.events, first.dependencies)
    assert by_kind(path) == {"nccl": 20, "gemm": 12, "other": 4, "latency": 4}


def test_without_waits_between_streams_dependencies_are_unknown():
    assert calls_of(kineto(*ROWS))[0].dependencies is None
    assert calls_of(kineto(*ROWS[2:4]))[0].dependencies == ((), (0,))  # one stream needs none
    graph = kineto(*ROWS, syncs=SYNCS)
    for entry in graph["traceEvents"]:
        if "correlation" in entry.get("args", {}):
            entry["args"]["correlation"] = 10
    assert calls_of(graph)[0].dependencies is None
    somewhere = kineto(*ROWS, syncs=SYNCS)
    for entry in somewhere["traceEvents"]:
        if entry.get("cat") == "cuda_sync":
            entry["args"].update(wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1)
    assert calls_of(somewhere)[0].dependencies is None


@pytest.mark.parametrize("trace, message", [
    (None, "must be a Chrome trace"), ([], "must be a Chrome trace"), ({"traceEvents": {}}, "must be a Chrome trace"),
    ({"traceEvents": [3]}, r"traceEvents\[0\] = 3: must be an object"),
    ({"traceEvents": [{"ph": "X", "args": None}]}, "args that are one"),
    ({"traceEvents": [{"ph": "X", "name": "a", "ts": 1.0, "dur": -1}]}, "finite ts and dur"),
    ({"traceEvents": [{"ph": "X", "name": "a", "ts": float("nan"), "dur": 1}]}, "finite ts and dur"),
    ({"traceEvents": [{"ph": "X", "ts": 1.0, "dur": 1}]}, "must have a name"),
    ({"traceEvents": []}, "must hold a kernel named 'spin_kernel'"),
])  # fmt: skip
def test_malformed_traces_are_refused(trace, message):
    with pytest.raises(ValueError, match=message):
        calls_of(trace)


def test_calls_survive_their_record():
    call = calls_of(kineto(*ROWS, syncs=SYNCS))[0]
    again = call_from_record(json.loads(json.dumps(call_to_record(call))))
    assert (again.events, again.dependencies) == (call.events, call.dependencies)


@pytest.mark.parametrize("change, message", [
    ({"kernels": []}, "must be a list of events"), ({"kernels": None}, "must be a list of events"),
    ({"kernels": [{"name": NVJET}]}, r"kernels\[0\].*must have name, begin_us and duration_us"),
    ({"kernels": [{"name": NVJET, "begin_us": 0, "duration_us": -1}]}, "finite times"),
    ({"kernels": [{"name": NVJET, "begin_us": 0, "duration_us": 1, "kind": "x"}]}, "known kind"),
    ({"kernels": [{"name": NVJET, "begin_us": at, "duration_us": 1} for at in (1, 0)]}, "in the order of their begin"),
    *(({"dependencies": each}, "must be indices of events")
      for each in ([[9]], [1], 5, [[[]]], [[0.0]], [[True]], [[-1]])),
    *(({"kernels": [{"name": NVJET, "begin_us": 0, "duration_us": 1, **each}]}, words) for each, words in (
        ({"begin_us": -5}, "finite times of at least 0"), ({"launched_us": "x"}, "launched_us must be"),
        ({"launched_us": float("nan")}, "launched_us must be finite"), ({"stream": [7]}, "stream must be"),
        ({"label": 3}, "label must be"))),
])  # fmt: skip
def test_malformed_records_are_refused(change, message):
    kernels = [{"name": NVJET, "begin_us": 0, "duration_us": 1}]
    with pytest.raises(ValueError, match=message):
        call_from_record({"kernels": kernels, **change})


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_committed_traces_give_the_figures_beside_them(path):
    content = json.loads(path.read_text())
    found, stored = trace_figures(call_from_record(content)), content["ranks"][0]
    shared = stored.keys() & found.keys()
    assert {"communication_us", "hidden_us", "hidden_fraction", "idle_us", "gemm_us", "epilogues"} <= shared
    for name in shared:
        if isinstance(stored[name], (int, float)):
            assert found[name] == pytest.approx(stored[name], abs=1e-6), name
    text = path.with_suffix("").with_suffix(".trace.txt").read_text()
    printed = re.search(r"rank 0: span (\d+) us, communication (\d+) us, ([\d.]+)% hidden", text)
    assert printed.groups() == (
        f"{found['span_us']:.0f}", f"{found['communication_us']:.0f}", f"{100 * found['hidden_fraction']:.1f}",
    )  # fmt: skip


def test_there_are_committed_traces():
    assert len(TRACES) >= 9


def committed(name):
    path = next(each for each in TRACES if each.parents[1].name == "h200x2-torch-2.11.0" and each.name == name)
    return call_from_record(json.loads(path.read_text()))


def test_events_are_named_by_their_schedule():
    call, plan = committed("kernel-chunks=4.trace.json"), Plan((8, 8, 8, 8), ratio_16ths=1)
    events = named(call.events, schedules_of(plan, backward=False))
    exchanges = [event.label for event in events if event.kind == "nccl"]
    assert exchanges[:2] == ["dispatch 0", "dispatch 1"] and exchanges[-1] == "combine 3"
    assert sorted(exchanges) == sorted(f"{kind} {chunk}" for kind in ("dispatch", "combine") for chunk in range(4))
    gemms = [event.label for event in events if event.kind == "gemm"]
    assert gemms == [f"gemm{index} {chunk}" for chunk in range(4) for index in range(2)]
    # Another number of chunks, or of directions, is not what ran.
    assert all(event.label is None for event in named(call.events, schedules_of(Plan((16, 16)), backward=False)))
    assert all(event.label is None for event in named(call.events, schedules_of(plan, backward=True)))


def test_both_directions_are_named():
    call, plan = committed("kernel_backward.trace.json"), Plan((16, 16), ratio_16ths=1)
    events = named(call.events, schedules_of(plan, backward=True))
    exchanges = [event.label for event in events if event.kind == "nccl"]
    assert exchanges == [
        "dispatch 0", "dispatch 1", "combine 0", "combine 1", "combine' 0", "combine' 1", "dispatch' 0", "dispatch' 1",
    ]  # fmt: skip
    gemms = [event.label for event in events if event.kind == "gemm"]
    assert gemms[:4] == ["gemm0 0", "gemm1 0", "gemm0 1", "gemm1 1"] and len(gemms) == 12
    assert sum(label.startswith("free") for label in gemms) == 4 and all("'" in label for label in gemms[4:])


def test_a_range_is_the_better_name():
    events = tuple(Event(SEND_RECV, "nccl", i, i + 1, label="dispatch 7" if not i else None) for i in range(2))
    assert [event.label for event in named(events, schedules_of(Plan((4,)), False))] == ["dispatch 7", "combine 0"]


def test_the_chrome_trace_has_what_perfetto_needs():
    call = calls_of(kineto(*ROWS, syncs=SYNCS))[1]
    trace = json.loads(json.dumps(chrome_trace([call, Call(call.events, call.origin + 50)], {"mode": "kernel"})))
    entries = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in entries if e["name"] == "thread_sort_index"}
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    lanes = [names[track] for track in sorted(names, key=lambda track: (track[0], order[track]))]
    assert lanes == ["compute", "copy", "network", "exposed communication", "critical path"] * 2
    tracks = {}
    for e in (e for e in entries if e["ph"] == "X"):
        assert isinstance(e["ts"], float) and e["dur"] >= 0 and (e["pid"], e["tid"]) in names and e["name"]
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(tracks) == 10
    for slices in tracks.values():  # a track's slices follow one another
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in zip(sorted(slices), sorted(slices)[1:]))
    first = min(e["ts"] for e in entries if e["ph"] == "X" and e["pid"] == 1)
    assert first == 50 and trace["otherData"] == {"mode": "kernel"}


def test_events_that_overlap_in_a_lane_stand_in_tracks_of_their_own():
    call = Call((Event(SEND_RECV, "nccl", 0, 10), Event(SEND_RECV, "nccl", 5, 12), Event(SEND_RECV, "nccl", 10, 11)))
    entries = chrome_trace([call], {})["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    network = [names[e["tid"]] for e in entries if e["ph"] == "X" and e["cat"] == "nccl"][:3]
    assert network == ["network", "network (2)", "network"]


def test_a_picture_has_the_same_bytes_and_marks_what_is_exposed():
    call = committed("kernel.trace.json")
    pictures = {draw([("kernel", call, trace_figures(call))], "Forward <1>").svg() for _ in range(2)}
    assert len(pictures) == 1
    svg = pictures.pop()
    assert "Forward &lt;1&gt;" in svg and "68% of it under computation" in svg
    scale = (1200 - 104 - 24) / call.span
    lane = re.findall(r'y="(\d+\.\d+)" width="([\d.]+)" height="26.00" fill="#d62728"', svg)
    assert sum(float(width) for _, width in lane) / scale == pytest.approx(trace_figures(call)["exposed_us"], abs=0.2)
    assert tree.fromstring(svg).tag.endswith("svg")


def test_a_picture_needs_a_call():
    with pytest.raises(ValueError, match="at least one call"):
        draw([], "nothing")


def test_a_picture_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    call = Call(pipeline())
    draw([("kernel", call, trace_figures(call))], "Forward").png(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
