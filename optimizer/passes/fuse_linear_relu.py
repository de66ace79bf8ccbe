"""relu(linear(x)) -> one module that clamps the linear's output where it lies."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import has_plain_tensors, module_of
from optimizer.rewrite.affine import as_parameter
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_module
from optimizer.rewrite.pattern import call


class LinearReLU(nn.Linear):
    """`relu(linear(x))` without a second tensor for the result.

    Shapes: `(*, in_features) -> (*, out_features)`. It shares the weight and bias of the
    Linear it is made of.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> LinearReLU:
        """The fused module over the parameters of `linear`."""
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        fused.in_features, fused.out_features = linear.in_features, linear.out_features
        fused.weight, fused.bias = as_parameter(linear.weight), as_parameter(linear.bias)
        return fused.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear has it
        """Apply the layer; the in-place relu writes only the tensor that it just made."""
        return torch.relu_(F.linear(input, self.weight, self.bias))


@rewrite(
    call(F.relu, args=(call(nn.Linear, name="linear"),), name="relu"),
    numerics="exact",
    phase="fuse",
)
def fuse_linear_relu(linear: fx.Node, relu: fx.Node) -> fx.Node:
    """Fuse a Linear and the ReLU after it into one module that needs one tensor less.

    The Linear's output is fresh, and nobody but the ReLU reads it, so the ReLU may overwrite
    it. The values are those of the same two kernels.
    """
    require(len(linear.users) == 1, "the layer's output is read elsewhere")
    layer = module_of(linear)
    require(not has_plain_tensors(layer), "the layer has tensors that no cast of it reaches")

    fused = LinearReLU.of(layer)
    return insert_module(linear, fused, linear.args, f"{linear.target}_relu")


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU())
    return model.eval(), (torch.randn(4, width),)
