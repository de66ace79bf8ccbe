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
from tests.level_2 import Then
from tests.single_pass import Forward, function_of, rows, texts

X = torch.linspace(-2, 2, 12).view(3, 4)
LEVELS = (0, 1, 2)


def randomize(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for place, tensor in enumerate((*model.parameters(), *model.buffers())):
            if tensor.is_floating_point():
                values = torch.linspace(0.5, 1.5, tensor.numel()) + 0.01 * place
                tensor.copy_(values.view_as(tensor))
    return model.eval()


class Block(nn.Module):
    """A layer, a norm and a dropout, times a number that it holds."""

    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.times = nn.Dropout(0.5), times

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x))) * self.times


def copied_as(copied: Callable[[Any], nn.Module], times: float = 2.0) -> nn.Module:
    """A block that a function copies."""
    methods = {"__deepcopy__": lambda block, memo: copied(block)}
    return type("Copied", (Block,), methods)(times)  # type: ignore[no-any-return]


def loaded(copied: nn.Module, block: nn.Module) -> nn.Module:
    copied.load_state_dict(block.state_dict())
    return copied


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


def hooked_graph() -> nn.Module:
    module = fx.symbolic_trace(Block(2.0).eval())
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return module


BAD_COPIES: dict[str, Callable[[], nn.Module]] = {
    "forgets the mode": lambda: copied_as(lambda block: loaded(type(block)(block.times), block)),
    "forgets an attribute": lambda: copied_as(lambda block: loaded(type(block)(), block).eval()),
    "has other weights": lambda: copied_as(lambda block: type(block)(block.times).eval()),
    "is the model": lambda: copied_as(lambda block: block),
    "a part that is its own copy": lambda: nn.Sequential(Block(), copied_as(lambda block: block)),
    "a pickle without state": lambda: IsPickledEmpty(2.0),
    "an attribute whose copy is another": lambda: HoldsSettings(2.0),
    "a graph with a hook, which fx does not copy": hooked_graph,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BAD_COPIES)
def test_a_model_whose_copy_is_another_model_keeps_its_answer(name: str, level: int) -> None:
    model = randomize(BAD_COPIES[name]())
    expected = model(X)

    with untouched(model):
        fast = optimizer.optimize(model, X, level=level, tune_seconds=0)

    torch.testing.assert_close(fast(X), expected)
    assert "copy" in str(fast.report) or name == "forgets the mode"


def test_check_refuses_a_model_whose_copy_is_another() -> None:
    model = randomize(HoldsSettings(2.0))
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


def noted() -> nn.Module:
    model = Forward("m.notes.append(x.shape); return m.block(x)", block=Block())
    model.notes = []
    return model


@pytest.mark.parametrize("make", [
    Block, noted,
    lambda: Forward("m.calls.add_(1); return m.block(x)", block=Block(), calls=torch.zeros(())),
], ids=["nothing", "a list", "a buffer"])  # fmt: skip
def test_no_trace_is_left_in_a_model_that_notes(make: Callable[[], nn.Module]) -> None:
    model = randomize(make())

    with untouched(model):
        fast = optimizer.optimize(model, X, level=1)
        optimizer.check(model, fast, X)


def test_a_hook_runs_on_copies_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model, met = randomize(Block()), list[nn.Module]()

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
    model = randomize(Block())
    before, snapshot = model(X), vars(optimizer._optimize)["snapshot"]

    def trained(given: nn.Module) -> Any:
        found = snapshot(given)
        given.layer.weight.data.mul_(3.0)  # by another thread
        return found

    monkeypatch.setattr(optimizer._optimize, "snapshot", trained)
    fast = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(fast(X), before)
    assert fast.report.counts()["fold_affine"] > 0


def folded_then(text: str) -> nn.Module:
    """A convolution and a norm, which fold, and what follows."""
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    return randomize(Then(function_of("y", text), nn.Sequential(*layers)))


OUTPUTS = """
    y.to_sparse(); y[0, 0].to_sparse_csr(); torch.quantize_per_tensor(y, 0.1, 0, torch.quint8);
    y.to_mkldnn(); torch.fft.fft(y); torch.fft.fft(y.double()).conj(); y.sum().detach().numpy();
    y.detach().numpy(); (y, y.sum().item()); (y, math.nan)
"""


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("text", texts(OUTPUTS))
def test_outputs_that_are_no_float_tensors_are_compared(
    text: str, level: int, last_candidate_wins: None
) -> None:
    model, image = folded_then(text), torch.linspace(-1, 1, 216).view(2, 3, 6, 6)

    fast = optimizer.optimize(model, image, level=level, engines=())
    optimizer.check(model, fast, image)
    model.layer[1].bias.data += 1

    assert fast.report.counts()["fold_affine"] == 1
    with pytest.raises(EquivalenceError):
        optimizer.check(model, fast, image)


def rows_then(make: Callable[[Tensor], Any]) -> nn.Module:
    """What its forward makes is of another kind than tensors."""
    return randomize(Then(make, nn.Linear(4, 4)))


def halves(y: Tensor) -> Any:
    return torch.nested.nested_tensor([y[:2], y[2:]])


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize(
    ("make", "words"),
    [(halves, ""), (lambda y: torch.distributions.Normal(y, 1.0, validate_args=False), "loc")],
    ids=["nested", "a distribution"],
)
def test_what_holds_tensors_is_compared_by_them(make: Callable[[Tensor], Any], words: str) -> None:
    model, other = rows_then(make), rows_then(make)
    fast = model if make is halves else optimizer.optimize(model, X)
    other.layer.bias.data[0] += 1

    optimizer.check(model, fast, X)
    with pytest.raises(EquivalenceError, match=words or None):
        optimizer.check(other, fast, X)


def test_where_both_overflow_the_finite_values_count() -> None:
    """In half precision a million is infinite, in the second opinion it is not."""
    model, other = (rows_then(lambda y: torch.stack([y, y * 1e3 * 1e3])).half() for _ in range(2))
    other.layer.bias.data[0] += 1

    assert model(X.half()).isinf().any()
    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, X.half())


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda y: (row for row in y.tolist()), "generator"), (lambda y: lambda: y, "function")],
)
def test_what_cannot_be_compared_is_left_with_a_remark(
    make: Callable[[Tensor], Any], kind: str
) -> None:
    model = rows_then(make)
    fast = optimizer.optimize(model, X)

    with pytest.warns(OptimizerWarning, match=f"is a {kind}, which cannot be compared"):
        optimizer.check(model, fast, X)


@pytest.mark.parametrize("wrong", [2**62 + 1, -(2**62), 2**62 - 1])
def test_large_integers_are_compared_as_they_are(wrong: int) -> None:
    right, other = (rows_then(lambda y, n=n: torch.full((2,), n)) for n in (2**62, wrong))

    with pytest.raises(EquivalenceError):
        optimizer.check(right, other, X)


CHOICES = """
    y.argmax(1); y.argmax(1, keepdim=True).int(); y.max(1); y.flatten(1).sort(1);
    y.flatten(2).topk(9, 2); y > 0.1; y[:, :1] >= y[:, 1:]; (y * 100).long(); (y * 100).round();
    (y * 40 + 128).round().clamp(0, 255).to(torch.uint8); (y, y.argmax().item())
"""


@pytest.mark.parametrize("text", texts(CHOICES))
def test_what_rounding_chooses_is_no_difference_and_another_choice_is(text: str) -> None:
    pixels = torch.randn(4, 3, 512, 512, generator=torch.Generator().manual_seed(0))
    model, other = (folded_then(text) for _ in range(2))
    other.layer[1].weight.data[0] *= 1.01

    fast = optimizer.optimize(model, pixels, level=1)

    assert fast.report.counts()["fold_affine"] >= 1
    assert "rolled back" not in str(fast.report)
    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, pixels[:1])


NEGATED = Forward("torch.neg(x)").eval()


def respelled(name: str, spelling: Any, function: Any, *more: Any, phase: Any = "simplify") -> Any:
    """A pass that puts one function in the place of another."""

    def replace(negation: fx.Node) -> fx.Node:
        """Call another function."""
        return insert_function(negation, function, (negation.args[0], *more))

    replace.__name__ = name
    return rewrite(call(spelling, name="negation"), numerics="exact", phase=phase)(replace)


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
        return loaded(copied, self).eval()


ZEROS = torch.tensor([0.0, -0.0, 1.0])


@rows(
    "model x level passes words",
    {
        "the sign of a zero": (NEGATED, ZEROS, 0, [respelled("sub", torch.neg, torch.rsub, 0.0)],
                               "pass sub changed the answer"),
        "a copy of more tensors": (UntiesItsCopies().eval(), X, 1, [
            respelled("lose", torch.neg, torch.abs)], "pass lose changed the answer"),
        "phases that undo one another": (NEGATED, X, 0, [
            respelled("spell_long", torch.neg, torch.negative),
            respelled("spell_short", torch.negative, torch.neg, phase="fuse"),
        ], "spell_.* and another phase undo one another"),
    },
)  # fmt: skip
def test_a_faulty_pass_is_rolled_back(
    model: nn.Module, x: Tensor, level: int, passes: list[Any], words: str
) -> None:
    with pytest.warns(OptimizerWarning, match=words):
        fast = optimizer.optimize(model, x, level=level, only=passes)

    torch.testing.assert_close(fast(x), model(x))
    assert torch.equal(fast(x).signbit(), model(x).signbit())
    assert model is not NEGATED or "rolled back" in str(fast.report)


def test_the_finished_module_is_compared_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault behind the passes, of which none is to blame: the model is left as it is."""
    made = optimizer.OptimizedModule.of.__func__

    def faulty(kind: Any, module: fx.GraphModule, *rest: Any) -> Any:
        for node in module.graph.find_nodes(op="call_function", target=torch.neg):
            node.target = torch.abs
        return made(kind, module, *rest)

    monkeypatch.setattr(optimizer.OptimizedModule, "of", classmethod(faulty))
    fast = optimizer.optimize(NEGATED, X, level=1)

    assert torch.equal(fast(X), -X)
    assert "the optimized model gives another answer" in str(fast.report)


@functools.wraps(torch.relu)
def remember(x: Tensor) -> Tensor:
    SEEN.append(x.shape)
    return torch.relu(x)


SEEN: list[Any] = []
REMEMBERS = Forward(lambda m, x: (remember(x), x * 2)[1]).eval()
fx.wrap("remember")


@pytest.mark.parametrize("level", LEVELS)
def test_a_function_that_calls_itself_one_of_torchs_is_the_users(level: int) -> None:
    fast = optimizer.optimize(REMEMBERS, X, level=level)
    SEEN.clear()
    fast(X)

    assert [X.shape] == SEEN
