"""`python -m optimizer`: what each command prints, its exit code, and errors on stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import optimizer
from tests.internals import main
from tests.single_pass import rows

ROOT = Path(__file__).parent.parent
MODEL_FILE = """
import torch
from torch import nn

build = lambda: (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).eval(),
                 torch.randn(2, 3))
module_alone = lambda: nn.Linear(3, 4)
with_a_parameter = lambda size: build()

def importing():
    import no_such_dependency

class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1

def branching():
    return Branching().eval(), torch.zeros(2)

def ending():
    raise SystemExit(0)
"""
PASSES = [each.name for each in optimizer.all_passes()]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A working directory with a model of the user's own, and sys.path put back afterwards."""
    (tmp_path / "my_model.py").write_text(MODEL_FILE)
    (tmp_path / "broken.py").write_text("def build(:")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run a command; return its exit code, and what it wrote to stdout and to stderr."""

    def run(command):
        try:
            code = main(command.split())
        except SystemExit as ended:  # of argparse
            code = ended.code
        return (code, *capsys.readouterr())

    return run


VERDICT = r"\A\S+: (faster|slower|no difference): speed-up .*, %s rounds(; more .*)?\n\Z"
# Words of the text, and keys of the JSON.
COMMANDS = {
    "explain fold_affine": (rf"\A{re.escape(optimizer.explain('fold_affine'))}", "name text"),
    "optimize toy_model":
        (r"\AToyModel, level 2, .*\n(?s:.*)speed-up (?s:.*)1  fold_affine", "fired figures"),
    "optimize my_model:branching": ("speed-up (?s:.*)left as it is: ", "figures"),
    "check my_model:build": (r"\Amy_model:build: the optimized model gives", "same"),
    "compare toy_model --rounds 7": (VERDICT % 7, "verdict speedup fast"),
    "bisect my_model:build": (r"\Amy_model:build: no rewrite", "rewrites reason"),
    "cost my_model:build":
        (r"(?s)\Anode +calls +shape.*\n\d kernels, .*\nbefore: \d kernels", "before measured"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_text_or_json_and_tells_a_terminal_what_it_does(command, run, monkeypatch):
    printed, keys = COMMANDS[command]
    code, out, err = run(command)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, data, shown = run(f"{command} --json")

    assert (code, err) == (0, "")
    assert re.search(printed, out)
    assert set(keys.split()) <= json.loads(data).keys()
    assert ("making" in shown) is (not command.startswith("explain"))


def test_the_passes_are_listed_and_the_version(run):
    told = json.loads(run("passes --json")[1])

    assert [line.split()[0] for line in run("passes")[1].splitlines()] == PASSES
    assert [each["name"] for each in told] == PASSES
    assert set(told[0]) == {"name", "numerics", "summary"}
    assert run("--version") == (0, f"optimizer {optimizer.__version__}\n", "")


ALL = "fold_affine,fuse_linear_relu,reuse_activations"
CHOSEN = {
    "level 0": ("toy_model --level 0", ["reuse_activations"]),
    "added up": (f"toy_model --disable {ALL[:11]} --disable {ALL[12:]}", []),
    "names leave the model behind them alone":
        ("--disable fold_affine --engines none toy_model", ["reuse_activations"]),
    "a model of one's own": ("my_model:build", ["fold_affine", "remove_identities"]),
}  # fmt: skip


@rows("options fired", CHOSEN)
def test_options_choose_the_passes_and_engines(options, fired, run):
    report = json.loads(run(f"optimize --json {options}")[1])

    assert sorted(rewrite["name"] for rewrite in report["fired"]) == fired
    if "none" in options:
        assert not any("OpenVINO" in name for c in report["choices"] for name in c["seconds"])


def fails(error):
    def fail(*_, **__):
        raise error

    return fail


def warns(*_):
    warnings.warn("planted", FutureWarning, stacklevel=1)


ENDS = {
    "differs": (fails(optimizer.EquivalenceError("off by 3")), 1, "error: off by 3\n"),
    "ctrl-c": (fails(KeyboardInterrupt()), 130, ""),
    "warns": (warns, 0, "FutureWarning: planted\n"),
}


@rows("does code err", ENDS)
@pytest.mark.filterwarnings("default")
def test_what_ends_a_command_has_a_code_and_a_line_of_its_own(does, code, err, run, monkeypatch):
    monkeypatch.setattr(optimizer, "check", does)
    shown = warnings.showwarning

    assert run("check toy_model")[::2] == (code, err)
    assert warnings.showwarning is shown


def test_help_has_examples_and_exit_codes(run):
    _, out, _ = run("--help")

    examples, _, codes = out.partition("examples:")[2].partition("exit codes:")
    assert "\n  optimizer optimize resnet18 --html report.html\n" in examples
    assert [line.split()[0] for line in codes.strip().splitlines()] == ["0", "1", "2", "130"]


MISTAKES = {
    "optimize toy_modell": "toy_model",
    "check no_such_module:build": "no_such_module",
    "check my_model:no_such": "no_such",
    "check broken:build": "SyntaxError",
    "check my_model:with_a_parameter": "argument: 'size'",
    "check my_model:importing": "No module named 'no_such_dependency', at my_model.py:11",
    "check my_model:ending": "SystemExit",
    "check my_model:module_alone": "return a module and its",
    "check my_model:build --device meta": "the meta device",
}
BEFORE_ANY_WORK = {
    "optimize toy_model --disable fold": "fold",
    "check toy_model --engines onnxruntime,nonsense": "nonsense",
    "bisect toy_model --level -1": "level -1",
    "compare toy_model --rounds 3": "error: rounds is 3: pass a whole number of at least 6.\n",
    "optimize toy_model --html no/such/folder.html": "is no file that can be written",
}


@pytest.mark.parametrize("command", [*MISTAKES, *BEFORE_ANY_WORK])
def test_a_mistake_is_one_line_on_stderr(command, run, monkeypatch):
    if command in BEFORE_ANY_WORK:
        monkeypatch.setattr("optimizer.workloads.load", fails(AssertionError("a model was built")))

    code, out, err = run(command)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert (MISTAKES | BEFORE_ANY_WORK)[command] in err


def test_both_reports_are_written_and_one_that_is_tried_leaves_no_file(run):
    Path("kept.html").write_text("kept")
    for page in ("report.html", "kept.html"):
        run(f"optimize no_such_model --html {page}")
    assert not Path("report.html").exists()
    assert Path("kept.html").read_text() == "kept"

    _, out, _ = run("optimize my_model:build --json --html report.html")
    assert json.loads(out)["model"] == "Sequential"
    assert "fold_affine" in Path("report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["", "optimise resnet18", "cost toy_model --html"])
def test_a_wrong_command_shows_the_usage(command, run):
    code, _, err = run(command)

    assert code == 2
    assert err.startswith("usage: optimizer")


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "optimizer", "passes"]
    piped = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **piped) as process:
        process.stdout.close()  # as `| head -0` does
        complaints = process.stderr.read()

    assert (process.returncode, complaints) == (0, "")
