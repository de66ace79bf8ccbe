"""Small changes of the code that nobody chose: how they are made, tried and counted."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.testing import _generic, _record
from optimizer.testing.__main__ import main
from optimizer.testing._mutants import Mutant
from optimizer.testing._score import Verdict

FILE = "passes/fuse_linear_relu.py"
TEXT = (_generic.PACKAGE / FILE).read_text()
AS_IT_IS = Mutant("as it is", FILE, TEXT, TEXT + "\n", "generic")


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


def test_types_and_examples_stay() -> None:
    assert changed("def f(a: int | None) -> int | None: ...") == set()
    assert changed("A: TypeAlias = int | None") == set()
    assert changed("class A:\n    a = 1\n\ndef example():\n    return A(2)") == set()


def test_each_mutant_is_another_program_and_names_its_change() -> None:
    mutants = _generic.mutants_of(FILE)

    assert len({mutant.new for mutant in mutants}) == len(mutants) > 2
    assert f"{FILE}: - require(len(linear.users) == 1" in mutants[0].name
    for mutant in mutants:
        compile(mutant.source(), FILE, "exec")


def test_no_mutant_is_made_twice_and_none_has_the_name_of_another() -> None:
    mutants = [mutant for file in _generic.files() for mutant in _generic.mutants_of(file)]

    assert len({(mutant.file, mutant.new) for mutant in mutants}) == len(mutants)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert any(mutant.name.endswith(" (2)") for mutant in mutants)


def test_a_sample_is_the_same_for_a_seed_and_outlives_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _generic.sample(5, 1)
    assert before == _generic.sample(5, 1) != _generic.sample(5, 2)

    gone, files = before[2], _generic.files()
    monkeypatch.setattr(_generic, "files", lambda: [each for each in files if each != gone.file])
    kept = [each for each in before if each.file != gone.file]
    assert _generic.sample(5, 1)[: len(kept)] == kept


def test_the_rest_is_what_is_not_on_record_as_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tried(mutants: Iterable[Mutant], *_: int) -> Iterator[Verdict]:
        for number, each in enumerate(mutants):
            seen.append(each.name)
            yield Verdict(each, number > 0, 1, 1.0, "values differ")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_generic, "generic", tried)
    seen: list[str] = []
    first, second, third = (each.name for each in _generic.sample(3, 1))

    main(["generic", "--seed", "1", "--sample", "2", "--record"])
    main(["generic", "--seed", "1", "--sample", "3", "--record", "--rest"])

    assert seen == [first, second, first, third]
    assert list(_record.read(_record.FOLDER, "generic")) == [second, first, third]


def test_what_changes_nothing_survives_and_what_only_a_test_sees_does_not() -> None:
    reworded = replace(AS_IT_IS, new=TEXT.replace("is read elsewhere", "has other readers"))
    assert reworded.new != TEXT

    survivor, seen = _generic.generic([AS_IT_IS, reworded], budget=3, processes=1)

    assert not survivor.killed
    assert seen.evidence == "its tests fail"


def test_what_is_called_equivalent_is_a_mutant_still() -> None:
    for name, why in _generic.equivalent().items():
        file = name.partition(":")[0]

        assert name in {mutant.name for mutant in _generic.mutants_of(file)}
        assert len(why.split()) > 5


def test_the_table_leaves_out_what_is_equivalent() -> None:
    def verdict(name: str, killed: bool) -> Verdict:
        return Verdict(replace(AS_IT_IS, name=name), killed, 1, 1.0, "values differ" * killed)

    verdicts = [verdict("one", True), verdict("other", False), verdict("third", False)]
    lines = list(_generic.table(verdicts, {"third": "it is the same"}))

    assert "| nothing: it is the same | `third` |" in lines
    assert lines[-1] == "killed 1 of 2 that are not equivalent (50.0%)"
