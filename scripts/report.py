#!/usr/bin/env python3
"""Builds reports/report.md, reports/report.html and the plots from the committed records; nothing is typed in by hand.

    python scripts/report.py            # writes them; needs the `report` extra: matplotlib, markdown-it-py
    python scripts/report.py --check    # writes nothing; status 1 where report.md is not what the records say

The text is in reports/text/, one Markdown template a section (Jinja: `{{ record("results/...").ms("kernel") }}`).
Numbers come from placeholders alone, and each is cited (`reporting.citations`): below every table, plot and section
stand the files that its numbers come from. Figures that only prose had are in reports/notes.json, with their source and
commit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "research_topic_2")]

import jinja2  # noqa: E402
from reporting.citations import Record, Results  # noqa: E402
from reporting.figures import Figures  # noqa: E402
from reporting.listings import Listings  # noqa: E402
from reporting.markdown import source_line  # noqa: E402
from reporting.modelled import Modelled  # noqa: E402
from reporting.page import page  # noqa: E402
from reporting.tables import Tables  # noqa: E402


def build(reports: Path, figures: Path) -> tuple[str, Results]:
    """The report of the records and texts below ``reports`` as Markdown, and what it cites; plots go to ``figures``."""
    results = Results(reports / "results")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    known = {
        "record": lambda file: Record(results, file),
        "note": lambda name: _note(results, name),
        "tables": Tables(results),
        "modelled": Modelled(results),
        "listings": Listings(results),
        "figures": Figures(results, figures),
    }
    sections = []
    for path in sorted((reports / "text").glob("*.md")):
        results.place = path.stem
        text = environment.from_string(path.read_text()).render(known).strip()
        sources = results.sources(path.stem)
        sections.append(text + (f"\n\n{source_line(sources, 'In the text')}" if sources else ""))
    return "\n\n".join(sections) + "\n", results


def _note(results: Results, name: str) -> str:
    return results.cite("notes.json", "text", ("notes", name, "text"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare report.md with what would be written")
    options = parser.parse_args()
    reports = ROOT / "reports"
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            current = build(reports, Path(folder))[0] == (reports / "report.md").read_text()
        print("report.md is what the records say" if current else "report.md is stale: run python scripts/report.py")
        return 0 if current else 1
    markdown, results = build(reports, reports / "figures")
    (reports / "report.md").write_text(markdown)
    (reports / "report.html").write_text(page(markdown, reports))
    print(f"reports/report.md and report.html: {len(results.citations)} numbers from {len(results.contents)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
