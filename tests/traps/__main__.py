"""Print the table of docs/traps.md: `python -m tests.traps`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import optimizer
from tests.traps import algebra, capture, folding, layouts, masks, writes
from tests.traps._catalogue import TRAPS, Trap
from tests.traps.elsewhere import NOT_HERE, TESTED

FAMILIES = (folding, writes, algebra, layouts, masks, capture)
HEAD = """# Traps

Ninety-five ways to get a rewrite of a PyTorch graph wrong, and what becomes of each here.
`python -m tests.traps` prints this page; `tests/test_trap_catalogue.py` holds each model to what
eager does, call by call, with and without example inputs.

| # | trap | what becomes of it |
|---|---|---|"""


def table() -> str:
    """The page."""
    models = ((trap.number, trap.what, outcome(optimized(trap))) for trap in TRAPS)
    return "\n".join([HEAD, *map(line, sorted([*models, *others()]))])


def line(row: tuple[int, str, str]) -> str:
    return "| {} | {} | {} |".format(*row)


def optimized(trap: Trap) -> optimizer.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer.optimize(trap.build(), copy.deepcopy(trap.calls[0]), level=1).report


def outcome(report: optimizer.Report) -> str:
    """What the optimizer did, and if nothing, why."""
    if report.fired:
        return "rewritten by " + ", ".join(f"`{name}`" for name in sorted(report.counts()))
    reasons = [refusal.reason for refusal in report.refused] + list(report.remarks)
    return "left alone: " + (
        reasons[0].split("\n")[0] if reasons else "there is nothing to rewrite"
    )


def others() -> Iterator[tuple[int, str, str]]:
    for number, (what, test) in TESTED.items():
        yield number, what, f"tested by `{test}`"
    for number, (what, reason) in NOT_HERE.items():
        yield number, what, f"does not apply: {reason}"


if __name__ == "__main__":
    print(table())
