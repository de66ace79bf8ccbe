"""A model in 16 bits stays in 16 bits: no kernel yields a wider float that eager's does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import models
import optimizer
from tests import level_2
from tests.internals import tensors_in

pytestmark = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
NAMES = ["simple_mlp", "simple_cnn", "resnet_block", "linear_bn_relu_100", "tiny_convnet"]


class Wide(TorchDispatchMode):
    """Counts kernels that yield another float than the model's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.found = dtype, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        floats = [each.dtype for each in tensors_in(result) if each.is_floating_point()]
        self.found.update(f"{func} {dtype}" for dtype in floats if dtype != self.dtype)
        return result


def wide(run: Callable[..., Any], inputs: Sequence[Any], dtype: torch.dtype) -> Counter[str]:
    with torch.no_grad(), Wide(dtype) as seen:
        run(*inputs)
    return seen.found


@pytest.fixture(params=NAMES)
def loaded(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    workload = models.load(request.param)
    return workload.module.to(dtype), tuple(each.to(dtype) for each in workload.example_inputs)


def test_of_rewrites(loaded: Any, dtype: torch.dtype) -> None:
    model, inputs = loaded
    fast = optimizer.optimize(model, inputs, check=None, level=1)

    assert wide(fast, inputs, dtype) <= wide(model, inputs, dtype)


def test_of_what_runs_on_a_gpu(
    loaded: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    level_2.fake_gpu(monkeypatch)
    level_2.racing(monkeypatch, level_2.last_wins)
    model, inputs = loaded
    fast = level_2.lowered(model, *inputs, check=None, cuda_graph=False)
    plan = level_2.plan_of(fast, *inputs)

    convolves = any(isinstance(each, nn.Conv2d) for each in model.modules())
    assert ("channels_last" in level_2.chosen(fast)) is convolves, fast.report
    assert wide(plan or partial(fast, *inputs), (), dtype) <= wide(model, inputs, dtype)


def test_an_upcast_is_seen(dtype: torch.dtype) -> None:
    seen = wide(lambda x: x.float().to(dtype), (torch.ones(3, dtype=dtype),), dtype)

    assert seen == {"aten._to_copy.default torch.float32": 1}
