"""Generated models, optimized, compute what they computed: each pass alone, and all together."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch
from hypothesis import event, given, seed, settings
from hypothesis import strategies as st
from torch import fx, nn

import optimizer
from optimizer.testing import FAMILIES, MOTIFS, Optimize, Spec, assert_equivalent, check_spec
from tests.internals import NOT_RECORDED, models
from tests.repository import commit_number, table

PASSES = {each.name: each for each in optimizer.all_passes()}
# A @given test is one unit of work: shards let the workers share it.
SHARDS = range(2)
# Where near misses are tried: what the channels may be taken for, in numbers of both kinds and in
# every layout. Each is tried at two places, and a half of the later calls is made at each.
PLACES = (
    ((3, 3), "dyadic", "transposed"),
    ((4, 4, 4), "random", "strided"),
    ((2, 4, 4, 4), "dyadic", "contiguous"),
    ((2, 4, 4, 4), "random", "channels_last"),
)


def fuzz(property_, *, count=0, shard=0, **choices):
    """Try a property on so many models, or as the profile says; other ones in each shard."""

    @given(models(**choices))
    def holds(spec: Spec) -> None:
        property_(spec)

    holds = seed(shard)(holds) if is_quick() else holds
    holds = settings(max_examples=count)(holds) if count else holds
    holds()


def test_every_pass_has_motifs() -> None:
    assert set(MOTIFS) == set(PASSES)


FIRES = [(name, program) for name in MOTIFS for program in MOTIFS[name].fires]
NEAR = [(name, program) for name in MOTIFS for program in MOTIFS[name].near]


@table("name program", *FIRES)
def test_every_pass_fires_on_its_motif(name: str, program: str) -> None:
    spec = Spec(tuple(program.split()), MOTIFS[name].shape)
    candidate = check_spec(spec, Optimize(only=(name,)))
    assert name in candidate.report.counts()


@table("name program", *NEAR)
def test_a_near_miss_keeps_the_answer(name: str, program: str) -> None:
    turn = len(program)  # other places and other halves of the calls for another program
    for place in (turn, turn + 2):
        shape, regime, layout = PLACES[place % len(PLACES)]
        spec = Spec(tuple(program.split()), shape, regime, 2 * place, layout)

        assert check_spec(spec, Optimize(), later=True) is not None


@cache
def is_quick() -> bool:
    return bool(settings.default and settings.default.derandomize)


# In other places generated models have them. A quick run takes a quarter, each commit another one.
@pytest.mark.parametrize("name", MOTIFS)
def test_an_interrupted_motif_keeps_the_answer(name: str) -> None:
    start, step = (commit_number() % 4, 4) if is_quick() else (0, 1)
    for program in islice(MOTIFS[name].interrupted(), start, None, step):
        spec = Spec(tuple(program.split()), MOTIFS[name].shape, "random")

        assert check_spec(spec, Optimize()) is not None


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_alone_keeps_the_answer(name: str, shard: int) -> None:
    subject, exact = Optimize(only=(name,)), PASSES[name].numerics == "exact"

    fuzz(lambda spec: assert_kept(spec, subject, exact=exact, later=True), focus=name, shard=shard)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_level_0_keeps_the_bits(dtype: torch.dtype, shard: int) -> None:
    subject = Optimize(level=0)

    fuzz(lambda spec: assert_kept(spec, subject, exact=True, dtype=dtype), shard=shard)


@pytest.mark.parametrize("shard", range(4))
def test_level_1_keeps_the_answer(shard: int) -> None:
    assert sum(Optimize().on(Spec((), seed=number)).examples for number in range(8)) == 6
    fuzz(lambda spec: assert_kept(spec, Optimize().on(spec), later=True), shard=shard)
    attends = Spec(("dup", "clamp_other", "neg_torch", "attention"), (2, 4, 4, 4), seed=4 + shard)
    assert check_spec(attends, Optimize(), later=True)  # but for infinities, as attention says


@pytest.mark.parametrize("shard", SHARDS)
def test_any_subset_of_the_passes_keeps_the_answer(shard: int) -> None:
    @given(models(), st.lists(st.sampled_from(list(PASSES)), unique=True))
    def holds(spec: Spec, names: list[str]) -> None:
        assert_kept(spec, Optimize(only=tuple(names)))

    seed(shard)(holds)()


def test_the_answer_holds_where_arguments_are_given_by_keyword() -> None:
    def holds(spec: Spec) -> None:
        inputs = dict(zip(spec.argument_names(), spec.inputs(), strict=True))
        model = spec.build()
        with spec.surroundings():
            assert_equivalent(model, Optimize()(model, inputs), inputs)

    fuzz(holds)
    holds(Spec(("decorated", "linear")))


def test_optimizing_again_gives_the_same_code_and_optimizing_twice_changes_nothing_more() -> None:
    def holds(spec: Spec) -> None:
        once, again = (Optimize()(spec.build(), spec.inputs()) for _ in range(2))
        assert code(once) == code(again)
        twice = Optimize()(again, spec.inputs())
        is_anew = again.report.front_end == "dynamo"
        assert len(twice.report.fired) == is_anew * len(again.report.fired)
        assert_equivalent(once, twice, spec.inputs(), exact=True)

    fuzz(holds)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_recorded_but_the_words_that_are_named(family: str) -> None:
    """Each word stands alone, and between others, twice."""
    programs = {word: ((word,), ("conv", word, "dup", word, "add")) for word in FAMILIES[family]}
    unrecorded = {word for word, each in programs.items() if not all(map(is_recorded, each))}

    assert unrecorded == NOT_RECORDED & programs.keys()


def is_recorded(program: tuple[str, ...]) -> bool:
    spec = Spec(program)
    try:
        with spec.surroundings():
            optimizer.capture(spec.build(), spec.inputs())
    except optimizer.CaptureError:
        return False
    return True


def assert_kept(spec: Spec, subject: Optimize, **options: bool | torch.dtype) -> None:
    candidate = check_spec(spec, subject, **options)  # type: ignore[arg-type]
    for name in candidate.report.counts():
        event(f"fired: {name}")
    for reason in {each.reason for each in candidate.report.refused}:
        event(f"refused: {reason}")


def code(module: nn.Module) -> str:
    return module.code if isinstance(module, fx.GraphModule) else repr(module)
