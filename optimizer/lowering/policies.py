"""What is known of each kind of device: what may run a region there, and what kernels depend on.

What is offered is timed, so that it may lose. What is known to lose is not offered: on MPS,
convolutions in channels_last were 4 to 9 times slower (pytorch issue 192551), and there is no
operator that fuses one with what follows, so that level 2 can only save calls there. On a device
that is not named here, nothing is lowered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import fx

from optimizer.core.device import Cuda
from optimizer.core.errors import InputError
from optimizer.core.node import named_arguments
from optimizer.lowering import packed as _packed
from optimizer.lowering.packed import packable_in
from optimizer.lowering.partition import CONVOLUTION, convolutions_of

AS_IT_IS = "as it is"


class Policy:
    """A device on which nothing is known to help but fewer calls.

    Attributes:
        takes_engines: whether there are engines for it.
    """

    takes_engines = False

    def offered(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
        """What may run a region, the most promising first."""
        return []

    def untimed(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
        """What runs a region where nothing is timed: the most promising, if it is known to pay."""
        return next(iter(self.offered(region, inputs)), AS_IT_IS)

    def offered_for_calls(self) -> list[str]:
        """What may run a whole call, once each of its regions is chosen."""
        return []

    def settings(self) -> Hashable:
        """What, besides the call, kernels are chosen by; False while no plan may run."""
        return ()

    def hardware(self) -> str:
        """What decisions are made for."""
        return ""


class _Cpu(Policy):
    takes_engines = True

    def offered(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
        packable = packable_in(region) if _packed.is_available() else []
        images = convolutions_of(region)
        if not images:
            return ["packed weights"] if packable else []
        if not packable:
            return ["channels_last"]
        grouped = any(_groups(node) > 1 for node in images)
        return ["packed weights, channels_last", *["packed Linear, channels_last"] * grouped]

    def untimed(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
        """Products were faster by oneDNN on one processor (AVX-512), and slower on another."""
        images, packable = convolutions_of(region), packable_in(region)
        return super().untimed(region, inputs) if 2 * len(images) >= len(packable) else AS_IT_IS

    def settings(self) -> Hashable:
        return torch.get_num_threads()

    def hardware(self) -> str:
        return torch.backends.cpu.get_cpu_capability()


class _Cuda(Policy):
    def offered(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
        return ["channels_last"] if convolutions_of(region) else []

    def untimed(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
        """In 16 bits, convolutions that are not grouped were faster in channels_last."""
        dense = all(_groups(node) == 1 for node in convolutions_of(region))
        floating = {each.dtype for each in inputs if each.is_floating_point()}
        pays = dense and floating <= {torch.float16, torch.bfloat16}
        return super().untimed(region, inputs) if pays else AS_IT_IS

    def offered_for_calls(self) -> list[str]:
        return ["CUDA graph"]

    def settings(self) -> Hashable:
        return not Cuda.is_capturing() and (
            torch._C._get_fp32_precision_getter("cuda", "matmul"),
            torch._C._get_fp32_precision_getter("cuda", "conv"),
            torch._C._get_cudnn_deterministic(),
            torch._C._get_deterministic_algorithms(),
        )

    def hardware(self) -> str:
        return torch.cuda.get_device_name()


POLICIES: dict[str, Policy] = {"cpu": _Cpu(), "cuda": _Cuda(), "mps": Policy()}


def policy_of(tensors: Iterable[torch.Tensor]) -> Policy | None:
    """What is known of the device that work on `tensors` is done on."""
    kinds = (tensor.device.type for tensor in tensors)
    return POLICIES.get(next((kind for kind in kinds if kind != "cpu"), "cpu"))


def describe_device(tensors: Iterable[torch.Tensor]) -> str:
    """The device that work on `tensors` is done on, as far as decisions depend on it."""
    policy = policy_of(tensors) or Policy()
    return f"{policy.hardware()} {policy.settings()}"


def require_one_device(tensors: Iterable[torch.Tensor]) -> None:
    """Require that all tensors, but for single numbers, are on one device that is known.

    Raises:
        InputError: they are not.
    """
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise InputError("such a call is not lowered: its tensors are on several devices.")
    if not POLICIES.keys() >= {device.type for device in devices}:
        raise InputError("such a call is not lowered: nothing is known of its device.")


def _groups(convolution: fx.Node) -> int:
    groups: int = named_arguments(convolution, CONVOLUTION)["groups"]
    return groups
