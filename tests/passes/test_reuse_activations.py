"""An activation writes over its input, in every spelling, or leaves alone what others need."""

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
from optimizer.testing import Optimize, assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, assert_left_alone, optimized_by

NAME = "reuse_activations"
optimized = partial(optimized_by, NAME)


class Layers(Forward):
    """Runs a forward of a case over a few layers, and an activation of its own."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Any], activation: nn.Module | None = None
    ) -> None:
        super().__init__(forward)
        self.linear, self.conv, self.norm = nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.activation = activation


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.25, 0.5),
    "LeakyReLU": lambda: nn.LeakyReLU(0.25),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "GELU": nn.GELU,
    "GELU by tanh": lambda: nn.GELU("tanh"),
}
FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu": lambda m, x: torch.relu(m.linear(x)),
    "relu, a method": lambda m, x: m.linear(x).relu(),
    "relu6": lambda m, x: F.relu6(m.linear(x)),
    "hardtanh": lambda m, x: F.hardtanh(m.linear(x), -0.5, max_val=0.25),
    "leaky_relu": lambda m, x: F.leaky_relu(m.linear(x), negative_slope=0.25),
    "leaky_relu without names": lambda m, x: F.leaky_relu(m.linear(x), 0.25, False),
    "silu": lambda m, x: F.silu(m.linear(x)),
    "mish": lambda m, x: F.mish(m.linear(x), inplace=False),
    "hardswish": lambda m, x: F.hardswish(m.linear(x)),
    "hardsigmoid": lambda m, x: F.hardsigmoid(m.linear(x)),
    "gelu": lambda m, x: F.gelu(m.linear(x)),
    "gelu by tanh": lambda m, x: F.gelu(m.linear(x), approximate="tanh"),
}


def holds_its_input(fast: Any, x: Tensor) -> bool:
    """Whether one call allocates no more than one tensor of the size of its output."""
    with torch.no_grad():
        measured = optimizer.measure(fast, x, repeats=1, warmup=1)
        return measured.peak_memory <= fast(x).untyped_storage().nbytes()


# Without example inputs nobody knows whether the result of a leaky_relu is written later.
@pytest.mark.parametrize(
    ("case", "examples"),
    [(c, known) for c in ACTIVATIONS for known in (True, False) if known or c != "LeakyReLU"],
)
def test_every_module_writes_over_its_input(case: str, examples: bool) -> None:
    model = randomize(Layers(lambda m, x: m.activation(m.linear(x)), ACTIVATIONS[case]()).eval())
    x = torch.randn(64, 3, 4)

    fast = optimized(model, *((x,) if examples else ()))

    assert fast.report.counts() == {NAME: 1}
    assert holds_its_input(fast, x)
    assert not getattr(model.activation, "inplace", False)
    assert_equivalent(model, fast, (x,), exact=True)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_every_function_writes_over_its_input(case: str) -> None:
    model = randomize(Layers(FUNCTIONS[case]).eval())
    x = torch.randn(64, 3, 4)

    fast = optimized(model, x)

    assert fast.report.counts() == {NAME: 1}
    assert holds_its_input(fast, x)
    assert_equivalent(model, fast, (x,), exact=True)
    assert_equivalent(model, fast, (torch.randn(2, 4),), exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_keeps_the_bits_in_every_dtype(case: str, dtype: torch.dtype) -> None:
    model = randomize(Layers(FUNCTIONS[case]).eval())
    fast = optimized(model, torch.randn(3, 4)).to(dtype)

    assert_equivalent(model.to(dtype), fast, (torch.randn(3, 4, dtype=dtype),), exact=True)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_propagates_the_same_gradients(case: str) -> None:
    model = randomize(Layers(FUNCTIONS[case]).double().eval())
    x = torch.randn(3, 4, dtype=torch.float64)
    fast = deepcopy(optimized(model, x))

    model(x).sum().backward()
    fast(x).sum().backward()

    assert torch.equal(fast.linear.weight.grad, model.linear.weight.grad)


def test_an_activation_called_twice_is_replaced_where_it_may_be() -> None:
    model = Layers(lambda m, x: m.activation(m.linear(m.activation(x))), nn.SiLU())
    randomize(model.double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs, exact=True)


ALREADY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a module": lambda m, x: m.activation(m.linear(x)),
    "a function": lambda m, x: F.silu(m.linear(x), True),
    "a method": lambda m, x: m.linear(x).relu_(),
}


@pytest.mark.parametrize("case", ALREADY)
def test_what_is_in_place_is_no_news(case: str) -> None:
    model = randomize(Layers(ALREADY[case], nn.SiLU(inplace=True)).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs)


NEEDED = "its input is needed elsewhere"
REFUSALS: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input of the model": lambda m, x: F.silu(x),
    "a parameter": lambda m, x: F.silu(m.weight) + x,
    "a view of an input": lambda m, x: F.silu(x.t()),
    "what may be a view": lambda m, x: F.silu(m.linear(x).contiguous()),
    "what may be the input": lambda m, x: F.silu(F.dropout(x, 0.5, False)),
    "a second reader": lambda m, x: (y := m.linear(x), F.silu(y)),
    "a residual": lambda m, x: (y := m.linear(x)) + F.silu(y),
    "a view that is read later": lambda m, x: (y := m.linear(x), z := y.t(), F.silu(y))[1] + z,
    "a result given by the caller": lambda m, x: F.silu(torch.add(x, 1.0, out=x.clone())),
    "what a backward pass needs": lambda m, x: F.silu(torch.sigmoid(x)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    model = randomize(Layers(REFUSALS[case]).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, NEEDED)


def written_later(m: Any, x: Tensor) -> Tensor:
    result = F.leaky_relu(m.linear(x), 0.5)
    result[result > 0] = 0.0
    return result


SIGNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a module of a negative slope": lambda m, x: m.activation(m.linear(x)),
    "a function": lambda m, x: F.leaky_relu(m.linear(x), -0.5),
    "by name": lambda m, x: F.leaky_relu(m.linear(x), negative_slope=-0.5),
    "a result that is written later": written_later,
    "computed": lambda m, x: F.leaky_relu(m.linear(x), 1 - x.shape[0]),
}


@pytest.mark.parametrize("case", SIGNS)
def test_refuses_what_loses_the_signs(case: str) -> None:
    model = randomize(Layers(SIGNS[case], nn.LeakyReLU(-0.5)).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, "a gradient needs the signs, which would not be kept")
    fast(*inputs).sum().backward()  # raised an error


def test_a_hooked_activation_is_left_alone() -> None:
    activation = nn.SiLU()
    activation.register_forward_hook(lambda module, given, result: result + given[0])
    model = randomize(nn.Sequential(nn.Linear(4, 4), activation).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.fired == ()
    assert_equivalent(model, fast, inputs, exact=True)


def test_a_module_of_a_module_stays_for_its_other_calls() -> None:
    inner = nn.Sequential(nn.LeakyReLU(0.5), nn.Hardtanh())
    model = Forward(lambda m, x: (first := m.inner(x + 1), m.inner(first)), inner=inner).eval()
    x = torch.linspace(-4, 4, 6, dtype=torch.float64)

    assert_equivalent(model, Optimize(only=("reuse_activations",))(model, (x,)), (x,))
