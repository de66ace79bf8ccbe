"""live(n) = the bytes of all storages that are made at n or before and read at n or after."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx, nn

from optimizer._graph import describe, shape_text
from optimizer._inputs import ExampleInputs
from optimizer._report import table
from optimizer._trees import tensors_in
from optimizer.analysis._observed import observed


@dataclass(frozen=True)
class Live:
    """The bytes of activations that one node makes, and all that are alive while it runs."""

    node: str
    text: str
    shape: str
    made: int
    live: int
    unknown: str = ""  # why nothing is known of what this node makes; it counts as nothing


@dataclass(frozen=True)
class Memory:
    """The activations alive at each node, in the order of execution."""

    rows: tuple[Live, ...]

    @property
    def peak(self) -> int:
        """The least memory that a call in this order takes above its weights and inputs."""
        return self.at.live

    @property
    def at(self) -> Live:
        """The first node at which the peak is reached."""
        return max(self.rows, key=lambda row: row.live)

    def __str__(self) -> str:
        head = ("node", "calls", "shape", f"{'makes':>14}", f"{'live, bytes':>14}")
        rows = [
            (r.node, r.text, r.unknown or r.shape, f"{r.made:14,}", f"{r.live:14,}")
            for r in self.rows
        ]
        return f"{table([head, *rows])}\n\npeak {self.peak:,} bytes at {self.at.node}"


def memory(model: nn.Module, example_inputs: ExampleInputs) -> Memory:
    """A lower bound of a model's peak memory, node by node.

    A storage lives from the node that makes it to the last reader of any view of it; what is
    returned stays. Weights and inputs are there before, and what an operator takes for itself
    while it runs is not seen. What a mask chooses is counted as if it chose all.

    Raises:
        InputError: the model or the inputs have no use.
        CaptureError: the model cannot be recorded; the message says why.
    """
    module, facts = observed(model, example_inputs)
    nodes = list(module.graph.nodes)
    sizes, lives = _lifetimes(nodes, facts.external)
    made, freed = [0] * len(nodes), [0] * (len(nodes) + 1)
    for storage, (first, last) in lives.items():
        made[first] += sizes[storage]
        freed[last + 1] += sizes[storage]
    live = accumulate(new - old for new, old in zip(made, freed, strict=False))
    return Memory(tuple(map(_row, nodes, made, live)))


def _lifetimes(
    nodes: list[fx.Node], external: set[int]
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """The bytes of each storage that a call makes, and its first and last node."""
    place = {node: index for index, node in enumerate(nodes)}
    sizes: dict[int, int] = {}
    lives: dict[int, tuple[int, int]] = {}
    for node, index in place.items():
        read = max((place[user] for user in node.users), default=index)
        for tensor in tensors_in(node.meta["fact"].value):
            storage = tensor.untyped_storage()
            first, last = lives.get(storage._cdata, (index, read))
            if storage._cdata not in external:
                sizes[storage._cdata] = storage.nbytes()
                lives[storage._cdata] = first, max(last, read)
    return sizes, lives


def _row(node: fx.Node, made: int, live: int) -> Live:
    return Live(node.name, describe(node), shape_text(node), made, live, node.meta["fact"].error)
