"""One submodule that cannot be recorded is called as it is, and all around it is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import optimizer
from models._torchvision_import import import_torchvision

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Branching(nn.Module):
    """Its control flow depends on a value, which no graph records."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class Residual(nn.Module):
    """A container whose forward is recorded where that of its body is or is not."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.before(x))


class Looping(nn.Module):
    """Calls its members in turn, `times` times each."""

    def __init__(self, *members: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.members, self.times = nn.ModuleList(members), times

    def forward(self, x: Tensor) -> Tensor:
        for member in self.members:
            for _ in range(self.times):
                x = member(x).relu()
        return x


class Catching(nn.Module):
    """Goes on without a member that fails."""

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.member(x) + 1
        except RuntimeError:
            return x


def shared_twice() -> nn.Module:
    failing = Branching()
    return nn.Sequential(Residual(failing), Residual(failing), nn.Linear(4, 4))


# A model, the calls of submodules in its graph, by name.
NESTED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a grandchild": (
        lambda: nn.Sequential(Residual(Branching()), nn.Linear(4, 4)),
        ["0.before", "0.body", "1"],
    ),
    "five floors down": (
        lambda: Residual(Residual(nn.Sequential(Residual(Residual(Branching())), nn.Tanh()))),
        ["before", "body.before", "body.body.0.before", "body.body.0.body.before",
         "body.body.0.body.body", "body.body.1"],
    ),
    "in a loop over a ModuleList": (
        lambda: Residual(Looping(nn.Linear(4, 4), Branching(), nn.Linear(4, 4))),
        ["before", "body.members.0", "body.members.1", "body.members.2"],
    ),
    "two grandchildren": (
        lambda: nn.Sequential(Residual(Branching()), Residual(nn.Sequential(Branching()))),
        ["0.before", "0.body", "1.before", "1.body.0"],
    ),
    "a shared module, called twice": (
        shared_twice,
        ["0.before", "0.body", "1.before", "0.body", "2"],
    ),
    "a module called again and again": (
        lambda: Looping(Residual(Branching()), times=3),
        ["members.0.before", "members.0.body"] * 3,
    ),
    "where errors are caught": (
        lambda: nn.Sequential(Catching(Residual(Branching())), nn.Linear(4, 4)),
        ["0.member.before", "0.member.body", "1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_only_the_module_that_cannot_be_recorded_is_called_as_it_is(name: str) -> None:
    build, expected = NESTED[name]
    model = build().eval()
    failing = {name for name, each in model.named_modules() if isinstance(each, Branching)}

    graph = optimizer.capture(model, ROWS)

    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == expected
    for x in (ROWS, -ROWS):
        assert torch.equal(graph(x), model(x))
    remarks = optimizer.optimize(model, ROWS, level=0).report.remarks
    assert len(remarks) == len(failing)
    assert all("depends on a traced value" in remark for remark in remarks)


@pytest.mark.parametrize("name", ["mobilevit_xxs", "mobilevitv2_050"])
def test_a_mobilevit_is_recorded_but_for_the_blocks_that_ask_for_sizes(name: str) -> None:
    import_torchvision()
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    blocks = {"stages.2.1", "stages.3.1", "stages.4.1"}

    fast = optimizer.optimize(model, torch.randn(1, 3, 256, 256), level=1)

    assert {remark.split("'")[1] for remark in fast.report.remarks} == blocks
    norms = [name for name, each in fast.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert {".".join(name.split(".")[:3]) for name in norms} == blocks  # all others are folded
