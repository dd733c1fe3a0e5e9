"""Records what a compilation does: its graphs, each pass's input and output as text, schedules and wrappers.

Graphs come from torch's structured trace (what `TORCH_TRACE` writes), what a pass is given and leaves from
`passes.base.OBSERVERS`, wrappers from Inductor. A graph is turned into text at once, since passes change it in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import torch

import passes
from compile_overlap import compat
from compile_overlap.schedule import BACKWARD, FORWARD, Schedule
from passes import base, reorder, verify
from passes.localize_views import LocalizeViews

CAPTURED, JOINT, INFERENCE = "captured", "joint", "inference"
GRAPHS = {
    "dynamo_output_graph": CAPTURED,
    "aot_joint_graph": JOINT,
    "aot_inference_graph": INFERENCE,
    "aot_forward_graph": FORWARD,
    "aot_backward_graph": BACKWARD,
}
_EXPECTED = verify._KEY
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int64: "i64", torch.bool: "b8"}


class Line(NamedTuple):
    """One node as text, and the names of the graph nodes that it stands for."""

    text: str
    names: tuple[str, ...] = ()


class Scheduled(NamedTuple):
    """One layer's schedule in one graph, and the name of the graph node of each of its steps."""

    schedule: Schedule
    nodes: tuple[str, ...]

    def labels(self) -> dict[str, str]:
        return {name: self.schedule.label(step) for name, step in zip(self.nodes, self.schedule.steps)}


@dataclass
class PassRun:
    """One run of one pass: the stage it belongs to, its subject before and after, its report if it matched."""

    name: str
    stage: str
    before: list[Line]
    after: list[Line] = field(default_factory=list)
    report: base.PassReport | None = None


class Wrapper(NamedTuple):
    """Generated code of one graph, and the order of exchanges, waits and GEMMs that `Reorder` left for it, if any."""

    direction: str
    code: str
    expected: tuple[str, ...]


class Recorder(logging.Handler):
    """What was recorded in `recording()`.

    `gradients`: whether the run has a backward. `caches`: Inductor's folder, which generated code names.
    """

    def __init__(self, gradients: bool, caches: str, progress: Callable[[str], None]):
        super().__init__()
        self.caches = caches
        self.traced_stage = JOINT if gradients else INFERENCE
        self.progress = progress
        self.graphs: list[tuple[str, str]] = []
        self.runs: list[PassRun] = []
        self.wrappers: list[Wrapper] = []
        self.schedules: dict[str, list[Scheduled]] = defaultdict(list)
        self.verified: dict[str, base.PassReport] = {}
        self._reports_seen = 0
        self._recording = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record every compilation of this process in this context."""
        self._reports_seen, self._recording = len(passes.pass_log()), True
        compat.watch_wrappers(self._wrapper)
        trace = logging.getLogger("torch.__trace")
        trace.addHandler(self)
        base.OBSERVERS.append(self._observe)
        try:
            with mock.patch.object(reorder, "schedule_of", self._scheduling(reorder.schedule_of)):
                yield self
        finally:
            base.OBSERVERS.remove(self._observe)
            trace.removeHandler(self)
            self._collect_reports()
            self._recording = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called with each record of the structured trace."""
        for key in getattr(record, "metadata", ()):
            if key in GRAPHS:
                self.graphs.append((GRAPHS[key], record.payload or ""))

    def _observe(self, name: str, when: str, subject: Any) -> None:
        lines = graph_lines(subject) if isinstance(subject, torch.fx.Graph) else scheduler_lines(subject)
        if when == "before":
            self._collect_reports()
            stage = self.traced_stage if name == LocalizeViews.name else _direction()
            self.runs.append(PassRun(name, stage, lines))
        else:
            self.runs[-1].after = lines

    def _collect_reports(self) -> None:
        """Give the pass log's new reports to the pass that ran last, or to the wrapper that was verified."""
        log = passes.pass_log()
        for report in log[self._reports_seen :]:
            if report.name == verify.NAME:
                self.verified[self.wrappers[-1].direction] = report
            elif self.runs and self.runs[-1].name == report.name:
                self.runs[-1].report = report
        self._reports_seen = len(log)

    def _scheduling(self, original: Callable[[Any], Schedule]) -> Callable[[Any], Schedule]:
        def schedule_of(layer):
            schedule = original(layer)
            names = tuple(node.name for node in reorder.in_order(layer, schedule))
            self.schedules[schedule.direction].append(Scheduled(schedule, names))
            return schedule

        return schedule_of

    def _wrapper(self, code: str) -> None:
        if self._recording:
            self._collect_reports()
            code = code.replace(self.caches, "$TORCHINDUCTOR_CACHE_DIR")
            self.wrappers.append(Wrapper(_direction(), code, tuple(compat.graph_meta(_EXPECTED) or ())))
            self.progress(f"{self.wrappers[-1].direction}: the passes have run, code is generated")

    def labels(self, stage: str) -> dict[str, str]:
        """The steps' labels by the names of their nodes, for graphs of this stage."""
        return {name: label for each in self.schedules.get(stage, ()) for name, label in each.labels().items()}

    def text_of(self, lines: list[Line], stage: str) -> str:
        """A subject as text; the anchors of the schedule carry its labels."""
        labels = self.labels(stage)
        rows = []
        for line in lines:
            found = " ".join(labels[name] for name in line.names if name in labels)
            rows.append(f"{line.text}   <- {found}" if found else line.text)
        return "\n".join(rows) + "\n"

    def graph_file(self, index: int) -> str:
        name = self.graphs[index][0]
        number = sum(other == name for other, _ in self.graphs[:index])
        return f"graphs/{name}{f'_{number}' if number else ''}.txt"

    def pass_file(self, index: int, when: str) -> str:
        run = self.runs[index]
        return f"graphs/pass{index + 1:02d}_{run.stage}_{run.name}.{when}.txt"

    def wrapper_file(self, index: int) -> str:
        direction = self.wrappers[index].direction
        number = sum(other.direction == direction for other in self.wrappers[:index])
        return f"code/{direction}{f'_{number}' if number else ''}.py"

    def write(self, folder: Path) -> None:
        """Write graphs, passes' inputs and outputs, wrappers and schedules into a folder."""
        files = {self.graph_file(i): text for i, (_, text) in enumerate(self.graphs)}
        for index, run in enumerate(self.runs):
            files[self.pass_file(index, "before")] = self.text_of(run.before, run.stage)
            files[self.pass_file(index, "after")] = self.text_of(run.after, run.stage)
        files |= {self.wrapper_file(i): wrapper.code for i, wrapper in enumerate(self.wrappers)}
        for direction, found in self.schedules.items():
            files[f"schedules/{direction}.txt"] = "\n\n".join(str(each.schedule) for each in found) + "\n"
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)

    def digests(self) -> dict[str, str]:
        """A hash of everything that must be the same on all ranks, by what it is."""
        texts = {f"graph {index} ({name})": text for index, (name, text) in enumerate(self.graphs)}
        for index, run in enumerate(self.runs):
            texts[f"pass {index} ({run.stage}, {run.name})"] = self.text_of(run.before + run.after, run.stage)
        for index, wrapper in enumerate(self.wrappers):
            texts[f"wrapper {index} ({wrapper.direction})"] = repr(verify.order_in_wrapper(wrapper.code))
        for direction, found in self.schedules.items():
            texts[f"{direction} schedule"] = "\n".join(str(each.schedule) for each in found)
        return {name: hashlib.sha256(_without_rank(text).encode()).hexdigest() for name, text in texts.items()}


def _direction() -> str:
    return BACKWARD if compat.is_backward_graph() else FORWARD


def _without_rank(text: str) -> str:
    """The text without what may differ between ranks: which GPU a tensor is on."""
    return re.sub(r"cuda:\d+|(?<=device\(type='cuda', )index=\d+", "cuda", text)


def graph_lines(graph: torch.fx.Graph) -> list[Line]:
    """A line for each node: name, dtype and shape, operator and arguments."""
    rows = []
    for node in graph.nodes:
        call = ", ".join([*map(_argument, node.args), *(f"{key}={_argument(v)}" for key, v in node.kwargs.items())])
        target = getattr(node.target, "__name__", node.target) if callable(node.target) else node.target
        target = node.target if isinstance(node.target, torch._ops.OpOverload) else target
        what = f"{node.op if node.op == 'output' else target}({call})" if node.op != "placeholder" else node.op
        rows.append((node.name, value_text(node.meta.get("val")), what))
    wide = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [Line(f"{a:<{wide[0]}}  {b:<{min(wide[1], 40)}}  {c}", (a,)) for a, b, c in rows]


def value_text(value: Any) -> str:
    """dtype and shape of a tensor, such as bf16[4,2,32]; of each element of a sequence."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(value_text, value))})"
    return "" if value is None else str(value)


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.device):
        return value.type
    return repr(value) if isinstance(value, str) else str(value)


def scheduler_lines(nodes: list[Any]) -> list[Line]:
    """A line for each scheduler node: name, kind, operator, buffers, its graph nodes, order dependencies."""
    rows = []
    for node in nodes:
        ir_node = getattr(node, "node", None)
        kind = type(node).__name__.removesuffix("SchedulerNode") or "Computed"
        what = getattr(ir_node, "op_overload", None) or getattr(ir_node, "python_kernel_name", None)
        origins = getattr(ir_node, "origins", ())
        names = tuple(sorted((origin.name for origin in origins), key=_natural))
        after = sorted({dep.name for dep in node.read_writes.reads if type(dep).__name__ == "WeakDep"}, key=_natural)
        buffers = ",".join(sorted(node.get_buffer_names(), key=_natural))
        rows.append(
            (
                (node.get_name(), kind, str(what or type(ir_node).__name__), buffers),
                f"from {_few(names)}" + (f"; after {_few(after)}" if after else ""),
                names if kind == "ExternKernel" else (),
            )
        )
    wide = [max((len(cells[column]) for cells, *_ in rows), default=0) for column in range(4)]
    return [
        Line("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, wide)), origin]), names)
        for cells, origin, names in rows
    ]


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _few(names: Any, most: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "-"
