"""The errors a user can meet. Each message is one sentence that says what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OptimizerError(Exception):
    """Base of every error this package raises on purpose, with one line for a message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(message.split()))


class InputError(OptimizerError, ValueError):
    """An argument cannot be used: a module, example inputs, a level or a name."""


class CaptureError(OptimizerError):
    """A model's forward cannot be turned into a graph."""


class EquivalenceError(OptimizerError, AssertionError):
    """Two models that must agree give different answers."""


class PassError(OptimizerError):
    """A pass is unknown, or was declared in a way that cannot work."""


class DeviceError(OptimizerError, RuntimeError):
    """The device that was asked for is not present on this machine."""


class OptimizerWarning(UserWarning):
    """What a user should know of a result that is right all the same."""


class Refused(Exception):  # noqa: N818 - a remark in the report, not an error
    """A rewrite, a recording or a plan would not be safe here; the message says why."""


REJECTED = "the {} rejects these example inputs ({{}}): pass inputs that it can be called with."


@contextmanager
def raised_as(kind: type[OptimizerError], message: str) -> Iterator[None]:
    """Raise what a user's code raises as an error of this kind, with it in the message."""
    try:
        yield
    except OptimizerError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        raise kind(message.format(reason)) from error


def require(condition: bool, reason: str) -> None:
    """Raise `Refused`, with a reason for the report, unless `condition` holds."""
    if not condition:
        raise Refused(reason)
