"""The tier of peers: fake ones for how they are asked, and real ones for what they answer."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers._process import PeerError, Worker, worker
from benchmarks.peers._rounds import Plan, measured
from benchmarks.peers._table import tables
from tests.repository import table

ROOT = Path(__file__).parents[1]
PLAN = Plan(rounds=6, block_seconds=0.01, limit=20)
SECONDS = {"eager": 0.004, "fast": 0.002, "slow": 0.02, "slower": 2.0, "fastest": 1e-6}


class Fake:
    """Answers as a worker does, and notes who was asked; a name may end in when it fails."""

    def __init__(self, peer, asked):
        self.name, _, self.failing = peer.partition(" ")
        self.asked, self.number = asked, 0

    def answer(self):
        self.asked.append((self.name, "prepares"))
        if self.failing == "first":
            raise PeerError("too hard")
        seconds = SECONDS[self.name]
        first = [0.5 + seconds, seconds, seconds]
        return {"preparing": 1.0, "first": first, "difference": 1e-7}

    def ask(self, discarded, timed):
        if self.failing == "later" and self.number == 2:
            raise PeerError("no more")
        self.asked.append((self.name, f"{discarded}+{timed}"))
        self.number += 1
        times = [SECONDS[self.name] * (0.9 + self.number / 10)] * timed
        return {"seconds": times, "peak_memory": self.number}

    def close(self):
        self.asked.append((self.name, "ends"))

    __enter__, __exit__ = (lambda self: self), (lambda self, *_: None)


def race(*peers, eager="eager"):
    """The cells of some peers, and who was asked what until it ended."""
    asked = []
    return measured(peers, lambda n: Fake(eager if n == "eager" else n, asked), PLAN), asked


def test_peers_are_asked_once_a_round_in_orders_that_differ_for_blocks_that_fill_their_time():
    cells, asked = race("fast", "slow", "fastest", "slower")
    blocks = {"eager": "2+2", "fast": "2+5", "slow": "1+1", "fastest": "2+100", "slower": "1+1"}
    rounds = [tuple(peer for peer, _ in asked[at : at + 5]) for at in range(5, len(asked), 5)]
    cell, growing = cells["fast"], [1 + number / 10 for number in range(6)]

    assert dict(asked) == blocks
    assert [sorted(each) for each in rounds] == [sorted(blocks)] * PLAN.rounds
    assert len(set(rounds)) > 2
    for key, seconds in (("seconds", 0.002), ("eager_seconds", 0.004)):
        assert cell[key] == pytest.approx([seconds * factor for factor in growing])
    assert (cell["peak_memory"], cell["difference"]) == (6, 1e-7)
    # What is compiled in the first call; later calls of the slower took longer, which is none.
    assert cell["prepared"] == pytest.approx(1 + 0.5 + 3 * 0.002 - 3 * 0.002 * 1.25)
    assert cells["slower"]["prepared"] == 1


@table(
    "peer eager cells",
    ("slow first", "eager", {"slow first": {"reason": "too hard"}}),
    ("slow later", "eager", {"slow later": {"reason": "no more"}}),
    ("slow", "eager first", {"eager": {"reason": "too hard"}}),
    ("slow", "eager later", {"fast": {"reason": "nothing to compare with: no more"}}),
)
def test_who_fails_says_why_and_without_eager_nothing_is_compared(peer, eager, cells):
    found, _ = race(peer, "fast", eager=eager)
    assert found == found | cells
    assert ("fast" in found) is (eager != "eager first")


def program(code, limit=PLAN.limit):
    return Worker([sys.executable, "-c", f"import json, os, subprocess, sys, time\n{code}"], limit)


@table(
    "code reason",
    ('print(\'{"reason": "TypeError: too hard"}\', flush=True); exit(1)', "TypeError: too hard"),
    ("time.sleep(60)", "no answer in 0.5 s"),
    ("sys.exit('MemoryError: no more')", "exit status 1: MemoryError: no more"),
    ("os.kill(os.getpid(), 9)", "SIGKILL"),
)
def test_a_worker_answers_or_it_is_told_why_not(code, reason):
    echo = "print(sys.stdin.readline(), end='', flush=True)"
    with program(f"{echo}\n{code}", limit=0.5 if "sleep" in code else 20) as running:
        assert running.ask(timed=3) == {"timed": 3}
        with pytest.raises(PeerError) as told:
            running.ask(timed=3)
    assert str(told.value) == reason


CELL = {"seconds": [0.002] * 6, "eager_seconds": [0.003] * 6, "prepared": 1.5}
CELL |= {"peak_memory": 3 * 2**20, "difference": 1e-7}


def key(peer, model="resnet18"):
    return ("cpu", "float32", model, 1, 1, peer)


FAILED = {"reason": "not today"}
TWO = ("--models", "resnet18,resnet50", "--peers", "fx_fuse,openvino")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command with nothing behind it, which may be stopped: what it measures and prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENCHMARK_MACHINE", "here")

    def run(*arguments, failing=(), most=9):
        measurements = []

        def measure(peers, start, plan):
            if len(measurements) == most:
                raise KeyboardInterrupt
            measurements.append(tuple(peers))
            return {peer: FAILED if peer in failing else CELL for peer in ("eager", *peers)}

        monkeypatch.setattr(command, "measured", measure)
        command.main(list(arguments))
        return measurements, capsys.readouterr().out

    return run


def test_the_command_keeps_its_cells_and_measures_again_only_what_failed_or_was_not_reached(run):
    with pytest.raises(SystemExit, match="no results on cpu yet"):
        run("--table")
    assert "1.50" in run("--quick", *TWO)[1]
    assert not Path("results").exists()
    with pytest.raises(KeyboardInterrupt):
        run(*TWO, failing=["openvino"], most=1)
    again = [("openvino",), ("eager", "fx_fuse", "openvino")]
    assert run(*TWO, failing=["openvino"])[0] == again
    assert run(*TWO)[0] == [("openvino",)] * 2
    assert run("--models", "resnet18", "--peers", "fx_fuse,torchscript")[0] == [("torchscript",)]


def test_the_table_is_of_the_latest(run, monkeypatch):
    run(*TWO)
    earlier = command._about() | {"commit": "a", "date": "2026-01-01"}
    monkeypatch.setattr(command, "_about", lambda: earlier)
    run("--models", "r3d_18", "--peers", "fx_fuse")
    measurements, output = run("--table")
    assert measurements == []
    assert f"torch {importlib.metadata.version('torch')}" in output
    assert "| resnet50 | 2 ms | 1.50 [1.50, 1.50] (1.5) |" in output
    assert "r3d_18" not in output


def test_the_tables_say_what_was_measured_what_failed_and_what_is_wrong():
    """The numbers of the readme, below, are those of such tables too."""
    wrong = {**CELL, "difference": 0.1, "budget": 0.01}
    found = {"eager": CELL, "fx_fuse": FAILED, "onnxruntime": CELL, "openvino": wrong}
    told = "\n".join(tables({key(peer): cell for peer, cell in found.items()}))
    assert "| 2 ms | n/a (1) | 1.50 [1.50, 1.50] (1.5) | wrong answer (1.5) |" in told
    assert "1. fx_fuse: not today" in told


TASK = {"device": "cpu", "dtype": "float32", "model": "tiny_convnet", "batch": 2, "threads": 1}


@pytest.mark.integration
def test_real_peers_answer_as_eager_does_on_models_of_the_commit_under_test(tmp_path, monkeypatch):
    cells = measured(["fx_fuse"], lambda peer: worker({**TASK, "peer": peer}, 120), PLAN)
    assert list(cells) == ["eager", "fx_fuse"]
    assert cells["eager"]["difference"] == 0 < cells["fx_fuse"]["difference"] < 1e-5
    assert all(1e-6 < seconds < 10 for cell in cells.values() for seconds in cell["seconds"])

    (tmp_path / "models.py").write_text("def load(name): raise LookupError(name + ' of it')")
    monkeypatch.setattr("benchmarks.peers._process._project", lambda: str(tmp_path))
    raised = pytest.raises(PeerError, match="LookupError: tiny_convnet of it")
    with worker({**TASK, "peer": "eager"}, 120) as running, raised:
        running.answer()


def test_the_readme_has_the_figures_that_are_kept():
    kept = command._latest("cpu")
    said = re.sub(r" \[[^]]*\]", "", "\n".join(tables(kept.cells))).splitlines()
    readme = (ROOT / "README.md").read_text()
    start = readme.index("| model | eager | three lines")
    table, caption, *_ = readme[start:].split("\n\n")
    rows = [line for line in table.splitlines() if " ms " in line]
    means = [line.split(" | ") for line in said if line.startswith("| geometric mean")]

    assert kept.about["commit"] in readme
    assert [row for row in rows if row.replace("| fails |", "| n/a (1) |") not in said] == []
    for _, _, *others in means[1:3]:
        assert set(others[:4]) <= set(re.findall(r"\d\.\d\d", caption))
