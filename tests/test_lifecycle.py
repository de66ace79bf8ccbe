"""Before, after and around `optimize`: the caller's model, later calls, copies, threads, faults."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from tests.conftest import address
from tests.repository import table
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def small() -> Any:
    """A foldable pair, a layer that no rewrite replaces, and a hook."""
    torch.manual_seed(3)
    layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "head": nn.Conv2d(4, 2, 1)}
    model = Forward("m.head(torch.relu(m.bn(m.conv(x))))", **layers)
    model.head.register_forward_hook(lambda module, inputs, result: result * 2)
    model.conv.bias.requires_grad_(False)
    nn.init.normal_(model.bn.running_mean)
    return model.eval()


def state_of(model: nn.Module) -> list[object]:
    """Everything that a caller could see change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(n, id(t), address(t), t.dtype, t.requires_grad, t.tolist()) for n, t in tensors],
        [(n, id(m), m.training, list(m._forward_hooks)) for n, m in model.named_modules()],
    ]


THINGS_TO_DO: dict[str, Callable[[nn.Module], object]] = {
    "nothing more": lambda fast: fast,
    "a cast": lambda fast: fast.double(),
    "to": lambda fast: fast.to(torch.bfloat16),
    "train": lambda fast: fast.train(),
    "eval": lambda fast: fast.eval(),
    "requires_grad_": lambda fast: fast.requires_grad_(False),
}


@pytest.mark.parametrize("thing", THINGS_TO_DO)
@pytest.mark.parametrize("check", ["final", "each", None])
def test_the_callers_model_is_not_touched(thing: str, check: Any) -> None:
    model = small()
    before, random_state = state_of(model), torch.get_rng_state()

    THINGS_TO_DO[thing](optimizer.optimize(model, X, check=check, level=1))

    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_parameters_that_no_rewrite_replaced_take_no_memory_of_their_own() -> None:
    model = small()

    fast: Any = optimizer.optimize(model, X, level=1)

    assert fast.report.counts()["fold_affine"] == 1
    assert address(fast.head.weight) == address(model.head.weight)
    assert address(fast.head.bias) == address(model.head.bias)


def adds(model: Any) -> None:
    model.calls += 1  # which also sets the attribute


@pytest.mark.parametrize("count", [adds, lambda model: model.calls.add_(1)])
@pytest.mark.parametrize("check", ["final", "each", None])
def test_a_buffer_is_written_in_the_optimized_modules_own_copy(count: Any, check: Any) -> None:
    model = Forward(lambda m, x: (count(m), x * m.calls)[1], calls=torch.zeros(())).eval()

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert [torch.equal(fast(X), X * count) for count in (1, 2, 3)] == [True] * 3
    assert (model.calls, *fast.buffers()) == (0, 3)


class Fills(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + torch.zeros(x.shape)


@pytest.mark.parametrize("make", [optimizer.capture, optimizer.optimize])
def test_a_pickle_with_a_factory_in_it_leaves_fx_as_it_was(make: Any) -> None:
    copied = pickle.loads(pickle.dumps(make(Fills().eval())))

    assert torch.equal(fx.symbolic_trace(copied)(-torch.ones(2)), torch.zeros(2))


def test_the_same_model_gives_the_same_code() -> None:
    first, second = (optimizer.optimize(small(), X, level=1) for _ in range(2))

    assert first.code == second.code


def test_models_can_be_optimized_from_threads_while_others_run() -> None:
    model = small()
    with torch.no_grad():
        expected = model(X)
    acts = [lambda: optimizer.optimize(model, X, level=1)(X)] * 2 + [lambda: model(X)]

    def ten_times(act: Callable[[], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [act() for _ in range(10)]

    with ThreadPoolExecutor(len(acts)) as pool:
        results = [result for each in pool.map(ten_times, acts) for result in each]

    assert len(results) == 30
    for result in results:
        torch.testing.assert_close(result, expected)


class Optional(nn.Module):
    """Three arguments that choose what is computed."""

    def forward(self, x: Tensor, y: Tensor | None = None, twice: bool = False) -> Tensor:
        result = x if y is None else x + y
        return result * 2 if twice else torch.relu(result)


@table(
    "given other",
    ({"x": X}, {"x": X, "y": X}),
    ({"x": X}, {"x": X, "twice": True}),
    ({"x": X, "twice": True}, {"x": X}),
    ({"y": X, "x": X + 1}, {"y": None, "x": X}),
)
def test_an_argument_that_chose_a_branch_is_guarded(given: Any, other: Any) -> None:
    """Inputs by keyword are a mapping."""
    model = Optional().eval()

    fast = optimizer.optimize(model, given, level=1)
    later = given | {"x": X * 3}

    assert torch.equal(fast(**later), model(**later))
    with pytest.raises(InputError, match="this model was optimized for"):
        fast(**other)


def test_a_rank_that_a_rewrite_relied_on_is_guarded() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).eval()
    fast = optimizer.optimize(model, torch.randn(3, 5), level=1)

    with pytest.raises(InputError, match="of 2 dimensions and got 3"):
        fast(torch.randn(2, 4, 5))

    assert fast.report.counts() == {"fold_affine": 1}


LATER_INPUTS = {
    "another batch": torch.randn(7, 3, 6, 6),
    "another size": torch.randn(1, 3, 9, 5),
    "an empty batch": torch.randn(0, 3, 6, 6),
    "channels last": X.to(memory_format=torch.channels_last),
    "strided": torch.randn(2, 3, 12, 12)[:, :, ::2, ::2],
    "expanded": torch.randn(1, 3, 6, 6).expand(4, -1, -1, -1),
}


@pytest.mark.parametrize("kind", LATER_INPUTS)
def test_later_inputs_may_be(kind: str) -> None:
    model, x = small(), LATER_INPUTS[kind]

    with torch.no_grad():
        late = optimizer.optimize(model, X, level=1)(x)
        early = optimizer.optimize(model, x, level=1)(x)
        expected = model(x)

    for result in (late, early):
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


def raising(**captured: object) -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("check", ["final", "each"])
@table("apply words", (raising, "a bug"), (lambda affine: affine.args[0], "changed"))
def test_a_faulty_pass_is_rolled_back_and_named(
    check: Any, apply: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("check", ["final", "each"])
def test_a_wrong_capture_is_not_used(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture_another(model: nn.Module, call: Any) -> Any:
        return optimizer.capture(nn.Sequential(nn.Tanh()), call.args)

    monkeypatch.setattr("optimizer._optimize.capture_call", capture_another)
    model = nn.ReLU().eval()

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert torch.equal(fast(X), F.relu(X))
    [remark] = fast.report.remarks
    assert "the captured graph gives another answer" in remark


def test_torch_keeps_nothing_of_the_first_model() -> None:
    """Its lists of functions are made once, in the first trace if not before."""
    program = (
        "import gc, torch, optimizer\n"
        "linear = torch.nn.Linear(3, 4)\n"
        "optimizer.optimize(linear, torch.ones(2, 3))\n"
        "del linear\n"
        "gc.collect()\n"
        "print([each.shape for each in gc.get_objects() if type(each) is torch.nn.Parameter])\n"
        "print(torch.is_tensor in torch.overrides.get_ignored_functions())"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)

    assert ended.stdout.split() == ["[]", "True"]


def test_no_other_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.mps, "manual_seed", seeded.append)

    optimizer.optimize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.ones(1, 2), level=2)

    assert seeded == []
