"""The errors a user can meet. Each message is one sentence that says what to do next."""

from __future__ import annotations


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


def require(condition: bool, reason: str) -> None:
    """Go on only where a forward can be recorded; raise a CaptureError elsewhere."""
    if not condition:
        raise CaptureError(reason)
