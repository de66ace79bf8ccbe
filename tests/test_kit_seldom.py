"""Parts of the fuzz kit that its own runs seldom reach."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import runpy
import signal
import subprocess
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from torch import nn

from optimizer import CaptureError
from optimizer.lowering import partition as _partition
from optimizer.lowering.engines import engines_here
from optimizer.testing import (
    Optimize,
    Spec,
    _on_disk,
    assert_equivalent,
    check_spec,
    modules,
    randomize,
    smallest,
)
from optimizer.testing import _lowering as _level_two
from optimizer.testing._observe import same_bits
from optimizer.testing._rounding import AsPrecise
from tests.quality import __main__ as command_line
from tests.quality import coverage as _coverage
from tests.quality import figures as _figures
from tests.quality import generic as _generic
from tests.quality import mutants as _mutants
from tests.quality import score as _score
from tests.quality import shrink as _shrink
from tests.quality import soak as _soak
from tests.quality.__main__ import main
from tests.single_pass import Forward, ForwardOfTwo

A_PASS = _mutants.catalogue()["fuse_linear_relu: the bias lost"]
SURVIVES = _score.Verdict(A_PASS, "models", killed=False, examples=9, seconds=1.0, evidence="")
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4).double()


@dataclasses.dataclass(frozen=True)
class Deadly(Optimize):
    """Ends the process, as a kernel may; at level 0 its answer is what cannot be called."""

    def __call__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        if self.level:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Module()


def test_a_soak_counts_what_it_tries_and_keeps_what_is_wrong() -> None:
    (tally,) = _soak.soak(Optimize(1), 3, dtype=torch.float64, first_seed=0)
    assert (tally.examples, tally.wrong, tally.lowered) == (3, [], 0)
    assert tally.seconds > 0

    tally.add(_soak.tried(Deadly(0), 3, torch.float64, 0))
    assert (tally.examples, len(tally.wrong)) == (6, 3)


def test_a_model_that_ends_the_process_ends_a_batch_of_the_soak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forked = partial(ProcessPoolExecutor, 1, multiprocessing.get_context("fork"))
    monkeypatch.setattr(_soak, "_pool", forked)
    monkeypatch.setattr(_soak, "BATCH", 2)
    first, second = _soak.soak(Deadly(1), 3, dtype=torch.float64, first_seed=5)

    assert first is second
    assert second.wrong == [f"a model of seed {seed} ended the process" for seed in (5, 6)]


def test_a_soak_at_level_2_counts_regions_and_sees_a_nan_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_partition, "is_moderate", lambda tensor: True)
    relu = Spec(("conv", "relu", "conv"), (2, 4, 4, 4), "random", 0, "contiguous", "module")
    monkeypatch.setattr(_soak, "models", lambda: st.just(relu))
    tally = _soak.tried(Optimize(2), 1, torch.float32, 0)

    assert (tally.examples, tally.lowered) == (1, 1)
    [engine] = engines_here(["openvino"])
    assert tally.regions == {engine: 1}
    assert f"(regions: 1 {engine})" in str(tally)
    (told,) = tally.wrong
    assert told.startswith("nan in input 0 is lost")


def test_a_score_tries_the_mutants_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_score, "ProcessPoolExecutor", lambda n, *_, **more: ThreadPoolExecutor(n))
    tried = lambda mutant, by, *_: dataclasses.replace(SURVIVES, mutant=mutant, by=by[0])  # noqa: E731
    monkeypatch.setattr(_score, "try_mutant", tried)
    monkeypatch.setattr(_score, "try_sound", lambda mutant, by, budget: {})

    assert main(["score", A_PASS.name, "--by", "tests"]) == 1
    assert f"| {A_PASS.name} | own | survives |" in capsys.readouterr().out
    assert main(["score", "--of", "generic", *_generic.equivalent()]) == 0
    assert _score.summary([SURVIVES]).startswith("killed 0 of 1 (0.0%);")
    assert _figures._examples({A_PASS.name: {"killed": False, "examples": 9}}) == "none killed"


def failing(error: Exception) -> Any:
    def fail(*given: Any, **options: Any) -> Any:
        raise error

    return fail


def test_what_is_no_counterexample_is_not_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shrink, "examine", failing(AssertionError("it does not fire")))

    assert _shrink.shrunk(["fuse_linear_relu"], 3) is None


def test_what_does_not_run_is_found_or_an_error_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _score.try_mutant(dataclasses.replace(A_PASS, new="there is no such name"))
    assert found.killed
    assert found.evidence.startswith("SyntaxError: ")

    monkeypatch.setattr(pytest, "main", lambda arguments: 4)
    with pytest.raises(RuntimeError, match="pytest could not run"):
        _score.try_mutant(A_PASS, ["tests"])

    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: failed)
    assert main(["quick"]) == 1


def test_the_commands_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["testing", "--help"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(command_line.__file__), run_name="__main__")
    assert ended.value.code == 0


def test_what_is_not_captured_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_coverage, "capture", failing(CaptureError("it cannot be")))
    seen = _coverage.Coverage()
    seen.add(Spec(("linear",)), torch.float64)
    assert seen.operations() == set()


def test_nothing_is_written_where_no_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_on_disk.FOLDER, raising=False)

    with _on_disk.on_disk(lambda: pytest.fail("it was asked for")):
        pass


def test_a_shape_that_is_never_drawn_is_kept() -> None:
    spec = Spec(("linear", "relu"), (9, 11, 13))

    assert smallest(spec, lambda each: each.shape == spec.shape) == Spec((), spec.shape)


def test_a_tensor_is_as_precise_only_where_its_infinities_are_the_same() -> None:
    truth = torch.tensor([1.0, float("inf")])
    as_precise = AsPrecise(truth, noise=1.0)

    assert not as_precise(torch.tensor([1.0, 2.0]), truth)
    assert as_precise(torch.ones(3), torch.ones(3))  # of a shape that rounding decided


def test_modules_are_no_graphs() -> None:
    draws = settings(database=None, phases=(Phase.generate,))

    assert find(modules(), lambda spec: len(spec.tokens) > 2, settings=draws).entry == "module"


def test_of_what_is_right_no_pass_is_guilty() -> None:
    told = Optimize(1, only=("fold_affine",)).guilty(
        Spec(("linear",)), exact=False, dtype=torch.float64, later=False
    )

    assert told.startswith("none alone")


def test_integers_are_kept_and_what_is_the_models_is_told() -> None:
    held: Any = {"linear": nn.Linear(4, 4)}
    held["steps"] = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    model, copied = (
        randomize(Forward(f"return m.linear(x), {weight}, m.steps * 1, 3", **held).double().eval())
        for weight in ("m.linear.weight", "m.linear.weight.clone()")
    )

    assert model.steps.tolist() == [1, 2]
    with torch.no_grad():
        assert_equivalent(model, model, (ROWS,))
    with torch.no_grad(), pytest.raises(AssertionError, match="memory shared"):
        assert_equivalent(model, copied, (ROWS,))


def test_broken_kernels_are_offered_and_lose() -> None:
    model = randomize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double().eval())
    model.register_buffer("steps", torch.tensor(3))
    fast = _level_two.Lower()(model, (ROWS,))

    torch.testing.assert_close(fast(ROWS), model(ROWS))
    _level_two.assert_follows_its_weights(fast, (ROWS,))
    region = Forward("(m.layer(x),)", layer=nn.Linear(4, 4)).double()
    wrong, greedy = (_level_two._KERNELS[name](region, ()) for name in ("wrong", "greedy"))
    torch.testing.assert_close(wrong(ROWS)[0], 3 * region(ROWS)[0] + 1)
    given = ROWS.clone()
    torch.testing.assert_close(greedy(given)[0], region(ROWS)[0])
    assert not given.any()


def test_an_input_may_be_a_number() -> None:
    scaled, unscaled = ForwardOfTwo("x.relu() * z"), ForwardOfTwo("x.relu()")
    inputs: Any = (torch.ones(2, 3, dtype=torch.float64), 2)

    assert_equivalent(scaled, scaled, inputs)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(scaled, unscaled, inputs)


def test_what_torch_says_of_a_model_once_a_process_fails_no_test() -> None:
    """It would fail the one that happens to come first."""
    torch.set_warn_always(True)
    try:
        spec = Spec(("autocast", "linear", "rmsnorm"))
        assert check_spec(spec, Optimize(level=0), exact=True, dtype=torch.float32)
    finally:
        torch.set_warn_always(False)


def test_a_call_that_fails_leaves_no_buffer_written() -> None:
    model = Forward("m.count.add_(1); return x[m.absent]", count=torch.zeros(1))
    with pytest.raises(AttributeError):
        assert_equivalent(model, model, (ROWS,))
    assert not model.count.any()


def test_complex_numbers_are_compared_to_the_bit() -> None:
    values = torch.complex(ROWS, -ROWS)

    assert_equivalent(nn.Identity(), nn.Identity(), (values,), exact=True)
    assert not same_bits(torch.complex(ROWS, 0 * ROWS), torch.complex(ROWS, -0.0 * ROWS))
