"""Finds the plugin behind ``--overlap kernel``.

``A2A_FFN_KERNEL_PLUGIN`` names an importable module or a ``.py`` file; unset, it is ``kernel_overlap_plugin``.
``overlap-src/`` is on the search path, and at its end the repository that this folder is in.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

PLUGIN_VARIABLE = "A2A_FFN_KERNEL_PLUGIN"
DEFAULT_PLUGIN = "kernel_overlap_plugin"
PLUGIN_FOLDER = Path(__file__).resolve().parent.parent / "overlap-src"
REPOSITORY = PLUGIN_FOLDER.parent.parent
_loaded = []  # the plugin's module, once there is one


def plugin_name():
    """The plugin that ``load_plugin`` would take."""
    return os.environ.get(PLUGIN_VARIABLE) or DEFAULT_PLUGIN


def load_plugin():
    """Import the plugin and return its ``forward_ffn(ffn, inputs, *, comp_only=False)``.

    A plugin that has ``check_settings()`` is asked whether it can work with what the environment says.

    Raises:
        ImportError: the module cannot be imported; the message names the variable, its value and the cause.
        ValueError: the module has no callable ``forward_ffn``, or its settings are unfit.
    """
    forward = _required("forward_ffn", "forward_ffn(ffn, inputs, *, comp_only)")
    check = _function("check_settings")
    if check:
        check()
    return forward


def load_tune():
    """As `load_plugin`, the plugin's ``tune(ffn, inputs, *, compiled)``, which not every plugin has."""
    return _required("tune", "tune(ffn, inputs, *, compiled), or run without --tune")


def load_plan_of():
    """As `load_plugin`, the plugin's ``plan_of(ffn, inputs, *, compiled)``: the plan that ran, as text or None.

    None where the plugin has no such function, as one that plans nothing.
    """
    return _function("plan_of")


def watched():
    """Around a run: ``watched()`` of a plugin that is in use, whose errors name the rank at fault, or nothing."""
    watch = getattr(_loaded[0], "watched", None) if _loaded else None
    return watch() if watch else contextlib.nullcontext()


def _required(name, signature):
    function = _function(name)
    if function is None:
        raise ValueError(f"{PLUGIN_VARIABLE}={plugin_name()!r}: the module must define {signature}")
    return function


def _function(name):
    plugin = plugin_name()
    if str(PLUGIN_FOLDER) not in sys.path:
        sys.path.insert(0, str(PLUGIN_FOLDER))
        sys.path.append(str(REPOSITORY))
    try:
        module = _load_file(Path(plugin)) if plugin.endswith(".py") else importlib.import_module(plugin)
    except Exception as cause:
        absent = isinstance(cause, ModuleNotFoundError)
        missing = f"; install {cause.name}, or put the folder that holds it on PYTHONPATH" if absent else ""
        raise ImportError(f"{PLUGIN_VARIABLE}={plugin!r} cannot be imported ({type(cause).__name__}: {cause}); allowed "
                          f"are an importable module or the path of a .py file{missing}") from cause
    _loaded[:] = [module]
    function = getattr(module, name, None)
    return function if callable(function) else None


def _load_file(path):
    """Import ``path`` once; later calls return the same module."""
    name = f"a2a_ffn_plugin_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
