"""Hugging Face's models with random weights, from configs of the sizes that people run.

Encoders of words take one row of 128, of which the last 32 are padding, or of 512. Decoders take a
prompt (prefill), or one word behind the keys and values of 128 (decode).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ._registry import Built, workload
from ._torchvision_import import import_torchvision

Inputs: TypeAlias = Callable[[torch.Generator], tuple[Tensor, ...]]

_VOCABULARY = 1000  # the words that inputs are drawn from: each model knows more
_PROMPT = 128
_LLAMA = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
_WHISPER = "transformers.models.whisper.modeling_whisper.WhisperEncoder"
_WHISPER_TINY = {
    "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
}  # fmt: skip


class Decoder(nn.Module):
    """A language model whose keys and values are tensors that it takes and returns.

    Called with words (batch, length) and, of each layer, the keys and the values of the words
    before them (batch, heads, length, width); returns the logits, and keys and values with these
    words. If `fixed`, the position (a tensor of one int64) comes after the words, and keys and
    values are written there, in place.
    """

    def __init__(self, model: nn.Module, *, fixed: bool = False) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed
        package = _transformers()
        self.kind_of_cache = package.StaticCache if fixed else package.DynamicCache

    def forward(self, words: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Continue with `words`."""
        cache = self._fixed_cache(*past) if self.fixed else self._growing_cache(past)
        logits = self.model(words, past_key_values=cache, use_cache=True).logits
        return logits, *(each for layer in cache.layers for each in (layer.keys, layer.values))

    def _growing_cache(self, past: tuple[Tensor, ...]) -> Any:
        pairs = list(zip(past[::2], past[1::2], strict=True))
        return self.kind_of_cache(pairs or None, config=self.model.config)

    def _fixed_cache(self, position: Tensor, *past: Tensor) -> Any:
        cache = self.kind_of_cache(self.model.config, max_cache_len=past[0].shape[2])
        for layer, keys, values in zip(cache.layers, past[::2], past[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.cumulative_length = position.clone()
        return cache


def _transformers() -> Any:
    if find_spec("torchvision"):  # transformers imports it, and would fail beside another torch
        import_torchvision()
    return importlib.import_module("transformers")


def _words(length: int, padding: int = 0) -> Inputs:
    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        words = torch.randint(5, _VOCABULARY, (1, length), generator=generator)
        mask = (torch.arange(length) < length - padding).long()[None]
        return (words, mask) if padding else (words,)

    return draw


def _noise(*shape: int) -> Inputs:
    return lambda generator: (torch.randn(shape, generator=generator),)


def _one_word(layers: int, heads: int, room: int = 0) -> Inputs:
    """A word behind a prompt; with `room` for so many more, its position and a fixed cache."""

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        past = torch.randn(2 * layers, 1, heads, _PROMPT, 64, generator=generator)
        position = (torch.tensor([_PROMPT]),) if room else ()
        kept = nn.functional.pad(past, (0, 0, 0, room))
        return *_words(1)(generator), *position, *(each.clone() for each in kept)

    return draw


def _fixed(model: nn.Module) -> nn.Module:
    return Decoder(model, fixed=True)


def _register(
    name: str,
    kind: str,
    inputs: Inputs,
    settings: dict[str, Any] | None = None,
    wrapped: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> None:
    @workload("transformers", name=name)
    def build(generator: torch.Generator) -> Built:
        home, _, name_of_class = kind.rpartition(".")
        _transformers()
        found = getattr(importlib.import_module(home or "transformers"), name_of_class)
        return wrapped(found(found.config_class(**settings or {}))), inputs(generator)


_register("bert_base_128", "BertModel", _words(128, padding=32))
_register("bert_base_512", "BertModel", _words(512))
_register("distilbert", "DistilBertModel", _words(128, padding=32))
_register("gpt2_prefill", "GPT2LMHeadModel", _words(_PROMPT), wrapped=Decoder)
_register("gpt2_decode", "GPT2LMHeadModel", _one_word(12, 12), wrapped=Decoder)
_register("llama_100m_prefill", "LlamaForCausalLM", _words(_PROMPT), _LLAMA, Decoder)
_register("llama_100m_decode", "LlamaForCausalLM", _one_word(12, 4, 128), _LLAMA, _fixed)
_register("t5_small_encoder", "T5EncoderModel", _words(128, padding=32))
_register("vit_base", "ViTModel", _noise(1, 3, 224, 224))
_register("clip_text", "CLIPTextModel", _words(77))
_register("whisper_tiny_encoder", _WHISPER, _noise(1, 80, 3000), _WHISPER_TINY)
_register("wav2vec2_base", "Wav2Vec2Model", _noise(1, 16_000))
