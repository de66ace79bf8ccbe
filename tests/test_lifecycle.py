"""Before, after and around `optimize`: the caller's model, later calls, threads, faults.

And what else takes the result: fx, torch.export, torch.compile, ONNX, another optimize.
"""

from __future__ import annotations

import dataclasses
import operator
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.testing import untouched
from tests.repository import table
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def small():
    """A foldable pair, a layer that no rewrite replaces, and a hook."""
    torch.manual_seed(3)
    layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "head": nn.Conv2d(4, 2, 1)}
    model = Forward("m.head(torch.relu(m.bn(m.conv(x))))", **layers)
    model.head.register_forward_hook(lambda module, inputs, result: result * 2)
    model.conv.bias.requires_grad_(False)
    nn.init.normal_(model.bn.running_mean)
    return model.eval()


@pytest.mark.parametrize("check", ["final", "each", None])
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


LATER_INPUTS = {
    "another batch": torch.randn(7, 3, 6, 6),
    "an empty batch": torch.randn(0, 3, 6, 6),
    "channels last": X.to(memory_format=torch.channels_last),
    "strided": torch.randn(2, 3, 12, 12)[:, :, ::2, ::2],
}


@pytest.mark.parametrize("kind", LATER_INPUTS)
def test_later_inputs_may_be(kind):
    model, x = small(), LATER_INPUTS[kind]
    expected = call_of(model, x)

    for example in (X, x):
        result = call_of(optimizer.optimize(model, example, level=1), x)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


def raising(**captured):
    raise RuntimeError("a bug")


@pytest.mark.parametrize("check", ["final", "each"])
@table("apply words", (raising, "a bug"), (lambda affine: affine.args[0], "changed"))
def test_a_faulty_pass_is_rolled_back_and_named(check, apply, words, monkeypatch):
    every = [
        dataclasses.replace(each, apply=apply) if each.name == "fold_affine" else each
        for each in optimizer.all_passes()
    ]
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: tuple(every))
    model = nn.Sequential(small(), nn.Dropout(), nn.Flatten(), nn.Linear(32, 2), nn.ReLU()).eval()

    with pytest.warns(UserWarning, match="fold_affine") as caught:
        fast = optimizer.optimize(model, X, check=check, level=1)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(fast(X), model(X))
    fired = {"remove_identities": 1, "fuse_linear_relu": 1, "reuse_activations": 1}
    assert fast.report.counts() == fired
    remark, _ = fast.report.remarks  # the other speaks of the hook
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
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)

    assert ended.stdout.split() == ["[]", "True"]


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


def compiled(fast, inputs):
    torch._dynamo.reset()
    return torch.compile(fast, backend="eager", fullgraph=True)


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


ELSEWHERE = {
    "symbolic_trace": traced,
    "export": lambda fast, inputs: torch.export.export(fast, inputs).module(),
    "ONNX": in_onnx,
    "compile": compiled,
    "Transformer": lambda fast, inputs: fx.Transformer(fast).transform(),
    "Interpreter": lambda fast, inputs: fx.Interpreter(fast).run,
    "optimize": lambda fast, inputs: optimizer.optimize(fast, inputs, level=1),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_the_result_gives_the_same_answers_through(where, optimized):
    model, fast, inputs = optimized

    through = ELSEWHERE[where](fast, inputs)

    torch.testing.assert_close(call_of(through, *inputs), call_of(model, *inputs))


def test_to_optimize_again_changes_nothing(optimized):
    _, fast, inputs = optimized

    again = optimizer.optimize(fast, inputs, level=1)

    assert (again.report.fired, again.code) == ((), fast.code)


def test_the_same_model_gives_the_same_code():
    first, second = (optimizer.optimize(small(), X, level=1) for _ in range(2))

    assert first.code == second.code


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_call_with_a_sparse_tensor_runs_the_portable_code(
    right_is_enough: None, layout: torch.layout
) -> None:
    """One in rows has no strides to tell calls apart by."""
    parts = {"weight": torch.ones(6, 4), "layer": nn.Linear(4, 4)}
    model: Any = Forward("m.layer(torch.mm(x, m.weight))", **parts).eval()
    fast: Any = optimizer.optimize(model, torch.ones(5, 6))
    x = torch.ones(5, 6).to_sparse(layout=layout)

    assert fast.meta["lowered"]
    torch.testing.assert_close(fast(x), model(x))
