"""`python -m benchmarks.figures [MODEL ...]`: what optimizing does to each model, as one table.

Kernels are ATen operators of one forward without views; peak memory is what one forward takes
above weights and inputs; an error is the distance in the 2-norm from the answer in float64, of
the model cast to a dtype and of the optimized one, relative to that answer; the median of three
inputs. Nothing here is a time. (asv imports this file on old commits, too: no import of ours
at the top.)
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

MODELS = (
    "resnet18", "resnet50", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "vit_b_16",
    "swin_t", "swin_v2_t", "densenet121", "shufflenet_v2_x1_0", "regnet_y_400mf", "vgg11_bn",
    "deeplabv3_mobilenet_v3_large", "r3d_18",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEAD = (
    "| model | kernels | peak memory, MiB | error in float32 | in bfloat16 | in float16 |\n"
    "|---|---|---|---|---|---|"
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.figures", description=__doc__)
    parser.add_argument("names", nargs="*", help="workloads; by default those of the page")
    names = parser.parse_args(arguments).names
    print(_HEAD)
    for name in names or MODELS:
        print(f"| {name} | {' | '.join(_figures(name))} |", flush=True)


def _figures(name: str) -> Iterator[str]:
    import models
    import optimizer
    from optimizer.analysis import Ceilings, roofline

    workload, ceilings = models.load(name), Ceilings(flops=1e11, bytes=1e10)
    model, inputs = workload.module, workload.example_inputs
    pair = (model, optimizer.optimize(model, inputs, check=None, level=1))
    before, after = (roofline(each, inputs, ceilings).launches for each in pair)
    yield f"{before} → {after}"
    taken = [optimizer.measure(each, inputs, repeats=1, warmup=1).peak_memory for each in pair]
    yield " → ".join(f"{each / 2**20:.3g}" for each in taken)
    for dtype in DTYPES:
        yield " → ".join(f"{each:.2g}" for each in errors(name, dtype))


@torch.no_grad()
def errors(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """How far a model in `dtype`, and the same optimized and then cast, are from the truth.

    The median over three inputs: the error of one is a draw of luck.
    """
    import models
    import optimizer

    workload = models.load(name)
    model, inputs = workload.module, workload.example_inputs
    truth = copy.deepcopy(model).double()
    fast = optimizer.optimize(model, inputs, check=None, level=1).to(dtype)
    generator = torch.Generator().manual_seed(0)
    draws = [[_like(each, generator).to(dtype) for each in inputs] for _ in range(3)]
    rows = [_errors((model.to(dtype), fast), truth, draw) for draw in draws]
    eager, optimized = (statistics.median(column) for column in zip(*rows, strict=True))
    return eager, optimized


def _errors(pair: Any, truth: Any, inputs: list[torch.Tensor]) -> list[float]:
    true = _flat(truth(*(each.double() for each in inputs)))
    return [float((_flat(each(*inputs)) - true).norm() / true.norm()) for each in pair]


def _like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=generator)


def _flat(output: Any) -> torch.Tensor:
    return torch.cat([leaf.double().reshape(-1) for leaf in pytree.tree_leaves(output)])


if __name__ == "__main__":
    main(sys.argv[1:])
