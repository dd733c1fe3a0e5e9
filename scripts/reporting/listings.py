"""Tables of other records: how good plans are, faults, notes, and all files that were read."""

from __future__ import annotations

from .citations import Record
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
        return self.shown("all candidate plans, timed", ("record", "pass", "choice", "time over the best", "shapes", "commit"), rows, sources)

    def faults(self) -> str:
        """What went wrong on one rank, what the first other one said, after how long all ended, and what was left over."""
        rows = []
        with self.table_of("faults") as sources:
            for record in self.results.of_kind("faults"):
                for index, fault in enumerate(record.get("faults")):
                    path = "faults", index
                    others = [rank for rank in range(len(fault["ranks"])) if rank != fault["at_fault"]]
                    slowest = max(others, key=lambda rank: fault["ranks"][rank]["seconds"])
                    rows.append(
                        (
                            _inline(record.cite("text", (*path, "fault"))),
                            _inline(record.cite("text", (*path, "ranks", others[0], "message"), missing="")),
                            record.cite("value", (*path, "ranks", slowest, "seconds"), form="3"),
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


def _growth(record: Record, name: str, scale: float) -> str:
    ranks = record.get("ranks")
    most = max(range(len(ranks)), key=lambda rank: ranks[rank]["last"][name] - ranks[rank]["warm"][name])
    path = "ranks", most
    form = "{:.1f}" if name.endswith("bytes") else "{:.0f}"
    return record.cite("difference", (*path, "last", name), (*path, "warm", name), form=form, scale=scale)


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
