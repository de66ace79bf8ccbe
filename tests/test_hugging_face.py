"""Models of Hugging Face, small and with random weights: one graph each, right at other sizes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimizer
from models import import_torchvision
from tests.internals import GuardedModule

# They, and compiling, warn of what torch itself has deprecated.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
WIDE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 4, "intermediate_size": 128}
WORDS = torch.randint(5, 90, (2, 16), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(WORDS).index_fill(1, torch.arange(10, 16), 0)
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def transformers() -> Any:
    """The package, which imports torchvision."""
    import_torchvision()
    return pytest.importorskip("transformers")


def of(kind: str, **settings: Any) -> nn.Module:
    package = transformers()
    config = getattr(package, re.sub("(LMHead|Encoder)?Model$", "Config", kind))
    torch.manual_seed(0)
    model: nn.Module = getattr(package, kind)(config(**settings))
    return model.eval()


OF_WORDS, PADDED_WORDS = {"input_ids": WORDS}, {"input_ids": WORDS, "attention_mask": PADDED}
OF_IMAGES = {"pixel_values": IMAGES}
# The kind of a model, its settings, and what it is called with.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "bert": ("BertModel", {"vocab_size": 100, **WIDE}, PADDED_WORDS),
    "distilbert": (
        "DistilBertModel", {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4},
        PADDED_WORDS,
    ),
    "gpt2": (
        "GPT2LMHeadModel", {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}, OF_WORDS,
    ),
    "llama": ("LlamaModel", {"vocab_size": 100, "num_key_value_heads": 2, **WIDE}, OF_WORDS),
    "t5": (
        "T5EncoderModel", {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128,
                           "num_layers": 2}, PADDED_WORDS,
    ),
    "vit": ("ViTModel", {"image_size": 32, "patch_size": 8, **WIDE}, OF_IMAGES),
    "resnet": (
        "ResNetModel", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]},
        OF_IMAGES,
    ),
}  # fmt: skip


def other_calls(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Another batch; other lengths, of words; without the mask."""
    yield {name: torch.cat([value, value[:1]]) for name, value in inputs.items()}
    if "input_ids" in inputs:
        yield {name: value[:, :11] for name, value in inputs.items()}
        yield {"input_ids": inputs["input_ids"]}


@pytest.mark.parametrize(
    ("name", "level"), list(zip(MODELS, itertools.cycle((1, 2)), strict=False))
)
@torch.no_grad()
def test_a_model_is_one_graph_and_right_at_other_sizes(name: str, level: int) -> None:
    torch._dynamo.reset()
    kind, settings, inputs = MODELS[name]
    model = of(kind, **settings)

    fast = optimizer.optimize(model, inputs, level=level, tune_seconds=0, engines=())

    assert isinstance(fast, GuardedModule), fast.report
    assert fast.report.fired
    assert not any("graphs" in remark for remark in fast.report.remarks)
    for call in (dict(inputs), *other_calls(inputs), dict(inputs)):
        expected, actual = model(**call), fast(**call)
        assert type(actual) is type(expected)
        pairs = zip(*(pytree.tree_leaves(dict(each)) for each in (expected, actual)), strict=True)
        for one, other in pairs:
            if isinstance(one, Tensor):
                torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
