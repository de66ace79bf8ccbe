"""torch.compile(model, backend="optimizer"): the same answers, also when weights change."""

from __future__ import annotations

import copy
import gc
import logging
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import models
from optimizer._dynamo import backend

# Importing Dynamo and compiling warn of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.fixture(autouse=True)
def fresh_dynamo(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "optimizer")
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def folds(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many BatchNorms were folded, for each graph that was optimized."""
    reports: list[Any] = [r.args[0] for r in caplog.records if isinstance(r.args, tuple) and r.args]
    named = [report for report in reports if hasattr(report, "front_end")]
    assert all(report.front_end == "dynamo" for report in named), list(map(str, named))
    return [report.counts().get("fold_affine", 0) for report in named]


def assert_same(expected: Any, actual: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert spec == new_spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        nn.init.normal_(self.bn.running_mean)
        nn.init.normal_(self.bn.weight)
        self.register_buffer("count", torch.zeros(()))
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


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]

    assert project["entry-points"]["torch_dynamo_backends"] == {
        "optimizer": f"{backend.__module__}:{backend.__name__}"
    }


def test_resnet18_folds(caplog: pytest.LogCaptureFixture) -> None:
    workload = models.load("resnet18")
    x = torch.randn(1, 3, 64, 64)

    fast = torch.compile(workload.module, backend=backend)

    assert_same(workload.module(x), fast(x))
    assert folds(caplog) == [20]


def test_a_graph_break_between_optional_and_nested_arguments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Broken()
    fast = torch.compile(model, backend=backend)

    for size in (8, 6):
        image = {"image": IMAGES[..., :size]}
        assert_same(model(image), fast(image))
        y = torch.ones(2, 3, 8, size)
        assert_same(model(image, y=y, scale=2.0), fast(image, y=y, scale=2.0))
    assert sum(folds(caplog)) >= 2


def test_raft_which_symbolic_tracing_cannot_trace(caplog: pytest.LogCaptureFixture) -> None:
    models.load("resnet18")  # torchvision, also where its operators do not load
    from torchvision.models.optical_flow import raft_small

    torch.manual_seed(0)
    model = raft_small(weights=None).eval()
    one, other = torch.rand(2, 1, 3, 128, 128)

    fast = torch.compile(model, backend=backend)

    assert_same(model(one, other, num_flow_updates=2), fast(one, other, num_flow_updates=2))
    assert folds(caplog) != []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.conv.weight.mul_(2),
        lambda m: m.bn.running_mean.add_(1),
        lambda m: m.load_state_dict(Block(5).state_dict()),
        lambda m: setattr(m.bn, "weight", nn.Parameter(torch.ones(3))),
        lambda m: setattr(m.conv.weight, "data", torch.ones(3, 3, 3, 3)),
    ],
    ids=["weight", "statistic", "checkpoint", "parameter", "data"],
)
def test_changed_weights_are_folded_again(change: Callable[[Any], object]) -> None:
    model = Block()
    fast = torch.compile(model, backend=backend)
    before = fast(IMAGES)

    change(model)

    assert not torch.equal(model(IMAGES), before)
    assert_same(model(IMAGES), fast(IMAGES))


def test_memory_of_earlier_weights_is_not_taken_for_them() -> None:
    model = Block()
    fast = torch.compile(model, backend=backend)
    fast(IMAGES)
    memory = StorageWeakRef(model.conv.weight.untyped_storage())

    model.conv.weight.data = Block(5).conv.weight.detach()
    gc.collect()

    assert not memory.expired()  # or the next weights might lie there, and pass for these
    assert_same(model(IMAGES), fast(IMAGES))


def test_modules_that_share_one_graph_have_their_own_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = [Block(seed) for seed in range(3)]
    fast = [torch.compile(block, backend=backend) for block in blocks]

    for _ in range(2):
        for block, compiled in zip(blocks, fast, strict=True):
            assert_same(block(IMAGES), compiled(IMAGES))
    assert folds(caplog) == [1, 1, 1]


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


@pytest.mark.parametrize("training", [False, True])
def test_buffers_are_written_as_in_eager(training: bool) -> None:
    model = Counting().train(training)
    eager = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend)

    for _ in range(3):
        assert_same(eager(IMAGES), fast(IMAGES))
    assert_same(eager.state_dict(), model.state_dict())


def test_any_batch(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    fast = torch.compile(model, backend=backend)

    for rows in (2, 1, 5, 7):
        x = torch.randn(rows, 3, 8, 8)
        assert_same(model(x), fast(x))
    assert set(folds(caplog)) == {1}


def test_in_inference_mode() -> None:
    model = Block()
    fast = torch.compile(model, backend=backend)

    with torch.inference_mode():
        assert_same(model(IMAGES), fast(IMAGES))


def test_gradients_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    fast = torch.compile(model, backend=backend)

    with torch.enable_grad(), pytest.warns(UserWarning, match=r"torch\.no_grad"):
        fast(IMAGES).sum().backward()

    assert model.conv.weight.grad is not None
    assert folds(caplog) == []


def without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = model.conv(x)
    return x.float()


def test_a_mode_inside_the_graph_is_left_alone() -> None:
    model = Block()
    fast = torch.compile(without_gradients, backend=backend)

    assert torch.equal(without_gradients(model, IMAGES), fast(model, IMAGES))


def test_options(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    fast = torch.compile(model, backend=backend, options={"level": 0})

    assert torch.equal(model(IMAGES), fast(IMAGES))
    assert folds(caplog) == [0]


def test_an_activation_whose_inplace_has_no_name_is_optimized() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5)).eval(), torch.randn(2, 3)
    compiled = torch.compile(model, backend=backend)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), model(x))
