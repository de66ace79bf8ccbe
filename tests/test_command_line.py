"""`python -m optimizer`: what each command prints, its exit code, and errors on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import optimizer
from optimizer.__main__ import main

ROOT = Path(__file__).parent.parent

MODEL_FILE = """
import torch
from torch import nn

number = 3

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    return model.eval(), torch.randn(2, 3)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a model of the user's own, and sys.path put back afterwards."""
    (tmp_path / "my_model.py").write_text(MODEL_FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.chdir(tmp_path)


def test_passes_lists_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["passes"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == [each.name for each in optimizer.all_passes()]


@pytest.mark.parametrize("name", [each.name for each in optimizer.all_passes()])
def test_explain_prints_what_a_pass_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["explain", name])

    assert code == 0
    assert capsys.readouterr().out == optimizer.explain(name) + "\n"


def test_optimize_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["optimize", "toy_model"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("ToyModel, level 2, ")
    assert "1  fold_affine" in out


def test_optimize_prints_json_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["optimize", "toy_model", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["model"] == "ToyModel"
    assert [rewrite["name"] for rewrite in report["fired"]] == [
        "fold_affine",
        "fuse_linear_relu",
    ]


def test_level_and_disable_choose_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    fired = []
    disabled = ["--disable", "fold_affine", "fuse_linear_relu", "reuse_activations"]
    for options in (["--level", "0"], disabled):
        main(["optimize", "toy_model", "--json", *options])
        report = json.loads(capsys.readouterr().out)
        fired += [[rewrite["name"] for rewrite in report["fired"]]]

    assert fired == [["reuse_activations"], []]


def test_check_says_that_the_answers_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "toy_model"])

    assert code == 0
    assert capsys.readouterr().out.startswith("toy_model: the optimized model gives")


def test_compare_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "compare", lambda model, fast, inputs: "1.00x")

    code = main(["compare", "toy_model"])

    assert code == 0
    assert capsys.readouterr().out == "toy_model: 1.00x\n"


@pytest.mark.usefixtures("here")
def test_a_model_of_ones_own_is_named_by_module_and_callable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["optimize", "my_model:build", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {rewrite["name"] for rewrite in report["fired"]} == {
        "fold_affine",
        "remove_identities",
    }


MISTAKES = {
    "an unknown pass": (["explain", "fold_batchnrm"], "fold_affine"),
    "an unknown pass to disable": (["optimize", "toy_model", "--disable", "fold"], "fold"),
    "an unknown workload": (["optimize", "toy_modell"], "toy_model"),
    "an unknown level": (["check", "toy_model", "--level", "9"], "level 9"),
    "an absent device": (["optimize", "toy_model", "--device", "nonsense"], "nonsense"),
    "an unknown module": (["check", "no_such_module:build"], "no_such_module"),
    "an unknown callable": (["check", "my_model:no_such"], "no_such"),
    "a name that is no callable": (["check", "my_model:number"], "number"),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_stderr(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = MISTAKES[mistake]

    code = main(arguments)

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("arguments", [[], ["optimise", "resnet18"], ["optimize"]])
def test_a_wrong_command_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m optimizer")


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "optimizer", "explain", "nothing_like_it"]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no pass named 'nothing_like_it'")
    assert "Traceback" not in ended.stderr
