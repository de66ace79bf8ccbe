"""What the pages of the dashboard are made of; tests/browser opens them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.repository import committed, stored

pytest.importorskip("asv")
pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[1]
RATIO, NODES = "cpu.Paired.track_relative_latency", "graph.Graph.track_nodes"
CUDA, MEMORY = "cuda.Paired.track_relative_latency", "cpu.Memory.track_peak_memory"
HOSTILE, NAN = "</script><img src=x onerror=alert(1)>&/../..", float("nan")
LISTING = {name: {"version": "1"} for name in (RATIO, CUDA, NODES, MEMORY)} | {"version": 2}
data, pages, views = (
    importlib.import_module(f"benchmarks.site.{name}") for name in ("data", "pages", "views")
)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Three commits, of which the last two were measured."""
    params = [["'one'", repr(HOSTILE)], ["'optimized-1'"]]
    for place in range(3):
        commit = committed(tmp_path, f"number {place}")
        ratio, file = 0.5 * place, tmp_path / "results" / "there" / f"{place}-here.json"
        rows = {
            RATIO: [[ratio, None], params, "1", [ratio - 0.01, None], [ratio + 0.01, None]],
            CUDA: [[0.25, NAN], params, "1", [0.25, None], [0.25, None]],
            NODES: [[10 - place, 1], params, "1"],
            MEMORY: [[4096, 1], params, "1"],
        }
        if place:
            stored(file, commit, rows)
    (tmp_path / "results" / "benchmarks.json").write_text(json.dumps(LISTING))
    monkeypatch.chdir(tmp_path)
    return Path("results")


def test_the_newest_commit_is_judged_against_the_one_before(results):
    found = data.load(results)
    place = found.places[0]
    judged, stepped = views.judged(place), views.steps(place)["one"]
    assert "1 count differs (0 larger, 1 smaller)" in judged.sentence
    assert "(1 slower, 0 faster), which separate runs cannot tell from noise" in judged.sentence
    assert judged.lists[views.WORSE] == []
    assert [each.model for each in judged.lists[views.MOVED]] == ["one"]
    assert [found.history[commit].subject for commit in stepped] == ["number 2"]


def test_a_speed_up_is_one_over_the_ratio_on_the_pages_of_its_device(results, tmp_path):
    found, shown = data.load(results), {}
    pages.write(found, tmp_path / "html")
    for place in found.places:
        hostile, one = (row.variants[0][0] for row in views.matrix(found, place).rows)
        shown[place.name] = one.text[:-1], one.interval, hostile.text
        assert (tmp_path / "html" / pages.folder_of(place) / "one.html").exists()
    assert shown == {
        "there": ("1.00", f"{1 / 1.01:.2f} to {1 / 0.99:.2f}", "failed"),
        "there · CUDA": ("4.00", "4.00 to 4.00", "n/a"),
    }
    for page in (tmp_path / "html").rglob("*.html"):
        assert "<img" not in page.read_text()


def test_without_results_there_is_the_command_that_measures(tmp_path):
    pages.write(data.load(tmp_path / "none"), tmp_path / "html")
    assert "python -m tox run -e bench" in (tmp_path / "html" / "index.html").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"commit_hash": "a"}'])
@pytest.mark.parametrize("name", ["x-here.json", "peers-x.jsonl"])
def test_a_broken_file_is_a_sentence(results, tmp_path, name, text):
    (results / "there" / name).write_text(text)
    found = data.load(results)
    pages.write(found, tmp_path / "html")
    assert len(found.places[0].runs) == 2
    assert any(name in each for each in found.complaints)


def test_the_tables_of_the_documentation_are_found():
    texts = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("benchmarks", "fuzzing")}
    assert len(data.table_after(texts["benchmarks"], pages._SIMULATED)) > 5
    assert len(data.table_after(texts["fuzzing"], pages._FUZZED)) > 5
