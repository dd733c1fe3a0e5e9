"""What every pass is: a name, a contract, a uuid that hashes its source, and a record of what it did.

Inductor's caches key compiled code on a pass's `uuid()`: it covers the sources of all passes and of the schedule they
follow, and the settings of the pass. It never covers a rank.

What a pass did is logged (`TORCH_LOGS=+passes`), is an artifact of the structured trace (`TORCH_TRACE`, read with
tlparse), and is shown to `OBSERVERS`.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from compile_overlap import notice, schedule
from compile_overlap.compat import CustomGraphPass, CustomSchedulerPass
from compile_overlap.config import Settings

log = logging.getLogger(__name__)


class ContractError(RuntimeError):
    """A graph that holds our exchanges is not what the plan says it must be."""


class UnknownStructure(ContractError):
    """A valid graph in which the chunks of a layer cannot be told apart: its order is left as it is.

    Such a graph runs and is right, only slower: two layers side by side whose equal exchanges the compiler merged, say.
    Under `A2A_FFN_STRICT=1` it is an error, otherwise one warning.
    """


@dataclass(frozen=True)
class PassReport:
    """What one run of one pass found and did: matches, time, and the number of operators before and after it."""

    name: str
    matches: int
    seconds: float
    before: int
    after: int


# Called as observer(pass name, "before" or "after", FX graph or scheduler nodes) around each run of each pass.
OBSERVERS: list[Callable[[str, str, Any], None]] = []


def artifact(name: str, text: str) -> None:
    """Log a text, and leave it in the structured trace of the compilation."""
    log.debug("%s:\n%s", name, text)
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"compile_overlap_{name}", "encoding": "string"},
        payload_fn=lambda: text,
    )


def _size(subject: Any) -> int:
    return len(subject.nodes if isinstance(subject, torch.fx.Graph) else subject)


class OverlapPass:
    """Base of all passes. A subclass states its contract in its module's docstring and implements `run`.

    `run(graph_or_nodes) -> (result, matches)`: `matches` counts what the pass acted on; zero means that the graph holds
    none of our exchanges. It raises `ContractError` when a graph that does hold them breaks the contract.
    """

    name = "overlap-pass"

    def run(self, subject: Any) -> tuple[Any, int]:
        raise ContractError(f"{type(self).__name__} does not implement run")

    def settings(self) -> str:
        """Everything beside the source that changes what the pass does."""
        return ""

    def uuid(self) -> str:
        digest = hashlib.sha256(self.settings().encode())
        shared = sorted(Path(__file__).parent.glob("*.py"))
        for file in (*shared, Path(inspect.getfile(type(self))), Path(schedule.__file__)):
            digest.update(file.read_bytes())
        return f"{self.name}:{digest.hexdigest()}"

    def apply(self, subject: Any, record: Callable[[PassReport], None]) -> Any:
        """Run the pass, time it, record what it matched, and return its result."""
        for observer in OBSERVERS:
            observer(self.name, "before", subject)
        begin, before = time.perf_counter(), _size(subject)
        result, matches = self.run(subject)
        report = PassReport(self.name, matches, time.perf_counter() - begin, before, _size(result))
        for observer in OBSERVERS:
            observer(self.name, "after", result)
        if matches:
            artifact(self.name, str(report))
            record(report)
        return result


class Chain:
    """Runs a hook that was there before ours, then our passes.

    `uuid` is what Inductor's caches key on; it must cover the hooks that they leave out of the key (2.6.0 does so for
    the scheduler's). It is given by the pipeline, which knows all of them.
    """

    def __init__(
        self,
        before: Any,
        passes: tuple[OverlapPass, ...],
        record: Callable[[PassReport], None],
        uuid: Callable[[], Any],
    ):
        self.before, self.passes, self.record, self._uuid = before, passes, record, uuid

    def uuid(self) -> Any:
        return self._uuid()

    def _apply_all(self, subject: Any) -> Any:
        for each in self.passes:
            try:
                subject = each.apply(subject, self.record)
            except UnknownStructure as error:
                if Settings.from_environment().strict:
                    raise
                notice.warn_once(f"the order of this graph is left as it is ({error}); communication may be exposed")
        return subject


class GraphChain(Chain, CustomGraphPass):
    """A post-grad hook: FX graph in, changed in place."""

    def __call__(self, graph) -> None:
        if self.before is not None:
            self.before(graph)
        self._apply_all(graph)


class SchedulerChain(Chain, CustomSchedulerPass):
    """A pre-fusion scheduler hook: list of scheduler nodes in, list out."""

    def __call__(self, nodes):
        return self._apply_all(nodes if self.before is None else self.before(nodes))
