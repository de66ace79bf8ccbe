"""`benchmarks.summary`: the table of the latest commit, of what was measured."""

from __future__ import annotations

import importlib
import json

import pytest

from benchmarks import summary

COLUMNS = ["result", "params", "stats_ci_99_a", "stats_ci_99_b"]
VARIANTS = ["'eager'", "'optimized-1'", "'optimized-2'"]


def run_of(commit, date, latency, models=("one",)):
    """What asv keeps: the same numbers for each benchmark, by model and variant."""
    column = [latency, [[f"'{model}'" for model in models], VARIANTS], latency, latency]
    results = dict.fromkeys((summary._LATENCY, summary._MEMORY, summary._RATIO), column)
    return {
        "commit_hash": commit * 8,
        "date": date,
        "params": {"machine": "there"},
        "result_columns": COLUMNS,
        "results": results,
    }


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    def printed(*runs, asked=()):
        (tmp_path / "there").mkdir()
        for place, run in enumerate(runs):
            (tmp_path / "there" / f"{place}-environment.json").write_text(json.dumps(run))
        monkeypatch.setattr(summary, "RESULTS", tmp_path)
        summary.main([*asked])
        return capsys.readouterr().out

    return printed


def test_the_latest_is_printed(printed) -> None:
    found = printed(run_of("a", 2, [4e-3, 2e-3, 1e-3]), run_of("b", 1, [1.0, 1.0, 1.0]))

    assert found.startswith("Commit aaaaaaaa on there")
    assert "| one | 4 → 2 → 1 | 0.002 [0.002, 0.002] | 0.001 [0.001, 0.001] |" in found


def test_of_a_gpu_it_is_told_if_asked(printed) -> None:
    run = run_of("a", 2, [4e-3, 2e-3, 1e-3])
    run["results"] = {name.replace("cpu", "cuda"): each for name, each in run["results"].items()}

    assert "| one | 4 → 2 → 1 |" in printed(run, asked=["--device", "cuda"])


def test_one_that_is_not_whole_yet_is_passed_over(printed) -> None:
    begun = run_of("b", 3, [1.0, 1.0, 1.0])
    del begun["results"][summary._RATIO]

    assert printed(run_of("a", 2, [4.0, 2.0, 1.0]), begun).startswith("Commit aaaaaaaa")


def test_a_model_of_which_something_was_not_measured_has_no_row(printed) -> None:
    found = printed(run_of("a", 2, [4.0, None, 1.0, 3.0, 2.0, 1.0], ("one", "other")))

    assert "| other |" in found
    assert "| one |" not in found


def test_a_benchmark_that_failed_has_no_rows(printed) -> None:
    assert printed(run_of("a", 2, None)).rstrip().endswith("|---|")


def test_without_results_it_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(summary, "RESULTS", tmp_path)

    with pytest.raises(SystemExit, match="tox run -e bench"):
        summary.main([])


@pytest.mark.parametrize("name", ["census", "figures", "summary"])
def test_each_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])

    assert stopped.value.code == 0
    assert f"usage: python -m benchmarks.{name}" in capsys.readouterr().out
