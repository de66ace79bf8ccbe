"""`python -m optimizer`: what each command prints, its exit code, and errors on stderr."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import optimizer
from optimizer.__main__ import main
from tests.repository import table
from tests.single_pass import rows

ROOT = Path(__file__).parent.parent
MODEL_FILE = """
import torch
from torch import nn

number = 3
build = lambda: (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).eval(),
                 torch.randn(2, 3))
module_alone = lambda: nn.Linear(3, 4)
wrong_way_round = lambda: build()[::-1]
nothing = lambda: None
with_a_parameter = lambda size: build()
training = lambda: (nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3))

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


VERDICT = r"\Atoy_model: (faster|slower|no difference): speed-up .*, %s rounds(; more .*)?\n\Z"


@rows(
    "command printed absent",
    {
        "optimize": (
            "optimize toy_model",
            [r"\AToyModel, level 2, ", "nodes; it saw 2 x Linear, ", "speed-up ",
             "kernels 4 -> 3, ", "1  fold_affine"],
            [],
        ),
        "what cannot be recorded is timed all the same": (
            "optimize my_model:branching", ["left as it is: ", "speed-up "], ["kernels", "0 -> 0"],
        ),
        "check": ("check toy_model", [r"\Atoy_model: the optimized model gives"], []),
        "compare": ("compare toy_model", [VERDICT % 20], []),
        "so many rounds": ("compare toy_model --rounds 7", [VERDICT % 7], []),
        "bisect": ("bisect my_model:build", [r"\Amy_model:build: no rewrite"], []),
        "cost": ("cost toy_model", [r"\Anode +calls +shape", "\n3 kernels, .*\nbefore: 4 ker"], []),
        "version": ("--version", [rf"\Aoptimizer {optimizer.__version__}\n\Z"], []),
    },
)  # fmt: skip
def test_a_command_prints_text_and_where_no_terminal_is_nothing_else(command, printed, absent, run):
    code, out, err = run(command)

    assert (code, err) == (0, "")
    assert all(re.search(each, out) for each in printed)
    assert not any(each in out for each in absent)


def test_the_passes_are_listed_and_explained(run):
    told = json.loads(run("passes --json")[1])

    assert [line.split()[0] for line in run("passes")[1].splitlines()] == PASSES
    assert [each["name"] for each in told] == PASSES
    assert set(told[0]) == {"name", "numerics", "summary"}
    for name in PASSES:
        assert run(f"explain {name}") == (0, optimizer.explain(name) + "\n", "")


FOLDED = ["fold_affine", "fuse_linear_relu"]


@rows(
    "options fired",
    {
        "all": ("toy_model", FOLDED),
        "level 0": ("toy_model --level 0", ["reuse_activations"]),
        "disabled": ("toy_model --disable fold_affine,fuse_linear_relu,reuse_activations", []),
        "added up": (
            "toy_model --disable fold_affine --disable fuse_linear_relu,reuse_activations", [],
        ),
        "names leave the model behind them alone": (
            "--disable fold_affine --engines none toy_model", ["reuse_activations"],
        ),
        "a model of one's own": ("my_model:build", ["fold_affine", "remove_identities"]),
    },
)  # fmt: skip
def test_options_choose_the_passes_and_engines(options, fired, run):
    code, out, _ = run(f"optimize --json {options}")

    report = json.loads(out)
    assert code == 0
    assert sorted(rewrite["name"] for rewrite in report["fired"]) == fired
    figures = {"FLOPs", "bytes moved", "milliseconds", "peak memory", "kernels"}
    assert figures <= set(report["figures"])
    if options == "toy_model":
        assert (report["model"], report["figures"]["kernels"]) == ("ToyModel", [4, 3])
    if "none" in options:
        assert not any("OpenVINO" in name for c in report["choices"] for name in c["seconds"])


def fails(error):
    def fail(*_, **__):
        raise error

    return fail


@rows(
    "does code err",
    {
        "differs": (fails(optimizer.EquivalenceError("off by 3")), 1, "error: off by 3\n"),
        "ctrl-c": (fails(KeyboardInterrupt()), 130, ""),
        "warns": (
            lambda *_: warnings.warn("planted", FutureWarning, stacklevel=1),
            0,
            "FutureWarning: planted\n",
        ),
    },
)
@pytest.mark.filterwarnings("default")
def test_what_ends_a_command_has_a_code_and_a_line_of_its_own(does, code, err, run, monkeypatch):
    monkeypatch.setattr(optimizer, "check", does)
    shown = warnings.showwarning

    assert run("check toy_model")[::2] == (code, err)
    assert warnings.showwarning is shown


@pytest.mark.parametrize("command", ["", "optimize", "explain", "bisect"])
def test_help_has_examples_and_exit_codes(command, run):
    _, out, _ = run(f"{command} --help")

    examples, _, codes = out.partition("examples:")[2].partition("exit codes:")
    assert "\n  optimizer optimize resnet18 --html report.html\n" in examples
    assert [line.split()[0] for line in codes.strip().splitlines()] == ["0", "1", "2", "130"]


MISTAKES = {
    "explain fold_batchnrm": "fold_affine",
    "optimize toy_modell": "toy_model",
    "check no_such_module:build": "no_such_module",
    "check my_model:no_such": "no_such",
    "check my_model:number": "number",
    "check :build": "':build' gives no model",
    "check .my_model:build": ".my_model",
    "check broken:build": "SyntaxError",
    "check my_model:with_a_parameter": "argument: 'size'",
    "check my_model:importing": "No module named 'no_such_dependency', at my_model.py:15",
    "check my_model:ending": "SystemExit: 0, at my_model.py:25",
    "check my_model:module_alone": "return a module and its",
    "check my_model:nothing": "returns <class 'NoneType'>: return",
    "check my_model:wrong_way_round": "example_inputs is of",
    "check my_model:wrong_way_round --device cpu": "no torch.nn.Module",
    "check my_model:build --device meta": "the meta device",
}
BEFORE_ANY_WORK = {
    "optimize toy_model --disable fold": "fold",
    "check toy_model --level 9": "level 9",
    "optimize toy_model --device nonsense": "nonsense",
    "check my_model:build --device nonsense": "nonsense",
    "check toy_model --level 3": "level=3 goes with",
    "cost toy_model --precision bf16": "level=3 goes with",
    "bisect toy_model --level -1": "level -1",
    "compare toy_model --rounds 3": "error: rounds is 3: pass a whole number of at least 6.\n",
    "optimize toy_model --html no/such/folder.html": (
        "--html='no/such/folder.html' is no file that can be written"
    ),
    "optimize toy_model --html .": "--html='.' is no",
}


@pytest.mark.parametrize("command", [*MISTAKES, *BEFORE_ANY_WORK])
def test_a_mistake_is_one_line_on_stderr(command, run, monkeypatch):
    if command in BEFORE_ANY_WORK:
        build = fails(AssertionError("a model was built"))
        monkeypatch.setattr("optimizer.workloads.load", build)
        monkeypatch.setattr("optimizer.__main__._from_callable", build)

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


def test_a_model_of_ones_own_is_moved_to_the_device(monkeypatch):
    given = []
    found = lambda *arguments, **_: given.extend(arguments) or optimizer.Culprit(None)  # noqa: E731
    monkeypatch.setattr(optimizer, "bisect", found)

    main(["bisect", "my_model:build", "--device", "meta"])

    model, inputs = given
    assert {each.device.type for each in (*model.parameters(), inputs)} == {"meta"}


@table("options given",
    ("", "auto"), ("--engines auto", "auto"), ("--engines none", "[]"),
    ("--engines openvino,onnxruntime", "['openvino', 'onnxruntime']"),
    ("--engines openvino --engines onnxruntime", "['openvino', 'onnxruntime']"),
)  # fmt: skip
def test_engines_are_named_as_optimize_takes_them(options, given, run, monkeypatch):
    def tuning(**options):
        raise optimizer.InputError(str(options["engines"]))

    monkeypatch.setattr("optimizer.__main__.Tuning", tuning)

    assert run(f"check {options} toy_model")[2] == f"error: {given}\n"


@pytest.mark.parametrize("command", [
    "", "optimise resnet18", "optimize", "optimize toy_model --precision fp8 --level 3",
    # What a command has no use for, it does not take.
    "bisect toy_model --precision bf16 --level 3", "cost toy_model --html report.html",
])  # fmt: skip
def test_a_wrong_command_shows_the_usage(command, run):
    code, _, err = run(command)

    assert code == 2
    assert err.startswith("usage: optimizer")
    assert command or "{passes,explain,optimize,check,bisect,compare" in err


def test_the_module_runs_as_a_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["optimizer", "explain", "nothing_like_it"])
    monkeypatch.delitem(sys.modules, "optimizer.__main__")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("optimizer", run_name="__main__")

    assert capsys.readouterr().err.startswith("error: there is no pass named 'nothing_like_it'")


class Terminal(io.StringIO):
    def isatty(self):
        return True


BOTH = ["making my_model:build", "optimizing", "running both"]
BISECTING = ["making my_model:build", "bisecting"]
SPREAD = {"median", "low", "high", "samples"}


@rows(
    "command stages keys",
    {
        "optimize": ("optimize my_model:build", BOTH, {"fired", "figures", "choices"}),
        "check": ("check my_model:build", BOTH, set()),
        "compare": ("compare my_model:build", BOTH, {"verdict", "speedup", "fast"}),
        "cost": ("cost my_model:build", BOTH, {"before", "after", "measured", "remark"}),
        "bisect": ("bisect my_model:build", BISECTING, set()),
        "explain": ("explain fold_affine", [], {"name", "text"}),
    },
)
def test_a_terminal_is_told_what_is_done_and_json_parses(command, stages, keys, run, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())

    code, out, _ = run(command)
    data = json.loads(run(f"{command} --json")[1])

    told = list(dict.fromkeys(re.findall("making [a-z_:]+|[a-z]+ing(?: both)?", shown.getvalue())))
    assert (code, told) == (0, stages)
    left = shown.getvalue().rpartition("\x1b[2K")[2]
    assert re.sub(r"\x1b\[\?25[lh]\r?", "", left) == ""  # only the cursor is put back
    assert "\x1b" not in out
    assert keys <= data.keys()
    assert "speedup" not in keys or data["speedup"].keys() == SPREAD


def test_a_mistake_is_told_below_what_was_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())

    assert main(["check", "my_model:ending"]) == 2
    assert shown.getvalue().rpartition("\x1b[2K")[2].startswith("error: 'my_model:ending'")


def test_what_runs_beside_the_nodes_is_told(run, monkeypatch):
    kept = optimizer.optimize
    untimed = lambda *given, **options: kept(*given, **options, tune_seconds=0)  # noqa: E731
    monkeypatch.setattr(optimizer, "optimize", untimed)

    last = run("cost --engines none tiny_convnet")[1].splitlines()[-1]

    assert re.search("parts? (is|are) run by packed weights, channels_last instead", last)
    assert "instead" not in run("cost --level 1 tiny_convnet")[1]
    assert json.loads(run("cost --engines none tiny_convnet --json")[1])["remark"] == last


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("command", ["optimize", "check", "cost"])
def test_that_a_model_is_in_training_mode_is_said_once(command, run):
    _, out, err = run(f"{command} my_model:training")

    assert (out + err).count("the model is in training mode") == 1
    if command != "optimize":  # whose report says so
        assert err.startswith("OptimizerWarning: the model is in training mode")
        assert err.count("\n") == 1


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "optimizer", "passes"]
    piped = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **piped) as process:
        process.stdout.close()  # as `| head -0` does
        complaints = process.stderr.read()

    assert (process.returncode, complaints) == (0, "")
