"""torchvision's models at batch 1, with random weights and the input size they are made for."""

from __future__ import annotations

import torch

from ._registry import Built, workload
from ._torchvision_import import import_torchvision

_IMAGE = (1, 3, 224, 224)
_CLIP = (1, 3, 4, 56, 56)

_CLASSIFIERS = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "densenet121",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "vgg11_bn",
)


def _register(name: str, shape: tuple[int, ...] = _IMAGE, **options: None) -> None:
    @workload("torchvision", name=name)
    def build(generator: torch.Generator) -> Built:
        import_torchvision()
        from torchvision.models import get_model

        module = get_model(name, weights=None, **options)
        return module, (_patches(shape, generator),)


def _patches(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """An image or clip of 7 x 7 noisy patches: plain noise is gone once the model has pooled it."""
    *leading, height, width = shape
    coarse = torch.randn(*leading, 7, 7, generator=generator)
    patches = coarse.repeat_interleave(height // 7, -2).repeat_interleave(width // 7, -1)
    return patches + 0.5 * torch.randn(shape, generator=generator)


for _name in _CLASSIFIERS:
    _register(_name)
_register("deeplabv3_mobilenet_v3_large", weights_backbone=None)
_register("r3d_18", _CLIP)
