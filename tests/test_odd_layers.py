"""A layer whose tensors are not where its class keeps them is folded rightly, or refused alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import optimizer
from optimizer.testing import randomize
from tests.repository import table
from tests.single_pass import Forward


def as_plain_tensor(layer: nn.Module, name: str) -> None:
    value = getattr(layer, name).detach().clone()
    delattr(layer, name)
    setattr(layer, name, value)


def as_buffer(layer: nn.Module, name: str) -> None:
    as_plain_tensor(layer, name)
    layer.register_buffer(name, vars(layer).pop(name))


LINEARS, AFTER = "nn.Linear(4, 4), nn.BatchNorm1d(4)", "nn.BatchNorm1d(4), nn.Linear(4, 4)"
ROW, IMAGE = torch.ones(3, 4), torch.ones(2, 4, 8, 8)


# The pair, which of the two is odd, its tensors, an input, and the pass that takes the pair.
@table("pair place names x by",
    (LINEARS, 0, "weight bias", ROW, "fold_affine"),
    (LINEARS, 1, "weight running_mean", ROW, "fold_affine"),
    (AFTER, 0, "running_var", ROW, "fold_affine_forward"),
    (AFTER, 1, "weight bias", ROW, "fold_affine_forward"),
    ("nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3)", 1, "weight bias", IMAGE, "fold_padding"),
    ("nn.Conv2d(4, 4, 1), nn.AvgPool2d(4)", 0, "weight", IMAGE, "sink_convolutions"),
    ("nn.Linear(4, 4), nn.ReLU()", 0, "weight bias", ROW, "fuse_linear_relu"),
)  # fmt: skip
@pytest.mark.parametrize(("change", "times"), [(as_buffer, 2), (as_plain_tensor, 1)])
def test_only_the_odd_layer_of_two_pairs_is_left_alone(pair, place, names, x, by, change, times):
    for name in names.split():
        odd, usual = (nn.Sequential(*eval(pair)) for _ in range(2))
        model = Forward(lambda m, x: (m.odd(x), m.usual(x)), odd=odd, usual=usual)
        randomize(model.eval().double())
        change(odd[place], name)
        x = torch.randn(x.shape, dtype=torch.float64)
        fast = optimizer.optimize(model, x, level=1, only=[by])

        assert fast.report.counts() == {by: times}, name
        assert not fast.report.remarks
        assert len(fast.report.refused) == 2 - times
        torch.testing.assert_close(fast(x), model(x))
        dtypes = {each.dtype for each in fast.float().state_dict().values()}
        assert change is as_plain_tensor or dtypes <= {torch.float32, torch.int64}
