"""What is computed twice, in vain, to the same value, or anew in each call."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import models
import optimizer
from models._torchvision_import import import_torchvision
from optimizer.core.guards import expect_tensor
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, alike, callees, layers_of, optimized_by, rows, texts, tried

CSE = "eliminate_common_subexpressions"
(SQUARE,) = inputs_like([(4, 4)], "random", 0)


def repeated(forward: Callable[..., Any] | str) -> nn.Module:
    """A model of layers, one of them in training mode, and a buffer."""
    layers = {"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    model = Forward(forward, scale=torch.ones(4), **layers).double().eval()
    model.norm.train()
    return model


TWICE = {
    "a method": (lambda m, x: x.tanh() - x.tanh() * 2, 1),
    "a function": (lambda m, x: torch.tanh(x) - torch.tanh(x) * 2, 1),
    "an operator": (lambda m, x: (x + 1).exp() * (x + 1), 1),
    "keywords": (lambda m, x: x.sum(dim=1, keepdim=True) * x.sum(dim=1, keepdim=True), 1),
    "a slice": (lambda m, x: x[:, 1:3] * x[:, 1:3], 1),
    "a layer called twice": (lambda m, x: m.linear(x) * m.linear(x).exp(), 1),
    "a chain": (lambda m, x: m.linear(x).exp().sum() + m.linear(x).exp().sum(), 3),
    "three of them": (lambda m, x: x.exp() * x.exp() - x.exp(), 2),
    "a size": (lambda m, x: x * x.shape[0] + x.shape[0], 2),
    "a buffer": (lambda m, x: x * (m.scale * 3) + m.scale * 3, 1),
    "a part of a tuple": (lambda m, x: x.chunk(2)[0] * x.chunk(2)[0], 2),
    "one that is returned": (lambda m, x: (x.exp(), x.exp() + 1), 1),
    "two operands": (lambda m, x: (x @ x.t()) * (x @ x.t()), 2),
}
UNLIKE = texts(
    """
    (x + 1, x + 1.0); (x * 1, x * True); x / 0.0 + x / -0.0;
    x.new_tensor([0.0, 1.0]) / x.new_tensor([-0.0, 1.0]);
    torch.full_like(x, fill_value=0.0) / torch.full_like(x, fill_value=-0.0);
    x[[0, 1]].sum() + x[0, 1]; x.sum(1, True) + x.sum(1, False); x.sum(dim=1) + x.sum(axis=1);
    x[1:3] + x[0:2]; x[1:].sum() + x[2:].sum(); x[:, :2].sum() + x[:, :3].sum();
    x[::2] + x[::3]; x[1:, 0:4:2] + x[1:, 0:4:3]; x[..., None] + x[None, ...];
    torch.exp(x) + torch.sin(x); x.exp() + x.sin(); (x + 2.0) * (x - 2.0); x.sum(0) + x.sum(1);
    x.clamp(min=0.5) + x.clamp(max=0.5); x.sum(dim=0) + x.sum(dim=1);
    (x.sum(dtype=torch.int64), x.sum(dtype=torch.float32));
    (x.sum(0), x.type('torch.FloatTensor'), x.float()); m.linear(x) + m.other(x);
    x - m.scale + (m.scale - x); F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True);
    m.norm(x) + m.norm(x); x + torch.rand(4).double() + torch.rand(4).double()
    """
)
CHANGED = "what it reads may be written in between"
SEEN_WRITTEN = "a result is written, which the other must not see"


NOT_MERGED = {
    "a written input": ("before = x.exp(); x.add_(1.0); return before + x.exp()", CHANGED),
    "a written view": (
        "y = x * 2; before, part = (y.exp(), y[0]); part.zero_(); return before + y.exp()", CHANGED,
    ),
    "a written second operand": (
        "y, z = (x * 2, x + 1); before = y * z; z.add_(1.0); return before + y * z", CHANGED,
    ),
    "a written buffer": (
        "before = x * m.scale; m.scale.add_(1.0); return before + x * m.scale", CHANGED,
    ),
    "a written layer": (
        "y = x.double() * 2; before = m.linear(y); m.linear.weight.mul_(2.0); "
        "return before + m.linear(y)", CHANGED,
    ),
    "a written result": (
        "first, again = (x.exp(), x.exp()); first.add_(1.0); return first * again", SEEN_WRITTEN,
    ),
    "an assigned result": (
        "first, again = (x.exp(), x.exp()); again[0] = 0.0; return first * again", SEEN_WRITTEN,
    ),
    "a result that is written where it is no copy": (
        "first, again = (x.exp(), x.exp().float()); again.add_(1.0); return first * again",
        SEEN_WRITTEN,
    ),
    "two results": (lambda m, x: (x.exp(), x.exp()), "both are returned"),
    "views of two results": (lambda m, x: [x.exp().t(), {"y": x.exp()[0]}], "both are returned"),
}  # fmt: skip


@rows("forward outcome", TWICE, alike(0, UNLIKE), NOT_MERGED)
def test_common_subexpressions(forward: Any, outcome: Any) -> None:
    later = [(SQUARE.float(),)] if isinstance(outcome, str) else []

    tried(CSE, repeated(forward), (SQUARE,), outcome, *later)


@pytest.mark.parametrize("forward", [lambda m, x: (x + 1, x + 1.0), lambda m, x: (x * 1, x * True)])
def test_integers_tell_numbers_of_two_types_apart(forward: Any) -> None:
    tried(CSE, repeated(forward), (SQUARE,), 0, (torch.arange(16).reshape(4, 4),))


def test_statistics_that_only_another_size_updates_are_updated_twice() -> None:
    normed = "F.batch_norm(x, m.norm.running_mean, m.norm.running_var, training=many)"
    model = repeated(f"many = x.shape[0] > 4; return {normed} + {normed}")

    tried(CSE, model, (SQUARE,), 0, (SQUARE.repeat(2, 1),))


def test_nothing_is_merged_without_example_inputs() -> None:
    tried(CSE, repeated(TWICE["a layer called twice"][0]), (), 0, (SQUARE,))


class FillsAList(nn.Module):
    def forward(self, xs: list[Tensor]) -> Tensor:
        first, again = xs[:1], xs[:1]
        first[0] = xs[1]
        return first[-1] - again[-1]


def test_a_list_that_may_be_filled_is_not_shared() -> None:
    x, y = inputs_like([(4, 4)] * 2, "random", 0)

    fast = optimizer.optimize(FillsAList().eval(), ([x, y],), only=[CSE], check=None, level=1)

    assert CSE not in fast.report.counts()
    assert torch.equal(fast([x, y]), y - x)


def read_another(first: fx.Node) -> None:
    first.args = (first.next,)


def go(first: fx.Node) -> None:
    first.replace_all_uses_with(first.next)
    first.graph.erase_node(first)


def move_behind(first: fx.Node) -> None:
    last = next(iter(reversed(first.graph.nodes)))
    last.prepend(first)


@pytest.mark.parametrize("change", [read_another, go, move_behind])
def test_what_was_seen_earlier_may_have_changed(change: Callable[[fx.Node], None]) -> None:
    model = Forward(lambda _, x: [torch.tanh(x), torch.exp(x), torch.tanh(x)]).eval()
    graph = optimizer.capture(model, torch.ones(3)).graph
    first, again = [node for node in graph.nodes if node.target is torch.tanh]
    apply = next(each for each in optimizer.all_passes() if each.name == CSE).apply
    assert apply(first) is None

    change(first)

    assert apply(again) is None


DEAD_CODE = "eliminate_dead_code"
(ROWS,) = inputs_like([(4, 3)], "random", 0)


def model_of(forward: Callable[..., Any]) -> nn.Module:
    layers = {"linear": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "hooked": nn.Linear(3, 3)}
    layers["hooked"].register_forward_hook(lambda module, given, result: given[0].add_(1.0))
    state = {"count": torch.zeros(()), "mean": torch.zeros(3), "var": torch.ones(3)}
    model = Forward(forward, inplace=nn.ReLU(inplace=True), **layers, **state)
    return randomize(model.double().eval())


def beside(forward: Callable[..., Any]) -> nn.Module:
    """A model that calls `forward` and returns something else."""
    return model_of(lambda m, x: (forward(m, x), x.exp())[1])


def gone(*results: Any) -> None:
    """Reads nothing: what was computed for it is dead."""


IN_VAIN = {
    "a method": lambda m, x: gone(x.exp()),
    "a function": lambda m, x: gone(torch.exp(x)),
    "an operator": lambda m, x: gone(x + 1),
    "a module": lambda m, x: gone(m.linear(x)),
    "a chain": lambda m, x: gone(m.linear(x).exp().t().sum() + 1),
    "a parameter": lambda m, x: gone(m.linear.weight * 2),
    "a shape": lambda m, x: gone(x.shape[0], x.size(1) * 2),
    "a view": lambda m, x: gone(x.t()[0]),
    "two readers": lambda m, x: gone((y := x.exp()) + 1, y * 2),
    "new tensors": lambda m, x: gone(torch.zeros(3, dtype=x.dtype) + torch.arange(3)),
    "an inference-mode BatchNorm": lambda m, x: gone(m.norm(x)),
    "an inference-mode dropout": lambda m, x: gone(F.dropout(x, training=False)),
    "a value that a tuple holds": lambda m, x: gone(torch.chunk(x, 2)[0]),
}
KEPT = {
    "a write of the input by a method": lambda m, x: gone(x.mul_(2)),
    "a write of the input by an operator": lambda m, x: gone(x.__imul__(2)),
    "a write of the input by an assignment": lambda m, x: x.__setitem__(0, 5.0),
    "a write under a mask": lambda m, x: x.__setitem__(x > 0, 5.0),
    "a write through a view": lambda m, x: gone(x.t()[0].zero_()),
    "a write by an in-place module": lambda m, x: gone(m.inplace(x)),
    "a write by a function": lambda m, x: gone(F.relu(x, inplace=True)),
    "a write to an argument that is returned": lambda m, x: gone(torch.add(x, 1, out=x)),
    "a write of a buffer": lambda m, x: gone(m.count.add_(1)),
    "a copy into a buffer": lambda m, x: gone(m.count.copy_(x.sum())),
    "random numbers": lambda m, x: gone(torch.rand(3)),
    "random numbers like a value": lambda m, x: gone(torch.rand_like(x)),
    "training-mode dropout": lambda m, x: gone(F.dropout(x, 0.5, True)),
    "training-mode statistics": lambda m, x: gone(F.batch_norm(x, m.mean, m.var, training=True)),
    "a write of a value that dies with it": lambda m, x: gone(m.inplace(x * 2)),
    "a module with a hook": lambda m, x: gone(m.hooked(x)),
    "an assertion": lambda m, x: torch._assert(x.shape[0] == 4, "four rows"),
    "an assertion on the device": lambda m, x: torch._assert_async(
        torch.ones_like(x).sum() == 12, "four rows"
    ),
}


@rows("forward outcome", alike(["exp"], IN_VAIN), alike(0, KEPT))
def test_dead_code(forward: Any, outcome: Any) -> None:
    tried(DEAD_CODE, beside(forward), (ROWS,), outcome)


def test_a_write_to_a_value_that_is_read_stays() -> None:
    tried(DEAD_CODE, model_of(lambda m, x: (y := x * 2, y.t().add_(1), y)[2]), (ROWS,), 0)


def test_without_example_inputs_only_what_is_pure_by_definition_goes() -> None:
    model = model_of(lambda m, x: (m.linear(x.transpose(0, 1)), gone(x.mul_(2)), x.exp())[2])

    tried(DEAD_CODE, model, (), 2, inputs_like([(3, 3)], "random", 0))


@pytest.mark.parametrize("case", ["an assertion", "an assertion on the device"])
def test_an_assertion_still_fails(case: str) -> None:
    fast = optimized_by(DEAD_CODE, beside(KEPT[case]), ROWS)

    with pytest.raises((AssertionError, RuntimeError), match="four rows"):
        fast(torch.ones(5, 3, dtype=torch.float64))


class Ignores(nn.Module):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return x.exp()


def test_an_argument_that_is_not_read_stays_an_argument() -> None:
    inputs = inputs_like([(4, 3), (2,)], "random", 0)

    fast = tried(DEAD_CODE, Ignores().eval(), inputs, 0)

    with pytest.raises(TypeError):
        fast(inputs[0])


class Adds(nn.Module):
    def forward(self, x: Tensor, seen: set[int]) -> Tensor:
        seen.add(7)
        return x.exp()


def test_a_set_that_is_given_is_added_to_though_tensors_have_an_add_too() -> None:
    seen: set[int] = set()

    optimized_by(DEAD_CODE, Adds().eval(), torch.ones(2), {1})(torch.ones(2), seen)

    assert seen == {7}


class Extends(nn.Module):
    def forward(self, x: Tensor, given: list[Tensor]) -> list[Tensor]:
        same = given
        same += [x]
        return given


def test_a_list_that_is_extended_in_place_is_extended() -> None:
    x = torch.ones(2)

    assert len(optimized_by(DEAD_CODE, Extends().eval(), x, [x])(x, [x])) == 2


COPIES = {
    "a residual": "y = torch.tanh(x); saved = y.clone(); z = torch.relu(y); z += saved; return z",
    "a method": lambda m, x: torch.relu(torch.tanh(x).clone()),
    "a function": lambda m, x: torch.clone(torch.tanh(x)).sum(-1),
    "a source that is returned": "y = torch.tanh(x); return (y, y.clone().exp())",
    "a source that was written before": (
        "y = torch.tanh(x); y.mul_(2.0); return torch.relu(torch.clone(y))"
    ),
}  # fmt: skip


OUTSIDE = "what is copied was not made here, and may lie anyhow in memory"
COPY_SEEN = "the copy or a view of it is seen"
LATER = "what is copied is written later"
NEEDED = {
    "an input": (lambda m, x: torch.relu(x.clone()), OUTSIDE),
    "a view": (lambda m, x: torch.relu(torch.tanh(x).t().clone()), OUTSIDE),
    "a view of the copy": (lambda m, x: torch.tanh(x).clone().view(-1).exp(), COPY_SEEN),
    "a copy that is returned": (lambda m, x: torch.tanh(x).clone(), COPY_SEEN),
    "a copy that may be reshaped": (lambda m, x: torch.tanh(x).clone().flatten().exp(), COPY_SEEN),
    "a copy that is written": (
        "y = torch.tanh(x); z = y.clone(); z[0] = 2.0; return y + z.exp()", "the copy is written",
    ),
    "a copy that is written in place": (lambda m, x: torch.tanh(x).clone().exp_().sum(), COPY_SEEN),
    "a source that is written": (
        "y = torch.tanh(x); z = y.clone().mul(3.0); y.mul_(2.0); return z + y", LATER,
    ),
    "a source that is written in part": (
        "y = torch.tanh(x); z = y.clone(); y[0].mul_(2.0); return z + y", LATER,
    ),
}  # fmt: skip


TWO = lambda m, x: torch.relu(torch.tanh(x).clone().clone())  # noqa: E731


@rows("forward outcome", alike(1, COPIES), {"two in a row": (TWO, 2)}, NEEDED)
def test_clones(forward: Any, outcome: Any) -> None:
    x, *later = (torch.randn(3, 4), torch.randn(5, 6).t(), torch.randn(1, 4).expand(3, 4))
    later = [*later, torch.randn(6, 8)[::2, ::2]] if isinstance(outcome, int) else []

    tried("remove_clones", Forward(forward).eval(), (x,), outcome, *((each,) for each in later))


def test_a_copy_in_another_layout_is_left_alone() -> None:
    function = lambda m, x: torch.relu(torch.tanh(x).clone(memory_format=torch.channels_last))  # noqa: E731

    tried("remove_clones", Forward(function).eval(), (torch.randn(2, 3, 4, 5).double(),), 0)


IDENTITIES = "remove_identities"

MODULES = {
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
CALLS = texts(
    """
    m.layer(x).exp(); m.layer(input=x).exp(); m.layer(x.exp())
    """
)


@pytest.mark.parametrize("examples", [True, False])
@pytest.mark.parametrize("call", CALLS)
@rows("build shape", MODULES)
def test_every_module_that_is_an_identity(
    build: Any, shape: Any, call: str, examples: bool
) -> None:
    inputs = inputs_like([shape], "random", 0)
    model = Forward(call, layer=build()).eval()

    tried(IDENTITIES, model, inputs if examples else (), ["exp"], inputs)


FUNCTIONS = {
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


@rows("forward shape", FUNCTIONS)
def test_every_function_that_is_an_identity(forward: Any, shape: Any) -> None:
    tried(IDENTITIES, Forward(forward).eval(), inputs_like([shape], "random", 0), [])


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_is_an_identity(mode: str) -> None:
    ops, inputs = import_torchvision().ops, inputs_like([(2, 3)], "random", 0)

    def both(module: Any, x: Tensor) -> Tensor:
        return ops.stochastic_depth(module.layer(x), 0.5, mode, training=module.training)

    model = Forward(both, layer=ops.StochasticDepth(0.5, mode)).eval()

    fast = tried(IDENTITIES, model, inputs, [])

    # For torchvision's code asks for a type.
    assert [node.target for node in fast.graph.nodes][1:-1] == [expect_tensor]


def test_stochastic_depth_in_training_mode_stays() -> None:
    model = nn.Sequential(import_torchvision().ops.StochasticDepth(0.5, "row"), nn.ReLU()).eval()
    model[0].train()

    fast = optimized_by(IDENTITIES, model, *SEVEN)

    assert fast.report.fired == ()
    assert_equivalent(model, fast, SEVEN, exact=True)


def test_a_run_of_many_vanishes() -> None:
    layers = [build() for _ in range(5) for build in (nn.Identity, nn.Dropout, nn.AlphaDropout)]

    tried(IDENTITIES, nn.Sequential(*layers).eval(), (ROWS,), [])


def test_the_result_is_the_input_itself_also_for_a_writer() -> None:
    model = Forward(lambda m, x: m.layer(x).mul_(2.0) + x, layer=nn.Dropout()).eval()

    tried(IDENTITIES, model, (ROWS,), 1)


TRAINING = "it is in training mode and drops values"
AT_WORK = {
    "Dropout in training mode": ("m.layer(x).exp()", nn.Dropout(), TRAINING),
    "Dropout2d in training mode": ("m.layer(x).exp()", nn.Dropout2d(), TRAINING),
    "F.dropout with its default": (lambda m, x: F.dropout(x), None, TRAINING),
    "F.dropout in training": (lambda m, x: F.dropout(x, 0.5, True), None, TRAINING),
    "torch.dropout in training": (lambda m, x: torch.dropout(x, 0.5, True), None, TRAINING),
    "a mode that is computed": (lambda m, x: F.dropout(x, 0.5, x.dim() == 9), None, TRAINING),
    "a constant": (lambda m, x: x * m.layer(2.0), nn.Identity(), "its input is a constant"),
}


@rows("forward layer reason", AT_WORK)
def test_what_drops_values_stays(forward: Any, layer: Any, reason: str) -> None:
    model = Forward(forward, layer=layer).eval()
    if layer is not None:
        layer.train()

    tried(IDENTITIES, model, inputs_like([(2, 3, 4, 4)], "random", 0), reason)


class Shifted(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Identity has it
        return input + 1


def test_an_identity_that_is_none_is_left_alone() -> None:
    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, given, result: result * 3)

    tried(IDENTITIES, nn.Sequential(Shifted(), hooked).eval(), (ROWS,), 0)


CONSTANTS = "fold_constants"
PAIR, SEVEN = inputs_like([(2, 3)], "random", 0), inputs_like([(7, 3)], "random", 1)


def holding(forward: Callable[..., Any], **more: Any) -> nn.Module:
    """A model of parameters, buffers and layers of every kind."""
    draw = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {
        "weight": nn.Parameter(torch.randn(3, generator=draw)),
        "matrix": nn.Parameter(torch.randn(3, 3, generator=draw)),
        "table": torch.randn(5, 3, generator=draw),
        "index": torch.tensor([3, 0, 3]),
        "steps": torch.zeros(3),
        "large": torch.ones(600),
        "linear": nn.Linear(3, 3),
        "norm": nn.BatchNorm1d(3),
    }
    return Forward(forward, **held, **more).double().eval()


CONSTANT = texts(
    """
    x.exp() + torch.sigmoid(m.weight); x.exp() + m.table[0].tanh(); x.exp() + 16 * m.weight;
    x.exp() + 2.0 ** m.weight; x.exp() + m.table[m.index].sum(0);
    x.exp() + torch.sum(input=m.matrix, dim=0); x.exp() + m.linear(m.weight);
    x.exp() + m.weight[:1].repeat(1 << 17, 1, 1);
    x.exp() + m.linear(m.table).t().unsqueeze(0)[0, :, 1]; x.exp() + m.norm(m.table)[2];
    torch.where(m.weight > 0, x.exp(), 0.0); x.exp()[:, (m.index - 1) % 3];
    x.exp() + m.matrix @ m.weight; x.exp() + m.weight.detach().exp();
    x.exp() + torch.outer(m.large, m.large).mean()
    """
)


PART = lambda m, x: x.exp() + (m.linear(m.table).relu() + 1).chunk(5)[2] * 2  # noqa: E731


@rows("forward outcome", alike(1, CONSTANT), {"a part": (PART, 2)})
def test_constants_are_folded(forward: Any, outcome: int) -> None:
    fast = tried(CONSTANTS, holding(forward), PAIR, outcome, SEVEN)

    assert len([each for each in callees(fast) if each != "exp"]) == 1


def test_a_subgraph_is_folded_from_its_end() -> None:
    model = holding(lambda m, x: x + m.linear(m.table).relu().mean(0) * 2)

    fast = tried(CONSTANTS, model, PAIR, [operator.add])

    assert len(fast.report.fired) == 1
    assert [tuple(buffer.shape) for buffer in fast.buffers()] == [(3,)]
    assert list(fast.parameters()) == []


def test_a_value_with_several_readers_is_folded_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(m.weight)
        return x * gate + gate * 2 - x / gate

    assert len(callees(tried(CONSTANTS, holding(forward), PAIR, 2))) == 4


# Nodes that go, and Linears among them. The rest of torchvision's models have no constants.
NODES = {"swin_t": (24, 0), "swin_v2_t": (84, 24)}


@pytest.mark.parametrize("name", NODES)
def test_the_position_biases_of_swin_are_folded(name: str) -> None:
    work = models.load(name)

    before = optimizer.optimize(
        work.module, work.example_inputs, disable=[CONSTANTS], check=None, level=1
    )
    fast = optimizer.optimize(work.module, work.example_inputs, level=0)

    sizes, linears = (
        [len(each.graph.nodes) for each in (before, fast)],
        [sum(isinstance(layer, nn.Linear) for layer in layers_of(each)) for each in (before, fast)],
    )
    assert fast.report.counts()[CONSTANTS] == 12
    assert fast.report.remarks == ()
    assert (sizes[0] - sizes[1], linears[0] - linears[1]) == NODES[name]


def test_the_position_biases_of_maxvit_are_folded() -> None:
    model = import_torchvision().models.maxvit_t().eval()
    x = torch.randn(1, 3, 224, 224)
    before = optimizer.capture(model, x)

    fast = optimized_by(CONSTANTS, model, x)

    assert fast.report.counts() == {CONSTANTS: 22}
    assert len(callees(before)) - len(callees(fast)) == 6 * 22


WRITTEN = "the forward writes it, or what it is made of"
RETURNED = "it is returned, and so has to be new in each call"
LARGER = "it is larger than what it is made of"
UNMOVED = "it would not be cast or moved with the model"


VARIABLE = {
    "a counter": ("m.steps.add_(1.0); return x + m.steps * 2", WRITTEN),
    "a counter behind a view": ("m.steps[0] += 1.0; return x + m.steps.exp()", WRITTEN),
    "a layer that is written": (
        "m.norm.running_mean.add_(1.0); return x + m.norm(m.table)[0]", WRITTEN,
    ),
    "a result that is written": ("y = m.weight * 2; y.add_(x[0]); return x * y", WRITTEN),
    "a result that some calls write": (
        "y = (m.weight * 2).to(x.dtype); y.add_(x[0]); return x * y", WRITTEN,
    ),
    "a view of what may be no copy": (
        "y = (m.weight * 2).type_as(x.float()); y[:2].add_(1.0); return x * y", WRITTEN,
    ),
    "a result": (lambda m, x: (x, m.weight * 2), RETURNED),
    "a view of it": (lambda m, x: {"x": x, "y": [(m.matrix * 2).t()[0]]}, RETURNED),
    "itself in some calls": (lambda m, x: (m.weight * 2).to(x.dtype), RETURNED),
    "an outer product": (lambda m, x: x[0, 0] + m.large[:, None] * m.large, LARGER),
    "repeated rows": (lambda m, x: x[0] + m.weight.repeat(70000, 1), LARGER),
    "a megabyte and an element": (
        lambda m, x: x[0, 0] + m.weight[:1].repeat((1 << 17) + 1), LARGER,
    ),
    "expanded rows": (lambda m, x: x[0] + (m.weight * 2).expand(70000, 3), LARGER),
    "a row of many": (lambda m, x: x[0] + m.weight.repeat(70000, 1)[0], LARGER),
    "a cast": (lambda m, x: x + (m.weight * 2).to(torch.float32), UNMOVED),
    "a quotient of integers": (lambda m, x: x + m.index / 3, UNMOVED),
    "a tensor of a named device": (lambda m, x: x + m.index.new_ones(3, device="cpu"), UNMOVED),
    "an operator that takes one dtype": (
        lambda m, x: x + torch.complex(m.weight, (m.weight + 0).double()).abs(), UNMOVED,
    ),
    "complex numbers": (lambda m, x: (x + torch.complex(m.weight, m.weight)).abs(), UNMOVED),
}  # fmt: skip


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


@pytest.mark.parametrize("case", VARIABLE)
def test_what_is_not_constant_stays(case: str) -> None:
    forward, reason = VARIABLE[case]
    model = holding(forward)

    fast = optimized_by(CONSTANTS, model, *PAIR)

    assert reason in {refusal.reason for refusal in fast.report.refused}
    assert_equivalent(model, fast, PAIR, exact=True)
    calls = [*PAIR * 2, PAIR[0].float()]
    if "cast" not in case:
        for expected, actual in zip(behaviour(model, *calls), behaviour(fast, *calls), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("case", [*CONSTANT, "a cast", "a quotient of integers", "complex numbers"])
def test_a_cast_casts_what_it_casts_in_the_model(case: str) -> None:
    model = holding(CONSTANT[case] if case in CONSTANT else VARIABLE[case][0])
    fast, x = optimized_by(CONSTANTS, model, *PAIR).float(), PAIR[0].float()

    assert fast(x).dtype == model.float()(x).dtype


NO_CONSTANT = texts(
    """
    x + torch.rand(3, dtype=x.dtype) * 2; x + nn.functional.dropout(m.weight, 0.5, True);
    x @ m.matrix.t(); x * m.matrix.shape[0]; x.new_ones(3) * 2 + x
    """
)


@rows("forward outcome", alike(0, NO_CONSTANT))
def test_no_constants(forward: Any, outcome: Any) -> None:
    tried(CONSTANTS, holding(forward), PAIR, outcome)


def test_what_a_refused_value_is_made_of_is_folded() -> None:
    model = holding(lambda m, x: x[0] + m.linear(m.table).mean(0).expand(70000, 3))

    fast = tried(CONSTANTS, model, PAIR, [operator.getitem, "expand", operator.add])

    assert len(fast.report.fired) == 1


def test_a_model_that_learns_keeps_what_learns() -> None:
    model = holding(lambda m, x: x + m.weight.exp() + m.table.exp().sum(0)).train()

    with pytest.warns(UserWarning, match="training mode"):
        fast = optimized_by(CONSTANTS, model, *PAIR)
    fast(*PAIR).sum().backward()

    reasons = {refusal.reason for refusal in fast.report.refused}
    assert reasons == {"the model is in training mode, and may be learning it"}
    assert fast.report.counts() == {CONSTANTS: 1}
    assert fast.weight.grad is not None


def test_what_autocast_computes_otherwise_is_refused() -> None:
    model = holding(lambda m, x: x + m.linear(m.table)[0]).float()

    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized_by(CONSTANTS, model, PAIR[0].float())

    assert [each.reason for each in fast.report.refused] == ["autocast gives it another dtype"]
    assert_equivalent(model, fast, (PAIR[0].float(),), exact=True)


def test_nothing_is_folded_without_example_inputs() -> None:
    tried(CONSTANTS, holding("x.exp() + m.linear(m.weight)"), (), 0, PAIR)


def test_the_result_outlives_copies_files_and_gradients() -> None:
    model, file = holding("x.exp() + m.linear(m.weight)"), io.BytesIO()
    fast = optimized_by(CONSTANTS, model, *PAIR)
    torch.save(fast, file)
    file.seek(0)

    for each in (copy.deepcopy(fast), torch.load(file, weights_only=False)):
        assert_equivalent(model, each, PAIR, exact=True)
        assert not any(tensor.requires_grad or tensor.is_inference() for tensor in each.buffers())


def test_a_hook_inside_a_layer_runs_in_every_call() -> None:
    encoder = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
    model = holding(lambda m, x: x + m.encoder(m.table[None])[0, 0], encoder=encoder)
    encoder.linear1.register_buffer("runs", torch.ones(()))
    encoder.linear1.register_forward_hook(lambda module, _, y: y * module.runs.mul_(2))

    fast = optimized_by(CONSTANTS, model, *PAIR)

    assert fast.report.fired == ()
    assert not torch.equal(fast(*PAIR), fast(*PAIR))
