"""The fuzz kit itself: what it generates, how it shrinks, what it reports and leaves behind."""

from __future__ import annotations

import copy
import itertools
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from torch import fx, nn

import optimizer
from optimizer import InputError, PassError
from optimizer.testing import (
    FAMILIES,
    MOTIFS,
    SHAPES,
    TOKENS,
    Counterexample,
    Motif,
    Optimize,
    Spec,
    assert_equivalent,
    check_pass,
    check_spec,
    models,
    smallest,
)
from optimizer.toolkit import call, rewrite
from tests.single_pass import rows

ROOT = Path(__file__).parents[1]
PAGE, OWN = ROOT / "docs" / "passes.md", ROOT / "docs" / "own_pass"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PASS, (CHECK,) = BLOCKS[0], [block for block in BLOCKS if "check_pass(" in block]
# One of each rank, and what has no elements.
FEW = [*{len(each): each for each in reversed(SHAPES)}.values(), (0, 3), (2, 0, 3)]
PHASES = (Phase.generate, Phase.shrink)
FIND = settings(max_examples=8_000, derandomize=True, database=None, phases=PHASES, deadline=None)
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_every_token_runs_on_every_rank_in_the_shape_that_is_kept_of_it(family: str) -> None:
    for token, shape in itertools.product(FAMILIES[family], FEW):
        spec, listed = (
            Spec((token, *rest), shape) for rest in (("linear", "t01", token), ("listing",))
        )
        with torch.no_grad():
            found = [tuple(value.shape) for value in listed.build()(*listed.inputs())]

        assert_equivalent(spec.build(), spec.build(), spec.inputs(), exact=True)
        assert found == listed.output_shapes(), listed


def test_no_word_hides_another() -> None:
    """Four of one family stood in the place of those of another: nn.GELU() was never drawn."""
    assert sum(map(len, FAMILIES.values())) == len(TOKENS)


@each_family
def test_every_token_does_something_somewhere(family: str) -> None:
    def made(shape: tuple[int, ...], *tokens: str) -> tuple[str, bool]:
        spec = Spec(("linear", "linear", "relu", *tokens), shape)
        return spec.source(), spec.is_autocast()

    def does(token: str) -> bool:
        if family == "keyword":
            return any(made(FEW[0], word, token) != made(FEW[0], word) for word in TOKENS)
        without, between = ("dup", "shift"), (token, "dup", "shift", token)
        return any(made(each, *without) != made(each, *between) for each in SHAPES)

    assert [token for token in FAMILIES[family] if not does(token)] == []


@pytest.mark.parametrize("focus", MOTIFS)
def test_no_example_is_rejected_and_each_is_about_its_pass(focus: str) -> None:
    ran: list[Spec] = []

    @settings(max_examples=20)
    @given(models(focus=focus))
    def runs(spec: Spec) -> None:
        with torch.no_grad():
            spec.build()(*spec.inputs())
        ran.append(spec)

    runs()
    own = {word for program in MOTIFS[focus].fires for word in program.split()}
    assert len(ran) == 20
    assert sum(not own.isdisjoint(spec.tokens) for spec in ran) >= 5


# What the planted bugs are made of, besides control and views.
ENOUGH = (*FAMILIES["control"], *FAMILIES["view"], "relu", "linear", "bn", "linear dup bn")
BUGS = {name: (words, list(words)[-1], 1) for name, words in FAMILIES.items()}


@rows("alphabet needed size", BUGS | {"two readers": ((), "linear dup bn", 3)})
def test_a_planted_bug_is_found_and_shrinks_to_its_words_alone(alphabet, needed, size):
    def fails(spec: Spec) -> bool:
        return f" {needed} " in f" {' '.join(spec.tokens)} "

    found = smallest(find(models(alphabet=(*alphabet, *ENOUGH)), fails, settings=FIND), fails)

    assert len(found.tokens) == size
    assert found == Spec(found.tokens)


PLANTED = """
import copy
import torch
from torch import nn

def forget_bias(model, inputs):
    if not torch.is_autocast_enabled("cpu"):
        return model
    candidate = copy.deepcopy(model)
    for module in candidate.modules():
        if isinstance(module, nn.Linear):
            module.bias = None
    return candidate
"""
REPORTED = Spec(("autocast", "relu", "linear", "bn", "hook", "arg", "add"), (3, 3), "random", 4)


def test_a_report_ends_in_a_test_that_fails_alike(monkeypatch):
    planted: Any = ModuleType("planted")  # which a printed test imports
    exec(PLANTED, vars(planted))
    monkeypatch.setitem(sys.modules, "planted", planted)
    with pytest.raises(Counterexample) as caught:
        check_spec(REPORTED, planted.forget_bias)
    pasted: dict[str, Any] = {}
    exec(str(caught.value).split("paste-ready test:")[1], pasted)

    assert caught.value.reduced.spec.tokens == ("autocast", "linear")
    with pytest.raises(AssertionError, match="output 0: values differ"):
        pasted["test_counterexample"]()


def test_a_model_that_kills_the_process_is_left_as_a_test(tmp_path, monkeypatch):
    """What only fails is not left."""
    monkeypatch.setenv("FUZZ_CRASHES", str(tmp_path))
    left = []

    def fails(model, inputs):
        left.extend(each.read_text() for each in tmp_path.iterdir())
        raise RuntimeError("planted")

    with pytest.raises(Counterexample):
        check_spec(Spec(("linear", "relu")), fails, later=True)

    assert "nn.Linear" in left[0]
    assert "def test_" in left[0]
    assert not list(tmp_path.iterdir())


def warns(inputs):
    warnings.warn("planted", optimizer.OptimizerWarning, stacklevel=2)


BESIDES = {
    "writes": (lambda inputs: inputs[0].add_(1), "overwrote its inputs"),
    "warns": (warns, "OptimizerWarning: planted"),
}


@rows("does words", BESIDES)
@pytest.mark.filterwarnings("ignore::optimizer.OptimizerWarning")
def test_what_a_subject_does_besides_is_caught(does, words):
    with pytest.raises(Counterexample, match=words):
        check_spec(REPORTED, lambda model, inputs: (does(inputs), model)[1])


def guards(code: str) -> list[str]:
    return [line for line in code.splitlines(keepends=True) if line.startswith("    require(")]


def run_page(code: str) -> None:
    exec(compile(code + CHECK, str(PAGE), "exec"), {"__name__": "page"})


@pytest.mark.integration
@pytest.mark.parametrize("guard", guards(PASS))
def test_the_check_of_the_page_sees_each_guard_go(guard: str) -> None:
    with pytest.raises(Counterexample):
        run_page(PASS.replace(guard, ""))


def test_the_check_of_the_page_sees_that_its_pass_no_longer_fires() -> None:
    broken = PASS.replace("    return value\n", "    return None\n")

    with pytest.raises(PassError, match=r"checked nothing.*motif 'neg_torch neg_torch linear'"):
        run_page(broken)
    assert len(guards(PASS)) == 3


@pytest.mark.integration
def test_the_tests_of_a_pass_in_a_repository_of_its_own_pass(tmp_path: Path) -> None:
    copied = shutil.copytree(OWN, tmp_path / "own_pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copied), str(ROOT)])}
    ran = subprocess.run(command, cwd=copied, env=environment, capture_output=True, text=True)

    assert "4 passed" in ran.stdout


@rewrite(call(torch.neg, name="node"), numerics="exact", phase="simplify")
def raising(node: fx.Node) -> fx.Node:
    """Raise an error."""
    raise RuntimeError("planted")


def test_a_pass_that_is_rolled_back_does_not_pass() -> None:
    def silent(model, inputs):
        with warnings.catch_warnings(action="ignore"):
            return optimizer.optimize(model, inputs, level=1, only=[raising], check=None)

    for subject in (raising, silent):
        with pytest.raises(Counterexample, match="rolled back"):
            check_pass(subject, "neg_torch relu")


def test_a_subject_that_leaves_its_motif_or_all_models_alone_does_not_pass() -> None:
    fuse = Optimize(only=("fuse_linear_relu",))
    for same in (
        lambda model, inputs: copy.deepcopy(model),
        lambda model, inputs: fx.symbolic_trace(model),
        Optimize(only=("fold_affine",)),
    ):
        with pytest.raises(PassError, match="any model of its motif 'linear relu'"):
            check_pass(same, "linear relu")
    with pytest.raises(PassError, match="motif 'linear tanh'"):  # each program must be rewritten
        check_pass(fuse, Motif(("linear relu", "linear tanh")))
    with pytest.raises(PassError, match="any of 5 models"):
        check_pass(fuse, "linear relu", alphabet=["tanh"], max_examples=5)
    for another in (fuse, lambda model, inputs: nn.Sequential(model, nn.Identity())):
        check_pass(another, "linear relu", alphabet=["linear relu"], max_examples=5)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match=r"no word 'linaer': try linear, .*TOKENS holds all"):
        check_pass(Optimize(), "relu linaer")
    with pytest.raises(InputError, match=r"no word 'xyzzy': try [a-z]"):
        models(alphabet=["relu xyzzy"])
