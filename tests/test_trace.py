"""Straight-line code: it repeats what a call did, and leaves in memory what eager leaves there."""

from __future__ import annotations

import pytest
import torch
import torch._decomp  # as Dynamo imports it
from torch import nn
from torch.testing import assert_close

import optimizer
from optimizer import Refused
from tests.internals import name_of_call, storages_in, tensors_in
from tests.level_2 import Then, fake_gpu, image, line_of, lowered, offer, plan_of
from tests.single_pass import ForwardOfTwo, function_of, rows, texts

WRITTEN_AROUND = "y = x + 1; view = y[:, :1]; before = y * 3; view.mul_(-2); return before, "
PLACE = "y = cache * 2; at = torch.tensor([2]); cache.index_copy_(0, at, x[:1].exp()); "
CONSTANT = "x + 1, torch.arange(3.0)"
# What is called with an x of (2, 3) and a cache of (4, 3): writes, and values of several names.
PROGRAMS = [
    "x.add_(1)", "torch.mul(x, 2, out=cache[:2])", "x[:, 0].zero_(); return x * 2",
    "y = cache.sum(); cache.index_copy_(0, torch.tensor([1, 0]), x.exp());"
    "return y, cache[:1] * x, cache",
    *(PLACE + read for read in (
        "return y, cache.exp() * x[:1], cache", "cache.mul_(2); return y", "return cache[:1], x",
        "return cache.t()[1:], cache.view(-1)[5:] * 2, cache.clone()", PLACE + "return cache * 2",
    )),
    "view = cache[:2]; cache.index_copy_(0, torch.tensor([1]), x[:1]); return view * 2, cache + 1",
    "row = x[:1]; " + PLACE.replace("x[:1].exp()", "row") + "row.mul_(2); return cache * 2",
    "y = cache.clone(); cache.index_copy_(-1, torch.tensor([1]), y[:, :1]); return y + cache",
    "at = x[0, :1].mul(0).long(); view = at[:]; cache.index_copy_(0, at, x[:1]); view.add_(1);"
    "return cache * 2, at",
    "copy = x.clone(); at = torch.tensor([0]); x.index_copy_(0, at, (cache * 2)[:1]);"
    "cache.index_copy_(0, at, copy[:1]); return x + 1, cache * 2",
    *(WRITTEN_AROUND + read for read in ("y", "y * 2", "y[:, 1:] + y[:, :1]", "(y.neg_(), view)")),
    "y = x.new_zeros(4, 3); v = y[1:3]; old = y + 1; v.copy_(x); return old, y * 2, v",
    "one = torch.ones(2, 3); y = x * one; one.add_(1); return y, x * one",
    "one = torch.ones(2, 3); v = one[:, :2]; y = x[:, :2] * v; one.add_(1); return y, v * x[:, 1:]",
    "y = x.exp(); y.add_(1); view = y[:1]; view.mul_(2); return y",
    "y = x.exp(); copy = y.clone(); y[:1].mul_(2); return copy * 1, y + 1",
    "y = x.exp(); y.add_(1); copy = y.clone(); y[:1].mul_(2); return copy * 1, y + 1",
    "(x * 2).add_(x.double())", "(x * 2).gt_(1)", "x.data.mul_(2) + x",
    "y = x * 2; y.t_().unsqueeze_(0); return y + 1",
    "torch.max(x, 1, out=(cache[:2, 0], torch.zeros(2).long()))",
    "torch.cat([x + 1, x])[:, :2].relu_() * 2",  # GhostNet cuts a sum so (issue 19)
    "y = x + 1; first = y[:, :2]; second = first[:1]; return second.neg_().mul_(3) + 1",
    "x, x + 1", "x + 1, x + 1", "y = (x + 1) * 2; x.mul_(2); return y, (x + 1) * 3", "x[:1]",
    "F.dropout(x, training=False)", "F.interpolate(x[None], 5, mode='nearest-exact')", CONSTANT,
    "y = x + 1; return y, y[:, 0]", "y = x + 1; return y, y",
    "y = x * 2; y[0] = 1; y[:, 1] = x[:, 0]; return y",
    "y = torch.ones(2); return y, y[:1], x + 1", "x * torch.ones(1), x * torch.ones(1).double()",
]  # fmt: skip
# What is made anew and has one name: a write makes a new tensor.
VALUES = """
    (y := x.new_zeros(x.shape), y[0].fill_(1), x * (y + torch.arange(3)).softmax(-1))[2];
    (y := x * 2).relu_() + y; F.relu(y := x * 2, True) + 1;
    (x * 2).add_(1).mul_(2) + 1; (y := x * 2).__iadd__(2) + y; torch.add(y := x * 2, y, out=y) + 1;
    (y := x * 2).masked_fill_(y > 0, 3.0) + 1; (x * 2).polygamma_(1) + 1
"""
ALIKE = "(x + torch.tensor(2.0)).exp()"
# Calls that give back what they are given are left out.
IDLE = """
    torch.dropout(x.relu(), 0.5, False).exp(); F.pad(input=x.relu(), pad=[0, 0]).exp();
    F.pad(F.dropout(x, training=False), (0, 0)).exp(); torch.cat([x, x[:, :0]], -1).exp();
    torch.cat([torch.tensor([]), x.relu()], -1).exp(); F.pad(x.relu(), (0, 0)).view(3, 2).exp()
"""
# The memory of what is gone is given to others, and so may be that of the padding.
EIGHT_TIMES = "\n for _ in range(8): x = F.pad(x.exp(), (0, 0)).sin()\n return x"
PADDED_COPY = "y = x.relu(); p = F.pad(y, (0, 0)); p.add_(1); return y.exp(), p.exp()"
AT_WORK = """
    F.pad(x, (0, 1)).exp(); F.pad(x, (1, -1)).exp(); x.t().contiguous().exp(); x.clone();
    F.pad(x, (0, 0)).view(3, 2); torch.cat([x, x[:, :1]], -1).exp(); torch.cat([x, x]).exp();
    torch.cat([x, x.double()[:0]]).exp(); (y := x.relu(), F.pad(y, (0, 0)))
"""
NO_COPY = {*texts(VALUES), *texts(IDLE), EIGHT_TIMES, PADDED_COPY}
COPIES = ("pad", "cat", "clone", "contiguous")


def program_of(text):
    return function_of("x, cache" if "cache" in text else "x", text)


def given(text, seed):
    return [image(2, 3, seed=seed), image(4, 3, seed=seed + 9)][: 1 + ("cache" in text)]


def recorded(program, *inputs, held=()):
    if isinstance(program, str):
        return recorded(program_of(program), *given(program, 0))
    return line_of(program, held, *inputs)


def called(line):
    return [name_of_call(n) for n in line.module.graph.nodes if n.op.startswith("call")]


def shared(tensors):
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [places.index(each) for each in places]


@pytest.mark.parametrize("text", [*PROGRAMS, *sorted(NO_COPY), *texts(AT_WORK)])
def test_a_line_does_to_memory_what_eager_does(text):
    line = recorded(text)
    for seed in (1, 2, 2):
        inputs, own = given(text, seed), given(text, seed)
        expected = tensors_in(program_of(text)(*inputs))
        actual = tensors_in(line.rebuild(line.module(*own)))

        for old, new in zip([*inputs, *expected], [*own, *actual], strict=True):
            assert_close(new, old, rtol=0, atol=0)
            assert new.stride() == old.stride()
        assert shared([*own, *actual]) == shared([*inputs, *expected])
    assert text not in NO_COPY or not any(name.endswith("_") for name in called(line))
    if text not in PROGRAMS:
        assert sum(name in COPIES for name in called(line)) == (text not in NO_COPY)


def test_a_write_to_the_place_of_a_scalar_stays_a_write():
    scalar, at = torch.ones(()), torch.zeros(1).long()
    line = recorded(lambda x, at: x.index_copy_(0, at, x * 2) * 3, scalar, at)
    assert line.module(scalar, at)[0] == 6


def test_what_no_input_reaches_is_a_constant_of_each_call():
    line, x = recorded(CONSTANT), given(CONSTANT, 1)
    line.module(*x)[1].zero_()
    assert called(recorded(next(iter(texts(VALUES))))) == ["mul"]
    assert called(recorded(f"{ALIKE} * {ALIKE}")) == ["add", "exp", "mul"]
    assert line.module(*x)[1].tolist() == [0, 1, 2]


def test_self_attention_is_looked_into():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    line = recorded(lambda x: layer(x, x, x)[0], x, held=list(layer.parameters()))
    assert {"linear", "scaled_dot_product_attention"} <= {*called(line)} or "bmm" in called(line)
    assert_close(line.module(x)[0], layer(x, x, x)[0])
    assert storages_in([*line.module.buffers()]) == storages_in([*layer.parameters()])


WEIGHT, HIDDEN = torch.ones(3), torch.ones(3)
TWO_DTYPES = "y = torch.zeros(2, 3); flags = y.view(torch.int32); y.copy_(x); return flags + 1"
REFUSED = {
    "a number": (lambda x: x * x.sum().item(), "depends on values"),
    "a branch": (lambda x: x if x.sum() > 0 else -x, "depends on values"),
    "numpy": (lambda x: x + torch.from_numpy(x.numpy()), "depends on values"),
    "a sparse value": (lambda x: x.to_sparse().to_dense(), "more than its storage"),
    "a sparse constant": (lambda x: torch.eye(2).to_sparse() @ x, "more than its storage"),
    "a mask": (lambda x: x[x > 0].reshape(-1, 1), "a size depends on values"),
    "a global": (lambda x: x + HIDDEN, "cannot be followed"),
    "a generator": (lambda x: x.bernoulli(generator=torch.Generator()), "code cannot name"),
    "an object": (lambda x: (x * 2, object()), "object of its own"),
    "other memory": (lambda x: (x * 2).set_(x.clone()), "other memory"),
    "two dtypes": (function_of("x", TWO_DTYPES), "of two dtypes"),
    "a write": (lambda x: WEIGHT[:1].copy_(x[0, :1]) + x, "a weight"),
    "a result": (lambda x: (x + WEIGHT, WEIGHT), "a weight"),
}


@rows("program reason", REFUSED)
def test_what_no_line_repeats_is_refused(program, reason):
    with pytest.raises(Refused, match=reason):
        recorded(program, torch.ones(2, 3), held=[WEIGHT])


def test_an_output_that_is_returned_twice_is_computed_once():
    """Also where it gets the strides of eager, which its program gives it otherwise."""
    model, x = Then("(y, y)").eval(), image().to(memory_format=torch.channels_last)
    fast = lowered(model, x, tune_seconds=0)
    first, second = fast(x)
    assert [choice.region for choice in fast.report.choices] == ["1 x conv2d"]
    assert first is second
    assert_close(first, model(x)[0])


BEHIND = """
    y.view(2, -1).exp() if y.is_contiguous() else y.exp(); (z := y.exp(), z.transpose(1, 2));
    (z := y.relu(), v := z[:, :2], v.relu()); y.as_strided((2, 4), (y.stride(0), 1)).exp();
    y[:, :2].mul_(2).exp() + y[:, 2:4]
"""


@pytest.mark.parametrize("engines", [("stub",), ()])
@pytest.mark.parametrize("laid_out", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("text", texts(BEHIND))
def test_what_is_recorded_behind_a_region_reads_it_as_it_lay(monkeypatch, text, laid_out, engines):
    offer(monkeypatch, *engines)
    model = Then(text).eval()
    x, y = (image(seed=seed).to(memory_format=laid_out) for seed in (0, 1))
    fast = optimizer.optimize(model, x, tune_seconds=0)
    with torch.no_grad():
        expected, actual = tensors_in(model(y)), tensors_in(fast(y))
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert shared(actual) == shared(expected)
    assert [each.stride() for each in actual] == [each.stride() for each in expected]


WRITES = """
 y = m.first(m.first(x)[:, :3].relu()).relu(); y[:, :1] = y[:, 1:2] * 2
 z[:, :, 0] = m.last(y).mean(-1).mean(-1, keepdim=True); return m.last(y), z[:, :1]
"""


def written():
    """Convolutions before and after a write of part of what lies between them, and of a cache."""
    torch.manual_seed(1)
    convolutions = {"first": nn.Conv2d(3, 4, 3, padding=1), "last": nn.Conv2d(4, 3, 3, padding=1)}
    return ForwardOfTwo(WRITES, **convolutions).eval()


def images(seed):
    return image(seed=seed), torch.zeros(2, 3, 8, 8)


@torch.no_grad()
def test_a_call_that_writes_is_lowered_but_for_what_is_written():
    model = written()
    fast = lowered(model, *images(0), tune_seconds=0)
    assert [choice.region for choice in fast.report.choices] == ["1 x conv2d"] * 2
    for seed in (0, 1):
        old, new = images(seed), images(seed)
        expected, actual = model(*old), fast(*new)
        assert plan_of(fast, *new) is not None
        assert_close((*actual, *new), (*expected, *old), rtol=1e-4, atol=1e-5)
        assert shared([actual[1], new[1]]) == [0, 0]
    optimizer.check(model, fast, images(2))
    x, y = image(seed=1), image(seed=1)  # inputs that share memory run the portable code
    assert plan_of(fast, x, x) is None
    assert_close((fast(x, x), x), (model(y, y), y), rtol=1e-4, atol=1e-5)


def test_a_call_that_writes_is_no_cuda_graph_and_in_its_own_precision(monkeypatch):
    """Casts, and a CUDA graph, which has memory of its own, would write copies."""
    options = {"level": 3, "precision": "bf16", "tune_seconds": 0}
    [precision] = lowered(written(), *images(0), **options, error_budget=0.9).report.choices[:1]
    assert "other names" in precision.rejected["bf16"]
    gpu = fake_gpu(monkeypatch)
    lowered(written(), *images(0), tune_seconds=0)
    assert gpu.records == 0
