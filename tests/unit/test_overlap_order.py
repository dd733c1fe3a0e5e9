"""The order of the schedule in the FX graph and in the generated wrapper, forward and backward, for many P and C.

Everything is compiled and run as in use, on the fake process group, except that the C++ kernels do nothing: the order
is what counts. `A2A_FFN_STRICT=1` makes a wrapper that leaves the schedule an error.
"""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from archive_double import ArchiveBlock, ArchiveFFN
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_overlap
import passes
from compile_overlap.schedule import START, WAIT
from passes import base, discover, reorder, verify

ENVIRONMENT = {"A2A_FFN_STRICT": "1", "A2A_FFN_BIAS": "add", "A2A_FFN_KERNEL_PLUGIN": "compile_overlap"}


@contextlib.contextmanager
def fake_ranks(ranks):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        compile_overlap.reset()
        torch._dynamo.reset()


class Seen:
    """What the passes left in the graphs of one forward and backward."""

    def __init__(self):
        self.orders, self.schedules, self.wrappers = [], [], []

    def observe(self, name, stage, subject):
        if (name, stage) == ("reserve-sms", "after") and discover.discover(subject):
            (layer,) = discover.discover(subject)
            schedule = reorder.schedule_of(layer)
            place = {node: index for index, node in enumerate(subject.nodes)}
            self.schedules.append(schedule)
            self.orders.append([place[node] for node in reorder.in_order(layer, schedule)])


def _compile(monkeypatch, ranks, chunks, recipe, block=False, tokens=8, cached=False, **environment):
    for name, value in {**ENVIRONMENT, "A2A_FFN_CHUNKS": chunks, **environment}.items():
        monkeypatch.setenv(name, value)
    if not block:
        monkeypatch.setenv("A2A_FFN_RECIPE", recipe)
    seen = Seen()
    nothing = mock.patch("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", lambda *_, **__: lambda *_: None)
    with fake_ranks(ranks) as group, inductor_config.patch(**_caches(cached)), nothing:
        base.OBSERVERS.append(seen.observe)
        real = verify.compare
        monkeypatch.setattr(verify, "compare", lambda expected, code: (seen.wrappers.append(code), real(expected, code)))
        try:
            ffn = ArchiveFFN(tokens * ranks, 16 * ranks, 2, group=group, size=ranks, index=0)
            model = ArchiveBlock(ffn, tokens * ranks, 16 * ranks, pre=True) if block else ffn
            x = torch.randn(2, tokens * ranks, 16 * ranks, requires_grad=True)
            before = len(passes.pass_log())
            call = torch.compile(lambda t: model(t, overlap="kernel"), dynamic=False) if block else None
            (call(x) if block else model(x, overlap="kernel")).sum().backward()
            seen.log = [(report.name, report.matches) for report in passes.pass_log()[before:]]
        finally:
            base.OBSERVERS.remove(seen.observe)
    return seen


def _caches(enabled):
    return {"fx_graph_cache": True, "fx_graph_remote_cache": False} if enabled else {"force_disable_caches": True}


def _expected_log(count, recipe, reserved=False):
    forward = [("check-exchanges", 2 * count), ("reorder", 6 * count)]
    backward = [("check-exchanges", 2 * count), ("reorder", 8 * count)]
    if count > 1:
        backward.append(("inplace-gradients", 2 * count))
    if reserved:
        forward.append(("reserve-sms", 2 * count))
        backward.append(("reserve-sms", 2 * count + (0 if count > 1 else 2)))
    if count > 1:
        forward.append(("share-kernels", 3 if recipe == "inductor" else 1))
        backward.append(("share-kernels", 1))
    tail = [("pin-order", 2 * count)]
    steps = [("verify", 6 * count)], [("verify", 8 * count)]
    return [("localize-views", 4 * count), *forward, *tail, *steps[0], *backward, *tail, *steps[1]]


CASES = [
    *[(2, str(count), "eager_exact", False) for count in (1, 2, 3)],
    (2, "8", "inductor", False),
    (4, "4", "inductor", False),
    (8, "4", "eager_exact", False),
    (16, "4", "inductor", True),
    (2, "2,6", "inductor", True),
    (4, "3,5,8", "eager_exact", False),
]


@pytest.mark.parametrize("ranks, chunks, recipe, block", CASES)
def test_the_wrapper_runs_in_the_order_of_the_schedule(monkeypatch, ranks, chunks, recipe, block):
    sizes = [int(size) for size in chunks.split(",")]
    count = len(sizes) if len(sizes) > 1 else sizes[0]
    tokens = sum(sizes) if len(sizes) > 1 else 16
    seen = _compile(monkeypatch, ranks, chunks, recipe, block, tokens)
    assert seen.log == _expected_log(count, recipe)
    assert len(seen.orders) == len(seen.wrappers) == 2
    for order, schedule, code in zip(seen.orders, seen.schedules, seen.wrappers):
        assert order == sorted(order)
        found = verify.order_in_wrapper(code)
        kinds = [{START: "start", WAIT: "wait"}.get(step.kind, "gemm") for step in schedule.steps]
        assert [step.split()[0] for step in found] == kinds
    assert [s.direction for s in seen.schedules] == ["forward", "backward"]


def test_a_wrapper_in_another_order_is_an_error(monkeypatch):
    real = verify.order_in_wrapper
    monkeypatch.setattr(verify, "order_in_wrapper", lambda code: real(code)[::-1])
    with pytest.raises(Exception, match="the wrapper leaves the schedule"):
        _compile(monkeypatch, 2, "2", "eager_exact")


def test_each_pack_is_launched_beside_its_exchange(monkeypatch):
    forward = _compile(monkeypatch, 2, "2,4,4,4,2", "inductor", block=True, tokens=16).wrappers[0]
    calls = re.findall(r"^ +(?:cpp_fused_(\w+)\(|.*(all_to_all_single\.default|extern_kernels)\()", forward, re.M)
    launches = [kernel or "exchange" if "all_to_all" in kernel + op else "gemm" for kernel, op in calls]
    packs = [place for place, name in enumerate(launches) if name not in ("exchange", "gemm")]
    assert [launches[place + 1] for place in packs] == ["exchange"] * 10


def test_reserved_sms_and_disabled_passes_are_in_the_graph(monkeypatch):
    seen = _compile(monkeypatch, 2, "2", "inductor", A2A_FFN_RESERVED_SMS="8")
    assert seen.log == _expected_log(2, "inductor", reserved=True)
    seen = _compile(monkeypatch, 2, "2", "inductor", A2A_FFN_DISABLE_PASSES="all")
    assert seen.log == []


def test_equal_chunks_share_their_kernels(monkeypatch):
    forward = _compile(monkeypatch, 2, "4", "inductor", tokens=16).wrappers[0]
    sources = re.findall(r"cpp_pybinding\(.*?\'\'\'(.*?)\'\'\'", forward, re.S)
    # The pack of x, epilogue, bias and pack, and the copy into the output.
    assert len({re.sub(r"cpp_fused_\w+", "", source) for source in sources}) == 4


def test_a_warm_cache_answers_without_the_passes_and_follows_their_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(**environment):
        counters.clear()
        with functorch_config.patch(enable_autograd_cache=False):
            seen = _compile(monkeypatch, 2, "2", "inductor", cached=True, **environment)
        names = [name for name, _ in seen.log]
        return counters["inductor"]["fxgraph_cache_hit"], names.count("reorder"), names.count("verify")

    assert run() == (0, 2, 2)
    assert run() == (2, 0, 0)
    assert run(A2A_FFN_IN_FLIGHT="1") == (0, 2, 2)


def test_weight_gradients_are_written_into_their_slice(monkeypatch):
    backward = _compile(monkeypatch, 2, "2", "inductor").wrappers[1]
    targets = [line.split("out=")[1].rstrip(")") for line in backward.splitlines() if "overlap_chunk_bmm(" in line]
    assert len(targets) == 4
    for target in targets:
        assert f"{target} = reinterpret_tensor(" in backward
