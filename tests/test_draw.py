"""The picture of a graph: every node and edge is there, and what has changed is marked."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, fx, nn

import models
import optimizer
from optimizer import InputError

WORKLOADS = ("toy_model", "masked_postprocess_4096", "resnet18", "densenet121", "swin_t")
TEXT = r'"((?:[^"\\]|\\.)*)"'
BOX = re.compile(rf"^{TEXT} \[label={TEXT} tooltip={TEXT} (.*)\]$", re.MULTILINE)
ARROW = re.compile(rf"^{TEXT} -> {TEXT}$", re.MULTILINE)


class Branches(nn.Module):
    """Skips, a constant that is read late, and text that must be quoted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,bj->bi", self.first(x).relu(), x)
        return self.last(y.exp()) + x + y * self.scale.neg()


def captured(name: str) -> fx.GraphModule:
    workload = models.load(name)
    return optimizer.capture(workload.module, workload.example_inputs)


def boxes(picture: str) -> dict[str, tuple[str, str]]:
    """The text and the look of each box, by its name."""
    return {name: (label, look) for name, label, _, look in BOX.findall(picture)}


def test_a_box_says_what_is_called_and_what_comes_out() -> None:
    found = boxes(optimizer.draw(optimizer.capture(Branches().eval(), torch.randn(2, 4))))

    assert found["0.x"] == (r"x\nx 2x4", 'fillcolor="#eeeeee"')
    assert found["0.first"] == (r"Linear\nfirst 2x4", 'fillcolor="#d3e4fd"')
    assert found["0.relu"] == (r"F.relu\nrelu 2x4", 'fillcolor="#d9f0d9"')
    assert found["0.exp"] == (r".exp\nexp 2x4", 'fillcolor="#eedcf5"')
    assert found["0.scale"] == (r"scale\nscale 4", 'fillcolor="#fdf0c4"')


def test_needs_no_example_inputs() -> None:
    assert boxes(optimizer.draw(optimizer.capture(Branches())))["0.exp"][0] == r".exp\nexp"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_node_has_a_box_and_every_edge_an_arrow(name: str) -> None:
    module = captured(name)
    picture = optimizer.draw(module)

    edges = {(f"0.{each}", f"0.{n}") for n in module.graph.nodes for each in n.all_input_nodes}
    assert set(boxes(picture)) == {f"0.{node}" for node in module.graph.nodes}
    assert set(ARROW.findall(picture)) == edges
    head, end = ["digraph {", "node [", "subgraph cluster_0 {", "label="], ["}", "}"]
    lines = picture.splitlines()
    assert [line.startswith(start) for line, start in zip(lines, head, strict=False)] == [True] * 4
    assert len(lines) == len(module.graph.nodes) + len(edges) + len(head) + len(end)


def test_before_and_after_mark_what_has_gone_and_what_is_new() -> None:
    workload = models.load("toy_model")
    before = optimizer.capture(workload.module, workload.example_inputs)
    after = optimizer.optimize(workload.module, workload.example_inputs, level=1)

    found = boxes(optimizer.draw(before, after))

    assert "dashed" in found["0.bn"][1]
    assert found["1.fc_folded_relu"][0].startswith("LinearReLU")
    assert "#117711" in found["1.fc_folded_relu"][1]
    assert "penwidth" not in found["0.head"][1] + found["1.head"][1]


def test_quotes_and_backslashes_stay_what_they_are() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.einsum, ('a"\\n', graph.placeholder("x"))))

    tooltips = [told for _, _, told, _ in BOX.findall(optimizer.draw(fx.GraphModule({}, graph)))]

    assert any(r"args = (a\"\\n, %x)" in told for told in tooltips)


def test_a_model_that_is_no_graph_is_refused() -> None:
    with pytest.raises(InputError, match=r"pass optimizer\.capture"):
        optimizer.draw(nn.ReLU())  # type: ignore[arg-type]
