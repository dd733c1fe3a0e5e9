"""The report's plots, drawn from cited numbers. The same records give the same bytes.

Lines and letters take the colour of the text around them (`currentColor`), so that a plot reads in light and dark.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Callable, Iterable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from .citations import EXCHANGES, LINK, NO_RECORD, Record, Results, median  # noqa: E402
from .markdown import source_line  # noqa: E402
from .modelled import Modelled  # noqa: E402
from .newest import (  # noqa: E402
    BACKWARD, DEVICE, FORWARD, HOST_MEMORY, NODES_MEMORY, NVLINK, SHAPED, SOCKETS, Newest, link_of,
)  # fmt: skip
from .timelines import schedules, traced  # noqa: E402

INK = "#0a0b0c"  # replaced by the colour of the text
COLOURS = ("#3b82c4", "#e08a1e", "#2a9d6f", "#9b6bcc", "#d1495b", "#8a8a8a")
STYLE = {
    "svg.hashsalt": "report",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "legend.frameon": False,
    "savefig.transparent": True,
}
WIDTH_IN = 4.4  # as wide as a phone at about the letters' own size
HIDDEN = (  # the link, its name in the plot, and a mode beside none that its record must hold
    (NVLINK, "NVLink", "kernel:naive"),
    (HOST_MEMORY, "host memory\n(emulates a network)", "kernel:naive"),
    (NODES_MEMORY, "2 nodes on a host,\nhost memory (emulated)", "with-sm"),
    (SOCKETS, "2 nodes on a host,\nsockets (emulated)", "with-sm"),
    (SHAPED, "shaped CPU link\n(emulated)", "passes"),
)
SCHEDULES = {  # modes in the plot of hidden fractions, and the colour of each kind
    "kernel:naive": ("chunked, naive order", 1),
    "naive": ("chunked, naive order", 1),
    "with-sm": ("with-sm: chunks of eager collectives", 5),
    "kernel:inductor-reorder": ("chunked, Inductor's reordering", 3),
    "built-in": ("chunked, Inductor's reordering", 3),
    "kernel:inductor-overlap": ("chunked, Inductor's overlap scheduling", 4),
    "kernel": ("our schedule, by collectives", 0),
    "kernel:TRANSPORT=collectives": ("our schedule, by collectives", 0),
    "passes": ("our schedule, by collectives", 0),
    "kernel:peers": ("peers' memory", 2),
}
CHUNKS = {"none": 0, "through NCCL": 1, "peers' memory": 2, "naive order (note)": 3, "pinned order (note)": 4,
          "pinned, CUDA graph (note)": 5}  # fmt: skip


class Figures:
    """Plots of a `Results`, written into ``folder``; each method returns the Markdown that shows its plot."""

    def __init__(self, results: Results, folder: Path):
        self.results, self.folder, self.newest = results, Path(folder), Newest(results)
        self.folder.mkdir(parents=True, exist_ok=True)

    def pipeline(self) -> str:
        return self._plot("pipeline", "The layer as a pipeline of four chunks, simulated", lambda: schedules(WIDTH_IN))

    def latency_chunks(self) -> str:
        return self._plot("latency_chunks", "Latency against the number of chunks", self._latency_chunks)

    def hidden_link(self) -> str:
        return self._plot("hidden_link", "Hidden fraction against the link", self._hidden_link)

    def roofline(self) -> str:
        return self._plot("roofline", "Roofline of the forward GEMMs and of whole layers", self._roofline)

    def scaling(self) -> str:
        return self._plot("scaling", "Scaling, simulated", self._scaling)

    def timeline(self, name: str, title: str, traces: Iterable[Record]) -> str:
        """Traces below one another on one time axis."""
        return self._write(name, title, lambda: traced(list(traces), title))

    def _plot(self, name: str, title: str, draw: Callable) -> str:
        """The plot that `draw` returns as a matplotlib figure, or None where there is no record."""

        def svg() -> str | None:
            with plt.style.context(["default", STYLE]):  # whatever the user has set
                figure = draw()
                text = figure and _svg(figure, title)
                plt.close("all")
                return text

        return self._write(name, title, svg)

    def _write(self, name: str, title: str, svg: Callable[[], str | None]) -> str:
        before = self.results.place
        place = self.results.place = f"{before}/figure {name}"
        text = svg()
        self.results.place = before
        if text is None:
            return f"{title}: {NO_RECORD}."
        (self.folder / f"{name}.svg").write_text(text, "utf-8")
        sources = self.results.sources(place)
        return f"![{title}](figures/{name}.svg)" + (f"\n\n{source_line(sources)}" if sources else "")

    def _latency_chunks(self):
        links = (NVLINK, HOST_MEMORY)
        series = [(link, self._chunk_records(link), self._chunk_notes(link)) for link in links]
        if not all(records or prototype for _, records, prototype in series):
            return None
        figure, panels = plt.subplots(len(series), 1, figsize=(WIDTH_IN, 7), layout="constrained")
        for panel, (link, records, prototype) in zip(panels, series, strict=True):
            for label, points in records.items():
                panel.scatter(*zip(*points), color=COLOURS[CHUNKS[label]], label=label, zorder=3)
            for label, points in prototype.items():
                label = f"{label} (note)"
                panel.plot(*zip(*points), "o--", color=COLOURS[CHUNKS[label]], markerfacecolor="none", label=label)
            panel.set(title=f"{link}, compiled, forward", xlabel="chunks along L", ylabel="latency, ms")
            panel.set_xscale("log", base=2)
            panel.set_xticks([AS_PLANNED, 1, 2, 4, 8], ["not\nrecorded", "1", "2", "4", "8"])
            panel.minorticks_off()
        handles = {label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=2, fontsize=9)
        return figure

    def _chunk_records(self, link: str) -> dict[str, list[tuple[float, float]]]:
        """{label: [(chunks, ms)]} of the compiled forward at the default workload; ``kernel`` is as planned."""
        series: dict[str, list[tuple[float, float]]] = {}
        for record in self.newest.of_newest_version(link, FORWARD, compiled=True):
            for mode in record.modes:
                count = chunks_of(mode, record.plan(mode))
                if count is not None:
                    peers = mode != "none" and record.by_peers(mode)
                    label = "peers' memory" if peers else "none" if mode == "none" else "through NCCL"
                    series.setdefault(label, []).append((count, record.number("value", median(mode), scale=1e3)))
        return series

    def _chunk_notes(self, link: str) -> dict[str, list[tuple[int, float]]]:
        """The same of a prototype, from the notes."""
        series: dict[str, list[tuple[int, float]]] = {}
        for index, note in enumerate(self.results.at("notes.json", ("chunk_sweep",)) or ()):
            if note["link"] == link:
                value = self.results.number("notes.json", "value", ("chunk_sweep", index, "ms"))
                series.setdefault(note["what"], []).append((note["chunks"], value))
        return series

    def _hidden_link(self):
        bars: dict[str, dict[str, float]] = {}
        for link, name, mode in HIDDEN:
            for direction in (FORWARD, BACKWARD):
                self._hidden_bars(bars, self.newest(link, ["none", mode], direction), name)
        if not bars:
            return None
        places, ticks, place = {}, {}, 0.0
        for group, values in bars.items():
            ticks[group] = place + (len(values) - 1) / 2
            for mode in sorted(values, key=list(SCHEDULES).index):
                places[group, mode] = place
                place += 1
            place += 0.8
        figure, axes = plt.subplots(figsize=(WIDTH_IN, 1.4 + 0.24 * place), layout="constrained")
        for label, colour in dict(SCHEDULES.values()).items():
            shown = {(group, mode): bars[group][mode] for group, mode in places if SCHEDULES[mode][0] == label}
            if shown:
                heights = [places[each] for each in shown]
                drawn = axes.barh(heights, shown.values(), 0.95, color=COLOURS[colour], label=label)
                axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=9)
        axes.set_yticks(list(ticks.values()), ticks)
        axes.tick_params(axis="y", labelsize=9, length=0)
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.axvline(100, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("hidden fraction, %")
        figure.legend(loc="outside upper left", fontsize=9)
        return figure

    @staticmethod
    def _hidden_bars(bars: dict, record: Record, link: str) -> None:
        """Add what a comparison says of each kind of schedule, under its link and pass."""
        rate = record.number("link", *LINK, scale=1e-9) if record.modes else None
        for mode in record.modes:
            kind = "kernel:peers" if mode == "kernel" and record.by_peers(mode) else mode
            if kind in SCHEDULES:
                hidden = record.number("hidden", median("none"), median(mode), median(EXCHANGES), scale=100)
                direction = "forward" if record.get("pass") == "forward" else "with backward"
                speed = f"{rate:.3g} GB/s" if rate >= 1 else f"{rate * 1e3:.3g} MB/s"
                bars.setdefault(f"{link}\n{speed}, {direction}", {})[kind] = hidden

    def _roofline(self):
        peaks = [
            self.results.number("notes.json", "value", ("h200", name, "value"))
            for name in ("bf16_tflops", "memory_tbytes_s")
        ]
        if None in peaks:
            return None
        figure, axes = plt.subplots(figsize=(WIDTH_IN, 5), layout="constrained")
        ridge = peaks[0] / peaks[1]
        axes.plot([4, ridge, 1000], [4 * peaks[1], peaks[0], peaks[0]], color=INK, label="H200, data sheet: dense bf16")
        for colour, marker, (label, points) in zip(COLOURS, "osD^v*", self._rates().items(), strict=False):
            axes.scatter(*zip(*points), color=colour, marker=marker, label=label, zorder=3, alpha=0.8)
        axes.set(
            xscale="log", yscale="log", xlabel="operations per byte of the forward GEMMs", ylabel="TFLOP/s of a rank"
        )
        figure.legend(loc="outside upper left", fontsize=9)
        return figure

    def _rates(self) -> dict[str, list[tuple[float, float]]]:
        """{label: [(operations per byte, TFLOP/s)]} over NVLink: GEMMs from traces, layers from latencies."""
        rates: dict[str, list[tuple[float, float]]] = {}
        for record in filter(_over_nvlink, self.results.of_kind("trace")):
            batch, tokens, *widths = map(record.setting, ("batch_size", "tokens", "dim", "k", "compute_scale"))
            intensity = record.number("intensity_on_ranks", batch, ("ranks",), *widths)
            rate = record.number("gemm_rate", batch, tokens, *widths, ("pass",), ("ranks", 0, "gemm_us"), scale=1e-12)
            rates.setdefault(f"GEMMs alone, from traces, {record.get('pass')}", []).append((intensity, rate))
        for record in filter(_over_nvlink, self.results.comparisons()):
            if record.get("pass") != "forward":
                continue
            widths = (*map(record.setting, ("dim", "k", "compute_scale")),)
            intensity = record.number("intensity", record.setting("batch_size"), ("world_size",), *widths)
            for label, mode in (("none", "none"), ("NCCL", "kernel by NCCL"), ("peers' memory", "kernel by peers")):
                rate = record.number("value", ("measurements", record.mode(mode), "forward_tflops"))
                if rate is not None:
                    rates.setdefault(f"whole layer, {label}", []).append((intensity, rate))
        return rates

    def _scaling(self):
        latency: dict[str, list[tuple[int, float]]] = {}
        ratios: dict[str, list[tuple[int, float]]] = {}
        for record, index in Modelled(self.results).cases():
            case = record.get("cases", index)
            none, overlapped = ("cases", index, "none_s"), ("cases", index, "overlapped_s")
            if case["pass"] != "forward":
                continue
            if case["machine"] == "H200" and case["hosts"] == 1 + (case["P"] > 8) and case["cards"] in (None, 8):
                for label, time in (("none", none), (f"overlapped, {case['transport']}", overlapped)):
                    latency.setdefault(label, []).append((case["P"], record.number("value", time, scale=1e3)))
            if case["P"] == 16 and case["hosts"] == 2 and case["transport"] == "collectives":
                ratios.setdefault(case["machine"], []).append((case["cards"], record.number("ratio", none, overlapped)))
        if not latency or not ratios:
            return None
        figure, panels = plt.subplots(2, 1, figsize=(WIDTH_IN, 7), layout="constrained")
        for panel, series in zip(panels, (latency, ratios), strict=True):
            for colour, marker, (label, points) in zip(COLOURS, "osD^v*", series.items(), strict=False):
                panel.plot(*zip(*sorted(set(points))), f"{marker}-", color=colour, label=label)
            panel.set_xscale("log", base=2)
            panel.legend(fontsize=9)
        panels[0].set(title="H200, forward (simulated)", ylabel="latency, ms")
        panels[0].set_xlabel("ranks; 16: two hosts of eight network cards")
        panels[0].set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
        panels[1].set(title="16 ranks of two hosts, NCCL (simulated)")
        panels[1].set(xlabel="network cards a host", ylabel="none over overlapped, forward")
        panels[1].set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        return figure


AS_PLANNED = 0.75  # where it stands on the axis of chunks


def _over_nvlink(record: Record) -> bool:
    return link_of(record) == NVLINK and record.get("environment", "device").startswith(DEVICE)


def chunks_of(mode: str, plan: str | None = None) -> float | None:
    """How many chunks a mode's name says it has, or None; of ``kernel`` what its plan says, which old records lack."""
    if mode == "kernel":
        return AS_PLANNED if plan is None else len(plan.split()[0].split(","))
    if mode in ("none", "kernel:sequential", "kernel:peers"):  # through the peers' memory the plan is one chunk
        return 1
    found = re.fullmatch(r"kernel:(?:chunks|peers)=([\d+]+)", mode)
    if found is None:
        return None
    sizes = found[1].split("+")
    return int(sizes[0]) if len(sizes) == 1 else len(sizes)


def _svg(figure, title: str) -> str:
    """The figure as SVG text with a title for screen readers, in the colour of the text around it."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    opening, rest = svg.split(">", 1)
    style = "<style>.plot{color:#222}@media(prefers-color-scheme:dark){.plot{color:#ddd}}</style>"
    return f'{opening} class="plot" role="img" aria-label="{title}">\n <title>{title}</title>{style}{rest}'
