"""Reparametrized layers: what torch computes of them is constant in inference, the rest is left."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import optimizer
from optimizer.testing import untouched
from tests.single_pass import Forward, rows

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "the older weight_norm": nn.utils.weight_norm,
    "the older spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the older ones are deprecated


def normed(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    first, last = KINDS[kind](nn.Conv2d(3, 4, 3)), KINDS[kind](nn.Conv2d(4, 4, 3))
    model = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), last).double()
    model(IMAGE)  # which the spectral norms learn by
    return model.eval()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_computed_once_and_the_batchnorm_folded(kind: str, level: int) -> None:
    model, other = normed(kind), normed(kind, seed=1)
    expected, classes = model(IMAGE), [type(each) for each in model]

    with untouched(model):
        fast: Any = optimizer.optimize(model, IMAGE, level=level, tune_seconds=0.0)

    assert str(fast.report).count("computed once: the weight of") == 2
    assert fast.report.counts()["fold_affine"] == 1
    assert not any("parametrizations" in name for name, _ in fast.named_parameters())
    torch.testing.assert_close(pickle.loads(pickle.dumps(fast))(IMAGE), expected)
    for each in (copy.deepcopy(fast), fast):
        each.load_state_dict(fast.state_dict())
        torch.testing.assert_close(each(IMAGE), expected)
        torch.testing.assert_close(each.refit(other.state_dict())(IMAGE), other(IMAGE))
    assert [type(each) for each in model] == classes
    assert torch.equal(model(IMAGE), expected)


@pytest.mark.parametrize("kind", ["weight_norm", "the older weight_norm"])
def test_a_layer_that_learns_stays_as_it_is(kind: str) -> None:
    with pytest.warns(optimizer.OptimizerWarning, match="training mode"):
        fast = optimizer.optimize(normed(kind).train(), IMAGE, level=1)

    assert "computed once" not in str(fast.report)


@pytest.mark.parametrize("beside", [False, True])
def test_a_parametrization_of_a_users_is_called_each_time(beside):
    """No one call tells all of it."""
    drawn = Forward("x + torch.rand(())")
    layer = parametrizations.weight_norm(nn.Linear(8, 8)) if beside else nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "bias" if beside else "weight", drawn)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    fast = optimizer.optimize(model, torch.ones(2, 8), level=1, check=None)

    assert not torch.equal(fast(torch.ones(2, 8)), fast(torch.ones(2, 8)))


def hooked_beside(layer: Any) -> None:
    layer.register_forward_hook(lambda layer, given, result: result * layer.weight.sum())


def hooked(layer: Any) -> None:
    layer.parametrizations.weight[0].register_forward_hook(lambda step, given, result: result * 2)


ODD = {
    "a hook on the parametrization": ("weight_norm", hooked),
    "a hook beside it": ("weight_norm", hooked_beside),
    "a hook beside the older one": ("the older weight_norm", hooked_beside),
    "still learning": ("spectral_norm", lambda layer: layer.parametrizations.weight.train()),
}


@rows("kind change", ODD)
def test_what_is_more_than_a_weight_stays_as_it_is(kind, change):
    model, other = normed(kind), normed(kind)
    change(model[0])
    change(other[0])

    with untouched(model):
        fast = optimizer.optimize(model, IMAGE, level=1)

    told = str(fast.report).count("computed once: ")
    assert told == 1 or "left as it is" in fast.report.remarks[0]
    for _ in range(3):
        torch.testing.assert_close(fast(IMAGE), other(IMAGE))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "the older weight_norm"])
@torch.no_grad()
def test_what_the_forward_writes_by_another_name_is_seen(kind: str) -> None:
    text = "y = m.a(x) + m.b(x); m.b.weight.data[:, 0] += 1; return y"
    torch.manual_seed(0)
    model = Forward(text, a=KINDS[kind](nn.Linear(4, 4)), b=nn.Linear(4, 4)).eval()
    model.b.weight = next(each for each in model.a.parameters() if each.shape == (4, 4))
    fast, other = optimizer.optimize(model, torch.ones(2, 4), level=0), copy.deepcopy(model)

    for _ in range(3):
        assert torch.equal(fast(torch.ones(2, 4)), other(torch.ones(2, 4)))
