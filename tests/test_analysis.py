"""What is said to be alive, computed, moved and launched, against counts by hand and by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import models
import optimizer
from optimizer.analysis import Ceilings, Cost, roofline
from tests.single_pass import Forward, rows

SLOW = Ceilings(flops=100.0, bytes=10.0)
KIB = torch.zeros(256)  # 1024 bytes
IMPLICIT = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
SMALL = ("toy_model", "simple_mlp", "masked_assign_where", "transpose_chain_10")
PEAKS = {
    # 1: a; 2: a, through a view; 3: a and b; 4: a, b and c, as the view is read; 5: c.
    "a view": ("a = x + 1; v = a.view(16, 16); b = x * 2; return b.view(16, 16) - v", 3, 1),
    "a view that is read first":
        ("a = x + 1; return a.view(16, 16).cos().sin().view(-1) + a", 3, 1),
    "unread": ("x.exp(); return x.sin()", 1, 1),
    "in place": ("x.cos().relu_().neg_()", 1, 1),
    "returned early": ("y = x.cos(); return y, y.sin().exp().tan()", 3, 2),
}  # fmt: skip


@rows("forward peak last", PEAKS)
def test_a_storage_lives_until_its_last_reader(forward: str, peak: int, last: int) -> None:
    found = roofline(Forward(forward), KIB, SLOW)

    assert found.peak == peak * 1024
    assert found.rows[-1].live == last * 1024
    assert sum(row.made for row in found.rows) >= found.peak


def loaded(name: str, optimized: bool) -> tuple[nn.Module, Any]:
    work = models.load(name)
    if optimized:
        return optimizer.optimize(work.module, work.example_inputs, level=1), work.example_inputs
    return work.module, work.example_inputs


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("optimized", [False, True])
def test_a_run_takes_what_is_alive(name: str, optimized: bool) -> None:
    module, inputs = loaded(name, optimized)

    found = roofline(module, inputs, SLOW)
    measured = optimizer.measure(module, inputs, repeats=1, warmup=1).peak_memory

    assert 1.1 * found.peak >= measured >= found.peak > 0


def test_a_node_of_which_nothing_is_known_says_so() -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model, inputs = nn.Sequential(nn.Linear(4, 4), hooked), torch.zeros(2, 4)

    cost = roofline(model, inputs, SLOW)

    assert [row.node for row in cost.rows if row.unknown] == ["_1"]
    assert [row.bound(SLOW) for row in cost.rows] == ["", "memory", "unknown", ""]
    assert "1 nodes of which nothing is known" in cost.totals()
    assert cost.peak == 32
    assert "hooks" in str(cost)


WORK = {
    "linear": (torch.inference_mode()(lambda: nn.Linear(256, 1, bias=False))(), 512, 513, 1),
    "in place": (Forward("x.cos().relu_()"), 0, 512 + 512, 2),
    "views": (Forward("x.view(16, 16).t().unsqueeze(0)"), 0, 0, 0),
    "empty": (Forward("torch.empty_like(x).squeeze_()"), 0, 0, 0),
    "expanded": (Forward("x[:1].expand(0).exp(); return x[:2].expand(8, 2) + 1"), 0, 2 + 16, 2),
}


@rows("model flops tensors launches", WORK)
def test_what_operators_compute_and_move(model, flops, tensors, launches):
    found = roofline(model, KIB[None] if isinstance(model, nn.Linear) else KIB, SLOW)

    assert (found.flops, found.bytes, found.launches) == (flops, 4 * tensors, launches)


def test_the_ceiling_that_is_reached_bounds_the_time() -> None:
    rows = Cost(flops=200, bytes=10, launches=1), Cost(flops=10, bytes=20, launches=1), Cost()

    assert [row.seconds(SLOW) for row in rows] == [2.0, 2.0, 0.0]
    assert [row.bound(SLOW) for row in rows] == ["compute", "memory", ""]


def kernels_run(module, inputs):
    """The outermost operators that are not made of others, without views and empty tensors."""
    overloads = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=overloads)
    with torch.no_grad(), profiler as seen, record_function("model"):
        module(*inputs)
    pending = [event for event in seen.events() if event.name == "model"]
    found = []
    while pending:
        event = pending.pop()
        name = ".".join(filter(None, (event.name, event.overload_name)))
        if not event.name.startswith("aten::") or name in IMPLICIT:
            pending += event.cpu_children
        elif not is_view(name) and "empty" not in name and "scalar_tensor" not in name:
            found.append(name)
    return found


def is_view(name):
    operator, _, overload = name.partition(".")
    shared = [each.alias_info for each in torch._C._get_schema(operator, overload).returns]
    hidden = name in ("aten::_unsafe_view", "aten::_reshape_alias")
    return hidden or all(info is not None and not info.is_write for info in shared)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x1_0", "masked_postprocess_256"])
def test_as_many_kernels_as_the_profiler_sees(name: str, optimized: bool) -> None:
    module, inputs = loaded(name, optimized)

    assert roofline(module, inputs, SLOW).launches == len(kernels_run(module, inputs))


def test_flops_are_those_of_torch() -> None:
    module, inputs = loaded("resnet18", False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*inputs)

    assert roofline(module, inputs, SLOW).flops == counter.get_total_flops()
