"""What every pass is: a name, a contract, a uuid that hashes its source, and a record of what it did.

Inductor's caches key compiled code on a pass's `uuid()`: it covers the pass's source, this file and `graphs`, and the
settings of the pass. It never covers a rank.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from compile_overlap.compat import CustomGraphPass, CustomSchedulerPass

log = logging.getLogger(__name__)


class ContractError(RuntimeError):
    """A graph that holds our exchanges is not what the plan says it must be."""


@dataclass(frozen=True)
class PassReport:
    """What one run of one pass found and did; `graph` says forward, backward or inference where that is known."""

    name: str
    matches: int
    seconds: float


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
        files = (inspect.getfile(type(self)), __file__, str(Path(__file__).with_name("graphs.py")))
        digest = hashlib.sha256(self.settings().encode())
        for file in files:
            digest.update(Path(file).read_bytes())
        return f"{self.name}:{digest.hexdigest()}"

    def apply(self, subject: Any, record: Callable[[PassReport], None]) -> Any:
        """Run the pass, time it, record what it matched, and return its result."""
        begin = time.perf_counter()
        result, matches = self.run(subject)
        report = PassReport(self.name, matches, time.perf_counter() - begin)
        if matches:
            log.debug("%s: %d matches, %.1f ms", report.name, report.matches, 1e3 * report.seconds)
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


class GraphChain(Chain, CustomGraphPass):
    """A post-grad hook: FX graph in, changed in place."""

    def __call__(self, graph) -> None:
        if self.before is not None:
            self.before(graph)
        for each in self.passes:
            each.apply(graph, self.record)


class SchedulerChain(Chain, CustomSchedulerPass):
    """A pre-fusion scheduler hook: list of scheduler nodes in, list out."""

    def __call__(self, nodes):
        nodes = self.before(nodes) if self.before is not None else nodes
        for each in self.passes:
            nodes = each.apply(nodes, self.record)
        return nodes
