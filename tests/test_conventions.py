"""What keeps the package compact and its imports one-way, read off the source."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import optimizer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "optimizer"
PASSES = sorted(path for path in PACKAGE.glob("passes/*.py") if path.stem != "__init__")
SHIPPED = [path for name in ("optimizer", "models") for path in sorted((ROOT / name).rglob("*.py"))]
OWN = [path for path in SHIPPED if PACKAGE in path.parents and "testing" not in path.parts]

# A room may import those before it; what stands at the top of the package, all of them.
ROOMS = ("core", "facts", "frontend", "rewrite", "passes", "verify", "analysis", "lowering")
FOR_PASSES = {
    "core.errors",
    *("core.guards", "core.node", "core.ops", "facts.facts"),
    *("rewrite.affine", "rewrite.contract", "rewrite.edit"),
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """The modules that some statements import, as dotted names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in ("optimizer", "models"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def everywhere(path: Path) -> set[str]:
    """What a file imports, in functions too."""
    return set(imported(ast.walk(tree(path))))


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in everywhere(path)}


def module(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def own_imports(path: Path) -> set[str]:
    """The files of the package that one imports, in functions too."""
    known = {module(each) for each in OWN}
    found = set[str]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= names or {node.module} & known
    return found - {module(path)}


def room(name: str) -> int:
    """The place of a module's room; beyond all rooms for what stands at the top."""
    within = name.split(".")[1:2]
    return ROOMS.index(within[0]) if within and within[0] in ROOMS else len(ROOMS)


def test_the_package_does_not_grow() -> None:
    """Its lines, without the testing kit. Lower the number with each change that allows it."""
    assert sum(len(path.read_text().splitlines()) for path in OWN) <= 10930


def test_no_file_is_a_drawer_for_everything() -> None:
    stems = {path.stem.strip("_") for path in SHIPPED}

    assert stems.isdisjoint({"utils", "util", "helpers", "common", "misc"})


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_every_file_says_what_it_is(path: Path) -> None:
    text = path.read_text()

    assert not text or ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_what_the_coverage_leaves_out_says_why(path: Path) -> None:
    left_out = [line for line in path.read_text().splitlines() if "pragma: no" in line]

    assert all(re.search(r"# pragma: no (cover|branch) - \w+ \w+", line) for line in left_out)


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_each_pass_of_a_file_is_found(path: Path) -> None:
    assert declared(path)
    assert {each.name for each in optimizer.all_passes()}.issuperset(declared(path))


def declared(path: Path) -> list[str]:
    """The passes that a file declares."""
    functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        for call in node.decorator_list
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("rewrite", "whole_graph")
    ]


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_a_pass_imports_only_what_passes_are_made_of(path: Path) -> None:
    ours = {name for name in everywhere(path) if name.startswith("optimizer")}

    assert ours <= {f"optimizer.{name}" for name in FOR_PASSES}
    assert packages(path) - {"optimizer", "torch"} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", OWN, ids=named)
def test_nothing_imports_a_pass(path: Path) -> None:
    assert {f"optimizer.passes.{each.stem}" for each in PASSES}.isdisjoint(own_imports(path))


@pytest.mark.parametrize("path", OWN, ids=named)
def test_a_room_imports_those_before_it(path: Path) -> None:
    later = [name for name in own_imports(path) if room(name) > room(module(path))]

    assert later == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {module(path): own_imports(path) for path in OWN}

    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_floors_are_few() -> None:
    """How many files the longest chain of imports runs through."""
    sorter = graphlib.TopologicalSorter({module(path): own_imports(path) for path in OWN})
    sorter.prepare()
    floors = 0
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        floors += 1

    assert floors <= 15


def test_the_folders_show_the_architecture() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name[:2] != "__"} - {"py.typed"}

    assert {"testing", *ROOMS} < entries
    assert entries.isdisjoint(optimizer.__all__), "a public name hides a room"
    assert len(entries) <= 13
    assert not any(path.stem[0] == "_" and path.stem != "__init__"
                   for path in OWN if path.parent != PACKAGE)  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    """The workloads have no name of their own: installed, another package may be `models`."""
    allowed = {"optimizer", "torch", "__future__"}
    if path.is_relative_to(PACKAGE / "testing"):
        allowed |= {"hypothesis"}
    if path == PACKAGE / "lowering" / "precision.py":
        allowed |= {"torchao"}  # where it is asked for
    if path == PACKAGE / "__main__.py":
        allowed |= {"rich"}  # on a terminal
    if path == PACKAGE / "lowering" / "engines.py":
        allowed |= {"onnxruntime", "openvino"}
    if path == PACKAGE / "workloads.py":
        allowed |= {"models"}  # for mypy, which does not run it
    if path.is_relative_to(ROOT / "models"):
        allowed = {"", "timm", "torch", "torchvision", "transformers", "__future__"}

    assert packages(path) - allowed <= sys.stdlib_module_names


def test_every_package_is_installed() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")}

    assert set(installed["packages"]) == {
        "optimizer._models",
        *(".".join(folder.parts) for folder in folders),
    }


def test_the_fuzz_kit_is_imported_by_nobody() -> None:
    importers = [
        named(path)
        for path in SHIPPED
        if not path.is_relative_to(PACKAGE / "testing")
        and any(name.startswith("optimizer.testing") for name in everywhere(path))
    ]

    assert importers == []


def test_no_room_imports_the_analysis() -> None:
    importers = [
        named(path)
        for path in OWN
        if room(module(path)) < len(ROOMS) and path.parent.name != "analysis"
        if any("analysis" in name for name in everywhere(path))
    ]

    assert importers == []


def test_importing_the_package_and_the_models_needs_torch_only() -> None:
    other = {"torchvision", "hypothesis", "asv", "optimizer.workloads", "numpy.testing"}
    asked = "import sys, optimizer, models; optimizer.all_passes(); models.names()"
    program = f"{asked}; print(*{other} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == []


def reasons(path: Path) -> list[str]:
    """The reasons with which a pass refuses."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    texts = [
        call.args[-1]
        for call in calls
        if getattr(call.func, "id", "") in ("require", "Refused") and call.args
    ]
    assert all(isinstance(text, ast.Constant) for text in texts), "a reason is written out"
    return [str(text.value) for text in texts if isinstance(text, ast.Constant)]


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_every_reason_to_refuse_has_a_row_in_the_test_of_its_file(path: Path) -> None:
    nodes = ast.walk(tree(ROOT / "tests" / "passes" / f"test_{path.stem}.py"))
    written = {node.value for node in nodes if isinstance(node, ast.Constant)}

    assert [reason for reason in reasons(path) if reason not in written] == []


def test_every_file_of_passes_has_a_test_of_its_name() -> None:
    tested = {path.stem for path in (ROOT / "tests" / "passes").glob("test_*.py")}

    assert tested == {f"test_{path.stem}" for path in PASSES}


def run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """What of a file runs as it is imported: all but the bodies of its functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from run_at_once(child)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=named)
def test_a_package_that_is_missing_costs_only_the_tests_that_are_about_it(path: Path) -> None:
    """A file that cannot be imported keeps pytest from running any other."""
    needed = {"torch", "pytest", "hypothesis", "optimizer", "models", "tests", "benchmarks"}
    needed |= {"numpy"}  # which torchvision, timm and onnx all bring
    if path.stem == "test_benchmarks":
        needed |= {"asv", "asv_runner"}  # which list its tests
    if path.parent.name == "browser":
        needed |= {"asv", "playwright"}  # in an environment of its own
    nodes = list(run_at_once(tree(path)))
    found = {name.partition(".")[0] for name in imported(nodes)}
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }

    assert found - needed <= sys.stdlib_module_names
    assert "import_torchvision" not in called


@pytest.mark.parametrize("name", optimizer.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    public = getattr(optimizer, name)

    assert (public.__doc__ or "").strip()
    assert not public.__doc__.startswith(f"{name}("), "dataclasses write a docstring of their own"


def test_the_public_names_are_sorted_and_complete() -> None:
    bound = {
        alias.asname or alias.name
        for node in tree(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert list(optimizer.__all__) == sorted(optimizer.__all__)
    assert set(optimizer.__all__) == bound


CODE = re.compile(r"^_?[A-Za-z][\w./]*[_./][\w./]*(?=$|\()")
SOURCES = ("optimizer", "models", "benchmarks", "tests", ".ci", "docs/own_pass", "docs/own_subject")


def words_of_the_code() -> set[str]:
    """The names of all files, and all words in them, but for the pages themselves."""
    files = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in (".ini", ".json", ".toml")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".txt", ".toml", ".ini")]
    return set(re.findall(r"\w+", " ".join([*texts, *map(named, files)])))


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_every_name_in_a_page_is_one_of_the_code(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    quoted = re.findall(r"`([^`\n]+)`", text)
    found = [match[0] for match in map(CODE.match, quoted) if match]
    names = [name for name in found if not name.startswith("logging.")]  # of Python's library
    known = words_of_the_code()

    assert [name for name in names if not known.issuperset(re.findall(r"\w+", name))] == []
