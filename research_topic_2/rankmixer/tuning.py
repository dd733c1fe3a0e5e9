"""``--tune``: the kernel plugin times its best plans on the workload's layer before anything is measured."""

import torch

from rankmixer import plugins


def add_tune_option(parser):
    parser.add_argument("--tune", action="store_true",
                        help="first let the kernel plugin time its best plans on this layer and keep the fastest; the "
                             "plan is taken by this run and by later ones (A2A_FFN_PLANS)")


def require_tunable(options, overlaps, world_size):
    """Raise ValueError where ``--tune`` has nothing to choose."""
    if options.tune and "kernel" not in overlaps:
        raise ValueError(f"tune=True: needs overlap kernel, not {', '.join(sorted(overlaps))}")
    if options.tune and (options.comp_only or world_size == 1):
        raise ValueError("tune=True: needs exchanges: at least 2 ranks, and no comp_only")
    if options.tune:
        plugins.load_tune()


def tune(workload):
    """Tune the plan of the workload's layer as its modes call it; what was found, for the record, or None.

    Prints what was found. Raises ValueError on every rank where the plugin has nothing to choose.
    """
    options, runtime = workload.options, workload.runtime
    if not options.tune:
        return None
    inputs = workload.inputs.detach().requires_grad_(options.backward)
    with torch.set_grad_enabled(options.backward):
        found = plugins.load_tune()(workload.block.ffn, inputs, compiled=not options.no_compile)
    runtime.print(found)
    seconds = {str(plan): seconds for plan, seconds in found.seconds.items()}
    return {"plan": str(found.plan), "seconds": seconds, "rounds": found.rounds}
