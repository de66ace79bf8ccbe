"""Every workload is complete, reproducible, and sensitive to what a rewrite could get wrong."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import models
from tests.repository import table

ROOT = Path(__file__).parent.parent
SEEDS, TORCHVISION, SYNTHETIC = map(models.names, ("seeds", "torchvision", "synthetic"))
# Quick to load, with every kind of tensor that is drawn: statistics, norms, tables, scales.
LIGHT = (*SEEDS, *SYNTHETIC, "shufflenet_v2_x1_0", "swin_v2_t")


def outputs(workload, inputs=None, state=None):
    """The output tensors of one call, with other inputs or tensors than the workload's own."""
    call = workload.example_inputs if inputs is None else inputs
    with torch.no_grad():
        result = torch.func.functional_call(workload.module, state or {}, call)
    return pytree.tree_leaves(result)


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The smallest relative change of any output."""
    pairs = zip(before, after, strict=True)
    return min(((new - old).norm() / old.norm()).item() for old, new in pairs)


def mapped(inputs: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    return tuple(change(each) if each.is_floating_point() else each for each in inputs)


def tensors(workload: models.Workload) -> Iterator[Tensor]:
    yield from workload.module.state_dict().values()
    yield from workload.example_inputs


def digest(names: tuple[str, ...]) -> str:
    """A hash of every bit of the weights and inputs of the named workloads."""
    state = hashlib.sha256()
    for name in names:
        for tensor in tensors(models.load(name)):
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


@pytest.mark.parametrize("name", [*SEEDS, *TORCHVISION, *SYNTHETIC])
def test_a_workload_is_random_and_depends_on_its_input_and_its_statistics(name: str) -> None:
    workload = models.load(name)
    answer, inputs = outputs(workload), workload.example_inputs
    state = workload.module.state_dict()
    lowered = {path: each.bfloat16() for path, each in state.items() if each.is_floating_point()}
    norms = [path for path, module in workload.module.named_modules()
             if isinstance(module, _BatchNorm)]  # fmt: skip

    assert not any(module.training for module in workload.module.modules())
    floating = [t for t in tensors(workload) if t.is_floating_point() and t.numel() > 1]
    assert all(tensor.std() > 0 for tensor in floating)
    assert all(output.isfinite().all() for output in answer)
    assert all(output.std() > 0.01 * output.abs().max() for output in answer)
    in_bfloat16 = outputs(workload, mapped(inputs, Tensor.bfloat16), lowered)
    assert all(output.isfinite().all() for output in in_bfloat16)
    assert difference(answer, outputs(workload, mapped(inputs, Tensor.neg))) > 0.01
    for path in norms[:1]:
        mean, variance = f"{path}.running_mean", f"{path}.running_var"
        others = {mean: state[mean] + 0.1, variance: state[variance] * 1.2}
        assert difference(answer, outputs(workload, state=others)) > 0.001


def test_the_bits_do_not_depend_on_the_callers_random_state_and_device_which_stay() -> None:
    found = set[str]()
    for device, seed in (("cpu", 1), ("meta", 2)):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with torch.device(device):
            found.add(digest(LIGHT))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert len(found) == 1


@pytest.mark.integration
def test_another_process_with_another_hash_seed_builds_the_same_bits() -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']({LIGHT!r}))"
    command, environment = [sys.executable, "-W", "error", "-c", code], {"PYTHONHASHSEED": "1"}
    found = subprocess.check_output(command, cwd=ROOT, env=os.environ | environment, text=True)
    assert found.strip() == digest(LIGHT)


def test_what_is_loaded_twice_shares_nothing_and_goes_where_it_is_asked_for() -> None:
    both = map(tensors, (models.load("tiny_convnet"), models.load("tiny_convnet")))
    assert all(one.data_ptr() != other.data_ptr() for one, other in zip(*both, strict=True))
    assert all(each.is_meta for each in tensors(models.load("tiny_convnet", device="meta")))


TO_INSTALL = r"pip install '\.\[{}\]'"
UNKNOWN, UNAVAILABLE = models.UnknownWorkloadError, models.UnavailableDeviceError


@table(
    "ask lacks error said",
    (lambda: models.load("resnet-18"), "", UNKNOWN, r"did you mean .*'resnet18'"),
    (lambda: models.load("toy_model", device="cuda:99"), "", UNAVAILABLE, "pass device='cpu'"),
    (lambda: models.load("resnet18"), "torchvision", ImportError, TO_INSTALL.format("models")),
    (lambda: models.load("repvgg_a0"), "timm", ImportError, TO_INSTALL.format("timm")),
    (lambda: models.load("vit_base"), "transformers", ImportError,
     TO_INSTALL.format("transformers") + " in the clone"),
)  # fmt: skip
def test_what_cannot_be_loaded_is_told_with_what_to_do(ask, lacks, error, said, monkeypatch):
    if lacks:
        monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(error, match=said):
        ask()
