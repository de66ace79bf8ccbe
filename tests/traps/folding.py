"""Traps 1 to 37: folding a BatchNorm into the layer beside it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.traps._catalogue import (
    DEEP,
    IMAGE,
    ROWS,
    conv,
    linear,
    norm,
    norm1,
    trap,
    up,
)


@trap(1, "one path of a layer has no norm", IMAGE, IMAGE[:1], rewritten=True, c=conv(), bn=norm())
def one_path(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)), m.c(x * 2)


@trap(2, "a pair is called twice", IMAGE, IMAGE[:1], rewritten=True, c=conv(), bn=norm())
def pair_twice(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + m.bn(m.c(x * 2))


def name_again(m: Any) -> None:
    m.d = m.c


@trap(3, "one module has two names", IMAGE, rewritten=True, change=name_again, c=conv(), bn=norm())
def two_names(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + m.d(x)


@trap(4, "the weight is read elsewhere", IMAGE, rewritten=True, c=conv(), bn=norm())
def weight_read(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) * m.c.weight.sum()


def tie(m: Any) -> None:
    m.d.weight = m.c.weight


@trap(
    5, "two layers share a weight", IMAGE, rewritten=True, change=tie, c=conv(), d=conv(), bn=norm()
)
def tied(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + m.d(x)


@trap(6, "two norms after one layer", IMAGE, rewritten=True, c=conv(), bn=norm(), bn2=norm())
def two_norms(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + m.bn2(m.c(x))


@trap(6, "two norms of one result", IMAGE, c=conv(), bn=norm(), bn2=norm())
def two_norms_of_one(m: Any, x: Any) -> Any:
    y = m.c(x)
    return m.bn(y) + m.bn2(y)


@trap(6, "one norm after two layers", IMAGE, rewritten=True, c=conv(), d=conv(), bn=norm())
def one_norm(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + m.bn(m.d(x))


@trap(7, "the layer's result has a second reader", IMAGE, c=conv(), bn=norm())
def second_reader(m: Any, x: Any) -> Any:
    y = m.c(x)
    return m.bn(y) + y


@trap(
    8, "BatchNorm1d after Linear on (N, C, L), C = L", DEEP[:, :, :3], fc=linear(3, 3), bn=norm1(3)
)
def another_axis(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


@trap(9, "BatchNorm1d after Linear on (N, C, L), C < L", DEEP, fc=linear(4, 5), bn=norm1(3))
def another_axis_of_another_size(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


@trap(10, "a norm of one feature", DEEP[:, :1], fc=linear(4, 5), bn=norm1(1))
def one_feature(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


@trap(11, "a norm without weights", IMAGE, rewritten=True, c=conv(), bn=norm(affine=False))
def no_affine(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(12, "a layer with a bias", ROWS, ROWS[:1], rewritten=True, fc=linear(), bn=norm1())
def with_bias(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


@trap(13, "a norm without statistics", IMAGE, c=conv(), bn=norm(track_running_stats=False))
def no_statistics(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(
    14, "a norm in training mode", IMAGE, IMAGE, change=lambda m: m.bn.train(), c=conv(), bn=norm()
)
def norm_trains(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)), m.bn.running_mean


def freeze(m: Any) -> None:
    m.train()
    m.bn.eval()


@trap(14, "a frozen norm in training", IMAGE, rewritten=True, change=freeze, c=conv(), bn=norm())
def frozen(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(15, "a norm without momentum", IMAGE, rewritten=True, c=conv(), bn=norm(momentum=None))
def no_momentum(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(16, "F.batch_norm", IMAGE, rewritten=True, c=conv(), bn=norm())
def functional(m: Any, x: Any) -> Any:
    n = m.bn
    return F.batch_norm(m.c(x), n.running_mean, n.running_var, n.weight, n.bias, m.training)


@trap(17, "keyword calls", IMAGE, rewritten=True, c=conv(), bn=norm())
def keywords(m: Any, x: Any) -> Any:
    y = F.conv2d(x, m.c.weight, bias=m.c.bias, stride=2)
    return m.bn(input=y) + m.bn(input=m.c(input=x[..., ::2, ::2][..., :5, :5])).mean()


class Absolute(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).abs()


class Activated(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).relu()


@trap(18, "a subclass of Conv2d that does more", IMAGE, c=lambda: Absolute(4, 4, 3), bn=norm())
def conv_subclass(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(
    18,
    "a subclass of BatchNorm2d that does more",
    IMAGE,
    c=conv(),
    bn=lambda: Activated(4),
)
def norm_subclass(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(
    19,
    "InstanceNorm with statistics",
    IMAGE,
    c=conv(),
    bn=lambda: nn.InstanceNorm2d(4, track_running_stats=True),
)
def instance_norm(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(20, "a transposed convolution", IMAGE, rewritten=True, c=up(), bn=norm())
def transposed(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(21, "a transposed convolution of groups", IMAGE, rewritten=True, c=up(groups=2), bn=norm())
def transposed_groups(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(21, "a depthwise transposed convolution", IMAGE, rewritten=True, c=up(groups=4), bn=norm())
def transposed_depthwise(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(22, "a convolution of groups", IMAGE, rewritten=True, c=conv(groups=2), bn=norm())
def groups(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(22, "a depthwise convolution", IMAGE, rewritten=True, c=conv(groups=4), bn=norm())
def depthwise(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(23, "a norm before a convolution that pads", IMAGE, c=conv(padding=1), bn=norm())
def padded(m: Any, x: Any) -> Any:
    return m.c(m.bn(x))


@trap(23, "a norm before a convolution", IMAGE, rewritten=True, c=conv(), bn=norm())
def forward_fold(m: Any, x: Any) -> Any:
    return m.c(m.bn(x))


@trap(
    24,
    "padding by reflection",
    IMAGE,
    rewritten=True,
    c=conv(padding=1, padding_mode="reflect"),
    bn=norm(),
)
def reflected(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


def halve(m: Any) -> None:
    m.half()
    m.c.weight.data.fill_(7000.0)
    m.c.bias.data.zero_()
    m.bn.running_mean.zero_()
    m.bn.running_var.fill_(1e-4)


@trap(
    26, "weights that overflow when folded", IMAGE.half() * 1e-4, change=halve, c=conv(), bn=norm()
)
def overflow(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(
    27,
    "a norm of another dtype",
    IMAGE.bfloat16(),
    change=lambda m: m.float().c.bfloat16(),
    c=conv(),
    bn=norm(),
)
def mixed(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


def shrink(m: Any) -> None:
    m.bn.running_var.fill_(1e-12)


@trap(29, "a tiny variance", ROWS, rewritten=True, change=shrink, fc=linear(), bn=norm1(eps=1e-3))
def tiny_variance(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


@trap(31, "a layer without a bias", ROWS, rewritten=True, fc=linear(bias=False), bn=norm1())
def no_bias(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x))


def hook(m: Any) -> None:
    m.c.register_forward_hook(lambda module, given, result: result * 2)


def hook_norm(m: Any) -> None:
    m.bn.register_forward_hook(lambda module, given, result: result * 2)


@trap(32, "a hook on the layer", IMAGE, change=hook, c=conv(), bn=norm())
def hooked(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(32, "a hook on the norm", IMAGE, change=hook_norm, c=conv(), bn=norm())
def hooked_norm(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


def hook_model(m: Any) -> None:
    m.register_forward_hook(lambda module, given, result: result * 2)


@trap(32, "a hook on the model", IMAGE, rewritten=True, change=hook_model, c=conv(), bn=norm())
def hooked_model(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


def parametrize(m: Any) -> None:
    parametrizations.weight_norm(m.c)


@trap(33, "a parametrized weight", IMAGE, change=parametrize, c=conv(), bn=norm())
def parametrized(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


def parametrize_as_before(m: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(m.c)


@trap(33, "an old weight_norm", IMAGE, change=parametrize_as_before, c=conv(), bn=norm())
def old_weight_norm(m: Any, x: Any) -> Any:
    return m.bn(m.c(x))


@trap(34, "addmm with a beta", ROWS, fc=linear(), bn=norm1())
def beta(m: Any, x: Any) -> Any:
    return m.bn(torch.addmm(m.fc.bias, x, m.fc.weight, beta=2))


@trap(
    35,
    "a constant for each pixel",
    IMAGE,
    c=conv(),
    bn=norm(),
    k=lambda: nn.Parameter(torch.ones(4, 6, 6)),
)
def constant_of_pixels(m: Any, x: Any) -> Any:
    return m.c(x) + m.k


@trap(
    35,
    "a constant for each channel",
    IMAGE,
    rewritten=True,
    c=conv(),
    bn=norm(),
    k=lambda: nn.Parameter(torch.ones(4, 1, 1)),
)
def constant_of_channels(m: Any, x: Any) -> Any:
    return m.bn(m.c(x) + m.k)


@trap(
    36,
    "a constant of integers",
    IMAGE,
    c=conv(),
    k=lambda: nn.Buffer(torch.arange(1, 5).reshape(4, 1, 1)),
)
def whole_constant(m: Any, x: Any) -> Any:
    return m.c(x) * m.k
