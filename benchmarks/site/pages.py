"""Writes the pages: two for each machine and one for each of its models, and those of the root.

The root has what the machine has that was measured last, so that one link is enough.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from . import views
from .data import Place, Site, table_after

_HERE = Path(__file__).parent
STATIC = "site"
ASV = "asv.html"
_MEMORY_IS = (
    "Peak memory is what the allocator of PyTorch holds: without what an engine, such as OpenVINO"
    " or ONNX Runtime, allocates by itself."
)
_SIMULATED, _FUZZED = "| change of one cell", "| | goal | measured |"


def write(site: Site, folder: Path) -> None:
    """All pages, with what they are drawn with."""
    shutil.copytree(_HERE / "static", folder / STATIC, dirs_exist_ok=True)
    written = _Written(site, folder)
    if not site.places:
        written.page("index.html", "empty.html", None, title="Nothing was measured yet")
        written.page("believe.html", "believe.html", None, title="What to believe", **_docs(site))
    for place in site.places:
        written.place(place, f"{folder_of(place)}/")
    for place in site.places[:1]:
        written.overview(place, "")


def folder_of(place: Place) -> str:
    """Where the pages of a machine are."""
    parts = [place.machine, "" if place.is_only_one else place.environment]
    parts.append(place.device if place.device != "cpu" else "")
    return f"machines/{slug('-'.join(filter(None, parts)))}"


def slug(name: str) -> str:
    """A name as that of a file: itself if it can be, and else made one of its own."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:80]
    if plain == name and not name.startswith(".") and name not in ("index", "believe"):
        return name
    return f"{plain.lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def marked(text: str) -> Markup:
    """A line of Markdown: code, bold, italics and the text of links, and nothing else of it."""
    parts = re.split(r"`([^`]+)`", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text))
    shown = [f"<code>{escape(part)}</code>" if at % 2 else _stressed(part)
             for at, part in enumerate(parts)]  # fmt: skip
    return Markup("".join(shown))


def whole(name: str) -> Markup:
    """The name of a variant, in which no line ends before a digit: optimized-2 is one word."""
    return Markup(re.sub(r"\w+-\d+", r'<span class="whole">\g<0></span>', str(escape(name))))


def parted(name: str) -> Markup:
    """The name of a model, in which lines end behind underscores where it is too long."""
    return Markup(str(escape(name)).replace("_", "_<wbr>"))


def _stressed(text: str) -> str:
    html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", str(escape(text)))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", html)


def _docs(site: Site) -> dict[str, list[list[str]]]:
    return {
        "simulated": table_after(site.docs.get("benchmarks", ""), _SIMULATED),
        "fuzzed": table_after(site.docs.get("fuzzing", ""), _FUZZED),
        "believed": _points_below(site.docs.get("benchmarks", ""), "## What to believe"),
    }


def _points_below(page: str, title: str) -> list[str]:
    """The points of the list below a title."""
    _, _, rest = page.partition(f"{title}\n")
    lines = rest.partition("\n## ")[0].splitlines()
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]


class _Written:
    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters |= {"marked": marked, "slug": slug, "folder": folder_of}
        self.templates.filters |= {"whole": whole, "parted": parted}
        self.machines = views.machines(site)
        self.models = {folder_of(each): set(map(slug, views.models(each))) for each in site.places}

    def place(self, place: Place, where: str) -> None:
        """All pages of a machine."""
        self.overview(place, where)
        stepped = views.steps(place)
        for model in views.models(place):
            self.model(place, model, where, stepped.get(model, {}))

    def overview(self, place: Place, where: str) -> None:
        """The first page of a machine, and what to believe of its numbers."""
        self.page(
            f"{where}index.html",
            "overview.html",
            place,
            title="Overview",
            matrix=views.matrix(self.site, place),
            verdict=views.judged(place),
            urgent=(views.WORSE, views.FAILS),
            newest=self.site.history[place.runs[-1].commit] if place.runs else None,
            missing=views.missing(self.site, place),
        )
        noise = views.noise(self.site, place)
        about = {"title": "What to believe", "noise": noise, **_docs(self.site)}
        self.page(f"{where}believe.html", "believe.html", place, **about)

    def model(self, place: Place, model: str, where: str, stepped: dict[str, list[str]]) -> None:
        """The page of a model."""
        of = (self.site, place, model)
        self.page(
            f"{where}{slug(model)}.html",
            "model.html",
            place,
            title=model,
            charts=views.charts(*of, stepped),
            counts=views.counts(*of),
            memory=views.memory(*of),
            rewrites=views.rewrites(*of),
            lowered=views.lowered(*of),
            errors=views.errors(*of),
            models=views.models(place),
        )

    def page(self, path: str, template: str, place: Place | None, **shown: Any) -> None:
        """Write one file."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * path.count("/")
        own = f"{root}{folder_of(place)}/" if place else root
        known = {"site": self.site, "machines": self.machines, "place": place}
        known["memory_is"] = _MEMORY_IS
        known["places"] = [
            (each.name, f"{root}{folder_of(each)}/{self._same(path, each)}", each is place)
            for each in self.site.places
        ]
        links = {"root": root, "own": own, "static": f"{root}{STATIC}/", "asv": f"{root}{ASV}"}
        text = self.templates.get_template(template).render(known | links | shown)
        file.write_text(text, encoding="utf-8")

    def _same(self, path: str, place: Place) -> str:
        """The page of another machine that has what this one has."""
        file = Path(path).name
        same = self.models[folder_of(place)] | {"believe"}
        return file if file.removesuffix(".html") in same else "index.html"
