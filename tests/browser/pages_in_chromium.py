"""Our pages of the published dashboard in a headless Chromium, on the committed results."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import ConsoleMessage, Page, Response, Route, sync_playwright

ROOT = Path(__file__).parents[2]
RATIO, LATENCY = "cpu.Paired.track_relative_latency", "cpu.Latency.time_forward"
MEMORY = "cpu.Memory.track_peak_memory"


@dataclass
class Dashboard:
    """An open page, what it asked other hosts for, and what it complained of."""

    page: Page
    address: str
    requests_elsewhere: list[str]
    complaints: list[str]

    def go(self, place: str = "") -> None:
        self.page.goto("about:blank")  # or only the fragment changes, and nothing is loaded
        self.page.goto(f"{self.address}/{place}")
        self.page.wait_for_load_state("networkidle")

    def route(self, route: Route) -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            self.requests_elsewhere.append(route.request.url)
            route.abort()

    def hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def note(self, response: Response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status} {response.url}")


class _SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None:
        return


@pytest.fixture(scope="module")
def address(html: Path) -> Iterator[str]:
    """Of a plain file server, below a path."""
    handler = functools.partial(_SilentHandler, directory=str(html.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{html.name}"
        server.shutdown()


@pytest.fixture
def dashboard(address: str) -> Iterator[Dashboard]:
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        opened = Dashboard(page, address, [], [])
        page.route("**/*", opened.route)
        page.on("console", opened.hear)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("response", opened.note)
        yield opened
        browser.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, published where its history is."""
    folder = tmp_path_factory.mktemp("published") / "below"
    command = [sys.executable, "-m", "asv", "publish", "--html-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"HOME": str(folder.parent)})
    return folder


@pytest.fixture(scope="module")
def places(html: Path) -> list[str]:
    found = sorted(each.name for each in (html / "machines").iterdir())
    return [f"machines/{name}" for name in found]


@pytest.fixture(scope="module")
def fullest(html: Path, places: list[str]) -> str:
    """The overview of the machine that has most; that measured last may have little."""
    return max(
        (f"{place}/index.html" for place in places), key=lambda page: (html / page).stat().st_size
    )


def _files(html: Path) -> list[str]:
    pages = [each.relative_to(html) for each in html.rglob("machines/*/*.html")]
    return ["index.html", "believe.html", *map(str, sorted(pages))]


def test_nothing_is_asked_of_another_host_and_nothing_fails(dashboard, html) -> None:
    for page in _files(html)[::3]:
        dashboard.page.goto(f"{dashboard.address}/{page}")
    dashboard.go("index.html")

    assert dashboard.requests_elsewhere == []
    assert dashboard.complaints == []


def test_every_link_leads_to_a_page(html) -> None:
    for name in _files(html):
        page = html / name
        text = page.read_text()
        links = [part.split('"')[0].split("#")[0] for part in text.split('href="')[1:]]
        assert [each for each in links if each and not (page.parent / each).exists()] == []


def _place(folder: str) -> tuple[Path, str]:
    """Where the results of a folder of pages are, and of which device it is."""
    name = folder.removeprefix("machines/")
    device = next((each for each in ("cuda", "mps") if name.endswith(f"-{each}")), "cpu")
    return ROOT / "results" / name.removesuffix(f"-{device}"), device


def _stored(folder: Path, ratio: str) -> dict[str, Any]:
    """The file of results that the matrix of a machine is of: of the newest commit."""
    history = subprocess.check_output(["git", "rev-list", "HEAD"], cwd=ROOT, text=True).split()
    files = [json.loads(each.read_text()) for each in folder.glob("*-*.json")]
    files = [each for each in files if each["commit_hash"] in history and ratio in each["results"]]
    return min(files, key=lambda each: history.index(each["commit_hash"]), default={})


def _numbers(stored: dict[str, Any], name: str) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Value and interval by model and variant."""
    if not stored or name not in stored["results"]:
        return {}
    row = dict(zip(stored["result_columns"], stored["results"][name], strict=False))
    pairs = [(m[1:-1], v[1:-1]) for m in row["params"][0] for v in row["params"][1]]
    columns = (row[each] or [None] * len(pairs)
               for each in ("result", "stats_ci_99_a", "stats_ci_99_b")
               if each in row)  # fmt: skip
    return dict(zip(pairs, zip(*columns, strict=False), strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value


def _matrix(page: Any) -> dict[tuple[str, str], dict[str, str]]:
    """The cells of the matrix by model and column, each with its parts."""
    found = page.evaluate(
        """() => [...document.querySelectorAll("#matrix tbody tr")].flatMap((row) =>
        [...document.querySelectorAll("#matrix th[data-column]")].slice(1).map((head, at) => {
            const cell = row.cells[at + 1];
            const parts = [...cell.children].map((part) => [part.className, part.textContent]);
            return [row.dataset.model, head.dataset.column,
                {kind: cell.className, sort: cell.dataset.sort, ...Object.fromEntries(parts)}];
        }))"""
    )
    return {(model, column): cell for model, column, cell in found}


def test_every_number_of_the_matrix_is_what_the_results_have(dashboard, places) -> None:
    compared = 0
    for place in places:
        dashboard.go(f"{place}/index.html")
        folder, device = _place(place)
        names = {each: each.replace("cpu", device) for each in (RATIO, LATENCY, MEMORY)}
        cells, stored = _matrix(dashboard.page), _stored(folder, names[RATIO])
        known = {kind: _numbers(stored, name) for kind, name in names.items()}
        for (model, column), cell in cells.items():
            kind, _, variant = column.partition(":")
            compared += _as_stored(cell, kind, known, model, variant)

    assert compared > 100


def _as_stored(cell: dict[str, str], kind: str, known: Any, model: str, variant: str) -> bool:
    benchmark = {"suite": RATIO, "memory": MEMORY}.get(kind)
    if benchmark is None:
        return False
    value, low, high = (*known[benchmark].get((model, variant), ()), None, None, None)[:3]
    if not _is_number(value):
        assert cell["value"] in ("n/a", "failed")
        return False
    if kind == "memory":
        assert float(cell["sort"]) == value / 2**20
        return True
    assert cell["value"] == f"{1 / value:.2f}\N{MULTIPLICATION SIGN}"
    assert cell["interval"] == f"{1 / high:.2f} to {1 / low:.2f}"
    kinds = {(True, True): "slower", (False, False): "faster"}
    assert cell["kind"].split()[-1] == kinds.get((low > 1, high >= 1), "unsure")
    latency = known[LATENCY].get((model, variant), (None,))[0]
    if _is_number(latency):
        shown = float(cell["more"].removesuffix(" ms").replace(",", ""))
        assert shown == pytest.approx(latency * 1e3, rel=6e-3)
    return True


def test_every_number_of_a_peer_is_what_the_results_have(dashboard, places) -> None:
    compared = 0
    for place in places:
        dashboard.go(f"{place}/index.html")
        cells, text = _matrix(dashboard.page), dashboard.page.inner_text("main")
        for (model, peer), ratio in _peers(*_place(place), text).items():
            shown = cells[model, f"peer:{peer}"]
            assert shown["value"] == f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
            compared += 1

    assert compared > 80


def _peers(folder: Path, device: str, text: str) -> dict[tuple[str, str], float]:
    """Of the file whose commit the page names."""
    found = {}
    for file in folder.glob("peers-*.jsonl"):
        about, *cells = map(json.loads, file.read_text().splitlines())
        if f"Beside other tools: commit {about['commit']}" not in text:
            continue
        for cell in cells:
            asked = [cell[axis] for axis in ("device", "dtype", "batch", "threads")]
            is_right = "reason" not in cell and cell["difference"] < 1e-3
            alike = asked == [device, "float32", 1, 1]
            if alike and is_right and cell["peer"] != "eager":
                pairs = zip(cell["eager_seconds"], cell["seconds"], strict=True)
                found[cell["model"], cell["peer"]] = median(a / b for a, b in pairs)
    return found


def test_the_table_of_a_model_has_what_its_chart_draws(dashboard, places) -> None:
    for place in places:
        dashboard.go(f"{place}/resnet18.html")
        painted = dashboard.page.evaluate(
            """() => [...document.querySelectorAll(".plot")].map((plot) => {
            const drawn = JSON.parse(plot.querySelector("script").textContent).series;
            const rows = [...plot.closest(".chart").querySelectorAll("tbody tr")].reverse();
            const shown = drawn.map((_, at) => rows.map((row) => row.cells[at + 1].dataset.sort));
            return [drawn.map((each) => each.values.map((value) => value ?? undefined)),
                shown.map((each) => each.map((value) => value && Number(value))),
                plot.querySelector("canvas").width];
        })"""
        )
        for drawn, shown, width in painted:
            assert drawn == shown
            assert width > 0


def _order(dashboard: Any) -> list[str]:
    return dashboard.page.eval_on_selector_all(
        "#matrix tbody tr:not([hidden])", "rows => rows.map(row => row.dataset.model)"
    )


def _known(dashboard: Any, column: str) -> list[str]:
    """The models with a number in a column, in the order that they are shown in."""
    return dashboard.page.eval_on_selector_all(
        "#matrix tbody tr:not([hidden])",
        """(rows, column) => {
        const at = document.querySelector(`th[data-column="${column}"]`).cellIndex;
        const known = rows.filter((row) => row.cells[at].dataset.sort);
        return known.map((row) => row.dataset.model);
    }""",
        column,
    )


def test_what_is_sorted_and_filtered_is_in_the_address(dashboard, fullest) -> None:
    dashboard.go(fullest)
    as_it_was = _order(dashboard)
    dashboard.page.locator('th[data-column="peer:onnxruntime"] button').press("Enter")
    assert re.search(r"sort=peer(:|%3A)onnxruntime&order=down", dashboard.page.url)
    slowest = _order(dashboard)
    known = _known(dashboard, "peer:onnxruntime")
    assert slowest[: len(known)] == known
    dashboard.page.locator('th[data-column="peer:onnxruntime"] button').click()
    assert _known(dashboard, "peer:onnxruntime") == known[::-1] != known
    assert _order(dashboard)[: len(known)] == known[::-1]  # what was not measured stays last

    dashboard.page.go_back()
    assert _order(dashboard) == slowest
    dashboard.page.go_back()
    assert _order(dashboard) == as_it_was

    dashboard.page.fill("#filter", "RESNET")
    assert all("resnet" in name for name in _order(dashboard))
    assert "models=RESNET" in dashboard.page.url
    dashboard.go("index.html?sort=model&order=down&models=net")
    assert _order(dashboard) == sorted(_order(dashboard), reverse=True)
    assert dashboard.page.input_value("#filter") == "net"


@pytest.mark.parametrize("width", [375, 1600])
def test_no_page_is_wider_than_its_window(dashboard, html, width) -> None:
    dashboard.page.set_viewport_size({"width": width, "height": 800})
    for page in ["index.html", "believe.html", next(p for p in _files(html) if "resnet18" in p)]:
        dashboard.go(page)
        assert "`" not in dashboard.page.inner_text("main")  # what is code is shown as code
        assert dashboard.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_numbers_are_there_without_a_script(dashboard, fullest) -> None:
    context = dashboard.page.context.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{dashboard.address}/{fullest}")

    assert page.locator("#matrix tbody .number .value").count() > 50
    assert page.is_hidden("#filter")


def test_asv_s_views_are_one_click_away_and_draw(dashboard) -> None:
    dashboard.go("index.html")
    dashboard.page.get_by_role("link", name="asv’s views").click()  # noqa: RUF001
    dashboard.page.wait_for_selector("#root :text('cpu.')")
    dashboard.go(f"asv.html#view=explore&bench={LATENCY}")
    dashboard.page.get_by_text("model='resnet18', variant='optimized-1'").first.wait_for()
    assert dashboard.requests_elsewhere == []
    assert dashboard.complaints == []
