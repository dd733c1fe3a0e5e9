"""Tables of what was not measured: calculated from the equations, or simulated."""

from __future__ import annotations

from typing import Iterable

from .citations import NO_RECORD, Record
from .markdown import TableMaker, table

FOLDER = "results/simulated/"
_COUNTS = ("P", "hosts", "cards")


class Modelled(TableMaker):
    """Each method returns Markdown, or ``no record``."""

    def splits(self, file: str) -> str:
        """What a split into four parts does along L, rows and H, by the equations, for the shape of a record."""
        record = Record(self.results, file)
        widths = ("world_size",), *map(record.setting, ("dim", "k", "compute_scale"))
        batch, tokens = record.setting("batch_size"), record.setting("tokens")
        with self.table_of("splits") as sources:

            def row(axis: str, rows: str = "", partial: str = "0") -> tuple:
                return (
                    axis,
                    record.cite(f"intensity{rows}", batch, *widths, form="3"),
                    record.cite(f"weight_bytes{rows}", tokens, *widths, form="{:.0f}", scale=2**-20),
                    partial,
                )

            partial = record.cite("partial_sums", batch, tokens, record.setting("dim"), form="{:.0f}", scale=2**-20)
            rows = [row("L"), row("rows", "_of_split_rows"), row("H", "", partial)]
        head = ("split along", "operations per byte", "weights read, MiB", "partial sums, MiB")
        return self.shown(head, rows if record.get("configuration") else [], sources)

    def calibration(self) -> str:
        """The simulator against measured latencies that it was not fitted to."""
        rows = []
        with self.table_of("calibration") as sources:
            for record in self.results.of_kind("calibration"):
                for index, judged in enumerate(record.get("judged")):
                    path = "judged", index
                    rows.append(
                        (
                            f"`{judged['configuration']}`",
                            f"`{judged['mode']}`",
                            *(
                                record.cite("value", (*path, time), form="4", scale=1e3)
                                for time in ("measured_s", "simulated_s")
                            ),
                            record.cite("value", (*path, "error"), form="{:+.1f} %", scale=100),
                        )
                    )
        return self.shown(("record", "mode", "measured ms", "simulated ms", "error"), rows, sources)

    def defaults(self) -> str:
        """The documented default workloads on other machines: eight ranks of a host, and sixteen of two hosts."""
        rows = []
        with self.table_of("defaults") as sources:
            for record, index in self.cases():
                case = record.get("cases", index)
                few_cards = case["hosts"] == 1 or case["cards"] in (1, 8)
                if (case["P"], case["hosts"]) in ((8, 1), (16, 2)) and few_cards:
                    rows.append(self._case(record, index))
        head = ("GPU", *_COUNTS, "pass", "exchanges by", "none ms", "overlapped ms", "ratio", "exposed ms", "hidden")
        return self.shown(head, rows, sources)

    def cases(self) -> Iterable[tuple[Record, int]]:
        """(record, index) of the simulated cases at the default workload, communication and computation as they are."""
        for record in self.results.of_kind("simulation"):
            for index, case in enumerate(record.get("cases")):
                if (
                    "hosts" in case
                    and case.get("comm_scale") == case.get("compute_scale") == 1
                    and case["link"] == "NVLink"
                ):
                    yield record, index

    def _case(self, record: Record, index: int) -> tuple:
        path, case = ("cases", index), record.get("cases", index)
        counts = [record.cite("value", (*path, name), missing="") for name in _COUNTS]
        none, overlapped = (*path, "none_s"), (*path, "overlapped_s")
        times = [record.cite("value", each, form="4", scale=1e3) for each in (none, overlapped)]
        return (
            case["machine"],
            *counts,
            case["pass"],
            case["transport"],
            *times,
            record.cite("ratio", none, overlapped, form="{:.2f}"),
            record.cite("value", (*path, "exposed_s"), form="3", scale=1e3),
            record.cite("value", (*path, "hidden_fraction"), form="{:.0f} %", scale=100),
        )

    def others(self) -> str:
        """The lists of rows of the simulator's other records, as they are."""
        parts = []
        for record in self.results.of_kind("simulation"):
            if record.file.startswith(FOLDER) and "hosts" not in record.get("cases", 0):
                parts.append(self._listed(record, "cases"))
        return "\n\n".join(parts) or f"{NO_RECORD.capitalize()}."

    def _listed(self, record: Record, key: str) -> str:
        rows, names = [], list(dict.fromkeys(name for row in record.get(key) for name in row))
        with self.table_of(f"{record.file} {key}") as sources:
            for index in range(len(record.get(key))):
                rows.append([_cell(record, (key, index, name)) for name in names])
        shown = table((name.replace("_", " ") for name in names), rows)
        return f"**`{record.file}`** (simulated)\n\n{shown}\n\n{sources()}"


def _cell(record: Record, path: tuple) -> str:
    value = record.get(*path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return record.cite("value", path, form="4" if isinstance(value, float) else "{}")
    return "" if value is None else f"`{value}`"
