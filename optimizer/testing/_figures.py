"""The table of how good the fuzz is, made of what its commands recorded."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.testing._mutants import catalogue
from optimizer.testing._record import Entries, read
from optimizer.testing.motifs import MOTIFS

START, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
PAGE = Path("docs", "fuzzing.md")


@dataclass(frozen=True)
class Figure:
    """One row: what is counted, what it should be, who records it, and how it is told."""

    name: str
    goal: str
    recorded: str
    told: Callable[[Entries], str]


def table(folder: Path) -> Iterator[str]:
    """The lines of the table of what was recorded there."""
    yield from ("| | goal | here | command, commit and machine |", "|---|---|---|---|")
    for each in FIGURES:
        entries = read(folder, each.recorded)
        if entries:
            yield f"| {each.name} | {each.goal} | {each.told(entries)} | {_origin(entries)} |"
        else:
            yield f"| {each.name} | {each.goal} | not measured | |"


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


def _origin(entries: Entries) -> str:
    """The command of the latest entry, for any, and the commits and machines of all."""
    *_, latest = entries.values()
    command = shlex.join(word for word in shlex.split(latest["command"]) if word not in entries)
    commits, machines = (
        ", ".join(dict.fromkeys(str(each[key]) for each in entries.values()))
        for key in ("commit", "machine")
    )
    return f"`{command}`; {commits}; {machines}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else "none"


def _each(entries: Entries, key: str) -> list[Any]:
    return [each[key] for each in entries.values()]


def _of(names: Iterable[str], entries: Entries) -> Entries:
    """The entries of what there still is."""
    return {name: entries[name] for name in names if name in entries}


def _mutants(entries: Entries) -> str:
    killed = _each(tried := _of(catalogue(), entries), "killed")
    survivors = [name for name, each in tried.items() if not each["killed"]]
    survive = f"; survive: {'; '.join(survivors)}" if survivors else ""
    untried = f"; {len(catalogue()) - len(tried)} not tried"
    return _share(sum(killed), len(killed)) + untried + survive


def _real(entries: Entries) -> str:
    real = [name for name, mutant in catalogue().items() if mutant.is_real]
    killed = _each(_of(real, entries), "killed")
    return _share(sum(killed), len(killed))


def _examples(entries: Entries) -> str:
    counts = sorted(
        each["examples"] for each in _of(catalogue(), entries).values() if each["killed"]
    )
    if not counts:
        return "none killed"
    ninth = counts[min(len(counts) - 1, round(0.9 * len(counts)))]
    return f"{statistics.median(counts):g}, {ninth}"


def _generic(entries: Entries) -> str:
    killed = [each["killed"] for each in entries.values() if not each.get("equivalent")]
    return f"{_share(sum(killed), len(killed))}; {len(entries) - len(killed)} equivalent"


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


FIGURES = (
    Figure("mutants killed", "98 %", "score", _mutants),
    Figure("those of them that come from real issues", "100 %", "score", _real),
    Figure("examples to kill one, median and ninth decile", "50, 500", "score", _examples),
    Figure("generic mutants killed, but for equivalent ones", "90 %", "generic", _generic),
    Figure("defects found in other tools", "9 in 2 minutes", "hunt", _defects),
    Figure("counterexamples that are minimal", "99 %, in 10 s", "shrink", _shrunk),
    Figure("models that the optimizer gets wrong", "0 in 100,000", "soak", _alarms),
    Figure("models a second on one core", "60", "soak", _speed),
    Figure("models that are rejected", "0", "soak", _rejected),
    Figure("share of its own fuzz in which a pass fires", "20 %", "firing", _firing),
    Figure("reasons to refuse that were met", "all", "firing", _reasons),
    Figure("operations met, with each rank, dtype and reader", "95 %", "coverage", _met),
    Figure("all tests with the quick profile on two cores", "8 minutes", "quick", _minutes),
)
