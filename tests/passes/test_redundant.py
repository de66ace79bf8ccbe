"""What is computed twice, in vain, to the same value, or anew in each call."""

from __future__ import annotations

import copy
import io
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from models._torchvision_import import import_torchvision
from optimizer.core.guards import expect_tensor
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import (
    Forward,
    ForwardOfTwo,
    callees,
    function_of,
    optimized_by,
    spelled,
    texts,
    tried,
)

CSE, DEAD_CODE, CLONES = "eliminate_common_subexpressions", "eliminate_dead_code", "remove_clones"
IDENTITIES, CONSTANTS = "remove_identities", "fold_constants"
(SQUARE,) = inputs_like([(4, 4)], "random", 0)
(ROWS,) = inputs_like([(4, 3)], "random", 0)
PAIR, SEVEN = inputs_like([(2, 3)], "random", 0), inputs_like([(7, 3)], "random", 1)


def repeated(forward: str) -> nn.Module:
    """A model of layers, one of them in training mode, and a buffer."""
    layers = {"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    model = Forward(forward, scale=torch.ones(4), **layers).double().eval()
    model.norm.train()
    return model


TYPES_OF_NUMBERS = "(x + 1, x + 1.0); (x * 1, x * True)"
MERGED = {
    1: """
    x.tanh() - x.tanh() * 2; torch.tanh(x) - torch.tanh(x) * 2; (x + 1).exp() * (x + 1);
    x.sum(dim=1, keepdim=True) * x.sum(dim=1, keepdim=True); x[:, 1:3] * x[:, 1:3];
    m.linear(x) * m.linear(x).exp(); x * (m.scale * 3) + m.scale * 3; (x.exp(), x.exp() + 1)
    """,
    2: """
    x.exp() * x.exp() - x.exp(); x * x.shape[0] + x.shape[0]; x.chunk(2)[0] * x.chunk(2)[0];
    (x @ x.t()) * (x @ x.t())
    """,
    3: "m.linear(x).exp().sum() + m.linear(x).exp().sum()",
}
NOT_MERGED = {
    0: f"""
    {TYPES_OF_NUMBERS}; x / 0.0 + x / -0.0;
    x.new_tensor([0.0, 1.0]) / x.new_tensor([-0.0, 1.0]);
    torch.full_like(x, fill_value=0.0) / torch.full_like(x, fill_value=-0.0);
    x[[0, 1]].sum() + x[0, 1]; x.sum(1, True) + x.sum(1, False); x.sum(dim=1) + x.sum(axis=1);
    x[1:3] + x[0:2]; x[1:].sum() + x[2:].sum(); x[:, :2].sum() + x[:, :3].sum();
    x[::2] + x[::3]; x[1:, 0:4:2] + x[1:, 0:4:3]; x[..., None] + x[None, ...];
    torch.exp(x) + torch.sin(x); x.exp() + x.sin(); (x + 2.0) * (x - 2.0); x.sum(0) + x.sum(1);
    x.clamp(min=0.5) + x.clamp(max=0.5); x.sum(dim=0) + x.sum(dim=1);
    (x.sum(dtype=torch.int64), x.sum(dtype=torch.float32));
    (x.sum(0), x.type('torch.FloatTensor'), x.float()); m.linear(x) + m.other(x);
    x - m.scale + (m.scale - x); F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True);
    m.norm(x) + m.norm(x); x + torch.rand(4).double() + torch.rand(4).double()
    """,
    "what it reads may be written in between": """
    before = x.exp(); x.add_(1.0); return before + x.exp()
    y = x * 2; before, part = (y.exp(), y[0]); part.zero_(); return before + y.exp()
    y, z = (x * 2, x + 1); before = y * z; z.add_(1.0); return before + y * z
    before = x * m.scale; m.scale.add_(1.0); return before + x * m.scale
    y = m.linear(x.double()); m.linear.weight.mul_(2.0); return y + m.linear(x.double())
    """,
    "a result is written, which the other must not see": """
    first, again = (x.exp(), x.exp()); first.add_(1.0); return first * again
    first, again = (x.exp(), x.exp()); again[0] = 0.0; return first * again
    first, again = (x.exp(), x.exp().float()); again.add_(1.0); return first * again
    """,
    "both are returned": "(x.exp(), x.exp()); [x.exp().t(), {'y': x.exp()[0]}]",
}


@spelled(MERGED, NOT_MERGED)
def test_common_subexpressions(forward: str, outcome: Any) -> None:
    later = [(SQUARE.float(),)] if isinstance(outcome, str) else []

    tried(CSE, repeated(forward), (SQUARE,), outcome, *later)


def test_a_list_that_may_be_filled_is_not_shared() -> None:
    text = "first, again = (x[:1], x[:1]); first[0] = x[1]; return first[-1] - again[-1]"
    x, y = inputs_like([(4, 4)] * 2, "random", 0)

    fast = optimized_by(CSE, Forward(text).eval(), [x, y])

    assert CSE not in fast.report.counts()
    assert torch.equal(fast([x, y]), y - x)


@pytest.mark.parametrize("change", ["reads another", "goes", "moves behind"])
def test_what_was_seen_earlier_may_have_changed(change: str) -> None:
    model = Forward("[torch.tanh(x), torch.exp(x), torch.tanh(x)]").eval()
    graph = optimizer.capture(model, torch.ones(3)).graph
    first, again = [node for node in graph.nodes if node.target is torch.tanh]
    apply = next(each for each in optimizer.all_passes() if each.name == CSE).apply
    assert apply(first) is None

    if change == "reads another":
        first.args = (first.next,)
    elif change == "goes":
        first.replace_all_uses_with(first.next)
        graph.erase_node(first)
    else:
        next(iter(reversed(graph.nodes))).prepend(first)

    assert apply(again) is None


def model_of(forward: str) -> nn.Module:
    layers = {"linear": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "hooked": nn.Linear(3, 3)}
    layers["hooked"].register_forward_hook(lambda module, given, result: given[0].add_(1.0))
    state = {"count": torch.zeros(()), "mean": torch.zeros(3), "var": torch.ones(3)}
    model = Forward(forward, inplace=nn.ReLU(inplace=True), **layers, **state)
    return randomize(model.double().eval())


def in_vain(computed: str) -> nn.Module:
    return model_of(f"{computed}; return x.exp()")


ASSERTIONS = """
    torch._assert(x.shape[0] == 4, "four rows");
    torch._assert_async(torch.ones_like(x).sum() == 12, "four rows")
"""
COMPUTED_IN_VAIN = {
    ("exp",): """
    x.sin(); torch.exp(x); x + 1; m.linear(x); m.linear(x).sin().t().sum() + 1;
    m.linear.weight * 2; x.shape[0]; x.size(1) * 2; x.t()[0]; ((y := x.sin()) + 1, y * 2);
    torch.zeros(3, dtype=x.dtype) + torch.arange(3); m.norm(x); F.dropout(x, training=False);
    torch.chunk(x, 2)[0]
    """,
    # What writes, draws, asserts or runs a hook is no dead code.
    0: f"""
    x.mul_(2); x.__imul__(2); x[0] = 5.0; x[x > 0] = 5.0; x.t()[0].zero_(); m.inplace(x);
    F.relu(x, inplace=True); torch.add(x, 1, out=x); m.count.add_(1); m.count.copy_(x.sum());
    torch.rand(3); torch.rand_like(x); F.dropout(x, 0.5, True);
    F.batch_norm(x, m.mean, m.var, training=True); m.inplace(x * 2); m.hooked(x); {ASSERTIONS}
    """,
}


@spelled(COMPUTED_IN_VAIN)
def test_dead_code(forward: str, outcome: Any) -> None:
    tried(DEAD_CODE, in_vain(forward), (ROWS,), outcome)


@pytest.mark.parametrize("case", texts(ASSERTIONS))
def test_an_assertion_still_fails(case: str) -> None:
    fast = optimized_by(DEAD_CODE, in_vain(case), ROWS)

    with pytest.raises((AssertionError, RuntimeError), match="four rows"):
        fast(torch.ones(5, 3, dtype=torch.float64))


def test_an_argument_that_is_not_read_stays_an_argument() -> None:
    inputs = inputs_like([(4, 3), (2,)], "random", 0)

    fast = tried(DEAD_CODE, ForwardOfTwo("x.exp()").eval(), inputs, 0)

    with pytest.raises(TypeError):
        fast(inputs[0])


def test_a_set_that_is_given_is_added_to_though_tensors_have_an_add_too() -> None:
    seen: set[int] = set()
    model = ForwardOfTwo("z.add(7); return x.exp()").eval()

    optimized_by(DEAD_CODE, model, torch.ones(2), {1})(torch.ones(2), seen)

    assert seen == {7}


def test_a_list_that_is_extended_in_place_is_extended() -> None:
    x, model = torch.ones(2), ForwardOfTwo("same = z; same += [x]; return z").eval()

    assert len(optimized_by(DEAD_CODE, model, x, [x])(x, [x])) == 2


OUTSIDE = "what is copied was not made here, and may lie anyhow in memory"
COPIES = {
    1: """
    y = torch.tanh(x); saved = y.clone(); z = torch.relu(y); z += saved; return z
    torch.relu(torch.tanh(x).clone())
    torch.clone(torch.tanh(x)).sum(-1)
    y = torch.tanh(x); return (y, y.clone().exp())
    y = torch.tanh(x); y.mul_(2.0); return torch.relu(torch.clone(y))
    """,
    2: "torch.relu(torch.tanh(x).clone().clone())",
    OUTSIDE: "torch.relu(x.clone()); torch.relu(torch.tanh(x).t().clone())",
    "the copy or a view of it is seen": """
    torch.tanh(x).clone().view(-1).exp(); torch.tanh(x).clone(); torch.tanh(x).clone().exp_().sum();
    torch.tanh(x).clone().flatten().exp()
    """,
    "the copy is written": "y = torch.tanh(x); z = y.clone(); z[0] = 2.0; return y + z.exp()",
    "what is copied is written later": """
    y = torch.tanh(x); z = y.clone().mul(3.0); y.mul_(2.0); return z + y
    y = torch.tanh(x); z = y.clone(); y[0].mul_(2.0); return z + y
    """,
}


@spelled(COPIES)
def test_clones(forward: str, outcome: Any) -> None:
    x, *later = (torch.randn(3, 4), torch.randn(5, 6).t(), torch.randn(1, 4).expand(3, 4))
    later = [*later, torch.randn(6, 8)[::2, ::2]] if isinstance(outcome, int) else []

    tried(CLONES, Forward(forward).eval(), (x,), outcome, *((each,) for each in later))


MODULES = {
    (2, 3): """
    nn.Identity(); nn.Identity(54, unused=1); nn.Dropout(); nn.Dropout(0.3, inplace=True);
    nn.AlphaDropout()
    """,
    (2, 3, 4): "nn.Dropout1d(); nn.FeatureAlphaDropout()",
    (2, 3, 4, 4): "nn.Dropout2d()",
    (2, 3, 4, 4, 4): "nn.Dropout3d()",
}


@pytest.mark.parametrize("examples", [True, False])
@pytest.mark.parametrize(
    "call", texts("m.layer(x).exp(); m.layer(input=x).exp(); m.layer(x.exp())")
)
@spelled(MODULES, cells="layer shape")
def test_every_module_that_is_an_identity(
    layer: str, shape: tuple[int, ...], call: str, examples: bool
) -> None:
    inputs = inputs_like([shape], "random", 0)
    model = Forward(call, layer=function_of("", layer)()).eval()

    tried(IDENTITIES, model, inputs if examples else (), ["exp"], inputs)


FUNCTIONS = {
    (2, 3): """
    F.dropout(x, 0.5, False); F.dropout(x, training=m.training);
    F.dropout(training=False, input=x, p=0.5); F.dropout(x, 0.5, False, True); F.alpha_dropout(x);
    torch.dropout(x, 0.5, m.training); torch.dropout(x, p=0.5, train=False);
    torch.alpha_dropout(x, 0.5, False)
    """,
    (2, 3, 4): """
    F.dropout1d(x, training=False); torch.feature_alpha_dropout(x, 0.5, False);
    F.feature_alpha_dropout(x, 0.5, False)
    """,
    (2, 3, 4, 4): "F.dropout2d(x, training=False)",
    (2, 3, 4, 4, 4): "F.dropout3d(x, training=False)",
}


@spelled(FUNCTIONS, cells="forward shape")
def test_every_function_that_is_an_identity(forward: str, shape: tuple[int, ...]) -> None:
    tried(IDENTITIES, Forward(forward).eval(), inputs_like([shape], "random", 0), [])


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_is_an_identity_but_in_training_mode(mode: str) -> None:
    ops = import_torchvision().ops

    def both(module: Any, x: Tensor) -> Tensor:
        return ops.stochastic_depth(module.layer(x), 0.5, mode, training=module.training)

    model = Forward(both, layer=ops.StochasticDepth(0.5, mode)).eval()

    fast = tried(IDENTITIES, model, PAIR, [])

    # For torchvision's code asks for a type.
    assert [node.target for node in fast.graph.nodes][1:-1] == [expect_tensor]
    training = nn.Sequential(ops.StochasticDepth(0.5, mode), nn.ReLU()).eval()
    training[0].train()
    assert optimized_by(IDENTITIES, training, *PAIR).report.fired == ()


AT_WORK = {
    "it is in training mode and drops values": """
    m.layer(x).exp(); m.of_planes(x).exp(); F.dropout(x); F.dropout(x, 0.5, True);
    torch.dropout(x, 0.5, True); F.dropout(x, 0.5, x.dim() == 9)
    """,
    "its input is a constant": "x * m.same(2.0)",
}


@spelled(AT_WORK)
def test_what_drops_values_stays(forward: str, outcome: str) -> None:
    layers = {"layer": nn.Dropout(), "of_planes": nn.Dropout2d(), "same": nn.Identity()}
    model = Forward(forward, **layers).eval()
    for layer in model.children():
        layer.train()

    tried(IDENTITIES, model, inputs_like([(2, 3, 4, 4)], "random", 0), outcome)


def holding(forward: str, **more: Any) -> nn.Module:
    """A model of parameters, buffers and layers of every kind."""
    draw = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {
        "weight": nn.Parameter(torch.randn(3, generator=draw)),
        "matrix": nn.Parameter(torch.randn(3, 3, generator=draw)),
        "table": torch.randn(5, 3, generator=draw),
        "index": torch.tensor([3, 0, 3]),
        "steps": torch.zeros(3),
        "large": torch.ones(600),
        "linear": nn.Linear(3, 3),
        "norm": nn.BatchNorm1d(3),
    }
    return Forward(forward, **held, **more).double().eval()


CONSTANT = {
    1: """
    x.exp() + torch.sigmoid(m.weight); x.exp() + m.table[0].tanh(); x.exp() + 16 * m.weight;
    x.exp() + 2.0 ** m.weight; x.exp() + m.table[m.index].sum(0);
    x.exp() + torch.sum(input=m.matrix, dim=0); x.exp() + m.linear(m.weight);
    x.exp() + m.weight[:1].repeat(1 << 17, 1, 1);
    x.exp() + m.linear(m.table).t().unsqueeze(0)[0, :, 1]; x.exp() + m.norm(m.table)[2];
    torch.where(m.weight > 0, x.exp(), 0.0); x.exp()[:, (m.index - 1) % 3];
    x.exp() + m.matrix @ m.weight; x.exp() + m.weight.detach().exp();
    x.exp() + torch.outer(m.large, m.large).mean()
    """,
    2: "x.exp() + (m.linear(m.table).relu() + 1).chunk(5)[2] * 2",
}


@spelled(CONSTANT)
def test_constants_are_folded(forward: str, outcome: int) -> None:
    model, file = holding(forward), io.BytesIO()

    fast = tried(CONSTANTS, model, PAIR, outcome, SEVEN)

    assert len([each for each in callees(fast) if each != "exp"]) == 1
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in fast.buffers())
    torch.save(fast, file)
    file.seek(0)
    assert_equivalent(model, torch.load(file, weights_only=False), PAIR, exact=True)


def test_a_subgraph_is_folded_from_its_end() -> None:
    rows = "x[0] + m.linear(m.table).mean(0).expand(70000, 3)"
    tried(CONSTANTS, holding(rows), PAIR, [operator.getitem, "expand", operator.add])

    model = holding("x + m.linear(m.table).relu().mean(0) * 2")
    fast = tried(CONSTANTS, model, PAIR, [operator.add])

    assert len(fast.report.fired) == 1
    assert [tuple(buffer.shape) for buffer in fast.buffers()] == [(3,)]
    assert list(fast.parameters()) == []


# How many values, and how many calls less. The rest of torchvision's models have no constants.
BIASES = {"swin_t": (12, 12), "swin_v2_t": (12, 72), "maxvit_t": (22, 132)}


@pytest.mark.parametrize("name", BIASES)
def test_the_position_biases_of_torchvision_are_folded(name: str) -> None:
    model, x = getattr(import_torchvision().models, name)().eval(), torch.randn(1, 3, 224, 224)

    before, fast = (
        optimized_by(CONSTANTS, model, x, level=0, only=None, disable=disabled)
        for disabled in ([CONSTANTS], [])
    )

    less = len(callees(before)) - len(callees(fast))
    assert fast.report.remarks == ()
    assert (fast.report.counts()[CONSTANTS], less) == BIASES[name]


CAST = """
    x + m.index / 3; (x + torch.complex(m.weight, m.weight)).abs();
    x + (m.weight * 2).to(torch.float32)
"""
VARIABLE = {
    "the forward writes it, or what it is made of": """
    m.steps.add_(1.0); return x + m.steps * 2
    m.steps[0] += 1.0; return x + m.steps.exp()
    m.norm.running_mean.add_(1.0); return x + m.norm(m.table)[0]
    y = m.weight * 2; y.add_(x[0]); return x * y
    y = (m.weight * 2).to(x.dtype); y.add_(x[0]); return x * y
    y = (m.weight * 2).type_as(x.float()); y[:2].add_(1.0); return x * y
    """,
    "it is returned, and so has to be new in each call": """
    (x, m.weight * 2); {"x": x, "y": [(m.matrix * 2).t()[0]]}; (m.weight * 2).to(x.dtype)
    """,
    "it is larger than what it is made of": """
    x[0, 0] + m.large[:, None] * m.large; x[0] + m.weight.repeat(70000, 1);
    x[0, 0] + m.weight[:1].repeat((1 << 17) + 1); x[0] + (m.weight * 2).expand(70000, 3);
    x[0] + m.weight.repeat(70000, 1)[0]
    """,
    "it would not be cast or moved with the model": f"""
    {CAST}; x + m.index.new_ones(3, device="cpu");
    x + torch.complex(m.weight, (m.weight + 0).double()).abs()
    """,
}


def behaviour(model: nn.Module, *calls: Tensor) -> list[Tensor]:
    """What calls in a row give a caller who clears each result before the next."""
    own, seen = copy.deepcopy(model), []
    for x in calls:
        with torch.no_grad():
            results = torch.utils._pytree.tree_leaves(own(x.clone()))
        seen += [result.clone() for result in results]
        for result in results:
            result.zero_()
    return seen


@spelled(VARIABLE)
def test_what_is_not_constant_stays(forward: str, outcome: str) -> None:
    model = holding(forward)

    fast = optimized_by(CONSTANTS, model, *PAIR)

    assert outcome in {refusal.reason for refusal in fast.report.refused}
    assert_equivalent(model, fast, PAIR, exact=True)
    calls = [*PAIR * 2, *[PAIR[0].float()] * ("float32" not in forward)]
    for expected, actual in zip(behaviour(model, *calls), behaviour(fast, *calls), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("forward", [*texts(CONSTANT[1]), *texts(CAST)])
def test_a_cast_casts_what_it_casts_in_the_model(forward: str) -> None:
    model = holding(forward)
    fast, x = optimized_by(CONSTANTS, model, *PAIR).float(), PAIR[0].float()

    assert fast(x).dtype == model.float()(x).dtype


def test_a_model_that_learns_keeps_what_learns() -> None:
    model = holding("x + m.weight.exp() + m.table.exp().sum(0)").train()

    with pytest.warns(UserWarning, match="training mode"):
        fast = optimized_by(CONSTANTS, model, *PAIR)
    fast(*PAIR).sum().backward()

    reasons = {refusal.reason for refusal in fast.report.refused}
    assert reasons == {"the model is in training mode, and may be learning it"}
    assert fast.report.counts() == {CONSTANTS: 1}
    assert fast.weight.grad is not None


def test_what_autocast_computes_otherwise_is_refused() -> None:
    model, x = holding("x + m.linear(m.table)[0]").float(), PAIR[0].float()

    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized_by(CONSTANTS, model, x)

    assert [each.reason for each in fast.report.refused] == ["autocast gives it another dtype"]
    assert_equivalent(model, fast, (x,), exact=True)


def test_a_hook_inside_a_layer_runs_in_every_call() -> None:
    encoder = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
    model = holding("x + m.encoder(m.table[None])[0, 0]", encoder=encoder)
    encoder.linear1.register_buffer("runs", torch.ones(()))
    encoder.linear1.register_forward_hook(lambda module, _, y: y * module.runs.mul_(2))

    fast = optimized_by(CONSTANTS, model, *PAIR)

    assert fast.report.fired == ()
    assert not torch.equal(fast(*PAIR), fast(*PAIR))


class Shifted(nn.Identity):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Identity has it
        return input + 1


HOOKED = nn.Identity()
HOOKED.register_forward_hook(lambda module, given, result: result * 3)
LAYERS = [build() for _ in range(5) for build in (nn.Identity, nn.Dropout, nn.AlphaDropout)]
CHANNELS = "memory_format=torch.channels_last"
NORMED = "F.batch_norm(x, m.norm.running_mean, m.norm.running_var, training=many)"
INTEGERS, SQUARES = torch.arange(16).reshape(4, 4), (SQUARE,)
ALONE: dict[str, tuple[Any, ...]] = {
    **{
        f"a float is no integer: {text}": (CSE, repeated(text), SQUARES, 0, (INTEGERS,))
        for text in texts(TYPES_OF_NUMBERS)
    },
    "statistics that only another size updates are updated twice": (
        CSE, repeated(f"many = x.shape[0] > 4; return {NORMED} + {NORMED}"), SQUARES, 0,
        (SQUARE.repeat(2, 1),),
    ),
    "nothing is merged without example inputs": (
        CSE, repeated("m.linear(x) * m.linear(x).exp()"), (), 0, SQUARES,
    ),
    "a write to a value that is read": (
        DEAD_CODE, model_of("(y := x * 2, y.t().add_(1), y)[2]"), (ROWS,), 0,
    ),
    "without example inputs only what is pure by definition goes": (
        DEAD_CODE, model_of("(m.linear(x.transpose(0, 1)), x.mul_(2), x.exp())[2]"), (), 2,
        inputs_like([(3, 3)], "random", 0),
    ),
    "a copy in another layout": (
        CLONES, Forward(f"torch.relu(torch.tanh(x).clone({CHANNELS}))").eval(),
        (torch.randn(2, 3, 4, 5).double(),), 0,
    ),
    "a run of many": (IDENTITIES, nn.Sequential(*LAYERS).eval(), (ROWS,), []),
    "the input itself, also for a writer": (
        IDENTITIES, Forward("m.layer(x).mul_(2.0) + x", layer=nn.Dropout()).eval(), (ROWS,), 1,
    ),
    "no identities": (IDENTITIES, nn.Sequential(Shifted(), HOOKED).eval(), (ROWS,), 0),
    "several readers of a constant": (
        CONSTANTS, holding("y = torch.sigmoid(m.weight); return x * y + y * 2 - x / y"), PAIR,
        [operator.mul, operator.add, operator.truediv, operator.sub],
    ),
    "no constant without example inputs": (
        CONSTANTS, holding("x.exp() + m.linear(m.weight)"), (), 0, PAIR,
    ),
    **{
        text: (CONSTANTS, holding(text), PAIR, 0)
        for text in texts("""
            x + torch.rand(3, dtype=x.dtype) * 2; x + F.dropout(m.weight, 0.5, True);
            x @ m.matrix.t(); x * m.matrix.shape[0]; x.new_ones(3) * 2 + x
        """)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_one_pass_alone(case: str) -> None:
    tried(*ALONE[case])
