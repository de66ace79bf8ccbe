"""The figures that docs/figures.md gives, held where they are the same on every machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import models
import optimizer
from benchmarks import figures
from optimizer.analysis import Ceilings, roofline
from tests.conftest import address
from tests.internals import device_of

pytestmark = pytest.mark.integration

PAGE = (Path(__file__).parent.parent / "docs" / "figures.md").read_text()
NOWHERE = Ceilings(flops=1e11, bytes=1e10)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v3_large"])
def test_the_kernels_of_a_forward_are_as_the_page_says(name):
    model, inputs = (workload := models.load(name)).module, workload.example_inputs
    fast = optimizer.optimize(model, inputs, check=None, level=1)
    before, after = (roofline(each, inputs, NOWHERE).launches for each in (model, fast))
    assert f"| {name} | {before} → {after} |" in PAGE
    assert re.findall(r"^\| (\w+) \| \d+ → ", PAGE, re.MULTILINE) == list(figures.MODELS)


@pytest.mark.parametrize("dtype", figures.DTYPES)
@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x1_0"])
def test_the_error_is_that_of_eager_up_to_rounding(name, dtype):
    eager, optimized = figures.errors(name, dtype)
    assert 0 < optimized <= 2 * eager


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_optimizing_holds_less_than_one_layer_besides_what_it_keeps(name):
    model, inputs = (workload := models.load(name)).module, workload.example_inputs
    results = []

    def run():
        results.append(optimizer.optimize(model, inputs, check=None, level=1))

    run()  # once, for what torch makes ready
    peak = device_of(model.parameters()).peak_memory(run)
    kept = bytes_of(results[-1], without=bytes_of(model))
    layers = [each for each in model.modules() if not list(each.children())]

    assert 0 < peak - sum(kept.values()) < max(sum(bytes_of(each).values()) for each in layers)


def bytes_of(module, without=()):
    """The size of each storage of a module's, by its address."""
    held = {address(each): each.untyped_storage().nbytes() for each in module.state_dict().values()}
    return {place: size for place, size in held.items() if place not in without}
