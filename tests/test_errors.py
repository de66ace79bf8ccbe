"""Bad input is a typed error of one sentence, raised before any work; `check` tells a bug."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import optimizer
from optimizer import EquivalenceError, InputError, OptimizerError, PassError
from tests.single_pass import Forward, ForwardOfTwo, rows

X, WIDE = torch.randn(4, 3), torch.randn(4, 7)


def a_model(device: str = "cpu") -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()).eval()
    model.register_buffer("extra", torch.empty(2, device=device))
    return model


def optimize(inputs: object = X, model: Any = None, **options: Any) -> Any:
    return optimizer.optimize(model or a_model(), inputs, **{"level": 1} | options)


REJECTS, NO_MODULE = "rejects these example inputs", "no torch.nn.Module"
UNUSED = Forward("m.no_work_is_done")  # a call of it would be another error
OVERFLOWS = Forward("y = x.byte(); y[x < 9] = 256; return y").eval()  # no shape tells
BAD = {
    "optimize(model=torch.relu)": NO_MODULE,
    "optimize(model=nn.ReLU)": "pass one, constructed",
    "optimizer.check(UNUSED, torch.relu, X)": NO_MODULE,
    "optimizer.check(torch.relu, UNUSED, X)": NO_MODULE,
    "optimizer.capture(torch.relu, X)": NO_MODULE,
    "optimize(3, UNUSED)": "arguments by name, and no int",
    "optimize({1: X}, UNUSED)": "keyword arguments by name",
    "optimize(WIDE)": REJECTS,
    "optimize(WIDE, check=None)": REJECTS,
    "optimize((X, X), check=None)": REJECTS,
    "optimize(X, OVERFLOWS, check=None, level=2)": REJECTS,
    "optimize({'image': X}, check=None)": REJECTS,
    "optimizer.check(a_model(), a_model(), WIDE)": REJECTS,
    "optimize(X, UNUSED, level=7)": "level 7 does not exist: use 0",
    "optimize(X, UNUSED, check='always')": "check='always' does not exist: use 'final'",
    "optimize(X, UNUSED, only=3)": "only is 3: pass a list",
    "optimizer.bisect(UNUSED, X, disable=None)": "disable is None: pass a list",
    "optimize(X, UNUSED, level=2, cuda_graph='no')": "cuda_graph is 'no': pass True or False",
    "optimize(X, UNUSED, level=2, error_budget=0.5)": "error_budget=0.5 is for a precision",
    "optimize(X, UNUSED, precision=['bf16'], level=3)": "precision=['bf16'] does not exist",
    "optimize(X, UNUSED, level=3)": "level=3 and precision=",
    "optimize(X, UNUSED, level=2, precision='bf16')": "level=3 and precision=",
    "optimize(X, UNUSED, level=3, precision='bf16', error_budget=0)": "error_budget is 0",
    "optimize(X, UNUSED, level=2, tune_seconds=-1)": "tune_seconds",
    "optimize(X, UNUSED, level=2, tune_seconds=torch.nan)": "tune_seconds",
    "optimize(X, UNUSED, level=2, tune_seconds=10**400)": "tune_seconds",
    "optimize(X, UNUSED, level=2, engines=('magic',))": "there is no 'magic'",
    "optimize(X, nn.Linear(3, 5, device='meta'))": "'weight' is on the meta device",
    "optimize(X, a_model('meta'))": "'extra' is on the meta device",
    "optimize(X, UNUSED, only=['fold_batchnrm'])": "no pass named 'fold_batchnrm'",
    "optimize(X, UNUSED, disable=[3])": "no pass named 3",
    "optimizer.analysis.roofline(UNUSED, X, 3)": "at is 3: pass optimizer.analysis.Ceilings",
    "optimizer.explain('compose_transpose')": "compose_transposes or",
}


@pytest.mark.parametrize("call", BAD)
def test_bad_input_is_a_typed_error_in_one_sentence(call: str) -> None:
    """It is raised before any work, but for what only a call of the model tells."""
    of_passes = "no pass" in BAD[call] or "explain" in call
    with pytest.raises(PassError if of_passes else InputError) as caught:
        eval(call)
    message = str(caught.value)
    assert of_passes or isinstance(caught.value, ValueError)
    assert BAD[call] in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


VALUES = (
    *(None, True, 3, -1, 0.5, float("nan"), "", "nonsense", b"bytes", torch.bfloat16),
    *([], [3], {}, {1: 2}, {"a": 1}, {3}, (None, None), object(), nn.ReLU, nn.ReLU(), X),
)
SMALL = {"model": nn.ReLU().eval(), "example_inputs": X}
FAST = optimizer.optimize(nn.ReLU().eval(), X)
MEASURED = {"module": FAST, "example_inputs": X, "repeats": 1, "warmup": 1}
ENTRIES: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "optimize": (optimizer.optimize, SMALL | {"check": None}),
    "capture": (optimizer.capture, SMALL),
    "check": (optimizer.check, SMALL | {"fast": FAST}),
    "measure": (optimizer.measure, MEASURED),
    "compare": (optimizer.compare, SMALL | {"fast": FAST, "rounds": 6}),
    "bisect": (optimizer.bisect, SMALL),
    "explain": (optimizer.explain, {"name": "fold_affine"}),
    "lower": (FAST.lower, {"example_inputs": X}),
    "refit": (FAST.refit, {"state_dict": {}}),
}
ARGUMENTS = [
    (name, each) for name in ENTRIES for each in inspect.signature(ENTRIES[name][0]).parameters
]


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_any_value_is_honoured_or_a_typed_error(name, argument, tmp_path, monkeypatch):
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


def test_a_training_mode_model_is_optimized_with_one_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.BatchNorm1d(5)).train()
    with pytest.warns(UserWarning, match="training mode") as caught:
        fast = optimize(X, model)

    assert len(caught) == 1
    assert fast.report.counts() == {"remove_identities": 1}
    assert any("training mode" in remark for remark in fast.report.remarks)
    assert torch.equal(fast(X), model(X))


def test_without_example_inputs_the_report_says_what_was_not_done() -> None:
    report = optimize(None).report
    assert any("no example inputs" in remark for remark in report.remarks)
    assert report.checked == ""


def two(slope: float) -> nn.Module:
    """Two outputs, of which the second goes through `slope`."""
    plain = f"(y := torch.sin(x), z := y * {slope}, "
    return Forward(plain + "{'plain': torch.cos(y), 'steep': torch.tanh(z)})[2]")


def cached(shift: float = 0.0) -> nn.Module:
    """Writes what it computes into an argument, as a decoder does its keys."""
    torch.manual_seed(0)
    written = "z.copy_(m.norm(m.linear(x)))"
    forward = f"({written}, (z * 2).add_(x.mul_({1 + shift}).mean() * 0))[1]"
    model = ForwardOfTwo(forward, linear=nn.Linear(64, 64), norm=nn.BatchNorm1d(64))
    model.norm.running_var.uniform_(0.5, 2.0)
    return model.eval()


def cancelling(shift: float, slope: float = 1.0) -> nn.Module:
    """(x + 1e4) - 1e4, summed in one order or the other: both lose the same four digits."""
    return Forward(lambda m, x: ((x + shift) - 1e4) + (1e4 - shift) * slope)


CACHED = torch.randn(8, 64), torch.zeros(8, 64)
NAN, ONE = torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor(1)
CONJUGATE = Forward("torch.complex(x, x).conj().imag")
STEEP = r"^output\['steep'\]: .* 0\..* more than 0.0001.*; the first value to differ is 'mul' \(ope"
# Two models, or what they return, and words of the error: none if they are the same.
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "an output, by how much and where first": (two(1.0), optimizer.capture(two(1.5), X), STEEP),
    "the shape": (X, X[:2], "shape"),
    "the dtype": (X, X.double(), "dtype"),
    "the structure": ((X, X), [X, X], "structure"),
    "a number": ((X, 1), (X, 2), r"output\[1\]: is 2, not 1"),
    "the type of a number": ((X, 1), (X, 1.0), r"output\[1\]: is 1.0, not 1"),
    "an answer where the other raises": (X, nn.Linear(9, 9), "output: raised RuntimeError: mat1"),
    "what it leaves in its input": (Forward("x.add_(1.0)"), Forward("x + 1.0"), r"input\[0\]\[0\]"),
    "a number beside NaN": (NAN, NAN + 1, "relative error"),
    "a NaN for a number": (NAN, NAN.nan_to_num(0.5), "inf"),
    "a one for a zero": (torch.zeros(2), torch.tensor([1.0, 0.0]), "relative error"),
    "the last bit of a large number": (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "error"),
    "a large integer": (Forward("torch.tensor(2**24 + 1) > 2**24"), torch.tensor(False), "error"),
    "another equal integer": (Forward("torch.ones(2).long().argmax()"), ONE, "error"),
    "another equal float": (Forward("(0 * x[0]).sum(0); return torch.ones(2).argmax()"), ONE, ""),
    "a finite value beside an infinity": (NAN, NAN * 1.25, "relative error 0.25"),
    "the sign of an infinity": (NAN, torch.where(NAN.isinf(), -NAN, NAN), "inf"),
    "NaN and infinity in both": (NAN, NAN.clone(), ""),
    "what an ill-conditioned model loses too": (cancelling(1e4), cancelling(5e3), ""),
    "what such a model does not lose": (cancelling(1e4), cancelling(5e3, 1.01), "relative error"),
    "a view that is negated in reading": (CONJUGATE, Forward("-torch.complex(x, x).imag"), ""),
    "the same bits, not negated": (CONJUGATE, Forward("torch.complex(x, x).imag"), "relative"),
}


@rows("one other words", PAIRS)
def test_check_tells_a_difference_in(one: Any, other: Any, words: str) -> None:
    pair = [each if isinstance(each, nn.Module) else Forward(lambda m, x, it=each: it)
            for each in (one, other)]  # fmt: skip
    if not words:
        optimizer.check(*pair, X)
        return
    with pytest.raises(EquivalenceError, match=r"^(output|input)") as caught:
        optimizer.check(*pair, X)
    assert isinstance(caught.value, AssertionError)
    caught.match(words)


@pytest.mark.parametrize("level", [1, 2])
def test_an_input_that_the_model_writes_is_rounded_as_an_output_is(level: int) -> None:
    """And one that it leaves is compared in its bits."""
    fast = optimizer.optimize(cached(), CACHED, level=level)
    assert fast.report.counts()["fold_affine"] == 1
    assert not any("changed the answer" in remark for remark in fast.report.remarks)
    optimizer.check(cached(), fast, CACHED)
    with pytest.raises(EquivalenceError, match=r"input\[0\]\[0\]: relative error .* more than"):
        optimizer.check(cached(), cached(1e-6), CACHED)


def test_a_check_that_fails_leaves_the_weights_that_a_graph_writes():
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    model, other = (Forward(f"m.w.mul_(2) {sign} x", w=weight) for sign in "+-")
    fast = optimizer.capture(other, torch.ones(2))
    with pytest.raises(optimizer.EquivalenceError, match="the first value to differ"):
        optimizer.check(model, fast, torch.ones(2))
    assert [each.tolist() for each in (*fast.parameters(), weight)] == [[1, 1], [1, 1]]
