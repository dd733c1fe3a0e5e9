"""Check: what the later stages rely on holds for every exchange of ours in a post-grad graph.

Contract
    in      a post-grad graph, forward or backward, that may hold any number of our layers and anything else
    out     the same graph, unchanged
    raises  `ContractError` unless, for every exchange of ours:
            1. exactly one wait is applied, directly to the collective's result (a view between them hides from
               Inductor that the buffer is in flight);
            2. nothing else uses the result in flight;
            3. send and receive splits are equal blocks, one per rank (the plan's only exchange);
            4. each alias occurs a multiple of C times for its C chunks (C for an exchange direction of one layer);
               a graph whose equal exchanges were merged breaks this one or, where their waits were not merged too
               (torch 2.14), the first, which is an `UnknownStructure`.
"""

from __future__ import annotations

import torch

from . import graphs
from .base import ContractError, OverlapPass, UnknownStructure


class CheckExchanges(OverlapPass):
    name = "check-exchanges"

    def run(self, graph: torch.fx.Graph):
        found = graphs.starts(graph, unless_disabled=self.name)
        for start in found:
            self._check(start)
        for alias, count in graphs.starts_by_alias(graph, unless_disabled=self.name).items():
            chunks = len(graphs.plan_of(alias).sizes)
            if count % chunks:
                raise UnknownStructure(f"{alias}: {count} exchanges for {chunks} chunks")
        return graph, len(found)

    def _check(self, start: torch.fx.Node) -> None:
        waits = graphs.waits(start)
        if len(waits) == len(start.users) > 1:
            raise UnknownStructure(f"{start.name}: must be waited exactly once, but equal exchanges were merged")
        if len(waits) != 1 or len(start.users) != 1:
            users = ", ".join(str(user.target) for user in start.users) or "nothing"
            raise ContractError(f"{start.name}: must be waited exactly once, directly; it is used by {users}")
        receive, send = start.args[1], start.args[2]
        if list(receive) != list(send) or len(set(send)) > 1:
            raise ContractError(f"{start.name}: splits {send} -> {receive} are not equal blocks")
