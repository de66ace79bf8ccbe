"""Bad input is a typed error of one sentence, raised before any work; `check` tells a bug."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import optimizer
from optimizer import EquivalenceError, InputError, OptimizerError, PassError

X = torch.randn(4, 3)


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()).eval()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 5).eval()


def with_a_meta_buffer() -> nn.Module:
    model = a_model()
    model.register_buffer("extra", torch.empty(2, device="meta"))
    return model


BAD_INPUT: dict[str, tuple[Callable[[], object], type[OptimizerError], str]] = {
    "a function for a model": (
        lambda: optimizer.optimize(torch.relu, X, level=1),
        InputError,
        "no torch.nn.Module",
    ),
    "a class for a model": (
        lambda: optimizer.optimize(nn.ReLU, X, level=1),
        InputError,
        "already constructed",
    ),
    "a function to check": (
        lambda: optimizer.check(a_model(), torch.relu, X),
        InputError,
        "no torch.nn.Module",
    ),
    "a function to capture": (
        lambda: optimizer.capture(torch.relu, X),
        InputError,
        "no torch.nn.Module",
    ),
    "inputs of a wrong type": (
        lambda: optimizer.optimize(a_model(), 3, level=1),
        InputError,
        "example_inputs is of type int: pass a tensor",
    ),
    "inputs that are a set": (
        lambda: optimizer.optimize(a_model(), {X}, level=1),
        InputError,
        "example_inputs is of type set",
    ),
    "inputs of a wrong shape": (
        lambda: optimizer.optimize(a_model(), torch.randn(4, 7), level=1),
        InputError,
        "rejects these example inputs",
    ),
    "inputs of a wrong shape, unchecked": (
        lambda: optimizer.optimize(a_model(), torch.randn(4, 7), check=None, level=1),
        InputError,
        "rejects these example inputs",
    ),
    "inputs of a wrong dtype": (
        lambda: optimizer.optimize(a_model(), X.double(), level=1),
        InputError,
        "rejects these example inputs",
    ),
    "too many inputs": (
        lambda: optimizer.optimize(a_model(), (X, X), level=1),
        InputError,
        "rejects these example inputs",
    ),
    "too many inputs, unchecked": (
        lambda: optimizer.optimize(a_model(), (X, X), check=None, level=1),
        InputError,
        "rejects these example inputs",
    ),
    "an unknown keyword, unchecked": (
        lambda: optimizer.optimize(a_model(), {"image": X}, check=None, level=1),
        InputError,
        "rejects these example inputs",
    ),
    "inputs that check cannot call the model with": (
        lambda: optimizer.check(a_model(), a_model(), torch.randn(4, 7)),
        InputError,
        "rejects these example inputs",
    ),
    "an unknown pass in only": (
        lambda: optimizer.optimize(a_model(), X, only=["fold_batchnrm"], level=1),
        PassError,
        "fold_affine",
    ),
    "an unknown pass in disable": (
        lambda: optimizer.optimize(a_model(), X, disable=["remove_identity"], level=1),
        PassError,
        "remove_identities",
    ),
    "an unknown pass to explain": (
        lambda: optimizer.explain("compose_transpose"),
        PassError,
        "compose_transposes",
    ),
    "an unknown pass near to none": (
        lambda: optimizer.explain("zzz"),
        PassError,
        "fold_affine",
    ),
    "an unknown level": (
        lambda: optimizer.optimize(a_model(), X, level=7),
        InputError,
        "level 7 does not exist: use 0",
    ),
    "an unknown check": (
        lambda: optimizer.optimize(a_model(), X, check="always", level=1),
        InputError,
        "check='always' does not exist: use 'final'",
    ),
    "an unknown check without inputs": (
        lambda: optimizer.optimize(a_model(), check="always", level=1),
        InputError,
        "check='always' does not exist",
    ),
    "a number for names of passes": (
        lambda: optimizer.optimize(a_model(), X, only=3, level=1),
        InputError,
        "only is 3: pass a list",
    ),
    "nothing for names of passes": (
        lambda: optimizer.bisect(a_model(), X, disable=None),
        InputError,
        "disable is None: pass a list",
    ),
    "a number for a name": (
        lambda: optimizer.optimize(a_model(), X, only=[3], level=1),
        PassError,
        "no pass named 3",
    ),
    "a level that is no number": (
        lambda: optimizer.optimize(a_model(), X, level=[1]),
        InputError,
        "level [1] does not exist",
    ),
    "a text for a flag": (
        lambda: optimizer.optimize(a_model(), X, cuda_graph="no"),
        InputError,
        "cuda_graph is 'no': pass True or False",
    ),
    "a budget without a precision": (
        lambda: optimizer.optimize(a_model(), X, error_budget=0.01),
        InputError,
        "error_budget=0.01 is for a precision",
    ),
    "a precision that is a list": (
        lambda: optimizer.optimize(a_model(), X, precision=["bf16"], level=3),
        InputError,
        "precision=['bf16'] does not exist",
    ),
    "keywords that are no names": (
        lambda: optimizer.optimize(a_model(), {1: X}, level=1),
        InputError,
        "keyword arguments by name",
    ),
    "a function to check against": (
        lambda: optimizer.check(torch.relu, a_model(), X),
        InputError,
        "no torch.nn.Module",
    ),
    "parameters on the meta device": (
        lambda: optimizer.optimize(on_meta(), X, level=1),
        InputError,
        "'weight' is on the meta device",
    ),
    "a buffer on the meta device": (
        lambda: optimizer.optimize(with_a_meta_buffer(), X, level=1),
        InputError,
        "'extra' is on the meta device",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_a_typed_error_in_one_sentence(case: str) -> None:
    act, kind, words = BAD_INPUT[case]

    with pytest.raises(kind) as caught:
        act()

    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


CHEAP = [
    case for case in BAD_INPUT if "rejects" not in BAD_INPUT[case][2] and "capture" not in case
]


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
    act, kind, _ = BAD_INPUT[case]

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


class Two(nn.Module):
    """Two outputs, of which the second goes through `self.slope`."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.sin(x)
        steep = hidden * self.slope
        return {"plain": torch.cos(hidden), "steep": torch.tanh(steep)}


def test_check_names_the_output_the_error_and_the_first_value_to_differ() -> None:
    wrong = optimizer.capture(Two(1.5), X)

    with pytest.raises(EquivalenceError) as caught:
        optimizer.check(Two(1.0), wrong, X)

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

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
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


class Written(nn.Module):
    """Return the same as its sibling, and write the input or not."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0) if self.write else x + 1.0


class Constant(nn.Module):
    """Return a fixed answer of any type."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> object:
        return self.value


NAN = torch.tensor([1.0, float("nan"), float("inf")])
DIFFERENT: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "the shape": (Constant(X), Constant(X[:2]), "shape"),
    "the dtype": (Constant(X), Constant(X.double()), "dtype"),
    "the structure": (Constant((X, X)), Constant([X, X]), "structure"),
    "a number": (Constant((X, 1)), Constant((X, 2)), "output[1]: is 2, not 1"),
    "the type of a number": (Constant((X, 1)), Constant((X, 1.0)), "output[1]: is 1.0, not 1"),
    "what it leaves in its input": (Written(True), Written(False), "input[0][0]"),
    "a NaN for a number": (Constant(NAN), Constant(NAN.nan_to_num(0.5)), "inf"),
    "the sign of an infinity": (
        Constant(NAN),
        Constant(torch.where(NAN.isinf(), -NAN, NAN)),
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
    optimizer.check(Constant(NAN), Constant(NAN.clone()), X)

    with pytest.raises(EquivalenceError):
        optimizer.check(Constant(NAN), Constant(NAN + 1), X)


class Cancelling(nn.Module):
    """(x + 1e4) - 1e4, summed in one order or the other: both lose the same four digits."""

    def __init__(self, shift: float, slope: float = 1.0) -> None:
        super().__init__()
        self.first, self.slope = shift, slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.first) - 1e4) + (1e4 - self.first) * self.slope


def test_check_accepts_what_is_as_right_as_an_ill_conditioned_model() -> None:
    model, fast = Cancelling(1e4), Cancelling(5e3)
    with torch.no_grad():
        apart = (model(X) - fast(X)).abs().max() / model(X).abs().max()

    optimizer.check(model, fast, X)

    assert apart > 1e-4
    with pytest.raises(EquivalenceError):
        optimizer.check(model, Cancelling(5e3, slope=1.01), X)


class Imaginary(nn.Module):
    def __init__(self, *, conjugate: bool) -> None:
        super().__init__()
        self.conjugate = conjugate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.complex(x, x)
        return value.conj().imag if self.conjugate else value.imag


def test_what_is_negated_in_reading_has_other_values_in_the_same_bits() -> None:
    x = torch.linspace(1.0, 2.0, 4)

    optimizer.check(Imaginary(conjugate=True), Imaginary(conjugate=True), x)
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(Imaginary(conjugate=True), Imaginary(conjugate=False), x)
