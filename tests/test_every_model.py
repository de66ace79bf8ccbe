"""Every registered workload, optimized, gives the model's own answer."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import models
import optimizer
from tests.repository import commit_number

pytestmark = pytest.mark.integration

FOLDS = {
    "resnet18": 20, "resnet50": 53, "mobilenet_v3_large": 46, "efficientnet_b0": 49,
    "densenet121": 59, "shufflenet_v2_x1_0": 56, "regnet_y_400mf": 53, "vgg11_bn": 8,
    "deeplabv3_mobilenet_v3_large": 53, "r3d_18": 20, "toy_model": 1, "tiny_convnet": 1,
    **{name: int(name.rpartition("_")[2]) for name in models.names() if "linear_bn_relu" in name},
}  # fmt: skip
OWN = tuple(name for each in ("seeds", "torchvision", "synthetic") for name in models.names(each))


def drawn() -> list[str]:
    """Four models of the libraries, others for each commit; all with WORKLOADS=all."""
    every = [*models.names("timm"), *models.names("transformers")]
    draws = Random(commit_number())
    return every if os.environ.get("WORKLOADS") == "all" else draws.sample(every, 4)


@pytest.mark.parametrize("name", OWN)
def test_every_level_gives_the_models_answer(name: str) -> None:
    workload = models.load(name)
    model, inputs = workload.module, workload.example_inputs
    assert name in FOLDS or not any(isinstance(each, _BatchNorm) for each in model.modules())
    for level in range(3):
        fast = optimizer.optimize(model, inputs, level=level, check=None)
        assert isinstance(fast, optimizer.OptimizedModule), fast.report
        optimizer.check(model, fast, inputs)
        if level == 0:
            with torch.no_grad():
                torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=0, atol=0)
        if level < 2:
            assert fast.report.counts().get("fold_affine", 0) == level * FOLDS.get(name, 0)
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


def test_a_wrong_epsilon_is_no_rounding() -> None:
    right, wrong = (models.load("resnet18") for _ in range(2))
    for module in wrong.module.modules():
        if isinstance(module, _BatchNorm):
            module.eps *= 100

    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(right.module, wrong.module, right.example_inputs)
