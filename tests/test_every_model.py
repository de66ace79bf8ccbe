"""Every registered workload, optimized, gives the model's own answer."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from random import Random

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

import models
import optimizer

pytestmark = pytest.mark.integration

# Difference over the output's largest value. A fold rounds each weight once, by up to 6e-8 of it,
# and a hundred of them in a row, whose errors add up like random ones, come to about 1e-6. Here
# they measure 2e-7 to 6e-6. A wrong epsilon is ten bounds off: see the last test. Where the kernels
# of a processor round the model itself as badly, its answer in float64 decides.
BOUND = 2e-5

FOLDS = {
    "resnet18": 20, "resnet50": 53, "mobilenet_v3_large": 46, "efficientnet_b0": 49,
    "densenet121": 59, "shufflenet_v2_x1_0": 56, "regnet_y_400mf": 53, "vgg11_bn": 8,
    "deeplabv3_mobilenet_v3_large": 53, "r3d_18": 20, "toy_model": 1, "tiny_convnet": 1,
}  # fmt: skip
OWN = tuple(name for each in ("seeds", "torchvision", "synthetic") for name in models.names(each))


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


def normwise(expected: torch.Tensor, actual: torch.Tensor) -> float:
    worst = (expected.double() - actual.double()).abs().max()
    return (worst / expected.double().abs().max()).item()


def errors(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> list[float]:
    return [normwise(*each) for each in zip(expected, actual, strict=True)]


def in_float64(name: str) -> list[torch.Tensor]:
    workload = models.load(name)
    inputs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, workload.example_inputs
    )
    with torch.no_grad():
        return pytree.tree_leaves(workload.module.double()(*inputs))


@pytest.mark.parametrize("name", OWN)
def test_every_level_gives_the_models_answer(name: str) -> None:
    workload, expected = answered(name)
    old, spec = pytree.tree_flatten(expected)
    folds = FOLDS.get(name, 0)
    if name.startswith("linear_bn_relu"):
        folds = int(name.rpartition("_")[2])
    for level, bound in enumerate((0.0, BOUND, BOUND)):
        fast = optimizer.optimize(workload.module, workload.example_inputs, level=level, check=None)
        with torch.no_grad():
            new, new_spec = pytree.tree_flatten(fast(*workload.example_inputs))
        assert isinstance(fast, optimizer.OptimizedModule), fast.report
        assert new_spec == spec
        assert [(t.shape, t.dtype) for t in new] == [(t.shape, t.dtype) for t in old]
        if not all(each <= bound for each in errors(old, new)):
            assert bound
            truth = in_float64(name)
            pairs = zip(errors(truth, new), errors(truth, old), strict=True)
            assert all(mine <= eagers for mine, eagers in pairs)
        if level < 2:
            assert fast.report.counts().get("fold_affine", 0) == level * folds
        else:
            assert fast.report.choices or fast.report.remarks


@pytest.mark.filterwarnings("ignore")  # of what the libraries and Dynamo use
@pytest.mark.parametrize("name", drawn())
def test_a_model_of_a_library_is_optimized_and_right(name: str) -> None:
    torch._dynamo.reset()
    workload = models.load(name)

    fast = optimizer.optimize(workload.module, workload.example_inputs, level=2, tune_seconds=0)

    remarks = fast.report.remarks
    assert isinstance(fast, optimizer.OptimizedModule | optimizer.GuardedModule), remarks
    optimizer.check(workload.module, fast, workload.example_inputs)


def test_every_torchvision_model_has_its_folds_counted() -> None:
    with_batchnorm = {
        name
        for name in models.names("torchvision")
        if any(isinstance(module, _BatchNorm) for module in models.load(name).module.modules())
    }

    assert with_batchnorm <= set(FOLDS)


def test_the_bound_is_far_below_what_a_wrong_epsilon_does() -> None:
    workload, expected = answered("resnet18")
    for module in workload.module.modules():
        if isinstance(module, _BatchNorm):
            module.eps *= 100

    with torch.no_grad():
        wrong = workload.module(*workload.example_inputs)
    answered.cache_clear()

    assert normwise(expected, wrong) > 10 * BOUND
