"""Small changes of the code that nobody chose: how they are made, tried and counted."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.quality import generic as _generic
from tests.quality import mutants as _mutants
from tests.quality import record as _record
from tests.quality import score as _score
from tests.quality.__main__ import main
from tests.quality.mutants import Mutant
from tests.quality.score import Verdict

FILE = "passes/fuse.py"


def changed(text: str) -> set[str]:
    tree = ast.parse(text)
    return {
        _generic.with_changed(tree, node, field, value)
        for node in _generic.code_of(tree)
        for field, value in _generic.changes(node)
    }


def test_every_kind_of_change_is_made() -> None:
    assert changed("a < b") == {"a <= b"}
    assert changed("a and b") == {"a or b"}
    assert changed("not a") == {"not not a"}
    assert changed("a - b") == {"a + b"}
    assert changed("a if b else c") == {"a if not b else c"}
    assert changed("[a for a in b if a]") == {"[a for a in b]"}
    assert changed("a = all(b)") == {"a = any(b)"}
    assert changed("a if b and c else d") == {"a if b or c else d", "a if not (b and c) else d"}
    assert changed("a[0]") == {"a[1]"}
    assert changed("a = True") == {"a = False"}
    assert changed("require(a)") == {"None"}


def test_types_stay() -> None:
    assert changed("def f(a: int | None) -> int | None: ...") == set()
    assert changed("A: TypeAlias = int | None") == set()


def test_each_mutant_is_another_program_and_names_its_change() -> None:
    mutants = _generic.mutants_of(FILE)

    assert len({mutant.new for mutant in mutants}) == len(mutants) > 2
    assert any(f"{FILE}: - require(len(linear.users) == 1" in each.name for each in mutants)
    for mutant in mutants:
        compile(mutant.source(), FILE, "exec")


def test_no_mutant_is_made_twice_and_none_has_the_name_of_another() -> None:
    files = ["facts/facts.py", "passes/fold_affine.py", "passes/transposes.py"]
    mutants = [mutant for file in files for mutant in _generic.mutants_of(file)]

    assert len({(mutant.file, mutant.new) for mutant in mutants}) == len(mutants)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert any(mutant.name.endswith(" (2)") for mutant in mutants)


def test_what_only_the_capture_is_made_of_is_changed_too() -> None:
    assert {
        "frontend/tracer.py",
        "frontend/symbolic.py",
        "facts/facts.py",
        "rewrite/affine.py",
    } <= {*_generic.files()}


def test_a_sample_is_the_same_for_a_seed_and_outlives_code() -> None:
    every = _generic.mutants_of(FILE) + _generic.mutants_of("core/ops.py")
    before = _mutants.sample(every, 5, 1)
    assert before == _mutants.sample(every, 5, 1) != _mutants.sample(every, 5, 2)
    assert len(_mutants.sample(every, None, 1)) == len(every)

    gone = before[2]
    kept = [each for each in every if each != gone]
    assert _mutants.sample(kept, 4, 1) == [each for each in before if each != gone]


def test_the_rest_is_what_is_not_on_record_as_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tried(mutants: Iterable[Mutant], by: list[str], *_: int) -> Iterator[Verdict]:
        for number, each in enumerate(mutants):
            seen.append(each.name)
            yield Verdict(each, by[0], number > 0, 1, 1.0, "values differ")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_score, "score", tried)
    seen: list[str] = []
    sample = ["score", "--seed", "1", "--by", "tests", "--record", "--sample"]
    every = _mutants.catalogue().values()
    first, second, third = (each.name for each in _mutants.sample(every, 3, 1))

    assert main([*sample, "2"]) == 1  # one survives
    main([*sample, "3", "--rest"])

    assert seen == [first, second, first, third]
    assert list(_record.read(_record.FOLDER, "catalogue_by_tests")) == [second, first, third]


@pytest.mark.integration
def test_what_changes_nothing_survives_and_what_only_a_test_sees_does_not() -> None:
    file, before = "passes/masks.py", "it is filled in place and saves no copy"
    text = (_generic.PACKAGE / file).read_text()
    as_it_is = Mutant("as it is", file, text, text + "\n", "generic")
    reworded = replace(as_it_is, new=text.replace(before, "reworded"))
    assert reworded.new != text

    survivor, seen = _score.score([as_it_is, reworded], ["tests"], trusted=["tests"])

    assert not survivor.killed
    assert (seen.by, seen.evidence) == ("tests", "its tests fail")


def test_what_is_called_equivalent_is_a_mutant_still() -> None:
    for name, why in _generic.equivalent().items():
        file = name.partition(":")[0]

        assert name in {mutant.name for mutant in _generic.mutants_of(file)}
        assert len(why.split()) > 5
