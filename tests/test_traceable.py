"""What code may be recorded with stand-ins: nearly that of all models, and none that is hidden."""

from __future__ import annotations

import functools

import pytest
import torch

import models
from models import import_torchvision
from tests.internals import Code
from tests.single_pass import Forward


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [name for family in ("seeds", "torchvision", "synthetic") for name in models.names(family)],
)
def test_all_workloads_pass_the_list(name: str) -> None:
    assert next(Code(models.load(name).module).obstacles(), "") == ""


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # of what makes them
def test_nearly_all_models_of_classification_pass_the_list() -> None:
    vision = import_torchvision().models
    timm = pytest.importorskip("timm")
    modules = {timm.models.model_entrypoint(n).__module__: n for n in timm.list_models()}
    makers = [functools.partial(timm.create_model, name) for name in modules.values()]
    # A RegNet cannot be made without data; one of them is a workload.
    names = [name for name in vision.list_models(vision) if not name.startswith("regnet")]
    makers += [functools.partial(vision.get_model, name, weights=None) for name in names]
    with torch.device("meta"):
        found = [next(Code(make().eval()).obstacles(), "") for make in makers]

    told = [each for each in found if each]
    assert len(found) > 100
    assert len(told) <= 0.05 * len(found), told


def test_a_class_of_torch_that_is_not_there_is_no_error() -> None:
    model = Forward(lambda m, x: x if x.shape[0] else torch.classes.an_extension.Kernel(x))

    assert [*Code(model.eval()).obstacles()] == []
