"""The answer that a result is compared with is the caller's own model's, and all of it counts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from models import import_torchvision
from optimizer import EquivalenceError, OptimizerWarning
from optimizer.testing import untouched
from optimizer.toolkit import call, insert_function, replace_pattern, rewrite
from tests.level_2 import Then
from tests.single_pass import Forward, function_of, rows, texts

X = torch.linspace(-2, 2, 12).view(3, 4)


def randomize(model):
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


def copied_as(copied):
    """A block that a function copies."""
    return type("Copied", (Block,), {"__deepcopy__": lambda block, memo: copied(block)})(2.0)


def loaded(copied, block):
    copied.load_state_dict(block.state_dict())
    return copied


def with_settings():
    """Holds what is copied with its defaults."""
    kind = type("Settings", (), {"factor": 1.0, "__deepcopy__": lambda own, _: type(own)()})
    model = Forward("m.block(x) * m.settings.factor", block=Block())
    model.settings = kind()
    model.settings.factor = 5.0
    return model


def hooked_graph():
    module = fx.symbolic_trace(Block(2.0).eval())
    module.register_forward_hook(lambda module, inputs, output: output + 1)
    return module


BAD_COPIES = {
    "forgets the mode": lambda: copied_as(lambda block: loaded(type(block)(block.times), block)),
    "forgets an attribute": lambda: copied_as(lambda block: loaded(type(block)(), block).eval()),
    "has other weights": lambda: copied_as(lambda block: type(block)(block.times).eval()),
    "a part that is its own copy": lambda: nn.Sequential(Block(), copied_as(lambda block: block)),
    "an attribute whose copy is another": with_settings,
    "a graph with a hook, which fx does not copy": hooked_graph,
}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", BAD_COPIES)
def test_a_model_whose_copy_is_another_model_keeps_its_answer(name, level):
    model = randomize(BAD_COPIES[name]())
    expected = model(X)

    with untouched(model):
        fast = optimizer.optimize(model, X, level=level, tune_seconds=0)

    torch.testing.assert_close(fast(X), expected)
    assert "copy" in str(fast.report) or name == "forgets the mode"


def folded_then(text):
    """A convolution and a norm, which fold, and what follows."""
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
    return randomize(Then(function_of("y", text), nn.Sequential(*layers)))


OUTPUTS = """
    y.to_sparse(); y[0, 0].to_sparse_csr(); torch.quantize_per_tensor(y, 0.1, 0, torch.quint8);
    y.to_mkldnn(); torch.fft.fft(y.double()).conj(); y.detach().numpy(); (y, y.sum().item());
    (y, math.nan); (y[0].float() @ y[0]).double()
"""


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("text", texts(OUTPUTS))
def test_outputs_that_are_no_float_tensors_are_compared(text, level, right_is_enough):
    model, image = folded_then(text), torch.linspace(-1, 1, 216).view(2, 3, 6, 6)

    fast = optimizer.optimize(model, image, level=level, engines=())
    optimizer.check(model, fast, image)
    model.layer[1].bias.data += 1

    assert fast.report.counts()["fold_affine"] == 1
    with pytest.raises(EquivalenceError):
        optimizer.check(model, fast, image)


def rows_then(make):
    """What its forward makes is of another kind than tensors."""
    return randomize(Then(make, nn.Linear(4, 4)))


HALVED = "torch.nested.nested_tensor([y[:2], y[2:]])"
NORMAL = "torch.distributions.Normal(y, 1.0, validate_args=False)"
# In half precision a million is infinite, in the second opinion it is not.
OVERFLOWS = "torch.stack([y, y * 1e3 * 1e3])"


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("text", [HALVED, NORMAL, OVERFLOWS, "2**62 + y.long()"])
def test_all_that_is_in_an_output_is_compared(text, dtype):
    model, other = (rows_then(function_of("y", text)).to(dtype) for _ in range(2))
    other.layer.bias.data[0] += 1
    optimizer.check(model, model, X.to(dtype))
    with pytest.raises(EquivalenceError):
        optimizer.check(other, model, X.to(dtype))


def test_what_cannot_be_compared_is_left_with_a_remark():
    model = rows_then(lambda y: lambda: y)
    fast = optimizer.optimize(model, X)
    with pytest.warns(OptimizerWarning, match="is a function, which cannot be compared"):
        optimizer.check(model, fast, X)


CHOICES = """
    y.argmax(1, keepdim=True).int(); y.flatten(1).sort(1); y.flatten(2).topk(9, 2); y > 0.1;
    y[:, :1] >= y[:, 1:]; (y * 100).long(); (y * 40 + 128).round().clamp(0, 255).to(torch.uint8);
    (y, y.argmax().item())
"""


@pytest.mark.parametrize("text", texts(CHOICES))
def test_what_rounding_chooses_is_no_difference_and_another_choice_is(text):
    pixels = torch.randn(4, 3, 512, 512, generator=torch.Generator().manual_seed(0))
    model, other = (folded_then(text) for _ in range(2))
    other.layer[1].weight.data[0] *= 1.01
    fast = optimizer.optimize(model, pixels, level=1)
    assert fast.report.counts()["fold_affine"] >= 1
    assert "rolled back" not in str(fast.report)
    with pytest.raises(EquivalenceError):
        optimizer.check(model, other, pixels[:1])


NEGATED = Forward("torch.neg(x)").eval()
ZEROS = torch.tensor([0.0, -0.0, 1.0])


def respelled(name, spelling, function, *more, phase="simplify"):
    """A pass that puts one function in the place of another."""

    def replace(negation):
        """Call another function."""
        called = insert_function(negation, function, (negation.args[0], *more))
        return None if name == "late" else called

    replace.__name__ = name
    return rewrite(call(spelling, name="negation"), numerics="exact", phase=phase)(replace)


LONGER = respelled("spell_long", torch.neg, torch.negative)
SHORTER = respelled("spell_short", torch.negative, torch.neg, phase="fuse")
FAULTY = {
    "the sign of a zero":
        ([respelled("sub", torch.neg, torch.rsub, 0.0)], "pass sub changed the answer"),
    "phases": ([LONGER, SHORTER], "spell_.* and another phase undo one another"),
    "a refusal after a change":
        ([respelled("late", torch.neg, torch.negative)], "pass late .* changed the graph"),
}  # fmt: skip


@rows("passes words", FAULTY)
def test_a_faulty_pass_is_rolled_back(passes, words):
    with pytest.warns(OptimizerWarning, match=words):
        fast = optimizer.optimize(NEGATED, ZEROS, level=0, only=passes)
    assert torch.equal(fast(ZEROS).signbit(), NEGATED(ZEROS).signbit())
    assert "rolled back" in str(fast.report)


def test_the_finished_module_is_compared_once_more(monkeypatch):
    """A fault behind the passes, of which none is to blame: the model is left as it is."""
    made = optimizer.OptimizedModule.of.__func__

    def faulty(kind, module, *rest):
        for node in module.graph.find_nodes(op="call_function", target=torch.neg):
            node.target = torch.abs
        return made(kind, module, *rest)

    monkeypatch.setattr(optimizer.OptimizedModule, "of", classmethod(faulty))
    fast = optimizer.optimize(NEGATED, X, level=1)

    assert torch.equal(fast(X), -X)
    assert "the optimized model gives another answer" in str(fast.report)


SEEN = []


@functools.wraps(torch.relu)
def remember(x):
    SEEN.append(x.shape)
    return torch.relu(x)


fx.wrap("remember")


@pytest.mark.parametrize("level", [0, 2])
def test_a_function_that_calls_itself_one_of_torchs_is_the_users(level):
    fast = optimizer.optimize(Forward(lambda m, x: (remember(x), x * 2)[1]).eval(), X, level=level)
    SEEN.clear()
    fast(X)
    assert [X.shape] == SEEN


# Of an overload some arguments mean something else than of the function of torch.
OVERLOADS = """
    torch.mul(x, 2, out=torch.empty_like(x)).t(); F.linear(bias=m.row, weight=m.matrix, input=x);
    torch.ops.aten.mm.default(x, m.matrix); x @ m.row.T;
    torch.ops.aten.addmm.default(m.matrix[:3], x, m.matrix);
    torch.ops.aten.add_.Tensor(torch.ops.aten.clone.default(x), x, alpha=2);
    torch.ops.aten.convolution.default(x.T[None], m.kernel, None, [1], [0], [1], True, [0], 1);
    torch.ops.aten._native_batch_norm_legit_no_training.default(
        x, m.row, m.row, m.row, m.row, 0.1, 1e-5)[1]
"""


def holding(forward):
    held: Any = {"row": torch.rand(4), "matrix": torch.randn(4, 4), "weight": nn.Parameter(X[0])}
    return Forward(forward, kernel=torch.randn(4, 2, 3), linear=nn.Linear(4, 4), **held).eval()


@pytest.mark.parametrize("text", texts(OVERLOADS))
def test_an_overload_has_the_same_answer(text):
    model = holding(text)
    fast = optimizer.optimize(model, X, level=1)
    torch.testing.assert_close(fast(X), model(X))
    assert fast.report.front_end == "symbolic"


@pytest.mark.parametrize(
    ("reason", "forward"),
    [("iterates over", "sum(row for row in x)"), ("for its keys", "dict(**x)")],
)
def test_what_cannot_be_recorded_is_told(reason, forward):
    with pytest.raises(optimizer.CaptureError, match=reason):
        optimizer.capture(Forward(forward))
    with pytest.raises(optimizer.CaptureError, match="cannot be copied"):
        optimizer.check(Forward("x"), Forward("x", held=(row for row in X)), X)


def test_a_pattern_may_read_a_parameter_and_what_stands_instead_brings_its_own():
    relu = holding("torch.relu(x * m.weight[0])")
    shifted = holding("m.linear(x) * m.weight + m.row")
    module = optimizer.capture(holding("torch.relu(x * m.weight[0]) + m.weight"))
    with torch.no_grad():
        module.weight.mul_(2)
        expected = module.weight * (shifted.linear(X) + 1) + shifted.row
    torch.testing.assert_close(replace_pattern(module, relu, shifted)(X), expected)


def test_a_graph_of_torchvision_whose_copies_train():
    """Source: torchvision issue 8634, pytorch issue 82598."""
    import_torchvision()
    from torchvision.models import resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    model = create_feature_extractor(randomize(resnet18(weights=None)), {"layer1": "y"}).eval()
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    fast = optimizer.optimize(model, image, level=1)
    assert fast.report.counts()["fold_affine"] > 0
    torch.testing.assert_close(fast(image)["y"], model(image)["y"])


def test_a_model_that_does_not_repeat_its_bits_is_no_judge_of_them():
    calls: list[None] = []
    noisy = Forward(lambda m, x: (calls.append(None), x + 1e-6 * len(calls))[1]).eval()
    fast = optimizer.optimize(noisy, X, level=0)

    assert not any("answer" in each for each in fast.report.remarks)
