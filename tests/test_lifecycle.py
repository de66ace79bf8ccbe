"""Before, after and around `optimize`: the caller's model and process, threads, faults."""

from __future__ import annotations

import ast
import dataclasses
import gc
import operator
import pickle
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.testing import assert_equivalent, untouched
from tests.internals import forked_rng, is_tracing
from tests.single_pass import Forward, rows, texts

np = pytest.importorskip("numpy")
X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


def small():
    """A foldable pair, a layer that no rewrite replaces, and a hook."""
    torch.manual_seed(3)
    layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "head": nn.Conv2d(4, 2, 1)}
    model = Forward("m.head(torch.relu(m.bn(m.conv(x))))", **layers)
    model.head.register_forward_hook(lambda module, inputs, result: result * 2)
    model.conv.bias.requires_grad_(False)
    nn.init.normal_(model.bn.running_mean)
    return model.eval()


@pytest.mark.parametrize("check", ["each", None])
def test_the_callers_model_is_not_touched(check):
    model = small()

    with untouched(model):
        fast = optimizer.optimize(model, X, check=check, level=1)
        fast.double().to(torch.bfloat16).train().requires_grad_(False)


def test_a_pickle_with_a_factory_in_it_leaves_fx_as_it_was():
    model = Forward("x.relu() + torch.zeros(x.shape)").eval()
    copied = pickle.loads(pickle.dumps(optimizer.optimize(model)))

    assert torch.equal(fx.symbolic_trace(copied)(-torch.ones(2)), torch.zeros(2))


def test_models_can_be_optimized_from_threads_while_others_run():
    model = small()
    expected = call_of(model, X)
    acts = [lambda: optimizer.optimize(model, X, level=1), lambda: model] * 15

    with ThreadPoolExecutor(3) as pool:
        for result in pool.map(lambda act: call_of(act(), X), acts):
            torch.testing.assert_close(result, expected)


def raising(**captured):
    raise RuntimeError("a bug")


def tail(*last):
    """What is optimized beside a fault, and what follows it."""
    return nn.Sequential(small(), nn.Dropout(), nn.Flatten(), nn.Linear(32, 2), nn.ReLU(), *last)


DRAWING = tail(Forward("x + torch.rand_like(x)"))


@pytest.mark.parametrize("check", ["final", "each"])
@rows(
    "apply words model",
    {
        "raises": (raising, "a bug", tail()),
        "is wrong": (lambda affine: affine.args[0], "changed the answer", tail()),
        "is wrong beside a draw": (lambda affine: affine.args[0], "changed the answer", DRAWING),
    },
)
def test_a_faulty_pass_is_rolled_back_and_named(check, apply, words, model, monkeypatch):
    every = [
        dataclasses.replace(each, apply=apply) if each.name == "fold_affine" else each
        for each in optimizer.all_passes()
    ]
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: tuple(every))

    with pytest.warns(UserWarning, match="fold_affine") as caught:
        fast = optimizer.optimize(model.eval(), X, check=check, level=1)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert model is DRAWING or torch.equal(fast(X), model(X))
    fired = {"remove_identities": 1, "fuse_linear_relu": 1, "reuse_activations": 1}
    assert fast.report.counts() == fired
    remark = fast.report.remarks[0]  # the others speak of the hook and the draw
    assert "fold_affine" in remark
    assert words in remark


PROGRAM = """
import gc, torch, optimizer
linear = torch.nn.Linear(3, 4)
optimizer.optimize(linear, torch.ones(2, 3))
del linear
gc.collect()
print([each.shape for each in gc.get_objects() if type(each) is torch.nn.Parameter])
print(torch.is_tensor in torch.overrides.get_ignored_functions())
"""


def test_torch_keeps_nothing_of_the_first_model():
    """Its lists of functions are made once, in the first trace if not before."""
    command, root = [sys.executable, "-W", "ignore", "-c", PROGRAM], Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)

    assert ended.stdout.split() == ["[]", "True"]


class Asking(nn.Sequential):
    """A small model that meets all that is patched while it is recorded."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch.Tensor) or not torch.is_tensor(x):
            raise TypeError
        return super().forward(x) + torch.zeros(4)


def process_state():
    return [
        *(nn.Module.__call__, nn.Module.__getattr__, torch.is_tensor, torch.zeros),
        *("isinstance" in globals(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        *(is_tracing(), torch.fx._symbolic_trace.CURRENT_PATCHER, gc.isenabled()),
        *(list(warnings.filters), sys.getprofile()),
        *(random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())),
    ]


EACH = 12  # one of so many lines is interrupted, of which a run takes hundreds


def putting_back(file):
    """The lines that change state or put it back, where Python itself shields from no Ctrl-C."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        found += node.finalbody if isinstance(node, ast.Try) else []
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        is_either = getattr(node, "name", "") in ("__enter__", "__exit__")
        found += [node] if is_either or "contextmanager" in decorators else []
    return {line for each in found for line in range(each.lineno, each.end_lineno + 1)}


PACKAGE = Path(optimizer.__file__).parent
LEFT_OUT = {str(file): putting_back(file) for file in PACKAGE.rglob("*.py")}


class Interrupting:
    """Notes the lines that this thread runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at=-1):
        self.at, self.lines = at, []

    def __call__(self, frame, event, argument):
        file = frame.f_code.co_filename
        if file not in LEFT_OUT:
            return None
        if event == "line" and frame.f_lineno not in LEFT_OUT[file]:
            self.lines.append((file, frame.f_lineno))
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, function):
        """Whether the function was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except (KeyboardInterrupt, optimizer.CaptureError):  # fx may turn the one into the other
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fx's
@rows(
    "run",
    {
        "optimize": (lambda model: optimizer.optimize(model, ROWS, level=0, check=None),),
        "capture": (lambda model: optimizer.capture(model, ROWS),),
        "check": (lambda model: optimizer.check(model, model, ROWS),),
    },
)
def test_an_interrupt_at_any_line_leaves_the_process_as_it_was(run):
    run, noting = partial(run, Asking().eval()), Interrupting()
    run()
    noting.run(run)
    first = {line: place for place, line in reversed(list(enumerate(noting.lines, 1)))}
    before = process_state()
    interrupted = [line for line in sorted(first)[::EACH] if Interrupting(first[line]).run(run)]
    assert {Path(file).parent.name for file, _ in interrupted} >= {"core", "facts", "frontend"}
    assert len(interrupted) > 25
    assert process_state() == before


@pytest.mark.parametrize("draw", [
    lambda: torch.rand(()).item(), random.random, np.random.rand,
], ids=["torch", "random", "numpy"])  # fmt: skip
def test_beside_a_model_that_draws_nothing_no_number_is_drawn_twice(draw):
    model, drawn, done = Asking().eval().double(), list[float](), threading.Event()

    def draw_on():
        while not done.wait(1e-4):
            drawn.extend(float(draw()) for _ in range(10))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(draw_on)
        for _ in range(5):
            fast = optimizer.optimize(model, ROWS.double(), level=1)
            optimizer.check(model, fast, ROWS.double())
        done.set()

    assert not any("left as it is" in remark for remark in fast.report.remarks)
    assert len(drawn) > 100
    assert len(set(drawn)) > 0.999 * len(drawn)  # of 2 ** 24 numbers, two may be the same


DRAWS = """
    torch.rand(x.shape, dtype=x.dtype); torch.randn_like(x); torch.randint(0, 9, x.shape) * x;
    torch.empty_like(x).normal_(1, 2); torch.bernoulli(torch.full_like(x, 0.5));
    F.dropout(x, 0.5, True); F.alpha_dropout(x, 0.5, True); x[torch.randperm(x.shape[0])]
"""


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.2), (torch.bfloat16, 3.0)])
@pytest.mark.parametrize("draw", texts(DRAWS))
def test_a_wrong_factor_beside_a_draw_is_seen(draw, dtype, factor):
    x = torch.linspace(-2.0, 3.0, 400).reshape(100, 4).to(dtype)
    right, same, wrong = (
        Forward(f"y = {draw}; return x[: y.shape[0]] * {each} + 0.1 * y")
        for each in (1.0, 1.0, factor)
    )
    optimizer.check(right, same, x)
    assert_equivalent(right, same, (x,))
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(right, wrong, x)
    with pytest.raises(AssertionError, match="output 0"):
        assert_equivalent(right, wrong, (x,))


def test_the_generators_of_gpus_are_put_back(monkeypatch):
    gpu, states = torch.Generator(), [torch.tensor([3], dtype=torch.uint8)]
    monkeypatch.setattr("torch.cuda.default_generators", (gpu,))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.get_rng_state", lambda: states[-1].clone())
    monkeypatch.setattr("torch.mps.set_rng_state", states.append)
    before = gpu.get_state()

    with forked_rng():
        gpu.manual_seed(3)
        states[0][0] = 4

    assert torch.equal(gpu.get_state(), before)
    assert states[-1].tolist() == [3]


class Guarded(nn.Sequential):
    """A rank that a fold relies on, and a flag that chooses a branch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return super().forward(x) * 2 if twice else super().forward(x)


# Views, transposes, a dead branch, a write under a mask and a counter in a buffer.
MASKING = """
    torch.exp(x); y = x.transpose(1, 2).permute(0, 2, 1, 3) * 2; y[y > 0.5] = 0.0
    m.calls.add_(1); return {"y": y.mT, "x": x}"""


def call_of(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs)


PAIR = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten()
NETS = {
    "convolutions": (lambda: nn.Sequential(*PAIR, nn.Linear(64, 5), nn.ReLU()), (X,)),
    "a flag that is set": (Guarded, (X[0, 0], True)),
    "writes and views": (lambda: Forward(MASKING, calls=torch.zeros(())), (X,)),
}


@pytest.fixture(params=NETS)
def optimized(request):
    """A model, the same optimized, and its inputs."""
    make, inputs = NETS[request.param]
    torch.manual_seed(5)
    model = make().eval()
    fast = optimizer.optimize(model, inputs, level=1)
    assert fast.report.fired
    return model, fast, inputs


def traced(fast, inputs):
    if any(node.target is operator.setitem for node in fast.graph.nodes):
        with pytest.raises(TypeError, match="item assignment"):  # which fx cannot record
            fx.symbolic_trace(fast)
        return optimizer.capture(fast)
    return fx.symbolic_trace(fast)


def in_onnx(fast, inputs):
    """The result after `torch.onnx.export`, run by ONNX's reference evaluator."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own pickling
        program = torch.onnx.export(fast, inputs, verbose=False)
    proto = program.model_proto
    onnx.checker.check_model(proto)
    names = [each.name for each in proto.graph.input]
    _, structure = pytree.tree_flatten(call_of(fast, *inputs))

    def run(*given):
        arrays = [each.numpy() for each in given if isinstance(each, Tensor)]
        values = ReferenceEvaluator(proto).run(None, dict(zip(names, arrays, strict=True)))
        outputs = map(torch.from_numpy, values[: structure.num_leaves])
        return pytree.tree_unflatten(outputs, structure)

    return run


def optimized_again(fast, inputs):
    again = optimizer.optimize(fast, inputs, level=1)
    assert (again.report.fired, again.code) == ((), fast.code)
    return again


ELSEWHERE = {
    "symbolic_trace": traced,
    "export": lambda fast, inputs: torch.export.export(fast, inputs).module(),
    "ONNX": in_onnx,
    "compile": lambda fast, inputs: torch.compile(fast, backend="eager", fullgraph=True),
    "Transformer": lambda fast, inputs: fx.Transformer(fast).transform(),
    "Interpreter": lambda fast, inputs: fx.Interpreter(fast).run,
    "optimize": optimized_again,
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_the_result_gives_the_same_answers_through(where, optimized):
    model, fast, inputs = optimized
    through = ELSEWHERE[where](fast, inputs)
    torch.testing.assert_close(call_of(through, *inputs), call_of(model, *inputs))


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning", "ignore:The TorchScript type")
@pytest.mark.parametrize("level", [1, 2])
def test_a_result_without_guards_is_scripted(level):
    left_as_it_is = nn.LSTMCell(4, 4).eval()
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()).eval(), left_as_it_is):
        fast = optimizer.optimize(model, ROWS, level=level)
        torch.testing.assert_close(torch.jit.script(fast)(ROWS), model(ROWS))
    guarded = optimizer.optimize(Guarded().eval(), X[0, 0], level=level)
    with pytest.raises(optimizer.InputError, match=r"use torch\.jit\.trace"):
        torch.jit.script(guarded)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_call_with_a_sparse_tensor_runs_the_portable_code(
    right_is_enough: None, layout: torch.layout
) -> None:
    """One in rows has no strides to tell calls apart by."""
    parts = {"weight": torch.ones(6, 4), "layer": nn.Linear(4, 4)}
    model = Forward("m.layer(torch.mm(x, m.weight))", **parts).eval()
    fast = optimizer.optimize(model, torch.ones(5, 6))
    x = torch.ones(5, 6).to_sparse(layout=layout)

    assert fast.meta["lowered"]
    torch.testing.assert_close(fast(x), model(x))
