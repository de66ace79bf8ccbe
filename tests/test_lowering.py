"""Level 2: a call that was lowered gives the portable code's answer, and any other runs that."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from optimizer.lowering import choose as _choose
from optimizer.lowering import module as _lowered
from optimizer.lowering import packed as _packed
from optimizer.lowering import plan as _signature
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES
from optimizer.lowering.choose import Chooser, varied
from optimizer.lowering.engines import engines_here, engines_named
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.plan import signature_of
from optimizer.verify.equivalence import BOUNDS
from tests.level_2 import (
    Running,
    Then,
    all_alike,
    chosen,
    image,
    last_wins,
    lowered,
    offer,
    plan_of,
    racing,
)
from tests.single_pass import Forward, ForwardOfTwo, rows

PACKED = "packed weights, channels_last"
SLOW = "such a call is not lowered: it is not faster so: 1.00 of the time"
no_warning_of_jit = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Net(nn.Module):
    """Convolutions with a residual sum, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu_()
        x = F.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


def net() -> Net:
    return Net().eval()


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
NOT_FINITE: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor, float]] = {
    "NaN": (lambda x: x, image(), spoiled(image(), math.nan), 1.0),
    "infinity": (lambda x: x, image(), spoiled(image(), math.inf), 1.0),
    "minus infinity": (lambda x: x, image(), spoiled(image(), -math.inf), 1.0),
    "deviation": (lambda x: x / x.std(), image(), torch.zeros(2, 3, 8, 8), 1.0),
    "logarithm": (lambda x: x.log(), image().abs() + 1, spoiled(image().abs() + 1, 0.0), 1.0),
    "overflow": (lambda x: x.exp(), image(), spoiled(image(), 100.0), 1.0),
    "powers": (lambda x: x.pow(2).pow(2).pow(2), _LARGE, _LARGE.abs() * 1e5 + 1e4, 1.0),
    "complex": (lambda x: x.real, _COMPLEX, spoiled(_COMPLEX, complex("nan")), 1.0),
    "imaginary": (lambda x: x.abs(), _COMPLEX, spoiled(_COMPLEX, complex(0, math.inf)), 1.0),
    "integers": (lambda x: 1 / x, _NUMBERS, _NUMBERS - 1, 1.0),
    "mask": (lambda x: torch.where(x, 0.5, -math.inf), image() < 9, image() < 0, 1.0),
    # The sums are infinite, their differences NaN; oneDNN's ReLU makes numbers of that.
    "overflow inside": (lambda x: x, image(), _LARGE * 3e38, 1e1),
    "overflow inside of a small input": (lambda x: x, image(), _LARGE * 3e14, 1e25),
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
            "F.relu(y + z)", "torch.relu(y)[..., -1]", "torch.relu(y)[..., ::2]", "y**2",
            "torch.relu(y)[:, :1].expand(-1, 4, -1, -1)", "y.reshape(y.size(0), -1).relu()",
        )
        for layout in (torch.contiguous_format, torch.channels_last)
    },
    "a view": (Then(lambda y: y.view(y.size(0), -1).relu()), [image()]),
}  # fmt: skip


@pytest.mark.usefixtures("kernels")
class TestALoweredCall:
    @rows("model inputs", ANSWERS)
    def test_it_gives_the_models_answer_and_layout_and_overwrites_nothing(
        self, model: nn.Module, inputs: list[torch.Tensor]
    ) -> None:
        fast, kept = lowered(model, *inputs), [each.clone() for each in inputs]
        answer, expected = fast(*inputs), model(*inputs)

        assert plan_of(fast, *inputs) is not None
        assert chosen(fast) == [best()]
        torch.testing.assert_close(answer, expected)
        assert answer.stride() == expected.stride()
        fast(*(2 * each for each in inputs))  # the next call
        torch.testing.assert_close(answer, expected)
        assert all(map(torch.equal, inputs, kept))

    def test_other_sizes_layouts_and_dtypes_run_the_portable_code(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)

        for other in (
            image(1, 3, 8, 8),
            image(2, 3, 9, 7),
            x.to(memory_format=torch.channels_last),
        ):
            assert plan_of(fast, other) is None
            torch.testing.assert_close(fast(other), model(other))
        assert plan_of(fast.double(), x.double()) is None

    @rows("ahead x other scale", NOT_FINITE)
    def test_what_is_not_finite_is_not_lost(
        self, ahead: Any, x: torch.Tensor, other: torch.Tensor, scale: float
    ) -> None:
        """Found by a blank image, of which a forward divides by the deviation (issue 18)."""
        torch.manual_seed(1)
        one, two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        one.weight.data.mul_(scale)
        two.weight.data.div_(scale)
        model = nn.Sequential(Running(ahead), one, nn.ReLU(), two, nn.ReLU()).eval()
        fast = lowered(model, x)
        torch.testing.assert_close(fast(x), model(x))
        expected = model(other)

        assert chosen(fast) == [best() if scale < 1e9 else PACKED]  # engines get no huge weights
        assert plan_of(fast, other) is not None
        assert not expected.isfinite().all()
        torch.testing.assert_close(fast(other), expected, equal_nan=True)

    def test_rounding_beyond_the_bound_is_judged_by_float64(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(BOUNDS, torch.float32, 0.0)
        fast: Any = optimizer.optimize(net(), image())  # level 2 is the default

        assert plan_of(fast, image()) is not None
        assert chosen(fast) == [best()]

    def test_outputs_of_any_structure(self) -> None:
        class Structured(Then):
            def forward(self, x: torch.Tensor, flag: bool = False) -> dict[str, Any]:
                y = self.layer(x)
                return {"a": y, "b": [y.relu(), None], "n": x.shape[2], "flag": flag}

        model, x = Structured(torch.relu).eval(), image()
        fast: Any = optimizer.optimize(model, {"x": x, "flag": True}, level=2)

        assert plan_of(fast, x=x, flag=True) is not None
        answer, expected = fast(x=x, flag=True), model(x, flag=True)
        torch.testing.assert_close(answer["b"][0], expected["b"][0])
        assert (answer["n"], answer["flag"], answer["b"][1]) == (8, True, None)

    @pytest.mark.parametrize("before", [(), (image(),)], ids=["none before", "after another"])
    def test_calls_can_be_lowered_later(self, before: tuple[torch.Tensor, ...]) -> None:
        model, other = net(), image(1, 3, 9, 9)
        fast = lowered(model, *before)
        (choice,) = fast.lower(other)

        assert (choice.region, choice.chosen) == ("2 x conv2d, 1 x linear", best())
        for x in (*before, other):
            assert plan_of(fast, x) is not None
            torch.testing.assert_close(fast(x), model(x))

    def test_many_threads_may_call_it(self) -> None:
        model, x = net(), image()
        fast = _pickled(lowered(model, x))  # packs its weights meanwhile
        inputs = [x * scale for scale in range(1, 9)] * 5
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(fast, inputs))

        for given, answer in zip(inputs, answers, strict=True):
            torch.testing.assert_close(answer, model(given))


def _counted(model: nn.Module, x: torch.Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def _dual(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert not isinstance(model, LoweredModule) or model.plan_for((dual,), {}) is None
        return forward_ad.unpack_dual(model(dual)).tangent


class TestWhatOnlyPortableCodeCanDo:
    @rows(
        "made_of",
        {
            "gradients of an input": (
                lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],
            ),
            "vmap": (lambda f, x: torch.vmap(f)(torch.stack([x, x * 2])),),
            "forward mode": (lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],),
            "dual numbers": (_dual,),
            "a mode that counts operators": (_counted,),
        },
    )
    @no_warning_of_jit
    def test_it_is_as_of_the_model(self, made_of: Callable[..., Any]) -> None:
        fast = lowered(net(), image())

        torch.testing.assert_close(made_of(fast, image()), made_of(net(), image()))

    def test_autocast(self) -> None:
        fast, x = lowered(net(), image()), image()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert fast.plan_for((x,), {}) is None
            assert fast(x).dtype == torch.bfloat16

    @no_warning_of_jit
    def test_tracing_and_compiling_see_the_layers(self) -> None:
        fast, x = lowered(net(), image()), image()
        traced = torch.jit.trace(fast, x)  # type: ignore[no-untyped-call]
        exported = torch.export.export(fast, (x,))
        compiled = torch.compile(fast, backend="eager")

        assert "conv" in str(traced.inlined_graph)
        assert any("conv" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(compiled(x), fast(x))

    def test_it_can_be_optimized_again(self) -> None:
        model, x = net(), image()
        again = lowered(lowered(model, x), x)

        assert plan_of(again, x) is not None
        torch.testing.assert_close(again(x), model(x))

    @pytest.mark.usefixtures("kernels")
    def test_another_number_of_threads(self) -> None:
        fast, x = lowered(net(), image()), image()
        first, before = plan_of(fast, x).func, torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            other = plan_of(fast, x).func
        finally:
            torch.set_num_threads(before)
        assert other is not first
        assert plan_of(fast, x).func is first


def _doubled(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value * 2 for name, value in module.state_dict().items()}


def _pickled(module: nn.Module) -> Any:
    with torch.no_grad():
        return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES: dict[str, tuple[Callable[[Any], Any]]] = {
    "loaded": (lambda m: m.load_state_dict(_doubled(m)),),
    "assigned": (lambda m: m.load_state_dict(_doubled(m), assign=True),),
    "loaded as a part": (
        lambda m: nn.Sequential(m).load_state_dict({f"0.{k}": v for k, v in _doubled(m).items()}),
    ),
    "replaced": (lambda m: setattr(m, "head", nn.Linear(m.head.in_features, 5)),),
    "cast": (lambda m: m.to(torch.bfloat16).to(torch.float32),),
}


@pytest.mark.usefixtures("kernels")
class TestItsWeights:
    @rows("change", CHANGES)
    def test_a_change_of_them_is_packed_anew(self, change: Callable[[Any], Any]) -> None:
        fast, x = lowered(net(), image()), image()
        before = fast(x)
        change(fast)

        with torch.no_grad():
            expected = fast.run_portable(x)
            assert not torch.equal(expected, before)
            torch.testing.assert_close(fast(x), expected)
        assert plan_of(fast, x) is not None

    def test_no_training_step_reaches_them(self) -> None:
        fast, x = lowered(net(), image()), image().requires_grad_()

        fast(x).sum().backward()

        assert x.grad is not None
        assert not any(each.requires_grad for each in fast.parameters())
        assert fast.requires_grad_(False) is fast
        with pytest.raises(InputError, match="train the original model and refit"):
            fast.requires_grad_()

    @pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
    def test_a_copy_packs_its_own(self, copied: Any) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        other = copied(fast)
        with torch.no_grad():
            other.head.weight.zero_()
            other.head.bias.fill_(3.0)

        for _ in range(3):
            assert torch.equal(other(x), torch.full((2, 5), 3.0))
        assert plan_of(other, x) is not None
        torch.testing.assert_close(fast(x), model(x))

    def test_another_checkpoint(self) -> None:
        fast, other, x = lowered(net(), image()), net(), image()
        other.load_state_dict(_doubled(other))
        fast.refit(other.state_dict(), x)

        torch.testing.assert_close(fast(x), other(x))

    def test_an_edited_graph_is_not_what_was_lowered(self) -> None:
        fast, x = lowered(net(), image()), image()
        output = next(iter(reversed(fast.graph.nodes)))
        with fast.graph.inserting_before(output):
            output.args = (fast.graph.call_function(torch.neg, (output.args[0],)),)
        before = fast(x)
        fast.recompile()

        assert plan_of(fast, x) is None
        torch.testing.assert_close(fast(x), -before)

    def test_those_that_come_while_others_are_packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
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

        expected = fast.run_portable(image())
        torch.testing.assert_close(fast(image()), expected)
        assert not torch.allclose(expected, net()(image()))


@pytest.mark.usefixtures("kernels")
class TestMoving:
    """To another device, which is faked: calls look as if they came from there."""

    @pytest.fixture
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> LoweredModule:
        fast = lowered(net(), image())
        monkeypatch.setattr(_signature, "_device", lambda tensor: "elsewhere")
        return fast

    def test_the_first_call_there_is_lowered_as_is_chosen_anew(
        self, fast: LoweredModule, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        monkeypatch.setattr(_lowered, "Chooser", lambda *args: made.append(args) or Chooser(*args))
        assert plan_of(fast, image()) is not None
        assert plan_of(fast, image()).func is plan_of(fast, image()).func
        assert plan_of(fast, image(1, 3, 8, 8)) is None
        assert fast.report.remarks == ()
        torch.testing.assert_close(fast(image()), net()(image()))

        plan_of(_pickled(fast), image())
        again = fast.meta["lowered"][signature_of((image(),), {})[0]]  # type: ignore[index]
        assert [(tuning.tune_seconds, *rest) for tuning, *rest in made] == [(1, {}), (0, again)]

    def test_where_it_cannot_be_the_report_says_why(
        self, fast: LoweredModule, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        racing(monkeypatch, all_alike)
        for each in (fast, fast, _pickled(fast)):
            assert plan_of(each, image()) is None
            torch.testing.assert_close(each(image()), net()(image()))

        assert fast.report.remarks == (f"on elsewhere: {SLOW}",)

    def test_what_was_packed_is_let_go(self) -> None:
        fast = lowered(net(), image())
        packed = weakref.ref(fast._plans[signature_of((image(),), {})[0]])  # type: ignore[index]
        fast.to("cpu")

        assert packed() is None
        assert plan_of(fast, image()) is not None


def test_a_call_that_is_lowered_without_a_region_is_told() -> None:
    fast = lowered(Forward("torch.where(x > 0, x, -x)"), image())

    for each in (fast, _pickled(lowered(nn.Sequential(nn.GELU()), image()))):
        assert plan_of(each, image()) is not None
        assert not each.report.choices
    assert fast.report.remarks == ("calls like the example run as a straight line of operators",)


class TestWhatIsNotLowered:
    def test_without_example_inputs(self) -> None:
        assert "not lowered: there are no example inputs" in lowered(net()).report.remarks

    @pytest.mark.parametrize(
        ("last", "reason"),
        [(nn.Dropout(), "random"), (nn.BatchNorm2d(4), "writes an attribute")],
        ids=["random numbers", "statistics that a call updates"],
    )
    def test_in_training(self, last: nn.Module, reason: str) -> None:
        with pytest.warns(UserWarning, match="training"):
            fast = lowered(nn.Sequential(nn.Conv2d(3, 4, 3), last), image(), train=True)

        assert any(reason in remark for remark in fast.report.remarks)
        with pytest.raises(InputError, match=reason):
            fast.lower(image())

    @pytest.mark.parametrize(
        ("x", "seconds", "reason"),
        [(image(2, 3, 8, 16)[..., ::2], last_wins, "gaps"), (image(), all_alike, SLOW)],
        ids=["an input with gaps", "no time is saved"],
    )
    def test_it_answers_as_before(
        self, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, seconds: Any, reason: str
    ) -> None:
        racing(monkeypatch, seconds)
        fast = lowered(net(), x)

        assert any(reason in remark for remark in fast.report.remarks), fast.report.remarks
        assert not fast.report.choices
        assert plan_of(fast, x) is None
        optimizer.check(net(), fast, (x,))

    def test_a_call_of_a_module_that_cannot_be_looked_at(self) -> None:
        fast = lowered(net(), image())
        fast.lock = threading.Lock()

        with pytest.raises(InputError, match="not lowered: the model cannot be copied"):
            fast.lower(image(3, 3, 8, 8))

    def test_a_call_of_other_sizes_that_trains(self) -> None:
        trains = "m.conv(F.batch_norm(x, m.mean, m.var, training=x.size(0) > 2))"
        held = {"mean": torch.zeros(3), "var": torch.ones(3), "conv": nn.Conv2d(3, 4, 3)}
        fast = lowered(Forward(trains, **held), image())

        with pytest.raises(InputError, match="writes an attribute"):
            fast.lower(image(3, 3, 8, 8))
        assert not fast.mean.any()

    @pytest.mark.parametrize("seconds", [-1, math.nan, "1"])
    def test_seconds_must_be_seconds(self, seconds: Any) -> None:
        with pytest.raises(InputError, match="tune_seconds"):
            lowered(net(), image(), tune_seconds=seconds)


def no_kernel(*args: Any) -> Any:
    raise RuntimeError("no such kernel")


def running(run: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A candidate that runs a function of the region, the example inputs, and what is given."""
    return lambda region, inputs: Running(partial(run, region, inputs))


WRONG = running(lambda region, inputs, *given: [each * 1.01 for each in region(*given)])
NO_GOOD: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "wrong": (WRONG, "relative error"),
    "stale": (running(lambda region, inputs, *given: region(*inputs)), "relative error"),
    "greedy": (
        running(lambda region, inputs, *given: (region(*given), given[0].zero_())[0]),
        "it overwrites its inputs",
    ),
    "half": (
        running(lambda region, inputs, *given: [each.half() for each in region(*given)]),
        "has dtype torch.float16",
    ),
    "not finite": (
        running(lambda region, inputs, *given: [each / 0 for each in region(*given)]),
        "NaN or infinities are elsewhere",
    ),
    "not made": (no_kernel, "RuntimeError: no such kernel"),
    "not run": (running(no_kernel), "RuntimeError: no such kernel"),
}


class TestACandidateThatIsNoGood:
    @rows("candidate reason", NO_GOOD)
    def test_it_is_rejected_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, candidate: Any, reason: str
    ) -> None:
        monkeypatch.setitem(CANDIDATES, PACKED, candidate)
        model, x = net(), image()
        fast = lowered(model, x)
        rejected = [text for each in fast.report.choices for text in each.rejected.values()]

        assert chosen(fast) == [AS_IT_IS]
        assert reason in rejected[0]
        assert reason in str(fast.report)
        torch.testing.assert_close(fast(x), model(x))

    def test_nan_in_the_input_is_not_taken_for_a_write(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NaN is unequal to itself: a right candidate was rejected as one that writes."""
        monkeypatch.setitem(CANDIDATES, PACKED, lambda region, inputs: copy.deepcopy(region))
        report = lowered(net(), spoiled(image(), math.nan)).report
        (choice,) = report.choices or report.tried

        assert PACKED in choice.seconds
        assert not choice.rejected

    def test_it_is_told_also_where_the_call_is_not_lowered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The report said only that it is not faster, and not that the answer was wrong."""
        monkeypatch.setitem(CANDIDATES, PACKED, WRONG)
        racing(monkeypatch, all_alike)
        report = lowered(net(), image()).report
        (tried,) = report.tried
        (reason,) = tried.rejected.values()

        assert not report.choices
        assert reason.startswith("output[0]: relative error")
        assert "may run, none of them lowered" in str(report)
        assert f"{PACKED}  {tried.region}  rejected: {reason}" in str(report)
        assert reason in report.to_html()
        assert reason in json.dumps(report.to_dict())

    def test_a_decision_for_it_is_not_trusted_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = net(), image()
        other = _pickled(lowered(model, x))
        monkeypatch.setitem(CANDIDATES, PACKED, WRONG)

        torch.testing.assert_close(other(x), model(x))
        assert plan_of(other, x) is None

    def test_without_onednn_there_is_channels_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_packed, "is_available", lambda: False)
        model, x = net(), image()
        fast = lowered(model, x)

        assert chosen(fast) == ["channels_last"]
        torch.testing.assert_close(fast(x), model(x))

    @pytest.mark.parametrize("seconds", [0.0, 1.0])
    def test_a_view_of_bits_may_need_the_layout(self, seconds: float) -> None:
        model = Then(lambda y: y.view(torch.float32).relu()).eval().double()
        fast = lowered(model, image().double(), tune_seconds=seconds)

        assert "channels_last" not in chosen(fast)
        assert PACKED not in chosen(fast)  # float64 is none of its business
        optimizer.check(model, fast, image().double())

    def test_what_it_takes_to_find_it_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[Any] = []
        plan_for = LoweredModule.plan_for

        def counted(self: LoweredModule, *call: Any) -> Any:
            found.append(plan_for(self, *call))
            return found[-1]

        def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
            if "plan" in runs:
                found.clear()
                runs["plan"](*self.inputs)
            return last_wins(list(runs))

        monkeypatch.setattr(LoweredModule, "plan_for", counted)
        monkeypatch.setattr(_choose.Times, "race", race)
        lowered(net(), image())

        assert sum(each is not None for each in found) == 1

    @pytest.mark.parametrize("seconds", [0.975, 0.985])
    def test_it_must_be_faster_than_the_region_by_more_than_noise(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        times = {AS_IT_IS: 1.0, "plan": 0.1, "portable": 1.0}
        racing(monkeypatch, lambda names: {name: times.get(name, seconds) for name in names})
        fast = lowered(net(), image())
        (choice,) = fast.report.choices

        assert (choice.chosen == AS_IT_IS) is (seconds > 0.98)
        weights = sum(each.numel() * each.element_size() for each in fast.parameters())
        assert choice.held == weights * (choice.chosen != AS_IT_IS)

    @pytest.mark.parametrize("seconds", [0.0, 1.0])
    def test_what_it_took_to_make_it_is_told(self, seconds: float) -> None:
        start = time.perf_counter()
        (choice,) = lowered(net(), image(), tune_seconds=seconds).report.choices

        assert 0 < choice.spent[choice.chosen] < time.perf_counter() - start


def test_in_another_mode_it_runs_the_portable_code() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 8, 3)).eval()
    fast, x = lowered(model, image()), image()
    assert plan_of(fast, x) is not None

    fast.train()
    assert plan_of(fast, x) is None
    torch.testing.assert_close(fast(x), model.train()(x))
    packed = fast.eval()._plans  # type: ignore[operator]
    torch.testing.assert_close(fast(x), model.eval()(x))
    assert plan_of(fast, x) is not None
    assert fast.eval()._plans is packed  # type: ignore[operator]


class TestWithoutTuning:
    @pytest.mark.usefixtures("kernels")
    def test_nothing_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_choose.Times, "race", None)
        fast = lowered(net(), image(), tune_seconds=0)

        assert chosen(fast) == [best()]
        assert not fast.report.choices[0].seconds
        fast.refit(net().state_dict())
        assert chosen(fast) == [best()]
        assert not fast.report.choices[0].seconds

    def test_what_is_chosen_must_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CANDIDATES, PACKED, running(no_kernel))
        (tried,) = lowered(net(), image(), tune_seconds=0).report.tried

        assert tried.chosen == AS_IT_IS
        assert [*tried.rejected.values()] == ["RuntimeError: no such kernel"]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(1, 1, 8, 7).transpose(2, 3), torch.randn(3, 1).expand(3, 4), torch.randn(9)[::2]],
    ids=["transposed", "expanded", "with gaps"],
)
def test_other_values_lie_as_the_given_ones(tensor: torch.Tensor) -> None:
    other = varied(tensor)

    assert (other.shape, other.stride()) == (tensor.shape, tensor.stride())
    assert not torch.equal(other, tensor)
