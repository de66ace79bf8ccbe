"""A call that repeats another has the facts that running it would give, or is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import models
import optimizer
from optimizer import _observation
from optimizer._alike import Given, Outcome
from optimizer._effects import NOTHING
from optimizer._observation import Fact, Facts
from optimizer._trees import storages_in, tensors_in

ROWS = torch.linspace(-2.0, 3.0, 24).reshape(2, 3, 4)
CALLS: list[str] = []
for called in ("plain", "both", "drawn", "counted", "reshaped", "turned", "boxed", "own"):
    fx.wrap(called)


def plain(x: Tensor, *rest: Any) -> Any:
    CALLS.append("plain")
    return x.exp().transpose(1, 2), len(rest)


def both(x: Tensor, other: Tensor) -> Any:
    CALLS.append("both")
    return other.add_(1) if other is x else (x[:, 1:], other.exp())


def drawn(x: Tensor) -> Tensor:
    CALLS.append("drawn")
    return torch.rand_like(x)


def counted(x: Tensor) -> Tensor:
    CALLS.append("counted")
    return x[x > 0]


def reshaped(x: Tensor) -> Tensor:
    CALLS.append("reshaped")
    return x.unsqueeze_(0)


def turned(x: Tensor) -> Tensor:
    CALLS.append("turned")
    return x.conj()


def own(x: Tensor) -> Tensor:
    CALLS.append("own")
    return x.exp()


def boxed(x: Tensor) -> Any:
    CALLS.append("boxed")
    return Size(len(x))


for function in (plain, both, drawn, counted, reshaped, turned, boxed):
    function.__module__ = "torchvision.ops"  # of which none keeps anything


class Size(int):
    """A number of the user's own."""


FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "alike": (lambda m, x: (plain(x), plain(x * 2), plain(x * 3)), 1),
    "of other sizes": (lambda m, x: (plain(x), plain(x[:1]), plain(x.transpose(0, 1))), 3),
    "of another dtype": (lambda m, x: (plain(x), plain(x.double())), 2),
    "with True for 1": (lambda m, x: (plain(x, 1), plain(x, True)), 2),
    "with slices": (lambda m, x: (plain(x, slice(1)), plain(x * 2, slice(1))), 1),
    "with an object": (lambda m, x: (plain(x, Size(1)), plain(x * 2, Size(1))), 2),
    "of one tensor": (lambda m, x: (both(x, x * 2), both(y := x * 3, y)), 2),
    "views": (lambda m, x: (both(x, x * 2), both(y := x * 3, x * 5), y), 1),
    "of one storage": (lambda m, x: (both(x, x * 2), both(y := x * 3, y[:])), 2),
    "of one tensor, and views": (lambda m, x: (both(y := x * 2, y), both(z := x * 3, z[:])), 2),
    "of a conjugate": (lambda m, x: (both(y := x + 1j, y * 2), both((y * 3).conj(), y * 2)), 2),
    "that yield an object": (lambda m, x: (boxed(x), boxed(x * 2)), 2),
    "of the user's": (lambda m, x: (own(x), own(x * 2)), 2),
    "writes": (lambda m, x: (both(y := x * 2, y), both(z := x * 3, z), y.exp(), z.exp()), 1),
    "random": (lambda m, x: (drawn(x), drawn(x * 2)), 1),
    "of as many as data say": (lambda m, x: (counted(x), counted(x * 2)), 1),
    "reshaped": (lambda m, x: (reshaped(y := x * 2), reshaped(z := x * 3), y.sin(), z.sin()), 2),
    "conjugate": (lambda m, x: (turned(y := x + 1j), turned(y * 2)), 2),
}


def facts_of(model: nn.Module, inputs: Any) -> list[Any]:
    """What is known of each node, with storages by the order in which they are met."""
    found = optimizer.capture(model, inputs)
    places: dict[int, int] = {}
    return [_told(node.meta["fact"], places) for node in found.graph.nodes]


def _told(fact: Fact, places: dict[int, int]) -> Any:
    def place(storage: int) -> int:
        return places.setdefault(storage, len(places))

    tensors = [
        (place(*storages_in(each)), each.shape, each.stride(), each.dtype, each.is_conj())
        for each in tensors_in(fact.value)
    ]
    touched = [
        sorted(place(each) for each in sorted(some)) for some in (fact.storages, fact.writes)
    ]
    return tensors, touched, fact.random, fact.rank_varies, fact.size_varies, fact.error


class Calls(nn.Module):
    """What a function computes."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observation, "is_slow", lambda called: False)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_call_is_run_once_for_all_that_are_alike(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, runs = FORWARDS[name]
    CALLS.clear()
    found = facts_of(Calls(function), ROWS)
    assert len(CALLS) == runs
    without(monkeypatch)

    assert found == facts_of(Calls(function), ROWS)


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "convnext_tiny"])
def test_a_network_has_the_same_facts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = models.load(name)
    found = facts_of(workload.module, workload.example_inputs)
    without(monkeypatch)

    assert found == facts_of(workload.module, workload.example_inputs)


def test_layers_with_other_settings_are_not_alike() -> None:
    layers = [nn.MultiheadAttention(4, heads, batch_first=True).eval() for heads in (2, 2, 1)]
    twin = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    twin.out_proj = layers[0].out_proj

    keys = [Given((each, ROWS), Facts().to_meta).key for each in (*layers, twin)]

    assert keys[0] == keys[1] == keys[3]
    assert keys[0] != keys[2]


class Noted(nn.Module):
    """A layer of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append("noted")
        return x.exp()


def of_the_users(member: Any) -> nn.Module:
    layer = nn.MultiheadAttention(4, 1)
    layer.member = member
    return layer


@pytest.mark.parametrize("member", [Noted(), [Noted()], own, Noted, Size(1)])
def test_layers_that_hold_what_is_the_users_are_like_no_others(member: Any) -> None:
    with pytest.raises(TypeError, match="the user's"):
        Given(of_the_users(member), Facts().to_meta)


@pytest.mark.parametrize("member", [nn.ReLU(), [nn.ReLU()], F.relu, nn.ReLU, 1, torch.relu])
def test_layers_that_hold_what_is_torchs_may_be_alike(member: Any) -> None:
    keys = [Given(of_the_users(member), Facts().to_meta).key for _ in range(2)]

    assert keys[0] == keys[1]


def test_a_layer_that_holds_itself_is_run() -> None:
    model = Calls(lambda m, x: m.layer(x, x, x)[0])
    model.layer = nn.MultiheadAttention(4, 1).eval()
    model.layer.holders = [model.layer]
    found = optimizer.capture(model, ROWS[0])

    assert not any(node.meta["fact"].error for node in found.graph.nodes)


def test_layers_that_share_a_weight_are_not_like_others() -> None:
    tied = nn.MultiheadAttention(4, 1)
    tied.in_proj_bias = nn.Parameter(tied.in_proj_weight.detach()[:, 0])

    keys = [Given(each, Facts().to_meta).key for each in (tied, nn.MultiheadAttention(4, 1))]

    assert keys[0] != keys[1]


def test_what_concerns_a_tensor_that_is_not_given_is_not_repeated() -> None:
    facts = Facts()
    given, other = Given(facts.to_meta(ROWS), facts.to_meta), facts.to_meta(torch.ones(3))

    Outcome(given, torch.empty(2, device="meta"), NOTHING, facts._lasts)
    for value, effect in ((other, NOTHING), (None, NOTHING._replace(writes=storages_in(other)))):
        with pytest.raises(TypeError, match="more than it was given"):
            Outcome(given, value, effect, facts._lasts)


def test_an_activation_that_is_repeated() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return F.gelu(x * 2) + F.gelu(x * 3)

    nodes = optimizer.capture(Calls(forward), ROWS).graph.nodes
    one, other = (node for node in nodes if node.target is F.gelu)

    assert one.meta["fact"].storages.isdisjoint(other.meta["fact"].storages)
