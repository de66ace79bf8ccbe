"""BatchNorm and constants fold into the layer before or behind them, or say why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, layers_of, optimized_by, rows, spelled, tried

FOLD, FORWARD = "fold_affine", "fold_affine_forward"
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing
IMAGE, WIDE, GRAY = (2, 3, 6, 6), (2, 4, 6, 6), (2, 1, 6, 6)
conv, valid, up = partial(nn.Conv2d, 3, 4, 3), partial(nn.Conv2d, 4, 6), nn.ConvTranspose2d


def tried_on(
    name: str, model: str, shape: Any, outcome: Any, *later: Any, regime: str = "random"
) -> Any:
    """`tried` on weights and inputs that hide nothing, and on inputs of other shapes later."""
    built_one = randomize(built(model).double(), regime)
    shapes = (shape, *later) if shape else later
    calls = [inputs_like([each], regime, place) for place, each in enumerate(shapes)]
    return tried(name, built_one, calls.pop(0) if shape else (), outcome, *calls)


def built(text: str) -> nn.Module:
    """A model, or layers in a row, from its text."""
    found = eval(text)
    found = nn.Sequential(*found) if isinstance(found, tuple) else found
    return found if "training(" in text else found.eval()


def norm(dimensions: int, features: int = 4, **settings: Any) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    return kind(features, **({"eps": EPS} | settings))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def over(text: str, layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of what a layer gives, `y`, and of a constant `c`."""
    constant = torch.rand(shape).add(0.5).to(dtype)
    return Forward(f"y, c = m.layer(x), m.c; return {text}", layer=layer, c=constant)


def before(text: str, layer: nn.Module, *shape: int) -> nn.Module:
    """A model of a layer behind what is computed with a constant `c`."""
    return Forward(f"c = m.c; return m.layer({text})", layer=layer, c=torch.rand(shape) + 0.5)


def both(text: str, dimensions: int = 2, **other: Any) -> nn.Module:
    """A model of a layer, two norms, and their tensors, which lie where a function may read."""
    held = {"mean": torch.tensor([1.0, -2, 3, 0]), "var": torch.tensor([1.0, 4, 0.25, 16]) - EPS}
    held |= {"gain": parameter(4), "shift": parameter(4), "b": parameter(4)}
    held |= {"w": parameter(4, 3, *[3] * dimensions), "conv": conv()} | other
    return Forward(text, bn=norm(dimensions or 1), second=norm(2, eps=0.5), **held)


def training(place: int, *layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers).eval()
    model[place].train()
    return model


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


# The shape of the input, and what is called in the end. See also the motifs and tests/traps.py.
FOLDED = {
    ((5, 3), nn.Linear): """
    nn.Linear(3, 4), norm(1); nn.Linear(3, 4, bias=False), norm(1);
    both("m.bn(F.linear(input=x, weight=m.w, bias=m.b))", 0)
    """,
    # as long as wide
    ((2, 3, 6), nn.Conv1d): 'nn.Conv1d(3, 4, 3), norm(1); both("m.bn(F.conv1d(x, m.w, m.b))", 1)',
    ((2, 3, 4, 4, 4), nn.Conv3d): 'both("m.bn(torch.conv3d(x, m.w, m.b))", 3)',
    (IMAGE, nn.Conv2d): """
    conv(bias=False), norm(2); conv(), norm(2, affine=False); conv(padding="same"), norm(2);
    conv(padding=1, padding_mode="reflect"), norm(2); conv(), norm(2), norm(2, eps=0.25);
    Conv(3, 4, 3), norm(2); both("m.bn(input=m.conv(input=x))"); both("m.bn(F.conv2d(x, m.w))");
    both("m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1)))");
    both("m.bn(torch.conv2d(x, m.w, m.b, 2))");
    both("F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, 0.125)");
    both("F.batch_norm(m.conv(x), running_var=m.var, running_mean=m.mean, bias=m.b, eps=0.125)");
    both("F.batch_norm(m.conv(x), m.mean, m.var, weight=m.gain, training=m.training, eps=0.125)");
    over("c * y", conv(), 4, 1, 1); over("torch.mul(input=y, other=c)", conv(), 1, 4, 1, 1);
    over("torch.add(y, c)", conv(), 1); over("y - c", conv()); over("c - y", conv(), 4, 1, 1);
    over("y.div(c)", conv(), 4, 1, 1); over("torch.sub(y, other=c)", conv(), 1, 1, 1);
    over("y * c + c", conv(), 4, 1, 1); over("(2 - y * 3 + 0.25) / 4", conv())
    """,
    ((2, 4, 9, 9), nn.Conv2d): "nn.Conv2d(4, 4, 3, 2, 1, dilation=2, groups=2), norm(2)",
    (WIDE, nn.Conv2d, F.relu, nn.Conv2d): "(b := nn.Sequential(nn.Conv2d(4, 4, 1), norm(2)), "
    "nn.ReLU(), b)",
    ((2, 4, 5, 5), up): """
    Forward("m.bn(F.conv_transpose2d(x, m.w, stride=2, groups=2, dilation=2))",
    bn=norm(2, 6), w=parameter(4, 3, 3, 3)); up(4, 4, 3, 2, 1, 1, groups=4), norm(2);
    up(4, 6, 3, 2, 1, 1, groups=2, bias=False), norm(2, 6)
    """,
    ((2, 4, 4), nn.ConvTranspose1d): "nn.ConvTranspose1d(4, 8, 3, 2, 1, 1, 4), norm(1, 8)",
    ((2, 4, 4, 4, 4), nn.ConvTranspose3d): "nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), norm(3, 6)",
    # as timm's LeViT does, on (N * L, C)
    ((2, 5, 3), nn.Linear, torch.flatten, "reshape_as"): """
    both("m.bn((y := m.fc(x)).flatten(0, 1)).reshape_as(y)", 1, fc=nn.Linear(3, 4));
    both("m.bn((y := m.fc(x)).flatten(-3, -2)).reshape_as(y)", 1, fc=nn.Linear(3, 4))
    """,
    # a constant along the last dimension, of any rank, or without a batch
    ((2, 3, 5, 2, 3), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3,), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3, 6, 6), nn.Conv2d): 'over("y * c + c", conv(), 4, 1, 1)',
}


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@spelled(FOLDED, cells="model case")
def test_folds_into_layers_in_every_spelling(model: str, case: Any, regime: str) -> None:
    shape, *left = case

    fast = tried_on(FOLD, model, shape, left, regime=regime)

    assert len({node.target for node in fast.graph.nodes if node.op == "call_module"}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@rows(
    "name layers shape",
    {
        FOLD: (FOLD, (nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), (4, 8, 12, 12)),
        FORWARD: (FORWARD, (nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)), (4, 16, 12, 12)),
    },
)
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(
    name: str, layers: Any, shape: Any, dtype: torch.dtype
) -> None:
    """It is computed in float64 and rounded once."""
    (x,), model = inputs_like([shape], "random", 0, dtype), randomize(nn.Sequential(*layers))
    model = model.eval().to(dtype)

    fast = optimized_by(name, model, x)

    with torch.no_grad():
        eager, folded = model(x).double(), fast(x).double()
        truth = model.double()(x.double())
    assert [each.weight.dtype for each in layers_of(fast)][:1] == [dtype]
    assert (folded - truth).abs().max() <= 4 * (eager - truth).abs().max()


UNKNOWN = "the graph was captured without example inputs"
IN_TRAINING = "BatchNorm is in training mode and uses batch statistics"
OTHER_AXIS = "BatchNorm normalizes another axis than the layer's"
READ_ELSEWHERE = "the layer's output is read elsewhere"
WRITTEN = "the forward writes their tensors"
OTHER_DTYPE = "dtype or device differ"
HIGHER_RANK = "the constant has more dimensions than what it is combined with"
NOT_ONE = "the constant is not one number a channel"
MIXES = "flattening mixes the layer's outputs"
SHAPE = "the constant changes the shape"
LINEAR = "nn.Linear(3, 4)"
TRANSPOSED = "nn.ConvTranspose1d(3, 4, 2)"
# The shape of the input, the outcome, and shapes of later calls.
BEHIND: dict[Any, str] = {
    # without example inputs a rank that the layers imply suffices
    (None, 1, IMAGE): "conv(), norm(2)",
    (None, UNKNOWN, (5, 3)): "nn.Linear(3, 4), norm(1)",
    # channels that came last
    ((2, 3, 3), 1, (2, 1, 3)): f"""
    both("m.bn(m.w(x.mT))", 1, w=nn.Conv1d(3, 4, 2, padding=1));
    both("m.bn(m.w(x.mT))", 1, w={TRANSPOSED})
    """,
    # a second reader, as timm's BatchNormAct2d checks the rank of what it is given
    (IMAGE, 1): """
    both("(m.bn(y := m.conv(x)), y.ndim)"); both("(m.bn(y := m.conv(x)), y.shape[0])");
    both("(m.bn(y := m.conv(x)), y.size(1))")
    """,
    (IMAGE, 2): """
    both("m.bn(m.conv(x)) - m.second(m.conv(x))");
    both("m.bn(m.conv(x)) - m.bn(m.other(x))", 2, other=conv());
    Forward("m.conv(x) * m.c - m.conv(x) * m.d", conv=conv(), c=torch.rand(1), d=torch.rand(1))
    """,
    ((2, 4, 5, 5), 0): """
    Forward("m.bn(m.up(x, output_size=[12, 12]))", up=up(4, 4, 3, 2), bn=norm(2))
    """,
    # what is not affine in one value
    (IMAGE, 0): """
    over("y / y.sum()", conv(), 4, 1, 1); over("c / y", conv(), 4, 1, 1);
    over("torch.add(y, c, alpha=2)", conv(), 4, 1, 1); over("y + y.shape[0]", conv(), 4, 1, 1)
    """,
    (IMAGE, READ_ELSEWHERE): 'both("(y := m.conv(x), m.bn(y))")',
    ((2, 5, 3), READ_ELSEWHERE): f"""
    over("y.flatten(0, 1) * c + y.sum()", {LINEAR}, 4);
    over("(z := y.flatten(0, 1)) * c + z", {LINEAR}, 4)
    """,
    ((2, 3), NOT_ONE): f'over("y * c", {LINEAR}, 2, 4)',
    # a number for each column or image, and one channel made four
    (IMAGE, NOT_ONE): """
    over("y * c", conv(), 4); over("y * c", conv(), 2, 1, 1, 1);
    over("y * c", nn.Conv2d(3, 1, 3), 4, 1, 1)
    """,
    ((2, 3), HIGHER_RANK): f'over("y * c", {LINEAR}, 1, 1, 4)',
    ((3, 6, 6), HIGHER_RANK): 'over("y * c", conv(), 1, 4, 1, 1)',
    ((2, 4, 5, 3), OTHER_AXIS): "nn.Linear(3, 4), norm(2)",
    ((3, 6), OTHER_AXIS): "nn.Conv1d(3, 4, 3), norm(1)",
    (IMAGE, OTHER_DTYPE): """
    over("y * c", conv(), 4, 1, 1, dtype=torch.complex128);
    over("y * c", conv(), 4, 1, 1, dtype=torch.int64)
    """,
    (IMAGE, WRITTEN): """
    both("(m.conv.weight.mul_(2), m.bn(m.conv(x)))[1]");
    both("(m.bn.running_var.mul_(2), m.bn(m.conv(x)))[1]");
    over("(c.add_(1), y * c)[1]", conv(), 4, 1, 1)
    """,
    (IMAGE, "BatchNorm tracks no running statistics and uses the batch's"): """
    conv(), norm(2, track_running_stats=False)
    """,
    (IMAGE, "the folded weights overflow or underflow"): 'over("y / 0", conv(), 1)',
    (IMAGE, "the folded bias overflows"): 'over("y + math.inf", conv(), 1)',
    ((2, 5, 3), MIXES): f'over("y.flatten(1) * 2", {LINEAR}, 1)',
    (IMAGE, MIXES): 'over("y.flatten(0, 1) * 2", conv(), 1)',
    ((2, 1, 3), "its rank depends on sizes, through a squeeze"): """
    Forward("x.squeeze()"), nn.Linear(3, 4), norm(1)
    """,
}
# Constants repeat a single channel, and what repeats a channel is no example of other calls.
OF_ONE = 'before("x * c", valid(3), 4, 1, 1); before("x.relu() * c", valid(3), 4, 1, 1)'
OF_TWO = 'before("(x - 0.485) / c", valid(3), 4, 1, 1); before("(x * c) / c", valid(3), 4, 1, 1)'
BEFORE: dict[Any, str] = {
    (WIDE, (nn.Conv2d,)): """
    norm(2), valid(1, bias=False); norm(2), valid(3, groups=2);
    norm(2), nn.Conv2d(4, 8, 3, groups=4); norm(2), valid(2, stride=2, dilation=2);
    norm(2), valid(1, padding="same"); norm(2), valid(3, padding=1, padding_mode="reflect")
    """,
    ((2, 4, 3, 3, 3), (nn.Conv3d,)): "norm(3), nn.Conv3d(4, 6, 2)",
    ((5, 4), (nn.Linear,)): "norm(1), nn.Linear(4, 6)",
    ((2, 3, 4), 1): 'before("x + c", nn.Linear(4, 6), 4)',
    (None, UNKNOWN): "norm(2), valid(3)",
    (WIDE, 1, GRAY): f"""
    {OF_ONE}; Forward("(m.layer((y := x - 0.5) * m.c), y)", layer=valid(3), c=torch.rand(4, 1, 1));
    nn.Linear(6, 6), before("x * c", valid(3), 4, 1, 1); before("x + c", valid(3), 4, 1, 1);
    before("x * c", valid(3, padding=1), 4, 1, 1);
    before("x * c", up(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1)
    """,
    (WIDE, 2, GRAY): OF_TWO,
    (WIDE[1:], 1, GRAY[1:]): OF_ONE,
    (GRAY, 1, WIDE): 'before("x * c * c", valid(3), 4, 1, 1)',
    # a layer fixes its channels, so that nothing expands them
    ((3, 4), (nn.Linear, nn.Linear)): """
    Forward("m.layer(m.layer(x) * m.c)", layer=nn.Linear(4, 4), c=torch.rand(4) + 0.5)
    """,
    (WIDE, "the layer pads with zeros, which are not shifted"): """
    norm(2), valid(2, padding="same"); norm(2), up(4, 6, 3)
    """,
    (WIDE, IN_TRAINING): "training(0, norm(2), valid(3))",
    ((2, 4, 4, 4), OTHER_AXIS): "norm(2), nn.Linear(4, 4)",
    (WIDE, 0): 'before("(y := x * c) + y.mean()", valid(3), 4, 1, 1)',
    (WIDE, READ_ELSEWHERE): 'Forward("(m.layer(y := x * 0.5), y)", layer=valid(3))',
    (GRAY, SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    ((6, 6), SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    (WIDE, WRITTEN): 'Forward("(m.layer.weight.mul_(2), m.layer(x * 2))[1]", layer=valid(3))',
}
BOTH_SIDES = {(FOLD, *case): text for case, text in BEHIND.items()}
BOTH_SIDES |= {(FORWARD, *case): text for case, text in BEFORE.items()}


@spelled(BOTH_SIDES, cells="model case")
def test_what_is_beside_a_layer(model: str, case: Any) -> None:
    name, *rest = case

    tried_on(name, model, *rest)


def test_a_folded_parameter_can_be_written_and_is_frozen_as_it_was() -> None:
    layer = nn.Linear(3, 4, bias=False).requires_grad_(False)
    fast = optimized_by(FOLD, over("y - 1.0", layer).double().eval(), torch.ones(2, 3).double())
    fast.load_state_dict(fast.state_dict())

    assert all(each.is_contiguous() and not each.requires_grad for each in fast.parameters())


def test_layers_that_do_not_fit_one_another_stay() -> None:
    fast = optimized_by(FOLD, built("conv(), norm(2, 1)"))

    assert [each.reason for each in fast.report.refused] == ["the number of features differs"]


WIDENS = """Forward("m.fc(m.layer(x) * m.scale)", fc=nn.Linear(5, 2),
    layer=nn.ConvTranspose2d(4, 4, 3), scale=parameter(4, 1, 1))"""
ERRORS = {
    # A layer of no rows leaves its dtype, and the product with a constant does not.
    "a constant that widens what is empty": (
        FOLD, WIDENS, (2, 4, 3, 3), torch.empty(0, 4, 3, 3), "float64 and got",
    ),
    "bytes": (
        FORWARD, 'before("x / 255.0", valid(3), 1)', WIDE, torch.ones(WIDE).byte(),
        r"torch\.float64 and got torch\.uint8",
    ),
}  # fmt: skip


@rows("name model shape later error", ERRORS)
def test_what_was_relied_on_is_required_of_later_calls(
    name: str, model: str, shape: Any, later: Tensor, error: str
) -> None:
    fast = tried_on(name, model, shape, 1)

    with pytest.raises(optimizer.InputError, match=error):
        fast(later)


def test_a_constant_that_widens_what_autocast_narrows_stays() -> None:
    model = built('over("y * c", nn.Linear(4, 4), 4, dtype=torch.float32)')
    reason = "autocast gives the layer another dtype than the constant"

    with torch.autocast("cpu", torch.bfloat16):
        tried(FOLD, model, (torch.ones(2, 4),), reason)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_single_elements_lie_in_memory_as_before(dimensions: int) -> None:
    layout = (torch.channels_last, torch.channels_last_3d)[dimensions - 2]
    pool = f"nn.AdaptiveAvgPool{dimensions}d"
    layers = f"{pool}(1), nn.Conv{dimensions}d(4, 4, 1), norm({dimensions}), {pool}(2)"
    model = built(layers).double()
    x = torch.randn(2, 4, *[3] * dimensions).double().contiguous(memory_format=layout)

    fast = tried(FOLD, model, (x,), "its output may be laid out otherwise")

    assert fast(x).stride() == model(x).stride()
    assert not optimized_by(FOLD, model, x.contiguous()).report.refused


def test_an_image_of_bytes_and_a_mean_far_beyond_the_deviation_stay() -> None:
    image, model = torch.randint(0, 256, WIDE, dtype=torch.uint8), built("norm(2), valid(3)")
    nn.init.constant_(model.get_buffer("0.running_mean"), 100.0)
    shifted = "the shift is so large that it would cancel after the layer only"

    tried(FORWARD, before("x / 255.0", valid(3), 1).eval(), (image,), OTHER_DTYPE)
    tried(FORWARD, model, (torch.randn(WIDE),), shifted)


def test_a_batchnorm_may_lay_its_output_out_anew() -> None:
    pair = nn.Sequential(norm(2, 1), nn.Conv2d(1, 1, 1))
    model = Forward("torch.stack((y := m.pair(torch.relu(x[:, :1])), y), 1)", pair=pair).eval()
    x = torch.rand(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)

    fast = tried(FORWARD, model, (x,), "the affine lays its output out otherwise")

    assert fast(x).stride() == model(x).stride()


def test_a_batchnorm_of_no_elements_takes_any_channels() -> None:
    layer, scale = nn.Conv1d(2, 2, 1), torch.rand(2, 1)
    model = Forward("m.c(m.bn(x) * m.s)", bn=nn.BatchNorm1d(2), c=layer, s=scale).eval()
    fast = optimized_by(FORWARD, model, torch.empty(0, 2, 3))

    assert fast.report.counts()[FORWARD] >= 1
    assert_equivalent(model, fast, (torch.empty(0, 1, 3),))


def test_what_the_layer_would_keep_for_gradients_must_not_be_written_later() -> None:
    forward = "m.layer((y := x + 1.0) * 0.5) + y.mul_(2.0).sum()"
    model, x = Forward(forward, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 3, requires_grad=True)

    reason = "what the layer would keep for gradients is written later"
    tried(FORWARD, model, (x.detach(),), reason)(x).sum().backward()

    assert x.grad is not None
