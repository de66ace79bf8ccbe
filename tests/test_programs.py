"""Programs that are hard to record: what each front end makes of them, call by call as in eager.

A program is the text of a module. Each model of it runs a text of its own: what one keeps outside
itself is not what another does. A text without a `def forward` is what one returns.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
import textwrap
from collections import namedtuple
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import OptimizedModule, Unchanged

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The use of `x.T`"
)

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
PREAMBLE = """
import collections, contextlib, contextvars, datetime, functools, itertools, math, operator, os
import random, threading, time, types, warnings
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.backends.cuda import flash_sdp_enabled
from tests.test_programs import ROWS, Model, Pair, Slots
def step(): listed[0] += 1; return listed[0]
class Settings: calls, scale = 0, 2.0
count, listed, history, settings, box = 0, [0], [], Settings(), types.SimpleNamespace()
table = {"n": 0, "step": step, "tanh": torch.tanh, "scales": [1.0, 2.0], "none": None}
pair, proxy = Pair([], step), types.MappingProxyType({"step": step})
outside = nn.Linear(4, 4); outside.calls = 0
"""
Pair = namedtuple("Pair", "first second")


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

    @property
    def factor(self) -> Any:
        return self.plain + 3


class Asking(Model):
    """Stars keep our own recording from it: what Dynamo makes of the program."""

    def forward(self, x: Any, *more: Any) -> Any:
        return self.function(self, self.norm(self.linear(x)), *more)


class Slots:
    """Counts where no `__dict__` is."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> int:
        self.calls += 1
        return self.calls


# == name : what records it : words of the first remark, if there is one : its text
TENSORS = """
== autocast : eager : enters autocast
with torch.autocast("cpu", torch.bfloat16): y = m.linear(x)
return y
== a shape that changes in place : eager : changes the shape of a tensor
y = (x * 2)[:1]; z = y.exp(); y.squeeze_(0); return y, z
== autograd : eager : it uses 'requires_grad_'
with torch.enable_grad():
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**2).sum(), x)[0]
== a write under no_grad : eager : a gradient mode
with torch.no_grad(): m.scale.add_(1)
return x * m.scale
== any error : eager : it has a try statement
try: return x.view(2, 6)
except: return x
== a second error : eager : it has a try statement
try: return x.view(2, 6)
except AttributeError: return x
except RuntimeError: return -x
== a sum of numbers, by torch : symbolic
return x * torch.div(x.shape[0], 2).sqrt() * torch.add(2, 1).sqrt()
== a suppressed error : eager : reaches contextlib.suppress
factor = 1
with contextlib.suppress(Exception): factor = int(x.sum()) + 7
return x * factor
== a defaultdict : eager : makes a defaultdict
result = collections.defaultdict(list); result["x"] = x * 2; return result
== a look into a dict : eager : looks a traced : x * {2: 2.0}.get(x.dim(), 1.0)
== a new attribute of a tensor : eager : sets the attribute 'note' : x.note = 2.0; return x * x.note
== an attribute that tensors lack : eager : asks what a value has
mask = getattr(x, "mask", None); return x * 3 if mask is None else x * mask
== an attribute that may be : eager : asks what a value has : x * 2 if hasattr(x, "_scale") else x
== a private attribute : eager : asks what a value has : x * (1 + getattr(x, "_version"))
== a gradient : eager : for its attribute 'grad' : x * 2 if x.grad is None else x
== text of a dtype : eager : it writes a traced value as text
x * 2 if str(x.dtype) == "torch.float64" else x
== text of a size : eager : it writes a traced value as text
x * 2 if f"{x.shape[0]}" == "2" else x
== a type : eager : it asks for the type of a value : x * 2 if type(x) == nn.Parameter else x
== a subclass of tensors : eager : it asks for the type of an intermediate value
x * 2 if isinstance(x, nn.Parameter) else x
== a class of a dtype : eager : it asks for the type of an intermediate value
x * 2 if isinstance(x, torch.HalfTensor) else x
== a type that is matched : eager : its code has MATCH_CLASS
match x:
    case torch.Tensor(): return x * 2
return x
== a new tensor that is written : eager : a tensor that it makes itself
total = torch.Tensor([0.0, 0.0, 0.0, 0.0]); total.add_(x[0]); return total
== a value that is read : eager : reads the value of a tensor : x * torch.tensor([2.0]).item()
== None in a tuple : eager : may choose a branch
calls = (ROWS, None), (ROWS, ROWS)
def forward(m, pair): return pair[0] * 2 if pair[1] is None else pair[0] * pair[1]
== a tensor by default : eager : the default of 'w'
class model(nn.Module):
    def forward(self, x, w=torch.full((4,), 3.0)): return x * w
== a __call__ of the model : eager : hooks, parametrizations or
class model(Model):
    def __call__(self, x): return super().__call__(x) + 1
def forward(m, x): return x * 2
== a __call__ of a child : eager : it uses '__call__'
class Child(nn.Module):
    def __call__(self, x): return super().__call__(x) + 1
    def forward(self, x): return x * 2 if x.sum() > 0 else x
held = {"child": Child()}
def forward(m, x): return m.child(x)
== a child that counts : dynamo : it changes what its code finds
class Counter(nn.Module):
    def forward(self, x): listed[0] += 1; return x * listed[0]
held = {"child": Counter()}
def forward(m, x): return m.child(m.linear(x))
== a child with a hook : symbolic : is called as it is
held = {"child": nn.ReLU()}
held["child"].register_forward_hook(lambda m, given, y: y * 2)
def forward(m, x): return m.child(m.linear(x))
== a child with a hook that changes what its parent read : dynamo : a hook or parametrization
held = {"child": nn.ReLU()}
held["child"].register_forward_hook(lambda m, given, y: history.append(1))
def forward(m, x): n = len(history); return m.child(m.linear(x)) * (n + 1)
== a forward of its own that changes what its parent read : dynamo : a hook or parametrization
held = {"child": nn.ReLU()}
held["child"].forward = lambda x: history.append(1) or x * 2
def forward(m, x): n = len(history); return m.child(m.linear(x)) * (n + 1)
== a child with a hook that counts : eager : it sets the attribute
class Shift(nn.Module):
    def forward(self, x): return x + 1
def hook(m, given, y): history.append(y); box.n += 1; return y * step() * box.n + len(history)
box.n, held = 0, {"child": Shift()}
held["child"].register_forward_hook(hook)
def forward(m, x): return m.child(m.linear(x))
== a new tensor of zeros that is written : symbolic
total = torch.zeros(4); total.add_(x[0]); return total
== random numbers : symbolic : : x + torch.rand(4) + torch.randn(x.shape[0], 1)
== a random operator : symbolic : : x + torch.ops.aten.rand([4])
== operators that write : symbolic : : y = x.T; y += 1.0; y *= 2.0; y -= x.T; return y
== shifts that write : symbolic
calls = torch.arange(4), torch.arange(4) + 3
def forward(m, x): x <<= 2; x >>= 1; return x
== isinstance : symbolic : : x * (2 if isinstance(x, torch.Tensor) and torch.is_tensor(x) else 3)
== isinstance under a decorator : symbolic
def inner(m, x): return x * 2 if isinstance(x, torch.Tensor) and torch.is_tensor(x) else x * 3
@functools.wraps(inner)
def forward(m, x): return inner(m, x)
== a vector for a weight : symbolic : : F.linear(x, m.scale)
== axes that are computed : symbolic : : x.permute(x.dim() - 1, 0).permute(1, 0)
== axes in a list that is given : symbolic
calls = [(torch.ones(2, 3, 4).cumsum(1), [2, 0, 1])]
def forward(m, x): return x[0].permute(x[1])
== statistics of the batch : symbolic
F.batch_norm(m.linear(x), m.flag, m.scale.detach(), training=True)
== statistics of nothing else : symbolic : : F.batch_norm(m.linear(x), None, None, training=True)
== statistics that are computed : symbolic : : F.batch_norm(m.linear(x), m.flag * 3, m.flag + 2)
== a weight that is computed : symbolic : : F.linear(x, m.linear.weight * 2)
== a bias that is computed : symbolic : : F.linear(x, m.linear.weight, m.scale * 2)
== a buffer that is written : symbolic : : x * m.flag.add_(1)
== a parameter that is written in place : symbolic
held = {"weight": nn.Parameter(torch.full((4,), 2.0), requires_grad=False)}
def forward(m, x): return x * m.weight.mul_(2)
== a buffer that is written through a view : symbolic : : m.flag[:2].mul_(2).sum() * x
== T of three axes : symbolic
calls = [torch.ones(2, 3, 4).cumsum(1)]
def forward(m, x): return x.T.exp()
"""

# Its models are tried behind layers, and are checked, too.
STATE = """
== a class that is asked for an attribute : eager : it sets the attribute 'seen'
if hasattr(type(settings), "seen"): return x * 2
type(settings).seen = 1; return x
== an object that had no attributes : eager : it sets the attribute 'count'
box.count = vars(box).get("count", 0) + 1; return x * box.count
== a table of very many words : eager : by Dynamo: to guard many values takes it long
words = {str(each): each for each in range(40_000)}
def forward(m, x): return x * float(len(words) > 0)
== a global : eager : it sets the global 'count' (a global:
global count; count += 1; return x * count
== a list : eager : it changes what its code finds : listed[0] += 1; return x * listed[0]
== a list in a helper : eager : it changes what its code finds : step(); return x * listed[0]
== a list by a table : eager : it changes what its code finds
table["step"](); return x * listed[0]
== a list of a partial function : eager : it changes what its code finds
def count(m, x, listed): listed[0] += 1; return x * listed[0]
forward = functools.partial(count, listed=[0])
== a dict : eager : it changes what its code finds : table["n"] += 1; return x * table["n"]
== a bytearray : eager : it reaches octets, a bytearray
octets = bytearray(1)
def forward(m, x): octets[0] += 1; return x * octets[0]
== a class : eager : it sets the attribute 'calls' : Settings.calls += 1; return x * Settings.calls
== an inherited classmethod : eager : it reaches Inherits, a type
class Counter:
    calls = 0
    @classmethod
    def step(cls): cls.calls += 1; return cls.calls
class Inherits(Counter): ...
def forward(m, x): return x * Inherits.step()
== the model's type : eager : it sets the attribute 'of_all'
class model(Model): of_all = 0
def forward(m, x): type(m).of_all = m.of_all + 1; return x * m.of_all
== a function's attribute : eager : it sets the attribute 'calls'
step.calls = getattr(step, "calls", 0) + 1; return x * step.calls
== a default : eager : it changes what its code finds
def forward(m, x, calls=[0]): calls[0] += 1; return x * calls[0]
== another module's attribute : eager : it sets the attribute 'calls'
outside.calls += 1; return x * outside.calls
== a closure : eager : it sets 'calls' of an enclosing function
def made(calls=0):
    def forward(m, x): nonlocal calls; calls += 1; return x * calls
    return forward
forward = made()
== an attribute : eager : it sets the attribute 'kept' : m.kept = x; return x
== an import : eager : it imports random : import random as drawing; return x * drawing.random()
== Python's random numbers : eager : random.random : x * random.random()
== numpy's random numbers : eager : it asks the process for np.random : x * float(np.random.rand())
== a list on a layer : dynamo : it changes what its code finds
held = {"own": nn.Linear(4, 4)}; held["own"].log = []
def forward(m, x): m.own.log.append(1); return m.own(x) * len(m.own.log)
== a list in a tuple : eager : it reaches several, a builtin_function_or_method
several = Pair([], len)
def forward(m, x): several.first.append(1); return x * len(several.first)
== a bound append : eager : it reaches push, a builtin_function_or_method
held = {"push": history.append}
def forward(m, x): m.push(1); return x * len(history)
== a list that getattr finds : eager : it changes what its code finds
getattr(m, "se" + "en").append(1); return x * len(m.seen)
== a cached function : eager : it reaches cached, a _lru_cache_wrapper
@functools.lru_cache
def cached(number): return torch.ones(number)
def forward(m, x): return x * cached(4)
== a graph that keeps state : dynamo : it changes what its code finds
def counted(x): return x * step()
graph = torch.fx.Graph()
graph.output(graph.call_function(counted, (graph.placeholder("x"),)))
held = {"child": torch.fx.GraphModule(nn.Module(), graph)}
def forward(m, x): return m.child(m.linear(x))
== the system's numbers : eager : it reaches system, a SystemRandom
system = random.SystemRandom()
def forward(m, x): return x * (1 + 0 * system.random())
== what refuses to tell its state : eager : it reaches unwilling, a Unwilling
class Unwilling:
    scale = 2.0
    @property
    def __dict__(self): raise RuntimeError("no")
unwilling = Unwilling()
def forward(m, x): return x * unwilling.scale * step()
== what refuses to take its state : eager : it reaches frozen, a Frozen
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Frozen: scale: float = 2.0
frozen = Frozen()
def forward(m, x): return x * frozen.scale * step()
== a table of functions and lists : symbolic
m.linear(x) * table["tanh"](x) * table["scales"][1] * len(listed)
== numpy : symbolic : : m.linear(x) * float(np.sqrt(4.0) * np.array([1.0, 2.0]).sum())
== scripting : symbolic : : m.linear(x) * (2 if not torch.jit.is_scripting() else 3)
== arithmetic : symbolic
m.linear(x) * functools.reduce(lambda a, b: a * b, itertools.chain([1, 2], [3]))
"""
HELD = {
    "a list that holds itself": ("[[0]]; kept.append(kept)", "kept[0].append(1) or len(kept[0])"),
    "a nested dict": ("{'a': [0]}", "kept['a'].append(1) or len(kept['a'])"),
    "a numpy generator": ("np.random.default_rng(0)", "float(kept.random())"),
    "a numpy RandomState": ("np.random.RandomState(0)", "float(kept.rand())"),
    "a Python generator": ("random.Random(0)", "kept.random()"),
    "an array": ("np.zeros(1)", "float(np.add(kept, 1, out=kept)[0])"),
    "a deque": ("collections.deque([1, 2, 3])", "kept.rotate() or kept[0]"),
    "slots": ("Slots()", "kept.step()"),
    "a namespace": ("types.SimpleNamespace(of=[0])", "kept.of.append(1) or len(kept.of)"),
    "itertools": ("itertools.count(1)", "next(kept)"),
    "a cycle": ("itertools.cycle([1, 2, 3])", "next(kept)"),
    "an iterator": ("iter([1, 2, 3, 4, 5, 6, 7, 8])", "next(kept)"),
}
for _name, (_make, _step) in HELD.items():
    _why = "it changes what its code finds" if _make[0] in "[{" else "it reaches kept, a "
    STATE += f"""
== {_name} that is held : eager : {_why}
kept = {_make}
held = {{"kept": kept}}
def step(kept): return {_step}
def forward(m, x): return x * step(m.kept)
"""
    if not _make.startswith(("iter", "itertools")):  # nothing puts back what these gave
        STATE += f"""
== {_name} in a closure : eager : {_why}
kept = {_make}
forward = (lambda kept: lambda m, x: x * ({_step}))(kept)
"""

PROCESS = """
== time : eager : it reaches time.time, a builtin_function_or_method : x * (time.time() * 0 + 1)
== a clock of another name : eager : it reaches time, a module
x * (1 + 0 * getattr(time, "ti" + "me")())
== environment : eager : it reaches os.environ, a _Environ : x * float(os.environ.get("SCALE", "1"))
== a thread : eager : it reaches local, a _local
local = threading.local()
def forward(m, x): return x * getattr(local, "scale", 1)
== a context : eager : ContextVar
variable = contextvars.ContextVar("scale", default=1.0)
def forward(m, x): return x * variable.get()
== a generator : eager : it reaches generated, a generator
calls, generated = (), (float(n) for n in itertools.count(1))  # nothing puts back what it gave
def forward(m, x): return x * next(generated)
== a default dtype : eager : it reaches torch.get_default_dtype, a builtin_function_or_method
x * (1 + (torch.get_default_dtype() == torch.float64))
== a gradient mode : eager : is_grad_enabled : x * (1 + torch.is_grad_enabled())
== a backend : eager : process for torch.backends : x * (1 + torch.backends.cudnn.benchmark)
== a backend's function : eager : flash_sdp_enabled : x * flash_sdp_enabled()
== a decorator of torch : eager : forward() is decorated by
@torch.no_grad()
def forward(m, x): return x * 2
== gradients that are turned on : eager : enable_grad
with torch.enable_grad(): return m.linear(x)
== a hidden method : eager : it finds 'helper' by getattr() : getattr(m, "hel" + "per")(x)
== setattr : eager : it uses setattr() : setattr(m, "n", 1) or x
== globals : eager : it uses globals() : x * len(globals()["ROWS"])
== a __dict__ : eager : it uses '__dict__' : x * len(m.__dict__)
== a layer that is changed : eager : it uses 'train' : m.train().linear(x)
== an object : eager : it reaches settings, a Settings : x * settings.scale
== a class by the name of a builtin : eager : it reaches range, a type
class range:
    def __init__(self): self.n = step()
def forward(m, x): return x * range().n
== a layer that counts : eager : it sets the attribute 'n'
class Layer(nn.Module):
    def __init__(self): super().__init__(); self.n = step()
def forward(m, x): return x * Layer().n
== a pair that counts : eager : it uses '__new__'
class Counted(Pair):
    def __new__(cls): return Pair.__new__(cls, step(), 0)
def forward(m, x): return x * Counted().first
== a method of a module outside : eager : a module outside the model
class Other(nn.Module):
    def helper(self, x): return x * 2
plain = Other().helper
def forward(m, x): return plain(x)
== many values : eager : 9999 values
held = {"words": dict.fromkeys(range(9999), 0)}
def forward(m, x): return x * len(m.words)
== attrgetter : eager : operator.attrgetter : operator.attrgetter("linear")(m)(x)
== numpy's options : eager : seterr : (np.seterr(all="warn"), x)[1]
== filters of warnings : eager : simplefilter : (warnings.simplefilter("default"), x)[1]
== a lazy attribute : eager : it reaches prior, a Bernoulli
prior = torch.distributions.Bernoulli(torch.ones(4))
def forward(m, x): return x * prior.probs
== a metaclass : eager : model has a metaclass
class Meta(type): ...
class model(Model, metaclass=Meta): ...
def forward(m, x): return x * 2
== a method that is not named : eager : it sets the attribute 'last'
class model(Model):
    def __getitem__(self, index): self.last = index; return index
def forward(m, x): return x * m[2]
== a function that is wrapped : eager : it changes what its code finds
def counting(function): return functools.wraps(function)(lambda *args: function(*args) * step())
relu = counting(F.relu)
def forward(m, x): return relu(x)
== a function in a tuple : eager : it changes what its code finds : x * pair.second()
== a function in a proxy : eager : it changes what its code finds : x * proxy["step"]()
== a key that is a method : eager : it changes what its code finds
keys = {"items": 3, "f": step}
def forward(m, x): return x * list(keys.items())[1][1]()
== a choice of classes : eager : it changes what its code finds
class Helper(nn.Module):
    @classmethod
    def run(cls, x): return x * step()
class Another(Helper): ...
def forward(m, x): return (Helper if m.training else Another).run(x)
== layers and functions : symbolic : : F.relu(m.linear(x)) + torch.tanh(x).mean()
== a helper : symbolic : : m.helper(x) * m.factor
== an enumeration : symbolic
from enum import Enum
class Mode(Enum): ONE, TWO = 1, 2
held = {"mode": Mode.TWO}
def forward(m, x): return x if m.mode == Mode.ONE else -x
== pure functions : symbolic : : x * math.sqrt(4) * functools.reduce(operator.mul, [1, 2])
== a name that is computed : symbolic : : getattr(m, f"{'lin'}ear")(x)
== a list of its own : symbolic : : torch.cat([x, *[x.exp()]], 1)
== a message of a traced value : symbolic
torch._assert(x.dim() == 2, f"expected a matrix, and got {x.shape}"); return m.linear(x)
"""

RANDOM = """
== fork_rng : eager : left as it is: it
with torch.random.fork_rng(devices=[]): torch.manual_seed(0); noise = torch.rand_like(x)
return x + noise + torch.rand_like(x)
== the default generator : eager : left as it is: it
state = torch.default_generator.get_state(); torch.default_generator.manual_seed(5)
noise = F.dropout(x, 0.5, True); torch.default_generator.set_state(state); return noise
== manual_seed : eager : manual_seed() : torch.manual_seed(0); return x + torch.randn(4)
== seed : eager : it asks the process for seed()
calls = ()
def forward(m, x): return (torch.seed(), x + torch.randn(4))[1]
== initial_seed : eager : it asks the process for initial_seed()
torch.initial_seed(); return x + torch.randn(4)
== a torch generator : eager : it draws by a generator of its own
x + torch.rand(4, generator=torch.Generator().manual_seed(0))
== a torch generator that is held : eager : it reaches generator, a Generator
held = {"generator": torch.Generator().manual_seed(3)}
def forward(m, x): return x + torch.empty_like(x).uniform_(generator=m.generator.manual_seed(4))
== Python's and numpy's seeds : eager : left as it is: it
random.seed(0); np.random.seed(0); return x * random.random() + np.random.rand()
== a layer that is made : eager : it uses autograd : nn.Linear(4, 4)(x) * 0
"""

CACHES = """
== by device : dynamo : it writes a traced value as text
key = str(x.device)
if key not in m.kept: m.kept[key] = m.scale[[3, 1, 2, 0]]
return m.norm(m.linear(x)) + m.kept[key]
== by name : dynamo : it changes what its code finds
if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
return m.norm(m.linear(x)) + m.kept["bias"]
== another answer once it is there : dynamo : it changes what its code finds
scale = 2 if m.kept else 1
if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
return x + m.kept["bias"] * scale
== an entry from before the weights changed : symbolic
held = {"kept": {"bias": torch.full((4,), 5.0)}}
def forward(m, x):
    if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
    return x + m.kept["bias"]
== a value of the first input : eager : it changes what its code finds
if "first" not in m.kept: m.kept["first"] = x.sum(0)
return x + m.kept["first"]
== a random value : eager : it changes what its code finds
if "noise" not in m.kept: m.kept["noise"] = torch.rand(4) + m.flag
return x + m.kept["noise"]
== a value that is written : eager : it changes what its code finds
if not m.kept: m.kept["bias"] = m.scale[[3, 1, 2, 0]]
return x + m.kept["bias"].add_(1)
"""

# Our own recording is kept from them; see `Asking`.
DYNAMO = """
== plain : dynamo : : x.relu()
== a branch on data : dynamo : : x if x.sum() > 0 else -x
== a question for three rows : dynamo : : x * 2 if x.shape[0] > 2 else x
== a loop over rows : dynamo : : sum(m.linear(row) for row in x)
== a buffer that counts : dynamo : : m.flag += 1; return x * m.flag + m.plain
== a buffer that is replaced : dynamo : : m.flag = m.flag + 1; return x * m.flag
== a mask : dynamo : : y = x.clone(); y[x > 0] = 0.5; return y
== results of all kinds : dynamo
{"x": x, "list": [m.linear(x), None, 3], "ordered": collections.OrderedDict(a=x.t())}
== a count that is kept : dynamo : : m.calls += 1; return x * m.calls
== a tensor that is kept : dynamo : : m.plain = x; return x + m.plain
== a list that is kept : dynamo : : m.seen.append(len(m.seen)); return x * len(m.seen)
== a cache by size : dynamo
if x.shape[0] not in m.kept: m.kept[x.shape[0]] = torch.arange(x.shape[0]).float()[:, None]
return x + m.kept[x.shape[0]]
== a parameter that is assigned : dynamo : : m.scale = nn.Parameter(m.scale + 1); return x * m.scale
== dice : eager : it draws random numbers : x * random.random()
== dropout : eager : left as it is : F.dropout(x, 0.5) + torch.rand(4)
== a parameter that is written : dynamo
with torch.no_grad(): m.scale.add_(1)
return x * m.scale
== recorded gradients : eager : left as it is
with torch.enable_grad(): return x * 2
== inference mode : dynamo
@torch.inference_mode()
def forward(m, x): return m.norm(m.linear(x)).relu()
== no gradients : dynamo
with torch.no_grad(): return x * 2
== no autocast : dynamo
with torch.autocast("cpu", enabled=False): return m.linear(x.float())
== autocast that is entered : eager : left as it is
with torch.autocast("cpu", torch.bfloat16): return m.linear(x).float()
== a device that is named : dynamo
(x.to(torch.device("cpu")) + torch.ones(4, device=x.device)).to("cpu")
== a pair : dynamo : : Pair(x, x * 2)
== a defaultdict that is returned : dynamo : : collections.defaultdict(list, twice=x * 2)
== a check of the data : dynamo
number = (x > -100).sum().item(); torch._check(number > 0); return x * number
== a count elsewhere : dynamo : : x * len(listed)
== an autograd function : dynamo
class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clamp(min=0.1)
    @staticmethod
    def backward(ctx, grad): return grad
def forward(m, x): return Recorded.apply(x)
== a layer that is made, without weights : dynamo : : nn.Softmax(dim=-1)(x)
== a generator of Python's in a list : eager : left as it is
generators = [random.Random(1)]
def forward(m, x): return x * generators[0].random()
== a generator of numpy's : dynamo
forward = (lambda g: lambda m, x: x * float(g.random()))(np.random.default_rng(1))
== a plain tensor that is written : dynamo : : x + m.plain.add_(2)
"""


class Program(NamedTuple):
    subject: str
    front_end: str
    words: str
    text: str


def parsed(subject: str, table: str) -> Iterator[tuple[str, Program]]:
    for each in filter(None, re.split(r"\n+== ", table.rstrip())):
        header, _, lines = each.partition("\n")
        fields = map(str.strip, re.split(" :(?= |$)", header, maxsplit=3))
        name, front_end, words, text, *_ = [*fields, "", ""]
        yield name, Program(subject, front_end, words, text or lines)


KINDS = {"symbolic": OptimizedModule, "dynamo": GuardedModule, "eager": Unchanged}
NUMBERS = itertools.count()
SUBJECTS = {
    "tensors": TENSORS, "state": STATE, "process": PROCESS, "random": RANDOM, "caches": CACHES,
    "dynamo": DYNAMO,
}  # fmt: skip
PROGRAMS = {name: each for s, table in SUBJECTS.items() for name, each in parsed(s, table)}


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of a program, in a module of its own, and what it is called with in turn."""
    text, by_dynamo = PROGRAMS[name].text, name in OF["dynamo"]
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
    fewer = ROWS[: 1 + OF["dynamo"].index(name) // 2 % 2] if by_dynamo else ROWS + 1
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
    result = pytree.tree_map(lambda each: copy.deepcopy(detached(each)), module(given))
    left = [*map(detached, pytree.tree_leaves(given))]
    return result, left, torch.rand(1), random.random(), np.random.rand()


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


OF = {subject: [*dict(parsed(subject, table))] for subject, table in SUBJECTS.items()}


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


@pytest.mark.parametrize("name", OF["tensors"] + OF["state"] + OF["random"] + OF["caches"])
def test_what_records_a_program_and_why(name: str) -> None:
    _, front_end, words, _ = PROGRAMS[name]

    eager, fast, calls = optimized(name)

    remark = (*fast.report.remarks, "")[0]
    assert (fast.report.front_end or "eager") == front_end
    assert isinstance(fast, KINDS[front_end])
    assert words in remark if words else remark == ""
    assert_follows(eager, fast, calls)


@pytest.mark.parametrize("name", OF["process"])
def test_what_capture_takes_or_refuses_untouched(name: str) -> None:
    _, front_end, words, _ = PROGRAMS[name]
    (eager, calls), (model, _) = built(name), built(name)

    if front_end == "symbolic":
        model = optimizer.capture(model, ROWS)
    else:
        with pytest.raises(optimizer.CaptureError, match=re.escape(words)):
            optimizer.capture(model, ROWS)

    assert_follows(eager, model, calls, exact=False)


@pytest.mark.parametrize("name", OF["dynamo"])
def test_what_dynamo_records(name: str) -> None:
    _, front_end, words, _ = PROGRAMS[name]

    eager, fast, calls = optimized(name, level=1 + OF["dynamo"].index(name) % 2, check="final")

    assert isinstance(fast, KINDS[front_end]), fast.report
    assert (words or "recorded by Dynamo: ") in fast.report.remarks[0]
    if front_end == "dynamo":
        assert "captured by dynamo" in str(fast.report)
        assert fast.report.counts()["fold_affine"] >= 1
    assert_follows(eager, fast, calls, exact=False)


# Each is recorded by Dynamo once more: a third of those that are alone above.
@pytest.mark.parametrize("name", OF["state"][::3] + OF["caches"])
def test_behind_layers_that_fold_and_with_a_check(name: str) -> None:
    eager, fast, calls = optimized(name, within=1, check="final")

    assert PROGRAMS[name].front_end == "eager" or "fold_affine" in fast.report.counts()
    assert_follows(eager, fast, calls, exact=False)


@pytest.mark.parametrize("name", OF["random"])
def test_between_layers_and_at_level_0_random_numbers_are_those_of_eager(name: str) -> None:
    eager, fast, calls = optimized(name, within=2, level=0, check="final")

    assert fast.report.remarks[0].startswith("left as it is: it ")
    assert_follows(eager, fast, calls)
    before = states()
    if calls:  # without them, it never draws the same
        optimizer.check(eager, eager, ROWS)
    assert states() == before


@pytest.mark.parametrize("name", sorted({*OF["tensors"], *OF["caches"]} - {"None in a tuple"}))
def test_without_example_inputs_the_answer_is_the_same(name: str) -> None:
    eager, fast, calls = optimized(name, example=False)

    assert_follows(eager, fast, calls)
