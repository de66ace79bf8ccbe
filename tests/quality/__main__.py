"""How good the fuzz is: `python -m tests.quality score | hunt | soak`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from optimizer.lowering.engines import ENGINES
from optimizer.testing._subject import Optimize
from tests.quality import hunt as _hunt
from tests.quality import score as _score
from tests.quality import soak as _soak
from tests.quality.mutants import catalogue, sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print what it finds; 1 where a mistake survives or a model is wrong."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[..., int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        added.set_defaults(run=run)
        return added

    score = command("score", _run_score, "which mistakes are found, after how many examples")
    score.add_argument("mutants", nargs="*", help="their names; all if none are given")
    finders: dict[str, Any] = {"nargs": "+", "choices": _score.FINDERS}
    in_turn = "who looks for each, the next where one finds nothing"
    score.add_argument("--by", **finders, default=["models"], help=in_turn)
    score.add_argument("--sample", type=int, help="only so many of them")
    score.add_argument("--seed", type=int, default=0, help="other ones for another one")
    score.add_argument("--budget", type=int, default=_score.BUDGET, help="models for each")
    score.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    score.add_argument("--trust", **finders, default=[], help="who passed just before")
    hunt = command("hunt", _run_hunt, "the defects of other tools")
    hunt.add_argument("--target", choices=_hunt.targets(), help="one of them; all if not given")
    hunt.add_argument("--examples", type=int, help="so many; else as many as each target has")
    soak = command("soak", _run_soak, "how many of very many models are got wrong")
    soak.add_argument("--examples", type=int, default=10_000)
    soak.add_argument("--level", type=int, default=1)
    soak.add_argument("--engines", choices=("auto", "none", *ENGINES), default="auto")
    soak.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    soak.add_argument("--seed", type=int, default=0, help="other models for another one")
    return parser


def _run_score(options: argparse.Namespace) -> int:
    known = catalogue()
    named = [known[name] for name in options.mutants] or known.values()
    chosen = sample(named, options.sample, options.seed)
    asked = (options.by, options.budget, options.processes, options.trust)
    survive = 0

    def counted() -> Iterator[_score.Verdict]:
        nonlocal survive
        for each in _score.score(chosen, *asked):
            survive += not each.killed
            yield each

    try:
        _print(_score.table(counted()))
    except _score.UnsoundError as error:
        print(error)
        return 1
    return min(survive, 1)


def _run_hunt(options: argparse.Namespace) -> int:
    for name in [options.target] if options.target else _hunt.installed():
        _print(_hunt.listing(name, _hunt.hunt(name, options.examples)))
    return 0


def _run_soak(options: argparse.Namespace) -> int:
    engines = () if options.engines == "none" else options.engines
    subject, shown = Optimize(options.level, engines=engines), 0
    dtype = getattr(torch, options.dtype)
    for tally in _soak.soak(subject, options.examples, dtype=dtype, first_seed=options.seed):
        _print(map(str, [*tally.wrong[shown:], tally]))
        shown = len(tally.wrong)
    return min(shown, 1)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
