#!/usr/bin/env python3
"""Builds reports/report.md, reports/report.html and the plots from the committed records; nothing is typed in by hand.

    python scripts/report.py            # writes them; needs the `report` extra: matplotlib, markdown-it-py
    python scripts/report.py --check    # writes nothing; status 1 where one of them is not what the records say

A file below reports/results that is no record of this schema is named, and the status is 2.

The text is in reports/text/, one Markdown template a section (Jinja: `{{ record("results/...").ms("kernel") }}`).
Numbers come from placeholders alone, and each is cited (`reporting.citations`): below every table, plot and section
stand the files that its numbers come from. Which record a text speaks of follows from a rule (`reporting.newest`), for
which reports/commits.json keeps the order of the records' commits. Figures that only prose had are in
reports/notes.json, with their source and commit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT), str(ROOT / "research_topic_2")]

import jinja2  # noqa: E402
import results_file  # noqa: E402
from rankmixer import schema  # noqa: E402
from reporting.checks import Checks  # noqa: E402
from reporting.citations import Record, Results  # noqa: E402
from reporting.figures import Figures  # noqa: E402
from reporting.listings import Listings  # noqa: E402
from reporting.markdown import source_line  # noqa: E402
from reporting.modelled import Modelled  # noqa: E402
from reporting.newest import Newest, missing  # noqa: E402
from reporting.page import page  # noqa: E402
from reporting.tables import Tables  # noqa: E402

from compile_overlap.measure.records import call_from_record  # noqa: E402


def build(reports: Path, figures: Path) -> tuple[str, Results]:
    """The report of the records and texts below ``reports`` as Markdown, and what it cites; plots go to ``figures``.

    Raises ValueError, which names the section and the record, where a value is not of a kind that can be printed.
    """
    results = Results(reports / "results")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    known = {
        "record": lambda file: Record(results, file),
        "newest": Newest(results),
        "missing": missing,
        "note": lambda name: _note(results, name),
        "tables": Tables(results),
        "checks": Checks(results),
        "modelled": Modelled(results),
        "listings": Listings(results),
        "figures": Figures(results, figures),
    }
    sections = []
    for path in sorted((reports / "text").glob("*.md")):
        results.place = path.stem
        try:
            text = environment.from_string(path.read_text("utf-8")).render(known).strip()
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            what = f"{path}: cannot be written ({type(error).__name__}: {error})"
            raise ValueError(f"{what}; the last record read is {results.read}") from error
        sources = results.sources(path.stem)
        sections.append(text + (f"\n\n{source_line(sources, 'In the text')}" if sources else ""))
    return "\n\n".join(sections) + "\n", results


def _note(results: Results, name: str) -> str:
    return results.cite("notes.json", "text", ("notes", name, "text"))


def ordered_commits(reports: Path) -> list[str]:
    """The records' commits, the oldest first; those in commits.json where git does not know all of them here."""
    file = reports / "commits.json"
    known = schema.read_json(file) if file.exists() else []
    command = ["git", "rev-list", "--date-order", "--reverse", "HEAD"]
    history = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    contents = Results(reports / "results").contents.values()
    lines = [line for content in contents for line in (content if isinstance(content, list) else [content])]
    named = {line["environment"]["git_commit"] for line in lines if isinstance(line, dict) and "environment" in line}
    return [commit for commit in (history if set(known) <= set(history) else known) if commit in named]


def unfit(reports: Path) -> list[str]:
    """What is wrong with each file of the records that `schema` does not take: its numbers may mean something else."""
    problems = []
    for path in sorted((reports / "results").rglob("*.json*")):
        try:
            if path.suffix == ".jsonl":
                results_file.read(path)
            elif not path.name.endswith(".perfetto.json"):
                _check_kernels(path, schema.read(path))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems


def _check_kernels(path: Path, content: dict) -> None:
    try:
        if content["kind"] == "trace":
            call_from_record(content)
    except ValueError as error:
        raise ValueError(f"{path}: is no trace ({schema.shortened(error)})") from None


def write(reports: Path, markdown: str, figures: Path) -> list[Path]:
    """Write report.md and report.html beside the `figures`, to which drawn pictures are added; returns the files."""
    folder = figures.parent
    for path in (reports / "figures").glob("*.svg"):
        if not (figures / path.name).exists():
            shutil.copy(path, figures)
    (folder / "report.md").write_text(markdown, "utf-8")
    (folder / "report.html").write_text(page(markdown, folder), "utf-8")
    return [folder / "report.md", folder / "report.html", *sorted(figures.glob("*.svg"))]


def stale(reports: Path) -> list[str]:
    """The files of a report that are not what would be written."""
    with tempfile.TemporaryDirectory() as folder:
        markdown, _ = build(reports, Path(folder) / "figures")
        files = write(reports, markdown, Path(folder) / "figures")
        names = [str(path.relative_to(folder)) for path in files]
        same = [(reports / name).exists() and (reports / name).read_bytes() == (Path(folder) / name).read_bytes()
                for name in names]  # fmt: skip
        commits = reports / "commits.json"
        same_commits = commits.exists() and schema.read_json(commits) == ordered_commits(reports)
    return [name for name, each in zip((*names, "commits.json"), (*same, same_commits)) if not each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare them with what would be written")
    options = parser.parse_args()
    reports = ROOT / "reports"
    if problems := unfit(reports):
        print("\n".join(problems), file=sys.stderr)
        return 2
    try:
        return _check(reports) if options.check else _write(reports)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _check(reports: Path) -> int:
    found = stale(reports)
    stale_files = f"stale: {', '.join(found)}: run python scripts/report.py"
    print(stale_files if found else "the report is what the records say")
    return 1 if found else 0


def _write(reports: Path) -> int:
    (reports / "commits.json").write_text(json.dumps(ordered_commits(reports), indent=1) + "\n")
    markdown, results = build(reports, reports / "figures")
    write(reports, markdown, reports / "figures")
    print(f"reports/report.md and report.html: {len(results.citations)} numbers from {len(results.contents)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
