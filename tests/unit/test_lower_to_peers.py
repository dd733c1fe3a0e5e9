"""Which layers are lowered to the peers' memory, and which are left to the collectives; on the fake process group."""

import logging
import re
from dataclasses import replace

import pytest
import torch
from archive_double import ArchiveFFN
from test_user_graphs import P, TOKENS, WIDTH, _call, _input, _run
from torch.utils.checkpoint import checkpoint

from compile_overlap import norms, notice, operators, peer_layer, transport
from compile_overlap.config import Settings
from compile_overlap.costs import Costs
from compile_overlap.kernels import exact_gated_norm
from compile_overlap.known_plans import Problem
from compile_overlap.layout import Layout
from passes import verify
from passes.base import ContractError
from passes.discover import discover
from passes.lower_to_peers import LowerToPeers

PEERS = {"A2A_FFN_TRANSPORT": "peers", "A2A_FFN_RECIPE": "inductor"}


@pytest.fixture(autouse=True)
def played_by_gloo(monkeypatch):
    import peers_by_gloo

    monkeypatch.setattr(transport, "_obstacle", transport._obstacle)
    peers_by_gloo.install()


def _lowered(log):
    return [matches for name, matches in log if name == "lower-to-peers"]


def test_both_directions_are_lowered_and_verified(monkeypatch):
    log = _run(monkeypatch, lambda layer: _call(layer(), _input()).sum().backward(), chunks="2", **PEERS)
    assert _lowered(log) == [7, 7]
    assert [entry for entry in log if entry[0] == "verify"] == [("verify", 7), ("verify", 7)]


def test_one_row_for_each_rank_is_lowered(monkeypatch):
    log = _run(monkeypatch, lambda layer: _call(layer(), _input(batch=1)).sum().backward(), chunks="2", **PEERS)
    assert _lowered(log) == [7, 7]


@pytest.mark.parametrize("off, calls", [
    ("", ["peer_layer"]),
    ("one-call", ["peer_put", "peer_take", "bmm", "gated_norm_forward", "peer_gemm", "peer_finish"]),
])  # fmt: skip
def test_a_layer_of_one_chunk_is_one_call(monkeypatch, off, calls):
    """Of six operators, with a launch each but for `peer_take`."""
    codes, real = [], verify.compare
    monkeypatch.setattr(verify, "compare", lambda expected, code: (codes.append(code), real(expected, code)))
    with torch.no_grad():
        settings = {**PEERS, "A2A_FFN_RECIPE": "eager_exact", "A2A_FFN_DISABLE_PASSES": off}
        log = _run(monkeypatch, lambda layer: _call(layer(), _input()), chunks="1", **settings)
    assert [matches for name, matches in log if name == "one-call"] == ([] if off else [1])
    called = r"(?:extern_kernels|torch\.ops\.compile_overlap)\.(\w+?)(?:\.default)?\(|(?:cpp|triton)_\w+\("
    lines = (line for line in codes[-1].split("def call(")[1].splitlines() if not line.strip().startswith("#"))
    assert re.findall(called, "\n".join(lines)) == calls


@pytest.mark.parametrize("settings, by_itself", [
    ({}, True), ({"A2A_FFN_HEAD": "2"}, True), ({"A2A_FFN_DISABLE_PASSES": "one-call"}, False), ({"A2A_FFN_CHUNKS": "2"}, False),
], ids=str)  # fmt: skip
def test_a_layer_that_is_one_call_is_called_without_the_code_around_it(monkeypatch, settings, by_itself):
    found, real = [], peer_layer.alone
    monkeypatch.setattr(peer_layer, "alone", lambda *given: found.append(real(*given)) or found[-1])

    def program(layer):
        ffn = layer()
        with torch.no_grad():
            outputs = [_call(ffn, _input()) for _ in range(2)]
        for output in outputs:
            assert output.shape == (2, TOKENS, WIDTH)
            output.detach_()  # which a view refuses

    _run(monkeypatch, program, **{**PEERS, "A2A_FFN_RECIPE": "eager_exact", "A2A_FFN_CHUNKS": "1", **settings})
    assert [each is not None for each in found] == [by_itself]


def test_a_layer_of_which_only_the_last_bias_trains_is_more_than_one_call(monkeypatch):
    """Its forward saves nothing: the graph is one call, and its output needs the gradient all the same."""

    def program(layer):
        ffn = layer()
        for name, parameter in ffn.named_parameters():
            parameter.requires_grad_(name == "bout")
        assert _call(ffn, _input().detach()).requires_grad and _call(ffn, _input().detach()).requires_grad

    log = _run(monkeypatch, program, **{**PEERS, "A2A_FFN_RECIPE": "eager_exact", "A2A_FFN_CHUNKS": "1"})
    assert [matches for name, matches in log if name == "one-call"] == [1]


def _one_call():
    """(arguments, results) of a call of the operator, the layer's tensors, its outputs."""
    inputs, w1, wout, results = torch.ones(2, 4, 3), torch.ones(2, 3, 8), torch.ones(2, 4, 3), torch.ones(2, 2, 2, 3)
    b1, bout, norms = torch.ones(2, 8), torch.ones(2, 3), [torch.ones(4) for _ in range(4)]
    read = [inputs.view(2, 2, 2, 3), w1, b1, *norms, 1e-5, 1e-6, wout, bout, *range(9)]
    return (read, results), (inputs, w1, b1, wout, bout, *norms), (results.view(2, 4, 3),)


def test_a_layer_is_one_call_where_that_reads_its_tensors_and_makes_its_output(monkeypatch):
    call, tensors, outputs = _one_call()
    called = []
    monkeypatch.setattr(operators.direct, "peer_layer", lambda *given: called.append(given) or torch.zeros(2, 2, 2, 3))
    layer = peer_layer.alone([call], tensors, outputs)
    others = [torch.full_like(each, index) for index, each in enumerate(tensors)]
    assert layer(*others).shape == (2, 4, 3)
    (given,) = called
    places = [0, 1, 2, 5, 6, 7, 8, None, None, 3, 4]
    for place, argument in zip(places, given):
        assert place is None or argument.unique().item() == place
    assert given[7:9] == (1e-5, 1e-6) and given[11:] == tuple(range(9))


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 9, 10])
def test_it_is_not_where_it_reads_something_else(place):
    call, tensors, outputs = _one_call()
    call[0][place] = call[0][place].clone()
    assert peer_layer.alone([call], tensors, outputs) is None


@pytest.mark.parametrize("count", [0, 2])
def test_it_is_not_where_it_is_called_otherwise_than_once(count):
    call, tensors, outputs = _one_call()
    assert peer_layer.alone(count * [call], tensors, outputs) is None


@pytest.mark.parametrize("outputs", [lambda one: (one.clone(),), lambda one: (one, one), lambda one: (one.transpose(0, 1),)])
def test_it_is_not_where_it_returns_something_else(outputs):
    call, tensors, (output,) = _one_call()
    assert peer_layer.alone([call], tensors, (output,)) is not None
    assert peer_layer.alone([call], tensors, outputs(output)) is None
    with torch.autocast("cpu"):
        assert peer_layer.alone([call], tensors, (output,)) is None


def test_it_is_not_where_it_trains():
    call, tensors, (output,) = _one_call()
    assert peer_layer.alone([call], tensors, (output.requires_grad_(),)) is None


@pytest.mark.parametrize("chunks", ["1", "2"])
@pytest.mark.parametrize("recipe", ["inductor", "eager_exact"])
@pytest.mark.parametrize("early", [{"A2A_FFN_OWN_FIRST": "1"}, {"A2A_FFN_HEAD": "2"}], ids=["own-first", "head"])
def test_the_first_gemm_begins_with_what_is_there_first(monkeypatch, chunks, recipe, early):
    """In both directions, a rank's own rows or a few tokens; what else reads the rows gets them afterwards."""
    codes, real = [], verify.compare
    monkeypatch.setattr(verify, "compare", lambda expected, code: (codes.append(code), real(expected, code)))
    for parts in (early, dict.fromkeys(early, "0")):
        settings = {**PEERS, "A2A_FFN_RECIPE": recipe, **parts}
        log = _run(monkeypatch, lambda layer: _call(layer(), _input()).sum().backward(), chunks=chunks, **settings)
        assert _lowered(log) == 2 * [3 * int(chunks) + 1]
    called = [re.findall(r"compile_overlap\.(peer_\w+)\.default\(", code) for code in codes]
    later = (int(chunks) - 1) * ["peer_put"]
    for order in called[:2]:
        assert order[: len(later) + 3] == ["peer_put", *later, "peer_take_gemm", "peer_rows"]
    assert all("peer_take_gemm" not in order for order in called[2:])


def _kept(monkeypatch, program, chunks, **settings):
    """For each graph, whether its rows and its results are copied: (exchange, keep) in the order of the code."""
    codes, real = [], verify.compare
    monkeypatch.setattr(verify, "compare", lambda expected, code: (codes.append(code), real(expected, code)))
    _run(monkeypatch, program, "0", chunks, **{**PEERS, "A2A_FFN_DISABLE_PASSES": "one-call", **settings})
    kept = r"compile_overlap\.peer_(take|rows|finish)\.default\(.*(True|False), '"
    return [re.findall(kept, code) for code in codes], codes


ROWS_STAY, ROWS_ARE_KEPT = ("take", "False"), ("take", "True")
RESULTS_STAY, RESULTS_ARE_KEPT = ("finish", "False"), ("finish", "True")


@pytest.mark.parametrize("recipe", ["inductor", "eager_exact"])
def test_backward_reads_rows_where_they_arrive(monkeypatch, recipe):
    """dWout and the bias's gradient come before the last GEMM; forward keeps its rows for backward."""
    program = lambda layer: _call(layer(), _input(batch=8)).sum().backward()  # noqa: E731
    kept, codes = _kept(monkeypatch, program, "1", A2A_FFN_RECIPE=recipe)
    assert kept == [[ROWS_ARE_KEPT, RESULTS_ARE_KEPT], [ROWS_STAY, RESULTS_ARE_KEPT]]
    called = r"(?:extern_kernels|compile_overlap)\.(bmm|peer_\w+|row_sum)(?:\.default)?\(|(cpp_fused\w*sum\w*)\("
    order = [op or "sum" for op, _ in re.findall(called, codes[1].split("def call(")[1])]
    last = order.index("peer_gemm")
    assert order[:2] == ["peer_put", "peer_take"] and order[:last].count("bmm") == 2 and order[last:].count("bmm") == 1
    assert "row_sum" in order[:last] if recipe == "eager_exact" else "sum" in order[:last]


def test_a_few_rows_are_summed_by_whatever_reads_the_sum(monkeypatch):
    """Inductor writes so few terms out where they are read, later: then the rows are kept."""
    kept, _ = _kept(monkeypatch, lambda layer: _call(layer(), _input(batch=2)).sum().backward(), "1")
    assert kept[1] == [ROWS_ARE_KEPT, RESULTS_ARE_KEPT]


@pytest.mark.parametrize("program, results", [
    (lambda ffn, x: torch.relu(x + _call(ffn, x)), [RESULTS_STAY]),
    (lambda ffn, x: _call(ffn, x).transpose(0, 1)[1:], [RESULTS_ARE_KEPT]),
    (lambda ffn, x: (lambda y: (y, y + x))(_call(ffn, x)), [RESULTS_ARE_KEPT]),
    (lambda ffn, x: torch.relu(_call(ffn, torch.relu(_call(ffn, x)))), [RESULTS_ARE_KEPT, RESULTS_STAY]),
], ids=["read", "returned in part", "read and returned", "two layers"])  # fmt: skip
def test_results_that_only_the_graph_reads_stay_where_they_are_stored(monkeypatch, program, results):
    def run(layer):
        ffn = layer()
        with torch.no_grad():
            torch.compile(lambda x: program(ffn, x), dynamic=False)(_input(batch=8))

    kept, _ = _kept(monkeypatch, run, "1")
    assert [each for each in kept[-1] if each[0] == "finish"] == results


@pytest.mark.parametrize("program, keep", [
    (lambda ffn, x: torch.relu(x + _call(ffn, x)), "False"), (lambda ffn, x: _call(ffn, x), "True"),
], ids=["read", "returned"])  # fmt: skip
def test_a_layer_in_one_call_leaves_its_results_too(monkeypatch, program, keep):
    def by_aten(z, bias, *rest):
        return exact_gated_norm.by_aten(z, bias, *rest[:6])

    def run(layer):
        ffn = layer()
        with torch.no_grad():
            torch.compile(lambda x: program(ffn, x), dynamic=False)(_input(batch=8))

    monkeypatch.setattr(norms, "agreed", lambda *_: ("norm512x8",))
    monkeypatch.setattr(operators.direct, "inductor_gated_norm", by_aten)
    _, codes = _kept(monkeypatch, run, "1", A2A_FFN_DISABLE_PASSES="")
    assert re.findall(r"compile_overlap\.peer_layer\.default\(.*512, 8, (True|False), '", codes[-1]) == [keep]


def test_a_gemm_that_adds_its_bias_takes_all_rows_at_once(monkeypatch):
    codes, real = [], verify.compare
    monkeypatch.setattr(verify, "compare", lambda expected, code: (codes.append(code), real(expected, code)))
    settings = {**PEERS, "A2A_FFN_OWN_FIRST": "1", "A2A_FFN_BIAS": "baddbmm"}
    log = _run(monkeypatch, lambda layer: _call(layer(), _input()).sum().backward(), chunks="1", **settings)
    assert _lowered(log) == [4, 4]
    assert ["peer_take_gemm" in code for code in codes] == [False, True]


def test_a_weight_that_is_computed_in_the_graph_is_computed_before_the_exchange_is_waited_for(monkeypatch):
    def program(layer):
        class Doubled(ArchiveFFN):
            w1 = property(lambda self: self.raw * 2.0)

        ffn = layer()
        ffn.raw = torch.nn.Parameter(ffn.w1.detach().clone())
        del ffn.w1
        ffn.__class__ = Doubled
        torch.compile(lambda x: _call(ffn, x), dynamic=False)(_input()).sum().backward()

    settings = {"A2A_FFN_TRANSPORT": "peers", "A2A_FFN_OWN_FIRST": "1"}
    assert _lowered(_run(monkeypatch, program, chunks="1", **settings)) == [4, 4]


def test_an_output_that_backward_needs_is_lowered_too(monkeypatch):
    def program(layer):
        ffn, scale = layer(), torch.nn.Parameter(torch.tensor(0.5))
        torch.compile(lambda x: x + scale * _call(ffn, x), dynamic=False)(_input()).sum().backward()

    assert _lowered(_run(monkeypatch, program, chunks="1", A2A_FFN_TRANSPORT="peers")) == [4, 4]


def test_nothing_is_lowered_whose_order_is_not_pinned(monkeypatch):
    def program(layer):
        with torch.no_grad():
            _call(layer(), _input())

    off = {"A2A_FFN_DISABLE_PASSES": "pin-order", "A2A_FFN_TRANSPORT": "peers"}
    assert _lowered(_run(monkeypatch, program, "0", "2", **off)) == []


def test_a_wrapper_in_another_order_is_refused():
    expected = ["peer_put", "peer_take", "peer_gemm", "peer_finish"]
    with pytest.raises(ContractError, match="step 1"):
        verify.compare(expected, "\n".join(f"torch.ops.compile_overlap.{op}.default(x)" for op in ("peer_put", "peer_gemm")))


def test_without_a_second_exchange_the_collectives_stay(monkeypatch):
    log = _run(monkeypatch, lambda layer: _call(layer(), _input(False)).sum().backward(), "0", "2", **PEERS)
    assert _lowered(log) == [7]
    assert dict(log)["check-exchanges"] == 2


@pytest.mark.parametrize("around, why", [("data", "without second exchanges"), ("checkpoint", "not a GEMM|second exchanges")])
def test_what_cannot_be_lowered_is_an_error_only_where_it_was_asked_for(monkeypatch, caplog, around, why):
    """Strict: what the default cannot do, the collectives do, as they did before it was the default."""
    monkeypatch.setattr(transport, "_peers_by_default", lambda *_: True)

    def program(layer):
        ffn = layer()
        programs = {
            "data": lambda x: _call(ffn, x.detach()),
            "checkpoint": lambda x: x + checkpoint(lambda inner: _call(ffn, inner), x, use_reentrant=False),
        }
        torch.compile(programs[around], dynamic=False)(_input()).sum().backward()

    notice._SAID.clear()
    with caplog.at_level(logging.WARNING, logger="compile_overlap"):
        assert _lowered(_run(monkeypatch, program, chunks="2")) == [7]
    assert re.search(f"not through the peers' memory: .*({why})", caplog.text)
    with pytest.raises(Exception, match=why):
        _run(monkeypatch, program, chunks="2", A2A_FFN_TRANSPORT="peers")


def test_padded_exchanges_stay(monkeypatch):
    def program(layer):
        ffn = layer()
        ffn.comm_scale = 2
        with torch.no_grad():
            _call(ffn, _input())

    assert _lowered(_run(monkeypatch, program, strict="0", **PEERS)) == []


def test_layers_one_after_another_share_the_buffers(monkeypatch):
    def program(layer):
        first, second = layer(), layer()
        torch.compile(lambda x: _call(second, _call(first, x)), dynamic=False)(_input()).sum().backward()

    assert _lowered(_run(monkeypatch, program, chunks="2", A2A_FFN_TRANSPORT="peers")) == [14, 14]


def test_layers_that_overlap_stay(monkeypatch):
    """Without `reorder` the exchanges of two independent layers interleave."""

    def program(layer):
        first, second = layer(), layer()

        def call(x, y):
            return _call(first, x) * _call(second, y)

        with torch.no_grad():
            torch.compile(call, dynamic=False)(_input(), _input())

    assert _lowered(_run(monkeypatch, program, chunks="2", A2A_FFN_TRANSPORT="peers")) == [14]
    off = {"A2A_FFN_DISABLE_PASSES": "reorder,pin-order"}
    assert _lowered(_run(monkeypatch, program, "0", "2", A2A_FFN_TRANSPORT="peers", **off)) in ([], [14])


def test_the_pass_can_be_switched_off(monkeypatch):
    log = _run(monkeypatch, lambda layer: _call(layer(), _input()).sum().backward(), "1", "2",
               A2A_FFN_DISABLE_PASSES="lower-to-peers", **PEERS)  # fmt: skip
    assert _lowered(log) == []
    assert "share-kernels" in dict(log)


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("settings, device, host, obstacle, peers", [
    ({}, "cuda", 4, None, True), ({}, "cuda", 2, None, False), ({}, "cpu", 4, None, False), ({}, "cuda", 4, "no", False),
    ({"transport": "collectives"}, "cuda", 4, None, False), ({"transport": "peers"}, "cuda", 2, None, True),
    ({"disabled_passes": ("pin-order",)}, "cuda", 4, None, False),
    ({"disabled_passes": ("lower-to-peers",)}, "cuda", 4, None, False),
    ({"strict": True}, "cuda", 4, "no", False),
])  # fmt: skip
def test_peers_are_the_default_among_gpus_of_one_host(monkeypatch, settings, device, host, obstacle, peers, scale):
    """Where what they send is not padded: such exchanges are never lowered."""
    monkeypatch.setattr(transport.rooms, "domain_of", lambda *_: tuple(range(host)))
    monkeypatch.setattr(transport, "_obstacle", lambda *_: obstacle)
    chosen = Settings(**settings, costs=Costs(1e-5, 3e11, 5e14))
    layout = Layout(P=4, B=64, T=32, D=640, H=1280)
    problem = Problem(layout, torch.bfloat16, False, "inductor", "add", scale, chosen)
    assert transport._exchanging(None, 0, torch.device(device), problem).peers == (peers and scale == 1)
    assert scale == 1 or not any(each.peers for each in transport.candidates(None, 0, torch.device("cpu"), problem))
    wrong = "pin-order" if "pin-order" in chosen.disabled_passes else "comm_scale" if scale > 1 else "none to be had"
    with pytest.raises(notice.Delegated, match=wrong):
        monkeypatch.setattr(transport, "_obstacle", lambda *_: "none to be had")
        asked = problem._replace(settings=replace(chosen, transport="peers", strict=True))
        transport._exchanging(None, 0, torch.device(device), asked)


def test_an_inbox_is_read_in_place_only_by_gemms_of_its_chunk(monkeypatch):
    kept = []

    def observe(name, stage, subject):
        if (name, stage) == (LowerToPeers.name, "after") and not discover(subject):
            takes = subject.find_nodes(op="call_function", target=torch.ops.compile_overlap.peer_take.default)
            kept.append([take.args[7] for take in takes])

    from passes import base

    monkeypatch.setattr(base, "OBSERVERS", [observe])
    _run(monkeypatch, lambda layer: _call(layer(), _input()).sum().backward(), chunks="2", **PEERS)
    with torch.no_grad():
        _run(monkeypatch, lambda layer: _call(layer(), _input()), chunks="2", **PEERS)
    assert kept == [[True, True], [True, True], [False, False]]


def test_explain_names_the_transport(monkeypatch):
    from compile_overlap import explain

    texts = []
    _run(monkeypatch, lambda layer: texts.append(explain(layer(), torch.randn(2, TOKENS, WIDTH))), chunks="2", **PEERS)
    assert P == 2 and "transport  the peers' memory" in texts[0]
