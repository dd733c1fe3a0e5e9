"""Tables of what was measured: latencies, traces, memory, sweeps."""

from __future__ import annotations

from typing import Callable, Iterable

import results_file

from .citations import COMP_ONLY, EXCHANGES, Record
from .markdown import TableMaker, table
from .newest import missing, options_of

EMULATIONS = ("shm", "netns", "cross", "hosts", "nodes")  # in the names of folders whose link stands for another


class Tables(TableMaker):
    """Tables over all records of a `Results`; each method returns Markdown, or a line that says what is missing."""

    def comparisons(self) -> str:
        """Per stack, direction and shape: every mode of every comparison."""
        groups: dict[tuple, list[Record]] = {}
        for record in self.results.comparisons():
            shape = tuple(record.get(*record.setting(name)) for name in results_file.SHAPE)
            folder = record.file.removeprefix("results/").partition("/")[0]
            groups.setdefault((folder, record.get("pass"), shape), []).append(record)
        if not groups:
            return "No record yet: modes compared."
        return "\n\n".join(self._comparison(*key, records) for key, records in sorted(groups.items(), key=_order))

    def _comparison(self, folder: str, direction: str, shape: tuple, records: list[Record]) -> str:
        rows = []
        with self.table_of(f"{folder} {direction} {shape}") as sources:
            title = f"#### `{folder}`, {direction}, (B, T, D, k) = {records[0].shape()}{_emulated(folder)}"
            for record in records:
                for mode in record.modes:
                    rows.append(
                        (
                            f"`{mode}`",
                            f"`{_name(record)}`",
                            record.ms(mode),
                            record.ratio(mode),
                            record.hidden(mode),
                            record.exposed(mode),
                            record.tokens(mode),
                            record.peak(mode),
                            compiled(record),
                            _options(record),
                            record.commit(),
                        )
                    )
                rows += [
                    (f"`{mode}`", f"`{_name(record)}`", "failed", *[""] * 5, compiled(record), _options(record),
                     record.commit())
                    for mode in record.get("failed") or ()
                ]
            remarks = [f"`{_name(each)}`{text}" for each in records if (text := each.remark())]
        head = (
            "mode",
            "record",
            "median ms",
            "ratio",
            "hidden",
            "exposed ms",
            "M tokens/s",
            "peak MiB",
            "compiled",
            "options",
            "commit",
        )
        plans = [(f"`{_name(each)}` `{mode}`", each.plan(mode)) for each in records for mode in each.modes]
        more = f"\n\nRemarks: {'; '.join(remarks)}." if remarks else ""
        return f"{title}\n\n{table(head, rows)}\n\n{sources()}{more}{_plans(plans)}"

    def modes(self, records: Iterable[Record], modes: Iterable[str]) -> str:
        """Chosen modes of chosen comparisons, side by side: latency, what is hidden and exposed, throughput, memory."""
        rows, records = [], list(records)
        with self.table_of(" ".join(each.file for each in records)) as sources:
            for record in records:
                for mode in filter(record.mode, modes):
                    rows.append(
                        (
                            f"`{record.mode(mode)}`",
                            record.get("pass"),
                            record.ms(mode),
                            record.ratio(mode),
                            record.hidden(mode),
                            record.exposed(mode),
                            record.tokens(mode),
                            record.peak(mode),
                        )
                    )
        head = ("mode", "pass", "median ms", "ratio", "hidden", "exposed ms", "M tokens/s", "peak MiB")
        return self._with_missing(head, rows, sources, records)

    def alone(self) -> str:
        """Of every comparison the exchanges and the computation by themselves, apart from layer latencies."""
        rows = []
        with self.table_of("alone") as sources:
            for record in self.results.comparisons():
                rows.append(
                    (
                        f"`{record.name}`{_emulated(record.name)}",
                        record.get("pass"),
                        record.shape(),
                        record.ms(EXCHANGES),
                        record.ms(COMP_ONLY),
                        record.ratio(COMP_ONLY, to=EXCHANGES),
                        compiled(record),
                        _options(record),
                        record.commit(),
                    )
                )
        head = ("record", "pass", "(B, T, D, k)", "exchanges ms", "computation ms", "exchanges over computation",
                "compiled", "options", "commit")  # fmt: skip
        return self.shown("modes compared", head, rows, sources)

    def scaled(self) -> str:
        """Every mode of the comparisons whose communication or computation was scaled."""
        rows = []
        with self.table_of("scaled") as sources:
            for record in self.results.comparisons():
                scales = [record.setting(name) for name in ("comm_scale", "compute_scale")]
                if any(record.get(*scale) not in (None, 1) for scale in scales):
                    for mode in record.modes:
                        rows.append(
                            (
                                f"`{mode}`",
                                f"`{record.name}`",
                                record.get("pass"),
                                *(record.cite("value", scale) for scale in scales),
                                record.ms(mode),
                                record.ratio(mode),
                                record.hidden(mode),
                                record.exposed(mode),
                                record.peak(mode),
                            )
                        )
        head = ("mode", "record", "pass", "communication x", "computation x", "median ms", "ratio", "hidden", "exposed ms",
                "peak MiB")  # fmt: skip
        return self.shown("measurements with `--comm-scale` or `--compute-scale`", head, rows, sources)

    def single_runs(self) -> str:
        """The records of `benchmark.py`: one mode at a time."""
        rows, plans = [], []
        with self.table_of("single runs") as sources:
            for record in self.results.of_kind("full", "comp-only"):
                mode = record.get(*record.setting("overlap"))
                file = record.file.removeprefix("results/")
                plans.append((f"`{file}`", record.get("plan")))
                rows.append(
                    (
                        f"`{file}`{_emulated(file)}",
                        f"`{mode}`",
                        record.get("pass"),
                        record.shape(),
                        compiled(record),
                        _options(record),
                        record.cite("value", ("slowest_rank", "p50_s"), form="4", scale=1e3),
                        record.cite("largest", ("peak_memory_bytes",), form="{:.0f}", scale=2**-20),
                        record.commit(),
                    )
                )
        head = ("record", "mode", "pass", "(B, T, D, k)", "compiled", "options", "median ms", "peak MiB", "commit")
        return self.shown("one mode at a time", head, rows, sources) + _plans(plans)

    def small_runs(self, pairs: Iterable[list[Record]]) -> str:
        """Runs of `none` and `kernel` one at a time, of each torch version."""
        rows = []
        with self.table_of("small runs") as sources:
            for records in pairs:
                times = [each.cite("value", ("slowest_rank", "p50_s"), form="4", scale=1e3) for each in records]
                by = "the peers' memory" if "peers" in (records[-1].get("plan") or "").split() else "NCCL"
                rows.append((records[0].torch(), records[0].shape(), *times, by, records[0].commit()))
        head = ("torch", "(B, T, D, k)", "`none` ms", "`kernel` ms", "exchanges by", "commit")
        return self.shown("small shapes, eager, one mode at a time", head, rows, sources)

    def traces(self) -> str:
        """What ran beside what, from the device traces; the worst rank."""
        rows = []
        with self.table_of("traces") as sources:
            for record in self.results.of_kind("trace"):
                rows.append(
                    (
                        f"`{record.file.removeprefix('results/').removesuffix('.trace.json')}`",
                        record.get("pass"),
                        record.trace("span_us"),
                        record.trace("communication_us"),
                        record.trace("hidden_fraction", "{:.0f} %", 100),
                        record.trace("exposed_us"),
                        record.trace("inflation", "{:.2f}"),
                        record.trace("critical_path_communication_us"),
                        record.trace("idle_us"),
                        record.trace("gemm_us"),
                        record.trace("other_us"),
                        record.trace("epilogues"),
                        record.commit(),
                    )
                )
        head = (
            "trace",
            "pass",
            "span us",
            "communication us",
            "hidden",
            "exposed us",
            "inflation",
            "communication on the critical path us",
            "compute idle us",
            "GEMMs us",
            "other us",
            "epilogues",
            "commit",
        )
        return self.shown("device traces", head, rows, sources)

    def hiding(self) -> str:
        """The figures of `scripts/measure.py`: hidden, by the assignment and against our own kernels in sequence."""
        rows = []
        with self.table_of("hiding") as sources:
            for record in self.results.of_kind("overlap-measurement"):
                for mode in record.get("hiding"):
                    path = "hiding", mode, "slowest_rank"
                    shares = [
                        record.cite("value", (*path, share), form="{:.0f} %", scale=100, missing="")
                        for share in ("hidden_fraction", "hidden_fraction_own", "e_overlap", "e_overlap_flux")
                    ]
                    rows.append(
                        (
                            f"`{record.name}`",
                            record.get("pass"),
                            f"`{mode}`",
                            *shares,
                            record.cite("value", (*path, "exposed_s"), form="3", scale=1e3),
                            record.commit(),
                        )
                    )
        head = (
            "record",
            "pass",
            "mode",
            "hidden",
            "against our own sequence",
            "E",
            "E of Flux",
            "exposed ms",
            "commit",
        )
        return self.shown("times and traces of one run, by `scripts/measure.py`", head, rows, sources)

    def links(self, links: Iterable[tuple[str, Record, str]]) -> str:
        """(what the link is, a record over it, our best mode there) side by side."""
        rows, links = [], list(links)
        with self.table_of("links") as sources:
            for what, record, mode in (each for each in links if each[1]):
                rows.append(
                    (
                        what,
                        record.torch(),
                        record.link(),
                        record.ms(EXCHANGES),
                        record.ms(COMP_ONLY),
                        record.ratio(COMP_ONLY, to=EXCHANGES),
                        f"`{record.mode(mode)}`",
                        record.ratio(mode),
                        record.hidden(mode),
                    )
                )
        head = (
            "link",
            "torch",
            "GB/s a rank",
            "exchanges ms",
            "computation ms",
            "exchanges over computation",
            "mode",
            "ratio",
            "hidden",
        )
        return self._with_missing(head, rows, sources, [record for _, record, _ in links])

    def memory(self, records: Iterable[Record]) -> str:
        """Peak memory of every mode beside that of none."""
        rows, records = [], list(records)
        with self.table_of("memory") as sources:
            for record in {each.name: each for each in records if each}.values():
                for mode in (mode for mode in record.modes if record.get("measurements", mode, "peak_memory_bytes")):
                    first = (
                        ("measurements", "none", "peak_memory_bytes", 0),
                        ("measurements", mode, "peak_memory_bytes", 0),
                    )
                    rows.append(
                        (
                            f"`{mode}`",
                            f"`{record.name}`",
                            record.get("pass"),
                            record.peak(mode),
                            record.cite("ratio", *reversed(first), form="{:.2f}"),
                        )
                    )
        return self._with_missing(("mode", "record", "pass", "peak MiB", "of none"), rows, sources, records)

    def _with_missing(self, head: tuple, rows: list, sources: Callable[[], str], records: list[Record]) -> str:
        """The table of these records, and which of them there are none of."""
        parts = [self.shown("", head, rows, sources)] if rows else []
        return "\n\n".join([*parts, *([] if all(records) else [missing(*records)])])

    def sweeps(self) -> str:
        """Per results file of a sweep and comparison: each mode's ratio to none over the shapes."""
        parts = []
        for file, lines in self.results.contents.items():
            if not file.endswith(".jsonl") or not isinstance(lines, list):
                continue
            for key in sorted({results_file.comparison_of(line) for line in lines}):
                parts.append(self._sweep(file, key, lines))
        return "\n\n".join(parts) or "No record yet: a sweep over all shapes."

    def _sweep(self, file: str, key: tuple, lines: list[dict]) -> str:
        chosen = [index for index, line in enumerate(lines) if results_file.comparison_of(line) == key]
        modes = dict.fromkeys(mode for index in chosen for mode in lines[index]["summary"] if mode != "none")
        head, rows = ("(B, T, D, k)", *(f"`{mode}`" for mode in modes)), []
        with self.table_of(f"{file} {key}") as sources:
            for record in (Record(self.results, file, (index,)) for index in chosen):
                rows.append((record.shape(), *(record.ratio(mode) for mode in modes)))
        return f"**{key[0]}, {key[1]}: ratio to none, shape by shape**\n\n{table(head, rows)}\n\n{sources()}"


def _plans(plans: Iterable[tuple[str, str | None]]) -> str:
    """A paragraph of the plans of (what ran with it, the plan), of those that are recorded."""
    named = [f"{what} `{plan}`" for what, plan in plans if plan is not None]
    return f"\n\nPlans: {'; '.join(named)}." if named else ""


def _emulated(folder: str) -> str:
    return " (emulates a network)" if any(mark in folder for mark in EMULATIONS) else ""


def _order(group: tuple) -> tuple:
    folder, direction, shape = group[0]
    return folder, direction, [-size for size in shape]


def _name(record: Record) -> str:
    """Below the stack's folder, where it lies in one."""
    return record.name.partition("/")[2] or record.name


def _options(record: Record) -> str:
    return " ".join(f"`{option}`" for option in options_of(record))


def compiled(record: Record) -> str:
    """Comparisons of the FFN alone, which is always compiled, have no such setting."""
    return "no" if record.get(*record.setting("no_compile")) else "yes"
