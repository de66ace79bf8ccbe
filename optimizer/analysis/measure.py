"""Latency and peak memory of a module, alone and against another, on cpu, cuda or mps.

Peak memory is the most bytes held at once during one forward above what was allocated before it.
Weights and inputs are there before; the output is part of it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from optimizer.core.context import forked_rng, undisturbed
from optimizer.core.device import Device, device_of
from optimizer.core.errors import REJECTED, InputError, raised_as
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module, tensors_in

_WARMUP = 3
FEWEST_ROUNDS = 6  # of fewer, not even the whole range holds the median with 95 % confidence


@dataclass(frozen=True)
class Spread:
    """Samples, their median, and the interval that holds the true median with 95 % confidence.

    The interval is read off the ordered samples, so it assumes nothing of their distribution. Of
    fewer than 6 samples it is the whole range, which is then less sure.
    """

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        ordered, count = sorted(samples), len(samples)
        # The median is below the k + 1st of `count` samples as often as at most k of so many tossed
        # coins show heads: in at most 1 of 40 cases, then, and as often above.
        outcomes = itertools.accumulate(math.comb(count, heads) for heads in range(count))
        skipped = max(0, sum(ways <= (1 << count) // 40 for ways in outcomes) - 1)
        return cls(median(ordered), ordered[skipped], ordered[-1 - skipped], tuple(samples))


@dataclass(frozen=True)
class Measurement:
    """What one forward costs: `latency` in seconds, `peak_memory` in bytes, on `device`."""

    latency: Spread
    peak_memory: int
    device: str

    def __str__(self) -> str:
        spread = self.latency
        times = f"{_time(spread.median)} [{_time(spread.low)}, {_time(spread.high)}]"
        return f"{times}, peak memory {_size(self.peak_memory)}, {self.device}"


@dataclass(frozen=True)
class Comparison:
    """Two modules on the same inputs. `speedup` is time of `model` over time of `fast`."""

    speedup: Spread
    model: Measurement
    fast: Measurement

    @property
    def verdict(self) -> str:
        """Return 'faster' or 'slower' if the speed-up's interval says so, else 'no difference'."""
        if self.speedup.low > 1:
            return "faster"
        return "slower" if self.speedup.high < 1 else "no difference"

    def __str__(self) -> str:
        times = f"{_time(self.model.latency.median)} -> {_time(self.fast.latency.median)}"
        sizes = f"{_size(self.model.peak_memory)} -> {_size(self.fast.peak_memory)}"
        ratio = self.speedup
        more = "; more rounds tell a smaller one" if self.verdict == "no difference" else ""
        return (
            f"{self.verdict}: speed-up {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}],"
            f" {times}, peak memory {sizes}, {self.model.device}, {len(ratio.samples)} rounds{more}"
        )


def measure(
    module: nn.Module, example_inputs: ExampleInputs, *, repeats: int = 20, warmup: int = _WARMUP
) -> Measurement:
    """Call `module` `warmup` times unmeasured, then `repeats` times timed, then once for memory.

    The module runs in the mode it is in, without gradients, on fresh copies of the inputs; its
    buffers and the random state are as before afterwards.

    Args:
        module: any module that the inputs can be passed to.
        example_inputs: a tensor, a tuple of positional, or a mapping of keyword arguments. The
            device that they, else the module's weights, are on is the one measured.
        repeats: how many calls are timed, at least 1.
        warmup: how many calls go before, at least 1, so that no lazy set-up is measured.

    Raises:
        InputError: an argument cannot be used, or the module rejects the inputs.
        DeviceError: the inputs are on a device that cannot be measured.
    """
    require_at_least(1, repeats=repeats, warmup=warmup)
    _, (measurement,) = _rounds([module], example_inputs, [0], repeats, warmup)
    return measurement


def compare(
    model: nn.Module, fast: nn.Module, example_inputs: ExampleInputs, *, rounds: int = 20
) -> Comparison:
    """Time two modules against one another, and take the peak memory of each.

    Each round calls model, fast, fast, model, so that a drift of the machine meets both alike, and
    gives one ratio; the speed-up is their median. Its interval speaks of this process: another one
    may differ by more. Outputs are not compared: see `check`.

    Args:
        model: the module to compare with.
        fast: the module that is hoped to be faster.
        example_inputs: as for `measure`.
        rounds: how many ratios are taken, at least 6.

    Raises:
        InputError: an argument cannot be used, or a module rejects the inputs.
        DeviceError: the inputs are on a device that cannot be measured.
    """
    require_at_least(FEWEST_ROUNDS, rounds=rounds)
    times, sides = _rounds([model, fast], example_inputs, [0, 1, 1, 0], rounds, _WARMUP)
    ratios = [(first + last) / (second + third) for first, second, third, last in times]
    return Comparison(Spread.of(ratios), *sides)


def require_at_least(fewest: int, **counts: int) -> None:
    """Raise InputError if a count, by its name, is less."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < fewest:
            raise InputError(f"{name} is {count!r}: pass a whole number of at least {fewest}.")


def _rounds(
    modules: list[nn.Module], inputs: ExampleInputs, order: list[int], rounds: int, warmup: int
) -> tuple[list[list[float]], list[Measurement]]:
    """Return the seconds of the calls of each round, in this order, and what each module took."""
    weights = [each for module in modules for each in require_module(module).parameters()]
    call = as_call(inputs)
    device = device_of([*tensors_in(call), *weights])
    with _as_before(*modules):
        for module in modules:
            for _ in range(warmup):
                args, kwargs = call.copied()
                with raised_as(InputError, REJECTED.format(type(module).__name__)):
                    module(*args, **kwargs)
        times = [[_timed(modules[i], call, device) for i in order] for _ in range(rounds)]
        measurements = []
        for number, module in enumerate(modules):
            with undisturbed():  # so that nothing older is freed meanwhile
                args, kwargs = call.copied()
                peak = device.peak_memory(partial(module, *args, **kwargs))
            samples = [row[i] for row in times for i, which in enumerate(order) if which == number]
            measurements.append(Measurement(Spread.of(samples), peak, device.name))
        return times, measurements


@contextlib.contextmanager
def _as_before(*modules: nn.Module) -> Iterator[None]:
    """Run without gradients; restore modes, buffers and the random state after."""
    parts = [part for module in modules for part in module.modules()]
    states = [(part, part.training, dict(part._buffers)) for part in parts]
    values = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    with forked_rng(), torch.no_grad():
        try:
            yield
        finally:
            for part, training, buffers in states:
                part.training = training
                for name, buffer in buffers.items():  # TorchScript's table has no update
                    part._buffers[name] = buffer
            for buffer, value in values.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _timed(module: nn.Module, call: Call, device: Device) -> float:
    args, kwargs = call.copied()
    device.synchronize()
    start = time.perf_counter()
    output = module(*args, **kwargs)
    device.synchronize()
    seconds = time.perf_counter() - start
    del output  # only now: freeing it is not part of the forward
    return seconds


def _time(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
    return f"{seconds / scale:.3g} {unit}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
