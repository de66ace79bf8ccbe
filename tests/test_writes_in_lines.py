"""Straight-line code that writes: it leaves in memory what eager leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import optimizer
from optimizer.core.inputs import Call, tensors_in
from optimizer.core.node import name_of_call
from optimizer.lowering.choose import Chooser
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.plan import Plan
from optimizer.lowering.precision import Precision
from optimizer.lowering.trace import NotStraightLineError, StraightLine, straight_line

Program = Callable[..., Any]


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


def _anew_and_through_a_view(x: Any) -> Any:
    y = x.exp()
    y.add_(1)
    view = y[:1]
    view.mul_(2)
    return y


def _copied_and_written(x: Any) -> Any:
    y = x.exp()
    copy = y.clone()
    y[:1].mul_(2)
    return copy * 1, y


def _constant_written(x: Any) -> Any:
    constant = torch.ones(2, 3)
    y = x * constant
    constant.add_(1)
    return y, x * constant


def _items_assigned(x: Any) -> Any:
    y = x * 2
    y[0] = 1
    y[:, 1] = x[:, 0]
    return y


def _shape_changed(x: Any) -> Any:
    y = x * 2
    y.t_().unsqueeze_(0)
    return y + 1


PROGRAMS: dict[str, Program] = {
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
    "what was made anew, through a view": _anew_and_through_a_view,
    "what was copied before": _copied_and_written,
    "in another dtype": lambda x: (x * 2).add_(x.double()),
    "flags as numbers": lambda x: (x * 2).gt_(1),
    "data": lambda x: x.data.mul_(2) + x,
    "a shape": _shape_changed,
    "into what is given": lambda x, cache: torch.mul(x, 2, out=cache[:2]),
    "two at once": lambda x, cache: torch.max(x, 1, out=(cache[:2, 0], torch.zeros(2).long())),
}
ALIASES: dict[str, Program] = {
    "an input": lambda x: (x, x + 1),
    "a view of an input": lambda x: x[:1],
    "a view of another output": lambda x: (y := x + 1, y[:, 0]),
    "one output twice": lambda x: (y := x + 1, y),
    "a constant": lambda x: (x + 1, torch.arange(3.0)),
    "one constant twice": lambda x: (c := torch.ones(2), c[:1], x + 1),
}


def given(program: Program, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(2, 3), (4, 3)][: program.__code__.co_argcount]
    return [torch.randn(*size, generator=generator) for size in sizes]


def line_of(program: Program) -> StraightLine:
    return straight_line(program, [], Call(tuple(given(program, 0)), {}))


def shared(tensors: Sequence[torch.Tensor]) -> list[list[bool]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[a == b for b in places] for a in places]


@pytest.mark.parametrize(
    "program", [*PROGRAMS.values(), *ALIASES.values()], ids=[*PROGRAMS, *ALIASES]
)
def test_a_line_does_to_memory_what_eager_does(program: Program) -> None:
    line = line_of(program)
    for seed in (1, 2, 2):
        inputs, own = given(program, seed), given(program, seed)
        expected = tensors_in(program(*inputs))
        returned = line.rebuild(line.module(*own))
        actual = tensors_in(returned)

        for old, new in zip([*inputs, *expected], [*own, *actual], strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=0)
            assert new.stride() == old.stride()
        places = shared([*own, *actual])
        assert places == shared([*inputs, *expected])


def test_each_call_returns_a_constant_of_its_own() -> None:
    line = line_of(ALIASES["a constant"])
    line.module(*given(ALIASES["a constant"], 1))[1].zero_()

    assert line.module(*given(ALIASES["a constant"], 1))[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("program", "binds", "is_open"),
    [
        (PROGRAMS["an input"], True, True),
        (PROGRAMS["into what is given"], True, True),
        (PROGRAMS["items"], True, True),
        (PROGRAMS["a view, and the whole is read"], True, False),
        (ALIASES["an input"], False, True),
        (ALIASES["a view of an input"], True, True),
        (lambda x: (x * 2).relu_(), False, False),
    ],
)
def test_what_is_bound_is_told(program: Program, binds: bool, is_open: bool) -> None:
    line = line_of(program)

    assert (line.binds, line.is_open) == (binds, is_open)


def test_a_weight_is_not_written_or_returned() -> None:
    weight = torch.ones(3)
    for program in (
        lambda x: weight.add_(1) + x,
        lambda x: weight[:1].copy_(x[0, :1]) + x,
        lambda x: (x + weight, weight),
    ):
        with pytest.raises(NotStraightLineError, match="a weight"):
            straight_line(program, [weight], Call((torch.ones(2, 3),), {}))


def test_an_output_that_is_returned_twice_is_computed_once() -> None:
    """Also where it gets the strides of eager, which its program gives it otherwise."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), Twice()).eval(), images(0)[0]
    x = x.to(memory_format=torch.channels_last)
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0)
    first, second = fast(x)

    assert first is second
    torch.testing.assert_close(first, model(x)[0])


def test_what_no_line_repeats_is_refused() -> None:
    def two_dtypes(x: Any) -> Any:
        constant = torch.zeros(2, 3)
        flags = constant.view(torch.int32)
        constant.copy_(x)
        return flags + 1

    for program, reason in (
        (lambda x: (x * 2).set_(x.clone()), "other memory"),
        (two_dtypes, "of two dtypes"),
    ):
        with pytest.raises(NotStraightLineError, match=reason):
            line_of(program)


def test_a_call_that_writes_is_one_of_operators_in_its_own_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Casts, and a CUDA graph, which has memory of its own, would write copies."""

    def never(*args: Any) -> Any:
        raise AssertionError("the whole call is offered to a graph")

    line = line_of(PROGRAMS["an input"])
    monkeypatch.setattr(Chooser, "for_call", never)
    Plan(line, Chooser(0, {}))
    with pytest.raises(NotStraightLineError, match="other names"):
        Plan(line, Chooser(0, {}), Precision.of("bf16", None))


class Viewed(nn.Module):
    """A function of what a convolution of images in channels_last returns."""

    def __init__(self, function: Program) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 8, 3), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


@pytest.mark.parametrize("engines", ["auto", ()])
@pytest.mark.parametrize("laid_out", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.view(2, -1).exp() if y.is_contiguous() else y.exp(),
        lambda y: (z := y.exp(), z.transpose(1, 2)),
        lambda y: y.as_strided((2, 8), (y.stride(0), 1)).exp(),
        lambda y: y[:, :2].mul_(2).exp() + y[:, 2:4],
    ],
    ids=["a view", "two names", "strides", "a write"],
)
def test_what_is_recorded_behind_a_region_reads_it_as_it_lay(
    function: Program, laid_out: torch.memory_format, engines: Any
) -> None:
    model = Viewed(function).eval()
    x, y = (images(seed)[0].to(memory_format=laid_out) for seed in (0, 1))
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0, engines=engines)

    with torch.no_grad():
        expected, actual = tensors_in(model(y)), tensors_in(fast(y))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert shared(actual) == shared(expected)
    assert [each.stride() for each in actual] == [each.stride() for each in expected]


class Twice(nn.Module):
    """Returns what it is given, twice."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, x


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


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 8, 8, generator=generator), torch.zeros(2, 3, 8, 8)


def test_a_call_that_writes_is_lowered() -> None:
    model = Written().eval()
    fast = optimizer.optimize(model, images(0), level=2, tune_seconds=0)
    assert isinstance(fast, LoweredModule)
    assert fast.report.choices

    for seed in (0, 1):
        old, new = images(seed), images(seed)
        with torch.no_grad():
            expected, actual = model(*old), fast(*new)
            assert fast.plan_for(new, {}) is not None
        torch.testing.assert_close((*actual, *new), (*expected, *old), rtol=1e-4, atol=1e-5)
        assert actual[1].untyped_storage().data_ptr() == new[1].untyped_storage().data_ptr()
    optimizer.check(model, fast, images(2))


def test_what_is_written_is_in_no_region() -> None:
    model = Written().eval()
    fast = optimizer.optimize(model, images(0), level=2, tune_seconds=0)
    line = straight_line(model, list(model.parameters()), Call(images(0), {}))
    bound = {name_of_call(n) for n in line.module.graph.nodes if n.meta["bound"]}

    assert {"relu", "copy_", "slice"} <= bound
    assert "mean" not in bound
    assert [choice.region for choice in fast.report.choices] == ["1 x conv2d"] * 2


def test_inputs_that_share_memory_run_the_portable_code() -> None:
    model = Written().eval()
    fast = optimizer.optimize(model, images(0), level=2, tune_seconds=0)
    assert isinstance(fast, LoweredModule)
    x, y = images(1)[0], images(1)[0]

    with torch.no_grad():
        assert fast.plan_for((x, x), {}) is None
        torch.testing.assert_close(fast(x, x), model(y, y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
