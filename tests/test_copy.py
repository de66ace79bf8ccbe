"""The structural copy: what is new in it, what is shared, and who says how he is copied."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
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

    assert copied.layer is copied.again
    assert copied.same is copied.empty
    assert copied.loose[1] is copied.layer


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


def by_reference(model: Weights) -> None:
    model.weight.detach().numpy()[...] = 5


def by_dlpack(model: Weights) -> None:
    torch.from_dlpack(model.weight.detach()).fill_(5)


def by_swap(model: Weights) -> None:
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full_like(model.weight, 5)))


WRITES: dict[str, Callable[[Weights], object]] = {
    "in place": lambda model: model.weight.detach().fill_(5),
    "a fused optimizer": by_fused_step,
    ".data": lambda model: model.weight.data.mul_(5),
    "numpy": by_reference,
    "dlpack": by_dlpack,
    "a checkpoint": lambda model: model.load_state_dict(Weights(torch.randn(4, 4)).state_dict()),
    "a cast": lambda model: model.half(),
    "shared memory": lambda model: model.share_memory().weight.detach().fill_(5),
    "a storage": lambda model: model.weight.untyped_storage().fill_(5),
    "swap": by_swap,
    "a resize": lambda model: model.weight.untyped_storage().resize_(80),
}


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def inferred(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch's own": lambda tensor: tensor.clone(),
    "numpy's": lambda tensor: torch.from_numpy(tensor.numpy().copy()),
    "what torch.load makes, which has no allocator": loaded,
    "shared memory": lambda tensor: tensor.clone().share_memory_(),
}


OTHERS = set(MEMORY) - {"torch's own"}
# torch refuses to resize them.
PLACES = [each for each in product(WRITES, MEMORY) if each not in product(["a resize"], OTHERS)]


@pytest.mark.parametrize(("write", "memory"), PLACES)
def test_no_later_write_reaches_a_snapshot(write: str, memory: str) -> None:
    model = Weights(MEMORY[memory](torch.randn(4, 4)))
    before = model.weight.detach().clone()
    taken = structural_copy(model, share=False)

    WRITES[write](model)
    model.total.add_(1)

    assert torch.equal(taken.weight, before)
    assert taken.view.tolist() == [0, 0]


def test_no_write_to_a_snapshot_reaches_the_model() -> None:
    model = Weights(torch.ones(4, 4))
    taken = structural_copy(model, share=False)

    taken.weight.data.zero_()
    taken.total.add_(1)

    assert torch.equal(model.weight, torch.ones(4, 4))
    assert (model.view.tolist(), taken.view.tolist()) == ([0, 0], [1, 1])


def test_a_snapshot_takes_no_memory() -> None:
    model = Weights(torch.ones(4, 4))

    taken = structural_copy(model, share=False)

    assert address(taken.weight) == address(model.weight)
    assert address(taken.view) == address(taken.total)


def test_a_buffer_may_be_resized_afterwards() -> None:
    """Torch fails to write what is to be copied when written, once it was resized."""
    model = Weights(torch.ones(4, 4))
    taken = structural_copy(model, share=False)

    model.total.resize_(9).fill_(5)

    assert taken.total.tolist() == [0] * 4


def test_the_default_device_does_not_matter() -> None:
    model = Weights(torch.ones(4, 4))

    with torch.device("meta"):
        taken = structural_copy(model, share=False)

    assert address(taken.weight) == address(model.weight)


def test_a_snapshot_is_of_no_inference_tensors() -> None:
    model = Weights(torch.ones(4, 4))
    model.total = inferred(torch.ones(4))

    assert not structural_copy(model, share=False).total.is_inference()


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": torch.Tensor.numpy,
    "numpy, by dlpack": np.from_dlpack,
    "dlpack": torch.from_dlpack,
    "a tensor": lambda tensor: tensor,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_elsewhere_is_copied_at_once(holder: str) -> None:
    """Else a numpy array would write into the snapshot, and the model would part from it."""
    model = Weights(torch.ones(4, 4))
    array = HOLDERS[holder](model.weight.detach())
    taken = structural_copy(model, share=False)

    array[0] = 5

    assert torch.equal(taken.weight, torch.ones(4, 4))
    assert model.weight[0].tolist() == [5] * 4
    model.weight.data.zero_()
    assert array[0].tolist() == [0] * 4


def test_threads_may_take_snapshots_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not lock: two at once would spoil the storage."""
    model, kept, at_once = Weights(torch.ones(4, 4)), list[Weights](), list[bool]()
    entered, counted = threading.Semaphore(1), torch._C._storage_Use_Count

    def slowly(storage: int) -> int:
        holders = counted(storage)
        at_once.append(not entered.acquire(blocking=False))
        time.sleep(0.01)
        entered.release()
        return holders

    monkeypatch.setattr(torch._C, "_storage_Use_Count", slowly)
    threads = [
        threading.Thread(target=lambda: kept.append(structural_copy(model, share=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(kept) == 4
    assert at_once == [False] * 4


def test_weights_of_an_rnn_are_copied_at_once() -> None:
    """Its kernel asks to write them: threads that call it would end the process."""
    model = nn.Sequential(nn.LSTM(4, 4))

    taken = structural_copy(model, share=False)

    pairs = zip(taken.parameters(), model.parameters(), strict=True)
    assert not any(address(ours) == address(theirs) for ours, theirs in pairs)
    assert not any(torch._C._is_cow_tensor(each) for each in model.parameters())


def test_a_layer_of_a_kind_with_state_of_its_own_still_runs(original: Holder) -> None:
    x = torch.randn(5, 2, 3)

    torch.testing.assert_close(structural_copy(original).rnn(x), original.rnn(x))


class Deepcopied(nn.Module):
    def __deepcopy__(self, memo: Any) -> Deepcopied:
        copied = Deepcopied()
        copied.note = "copied its own way"
        return copied


class Reduced(nn.Module):
    def __reduce__(self) -> Any:
        return type(self), (), {**vars(self), "note": "copied its own way"}


class Restored(nn.Module):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.note = "copied its own way"


class Stated(nn.Module):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "note": "copied its own way"}


@pytest.mark.parametrize("kind", [Deepcopied, Reduced, Restored, Stated])
def test_a_class_that_says_how_it_is_copied_is_obeyed(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind())

    copied = structural_copy(model)

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
