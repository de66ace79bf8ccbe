"""Layers whose forwards do what Python can do around tensors: each keeps the shape."""

from __future__ import annotations

from textwrap import indent

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
    "own_complex": "self.turn = nn.Parameter(torch.ones(()))",
    "hides": "self.register_buffer('held', torch.ones(()))",
}
# The body of the forward; what it changes for a while is put back also where torch refuses.
_BODIES = {
    "cached": "if not self.cache: self.cache['sum'] = torch.arange(3.0).sum()\n"
    "return input + self.cache['sum']",
    "asks_type": "return input * (2.0 if isinstance(input, torch.Tensor) else 3.0)",
    "asks_none": "return input * (3.0 if input is None else 2.0)",
    "asks_rank": "return input * (2.0 if input.dim() > 2 else 3.0)",
    "asks_modes": "return input * (2.0 if torch.is_grad_enabled() else 3.0)",
    "swallows": "try: return input * (3.0 if input.sum() > 1e30 else 2.0)\n"
    "except Exception: return input * 5.0",
    "loops": "return torch.stack([row * 2.0 for row in input]) if len(input) else input",
    "keeps_value": "self.kept = input * 2.0\nreturn input + self.kept",
    "writes_buffer": "self.total.add_(1.0)\nreturn input * self.total",
    "writes_input": "return input.mul_(2.0)",
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
    "autocasts": "with torch.autocast('cpu', torch.bfloat16): return input + input.sum() * 0",
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


PYTHON = {f"Py_{name}": _text(name) for name in _BODIES} | {
    f"Unknown_Py_{name}": _text(name, _UNKNOWN_LAYER) for name in _UNKNOWN
}
