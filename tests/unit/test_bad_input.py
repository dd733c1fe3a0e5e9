"""Whatever a call, a setting, a plan or a record is: it is taken, or a ValueError says which value is wrong."""

import copy
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import results_file
import torch
import torch.distributed as dist
from archive_double import ArchiveFFN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rankmixer import record, runtime
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_overlap
from compile_overlap import config, plan
from compile_overlap.layout import Layout, check_call
from compile_overlap.schedule import Plan

RESULTS = Path(__file__).resolve().parents[2] / "reports" / "results"
NAMES_VALUE = re.compile(r".+(=|:).+must be .+", re.DOTALL)
OF_A_FIXTURE = [HealthCheck.function_scoped_fixture]
PER_EXAMPLE = settings(deadline=None, max_examples=150, suppress_health_check=OF_A_FIXTURE)


def _refused(call):
    """Whether `call` is refused: with a ValueError that names the argument and what is allowed, nothing else."""
    try:
        call()
    except ValueError as error:
        assert NAMES_VALUE.fullmatch(str(error)), str(error)
        return True
    return False


# Calls: a tensor or a layer with one thing wrong. The reference, which would exchange, is never asked.

TAKEN = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = (*TAKEN, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64)


def _unasked(*_, **__):
    raise AssertionError("the reference was called")


@pytest.fixture
def ffn():
    ffn = ArchiveFFN(4, 16, 2)
    ffn.forward = _unasked
    return ffn


@PER_EXAMPLE
@given(data=st.data(), shape=st.lists(st.integers(0, 17), max_size=5), dtype=st.sampled_from(DTYPES))
def test_inputs(ffn, data, shape, dtype):
    inputs = torch.zeros(shape, dtype=dtype)
    if shape and data.draw(st.booleans()):
        inputs = inputs.permute(data.draw(st.permutations(range(len(shape)))))
    right = inputs.dim() == 3 and inputs.shape[0] > 0 and inputs.shape[1:] == (4, 16)
    taken = right and dtype in TAKEN
    assert _refused(lambda: check_call(ffn, inputs)) == (not taken)
    if not taken:
        assert _refused(lambda: compile_overlap.forward_ffn(ffn, inputs))


NO_TENSORS = [None, 3, "x", [[[0.0] * 16] * 4], torch.zeros(2, 4, 16).to_sparse(), torch.zeros(2, 4, 16, device="meta")]


@pytest.mark.parametrize("inputs", NO_TENSORS, ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_of_numbers(ffn, inputs):
    assert _refused(lambda: compile_overlap.forward_ffn(ffn, inputs))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
ATTRIBUTES = ("ep_group_size", "comm_scale", "w1", "b1", "wout", "bout", "norm_x", "norm_gate")


@PER_EXAMPLE
@given(name=st.sampled_from(ATTRIBUTES), value=ANYTHING)
def test_layers(name, value):
    ffn = ArchiveFFN(4, 16, 2)
    ffn.forward = _unasked
    ffn.__dict__[name] = value  # past the module's own check of parameters
    ffn._parameters.pop(name, None), ffn._modules.pop(name, None)
    counts = {"ep_group_size": (1,), "comm_scale": range(1, 10)}
    allowed = type(value) is int and value in counts.get(name, ())
    if not allowed:
        assert _refused(lambda: compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16)))


@PER_EXAMPLE
@given(name=st.sampled_from(("w1", "b1", "wout", "bout")), shape=st.lists(st.integers(0, 70), max_size=4),
       device=st.sampled_from(("cpu", "meta")))  # fmt: skip
def test_parameters(name, shape, device):
    ffn = ArchiveFFN(4, 16, 2)
    ffn.forward = _unasked
    right = list(getattr(ffn, name).shape) == shape and device == "cpu"
    setattr(ffn, name, torch.nn.Parameter(torch.zeros(shape, device=device)))
    assert right or _refused(lambda: compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16)))


@pytest.mark.parametrize("name", ATTRIBUTES[2:])
def test_a_layer_without_a_parameter(ffn, name):
    delattr(ffn, name)
    assert _refused(lambda: compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16)))


def test_a_norm_on_another_device(ffn):
    ffn.norm_x.to("meta")
    assert _refused(lambda: compile_overlap.forward_ffn(ffn, torch.zeros(2, 4, 16)))


@pytest.fixture
def world():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@PER_EXAMPLE
@given(group=st.sampled_from((None, "world", dist.GroupMember.NON_GROUP_MEMBER, "a name", 3)),
       size=st.sampled_from((2, 3, 4, 8)),
       index=st.one_of(st.integers(-1, 4), st.none(), st.text(max_size=2)))  # fmt: skip
def test_groups(world, group, size, index):
    ffn = ArchiveFFN(2 * size, 16, 2, group=world if group == "world" else group, size=size, index=index)
    ffn.forward = _unasked
    right = group in (None, "world") and (size, index) == (4, 1)
    assert _refused(lambda: check_call(ffn, torch.zeros(2, 2 * size, 16))) == (not right)
    if not right:
        assert _refused(lambda: compile_overlap.forward_ffn(ffn, torch.zeros(2, 2 * size, 16)))


# Settings: any text in any variable.

TEXT = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.from_regex(r"[-+0-9eE.,x ]{0,12}", fullmatch=True),
    st.sampled_from(["0", "1", "4", "2,14,16", "peers", "all", "60,24,560", "nan,1,1", "9" * 5000, "٣", "1,,2"]),
)


@PER_EXAMPLE
@given(name=st.sampled_from(config.VARIABLES), text=TEXT)
def test_settings(name, text):
    with mock.patch.dict(os.environ, {name: text}):
        if _refused(config.Settings.from_environment):
            with pytest.raises(ValueError, match=f"^{name} = "):
                config.Settings.from_environment()
        else:
            assert _refused(_planned) or Plan.parse(str(_planned())) == _planned()


def _planned():
    return plan.make_plan(Layout(2, 2, 64, 16, 32), 2, "cuda", True, config.Settings.from_environment(), None)


@PER_EXAMPLE
@given(text=TEXT)
def test_the_timeout_of_the_benchmark(text):
    with mock.patch.dict(os.environ, {runtime.TIMEOUT_VARIABLE: text}):
        if not _refused(runtime.group_timeout) and text:
            assert 1 <= runtime.group_timeout().total_seconds() <= 86400


# Plans: any text, and plans that were written by `str` with one character changed.


@PER_EXAMPLE
@given(text=st.text(max_size=30))
def test_plan_texts(text):
    assert _refused(lambda: Plan.parse(text))


WRITTEN = ["8,8 r4 a2 b1 s0", "4,12,12,4 r7 a2 b1 s16 peers own-first triton=forward,norm1024x8 off=reorder"]


@PER_EXAMPLE
@given(st.data(), st.sampled_from(WRITTEN), st.sampled_from(["", "0", "9" * 5000, ",", " ", "\n", "٣", "-"]))
def test_changed_plans(data, text, put):
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + put + text[place + 1 :]
    if not _refused(lambda: Plan.parse(changed)):
        parsed = Plan.parse(changed)
        assert Plan.parse(str(parsed)) == parsed and min(parsed.sizes) >= 1


# Records: those that are committed, with one value replaced or removed.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
KINDS = [
    "cpu-netns/backward.json", "h200x2-torch-2.11.0/default.json", "h200x2-torch-2.11.0/kernel-forward-bitwise.json",
    "simulated/calibration.json", "cpu-faults/faults.json", "cpu-faults/endurance.json",
]  # fmt: skip


@PER_EXAMPLE
@given(data=st.data(), name=st.sampled_from(KINDS))
def test_changed_records(data, name):
    content = copy.deepcopy(_record(name))
    place = content
    for _ in range(data.draw(st.integers(0, 4))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = [key for key in keys if isinstance(place[key], (dict, list)) and place[key]]
        if not inner:
            break
        place = place[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
    if data.draw(st.booleans()):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    try:
        assert record.validate(content) is content
    except ValueError as error:
        assert str(error)


def _record(name, known={}):
    if name not in known:
        known[name] = json.loads((RESULTS / name).read_text())
    return known[name]


@pytest.mark.parametrize("content", [None, [], "record", 3])
def test_what_is_no_record(content):
    with pytest.raises(ValueError, match="must be an object"):
        record.validate(content)


@PER_EXAMPLE
@given(content=st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
def test_lines_that_are_no_records(tmp_path, content):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(content + b"\n")
    with pytest.raises(ValueError, match="sweep.jsonl"):
        results_file.read(path)
