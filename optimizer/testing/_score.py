"""How strong the fuzz is: how many examples it needs to find each mutant."""

from __future__ import annotations

import ast
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import optimizer
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec
from optimizer.testing._later import LATER_CALLS
from optimizer.testing._lowering import Lower, LoweringAll, assert_follows_its_weights
from optimizer.testing._motif import Motif
from optimizer.testing._mutants import PACKAGE, Mutant, catalogue, planted
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models
from optimizer.testing._subject import Optimize
from optimizer.testing._tokens import TOKENS
from optimizer.testing.motifs import MOTIFS

BUDGET = 1000
# What no pass has for a motif: of a region, values and views that are returned, written, in parts.
_NEAR = {
    "capture": tuple(TOKENS),
    "lowering": (
        "linear out dup t01 out swap relu_F", "linear out relu_F", "linear iview_statement",
        "linear chunk_swapped",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: after how many examples it was found, or that it was not."""

    mutant: Mutant
    killed: bool
    examples: int
    seconds: float
    evidence: str


def try_mutant(mutant: Mutant, budget: int = BUDGET) -> Verdict:
    """Fuzz the passes that a mistake concerns until one is wrong, or the budget is spent."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with planted(mutant, __name__) as fresh:
        examples, evidence = fresh.first_failure(concerned(mutant), budget)
    seconds = time.perf_counter() - started
    return Verdict(mutant, bool(evidence), examples, seconds, evidence)


def concerned(mutant: Mutant) -> list[str]:
    """What to fuzz: what is named, the pass itself, the passes that import the file, or all."""
    module = mutant.file.removesuffix(".py")
    name = module.removeprefix("passes/")
    if mutant.concerns or name in MOTIFS:
        return list(mutant.concerns) or [name]
    return [name for name in MOTIFS if module in imports(name)] or list(MOTIFS)


def imports(name: str) -> set[str]:
    """The modules of the package that a pass imports."""
    tree = ast.parse((PACKAGE / "passes" / f"{name}.py").read_text(encoding="utf-8"))
    froms = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {module.removeprefix("optimizer.") for module in froms}


def first_failure(names: Sequence[str], budget: int) -> tuple[int, str]:
    """Try motifs and near misses, then generated models; the examples tried, and the failure.

    The failure is empty where there is none.
    """
    tried = 0
    try:
        for name in names:
            for spec, fires in islice(_motifs(name), budget):
                tried += 1
                examine(spec, name, fires=fires, always=not fires)

        @settings(
            max_examples=max(1, budget - tried),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
        )
        @seed(0)
        @given(any_of(names))
        def holds(chosen: tuple[str, Spec]) -> None:
            nonlocal tried
            name, spec = chosen
            tried += not found
            try:
                examine(spec, name)
            except (AssertionError, Counterexample) as failure:  # pragma: no cover - in a copy
                found.append(failure)
                raise

        found: list[Exception] = []
        holds()
    except AssertionError as failure:  # pragma: no cover - in a copy of the package
        cause = failure.__cause__ or failure
        return tried, f"{type(cause).__name__}: {cause}".partition("\n")[0]
    return tried, ""


def _motifs(name: str) -> Iterator[tuple[Spec, bool]]:
    """The motifs of a pass, which fire, and its near misses, which may; of capture, each word."""
    motif = MOTIFS.get(name) or Motif(fires=(), near=_NEAR[name])
    for program in motif.fires:
        yield Spec(tuple(program.split()), motif.shape), True
    # Equal sizes hide no mistake behind an error; sizes of one may be others later.
    for shape in (motif.shape, (4, 4, 4), (4, 4), (2, 4, 1, 1), (1, 4)):
        for program in motif.near:
            yield Spec(tuple(program.split()), shape, "random"), False


def any_of(names: Sequence[str]) -> st.SearchStrategy[tuple[str, Spec]]:
    """One of them, and a model near its motifs."""

    def near(name: str) -> st.SearchStrategy[tuple[str, Spec]]:
        generated = models(focus=name) if name in MOTIFS else models(alphabet=TOKENS)
        return st.tuples(st.just(name), generated)

    return st.sampled_from(list(names)).flatmap(near)


def examine(spec: Spec, name: str, *, fires: bool = False, always: bool = False) -> None:
    """All that an example is held to, now and later: one pass, the capture or the lowering.

    Args:
        spec: the example.
        name: what is fuzzed.
        fires: whether the pass must fire on it.
        always: make all of `LATER_CALLS`, and not only those that the seed chooses.
    """
    numerics = {each.name: each.numerics for each in optimizer.all_passes()}
    lowers = name == "lowering"
    # Of a strided input, the last bit depends on the kernel; of dyadic data it seldom does.
    dyadic = spec.regime == "dyadic" and spec.layout == "contiguous"
    exact = dyadic if lowers else numerics.get(name, "exact") == "exact"
    subject = Lower() if lowers else Optimize(only=(name,) if name in numerics else ())
    later = tuple(LATER_CALLS) if lowers or always else True  # one would be too seldom
    candidate: Any = check_spec(spec, subject, exact=exact, later=later)
    if lowers:
        assert_follows_its_weights(candidate, spec.inputs())
        check_spec(spec, lambda *_: LoweringAll(candidate), later=later)
    assert not fires or name in candidate.report.counts(), f"{name} does not fire on its motif"


def score(names: Iterable[str] = (), budget: int = BUDGET, processes: int = 1) -> Iterator[Verdict]:
    """Try the mutants of these names, or all, and yield what becomes of each."""
    known = catalogue()
    mutants = [known[name] for name in names] or list(known.values())
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(try_mutant, budget=budget), mutants)


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """The lines of a Markdown table of all verdicts, and what they come to."""
    yield from ("| mutant | origin | examples to kill | seconds |", "|---|---|---|---|")
    seen = []
    for each in verdicts:
        examples = each.examples if each.killed else "survives"
        yield f"| {each.mutant.name} | {each.mutant.origin} | {examples} | {each.seconds:.1f} |"
        seen.append(each)
    yield from ("", summary(seen))


def summary(verdicts: Sequence[Verdict]) -> str:
    """The kill rates, and the median and the ninth decile of examples to kill."""
    examples = sorted(v.examples for v in verdicts if v.killed)
    if not examples:
        return f"killed 0 of {len(verdicts)}"
    real = [v for v in verdicts if v.mutant.is_real]
    ninth = examples[min(len(examples) - 1, round(0.9 * len(examples)))]
    return (
        f"killed {len(examples)} of {len(verdicts)} ({len(examples) / len(verdicts):.1%});"
        f" from real issues {sum(v.killed for v in real)} of {len(real)};"
        f" examples to kill: median {statistics.median(examples):g}, 90 % within {ninth}"
    )
