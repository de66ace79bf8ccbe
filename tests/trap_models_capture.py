"""More models of `test_traps.py`: what recording a forward gets wrong if it is not careful."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.trap_models import ROWS, TRAPS, Trap, trap

__all__ = ["TRAPS"]  # those of both files

SQUARE = torch.linspace(-2.0, 2.0, 16).reshape(4, 4)


def called(
    *calls: tuple[Any, ...], outcome: str = "left alone"
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module class, to be called with each tuple of arguments in turn."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        TRAPS[kind.__name__] = Trap(kind, calls, outcome)
        return kind

    return register


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        nn.init.normal_(self.norm.running_mean)


@called(({"x": ROWS},), ({"x": ROWS[:2]},))
class RankInsideADict(Pair):
    def forward(self, given: Any) -> Any:
        return self.norm(self.layer(given["x"]))


@called((ROWS, 0), (ROWS, 2), outcome="rewritten")
class MaskBesideAnInteger(nn.Module):
    def forward(self, x: Any, n: Any) -> Any:
        y = x * n + 1
        y[y < 0] = 0.0
        return y


@called((ROWS, SQUARE[:3]), (SQUARE, SQUARE), outcome="rewritten")
class InputsThatMayBeOneTensor(nn.Module):
    def forward(self, x: Any, z: Any) -> Any:
        mask, y = x > 0, x.clone()
        z.add_(1.0)
        y[mask] = 0.0
        return y


class OpaqueView(nn.Module):
    def forward(self, y: Any) -> Any:
        return y if float(y.sum()) > 1e9 else y.view(-1)


@called((ROWS,))
class ViewMadeByOpaqueCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = OpaqueView()

    def forward(self, x: Any) -> Any:
        y = x * 2
        view = self.child(y)
        y[y < 0] = 0.0
        return view


@called((ROWS, {}))
class CacheInADict(nn.Module):
    def forward(self, x: Any, cache: Any) -> Any:
        cache["k"] = x * 2
        return x + 1


@called((ROWS, []))
class CacheInAList(nn.Module):
    def forward(self, x: Any, cache: Any) -> Any:
        cache.append(x * 2)
        return x + 1


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length)


@trap(ROWS, ROWS)
def a_cached_function_makes_a_constant(self: Any, x: Any) -> Any:
    return x + positions(4)


KEPT: dict[int, torch.Tensor] = {}


@trap(ROWS, ROWS)
def a_global_keeps_a_constant(self: Any, x: Any) -> Any:
    if 4 not in KEPT:
        KEPT[4] = torch.arange(4)
    return x + KEPT[4]


@trap(ROWS, weight=lambda: nn.Parameter(torch.ones(4)))
def a_linear_has_a_vector_for_a_weight(self: Any, x: Any) -> Any:
    return F.linear(x, self.weight)


@trap(ROWS)
def it_asks_for_an_attribute_that_tensors_lack(self: Any, x: Any) -> Any:
    return x * 2 if hasattr(x, "tensors") else x * 3


@trap(ROWS)
def it_asks_torch_whether_it_is_a_tensor(self: Any, x: Any) -> Any:
    return x * 2 if torch.is_tensor(x) else x * 3


@called((ROWS,))
class IsinstanceBelowADecorator(nn.Module):
    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return x * 2 if isinstance(x, torch.Tensor) else x * 3


@trap(ROWS)
def it_looks_a_rank_up_in_a_set(self: Any, x: Any) -> Any:
    return x * 2 if x.dim() in {2, 3} else x * 3


@trap(ROWS)
def it_looks_a_rank_up_in_a_dict(self: Any, x: Any) -> Any:
    return x * {2: 2.0, 3: 3.0}.get(x.dim(), 1.0)


@trap(ROWS)
def an_error_of_the_tracer_is_caught(self: Any, x: Any) -> Any:
    try:
        length = len(x)
    except Exception:
        length = 0
    return x * length


@trap(ROWS)
def an_error_of_the_tracer_is_suppressed(self: Any, x: Any) -> Any:
    factor = 1
    with contextlib.suppress(Exception):
        factor = int(x.sum()) + 7
    return x * factor


@trap(ROWS)
def it_asks_for_a_gradient(self: Any, x: Any) -> Any:
    return x * 2 if x.grad is None else x * 3


@trap(ROWS)
def it_seeds_torch(self: Any, x: Any) -> Any:
    torch.manual_seed(5)
    return x + torch.rand_like(x)


@trap(ROWS)
def it_draws_from_python(self: Any, x: Any) -> Any:
    return x * (random.random() > 2.0)


@trap(ROWS, ROWS, state=lambda: {"a": {"n": 0}})
def it_counts_in_a_nested_dict(self: Any, x: Any) -> Any:
    self.state["a"]["n"] += 1
    return x * self.state["a"]["n"]


@trap(ROWS, ROWS, state=collections.deque)
def it_counts_in_a_deque(self: Any, x: Any) -> Any:
    self.state.append(1)
    return x * len(self.state)


@trap(ROWS, ROWS, state=itertools.count)
def it_counts_with_itertools(self: Any, x: Any) -> Any:
    return x * next(self.state)


@trap(ROWS, ROWS)
def it_writes_a_tensor_that_it_makes(self: Any, x: Any) -> Any:
    total = torch.zeros(4)
    total.add_(x[0])
    return total


@trap(ROWS, ROWS)
def it_writes_a_tensor_that_a_class_makes(self: Any, x: Any) -> Any:
    total = torch.Tensor([0.0, 0.0, 0.0, 0.0])
    total.add_(x[0])
    return total


@trap(torch.arange(4))
def it_shifts_in_place(self: Any, x: Any) -> Any:
    x <<= 1
    x >>= 2
    return x


@called((ROWS,))
class CallOfItsOwn(nn.Module):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + 1

    def forward(self, x: Any) -> Any:
        return x * 2


@trap(ROWS, ROWS, weight=lambda: nn.Parameter(torch.ones(4)))
def it_writes_a_parameter_without_gradients(self: Any, x: Any) -> Any:
    with torch.no_grad():
        self.weight.add_(1)
    return x * self.weight


@trap(torch.arange(4), layer=lambda: nn.Embedding(6, 3, max_norm=0.1))
def an_embedding_renormalizes_its_weight(self: Any, x: Any) -> Any:
    return self.layer(x)


@called((ROWS,))
class ReturnsADefaultdict(nn.Module):
    def forward(self, x: Any) -> Any:
        return collections.defaultdict(list, a=x * 2)
