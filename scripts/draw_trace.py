#!/usr/bin/env python3
r"""Draws traces that `trace_overlap.py` or `measure.py` wrote, below one another on one time axis.

    python scripts/draw_trace.py --output picture.svg MODE.trace.json [MODE.trace.json ...]

The title says where the traces lie, as given. An output that ends in .png needs matplotlib. The same traces give the
same bytes of SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compile_overlap.measure import trace_figures  # noqa: E402
from compile_overlap.measure.picture import draw  # noqa: E402
from compile_overlap.measure.records import call_from_record  # noqa: E402
from compile_overlap.measure.scene import Scene  # noqa: E402


def picture(files: list[Path]) -> Scene:
    """Rank 0 of each trace. Raises ValueError for what is not a trace."""
    panels, devices = [], []
    for file in files:
        content = json.loads(file.read_text())
        try:
            call, environment = call_from_record(content), content["environment"]
            figures = trace_figures(call) | content["ranks"][0]  # older records have fewer
            panels.append((f"{content['mode']}, {content['pass']}", call, figures))
            devices.append(f"{len(content['ranks'])} x {environment['device']}, torch {environment['torch']}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: is not a trace of trace_overlap.py: {error!r}") from error
    folders = dict.fromkeys(file.parent.as_posix() for file in files)
    return draw(panels, f"Rank 0 of {'; '.join(dict.fromkeys(devices))} ({', '.join(folders)})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="draw_trace.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="an .svg or .png file")
    options = parser.parse_args(arguments)
    try:
        if options.output.suffix not in (".svg", ".png"):
            raise ValueError(f"output={str(options.output)!r}: must end in .svg or .png")
        scene = picture(options.traces)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output.suffix == ".png":
        scene.png(options.output)
    else:
        options.output.write_text(scene.svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
