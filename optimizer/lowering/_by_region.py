"""Straight-line code of which each region runs by the program that was chosen for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optimizer.lowering._choose import Chooser
from optimizer.lowering._regions import extract_layers


def by_region(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], chooser: Chooser
) -> tuple[fx.GraphModule, Sequence[torch.Tensor]]:
    """The same code, with each region a module that it calls; and what it makes of `inputs`."""
    program = fx.GraphModule(module, copy.deepcopy(module.graph))
    extract_layers(program)
    program.recompile()
    return program, _Choosing(program, chooser).run(*inputs)


class _Choosing(fx.Interpreter):
    """Runs a program once and puts, for each region that it comes to, the best in its place."""

    def __init__(self, program: fx.GraphModule, chooser: Chooser) -> None:
        super().__init__(program)
        self.chooser = chooser

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.module.get_submodule(target)
        assert isinstance(region, fx.GraphModule)
        chosen, outputs = self.chooser(region, args)
        self.module.set_submodule(target, chosen)
        return outputs
