"""Time axes: the schedule of a layer, simulated, and what device traces show."""

from __future__ import annotations

import matplotlib.pyplot as plt

from compile_overlap.measure import trace_figures
from compile_overlap.measure.picture import draw
from compile_overlap.measure.records import call_from_record
from compile_overlap.schedule import BACKWARD, FORWARD, FREE, START, WAIT, Plan, Schedule, Work, build

from .citations import Record

PLAN = Plan((8, 8, 8, 8), ratio_16ths=9)  # the default workload at P=2, exchanges about as long as computation
WORKS = {FORWARD: Work(2), BACKWARD: Work(2, 2)}
CHUNK_COLOURS = ("#3b82c4", "#c06a10", "#238a60", "#8a55bd")  # white letters can be read on them
EXPOSED = "#d1495b"
LANES = {"exchange": 1, "compute": 0}


def schedules(width: float):
    """The schedule of four chunks in both directions as a matplotlib figure of so many inches."""
    figure, panels = plt.subplots(2, 1, figsize=(width, 4.4), layout="constrained", sharex=True)
    for panel, (direction, work) in zip(panels, WORKS.items(), strict=True):
        _schedule(panel, build(direction, PLAN, (work,) * len(PLAN.sizes)))
        panel.set_title(f"{direction}, plan {PLAN}, simulated", loc="left")
        panel.set_yticks([lane + 0.4 for lane in LANES.values()], LANES)
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(-0.1, 1.9)
    panels[-1].set_xlabel("time, in forward computations of one token")
    shown = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*CHUNK_COLOURS, EXPOSED)]
    names = [*(f"chunk {chunk}" for chunk in range(len(PLAN.sizes))), "exposed"]
    figure.legend(shown, names, loc="outside upper left", ncols=3, fontsize=9)
    return figure


def _schedule(panel, schedule: Schedule) -> None:
    for step, begin, end in schedule.simulate():
        exposed = step.kind == WAIT
        colour = EXPOSED if exposed else CHUNK_COLOURS[step.chunk]
        place = LANES[step.lane], 0.8
        strength = 0.5 if step.kind == FREE else 1
        panel.broken_barh([(begin, end - begin)], place, color=colour, alpha=strength, linewidth=0)
        panel.vlines((begin, end), LANES[step.lane], LANES[step.lane] + 0.8, color="white", linewidth=0.6)
        if end > begin and not exposed:
            name = schedule.label(step) if step.kind == START else "W" if step.kind == FREE else "G"
            letters = {"ha": "center", "va": "center", "fontsize": 8.5}
            if step.kind != FREE:
                letters["color"] = "white"
            panel.text((begin + end) / 2, LANES[step.lane] + 0.4, name, **letters)


def traced(traces: list[Record], title: str) -> str | None:
    """Rank 0 of device traces below one another on one time axis, as SVG; None for none."""
    if not traces:
        return None
    panels = []
    for trace in traces:
        call = call_from_record(trace.get())
        figures = trace_figures(call) | trace.get("ranks", 0)  # older records have fewer
        commit, span = trace.commit(), trace.trace("span_us")
        heading = f"{trace.get('mode')}, {trace.get('pass')}: rank 0 (the slowest took {span} us)"
        panels.append((f"{heading}, torch {trace.torch()}, commit {commit}", call, figures))
    return draw(panels, title).svg()
