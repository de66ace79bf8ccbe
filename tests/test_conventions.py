"""What keeps the package compact and its imports one-way, read off the source."""

from __future__ import annotations

import ast
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
CORE = sorted(PACKAGE.glob("*.py"))
PASSES = sorted(path for path in PACKAGE.glob("passes/*.py") if path.stem != "__init__")
SHIPPED = [path for name in ("optimizer", "models") for path in sorted((ROOT / name).rglob("*.py"))]

# A later one may import an earlier one; never the other way round.
CHAIN = ("_graph", "_facts", "_match", "_pass", "_pipeline", "_optimize", "__init__", "__main__")
FOR_PASSES = {
    *(
        "_affine",
        "_channels",
        "_computation",
        "_edit",
        "_facts",
        "_graph",
        "_guards",
        "_inplace",
        "_match",
    ),
    *("_pass", "_spare", "_expression"),
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


def at_once(path: Path) -> set[str]:
    """What a file imports when it is imported."""
    return set(imported(tree(path).body))


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in everywhere(path)}


def reached(name: str) -> set[str]:
    """The core files that importing one of them imports, directly or not."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for module in at_once(PACKAGE / f"{pending.pop()}.py"):
            stem = module.removeprefix("optimizer.")
            if (PACKAGE / f"{stem}.py").exists() and stem not in found:
                found.add(stem)
                pending.append(stem)
    return found


def test_the_package_does_not_grow() -> None:
    """Its lines, without the testing kit. Lower the number with each change that allows it."""
    own = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]

    assert sum(len(path.read_text().splitlines()) for path in own) <= 14253


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_a_pass_file_has_at_most_120_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 120


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
def test_a_pass_file_holds_one_pass_named_as_the_file(path: Path) -> None:
    functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
    decorated = [
        node.name
        for node in functions
        for call in node.decorator_list
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("rewrite", "whole_graph")
    ]

    assert decorated == [path.stem]
    assert "example" in {node.name for node in functions}
    assert path.stem in {each.name for each in optimizer.all_passes()}


@pytest.mark.parametrize("path", PASSES, ids=named)
def test_a_pass_imports_only_what_passes_are_made_of(path: Path) -> None:
    ours = {name for name in everywhere(path) if name.startswith("optimizer")}

    assert ours <= {f"optimizer.{name}" for name in FOR_PASSES}
    assert packages(path) - {"optimizer", "torch"} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", CORE, ids=named)
def test_nothing_imports_a_pass_but_the_registry(path: Path) -> None:
    passes = {name for name in everywhere(path) if name.startswith("optimizer.passes")}

    assert not passes or path.stem == "_registry"


@pytest.mark.parametrize("path", CORE, ids=named)
def test_imports_run_one_way(path: Path) -> None:
    later = CHAIN[CHAIN.index(path.stem) + 1 :] if path.stem in CHAIN else CHAIN[-2:]

    assert path.stem not in reached(path.stem)
    assert reached(path.stem).isdisjoint(later)


def test_the_capture_knows_nothing_of_the_passes() -> None:
    assert reached("_capture").isdisjoint({"_pass", "_match", "_registry", "_pipeline"})


@pytest.mark.parametrize("path", SHIPPED, ids=named)
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    """The workloads have no name of their own: installed, another package may be `models`."""
    allowed = {"optimizer", "torch", "__future__"}
    if path.is_relative_to(PACKAGE / "testing"):
        allowed |= {"hypothesis"}
    if path == PACKAGE / "lowering" / "_int8.py":
        allowed |= {"torchao"}  # where it is asked for
    if path == PACKAGE / "testing" / "_compilers.py":
        allowed |= {"onnxruntime"}  # likewise
    if path.parent == PACKAGE / "lowering" / "engines":
        allowed |= {path.stem.strip("_")} & {"onnxruntime", "openvino"}  # each its own
    if path == PACKAGE / "workloads.py":
        allowed |= {"models"}  # for mypy, which does not run it
    if path.is_relative_to(ROOT / "models"):
        allowed = {"", "torch", "torchvision", "__future__"}

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


def test_the_analysis_is_imported_by_the_command_line_only() -> None:
    importers = [path for path in CORE if any("analysis" in name for name in everywhere(path))]

    assert [named(path) for path in importers] == ["optimizer/__main__.py"]


def test_importing_the_package_needs_torch_only() -> None:
    other = {"torchvision", "hypothesis", "asv", "optimizer.workloads", "numpy.testing"}
    program = f"import sys, optimizer; optimizer.all_passes(); print(*{other} & set(sys.modules))"

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
def test_every_reason_to_refuse_has_a_row_in_the_test_of_its_pass(path: Path) -> None:
    test = tree(ROOT / "tests" / "passes" / f"test_{path.stem}.py")
    written = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}

    assert [reason for reason in reasons(path) if reason not in written] == []


def test_every_test_of_a_pass_is_of_a_pass_that_exists() -> None:
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
