"""The verdicts as text, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .verdicts import (
    CHANGED,
    FAILED,
    IMPROVED,
    INCONCLUSIVE,
    INTENDED,
    NOT_COMPARED,
    REGRESSED,
    SAME,
    Verdict,
)

_ORDER = (FAILED, REGRESSED, INTENDED, IMPROVED, CHANGED, INCONCLUSIVE, NOT_COMPARED, SAME)
_HEAD = ("verdict", "benchmark", "before", "after", "after / before", "sees from")
_PREFIXES = (("", 1.0), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9))


def sentence(verdicts: Sequence[Verdict]) -> str:
    """All in one line: "2 regressed, 40 same"."""
    counts = Counter(each.verdict for each in verdicts)
    return ", ".join(f"{counts[name]} {name}" for name in _ORDER if counts[name])


def text(verdicts: Sequence[Verdict]) -> str:
    """A table, what matters first, without the exact numbers that are the same."""
    told = [each for each in verdicts if each.verdict != SAME or each.change]
    rows = [_HEAD, *map(_row, _sorted(told))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def markdown(verdicts: Sequence[Verdict], title: str) -> str:
    """The same for a pull request; what asks for nothing is folded away."""
    quiet = [each for each in _sorted(verdicts) if each.verdict in (NOT_COMPARED, SAME)]
    loud = [each for each in _sorted(verdicts) if each not in quiet]
    parts = [f"### {title}", sentence(verdicts), _markdown_table(loud) if loud else ""]
    if quiet:
        told = f"<summary>{sentence(quiet)}</summary>"
        parts.append(f"<details>{told}\n\n{_markdown_table(quiet)}\n\n</details>")
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(verdicts: Iterable[Verdict]) -> str:
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, verdicts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(path: Path, content: str) -> None:
    """Write a file that is whole at every moment."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(content)
    beside.replace(path)


def as_json(verdicts: Sequence[Verdict], about: dict[str, Any]) -> str:
    """Everything, with what was compared and where."""
    return json.dumps({**about, "verdicts": [_named(each) for each in verdicts]}, indent=1)


def _named(each: Verdict) -> dict[str, Any]:
    """A verdict, with its metric and what its parameters chose as fields of their own."""
    fields = asdict(each)
    return {"metric": each.name.partition("(")[0], **fields.pop("params"), **fields}


def _sorted(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda each: (_ORDER.index(each.verdict), each.name))


def _row(each: Verdict) -> tuple[str, ...]:
    numbers = [_number(value, each.unit) for value in (each.base, each.new)]
    change, visible = each.change, each.visible
    if change is None or visible is None:
        return (each.verdict, each.name, *numbers, each.reason or "exact", "")
    interval = f"{change.ratio:.3f} [{change.low:.3f}, {change.high:.3f}]"
    return (each.verdict, each.name, *numbers, interval, f"{visible:.1%}")


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit != "seconds":
        return f"{value:.6g} {unit}"
    prefix, size = next((p for p in _PREFIXES if abs(value) >= p[1]), _PREFIXES[-1])
    return f"{value / size:.4g} {prefix}s"
