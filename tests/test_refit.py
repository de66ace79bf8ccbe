"""Another checkpoint: `refit` takes one of the original, `load_state_dict` only its own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import InputError

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


class Tied(nn.Module):
    """A fold, a weight under two names, a mask that no checkpoint holds, a view of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.bn = nn.BatchNorm2d(3)
        self.other = nn.Conv2d(3, 3, 1)
        self.other.weight = self.conv.weight
        self.register_buffer("mask", torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1), persistent=False)
        self.register_buffer("shift", torch.randn(2, 3, 1, 1))
        self.first = self.shift[0]
        self.head = nn.Sequential(nn.Identity(), nn.Conv2d(3, 2, 1))
        nn.init.normal_(self.bn.running_mean)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(torch.relu(self.bn(self.conv(x)))) * self.mask + self.first
        return self.head(x) + self.shift[1, :2]


class Branching(nn.Module):
    """What cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(x) * 2


class Nothing(nn.Module):
    """No weights, and an argument that chooses a branch."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return torch.relu(nn.functional.dropout(x * 2 if twice else x, training=self.training))


def seeded(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind().eval()


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 2), nn.Linear(6, 5), nn.ReLU(), nn.LSTM(5, 4))


KINDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "ties and views": (Tied, X),
    "a recurrent net": (recurrent, X),
    "an unrecordable one": (Branching, X),
    "no weights": (Nothing, {"x": X, "twice": True}),
}


def call(model: nn.Module, inputs: Any) -> Any:
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)


COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda fast, inputs: fast,
    "a deepcopy": lambda fast, inputs: copy.deepcopy(fast),
    "a pickled one": lambda fast, inputs: pickle.loads(pickle.dumps(fast)),
    "optimized twice": optimizer.optimize,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_refit_gives_the_answers_of_the_new_checkpoint(kind: str, way: str) -> None:
    make, inputs = KINDS[kind]
    old, new = seeded(make, 0), seeded(make, 1)
    before = copy.deepcopy(old.state_dict())
    fast = COPIES[way](optimizer.optimize(old, inputs, level=1), inputs)

    assert fast.refit(new.state_dict()) is fast

    torch.testing.assert_close(call(fast, inputs), call(new, inputs))
    for name, tensor in old.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_refitted_model_is_as_if_optimized_from_the_start() -> None:
    old, new = seeded(Tied, 0), seeded(Tied, 1)
    fast, expected = optimizer.optimize(old, X, level=1), optimizer.optimize(new, X, level=1)

    fast.refit(new.state_dict(), X)

    assert fast.code == expected.code
    assert fast.report.fired == expected.report.fired
    assert fast.report.checked == "final"
    for name, tensor in expected.state_dict().items():
        assert torch.equal(fast.state_dict()[name], tensor)


def test_a_pass_from_elsewhere_runs_again() -> None:
    [fold] = [each for each in optimizer.all_passes() if each.name == "fold_affine"]
    old, new = seeded(Tied, 0), seeded(Tied, 1)
    fast = optimizer.optimize(old, X, only=[dataclasses.replace(fold, name="mine")], level=1)

    fast.refit(new.state_dict())

    assert set(fast.report.counts()) == {"mine"}
    torch.testing.assert_close(call(fast, X), call(new, X))


def test_what_is_kept_for_it_holds_no_weights() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).eval()
    fast = optimizer.optimize(model, torch.randn(2, 512), level=1)

    assert len(pickle.dumps(fast)) < 1.1 * fast.report.after.bytes


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [Tied, Branching])
def test_load_state_dict_refuses_a_checkpoint_of_the_original(kind: Any, strict: bool) -> None:
    old, new = seeded(kind, 0), seeded(kind, 1)
    fast = optimizer.optimize(old, X, level=1)
    before = copy.deepcopy(fast.state_dict())

    for holder, prefix in ((fast, ""), (nn.Sequential(fast), "0.")):
        checkpoint = {prefix + name: tensor for name, tensor in new.state_dict().items()}
        with pytest.raises(InputError, match=r"refit\(state_dict\)"):
            holder.load_state_dict(checkpoint, strict=strict)

    assert all(torch.equal(fast.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", [Tied, Branching])
def test_load_state_dict_takes_its_own_checkpoint(kind: Any) -> None:
    fast, other = (optimizer.optimize(seeded(kind, seed), X, level=1) for seed in (0, 1))

    nn.Sequential(fast).load_state_dict(nn.Sequential(other).state_dict())

    assert torch.equal(call(fast, X), call(other, X))


@pytest.mark.parametrize("checkpoint", [{}, {"other": X}, 3])
def test_refit_refuses_another_models_checkpoint(checkpoint: Any) -> None:
    fast = optimizer.optimize(seeded(Tied, 0), X, level=1)
    before = call(fast, X)

    with pytest.raises(InputError, match="pass a checkpoint of the original model: "):
        fast.refit(checkpoint)

    assert torch.equal(call(fast, X), before)


def test_a_loaded_model_without_the_originals_code_says_what_to_do() -> None:
    class Local(nn.Sequential):
        """Cannot be pickled."""

    fast = optimizer.optimize(Local(nn.Linear(6, 4), nn.Identity()).eval(), X, level=1)
    again = pickle.loads(pickle.dumps(fast))

    assert torch.equal(again(X), fast(X))
    with pytest.raises(InputError, match="optimize it again"):
        again.refit({})
