"""An asv environment that is this Python with the commit under test laid over it.

asv's own environments install the project with all it depends on, which here is gigabytes of
PyTorch for each commit. This one makes no environment: it runs the Python that asv runs on, with
the commit's checkout before everything else on the path. What that Python has of PyTorch and
OpenVINO is part of the environment's name, so that results of two versions share no series.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from asv import util
from asv.environment import Environment

from benchmarks._machine import register

_MEASURED_WITH = ("torch", "openvino")  # what a variant of the suite runs on
_OURS = ("optimizer", "models")
_LOCATE = """
import importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    print(spec.origin if spec and spec.origin else "")
"""


def setup() -> None:
    """Name the machine as our own commands do; asv calls this as it reads the configuration."""
    with contextlib.suppress(OSError):  # without a home folder asv itself says so, where it matters
        register()


def _versions() -> Iterator[tuple[str, str]]:
    """Of what is absent too: asv-tachyon asks for graphs of each package by a version."""
    for package in _MEASURED_WITH:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "none"


class HostOverlay(Environment):
    tool_name = "hostoverlay"
    _requirements: ClassVar[dict[str, str]] = {}  # asv reads it before it sets it

    def __init__(self, conf, python, requirements, tagged_env_vars) -> None:
        super().__init__(conf, python, requirements | dict(_versions()), tagged_env_vars)

    @classmethod
    def matches(cls, python: str) -> bool:
        return python == "{}.{}".format(*sys.version_info)

    def check_presence(self) -> bool:
        return Path(self._path).is_dir()

    def _setup(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise util.UserError(
                "torch is not installed beside asv, and benchmarks run on this Python:"
                ' pip install "torch>=2.13" "torchvision>=0.28"'
            )
        Path(self._path).mkdir(parents=True)

    def install_project(self, conf, repo, commit_hash: str) -> None:
        self.checkout_project(repo, commit_hash)
        self._refuse_a_stranger()

    def _refuse_a_stranger(self) -> None:
        """Results must be of the commit, not of a copy of the project that hides it."""
        origins = self.run(["-c", _LOCATE, *_OURS], cwd=self._path).splitlines()
        for name, origin in zip(_OURS, origins, strict=True):
            if origin and not Path(origin).is_relative_to(self._build_root):
                raise util.UserError(
                    f"'{name}' would be imported from {origin} and not from the commit under test:"
                    " pip uninstall optimizer, then run again."
                )

    def run(self, args: list[str], **options):
        environment = {**options.pop("env", os.environ), **self._global_env_vars}
        # asv's runner drops what comes by the first name, unless it comes by the second too.
        environment |= dict.fromkeys(["PYTHONPATH", "ASV_PYTHONPATH"], self._build_root)
        return util.check_output([sys.executable, *args], env=environment, **options)
