"""The change that some rounds show, whatever a few of their processes met.

A logarithm is the level of its round, plus the change where it is the new version's, plus noise.
Least squares fit that by Tukey's biweight (Beaton and Tukey, 1974; Huber and Ronchetti, Robust
Statistics, 2009, chapter 7): a process weighs the less the further it is off, and from six times
the noise on nothing. Trimming rounds instead leaves too few of eight: where one process in ten
meets a spike, one round in four has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rounds import AGAIN, BASE, NEW

_FAR = 6.0  # times the noise: what weighs nothing
_PASSES = 4
_OF_THREE = 0.692  # the median distance of two from the middle one of three, where the noise is 1
_OF_STEPS = 0.6745 * math.sqrt(1.5)  # the median distance of a step, likewise
_LEAST = 1e-12  # a noise, and a weight, by which one may divide


@dataclass(frozen=True)
class Fit:
    """The change of the logarithm, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    degrees: float


def fit(rounds: Sequence[dict[str, float]]) -> Fit:
    """Fit the change, beginning at medians."""
    logs = np.log([[each[role] for role in (BASE, AGAIN, NEW)] for each in rounds])
    rest, usual = _at_medians(logs)
    noise = np.full(3, usual)
    for _ in range(_PASSES):
        weights = np.maximum(1 - (rest / (_FAR * noise)) ** 2, math.sqrt(_LEAST)) ** 2
        steps, shares = _steps(logs, weights)
        mean = float(np.average(steps, weights=shares))
        noise[2] = max(usual, np.median(abs(steps - np.median(steps))) / _OF_STEPS)
        rest = logs - [0, 0, mean]
        rest -= np.average(rest, axis=1, weights=weights)[:, None]
    degrees = max(float(weights.sum()) - len(rest) - 1, 1.0)
    pooled = math.sqrt((weights * rest**2).sum() / degrees / shares.sum())
    return Fit(mean, max(pooled, _of_steps(steps - mean, shares)), degrees)


def _at_medians(logs: Any) -> tuple[Any, float]:
    """What the medians of the change and of each round leave, and how large that usually is."""
    rest = logs - [0, 0, np.median(logs[:, 2:] - logs[:, :2])]
    rest -= np.median(rest, axis=1, keepdims=True)
    of_two = np.sort(abs(rest), axis=None)[len(rest) :]  # that of the middle one is 0
    return rest, max(float(np.median(of_two)) / _OF_THREE, _LEAST)


def _steps(logs: Any, weights: Any) -> tuple[Any, Any]:
    """Of each round, new over base, and what that weighs."""
    base, new = weights[:, :2].sum(axis=1), weights[:, 2]
    steps = logs[:, 2] - np.average(logs[:, :2], axis=1, weights=weights[:, :2])
    return steps, base * new / (base + new)


def _of_steps(errors: Any, shares: Any) -> float:
    """The standard error that the rounds alone show, for a new version that is the noisier one."""
    count = len(shares)
    return math.sqrt(((shares * errors) ** 2).sum() * count / (count - 1)) / float(shares.sum())
