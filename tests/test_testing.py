"""The fuzz kit itself: what it generates, how it shrinks, what it reports and leaves behind.

`check_pass` fails where it checked nothing, and sees each guard of the pages' passes go.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
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
    REGIMES,
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
    modules,
    randomize,
    smallest,
)
from optimizer.toolkit import arg, call, insert_function, rewrite
from tests.single_pass import rows

Inputs = tuple[torch.Tensor, ...]
ROOT = Path(__file__).parents[1]
PAGE, OWN = ROOT / "docs" / "passes.md", ROOT / "docs" / "own_pass"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PASS, (CHECK,) = BLOCKS[0], [block for block in BLOCKS if "check_pass(" in block]
OWN_PASS = (OWN / "double_negation.py").read_text()
# One of each rank, and what has no elements.
FEW = [*{len(each): each for each in reversed(SHAPES)}.values(), (0, 3), (2, 0, 3)]
FIND = settings(
    max_examples=8_000,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
)
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


@rows(
    "word shape",
    {
        "torch refuses it": ("conv_valid", (1, 1, 1, 1)),
        "torch warns of it": ("blank_deviation", (2, 4, 0)),
        "nothing would be left": ("tail", (2, 1, 3)),
        "it would be too large": ("stack", (2, 2, 3, 3, 3)),
    },
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_is_not_written(word: str, shape: tuple[int, ...]) -> None:
    assert Spec((word,), shape).source() == Spec((), shape).source()


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


@pytest.mark.parametrize("name", MOTIFS)
def test_near_misses_interrupt_every_edge(name: str) -> None:
    first, *rest = MOTIFS[name].fires[0].split()
    interrupted = {f"{first} {word} {' '.join(rest)}" for word in ("dup", "out", "again")}

    assert interrupted <= {*MOTIFS[name].near_misses()}


@pytest.mark.parametrize("empty", ["alphabet", "shapes", "regimes", "layouts", "entries"])
def test_nothing_to_choose_from_is_refused(empty: str) -> None:
    with pytest.raises(ValueError, match="at least one choice"):
        models(**{empty: []})  # type: ignore[arg-type]


def test_modules_are_no_graphs() -> None:
    assert find(modules(), lambda spec: len(spec.tokens) > 2, settings=FIND).entry == "module"


def test_building_twice_gives_the_same_bits_and_leaves_the_random_state() -> None:
    spec, before = Spec(("conv", "bn", "block"), (2, 4, 4, 4), "random", 5), torch.get_rng_state()
    state, again = spec.build().state_dict(), spec.build().state_dict()

    assert all(torch.equal(state[name], again[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("regime", REGIMES)
def test_no_statistic_is_left_at_its_default_and_dyadic_scales_are_powers_of_two(
    regime: str,
) -> None:
    norm: Any = randomize(nn.BatchNorm1d(64, eps=2.0**-10, dtype=torch.float64), regime)
    scale = norm.weight.detach().abs() / torch.sqrt(norm.running_var + norm.eps)

    assert norm.running_mean.count_nonzero() > 32
    assert min((norm.running_var != 1).sum(), (norm.weight != 1).sum(), norm.bias.count_nonzero())
    assert regime != "dyadic" or torch.equal(torch.exp2(torch.log2(scale).round()), scale)


# What the planted bugs are made of, besides control and views.
ENOUGH = (*FAMILIES["control"], *FAMILIES["view"], "relu", "linear", "bn", "linear dup bn")


def is_late(tokens: tuple[str, ...]) -> bool:
    return "bn" in tokens and "again" in tokens[tokens.index("bn") :] and "out" in tokens


def found_and_shrunk(alphabet: Iterable[str], fails: Callable[[tuple[str, ...]], bool]) -> Spec:
    def predicate(spec: Spec) -> bool:
        return fails(spec.tokens)

    return smallest(find(models(alphabet=alphabet), predicate, settings=FIND), predicate)


@each_family
def test_a_token_is_found_and_stands_alone(family: str) -> None:
    *others, last = FAMILIES[family]

    assert found_and_shrunk([*others, last, *ENOUGH], lambda tokens: last in tokens) == Spec(
        (last,)
    )


@rows(
    "fails",
    {
        "a linear with two readers": (lambda tokens: "linear dup bn" in " ".join(tokens),),
        "a late second call": (is_late,),
    },
)
def test_a_planted_bug_shrinks_to_the_smallest_program(fails: Any) -> None:
    found = found_and_shrunk(ENOUGH, fails)

    assert len(found.tokens) == 3
    assert found == Spec(found.tokens)


LINEAR, CUBE = Spec(("linear",)), next(each for each in SHAPES if len(each) == 3)
ILL = Spec(("conv_groups",), (4, 4, 4), "ill", 5, "strided", "graph")


@rows(
    "spec fails found",
    {
        "words that only go together": (
            Spec(("t01", "relu", "linear", "bn", "t12")),
            lambda s: "linear" in s.tokens and s.tokens.count("t01") == s.tokens.count("t12"),
            LINEAR,
        ),
        "a word for nothing": (ILL, lambda s: True, Spec(())),
        "of a rank": (ILL, lambda s: s.tokens and len(s.shape) == 3, Spec(("linear",), CUBE)),
        "of a seed": (ILL, lambda s: s.tokens and s.seed == 5, replace(LINEAR, seed=5)),
        "a shape that is never drawn": (
            Spec(("linear",), (9, 11, 13)), lambda s: s.shape == (9, 11, 13), Spec((), (9, 11, 13)),
        ),
    },
)  # fmt: skip
def test_a_program_gets_as_small_as_it_can(spec: Spec, fails: Any, found: Spec) -> None:
    assert smallest(spec, lambda each: bool(fails(each))) == found


PLANTED = """
import copy
import os
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

def deadly(model, inputs):
    os.abort()
"""
REPORTED = Spec(("autocast", "relu", "linear", "bn", "hook", "arg", "add"), (3, 3), "random", 4)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of two subjects, which a printed test imports, and a folder for crashes beside."""
    (tmp_path / "planted.py").write_text(PLANTED)
    module: Any = ModuleType("planted")
    exec(PLANTED, vars(module))
    monkeypatch.setitem(sys.modules, "planted", module)
    monkeypatch.setenv("FUZZ_CRASHES", str(tmp_path / "crashes"))
    return module


def test_a_report_ends_in_a_test_that_fails_alike(planted: Any) -> None:
    with pytest.raises(Counterexample) as caught:
        check_spec(REPORTED, planted.forget_bias)
    pasted: dict[str, Any] = {}
    exec(str(caught.value).split("paste-ready test:")[1], pasted)

    assert caught.value.reduced().spec.tokens == ("autocast", "linear")
    with pytest.raises(AssertionError, match="output 0: values differ"):
        pasted["test_counterexample"]()


def test_a_model_that_kills_the_process_is_left_as_a_test_that_does_too(
    planted: Any, tmp_path: Path
) -> None:
    """What only fails is not left."""

    def copies(model: nn.Module, inputs: Inputs) -> nn.Module:
        (left,) = (tmp_path / "crashes").iterdir()
        shutil.copy(left, tmp_path / "test_left.py")
        raise RuntimeError("planted")

    copies.__module__, copies.__qualname__ = "planted", "deadly"
    with pytest.raises(Counterexample):
        check_spec(Spec(("linear", "relu")), copies, later=True)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    died = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_left.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False,
    )  # fmt: skip

    assert "nn.Linear" in (tmp_path / "test_left.py").read_text()
    assert died.returncode == -signal.SIGABRT
    assert not list((tmp_path / "crashes").iterdir())


def test_a_subject_that_writes_to_its_inputs_is_caught() -> None:
    def writes(model: nn.Module, inputs: Inputs) -> nn.Module:
        inputs[0].add_(1)
        return model

    with pytest.raises(Counterexample, match="overwrote its inputs"):
        check_spec(REPORTED, writes)


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
    def silent(model: nn.Module, inputs: Inputs) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optimizer.optimize(model, inputs, level=1, only=[each], check=None)

    for subject in (each, silent):
        with pytest.raises(Counterexample, match="rolled back"):
            check_pass(subject, "neg_torch relu")


@pytest.mark.filterwarnings("ignore::optimizer.OptimizerWarning")
def test_a_warning_of_this_package_does_not_pass() -> None:
    def warns(model: nn.Module, inputs: Inputs) -> nn.Module:
        warnings.warn("planted", optimizer.OptimizerWarning, stacklevel=2)
        return Optimize(level=0)(model, inputs)

    with pytest.raises(Counterexample, match="OptimizerWarning: planted"):
        check_spec(Spec(("dup", "linear", "drop")), warns)


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
    assert len(str(caught.value.__cause__).splitlines()) < 50  # of two tensors of 128
