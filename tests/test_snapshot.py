"""The result is a snapshot: what is written to the original later is not seen, nor in part."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Net(nn.Module):
    """A layer that is folded into, one that is kept, a weight and a buffer that are read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head, self.tail = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.randn(16))
        nn.init.normal_(self.bn.running_mean)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().mean((2, 3))
        return self.tail((self.head(x) * self.scale + self.shift).softmax(-1))


class Branching(Net):
    """Cannot be recorded, and so runs as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 100 else 1)


def train(model: nn.Module, optimizer_of: Callable[..., Any], **options: Any) -> None:
    model(X).square().mean().backward()
    optimizer_of(model.parameters(), lr=0.5, **options).step()


def write_all(write: Callable[[Tensor], object]) -> Callable[[nn.Module], object]:
    @torch.no_grad()
    def all_written(model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                write(tensor)

    return all_written


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "a step": lambda model: train(model, torch.optim.SGD),
    "a fused step": lambda model: train(model, torch.optim.AdamW, fused=True),
    "a foreach step": lambda model: train(model, torch.optim.Adam, foreach=True),
    ".data": write_all(lambda each: each.data.mul_(3)),
    "numpy": write_all(lambda each: each.numpy().fill(3)),
    "a checkpoint": lambda model: model.load_state_dict(Net(1).state_dict()),
    "statistics": lambda model: model.train()(X),
    "a cast": lambda model: model.double(),
    "swapped": write_all(lambda each: torch.utils.swap_tensors(each, each.clone().mul_(3))),
}


def call(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(X)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [Net, Branching])
def test_no_later_write_is_seen(kind: type[Net], write: str, level: int) -> None:
    model = kind()
    fast = optimizer.optimize(model, X, level=level, tune_seconds=0)
    before = call(fast)

    WRITES[write](model)

    assert torch.equal(call(fast), before)


def in_inference_mode(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return optimizer.optimize(model, X, level=1)


PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "captured": lambda model: optimizer.capture(model, X),
    "exported": lambda model: optimizer.optimize(torch.export.export(model, (X,)), level=1),
    "unchecked": lambda model: optimizer.optimize(model, X, level=1, check=None),
    "in inference mode": in_inference_mode,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", PREPARE)
def test_whatever_prepares_it(way: str) -> None:
    model = Net()
    fast = PREPARE[way](model)
    before = call(fast)

    WRITES["a fused step"](model)

    assert torch.equal(call(fast), before)
    assert not any(each.is_inference() for each in fast.state_dict().values())


def test_training_the_result_does_not_reach_the_model() -> None:
    model = Net()
    before = call(model)

    WRITES["a step"](optimizer.optimize(model, X, level=1))

    assert torch.equal(call(model), before)


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "save and load": saved_and_loaded,
}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_the_answer_and_the_report(way: str, level: int) -> None:
    """And all that was put on the result."""
    model = Net()
    if level == 1:  # at level 2 the bits of Dynamo's graph depend on where the weights lie
        model.head.register_forward_hook(doubled)
    fast: Any = optimizer.optimize(model, X, level=level, tune_seconds=0)
    fast.labels, fast.extra = ["cat", "dog"], nn.Linear(2, 2)
    fast.register_buffer("mean", torch.ones(3))
    fast.register_forward_hook(doubled)

    copied = COPIES[way](fast)

    assert type(copied).__mro__[1] is type(fast).__mro__[1]
    assert copied.report == fast.report
    assert (copied.labels, copied.mean.tolist()) == (["cat", "dog"], [1, 1, 1])
    assert torch.equal(copied.extra.weight, fast.extra.weight)
    assert torch.equal(call(copied), call(fast))
    assert set(copied.state_dict()) == set(fast.state_dict())
    copied.refit(Net(1).state_dict())
    assert not torch.equal(call(copied), call(fast))


def test_a_deep_copy_is_of_its_own() -> None:
    fast: Any = optimizer.optimize(Net(), X, level=1)
    fast.labels = ["cat"]
    before, copied = call(fast), copy.deepcopy(fast)

    copied.labels.append("dog")
    copied.register_forward_hook(doubled)
    WRITES["a step"](copied)

    assert torch.equal(call(fast), before)
    assert fast.labels == ["cat"]
