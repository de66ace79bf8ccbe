"""What capture records as it is, and what it leaves to the model, with a remark that says why."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import optimizer

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Case(NamedTuple):
    """A model, what it is called with in turn, and words of the remark, if it is not captured."""

    build: Callable[[], nn.Module]
    calls: tuple[tuple[Any, ...], ...]
    remark: str = ""


class Model(nn.Module):
    """Runs the forward of a case; it has a linear layer, a parameter and a buffer."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("flag", torch.ones(4))
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def unary(
    function: Callable[..., Any], remark: str = "", *calls: Any, **members: Callable[[], Any]
) -> Case:
    """A case of one input, called three times if nothing else is said."""

    def build() -> nn.Module:
        return Model(function, **{name: make() for name, make in members.items()})

    return Case(build, tuple((each,) for each in calls or (ROWS, ROWS + 1, ROWS)), remark)


def under_autocast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.linear(x)


def squeezed_in_place(m: Any, x: Any) -> Any:
    y = (x * 2)[:1]
    z = y.exp()
    y.squeeze_(0)
    return y, z


def force(m: Any, x: Any) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = (x**2).sum()
        return torch.autograd.grad(energy, x)[0]


def written_without_grad(m: Any, x: Any) -> Any:
    with torch.no_grad():
        m.scale.add_(1)
    return x * m.scale


def swallowed_len(m: Any, x: Any) -> Any:
    try:
        rows = len(x)
    except Exception:
        rows = 0
    return x * rows


def swallowed_bool(m: Any, x: Any) -> Any:
    try:
        positive = bool(x.sum() > 0)
    except Exception:
        positive = None
    return x if positive is None else -x


def suppressed(m: Any, x: Any) -> Any:
    factor = 1
    with contextlib.suppress(Exception):
        factor = int(x.sum()) + 7
    return x * factor


def default_dict(m: Any, x: Any) -> Any:
    result = collections.defaultdict(list)
    result["x"] = x * 2
    return result


def in_a_set(m: Any, x: Any) -> Any:
    return x * 2 if x.dim() in {2, 3} else x * 3


def attribute_of_a_tensor(m: Any, x: Any) -> Any:
    x.note = 2.0
    return x * x.note


def seeded(m: Any, x: Any) -> Any:
    torch.manual_seed(5)
    return x + torch.rand_like(x)


def made_and_written(m: Any, x: Any) -> Any:
    total = torch.Tensor([0.0, 0.0, 0.0, 0.0])
    total.add_(x[0])
    return total


def zeros_written(m: Any, x: Any) -> Any:
    total = torch.zeros(4)
    total.add_(x[0])
    return total


def read_constant(m: Any, x: Any) -> Any:
    return x * torch.tensor([2.0]).item()


def optional_attribute(m: Any, x: Any) -> Any:
    mask = getattr(x, "mask", None)
    return x * 3 if mask is None else x * mask


def none_in_a_tuple(m: Any, pair: Any) -> Any:
    x, mask = pair
    return x * 2 if mask is None else x * mask


class TensorDefault(nn.Module):
    def forward(self, x: Tensor, w: Tensor = torch.full((4,), 3.0)) -> Tensor:  # noqa: B008
        return x * w


class LoudRoot(Model):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + 1


class LoudChild(nn.Module):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x) + 1

    def forward(self, x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x


LEFT_ALONE: dict[str, Case] = {
    "autocast": unary(under_autocast, "enters autocast"),
    "a shape that changes in place": unary(squeezed_in_place, "changes the shape of a tensor"),
    "autograd": unary(force, "it uses 'requires_grad_'"),
    "a write under no_grad": unary(written_without_grad, "a gradient mode"),
    "a swallowed error of len()": unary(swallowed_len, "it has a try statement"),
    "a swallowed error of bool()": unary(swallowed_bool, "it has a try statement"),
    "a suppressed error": unary(suppressed, "reaches contextlib.suppress"),
    "a defaultdict": unary(default_dict, "makes a defaultdict"),
    "a look into a set": unary(in_a_set, "looks a traced value up"),
    "a look into a dict": unary(lambda m, x: x * {2: 2.0}.get(x.dim(), 1.0), "looks a traced"),
    "a new attribute of a tensor": unary(attribute_of_a_tensor, "sets the attribute 'note'"),
    "an attribute that tensors lack": unary(optional_attribute, "asks what a value has"),
    "a gradient": unary(lambda m, x: x * 2 if x.grad is None else x, "for its attribute 'grad'"),
    "Python's random numbers": unary(lambda m, x: x * random.random(), "random.random"),
    "a seed": unary(seeded, "manual_seed()"),
    "a new tensor that is written": unary(made_and_written, "a tensor that it makes itself"),
    "a value that is read": unary(read_constant, "reads the value of a tensor"),
    "None in a tuple": unary(none_in_a_tuple, "may choose a branch", (ROWS, None), (ROWS, ROWS)),
    "a tensor by default": Case(TensorDefault, ((ROWS,), (ROWS, ROWS)), "the default of 'w'"),
    "a __call__ of the model": Case(
        lambda: LoudRoot(lambda m, x: x * 2), ((ROWS,), (-ROWS,)), "hooks, parametrizations or"
    ),
    "a __call__ of a child": unary(
        lambda m, x: m.child(x), "it uses '__call__'", ROWS, -ROWS, child=LoudChild
    ),
    "a child that counts": unary(
        lambda m, x: m.child(m.linear(x)), "it changes what its code finds", child=lambda: Counter()
    ),
    "a child with a branch": unary(
        lambda m, x: m.child(x.T), "control flow depends", ROWS, -ROWS, child=lambda: Branch()
    ),
}


class Counter(nn.Module):
    """Keeps its state in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x * self.calls[0]


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def counting_hook() -> nn.Module:
    module, calls = Shift(), Counter()
    module.counter = calls
    module.register_forward_hook(lambda m, given, result: m.counter(result))
    return module


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def kept_for_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(m: Any, x: Any) -> Any:
        return function(m, x)

    return wrapper


def shifted_bits(m: Any, x: Any) -> Any:
    x <<= 2
    x >>= 1
    return x


def remainders(m: Any, x: Any) -> Any:
    y = x.T
    y += 1.0
    y *= 2.0
    y -= x.T
    return y


def asked_for_its_type(m: Any, x: Any) -> Any:
    return x * 2 if isinstance(x, Tensor) and torch.is_tensor(x) else x * 3


CAPTURED: dict[str, Case] = {
    "a child with a hook that counts": unary(lambda m, x: m.child(x), child=counting_hook),
    "a new tensor of zeros that is written": unary(zeros_written),
    "random numbers": unary(lambda m, x: x + torch.rand(4) + torch.randn(x.shape[0], 1)),
    "operators that write": unary(remainders),
    "shifts that write": unary(shifted_bits, "", torch.arange(4)),
    "isinstance": unary(asked_for_its_type),
    "isinstance under a decorator": unary(kept_for_gradients(asked_for_its_type)),
    "a vector for a weight": unary(lambda m, x: F.linear(x, m.scale)),
    "axes that are computed": unary(lambda m, x: x.permute(x.dim() - 1, 0).permute(1, 0)),
    "axes in a list that is given": unary(
        lambda m, x: x[0].permute(x[1]), "", (torch.randn(2, 3, 4), [2, 0, 1])
    ),
    "statistics of the batch": unary(
        lambda m, x: F.batch_norm(m.linear(x), m.flag, m.scale.detach(), training=True)
    ),
    "statistics of nothing else": unary(
        lambda m, x: F.batch_norm(m.linear(x), None, None, training=True)
    ),
    "statistics that are computed": unary(
        lambda m, x: F.batch_norm(m.linear(x), m.flag * 3, m.flag + 2)
    ),
    "a weight that is computed": unary(lambda m, x: F.linear(x, m.linear.weight * 2)),
    "a bias that is computed": unary(lambda m, x: F.linear(x, m.linear.weight, m.scale * 2)),
    "a buffer that is written": unary(lambda m, x: x * m.flag.add_(1)),
    "a buffer that is written through a view": unary(lambda m, x: m.flag[:2].mul_(2).sum() * x),
}


def optimized(case: Case, *, example: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = case.build().eval()
    given = copy.deepcopy(case.calls[0]) if example else None
    return copy.deepcopy(model), optimizer.optimize(model, given, check=None, level=1)


def assert_follows(eager: nn.Module, fast: nn.Module, calls: tuple[tuple[Any, ...], ...]) -> None:
    """Call by call the same outputs, structures, strides, inputs afterwards and random numbers."""
    for call in calls:
        expected, actual = observed(eager, call), observed(fast, call)
        assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
        for one, other in zip(*map(pytree.tree_leaves, (expected, actual)), strict=True):
            torch.testing.assert_close(other, one, check_stride=True)


def observed(module: nn.Module, call: tuple[Any, ...]) -> Any:
    inputs = copy.deepcopy(call)
    torch.manual_seed(1)
    random.seed(1)
    with torch.no_grad():
        output = module(*inputs)
    left = [getattr(leaf, "data", leaf) for leaf in pytree.tree_leaves(inputs)]
    return output, left, torch.rand(1)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_is_left_alone_with_a_remark(name: str) -> None:
    case = LEFT_ALONE[name]

    eager, fast = optimized(case, example=True)

    assert case.remark in fast.report.remarks[0]
    assert not isinstance(fast, optimizer.OptimizedModule)
    assert_follows(eager, fast, case.calls)


@pytest.mark.parametrize("name", CAPTURED)
def test_is_captured_as_it_is(name: str) -> None:
    eager, fast = optimized(CAPTURED[name], example=True)

    assert isinstance(fast, optimizer.OptimizedModule)
    assert_follows(eager, fast, CAPTURED[name].calls)


@pytest.mark.parametrize("name", sorted({*LEFT_ALONE, *CAPTURED} - {"None in a tuple"}))
def test_without_example_inputs_the_answer_is_the_same(name: str) -> None:
    case = (LEFT_ALONE | CAPTURED)[name]

    eager, fast = optimized(case, example=False)

    assert_follows(eager, fast, case.calls)


@pytest.mark.parametrize("name", ["a seed", "Python's random numbers", "random numbers"])
def test_the_callers_random_states_are_kept(name: str) -> None:
    model = (LEFT_ALONE | CAPTURED)[name].build().eval()
    before = torch.get_rng_state(), random.getstate()

    optimizer.optimize(model, ROWS, level=1)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("check", ["final", "each", None])
def test_a_parameter_that_is_written_is_not_the_callers(check: Any) -> None:
    model = Model(lambda m, x: x * m.scale.mul_(2)).requires_grad_(False).eval()

    fast = optimizer.optimize(model, ROWS, check=check, level=1)
    results = [fast(ROWS), fast(ROWS)]

    assert torch.equal(model.scale, torch.full((4,), 2.0))
    assert torch.equal(results[0], ROWS * 4)
    assert torch.equal(results[1], ROWS * 8)


def test_a_batch_norm_function_keeps_to_the_rank_it_was_captured_with() -> None:
    model = Model(lambda m, x: F.batch_norm(x, m.mean, m.var), mean=nn.Buffer(torch.ones(4)))
    model.var = nn.Buffer(torch.full((4,), 2.0))

    fast = optimizer.optimize(model.eval(), ROWS, check=None, level=1)

    torch.testing.assert_close(fast(ROWS[:2]), model(ROWS[:2]))
    with pytest.raises(optimizer.InputError, match="2 dimensions and got 4"):
        fast(torch.ones(2, 4, 3, 3))


@pytest.mark.parametrize(("flag", "other"), [(True, 1), (False, 0), (None, False)])
def test_an_equal_argument_of_another_type_is_another_argument(flag: Any, other: Any) -> None:
    class Flagged(nn.Module):
        def forward(self, x: Tensor, flag: Any) -> Tensor:
            return x * 2 if flag is None or flag is True else x * 3

    fast = optimizer.optimize(Flagged().eval(), (ROWS, flag), check=None, level=1)

    assert torch.equal(fast(ROWS, flag), Flagged()(ROWS, flag))
    with pytest.raises(optimizer.InputError, match=f"optimized for flag={flag}"):
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
        optimizer.capture(Model(zeros_written).eval(), ROWS)
    tracing.clear()
    thread.join()

    assert len(seen) > 20
    assert all(seen)


def all_tensors(*values: Any) -> bool:
    return all(type(value) in (Tensor, nn.Parameter) for value in values)


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors of dimension other than 2")
def test_T_of_three_axes_reverses_them() -> None:  # noqa: N802 - it is called T
    model, x = Model(lambda m, x: x.T.exp()).eval(), torch.randn(2, 3, 4)

    fast = optimizer.optimize(model, x, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    assert torch.equal(fast(x), model(x))


def test_a_hook_of_a_child_runs_at_each_call() -> None:
    calls: list[int] = []
    model = Model(lambda m, x: m.child(m.linear(x)), child=Shift()).eval()
    model.child.register_forward_hook(lambda m, given, y: y * len(calls.append(1) or calls))

    fast = optimizer.optimize(model, ROWS, check=None, level=1)
    calls.clear()
    first, second = fast(ROWS), fast(ROWS)

    torch.testing.assert_close(second, 2 * first)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_child_is_called_as_it_is() -> None:
    child = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval())
    model = Model(lambda m, x: m.child(m.linear(x)))
    model.child = child

    fast = optimizer.optimize(model.eval(), ROWS, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_a_batch_norm_function_that_is_not_folded_becomes_a_layer_with_data() -> None:
    model = Model(lambda m, x: F.batch_norm(x, m.flag, m.scale.detach())).eval()

    fast = optimizer.optimize(model, ROWS, level=1)

    assert not any(buffer.is_meta for buffer in fast.buffers())
    torch.testing.assert_close(optimizer.optimize(fast, ROWS, level=1)(ROWS), model(ROWS))
