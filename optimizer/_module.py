"""What `optimize` returns: an ordinary module with a report."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import fx, nn
from torch.fx._symbolic_trace import _patch_function
from torch.fx.graph_module import reduce_graph_module

from optimizer._arguments import STARS
from optimizer._copy import ModuleType, structural_copy
from optimizer._errors import CaptureError, InputError
from optimizer._inputs import ExampleInputs
from optimizer._refit import Recipe, loaded, packed, unpacked
from optimizer._report import Report, Size, listing
from optimizer._tracer import Tracer


class _Result(nn.Module):
    """Takes no checkpoint but its own: that of the original would undo half of the rewrites."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        if given and given != set(self.state_dict()):
            raise InputError(
                "this is no checkpoint of the optimized model, whose layers are not those of the"
                " original: pass one of the original model to refit(state_dict)."
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


class OptimizedModule(_Result, fx.GraphModule):
    """An optimized model: a GraphModule that keeps its report when copied or pickled."""

    @classmethod
    def of(
        cls, module: fx.GraphModule, report: Report, recipe: Recipe | bytes | None = None
    ) -> OptimizedModule:
        """The same graph with the modules that it calls, and a report completed by its size."""
        optimized = cls(module, module.graph, type(module).__name__)
        graph = report.graph_after or listing(module)
        report = replace(report, after=Size.of(optimized), graph_after=graph)
        optimized.meta = {"report": report, "recipe": recipe}
        return optimized

    @property
    def report(self) -> Report:
        """What was rewritten, what was refused, and why."""
        report: Report = self.meta["report"]
        return report

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
        from optimizer._optimize import optimize

        recipe = unpacked(self.meta.get("recipe"))
        model = recipe.model_with(state_dict)
        inputs = recipe.example_inputs() if example_inputs is None else example_inputs
        precision = self.meta.get("precision")
        fresh = optimize(
            model,
            inputs,
            level=recipe.level,
            capture="export" if self.report.front_end == "export" else "symbolic",
            check=None if example_inputs is None else "final",
            only=recipe.passes,
            precision=precision and precision.name,
            error_budget=precision and precision.budget,
            cuda_graph=self.meta.get("cuda_graph", True),
            engines=self.meta.get("engines", ()),
        )
        if not isinstance(fresh, OptimizedModule):
            raise CaptureError("; ".join(fresh.report.remarks))
        fx.GraphModule.__init__(self, fresh, fresh.graph, type(fresh).__name__)
        self.meta = fresh.meta
        return self

    def recompile(self) -> Any:
        """Generate the code, to be called as any module is.

        fx puts a wrapper around each call that prints the graph on errors. It costs half a
        microsecond, a tenth of a small model.
        """
        code = super().recompile()
        del type(self).__call__
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
        meta = self.meta | {"recipe": packed(self.meta.get("recipe"))}
        return _rebuild, (type(self)._class(), body | {"_tracer_cls": Retracer}, imports, meta)

    @classmethod
    def _class(cls) -> type[Self]:
        """The class itself: fx makes each GraphModule one of its own."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("optimizer."))


_OF_THIS_PROCESS = frozenset(("meta", "_prepared_plans"))


def _carried(held: Mapping[str, Any], module: ModuleType) -> ModuleType:
    """A copy with what the original held besides its graph: hooks, and attributes of a user's."""
    own = vars(module)
    for name, value in held.items():
        if name in ("_parameters", "_buffers", "_modules"):
            own[name] = dict(value) | own[name]
        elif name.endswith("_hooks") or not (name in own or name in _OF_THIS_PROCESS):
            own[name] = value
    return module


class Retracer(Tracer):
    """Records code that was generated from a graph, where no argument chooses a branch."""

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """As fx does, but with `*args` where the code has it, before what is passed by name."""
        made = {}
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            default = () if parameter.default is parameter.empty else (parameter.default,)
            target = STARS.get(parameter.kind, "") + parameter.name
            made[parameter.name] = self.create_proxy("placeholder", target, default, {})
        code: Any = root_fn
        names = code.__code__.co_varnames[1 : len(made) + 1]
        function: Any = _patch_function(code, len(made) + 1)
        return partial(self._called, function), [self.root, *(made[name] for name in names)]


def _rebuild(
    kind: type[OptimizedModule], body: dict[str, Any], imports: str, meta: dict[str, Any]
) -> OptimizedModule:
    held = dict(body)
    rebuilt = reduce_graph_module(body | {"meta": {}}, imports)
    assert isinstance(rebuilt, fx.GraphModule)
    module = kind.of(rebuilt, meta["report"])
    module.meta = meta
    return _carried(held, module)


class Unchanged(_Result):
    """A model that could not be captured, run as it is; its report says why.

    Args:
        model: a snapshot of the model, or the model itself where it cannot be copied.
        owns: whether it is a snapshot. Else it is no submodule of this, and not to be changed.
    """

    def __init__(self, model: nn.Module, report: Report, *, owns: bool) -> None:
        super().__init__()
        self.report, self.training = report, model.training
        if owns:
            self.model = model
        else:
            object.__setattr__(self, "model", model)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the copy."""
        self._require_copy(mode == self.training)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._require_copy()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _require_copy(self, changes_nothing: bool = False) -> None:
        if not (changes_nothing or "model" in self._modules):
            raise InputError(
                "the model cannot be copied, and this calls the one that was given: change that"
                " one, and optimize it again."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def refit(
        self, state_dict: Mapping[str, Any], example_inputs: ExampleInputs | None = None
    ) -> Unchanged:
        """Load a checkpoint of the original model; it reaches this copy only."""
        self.model = loaded(structural_copy(self.model, share=False), state_dict)
        return self
