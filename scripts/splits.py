#!/usr/bin/env python3
r"""What it costs to split the layer's local computation along L, rows (P*B) or H, in 2, 4 and 8 parts, on one device.

    python scripts/splits.py --json reports/results/h200-torch-2.11.0/splits.json     # the default workload at P=2

Nothing is exchanged and nothing packed: this is what a split adds to the computation, before it hides anything. All
splits run the recipe `eager_exact` with the bias form `add`, called eagerly, so that the parts' kernels run one part
after the other, as the layer's schedule has them. The parts of L and rows are those of `recipes.local_ffns`; each has
an input [n,l,D] of its own, as an exchange leaves it. Parts of H (`_HiddenParts`) are columns of U and G in
the first GEMM, which are written into their place; the norms need whole rows; the second GEMM is a sum over parts of
K, accumulated in the tensors' dtype. Backward is the same the other way round.

Along L a weight's gradient is computed part by part, in place, as the pass `inplace-gradients` has it; along rows the
parts' are added up by autograd, in the tensors' dtype.

Times are by the benchmark's protocol, all splits in turns in every round. Each split's output and gradients are
compared with those of the whole. Writes a record of kind `splits`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research_topic_2")]

import torch  # noqa: E402
from rankmixer import record  # noqa: E402
from rankmixer.checks import frobenius_relative_error  # noqa: E402
from rankmixer.ffn import PerTokenFFN, require_positive  # noqa: E402
from rankmixer.options import DTYPES, configuration  # noqa: E402
from rankmixer.runtime import Runtime, choose_device  # noqa: E402
from rankmixer.schema import PASSES, SPLIT_AXES, percentile  # noqa: E402
from rankmixer.timing import Timer  # noqa: E402
from torch.autograd import Function  # noqa: E402

from compile_overlap.kernels import exact_gated_norm, gated_norm_grad  # noqa: E402
from compile_overlap.layout import PARAMETERS, eps_of, parameters_of  # noqa: E402
from compile_overlap.recipes import ADD, EAGER_EXACT, exact, local_ffns  # noqa: E402

PARTS = (2, 4, 8)
FORWARD, TRAINING = PASSES
INPUTS, OUTPUT = "inputs", "output"
JOINED = {"L": {INPUTS: 1, OUTPUT: 0, "w1": 0, "wout": 0}, "rows": {INPUTS: 0, OUTPUT: 1}, "H": {}}


class Case(NamedTuple):
    """The tensors of one device: inputs [P*B,L,D] as received, the eight parameters, their norms' epsilons, and the
    upstream gradient [L,P*B,D]."""

    inputs: torch.Tensor
    parameters: dict[str, torch.Tensor]
    eps: tuple[float, float]
    upstream: torch.Tensor


class Split(NamedTuple):
    """One split: `axis` is None for the whole. `leaves`: each tensor's parts, which are differentiated to; `outputs()`
    the output's parts [l,n,D], `upstream` their gradients."""

    axis: str | None
    parts: int
    leaves: dict[str, tuple[torch.Tensor, ...]]
    outputs: Callable[[], list[torch.Tensor]]
    upstream: tuple[torch.Tensor, ...]

    def call(self, direction: str) -> Callable[[], torch.Tensor]:
        """What is timed."""
        return {FORWARD: self._forward, TRAINING: lambda: self.gradients()[0][0]}[direction]

    def _forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.outputs()[0]

    def gradients(self) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """The output's parts and the gradients of all leaves, in their order."""
        outputs = self.outputs()
        leaves = [leaf for parts in self.leaves.values() for leaf in parts]
        return outputs, torch.autograd.grad(outputs, leaves, self.upstream)

    def results(self) -> dict[str, torch.Tensor]:
        """The output and every gradient, put together."""
        outputs, gradients = self.gradients()
        following = iter(gradients)
        parts = {OUTPUT: [part.detach() for part in outputs]}
        parts |= {name: list(itertools.islice(following, len(leaves))) for name, leaves in self.leaves.items()}
        joined = JOINED.get(self.axis, {})
        return {name: torch.cat(each, joined[name]) if name in joined else each[0] for name, each in parts.items()}


class _InParts(tuple):
    """A weight whose parts along L are leaves, where `local_ffns` would split it: no gradient is concatenated."""

    def split(self, sizes):
        return self


def split(case: Case, axis: str | None, parts: int) -> Split:
    """The layer's local computation in equal parts along an axis. Raises ValueError where they do not divide it."""
    rows, tokens, _ = case.inputs.shape
    size = {None: 1, "L": tokens, "rows": rows, "H": case.parameters["wout"].shape[1]}[axis]
    if size % parts:
        raise ValueError(f"{axis}={size}: must be a multiple of {parts} parts")
    return _of_hidden(case, parts) if axis == "H" else _of_layer(case, axis, parts)


def _of_layer(case: Case, axis: str | None, parts: int) -> Split:
    (rows, tokens, _), along = case.inputs.shape, JOINED.get(axis, {})
    sizes = (tokens // parts,) * parts if axis == "L" else (tokens,)
    rows = rows // parts if axis == "rows" else rows
    leaves = {INPUTS: _leaves(case.inputs, parts, along.get(INPUTS, 0))}
    leaves |= {name: _leaves(each, parts if name in along else 1, 0) for name, each in case.parameters.items()}
    b1, bout, *norms = (leaves[name][0] for name in PARAMETERS if name not in ("w1", "wout"))

    def outputs():
        functions = local_ffns(
            _InParts(leaves["w1"]), b1, _InParts(leaves["wout"]), bout, tuple(norms), sizes=sizes, rows=rows,
            recipe=EAGER_EXACT, bias=ADD, eps=case.eps, exact_gradients=False,
        )  # fmt: skip
        return [run(x_nld.transpose(0, 1)) for run, x_nld in zip(itertools.cycle(functions), leaves[INPUTS])]

    upstream = tuple(part.contiguous() for part in case.upstream.chunk(parts, along.get(OUTPUT, 0)))
    return Split(axis, parts, leaves, outputs, upstream)


def _of_hidden(case: Case, parts: int) -> Split:
    leaves = {name: _leaves(each, 1, 0) for name, each in ((INPUTS, case.inputs), *case.parameters.items())}
    x_nld, w1, b1, wout, bout, *norm_weights = (leaves[name][0] for name in (INPUTS, *PARAMETERS))

    rows, tokens, _ = case.inputs.shape

    def outputs():
        norms = exact.Norms.of(tuple(norm_weights))
        weights = *norms.collecting, *norms.weights
        y_lnd = _HiddenParts.apply(x_nld.transpose(0, 1), w1, b1, wout, *weights, *case.eps, parts)
        (expanded_bout,) = exact.expand_rows(bout, rows).split((tokens,), dim=1)  # its gradient summed as the whole's
        return [y_lnd + expanded_bout.transpose(0, 1)]

    return Split("H", parts, leaves, outputs, (case.upstream,))


def _leaves(tensor: torch.Tensor, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.detach().contiguous().requires_grad_() for part in tensor.chunk(parts, dim))


class _HiddenParts(Function):
    """x [l,n,D] -> h @ wout [l,n,D]: both GEMMs, and backward all four, in parts of H; the gated norm over whole rows.

    Otherwise as `exact.gated_projection`: the same operators, and the product h computed again in backward.
    """

    @staticmethod
    def forward(ctx, x, w1, b1, wout, *rest):
        weights, (*eps, parts) = rest[4:8], rest[8:]
        H = wout.shape[1]
        z = x.new_empty((*x.shape[:2], 2 * H))
        for columns in _columns(H, parts):
            torch.bmm(x, w1[..., columns], out=z[..., columns])
        h, *stats = exact_gated_norm.unpacked(exact.gated_norm_forward(z, b1, *weights, *eps))
        ctx.save_for_backward(x, w1, b1, wout, z, *weights, *stats)
        ctx.eps, ctx.parts = eps, parts
        return _sum((h[..., inner], wout[:, inner]) for inner in _ranges(H, parts))

    @staticmethod
    def backward(ctx, grad):
        x, w1, b1, wout, z, *norms = ctx.saved_tensors
        H = wout.shape[1]
        inner, columns = list(_ranges(H, ctx.parts)), list(_columns(H, ctx.parts))
        grad_h = grad.new_empty((*grad.shape[:2], H))
        for part in inner:
            torch.bmm(grad, wout[:, part].transpose(1, 2), out=grad_h[..., part])
        if gated_norm_grad.takes(z):
            grad_z, h, grad_b1, grad_norms = gated_norm_grad.gated_norm_grad(grad_h, z, b1, *norms, True)
        else:
            grad_z, h, grad_b1, grad_norms = exact.gated_norm_backward(grad_h, z, b1, *norms, *ctx.eps, True)
        grad_wout, grad_w1 = torch.empty_like(wout), torch.empty_like(w1)
        for part in inner:
            torch.bmm(h[..., part].transpose(1, 2), grad, out=grad_wout[:, part])
        grad_x = _sum((grad_z[..., part], w1[..., part].transpose(1, 2)) for part in columns)
        for part in columns:
            torch.bmm(x.transpose(1, 2), grad_z[..., part], out=grad_w1[..., part])
        return grad_x, grad_w1, grad_b1.to(b1.dtype), grad_wout, *grad_norms.unbind(), *(None,) * 7


def _ranges(H: int, parts: int) -> list[slice]:
    return [slice(begin, begin + H // parts) for begin in range(0, H, H // parts)]


def _columns(H: int, parts: int) -> list[slice]:
    """Each part's columns of U, then of G, in [..,2H]."""
    return [slice(each.start + half, each.stop + half) for each in _ranges(H, parts) for half in (0, H)]


def _sum(factors: Any) -> torch.Tensor:
    """The sum of batched products, accumulated in their dtype."""
    first, *others = factors
    total = torch.bmm(*first)
    for each in others:
        total.baddbmm_(*each)
    return total


def make_case(options: argparse.Namespace, device: torch.device) -> Case:
    """The benchmark's layer of one rank, and standard normal inputs and upstream gradient, all from the seed."""
    dtype, generator = DTYPES[options.dtype], torch.Generator(device).manual_seed(options.seed)
    ffn = PerTokenFFN(options.tokens, options.dim, options.k, dtype=dtype, device=device)
    ffn.reset_parameters(generator)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    parameters = {name: each.detach() for name, each in zip(PARAMETERS, parameters_of(ffn))}
    inputs, upstream = (draw(*shape, options.dim) for shape in
                        ((options.rows, options.tokens), (options.tokens, options.rows)))  # fmt: skip
    return Case(inputs, parameters, eps_of(ffn), upstream)


def compared(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """{name: whether it equals the whole's bit for bit, and the Frobenius relative error}."""
    return {name: {"equal": torch.equal(ours[name], each), "relative_error": frobenius_relative_error(ours[name], each)}
            for name, each in whole.items()}  # fmt: skip


def measure(splits: list[Split], options: argparse.Namespace, runtime: Runtime) -> list[dict[str, list[float]]]:
    """For each split, {pass: its samples in seconds}: every round measures all of them."""
    timer = Timer(runtime, l2_flush=options.l2_flush)
    samples = [{direction: [] for direction in PASSES} for _ in splits]
    per_round = -(-options.num_tests // options.rounds) + 1
    for index in range(options.rounds):
        warmup = min(options.warmup, 2) if index else options.warmup
        for direction, (each, kept) in itertools.product(PASSES, list(zip(splits, samples))):
            timing, _ = timer.measure(each.call(direction), warmup=warmup, num_tests=per_round)
            kept[direction] += timing.samples
    return samples


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """Compare and measure all splits; returns the record. Raises ValueError where a size does not divide."""
    runtime = Runtime(0, 1, choose_device(options.device), None)
    case = make_case(options, runtime.device)
    asked = [(None, 1), *itertools.product(SPLIT_AXES, PARTS)]
    splits = [split(case, *each) for each in asked]
    whole = splits[0].results()
    verdicts = [{}, *(compared(each.results(), whole) for each in splits[1:])]
    del whole
    rows = []
    for each, verdict, samples in zip(splits, verdicts, measure(splits, options, runtime)):
        passes = {name: {"samples_s": kept, "p50_s": percentile(sorted(kept), 50)} for name, kept in samples.items()}
        rows.append({"axis": each.axis, "parts": each.parts, "passes": passes, "compared": verdict})
    return record.validate({
        "schema": record.SCHEMA_VERSION, "kind": "splits", "configuration": configuration(parser, options),
        "environment": record.environment(runtime.device), "recipe": EAGER_EXACT, "bias": ADD, "rounds": options.rounds,
        "splits": rows,
    })  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The record as text; times are medians in milliseconds."""
    whole = result["splits"][0]["passes"]
    heading = f"{'split along':<12}{'parts':>7}{'forward':>12}{'ratio':>9}{'with backward':>16}{'ratio':>9}"
    lines = [f"{heading}   what differs"]
    for row in result["splits"]:
        seconds = {name: each["p50_s"] for name, each in row["passes"].items()}
        over = {name: f"{each / whole[name]['p50_s']:.3f}x" for name, each in seconds.items()}
        wrong = (name for name, each in row["compared"].items() if not each["equal"])
        errors = ", ".join(f"{name} {row['compared'][name]['relative_error']:.1e}" for name in wrong)
        lines.append(
            f"{row['axis'] or 'whole':<12}{row['parts']:>7}{seconds[FORWARD] * 1e3:>12.4f}{over[FORWARD]:>9}"
            f"{seconds[TRAINING] * 1e3:>16.4f}{over[TRAINING]:>9}   {errors}".rstrip()
        )
    return "\n".join([*lines, "median ms and ratio to the whole; in the last column Frobenius relative errors"])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=1024, help="rows of each token, P*B (default: %(default)s)")
    add("--tokens", type=int, default=32, help="tokens of the rank, L = T/P (default: %(default)s)")
    add("--dim", type=int, default=1280, help="token width, D (default: %(default)s)")
    add("--k", type=int, default=6, help="expansion: H = D * k (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="(default: %(default)s)")
    add("--seed", type=int, default=42, help="(default: %(default)s)")
    add("--warmup", type=int, default=5, help="unmeasured calls of each (default: %(default)s)")
    add("--num-tests", type=int, default=50, help="samples of each, over all rounds (default: %(default)s)")
    add("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    add("--l2-flush", action=argparse.BooleanOptionalAction, default=True, help="flush the cache before each sample")
    add("--device", choices=("cuda", "cpu"), default=None, help="default: cuda where there is one")
    add("--json", metavar="FILE", default=None, help="write the record here")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        require_positive(**{name: getattr(options, name) for name in
                            ("rows", "tokens", "dim", "k", "num_tests", "rounds")})  # fmt: skip
        result = run(parser, options)
    except ValueError as error:
        parser.error(str(error))
    print(table(result))
    if options.json:
        record.write(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
