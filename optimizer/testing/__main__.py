"""The command line of the kit: `python -m optimizer.testing score | hunt | soak | firing`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from optimizer.testing import _firing, _hunt, _score, _soak
from optimizer.testing._subject import Optimize
from optimizer.testing.motifs import MOTIFS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print what it finds."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m optimizer.testing", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    score = commands.add_parser("score", help="how many examples it takes to find each mutant")
    score.add_argument("mutants", nargs="*", help="their names; all if none are given")
    score.add_argument("--budget", type=int, default=_score.BUDGET, help="examples for each")
    score.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    score.set_defaults(run=_run_score)
    hunt = commands.add_parser("hunt", help="the defects of torch's own tools")
    hunt.add_argument("--target", choices=_hunt.TARGETS, help="one of them; all if not given")
    hunt.add_argument("--examples", type=int, default=120)
    hunt.set_defaults(run=_run_hunt)
    firing = commands.add_parser("firing", help="how often each pass fires, what it refuses")
    firing.add_argument("passes", nargs="*", help="their names; all if none are given")
    firing.add_argument("--examples", type=int, default=200)
    firing.set_defaults(run=_run_firing)
    soak = commands.add_parser("soak", help="how many of very many models are got wrong")
    soak.add_argument("--examples", type=int, default=10_000)
    soak.add_argument("--level", type=int, default=1)
    soak.add_argument("--capture", choices=("symbolic", "export"), default="symbolic")
    soak.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    soak.add_argument("--seed", type=int, default=0, help="other models for another one")
    soak.set_defaults(run=_run_soak)
    return parser


def _run_firing(options: argparse.Namespace) -> int:
    for line in _firing.table(options.passes or MOTIFS, options.examples):
        print(line, flush=True)
    return 0


def _run_hunt(options: argparse.Namespace) -> int:
    targets = [options.target] if options.target else list(_hunt.TARGETS)
    for name in targets:
        print("\n".join(_hunt.listing(name, _hunt.hunt(name, options.examples))), flush=True)
    return 0


def _run_soak(options: argparse.Namespace) -> int:
    subject = Optimize(options.level, capture=options.capture)
    dtype, shown = getattr(torch, options.dtype), 0
    for tally in _soak.soak(subject, options.examples, dtype=dtype, first_seed=options.seed):
        print(*tally.wrong[shown:], tally, sep="\n", flush=True)
        shown = len(tally.wrong)
    return min(shown, 1)


def _run_score(options: argparse.Namespace) -> int:
    for line in _score.table(_score.score(options.mutants, options.budget, options.processes)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
