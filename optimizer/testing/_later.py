"""Later calls: what a model does when it is not called as it was in the example.

A rewrite that rests on a fact of the example inputs alone is right there and wrong here. Where
the model itself rejects a call there is nothing to compare; the candidate may also refuse it with
an `InputError`, since a wrong answer is the only thing that is never allowed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch
from torch import nn

from optimizer import InputError
from optimizer._trees import tensors_in
from optimizer.testing._assemble import Spec
from optimizer.testing._observe import Outcome, observe
from optimizer.testing._oracles import assert_answers
from optimizer.testing._rounding import TOLERANCE

Inputs: TypeAlias = tuple[torch.Tensor, ...]
LaterCall: TypeAlias = Callable[..., None]


def on(change: Callable[[torch.Tensor], torch.Tensor]) -> LaterCall:
    """Call both on inputs that were changed, each by itself."""
    return among(lambda inputs: tuple(map(change, inputs)))


def among(change: Callable[[Inputs], Inputs]) -> LaterCall:
    def call(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
        _compare(model, candidate, change(inputs), exact=exact)

    return call


def _compare(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    try:
        reference = _answer(model, inputs)
    except AssertionError as assertion:
        _require_assertion(str(assertion), candidate, inputs)
        return
    if reference is not None:
        with suppress(InputError):
            assert_answers(reference, model, candidate, inputs, exact=exact)


def _require_assertion(message: str, candidate: nn.Module, inputs: Inputs) -> None:
    try:
        copy.deepcopy(candidate)(*(tensor.clone() for tensor in inputs))
    except (AssertionError, InputError):
        return
    raise AssertionError(f"the candidate no longer asserts: {message}")


def _answer(model: nn.Module, inputs: Inputs) -> Outcome | None:
    """What the model does, where it takes these inputs and torch says nothing against it."""
    try:
        with warnings.catch_warnings(), _saying_it_each_time():
            warnings.simplefilter("error")
            return observe(model, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, UserWarning):
        return None


@contextmanager
def _saying_it_each_time() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def _more_rows(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, 2 * tensor, tensor[:1]])


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    """What is one number in the example, and broadcast or cut to one later, is two."""
    return torch.cat([tensor, 2 * tensor], -1)


def _one_more_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """As large as the last one, so that a BatchNorm may take it for the channels."""
    last = tensor.shape[-1]
    return torch.stack([tensor] * last, 1) if last else tensor.unsqueeze(1)


def _other_layout(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def not_finite(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """Infinities: a rewrite that rounds may multiply them with a zero elsewhere."""
    if exact:
        infinite = tuple(torch.where(tensor > 1, torch.inf, tensor) for tensor in inputs)
        _compare(model, candidate, infinite, exact=True)


def cast(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """Cast both, as a user does who moves a model. Only bits can be compared in float32."""
    if exact:
        narrow = tuple(tensor.float() for tensor in inputs)
        models = copy.deepcopy(model).float(), copy.deepcopy(candidate).float()
        _compare(*models, narrow, exact=True)


def gradient(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """The gradients with respect to the inputs; a rewrite that rounds may differ at a kink."""
    if not exact:
        return
    try:
        expected = _gradients(model, inputs)
    except RuntimeError:
        return
    for actual, wanted in zip(_gradients(candidate, inputs), expected, strict=True):
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        close = torch.allclose(actual, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
        assert close, f"the gradient differs\nexpected {wanted}\ngot      {actual}"


@torch.enable_grad()
def _gradients(module: nn.Module, inputs: Inputs) -> Inputs:
    module = copy.deepcopy(module)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        result = module(*(leaf.clone() for leaf in leaves))
    outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    total = torch.stack([(output * output).sum() for output in outputs]).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


LATER_CALLS: dict[str, LaterCall] = {
    "more rows": on(_more_rows),
    "one row": on(lambda tensor: tensor[:1]),
    "longer rows": on(_longer),
    "one row of the last": among(lambda inputs: (*inputs[:-1], inputs[-1][:1])),
    "one tensor for all": among(lambda inputs: inputs[:1] * len(inputs)),
    "another layout": on(_other_layout),
    "another rank": on(_one_more_dimension),
    "not finite": not_finite,
    "cast": cast,
    "gradient": gradient,
}


def later_calls(spec: Spec) -> tuple[str, ...]:
    """The names of the gradient and of the later call that a spec's seed chooses."""
    return list(LATER_CALLS)[spec.seed % (len(LATER_CALLS) - 1)], "gradient"
