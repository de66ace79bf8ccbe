"""Ninety-five ways to get a graph rewrite wrong, each a model here or a test elsewhere.

`python -m tests.traps` prints docs/traps.md.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import Forward, ForwardOfTwo, function_of

Pair = namedtuple("Pair", ["first", "second"])


class Absolute(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Conv2d has it
        return super().forward(input).abs()


NAMES = {each.__name__: each for each in (OrderedDict, Pair, Absolute)}


@dataclass(frozen=True)
class Trap:
    """A legal model that a careless rewrite gets wrong."""

    forward: str  # its text, of the arguments `x` and `z`
    calls: tuple[Any, ...]  # the arguments of each call; the first ones are the example inputs
    holds: str = ""  # statements that give the model `m` more than the usual layers
    then: str = ""  # statements on the model in eval mode, after its weights were drawn
    kind: type[Forward] = Forward  # the class of the model

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        text = " ".join(self.forward.split())
        model = self.kind(function_of(self.kind.arguments, text, **NAMES), **usual_layers())
        function_of("m", f"{self.holds or 'pass'}; return m", **NAMES)(model)
        randomized(model.eval())
        function_of("m", f"{self.then or 'pass'}; return m", **NAMES)(model)
        return model

    def arguments(self) -> Iterator[tuple[Any, ...]]:
        """Those of each call."""
        return (each if isinstance(each, tuple) else (each,) for each in self.calls)


def usual_layers() -> dict[str, Any]:
    layers = {"c": nn.Conv2d(4, 4, 3), "d": nn.Conv2d(4, 4, 3), "point": nn.Conv2d(4, 4, 1)}
    norms = {"bn": nn.BatchNorm2d(4), "bn2": nn.BatchNorm2d(4), "norm": nn.BatchNorm1d(4)}
    return {**layers, **norms, "fc": nn.Linear(4, 4), "w": nn.Parameter(torch.ones(4))}


def randomized(model: nn.Module) -> None:
    """Weights and statistics that hide nothing, in float64, where a formula shows."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            low, high = (0.5, 2.0) if name.endswith("var") else (-1.0, 1.0)
            values = torch.rand(tensor.shape, generator=generator) * (high - low) + low
            tensor.data = values.to(tensor.dtype)
    model.double()


def spread(low: float, *shape: int) -> Tensor:
    """Numbers from `low` to `-low`."""
    return torch.linspace(low, -low, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


ROWS, SQUARE, WHOLE = spread(-2.0, 3, 4), spread(-2.0, 4, 4), torch.arange(12).reshape(3, 4)
DEEP, CUBE, IMAGE = spread(-1.0, 2, 3, 4), spread(-1.0, 4, 4, 4), spread(-1.0, 2, 4, 8, 8)
SIGNED = torch.tensor([-0.0, 0.0, 1.0, -1.0, torch.inf, torch.nan], dtype=torch.float64)
LAST = torch.channels_last
PAIR, ROW_PAIR, POINT_PAIR = "m.bn(m.c(x))", "m.norm(m.fc(x))", "m.bn(m.point(x))"
HOOK = "register_forward_hook(lambda module, given, result: result * 2)"
NORM, CONV, UP = "m.bn = nn.BatchNorm2d", "m.c = nn.Conv2d", "m.c = nn.ConvTranspose2d"
OVERFLOWS = """m.half(); m.c.weight.data.fill_(7e3); m.c.bias.data.zero_(); \
m.bn.running_mean.zero_(); m.bn.running_var.fill_(1e-4)"""
OTHER_AXIS = "m.fc = nn.Linear(4, 5); m.norm = nn.BatchNorm1d"
HIDDEN = "masked_fill(torch.ones(4, 4, 4, dtype=torch.bool), -math.inf)"
EVERY_PERMUTE = """y = x.permute((1, 0, 2)).permute(dims=(1, 0, 2)).swapaxes(0, 1).movedim(0, 1);
return torch.transpose(input=y.mT, dim0=1, dim1=2) + torch.permute(x, [0, 1, 2])"""
COLUMNS = DEEP[:, :, :1].expand(2, 3, 4)[:, :, :4]
RANDOM_BESIDE = f"{PAIR} + torch.rand(6) + F.dropout(x[..., 2:, 2:], 0.5, training=True)"
CONTAINERS = f"""y = {ROW_PAIR};
return {{"b": OrderedDict(b=y, a=x), "a": [x + 1, (y, {{"y": Pair(y, x + 1)}})]}}"""

# Each by its number in the catalogue, of which one trap may have several models.
TRAPS = {
    # Folding a BatchNorm into the layer beside it
    "1 one path of a layer has no norm": Trap(f"{PAIR}, m.c(x * 2)", (IMAGE, IMAGE[:1])),
    "2 a pair is called twice": Trap(f"{PAIR} + m.bn(m.c(x * 2))", (IMAGE, IMAGE[:1])),
    "3 one module has two names": Trap(f"{PAIR} + m.d(x)", (IMAGE,), then="m.d = m.c"),
    "4 the weight is read elsewhere": Trap(f"{PAIR} * m.c.weight.sum()", (IMAGE,)),
    "5 two layers share a weight": Trap(f"{PAIR} + m.d(x)", (IMAGE,), "m.d.weight = m.c.weight"),
    "6 two norms after one layer": Trap(f"{PAIR} + m.bn2(m.c(x))", (IMAGE,)),
    "7 the layer's result has a second reader": Trap("y = m.c(x); return m.bn(y) + y", (IMAGE,)),
    "8 BatchNorm1d after Linear on (N, C, L), C = L":
        Trap(ROW_PAIR, (DEEP[:, :, :3],), "m.fc = nn.Linear(3, 3); m.norm = nn.BatchNorm1d(3)"),
    "9 BatchNorm1d after Linear on (N, C, L), C < L": Trap(ROW_PAIR, (DEEP,), f"{OTHER_AXIS}(3)"),
    "10 a norm of one feature": Trap(ROW_PAIR, (DEEP[:, :1],), f"{OTHER_AXIS}(1)"),
    "11 a norm without weights": Trap(PAIR, (IMAGE,), f"{NORM}(4, affine=False)"),
    "12 a layer with a bias": Trap(ROW_PAIR, (ROWS, ROWS[:1])),
    "13 a norm without statistics": Trap(PAIR, (IMAGE,), f"{NORM}(4, track_running_stats=False)"),
    "14 a norm in training mode":
        Trap(f"{PAIR}, m.bn.running_mean", (IMAGE, IMAGE), then="m.bn.train()"),
    "14 a frozen norm in training": Trap(PAIR, (IMAGE,), then="m.train(); m.bn.eval()"),
    "15 a norm without momentum": Trap(PAIR, (IMAGE,), f"{NORM}(4, momentum=None)"),
    "16 F.batch_norm": Trap(
        """n = m.bn; return F.batch_norm(
        m.c(x), n.running_mean, n.running_var, n.weight, n.bias, m.training)""", (IMAGE,),
    ),
    "17 keyword calls": Trap(
        """y = F.conv2d(x, m.c.weight, bias=m.c.bias, stride=2);
        return m.bn(input=y) + m.bn(input=m.c(input=x[..., ::2, ::2][..., :5, :5])).mean()""",
        (IMAGE,)),
    "18 a subclass of Conv2d that does more": Trap(PAIR, (IMAGE,), "m.c = Absolute(4, 4, 3)"),
    "19 InstanceNorm with statistics":
        Trap(PAIR, (IMAGE,), "m.bn = nn.InstanceNorm2d(4, track_running_stats=True)"),
    "20 a transposed convolution": Trap(PAIR, (IMAGE,), f"{UP}(4, 4, 3)"),
    "21 a transposed convolution of groups": Trap(PAIR, (IMAGE,), f"{UP}(4, 4, 3, groups=2)"),
    "22 a convolution of groups": Trap(PAIR, (IMAGE,), f"{CONV}(4, 4, 3, groups=2)"),
    "23 a norm before a convolution that pads":
        Trap("m.c(m.bn(x))", (IMAGE,), f"{CONV}(4, 4, 3, padding=1)"),
    "24 padding by reflection":
        Trap(PAIR, (IMAGE,), f"{CONV}(4, 4, 3, padding=1, padding_mode='reflect')"),
    "26 weights that overflow when folded": Trap(PAIR, (IMAGE.half() * 1e-4,), then=OVERFLOWS),
    "27 a norm of another dtype":
        Trap(PAIR, (IMAGE.bfloat16(),), then="m.float(); m.c.bfloat16()"),
    "29 a tiny variance": Trap(
        ROW_PAIR, (ROWS,), "m.norm = nn.BatchNorm1d(4, eps=1e-3)", "m.norm.running_var.fill_(1e-12)"
    ),
    "31 a layer without a bias": Trap(ROW_PAIR, (ROWS,), "m.fc = nn.Linear(4, 4, bias=False)"),
    "32 a hook on the layer": Trap(PAIR, (IMAGE,), then=f"m.c.{HOOK}"),
    "32 a hook on the model": Trap(PAIR, (IMAGE,), then=f"m.{HOOK}"),
    "33 a parametrized weight":
        Trap(PAIR, (IMAGE,), then="nn.utils.parametrizations.weight_norm(m.c)"),
    "33 an old weight_norm": Trap(PAIR, (IMAGE,), then="nn.utils.weight_norm(m.c)"),
    "34 addmm with a beta": Trap("m.norm(torch.addmm(m.fc.bias, x, m.fc.weight, beta=2))", (ROWS,)),
    "35 a constant for each pixel":
        Trap("m.c(x) + m.k", (IMAGE,), "m.k = nn.Parameter(torch.ones(4, 6, 6))"),
    "36 a constant of integers":
        Trap("m.c(x) * m.k", (IMAGE,), "m.k = nn.Buffer(torch.arange(1, 5).reshape(4, 1, 1))"),
    # Writes, aliases, dead code and constants
    "38 an in-place method whose result is not read": Trap("x.mul_(0.0); return x", (ROWS,)),
    "39 F.relu(inplace=True) whose result is not read":
        Trap("y = x * 2; F.relu(y, inplace=True); return y", (ROWS,)),
    "39 out= whose result is not read":
        Trap("y = x * 2; torch.add(y, 1.0, out=y); return y", (ROWS,)),
    "40 an assignment, which has no readers": Trap("y = x * 2; y[:, 0] = 1.0; return y", (ROWS,)),
    "41 a clone that is written": Trap("y = x.clone(); y.relu_(); return x + y", (ROWS,)),
    "42 an in-place ReLU of an input": Trap("x.relu_()", (ROWS,)),
    "42 an input that is written as its data": Trap("x.data.add_(1); return x * 2", (ROWS,)),
    "43 a chunk that is written":
        Trap("first, second = x.chunk(2, -1); first.add_(1); return first, second, x", (ROWS,)),
    "44 an in-place ReLU after the residual was kept":
        Trap("y = x * 2; kept = y; y = y.relu_(); return y + kept", (ROWS,)),
    "44 a residual that is added in place":
        Trap(f"y = {POINT_PAIR}; z = y; z += x; return y * z", (IMAGE,)),
    "45 two results that share storage":
        Trap("y = x * 2; return y, m.drop(y)", (ROWS,), "m.drop = nn.Dropout()"),
    "45 a result that is the input": Trap("m.drop(x)", (ROWS,), "m.drop = nn.Identity()"),
    "47 a buffer that is read through a view": Trap(
        "torch.relu(m.b.expand_as(x)) + m.b + x", (ROWS, ROWS), "m.b = nn.Buffer(-torch.ones(4))"),
    "48 a buffer that counts": Trap(
        "m.b += 1; return x * (m.b * 2)", (ROWS, ROWS, ROWS), "m.b = nn.Buffer(torch.zeros(()))"),
    "49 an attribute that is read twice": Trap("x * m.w + m.w.detach()", (ROWS,)),
    "50 two dropouts in training":
        Trap("F.dropout(x, training=True) + F.dropout(x, training=True)", (ROWS, ROWS)),
    "50 random numbers beside a pair": Trap(RANDOM_BESIDE, (IMAGE, IMAGE)),
    "50 an embedding that renormalizes its weight":
        Trap("m.e(x)", (torch.arange(4),), "m.e = nn.Embedding(6, 3, max_norm=0.1)"),
    "53 a constant that grows":
        Trap("x.sum() + m.w[:1].expand(2000, 2000).contiguous()[0, 0]", (ROWS,)),
    "56 a constant that is returned": Trap("x, m.w * 2", (ROWS, ROWS)),
    # Literals and algebra
    "57 x + 1 beside x + 1.0": Trap("x + 1, x + 1.0, x + True", (WHOLE,)),
    "57 x / 0.0 beside x / -0.0": Trap("x / 0.0, x / -0.0", (ROWS,)),
    "58 x + 0 of -0.0": Trap("1 / (x + 0)", (SIGNED,)),
    "58 x * 0 of infinity": Trap("x * 0, x - x, x / x", (SIGNED,)),
    "59 a division by three": Trap("x / 3", (ROWS,)),
    "60 a cast to float16 and back":
        Trap("x.half().double(), x.to(torch.float16).to(torch.float64)", (ROWS * 1.2345,)),
    "61 where(x > 0, x, 0) of NaN":
        Trap("torch.where(x > 0, x, 0.0), torch.relu(x), x.clamp(min=0)", (SIGNED,)),
    "62 max_pool of relu with its indices":
        Trap("F.max_pool2d(torch.relu(x), 2, return_indices=True)", (IMAGE,)),
    "64 softmax of a row that is masked out":
        Trap(f"(x @ x.transpose(-2, -1) * 0.5).{HIDDEN}.softmax(-1) @ x", (CUBE,)),
    # Transposes and views
    "65 axes that cancel in four dimensions":
        Trap("x.transpose(1, -1).transpose(-3, 3).exp()", (IMAGE, IMAGE[:1])),
    "66 one cycle twice": Trap("x.permute(1, 2, 0).permute(1, 2, 0)", (CUBE, DEEP)),
    "67 every spelling of a permute": Trap(EVERY_PERMUTE, (DEEP,)),
    "68 t() of a vector": Trap("x.t().t().exp()", (ROWS[0],)),
    "69 permute, contiguous, permute, view":
        Trap("y = x.mT.contiguous().mT; return y, y.permute(0, 2, 1).view(-1)", (DEEP,)),
    "70 a transposed weight":
        Trap("x @ m.fc.weight + x @ m.fc.weight.t() + F.linear(x, m.fc.weight.t())", (ROWS,)),
    "71 a sum with a vector between transposes": Trap(
        "y = x.permute(0, 2, 1); return (y + y.mean()).permute(0, 2, 1) + m.w", (CUBE, COLUMNS)),
    "72 a reshape that is written":
        Trap("y = x * 2; y.reshape(-1).add_(1.0); y.t().reshape(-1).add_(1.0); return y", (ROWS,)),
    "73 a permute that is returned twice":
        Trap("y = x.permute(0, 2, 1); return y, y, y.permute(0, 2, 1)", (DEEP,)),
    "74 channels_last strides": Trap(
        "y = m.point(x); return y, y.is_contiguous(memory_format=torch.channels_last)",
        (IMAGE.to(memory_format=LAST),)),
    # Assignments under a mask
    "75 as many values as the mask has":
        Trap("y = x * 2; y[x > 1.0] = x.new_tensor([5.0, 6.0, 7.0]); return y", (ROWS,)),
    "76 a mask of rows over a square":
        Trap("y = x * 2; y[x[:, 0] > 0] = 0.0; return y", (SQUARE, ROWS)),
    "77 a fraction into integers": Trap("y = x * 2; y[x > 5] = 1.7; return y", (WHOLE,)),
    "78 an index that is no mask":
        Trap("y = x * 2; y[m.i] = 0.0; return y", (SQUARE,), "m.i = torch.tensor([0, 2])"),
    "79 a mask without dimensions":
        Trap("y = x * 2; y[x.sum() > 0.0] = 1.0; return y", (ROWS, -ROWS)),
    "80 a tensor that is expanded":
        Trap("y = (x[:1] * 2).expand(3, 4); y[x > 0] = 1.0; return y", (ROWS,)),
    "81 the strides of a transposed tensor":
        Trap("y = x.t() * 2; y[x > 0] = 1.0; return y", (SQUARE, IMAGE[0, 0])),
    # Recording a forward
    "82 control flow on data": Trap(f"{ROW_PAIR} if x[0].sum() > 0 else x", (ROWS, -ROWS)),
    "82 a rank inside a dict": Trap("m.norm(m.fc(x['x']))", ({"x": ROWS}, {"x": ROWS[:2]})),
    "82 containers of every kind": Trap(CONTAINERS, (ROWS,)),
    "82 a cache in a dict that is given":
        Trap("z['k'] = x * 2; return x + 1", ((ROWS, {}),), kind=ForwardOfTwo),
    "83 dropout by self.training": Trap("F.dropout(x, 0.5, m.training) * 2", (ROWS,)),
    "84 a dropout in training mode":
        Trap("m.drop(x)", (ROWS, ROWS), "m.drop = nn.Dropout()", "m.drop.train()"),
    "84 an LSTM":
        Trap("m.layer(x)[0]", (DEEP, DEEP[:, :2]), "m.layer = nn.LSTM(4, 5, 2, batch_first=True)"),
    "88 a value behind an opaque function": Trap("torch.linalg.qr(x)[1].abs()", (SQUARE, SQUARE)),
    "90 a layer below two parents": Trap(
        "m.first(x) + m.second[1](m.second[0](x))", (IMAGE,),
        "m.first = nn.Sequential(m.c, m.bn); m.second = nn.ModuleList(m.first)"),
    "95 complex weights": Trap(
        "F.linear(x, m.k.to(torch.complex128)).abs()", (SQUARE.to(torch.complex128),),
        "m.k = nn.Parameter(torch.ones(4, 4, dtype=torch.complex128))"),
}  # fmt: skip

FOLD = "passes/test_fold_affine.py::test_a_fold_in_low_precision_is_as_near_to_the_truth"
# Traps that are no model, and the test that holds each.
TESTED = {
    "25 a fold in half precision loses what eager keeps": f"{FOLD}_as_the_model",
    "28 autocast around a folded model":
        "test_traps.py::test_autocast_around_the_result_gives_the_dtype_of_the_model",
    "46 a result that is held while the next call runs":
        "test_traps.py::test_a_result_is_not_overwritten_by_the_next_call",
    "51 a buffer of the original that changes later":
        "test_snapshot.py::test_no_later_write_is_seen_nor_reaches_the_model",
    "52 a checkpoint of the original that half fits the result":
        "test_snapshot.py::test_load_state_dict_refuses_a_checkpoint_of_the_original",
    "55 optimizing in inference mode":
        "test_traps.py::test_what_is_made_in_inference_mode_is_no_inference_tensor",
    "85 a copy or a pickle that loses the report":
        "test_snapshot.py::test_a_copy_keeps_the_answer_and_the_report",
    "87 code that is older than its graph":
        "test_traps.py::test_the_code_is_that_of_the_graph",
    "91 an exception that leaves half a rewrite behind":
        "test_lifecycle.py::test_a_faulty_pass_is_rolled_back_and_named",
    "93 an order that varies from run to run":
        "test_fuzz.py::test_optimizing_again_gives_the_same_code_"
        "and_optimizing_twice_changes_nothing_more",
    "94 parameters without data, or on two devices":
        "test_errors.py::test_bad_input_is_a_typed_error_in_one_sentence",
}  # fmt: skip
# Those that cannot be sprung here, and why.
NOT_HERE = {
    "30 a tolerance that calls rounding a bug": "a matter of tests: docs/fuzzing.md says how",
    "37 an unbatched image before BatchNorm2d": (
        "eager rejects it; the folded convolution may answer it"
    ),
    "54 a fold on a GPU that takes its memory twice": "one layer's weights are held twice",
    "63 a GELU that one device approximates": "no kernel of a device is chosen at level 1",
    "86 isinstance(result, ResNet)": "the result is a graph module and says so",
    "89 a wildcard of replace_pattern": "patterns name what they match; literals are not wild",
    "92 a private kernel that does not export": "no private kernel is used at level 1",
}
HEAD = """# Traps

Ninety-five ways to get a rewrite of a PyTorch graph wrong, and what becomes of each here.
`python -m tests.traps` prints this page; `tests/test_traps.py` holds each model to what eager
does, call by call, with and without example inputs.

| # | trap | what becomes of it |
|---|---|---|"""


def number(name: str) -> int:
    return int(name.split()[0])


def page() -> str:
    """All of docs/traps.md."""
    lines = dict(others())
    for name, trap in TRAPS.items():
        example = copy.deepcopy(next(trap.arguments()))
        with warnings.catch_warnings(action="ignore"):
            fast = optimizer.optimize(trap.build(), example, level=1, tune_seconds=0)
        lines[name] = line(name, outcome(fast.report))
    return "\n".join([HEAD, *(lines[name] for name in sorted(lines, key=lambda n: (number(n), n)))])


def others() -> Iterator[tuple[str, str]]:
    """The lines of what is no model here."""
    yield from ((name, line(name, f"tested by `{test}`")) for name, test in TESTED.items())
    yield from ((name, line(name, f"does not apply: {why}")) for name, why in NOT_HERE.items())


def line(name: str, becomes: str) -> str:
    return f"| {number(name)} | {name.partition(' ')[2]} | {becomes} |"


def outcome(report: optimizer.Report) -> str:
    """What the optimizer did, and if nothing, why, without the line of the forward."""
    if report.fired:
        return "rewritten by " + ", ".join(f"`{name}`" for name in sorted(report.counts()))
    reasons = [refusal.reason for refusal in report.refused] + list(report.remarks)
    why = (reasons or ["there is nothing to rewrite"])[0].splitlines()[0]
    return "left alone: " + re.sub(r"(, at | \()\S+:\d+\)?", "", why)


if __name__ == "__main__":
    print(page())
