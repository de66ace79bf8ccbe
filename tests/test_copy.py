"""The structural copy: what is new in it, what is shared, and who says how he is copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from optimizer._copy import structural_copy
from optimizer._errors import CaptureError


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
