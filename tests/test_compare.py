"""`python -m benchmarks compare`: what it says of changes that are planted in a small repository.

The suite there has samples that are drawn and not timed, so that no verdict depends on the machine.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT
from typing import Any

import pytest

from benchmarks.compare import command
from benchmarks.compare.cells import Cell
from benchmarks.compare.command import main
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series
from benchmarks.compare.schedule import Schedule
from benchmarks.compare.tables import as_json, markdown, text
from benchmarks.compare.verdicts import (
    CHANGED,
    FAILED,
    IMPROVED,
    INCONCLUSIVE,
    INTENDED,
    NOT_COMPARED,
    REGRESSED,
    SAME,
    Change,
    Looks,
    flagged,
    verdict,
)
from benchmarks.progress import spoken
from tests.quality.verdicts import Setting, simulate
from tests.quality.verdicts import rounds as drawn

ROOT = Path(__file__).parents[1]
SUITE = '''
import os, random, time


def measured(name):
    from optimizer import MEASURED
    return MEASURED[name]


class Toy:
    """Ten samples a process; processes differ by 0.4 %."""

    params = [["steady", "cold", "other"]]
    param_names = ["kind"]
    unit = "seconds"

    def track_latency(self, kind):
        centre = measured(kind) * (1 + 0.004 * random.Random(os.urandom(8)).gauss(0, 1))
        samples = [centre * (1 + 0.001 * place) for place in range(10)]
        if kind == "cold":
            samples[0] *= 30
        return {"samples": samples, "number": 1}


def track_memory():
    return measured("memory")


def track_fired():
    return measured("fired")


track_fired.less_is_better = False


def track_asleep():
    if measured("sleeps"):
        time.sleep(600)
    return 1


class Elsewhere:
    def setup(self):
        raise NotImplementedError("no such device")

    def track_speed(self):
        return 1
'''
CACHED = """
def setup_cache():
    from optimizer import MEASURED
    return MEASURED


def track_nodes(cache):
    return cache["nodes"]
"""
KINDS = ("steady", "cold", "other")
BEFORE = dict.fromkeys(KINDS, 0.01) | {"memory": 4096, "fired": 3, "nodes": 7, "sleeps": 0}
STEADY, COLD, _ = (f"toy.Toy.track_latency({kind})" for kind in KINDS)


def git(*arguments: str, folder: Path) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the suite above, our configuration of asv, and our command."""
    folder = tmp_path_factory.mktemp("project")
    suite = folder / "benchmarks"
    for part in (
        "compare",
        "plugins/hostoverlay.py",
        "_git.py",
        "_machine.py",
        "progress.py",
        "running.py",
    ):
        source, target = ROOT / "benchmarks" / part, suite / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    (suite / "__init__.py").touch()
    (suite / "toy.py").write_text(SUITE)
    (suite / "toy_graph.py").write_text(CACHED)
    settings = (ROOT / "asv.conf.json").read_text()
    (folder / "asv.conf.json").write_text(settings.replace(', ".benchmarks.plugins.dashboard"', ""))
    for package in ("optimizer", "models"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / ".gitignore").write_text(".asv\n__pycache__\n")
    git("init", "-q", folder=folder)
    commit(folder, "before")
    return folder


def commit(folder: Path, name: str, code: str = "", **changes: float) -> str:
    """A version of the project in which some numbers are others."""
    module = folder / "optimizer" / "__init__.py"
    module.write_text(f"MEASURED = {BEFORE | changes}\n{code}")
    git("add", "--all", folder=folder)
    git("commit", "-q", "--allow-empty", "-m", name, folder=folder)
    return git("rev-parse", "HEAD", folder=folder)


def compared(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code, the verdicts by cell, and all that was printed."""
    file = folder / ".asv" / "verdicts.json"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.compare.command", *arguments, "--rounds", "5"]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = json.loads(file.read_text())["verdicts"] if file.exists() else []
    return done.returncode, {each["name"]: each for each in found}, done.stdout


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def processes(folder: Path) -> Iterator[str]:
    """The commands that run benchmarks of a folder."""
    listed = subprocess.check_output(["ps", "-ww", "-eo", "args"], text=True).splitlines()
    return (each for each in listed if "run_server" in each and str(folder) in each)


@pytest.mark.integration
class TestPlantedChanges:
    @pytest.mark.parametrize(
        ("changes", "code", "expected"),
        [
            ({}, "# a comment", {}),
            (
                {"steady": 0.0095, "fired": 4, "nodes": 8},
                "",
                {STEADY: IMPROVED, "toy.track_fired": IMPROVED, "toy_graph.track_nodes": INTENDED},
            ),
            (
                {"steady": 0.0105, "cold": 0.0147, "memory": 8192},
                "del MEASURED['fired']",
                dict.fromkeys([STEADY, COLD, "toy.track_memory"], REGRESSED)
                | {"toy.track_fired": FAILED},
            ),
        ],
        ids=["nothing", "better or intended", "worse"],
    )
    def test_each_is_told_and_nothing_else(
        self, repository: Path, changes: dict[str, float], code: str, expected: dict[str, str]
    ) -> None:
        file, told = repository / "declared.toml", "[[change]]\ncells='{}'\nreason='worth it'\n"
        file.write_text(told.format("memory"))  # of an earlier change
        before = commit(repository, "before")
        file.write_text(told.format("memory") + told.format("nodes"))
        after = commit(repository, "after", code, **changes)
        arguments = (before, after, "-b", "toy", "--declared", file.name)
        status, found, output = compared(repository, *arguments)
        usual = dict.fromkeys(found, SAME) | {"toy.Elsewhere.track_speed": NOT_COMPARED}

        assert {name: each["verdict"] for name, each in found.items()} == usual | expected, output
        assert len(found) == 8
        assert f"{found[STEADY]['metric']}({found[STEADY]['kind']})" == STEADY
        assert status == bool({REGRESSED, FAILED} & set(expected.values()))
        assert found["toy.Elsewhere.track_speed"]["reason"].endswith("no such device')")
        assert ("worth it" in output) is (INTENDED in expected.values())

    def test_the_working_tree_is_compared_with_its_changes(self, repository: Path) -> None:
        commit(repository, "before")
        module = repository / "optimizer" / "__init__.py"
        module.write_text("from optimizer.more import MEASURED\n")
        (repository / "optimizer" / "more.py").write_text(f"MEASURED = {BEFORE | {'nodes': 9}}\n")
        try:
            status, found, _ = compared(repository, "HEAD", ".", "-b", "nodes|memory")
            told = git("status", "--short", folder=repository)
        finally:
            (repository / "optimizer" / "more.py").unlink()

        assert status == 1
        assert found["toy_graph.track_nodes"]["verdict"] == REGRESSED
        assert found["toy.track_memory"]["verdict"] == SAME
        assert told == "M optimizer/__init__.py\n?? optimizer/more.py"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "has no file declared.toml"),
            ("[[change", "declared.toml cannot be read"),
            ("[[change]]\ncells = 'a'", "cannot be read ('reason')"),
            ("[[change]]\ncells = 'a'\nreason = ' '", "no reason for a"),
            ("[[change]]\ncells = '('\nreason = 'b'", "declared.toml cannot be read"),
            ("change = 3", "declared.toml cannot be read"),
        ],
    )
    def test_a_declaration_that_cannot_be_read_is_told_before_any_work(
        self, repository: Path, content: str | None, said: str
    ) -> None:
        file = repository / "declared.toml"
        file.unlink(missing_ok=True) if content is None else file.write_text(content)
        commit(repository, "after")
        status, found, output = compared(repository, "HEAD", "HEAD", "--declared", "declared.toml")

        assert status == 2
        assert not found
        assert said in output
        assert "Traceback" not in output

    def test_a_version_that_does_not_import_fails_in_each_cell(self, repository: Path) -> None:
        before, after = commit(repository, "before"), commit(repository, "after", "import nowhere")
        status, found, _ = compared(repository, before, after, "-b", "memory|latency")

        assert status == 1
        assert {each["verdict"] for each in found.values()} == {FAILED}
        assert "No module named 'nowhere'" in found["toy.track_memory"]["reason"]

    def test_a_run_that_is_ended_leaves_no_process_and_is_resumed(self, repository: Path) -> None:
        base = commit(repository, "before", sleeps=1)
        arguments = ["HEAD", "HEAD", "-b", "memory", "-b", "asleep"]
        command = [sys.executable, "-m", "benchmarks.compare.command", *arguments]
        running = subprocess.Popen(command, cwd=repository, stdout=PIPE, stderr=STDOUT, text=True)
        journal = repository / ".asv" / "compare" / f"{base[:12]}-{base[:12]}.jsonl"
        wait_for(lambda: journal.exists() and "track_memory" in journal.read_text())
        asleep = [*processes(repository)]
        running.terminate()
        output, _ = running.communicate(timeout=20)
        left = [*processes(repository)]
        again = compared(repository, *arguments, "--resume", "--minutes", "0.001")[1]

        assert running.returncode == 2
        assert "1 not compared, 1 same" in output
        assert asleep
        assert not left
        assert json.loads(journal.read_text().splitlines()[1])["cell"] == "toy.track_memory"
        assert again["toy.track_memory"]["verdict"] == SAME
        assert again["toy.track_asleep"]["verdict"] == NOT_COMPARED

    def test_where_nothing_can_be_compared_it_says_so(self, repository: Path) -> None:
        status, found, output = compared(repository, "HEAD", "HEAD", "-b", "Elsewhere")

        assert status == 2
        assert [each["verdict"] for each in found.values()] == [NOT_COMPARED]
        assert "nothing could be compared" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["HEAD", "no-such-branch"], "there is no commit 'no-such-branch' here"),
        (["HEAD", "HEAD", "-b", "nothing"], "no benchmark matches 'nothing'"),
        (["HEAD", "HEAD", "-b", "toy", "--resume"], "there is nothing to resume"),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_sentence(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: Any, said: str
) -> None:
    commit(repository, "after")
    status, _, output = compared(repository, *arguments)

    assert status == 2
    assert said in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["HEAD", "HEAD", "--rounds", "3"], "fewer than 4 tell nothing"),
        (["HEAD", "HEAD", "--minutes", "0"], "--minutes is 0.0: name a time above 0."),
        (["HEAD", "HEAD", "--minutes", "nan"], "--minutes is nan: name a time above 0."),
        (["HEAD", "HEAD", "--json", "no/such/folder.json"], "there is no folder"),
    ],
)
def test_wrong_arguments_are_told_before_any_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)

    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def rounds(
    draw: random.Random, *, change: float = 0.0, spread: float = 0.01, count: int = 8, **more: float
) -> list[dict[str, float]]:
    """Numbers of one cell: processes differ by `spread`, and the machine drifts by 3 %."""
    return drawn(draw, Setting(change, noise=spread, **more), count)


def series(found: list[dict[str, float]], **options: Any) -> Series:
    cell = Cell("toy", less_is_better=True, unit="seconds", index=None, benchmark={})
    return Series(cell, found, **options)


def told(draw: random.Random, **options: Any) -> str:
    """The verdict of the two stages, for one cell by itself."""
    first = series(rounds(draw, **options))
    again = series(rounds(draw, **options)) if flagged([first]) else None
    return verdict(first, again).verdict


class TestTheStatistics:
    def test_nothing_is_rarely_taken_for_a_change(self) -> None:
        draw = random.Random(0)
        alarms = [told(draw) not in (SAME, INCONCLUSIVE) for _ in range(400)]

        assert sum(alarms) <= 2  # 0.5 %

    @pytest.mark.parametrize(("change", "power"), [(0.05, 0.95), (0.10, 0.99), (-0.10, 0.99)])
    def test_a_change_is_nearly_always_seen(self, change: float, power: float) -> None:
        draw = random.Random(1)
        wanted = REGRESSED if change > 0 else IMPROVED
        seen = [told(draw, change=change) == wanted for _ in range(200)]

        assert sum(seen) >= power * 200

    def test_what_is_too_noisy_is_inconclusive(self) -> None:
        draw = random.Random(2)
        assert [told(draw, spread=0.3) for _ in range(20)] == [INCONCLUSIVE] * 20

    def test_the_interval_holds_the_truth_as_often_as_it_says(self) -> None:
        draw = random.Random(3)
        found = [Change.of(rounds(draw, change=0.04)) for _ in range(1000)]
        inside = sum(change.low <= 1.04 <= change.high for change in found)

        assert 920 <= inside <= 975

    @pytest.mark.parametrize("cells", [1, 50])
    def test_the_smallest_visible_change_is_told_in_four_of_five(self, cells: int) -> None:
        draw = random.Random(4)
        looks = Looks(cells, 1)
        visible = median(Change.of(rounds(draw)).visible(looks) for _ in range(200))
        said = simulate(Setting(visible, cells=cells), runs=40).said

        assert 0.02 < visible < 0.04
        assert 25 <= said[REGRESSED] <= 38

    def test_among_more_cells_only_larger_changes_are_visible(self) -> None:
        change = Change.of(rounds(random.Random(4), spread=0.02))
        looks = [Looks(1), Looks(50), Looks(50, 10), Looks(300, 10)]

        seen = [change.visible(each) for each in looks]
        assert seen == sorted(set(seen))

    @pytest.mark.parametrize(
        ("setting", "least"),
        [
            (Setting(0.03), 21),
            (Setting(0.05), 24),
            (Setting(0.05, spiked=0.1), 20),
        ],
        ids=str,
    )
    def test_one_change_among_many_cells_is_told(self, setting: Setting, least: int) -> None:
        found = simulate(setting, runs=25)

        assert found.said[REGRESSED] >= least
        assert not found.false

    @pytest.mark.parametrize(
        "setting",
        [Setting(), Setting(noise=0.03), Setting(spiked=0.1), Setting(noise=0.005, noisier=3)],
        ids=str,
    )
    def test_where_nothing_changed_hardly_a_run_tells_of_any(self, setting: Setting) -> None:
        assert not simulate(setting, runs=25).false

    def test_same_is_not_said_of_a_change_that_shows(self) -> None:
        """One of 3 % that the rounds are sure of, but too few to confirm, is inconclusive."""
        found = verdict(series(rounds(random.Random(12), change=0.03, spread=0.002)))

        assert found.verdict == INCONCLUSIVE
        assert found.change is not None
        assert 1 < found.change.low < found.change.high < 1.05

    def test_a_change_that_shows_is_same_where_it_is_too_small_to_be_told(self) -> None:
        found = verdict(series(rounds(random.Random(13), change=0.01, spread=0.002)))

        assert found.verdict == SAME
        assert found.change is not None
        assert found.change.low > 1

    def test_second_rounds_confirm_the_more_strictly_the_more_cells_they_have(self) -> None:
        draw = random.Random(14)
        first, again = series(rounds(draw, change=0.2)), series(rounds(draw, change=0.03))
        chance = Change.of(again.rounds).chance
        said = [verdict(first, again, Looks(1, many)).verdict for many in (1, int(0.06 / chance))]

        assert said == [REGRESSED, INCONCLUSIVE]

    @pytest.mark.parametrize("role", [BASE, NEW])
    def test_a_spike_weighs_nothing(self, role: str) -> None:
        found = rounds(random.Random(15), change=0.05)
        spiked = [
            {**each, role: each[role] * (1.5 if at in (2, 5) else 1)}
            for at, each in enumerate(found)
        ]

        assert Change.of(spiked).ratio == pytest.approx(Change.of(found).ratio, abs=0.01)
        assert Change.of(spiked).low > 1.03

    def test_without_any_noise_the_change_is_what_it_is(self) -> None:
        change = Change.of([{BASE: 1.0, AGAIN: 1.0, NEW: 1.1}] * 4)

        assert (change.ratio, change.low, change.high) == pytest.approx((1.1, 1.1, 1.1))
        assert change.counts
        assert change.visible(Looks()) == pytest.approx(0.02)

    def test_a_change_that_does_not_show_again_is_none(self) -> None:
        draw = random.Random(5)
        first, again = series(rounds(draw, change=0.2)), series(rounds(draw))

        told = verdict(first, again)

        assert flagged([first]) == [first]
        assert told.verdict == INCONCLUSIVE
        assert told.change == Change.of([*first.rounds, *again.rounds])

    def test_of_many_cells_few_are_measured_again_for_nothing(self) -> None:
        """At one in a hundred for each, ten of these thousand would be."""
        draw = random.Random(9)
        assert len(flagged([series(rounds(draw, spread=0.05)) for _ in range(1000)])) <= 2

    @pytest.mark.parametrize("second", [-0.2, 0.01], ids=["the other way", "too small"])
    def test_what_shows_again_is_the_same_change(self, second: float) -> None:
        draw = random.Random(10)
        first = series(rounds(draw, change=0.2, spread=0.001))

        assert flagged([first])
        again = series(rounds(draw, change=second, spread=0.001))
        assert verdict(first, again).verdict == INCONCLUSIVE

    def test_one_large_round_is_no_change(self) -> None:
        still = dict.fromkeys((BASE, AGAIN, NEW), 1.0)
        again = series([still | {NEW: 1.6 if place % 2 else 0.8} for place in range(8)])
        first = series(rounds(random.Random(11), change=0.2))

        assert flagged([first])
        assert Change.of(again.rounds).counts
        assert verdict(first, again).verdict == INCONCLUSIVE

    def test_what_the_base_shows_against_itself_is_no_change(self) -> None:
        up, down = math.exp(0.2), math.exp(-0.2)
        found = [
            {BASE: first, AGAIN: second, NEW: 1.05}
            for first, second in ((up, down), (down, up)) * 4
        ]
        change = Change.of(found)

        assert not flagged([series(found)])
        assert change.low < 0.95 < 1.15 < change.high

    def test_the_change_that_is_told_is_of_the_second_rounds(self) -> None:
        """The first were chosen for being large."""
        draw = random.Random(6)
        found = verdict(series(rounds(draw, change=0.3)), series(rounds(draw, change=0.1)))

        assert found.verdict == REGRESSED
        assert found.change is not None
        assert found.change.ratio == pytest.approx(1.1, abs=0.03)


class TestWhatIsExact:
    def same(self, value: float) -> dict[str, float]:
        return dict.fromkeys((BASE, AGAIN, NEW), value)

    @pytest.mark.parametrize("unstable", [{AGAIN: 6, NEW: 5}, {NEW: 6}])
    def test_a_number_that_differs_from_process_to_process_is_no_alarm(
        self, unstable: dict[str, float]
    ) -> None:
        found = [self.same(4) | {NEW: 5}, self.same(4) | unstable]
        told = verdict(series(found, exact=True))

        assert told.verdict == INCONCLUSIVE
        assert told.reason == "it differs from process to process"

    def test_one_round_is_enough_where_nothing_changed_and_four_where_something_did(self) -> None:
        changed = self.same(4) | {NEW: 5}

        assert series([self.same(4)], exact=True).is_done
        assert not series([changed] * 3, exact=True).is_done
        assert series([changed] * 4, exact=True).is_done
        assert not series([self.same(4)]).is_done


def test_what_fails_in_the_base_too_is_not_compared() -> None:
    both = series([], missing={BASE: "it broke", AGAIN: "it broke", NEW: "it broke"}, failed={NEW})

    assert verdict(both).verdict == NOT_COMPARED
    assert verdict(both).reason == "it broke"


def test_a_number_without_a_logarithm_is_not_compared() -> None:
    empty = series([dict.fromkeys((BASE, AGAIN, NEW), 0.0)] * 4)

    assert verdict(empty).verdict == NOT_COMPARED
    assert flagged([empty]) == []


def test_what_was_interrupted_too_early_is_not_compared() -> None:
    few = verdict(series(rounds(random.Random(0), count=3)))

    assert (few.verdict, few.reason) == (NOT_COMPARED, "3 of 4 rounds were reached")
    assert verdict(series([])).reason == "it was not reached"


def test_what_is_neither_better_more_nor_less_has_changed() -> None:
    cell = Cell("toy", less_is_better=None, unit="rewrites", index=None, benchmark={})
    changed = {BASE: 4, AGAIN: 4, NEW: 5}

    assert verdict(Series(cell, [changed, changed], exact=True)).verdict == CHANGED
    assert verdict(Series(cell, [{BASE: 4, NEW: 4}], exact=True)).verdict == SAME


@pytest.mark.parametrize("write", [text, lambda verdicts: markdown(verdicts, "title")])
def test_the_tables_begin_with_what_matters(write: Callable[..., str]) -> None:
    draw = random.Random(7)
    slow = verdict(series(rounds(draw, change=0.2)), series(rounds(draw, change=0.2)))
    lines = write([verdict(series(rounds(draw))), slow]).splitlines()[1:]
    table = [line.split()[:2] for line in lines]
    places = {
        kind: next(place for place, words in enumerate(table) if kind in words)
        for kind in (REGRESSED, SAME)
    }

    assert places[REGRESSED] < places[SAME]


def test_the_text_leaves_out_exact_numbers_that_are_the_same() -> None:
    still = verdict(series([dict.fromkeys((BASE, AGAIN, NEW), 3.0)], exact=True))
    more = verdict(series([{BASE: 3.0, AGAIN: 3.0, NEW: 4.0}], exact=True))

    assert [line.split()[0] for line in text([still, more]).splitlines()] == ["verdict", REGRESSED]
    assert SAME in markdown([still, more], "title")


def test_json_names_everything_of_a_cell() -> None:
    params = {"model": "resnet18", "variant": "eager"}
    cell = Cell("cpu.Latency.time_forward(resnet18, eager)", True, "seconds", 0, {}, params)
    found = verdict(Series(cell, rounds(random.Random(7))))
    (told,) = json.loads(as_json([found], {}))["verdicts"]

    assert told["metric"] == "cpu.Latency.time_forward"
    assert {name: told[name] for name in params} == params
    assert told["verdict"] == SAME
    assert told["change"]["low"] < told["change"]["ratio"] < told["change"]["high"]


def test_a_line_comes_while_a_cell_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = Schedule([series([]), series([])], [], 8, minutes=1.0)
    with spoken(schedule.line, silence=0.02):
        schedule.begin(series([]))
        time.sleep(0.3)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert re.fullmatch(r"0 of 2 reached: toy; until \d\d:\d\d:\d\d at the latest", lines[0])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted; what is whole follows, --resume goes on"),
        (OSError(28, "No space left on device"), "interrupted: [Errno 28] No space left on device"),
    ],
    ids=["Ctrl-C", "a full disk"],
)
def test_an_interruption_keeps_the_rounds_that_are_whole(
    error: BaseException,
    said: str,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw, count = random.Random(8), 5

    def run_round(several: list[Series], *_: Any) -> None:
        if len(several[0].rounds) == count:
            raise error
        for each in several:
            each.rounds += rounds(draw, count=1, spread=0.3)

    monkeypatch.chdir(repository)
    monkeypatch.setattr(command, "run_round", run_round)
    monkeypatch.setattr(command, "cells", lambda *_: [series([]).cell])
    file = tmp_path / "verdicts.json"
    status = command.main(["HEAD", "HEAD", "--json", str(file)])
    (found,) = json.loads(file.read_text())["verdicts"]

    assert status == 2
    assert found["verdict"] == INCONCLUSIVE
    out, err = capsys.readouterr()
    assert "a quieter machine tell what is inconclusive" in out
    assert said in err
