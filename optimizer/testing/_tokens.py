"""The vocabulary: every word, simplest first, with what it does to the machine."""

from __future__ import annotations

from optimizer.testing._control import CONTROL
from optimizer.testing._keywords import RESPELLED
from optimizer.testing._layers import CLASSES, CONSTANTS, CONVOLUTIONS, LAYERS, NORMS, RARE_LAYERS
from optimizer.testing._machine import Emit
from optimizer.testing._shapes import ASSIGNMENTS, JOINS, POOLS, RESHAPES, VIEWS
from optimizer.testing._values import ACTIVATIONS, ARITHMETIC, IDENTITIES, RARE, RELUS
from optimizer.testing._words import Word, emit

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
