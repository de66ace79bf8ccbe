"""Each trap of the catalogue: what eager does, call by call, and rewritten only where it may be."""

from __future__ import annotations

import ast
import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.testing import untouched
from tests.traps import HEAD, IMAGE, NOT_HERE, TESTED, TRAPS, line, number, others, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:the model is in training mode"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated"),
]
PAGE = (Path(__file__).parent.parent / "docs" / "traps.md").read_text()


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_answered_as_eager_answers(name: str) -> None:
    """Rewritten where it should be, with no pass rolled back, and nothing that is given changed."""
    model, calls = TRAPS[name].build(), [*TRAPS[name].arguments()]
    inputs, random_state = copy.deepcopy(calls[0]), torch.get_rng_state()

    with untouched(model):
        fast = optimizer.optimize(model, inputs, check="each", level=1, tune_seconds=0)

    undone = ("rolled back", "another answer")
    assert not any(told in remark for remark in fast.report.remarks for told in undone)
    assert line(name, outcome(fast.report)) + "\n" in PAGE
    assert_same(calls[0], inputs)
    assert torch.equal(random_state, torch.get_rng_state())
    for call in calls:
        assert_same(observed(model, call), observed(fast, call))


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_without_an_example_is_answered_so_or_refused(name: str) -> None:
    eager = TRAPS[name].build()

    fast = optimizer.optimize(TRAPS[name].build(), check=None, level=1)

    for call in TRAPS[name].arguments():
        expected = observed(eager, call)
        with contextlib.suppress(optimizer.InputError):  # an error is no lie
            assert_same(expected, observed(fast, call))


def observed(model: nn.Module, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call returns, leaves in its inputs, and which results share storage with what."""
    inputs = copy.deepcopy(call)
    torch.manual_seed(1)
    with torch.no_grad():
        output = model(*inputs)
    tensors = [x for x in pytree.tree_leaves((output, inputs)) if isinstance(x, torch.Tensor)]
    places = [each.untyped_storage().data_ptr() for each in tensors]
    return output, inputs, [[one == other for other in places] for one in places]


def assert_same(expected: Any, actual: Any) -> None:
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    for one, other in zip(*map(pytree.tree_leaves, (expected, actual)), strict=True):
        double = getattr(one, "dtype", None) == torch.float64
        near = {"rtol": 1e-9, "atol": 1e-9} if double else {}
        torch.testing.assert_close(other, one, equal_nan=True, check_stride=True, **near)


@pytest.mark.parametrize("test", TESTED.values())
def test_a_test_that_the_catalogue_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())

    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_every_trap_as_the_command_prints_it() -> None:
    """The rows of models are held where those are optimized."""
    *rows, end = PAGE.removeprefix(HEAD + "\n").split("\n")
    numbers = [int(row.split()[1]) for row in rows]

    assert PAGE.startswith(HEAD)
    assert {text for _, text in others()} <= {*rows}
    assert sorted(map(number, (*TRAPS, *TESTED, *NOT_HERE))) == numbers
    assert sorted({*numbers}) == [*range(1, 96)]
    assert end == ""


# Traps that are not the answer of one model: what a result is, and when it is made.
SMALL = IMAGE[:, :3].float()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.init.normal_(layers[1].running_mean)
    return layers.eval()


def test_autocast_around_the_result_gives_the_dtype_of_the_model(model: nn.Module) -> None:
    fast, truth = optimizer.optimize(model, SMALL, level=1), model(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(SMALL), fast(SMALL)

    assert actual.dtype == expected.dtype == torch.bfloat16
    assert torch.dist(actual, truth) <= 2 * torch.dist(expected, truth)


def test_a_result_is_not_overwritten_by_the_next_call(model: nn.Module) -> None:
    fast = optimizer.optimize(model, SMALL, level=1)
    first = fast(SMALL)
    kept = first.clone()
    fast(-SMALL)

    assert torch.equal(first, kept)


def test_what_is_made_in_inference_mode_is_no_inference_tensor(model: nn.Module) -> None:
    with torch.inference_mode():
        fast = optimizer.optimize(model, SMALL, level=1)

    assert not any(parameter.is_inference() for parameter in fast.parameters())
    fast(SMALL.clone().requires_grad_()).sum().backward()


def test_the_code_is_that_of_the_graph(model: nn.Module) -> None:
    fast = optimizer.optimize(model, SMALL, level=1)

    assert fast.code == copy.deepcopy(fast).graph.python_code("self").src
