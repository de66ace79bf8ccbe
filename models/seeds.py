"""The small models that the optimizer's first passes were written for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._registry import Built, workload

_FAMILY = "seeds"


class ToyModel(nn.Module):
    """Linear, BatchNorm, ReLU and a head: the pattern that folds into one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)
        self.bn = nn.BatchNorm1d(64)
        self.relu = nn.ReLU()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.relu(self.bn(self.fc(x))))
        return logits


class TransposeToy(nn.Module):
    """Two transposes that undo one another, written as methods."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).transpose(1, 2)


class SimpleMLP(nn.Module):
    """Two Linear layers around a functional ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.fc2 = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return logits


class SimpleCNN(nn.Module):
    """Two convolutions, each followed by a functional ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv2(torch.relu(self.conv1(x))))


class TinyConvNet(nn.Module):
    """Convolution, BatchNorm, ReLU and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(torch.relu(self.bn(self.conv(x))))
        return pooled


class ResNetBlock(nn.Module):
    """Two convolutions and the skip connection that gives their input a second reader."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.conv2(torch.relu(self.conv1(x)))
        return torch.relu(residual + x)


class OriginalMaskedAssign(nn.Module):
    """A masked assignment, which plain symbolic tracing cannot record."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x.clone()
        y[mask] = 0.0
        return y


class MaskedAssignWhere(nn.Module):
    """The same function without mutation: what `OriginalMaskedAssign` is rewritten to."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, torch.zeros_like(x), x)


@workload(_FAMILY)
def toy_model(generator: torch.Generator) -> Built:
    return ToyModel(), (torch.randn(16, 32, generator=generator),)


@workload(_FAMILY)
def transpose_toy(generator: torch.Generator) -> Built:
    return TransposeToy(), (torch.randn(4, 8, 16, generator=generator),)


@workload(_FAMILY)
def simple_mlp(generator: torch.Generator) -> Built:
    return SimpleMLP(), (torch.randn(1, 10, generator=generator),)


@workload(_FAMILY)
def simple_cnn(generator: torch.Generator) -> Built:
    return SimpleCNN(), (torch.randn(1, 3, 32, 32, generator=generator),)


@workload(_FAMILY)
def tiny_convnet(generator: torch.Generator) -> Built:
    return TinyConvNet(), (torch.randn(1, 3, 32, 32, generator=generator),)


@workload(_FAMILY)
def resnet_block(generator: torch.Generator) -> Built:
    return ResNetBlock(64), (torch.randn(1, 64, 32, 32, generator=generator),)


@workload(_FAMILY)
def masked_assign(generator: torch.Generator) -> Built:
    return OriginalMaskedAssign(), _values_and_mask(generator)


@workload(_FAMILY)
def masked_assign_where(generator: torch.Generator) -> Built:
    return MaskedAssignWhere(), _values_and_mask(generator)


def _values_and_mask(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    values = torch.randn(64, 64, generator=generator)
    return values, values > 0
