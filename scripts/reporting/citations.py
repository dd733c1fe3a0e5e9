"""The records that the report reads, and the citation of every number that it prints.

A number is printed by `Results.cite` alone: from values at given places of a record, by a formula of `FORMULAS`. What
was printed, from where and how is kept, so that a test can do it again from the files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import results_file
from rankmixer import schema

NOISE = 0.005  # differences between modes that may not repeat
NO_RECORD = "no record"
NOT_RECORDED = "not recorded"
COMPARISONS = ("comparison", "overlap-measurement")
EXCHANGES, COMP_ONLY = "exchanges", "comp-only:none"

# What the overlapped layer's exchanges went through, and the modes that are this: the first of them that a record holds
# and that its plan agrees with. Which transport is the default has changed.
MEANINGS = {
    "kernel by NCCL": ("kernel:TRANSPORT=collectives", "kernel"),
    "four chunks by NCCL": ("kernel:TRANSPORT=collectives+CHUNKS=4", "kernel:chunks=4"),
    "kernel by peers": ("kernel:peers", "kernel:TRANSPORT=peers", "kernel"),
}

PARTS = 4  # the splits that are compared; also the plan's default number of chunks

FORMULAS: dict[str, Callable[..., Any]] = {
    "value": lambda value: value,
    "largest": max,
    "smallest": min,
    "length": len,
    "ratio": lambda reference, value: reference / value,
    "difference": lambda value, reference: value - reference,
    # Of a time saved, the share that one piece saves: it switched off (`without`), the whole, and `none`.
    "share_of_gain": lambda without, value, none: (without - value) / (none - value),
    # The assignment's estimate: (T_serial - T_overlap) / T_comm, with its sign.
    "hidden": lambda serial, overlapped, exchanges: (serial - overlapped) / exchanges,
    # Bytes a second that a rank sends while the isolated exchanges run.
    "link": lambda sent, count, seconds: sent * count / seconds,
    # 6 B T D H operations of a rank's two forward GEMMs, and three times as many with backward, a second.
    "gemm_rate": lambda B, T, D, k, scale, direction, us: (
        (1 if direction == "forward" else 3) * 6 * B * T * D * (D * k * scale) / (us * 1e-6)
    ),
    # Operations per byte of the two forward GEMMs in 16-bit numbers: operands and results, each once.
    "intensity": lambda B, P, D, k, scale: _intensity(B * P, D, D * k * scale),
    "intensity_on_ranks": lambda B, ranks, D, k, scale: _intensity(B * len(ranks), D, D * k * scale),
    "intensity_of_split_rows": lambda B, P, D, k, scale: _intensity(B * P / PARTS, D, D * k * scale),
    # Bytes of both GEMMs' weights in 16-bit numbers; split rows read them once a part.
    "weight_bytes": lambda T, P, D, k, scale: T // P * 3 * D * (D * k * scale) * 2,
    "weight_bytes_of_split_rows": lambda T, P, D, k, scale: PARTS * (T // P) * 3 * D * (D * k * scale) * 2,
    # Bytes of fp32 partial sums [P*B,L,D] that the parts of H after the first read and write again.
    "partial_sums": lambda B, T, D: 2 * (PARTS - 1) * B * T * D * 4,
    "commit": lambda commit: commit[:7],
    "shape": lambda *sizes: f"({', '.join(map(str, sizes))})",
    "text": str,
    "joined": lambda texts: "; ".join(texts) or "nothing",
}


def _intensity(rows: float, D: int, H: int) -> float:
    return 6 * rows * D * H / (2 * (2 * rows * D + 3 * D * H + 3 * rows * H))


@dataclass(frozen=True)
class Citation:
    """A printed number: ``text`` is ``form`` of ``scale`` times ``formula`` of the values at ``paths`` of ``file``."""

    text: str
    file: str
    formula: str
    paths: tuple[tuple, ...]
    form: str
    scale: float
    place: str


class Results:
    """All JSON records below a folder, by their names relative to its parent, and what has been cited.

    Raises ValueError, which names the file, for one that is no JSON.

    Attributes:
        contents: {name: content}; a JSON-lines file is a list of its lines.
        ages: {commit: its place in history} of the records' commits, from commits.json; empty where there is none.
        citations: in the order of printing.
        place: where the next number stands: a section, or a section's table or figure.
        read: the file that a value was last read from.
    """

    def __init__(self, folder: Path):
        folder = Path(folder)
        files = sorted(path for end in ("json", "jsonl") for path in folder.rglob(f"*.{end}"))
        self.contents = {
            str(path.relative_to(folder.parent)): content_of(path)
            for path in files
            if not path.name.endswith(".perfetto.json")
        }
        self.contents["notes.json"] = content_of(folder.parent / "notes.json")
        commits = folder.parent / "commits.json"
        self.ages = {commit: place for place, commit in enumerate(content_of(commits))} if commits.exists() else {}
        self.citations: list[Citation] = []
        self.place = self.read = ""

    def at(self, file: str, path: tuple) -> Any:
        """The value at a path of keys and indices, or None where the record has none."""
        self.read = file
        value = self.contents.get(file)
        for key in path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def cite(
        self, file: str, formula: str, *paths: tuple, form: str = "{}", scale: float = 1, missing: str = NO_RECORD
    ) -> str:
        """What the report prints; `missing` where one of the values is not recorded."""
        values = [self.at(file, path) for path in paths]
        if any(value is None or (isinstance(value, list) and None in value) for value in values):
            return missing
        value = FORMULAS[formula](*values)
        text = printed(value, form, scale)
        self.citations.append(Citation(text, file, formula, paths, form, scale, self.place))
        return text

    def number(self, file: str, formula: str, *paths: tuple, scale: float = 1) -> float | None:
        """A number that a figure draws, cited too."""
        values = [self.at(file, path) for path in paths]
        if any(value is None for value in values):
            return None
        self.cite(file, formula, *paths, form="4", scale=scale)
        return FORMULAS[formula](*values) * scale

    def sources(self, place: str) -> list[str]:
        """The files cited at a place, sorted."""
        return sorted({citation.file for citation in self.citations if citation.place == place})

    def comparisons(self) -> Iterator[Record]:
        """Every comparison, a line of a results file among them, by file."""
        for file, content in self.contents.items():
            lines = enumerate(content) if isinstance(content, list) else [(None, content)]
            for index, line in lines:
                if isinstance(line, dict) and line.get("kind") in COMPARISONS:
                    yield Record(self, file, () if index is None else (index,))

    def of_kind(self, *kinds: str) -> list[Record]:
        """The records of other kinds, by file."""
        return [
            Record(self, file)
            for file, content in self.contents.items()
            if isinstance(content, dict) and content.get("kind") in kinds
        ]


class Record:
    """A record whose numbers are printed with citations. What it does not hold prints as ``no record``.

    False where there is none; `lacks` says then what it would be.
    """

    def __init__(self, results: Results, file: str, prefix: tuple = (), lacks: str = ""):
        self.results, self.file, self.prefix, self.lacks = results, file, prefix, lacks

    def __bool__(self) -> bool:
        return self.results.at(self.file, self.prefix) is not None

    @property
    def name(self) -> str:
        """The file below the results, and the line."""
        line = f" line {self.prefix[0] + 1}" if self.prefix else ""
        return f"{self.file.removeprefix('results/').rpartition('.')[0]}{line}"

    def remark(self) -> str:
        """What the notes say of this record, in brackets; mostly nothing."""
        path = "remarks", self.file
        if self.results.at("notes.json", path) is None:
            return ""
        return f" ({self.results.cite('notes.json', 'text', path)})"

    def torch(self) -> str:
        return self.cite("text", ("environment", "torch"))

    def get(self, *path: Any) -> Any:
        """A value for decisions, not for print."""
        return self.results.at(self.file, (*self.prefix, *path))

    def cite(self, formula: str, *paths: tuple, **how: Any) -> str:
        return self.results.cite(self.file, formula, *((*self.prefix, *path) for path in paths), **how)

    def number(self, formula: str, *paths: tuple, scale: float = 1) -> float | None:
        return self.results.number(self.file, formula, *((*self.prefix, *path) for path in paths), scale=scale)

    def setting(self, name: str) -> tuple:
        """The path of a setting's value."""
        return "configuration", name, "value"

    @property
    def modes(self) -> list[str]:
        return list(self.get("summary") or ())

    def mode(self, name: str) -> str | None:
        """The record's mode of this name, or that which `MEANINGS` says it stands for; None where there is none."""
        if name not in MEANINGS:
            return name if name in self.modes else None
        return next((each for each in MEANINGS[name] if each in self.modes and self.by_peers(each) == ("peers" in name)), None)

    def by_peers(self, mode: str) -> bool:
        """Whether a kernel mode ran through the peers' memory: its plan says so, of older records its name."""
        plan = self.plan(mode)
        return "peers" in (plan.split() if plan else mode)

    def ms(self, mode: str) -> str:
        """Slowest-rank median in milliseconds."""
        return self.cite("value", self._median(mode), form="4", scale=1e3)

    def ratio(self, mode: str, to: str = "none") -> str:
        return self.cite("ratio", self._median(to), self._median(mode), form="{:.2f}")

    def hidden(self, mode: str) -> str:
        paths = map(self._median, ("none", mode, EXCHANGES))
        return self.cite("hidden", *paths, form="{:.0f} %", scale=100)

    def exposed(self, mode: str) -> str:
        """Milliseconds beyond the sequential layer without communication."""
        return self.slower_by(mode, to=COMP_ONLY)

    def slower_by(self, mode: str, to: str) -> str:
        """Milliseconds that a mode takes more than another."""
        return self.cite("difference", self._median(mode), self._median(to), form="3", scale=1e3)

    def slower(self, mode: str, than: str) -> bool:
        """For decisions: whether the record holds both modes, and one takes longer than the other by more than noise."""
        seconds = [self.get(*self._median(each)) for each in (mode, than)]
        return None not in seconds and seconds[0] > seconds[1] * (1 + NOISE)

    def _median(self, mode: str) -> tuple:
        return median(self.mode(mode) or mode)

    def tokens(self, mode: str) -> str:
        """Millions of tokens a second, of the whole group. Older comparisons of the FFN alone do not record it."""
        return self.cite("value", ("measurements", mode, "tokens_per_s"), form="3", scale=1e-6, missing=NOT_RECORDED)

    def peak(self, mode: str) -> str:
        """MiB on the fullest rank while the mode ran."""
        return self.cite(
            "largest", ("measurements", mode, "peak_memory_bytes"), form="{:.0f}", scale=2**-20, missing=NOT_RECORDED
        )

    def link(self) -> str:
        """GB/s that a rank sends in the isolated exchanges."""
        return self.cite("link", *LINK, form="3", scale=1e-9)

    def plan(self, mode: str) -> str | None:
        """The plan that a mode ran with; None where the record, as older ones, does not say."""
        return (self.get("plans") or {}).get(mode)

    def trace(self, field: str, form: str = "{:.0f}", scale: float = 1) -> str:
        """A figure of a device trace, of the rank whose call took longest."""
        spans = [rank["span_us"] for rank in self.get("ranks") or ({"span_us": 0},)]
        path = "ranks", spans.index(max(spans)), field
        return self.cite("value", path, form=form, scale=scale, missing=NOT_RECORDED)

    def share_of_gain(self, without: str, of: str) -> str:
        """The share of a mode's gain over none that is lost in the mode ``without`` a piece."""
        return self.cite("share_of_gain", *map(self._median, (without, of, "none")), form="{:.0f} %", scale=100)

    def commit(self) -> str:
        return self.cite("commit", ("environment", "git_commit"))

    def shape(self) -> str:
        return self.cite("shape", *(self.setting(name) for name in ("batch_size", "tokens", "dim", "k")))


def median(mode: str) -> tuple:
    """The path of a mode's slowest-rank median in seconds."""
    return "measurements", mode, "slowest_rank", "p50_s"


LINK = ("exchange", "bytes_sent_per_exchange"), ("exchange", "exchanges"), median(EXCHANGES)


def printed(value: Any, form: str, scale: float) -> str:
    """A value as text: by a format, or a number of significant digits, without an exponent."""
    if not form.isdecimal():
        return form.format(value if scale == 1 else value * scale)
    rounded = float(f"{value * scale:.{int(form) - 1}e}")
    decimals = int(form) - 1 - (math.floor(math.log10(abs(rounded))) if rounded else 0)
    return f"{rounded:.{max(0, decimals)}f}"


def content_of(path: Path) -> Any:
    if path.suffix != ".jsonl":
        return schema.read_json(path)
    try:
        return [schema.parsed(line) for line in results_file.whole_lines(path)]
    except ValueError as error:
        raise ValueError(f"{path}: a line is no JSON ({error})") from None
