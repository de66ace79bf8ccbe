"""Everything that a rewrite may meet is folded right or left alone, and never an exception.

Each case says how often BatchNorm must be folded and what the report must say of the rest. Its
answer, and what it leaves in its input, are compared with the model's own in float64.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import optimizer

BOUND = 1e-9
Pair = namedtuple("Pair", ["first", "second"])


class Net(nn.Module):
    """Some modules by name, and a forward written as a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self._function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


def randomized(model: nn.Module) -> nn.Module:
    """The model with statistics that a wrong fold cannot miss, in float64 and eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None:
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
            if module.weight is not None:
                nn.init.uniform_(module.weight, 0.5, 2.0)
                nn.init.normal_(module.bias)
    return model.double().eval()


def error(expected: object, actual: object) -> float:
    """The largest normwise error of any output; structures must agree."""
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert new_spec == spec
    assert [t.shape for t in new] == [t.shape for t in old]
    pairs = [(one, other) for one, other in zip(old, new, strict=True) if one.numel()]
    return max([normwise(one, other) for one, other in pairs], default=0.0)


def normwise(one: Tensor, other: Tensor) -> float:
    assert one.dtype == other.dtype
    return float((one.double() - other.double()).abs().max() / one.double().abs().max())


def answer(model: nn.Module, x: Tensor) -> Any:
    """What a model returns, and what it leaves in a copy of its input."""
    own = x.clone()
    torch.manual_seed(7)
    with torch.no_grad():
        return model(own), own


class Case(NamedTuple):
    """A model, an input, how many folds must fire, and a word of each refusal."""

    model: nn.Module
    shape: tuple[int, ...] = (2, 3, 6, 6)
    folds: int = 0
    refused: tuple[str, ...] = ()


def conv_bn(**settings: Any) -> dict[str, nn.Module]:
    return {"layer": nn.Conv2d(3, 3, 1, bias=False), "bn": nn.BatchNorm2d(3, **settings)}


def plain(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.layer(x))


def second_reader() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.bn(y) + y

    return Case(Net(forward, **conv_bn()), refused=("read elsewhere",))


def layer_called_twice_bn_on_one_path() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.bn(self.layer(x)) + self.layer(x + 1)

    return Case(Net(forward, **conv_bn()), folds=1)


def block_called_twice() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return plain(self, torch.relu(plain(self, x)))

    return Case(Net(forward, **conv_bn()), folds=2)


def parameter_shared_by_two_layers() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.bn(self.layer(x)) + self.other(x)

    modules = conv_bn() | {"other": nn.Conv2d(3, 3, 1)}
    modules["other"].weight = modules["layer"].weight
    return Case(Net(forward, **modules), folds=1)


def module_under_two_names() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.bn(self.layer(x)) + self.other(2 * x)

    modules = conv_bn()
    return Case(Net(forward, **modules, other=modules["layer"]), folds=1)


def hook_on(name: str) -> Case:
    model = Net(plain, **conv_bn())
    model.get_submodule(name).register_forward_hook(lambda module, args, result: result * 2)
    return Case(model)


def training_bn() -> Case:
    return Case(Net(plain, **conv_bn()), refused=("training mode",))


def settings_of_bn(**settings: Any) -> Case:
    return Case(Net(plain, **conv_bn(**settings)), folds=1)


def no_statistics() -> Case:
    model = Net(plain, **conv_bn(track_running_stats=False))
    return Case(model, refused=("no running statistics",))


def linear_and_bn1d(channels: int, length: int) -> Case:
    model = Net(plain, layer=nn.Linear(5, length), bn=nn.BatchNorm1d(channels))
    return Case(model, (2, channels, 5), refused=("another axis",))


def unbatched_conv1d() -> Case:
    model = Net(plain, layer=nn.Conv1d(2, 4, 1), bn=nn.BatchNorm1d(4))
    return Case(model, (2, 4), refused=("another axis",))


def old_weight_norm() -> Case:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Conv2d(3, 3, 1))
    return Case(Net(plain, layer=layer, bn=nn.BatchNorm2d(3)), folds=1)


def parametrized() -> Case:
    layer = parametrizations.weight_norm(nn.Conv2d(3, 3, 1))
    return Case(Net(plain, layer=layer, bn=nn.BatchNorm2d(3)), folds=1)


class DoubledConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ShiftedBatchNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def weight_read_elsewhere() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return plain(self, x) * self.layer.weight.sum()

    return Case(Net(forward, **conv_bn()), folds=2)


def weight_written_in_forward() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.mul_(2.0)
        return self.bn(F.conv2d(x, self.scale))

    model = Net(forward, bn=nn.BatchNorm2d(3))
    model.register_buffer("scale", torch.randn(3, 3, 1, 1))
    return Case(model)


def statistics_written_in_forward() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.bn.running_mean.add_(1.0)
        return plain(self, x)

    return Case(Net(forward, **conv_bn()), refused=("writes",))


def inplace_relu_with_residual() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.relu(plain(self, x))
        return plain(self, y) + y

    return Case(Net(forward, **conv_bn(), relu=nn.ReLU(inplace=True)), folds=2)


def inplace_relu_on_what_bn_reads() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.layer(x)
        F.relu(y, inplace=True)
        return self.bn(y)

    return Case(Net(forward, **conv_bn()), refused=("read elsewhere",))


def residual_added_in_place() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = plain(self, x)
        z = y
        z += x
        return y * z

    return Case(Net(forward, **conv_bn()), folds=1)


def writes_its_input() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = plain(self, x)
        x[x > 0] = 0.0
        return y + x

    return Case(Net(forward, **conv_bn()), folds=1, refused=("an input, an attribute or a view",))


def random_numbers() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return plain(self, x) + torch.rand(x.shape[-1]) + F.dropout(x, 0.5, training=True)

    return Case(Net(forward, **conv_bn()), folds=1, refused=("training mode",))


def returning(container: Callable[[Tensor, Tensor], object]) -> Case:
    def forward(self: Any, x: Tensor) -> object:
        return container(plain(self, x), x + 1)

    return Case(Net(forward, **conv_bn()), folds=1)


CASES: dict[str, Callable[[], Case]] = {
    "a second reader of the layer": second_reader,
    "a layer called twice, BatchNorm on one path": layer_called_twice_bn_on_one_path,
    "a whole block called twice": block_called_twice,
    "a Parameter shared by two layers": parameter_shared_by_two_layers,
    "one module under two names": module_under_two_names,
    "a hook on the layer": lambda: hook_on("layer"),
    "a hook on the BatchNorm": lambda: hook_on("bn"),
    # Dynamo records what a hook of the model itself does.
    "a hook on the model": lambda: hook_on("")._replace(folds=1),
    "a BatchNorm in training mode": training_bn,
    "no running statistics": no_statistics,
    "no scale and shift": lambda: settings_of_bn(affine=False),
    "a wide epsilon": lambda: settings_of_bn(eps=0.3),
    "Linear and BatchNorm1d on (N, C, L), L == C": lambda: linear_and_bn1d(4, 4),
    "Linear and BatchNorm1d on (N, C, L), L != C": lambda: linear_and_bn1d(4, 6),
    "unbatched Conv1d and BatchNorm1d, L == C": unbatched_conv1d,
    "old weight_norm": old_weight_norm,
    "parametrized weight_norm": parametrized,
    "a subclass of Conv2d": lambda: Case(
        Net(plain, layer=DoubledConv(3, 3, 1), bn=nn.BatchNorm2d(3)), folds=2
    ),
    "a subclass of BatchNorm2d": lambda: Case(
        Net(plain, layer=nn.Conv2d(3, 3, 1), bn=ShiftedBatchNorm(3)), folds=2
    ),
    "a weight read elsewhere": weight_read_elsewhere,
    "a weight written in forward": weight_written_in_forward,
    "statistics written in forward": statistics_written_in_forward,
    "an in-place ReLU and a residual": inplace_relu_with_residual,
    "an in-place ReLU on what BatchNorm reads": inplace_relu_on_what_bn_reads,
    "a residual added in place": residual_added_in_place,
    "a model that writes its input": writes_its_input,
    "random numbers in forward": random_numbers,
    "a dict": lambda: returning(lambda a, b: {"b": b, "a": a}),
    "an OrderedDict": lambda: returning(lambda a, b: OrderedDict(b=b, a=a)),
    "a namedtuple": lambda: returning(Pair),
    "nested outputs": lambda: returning(lambda a, b: {"x": [a, (b, {"y": a})]}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_folded_right_or_left_alone(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]()
    model = randomized(case.model)
    if "in training mode" in name:
        model.bn.train()
    x = torch.randn(case.shape, dtype=torch.float64)

    fast = optimizer.optimize(model, x, check=None, level=1)

    of_others = [each for each in fast.report.refused if not each.name.startswith("reuse_")]
    reasons = [refusal.reason for refusal in of_others]
    assert fast.report.counts().get("fold_affine", 0) == case.folds
    assert len(reasons) == len(case.refused)
    assert all(word in reason for word, reason in zip(case.refused, reasons, strict=True))
    assert error(answer(model, x), answer(fast, x)) <= BOUND


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    bn = nn.BatchNorm2d(16)
    model = randomized(nn.Sequential(nn.Conv2d(8, 16, 3), bn, nn.ReLU())).to(dtype)
    x = torch.randn(4, 8, 12, 12).to(dtype)

    fast = optimizer.optimize(model, x, check=None, level=1)

    with torch.no_grad():
        eager, folded = model(x).double(), fast(x).double()
        truth = model.double()(x.double())
    assert fast.report.counts()["fold_affine"] == 1
    assert normwise(truth, folded) <= max(4 * normwise(truth, eager), 1e-15)


def relu_of_a_read_linear(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return torch.relu(y) + y


def assign_a_tensor(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    mask = x > 0
    y[mask] = x[mask].flip(0)
    return y


def assign_through_a_view(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    view = y[0]
    y[x > 0] = 0.0
    return view


def identity_of_a_number(self: Any, x: Tensor) -> Tensor:
    return x + self.identity(1.0)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "relu of a Linear that is read elsewhere": (relu_of_a_read_linear, "read elsewhere"),
    "a tensor assigned under a mask": (assign_a_tensor, "an element for each True"),
    "an assignment seen through a view": (assign_through_a_view, "would see the write"),
    "the Identity of a number": (identity_of_a_number, "a constant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    forward, word = REFUSED[name]
    model = randomized(Net(forward, linear=nn.Linear(4, 4), identity=nn.Identity()))
    x = torch.randn(4, 4, dtype=torch.float64)

    fast = optimizer.optimize(model, x, check=None, level=1)

    assert fast.report.fired == ()
    assert any(word in refusal.reason for refusal in fast.report.refused)
    assert error(answer(model, x), answer(fast, x)) == 0.0


def test_a_fold_whose_weights_would_overflow_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval().half()
    nn.init.constant_(model[0].weight, 3e4)
    nn.init.constant_(model[1].weight, 3.0)

    fast = optimizer.optimize(model, torch.zeros(1, 2).half(), check=None, level=1)

    assert fast.report.counts() == {}
    assert "overflow" in fast.report.refused[0].reason


def test_a_layer_and_a_batchnorm_of_different_dtypes_are_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1).bfloat16(), nn.BatchNorm2d(3)).eval()
    x = torch.randn(1, 3, 2, 2).bfloat16()

    fast = optimizer.optimize(model, x, check=None, level=1)

    assert fast.report.counts() == {}
    assert "dtype" in fast.report.refused[0].reason
    assert torch.equal(fast(x), model(x))


def test_a_pair_that_can_never_be_called_is_left_for_the_model_to_reject() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(5)).eval()

    fast = optimizer.optimize(model, level=1)

    assert fast.report.counts() == {}
    assert "number of features" in fast.report.refused[0].reason
