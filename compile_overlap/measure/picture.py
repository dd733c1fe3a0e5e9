"""A picture of calls: lanes of compute, copies, network and signals, exposed communication in red, the critical path.

Calls stand below one another on one time axis, so that their lengths can be compared.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from .critical_path import HOST, IDLE, LATENCY, critical_path
from .events import COMBINE, COPY, EPILOGUE, GEMM, LANES, LOCAL_COPY, NCCL, OTHER, Event, computation
from .intervals import Span, union, without
from .kineto import Call
from .scene import CHARACTER, Scene

WIDTH, LEFT, RIGHT = 1200, 104, 24
TOP, HEAD, LANE, GAP, PATH, PANEL_GAP, LINE = 40, 42, 30, 5, 12, 18, 20
EXPOSED = "#d62728"
COLORS = {
    GEMM: "#3b76c4", COMBINE: "#6a5acd", EPILOGUE: "#3f9a55", OTHER: "#a9b4c2", LOCAL_COPY: "#c9c2a9", COPY: "#2b9aa5",
    NCCL: "#e3a23c", "store": "#c98b1f", "signal": "#8a6d3b", "wait": "#8a6d3b", "barrier": "#8a6d3b",
    HOST: "#4a4a4a", LATENCY: "#8c8c8c", IDLE: "#efe0a8",
}  # fmt: skip
_LEGEND = (
    (GEMM, "GEMM"), (COMBINE, "GEMM that stores to its peers"), (EPILOGUE, "gated norm"), (OTHER, "other kernels"),
    (COPY, "copy engine"), (LOCAL_COPY, "local copy"), (NCCL, "NCCL, hidden"), ("store", "stores to peers, hidden"),
    ("signal", "signals, hidden"), (HOST, "waits for the host"), (LATENCY, "device latency"), (IDLE, "idle"),
)  # fmt: skip
_SOFT = "#5a6474"


def draw(panels: Sequence[tuple[str, Call, Mapping[str, Any]]], title: str) -> Scene:
    """The calls, each under its heading with its figures (`figures.trace_figures`). Raises ValueError for none."""
    if not panels:
        raise ValueError("panels = (): must hold at least one call")
    total = max(call.span for _, call, _ in panels)
    scale = (WIDTH - LEFT - RIGHT) / total
    legend = _legend([call for _, call, _ in panels])
    bottom = TOP + sum(_height(call) for _, call, _ in panels)
    scene = Scene(WIDTH, bottom + 44 + LINE * (1 + max(line for line, *_ in legend)), title)
    scene.text(16, 26, title, 15, bold=True)
    top = TOP
    for heading, call, figures in panels:
        _panel(scene, heading, call, figures, top, scale)
        top += _height(call)
    _axis(scene, total, scale, bottom)
    for line, x, color, text in legend:
        y = bottom + 48 + LINE * line
        scene.rect(x, y - 10, 12, 12, color)
        scene.text(x + 17, y, text, 11)
    return scene


def _lanes(call: Call) -> list[str]:
    present = {event.lane for event in call.events}
    return [lane for lane in LANES if lane in present]


def _height(call: Call) -> float:
    return HEAD + len(_lanes(call)) * (LANE + GAP) + PATH + PANEL_GAP


def _panel(scene: Scene, heading: str, call: Call, figures: Mapping[str, Any], top: float, scale: float) -> None:
    bound = "at least " if figures["combine_excess_us"] is None else ""
    facts = (
        f"{figures['span_us'] / 1e3:.2f} ms; communication {figures['communication_us'] / 1e3:.2f} ms, "
        f"{figures['hidden_fraction']:.0%} of it under computation; exposed {bound}{figures['exposed_us'] / 1e3:.2f} ms"
    )
    scene.text(16, top + 16, heading, 13, bold=True)
    scene.text(16, top + 32, facts, 11.5, _SOFT)
    busy = computation(call.events)
    y = top + HEAD
    for lane in _lanes(call):
        scene.text(16, y + LANE / 2 + 4, lane, 12)
        scene.rect(LEFT, y, call.span * scale, LANE, "#f1f3f6")
        for event in (event for event in call.events if event.lane == lane):
            _event(scene, event, busy, y, scale)
        y += LANE + GAP
    scene.text(16, y + PATH - 2, "critical path", 11, _SOFT)
    for part in critical_path(call.events, call.dependencies):
        event = call.events[part.index]
        tip = f"{part.what}, {part.end - part.begin:.1f} us: {event.label or event.name[:90]}"
        bare_under = None if event.computes or part.what != event.kind else busy
        _bar(scene, (part.begin, part.end), y, PATH, scale, part.what, tip, bare_under)


def _bar(
    scene: Scene, span: Span, y: float, height: float, scale: float, kind: str, tip: str, busy: list[Span] | None
) -> None:
    """A span in its kind's colour; of communication, what does not lie under the computation `busy` in red."""
    begin, end = span
    scene.rect(LEFT + begin * scale, y, max((end - begin) * scale, 0.3), height, COLORS[kind], tip)
    for begin, end in without(union([span]), busy) if busy is not None else ():
        scene.rect(LEFT + begin * scale, y, (end - begin) * scale, height, EXPOSED, f"exposed: {tip}")


def _event(scene: Scene, event: Event, busy: list[Span], y: float, scale: float) -> None:
    x, width = LEFT + event.begin * scale, event.duration * scale
    tip = f"{event.label + ': ' if event.label else ''}{event.name[:90]}, {event.begin:.1f} to {event.end:.1f} us"
    span = event.begin, event.end
    _bar(scene, span, y + 2, LANE - 4, scale, event.kind, tip, None if event.computes else busy)
    for text in (event.label, _short(event.label)):
        if text and len(text) * CHARACTER * 10.5 + 4 < width:
            scene.text(x + width / 2, y + LANE / 2 + 4, text, 10.5, "#fff", "middle")
            return


def _short(label: str | None) -> str:
    """`dispatch 0` as D0, `combine' 1` as C1', as schedules are printed; nothing for other labels."""
    found = re.fullmatch(r"(dispatch|combine)('?) (\d+)", label or "")
    return f"{found[1][0].upper()}{found[3]}{found[2]}" if found else ""


def _axis(scene: Scene, total: float, scale: float, y: float) -> None:
    step = next(
        step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**4, 10**5, 10**9) if total / step <= 16
    )
    scene.rect(LEFT, y, total * scale, 1, _SOFT)
    for mark in range(int(total / step) + 1):
        scene.rect(LEFT + mark * step * scale, y, 1, 5, _SOFT)
        scene.text(LEFT + mark * step * scale, y + 18, f"{mark * step / 1e3:g}", 10.5, _SOFT, "middle")
    scene.text(16, y + 18, "time, ms", 10.5, _SOFT)


def _legend(calls: list[Call]) -> list[tuple[int, float, str, str]]:
    """(line, x, colour, text) of what the calls hold."""
    present = {event.kind for call in calls for event in call.events}
    present |= {part.what for call in calls for part in critical_path(call.events, call.dependencies)}
    entries = [(COLORS[kind], text) for kind, text in _LEGEND if kind in present]
    placed, line, x = [], 0, 16.0
    for color, text in [*entries, (EXPOSED, "exposed communication")]:
        width = 35 + len(text) * CHARACTER * 11
        if x + width > WIDTH:
            line, x = line + 1, 16.0
        placed.append((line, x, color, text))
        x += width
    return placed
