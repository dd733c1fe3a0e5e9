"""Tables of other records: how good plans are, splits, faults, many calls, notes, and all files that were read."""

from __future__ import annotations

import math
from typing import Iterable

from .citations import NOT_RECORDED, Record
from .markdown import TableMaker

_KINDS = {
    "full": "the whole block",
    "comp-only": "without exchanges",
    "comparison": "modes compared",
    "overlap-measurement": "modes compared, with traces",
    "splits": "the computation in parts",
    "trace": "device trace",
}


class Listings(TableMaker):
    """Each method returns Markdown, or a line that says what there is no record of."""

    def planner(self) -> str:
        """What the planner and others chose, over the best of all candidates: geometric means over the shapes."""
        rows = []
        with self.table_of("planner") as sources:
            for record in self.results.of_kind("planner"):
                for choice in record.get("geometric_means"):
                    rows.append(
                        (
                            f"`{record.file.removeprefix('results/')}`",
                            record.get("pass"),
                            f"`{choice}`",
                            record.cite("value", ("geometric_means", choice), form="{:.3f}"),
                            record.cite("length", ("shapes",)),
                            record.commit(),
                        )
                    )
        head = ("record", "pass", "choice", "time over the best", "shapes", "commit")
        return self.shown("all candidate plans, timed", head, rows, sources)

    def splits(self) -> str:
        """What splitting the local computation costs on one device, and what of it equals the whole bit for bit."""
        rows = []
        with self.table_of("splits measured") as sources:
            for record in self.results.of_kind("splits"):
                for index, row in enumerate(record.get("splits")):
                    rows.append(
                        (
                            f"`{record.name}`",
                            row["axis"] or "whole",
                            record.cite("value", ("splits", index, "parts")),
                            *_split_times(record, index),
                            *_split_verdict(record, index),
                            _CUT_BY[row["axis"]],
                            record.commit(),
                        )
                    )
        head = (
            "record",
            "split along",
            "parts",
            "forward ms",
            "over the whole",
            "with backward ms",
            "over the whole",
            "output",
            "gradients that differ",
            "worst relative error",
            "exchanges it cuts",
            "commit",
        )
        return self.shown("the computation in parts, by `scripts/splits.py`", head, rows, sources)

    def faults(self) -> str:
        """What went wrong on one rank, what the first other one said, after how long all ended, and what was left over."""
        rows = []
        with self.table_of("faults") as sources:
            for record in self.results.of_kind("faults"):
                for index, fault in enumerate(record.get("faults")):
                    path = "faults", index
                    others = [rank for rank in range(len(fault["ranks"])) if rank != fault["at_fault"]]
                    seconds = {rank: fault["ranks"][rank]["seconds"] for rank in others}  # None: it did not end
                    slowest = max(others, key=lambda rank: math.inf if seconds[rank] is None else seconds[rank])
                    rows.append(
                        (
                            _inline(record.cite("text", (*path, "fault"))),
                            _inline(record.cite("text", (*path, "ranks", others[0], "message"), missing="")),
                            record.cite("value", (*path, "ranks", slowest, "seconds"), form="3", missing=NOT_RECORDED),
                            _inline(record.cite("joined", (*path, "problems"))),
                            "works" if fault["rerun"]["ok"] else "fails",
                            record.commit(),
                        )
                    )
        head = ("a rank", "what the first other rank says", "the others ended after s", "left over", "a run afterwards", "commit")
        return self.shown("faults of a rank", head, rows, sources)

    def endurance(self) -> str:
        """By how much what a process holds grew, from the first calls to the last: the rank on which it grew most."""
        rows = []
        with self.table_of("endurance") as sources:
            for record in self.results.of_kind("endurance"):
                counts = [record.cite("value", (name,)) for name in ("calls", "configurations", "kept")]
                grown = [
                    _growth(record, name, 2**-20 if name.endswith("bytes") else 1) for name in record.get("bounds")
                ]
                bound = record.cite("value", ("bounds", "resident_bytes"), form="{:.1f}", scale=2**-20)
                rows.append((f"`{record.name}`", *counts, *grown, bound, record.commit()))
        head = ("record", "calls", "configurations", "layers kept at most", "resident MiB", "device MiB", "open files",
                "layers", "compilations", "bound of resident MiB", "commit")  # fmt: skip
        return self.shown("many calls", head, rows, sources)

    def notes(self) -> str:
        """The notes, with their source and commit."""
        rows = []
        with self.table_of("notes"):
            for name in self.results.at("notes.json", ("notes",)) or ():
                path = "notes", name
                cells = [self.results.cite("notes.json", "text", (*path, field)) for field in ("text", "source")]
                commit = self.results.cite("notes.json", "commit", (*path, "commit"), missing="not in this repository")
                rows.append((*cells, commit))
        return self.shown("notes", ("note", "source", "commit"), rows)

    def records(self) -> str:
        """Every file that was read."""
        rows = []
        with self.table_of("records"):
            for file, content in self.results.contents.items():
                if not isinstance(content, dict) or "environment" not in content:
                    continue
                record = Record(self.results, file)
                versions = [record.cite("text", ("environment", name)) for name in ("torch", "device")]
                rows.append(
                    (f"`{file}`", _KINDS.get(record.get("kind"), record.get("kind")), *versions, record.commit())
                )
        return self.shown("records", ("file", "what", "torch", "device", "commit"), rows)


_CUT_BY = {None: "", "L": "dispatch and combine", "rows": "dispatch and combine", "H": "none"}  # by construction


def _split_times(record: Record, index: int) -> Iterable[str]:
    for direction in ("forward", "forward+backward"):
        ours, whole = (("splits", each, "passes", direction, "p50_s") for each in (index, 0))
        yield record.cite("value", ours, form="4", scale=1e3)
        yield record.cite("ratio", ours, whole, form="{:.2f}") if index else ""


def _split_verdict(record: Record, index: int) -> tuple[str, str, str]:
    """(the output equal or not, gradients that differ, the worst relative error of all)."""
    path = "splits", index, "compared"
    verdicts = record.get(*path)
    if not verdicts:
        return "", "", ""
    wrong = [f"`{name}`" for name, each in verdicts.items() if not each["equal"] and name != "output"]
    worst = max(verdicts, key=lambda name: verdicts[name]["relative_error"])
    error = record.cite("value", (*path, worst, "relative_error"), form="{:.1e}")
    return "equal" if verdicts["output"]["equal"] else "differs", ", ".join(wrong), f"{error} (`{worst}`)"


def _growth(record: Record, name: str, scale: float) -> str:
    ranks = record.get("ranks")
    most = max(range(len(ranks)), key=lambda rank: ranks[rank]["last"][name] - ranks[rank]["warm"][name])
    path = "ranks", most
    form = "{:.1f}" if name.endswith("bytes") else "{:.0f}"
    return record.cite("difference", (*path, "last", name), (*path, "warm", name), form=form, scale=scale)


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
