"""Compilers and runtimes that others keep: which are offered, and what they are held to.

Only what an engine itself may get wrong is tried on a real one, all else on a stub.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from shutil import which
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.testing import assert_close

import optimizer
from optimizer import InputError
from optimizer.core.node import name_of_call
from optimizer.lowering import engines
from optimizer.lowering.engines import engines_here, engines_named
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.partition import ForModerate
from tests import level_2
from tests.level_2 import PACKED, StubEngine, Then, attending, chosen, image, pickled, plan_of
from tests.single_pass import Forward, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
AUTOMATIC = engines.AUTOMATIC


@pytest.fixture(autouse=True)
def _engines_are_offered(right_is_enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    level_2.offer(monkeypatch, *AUTOMATIC)


def lowered(model: nn.Module, x: torch.Tensor, *names: str, **options: Any) -> LoweredModule:
    return level_2.lowered(model, x, **{"engines": names or ("stub",)} | options)


@functools.cache
def prepared(engine: str) -> LoweredModule:
    """A model, compiled once for all tests."""
    return lowered(attending(), image(), engine, tune_seconds=0)


def title(engine: str = "stub") -> str:
    return next(iter(engines_here([engine])))


def compiled(fast: LoweredModule, x: torch.Tensor) -> list[ForModerate]:
    """The parts of a plan that run on an engine."""
    parts = (p for p in plan_of(fast, x).func.program.modules() if isinstance(p, ForModerate))
    return [part for part in parts if not isinstance(part.program, nn.Module)]


_INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not which("c++"), reason="it writes C++ for the CPU")
)
real = pytest.mark.parametrize("engine", ["openvino", "onnxruntime", _INDUCTOR])


@real
def test_what_is_not_finite_is_not_lost(engine: str) -> None:
    assert len(compiled(prepared(engine), image())) == 1
    for value in (math.nan, math.inf):
        x = image()
        x[0, 0, 0, 0] = value
        assert_close(prepared(engine)(x), attending()(x), equal_nan=True)


@real
def test_an_answer_is_the_callers_also_of_many_threads_at_once(engine: str) -> None:
    fast, inputs = prepared(engine), [image() * scale for scale in range(1, 9)] * 5
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fast, inputs))
    assert_close(answers, list(map(attending(), inputs)))

    kept = answers[0].clone()
    answers[0].fill_(3.0)
    with torch.no_grad():
        assert torch.equal(fast(image().requires_grad_()), kept)


def over(text: str, **layers: Any) -> Forward:
    return Forward(text, **layers or {"layer": nn.Linear(8, 8)}).eval()


def images(*sizes: int) -> Any:
    """Layers of so many channels each."""
    pairs = itertools.pairwise(sizes)
    return {f"m{i}": nn.Conv2d(*pair, 3, padding=1) for i, pair in enumerate(pairs)}


_TRANSPOSED = Then("y.transpose(2, 3).exp() + y")
_KEEP = "keep = x > x.amin(-1, keepdim=True); y = m.layer(x)[None];"
_MASKED = over(_KEEP + "return m.layer(F.scaled_dot_product_attention(y, y, y, keep))")
_NEGATED = over("m.m0(torch.fft.fft(x).conj().imag).relu()", **images(3, 4))
_HEADS = (
    "one, other, last = m.layer(x).relu().unflatten(-1, (3, 8)).unbind(-2);"
    "return one.exp() * other / last.exp()"
)
_WIDE = (
    "wide = keep.expand(1, 8, 8); z = F.scaled_dot_product_attention(y, y, y, wide);"
    "return torch.where(wide, z, 0.0)"
)
_NORMED = images(3, 64) | {"m1": nn.Conv2d(64, 64, 1)}
_NORMED |= {f"norm{i}": nn.GroupNorm(8, 64) for i in range(2)}
_SUMMED = images(3, 3) | {f"m{i}": nn.Conv2d(3, 3, 1) for i in (1, 2)}
_LINEAR = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 8)}
_GROUPED = "k = y[:, :2]; return F.scaled_dot_product_attention(y, k, k + 1, enable_gqa=True)"
# A model, whose part between its layers is one region, and an input.
OF_OPENVINO: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "channels last": (_TRANSPOSED, image(2, 6, 6, 3).permute(0, 3, 1, 2)),
    # The code that OpenVINO generates ends the process at a sum behind a GroupNorm,
    "a sum of group norms":
        (over("m.norm0(m.m1(y := m.m0(x))) + F.silu(m.norm1(y))", **_NORMED), image(1, 3, 16, 16)),
    # and that of 2026 at this.
    "a residual of a row": (over("x.relu() + m.b(m.a(x))", **_LINEAR), image(1, 8)),
    # Heads that a region ends with, since what reads them may make NaN.
    "parts that are read outside": (over(_HEADS, layer=nn.Linear(8, 24)), image(4, 8)),
    "attention under a mask": (_MASKED, image(8, 8)),
    "a mask that is read outside": (over(_KEEP + _WIDE), image(8, 8)),
    "negated in reading": (_NEGATED, image()),
    # 5e-4 off by another formula, which the check allows
    "a gelu by tanh": (Then("F.gelu(y, approximate='tanh')"), 20 * image()),
    "two convolutions": (
        over("y = m.m0(x) + m.m1(x); return m.m2(torch.relu(y) + x)", **_SUMMED), image(1, 3, 8, 8)
    ),
} | {  # functions that it knows by other names
    text: (Then(text), image())
    for text in (
        "y.relu()[:, [2, 0, 3]].sigmoid()", _GROUPED, "torch.cat(y.chunk(3, 1)[::-1], 1)",
        "F.adaptive_avg_pool2d(y.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2), 1)",
        "F.interpolate(y, scale_factor=2.0, mode='bilinear', align_corners=True).relu()",
        "F.interpolate(y, scale_factor=2.0).relu()",
        "F.batch_norm(y, y.new_zeros(4), y.new_ones(4))",
    )
}  # fmt: skip
OF_ONNX_RUNTIME = {name: OF_OPENVINO[name] for name in ("channels last", "attention under a mask")}


@rows(
    "engine model x",
    {f"openvino, {name}": ("openvino", *row) for name, row in OF_OPENVINO.items()},
    {f"onnxruntime, {name}": ("onnxruntime", *row) for name, row in OF_ONNX_RUNTIME.items()},
)
def test_it_gives_the_models_answer(engine: str, model: nn.Module, x: torch.Tensor) -> None:
    fast = lowered(model, x, engine, only=(), tune_seconds=0)

    assert chosen(fast) == [title(engine)]
    assert len(compiled(fast, x)) == 1
    assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()


def test_a_query_without_a_key_is_answered_by_torch() -> None:
    fast = lowered(_MASKED, image(8, 8), "openvino", tune_seconds=0)

    assert_close(fast(torch.ones(8, 8)), _MASKED(torch.ones(8, 8)))


_BLOCK = "x = x + m.down(F.silu(m.gate(y := {})) * m.up(y)); "
_GATED = {name: nn.Linear(16, 16) for name in ("gate", "up", "down")}
_SCALED = "m.layer(F.rms_norm(m.layer(x), x.shape[1:], torch.ones(x.shape[1]).add(1)))"
REGIONS: dict[str, tuple[nn.Module, torch.Tensor, int]] = {
    # OpenVINO ends the process at an RMSNorm of fewer numbers than a vector of the processor has.
    "rms_norm of 8": (over(_SCALED), image(8, 8), 2),
    "rms_norm of 16": (over(_SCALED, layer=nn.Linear(16, 16)), image(8, 16), 1),
} | {  # values that grow from block to block, unless each is divided by its own norm
    norm: (over(_BLOCK.format(norm) * 5 + "return x", **_GATED), image(16, 16), regions)
    for norm, regions in {
        "F.layer_norm(x, (16,))": 1,
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)": 1,
        "F.normalize(x, dim=-1)": 1,
        "x * torch.rsqrt(m.up(x).pow(2).mean(-1, keepdim=True) + 1e-6)": 10,
        # The norms of other rows, and a sum with what may cancel one.
        "x / torch.linalg.vector_norm(x, dim=-1).clamp_min(1e-6)": 6,
        "x / (x.norm(dim=-1, keepdim=True) + x).clamp_min(1e-6)": 6,
    }.items()
} | {  # what an engine lacks ends its region, and another follows
    text: (over(f"y = m.m0(x); return m.m1({text})", **images(3, 8, 8)), image(), 2)
    for text in (
        "F.softplus(y)", "F.interpolate(y, scale_factor=2, mode='bicubic')",
        "F.interpolate(y, size=(5, 5), mode='bilinear', antialias=True)",
        "F.pad(y, (1, 1, 1, 1), mode='replicate')", "F.pad(y, (1, 1, 1, 1), mode='circular')",
        "F.avg_pool2d(y, 2, divisor_override=3)", "F.adaptive_max_pool2d(y, 3)",
    )
}  # fmt: skip


@rows("model x regions", REGIONS)
def test_a_region_ends_at_what_an_engine_lacks_and_before_its_values_may_overflow(
    model: nn.Module, x: torch.Tensor, regions: int
) -> None:
    fast = lowered(model, x, only=(), tune_seconds=0)

    assert len(compiled(fast, x)) == regions
    for scale in (1, 1e3, 1e9):
        assert_close(fast(x * scale) / scale, model(x * scale) / scale, equal_nan=True)


# What makes NaN of numbers is no part of a region: an engine's ReLU makes 0 of it.
NO_PART = [
    "y / y.std()", "y / 1e-40", "F.relu(y).mul(1e10)", "y * math.nan", "y.log()", "y.pow(-1)",
    "F.layer_norm(y, (8,), eps=0.0)", "y.masked_fill(y > 0, -math.inf)", "(y + 1e-6).rsqrt()",
    "F.scaled_dot_product_attention(y, y, y, y)", "torch.add(y.pow(2), 1e-6, alpha=-1).sqrt()",
    "F.scaled_dot_product_attention(y, y, y, attn_mask=(y > 0).roll(1, -1))",
    "y / (y.pow(2).mean(-1, keepdim=True) + 1e-30)", "y / (y.mean(-1, keepdim=True) + 1e-6)",
]  # fmt: skip
PART = [
    "y / y.std()", "y / 0", "y / 1e-40", "F.relu(y).mul(1e10)", "y * math.nan", "y.log()",
    "F.layer_norm(y, (8,), eps=0.0)", "y.masked_fill(y > 0, -math.inf)",
    "torch.batch_norm(y, None, None, None, None, True, 0.1, 0.0, False)",
    "F.scaled_dot_product_attention(y, y, y, y)", "y.rsqrt()", "y.pow(-1)", "(y + 1e-6).rsqrt()",
    "F.scaled_dot_product_attention(y, y, y, attn_mask=(y > 0).roll(1, -1))",
    "torch.add(y.pow(2), 1e-6, alpha=-1).sqrt()",
    "y / (y.pow(2).mean(-1, keepdim=True) + 1e-30)", "y / (y.mean(-1, keepdim=True) + 1e-6)",
]  # fmt: skip
PART = [
    "y / 2", "F.layer_norm(y, (8,), eps=1e-6)", "F.softmax(y, -1)",
    "F.scaled_dot_product_attention(y, y, y)", "torch.cat([y[:, :, ::2], y[:, :, 1::2]], 1)",
    "(y := y.flatten(2)) / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()",
    "y * y.norm(2, (2, 3), keepdim=True) / (y.norm(2, (1, 2, 3), True) + 1e-6)",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NO_PART, *PART])
def test_what_may_make_nan_of_numbers_is_no_part_of_a_region(text: str) -> None:
    model, x = Then(f"F.relu({text} + 1)"), image()
    [part] = compiled(lowered(model, x), x)

    called = {name_of_call(node) for node in part.region.graph.nodes if node.op[:4] == "call"}
    assert ("relu" in called) if text in PART else ("conv2d" in called)
    assert text in PART or called <= {"conv2d", "relu", "add", "mean", "pow"}
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    assert_close(lowered(model, x)(x), model(x), equal_nan=True)


REJECTED = {
    "infinite": (torch.full((4,), -math.inf), torch.ones(3, 4), "a constant is not finite"),
    "bfloat16": (torch.ones(4), torch.ones(3, 4).bfloat16(), "not in float32"),
    "empty": (torch.ones(4), torch.ones(0, 4), "a tensor is empty"),
}


@rows("mask x reason", REJECTED)
def test_what_is_not_for_engines_is_rejected_with_the_reason(
    mask: torch.Tensor, x: torch.Tensor, reason: str
) -> None:
    model = over("F.relu(m.layer(x) + m.mask)", layer=nn.Linear(4, 4).to(x.dtype), mask=mask)
    fast = lowered(model, x)
    [choice] = [*fast.report.choices, *fast.report.tried]

    assert reason in choice.rejected[title()]
    optimizer.check(model, fast, x)


def _compile_nothing(*args: Any) -> Any:
    raise NotImplementedError("no such operator")


NO_GOOD = {
    "it cannot": (_compile_nothing, 0.1, "NotImplementedError: no such operator"),
    "it cannot, untimed": (_compile_nothing, 0, "NotImplementedError: no such operator"),
    "wrong": (lambda *_: lambda _: [torch.zeros(2, 4, 8, 8)], 0.1, "relative error 1"),
}


@rows("compile_it seconds reason", NO_GOOD)
def test_an_engine_that_is_no_good_is_rejected_with_the_reason_and_the_next_tried(
    monkeypatch: pytest.MonkeyPatch, compile_it: Any, seconds: float, reason: str
) -> None:
    monkeypatch.setattr(StubEngine, "compile", compile_it)
    [choice] = lowered(Then("y.relu()"), image(), tune_seconds=seconds).report.choices

    assert choice.chosen == PACKED
    assert reason in choice.rejected[title()]


def test_it_is_compiled_for_the_threads_of_the_caller_and_waits_for_none_in_a_forked_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, runs, before = list[int](), list[int](), torch.get_num_threads()

    def compile_it(self: StubEngine, graph: fx.GraphModule, inputs: Any, number: int) -> Any:
        threads.append(number)
        return lambda given: (runs.append(1), graph(*given))[1]

    monkeypatch.setattr(StubEngine, "compile", compile_it)
    model, x = Then("y.relu()"), image()
    fast = lowered(model, x)
    torch.set_num_threads(before + 1)
    assert_close(fast(x), model(x))
    torch.set_num_threads(before)
    assert threads == [before, before + 1]

    here = len(runs)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert_close(fast(x), model(x))
    assert len(runs) == here > 0


def test_where_the_engine_is_not_installed_torch_runs_a_pickle_and_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Then("y.relu()"), image()
    fast = lowered(model, x)
    monkeypatch.setattr(engines, "_is_installed", lambda engine: False)
    loaded = pickled(fast)

    assert_close(loaded(x), model(x))
    assert not compiled(loaded, x)
    assert engines_named("auto") == ()
    with pytest.raises(InputError, match=r"pip install '.\[openvino\]'"):
        optimizer.optimize(model, x, engines="openvino")


def test_the_engines_are_those_that_are_named_also_for_refit() -> None:
    assert engines_named("auto") == AUTOMATIC == ("openvino",)
    assert engines_named(iter(["openvino", "onnxruntime"])) == ("openvino", "onnxruntime")

    model, x = Then("y.relu()"), image()
    fast, without = lowered(model, x), lowered(model, x, engines=())
    assert fast.report.choices[0].key != without.report.choices[0].key
    assert chosen(without) != chosen(fast.refit(model.state_dict(), x)) == [title()]


PROCESS = """
import gc, signal, sys, threading, time, torch, optimizer
from torch import nn

def fast(size):
    model = nn.Sequential(nn.Conv2d(3, 4, size), nn.ReLU()).eval()
    made = optimizer.optimize(model, torch.randn(1, 3, 8, 8), engines="openvino", tune_seconds=0)
    assert "OpenVINO" in made.report.choices[0].chosen
    return made

before = set(threading.enumerate())
kept = [fast(3)]
started = {type(each).__module__ for each in set(threading.enumerate()) - before}
assert started <= {"tqdm._monitor"}, started
assert "openvino_telemetry" not in sys.modules

signal.signal(signal.SIGALRM, lambda *args: None)
kept += [fast(5), fast(7)]
while kept:
    del kept[0]
    gc.collect()
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)
"""


def test_no_thread_is_started_nothing_is_reported_and_signals_do_no_harm() -> None:
    """A thread beside this one has each random number watched, at twice the time.

    After an engine was let go, a signal ended the process on a processor with tiles: OpenVINO took
    its stack for signals back.
    """
    subprocess.run([sys.executable, "-c", PROCESS], check=True)


MEMORY = """
import gc, torch, optimizer
from optimizer.lowering.choose import Chooser

gc.disable()  # a search for garbage comes by chance
Chooser._is_needless = lambda *_: False  # all candidates are made

def held():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(40)))
x = torch.randn(1, 1024)
optimizer.optimize(model[:1].eval(), x, engines="openvino")  # what is loaded once
before = held()
fast = optimizer.optimize(model.eval(), x, engines="openvino", only=())
fast(x)
assert fast.report.choices, fast.report
print((held() - before) / sum(each.nbytes for each in model.parameters()))
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="the system says how much a process holds")
def test_beside_its_weights_a_process_holds_what_was_packed_of_them_once() -> None:
    """OpenVINO kept a transposed copy, and glibc what losing candidates had freed."""
    command = [sys.executable, "-c", MEMORY]
    held = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert float(held) < 1.4
