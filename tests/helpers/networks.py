"""Networks for pictures: built on no device, counted, and fed."""

import torch
from torch import nn

GREY, SMALL, COLOUR, LARGE = (1, 28, 28), (3, 24, 24), (3, 32, 32), (3, 224, 224)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def built(model, shape, classes):
    """On no device: layers and shapes alone."""
    with torch.device("meta"):
        return model.build(shape, classes)


def pictures(shape, rows: int = 4) -> torch.Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(0))
