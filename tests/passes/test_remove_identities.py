"""Identity, Dropout and StochasticDepth vanish in inference, in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models._torchvision_import import import_torchvision
from optimizer.core.guards import expect_tensor
from optimizer.testing import assert_equivalent, inputs_like
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "remove_identities"
optimized = partial(optimized_by, NAME)


class Holder(Forward):
    """Runs a forward of a case over one module."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Any], layer: nn.Module | None = None
    ) -> None:
        super().__init__(forward)
        self.layer = layer


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Identity": (nn.Identity, (2, 3)),
    "Identity that takes anything": (lambda: nn.Identity(54, unused=1), (2, 3)),
    "Dropout": (nn.Dropout, (2, 3)),
    "Dropout in place": (lambda: nn.Dropout(0.3, inplace=True), (2, 3)),
    "Dropout1d": (nn.Dropout1d, (2, 3, 4)),
    "Dropout2d": (nn.Dropout2d, (2, 3, 4, 4)),
    "Dropout3d": (nn.Dropout3d, (2, 3, 4, 4, 4)),
    "AlphaDropout": (nn.AlphaDropout, (2, 3)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (2, 3, 4)),
}
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "called": lambda m, x: m.layer(x).exp(),
    "called with a keyword": lambda m, x: m.layer(input=x).exp(),
    "last": lambda m, x: m.layer(x.exp()),
}


@pytest.mark.parametrize("examples", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", MODULES)
def test_removes_every_module(case: str, call: str, examples: bool) -> None:
    build, shape = MODULES[case]
    model = Holder(CALLS[call], build()).eval()
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *(inputs if examples else ()))

    assert [node.target for node in fast.graph.nodes if node.op[:4] == "call"] == ["exp"]
    assert_equivalent(model, fast, inputs, exact=True)


FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "F.dropout": (lambda m, x: F.dropout(x, 0.5, False), (2, 3)),
    "F.dropout in the module's mode": (lambda m, x: F.dropout(x, training=m.training), (2, 3)),
    "F.dropout with keywords": (lambda m, x: F.dropout(training=False, input=x, p=0.5), (2, 3)),
    "F.dropout in place": (lambda m, x: F.dropout(x, 0.5, False, True), (2, 3)),
    "F.dropout1d": (lambda m, x: F.dropout1d(x, training=False), (2, 3, 4)),
    "F.dropout2d": (lambda m, x: F.dropout2d(x, training=False), (2, 3, 4, 4)),
    "F.dropout3d": (lambda m, x: F.dropout3d(x, training=False), (2, 3, 4, 4, 4)),
    "F.alpha_dropout": (lambda m, x: F.alpha_dropout(x), (2, 3)),
    "torch.dropout": (lambda m, x: torch.dropout(x, 0.5, m.training), (2, 3)),
    "torch.dropout with keywords": (lambda m, x: torch.dropout(x, p=0.5, train=False), (2, 3)),
    "torch.alpha_dropout": (lambda m, x: torch.alpha_dropout(x, 0.5, False), (2, 3)),
    "torch.feature_alpha_dropout": (
        lambda m, x: torch.feature_alpha_dropout(x, 0.5, False),
        (2, 3, 4),
    ),
    "F.feature_alpha_dropout": (lambda m, x: F.feature_alpha_dropout(x, 0.5, False), (2, 3, 4)),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_removes_every_function(case: str) -> None:
    function, shape = FUNCTIONS[case]
    model = Holder(function).eval()
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == []
    assert_equivalent(model, fast, inputs, exact=True)


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_removes_stochastic_depth(mode: str) -> None:
    ops = import_torchvision().ops

    def both(module: Any, x: Tensor) -> Tensor:
        return ops.stochastic_depth(module.layer(x), 0.5, mode, training=module.training)

    model = Holder(both, ops.StochasticDepth(0.5, mode)).eval()
    inputs = inputs_like([(2, 3)], "random", 0)

    fast = optimized(model, *inputs)

    # For torchvision's code asks for a type.
    assert [node.target for node in fast.graph.nodes][1:-1] == [expect_tensor]
    assert_equivalent(model, fast, inputs, exact=True)


def test_stochastic_depth_in_training_mode_stays() -> None:
    model = nn.Sequential(import_torchvision().ops.StochasticDepth(0.5, "row"), nn.ReLU()).eval()
    model[0].train()
    inputs = inputs_like([(16, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.fired == ()
    assert_equivalent(model, fast, inputs, exact=True)


def test_a_run_of_many_vanishes() -> None:
    layers = [build() for _ in range(5) for build in (nn.Identity, nn.Dropout, nn.AlphaDropout)]
    model = nn.Sequential(*layers).eval()
    inputs = inputs_like([(2, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == []
    assert_equivalent(model, fast, inputs, exact=True)


def test_the_result_is_the_input_itself_also_for_a_writer() -> None:
    model = Holder(lambda m, x: m.layer(x).mul_(2.0) + x, nn.Dropout()).eval()
    inputs = inputs_like([(2, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs, exact=True)


TRAINING = "it is in training mode and drops values"


REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], nn.Module | None, str]] = {
    "Dropout in training mode": (CALLS["called"], nn.Dropout(), TRAINING),
    "Dropout2d in training mode": (CALLS["called"], nn.Dropout2d(), TRAINING),
    "F.dropout with its default": (lambda m, x: F.dropout(x), None, TRAINING),
    "F.dropout in training": (lambda m, x: F.dropout(x, 0.5, True), None, TRAINING),
    "torch.dropout in training": (lambda m, x: torch.dropout(x, 0.5, True), None, TRAINING),
    "a mode that is computed": (lambda m, x: F.dropout(x, 0.5, x.dim() == 9), None, TRAINING),
    "a constant": (lambda m, x: x * m.layer(2.0), nn.Identity(), "its input is a constant"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, layer, reason = REFUSALS[case]
    model = Holder(forward, layer).eval()
    if layer is not None:
        layer.train()
    inputs = inputs_like([(2, 3, 4, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, reason)


class Shifted(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Identity has it
        return input + 1


def test_an_identity_that_is_none_is_left_alone() -> None:
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, given, result: result * 3)
    model = nn.Sequential(Shifted(), hooked).eval()
    inputs = inputs_like([(2, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.fired == ()
    assert_equivalent(model, fast, inputs, exact=True)


def test_training_dropout_draws_the_same_random_numbers() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)).eval()
    model[0].train()
    x = torch.randn(64, 3)
    fast = optimized(model, x)

    torch.manual_seed(7)
    expected = model(x)
    torch.manual_seed(7)

    assert torch.equal(fast(x), expected)
