"""What code may be recorded with stand-ins: nearly that of all models, and none that is hidden."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import optimizer
from models._torchvision_import import import_torchvision
from optimizer.frontend.traceable import Code
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 12).reshape(3, 4)
NAMES, HISTORY = ["a", "b"], list[Any]()


class Stepping(nn.Module):
    """Counts in a method that its code does not name."""

    def forward(self, x: Tensor) -> Any:
        return getattr(self, "st" + "ep")(x)

    def step(self, x: Tensor) -> Tensor:
        HISTORY.append(1)
        return x * len(HISTORY)


def test_getattr_finds_no_code_that_was_not_looked_at() -> None:
    with pytest.raises(optimizer.CaptureError, match="getattr"):
        optimizer.capture(Stepping().eval(), X)
    assert HISTORY == []


def appends(m: Any, x: Tensor) -> Any:
    NAMES.append("c")
    return x * len(NAMES)


@pytest.mark.parametrize("generated", [False, True])
def test_a_container_that_a_recording_changes_is_put_back(generated: bool) -> None:
    model: nn.Module = Forward(appends).eval()
    if generated:
        graph = torch.fx.Graph()
        graph.output(graph.call_function(appends, (None, graph.placeholder("x"))))
        model = torch.fx.GraphModule(nn.Module(), graph)

    with pytest.raises(optimizer.CaptureError, match="it changes what its code finds"):
        optimizer.capture(model, X)
    assert NAMES == ["a", "b"]


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
    class Extended(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x if x.shape[0] else torch.classes.an_extension.Kernel(x)

    assert [*Code(Extended().eval()).obstacles()] == []
