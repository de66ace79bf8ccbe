"""Passes from elsewhere: given to `only`, or declared as an entry point by an installed package."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import optimizer
from optimizer.toolkit import arg, call, require, rewrite
from tests.repository import declared
from tests.single_pass import Forward

X = torch.randn(4, 3)
TWICE = call(torch.neg, args=(call(torch.neg, name="inner"),), name="outer")


@rewrite(TWICE, numerics="exact", phase="simplify")
def fold_double_negation(inner: fx.Node, outer: fx.Node) -> fx.Node:
    """Replace the negation of a negation by the value itself."""
    require(all(reader.op != "output" for reader in outer.users), "the result is returned")
    value: fx.Node = arg(inner, 0)
    return value


def counts(**settings):
    model = Forward("m.linear(torch.neg(torch.neg(x))).relu()", linear=nn.Linear(3, 3)).eval()
    return optimizer.optimize(model, X, check="each", **settings).report.counts()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A folder on the path that holds a package with entry points, of which two are broken."""
    own = f"{__name__}:fold_double_negation"
    declared(tmp_path, f"[optimizer.passes]\ngood = {own}\nbad = no_such.a:b\nwrong = math:pi\n")
    monkeypatch.syspath_prepend(tmp_path)
    optimizer.all_passes.cache_clear()
    yield
    optimizer.all_passes.cache_clear()


def test_only_takes_passes_of_ones_own():
    fused = {"fold_double_negation": 1, "fuse_linear_relu": 1}

    assert counts(only=[fold_double_negation]) == {"fold_double_negation": 1}
    assert counts(only=fold_double_negation) == {"fold_double_negation": 1}
    assert counts(only=[fold_double_negation, "fuse_linear_relu"]) == fused
    assert counts(only=[*optimizer.all_passes(), fold_double_negation])["fold_double_negation"] == 1
    assert "fold_double_negation" not in counts()


def test_a_pass_of_ones_own_is_held_to_the_level_and_refuses_as_any_other():
    model = Forward("torch.neg(torch.neg(x))").eval()
    fast = optimizer.optimize(model, X, only=[fold_double_negation], level=0)

    assert [refusal.reason for refusal in fast.report.refused] == ["the result is returned"]


@pytest.mark.filterwarnings("ignore:.*gives no pass")
def test_a_pass_of_an_installed_package_runs_as_those_that_are_here(install: None) -> None:
    names = [each.name for each in optimizer.all_passes()]

    assert names.count("fold_double_negation") == 1
    assert names.index("fold_double_negation") < names.index("fuse_linear_relu")
    assert counts() == {"fold_double_negation": 1, "fuse_linear_relu": 1}
    assert counts(disable=["fold_double_negation"]) == {"fuse_linear_relu": 1}
    assert "the value itself" in optimizer.explain("fold_double_negation")


def test_what_cannot_be_loaded_costs_a_warning_and_no_more(install: None) -> None:
    with pytest.warns(UserWarning, match="gives no pass, and is left out") as warned:
        passes = optimizer.all_passes()

    assert any(each.name == "fold_double_negation" for each in passes)
    for text in ("no_such", "math:pi"):
        assert any(text in str(each.message) for each in warned)
