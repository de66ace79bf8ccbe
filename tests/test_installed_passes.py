"""Passes from elsewhere: given to `only`, or declared as an entry point by an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

import optimizer
from optimizer.toolkit import arg, call, require, rewrite
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
    folder = tmp_path / "elsewhere-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[optimizer.passes]\ngood = {__name__}:fold_double_negation\nbad = no_such_module:a_pass\n"
        "wrong = math:pi\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    optimizer.all_passes.cache_clear()
    yield folder
    optimizer.all_passes.cache_clear()


def test_only_takes_passes_of_ones_own():
    fused = {"fold_double_negation": 1, "fuse_linear_relu": 1}

    assert counts(only=[fold_double_negation]) == {"fold_double_negation": 1}
    assert counts(only=fold_double_negation) == {"fold_double_negation": 1}
    assert counts(only=[fold_double_negation, "fuse_linear_relu"]) == fused
    assert counts(only=[*optimizer.all_passes(), fold_double_negation])["fold_double_negation"] == 1
    assert "fold_double_negation" not in counts()


def test_a_pass_of_ones_own_is_held_to_the_level_and_refuses_as_any_other():
    returned = Forward("torch.neg(torch.neg(x))").eval()

    fast = optimizer.optimize(returned, X, only=[fold_double_negation], level=0)

    assert [refusal.reason for refusal in fast.report.refused] == ["the result is returned"]


@pytest.mark.filterwarnings("ignore:.*gives no pass")
def test_a_pass_of_an_installed_package_runs_as_those_that_are_here(install: Path) -> None:
    names = [each.name for each in optimizer.all_passes()]

    assert names.count("fold_double_negation") == 1
    assert names.index("fold_double_negation") < names.index("fuse_linear_relu")
    assert counts() == {"fold_double_negation": 1, "fuse_linear_relu": 1}
    assert counts(disable=["fold_double_negation"]) == {"fuse_linear_relu": 1}
    assert "the value itself" in optimizer.explain("fold_double_negation")


def test_what_cannot_be_loaded_costs_a_warning_and_no_more(install: Path) -> None:
    with pytest.warns(UserWarning, match="gives no pass, and is left out") as warned:
        passes = optimizer.all_passes()

    assert any(each.name == "fold_double_negation" for each in passes)
    assert any("no_such_module" in str(each.message) for each in warned)
    assert any("math:pi" in str(each.message) for each in warned)
