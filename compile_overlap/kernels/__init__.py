"""Triton kernels, and what they and the operators ask of the device and its libraries."""

from __future__ import annotations

import ctypes
import functools

import torch


@functools.lru_cache(maxsize=None)
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor laid out row by row, beginning at a multiple of 16 bytes, so that several values can be read as one."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@functools.lru_cache(maxsize=None)
def loaded_library(name: str) -> ctypes.CDLL:
    """A CUDA library that torch has loaded into this process, by its file's name without version, `libcudart.so` say."""
    with open("/proc/self/maps") as maps:
        return ctypes.CDLL(min(line.split()[-1] for line in maps if f"/{name}" in line))
