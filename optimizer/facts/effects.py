"""What runs besides yielding a value: the effects of operators, and whose code it is.

What layers and sums of the same form yielded is remembered: their meta kernels are slow Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.experimental import _config
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.context import own_random_numbers
from optimizer.core.inputs import storages_in
from optimizer.core.node import has_plain_tensors, is_plain, module_of
from optimizer.core.ops import FACTORIES, RETURN_A_TENSOR

# Without data, `v[mask]` has as many rows as under a mask of True: an example as good as any.
EVERY_MASK_IS_FULL = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


class Effect(NamedTuple):
    """What a call did besides yielding a value."""

    writes: Set[int]
    random: bool = False


NOTHING = Effect(frozenset())


class Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect the storages written, whether numbers were drawn, and whether data gave a size."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: set[int] = set()
        self.random = False
        self.counts = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.counts |= is_sized_by_values(func, args)
        self.writes |= storages_in(written_by(func, args, kwargs))
        if not self.random:
            return func(*args, **kwargs)
        with own_random_numbers():  # on meta tensors too, where decompositions of torch's do it
            return func(*args, **kwargs)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes."""
    parameters = func._schema.arguments
    given = {**dict(zip((each.name for each in parameters), args, strict=False)), **kwargs}
    written = [each.name for each in parameters if each.alias_info and each.alias_info.is_write]
    if given.get("training"):  # native_batch_norm updates these, and its schema keeps quiet
        written += ["running_mean", "running_var"]
    return [given[name] for name in written if name in given]


def is_sized_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the size of what an operator returns depends on values."""
    if func is torch.ops.aten.index.Tensor:  # v[i] has as many elements as there are numbers in i
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


_KNOWN = frozenset(("torch", "torchvision", "_operator", "math", "collections", "optimizer"))
_KNOWN_BUILTINS = (abs, bool, divmod, float, getattr, int, len, max, min, pow, round, sum)


def home_of(node: fx.Node) -> str:
    """The package whose code a node calls; empty where a function or a method does not tell.

    A decorator names itself after what it wraps: where one is another's than that, the other's.
    """
    code: Any = type(module_of(node)) if node.op == "call_module" else node.target
    homes = [""]
    while code is not None:
        inside = code.__globals__.get("__name__") if isinstance(code, FunctionType) else None
        named = (getattr(code, "__module__", None), inside)
        homes += [str(name).partition(".")[0] for name in named if name]
        code = getattr(code, "__dict__", {}).get("__wrapped__")
    return next((home for home in homes if home and home not in _KNOWN), homes[-1])


def runs_known_code(node: fx.Node) -> bool:
    """Whether a node is known to have no effects but those that ATen operators have."""
    calls_code = node.op in ("call_function", "call_module")
    return not calls_code or node.target in _KNOWN_BUILTINS or home_of(node) in _KNOWN


def devices_named_by(node: fx.Node) -> set[torch.device]:
    """Devices that a call names, or takes by default because it makes a tensor of nothing."""
    named = set[torch.device]()
    for leaf in (*node.args, *node.kwargs.values()):
        if isinstance(leaf, str | torch.device):
            with suppress(RuntimeError):  # another word
                named.add(torch.device(leaf))
    if node.op == "call_method" and node.target in ("cpu", "cuda"):
        named.add(torch.device(str(node.target)))
    if node.op == "call_function" and node.target in FACTORIES and "device" not in node.kwargs:
        named.add(torch.get_default_device())
    return named


def called_as_they_are(module: fx.GraphModule) -> list[str]:
    """What was not recorded, because nothing is known of what it does; and the reasons."""
    calls = {n.target: module_of(n) for n in module.graph.find_nodes(op="call_module")}
    return [
        f"'{name}' ({type(each).__name__}) is called as it is: it is scripted, or it has hooks,"
        " parametrizations or a __call__"
        for name, each in calls.items()
        if isinstance(each, torch.jit.ScriptModule) or not is_plain(each)
    ]


_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul))
_MOST = 1 << 14
_known: dict[Any, Any] = {}  # the layout of a new tensor, or None if the first is overwritten


def known_outcome(
    run: Callable[[], tuple[Any, Effect]], called: Any, *args: Any
) -> tuple[Any, Effect]:
    """What a call on meta tensors yields and does: as before, or as a run tells."""
    key = _form(called, args)
    if key in _known:
        if (layout := _known[key]) is None:
            return args[0], Effect(storages_in(args[0]))
        return torch.empty_strided(*layout[:2], dtype=layout[2], device="meta"), NOTHING
    value, effect = run()
    if isinstance(called, _NormBase) and effect == NOTHING and args[0].is_contiguous():
        value = value.new_empty(value.shape)  # of single elements, its kernel keeps no strides
    over = value is args[0] and effect == Effect(storages_in(value)) if args else False
    new = effect == NOTHING and storages_in(value).isdisjoint(storages_in(args))
    if key and isinstance(value, torch.Tensor) and (over or new) and len(_known) < _MOST:
        _known[key] = None if over else _layout(value)
    return value, effect


def _form(called: Any, args: tuple[Any, ...]) -> Any:
    """All that the layout of a result depends on; None where it is not known what that is."""
    if not all(isinstance(each, torch.Tensor) for each in args):
        return None
    layouts = tuple(map(_layout, args))
    if not isinstance(called, nn.Module):
        return (called, layouts) if called in _ARITHMETIC else None
    kind = type(called)
    ours = kind.__module__.startswith(("torch.nn.modules.", "optimizer."))
    if not (ours and isinstance(called, RETURN_A_TENSOR)) or has_plain_tensors(called):
        return None
    names = ("training", "_reversed_padding_repeated_twice", *getattr(kind, "__constants__", ()))
    settings = [getattr(called, name, None) for name in names]
    held = [*called._parameters.items(), *called._buffers.items()]
    tensors = tuple((name, each if each is None else _layout(each)) for name, each in held)
    return kind, repr(settings), tensors, layouts


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
