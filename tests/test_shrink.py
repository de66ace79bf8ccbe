"""A counterexample gets as small as it can, and a command tells how small."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optimizer.testing import SHAPES, Spec, smallest
from tests.quality import mutants as _mutants
from tests.quality import shrink as _shrink
from tests.quality.__main__ import main

pytestmark = pytest.mark.integration

CATALOGUE = _mutants.catalogue()
A_PASS = CATALOGUE["fuse_linear_relu: the bias lost"]


def reduced(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    found = smallest(spec, fails)

    assert fails(found)
    assert _shrink.is_minimal(found, fails)
    return found


def test_words_that_only_go_together_go() -> None:
    def fails(spec: Spec) -> bool:
        tokens = spec.tokens
        return "linear" in tokens and tokens.count("t01") == tokens.count("t12")

    found = reduced(Spec(("t01", "relu", "linear", "bn", "t12")), fails)

    assert found.tokens == ("linear",)


def test_a_word_becomes_the_simplest_of_its_family() -> None:
    assert reduced(Spec(("conv_groups",)), lambda spec: True).tokens == ()
    found = reduced(Spec(("conv_groups",)), lambda spec: bool(spec.tokens))
    assert found.tokens == ("linear",)


def test_data_becomes_the_plainest_that_fails() -> None:
    spec = Spec(("linear",), (4, 4, 4), "ill", 5, "strided", "graph")

    assert reduced(spec, lambda spec: bool(spec.tokens)) == Spec(("linear",))
    small = reduced(spec, lambda spec: bool(spec.tokens) and len(spec.shape) == 3)
    assert small == Spec(("linear",), next(each for each in SHAPES if len(each) == 3))
    for field in ("regime", "seed", "layout", "entry"):
        kept = getattr(spec, field)
        small = reduced(spec, lambda spec: bool(spec.tokens) and getattr(spec, field) == kept)  # noqa: B023
        assert small.tokens == ("linear",)
        assert getattr(small, field) == kept


def test_a_long_program_takes_few_tries() -> None:
    tries = 0

    def fails(spec: Spec) -> bool:
        nonlocal tries
        tries += 1
        return "bn" in spec.tokens

    assert smallest(Spec((*["relu"] * 40, "bn", *["relu"] * 23)), fails).tokens == ("bn",)
    assert tries < 60


@pytest.mark.parametrize(
    ("tokens", "fails"),
    [
        (("relu", "bn"), lambda tokens: "bn" in tokens),
        (("bn", "relu", "bn", "relu", "bn"), lambda t: t.count("bn") == t.count("relu") + 1),
        (("conv",), lambda tokens: tokens in (("conv",), ("linear",))),
        (("bn",) * 11, lambda tokens: len(tokens) == 11),
    ],
)
def test_what_is_not_minimal_is_told(
    tokens: tuple[str, ...], fails: Callable[[tuple[str, ...]], bool]
) -> None:
    assert not _shrink.is_minimal(Spec(tokens), lambda spec: fails(spec.tokens))


def test_a_planted_mistake_shrinks_to_what_shows_it() -> None:
    found = _shrink.shrink(A_PASS, 100)

    assert found is not None
    assert (found.program, found.minimal) == ("linear relu", True)
    assert found.words_before >= 2
    assert _shrink.shrink(A_PASS, 1) is None


def test_the_sample_is_of_many_passes() -> None:
    sample = _shrink.sample(30)

    assert len(sample) >= 30
    assert len({mutant.concerns for mutant in sample}) >= 15


def test_the_table_has_a_row_for_each_mistake_that_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _shrink.Shrunk("linear leaky", minimal=False, words_before=9, seconds=1.25)
    monkeypatch.setattr(_shrink, "sample", lambda count: [A_PASS, CATALOGUE[next(iter(CATALOGUE))]])
    monkeypatch.setattr(_shrink, "shrink", lambda m, budget: found if m is A_PASS else None)

    assert main(["shrink"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [f"| {A_PASS.name} | 9 | linear leaky | no | 1.2 |"]
