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
from tests.traps.__main__ import FAMILIES, HEAD, line, others, outcome
from tests.traps._catalogue import TRAPS
from tests.traps.elsewhere import NOT_HERE, TESTED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:the model is in training mode"),
]
PAGE = (Path(__file__).parent.parent / "docs" / "traps.md").read_text()
NAMED = {f"{trap.number} {trap.what}": trap for trap in TRAPS}


@pytest.mark.parametrize("name", NAMED)
def test_a_trap_is_answered_as_eager_answers(name: str) -> None:
    """Rewritten where it should be, with no pass rolled back, and nothing that is given changed."""
    trap = NAMED[name]
    model, inputs = trap.build(), copy.deepcopy(trap.calls[0])
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    fast = optimizer.optimize(model, inputs, check="each", level=1)

    undone = ("rolled back", "another answer")
    assert not any(told in remark for remark in fast.report.remarks for told in undone)
    assert bool(fast.report.fired) or not trap.rewritten
    assert line((trap.number, trap.what, outcome(fast.report))) + "\n" in PAGE
    assert_same((dict(state), trap.calls[0]), (dict(model.state_dict()), inputs))
    assert torch.equal(random_state, torch.get_rng_state())
    for call in trap.calls:
        assert_same(observed(model, call), observed(fast, call))


@pytest.mark.parametrize("name", NAMED)
def test_a_trap_without_an_example_is_answered_so_or_refused(name: str) -> None:
    trap = NAMED[name]
    eager = trap.build()

    fast = optimizer.optimize(trap.build(), check=None, level=1)

    for call in trap.calls:
        expected = observed(eager, call)
        with contextlib.suppress(optimizer.InputError):  # an error is no lie
            assert_same(expected, observed(fast, call))


def observed(model: nn.Module, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call returns, leaves in its inputs, and which results share storage with what."""
    inputs = copy.deepcopy(call)
    torch.manual_seed(1)
    with torch.no_grad():
        output = model(*inputs)
    leaves = pytree.tree_leaves((output, inputs))
    places = [storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shared = [[one == other for other in places] for one in places]
    return output, inputs, shared


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def assert_same(expected: Any, actual: Any) -> None:
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    for one, other in zip(*map(pytree.tree_leaves, (expected, actual)), strict=True):
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        torch.testing.assert_close(other, one, equal_nan=True, check_stride=True)
        if one.dtype == torch.float64 and one.numel():
            gap = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
            assert gap <= 1e-9 * max(1.0, float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()))


def test_every_trap_of_the_catalogue_is_somewhere() -> None:
    assert all(family.__doc__ for family in FAMILIES)
    numbers = {trap.number for trap in TRAPS} | TESTED.keys() | NOT_HERE.keys()

    assert sorted(numbers) == list(range(1, 96))


@pytest.mark.parametrize("test", [test for _, test in TESTED.values()])
def test_a_test_that_the_catalogue_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())

    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_is_what_the_command_prints() -> None:
    """The rows of models are held where those are optimized."""
    *rows, end = PAGE.removeprefix(HEAD + "\n").split("\n")

    assert PAGE.startswith(HEAD)
    assert {*map(line, others())} <= {*rows}
    assert len(rows) == len(TRAPS) + len(TESTED) + len(NOT_HERE)
    assert end == ""
    assert (numbers := [int(row.split()[1]) for row in rows]) == sorted(numbers)
