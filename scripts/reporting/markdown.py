"""Tables as Markdown, each with the files that its numbers come from."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterable, Iterator

from .citations import NOT_RECORDED, Results


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
    """The table, without the columns that no row fills."""
    head, rows = tuple(head), [tuple(row) for row in rows]
    kept = [i for i in range(len(head)) if any(row[i] not in ("", NOT_RECORDED) for row in rows)]
    lines = [[row[i] for i in kept] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source_line(files: Iterable[str], what: str = "Source") -> str:
    """The files that numbers come from."""
    return f"*{what}: {', '.join(f'`{file}`' for file in files)}*"
