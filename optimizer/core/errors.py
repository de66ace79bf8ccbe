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


class Refused(Exception):  # noqa: N818 - a remark in the report, not an error
    """A rewrite, a recording or a plan would not be safe here; the message says why."""


def require(condition: bool, reason: str) -> None:
    """Raise `Refused`, with a reason for the report, unless `condition` holds."""
    if not condition:
        raise Refused(reason)
