"""The fuzz kit itself: what it generates, how it shrinks, what it reports and leaves behind."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from torch import fx, nn
from torch.nn import functional as F

import optimizer.testing
from optimizer import InputError
from optimizer.testing import (
    FAMILIES,
    MOTIFS,
    REGIMES,
    SHAPES,
    TOKENS,
    Counterexample,
    Spec,
    as_graph,
    assert_equivalent,
    check_pass,
    check_spec,
    models,
    modules,
    randomize,
    smallest,
)
from optimizer.testing._observe import observe
from optimizer.testing._strategies import NOT_RECORDED, swarm
from tests.single_pass import Forward, rows

Tokens = tuple[str, ...]
Inputs = tuple[torch.Tensor, ...]
PACKAGE = Path(optimizer.testing.__file__).parents[1]
FIND = settings(
    max_examples=8_000,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
)
# One of each rank, and what has no elements.
FEW = [*{len(each): each for each in reversed(SHAPES)}.values(), (0, 3), (2, 0, 3)]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_motif = pytest.mark.parametrize("name", MOTIFS)
each_focus = pytest.mark.parametrize("focus", [None, *MOTIFS])


def test_only_the_kit_imports_hypothesis() -> None:
    importers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and "hypothesis" in ast.unparse(node)
    }

    assert importers == {"testing"}


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


def test_a_buffer_is_not_tied_to_a_parameter() -> None:
    assert Spec(("linear_held", "linear", "tie")).build() is not None


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


@each_focus
def test_no_example_is_rejected(focus: str | None) -> None:
    ran: list[Spec] = []

    @settings(max_examples=20)
    @given(models(focus=focus))
    def runs(spec: Spec) -> None:
        with torch.no_grad():
            spec.build()(*spec.inputs())
        ran.append(spec)

    runs()
    assert len(ran) == 20


@each_motif
def test_near_misses_interrupt_every_edge_and_run_on_every_rank(name: str) -> None:
    programs = set(MOTIFS[name].near_misses())
    first, *rest = MOTIFS[name].fires[0].split()

    assert {f"{first} {word} {' '.join(rest)}" for word in ("dup", "out", "again")} <= programs
    for program, shape in itertools.product(MOTIFS[name].near, FEW):
        spec = Spec(tuple(program.split()), shape)
        assert observe(spec.build(), spec.inputs()).values


@each_focus
def test_each_model_draws_a_vocabulary_without_whole_near_misses(focus: str | None) -> None:
    vocabularies = [{*swarm(focus, number)} for number in range(60)]
    near = {p for motif in MOTIFS.values() for p in motif.near if " " in p}
    of_motif = MOTIFS[focus].fires + MOTIFS[focus].near if focus else ()

    every = set[str]().union(*vocabularies)
    assert vocabularies == [{*swarm.__wrapped__(focus, number)} for number in range(60)]
    assert len({frozenset(each) for each in vocabularies}) == 60
    assert {word for program in of_motif for word in program.split()} <= every
    # One is made by chance, seldom.
    assert sum(len(each & near) for each in vocabularies) < 0.05 * sum(map(len, vocabularies))
    assert {word for program in every for word in program.split()} <= set(TOKENS)


def test_an_unknown_word_is_refused_before_drawing() -> None:
    with pytest.raises(InputError, match="no_such_token"):
        models(alphabet=["relu no_such_token"])


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
def test_no_statistic_is_left_at_its_default(regime: str) -> None:
    norm: Any = randomize(nn.BatchNorm1d(64, eps=0.5), regime)

    assert norm.running_mean.count_nonzero() > 32
    assert (norm.running_var != 1).sum() > 32
    assert (norm.weight != 1).sum() > 32
    assert (norm.bias != 0).sum() > 32


@pytest.mark.parametrize("eps", [1.0, 0.5, 0.125, 2.0**-10, 2.0**-17])
def test_dyadic_scales_are_powers_of_two(eps: float) -> None:
    norm: Any = randomize(nn.BatchNorm1d(64, eps=eps, dtype=torch.float64), "dyadic")
    scale = norm.weight.detach().abs() / torch.sqrt(norm.running_var + norm.eps)

    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)


def test_a_graph_writes_to_what_a_named_tuple_holds() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    graph = as_graph(Forward("y = x.max(0).values; y[y > 0] = 7.0; return y"))

    assert torch.equal(graph(x), torch.tensor([7.0, -2.0]))


def smallest_of(fails: Callable[[Tokens], bool], alphabet: Tokens | None = None) -> Spec:
    def predicate(spec: Spec) -> bool:
        return fails(spec.tokens)

    return smallest(find(models(alphabet=alphabet), predicate, settings=FIND), predicate)


# One of each family, of those that are not drawn seldom: all are one choice among the others.
@pytest.mark.parametrize(
    "token",
    [[each for each in family if each not in NOT_RECORDED][-1] for family in FAMILIES.values()],
)
def test_a_token_is_found_and_stands_alone(token: str) -> None:
    assert smallest_of(lambda tokens: token in tokens) == Spec((token,), SHAPES[0])


# What the planted bugs are made of, besides control and views.
ENOUGH = ("relu", "linear", "bn", "conv", "mask", "linear dup bn", "conv bn again")


def has(tokens: Tokens, family: str) -> bool:
    return any(token in FAMILIES[family] for token in tokens)


def after_a(family: str, tokens: Tokens) -> Tokens:
    first = next((i for i, token in enumerate(tokens) if token in FAMILIES[family]), len(tokens))
    return tokens[first:]


@rows(
    "fails size",
    {
        "a linear with two readers": (lambda t: "linear dup bn" in " ".join(t), 3),
        "two transposes of other dimensions": (
            lambda t: any({"t01", "t12"} == set(t[i : i + 2]) for i in range(len(t))), 2,
        ),
        "a masked assignment after a relu, beside a transpose": (
            lambda t: has(after_a("relu", t), "assignment") and has(t, "view"), 3,
        ),
        "a late second call": (
            lambda t: "bn" in t and "again" in t[t.index("bn") :] and "out" in t, 3,
        ),
    },
)  # fmt: skip
def test_a_planted_bug_shrinks_to_the_smallest_program(fails: Any, size: int) -> None:
    found = smallest_of(fails, (*FAMILIES["control"], *FAMILIES["view"], *ENOUGH))

    assert len(found.tokens) == size
    assert (found.shape, found.regime, found.seed) == (SHAPES[0], "dyadic", 0)


LINEAR, CUBE = Spec(("linear",)), next(each for each in SHAPES if len(each) == 3)
ILL = Spec(("linear",), (4, 4, 4), "ill", 5, "strided", "graph")


@rows(
    "spec fails found",
    {
        "words that only go together": (
            Spec(("t01", "relu", "linear", "bn", "t12")),
            lambda s: "linear" in s.tokens and s.tokens.count("t01") == s.tokens.count("t12"),
            LINEAR,
        ),
        "a word for nothing": (Spec(("conv_groups",)), lambda s: True, Spec(())),
        "the simplest of its family": (Spec(("conv_groups",)), lambda s: s.tokens, LINEAR),
        "the plainest data": (ILL, lambda s: s.tokens, LINEAR),
        "of a rank": (ILL, lambda s: s.tokens and len(s.shape) == 3, Spec(("linear",), CUBE)),
        "a shape that is never drawn": (
            Spec(("linear",), (9, 11, 13)), lambda s: s.shape == (9, 11, 13), Spec((), (9, 11, 13)),
        ),
    }
    | {
        field: (
            ILL,
            lambda s, field=field: s.tokens and getattr(s, field) == getattr(ILL, field),
            replace(LINEAR, **{field: getattr(ILL, field)}),
        )
        for field in ("regime", "seed", "layout", "entry")
    },
)  # fmt: skip
def test_a_program_gets_as_small_as_it_can(spec: Spec, fails: Any, found: Spec) -> None:
    assert smallest(spec, lambda each: bool(fails(each))) == found


def test_a_long_program_takes_few_tries() -> None:
    tries: list[Spec] = []

    def fails(spec: Spec) -> bool:
        tries.append(spec)
        return "bn" in spec.tokens

    assert smallest(Spec((*["relu"] * 40, "bn", *["relu"] * 23)), fails).tokens == ("bn",)
    assert len(tries) < 60


PLANTED = """
import copy
import os
import torch
from torch import fx, nn
from torch.nn import functional as F

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
    path = os.pathsep.join((str(tmp_path), str(PACKAGE.parent)))
    died = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_left.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False,
    )  # fmt: skip

    assert "nn.Linear" in (tmp_path / "test_left.py").read_text()
    assert died.returncode == -signal.SIGABRT
    assert not list((tmp_path / "crashes").iterdir())


def test_a_report_shows_the_smallest_program() -> None:
    def breaks(model: nn.Module, inputs: Inputs) -> nn.Module:
        if any(isinstance(m, nn.Linear) for m in model.modules()):
            raise RuntimeError("planted")
        return model

    with pytest.raises(Counterexample) as caught:
        check_spec(REPORTED, breaks)

    assert caught.value.reduced().spec.tokens == ("linear",)
    assert "RuntimeError: planted" in str(caught.value)


class Bare(nn.Module):
    """Calls the code of a graph itself, not through the wrapper that tells of errors in it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.graph.forward(*inputs)  # type: ignore[no-any-return]


def test_an_error_in_code_that_fx_makes_shrinks_as_any_other() -> None:
    def breaks(model: nn.Module, inputs: Inputs) -> nn.Module:
        traced = fx.symbolic_trace(model)
        for node in traced.graph.find_nodes(op="call_function", target=F.relu):
            node.target = torch.linalg.det
        return Bare(fx.GraphModule(traced, traced.graph))

    with pytest.raises(Counterexample) as caught:
        check_pass(breaks, "shift", alphabet=["linear", "shift", "relu_F"], max_examples=50)

    assert caught.value.spec.tokens == ("relu_F",)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_subject_that_writes_to_its_inputs_is_caught() -> None:
    def writes(model: nn.Module, inputs: Inputs) -> nn.Module:
        inputs[0].add_(1)
        return model

    with pytest.raises(Counterexample, match="overwrote its inputs"):
        check_spec(REPORTED, writes)


def test_a_subject_may_print_what_is_being_handled() -> None:
    running, at_once = 0, set[int]()

    def broken(model: nn.Module, inputs: Inputs) -> nn.Module:
        nonlocal running
        running += 1
        at_once.add(running)
        traceback.format_exc()  # as Dynamo does; making the report calls the subject
        running -= 1
        return nn.Sequential(model, nn.Threshold(1e9, -1.0))

    with pytest.raises(Counterexample) as caught:
        check_pass(broken, "linear")
    assert "paste-ready test" in str(caught.value)
    assert at_once == {1}
