"""The chunked comparison modes: ``with-sm`` (NCCL beside the GEMMs) and ``sm-free`` (copy engines)."""

import torch

from rankmixer.pipelines import sm_free, with_sm
from rankmixer.pipelines.driver import Pipeline

_TRANSPORTS = {"with-sm": with_sm.make_transport, "sm-free": sm_free.make_transport}


@torch.compiler.disable
def run_pipeline(mode, ffn, local, inputs, compiled):
    """Run a `PerTokenFFN` chunk by chunk. A graph break by design: the pipelines order streams at run time.

    Args:
        mode: "with-sm" or "sm-free".
        local: the layer's local computation, [N, L, D] and the parameters -> [L, N, D].
        inputs: [B, T, D].
        compiled: compile the local computation of each chunk, as the surrounding compiled block would.

    Returns:
        [B, T, D], differentiable with respect to ``inputs`` and the layer's parameters.
    """
    transport = _TRANSPORTS[mode](ffn.ep_group, inputs.device)
    pipeline = Pipeline(transport, local, ffn.ep_group_size, ffn.comm_scale, ffn.norm_x.eps, compiled)
    return pipeline(inputs, ffn.local_parameters())


def transport_in_use(mode, group):
    """The transport that ``mode`` used on ``group`` so far, "collective" or "copy-engine"; None for other modes."""
    if mode == "with-sm" and group is not None and group.size() > 1:
        return "collective"
    return sm_free.transport_in_use(group) if mode == "sm-free" else None
