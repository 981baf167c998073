"""What a second branch costs in communication, for the three networks of the periodic-shift paper."""

from __future__ import annotations

import pytest
import torch

from fedtide.models import CNN, LSTM, ResNet18, branched

# model, shape of a row, classes, the layer that is repeated, parameters of a branch, overhead in percent
PAPER = [
    pytest.param(CNN(), (1, 28, 28), 62, "head", 7_998, 0.7, id="EMNIST"),
    pytest.param(ResNet18(), (3, 24, 24), 110, "head", 56_430, 0.5, id="CIFAR"),
    pytest.param(LSTM(), (20,), 10_004, "projection", 64_416, 1.6, id="Stack Overflow"),
]


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("model", "shape", "classes", "layer", "branch", "percent"), PAPER)
def test_the_second_branch_costs_what_the_paper_says(model, shape, classes, layer, branch, percent):
    """Section 4: 0.7 %, 0.5 % and 1.6 %, as parameters of the branch over those of the network with one."""
    with torch.device("meta"):
        one = model.build(shape, classes)
        single = parameters(one)
        double = parameters(branched(one, layer, 2))
    assert double - single == branch
    assert round(100 * (double - single) / single, 1) == percent


def test_the_branch_of_the_text_model_is_15_times_smaller_than_what_follows_it():
    with torch.device("meta"):
        model = LSTM().build((20,), 10_004)
    assert round(parameters(model.vocabulary) / parameters(model.projection)) == 15
