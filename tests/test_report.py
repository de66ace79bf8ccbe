"""The report: where new nodes come from, and a page that needs nothing but itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from html import unescape
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import workloads
from optimizer.analysis import measured
from tests.internals import Choice, Refusal, Rewrite, Size
from tests.single_pass import Forward, rows

X = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)
NAN = 'x * float("nan")'


def net() -> nn.Module:
    """A fold whose result is fused, a name that HTML must escape, and a refused fold."""
    first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    rest = {"second": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)}
    forward = lambda m, x: (y := m.second(m.first(x)), {"<&>": m.norm(y) + y})[1]  # noqa: E731
    return Forward(forward, first=first, **rest).eval()


def optimized(model: nn.Module | str, x: Tensor = X, level: int = 1, **options: Any) -> Any:
    model = Forward(model) if isinstance(model, str) else model
    return optimizer.optimize(model.eval(), x, level=level, **options)


def text_of(cell: str) -> str:
    return unescape(re.sub("<.*?>", "", cell))


def rows_of(page: str) -> list[list[str]]:
    """The cells of every row of every table."""
    found = re.findall(r"(?s)<tr.*?</tr>", page)
    return [[text_of(each) for each in re.findall(r"(?s)<t[dh].*?</t[dh]>", row)] for row in found]


@pytest.fixture(scope="module")
def report() -> optimizer.Report:
    return optimized(net(), only=["fold_affine", "fuse_linear_relu"]).report


def test_every_candidate_of_a_region_is_accounted_for() -> None:
    """Those that are slower by their time, the others by why not."""
    seconds = {"as it is": 2.0, "one": 1.0, "two": 2.5}
    choices = (
        Choice("2 x conv2d", "a", "one", seconds, {"three": "RuntimeError: no such kernel"}),
        Choice("2 x conv2d", "b", "one", {**seconds, "two": 30.0}, {}, {"one": 1.5}, held=4000),
    )
    report = optimizer.Report("Net", 2, choices=choices)
    told = re.sub("   +", "  ", str(report).partition("regions: 2, ")[2])

    assert "prepared in 1.50 s, 4,000 bytes of weights held a second time" in told
    assert "  2  run by one  2 x conv2d  50% of its time as it is" in told
    assert "  1  tried three  2 x conv2d  rejected: RuntimeError: no such kernel" in told
    assert "  2  tried two  2 x conv2d  125% to 1500% of its time as it is" in told
    assert any("rejected" in cell for row in rows_of(report.to_html()) for cell in row)


def test_a_new_node_says_which_pass_made_it_of_what(report: optimizer.Report) -> None:
    graphs = (report.graph_before, report.graph_after)
    before, after = ([line.name for line in each] for each in graphs)
    [line] = [each for each in report.graph_after if each.made_by]

    assert (line.made_by, line.text) == ("fuse_linear_relu", "LinearReLU(x)")
    assert "test_report.py" in line.source
    assert set(line.made_from) == {"first_0", "first_1", "first_2"}
    assert before == [node.name for node in optimizer.capture(net(), X).graph.nodes]
    assert after == [node.name for node in optimized(net()).graph.nodes]
    assert report.graph_before[0].shape == "4x6"
    assert json.loads(json.dumps(report.to_dict()))["graph_after"][0]["name"] == "x"


def test_the_page_tells_all_and_fetches_nothing(report: optimizer.Report) -> None:
    page = report.to_html()
    table = rows_of(page)
    folds = {text_of(each) for each in re.findall("<summary>(.*?)</summary>", page)}
    marks = {row[1].partition(" ")[0]: row[0] for row in table if len(row) == 5}

    assert not re.search("(src|href|url) *[=(]", page)
    for rewrite in (*report.fired, *report.refused):
        assert [rewrite.node, rewrite.source] in table
    told = {f"{name}: {count}" for name, count in report.counts().items()}
    told |= {f"{each.name}: {each.reason}: 1" for each in report.refused}
    assert told | {f"rewritten: {len(report.fired)}", "nodes of the graph: 7"} < folds
    assert any("fuse_linear_relu of first_0, first_1, first_2" in row for row in table)
    assert ["nodes", "8", "7"] in table
    assert (marks["second"], marks["first_1"]) == ("", "-")
    assert "+" in marks.values()
    assert copy.deepcopy(report).to_html() == page


def test_the_page_escapes_what_a_model_and_its_nodes_are_called() -> None:
    report = optimized(type("<script>", (Forward,), {})("x + 1")).report
    refused = (Refusal("reuse", "<script>", "net.py:1", "it is read"),)

    assert "<script>" not in dataclasses.replace(report, refused=refused).to_html()


def test_a_report_is_at_most_20_lines() -> None:
    """Every section is seen, and what is not told is counted."""
    reasons = [f"reason {n}\nof two" for n in range(30)]
    refused = tuple(Refusal("reuse", "add", f"net.py:{n}", reasons[n]) for n in range(30)) * 2
    fired = tuple(Rewrite(f"pass_{n}", "add", "net.py:1") for n in range(30))
    report = optimizer.Report("Net", 2, fired, refused, ("of 30",), before=Size(3), after=Size(2))
    lines = str(report).split("\n")

    assert lines[0] == "Net, level 2, 0.00 s, answer not checked: 3 -> 2 nodes"
    assert {"rewritten", "refused", "remark"} <= {line.partition(":")[0] for line in lines}
    assert len(lines) == 20
    assert re.fullmatch(r"\.\.\. and \d+ more; report.to_html\(\) lists all", lines[-1])
    assert all(reason in report.to_html() for reason in reasons)


def test_figures_are_in_every_form_of_the_report() -> None:
    workload = workloads.load("masked_postprocess_4096")
    fast = optimizer.optimize(workload.module, workload.example_inputs, level=1)
    report = measured(workload.module, fast, workload.example_inputs)

    assert (fast.report.figures, report.fired) == ({}, fast.report.fired)
    old, new = report.figures["kernels"]
    assert f"kernels {old} -> {new}, FLOPs " in str(report)
    assert report.compared in str(report)
    table = rows_of(report.to_html())
    assert ["kernels", str(old), str(new)] in table
    assert {"FLOPs", "bytes moved", "milliseconds", "peak memory"} < {row[0] for row in table}


NUMBER, NO_NUMBER = torch.tensor([1.0, math.nan]), torch.tensor([math.nan])
NOT, CHECKED = "answer not checked", "answer checked"
SAME = "nothing to check: the model is unchanged"
CHECKS = {
    "NaN everywhere": (NAN, X, NOT, "output"),
    "NaN beside what is checked": (f"({NAN}, x + 1)", X, CHECKED, "output[0]"),
    "complex": ("x", NO_NUMBER.to(torch.complex64), NOT, "output"),
    "a number beside NaN": ("x", NUMBER, CHECKED, ""),
    "nothing": ("x", X[:0], CHECKED, ""),
    "what is left as it is": ("x + 1 if x.sum() > 0 else x - 1", X, SAME, ""),
}


@rows("forward x told where", CHECKS)
def test_an_answer_that_is_nan_everywhere_was_not_checked(forward, x, told, where):
    for level in (1, 2):
        report = optimized(forward, x, level=level).report
        assert told in report.summary()
        remark = f"not checked: {where} is NaN everywhere"
        assert any(each.startswith(remark) for each in report.remarks) is bool(where)
        assert (report.checked == "") is (told != CHECKED)
