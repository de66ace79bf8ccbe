"""What else takes the result: fx, torch.export, torch.compile, ONNX, another optimize, threads."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import models
import optimizer
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


class Guarded(nn.Sequential):
    """A rank that a fold relies on, and a flag that chooses a branch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return super().forward(x) * 2 if twice else super().forward(x)


def masking() -> nn.Module:
    """Views, transposes, a dead branch, a write under a mask and a counter in a buffer."""

    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        torch.exp(x)
        y = x.transpose(1, 2).permute(0, 2, 1, 3) * 2
        y[y > 0.5] = 0.0
        m.calls.add_(1)
        return {"y": y.mT, "x": x}

    return Forward(forward, calls=torch.zeros(()))


def conv_net() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 5), nn.ReLU())


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "convolutions": (conv_net, (X,)),
    "guards": (Guarded, (X[0, 0],)),
    "a flag that is set": (Guarded, (X[0, 0], True)),
    "writes and views": (masking, (X,)),
}


@pytest.fixture(params=NETS)
def optimized(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A model, the same optimized, and its inputs."""
    make, inputs = NETS[request.param]
    torch.manual_seed(5)
    model = make().eval()
    fast = optimizer.optimize(model, inputs, level=1)
    assert fast.report.fired
    return model, fast, inputs


def traced(fast: Any, inputs: Any) -> Any:
    if any(node.target is operator.setitem for node in fast.graph.nodes):
        with pytest.raises(TypeError, match="item assignment"):  # which fx cannot record
            fx.symbolic_trace(fast)
        return optimizer.capture(fast)
    return fx.symbolic_trace(fast)


def compiled(fast: Any, inputs: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fast, backend="eager", **options)


def in_onnx(fast: Any, inputs: Any) -> Any:
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

    def run(*given: Any) -> Any:
        arrays = [each.numpy() for each in given if isinstance(each, Tensor)]
        values = ReferenceEvaluator(proto).run(None, dict(zip(names, arrays, strict=True)))
        outputs = map(torch.from_numpy, values[: structure.num_leaves])
        return pytree.tree_unflatten(outputs, structure)

    return run


ELSEWHERE: dict[str, Callable[[Any, Any], Any]] = {
    "symbolic_trace": traced,
    "capture": lambda fast, inputs: optimizer.capture(fast),
    "export": lambda fast, inputs: torch.export.export(fast, inputs).module(),
    "ONNX": in_onnx,
    "compile": compiled,
    "compile the whole graph": partial(compiled, fullgraph=True),
    "Transformer": lambda fast, inputs: fx.Transformer(fast).transform(),
    "Interpreter": lambda fast, inputs: fx.Interpreter(fast).run,
    "optimize": lambda fast, inputs: optimizer.optimize(fast, inputs, level=1),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_the_result_gives_the_same_answers_through(where: str, optimized: Any) -> None:
    model, fast, inputs = optimized

    through = ELSEWHERE[where](fast, inputs)

    torch.testing.assert_close(call_of(through, *inputs), call_of(model, *inputs))


def test_to_optimize_again_changes_nothing(optimized: Any) -> None:
    _, fast, inputs = optimized

    again = optimizer.optimize(fast, inputs, level=1)

    assert (again.report.fired, again.code) == ((), fast.code)


NAMES = ("toy_model", "masked_assign", "resnet18", "shufflenet_v2_x1_0", "vit_b_16", "swin_t")


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_gives_the_same_code_each_time_and_from_two_threads(name: str) -> None:
    workload = models.load(name)

    def code(_: int) -> tuple[str, str]:
        make = partial(optimizer.optimize, check=None, level=1)
        fast = make(workload.module, workload.example_inputs)
        return fast.code, make(fast, workload.example_inputs).code

    with ThreadPoolExecutor(2) as pool:
        [(once, twice)] = {*pool.map(code, range(2)), code(0)}

    assert once == twice
