"""What is computed twice, in vain, to the same value, or anew in each call."""

from __future__ import annotations

import copy
import io
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import import_torchvision
from optimizer.testing import assert_equivalent, inputs_like
from tests.single_pass import Forward, ForwardOfTwo, optimized_by, spelled, texts, tried

CSE, DEAD_CODE, CLONES = "eliminate_common_subexpressions", "eliminate_dead_code", "remove_clones"
IDENTITIES, CONSTANTS = "remove_identities", "fold_constants"
ROWS, IMAGE = inputs_like([(4, 3)], "random", 0), inputs_like([(2, 3, 4, 4)], "random", 0)
LATER = [torch.randn(3, 5).t(), torch.randn(1, 3).expand(4, 3), torch.randn(8, 6)[::2, ::2]]


def model_of(forward: str) -> nn.Module:
    """A model of layers, of which some are in training mode or have a hook, and of tensors."""
    torch.manual_seed(0)
    layers = {"linear": nn.Linear(3, 3), "other": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)}
    layers |= {"hooked": nn.Linear(3, 3), "clamped": nn.ReLU(inplace=True)}
    layers |= {"same": nn.Identity(54, unused=1), "tripled": nn.Identity()}
    layers |= {"drop": nn.Dropout(0.3, inplace=True), "alpha": nn.AlphaDropout()}
    layers |= {"drop1": nn.Dropout1d(), "drop2": nn.Dropout2d(), "drop3": nn.Dropout3d()}
    layers |= {"features": nn.FeatureAlphaDropout()}
    trained = {"learns": nn.BatchNorm1d(3), "draws": nn.Dropout()}
    own = {"weight": nn.Parameter(torch.randn(3)), "matrix": nn.Parameter(torch.randn(3, 3))}
    state = {"table": torch.randn(5, 3), "index": torch.tensor([3, 0, 3]), "large": torch.ones(600)}
    state |= {"steps": torch.zeros(3), "mean": torch.zeros(3), "var": torch.ones(3)}
    layers["encoder"] = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
    layers["encoder"].linear1.register_forward_hook(lambda module, given, result: result * 2)
    layers["hooked"].register_forward_hook(lambda module, given, result: given[0].add_(1.0))
    layers["tripled"].register_forward_hook(lambda module, given, result: result * 3)
    model = Forward(forward, **layers, **trained, **own, **state).double().eval()
    for name in trained:
        model.get_submodule(name).train()
    return model


# See also the motifs and tests/traps.py.
ALONE: dict[Any, str] = {
    (CSE, 1): """
    x.sum(dim=1, keepdim=True) * x.sum(dim=1, keepdim=True); x[:, 1:3] * x[:, 1:3];
    m.linear(x) * m.linear(x).exp(); (x.exp(), x.exp() + 1); x * (m.steps * 3) + m.steps * 3""",
    (CSE, 2): "x.chunk(2)[0] * x.chunk(2)[0]",
    (CSE, 0): """
    x.new_tensor([0.0, 1.0, 2.0]) / x.new_tensor([-0.0, 1.0, 2.0]); x[[0, 1]].sum() + x[0, 1];
    x[1:, 0:4:2] + x[1:, 0:4:3]; x[:, None] + x[None]; m.linear(x) + m.other(x);
    (x.sum(dtype=torch.int64), x.sum(dtype=torch.float32)); x.clamp(min=0.5) + x.clamp(max=0.5);
    m.draws(x) + m.draws(x); m.learns(x) + m.learns(x); torch.rand_like(x) + torch.rand_like(x)""",
    (CSE, "what it reads may be written in between"): """
    before = x.exp(); x.add_(1.0); return before + x.exp()
    before = x * m.steps; m.steps.add_(1.0); return before + x * m.steps
    y = m.linear(x.double()); m.linear.weight.mul_(2.0); return y + m.linear(x.double())""",
    (CSE, "a result is written, which the other must not see"): """
    first, again = (x.exp(), x.exp()); first.add_(1.0); return first * again
    first, again = (x.exp(), x.exp()); again[0] = 1.0; return first * again""",
    (CSE, "both are returned"): "[x.exp().t(), {'y': x.exp()[0]}]",
    (CLONES, 1): """
    y = torch.tanh(x); saved = y.clone(); z = torch.relu(y); z += saved; return z
    y = torch.tanh(x); y.mul_(2.0); return torch.relu(torch.clone(y))""",
    (CLONES, 0): "torch.relu(torch.tanh(x[None, None]).clone(memory_format=torch.channels_last))",
    (CLONES, "what is copied was not made here, and may lie anyhow in memory"): """
    torch.relu(x.clone()); torch.relu(torch.tanh(x).t().clone())""",
    (CLONES, "the copy or a view of it is seen"): """
    torch.tanh(x).clone().view(-1).exp(); torch.tanh(x).clone()""",
    (CLONES, "the copy is written"): """
    y = torch.tanh(x); z = y.clone(); z[0] = 2.0; return y + z.exp()""",
    (CLONES, "what is copied is written later"): """
    y = torch.tanh(x); z = y.clone(); y[0].mul_(2.0); return z + y""",
    (IDENTITIES, 1): """
    m.same(input=x).exp(); m.alpha(x); m.drop1(x[0]); m.drop2(x); m.drop3(x);
    m.features(x); F.dropout(training=m.training, input=x); F.alpha_dropout(x);
    F.dropout1d(x[0], training=False); F.dropout2d(x, training=False);
    F.dropout3d(x, training=False); m.drop(x).mul_(2.0) + x;
    F.feature_alpha_dropout(x, 0.5, False); torch.dropout(x, p=0.5, train=m.training)""",
    (IDENTITIES, 0): "m.tripled(x)",
    (IDENTITIES, "it is in training mode and drops values"): """
    m.draws(x).exp(); torch.dropout(x, 0.5, True); F.dropout(x, 0.5, x.dim() == 9)""",
    (IDENTITIES, "its input is a constant"): "x * m.same(2.0)",
    (CONSTANTS, 1): """
    x.exp() + 2.0 ** m.weight; x.exp() + m.table[m.index].sum(0);
    x.exp() + torch.sum(input=m.matrix, dim=0); x[0, 0] + m.weight[:1].repeat(1 << 17);
    x.exp() + m.linear(m.table).t()[None][0, :, 1]; x.exp() + m.norm(m.table)[2];
    torch.where(m.weight > 0, x.exp(), 0.0); x.exp()[:, (m.index - 1) % 3];
    x.exp() + torch.outer(m.large, m.large).mean()""",
    (CONSTANTS, 2): "x.exp() + (m.linear(m.table).relu() + 1).chunk(5)[2] * 2",
    (CONSTANTS, (operator.mul, operator.add)): "y = torch.sigmoid(m.weight); return x * y + y",
    (CONSTANTS, (operator.getitem, "expand", operator.add)): """
    x[0] + m.linear(m.table).mean(0).expand(70000, 3)""",
    (CONSTANTS, 0): """
    x + torch.rand(3, dtype=x.dtype) * 2; x + F.dropout(m.weight, 0.5, True); x @ m.matrix.t();
    x * m.matrix.shape[0]; x.new_ones(3) * 2 + x; x + m.encoder(m.table[None])[0, 0]""",
}  # fmt: skip


@spelled(ALONE, cells="forward case")
def test_one_pass_alone(forward: str, case: Any) -> None:
    name, outcome = case
    inputs = IMAGE if name == IDENTITIES else ROWS
    later = LATER if outcome in (1, 2) and name != IDENTITIES else []

    tried(name, model_of(forward), inputs, outcome, *((each.double(),) for each in later))


# Without example inputs only what is pure by definition goes.
WITHOUT = {
    (CSE, 0): "m.linear(x) * m.linear(x).exp()",
    (DEAD_CODE, 2): "(m.linear(x.transpose(0, 0)), x.mul_(2), x.exp())[2]",
    (IDENTITIES, 1): "m.drop(x)",
    (CONSTANTS, 0): "x.exp() + m.linear(m.weight)",
}


@spelled(WITHOUT, cells="forward case")
def test_one_pass_without_example_inputs(forward: str, case: Any) -> None:
    tried(case[0], model_of(forward), (), case[1], ROWS)


def test_statistics_that_are_updated_in_a_later_call_are_updated_twice() -> None:
    normed = "F.batch_norm(x, m.mean, m.var, training=many)"
    model = model_of(f"many = len(x) > 4; return {normed} + {normed}")

    tried(CSE, model, ROWS, 0, (ROWS[0].repeat(2, 1),))


def test_a_list_that_may_be_filled_is_not_shared() -> None:
    text = "first, again = (x[:1], x[:1]); first[0] = x[1]; return first[-1] - again[-1]"
    x, y = inputs_like([(4, 4)] * 2, "random", 0)

    fast = optimized_by(CSE, Forward(text).eval(), [x, y])

    assert CSE not in fast.report.counts()
    assert torch.equal(fast([x, y]), y - x)


IN_VAIN = {
    ("exp",): """
    m.linear(x).sin().t().sum() + 1; x.size(1) * 2; m.norm(x); ((y := x.sin()) + 1, y * 2);
    torch.zeros(3, dtype=x.dtype) + torch.arange(3); F.dropout(x, training=False)""",
    # What writes, draws, asserts or runs a hook is no dead code.
    0: """
    x.t()[0].zero_(); m.clamped(x * 2); m.steps.copy_(x.sum()); torch.rand_like(x); m.hooked(x);
    F.batch_norm(x, m.mean, m.var, training=True); (y := x * 2, y.t().add_(1), y);
    torch._assert(x.shape[0] == 4, "rows"); torch._assert_async(torch.ones_like(x).sum() == 12, "")
    """,
}


@spelled(IN_VAIN)
def test_dead_code(forward: str, outcome: Any) -> None:
    tried(DEAD_CODE, model_of(f"{forward}; return x.exp()"), ROWS, outcome)


def test_an_argument_that_is_not_read_stays_an_argument() -> None:
    fast = tried(DEAD_CODE, ForwardOfTwo("x.exp()").eval(), (*ROWS, torch.ones(2)), 0)

    with pytest.raises(TypeError):
        fast(*ROWS)


def test_a_view_of_an_input_may_be_written_through_another_input() -> None:
    text = "y = x[0]; before = y.exp(); z.add_(1.0); return before - y.exp()"
    reason = "what it reads may be written in between"

    fast = tried(CSE, ForwardOfTwo(text).eval(), (*ROWS, torch.ones(2)), reason)

    (twice,) = inputs_like([(4, 3)], "random", 1)
    assert fast(twice, twice).all()


def test_a_set_that_is_given_is_added_to_though_tensors_have_an_add_too() -> None:
    model, given = ForwardOfTwo("z.add(7); return x.exp()").eval(), {1}

    optimized_by(DEAD_CODE, model, *ROWS, {2})(*ROWS, given)

    assert given == {1, 7}


def test_stochastic_depth_is_an_identity_but_in_training_mode() -> None:
    ops = import_torchvision().ops
    model = Forward("m.layer(x)", layer=ops.StochasticDepth(0.5, "batch")).eval()

    tried(IDENTITIES, model, ROWS, 1)
    model.layer.train()

    assert optimized_by(IDENTITIES, model, *ROWS).report.fired == ()


def test_a_folded_constant_is_a_buffer_that_is_saved_and_does_not_learn() -> None:
    model, file = model_of("x + (m.linear(m.table).relu().mean(0) * 2).exp()"), io.BytesIO()

    fast = tried(CONSTANTS, model, ROWS, 1)
    torch.save(fast, file)
    file.seek(0)

    (constant,) = fast.buffers()
    assert (tuple(constant.shape), list(fast.parameters())) == ((3,), [])
    assert [constant.requires_grad, constant.is_inference()] == [False, False]
    assert_equivalent(model, torch.load(file, weights_only=False), ROWS, exact=True)


CAST = """
    x + m.index / 3; (x + torch.complex(m.weight, m.weight)).abs();
    x + (m.weight * 2).to(torch.float32)"""
VARIABLE = {
    "the forward writes it, or what it is made of": """
    m.steps[0] += 1.0; return x + m.steps.exp()
    m.norm.running_mean.add_(1.0); return x + m.norm(m.table)[0]
    y = (m.weight * 2).type_as(x.float()); y[:2].add_(1.0); return x * y""",
    "it is returned, and so has to be new in each call": """
    {"x": x, "y": [(m.matrix * 2).t()[0]]}; (m.weight * 2).to(x.dtype)""",
    "it is larger than what it is made of": """
    x[0, 0] + m.weight[:1].repeat((1 << 17) + 1); x[0] + m.weight.repeat(70000, 1)[0]""",
    "it would not be cast or moved with the model": f"""
    {CAST}; x + m.index.new_ones(3, device='cpu')""",
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
    model = model_of(forward)

    fast = optimized_by(CONSTANTS, model, *ROWS)

    assert outcome in {refusal.reason for refusal in fast.report.refused}
    calls = [*ROWS * 2, *[ROWS[0].float()] * ("float32" not in forward)]
    torch.testing.assert_close(behaviour(fast, *calls), behaviour(model, *calls), rtol=0, atol=0)


@pytest.mark.parametrize("forward", [*texts(ALONE[CONSTANTS, 1]), *texts(CAST)])
def test_a_cast_casts_what_it_casts_in_the_model(forward: str) -> None:
    model = model_of(forward)
    fast, x = optimized_by(CONSTANTS, model, *ROWS).float(), ROWS[0].float()

    assert fast(x).dtype == model.float()(x).dtype


def test_a_model_that_learns_keeps_what_learns() -> None:
    model = model_of("x + m.weight.exp() + m.table.exp().sum(0)").train()

    with pytest.warns(UserWarning, match="training mode"):
        fast = optimized_by(CONSTANTS, model, *ROWS)
    fast(*ROWS).sum().backward()

    reasons = {refusal.reason for refusal in fast.report.refused}
    assert reasons == {"the model is in training mode, and may be learning it"}
    assert fast.report.counts() == {CONSTANTS: 1}
    assert fast.weight.grad is not None


def test_what_autocast_computes_otherwise_is_refused() -> None:
    model, x = model_of("x + m.linear(m.table)[0]").float(), ROWS[0].float()

    with torch.autocast("cpu", torch.bfloat16):
        tried(CONSTANTS, model, (x,), "autocast gives it another dtype")
