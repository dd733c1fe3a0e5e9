"""benchmark.py: one RankMixer block in one mode, timed and checked."""

import sys

from torch.distributed.elastic.multiprocessing import errors

from rankmixer import backends, plans, plugins, record
from rankmixer.checks import check_shape, compare_full_batch, run_checks
from rankmixer.ffn import OVERLAP_MODES
from rankmixer.options import RanksParser, add_common_options, configuration, overridden_defaults, validate
from rankmixer.pipelines import transport_in_use
from rankmixer.runtime import choose_device, environment_rank, start_runtime, stop_runtime
from rankmixer.timing import Timer, describe
from rankmixer.tuning import add_tune_option, require_tunable, tune
from rankmixer.workload import Workload

_NOT_A_SETTING = ("json", "list_backends", "help")


def build_parser():
    """The benchmark's command line."""
    parser = RanksParser(prog="benchmark.py", description=__doc__)
    parser.add_argument("--overlap", choices=OVERLAP_MODES, default="none",
                        help="none: sequential; with-sm: chunked, NCCL beside the GEMMs; sm-free: chunked, copy "
                             f"engines; kernel: the plugin named by {plugins.PLUGIN_VARIABLE} (default: %(default)s)")
    parser.add_argument("--comp-only", action="store_true", help="remove communication; recorded apart")
    parser.add_argument("--list-backends", action="store_true", help="say which GEMM backends can run here, and exit")
    add_tune_option(parser)
    add_common_options(parser)
    return parser


def main(arguments=None):
    """Run the benchmark; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.list_backends:
        if environment_rank()[0] == 0:
            print(backends.describe_backends())
        return 0

    def prepare_run():
        require_tunable(options, {options.overlap}, environment_rank()[1])
        return prepare(options, (options.overlap,))

    return guarded(prepare_run, lambda workload: _run(parser, options, workload))


@errors.record
def guarded(prepare_run, run):
    """Call ``run(prepare_run())``; returns the exit status.

    A user's mistake, found while preparing, gives status 2; a failed check gives status 1; both print their message.
    Any other error keeps its traceback, which torchrun repeats, and leaves the process group to torchrun, since peers
    may still be waiting.
    """
    rank = environment_rank()[0]
    try:
        workload = prepare_run()
    except (ValueError, ImportError) as error:
        print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        stop_runtime()
        return 2
    try:
        with plugins.watched():
            run(workload)
        status = 0
    except AssertionError as error:
        print(f"AssertionError (rank {rank}): {error}", file=sys.stderr, flush=True)
        status = 1
    stop_runtime()
    return status


def prepare(options, overlaps):
    """Validate the command line, load the plugin where ``overlaps`` need it, start the runtime, build the workload."""
    device = choose_device(options.device)
    validate(options, environment_rank()[1], device)
    if "kernel" in overlaps:
        plugins.load_plugin()
    return Workload(options, start_runtime(device))


def print_setup(runtime, parser, options):
    """Rank 0 prints the workload and each overridden default."""
    changed = {name: value for name, value in overridden_defaults(parser, options).items()
               if name not in _NOT_A_SETTING}
    hidden = options.dim * options.k * options.compute_scale
    runtime.print(f"RankMixer block: P={runtime.world_size} B={options.batch_size} T={options.tokens} D={options.dim} "
                  f"H={hidden} {options.dtype} on {runtime.device.type}, "
                  f"{'eager' if options.no_compile else 'compiled'}, {pass_name(options)}")
    for name, value in changed.items():
        runtime.print(f"  overridden default: {name} = {value} (default {parser.get_default(name)})")


def pass_name(options):
    return "forward+backward" if options.backward else "forward"


def make_timer(options, runtime):
    return Timer(runtime, l2_flush=options.l2_flush, prewarm_sleep=options.prewarm_sleep_ms / 1e3,
                 cuda_graph=options.cuda_graph)


def _run(parser, options, workload):
    runtime = workload.runtime
    print_setup(runtime, parser, options)
    tuning = tune(workload)
    checks = run_checks(workload, options.overlap)
    full_batch = None
    if options.full_batch_check and options.overlap != "none" and not options.comp_only:
        full_batch = compare_full_batch(workload, options.overlap)
    timing, output = make_timer(options, runtime).measure(
        workload.timed_call(options.overlap, options.comp_only), warmup=options.warmup, num_tests=options.num_tests,
        before=workload.clear_gradients)
    check_shape(workload, output)
    runtime.print(f"rank 0 {options.overlap}{' comp-only' if options.comp_only else ''}: {describe(timing)} "
                  f"({len(timing.samples)} samples)")
    chosen = plans.plan_of(workload, options.overlap)
    result = _make_record(parser, options, runtime, timing, output, checks, full_batch, tuning, chosen)
    _print_result(runtime, result)
    if options.json and runtime.is_main:
        record.write(result, options.json)
    runtime.barrier()


def _make_record(parser, options, runtime, timing, output, checks, full_batch, tuning, chosen):
    samples = runtime.gather(timing.samples)
    statistics = record.slowest_rank(samples)
    median = statistics["p50_s"]
    return record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "comp-only" if options.comp_only else "full",
        "configuration": configuration(parser, options), "environment": record.environment(runtime.device),
        "world_size": runtime.world_size, "pass": pass_name(options),
        "plugin": plugins.plugin_name() if options.overlap == "kernel" else None,
        "transport": transport_in_use(options.overlap, runtime.group),
        "samples_s": samples, "slowest_rank": statistics,
        "rank0": {"mean_s": timing.mean, "min_s": timing.min, "max_s": timing.max},
        "peak_memory_bytes": runtime.gather(record.peak_memory(runtime.device)),
        "tokens_per_s": record.tokens_per_second(options, runtime.world_size, median),
        "forward_tflops": record.forward_tflops(options, median),
        "exchange": record.exchange_bytes(options, runtime.world_size),
        "checks": checks, "full_batch": full_batch, "output_shape": list(output.shape), "tuning": tuning,
        "plan": chosen,
    })


def _print_result(runtime, result):
    slowest, exchange = result["slowest_rank"], result["exchange"]
    runtime.print("slowest rank: " + ", ".join(
        f"{name} {slowest[key] * 1e6:.1f} us" for name, key in
        (("mean", "mean_s"), ("p50", "p50_s"), ("p90", "p90_s"), ("p99", "p99_s"))))
    rate = f", forward {result['forward_tflops']:.3g} TFLOP/s per rank" if result["forward_tflops"] else ""
    if result["plan"] is not None:
        runtime.print(f"plan: {result['plan']}")
    runtime.print(f"throughput: {result['tokens_per_s']:.4g} tokens/s over all ranks{rate}")
    if result["kind"] == "comp-only":
        runtime.print("comp-only: communication removed; not a layer latency")
    else:
        payload, sent = exchange["bytes_per_exchange"], exchange["bytes_sent_per_exchange"]
        padded = f", padded to {sent / 2**20:.4g} MiB" if sent != payload else ""
        runtime.print(f"communication: {exchange['exchanges']} exchanges of {payload / 2**20:.4g} MiB sent per rank{padded}")
    runtime.print(f"peak memory: {max(result['peak_memory_bytes']) / 2**20:.0f} MiB on the fullest rank")
