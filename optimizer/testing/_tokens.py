"""The vocabulary: every word, simplest first, with what it does to the machine."""

from __future__ import annotations

from optimizer.testing._control import CONTROL, RESPELLED
from optimizer.testing._layers import CLASSES, CONSTANTS, CONVOLUTIONS, LAYERS, NORMS, RARE_LAYERS
from optimizer.testing._machine import Emit, Word, emit
from optimizer.testing._values import (
    ACTIVATIONS,
    ARITHMETIC,
    ASSIGNMENTS,
    IDENTITIES,
    JOINS,
    POOLS,
    RARE,
    RELUS,
    RESHAPES,
    VIEWS,
)

_WORDS: dict[str, dict[str, Word]] = {
    "relu": RELUS,
    "layer": LAYERS | NORMS | CONVOLUTIONS,
    "control": {**CONTROL},
    "arithmetic": ARITHMETIC,
    "activation": ACTIVATIONS,
    "pool": POOLS,
    "shape": RESHAPES,
    "join": JOINS,
    "view": VIEWS,
    "identity": IDENTITIES,
    "assignment": ASSIGNMENTS,
    "constant": CONSTANTS,
    "rare": RARE | RARE_LAYERS,
    "class": CLASSES,
    "keyword": {**RESPELLED},
}
FAMILIES: dict[str, dict[str, Emit]] = {
    family: {name: emit(word) for name, word in words.items()} for family, words in _WORDS.items()
}
TOKENS: dict[str, Emit] = {
    token: emit for family in FAMILIES.values() for token, emit in family.items()
}
