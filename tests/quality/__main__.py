"""How good the fuzz is: `python -m tests.quality score | hunt | soak | firing | …`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from optimizer.testing._subject import Optimize
from optimizer.testing.motifs import MOTIFS
from tests.quality import coverage as _coverage
from tests.quality import figures as _figures
from tests.quality import firing as _firing
from tests.quality import generic as _generic
from tests.quality import hunt as _hunt
from tests.quality import score as _score
from tests.quality import shrink as _shrink
from tests.quality import soak as _soak
from tests.quality.mutants import Mutant, catalogue, sample
from tests.quality.record import FOLDER, Recorder, read

Record: TypeAlias = Callable[..., None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print what it finds."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    command = shlex.join(["python", "-m", "tests.quality", *given])
    record = Recorder.of(FOLDER, _figure(options), command) if options.record else _forget
    return int(options.run(options, record))


def _figure(options: argparse.Namespace) -> str:
    """What the file is called that it is recorded in."""
    return f"{options.of}_by_{'_'.join(options.by)}" if "by" in options else str(options.command)


def _forget(name: str, **measured: Any) -> None:
    """What is not asked for is not recorded."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.quality", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--record", action="store_true", help=f"keep the figures in {FOLDER}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    def command(name: str, run: Callable[..., int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, parents=[common])
        added.set_defaults(run=run)
        return added

    score = command("score", _run_score, "which mistakes are found, after how many examples")
    score.add_argument("mutants", nargs="*", help="their names; all if none are given")
    score.add_argument("--of", choices=_MUTANTS, default="catalogue", help="written or generic")
    score.add_argument(
        "--by",
        nargs="+",
        choices=_score.FINDERS,
        default=["models"],
        help="who looks for each, the next where one finds nothing",
    )
    score.add_argument("--sample", type=int, help="only so many of them")
    score.add_argument("--seed", type=int, default=0, help="other ones for another one")
    score.add_argument("--rest", action="store_true", help="but for those on record as found")
    score.add_argument("--budget", type=int, default=_score.BUDGET, help="models for each")
    score.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    score.add_argument(
        "--trust", nargs="+", choices=_score.FINDERS, default=[], help="who passed just before"
    )
    hunt = command("hunt", _run_hunt, "the defects of other tools")
    hunt.add_argument("--target", choices=_hunt.targets(), help="one of them; all if not given")
    hunt.add_argument("--examples", type=int, help="so many; else as many as each target has")
    firing = command("firing", _run_firing, "how often each pass fires, what it refuses")
    firing.add_argument("passes", nargs="*", help="their names; all if none are given")
    firing.add_argument("--examples", type=int, default=200)
    coverage = command("coverage", _run_coverage, "what generated models are made of")
    coverage.add_argument("--examples", type=int, default=2000)
    soak = command("soak", _run_soak, "how many of very many models are got wrong")
    soak.add_argument("--examples", type=int, default=10_000)
    soak.add_argument("--level", type=int, default=1)
    soak.add_argument("--engines", choices=("auto", "none"), default="auto")
    soak.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    soak.add_argument("--seed", type=int, default=0, help="other models for another one")
    shrink = command("shrink", _run_shrink, "how small counterexamples get, and how soon")
    shrink.add_argument("--sample", type=int, default=40, help="so many mutants of passes")
    shrink.add_argument("--budget", type=int, default=300, help="examples to find each")
    quick = command("quick", _run_quick, "how long all tests take with the quick profile")
    quick.add_argument("--processes", type=int, default=2)
    figures = command("figures", _run_figures, "renew the table of all that was recorded")
    figures.add_argument("--page", type=Path, default=_figures.PAGE)
    figures.add_argument("--renew", action="store_true", help="measure all anew, in an hour")
    return parser


def _run_firing(options: argparse.Namespace, record: Record) -> int:
    def recorded() -> Iterator[_firing.Firing]:
        for name in options.passes or MOTIFS:
            seen = _firing.firing(name, options.examples)
            counts = {"fired": seen.fired, "examples": seen.examples, "met": len(seen.met())}
            record(name, **counts, never=seen.never())
            yield seen

    _print(_firing.table(recorded()))
    return 0


def _run_coverage(options: argparse.Namespace, record: Record) -> int:
    possible, seen = _coverage.feasible(), _coverage.met(options.examples)
    for name, (part, whole) in _coverage.counts(possible, seen).items():
        record(name, met=part, of=whole)
    _print(_coverage.listing(possible, seen))
    return 0


def _run_hunt(options: argparse.Namespace, record: Record) -> int:
    for name in [options.target] if options.target else _hunt.installed():
        started = time.perf_counter()
        found = _hunt.hunt(name, options.examples)
        record(name, defects=len(found), seconds=_since(started))
        _print(_hunt.listing(name, found))
    return 0


def _run_soak(options: argparse.Namespace, record: Record) -> int:
    engines = () if options.engines == "none" else options.engines
    subject = Optimize(options.level, engines=engines)
    dtype, shown = getattr(torch, options.dtype), 0
    counts: dict[str, Any]
    name = f"level {options.level}, {options.dtype}, seed {options.seed}"
    name += ", no engines" * (not engines)
    tallies = _soak.soak(subject, options.examples, dtype=dtype, first_seed=options.seed)
    for batch, tally in enumerate(tallies, 1):
        _print(map(str, [*tally.wrong[shown:], tally]))
        shown = len(tally.wrong)
        counts = {"examples": tally.examples, "wrong": shown, "seconds": round(tally.seconds, 1)}
        if options.level >= 2:
            counts |= {"lowered": tally.lowered, "regions": dict(tally.regions.most_common())}
        record(name, **counts, asked=min(batch * _soak.BATCH, options.examples))
    return min(shown, 1)


def _run_score(options: argparse.Namespace, record: Record) -> int:
    known, survive = _MUTANTS[options.of](), 0
    named = [known[name] for name in options.mutants] or known.values()
    kept = read(FOLDER, _figure(options)) if options.rest else {}
    found = {name for name, each in kept.items() if each["killed"]}
    rest = [each for each in sample(named, options.sample, options.seed) if each.name not in found]

    def recorded() -> Iterator[_score.Verdict]:
        nonlocal survive
        for each in _score.score(
            rest, options.by, options.budget, options.processes, options.trust
        ):
            name, seconds = each.mutant.name, round(each.seconds, 1)
            survive += not each.killed and name not in equivalent
            record(name, killed=each.killed, examples=each.examples, seconds=seconds)
            yield each

    equivalent = _generic.equivalent()
    try:
        _print(_score.table(recorded(), equivalent))
    except _score.UnsoundError as error:
        _print([str(error)])
        return 1
    return min(survive, 1)


_MUTANTS: dict[str, Callable[[], dict[str, Mutant]]] = {
    "catalogue": catalogue,
    "generic": _generic.mutants,
}


def _run_shrink(options: argparse.Namespace, record: Record) -> int:
    def recorded() -> Iterator[tuple[Mutant, _shrink.Shrunk]]:
        for mutant in _shrink.sample(options.sample):
            if found := _shrink.shrink(mutant, options.budget):
                record(mutant.name, **vars(found))
                yield mutant, found

    _print(_shrink.table(recorded()))
    return 0


def _run_quick(options: argparse.Namespace, record: Record) -> int:
    started, command = time.perf_counter(), [sys.executable, "-m", "pytest", "-q", "-n"]
    code = subprocess.run([*command, str(options.processes)], check=False).returncode
    if code == 0:
        record(f"{options.processes} processes", seconds=_since(started))
    return code


def _run_figures(options: argparse.Namespace, record: Record) -> int:
    code = _measure_anew() if options.renew else 0
    _figures.renew(options.page, FOLDER)
    _print(_figures.table(FOLDER))
    return code


# What takes under an hour in all, on two cores; another sample or a longer soak is asked for alone.
RENEWED = (
    *(f"score --sample 24 --seed 18 --by {each}" for each in _score.FINDERS),
    "hunt",
    "shrink --sample 40",
    "firing",
    "coverage --examples 5000",
    "soak --examples 5000",
    "soak --examples 5000 --level 2 --dtype float32",
    "quick",
)


def _measure_anew() -> int:
    """Run each of these; what was recorded before goes, as it speaks of other code."""
    commands = [shlex.split(each) for each in RENEWED]
    for figure in {_figure(_parser().parse_args(each)) for each in commands}:
        (FOLDER / f"{figure}.json").unlink(missing_ok=True)
    return max(main([*each, "--record"]) for each in commands)


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 1)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
