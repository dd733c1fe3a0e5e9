"""A stand-in for the original benchmark archive, which nobody here has seen: an FFN and a block written independently.

It differs from `research_topic_2` where the text leaves room: the biases by `bmm` + add or by `baddbmm`, and nothing, the
local core, or the whole block compiled. It loads the plugin as the text says, through `A2A_FFN_KERNEL_PLUGIN`.
"""

from __future__ import annotations

import importlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, send, group):
        ctx.group = group
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        grad = torch.stack(list(grad.unbind(0)))
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad, group=ctx.group)
        return received, None


class ArchiveFFN(nn.Module):
    def __init__(self, tokens, dim, k, *, group=None, size=1, index=0, bias="add", compile_core=False):
        super().__init__()
        self.ep_group, self.ep_group_size, self.ep_index = group, size, index
        self.fwd_mode = self.bwd_mode = "dense_v2"
        self.gemm_backend = "bmm"
        self.bias_form = bias
        self.plugin = importlib.import_module(os.environ["A2A_FFN_KERNEL_PLUGIN"]).forward_ffn
        local, hidden = tokens // size, dim * k
        for name, shape, fan_in in (
            ("w1", (local, dim, 2 * hidden), dim),
            ("b1", (local, 2 * hidden), dim),
            ("wout", (local, hidden, dim), hidden),
            ("bout", (local, dim), hidden),
        ):
            bound = (6 / fan_in) ** 0.5
            setattr(self, name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
        self.norm_x, self.norm_gate = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        for norm in (self.norm_x, self.norm_gate):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
        self.core = torch.compile(self._core, dynamic=False) if compile_core else self._core

    def _core(self, x_nld):
        x = x_nld.transpose(0, 1)
        if self.bias_form == "baddbmm":
            z = torch.baddbmm(self.b1.unsqueeze(1), x, self.w1)
        else:
            z = torch.bmm(x, self.w1) + self.b1.unsqueeze(1)
        u, g = z.chunk(2, dim=-1)
        h = self.norm_x(u) * F.silu(self.norm_gate(g))
        if self.bias_form == "baddbmm":
            return torch.baddbmm(self.bout.unsqueeze(1), h, self.wout)
        return torch.bmm(h, self.wout) + self.bout.unsqueeze(1)

    def forward(self, inputs, overlap="none", comp_only=False):
        if overlap == "kernel":
            return self.plugin(self, inputs, comp_only=comp_only)
        if comp_only:
            return self._forward_comp_only(inputs)
        B, T, D = inputs.shape
        P, L = self.ep_group_size, T // self.ep_group_size
        slices = torch.stack(list(inputs.view(B, P, L, D).unbind(1)))
        x = (_AllToAll.apply(slices, self.ep_group) if P > 1 else slices).view(P * B, L, D)
        y = torch.stack(list(self.core(x).transpose(0, 1).reshape(P, B, L, D).unbind(0)))
        y = _AllToAll.apply(y, self.ep_group) if P > 1 else y
        return torch.cat(list(y.unbind(0)), dim=1)

    def _forward_comp_only(self, inputs):
        B, T, D = inputs.shape
        P, L = self.ep_group_size, T // self.ep_group_size
        x = inputs.view(B, P, L, D).transpose(0, 1).reshape(P * B, L, D)
        y = self.core(x).transpose(0, 1).reshape(P, B, L, D)
        return y.transpose(0, 1).reshape(B, T, D)


class ArchiveBlock(nn.Module):
    """Token mixing and the FFN, each with a residual and a norm before (`pre`) or after it."""

    def __init__(self, ffn, tokens, dim, *, pre):
        super().__init__()
        self.ffn, self.tokens, self.dim, self.pre = ffn, tokens, dim, pre
        self.norm_mix, self.norm_ffn = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def _mix(self, x):
        B, T, D = x.shape
        return x.view(B, T, T, D // T).transpose(1, 2).reshape(B, T, D)

    def forward(self, x, overlap="none"):
        if self.pre:
            x = x + self._mix(self.norm_mix(x))
            return x + self.ffn(self.norm_ffn(x), overlap=overlap)
        x = self.norm_mix(x + self._mix(x))
        return self.norm_ffn(x + self.ffn(x, overlap=overlap))
