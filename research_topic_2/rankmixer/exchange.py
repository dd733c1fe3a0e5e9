"""The sequential exchanges of the expert-parallel FFN: dispatch and combine, both differentiable.

Terms, with P ranks in the group, B rows per rank, T tokens, L = T / P tokens per rank:

* dispatch: [B, T, D] -> [P*B, L, D]. Token slice p goes to rank p; rows arrive in source-rank order.
* combine:  [P*B, L, D] -> [B, T, D]. The inverse of dispatch.

Each is one ``dist.all_to_all_single`` over a [P, B, L, D] buffer and at most one copy on either side.
What dispatch receives is used as it lies in memory. Each one's gradient is the other one.

Under ``torch.compile`` the send buffer is built with ``torch.stack``: torch 2.6 rewrites the collective to its
functional form and Inductor hands a permuted copy on with the permuted strides, which the collective refuses
("Tensors must be contiguous"); a stacked buffer stays contiguous.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def local_dispatch(inputs, peers):
    """Dispatch without communication: [B, T, D] -> [P*B, L, D], every slice taken from the local batch."""
    return _pack_tokens(inputs, peers).flatten(0, 1)


def local_combine(outputs, peers):
    """Combine without communication: [P*B, L, D] -> [B, T, D]."""
    return _unpack_tokens(outputs.unflatten(0, (peers, -1)))


def dispatch(inputs, group, peers, scale=1):
    """Send every token slice to the rank that owns it.

    Args:
        inputs: [B, T, D], any strides. T is a multiple of ``peers``.
        group: process group of ``peers`` ranks; unused when ``peers`` is 1.
        scale: the last dimension is padded to ``D * scale`` on the wire; the result is the same.

    Returns:
        [P*B, L, D], contiguous, rows grouped by source rank.
    """
    if peers == 1:
        return local_dispatch(inputs, 1)
    return _Dispatch.apply(inputs, group, peers, scale)


def combine(outputs, group, peers, scale=1):
    """Return every row to its source rank: [P*B, L, D] (any strides) -> [B, T, D]. Arguments as in `dispatch`."""
    if peers == 1:
        return local_combine(outputs, 1)
    return _Combine.apply(outputs, group, peers, scale)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, group, peers, scale):
        ctx.group, ctx.peers, ctx.scale = group, peers, scale
        return _dispatch_data(inputs, group, peers, scale)

    @staticmethod
    def backward(ctx, grad):
        return _combine_data(grad, ctx.group, ctx.peers, ctx.scale), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, group, peers, scale):
        ctx.group, ctx.peers, ctx.scale = group, peers, scale
        return _combine_data(outputs, group, peers, scale)

    @staticmethod
    def backward(ctx, grad):
        return _dispatch_data(grad, ctx.group, ctx.peers, ctx.scale), None, None, None


def _dispatch_data(inputs, group, peers, scale):
    return all_to_all(_pack_tokens(inputs, peers, scale), group, inputs.shape[-1]).flatten(0, 1)


def _combine_data(outputs, group, peers, scale):
    return _unpack_tokens(all_to_all(_pack_rows(outputs, peers, scale), group, outputs.shape[-1]))


def all_to_all(send, group, width):
    """Exchange slice p of ``send`` [P, ..., D*scale] with rank p; keep the first ``width`` of the last dimension."""
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received if width == send.shape[-1] else received[..., :width].contiguous()


def pad_payload(tensor, scale):
    """Zero-pad the last dimension D to D * scale; the tensor itself when ``scale`` is 1."""
    return tensor if scale == 1 else F.pad(tensor, (0, tensor.shape[-1] * (scale - 1)))


def _pack_tokens(inputs, peers, scale=1):
    """[B, T, D] -> contiguous [P, B, L, D*scale]."""
    if torch.compiler.is_compiling():
        return torch.stack([pad_payload(part, scale) for part in inputs.chunk(peers, dim=1)])
    return pad_payload(inputs.unflatten(1, (peers, -1)).transpose(0, 1), scale).contiguous()


def _pack_rows(outputs, peers, scale):
    """[P*B, L, D] -> contiguous [P, B, L, D*scale]; no copy where it already is."""
    if torch.compiler.is_compiling():
        return torch.stack([pad_payload(part, scale) for part in outputs.chunk(peers, dim=0)])
    return pad_payload(outputs.unflatten(0, (peers, -1)), scale).contiguous()


def _unpack_tokens(received):
    """[P, B, L, D] -> [B, T, D]."""
    return received.transpose(0, 1).flatten(1, 2)
