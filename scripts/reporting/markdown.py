"""Tables as Markdown, each with the files that its numbers come from."""

from __future__ import annotations

import contextlib
import re
from typing import Callable, Iterable, Iterator

from .citations import NOT_RECORDED, Results

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?: %)?")


class TableMaker:
    """What makes tables from a `Results`."""

    def __init__(self, results: Results):
        self.results = results

    @contextlib.contextmanager
    def table_of(self, name: str) -> Iterator[Callable[[], str]]:
        """A place of its own for the citations of a table; yields what says where its numbers come from."""
        before = self.results.place
        place = self.results.place = f"{before}/{name}"
        try:
            yield lambda: source_line(self.results.sources(place))
        finally:
            self.results.place = before

    @staticmethod
    def shown(what: str, head: tuple, rows: list, sources: Callable[[], str] | None = None) -> str:
        """The table, or that there is no record of `what`; `sources` where its rows do not name the files."""
        if not rows:
            return f"No record yet: {what}."
        return f"{table(head, rows)}\n\n{sources()}" if sources else table(head, rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The table, without the columns that no row fills; columns of numbers are aligned to the right."""
    head, rows = tuple(head), [tuple(row) for row in rows]
    filled = {i: [row[i] for row in rows if row[i] not in ("", NOT_RECORDED)] for i in range(len(head))}
    kept = [i for i, cells in filled.items() if cells]
    rules = {i: "---:" if all(map(_NUMBER.fullmatch, filled[i])) else "---" for i in kept}
    lines = [[row[i] for i in kept] for row in (head, rules, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source_line(files: Iterable[str], what: str = "Source") -> str:
    """The files that numbers come from."""
    return f"*{what}: {', '.join(f'`{file}`' for file in files)}*"
