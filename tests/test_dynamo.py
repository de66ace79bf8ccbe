"""torch.compile(model, backend="optimizer"): the same answers, also when weights change."""

from __future__ import annotations

import copy
import gc
import logging
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from tests.internals import backend
from tests.single_pass import Forward, rows
from tests.test_programs import assert_equal

# Importing Dynamo and compiling warn of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

assert_same = partial(assert_equal, rtol=1e-4, atol=1e-4)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture(autouse=True)
def folds(caplog):
    """How many BatchNorms were folded, for each graph that was optimized."""

    def counted():
        told: list[Any] = [each.args[0] for each in caplog.records if each.args]
        reports = [each for each in told if hasattr(each, "front_end")]
        return [each.counts().get("fold_affine", 0) for each in reports]

    caplog.set_level(logging.INFO, "optimizer")
    torch._dynamo.reset()
    with torch.no_grad():
        yield counted
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        nn.init.normal_(self.bn.running_mean)
        nn.init.normal_(self.bn.weight)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Broken(Block):
    """A branch on data, which breaks the graph, optional and nested arguments, a dict."""

    def forward(self, x: Any, y: Any = None, *, scale: float = 1.0) -> Any:
        first = super().forward(x["image"])
        if first.sum() > 0:
            first = first + (0 if y is None else y)
        return {"first": first * scale, "second": [super().forward(first), x]}


def compiled(model, **options):
    return torch.compile(model, backend=backend, options=options or None)


def graph_of(model, *args):
    """What Dynamo gives to a backend."""
    given = []
    torch.compile(model, backend=lambda *graph: given.append(graph) or graph[0].forward)(*args)
    return given[0]


def test_the_entry_point_names_the_backend():
    written = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

    backends = written["project"]["entry-points"]["torch_dynamo_backends"]
    assert backends == {"optimizer": f"{backend.__module__}:{backend.__name__}"}


def around(text):
    return Forward(text, block=Block(), count=torch.zeros(())).eval()


def of(size, **more):
    return {"x": {"image": IMAGES[..., :size]}, **more}


NESTED = of(8), of(8, y=torch.ones(2, 3, 8, 8), scale=2.0), of(6), of(6, y=torch.ones(2, 3, 8, 6))
COUNTED = "m.count += 1; return m.block(x) * m.count"
CASTING = "\n with torch.autocast('cpu', torch.bfloat16): return m.block(x)"
BATCHES = [{"x": torch.randn(size, 3, 8, 8)} for size in (2, 1, 5)]


@rows(
    "model options calls folded",
    {
        "a graph break and nested arguments": (Broken(), {}, NESTED, {1, 2}),
        "any batch": (Block(), {}, BATCHES, {1}),
        "any batch, exactly": (Block(), {"level": 0}, BATCHES, {0}),
        "a buffer that counts": (around(COUNTED), {}, BATCHES, {1}),
        "in training": (around(COUNTED).train(), {}, BATCHES, {0}),
        "autocast inside, without a check": (around(CASTING), {"check": None}, BATCHES, {0}),
    },
)
@torch.inference_mode()
def test_the_answers_are_those_of_eager(model, options, calls, folded, folds):
    eager, fast = copy.deepcopy(model), compiled(model, **options)

    for call in calls:
        expected, actual = eager(**call), fast(**call)
        assert_same(expected, actual)
        assert options != {"level": 0} or torch.equal(actual, expected)
    assert_same(eager.state_dict(), model.state_dict())
    assert {*folds()} <= folded
    assert folds()


def by_a_fused_step(model):
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    torch.optim.AdamW(model.parameters(), lr=1.0, fused=True).step()


CHANGES = {
    "a statistic": lambda model: model.bn.running_mean.add_(1),
    "another parameter": lambda model: setattr(model.bn, "weight", nn.Parameter(torch.ones(3))),
    "other data": lambda model: setattr(model.conv.weight, "data", torch.ones(3, 3, 3, 3)),
    "by numpy": lambda model: np.negative(model.conv.weight.numpy(), model.conv.weight.numpy()),
    "a fused optimizer": by_a_fused_step,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_folded_again(change, folds):
    model = Block()
    fast = compiled(model)
    for _ in range(2):
        before = fast(IMAGES)
        CHANGES[change](model)

        assert not torch.equal(model(IMAGES), before) or change == "another parameter"
        assert_same(model(IMAGES), fast(IMAGES))
        assert_same(model(IMAGES), fast(IMAGES))
    assert 1 in folds()
    assert len(folds()) <= 3  # not at each call


@rows("freeze", {"seen": (False,), "frozen": (True,)})
def test_weights_that_a_numpy_array_may_write_are_folded_only_if_frozen(freeze, folds):
    model = Block()
    held, fast = np.from_dlpack(model.conv.weight.detach()), compiled(model, freeze=freeze)
    before = fast(IMAGES)

    held *= 2

    assert_same(before if freeze else model(IMAGES), fast(IMAGES))
    assert folds() == [int(freeze)]


WRONG = {
    "freeze": ({"freeze": "yes"}, "freeze is 'yes': pass True or False"),
    "level": ({"level": 3}, "use 0, 1 or 2"),
    "none": ({"levle": 0}, "InputError: no option .*levle"),
}


@rows("options reason", WRONG)
def test_an_option_that_cannot_be_is_an_input_error(options, reason):
    with pytest.raises(BackendCompilerFailed, match=reason):
        compiled(Block(), **options)(IMAGES)


def test_weights_that_are_freed_are_not_taken_for_those_in_their_place():
    module, examples = graph_of(nn.Linear(8, 8, bias=False), torch.ones(1, 8))
    place = next(i for i, each in enumerate(examples) if isinstance(each, nn.Parameter))
    fast, args = backend(module, examples, options={"freeze": True}), [*examples]
    args[place] = nn.Parameter(torch.rand(8, 8))
    fast(*args)
    freed, data, others = id(args[place]), torch.rand(8, 8), list[Any]()

    args[place] = None
    gc.collect()  # a cycle may hold it
    while id(args[place]) != freed and len(others) < 10_000:
        others.append(args[place])
        args[place] = nn.Parameter(data)

    assert id(args[place]) == freed
    assert_same(module(*args), fast(*args))


def test_while_all_modules_have_hooks_none_sees_a_layer_of_the_optimizers():
    model, seen = Block(), list[type]()
    module, examples = graph_of(model, IMAGES)
    fast = backend(module, examples)
    fast(*examples)

    with register_module_forward_hook(lambda layer, *_: seen.append(type(layer))):
        assert_same(model(IMAGES), fast(*examples)[0])

    assert seen == [nn.Conv2d, nn.BatchNorm2d, Block]


def test_modules_that_share_one_graph_have_their_own_weights(folds):
    blocks = [Block(seed) for seed in range(3)]
    fast = [*map(compiled, blocks)]

    for _ in range(2):
        for block, each in zip(blocks, fast, strict=True):
            assert_same(block(IMAGES), each(IMAGES))
    assert folds() == [1, 1, 1]


def test_gradients_are_not_lost(folds):
    model = Block()
    fast = compiled(model)

    with torch.enable_grad(), pytest.warns(UserWarning, match=r"torch\.no_grad"):
        fast(IMAGES).sum().backward()

    assert model.conv.weight.grad is not None
    assert folds() == []
