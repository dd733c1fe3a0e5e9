"""Overlap of GEMM with All-to-All for an expert-parallel FFN, as a compiler problem. See `forward_ffn`."""

from .api import forward_ffn, reset
from .explain import explain, plan_of
from .tune import Tuning, tune

__all__ = ["Tuning", "explain", "forward_ffn", "plan_of", "reset", "tune"]
