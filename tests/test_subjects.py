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
from tests.repository import table

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip put the example of docs/own_subject into."""
    source = shutil.copytree(ROOT / "docs" / "own_subject", tmp_path_factory.mktemp("a") / "source")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def beside(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))


def ran(*arguments, **options):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.integration
@pytest.mark.usefixtures("beside")
class TestThePackageOfTheDocs:
    def test_it_has_every_role_and_what_promises_an_error_is_not_hunted(self):
        assert all("half_weights" in names(role) for role in (VARIANT, PEER, HUNTED))
        assert named("half_weights").promise == 1e-3
        assert named("half_weights").is_installed
        assert "half_weights" in hunt.targets()
        assert "half_weights" not in hunt.installed()

    def test_the_suite_has_it_as_a_variant(self):
        told = ran(
            "-c",
            "from benchmarks import _workloads as w; import sys; assert 'torch' not in sys.modules;"
            "forward = w.forward('simple_mlp', 'half_weights', 'cpu'); forward();"
            "print(w.VARIANTS, type(w.subject('simple_mlp', 'half_weights', 'cpu')[0]).__name__)",
        )
        assert told.index("'half_weights'") > told.index("'optimized-2-openvino'")

    def test_it_is_a_peer_within_its_promise(self):
        task = {"device": "cpu", "dtype": "float32", "model": "simple_mlp", "batch": 1}
        task |= {"threads": 1, "peer": "half_weights", "project": str(ROOT)}
        asked = '{"discarded": 1, "timed": 3}\n'
        told = ran("-m", "benchmarks.peers._worker", json.dumps(task), input=asked)
        prepared, block = map(json.loads, told.splitlines())
        assert 1e-7 < prepared["difference"] < 1e-3 == prepared["budget"]
        assert len(block["seconds"]) == 3

    def test_without_a_promise_it_is_hunted_and_what_differs_is_found(self, monkeypatch):
        monkeypatch.delattr(named("half_weights").prepare.args[0].load(), "promise")
        found = hunt.hunt("half_weights", 30)
        assert "half_weights" in hunt.installed()
        assert any("linear" in each.counterexample.spec.tokens for each in found)
        assert "Hunted(name='half_weights')(model, inputs)" in found[0].counterexample.reproducer()


@table("line ask said",
    ("", lambda: named("nonesuch"), "no subject 'nonesuch', but there are eager, optimiz"),
    ("broken = no_such_module:subject", lambda: "broken" in names(VARIANT) and named("broken"),
     "'broken' of elsewhere cannot be loaded .*uninstall"),
    ("fx_fuse = somewhere:subject", all_subjects, "two subjects named 'fx_fuse': rename some"),
)  # fmt: skip
def test_what_a_package_declares_wrong_names_it(line, ask, said, tmp_path, monkeypatch):
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{subjects.GROUP}]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        ask()


def test_subjects_stand_in_the_order_that_results_are_filed_in():
    """Asv files by place too: append, and never reorder. Peers stand before ours."""
    known = ["eager", "optimized-1", "fx_fuse", "optimized-2", "optimized-2-openvino"]
    assert names(VARIANT)[: len(known)] == known
    found = subjects.ordered(["gone", "optimized-1", "openvino", "fx_fuse"])
    assert found == ["fx_fuse", "openvino", "optimized-1", "gone"]


@table("difference shown", (0.005, True), (0.02, False))
def test_a_speed_up_within_a_promised_error_counts(difference, shown):
    """Beyond it the answer is wrong, and has none."""
    cell = {"eager_seconds": [2.0] * 6, "prepared": 1.0, "peak_memory": 1}
    cells = {
        "eager": {**cell, "seconds": [2.0] * 6, "difference": 0.0},
        "compile": {**cell, "seconds": [1.0] * 6, "difference": difference, "budget": 0.01},
    }
    found = tables({("cpu", "float32", "m", 1, 1, peer): told for peer, told in cells.items()})
    assert ("2.00" in "\n".join(found)) is shown


def test_what_a_function_returns_is_called_as_a_module():
    subject = hunt.Hunted("eager")
    module = subject(nn.ReLU(), (torch.ones(2),))
    assert module(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]
    assert subject.call == "Hunted(name='eager')(model, inputs)"
