"""`python -m benchmarks compare`: what is measured when, what is kept, and what is tried again."""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks._git import git
from benchmarks.compare import cells as _cells
from benchmarks.compare import rounds as _rounds
from benchmarks.compare.cells import Cell, NotObservedError, Observed
from benchmarks.compare.journal import Journal
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series, Sides, run_round
from benchmarks.compare.schedule import Schedule
from benchmarks.compare.trees import ComparisonError
from tests.quality import alarms
from tests.quality.verdicts import Setting
from tests.quality.verdicts import rounds as drawn

ABOUT = {"base": "a", "new": "b", "machine": "here"}


def cell(name: str, kind: str = "time") -> Cell:
    return Cell(name, less_is_better=True, unit="", index=None, benchmark={"type": kind})


def timed(count: int) -> list[Series]:
    return [Series(cell(str(place))) for place in range(count)]


class Drawn:
    """Rounds whose numbers are drawn, and a clock that each cell moves by a second.

    Args:
        settings: of the cells by name; others do not change.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Setting) -> None:
        self.settings, self.draw, self.now = settings, random.Random(0), 0.0
        self.order: list[str] = []
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def measure(self, several: Any, has_time: Any) -> None:
        for series in several:
            if not has_time():
                return
            setting = self.settings.get(f"cell{series.cell.name}", Setting(noise=0.002))
            series.rounds += drawn(self.draw, setting, 1)
            self.order.append(series.cell.name)
            self.now += 1


def scheduled(drawn: Drawn, first: list[Series], minutes: float) -> Schedule:
    schedule = Schedule(first, [], rounds=8, minutes=minutes, started=drawn.now)
    schedule.run(drawn.measure)
    return schedule


class TestTheOrder:
    def test_what_was_asked_for_first_is_reached_where_time_is_short(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Eight cells have their four rounds before the ninth begins."""
        first = timed(20)
        scheduled(Drawn(monkeypatch), first, minutes=0.7)

        assert [len(each.rounds) for each in first] == [4] * 8 + [2] + [1] * 7 + [0] * 4

    def test_what_is_settled_stops_and_what_is_not_goes_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = timed(3)
        schedule = scheduled(Drawn(monkeypatch, cell1=Setting(noise=0.2)), first, minutes=10)

        assert [len(each.rounds) for each in first] == [4, 8, 4]
        assert not schedule.second

    def test_what_may_have_changed_has_rounds_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = timed(3)
        schedule = scheduled(Drawn(monkeypatch, cell2=Setting(0.1, noise=0.002)), first, minutes=10)

        assert [(each.cell.name, len(each.rounds)) for each in schedule.second] == [("2", 8)]
        assert len(first[2].rounds) == 8

    def test_where_nothing_changed_the_rest_of_the_time_goes_to_the_undecided(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        noisy = {f"cell{place}": Setting(noise=0.2) for place in range(5)}
        run = Drawn(monkeypatch, **noisy)
        scheduled(run, timed(5), minutes=0.6)

        assert len(run.order) == 35

    def test_numbers_that_are_not_timed_share_one_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = [Series(cell(str(place), "track")) for place in range(20)]
        run = Drawn(monkeypatch)
        scheduled(run, first, minutes=10)

        assert run.order[:20] == [str(place) for place in range(20)]

    def test_rounds_of_an_earlier_run_are_not_measured_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed = Setting(0.1, noise=0.002)
        before = drawn(random.Random(1), changed, 8)
        first = [Series(cell("0"), before)]
        second = [Series(cell("0"), before[:6])]
        schedule = Schedule(first, second, rounds=8, minutes=10, started=0.0)
        run = Drawn(monkeypatch, cell0=changed)
        schedule.run(run.measure)

        assert len(run.order) == 2
        assert len(schedule.second[0].rounds) == 8


class Found:
    """Stands for processes: what each role finds, or why it finds nothing."""

    def __init__(self, **found: Any) -> None:
        self.found, self.asked = found, list[str]()

    def observe(self, cell: Cell, tree: Any, server: str) -> Observed:
        self.asked.append(server)
        told = self.found[server]
        told = told.pop(0) if isinstance(told, list) else told
        if isinstance(told, Exception):
            raise told
        return Observed(told, exact=True)


def one_round(monkeypatch: pytest.MonkeyPatch, found: Found, seed: int = 0) -> Series:
    @contextmanager
    def servers(self: Any) -> Any:
        yield {BASE: "base", AGAIN: "again", NEW: "new"}

    series = Series(cell("toy"))
    monkeypatch.setattr(_rounds, "observe", found.observe)
    monkeypatch.setattr(Sides, "servers", servers)
    sides: Any = Sides(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    run_round([series], sides, random.Random(seed), lambda: True, lambda s: None, lambda s: None)
    return series


class TestARound:
    @pytest.mark.parametrize("seed", range(6))
    def test_exact_numbers_that_are_the_same_need_no_second_look_at_the_base(
        self, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        found = Found(base=4, again=4, new=4)
        series = one_round(monkeypatch, found, seed)

        assert series.is_done
        assert len(found.asked) == (3 if found.asked[0] == "again" else 2)

    @pytest.mark.parametrize("seed", range(6))
    def test_exact_numbers_that_differ_have_one(
        self, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        assert one_round(monkeypatch, Found(base=4, again=5, new=6), seed).rounds == [
            {BASE: 4, AGAIN: 5, NEW: 6}
        ]

    def test_a_process_that_fails_is_tried_once_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flake = NotObservedError("it was killed", failed=True)
        found = Found(base=4, again=4, new=[flake, 5])

        assert one_round(monkeypatch, found).rounds == [{BASE: 4, AGAIN: 4, NEW: 5}]

    def test_one_that_fails_twice_has_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flake = NotObservedError("it was killed", failed=True)
        series = one_round(monkeypatch, Found(base=4, again=4, new=[flake, flake]))

        assert series.failed == {NEW}
        assert series.missing == {NEW: "it was killed"}
        assert not series.rounds

    def test_what_is_not_available_is_not_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = Found(**dict.fromkeys(("base", "again", "new"), NotObservedError("", failed=False)))
        one_round(monkeypatch, found)

        assert len(found.asked) == 3

    def test_no_cell_begins_when_the_time_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def servers(self: Any) -> Any:
            yield {}

        monkeypatch.setattr(Sides, "servers", servers)
        told: list[Series] = []
        sides: Any = Sides(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        run_round(timed(3), sides, random.Random(0), lambda: False, told.append, told.append)

        assert not told


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    found = Journal(tmp_path / "new" / "rounds.jsonl", ABOUT)
    found.begin()
    return found


class TestTheJournal:
    def test_what_it_keeps_is_taken_up_again(self, journal: Journal) -> None:
        still, failing = {BASE: 1.5, AGAIN: 1.25, NEW: 2.0}, {NEW: "it broke"}
        for place in (1, 2):
            journal.keep(Series(cell("a"), [still] * place), again=False)
        journal.keep(Series(cell("a"), [still]), again=True)
        journal.keep(Series(cell("b"), [], exact=True, missing=failing, failed={NEW}), again=False)
        first, second = journal.resume([cell("b"), cell("a"), cell("c")])

        assert first == [
            Series(cell("b"), exact=True, missing=failing, failed={NEW}),
            Series(cell("a"), [still, still]),
            Series(cell("c")),
        ]
        assert second == [Series(cell("a"), [still])]

    def test_a_line_that_was_not_finished_is_dropped(self, journal: Journal) -> None:
        still = {BASE: 1.5, AGAIN: 1.25, NEW: 2.0}
        journal.keep(Series(cell("a"), [still]), again=False)
        with journal.path.open("a") as file:
            file.write('{"cell": "a", "aga')

        assert journal.resume([cell("a")])[0][0].rounds == [still]
        journal.keep(Series(cell("a"), [still]), again=False)
        assert journal.resume([cell("a")])[0][0].rounds == [still, still]

    def test_a_new_run_begins_anew(self, journal: Journal) -> None:
        journal.keep(Series(cell("a"), [{BASE: 1.0, NEW: 1.0}]), again=False)
        journal.begin()

        assert journal.resume([cell("a")]) == ([Series(cell("a"))], [])

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("", "cannot be read"),
            ("nothing\n", "cannot be read"),
            ("[]\n", "is of [], and not of"),
            (json.dumps(ABOUT | {"machine": "elsewhere"}) + "\n", "and not of"),
            (json.dumps(ABOUT) + '\n{"cell": "a"}\n', "cannot be read ('again')"),
            (json.dumps(ABOUT) + "\n3\n", "cannot be read"),
            (
                json.dumps(ABOUT) + '\n{"cell": "a", "again": false, "exact": true, "round": '
                '{"base": NaN}}\n',
                "NaN is no number that was measured",
            ),
            (
                json.dumps(ABOUT) + '\n{"cell": "a", "again": false, "exact": true, "round": '
                '{"base": 1e999}}\n',
                "not finite",
            ),
        ],
    )
    def test_what_cannot_be_resumed_is_told_and_stays_as_it_is(
        self, journal: Journal, content: str, said: str
    ) -> None:
        journal.path.write_text(content)

        with pytest.raises(ComparisonError, match=r"leave --resume out") as told:
            journal.resume([cell("a")])
        assert said in str(told.value)
        assert journal.path.read_text() == content

    def test_where_it_cannot_be_written_the_rest_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        journal = Journal(tmp_path / "file" / "rounds.jsonl", ABOUT)
        journal.begin()
        journal.keep(Series(cell("a"), [{BASE: 1.0, NEW: 1.0}]), again=False)

        assert journal.trouble.startswith("the rounds cannot be kept in")


def test_what_compare_is_tried_on_is_head_with_a_change_and_nothing_here_changes() -> None:
    before = git("status", "--porcelain")
    made = alarms.planted(alarms.PLANTED[0])

    assert git("diff", "--name-only", "HEAD", made) == "optimizer/__init__.py"
    compile(git("show", f"{made}:optimizer/__init__.py"), "planted", "exec")
    assert git("status", "--porcelain") == before
    assert alarms.planted(alarms.PLANTED[0]) == made


def test_an_alarm_is_false_unless_it_was_planted() -> None:
    said = [{"verdict": each} for each in ("regressed", "regressed", "improved", "not compared")]

    assert alarms.counts(said) == {"reached": 3, "told": 0, "undecided": 0, "false": 3}
    assert alarms.counts(said, right="regressed") == {
        "reached": 3, "told": 2, "undecided": 0, "false": 1,
    }  # fmt: skip


def test_comparisons_are_kept_as_they_end_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def compared(new: str, seed: int, *rest: object) -> list[dict[str, str]]:
        made.append(new)
        if len(made) == 3:
            raise KeyboardInterrupt
        return [{"verdict": "regressed" if new == "planted" else "same"}]

    monkeypatch.setattr(alarms, "compared", compared)
    monkeypatch.setattr(alarms, "planted", lambda change: "planted")
    monkeypatch.setattr(sys, "argv", ["alarms", "--runs", "2", "--folder", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        alarms.main()
    alarms.main()

    assert made == ["HEAD"] * 2 + ["planted"] * (1 + len(alarms.PLANTED))
    printed = capsys.readouterr().out
    assert "| nothing | 2 | 2 | 0 | 0 | 0 |" in printed
    assert "| 3 % slower | 1 | 1 | 1 | 0 | 0 |" in printed


@pytest.mark.parametrize("said", ["Process exited with 1", "Interrupted."])
def test_a_server_that_ends_is_a_failure_and_ctrl_c_is_none(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def ended(*_: Any, **__: Any) -> None:
        raise _cells.util.UserError(said)

    monkeypatch.setattr(_cells.runner, "run_benchmark", ended)
    tree: Any = SimpleNamespace(cache_for=lambda *_: None)
    with pytest.raises((NotObservedError, KeyboardInterrupt)) as caught:
        _cells.observe(cell("one"), tree, None)

    assert isinstance(caught.value, NotObservedError) == (said != "Interrupted.")
    assert getattr(caught.value, "failed", True)
