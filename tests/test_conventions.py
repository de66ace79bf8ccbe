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
    assert sum(len(path.read_text().splitlines()) for path in OWN) <= 10795


def test_no_file_is_a_drawer_for_everything() -> None:
    stems = {path.stem.strip("_") for path in SHIPPED}
    assert stems.isdisjoint({"utils", "util", "helpers", "common", "misc"})


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_every_file_says_what_it_is_and_why_coverage_leaves_a_line_out(path: Path) -> None:
    text = path.read_text()
    left_out = [line for line in text.splitlines() if "pragma: no" in line]
    assert not text or ast.get_docstring(tree(path))
    assert all(re.search(r"# pragma: no (cover|branch) - \w+ \w+", line) for line in left_out)


DECLARED = re.compile(r"^@(?:rewrite|whole_graph)\(.*?^def (\w+)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_each_pass_of_a_file_is_found(path: Path) -> None:
    declared = set(DECLARED.findall(path.read_text()))
    assert declared
    assert declared <= {each.name for each in optimizer.all_passes()}


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_a_pass_imports_only_what_passes_are_made_of(path: Path) -> None:
    ours = {name for name in everywhere(path) if name.startswith("optimizer")}
    assert ours <= {f"optimizer.{name}" for name in FOR_PASSES}
    assert packages(path) - {"optimizer", "torch"} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", OWN, ids=named)
def test_a_room_imports_those_before_it_and_nothing_a_pass(path: Path) -> None:
    later = [name for name in own_imports(path) if room(name) > room(module(path))]
    assert later == []
    assert {f"optimizer.passes.{each.stem}" for each in PASSES}.isdisjoint(own_imports(path))


def test_no_file_imports_itself_by_way_of_others_and_the_floors_are_few() -> None:
    """As many floors as files that the longest chain of imports runs through."""
    sorter = graphlib.TopologicalSorter({module(path): own_imports(path) for path in OWN})
    sorter.prepare()  # raises CycleError
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


ALSO = {
    "testing": {"hypothesis"},
    "lowering/precision.py": {"torchao"},  # where it is asked for
    "lowering/engines.py": {"onnxruntime", "openvino"},
    "workloads.py": {"models"},  # for mypy, which does not run it
}


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    """The workloads have no name of their own: installed, another package may be `models`."""
    allowed = {"optimizer", "torch", "__future__"}
    if path.is_relative_to(ROOT / "models"):
        allowed = {"", "timm", "torch", "torchvision", "transformers", "__future__"}
    for place, more in ALSO.items():
        if path.is_relative_to(PACKAGE / place):
            allowed |= more
    assert packages(path) - allowed <= sys.stdlib_module_names


def test_every_package_is_installed() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {module(path) for path in PACKAGE.rglob("__init__.py")}
    assert set(installed["packages"]) == {"optimizer._models", *found}


def test_nothing_imports_the_fuzz_kit_and_no_room_the_analysis() -> None:
    def imports(path: Path, name: str) -> bool:
        return any(name in each for each in everywhere(path))

    others = [path for path in SHIPPED if not path.is_relative_to(PACKAGE / "testing")]
    rooms = [path for path in OWN if room(module(path)) < len(ROOMS)]
    assert [named(path) for path in others if imports(path, "optimizer.testing")] == []
    rooms = [path for path in rooms if path.parent.name != "analysis"]
    assert [named(path) for path in rooms if imports(path, "analysis")] == []


def test_tests_take_what_is_private_from_one_file() -> None:
    """So that a module that moves is renamed there alone; `tests.quality` is about the inside."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "quality"]
    ours = {path: [n for n in everywhere(path) if n.startswith("optimizer.")] for path in tests}
    named = {n for names in ours.values() for n in names} - {"optimizer.analysis"}
    private = {name for name in named if "._" in name or room(name) < len(ROOMS)}
    assert {p.name for p, names in ours.items() if private & {*names}} == {"internals.py"}


def test_importing_the_package_and_the_models_needs_torch_only() -> None:
    other = {"torchvision", "hypothesis", "asv", "optimizer.workloads", "numpy.testing"}
    asked = "import sys, optimizer, models; optimizer.all_passes(); models.names()"
    program = f"{asked}; print(*{other} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == []


def reasons(path: Path) -> list[str]:
    """The reasons with which a pass refuses, which are written out."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and node.args]
    refusals = [call for call in calls if getattr(call.func, "id", "") in ("require", "Refused")]
    return [str(ast.literal_eval(call.args[-1])) for call in refusals]


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
    documented = (getattr(optimizer, name).__doc__ or "").strip()
    assert documented
    assert not documented.startswith(f"{name}("), "dataclasses write a docstring of their own"


def test_the_public_names_are_sorted_and_complete() -> None:
    nodes = [
        each for each in tree(PACKAGE / "__init__.py").body if isinstance(each, ast.ImportFrom)
    ]
    bound = {alias.asname or alias.name for node in nodes for alias in node.names}

    assert list(optimizer.__all__) == sorted(bound)


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
