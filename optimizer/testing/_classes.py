"""The text of classes and functions that generated programs use, by their names."""

from __future__ import annotations

from textwrap import indent

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

# `get_state` and `put_state` are for the oracle: see `put_back` of `_observe`.
_KEEPER = """\
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


def _keeper(name: str) -> str:
    holder, get, put, drawn = _KEEPERS[name]
    counted = "pass" if drawn else put.format(f"{get} + 1")
    parts = {"holder": holder, "get": get, "put": put.format("value"), "count": counted}
    return _KEEPER.format(name=name, read=drawn or get, **parts)


# What `__init__` does, where it does something.
_HOLDS = {
    "cached": "self.cache = {}",
    "writes_buffer": "self.register_buffer('total', torch.zeros(()))",
    "modules": "self.each = nn.ModuleList([nn.LeakyReLU(0.5), nn.Hardtanh(-4.0, 4.0)])",
    "shared": "self.one = self.two = nn.LeakyReLU(0.5)",
    "exchanged": "self.one, self.two = nn.PReLU(), nn.PReLU()",
    "replaced": "self.one, self.two = nn.LeakyReLU(0.5), nn.Tanh()",
    "trains_within": "self.drop = nn.Dropout(0.5)",
    "norm_trains_within": "self.norm = nn.BatchNorm1d(1)",
    "writes_weight": "self.held = nn.Parameter(torch.ones(()))",
    "writes_tail": "self.register_buffer('held', torch.ones(4, dtype=torch.float64))\n"
    "self.register_buffer('tail', self.held[2:])",
    "casts": "self.held = nn.Parameter(torch.ones(()))",
    "own_complex": "self.turn = nn.Parameter(torch.ones(()))",
    "hides": "self.register_buffer('held', torch.ones(()))",
    "shares": "self.register_buffer('held', torch.ones(2, dtype=torch.float64), persistent=False)\n"
    "self.register_buffer('kept', self.held[0])",
}
# The body of the forward; what it changes for a while is put back also where torch refuses.
_BODIES = {
    "cached": "if not self.cache: self.cache['sum'] = torch.arange(3.0).sum()\n"
    "return input + self.cache['sum']",
    "asks_type": "return input * (2.0 if isinstance(input, torch.Tensor) else 3.0)",
    "asks_dtype": "return input * (2.0 if isinstance(input, torch.DoubleTensor) else 3.0)",
    "casts": "return input.to(next(self.parameters()).dtype) * 2.0",
    "asks_none": "return input * (3.0 if input is None else 2.0)",
    "asks_rank": "return input * (2.0 if input.dim() > 2 else 3.0)",
    "asks_modes": "return input * (2.0 if torch.is_grad_enabled() else 3.0)",
    "swallows": "try: return input * (3.0 if input.sum() > 1e30 else 2.0)\n"
    "except Exception: return input * 5.0",
    "loops": "return torch.stack([row * 2.0 for row in input]) if len(input) else input",
    "keeps_value": "self.kept = input * 2.0\nreturn input + self.kept",
    "writes_buffer": "self.total.add_(1.0)\nreturn input * self.total",
    "writes_weight": "with torch.no_grad(): self.held.mul_(2.0)\nreturn input * self.held",
    "writes_tail": "self.tail.mul_(2.0)\nreturn input * self.held.sum()",
    "writes_input": "return input.mul_(2.0)",
    "shares": "return input * self.kept + self.held[1]",
    "draws_alike": "return input + torch.rand_like(input)",
    "draws_in_place": "return input + torch.empty_like(input).uniform_()",
    "draws_in_vain": "torch.rand(3)\nreturn input * 2.0",
    "seeds": "torch.manual_seed(3)\nreturn input + torch.rand(())",
    "generator": "given = torch.Generator().manual_seed(3)\n"
    "return input + torch.rand((), generator=given)",
    "forks": "with torch.random.fork_rng(devices=[]):\n"
    "    torch.manual_seed(3)\n    return input + torch.rand(())",
    "puts_back": "state = torch.get_rng_state()\ntorch.manual_seed(3)\ndrawn = torch.rand(())\n"
    "torch.set_rng_state(state)\nreturn input + drawn",
    "views": "return input.view_as(input)",
    "without_gradients": "with torch.no_grad(): return input * 2.0",
    "autocasts": "with torch.autocast('cpu', torch.bfloat16):\n"
    "    return (input.float().unsqueeze(-1) @ torch.ones(1, 1)).squeeze(-1)",
    "modules": "for each in self.each: input = each(input)\nreturn input",
    "shared": "first, self.two.negative_slope = self.one(input), 0.25\n"
    "try: return first - 2.0 * self.one(input)\nfinally: self.two.negative_slope = 0.5",
    "exchanged": "one, two = self.one.weight, self.two.weight\n"
    "self.one.weight, self.two.weight = two, one\ntry: return self.one(input)\n"
    "finally: self.one.weight, self.two.weight = one, two",
    "replaced": "one, self.one = self.one, self.two\n"
    "try: return self.one(input)\nfinally: self.one = one",
    "trains_within": "self.drop.train()\ntry: return self.drop(input)\nfinally: self.drop.eval()",
    "norm_trains_within": "flat = torch.cat([input.reshape(-1, 1), input.new_ones(2, 1)])\n"
    "self.norm.train()\ntry: self.norm(flat)\nfinally: self.norm.eval()\n"
    "return input + self.norm(flat).sum() * 0.125",
    "complex_number": "return (input * (2 + 1j)).real",
    "own_complex": "return (input * torch.complex(self.turn, 2.0 * self.turn)).real",
    # A view of what it is given, what it holds, and an object that hides one.
    "hides": "self.kept = 1\n"
    "return [input.view_as(input), self.held, types.SimpleNamespace(held=input)]",
}
# What code that nothing is known of may do with what it is given, and holds.
_UNKNOWN = (
    "hides", "views", "writes_input", "writes_buffer", "draws_in_vain", "keeps_value", "modules",
    "seeds",
)  # fmt: skip
_LAYER = """\
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, input):
{body}
"""
_UNKNOWN_LAYER = """\


class Unknown_{name}({name}):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: None)
"""


def _text(name: str, unknown: str = "") -> str:
    init, body = (indent(each, " " * 8) for each in (_HOLDS.get(name, ""), _BODIES[name]))
    return (_LAYER + unknown).format(name=f"Py_{name}", init=init, body=body)


KEPT = {f"Kept_{name}": _keeper(name) for name in _KEEPERS}
# Layers whose forwards do what Python can do around tensors: each keeps the shape.
PYTHON = {f"Py_{name}": _text(name) for name in _BODIES}
PYTHON |= {f"Unknown_Py_{name}": _text(name, _UNKNOWN_LAYER) for name in _UNKNOWN}

_BRANCHING = """\
class Branching(nn.Linear):
    def forward(self, input):
        return super().forward(input) * (1 if input.sum().isnan() else 2)
"""

HELPERS = {
    **KEPT,
    **PYTHON,
    "doubled_by_keyword": """\
def doubled_by_keyword(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        doubled = {n: 2 * x if x.is_floating_point() else x for n, x in kwargs.items()}
        return forward(self, *args, **doubled)

    return wrapper
""",
    "Keyed": """\
def told_keywords(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        factor = 2.0 if "input" in kwargs else 1.0
        return forward(self, *args, **kwargs) * factor

    return wrapper


class Keyed(nn.Linear):
    @told_keywords
    def forward(self, input):
        return super().forward(input)
""",
    "Held": """\
class Held(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)
""",
    "single_linear": """\
def single_linear(size, hold):
    linear = nn.Linear(size, size)
    del linear.weight, linear.bias
    hold(linear, "weight", torch.arange(size * size).reshape(size, size) % 5 - 2.0)
    hold(linear, "bias", torch.arange(size) % 3 - 1.0)
    linear.single = torch.float32
    return linear
""",
    "Grandparent": _BRANCHING
    + """

class Parent(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.before = nn.Linear(*sizes)
        self.child = Branching(*sizes)

    def forward(self, input):
        return self.child(self.before(input).relu())


class Grandparent(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parent = Parent(*sizes)

    def forward(self, input):
        return self.parent(input) + 1.0
""",
    "Doubled": """\
class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)
""",
    "Branching": _BRANCHING,
    "Constant": """\
class Constant(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, input):
        return input * self.weight
""",
    "double_output": """\
def double_output(module, arguments, output):
    return output * 2
""",
    "double_input": """\
def double_input(module, arguments):
    return tuple(2 * argument for argument in arguments)
""",
}
