"""What the pages of the dashboard are made of; tests/browser opens them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.repository import committed, stored, table

pytest.importorskip("asv")
pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[1]
RATIO, NODES = "cpu.Paired.track_relative_latency", "graph.Graph.track_nodes"
MEMORY = "cpu.Memory.track_peak_memory"
data, pages, views = (
    importlib.import_module(f"benchmarks.site.{name}") for name in ("data", "pages", "views")
)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Three commits, of which the last two were measured."""
    params = [["'one'"], ["'optimized-1'"]]
    for place in range(3):
        commit = committed(tmp_path, f"number {place}")
        ratio, file = 0.5 * place, tmp_path / "results" / "there" / f"{place}-here.json"
        rows = {
            RATIO: [[ratio], params, "1", [ratio - 0.01], [ratio + 0.01]],
            NODES: [[10 - place], params, "1"],
            MEMORY: [[4096], params, "1"],
        }
        if place:
            stored(file, commit, rows)
    (tmp_path / "results" / "benchmarks.json").write_text(json.dumps(LISTING | {"version": 2}))
    monkeypatch.chdir(tmp_path)
    return Path("results")


LISTING = {name: {"version": "1"} for name in (RATIO, NODES, MEMORY)}


def test_the_newest_commit_is_judged_against_the_one_before(results):
    verdict = views.judged(data.load(results).places[0])
    (moved,) = verdict.lists[views.MOVED]

    assert "1 count differs (0 larger, 1 smaller)" in verdict.sentence
    assert "1 paired ratio moved by up to" in verdict.sentence
    assert "(1 slower, 0 faster), which separate runs cannot tell from noise" in verdict.sentence
    assert verdict.lists[views.WORSE] == []
    assert moved.model == "one"
    assert moved.text.endswith(" % slower")


def test_a_speed_up_is_one_over_the_ratio_with_its_interval_turned(results, tmp_path):
    found = data.load(results)
    (row,) = views.matrix(found, found.places[0]).rows
    (shown, _), *_ = row.variants
    assert (shown.text, shown.kind) == ("1.00\N{MULTIPLICATION SIGN}", "unsure")
    assert shown.interval == f"{1 / 1.01:.2f} to {1 / 0.99:.2f}"
    pages.write(found, tmp_path / "html")
    (model,) = (tmp_path / "html").glob("machines/*/one.html")
    for page in (model, tmp_path / "html" / "index.html"):
        assert "without what an engine" in page.read_text()  # beside peak memory


def test_steps_name_the_commit_where_something_differs(results):
    found = data.load(results)
    (place,) = found.places
    stepped = views.steps(place)["one"]
    assert [found.history[commit].subject for commit in stepped] == ["number 2"]
    assert len(stepped[place.runs[-1].commit]) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": 3}', '{"commit_hash": "a"}'])
@pytest.mark.parametrize("name", ["x-here.json", "machine.json", "peers-x.jsonl"])
def test_a_broken_file_is_a_sentence(results, tmp_path, name, text):
    (results / "there" / name).write_text(text)
    found = data.load(results)
    pages.write(found, tmp_path / "html")
    assert len(found.places[0].runs) == 2
    told = any(name in each for each in found.complaints)
    assert told or (name == "machine.json" and text.startswith('{"'))


def test_what_is_of_an_older_suite_is_not_shown(results):
    listing = LISTING | {RATIO: {"version": "2"}}
    (results / "benchmarks.json").write_text(json.dumps(listing))
    found = data.load(results)
    assert not any(cell.startswith(RATIO) for run in found.places[0].runs for cell in run.numbers)
    assert "older suite" in found.notes[0]


def test_no_results_are_a_page_with_the_command(tmp_path):
    pages.write(data.load(tmp_path / "none"), tmp_path / "html")
    assert "python -m tox run -e bench" in (tmp_path / "html" / "index.html").read_text()


@pytest.mark.parametrize("name", ["../../up", "a/b", "<b>", ".hidden", "index", "ä" * 200])
def test_a_name_of_any_kind_is_the_name_of_a_file(name):
    found = pages.slug(name)
    assert found != name
    assert "/" not in found
    assert found[0] != "."
    assert len(found) < 100


def test_markdown_is_escaped_and_code_and_names_stay_whole():
    told = pages.marked("**`a*b*`** <i> [text](place)")
    assert told == "**<code>a*b*</code>** &lt;i&gt; text"
    assert pages.whole("optimized-2-openvino") == '<span class="whole">optimized-2</span>-openvino'
    assert pages.whole("<b-1>") == '&lt;<span class="whole">b-1</span>&gt;'
    assert pages.parted("swin_t<") == "swin_<wbr>t&lt;"


def test_a_gpu_of_a_machine_has_pages_of_its_own(results, tmp_path):
    for file in results.glob("there/*.json"):
        run = json.loads(file.read_text())
        values = {RATIO.replace("cpu", "cuda"): [[0.25], *run["results"][RATIO][1:]]}
        file.write_text(json.dumps(run | {"results": run["results"] | values}))
    listing = LISTING | {"cuda.Paired.track_relative_latency": {"version": "1"}, "version": 2}
    (results / "benchmarks.json").write_text(json.dumps(listing))
    found = data.load(results)
    pages.write(found, tmp_path / "html")

    shown = {}
    for place in found.places:
        (row,) = views.matrix(found, place).rows
        shown[place.name] = row.variants[0][0].text
        assert (tmp_path / "html" / pages.folder_of(place) / "one.html").exists()
        assert "CUDA" not in {each.what for each in views.missing(found, place)}
    assert shown == {
        "there": "1.00\N{MULTIPLICATION SIGN}",
        "there · CUDA": "4.00\N{MULTIPLICATION SIGN}",
    }


@table(
    "page start",
    ("benchmarks", pages._SIMULATED),
    ("benchmarks", pages._COUNTED),
    ("fuzzing", pages._FUZZED),
)
def test_the_tables_of_the_documentation_are_found(page, start):
    assert len(data.table_after((ROOT / "docs" / f"{page}.md").read_text(), start)) > 5
