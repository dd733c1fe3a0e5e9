"""Lower to peers: exchanges become copies and stores into the peers' memory, the second GEMM and combine one kernel.

Contract
    in      a reordered post-grad graph, forward or backward, whose layers `discover` can read; only layers whose plan
            says so (`Plan.peers`) are touched
    out     for each chunk
            - `peer_put` in place of the pack and start of the first exchange, `peer_take` in place of its wait; where the
              plan begins with some tokens (`Plan.head`) or a rank's own rows (`Plan.own_first`), for the first chunk
              `peer_take_gemm` in place of the wait and the first GEMM, if that is a `bmm`, and `peer_rows` for what else
              reads the rows
            - `peer_gemm` in place of the last GEMM on the way, its bias, the pack and start of the second exchange
            and one `peer_finish` in place of the waits of all second exchanges and the concatenation of their rows
            (see `compile_overlap.peers`); the order is kept. Rows and results stay where they arrived, without a copy,
            if the graph has read them when the peers may write there again
    leaves  a layer to the collectives when it is built otherwise than such a plan says, and all of them when one begins
            before another one has ended (they would share an inbox): says so, and raises `UnknownStructure` under
            `A2A_FFN_TRANSPORT=peers`; every rank compiles the same graph, so all of them lower a layer or none does
    needs   `PinOrder`: an inbox is free again by the order alone (`transport` gives no such plan without the pass, and
            `verify` refuses a wrapper in another order)

What a view chain reads is not read off its operators: it is evaluated on a tensor without data, whose sizes, strides
and offset then must be those of the pack (or unpack) that the lowered operator does itself.
"""

from __future__ import annotations

import operator

import torch
import torch._inductor.config as inductor_config

from compile_overlap import compat, notice
from compile_overlap import peers  # noqa: F401  registers the operators
from compile_overlap.config import PEERS, Settings
from compile_overlap.kernels import gemm_combine

from . import graphs, verify
from .base import OverlapPass, UnknownStructure
from .discover import Chunk, Layer, discover

aten = torch.ops.aten
ops = torch.ops.compile_overlap
_VIEWS = graphs.VIEWS | graphs.RESHAPES


class LowerToPeers(OverlapPass):
    name = "lower-to-peers"

    def run(self, graph: torch.fx.Graph):
        layers = [layer for layer in discover(graph, unless_disabled=self.name) if layer.plan.peers]
        if not layers:
            return graph, 0
        if not _are_apart(graph, layers):
            _leave("layers that exchange through the same inboxes overlap")
            return graph, 0
        waits = {wait for layer in layers for chunk in layer.chunks for wait in chunk.waits}
        problems, matches = [], 0
        for layer in layers:
            try:
                _Lowering(graph, layer).run()
                matches += 3 * len(layer.chunks) + 1
            except UnknownStructure as problem:
                problems.append(problem)
        graph.eliminate_dead_code(lambda node: node.is_impure() and (node.users or node not in waits))
        _leave_results_in_place(graph)
        verify.expect(graph)
        if problems:
            _leave(str(problems[0]))
        return graph, matches


def _leave(why: str) -> None:
    """Say once that layers stay with the collectives. Raises UnknownStructure where the peers' memory was asked for."""
    if Settings.from_environment().transport == PEERS:
        raise UnknownStructure(why)
    notice.warn_once(f"exchanging by collectives, not through the peers' memory: {why}")


def _leave_results_in_place(graph: torch.fx.Graph) -> None:
    """Results that only this graph reads need no private copy, if no exchange follows: the peers write after the next."""
    nodes = list(graph.nodes)
    exchanges = {*graphs.starts(graph), *graphs.puts(graph)}
    for finish in graphs.finishes(graph):
        if exchanges.isdisjoint(nodes[nodes.index(finish) :]) and all(map(_computes, graphs.readers(finish))):
            finish.update_arg(5, False)


def _computes(node: torch.fx.Node) -> bool:
    """Whether a node reads its inputs once and for all: it returns none of them, whole or in part."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def _are_apart(graph: torch.fx.Graph, layers: list[Layer]) -> bool:
    place = {node: index for index, node in enumerate(graph.nodes)}
    spans = []
    for layer in layers:
        places = [place[node] for chunk in layer.chunks for node in (*chunk.starts, *chunk.waits)]
        spans.append((min(places), max(places)))
    spans.sort()
    return all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))


class _Lowering:
    """One layer's lowering; its sizes are read from its chunks' first exchanges.

    `run` inserts the new nodes, and only when all of them are found replaces the old ones.
    """

    def __init__(self, graph: torch.fx.Graph, layer: Layer):
        self.graph, self.layer = graph, layer
        start = layer.chunks[0].starts[0]
        self.alias, self.P = start.args[3], len(start.args[1])
        rows, _, self.width = start.args[0].meta["val"].shape
        self.batch, self.tokens = rows // self.P, sum(layer.plan.sizes)
        self.replaced: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        if any(len(chunk.starts) < 2 for chunk in layer.chunks):
            raise UnknownStructure(f"{start.name}: a layer without second exchanges cannot tell when its inbox is read")
        self.last = max((chunk.waits[1] for chunk in layer.chunks), key=self.place.get)
        self.told = max(self.place[chunk.starts[1]] for chunk in layer.chunks)

    def run(self) -> None:
        taken = [self._first_exchange(index, chunk) for index, chunk in enumerate(self.layer.chunks)]
        wholes, places = self._wholes()
        if [first for _, first in sorted(zip(places, taken))] != sorted(taken):
            raise UnknownStructure(f"{wholes}: put chunks together in another order than they were taken apart")
        stored = [self._second_exchange(chunk, first) for chunk, first in zip(self.layer.chunks, taken)]
        with self.graph.inserting_after(self.last):
            arguments = (stored, self.batch, self.tokens, self.width, self.P, True, self.alias)
            finish = self.graph.call_function(ops.peer_finish.default, arguments)
        finish.meta["val"] = stored[0].meta["val"].new_empty((self.batch, self.P, self.tokens, self.width))
        if self._read_packed():
            self._replace(self.layer.chunks[0].waits[1], self._packed(finish))
        for whole in wholes:
            if compat.simplified_split(whole) is None:
                self._replace(whole, finish)
            else:
                sizes = [chunk.size for _, chunk in sorted(zip(places, self.layer.chunks), key=lambda pair: pair[0])]
                with self.graph.inserting_before(whole):
                    split = self.graph.call_function(aten.split_with_sizes.default, (finish, sizes, 2))
                split.meta["val"] = finish.meta["val"].split_with_sizes(sizes, 2)
                self._replace(whole, split)
        for old, new in self.replaced:
            old.replace_all_uses_with(new)

    def _packed(self, finish: torch.fx.Node) -> torch.fx.Node:
        """The results as one second exchange would have brought them: [P*B,L,D]."""
        steps = (
            (aten.permute.default, ([1, 0, 2, 3],), {}),
            (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
            (aten.reshape.default, ([self.P * self.batch, self.tokens, self.width],), {}),
        )
        node = finish
        for target, arguments, options in steps:
            value = target(node.meta["val"], *arguments, **options)
            with self.graph.inserting_after(node):
                node = self.graph.call_function(target, (node, *arguments), options)
            node.meta["val"] = value
        return node

    def _first_exchange(self, index: int, chunk: Chunk) -> int:
        """Lower it, and return its first token."""
        start, wait = chunk.starts[0], chunk.waits[0]
        base, packed = _viewed(start.args[0])
        B, P, L, D = self.batch, self.P, self.tokens, self.width
        if packed.dim() == 3:  # with B = 1 nothing had to be transposed
            packed = packed.unflatten(0, (P, B))
        source = base.meta["val"]
        first, rest = divmod(packed.storage_offset(), D)
        expected = ((P, B, chunk.size, D), (L * D, P * L * D, D, 1))
        if source.numel() != B * P * L * D or not source.is_contiguous() or rest or not _same(packed, *expected):
            raise UnknownStructure(f"{start.name}: sends {_layout(packed)} of {_layout(source)}, not a slice of tokens")
        first_gemm = self._begun_in_parts(chunk) if index == 0 else None
        # The last GEMM tells the others that they may write again.
        in_place = {*chunk.gemms, *chunk.free, *self._sums(wait)}
        keep = any(each not in in_place or self.place[each] > self.told for each in graphs.readers(wait))
        which = (first, chunk.size, P)
        with self.graph.inserting_before(start):
            shaped = self.graph.call_function(aten.reshape.default, (base, [B, P, L, D]))
            shaped.meta["val"] = source.reshape(B, P, L, D)
            stored = chunk.size if index == 0 else 0
            if first_gemm is not None:
                stored = 0 if self.layer.plan.own_first else self.layer.plan.stored(chunk.size)
            put = self.graph.call_function(ops.peer_put.default, (shaped, index, *which, stored, self.alias))
            put.meta["val"] = source.new_empty(0)
        with self.graph.inserting_before(wait):
            if first_gemm is None:
                arguments = (put, shaped, index, *which, stored, keep, self.alias)
                rows = self.graph.call_function(ops.peer_take.default, arguments)
            else:
                triton = first_gemm.target is not aten.bmm.default
                arguments = (put, shaped, first_gemm.args[1], index, *which, stored, triton, self.alias)
                product = self.graph.call_function(ops.peer_take_gemm.default, arguments)
                product.meta["val"] = first_gemm.meta["val"]
                self._replace(first_gemm, product)
                rows = self.graph.call_function(ops.peer_rows.default, (product, shaped, *which, keep, self.alias))
        rows.meta["val"] = wait.meta["val"]
        self._replace(wait, rows)
        return first

    def _sums(self, wait: torch.fx.Node) -> set[torch.fx.Node]:
        """Sums of received rows that are computed where they stand, and not, as a few terms are, by whatever reads them."""
        unrolled = self.P * self.batch <= inductor_config.unroll_reductions_threshold
        sums = {node for node in graphs.readers(wait) if node.target in graphs.SUMS}
        return {node for node in sums if node.target is ops.row_sum.default or not unrolled}

    def _begun_in_parts(self, chunk: Chunk) -> torch.fx.Node | None:
        """The chunk's first GEMM, if the plan begins it before all rows are there and it multiplies what has arrived."""
        plan = self.layer.plan
        parts = plan.own_first or plan.stored(chunk.size) < chunk.size
        gemm = chunk.gemms[0] if parts and len(chunk.gemms) > 1 else None
        if gemm is None or gemm.target not in (aten.bmm.default, ops.chunk_bmm_triton.default):
            return None
        node, value = gemm.args[0], None
        chain = []
        while node.target in _VIEWS:
            chain.append(node)
            node = node.args[0]
        if node is not chunk.waits[0]:
            return None
        rows, D = self.P * self.batch, self.width
        value = torch.empty((rows, chunk.size, D), device="meta")
        for view in reversed(chain):
            value = view.target(value, *view.args[1:], **view.kwargs)
        if not _same(value, (chunk.size, rows, D), (D, chunk.size * D, 1)) or value.storage_offset():
            return None
        return gemm if self._hoist(gemm.args[1], chunk.waits[0]) else None

    def _hoist(self, node: torch.fx.Node, before: torch.fx.Node) -> bool:
        """Move `node`, and what it needs, before another where they come later; False if they depend on that one."""
        place = {each: index for index, each in enumerate(self.graph.nodes)}
        later, pending = set(), [node]
        while pending:
            each = pending.pop()
            if each is before or (place[each] > place[before] and each.is_impure()):
                return False
            if place[each] > place[before] and each not in later:
                later.add(each)
                pending += each.all_input_nodes
        for each in sorted(later, key=place.get):
            before.prepend(each)
        return True

    def _second_exchange(self, chunk: Chunk, first: int) -> torch.fx.Node:
        start = chunk.starts[1]
        base, packed = _viewed(start.args[0])
        rows, D = self.P * self.batch, self.width
        if not _same(packed, (rows, chunk.size, D), (D, rows * D, 1)) or packed.storage_offset():
            raise UnknownStructure(f"{start.name}: sends {_layout(packed)} of {base.name}, not a transposed product")
        gemm = chunk.gemms[-1] if chunk.gemms else None
        bias, form = None, gemm_combine.NO_BIAS
        if base is not gemm and base.target is aten.add.Tensor and base.args[0] is gemm and not base.kwargs:
            bias, form = base.args[1], gemm_combine.ADD
        elif base is gemm and gemm.target is aten.baddbmm.default and not gemm.kwargs:
            bias, form = gemm.args[0], gemm_combine.BADDBMM
        elif base is not gemm or gemm.target is not aten.bmm.default:
            raise UnknownStructure(f"{start.name}: sends {base.name} ({base.target}), not a GEMM with or without a bias")
        left, right = gemm.args[-2:]
        with self.graph.inserting_before(start):
            if bias is not None:
                value = bias.meta["val"]
                if value.shape[1] != 1 and value.stride(1) != 0:
                    raise UnknownStructure(f"{bias.name}: differs between rows, it is no bias")
                bias = self.graph.call_function(aten.select.int, (bias, 1, 0))
                bias.meta["val"] = value.select(1, 0)
            arguments = (left, right, bias, form, first, self.tokens, self.P, self.alias)
            stored = self.graph.call_function(ops.peer_gemm.default, arguments)
            stored.meta["val"] = start.meta["val"].new_empty(0)
        return stored

    def _wholes(self) -> tuple[list[torch.fx.Node], list[int]]:
        """The nodes that hold all chunks' rows [B,P,L,D], and each chunk's place in them.

        These are concatenations, and what Inductor makes of one whose only reader splits it again (the chunks
        themselves, in a tuple). A single chunk is whole; where it is only read to be copied, the copy is.
        """
        unpacked = [self._unpacked(chunk) for chunk in self.layer.chunks]
        if len(unpacked) == 1:
            return [_copy_of(end) or end for end in unpacked[0]], [0]
        ends = [chunk_ends[0] for chunk_ends in unpacked]
        if any(len(chunk_ends) > 1 for chunk_ends in unpacked) or self._read_packed():
            raise UnknownStructure(f"{unpacked}: chunks are read apart from each other")
        wholes, orders = list(ends[0].users), set()
        for whole in wholes:
            parts = compat.simplified_split(whole)
            if parts is None and whole.target is aten.cat.default and whole.args[1:] in ((2,), (-2,)):
                parts = whole.args[0]
            if parts is None or set(parts) != set(ends) or len(parts) != len(ends):
                raise UnknownStructure(f"{whole.name} ({whole.target}): does not put the chunks {ends} together along L")
            orders.add(tuple(parts.index(end) for end in ends))
        if len(orders) != 1 or any(list(end.users) != wholes for end in ends):
            raise UnknownStructure(f"{wholes}: do not put the chunks {ends} together alike")
        return wholes, list(orders.pop())

    def _unpacked(self, chunk: Chunk) -> list[torch.fx.Node]:
        """The views [B,P,l,D] of what a chunk's second exchange brought: one for each chain of views that reads it.

        Whatever reads it in another layout (`_read_packed`) is left out.
        """
        B, P, l, D = self.batch, self.P, chunk.size, self.width
        ends, pending = [], [(chunk.waits[1], torch.empty((P * B, l, D), device="meta"))]
        while pending:
            node, value = pending.pop()
            if _same(value, (B, P, l, D), (l * D, B * l * D, D, 1)):
                ends.append(node)
                continue
            views = [user for user in node.users if user.target in _VIEWS]
            pending += [(user, user.target(value, *user.args[1:], **user.kwargs)) for user in views]
        if not ends:
            raise UnknownStructure(f"{chunk.waits[1].name}: nothing unpacks it into [B,P,l,D]")
        return ends

    def _read_packed(self) -> bool:
        """Whether anything reads what a second exchange brought before it is unpacked."""
        ends = {end for chunk in self.layer.chunks for end in self._unpacked(chunk)}
        pending = [chunk.waits[1] for chunk in self.layer.chunks]
        while pending:
            node = pending.pop()
            if node in ends:
                continue
            if any(user.target not in _VIEWS for user in node.users):
                return True
            pending += node.users
        return False

    def _replace(self, old: torch.fx.Node, new: torch.fx.Node) -> None:
        new.meta = {**old.meta, **new.meta}
        new.meta.pop(compat.OF_ARGUMENTS, None)
        self.replaced.append((old, new))


def _copy_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The contiguous copy that is all that reads a node; None if anything else does."""
    users = list(node.users)
    copied = len(users) == 1 and users[0].target is aten.clone.default
    return users[0] if copied and users[0].kwargs.get("memory_format") is torch.contiguous_format else None


def _viewed(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.Tensor]:
    """The tensor that a contiguous copy was made of, and the view of it that was copied, evaluated without data."""
    chain = []
    while node.target in _VIEWS or node.target is aten.clone.default:
        chain.append(node)
        node = node.args[0]
    base, value = node, torch.empty_like(node.meta["val"], device="meta")
    for node in reversed(chain):
        if node.target is aten.clone.default:
            return base, value
        if node.target is operator.getitem:
            value = value[node.args[1]]
        else:
            value = node.target(value, *node.args[1:], **node.kwargs)
    return base, value


def _same(value: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a tensor has this shape and, where a dimension is longer than one, these strides."""
    if tuple(value.shape) != shape:
        return False
    return all(size == 1 or own == stride for size, own, stride in zip(shape, value.stride(), strides))


def _layout(value: torch.Tensor) -> str:
    return f"{list(value.shape)} (strides {list(value.stride())}, offset {value.storage_offset()})"
