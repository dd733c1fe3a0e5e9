"""The chunks' batched GEMMs as operators of their own, for two things that Inductor's `bmm` does not do.

In place: a weight's gradient is the concatenation of its chunks'. Inductor fixes the memory layout of its `bmm` and then
copies (470 MB at the default workload); the lowering here leaves it open, so that the GEMM writes into its slice.

Reserved SMs: cuBLAS' Hopper kernels are persistent, they occupy every SM until they end. An exchange that is issued
while one runs starts only at its end, on the slower of the ranks. Over a link where exchanges take about as long as the
computation this costs more than the SMs: the GEMM is told to use fewer (`cublasSetSmCountTarget`), and the exchange
starts at once. The order of summation over K does not depend on it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Callable

import torch

from .. import compat
from ..operators import fake_of, operator
from . import loaded_library, sm_count


@operator
def chunk_bmm(left: torch.Tensor, right: torch.Tensor, reserved_sms: int, in_place: bool) -> torch.Tensor:
    """`torch.bmm` of [l,m,n] and [l,n,k]; `in_place` lets the compiler choose where the result lies."""
    return _leaving(reserved_sms, torch.bmm, left, right)


@fake_of(chunk_bmm)
def _(left, right, reserved_sms, in_place):
    return left.new_empty((left.shape[0], left.shape[1], right.shape[2]))


@operator
def chunk_baddbmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    """`torch.baddbmm` of [l,m,n] and [l,n,k]; `bias` broadcasts to [l,m,k]."""
    return _leaving(reserved_sms, torch.baddbmm, bias, left, right)


@fake_of(chunk_baddbmm)
def _(bias, left, right, reserved_sms):
    return left.new_empty((left.shape[0], left.shape[1], right.shape[2]))


def chunk_bmm_out(left, right, *, reserved_sms, out):
    """What generated code calls."""
    return _leaving(reserved_sms, torch.bmm, left, right, out=out)


@functools.lru_cache(maxsize=None)
def register_lowering() -> None:
    """Tell Inductor how to lower `chunk_bmm` (the other operator it calls as it is)."""
    from torch._inductor import ir, lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    choice = ExternKernelChoice(chunk_bmm_out, name="compile_overlap_chunk_bmm")

    @lowering.register_lowering(chunk_bmm, type_promotion_kind=None)
    def lower(left, right, reserved_sms, in_place):
        if compat.writes_cpp_wrapper():  # it can only call what has a C++ name
            return lowering.lowerings[torch.ops.aten.bmm.default](left, right)
        left, right = (ir.ExternKernel.realize_input(operand) for operand in (left, right))
        size = [left.get_size()[0], left.get_size()[1], right.get_size()[2]]
        kind = ir.FlexibleLayout if in_place else ir.FixedLayout
        layout = kind(left.get_device(), left.get_dtype(), size)
        return choice.bind((left, right), layout, reserved_sms=reserved_sms).output_node()


def _leaving(sms: int, gemm: Callable[..., torch.Tensor], *operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    if not sms or not operands[0].is_cuda or torch.version.cuda is None:
        return gemm(*operands, **out)
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    cublas, before = loaded_library("libcublas.so"), ctypes.c_int()
    cublas.cublasGetSmCountTarget(handle, ctypes.byref(before))
    cublas.cublasSetSmCountTarget(handle, max(1, sm_count(operands[0].device) - sms))
    try:
        return gemm(*operands, **out)
    finally:
        cublas.cublasSetSmCountTarget(handle, before)
