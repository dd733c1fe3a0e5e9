"""The plan in a record is the one in the exchanges that were compiled, for each mode and variant, on gloo ranks."""

import compare
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from rankmixer import options, plans, variants
from rankmixer.runtime import Runtime
from rankmixer.workload import Workload
from uncompiled import Uncompiled

import compile_overlap
from compile_overlap import compiler
from passes import graphs
from passes.base import OBSERVERS

CPU = torch.device("cpu")
SMALL = ("--device cpu --batch-size 2 --tokens 16 --dim 32 --k 2 --dtype fp32 --warmup 0 --num-tests 2 --rounds 1 "
         "--no-l2-flush --modes").split()  # fmt: skip
EVEN, TWO, BY_COSTS = "2,2,2,2 r4 a2 b1 s0", "4,4 r4 a2 b1 s0", "kernel:COSTS=60/0.001/0.1"
COMPILED, ONE_AHEAD = "kernel:IN_FLIGHT=1", "2,2 r4 a1 b1 s0"


def _workload(rank, modes, *flags):
    parser = compare.build_parser()
    parsed = parser.parse_args([*SMALL, modes, *flags])
    options.validate(parsed, 2, CPU)
    return parser, parsed, Workload(parsed, Runtime(rank, 2, CPU, dist.group.WORLD))


def _compared(rank):
    modes = f"none,kernel,kernel:chunks=2,kernel:naive,{BY_COSTS}"
    parser, parsed, workload = _workload(rank, modes, "--no-compile")
    before = plans.plan_of(workload, "kernel")
    result = compare.compare(parser, parsed, workload)
    ran = {graphs.plan_of(layer.static["group"]) for layer in compiler._LAYERS.values()}
    return {"before": before, "plans": result["plans"], "ran": {str(each) for each in ran},
            "table": compare.table(result), "of none": plans.plan_of(workload, "none")}


def _in_graphs(rank):
    """The plans in the graph that the compiler was given, the record's, and that of eager calls, of which none ran."""
    _, _, workload = _workload(rank, f"none,{COMPILED}", "--tokens", "8")
    seen = set()

    def observe(name, when, graph):
        if name == "reorder":
            seen.update(graphs.starts_by_alias(graph))

    OBSERVERS.append(observe)
    workload.timed_call(COMPILED)()
    found = {str(graphs.plan_of(alias)) for alias in seen}, plans.plan_of(workload, COMPILED)
    workload.options.no_compile = True
    return *found, plans.plan_of(workload, COMPILED)


def _job(rank):
    compiled = _in_graphs(rank)
    compile_overlap.reset()
    compiler.CompiledLayer = Uncompiled
    return compiled, _compared(rank)


def test_the_recorded_plan_is_what_ran(tmp_path):
    for compiled, found in run_on_ranks(_job, 2, tmp_path):
        assert compiled == ({ONE_AHEAD}, ONE_AHEAD, None)
        naive = f"{EVEN} off={variants.parse('kernel:naive').environment['A2A_FFN_DISABLE_PASSES']}"
        expected = {"kernel": EVEN, "kernel:chunks=2": TWO, "kernel:naive": naive}
        by_costs = found["plans"].pop(BY_COSTS)
        assert found["before"] is found["of none"] is None and found["plans"] == expected
        assert by_costs not in (None, EVEN) and {by_costs, *expected.values()} <= found["ran"]
        assert f"plan of kernel:chunks=2: {TWO}" in found["table"]
