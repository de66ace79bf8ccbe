"""The list of subjects: what is in it, and a package that joins by an entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import subjects
from benchmarks.peers._table import tables
from benchmarks.subjects import HUNTED, PEER, VARIANT, all_subjects, named, names
from tests.quality import hunt

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip put the example of docs/own_subject into."""
    source = shutil.copytree(ROOT / "docs" / "own_subject", tmp_path_factory.mktemp("a") / "source")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def beside(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))
    return installed


@pytest.mark.integration
class TestThePackageOfTheDocs:
    @pytest.mark.usefixtures("beside")
    def test_it_has_every_role(self) -> None:
        subject = named("half_weights")

        assert all("half_weights" in names(role) for role in (VARIANT, PEER, HUNTED))
        assert subject.promise == 1e-3
        assert subject.is_installed

    def test_the_suite_has_it_as_a_variant(self, beside: Path) -> None:
        code = (
            "from benchmarks import _workloads as w; import sys; assert 'torch' not in sys.modules;"
            "forward = w.forward('simple_mlp', 'half_weights', 'cpu'); forward();"
            "print(w.VARIANTS, type(w.subject('simple_mlp', 'half_weights', 'cpu')[0]).__name__)"
        )
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.index("'half_weights'") > ran.stdout.index("'optimized-2-openvino'")

    def test_it_is_a_peer_within_its_promise(self, beside: Path) -> None:
        task = {"device": "cpu", "dtype": "float32", "model": "simple_mlp", "batch": 1}
        task |= {"threads": 1, "peer": "half_weights", "project": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.peers._worker", json.dumps(task)]
        ran = subprocess.run(
            command,
            cwd=ROOT,
            input='{"discarded": 1, "timed": 3}\n',
            capture_output=True,
            text=True,
        )
        prepared, block = map(json.loads, ran.stdout.splitlines())

        assert 1e-7 < prepared["difference"] < 1e-3 == prepared["budget"]
        assert len(block["seconds"]) == 3

    @pytest.mark.usefixtures("beside")
    def test_what_promises_an_error_is_not_hunted(self) -> None:
        assert "half_weights" in hunt.targets()
        assert "half_weights" not in hunt.installed()

    @pytest.mark.usefixtures("beside")
    def test_else_it_is_and_what_differs_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function = named("half_weights").prepare.args[0].load()  # type: ignore[attr-defined]
        monkeypatch.delattr(function, "promise")
        found = hunt.hunt("half_weights", 30)

        assert "half_weights" in hunt.installed()
        assert found
        assert any("linear" in each.counterexample.spec.tokens for each in found)
        assert "Hunted(name='half_weights')(model, inputs)" in found[0].counterexample.reproducer()


def declared(folder: Path, lines: str) -> None:
    info = folder / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{subjects.GROUP}]\n{lines}\n")


class TestWhatIsWrong:
    def test_an_unknown_name_is_told_with_those_that_there_are(self) -> None:
        with pytest.raises(ValueError, match="no subject 'nonesuch', but there are eager, optimiz"):
            named("nonesuch")

    def test_one_that_does_not_load_names_its_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        declared(tmp_path, "broken = no_such_module:subject")
        monkeypatch.syspath_prepend(tmp_path)

        assert "broken" in names(VARIANT)
        with pytest.raises(ValueError, match=r"'broken' of elsewhere cannot be loaded .*uninstall"):
            named("broken")

    def test_two_of_one_name_are_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        declared(tmp_path, "fx_fuse = somewhere:subject")
        monkeypatch.syspath_prepend(tmp_path)

        with pytest.raises(ValueError, match="two subjects named 'fx_fuse': rename somewhere"):
            all_subjects()


def test_the_variants_stand_in_the_order_that_results_are_filed_in() -> None:
    """Asv files by place too: append, and never reorder."""
    known = ["eager", "optimized-1", "fx_fuse", "optimized-2", "optimized-2-openvino"]
    assert names(VARIANT)[: len(known)] == known


def test_peers_stand_before_ours_and_an_unknown_one_last() -> None:
    assert subjects.ordered(["gone", "optimized-1", "openvino", "fx_fuse"]) == [
        "fx_fuse",
        "openvino",
        "optimized-1",
        "gone",
    ]


def test_a_speed_up_within_a_promised_error_counts() -> None:
    """Beyond it the answer is wrong, and has none."""
    key = ("cpu", "float32", "m", 1, 1)
    cell = {"seconds": [1.0] * 6, "eager_seconds": [2.0] * 6, "prepared": 1.0, "peak_memory": 1}
    eager = {**cell, "seconds": [2.0] * 6, "difference": 0.0}
    for difference, shown in ((0.005, True), (0.02, False)):
        told = {**cell, "difference": difference, "budget": 0.01}
        cells = {(*key, "eager"): eager, (*key, "compile"): told}

        assert ("2.00" in "\n".join(tables(cells))) is shown


def test_what_a_function_returns_is_called_as_a_module() -> None:
    subject = hunt.Hunted("eager")
    module = subject(nn.ReLU(), (torch.ones(2),))

    assert torch.equal(module(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert subject.call == "Hunted(name='eager')(model, inputs)"
