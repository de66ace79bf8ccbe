"""Straight-line code: it repeats what a call did, and leaves in memory what eager leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call, tensors_in
from optimizer.core.node import name_of_call
from optimizer.lowering.choose import Chooser
from optimizer.lowering.plan import Plan
from optimizer.lowering.precision import Precision
from optimizer.lowering.trace import NotStraightLineError, StraightLine, straight_line
from tests.level_2 import Then, image, lowered, offer, plan_of

Program = Callable[..., Any]


class Opaque:
    """An output that is no pytree."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _read_around_a_write(read: Program) -> Program:
    def program(x: Any) -> Any:
        y = x + 1
        view = y[:, :1]
        before = y * 3
        view.mul_(-2)
        return before, read(y, view)

    return program


def _filled(x: Any) -> Any:
    room = x.new_zeros(4, 3)
    part = room[1:3]
    before = room + 1
    part.copy_(x)
    return before, room * 2, part


def _cached(x: Any, cache: Any) -> Any:
    before = cache.sum()
    cache.index_copy_(0, torch.tensor([1, 0]), x.exp())
    return before, cache[:1] * x, cache


def _constant_written(x: Any) -> Any:
    constant = torch.ones(2, 3)
    y = x * constant
    constant.add_(1)
    return y, x * constant


def _masked(x: Any) -> Any:
    mask = x.new_zeros(x.shape)
    mask[0] = 1
    return x * (mask + torch.arange(3)).softmax(-1)


def _items_assigned(x: Any) -> Any:
    y = x * 2
    y[0] = 1
    y[:, 1] = x[:, 0]
    return y


def _two_dtypes(x: Any) -> Any:
    constant = torch.zeros(2, 3)
    flags = constant.view(torch.int32)
    constant.copy_(x)
    return flags + 1


WRITES: dict[str, Program] = {
    "an input": lambda x: x.add_(1),
    "part of an input": lambda x: (x[:, 0].zero_(), x * 2)[1],
    "an input by another": lambda x, cache: cache[:2].copy_(x),
    "a cache": _cached,
    "a view, and the whole is returned": _read_around_a_write(lambda y, v: y),
    "a view, and the whole is read": _read_around_a_write(lambda y, v: y * 2),
    "a view, and another is read": _read_around_a_write(lambda y, v: y[:, 1:] + y[:, :1]),
    "a view, then the whole": _read_around_a_write(lambda y, v: (y.neg_(), v)),
    "items": _items_assigned,
    "a constant": _filled,
    "a constant after it was read": _constant_written,
    "what was made anew, through a view": lambda x: (
        y := x.exp(), y.add_(1), view := y[:1], view.mul_(2),
    )[0],
    "what was copied before": lambda x: (
        y := x.exp(), copy := y.clone(), y[:1].mul_(2), copy * 1,
    )[::3],
    "in another dtype": lambda x: (x * 2).add_(x.double()),
    "flags as numbers": lambda x: (x * 2).gt_(1),
    "data": lambda x: x.data.mul_(2) + x,
    "a shape": lambda x: (y := x * 2, y.t_().unsqueeze_(0), y + 1)[2],
    "into what is given": lambda x, cache: torch.mul(x, 2, out=cache[:2]),
    # GhostNet cuts a sum and applies a ReLU in place (issue 19).
    "a view of what is not read": lambda x: torch.cat([x + 1, x])[:, :2].relu_() * 2,
    "two views, the second": lambda x: (x + 1)[:, :2][:1].neg_().mul_(3) + 1,
    "two at once": lambda x, cache: torch.max(x, 1, out=(cache[:2, 0], torch.zeros(2).long())),
}  # fmt: skip
# What is made anew and has one name: a write makes a new tensor.
VALUES: dict[str, Program] = {
    "relu_": lambda x: (y := x * 2, y.relu_(), y + 1)[2],
    "relu in place": lambda x: (y := x * 2, F.relu(y, inplace=True), y + 1)[2],
    "relu in place by position": lambda x: (y := x * 2, F.relu(y, True), y + 1)[2],
    "torch.relu_": lambda x: (y := x * 2, torch.relu_(y), y + 1)[2],
    "one after the other": lambda x: (y := x * 2, y.add_(1).mul_(2), y + 1)[2],
    "an operator": lambda x: (y := x * 2, y.__iadd__(2), y + 1)[2],
    "out": lambda x: (y := x * 2, torch.add(y, y, out=y), y + 1)[2],
    "masked_fill_": lambda x: (y := x * 2, y.masked_fill_(y > 0, 3.0), y + 1)[2],
    "a mask that no input reaches": _masked,
}
ALIASES: dict[str, Program] = {
    "an input": lambda x: (x, x + 1),
    "a view of an input": lambda x: x[:1],
    "a view of another output": lambda x: (y := x + 1, y[:, 0]),
    "one output twice": lambda x: (y := x + 1, y),
    "a constant": lambda x: (x + 1, torch.arange(3.0)),
    "one constant twice": lambda x: (c := torch.ones(2), c[:1], x + 1),
}
PROGRAMS = [*WRITES.items(), *VALUES.items(), *ALIASES.items()]


def given(program: Program, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(2, 3), (4, 3)][: program.__code__.co_argcount]
    return [torch.randn(*size, generator=generator) for size in sizes]


def recorded(program: Program, *inputs: Any, held: Sequence[torch.Tensor] = ()) -> StraightLine:
    return straight_line(program, held, Call(inputs or tuple(given(program, 0)), {}))


def called(line: StraightLine) -> list[str]:
    return [name_of_call(n) for n in line.module.graph.nodes if n.op.startswith("call")]


def shared(tensors: Sequence[torch.Tensor]) -> list[list[bool]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[a == b for b in places] for a in places]


@pytest.mark.parametrize("program", [p for _, p in PROGRAMS], ids=[name for name, _ in PROGRAMS])
def test_a_line_does_to_memory_what_eager_does(program: Program) -> None:
    line = recorded(program)
    for seed in (1, 2, 2):
        inputs, own = given(program, seed), given(program, seed)
        expected = tensors_in(program(*inputs))
        actual = tensors_in(line.rebuild(line.module(*own)))

        for old, new in zip([*inputs, *expected], [*own, *actual], strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0)
            assert new.stride() == old.stride()
        assert shared([*own, *actual]) == shared([*inputs, *expected])
    if program in VALUES.values():
        assert not any(name.endswith("_") for name in called(line))


def test_what_no_input_reaches_is_a_constant() -> None:
    assert called(recorded(_masked)) == ["mul"]


def test_each_call_returns_a_constant_of_its_own() -> None:
    line, x = recorded(ALIASES["a constant"]), given(ALIASES["a constant"], 1)
    line.module(*x)[1].zero_()

    assert line.module(*x)[1].tolist() == [0, 1, 2]


def test_sizes_are_numbers() -> None:
    line = recorded(lambda x: x.reshape(x.shape[0], -1) * x.dim(), torch.ones(2, 3, 4))

    assert "2, -1" in line.module.code
    assert "size" not in line.module.code
    assert ".shape" not in line.module.code


def test_one_tensor_given_twice_is_two_inputs() -> None:
    x = torch.ones(3)
    line = recorded(lambda a, b: a - 2 * b, x, x)

    assert torch.equal(line.module(x * 5, x)[0], x * 3)


def test_self_attention_is_looked_into() -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    line = recorded(lambda x: layer(x, x, x)[0], x, held=list(layer.parameters()))

    assert {"linear", "scaled_dot_product_attention"} <= {*called(line)} or "bmm" in called(line)
    torch.testing.assert_close(line.module(x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize(
    ("program", "binds", "is_open"),
    [
        (WRITES["an input"], True, True),
        (WRITES["into what is given"], True, True),
        (WRITES["items"], True, True),
        (WRITES["a view, and the whole is read"], True, False),
        (ALIASES["an input"], False, True),
        (ALIASES["a view of an input"], True, True),
        (VALUES["relu_"], False, False),
    ],
)
def test_what_is_bound_is_told(program: Program, binds: bool, is_open: bool) -> None:
    line = recorded(program)

    assert (line.binds, line.is_open) == (binds, is_open)


WEIGHT, HIDDEN = torch.ones(3), torch.ones(3)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: x * x.sum().item(), "depends on values"),
        (lambda x: x if x.sum() > 0 else -x, "depends on values"),
        (lambda x: x * int(x.sum()), "depends on values"),
        (lambda x: x + torch.from_numpy(x.numpy()), "depends on values"),
        (lambda x: x[x > 0].reshape(-1, 1), "a size depends on values"),
        (lambda x: x * x.nonzero().shape[0], "a size depends on values"),
        (lambda x: x * 2 if torch.equal(x, x) else x, "depends on values"),
        (lambda x: x + HIDDEN, "cannot be followed"),
        (lambda x: Opaque(x * 2), "object of its own"),
        (lambda x: (x * 2).set_(x.clone()), "other memory"),
        (_two_dtypes, "of two dtypes"),
        (lambda x: WEIGHT.add_(1) + x, "a weight"),
        (lambda x: WEIGHT[:1].copy_(x[0, :1]) + x, "a weight"),
        (lambda x: (x + WEIGHT, WEIGHT), "a weight"),
    ],
)
def test_what_no_line_repeats_is_refused(program: Program, reason: str) -> None:
    with pytest.raises(NotStraightLineError, match=reason):
        recorded(program, held=[WEIGHT])


def test_a_call_that_writes_is_one_of_operators_in_its_own_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Casts, and a CUDA graph, which has memory of its own, would write copies."""
    line = recorded(WRITES["an input"])
    monkeypatch.setattr(Chooser, "for_call", None)  # a graph is not offered it
    Plan(line, Chooser(0, {}))
    with pytest.raises(NotStraightLineError, match="other names"):
        Plan(line, Chooser(0, {}), Precision.of("bf16", None))


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return image(seed=seed), torch.zeros(2, 3, 8, 8)


def test_an_output_that_is_returned_twice_is_computed_once() -> None:
    """Also where it gets the strides of eager, which its program gives it otherwise."""
    model, x = Then(lambda y: (y, y)).eval(), image().to(memory_format=torch.channels_last)
    first, second = lowered(model, x, tune_seconds=0)(x)

    assert first is second
    torch.testing.assert_close(first, model(x)[0])


@pytest.mark.parametrize("engines", [("stub",), ()])
@pytest.mark.parametrize("laid_out", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.view(2, -1).exp() if y.is_contiguous() else y.exp(),
        lambda y: (z := y.exp(), z.transpose(1, 2)),
        lambda y: y.as_strided((2, 4), (y.stride(0), 1)).exp(),
        lambda y: y[:, :2].mul_(2).exp() + y[:, 2:4],
    ],
    ids=["a view", "two names", "strides", "a write"],
)
def test_what_is_recorded_behind_a_region_reads_it_as_it_lay(
    monkeypatch: pytest.MonkeyPatch, function: Program, laid_out: torch.memory_format, engines: Any
) -> None:
    offer(monkeypatch, *engines)
    model = Then(function).eval()
    x, y = (image(seed=seed).to(memory_format=laid_out) for seed in (0, 1))
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0)

    with torch.no_grad():
        expected, actual = tensors_in(model(y)), tensors_in(fast(y))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert shared(actual) == shared(expected)
    assert [each.stride() for each in actual] == [each.stride() for each in expected]


class Written(nn.Module):
    """Convolutions before and after a write of part of what lies between them, and of a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
        y = self.first(self.first(x)[:, :3].relu()).relu()
        y[:, :1] = y[:, 1:2] * 2
        cache[:, :, 0] = self.last(y).mean(-1).mean(-1, keepdim=True)
        return self.last(y), cache[:, :1]


def test_a_call_that_writes_is_lowered() -> None:
    model = Written().eval()
    fast = lowered(model, *images(0), tune_seconds=0)
    assert [choice.region for choice in fast.report.choices] == ["1 x conv2d"] * 2

    for seed in (0, 1):
        old, new = images(seed), images(seed)
        with torch.no_grad():
            expected, actual = model(*old), fast(*new)
        assert plan_of(fast, *new) is not None
        torch.testing.assert_close((*actual, *new), (*expected, *old), rtol=1e-4, atol=1e-5)
        assert shared([actual[1], new[1]]) == [[True, True]] * 2
    optimizer.check(model, fast, images(2))

    x, y = image(seed=1), image(seed=1)  # inputs that share memory run the portable code
    assert plan_of(fast, x, x) is None
    with torch.no_grad():
        torch.testing.assert_close(fast(x, x), model(y, y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_what_is_written_is_in_no_region() -> None:
    model = Written().eval()
    line = recorded(model, *images(0), held=list(model.parameters()))
    bound = {name_of_call(n) for n in line.module.graph.nodes if n.meta["bound"]}

    assert {"relu", "copy_", "slice"} <= bound
    assert "mean" not in bound
