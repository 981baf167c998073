"""What a notebook has in its cells, in a file."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(100, 3, generator=GENERATOR), torch.arange(100) % 2


def rows():
    return {"x": X, "y": Y, "client": torch.arange(100) % 5}


class Net(nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(shape[0], classes)


def doubled():
    return lambda outputs, y: 2 * cross_entropy(outputs, y)
