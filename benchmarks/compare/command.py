"""`python -m benchmarks compare BASE NEW`: did anything get slower or larger, and how sure is that?

BASE and NEW are commits, branches, or . for the working tree with its changes. Rounds of new
processes are measured of the one, the same again, and the other, in an order that is drawn. What
changed is measured once more before it is told. Without --bench these are the graphs of eight
models, then their latency and their peak memory. The exit code is 1 where something regressed or
fails now, and 2 where it was interrupted or nothing could be compared.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asv import util

from benchmarks._machine import machine_name
from benchmarks.progress import spoken
from benchmarks.running import ended_by_signals

from . import tables
from .cells import cells
from .declared import as_declared, declared_between
from .journal import Journal
from .rounds import Series, Sides, run_round
from .schedule import HasTime, Schedule
from .trees import ComparisonError, Tree, commit_of, configuration
from .verdicts import (
    FAILED,
    FEWEST_ROUNDS,
    INCONCLUSIVE,
    NOT_COMPARED,
    REGRESSED,
    Verdict,
    verdicts,
)

_ROUNDS, _MINUTES = 8, 10.0
_FOLDER = Path(".asv/compare")


def main(arguments: Sequence[str]) -> int:
    """Compare, print the verdicts, and return the exit code."""
    options = _options(arguments)
    try:
        with ended_by_signals():
            return _compare(options)
    except (ComparisonError, util.UserError) as error:
        print(f"compare: {error}", file=sys.stderr)
    except OSError as error:
        print(f"compare: {error}: mend that, then add --resume.", file=sys.stderr)
    except KeyboardInterrupt:
        print("compare: interrupted before anything was measured.", file=sys.stderr)
    return 2


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=about[0], epilog=about[2]
    )
    parser.add_argument("base", help="a commit, a branch, or . for the working tree")
    parser.add_argument("new", help="likewise")
    parser.add_argument(
        "-b",
        "--bench",
        action="append",
        help="a regular expression on names as the table has them; the first is measured first",
    )
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help=f"at most; {_MINUTES:.0f} if not given"
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"at most; usually {_ROUNDS}")
    parser.add_argument("--resume", action="store_true", help="go on where the last one ended")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts, all rounds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write them as Markdown")
    parser.add_argument(
        "--declared",
        metavar="FILE",
        help="what NEW declares in it and BASE does not is intended and no regression",
    )
    options = parser.parse_args(arguments)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {options.rounds}: fewer than {FEWEST_ROUNDS} tell nothing.")
    if not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes}: name a time above 0.")
    for path in filter(None, (options.json, options.markdown)):
        if not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(path.parent)!r} for {path.name}: make it first.")
    return options


def _usual() -> list[str]:
    """What is compared where nothing is named: exact numbers, then what takes longer."""
    from benchmarks._workloads import HEADLINE

    models = "|".join(HEADLINE)
    return [
        rf"^graph\..*\b({models})\b(?!.*(eager|fx_fuse|optimized-2))",
        rf"^cpu\.Memory\..*\(({models}), optimized-1\)",
        rf"^cpu\.Latency\..*\(({models}), optimized-1\)",
        rf"^cpu\.Latency\..*\(({models}), optimized-2-openvino\)",
        rf"^graph\..*\b({models})\b.*optimized-2",
        rf"^cpu\.Latency\..*\(({models}), optimized-2\)",
        rf"^cpu\.Memory\..*\(({models}), optimized-2",
    ]


def _compare(options: argparse.Namespace) -> int:
    started = time.monotonic()
    commits = {name: commit_of(name) for name in (options.base, options.new)}
    conf = configuration()
    base, new = commits[options.base], commits[options.new]
    declared = declared_between(base, new, options.declared) if options.declared else []
    about = {"base": base, "new": new, "machine": machine_name(), "python": sys.version.split()[0]}
    journal = Journal(_FOLDER / f"{base[:12]}-{new[:12]}.jsonl", dict(about))
    sides = Sides(Tree(conf, base, "base"), Tree(conf, new, "new"))
    try:
        chosen = cells(conf, sides.new, options.bench or _usual())
        found = _schedule(journal, chosen, options, started)
        stopped = _measure(found, sides, journal, random.Random(options.seed))
    finally:
        sides.close()
    about |= {"processor": platform.processor() or platform.machine(), "rounds": options.rounds}
    told = [as_declared(each, declared) for each in verdicts(found.first, found.second)]
    _tell(told, [*found.first, *found.second], about, options)
    return 2 if stopped else _exit_code(told)


def _schedule(
    journal: Journal, chosen: Sequence[Any], options: argparse.Namespace, started: float
) -> Schedule:
    first, second = [Series(cell) for cell in chosen], list[Series]()
    if options.resume:
        first, second = journal.resume(chosen)
    else:
        journal.begin()
    return Schedule(first, second, options.rounds, options.minutes, started)


def _measure(found: Schedule, sides: Sides, journal: Journal, draw: random.Random) -> bool:
    """Fill the schedule; return whether it was interrupted, in which case what is whole stays."""
    with spoken(found.line):

        def measure(several: Sequence[Series], has_time: HasTime) -> None:
            again = any(several[0] is each for each in found.second)
            run_round(several, sides, draw, has_time, found.begin, lambda s: journal.keep(s, again))

        try:
            found.run(measure)
        except (KeyboardInterrupt, OSError) as error:
            told = f": {error}" if isinstance(error, OSError) else ""
            print(f"interrupted{told}; what is whole follows, --resume goes on", file=sys.stderr)
            return True
    if journal.trouble:
        print(f"compare: {journal.trouble}; --resume is not possible.", file=sys.stderr)
    return False


def _tell(
    verdicts: Sequence[Verdict],
    several: Sequence[Series],
    about: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    title = f"{options.base} ({about['base'][:8]}) and {options.new} ({about['new'][:8]})"
    print(f"\n{tables.text(verdicts)}\n\n{title}: {tables.sentence(verdicts)}")
    if any(each.verdict == NOT_COMPARED and "reached" in each.reason for each in verdicts):
        print("More --minutes, with --resume, reach what was not reached.")
    if any(each.verdict == INCONCLUSIVE for each in verdicts):
        print("More --minutes and --rounds, with --resume, or a quieter machine tell what is"
              " inconclusive; a change below its `sees from` could not be told.")  # fmt: skip
    if options.markdown:
        tables.write(options.markdown, tables.markdown(verdicts, title))
    if options.json:
        rounds = [{"cell": each.cell.name, "rounds": each.rounds} for each in several]
        tables.write(options.json, tables.as_json(verdicts, about | {"measured": rounds}))


def _exit_code(verdicts: Sequence[Verdict]) -> int:
    kinds = {each.verdict for each in verdicts}
    if kinds <= {NOT_COMPARED}:
        print("compare: nothing could be compared; the table says why.", file=sys.stderr)
        return 2
    return int(bool(kinds & {REGRESSED, FAILED}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
