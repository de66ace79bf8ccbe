"""The example of a pass in a repository of its own: its tests pass, and see its guards go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUARD = '    require(is_read_only(inner) and is_read_only(outer), "a negation is written")\n'


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
    assert "5 passed" in outcome_of(repository)


def test_they_see_a_guard_go(repository: Path) -> None:
    code = repository / "double_negation.py"
    assert GUARD in code.read_text()
    code.write_text(code.read_text().replace(GUARD, ""))

    test = "tests/test_double_negation.py::test_it_keeps_every_bit"
    assert f"FAILED {test}" in outcome_of(repository, test)
