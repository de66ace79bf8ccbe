"""What level 2 does on a device that is not here: the device is faked, the rest is real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optimizer.core.device import Device
from optimizer.core.errors import Refused
from optimizer.core.inputs import Call
from optimizer.lowering import choose as _choose
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, POLICIES, Policy, require_one_device
from optimizer.lowering.choose import Times
from optimizer.lowering.trace import straight_line
from optimizer.verify.equivalence import BOUNDS
from tests.level_2 import (
    Running,
    chosen,
    last_wins,
    lowered,
    plan_of,
    pretend,
    racing,
)


@pytest.fixture(params=["cuda", "mps"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pretended(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tensors on the CPU count as being on another device."""
    pretend(monkeypatch, kind)
    racing(monkeypatch, last_wins)
    before = torch.backends.cuda.matmul.allow_tf32
    yield kind
    torch.backends.cuda.matmul.allow_tf32 = before


on_cuda, on_mps = (pytest.mark.parametrize("kind", [kind]) for kind in ("cuda", "mps"))


def convolution() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 9, 9)


@on_mps
def test_on_mps_no_layout_and_no_kernel_is_tried(
    pretended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_choose, "CANDIDATES", {AS_IT_IS: CANDIDATES[AS_IT_IS]})
    model, x = convolution()
    fast = lowered(model, x)

    assert chosen(fast) == [AS_IT_IS]
    assert not fast.report.choices[0].rejected
    assert plan_of(fast, x) is not None  # fewer calls, which were measured to pay
    assert torch.equal(fast(x), model(x))
    assert plan_of(lowered(model, x, tune_seconds=0), x) is None


@on_cuda
def test_kernels_of_another_precision_or_gpu_are_another_plan(
    pretended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = convolution()
    fast = lowered(model, x)
    assert plan_of(fast, x) is not None

    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
    assert plan_of(fast, x) is not None
    assert len(fast._plans) == 2
    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert lowered(model, x).report.choices[0].key != fast.report.choices[0].key


@pytest.mark.parametrize(
    ("groups", "dtype", "pays"),
    [
        (1, torch.float32, False),
        (1, torch.bfloat16, True),
        (1, torch.float16, True),
        (2, torch.bfloat16, False),
    ],
)
def test_without_timing_layouts_are_chosen_where_they_are_known_to_pay(
    groups: int, dtype: torch.dtype, pays: bool
) -> None:
    model, x = nn.Conv2d(4, 4, 3, groups=groups), torch.randn(2, 4, 6, 8)
    region = straight_line(model, list(model.parameters()), Call((x,), {})).module

    assert POLICIES["cuda"].pays(region, [x.to(dtype)]) is pays


@on_cuda
@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1 + 1e-5, False)])
def test_rounding_beyond_the_bound_is_judged_by_float64(
    pretended: str, monkeypatch: pytest.MonkeyPatch, factor: float, accepted: bool
) -> None:
    def otherwise_rounded(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((F.conv2d(x.double(), model.weight.double()) * factor).float(),)

    model, x = nn.Conv2d(3, 8, 3, bias=False).eval(), torch.randn(2, 3, 9, 9)
    monkeypatch.setitem(CANDIDATES, "channels_last", lambda *given: Running(otherwise_rounded))
    monkeypatch.setitem(BOUNDS, torch.float32, 0.0)
    report = lowered(model, x, check=None).report
    choice = next(iter(report.choices or report.tried))

    assert ("channels_last" not in choice.rejected) is accepted


def test_on_an_unknown_device_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(POLICIES, "cpu")
    model, x = convolution()
    fast = lowered(model, x)

    assert plan_of(fast, x) is None
    assert any("not lowered" in remark for remark in fast.report.remarks)
    with pytest.raises(Refused, match="nothing is known of its device"):
        require_one_device([x])


def test_tensors_on_several_devices_are_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    x, elsewhere = torch.ones(2), torch.ones(2, device="meta")

    require_one_device([x, torch.ones(3)])
    with pytest.raises(Refused, match="several devices"):
        require_one_device([x, elsewhere])

    monkeypatch.setitem(POLICIES, "meta", Policy())
    require_one_device([torch.tensor(1.0), elsewhere])  # a number goes with any device


def test_a_race_ends_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(Device):
        def synchronize(self) -> None:
            events.append("wait")

    events: list[str] = []
    monkeypatch.setattr(_choose, "device_of", lambda tensors: Clock())
    Times((torch.ones(1),)).race({"one": lambda x: events.append("run")}, 0, fewest=1)

    assert events[:3] == ["wait", "run", "wait"]
