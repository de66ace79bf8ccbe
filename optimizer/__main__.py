"""The command line: `optimizer`, or `python -m optimizer`, `passes | explain | optimize | ...`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import optimizer
from optimizer import EquivalenceError, InputError, OptimizerError, workloads
from optimizer.analysis import measured, roofline
from optimizer.analysis.measure import FEWEST_ROUNDS, require_at_least
from optimizer.core.inputs import map_tensors, require_module, require_writable
from optimizer.core.node import line_of
from optimizer.core.report import columns
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.lowering.choose import Tuning
from optimizer.passes import all_passes, select

EPILOG = """
examples:
  optimizer optimize resnet18 --html report.html
  optimizer compare --rounds 100 my_package.my_module:my_function --json
  optimizer check --disable fold_affine,fuse_linear_relu my_module:my_function
  optimizer optimize --engines none resnet18

exit codes:
  0  the command has run; what it found is on stdout
  1  check: the optimized model gives another answer than the model
  2  an argument cannot be used, or a package is missing; one line on stderr says which
  130  it was interrupted
"""
_BELOW: dict[str, Any] = {"epilog": EPILOG, "formatter_class": RawDescriptionHelpFormatter}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what went wrong is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_, **__: print(
                f"{category.__name__}: {message}", file=sys.stderr
            )
            text, figures = options.run(options)
        if options.json:  # which knows neither NaN nor infinity: they become text
            text = json.dumps(json.loads(json.dumps(figures), parse_constant=str), indent=2)
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`, which has read enough; Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except (OptimizerError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, EquivalenceError) else 2
    return 0


def _tell(stage: str) -> None:
    """Say on a terminal what takes a while."""
    if sys.stderr.isatty():
        print(f"{stage} ...", file=sys.stderr)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="optimizer", description=optimizer.__doc__, **_BELOW)
    parser.add_argument("--version", action="version", version=f"%(prog)s {optimizer.__version__}")
    commands = parser.add_subparsers(required=True, dest="command")
    for name, run, text in (
        ("passes", _passes, "list every pass"),
        ("explain", _explain, "what a pass does and why that is safe"),
        ("optimize", _optimize, "optimize a model, time it against the model, print the report"),
        ("check", _check, "check that the optimized model gives the model's answers"),
        ("bisect", _bisect, "find the single rewrite that changes the answer"),
        ("compare", _compare, "time the optimized model against the model, interleaved"),
        ("cost", _cost, "what each node computes, moves and keeps alive, and the time that takes"),
    ):
        command = commands.add_parser(name, help=text, description=text, **_BELOW)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
        if name in ("passes", "explain"):
            continue
        model = "a registered workload (resnet18), or module:callable that returns a module and its"
        command.add_argument("model", help=f"{model} example inputs")
        levels = "0 same bits, 1 up to rounding, 2 with kernels of the device, 3 in lower precision"
        command.add_argument("--level", type=int, default=2, help=levels)
        command.add_argument("--device", help="cpu, cuda or mps, to move the model there")
        _add_names(command, "--disable", "passes to omit", default=[])
        if name == "bisect":  # which looks for a rewrite
            continue
        kinds = ("bf16", "fp16", "int8")
        command.add_argument("--precision", choices=kinds, help="at level 3")
        engines = "what may run parts of the model at level 2: openvino, onnxruntime, inductor,"
        engines += " none, or auto, the default: OpenVINO where it is installed"
        _add_names(command, "--engines", engines)
    commands.choices["explain"].add_argument("name", help="a pass")
    commands.choices["optimize"].add_argument("--html", help="a file to write the report to")
    rounds = "how many ratios are taken, at least 6 (default: 20); more tell a smaller difference"
    commands.choices["compare"].add_argument("--rounds", type=int, default=20, help=rounds)
    return parser


def _add_names(parser: ArgumentParser, option: str, text: str, **default: Any) -> None:
    """Add an option of one word, so that the model may follow it; its uses add up."""
    settings: Any = {"action": "extend", "metavar": "NAME[,NAME]"} | default
    settings["type"] = lambda names: [name for name in names.split(",") if name not in ("", "none")]
    parser.add_argument(option, help=text, **settings)


def _passes(options: Namespace) -> tuple[str, Any]:
    rows = []
    for each in all_passes():
        summary = optimizer.explain(each.name).splitlines()[2]
        rows.append({"name": each.name, "numerics": each.numerics, "summary": summary})
    return "\n".join(columns([tuple(row.values()) for row in rows])), rows


def _explain(options: Namespace) -> tuple[str, Any]:
    return (text := optimizer.explain(options.name)), {"name": options.name, "text": text}


def _optimize(options: Namespace) -> tuple[str, Any]:
    page = None if options.html is None else require_writable("--html", options.html)
    warnings.filterwarnings("ignore", "the model is in training mode")  # the report says so
    report = measured(*_optimized(options))
    if page is not None:
        page.write_text(report.to_html(), encoding="utf-8")
    return str(report), report.to_dict()


def _check(options: Namespace) -> tuple[str, Any]:
    optimizer.check(*_optimized(options, check=None))
    return f"{options.model}: the optimized model gives the model's answers.", {"same": True}


def _bisect(options: Namespace) -> tuple[str, Any]:
    model, inputs = _load(options)
    _tell("bisecting")
    result = optimizer.bisect(model, inputs, level=options.level, disable=options.disable)
    return f"{options.model}: {result}", asdict(result)


def _compare(options: Namespace) -> tuple[str, Any]:
    require_at_least(FEWEST_ROUNDS, rounds=options.rounds)  # raises before any work
    compared = optimizer.compare(*_optimized(options), rounds=options.rounds)
    return f"{options.model}: {compared}", asdict(compared) | {"verdict": compared.verdict}


def _cost(options: Namespace) -> tuple[str, Any]:
    model, fast, inputs = _optimized(options)
    before = roofline(model, inputs)
    after = roofline(fast, inputs, before.ceilings)
    peak = optimizer.measure(fast, inputs, repeats=1, warmup=1).peak_memory
    data = {"before": asdict(before), "after": asdict(after), "measured": peak}
    text = f"{after}\nbefore: {before.totals()}\npeak memory measured: {peak:,} bytes"
    return text + _not_counted(fast), data | {"remark": _not_counted(fast).strip()}


def _not_counted(fast: Any) -> str:
    """Return a remark on what runs parts of such calls, which no node of the code shows."""
    programs = {each.chosen for each in fast.report.choices} - {AS_IT_IS}
    head = "these are the nodes of the portable code; in calls like the example parts are run by"
    tail = "instead, whose work and memory of their own are not counted"
    return f"\n{head} {', '.join(sorted(programs))} {tail}" if programs else ""


def _optimized(options: Namespace, **settings: Any) -> tuple[nn.Module, Any, Any]:
    engines = "auto" if options.engines in (None, ["auto"]) else options.engines
    tuning = {"precision": options.precision, "engines": engines}
    Tuning(**tuning).at(options.level)  # raises before any work
    model, inputs = _load(options)
    _tell("optimizing")
    settings |= tuning | {"level": options.level, "disable": options.disable}
    fast = optimizer.optimize(model, inputs, **settings)
    _tell("running both, the model and the optimized one")
    return model, fast, inputs


def _load(options: Namespace) -> tuple[nn.Module, Any]:
    select(options.level, None, options.disable)  # raises before any work
    try:
        torch.empty(0, device=options.device)
    except (AssertionError, RuntimeError) as error:
        reason = f"--device {options.device} cannot be used here: {error}"
        raise optimizer.DeviceError(reason) from error
    _tell(f"making {options.model}")
    if ":" in options.model:
        return _from_callable(options.model, options.device)
    try:
        workload = workloads.load(options.model, device=options.device or "cpu")
    except workloads.UnknownWorkloadError as error:
        raise InputError(f"{error} A model of your own is named module:callable.") from error
    return workload.module, workload.example_inputs


def _from_callable(name: str, device: str | None) -> tuple[nn.Module, Any]:
    """Return the model and inputs that a function of the user's returns, on a device."""
    path, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        built = getattr(importlib.import_module(path), attribute)()
    except (Exception, SystemExit) as error:
        where = f", at {line}" if (line := line_of(error)) else ""
        reason = f"{type(error).__name__}: {error}{where}"
        raise InputError(f"'{name}' gives no model: {reason}") from error
    if not isinstance(built, tuple | list) or len(built) != 2:
        raise InputError(f"'{name}' returns {type(built)}: return a module and its example inputs.")
    model, inputs = built
    if device is None:
        return model, inputs
    return require_module(model).to(device), map_tensors(lambda tensor: tensor.to(device), inputs)


if __name__ == "__main__":
    sys.exit(main())
