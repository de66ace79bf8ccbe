"""Latency and peak memory: exact on the CPU, through a fake elsewhere, and nothing left behind."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from optimizer.analysis import measure as _measure
from optimizer.analysis.measure import Comparison, Measurement, Spread, compare, measure
from optimizer.core import device as _device
from optimizer.core.device import Cuda, Device, Mps, device_named
from optimizer.core.errors import DeviceError, InputError
from optimizer.testing import untouched
from tests.repository import table
from tests.single_pass import Forward

FLOATS = torch.linspace(-1, 1, 1000)
KILOBYTES_4 = 4000  # of 1000 floats


class CountsCalls(nn.Module):
    """Replaces one buffer, writes another, changes its mode, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.training = not self.training
        return x + torch.rand_like(x)


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("only squares\nand a second line")


@table(
    "module expected",
    (nn.Identity(), 0),
    (nn.ReLU(), KILOBYTES_4),
    # Never more than two results are alive at once.
    (Forward("return x.relu().relu().relu().relu()"), 2 * KILOBYTES_4),
    # It frees what it allocated before it returns a single number.
    (Forward("torch.cat([x, x]).sum()"), 2 * KILOBYTES_4 + 4),
    (nn.ReLU(inplace=True), 0),
    (nn.Linear(1000, 500, bias=False), 2000),
)
def test_peak_memory_is_exact_to_the_byte_and_without_weights_and_inputs(module, expected):
    for _ in range(2):
        assert measure(module, FLOATS, repeats=1, warmup=1).peak_memory == expected


def test_peak_memory_on_the_cpu_counts_a_workspace_inside_one_operator():
    scores = torch.randn(1000)
    held = Device().peak_memory(lambda: torch.sort(scores))

    assert held > 4000 + 8000  # values and indices, and what sorting needed beside them


def test_measuring_the_cpu_is_silent(capfd):
    measure(nn.ReLU(), FLOATS, repeats=1)

    assert capfd.readouterr() == ("", "")


@table(
    "count low high",
    *[(1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (20, 5, 14), (2000, 955, 1044)],
)
def test_the_interval_of_a_spread_is_that_of_the_sign_test(count, low, high):
    spread = Spread.of(range(count))

    assert (spread.low, spread.high) == (low, high)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, (3.0, 1.0, 2.0))  # as they came


def test_a_measurement_has_as_many_samples_as_repeats_and_says_what_it_found():
    found = measure(nn.ReLU(), FLOATS, repeats=7)

    assert len(found.latency.samples) == 7
    assert 0 < found.latency.low <= found.latency.median <= found.latency.high
    assert str(found).endswith("peak memory 3.906 KiB, cpu")


def test_a_measurement_prints_units_that_suit_its_size():
    told = str(Measurement(Spread(0.0123, 2e-6, 3.0, ()), 5 * 2**30, "cpu"))

    assert told == "12.3 ms [2 us, 3 s], peak memory 5 GiB, cpu"


@table("low high verdict", (1.1, 1.3, "faster"), (0.7, 0.9, "slower"), (0.9, 1.1, "no difference"))
def test_a_verdict_needs_the_whole_interval_on_one_side_of_one(low, high, verdict):
    side = Measurement(Spread(1.0, 1.0, 1.0, ()), 0, "cpu")
    comparison = Comparison(Spread(1.2, low, high, (1.2,) * 6), side, side)

    assert comparison.verdict == verdict
    told = f"{verdict}: speed-up 1.200 [{low:.3f}, {high:.3f}], 1 s -> 1 s"
    assert str(comparison).startswith(told)
    advised = str(comparison).endswith("6 rounds; more rounds tell a smaller one")
    assert advised is (verdict == "no difference")


def test_a_comparison_pairs_the_calls_of_each_round(monkeypatch):
    slow, fast = nn.ReLU(), nn.Identity()
    order = []

    def timed(module, call, device):
        order.append(module)
        return 2.0 * len(order) if module is slow else 1.0 * len(order)

    monkeypatch.setattr(_measure, "_timed", timed)
    comparison = compare(slow, fast, FLOATS, rounds=6)

    assert order == [slow, fast, fast, slow] * 6
    assert comparison.speedup.samples == (2.0,) * 6  # a steady drift of the machine cancels
    assert len(comparison.model.latency.samples) == len(comparison.fast.latency.samples) == 12
    assert (comparison.model.peak_memory, comparison.fast.peak_memory) == (KILOBYTES_4, 0)


def test_a_module_may_be_compared_with_itself():
    module = nn.ReLU()

    assert len(compare(module, module, FLOATS, rounds=6).speedup.samples) == 6


@pytest.mark.parametrize("inputs", [FLOATS, (FLOATS,), [FLOATS], {"input": FLOATS}], ids=type)
def test_inputs_come_in_every_form(inputs):
    assert measure(nn.ReLU(), inputs, repeats=1).peak_memory == KILOBYTES_4


def test_a_model_that_writes_its_input_meets_the_same_input_each_time():
    x = torch.zeros(3)
    measure(Forward("x.add_(1)"), x)

    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), CountsCalls()], ids=type)
def test_buffers_mode_random_state_and_gradient_mode_are_as_before(module):
    gradients, x = [], torch.randn(8, 4) + 3
    module.register_forward_hook(lambda *call: gradients.append(torch.is_grad_enabled()))
    with untouched(module):
        measure(module, x, warmup=1, repeats=1)  # and one call for memory: an odd number

    assert gradients == [False] * 3
    assert module.training
    assert torch.is_grad_enabled()


def test_everything_is_as_before_also_when_the_model_rejects_its_inputs():
    module = nn.Sequential(CountsCalls(), Picky())
    with untouched(module), pytest.raises(InputError):
        measure(module, FLOATS)


@table(
    "arguments message",
    (
        (Picky(), FLOATS),
        "the Picky rejects the example inputs (ValueError: only squares):"
        " pass inputs that it can be called with.",
    ),
    ((None, FLOATS), "model is of type NoneType"),
    ((nn.ReLU(), None), "example_inputs is of type NoneType"),
    ((nn.Linear(2, 2, device="meta"), FLOATS), "on the meta device"),
    ((nn.ReLU(), FLOATS.to("meta")), "on the meta device"),
)
def test_bad_arguments_are_a_sentence_with_the_reason(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        measure(*arguments)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["repeats", "warmup"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_too_few_calls_or_rounds_are_refused_before_any_work(name, value):
    told = f"{name} is {value!r}: pass a whole number of at least 1."
    with pytest.raises(InputError, match=told):
        measure(Picky(), FLOATS, **{name: value})
    with pytest.raises(InputError, match="rounds is 5: pass a whole number of at least 6"):
        compare(Picky(), Picky(), FLOATS, rounds=5)


ABSENT = "is not available here: pass inputs on the cpu, or run on a machine with an"
UNKNOWN = "is not a device that can be measured"


@table(
    "name message",
    ("cuda", f"cuda {ABSENT}"),
    ("mps", f"mps {ABSENT}"),
    ("meta", f"'meta' {UNKNOWN}: use cpu, cuda or mps."),
    ("xla", f"'xla' {UNKNOWN}"),
)
def test_a_device_that_is_absent_is_a_sentence(name, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=message):
        device_named(name)


def test_devices_are_found_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    names = ["cpu", "cuda", "cuda:1", "mps", torch.device("cuda", 2)]

    assert [device_named(name).name for name in names] == [*map(str, names)]


def test_the_device_is_that_of_the_first_tensor_off_the_cpu(monkeypatch):
    monkeypatch.setattr(_device, "device_named", str)
    tensors = [torch.empty(1), torch.empty(1, device="meta")]

    assert [_device.device_of(tensors), _device.device_of([])] == ["meta", "cpu"]


def test_a_device_is_waited_for_before_and_after_each_timed_call(monkeypatch):
    device = Mock(**{"peak_memory.return_value": 12345})
    device.name = "fake:7"
    monkeypatch.setattr(_measure, "device_of", lambda tensors: device)
    found = measure(nn.ReLU(), FLOATS, repeats=2)

    asked = [name for name, *_ in device.mock_calls]
    assert asked == ["synchronize"] * 4 + ["peak_memory"]
    assert (found.peak_memory, found.device) == (12345, "fake:7")


def test_cuda_reports_the_allocator_peak_above_what_was_held_before(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda name: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda name: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda name: 1700)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda name: calls.append(f"reset {name}")
    )
    peak = Cuda(1).peak_memory(lambda: calls.append(f"run {Cuda.is_measured}"))

    assert peak == 700
    assert calls == ["synchronize", "reset cuda:1", "run True"]
    with pytest.raises(ZeroDivisionError):
        Cuda(1).peak_memory(lambda: 1 / 0)
    assert not Cuda.is_measured


def test_mps_reads_what_is_allocated_after_each_operator(monkeypatch):
    readings = iter([1000, 1100, 1900, 1200])
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(readings))
    peak = Mps().peak_memory(lambda: torch.ones(3).neg().exp())

    assert peak == 900
    assert next(readings, None) is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_model_of_torchscript_is_measured():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval())
    with untouched(model):
        assert measure(model, torch.ones(2, 3), repeats=1).latency.median > 0
