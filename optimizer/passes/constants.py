"""What depends on no input is computed once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.node import owner
from optimizer.facts.facts import (
    Refused,
    computation,
    fact,
    facts_of,
    is_external,
    is_pure,
    is_read_only,
    is_returned,
    is_written,
    tensor,
    tensors_read_by,
    value_of,
)
from optimizer.rewrite.contract import call, require, rewrite
from optimizer.rewrite.edit import insert_buffer

MAY_GROW_TO = 1 << 20  # bytes


@rewrite(call(name="last"), numerics="exact", phase="simplify")
def fold_constants(last: fx.Node) -> fx.Node | None:
    """Compute once what depends on no input, and keep it as a buffer.

    f(constants) -> one constant, computed once.

    The graph's own operators run on the model's own tensors, where those lie, and so yield the
    bits of every call: they draw nothing, and no node writes what they read. What a call
    writes or returns stays its own. A buffer is moved and cast with the model, so the result
    must be one that a cast of the model would cast. No gradient reaches what was folded, as
    with all folded weights; in training mode nothing that learns is. A view costs nothing and
    is left; so is what is refused, though not the constants that it reads.
    """
    nodes = _constant(last)
    if not nodes or all(map(_is_folded, last.users)):
        return None
    _require_foldable(nodes)
    with torch.no_grad():
        value = value_of(nodes, lambda held: held)
    require(value.dtype == tensor(last).dtype, "autocast gives it another dtype")
    return insert_buffer(last, value, f"{last.name}_folded")


def _constant(last: fx.Node) -> list[fx.Node]:
    """The nodes that make a new tensor of nothing but the model's own, if they do."""
    nodes = computation(last, _is_constant)
    new = nodes and isinstance(fact(last).value, torch.Tensor) and not is_external(last)
    return nodes if new else []


def _is_constant(node: fx.Node) -> bool:
    known = node.meta.get("fact")
    made = node.op == "get_attr" or (node.op.startswith("call") and node.all_input_nodes)
    return bool(made and known and not known.inputs) and is_pure(node)


def _is_folded(user: fx.Node) -> bool:
    """Whether a reader of a constant is about to be folded together with it."""
    try:
        return bool(nodes := _constant(user)) and _require_foldable(nodes)
    except Refused:
        return False


def _require_foldable(nodes: list[fx.Node]) -> bool:
    last, read = nodes[-1], tensors_read_by(nodes)
    written = (not is_read_only(n) or (n.op == "call_module" and is_written(n)) for n in nodes)
    learns = owner(last).training and any(tensor.requires_grad for tensor in read)
    require(not any(written), "the forward writes it, or what it is made of")
    require(not is_returned(last), "it is returned, and so has to be new in each call")
    require(not learns, "the model is in training mode, and may be learning it")
    small = _bytes(tensor(last)) <= max(MAY_GROW_TO, sum(map(_bytes, read)))
    require(small, "it is larger than what it is made of")
    require(_follows_the_model(nodes), "it would not be cast or moved with the model")
    return True


def _bytes(value: torch.Tensor) -> int:
    return max(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def _follows_the_model(nodes: list[fx.Node]) -> bool:
    """Whether `model.double()` and `model.to(device)` do to the result what they do to a buffer."""
    value, facts = tensor(nodes[-1]), facts_of(nodes[-1].graph)
    other = torch.float32 if value.dtype == torch.float64 else torch.float64

    def cast(held: Any) -> Any:
        moved = copy.deepcopy(facts.to_meta(held)) if facts else held
        return moved.to(other) if isinstance(held, nn.Module) or held.is_floating_point() else moved

    try:
        result = value_of(nodes, cast)
    except Exception:  # an operator that takes no other dtype
        return False
    follows = result.dtype == (other if value.is_floating_point() else value.dtype)
    return result.is_meta and follows and not value.is_complex()
