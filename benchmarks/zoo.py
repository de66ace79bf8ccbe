"""`python -m benchmarks.zoo [MODEL ...]`: are real models right, and does none end the process?

By default the workloads, and a small model of each architecture that timm has a file for; `--small`
takes all of timm's up to so many million parameters. Each is optimized and called in a process of
its own, at other values too. One line for each: what runs its regions, and how far the answer is
from float64's beside eager's. The exit code counts those that are wrong, raise or end the process.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.census import architectures, import_timm, load

_FAR = 32  # times eager's own distance from float64, as in the fuzz
_SECONDS = 600  # for one model
_LARGE = 1e8  # parameters


def main(arguments: list[str]) -> int:
    """Try each model; return how many failed."""
    options = _options(arguments)
    outcomes = Counter[str]()
    for name in options.models or (_small(options.small) if options.small else architectures()):
        outcome, told = _tried_apart(name, options)
        outcomes[outcome] += 1
        print(f"{name}: {outcome}{told and '; '}{told}", flush=True)
    print("; ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return sum(count for outcome, count in outcomes.items() if outcome not in ("right", "skipped"))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("models", nargs="*", help="names of workloads or of timm's models")
    parser.add_argument("--small", type=float, metavar="MILLIONS", help="all of timm's up to that")
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--engines", choices=("auto", "none"), default="auto")
    return parser.parse_args(arguments)


def _small(millions: float) -> Iterator[str]:
    timm = import_timm()
    for name in timm.list_models():
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except Exception:  # some cannot be made without memory
            continue
        if sum(each.numel() for each in model.parameters()) <= millions * 1e6:
            yield name


def _tried_apart(name: str, options: argparse.Namespace) -> tuple[str, str]:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(sender, name, options))
    process.start()
    sender.close()
    try:
        found: tuple[str, str] = receiver.recv() if receiver.poll(_SECONDS) else ("too slow", "")
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return (signal.Signals(-code).name if code < 0 else f"exit code {code}"), ""
    process.kill()
    return found


def _send(sender: Any, name: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    try:
        model, inputs = load(name)
    except Exception as error:
        sender.send(("skipped", f"it cannot be made: {error}"))
        return
    if sum(each.numel() for each in model.parameters()) > _LARGE:
        sender.send(("skipped", "it is large"))
        return
    try:
        sender.send(_tried(model, inputs, options))
    except Exception as error:
        sender.send(("raised", f"{type(error).__name__}: {error}"))


def _tried(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], options: argparse.Namespace
) -> tuple[str, str]:
    import optimizer

    engines = () if options.engines == "none" else "auto"
    started = time.perf_counter()
    fast = optimizer.optimize(model, inputs, level=options.level, engines=engines)
    seconds = time.perf_counter() - started
    report: Any = fast.report
    others = tuple(each * 0.5 + 0.1 if each.is_floating_point() else each for each in inputs)
    with torch.no_grad():
        distances = [_distances(model, fast, each) for each in (inputs, others, inputs)]
    eager, ours = map(max, zip(*distances, strict=True))
    regions = Counter(choice.chosen for choice in report.choices)
    kept = ", ".join(f"{count} {name}" for name, count in regions.items()) or "no regions"
    refused = [str(choice.rejected) for choice in report.choices if choice.rejected]
    told = f"{seconds:.1f} s; {kept}; error {ours:.1e} beside {eager:.1e}"
    if eager == math.inf:
        return "skipped", "eager is NaN or infinite where float64 is not, or not where it is"
    outcome = "right" if ours <= _FAR * max(eager, 1e-7) else "wrong"
    return outcome, "; ".join([told, *report.remarks, *refused])


def _distances(
    model: nn.Module, fast: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[float, float]:
    """How far eager and ours are from the answer in float64; infinitely where NaN differ."""
    from optimizer.core.inputs import tensors_in
    from optimizer.verify.equivalence import relative_error

    wide = copy.deepcopy(model).double()
    exact = wide(*(each.double() if each.is_floating_point() else each for each in inputs))
    expected, *actual = map(tensors_in, (exact, model(*inputs), fast(*inputs)))
    eager, ours = (max(map(relative_error, expected, each), default=0.0) for each in actual)
    return eager, ours


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
