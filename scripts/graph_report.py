"""The report of `dump_graphs.py`: one HTML page without external resources, timelines as inline SVG, light and dark."""

from __future__ import annotations

import itertools
from html import escape
from pathlib import Path
from typing import Any, Iterator

from compile_overlap.config import Settings
from compile_overlap.schedule import BACKWARD, FORWARD, FREE, GEMM, START, WAIT, Interval, Schedule
from passes import verify
from passes.base import PassReport

LEFT, RIGHT, LANE, EXCHANGE_Y, COMPUTE_Y, MARKS_Y = 82, 30, 56, 10, 80, 140
INNER, MOST_INNER, SMALLEST = 1080, 16000, 13  # widths in pixels: all, all at most, the shortest block
CHARACTER = 6.1  # width of one at the labels' font size
COLORS = 6

STYLE = """
:root { color-scheme: light dark; --ink:#1d2430; --soft:#5a6474; --page:#f7f8fa; --card:#fff; --line:#d9dee6;
  --good:#1a7f4b; --bad:#c02b2b; --stall:#c02b2b;
  --c0:#3b76c4; --c1:#d9822b; --c2:#3f9a55; --c3:#9a5bb5; --c4:#2b9aa5; --c5:#c4517a }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e8ee; --soft:#9aa5b5; --page:#14181e; --card:#1b2129;
  --line:#333c48; --good:#57c98a; --bad:#ff7b72; --stall:#ff7b72;
  --c0:#6aa5f0; --c1:#f0a455; --c2:#6cc884; --c3:#c391dc; --c4:#5cc5d0; --c5:#ee87aa } }
* { box-sizing:border-box }
body { margin:0 auto; padding:24px; max-width:1320px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif }
h1 { font-size:24px; margin:0 0 4px } h2 { font-size:19px; margin:0 0 8px } h3 { font-size:15px; margin:20px 0 6px }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:18px 20px; margin:18px 0 }
pre, code, td.code { font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
pre { margin:0; overflow-x:auto } pre b { color:var(--c0) } a { color:var(--c0) }
.scroll { overflow-x:auto } .soft { color:var(--soft) } .good { color:var(--good) } .bad { color:var(--bad) }
.numbers { display:flex; flex-wrap:wrap; gap:10px 36px; margin:6px 0 12px }
.numbers b { display:block; font-size:21px; line-height:1.25 }
table { border-collapse:collapse; width:100%; font-size:13.5px }
th { text-align:left; font-weight:600; color:var(--soft) } td.number, th.number { text-align:right }
th, td { padding:4px 12px 4px 0; border-bottom:1px solid var(--line); vertical-align:top }
td.code { white-space:nowrap } summary { cursor:pointer; margin-top:14px }
svg { display:block; font:11px system-ui,-apple-system,"Segoe UI",sans-serif; fill:var(--ink) }
.axis { stroke:var(--line) } .tick { fill:var(--soft) }
.stall { fill:url(#hatch); stroke:var(--stall); stroke-dasharray:3 2 }
.stalled { fill:var(--stall); font-weight:600 } .mark { stroke:var(--soft) } .block { fill-opacity:.3 }
.free { fill-opacity:.1; stroke-dasharray:4 2 }
""" + "".join(f".k{i} {{ fill:var(--c{i}); stroke:var(--c{i}) }}\n" for i in range(COLORS))


def write_report(folder: Path, facts: str, recorder: Any, ranks: list[str], error: Exception | None) -> Path:
    """Write `index.html` into the folder of a dump; returns its path."""
    directions = [FORWARD] + [BACKWARD] * any(wrapper.direction == BACKWARD for wrapper in recorder.wrappers)
    page = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>What the compiler does: {escape(' '.join(facts.splitlines()[0].split()))}</title><style>{STYLE}</style></head><body>",
        _HATCH,
        "<h1>What the compiler does</h1><div class='soft'>Graphs, schedules and generated code of one expert-parallel "
        "FFN. Every name links to its file.</div>",
    ]
    if error is not None:
        text = f"{type(error).__name__}: {error}"
        page.append(f"<section><h2 class='bad'>The run failed; this is what was recorded until then</h2>"
                    f"<pre>{escape(text[:4000])}</pre></section>")
    page.append(f"<section><h2>Configuration</h2><pre>{escape(facts)}</pre>{_ranks(ranks)}</section>")
    page += [_direction_section(direction, recorder) for direction in directions]
    page += [_passes_section(recorder), _files_section(folder, recorder), "</body></html>\n"]
    index = folder / "index.html"
    index.write_text("\n".join(page), "utf-8")
    return index


_HATCH = (
    "<svg width='0' height='0' style='position:absolute' aria-hidden='true'><defs><pattern id='hatch' width='6' "
    "height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><line x1='0' y1='0' x2='0' y2='6' "
    "style='stroke:var(--stall);stroke-opacity:.35;stroke-width:2'/></pattern></defs></svg>"
)


def _ranks(lines: list[str]) -> str:
    rows = (f"<li class='{'bad' if 'DIFFERENT' in line else 'good'}'>{escape(line)}</li>" for line in lines)
    return f"<h3>Compared with the other ranks' dumps</h3><ul>{''.join(rows)}</ul>" if lines else ""


def _direction_section(direction: str, recorder: Any) -> str:
    found = recorder.schedules.get(direction, [])
    body = [f"<section id='{direction}'><h2>{direction.capitalize()}</h2>"]
    if not found:
        body.append("<p>No schedule: this graph holds no exchange of ours (one rank exchanges nothing), its reorder "
                    "pass is switched off, or it was not compiled.</p>")
    for each in found:
        body += [_numbers(each.schedule), f"<div class='scroll'>{timeline(each.schedule)}</div>"]
    for index, wrapper in enumerate(recorder.wrappers):
        if wrapper.direction == direction and (found or verify.order_in_wrapper(wrapper.code)):
            body.append(_order(found, wrapper, recorder, index))
    body.append(_graph(direction, recorder))
    return "\n".join([*body, "</section>"])


def _numbers(schedule: Schedule) -> str:
    starts = [interval for interval in schedule.simulate() if interval.step.kind == START]
    exchanged = sum(interval.end - interval.begin for interval in starts)
    rate = exchanged / sum(schedule.plan.sizes[interval.step.chunk] for interval in starts)
    exposed, length = schedule.exposed(), schedule.length()
    cells = {
        f"{max(0.0, 1 - exposed / exchanged):.0%}": "of the exchange time hidden, simulated",
        f"{exposed:.2f} of {exchanged:.2f}": "exposed of the exchange time",
        f"{length:.2f}": "from the first step to the last",
        f"{schedule.in_flight()} of {sum(schedule.plan.sizes)}": "tokens in flight or unread at most",
    }
    shown = "".join(f"<div><b>{value}</b><span class='soft'>{name}</span></div>" for value, name in cells.items())
    unit = (f"<div class='soft'>Simulated, not measured: the unit is one token's forward computation, an exchange "
            f"takes {rate:.3g} of it for each token. A colour is a chunk, numbered in the order of this direction (backward may run forward's last chunk first); dashed: weight gradients, which no "
            "exchange waits for; hatched: computation waits; marks below: waits that cost nothing.</div>")
    return f"<div class='numbers'>{shown}</div>{unit}"


def timeline(schedule: Schedule) -> str:
    """The simulated schedule as SVG: exchanges above, computation below, waits that cost nothing as marks."""
    intervals, total = schedule.simulate(), schedule.length()
    shortest = min(i.end - i.begin for i in intervals if i.end - i.begin > 1e-9)
    scale = min(max(INNER / total, SMALLEST / shortest), max(INNER, MOST_INNER) / total)
    marks = list(_marks(schedule, intervals))
    bottom = MARKS_Y + 14 + CHARACTER * max((len(label) for _, label in marks), default=0)
    width, height = LEFT + total * scale + RIGHT, bottom + 44
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}'><title>{schedule.direction}, plan {escape(str(schedule.plan))}</title>"
    ]
    for name, y in (("exchange", EXCHANGE_Y), ("compute", COMPUTE_Y)):
        middle = y + LANE / 2
        parts.append(f"<text x='0' y='{middle + 4:.1f}' font-weight='600'>{name}</text>"
                     f"<line class='axis' x1='{LEFT}' x2='{width - RIGHT:.1f}' y1='{y + LANE}' y2='{y + LANE}'/>")
    for interval in intervals:
        if interval.end - interval.begin > 1e-9:
            parts.append(_block(schedule, interval, scale))
    for time, label in marks:
        x, y = LEFT + time * scale, MARKS_Y
        parts.append(f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{COMPUTE_Y + LANE}' y2='{y + 4}'/>"
                     f"<text class='tick' transform='translate({x + 3.5:.1f} {y + 8}) rotate(90)'>"
                     f"{escape(label)}</text>")
    parts.append(_axis(total, scale, bottom + 10))
    return "".join([*parts, "</svg>"])


def _block(schedule: Schedule, interval: Interval, scale: float) -> str:
    step, label = interval.step, schedule.label(interval.step)
    x, width = LEFT + interval.begin * scale, (interval.end - interval.begin) * scale
    y = EXCHANGE_Y if step.lane == "exchange" else COMPUTE_Y
    kind = "stall" if step.kind == WAIT else f"block k{step.chunk % COLORS}{' free' if step.kind == FREE else ''}"
    inset = min(1.0, width / 4)
    tip = f"{label}: {interval.begin:.2f} to {interval.end:.2f}; {step.reason}"
    rect = (f"<rect class='{kind}' x='{x + inset:.1f}' y='{y}' width='{width - 2 * inset:.1f}' height='{LANE}' "
            "rx='3'/>")
    middle = f"{x + width / 2:.1f}", f"{y + LANE / 2:.1f}"
    turn = "" if width >= len(label) * CHARACTER + 4 else " rotate(-90)"
    text = (f"<text class='{'stalled' if step.kind == WAIT else ''}' text-anchor='middle' dy='4' "
            f"transform='translate({middle[0]} {middle[1]}){turn}'>{escape(label)}</text>")
    return f"<g><title>{escape(tip)}</title>{rect}{text if width >= SMALLEST - 2 else ''}</g>"


def _marks(schedule: Schedule, intervals: tuple[Interval, ...]) -> Iterator[tuple[float, str]]:
    """(time, label) of the waits that cost nothing; those at one time share a label."""
    free = (i for i in intervals if i.step.kind == WAIT and i.end - i.begin <= 1e-9)
    for time, group in itertools.groupby(free, key=lambda interval: round(interval.begin, 6)):
        names = [schedule.label(interval.step).removeprefix("wait ") for interval in group]
        yield time, "wait " + (" ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}")


def _axis(total: float, scale: float, y: float) -> str:
    wanted = 90 / scale
    ten = 10.0 ** next(n for n in range(-6, 12) if 10.0**n * 10 >= wanted)
    gap = next(ten * factor for factor in (1, 2, 5, 10) if ten * factor >= wanted)
    parts = [f"<line class='axis' x1='{LEFT}' x2='{LEFT + total * scale:.1f}' y1='{y:.1f}' y2='{y:.1f}'/>",
             f"<text x='0' y='{y + 15:.1f}' class='tick'>time</text>"]
    for index in range(int(total / gap) + 1):
        x = LEFT + index * gap * scale
        parts.append(f"<line class='axis' x1='{x:.1f}' x2='{x:.1f}' y1='{y:.1f}' y2='{y + 4:.1f}'/>"
                     f"<text class='tick' x='{x:.1f}' y='{y + 16:.1f}' text-anchor='middle'>{index * gap:g}</text>")
    return "".join(parts)


def _order(found: list[Any], wrapper: Any, recorder: Any, index: int) -> str:
    """The anchors in order, with what `verify` expected and what the wrapper holds."""
    steps = [(each.schedule, step, node) for each in found for step, node in zip(each.schedule.steps, each.nodes)]
    expected, actual = list(wrapper.expected), verify.order_in_wrapper(wrapper.code)
    if expected and "gemm" not in expected:
        actual = [step for step in actual if step != "gemm"]
    code = recorder.wrapper_file(index)
    link = f"<a href='{code}'>{code}</a>"
    if not expected:
        listed = escape(", ".join(actual)) or "none of our exchanges"
        return f"<h3>Order in the wrapper</h3><p>Nothing was scheduled. {link} holds: {listed}</p>"
    if expected == actual:
        verdict = f"<span class='good'>{link} issues these {len(actual)} steps in the order of the schedule.</span>"
    else:
        at = next((i for i, pair in enumerate(itertools.zip_longest(expected, actual)) if pair[0] != pair[1]), 0)
        verdict = f"<span class='bad'>{link} leaves the schedule at step {at + 1}.</span>"
    texts = _node_texts(wrapper.direction, recorder)
    pairs = itertools.zip_longest(expected, actual, fillvalue="nothing")
    rows = []
    for number, (schedule, step, node) in enumerate(steps, 1):
        compared = step.kind not in (GEMM, FREE) or "gemm" in expected
        want, got = next(pairs, ("nothing", "nothing")) if compared else ("not compared", "")
        good = "good" if want == got or not compared else "bad"
        rows.append(
            f"<tr><td class='number'>{number}</td><td><b>{escape(schedule.label(step))}</b></td><td>{want}</td>"
            f"<td class='{good}'>{got}{' ✓' if compared and want == got else ''}</td><td class='soft'>"
            f"{escape(step.reason)}</td><td class='code'>{escape(texts.get(node, node))}</td></tr>"
        )
    rows += [f"<tr><td></td><td></td><td>{want}</td><td class='bad'>{got}</td><td></td><td></td></tr>"
             for want, got in pairs]
    return (f"<h3>Anchors in order</h3><p>{verdict}</p><div class='scroll'><table><tr><th class='number'>#</th>"
            "<th>step</th><th>expected</th><th>in the wrapper</th><th>why here</th><th>graph node</th></tr>"
            f"{''.join(rows)}</table></div>")


def _scheduled_run(direction: str, recorder: Any) -> tuple[int, Any] | None:
    runs = ((i, run) for i, run in enumerate(recorder.runs) if (run.stage, run.name) == (direction, "reorder"))
    return next(((i, run) for i, run in runs if run.after), None)


def _node_texts(direction: str, recorder: Any) -> dict[str, str]:
    """One short line for each node of the graph after `Reorder`: name, dtype and shape, operator."""
    found = _scheduled_run(direction, recorder)
    texts = {}
    for line in found[1].after if found else ():
        texts[line.names[0]] = " ".join(line.text.split("(")[0].split()).replace(".default", "")
    return texts


def _graph(direction: str, recorder: Any) -> str:
    found = _scheduled_run(direction, recorder)
    if found is None or found[1].report is None:
        return ""
    text = recorder.text_of(found[1].after, direction)
    lines = (f"<b>{escape(line)}</b>" if "   <- " in line else escape(line) for line in text.splitlines())
    file = recorder.pass_file(found[0], "after")
    return (f"<details><summary>The graph after reorder, anchors marked (<a href='{file}'>{file}</a>)</summary>"
            f"<pre>{chr(10).join(lines)}</pre></details>")


def _passes_section(recorder: Any) -> str:
    rows = []
    for index, run in enumerate(recorder.runs):
        links = " ".join(f"<a href='{recorder.pass_file(index, when)}'>{when}</a>" for when in ("before", "after"))
        rows.append(_pass_row(run.stage, run.name, run.report, links, len(run.before), len(run.after)))
    for direction, report in recorder.verified.items():
        rows.append(_pass_row(direction, report.name, report, "", report.before, report.after))
    disabled = Settings.from_environment().disabled_passes
    off = f" (here: {escape(', '.join(disabled))})" if disabled else ""
    return ("<section id='passes'><h2>Passes</h2><div class='scroll'><table><tr><th>graph</th><th>pass</th>"
            "<th class='number'>matches</th><th class='number'>time, ms</th><th class='number'>operators before</th>"
            f"<th class='number'>after</th><th>files</th></tr>{''.join(rows)}</table></div><p class='soft'>A pass "
            f"without matches found none of our exchanges, had nothing to do, or is switched off{off}.</p></section>")


def _pass_row(stage: str, name: str, report: PassReport | None, links: str, before: int, after: int) -> str:
    matches, time = (report.matches, f"{report.seconds * 1e3:.1f}") if report else (0, "")
    numbers = "".join(f"<td class='number'>{value}</td>" for value in (matches, time, before, after))
    return f"<tr><td>{stage}</td><td>{escape(name)}</td>{numbers}<td>{links}</td></tr>"


def _files_section(folder: Path, recorder: Any) -> str:
    named = {recorder.graph_file(i): f"{name} graph" for i, (name, _) in enumerate(recorder.graphs)}
    listed = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "index.html"):
        name = file.relative_to(folder).as_posix()
        listed.setdefault(name.split("/")[0] if "/" in name else "", []).append(name)
    parts = []
    for group, names in listed.items():
        rows = ((escape(name), _note(named.get(name))) for name in names)
        items = "".join(f"<li><a href='{name}'>{name}</a>{note}</li>" for name, note in rows)
        parts.append(f"<details {'open' if group != 'depyf' else ''}><summary>{group or 'this folder'}, {len(names)} "
                     f"files</summary><ul>{items}</ul></details>")
    return f"<section id='files'><h2>Files</h2>{''.join(parts)}</section>"


def _note(text: str | None) -> str:
    return f" <span class='soft'>{escape(text)}</span>" if text else ""
