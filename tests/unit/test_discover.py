"""Discovery, reordering and lowering on small graphs, and what each of them refuses."""

import pytest
import torch

from compile_overlap import notice
from compile_overlap.schedule import FORWARD, Plan, Work
from passes import graphs, reorder, verify
from passes.base import ContractError, UnknownStructure
from passes.discover import discover
from passes.lower_gemms import InPlaceGradients, ReserveSMs
from passes.reorder import Reorder, node_order

aten = torch.ops.aten
ROWS, DIM = 4, 3


class Builder:
    """Writes graphs of [rows,l,DIM] exchanges and [l,..] GEMMs with the metadata that the passes read."""

    def __init__(self, plan=Plan((2, 2))):
        self.graph, self.name = torch.fx.Graph(), graphs.alias("0", plan)

    def input(self, name, *shape):
        return self._typed(self.graph.placeholder(name), shape)

    def call(self, target, shape, *args):
        return self._typed(self.graph.call_function(target, args), shape)

    def exchange(self, send, size):
        start = self.call(graphs.START, (ROWS, size, DIM), send, [2, 2], [2, 2], self.name)
        return start, self.call(graphs.WAIT, (ROWS, size, DIM), start)

    def chunk(self, send, weight, size, gemms=2, free=0, second=True):
        """(result, free GEMMs): first exchange, GEMMs, second exchange."""
        _, node = self.exchange(send, size)
        free = [self.call(aten.bmm.default, (size, DIM, DIM), node, weight) for _ in range(free)]
        for _ in range(gemms):
            node = self.call(aten.bmm.default, (ROWS, size, DIM), node, weight)
        return (self.exchange(node, size)[1] if second else node), free

    def done(self, *outs):
        self.graph.output(tuple(outs))
        return torch.fx.GraphModule(torch.nn.Module(), self.graph).graph

    def _typed(self, node, shape):
        node.meta["val"] = torch.empty(shape, device="meta")
        return node


def chunks_of(plan=Plan((2, 2)), found=None, layers=1, **kinds):
    build = Builder(plan)
    outs, weight = [], build.input("w", ROWS, DIM, DIM)
    sends = [build.input(f"x{index}", ROWS, size, DIM) for index, size in enumerate(found or plan.sizes)]
    for _ in range(layers):
        parts = [build.chunk(send, weight, send.meta["val"].shape[1], **kinds) for send in sends]
        outs = [part for part, _ in parts]
        whole = build.call(aten.cat.default, (ROWS, sum(plan.sizes), DIM), outs, 1)
        sends = [build.call(aten.slice.Tensor, out.meta["val"].shape, whole, 1, 0, 1) for out in outs]
    gradients = [node for _, free in parts for node in free]
    extra = [build.call(aten.cat.default, (4, DIM, DIM), gradients)] if gradients else []
    return build.done(*outs, *extra)


@pytest.mark.parametrize("second, free", [(True, 0), (True, 2), (False, 1)])
def test_what_a_chunk_holds(second, free):
    (layer,) = discover(chunks_of(free=free, second=second))
    # Without a second exchange the first GEMM is on the way to the second one, which is free.
    assert [chunk.work() for chunk in layer.chunks] == [Work(1 + second, free + (not second), second)] * 2
    assert [chunk.size for chunk in layer.chunks] == [2, 2]


def test_layers_that_follow_one_another_are_told_apart():
    layers = discover(chunks_of(layers=2))
    assert [layer.level for layer in layers] == [0, 2]
    assert all(chunk.work() == Work(2) for layer in layers for chunk in layer.chunks)


def test_sizes_may_come_reversed():
    (layer,) = discover(chunks_of(Plan((1, 3)), found=(3, 1)))
    assert layer.plan.sizes == (3, 1)


def test_other_graphs_hold_no_layer():
    build = Builder()
    build.name = "0"
    assert discover(build.done(build.exchange(build.input("x", ROWS, 2, DIM), 2)[1])) == []


def _second_of_two_chunks():
    build = Builder()
    first, second = (build.exchange(build.input(f"x{i}", ROWS, 2, DIM), 2)[1] for i in range(2))
    both = build.call(aten.add.Tensor, (ROWS, 2, DIM), first, second)
    return build.done(build.exchange(both, 2)[1])


def _different_work():
    build = Builder()
    weight = build.input("w", ROWS, DIM, DIM)
    return build.done(*(build.chunk(build.input(f"x{i}", ROWS, 2, DIM), weight, 2, gemms=i + 1)[0] for i in range(2)))


def _waited_twice():
    build = Builder()
    start, wait = build.exchange(build.input("x", ROWS, 2, DIM), 2)
    return build.done(wait, build.call(graphs.WAIT, (ROWS, 2, DIM), start))


@pytest.mark.parametrize(
    "graph, message",
    [
        (_second_of_two_chunks, "one chunk's first exchange alone"),
        (_different_work, "different work"),
        (_waited_twice, "waited exactly once"),
        (lambda: chunks_of(found=(2, 3)), "the plan says"),
    ],
)
def test_discovery_rejects(graph, message):
    with pytest.raises(ContractError, match=message):
        discover(graph())


def test_reorder_follows_the_schedule_and_keeps_every_node():
    graph = chunks_of()
    before = set(graph.nodes)
    assert Reorder().run(graph)[1] == 2 * (2 + 2 + 2)
    graph.lint()
    assert set(graph.nodes) == before
    expected = graph.owning_module.meta["compile_overlap_order"]
    assert expected == [
        *("start 0", "start 1", "wait 0", "gemm", "gemm", "start 2"),
        *("wait 1", "gemm", "gemm", "start 3", "wait 2", "wait 3"),
    ]


def test_an_order_that_cannot_run_is_refused():
    graph = chunks_of()
    (layer,) = discover(graph)
    anchors = reorder.in_order(layer, reorder.schedule_of(layer))
    with pytest.raises(ContractError, match="which it depends on"):
        node_order(graph, anchors[::-1])


def test_readers_stay_on_their_side_of_a_write():
    build = Builder(Plan((2,)))
    buffer, x = build.input("buffer", ROWS, 2, DIM), build.input("x", ROWS, 2, DIM)
    view = build.call(aten.view.default, (ROWS, 2, DIM), buffer, [ROWS, 2, DIM])
    early = build.call(aten.neg.default, (ROWS, 2, DIM), view)
    write = build.call(aten.copy_.default, (ROWS, 2, DIM), buffer, x)
    late = build.call(aten.neg.default, (ROWS, 2, DIM), buffer)
    wait = build.exchange(late, 2)[1]
    graph = build.done(wait, early)
    order = node_order(graph, [wait.args[0], wait])
    assert order.index(early) < order.index(write) < order.index(late) < order.index(wait)


def test_random_numbers_keep_their_order():
    build = Builder(Plan((2,)))
    first, second = (build.call(aten.rand.default, (ROWS, 2, DIM), [ROWS, 2, DIM]) for _ in range(2))
    wait = build.exchange(second, 2)[1]
    order = node_order(build.done(wait, first), [wait.args[0], wait])
    assert order.index(first) < order.index(second)


def test_gemms_are_lowered_where_the_plan_says():
    graph = chunks_of(Plan((2, 2), reserved_sms=8), free=2)
    assert InPlaceGradients().run(graph)[1] == 4
    assert ReserveSMs().run(graph)[1] == 4
    calls = graph.find_nodes(op="call_function", target=torch.ops.compile_overlap.chunk_bmm.default)
    assert sorted(node.args[2:] for node in calls) == [(8, False)] * 4 + [(8, True)] * 4
    assert ReserveSMs().run(chunks_of(free=2))[1] == 0


def test_a_weight_gradient_without_a_whole_is_refused():
    build = Builder()
    weight = build.input("w", ROWS, DIM, DIM)
    parts = [build.chunk(build.input(f"x{i}", ROWS, 2, DIM), weight, 2, free=1) for i in range(2)]
    graph = build.done(*(node for out, free in parts for node in (out, *free)))
    with pytest.raises(UnknownStructure, match="one concatenation"):
        InPlaceGradients().run(graph)


def test_weight_gradients_that_something_else_reads_are_refused():
    build = Builder()
    weight = build.input("w", ROWS, DIM, DIM)
    parts = [build.chunk(build.input(f"x{i}", ROWS, 2, DIM), weight, 2, free=1) for i in range(2)]
    gradients = [node for _, free in parts for node in free]
    whole = build.call(aten.cat.default, (4, DIM, DIM), gradients)
    doubled = build.call(aten.add.Tensor, (2, DIM, DIM), gradients[0], gradients[0])
    graph = build.done(*(out for out, _ in parts), whole, doubled)
    with pytest.raises(UnknownStructure, match="nothing else reads"):
        InPlaceGradients().run(graph)


def test_a_pass_that_is_switched_off_does_nothing():
    names = ("inplace-gradients", "reorder", "reserve-sms")
    graph = chunks_of(Plan((2, 2), reserved_sms=8, disabled=names), free=1)
    before = list(graph.nodes)
    assert [each().run(graph)[1] for each in (Reorder, InPlaceGradients, ReserveSMs)] == [0, 0, 0]
    assert list(graph.nodes) == before


WRAPPER = """
    buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [2], [2], 'compile_overlap[2 r4 a2 b1 s0]:0')
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    extern_kernels.bmm(buf1, w, out=buf2)
"""


def test_the_order_is_read_from_the_wrapper():
    assert verify.order_in_wrapper(WRAPPER) == ["start 0", "wait 0", "gemm"]
    verify.compare(["start 0", "wait 0"], WRAPPER)
    with pytest.raises(ContractError, match="at step 1: expected .'gemm'"):
        verify.compare(["start 0", "gemm", "wait 0"], WRAPPER)


def test_outside_strict_mode_a_wrong_wrapper_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(verify.compat, "graph_meta", lambda key: ["wait 0"])
    monkeypatch.setattr(notice, "_SAID", set())
    for _ in range(2):
        verify.check_wrapper(WRAPPER, pytest.fail)
    assert len([r for r in caplog.records if "leaves the schedule" in r.message]) == 1


def test_schedules_of_graphs_are_forward_unless_a_backward_is_compiled():
    (layer,) = discover(chunks_of())
    assert reorder.schedule_of(layer).direction == FORWARD
