"""A Linear and the ReLU after it become one module, in every spelling, or stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import module_of
from optimizer.passes.fuse import LinearReLU
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "fuse_linear_relu"
optimized = partial(optimized_by, NAME)


class Layers(Forward):
    """Runs a forward of a case over two layers and two parameters of its own."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.linear, self.relu, self.inplace = nn.Linear(3, 4), nn.ReLU(), nn.ReLU(inplace=True)
        self.w, self.b = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(4))


SPELLINGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "modules": lambda m, x: m.relu(m.linear(x)),
    "an in-place module": lambda m, x: m.inplace(m.linear(x)),
    "keyword calls": lambda m, x: m.relu(input=m.linear(input=x)),
    "F.relu": lambda m, x: F.relu(m.linear(x)),
    "F.relu in place": lambda m, x: F.relu(m.linear(x), inplace=True),
    "F.relu with keywords": lambda m, x: F.relu(inplace=False, input=m.linear(x)),
    "F.relu_": lambda m, x: F.relu_(m.linear(x)),
    "torch.relu": lambda m, x: torch.relu(m.linear(x)),
    "torch.relu with a keyword": lambda m, x: torch.relu(input=m.linear(x)),
    "torch.relu_": lambda m, x: torch.relu_(m.linear(x)),
    "a method": lambda m, x: m.linear(x).relu(),
    "an in-place method": lambda m, x: m.linear(x).relu_(),
    "F.linear": lambda m, x: F.linear(x, m.w, m.b).relu(),
    "F.linear without bias": lambda m, x: F.linear(x, m.w).relu(),
    "F.linear with keywords": lambda m, x: F.relu(F.linear(input=x, bias=m.b, weight=m.w)),
}


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
@pytest.mark.parametrize("case", SPELLINGS)
def test_fuses_every_spelling_at_every_rank(case: str, shape: tuple[int, ...]) -> None:
    model = randomize(Layers(SPELLINGS[case]).double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [LinearReLU]
    assert_equivalent(model, fast, inputs, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keeps_the_bits_in_every_dtype(dtype: torch.dtype) -> None:
    model = randomize(Layers(SPELLINGS["modules"]).eval()).to(dtype)
    x = torch.randn(5, 3, dtype=dtype)

    fast = optimized(model, x)

    assert callees(fast) == [LinearReLU]
    assert_equivalent(model, fast, (x,), exact=True)


def test_needs_no_example_inputs() -> None:
    model = randomize(Layers(SPELLINGS["modules"]).double().eval())

    fast = optimized(model)

    assert callees(fast) == [LinearReLU]
    assert_equivalent(model, fast, inputs_like([(5, 3)], "random", 0), exact=True)


def test_shares_the_weight_of_the_layer() -> None:
    model = Layers(SPELLINGS["modules"]).eval()

    fast = optimized(model, torch.randn(5, 3))

    fused = module_of(next(node for node in fast.graph.nodes if node.op == "call_module"))
    assert address(fused.weight) == address(model.linear.weight)
    assert address(fused.bias) == address(model.linear.bias)


def test_a_layer_called_twice_is_fused_at_each_call() -> None:
    model = randomize(
        Layers(lambda m, x: (m.linear(x).relu(), m.relu(m.linear(-x)))).double().eval()
    )
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.counts() == {NAME: 2}
    assert nn.Linear not in callees(fast)
    assert_equivalent(model, fast, inputs, exact=True)


def test_propagates_gradients_as_the_two_layers_do() -> None:
    model = randomize(Layers(SPELLINGS["modules"]).double().eval())
    x = torch.randn(5, 3, dtype=torch.float64)
    fast = deepcopy(optimized(model, x))

    model(x).sum().backward()
    fast(x).sum().backward()

    fused = module_of(next(node for node in fast.graph.nodes if node.op == "call_module"))
    assert torch.equal(fused.weight.grad, model.linear.weight.grad)


def test_repeats_the_fusion_after_a_batchnorm_was_folded() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.125), nn.ReLU())
    randomize(model.double().eval())
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimizer.optimize(model, inputs, check=None, level=1)

    assert callees(fast)[-1:] == [LinearReLU]
    assert nn.BatchNorm1d not in callees(fast)
    assert_equivalent(model, fast, inputs)


def test_the_fused_module_is_not_taken_for_a_linear() -> None:
    model = randomize(Layers(lambda m, x: m.linear(x).relu().relu()).double().eval())
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [LinearReLU, F.relu]
    assert_equivalent(model, fast, inputs, exact=True)


READ_ELSEWHERE = "the layer's output is read elsewhere"
REFUSALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a second reader": lambda m, x: (y := m.linear(x), F.relu(y)),
    "a residual": lambda m, x: (y := m.linear(x)) - m.relu(y),
    "a reader of what an in-place relu left": lambda m, x: (y := m.linear(x), m.inplace(y))[0] + y,
    "a view of the output": lambda m, x: (y := m.linear(x), z := y.t(), m.relu(y))[1] + z,
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    model = randomize(Layers(REFUSALS[case]).double().eval())
    inputs = inputs_like([(4, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, READ_ELSEWHERE)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        return super().forward(input) * 2


def hooked() -> nn.Module:
    linear = nn.Linear(3, 4)
    linear.register_forward_hook(lambda module, given, result: result - 1)
    return linear


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def parametrized() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(nn.Linear(3, 4), "weight", Negated())


def overridden() -> nn.Module:
    linear = nn.Linear(3, 4)
    linear.forward = lambda x: F.linear(x, linear.weight) - 1  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize(
    "build",
    [
        lambda: Doubled(3, 4),
        hooked,
        overridden,
        parametrized,
    ],
)
def test_a_layer_that_is_no_plain_linear_is_left_alone(build: Callable[[], nn.Module]) -> None:
    model = randomize(nn.Sequential(build(), nn.ReLU()).double().eval())
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert LinearReLU not in callees(fast)
    assert_equivalent(model, fast, inputs, exact=True)


def test_refuses_a_layer_with_a_plain_tensor() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).double().eval()
    weight = model[0].weight.detach().clone()
    del model[0].weight
    model[0].weight = weight
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, "the layer has tensors that no cast of it reaches")
