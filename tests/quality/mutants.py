"""Mutants: the package with one mistake in it, to see whether the fuzz finds it.

The catalogue is `mutants.txt`, a row for each:

    == FILE, below `optimizer/` : what to fuzz
    # what is wrong · where it was seen
    - the text that stands there, exactly once
    + what stands there instead

What to fuzz are names of passes, or `capture` or `lowering` for none of them; where nothing is
named it is the pass itself, all passes that import the file, or all there are.

A mutant is never written to disk: an import hook gives its text to a fresh copy of the package.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from random import Random
from types import CodeType, ModuleType
from typing import Any

import optimizer
from optimizer.testing.motifs import MOTIFS

PACKAGE = Path(optimizer.__file__).parent
TESTS = Path(__file__).parents[1]  # of the repository; the package may be installed elsewhere
# What passes rest on without importing it.
BELOW = {"facts/facts"}


@dataclass(frozen=True)
class Mutant:
    """One mistake. `origin` names the issue in which somebody made it; classic or own if none."""

    name: str
    file: str
    old: str
    new: str
    origin: str
    concerns: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The dotted name of the module that it is in."""
        return f"optimizer.{self.file.removesuffix('.py').replace('/', '.')}"

    def source(self) -> str:
        """The text of the file with the mistake in it.

        Raises:
            ValueError: what it replaces does not stand there exactly once.
        """
        text = (PACKAGE / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"'{self.old}' stands {text.count(self.old)} times in {self.file}.")
        return text.replace(self.old, self.new)


def catalogue() -> dict[str, Mutant]:
    """Every mutant, by name."""
    file, concerns = "", ""
    rows: list[dict[str, Any]] = []
    for line in Path(__file__).with_name("mutants.txt").read_text(encoding="utf-8").splitlines():
        mark, text = line[:1], line[2:]
        if mark == "=":
            file, _, concerns = line.removeprefix("== ").partition(" : ")
        elif mark == "#":
            rows.append({"file": file, "concerns": concerns, "what": text, "-": [], "+": []})
        elif mark:
            rows[-1][mark].append(text)
    mutants = [_mutant(row) for row in rows]
    return {mutant.name: mutant for mutant in mutants}


def _mutant(row: dict[str, Any]) -> Mutant:
    what, _, origin = row["what"].partition(" · ")
    one_pass = row["file"].startswith("passes/") and len(row["concerns"].split()) == 1
    name = f"{row['concerns'] if one_pass else Path(row['file']).stem}: {what}"
    old, new = "\n".join(row["-"]), "\n".join(row["+"])
    return Mutant(name, row["file"], old, new, origin or "own", tuple(row["concerns"].split()))


def sample(mutants: Iterable[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """So many of them, or all; the same for a seed, whatever becomes of others."""
    return sorted(mutants, key=lambda each: Random(f"{seed} {each.name}").random())[:count]


def concerned(mutant: Mutant) -> list[str]:
    """What to fuzz: what is named, or the pass, its readers, the capture, or else all passes."""
    module = mutant.file.removesuffix(".py")
    own = mutant.concerns or [name for name, file in homes().items() if file == module]
    if own:
        return list(own)
    readers = [name for name, file in homes().items() if module in imports(file)]
    return readers or (["capture"] if module in of_capture() else list(MOTIFS))


@cache
def homes() -> dict[str, str]:
    """The file of each pass, below the package and without its ending, by name."""
    modules = {each.name: each.apply.__module__ for each in optimizer.all_passes()}
    return {name: modules[name].removeprefix("optimizer.").replace(".", "/") for name in MOTIFS}


def of_capture() -> set[str]:
    """The modules that only the capture is made of."""
    of_it = ("frontend/symbolic", "frontend/tracer")
    return {of_it[0], *imports(of_it[0]), *imports(of_it[1])} - BELOW


def imports(module: str) -> set[str]:
    """The modules of the package that one of them imports."""
    ours = {name for name in imported(PACKAGE / f"{module}.py") if name.startswith("optimizer.")}
    return {name.removeprefix("optimizer.").replace(".", "/") for name in ours}


@cache
def imported(path: Path) -> frozenset[str]:
    """The dotted names that a file imports, modules and what is taken from them."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module="tests.internals"):  # from where that has it
                ends = tuple(f".{each.name}" for each in node.names)
                taken = [each for each in imported(TESTS / "internals.py") if each.endswith(ends)]
                names |= {*taken, *(each.rpartition(".")[0] for each in taken)}
            case ast.ImportFrom(module=str(module)):
                names |= {module, *(f"{module}.{each.name}" for each in node.names)}
            case ast.Import():
                names |= {each.name for each in node.names}
    return frozenset(names)


def tests_of(mutant: Mutant) -> list[str]:
    """The unit tests that import the file, or what imports it, themselves or by a helper.

    A test that is named after a file of passes imports it; one of that name is about any other.
    The top of the package counts for nothing, as it is everybody's.
    """
    files = [each for each in PACKAGE.rglob("*.py") if each.parent != PACKAGE]
    near = {mutant.module, *(_dotted(file) for file in files if mutant.module in imported(file))}
    tests = sorted(TESTS.rglob("test_*.py"))
    namesake = f"test_{Path(mutant.file).stem}"
    return [str(test) for test in tests if test.stem == namesake or near & _used_by(test)]


@cache
def _used_by(test: Path) -> frozenset[str]:
    """What a test and its helpers import; nothing where it is about the fuzz, not the package."""
    own = imported(test)
    if any(name.startswith("tests.quality") for name in own):
        return frozenset()
    helpers = [TESTS / f"{name.removeprefix('tests.').replace('.', '/')}.py" for name in own]
    its_pass = f"optimizer.passes.{test.stem.removeprefix('test_')}"
    return own.union({its_pass}, *(imported(each) for each in helpers if each.is_file()))


def _dotted(file: Path) -> str:
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


@contextmanager
def planted(mutant: Mutant, module: str) -> Iterator[ModuleType]:
    """A fresh copy of the package, with the mistake in it and torch shared; yields its `module`."""
    kept, finder = _forget_the_package(), _Finder(mutant)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)
        _forget_the_package()
        sys.modules.update(kept)


def _forget_the_package() -> dict[str, ModuleType]:
    """Take it out of what is imported, with what measures it; return both."""
    ours = (PACKAGE.name, __package__)
    names = [n for n in sys.modules if any(n == each or n.startswith(f"{each}.") for each in ours)]
    return {name: sys.modules.pop(name) for name in names}


class _Finder(MetaPathFinder):
    """Finds the package anew, with a mistake in one module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = PathFinder.find_spec(fullname, path or [str(PACKAGE.parent)])
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self.mutant)
        return spec


class _Loader(SourceFileLoader):
    """Names its code otherwise, so that what it does is no coverage of the package."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text(encoding="utf-8")
        mistaken = fullname == self.mutant.module
        return compile(self.mutant.source() if mistaken else text, f"{self.path}.planted", "exec")
