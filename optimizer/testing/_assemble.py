"""The total interpreter of words: a `Spec` is a program, its source text and its module."""

from __future__ import annotations

import hashlib
import linecache
import operator
import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from textwrap import indent
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optimizer.testing._classes import HELPERS
from optimizer.testing._data import inputs_like, randomize
from optimizer.testing._machine import Machine, Shape, compiled
from optimizer.testing._tokens import TOKENS

IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.setitem,
)  # fmt: skip


def as_graph(model: nn.Module) -> fx.GraphModule:
    """A GraphModule that shares the submodules of `model`, with a node for each operation.

    Args:
        model: its forward has no loops, and takes what it has by default from what it is given.

    Raises:
        fx.proxy.TraceError: the forward asks for the value of a tensor.
    """
    tracer = _Tracer()
    with _Recorded(tracer):
        graph = tracer.trace(model)
    return fx.GraphModule(model, graph)


class _Proxy(fx.Proxy):
    """Stands for a tensor; what is written to it, or to a view that is no call, is recorded."""

    __array_priority__ = torch.Tensor.__array_priority__  # numpy's numbers leave products to it

    def __getattr__(self, name: str) -> Any:
        # Named tuples of results have these, which are methods of sparse tensors.
        if name not in ("values", "indices") and callable(getattr(torch.Tensor, name, None)):
            return super().__getattr__(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: fx.Proxy, *args: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    return record


for _each in IN_PLACE:
    setattr(_Proxy, f"__{_each.__name__}__", _recorded(_each))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = (self.submodule_paths or {}).get(m)  # the forward may make others
        return self.create_proxy("call_module", path, args, kwargs) if path else forward(*args)

    def create_arg(self, a: Any) -> Any:
        return super().create_arg(a.item() if type(a).__module__ == "numpy" else a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


class _Recorded(TorchFunctionMode):
    """Records what makes tensors of nothing, too."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


Entry: TypeAlias = Literal["module", "graph"]

# The most recent sources, which tracebacks and torch.fx can quote; older ones are forgotten.
_quotable: deque[str] = deque()


@dataclass(frozen=True)
class Spec:
    """A generated model and its data, as a handful of words: all that is needed to rebuild both.

    Attributes:
        tokens: what the stack machine executes.
        shape: of the first input.
        regime: a key of `optimizer.testing.REGIMES`, how parameters and inputs are drawn.
        seed: of the generator that they are drawn from.
        layout: a key of `optimizer.testing.LAYOUTS`, how the inputs lie in memory.
        entry: "module" is a class with a forward, "graph" the same as a GraphModule, each
            operation of which is one node, made by hand.
    """

    tokens: tuple[str, ...]
    shape: Shape = (2, 3)
    regime: str = "dyadic"
    seed: int = 0
    layout: str = "contiguous"
    entry: Entry = "module"

    def source(self) -> str:
        """Python source of `class Model(nn.Module)`, with the helpers that it needs."""
        return _source(self._assembled, bound=self.entry == "graph")

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module, with every parameter and statistic drawn anew; the same on each call."""
        model = randomize(load(self.source()).to(dtype), self.regime, self.seed)
        return as_graph(model) if self.entry == "graph" else model

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
        """Arguments of forward, in number and shape as declared."""
        kinds = self.argument_kinds()
        given = ([self.shape] * len(kinds), self.regime, self.seed, dtype)
        return inputs_like(*given, kinds=kinds, layout=self.layout)

    def argument_names(self) -> list[str]:
        """The names of what `inputs` gives."""
        return [argument.name for argument in self._assembled.arguments]

    def argument_kinds(self) -> list[str]:
        """For each of them how it is drawn: see `inputs_like`."""
        return [argument.kind for argument in self._assembled.arguments]

    def output_shapes(self) -> list[Shape]:
        """The shape of each output, as the stack machine keeps it."""
        machine = self._assembled
        return [value.shape for value in (*machine.outputs, *machine.stack)]

    def is_autocast(self) -> bool:
        """Whether the model is called under autocast."""
        return self._assembled.autocast

    def surroundings(self) -> torch.autocast:
        """What the model is called under: autocast to bfloat16, or none.

        Copies in bfloat16 are not kept, since a forward may write what they are copies of.
        """
        enabled = self.is_autocast()
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False)

    @cached_property
    def _assembled(self) -> Machine:
        machine = Machine(self.shape, autocast="autocast" in self.tokens)
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("error")  # what torch warns of is not written either
            for token in self.tokens:
                TOKENS[token](machine)
        machine.scope.clear()
        return machine


def load(source: str) -> nn.Module:
    """An instance of the `Model` that `source` defines; tracebacks can quote the source."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<model {digest}>"
    if filename not in linecache.cache:
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        _quotable.append(filename)
    if len(_quotable) > 256:
        linecache.cache.pop(_quotable.popleft(), None)
    namespace = {"__name__": "generated", "torch": torch, "nn": nn, "F": functional}
    exec(compiled(source, filename), namespace)
    with torch.random.fork_rng(devices=[]):
        model = namespace["Model"]()  # type: ignore[operator]
    assert isinstance(model, nn.Module)
    return model


def _source(machine: Machine, *, bound: bool) -> str:
    """The program; what arguments have by default is `bound` to their names if that is asked."""
    arguments = [v.name + machine.optional * (v.name != "x") for v in machine.arguments]
    given = [each.replace("*more", "more=()") for each in machine.defaults if each != "*"]
    bindings = [each.replace("=", " = ", 1) for each in given] if bound else []
    arguments += [] if bound else machine.defaults
    setup = ["super().__init__()", *machine.members, "self.eval()", *machine.finishing]
    body = [*bindings, *machine.statements, f"return {_returned(machine)}"]
    return (
        f"{_preamble(machine)}class Model(nn.Module):\n"
        "    def __init__(self):\n"
        f"{indent(chr(10).join(setup), ' ' * 8)}\n\n"
        f"{machine.decorator}    def forward(self, {', '.join(arguments)}):\n"
        f"{indent(chr(10).join(body), ' ' * 8)}\n"
    )


def _preamble(machine: Machine) -> str:
    """The classes and functions that the program names, and what they import."""
    text = "\n".join([*machine.members, *machine.finishing, machine.decorator])
    used = set(re.findall(r"\w+", text))
    helpers = "".join(f"{HELPERS[name]}\n\n" for name in HELPERS if name in used)
    modules = {name: name.rstrip(".") for name in ("functools.", "types.")}
    modules |= {"random.Random": "random", "np.": "numpy as np"}
    written = "\n".join([helpers, *machine.statements])
    imports = "".join(f"import {name}\n" for use, name in modules.items() if use in written)
    return f"{imports}\n\n{helpers}" if imports else helpers


def _returned(machine: Machine) -> str:
    names = [value.name for value in (*machine.outputs, *machine.stack)]
    keyed = "{" + ", ".join(f'"out{i}": {name}' for i, name in enumerate(names)) + "}"
    if len(names) == 1 and machine.returned == "({})":
        return names[0]
    return machine.returned.format(", ".join(names), keyed=keyed)
