"""The passes on graphs of the fake process group: counts, contracts that reject, hooks of others left alone."""

import operator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import passes
from compile_overlap.schedule import Plan
from passes import graphs
from passes.base import ContractError, GraphChain
from passes.check_exchanges import CheckExchanges
from passes.localize_views import LocalizeViews
from passes.pin_order import PinOrder

START = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
PLAN = Plan((2, 2))
NAME = graphs.alias("0", PLAN)


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def graph_of(exchanges=2, waits=1, view_between=False, splits=(4, 4), name=NAME):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 2, 3)
    outs = []
    for _ in range(exchanges):
        start = graph.call_function(START, (x, list(splits), list(splits), name))
        waited = graph.call_function(torch.ops.aten.view.default, (start, [-1])) if view_between else start
        outs += [graph.call_function(WAIT, (waited,)) for _ in range(waits)]
    graph.output(tuple(outs))
    return torch.fx.GraphModule(torch.nn.Module(), graph).graph


def test_alias_carries_the_plan():
    assert graphs.plan_of(NAME) == PLAN
    assert graphs.plan_of("0") is None and graphs.plan_of(7) is None


def test_check_counts_our_exchanges_and_ignores_others():
    assert CheckExchanges().run(graph_of())[1] == 2
    assert CheckExchanges().run(graph_of(name="0", waits=0))[1] == 0


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"waits": 0}, "waited exactly once"),
        ({"waits": 2}, "waited exactly once"),
        ({"view_between": True}, "waited exactly once"),
        ({"splits": (3, 5)}, "equal blocks"),
        ({"exchanges": 3}, "3 exchanges for 2 chunks"),
    ],
)
def test_check_rejects(broken, message):
    with pytest.raises(ContractError, match=message):
        CheckExchanges().run(graph_of(**broken))


def test_localize_moves_views_of_inputs_to_their_first_user():
    graph = torch.fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    split = graph.call_function(torch.ops.aten.split_with_sizes.default, (w, [2, 2]))
    parts = [graph.call_function(operator.getitem, (split, i)) for i in range(2)]
    shifts = [graph.call_function(torch.ops.aten.unsqueeze.default, (part, 1)) for part in parts]
    previous, outs = x, []
    for shift in shifts:
        start = graph.call_function(START, (previous, [4, 4], [4, 4], NAME))
        waited = graph.call_function(WAIT, (start,))
        previous = graph.call_function(torch.ops.aten.add.Tensor, (waited, shift))
        outs.append(previous)
    graph.output(tuple(outs))
    assert LocalizeViews().run(graph)[1] == 2
    graph.lint()
    names = [node.name for node in graph.nodes]
    for part, shift, out in zip(parts, shifts, outs):
        assert names.index(shift.name) == names.index(out.name) - 1
        assert names.index(part.name) == names.index(shift.name) - 1


def test_localize_leaves_graphs_without_our_exchanges_alone():
    graph = torch.fx.Graph()
    w = graph.placeholder("w")
    view = graph.call_function(torch.ops.aten.unsqueeze.default, (w, 0))
    one = graph.call_function(torch.ops.aten.neg.default, (w,))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (one, view)),))
    before = [node.name for node in graph.nodes]
    assert LocalizeViews().run(graph)[1] == 0
    assert [node.name for node in graph.nodes] == before


def test_uuid_hashes_source_and_settings():
    class Tuned(CheckExchanges):
        def settings(self):
            return "budget=2"

    assert CheckExchanges().uuid() == CheckExchanges().uuid() != Tuned().uuid()
    assert PinOrder().uuid() != CheckExchanges().uuid()


class Theirs:
    """Somebody else's hook, with or without a uuid."""

    def __init__(self, name=None):
        self.seen = []
        if name:
            self.uuid = lambda: name

    def __call__(self, subject):
        self.seen.append(subject)
        return subject


def test_install_is_idempotent_and_runs_after_others():
    import torch._inductor.config as config

    theirs = Theirs()
    with config.patch(post_grad_custom_post_pass=theirs):
        passes.install()
        installed = config.post_grad_custom_post_pass
        passes.install()
        assert config.post_grad_custom_post_pass is installed and isinstance(installed, GraphChain)
        before = len(passes.pass_log())
        installed(graph_of())
        assert [report.name for report in passes.pass_log()[before:]] == ["check-exchanges", "reorder"]
    assert len(theirs.seen) == 1


def test_the_cache_key_covers_every_pass_and_every_other_hook(monkeypatch):
    import torch._inductor.config as config

    def key(**hooks):
        with config.patch(**{"post_grad_custom_post_pass": None, "_pre_fusion_custom_pass": None, **hooks}):
            passes.install()
            return config.post_grad_custom_post_pass.uuid()

    plain = key()
    assert plain == key() and plain is not None
    assert len({plain, key(_pre_fusion_custom_pass=Theirs("a")), key(_pre_fusion_custom_pass=Theirs("b"))}) == 3
    assert key(_pre_fusion_custom_pass=Theirs()) is None
    monkeypatch.setattr(PinOrder, "settings", lambda self: "changed")
    assert key() != plain


def _saved_for_backward(call, x):
    """(dtype, shape) of what the compiled forward graph returns beside its output, for each token of its first axis."""
    from torch._inductor.compile_fx import compile_fx

    class Stop(Exception):
        pass

    saved = []

    def capture(graph, _, **settings):
        output = next(iter(graph.graph.find_nodes(op="output")))
        saved.extend(node.meta["val"] for node in output.args[0][1:] if node.op != "placeholder")
        raise Stop

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=capture, config_patches=passes.config_patches())

    torch._dynamo.reset()
    with pytest.raises(Exception, match="Stop"):
        torch.compile(call, backend=backend, dynamic=False)(x.clone().requires_grad_())
    return saved


@pytest.mark.parametrize("pre", [False, True])
def test_every_chunk_saves_what_the_unchunked_layer_saves(fake_group, pre):
    from archive_double import ArchiveBlock, ArchiveFFN

    dim, k, tokens = 1280, 6, 16
    ffn = ArchiveFFN(tokens, dim, k, group=fake_group, size=2, index=0)
    block = ArchiveBlock(ffn, tokens, dim, pre=pre).bfloat16()
    x = torch.randn(2, tokens, dim).bfloat16()

    def per_token(mode):
        totals = {}
        for value in _saved_for_backward(lambda t: block(t, overlap=mode), x):
            if value.dim() == 3 and value.shape[1] == 4 and value.shape[0] in (2, 8):
                key = (value.dtype, tuple(value.shape[1:]))
                totals[key] = totals.get(key, 0) + value.shape[0]
        return totals

    assert per_token("none") == per_token("kernel") != {}
