"""What belongs to the process or the thread is as it was: after errors, interrupts, and threads."""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from optimizer.core.context import ignoring, is_tracing
from optimizer.core.random import ProcessState

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


def process_state() -> list[Any]:
    return [
        nn.Module.__call__,
        nn.Module.__getattr__,
        torch.is_tensor,
        torch.zeros,
        "isinstance" in globals(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        is_tracing(),
        torch.fx._symbolic_trace.CURRENT_PATCHER,
        gc.isenabled(),
        list(warnings.filters),
        sys.getprofile(),
        random.getstate(),
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
    ]


PACKAGE = Path(optimizer.__file__).parent
# Where state is changed and put back: what the package does so in, and what it does so with.
PUTS_BACK = re.compile(r"finally:|__exit__|@contextmanager|patch|Mode\)")
OWN = tuple(str(each) for each in PACKAGE.rglob("*.py") if PUTS_BACK.search(each.read_text()))
SENSITIVE = (
    *OWN, "_symbolic_trace.py", "contextlib.py", "overrides.py", "grad_mode.py",
    "_python_dispatch.py", "_device.py",
)  # fmt: skip
EACH = 3  # one of so many lines is interrupted, of which a run takes hundreds


class Interrupting:
    """Notes the lines that this thread runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.lines = at, list[tuple[str, int]]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(SENSITIVE):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
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


RUNS: dict[str, Callable[[nn.Module], object]] = {
    "optimize": lambda model: optimizer.optimize(model, ROWS, level=0, check=None),
    "capture": lambda model: optimizer.capture(model, ROWS),
    "check": lambda model: optimizer.check(model, model, ROWS),
}


# Of the files that are interrupted, those that each surely runs.
MET = {
    "optimize": {"context", "random", "outside", "tracer", "type_tests"},
    "capture": {"context", "random", "outside", "tracer", "type_tests"},
    "check": {"context", "random", "outside"},
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fx's
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_at_any_line_leaves_the_process_as_it_was(name: str) -> None:
    run = partial(RUNS[name], Asking().eval())
    run()
    noting = Interrupting()
    noting.run(run)
    first = {line: place for place, line in reversed(list(enumerate(noting.lines, 1)))}
    before = process_state()

    interrupted = [line for line in sorted(first)[::EACH] if Interrupting(first[line]).run(run)]

    assert {Path(file).stem for file, _ in interrupted if file in OWN} >= MET[name]
    assert len(interrupted) > 50
    assert process_state() == before


class Noisy(nn.Module):
    """Draws in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("model", [Asking(), nn.Sequential(Asking(), Noisy())])
@pytest.mark.parametrize("draw", [
    lambda: torch.rand(()).item(), random.random, np.random.rand,
], ids=["torch", "random", "numpy"])  # fmt: skip
def test_no_number_of_another_thread_is_drawn_twice(
    model: nn.Module, draw: Callable[[], float]
) -> None:
    drawn, done = list[float](), threading.Event()

    def draw_on() -> None:
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


def test_the_thread_that_an_interpreter_starts_draws_nothing() -> None:
    fx.Interpreter(fx.symbolic_trace(nn.ReLU())).run(ROWS)

    assert any(type(each).__module__ == "tqdm._monitor" for each in threading.enumerate())
    assert ProcessState().alone


def test_threads_leave_the_filters_of_warnings_alone() -> None:
    before, done = list(warnings.filters), threading.Event()

    def filter_on() -> None:  # as a user's code may, at the same time
        while not done.wait(1e-3):
            with ignoring("nothing", UserWarning):
                pass

    def work(index: int) -> None:
        net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.ones(1, 3, 9, 9)
        optimizer.optimize(net, x, tune_seconds=0.0)

    with ThreadPoolExecutor(5) as pool:
        other = pool.submit(filter_on)
        list(pool.map(work, range(12)))
        done.set()
        other.result()

    assert list(warnings.filters) == before


def test_no_filters_are_swapped_while_a_model_is_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    model, swapped = Asking().eval(), list[object]()
    optimizer.optimize(model, ROWS)
    monkeypatch.setattr(warnings.catch_warnings, "__enter__", swapped.append)
    monkeypatch.setattr(warnings.catch_warnings, "__exit__", lambda *arguments: None)

    optimizer.optimize(model, ROWS)
    monkeypatch.undo()

    assert swapped == []
