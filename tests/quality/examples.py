"""What a mistake in the package is looked for with: generated models, motifs and near misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import fx

import optimizer
from optimizer.lowering.module import LoweredModule
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec
from optimizer.testing._later import LATER_CALLS
from optimizer.testing._strategies import NOT_RECORDED, models, on_each
from optimizer.testing._subject import (
    LoweringAll,
    Optimize,
    assert_follows_its_weights,
    assert_loses_no_nan,
)
from optimizer.testing._tokens import TOKENS
from optimizer.testing.motifs import MOTIFS, Motif

ENGINES_IN = 4  # one of so many models at level 2 is run by what a user's would be
MANY = 100  # models about a pass, of which it changes one at least
# Equal sizes hide no mistake behind an error; sizes of one may be others later.
_PLACES = (
    ((4, 4, 4), "contiguous"), ((4, 4), "transposed"), ((2, 4, 1, 1), "contiguous"),
    ((1, 4), "contiguous"), ((2, 0, 3), "contiguous"), ((0, 4, 3, 3), "contiguous"),
)  # fmt: skip
# What no pass has for a motif: of a region, values and views that are returned, written, in parts.
_NEAR = {
    "capture": tuple(TOKENS),
    "lowering": (
        "linear out dup t01 out swap relu_F", "linear out relu_F", "linear iview_statement",
        "linear chunk_swapped"),
}  # fmt: skip

Counts: TypeAlias = Counter[str]


@dataclass
class Tried:
    """What came of some examples in turn: what was done to each, up to the failure, if any."""

    sound: Sequence[Counts] = ()  # what the package without a mistake did to each; it does no less
    done: list[Counts] = field(default_factory=list)  # how often passes and kernels served each
    failure: str = ""  # what is wrong with the last of them

    def example(self, spec: Spec, name: str, **asked: Any) -> None:
        """Try one more.

        Raises:
            AssertionError: it fails.
        """
        if not self.failure:  # else it is tried again
            self.done.append(Counter())
        try:
            self.done[-1] = Counter(did(examine(spec, name, **asked)))
            self._require_no_less()
        except AssertionError as failure:
            self.failure = self.failure or told(failure)
            raise

    def _require_no_less(self) -> None:
        place = len(self.done) - 1
        if place < len(self.sound):
            missing = self.sound[place] - self.done[place]
            assert not missing, f"{next(iter(missing))} fires less often than it did"


def first_failing_model(names: Sequence[str], budget: int, sound: Sequence[Counts] = ()) -> Tried:
    """Try generated models alone, until one fails.

    That one of many models was changed by a pass is asked too.
    """
    tried = Tried(sound)
    with suppress(AssertionError):

        @on_each(any_of(names), budget)
        def holds(chosen: tuple[str, Spec]) -> None:
            tried.example(chosen[1], chosen[0], among=names)

    fired = set().union(*tried.done)
    idle = [name for name in names if name in MOTIFS and name not in fired]
    if idle and len(tried.done) >= MANY * len(names):
        tried.failure = tried.failure or f"{idle[0]} never fires"
    return tried


def first_failing_motif(names: Sequence[str], budget: int, sound: Sequence[Counts] = ()) -> Tried:
    """Try all motifs and near misses, until one fails."""
    tried = Tried(sound)
    with suppress(AssertionError):
        for name in names:
            for spec, fires in _motifs(name):
                tried.example(spec, name, fires=fires)
    return tried


def _motifs(name: str) -> Iterator[tuple[Spec, bool]]:
    """The motifs of a pass, which fire, and its near misses, which may; of capture, each word."""
    motif = MOTIFS.get(name) or Motif(fires=(), near=_NEAR[name])
    for program in motif.fires:
        yield Spec(tuple(program.split()), motif.shape), True
    for shape, layout in ((motif.shape, "contiguous"), (motif.shape, "channels_last"), *_PLACES):
        for program in motif.near:
            yield Spec(tuple(program.split()), shape, "random", layout=layout), False


def any_of(names: Sequence[str]) -> st.SearchStrategy[tuple[str, Spec]]:
    """One of them, and a model that is about it."""

    def about(name: str) -> st.SearchStrategy[tuple[str, Spec]]:
        return st.tuples(st.just(name), models(focus=None if name == "lowering" else name))

    return st.sampled_from(list(names)).flatmap(about)


def examine(spec: Spec, name: str, *, fires: bool = False, among: Sequence[str] = ()) -> Any:
    """All that an example is held to, now and later: one pass, the capture or the lowering.

    Args:
        spec: the example.
        name: what is fuzzed.
        fires: whether the pass must fire on it.
        among: names of passes that are fuzzed together too.

    Returns:
        The candidate, made by all of them together if there are several.
    """
    numerics = {each.name: each.numerics for each in optimizer.all_passes()}
    lowers, later = name == "lowering", tuple(LATER_CALLS)
    # Of a strided input, the last bit depends on the kernel; of dyadic data it seldom does.
    dyadic = spec.regime == "dyadic" and spec.layout == "contiguous"
    exact = dyadic if lowers else numerics.get(name, "exact") == "exact"
    unspoilt = Optimize(only=(name,) if name in numerics else (), dynamo=spec.seed == 0)
    subject = Optimize(2, only=(), spoilt=True) if lowers else unspoilt.on(spec)
    candidate: Any = check_spec(spec, subject, exact=exact, later=later)
    words = [word.removeprefix("unknown_") for word in spec.tokens]  # a wrapper may call any code
    recorded = isinstance(candidate, fx.GraphModule) or not NOT_RECORDED.isdisjoint(words)
    # At level 2 a layer with hooks, which is called as it is, makes the model Dynamo's.
    assert recorded or lowers, "the model is not recorded, and no word of it says why"
    if isinstance(candidate, LoweredModule):
        assert_follows_its_weights(candidate, spec.inputs())
        check_spec(spec, lambda *_: LoweringAll(candidate), later=later)
    if lowers and spec.seed % ENGINES_IN == 0:
        candidate = _on_engines(spec)
    if len(among) > 1:
        candidate = check_spec(spec, Optimize(only=tuple(among)), later=later)
    assert not fires or name in candidate.report.counts(), f"{name} does not fire on its motif"
    return candidate


def _on_engines(spec: Spec) -> Any:
    """What the engines here make of a model in float32, which they take; no NaN is lost by it."""
    candidate: Any = check_spec(spec, Optimize(2, only=()), dtype=torch.float32)
    if getattr(candidate, "meta", {}).get("lowered"):
        with spec.surroundings():
            assert_loses_no_nan(candidate, spec.inputs(torch.float32))
    return candidate


def did(candidate: Any) -> Iterator[str]:
    """The passes that fired, and what was chosen to run each region, as often as it was."""
    yield from Counter(candidate.report.counts()).elements()
    yield from (choice.chosen for choice in candidate.report.choices)


def told(error: BaseException) -> str:
    """The error in one line; of a counterexample, what is wrong."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]
