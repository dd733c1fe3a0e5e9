"""Tables of what was not measured: calculated from the equations, or simulated."""

from __future__ import annotations

from typing import Iterator

from .citations import Record
from .markdown import TableMaker

_COUNTS = ("P", "hosts", "cards")
_CASE = ("GPU", *_COUNTS, "pass", "exchanges by", "chunks", "none ms", "overlapped ms", "ratio",
         "not under computation ms", "under computation")  # fmt: skip


class Modelled(TableMaker):
    """Each method returns Markdown, or a line that says what is missing."""

    def splits(self, record: Record) -> str:
        """What a split into four parts does along L, rows and H, by the equations, for the shape of a record."""
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
        return self.shown(record.lacks, head, rows if record else [], sources)

    def errors(self) -> str:
        """How far the simulator is off: single latencies, configurations' medians, overlapped layers, the worst."""
        lines = []
        for record in self.results.of_kind("calibration"):
            judged = record.get("judged")
            worst = max(range(len(judged)), key=lambda index: abs(judged[index]["error"]))
            errors = [
                record.cite("value", (name,), form="{:.1f} %", scale=100)
                for name in ("median_error", "median_error_of_configurations", "median_error_of_overlapped")
            ]
            counts = [record.cite("length", (name,)) for name in ("judged", "configurations")]
            most = record.cite("value", ("judged", worst, "error"), form="{:+.1f} %", scale=100)
            lines.append(
                f"How far the model is off, on latencies that it was not fitted to: the median error of {counts[0]} "
                f"latencies is {errors[0]}, that of the medians of {counts[1]} configurations {errors[1]}, and of the "
                f"overlapped layers alone {errors[2]}; the worst single one is {most} (`{judged[worst]['mode']}` of "
                f"`{judged[worst]['configuration']}`)."
            )
        return "\n\n".join(lines) or "No record yet: the simulator's calibration."

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
        head = ("record", "mode", "measured ms", "simulated ms", "error")
        return self.shown("the simulator's calibration", head, rows, sources)

    def defaults(self) -> str:
        """The documented default workloads on other machines: eight ranks of a host, and sixteen of two hosts."""
        rows = []
        with self.table_of("defaults") as sources:
            for record, index in self.cases():
                case = record.get("cases", index)
                few_cards = case["hosts"] == 1 or case["cards"] in (1, 8)
                if (case["P"], case["hosts"]) in ((8, 1), (16, 2)) and few_cards:
                    rows.append(self._case(record, index))
        return self.shown("simulated machines", _CASE, rows, sources)

    def scaled(self) -> str:
        """The same with twice the communication, or twice the computation."""
        rows = []
        with self.table_of("scaled") as sources:
            for record, index, case in self._of_machines():
                if case["comm_scale"] != 1 or case["compute_scale"] != 1:
                    scales = [record.cite("value", ("cases", index, name)) for name in ("comm_scale", "compute_scale")]
                    gpu, *others = self._case(record, index)
                    rows.append((gpu, *scales, *others))
        head = (_CASE[0], "communication x", "computation x", *_CASE[1:])
        return self.shown("simulated machines with more communication or computation", head, rows, sources)

    def cases(self) -> Iterator[tuple[Record, int]]:
        """(record, index) of the simulated cases at the default workload, communication and computation as they are."""
        for record, index, case in self._of_machines():
            if case["comm_scale"] == case["compute_scale"] == 1:
                yield record, index

    def _of_machines(self) -> Iterator[tuple[Record, int, dict]]:
        for record in self.results.of_kind("simulation"):
            for index, case in enumerate(record.get("cases")):
                if "hosts" in case and case["link"] == "NVLink":
                    yield record, index, case

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
            f"`{case['plan'].split()[0]}`",
            *times,
            record.cite("ratio", none, overlapped, form="{:.2f}"),
            record.cite("value", (*path, "exposed_s"), form="3", scale=1e3),
            record.cite("value", (*path, "hidden_fraction"), form="{:.0f} %", scale=100),
        )

    def row_chunks(self) -> str:
        """Chunks of rows beside the planner's chunks along L, where a rank has few tokens."""
        rows = []
        with self.table_of("row chunks") as sources:
            for record in self.results.of_kind("simulation"):
                for index, case in enumerate(record.get("cases")):
                    if "row_chunks" in case:
                        rows.append(self._by_rows(record, ("cases", index), case))
        head = ("GPU", "P", "T", "L", "pass", "row chunks", "`none` ms", "in row chunks ms", "without exchanges ms",
                "not under computation ms", "chunks along L", "along L ms", "weights read again MiB",
                "gradients added MiB")  # fmt: skip
        return self.shown("simulated chunks of rows", head, rows, sources)

    @staticmethod
    def _by_rows(record: Record, path: tuple, case: dict) -> tuple:
        counts = [record.cite("value", (*path, name)) for name in ("P", "T", "L")]
        times = [
            record.cite("value", (*path, f"{name}_s"), form="4", scale=1e3)
            for name in ("none", "overlapped", "alone", "exposed", "along_tokens")
        ]
        sizes = [
            record.cite("value", (*path, name), form="{:.0f}", scale=2**-20)
            for name in ("weights_read_again_bytes", "gradients_added_bytes")
        ]
        along = f"`{case['plan_along_tokens'].split()[0]}`"
        chunks = record.cite("value", (*path, "row_chunks"))
        return case["machine"], *counts, case["pass"], chunks, *times[:4], along, times[4], *sizes
