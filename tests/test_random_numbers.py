"""Random numbers in a forward: their seeds are kept, and the checks see past them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.context import own_random_numbers
from optimizer.testing import assert_equivalent
from optimizer.testing._numbers import Recorded

np = pytest.importorskip("numpy")
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Seeding(nn.Module):
    """Draws within or after something that touches a generator."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.generator = draw, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self, x)


def forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noise = torch.rand_like(x)
    return x + noise + torch.rand_like(x)


def forked_only(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(4)
    return x + noise - torch.rand(4)


def set_back(m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand(4)
    torch.set_rng_state(state)
    return x + noise - torch.rand(4)


def of_the_default_generator(m: Any, x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(5)
    noise = F.dropout(x, 0.5, True)
    torch.default_generator.set_state(state)
    return noise


def after(seed: Callable[[], object]) -> Callable[[Any, Tensor], Tensor]:
    def draw(m: Any, x: Tensor) -> Tensor:
        seed()
        return x + torch.randn(4)

    return draw


def with_a_generator(m: Any, x: Tensor) -> Tensor:
    return x + torch.rand(4, generator=torch.Generator().manual_seed(0))


def with_its_own(m: Any, x: Tensor) -> Tensor:
    return x + torch.empty_like(x).uniform_(generator=m.generator.manual_seed(4))


def reseeding_its_own(m: Any, x: Tensor) -> Tensor:
    return x + torch.rand(4, generator=m.generator)


def seeded_in_python(m: Any, x: Tensor) -> Tensor:
    random.seed(0)
    np.random.seed(0)
    return x * random.random() + np.random.rand()


class Noisy(nn.Module):
    """Draws, and seeds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


SEEDING = {
    "fork_rng": forked,
    "fork_rng without a seed": forked_only,
    "set_rng_state": set_back,
    "the default generator": of_the_default_generator,
    "manual_seed": after(lambda: torch.manual_seed(0)),
    "random.manual_seed": after(lambda: torch.random.manual_seed(0)),
    "random.set_rng_state": after(lambda: torch.random.set_rng_state(torch.get_rng_state())),
    "seed": after(torch.seed),
    "initial_seed": after(torch.initial_seed),
    "a generator": with_a_generator,
    "a generator that the module holds": with_its_own,
    "a generator that the module holds, going on": reseeding_its_own,
    "Python's and numpy's": seeded_in_python,
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", SEEDING)
def test_what_touches_a_generator_is_left_as_it_is(name: str, depth: int) -> None:
    model: nn.Module = Seeding(SEEDING[name])
    for _ in range(depth):
        model = nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 4))
    model = model.eval()

    random.seed(7)

    fast = optimizer.optimize(model, ROWS, level=0)

    assert fast.report.remarks[0].startswith("left as it is: it "), fast.report
    state = torch.get_rng_state()
    if name != "seed":
        assert torch.equal(called_from(state, fast), called_from(state, model))


def called_from(state: Tensor, module: nn.Module) -> Tensor:
    for own in module.modules():
        if hasattr(own, "generator"):
            own.generator.manual_seed(3)
    torch.set_rng_state(state)
    with torch.no_grad():
        return module(ROWS) + module(ROWS)


def test_a_draw_that_seeds_nothing_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Noisy()).eval()

    graph = optimizer.capture(model, ROWS)

    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pass_that_spoils_a_model_that_draws_is_rolled_back(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [
        replace(each, apply=lambda affine: affine.args[0]) if each.name == "fold_affine" else each
        for each in optimizer.all_passes()
    ]
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: tuple(wrong))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Noisy()).eval().to(dtype)
    nn.init.constant_(model[1].weight, 1.5)

    with pytest.warns(UserWarning, match="fold_affine"):
        fast = optimizer.optimize(model, ROWS.to(dtype), level=1)

    assert "changed the answer" in fast.report.remarks[0], fast.report.remarks


def test_the_random_state_is_the_callers() -> None:
    for draw in (seeded_in_python, forked, of_the_default_generator, with_a_generator):
        model = Seeding(draw).eval()
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())

        optimizer.optimize(model, ROWS)
        optimizer.check(model, model, ROWS)

        after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]


class Added(nn.Module):
    """A draw that torch makes on meta tensors too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.normal(0.0, 1.0, ())


def test_a_draw_is_looked_at_without_drawing() -> None:
    before = torch.get_rng_state()

    optimizer.optimize(Added().eval(), ROWS, check=None)

    assert torch.equal(torch.get_rng_state(), before)


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(x.shape[0])]


def chosen(x: Tensor) -> Tensor:
    return x[torch.multinomial(torch.arange(1.0, 1.0 + x.shape[0]), 2)]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 9, x.shape) * x,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "dropout2d": lambda x: F.dropout1d(x, 0.5, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, True),
    "randperm": permuted,
    "multinomial": chosen,
}
ROWS_OF_100 = torch.linspace(-2.0, 3.0, 400).reshape(100, 4)


class Scaled(nn.Module):
    """A draw that is added to what a wrong factor spoils."""

    def __init__(self, draw: Callable[[Tensor], Tensor], factor: float) -> None:
        super().__init__()
        self.draw, self.factor = draw, factor

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw(x)
        return x[: drawn.shape[0]] * self.factor + 0.1 * drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", DRAWS)
def test_a_wrong_factor_beside_a_draw_is_seen(name: str, dtype: torch.dtype) -> None:
    factor = 1.2 if dtype is not torch.bfloat16 else 3.0  # the kit takes 1.2 for bad luck there
    x, right, wrong = ROWS_OF_100.to(dtype), Scaled(DRAWS[name], 1.0), Scaled(DRAWS[name], factor)

    optimizer.check(right, Scaled(DRAWS[name], 1.0), x)
    assert_equivalent(right, Scaled(DRAWS[name], 1.0), (x,))
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(right, wrong, x)
    with pytest.raises(AssertionError, match="output 0"):
        assert_equivalent(right, wrong, (x,))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_where_it_drops(dropout: float) -> None:
    x = torch.randn(1, 2, 4, 4)

    with Recorded() as numbers, own_random_numbers() as has_drawn:
        F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
        assert has_drawn() is bool(dropout)

    assert bool(numbers.drawn) is bool(dropout)


DRAWN = {"torch": lambda: torch.rand(3), "random": random.random, "numpy": lambda: np.random.rand()}


@pytest.mark.parametrize("name", DRAWN)
def test_each_block_draws_the_same_and_leaves_the_generators_as_they_were(name: str) -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    drawn = []
    for _ in range(2):
        with own_random_numbers() as has_drawn:
            assert not has_drawn()
            drawn.append(str(DRAWN[name]()))
            assert has_drawn()

    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert drawn[0] == drawn[1]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_random_states_are_kept_where_numpy_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    before = random.getstate()

    with own_random_numbers():
        random.random()

    assert random.getstate() == before


def test_the_generators_of_gpus_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, state = torch.Generator(), torch.tensor([3], dtype=torch.uint8)
    put = MagicMock()
    monkeypatch.setattr("torch.cuda.default_generators", (gpu,))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: state.clone())
    monkeypatch.setattr("torch.mps.set_rng_state", put)
    before = gpu.get_state()

    with own_random_numbers():
        gpu.manual_seed(3)
        state[0] = 4

    assert torch.equal(gpu.get_state(), before)
    assert put.call_args.args[0].tolist() == [3]
