"""What programs took that do the same, side by side."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from optimizer._device import device_of
from optimizer._trees import tensors_in

_MOMENT = 1e-3  # seconds: shorter ones say more of the clock and the machine
SHORT = 0.05  # seconds that a race may take in any case, and takes before it is clear
BRIEF = 0.02  # the same for one region of several
_CLEARLY = 0.9  # of the time of any other, at most


class Times:
    """What calls with some inputs took, by the name of the program.

    What disturbs the machine lasts longer than a moment: before `enough` seconds, nothing is clear.
    """

    def __init__(self, inputs: Sequence[Any], enough: float = SHORT) -> None:
        self.inputs, self.enough = inputs, enough
        self.wait = device_of(tensors_in(inputs)).synchronize
        self.seconds = defaultdict[str, list[float]](list)
        self.first: dict[str, Any] = {}  # what the first call of each returned
        self.spent = 0.0

    def run(self, name: str, program: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """A call with inputs like these; it counts where it fills a moment."""
        self.wait()
        start = time.perf_counter()
        result = program(*inputs)
        self.wait()
        elapsed = time.perf_counter() - start
        if elapsed >= _MOMENT:
            self._note(name, elapsed, 1)
        self.first.setdefault(name, result)
        return result

    def add(self, name: str, program: Callable[..., Any]) -> None:
        """What a call takes, on average over as many as fill a moment."""
        self.wait()
        calls, start, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < _MOMENT:
            program(*self.inputs)
            self.wait()
            calls, elapsed = calls + 1, time.perf_counter() - start
        self._note(name, elapsed, calls)

    def _note(self, name: str, elapsed: float, calls: int) -> None:
        self.seconds[name].append(elapsed / calls)
        self.spent += elapsed

    def rounds(self, names: Iterable[str]) -> int:
        """How often each of them was timed, at least."""
        return min(len(self.seconds[name]) for name in names)

    def medians(self, names: Iterable[str]) -> dict[str, float]:
        """Seconds of a call."""
        return {name: median(self.seconds[name]) for name in names}

    def are_clear(self, names: Iterable[str]) -> bool:
        """Whether no time of the fastest comes near to any of another."""
        if self.spent < self.enough:
            return False
        best, *others = sorted(names, key=lambda name: median(self.seconds[name]))
        return all(self.is_clearly_faster(best, other) for other in others)

    def is_clearly_faster(self, name: str, other: str) -> bool:
        """Whether no time of the one comes near to any of the other, of at least two each."""
        one, two = self.seconds[name], self.seconds[other]
        return min(len(one), len(two)) > 1 and max(one) <= _CLEARLY * min(two)
