"""One generated model, given to a function from a module and its inputs to a module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import fx, nn

from optimizer.core.errors import OptimizerWarning, PassError
from optimizer.core.report import Report
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.rewrite.contract import Pass
from optimizer.testing._assemble import Entry, Spec
from optimizer.testing._later import LATER_CALLS, later_calls
from optimizer.testing._machine import Shape
from optimizer.testing._observe import same_bits
from optimizer.testing._oracles import assert_equivalent, untouched
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import FINITE, SHAPES, WRITABLE, around, models, on_each
from optimizer.testing._subject import Optimize, nothing_said_of_the_model
from optimizer.testing.motifs import Motif, words

FOLDER = "FUZZ_CRASHES"  # the environment variable that names it; nothing is written without


@contextmanager
def on_disk(test: Callable[[], str]) -> Iterator[None]:
    """Keep the text of a test in a file while the block runs; it stays if the process dies."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    path = Path(folder) / f"test_crash_{os.getpid()}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(test(), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


Subject: TypeAlias = Callable[[nn.Module, tuple[torch.Tensor, ...]], nn.Module]


def check_spec(
    spec: Spec,
    subject: Subject,
    *,
    exact: bool = False,
    dtype: torch.dtype = torch.float64,
    later: bool | tuple[str, ...] = False,
) -> nn.Module:
    """Build the model of `spec`, give it to `subject`, and compare what comes back.

    Args:
        spec: the model and its data.
        subject: makes the candidate; must leave the model, the inputs and the random state alone.
        exact: demand the same bits whatever the data; else see `assert_equivalent`.
        dtype: of parameters and inputs. Only `exact` makes sense below float64.
        later: make those of `LATER_CALLS` too that the spec's seed chooses, or those that are
            named, but for those that a pass which fired does not hold for.

    Returns:
        The candidate.

    Raises:
        Counterexample: the subject raised, touched what it was given, left a pass of this package
            out, which that warns of and reports, or the candidate differs. Its text is a report
            that begins with a test to paste.
    """
    model, inputs = spec.build(dtype), spec.inputs(dtype)
    calls = later if isinstance(later, tuple) else later_calls(spec) if later else ()
    retry = partial(check_spec, subject=subject, exact=exact, dtype=dtype, later=later)
    suspect = Counterexample(spec, subject, retry, exact=exact, dtype=dtype, later=calls)
    try:
        with on_disk(suspect.reproducer), spec.surroundings(), warnings.catch_warnings():
            warnings.simplefilter("error", OptimizerWarning)
            nothing_said_of_the_model()
            candidate = _judged(model, inputs, subject, exact)
            report = getattr(candidate, "report", None)
            promised = report is not None and "recognize_attention" in report.counts()
            for call in calls:
                if not (promised and call == "not finite"):  # as the docstring of that pass says
                    LATER_CALLS[call](model, candidate, inputs, exact=exact)
    except Exception as error:
        suspect.__cause__ = error
    else:
        return candidate
    # Hypothesis tells failures apart by their context and the line that raised it, which in code
    # that torch.fx makes has another file name each time.
    kind = type(suspect.__cause__)
    suspect.__context__ = kind.__new__(kind)
    raise suspect


def _judged(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], subject: Subject, exact: bool
) -> nn.Module:
    kept = [tensor.clone() for tensor in inputs]
    with untouched(model):
        candidate = subject(model, inputs)
    remarks = getattr(getattr(candidate, "report", None), "remarks", ())
    undone = [remark for remark in remarks if "rolled back" in remark]
    assert not undone, undone[0]
    assert all(map(same_bits, inputs, kept)), "the subject overwrote its inputs"
    assert_equivalent(model, candidate, inputs, exact=exact)
    return candidate


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

    @on_each(strategy, max_examples, shrink=True)
    def agrees(spec: Spec) -> None:
        nonlocal changed
        candidate = check_spec(spec, subject, exact=exact, later=later)
        changed = changed or is_changed(spec, candidate)

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
    model = spec.build()
    before, after = model.state_dict(), candidate.state_dict()
    same = before.keys() == after.keys() and all(map(same_bits, before.values(), after.values()))
    return not same or _described(model) != _described(candidate)


def _described(module: nn.Module) -> str:
    """Its code, and the modules that this calls; of what cannot be traced its modules alone."""
    if not isinstance(module, fx.GraphModule):
        try:
            module = fx.symbolic_trace(module)
        except Exception:  # whatever a forward does with stand-ins
            return repr(module)
    return f"{module.code}{dict(module.named_children())}"
