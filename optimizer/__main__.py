"""The command line: `python -m optimizer passes | explain | optimize | ...`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

import optimizer
from optimizer import InputError, OptimizerError
from optimizer._report import columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 2 with one line on stderr where an argument is of no use."""
    options = _parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (OptimizerError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m optimizer", description=optimizer.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add(commands, "passes", _passes, "list every pass")
    explain = _add(commands, "explain", _explain, "what a pass does and why that is safe")
    explain.add_argument("name", help="a pass")
    for name, run, text in (
        ("optimize", _optimize, "optimize a model and print the report"),
        ("check", _check, "check that the optimized model gives the model's answers"),
        ("bisect", _bisect, "find the single rewrite that changes the answer"),
        ("compare", _compare, "time the optimized model against the model, interleaved"),
        ("cost", _cost, "what each node computes, moves and launches, and the time that takes"),
        ("memory", _memory, "what is alive at each node, and the peak that was measured"),
    ):
        _add_model(_add(commands, name, run, text))
    commands.choices["optimize"].add_argument("--html", help="a file to write the report to")
    return parser


def _add(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a registered workload (resnet18), or module:callable that returns a module and"
        " its example inputs",
    )
    levels = "0 same bits, 1 up to rounding, 2 with kernels of the device, 3 in lower precision"
    parser.add_argument("--level", type=int, default=2, help=levels)
    parser.add_argument("--precision", choices=("bf16", "fp16", "int8"), help="at level 3")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    parser.add_argument("--disable", nargs="*", default=(), help="passes not to run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _passes(options: argparse.Namespace) -> str:
    rows = [(each.name, each.numerics, each.summary) for each in optimizer.all_passes()]
    return columns(rows)


def _explain(options: argparse.Namespace) -> str:
    return optimizer.explain(options.name)


def _optimize(options: argparse.Namespace) -> str:
    _, fast, _ = _optimized(options)
    if options.html:
        Path(options.html).write_text(fast.report.to_html(), encoding="utf-8")
    return json.dumps(fast.report.to_dict(), indent=2) if options.json else str(fast.report)


def _check(options: argparse.Namespace) -> str:
    model, fast, inputs = _optimized(options, check=None)
    optimizer.check(model, fast, inputs)
    return f"{options.model}: the optimized model gives the model's answers."


def _bisect(options: argparse.Namespace) -> str:
    model, inputs = _load(options.model, options.device)
    found = optimizer.bisect(model, inputs, level=options.level, disable=options.disable)
    return f"{options.model}: {found or 'no rewrite changes the answer.'}"


def _compare(options: argparse.Namespace) -> str:
    model, fast, inputs = _optimized(options)
    return f"{options.model}: {optimizer.compare(model, fast, inputs)}"


def _cost(options: argparse.Namespace) -> str:
    from optimizer.analysis import roofline

    model, fast, inputs = _optimized(options)
    before = roofline(model, inputs)
    after = roofline(fast, inputs, before.ceilings)
    if options.json:
        return json.dumps({"before": asdict(before), "after": asdict(after)}, indent=2)
    return f"{after}\nbefore: {before.totals()}"


def _memory(options: argparse.Namespace) -> str:
    from optimizer.analysis import memory

    _, fast, inputs = _optimized(options)
    bound = memory(fast, inputs, workspaces=True)
    measured = optimizer.measure(fast, inputs, repeats=1, warmup=1).peak_memory
    if options.json:
        return json.dumps(asdict(bound) | {"measured": measured}, indent=2)
    ratio = f", {measured / bound.peak:.2f} times that" if bound.peak else ""
    return f"{bound}\nmeasured {measured:,} bytes{ratio}"


def _optimized(options: argparse.Namespace, **settings: Any) -> tuple[nn.Module, Any, Any]:
    model, inputs = _load(options.model, options.device)
    settings |= {name: getattr(options, name) for name in ("level", "disable", "precision")}
    return model, optimizer.optimize(model, inputs, **settings), inputs


def _load(name: str, device: str) -> tuple[nn.Module, Any]:
    if ":" not in name:
        import models

        try:
            workload = models.load(name, device=device)
        except (models.UnknownWorkloadError, models.UnavailableDeviceError) as error:
            raise InputError(str(error)) from error
        return workload.module, workload.example_inputs
    path, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    build = getattr(importlib.import_module(path), attribute, None)
    if not callable(build):
        raise InputError(f"'{path}' has no callable '{attribute}': name one that returns a model.")
    model, inputs = build()
    return model, inputs


if __name__ == "__main__":
    sys.exit(main())
