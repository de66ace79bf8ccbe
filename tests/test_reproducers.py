"""What a failure leaves behind fails again in a process of its own, also where a worker dies."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from optimizer.testing import Counterexample, check_pass

ROOT = Path(__file__).parents[1]
SUBJECTS = """
import os
from torch import nn

def negated(model, inputs):
    return nn.Sequential(model, nn.Threshold(1e9, -1.0))

def deadly(model, inputs):
    os.abort()
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "FUZZ_CRASHES": str(folder / "crashes")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "subjects.py").write_text(SUBJECTS)
    return tmp_path


def test_a_printed_test_fails_in_a_fresh_process(folder: Path) -> None:
    subjects = ModuleType("subjects")  # which the printed test imports from the folder
    exec(SUBJECTS, vars(subjects))
    with pytest.raises(Counterexample) as caught:
        check_pass(subjects.negated, "linear", max_examples=20)
    (folder / "test_printed.py").write_text(caught.value.reduced().reproducer())
    again = run("-m", "pytest", "-q", "test_printed.py", folder=folder)

    assert "1 failed" in again.stdout
    assert "AssertionError" in again.stdout


def test_a_model_that_kills_the_process_is_left_as_a_test_that_does_too(folder: Path) -> None:
    script = (
        "from subjects import deadly\n"
        "from optimizer.testing import Spec, check_spec\n"
        "check_spec(Spec(('linear', 'relu')), deadly, later=True)\n"
    )
    died = run("-c", script, folder=folder)
    (left,) = (folder / "crashes").iterdir()
    again = run("-m", "pytest", "-q", str(left), folder=folder)

    assert died.returncode < 0
    assert "nn.Linear" in left.read_text()
    assert again.returncode == died.returncode


def test_what_only_fails_is_not_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_CRASHES", str(folder / "crashes"))
    with pytest.raises(Counterexample):
        check_pass(lambda model, inputs: nn.Identity(), "linear")

    assert not list((folder / "crashes").iterdir())


def test_a_subject_may_print_what_is_being_handled() -> None:
    running, at_once = 0, set[int]()

    def broken(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        nonlocal running
        running += 1
        at_once.add(running)
        traceback.format_exc()  # as Dynamo does; making the report calls the subject
        running -= 1
        return nn.Sequential(model, nn.Threshold(1e9, -1.0))

    try:
        check_pass(broken, "linear")
    except Counterexample as failure:
        report = str(failure)
    assert "paste-ready test" in report
    assert at_once == {1}
