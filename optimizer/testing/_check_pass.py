"""Fuzzing one rewrite, which must be seen to rewrite something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from hypothesis import Phase, given, settings
from torch import fx, nn

from optimizer.core.errors import PassError
from optimizer.core.report import Report
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.rewrite.contract import Pass
from optimizer.testing._assemble import Entry, Spec
from optimizer.testing._check import Subject, check_spec
from optimizer.testing._machine import Shape
from optimizer.testing._motif import Motif, words
from optimizer.testing._observe import same_bits
from optimizer.testing._strategies import FINITE, SHAPES, WRITABLE, around, models
from optimizer.testing._subject import Optimize


def check_pass(
    subject: Subject | Pass,
    motif: str | Motif,
    *,
    exact: bool = False,
    later: bool = False,
    max_examples: int = 200,
    alphabet: Iterable[str] | None = None,
    shapes: Iterable[Shape] = SHAPES,
    regimes: Iterable[str] = FINITE,
    layouts: Iterable[str] = WRITABLE,
    entries: Iterable[Entry] = ("module", "graph"),
) -> None:
    """Fuzz `subject` with generated models and report the smallest one that it gets wrong.

    The same call tries the same models each time. Needs no pytest.

    Args:
        subject: as for `check_spec`; or a pass, which is run alone, held to its numerics, and to
            later calls of other sizes.
        motif: a program in words of `TOKENS` that the subject must rewrite, such as "linear relu";
            or several, with near misses.
        exact: as for `check_spec`.
        later: as for `check_spec`.
        max_examples: how many models to try.
        alphabet: as for `models`; by default the motif, its near misses, and the words of the
            families that its words belong to.
        shapes: as for `models`; the motif is tried on its own as well.
        regimes: as for `models`.
        layouts: as for `models`.
        entries: as for `models`.

    Raises:
        Counterexample: see `check_spec`.
        InputError: there is no such word; the message names the nearest.
        PassError: nothing was checked, as the subject left the motif, or every model, as it was.
    """
    motif = Motif((motif,)) if isinstance(motif, str) else motif
    if isinstance(subject, Pass):
        exact, later = subject.numerics == "exact", True
        subject = Optimize(only=(subject,))
    shapes = list(shapes)
    for program in motif.fires:
        specs = (Spec(words(program), shape) for shape in (motif.shape, *shapes))
        changes = (is_changed(spec, check_spec(spec, subject, exact=exact)) for spec in specs)
        _require_changed(f"any model of its motif '{program}'", any(changes))
    strategy = models(
        alphabet=around(motif) if alphabet is None else alphabet,
        shapes=shapes,
        regimes=regimes,
        layouts=layouts,
        entries=entries,
    )
    changed = False

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def agrees(spec: Spec) -> None:
        nonlocal changed
        candidate = check_spec(spec, subject, exact=exact, later=later)
        changed = changed or is_changed(spec, candidate)

    agrees()
    _require_changed(f"any of {max_examples} models", changed)


def _require_changed(what: str, changed: bool) -> None:
    if not changed:
        raise PassError(
            f"check_pass checked nothing, since the subject did not change {what}:"
            " name a motif that it rewrites."
        )


def is_changed(spec: Spec, candidate: nn.Module) -> bool:
    """Whether a candidate for the model of `spec` is more than a copy of it.

    The report of this package tells; else the graphs, modules or tensors must differ.
    """
    report = getattr(candidate, "report", None)
    if isinstance(report, Report):
        return bool(report.fired) or any(each.chosen != AS_IT_IS for each in report.choices)
    model = spec.build(next(_floating(candidate), torch.empty(0)).dtype)
    return _described(model) != _described(candidate) or _tensors_differ(model, candidate)


def _floating(module: nn.Module) -> Iterator[torch.Tensor]:
    return (each for each in module.parameters() if each.is_floating_point())


def _described(module: nn.Module) -> list[str]:
    """Its nodes, and the modules that they call; of what cannot be traced its modules alone."""
    if not isinstance(module, fx.GraphModule):
        try:
            module = fx.symbolic_trace(module)
        except Exception:  # whatever a forward does with stand-ins
            return [repr(module)]
    modules = {name: repr(each) for name, each in module.named_modules() if name}
    nodes = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in module.graph.nodes]
    return [*nodes, *(f"{n.target}: {modules.get(str(n.target))}" for n in module.graph.nodes)]


def _tensors_differ(model: nn.Module, candidate: nn.Module) -> bool:
    before, after = model.state_dict(), candidate.state_dict()
    return before.keys() != after.keys() or not all(map(same_bits, before.values(), after.values()))
