"""Attention with constants on its scores as one call: the same values, and only where it is so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer._inputs import Call
from optimizer._lowered import LoweredModule
from optimizer._report import Choice
from optimizer._trees import tensors_in
from optimizer.lowering._attention import as_one_call, extract_attention
from optimizer.lowering._policies import AS_IT_IS, POLICIES
from optimizer.lowering._straight_line import straight_line

BATCH, HEADS, TOKENS, SIZE = 4, 2, 5, 8
NAME = "attention in one call"
INFINITY = math.inf
pytestmark = pytest.mark.usefixtures("last_candidate_wins")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Constants(nn.Module):
    """What may join scores: its tensors are the same in each call."""

    def __init__(self) -> None:
        super().__init__()
        hidden = torch.zeros(TOKENS, TOKENS)
        hidden[2] = -INFINITY
        self.bias = nn.Parameter(drawn(HEADS, TOKENS, TOKENS))
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))
        self.register_buffer("windows", torch.where(drawn(2, TOKENS, TOKENS) > 0, 0.0, -100.0))
        self.register_buffer("factors", drawn(HEADS, 1, 1).abs())
        self.register_buffer("sizes", drawn(SIZE))
        self.register_buffer("hidden", hidden)
        self.register_buffer("not_a_number", torch.full((TOKENS,), math.nan))
        self.register_buffer("infinite", torch.full((TOKENS,), INFINITY))


def of_windows(scores: Any, c: Any) -> Any:
    """As in Swin: every second image is another window."""
    several = scores.view(2, 2, HEADS, TOKENS, TOKENS) + c.windows.unsqueeze(1).unsqueeze(0)
    return several.view(-1, HEADS, TOKENS, TOKENS)


Joined = Callable[[Any, Any], Any]  # of scores and `Constants`
TAKEN: dict[str, Joined] = {
    "a bias": lambda s, c: s + c.bias,
    "a bias before": lambda s, c: c.bias + s,
    "less a bias": lambda s, c: s - c.bias,
    "a mask": lambda s, c: s.masked_fill(c.later, -INFINITY),
    "a mask in place": lambda s, c: s.masked_fill_(c.later, -INFINITY),
    "a mask by number": lambda s, c: s - 1e9 * c.later.to(s.dtype),
    "windows": lambda s, c: of_windows(s + c.bias, c),
    "a factor for each head": lambda s, c: s * c.factors + c.bias,
    "a number": lambda s, c: s / 3 + c.bias,
    "a number after": lambda s, c: (s + c.bias) * 0.5,
    "a number before": lambda s, c: 0.5 * s + c.bias,
}
SPELLED: dict[str, dict[str, Any]] = {
    "softmax of a tensor": {"softmax": lambda s: s.softmax(-1)},
    "softmax by keyword": {"softmax": lambda s: F.softmax(input=s, dim=-1)},
    "softmax of torch": {"softmax": lambda s: torch.softmax(s, dim=3)},
    "unscaled": {"scaled": lambda q, k: (q, k)},
    "k scaled": {"scaled": lambda q, k: (q, 2 * k)},
    "both scaled": {"scaled": lambda q, k: (q / 2, k * 0.5)},
    "scaled by itself": {"scaled": lambda q, k: (q * q, k)},
    "q is k": {"scaled": lambda q, k: (q, q)},
    "not moved": {"moved": lambda y: y},
    "moved, not copied": {"moved": lambda y: y.transpose(1, 2)},
    "flattened": {"moved": lambda y: torch.permute(y, (0, 2, 1, 3)).flatten(2)},
    "moved by keyword": {"moved": lambda y: torch.transpose(input=y, dim0=1, dim1=2).flatten(2)},
    "viewed": {"moved": lambda y: y.view(BATCH, -1)},
    "made contiguous": {"moved": lambda y: y.transpose(1, 2).contiguous().view(BATCH, -1)},
    "read twice": {"moved": lambda y: (y.mean(), y.transpose(1, 2).reshape(BATCH, -1))},
}


class Attends(Constants):
    """Attention with `joined` on its scores."""

    def __init__(self, joined: Joined = TAKEN["a bias"], **how: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.joined = joined
        self.softmax = how.get("softmax", lambda s: F.softmax(s, dim=-1))
        self.scaled = how.get("scaled", lambda q, k: (q * SIZE**-0.5, k))
        self.moved = how.get("moved", lambda y: y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> Any:
        qkv = self.qkv(x).reshape(-1, TOKENS, 3, HEADS, SIZE)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.scaled(q, k)
        weights = self.softmax(self.joined(q @ k.transpose(-2, -1), self))
        return self.moved(F.dropout(weights, 0.1, self.training) @ v)


class Twice(nn.Module):
    """One after another, alike but for what joins the scores."""

    def __init__(self, one: Joined, other: Joined) -> None:
        super().__init__()
        self.one, self.other = Attends(one), Attends(other)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.one(x)
        return y, self.other(y)


def values(batch: int = BATCH) -> torch.Tensor:
    return drawn(batch, TOKENS, HEADS * SIZE)


def lowered(model: nn.Module, x: torch.Tensor) -> LoweredModule:
    fast = optimizer.optimize(model.eval(), (x,), level=2)
    assert isinstance(fast, LoweredModule), fast.report
    return fast


def choices(fast: LoweredModule) -> list[Choice]:
    return [choice for choice in fast.report.choices if choice.region == "attention"]


def chosen(fast: LoweredModule) -> list[str]:
    return [choice.chosen for choice in choices(fast)]


C = Constants()


def attention(q: Any, k: Any, v: Any, joined: Joined = TAKEN["a bias"]) -> Any:
    return joined(q @ k, C).softmax(-1) @ v


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    """The keys as they are multiplied with."""
    q, k, v = drawn(3, *(shape or (BATCH, HEADS, TOKENS, SIZE))).unbind(0)
    return q, k.transpose(-2, -1), v


def regions(run: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The attentions that can be one call."""
    held = [*C.parameters(), *C.buffers()]
    module = straight_line(run, held, Call(tuple(inputs), {})).module
    extract_attention(module)
    return list(module.children())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("joined", TAKEN.values(), ids=TAKEN)
def test_what_joins_the_scores_becomes_a_constant(joined: Joined, dtype: torch.dtype) -> None:
    model, x = Attends(joined).to(dtype), values().to(dtype)
    fast = lowered(model, x)

    assert chosen(fast) == [NAME]
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("how", SPELLED.values(), ids=SPELLED)
def test_however_it_is_spelled(how: dict[str, Any]) -> None:
    model, x = Attends(**how), values()
    fast = lowered(model, x)

    assert chosen(fast) == [NAME]
    torch.testing.assert_close(fast(x), model(x))
    strides = [tensor.stride() for tensor in tensors_in(model(x))]
    assert [tensor.stride() for tensor in tensors_in(fast(x))] == strides


@pytest.mark.parametrize(
    "run",
    [
        lambda q, k, v: attention(q * C.sizes, k, v),
        lambda q, k, v: torch.transpose(input=attention(q, k, v), dim0=1, dim1=2),
    ],
    ids=["scaled by a tensor", "moved by keyword"],
)
def test_what_is_not_part_of_it_stays_beside_it(run: Callable[..., Any]) -> None:
    outer = straight_line(run, [*C.parameters(), *C.buffers()], Call(qkv(), {})).module
    extract_attention(outer)
    outer.recompile()
    (region,) = outer.children()
    inputs: list[Any] = []
    region.register_forward_pre_hook(lambda _, given: inputs.extend(given))
    outer(*qkv())
    outer.set_submodule("attention_0", as_one_call(region, inputs))

    torch.testing.assert_close(outer(*qkv())[0], run(*qkv()))


def test_the_scores_are_never_held() -> None:
    (region,) = regions(attention, qkv())
    program = as_one_call(region, qkv())

    called = [node.target for node in program.graph.nodes if node.op.startswith("call")]
    assert called == ["transpose", F.scaled_dot_product_attention, "contiguous"]


def test_numbers_are_the_scale_and_repeats_are_held_once() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q * 0.25, k / 2, v, lambda s, c: s * 3 + c.bias)

    (region,) = regions(run, qkv())
    program = as_one_call(region, qkv())

    (node,) = program.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert node.kwargs["scale"] == pytest.approx(0.375)
    held = {name: tuple(buffer.shape) for name, buffer in program.named_buffers()}
    assert held == {"bias": (1, HEADS, TOKENS, TOKENS)}


def test_what_laid_the_result_out_has_nothing_to_copy() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v).transpose(1, 2).reshape(BATCH, TOKENS, -1)

    q, k, v = drawn(3, BATCH, TOKENS, HEADS, SIZE).transpose(2, 3).unbind(0)
    inputs = q, k.mT, v
    (region,) = regions(run, inputs)
    program = as_one_call(region, inputs)
    with torch.profiler.profile() as profile:
        program(*inputs)

    assert not {"aten::copy_", "aten::clone"} & {event.key for event in profile.key_averages()}


NOT_FOUND: dict[str, Callable[..., Any]] = {
    "nothing joins": lambda q, k, v: attention(q, k, v, lambda s, c: s * 2),
    "a mask of the inputs": lambda q, k, v: attention(q, k, v, lambda s, c: s + q.mean()),
    "a number for scores": lambda q, k, v: attention(
        q, k, v, lambda s, c: s.masked_fill(c.later, -1e9)
    ),
    "a sum by keyword": lambda q, k, v: attention(
        q, k, v, lambda s, c: torch.add(input=s, other=c.bias)
    ),
    "twice the bias": lambda q, k, v: attention(
        q, k, v, lambda s, c: torch.add(s, c.bias, alpha=2)
    ),
    "a bias less the scores": lambda q, k, v: attention(q, k, v, lambda s, c: c.bias - s),
    "divided by the scores": lambda q, k, v: attention(q, k, v, lambda s, c: 3 / s + c.bias),
    "joined by an input too": lambda q, k, v: attention(
        q, k, v, lambda s, c: (s + c.bias) + s.mean()
    ),
    "scores read elsewhere": lambda q, k, v: ((s := q @ k) + C.bias).softmax(-1) @ v + s.mean(),
    "their sum read elsewhere": lambda q, k, v: (s := q @ k + C.bias).softmax(-1) @ v + s.mean(),
    "over queries": lambda q, k, v: (q @ k + C.bias).softmax(-2) @ v,
    "of another dtype": lambda q, k, v: (q @ k + C.bias).softmax(-1, torch.float64) @ v.double(),
    "of this dtype": lambda q, k, v: torch.softmax(q @ k + C.bias, -1, dtype=torch.float32) @ v,
    "weights read elsewhere": lambda q, k, v: (w := (q @ k + C.bias).softmax(-1)) @ v + w.mean(),
    "product by keyword": lambda q, k, v: torch.matmul((q @ k + C.bias).softmax(-1), other=v),
    "scores by keyword": lambda q, k, v: (torch.matmul(q, other=k) + C.bias).softmax(-1) @ v,
    "of no weights": lambda q, k, v: q @ k,
}


@pytest.mark.parametrize("run", NOT_FOUND.values(), ids=NOT_FOUND)
def test_what_is_none_is_left_alone(run: Callable[..., Any]) -> None:
    assert not regions(run, qkv())


REJECTED: dict[str, tuple[Joined, str]] = {
    "a query sees no key": (lambda s, c: s + c.hidden, "hidden from all keys"),
    "not a number": (lambda s, c: s + c.not_a_number, "hidden from all keys"),
    "infinite": (lambda s, c: s + c.infinite, "hidden from all keys"),
    "a factor for each query": (lambda s, c: s * c.bias[:, :, :1] + c.bias, "factors of their"),
    "another dtype": (lambda s, c: s + c.bias.double(), "shape or dtype"),
    "another shape": (lambda s, c: s + c.bias[None, None], "shape or dtype"),
}


@pytest.mark.parametrize(("joined", "reason"), REJECTED.values(), ids=REJECTED)
def test_what_cannot_be_one_call_is_rejected(joined: Joined, reason: str) -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        weights = joined(q @ k, C).softmax(-1)
        return weights @ v.to(weights.dtype)

    q, k, v = qkv()
    (region,) = regions(run, (q, k, v))
    with pytest.raises(ValueError, match=reason):
        as_one_call(region, (q, k, v.to(run(q, k, v).dtype)))


@pytest.mark.parametrize(
    "shapes",
    [
        [(HEADS, TOKENS, SIZE)] * 3,
        [(1, BATCH, HEADS, TOKENS, SIZE)] * 3,
        [(1, HEADS, TOKENS, SIZE), (1, HEADS, TOKENS, SIZE), (1, HEADS, TOKENS, SIZE + 1)],
        [(BATCH, HEADS, TOKENS, SIZE), (1, HEADS, TOKENS, SIZE), (BATCH, HEADS, TOKENS, SIZE)],
    ],
    ids=["three dimensions", "five", "values of another size", "one for all"],
)
def test_where_torch_has_no_kernel_it_is_rejected(shapes: list[tuple[int, ...]]) -> None:
    q, k, v = (drawn(*shape) for shape in shapes)
    inputs = q, k.transpose(-2, -1), v
    (region,) = regions(attention, inputs)
    with pytest.raises(ValueError, match="no faster kernel"):
        as_one_call(region, inputs)


def test_a_hidden_query_is_not_a_number_as_ever() -> None:
    model, x = Attends(lambda s, c: s + c.hidden), values()
    fast = lowered(model, x)

    (choice,) = choices(fast)
    assert choice.chosen == AS_IT_IS
    assert "hidden from all keys" in choice.rejected[NAME]
    assert fast(x).isnan().any()
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_a_hidden_query_in_the_second_of_two_alike_is_seen() -> None:
    """Which is of the first one's kind, and so not verified again."""
    model = Twice(lambda s, c: s + c.hidden.clamp(min=-100), lambda s, c: s + c.hidden)
    fast, x = lowered(model, values()), values()

    assert chosen(fast) == [NAME, AS_IT_IS]
    assert fast(x)[1].isnan().any()
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_a_bias_that_is_written_counts() -> None:
    model, x = Attends(), values()
    fast = lowered(model, x)
    with torch.no_grad():
        model.bias.mul_(5)
    fast.load_state_dict(fast.state_dict() | {"bias": model.bias})

    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("number", [math.nan, INFINITY, -INFINITY])
def test_inputs_that_are_not_finite_run_the_models_own_code(number: float) -> None:
    model, x = Attends(), values()
    fast = lowered(model, x)
    x[0, 0, 0] = number

    assert fast.plan_for((x,), {}) is not None
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_16_bits() -> None:
    model, x = Attends().bfloat16(), values().bfloat16()
    fast = lowered(model, x)
    before, after = model(x).double(), fast(x).double()
    exact = model.double()(x.double())

    assert chosen(fast) == [NAME]
    assert (after - exact).norm() <= (before - exact).norm()  # it keeps the scores in 32 bits


def test_no_images_at_all() -> None:
    model = Attends(moved=lambda y: y)
    fast = lowered(model, values(0))

    assert fast(values(0)).shape == (0, HEADS, TOKENS, SIZE)
    torch.testing.assert_close(fast(values()), model(values()))


@pytest.mark.parametrize(("kind", "offered"), [("cpu", [NAME]), ("cuda", [NAME]), ("mps", [])])
def test_where_it_is_offered(kind: str, offered: list[str]) -> None:
    (region,) = regions(attention, qkv())

    assert POLICIES[kind].offered(region, qkv()) == offered


def test_untimed_it_is_one_call() -> None:
    model, x = Attends(), values()
    fast = optimizer.optimize(model.eval(), (x,), level=2, tune_seconds=0)

    assert chosen(fast) == [NAME]
    torch.testing.assert_close(fast(x), model(x))
