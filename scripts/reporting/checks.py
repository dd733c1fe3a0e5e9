"""What was compared with the sequential layer, and how it came out."""

from __future__ import annotations

from .citations import NOT_RECORDED, Record
from .markdown import TableMaker
from .tables import compiled


class Checks(TableMaker):
    """The checks of all comparisons; each method returns Markdown, or a line that says what is missing."""

    def table(self) -> str:
        """What was compared with the sequential layer, and how it came out."""
        rows = []
        with self.table_of("checks") as sources:
            for record in self.results.comparisons():
                checked, whole = record.get("checks") or {}, record.get("full_batch") or {}
                for mode in dict.fromkeys((*checked, *whole)):
                    if checked.get(mode, {}).get("ran") or mode in whole:
                        rows.append(
                            (
                                f"`{mode}`",
                                f"`{record.name}`",
                                _verdict(checked.get(mode)),
                                *_gradients(record, mode),
                                *_full_batch(record, mode),
                                record.commit(),
                            )
                        )
        head = (
            "mode",
            "record",
            "check",
            "rows",
            "worst gradient",
            "full batch",
            "elements that differ",
            "largest",
            "commit",
        )
        return self.shown("checks", head, rows, sources)

    def full_batches(self) -> str:
        """How often the whole output equals that of none, eager and compiled: one sentence, counted over the checks."""
        parts = []
        for how in ("eager", "compiled"):
            found = [
                whole
                for record in self.results.comparisons()
                for whole in (record.get("full_batch") or {}).values()
                if (compiled(record) == "yes") is (how == "compiled")
            ]
            if found:
                parts.append(f"in {sum(whole['equal'] for whole in found)} of {len(found)} comparisons {how}")
        return f"The full batch was equal {', and '.join(parts)}." if parts else "No record yet: full batches compared."


def _verdict(check: dict | None) -> str:
    if not check or not check.get("ran"):
        return "not run"
    problem = check.get("problem") or check.get("gradient_problem") or ("" if check.get("equal", True) else "differs")
    return f"fails: {problem}" if problem else "passed"


def _gradients(record: Record, mode: str) -> tuple[str, str]:
    """(rows of the check, the worst relative error of a gradient)."""
    path = "checks", mode
    gradients = record.get(*path, "gradients") or {}
    rows = record.cite("value", (*path, "rows"), missing=NOT_RECORDED if record.get(*path, "ran") else "")
    if not gradients:
        return rows, ""
    worst = max(gradients, key=lambda name: gradients[name]["relative_error"])
    error = record.cite("value", (*path, "gradients", worst, "relative_error"), form="{:.1e}")
    return rows, f"{error} (`{worst}`)"


def _full_batch(record: Record, mode: str) -> tuple[str, str, str]:
    """(equal or differs, elements that differ, the largest difference)."""
    whole = record.get("full_batch", mode)
    if not whole:
        return "not compared", "", ""
    path = "full_batch", mode
    if whole["equal"]:
        return "equal", "", ""
    return (
        "differs",
        record.cite("value", (*path, "mismatches")),
        record.cite("value", (*path, "max_abs_error"), form="3", missing="not finite"),
    )
