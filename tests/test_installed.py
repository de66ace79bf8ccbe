"""The package as it is installed: in a folder of its own, used from a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import installed_by_pip, table

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent
A_MODEL = "from torch import nn, ones\n\ndef build():\n    return nn.ReLU().eval(), ones(2)\n"
MODELS_OF_THE_USER = {
    "models.py": A_MODEL,
    "models/net.py": A_MODEL,  # a folder without __init__.py gives way to any package
    "models/__init__.py": "raise RuntimeError('these are not the workloads')\n",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed a copy of the checkout in."""
    copied = tmp_path_factory.mktemp("checkout")
    for name in ("optimizer", "models", "pyproject.toml", "README.md", "LICENSE"):
        (copied / name).symlink_to(ROOT / name)
    return installed_by_pip(copied, tmp_path_factory.mktemp("packages"))


def ran(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment, command = os.environ | {"PYTHONPATH": str(path)}, [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_only_one_name_is_taken(installed: Path) -> None:
    names = {path.name.partition("-")[0] for path in installed.iterdir()}

    assert names == {"optimizer", "bin"}
    assert [path.name for path in (installed / "bin").iterdir()] == ["optimizer"]


def placed(file, folder):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(MODELS_OF_THE_USER[file])


@pytest.mark.parametrize("file", MODELS_OF_THE_USER)
def test_the_workloads_are_found_where_the_user_has_models(file, installed, tmp_path):
    placed(file, tmp_path)
    for path in (installed, ROOT):
        ended = ran("-m", "optimizer", "optimize", "toy_model", cwd=tmp_path, path=path)

        assert ended.stderr == ""
        assert ended.stdout.startswith("ToyModel, level 2")


@table("file name", ("models.py", "models"), ("models/net.py", "models.net"))
def test_models_of_the_user_are_the_users(file, name, installed, tmp_path):
    placed(file, tmp_path)
    ended = ran("-m", "optimizer", "optimize", f"{name}:build", cwd=tmp_path, path=installed)

    assert ended.stderr == ""
    assert ended.stdout.startswith("ReLU, level 2")
