"""`python -m benchmarks compare BASE NEW`: did anything get slower or larger, and how sure is that?

BASE and NEW are commits, branches, or . for the working tree with its changes. Rounds of new
processes are measured of the one, the same again, and the other, in an order that is drawn. What
changed is measured once more before it is told. The exit code is 1 where something regressed or
fails now, and 2 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from asv import util

from benchmarks._machine import machine_name

from . import tables
from .cells import cells
from .declared import as_declared, declared_between
from .rounds import Series, Sides, run_round
from .trees import ComparisonError, Tree, commit_of, configuration
from .verdicts import FAILED, FEWEST_ROUNDS, NOT_COMPARED, REGRESSED, Verdict, flagged, verdicts

_USUAL = [r"^graph\.", r"^cpu\.(Latency|Memory)\..*optimized-[12]\)"]
_ROUNDS = 8


def main(arguments: Sequence[str]) -> int:
    """Compare, print the verdicts, and return the exit code."""
    options = _options(arguments)
    try:
        return _compare(options)
    except (ComparisonError, util.UserError) as error:
        print(f"compare: {error}", file=sys.stderr)
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
        help="a regular expression on names as the table has them; may repeat",
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"{_ROUNDS} if not given")
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
    for path in filter(None, (options.json, options.markdown)):
        if not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {str(path.parent)!r} for {path.name}: make it first.")
    return options


def _compare(options: argparse.Namespace) -> int:
    commits = {name: commit_of(name) for name in (options.base, options.new)}
    conf = configuration()
    base, new = commits[options.base], commits[options.new]
    declared = declared_between(base, new, options.declared) if options.declared else []
    sides = Sides(Tree(conf, base, "base"), Tree(conf, new, "new"))
    about = {"base": base, "new": new, "machine": machine_name(), "python": sys.version.split()[0]}
    about |= {"processor": platform.processor() or platform.machine(), "rounds": options.rounds}
    try:
        first = [Series(cell) for cell in cells(conf, sides.new, options.bench or _USUAL)]
        second = list[Series]()
        stopped = _measure(first, second, sides, options)
    finally:
        sides.close()
    found = [as_declared(each, declared) for each in verdicts(first, second)]
    _tell(found, [*first, *second], about, options)
    return 2 if stopped else _exit_code(found)


def _measure(
    first: list[Series], second: list[Series], sides: Sides, options: argparse.Namespace
) -> bool:
    """Fill both; return whether it was interrupted, in which case what is whole stays."""
    draw = random.Random(options.seed)
    try:
        with Progress(len(first) * options.rounds) as progress:
            for _ in range(options.rounds):
                run_round(first, sides, draw, progress.tell)
            second += [Series(series.cell) for series in flagged(first)]
            progress.total = progress.done + len(second) * options.rounds
            for _ in range(options.rounds):
                run_round(second, sides, draw, progress.tell)
    except KeyboardInterrupt:
        print("interrupted: what follows rests on the rounds that are whole", file=sys.stderr)
        return True
    return False


class Progress:
    """Says where the measurement is, at least every ten seconds while it is entered.

    Args:
        total: how many cells are to be measured; those that settle early are fewer.
        silence: seconds without a line, at most.
    """

    def __init__(self, total: int, silence: float = 10.0) -> None:
        self.total, self.done, self.silence = total, 0, silence
        self.started = time.monotonic()
        self._cell, self._over = "", threading.Event()
        self._thread = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def tell(self, series: Series) -> None:
        """Hear of a cell that begins."""
        self._cell = series.cell.name
        self.done += 1

    def _say(self) -> None:
        while not self._over.wait(self.silence):
            spent = time.monotonic() - self.started
            left = spent / max(self.done, 1) * (self.total - self.done)
            rest = f", at most {left / 60:.0f} minutes more" if self.done else ""
            print(f"{self.done} of {self.total}: {self._cell or 'beginning'}{rest}", flush=True)


def _tell(
    verdicts: Sequence[Verdict],
    several: Sequence[Series],
    about: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    title = f"{options.base} ({about['base'][:8]}) and {options.new} ({about['new'][:8]})"
    print(f"\n{tables.text(verdicts)}\n\n{title}: {tables.sentence(verdicts)}")
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
