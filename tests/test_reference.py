"""The answer that a result is compared with is the caller's own model's, and all of it counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from models._torchvision_import import import_torchvision
from optimizer import CaptureError, EquivalenceError, OptimizerWarning
from optimizer.testing import untouched
from optimizer.toolkit import call, insert_function, rewrite

X = torch.linspace(-2, 2, 12).view(3, 4)
LEVELS = (0, 1, 2)


def randomize(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for place, tensor in enumerate((*model.parameters(), *model.buffers())):
            if tensor.is_floating_point():
                tensor.copy_(
                    torch.linspace(0.5, 1.5, tensor.numel()).view_as(tensor) + 0.01 * place
                )
    return model


class Block(nn.Module):
    """A layer, a norm and a dropout, times a number that it holds."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.times = nn.Dropout(0.5), times

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x))) * self.times


class ForgetsTheMode(Block):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        copied = type(self)(self.times)
        copied.load_state_dict(self.state_dict())
        return copied


class ForgetsAnAttribute(Block):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied.eval()


class ForgetsItsWeights(Block):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        return type(self)(self.times).eval()


class IsItsOwnCopy(Block):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        return self


class IsPickledEmpty(Block):
    def __reduce__(self) -> Any:
        return (type(self), ())


class Settings:
    """Of a model, whose copies have the defaults."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __deepcopy__(self, memo: Any) -> Settings:
        return Settings()


class HoldsSettings(Block):
    def __init__(self, times: float = 1.0) -> None:
        super().__init__(times)
        self.settings = Settings(5.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.factor


class Holds(Block):
    """One of the others, inside."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.inner = IsItsOwnCopy(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x))


def hooked_graph() -> nn.Module:
    module = fx.symbolic_trace(Block(2.0).eval())
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return module


BAD_COPIES: dict[str, Callable[[], nn.Module]] = {
    "a copy that forgets the mode": lambda: ForgetsTheMode(2.0),
    "a copy that forgets an attribute": lambda: ForgetsAnAttribute(2.0),
    "a copy with other weights": lambda: ForgetsItsWeights(2.0),
    "a copy that is the model": lambda: IsItsOwnCopy(2.0),
    "a pickle without state": lambda: IsPickledEmpty(2.0),
    "an attribute whose copy is another": lambda: HoldsSettings(2.0),
    "a part that is its own copy": Holds,
    "a graph with a hook, which fx does not copy": hooked_graph,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BAD_COPIES)
def test_a_model_whose_copy_is_another_model_keeps_its_answer(name: str, level: int) -> None:
    model = randomize(BAD_COPIES[name]()).eval()
    expected = model(X)

    with untouched(model):
        fast = optimizer.optimize(model, X, level=level, tune_seconds=0)

    torch.testing.assert_close(fast(X), expected)
    assert "copy" in str(fast.report) or name == "a copy that forgets the mode"


def test_check_refuses_a_model_whose_copy_is_another() -> None:
    model = randomize(HoldsSettings(2.0)).eval()
    wrong = optimizer.optimize(model, X, level=1, check=None)

    with untouched(model), pytest.raises(CaptureError, match=r"has another .factor."):
        optimizer.check(model, wrong, X)


def test_a_graph_of_torchvision_whose_copies_train() -> None:
    """Source: torchvision issue 8634, pytorch issue 82598."""
    import_torchvision()
    from torchvision.models import resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    model = create_feature_extractor(randomize(resnet18(weights=None)), {"layer1": "y"}).eval()
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    fast = optimizer.optimize(model, image, level=1)

    assert fast.report.counts()["fold_affine"] > 0
    torch.testing.assert_close(fast(image)["y"], model(image)["y"])


class Written(Block):
    """Counts its calls in a buffer: it is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Noted(Block):
    """Notes its inputs in Python: it is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(x.shape)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Written, Noted, Block])
def test_no_trace_is_left_in_the_model(kind: Callable[[], nn.Module]) -> None:
    model = randomize(kind()).eval()

    with untouched(model):
        fast = optimizer.optimize(model, X, level=1)
        optimizer.check(model, fast, X)


def test_a_hook_runs_on_copies_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model, met = randomize(Block()).eval(), list[nn.Module]()

    def meet(module: nn.Module, *_: Any) -> None:
        met.append(module)
        print(id(module))

    model.norm.register_forward_hook(meet)
    optimizer.check(model, optimizer.optimize(model, X), X)

    printed = capsys.readouterr().out.split()
    assert printed
    assert str(id(model.norm)) not in printed
    assert met == []


def test_the_snapshot_counts_where_the_weights_change_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = randomize(Block()).eval()
    before = model(X)
    snapshot = vars(optimizer._optimize)["snapshot"]

    def trained(given: nn.Module) -> Any:
        found = snapshot(given)
        with torch.no_grad():
            given.layer.weight.mul_(3.0)  # by another thread
        return found

    monkeypatch.setattr(optimizer._optimize, "snapshot", trained)
    fast = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(fast(X), before)
    assert fast.report.counts()["fold_affine"] > 0


class Then(nn.Module):
    """A convolution and a norm, which fold, and what follows."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.then = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.norm(self.conv(x)))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda y: y.to_sparse(),
    "compressed rows": lambda y: y[0, 0].to_sparse_csr(),
    "quantized": lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.quint8),
    "oneDNN's": lambda y: y.to_mkldnn(),
    "complex": torch.fft.fft,
    "a number of numpy": lambda y: y.sum().detach().numpy(),
    "an array": lambda y: y.detach().numpy(),
    "a number": lambda y: (y, y.sum().item()),
    "NaN": lambda y: (y, float("nan")),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_float_tensors_are_compared(
    name: str, level: int, last_candidate_wins: None
) -> None:
    model = randomize(Then(OUTPUTS[name])).eval()
    image = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)

    fast = optimizer.optimize(model, image, level=level, engines=())
    optimizer.check(model, fast, image)
    model.norm.bias.data += 1

    assert fast.report.counts()["fold_affine"] == 1
    with pytest.raises(EquivalenceError):
        optimizer.check(model, fast, image)


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_a_nested_output_is_compared_by_its_rows() -> None:
    model, other = (
        randomize(Opaque(lambda y: torch.nested.nested_tensor([y[:2], y[2:]]))) for _ in "12"
    )
    other.layer.bias.data[0] += 1

    optimizer.check(model, model, X)
    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, X)


class Opaque(nn.Module):
    """What its forward makes is of another kind than tensors."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.layer = make, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def test_a_distribution_is_compared_by_its_tensors() -> None:
    model = randomize(Opaque(lambda y: torch.distributions.Normal(y, 1.0, validate_args=False)))
    fast = optimizer.optimize(model.eval(), X)

    optimizer.check(model, fast, X)
    model.layer.bias.data += 1
    with pytest.raises(EquivalenceError, match="loc"):
        optimizer.check(model, fast, X)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda y: (row for row in y.tolist()), "generator"), (lambda y: lambda: y, "function")],
)
def test_what_cannot_be_compared_is_left_with_a_remark(
    make: Callable[[Tensor], Any], kind: str
) -> None:
    model = Opaque(make).eval()
    fast = optimizer.optimize(model, X)

    with pytest.warns(OptimizerWarning, match=f"is a {kind}, which cannot be compared"):
        optimizer.check(model, fast, X)


CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda y: y.argmax(1),
    "argmax, kept and cast": lambda y: y.argmax(1, keepdim=True).int(),
    "max": lambda y: y.max(1),
    "sort": lambda y: y.flatten(1).sort(1),
    "topk": lambda y: y.flatten(2).topk(9, 2),
    "a mask": lambda y: y > 0.1,
    "a mask of two": lambda y: y[:, :1] >= y[:, 1:],
    "bytes": lambda y: (y * 40 + 128).round().clamp(0, 255).to(torch.uint8),
    "integers": lambda y: (y * 100).long(),
    "rounded": lambda y: (y * 100).round(),
    "the place of the largest": lambda y: (y, y.argmax().item()),
}


@pytest.fixture(scope="module")
def many_pixels() -> Tensor:
    return torch.randn(4, 3, 512, 512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CHOICES)
def test_what_rounding_chooses_is_no_difference(name: str, many_pixels: Tensor) -> None:
    model = randomize(Then(CHOICES[name])).eval()

    fast = optimizer.optimize(model, many_pixels, level=1)

    assert fast.report.counts()["fold_affine"] >= 1
    assert "rolled back" not in str(fast.report)


@pytest.mark.parametrize("name", CHOICES)
def test_another_choice_is_a_difference(name: str, many_pixels: Tensor) -> None:
    model, other = (randomize(Then(CHOICES[name])).eval() for _ in range(2))
    other.norm.weight.data[0] *= 1.01

    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, many_pixels[:1])


@pytest.mark.parametrize("wrong", [2**62 + 1, -(2**62), 2**62 - 1])
def test_large_integers_are_compared_as_they_are(wrong: int) -> None:
    right, other = (Opaque(lambda y, n=n: torch.full((2,), n)) for n in (2**62, wrong))

    with pytest.raises(EquivalenceError):
        optimizer.check(right.eval(), other.eval(), X)


def replaced(node: fx.Node, function: Callable[..., Any], *more: Any) -> fx.Node:
    return insert_function(node, function, (node.args[0], *more))


@rewrite(call(torch.neg, name="negation"), numerics="exact", phase="simplify")
def subtract(negation: fx.Node) -> fx.Node:
    """Subtract from zero, which is wrong for zero: it has another sign."""
    return replaced(negation, torch.rsub, 0.0)


@rewrite(call(torch.neg, name="negation"), numerics="exact", phase="simplify")
def spell_long(negation: fx.Node) -> fx.Node:
    """Spell it as `torch.negative`."""
    return replaced(negation, torch.negative)


@rewrite(call(torch.negative, name="negation"), numerics="exact", phase="fuse")
def spell_short(negation: fx.Node) -> fx.Node:
    """Spell it as `torch.neg`, in another phase."""
    return replaced(negation, torch.neg)


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(x)


def test_the_sign_of_a_zero_counts_at_level_0() -> None:
    zeros = torch.tensor([0.0, -0.0, 1.0])
    with pytest.warns(OptimizerWarning, match="pass subtract changed the answer"):
        fast = optimizer.optimize(Negated().eval(), zeros, level=0, only=[subtract])

    assert fast(zeros).signbit().tolist() == [True, False, True]


class UntiesItsCopies(nn.Module):
    """Two names for one layer's weights, and two layers in the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(self.second(self.first(x)))

    def __deepcopy__(self, memo: Any) -> nn.Module:
        copied = type(self)()
        copied.second = nn.Linear(4, 4)
        copied.load_state_dict(self.state_dict())
        return copied.eval()


@rewrite(call(torch.neg, name="negation"), numerics="exact", phase="simplify")
def lose_the_sign(negation: fx.Node) -> fx.Node:
    """Take the absolute value, which is wrong."""
    return replaced(negation, torch.abs)


def test_a_fault_is_found_where_a_copy_has_more_tensors() -> None:
    model = UntiesItsCopies().eval()

    with pytest.warns(OptimizerWarning, match="pass lose_the_sign changed the answer"):
        fast = optimizer.optimize(model, X, level=1, only=[lose_the_sign])

    torch.testing.assert_close(fast(X), model(X))


def test_phases_that_undo_one_another_are_cut_off() -> None:
    with pytest.warns(OptimizerWarning, match="spell_.* and another phase undo one another"):
        fast = optimizer.optimize(Negated().eval(), X, level=0, only=[spell_long, spell_short])

    assert torch.equal(fast(X), -X)
    assert "rolled back" in str(fast.report)


def test_the_finished_module_is_compared_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault behind the passes, of which none is to blame: the model is left as it is."""
    made = optimizer.OptimizedModule.of.__func__

    def faulty(kind: Any, module: fx.GraphModule, *rest: Any) -> Any:
        for node in module.graph.find_nodes(op="call_function", target=torch.neg):
            node.target = torch.abs
        return made(kind, module, *rest)

    monkeypatch.setattr(optimizer.OptimizedModule, "of", classmethod(faulty))
    fast = optimizer.optimize(Negated().eval(), X, level=1)

    assert torch.equal(fast(X), -X)
    assert "the optimized model gives another answer" in str(fast.report)


@functools.wraps(torch.relu)
def remember(x: Tensor) -> Tensor:
    SEEN.append(x.shape)
    return torch.relu(x)


SEEN: list[Any] = []
fx.wrap("remember")


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        remember(x)
        return x * 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_function_that_calls_itself_one_of_torchs_is_the_users(level: int) -> None:
    fast = optimizer.optimize(Remembers().eval(), X, level=level)
    SEEN.clear()
    fast(X)

    assert [X.shape] == SEEN


def test_where_both_overflow_the_finite_values_count() -> None:
    """In half precision a million is infinite, in the second opinion it is not."""
    make = lambda y: torch.stack([y, y * 1e3 * 1e3])  # noqa: E731
    model, other = (randomize(Opaque(make).eval()).half() for _ in range(2))
    other.layer.bias.data[0] += 1

    assert model(X.half()).isinf().any()
    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, X.half())
