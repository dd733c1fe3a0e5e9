"""What is measured and checked: one seeded block, its inputs, and calls of it in every mode."""

import torch

from rankmixer import variants
from rankmixer.block import RankMixerBlock
from rankmixer.compiling import compile_fresh


class Workload:
    """The block of one rank with its inputs and its upstream gradient.

    Args:
        options: the parsed command line (see `rankmixer.cli`).
        runtime: a `Runtime`.

    Attributes:
        inputs: [B, T, D] of the chosen dtype, drawn like the parameters from seed + rank.
        upstream: [B, T, D], the fixed gradient of the timed backward.
    """

    def __init__(self, options, runtime):
        self.options, self.runtime = options, runtime
        device, self.dtype = runtime.device, options.torch_dtype
        self.block = RankMixerBlock(
            options.tokens, options.dim, options.k, large_block=options.large_block, dtype=self.dtype, device=device,
            ep_group=runtime.group, gemm_backend=options.gemm_backend, fwd_mode=options.fwd_mode,
            bwd_mode=options.bwd_mode, comm_scale=options.comm_scale, compute_scale=options.compute_scale)
        generator = torch.Generator(device).manual_seed(options.seed + runtime.rank)
        self.block.reset_parameters(generator)
        shape = (options.batch_size, options.tokens, options.dim)
        self.inputs = self.draw(shape, generator)
        self.upstream = self.draw(shape, generator) if options.backward else None
        self._functions = {}

    def draw(self, shape, generator):
        """Standard normal values of the workload's dtype on its device."""
        return torch.randn(shape, generator=generator, device=self.runtime.device, dtype=self.dtype)

    def function(self, overlap, comp_only=False, rows=None):
        """The block in one mode or ``mode:variant``, ``x -> out``, compiled unless disabled.

        Each (overlap, rows, grad mode) compiles apart, statically; ``rows`` is the batch size, the full one by default.
        """
        variant = variants.parse(overlap)
        if variant.mode == "kernel":
            self.block.ffn.load_plugin()
        key = (overlap, comp_only, rows or self.options.batch_size, torch.is_grad_enabled())
        if key not in self._functions:
            block, mode = self.block, variant.mode

            def run_block(x):
                return block(x, overlap=mode, comp_only=comp_only)

            run = run_block if self.options.no_compile else compile_fresh(run_block, variant.inductor_config)
            self._functions[key] = variant.around(run)
        return self._functions[key]

    def run_forward(self, overlap, x, comp_only=False, grad=False):
        """One forward call on ``x`` [b, T, D] in the given grad mode; returns the output [b, T, D]."""
        with torch.set_grad_enabled(grad):
            return self.function(overlap, comp_only, x.shape[0])(x)

    def run_gradients(self, overlap, x, upstream):
        """Forward and backward; returns (output, {name: gradient}) with the active gradients only."""
        self.clear_gradients()
        leaf = x.detach().clone().requires_grad_()
        output = self.run_forward(overlap, leaf, grad=True)
        output.backward(upstream)
        named = [("inputs", leaf), *self.block.named_parameters()]
        gradients = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
        self.clear_gradients()
        return output.detach(), gradients

    def timed_call(self, overlap, comp_only=False):
        """The call to time: forward under no_grad, or forward and backward with ``--backward``."""
        if not self.options.backward:
            return lambda: self.run_forward(overlap, self.inputs, comp_only)
        self.inputs.requires_grad_()

        def forward_backward():
            output = self.run_forward(overlap, self.inputs, comp_only, grad=True)
            output.backward(self.upstream)
            return output

        return forward_backward

    def clear_gradients(self):
        self.block.zero_grad(set_to_none=True)
        self.inputs.grad = None
