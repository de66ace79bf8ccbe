"""How many BatchNorms of well-known models fold, and that the answer stays to 1e-9 in float64."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import optimizer
from models import import_torchvision
from models._randomize import randomize
from optimizer.testing import assert_equivalent

with warnings.catch_warnings():
    # torch deprecates what this module of its own imports.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.fx.experimental.optimization import fuse

# Of how many BatchNorms how many fold, and how many torch's own `fuse` folds. In densenet121 a
# ReLU stands between the others and what reads them.
COUNTS = {
    "torchvision resnet50": (53, 53, 53),
    "torchvision r3d_18": (20, 20, 4),
    "torchvision maxvit_t": (34, 34, 23),
    "torchvision densenet121": (121, 59, 59),
    "timm efficientnet_b0": (49, 49, 0),
    "timm mobilenetv3_large_100": (46, 46, 0),
    "timm regnety_004": (53, 53, 0),
    "timm repvgg_a0": (61, 44, 0),
}
SHAPES = {"torchvision r3d_18": (1, 3, 4, 32, 32), "torchvision maxvit_t": (1, 3, 224, 224)}


def load(name: str, **settings: Any) -> nn.Module:
    library, _, model = name.partition(" ")
    if library == "timm":
        built: nn.Module = importlib.import_module("timm").create_model(model)
    else:
        built = import_torchvision().models.get_model(model, weights=None, **settings)
    randomize(built, torch.Generator().manual_seed(0))
    return built.double().eval()


@pytest.mark.parametrize("name", COUNTS)
def test_batchnorms_fold(name: str) -> None:
    model = load(name)
    x = torch.randn(SHAPES.get(name, (1, 3, 64, 64)), dtype=torch.float64)

    fast: Any = optimizer.optimize(model, x, check=None, level=1)

    total = sum(isinstance(module, _BatchNorm) for module in model.modules())
    folded = (total - left_in(each) for each in (fast, fuse(model)))
    assert (total, *folded) == COUNTS[name]
    assert_equivalent(model, fast, (x,))


def left_in(module: Any) -> int:
    layers = [module.get_submodule(n.target) for n in module.graph.find_nodes(op="call_module")]
    calls = module.graph.find_nodes(op="call_function", target=F.batch_norm)
    return sum(isinstance(each, _BatchNorm) for each in layers) + len(calls)


def test_frozen_batchnorms_fold() -> None:
    frozen = import_torchvision().ops.FrozenBatchNorm2d
    model = load("torchvision resnet18", norm_layer=frozen)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)

    fast = optimizer.optimize(model, x, check=None, level=1)

    assert fast.report.counts()["fold_affine"] == 2 * 20
    assert_equivalent(model, fast, (x,))
