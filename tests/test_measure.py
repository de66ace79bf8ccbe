"""Latency and peak memory: exact on the CPU, through a fake elsewhere, and nothing left behind."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from optimizer import Comparison, DeviceError, InputError, Measurement, compare, measure
from optimizer.testing import untouched
from tests.internals import Cuda, Mps, Spread, device_of
from tests.internals import measure as measuring
from tests.repository import table
from tests.single_pass import Forward

FLOATS = torch.linspace(-1, 1, 1000)
KILOBYTES_4 = 4000  # of 1000 floats
PICKY = Forward("torch._assert(False, '\\none\\nand a second line')")
# It writes a buffer, replaces another, changes its mode, and draws random numbers.
COUNTS_CALLS = Forward(
    "m.a.add_(1), setattr(m, 'b', m.b + 1), m.train(not m.training), torch.rand_like(x)",
    a=torch.zeros(()),
    b=torch.zeros(()),
)


@table(
    "module expected",
    (nn.Identity(), 0),
    # Never more than two results are alive at once.
    (Forward("return x.relu().relu().relu().relu()"), 2 * KILOBYTES_4),
    # It frees what it allocated before it returns a single number.
    (Forward("torch.cat([x, x]).sum()"), 2 * KILOBYTES_4 + 4),
    (nn.Linear(1000, 500, bias=False), 2000),
    (Forward("x.cos() if torch.is_grad_enabled() else x.sum()"), 4),
)
def test_peak_memory_is_exact_to_the_byte_and_without_weights_and_inputs(module, expected, capfd):
    assert measure(module, FLOATS, repeats=1, warmup=1).peak_memory == expected
    assert capfd.readouterr() == ("", "")


@table("count low high", (1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (2000, 955, 1044))
def test_the_interval_of_a_spread_is_that_of_the_sign_test(count, low, high):
    spread = Spread.of([*reversed(range(count))])
    assert (spread.median, spread.low, spread.high) == ((count - 1) / 2, low, high)


def test_a_measurement_has_as_many_samples_as_repeats_and_prints_units_that_suit():
    found = measure(nn.ReLU(), FLOATS, repeats=7)
    assert len(found.latency.samples) == 7
    assert 0 < found.latency.low <= found.latency.median <= found.latency.high
    assert str(found).endswith("peak memory 3.906 KiB, cpu")
    told = str(Measurement(Spread(0.0123, 2e-6, 3.0, ()), 5 * 2**30, "cpu"))
    assert told == "12.3 ms [2 us, 3 s], peak memory 5 GiB, cpu"


@table("low high verdict", (1.1, 1.3, "faster"), (0.7, 0.9, "slower"), (0.9, 1.1, "no difference"))
def test_a_verdict_needs_the_whole_interval_on_one_side_of_one(low, high, verdict):
    side = Measurement(Spread(1.0, 1.0, 1.0, ()), 0, "cpu")
    comparison = Comparison(Spread(1.2, low, high, (1.2,) * 6), side, side)
    told = f"{verdict}: speed-up 1.200 [{low:.3f}, {high:.3f}], 1 s -> 1 s"
    assert str(comparison).startswith(told)


def test_a_comparison_pairs_the_calls_of_each_round(monkeypatch):
    slow, fast = nn.ReLU(), nn.Identity()
    order = []

    def timed(module, call, device):
        order.append(module)
        return 2.0 * len(order) if module is slow else 1.0 * len(order)

    monkeypatch.setattr(measuring, "_timed", timed)
    comparison = compare(slow, fast, FLOATS, rounds=6)

    assert order == [slow, fast, fast, slow] * 6
    assert comparison.speedup.samples == (2.0,) * 6  # a steady drift of the machine cancels
    assert len(comparison.model.latency.samples) == len(comparison.fast.latency.samples) == 12
    assert (comparison.model.peak_memory, comparison.fast.peak_memory) == (KILOBYTES_4, 0)
    assert len(compare(slow, slow, FLOATS, rounds=6).speedup.samples) == 6


@table("module mode", (nn.BatchNorm1d(4), 0), (COUNTS_CALLS, 0), (Forward("x.add_(1)"), 1))
def test_nothing_is_left_behind(module, mode):
    x = torch.ones(8, 4)
    with untouched(module), torch.inference_mode(bool(mode)):
        measure(module, x, warmup=1, repeats=1)  # and one call for memory: an odd number

    assert module.training
    assert torch.is_grad_enabled()
    assert torch.equal(x, torch.ones(8, 4))


def test_nothing_is_left_behind_where_the_model_rejects_its_inputs():
    gradients, module = [], nn.Sequential(nn.BatchNorm1d(4), PICKY)
    module.register_forward_pre_hook(lambda *call: gradients.append(torch.is_grad_enabled()))
    with untouched(module), pytest.raises(InputError):
        measure(module, torch.ones(8, 4))
    assert gradients == [False]


REJECTED = "the Forward rejects these example inputs (AssertionError: one): pass"


@table(
    "ask message",
    (lambda: measure(PICKY, FLOATS), REJECTED),
    (lambda: measure(PICKY, FLOATS, warmup=0), "warmup is 0: pass a whole number of at least"),
    (lambda: measure(PICKY, FLOATS, repeats=1.5), "repeats is 1.5: pass a whole number"),
    (lambda: compare(PICKY, PICKY, FLOATS, rounds=5), "rounds is 5: pass a whole number of at le"),
    (lambda: measure(nn.Linear(2, 2, device="meta"), FLOATS), "on the meta device"),
)
def test_bad_arguments_are_a_sentence_with_the_reason(ask, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_the_device_is_that_of_a_tensor_off_the_cpu_and_one_that_can_be_measured():
    for name in ("cpu", "cuda:1", "mps"):
        tensors = [FLOATS, Mock(device=torch.device(name)), FLOATS]
        assert device_of(tensors).name == name
    with pytest.raises(DeviceError, match="'meta' is not a device that can be measured: use cpu,"):
        device_of([FLOATS.to("meta")])


def test_a_device_is_waited_for_before_and_after_each_timed_call(monkeypatch):
    device = Mock(**{"peak_memory.return_value": 12345})
    device.name = "fake:7"
    monkeypatch.setattr(measuring, "device_of", lambda tensors: device)
    found = measure(nn.ReLU(), FLOATS, repeats=2)

    asked = [name for name, *_ in device.mock_calls]
    assert asked == ["synchronize"] * 4 + ["peak_memory"]
    assert (found.peak_memory, found.device) == (12345, "fake:7")


def test_cuda_reports_the_allocator_peak_above_what_was_held_before(monkeypatch):
    held = {"memory_allocated.return_value": 1000, "max_memory_allocated.return_value": 1700}
    cuda = Mock(**held)
    for name in ("synchronize", "reset_peak_memory_stats", *(name[:-13] for name in held)):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    peak = Cuda(1).peak_memory(lambda: cuda.run(Cuda.is_measured))

    asked = [name for name, *_ in cuda.mock_calls]
    assert peak == 700
    assert asked.index("reset_peak_memory_stats") < asked.index("run")
    cuda.run.assert_called_with(True)
    with pytest.raises(ZeroDivisionError):
        Cuda(1).peak_memory(lambda: 1 / 0)
    assert not Cuda.is_measured


def test_mps_reads_what_is_allocated_after_each_operator(monkeypatch):
    readings = iter([1000, 1100, 1900, 1200])
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(readings))
    assert Mps().peak_memory(lambda: torch.ones(3).neg().exp()) == 900
