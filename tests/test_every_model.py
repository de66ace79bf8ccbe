"""Every registered workload, optimized, gives the model's own answer."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from random import Random

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import models
import optimizer
from optimizer.core.node import module_of

pytestmark = pytest.mark.integration

# Difference over the output's largest value. A fold rounds each weight once, by up to 6e-8 of it,
# and a hundred of them in a row, whose errors add up like random ones, come to about 1e-6. Here
# they measure 2e-7 to 6e-6. A wrong epsilon is ten bounds off: see the last test. Where the kernels
# of a processor round the model itself as badly, its answer in float64 decides.
BOUND = 2e-5

FOLDS = {
    "resnet18": 20,
    "resnet50": 53,
    "mobilenet_v3_large": 46,
    "efficientnet_b0": 49,
    "densenet121": 59,
    "shufflenet_v2_x1_0": 56,
    "regnet_y_400mf": 53,
    "vgg11_bn": 8,
    "deeplabv3_mobilenet_v3_large": 53,
    "r3d_18": 20,
}
OWN = tuple(name for each in ("seeds", "torchvision", "synthetic") for name in models.names(each))
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def drawn() -> list[str]:
    """Four models of the libraries, others for each commit; all with WORKLOADS=all."""
    every = [*models.names("timm"), *models.names("transformers")]
    if os.environ.get("WORKLOADS") == "all":
        return every
    command = ["git", "rev-list", "--count", "HEAD"]
    count = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Random(count).sample(every, 4)


@lru_cache(maxsize=1)
def answered(name: str) -> tuple[models.Workload, object]:
    workload = models.load(name)
    with torch.no_grad():
        return workload, workload.module(*workload.example_inputs)


def optimized(name: str, level: int) -> tuple[optimizer.OptimizedModule, object]:
    workload, _ = answered(name)
    fast = optimizer.optimize(workload.module, workload.example_inputs, level=level, check=None)
    assert isinstance(fast, optimizer.OptimizedModule), fast.report
    with torch.no_grad():
        return fast, fast(*workload.example_inputs)


def normwise(expected: torch.Tensor, actual: torch.Tensor) -> float:
    worst = (expected.double() - actual.double()).abs().max()
    return (worst / expected.double().abs().max()).item()


def in_float64(name: str) -> list[torch.Tensor]:
    workload = models.load(name)
    inputs = pytree.tree_map_only(torch.Tensor, doubled, workload.example_inputs)
    with torch.no_grad():
        return pytree.tree_leaves(workload.module.double()(*inputs))


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def nearer(truth: list[torch.Tensor], old: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
    """Whether each new tensor is at most as far from the truth as the old one."""
    rows = zip(truth, old, new, strict=True)
    return all(normwise(true, other) <= normwise(true, one) for true, one, other in rows)


def foldable_pairs(fast: optimizer.OptimizedModule) -> list[str]:
    """The BatchNorms in eval mode whose input comes from a layer that nobody else reads."""
    found = []
    for node in fast.graph.nodes:
        if node.op != "call_module" or not isinstance(module_of(node), _BatchNorm):
            continue
        source = node.args[0]
        fed_by_layer = source.op == "call_module" and isinstance(module_of(source), LAYERS)
        if fed_by_layer and len(source.users) == 1:
            found.append(node.name)
    return found


@pytest.mark.parametrize("name", OWN)
def test_every_level_gives_the_models_answer(name: str) -> None:
    old, spec = pytree.tree_flatten(answered(name)[1])
    for level, bound in enumerate((0.0, BOUND, BOUND)):
        fast, result = optimized(name, level)
        new, new_spec = pytree.tree_flatten(result)
        assert new_spec == spec
        assert_near(name, old, new, bound)
        folds = fast.report.counts().get("fold_affine", 0)
        if level < 2:
            assert folds == level * FOLDS.get(name, folds_of_small(name))
        else:
            assert fast.report.choices or fast.report.remarks
        assert level != 1 or foldable_pairs(fast) == []


def assert_near(name: str, old: list[torch.Tensor], new: list[torch.Tensor], bound: float) -> None:
    assert [(t.shape, t.dtype) for t in new] == [(t.shape, t.dtype) for t in old]
    near = all(normwise(one, other) <= bound for one, other in zip(old, new, strict=True))
    assert near or (bound and nearer(in_float64(name), old, new))


@pytest.mark.filterwarnings("ignore")  # of what the libraries and Dynamo use
@pytest.mark.parametrize("name", drawn())
def test_a_model_of_a_library_is_optimized_and_right(name: str) -> None:
    torch._dynamo.reset()
    workload = models.load(name)

    fast = optimizer.optimize(workload.module, workload.example_inputs, level=2, tune_seconds=0)

    remarks = fast.report.remarks
    assert isinstance(fast, optimizer.OptimizedModule | optimizer.GuardedModule), remarks
    optimizer.check(workload.module, fast, workload.example_inputs)


def folds_of_small(name: str) -> int:
    stem, _, size = name.rpartition("_")
    if stem == "linear_bn_relu":
        return int(size)
    return int(name in ("toy_model", "tiny_convnet"))


def test_every_torchvision_model_has_its_folds_counted() -> None:
    with_batchnorm = {
        name
        for name in models.names("torchvision")
        if any(isinstance(module, _BatchNorm) for module in models.load(name).module.modules())
    }

    assert set(FOLDS) == with_batchnorm


def test_the_bound_is_far_below_what_a_wrong_epsilon_does() -> None:
    workload, expected = answered("resnet18")
    for module in workload.module.modules():
        if isinstance(module, _BatchNorm):
            module.eps *= 100

    with torch.no_grad():
        wrong = workload.module(*workload.example_inputs)
    answered.cache_clear()

    assert normwise(expected, wrong) > 10 * BOUND
