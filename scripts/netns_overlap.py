"""Shows on a machine without a GPU that the passes hide communication behind computation. Linux, as root.

Each rank runs in a network namespace of its own, as on a host of its own. All meet at one link, shared by both
directions (netns.py says why), with the rate of a token bucket (`tc ... tbf`). At such a rate gloo costs the cores
little, so that the exchanges really run beside the GEMMs, which they do not over loopback. The rate is chosen so
that the layer's two exchanges take as long as its computation (`--ratio`): most to win, and hardest.

What is compared is the FFN alone, `torch.compile`d whole with static shapes: nothing else is in the graph that could
blur the fractions; every variant has the same inputs, weights, compile setting and link, and a chunked variant differs
from another only in the order of its code and in what Inductor fuses because of it. The chunked ones are the plugin,
inlined by the outer `torch.compile`:

    none       sequential: dispatch, computation, combine
    naive      chunked, without our passes that order it (the benchmark's kernel:naive)
    built-in   as naive, with Inductor's own overlap pass (reorder_for_compute_comm_overlap)
    passes     chunked, with our passes

They are measured in rounds, one after the other, and reported from the slowest rank of each iteration. The plan is made
for the measured link and computation (A2A_FFN_COSTS). By default a gloo worker thread runs the exchanges in the order
in which they start, as an NCCL communicator does; gloo's own two threads (`--gloo-threads 2`) let two share the link.

    hideable = min(T_exchanges, T_computation) - first chunk's dispatch - last chunk's combine
    hidden   = (T_none - T_variant) / hideable

T_computation is the chunked layer's own comp-only time; a chunk's exchange counts in proportion to its tokens. With
`--backward` the link is the same, T_exchanges are four exchanges, and only the first gradient exchange is taken off.
T_none holds more than its parts: it waits for the slower rank at each exchange, which a pipeline evens out, and its
unchunked GEMMs have another speed. So `by parts` is reported too: (own comp-only + T_exchanges - T_variant) / hideable.
`exposed` is T_variant less its own comp-only time. Drift of the machine changes the real ratio, which is reported.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

import netns  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from compare import EXCHANGES, exchange_call  # noqa: E402
from rankmixer import plugins, record, variants  # noqa: E402
from rankmixer.checks import compare_gradients  # noqa: E402
from rankmixer.cli import make_timer, pass_name  # noqa: E402
from rankmixer.compiling import compile_fresh  # noqa: E402
from rankmixer.options import DTYPES, add_common_options, configuration, validate  # noqa: E402
from rankmixer.runtime import Runtime, choose_device, leave, start_runtime, stop_runtime  # noqa: E402
from rankmixer.workload import Workload  # noqa: E402

from compile_overlap.api import plan_for  # noqa: E402
from compile_overlap.config import Settings  # noqa: E402
from compile_overlap.layout import check_call  # noqa: E402
from compile_overlap.plan import CPU_PER_GEMM  # noqa: E402
from passes import pass_log  # noqa: E402

COMP_NONE, COMP_OURS = "comp-only:none", "comp-only:passes"
# What each variant is in the benchmark's terms (rankmixer/variants.py).
VARIANTS = {"none": "none", "naive": "kernel:naive", "built-in": "kernel:inductor-reorder", "passes": "kernel"}
# Large buffers come from the heap again: otherwise every call has the kernel clear their pages anew.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
TARGET = 0.70


def build_parser():
    parser = argparse.ArgumentParser(
        prog="netns_overlap.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks, each in a namespace of its own (default: %(default)s)")
    add("--batch-size", type=int, default=128, help="rows per rank, B (default: %(default)s)")
    add("--tokens", type=int, default=32, help="tokens, T; a multiple of the ranks (default: %(default)s)")
    add("--dim", type=int, default=512, help="token width, D; a multiple of T (default: %(default)s)")
    add("--k", type=int, default=4, help="expansion: hidden width H = D * k (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="fp32", help="bf16 GEMMs are slow on most CPUs (default: %(default)s)")
    add("--seed", type=int, default=42, help="inputs and model use seed + rank (default: %(default)s)")
    add("--backward", action="store_true", help="measure forward and backward")
    add("--chunks", default="8", help="A2A_FFN_CHUNKS: a count, or sizes; auto: by the plan (default: %(default)s)")
    add("--in-flight", default="", help="A2A_FFN_IN_FLIGHT (default: the plan chooses)")
    add("--ratio", type=float, default=1.0, help="exchanges over computation of the forward (default: %(default)s)")
    add("--rate-mbit", type=float, default=None, help="rate of the link, instead of --ratio")
    add("--delay-us", type=int, default=0, help="delay of the link, by netem where the kernel has it (default: none)")
    add("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    add("--num-tests", type=int, default=25, help="measured calls of each variant in all (default: %(default)s)")
    add("--warmup", type=int, default=2, help="unmeasured calls in each round (default: %(default)s)")
    add("--threads", type=int, default=0, help="compute threads of a rank (default: cores / ranks)")
    add("--gloo-threads", type=int, default=1, help="gloo's worker threads of a rank (default: %(default)s)")
    add("--json", metavar="FILE", default=None, help="write the record with all samples here")
    add("--worker", default=None, help=argparse.SUPPRESS)
    return parser


def main():
    parser = build_parser()
    options = parser.parse_args()
    if options.worker:
        return work(parser, options)
    problem = netns.missing()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.ranks < 2 or options.rounds < 1:
        parser.error("--ranks must be at least 2, --rounds at least 1")
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **MALLOC}
    return netns.launch(options.ranks, environment, __file__, *sys.argv[1:])


# One rank, in its namespace.


def work(parser, options):
    """Measure on this rank; returns the exit status."""
    defaults = argparse.ArgumentParser()
    add_common_options(defaults)
    defaults.parse_args([], namespace=options)
    device = choose_device("cpu")
    try:
        validate(options, options.ranks, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    netns.tune_tcp()
    world = start_runtime(device)
    runtime = Runtime(world.rank, world.world_size, device, gloo_group(options.gloo_threads))
    status = run(parser, options, runtime)
    runtime.barrier()
    stop_runtime()
    return status


def gloo_group(threads):
    """A gloo group with this many worker threads; gloo itself takes two."""

    def create(store, rank, size, timeout):
        settings = dist.ProcessGroupGloo._Options()
        settings._devices = [dist.ProcessGroupGloo.create_device(interface=netns.INTERFACE)]
        settings._threads, settings._timeout = threads, timeout
        return dist.ProcessGroupGloo(store, rank, size, settings)

    dist.Backend.register_backend("gloo_threads", create, devices=["cpu"])
    return dist.new_group(backend="gloo_threads")


class Variant:
    """One compiled form of the layer, called under the settings that it was compiled with."""

    def __init__(self, workload, name, environment, comp_only=False):
        self.workload, described = workload, variants.parse(name)
        self.environment = {"A2A_FFN_DISABLE_PASSES": "", **environment, **described.environment}
        ffn, mode = workload.block.ffn, described.mode
        if mode == "kernel":
            ffn.load_plugin()

        def layer(x):
            return ffn(x, overlap=mode, comp_only=comp_only)

        self.layer = compile_fresh(layer, described.inductor_config)

    def __call__(self):
        upstream = self.workload.upstream
        output = self.forward(grad=upstream is not None)
        if upstream is not None:
            output.backward(upstream)
        return output

    def forward(self, grad=False):
        with mock.patch.dict(os.environ, self.environment), torch.set_grad_enabled(grad):
            return self.layer(self.workload.inputs)

    def gradients(self):
        named = [("inputs", self.workload.inputs), *self.workload.block.ffn.named_parameters()]
        return {name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None}


def make_variants(workload, environment):
    """{name: variant}, and the two comp-only forms."""
    calls = {name: Variant(workload, form, environment) for name, form in VARIANTS.items()}
    calls[COMP_NONE] = Variant(workload, "none", environment, comp_only=True)
    calls[COMP_OURS] = Variant(workload, "kernel", environment, comp_only=True)
    return calls


def compile_all(workload, calls):
    """Compile each variant and compare it with none. Returns (variants that run, checks, {variant: error})."""
    runtime, checks, errors, running = workload.runtime, {}, {}, {}
    expected = None
    for name, call in calls.items():
        begin, error = time.perf_counter(), None
        workload.clear_gradients()
        try:
            output = call().detach()
        except Exception as cause:  # whatever the compiler raises is this variant's result
            error = f"{type(cause).__name__}: {cause}".strip()
        error = next((each for each in runtime.gather(error) if each), None)
        if error:
            errors[name] = error
            reason = next(line for line in error.splitlines() if line.strip())
            runtime.print(f"{name:<18}does not compile: {reason[:400]}")
            continue
        running[name] = call
        text = f"{name:<18}compiled in {time.perf_counter() - begin:.0f} s"
        if name in ("none", COMP_NONE):
            expected = output, call.gradients()
        elif name != COMP_OURS:
            equal = all(runtime.gather(torch.equal(output, expected[0])))
            checks[name] = {"ran": True, "forward": "torch.equal", "equal": equal}
            text += f", forward {'equals none' if equal else 'DIFFERS from none'} (torch.equal, all rows and ranks)"
            if workload.options.backward:
                problem, checks[name]["gradients"] = compare_gradients(
                    expected[1], call.gradients(), "approx", workload.dtype)
                checks[name]["gradient_problem"] = "; ".join(filter(None, runtime.gather(problem)))
                text += f", gradients {checks[name]['gradient_problem'] or 'within the limit'}"
        runtime.print(text)
    return running, checks, errors


def median(workload, call, tests=5):
    """Slowest-rank median seconds of a call."""
    timing, _ = make_timer(workload.options, workload.runtime).measure(
        call, warmup=2, num_tests=tests + 1, before=workload.clear_gradients)
    return record.slowest_rank(workload.runtime.gather(timing.samples))["p50_s"]


def base_environment(options):
    """The plugin's settings before the link is known. On CPU there are no SMs to reserve."""
    chunks = "" if options.chunks == "auto" else options.chunks
    return {"A2A_FFN_CHUNKS": chunks, "A2A_FFN_IN_FLIGHT": options.in_flight, "A2A_FFN_RECIPE": "inductor",
            "A2A_FFN_RESERVED_SMS": "0", "A2A_FFN_STRICT": "1"}


class Calibration:
    """Sets the link's rate by the forward's computation and by what the exchanges take."""

    def __init__(self, workload, link):
        self.workload, self.link, self.options = workload, link, workload.options
        self.sent = record.exchange_bytes(self.options, workload.runtime.world_size)["bytes_sent_per_exchange"]
        self.chunked = Variant(workload, "kernel", base_environment(self.options), comp_only=True)
        self.call = exchange_call(workload)
        self.unshaped = self.exchanges()

    def exchanges(self):
        """Seconds of dispatch and combine."""
        count = record.exchange_bytes(self.options, self.workload.runtime.world_size)["exchanges"]
        return self._median(self.call) * 2 / count

    def _median(self, call):
        timing, _ = make_timer(self.options, self.workload.runtime).measure(call, warmup=3, num_tests=8)
        return record.slowest_rank(self.workload.runtime.gather(timing.samples))["p50_s"]

    def shape(self):
        """Set the rate, and correct it once by what the exchanges then take. Returns what was measured."""
        runtime, link = self.workload.runtime, self.link
        computation = self._median(self.chunked.forward)
        wanted = self.options.ratio * computation
        if self.options.rate_mbit:
            link.shape(self.options.rate_mbit * 1e6 / 8)
        else:
            link.shape(2 * self.sent * runtime.world_size / wanted)
            link.shape(link.rate * self.exchanges() / wanted)
        shaped = self.exchanges()
        tiny = torch.zeros(runtime.world_size, 16)
        received = torch.empty_like(tiny)
        latency = self._median(lambda: dist.all_to_all_single(received, tiny, group=runtime.group) or received)
        runtime.print(
            f"link: {link.rate / 1e6:.1f} MB/s ({link.rate * 8e-6:.0f} Mbit/s), burst {link.burst >> 10} KiB; two "
            f"exchanges of {self.sent / 2**20:.2f} MiB take {shaped * 1e3:.1f} ms ({self.unshaped * 1e3:.1f} ms "
            f"unshaped), the forward's computation {computation * 1e3:.1f} ms: ratio {shaped / computation:.2f}")
        return {"rate_bytes_per_s": link.rate, "burst_bytes": link.burst, "unshaped_s": self.unshaped,
                "shaped_s": shaped, "latency_s": latency, "forward_computation_s": computation}

    def environment(self, link):
        """The plugin's settings with a plan for this link."""
        bandwidth = self.sent / max(link["shaped_s"] / 2 - link["latency_s"], 1e-6)
        flops = CPU_PER_GEMM * record.forward_flops(self.options) / link["forward_computation_s"]
        costs = f"{link['latency_s'] * 1e6:.0f},{bandwidth / 1e9:.5f},{flops / 1e12:.5f}"
        return {**base_environment(self.options), "A2A_FFN_COSTS": costs}


def run(parser, options, runtime):
    """Shape the link, compile, compare, measure, report. Returns 1 where a forward differs from none, else 0."""
    runtime.print(f"FFN alone: P={runtime.world_size} B={options.batch_size} T={options.tokens} D={options.dim} "
                  f"H={options.dim * options.k} {options.dtype}, compiled, {pass_name(options)}; a rank has "
                  f"{torch.get_num_threads()} compute and {options.gloo_threads} gloo thread(s)")
    workload = Workload(options, runtime)
    workload.inputs.requires_grad_(options.backward)
    calibration = Calibration(workload, netns.Link(runtime, options.worker, options.delay_us))
    environment = runtime.gather(calibration.environment(calibration.shape()))[0]
    with mock.patch.dict(os.environ, environment):
        ffn = workload.block.ffn
        plan = plan_for(ffn, check_call(ffn, workload.inputs), Settings.from_environment())
    runtime.print(f"plan: {plan}   (A2A_FFN_COSTS={environment['A2A_FFN_COSTS']})")
    running, checks, errors = compile_all(workload, make_variants(workload, environment))
    followed = [report.matches for report in pass_log() if report.name == "verify"]
    runtime.print(f"verify: {sum(followed)} exchanges, waits and GEMMs as scheduled, {len(followed)} graph(s)")
    link = calibration.shape()
    measurements = measure(workload, {**running, EXCHANGES: exchange_call(workload)})
    summary, hideable = summarize(measurements, plan.sizes, options.backward, options.rounds)
    result = record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "comparison", "configuration": configuration(parser, options),
        "environment": record.environment(runtime.device), "world_size": runtime.world_size,
        "pass": pass_name(options), "rounds": options.rounds, "plugin": plugins.plugin_name(), "transports": {},
        "exchange": record.exchange_bytes(options, runtime.world_size), "checks": checks, "full_batch": {},
        "peak_memory_bytes": runtime.gather(record.peak_memory(runtime.device)), "measurements": measurements,
        "summary": summary, "variants": {}, "failed": errors, "hideable_s": hideable,
        "plan": str(plan), "settings": environment, "link": link,
        "forms": VARIANTS, "compute_threads": torch.get_num_threads()})
    runtime.print(table(result))
    if options.json and runtime.is_main:
        record.write(result, options.json)
    return 0 if all(check["equal"] for check in checks.values()) else 1


def measure(workload, calls):
    """Measure all calls in interleaved rounds. Returns {name: measurement} as the record has it."""
    options, runtime = workload.options, workload.runtime
    timer = make_timer(options, runtime)
    samples = {name: [] for name in calls}
    begin = time.perf_counter()
    for index in range(options.rounds):
        for name, call in calls.items():
            timing, _ = timer.measure(call, warmup=options.warmup, before=workload.clear_gradients,
                                      num_tests=-(-options.num_tests // options.rounds) + 1)
            samples[name] += timing.samples
        runtime.print(f"round {index + 1} of {options.rounds} done, {time.perf_counter() - begin:.0f} s")
    gathered = {name: runtime.gather(own) for name, own in samples.items()}
    return {name: {"samples_s": own, "slowest_rank": record.slowest_rank(own)} for name, own in gathered.items()}


def hideable_seconds(medians, sizes, backward):
    """See the head of this file."""
    communication = medians[EXCHANGES]
    ends = min(sizes[0], sizes[-1]) / 4 if backward else (sizes[0] + sizes[-1]) / 2
    return min(communication, medians[COMP_OURS]) - communication * ends / sum(sizes)


def summarize(measurements, sizes, backward, rounds):
    """(what is reported of each variant, hideable seconds)."""
    medians = {name: value["slowest_rank"]["p50_s"] for name, value in measurements.items()}
    hideable = hideable_seconds(medians, sizes, backward)
    by_round = [round_medians(measurements, index, rounds) for index in range(rounds)]
    summary = {}
    for name in VARIANTS.keys() & medians.keys():
        own = medians[COMP_NONE if name == "none" else COMP_OURS]
        summary[name] = {
            "median_s": medians[name], "speedup_over_none": medians["none"] / medians[name],
            "hidden_fraction": (medians["none"] - medians[name]) / hideable,
            "hidden_by_parts": (own + medians[EXCHANGES] - medians[name]) / hideable,
            "hidden_by_round": [(each["none"] - each[name]) / hideable_seconds(each, sizes, backward)
                                for each in by_round],
            "exposed_s": medians[name] - own}
    return {name: summary[name] for name in medians if name in summary}, hideable


def round_medians(measurements, index, rounds):
    """Slowest-rank medians of one round: each has equally many samples."""
    medians = {}
    for name, value in measurements.items():
        length = len(value["samples_s"][0]) // rounds
        part = [own[index * length:(index + 1) * length] for own in value["samples_s"]]
        medians[name] = record.slowest_rank(part)["p50_s"]
    return medians


def table(result):
    """The result as text."""
    measurements, summary = result["measurements"], result["summary"]
    lines = [f"\n{result['pass']}, P={result['world_size']}, slowest-rank medians over {result['rounds']} rounds",
             f"{'variant':<18}{'median ms':>10}{'p90 ms':>9}{'speed-up':>10}{'hidden':>9}{'by parts':>10}"
             f"{'exposed ms':>12}"]
    for name, value in measurements.items():
        statistics = value["slowest_rank"]
        line = f"{name:<18}{statistics['p50_s'] * 1e3:>10.1f}{statistics['p90_s'] * 1e3:>9.1f}"
        if name in summary:
            own = summary[name]
            line += f"{own['speedup_over_none']:>9.3f}x{own['hidden_fraction']:>9.1%}{own['hidden_by_parts']:>10.1%}"
            line += f"{own['exposed_s'] * 1e3:>12.1f}"
        lines.append(line)
    lines += [f"{name:<18}does not compile" for name in result["failed"]]
    communication, computation = (measurements[name]["slowest_rank"]["p50_s"] for name in (EXCHANGES, COMP_OURS))
    hideable = result["hideable_s"] * 1e3
    lines.append(f"exchanges / computation = {communication / computation:.2f}; hideable {hideable:.1f} ms")
    if "passes" in summary:
        hidden = summary["passes"]["hidden_fraction"]
        rounds = summary["passes"]["hidden_by_round"]
        lines.append("hidden by passes in each round: " + " ".join(f"{each:.0%}" for each in rounds) +
                     "; rounds that differ widely, or exceed 100 % by much, say that the machine's speed changed")
        lines.append(f"passes hide {hidden:.0%} of it ({'at least' if hidden >= TARGET else 'less than'} {TARGET:.0%})")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main())
