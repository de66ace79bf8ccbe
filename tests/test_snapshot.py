"""The result is a snapshot: what is written to the original later is not seen, nor in part."""

from __future__ import annotations

import copy
import pickle
import threading
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


@torch.no_grad()
def write_all(model: nn.Module, write: Callable[[Tensor], object]) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            write(tensor)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "a step": lambda model: train(model, torch.optim.SGD),
    "a fused step": lambda model: train(model, torch.optim.AdamW, fused=True),
    "a foreach step": lambda model: train(model, torch.optim.Adam, foreach=True),
    ".data": lambda model: write_all(model, lambda each: each.data.mul_(3)),
    "numpy": lambda model: write_all(model, lambda each: each.numpy().fill(3)),
    "a checkpoint": lambda model: model.load_state_dict(Net(1).state_dict()),
    "statistics": lambda model: model.train()(X),
    "a cast": lambda model: model.double(),
    "swapped": lambda model: write_all(
        model, lambda each: torch.utils.swap_tensors(each, each.clone().mul_(3))
    ),
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


def captured(model: nn.Module) -> nn.Module:
    return optimizer.capture(model, X)


def exported(model: nn.Module) -> nn.Module:
    return optimizer.optimize(torch.export.export(model, (X,)), level=1)


def without_check(model: nn.Module) -> nn.Module:
    return optimizer.optimize(model, X, level=1, check=None)


def in_inference_mode(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return optimizer.optimize(model, X, level=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("prepare", [captured, exported, without_check, in_inference_mode])
def test_whatever_prepares_it(prepare: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    fast = prepare(model)
    before = call(fast)

    WRITES["a fused step"](model)

    assert torch.equal(call(fast), before)
    assert not any(each.is_inference() for each in fast.state_dict().values())


def test_a_numpy_array_taken_before_still_writes_the_model_and_not_the_result() -> None:
    model = Net()
    array = model.head.weight.detach().numpy()
    fast = optimizer.optimize(model, X, level=1)
    before, theirs = call(fast), call(model)

    array *= 2

    assert torch.equal(call(fast), before)
    assert not torch.equal(call(model), theirs)


@pytest.mark.parametrize("level", [1, 2])
def test_refit_takes_what_was_written(level: int) -> None:
    model = Net()
    fast = optimizer.optimize(model, X, level=level, tune_seconds=0)
    WRITES["a fused step"](model)

    fast.refit(model.eval().state_dict())

    torch.testing.assert_close(call(fast), call(model))


def test_training_the_result_does_not_reach_the_model() -> None:
    model = Net()
    before = call(model)

    WRITES["a step"](optimizer.optimize(model, X, level=1))

    assert torch.equal(call(model), before)


def test_threads_may_call_the_model_while_it_is_optimized() -> None:
    """An LSTM asks for its weights as if to write them: threads would copy them at once."""
    model = nn.Sequential(nn.LSTM(8, 8, 2)).eval()
    x = torch.randn(5, 1, 8)
    expected, wrong = model(x)[0], list[int]()

    def work() -> None:
        wrong.append(sum(not torch.equal(model(x)[0], expected) for _ in range(20)))

    kept = []
    for _ in range(5):
        kept.append(optimizer.optimize(model, x, level=1, check=None))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert wrong == [0] * 20
    assert len(kept) == 5


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))]
)
def test_a_copy_has_all_that_was_put_on_the_result(way: Callable[[Any], Any], level: int) -> None:
    fast: Any = optimizer.optimize(Net(), X, level=level, tune_seconds=0)
    fast.labels, fast.extra = ["cat", "dog"], nn.Linear(2, 2)
    fast.register_buffer("mean", torch.ones(3))
    fast.register_forward_hook(doubled)

    copied = way(fast)

    assert type(copied).__mro__[1] is type(fast).__mro__[1]
    assert str(copied.report) == str(fast.report)
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
