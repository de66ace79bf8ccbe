"""The report: where new nodes come from, and a page that needs nothing but itself."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import workloads
from optimizer.__main__ import main
from optimizer.analysis import measured
from optimizer.core.report import Choice, Refusal, Rewrite, Size

X = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


class Net(nn.Module):
    """A fold whose result is fused, a name that HTML must escape, and a refused fold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.second = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.first(x))
        return {"<&>": self.norm(y) + y}


@pytest.fixture(scope="module")
def report() -> optimizer.Report:
    passes = ["fold_affine", "fuse_linear_relu"]
    return optimizer.optimize(Net().eval(), X, only=passes, level=1).report


def test_every_candidate_of_a_region_is_accounted_for() -> None:
    """Those that are slower by their time, from the least to the most, the others by why not."""
    seconds = {"as it is": 2.0, "one": 1.0, "two": 2.5}
    choices = (
        Choice("2 x conv2d", "a", "one", seconds, {"three": "RuntimeError: no such kernel"}),
        Choice("2 x conv2d", "b", "one", {**seconds, "two": 30.0}, {}, {"one": 1.5}, held=4000),
        Choice("1 x linear", "c", "as it is", {"as it is": 1.0, "one": 1.1}),
    )
    report = optimizer.Report("Net", 2, choices=choices)
    told = str(report).partition("regions: 3, each a part of the model that ")[2]

    assert [line.split("  ") for line in re.sub("   +", "  ", told).split("\n")] == [
        ["one program may run, prepared in 1.50 s, 4,000 bytes of weights held a second time"],
        ["", "2", "run by one", "2 x conv2d", "50% of its time as it is"],
        ["", "1", "run as it is", "1 x linear"],
        ["", "1", "tried one", "1 x linear", "110% of its time as it is"],
        ["", "1", "tried three", "2 x conv2d", "rejected: RuntimeError: no such kernel"],
        ["", "2", "tried two", "2 x conv2d", "125% to 1500% of its time as it is"],
    ]
    rows = Page(report.to_html()).rows
    assert ["1 x linear", "as it is", "one: 110% of its time as it is"] in rows


class Page(HTMLParser):
    """The rows of all tables, and whatever a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.folds: list[str] = []
        self.classes: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        values = dict(attributes)
        self.fetched += [values[name] for name in ("src", "href") if name in values]
        self.classes.append(values.get("class", ""))
        if tag == "summary":
            self.folds.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "summary":
            self.folds[-1] += data


def test_a_new_node_says_which_pass_made_it_of_what(report: optimizer.Report) -> None:
    made = {line.made_by: line for line in report.graph_after if line.made_by}

    assert set(made) == {"fuse_linear_relu"}  # of what fold_affine had made
    line = made["fuse_linear_relu"]
    assert line.text == "LinearReLU(x)"
    assert set(line.made_from) == {"first_0", "first_1", "first_2"}
    assert set(line.made_from) <= {before.name for before in report.graph_before}


def test_the_listings_are_the_graphs(report: optimizer.Report) -> None:
    model = Net().eval()
    captured, fast = optimizer.capture(model, X), optimizer.optimize(model, X, level=1)

    assert [n.name for n in captured.graph.nodes] == [n.name for n in report.graph_before]
    assert [n.name for n in fast.graph.nodes] == [n.name for n in fast.report.graph_after]
    assert [n.shape for n in report.graph_before][:2] == ["4x6", "4x6"]


def test_the_page_tells_all_and_fetches_nothing(report: optimizer.Report) -> None:
    page = Page(report.to_html())

    assert page.fetched == []
    assert page.open == []
    assert {"gone", "new"} <= set(page.classes)
    for rewrite in report.fired:
        assert [rewrite.node, rewrite.source] in page.rows
        assert f"{rewrite.name}: {report.counts()[rewrite.name]}" in page.folds
    for refusal in report.refused:
        assert [refusal.node, refusal.source] in page.rows
        assert f"{refusal.name}: {refusal.reason}: 1" in page.folds
    assert {f"rewritten: {len(report.fired)}", "nodes of the graph: 7"} < set(page.folds)
    cells = [cell for row in page.rows for cell in row]
    assert "fuse_linear_relu of first_0, first_1, first_2" in cells
    assert ["nodes", "8", "7"] in page.rows


def test_nodes_that_stayed_are_on_one_row(report: optimizer.Report) -> None:
    rows = [row for row in Page(report.to_html()).rows if len(row) == 5]

    marks = {row[1].partition(" ")[0]: row[0] for row in rows}
    assert len(marks) == len(rows)
    assert marks["second"] == ""
    assert marks["first_1"] == "-"
    assert "+" in marks.values()


def test_what_is_left_as_it_is_has_a_page_as_well() -> None:
    fast = optimizer.optimize(nn.Sequential(nn.ReLU()).eval(), X, only=[], level=1)
    unchanged = optimizer.optimize(Branching().eval(), X, level=1)

    assert "output = output _0" in fast.report.to_html()
    assert "left as it is" in unchanged.report.to_html()


class Branching(nn.Module):
    """What cannot be recorded, with a name in its reason."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_the_page_escapes_what_a_model_is_called() -> None:
    kind = type("<script>", (Net,), {})

    assert "<script>" not in optimizer.optimize(kind().eval(), X, level=1).report.to_html()


def test_the_same_report_gives_the_same_page(report: optimizer.Report) -> None:
    assert copy.deepcopy(report).to_html() == report.to_html()
    assert json.loads(json.dumps(report.to_dict()))["graph_after"][0]["name"] == "x"


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"

    assert main(["optimize", "toy_model", "--html", str(file)]) == 0

    assert capsys.readouterr().out.startswith("ToyModel, level 2")
    assert "fold_affine" in file.read_text(encoding="utf-8")


def test_refusals_of_one_reason_are_one_line() -> None:
    refused = tuple(Refusal("reuse", f"add_{n}", f"net.py:{n}", "it is read") for n in range(12))
    report = optimizer.Report("Net", 1, refused=refused)

    assert "refused: 12\n  12  reuse  it is read" in str(report)
    assert report.refused == refused


@pytest.mark.parametrize("kinds", [3, 30])
def test_a_report_is_at_most_20_lines(kinds: int) -> None:
    """Every section is seen, and what is not told is counted."""
    reasons = [f"reason {n}\nof two" for n in range(kinds)]
    refused = tuple(Refusal("reuse", "add", "net.py:1", reason) for reason in reasons)
    fired = tuple(Rewrite(f"pass_{n}", "add", "net.py:1") for n in range(kinds))
    choices = tuple(Choice(f"{n} x linear", "a", "as it is") for n in range(kinds))
    remarks = tuple(f"remark {n}" for n in range(kinds))
    report = optimizer.Report(
        "Net", 2, fired, refused, remarks, before=Size(3), after=Size(2), choices=choices
    )
    lines = str(report).split("\n")

    assert lines[0] == "Net, level 2, 0.00 s, answer not checked: 3 -> 2 nodes"
    for title in ("rewritten: ", "refused: ", "regions: ", "remark: "):
        assert any(line.startswith(title) for line in lines)
    every = 2 + 3 + 4 * kinds
    assert len(lines) == min(20, every)
    if kinds > 3:
        assert lines[-1] == f"... and {every - 19} more; report.to_html() lists all"
    page = report.to_html()
    assert all(each.reason in page for each in refused)


@pytest.mark.parametrize("name", ["toy_model", "masked_postprocess_4096"])
def test_figures_are_in_every_form_of_the_report(name: str) -> None:
    workload = workloads.load(name)
    fast = optimizer.optimize(workload.module, workload.example_inputs, level=1)
    assert fast.report.figures == {}

    report = measured(workload.module, fast, workload.example_inputs)

    assert report.fired == fast.report.fired
    old, new = report.figures["kernels"]
    assert f"kernels {old} -> {new}, FLOPs " in str(report)
    assert report.compared in str(report)
    page = Page(report.to_html())
    assert ["kernels", str(old), str(new)] in page.rows
    assert {"FLOPs", "bytes moved", "milliseconds", "peak memory"} < {row[0] for row in page.rows}


def test_what_is_quick_is_timed_in_as_many_rounds_as_a_second_has() -> None:
    model, inputs = nn.ReLU().eval(), torch.ones(2)
    report = measured(model, optimizer.optimize(model, inputs, level=0), inputs)

    assert ", 50 rounds" in report.compared


class Hidden(nn.Module):
    """NaN everywhere, and beside it what can be compared."""

    def forward(self, x: Tensor) -> Any:
        return (x * float("nan"), x + 1) if self.both else x * float("nan")

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.both = both


@pytest.mark.parametrize("level", [1, 2])
def test_an_answer_that_is_nan_everywhere_was_not_checked(level: int) -> None:
    one = optimizer.optimize(Hidden(both=False).eval(), X, level=level).report
    both = optimizer.optimize(Hidden(both=True).eval(), X, level=level).report

    assert "answer not checked" in one.summary()
    assert any(each.startswith("not checked: output is NaN everywhere") for each in one.remarks)
    assert "answer checked" in both.summary()
    assert any(each.startswith("not checked: output[0] is NaN ever") for each in both.remarks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_a_number_beside_nan_is_checked(dtype: torch.dtype) -> None:
    x = torch.full((2, 3), float("nan"), dtype=dtype)
    y = x.clone()
    y[0, 0] = 1
    model = nn.Sequential(nn.Identity()).eval()
    reports = [optimizer.optimize(model, each, level=1).report for each in (x, y, x[:0])]

    assert [each.checked for each in reports] == ["", "final", "final"]


def test_a_model_that_is_left_as_it_is_was_not_checked() -> None:
    report = optimizer.optimize(Branching().eval(), X, level=1).report

    assert "nothing to check: the model is unchanged" in report.summary()
    assert "answer checked" not in str(report)
    assert report.checked == ""


def test_check_warns_of_an_answer_that_is_nan_everywhere() -> None:
    model = Hidden(both=False).eval()

    with pytest.warns(optimizer.OptimizerWarning, match="output is NaN everywhere"):
        optimizer.check(model, optimizer.optimize(model, X, level=1), X)
