"""The report's tables, as Markdown. Below each stand the files that its numbers come from."""

from __future__ import annotations

import contextlib
from typing import Iterable, Iterator

import results_file

from .citations import COMP_ONLY, COMPARISONS, EXCHANGES, NO_RECORD, NOT_RECORDED, Record, Results

EMULATIONS = ("shm", "netns", "cross", "hosts")  # in the names of folders whose link stands for another
_KINDS = {"full": "the whole block", "comp-only": "without exchanges", "comparison": "modes compared", "trace": "device trace"}


class Tables:
    """Tables over all records of a `Results`; each method returns Markdown, or ``no record``."""

    def __init__(self, results: Results):
        self.results = results

    def comparisons(self) -> str:
        """Per stack, direction and shape: every mode of every comparison."""
        groups: dict[tuple, list[Record]] = {}
        for record in self.results.comparisons():
            shape = tuple(record.get(*record.setting(name)) for name in results_file.SHAPE)
            folder = record.file.removeprefix("results/").partition("/")[0]
            groups.setdefault((folder, record.get("pass"), shape), []).append(record)
        return "\n\n".join(self._comparison(*key, records) for key, records in sorted(groups.items(), key=_order))

    def _comparison(self, folder: str, direction: str, shape: tuple, records: list[Record]) -> str:
        rows = []
        with self._table(f"{folder} {direction} {shape}") as sources:
            title = f"**`{folder}`, {direction}, (B, T, D, k) = {records[0].shape()}**{_emulated(folder)}"
            for record in records:
                for mode in record.modes:
                    rows.append((f"`{_name(record)}`", _compiled(record), f"`{mode}`", record.ms(mode), record.ratio(mode),
                                 record.hidden(mode), record.exposed(mode), record.tokens(mode), record.peak(mode),
                                 record.commit()))  # fmt: skip
                rows += [(f"`{_name(record)}`", _compiled(record), f"`{mode}`", "failed", *[""] * 5, record.commit())
                         for mode in record.get("failed") or ()]  # fmt: skip
        head = ("record", "compiled", "mode", "median ms", "ratio", "hidden", "exposed ms", "M tokens/s", "peak MiB", "commit")
        return f"{title}\n\n{_markdown(head, rows)}\n\n{sources()}"

    def modes(self, files: Iterable[str], modes: Iterable[str]) -> str:
        """Chosen modes of chosen comparisons, side by side: median, ratio, hidden fraction, exposed communication."""
        rows = []
        with self._table(" ".join(files)) as sources:
            for record in (Record(self.results, file) for file in files):
                for mode in (mode for mode in modes if record.get("measurements", mode)):
                    rows.append((record.get("pass"), f"`{mode}`", record.ms(mode), record.ratio(mode), record.hidden(mode),
                                 record.exposed(mode)))  # fmt: skip
        return self._or_no_record(("pass", "mode", "median ms", "ratio", "hidden", "exposed ms"), rows, sources)

    def single_runs(self) -> str:
        """The records of `benchmark.py`: one mode at a time."""
        rows = []
        with self._table("single runs") as sources:
            for record in self.results.of_kind("full", "comp-only"):
                mode = record.get(*record.setting("overlap"))
                rows.append((f"`{record.file.removeprefix('results/')}`", f"`{mode}`", record.get("pass"), record.shape(),
                             _compiled(record), record.cite("value", ("slowest_rank", "p50_s"), form="4", scale=1e3),
                             record.cite("largest", ("peak_memory_bytes",), form="{:.0f}", scale=2**-20),
                             record.commit()))  # fmt: skip
        head = ("record", "mode", "pass", "(B, T, D, k)", "compiled", "median ms", "peak MiB", "commit")
        return self._or_no_record(head, rows, sources)

    def checks(self) -> str:
        """What was compared with the sequential layer, and how it came out."""
        rows = []
        with self._table("checks") as sources:
            for record in self.results.comparisons():
                checked, whole = record.get("checks") or {}, record.get("full_batch") or {}
                for mode in dict.fromkeys((*checked, *whole)):
                    if checked.get(mode, {}).get("ran") or mode in whole:
                        rows.append((f"`{_name(record, folder=True)}`", f"`{mode}`", _verdict(checked.get(mode)),
                                     *_gradients(record, mode), *_full_batch(record, mode), record.commit()))  # fmt: skip
        head = ("record", "mode", "check", "rows", "worst gradient", "full batch", "elements that differ", "largest", "commit")
        return self._or_no_record(head, rows, sources)

    def traces(self) -> str:
        """What ran beside what, from the device traces; the worst rank."""
        rows = []
        with self._table("traces") as sources:
            for record in self.results.of_kind("trace"):
                rows.append((f"`{record.file.removeprefix('results/').removesuffix('.trace.json')}`", record.get("pass"),
                             record.trace("span_us"), record.trace("communication_us"),
                             record.trace("hidden_fraction", "{:.0f} %", 100), record.trace("exposed_us"),
                             record.trace("inflation", "{:.2f}"), record.trace("critical_path_communication_us"),
                             record.trace("idle_us"), record.trace("gemm_us"), record.trace("other_us"),
                             record.trace("epilogues"), record.commit()))  # fmt: skip
        head = ("trace", "pass", "span us", "communication us", "hidden", "exposed us", "inflation",
                "communication on the critical path us", "compute idle us", "GEMMs us", "other us", "epilogues",
                "commit")  # fmt: skip
        return self._or_no_record(head, rows, sources)

    def hiding(self) -> str:
        """The figures of `scripts/measure.py`: hidden, by the assignment and against our own kernels in sequence."""
        rows = []
        with self._table("hiding") as sources:
            for record in self.results.of_kind("overlap-measurement"):
                for mode in record.get("hiding"):
                    path = "hiding", mode, "slowest_rank"
                    shares = [record.cite("value", (*path, share), form="{:.0f} %", scale=100, missing="")
                              for share in ("hidden_fraction", "hidden_fraction_own", "e_overlap", "e_overlap_flux")]
                    rows.append((f"`{_name(record, folder=True)}`", record.get("pass"), f"`{mode}`", *shares,
                                 record.cite("value", (*path, "exposed_s"), form="3", scale=1e3), record.commit()))  # fmt: skip
        head = ("record", "pass", "mode", "hidden", "against our own sequence", "E", "E of Flux", "exposed ms", "commit")
        return self._or_no_record(head, rows, sources)

    def links(self, links: Iterable[tuple[str, str, str]]) -> str:
        """(what the link is, a record over it, our best mode there) side by side."""
        rows = []
        with self._table("links") as sources:
            for what, file, mode in links:
                record = Record(self.results, file)
                rows.append((what, record.link(), record.ms(EXCHANGES), record.ms(COMP_ONLY),
                             record.ratio(COMP_ONLY, to=EXCHANGES), f"`{mode}`", record.ratio(mode),
                             record.hidden(mode)))  # fmt: skip
        head = ("link", "GB/s a rank", "exchanges ms", "computation ms", "exchanges over computation", "mode", "ratio", "hidden")
        return self._or_no_record(head, rows, sources)

    def memory(self, files: Iterable[str]) -> str:
        """Peak memory of every mode beside that of none."""
        rows = []
        with self._table("memory") as sources:
            for record in (Record(self.results, file) for file in files):
                for mode in (mode for mode in record.modes if record.get("measurements", mode, "peak_memory_bytes")):
                    first = ("measurements", "none", "peak_memory_bytes", 0), ("measurements", mode, "peak_memory_bytes", 0)
                    rows.append((f"`{_name(record, folder=True)}`", record.get("pass"), f"`{mode}`", record.peak(mode),
                                 record.cite("ratio", *reversed(first), form="{:.2f}")))  # fmt: skip
        return self._or_no_record(("record", "pass", "mode", "peak MiB", "of none"), rows, sources)

    def sweeps(self) -> str:
        """Per results file of a sweep and comparison: each mode's ratio to none over the shapes."""
        parts = []
        for file, lines in self.results.contents.items():
            if not file.endswith(".jsonl") or not isinstance(lines, list):
                continue
            for key in sorted({results_file.comparison_of(line) for line in lines}):
                parts.append(self._sweep(file, key, lines))
        return "\n\n".join(parts) or f"Sweep over all shapes: {NO_RECORD}."

    def _sweep(self, file: str, key: tuple, lines: list[dict]) -> str:
        chosen = [index for index, line in enumerate(lines) if results_file.comparison_of(line) == key]
        modes = dict.fromkeys(mode for index in chosen for mode in lines[index]["summary"] if mode != "none")
        head, rows = ("(B, T, D, k)", *(f"`{mode}`" for mode in modes)), []
        with self._table(f"{file} {key}") as sources:
            for record in (Record(self.results, file, (index,)) for index in chosen):
                rows.append((record.shape(), *(record.ratio(mode) for mode in modes)))
        return f"**{key[0]}, {key[1]}: ratio to none, shape by shape**\n\n{_markdown(head, rows)}\n\n{sources()}"

    def splits(self, file: str) -> str:
        """What a split into four parts does along L, rows and H, by the equations, for the shape of a record."""
        record = Record(self.results, file)
        widths = ("world_size",), *map(record.setting, ("dim", "k", "compute_scale"))
        batch, tokens = record.setting("batch_size"), record.setting("tokens")
        with self._table("splits") as sources:

            def row(axis: str, rows: str = "", partial: str = "0") -> tuple:
                return (axis, record.cite(f"intensity{rows}", batch, *widths, form="3"),
                        record.cite(f"weight_bytes{rows}", tokens, *widths, form="{:.0f}", scale=2**-20), partial)  # fmt: skip

            partial = record.cite("partial_sums", batch, tokens, record.setting("dim"), form="{:.0f}", scale=2**-20)
            rows = [row("L"), row("rows", "_of_split_rows"), row("H", "", partial)]
        head = ("split along", "operations per byte", "weights read, MiB", "partial sums, MiB")
        return self._or_no_record(head, rows if record.get("configuration") else [], sources)

    def lists(self, folder: str, mark: str = "") -> str:
        """The lists of rows that the records below a folder hold, as they are: the simulator's, and those of faults."""
        parts = []
        for file, content in self.results.contents.items():
            if not file.startswith(folder) or not isinstance(content, dict):
                continue
            for key, rows in content.items():
                if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
                    parts.append(self._listed(Record(self.results, file), key, mark))
        return "\n\n".join(parts) or f"{NO_RECORD.capitalize()}."

    def _listed(self, record: Record, key: str, mark: str) -> str:
        rows, names = [], list(dict.fromkeys(name for row in record.get(key) for name in row))
        with self._table(f"{record.file} {key}") as sources:
            for index in range(len(record.get(key))):
                rows.append([_cell(record, (key, index, name)) for name in names])
        title = f"**`{record.file}`: {key.replace('_', ' ')}** {mark}".rstrip()
        return f"{title}\n\n{_markdown([name.replace('_', ' ') for name in names], rows)}\n\n{sources()}"

    def notes(self) -> str:
        """The notes, with their source and commit."""
        rows = []
        with self._table("notes"):
            for name in self.results.at("notes.json", ("notes",)) or ():
                path = "notes", name
                cells = [self.results.cite("notes.json", "text", (*path, field)) for field in ("text", "source")]
                commit = self.results.cite("notes.json", "commit", (*path, "commit"), missing="not in this repository")
                rows.append((*cells, commit))
        return self._or_no_record(("note", "source", "commit"), rows, None, with_sources=False)

    def records(self) -> str:
        """Every file that was read."""
        rows = []
        with self._table("records") as sources:
            for file, content in self.results.contents.items():
                if not isinstance(content, dict) or "environment" not in content:
                    continue
                record = Record(self.results, file)
                versions = [record.cite("text", ("environment", name)) for name in ("torch", "device")]
                rows.append((f"`{file}`", _KINDS.get(record.get("kind"), record.get("kind")), *versions, record.commit()))
        return self._or_no_record(("file", "what", "torch", "device", "commit"), rows, sources, with_sources=False)

    @contextlib.contextmanager
    def _table(self, name: str) -> Iterator:
        """A place of its own for the citations of a table; yields what says where its numbers come from."""
        before = self.results.place
        place = self.results.place = f"{before}/{name}"
        try:
            yield lambda: source_line(self.results.sources(place))
        finally:
            self.results.place = before

    @staticmethod
    def _or_no_record(head, rows, sources, with_sources=True) -> str:
        if not rows:
            return f"{NO_RECORD.capitalize()}."
        return f"{_markdown(head, rows)}\n\n{sources()}" if with_sources else _markdown(head, rows)


def _cell(record: Record, path: tuple) -> str:
    value = record.get(*path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return record.cite("value", path, form="4" if isinstance(value, float) else "{}")
    return "" if value is None else f"`{value}`"


def source_line(files: Iterable[str], what: str = "Source") -> str:
    """The files that numbers come from."""
    return f"*{what}: {', '.join(f'`{file}`' for file in files)}*"


def _markdown(head: tuple, rows: list[tuple]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _emulated(folder: str) -> str:
    return " (emulates a network)" if any(mark in folder for mark in EMULATIONS) else ""


def _order(group: tuple) -> tuple:
    folder, direction, shape = group[0]
    return folder, direction, [-size for size in shape]


def _name(record: Record, folder: bool = False) -> str:
    path = record.file.removeprefix("results/").removesuffix(".json")
    line = f" line {record.prefix[0] + 1}" if record.prefix else ""
    return (path if folder else path.partition("/")[2]) + line


def _compiled(record: Record) -> str:
    """Comparisons of the FFN alone, which is always compiled, have no such setting."""
    return "no" if record.get(*record.setting("no_compile")) else "yes"


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
    return ("differs", record.cite("value", (*path, "mismatches")),
            record.cite("value", (*path, "max_abs_error"), form="3"))  # fmt: skip
