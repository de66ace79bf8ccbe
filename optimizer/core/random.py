"""Random numbers: drawn for one thread alone, drawn again as they were, and who touched them.

torch's default generators, Python's and numpy's belong to the process. Here operators of torch draw
from generators of their own, and a state is put back only where this very thread changed it, so
that no number of another thread is drawn twice.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.context import put_back
from optimizer.core.device import device_named
from optimizer.core.inputs import map_tensors, tensors_in

DRAWS = "it draws or seeds random numbers in Python"
Drawn: TypeAlias = list[Any]  # what each random operator of a call gave, in order
Result = TypeVar("Result")

_WITHOUT_GENERATOR = threading.Lock()


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what the random operators of a call give, in `drawn`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: Drawn = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        result = self.draw(func, args, kwargs)
        self.drawn.append(map_tensors(torch.clone, result))
        return result

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a random operator gives."""
        return func(*args, **kwargs)


class Own(Recorded):  # type: ignore[no-untyped-call]
    """Draw from generators of its own, always of the same seed, instead of the default ones."""

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if device.type == "meta":  # draws nothing
            return func(*args, **kwargs)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device]
        taking = _taking_a_generator(func)
        if taking is None:
            return _seeded(func, args, kwargs, generator)
        given = (*args, kwargs.get("generator"))
        if not any(isinstance(each, torch.Generator) for each in given):
            kwargs = {**kwargs, "generator": generator}
        return taking(*args, **kwargs)


class Again(Recorded):  # type: ignore[no-untyped-call]
    """Give what was `drawn` before, in whatever dtype is asked for now."""

    def __init__(self, drawn: Iterable[Any]) -> None:
        super().__init__()
        self._given = iter(drawn)

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result, given = func(*args, **kwargs), tensors_in(next(self._given))
        for tensor, numbers in zip(tensors_in(result), given, strict=True):
            tensor.copy_(numbers)
        return result


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is random: attention counts as such, also without a dropout."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    idle = "dropout_p" in _arguments(func) and not given.get("dropout_p")
    return torch.Tag.nondeterministic_seeded in func.tags and not idle


def _taking_a_generator(func: Any) -> Any:
    """The overload of an operator that takes a generator; None if there is none."""
    names = _arguments(func)
    packet = func.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    wanted = names | {"generator"}
    return func if wanted == names else next((o for o in others if _arguments(o) == wanted), None)


def _arguments(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def _seeded(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """Call an operator that knows no generator but the default one."""
    device = device_named(generator.device)
    with _WITHOUT_GENERATOR, device.keep_random_state():
        device.seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))
        return func(*args, **kwargs)


class ProcessState:
    """The states of the generators of the process, and whether this thread changed them."""

    def __init__(self) -> None:
        self.before = [(get, put, get()) for get, put in _generators()]
        self.alone = sum(not _is_of_tqdm(each) for each in threading.enumerate()) == 1
        self.touched = False

    def changed(self) -> bool:
        """Whether a state is another than it was."""
        return any(not _same(get(), was) for get, _, was in self.before)

    def restore(self) -> None:
        """Put back what this thread changed."""
        for get, put, was in self.before if self.alone or self.touched else ():
            if not _same(get(), was):
                put(was)

    def watch(self, run: Callable[[], Result], note: Callable[[FrameType], object]) -> Result:
        """`run()`; note where its code calls a generator, or may have called numpy's.

        What is noted counts as a change by this thread, unless `note` answers no.
        """
        numpys: dict[CodeType, bool] = {}  # by a function's code: asked of every call

        def look(frame: FrameType, event: str, called: Any) -> None:
            if event == "c_call":
                found = isinstance(getattr(called, "__self__", None), _GENERATORS)
            elif event == "return":
                code = frame.f_code
                if code not in numpys:
                    numpys[code] = _names_numpys(frame)
                found = numpys[code] and self.changed()
            else:
                return
            if found:
                self.touched |= bool(note(frame))

        def watched() -> Result:
            sys.setprofile(look)
            return run()

        before = sys.getprofile()
        return put_back(lambda: sys.setprofile(before), watched)


def _is_of_tqdm(thread: threading.Thread) -> bool:
    """Whether it refreshes progress bars: it draws nothing, and fx.Interpreter starts it."""
    return type(thread).__module__.startswith("tqdm.")


def undrawn(run: Callable[[], Result]) -> Result:
    """`run()`, with the generators of the process left as they were."""
    state = ProcessState()
    watched = run if state.alone else lambda: state.watch(run, lambda frame: True)
    return put_back(state.restore, watched)


_GENERATORS = (torch.Generator, random.Random)


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield random.getstate, random.setstate
    for each in (torch.default_generator, *torch.cuda.default_generators):
        yield each.get_state, each.set_state
    if numpy := _numpy():
        yield numpy.get_state, numpy.set_state


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _names_numpys(frame: FrameType) -> bool:
    """Whether the code of a function names the generator of numpy, whose calls are not seen."""
    numpy, names = _numpy(), frame.f_code.co_names
    known = [frame.f_globals.get(name) for name in names] if numpy else []
    module = "random" in names and sys.modules.get("numpy") in known
    return module or any(
        each is numpy or isinstance(getattr(each, "__self__", None), numpy.RandomState)
        for each in known
    )


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, tuple) and any(hasattr(each, "tobytes") for each in state):  # numpy's
        return all(map(_same, state, other))
    return bool(state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other)
