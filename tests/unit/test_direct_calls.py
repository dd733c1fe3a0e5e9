"""From its second call on a compiled layer runs without Dynamo, unless something is on that Dynamo has to see."""

import pytest
import torch
from archive_double import ArchiveFFN
from gradients import outputs_and_gradients, unequal
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import compile_overlap
from compile_overlap import compiler


class _SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def layer(monkeypatch):
    """(ffn, input, calls that went through Dynamo so far)."""
    monkeypatch.setenv("A2A_FFN_RECIPE", "eager_exact")
    monkeypatch.setenv("A2A_FFN_BIAS", "add")
    monkeypatch.setenv("A2A_FFN_STRICT", "1")
    compile_overlap.reset()
    torch.manual_seed(0)
    ffn, x = ArchiveFFN(4, 16, 2), torch.randn(2, 4, 16)
    ffn(x, overlap="kernel")
    (compiled,) = compiler._LAYERS.values()
    through_dynamo, run = [], compiled._run
    compiled._run = lambda *tensors: through_dynamo.append(1) or run(*tensors)
    yield ffn, x, through_dynamo
    compile_overlap.reset()


def _agree(ffn, x):
    upstream = torch.randn_like(x)
    expected, wanted = outputs_and_gradients(ffn, ffn, x, upstream)
    got, grads = outputs_and_gradients(lambda t: ffn(t, overlap="kernel"), ffn, x, upstream)
    return torch.equal(got, expected) and unequal(wanted, grads) == []


def test_the_second_call_is_direct(layer):
    ffn, x, through_dynamo = layer
    for _ in range(2):
        y = torch.randn_like(x)
        assert torch.equal(ffn(y, overlap="kernel"), ffn(y))
    assert through_dynamo == []
    assert _agree(ffn, x)  # another configuration, with an input that requires a gradient
    assert _agree(ffn, x + 1)


def test_one_norm_on_both_sides(layer, monkeypatch):
    ffn, x, _ = layer
    monkeypatch.setenv("A2A_FFN_STRICT", "0")  # newer versions of Dynamo refuse it, and the reference answers
    ffn.norm_gate = ffn.norm_x
    assert _agree(ffn, x) and _agree(ffn, x + 1)


def test_a_changed_global_state_goes_through_dynamo(layer):
    ffn, x, through_dynamo = layer
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(ffn(x, overlap="kernel"), ffn(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert through_dynamo == [1]


@pytest.mark.parametrize("trains", [True, False])
def test_beside_a_counter_of_operations_it_runs_as_before(layer, trains):
    ffn, x, through_dynamo = layer
    with torch.set_grad_enabled(trains):
        ffn(x, overlap="kernel")
        with FlopCounterMode(display=False) as counter:
            counted = ffn(x, overlap="kernel")
    assert torch.equal(counted, ffn(x)) and counter.get_total_flops() and through_dynamo == []


def test_a_mode_that_sees_functions_goes_through_dynamo(layer):
    ffn, x, through_dynamo = layer
    with _SeesFunctions():
        ffn(x, overlap="kernel")
    assert through_dynamo == [1]
