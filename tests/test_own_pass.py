"""The example of a pass in a repository of its own: its tests pass, and see its guards go."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from optimizer.testing import Counterexample

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
CODE = (ROOT / "docs" / "own_pass" / "double_negation.py").read_text()
GUARDS = [line for line in CODE.splitlines(keepends=True) if line.startswith("    require(")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "docs" / "own_pass", tmp_path / "own_pass"))


def test_its_tests_pass(repository: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    places = os.pathsep.join([str(repository), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": places}
    ran = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )

    assert "4 passed" in ran.stdout


@pytest.mark.parametrize("guard", GUARDS)
def test_they_see_each_guard_go(
    repository: Path, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ModuleType("double_negation")
    exec(CODE.replace(guard, ""), vars(without))
    monkeypatch.setitem(sys.modules, "double_negation", without)
    tests = runpy.run_path(str(repository / "tests" / "test_double_negation.py"))

    with pytest.raises(Counterexample):
        tests["test_it_keeps_the_answer"]()
