"""The list of subjects: what is in it, and a package that joins by an entry point."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks import subjects
from benchmarks.peers._process import worker
from benchmarks.subjects import HUNTED, PEER, VARIANT, all_subjects, named, names
from tests.quality import hunt
from tests.repository import declared, installed_by_pip, table

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip put the example of docs/own_subject into."""
    source = shutil.copytree(ROOT / "docs" / "own_subject", tmp_path_factory.mktemp("a") / "source")
    return installed_by_pip(source, tmp_path_factory.mktemp("site"))


@pytest.fixture
def beside(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))


@pytest.mark.integration
@pytest.mark.usefixtures("beside")
class TestThePackageOfTheDocs:
    def test_it_has_every_role_and_what_promises_an_error_is_not_hunted(self):
        assert all("half_weights" in names(role) for role in (VARIANT, PEER, HUNTED))
        assert "half_weights" in hunt.targets()
        assert "half_weights" not in hunt.installed()

    def test_it_is_a_peer_within_its_promise(self):
        task = {"device": "cpu", "dtype": "float32", "model": "simple_mlp", "batch": 1}
        with worker(task | {"threads": 1, "peer": "half_weights"}, 120) as running:
            prepared = running.answer()
        assert 1e-7 < prepared["difference"] < 1e-3 == prepared["budget"]

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
    declared(tmp_path, f"[{subjects.GROUP}]\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        ask()


def test_subjects_stand_in_the_order_that_results_are_filed_in():
    """Asv files by place too: append, and never reorder. Peers stand before ours."""
    known = ["eager", "optimized-1", "fx_fuse", "optimized-2", "optimized-2-openvino"]
    assert names(VARIANT)[: len(known)] == known
    assert "openvino" in names(PEER, "cpu")
    assert "openvino" not in names(PEER, "cuda")
    found = subjects.ordered(["gone", "optimized-1", "openvino", "fx_fuse"])
    assert found == ["fx_fuse", "openvino", "optimized-1", "gone"]
