"""What `optimize` returns: an ordinary module with a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.fx.graph_module import reduce_graph_module

from optimizer._report import Report, Size


class OptimizedModule(fx.GraphModule):
    """An optimized model: a GraphModule that keeps its report when copied or pickled."""

    @classmethod
    def of(cls, module: fx.GraphModule, report: Report) -> OptimizedModule:
        """The same graph with the modules that it calls, and a report completed by its size."""
        optimized = cls(module, module.graph, type(module).__name__)
        optimized.meta = {"report": replace(report, after=Size.of(optimized))}
        return optimized

    @property
    def report(self) -> Report:
        """What was rewritten, what was refused, and why."""
        report: Report = self.meta["report"]
        return report

    def recompile(self) -> Any:
        """Generate the code, to be called as any module is.

        fx puts a wrapper around each call that prints the graph on errors. It costs half a
        microsecond, a tenth of a small model.
        """
        code = super().recompile()
        if "__call__" in vars(type(self)):
            del type(self).__call__
        return code

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _rebuild, (body, imports, self.report)


def _rebuild(body: dict[str, Any], imports: str, report: Report) -> OptimizedModule:
    rebuilt = reduce_graph_module(body, imports)
    assert isinstance(rebuilt, fx.GraphModule)
    return OptimizedModule.of(rebuilt, report)


class Unchanged(nn.Module):
    """A model that could not be captured, run as it is; its report says why."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        super().__init__()
        self.model = model
        self.report = report
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)
