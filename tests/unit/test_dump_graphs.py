"""`scripts/dump_graphs.py` on the fake process group: one small run, and mistakes that are explained."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import passes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dump_graphs.py"


def run(*arguments, **environment):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("A2A_FFN_", "RANK", "WORLD_SIZE"))}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=kept | settings)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    output, caches, tools = (tmp_path_factory.mktemp(name) for name in ("dumps", "caches", "tools"))
    fast = tools / "compiler"  # most of the time is C++ compilation, whose result does not matter here
    fast.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@" -O0\n')
    fast.chmod(0o755)
    quick = {"CXX": str(fast), "ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    shape = ("--chunks", 2, "--tokens", 8, "--recipe", "inductor")
    done = run("--output", output, *shape, TORCHINDUCTOR_CACHE_DIR=str(caches), **quick)
    assert done.returncode == 0, done.stderr
    assert not list(caches.iterdir())
    folder = output / "rank0"
    assert done.stdout.splitlines()[-1] == str(folder / "index.html")
    return folder


def test_writes_graphs_passes_schedules_and_code(dumped):
    for name in ("captured", "joint", "forward", "backward"):
        assert "all_to_all_single" in (dumped / "graphs" / f"{name}.txt").read_text()
    ran = {re.sub(r"pass\d+_", "", path.name) for path in (dumped / "graphs").glob("pass*")}
    for direction in ("forward", "backward"):
        for name in passes.PASS_NAMES:
            stage = "joint" if name == "localize-views" else direction
            assert {f"{stage}_{name}.{when}.txt" for when in ("before", "after")} <= ran
        assert "all_to_all_single" in (dumped / "code" / f"{direction}.py").read_text()
        assert (dumped / "schedules" / f"{direction}.txt").read_text().startswith(f"{direction}, plan 2,2 ")
    assert re.search("^plan +2,2 ", (dumped / "plan.txt").read_text(), re.MULTILINE)
    assert json.loads((dumped / "dump.json").read_text())["digests"]


def test_passes_are_readable_and_marked(dumped):
    [graph] = (dumped / "graphs").glob("*_forward_reorder.after.txt")
    anchors = re.findall(r"<- (.*)", graph.read_text())
    steps = (dumped / "schedules" / "forward.txt").read_text().splitlines()[1:]
    assert anchors == [re.split(r"  +", step)[0] for step in steps]
    assert re.search(r"bf16\[2,4,128\] +aten\.bmm\.default\(.*<- gemm0 0", graph.read_text())
    [nodes] = (dumped / "graphs").glob("*_forward_pin-order.after.txt")
    assert re.search(r"ExternKernel +extern_kernels\.bmm .*from bmm.*; after buf.*<- gemm0 1", nodes.read_text())


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.rectangles, self.external = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"])
        if tag == "rect":
            self.rectangles.append((values["y"], float(values["x"]), float(values["width"])))
        self.external += [value for name, value in attrs if name in ("src", "href") and "://" in value]


def test_report_is_whole(dumped):
    text = (dumped / "index.html").read_text()
    page = Page(text)
    assert page.links and all((dumped / link).is_file() for link in page.links)
    assert not page.external and "@import" not in text
    (title,) = re.findall("<title>What the compiler does: (.*?)</title>", text)
    assert title.startswith("layout P=") and "  " not in title
    assert text.count("in the order of the schedule") == 2 and "leaves the schedule" not in text
    for timeline in re.findall(r"<svg xmlns.*?</svg>", text, re.DOTALL):
        lanes = {}
        for y, x, width in Page(timeline).rectangles:
            assert width > 0
            lanes.setdefault(y, []).append((x, x + width))
        assert len(lanes) == 2
        for blocks in lanes.values():
            assert all(before[1] <= after[0] for before, after in zip(blocks, blocks[1:]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--ranks", 2, "--rank", 2), "--rank 2: must be one of 0 to 1"),
        (("--block", "--recipe", "eager_exact"), "recipe eager_exact with --block"),
    ],
)
def test_mistakes_are_explained(tmp_path, arguments, message):
    done = run("--output", tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
