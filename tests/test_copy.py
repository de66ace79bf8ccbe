"""The structural copy: what is new in it, what is shared, and who says how he is copied."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optimizer.core.copy import snapshot, structural_copy
from optimizer.core.errors import CaptureError
from tests.conftest import address


class Holder(nn.Module):
    """Holds a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.again = self.layer
        self.rnn = nn.LSTM(3, 4)
        self.register_buffer("total", torch.zeros(4))
        self.view = self.total[:2]
        self.plain = torch.ones(3)
        self.names: dict[Any, Any] = {"a": [1, 2], ("b", 1): OrderedDict(c={3})}
        self.empty: set[int] = set()
        self.same = self.empty
        self.loose = [nn.Linear(2, 2), self.layer]
        self.pair = (1, [2])


@pytest.fixture
def original() -> Holder:
    torch.manual_seed(0)
    return Holder()


def test_it_is_what_deepcopy_makes(original: Holder) -> None:
    ours, theirs = structural_copy(original), copy.deepcopy(original)

    assert str(ours) == str(theirs)
    assert list(vars(ours)) == list(vars(theirs))
    assert ours.names == original.names
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


def test_containers_and_modules_are_new(original: Holder) -> None:
    copied = structural_copy(original)
    copied.names["a"].append(3)
    copied.names["b", 1]["c"].add(4)
    copied.empty.add(1)
    copied.pair[1].append(3)
    copied.layer.stride = (2, 2)
    copied.layer.register_forward_hook(lambda *given: None)

    assert original.names == {"a": [1, 2], ("b", 1): OrderedDict(c={3})}
    assert original.empty == set()
    assert original.pair == (1, [2])
    assert original.layer.stride == (1, 1)
    assert not original.layer._forward_hooks


def test_what_was_one_object_is_one_object(original: Holder) -> None:
    copied = structural_copy(original)

    assert copied.layer is copied.again is copied.loose[1]
    assert copied.same is copied.empty


def test_parameters_are_shared_and_buffers_are_not(original: Holder) -> None:
    copied = structural_copy(original)
    copied.total.add_(1)

    assert copied.layer.weight is not original.layer.weight
    assert copied.layer.weight.data_ptr() == original.layer.weight.data_ptr()
    assert torch.equal(original.total, torch.zeros(4))
    assert torch.equal(copied.view, torch.ones(2))
    assert copied.plain.data_ptr() != original.plain.data_ptr()


class Weights(nn.Module):
    """A parameter, a buffer, and a view of it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("total", torch.zeros(4))
        self.view = self.total[:2]


def by_fused_step(model: Weights) -> None:
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.AdamW([model.weight], fused=True).step()


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.weight.detach().fill_(5),
    "a fused optimizer": by_fused_step,
    ".data": lambda model: model.weight.data.mul_(5),
    "numpy": lambda model: model.weight.detach().numpy().fill(5),
    "dlpack": lambda model: torch.from_dlpack(model.weight.detach()).fill_(5),
    "a checkpoint": lambda model: model.load_state_dict(Weights(torch.randn(4, 4)).state_dict()),
    "a cast": lambda model: model.half(),
    "shared memory": lambda model: model.share_memory().weight.detach().fill_(5),
    "a storage": lambda model: model.weight.untyped_storage().fill_(5),
    "swap": lambda model: torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(4, 4))),
    "a resize": lambda model: model.weight.untyped_storage().resize_(80),
}


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch's own": lambda tensor: tensor.clone(),
    "numpy's": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
    "what torch.load makes, which has no allocator": loaded,
    "shared memory": lambda tensor: tensor.clone().share_memory_(),
}


OTHERS = set(MEMORY) - {"torch's own"}
# torch refuses to resize them.
PLACES = [each for each in product(WRITES, MEMORY) if each not in product(["a resize"], OTHERS)]


def taken_of(model: Weights) -> Any:
    return structural_copy(model, share_parameters=False)


@pytest.fixture
def model() -> Weights:
    return Weights(torch.ones(4, 4))


@pytest.mark.parametrize(("write", "memory"), PLACES)
def test_no_later_write_reaches_a_snapshot(write: str, memory: str) -> None:
    model = Weights(MEMORY[memory](torch.randn(4, 4)))
    before = model.weight.detach().clone()
    taken = taken_of(model)

    WRITES[write](model)
    model.total.add_(1)

    assert torch.equal(taken.weight, before)
    assert taken.view.tolist() == [0, 0]


def test_no_write_to_a_snapshot_reaches_the_model(model: Weights) -> None:
    taken = taken_of(model)

    taken.weight.data.zero_()
    taken.total.add_(1)

    assert torch.equal(model.weight, torch.ones(4, 4))
    assert (model.view.tolist(), taken.view.tolist()) == ([0, 0], [1, 1])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_snapshot_takes_no_memory_on_any_default_device(device: str, model: Weights) -> None:
    with torch.device(device):
        taken = taken_of(model)

    assert address(taken.weight) == address(model.weight)
    assert address(taken.view) == address(taken.total)


def test_a_buffer_may_be_resized_afterwards(model: Weights) -> None:
    """Torch fails to write what is to be copied when written, once it was resized."""
    taken = taken_of(model)

    model.total.resize_(9).fill_(5)

    assert taken.total.tolist() == [0] * 4


def test_a_snapshot_is_of_no_inference_tensors(model: Weights) -> None:
    with torch.inference_mode():
        model.total = torch.ones(4)

    assert not taken_of(model).total.is_inference()


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": torch.Tensor.numpy,
    "numpy, by dlpack": np.from_dlpack,
    "dlpack": torch.from_dlpack,
    "a tensor": lambda tensor: tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_elsewhere_is_copied_at_once(holder: str, model: Weights) -> None:
    """Else a numpy array would write into the snapshot, and the model would part from it."""
    array = HOLDERS[holder](model.weight.detach())
    taken = taken_of(model)

    array[0] = 5

    assert torch.equal(taken.weight, torch.ones(4, 4))
    assert model.weight[0].tolist() == [5] * 4
    model.weight.data.zero_()
    assert array[0].tolist() == [0] * 4


def test_threads_may_take_snapshots_of_one_model(
    monkeypatch: pytest.MonkeyPatch, model: Weights
) -> None:
    """Torch does not lock: two at once would spoil the storage."""
    at_once = list[bool]()
    entered, counted = threading.Semaphore(1), torch._C._storage_Use_Count

    def slowly(storage: int) -> int:
        holders = counted(storage)
        at_once.append(not entered.acquire(blocking=False))
        time.sleep(0.01)
        entered.release()
        return holders

    monkeypatch.setattr(torch._C, "_storage_Use_Count", slowly)
    with ThreadPoolExecutor(4) as pool:
        kept = [*pool.map(taken_of, [model] * 4)]

    assert len(kept) == 4
    assert at_once == [False] * 4


def test_weights_of_an_rnn_are_copied_at_once() -> None:
    """Its kernel asks to write them: threads that call it would end the process."""
    model = nn.LSTM(4, 4)

    pairs = zip(
        structural_copy(model, share_parameters=False).parameters(), model.parameters(), strict=True
    )

    for ours, theirs in pairs:
        assert address(ours) != address(theirs)
        assert not torch._C._is_cow_tensor(theirs)


def test_a_layer_of_a_kind_with_state_of_its_own_still_runs(original: Holder) -> None:
    x = torch.randn(5, 2, 3)

    torch.testing.assert_close(structural_copy(original).rnn(x), original.rnn(x))


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


def test_what_cannot_be_copied_is_a_capture_error() -> None:
    model = nn.Sequential()
    model.generator = (each for each in ())

    with pytest.raises(CaptureError, match="cannot be copied"):
        structural_copy(model)


def test_a_tensor_with_a_history_is_copied_without_it(original: Holder) -> None:
    original.names["made"] = made = original.layer.weight * 2.0

    copied = structural_copy(original).names["made"]

    assert copied is not made
    assert copied.is_leaf
    assert torch.equal(copied, made)


def test_a_view_that_conjugates_is_of_what_it_was_and_not_copied(original: Holder) -> None:
    original.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
    original.conjugated = original.complex.conj()

    assert snapshot(original) == (original, False)
