"""The register of workloads: `@workload(family)` on a builder function adds one."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Concatenate, NamedTuple, ParamSpec, TypeAlias

import torch
from torch import nn

from ._randomize import randomize
from ._workload import Workload

Sizes = ParamSpec("Sizes")
Built: TypeAlias = tuple[nn.Module, tuple[torch.Tensor, ...]]
Builder: TypeAlias = Callable[Concatenate[torch.Generator, Sizes], Built]


class UnknownWorkloadError(LookupError):
    """No workload or no family has the name that was asked for."""


class UnavailableDeviceError(RuntimeError):
    """The device that was asked for is not there, or this build of torch cannot use it."""


class _Entry(NamedTuple):
    family: str
    build: Callable[..., Workload]
    sizes: list[int]


_ENTRIES: dict[str, _Entry] = {}


def workload(
    family: str, *, name: str | None = None, sizes: tuple[int, ...] = ()
) -> Callable[[Builder[Sizes]], Callable[Sizes, Workload]]:
    """Register a builder, `(generator, *sizes) -> (module, inputs)`, as a workload of `family`.

    The builder draws its inputs from `generator`; its module is then randomized and put in eval
    mode. It is registered under its own name or `name`, or once for each of `sizes` as
    `<name>_<size>`. What the decorator returns takes sizes alone and returns the `Workload`.
    """

    def register(builder: Builder[Sizes]) -> Callable[Sizes, Workload]:
        stem = name or builder.__name__
        build = _seeded(builder, family, stem)
        for arguments in [[size] for size in sizes] or [[]]:
            _ENTRIES[_full_name(stem, *arguments)] = _Entry(family, build, arguments)
        return build

    return register


def names(family: str | None = None) -> tuple[str, ...]:
    """The names that `load` knows, of one family or of all, in the order of registration.

    Raises:
        UnknownWorkloadError: there is no such family.
    """
    families = dict.fromkeys(entry.family for entry in _ENTRIES.values())
    if family is not None and family not in families:
        raise UnknownWorkloadError(f"'{family}' is not a family: {_advice(family, families)}")
    return tuple(name for name, entry in _ENTRIES.items() if family in (None, entry.family))


def load(name: str, *, device: torch.device | str = "cpu") -> Workload:
    """Build the workload `name`, with the same weights and inputs in every process.

    The global random state is left as it was.

    Raises:
        UnknownWorkloadError: there is no such workload.
        ImportError: it is one of torchvision's, timm's or transformers', which is not installed.
        UnavailableDeviceError: `device` is not there, or this build of torch cannot use it.
    """
    if name not in _ENTRIES:
        raise UnknownWorkloadError(f"'{name}' is not a workload: {_advice(name, _ENTRIES)}")
    _require_device(device)
    entry = _ENTRIES[name]
    try:
        return entry.build(*entry.sizes).to(device)
    except ModuleNotFoundError as error:
        advice = f"run pip install '.[{entry.family}]' in the clone"
        raise ImportError(f"{error.name} is not installed: {advice}.") from error


def _seeded(builder: Builder[Sizes], family: str, stem: str) -> Callable[Sizes, Workload]:
    @functools.wraps(builder)
    def build(*args: Sizes.args, **kwargs: Sizes.kwargs) -> Workload:
        name = _full_name(stem, *args, *kwargs.values())
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        # Constructors draw weights, soon overwritten, from the caller's global generator.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            module, inputs = builder(generator, *args, **kwargs)
            randomize(module, generator)
        return Workload(name, family, module.eval(), inputs)

    return build


def _full_name(stem: str, *sizes: object) -> str:
    return "_".join([stem, *map(str, sizes)])


def _require_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UnavailableDeviceError(
            f"Device '{device}' cannot be used here: pass device='cpu', or use a machine that has"
            " it and a torch that is built for it."
        ) from error


def _advice(name: str, known: Iterable[str]) -> str:
    nearest = get_close_matches(name, known, cutoff=0.5)
    if not nearest:
        return f"there are {', '.join(known)}."
    return "did you mean " + " or ".join(f"'{near}'" for near in nearest) + "?"
