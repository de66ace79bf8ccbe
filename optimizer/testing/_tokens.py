"""The vocabulary: every token, simplest first, with what it does to the machine.

A token is total: where it cannot apply it does nothing or something simpler, so that every list
of tokens is a program and no example is ever rejected. Parameters are baked into the token, so
that Hypothesis makes one choice per token and can delete it in one step.
"""

from __future__ import annotations

from optimizer.testing._activations import ACTIVATIONS
from optimizer.testing._classes import CLASSES
from optimizer.testing._constants import CONSTANTS
from optimizer.testing._control import CONTROL
from optimizer.testing._convolutions import CONVOLUTIONS
from optimizer.testing._elementwise import ARITHMETIC, IDENTITIES, RELUS
from optimizer.testing._keywords import RESPELLED
from optimizer.testing._layers import LAYERS
from optimizer.testing._machine import Emit
from optimizer.testing._norms import NORMS
from optimizer.testing._pools import POOLS
from optimizer.testing._rare import RARE
from optimizer.testing._shapes import JOINS, RESHAPES, SLICES
from optimizer.testing._spellings import (
    MORE_ACTIVATIONS,
    MORE_ARITHMETIC,
    MORE_ASSIGNMENTS,
    MORE_IDENTITIES,
    MORE_JOINS,
    MORE_LAYERS,
    MORE_SHAPES,
    MORE_VIEWS,
)
from optimizer.testing._views import ASSIGNMENTS, VIEWS

FAMILIES: dict[str, dict[str, Emit]] = {
    "relu": RELUS,
    "layer": LAYERS | NORMS | CONVOLUTIONS | MORE_LAYERS,
    "control": CONTROL,
    "arithmetic": ARITHMETIC | MORE_ARITHMETIC,
    "activation": ACTIVATIONS | MORE_ACTIVATIONS,
    "pool": POOLS,
    "shape": RESHAPES | SLICES | MORE_SHAPES,
    "join": JOINS | MORE_JOINS,
    "view": VIEWS | MORE_VIEWS,
    "identity": IDENTITIES | MORE_IDENTITIES,
    "assignment": ASSIGNMENTS | MORE_ASSIGNMENTS,
    "constant": CONSTANTS,
    "rare": RARE,
    "class": CLASSES,
    "keyword": RESPELLED,
}

TOKENS: dict[str, Emit] = {
    token: emit for family in FAMILIES.values() for token, emit in family.items()
}
