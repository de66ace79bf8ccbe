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
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from optimizer.core.inputs import Call
from optimizer.core.node import name_of_call
from optimizer.lowering import choose as _choose
from optimizer.lowering import module as _lowered
from optimizer.lowering import packed as _packed
from optimizer.lowering import signature as _signature
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES
from optimizer.lowering.choose import Chooser, Times, varied
from optimizer.lowering.engines import engines_here
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.signature import Signature
from optimizer.lowering.trace import NotStraightLineError, straight_line
from optimizer.verify.equivalence import BOUNDS


class Net(nn.Module):
    """Convolutions with a residual sum, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu_()
        x = F.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


class Prepared(nn.Module):
    """Two convolutions of what something makes of the input."""

    def __init__(self, prepare: Any) -> None:
        super().__init__()
        self.prepare = prepare
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(self.prepare(x)))))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 12, 12)), generator=torch.Generator().manual_seed(3))


def _spoiled(x: torch.Tensor, value: complex) -> torch.Tensor:
    x = x.clone()
    x[0, 0, 0, 0] = value
    return x


_COMPLEX, _NUMBERS = torch.complex(image(), image()), torch.arange(1, 865).reshape(2, 3, 12, 12)
# What is ahead of the layers, an input, and one of which it makes something that is not finite.
MAKES_NAN: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {
    "deviation": (lambda x: x / x.std(), image(), torch.zeros(2, 3, 12, 12)),
    "logarithm": (lambda x: x.log(), image().abs() + 1, _spoiled(image().abs() + 1, 0.0)),
    "overflow": (lambda x: x.exp(), image(), _spoiled(image(), 100.0)),
    "complex": (lambda x: x.real, _COMPLEX, _spoiled(_COMPLEX, complex("nan"))),
    "imaginary": (lambda x: x.abs(), _COMPLEX, _spoiled(_COMPLEX, complex(0, math.inf))),
    "integers": (lambda x: 1 / x, _NUMBERS, _NUMBERS - 1),
    "mask": (lambda x: torch.where(x, 0.5, -math.inf), image() < 9, image() < 0),
}


ENGINES: list[str] = []  # that are offered


@pytest.fixture(params=[(), ("openvino",)], ids=["torch", "openvino"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Regions run on torch's own kernels, or by an engine."""
    ENGINES[:] = request.param
    yield
    ENGINES.clear()


def best() -> str:
    """What runs a region with convolutions, where whatever is right counts as faster."""
    return next(iter(engines_here(ENGINES)), "packed weights, channels_last")


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here: whatever is right counts as faster."""
    monkeypatch.setattr(_choose.Times, "race", lambda self, runs, *rest, **more: _last_wins(runs))


def _last_wins(runs: Any) -> dict[str, float]:
    order = sorted(runs, key=lambda name: name in engines_here(ENGINES))
    seconds = {name: 1.0 / (1 + order.index(name)) for name in runs}
    return {"plan": 0.1, "portable": 1.0} if "plan" in runs else seconds


def net() -> Net:
    torch.manual_seed(1)
    made = Net().eval()
    made.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    return made


def lowered(
    model: nn.Module, *inputs: Any, training: bool = False, **options: Any
) -> LoweredModule:
    model.train(training)
    fast = optimizer.optimize(model, inputs, level=2, engines=tuple(ENGINES), **options)
    assert isinstance(fast, LoweredModule)
    return fast


def plan_of(fast: LoweredModule, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return fast.plan_for(args, kwargs)


def chosen(fast: LoweredModule) -> list[str]:
    return [choice.chosen for choice in fast.report.choices]


def assert_refused(model: nn.Module, *inputs: Any, reason: str) -> None:
    """The model is not lowered, with this remark, and answers as before."""
    fast = lowered(model, *inputs)

    assert any(reason in remark for remark in fast.report.remarks), fast.report.remarks
    assert not fast.report.choices
    assert plan_of(fast, *inputs) is None
    optimizer.check(model, fast, inputs)


@pytest.mark.usefixtures("kernels")
class TestALoweredCall:
    def test_it_is_the_default(self) -> None:
        fast: Any = optimizer.optimize(net(), image(), engines=ENGINES)

        assert chosen(fast) == chosen(lowered(net(), image()))

    def test_it_gives_the_models_answer_in_the_models_layout(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)

        assert plan_of(fast, x) is not None
        assert chosen(fast) == [best()]
        torch.testing.assert_close(fast(x), model(x))
        assert fast(x).stride() == model(x).stride()

    def test_an_image_comes_back_in_the_layout_it_has_in_eager(self) -> None:
        model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), image()
        fast = lowered(model, x)

        assert plan_of(fast, x) is not None
        assert fast(x).stride() == model(x).stride()

    def test_other_sizes_layouts_and_dtypes_run_the_portable_code(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)

        for other in (
            image(1, 3, 12, 12),
            image(2, 3, 9, 7),
            x.to(memory_format=torch.channels_last),
        ):
            assert plan_of(fast, other) is None
            torch.testing.assert_close(fast(other), model(other))
        assert plan_of(fast.double(), x.double()) is None

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_not_finite_is_not_lost(self, value: float) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        assert plan_of(fast, x) is not None
        x[0, 0, 0, 0] = value

        torch.testing.assert_close(fast(x), model(x), equal_nan=True)

    @pytest.mark.parametrize("before", list(MAKES_NAN.values()), ids=list(MAKES_NAN))
    def test_what_is_not_finite_ahead_of_a_region_is_not_lost(self, before: Any) -> None:
        """Found by a blank image, of which a forward divides by the deviation (issue 18)."""
        prepare, x, other = before
        model = Prepared(prepare).eval()
        fast = lowered(model, x)
        torch.testing.assert_close(fast(x), model(x))
        expected = model(other)

        assert chosen(fast) == [best()]
        assert plan_of(fast, other) is not None
        assert not expected.isfinite().all()
        torch.testing.assert_close(fast(other), expected, equal_nan=True)

    @pytest.mark.parametrize("scale", [1e1, 1e25])
    def test_an_overflow_inside_a_region_is_not_lost(self, scale: float) -> None:
        """The sums are infinite, their differences NaN; oneDNN's ReLU makes numbers of that."""
        model, x = Prepared(nn.Identity()).eval(), image()
        with torch.no_grad():
            model.first.weight.mul_(scale)
            model.second.weight.div_(scale)
        fast = lowered(model, x)
        assert plan_of(fast, x) is not None
        huge = x / x.abs().max() * (3e39 / scale)
        expected = model(huge)

        assert huge.isfinite().all()
        assert not expected.isfinite().all()
        torch.testing.assert_close(fast(huge), expected, equal_nan=True)

    def test_outputs_are_not_overwritten_by_the_next_call(self) -> None:
        fast, x = lowered(net(), image()), image()
        first = fast(x)
        kept = first.clone()
        fast(x * 2)

        assert torch.equal(first, kept)

    def test_inputs_are_not_overwritten(self) -> None:
        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Conv2d(3, 3, 3, padding=1)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return F.relu(self.layer(x) + y)

        for layout in (torch.contiguous_format, torch.channels_last):
            x, y = (image().contiguous(memory_format=layout) for _ in range(2))
            fast, kept = lowered(Sum(), x, y), y.clone()
            assert plan_of(fast, x, y) is not None
            fast(x, y)
            assert torch.equal(y, kept)

    def test_rounding_beyond_the_bound_is_judged_by_float64(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(BOUNDS, torch.float32, 0.0)
        fast = lowered(net(), image())

        assert plan_of(fast, image()) is not None
        assert chosen(fast) == [best()]

    def test_outputs_of_any_structure(self) -> None:
        class Structured(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Conv2d(3, 4, 3)

            def forward(self, x: torch.Tensor, flag: bool = False) -> dict[str, Any]:
                y = self.layer(x)
                return {"a": y, "b": [y.relu(), None], "n": x.shape[2], "flag": flag}

        model, x = Structured().eval(), image()
        fast = optimizer.optimize(model, {"x": x, "flag": True}, level=2)
        assert isinstance(fast, LoweredModule)

        assert plan_of(fast, x=x, flag=True) is not None
        answer, expected = fast(x=x, flag=True), model(x, flag=True)
        torch.testing.assert_close(answer["b"][0], expected["b"][0])
        assert (answer["n"], answer["flag"], answer["b"][1]) == (12, True, None)

    @pytest.mark.parametrize(
        "part",
        [lambda y: y[..., -1], lambda y: y[..., ::2], lambda y: y[:, :1].expand(-1, 4, -1, -1)],
        ids=["a column", "every other", "expanded"],
    )
    def test_an_output_with_gaps_lies_as_in_eager(self, part: Any) -> None:
        model, x = Head(lambda y, x: part(torch.relu(y))), image()
        fast = lowered(model, x)

        assert plan_of(fast, x) is not None
        assert fast(x).stride() == model(x).stride()
        torch.testing.assert_close(fast(x), model(x))

    def test_more_calls_can_be_lowered_later(self) -> None:
        model, x, other = net(), image(), image(1, 3, 9, 9)
        fast = lowered(model, x)
        choices = fast.lower(other)

        assert [choice.chosen for choice in choices] == [best()]
        assert plan_of(fast, x) is not None
        assert plan_of(fast, other) is not None
        torch.testing.assert_close(fast(other), model(other))

    def test_many_threads_may_call_it(self) -> None:
        model, x = net(), image()
        fast = pickle.loads(pickle.dumps(lowered(model, x)))  # packs its weights meanwhile
        inputs = [x * scale for scale in range(1, 9)]
        answers: dict[int, torch.Tensor] = {}

        def call(place: int) -> None:
            for _ in range(5):
                answers[place] = fast(inputs[place])

        threads = [threading.Thread(target=call, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for place, each in enumerate(inputs):
            torch.testing.assert_close(answers[place], model(each))

    def test_a_call_of_a_model_that_was_optimized_without_one(self) -> None:
        model = net()
        fast = optimizer.optimize(model, level=2)
        assert isinstance(fast, LoweredModule)

        (choice,) = fast.lower(image())

        assert choice.region == "2 x conv2d, 1 x linear"
        torch.testing.assert_close(fast(image()), model(image()))


@pytest.mark.usefixtures("kernels")
class TestWhatOnlyPortableCodeCanDo:
    def test_gradients_of_an_input(self) -> None:
        model, x = net(), image().requires_grad_()
        lowered(model, x.detach())(x).sum().backward()
        ours = x.grad
        x.grad = None
        model(x).sum().backward()

        assert ours is not None
        torch.testing.assert_close(ours, x.grad)

    def test_vmap(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        batch = torch.stack([x, x * 2])

        torch.testing.assert_close(torch.vmap(fast)(batch), torch.stack([model(x), model(x * 2)]))

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_forward_mode_derivatives(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        _, tangent = torch.func.jvp(fast, (x,), (torch.ones_like(x),))
        _, expected = torch.func.jvp(model, (x,), (torch.ones_like(x),))

        torch.testing.assert_close(tangent, expected)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_dual_numbers(self) -> None:
        fast, x = lowered(net(), image()), image()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert fast.plan_for((dual,), {}) is None

    def test_autocast(self) -> None:
        fast, x = lowered(net(), image()), image()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert fast.plan_for((x,), {}) is None
            assert fast(x).dtype == torch.bfloat16

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_tracing_and_compiling_see_the_layers(self) -> None:
        fast, x = lowered(net(), image()), image()
        traced = torch.jit.trace(fast, x)  # type: ignore[no-untyped-call]
        exported = torch.export.export(fast, (x,))
        compiled = torch.compile(fast, backend="eager")

        assert "conv" in str(traced.inlined_graph)
        assert any("conv" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(compiled(x), fast(x))

    def test_a_mode_that_counts_operators_sees_them(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        fast, x = lowered(net(), image()), image()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            fast(x)

        assert counter.get_total_flops() > 0

    def test_it_can_be_optimized_again(self) -> None:
        model, x = net(), image()
        again = lowered(lowered(model, x), x)

        assert plan_of(again, x) is not None
        torch.testing.assert_close(again(x), model(x))

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


@pytest.mark.usefixtures("kernels")
class TestItsWeights:
    @pytest.mark.parametrize("how", ["loaded", "assigned", "loaded as a part", "replaced", "cast"])
    def test_a_change_of_them_is_packed_anew(self, how: str) -> None:
        fast, x = lowered(net(), image()), image()
        before, doubled = fast(x), {k: v * 2 for k, v in fast.state_dict().items()}
        if how == "loaded as a part":
            parts = {f"0.{name}": value for name, value in doubled.items()}
            nn.Sequential(fast).load_state_dict(parts)
        elif how == "replaced":
            fast.head = nn.Linear(fast.head.in_features, fast.head.out_features)
        elif how == "cast":
            fast.to(torch.bfloat16).to(torch.float32)
        else:
            fast.load_state_dict(doubled, assign=how == "assigned")

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

    @pytest.mark.parametrize("how", ["copied", "pickled", "saved"])
    def test_a_copy_packs_its_own(self, how: str) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        other: Any = {"copied": copy.deepcopy, "pickled": _pickled, "saved": _saved}[how](fast)
        with torch.no_grad():
            other.head.weight.zero_()
            other.head.bias.fill_(3.0)

        for _ in range(3):
            assert torch.equal(other(x), torch.full((2, 5), 3.0))
        assert plan_of(other, x) is not None
        torch.testing.assert_close(fast(x), model(x))

    def test_a_copy_without_regions_needs_no_choice(self) -> None:
        fast = lowered(nn.Sequential(nn.LayerNorm(4), nn.GELU()), torch.randn(3, 4))
        assert not fast.report.choices

        assert plan_of(_pickled(fast), torch.randn(3, 4)) is not None

    def test_another_checkpoint(self) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        torch.manual_seed(5)
        other = Net().eval()
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


@pytest.mark.usefixtures("kernels")
class TestMoving:
    """To another device, which is faked: calls look as if they came from there."""

    @pytest.fixture
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> LoweredModule:
        fast = lowered(net(), image())
        monkeypatch.setattr(_signature, "_device", lambda tensor: "elsewhere")
        return fast

    def test_the_first_call_there_is_lowered(self, fast: LoweredModule) -> None:
        assert plan_of(fast, image()) is not None
        assert plan_of(fast, image()).func is plan_of(fast, image()).func
        assert fast.report.remarks == ()
        torch.testing.assert_close(fast(image()), net()(image()))

    def test_it_is_chosen_anew(self, fast: LoweredModule, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[float] = []
        monkeypatch.setattr(_lowered, "Chooser", lambda *args: made.append(args) or Chooser(*args))
        plan_of(fast, image())
        plan_of(pickle.loads(pickle.dumps(fast)), image())

        again = fast.meta["lowered"][Signature.of((image(),), {}).key]
        assert [args[:2] for args in made] == [(1.0, {}), (0, again)]

    def test_other_sizes_there_are_not(self, fast: LoweredModule) -> None:
        assert plan_of(fast, image(1, 3, 12, 12)) is None

    def test_where_it_cannot_be_the_report_says_why(
        self, fast: LoweredModule, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Times, "race", lambda self, runs, *r, **m: dict.fromkeys(runs, 1.0))
        for each in (fast, fast, pickle.loads(pickle.dumps(fast))):
            assert plan_of(each, image()) is None
            torch.testing.assert_close(each(image()), net()(image()))

        reason = "on elsewhere: such a call is not lowered: it is not faster so: 1.00 of the time"
        assert fast.report.remarks == (reason,)

    def test_what_was_packed_is_let_go(self) -> None:
        fast = lowered(net(), image())
        packed = weakref.ref(fast._plans[Signature.of((image(),), {}).key])  # type: ignore[union-attr]
        fast.to("cpu")

        assert packed() is None
        assert plan_of(fast, image()) is not None


def _pickled(module: nn.Module) -> Any:
    with torch.no_grad():
        return pickle.loads(pickle.dumps(module))


def _saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Head(nn.Module):
    """A convolution, and what a test does with its result."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.layer(x), x)


class Masked(nn.Module):
    """No region: each of its operators is called as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, -x)


def test_a_call_that_is_lowered_without_a_region_is_told() -> None:
    fast = lowered(Masked(), image())

    assert plan_of(fast, image()) is not None
    assert fast.report.remarks == ("calls like the example run as a straight line of operators",)


class TestWhatIsNotLowered:
    def test_without_example_inputs(self) -> None:
        fast = optimizer.optimize(net(), level=2)

        assert "not lowered: there are no example inputs" in fast.report.remarks

    def test_random_numbers(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout())

        with pytest.warns(UserWarning, match="training"):
            fast = lowered(model, image(), training=True)
        assert any("random" in remark for remark in fast.report.remarks)

    def test_statistics_that_a_call_updates(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        with pytest.warns(UserWarning, match="training"):
            fast = lowered(model, image(), training=True)
        assert any("writes an attribute" in remark for remark in fast.report.remarks)

    def test_an_input_with_gaps(self) -> None:
        assert_refused(net(), image(2, 3, 12, 24)[..., ::2], reason="gaps")

    def test_lowering_by_hand_says_why_not(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout())
        with pytest.warns(UserWarning, match="training"):
            fast = lowered(model, image(), training=True)

        with pytest.raises(optimizer.InputError, match="random"):
            fast.lower(image())

    def test_a_call_of_a_module_that_cannot_be_looked_at(self) -> None:
        fast = lowered(net(), image())
        fast.lock = threading.Lock()

        with pytest.raises(optimizer.InputError, match="not lowered: the model cannot be copied"):
            fast.lower(image(3, 3, 12, 12))

    def test_a_call_of_other_sizes_that_trains(self) -> None:
        class Trains(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(3))
                self.register_buffer("var", torch.ones(3))
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: torch.Tensor) -> Any:
                return self.conv(F.batch_norm(x, self.mean, self.var, training=x.size(0) > 2))

        fast = lowered(Trains(), image())

        with pytest.raises(optimizer.InputError, match="writes an attribute"):
            fast.lower(image(3, 3, 12, 12))
        assert not fast.mean.any()


def wrong(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class Wrong(nn.Module):
        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(each * 1.01 for each in region(*given))

    return Wrong()


def stale(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class Stale(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return region(*inputs)

    return Stale()


def greedy(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class Greedy(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            outputs = region(*given)
            given[0].zero_()
            return outputs

    return Greedy()


def half(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class Half(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return tuple(each.half() for each in region(*given))

    return Half()


def not_finite(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class NotFinite(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return tuple(each / 0 for each in region(*given))

    return NotFinite()


def raising(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    raise RuntimeError("no such kernel")


def once(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    class Once(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            raise RuntimeError

    return Once()


class TestACandidateThatIsNoGood:
    @pytest.mark.parametrize(
        ("candidate", "reason"),
        [
            (wrong, "relative error"),
            (stale, "relative error"),
            (greedy, "it overwrites its inputs"),
            (half, "has dtype torch.float16"),
            (raising, "RuntimeError: no such kernel"),
            (not_finite, "NaN or infinities are elsewhere"),
            (once, "RuntimeError:"),
        ],
    )
    def test_it_is_rejected_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, candidate: Any, reason: str
    ) -> None:
        monkeypatch.setitem(CANDIDATES, "packed weights, channels_last", candidate)
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
        name = "packed weights, channels_last"
        monkeypatch.setitem(CANDIDATES, name, lambda region, inputs: copy.deepcopy(region))
        x = image()
        x[0, 0, 0, 0] = math.nan
        report = lowered(net(), x).report
        (choice,) = report.choices or report.tried

        assert name in choice.seconds
        assert not choice.rejected

    def test_it_is_told_also_where_the_call_is_not_lowered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The report said only that it is not faster, and not that the answer was wrong."""
        monkeypatch.setitem(CANDIDATES, "packed weights, channels_last", wrong)
        monkeypatch.setattr(Times, "race", lambda self, runs, *r, **m: dict.fromkeys(runs, 1.0))
        report = lowered(net(), image()).report
        (tried,) = report.tried
        (reason,) = tried.rejected.values()

        assert not report.choices
        assert reason.startswith("output[0]: relative error")
        assert "may run, none of them lowered" in str(report)
        assert f"packed weights, channels_last  {tried.region}  rejected: {reason}" in str(report)
        assert reason in report.to_html()
        assert reason in json.dumps(report.to_dict())

    def test_a_decision_for_it_is_not_trusted_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = net(), image()
        fast = lowered(model, x)
        other = pickle.loads(pickle.dumps(fast))
        monkeypatch.setitem(CANDIDATES, "packed weights, channels_last", wrong)

        torch.testing.assert_close(other(x), model(x))
        assert plan_of(other, x) is None

    def test_without_onednn_there_is_channels_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_packed, "is_available", lambda: False)
        model, x = net(), image()
        fast = lowered(model, x)

        assert chosen(fast) == ["channels_last"]
        torch.testing.assert_close(fast(x), model(x))

    def test_a_view_of_an_image_is_lowered(self) -> None:
        model, x = Head(lambda y, x: y.view(x.size(0), -1).relu()).eval(), image()
        fast = lowered(model, x)

        assert chosen(fast) == [best()]
        optimizer.check(model, fast, x)

    @pytest.mark.parametrize("seconds", [0.0, 1.0])
    def test_a_view_of_bits_may_need_the_layout(self, seconds: float) -> None:
        model = Head(lambda y, x: y.view(torch.float32).relu()).eval().double()
        fast = lowered(model, image().double(), tune_seconds=seconds)

        assert "channels_last" not in chosen(fast)
        optimizer.check(model, fast, image().double())

    def test_float64_is_none_of_its_business(self) -> None:
        model, x = net().double(), image().double()

        assert "packed weights, channels_last" not in chosen(lowered(model, x))

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
            return _last_wins(runs)

        monkeypatch.setattr(LoweredModule, "plan_for", counted)
        monkeypatch.setattr(_choose.Times, "race", race)
        lowered(net(), image())

        assert sum(each is not None for each in found) == 1

    @pytest.mark.parametrize("seconds", [0.975, 0.985])
    def test_it_must_be_faster_than_the_region_by_more_than_noise(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
            return dict.fromkeys(runs, seconds) | {AS_IT_IS: 1.0, "plan": 0.1, "portable": 1.0}

        monkeypatch.setattr(_choose.Times, "race", race)
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

    def test_without_tuning_it_must_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CANDIDATES, "packed weights, channels_last", once)
        fast = lowered(net(), image(), tune_seconds=0)
        (tried,) = fast.report.tried

        assert tried.chosen == AS_IT_IS
        assert [*tried.rejected.values()] == ["RuntimeError: "]

    def test_it_must_be_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slow(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
            return dict.fromkeys(runs, 1.0)

        monkeypatch.setattr(_choose.Times, "race", slow)
        assert_refused(net(), image(), reason="not faster")


@pytest.mark.usefixtures("kernels")
class TestDecisions:
    def test_without_tuning_nothing_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_choose.Times, "race", None)
        fast = lowered(net(), image(), tune_seconds=0)

        assert chosen(fast) == [best()]
        assert not fast.report.choices[0].seconds

    @pytest.mark.parametrize("seconds", [-1, float("nan"), "1"])
    def test_seconds_must_be_seconds(self, seconds: Any) -> None:
        with pytest.raises(optimizer.InputError, match="tune_seconds"):
            optimizer.optimize(net(), image(), level=2, tune_seconds=seconds)


def test_without_tuning_products_run_as_they_are() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.ones(3, 4)
    fast = lowered(model, x, tune_seconds=0)

    assert plan_of(fast, x) is None
    assert fast.report.remarks == ("such a call is not lowered: no region of it can be",)


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(1, 1, 8, 7).transpose(2, 3), torch.randn(3, 1).expand(3, 4), torch.randn(9)[::2]],
    ids=["transposed", "expanded", "with gaps"],
)
def test_other_values_lie_as_the_given_ones(tensor: torch.Tensor) -> None:
    other = varied(tensor)

    assert (other.shape, other.stride()) == (tensor.shape, tensor.stride())
    assert not torch.equal(other, tensor)


def recorded(function: Any, *inputs: torch.Tensor, held: Sequence[torch.Tensor] = ()) -> Any:
    return straight_line(function, held, Call(inputs, {})).module


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv2d(4, 4, 1)], ids=["linear", "conv"])
def test_a_gelu_by_tanh_is_not_taken_for_one_by_erf(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.GELU("tanh")).eval()
    x = 20 * torch.randn(512, 4, 4, 4, generator=torch.Generator().manual_seed(0))

    fast = lowered(model, x)

    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        assert (fast(x) - expected).abs().max() < 1e-4  # it was 5e-4, which the check allows


class TestStraightLine:
    def test_a_power_written_as_an_operator(self) -> None:
        model = Head(lambda y, x: y**2)
        fast = lowered(model, image())

        assert plan_of(fast, image()) is not None
        optimizer.check(model, fast, image())

    def test_sizes_are_numbers(self) -> None:
        code = recorded(lambda x: x.reshape(x.shape[0], -1) * x.dim(), torch.ones(2, 3, 4)).code

        assert "2, -1" in code
        assert "size" not in code
        assert ".shape" not in code

    def test_what_no_input_reaches_is_a_constant(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            mask = x.new_zeros(x.shape)
            mask[0] = 1
            return x * (mask + torch.arange(3)).softmax(-1)

        module, x = recorded(function, torch.ones(2, 3)), torch.randn(2, 3)

        assert [name_of_call(n) for n in module.graph.nodes if n.op.startswith("call")] == ["mul"]
        torch.testing.assert_close(module(x)[0], function(x))

    @pytest.mark.parametrize(
        "write",
        [
            lambda y: y.relu_(),
            lambda y: F.relu(y, inplace=True),
            lambda y: F.relu(y, True),
            lambda y: torch.relu_(y),
            lambda y: y.add_(1).mul_(2),
            lambda y: y.__iadd__(2),
            lambda y: torch.add(y, y, out=y),
            lambda y: y.masked_fill_(y > 0, 3.0),
        ],
    )
    def test_a_write_makes_a_new_tensor(self, write: Any) -> None:
        def function(x: torch.Tensor) -> Any:
            y = x * 2
            write(y)
            return y + 1

        x = torch.randn(4)
        module = recorded(function, x)
        first = module(x)[0]

        assert torch.equal(first, function(x))
        assert torch.equal(module(x)[0], first)
        assert not any(name_of_call(node).endswith("_") for node in module.graph.nodes)

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda x: x * x.sum().item(), "depends on values"),
            (lambda x: x if x.sum() > 0 else -x, "depends on values"),
            (lambda x: x * int(x.sum()), "depends on values"),
            (lambda x: x + torch.from_numpy(x.numpy()), "depends on values"),
            (lambda x: x[x > 0].reshape(-1, 1), "a size depends on values"),
            (lambda x: x * x.nonzero().shape[0], "a size depends on values"),
            (lambda x: x * 2 if torch.equal(x, x) else x, "depends on values"),
            (lambda x: x + _HIDDEN, "cannot be followed"),
            (lambda x: Opaque(x * 2), "object of its own"),
        ],
    )
    def test_what_it_cannot_repeat(self, function: Any, reason: str) -> None:
        with pytest.raises(NotStraightLineError, match=reason):
            recorded(function, torch.ones(3))

    def test_one_tensor_given_twice_is_two_inputs(self) -> None:
        x = torch.ones(3)
        module = recorded(lambda a, b: a - 2 * b, x, x)

        assert torch.equal(module(x * 5, x)[0], x * 3)

    def test_self_attention_is_looked_into(self) -> None:
        layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        x = torch.randn(1, 5, 8)
        module = recorded(lambda x: layer(x, x, x)[0], x, held=list(layer.parameters()))
        called = set(map(name_of_call, module.graph.nodes))

        assert {"linear", "scaled_dot_product_attention"} <= called or "bmm" in called
        torch.testing.assert_close(module(x)[0], layer(x, x, x)[0])


_HIDDEN = torch.ones(3)


def _written_view_of_what_is_not_read(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x + 1, x])[:, :2].relu_() * 2


def _two_views_one_written_after_the_other(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    first = y[:, :1]
    second = first[:, :, :2]
    return second.neg_().mul_(3)


@pytest.mark.parametrize(
    "function", [_written_view_of_what_is_not_read, _two_views_one_written_after_the_other]
)
def test_a_view_may_be_written_where_nothing_else_reads_its_memory(function: Any) -> None:
    """GhostNet cuts a sum and applies a ReLU in place (issue 19)."""
    x = image()
    module = recorded(function, x)

    torch.testing.assert_close(*module(x), function(x))
    torch.testing.assert_close(*module(-x), function(-x))


class Opaque:
    """An output that is no pytree."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("after", [torch.add, torch.mul, lambda a, b: torch.relu(a) + b])
def test_a_sum_of_two_convolutions_and_more_does_not_end_the_process(after: Any) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
            self.last = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(after(self.one(x) + self.two(x), x))  # type: ignore[no-any-return]

    model, x = Branches().eval(), torch.randn(1, 3, 8, 8)

    fast = lowered(model, x, tune_seconds=0)

    torch.testing.assert_close(fast(x), model(x))


def test_weights_that_come_while_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, of which a wrapper of what packs them plays the part."""
    fast, other = lowered(net(), image()), net()
    loaded = {name: value * 2 for name, value in fast.state_dict().items()}
    make_plan = vars(_lowered)["make_plan"]

    def loading(*args: Any) -> Any:
        plan = make_plan(*args)
        monkeypatch.undo()
        fast.load_state_dict(loaded)
        return plan

    fast = copy.deepcopy(fast)  # whose weights are packed at the first call
    monkeypatch.setattr(_lowered, "make_plan", loading)
    fast(image())

    expected = fast.run_portable(image())
    torch.testing.assert_close(fast(image()), expected)
    assert not torch.allclose(expected, other(image()))
