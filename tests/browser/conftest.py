"""A headless Chromium that opens a published dashboard, with every other host out of reach."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import ConsoleMessage, Page, Response, Route, sync_playwright

ROOT = Path(__file__).parents[2]


class Dashboard(NamedTuple):
    """An open page, what it asked other hosts for, and what it complained of."""

    page: Page
    address: str
    requests_elsewhere: list[str]
    complaints: list[str]

    def go(self, place: str = "") -> None:
        self.page.goto("about:blank")  # or only the fragment changes, and nothing is loaded
        self.page.goto(f"{self.address}/{place}")
        self.page.wait_for_load_state("networkidle")


@pytest.fixture(scope="session")
def copy_suite() -> Callable[[Path], None]:
    """Makes a repository of a folder, with our suite and its configuration."""
    return _copy_suite


@pytest.fixture(scope="session")
def commit() -> Callable[[Path, str], str]:
    """Makes a commit with a message, and tells its hash."""
    return _commit


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
        page.route("**/*", functools.partial(_only_here, opened.requests_elsewhere))
        page.on("console", functools.partial(_note_error, opened.complaints))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("response", functools.partial(_note_absent, opened.complaints))
        yield opened
        browser.close()


class _SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message: object) -> None:
        return


def _only_here(elsewhere: list[str], route: Route) -> None:
    if urlsplit(route.request.url).hostname == "127.0.0.1":
        route.continue_()
        return
    elsewhere.append(route.request.url)
    route.abort()


def _note_error(complaints: list[str], message: ConsoleMessage) -> None:
    if message.type == "error":
        complaints.append(f"{message.text} {message.location.get('url', '')}")


def _note_absent(complaints: list[str], response: Response) -> None:
    if response.status >= 400:
        complaints.append(f"{response.status} {response.url}")


def _copy_suite(project: Path) -> None:
    commands = shutil.ignore_patterns("census.py", "figures.py", "zoo.py")  # which import torch
    shutil.copytree(ROOT / "benchmarks", project / "benchmarks", ignore=commands)
    shutil.copy(ROOT / "asv.conf.json", project)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)


def _commit(project: Path, message: str) -> str:
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    arguments = ["commit", "--quiet", "--allow-empty", "--message", message]
    subprocess.run(["git", *identity, *arguments], cwd=project, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=project, text=True).strip()
