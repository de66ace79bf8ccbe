"""One generated model, given to a function from a module and its inputs to a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from optimizer.core.errors import OptimizerWarning
from optimizer.testing._assemble import Spec
from optimizer.testing._later import LATER_CALLS, later_calls
from optimizer.testing._on_disk import on_disk
from optimizer.testing._oracles import assert_equivalent, assert_same_bits, untouched
from optimizer.testing._report import Counterexample

Subject: TypeAlias = Callable[[nn.Module, tuple[torch.Tensor, ...]], nn.Module]


def check_spec(
    spec: Spec,
    subject: Subject,
    *,
    exact: bool = False,
    dtype: torch.dtype = torch.float64,
    later: bool | tuple[str, ...] = False,
) -> nn.Module:
    """Build the model of `spec`, give it to `subject`, and compare what comes back.

    Args:
        spec: the model and its data.
        subject: makes the candidate; must leave the model, the inputs and the random state alone.
        exact: demand the same bits whatever the data; else see `assert_equivalent`.
        dtype: of parameters and inputs. Only `exact` makes sense below float64.
        later: make those of `LATER_CALLS` too that the spec's seed chooses, or those that are
            named, but for those that a pass which fired does not hold for.

    Returns:
        The candidate.

    Raises:
        Counterexample: the subject raised, touched what it was given, left a pass of this package
            out, which that warns of and reports, or the candidate differs. Its text is a report
            that begins with a test to paste.
    """
    model, inputs = spec.build(dtype), spec.inputs(dtype)
    calls = later if isinstance(later, tuple) else later_calls(spec) if later else ()
    retry = partial(check_spec, subject=subject, exact=exact, dtype=dtype, later=later)
    suspect = Counterexample(spec, subject, retry, exact=exact, dtype=dtype, later=calls)
    try:
        with on_disk(suspect.reproducer), spec.surroundings(), warnings.catch_warnings():
            warnings.simplefilter("error", OptimizerWarning)
            nothing_said_of_the_model()
            candidate = _judged(model, inputs, subject, exact)
            promised = _promised(candidate)
            for call in (each for each in calls if each not in promised):
                LATER_CALLS[call](model, candidate, inputs, exact=exact)
    except Exception as error:
        suspect.__cause__ = error
    else:
        return candidate
    # Hypothesis tells failures apart by their context and the line that raised it, which in code
    # that torch.fx makes has another file name each time.
    kind = type(suspect.__cause__)
    suspect.__context__ = kind.__new__(kind)
    raise suspect


def _promised(candidate: nn.Module) -> tuple[str, ...]:
    """The later calls that the caller promised not to make, as the docstring of a pass says."""
    report = getattr(candidate, "report", None)
    return ("not finite",) if report and "recognize_attention" in report.counts() else ()


def _judged(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], subject: Subject, exact: bool
) -> nn.Module:
    kept = [tensor.clone() for tensor in inputs]
    with untouched(model):
        candidate = subject(model, inputs)
    remarks = getattr(getattr(candidate, "report", None), "remarks", ())
    undone = [remark for remark in remarks if "rolled back" in remark]
    assert not undone, undone[0]
    for actual, expected in zip(inputs, kept, strict=True):
        assert_same_bits(actual, expected, "the subject overwrote its inputs")
    assert_equivalent(model, candidate, inputs, exact=exact)
    return candidate


def nothing_said_of_the_model() -> None:
    """Ignore warnings about what some words do, whatever filters there are."""
    # A model in training mode; an RMSNorm in float32, after a layer in bfloat16 under autocast.
    for said in ("the model is in training mode", "Mismatch dtype between input and weight"):
        warnings.filterwarnings("ignore", said)
