"""What a recording rests on, and is held to: None, types, modes, settings, how it is called.

What a call returns belongs to its caller, who may write it: no constant, and nothing twice.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from threading import Event, Thread
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer import GuardedModule
from optimizer.core.guards import GUARDS
from optimizer.testing import randomize
from tests.single_pass import Forward, ForwardOfTwo, rows, texts

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
OTHER = ROWS.flip(0) + 2
IMAGES = torch.linspace(-1.0, 1.0, 8 * 3 * 6 * 6).reshape(8, 3, 6, 6)
BOTH = pytest.mark.parametrize("example", [True, False], ids=["example", "no example"])
LEVELS = pytest.mark.parametrize("level", [0, 1, 2])
helpers: Any = ModuleType("helpers")
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def is_none(mask: Any) -> bool:
    return mask is None


def matches(mask: Any) -> bool:
    match mask:
        case None:
            return True
    return False


class OptionalMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


helpers.lacks = is_none
ASKS: dict[str, Callable[[Any], Any]] = {
    "is None": lambda mask: mask is None,
    "is not None": lambda mask: mask is not None,
    "a branch": lambda mask: 1 if mask is None else 0,
    "a helper": lambda mask: not is_none(mask),
    "a decorated helper": functools.wraps(is_none)(lambda mask: not is_none(mask)),
    "a closure": (lambda inner: lambda mask: not inner(mask))(is_none),
    "a namespace": lambda mask: bool(helpers.lacks(mask)),
    "a comprehension": lambda mask: any(each is None for each in (mask,)),
    "a match": matches,
}
PAIRED = Forward("x[0] * 2 if x[1] is None else x[0] * x[1]")
BY_TYPE = ForwardOfTwo("x * 2 if isinstance(z, torch.Tensor) else x")
# Which call would take another branch, and the words of the error.
BRANCHES = {
    name: (
        ForwardOfTwo(lambda m, x, mask, asks=asks: x if asks(mask) else x + 1),
        *((ROWS, ROWS), (ROWS, None), r"an argument z|a tensor z"),
    )
    for name, asks in ASKS.items()
} | {"inside": (PAIRED, ((ROWS, ROWS),), ((ROWS, None),), "an argument x that holds no None")}
BY_EXAMPLE = {
    "a type": (BY_TYPE, (ROWS, ROWS), (ROWS, 3), "a tensor z and got 3"),
    "a default": (OptionalMask(), (ROWS, ROWS), (ROWS,), "mask"),
}


WITHOUT = {f"{name}, no example": (*row, None) for name, row in BRANCHES.items()}
WITH = {name: (*row, row[1]) for name, row in (BRANCHES | BY_EXAMPLE).items()}


@rows("model given other words example", WITH, WITHOUT)
def test_a_call_of_another_branch_is_an_error(
    model: nn.Module, given: Any, other: Any, words: str, example: Any
) -> None:
    fast = optimizer.optimize(model.eval(), example, check=None, level=1)

    assert torch.equal(fast(*given), model(*given))
    with pytest.raises(optimizer.InputError, match=words):
        fast(*other)


# The second asks, but of an attribute of its own; its input goes where None is an error.
ASKING = "y = m.layer(x); return y if m.extra is None else y + m.extra"
UNASKED = {
    "no": (ForwardOfTwo("torch.add(x, z)"), (ROWS, ROWS)),
    "rejects": (Forward(ASKING, layer=nn.Linear(4, 4), extra=None), (ROWS,)),
}


@BOTH
@rows("model inputs", UNASKED)
def test_a_model_that_cannot_tell_has_no_guard(model: Any, inputs: Any, example: bool) -> None:
    fast = optimizer.optimize(model.eval(), inputs if example else None, level=1)

    assert [node for node in fast.graph.nodes if node.target in GUARDS] == []


def test_none_from_inside_is_not_taken_for_a_tensor() -> None:
    pair = Forward("x * 2, None if x.shape[0] > 0 else x")
    text = "y, mask = m.child(x); return y if mask is None else y + 1"
    model = Forward(text, child=pair).eval()

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    assert torch.equal(fast(ROWS), model(ROWS))


def test_a_guard_that_asks_more_serves_one_that_asks_less() -> None:
    class Turned(OptionalMask):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask).transpose(-1, -2).transpose(0, 1).relu()

    once = optimizer.optimize(Turned().eval(), torch.ones(2, 3), level=1)
    twice = optimizer.optimize(once, torch.ones(2, 3), level=1)

    assert len(twice.graph.nodes) == len(once.graph.nodes)
    with pytest.raises(optimizer.InputError, match="2 dimensions"):
        twice(torch.ones(1, 2, 3))


# A layer is changed for the length of one call, and everything is put back.
TOGGLES = {
    "the mode": "m.norm.train(); y = m.norm(m.layer(x)); m.norm.eval(); return y",
    "a stride": """
        m.layer.stride = (2, 2); y = m.norm(m.layer(x)); m.layer.stride = (1, 1); return y""",
    "a parameter": """
        held = m.norm._parameters; was = dict(held); held.update(weight=m.other, bias=was["weight"])
        y = m.norm(m.layer(x)); held.update(was); return y""",
    "half of a recording": """
        m.norm.train(); y = m.norm(m.layer(x)) if x.sum() < 1e9 else x; m.norm.eval(); return y""",
}


@BOTH
@pytest.mark.parametrize("behind", [True, False], ids=["child", "model"])
@pytest.mark.parametrize("name", TOGGLES)
def test_a_layer_that_is_changed_for_one_call_answers_as_in_eager(
    name: str, behind: bool, example: bool
) -> None:
    torch.manual_seed(0)
    layers = {"layer": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}
    toggled = Forward(TOGGLES[name], other=nn.Parameter(torch.full((4,), 3.0)), **layers)
    tail = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    model = (nn.Sequential(toggled, *tail) if behind else toggled).eval()
    eager = copy.deepcopy(model)

    fast = optimizer.optimize(model, IMAGES if example else None, check=None, level=1)

    folds = behind and example and "if" not in TOGGLES[name]
    assert not folds or fast.report.counts()["fold_affine"] >= 1
    for _ in range(2):
        torch.testing.assert_close(fast(IMAGES), eager(IMAGES))
    assert all(not module.training for module in model.modules())


def test_what_lay_in_memory_is_no_constant() -> None:
    model = Forward("x * torch.empty(4).nan_to_num(1.0).clamp(1.0, 1.0)").eval()

    assert torch.empty in {node.target for node in optimizer.capture(model, ROWS).graph.nodes}


GLOBAL = torch.ones(4)


@LEVELS
def test_a_tensor_outside_the_module_is_part_of_the_snapshot(level: int) -> None:
    function = lambda m, x: m.layer(x) * GLOBAL + x.relu() * GLOBAL  # noqa: E731
    model = Forward(function, layer=nn.Linear(4, 4)).eval()
    fast = optimizer.optimize(model, ROWS, level=level)
    before = model(ROWS)

    GLOBAL.mul_(3)
    after = fast(ROWS)
    GLOBAL.div_(3)

    torch.testing.assert_close(after, before.detach())


@torch.no_grad()
def without_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


ENTERING = "\n with torch.{}: y = m.layer(x) * 2\n return y + m.layer(x)"
MODES: dict[str, Any] = {
    "no_grad": ENTERING.format("no_grad()"),
    "inference_mode": ENTERING.format("inference_mode()"),
    "set_grad_enabled": ENTERING.format("set_grad_enabled(False)"),
    "a decorated helper": lambda m, x: without_gradient(m.layer, x) + x,
    "a decorated forward": torch.no_grad()(lambda m, x: m.layer(x) * 2),
    "a constant": "\n with torch.no_grad(): s = m.steps * 2\n return m.layer(x) * s",
    "set and put back": (
        "g = torch.is_grad_enabled(); torch.set_grad_enabled(False); y = m.layer(x)"
        "; torch.set_grad_enabled(g); return y + x"
    ),
    "detached": "m.layer(x).detach() + m.layer(x)",
}


def entering(function: Any) -> nn.Module:
    return Forward(function, layer=nn.Linear(4, 4), steps=torch.ones(())).eval()


def gradients(model: nn.Module) -> list[Any]:
    """The answer and the gradient of the input; none where the answer has none."""
    x = ROWS.clone().requires_grad_()
    y = model(x)
    if not y.requires_grad:
        return [y]
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("child", [True, False], ids=["child", "model"])
@pytest.mark.parametrize("name", MODES)
def test_gradients_are_those_of_the_original(name: str, child: bool) -> None:
    torch.manual_seed(0)
    own = entering(MODES[name])
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), own).eval() if child else own

    fast = optimizer.optimize(model, ROWS, level=1)

    assert name != "detached" or isinstance(fast, optimizer.OptimizedModule)
    torch.testing.assert_close(gradients(fast), gradients(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(ROWS), model(ROWS))


LEFT_OFF = """
    with torch.autocast("cpu", enabled=False): return m.layer(m.layer(x).float())"""
BY_AUTOCAST = "m.layer(x) * (2 if torch.is_autocast_enabled('cpu') else 3)"
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


@LEVELS
@pytest.mark.parametrize("text", [LEFT_OFF, BY_AUTOCAST])
def test_code_that_names_autocast_is_called_under_the_same(text: str, level: int) -> None:
    model = entering(text)

    fast = optimizer.optimize(model, ROWS, level=level)

    assert fast.report.front_end == "symbolic"
    torch.testing.assert_close(fast(ROWS), model(ROWS))
    with AUTOCAST, pytest.raises(optimizer.InputError, match="under the autocast you need"):
        fast(ROWS)


@LEVELS
def test_what_was_optimized_under_autocast_is_called_under_it(level: int) -> None:
    model = entering(BY_AUTOCAST)

    with AUTOCAST:
        fast = optimizer.optimize(model, ROWS, level=level)

        assert torch.equal(fast(ROWS), model(ROWS))
    with pytest.raises(optimizer.InputError, match="bfloat16"):
        fast(ROWS)


def test_without_an_argument_autocast_cannot_be_asked() -> None:
    class NoInput(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3) * (2 if torch.is_autocast_enabled("cpu") else 3)

    with pytest.raises(optimizer.CaptureError, match="takes no argument and asks for autocast"):
        optimizer.capture(NoInput())


def decorator(result: Callable[..., Any], *, named: bool = True) -> Callable[..., Any]:
    """Changes a result by the arguments that it was called with."""

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            shift = 0.0 if named else kwargs.pop("shift", 0.0)
            return result(forward(self, *args, **kwargs), args, kwargs) + shift

        return functools.wraps(forward)(wrapper) if named else wrapper

    return decorate


by_name = decorator(lambda y, args, kwargs: y * (100 if "x" in kwargs else 1))
by_count = decorator(lambda y, args, kwargs: y + 10 * len(args))
DECORATORS: dict[str, Callable[..., Any]] = {
    "names": by_name,
    "a number": by_count,
    "no wraps": decorator(lambda y, args, kwargs: y + len(kwargs), named=False),
    "nested": lambda forward: by_name(by_count(by_name(forward))),
}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one by position": ((ROWS,), {}),
    "one by name": ((), {"x": ROWS}),
    "two by position": ((ROWS, OTHER), {}),
    "two by name": ((), {"x": ROWS, "mask": OTHER}),
    "in another order": ((), {"mask": OTHER, "x": ROWS}),
    "None by position": ((ROWS, None), {}),
    "None by name": ((), {"x": ROWS, "mask": None}),
    "a number by name": ((), {"x": ROWS, "scale": 2.0}),
    "one of each": ((ROWS,), {"mask": OTHER}),
}
PLAIN: tuple[str, ...] = ("two by name", "two by position", "one of each", "in another order")


def decorated(decorate: Callable[..., Any] = lambda forward: forward) -> Any:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        @decorate
        def forward(self, x: Tensor, mask: Any = None, scale: float = 1.0) -> Tensor:
            y: Tensor = self.norm(self.layer(x)) * scale
            return y if mask is None else y * mask

    torch.manual_seed(0)
    return Decorated().eval()


@torch.no_grad()
def assert_same_answers(fast: Any, model: nn.Module, calls: Any) -> None:
    for args, kwargs in map(CALLS.__getitem__, calls):
        assert_close(fast(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_forward_is_right_however_it_is_called(name: str) -> None:
    model = decorated(DECORATORS[name])

    fast: Any = optimizer.optimize(model, (ROWS,), level=1)

    assert isinstance(fast, GuardedModule)
    assert "fold_affine" in fast.report.counts()
    assert_same_answers(fast, model, CALLS.keys() - {"one of each"})


def test_an_ordinary_forward_takes_its_arguments_in_any_way() -> None:
    fast: Any = optimizer.optimize(decorated(), {"mask": OTHER, "x": ROWS}, level=1)

    assert_same_answers(fast, decorated(), PLAIN)


def test_without_example_inputs_nothing_is_known_of_how_it_is_called() -> None:
    fast = optimizer.optimize(decorated(by_name), level=1)

    assert "can tell how its arguments" in fast.report.remarks[1]
    assert_same_answers(fast, decorated(by_name), CALLS)


CHILDREN = (
    "m.child(x)", "m.child(x=x)", "m.child(x, mask=x)", "m.child(mask=x, x=x)",
    "m.child(x, None, scale=2.0)",
)  # fmt: skip


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("call", CHILDREN)
def test_a_child_is_called_as_its_parent_calls_it(call: str, opaque: bool) -> None:
    model: Any = Forward(call, child=decorated(by_name)).eval()
    if opaque:
        model.child.register_forward_hook(lambda module, given, result: result + 1)

    fast: Any = optimizer.optimize(model, ROWS, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    assert_close(fast(ROWS + 1), model(ROWS + 1))


class Told(nn.Linear):
    """Sees how it is called, and cannot be recorded."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (given,) = (*args, *kwargs.values())
        factor = 2.0 if kwargs else 1.0
        return super().forward(given) * (factor if given.isfinite().all() else 0.0)


def test_a_child_that_cannot_be_recorded_is_called_by_name() -> None:
    model = Forward("m.child(input=x)", child=Told(4, 4)).eval()

    fast = optimizer.optimize(model, ROWS, level=1)

    torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_the_first_value_to_differ_is_found_in_a_call_by_name() -> None:
    other, example = decorated(), {"x": ROWS, "mask": OTHER}
    other.layer.bias.data.add_(1)
    fast = optimizer.optimize(other, example, level=0)

    with pytest.raises(optimizer.EquivalenceError, match=r"the first value to differ is .layer"):
        optimizer.check(decorated(), fast, example)


def model_of(text: str, **held: Any) -> Any:
    """A linear layer, a parameter and a buffer in an expression."""
    members = {"linear": nn.Linear(4, 4), "scale": nn.Parameter(torch.full((4,), 2.0))}
    return Forward(text, **members, flag=torch.ones(4), **held).eval()


def test_a_batch_norm_function_keeps_to_the_rank_it_was_captured_with() -> None:
    model = model_of("F.batch_norm(x, m.flag, m.var)", var=torch.full((4,), 2.0))

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    torch.testing.assert_close(fast(ROWS[:2]), model(ROWS[:2]))
    with pytest.raises(optimizer.InputError, match="2 dimensions and got 4"):
        fast(torch.ones(2, 4, 3, 3))


@pytest.mark.parametrize(("flag", "other"), [(True, 1), (False, 0), (None, False)])
def test_an_equal_argument_of_another_type_is_another_argument(flag: Any, other: Any) -> None:
    model = ForwardOfTwo("x * 2 if z is None or z is True else x * 3").eval()
    fast = optimizer.optimize(model, (ROWS, flag), check=None, level=1)

    assert torch.equal(fast(ROWS, flag), model(ROWS, flag))
    with pytest.raises(optimizer.InputError, match=f"optimized for z={flag}"):
        fast(ROWS, other)


def test_other_threads_do_not_notice_that_a_model_is_traced() -> None:
    seen, tracing = list[bool](), Event()
    other = nn.Linear(4, 4)

    def look() -> None:
        while tracing.is_set():
            seen.append({type(other(ROWS)), type(torch.zeros(4))} == {Tensor})

    thread = Thread(target=look)
    tracing.set()
    thread.start()
    for _ in range(20):
        optimizer.capture(model_of("torch.zeros(4).add_(x[0])"), ROWS)
    tracing.clear()
    thread.join()

    assert len(seen) > 20
    assert all(seen)


def test_a_batch_norm_function_that_is_not_folded_becomes_a_layer_with_data() -> None:
    model = model_of("F.batch_norm(x, m.flag, m.scale.detach())")

    fast = optimizer.optimize(model, ROWS, level=1)

    assert not any(buffer.is_meta for buffer in fast.buffers())
    torch.testing.assert_close(optimizer.optimize(fast, ROWS, level=1)(ROWS), model(ROWS))


RETURNED = """
    (x + 1, m.weight); (x + 1, m.buffer); (x + 1, m.plain); (x + 1, m.buffer.t());
    (x @ m.buffer, m.buffer[1:]); (x + 1, m.weight.detach()); (m.buffer, m.buffer, x + 1);
    (x + 1, torch.zeros(4, 4)); (torch.zeros(4, 4), torch.zeros(4, 4), x + 1);
    (torch.ones_like(m.buffer), torch.ones_like(m.buffer), x + 1); (torch.tensor(3.0), x + 1);
    (x + 1, m.weight * 2); (x + 1, (m.buffer * 2).t()); (x + 1, m.weight * 2, m.weight * 2);
    (x @ (m.buffer * 2), m.buffer * 2); {"a": [m.buffer * 2], "b": (x + 1,)};
    (*(m.buffer * 2).chunk(2), x + 1); (m.buffer.clone(), x.clone());
    (x.contiguous(), m.buffer.contiguous()); (m.buffer.to(torch.float32), m.buffer.double(), x + 1);
    (F.dropout(m.buffer, training=False), x + 1); (m.linear(m.buffer), m.linear(m.buffer), x + 1);
    (x.tanh(), x.tanh()); (x.tanh(), x.tanh().t()); (x.clone(), x.clone());
    (x.exp().chunk(2)[0], x.exp().chunk(2)[0]); (m.norm(m.linear(x)), m.linear.weight);
    (m.norm(m.linear(x)), m.norm.running_mean); (m.linear(x) * m.buffer[0], m.buffer.view(16));
    (m.linear(x) * m.weight, m.weight); (torch.addmm(m.buffer[0], x, m.weight), m.weight);
    (F.linear(x, m.weight, m.buffer[0]), m.weight); [x.tanh()] * 2
"""


@LEVELS
@pytest.mark.parametrize("text", texts(RETURNED))
def test_who_writes_what_is_returned_sees_what_the_model_would_show(text: str, level: int) -> None:
    """The original and the result are called in turn, and all they return is written."""
    held = {"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "buffer": torch.randn(4, 4)}
    model: Any = Forward(text, weight=nn.Parameter(torch.randn(4, 4)), **held)
    model.plain, x = torch.randn(4, 4), torch.randn(4, 4)
    randomize(model.eval())
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


ASKED = """
    m.linear(x.to(next(m.parameters()).dtype)); x.new_ones(4).to(next(m.parameters()));
    torch.zeros(4, dtype=next(m.parameters()).dtype, device=next(m.parameters()).device) + 1
"""


@LEVELS
@pytest.mark.parametrize("text", texts(ASKED))
def test_what_a_model_asks_of_its_weights_is_asked_after_a_cast_too(text: str, level: int) -> None:
    model = Forward(text, linear=nn.Linear(4, 4)).eval()
    fast = optimizer.optimize(model, ROWS, level=level).double()
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), model.double()(ROWS))


def sharing(*tensors: Tensor) -> list[int]:
    """For each tensor, the first that shares its memory."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [memory.index(each) for each in memory]


def viewed() -> Any:
    """A buffer that is a view of a parameter, by which the forward writes it."""
    weight = nn.Parameter(torch.zeros(4))
    text = "y = (x + m.weight) * 2; m.view.add_(1); return y"
    return Forward(text, weight=weight, view=weight.data).eval()


def test_a_view_of_a_parameter_stays_its_view() -> None:
    model, other = viewed(), viewed()
    fast = optimizer.optimize(model, torch.ones(4), level=0)

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(torch.ones(4)), other(torch.ones(4)))
    assert not model.weight.any()
