"""Bad input is a typed error of one sentence, raised before any work; `check` tells a bug."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import EquivalenceError, InputError, OptimizerError, PassError
from tests.single_pass import Forward

X = torch.randn(4, 3)


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()).eval()


def with_a_meta_buffer() -> nn.Module:
    model = a_model()
    model.register_buffer("extra", torch.empty(2, device="meta"))
    return model


def optimize(inputs: object = X, **options: Any) -> Callable[[], object]:
    return lambda: optimizer.optimize(a_model(), inputs, **{"level": 1} | options)


REJECTS = "rejects these example inputs"
BAD_INPUT: dict[str, tuple[Callable[[], object], str]] = {
    "a function for a model": (lambda: optimizer.optimize(torch.relu, X), "no torch.nn.Module"),
    "a class for a model": (lambda: optimizer.optimize(nn.ReLU, X), "already constructed"),
    "a function to check": (
        lambda: optimizer.check(a_model(), torch.relu, X), "no torch.nn.Module",
    ),
    "a function to check against": (
        lambda: optimizer.check(torch.relu, a_model(), X), "no torch.nn.Module",
    ),
    "a function to capture": (lambda: optimizer.capture(torch.relu, X), "no torch.nn.Module"),
    "inputs of a wrong type": (optimize(3), "example_inputs is of type int: pass a tensor"),
    "inputs that are a set": (optimize({X}), "example_inputs is of type set"),
    "inputs of a wrong shape": (optimize(torch.randn(4, 7)), REJECTS),
    "inputs of a wrong shape, unchecked": (optimize(torch.randn(4, 7), check=None), REJECTS),
    "inputs of a wrong dtype": (optimize(X.double()), REJECTS),
    "too many inputs": (optimize((X, X)), REJECTS),
    "too many inputs, unchecked": (optimize((X, X), check=None), REJECTS),
    "an unknown keyword, unchecked": (optimize({"image": X}, check=None), REJECTS),
    "inputs that check cannot call the model with": (
        lambda: optimizer.check(a_model(), a_model(), torch.randn(4, 7)), REJECTS,
    ),
    "an unknown level": (optimize(level=7), "level 7 does not exist: use 0"),
    "an unknown check": (
        optimize(check="always"), "check='always' does not exist: use 'final'",
    ),
    "an unknown check without inputs": (
        optimize(None, check="always"), "check='always' does not exist",
    ),
    "a number for names of passes": (optimize(only=3), "only is 3: pass a list"),
    "nothing for names of passes": (
        lambda: optimizer.bisect(a_model(), X, disable=None), "disable is None: pass a list",
    ),
    "a level that is no number": (optimize(level=[1]), "level [1] does not exist"),
    "a text for a flag": (
        optimize(level=2, cuda_graph="no"), "cuda_graph is 'no': pass True or False",
    ),
    "a budget without a precision": (
        optimize(level=2, error_budget=0.01), "error_budget=0.01 is for a precision",
    ),
    "a precision that is a list": (
        optimize(precision=["bf16"], level=3), "precision=['bf16'] does not exist",
    ),
    "keywords that are no names": (optimize({1: X}), "keyword arguments by name"),
    "parameters on the meta device": (
        lambda: optimizer.optimize(nn.Linear(3, 5, device="meta").eval(), X),
        "'weight' is on the meta device",
    ),
    "a buffer on the meta device": (
        lambda: optimizer.optimize(with_a_meta_buffer(), X), "'extra' is on the meta device",
    ),
}  # fmt: skip
BAD_NAMES: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown pass in only": (optimize(only=["fold_batchnrm"]), "fold_affine"),
    "an unknown pass in disable": (optimize(disable=["remove_identity"]), "remove_identities"),
    "an unknown pass to explain": (
        lambda: optimizer.explain("compose_transpose"), "compose_transposes",
    ),
    "an unknown pass near to none": (lambda: optimizer.explain("zzz"), "fold_affine"),
    "a number for a name": (optimize(only=[3]), "no pass named 3"),
}  # fmt: skip
BAD = {case: (*row, InputError) for case, row in BAD_INPUT.items()}
BAD |= {case: (*row, PassError) for case, row in BAD_NAMES.items()}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_typed_error_in_one_sentence(case: str) -> None:
    act, words, kind = BAD[case]

    with pytest.raises(kind) as caught:
        act()

    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


CHEAP = [case for case in BAD if BAD[case][1] != REJECTS and "capture" not in case]


@pytest.mark.parametrize("case", CHEAP)
def test_bad_input_is_an_error_before_any_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was copied, captured or called")

    for place in ("core.copy", "verify.equivalence", "frontend.symbolic", "frontend.module"):
        monkeypatch.setattr(f"optimizer.{place}.structural_copy", work)
    for place in ("check", "equivalence"):
        monkeypatch.setattr(f"optimizer.verify.{place}.answer", work)
    for name in ("_optimize.reference", "_optimize.answer", "_optimize.capture_call"):
        monkeypatch.setattr(f"optimizer.{name}", work)
    act, _, kind = BAD[case]

    with pytest.raises(kind):
        act()


VALUES = (
    *(None, True, 3, -1, 0.5, float("nan"), "", "nonsense", b"bytes", torch.bfloat16),
    *([], [3], {}, {1: 2}, {"a": 1}, {3}, (None, None), object(), nn.ReLU, nn.ReLU(), X),
)
SMALL = {"model": nn.ReLU().eval(), "example_inputs": X}
FAST = optimizer.optimize(nn.ReLU().eval(), X)
ENTRIES: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "optimize": (optimizer.optimize, SMALL | {"check": None}),
    "capture": (optimizer.capture, SMALL),
    "check": (optimizer.check, SMALL | {"fast": FAST}),
    "measure": (
        optimizer.measure,
        {"module": FAST, "example_inputs": X, "repeats": 1, "warmup": 1},
    ),
    "compare": (optimizer.compare, SMALL | {"fast": FAST, "rounds": 6}),
    "bisect": (optimizer.bisect, SMALL),
    "explain": (optimizer.explain, {"name": "fold_affine"}),
    "draw": (optimizer.draw, {"module": optimizer.capture(nn.ReLU(), X)}),
    "lower": (FAST.lower, {"example_inputs": X}),
    "refit": (FAST.refit, {"state_dict": {}}),
}
ARGUMENTS = [
    (name, argument)
    for name, (entry, _) in ENTRIES.items()
    for argument in inspect.signature(entry).parameters
]


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_any_value_is_honoured_or_a_typed_error(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for values that name a file
    entry, others = ENTRIES[name]
    wrong = []
    for value in VALUES:
        try:
            entry(**others | {argument: value})
        except Exception as error:
            if not isinstance(error, OptimizerError) or "\n" in str(error):
                wrong.append((value, repr(error)))

    assert wrong == []


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(EquivalenceError, AssertionError)
    assert issubclass(optimizer.DeviceError, RuntimeError)


def test_a_training_mode_model_is_optimized_with_one_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.BatchNorm1d(5)).train()

    with pytest.warns(UserWarning, match="training mode") as caught:
        fast = optimizer.optimize(model, X, level=1)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert fast.report.counts() == {"remove_identities": 1}
    assert any("training mode" in remark for remark in fast.report.remarks)
    assert torch.equal(fast(X), model(X))


def test_without_example_inputs_the_report_says_what_was_not_done() -> None:
    fast = optimizer.optimize(a_model(), level=1)

    assert any("no example inputs" in remark for remark in fast.report.remarks)
    assert fast.report.checked == ""


def two(slope: float) -> nn.Module:
    """Two outputs, of which the second goes through `slope`."""

    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.sin(x)
        steep = hidden * slope
        return {"plain": torch.cos(hidden), "steep": torch.tanh(steep)}

    return Forward(forward)


def test_check_names_the_output_the_error_and_the_first_value_to_differ() -> None:
    wrong = optimizer.capture(two(1.5), X)

    with pytest.raises(EquivalenceError) as caught:
        optimizer.check(two(1.0), wrong, X)

    message = str(caught.value)
    assert message.startswith("output['steep']: relative error 0.")
    assert "more than 0.0001" in message
    assert "; the first value to differ is 'mul' (operator.mul): relative error 0." in message


class Cached(nn.Module):
    """Writes what it computes into an argument, as a decoder does its keys."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.shift = nn.Linear(64, 64), nn.BatchNorm1d(64), shift
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(self.norm(self.linear(x)))
        return (cache * 2).add_(x.mul_(1 + self.shift).mean() * 0)


CACHED = torch.randn(8, 64), torch.zeros(8, 64)


@pytest.mark.parametrize("level", [1, 2])
def test_an_input_that_the_model_writes_is_rounded_as_an_output_is(level: int) -> None:
    model = Cached().eval()

    fast = optimizer.optimize(model, CACHED, level=level)

    assert fast.report.counts()["fold_affine"] == 1
    assert not any("changed the answer" in remark for remark in fast.report.remarks)
    optimizer.check(model, fast, CACHED)


def test_an_input_that_the_model_leaves_is_compared_in_its_bits() -> None:
    with pytest.raises(EquivalenceError, match=r"input\[0\]\[0\]: relative error .* more than"):
        optimizer.check(Cached().eval(), Cached(1e-6).eval(), CACHED)


def constant(value: object) -> nn.Module:
    """Return a fixed answer of any type."""
    return Forward(lambda m, x: value)


NAN = torch.tensor([1.0, float("nan"), float("inf")])
DIFFERENT: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "the shape": (constant(X), constant(X[:2]), "shape"),
    "the dtype": (constant(X), constant(X.double()), "dtype"),
    "the structure": (constant((X, X)), constant([X, X]), "structure"),
    "a number": (constant((X, 1)), constant((X, 2)), "output[1]: is 2, not 1"),
    "the type of a number": (constant((X, 1)), constant((X, 1.0)), "output[1]: is 1.0, not 1"),
    "what it leaves in its input": (
        Forward(lambda m, x: x.add_(1.0)),
        Forward(lambda m, x: x + 1.0),
        "input[0][0]",
    ),
    "a NaN for a number": (constant(NAN), constant(NAN.nan_to_num(0.5)), "inf"),
    "the sign of an infinity": (
        constant(NAN),
        constant(torch.where(NAN.isinf(), -NAN, NAN)),
        "inf",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_check_sees_a_difference_in(what: str) -> None:
    model, fast, words = DIFFERENT[what]

    with pytest.raises(EquivalenceError, match=r"^(output|input)") as caught:
        optimizer.check(model, fast, X)

    assert words in str(caught.value)


def test_check_accepts_nan_and_infinity_where_both_have_them() -> None:
    optimizer.check(constant(NAN), constant(NAN.clone()), X)

    with pytest.raises(EquivalenceError):
        optimizer.check(constant(NAN), constant(NAN + 1), X)


def cancelling(shift: float, slope: float = 1.0) -> nn.Module:
    """(x + 1e4) - 1e4, summed in one order or the other: both lose the same four digits."""
    return Forward(lambda m, x: ((x + shift) - 1e4) + (1e4 - shift) * slope)


def test_check_accepts_what_is_as_right_as_an_ill_conditioned_model() -> None:
    model, fast = cancelling(1e4), cancelling(5e3)
    with torch.no_grad():
        apart = (model(X) - fast(X)).abs().max() / model(X).abs().max()

    optimizer.check(model, fast, X)

    assert apart > 1e-4
    with pytest.raises(EquivalenceError):
        optimizer.check(model, cancelling(5e3, slope=1.01), X)


def test_what_is_negated_in_reading_has_other_values_in_the_same_bits() -> None:
    imaginary, conjugate = (
        Forward(lambda m, x, sign=sign: sign(torch.complex(x, x)).imag)
        for sign in (torch.clone, torch.conj)
    )
    x = torch.linspace(1.0, 2.0, 4)

    optimizer.check(conjugate, conjugate, x)
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(conjugate, imaginary, x)
