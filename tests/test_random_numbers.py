"""Random numbers in a forward: the callers' are kept, and the checks see past them."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import optimizer
from optimizer.core.context import forked_rng
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, texts

np = pytest.importorskip("numpy")
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


NOISY = "x + torch.rand_like(x)"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


@DTYPES
def test_a_pass_that_spoils_a_model_that_draws_is_rolled_back(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [
        replace(each, apply=lambda affine: affine.args[0]) if each.name == "fold_affine" else each
        for each in optimizer.all_passes()
    ]
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: tuple(wrong))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Forward(NOISY)).eval().to(dtype)
    nn.init.constant_(model[1].weight, 1.5)

    with pytest.warns(UserWarning, match="fold_affine"):
        fast = optimizer.optimize(model, ROWS.to(dtype), level=1)

    assert "changed the answer" in fast.report.remarks[0], fast.report.remarks


def test_a_draw_that_torch_makes_on_meta_tensors_is_looked_at_without_drawing() -> None:
    before = torch.get_rng_state()

    optimizer.optimize(Forward("x + torch.normal(0.0, 1.0, ())").eval(), ROWS, check=None)

    assert torch.equal(torch.get_rng_state(), before)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


DRAWS = """
    torch.rand(x.shape, dtype=x.dtype); torch.rand_like(x); torch.randn(x.shape, dtype=x.dtype);
    torch.randn_like(x); torch.randint(0, 9, x.shape) * x; torch.randint_like(x, 9);
    torch.empty_like(x).normal_(1, 2); torch.empty_like(x).uniform_(-1, 1);
    torch.bernoulli(torch.full_like(x, 0.5)); F.dropout(x, 0.5, True); F.dropout1d(x, 0.5, True);
    F.alpha_dropout(x, 0.5, True); F.rrelu(x, 0.1, 0.9, True); x[torch.randperm(x.shape[0])];
    x[torch.multinomial(torch.arange(1.0, 1.0 + x.shape[0]), 2)]
"""
ROWS_OF_100 = torch.linspace(-2.0, 3.0, 400).reshape(100, 4)


def scaled(draw: str, factor: float) -> nn.Module:
    """A draw that is added to what a wrong factor spoils."""
    return Forward(f"y = {draw}; return x[: y.shape[0]] * {factor} + 0.1 * y")


@DTYPES
@pytest.mark.parametrize("draw", texts(DRAWS))
def test_a_wrong_factor_beside_a_draw_is_seen(draw: str, dtype: torch.dtype) -> None:
    factor = 1.2 if dtype is not torch.bfloat16 else 3.0  # the kit takes 1.2 for bad luck there
    x, right, wrong = ROWS_OF_100.to(dtype), scaled(draw, 1.0), scaled(draw, factor)

    optimizer.check(right, scaled(draw, 1.0), x)
    assert_equivalent(right, scaled(draw, 1.0), (x,))
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(right, wrong, x)
    with pytest.raises(AssertionError, match="output 0"):
        assert_equivalent(right, wrong, (x,))


DRAWN = {"torch": lambda: torch.rand(3), "random": random.random, "numpy": lambda: np.random.rand()}


@pytest.mark.parametrize("name", DRAWN)
def test_each_block_draws_the_same_and_leaves_the_generators_as_they_were(name: str) -> None:
    before, drawn = states(), []
    for _ in range(2):
        with forked_rng() as has_drawn:
            assert not has_drawn()
            drawn.append(str(DRAWN[name]()))
            assert has_drawn()

    assert drawn[0] == drawn[1]
    assert states() == before


def test_random_states_are_kept_where_numpy_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    before = random.getstate()

    with forked_rng():
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

    with forked_rng():
        gpu.manual_seed(3)
        state[0] = 4

    assert torch.equal(gpu.get_state(), before)
    assert put.call_args.args[0].tolist() == [3]
