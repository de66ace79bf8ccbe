"""What a recording rests on, and is held to: None, types, modes, settings, how it is called."""

from __future__ import annotations

import copy
import enum
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.testing import randomize
from tests.single_pass import Forward, ForwardOfTwo, rows, texts

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
OTHER = ROWS.flip(0) + 2
IMAGES = torch.linspace(-1.0, 1.0, 8 * 3 * 6 * 6).reshape(8, 3, 6, 6)
LEVELS = pytest.mark.parametrize("level", [0, 1, 2])
GLOBAL = torch.ones(4)
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def model_of(text, **held):
    return Forward(text, **{"linear": nn.Linear(4, 4)} | held).eval()


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


@dataclass
class Clamp:
    data: Tensor
    max: float | None


class OptionalMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


def is_none(mask):
    return mask is None


def of_two(forward, **held):
    return ForwardOfTwo(forward, **held).eval()


PAIRED = Forward("x[0] * 2 if x[1] is None else x[0] * x[1]")
BY_FLAG = of_two("x * 2 if z is None or z is True else x * 3")
BY_MODE = of_two("x * 2 if z is m.mode else x * 3", mode=Mode.FIRST)
BY_CLASS = of_two("x * 2 if z is dict else x * 3")
BY_DTYPE = of_two("x * 2 if z is torch.float16 else x * 3")
BY_RECORD = Forward("x.data.clamp(max=x.max) if x.max is not None else x.data")
PROMOTED = of_two("(x + z).clone().masked_fill_(x > 0, 0.1)")
INDEXED = of_two("x[z].movedim(0, -1).movedim(0, -1)")
BY_RANK = Forward("F.batch_norm(x, m.a, m.b)", a=torch.ones(4), b=torch.full((4,), 2.0))
HALF, INDEX, FOUR_D = ROWS.half(), torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 4, 3, 3)
# A model, a call, one that would take another branch, and words of the error; with an example:
BRANCHES = {
    "None": (of_two(lambda m, x, z: x if not is_none(z) else x + 1), (ROWS, ROWS), (ROWS, None),
             "an argument z|a tensor z"),
    "in a method": (of_two("z.exp() if z is not None else x"), (ROWS, ROWS), (ROWS, None), "z"),
    "None inside": (PAIRED, ((ROWS, ROWS),), ((ROWS, None),), "an argument x that holds no None"),
    "a default": (OptionalMask(), (ROWS, ROWS), (ROWS,), "mask"),
    "True and one": (BY_FLAG, (ROWS, True), (ROWS, 1), "optimized for z=True"),
    "None and False": (BY_FLAG, (ROWS, None), (ROWS, False), "optimized for z=None"),
    "an enumeration": (BY_MODE, (ROWS, Mode.FIRST), (ROWS, Mode.SECOND), "optimized for z=<Mode"),
    "a dtype": (BY_DTYPE, (ROWS, torch.half), (ROWS, torch.float), "z=torch.float16"),
    "a record": (BY_RECORD, (Clamp(ROWS, 2.0),), (Clamp(ROWS, None),), "that holds no None"),
    "another rank to promote": (PROMOTED, (HALF, ROWS[0, 0]), (HALF, ROWS[0]), "of 0"),
    "a mask for an index": (INDEXED, (ROWS, INDEX), (ROWS, ROWS > 0), "int64 and got torch.bool"),
    "a rank": (BY_RANK, (ROWS,), (FOUR_D,), "2 dimensions and got 4"),
    "an assertion": (Forward("assert x.ndim < 3; return x * 2"), (ROWS,), (FOUR_D,), "assertion"),
}  # fmt: skip
WITHOUT = {f"{name}, no example": (*BRANCHES[name], None) for name in ("None", "None inside")}


@rows("model given other words example", {k: (*v, v[1]) for k, v in BRANCHES.items()}, WITHOUT)
def test_a_call_of_another_branch_is_an_error(model, given, other, words, example):
    fast = optimizer.optimize(model.eval(), example, check=None, level=1)

    assert_close(fast(*given), model(*given))
    with pytest.raises((optimizer.InputError, AssertionError), match=words):
        fast(*other)


class NamedLast(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor) -> Tensor:
        return x * scale + shift


NAMED_LAST = {"x": ROWS, "shift": OTHER}, {"x": ROWS, "shift": 1}
UNSAID = {
    "a class of records": (BY_CLASS, {"x": ROWS, "z": Clamp}, {"x": ROWS, "z": dict}),
    "None in a record": (BY_RECORD, {"x": Clamp(ROWS, None)}, {"x": Clamp(ROWS, 2.0)}),
    "a default before none": (NamedLast(), *NAMED_LAST),
}


@rows("model given later", UNSAID)
def test_what_code_cannot_say_is_answered_as_in_eager(model, given, later):
    fast = optimizer.optimize(model.eval(), given, level=1, check=None)

    for call in (given, later):
        assert_close(fast(**call), model(**call))


@LEVELS
def test_a_tensor_outside_the_module_is_part_of_the_snapshot(level):
    model = model_of(lambda m, x: m.linear(x) * GLOBAL + x.relu() * GLOBAL)
    fast = optimizer.optimize(model, ROWS, level=level)
    before = model(ROWS)

    GLOBAL.mul_(3)
    after = fast(ROWS)
    GLOBAL.div_(3)

    assert_close(after, before.detach())


MODES = {
    "entered": "\n with torch.no_grad(): y = m.linear(x) * 2\n return y + m.linear(x)",
    "a decorated forward": torch.no_grad()(lambda m, x: m.linear(x) * 2),
    "set and put back": (
        "g = torch.is_grad_enabled(); torch.set_grad_enabled(False); y = m.linear(x)"
        "; torch.set_grad_enabled(g); return y + x"
    ),
    "detached": "m.linear(x).detach() + m.linear(x)",
}


def gradients(model):
    """The answer and the gradient of the input; none where the answer has none."""
    x = ROWS.clone().requires_grad_()
    y = model(x)
    if not y.requires_grad:
        return [y]
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("name", MODES)
def test_gradients_are_those_of_the_original(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), model_of(MODES[name])).eval()

    fast = optimizer.optimize(model, ROWS, level=1)

    assert name != "detached" or isinstance(fast, optimizer.OptimizedModule)
    assert_close(gradients(fast), gradients(model))
    with torch.inference_mode():
        assert_close(fast(ROWS), model(ROWS))


LEFT_OFF = """
    with torch.autocast("cpu", enabled=False): return m.linear(m.linear(x).float())"""
BY_AUTOCAST = "m.linear(x) * (2 if torch.is_autocast_enabled('cpu') else 3)"
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


@LEVELS
@pytest.mark.parametrize("text", [LEFT_OFF, BY_AUTOCAST])
def test_code_that_names_autocast_is_called_under_the_same(text, level):
    model = model_of(text)
    fast = optimizer.optimize(model, ROWS, level=level)
    with AUTOCAST:
        under_it = optimizer.optimize(model, ROWS, level=level)
        assert_close(under_it(ROWS), model(ROWS))

    assert fast.report.front_end == "symbolic"
    assert_close(fast(ROWS), model(ROWS))
    with AUTOCAST, pytest.raises(optimizer.InputError, match="under the autocast you need"):
        fast(ROWS)
    if text == BY_AUTOCAST:
        with pytest.raises(optimizer.InputError, match="bfloat16"):
            under_it(ROWS)


def by_name(forward):
    """Answers a call by name in another way."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * (100 if "x" in kwargs else 1) + len(args)

    return wrapper


CALLS = (
    ((ROWS,), {}), ((), {"x": ROWS}), ((ROWS, None), {}), ((), {"mask": OTHER, "x": ROWS}),
    ((ROWS,), {"mask": OTHER}), ((), {"x": ROWS, "scale": 2.0}),
)  # fmt: skip


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    @by_name
    def forward(self, x: Tensor, mask: Any = None, scale: float = 1.0) -> Tensor:
        y: Tensor = self.norm(self.layer(x)) * scale
        return y if mask is None else y * mask


@torch.no_grad()
def test_a_decorated_forward_is_right_however_it_is_called():
    model = Decorated().eval()
    fast = optimizer.optimize(model, (ROWS,), level=1)
    unknown = optimizer.optimize(model, level=1)

    assert isinstance(fast, optimizer.GuardedModule)
    assert "fold_affine" in fast.report.counts()
    assert "can tell how its arguments" in unknown.report.remarks[1]
    for args, kwargs in CALLS:
        assert_close(fast(*args, **kwargs), model(*args, **kwargs))
        assert_close(unknown(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("call", ["m.child(x, None, scale=2.0)", "m.child(mask=x, x=x)"])
@pytest.mark.parametrize("opaque", [False, True])
def test_a_child_is_called_as_its_parent_calls_it(call, opaque):
    model = Forward(call, child=Decorated()).eval()
    if opaque:
        model.child.register_forward_hook(lambda module, given, result: result + 1)

    fast = optimizer.optimize(model, ROWS, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    assert_close(fast(ROWS + 1), model(ROWS + 1))


RETURNED = """
    (x + 1, m.weight); (x @ m.buffer, m.buffer[1:]); (m.buffer, m.plain, m.buffer, x + 1);
    (torch.zeros(4, 4), torch.zeros(4, 4), x + 1); (torch.tensor(3.0), x + 1);
    (x + 1, m.weight * 2, m.weight * 2, *(m.buffer * 2).chunk(2), x @ (m.buffer * 2));
    (m.buffer.clone(), x.clone(), x.contiguous(), m.buffer.contiguous());
    (m.buffer.to(torch.float32), F.dropout(m.buffer, training=False), x + 1);
    (m.linear(m.buffer), m.linear(m.buffer), x + 1); (x.tanh(), x.tanh(), x.tanh().t());
    (m.norm(m.linear(x)), m.linear.weight, m.linear(x) * m.weight, m.norm.running_mean, m.weight)
"""


@LEVELS
@pytest.mark.parametrize("text", texts(RETURNED))
def test_who_writes_what_is_returned_sees_what_the_model_would_show(text, level):
    """The original and the result are called in turn, and all they return is written."""
    held = {"norm": nn.BatchNorm1d(4), "buffer": torch.randn(4, 4)}
    model = model_of(text, weight=nn.Parameter(torch.randn(4, 4)), **held)
    model.plain, x = torch.randn(4, 4), torch.randn(4, 4)
    randomize(model)
    fast, model = optimizer.optimize(model, x, level=level), copy.deepcopy(model)
    inputs = x.clone(), x.clone()
    with torch.no_grad():
        for _ in range(3):
            pairs = zip((model, fast), inputs, strict=True)
            expected, actual = (pytree.tree_leaves(run(given)) for run, given in pairs)
            torch.testing.assert_close(actual, expected)
            assert sharing(*actual, inputs[1]) == sharing(*expected, inputs[0])
            for each in (*expected, *actual):
                each.add_(1.5)


def sharing(*tensors):
    """For each tensor, the first that shares its memory."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [memory.index(each) for each in memory]


@LEVELS
@torch.no_grad()
def test_what_a_model_asks_of_its_weights_is_asked_after_a_cast_too(level):
    first = "next(m.parameters())"
    model = model_of(f"m.linear(x.to({first}.dtype)) + x.new_ones(4).to({first})")
    fast = optimizer.optimize(model, ROWS, level=level).double()

    assert_close(fast(ROWS), model.double()(ROWS))
    assert fast.to("meta")(ROWS.to("meta")).is_meta
