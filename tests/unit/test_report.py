"""The report: every number is cited and follows from its record, the same records give the same bytes, one page is all."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("markdown_it")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import report  # noqa: E402
from reporting.citations import Record, Results, content_of, printed  # noqa: E402
from reporting.figures import AS_PLANNED, chunks_of  # noqa: E402
from reporting.markdown import table  # noqa: E402
from reporting.page import page  # noqa: E402

REPORTS = ROOT / "reports"
OVERLAP = "results/h200x2-torch-2.11.0-shm/overlap.json"
NUMBER = re.compile(r"(?<![A-Za-z\d.])\d+(?:\.\d+)?(?:e[-+]\d+)?")  # not in names such as H200
CODE, PLACEHOLDER = re.compile(r"`[^`]*`"), re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    markdown, results = report.build(REPORTS, folder / "figures")
    return folder, markdown, results


def tables(markdown):
    """(rows without code spans, the files named below) of each table."""
    for block in re.split(r"\n\n", markdown):
        if block.startswith("| ") and "| --- |" in block:
            rows = [CODE.sub("", line) for line in block.splitlines()[2:]]
            following = markdown[markdown.index(block) + len(block) :].lstrip().splitlines()
            sources = following[0] if following and following[0].startswith("*Source: ") else None
            yield rows, sources and set(re.findall(r"`([^`]+)`", sources))


def test_every_number_of_every_table_is_cited_from_the_files_below_it(built):
    _, markdown, results = built
    found = 0
    for rows, sources in tables(markdown):
        cited = {
            number
            for each in results.citations
            if sources is None or each.file in sources
            for number in NUMBER.findall(each.text)
        }
        for row in rows:
            numbers = {number for number in NUMBER.findall(row)} - {"0"}
            assert numbers <= cited, row
            found += len(numbers)
    assert found > 500


def test_a_number_that_is_cited_nowhere_would_be_found(built):
    _, markdown, results = built
    shown = Record(results, OVERLAP).ms("kernel")
    wrong = markdown.replace(f"| {shown} |", "| 123.4567 |")
    cited = {number for each in results.citations for number in NUMBER.findall(each.text)}
    assert (
        any("123.4567" in NUMBER.findall(row) for rows, _ in tables(wrong) for row in rows) and "123.4567" not in cited
    )


def gemms(B, P, D, H):
    """(operations, bytes) of the two forward GEMMs of a token in bf16: P*B rows, D -> 2H and H -> D."""
    rows = B * P
    elements = (rows * D + D * 2 * H + rows * 2 * H) + (rows * H + H * D + rows * D)
    return 2 * rows * D * 2 * H + 2 * rows * H * D, 2 * elements


FORMULAS = {
    "value": lambda value: value, "largest": max, "ratio": lambda a, b: a / b, "difference": lambda a, b: a - b,
    "hidden": lambda serial, mode, exchanges: serial / exchanges - mode / exchanges,
    "share_of_gain": lambda without, whole, none: 1 - (none - without) / (none - whole),
    "link": lambda sent, count, seconds: sent / (seconds / count),
    "gemm_rate": lambda B, T, D, k, scale, direction, us: {"forward": 1, "forward+backward": 3}[direction]
    * 2 * B * T * (D * 2 * D * k * scale + D * k * scale * D) / us * 1e6,
    "intensity": lambda B, P, D, k, scale: (lambda flops, size: flops / size)(*gemms(B, P, D, D * k * scale)),
    "intensity_on_ranks": lambda B, ranks, D, k, scale: FORMULAS["intensity"](B, len(ranks), D, k, scale),
    "intensity_of_split_rows": lambda B, P, D, k, scale: FORMULAS["intensity"](B / 4, P, D, k, scale),
    "weight_bytes": lambda T, P, D, k, scale: T / P * (D * 2 * D * k * scale + D * k * scale * D) * 2,
    "weight_bytes_of_split_rows": lambda *values: 4 * FORMULAS["weight_bytes"](*values),
    "partial_sums": lambda B, T, D: 3 * 2 * 4 * B * T * D,
    "commit": lambda commit: commit[:7], "text": str,
    "shape": lambda B, T, D, k: f"({B}, {T}, {D}, {k})", "length": len,
    "joined": lambda texts: "; ".join(texts) or "nothing",
}  # fmt: skip


def at(content, path):
    for key in path:
        content = content[key]
    return content


def test_every_citation_follows_from_its_file(built):
    _, _, results = built
    files = {}
    for each in results.citations:
        if each.file not in files:
            text = (REPORTS / each.file).read_text()
            files[each.file] = (
                [json.loads(line) for line in text.splitlines()] if each.file.endswith("l") else json.loads(text)
            )
        values = [at(files[each.file], path) for path in each.paths]
        assert printed(FORMULAS[each.formula](*values), each.form, each.scale) == each.text, each
    assert len(results.citations) > 1000 and len(files) > 20


def test_medians_are_those_of_the_samples(built):
    _, _, results = built
    checked = 0
    for each in results.citations:
        for path in (path for path in each.paths if path[-1] == "p50_s" and "measurements" in path):
            measurement = at(content_of(REPORTS / each.file), path[:-2])
            assert path[-2] == "slowest_rank"
            slowest = statistics.median(map(max, zip(*measurement["samples_s"])))
            assert measurement["slowest_rank"]["p50_s"] == pytest.approx(slowest, rel=1e-9)
            checked += 1
    assert checked > 200


@pytest.mark.parametrize("path", sorted((REPORTS / "text").glob("*.md")), ids=lambda path: path.stem)
def test_the_text_has_no_number_of_its_own(path):
    text = CODE.sub("", PLACEHOLDER.sub("", path.read_text()))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert not re.findall(r"(?<![A-Za-z0-9])\d[\d.]*", prose)


def test_the_same_records_give_the_same_bytes(built, tmp_path):
    folder, markdown, _ = built
    again, _ = report.build(REPORTS, tmp_path / "figures")
    assert again == markdown
    plots = sorted(path.name for path in (tmp_path / "figures").iterdir())
    expected = {"hidden_link", "latency_chunks", "pipeline", "roofline", "scaling", "timeline_nvlink", "timeline_shm"}
    assert {f"{name}.svg" for name in expected} <= set(plots)
    assert all((tmp_path / "figures" / name).read_bytes() == (folder / "figures" / name).read_bytes() for name in plots)
    assert page(markdown, tmp_path) == page(markdown, folder)


def test_another_value_in_a_record_is_another_number_in_the_report(built, tmp_path):
    _, before, results = built
    shown = Record(results, OVERLAP).ms("kernel")
    shutil.copytree(REPORTS, tmp_path / "reports")
    file = tmp_path / "reports" / OVERLAP
    content = json.loads(file.read_text())
    content["measurements"]["kernel"]["slowest_rank"]["p50_s"] = 0.0061234
    content["environment"]["git_commit"] = "f" * 40
    content["plans"] = {"kernel": "4,12,12,4 r7 a2 b1 s16", "kernel:chunks=4": None}
    file.write_text(json.dumps(content))
    (tmp_path / "reports" / "results" / "cpu-netns" / "forward.json").unlink()
    markdown, _ = report.build(tmp_path / "reports", tmp_path / "figures")
    assert "6.123 ms" in markdown and "| `kernel` | forward | 6.123 |" in markdown and "fffffff" in markdown
    assert "Plans: `overlap` `kernel` `4,12,12,4 r7 a2 b1 s16`." in markdown and "Plans: `overlap`" not in before
    assert markdown.count(shown) < before.count(shown)
    lacking = "No record yet: `none`, `passes` over a shaped CPU link, forward."
    assert markdown.count(lacking) == 2 and lacking not in before


def test_without_records_the_report_says_so(tmp_path):
    shutil.copytree(REPORTS / "text", tmp_path / "text")
    (tmp_path / "results").mkdir()
    (tmp_path / "notes.json").write_text("{}")
    markdown, results = report.build(tmp_path, tmp_path / "figures")
    assert results.citations == [] and "no record ms" not in markdown and "no recordx" not in markdown
    assert "No record yet: `none`, `kernel by peers` over NVLink, forward, compiled." in markdown
    assert "No record yet: faults of a rank." in markdown and "No record.\n" not in markdown
    assert "Roofline of the forward GEMMs and of whole layers: no record." in markdown


ENVIRONMENT = {"git_commit": "a" * 40, "torch": "2.6.0", "device": "CPU"}
CASE = {"machine": "H200", "P": 8, "hosts": 1, "link": "NVLink", "cards": None, "comm_scale": 1, "compute_scale": 1,
        "pass": "forward", "transport": "collectives", "none_s": 0.005, "overlapped_s": 0.004, "exposed_s": 3e-4,
        "hidden_fraction": 0.75, "plan": "2,4,2 r3 a2 b1 s0"}  # fmt: skip
COUNTS = {"resident_bytes": 0, "device_bytes": 0, "files": 3, "layers": 16, "compilations": 16}
OTHERS = {
    "simulated/scaling": {"kind": "simulation", "cases": [
        CASE, {**CASE, "P": 16, "hosts": 2, "cards": 8, "none_s": 0.0061234}, {**CASE, "comm_scale": 2, "none_s": 0.777}]},
    "simulated/rows": {"kind": "simulation", "cases": [
        {"machine": "H20", "P": 16, "T": 64, "L": 4, "pass": "forward", "row_chunks": 2, "none_s": 0.0123456,
         "overlapped_s": 0.011, "alone_s": 0.01, "exposed_s": 0.001, "along_tokens_s": 0.009,
         "plan_along_tokens": "2,2 r7 a2 b1 s0", "weights_read_again_bytes": 2**21, "gradients_added_bytes": 0}]},
    "some-faults/endurance": {"kind": "endurance", "environment": ENVIRONMENT, "calls": 100,
        "configurations": 16, "kept": 256, "bounds": {**COUNTS, "resident_bytes": 2**25}, "ranks": [
            {"warm": COUNTS, "last": COUNTS}, {"warm": COUNTS, "last": {**COUNTS, "resident_bytes": 3 * 2**19}}]},
    "simulated/calibration": {"kind": "calibration", "median_error": 0.0312, "median_error_of_configurations": 0.045,
        "median_error_of_overlapped": 0.06, "configurations": {"some.json": 0.025}, "judged": [
        {"configuration": "some.json", "mode": "none", "measured_s": 0.004, "simulated_s": 0.0041, "error": 0.025}]},
    "some-faults/faults": {"kind": "faults", "environment": ENVIRONMENT, "faults": [
        {"fault": "is killed", "at_fault": 0, "problems": [], "rerun": {"ok": True}, "ranks": [
            {"seconds": None, "message": ""}, {"seconds": 1.5, "message": "rank 0 | died"},
            {"seconds": 12.25, "message": None}]},
        {"fault": "stalls", "at_fault": 2, "problems": ["rank 1 did not end"], "rerun": {"ok": True}, "ranks": [
            {"seconds": 3.5, "message": "no word"}, {"seconds": None, "message": ""},
            {"seconds": None, "message": ""}]}]},
    "gpu/planner": {"kind": "planner", "environment": ENVIRONMENT, "pass": "forward", "shapes": [[1], [2]],
                    "geometric_means": {"planner": 1.0123}},
}  # fmt: skip
ROWS = ["| H200 | 8 | 1 |  | forward | collectives | `2,4,2` | 5.000 | 4.000 | 1.25 | 0.300 | 75 % |",
        "| H200 | 16 | 2 | 8 | forward | collectives | `2,4,2` | 6.123 | 4.000 | 1.53 | 0.300 | 75 % |",
        "| H20 | 16 | 64 | 4 | forward | 2 | 12.35 | 11.00 | 10.00 | 1.000 | `2,2` | 9.000 | 2 | 0 |",
        "| `some.json` | `none` | 4.000 | 4.100 | +2.5 % |",
        "the median error of 1 latencies is 3.1 %, that of the medians of 1 configurations 4.5 %, and of the "
        "overlapped layers alone 6.0 %; the worst single one is +2.5 % (`none` of `some.json`).",
        "| `some-faults/endurance` | 100 | 16 | 256 | 1.5 | 0.0 | 0 | 0 | 0 | 32.0 | aaaaaaa |",
        "| is killed | rank 0 \\| died | 12.2 | nothing | works | aaaaaaa |",
        "| stalls | no word | not recorded | rank 1 did not end | works | aaaaaaa |",
        "| `gpu/planner.json` | forward | `planner` | 1.012 | 2 | aaaaaaa |"]  # fmt: skip


def test_records_of_the_simulator_the_planner_and_faults_become_tables(tmp_path):
    shutil.copytree(REPORTS / "text", tmp_path / "text")
    (tmp_path / "notes.json").write_text("{}")
    for name, content in OTHERS.items():
        file = tmp_path / "results" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    markdown, _ = report.build(tmp_path, tmp_path / "figures")
    assert [row for row in ROWS if row not in markdown] == []
    usual, scaled = markdown.split("The same with twice the communication")
    assert "777" not in usual and "| H200 | 2 | 1 | 8 | 1 | forward | collectives | `2,4,2` | 777.0 |" in scaled
    assert (tmp_path / "figures" / "scaling.svg").exists()


def test_runs_of_one_mode_are_paired_by_version_and_commit(built):
    table = built[1].split("this is what the layer took beside `none`:")[1].split("*Source")[0]
    assert "| 2.11.0+cu130 | (4, 16, 128, 2) | 0.7518 | 2.963 | NCCL | e2a187b |" in table
    assert "| 2.6.0+cu124 | (4, 16, 128, 2) | 0.4156 | 1.798 | NCCL | e2a187b |" in table


def test_what_is_unlike_its_neighbours_says_why(built):
    (large,) = (line for line in built[1].splitlines() if line.startswith("| `h200x2-torch-2.11.0/large_kernel.json`"))
    assert "`--large-block`" in large and built[1].count("`--cuda-graph` |") == 2
    assert "`peers_norm` (`kernel:peers` began with a rank's own rows at that commit)" in built[1]


def test_columns_that_no_record_fills_are_left_out(built):
    rows = table(("a", "b", "c"), [("x", "", "not recorded"), ("2", "", "")])
    assert rows == "| a |\n| --- |\n| x |\n| 2 |"
    for lines in re.findall(r"(?:^\|.*\n)+", built[1], re.MULTILINE):
        cells = [line.strip("| \n").split(" | ") for line in lines.splitlines()[2:] if "\\|" not in line]
        if len({len(row) for row in cells}) == 1:
            assert not any(set(column) <= {"not recorded"} for column in zip(*cells)), lines[:200]


def test_columns_of_numbers_are_aligned_to_the_right():
    rows = table(("mode", "ms", "hidden"), [("`none`", "4.5", "not recorded"), ("`kernel`", "12", "-3 %")])
    assert rows.splitlines()[1] == "| --- | ---: | ---: |"


def test_exchanges_and_computation_stand_apart_for_every_comparison(built):
    _, markdown, results = built
    apart = markdown.split("### Exchanges and computation alone")[1].split("*Source")[0]
    record = Record(results, OVERLAP)
    assert f"| {record.ms('exchanges')} | {record.ms('comp-only:none')} |" in apart
    assert all(f"| `{each.name}`" in apart for each in results.comparisons())


def test_records_with_more_communication_have_a_table(tmp_path):
    shutil.copytree(REPORTS, tmp_path / "reports")
    content = json.loads((REPORTS / OVERLAP).read_text())
    content["configuration"]["comm_scale"] = {"value": 2, "default": 1, "overridden": True}
    (tmp_path / "reports" / "results" / "h200x2-torch-2.11.0" / "scaled.json").write_text(json.dumps(content))
    markdown, _ = report.build(tmp_path / "reports", tmp_path / "figures")
    assert "| `kernel` | `h200x2-torch-2.11.0/scaled` | forward | 2 | 1 | 5.219 | 1.52 |" in markdown


def test_the_schedule_is_drawn_as_it_is_simulated(built):
    svg = (built[0] / "figures" / "pipeline.svg").read_text()
    assert "forward, plan 8,8,8,8 r9 a2 b1 s0, simulated" in svg and "backward, plan" in svg
    starts = re.findall(r">([DC]\d)</text>", svg)
    assert starts == ["D0", "D1", "D2", "C0", "D3", "C1", "C2", "C3"]


def test_notes_say_where_they_come_from():
    notes = json.loads((REPORTS / "notes.json").read_text())
    entries = [*notes["notes"].values(), *notes["h200"].values(), notes["chunk_sweep_source"]]
    assert all(each["source"] and "commit" in each for each in entries)
    commits = {each["commit"] for each in entries} - {None}
    known = subprocess.run(["git", "cat-file", "-t", *list(commits)[:1]], cwd=ROOT, capture_output=True, text=True)
    if known.returncode:
        pytest.skip("no git history here")
    for commit in commits:
        assert subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT).returncode == 0, commit


class Page(HTMLParser):
    """Which elements stand open, what encloses each table, and everything that is loaded from elsewhere."""

    VOID = {"meta", "br", "img", "hr", "link", "input", "path", "use", "rect", "line", "circle"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.parents, self.links, self.ids = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.seen.append(tag)
        if tag == "table":
            self.parents.append(self.open[-1])
        self.links += [value for name, value in attributes.items() if name in ("src", "href", "xlink:href", "data")]
        self.ids += [attributes["id"]] if tag in ("nav", "h2", "h3", "h4") else []
        if tag not in self.VOID:
            self.open.append((tag, attributes.get("class")))

    def handle_startendtag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop()[0] == tag


def test_the_page_stands_alone_and_fits_a_phone(built):
    folder, markdown, _ = built
    html = page(markdown, folder)
    parsed = Page()
    parsed.feed(html)
    assert parsed.open == [] and "script" not in parsed.seen and "img" not in parsed.seen and "link" not in parsed.seen
    files = {unquote(link) for link in parsed.links if not link.startswith("#")}
    assert f"results/{Path(OVERLAP).relative_to('results')}" in files and "../scripts/splits.py" in files
    assert [file for file in files if ":" in file or not (REPORTS / file).is_file()] == []
    assert "@import" not in html and not re.findall(r"url\((?!#)", html)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "prefers-color-scheme: dark" in html
    assert set(parsed.parents) == {("div", "scroll")} and parsed.seen.count("svg") == markdown.count("](figures/")
    assert set(re.findall(r'<a [^>]*href="#([^"]+)"', html)) <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids)) > markdown.count("\n## ")
    assert html.split("</nav>")[0].count('<li><a href="#') == markdown.count("\n## ")


def test_the_cross_node_section_begins_with_what_is_missing(built):
    section = built[1].split("## Within a host and between hosts")[1].strip()
    assert section.startswith("> Without two real hosts this is a partial milestone")


@pytest.mark.parametrize(
    "mode, count",
    [
        ("none", 1),
        ("kernel:chunks=4", 4),
        ("kernel:chunks=8+16+8", 3),
        ("kernel:peers", 1),
        ("kernel:peers=4+28", 2),
        ("kernel:naive", None),
        ("with-sm", None),
    ],
)
def test_chunks_are_read_off_a_mode(mode, count):
    assert chunks_of(mode) == count


def test_the_planned_chunks_are_those_of_the_plan():
    assert chunks_of("kernel", "4,12,12,4 r7 a2 b1 s16") == 4 and chunks_of("kernel") == AS_PLANNED


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0.000"),
        (12341, "12340"),
        (4.7342, "4.734"),
        (696.8043, "696.8"),
        (1613.4, "1613"),
        (9.99996, "10.00"),
        (-0.02137, "-0.02137"),
    ],
)
def test_numbers_keep_four_digits(value, text):
    assert printed(value, "4", 1) == text


def test_a_missing_value_is_no_number():
    results = Results(REPORTS / "results")
    assert results.cite("results/none.json", "value", ("a",)) == "no record" and results.citations == []
    assert results.cite("notes.json", "value", ("h200", "nothing"), missing="not recorded") == "not recorded"
