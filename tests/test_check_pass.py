"""`check_pass` fails where it checked nothing, and sees each guard of the pages' passes go."""

from __future__ import annotations

import copy
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError, PassError
from optimizer.testing import Counterexample, Motif, Optimize, Spec, check_pass, check_spec
from optimizer.testing._check_pass import is_changed
from optimizer.testing._lowering import Lower
from optimizer.toolkit import arg, call, insert_function, rewrite

ROOT = Path(__file__).parents[1]
PAGE, OWN = ROOT / "docs" / "passes.md", ROOT / "docs" / "own_pass"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PASS, (CHECK,) = BLOCKS[0], [block for block in BLOCKS if "check_pass(" in block]
OWN_PASS = (OWN / "double_negation.py").read_text()
FUSE = Optimize(only=("fuse_linear_relu",))


def guards(code: str) -> list[str]:
    return [line for line in code.splitlines(keepends=True) if line.startswith("    require(")]


def run_page(code: str) -> None:
    exec(compile(code + CHECK, str(PAGE), "exec"), {"__name__": "page"})


def test_the_page_has_three_guards() -> None:
    assert len(guards(PASS)) == 3


@pytest.mark.integration
@pytest.mark.parametrize("guard", guards(PASS))
def test_the_check_of_the_page_sees_each_guard_go(guard: str) -> None:
    with pytest.raises(Counterexample):
        run_page(PASS.replace(guard, ""))


def test_the_check_of_the_page_sees_that_its_pass_no_longer_fires() -> None:
    broken = PASS.replace("    return value\n", "    return None\n")
    assert broken != PASS

    with pytest.raises(PassError, match=r"checked nothing.*motif 'neg_torch neg_torch linear'"):
        run_page(broken)


@pytest.mark.integration
def test_the_tests_of_a_pass_in_a_repository_of_its_own_pass(tmp_path: Path) -> None:
    copied = shutil.copytree(OWN, tmp_path / "own_pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copied), str(ROOT)])}
    ran = subprocess.run(command, cwd=copied, env=environment, capture_output=True, text=True)

    assert "4 passed" in ran.stdout


@pytest.mark.integration
@pytest.mark.parametrize("guard", guards(OWN_PASS))
def test_they_see_each_guard_go(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = ModuleType("double_negation")
    exec(OWN_PASS.replace(guard, ""), vars(without))
    monkeypatch.setitem(sys.modules, "double_negation", without)
    tests = runpy.run_path(str(OWN / "tests" / "test_double_negation.py"))

    with pytest.raises(Counterexample):
        tests["test_it_keeps_the_answer"]()


def of_negations(change: Any) -> Any:
    """A pass that does something to each negation."""
    return rewrite(call(torch.neg, name="node"), numerics="exact", phase="simplify")(change)


@of_negations
def endless(node: fx.Node) -> fx.Node:
    """Replace a negation by itself."""
    return insert_function(node, torch.neg, (arg(node, 0),))


@of_negations
def raising(node: fx.Node) -> fx.Node:
    """Raise an error."""
    raise RuntimeError("planted")


@of_negations
def wrong(node: fx.Node) -> fx.Node:
    """Take a negation for an absolute value."""
    return insert_function(node, torch.abs, (arg(node, 0),))


@pytest.mark.parametrize("each", [endless, raising], ids=str)
def test_a_pass_that_is_rolled_back_does_not_pass(each: Any) -> None:
    def silent(model, inputs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return loud(model, inputs)

    def loud(model, inputs):
        return optimizer.optimize(model, inputs, level=1, only=[each], check=None)

    for subject in (each, loud, silent):
        with pytest.raises(Counterexample, match="rolled back"):
            check_pass(subject, "neg_torch relu")


def test_a_warning_of_this_package_does_not_pass() -> None:
    def warns(model, inputs):
        warnings.warn("planted", optimizer.OptimizerWarning, stacklevel=2)
        return Optimize(level=0)(model, inputs)

    with pytest.raises(Counterexample, match="OptimizerWarning: planted"):
        check_spec(Spec(("dup", "linear", "drop")), warns)


def test_a_subject_that_leaves_its_motif_or_all_models_alone_does_not_pass() -> None:
    for same in (
        lambda model, inputs: copy.deepcopy(model),
        lambda model, inputs: fx.symbolic_trace(model),
        Optimize(only=("fold_affine",)),
    ):
        with pytest.raises(PassError, match="any model of its motif 'linear relu'"):
            check_pass(same, "linear relu")
    with pytest.raises(PassError, match="motif 'linear tanh'"):  # each program must be rewritten
        check_pass(FUSE, Motif(("linear relu", "linear tanh")))
    with pytest.raises(PassError, match="any of 5 models"):
        check_pass(FUSE, "linear relu", alphabet=["tanh"], max_examples=5)
    assert check_pass(FUSE, "linear relu", max_examples=5) is None


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match=r"no word 'linaer': try linear, .*TOKENS holds all"):
        check_pass(Optimize(), "relu linaer")
    with pytest.raises(InputError, match=r"no word 'xyzzy': try [a-z]"):
        check_pass(Optimize(), "xyzzy")


def doubled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data *= 2
    return model


def retraced(model: nn.Module) -> nn.Module:
    traced = fx.symbolic_trace(model)
    for node in traced.graph.find_nodes(op="call_function", target=F.relu):
        node.target = torch.relu
    traced.recompile()
    return traced


@pytest.mark.parametrize("entry", ["module", "graph"])
def test_what_counts_as_a_change(entry: Any) -> None:
    spec = Spec(("linear", "relu_F"), entry=entry)
    opaque = Spec(("linear_opaque", "mask"))  # cannot be traced, and is told by its modules
    model, inputs = spec.build(), spec.inputs()

    for same in (copy.deepcopy(model), spec.build(torch.float32), Optimize(only=())(model, inputs)):
        assert not is_changed(spec, same)
    changed = (retraced(model), nn.Sequential(model), FUSE(model, inputs), Lower()(model, inputs))
    for other in (*changed, doubled(model)):
        assert is_changed(spec, other)
    assert not is_changed(opaque, opaque.build())
    assert is_changed(opaque, nn.Sequential(opaque.build()))


def test_a_wrong_pass_is_told_with_its_place_the_verdict_and_the_test_first() -> None:
    with pytest.raises(Counterexample) as caught:
        check_pass(wrong, "neg_torch relu")

    verdict, _, rest = str(caught.value).partition("\n")
    program, _, details = rest.partition("\n# ")
    assert verdict.startswith("AssertionError: output 0: values differ by ")
    assert program.startswith("paste-ready test:\n\nimport torch\n")
    assert f"from {__name__} import wrong\n" in program
    assert "Optimize(level=1, only=(wrong,), engines='auto')(model" in program
    assert all(line.startswith("# ") for line in details.splitlines()[1:])
    for word in ("Spec(", "first guilty pass: wrong", "first divergent node: ", "expected tensor"):
        assert word not in program
        assert word in f"# {details}"
    compile(rest.partition("paste-ready test:")[2], "pasted", "exec")
    assert len(str(caught.value.__cause__).splitlines()) < 50  # of two tensors of 128
