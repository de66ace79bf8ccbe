"""Later calls: what a model does when it is not called as it was in the example.

A rewrite that rests on a fact of the example inputs alone is right there and wrong here. Where
the model itself rejects a call there is nothing to compare; the candidate may also refuse it with
an `InputError`, since a wrong answer is the only thing that is never allowed.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from io import StringIO
from typing import Any, TypeAlias

import torch
from torch import nn

from optimizer import InputError
from optimizer.core.copy import held_tensors
from optimizer.core.inputs import tensors_in
from optimizer.testing._assemble import Spec
from optimizer.testing._data import HELD, LAYOUTS
from optimizer.testing._observe import Outcome, Watch, observe, put_back
from optimizer.testing._oracles import assert_answers
from optimizer.testing._rounding import TOLERANCE, Near

# Of a gradient: torch's hardsigmoid multiplies it with 1/6 as float32 has it, also in float64.
COARSE = 1e-7

Inputs: TypeAlias = tuple[Any, ...]
LaterCall: TypeAlias = Callable[..., None]


def on(change: Callable[[torch.Tensor], torch.Tensor]) -> LaterCall:
    """Call both on inputs that were changed, each by itself."""
    return among(lambda inputs: tuple(map(change, inputs)))


def among(change: Callable[[Inputs], Inputs]) -> LaterCall:
    def call(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
        _compare(model, candidate, change(inputs), exact=exact)

    return call


def _compare(model: nn.Module, candidate: nn.Module, inputs: Any, *, exact: bool) -> None:
    try:
        reference = _answer(model, inputs)
    except AssertionError as assertion:
        _require_assertion(str(assertion), candidate, inputs)
        return
    if reference is None:
        return
    try:
        with suppress(InputError):
            assert_answers(reference, model, candidate, inputs, exact=exact)
    except AssertionError:
        if not _makes_single_elements(model, inputs):
            raise
        assert_answers(reference, model, candidate, inputs, exact=exact, layout=False)


def _makes_single_elements(model: nn.Module, inputs: Any) -> bool:
    """Whether strides may be torch's own: of a single element, they are not the model's.

    The model is called once more for it: watched, max_pool1d for one lays its result out otherwise.
    """
    made = [inputs]
    with Watch(lambda func, args, kwargs, result: made.append(result)):
        _answer(model, inputs)
    return any(1 in each.shape for each in tensors_in(made))


def _require_assertion(message: str, candidate: nn.Module, inputs: Any) -> None:
    try:
        observe(candidate, inputs)
    except (AssertionError, InputError):
        return
    raise AssertionError(f"the candidate no longer asserts: {message}")


def _answer(model: nn.Module, inputs: Any) -> Outcome | None:
    """What the model does, where it takes these inputs and torch says nothing against it."""
    try:
        # fx prints what a graph rejects.
        with warnings.catch_warnings(), _saying_it_each_time(), redirect_stderr(StringIO()):
            warnings.simplefilter("error")
            return observe(model, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, UserWarning):
        return None


@contextmanager
def _saying_it_each_time() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def _one_more_dimension(tensor: torch.Tensor) -> torch.Tensor:
    """As large as the last one, so that a BatchNorm may take it for the channels."""
    last = tensor.shape[-1]
    return torch.stack([tensor] * last, 1) if last else tensor.unsqueeze(1)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Without elements, torch does not see that a layer's dtype is another."""
    return tensor.float() if tensor.is_floating_point() and tensor.numel() else tensor


def _with_infinities(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor > 1, torch.inf, tensor) if tensor.is_floating_point() else tensor


class _Twice(nn.Module):
    """Two calls of a module: what the first returned is written, and other numbers are given.

    It holds what the module holds, under the same names.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self).update(vars(module), module=module)

    def __deepcopy__(self, memo: Any) -> _Twice:
        return _Twice(copy.deepcopy(self.module, memo))

    def forward(self, *inputs: torch.Tensor) -> Any:
        first = self.module(*(tensor.clone() for tensor in inputs))
        for tensor in tensors_in(first):
            with suppress(RuntimeError):  # it is a mask, or expanded
                tensor.add_(1)
        return first, self.module(*(-each if each.is_floating_point() else each for each in inputs))


def twice(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """What is kept from one call to the next, or returned by both, shows."""
    _compare(_Twice(model), _Twice(candidate), inputs, exact=exact)


def cast(dtype: torch.dtype) -> LaterCall:
    """Cast both, as a user does who moves a model."""

    def narrowed(value: nn.Module | torch.Tensor) -> Any:
        is_floating = isinstance(value, nn.Module) or value.is_floating_point()
        return copy.deepcopy(value).to(dtype) if is_floating else value

    def call(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
        given = tuple(map(narrowed, inputs))
        _compare(narrowed(model), narrowed(candidate), given, exact=exact)

    return call


def gradient(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """The gradients with respect to the inputs, in float64, of which the last is given by name.

    Rounding may move them at a kink, or where they are what is left of larger ones.
    """
    parameters = [*inspect.signature(model.forward).parameters.values()]
    names = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    gradients = partial(_gradients, named=names[len(inputs) - 1 : len(inputs)])
    judged = partial(Near, model, inputs, observed=gradients)
    try:
        with redirect_stderr(StringIO()):  # fx prints what a graph rejects
            expected = gradients(model, inputs)
    except RuntimeError:
        return
    for name, actual in gradients(candidate, inputs).items():
        wanted = expected[name]
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        bound = scale * (TOLERANCE if exact else COARSE)
        close = torch.allclose(actual, wanted, rtol=0, atol=bound, equal_nan=True)
        close = close or (not exact and judged(name)(actual, wanted))
        assert close, f"the gradient differs\nexpected {wanted}\ngot      {actual}"


@torch.enable_grad()
def _gradients(module: nn.Module, inputs: Inputs, named: list[str]) -> dict[str, torch.Tensor]:
    module = copy.deepcopy(module)
    put_back(module)
    wide = [tensor.dtype == torch.float64 for tensor in inputs]
    leaves = [x.clone().requires_grad_(is_wide) for x, is_wide in zip(inputs, wide, strict=True)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        given = [leaf.clone() for leaf in leaves]
        by_name = {name: given.pop() for name in named}
        result = module(*given, **by_name)
    outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    nothing = torch.zeros((), requires_grad=True)  # where no output depends on what learns
    total = torch.stack([nothing, *((output * output).sum() for output in outputs)]).sum()
    found = torch.autograd.grad(total, learning, allow_unused=True, materialize_grads=True)
    return {f"gradient {place}": each for place, each in enumerate(found)}


def other_options(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """What was left out is given, and is another value than by default."""
    parameters = [*inspect.signature(model.forward).parameters.values()]
    left = [each for each in parameters[len(inputs) :] if each.default is not each.empty]
    others = {each.name: _other(each.default) for each in left}
    if others:
        names = (each.name for each in parameters)
        _compare(model, candidate, dict(zip(names, inputs, strict=False)) | others, exact=exact)


def _other(value: Any) -> Any:
    return not value if isinstance(value, bool) else 2 if value is None else value + 1


def weights_written(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """The model's tensors are written in many ways: the candidate answers as it did before."""
    original = copy.deepcopy(model)
    tensors = [*model.parameters(), *held_tensors(model)]
    before, kept = observe(original, inputs), [tensor.clone() for tensor in tensors]
    try:
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                _write(tensor)
            if tensor in HELD:
                HELD[tensor][...] += 1
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        assert_answers(before, original, candidate, inputs, exact=exact)
    finally:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.data.copy_(value)


@torch.no_grad()
def _write(tensor: torch.Tensor) -> None:
    """In place, past autograd, through a numpy array, and as a fused optimizer does."""
    tensor.mul_(2.0)
    tensor.data.add_(1.0)
    tensor.detach().numpy()[...] += 1.0
    parameter = nn.Parameter(tensor.detach())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()


def refitted(model: nn.Module, candidate: nn.Module, inputs: Inputs, *, exact: bool) -> None:
    """Both take another checkpoint, where the candidate does."""
    state = {name: 2 * value for name, value in model.state_dict().items()}
    other, fresh = copy.deepcopy(model), copy.deepcopy(candidate)
    if refit := getattr(fresh, "refit", None):
        other.load_state_dict(state)
        _compare(other, refit(state), inputs, exact=exact)


LATER_CALLS: dict[str, LaterCall] = {
    "more rows": on(lambda tensor: torch.cat([tensor, 2 * tensor, tensor[:1]])),
    "one row": on(lambda tensor: tensor[:1]),
    # What is one number in the example, and broadcast or cut to one later, is two.
    "longer rows": on(lambda tensor: torch.cat([tensor, 2 * tensor], -1)),
    "one channel": on(lambda tensor: tensor[:, :1] if tensor.dim() > 1 else tensor),
    "one column": on(lambda tensor: tensor[..., :1]),
    "one row of the last": among(lambda inputs: (*inputs[:-1], inputs[-1][:1])),
    "one more": among(lambda inputs: (*inputs, inputs[0])),
    "one tensor for all": among(lambda inputs: inputs[:1] * len(inputs)),
    "another layout": on(LAYOUTS["transposed"]),
    "channels last": on(LAYOUTS["channels_last"]),
    "strided": on(LAYOUTS["strided"]),
    "none for the last": among(lambda inputs: (*inputs[:-1], None)),
    "other sizes": on(lambda tensor: tensor.movedim(0, -1).contiguous()),
    "no rows": on(lambda tensor: tensor[:0]),
    "more channels": on(lambda tensor: tensor.repeat_interleave(2, int(tensor.dim() > 1))),
    "one rank less": on(lambda tensor: tensor[0] if len(tensor) else tensor),
    "one rank more": on(lambda tensor: tensor[None]),
    "narrow": on(_narrow),
    "another rank": on(_one_more_dimension),
    "not finite": on(_with_infinities),
    "cast": cast(torch.float32),
    "cast to half": cast(torch.float16),
    "gradient": gradient,
    "other options": other_options,
    "weights written": weights_written,
    "twice": twice,
    "refitted": refitted,
}


def later_calls(spec: Spec) -> tuple[str, ...]:
    """The names of the later calls that a spec's seed chooses: half of them.

    One tensor for all is given wherever there are several. Another checkpoint is rare: to be
    optimized again takes as long as all other calls.
    """
    asked = {"one tensor for all": "arg" in spec.tokens, "refitted": spec.seed % 8 == 1}
    turn = spec.seed // 4
    return tuple(n for i, n in enumerate(LATER_CALLS) if asked.get(n, (i + turn) % 2 == 0))
