"""Capture by torch.export: what it records, what later calls are held to, what it refuses."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import models
import optimizer
from optimizer import InputError

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
Pair = namedtuple("Pair", "first second")


class Model(nn.Module):
    """Runs the forward of a case; it has a layer, a parameter, a buffer and a plain tensor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("count", torch.zeros(4))
        self.plain, self.calls, self.seen = torch.zeros(4), 0, []
        self.function = function
        self.eval()

    def forward(self, x: Any, y: Any = None, *, scale: float = 1.0) -> Any:
        if self.function is with_all_inputs:
            return self.function(self, x, y, scale)
        return self.function(self, x)


def exported(function: Callable[..., Any], inputs: Any = ROWS) -> Any:
    return optimizer.optimize(Model(function), inputs, capture="export", level=1)


def assert_same(expected: Any, actual: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert spec == new_spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def branch_on_features(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if x.shape[-1] == 4 else x


def branch_on_data(m: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def asks_for_three(m: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 2 else x


def asks_for_one(m: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x


def over_rows(m: Any, x: Tensor) -> Tensor:
    return sum(m.linear(row) for row in x)


def counting(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.count + m.plain


def replacing(m: Any, x: Tensor) -> Tensor:
    m.count = m.count + 1
    return x * m.count


def writing_its_input(m: Any, x: Tensor) -> Tensor:
    return x.add_(1).relu_()


def masked(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0.5
    return y


def drawing(m: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + torch.rand(4) + torch.randn_like(x)


def returning_all(m: Any, x: Tensor) -> Any:
    return {"x": x, "list": [m.linear(x), None, 3], "ordered": OrderedDict(a=x.t())}


def made_and_written(m: Any, x: Tensor) -> Tensor:
    total = torch.tensor([0.0, 0.0, 0.0, 0.0])
    total += x[0]
    return total


def views(m: Any, x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, 2).transpose(1, 2).reshape(x.shape[0], -1).double().T


@pytest.mark.parametrize(
    "function",
    [branch_on_features, asks_for_three, asks_for_one, over_rows, counting, replacing,
     writing_its_input, masked, drawing, returning_all, made_and_written, views],
)  # fmt: skip
def test_an_exported_model_does_what_the_model_does(function: Callable[..., Any]) -> None:
    model, fast = Model(function), exported(function)
    before = copy.deepcopy(model.state_dict())

    optimizer.optimize(model, ROWS, capture="export", level=1)

    assert fast.report.front_end == "export", fast.report
    assert "captured by export" in str(fast.report)
    assert_same(before, model.state_dict())
    for step in range(3):
        one, other = ROWS + step, ROWS + step
        torch.manual_seed(step)
        with torch.no_grad():
            expected = model(one)
        torch.manual_seed(step)
        with torch.no_grad():
            assert_same(expected, fast(other))
        assert torch.equal(one, other)


def keeps_count(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


def keeps_a_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain = x
    return x + m.plain


def keeps_a_list(m: Any, x: Tensor) -> Tensor:
    m.seen.append(len(m.seen))
    return x * len(m.seen)


def assigns_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.scale = nn.Parameter(m.scale + 1)
    return x * m.scale


def changes_a_list(m: Any, x: list[Tensor]) -> Tensor:
    x.append(x[0] * 2)
    return x[0] + 1


def swallows_an_error(m: Any, x: Tensor) -> Tensor:
    factor = 1
    with contextlib.suppress(Exception):
        factor = int(x.sum()) + 7
    return x * factor


def rolls_dice(m: Any, x: Tensor) -> Tensor:
    return x * random.random()


def writes_a_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.add_(1)
    return x * m.scale


CALLS = [0]


def counts_elsewhere(m: Any, x: Tensor) -> Tensor:
    CALLS[0] += 1
    return x * CALLS[0]


def writes_a_plain_tensor(m: Any, x: Tensor) -> Tensor:
    return x + m.plain.add_(2)


def records_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


def returns_a_pair(m: Any, x: Tensor) -> Any:
    return Pair(x, x * 2)


def returns_a_defaultdict(m: Any, x: Tensor) -> Any:
    return defaultdict(list, twice=x * 2)


class Box:
    """A tree that the user registered, as those of `transformers` are."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(
    Box,
    lambda box: ([box.value], None),
    lambda values, _: Box(*values),
    serialized_type_name="tests.Box",
)


def returns_a_box(m: Any, x: Tensor) -> Any:
    return Box(x * 2)


def checks_the_data(m: Any, x: Tensor) -> Any:
    number = (x > 0).sum().item()
    torch._check(number > 0)
    return x * number


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branch_on_data, "data-dependent"),
        (keeps_count, "keeps state in Python"),
        (keeps_a_tensor, "keeps state in Python"),
        (keeps_a_list, "keeps state in Python"),
        (assigns_a_parameter, "keeps state in Python"),
        (counts_elsewhere, "keeps state in Python"),
        (swallows_an_error, "it catches an error"),
        (rolls_dice, "random numbers in Python"),
        (writes_a_parameter, "a tensor that is no buffer"),
        (writes_a_plain_tensor, "a tensor that is no buffer"),
        (records_gradients, "it enters"),
        (returns_a_pair, "it returns a Pair"),
        (returns_a_defaultdict, "it returns a defaultdict"),
        (returns_a_box, "it returns a Box"),
        (checks_the_data, "asserts something of a number"),
    ],
)
def test_what_export_would_lose_is_refused(function: Callable[..., Any], reason: str) -> None:
    CALLS[0] = 0
    model, fast = Model(function), exported(function)

    assert CALLS == [0]
    assert fast.report.front_end == ""
    assert reason in fast.report.remarks[-1]
    for step in range(2):
        random.seed(step)
        expected, CALLS[0] = model(ROWS + step), step
        random.seed(step)
        assert_same(expected, fast(ROWS + step))


def test_a_list_that_is_given_is_changed_as_in_eager() -> None:
    fast, given = exported(changes_a_list, ([ROWS],)), [ROWS]

    fast(given)

    assert "changes a container" in fast.report.remarks[-1]
    assert len(given) == 2


class AnyNumber(nn.Module):
    def forward(self, *values: Tensor, **named: Tensor) -> Tensor:
        return sum([*values, *named.values()])


@pytest.mark.parametrize("capture", ["export", "symbolic"])
def test_any_number_of_inputs_is_that_of_the_example(capture: Any) -> None:
    by_position = optimizer.optimize(AnyNumber().eval(), (ROWS, ROWS), capture=capture, level=1)
    by_name = optimizer.optimize(
        AnyNumber().eval(), {"x": ROWS, "y": ROWS}, capture=capture, level=1
    )

    assert_same(by_position(ROWS, ROWS), 2 * ROWS)
    assert_same(by_name(y=ROWS, x=ROWS), 2 * ROWS)
    for fast, named in ((by_position, {"x": ROWS}), (by_name, {"z": ROWS})):
        with pytest.raises(InputError, match="keyword arguments"):
            fast(ROWS, ROWS, **named)


class CountsExtras(nn.Module):
    def forward(self, x: Tensor, extras: list[Tensor]) -> Tensor:
        return x * (1 + len(extras))


def test_an_empty_list_is_guarded_although_nothing_reads_it() -> None:
    fast = optimizer.optimize(CountsExtras().eval(), (ROWS, []), capture="export", level=1)

    assert_same(fast(ROWS, []), ROWS)
    with pytest.raises(InputError, match="another structure"):
        fast(ROWS, [ROWS])


def test_autocast_that_was_on_is_not_baked_in() -> None:
    model = Model(branch_on_features)
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimizer.optimize(model, ROWS, capture="export", level=1)

        assert fast(ROWS).dtype == torch.bfloat16
    assert "autocast" in fast.report.remarks[-1]
    assert fast(ROWS).dtype == torch.float32


def test_an_assertion_of_the_data_still_fails() -> None:
    def positive(m: Any, x: Tensor) -> Tensor:
        torch._assert_async((x > -3).all(), "too low")
        return x * 2

    fast = exported(positive)

    assert fast.report.front_end == "export"
    with pytest.raises(RuntimeError, match="too low"):
        fast(ROWS - 3)


def test_a_hook_is_not_lost() -> None:
    model, seen = Model(branch_on_features), []
    model.linear.register_forward_hook(lambda *_: seen.append(1))

    fast = optimizer.optimize(model, ROWS, capture="export", level=1)
    seen.clear()
    fast(ROWS)

    assert "hooks" in fast.report.remarks[-1]
    assert seen == [1]


def test_auto_exports_what_cannot_be_traced_and_gives_both_reasons_where_neither_can() -> None:
    traced = optimizer.optimize(Model(masked), ROWS, level=1)
    fast = optimizer.optimize(Model(branch_on_features), ROWS, static_shapes=True, level=1)
    symbolic = optimizer.optimize(Model(branch_on_features), ROWS, capture="symbolic", level=1)
    free = optimizer.optimize(Model(branch_on_features), ROWS, level=1)
    neither = optimizer.optimize(Model(branch_on_data), ROWS, static_shapes=True, level=1)

    assert traced.report.front_end == "symbolic"
    assert fast.report.front_end == "export"
    assert symbolic.report.front_end == free.report.front_end == ""
    assert "control flow" in neither.report.remarks[-1]
    assert "data-dependent" in neither.report.remarks[-1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("later", [1, 2, 7])
def test_the_batch_is_free_where_nothing_asks_for_it(rows: int, later: int) -> None:
    model = Model(branch_on_features)
    fast = optimizer.optimize(model, ROWS[:rows], level=1)

    assert_same(model(torch.ones(later, 4)), fast(torch.ones(later, 4)))


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (asks_for_three, (3, 5), (1, 2)),
        (asks_for_one, (3,), (1,)),
        (over_rows, (3,), (1, 2, 4)),
    ],
)
def test_a_batch_that_was_asked_for_is_guarded(
    function: Callable[..., Any], right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    model, fast = Model(function), exported(function)

    for rows in right:
        assert_same(model(torch.ones(rows, 4)), fast(torch.ones(rows, 4)))
    for rows in wrong:
        with pytest.raises(InputError, match="like the example in size"):
            fast(torch.ones(rows, 4))


@pytest.mark.parametrize(
    "other",
    [ROWS.double(), torch.ones(3, 5), torch.ones(2, 3, 4), torch.ones(4, 3).t(), None],
    ids=["dtype", "size", "rank", "memory format", "None"],
)
def test_what_export_bakes_in_is_guarded(other: Any) -> None:
    with pytest.raises(InputError, match="optimize it again"):
        exported(branch_on_features)(other)


def with_all_inputs(m: Any, x: Any, y: Any, scale: float) -> Any:
    first, second = x["rows"]
    shifted = first * scale + second
    return shifted if y is None else shifted + y


def test_nested_optional_and_keyword_inputs() -> None:
    model = Model(with_all_inputs)
    nested = {"rows": (ROWS, ROWS + 1)}

    plain = optimizer.optimize(model, (nested,), capture="export", level=1)
    full = optimizer.optimize(
        model, {"x": nested, "scale": 3.0, "y": ROWS}, capture="export", level=1
    )

    assert plain.report.front_end == full.report.front_end == "export", plain.report
    assert_same(model(nested), plain(nested))
    assert_same(model(x=nested, y=ROWS, scale=3.0), full(x=nested, y=ROWS, scale=3.0))
    other = {"rows": (ROWS[:2], ROWS[1:])}
    assert_same(model(other), plain(other))
    for wrong in ((nested, ROWS), ({"rows": [ROWS, ROWS]},), ({"rows": (ROWS, ROWS[:2])},)):
        with pytest.raises(InputError):
            plain(*wrong)
    with pytest.raises(InputError, match="scale"):
        full(nested, ROWS, scale=2.0)


def test_a_result_of_export_pickles_and_is_optimized_again() -> None:
    model = Model(branch_on_features)
    fast = optimizer.optimize(model, ROWS, static_shapes=True, level=1)

    fast.refit(model.state_dict())
    loaded = pickle.load(io.BytesIO(pickle.dumps(fast)))
    again = optimizer.optimize(fast, ROWS, level=1)

    for other in (loaded, again):
        assert_same(model(ROWS[:2]), other(ROWS[:2]))
        with pytest.raises(InputError):
            other(torch.ones(3, 5))


# torch's own pickling and decompositions use what torch has deprecated.
leaf_spec = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@leaf_spec
def test_batchnorms_of_an_exported_program_fold() -> None:
    workload = models.load("resnet18")
    program = torch.export.export(workload.module, workload.example_inputs)
    core = program.run_decompositions()

    for each in (program, core):
        fast = optimizer.optimize(each, level=1)

        assert fast.report.counts()["fold_affine"] == 20
        optimizer.check(workload.module, fast, workload.example_inputs)


def test_an_exported_program_keeps_its_dynamic_sizes_and_its_buffers() -> None:
    model, batch = Model(counting), torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(copy.deepcopy(model), (ROWS,), dynamic_shapes=({0: batch},))

    fast = optimizer.optimize(program, level=1)

    assert fast.report.front_end == "exported program"
    for rows in (3, 8):
        assert_same(model(torch.ones(rows, 4)), fast(torch.ones(rows, 4)))
    for rows in (1, 9):
        with pytest.raises(InputError):
            fast(torch.ones(rows, 4))
    assert torch.equal(program.state_dict["count"], torch.zeros(4))


@leaf_spec
@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear])
@pytest.mark.parametrize("decomposed", [False, True])
def test_every_layer_has_one_spelling(convolution: Any, decomposed: bool) -> None:
    ranks = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5, nn.Linear: 2}
    norm: Any = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(ranks[convolution], nn.BatchNorm1d)
    layer = convolution(4, 6) if convolution is nn.Linear else convolution(4, 6, 3, padding=1)
    model = nn.Sequential(layer, norm(6), nn.Dropout(), nn.ReLU()).eval()
    nn.init.normal_(model[1].running_mean)
    x = torch.randn(2, 4, *[5] * (ranks[convolution] - 2))
    program = torch.export.export(model, (x,))

    fast = optimizer.optimize(program.run_decompositions() if decomposed else program, level=1)

    assert fast.report.counts()["fold_affine"] == 1, fast.report
    assert "fold_affine" in fast.report.counts()
    assert "aten.dropout" not in fast.code
    assert_same(model(x), fast(x))


def test_arguments_that_do_not_exist() -> None:
    with pytest.raises(InputError, match="does not exist"):
        optimizer.optimize(Model(masked), ROWS, capture="dynamo", level=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pass example_inputs"):
        optimizer.optimize(Model(masked), capture="export", level=1)
