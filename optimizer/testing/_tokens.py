"""The vocabulary: every word, simplest first, with what it does to the machine."""

from __future__ import annotations

from optimizer.testing import _values
from optimizer.testing._control import CONTROL, RESPELLED
from optimizer.testing._layers import CLASSES, CONSTANTS, CONVOLUTIONS, LAYERS, NORMS, RARE_LAYERS
from optimizer.testing._machine import Emit, Word, emit

_WORDS: dict[str, dict[str, Word]] = {
    "relu": _values.RELUS,
    "layer": LAYERS | NORMS | CONVOLUTIONS,
    "control": {**CONTROL},
    "arithmetic": _values.ARITHMETIC,
    "activation": _values.ACTIVATIONS,
    "pool": _values.POOLS,
    "shape": _values.RESHAPES,
    "join": _values.JOINS,
    "view": _values.VIEWS,
    "identity": _values.IDENTITIES,
    "assignment": _values.ASSIGNMENTS,
    "constant": CONSTANTS,
    "rare": _values.RARE | RARE_LAYERS,
    "class": CLASSES,
    "keyword": {**RESPELLED},
}
FAMILIES: dict[str, dict[str, Emit]] = {
    family: {name: emit(word) for name, word in words.items()} for family, words in _WORDS.items()
}
TOKENS: dict[str, Emit] = {
    token: emit for family in FAMILIES.values() for token, emit in family.items()
}
