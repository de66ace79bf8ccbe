"""Programs of torch.export as the model: what folds, and what later calls are held to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import optimizer
from tests.single_pass import Forward, rows

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


def test_an_exported_program_keeps_its_dynamic_sizes_and_its_buffers() -> None:
    model = Forward("m.count += 1; return x * m.count", count=torch.zeros(4)).eval()
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(copy.deepcopy(model), (ROWS,), dynamic_shapes=({0: batch},))

    fast = optimizer.optimize(program, level=1)

    for size in (3, 8):
        torch.testing.assert_close(fast(torch.ones(size, 4)), model(torch.ones(size, 4)))
    with pytest.raises(AssertionError, match="Guard failed"):  # as the program's own module says
        fast(torch.ones(9, 4))
    assert torch.equal(program.state_dict["count"], torch.zeros(4))


# torch's own pickling and decompositions use what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@rows("layer norm shape", {
    "1d": (nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, (2, 4, 5)),
    "2d": (nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d, (2, 4, 5, 5)),
    "3d": (nn.Conv3d(4, 6, 3, padding=1), nn.BatchNorm3d, (2, 4, 5, 5, 5)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d, (2, 4)),
})  # fmt: skip
def test_every_layer_has_one_spelling(layer: nn.Module, norm: Any, shape: Any) -> None:
    model, x = nn.Sequential(layer, norm(6), nn.Dropout(), nn.ReLU()).eval(), torch.randn(shape)
    nn.init.normal_(model[1].running_mean)
    program = torch.export.export(model, (x,))

    for each in (program, program.run_decompositions()):
        fast = optimizer.optimize(each, level=1)

        assert fast.report.counts()["fold_affine"] == 1, fast.report
        assert "aten.dropout" not in fast.code
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
