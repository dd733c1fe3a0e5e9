"""A compiled layer's equations, run eagerly: for tests of what does not depend on the compiler."""

from compile_overlap import compiler
from compile_overlap.layer import overlapped_ffn


class Uncompiled(compiler.CompiledLayer):
    def __init__(self, name, static):
        self.static = static

    def prepare(self, *tensors):
        return None

    def __call__(self, *tensors):
        return overlapped_ffn(*tensors, **self.static)
