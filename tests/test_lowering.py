"""Level 2: a call that was lowered gives the portable code's answer, and any other runs that."""

from __future__ import annotations

import copy
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import optimizer
from optimizer import InputError
from tests import level_2
from tests.internals import AS_IT_IS, CANDIDATES, engines_here, engines_named, module, packed, plan
from tests.level_2 import PACKED, Running, Then, chosen, image, lowered, net, pickled, plan_of
from tests.single_pass import Forward, ForwardOfTwo, function_of, rows

pytestmark = [
    pytest.mark.usefixtures("right_is_enough"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*training"),
]
SLOW = "such a call is not lowered: it is not faster so: 1.00 of the time"
LAST = {"memory_format": torch.channels_last}


@pytest.fixture(params=[(), ("stub",)], ids=["torch", "engine"])
def kernels(request, right_is_enough, monkeypatch):
    """What runs regions: torch's own kernels, or an engine."""
    level_2.offer(monkeypatch, *request.param)
    return next(iter(engines_here(engines_named("auto"))), PACKED)


def of_two(text):
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return ForwardOfTwo(f"y = m.layer(x); return {text}", layer=layer).eval()


@rows(
    "model inputs seconds",
    {
        "a head": (net(), [image()], 1),
        "a head, untimed": (net(), [image()], 0),
        "a view": (Then("y.view(y.size(0), -1).relu()"), [image()], 1),
        "channels_last": (of_two("F.relu(y + z)"), [image().to(**LAST)] * 2, 1),
        "repeated": (of_two("y[:, :1].relu().expand(-1, 4, -1, -1)"), [image()] * 2, 0),
    },
)
def test_a_lowered_call_gives_the_models_answer_and_layout_and_overwrites_nothing(
    model, inputs, seconds, kernels, monkeypatch
):
    raced = level_2.racing(monkeypatch, level_2.last_wins)
    fast, kept = lowered(model, *inputs, tune_seconds=seconds), [each.clone() for each in inputs]
    answer, expected = fast(*inputs), model(*inputs)
    code = plan_of(fast, *inputs).func.program.graph  # which looks up what is read there alone
    assert all(each.users for each in code.find_nodes(op="get_attr"))
    assert (chosen(fast), bool(raced)) == ([kernels], bool(seconds))
    fast(*(2 * each for each in inputs))  # the next call
    assert_close(answer, expected, check_stride=True)
    assert all(map(torch.equal, inputs, kept))


def test_what_was_recorded_is_held_to_the_models_answer(monkeypatch):
    record, other = module.straight_line, pickled(lowered(net(), image()))
    wrong = lambda run, *rest: record(lambda x: run(x) * 1.5, *rest)  # noqa: E731
    monkeypatch.setattr(module, "straight_line", wrong)
    assert "its answer differs" in str(optimizer.optimize(net(), image()).report)
    monkeypatch.setattr(module, "straight_line", no_kernel)  # which may be a defect of ours
    with pytest.warns(optimizer.OptimizerWarning, match="no such kernel. Please report it"):
        fast = lowered(net(), image())
    for each in (fast, other):  # that prepares again when it is called
        assert_close(each(image()), net()(image()))


def test_an_example_that_the_forward_writes_is_timed_on_a_copy():
    x = image()
    kept = x.clone()
    optimizer.optimize(of_two("x.mul_(-1) + y * z"), (x, image()), tune_seconds=0.05)
    assert torch.equal(x, kept)


def test_calls_of_other_sizes_and_layouts_run_the_portable_code_until_they_are_lowered():
    model, other = net(), image(1, 3, 9, 9)
    fast = lowered(model, image())
    for x in (image(1, 3, 8, 8), image(2, 3, 9, 7), image().to(**LAST)):
        assert [plan_of(fast, each) is None for each in (image(), x)] == [False, True]
        assert_close(fast(x), model(x))
    for each in (fast, lowered(model)):
        (choice,) = each.lower(other)
        assert (choice.region, choice.chosen) == ("2 x conv2d, 1 x linear", PACKED)
        assert plan_of(each, other) is not None
        assert_close(each(other), model(other))
    assert plan_of(fast, image()) is not None


def test_a_plan_keeps_neither_inputs_nor_outputs_of_a_call():
    fast, x = lowered(net(), image()), image()
    kept = weakref.ref(x), weakref.ref(fast(x))
    del x
    assert [each() for each in kept] == [None, None]


class _Scaled(nn.Conv2d):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


def test_what_repeats_the_call_before_but_for_its_options_is_another_call():
    model, x, leaf = _Scaled(3, 4, 3).eval(), image(), image().requires_grad_()
    fast = lowered(model, x)
    for args, kwargs in (((2.0,), {}), ((), {"scale": 2.0})):
        assert_close((fast(x), fast(x, *args, **kwargs)), (model(x), model(x, *args, **kwargs)))
    assert (plan_of(fast, leaf) is None, fast(leaf).requires_grad) == (False, True)
    fast.training = True
    assert plan_of(fast, x) is None
    model, same = of_two("[z.add_(1), F.relu(y + x)][1]"), image()
    fast = lowered(model, x, image())
    fast(x, image())
    assert_close(fast(same, same.detach()), model(x, x.detach()))


_LARGE = image() / image().abs().max()


@rows(
    "ahead x other scale",
    {  # ahead of the layers, two inputs, and what the first weight is multiplied by
        "made of a blank image": ("x / x.std()", image(), torch.zeros(2, 3, 8, 8), 1.0),
        "made by powers": ("x.pow(2).pow(2).pow(2)", _LARGE, _LARGE.abs() * 1e5 + 1e4, 1.0),
        # The sums are infinite, their differences NaN; oneDNN's ReLU makes numbers of that.
        "made inside": ("x", image(), _LARGE * 3e38, 1e1),
        "made inside of a small input": ("x", image(), _LARGE * 3e14, 1e25),
    },
)
def test_what_is_not_finite_is_not_lost(ahead, x, other, scale, kernels):
    """Found by a blank image, of which a forward divides by the deviation (issue 18)."""
    torch.manual_seed(1)
    one, two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    one.weight.data.mul_(scale)
    two.weight.data.div_(scale)
    layers = (one, nn.ReLU(), two, nn.ReLU())
    model = nn.Sequential(Running(function_of("x", ahead)), *layers).eval()
    fast = lowered(model, x)

    assert plan_of(fast, other) is not None
    assert not model(other).isfinite().all()
    for each in (x, other):
        assert_close(fast(each), model(each), equal_nan=True)


def test_many_threads_may_call_it():
    fast = pickled(lowered(net(), image()))  # packs its weights meanwhile
    inputs = [image() * scale for scale in range(1, 9)] * 5
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fast, inputs))

    assert_close(answers, list(map(net(), inputs)))


def _counted(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def _tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@rows(
    "made_of",
    {
        "gradients": (lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0],),
        "vmap": (lambda f, x: torch.vmap(f)(torch.stack([x, x * 2])),),
        "forward mode": (_tangent,),
        "a mode that counts operators": (_counted,),
        "autocast": (lambda f, x: torch.autocast("cpu", torch.bfloat16)(f)(x)[:0],),  # its dtype
        "compile": (lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),),
        "optimize": (lambda f, x: lowered(f, x)(x),),
        "jit": (lambda f, x: "conv" in str(torch.jit.trace(f, x).inlined_graph),),
        "export": (lambda f, x: "conv" in torch.export.export(f, (x,)).graph_module.code,),
    },
)
def test_what_only_portable_code_can_do_is_as_of_the_model(made_of):
    fast = lowered(net(), image())
    fast(image())  # the call that made_of seems to repeat
    assert_close(made_of(fast, image()), made_of(net(), image()))


def _doubled(module, within=lambda m: m, **options):
    values = {name: value * 2 for name, value in within(module).state_dict().items()}
    within(module).load_state_dict(values, **options)
    return module


def _negated(fast):
    output = fast.graph.output_node()
    with fast.graph.inserting_before(output):
        output.args = (fast.graph.call_function(torch.neg, (output.args[0],)),)
    fast.recompile()
    return fast


@rows(
    "change is_lowered",
    {
        "loaded": (_doubled, True),
        "assigned as a part": (lambda m: _doubled(m, nn.Sequential, assign=True), True),
        "replaced": (lambda m: setattr(m, "head", nn.Linear(m.head.in_features, 5)) or m, True),
        "cast": (lambda m: m.to(torch.bfloat16).to(torch.float32), True),
        "refitted": (lambda m: m.refit(_doubled(net()).state_dict(), image()), True),
        "a copy": (lambda m: _doubled(copy.deepcopy(m)), True),
        "a pickle": (lambda m: _doubled(pickled(m)), True),
        "in double": (lambda m: _doubled(m).double(), False),
        "in training": (lambda m: _doubled(m).train(), False),
        "an edited graph": (_negated, False),
    },
)
def test_what_changes_a_module_is_seen_and_a_copy_is_another(change, is_lowered, kernels):
    fast, x = lowered(net(), image()), image()
    before = fast(x)
    other = change(fast)
    y = x.to(next(other.parameters()).dtype)

    assert (plan_of(other, y) is not None) is is_lowered
    expected = other.run_portable(y)
    assert_close(other(y), expected)
    assert not torch.equal(expected.float(), before)
    assert other is fast or torch.equal(fast(x), before)
    assert not any(each.requires_grad for each in other.requires_grad_(False).parameters())
    with pytest.raises(InputError, match="train the original, and refit"):
        other.requires_grad_()


def test_weights_that_come_while_others_are_packed_are_not_lost(monkeypatch):
    """By another thread, of which a wrapper of what packs them plays the part."""
    fast = copy.deepcopy(lowered(net(), image()))  # whose weights are packed at the first call
    make_plan = vars(module)["make_plan"]
    monkeypatch.setattr(module, "make_plan", lambda *a: (make_plan(*a), _doubled(fast))[0])
    fast(image())
    monkeypatch.undo()
    assert_close(fast(image()), fast.run_portable(image()))


@pytest.mark.parametrize("pays", [True, False])
def test_the_first_call_on_another_device_is_lowered_as_is_chosen_anew(monkeypatch, pays):
    """Calls look as if they came from there."""
    fast = lowered(net(), image())
    new = plan.Key.__new__
    monkeypatch.setattr(plan.Key, "__new__", lambda cls, a, _, b: new(cls, a, ("elsewhere",), b))
    raced = level_2.racing(monkeypatch, level_2.last_wins if pays else level_2.all_alike)

    assert (plan_of(fast, image()) is not None) is pays
    once = len(raced)
    for each in (fast, pickled(fast)):
        assert (plan_of(each, image()) is not None) is pays
        assert_close(each(image()), net()(image()))
    assert len(raced) == once > 0
    assert fast.report.remarks == (() if pays else (f"on elsewhere: {SLOW}",))


_RANDOM = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout())
_TRAINS = Forward(
    "m.conv(F.batch_norm(x, m.mean, m.var, training=x.size(0) > 2))",
    mean=torch.zeros(3), var=torch.ones(3), conv=nn.Conv2d(3, 4, 3),
)  # fmt: skip


@rows(
    "model inputs later reason",
    {
        "no example": (net(), (), None, "there are no example inputs"),
        "random": (_RANDOM, (image(),), image(), "random"),
        "statistics later": (_TRAINS, (image(),), image(3, 3, 8, 8), "writes an attribute"),
        "gaps": (net(), (image(2, 3, 8, 16)[..., ::2],), None, "gaps"),
        "no time saved": (net(), (image(1, 3, 9, 9),), None, SLOW),
        "float8": (Forward("-x.float()"), (image().to(torch.float8_e5m2),), None, "straight line"),
        "no region": (Forward("x.where(x > 0, -x)"), (image(),), None, "run as a straight line"),
    },
)
def test_what_is_not_lowered_is_told_and_runs_the_portable_code(
    monkeypatch, model, inputs, later, reason
):
    if reason is SLOW:
        level_2.racing(monkeypatch, level_2.all_alike)
    fast = lowered(model, *inputs, train=model is _RANDOM)

    if later is None or later.shape == inputs[0].shape:
        assert any(reason in remark for remark in fast.report.remarks), fast.report.remarks
        assert not fast.report.choices
        assert (plan_of(fast, *(inputs or [image()])) is None) is ("straight" not in reason)
    if later is not None:
        with pytest.raises(InputError, match=reason):
            fast.lower(later)
    elif inputs:
        optimizer.check(model, fast, inputs)


def no_kernel(*args):
    raise RuntimeError("no such kernel")


def running(run):
    """A candidate that runs a function of the region, the example inputs, and what is given."""
    return lambda region, inputs: Running(partial(run, region, inputs))


@rows(
    "candidate seconds reason",
    {
        "wrong": (running(lambda region, _, x: [3 * y for y in region(x)]), 1, "relative error"),
        "stale": (running(lambda region, inputs, *_: region(*inputs)), 1, "relative error"),
        "greedy": (running(lambda region, _, x: (region(x), x.zero_())[0]), 1, "overwrites its"),
        "not made": (no_kernel, 1, "RuntimeError: no such kernel"),
        "not run": (running(no_kernel), 0, "RuntimeError: no such kernel"),
    },
)
@pytest.mark.parametrize("race", [level_2.last_wins, level_2.all_alike])
def test_a_candidate_that_is_no_good_is_rejected_with_the_reason(
    monkeypatch, candidate, seconds, reason, race
):
    """Also where the call is not lowered: that it is not faster was all that was told."""
    other, x = pickled(lowered(net(), image())), image()  # which had decided for it
    monkeypatch.setitem(CANDIDATES, PACKED, candidate)
    level_2.racing(monkeypatch, race)
    fast = lowered(net(), x, tune_seconds=seconds)
    (choice,) = fast.report.choices or fast.report.tried

    assert choice.chosen == AS_IT_IS
    assert reason in choice.rejected[PACKED]
    assert f"{PACKED}  {choice.region}  rejected: {choice.rejected[PACKED]}" in str(fast.report)
    for each in (fast, other):
        assert_close(each(x), net()(x))


def test_without_onednn_there_is_channels_last(monkeypatch):
    monkeypatch.setattr(packed, "_OPERATORS", ("no_such_operator",))
    fast = lowered(net(), image())

    assert chosen(fast) == ["channels_last"]
    assert_close(fast(image()), net()(image()))


@pytest.mark.parametrize("seconds", [0.975, 0.985])
def test_what_is_chosen_must_be_faster_by_more_than_noise_and_its_cost_is_told(
    monkeypatch, seconds
):
    times = {AS_IT_IS: 1.0, "plan": 0.1, "portable": 1.0}
    level_2.racing(monkeypatch, lambda names: {name: times.get(name, seconds) for name in names})
    start = time.perf_counter()
    fast = lowered(net(), image())
    (choice,) = fast.report.choices

    assert (choice.chosen == AS_IT_IS) is (seconds > 0.98)
    weights = sum(each.numel() * each.element_size() for each in fast.parameters())
    assert choice.held == weights * (choice.chosen != AS_IT_IS)
    assert 0 < choice.spent[choice.chosen] < time.perf_counter() - start
