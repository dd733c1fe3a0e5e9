"""Triton kernels, one operator a file."""
