"""A module's computation as a plain function, for a plan that nobody else calls.

A module is called through its hooks and looks its parts up by a failing access. That is little
while it is warm; after a forward, Python's own data are far from the processor, and three modules
within one another took a quarter of a millisecond of each call of mobilenet_v3_large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import fx, nn


def as_function(module: nn.Module) -> Callable[..., Any]:
    """What a module computes with the weights and submodules that it has now, without hooks."""
    if not isinstance(module, fx.GraphModule):
        return module.forward
    held = vars(module) | module._parameters | module._buffers
    parts = {name: each for name, each in module._modules.items() if each is not None}
    held |= {name: as_function(each) for name, each in parts.items()}
    return functools.partial(type(module).forward, SimpleNamespace(**held))
