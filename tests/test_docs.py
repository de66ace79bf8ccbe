"""The pages run: every Python block, in order, and what is printed is what stands below it.

The blocks of one page share their names. A block of text is held to what was printed since the
last one; a plain block is not, for what differs from run to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block, which keeps its line number in the page."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield match[1], "\n" * (text.count("\n", 0, match.start()) + 1) + match[2]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_and_prints_what_stands_below_it(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for language, text in blocks(page):
        if language == "text":
            assert lines(text) == lines(capsys.readouterr().out), f"{page.name}: {text.strip()}"
        else:
            capsys.readouterr()
            exec(compile(text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())

    assert [target for target in targets if not (page.parent / target).exists()] == []
