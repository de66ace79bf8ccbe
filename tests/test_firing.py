"""The count of what a pass does in its own fuzz."""

from __future__ import annotations

import pytest

from optimizer.testing import MOTIFS
from tests.quality import firing as _firing
from tests.quality.__main__ import main


def test_a_pass_fires_in_a_fifth_of_its_own_fuzz() -> None:
    seen = _firing.firing("fuse_linear_relu", 60)

    assert seen.examples >= 60
    assert 0.2 * seen.examples <= seen.fired < seen.examples
    assert seen.refused["the layer's output is read elsewhere"] > 0


def test_a_reason_that_no_model_met_is_named() -> None:
    seen = _firing.Firing("fuse_linear_relu")

    assert "the layer's output is read elsewhere" in seen.never()
    assert set(seen.never()) == _firing.reasons("fuse_linear_relu")


def test_the_table_has_a_row_for_each_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_firing, "firing", lambda name, examples: _firing.Firing(name, 4, 1))

    assert main(["firing"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {name}", "25%"] for name in MOTIFS]
