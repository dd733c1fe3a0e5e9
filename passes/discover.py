"""Discovery: which exchange, GEMM and epilogue belong to which chunk, read from the structure of a post-grad graph.

What is looked at are data dependencies, never names or positions:

- An exchange's level is the number of our exchanges on the longest chain before it. A layer's first exchanges (dispatch;
  backward, the gradient of combine) have an even level, its second ones the odd level after it: layers that follow one
  another in a graph have different levels, and layers side by side share one.
- A second exchange belongs to the one first exchange of its level's predecessor that it depends on. Where a forward is
  recomputed in its backward (activation checkpointing) there are two: the one that depends on a tangent, as it does.
- A GEMM belongs to the chunk whose first exchange it depends on without depending on any second exchange of that
  layer. It is on the way if the second exchange, or another GEMM of the chunk, depends on it, else it is free (a weight
  gradient).

Raises `UnknownStructure` for a graph that holds our exchanges in another structure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compile_overlap import compat
from compile_overlap.kernels import chunk_gemm, chunk_gemm_triton  # noqa: F401  registers the operators
from compile_overlap.schedule import Plan, Work

from . import graphs
from .base import ContractError, UnknownStructure

aten = torch.ops.aten
ops = torch.ops.compile_overlap
GEMMS = {
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mm.default,
    aten.addmm.default,
    ops.chunk_bmm.default,
    ops.chunk_bmm_triton.default,
    ops.chunk_baddbmm.default,
}


@dataclass(frozen=True)
class Chunk:
    """One chunk's anchors: starts and waits of both exchanges, and its GEMMs in graph order."""

    size: int
    starts: tuple[torch.fx.Node, ...]
    waits: tuple[torch.fx.Node, ...]
    gemms: tuple[torch.fx.Node, ...]
    free: tuple[torch.fx.Node, ...]

    def work(self) -> Work:
        return Work(len(self.gemms), len(self.free), len(self.starts) == 2)


@dataclass(frozen=True)
class Layer:
    """The chunks of one layer in one graph, in the order in which the graph starts them."""

    plan: Plan
    level: int
    chunks: tuple[Chunk, ...]


def discover(graph: torch.fx.Graph, unless_disabled: str = "") -> list[Layer]:
    """Our layers in a post-grad graph, in an order in which they can run."""
    starts = graphs.starts(graph, unless_disabled)
    if not starts:
        return []
    waits = [_only_wait(start) for start in starts]
    before = _dependencies(graph, waits)
    levels: list[int] = []
    for index, start in enumerate(starts):
        levels.append(max((levels[i] + 1 for i in _bits(before[start] & ~(1 << index))), default=0))
    tangent = _on_tangents(graph)
    partner = _pair(starts, before, levels, tangent)
    members = _gemms_by_chunk(graph, starts, before, levels, partner)
    layers = []
    for level in sorted({level for level in levels if level % 2 == 0}):
        firsts = [i for i, own in enumerate(levels) if own == level]
        firsts.sort(key=lambda i: starts[i] in tangent)  # a recomputed forward comes before the backward
        for name, on_tangents in dict.fromkeys((starts[i].args[3], starts[i] in tangent) for i in firsts):
            plan = graphs.plan_of(name)
            mine = [i for i in firsts if (starts[i].args[3], starts[i] in tangent) == (name, on_tangents)]
            for begin in range(0, len(mine), len(plan.sizes)):
                indices = mine[begin : begin + len(plan.sizes)]
                chunks = tuple(_chunk(starts, waits, i, partner.get(i), *members[i]) for i in indices)
                layers.append(_checked(Layer(_in_graph_order(plan, chunks, name), level, chunks)))
    return layers


def _only_wait(start: torch.fx.Node) -> torch.fx.Node:
    waits = graphs.waits(start)
    if len(waits) == len(start.users) > 1:
        raise UnknownStructure(f"{start.name}: must be waited exactly once, but equal exchanges were merged")
    if len(waits) != 1 or len(start.users) != 1:
        users = ", ".join(str(user.target) for user in start.users) or "nothing"
        raise ContractError(f"{start.name}: must be waited exactly once, directly; it is used by {users}")
    return waits[0]


def _bits(mask: int):
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _dependencies(graph: torch.fx.Graph, waits: list[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """For each node, the exchanges whose received rows it depends on, as a bit mask (a wait has its own bit)."""
    own = {wait: 1 << index for index, wait in enumerate(waits)}
    before: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        mask = own.get(node, 0)
        for source in node.all_input_nodes:
            mask |= before[source]
        before[node] = mask
    return before


def _on_tangents(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes of a backward graph that depend on the gradient it begins with."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if compat.is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _pair(starts, before, levels, tangent) -> dict[int, int]:
    """{first exchange: its second exchange}, as indices."""
    partner: dict[int, int] = {}
    for index, start in enumerate(starts):
        if levels[index] % 2 == 0:
            continue
        firsts = [i for i in _bits(before[start]) if levels[i] == levels[index] - 1]
        if len(firsts) > 1 and start in tangent:
            firsts = [i for i in firsts if starts[i] in tangent]
        if len(firsts) != 1 or firsts[0] in partner or starts[firsts[0]].args[3] != start.args[3]:
            names = [starts[i].name for i in firsts]
            raise UnknownStructure(f"{start.name}: must depend on one chunk's first exchange alone, depends on {names}")
        partner[firsts[0]] = index
    return partner


def _gemms_by_chunk(graph, starts, before, levels, partner) -> list[tuple[list, list]]:
    """For each exchange, the GEMMs (on the way to its second exchange, free); empty for second exchanges."""
    leads: dict[torch.fx.Node, int] = {}
    own = {start: 1 << index for index, start in enumerate(starts)}
    for node in reversed(list(graph.nodes)):
        mask = own.get(node, 0)
        for user in node.users:
            mask |= leads[user]
        leads[node] = mask
    members: list[tuple[list, list]] = [([], []) for _ in starts]
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in GEMMS or not before[node]:
            continue
        level = max(levels[i] for i in _bits(before[node]))
        chunks = [i for i in _bits(before[node]) if levels[i] == level]
        if level % 2 or len(chunks) != 1:  # behind a second exchange, or of several chunks: somebody else's
            continue
        second = partner.get(chunks[0])
        on_the_way = second is not None and leads[node] >> second & 1
        members[chunks[0]][0 if on_the_way else 1].append(node)
    return [_split(graph, *own) for own in members]


def _split(graph: torch.fx.Graph, gemms: list, free: list) -> tuple[list, list]:
    """The same GEMMs; those among `free` that another one depends on are on the way."""
    if len(free) < 2:
        return gemms, free
    behind = {node: 1 << index for index, node in enumerate(free)}
    needed = 0
    for node in graph.nodes:
        mask = 0
        for source in node.all_input_nodes:
            mask |= behind.get(source, 0)
        if node in free:
            needed |= mask
        if mask:
            behind[node] = behind.get(node, 0) | mask
    early = [node for index, node in enumerate(free) if needed >> index & 1]
    return sorted(gemms + early, key=list(graph.nodes).index), [node for node in free if node not in early]


def _chunk(starts, waits, first: int, second: int | None, gemms, free) -> Chunk:
    pair = (first,) if second is None else (first, second)
    size = starts[first].args[0].meta["val"].shape[1]
    return Chunk(size, tuple(starts[i] for i in pair), tuple(waits[i] for i in pair), tuple(gemms), tuple(free))


def _in_graph_order(plan: Plan, chunks: tuple[Chunk, ...], name: str) -> Plan:
    """The plan with its sizes in the order of the graph: as the layer wrote them, or reversed, as autograd runs."""
    found = tuple(chunk.size for chunk in chunks)
    for sizes in (plan.sizes, plan.sizes[::-1]):
        if found == sizes:
            return replace(plan, sizes=sizes)
    raise UnknownStructure(f"{name}: exchanges of {found} tokens in one direction, the plan says {plan.sizes}")


def _checked(layer: Layer) -> Layer:
    works = {chunk.work() for chunk in layer.chunks}
    if len(works) > 1:
        raise UnknownStructure(f"chunks of one layer do different work: {[chunk.work() for chunk in layer.chunks]}")
    return layer
