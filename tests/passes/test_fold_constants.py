"""What depends on no input is computed once, unless a call could tell."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import optimizer
from models._torchvision_import import import_torchvision
from optimizer.testing import assert_equivalent, inputs_like
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "fold_constants"
optimized = partial(optimized_by, NAME)
SHAPE = (2, 3)


class Holder(Forward):
    """Runs a forward of a case over parameters, buffers and layers of every kind."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, generator=draw).double())
        self.matrix = nn.Parameter(torch.randn(3, 3, generator=draw).double())
        self.register_buffer("table", torch.randn(5, 3, generator=draw).double())
        self.register_buffer("index", torch.tensor([3, 0, 3]))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("large", torch.ones(600).double())
        self.linear = nn.Linear(3, 3).double()
        self.norm = nn.BatchNorm1d(3).double()


def model_of(forward: Callable[[Any, Tensor], Any]) -> Holder:
    return Holder(forward).eval()


def given() -> tuple[Tensor, ...]:
    return inputs_like([SHAPE], "random", 0)


FOLDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a function of a parameter": lambda m, x: x.exp() + torch.sigmoid(m.weight),
    "a method of a buffer": lambda m, x: x.exp() + m.table[0].tanh(),
    "an operator with a literal": lambda m, x: x.exp() + 16 * m.weight,
    "a power that a literal is the base of": lambda m, x: x.exp() + 2.0**m.weight,
    "a row that an index picks": lambda m, x: x.exp() + m.table[m.index].sum(0),
    "a call with keywords": lambda m, x: x.exp() + torch.sum(input=m.matrix, dim=0),
    "a layer": lambda m, x: x.exp() + m.linear(m.weight),
    "a megabyte": lambda m, x: x.exp() + m.weight[:1].repeat(1 << 17, 1, 1),
    "layers, views and all": lambda m, x: x.exp() + m.linear(m.table).t().unsqueeze(0)[0, :, 1],
    "a layer in eval mode": lambda m, x: x.exp() + m.norm(m.table)[2],
    "a part of a tuple": lambda m, x: x.exp() + (m.linear(m.table).relu() + 1).chunk(5)[2] * 2,
    "a mask": lambda m, x: torch.where(m.weight > 0, x.exp(), 0.0),
    "an integer": lambda m, x: x.exp()[:, (m.index - 1) % 3],
    "two parameters": lambda m, x: x.exp() + m.matrix @ m.weight,
    "one that was detached": lambda m, x: x.exp() + m.weight.detach().exp(),
    "a large one made of larger ones": lambda m, x: x.exp() + torch.outer(m.large, m.large).mean(),
}


@pytest.mark.parametrize("case", FOLDED)
def test_folds(case: str) -> None:
    model = model_of(FOLDED[case])

    fast = optimized(model, *given())

    assert len([each for each in callees(fast) if each != "exp"]) == 1
    assert fast.report.counts()[NAME] >= 1
    assert_equivalent(model, fast, given(), exact=True)
    assert_equivalent(model, fast, inputs_like([(7, 3)], "random", 1), exact=True)


def test_a_subgraph_is_folded_from_its_end() -> None:
    model = model_of(lambda m, x: x + m.linear(m.table).relu().mean(0) * 2)

    fast = optimized(model, *given())

    assert fast.report.counts() == {NAME: 1}
    assert [node.op for node in fast.graph.nodes] == [
        "placeholder", "get_attr", "call_function", "output",
    ]  # fmt: skip
    assert [tuple(buffer.shape) for buffer in fast.buffers()] == [(3,)]
    assert list(fast.parameters()) == []


def test_a_value_with_several_readers_is_folded_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(m.weight)
        return x * gate + gate * 2 - x / gate

    model = model_of(forward)

    fast = optimized(model, *given())

    assert fast.report.counts() == {NAME: 2}
    assert len(callees(fast)) == 4
    assert_equivalent(model, fast, given(), exact=True)


# Nodes that go, and Linears among them. The rest of torchvision's models have no constants.
NODES = {"swin_t": (24, 0), "swin_v2_t": (84, 24)}


@pytest.mark.parametrize("name", NODES)
def test_the_position_biases_of_swin_are_folded(name: str) -> None:
    work = models.load(name)

    before = optimizer.optimize(
        work.module, work.example_inputs, disable=[NAME], check=None, level=1
    )
    fast = optimizer.optimize(work.module, work.example_inputs, level=0)

    assert fast.report.counts()[NAME] == 12
    assert fast.report.remarks == ()
    assert (size(before) - size(fast), linears(before) - linears(fast)) == NODES[name]


def test_the_position_biases_of_maxvit_are_folded() -> None:
    model = import_torchvision().models.maxvit_t().eval()
    x = torch.randn(1, 3, 224, 224)
    before = optimizer.capture(model, x)

    fast = optimized(model, x)

    assert fast.report.counts() == {NAME: 22}
    assert len(callees(before)) - len(callees(fast)) == 6 * 22


def size(fast: Any) -> int:
    return len(fast.graph.nodes)


def linears(fast: Any) -> int:
    return sum(isinstance(fast.get_submodule(node.target), nn.Linear) for node in modules(fast))


def modules(fast: Any) -> list[Any]:
    return [node for node in fast.graph.nodes if node.op == "call_module"]


WRITTEN = "the forward writes it, or what it is made of"
RETURNED = "it is returned, and so has to be new in each call"
LARGER = "it is larger than what it is made of"
UNMOVED = "it would not be cast or moved with the model"


def counts(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1.0)
    return x + m.steps * 2


def counts_through_a_view(m: Any, x: Tensor) -> Tensor:
    m.steps[0] += 1.0
    return x + m.steps.exp()


def writes_the_result(m: Any, x: Tensor) -> Tensor:
    y = m.weight * 2
    y.add_(x[0])
    return x * y


def writes_if_it_is_no_copy(m: Any, x: Tensor) -> Tensor:
    y = (m.weight * 2).to(x.dtype)
    y.add_(x[0])
    return x * y


def writes_a_view_of_a_copy(m: Any, x: Tensor) -> Tensor:
    y = (m.weight * 2).type_as(x.float())
    y[:2].add_(1.0)
    return x * y


def writes_a_layer(m: Any, x: Tensor) -> Tensor:
    m.norm.running_mean.add_(1.0)
    return x + m.norm(m.table)[0]


REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a counter": (counts, WRITTEN),
    "a counter behind a view": (counts_through_a_view, WRITTEN),
    "a layer that is written": (writes_a_layer, WRITTEN),
    "a result that is written": (writes_the_result, WRITTEN),
    "a result that some calls write": (writes_if_it_is_no_copy, WRITTEN),
    "a view of what may be no copy": (writes_a_view_of_a_copy, WRITTEN),
    "a result": (lambda m, x: (x, m.weight * 2), RETURNED),
    "a view of it": (lambda m, x: {"x": x, "y": [(m.matrix * 2).t()[0]]}, RETURNED),
    "itself in some calls": (lambda m, x: (m.weight * 2).to(x.dtype), RETURNED),
    "an outer product": (lambda m, x: x[0, 0] + m.large[:, None] * m.large, LARGER),
    "repeated rows": (lambda m, x: x[0] + m.weight.repeat(70000, 1), LARGER),
    "a megabyte and an element": (
        lambda m, x: x[0, 0] + m.weight[:1].repeat((1 << 17) + 1),
        LARGER,
    ),
    "expanded rows": (lambda m, x: x[0] + (m.weight * 2).expand(70000, 3), LARGER),
    "a row of many": (lambda m, x: x[0] + m.weight.repeat(70000, 1)[0], LARGER),
    "a cast": (lambda m, x: x + (m.weight * 2).to(torch.float32), UNMOVED),
    "a quotient of integers": (lambda m, x: x + m.index / 3, UNMOVED),
    "a tensor of a named device": (lambda m, x: x + m.index.new_ones(3, device="cpu"), UNMOVED),
    "an operator that takes one dtype": (
        lambda m, x: x + torch.complex(m.weight, (m.weight + 0).double()).abs(),
        UNMOVED,
    ),
    "complex numbers": (lambda m, x: (x + torch.complex(m.weight, m.weight)).abs(), UNMOVED),
}


def behaviour(model: nn.Module, *calls: Tensor) -> list[Tensor]:
    """What calls in a row give a caller who clears each result before the next."""
    own, seen = copy.deepcopy(model), []
    for x in calls:
        with torch.no_grad():
            results = torch.utils._pytree.tree_leaves(own(x.clone()))
        seen += [result.clone() for result in results]
        for result in results:
            result.zero_()
    return seen


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, reason = REFUSALS[case]
    model = model_of(forward)

    fast = optimized(model, *given())

    assert reason in {refusal.reason for refusal in fast.report.refused}
    assert_equivalent(model, fast, given(), exact=True)
    calls = [*given() * 2, given()[0].float()]
    if "cast" not in case:
        for expected, actual in zip(behaviour(model, *calls), behaviour(fast, *calls), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", [*FOLDED, "a cast", "a quotient of integers", "complex numbers"])
def test_a_cast_casts_what_it_casts_in_the_model(case: str) -> None:
    model = model_of(FOLDED[case] if case in FOLDED else REFUSALS[case][0])
    fast = optimized(model, *given()).float()
    x = given()[0].float()

    assert fast(x).dtype == model.float()(x).dtype


LEFT: dict[str, Callable[[Any, Tensor], Any]] = {
    "random numbers": lambda m, x: x + torch.rand(3, dtype=x.dtype) * 2,
    "a random choice of constants": lambda m, x: x + nn.functional.dropout(m.weight, 0.5, True),
    "a view": lambda m, x: x @ m.matrix.t(),
    "a number": lambda m, x: x * m.matrix.shape[0],
    "what depends on the input": lambda m, x: x.new_ones(3) * 2 + x,
}


@pytest.mark.parametrize("case", LEFT)
def test_leaves_alone(case: str) -> None:
    model = model_of(LEFT[case])

    fast = optimized(model, *given())

    assert_left_alone(model, fast, given())


def test_what_a_refused_value_is_made_of_is_folded() -> None:
    model = model_of(lambda m, x: x[0] + m.linear(m.table).mean(0).expand(70000, 3))

    fast = optimized(model, *given())

    assert fast.report.counts() == {NAME: 1}
    assert callees(fast) == [operator.getitem, "expand", operator.add]
    assert_equivalent(model, fast, given(), exact=True)


def test_a_model_that_learns_keeps_what_learns() -> None:
    model = Holder(lambda m, x: x + m.weight.exp() + m.table.exp().sum(0))

    with pytest.warns(UserWarning, match="training mode"):
        fast = optimized(model, *given())
    fast(*given()).sum().backward()

    reasons = {refusal.reason for refusal in fast.report.refused}
    assert reasons == {"the model is in training mode, and may be learning it"}
    assert fast.report.counts() == {NAME: 1}
    assert fast.weight.grad is not None


def test_what_autocast_computes_otherwise_is_refused() -> None:
    model = model_of(lambda m, x: x + m.linear(m.table)[0]).float()
    x = given()[0].float()

    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized(model, x)

    assert [each.reason for each in fast.report.refused] == ["autocast gives it another dtype"]
    assert_equivalent(model, fast, (x,), exact=True)


def test_nothing_is_folded_without_example_inputs() -> None:
    fast = optimized(model_of(FOLDED["a layer"]))

    assert (fast.report.fired, fast.report.refused) == ((), ())


def test_the_result_outlives_copies_files_and_gradients() -> None:
    model = model_of(FOLDED["a layer"])
    fast = optimized(model, *given())
    file = io.BytesIO()
    torch.save(fast, file)

    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    for each in (copy.deepcopy(fast), loaded):
        assert_equivalent(model, each, given(), exact=True)
        assert not any(tensor.requires_grad or tensor.is_inference() for tensor in each.buffers())


def test_a_hook_inside_a_layer_runs_in_every_call() -> None:
    model = model_of(lambda m, x: x + m.encoder(m.table[None])[0, 0])
    model.encoder = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True).double().eval()
    runs: list[nn.Module] = []
    model.encoder.linear1.register_forward_hook(lambda module, *_: runs.append(module))

    fast = optimized(model, *given())
    runs.clear()
    fast(*given())

    assert fast.report.fired == ()
    assert len(runs) == 1
