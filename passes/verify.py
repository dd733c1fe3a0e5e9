"""Verify: the generated wrapper issues exchanges, waits and GEMMs in the order that the schedule asked for.

Contract
    in      the FX graph after `Reorder`, and the Python wrapper that Inductor generated from it
    out     nothing; what was compared is in the pass log (one match for each start, wait and GEMM)
    raises  `ContractError` when the two orders differ, under `A2A_FFN_STRICT=1` and where exchanges go through the peers'
            memory, whose buffers are free again by that order alone; otherwise it warns once

Starts are compared by their place in the order of starts, waits by the start whose buffer they take, exchanges through
the peers' memory by their operators. GEMMs are compared where the graph holds no others than ours (a wrapper does not say
whose a GEMM is) and Inductor calls them as they are (not under `max_autotune`). C++ wrappers are not read. Code that
comes from a warm cache was verified when it was generated.
"""

from __future__ import annotations

import re
import time

import torch
import torch._inductor.config as inductor_config

from compile_overlap import compat, notice
from compile_overlap.config import Settings

from . import graphs
from .base import ContractError, PassReport
from .discover import GEMMS, discover

NAME = "verify"
_KEY = "compile_overlap_order"
_START = re.compile(r"^\s*(\w+) = torch\.ops\._c10d_functional\.all_to_all_single\.default\(.*'(compile_overlap\[[^']*)'")
_WAIT = re.compile(r"torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)")
_PEER_NODE = re.compile(r"compile_overlap\.(peer_\w+)\.default")
_OURS = r"(?:torch\.ops\.compile_overlap|compile_overlap_direct)\."
_PEER = re.compile(_OURS + r"(peer_\w+)(?:\.default)?\(")
_GEMM = re.compile(r"extern_kernels\.(?:bmm|baddbmm|mm|addmm|compile_overlap_chunk_bmm)\(|" + _OURS + r"chunk_b\w+(?:\.default)?\(")


def expect(graph: torch.fx.Graph) -> None:
    """Remember the order of a graph that has been reordered, for the wrapper that comes of it."""
    ours = {node for layer in discover(graph) for chunk in layer.chunks for node in (*chunk.gemms, *chunk.free)}
    alone = not any(node.target in GEMMS and node not in ours for node in graph.nodes)
    starts = {start: index for index, start in enumerate(graphs.starts(graph))}
    order = []
    for node in graph.nodes:
        if node in starts:
            order.append(f"start {starts[node]}")
        elif node.target is graphs.WAIT and node.args[0] in starts:
            order.append(f"wait {starts[node.args[0]]}")
        elif peer := _PEER_NODE.match(str(node.target)):
            order.append(peer.group(1))
        elif alone and node in ours:
            order.append("gemm")
    graph.owning_module.meta[_KEY] = order


def order_in_wrapper(code: str) -> list[str]:
    """Our starts and waits and all GEMMs in the generated code, in the notation of `expect`."""
    order, buffers = [], {}
    for line in code.splitlines():
        if start := _START.match(line):
            order.append(f"start {len(buffers)}")
            buffers[start.group(1)] = len(buffers)
        elif (wait := _WAIT.search(line)) and wait.group(1) in buffers:
            order.append(f"wait {buffers[wait.group(1)]}")
        elif peer := _PEER.search(line):
            order.append(peer.group(1))
        elif _GEMM.search(line):
            order.append("gemm")
    return order


def compare(expected: list[str], code: str) -> None:
    """Raise `ContractError` unless the generated code has the expected order."""
    found = order_in_wrapper(code)
    if "gemm" not in expected:
        found = [step for step in found if step != "gemm"]
    if found == expected:
        return
    at = next((i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1]), min(len(expected), len(found)))
    raise ContractError(
        f"the wrapper leaves the schedule at step {at}: expected {expected[at : at + 4]}, found {found[at : at + 4]} "
        f"(of {len(expected)} and {len(found)} steps)"
    )


def check_wrapper(code: str, record) -> None:
    """Called with every wrapper that Inductor generates; compares those whose graph holds our layers."""
    expected = compat.graph_meta(_KEY)
    if not expected or compat.writes_cpp_wrapper():
        return
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        expected = [step for step in expected if step != "gemm"]
    begin = time.perf_counter()
    try:
        compare(expected, code)
    except ContractError as error:
        if Settings.from_environment().strict or any(step.startswith("peer") for step in expected):
            raise
        notice.warn_once(f"{error}; communication may be exposed, results are not affected")
        return
    record(PassReport(NAME, len(expected), time.perf_counter() - begin, len(expected), len(expected)))
