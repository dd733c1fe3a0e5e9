"""The command line that the benchmark and the comparison share: flags, defaults, validation."""

import argparse
from pathlib import Path

import torch

from rankmixer import backends
from rankmixer.checks import CHECK_MODES
from rankmixer.ffn import require_positive
from rankmixer.runtime import environment_rank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class RanksParser(argparse.ArgumentParser):
    """Of a command that every rank runs: only the first one prints what all would print alike, help and mistakes."""

    def _print_message(self, message, file=None):
        if environment_rank()[0] == 0:
            super()._print_message(message, file)


def add_common_options(parser):
    """Add every flag that describes the workload, the compilation, the checks and the timing."""
    add = parser.add_argument
    add("--batch-size", type=int, default=512, help="rows per rank, B (default: %(default)s)")
    add("--tokens", type=int, default=64, help="tokens, T; a multiple of the number of ranks (default: %(default)s)")
    add("--dim", type=int, default=1280, help="token width, D; a multiple of T (default: %(default)s)")
    add("--k", type=int, default=6, help="expansion: hidden width H = D * k * compute-scale (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="precision of inputs and parameters (default: %(default)s)")
    add("--seed", type=int, default=42, help="inputs and model use seed + rank (default: %(default)s)")
    add("--gemm-backend", choices=backends.GEMM_BACKENDS, default="bmm", help="GEMM backend (default: %(default)s)")
    add("--fwd-mode", choices=backends.DENSE_MODES, default="dense_v2", help="forward path (default: %(default)s)")
    add("--bwd-mode", choices=backends.DENSE_MODES, default="dense_v2", help="backward path (default: %(default)s)")
    add("--large-block", action="store_true", help="add a dense SwiGLU sub-layer; numerical checks do not run then")
    add("--comm-scale", type=int, default=1, help="pad what the exchanges send by this factor; results do not change")
    add("--compute-scale", type=int, default=1, help="multiply H by this factor")
    add("--backward", action="store_true", help="measure forward and backward with one fixed upstream gradient")
    add("--no-compile", action="store_true", help="run eagerly (default: torch.compile with static shapes)")
    add("--check-correctness", choices=CHECK_MODES, default="none",
        help="compare min(B,2) rows with overlap=none. The forward output is compared with torch.equal in both modes; "
             "'bitwise' also compares gradients with torch.equal, 'approx' bounds each gradient's relative error "
             "(gradients only, with --backward)")
    add("--full-batch-check", action="store_true",
        help="also compare the whole output with overlap=none and report it apart; never a gate")
    add("--warmup", type=int, default=50, help="unmeasured calls (default: %(default)s)")
    add("--num-tests", type=int, default=50,
        help="measured calls; the first of several is dropped (default: %(default)s)")
    add("--l2-flush", action=argparse.BooleanOptionalAction, default=True, help="flush the cache before each sample")
    add("--prewarm-sleep-ms", type=float, default=10.0, help="sleep before warming up (default: %(default)s)")
    add("--cuda-graph", action=argparse.BooleanOptionalAction, default=False, help="capture the call and replay it")
    add("--device", choices=("cuda", "cpu"), default=None, help="default: cuda where there is one, else cpu with gloo")
    add("--json", metavar="FILE", default=None, help="write the record here (rank 0)")


def validate(options, world_size, device):
    """Check every value before any collective and add ``options.torch_dtype``.

    Raises:
        ValueError: naming the flag, its value and what is allowed.
    """
    require_positive(**{name: getattr(options, name) for name in
                        ("batch_size", "tokens", "dim", "k", "comm_scale", "compute_scale", "num_tests")})
    if options.warmup < 0:
        raise ValueError(f"warmup={options.warmup}: must be at least 0")
    if not 0 <= options.prewarm_sleep_ms < float("inf"):
        raise ValueError(f"prewarm_sleep_ms={options.prewarm_sleep_ms}: must be a finite number of at least 0")
    if options.tokens % world_size:
        raise ValueError(f"tokens={options.tokens}: must be a multiple of the number of ranks, {world_size}")
    if options.dim % options.tokens:
        raise ValueError(f"dim={options.dim}: must be a multiple of tokens={options.tokens}")
    if options.json and Path(options.json).is_dir():
        raise ValueError(f"json={options.json!r}: must be a file, is a folder")
    backends.require_backend(options.gemm_backend)
    if options.cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph=True: needs a CUDA device, this run uses {device.type}")
    options.torch_dtype = DTYPES[options.dtype]


def overridden_defaults(parser, options):
    """{name: value} of every flag that is not at its default."""
    return {action.dest: getattr(options, action.dest) for action in parser._actions
            if hasattr(options, action.dest) and getattr(options, action.dest) != action.default}


def configuration(parser, options):
    """{name: {"value", "default", "overridden"}} for the record, in the parser's order."""
    return {action.dest: {"value": getattr(options, action.dest), "default": action.default,
                          "overridden": getattr(options, action.dest) != action.default}
            for action in parser._actions if hasattr(options, action.dest)}
