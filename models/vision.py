"""Models of images at batch 1, with random weights and the input size they are made for.

torchvision's, and of timm's those whose kind torchvision lacks.
"""

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

_OF_TIMM = {
    "mobilenetv4_conv_small": 224,
    "ghostnetv2_100": 224,
    "repvgg_a0": 224,
    "convnextv2_atto": 224,
    "edgenext_small": 256,
    "levit_128s": 224,
    "poolformerv2_s12": 224,
    "hrnet_w18_small": 224,
    "mobilevitv2_100": 256,
    "eva02_tiny_patch14_224": 224,
}


def _register(name: str, shape: tuple[int, ...] = _IMAGE, **options: None) -> None:
    @workload("torchvision", name=name)
    def build(generator: torch.Generator) -> Built:
        import_torchvision()
        from torchvision.models import get_model

        module = get_model(name, weights=None, **options)
        return module, (_patches(shape, generator),)


def _register_of_timm(name: str, size: int) -> None:
    @workload("timm", name=name)
    def build(generator: torch.Generator) -> Built:
        import_torchvision()  # timm does
        import timm

        return timm.create_model(name), (_patches((1, 3, size, size), generator),)


def _patches(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """An image or clip of noisy patches: plain noise is gone once the model has pooled it."""
    *leading, height, width = shape
    count = 7 if height % 7 == 0 else 8  # in each direction
    coarse = torch.randn(*leading, count, count, generator=generator)
    patches = coarse.repeat_interleave(height // count, -2).repeat_interleave(width // count, -1)
    return patches + 0.5 * torch.randn(shape, generator=generator)


for _name in _CLASSIFIERS:
    _register(_name)
_register("deeplabv3_mobilenet_v3_large", weights_backbone=None)
_register("r3d_18", _CLIP)
for _name, _size in _OF_TIMM.items():
    _register_of_timm(_name, _size)
