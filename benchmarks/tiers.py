"""What `python -m benchmarks` measures: the headline models, or everything."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from ._asv import cell_name
from ._workloads import HEADLINE, PORTABLE, _require_hardware
from .peers import ASKED
from .progress import Part
from .stored import LISTING
from .subjects import DEVICES

# Of a kind of small program each; what they cost is little beside the models.
SMALL = ("toy_model", "tiny_convnet", "resnet_block", "masked_assign_where")
# Seconds that a cell takes on a small virtual machine, roughly.
COUNT, MEMORY, PAIRED, LATENCY, COST = 0.05, 1.8, 5.0, 3.5, 2.0

GRAPHS = 40.0  # until every model is captured and optimized; reading the counts takes no time


def headline() -> list[Part]:
    """What is measured unless more is asked for, what matters most first.

    What optimizing costs is measured of portable code: level 2 times candidates, ten times as long.
    """
    models = _any_of((*HEADLINE, *SMALL))
    here = "|".join(present())
    return [
        Part("graphs", (rf"^graph\..*{models}",), COUNT, GRAPHS),
        Part("memory", (rf"^({here})\.Memory\..*{models}",), MEMORY),
        Part("paired latency", (rf"^({here})\.Paired\..*{models}",), PAIRED),
        Part("latency", (rf"^({here})\.Latency\..*{models}",), LATENCY),
        Part("optimizing", (rf"^optimize_cost\.Models\..*{models}, {_any_of(PORTABLE)}",), COST),
    ]


def everything() -> list[Part]:
    """Every cell that this machine can measure."""
    forward = (("Memory", MEMORY), ("Paired", PAIRED), ("Latency", LATENCY))
    parts = [Part("graphs", (r"^graph\.",), COUNT, GRAPHS)]
    parts += [
        Part(f"{kind} on {device}", (rf"^{device}\.{kind}\.",), seconds)
        for device in present()
        for kind, seconds in forward
    ]
    parts.append(Part("optimizing", (r"^optimize_cost\.",), COST))
    return parts + [Part("peers", (r"^peers\.",), 60.0)] * bool(os.environ.get(ASKED))


def chosen(patterns: Sequence[str]) -> list[Part]:
    """What some regular expressions match here, in parts: asv keeps a part when it ends.

    All counts of graphs are one part, since a model is counted once for all of them.
    """
    lacking = tuple(f"{device}." for device in absent())
    kinds = dict.fromkeys(_kind(cell) for cell in listed() if not cell.startswith(lacking))
    return [
        Part(kind, tuple(rf"^(?={re.escape(kind)}\.)(?=.*?({each}))" for each in patterns), PAIRED)
        for kind in kinds
    ]


def _kind(cell: str) -> str:
    device, kind, _ = cell.split(".", 2)
    return f"{device}.{kind}" if device in DEVICES else device


def counted(parts: Iterable[Part]) -> list[Part]:
    """The parts of which there is something, with the number of their cells."""
    cells = list(listed())
    found = [part._replace(cells=sum(matches(part, cell) for cell in cells)) for part in parts]
    return [part for part in found if part.cells]


def listed() -> Iterator[str]:
    """The names of all cells of the suite, as asv listed them last."""
    for benchmark in json.loads(LISTING.read_text()).values():
        if isinstance(benchmark, dict):
            yield from names_of(benchmark)


def names_of(benchmark: dict) -> Iterator[str]:
    """The names of the cells of a benchmark in asv's listing."""
    count = 1
    for values in benchmark["params"]:
        count *= len(values)
    yield from (cell_name(benchmark, index) for index in range(count))


def matches(part: Part, cell: str) -> bool:
    """Whether a cell belongs to a part."""
    return any(re.search(pattern, cell) for pattern in part.patterns)


def present() -> list[str]:
    """The devices that this machine has."""
    return [device for device in DEVICES if device not in absent()]


def absent() -> list[str]:
    """The devices that it lacks."""
    return [device for device in DEVICES if not _has(device)]


def _has(device: str) -> bool:
    try:
        _require_hardware(device)
    except NotImplementedError:
        return False
    return True


def _any_of(models: Iterable[str]) -> str:
    return f"'({'|'.join(models)})'"
