"""The picture of a graph: every node and edge is there, nothing lies upon anything else."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, fx, nn

import models
import optimizer
from optimizer import InputError
from optimizer.analysis.draw import layout

SVG = "{http://www.w3.org/2000/svg}"
WORKLOADS = ("toy_model", "masked_postprocess_4096", "resnet18", "densenet121", "swin_t")


class Branches(nn.Module):
    """Skips, a constant that is read late, and text that XML would trip over."""

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


def boxes(picture: str) -> dict[str, list[str]]:
    """The texts of each box, by its name."""
    groups = [g for g in ElementTree.fromstring(picture).iter(f"{SVG}g") if g.get("class")]
    texts = [[t.text or "" for t in group.findall(f"{SVG}text")] for group in groups]
    return {name.split(" ")[0]: [group.get("class", ""), call, name]
            for group, (call, name) in zip(groups, texts, strict=True)}  # fmt: skip


def test_a_box_says_what_is_called_and_what_comes_out() -> None:
    found = boxes(optimizer.draw(optimizer.capture(Branches().eval(), torch.randn(2, 4))))

    assert found["x"] == ["placeholder", "x", "x 2x4"]
    assert found["first"] == ["call_module", "Linear", "first 2x4"]
    assert found["relu"] == ["call_function", "F.relu", "relu 2x4"]
    assert found["exp"] == ["call_method", ".exp", "exp 2x4"]
    assert found["scale"] == ["get_attr", "scale", "scale 4"]


def test_needs_no_example_inputs() -> None:
    assert boxes(optimizer.draw(optimizer.capture(Branches())))["exp"][2] == "exp"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_node_has_a_box_of_its_own(name: str) -> None:
    module = captured(name)
    rows = layout(module.graph, lambda node: 60.0 + len(node.name))

    places = [place.node for row in rows for place in row if place.is_box]
    assert sorted(places) == list(module.graph.nodes)
    for row in rows:
        for left, right in pairwise(row):
            assert left.x + left.width / 2 < right.x - right.width / 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_edge_runs_down_one_row_at_a_time(name: str) -> None:
    module = captured(name)
    places = [place for row in layout(module.graph, lambda node: 60.0) for place in row]

    edges = set()
    for place in places:
        for lower in place.below:
            assert lower.rank == place.rank + 1
            assert lower.is_box or lower.node is place.node
            if lower.is_box:
                edges.add((place.node, lower.node))
    assert edges == {(each, n) for n in module.graph.nodes for each in n.all_input_nodes}


def test_constants_stand_next_to_their_first_reader() -> None:
    rows = layout(optimizer.capture(Branches()).graph, lambda node: 60.0)
    rank = {place.node.name: place.rank for row in rows for place in row if place.is_box}

    assert rank["scale"] + 1 == rank["neg"] == rank["mul"] - 1
    assert rank["x"] == 0


def test_a_chain_is_a_straight_line() -> None:
    module = optimizer.capture(nn.Sequential(*(nn.ReLU() for _ in range(600))))

    rows = layout(module.graph, lambda node: 40.0 + 10 * (len(node.name) % 5))

    assert len(rows) == 602
    assert max(row[0].x for row in rows) - min(row[0].x for row in rows) < 1e-6


def test_no_edge_crosses_another_where_none_has_to() -> None:
    class Ladder(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
            return z.exp().exp(), x.exp().exp(), y.exp().exp()

    rows = layout(optimizer.capture(Ladder()).graph, lambda node: 40.0)

    order = [[place.node.name for place in row if place.below] for row in rows[:3]]
    index = {name: i for row in order for i, name in enumerate(row)}
    chains = [("x", "exp_2", "exp_3"), ("y", "exp_4", "exp_5"), ("z", "exp", "exp_1")]
    assert all(len({index[name] for name in chain}) == 1 for chain in chains)


def test_before_and_after_mark_what_has_gone_and_what_is_new() -> None:
    workload = models.load("toy_model")
    before = optimizer.capture(workload.module, workload.example_inputs)
    after = optimizer.optimize(workload.module, workload.example_inputs, level=1)

    found = boxes(optimizer.draw(before, after))

    assert found["bn"][0] == "call_module gone"
    assert found["fc_folded_relu"][:2] == ["call_module new", "LinearReLU"]
    assert found["head"][0] == "call_module"


def test_the_picture_is_the_same_each_time_and_needs_nothing_else() -> None:
    module = captured("resnet18")
    picture = optimizer.draw(module)

    assert picture == optimizer.draw(module)
    assert ElementTree.fromstring(picture).tag == f"{SVG}svg"
    assert not any(word in picture for word in ("href", "url(", "script", "@import"))


def test_long_names_keep_their_ends() -> None:
    model = nn.Sequential(OrderedDict({f"{'a' * 50}_end": nn.Linear(2, 2)}))

    assert f"…{'a' * 29}_end" in boxes(optimizer.draw(optimizer.capture(model)))


def test_a_model_that_is_no_graph_is_refused() -> None:
    with pytest.raises(InputError, match=r"pass optimizer\.capture"):
        optimizer.draw(nn.ReLU())  # type: ignore[arg-type]
