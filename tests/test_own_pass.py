"""The example of a pass in a repository of its own: its tests pass, and see its guards go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = (ROOT / "docs" / "own_pass" / "double_negation.py").read_text()
GUARDS = [line for line in CODE.splitlines(keepends=True) if line.startswith("    require(")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "docs" / "own_pass", tmp_path / "own_pass"))


def outcome_of(repository: Path, *tests: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    places = os.pathsep.join([str(repository), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": places}
    ran = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    return ran.stdout


def test_its_tests_pass(repository: Path) -> None:
    assert "4 passed" in outcome_of(repository)


@pytest.mark.parametrize("guard", GUARDS)
def test_they_see_each_guard_go(repository: Path, guard: str) -> None:
    (repository / "double_negation.py").write_text(CODE.replace(guard, ""))

    test = "tests/test_double_negation.py::test_it_keeps_the_answer"
    assert f"FAILED {test}" in outcome_of(repository, test)
