"""Models: frozen dataclasses whose `build(shape, classes)` returns a new `nn.Module` that outputs logits.

>>> import fedtide as ft
>>> ft.models.Linear().build((3,), 2)[-1]
Linear(in_features=3, out_features=2, bias=True)
"""

from fedtide.models.adapters import LoRA, save_adapters
from fedtide.models.branched import branched
from fedtide.models.networks import (
    CNN,
    LSTM,
    MLP,
    CifarCNN,
    LeafCNN,
    LeNet5,
    Linear,
    MobileNetV2,
    Model,
    Python,
    ResNet8,
    ResNet18,
    ShuffleNetV2,
    SmallCNN,
    Transformer,
    ViT,
)

__all__ = [
    "CNN", "LSTM", "MLP", "CifarCNN", "LeNet5", "LeafCNN", "Linear", "LoRA", "MobileNetV2", "Model", "Python",
    "ResNet8", "ResNet18", "ShuffleNetV2", "SmallCNN", "Transformer", "ViT", "branched",
    "save_adapters",
]  # fmt: skip
