"""What is known of a node without running it: whose code it runs, and what its name tells."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import fx

from optimizer._graph import is_plain, module_of
from optimizer._vocabulary import FACTORIES


def name_of_call(node: fx.Node) -> str:
    """The name of a function, an overload, a method or, in small letters, a module's class."""
    if node.op == "call_module":
        return type(module_of(node)).__name__.lower()
    target: Any = node.target
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def is_users_module(node: fx.Node) -> bool:
    """Whether it calls a module of a class that is not torch's."""
    torchs = ("torch.", "optimizer.")
    return node.op == "call_module" and not type(module_of(node)).__module__.startswith(torchs)


def may_vary_rank(node: fx.Node) -> bool:
    """Whether a result's rank may depend on sizes: a squeeze, or code that is not torch's."""
    return is_users_code(node) or "squeeze" in name_of_call(node).split("_")


def is_users_code(node: fx.Node) -> bool:
    """Whether it runs code that is neither torch's nor Python's."""
    if is_users_module(node):
        return True
    home = str(getattr(node.target, "__module__", None) or "torch")
    ours = home.split(".")[0] in ("torch", "_operator", "builtins", "math", "optimizer")
    return node.op == "call_function" and not ours


def may_do_anything(node: fx.Node) -> bool:
    """Whether it runs a user's code. No function of torchvision keeps what it is given."""
    torchvisions = str(getattr(node.target, "__module__", "")).startswith("torchvision.")
    return is_users_code(node) and not torchvisions


def devices_named_by(node: fx.Node) -> set[torch.device]:
    """Devices that a call names, or takes by default because it makes a tensor of nothing."""
    named = set[torch.device]()
    for leaf in (*node.args, *node.kwargs.values()):
        if isinstance(leaf, str | torch.device):
            with suppress(RuntimeError):  # another word
                named.add(torch.device(leaf))
    if node.op == "call_method" and node.target in ("cpu", "cuda"):
        named.add(torch.device(str(node.target)))
    if node.op == "call_function" and node.target in FACTORIES and "device" not in node.kwargs:
        named.add(torch.get_default_device())
    return named


def called_as_they_are(module: fx.GraphModule) -> list[str]:
    """What was not recorded, because nothing is known of what it does; and the reasons."""
    calls = {node.target: node for node in module.graph.nodes if node.op == "call_module"}
    reasons = {name: _why_opaque(node) for name, node in calls.items()}
    return [
        f"'{name}' ({type(module_of(calls[name])).__name__}) is called as it is: {reason}"
        for name, reason in reasons.items()
        if reason
    ]


def _why_opaque(node: fx.Node) -> str:
    """Why a call of a submodule was not recorded; empty for the layers of torch."""
    module = module_of(node)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    hooked = "" if is_plain(module) else "it has hooks, parametrizations or a __call__"
    return str(node.meta.get("opaque", hooked))
