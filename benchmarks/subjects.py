"""Who rewrites or compiles a model: one list for the suite, the peers, and the hunt for defects.

Torch and the tools are imported when they are asked for: asv lists the names where there are none.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

GROUP = "optimizer.subjects"
EAGER = "eager"
OURS = "optimized-"
VARIANT, PEER, HUNTED = "variant", "peer", "hunted"
DEVICES = ("cpu", "cuda", "mps")


Run: TypeAlias = Any  # what is called with the inputs of a task, and is often a module


class Task(NamedTuple):
    """A module in eval mode and its positional inputs, for so many threads.

    Attributes:
        folder: for files; gone with the process.
        check: whether one that checks its own answer is to do so.
        timed: whether one that times its candidates is to do so, and else chooses the same always.
    """

    module: Any
    inputs: tuple[Any, ...]
    threads: int
    folder: Path
    check: bool = True
    timed: bool = True


class Hunt(NamedTuple):
    """Which generated models show what a subject gets wrong.

    Attributes:
        words: the programs that they are made of.
        dtype: of parameters and inputs.
        examples: how many models, unless told otherwise.
        size: the most programs in one; a compiler takes long to reduce them.
    """

    words: tuple[str, ...]
    dtype: str = "float64"
    examples: int = 120
    size: int = 12


_LAYERS = ("relu", "linear", "conv", "bn", "add", "dup", "swap", "again", "block", "out")

_ANY = Hunt(_LAYERS)


@dataclass(frozen=True)
class Subject:
    """One way to run a model.

    Attributes:
        name: what tables and results call it.
        prepare: makes of a task what is called with its inputs.
        roles: where it stands: a VARIANT of the suite, a PEER in the tables, HUNTED by the fuzz.
        devices: the types of those that it is for.
        needs: the packages that it cannot do without, besides torch.
        promise: "same bits"; "rounding", the same function up to that; or the largest error of
            an output relative to its norm.
        values_only: whether it knows neither strides nor aliases of what it returns.
        hunt: what to look for its defects with.
    """

    name: str
    prepare: Callable[[Task], Run]
    roles: tuple[str, ...] = (PEER,)
    devices: tuple[str, ...] = DEVICES
    needs: tuple[str, ...] = ()
    promise: str | float = "rounding"
    values_only: bool = False
    hunt: Hunt = _ANY

    @property
    def is_installed(self) -> bool:
        """Whether what it needs is here."""
        return all(map(find_spec, self.needs))


def all_subjects() -> dict[str, Subject]:
    """Every subject by name: those below, then those that installed packages declare.

    Such a package names, under the entry point group `optimizer.subjects`, a function from a
    module and a tuple of inputs to a module. It is imported when it is asked for.

    Raises:
        ValueError: two have one name.
    """
    found = {each.name: each for each in _SUBJECTS}
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name in found:
            raise ValueError(f"there are two subjects named {entry.name!r}: rename {entry.value}.")
        roles = (VARIANT, PEER, HUNTED)
        found[entry.name] = Subject(entry.name, functools.partial(_elsewhere, entry), roles)
    return found


def named(name: str) -> Subject:
    """The subject of this name, with what the function of an installed package says of itself.

    It says so by attributes of the names that a `Subject` has, such as `promise`.

    Raises:
        ValueError: there is none, or it cannot be loaded; the message says what to do.
    """
    known = all_subjects()
    if name not in known:
        raise ValueError(f"there is no subject {name!r}, but there are {', '.join(known)}.")
    subject = known[name]
    if subject in _SUBJECTS:
        return subject
    (entry,) = importlib.metadata.entry_points(group=GROUP, name=name)
    function = _loaded(entry)
    return replace(subject, **{n: getattr(function, n) for n in _SAID if hasattr(function, n)})


_SAID = ("devices", "needs", "promise", "values_only", "hunt")


def names(role: str, device: str = "cpu") -> list[str]:
    """Those that have a role on a device."""
    having = [s.name for s in all_subjects().values() if role in s.roles and device in s.devices]
    return ordered(having) if role == PEER else having


def ordered(chosen: Iterable[str]) -> list[str]:
    """Names as tables have them: others' first, and last what is not known here any more."""
    known = sorted(all_subjects(), key=lambda name: name.startswith(OURS))
    places = {name: place for place, name in enumerate(known)}
    return sorted(chosen, key=lambda name: (places.get(name, len(places)), name))


def _elsewhere(entry: importlib.metadata.EntryPoint, task: Task) -> Run:
    return _loaded(entry)(task.module, task.inputs)


def _loaded(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever importing it raises
        package = entry.dist.name if entry.dist else entry.value
        raise ValueError(
            f"subject {entry.name!r} of {package} cannot be loaded ({type(error).__name__}:"
            f" {error}): repair or uninstall {package}."
        ) from error


def eager(task: Task) -> Run:
    return task.module


def optimized(task: Task, level: int, engines: tuple[str, ...] = ()) -> Run:
    """Ours, at each level without engines unless one is named.

    Raises:
        NotImplementedError: the optimizer here is too old for it, or the engine is not here.
    """
    import optimizer

    known = inspect.signature(optimizer.optimize).parameters
    options: dict[str, Any] = {} if task.check else {"check": None}
    if "engines" in known:
        options["engines"] = engines
    elif engines:
        raise NotImplementedError("this commit has no engines")
    if level > 1 and not task.timed:
        if "tune_seconds" not in known:
            raise NotImplementedError("this commit cannot choose without timing")
        options["tune_seconds"] = 0
    try:
        return optimizer.optimize(task.module, task.inputs, level=level, **options)
    except ValueError as error:
        if "level" not in str(error) and "engine" not in str(error):
            raise
        raise NotImplementedError(
            f"this commit has no {level=}, or {engines=} is not here"
        ) from error


def fx_fuse(task: Task) -> Run:
    with warnings.catch_warnings():  # the module uses what torch has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.fx.experimental.optimization import fuse
    return fuse(task.module)


def dead_code(task: Task) -> Run:
    """`torch.fx.Graph.eliminate_dead_code`, on a trace."""
    from torch import fx

    traced = fx.symbolic_trace(task.module)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def cse(task: Task) -> Run:
    """`torch.fx.passes.dialect.common.cse_pass.CSEPass`, on a trace."""
    from torch import fx
    from torch.fx.passes.dialect.common import cse_pass

    result = cse_pass.CSEPass()(fx.symbolic_trace(task.module))
    assert result is not None
    return result.graph_module


def torchscript(task: Task) -> Run:
    """Traced, frozen, and with the convolutions of oneDNN."""
    import torch

    return torch.jit.optimize_for_inference(_traced(task.module, task.inputs))


def jit_freeze(task: Task) -> Run:
    """Traced and frozen, with the optimizations that `torch.jit.freeze` runs by default."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.freeze(_traced(task.module, task.inputs))


def onednn_graph(task: Task) -> Run:
    """Traced and frozen with oneDNN Graph; a model of images is laid out channels last."""
    import torch

    torch.jit.enable_onednn_fusion(True)
    of_images = any(each.dim() == 4 for each in task.inputs)
    module = _channels_last(task.module) if of_images else task.module
    frozen = torch.jit.freeze(_traced(module, _laid_out(task.inputs)))
    return lambda *inputs: frozen(*_laid_out(inputs))


def compiled(task: Task, **options: Any) -> Run:
    import torch

    return torch.compile(task.module, **options)


def compiled_frozen(task: Task) -> Run:
    """Compiled with weights as constants, which `torch.compile(options=...)` does not do."""
    from torch._inductor import config

    config.freezing = True
    return compiled(task)


def inductor(task: Task) -> Run:
    """The same, up to the graph that Inductor makes kernels of, which is run as it is.

    The compiler of the kernels takes a second for each model; the defects are the same.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    def run_as_it_is(graph: Any, inputs: Any, **_: Any) -> Any:
        def run(values: list[Any]) -> Any:
            return graph(*values)

        vars(run)["_boxed_call"] = True  # it takes its arguments in one list
        return run

    def frozen(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, run_as_it_is, {"freezing": True})

    return torch.no_grad()(torch.compile(task.module, backend=frozen))


def onnxruntime(task: Task) -> Run:
    import onnxruntime as runtime
    import torch

    file = task.folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(task.module, task.inputs, file, dynamo=True, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.log_severity_level = 4
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*inputs: Any) -> list[Any]:
        arrays = session.run(None, dict(zip(names, map(_array, inputs), strict=True)))
        return [torch.from_numpy(array) for array in arrays]

    return call


def openvino(task: Task) -> Run:
    """In float32: by itself it would choose bfloat16 where that is faster."""
    import openvino as runtime
    import torch

    converted = runtime.convert_model(task.module, example_input=task.inputs)
    settings = {
        "INFERENCE_NUM_THREADS": task.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = runtime.compile_model(converted, "CPU", settings).create_infer_request()

    def call(*inputs: Any) -> list[Any]:
        found = request.infer(list(map(_array, inputs)), share_inputs=True, share_outputs=True)
        return [torch.from_numpy(found[index]) for index in range(len(found))]

    return call


def _traced(module: Any, inputs: tuple[Any, ...]) -> Any:
    import torch

    trace: Any = torch.jit.trace
    return trace(module, inputs, strict=False, check_trace=False)


def _channels_last(thing: Any) -> Any:
    import torch

    return thing.to(memory_format=torch.channels_last)


def _laid_out(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_channels_last(each) if each.dim() == 4 else each for each in inputs)


def _array(tensor: Any) -> Any:
    return tensor.numpy()


_GPU, _CPU = ("cuda", "mps"), ("cpu",)
_OPENVINO = functools.partial(optimized, level=2, engines=("openvino",))
_INDUCTOR = functools.partial(optimized, level=2, engines=("inductor",))
_SUBJECTS = (
    Subject(EAGER, eager, (VARIANT, PEER), promise="same bits"),
    Subject("optimized-1", functools.partial(optimized, level=1), (VARIANT, PEER)),
    Subject(
        "fx_fuse",
        fx_fuse,
        (VARIANT, PEER, HUNTED),
        hunt=Hunt(
            (*_LAYERS, "hook", "tie", "linear4", "bn_plain", "bn_train", "bn_nostats", "linear bn",
             "linear bn hook", "block again"),
        ),
    ),
    Subject("optimized-2", functools.partial(optimized, level=2), (VARIANT, PEER)),
    Subject("optimized-2-openvino", _OPENVINO, (VARIANT, PEER), _CPU, needs=("openvino",)),
    Subject("optimized-2-inductor", _INDUCTOR, devices=("cpu", "cuda")),
    Subject("torchscript", torchscript),
    Subject("onednn_graph", onednn_graph, devices=_CPU),
    Subject("compile", compiled),
    Subject("compile-freezing", compiled_frozen),
    Subject(
        "compile-reduce-overhead",
        functools.partial(compiled, mode="reduce-overhead"),
        devices=_GPU,
    ),
    Subject(
        "compile-max-autotune", functools.partial(compiled, mode="max-autotune"), devices=_GPU
    ),
    Subject(
        "onnxruntime",
        onnxruntime,
        (PEER, HUNTED),
        devices=_CPU,
        needs=("onnxruntime",),
        values_only=True,
        hunt=Hunt(
            (*_LAYERS, "linear_matmul", "permute_same", "offset", "t01", "pad_kw",
             "avg_pool_padded", "permute_same linear_matmul offset"),
            "float32",
            examples=60,
            size=3,
        ),
    ),
    Subject("openvino", openvino, devices=_CPU, needs=("openvino",), values_only=True),
    Subject(
        "dead_code",
        dead_code,
        (HUNTED,),
        hunt=Hunt(
            ("relu", "shift", "add", "dup", "idouble_statement", "mask_fill", "iview_statement",
             "relu_statement", "dropout_train", "bn_train", "dup dropout_train drop",
             "dup bn_train drop", "dup idouble drop"),
        ),
    ),
    Subject(
        "cse",
        cse,
        (HUNTED,),
        hunt=Hunt(
            ("relu", "shift", "dup", "swap", "add", "idouble_statement", "mask_fill", "out",
             "dropout_F_train", "dup relu swap relu", "dup double swap double",
             "dup dropout_F_train swap dropout_F_train add", "linear"),
        ),
    ),
    Subject(
        "jit.freeze",
        jit_freeze,
        (HUNTED,),
        hunt=Hunt(
            (*_LAYERS, "bn_train", "dropout_train", "constant_counter", "hook", "merge",
             "add_size"),
        ),
    ),
    Subject(
        "inductor",
        inductor,
        (HUNTED,),
        hunt=Hunt(
            ("relu", "linear", "conv", "bn", "add", "dup", "block", "bn_train", "t01",
             "dropout idouble_statement"),
            "float32",
            examples=40,
            size=3,
        ),
    ),
)  # fmt: skip
