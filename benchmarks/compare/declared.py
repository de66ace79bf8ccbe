"""Changes that are intended: a file of the project names their cells and says why.

```toml
[[change]]
cells = 'Graph.track_nodes.resnet18, optimized-1'  # a regular expression on names of the table
reason = "a copy keeps the layout that the next convolution reads"
```

Only what the new version declares and the base does not counts, so that the file may grow and an
old line hides no later change.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .trees import ComparisonError, content_of
from .verdicts import INTENDED, REGRESSED, Verdict


@dataclass(frozen=True)
class Declared:
    """An intended change of the cells whose names match, and its reason."""

    cells: str
    reason: str


def declared_between(base: str, new: str, file: str) -> list[Declared]:
    """What `file` declares at the commit `new` and not at `base`.

    Raises:
        ComparisonError: the new version has no such file, or it cannot be read.
    """
    try:
        declared = _read(content_of(new, file))
    except subprocess.CalledProcessError as error:
        raise ComparisonError(f"{new[:8]} has no file {file}: name one of the project.") from error
    except (ValueError, KeyError, TypeError, re.error) as error:
        raise ComparisonError(
            f"{file} cannot be read ({error}): each [[change]] has cells and a reason."
        ) from error
    try:
        before = _read(content_of(base, file))
    except (subprocess.CalledProcessError, ValueError, KeyError, TypeError, re.error):
        before = []
    return [each for each in declared if each not in before]


def _read(text: str) -> list[Declared]:
    found = [
        Declared(each["cells"], each["reason"].strip())
        for each in tomllib.loads(text).get("change", [])
    ]
    for each in found:
        re.compile(each.cells)
        if not each.reason:
            raise ValueError(f"no reason for {each.cells}")
    return found


def as_declared(verdict: Verdict, declared: Sequence[Declared]) -> Verdict:
    """The verdict, or that its regression is intended."""
    if verdict.verdict != REGRESSED:
        return verdict
    reasons = [each.reason for each in declared if re.search(each.cells, verdict.name)]
    return replace(verdict, verdict=INTENDED, reason=reasons[0]) if reasons else verdict
