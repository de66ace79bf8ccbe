"""Level 2: a call that was lowered gives the portable code's answer, and any other runs that."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import optimizer
from optimizer import InputError
from optimizer.lowering import choose as _choose
from optimizer.lowering import module as _lowered
from optimizer.lowering import packed as _packed
from optimizer.lowering import plan as _plan
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES
from optimizer.lowering.engines import engines_here, engines_named
from tests.level_2 import (
    PACKED,
    Running,
    Then,
    all_alike,
    chosen,
    image,
    last_wins,
    lowered,
    net,
    offer,
    pickled,
    plan_of,
    racing,
)
from tests.single_pass import Forward, ForwardOfTwo, function_of, rows

SLOW = "such a call is not lowered: it is not faster so: 1.00 of the time"
no_warning_of_jit = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def best() -> str:
    """What runs a region with convolutions, where whatever is right counts as faster."""
    return next(iter(engines_here(engines_named("auto"))), PACKED)


@pytest.fixture(params=[(), ("stub",)], ids=["torch", "engine"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions run on torch's own kernels, or by an engine."""
    offer(monkeypatch, *request.param)


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here: whatever is right counts as faster."""
    offer(monkeypatch)
    racing(monkeypatch, last_wins)


def spoiled(x: torch.Tensor, value: complex) -> torch.Tensor:
    x = x.clone()
    x[0, 0, 0, 0] = value
    return x


_COMPLEX, _NUMBERS = torch.complex(image(), image()), torch.arange(1, 385).reshape(2, 3, 8, 8)
_LARGE = image() / image().abs().max()
# What is ahead of the layers, an input, one of which something is not finite that a region meets
# or makes, and what the first weight is multiplied by.
NOT_FINITE: dict[str, tuple[str, torch.Tensor, torch.Tensor, float]] = {
    "NaN": ("x", image(), spoiled(image(), math.nan), 1.0),
    "infinity": ("x", image(), spoiled(image(), -math.inf), 1.0),
    "deviation": ("x / x.std()", image(), torch.zeros(2, 3, 8, 8), 1.0),
    "powers": ("x.pow(2).pow(2).pow(2)", _LARGE, _LARGE.abs() * 1e5 + 1e4, 1.0),
    "complex": ("x.real", _COMPLEX, spoiled(_COMPLEX, complex("nan")), 1.0),
    "integers": ("1 / x", _NUMBERS, _NUMBERS - 1, 1.0),
    "mask": ("torch.where(x, 0.5, -math.inf)", image() < 9, image() < 0, 1.0),
    # The sums are infinite, their differences NaN; oneDNN's ReLU makes numbers of that.
    "overflow inside": ("x", image(), _LARGE * 3e38, 1e1),
    "overflow inside of a small input": ("x", image(), _LARGE * 3e14, 1e25),
}
ANSWERS: dict[str, tuple[nn.Module, list[torch.Tensor]]] = {
    "a head": (net(), [image()]),
    "an image": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), [image()]),
    **{
        f"{layout} {text}": (
            ForwardOfTwo(f"y = m.layer(x); return {text}", layer=nn.Conv2d(3, 3, 3, padding=1)),
            [image().contiguous(memory_format=layout) for _ in range(2)],
        )
        for text in (
            "F.relu(y + z)", "torch.relu(y)[..., ::2]", "y**2",
            "torch.relu(y)[:, :1].expand(-1, 4, -1, -1)", "y.reshape(y.size(0), -1).relu()",
        )
        for layout in (torch.contiguous_format, torch.channels_last)
    },
    "a view": (Then("y.view(y.size(0), -1).relu()"), [image()]),
}  # fmt: skip


@pytest.mark.usefixtures("kernels")
@rows("model inputs", ANSWERS)
def test_a_lowered_call_gives_the_models_answer_and_layout_and_overwrites_nothing(
    model: nn.Module, inputs: list[torch.Tensor]
) -> None:
    fast, kept = lowered(model, *inputs), [each.clone() for each in inputs]
    answer, expected = fast(*inputs), model(*inputs)

    assert plan_of(fast, *inputs) is not None
    assert chosen(fast) == [best()]
    assert_close(answer, expected)
    assert answer.stride() == expected.stride()
    fast(*(2 * each for each in inputs))  # the next call
    assert_close(answer, expected)
    assert all(map(torch.equal, inputs, kept))


def test_calls_of_other_sizes_and_layouts_run_the_portable_code_until_they_are_lowered() -> None:
    model, last = net(), torch.channels_last
    fast = lowered(model, image())
    for x in (image(1, 3, 8, 8), image(2, 3, 9, 7), image().to(memory_format=last)):
        assert plan_of(fast, x) is None
        assert_close(fast(x), model(x))
    for each in (fast, lowered(model)):
        (choice,) = each.lower(image(1, 3, 9, 9))

        assert (choice.region, choice.chosen) == ("2 x conv2d, 1 x linear", best())
        for x in [image()] * (each is fast) + [image(1, 3, 9, 9)]:
            assert plan_of(each, x) is not None
            assert_close(each(x), model(x))
    assert plan_of(fast.double(), image().double()) is None


@pytest.mark.usefixtures("kernels")
@rows("ahead x other scale", NOT_FINITE)
def test_what_is_not_finite_is_not_lost(
    ahead: str, x: torch.Tensor, other: torch.Tensor, scale: float
) -> None:
    """Found by a blank image, of which a forward divides by the deviation (issue 18)."""
    torch.manual_seed(1)
    one, two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    one.weight.data.mul_(scale)
    two.weight.data.div_(scale)
    layers = (one, nn.ReLU(), two, nn.ReLU())
    model = nn.Sequential(Running(function_of("x", ahead)), *layers).eval()
    fast, expected = lowered(model, x), model(other)

    assert_close(fast(x), model(x))
    assert chosen(fast) == [best() if scale < 1e9 else PACKED]  # engines get no huge weights
    assert plan_of(fast, other) is not None
    assert not expected.isfinite().all()
    assert_close(fast(other), expected, equal_nan=True)


def test_outputs_may_have_any_structure() -> None:
    text = "y = m.layer(x); return {'b': [y.relu(), None], 'n': x.shape[2], 'flag': z}"
    model: Any = ForwardOfTwo(text, layer=nn.Conv2d(3, 4, 3)).eval()
    fast: Any = optimizer.optimize(model, {"x": image(), "z": True})  # level 2 is the default
    answer = fast(x=image(), z=True)

    assert plan_of(fast, x=image(), z=True) is not None
    assert_close(answer["b"].pop(0), model(image(), True)["b"][0])
    assert answer == {"b": [None], "n": 8, "flag": True}


@pytest.mark.usefixtures("kernels")
def test_many_threads_may_call_it() -> None:
    model, x = net(), image()
    fast = pickled(lowered(model, x))  # packs its weights meanwhile
    inputs = [x * scale for scale in range(1, 9)] * 5
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fast, inputs))

    assert_close(answers, list(map(model, inputs)))


def _counted(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def _dual(model: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).tangent


def _in_bfloat16(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return model(x)[:0]  # its dtype


@rows(
    "made_of",
    {
        "gradients": (lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],),
        "vmap": (lambda f, x: torch.vmap(f)(torch.stack([x, x * 2])),),
        "forward mode": (lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],),
        "dual numbers": (_dual,),
        "a mode that counts operators": (_counted,),
        "autocast": (_in_bfloat16,),
    },
)
@no_warning_of_jit
def test_what_only_portable_code_can_do_is_as_of_the_model(made_of: Callable[..., Any]) -> None:
    assert_close(made_of(lowered(net(), image()), image()), made_of(net(), image()))


@no_warning_of_jit
def test_tracing_compiling_and_optimizing_see_the_layers() -> None:
    fast, x = lowered(net(), image()), image()
    traced = torch.jit.trace(fast, x)  # type: ignore[no-untyped-call]
    exported, again = torch.export.export(fast, (x,)), lowered(fast, x)
    compiled = torch.compile(fast, backend="eager")

    assert "conv" in str(traced.inlined_graph)
    assert any("conv" in str(node.target) for node in exported.graph.nodes)
    assert_close(compiled(x), fast(x))
    assert plan_of(again, x) is not None
    assert_close(again(x), fast(x))


def _doubled(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value * 2 for name, value in module.state_dict().items()}


CHANGES: dict[str, tuple[Callable[[Any], Any]]] = {
    "loaded": (lambda m: m.load_state_dict(_doubled(m)),),
    "assigned": (lambda m: m.load_state_dict(_doubled(m), assign=True),),
    "loaded as a part": (
        lambda m: nn.Sequential(m).load_state_dict({f"0.{k}": v for k, v in _doubled(m).items()}),
    ),
    "replaced": (lambda m: setattr(m, "head", nn.Linear(m.head.in_features, 5)),),
    "cast": (lambda m: m.to(torch.bfloat16).to(torch.float32),),
    "refitted": (lambda m: m.refit(_doubled(net()), image()),),
}


@pytest.mark.usefixtures("kernels")
@rows("change", CHANGES)
def test_weights_that_change_are_packed_anew(change: Callable[[Any], Any]) -> None:
    fast, x = lowered(net(), image()), image()
    before = fast(x)
    change(fast)

    with torch.no_grad():
        expected = fast.run_portable(x)
        assert not torch.equal(expected, before)
        assert_close(fast(x), expected)
    assert plan_of(fast, x) is not None


def test_no_training_step_reaches_the_weights() -> None:
    fast, x = lowered(net(), image()), image().requires_grad_()
    fast(x).sum().backward()

    assert x.grad is not None
    assert not any(each.requires_grad for each in fast.parameters())
    assert fast.requires_grad_(False) is fast
    with pytest.raises(InputError, match="train the original model and refit"):
        fast.requires_grad_()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_packs_weights_of_its_own(copied: Any) -> None:
    model, x = net(), image()
    fast = lowered(model, x)
    other = copied(fast)
    with torch.no_grad():
        other.head.weight.zero_()
        other.head.bias.fill_(3.0)

    for _ in range(3):
        assert torch.equal(other(x), torch.full((2, 5), 3.0))
    assert plan_of(other, x) is not None
    assert_close(fast(x), model(x))


def test_an_edited_graph_is_not_what_was_lowered() -> None:
    fast, x = lowered(net(), image()), image()
    output = fast.graph.output_node()
    with fast.graph.inserting_before(output):
        output.args = (fast.graph.call_function(torch.neg, (output.args[0],)),)
    before = fast(x)
    fast.recompile()

    assert plan_of(fast, x) is None
    assert_close(fast(x), -before)


def test_weights_that_come_while_others_are_packed_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another thread, of which a wrapper of what packs them plays the part."""
    fast = copy.deepcopy(lowered(net(), image()))  # whose weights are packed at the first call
    loaded, make_plan = _doubled(fast), vars(_lowered)["make_plan"]

    def loading(*args: Any) -> Any:
        plan = make_plan(*args)
        monkeypatch.setattr(_lowered, "make_plan", make_plan)
        fast.load_state_dict(loaded)
        return plan

    monkeypatch.setattr(_lowered, "make_plan", loading)
    fast(image())

    assert_close(fast(image()), fast.run_portable(image()))
    assert not torch.allclose(fast(image()), net()(image()))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("pays", [True, False])
def test_the_first_call_on_another_device_is_lowered_as_is_chosen_anew(
    monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """Calls look as if they came from there."""
    fast = lowered(net(), image())
    monkeypatch.setattr(_plan, "_device", lambda tensor: "elsewhere")
    raced = racing(monkeypatch, last_wins if pays else all_alike)

    assert (plan_of(fast, image()) is not None) is pays
    once = len(raced)
    for each in (fast, pickled(fast)):
        assert (plan_of(each, image()) is not None) is pays
        assert_close(each(image()), net()(image()))
    assert len(raced) == once > 0
    assert plan_of(fast, image(1, 3, 8, 8)) is None
    assert fast.report.remarks == (() if pays else (f"on elsewhere: {SLOW}",))


def test_a_call_that_is_lowered_without_a_region_is_told() -> None:
    fast = lowered(Forward("torch.where(x > 0, x, -x)"), image())

    for each in (fast, pickled(fast)):
        assert plan_of(each, image()) is not None
        assert not each.report.choices
    assert fast.report.remarks == ("calls like the example run as a straight line of operators",)


_DROPOUT, _NORM = (
    nn.Sequential(nn.Conv2d(3, 4, 3), last) for last in (nn.Dropout(), nn.BatchNorm2d(4))
)
_TRAINS = Forward(
    "m.conv(F.batch_norm(x, m.mean, m.var, training=x.size(0) > 2))",
    mean=torch.zeros(3), var=torch.ones(3), conv=nn.Conv2d(3, 4, 3),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*training")
@rows(
    "model train inputs seconds reason",
    {
        "no example": (net(), False, (), last_wins, "there are no example inputs"),
        "random": (_DROPOUT, True, (image(),), last_wins, "random"),
        "statistics": (_NORM, True, (image(),), last_wins, "writes an attribute"),
        "gaps": (net(), False, (image(2, 3, 8, 16)[..., ::2],), last_wins, "gaps"),
        "no time saved": (net(), False, (image(),), all_alike, SLOW),
    },
)
def test_what_is_not_lowered_is_told_and_runs_the_portable_code(
    monkeypatch: pytest.MonkeyPatch, model: Any, train: bool, inputs: Any, seconds: Any, reason: str
) -> None:
    racing(monkeypatch, seconds)
    fast = lowered(model, *inputs, train=train)

    assert any(reason in remark for remark in fast.report.remarks), fast.report.remarks
    assert not fast.report.choices
    assert plan_of(fast, *(inputs or [image()])) is None
    if train:
        with pytest.raises(InputError, match=reason):
            fast.lower(image())
    elif inputs:
        optimizer.check(model, fast, inputs)


def test_a_later_call_that_cannot_be_lowered_raises_the_reason() -> None:
    fast = lowered(_TRAINS, image())

    with pytest.raises(InputError, match="writes an attribute"):
        fast.lower(image(3, 3, 8, 8))
    assert not fast.mean.any()


@pytest.mark.parametrize("seconds", [-1, math.nan, "1"])
def test_seconds_must_be_seconds(seconds: Any) -> None:
    with pytest.raises(InputError, match="tune_seconds"):
        lowered(net(), image(), tune_seconds=seconds)


def no_kernel(*args: Any) -> Any:
    raise RuntimeError("no such kernel")


def running(run: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A candidate that runs a function of the region, the example inputs, and what is given."""
    return lambda region, inputs: Running(partial(run, region, inputs))


INEXACT = running(lambda region, inputs, *given: [each * 1.01 for each in region(*given)])
INFINITE = running(lambda region, inputs, *given: [each / 0 for each in region(*given)])
GREEDY = running(lambda region, inputs, *given: (region(*given), given[0].zero_())[0])
STALE = running(lambda region, inputs, *given: region(*inputs))


@rows(
    "candidate reason",
    {
        "wrong": (INEXACT, "output[0]: relative error"),
        "stale": (STALE, "output[0]: relative error"),
        "greedy": (GREEDY, "it overwrites its inputs"),
        "not finite": (INFINITE, "NaN or infinities are elsewhere"),
        "not made": (no_kernel, "RuntimeError: no such kernel"),
        "not run": (running(no_kernel), "RuntimeError: no such kernel"),
    },
)
@pytest.mark.parametrize("seconds", [last_wins, all_alike])
def test_a_candidate_that_is_no_good_is_rejected_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, candidate: Any, reason: str, seconds: Any
) -> None:
    """Also where the call is not lowered: that it is not faster was all that was told."""
    monkeypatch.setitem(CANDIDATES, PACKED, candidate)
    racing(monkeypatch, seconds)
    fast, x = lowered(net(), image()), image()
    report = fast.report
    (choice,) = report.choices or report.tried
    (rejected,) = choice.rejected.values()

    assert (choice.chosen, not report.choices) == (AS_IT_IS, seconds is all_alike)
    assert reason in rejected
    assert f"{PACKED}  {choice.region}  rejected: {rejected}" in str(report)
    assert rejected in report.to_html()
    assert rejected in json.dumps(report.to_dict())
    assert_close(fast(x), net()(x))


def test_a_decision_for_a_wrong_candidate_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), image()
    other = pickled(lowered(model, x))
    monkeypatch.setitem(CANDIDATES, PACKED, INEXACT)

    assert_close(other(x), model(x))
    assert plan_of(other, x) is None


def test_without_onednn_there_is_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_OPERATORS", ("no_such_operator",))
    model, x = net(), image()
    fast = lowered(model, x)

    assert chosen(fast) == ["channels_last"]
    assert_close(fast(x), model(x))


@pytest.mark.parametrize("seconds", [0.975, 0.985])
def test_what_is_chosen_must_be_faster_by_more_than_noise_and_its_cost_is_told(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    times = {AS_IT_IS: 1.0, "plan": 0.1, "portable": 1.0}
    racing(monkeypatch, lambda names: {name: times.get(name, seconds) for name in names})
    start = time.perf_counter()
    fast = lowered(net(), image())
    (choice,) = fast.report.choices

    assert (choice.chosen == AS_IT_IS) is (seconds > 0.98)
    weights = sum(each.numel() * each.element_size() for each in fast.parameters())
    assert choice.held == weights * (choice.chosen != AS_IT_IS)
    assert 0 < choice.spent[choice.chosen] < time.perf_counter() - start


def test_in_another_mode_it_runs_the_portable_code() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 8, 3)).eval()
    fast, x = lowered(model, image()), image()

    fast.train()
    assert plan_of(fast, x) is None
    assert_close(fast(x), model.train()(x))
    fast.eval()
    assert_close(fast(x), model.eval()(x))
    assert plan_of(fast, x) is not None


@pytest.mark.usefixtures("kernels")
def test_without_seconds_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose.Times, "race", None)
    fast = lowered(net(), image(), tune_seconds=0)

    for each in (fast, fast.refit(net().state_dict())):
        assert chosen(each) == [best()]
        assert not each.report.choices[0].seconds


def test_what_is_chosen_without_timing_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, PACKED, running(no_kernel))
    (tried,) = lowered(net(), image(), tune_seconds=0).report.tried

    assert tried.chosen == AS_IT_IS
    assert [*tried.rejected.values()] == ["RuntimeError: no such kernel"]
