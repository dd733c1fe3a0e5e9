"""How the passes recognise our exchanges: by the name of the group, and by nothing else that a user could also write.

The layer starts its exchanges on an alias of the user's group, `compile_overlap[8,8,8,8 r4 a2 b1 s0]:<group>`. The alias
resolves to the same communicator, survives every compiler stage and cache as a constant, cannot occur in anybody else's
collective, and carries the plan (`compile_overlap.schedule.Plan`) of the layer that wrote it.
"""

from __future__ import annotations

import operator
import re
from collections import Counter

import torch

from compile_overlap.recipes import exact  # noqa: F401  registers the operator in `SUMS`
from compile_overlap.schedule import Plan

_ALIAS = re.compile(r"^compile_overlap\[([^\]]+)\]:(.+)$")
START = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
aten = torch.ops.aten
VIEWS = {
    operator.getitem,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.permute.default,
    aten.transpose.int,
    aten.view.default,
    aten.expand.default,
    aten.alias.default,
}
RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


# Reductions over rows that a chunk's first exchange brought: bias gradients.
SUMS = {aten.sum.dim_IntList, torch.ops.compile_overlap.row_sum.default}


def alias(group_name: str, plan: Plan) -> str:
    """The name under which a layer with this plan uses the group `group_name`."""
    return f"compile_overlap[{plan}]:{group_name}"


def plan_of(name: object) -> Plan | None:
    """The plan in an alias; None for any other group name."""
    found = _ALIAS.match(name) if isinstance(name, str) else None
    return Plan.parse(found.group(1)) if found else None


def starts(graph: torch.fx.Graph, unless_disabled: str = "") -> list[torch.fx.Node]:
    """Our exchanges' starts in an FX graph, in graph order, without those of layers that switch that pass off."""
    plans = ((node, plan_of(node.args[3])) for node in graph.find_nodes(op="call_function", target=START))
    return [node for node, plan in plans if plan is not None and unless_disabled not in plan.disabled]


def finishes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Where our exchanges end after `LowerToPeers`."""
    return list(graph.find_nodes(op="call_function", target=torch.ops.compile_overlap.peer_finish.default))


def puts(graph: torch.fx.Graph, unless_disabled: str = "") -> list[torch.fx.Node]:
    """Our exchanges' starts after `LowerToPeers`."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.compile_overlap.peer_put.default)
    return [node for node in nodes if unless_disabled not in plan_of(node.args[-1]).disabled]


def waits(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The waits applied directly to a start's result."""
    return [user for user in start.users if user.target is WAIT]


def readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What reads a tensor, directly or through views."""
    found: set[torch.fx.Node] = set()
    for user in node.users:
        found |= readers(user) if user.target in VIEWS | RESHAPES else {user}
    return found


def starts_by_alias(graph: torch.fx.Graph, unless_disabled: str = "") -> Counter[str]:
    """How many exchanges each alias has in the graph, without layers that switch that pass off."""
    return Counter(node.args[3] for node in starts(graph, unless_disabled))


def scheduler_plan(scheduler_node) -> Plan | None:
    """The plan of the exchange that a scheduler node launches; None where it launches none of ours."""
    ir_node = getattr(scheduler_node, "node", None)
    plans = (plan_of(value) for value in getattr(ir_node, "constant_args", ()) or ())
    return next((plan for plan in plans if plan is not None), None)
