"""What belongs to the process or the thread is as it was: after errors, interrupts, and threads.

So are random numbers: the callers' are kept, and the checks see past those of a model.
"""

from __future__ import annotations

import ast
import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.context import forked_rng, is_tracing
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, texts

np = pytest.importorskip("numpy")
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Asking(nn.Module):
    """A small model that meets all that is patched while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch.Tensor) or not torch.is_tensor(x):
            raise TypeError
        return self.norm(self.linear(x)).relu() + torch.zeros(4)


def process_state():
    return [
        *(nn.Module.__call__, nn.Module.__getattr__, torch.is_tensor, torch.zeros),
        *("isinstance" in globals(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        *(is_tracing(), torch.fx._symbolic_trace.CURRENT_PATCHER, gc.isenabled()),
        *(list(warnings.filters), sys.getprofile()),
        *(random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())),
    ]


PACKAGE = Path(optimizer.__file__).parent
EACH = 12  # one of so many lines is interrupted, of which a run takes hundreds


def putting_back(file):
    """The lines that change state or put it back, where Python itself shields from no Ctrl-C."""
    found = list[Any]()
    for node in ast.walk(ast.parse(file.read_text())):
        found += node.finalbody if isinstance(node, ast.Try) else []
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        is_either = getattr(node, "name", "") in ("__enter__", "__exit__")
        found += [node] if is_either or "contextmanager" in decorators else []
    return {line for each in found for line in range(each.lineno, each.end_lineno + 1)}


LEFT_OUT = {str(file): putting_back(file) for file in PACKAGE.rglob("*.py")}


class Interrupting:
    """Notes the lines that this thread runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines = at, list[tuple[str, int]]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in LEFT_OUT:
            return None
        if event == "line" and frame.f_lineno not in LEFT_OUT[file]:
            self.lines.append((file, frame.f_lineno))
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, function: Callable[[], object]) -> bool:
        """Whether the function was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except (KeyboardInterrupt, optimizer.CaptureError):  # fx may turn the one into the other
            return True
        finally:
            sys.settrace(before)
        return False


RUNS = {
    "optimize": lambda model: optimizer.optimize(model, ROWS, level=0, check=None),
    "capture": lambda model: optimizer.capture(model, ROWS),
    "check": lambda model: optimizer.check(model, model, ROWS),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fx's
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_at_any_line_leaves_the_process_as_it_was(name):
    run = partial(RUNS[name], Asking().eval())
    run()
    noting = Interrupting()
    noting.run(run)
    first = {line: place for place, line in reversed(list(enumerate(noting.lines, 1)))}
    before = process_state()

    interrupted = [line for line in sorted(first)[::EACH] if Interrupting(first[line]).run(run)]

    assert {Path(file).parent.name for file, _ in interrupted} >= {"core", "facts", "frontend"}
    assert len(interrupted) > 25
    assert process_state() == before


@pytest.mark.parametrize("draw", [
    lambda: torch.rand(()).item(), random.random, np.random.rand,
], ids=["torch", "random", "numpy"])  # fmt: skip
def test_beside_a_model_that_draws_nothing_no_number_is_drawn_twice(draw):
    model, drawn, done = Asking(), list[float](), threading.Event()

    def draw_on():
        while not done.wait(1e-4):
            drawn.extend(float(draw()) for _ in range(10))

    thread = threading.Thread(target=draw_on)
    thread.start()
    try:
        for _ in range(5):
            fast = optimizer.optimize(model.eval().double(), ROWS.double(), level=1)
            optimizer.check(model, fast, ROWS.double())
    finally:
        done.set()
        thread.join()

    assert not any("left as it is" in remark for remark in fast.report.remarks)
    assert len(drawn) > 100
    assert len(set(drawn)) > 0.999 * len(drawn)  # of 2 ** 24 numbers, two may be the same


def test_no_filters_are_swapped_while_a_model_is_optimized(monkeypatch):
    model, swapped = Asking().eval(), list[object]()
    optimizer.optimize(model, ROWS)
    monkeypatch.setattr(warnings.catch_warnings, "__enter__", swapped.append)
    monkeypatch.setattr(warnings.catch_warnings, "__exit__", lambda *arguments: None)

    optimizer.optimize(model, ROWS)
    monkeypatch.undo()

    assert swapped == []


def test_a_pass_that_spoils_a_model_that_draws_is_rolled_back(monkeypatch):
    wrong = [
        replace(each, apply=lambda affine: affine.args[0]) if each.name == "fold_affine" else each
        for each in optimizer.all_passes()
    ]
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: tuple(wrong))
    draws = Forward("x + torch.rand_like(x)")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), draws).eval()
    nn.init.constant_(model[1].weight, 1.5)

    with pytest.warns(UserWarning, match="fold_affine"):
        fast = optimizer.optimize(model, ROWS, level=1)

    assert "changed the answer" in fast.report.remarks[0], fast.report.remarks


DRAWS = """
    torch.rand(x.shape, dtype=x.dtype); torch.randn_like(x); torch.randint(0, 9, x.shape) * x;
    torch.empty_like(x).normal_(1, 2); torch.bernoulli(torch.full_like(x, 0.5));
    F.dropout(x, 0.5, True); F.alpha_dropout(x, 0.5, True); x[torch.randperm(x.shape[0])]
"""


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.2), (torch.bfloat16, 3.0)])
@pytest.mark.parametrize("draw", texts(DRAWS))
def test_a_wrong_factor_beside_a_draw_is_seen(draw, dtype, factor):
    x = torch.linspace(-2.0, 3.0, 400).reshape(100, 4).to(dtype)
    right, same, wrong = (
        Forward(f"y = {draw}; return x[: y.shape[0]] * {each} + 0.1 * y")
        for each in (1.0, 1.0, factor)
    )

    optimizer.check(right, same, x)
    assert_equivalent(right, same, (x,))
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(right, wrong, x)
    with pytest.raises(AssertionError, match="output 0"):
        assert_equivalent(right, wrong, (x,))


def test_the_generators_of_gpus_are_put_back(monkeypatch):
    gpu, state = torch.Generator(), torch.tensor([3], dtype=torch.uint8)
    put = MagicMock()
    monkeypatch.setattr("torch.cuda.default_generators", (gpu,))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: state.clone())
    monkeypatch.setattr("torch.mps.set_rng_state", put)
    before = gpu.get_state()

    with forked_rng():
        gpu.manual_seed(3)
        state[0] = 4

    assert torch.equal(gpu.get_state(), before)
    assert put.call_args.args[0].tolist() == [3]
