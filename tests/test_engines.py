"""Compilers and runtimes that others keep: which are offered, and what they are held to."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from optimizer.core.node import name_of_call
from optimizer.lowering import engines
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.lowering.choose import Times
from optimizer.lowering.engines import Compiled, engines_here, engines_named
from optimizer.lowering.module import LoweredModule


class Net(nn.Module):
    """What images meet: a residual, norms, attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x))
        y = F.relu(self.second(y) + y)
        tokens = self.norm(y.flatten(2).transpose(1, 2)).unsqueeze(1)
        tokens = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return F.softmax(self.head(tokens.mean((1, 2))), -1)


class Then(nn.Module):
    """A layer, and a function of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 6, 6)), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=["openvino", "onnxruntime"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def lowered(model: nn.Module, x: torch.Tensor, *names: str, **options: Any) -> LoweredModule:
    fast = optimizer.optimize(model.eval(), x, engines=names, disable=(), **options)
    assert isinstance(fast, LoweredModule)
    return fast


def compiled(fast: LoweredModule, x: torch.Tensor) -> list[Compiled]:
    """The parts of a plan that run on an engine."""
    with torch.no_grad():
        found: Any = fast.plan_for((x,), {})
    return [each for each in found.func.program.modules() if isinstance(each, Compiled)]


@pytest.fixture(autouse=True)
def _engines_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here: an engine that is right counts as faster."""

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        return {name: 0.1 if name[0] == "O" or name == "plan" else 1.0 for name in runs}

    monkeypatch.setattr("optimizer.lowering.choose.Times.race", race)


def test_a_whole_model_is_one_region_of_an_engine(engine: str) -> None:
    model, x = Net(), image()
    fast = lowered(model, x, engine)
    [choice] = fast.report.choices

    assert choice.chosen == next(iter(engines_here([engine])))
    assert choice.chosen in str(fast.report)
    assert choice.held == 4 * sum(each.numel() for each in model.parameters())
    assert choice.spent[choice.chosen] > 0
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(-x), model(-x))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(engine: str, value: float) -> None:
    model, x = Then(F.relu), image()
    fast = lowered(model, x, engine)
    assert compiled(fast, x)
    x[0, 0, 0, 0] = value

    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y / y.std(),
        lambda y: y / 0,
        lambda y: y / 1e-40,
        lambda y: F.relu(y).mul(1e10),
        lambda y: y * math.nan,
        lambda y: y.log(),
        lambda y: F.layer_norm(y, (6,), eps=0.0),
        lambda y: torch.batch_norm(y, None, None, None, None, True, 0.1, 0.0, False),
        lambda y: y + math.inf,
        lambda y: F.scaled_dot_product_attention(y, y, y, y),
        lambda y: F.scaled_dot_product_attention(y, y, y, attn_mask=y > 0),
        lambda y: y.masked_fill(y > 0, -math.inf),
        lambda y: y.rsqrt(),
        lambda y: y.pow(-1),
        lambda y: (y + 1e-6).rsqrt(),
        lambda y: torch.add(y.pow(2), 1e-6, alpha=-1).sqrt(),
        lambda y: y / (y.pow(2).mean(-1, keepdim=True) + 1e-30),
        lambda y: y / (y.mean(-1, keepdim=True) + 1e-6),
    ],
    ids=[
        "division", "by zero", "by nearly zero", "huge", "nan", "logarithm", "no eps",
        "no eps by position", "infinity",
        "added", "hidden", "filled",
        "root", "power", "root of a sum", "root of a difference", "by hardly more", "by a mean",
    ],
)  # fmt: skip
def test_what_makes_nan_of_numbers_is_no_part_of_a_region(function: Callable[..., Any]) -> None:
    """An engine's ReLU makes 0 of it: no kernel may see it arise."""
    model, x = Then(lambda y: F.relu(function(y) + 1)), image()
    fast = lowered(model, x, "openvino")
    [part] = compiled(fast, x)

    called = {name_of_call(node) for node in part.region.graph.nodes if node.op[:4] == "call"}
    assert "conv2d" in called
    assert called <= {"conv2d", "relu", "add", "mean", "pow"}
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    blank = lowered(model, x, "openvino")
    torch.testing.assert_close(blank(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y / 2,
        lambda y: F.layer_norm(y, (6,)),
        lambda y: F.layer_norm(y, (6,), eps=1e-6),
        lambda y: F.scaled_dot_product_attention(y, y, y),
        lambda y: F.softmax(y, -1),
        lambda y: y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
        lambda y: y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
        lambda y: y * y.norm(2, (2, 3), keepdim=True) / (y.norm(2, (1, 2, 3), True) + 1e-6),
        lambda y: torch.cat([y[:, :, ::2], y[:, :, 1::2]], 1),
    ],
    ids=[
        "halved", "norm", "norm by name", "attention", "softmax", "root mean square", "by a root",
        "of all channels", "each second",
    ],
)  # fmt: skip
def test_what_makes_numbers_of_numbers_is_part_of_it(function: Callable[..., Any]) -> None:
    model, x = Then(lambda y: F.relu(function(y) + 1)), image()
    [part] = compiled(lowered(model, x, "openvino"), x)

    assert "relu" in map(name_of_call, part.region.graph.nodes)


class Masked(nn.Module):
    """A sum with a constant."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4,), value, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layer(x) + self.mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (Masked(-math.inf), torch.ones(3, 4), "a constant is not finite"),
        (Masked(1, torch.int64), torch.ones(3, 4), "not in float32"),
        (Masked(1).double(), torch.ones(3, 4).double(), "not in float32"),
        (Masked(1).bfloat16(), torch.ones(3, 4).bfloat16(), "not in float32"),
        (Masked(1), torch.ones(0, 4), "a tensor is empty"),
    ],
    ids=["infinite", "integers", "float64", "bfloat16", "empty"],
)
def test_what_is_not_for_engines_is_rejected_with_the_reason(
    model: nn.Module, x: torch.Tensor, reason: str, engine: str
) -> None:
    fast = lowered(model, x, engine)
    [choice] = [*fast.report.choices, *fast.report.tried]

    assert reason in choice.rejected[next(iter(engines_here([engine])))]
    optimizer.check(model, fast, x)


def test_an_engine_that_cannot_is_rejected_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def compile_nothing(*args: Any) -> Any:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(engines.ENGINES[engine], "compile", compile_nothing)
    fast = lowered(Then(F.relu), image(), engine)

    assert "NotImplementedError: no such operator" in str(fast.report)
    assert "OpenVINO" not in fast.report.choices[0].chosen


def test_an_engine_that_is_wrong_is_rejected_with_the_error(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(
        engines.ENGINES[engine], "compile", lambda *args: lambda given: [torch.zeros(2, 4, 6, 6)]
    )
    fast = lowered(Then(F.relu), image(), engine)

    assert "relative error 1" in str(fast.report)


def test_another_process_runs_the_region_by_torch(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    model, x = Then(F.relu), image()
    fast = lowered(model, x, engine)
    [part] = compiled(fast, x)
    monkeypatch.setattr(part, "run", None)
    with pytest.raises(TypeError):
        fast(x)
    monkeypatch.setattr(os, "getpid", lambda: -1)

    torch.testing.assert_close(fast(x), model(x))


def test_a_process_that_was_forked() -> None:
    model, x = Then(F.relu), image()
    fast = lowered(model, x, "openvino")
    fork = multiprocessing.get_context("fork")
    given, answer = fork.Pipe()
    with torch.no_grad():
        child = fork.Process(target=lambda: answer.send(fast(x).sum().item()))
        child.start()
        assert given.poll(60)
    child.join()

    assert given.recv() == pytest.approx(model(x).sum().item(), rel=1e-5)


def test_calls_in_many_threads_at_once(engine: str) -> None:
    model, x = Net(), image()
    fast = lowered(model, x, engine)
    inputs = [x * scale for scale in range(1, 9)]
    answers: dict[int, list[torch.Tensor]] = {}

    def call(place: int) -> None:
        answers[place] = [fast(inputs[place]) for _ in range(5)]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for place, each in enumerate(inputs):
        for answer in answers[place]:
            torch.testing.assert_close(answer, model(each))


def test_an_answer_is_the_callers(engine: str) -> None:
    fast, x = lowered(Then(F.relu), image(), engine), image()
    first = fast(x)
    kept = first.clone()
    fast(2 * x)
    assert torch.equal(first, kept)

    first.fill_(3.0)
    assert torch.equal(fast(x), kept)


@pytest.mark.parametrize("x", [image(2, 6, 6, 3).permute(0, 3, 1, 2), image(1, 3, 6, 6)])
def test_inputs_of_any_layout(engine: str, x: torch.Tensor) -> None:
    model = Then(lambda y: y.transpose(2, 3).exp() + y)
    fast = lowered(model, x, engine)

    assert compiled(fast, x)
    torch.testing.assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()


def test_an_input_that_requires_a_gradient_where_none_is_recorded(engine: str) -> None:
    model, x = Then(F.relu), image()
    fast = lowered(model, x, engine)
    with torch.no_grad():
        x.requires_grad_()
        torch.testing.assert_close(fast(x), model(x))

    assert compiled(fast, x.detach())


def test_it_has_the_callers_number_of_threads(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    seen: list[int] = []
    kept = engines.ENGINES[engine]
    compile_it = kept.compile
    monkeypatch.setattr(kept, "compile", lambda *args: seen.append(args[-1]) or compile_it(*args))
    model, x = Then(F.relu), image()
    fast = lowered(model, x, engine)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        torch.testing.assert_close(fast(x), model(x))
    finally:
        torch.set_num_threads(before)
    fast(x)

    assert seen == [before, before + 1]


def test_an_engine_reads_the_weights_of_the_result_where_they_are(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    from tests.conftest import address

    seen: list[torch.Tensor] = []
    kept = engines.ENGINES[engine]
    compile_it = kept.compile

    def compiling(graph: fx.GraphModule, *rest: Any) -> Any:
        seen.extend(graph.buffers())
        return compile_it(graph, *rest)

    monkeypatch.setattr(kept, "compile", compiling)
    fast = lowered(Then(F.relu), image(), engine)

    assert compiled(fast, image())
    assert set(map(address, seen)) == set(map(address, fast.parameters()))


def test_a_pickle_where_the_engine_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    import pickle

    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), image()
    data = pickle.dumps(lowered(model, x, engine))
    monkeypatch.setattr(engines, "obstacle", lambda each: "is not installed")
    loaded = pickle.loads(data)

    torch.testing.assert_close(loaded(x), model(x))
    assert not compiled(loaded, x)


def test_a_decision_without_an_engine_does_not_bind_one_with_it(engine: str) -> None:
    keys = {lowered(Then(F.relu), image(), *names).report.choices[0].key
            for names in ((), (engine,))}  # fmt: skip

    assert len(keys) == 2


class TestWhichAreOffered:
    def test_by_itself_what_is_installed_and_quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert engines_named("auto") == ("openvino",)
        monkeypatch.setattr(engines, "obstacle", lambda each: "is not installed")
        assert engines_named("auto") == ()

    def test_none(self) -> None:
        fast = lowered(Then(F.relu), image())

        assert "O" not in {choice.chosen[0] for choice in fast.report.choices}
        assert engines_named(()) == ()

    def test_by_name(self) -> None:
        assert engines_named("onnxruntime") == ("onnxruntime",)
        assert engines_named(["openvino", "onnxruntime"]) == ("openvino", "onnxruntime")
        assert engines_named(iter(["openvino"])) == ("openvino",)
        assert engines_here(["openvino", "of a newer version of this package"]).keys() == (
            engines_here(["openvino"]).keys()
        )

    @pytest.mark.parametrize("names", [3, ("magic",), [None], "magic"])
    def test_what_there_is_not(self, names: Any) -> None:
        with pytest.raises(InputError, match="engine"):
            optimizer.optimize(Then(F.relu), image(), engines=names)

    def test_what_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "obstacle", lambda each: "is not installed")

        with pytest.raises(InputError, match=r"pip install '.\[openvino\]'"):
            optimizer.optimize(Then(F.relu), image(), engines="openvino")

    def test_a_version_that_ends_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.metadata.version", lambda name: "2026.4.1")

        assert engines_named("auto") == ()
        remarks = optimizer.optimize(Then(F.relu).eval(), image()).report.remarks
        assert "OpenVINO 2026.4.1 ends the process at some models, and is not used" in remarks[0]
        assert optimizer.optimize(Then(F.relu).eval(), image(), engines=()).report.remarks == ()
        with pytest.raises(InputError, match=r"2026.4.1 ends the process.*'.\[openvino\]'"):
            engines_named("openvino")

    def test_it_reaches_refit(self) -> None:
        model, x = Then(F.relu), image()
        fast = lowered(model, x, "onnxruntime")
        fast.refit(model.state_dict(), x)

        assert fast.meta["tuning"].engines == ("onnxruntime",)
        assert AS_IT_IS not in [choice.chosen for choice in fast.report.choices]
        assert engines.AUTOMATIC == ("openvino",)


@pytest.mark.parametrize(("seconds", "tried"), [(0.2, 1), (0.48, 2), (0.9, 2)])
def test_what_an_engine_clearly_wins_needs_no_other_candidate(
    monkeypatch: pytest.MonkeyPatch, seconds: float, tried: int
) -> None:
    def run(self: Times, name: str, program: Any, inputs: Any) -> Any:
        self.seconds[name].append(seconds if name[0] == "O" else 0.5)
        return program(*inputs)

    monkeypatch.setattr(Times, "call", run)
    [choice] = lowered(Then(F.relu), image(), "openvino").report.choices

    assert len(choice.seconds) == 1 + tried


SIGNALS = """
import gc, signal, time, torch, optimizer
from torch import nn

signal.signal(signal.SIGALRM, lambda *args: None)
kept = []
for size in (3, 5, 7):
    model = nn.Sequential(nn.Conv2d(3, 4, size), nn.ReLU()).eval()
    fast = optimizer.optimize(model, torch.randn(1, 3, 8, 8), engines="openvino", tune_seconds=0)
    assert "OpenVINO" in fast.report.choices[0].chosen
    kept.append(fast)
del fast
while kept:
    del kept[0]
    gc.collect()
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
"""


def test_a_signal_after_an_engine_was_let_go() -> None:
    """On a processor with tiles it ended the process: OpenVINO took its stack for signals back."""
    subprocess.run([sys.executable, "-c", SIGNALS], check=True)


TELEMETRY = """
import sys, threading, torch, optimizer
from torch import nn

model, before = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), set(threading.enumerate())
fast = optimizer.optimize(model, torch.randn(1, 3, 8, 8), engines="openvino", tune_seconds=0)
assert "OpenVINO" in fast.report.choices[0].chosen
started = {type(each).__module__ for each in set(threading.enumerate()) - before}
assert started <= {"tqdm._monitor"}, started
assert "openvino_telemetry" not in sys.modules
"""


def test_no_thread_is_started_and_nothing_is_reported_to_anyone() -> None:
    """A thread beside this one has each random number watched, at twice the time."""
    subprocess.run([sys.executable, "-c", TELEMETRY], check=True)


class Residual(nn.Module):
    """What OpenVINO 2026 ends the process at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + self.second(self.first(x))


def test_rows_that_a_list_chooses(engine: str) -> None:
    model, x = Then(lambda y: y.relu()[:, [2, 0, 3]].sigmoid()), image()
    fast = lowered(model, x, engine)

    torch.testing.assert_close(fast(x), model(x))
    assert compiled(fast, x)


class Grouped(nn.Module):
    """What OpenVINO 2025.4.1 ends the process at: a sum behind a GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 1)
        self.norm, self.other = nn.GroupNorm(8, 64), nn.GroupNorm(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.other(self.last(y)) + F.silu(self.norm(y))


def test_a_sum_of_group_norms(engine: str) -> None:
    model, x = Grouped().eval(), image(1, 3, 16, 16)

    torch.testing.assert_close(lowered(model, x, engine)(x), model(x))


class Unbound(nn.Module):
    """Heads that a region ends with, since what reads them may make NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other, last = self.layer(x).relu().unflatten(-1, (3, 8)).unbind(-2)
        return one.exp() * other / last.exp()


def _grouped(query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, key + 1, enable_gqa=True, **options)


def test_parts_that_are_read_outside_the_region(engine: str) -> None:
    model, x = Unbound(), image(4, 8)
    fast = lowered(model, x, engine)

    torch.testing.assert_close(fast(x), model(x))
    assert compiled(fast, x)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_residual_of_two_layers(engine: str, rows: int) -> None:
    model, x = Residual(), image(rows, 8)
    fast = lowered(model, x, engine)

    assert compiled(fast, x)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.cat(y.split(3, 1)[::-1], 1),
        lambda y: torch.cat(y.chunk(3, 1)[::-1], 1),
        lambda y: F.adaptive_avg_pool2d(y.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2), 1),
        lambda y: F.interpolate(y, size=(9, 7), mode="bilinear", align_corners=False).relu(),
        lambda y: F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True).relu(),
        lambda y: F.interpolate(y, scale_factor=2.0).relu(),
        lambda y: F.batch_norm(y, y.new_zeros(4), y.new_ones(4)),
        lambda y: _grouped(y, y[:, :2], scale=0.1),
        lambda y: _grouped(y, y[:, :1], is_causal=True),
    ],
    ids=[
        "split", "chunk", "average", "enlarged", "by a factor", "nearest", "norm",
        "two heads a key", "one key",
    ],
)  # fmt: skip
def test_functions_that_openvino_knows_by_other_names(function: Callable[..., Any]) -> None:
    model, x = Then(function), image()
    fast = lowered(model, x, "openvino", only=())

    assert [choice.chosen for choice in fast.report.choices] == list(engines_here(["openvino"]))
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("size", [{"size": 9}, {"scale_factor": 1.5}], ids=str)
@pytest.mark.parametrize(
    ("mode", "dimensions"),
    [("nearest", n) for n in (1, 2, 3)] + [("linear", 1), ("bilinear", 2), ("trilinear", 3)],
)
def test_an_enlargement_stays_one_operator(
    mode: str, dimensions: int, size: dict[str, Any]
) -> None:
    """OpenVINO enlarged what DeepLab returns by seven gathers, a third of the model's time."""
    from optimizer.lowering.engines.compiled import in_aten

    x = image(1, 3, *[6] * dimensions)
    enlarge = fx.symbolic_trace(Then(lambda y: (F.interpolate(y, mode=mode, **size),)).function)
    made = in_aten(enlarge, [x])

    [call] = made.graph.find_nodes(op="output")[0].all_input_nodes
    assert name_of_call(call).startswith("upsample_")
    assert (call.args[0].op, call.args[-1]) == ("placeholder", None)


def test_an_enlargement_at_the_end_is_left_to_torch() -> None:
    model, x = Then(F.relu), image()
    inside = Then(lambda y: F.interpolate(y.relu(), scale_factor=2.0))
    fast = lowered(inside, x, "openvino")

    (region,) = compiled(fast, x)
    assert region(x)[0].shape == model(x).shape
    torch.testing.assert_close(fast(x), inside(x))


def test_strides_that_change_more_than_single_elements_are_written_down() -> None:
    from optimizer.lowering.engines.compiled import in_aten

    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            torch.as_strided_(y, (2, 2), (1, 2))
            return (y * 3,)

    x = torch.arange(4.0).view(2, 2)
    made = in_aten(fx.symbolic_trace(Strided()), [x])

    assert any("as_strided_" in str(node.target) for node in made.graph.nodes)
    assert torch.equal(made(x)[0], Strided()(x)[0])


LACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softplus": F.softplus,
    "bicubic": lambda y: F.interpolate(y, scale_factor=2, mode="bicubic"),
    "smoothed": lambda y: F.interpolate(y, size=(5, 5), mode="bilinear", antialias=True),
    "replicated": lambda y: F.pad(y, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda y: F.pad(y, (1, 1, 1, 1), mode="circular"),
    "another divisor": lambda y: F.avg_pool2d(y, 2, divisor_override=3),
    "the largest of parts": lambda y: F.adaptive_max_pool2d(y, 3),
}


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize(("name", "seconds"), [*((name, 0) for name in LACKED), ("softplus", 0.1)])
def test_what_an_engine_lacks_ends_its_region(name: str, seconds: float, engine: str) -> None:
    model, x = Between(LACKED[name]), image()

    fast = lowered(model, x, engine, tune_seconds=seconds)

    assert [choice.chosen for choice in fast.report.choices] == [*engines_here([engine])] * 2
    torch.testing.assert_close(fast(x), model(x))


def test_untimed_an_engine_that_fails_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("it lacks an operator")

    monkeypatch.setattr("optimizer.lowering.choose.Compiled", broken)
    model, x = Between(torch.relu), image()
    fast = lowered(model, x, engine, tune_seconds=0)

    [choice] = fast.report.choices
    assert choice.chosen == "packed weights, channels_last"
    assert [*choice.rejected.values()] == ["ValueError: it lacks an operator"]


@pytest.mark.parametrize("given", ["the example", "a later input"])
def test_an_input_that_is_negated_in_reading(given: str, engine: str) -> None:
    """Source: `torch._neg_view`, which `.imag` of a conjugate is, too."""
    model, plain = Between(torch.relu), image()
    negated = torch._neg_view(-plain)

    fast = lowered(model, negated if given == "the example" else plain, engine)

    assert compiled(fast, plain)
    torch.testing.assert_close(fast(negated), model(negated))
    torch.testing.assert_close(fast(plain), model(plain))


def test_a_value_that_is_negated_in_reading(engine: str) -> None:
    class Imaginary(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.fft.fft(x).conj().imag)

    model, x = Imaginary(torch.relu), image()
    fast = lowered(model, x, engine)

    assert compiled(fast, x)
    torch.testing.assert_close(fast(x), model(x))
