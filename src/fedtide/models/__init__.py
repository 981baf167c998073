"""Models: frozen dataclasses whose `build(shape, classes)` returns a new `nn.Module` that outputs logits.

>>> import fedtide as ft
>>> ft.models.Linear().build((3,), 2)[-1]
Linear(in_features=3, out_features=2, bias=True)
"""

import inspect
from typing import Annotated

from pydantic import Field
from torch import nn

from fedtide.core.errors import FedtideError
from fedtide.fields import user_code
from fedtide.fields.types import ingredient
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
    ResNet8,
    ResNet18,
    ShuffleNetV2,
    SmallCNN,
    ViT,
)


@ingredient
class Python(user_code.Python):
    """The user's own `module:function` or class, called with `options`, and if accepted `shape` and `classes`."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the module by calling the user's function."""
        make = self.find("model")
        takes = inspect.signature(make).parameters
        arguments = {name: value for name, value in (("shape", shape), ("classes", classes)) if name in takes}
        module = user_code.call(make, "model.options", **arguments, **self.options)
        if not isinstance(module, nn.Module):
            raise FedtideError(f"model.function: '{self.name}' returned {type(module).__name__}, allowed: nn.Module")
        return module


Model = Annotated[
    Linear | MLP | CNN | LeafCNN | CifarCNN | SmallCNN | LeNet5
    | ResNet8 | ResNet18 | MobileNetV2 | ShuffleNetV2 | ViT | LSTM | Python,
    Field(discriminator="kind"),
]  # fmt: skip

__all__ = [
    "CNN", "LSTM", "MLP", "CifarCNN",
    "LeNet5", "LeafCNN", "Linear", "MobileNetV2", "Model", "Python", "ResNet8", "ResNet18",
    "ShuffleNetV2", "SmallCNN", "ViT", "branched",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
