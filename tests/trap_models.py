"""The models of `test_traps.py`: each a forward that looks harmless to a graph optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Trap(NamedTuple):
    """A model, what it is called with one after another, and what must become of it."""

    build: Callable[[], nn.Module]
    calls: tuple[tuple[Any, ...], ...]
    outcome: str


class Forward(nn.Module):
    """A module with a given forward and given members."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


TRAPS: dict[str, Trap] = {}
ROWS = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
IMAGE = torch.linspace(-1.0, 1.0, 384).reshape(2, 3, 8, 8)
DEEP = torch.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)


def trap(
    *inputs: torch.Tensor, outcome: str = "left alone", **members: Callable[[], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a forward, to be called with each input in turn."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> nn.Module:
            return Forward(function, **{name: make() for name, make in members.items()})

        TRAPS[function.__name__] = Trap(build, tuple((each,) for each in inputs), outcome)
        return function

    return register


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def norm() -> nn.Module:
    layer = nn.BatchNorm2d(4)
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    nn.init.normal_(layer.bias)
    layer.running_mean.normal_()
    return layer


def hooked_conv() -> nn.Module:
    layer = conv()
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


@trap(ROWS)
def all_of_an_input_is_assigned(self: Any, x: Any) -> Any:
    x[...] = x * 2
    return x


@trap(ROWS, ROWS[:, :2])
def a_column_of_an_input_is_added_to(self: Any, x: Any) -> Any:
    x[:, 0] += 1
    return x


@trap(ROWS)
def data_is_written(self: Any, x: Any) -> Any:
    x.data.add_(1)
    return x * 2


@trap(ROWS)
def a_chunk_is_written(self: Any, x: Any) -> Any:
    first, second = x.chunk(2, -1)
    first.add_(1)
    return first, second, x


@trap(ROWS)
def a_view_is_taken_before_the_masked_write(self: Any, x: Any) -> Any:
    y = x * 2
    view = y[0]
    y[y < 0] = 0.0
    return view, y


@trap(ROWS, outcome="rewritten")
def a_transpose_that_cancels_is_written(self: Any, x: Any) -> Any:
    y = x * 1
    view = y.T
    view.T.add_(1)
    return y, view


@trap(ROWS)
def an_input_is_returned_twice(self: Any, x: Any) -> Any:
    return x, x


@trap(ROWS, ROWS, ROWS, count=lambda: nn.Buffer(torch.zeros(())))
def a_buffer_counts_calls(self: Any, x: Any) -> Any:
    self.count.add_(1)
    return x * self.count


@trap(ROWS)
def random_numbers_are_drawn(self: Any, x: Any) -> Any:
    return x + torch.rand_like(x) + torch.rand(4)


@trap(ROWS, ROWS.flip(0))
def a_value_is_read(self: Any, x: Any) -> Any:
    return x * x.sum().item()


@trap(ROWS, ROWS[:2], calls=list)
def a_list_counts_calls(self: Any, x: Any) -> Any:
    self.calls.append(1)
    return x * len(self.calls)


@trap(DEEP, outcome="rewritten")
def a_cycle_of_three_is_no_identity_twice(self: Any, x: Any) -> Any:
    return x.permute(1, 2, 0).permute(1, 2, 0)


@trap(IMAGE, IMAGE[:1], layer=conv, norm=norm, outcome="rewritten")
def a_convolution_feeds_a_norm(self: Any, x: Any) -> Any:
    return self.norm(self.layer(x))


@trap(IMAGE, layer=conv, norm=norm, outcome="rewritten")
def a_convolution_has_a_path_without_norm(self: Any, x: Any) -> Any:
    return self.norm(self.layer(x)), self.layer(x), self.norm(self.layer(x * 2))


@trap(IMAGE, layer=conv, norm=norm)
def a_norm_and_another_read_the_convolution(self: Any, x: Any) -> Any:
    y = self.layer(x)
    return self.norm(y) + y


@trap(IMAGE, IMAGE, layer=conv, norm=norm)
def running_statistics_are_written(self: Any, x: Any) -> Any:
    self.norm.running_mean.add_(1.0)
    return self.norm(self.layer(x))


@trap(IMAGE, layer=hooked_conv, norm=norm)
def a_hook_changes_the_convolution(self: Any, x: Any) -> Any:
    return self.norm(self.layer(x))


@trap(DEEP, DEEP[:, :2], layer=lambda: nn.LSTM(4, 5, 2, batch_first=True))
def an_lstm_is_called(self: Any, x: Any) -> Any:
    return self.layer(x)[0]


@trap(ROWS, layers=lambda: [nn.Linear(4, 4)])
def a_layer_is_kept_in_a_plain_list(self: Any, x: Any) -> Any:
    return self.layers[0](x)
