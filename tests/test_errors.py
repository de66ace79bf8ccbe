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
from tests.single_pass import Forward, ForwardOfTwo, rows

X = torch.randn(4, 3)


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()).eval()


def with_a_meta_buffer() -> nn.Module:
    model = a_model()
    model.register_buffer("extra", torch.empty(2, device="meta"))
    return model


def optimize(inputs: object = X, model: Any = None, **options: Any) -> Callable[[], object]:
    return lambda: optimizer.optimize(model or a_model(), inputs, **{"level": 1} | options)


def check(model: Any, fast: Any, inputs: Tensor = X) -> Callable[[], object]:
    return lambda: optimizer.check(model, fast, inputs)


REJECTS, NO_MODULE = "rejects these example inputs", "no torch.nn.Module"
WIDE = torch.randn(4, 7)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a function for a model": (optimize(model=torch.relu), NO_MODULE),
    "a class for a model": (optimize(model=nn.ReLU), "already constructed"),
    "a function to check": (check(a_model(), torch.relu), NO_MODULE),
    "a function to check against": (check(torch.relu, a_model()), NO_MODULE),
    "a function to capture": (lambda: optimizer.capture(torch.relu, X), NO_MODULE),
    "inputs of a wrong type": (optimize(3), "example_inputs is of type int: pass a tensor"),
    "inputs that are a set": (optimize({X}), "example_inputs is of type set"),
    "inputs of a wrong shape": (optimize(WIDE), REJECTS),
    "inputs of a wrong shape, unchecked": (optimize(WIDE, check=None), REJECTS),
    "inputs of a wrong dtype": (optimize(X.double()), REJECTS),
    "too many inputs": (optimize((X, X)), REJECTS),
    "too many inputs, unchecked": (optimize((X, X), check=None), REJECTS),
    "an unknown keyword, unchecked": (optimize({"image": X}, check=None), REJECTS),
    "inputs that check cannot call with": (check(a_model(), a_model(), WIDE), REJECTS),
    "an unknown level": (optimize(level=7), "level 7 does not exist: use 0"),
    "an unknown check": (optimize(check="always"), "check='always' does not exist: use 'final'"),
    "the same without inputs": (optimize(None, check="always"), "check='always' does not exist"),
    "a number for names of passes": (optimize(only=3), "only is 3: pass a list"),
    "nothing for names of passes": (
        lambda: optimizer.bisect(a_model(), X, disable=None), "disable is None: pass a list",
    ),
    "a level that is no number": (optimize(level=[1]), "level [1] does not exist"),
    "a text for a flag": (
        optimize(level=2, cuda_graph="no"), "cuda_graph is 'no': pass True or False",
    ),
    "a budget alone": (optimize(level=2, error_budget=0.5), "error_budget=0.5 is for a precision"),
    "a precision that is a list": (
        optimize(precision=["bf16"], level=3), "precision=['bf16'] does not exist",
    ),
    "keywords that are no names": (optimize({1: X}), "keyword arguments by name"),
    "meta parameters": (
        optimize(model=nn.Linear(3, 5, device="meta").eval()), "'weight' is on the meta device",
    ),
    "a meta buffer": (optimize(model=with_a_meta_buffer()), "'extra' is on the meta device"),
}  # fmt: skip
BAD_NAMES: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown pass in only": (optimize(only=["fold_batchnrm"]), "fold_affine"),
    "an unknown pass in disable": (optimize(disable=["remove_identity"]), "remove_identities"),
    "to explain": (lambda: optimizer.explain("compose_transpose"), "compose_transposes"),
    "near to none": (lambda: optimizer.explain("zzz"), "fold_affine"),
    "a number for a name": (optimize(only=[3]), "no pass named 3"),
}


@rows("act words", BAD, BAD_NAMES)
def test_bad_input_is_a_typed_error_in_one_sentence(
    act: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised before any work, but for what only a call of the model tells."""

    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was copied, captured or called")

    for place in PLACES_OF_WORK if words != REJECTS else ():
        monkeypatch.setattr(f"optimizer.{place}", work)
    kind = PassError if (act, words) in BAD_NAMES.values() else InputError

    with pytest.raises(kind) as caught:
        act()

    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


PLACES_OF_WORK = [
    *(f"{place}.structural_copy" for place in ("core.copy", "frontend.symbolic")),
    *(f"{place}.structural_copy" for place in ("verify.equivalence", "frontend.module")),
    *("verify.check.answer", "verify.equivalence.answer"),
    *("_optimize.reference", "_optimize.answer", "_optimize.capture_call"),
]
VALUES = (
    *(None, True, 3, -1, 0.5, float("nan"), "", "nonsense", b"bytes", torch.bfloat16),
    *([], [3], {}, {1: 2}, {"a": 1}, {3}, (None, None), object(), nn.ReLU, nn.ReLU(), X),
)
SMALL = {"model": nn.ReLU().eval(), "example_inputs": X}
FAST = optimizer.optimize(nn.ReLU().eval(), X)
QUICK = {"repeats": 1, "warmup": 1}
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
    plain = f"(y := torch.sin(x), z := y * {slope}, "
    return Forward(plain + "{'plain': torch.cos(y), 'steep': torch.tanh(z)})[2]")


def test_check_names_the_output_the_error_and_the_first_value_to_differ() -> None:
    wrong = optimizer.capture(two(1.5), X)

    with pytest.raises(EquivalenceError) as caught:
        optimizer.check(two(1.0), wrong, X)

    message = str(caught.value)
    assert message.startswith("output['steep']: relative error 0.")
    assert "more than 0.0001" in message
    assert "; the first value to differ is 'mul' (operator.mul): relative error 0." in message


def cached(shift: float = 0.0) -> nn.Module:
    """Writes what it computes into an argument, as a decoder does its keys."""
    torch.manual_seed(0)
    written = "z.copy_(m.norm(m.linear(x)))"
    forward = f"({written}, (z * 2).add_(x.mul_({1 + shift}).mean() * 0))[1]"
    model = ForwardOfTwo(forward, linear=nn.Linear(64, 64), norm=nn.BatchNorm1d(64))
    model.norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


CACHED = torch.randn(8, 64), torch.zeros(8, 64)


@pytest.mark.parametrize("level", [1, 2])
def test_an_input_that_the_model_writes_is_rounded_as_an_output_is(level: int) -> None:
    fast = optimizer.optimize(cached(), CACHED, level=level)

    assert fast.report.counts()["fold_affine"] == 1
    assert not any("changed the answer" in remark for remark in fast.report.remarks)
    optimizer.check(cached(), fast, CACHED)


def test_an_input_that_the_model_leaves_is_compared_in_its_bits() -> None:
    with pytest.raises(EquivalenceError, match=r"input\[0\]\[0\]: relative error .* more than"):
        optimizer.check(cached(), cached(1e-6), CACHED)


def constant(value: object) -> nn.Module:
    """Return a fixed answer of any type."""
    return Forward(lambda m, x: value)


NAN = torch.tensor([1.0, float("nan"), float("inf")])
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "the shape": (X, X[:2], "shape"),
    "the dtype": (X, X.double(), "dtype"),
    "the structure": ((X, X), [X, X], "structure"),
    "a number": ((X, 1), (X, 2), "output[1]: is 2, not 1"),
    "the type of a number": ((X, 1), (X, 1.0), "output[1]: is 1.0, not 1"),
    "what it leaves in its input": (Forward("x.add_(1.0)"), Forward("x + 1.0"), "input[0][0]"),
    "a number beside NaN": (NAN, NAN + 1, "relative error"),
    "a NaN for a number": (NAN, NAN.nan_to_num(0.5), "inf"),
    "a one for a zero": (torch.zeros(2), torch.tensor([1.0, 0.0]), "relative error"),
    "the last bit of a large number": (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "error"),
    "a finite value beside an infinity": (NAN, NAN * 1.25, "relative error 0.25"),
    "the sign of an infinity": (NAN, torch.where(NAN.isinf(), -NAN, NAN), "inf"),
}


@rows("one other words", DIFFERENT)
def test_check_sees_a_difference_in(one: Any, other: Any, words: str) -> None:
    model, fast = (each if isinstance(each, nn.Module) else constant(each) for each in (one, other))

    with pytest.raises(EquivalenceError, match=r"^(output|input)") as caught:
        optimizer.check(model, fast, X)

    assert words in str(caught.value)


def test_check_accepts_nan_and_infinity_where_both_have_them() -> None:
    optimizer.check(constant(NAN), constant(NAN.clone()), X)


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
    imaginary = Forward("torch.complex(x, x).clone().imag")
    conjugate = Forward("torch.complex(x, x).conj().imag")
    x = torch.linspace(1.0, 2.0, 4)

    optimizer.check(conjugate, conjugate, x)
    with pytest.raises(EquivalenceError):
        optimizer.check(conjugate, imaginary, x)
