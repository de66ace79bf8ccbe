"""The table of how good the fuzz is, made of what its commands recorded."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.testing.motifs import MOTIFS
from tests.quality.generic import equivalent
from tests.quality.mutants import catalogue
from tests.quality.record import Entries, code_of, read
from tests.quality.score import FINDERS, spread

START, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
PAGE = Path("docs", "fuzzing.md")
OLDER = "**older than the code that it speaks of**"


@dataclass(frozen=True)
class Figure:
    """One row: what is counted, what it should be, the figures it is of, and how it is told."""

    name: str
    goal: str
    recorded: str
    told: Callable[[Entries], str]


def table(folder: Path) -> Iterator[str]:
    """The lines of the table of what was recorded there."""
    yield from ("| | goal | here | command, commit and machine |", "|---|---|---|---|")
    for each in FIGURES:
        if entries := _read(folder, each.recorded):
            told, origin = each.told(entries), _origin(entries, code_of(each.recorded))
            yield f"| {each.name} | {each.goal} | {told} | {origin} |"
        else:
            yield f"| {each.name} | {each.goal} | not measured | |"


def _read(folder: Path, recorded: str) -> Entries:
    """The entries of one figure, or of several: what one of them found is found."""
    merged: Entries = {}
    for figure in recorded.split():
        for name, each in read(folder, figure).items():
            merged[name] = merged[name] if merged.get(name, {}).get("killed") else each
    return merged


def renew(page: Path, folder: Path) -> None:
    """Write the table between the two marks of a page.

    Raises:
        ValueError: the page lacks one.
    """
    before, start, rest = page.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {START.strip()} ... {END.strip()}.")
    lines = "\n".join(table(folder))
    page.write_text(f"{before}{start}\n{lines}\n\n{end}{after}", encoding="utf-8")


def _origin(entries: Entries, code: str) -> str:
    """The command of the latest entry, for any, and the commits and machines of all.

    A row is marked where the code that it speaks of has changed since one of them was made.
    """
    *_, latest = entries.values()
    command = shlex.join(word for word in shlex.split(latest["command"]) if word not in entries)
    commits, machines = (
        ", ".join(dict.fromkeys(str(each[key]) for each in entries.values()))
        for key in ("commit", "machine")
    )
    older = f"; {OLDER}" * any(each.get("code") != code for each in entries.values())
    return f"`{command}`; {commits}; {machines}{older}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else "none"


def _each(entries: Entries, key: str) -> list[Any]:
    return [each[key] for each in entries.values()]


def _of(names: Iterable[str], entries: Entries) -> Entries:
    """The entries of what there still is."""
    return {name: entries[name] for name in names if name in entries}


def _killed(entries: Entries) -> str:
    """What was found, and the names of few that were not; what is gone or equivalent is left out.

    The name of a generic mistake begins with its file.
    """
    known, same = catalogue(), equivalent()
    tried = {n: e for n, e in entries.items() if n in known or (".py: " in n and n not in same)}
    survivors = [name.replace("|", "/") for name, each in tried.items() if not each["killed"]]
    listed = f"; survive: {'; '.join(survivors)}" if 0 < len(survivors) < 4 else ""
    return _share(len(tried) - len(survivors), len(tried)) + listed


def _real(entries: Entries) -> str:
    return _killed(_of((n for n, mutant in catalogue().items() if mutant.is_real), entries))


def _examples(entries: Entries) -> str:
    return spread([each["examples"] for each in entries.values() if each["killed"]])


def _defects(entries: Entries) -> str:
    each = ", ".join(f"{n} {e['defects']} in {e['seconds']:.0f} s" for n, e in entries.items())
    return f"{sum(_each(entries, 'defects'))} ({each})"


def _shrunk(entries: Entries) -> str:
    seconds = sorted(_each(entries, "seconds"))
    minimal = _share(sum(_each(entries, "minimal")), len(entries))
    median = f"{statistics.median(seconds):.1f}"
    return f"{minimal}; median {median} s, at most {seconds[-1]:.1f} s of the processor"


def _alarms(entries: Entries) -> str:
    each = "; ".join(f"{name}: {e['wrong']} in {e['examples']:,}" for name, e in entries.items())
    return f"{sum(_each(entries, 'wrong'))} in {sum(_each(entries, 'examples')):,} ({each})"


def _lowered(entries: Entries) -> str:
    """Of the soaks at level 2: what ran on kernels of the device, and how much was wrong."""
    soaks = [each for each in entries.values() if "lowered" in each]
    regions = sum((Counter(each["regions"]) for each in soaks), Counter[str]())
    kinds = ", ".join(f"{count:,} {name}" for name, count in regions.most_common())
    lowered, tried, wrong = (sum(e[key] for e in soaks) for key in ("lowered", "examples", "wrong"))
    return f"{_share(lowered, tried)}, {wrong} wrong; regions: {kinds or 'none'}"


def _speed(entries: Entries) -> str:
    rates = {name: each["examples"] / each["seconds"] for name, each in entries.items()}
    return "; ".join(f"{name}: {rate:.0f}" for name, rate in rates.items())


def _rejected(entries: Entries) -> str:
    asked, tried = sum(_each(entries, "asked")), sum(_each(entries, "examples"))
    return f"{asked - tried} of {asked:,}"


def _firing(entries: Entries) -> str:
    tried = _of(MOTIFS, entries)
    shares = {name: each["fired"] / each["examples"] for name, each in tried.items()}
    least = min(shares, key=lambda name: shares[name])
    most = max(shares.values())
    return f"{shares[least]:.0%} ({least}) to {most:.0%}; {len(shares)} of {len(MOTIFS)} passes"


def _reasons(entries: Entries) -> str:
    met, never = (_each(_of(MOTIFS, entries), key) for key in ("met", "never"))
    return _share(sum(met), sum(met) + sum(map(len, never)))


def _met(entries: Entries) -> str:
    return "; ".join(f"{name} {_share(e['met'], e['of'])}" for name, e in entries.items())


def _minutes(entries: Entries) -> str:
    return "; ".join(f"{name}: {e['seconds'] / 60:.1f} min" for name, e in entries.items())


def _by_all(of: str) -> str:
    return " ".join(f"{of}_by_{each}" for each in FINDERS)


def _killed_by(mistakes: str, of: str) -> Iterator[Figure]:
    goals = {"generated models alone": "80 %", "motifs and near misses": "", "unit tests": ""}
    for (finder, goal), by in zip(goals.items(), FINDERS, strict=True):
        yield Figure(f"{mistakes}, found by {finder}", goal, f"{of}_by_{by}", _killed)
    yield Figure(f"{mistakes}, found by any of the three", "97 %", _by_all(of), _killed)


FIGURES = (
    *_killed_by("mistakes of the catalogue", "catalogue"),
    Figure("those of them that come from real issues", "100 %", _by_all("catalogue"), _real),
    *_killed_by("generic mistakes, which no person chose", "generic"),
    Figure(
        "models to find a mistake, median and ninth decile",
        "50, 400",
        "catalogue_by_models",
        _examples,
    ),
    Figure("defects found in other tools", "9 in 2 minutes", "hunt", _defects),
    Figure("counterexamples that are minimal", "99 %, in 10 s", "shrink", _shrunk),
    Figure("models that the optimizer gets wrong", "0 in 100,000", "soak", _alarms),
    Figure("models lowered to real kernels, and wrong", "0 wrong", "soak", _lowered),
    Figure("models a second on one core", "60", "soak", _speed),
    Figure("models that are rejected", "0", "soak", _rejected),
    Figure("share of its own fuzz in which a pass fires", "20 %", "firing", _firing),
    Figure("reasons to refuse that were met", "all", "firing", _reasons),
    Figure("operations met, with each rank, dtype and reader", "95 %", "coverage", _met),
    Figure("all tests with the quick profile on two cores", "8 minutes", "quick", _minutes),
)
