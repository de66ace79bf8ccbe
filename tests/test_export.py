"""Programs of torch.export as the model: what folds, and what later calls are held to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Counting(nn.Module):
    """Counts its calls in a buffer, and reads a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return x * self.count + self.plain


def assert_same(expected: Any, actual: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert spec == new_spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


# torch's own pickling and decompositions use what torch has deprecated.
leaf_spec = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def test_an_exported_program_keeps_its_dynamic_sizes_and_its_buffers() -> None:
    model, batch = Counting(), torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(copy.deepcopy(model), (ROWS,), dynamic_shapes=({0: batch},))

    fast = optimizer.optimize(program, level=1)

    for rows in (3, 8):
        assert_same(model(torch.ones(rows, 4)), fast(torch.ones(rows, 4)))
    with pytest.raises(AssertionError, match="Guard failed"):  # as the program's own module says
        fast(torch.ones(9, 4))
    assert torch.equal(program.state_dict["count"], torch.zeros(4))


@leaf_spec
@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear])
def test_every_layer_has_one_spelling(convolution: Any) -> None:
    ranks = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5, nn.Linear: 2}
    norm: Any = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(ranks[convolution], nn.BatchNorm1d)
    layer = convolution(4, 6) if convolution is nn.Linear else convolution(4, 6, 3, padding=1)
    model = nn.Sequential(layer, norm(6), nn.Dropout(), nn.ReLU()).eval()
    nn.init.normal_(model[1].running_mean)
    x = torch.randn(2, 4, *[5] * (ranks[convolution] - 2))
    program = torch.export.export(model, (x,))

    for each in (program, program.run_decompositions()):
        fast = optimizer.optimize(each, level=1)

        assert fast.report.counts()["fold_affine"] == 1, fast.report
        assert "aten.dropout" not in fast.code
        assert_same(model(x), fast(x))
