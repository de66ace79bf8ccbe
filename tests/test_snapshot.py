"""The result is a snapshot: what is written to the original later is not seen, nor in part.

Another checkpoint: `refit` takes one of the original, `load_state_dict` only its own.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import InputError
from optimizer.core.copy import structural_copy
from tests.conftest import address
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
Write = Callable[[Any], object]


class Net(nn.Module):
    """A layer that is folded into, one that is kept, a weight, a buffer and its view."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head, self.tail = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.randn(16))
        self.view = self.shift[4:8]
        nn.init.normal_(self.bn.running_mean)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().mean((2, 3))
        return self.tail((self.head(x) * self.scale + self.shift).softmax(-1)) + self.view


class Branching(Net):
    """Cannot be recorded, and so runs as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 100 else 1)


def train(model: nn.Module, optimizer_of: Callable[..., Any], **options: Any) -> None:
    model(X).square().mean().backward()
    optimizer_of(model.parameters(), lr=0.5, **options).step()


def write_all(write: Callable[[Tensor], object]) -> Write:
    @torch.no_grad()
    def all_written(model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                write(tensor)

    return all_written


WRITES: dict[str, Write] = {
    "a step": lambda model: train(model, torch.optim.SGD),
    "a fused step": lambda model: train(model, torch.optim.AdamW, fused=True),
    "a foreach step": lambda model: train(model, torch.optim.Adam, foreach=True),
    ".data": write_all(lambda each: each.data.mul_(3)),
    "numpy": write_all(lambda each: each.numpy().fill(3)),
    "dlpack": write_all(lambda each: torch.from_dlpack(each.detach()).fill_(3)),
    "a checkpoint": lambda model: model.load_state_dict(Net(1).state_dict()),
    "statistics": lambda model: model.train()(X),
    "a cast": lambda model: model.double(),
    "swapped": write_all(lambda each: torch.utils.swap_tensors(each, each.clone().mul_(3))),
    "shared memory": lambda model: WRITES[".data"](model.share_memory()),
    "a storage": write_all(lambda each: each.untyped_storage().fill_(5)),
    "a resized storage": lambda model: resized(model),
    "a resized buffer": lambda model: model.shift.resize_(99).fill_(5),
}


def resized(model: Any) -> None:
    storage = model.scale.untyped_storage()
    if not storage.is_shared():  # torch ends the process
        storage.resize_(999)


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "torch's own": Tensor.clone,
    "numpy's": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
    "what torch.load makes, which has no allocator": saved_and_loaded,
    "shared memory": lambda tensor: tensor.clone().share_memory_(),
}
# Each kind of memory is tried at one level.
PLACES = [(Net, *each) for each in zip(MEMORY, (1, 0, 0, 2), strict=True)]
PLACES += [(Branching, "torch's own", 1), (Net, "torch's own", 2)]


def call(model: nn.Module, inputs: Any = X) -> Any:
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("kind", "memory", "level"), PLACES)
def test_no_later_write_is_seen(kind: type[Net], memory: str, level: int, write: str) -> None:
    model = kind()
    for weight in model.parameters():
        weight.data = MEMORY[memory](weight.detach())
    fast = optimizer.optimize(model, X, level=level, tune_seconds=0)
    before = call(fast)
    assert fast.report.fired

    with suppress(RuntimeError):  # torch refuses to resize what is not its own
        WRITES[write](model)

    assert torch.equal(call(fast), before)


def in_inference_mode(model: Any) -> nn.Module:
    with torch.inference_mode():
        model.register_buffer("shift", model.shift + 0)
        return optimizer.optimize(model, X, level=1)


PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "captured": lambda model: optimizer.capture(model, X),
    "exported": lambda model: optimizer.optimize(torch.export.export(model, (X,)), level=1),
    "unchecked": lambda model: optimizer.optimize(model, X, level=1, check=None),
    "in inference mode": in_inference_mode,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("way", PREPARE)
def test_whatever_prepares_it(way: str) -> None:
    model = Net()
    fast = PREPARE[way](model)
    before = call(fast)

    WRITES["a fused step"](model)

    assert torch.equal(call(fast), before)
    assert not any(each.is_inference() for each in fast.state_dict().values())


def test_training_the_result_does_not_reach_the_model() -> None:
    model = Net()
    before = call(model)

    WRITES["a step"](optimizer.optimize(model, X, level=1))

    assert torch.equal(call(model), before)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": Tensor.numpy,
    "numpy, by dlpack": np.from_dlpack,
    "dlpack": torch.from_dlpack,
    "a tensor": lambda tensor: tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_elsewhere_is_copied_at_once(holder: str) -> None:
    """Else a numpy array would write into the snapshot, and the model would part from it."""
    model = nn.Linear(4, 4)
    array = HOLDERS[holder](model.weight.detach())
    taken = structural_copy(model, share_parameters=False)
    before = taken.weight.detach().clone()

    array[0] = 5

    assert torch.equal(taken.weight, before)
    assert model.weight[0].tolist() == [5] * 4
    model.weight.data.zero_()
    assert array[0].tolist() == [0] * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_snapshot_takes_no_memory_on_any_default_device(device: str) -> None:
    model = Net()
    with torch.device(device):
        taken: Any = structural_copy(model, share_parameters=False)

    assert address(taken.scale) == address(model.scale)
    assert address(taken.view) == address(taken.shift[4:])


def test_weights_of_an_rnn_are_copied_at_once() -> None:
    """Its kernel asks to write them: threads that call it would end the process."""
    model = nn.LSTM(4, 4)
    taken = structural_copy(model, share_parameters=False)

    for ours, theirs in zip(taken.parameters(), model.parameters(), strict=True):
        assert address(ours) != address(theirs)
        assert not torch._C._is_cow_tensor(theirs)


def test_threads_may_take_snapshots_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not lock: two at once would spoil the storage."""
    model, at_once = nn.Linear(4, 4), list[bool]()
    entered, counted = threading.Semaphore(1), torch._C._storage_Use_Count

    def slowly(storage: int) -> int:
        holders = counted(storage)
        at_once.append(not entered.acquire(blocking=False))
        time.sleep(0.01)
        entered.release()
        return holders

    monkeypatch.setattr(torch._C, "_storage_Use_Count", slowly)
    with ThreadPoolExecutor(4) as pool:
        kept = [*pool.map(partial(structural_copy, share_parameters=False), [model] * 4)]

    assert len(kept) == 4
    assert at_once == [False] * 8


def holder() -> Any:
    """Holds a bit of everything."""
    model: Any = Forward("x", layer=nn.Conv2d(3, 4, 3), total=torch.zeros(4))
    model.again, model.view, model.plain = model.layer, model.total[:2], torch.ones(3)
    model.names = {"a": [1, 2], ("b", 1): OrderedDict(c={3})}
    model.empty = model.same = set[int]()
    model.loose, model.pair = [nn.Linear(2, 2), model.layer], (1, [2])
    model.history = {"made": model.plain * model.layer.bias[:3]}  # which deepcopy refuses
    return model


def test_a_copy_is_what_deepcopy_makes_and_new_in_all_but_its_weights() -> None:
    original, theirs = holder(), copy.deepcopy(Net())
    ours, copied = structural_copy(Net()), structural_copy(original)
    assert (str(ours), list(vars(ours))) == (str(theirs), list(vars(theirs)))
    assert copied.layer is copied.again is copied.loose[1]
    assert copied.same is copied.empty
    assert address(copied.layer.weight) == address(original.layer.weight)
    assert copied.history["made"].is_leaf
    assert torch.equal(copied.history["made"], original.history["made"])

    copied.names["a"].append(3)
    copied.names["b", 1]["c"].add(4)
    copied.empty.add(1)
    copied.pair[1].append(3)
    copied.layer.stride = (2, 2)
    copied.layer.register_forward_hook(lambda *given: None)
    for tensor in (copied.total, copied.plain, copied.history["made"]):
        tensor.data.zero_().add_(7)

    assert copied.view.tolist() == [7, 7]
    fresh = holder()
    for name in ("names", "empty", "pair"):
        assert getattr(original, name) == getattr(fresh, name)
    assert (original.layer.stride, len(original.layer._forward_hooks)) == ((1, 1), 0)
    assert (original.total.sum(), original.plain.sum()) == (0, 3)
    assert torch.equal(original.history["made"], original.layer.bias[:3])


class Own(nn.Module):
    """Say so on the copy."""

    def noted(self, *memo: Any) -> Any:
        copied = type(self)()
        copied.note = "copied its own way"
        return copied


OWN_WAYS: dict[str, Callable[..., Any]] = {
    "__deepcopy__": Own.noted,
    "__reduce__": lambda self: (type(self), (), vars(self.noted())),
    "__setstate__": lambda self, state: vars(self).update(vars(self.noted())),
    "__getstate__": lambda self: vars(self.noted()),
}


@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_class_that_says_how_it_is_copied_is_obeyed(way: str) -> None:
    kind = type("Own", (Own,), {way: OWN_WAYS[way]})

    copied = structural_copy(nn.Sequential(kind()))

    assert type(copied[0]) is kind
    assert copied[0].note == "copied its own way"


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "save and load": saved_and_loaded,
}


@pytest.mark.parametrize(("way", "level"), [*product(COPIES, (1,)), ("deepcopy", 2), ("pickle", 2)])
def test_a_copy_keeps_the_answer_and_the_report(way: str, level: int) -> None:
    """And all that was put on the result; what a deep copy is given later is its own."""
    model = Net()
    if level == 1:  # at level 2 the bits of Dynamo's graph depend on where the weights lie
        model.head.register_forward_hook(doubled)
    fast: Any = optimizer.optimize(model, X, level=level, tune_seconds=0)
    fast.labels, fast.extra = ["cat", "dog"], nn.Linear(2, 2)
    fast.register_buffer("mean", torch.ones(3))
    fast.register_forward_hook(doubled)
    before = call(fast)

    copied = COPIES[way](fast)

    assert type(copied).__mro__[1] is type(fast).__mro__[1]
    assert copied.report == fast.report
    assert (copied.labels, copied.mean.tolist()) == (["cat", "dog"], [1, 1, 1])
    assert torch.equal(copied.extra.weight, fast.extra.weight)
    assert torch.equal(call(copied), before)
    assert set(copied.state_dict()) == set(fast.state_dict())
    copied.refit(Net(1).state_dict())
    assert not torch.equal(call(copied), before)
    copied.labels.append("bird")
    copied.register_forward_hook(doubled)
    if way != "copy":
        assert fast.labels == ["cat", "dog"]
        assert torch.equal(call(fast), before)


class Tied(nn.Module):
    """A fold, a weight under two names, a mask that no checkpoint holds, a view of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.other.weight = self.conv.weight
        self.register_buffer("mask", torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1), persistent=False)
        self.register_buffer("shift", torch.randn(2, 3, 1, 1))
        self.first = self.shift[0]
        self.head = nn.Sequential(nn.Identity(), nn.Conv2d(3, 2, 1))
        nn.init.normal_(self.bn.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(torch.relu(self.bn(self.conv(x)))) * self.mask + self.first
        return self.head(x) + self.shift[1, :2]


class Nothing(nn.Module):
    """No weights, and an argument that chooses a branch."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        return torch.relu(nn.functional.dropout(x * 2 if twice else x, training=self.training))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 2), nn.Linear(8, 5), nn.ReLU(), nn.LSTM(5, 4))


KINDS: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "ties and views": (Tied, X),
    "a recurrent net": (recurrent, X),
    "an unrecordable one": (Branching, X),
    "no weights": (Nothing, {"x": X, "twice": True}),
}
AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda fast, inputs: fast,
    "a deepcopy": lambda fast, inputs: copy.deepcopy(fast),
    "a saved one": lambda fast, inputs: saved_and_loaded(fast),
    "optimized twice": partial(optimizer.optimize, tune_seconds=0, engines=()),
}


def of_two(kind: Callable[..., nn.Module], inputs: Any = X, **options: Any) -> Any:
    """A model, the same optimized, and another of its kind."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append((kind(seed) if kind is Branching else kind()).eval())
    return made[0], optimizer.optimize(made[0], inputs, level=1, **options), made[1]


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_refit_gives_the_answers_of_the_new_checkpoint(kind: str, way: str) -> None:
    make, inputs = KINDS[kind]
    old, first, new = of_two(make, inputs)
    before = copy.deepcopy(old.state_dict())
    fast = AGAIN[way](first, inputs)

    assert fast.refit(new.state_dict()) is fast

    torch.testing.assert_close(call(fast, inputs), call(new, inputs))
    for name, tensor in old.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_refitted_model_is_as_if_optimized_from_the_start() -> None:
    _, fast, new = of_two(Tied)
    expected = optimizer.optimize(new, X, level=1)

    fast.refit(new.state_dict(), X)

    assert fast.code == expected.code
    assert fast.report.fired == expected.report.fired
    assert fast.report.checked == "final"
    for name, tensor in expected.state_dict().items():
        assert torch.equal(fast.state_dict()[name], tensor)


def test_a_pass_from_elsewhere_runs_again() -> None:
    [fold] = [each for each in optimizer.all_passes() if each.name == "fold_affine"]
    _, fast, new = of_two(Tied, only=[dataclasses.replace(fold, name="mine")])

    fast.refit(new.state_dict())

    assert set(fast.report.counts()) == {"mine"}
    torch.testing.assert_close(call(fast), call(new))


def test_what_is_kept_for_it_holds_no_weights() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).eval()
    fast = optimizer.optimize(model, torch.randn(2, 512), level=1)

    assert len(pickle.dumps(fast)) < 1.1 * fast.report.after.bytes


@pytest.mark.parametrize("kind", [Tied, Branching])
def test_load_state_dict_refuses_a_checkpoint_of_the_original(kind: Any) -> None:
    _, fast, new = of_two(kind)
    before = copy.deepcopy(fast.state_dict())

    for (holder, prefix), strict in product(
        ((fast, ""), (nn.Sequential(fast), "0.")), (True, False)
    ):
        checkpoint = {prefix + name: tensor for name, tensor in new.state_dict().items()}
        with pytest.raises(InputError, match=r"refit\(state_dict\)"):
            holder.load_state_dict(checkpoint, strict=strict)

    assert all(torch.equal(fast.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", [Tied, Branching])
def test_load_state_dict_takes_its_own_checkpoint(kind: Any) -> None:
    _, fast, new = of_two(kind)
    other = optimizer.optimize(new, X, level=1)

    nn.Sequential(fast).load_state_dict(nn.Sequential(other).state_dict())

    assert torch.equal(call(fast), call(other))


@pytest.mark.parametrize("kind", [Tied, Branching])
@pytest.mark.parametrize("checkpoint", [{}, {"other": X}, 3])
def test_refit_refuses_another_models_checkpoint(kind: Any, checkpoint: Any) -> None:
    _, fast, _ = of_two(kind)
    before = call(fast)

    with pytest.raises(InputError, match="pass a checkpoint of the original model: "):
        fast.refit(checkpoint)

    assert torch.equal(call(fast), before)


def test_a_loaded_model_without_the_originals_code_says_what_to_do() -> None:
    class Local(nn.Sequential):
        """Cannot be pickled."""

    fast = optimizer.optimize(Local(nn.Linear(8, 4), nn.Identity()).eval(), X, level=1)
    again = pickle.loads(pickle.dumps(fast))

    assert torch.equal(again(X), fast(X))
    with pytest.raises(InputError, match="optimize it again"):
        again.refit({})
