"""What capture holds a recorded model to, and what of a model it leaves alone."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import Forward, ForwardOfTwo

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


def model_of(text: str, **held: Any) -> Any:
    """A linear layer, a parameter and a buffer in an expression."""
    members = {"linear": nn.Linear(4, 4), "scale": nn.Parameter(torch.full((4,), 2.0))}
    return Forward(text, **members, flag=torch.ones(4), **held).eval()


@pytest.mark.parametrize("check", ["final", "each", None])
def test_a_parameter_that_is_written_is_not_the_callers(check: Any) -> None:
    model = model_of("x * m.scale.mul_(2)").requires_grad_(False)

    fast = optimizer.optimize(model, ROWS, check=check, level=1)
    results = [fast(ROWS), fast(ROWS)]

    assert torch.equal(model.scale, torch.full((4,), 2.0))
    assert torch.equal(results[0], ROWS * 4)
    assert torch.equal(results[1], ROWS * 8)


def test_a_batch_norm_function_keeps_to_the_rank_it_was_captured_with() -> None:
    model = model_of("F.batch_norm(x, m.flag, m.var)", var=torch.full((4,), 2.0))

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    torch.testing.assert_close(fast(ROWS[:2]), model(ROWS[:2]))
    with pytest.raises(optimizer.InputError, match="2 dimensions and got 4"):
        fast(torch.ones(2, 4, 3, 3))


@pytest.mark.parametrize(("flag", "other"), [(True, 1), (False, 0), (None, False)])
def test_an_equal_argument_of_another_type_is_another_argument(flag: Any, other: Any) -> None:
    model = ForwardOfTwo("x * 2 if z is None or z is True else x * 3").eval()
    fast = optimizer.optimize(model, (ROWS, flag), check=None, level=1)

    assert torch.equal(fast(ROWS, flag), model(ROWS, flag))
    with pytest.raises(optimizer.InputError, match=f"optimized for z={flag}"):
        fast(ROWS, other)


def test_other_threads_do_not_notice_that_a_model_is_traced() -> None:
    seen, tracing = list[bool](), Event()
    other = nn.Linear(4, 4)

    def look() -> None:
        while tracing.is_set():
            seen.append(all_tensors(other(ROWS), other.weight, torch.zeros(4)))

    thread = Thread(target=look)
    tracing.set()
    thread.start()
    for _ in range(20):
        optimizer.capture(model_of("torch.zeros(4).add_(x[0])"), ROWS)
    tracing.clear()
    thread.join()

    assert len(seen) > 20
    assert all(seen)


def all_tensors(*values: Any) -> bool:
    return all(type(value) in (Tensor, nn.Parameter) for value in values)


def test_a_hook_of_a_child_runs_at_each_call() -> None:
    calls: list[int] = []
    model = model_of("m.child(m.linear(x))", child=nn.ReLU())
    model.child.register_forward_hook(lambda m, given, y: y * len(calls.append(1) or calls))

    fast = optimizer.optimize(model, ROWS, check=None, level=1)
    calls.clear()
    first, second = fast(ROWS), fast(ROWS)

    torch.testing.assert_close(second, 2 * first)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_child_is_called_as_it_is() -> None:
    child = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    model = model_of("m.child(m.linear(x))", child=child)

    fast = optimizer.optimize(model, ROWS, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_a_batch_norm_function_that_is_not_folded_becomes_a_layer_with_data() -> None:
    model = model_of("F.batch_norm(x, m.flag, m.scale.detach())")

    fast = optimizer.optimize(model, ROWS, level=1)

    assert not any(buffer.is_meta for buffer in fast.buffers())
    torch.testing.assert_close(optimizer.optimize(fast, ROWS, level=1)(ROWS), model(ROWS))
