"""The asv suite itself: what it lists, that each benchmark runs once, and when it says n/a."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import math
import signal
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from asv import util
from asv.config import Config
from asv_runner._aux import update_sys_path
from asv_runner.discovery import disc_benchmarks

import models
import optimizer
from tests.repository import table
from tests.single_pass import Forward

with warnings.catch_warnings():
    # torch deprecates what this module of its own imports.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch.fx.experimental.optimization")

SUITE = Path(__file__).parents[1] / "benchmarks"
update_sys_path(str(SUITE))
BENCHMARKS = {benchmark.name: benchmark for benchmark in disc_benchmarks(str(SUITE))}
del sys.meta_path[0]  # asv's importer, which pytest cannot work with
MAIN, TIERS, SUBJECTS, ERROR = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("__main__", "tiers", "_workloads", "_error")
)
SMALL = "tiny_convnet"

# What is measured, by version. When this hash changes and numbers can change with it, raise
# `version` in benchmarks/_forward.py, so that no series mixes two meanings; then record it here.
MEANING = {"1": "ff6db40d546f7498"}


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Benchmarks have their process to themselves: they turn gradients off, and keep models."""
    yield
    torch.set_grad_enabled(True)
    for memory in (SUBJECTS.load, SUBJECTS.subject, SUBJECTS.forward, SUBJECTS.rewriting):
        memory.cache_clear()


def run(name, *fixed, cache=None):
    """What asv does, less the repetitions, for cells by their other parameters; None for n/a."""
    benchmark, found = BENCHMARKS[name], {}
    for index, params in enumerate(itertools.product(*benchmark._params)):
        if params[: len(fixed)] == fixed:
            benchmark.set_param_idx(index)
            benchmark.set_cache(str(cache) if "graph." in name else None)
            lacks = benchmark.do_setup()
            value = None if lacks else benchmark.func(*benchmark._build_params())
            found[params[len(fixed) :]] = value
            benchmark.do_teardown()
    return found


def test_the_suite_has_what_has_results_and_each_benchmark_distinct_parameters():
    kept = json.loads((SUITE.parent / "results" / "benchmarks.json").read_text())
    assert kept.keys() - {"version"} <= BENCHMARKS.keys()
    assert BENCHMARKS["graph.Rewrites.track_refused"].less_is_better is None
    assert BENCHMARKS["graph.Rewrites.track_fired"].less_is_better is False
    assert {*models.names("torchvision"), *models.names("seeds")} <= {*SUBJECTS.MODELS}
    for benchmark in BENCHMARKS.values():
        axes = dict(zip(benchmark.param_names, benchmark._params, strict=True))
        values = [value for axis in axes.values() for value in axis]
        assert [*map(str, dict.fromkeys(values))] == values
        assert set(axes.get("model", [])) <= set(models.names())


def test_the_graphs_are_counted_without_a_clock(tmp_path, monkeypatch):
    monkeypatch.setattr("optimizer.lowering.choose.Times.race", lambda *call, **options: 1 / 0)
    counts = {
        (name.partition("track_")[2], *variant): value
        for name in BENCHMARKS
        if name.startswith("graph.")
        for variant, value in run(name, SMALL, cache=tmp_path).items()
    }
    engine = "optimized-2-openvino"

    for name in ("nodes", "launches", "bytes_moved"):
        assert counts[name, "eager"] > counts[name, "optimized-1"] > 0
    assert counts["flops", "eager"] >= counts["flops", "optimized-1"] > 0
    assert counts["fired",] > 0
    assert counts["calls_of_packed", "optimized-2"] > 0
    assert counts["calls_outside", "optimized-2"] == 0
    assert counts["held_twice", "optimized-2"] > 1000
    assert None not in {value for cell, value in counts.items() if cell[-1] != engine}
    if importlib.util.find_spec("openvino"):
        assert counts["calls_of_engines", engine] > 0
        assert counts["calls_of_packed", engine] == 0
        assert counts["error", engine] <= 16


@table("steps bound", (0, 1), (0.4, 1), (1.1, 2), (4, 4))
def test_an_error_is_relative_to_the_largest_value_and_rounded_up_to_a_power_of_two(steps, bound):
    model = Forward(f"x / 2 if x.dtype == torch.float64 else x / 2 + {2 * steps} * 2**-23")
    inputs = [torch.tensor([0.0, -4.0])]
    exact = ERROR.in_float64(model, inputs)
    assert exact[0].tolist() == [0.0, -2.0]
    assert ERROR.error_bound(ERROR.answered(model, inputs), exact) == bound


def rewrite(variant):
    SUBJECTS.rewriter(variant)(torch.nn.ReLU(), torch.ones(2))


def test_what_is_not_available_says_why_and_what_is_wrong_fails(monkeypatch):
    engines_here = mock.patch("optimizer.lowering.engines._is_installed", return_value=False)
    with engines_here, pytest.raises(NotImplementedError, match="openvino"):
        rewrite("optimized-2-openvino")
    with mock.patch("shutil.which", return_value=""), pytest.raises(NotImplementedError):
        SUBJECTS.forward("toy_model", "eager", "cuda")
    monkeypatch.setattr(optimizer, "optimize", lambda *_, **__: int("one"))
    with pytest.raises(ValueError, match="literal"):
        rewrite("optimized-1")
    with pytest.raises(ValueError, match="not finite"):
        ERROR.error_bound([torch.tensor(math.nan)], [torch.ones(())])


def test_the_meaning_of_the_numbers_changes_only_with_the_version():
    """It is that of functions without docstrings, comments and layout."""
    version = importlib.import_module("benchmarks._forward")._Forward.version
    digest = hashlib.sha256()
    for name in ("_forward", "_workloads", "subjects"):
        tree = ast.parse((SUITE / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        kept = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        digest.update("\n".join(map(ast.unparse, kept)).encode())
    assert {version: digest.hexdigest()[:16]} == MEANING


def test_versions_of_what_is_measured_with_share_no_series_and_strangers_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(SUITE.parent)
    plugin = importlib.import_module("benchmarks.plugins.hostoverlay")
    monkeypatch.setattr(plugin, "_MEASURED_WITH", ("torch", "no_such_package"))
    conf = Config.load(str(SUITE.parent / "asv.conf.json"))
    found = plugin.HostOverlay(conf, "3.11", {}, {("nobuild", "OMP_NUM_THREADS"): "1"})
    told = f"no_such_packagenone-torch{importlib.metadata.version('torch')}"
    assert found.name == f"hostoverlay-py3.11-{told}-OMP_NUM_THREADS1"

    found._path, found._build_root = "/", "/project"
    said = "/project/optimizer/__init__.py\n/elsewhere/models/__init__.py\n"
    monkeypatch.setattr(plugin.HostOverlay, "run", lambda *call, **more: said)
    with pytest.raises(util.UserError, match="'models' would be imported from /elsewhere"):
        found._refuse_a_stranger()


@table("peers", [""], ["resnet18"])
def test_everything_is_measured_and_nothing_twice_and_peers_only_where_they_are_wanted(
    monkeypatch, peers
):
    monkeypatch.setattr(TIERS, "absent", list)
    monkeypatch.setenv("BENCHMARK_PEERS", peers)
    for name, benchmark in BENCHMARKS.items():
        listed = {"name": name, "params": [list(map(repr, axis)) for axis in benchmark._params]}
        wanted = bool(peers) or not name.startswith("peers.")
        for cell in TIERS.names_of(listed):
            assert sum(TIERS.matches(part, cell) for part in TIERS.everything()) == wanted


RAN = "  tiny_convnet    eager   12.3±0.1μs "
FAILING = ["[ 4.55%] ··· cpu.Latency.time_forward   1/4 failed", "  RuntimeError: it broke", RAN]


@table(
    "output status expected said",
    ([RAN], 0, 0, "Every benchmark ran."),
    (["  tiny_convnet   optimized-1  n/a  "], 0, 1, ""),
    ([""], 0, 130, ""),  # interrupted
    (FAILING, 2, 2, "time_forward: 1/4 failed\n  RuntimeError: it broke"),
)
def test_a_smoke_run_that_measures_nothing_or_stops_fails_and_keeps_nothing(
    monkeypatch, tmp_path, capsys, output, status, expected, said
):
    def asv(name, *arguments, hear):
        kept.write_text("after")
        kept.with_name("machine.json").write_text("new")
        for line in output if name == "run" else ():
            hear(line) if line else signal.raise_signal(signal.SIGTERM)
        return status if name == "run" else 0

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kept = Path("results", "benchmarks.json")
    kept.parent.mkdir()
    kept.write_text("before")
    monkeypatch.setattr("benchmarks.smoke.asv", asv)
    assert MAIN.main(["--smoke"]) == expected
    assert said in capsys.readouterr().out
    assert [file.read_text() for file in kept.parent.iterdir()] == ["before"]
