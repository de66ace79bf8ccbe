"""Real models in processes of their own: what is right, what is wrong, what ends its process."""

from __future__ import annotations

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import zoo
from tests.level_2 import Then

OUTCOMES = {
    "right": lambda x: x,
    "wrong": lambda x: x * 1.001,
    "wrong at other values": lambda x: x if x.max() > 1 else x * math.nan,
    "raised": lambda x: x @ torch.ones(99),
    "SIGKILL": lambda x: os.kill(os.getpid(), signal.SIGKILL),
}


@pytest.mark.parametrize("kind", OUTCOMES)
def test_an_outcome(kind, monkeypatch, capsys):
    fast = Then(OUTCOMES[kind], nn.Identity())
    fast.report = SimpleNamespace(choices=(), remarks=())
    known = {"any": (nn.Identity(), (torch.full((3,), 1.7),))}
    monkeypatch.setattr(zoo, "load", lambda name: known[name])
    monkeypatch.setattr("optimizer.optimize", lambda model, inputs, **options: fast)
    assert zoo.main(["any", "nonesuch"]) == (kind != "right")
    told = capsys.readouterr().out
    assert told.startswith(f"any: {kind.partition(' ')[0]}")
    assert "nonesuch: skipped" in told
