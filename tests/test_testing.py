"""The fuzz kit itself: what it generates, how it shrinks, what it reports."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, find, given, settings
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

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
    randomize,
    smallest,
)
from optimizer.testing._observe import observe
from optimizer.testing._strategies import NOT_RECORDED, swarm

Tokens = tuple[str, ...]
PACKAGE = Path(optimizer.testing.__file__).parents[1]
FIND = settings(
    max_examples=8_000,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
)


def smallest_of(fails: Callable[[Tokens], bool], alphabet: Tokens | None = None) -> Spec:
    def predicate(spec: Spec) -> bool:
        return fails(spec.tokens)

    return smallest(find(models(alphabet=alphabet), predicate, settings=FIND), predicate)


def test_importing_optimizer_does_not_import_hypothesis() -> None:
    code = "import sys, optimizer; sys.exit('hypothesis' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_kit_imports_hypothesis() -> None:
    importers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and "hypothesis" in ast.unparse(node)
    }

    assert importers == {"testing"}


# One of each rank, and what has no elements.
FEW = [*{len(each): each for each in reversed(SHAPES)}.values(), (0, 3), (2, 0, 3)]


class TestGeneration:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_token_runs_on_every_rank(self, family: str) -> None:
        for token, shape in itertools.product(FAMILIES[family], FEW):
            spec = Spec((token, "linear", "t01", token), shape)

            assert_equivalent(spec.build(), spec.build(), spec.inputs(), exact=True)

    @pytest.mark.parametrize(
        ("word", "shape"),
        [("conv_valid", (1, 1, 1, 1)), ("tail", (2, 1, 3)), ("stack", (2, 2, 3, 3, 3))],
        ids=["torch refuses it", "nothing would be left", "it would be too large"],
    )
    def test_what_is_refused_is_not_written(self, word: str, shape: tuple[int, ...]) -> None:
        assert Spec((word,), shape).source() == Spec((), shape).source()

    @pytest.mark.filterwarnings("ignore")
    def test_what_torch_warns_of_is_not_written(self) -> None:
        assert "std" not in Spec(("blank_deviation",), (2, 4, 0)).source()

    def test_no_word_hides_another(self) -> None:
        """Four of one family stood in the place of those of another: nn.GELU() was never drawn."""
        assert sum(map(len, FAMILIES.values())) == len(TOKENS)

    def test_a_buffer_is_not_tied_to_a_parameter(self) -> None:
        assert Spec(("linear_held", "linear", "tie")).build() is not None

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_value_has_the_shape_that_is_kept_of_it(self, family: str) -> None:
        for token, shape in itertools.product(FAMILIES[family], FEW):
            spec = Spec((token, "listing"), shape)
            with torch.no_grad():
                found = [tuple(value.shape) for value in spec.build()(*spec.inputs())]

            assert found == spec.output_shapes(), spec

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_token_does_something_somewhere(self, family: str) -> None:
        def made(shape: tuple[int, ...], *tokens: str) -> tuple[str, bool]:
            spec = Spec(("linear", "linear", "relu", *tokens), shape)
            return spec.source(), spec.is_autocast()

        def does(token: str) -> bool:
            if family == "keyword":
                return any(made(FEW[0], word, token) != made(FEW[0], word) for word in TOKENS)
            without, between = ("dup", "shift"), (token, "dup", "shift", token)
            return any(made(each, *without) != made(each, *between) for each in SHAPES)

        assert [token for token in FAMILIES[family] if not does(token)] == []

    @pytest.mark.parametrize("focus", [None, *MOTIFS])
    def test_no_example_is_rejected(self, focus: str | None) -> None:
        ran = 0

        @settings(max_examples=20)
        @given(models(focus=focus))
        def runs(spec: Spec) -> None:
            nonlocal ran
            with torch.no_grad():
                spec.build()(*spec.inputs())
            ran += 1

        runs()

        assert ran == 20

    # One of each family, of those that are not drawn seldom: all are one choice among the others.
    @pytest.mark.parametrize(
        "token",
        [[each for each in family if each not in NOT_RECORDED][-1] for family in FAMILIES.values()],
    )
    def test_a_token_is_found_and_stands_alone(self, token: str) -> None:
        assert smallest_of(lambda tokens: token in tokens) == Spec((token,), SHAPES[0])

    @pytest.mark.parametrize("name", MOTIFS)
    def test_near_misses_interrupt_every_edge(self, name: str) -> None:
        programs = set(MOTIFS[name].near_misses())
        first, *rest = MOTIFS[name].fires[0].split()

        assert {f"{first} {word} {' '.join(rest)}" for word in ("dup", "out", "again")} <= programs

    @pytest.mark.parametrize("name", MOTIFS)
    def test_every_near_miss_runs_on_every_rank(self, name: str) -> None:
        for program in MOTIFS[name].near:
            for shape in FEW:
                spec = Spec(tuple(program.split()), shape)

                assert observe(spec.build(), spec.inputs()).values

    @pytest.mark.parametrize("focus", [None, *MOTIFS])
    def test_each_model_draws_a_vocabulary_without_whole_near_misses(
        self, focus: str | None
    ) -> None:
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

    def test_an_unknown_word_is_refused_before_drawing(self) -> None:
        with pytest.raises(InputError, match="no_such_token"):
            models(alphabet=["relu no_such_token"])

    @pytest.mark.parametrize("empty", ["alphabet", "shapes", "regimes", "layouts", "entries"])
    def test_nothing_to_choose_from_is_refused(self, empty: str) -> None:
        with pytest.raises(ValueError, match="at least one choice"):
            models(**{empty: []})  # type: ignore[arg-type]


class TestData:
    SPEC = Spec(("conv", "bn", "block"), (2, 4, 4, 4), "random", 5)

    def test_building_twice_gives_the_same_bits(self) -> None:
        state, again = self.SPEC.build().state_dict(), self.SPEC.build().state_dict()

        assert all(torch.equal(state[name], again[name]) for name in state)

    def test_building_leaves_the_random_state(self) -> None:
        before = torch.get_rng_state()
        self.SPEC.build()

        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("regime", REGIMES)
    def test_no_statistic_is_left_at_its_default(self, regime: str) -> None:
        norm = randomize(nn.BatchNorm1d(64, eps=0.5), regime)
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None

        assert norm.running_mean.count_nonzero() > 32
        assert (norm.running_var != 1).sum() > 32
        assert (norm.weight != 1).sum() > 32
        assert (norm.bias != 0).sum() > 32

    @pytest.mark.parametrize("eps", [1.0, 0.5, 0.125, 2.0**-10, 2.0**-17])
    def test_dyadic_scales_are_powers_of_two(self, eps: float) -> None:
        norm = randomize(nn.BatchNorm1d(64, eps=eps, dtype=torch.float64), "dyadic")
        assert isinstance(norm, _BatchNorm)
        assert norm.running_var is not None
        scale = norm.weight.detach().abs() / torch.sqrt(norm.running_var + norm.eps)

        assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)


def test_a_graph_writes_to_what_a_named_tuple_holds() -> None:
    class Maximum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.max(0).values
            y[y > 0] = 7.0
            return y

    x = torch.tensor([[1.0, -2.0], [3.0, -4.0]])

    assert torch.equal(as_graph(Maximum())(x), torch.tensor([7.0, -2.0]))


# What the planted bugs are made of, besides control and views.
ENOUGH = ("relu", "linear", "bn", "conv", "mask", "linear dup bn", "conv bn again")


def has(tokens: Tokens, family: str) -> bool:
    return any(token in FAMILIES[family] for token in tokens)


def after_a(family: str, tokens: Tokens) -> Tokens:
    first = next((i for i, token in enumerate(tokens) if token in FAMILIES[family]), len(tokens))
    return tokens[first:]


SHRINKS: dict[str, tuple[Callable[[Tokens], bool], int]] = {
    "a linear with two readers": (
        lambda t: any(t[i : i + 3] == ("linear", "dup", "bn") for i in range(len(t))),
        3,
    ),
    "two transposes of other dimensions": (
        lambda t: any({"t01", "t12"} == set(t[i : i + 2]) for i in range(len(t))),
        2,
    ),
    "a masked assignment after a relu, beside a transpose": (
        lambda t: has(after_a("relu", t), "assignment") and has(t, "view"),
        3,
    ),
    "a late second call": (
        lambda t: "bn" in t and "again" in t[t.index("bn") :] and "out" in t,
        3,
    ),
}


@pytest.mark.parametrize("name", SHRINKS)
def test_a_planted_bug_shrinks_to_the_smallest_program(name: str) -> None:
    fails, size = SHRINKS[name]
    found = smallest_of(fails, (*FAMILIES["control"], *FAMILIES["view"], *ENOUGH))

    assert len(found.tokens) == size
    assert (found.shape, found.regime, found.seed) == (SHAPES[0], "dyadic", 0)


PLANTED = """
import copy
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
"""


class Bare(nn.Module):
    """Calls the code of a graph itself, not through the wrapper that tells of errors in it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.graph.forward(*inputs)  # type: ignore[no-any-return]


class TestReport:
    SPEC = Spec(("autocast", "relu", "linear", "bn", "hook", "arg", "add"), (3, 3), "random", 4)

    def test_ends_in_a_test_that_fails_alike_in_a_fresh_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "planted.py").write_text(PLANTED)
        monkeypatch.syspath_prepend(tmp_path)
        from planted import forget_bias  # type: ignore[import-not-found]

        with pytest.raises(Counterexample) as caught:
            check_spec(self.SPEC, forget_bias)
        pasted = str(caught.value).split("paste-ready test:")[1]
        (tmp_path / "test_pasted.py").write_text(pasted)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
        monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

        assert "1 failed" in run.stdout
        assert "AssertionError: output 0: values differ" in run.stdout

    def test_shows_the_smallest_program(self) -> None:
        def breaks(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
            if any(isinstance(m, nn.Linear) for m in model.modules()):
                raise RuntimeError("planted")
            return model

        with pytest.raises(Counterexample) as caught:
            check_spec(self.SPEC, breaks)

        assert caught.value.reduced().spec.tokens == ("linear",)
        assert "RuntimeError: planted" in str(caught.value)

    def test_an_error_in_code_that_fx_makes_shrinks_as_any_other(self) -> None:
        def breaks(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
            traced = fx.symbolic_trace(model)
            for node in traced.graph.find_nodes(op="call_function", target=F.relu):
                node.target = torch.linalg.det
            return Bare(fx.GraphModule(traced, traced.graph))

        with pytest.raises(Counterexample) as caught:
            check_pass(breaks, "shift", alphabet=["linear", "shift", "relu_F"], max_examples=50)

        assert caught.value.spec.tokens == ("relu_F",)
        assert isinstance(caught.value.__cause__, TypeError)

    def test_a_subject_that_writes_to_its_inputs_is_caught(self) -> None:
        def writes(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
            inputs[0].add_(1)
            return model

        with pytest.raises(Counterexample, match="overwrote its inputs"):
            check_spec(self.SPEC, writes)
