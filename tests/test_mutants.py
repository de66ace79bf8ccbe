"""How well the fuzz kills: a correct BatchNorm fold passes it, every planted mistake does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from optimizer.testing import Counterexample, check_pass

Tensor = torch.Tensor

# What plain symbolic tracing can read, and the near misses of the pattern.
ALPHABET = (
    *("relu", "linear", "bn", "conv", "dup", "swap", "out", "again", "add", "residual"),
    *("linear_nobias", "linear4", "conv_nobias", "conv_groups", "conv_k3", "t01", "flatten"),
    *("bn_small", "bn_tiny", "bn_plain", "bn_train", "bn_nostats", "linear bn", "conv bn"),
    *("flatten linear bn", "linear_nobias bn_plain", "conv_nobias bn_eighth", "linear dup bn"),
    *("conv bn_train", "conv bn_nostats", "conv dup bn", "conv out bn", "linear out bn"),
    *("dup conv swap again bn add", "conv bn again", "conv_groups bn_plain"),
)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))


@dataclass(frozen=True)
class Fold:
    """The algebra of a fold and its guards, each replaceable by a mistake."""

    std: Callable[[_BatchNorm], Tensor] = lambda n: torch.sqrt(n.running_var + n.eps)
    mean: Callable[[_BatchNorm], Tensor] = lambda n: n.running_mean
    gamma: Callable[[_BatchNorm], Tensor] = lambda n: n.weight if n.affine else n.running_var**0
    beta: Callable[[_BatchNorm], Tensor] = lambda n: n.bias if n.affine else n.running_mean * 0
    weight: Callable[[Tensor, Tensor], Tensor] = scaled
    bias: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = lambda b, m, s, t: (b - m) * s + t
    guards: frozenset[str] = field(
        default=frozenset({"one reader", "one call", "eval", "statistics", "rank"})
    )

    def __call__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
        traced = fx.symbolic_trace(copy.deepcopy(model))
        with torch.no_grad():
            self.record_shapes(traced, inputs)
            for node in list(traced.graph.nodes):
                self.rewrite(traced, node)
        traced.recompile()
        return traced

    def record_shapes(self, traced: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
        # On a copy: to run it updates the statistics of a BatchNorm in training mode.
        run = ShapeProp(copy.deepcopy(traced))
        run.propagate(*(tensor.clone() for tensor in inputs))
        for node, ran in zip(traced.graph.nodes, run.module.graph.nodes, strict=True):
            node.meta.update(ran.meta)

    def rewrite(self, traced: fx.GraphModule, node: fx.Node) -> None:
        if node.op != "call_module" or not isinstance(node.args[0], fx.Node):
            return
        producer, norm = node.args[0], traced.get_submodule(str(node.target))
        if producer.op != "call_module" or not isinstance(norm, _BatchNorm):
            return
        layer = traced.get_submodule(str(producer.target))
        if isinstance(layer, nn.Linear | _ConvNd) and self.allows(traced, producer, layer, norm):
            traced.add_submodule(f"folded_{node.name}", self.folded(layer, norm))
            producer.target = f"folded_{node.name}"
            node.replace_all_uses_with(producer)
            traced.graph.erase_node(node)

    def allows(
        self, traced: fx.GraphModule, producer: fx.Node, layer: nn.Module, norm: _BatchNorm
    ) -> bool:
        calls = [n for n in traced.graph.nodes if n.target == producer.target]
        rank = len(producer.meta["tensor_meta"].shape)
        holds = {
            "one reader": len(producer.users) == 1,
            "one call": len(calls) == 1 or "one call" in self.guards,
            "eval": not norm.training,
            "rank": not isinstance(layer, nn.Linear) or rank == 2,
        }
        # Without statistics there is nothing to fold; the mistake is to take mean 0, variance 1.
        if norm.running_mean is None and "statistics" not in self.guards:
            norm.running_mean = torch.zeros(norm.num_features, dtype=torch.float64)
            norm.running_var = torch.ones(norm.num_features, dtype=torch.float64)
        if norm.running_mean is None:
            return False
        return all(holds[guard] for guard in self.guards & holds.keys())

    def folded(self, layer: nn.Linear | _ConvNd, norm: _BatchNorm) -> nn.Module:
        shared = "one call" not in self.guards
        result = layer if shared else copy.deepcopy(layer)
        scale = self.gamma(norm) / self.std(norm)
        bias = scale * 0 if layer.bias is None else layer.bias
        shift = self.bias(bias, self.mean(norm), scale, self.beta(norm))
        result.weight = nn.Parameter(self.weight(layer.weight, scale))
        result.bias = nn.Parameter(shift)
        return result


CORRECT = Fold()


def without(guard: str) -> Fold:
    return replace(CORRECT, guards=CORRECT.guards - {guard})


def wrong_axis(weight: Tensor, scale: Tensor) -> Tensor:
    if weight.shape[0] != weight.shape[1]:
        return scaled(weight, scale)
    return weight * scale.reshape(1, -1, *[1] * (weight.dim() - 2))


def all_but_last(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([scaled(weight, scale)[:-1], weight[-1:]])


def through(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda weight, scale: scaled(weight, scale).to(dtype).double()


# Each with the number of examples within which it must be found.
MUTANTS: dict[str, tuple[Fold, int]] = {
    "eps dropped": (replace(CORRECT, std=lambda n: n.running_var.sqrt()), 50),
    "eps outside the root": (replace(CORRECT, std=lambda n: n.running_var.sqrt() + n.eps), 50),
    "eps of the default": (replace(CORRECT, std=lambda n: (n.running_var + 1e-5).sqrt()), 50),
    "eps twice": (replace(CORRECT, std=lambda n: (n.running_var + 2 * n.eps).sqrt()), 50),
    "no root": (replace(CORRECT, std=lambda n: n.running_var + n.eps), 50),
    "gamma ignored": (replace(CORRECT, gamma=lambda n: torch.ones_like(n.running_var)), 50),
    "gamma without sign": (replace(CORRECT, gamma=lambda n: CORRECT.gamma(n).abs()), 50),
    "mean dropped": (replace(CORRECT, mean=lambda n: n.running_mean * 0), 50),
    "mean with the wrong sign": (replace(CORRECT, mean=lambda n: -n.running_mean), 50),
    "beta dropped": (replace(CORRECT, beta=lambda n: n.running_mean * 0), 50),
    "beta of one where there is none": (
        replace(CORRECT, beta=lambda n: n.bias if n.affine else n.running_mean**0),
        200,
    ),
    "bias not scaled": (replace(CORRECT, bias=lambda b, m, s, t: b - m * s + t), 50),
    "bias lost": (replace(CORRECT, bias=lambda b, m, s, t: t - m * s), 50),
    "mean lost where there is no bias": (
        replace(CORRECT, bias=lambda b, m, s, t: (b - m) * s + t if b.any() else t),
        200,
    ),
    "weight not scaled": (replace(CORRECT, weight=lambda w, s: w), 50),
    "scale on the wrong axis": (replace(CORRECT, weight=wrong_axis), 50),
    "last channel skipped": (replace(CORRECT, weight=all_but_last), 50),
    "folded through float32": (replace(CORRECT, weight=through(torch.float32)), 100),
    "folded through bfloat16": (replace(CORRECT, weight=through(torch.bfloat16)), 100),
    "a second reader": (without("one reader"), 200),
    "a second call": (without("one call"), 200),
    "training mode": (without("eval"), 200),
    "no statistics": (without("statistics"), 200),
    "a Linear of rank three": (without("rank"), 200),
}


def test_a_correct_fold_passes() -> None:
    folds = 0

    def counted(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
        nonlocal folds
        candidate = CORRECT(model, inputs)
        folds += sum(name.startswith("folded") for name, _ in candidate.named_children())
        return candidate

    check_pass(counted, alphabet=ALPHABET, max_examples=300)

    assert folds > 50


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_killed_within_its_budget(name: str) -> None:
    mutant, budget = MUTANTS[name]

    with pytest.raises(Counterexample) as caught:
        check_pass(mutant, alphabet=ALPHABET, max_examples=budget)
    assert "values differ" in str(caught.value)
    assert len(caught.value.reduced().spec.tokens) <= 4
