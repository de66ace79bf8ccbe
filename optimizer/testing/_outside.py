"""Layers that count their calls, or draw, in what Python keeps, mostly outside the module."""

from __future__ import annotations

_NONLOCAL = """\
def counter():
    count = 0

    def put(value):
        nonlocal count
        count = value

    return lambda: count, put


GET, PUT = counter()"""
_FUNCTION = "def held():\n    pass\n\n\nheld.count = 0"
_DEFAULT = "def of_default(counts=[0]):\n    return counts"
_KEYWORD = "def of_keyword(*, counts=[0]):\n    return counts"

# What keeps a number, how to read it, how to put it there; and what is drawn where none is counted.
_KEEPERS: dict[str, tuple[str, str, str, str]] = {
    "attribute": ("", "self.count", "self.count = {}", ""),
    "global": ("COUNT = 0", "COUNT", "global COUNT; COUNT = {}", ""),
    "list": ("ITEMS = []", "len(ITEMS)", "ITEMS[:] = [1] * ({})", ""),
    "tuple": ("PAIR = (0, [0])", "PAIR[1][0]", "PAIR[1][0] = {}", ""),
    "dict": ("COUNTS = {}", 'COUNTS.get("n", 0)', 'COUNTS["n"] = {}', ""),
    "bytes": ("BYTES = bytearray(1)", "BYTES[0]", "BYTES[0] = {}", ""),
    "array": ("ARRAY = np.zeros(1)", "float(ARRAY[0])", "ARRAY[0] = {}", ""),
    "class": ("class Counts:\n    count = 0", "Counts.count", "Counts.count = {}", ""),
    "function": (_FUNCTION, "held.count", "held.count = {}", ""),
    "default": (_DEFAULT, "of_default()[0]", "of_default()[0] = {}", ""),
    "keyword": (_KEYWORD, "of_keyword()[0]", "of_keyword()[0] = {}", ""),
    "nonlocal": (_NONLOCAL, "GET()", "PUT({})", ""),
    "random": ("DICE = random.Random(0)", "DICE.getstate()", "DICE.setstate({})", "DICE.random()"),
    "numpy": (
        "BITS = np.random.default_rng(0)", "BITS.bit_generator.state",
        "BITS.bit_generator.state = {}", "BITS.random()",
    ),
}  # fmt: skip

# The last two are for the oracle: see `put_back` of `_observe`.
_LAYER = """\
{holder}


class Kept_{name}(nn.Module):
    count = 0

    def forward(self, input):
        {count}
        return input * {read}

    def get_state(self):
        return {get}

    def put_state(self, value):
        {put}


Kept_{name}.first = Kept_{name}().get_state()
"""


def _text(name: str) -> str:
    holder, get, put, drawn = _KEEPERS[name]
    counted = "pass" if drawn else put.format(f"{get} + 1")
    parts = {"holder": holder, "get": get, "put": put.format("value"), "count": counted}
    return _LAYER.format(name=name, read=drawn or get, **parts)


OUTSIDE = {f"Kept_{name}": _text(name) for name in _KEEPERS}
