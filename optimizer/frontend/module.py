"""What `optimize` returns: an ordinary module with a report, which takes checkpoints.

Folded weights cannot be loaded one for one: the original is built again with the new ones, and
optimized again. Only its structure is kept for that, and none of the weights.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module
from torch.utils import _pytree as pytree

from optimizer.core.copy import ModuleType, Storages, held_tensors, on_storage, structural_copy
from optimizer.core.errors import CaptureError, InputError
from optimizer.core.guards import GUARDS
from optimizer.core.inputs import Call, ExampleInputs, storages_in
from optimizer.core.report import Report, Size, listing
from optimizer.frontend.names import rename_attributes, require_printable
from optimizer.frontend.tracer import Tracer

_META = torch.device("meta")


@dataclass(frozen=True)
class Recipe:
    """How an optimized model was made. It is never changed, so copies share it."""

    model: nn.Module  # a copy of the original, with no data in what a checkpoint brings
    devices: dict[str, torch.device]  # where each of those tensors was
    call: Any  # the example inputs, what makes a blank one for each tensor
    optimize: Callable[..., Any]  # `optimize` as it was told, but for the check

    @classmethod
    def of(cls, model: nn.Module, call: Call | None, optimize: Callable[..., Any]) -> Recipe | None:
        """Return the recipe of a model that was optimized, or None where there is none."""
        try:
            devices = {name: tensor.device for name, tensor in _checkpoint(model).items()}
            hollow = _copy_on(model, dict.fromkeys(devices, _META))
            blank = pytree.tree_map_only(
                torch.Tensor, lambda each: partial(_like, _like(each, _META), each.device), call
            )
        except Exception:  # a state_dict or a kind of tensor that a user wrote
            return None
        return cls(hollow, devices, blank, optimize)

    def example_inputs(self) -> Any:
        """Return inputs like those of the optimization, of zeros; None if there were none."""
        if self.call is None:
            return None
        args, kwargs = pytree.tree_map_only(
            lambda of: isinstance(of, partial) and of.func is _like, lambda of: of(), self.call
        )
        return kwargs or args

    def __deepcopy__(self, memo: Any) -> Recipe:
        return self


def loaded(model: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """Return `model` with a checkpoint loaded; raise an InputError unless it is the original's."""
    ours = isinstance(model, OptimizedModule | Unchanged)
    load: Any = model.refit if ours else model.load_state_dict
    try:
        load(state_dict)
    except Exception as error:  # whatever a mapping that is no checkpoint leads to
        raise InputError(f"pass a checkpoint of the original model: {error}") from error
    return model


def _checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    entries = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def _copy_on(model: nn.Module, devices: Mapping[str, torch.device]) -> nn.Module:
    """Return a copy, with new storages where a checkpoint brings all tensors that share one."""
    tensors = _checkpoint(model)
    loaded_ids = {id(tensor) for tensor in tensors.values()}
    shared = storages_in([each for each in held_tensors(model) if id(each) not in loaded_ids])
    onto: Storages = {
        storage: _storage_like(tensor, devices[name])
        for name, tensor in tensors.items()
        for storage in storages_in(tensor) - shared
    }
    return structural_copy(model, share_parameters=False, onto=onto)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return on_storage(tensor, _storage_like(tensor, device))


def _storage_like(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    size = tensor.untyped_storage().nbytes()
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()


class _Result(nn.Module):
    """Take no checkpoint but its own: that of the original would undo half of the rewrites."""

    model: nn.Module  # of those that hold one
    _preparing_anew: Callable[..., Any] = nullcontext  # around what changes the weights

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        keys = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        if keys and keys != set(self.state_dict()):
            other = "a checkpoint of the original, or of a model with other layers"
            raise InputError(f"this is {other}: pass one of the original to refit(state_dict).")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what `torch.jit.script` compiles, which takes no forward of `*args`."""
        return self.model

    def refit(
        self, state_dict: Mapping[str, Any], example_inputs: ExampleInputs | None = None
    ) -> Self:
        """Take a checkpoint of the original model, into a copy of the one that is held here."""
        self.model = loaded(structural_copy(self.model, share_parameters=False), state_dict)
        return self


class Prepared(_Result):
    """A result that was prepared for its weights: only its own methods change them."""

    def _forget(self) -> None:
        """Forget what was prepared: the weights, their device or their dtype will change."""
        raise NotImplementedError

    @contextmanager
    def _preparing_anew(self) -> Iterator[None]:
        """Forget what was prepared before the weights change, and what others did meanwhile."""
        self._forget()
        try:
            yield
        finally:
            self._forget()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of this module, which is then prepared anew."""
        with self._preparing_anew():
            return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._preparing_anew():
            super()._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with self._preparing_anew():
            return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        """Set the mode; what was prepared in another one is made anew, as its calls may write."""
        if all(each.training == mode for each in self.modules()):
            return self
        with self._preparing_anew():
            return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse, with an InputError, to be trained: what was prepared would stay as it is."""
        if requires_grad:
            raise InputError("weights are constants: train the original, and refit or use level=1.")
        return super().requires_grad_(False)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor | nn.Module):
            self._forget()
        super().__setattr__(name, value)


class OptimizedModule(_Result, fx.GraphModule):
    """An optimized model: a GraphModule that keeps its report when copied or pickled."""

    @classmethod
    def of(
        cls, module: fx.GraphModule, report: Report, recipe: Recipe | bytes | None = None
    ) -> OptimizedModule:
        """Return an optimized module of a graph, its modules and a report, which gets its size."""
        rename_attributes(module, module.graph, cls._class())
        require_printable(module.graph)
        optimized = cls(module, module.graph, type(module).__name__)
        graph = report.graph_after or listing(module)
        report = replace(report, after=Size.of(optimized), graph_after=graph)
        optimized.meta = {"report": report, "recipe": recipe}
        return optimized

    @property
    def report(self) -> Report:
        """What was rewritten, what was refused, and why."""
        return self.meta["report"]  # type: ignore[no-any-return]

    def refit(
        self, state_dict: Mapping[str, Any], example_inputs: ExampleInputs | None = None
    ) -> Self:
        """Take a checkpoint of the original model, by optimizing it again; return this module.

        It is afterwards as `optimize` left it: on the devices and in the dtypes of the original.

        Args:
            state_dict: what `load_state_dict` of the original model takes.
            example_inputs: what to check the answer with. Without them, it is not checked: only
                the shapes of the first ones are remembered.

        Raises:
            InputError: the checkpoint does not fit, or the original is not known here.
            CaptureError: nothing could be optimized with these weights.
        """
        recipe, reason = self.meta.get("recipe"), ""
        try:
            if isinstance(recipe, bytes):
                recipe = torch.load(io.BytesIO(recipe), weights_only=False)
        except Exception as error:  # whatever importing a user's module raises
            reason = f" ({error})"
        if not isinstance(recipe, Recipe):
            advice = "load the weights there and optimize it"
            raise InputError(f"the original is not known here{reason}: {advice}.")
        model = loaded(_copy_on(recipe.model, recipe.devices), state_dict)
        inputs = recipe.example_inputs() if example_inputs is None else example_inputs
        check = None if example_inputs is None else "final"
        with self._preparing_anew():
            fresh = recipe.optimize(model, inputs, check=check)
            if not isinstance(fresh, OptimizedModule):
                raise CaptureError("; ".join(fresh.report.remarks))
            fx.GraphModule.__init__(self, fresh, fresh.graph, type(fresh).__name__)
            self.meta = fresh.meta
        return self

    def __prepare_scriptable__(self) -> nn.Module:
        if any(node.target in GUARDS for node in self.graph.nodes):
            raise InputError("TorchScript cannot compile the guards of this: use torch.jit.trace.")
        return fx.GraphModule(self, self.graph)

    def recompile(self) -> Any:
        """Generate the code, to be called as any module is."""
        code = super().recompile()
        del type(self).__call__  # fx's, which prints the graph on errors, costs half a microsecond
        return code

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        fx.GraphModule.__init__(copied, self, copy.deepcopy(self.graph), type(self).__name__)
        copied.meta = dict(self.meta)
        return _carried(vars(self), copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied: Any = super().__deepcopy__(memo)
        return _carried(copy.deepcopy(vars(self), memo), copied)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        body = {name: each for name, each in body.items() if name not in _OF_THIS_PROCESS}
        recipe, file = self.meta.get("recipe"), io.BytesIO()
        if isinstance(recipe, Recipe):  # as bytes: who loads it need not have the original's code
            try:
                torch.save(recipe, file)
                recipe = file.getvalue()
            except Exception:  # a class or an attribute of the user's that does not pickle
                recipe = None
        meta = self.meta | {"recipe": recipe}
        return _rebuild, (type(self)._class(), body | {"_tracer_cls": Retracer}, imports, meta)

    @classmethod
    def _class(cls) -> type[Self]:
        """Return the class itself: fx makes each GraphModule one of its own."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("optimizer."))


_OF_THIS_PROCESS = frozenset(("meta", "_prepared_plans"))


def _carried(attributes: Mapping[str, Any], module: ModuleType) -> ModuleType:
    """Give a copy the original's hooks and attributes of a user's; return it."""
    table = vars(module)
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers", "_modules"):
            table[name] = dict(value) | table[name]
        elif name.endswith("_hooks") or not (name in table or name in _OF_THIS_PROCESS):
            table[name] = value
    return module


class Retracer(Tracer):
    """Record code that was generated from a graph, where no argument chooses a branch."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        graph = super().trace(root, concrete_args)
        rename_attributes(root, graph)  # fx calls a layer by the first name that it finds
        return graph

    def _input(self, node: fx.Node, value: Any) -> Any:
        return self.proxy(node)


def _rebuild(
    kind: type[OptimizedModule], body: dict[str, Any], imports: str, meta: dict[str, Any]
) -> OptimizedModule:
    rebuilt: Any = reduce_graph_module(body | {"meta": {}}, imports)
    module = kind.of(rebuilt, meta["report"])
    module.meta = meta
    return _carried(body, module)


class Unchanged(_Result):
    """A model that could not be captured, run as it is; its report says why.

    It `owns` a snapshot. What cannot be copied is no submodule of this, and not to be changed.
    """

    def __init__(self, model: nn.Module, report: Report, *, owns: bool) -> None:
        super().__init__()
        self.report, self.training = report, getattr(model, "training", False)
        if owns:
            self.model = model
        else:
            object.__setattr__(self, "model", model)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the copy."""
        if mode != self.training:
            self._require_copy()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._require_copy()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _require_copy(self) -> None:
        if "model" not in self._modules:
            raise InputError("the model cannot be copied, so this calls it: change that one.")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        model: Any = self._modules.get("model") or self.model  # a search takes a microsecond
        return model(*args, **kwargs)
