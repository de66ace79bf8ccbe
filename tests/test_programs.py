"""Programs that are hard to record: what each front end makes of them, call by call as in eager.

A program is the text of a module of its own, `name [words] | text`, with further lines indented;
without a `def forward` it is what one returns. Above it stands the front end that records it, or
that it is left in eager; its words, or those of all there, are some of the first remark.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
import textwrap
from collections import namedtuple
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer
from tests.internals import GuardedModule, OptimizedModule, Outside, Unchanged, capture, restored
from tests.single_pass import Forward

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The use of `x.T`|This overload"
)

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
PREAMBLE = """
import collections, contextlib, dataclasses, enum, functools, itertools, logging, math, operator
import os, random, time, types, typing, weakref
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tests.test_programs import ROWS, Bare, Model, Pair
def step(): listed[0] += 1; return listed[0]
Record = dataclasses.make_dataclass("Record", ["n"])
count, listed, history, settings, box = 0, [0], [], Record(2.0), types.SimpleNamespace()
pair, proxy = Pair([], step), types.MappingProxyType({"step": step})
Two, Triple = (type("Sub", (each,), {}) for each in (Pair, tuple)); log = logging.getLogger("a")
class Slot: __slots__ = "log"
class Slots(Slot): __slots__ = ("unset",)
"""
Pair = namedtuple("Pair", "first second")
Bare = type("Bare", (dict,), {})  # of which pytree knows no keys
pytree.register_pytree_node(Bare, lambda b: ([*b.values()], [*b]), lambda v, k: Bare({k[0]: v[0]}))


class Model(nn.Module):
    """Runs the forward of a program, which may use layers, a parameter, a buffer and state."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("flag", torch.ones(4))
        self.plain, self.calls, self.seen, self.kept = torch.zeros(4), 0, [], {}
        self.function = program.forward
        nn.init.normal_(self.norm.running_mean)
        for name, value in getattr(program, "held", {}).items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)

    def helper(self, x: Tensor) -> Tensor:
        return x * 2


class Asking(Model):
    """Stars keep our own recording from it: what Dynamo makes of the program."""

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self, self.norm(self.linear(x)), *more)


TENSORS = """
# eager
autocast [enters autocast] | with torch.autocast("cpu", torch.bfloat16): return m.linear(x)
a shape that changes in place [changes the shape of a tensor] |
    y = (x * 2)[:1]; z = y.exp(); y.squeeze_(0); return y, z
a write under no_grad [a gradient mode] | with torch.no_grad(): m.scale.add_(1); return x * m.scale
a second error [it has a try statement] | try: return x.view(2, 6)
    except AttributeError: return x
    except RuntimeError: return -x
a look into a dict [looks a traced] | x * {2: 2.0}.get(x.dim(), 1.0)
what tensors lack [asks what a value has] | mask = getattr(x, "mask", 3); return x * mask
a gradient [for its attribute 'grad'] | x * 2 if x.grad is None else x
a weight on a GPU [its control flow depends] | x * 2 if next(m.parameters()).is_cuda else x
a note on a weight [for its attribute 'note'] | weight = nn.Parameter(torch.ones(4))
    weight.note, held = 3.0, {"weight": weight}; forward = lambda m, x: x * m.weight.note
tensors in a list [cannot be recorded: Cannot access] |
    held = {"kept": [torch.eye(4).to_sparse(), torch.ones(4, requires_grad=True)]}
    def forward(m, x): return x @ m.kept[0] * (1 + m.kept[1].requires_grad)
a conjugate of what is written [cannot be copied] | kept = torch.zeros(4, dtype=torch.cfloat)
    held = {"kept": kept, "view": kept.conj()}
    def forward(m, x): m.kept.add_(1j); return x + m.view
a type [it asks for the type of a value] | x * 2 if type(x) == nn.Parameter else x
text that is kept [writes a traced] | log = []; log.append(f"{x.dim()}"); return x, log[0] == "2"
text of a dtype [it writes a traced value as text] | x * 2 if str(x.dtype) == "torch.float64" else x
a type that is matched [its code has MATCH_CLASS] | match x:
        case torch.Tensor(): return x * 2
    return x
a new tensor that is written [a tensor that it makes itself] |
    total = torch.Tensor([0.0] * 4); total.add_(x[0]); return total
None in a tuple [may choose a branch] | calls = (ROWS, None), (ROWS, ROWS)
    def forward(m, pair): return pair[0] * 2 if pair[1] is None else pair[0] * pair[1]
a tensor by default [the default of 'w'] | class model(nn.Module):
        def forward(self, x, w=torch.full((4,), 3.0)): return x * w
a __call__ of the model [hooks, parametrizations or] | class model(Model):
        def __call__(self, x): return super().__call__(x) + 1
    def forward(m, x): return x * 2
a layer that counts [sets the global] | def own(x): global count; count += 1; return x
    class Own(nn.Module): pass
    held = {"c": Own()}; held["c"].forward = own; forward = lambda m, x: m.c(x) * (1 + count)
a hooked child that counts [it sets the global] | class Child(nn.Module):
        def forward(self, x): global count; count += 1; return x
    held = {"child": Child()}; held["child"].register_forward_hook(lambda *called: None)
    def forward(m, x): return m.child(x) * (1 + count)
members that are exchanged [its forward changes a module] |
    held = {"pair": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])}
    def forward(m, x): m.pair[0], m.pair[1] = m.pair[1], m.pair[0]; return m.pair[0](x)
a child with a hook that counts [it sets the attribute] | class Shift(nn.Module):
        def forward(self, x): return x + 1
    def hook(m, given, y): history.append(y); box.n += 1; return y * step() * box.n + len(history)
    box.n, held = 0, {"child": Shift()}; held["child"].register_forward_hook(hook)
    def forward(m, x): return m.child(m.linear(x))
a layer that trains for one call [it uses 'train'] |
    m.norm.train(); y = m.norm(m.linear(x)); m.norm.eval(); return y
# dynamo
None in a layer's result [may test a value] | held = {"of": nn.MultiheadAttention(4, 1)}
    def forward(m, x): return x * 2 if m.of(x, x, x, need_weights=False)[1] is None else x + 1
a child that counts [it changes what its code finds] | class Counter(nn.Module):
        def forward(self, x): listed[0] += 1; return x * listed[0]
    held = {"child": Counter()}; forward = lambda m, x: m.child(m.linear(x))
a child with a hook that changes what its parent read [a hook or parametrization] |
    held = {"child": nn.ReLU()}; held["child"].register_forward_hook(lambda *c: history.append(1))
    def forward(m, x): n = len(history); return m.child(m.linear(x)) * (n + 1)
a setting for one call [sets] | n = m.norm; n.eps = 0.5; y = n(m.linear(x)); n.eps = 1e-5; return y
a weight for one call [it uses '_parameters'] |
    p = m.norm._parameters; q = {**p}; p["weight"] = m.scale; y = m.norm(m.linear(x)); p |= q
    return y
# symbolic
assertions | assert x.dim() == 2 and x.shape[1] == 4, f"{x}"; assert (x < 99).all(); return x * 2
text in a message | torch._assert(x.dim() == 2, f"{x.dim()} {m.scale.shape[0]}"); return x * 2
zeros that are written | log.debug("zeros"); total = torch.zeros(4); total.add_(x[0]); return total
random numbers | x + torch.rand(4) + torch.randn(x.shape[0], 1) + torch.ops.aten.rand([4])
operators that write | y = x.T.__mul__(2); y += 1.0; y *= 2.0; y -= x.T; return y
statistics that are computed | F.batch_norm(m.linear(x), m.flag * 3, m.flag + 2)
a number before the matrices | x.addmm(2, x, m.linear.weight) * torch.mul(x.size(0) + 1, 2).sqrt()
a weight that is computed | F.linear(x, m.linear.weight * 2)
layers that it makes | nn.Sequential(m.linear, m.norm)[:1](nn.Tanh()(x)) + nn.Dropout(1.0)(x)
a weak reference to the model | class Child(nn.Module):
        def __init__(self, parent): super().__init__(); self.parent = weakref.ref(parent)
        def forward(self, x): return x * self.parent().weight * isinstance(self, Child)
    class model(nn.Module):
        def __init__(self):
            super().__init__(); self.weight = nn.Parameter(torch.ones(4)); self.child = Child(self)
        def forward(self, x): return self.child(x)
a view by which a weight is written | w = nn.Parameter(torch.zeros(4))
    held = {"w": w, "view": w.data}
    def forward(m, x): y = (x + m.w) * 2; m.view.add_(1); return y
a weight that is written |
    held = {"weight": nn.Parameter(torch.full((4,), 2.0), requires_grad=False)}
    def forward(m, x): return x * m.weight.mul_(2)
"""

# Its models are tried behind layers, and are checked, too.
STATE = """
# eager
an object that had no attributes [it sets the attribute 'count'] |
    box.count = vars(box).get("count", 0) + 1; return x * box.count
many words [by Dynamo: to guard many values takes it long] | words = dict.fromkeys(range(40_000))
    def forward(m, x): return x * float(len(words) > 0)
a global [it sets the global 'count' (a global:] | global count; count += 1; return x * count
a closure [it sets 'calls' of an enclosing function] | def made(calls=0):
        def forward(m, x): nonlocal calls; calls += 1; return x * calls
        return forward
    forward = made()
# eager: it changes what its code finds
a keyword-only default | def forward(m, x, *, calls=[0]): calls[0] += 1; return x * calls[0]
a number of another kind | listed[0] *= 1.0; return x * len(str(listed[0]))
# eager: left as it is
a tensor outside the model | total = torch.zeros(4)
    def forward(m, x): total.add_(1); return x * total
a tensor by default, which is written | class model(nn.Module):
        def forward(self, x, total=torch.zeros(4)): total.add_(1); return x * total
a row of a buffer in a list | class model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(3, 4)); self.rows = [self.kept[0]]
        def forward(self, x): self.kept.copy_(x[:1]); return x + self.rows[0]
# eager: it reaches
a table with methods of its own | class Table(collections.OrderedDict):
        def __getitem__(self, key): return super().__getitem__(key) + 0.5
        def __setitem__(self, key, value): super().__setitem__(key, value + 1)
    made = Table(n=1.0)
    def forward(m, x): made["n"] = made["n"]; return x * made["n"]
# eager: random
Python's random numbers | x * random.random()
# symbolic: is called as it is: it is scripted, or it has hooks
a tensor that a hook writes | total = torch.zeros(4)
    held = {"child": nn.ReLU()}
    held["child"].register_forward_hook(lambda m, given, y: y * total.add_(1))
    def forward(m, x): return m.child(m.linear(x))
# dynamo: it changes what its code finds
a list on a layer | held = {"own": nn.Linear(4, 4)}; held["own"].log = []
    def forward(m, x): m.own.log.append(1); return m.own(x) * len(m.own.log)
"""
HELD = {
    "a nested dict": ("{'a': [0]}", "kept['a'].append(1) or len(kept['a'])"),
    "a numpy generator": ("np.random.default_rng(0)", "float(kept.random())"),
    "an older generator": ("np.random.RandomState(0)", "float(kept.rand())"),
    "an array": ("np.zeros(1)", "float(np.add(kept, 1, out=kept)[0])"),
}
MEMBER, LOG = "enum.Enum('E', {'A': []}).A", "kept.log.append(1) or len(kept.log)"
ANY, PART = "lambda *of: step()", "type(kept).__add__ = functools.partialmethod(lambda *of: step())"
REACHED = {
    "a key that counts": ("{step: 0}", "[*kept][0]()"),
    "a partial": ("functools.partial(lambda a: a.append(1) or len(a), [])", "kept()"),
    "a partial by name": ("functools.partial(lambda a: a.append(1) or len(a), a=[])", "kept()"),
    "a pair": ("pair", "kept.first.append(1) or len(kept.first)"),
    "octets": ("bytearray(1)", "kept.append(1) or len(kept)"),
    "a proxy": ("proxy", "kept['step']()"),
    "a dict of another class": ("Bare(a=[])", "kept['a'].append(1) or len(kept['a'])"),
    "a list in a member": (MEMBER, "kept.value.append(1) or len(kept.value)"),
    "a method of a member": (MEMBER, "kept.take()", f"type(kept).take = {ANY}"),
    "an operator": (MEMBER, "kept + 1", f"type(kept).__add__ = {ANY}"),
    "a partial operator": (MEMBER, "kept + 1", PART),
    "an item": ("Two(1, 2)", "type(kept)[1]", f"Two.__class_getitem__ = classmethod({ANY})"),
    "a list on a tensor": ("torch.zeros(1)", LOG, "kept.log = []"),
    "a list on a pair": ("Two(1, 2)", LOG, "kept.log = []"),
    "a list on a tuple": ("Triple()", LOG, "kept.log = []"),
    "a list in a slot": ("Slots()", LOG, "kept.log = []"),
}
for _name, (_make, _step, *_more) in (HELD | REACHED).items():
    _reached = _make[:2] in ("np", "Tr", "Ba", "Sl", "by") or "partial" in str(_more)
    STATE += f"""
# eager: {"it reaches " if _reached else "it changes what its code finds"}
{_name} that is held | kept = {_make}
    {_more[0] if _more else ""}
    held = {{"kept": {"kept" if _name in HELD else None}}}
    def taken(kept): return {_step}
    def forward(m, x): return x * taken({"m." * (_name in HELD)}kept)
"""

# What `capture` takes, or refuses with the model untouched.
PROCESS = """
# eager
a layer of its own that it makes [is not installed as a submodule] |
    Made = type("Made", (nn.Module,), {"forward": lambda made, x: x * step()})
    def forward(m, x): return Made()(x)
a decorator of torch [forward() is decorated by] | @torch.no_grad()
    def forward(m, x): return x * 2
a hidden method [it finds 'helper' by getattr()] | getattr(m, "hel" + "per")(x)
a hidden object [it finds 'kept' by getattr()] | held = {"kept": settings}
    def forward(m, x): return x * getattr(m, "ke" + "pt").n
many values [9999 values] | held = {"words": dict.fromkeys(range(9999), 0)}
    def forward(m, x): return x * len(m.words)
# eager: it reaches
time [reaches time.time] | x * (1 + 0 * (time.time() + os.getpid() + random.random() + count))
environment | x * float(os.environ.get("SCALE", "1"))
an object | x * settings.n
a mapping that cannot be read | lazy = type("Lazy", (dict,), {"values": None})(scale=2.0)
    def forward(m, x): return x * lazy["scale"]
a gradient mode | x * (1 + torch.is_grad_enabled())
a record of the class |
    model = type("Own", (nn.Module,), {"kept": Record(2.0), "forward": lambda s, x: x * s.kept.n})
a record that a global holds too | kept = Record(2.0); held = {"kept": kept}
    def forward(m, x): return x * m.kept.n * kept.n
numpy's options for a block | with np.errstate(all="warn"): return x * 2
a hidden method of torch's [it finds 'train' by getattr()] | getattr(m, "tra" + "in")().linear(x)
numpy's options [it asks the process] | (np.seterr(all="warn"), x)[1]
# eager: it uses
setting | setattr(m, "n", 1) or x
a __dict__ | x * len(m.__dict__)
a global by another way | x * step.__globals__["count"]
a layer that is changed | m.train().linear(x)
# eager: it changes what its code finds
a function that is wrapped |
    def counting(function): return functools.wraps(function)(lambda *a: function(*a) * step())
    relu = counting(F.relu); forward = lambda m, x: relu(x)
# eager: holds a part of the model itself
a record that a hook changes | child = nn.ReLU()
    hook = lambda kept: child.register_forward_hook(lambda *_: setattr(kept, "n", kept.n + 1))
    held = {"child": child, "kept": Record(1.0)}; hook(held["kept"])
    def forward(m, x): return m.child(x) * m.kept.n
# symbolic
a record that the model holds | held = {"kept": Record([2.0])}
    def forward(m, x): return x * m.kept.n[0]
an enumeration | Mode = enum.Enum("Mode", "ONE TWO"); held = {"mode": Mode.TWO}
    def forward(m, x): return x if m.mode == Mode.ONE else -x
pure functions | math.sqrt(4) * functools.reduce(operator.mul, [x, torch.mul(x.shape[0], 2).sqrt()])
"""

RANDOM = """
# eager
a torch generator [it draws by a generator of its own] |
    x + torch.rand(4, generator=torch.Generator().manual_seed(0))
a torch generator that is held [it reaches generator, a Generator] |
    held = {"generator": torch.Generator().manual_seed(3)}
    def forward(m, x): return x + torch.empty_like(x).uniform_(generator=m.generator.manual_seed(4))
# eager: left as it is: it
fork_rng | with torch.random.fork_rng(devices=[]): torch.manual_seed(0); noise = torch.rand_like(x)
    return x + noise + torch.rand_like(x)
# eager: seed()
a seed that is set | torch.manual_seed(0); return x + torch.randn(4)
"""

CACHES = """
# dynamo
another answer once it is there [it changes what its code finds] | scale = 2 if m.kept else 1
    if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
    return x + m.kept["bias"] * scale
# symbolic
an entry from before the weights changed | held = {"kept": {"bias": torch.full((4,), 5.0)}}
    def forward(m, x):
        if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
        return x + m.kept["bias"]
# eager: it changes what its code finds
a value of the first input | if "first" not in m.kept: m.kept["first"] = x.sum(0)
    return x + m.kept["first"]
a value that is written | if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
    return x + m.kept["bias"].add_(1)
"""

# Our own recording is kept from them; see `Asking`.
DYNAMO = """
# dynamo: recorded by Dynamo
a branch on data | x if x.sum() > 0 else -x
a buffer that counts | m.flag += 1; return x * m.flag + m.plain
results | {"x": Pair(x, x * 2), "l": [m.linear(x), None, 3], "o": collections.OrderedDict(a=x.t())}
results of a class without keys | Bare(linear=m.linear(x)), x * torch.div(x.size(0), 2)
a parameter that is assigned | m.scale = nn.Parameter(m.scale + 1); return x * m.scale
inference mode | @torch.inference_mode()
    def forward(m, x): return m.norm(m.linear(x)).relu()
what cannot be put back after a trial | model, held = Model, {"numbers": itertools.count(1)}
    def forward(m, x): y = m.norm(m.linear(x)); return y * next(m.numbers)
a dict that changes | model, calls = Model, [{"x": ROWS / 4}, {"x": ROWS * 5}, {"x": ROWS[:2]}]
    def forward(m, x): x["x"] = x["x"].clamp(-1, 1); return m.norm(m.linear(x["x"]))
# eager: left as it is
a function of rows [nothing can be rewritten] | torch.vmap(lambda row: row * 2)(x)
dropout | F.dropout(x, 0.5) + torch.rand(4)
a list that is given and grows | model, calls = Model, [[ROWS / 4], [ROWS], [ROWS[:2]]]
    def forward(m, x): x.append(m.norm(m.linear(x[0]))); return x[-1] * len(x)
"""


class Program(NamedTuple):
    front_end: str
    words: str
    text: str


def parsed(table: str) -> dict[str, Program]:
    found, front_end, words = dict[str, Program](), "", ""
    for each in re.split(r"\n+(?! )", table.strip()):
        if each.startswith("# "):
            front_end, _, words = each[2:].partition(": ")
            continue
        row = re.fullmatch(r"(.*?)(?: \[(.*?)\])? \|(.*)\n?((?s:.*))", each)
        name, own, first, lines = row.groups()
        dedented = re.sub("(?m)^    ", "", lines)
        found[name] = Program(front_end, own or words, f"{first.strip()}\n{dedented}".strip())
    return found


KINDS = {"symbolic": OptimizedModule, "dynamo": GuardedModule, "eager": Unchanged}
NUMBERS = itertools.count()
TABLES = [*map(parsed, (TENSORS, STATE, PROCESS, RANDOM, CACHES, DYNAMO))]
PROGRAMS = {name: each for table in TABLES for name, each in table.items()}
OF_TENSORS, OF_STATE, OF_PROCESS, OF_RANDOM, OF_CACHES, OF_DYNAMO = map(list, TABLES)


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of a program, in a module of its own, and what it is called with in turn."""
    text, by_dynamo = PROGRAMS[name].text, name in OF_DYNAMO
    if "forward" not in text:
        *lines, last = text.split("\n")
        last = last if "return " in last else f"return {last}"
        text = "def forward(m, x):\n" + textwrap.indent("\n".join([*lines, last]), " ")
    program: Any = ModuleType(f"program_{next(NUMBERS)}")
    sys.modules[program.__name__] = program  # where Dynamo looks for it
    torch.manual_seed(0)
    exec(PREAMBLE, vars(program))
    exec(compile(text, name, "exec"), vars(program))
    kind = getattr(program, "model", Asking if by_dynamo else Model)
    model = kind(program) if issubclass(kind, Model) else kind()
    fewer = ROWS[: 1 + OF_DYNAMO.index(name) // 2 % 2] if by_dynamo else ROWS + 1
    return model.eval(), getattr(program, "calls", (ROWS, fewer, ROWS - 5))


def seeded() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def states() -> str:
    return str((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def assert_follows(eager: nn.Module, fast: Any, calls: tuple[Any, ...], exact: bool = True) -> None:
    """Call by call the same outputs, structures, strides, inputs afterwards and random numbers."""
    found = []
    for module in (eager, fast):
        seeded()
        found.append([observed(module, copy.deepcopy(each)) for each in calls])
    assert_equal(*found, **{"check_stride": True} if exact else {"rtol": 1e-4, "atol": 1e-5})


def assert_equal(expected: Any, actual: Any, **options: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert new_spec == spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, equal_nan=True, **options)


@torch.no_grad()
def observed(module: nn.Module, given: Any) -> Any:
    detached = partial(pytree.tree_map_only, Tensor, Tensor.detach)
    result, left = copy.deepcopy(detached(module(given))), pytree.tree_leaves(detached(given))
    return result, left, torch.rand(1), random.random(), np.random.rand()


def optimized(name: str, *, example: bool = True, within: int = 0, **options: Any) -> Any:
    """A model in eager, what is made of one that is its like, and what they are called with."""
    (eager, calls), (model, _) = built(name), built(name)
    for _ in range(within):
        torch.manual_seed(0)
        around = nn.Linear(4, 4), nn.BatchNorm1d(4)
        eager, model = (nn.Sequential(*copy.deepcopy(around), each) for each in (eager, model))
    seeded()
    before, held = states(), copy.deepcopy(model.state_dict())
    options = {"level": 1, "check": None, "tune_seconds": 0, "engines": ()} | options
    given = (copy.deepcopy((*calls, ROWS)[0]),) if example else None

    fast = optimizer.optimize(model.eval(), given, **options)

    assert states() == before
    assert_equal(held, model.state_dict())
    return eager.eval(), fast, calls


@pytest.mark.parametrize("name", OF_TENSORS + OF_STATE + OF_RANDOM + OF_CACHES)
def test_what_records_a_program_and_why(name: str) -> None:
    front_end, words, _ = PROGRAMS[name]

    eager, fast, calls = optimized(name)

    remark = (*fast.report.remarks, "")[0]
    assert (fast.report.front_end or "eager") == front_end
    assert isinstance(fast, KINDS[front_end])
    assert words in remark if words else remark == ""
    assert_follows(eager, fast, calls)


def test_what_a_trial_imports_stays_as_torch_takes_nothing_twice() -> None:
    imports = Forward(lambda m, x: (sys.modules.setdefault("planted", nn), x * 2)[1])
    assert optimizer.optimize(imports.eval(), ROWS).report.remarks
    assert sys.modules.pop("planted")
    assert len(Outside(Forward(lambda m, x: x * bool(sys))).objects) < 100


@pytest.mark.parametrize("name", OF_PROCESS)
def test_what_capture_takes_or_refuses_untouched(name: str) -> None:
    front_end, words, _ = PROGRAMS[name]
    (eager, calls), (model, _) = built(name), built(name)

    if front_end == "symbolic":
        model = capture(model, ROWS)
    else:
        with pytest.raises(optimizer.CaptureError, match=re.escape(words)):
            capture(model, ROWS)

    assert_follows(eager, model, calls, exact=False)


@pytest.mark.parametrize("name", OF_DYNAMO)
def test_what_dynamo_records(name: str) -> None:
    front_end, words, _ = PROGRAMS[name]

    eager, fast, calls = optimized(name, level=1 + OF_DYNAMO.index(name) % 2, check="final")

    assert isinstance(fast, KINDS[front_end]), fast.report
    assert words in fast.report.remarks[0]
    assert front_end == "eager" or fast.report.counts()["fold_affine"] >= 1
    assert_follows(eager, fast, calls, exact=False)


# Each is recorded by Dynamo once more: a third of those that are alone above.
@pytest.mark.parametrize("name", OF_STATE[::3] + OF_CACHES + OF_RANDOM)
def test_between_layers_and_with_a_check_the_answer_is_the_same(name: str) -> None:
    eager, fast, calls = optimized(name, within=2, level=0, check="final")
    assert_follows(eager, fast, calls)
    before = states()
    if calls:  # without them, it never draws the same
        optimizer.check(fast, fast, ROWS)
    assert states() == before


@pytest.mark.parametrize("name", sorted({*OF_TENSORS, *OF_CACHES} - {"None in a tuple"}))
def test_without_example_inputs_the_answer_is_the_same(name: str) -> None:
    eager, fast, calls = optimized(name, example=False)
    assert_follows(eager, fast, calls)


def test_a_size_is_returned_as_one_and_another_tuple_is_seen(right_is_enough: None) -> None:
    sized, other = (Forward(f"m.layer(x[0]).exp(), {each}", layer=nn.Linear(4, 4)).eval()
                    for each in ("x[1]", "tuple(x[1])"))  # fmt: skip
    other.load_state_dict(sized.state_dict())
    fast = optimizer.optimize(sized, ((ROWS, ROWS.shape),), level=2, engines=())

    assert fast.report.choices
    assert type(fast((ROWS, ROWS.shape))[1]) is torch.Size
    with pytest.raises(optimizer.EquivalenceError):
        optimizer.check(sized, other, ((ROWS, ROWS.shape),))


class Cache(list[int]):
    """Cannot be copied by `copy.deepcopy`: it holds a tensor that was computed with gradients."""

    add = list.append

    def __init__(self) -> None:
        self.computed = torch.ones(4, requires_grad=True) * 2


@pytest.mark.parametrize("given", [set(), Cache()], ids=["a set", "a cache"])
def test_what_the_forward_changes_in_an_example_is_left_alone(given: Any) -> None:
    model = Forward("(x[1].add(1), x[0] * len(x[1]))[1]").eval()

    fast = optimizer.optimize(model, ((ROWS, given),), level=1)
    assert not given
    assert torch.equal(fast((ROWS, given)), ROWS)
    assert len(given) == 1


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_a_hook_of_a_layer_writes_is_put_back(level: int) -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[1].register_forward_hook(lambda *call: seen.append(call))

    optimizer.optimize(model, ROWS, level=level)
    with restored(Outside(model)):  # as transformers does in the first call
        model[0].register_forward_hook(print)
    assert [*seen, *model[0]._forward_hooks] == []
