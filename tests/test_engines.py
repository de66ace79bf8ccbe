"""Compilers and runtimes that others keep: which are offered, and what they are held to."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from inspect import getclosurevars, isfunction
from shutil import which

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import optimizer
from optimizer import InputError
from tests import level_2
from tests.internals import ENGINES, Times, engines, engines_named, name_of_call
from tests.level_2 import PACKED, StubEngine, Then, attending, chosen, image, pickled, plan_of
from tests.single_pass import Forward, ForwardOfThree, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
AUTOMATIC, _STUB = engines.AUTOMATIC, f"Stub {torch.__version__}"


@pytest.fixture(autouse=True)
def _engines_are_offered(right_is_enough, monkeypatch):
    level_2.offer(monkeypatch, *AUTOMATIC)


def lowered(model, x, engine="stub", **options):
    return level_2.lowered(model, x, **{"engines": [engine]} | options)


def compiled(fast, *inputs):
    """The code of the parts of a plan that run on an engine."""
    parts = filter(isfunction, vars(plan_of(fast, *inputs).func.program).values())
    held = [getclosurevars(getclosurevars(each).nonlocals["run"]).nonlocals for each in parts]
    return [each["run_region"].args[0]._graph for each in held if isfunction(each["run"])]


_INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not which("c++"), reason="it writes C++ for the CPU")
)
real = pytest.mark.parametrize("engine", ["openvino", "onnxruntime", _INDUCTOR])


@real
def test_an_answer_is_the_callers_nan_too_also_of_many_threads_at_once(engine):
    fast = lowered(attending(), image(), engine, tune_seconds=0)
    assert len(compiled(fast, image())) == 1
    inputs = [image() * scale for scale in (*range(1, 9), math.nan, math.inf)] * 5
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fast, inputs))
    assert_close(answers, list(map(attending(), inputs)), equal_nan=True)

    kept = answers[0].clone()
    answers[0].fill_(3.0)
    with torch.no_grad():
        assert torch.equal(fast(image().requires_grad_()), kept)


def over(text, **layers):
    return Forward(text, **layers or {"layer": nn.Linear(8, 8)}).eval()


def convolutions(*channels):
    pairs = itertools.pairwise(channels)
    return {f"m{i}": nn.Conv2d(*pair, 3, padding=1) for i, pair in enumerate(pairs)}


_KEEP = "keep = x > x.amin(-1, keepdim=True); y = m.layer(x)[None];"
_MASKED = over(_KEEP + "return m.layer(F.scaled_dot_product_attention(y, y, y, keep))")
_HEADS = (
    "one, other, last = m.layer(x).relu().unflatten(-1, (3, 8)).unbind(-2);"
    "return one.exp() * other / last.exp()"
)
_WIDE = (
    "wide = keep.expand(1, 8, 8); z = F.scaled_dot_product_attention(y, y, y, wide);"
    "return torch.where(wide, z, 0.0)"
)
_NORMED = convolutions(3, 64) | {"m1": nn.Conv2d(64, 64, 1)}
_NORMED |= {f"norm{i}": nn.GroupNorm(8, 64) for i in range(2)}
_SUMMED = convolutions(3, 3) | {f"m{i}": nn.Conv2d(3, 3, 1) for i in (1, 2)}
_LINEAR = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 8)}
_GROUPED = "k = y[:, :2]; return F.scaled_dot_product_attention(y, k, k + 1, enable_gqa=True)"
# A model, whose part between its layers is one region, and an input.
OF_OPENVINO = {
    "channels last": (Then("y.transpose(2, 3).exp() + y"), image(2, 6, 6, 3).permute(0, 3, 1, 2)),
    # The code that OpenVINO generates ends the process at a sum behind a GroupNorm,
    "a sum of group norms":
        (over("m.norm0(m.m1(y := m.m0(x))) + F.silu(m.norm1(y))", **_NORMED), image(1, 3, 16, 16)),
    # and that of 2026 at this.
    "a residual of a row": (over("x.relu() + m.b(m.a(x))", **_LINEAR), image(1, 8)),
    # Heads that a region ends with, since what reads them may make NaN.
    "parts that are read outside": (over(_HEADS, layer=nn.Linear(8, 24)), image(4, 8)),
    "attention under a mask": (_MASKED, image(8, 8)),
    "a mask that is read outside": (over(_KEEP + _WIDE), image(8, 8)),
    "negated in reading":
        (over("m.m0(torch.fft.fft(x).conj().imag).relu()", **convolutions(3, 4)), image()),
    # 5e-4 off by another formula, which the check allows
    "a gelu by tanh": (Then("F.gelu(y, approximate='tanh')"), 20 * image()),
    "two convolutions": (
        over("y = m.m0(x) + m.m1(x); return m.m2(torch.relu(y) + x)", **_SUMMED), image(1, 3, 8, 8)
    ),
} | {  # functions that it knows by other names
    text: (Then(text), image())
    for text in (
        "y.relu()[:, [2, 0, 3]].sigmoid()", _GROUPED, "torch.cat(y.chunk(3, 1)[::-1], 1)",
        "F.adaptive_avg_pool2d(y.relu().permute(0, 3, 1, 2), 1)",
        "F.interpolate(y, scale_factor=2.0, mode='bilinear', align_corners=True).relu()",
        "F.interpolate(y, scale_factor=2.0).relu()",
        "F.batch_norm(y, y.new_zeros(4), y.new_ones(4))",
    )
}  # fmt: skip


@rows("model x", OF_OPENVINO)
def test_openvino_gives_the_models_answer(model, x):
    assert_gives_the_answer("openvino", model, x)


def test_onnx_runtime_gives_the_models_answer():
    assert_gives_the_answer("onnxruntime", *OF_OPENVINO["attention under a mask"])


# How many products are large, and are read inside alone.
APART = {
    "m.layer(x)": {(64, 384): 0}, "F.gelu(x @ m.layer.weight.t())": {(64, 384): 1},
    "F.gelu(m.layer(x))": {(2, 32, 384): 1, (63, 384): 0, (64, 383): 0},
}  # fmt: skip


@pytest.mark.parametrize("text", APART)
def test_without_avx_512_openvino_fuses_nothing_into_a_large_product(text, monkeypatch):
    for name, (shape, large) in itertools.product(("AVX2", "AVX512"), APART[text].items()):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        model, x = over(text, layer=nn.Linear(shape[-1], 16)), image(*shape)
        fast = lowered(model, x, "openvino", only=(), tune_seconds=0)
        [run] = filter(isfunction, vars(plan_of(fast, x).func.program).values())
        for _ in range(3):
            run = getclosurevars(run).nonlocals["run"]
        made, wanted = map(getclosurevars(run).nonlocals.get, ("compiled", "types"))
        assert (len(made.outputs), len(wanted)) == (1 + large * (name == "AVX2"), 1)
        assert_close(fast(x), model(x))


def assert_gives_the_answer(engine, model, x):
    fast = lowered(model, x, engine, only=(), tune_seconds=0)

    assert chosen(fast)[0].startswith(f"{ENGINES[engine].title} ")
    assert len(compiled(fast, x)) == 1
    for each in (x, torch.ones_like(x)):  # under a mask of these, a query has no key
        assert_close(fast(each), model(each), equal_nan=True)
    with torch.device("meta"):  # where new tensors of the caller's are
        assert fast(x).stride() == model(x).stride()


_BLOCK = "x = x + m.down(F.silu(m.gate(y := {})) * m.up(y)); "
_GATED = {name: nn.Linear(16, 16) for name in ("gate", "up", "down")}
_SCALED = "m.layer(F.rms_norm(m.layer(x), x.shape[1:], torch.ones(x.shape[1]).add(1)))"
REGIONS = {
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
    text: (over(f"y = m.m0(x); return m.m1({text})", **convolutions(3, 8, 8)), image(), regions)
    for text, regions in {
        "F.softplus(y)": 2, "F.interpolate(y, size=(5, 5), mode='bilinear', antialias=True)": 2,
        "F.pad(y, (1, 1, 1, 1), mode='replicate')": 2, "F.avg_pool2d(y, 2, divisor_override=3)": 2,
        "[i := y.argmax() * 0, m.m0(-x).relu().index_select(0, i[None])][1]": 3,  # whole numbers
        "[v := x * 2, y := m.m0(v), v[:1].neg_(), y + v.mean()][3]": 2,  # the first reads v
        "y + x.max(1).values.mean()": 1,  # a part of what is made outside
        "y @ y @ (y @ y)": 2,  # which may overflow
    }.items()
}  # fmt: skip


@rows("model x regions", REGIONS)
def test_a_region_ends_at_what_an_engine_lacks_and_before_an_overflow(model, x, regions):
    fast = lowered(model, x, only=(), tune_seconds=0)

    assert len(compiled(fast, x)) == regions
    for scale in (1, 1e3, 1e9):
        assert_close(fast(x * scale) / scale, model(x * scale) / scale, equal_nan=True)


_STEP = "v.index_copy_(1, k + 1, m.layer(q)); k.add_(1); return m.layer(q + v.softmax(1).sum(1)), v"


@pytest.mark.parametrize("engine", ["stub", "openvino"])
def test_a_step_with_a_cache_is_one_region_and_writes_it_as_eager_does(engine):
    def at(place):
        return image(1, 1, 8, seed=place + 9), torch.tensor([place]), image(1, 4, 8)

    model = ForwardOfThree(_STEP, layer=nn.Linear(8, 8)).eval()
    fast = level_2.lowered(model, *at(0), engines=[engine], tune_seconds=0)
    [part] = compiled(fast, *at(0))
    assert "where" in map(name_of_call, part.nodes)
    for place in (-1, 0, 2):
        inputs, own = at(place), at(place)
        assert_close(fast(*own), model(*inputs))
        assert_close(own, inputs)
    for place in (-2, 3):
        with pytest.raises(IndexError):
            fast(*(inputs := at(place)))
        assert all(map(torch.equal, inputs, at(place)))
    fast = level_2.lowered(model, *at(0), level=3, precision="bf16", error_budget=0.1)
    assert "it writes what has other names" in str(fast.report)


# What makes NaN of numbers is no part of a region: an engine's ReLU makes 0 of it.
NO_PART = [
    "y / y.std()", "y / 1e-40", "F.relu(y).mul(1e10)", "y * math.nan", "y.log()", "y.pow(-1)",
    "F.layer_norm(y, (8,), eps=0.0)", "y.masked_fill(y > 0, -math.inf)", "(y + 1e-6).rsqrt()",
    "F.scaled_dot_product_attention(y, y, y, y)", "torch.add(y.pow(2), 1e-6, alpha=-1).sqrt()",
    "F.scaled_dot_product_attention(y, y, y, attn_mask=(y > 0).roll(1, -1))",
    "y / (y.pow(2).mean(-1, keepdim=True) + 1e-30)", "y / (y.mean(-1, keepdim=True) + 1e-6)",
    "F.scaled_dot_product_attention(y, torch.ones_like(y), y)", "y.where(torch.tensor(False), y+1)",
    "F.scaled_dot_product_attention(y, y, torch.ones_like(y))", "y / (y.pow(2) + y)",
]  # fmt: skip
PART = [
    "y / 2", "F.layer_norm(y, (8,), eps=1e-6)", "F.softmax(y, -1)",
    "F.scaled_dot_product_attention(y, y, y)", "torch.cat([y[:, :, ::2], y[:, :, 1::2]], 1)",
    "(y := y.flatten(2)) / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()",
    "y * y.norm(2, (2, 3), keepdim=True) / (y.norm(2, (1, 2, 3), True) + 1e-6)",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NO_PART, *PART])
def test_what_may_make_nan_of_numbers_is_no_part_of_a_region(text):
    model, x = Then(f"F.relu({text} + 1)"), image()
    [part] = compiled(lowered(model, x), x)

    called = {name_of_call(node) for node in part.nodes if node.op[:4] == "call"}
    assert ("relu" in called) if text in PART else ("conv2d" in called)
    assert text in PART or called <= {"conv2d", "relu", "add", "mean", "pow"}
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    assert_close(lowered(model, x)(x), model(x), equal_nan=True)


def masked(*mask):
    return over("F.relu(m.layer(x) + m.mask)", layer=nn.Linear(4, 4), mask=torch.tensor(mask))


REJECTED = {
    "infinite": (masked(-math.inf), torch.ones(3, 4), 0, "is not finite"),
    "bfloat16": (masked(1.0).bfloat16(), torch.ones(3, 4).bfloat16(), 0.1, "not in float32"),
    "empty": (masked(1.0), torch.ones(0, 4), 0.1, "a tensor is empty"),
}


@rows("model x seconds reason", REJECTED)
def test_torch_runs_what_is_not_for_engines_and_the_reason_is_told(model, x, seconds, reason):
    fast = lowered(model, x, tune_seconds=seconds)
    [choice] = [*fast.report.choices, *fast.report.tried]

    assert choice.chosen != _STUB
    assert reason in choice.rejected[_STUB]
    optimizer.check(model, fast, x)


def test_it_is_compiled_for_the_callers_threads_and_runs_in_no_forked_process(monkeypatch):
    threads, runs, before = list[int](), list[int](), torch.get_num_threads()

    def compile_it(self, graph, inputs, number):
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


def test_where_an_engine_is_not_installed_torch_runs_a_pickle_and_the_error_helps(monkeypatch):
    model, x = Then("y.relu()"), image()
    loaded = pickled(lowered(model, x))
    monkeypatch.setattr(engines, "_is_installed", lambda engine: False)
    monkeypatch.setattr(Times, "race", lambda *_: 1 / 0)  # the decision is gone, and none is timed
    assert_close(loaded(x), model(x))
    assert not compiled(loaded, x)
    assert engines_named("auto") == ()
    with pytest.raises(InputError, match=r"pip install '.\[openvino\]'"):
        optimizer.optimize(model, x, engines="openvino")


def test_the_engines_are_those_that_are_named_also_for_refit():
    assert engines_named("auto") == AUTOMATIC == ("openvino",)
    assert engines_named(iter(["openvino", "onnxruntime"])) == ("openvino", "onnxruntime")

    model, x = Then("y.relu()"), image()
    fast, without = lowered(model, x), lowered(model, x, engines=())
    assert fast.report.choices[0].key != without.report.choices[0].key
    assert chosen(without) == [PACKED]
    assert chosen(fast.refit(model.state_dict(), x)) == [_STUB]


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
# OpenVINO kept a transposed copy of the weights, and glibc what losing candidates had freed.
MEMORY = """
import gc, torch, optimizer
from optimizer.lowering.choose import Chooser, Times

gc.disable()  # a search for garbage comes by chance
Chooser._is_needless = lambda *_: False  # all candidates are made, and the engine wins
Times.race = lambda _, runs, *rest, **more: {n: 0.5 + (n in ("portable", "as it is")) for n in runs}

def held():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) * 1024

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(40)))
x = torch.randn(1, 1024)
optimizer.optimize(model[:1].eval(), x, engines="openvino")  # what is loaded once
before = held()
fast = optimizer.optimize(model.eval(), x, engines="openvino", only=())
fast(x)
assert fast.report.choices, fast.report
held_of_weights = (held() - before) / sum(each.nbytes for each in model.parameters())
assert held_of_weights < 1.4, held_of_weights
"""
_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="it says how much a process holds")


@pytest.mark.parametrize(
    "program", [PROCESS, pytest.param(MEMORY, marks=(pytest.mark.integration, _LINUX))],
    ids=["no thread is started, nothing reported, signals do no harm", "weights are held once"],
)  # fmt: skip
def test_in_a_process_with_openvino(program):
    """A thread beside has random numbers watched; an engine took its stack for signals back."""
    subprocess.run([sys.executable, "-c", program], check=True)
