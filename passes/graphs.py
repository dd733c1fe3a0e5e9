"""How the passes recognise our exchanges: by the name of the group, and by nothing else that a user could also write.

The layer starts its exchanges on an alias of the user's group, `compile_overlap[8,8,8,8]:<group>`. The alias resolves
to the same communicator, survives every compiler stage and cache as a constant, cannot occur in anybody else's
collective, and carries the chunk sizes of the layer that wrote it.
"""

from __future__ import annotations

import re
from collections import Counter

import torch

_ALIAS = re.compile(r"^compile_overlap\[(\d+(?:,\d+)*)\]:(.+)$")
_START = torch.ops._c10d_functional.all_to_all_single.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def alias(group_name: str, sizes: tuple[int, ...]) -> str:
    """The name under which a layer with these chunk sizes uses the group `group_name`."""
    return f"compile_overlap[{','.join(map(str, sizes))}]:{group_name}"


def chunk_sizes(name: object) -> tuple[int, ...] | None:
    """The chunk sizes in an alias; None for any other group name."""
    found = _ALIAS.match(name) if isinstance(name, str) else None
    return tuple(int(size) for size in found.group(1).split(",")) if found else None


def starts(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Our exchanges' starts in an FX graph, in graph order."""
    calls = graph.find_nodes(op="call_function", target=_START)
    return [node for node in calls if chunk_sizes(node.args[3]) is not None]


def waits(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The waits applied directly to a start's result."""
    return [user for user in start.users if user.target is _WAIT]


def starts_by_alias(graph: torch.fx.Graph) -> Counter[str]:
    """How many exchanges each alias has in the graph."""
    return Counter(node.args[3] for node in starts(graph))


def is_our_collective(scheduler_node) -> bool:
    """Whether a scheduler node launches one of our exchanges."""
    ir_node = getattr(scheduler_node, "node", None)
    return any(chunk_sizes(value) is not None for value in getattr(ir_node, "constant_args", ()) or ())
