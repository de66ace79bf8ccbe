"""The result is a snapshot: what is written to the original later is not seen, nor in part."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import InputError
from tests.conftest import address
from tests.internals import structural_copy

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
snapshot = partial(structural_copy, share_parameters=False)


class Net(nn.Module):
    """A fold, a weight under two names, a buffer of which checkpoints hold a part, a view."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.again = self.last.weight
        self.register_buffer("shift", torch.randn(2, 8, 1, 1))
        self.first = self.shift[0]
        self.register_buffer("scale", torch.linspace(1, 2, 8).view(8, 1, 1), persistent=False)
        self.register_buffer("most", self.scale[1:])
        nn.init.normal_(self.norm.running_mean)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)) * self.scale + self.first
        return self.last(x.relu().mean((2, 3)))


class Branching(Net):
    """Cannot be recorded, and so runs as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 100 else 1)


def call(model, inputs=X):
    with torch.no_grad():
        return model(inputs)


def step(model):
    model(X).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.5, fused=True).step()


def write_all(write):
    @torch.no_grad()
    def all_written(model):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                write(tensor)

    return all_written


WRITES = {
    "a step": step,
    "numpy": write_all(lambda each: each.numpy().fill(3)),
    "a checkpoint": lambda model: model.load_state_dict(Net(1).state_dict()),
    "statistics": lambda model: model.train()(X),
    "a cast": lambda model: model.double(),
    "swapped": write_all(lambda each: torch.utils.swap_tensors(each, each.clone().mul_(3))),
    "shared memory": lambda model: write_all(lambda each: each.mul_(3))(model.share_memory()),
    "a resized buffer": lambda model: model.shift.resize_(99).fill_(5),
}


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


at_level = partial(partial, optimizer.optimize, example_inputs=X, tune_seconds=0)
# Memory of the weights, a model, and what takes the snapshot.
PLACES = {
    "its own": (Tensor.clone, Net, at_level(level=1)),
    "level 2": (Tensor.clone, Net, at_level(level=2)),
    "as it is": (Tensor.clone, Branching, at_level(level=0)),
    "of numpy": (lambda t: torch.from_numpy(t.numpy().copy()), Net, at_level(level=0)),
    "without an allocator": (saved_and_loaded, Net, at_level(level=0)),
    "shared": (lambda t: t.clone().share_memory_(), Net, at_level(level=2)),
    "captured": (Tensor.clone, Net, lambda model: optimizer.capture(model, X)),
    "exported": (
        Tensor.clone, Net,
        lambda model: optimizer.optimize(torch.export.export(model, (X,)), level=1),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("place", PLACES)
def test_no_later_write_is_seen_nor_reaches_the_model(place):
    memory, kind, take = PLACES[place]
    for name in WRITES if kind is Net else ("a step", "a cast", "swapped"):
        model = kind()
        for weight in model.parameters():
            weight.data = memory(weight.detach())
        fast = take(model)
        before = call(fast)

        with suppress(RuntimeError):  # torch refuses to resize what is not its own
            WRITES[name](model)

        assert torch.equal(call(fast), before)
    model = kind()
    before = call(model)
    write_all(lambda each: each.data.mul_(3))(take(model))
    assert torch.equal(call(model), before)


def test_a_snapshot_takes_no_memory_on_any_default_device():
    model = Net()
    with torch.device("meta"):
        taken = snapshot(model)

    assert address(taken.conv.weight) == address(model.conv.weight)
    assert address(taken.first) == address(taken.shift)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM])
def test_what_cannot_be_copied_later_is_copied_at_once(kind):
    """A numpy array would write into the snapshot, and threads in a kernel of RNNs end all."""
    model = kind(4, 4)
    arrays = [each.detach().numpy() for each in model.parameters() if kind is nn.Linear]
    taken = snapshot(model)

    for ours, theirs in zip(taken.parameters(), model.parameters(), strict=True):
        assert address(ours) != address(theirs)
        assert not torch._C._is_cow_tensor(theirs)
    assert bool(arrays) is (kind is nn.Linear)


def test_threads_may_take_snapshots_of_one_model(monkeypatch):
    """Torch does not lock: two at once would spoil the storage."""
    at_once, entered, counted = list[bool](), threading.Lock(), torch._C._storage_Use_Count

    def slowly(storage):
        at_once.append(not entered.acquire(blocking=False))
        time.sleep(0.01)
        entered.release()
        return counted(storage)

    monkeypatch.setattr(torch._C, "_storage_Use_Count", slowly)
    with ThreadPoolExecutor(4) as pool:
        kept = [*pool.map(snapshot, [nn.Linear(4, 4)] * 4)]

    assert (len(kept), at_once) == (4, [False] * 8)


def test_a_copy_is_new_in_all_but_its_weights_and_shares_what_the_model_shares():
    original: Any = Net()
    original.names, original.loose = {"a": [1]}, (1, [original.conv])
    original.same, original.history = original.names, {0: original.scale * original.conv.bias}
    original.config = type("Shy", (), {"n": property(lambda self: 1 / 0)})()
    vars(original.config)["n"] = 1  # which it does not give

    copied = structural_copy(original)  # where deepcopy refuses the history

    assert (str(copied), list(vars(copied))) == (str(original), list(vars(original)))
    assert copied.same is copied.names
    assert copied.loose[1][0] is copied.conv
    assert torch.equal(copied.history[0], original.history[0])
    copied.names["a"].append(2)
    copied.conv.register_forward_hook(doubled)
    for tensor in (copied.shift, copied.history[0]):
        tensor.fill_(7)
    assert copied.first.unique().tolist() == [7]
    assert original.names == {"a": [1]}
    assert not original.conv._forward_hooks
    assert not any((each == 7).any() for each in (original.shift, original.history[0]))


def noted(self, *memo):
    copied = type(self)()
    copied.note = "copied its own way"
    return copied


OWN_WAYS = {
    "__deepcopy__": noted,
    "__reduce__": lambda self: (type(self), (), vars(noted(self))),
    "__setstate__": lambda self, state: vars(self).update(vars(noted(self))),
    "__getstate__": lambda self: vars(noted(self)),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_class_that_says_how_it_is_copied_is_obeyed(way):
    kind = type("Own", (nn.Module,), {way: OWN_WAYS[way]})

    assert structural_copy(nn.Sequential(kind()))[0].note == "copied its own way"


def doubled(module, inputs, output):
    return output * 2


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "save and load": saved_and_loaded}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_the_answer_and_the_report(way, level):
    """And all that was put on the result; what a deep copy is given later is its own."""
    model = Net()
    if level == 1:  # at level 2 the bits of Dynamo's graph depend on where the weights lie
        model.last.register_forward_hook(doubled)
    fast: Any = optimizer.optimize(model, X, level=level, tune_seconds=0)
    fast.labels, fast.extra = ["cat", "dog"], nn.Linear(2, 2)
    fast.register_buffer("mean", torch.ones(3))
    fast.register_forward_hook(doubled)
    before = call(fast)

    copied = COPIES[way](fast)

    assert type(copied).__mro__[1] is type(fast).__mro__[1]
    assert copied.report == fast.report
    assert (copied.labels, copied.mean.tolist()) == (["cat", "dog"], [1, 1, 1])
    assert torch.equal(call(copied), before)
    assert set(copied.state_dict()) == set(fast.state_dict())
    copied.refit(Net(1).state_dict())
    assert not torch.equal(call(copied), before)
    copied.labels.append("bird")
    copied.register_forward_hook(doubled)
    if way != "copy":
        assert fast.labels == ["cat", "dog"]
        assert torch.equal(call(fast), before)


KINDS = {
    "ties and views": Net,
    "an unrecordable one": Branching,
    "a recurrent net": lambda seed: nn.Sequential(nn.Flatten(0, 2), nn.Linear(8, 5), nn.LSTM(5, 4)),
    "no weights": lambda seed: nn.ReLU(),
}


def of_two(kind, **options):
    """A model, the same optimized, and another of its kind."""
    old, new = (kind(seed).eval() for seed in (0, 1))
    return old, optimizer.optimize(old, X, level=1, **options), new


AGAIN = {"itself": lambda fast: fast, **COPIES, "optimized twice": at_level(engines=())}


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_refit_gives_the_answers_of_the_new_checkpoint(kind, way):
    old, first, new = of_two(KINDS[kind])
    before = copy.deepcopy(old.state_dict())
    fast = AGAIN[way](first)

    assert fast.refit(new.state_dict()) is fast

    torch.testing.assert_close(call(fast), call(new))
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.state_dict().items())


def test_a_refitted_model_is_as_if_optimized_from_the_start_also_by_a_pass_from_elsewhere():
    [fold] = [each for each in optimizer.all_passes() if each.name == "fold_affine"]
    for options in ({}, {"only": [dataclasses.replace(fold, name="mine")]}):
        _, fast, new = of_two(Net, **options)
        expected = optimizer.optimize(new, X, level=1, **options)

        fast.refit(new.state_dict(), X)

        assert fast.code == expected.code
        assert fast.report.fired == expected.report.fired != ()
        assert fast.report.checked == "final"
        for name, tensor in expected.state_dict().items():
            assert torch.equal(fast.state_dict()[name], tensor)


def test_what_is_kept_for_refit_holds_no_weights():
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).eval()
    fast = optimizer.optimize(model, torch.randn(2, 512), level=1)

    assert len(pickle.dumps(fast)) < 1.1 * fast.report.after.bytes


@pytest.mark.parametrize("kind", ["ties and views", "an unrecordable one"])
def test_load_state_dict_refuses_a_checkpoint_of_the_original(kind):
    """It takes its own; `refit` refuses those of another model."""
    _, fast, new = of_two(KINDS[kind])
    before = call(fast)

    for holder, prefix in ((fast, ""), (nn.Sequential(fast), "0.")):
        checkpoint = {prefix + name: tensor for name, tensor in new.state_dict().items()}
        with pytest.raises(InputError, match=r"refit\(state_dict\)"):
            holder.load_state_dict(checkpoint, strict=bool(prefix))
    for other in ({}, {"other": X}, 3):
        with pytest.raises(InputError, match="pass a checkpoint of the original model: "):
            fast.refit(other)
    assert torch.equal(call(fast), before)
    own = optimizer.optimize(new, X, level=1)
    nn.Sequential(fast).load_state_dict(nn.Sequential(own).state_dict())
    assert torch.equal(call(fast), call(own))


def test_a_loaded_model_without_the_originals_code_says_what_to_do():
    class Local(nn.Sequential):
        """Cannot be pickled."""

    fast = optimizer.optimize(Local(nn.Linear(8, 4), nn.Identity()).eval(), X, level=1)
    again = pickle.loads(pickle.dumps(fast))

    assert torch.equal(again(X), fast(X))
    with pytest.raises(InputError, match="load the weights there and optimize it"):
        again.refit({})


@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_a_function_that_holds_the_model_itself_leads_no_call_back_to_it():
    model = Net().train()
    forward = model.forward
    model.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]
    before = model.norm.running_mean.clone()

    fast = optimizer.optimize(model, X, level=1)

    assert torch.equal(model.norm.running_mean, before)  # it was updated by each trial
    assert any("holds a part of the model itself" in each for each in fast.report.remarks)
