"""Reorder: the graph runs in the order of the schedule.

Contract
    in      a post-grad graph, forward or backward, whose layers `discover` can read
    out     the same nodes and edges in another order: each layer's starts, waits and GEMMs as its schedule says, each
            other node just before the first of these that needs it, and what none of them needs after the last one, in
            the order it had (bias and norm gradients, the final copies); through the peers' memory sums of rows that a
            first exchange brought stand before its chunk's last GEMM, behind which the peers may write over them
    raises  `UnknownStructure` when a schedule asks for something before what it depends on

Operators that write to an argument or draw random numbers keep their order among themselves and to the readers of what
they write.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from compile_overlap import compat
from compile_overlap.schedule import BACKWARD, FORWARD, FREE, GEMM, START, Schedule, build

from . import graphs, verify
from .base import OverlapPass, UnknownStructure, artifact
from .discover import Layer, discover
from .pin_order import PinOrder


class Reorder(OverlapPass):
    name = "reorder"

    def run(self, graph: torch.fx.Graph):
        layers = discover(graph, unless_disabled=self.name)
        if not layers:
            return graph, 0
        schedules = [schedule_of(layer) for layer in layers]
        anchors = [node for layer, schedule in zip(layers, schedules) for node in in_order(layer, schedule)]
        move(graph, node_order(graph, anchors))
        if not any(PinOrder.name in layer.plan.disabled for layer in layers):
            verify.expect(graph)
        for schedule in schedules:
            artifact(f"schedule_{schedule.direction}", str(schedule))
        return graph, len(anchors)


def schedule_of(layer: Layer) -> Schedule:
    """The schedule of a layer that was found in the graph which is being compiled."""
    direction = BACKWARD if compat.is_backward_graph() else FORWARD
    return build(direction, layer.plan, tuple(chunk.work() for chunk in layer.chunks))


def in_order(layer: Layer, schedule: Schedule) -> list[torch.fx.Node]:
    """The layer's starts, waits and GEMMs in the order of the schedule, and what has a place by these."""
    nodes = []
    for step in schedule.steps:
        chunk = layer.chunks[step.chunk]
        if layer.plan.peers and step.kind == GEMM and step.index == len(chunk.gemms) - 1:
            sums = (node for node in graphs.readers(chunk.waits[0]) if node.target in graphs.SUMS)
            nodes += sorted(sums, key=lambda node: node.name)
        if step.kind in (GEMM, FREE):
            nodes.append((chunk.gemms if step.kind == GEMM else chunk.free)[step.index])
        else:
            nodes.append((chunk.starts if step.kind == START else chunk.waits)[step.exchange - 1])
    return nodes


def node_order(graph: torch.fx.Graph, anchors: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """All nodes but inputs and output: each anchor behind what it needs, the rest at the end. Raises UnknownStructure."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    needs = _needs(graph)
    done = {node for node in graph.nodes if node.op == "placeholder"}
    pending = set(anchors)
    order: list[torch.fx.Node] = []
    rest = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for target in (*anchors, *rest):
        missing, stack = {target}, [target]
        while stack:
            for source in needs[stack.pop()]:
                if source not in done and source not in missing:
                    missing.add(source)
                    stack.append(source)
        early = [node.name for node in missing if node in pending and node is not target]
        if early and target in pending:
            raise UnknownStructure(f"the schedule runs {target.name} before {early}, which it depends on")
        pending.discard(target)
        missing -= done
        order += sorted(missing, key=position.__getitem__)
        done |= missing
    return order


def _needs(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """What must run before each node: its inputs, and for operators with effects the order that the graph had."""
    needs = {node: list(node.all_input_nodes) for node in graph.nodes}
    memory: dict[torch.fx.Node, torch.fx.Node] = {}
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    writer: dict[torch.fx.Node, torch.fx.Node] = {}
    random = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in graphs.VIEWS:
            memory[node] = memory.get(node.args[0], node.args[0])
        touched = {memory.get(source, source) for source in node.all_input_nodes}
        needs[node] += [writer[base] for base in touched if base in writer]
        for base in (memory.get(source, source) for source in compat.written_arguments(node)):
            needs[node] += readers[base]
            writer[base] = node
        for base in touched:
            readers[base].append(node)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            needs[node] += [random] if random is not None else []
            random = node
    return needs


def move(graph: torch.fx.Graph, order: list[torch.fx.Node]) -> None:
    """Put the nodes in this order behind the graph's inputs."""
    output = next(iter(graph.find_nodes(op="output")))
    for node in order:
        output.prepend(node)
