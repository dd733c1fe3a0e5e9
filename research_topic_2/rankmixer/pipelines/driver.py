"""The chunked pipeline that both comparison modes share.

The rank's L tokens are cut into chunks. Chunk c's exchanges fly while other chunks compute:

    1. dispatches 0 and 1 start;
    2. for every chunk c: wait for dispatch c, compute it, start combine c, start dispatch c + 2;
    3. wait for the combines and place their rows.

So dispatch c+1 and combine c-1 are in flight while chunk c computes. Starting every dispatch before the first
combine would let combine 0 wait for the last dispatch, because one communicator runs its exchanges in order.

Backward has the same shape: dispatch and combine are each other's adjoint, so output gradients are dispatched, each
chunk's local graph yields its gradients, and input gradients are combined. The chunk axis is the token axis, which
is the GEMMs' batch axis: every row and every weight gradient is computed as in the unchunked layer.
"""

import itertools
import math

import torch
from torch.autograd.function import once_differentiable

from rankmixer.compiling import compile_fresh
from rankmixer.exchange import pad_payload

MAX_CHUNKS = 4
LOOKAHEAD = 2
_COMPILED = {}


def chunk_bounds(local_tokens, step=1):
    """Cut ``local_tokens`` into at most MAX_CHUNKS ranges of at least two tokens (one, when there is only one).

    A chunk of a single token may take another GEMM algorithm than the whole and then differs in the last bit. Inner
    borders are multiples of ``step``.
    """
    count = max(1, min(MAX_CHUNKS, local_tokens // max(2, step)))
    edges = [local_tokens // step * c // count * step for c in range(count)] + [local_tokens]
    return list(zip(edges[:-1], edges[1:]))


def border_step(device, values_per_token):
    """Tokens of which a border must be a multiple: on CPU, those that make whole vector steps of at most 64 values.

    ATen computes what is left over from whole steps with a scalar exp, which rounds differently.
    """
    return 1 if device.type != "cpu" else 64 // math.gcd(64, values_per_token)


class Pipeline:
    """One call of the chunked layer.

    Args:
        transport: ``start(send)`` begins exchanging a contiguous [P, ...] buffer and returns a handle whose
            ``wait()`` gives the received buffer of the same shape; ``finish()`` ends a pass.
        local: [N, L, D] and the eight parameters and eps -> [L, N, D].
        peers, scale: P and the payload padding factor.
        compiled: compile ``local``, once per chunk shape and gradient pattern.
    """

    def __init__(self, transport, local, peers, scale, eps, compiled):
        self.transport, self.local, self.eps, self.compiled = transport, local, eps, compiled
        self.peers, self.scale = peers, scale

    def __call__(self, inputs, parameters):
        tensors = (inputs, *parameters)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _PipelineFunction.apply(self, *tensors)
        return self.run_forward(tensors, (False,) * len(tensors))[0]

    def run_forward(self, tensors, needs_grad):
        """Return the output [B, T, D] and, where a gradient is needed, each chunk's (leaves, output) graph."""
        inputs, parameters = tensors[0].detach(), tensors[1:]
        tokens, rows_per_token, hidden = parameters[0].shape[0], self.peers * inputs.shape[0], parameters[2].shape[1]
        bounds = chunk_bounds(tokens, border_step(inputs.device, rows_per_token * hidden))
        graphs = [None] * len(bounds)

        def compute(c, received):
            leaves = _chunk_leaves(received.flatten(0, 1), parameters, bounds[c], needs_grad)
            with torch.set_grad_enabled(any(needs_grad)):
                rows = self._local_function(leaves)(self.local, *leaves, self.eps)
            if any(needs_grad):
                graphs[c] = (leaves, rows)
            return rows.detach()

        return self._exchange_chunks(inputs, bounds, compute), graphs

    def run_backward(self, grad_output, graphs, needs_grad):
        """Return the gradients of the inputs and the eight parameters, None where not needed."""
        edges = list(itertools.accumulate((rows.shape[1] for _, rows in graphs), initial=0))
        bounds = list(zip(edges[:-1], edges[1:]))
        gradients = [None] * len(graphs)

        def compute(c, received):
            leaves, rows = graphs[c]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(rows, wanted, received.flatten(0, 1)))
            gradients[c] = [next(found) if leaf.requires_grad else None for leaf in leaves]
            graphs[c] = None
            return gradients[c][0]

        grad_inputs = self._exchange_chunks(grad_output, bounds, compute, combine=needs_grad[0])
        columns = list(zip(*gradients))[1:]
        return [grad_inputs, *(_join(parts) for parts in columns[:4]), *(_sum(parts) for parts in columns[4:])]

    def _exchange_chunks(self, tensor, bounds, compute, combine=True):
        """Dispatch every chunk of ``tensor`` [B, T, D], compute it, and combine the rows [P*B, l, D] it returns."""
        by_peer = tensor.unflatten(1, (self.peers, -1))
        width = tensor.shape[-1]
        dispatches, combines = {}, {}

        def start_dispatch(c):
            if c < len(bounds):
                first, last = bounds[c]
                dispatches[c] = self._start(by_peer[:, :, first:last].transpose(0, 1))

        for c in range(LOOKAHEAD):
            start_dispatch(c)
        for c in range(len(bounds)):
            rows = compute(c, dispatches.pop(c).wait()[..., :width].contiguous())
            if combine:
                combines[c] = self._start(rows.unflatten(0, (self.peers, -1)))
            start_dispatch(c + LOOKAHEAD)
        result = self._collect(combines, bounds, tensor) if combine else None
        self.transport.finish()
        return result

    def _start(self, parts):
        return self.transport.start(pad_payload(parts, self.scale).contiguous())

    def _collect(self, combines, bounds, like):
        result = torch.empty_like(like, memory_format=torch.contiguous_format)
        by_peer = result.unflatten(1, (self.peers, -1))
        for c, (first, last) in enumerate(bounds):
            received = combines.pop(c).wait()[..., : like.shape[-1]]
            by_peer[:, :, first:last].copy_(received.transpose(0, 1))
        return result

    def _local_function(self, leaves):
        if not self.compiled:
            return _local_rows
        key = (torch.is_grad_enabled(), self.local,
               *((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) for leaf in leaves))
        if key not in _COMPILED:
            _COMPILED[key] = compile_fresh(_local_rows)
        return _COMPILED[key]


class _PipelineFunction(torch.autograd.Function):
    """The whole pipeline as one node; the chunks' local graphs live inside it."""

    @staticmethod
    def forward(ctx, pipeline, *tensors):
        ctx.pipeline, ctx.needs_grad = pipeline, ctx.needs_input_grad[1:]
        output, ctx.graphs = pipeline.run_forward(tensors, ctx.needs_grad)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.graphs is None:
            raise RuntimeError("the chunked pipeline keeps its graphs for one backward pass only")
        graphs, ctx.graphs = ctx.graphs, None
        return (None, *ctx.pipeline.run_backward(grad_output, graphs, ctx.needs_grad))


def _local_rows(local, *arguments):
    """``local`` with its result in row order: [N, l, D], contiguous."""
    return local(*arguments).transpose(0, 1).contiguous()


def _chunk_leaves(x, parameters, bounds, needs_grad):
    """Detached inputs of one chunk's local graph: its rows, its slices of the four GEMM parameters, the norms."""
    first, last = bounds
    per_token = [parameter.detach()[first:last] for parameter in parameters[:4]]
    shared = [parameter.detach() for parameter in parameters[4:]]
    leaves = [x.detach(), *per_token, *shared]
    return [leaf.requires_grad_(needed) for leaf, needed in zip(leaves, needs_grad)]


def _join(parts):
    return None if parts[0] is None else torch.cat(parts)


def _sum(parts):
    """Sum the chunks' norm gradients in float32 and round once."""
    return None if parts[0] is None else torch.stack(parts).sum(0, dtype=torch.float32).to(parts[0].dtype)
