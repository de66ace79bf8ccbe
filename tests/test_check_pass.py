"""`check_pass` fails where it checked nothing, and sees each guard of the page's pass go."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError, Pass, PassError
from optimizer.testing import Counterexample, Motif, Optimize, Spec, check_pass, check_spec
from optimizer.testing._check_pass import is_changed
from optimizer.testing._lowering import Lower
from optimizer.toolkit import arg, call, insert_function, rewrite

PAGE = Path(__file__).parents[1] / "docs" / "passes.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PASS, (CHECK,) = BLOCKS[0], [block for block in BLOCKS if "check_pass(" in block]
GUARDS = [line for line in PASS.splitlines(keepends=True) if line.startswith("    require(")]
Inputs = tuple[torch.Tensor, ...]


def run_page(code: str) -> None:
    namespace = {"__name__": "page"}
    exec(compile(code + CHECK, str(PAGE), "exec"), namespace)


def test_the_page_has_three_guards() -> None:
    assert len(GUARDS) == 3


@pytest.mark.integration
@pytest.mark.parametrize("guard", GUARDS)
def test_the_check_of_the_page_sees_each_guard_go(guard: str) -> None:
    with pytest.raises(Counterexample):
        run_page(PASS.replace(guard, ""))


def test_the_check_of_the_page_sees_that_its_pass_no_longer_fires() -> None:
    broken = PASS.replace("    return value\n", "    return None\n")
    assert broken != PASS

    with pytest.raises(PassError, match=r"checked nothing.*motif 'neg_torch neg_torch linear'"):
        run_page(broken)


@rewrite(call(torch.neg, name="node"), numerics="exact", phase="simplify")
def endless(node: fx.Node) -> fx.Node:
    """Replace a negation by itself."""
    return insert_function(node, torch.neg, (arg(node, 0),))


@rewrite(call(torch.neg, name="node"), numerics="exact", phase="simplify")
def raising(node: fx.Node) -> fx.Node:
    """Raise an error."""
    raise RuntimeError("planted")


def alone(each: Pass, *, silent: bool) -> Callable[[nn.Module, Inputs], nn.Module]:
    def subject(model: nn.Module, inputs: Inputs) -> nn.Module:
        with warnings.catch_warnings():
            if silent:
                warnings.simplefilter("ignore")
            return optimizer.optimize(model, inputs, level=1, only=[each], check=None)

    return subject


@pytest.mark.parametrize("each", [endless, raising], ids=str)
def test_a_pass_that_is_rolled_back_does_not_pass(each: Pass) -> None:
    for subject in (each, alone(each, silent=False), alone(each, silent=True)):
        with pytest.raises(Counterexample, match="rolled back"):
            check_pass(subject, "neg_torch relu")


def test_a_warning_of_this_package_does_not_pass() -> None:
    def warns(model: nn.Module, inputs: Inputs) -> nn.Module:
        warnings.warn("planted", optimizer.OptimizerWarning, stacklevel=2)
        return Optimize(level=0)(model, inputs)

    with pytest.raises(Counterexample, match="OptimizerWarning: planted"):
        check_spec(Spec(("dup", "linear", "drop")), warns)


def test_a_subject_that_leaves_its_motif_alone_does_not_pass() -> None:
    for same in (copy.deepcopy, fx.symbolic_trace, Optimize(only=("fold_affine",))):
        with pytest.raises(PassError, match="any model of its motif 'linear relu'"):
            check_pass(lambda model, inputs, same=same: _of(same, model, inputs), "linear relu")


def _of(same: Callable[..., nn.Module], model: nn.Module, inputs: Inputs) -> nn.Module:
    return same(model, inputs) if isinstance(same, Optimize) else same(model)


def test_each_program_of_a_motif_must_be_rewritten() -> None:
    subject = Optimize(only=("fuse_linear_relu",))

    with pytest.raises(PassError, match="motif 'linear tanh'"):
        check_pass(subject, Motif(("linear relu", "linear tanh")))


def test_a_subject_that_leaves_all_models_alone_does_not_pass() -> None:
    subject = Optimize(only=("fuse_linear_relu",))

    with pytest.raises(PassError, match="any of 5 models"):
        check_pass(subject, "linear relu", alphabet=["tanh"], max_examples=5)
    assert check_pass(subject, "linear relu", max_examples=5) is None


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match=r"no word 'linaer': try linear, .*TOKENS holds all"):
        check_pass(Optimize(), "relu linaer")
    with pytest.raises(InputError, match=r"no word 'xyzzy': try [a-z]"):
        check_pass(Optimize(), "xyzzy")


def doubled(model: nn.Module, inputs: Inputs) -> nn.Module:
    candidate = copy.deepcopy(model)
    for parameter in candidate.parameters():
        parameter.data *= 2
    return candidate


def retraced(model: nn.Module, inputs: Inputs) -> nn.Module:
    traced = fx.symbolic_trace(model)
    for node in traced.graph.find_nodes(op="call_function", target=F.relu):
        node.target = torch.relu
    traced.recompile()
    return traced


@pytest.mark.parametrize("entry", ["module", "graph"])
def test_what_counts_as_a_change(entry: str) -> None:
    spec = Spec(("linear", "relu_F"), entry=entry)  # type: ignore[arg-type]
    model, inputs = spec.build(), spec.inputs()
    own = Optimize(only=("fuse_linear_relu",))(model, inputs)

    assert not is_changed(spec, copy.deepcopy(model))
    assert not is_changed(spec, spec.build(torch.float32))
    assert is_changed(spec, doubled(model, inputs))
    assert is_changed(spec, retraced(model, inputs))
    assert is_changed(spec, nn.Sequential(model))
    assert is_changed(spec, own)
    assert not is_changed(spec, Optimize(only=())(model, inputs))
    assert is_changed(spec, Lower()(model, inputs))


def test_a_model_that_cannot_be_traced_is_told_by_its_modules() -> None:
    spec = Spec(("linear_opaque", "mask"))

    assert not is_changed(spec, spec.build())
    assert is_changed(spec, nn.Sequential(spec.build()))


def test_a_counterexample_to_a_pass_names_where_it_is_from() -> None:
    with pytest.raises(Counterexample) as caught:
        check_pass(endless, "neg_torch relu")

    assert f"from {__name__} import endless\n" in str(caught.value)
    assert "Optimize(level=1, only=(endless,), engines='auto')(model" in str(caught.value)


@rewrite(call(torch.neg, name="node"), numerics="exact", phase="simplify")
def wrong(node: fx.Node) -> fx.Node:
    """Take a negation for an absolute value."""
    return insert_function(node, torch.abs, (arg(node, 0),))


def test_a_wrong_pass_is_told_with_the_verdict_and_the_test_first() -> None:
    with pytest.raises(Counterexample) as caught:
        check_pass(wrong, "neg_torch relu")

    verdict, _, rest = str(caught.value).partition("\n")
    program, _, details = rest.partition("\n# ")
    assert verdict.startswith("AssertionError: output 0: values differ by ")
    assert program.startswith("paste-ready test:\n\nimport torch\n")
    assert all(line.startswith("# ") for line in details.splitlines()[1:])
    for word in ("Spec(", "first guilty pass: wrong", "first divergent node: ", "expected tensor"):
        assert word not in program
        assert word in f"# {details}"
    compile(rest.partition("paste-ready test:")[2], "pasted", "exec")
    assert len(str(caught.value.__cause__).splitlines()) < 50  # of two tensors of 128
