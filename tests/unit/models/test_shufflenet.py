"""ShuffleNetV2: its size, its table of stages layer by layer, what a block computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.models import ShuffleNetV2, branched
from helpers.networks import COLOUR, GREY, LARGE, SMALL, built, parameters, pictures

CIFAR, USUAL, GROUPED = ShuffleNetV2(), ShuffleNetV2(form="imagenet"), ShuffleNetV2(norm="group")
ALL = [CIFAR, USUAL, GROUPED, ShuffleNetV2(form="imagenet", norm="group")]

# Ma et al. 2018, Table 5, 1x: channels, blocks.
TABLE = [(116, 4), (232, 8), (464, 4)]


# -- parameter counts (ALGORITHMS 8.5) ---------------------------------------------------------------------------------

# model, shape, classes, branches of the head, parameters
COUNTS = [
    (USUAL, LARGE, 1000, 1, 2_278_604),
    (USUAL, LARGE, 100, 1, 1_356_104),
    (CIFAR, COLOUR, 100, 1, 1_356_104),
    (GROUPED, SMALL, 100, 1, 1_356_104),
    (CIFAR, COLOUR, 100, 2, 1_356_104 + 100 * 1025),
    (CIFAR, GREY, 100, 1, 1_356_104 - 2 * 9 * 24),
]


@pytest.mark.parametrize(("model", "shape", "classes", "branches", "count"), COUNTS, ids=lambda v: str(v)[:60])
def test_the_network_has_the_published_number_of_parameters(model, shape, classes, branches, count):
    made = built(model, shape, classes)
    assert parameters(made if branches == 1 else branched(made, "head", branches)) == count


def test_every_layer_has_as_many_parameters_as_the_table_says():
    """With h = c/2: a 1x1 convolution a*h, a depthwise one 9h, two a channel of each norm."""
    made, a = built(CIFAR, COLOUR, 10), 24
    assert parameters(made.stem) == 27 * 24
    for i, (c, n) in enumerate(TABLE, start=2):
        h = c // 2
        first, *others = getattr(made, f"stage{i}")
        assert parameters(first) == (9 * a + 2 * a + a * h + 2 * h) + (a * h + 9 * h + h * h + 6 * h)
        assert [parameters(block) for block in others] == [2 * h * h + 9 * h + 6 * h] * (n - 1)
        a = c
    assert parameters(made.last) == 464 * 1024
    assert parameters(made.head) == 1024 * 10 + 10


# -- the layers --------------------------------------------------------------------------------------------------------


def expected_layers(depth: int, small: bool) -> list[tuple[int, int, int, int, int]]:
    """Channels in and out, size, stride and groups of every convolution, from the table."""
    layers, a = [(depth, 24, 3, 1 if small else 2, 1)], 24
    for c, n in TABLE:
        h = c // 2
        layers += [(a, a, 3, 2, a), (a, h, 1, 1, 1), (a, h, 1, 1, 1), (h, h, 3, 2, h), (h, h, 1, 1, 1)]
        layers += [(h, h, 1, 1, 1), (h, h, 3, 1, h), (h, h, 1, 1, 1)] * (n - 1)
        a = c
    return [*layers, (464, 1024, 1, 1, 1)]


@pytest.mark.parametrize("model", ALL, ids=repr)
@pytest.mark.parametrize("depth", [1, 3])
def test_layers_are_those_of_the_table(model, depth):
    made = built(model, (depth, 32, 32), 10)
    convs = [m for m in made.modules() if isinstance(m, nn.Conv2d)]
    found = [(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], m.groups) for m in convs]
    assert found == expected_layers(depth, model.form == "cifar")
    assert all(m.bias is None for m in convs)
    assert len(convs) == 56
    kind = nn.BatchNorm2d if model.norm == "batch" else nn.GroupNorm
    assert sum(isinstance(m, kind) for m in made.modules()) == 56
    assert sum(isinstance(m, (nn.BatchNorm2d, nn.GroupNorm)) for m in made.modules()) == 56
    assert sum(isinstance(m, nn.ReLU) for m in made.modules()) == 37  # none after a depthwise convolution: 56 - 16 - 3


SIDES = [
    (CIFAR, COLOUR, [32, 16, 8, 4]),
    (CIFAR, SMALL, [24, 12, 6, 3]),
    (CIFAR, GREY, [28, 14, 7, 4]),
    (USUAL, LARGE, [112, 28, 14, 7]),
    (USUAL, COLOUR, [16, 4, 2, 1]),
]


@pytest.mark.parametrize(("model", "shape", "sides"), SIDES, ids=lambda v: str(v)[:40])
def test_where_the_picture_gets_smaller(model, shape, sides):
    made, x, found = built(model, shape, 10), torch.zeros(2, *shape, device="meta"), []
    for name, layer in made.named_children():
        x = layer(x)
        if name == "stem" or name.startswith("stage"):
            found.append(x.shape[-1])
    assert found == sides


def test_a_file_may_name_it_and_mistakes_are_refused():
    raw = {"method": [{"algorithm": "fedavg"}], "model": "shufflenet-v2"}
    assert from_dict(raw).model == ShuffleNetV2("cifar", "batch")
    spelled = {"kind": "shufflenet-v2", "form": "imagenet", "norm": "group"}
    assert from_dict({**raw, "model": spelled}).model == ALL[-1]
    for key, value in {"form": "pre-activation", "norm": "mixed", "width": 2}.items():
        with pytest.raises(FedtideError, match=rf"model\.{key}"):
            from_dict({**raw, "model": {"kind": "shufflenet-v2", key: value}})


# -- what it computes --------------------------------------------------------------------------------------------------


def test_a_block_keeps_half_of_the_channels_and_shuffles():
    """Channel 2k is channel k of the first half; channel 2k + 1 is channel k of what became of the second."""
    block = GROUPED.build(COLOUR, 5).double().stage2[1]
    x = torch.randn(2, 116, 6, 6, dtype=torch.float64)
    out = block(x)
    torch.testing.assert_close(out[:, 0::2], x[:, :58])
    torch.testing.assert_close(out[:, 1::2], block.body(x[:, 58:]))


def test_the_first_block_of_a_stage_sees_all_channels_twice():
    block = GROUPED.build(COLOUR, 5).double().stage2[0]
    x = torch.randn(2, 24, 8, 8, dtype=torch.float64)
    out = block(x)
    assert out.shape == (2, 116, 4, 4)
    torch.testing.assert_close(out[:, 0::2], block.shortcut(x))
    torch.testing.assert_close(out[:, 1::2], block.body(x))


def test_the_feature_is_the_mean_of_the_last_convolution():
    made = branched(CIFAR.build(SMALL, 5), "head", 3).eval()
    logits, features = made(pictures(SMALL))
    assert (logits.shape, features.shape) == ((3, 4, 5), (4, 1024))
    x = pictures(SMALL)
    for name, layer in made.model.named_children():
        if name == "mean":
            break
        x = layer(x)
    torch.testing.assert_close(features, x.mean((2, 3)))
    for k, head in enumerate(made.model.head.copies):
        torch.testing.assert_close(logits[k], features @ head.weight.T + head.bias)
