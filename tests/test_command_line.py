"""`python -m optimizer`: what each command prints, its exit code, and errors on stderr."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

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

def module_alone():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU())

def wrong_way_round():
    return build()[::-1]

def nothing():
    pass

def with_a_parameter(size):
    return build()

def importing():
    import no_such_dependency

class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1

def branching():
    return Branching().eval(), torch.zeros(2)

def training():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)

def ending():
    raise SystemExit(0)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a model of the user's own, and sys.path put back afterwards."""
    (tmp_path / "my_model.py").write_text(MODEL_FILE)
    (tmp_path / "broken.py").write_text("def build(:")
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
    assert "nodes; it saw 2 x Linear, " in out
    assert "speed-up " in out
    assert "kernels 4 -> 3, " in out
    assert "1  fold_affine" in out


def test_optimize_prints_json_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["optimize", "toy_model", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["model"] == "ToyModel"
    assert report["figures"]["kernels"] == [4, 3]
    assert {"FLOPs", "bytes moved", "milliseconds", "peak memory"} < set(report["figures"])
    assert [rewrite["name"] for rewrite in report["fired"]] == [
        "fold_affine",
        "fuse_linear_relu",
    ]


def test_level_and_disable_choose_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    fired = []
    disabled = ["--disable", "fold_affine,fuse_linear_relu,reuse_activations"]
    for options in (["--level", "0"], disabled):
        main(["optimize", "toy_model", "--json", *options])
        report = json.loads(capsys.readouterr().out)
        fired += [[rewrite["name"] for rewrite in report["fired"]]]

    assert fired == [["reuse_activations"], []]


def test_check_says_that_the_answers_agree(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "toy_model"])

    assert code == 0
    assert capsys.readouterr().out.startswith("toy_model: the optimized model gives")


def test_an_answer_that_differs_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(model: object, fast: object, inputs: object) -> None:
        raise optimizer.EquivalenceError("output: off by 3")

    monkeypatch.setattr(optimizer, "check", differ)

    assert main(["check", "toy_model"]) == 1
    assert capsys.readouterr().err == "error: output: off by 3\n"


def test_compare_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compare", "toy_model"])

    out = capsys.readouterr().out
    assert code == 0
    verdict = "(faster|slower|no difference): speed-up .*, 20 rounds(; more rounds tell .*)?"
    assert re.fullmatch(rf"toy_model: {verdict}\n", out)


def test_compare_takes_so_many_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "toy_model", "--rounds", "7"]) == 0
    assert re.search(", 7 rounds", capsys.readouterr().out)


def test_too_few_rounds_are_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.optimize", None)

    assert main(["compare", "toy_model", "--rounds", "3"]) == 2
    assert capsys.readouterr().err == ("error: rounds is 3: pass a whole number of at least 6.\n")


def test_compare_prints_json_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "toy_model", "--json"])

    compared = json.loads(capsys.readouterr().out)
    assert compared["verdict"] in ("faster", "slower", "no difference")
    assert compared["speedup"].keys() == {"median", "low", "high", "samples"}
    assert compared["fast"]["latency"]["median"] > 0
    assert compared["fast"]["peak_memory"] > 0


@pytest.mark.parametrize("command", [[], ["optimize"], ["explain"], ["bisect"]])
def test_help_has_examples_and_exit_codes(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])

    examples, _, codes = capsys.readouterr().out.partition("examples:")[2].partition("exit codes:")
    assert "\n  optimizer optimize resnet18 --html report.html\n" in examples
    assert [line.split()[0] for line in codes.strip().splitlines()] == ["0", "1", "2", "130"]


@pytest.mark.usefixtures("here")
def test_what_cannot_be_recorded_is_timed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    main(["optimize", "my_model:branching"])

    out = capsys.readouterr().out
    assert "left as it is: " in out
    assert "speed-up " in out
    assert "kernels" not in out
    assert "0 -> 0" not in out


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
    "no module": (["check", ":build"], "':build' gives no model"),
    "a module of a package that is missing": (["check", ".my_model:build"], ".my_model"),
    "a module that is no Python": (["check", "broken:build"], "SyntaxError"),
    "a parameter": (["check", "my_model:with_a_parameter"], "argument: 'size'"),
    "a dependency that is missing": (
        ["check", "my_model:importing"],
        "No module named 'no_such_dependency', at my_model.py:25",
    ),
    "an end of the program": (["check", "my_model:ending"], "SystemExit: 0, at my_model.py:38"),
    "a module without inputs": (["check", "my_model:module_alone"], "return a module and its"),
    "no module at all": (["check", "my_model:nothing"], "returns <class 'NoneType'>: return"),
    "inputs before the module": (["check", "my_model:wrong_way_round"], "example_inputs is of"),
    "inputs before the module, for a device": (
        ["check", "my_model:wrong_way_round", "--device", "cpu"],
        "no torch.nn.Module",
    ),
    "an absent device for it": (["check", "my_model:build", "--device", "nonsense"], "nonsense"),
    "a device without data": (["check", "my_model:build", "--device", "meta"], "the meta device"),
    "a level without its precision": (["check", "toy_model", "--level", "3"], "level=3 goes with"),
    "a precision without its level": (
        ["cost", "toy_model", "--precision", "bf16"],
        "level=3 goes with",
    ),
    "an unknown level to bisect": (["bisect", "toy_model", "--level", "-1"], "level -1"),
    "a report in a folder that is missing": (
        ["optimize", "toy_model", "--html", "no/such/folder.html"],
        "--html='no/such/folder.html' is no file that can be written",
    ),
    "a report that is a folder": (["optimize", "toy_model", "--html", "."], "--html='.' is no"),
}
BEFORE_ANY_WORK = [
    mistake
    for mistake, (arguments, _) in MISTAKES.items()
    if arguments[1] == "toy_model" or "absent" in mistake
]


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


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mistake", BEFORE_ANY_WORK)
def test_a_mistake_is_found_before_a_model_is_built(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("optimizer.workloads.load", build)
    monkeypatch.setattr("optimizer.__main__._built", build)

    assert main(MISTAKES[mistake][0]) == 2


@pytest.mark.usefixtures("here")
def test_a_report_that_is_tried_leaves_no_file() -> None:
    main(["optimize", "no_such_model", "--html", "report.html"])
    Path("kept.html").write_text("kept")
    main(["optimize", "no_such_model", "--html", "kept.html"])

    assert not Path("report.html").exists()
    assert Path("kept.html").read_text() == "kept"


@pytest.mark.usefixtures("here")
def test_both_reports_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    main(["optimize", "my_model:build", "--json", "--html", "report.html"])

    assert json.loads(capsys.readouterr().out)["model"] == "Sequential"
    assert "<html" in Path("report.html").read_text()


@pytest.mark.usefixtures("here")
def test_a_model_of_ones_own_is_moved_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def found(*arguments: Any, **options: Any) -> optimizer.Culprit:
        given.extend(arguments)
        return optimizer.Culprit(None)

    monkeypatch.setattr(optimizer, "bisect", found)

    main(["bisect", "my_model:build", "--device", "meta"])

    model, inputs = given
    assert {each.device.type for each in (*model.parameters(), inputs)} == {"meta"}


def test_passes_to_disable_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    disabled = ["--disable", "fold_affine", "--disable", "fuse_linear_relu,reuse_activations"]

    main(["optimize", "toy_model", "--json", *disabled])

    assert json.loads(capsys.readouterr().out)["fired"] == []


def test_names_leave_the_model_behind_them_alone(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--disable", "fold_affine", "--engines", "none"]

    code = main(["optimize", *names, "toy_model", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [rewrite["name"] for rewrite in report["fired"]] == ["reuse_activations"]
    assert not any("OpenVINO" in name for c in report["choices"] for name in c["seconds"])


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], "auto"),
        (["--engines", "auto"], "auto"),
        (["--engines", "none"], []),
        (["--engines", "openvino,onnxruntime"], ["openvino", "onnxruntime"]),
        (["--engines", "openvino", "--engines", "onnxruntime"], ["openvino", "onnxruntime"]),
    ],
)
def test_engines_are_named_as_optimize_takes_them(
    options: list[str], given: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(**tuned: object) -> None:
        raise optimizer.InputError(str(tuned["engines"]))

    monkeypatch.setattr("optimizer.__main__.Tuning.of", of)
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())

    main(["check", *options, "toy_model"])

    assert told.getvalue() == f"error: {given}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["optimise", "resnet18"],
        ["optimize"],
        ["optimize", "toy_model", "--precision", "fp8", "--level", "3"],
        # What a command has no use for, it does not take.
        ["bisect", "toy_model", "--precision", "bf16", "--level", "3"],
        ["memory", "toy_model", "--html", "report.html"],
    ],
)
def test_a_wrong_command_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: optimizer")


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "optimizer", "explain", "nothing_like_it"]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert ended.stderr.startswith("error: there is no pass named 'nothing_like_it'")
    assert "Traceback" not in ended.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STAGES = {
    "optimize": ["making my_model:build", "optimizing", "running both"],
    "check": ["making my_model:build", "optimizing", "running both"],
    "bisect": ["making my_model:build", "bisecting"],
    "compare": ["making my_model:build", "optimizing", "running both"],
    "cost": ["making my_model:build", "optimizing", "running both"],
    "memory": ["making my_model:build", "optimizing", "running both"],
    "explain fold_affine": [],
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", STAGES)
def test_a_terminal_is_told_what_is_done(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())

    code = main(command.split() if " " in command else [command, "my_model:build"])

    told = list(dict.fromkeys(re.findall("making [a-z_:]+|[a-z]+ing(?: both)?", shown.getvalue())))
    assert (code, told) == (0, STAGES[command])
    left = shown.getvalue().rpartition("\x1b[2K")[2]
    assert re.sub(r"\x1b\[\?25[lh]\r?", "", left) == ""  # only the cursor is put back
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_mistake_is_told_below_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())

    code = main(["check", "my_model:ending"])

    assert code == 2
    assert shown.getvalue().rpartition("\x1b[2K")[2].startswith("error: 'my_model:ending'")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", STAGES)
def test_every_command_prints_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split() if " " in command else [command, "my_model:build"]

    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["cost", "memory"])
def test_what_runs_beside_the_nodes_is_told(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = optimizer.optimize

    def lowered(model: Any, inputs: Any, **options: Any) -> Any:
        return kept(model, inputs, **options, tune_seconds=0)

    monkeypatch.setattr(optimizer, "optimize", lowered)

    main([command, "--engines", "none", "resnet18"])
    told = capsys.readouterr().out
    main([command, "--level", "1", "resnet18"])
    plain = capsys.readouterr().out
    main([command, "--engines", "none", "resnet18", "--json"])

    last = told.splitlines()[-1]
    assert "parts are run by packed weights, channels_last instead" in last
    assert "instead" not in plain
    assert json.loads(capsys.readouterr().out)["remark"] == last


def test_the_passes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["passes", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told] == [each.name for each in optimizer.all_passes()]
    assert set(told[0]) == {"name", "numerics", "summary"}


def test_no_command_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])

    assert "{passes,explain,optimize,check,bisect,compare" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["optimize", "check", "cost"])
def test_that_a_model_is_in_training_mode_is_said_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, "my_model:training"])

    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("the model is in training mode") == 1
    if command != "optimize":  # whose report says so
        assert captured.err.startswith("OptimizerWarning: the model is in training mode")
        assert captured.err.count("\n") == 1


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("here")
def test_a_warning_of_others_is_told_with_its_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(*_: object, **__: object) -> None:
        warnings.warn("planted", FutureWarning, stacklevel=1)

    monkeypatch.setattr(optimizer, "check", warns)
    shown = warnings.showwarning

    main(["check", "my_model:build"])

    assert capsys.readouterr().err == "FutureWarning: planted\n"
    assert warnings.showwarning is shown


@pytest.mark.usefixtures("here")
def test_what_is_no_terminal_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "my_model:build"])

    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("here")
def test_ctrl_c_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "check", interrupted)

    assert main(["check", "my_model:build"]) == 130
    assert capsys.readouterr().err == ""


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"optimizer {optimizer.__version__}\n"


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "optimizer", "passes"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()  # as `| head -0` does
        complaints = process.stderr.read()

    assert (process.returncode, complaints) == (0, "")
