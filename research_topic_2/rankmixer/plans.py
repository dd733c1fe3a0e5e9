"""What the kernel plugin planned for what was measured, asked of the plugin itself."""

import torch

from rankmixer import plugins, variants


def plan_of(workload, name):
    """The plan with which the plugin ran a mode or variant of the workload's layer; None where it names none.

    Other modes than kernel have no plan. Asked under the variant's settings, after it has run; all ranks call it alike.
    """
    options, variant = workload.options, variants.parse(name)
    function = plugins.load_plan_of() if variant.mode == "kernel" and not options.comp_only else None
    if function is None:
        return None
    inputs = workload.inputs.detach().requires_grad_(options.backward)
    with variant.applied(), torch.set_grad_enabled(options.backward):
        return function(workload.block.ffn, inputs, compiled=not options.no_compile)
