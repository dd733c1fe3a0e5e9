"""Tuned plans on gloo ranks: the first rank's disk decides, later processes take what was tuned, nobody is stranded."""

import functools
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from ranks import run_on_ranks
from uncompiled import Uncompiled

import compile_overlap
from compile_overlap import api, compiler, known_plans, notice, plan_store, timing, transport
from compile_overlap import group as groups
from compile_overlap.costs import Costs
from compile_overlap.layout import check_call
from compile_overlap.plan_store import Measured, Tuned
from compile_overlap.schedule import Plan

tune_module = importlib.import_module("compile_overlap.tune")
CPU = torch.device("cpu")


def _layer(rank, group=None, tokens=16):
    torch.manual_seed(rank)
    index = dist.get_rank(group)
    return ArchiveFFN(tokens, 64, 2, group=group, size=2, index=index), torch.randn(4, tokens, 64)


def _problem(ffn, x, candidate=("eager_exact", "add")):
    with torch.no_grad():
        return api.problem_of(ffn, check_call(ffn, x), api.Settings.from_environment(), candidate)


def _taken(ffn, problem):
    return transport.plan_for(ffn.ep_group, ffn.ep_index, CPU, problem)



def _own_disks(folder, rank, group):
    """Each rank has a folder of its own, and another plan in it."""
    os.environ["A2A_FFN_PLANS"] = str(folder / str(rank))
    compile_overlap.reset()
    notice._SAID.clear()
    ffn, x = _layer(rank, group)
    problem = _problem(ffn, x)
    kept = Tuned(Plan((2, 6) if ffn.ep_index == 0 else (6, 2), ratio_16ths=7), 1.0, 2.0, 1_700_000_000)
    key = {**problem.described(), **known_plans._place(group, 2, CPU)}
    path = plan_store.write("plan", key, kept.as_json())
    found = {"keys": key, "kept": str(_taken(ffn, problem))}
    with torch.no_grad():
        found["explained"] = compile_overlap.explain(ffn, x)

    # The first rank cannot use its file, the others could.
    def after(change):
        compile_overlap.reset()
        change()
        return str(_taken(ffn, problem))

    first = ffn.ep_index == 0
    found["broken"] = after(lambda: first and path.write_text("{"))
    found["unfit"] = after(lambda: first and plan_store.write("plan", key, replace(kept, plan=Plan((3, 4))).as_json()))
    found["said"] = sorted(text for text in notice._SAID if "ignoring" in text)
    read = plan_store.read

    def fails(*arguments):
        raise MemoryError("no memory left")

    for name, on in (("raises on the first", first), ("raises on another", not first)):
        plan_store.write("plan", key, kept.as_json())
        plan_store.read = fails if on else read
        try:
            found[name] = after(lambda: None)
        except ValueError as error:
            found[name] = f"refused: {error}"
        plan_store.read = read
    if first:
        os.environ["A2A_FFN_PLANS"] = str(path)
    try:
        found["no folder"] = after(lambda: None)
    except ValueError as error:
        found["no folder"] = f"refused: {error}"
    if first:
        os.environ["A2A_FFN_PLANS"] = "off"
    found["off"] = after(lambda: None)
    return found


def _measured_costs(folder, rank, group):
    """As if gloo's group were one whose costs are measured: the first rank's table goes to all, measured once."""
    os.environ["A2A_FFN_PLANS"] = str(folder / str(rank))
    compile_overlap.reset()
    dist.get_backend, calls = lambda group=None: "nccl", []
    known_plans.costs_of = lambda *_: calls.append(rank) or Costs(6e-5, 2.4e10, 5.6e14)
    found = [known_plans.costs(group, 2, CPU, torch.bfloat16) for _ in range(2)]
    compile_overlap.reset()
    if dist.get_rank(group):  # another table here
        key = {"dtype": "torch.bfloat16", **known_plans._place(group, 2, CPU)}
        plan_store.write("costs", key, Measured(Costs(1.0, 1.0, 1.0), 5).as_json())
    return [*found, known_plans.costs(group, 2, CPU, torch.bfloat16)], calls


PAIRS = {"the world's first": [0, 1], "not the world's first": [1, 2]}


def _looked_up(folder, rank):
    groups_of = {name: dist.new_group(pair) for name, pair in PAIRS.items()}
    found = {name: _own_disks(folder / name, rank, groups_of[name]) for name, pair in PAIRS.items() if rank in pair}
    if rank:
        found["costs"] = _measured_costs(folder / "costs", rank, groups_of["not the world's first"])
    return found


@pytest.fixture(scope="module")
def looked_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looked_up")
    return run_on_ranks(functools.partial(_looked_up, folder), 3, folder)


def test_costs_are_the_first_rank_s_and_measured_once(looked_up):
    for (measured, known, later), calls in (found["costs"] for found in looked_up[1:]):
        assert measured == known and not measured.stored and len(calls) == 1
        assert later.stored and later.value.costs == measured.value.costs


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_rank_s_disk_is_the_group_s(name, looked_up):
    ranks, kept = [looked_up[rank][name] for rank in PAIRS[name]], "2,6 r7 a2 b1 s0"
    first = ranks[0]
    for found in ranks:
        assert found["keys"] == first["keys"] and found["kept"] == kept
        assert "origin     tuned" in found["explained"] and "(stored): 1000 ms" in found["explained"]
        assert found["broken"] == found["unfit"] == found["off"] == "2,2,2,2 r4 a2 b1 s0"
        assert found["raises on the first"] == "refused: no memory left" and found["raises on another"] == kept
        assert found["no folder"].startswith("refused: A2A_FFN_PLANS = ")
        assert len(found["said"]) == (2 if found is first else 0)


def _compiled(rank):
    """By the compiler, with the recipe that an outer torch.compile inlines, which then takes the plan."""
    ffn, x = _layer(rank, tokens=8)
    with torch.no_grad():
        found = compile_overlap.tune(ffn, x, rounds=2, compiled=True)
        problem = _problem(ffn, x, ("inductor", "add"))
        return found, _taken(ffn, problem), str(_taken(ffn, problem._replace(recipe="eager_exact")))


def _tuned(folder, rank):
    """Really timed, on the layer without the compiler; then chosen as a test needs it."""
    os.environ["A2A_FFN_PLANS"] = str(folder / str(rank))
    found = {"compiled": _compiled(rank)}
    compiler.CompiledLayer = Uncompiled
    ffn, x = _layer(rank)
    with torch.no_grad():
        before = ffn(x, overlap="kernel")
        found["forward"] = compile_overlap.tune(ffn, x, rounds=4)
    x.requires_grad_()
    found["training"] = compile_overlap.tune(ffn, x, rounds=2, most=1)
    found["gradients"] = [name for name, tensor in [("x", x), *ffn.named_parameters()] if tensor.grad is not None]

    seconds = {(8,): 1.0, (4, 4): 0.995, (2, 2, 2, 2): 0.999}
    compiled = {}

    def timed(stopwatch, call):
        sizes = compiled[call]
        return seconds[sizes] * (1 if rank else 0.5)

    prepared = tune_module._prepared

    def remember(ffn, inputs, problem, chosen):
        call, failure = prepared(ffn, inputs, problem, chosen)
        compiled[call] = chosen.sizes
        return call, failure

    tune_module._prepared, timing.Stopwatch.seconds = remember, timed
    found["as fast"] = compile_overlap.tune(ffn, x, rounds=3)
    with torch.no_grad():
        seconds[4, 4] = 0.8
        found["faster"] = compile_overlap.tune(ffn, x, rounds=3)
        found["equal"] = torch.equal(ffn(x, overlap="kernel"), before)
        found["after"] = compile_overlap.explain(ffn, x)
    os.environ["A2A_FFN_CHUNKS"] = "2"
    with pytest.raises(ValueError, match="A2A_FFN_CHUNKS = 2: must be unset to tune"):
        compile_overlap.tune(ffn, x)
    del os.environ["A2A_FFN_CHUNKS"]
    with pytest.raises(ValueError, match="tune: must be the same on every rank of the group, but"):
        compile_overlap.tune(ffn, x, rounds=3 + rank)

    def fails(ffn, inputs, problem, chosen):
        reason = groups.attempt(None, 2, CPU, lambda: 1 / (rank if chosen.sizes == (4, 4) else 1))[1]
        return (None, reason) if reason else remember(ffn, inputs, problem, chosen)

    tune_module._prepared = fails
    found["one fails"] = compile_overlap.tune(ffn, x, rounds=3)
    return found


def _later(folder, rank):
    os.environ["A2A_FFN_PLANS"] = str(folder / str(rank))
    compiler.CompiledLayer = Uncompiled
    ffn, x = _layer(rank)
    with torch.no_grad():
        answered = compile_overlap.explain(ffn, x)
        ffn(x, overlap="kernel")
    return (answered, [layer.static["sizes"] for layer in compiler._LAYERS.values()]), _judge(folder, rank)


def test_a_tuned_plan_is_taken_by_this_process_and_by_later_ones(tmp_path):
    for rank, found in enumerate(run_on_ranks(functools.partial(_tuned, tmp_path), 2, tmp_path)):
        tuned, taken, eager = found["compiled"]
        assert [each.sizes for each in tuned.seconds] == [(4,), (2, 2)]
        assert taken == tuned.plan and eager == "2,2 r4 a2 b1 s0"
        sizes = [each.sizes for each in found["forward"].seconds]
        assert sizes == [(8,), (4, 4), (2, 2, 2, 2)] and all(found["forward"].seconds.values())
        assert [each.sizes for each in found["training"].seconds] == [(8,)] and found["gradients"] == []
        assert found["as fast"].plan.sizes == (8,) and found["as fast"].seconds[found["as fast"].plan] == 1.0
        assert found["faster"].plan.sizes == (4, 4) and found["equal"]
        assert "(in this process): 800 ms, the unchunked plan 1000 ms" in found["after"]
        assert [each.sizes for each in found["one fails"].seconds] == [(8,), (2, 2, 2, 2)]
        assert Path(found["faster"].path).parent == tmp_path / "0" and not (tmp_path / "1").exists()
    again = tmp_path / "again"
    again.mkdir()
    for (answered, compiled), judged in run_on_ranks(functools.partial(_later, tmp_path), 2, again):
        assert "plan       4,4 r4 a2 b1 s0" in answered and "(stored): 800 ms" in answered
        assert compiled == [(4, 4)]
        _check_judged(*judged)


def _judge(folder, rank):
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    import judge_planner
    from rankmixer import cli
    from rankmixer.runtime import Runtime

    compiler.CompiledLayer = Uncompiled
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    judge_planner.start_runtime = lambda device: Runtime(rank, 2, device, dist.group.WORLD)
    cli.stop_runtime = lambda: None
    shapes, output = folder / "shapes.json", folder / "planner.json"
    flags = ["--shapes", str(shapes), "--output", str(output), "--no-compile", "--device", "cpu", "--dtype", "fp32"]
    found = []
    for text, more in (
        ("[[4, 16, 64, 2]]", []),
        ("[[4, 16, 64, 2], [2, 8, 64, 2]]", ["--backward"]),
        ("[[4, 16, 64, 2], [2, 8, 64, 2]]", []),
    ):
        dist.barrier()
        shapes.write_text(text)
        dist.barrier()
        status = judge_planner.main([*flags, "--rounds", "3", *more])
        found.append((status, json.loads(output.read_text())["shapes"]))
    return found


def _check_judged(first, refused, last):
    """The planner's judge goes on where it stopped, and leaves a record of another configuration alone."""
    assert (first[0], refused[0], last[0]) == (0, 2, 0)
    one, kept, both = first[1], refused[1], last[1]
    assert [row["shape"] for row in both] == [[4, 16, 64, 2], [2, 8, 64, 2]] and one == kept == both[:1]
    assert set(one[0]["samples_s"]) == {"8 r4 a2 b1 s0", "4,4 r4 a2 b1 s0", "2,2,2,2 r4 a2 b1 s0"}
    assert one[0]["choices"]["planner"] == one[0]["choices"]["four"] == "2,2,2,2 r4 a2 b1 s0"
    assert min(one[0]["over_best"].values()) == one[0]["over_best"]["best"] == 1.0
