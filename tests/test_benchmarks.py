"""The asv suite itself: what it lists, that each benchmark runs once, and when it says n/a."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import platform
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from asv import util
from asv.config import Config
from asv.machine import Machine, MachineCollection
from asv_runner._aux import update_sys_path
from asv_runner.discovery import disc_benchmarks

import models
import optimizer

with warnings.catch_warnings():
    # torch deprecates what this module of its own imports.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch.fx.experimental.optimization")

SUITE = Path(__file__).parents[1] / "benchmarks"
update_sys_path(str(SUITE))
BENCHMARKS = {benchmark.name: benchmark for benchmark in disc_benchmarks(str(SUITE))}
del sys.meta_path[0]  # asv's importer, which pytest cannot work with
MACHINE = importlib.import_module("benchmarks._machine")
TIERS = importlib.import_module("benchmarks.tiers")
SUBJECTS = importlib.import_module("benchmarks._workloads")
COUNTED = importlib.import_module("benchmarks._counted")
ERROR = importlib.import_module("benchmarks._error")
OF_A_FORWARD = ["Latency.time_forward", "Memory.track_peak_memory", "Paired.track_relative_latency"]
OF_A_GRAPH = [name for name in BENCHMARKS if name.startswith("graph.")]
SMALL = "tiny_convnet"

# What is measured, by version. When this hash changes and numbers can change with it, raise
# `version` in benchmarks/_forward.py, so that no series mixes two meanings; then record it here.
MEANING = {"1": "791c8458c69e697d"}


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Benchmarks have their process to themselves: they turn gradients off, and keep models."""
    yield
    torch.set_grad_enabled(True)
    for memory in (SUBJECTS.load, SUBJECTS.subject, SUBJECTS.forward, SUBJECTS.rewriting):
        memory.cache_clear()


def cells(name, *fixed):
    """The parameters of a benchmark that begin with `fixed`, each a cell of its table."""
    benchmark = BENCHMARKS[name]
    count = 1
    for values in benchmark.params:
        count *= len(values)
    for index in range(count):
        benchmark.set_param_idx(index)
        if benchmark._current_params[: len(fixed)] == fixed:
            yield index


def run_once(name, index, cache=None):
    """What asv does for a cell, less the repetitions; None for n/a."""
    benchmark = BENCHMARKS[name]
    benchmark.set_param_idx(index)
    benchmark.set_cache(cache)
    if benchmark.do_setup():
        return None
    try:
        return benchmark.func(*benchmark._build_params())
    finally:
        benchmark.do_teardown()


def test_the_suite_lists_every_benchmark_once():
    forward = [f"{device}.{name}" for device in ("cpu", "cuda", "mps") for name in OF_A_FORWARD]
    cost = ["optimize_cost.Models.time_optimize", "optimize_cost.Scaling.time_optimize"]
    graph = ["calls", "modules", "nodes", "parameter_bytes", "parameters"]
    graph = [f"graph.Graph.track_{count}" for count in graph]
    graph += ["graph.Rewrites.track_fired", "graph.Rewrites.track_refused"]
    work = ["bytes_moved", "flops", "launches", "live_bytes"]
    graph += [f"graph.Work.track_{count}" for count in work]
    lowered = ["as_they_are", "of_engines", "of_packed", "outside"]
    lowered = [*(f"calls_{place}" for place in lowered), "held_twice", "regions"]
    graph += [f"graph.Lowered.track_{count}" for count in lowered]
    graph += ["graph.Error.track_error"]

    peers = ["peers.Peers.track_preparation", "peers.Peers.track_relative_latency"]

    assert sorted(BENCHMARKS) == sorted(forward + cost + graph + peers)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_parameters_are_distinct_strings_and_models_exist(name):
    benchmark = BENCHMARKS[name]
    values = [value for axis in benchmark._params for value in axis]
    axes = dict(zip(benchmark.param_names, benchmark._params, strict=True))

    assert all(isinstance(value, str) for value in values)
    assert len(values) == len(set(values))
    assert set(axes.get("model", [])) <= set(models.names())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_versions_are_set_by_hand_and_tracks_say_which_way_is_better(name):
    benchmark = BENCHMARKS[name]

    assert benchmark.version.isdigit()
    assert benchmark.timeout >= 60
    assert benchmark.type == "time" or benchmark.less_is_better in (True, False, None)


def test_a_rise_of_refusals_is_neither_better_nor_worse():
    assert BENCHMARKS["graph.Rewrites.track_refused"].less_is_better is None
    assert BENCHMARKS["graph.Rewrites.track_fired"].less_is_better is False


def test_every_torchvision_model_and_every_seed_is_measured():
    assert set(models.names("torchvision") + models.names("seeds")) <= set(SUBJECTS.MODELS)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_every_model_of_a_library_is_measured(library):
    measured = BENCHMARKS["cpu.Paired.track_relative_latency"]._params[0]
    assert set(SUBJECTS.LIBRARIES[library]) < set(measured)


def test_a_library_that_is_not_installed_is_not_applicable(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)

    with pytest.raises(NotImplementedError, match="timm is not installed: run pip install"):
        SUBJECTS.built("repvgg_a0", "cpu")


@pytest.mark.parametrize("name", [f"cpu.{name}" for name in OF_A_FORWARD])
def test_each_forward_benchmark_runs_on_the_cpu(name):
    values = [run_once(name, index) for index in cells(name, SMALL)]

    assert len(values) >= 2
    if "time_" not in name:
        assert None not in values


def test_memory_is_counted_in_bytes():
    name = "cpu.Memory.track_peak_memory"
    values = [run_once(name, index) for index in cells(name, SMALL)]

    assert all(isinstance(value, int) and value > 1000 for value in values)


def test_paired_latency_is_a_sample_of_ratios_large_enough_for_a_test():
    name = "cpu.Paired.track_relative_latency"
    for index in cells(name, SMALL):
        found = run_once(name, index)

        assert found["number"] == 1
        assert len(found["samples"]) >= 7
        assert all(0 < ratio < float("inf") for ratio in found["samples"])


def test_setting_up_again_prepares_nothing_again():
    name, index = "cpu.Latency.time_forward", next(cells("cpu.Latency.time_forward", SMALL))
    run_once(name, index)
    misses = SUBJECTS.forward.cache_info().misses
    run_once(name, index)

    assert SUBJECTS.forward.cache_info().misses == misses


def test_a_latency_is_called_before_it_is_measured():
    calls = []
    module, _ = SUBJECTS.subject(SMALL, "eager", "cpu")
    with module.register_forward_hook(lambda *call: calls.append(call)):
        SUBJECTS.forward.__wrapped__(SMALL, "eager", "cpu")

    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "first", "tools"),
    [("Models", SMALL, 4), ("Scaling", "300", 2)],
    ids=["models", "scaling"],
)
def test_each_cost_benchmark_runs(name, first, tools):
    name = f"optimize_cost.{name}.time_optimize"
    done = [run_once(name, index) for index in cells(name, first)]

    assert len(done) == tools


def test_a_model_is_optimized_in_memory_that_no_earlier_result_left(monkeypatch):
    module = importlib.import_module("benchmarks.optimize_cost")
    given_back = []
    monkeypatch.setattr(module, "give_freed_memory_back", lambda: given_back.append(1))
    module.Models().setup(SMALL, "fx_fuse")

    assert given_back


def test_what_nobody_holds_is_gone_when_memory_is_given_back():
    class Ring:
        def __init__(self):
            self.ring = self

    left = weakref.ref(Ring())
    assert left() is not None
    importlib.import_module("benchmarks._memory").give_freed_memory_back()

    assert left() is None


def test_the_graphs_are_counted(tmp_path):
    counts = _counts_of(SMALL, tmp_path)

    assert counts["nodes", "eager"] > counts["nodes", "optimized-1"] > 0
    assert counts["launches", "eager"] > counts["launches", "optimized-1"] > 0
    assert counts["bytes_moved", "eager"] > counts["bytes_moved", "optimized-1"] > 0
    assert counts["flops", "eager"] >= counts["flops", "optimized-1"] > 0
    assert counts["fired", ""] > 0
    assert counts["calls_of_packed", "optimized-2"] > 0
    assert counts["calls_outside", "optimized-2"] == 0
    assert counts["held_twice", "optimized-2"] > 1000
    here = {cell: value for cell, value in counts.items() if cell[1] != "optimized-2-openvino"}
    assert None not in here.values()


def test_an_engine_runs_the_calls_that_it_is_offered(tmp_path):
    pytest.importorskip("openvino")
    counts = _counts_of(SMALL, tmp_path)

    assert counts["calls_of_engines", "optimized-2-openvino"] > 0
    assert counts["calls_of_packed", "optimized-2-openvino"] == 0
    assert counts["error", "optimized-2-openvino"] <= 16


def _counts_of(model, folder):
    """Every number of a model, by what is counted and the variant."""
    return {
        (name.partition("track_")[2], "".join(BENCHMARKS[name]._current_params[1:])): found
        for name in OF_A_GRAPH
        for index in cells(name, model)
        for found in [run_once(name, index, str(folder))]
    }


def test_only_what_is_asked_for_is_counted_and_only_once(tmp_path, monkeypatch):
    asked = []
    build = COUNTED.built
    monkeypatch.setattr(COUNTED, "built", lambda *of: asked.append(of[0]) or build(*of))
    for name in ("graph.Graph.track_nodes", "graph.Work.track_flops"):
        eager, *_ = cells(name, SMALL)
        assert run_once(name, eager, str(tmp_path)) > 0

    assert asked == [SMALL]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"{SMALL} in float64.pickle",
        f"{SMALL}, eager.pickle",
    ]


def test_the_folder_of_the_counts_is_where_asv_runs_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert importlib.import_module("benchmarks.graph").setup_cache() == str(tmp_path)


@pytest.mark.parametrize("failure", [NotImplementedError, ValueError])
def test_why_there_is_no_number_is_remembered(failure, tmp_path):
    kept = importlib.import_module("benchmarks._kept").kept
    asked = []

    def make():
        asked.append(1)
        raise failure("no such thing")

    expected = NotImplementedError if failure is NotImplementedError else RuntimeError
    for _ in range(2):
        with pytest.raises(expected, match="no such thing"):
            kept(tmp_path, "a", make)
    assert asked == [1]


def test_what_a_process_did_not_finish_to_write_is_not_read(tmp_path, monkeypatch):
    kept = importlib.import_module("benchmarks._kept").kept
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *to: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kept(tmp_path, "a", lambda: 1)

    assert kept(tmp_path, "a", lambda: 2) == 2


def test_work_is_not_available_of_a_commit_without_analysis(tmp_path, monkeypatch):
    monkeypatch.delattr(optimizer.analysis, "memory")
    _, optimized, _ = cells("graph.Work.track_flops", SMALL)

    assert run_once("graph.Work.track_flops", optimized, str(tmp_path)) is None
    assert run_once("graph.Graph.track_nodes", optimized, str(tmp_path)) > 0


def test_a_model_that_cannot_be_optimized_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(COUNTED, "rewriter", lambda variant, timed: lambda *call: 1 / 0)
    name = "graph.Graph.track_nodes"
    eager, optimized, _ = cells(name, SMALL)

    assert run_once(name, eager, str(tmp_path)) > 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_once(name, optimized, str(tmp_path))


def test_level_2_is_counted_without_a_clock(tmp_path, monkeypatch):
    module = importlib.import_module("optimizer.lowering.choose")
    monkeypatch.setattr(module.Times, "race", lambda *call, **options: 1 / 0)
    packed, _ = cells("graph.Lowered.track_regions", SMALL)

    assert run_once("graph.Lowered.track_regions", packed, str(tmp_path)) == 1


def test_a_choice_without_timing_is_not_available_of_a_commit_that_always_times(monkeypatch):
    monkeypatch.setattr(optimizer, "optimize", lambda module, inputs, level, check: module)
    with pytest.raises(NotImplementedError, match="without timing"):
        SUBJECTS.rewriter("optimized-2", timed=False)(None, None)


class Halves(torch.nn.Module):
    """Outside every region: it has no product. It is wrong by a quarter in float32."""

    def forward(self, x):
        return x.div(2) if x.dtype == torch.float64 else x.div(2).mul(1.25)


def test_an_error_is_relative_to_the_largest_value_of_the_same_in_float64():
    exact = ERROR.in_float64(Halves(), [torch.tensor([1.0, -4.0])])
    actual = ERROR.answered(Halves(), [torch.tensor([1.0, -4.0])])

    assert exact[0].tolist() == [0.5, -2.0]
    assert ERROR.error_bound(actual, exact) == 2**23 / 4


@pytest.mark.parametrize(("steps", "bound"), [(0, 1), (0.4, 1), (1, 1), (1.1, 2), (3, 4), (4, 4)])
def test_an_error_is_rounded_up_to_a_power_of_two(steps, bound):
    exact = torch.tensor([1.0, 0.0], dtype=torch.float64)
    actual = torch.tensor([1.0, steps * 2.0**-23], dtype=torch.float64)

    assert ERROR.error_bound([actual], [exact]) == bound


def test_an_answer_that_is_not_finite_has_no_error():
    with pytest.raises(ValueError, match="not finite"):
        ERROR.error_bound([torch.tensor([float("nan")])], [torch.tensor([1.0])])


def test_a_model_for_float32_only_has_no_error():
    def forward(x):
        assert x.dtype == torch.float32

    module = torch.nn.Identity()
    module.forward = forward
    with pytest.raises(NotImplementedError, match="float64"):
        ERROR.in_float64(module, [torch.ones(1)])


def test_calls_are_told_by_what_runs_them():
    lowered = importlib.import_module("benchmarks._lowered")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(self.conv(x)[:, :3].log().abs()).relu()

    optimized = SUBJECTS.rewriter("optimized-2", timed=False)(
        Model().eval().requires_grad_(False), (torch.rand(1, 3, 16, 16),)
    )
    found = lowered.lowered(optimized, (torch.rand(1, 3, 16, 16),))

    assert found["regions"] == 2
    assert found["packed"] == 3
    assert found["outside"] >= 2
    assert found["engine"] == found["portable"] == 0


@pytest.mark.parametrize("device", ["cuda", "mps"])
@pytest.mark.parametrize("name", OF_A_FORWARD)
def test_where_a_device_is_absent_its_benchmarks_are_not_available(device, name, monkeypatch):
    monkeypatch.setattr(SUBJECTS.shutil, "which", lambda name: None)
    monkeypatch.setattr(SUBJECTS.sys, "platform", "linux")

    assert run_once(f"{device}.{name}", 0) is None


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_an_absent_device_is_found_without_importing_torch(device):
    program = f"""
import shutil, sys
sys.path.insert(0, {str(SUITE.parent)!r})
shutil.which, sys.platform = (lambda name: None), "linux"
import benchmarks.{device} as suite
for each in (suite.Latency, suite.Memory, suite.Paired):
    try:
        each().setup("toy_model", "optimized-1")
    except NotImplementedError:
        print("n/a")
print("torch" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert answer.stdout.split() == [b"n/a"] * 3 + [b"False"]


@pytest.mark.parametrize("missing", ["optimize", "measure"])
def test_what_an_old_commit_lacks_is_not_available(missing, monkeypatch):
    monkeypatch.delattr(optimizer, missing)
    name = "cpu.Memory.track_peak_memory"
    _, optimized, *_ = cells(name, SMALL)

    assert run_once(name, optimized) is None


def test_a_level_that_an_old_commit_lacks_is_not_available(monkeypatch):
    monkeypatch.setattr(optimizer, "optimize", _only_level_1)
    _, level_1, _, level_2, _ = cells("cpu.Memory.track_peak_memory", SMALL)

    assert run_once("cpu.Memory.track_peak_memory", level_1) > 0
    assert run_once("cpu.Memory.track_peak_memory", level_2) is None


def test_another_wrong_value_of_an_old_commit_is_a_failure(monkeypatch):
    monkeypatch.setattr(optimizer, "optimize", lambda *call, **options: int("one"))
    with pytest.raises(ValueError, match="invalid literal"):
        SUBJECTS.rewriter("optimized-1")(None, None)


def test_an_engine_that_an_old_commit_or_this_machine_lacks_is_not_available(monkeypatch):
    monkeypatch.setattr("optimizer.lowering.engines.obstacle", lambda engine: "is not installed")
    with pytest.raises(NotImplementedError, match="openvino"):
        SUBJECTS.rewriter("optimized-2-openvino")(torch.nn.ReLU(), torch.ones(2))
    monkeypatch.setattr(optimizer, "optimize", _only_level_1)
    with pytest.raises(NotImplementedError, match="no engines"):
        SUBJECTS.rewriter("optimized-2-openvino")(None, None)


def _only_level_1(module, inputs, level, check):
    if level != 1:
        raise ValueError(f"level must be 1, not {level}")
    return module


def test_a_package_or_model_that_an_old_commit_lacks_is_not_available(monkeypatch):
    with pytest.raises(NotImplementedError, match="no model nonesuch"):
        SUBJECTS.built("nonesuch", "cpu")
    with pytest.raises(NotImplementedError, match="this commit has no no_such_package"):
        SUBJECTS.imported("no_such_package")


def test_a_package_that_lacks_something_of_its_own_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        SUBJECTS.imported("half_installed")

    assert "half_installed" not in sys.modules


def test_where_fuse_fails_it_is_not_available():
    name = "cpu.Latency.time_forward"
    _, _, fuse, *_ = cells(name, "masked_assign")

    assert run_once(name, fuse) is None


def test_the_meaning_of_the_numbers_changes_only_with_the_version():
    version = importlib.import_module("benchmarks._forward")._Forward.version
    digest = hashlib.sha256()
    for name in ("benchmarks._forward", "benchmarks._workloads", "benchmarks.subjects"):
        digest.update(_code_of(importlib.import_module(name)).encode())

    assert {version: digest.hexdigest()[:16]} == MEANING


def _code_of(module):
    """The functions of a module without docstrings, comments and layout."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return "\n".join(map(ast.unparse, kept))


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(SUITE.parent)
    return importlib.import_module("benchmarks.plugins.hostoverlay")


@pytest.mark.parametrize("origin", ["/project/optimizer/__init__.py", ""])
def test_packages_of_the_commit_and_packages_it_lacks_are_accepted(plugin, origin, monkeypatch):
    environment = object.__new__(plugin.HostOverlay)
    environment._path, environment._build_root = "/", "/project"
    monkeypatch.setattr(plugin.HostOverlay, "run", lambda *call, **more: f"{origin}\n{origin}\n")

    assert environment._refuse_a_stranger() is None


def test_a_package_that_hides_that_of_the_commit_is_refused(plugin, monkeypatch):
    environment = object.__new__(plugin.HostOverlay)
    environment._path, environment._build_root = "/", "/project"
    found = "/project/optimizer/__init__.py\n/elsewhere/models/__init__.py\n"
    monkeypatch.setattr(plugin.HostOverlay, "run", lambda *call, **more: found)
    with pytest.raises(util.UserError) as caught:
        environment._refuse_a_stranger()

    assert "'models' would be imported from /elsewhere/models/__init__.py" in str(caught.value)


@pytest.mark.parametrize("name", ["", "any name"])
def test_a_machine_is_described_without_what_changes_under_its_name(monkeypatch, tmp_path, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BENCHMARK_MACHINE", name)
    machine = MACHINE.register()
    described = MachineCollection.load(machine)

    assert machine == (name or MACHINE._fingerprint())
    assert described["machine"] == machine
    assert described["os"] == platform.system()
    assert described["arch"] == platform.machine()
    assert described["ram"].endswith(" GB")


def test_a_processor_is_told_by_its_numbers(monkeypatch, tmp_path):
    for name, text, expected in (
        ("x86", "cpu family\t: 6\nmodel\t\t: 143\nmodel name : Xeon\nstepping : 8", "6-143-8"),
        ("second", "cpu family:6\nmodel:1\nstepping:2\n\nmodel:7", "6-1-2"),
        ("arm", "CPU implementer: 0x41\nCPU part: 0xd40\nCPU revision: 1", "0x41-0xd40-1"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(MACHINE, "_PROCESSORS", tmp_path / name)

        assert MACHINE._fingerprint() == f"{platform.machine()}-{expected}-{os.cpu_count()}core"


@pytest.mark.parametrize(
    ("told", "before", "after"),
    [
        ({"sysctl": "Apple M2 Pro\n"}, "-Apple-M2-Pro", ""),
        ({"nvidia-smi": "NVIDIA H100\nNVIDIA H100\n"}, "", "-NVIDIA-H100"),
        ({}, "", ""),
    ],
)
def test_what_has_no_numbers_is_told_by_its_name(monkeypatch, tmp_path, told, before, after):
    def asked(command, **more):
        if command[0] not in told:
            raise FileNotFoundError
        return told[command[0]]

    monkeypatch.setattr(MACHINE, "_PROCESSORS", tmp_path / "none")
    monkeypatch.setattr(MACHINE.subprocess, "check_output", asked)

    name = f"{platform.machine()}{before}-{os.cpu_count()}core{after}"
    assert MACHINE._fingerprint() == name


def test_the_command_says_the_name_of_the_machine(capsys):
    assert importlib.import_module("benchmarks.__main__").main(["machine"]) == 0
    assert capsys.readouterr().out.strip() == MACHINE.machine_name()


def test_asv_by_itself_files_under_the_same_name(plugin, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Machine, "hardcoded_machine_name", None)
    plugin.setup()

    assert Machine.load(interactive=False).machine == MACHINE.machine_name()


def test_versions_of_what_is_measured_with_share_no_series(plugin, monkeypatch):
    conf = Config.load(str(SUITE.parent / "asv.conf.json"))
    found = {}
    for version in ("2.13.0", "2.15.0"):
        monkeypatch.setattr(plugin, "_versions", lambda version=version: [("torch", version)])
        found[version] = plugin.HostOverlay(conf, "3.11", {}, {("nobuild", "OMP_NUM_THREADS"): "1"})

    assert [each.name for each in found.values()] == [
        "hostoverlay-py3.11-torch2.13.0-OMP_NUM_THREADS1",
        "hostoverlay-py3.11-torch2.15.0-OMP_NUM_THREADS1",
    ]
    assert found["2.13.0"].requirements == {"torch": "2.13.0"}  # a parameter of asv's charts


def test_torch_is_among_what_results_are_filed_under(plugin):
    assert dict(plugin._versions())["torch"].startswith(torch.__version__.partition("+")[0])


def test_what_is_absent_is_told_as_well(plugin, monkeypatch):
    monkeypatch.setattr(plugin, "_MEASURED_WITH", ("torch", "no_such_package"))

    assert list(dict(plugin._versions()).values())[1] == "none"


def test_everything_is_measured_and_nothing_twice(monkeypatch):
    monkeypatch.setattr(TIERS, "absent", list)
    monkeypatch.setenv("BENCHMARK_PEERS", "resnet18")
    parts = TIERS.everything()
    listing = [
        {"name": name, "params": [list(map(repr, axis)) for axis in benchmark._params]}
        for name, benchmark in BENCHMARKS.items()
    ]
    cells = [cell for each in listing for cell in TIERS.names_of(each)]

    assert [cell for cell in cells if sum(TIERS.matches(part, cell) for part in parts) != 1] == []


HEADING = "[{at}%] ··· {name}            {how}"
FAILING = [
    HEADING.format(at=" 4.55", name="cpu.Latency.time_forward", how="1/4 failed"),
    "           tiny_convnet     eager     failed",
    "[ 4.55%] ···· For parameters: 'tiny_convnet', 'eager'",
    "              RuntimeError: it broke",
    HEADING.format(at="100.0", name="graph.Graph.track_nodes", how="ok"),
    "           tiny_convnet   12",
]


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (["  tiny_convnet    eager   12.3±0.1μs "], 0, 0),
        (["  tiny_convnet    eager      n/a     "], 0, 1),
        (["  tiny_convnet   optimized-1  n/a  "], 0, 1),
        (["  tiny_convnet    eager   12.3±0.1μs "], 1, 1),
        ([], 0, 1),
        (FAILING, 2, 2),
    ],
)
def test_a_smoke_run_that_measures_nothing_or_stops_fails(smoke, output, status, expected):
    assert smoke(output, status) == expected


def test_a_smoke_run_is_a_line_a_benchmark_and_tells_a_failure_in_full(smoke, capsys):
    table = [f"           model_{at}   eager   {at}" for at in range(999)]
    smoke([*FAILING, *table], 2)
    said = capsys.readouterr().out.splitlines()

    assert said[1:] == [
        "[ 4.55%] cpu.Latency.time_forward: 1/4 failed",
        *FAILING[1:4],
        "[100.0%] graph.Graph.track_nodes: ok",
        "Some benchmarks failed: why is above.",
    ]


def test_a_smoke_run_that_stops_tells_what_asv_said_last(smoke, capsys):
    smoke([FAILING[-2], "OSError: no space"], 1)

    assert "OSError: no space" in capsys.readouterr().out


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    """`python -m benchmarks --smoke`, with asv replaced by what it says and how it ends."""
    module = importlib.import_module("benchmarks.smoke")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(output, status):
        def asv(name, *arguments, hear):
            if name == "check":
                return 0
            for line in output:
                hear(line)
            return status

        monkeypatch.setattr(module, "asv", asv)
        return importlib.import_module("benchmarks.__main__").main(["--smoke"])

    return run


@pytest.mark.parametrize("stopped", [False, True])
def test_a_smoke_run_leaves_the_results_as_they_were(smoke, monkeypatch, tmp_path, stopped):
    results = tmp_path / "results"
    (results / "here").mkdir(parents=True)
    old, new = results / "benchmarks.json", results / "here" / "machine.json"
    old.write_text("before")

    class Lines:
        def __iter__(self):
            old.write_text("after")
            new.write_text("new")
            if stopped:
                raise KeyboardInterrupt
            return iter([])

    assert smoke(Lines(), 0) == (130 if stopped else 1)
    assert old.read_text() == "before"
    assert not new.exists()


def test_without_asv_there_is_help_and_one_line_says_what_to_run(monkeypatch, capsys):
    main = importlib.import_module("benchmarks.__main__").main
    monkeypatch.setitem(sys.modules, "benchmarks.measuring", None)

    assert main(["--help"]) == 0
    assert "compare BASE NEW" in capsys.readouterr().out
    assert main(["--all"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert "python -m tox run -e bench" in err


def test_help_has_a_line_and_an_example_for_every_command(capsys):
    main = importlib.import_module("benchmarks.__main__").main
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()

    assert stopped.value.code == 0
    for name in ("compare", "history", "machine", "--smoke"):
        assert any(line.startswith(f"  {name} ") for line in lines)
        assert any(line.startswith(f"  python -m benchmarks {name}") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nosuch"], "knows --nosuch"),
        (["nosuch"], "knows nosuch"),
        (["--all", "--quick", "--nosuch"], "knows --nosuch"),
        (["machine", "--nosuch"], "unrecognized arguments: --nosuch"),
        (["--smoke", "--all"], "unrecognized arguments: --all"),
    ],
)
def test_what_no_command_knows_is_refused_before_any_work(monkeypatch, capsys, arguments, said):
    def work(*_, **__):
        raise AssertionError("it began")

    monkeypatch.setattr("benchmarks.measuring._measure", work)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("benchmarks.__main__").main(arguments)

    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
