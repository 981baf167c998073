"""MobileNetV2: its size, its table of stages layer by layer, what a block computes, how it starts and trains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.models import MobileNetV2, branched
from helpers.networks import COLOUR, GREY, LARGE, SMALL, built, parameters, pictures

CIFAR, USUAL, GROUPED = MobileNetV2(), MobileNetV2(form="imagenet"), MobileNetV2(norm="group")
ALL = [CIFAR, USUAL, GROUPED, MobileNetV2(form="imagenet", norm="group", dropout=0.0)]

# Sandler et al. 2018, Table 2: expansion, channels, blocks, stride of the first.
TABLE = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


# -- parameter counts (ALGORITHMS 8.5) ---------------------------------------------------------------------------------

# model, shape, classes, branches of the head, parameters
COUNTS = [
    (USUAL, LARGE, 1000, 1, 3_504_872),
    (USUAL, COLOUR, 10, 1, 2_236_682),
    (CIFAR, COLOUR, 10, 1, 2_236_682),
    (CIFAR, SMALL, 110, 1, 2_364_782),
    (CIFAR, COLOUR, 110, 2, 2_364_782 + 110 * 1281),
    (GROUPED, COLOUR, 110, 1, 2_364_782),
    (MobileNetV2(dropout=0.0), COLOUR, 110, 1, 2_364_782),
    (CIFAR, GREY, 10, 1, 2_236_682 - 2 * 9 * 32),
]


@pytest.mark.parametrize(("model", "shape", "classes", "branches", "count"), COUNTS, ids=lambda v: str(v)[:60])
def test_the_network_has_the_published_number_of_parameters(model, shape, classes, branches, count):
    made = built(model, shape, classes)
    assert parameters(made if branches == 1 else branched(made, "head", branches)) == count


def test_every_layer_has_as_many_parameters_as_the_table_says():
    """A block from a to c channels: a*6a to widen, 9*6a depthwise, 6a*c to narrow, two a channel of each norm."""
    made = built(CIFAR, COLOUR, 10)
    assert parameters(made.stem) == 27 * 32
    a = 32
    for i, (t, c, n, _) in enumerate(TABLE, start=1):
        for block in getattr(made, f"stage{i}"):
            wide = t * a
            widen = a * wide + 2 * wide if t > 1 else 0
            assert parameters(block) == widen + 9 * wide + 2 * wide + wide * c + 2 * c, f"stage {i}"
            a = c
        assert len(getattr(made, f"stage{i}")) == n
    assert parameters(made.last) == 320 * 1280
    assert parameters(made.head) == 1280 * 10 + 10


# -- the layers --------------------------------------------------------------------------------------------------------


def expected_layers(depth: int, small: bool) -> list[tuple[int, int, int, int, int]]:
    """Channels in and out, size, stride and groups of every convolution, from the table."""
    layers, a = [(depth, 32, 3, 1 if small else 2, 1)], 32
    for t, c, n, s in TABLE:
        for block in range(n):
            stride = s if block == 0 and not (small and c == 24) else 1
            if t > 1:
                layers.append((a, t * a, 1, 1, 1))
            layers += [(t * a, t * a, 3, stride, t * a), (t * a, c, 1, 1, 1)]
            a = c
    return [*layers, (320, 1280, 1, 1, 1)]


@pytest.mark.parametrize("model", ALL, ids=repr)
@pytest.mark.parametrize("depth", [1, 3])
def test_strides_and_expansions_are_those_of_the_table(model, depth):
    made = built(model, (depth, 32, 32), 10)
    convs = [m for m in made.modules() if isinstance(m, nn.Conv2d)]
    found = [(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], m.groups) for m in convs]
    assert found == expected_layers(depth, model.form == "cifar")
    assert all(m.bias is None for m in convs)
    assert len(convs) == 52
    kind = nn.BatchNorm2d if model.norm == "batch" else nn.GroupNorm
    assert sum(isinstance(m, kind) for m in made.modules()) == 52
    assert sum(isinstance(m, (nn.BatchNorm2d, nn.GroupNorm)) for m in made.modules()) == 52
    assert sum(isinstance(m, nn.ReLU6) for m in made.modules()) == 35  # none after a block's last convolution


def test_ten_blocks_of_the_table_add_their_input():
    """Those after the first of a stage: 0 + 1 + 2 + 3 + 2 + 2 + 0."""
    made = built(CIFAR, COLOUR, 10)
    added = [[hasattr(block, "shortcut") for block in getattr(made, f"stage{i}")] for i in range(1, 8)]
    assert added == [[block > 0 for block in range(n)] for _, _, n, _ in TABLE]
    assert sum(map(sum, added)) == 10


SIDES = [
    (CIFAR, COLOUR, [32, 32, 32, 16, 8, 8, 4, 4]),
    (CIFAR, SMALL, [24, 24, 24, 12, 6, 6, 3, 3]),
    (CIFAR, GREY, [28, 28, 28, 14, 7, 7, 4, 4]),
    (USUAL, LARGE, [112, 112, 56, 28, 14, 14, 7, 7]),
    (USUAL, COLOUR, [16, 16, 8, 4, 2, 2, 1, 1]),
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
    raw = {"method": [{"algorithm": "fedavg"}], "model": "mobilenet-v2"}
    assert from_dict(raw).model == MobileNetV2("cifar", "batch", 0.2)
    spelled = {"kind": "mobilenet-v2", "form": "imagenet", "norm": "group", "dropout": 0.0}
    assert from_dict({**raw, "model": spelled}).model == ALL[-1]
    for key, value in {"form": "pre-activation", "norm": "mixed", "dropout": 1.0}.items():
        with pytest.raises(FedtideError, match=rf"model\.{key}"):
            from_dict({**raw, "model": {"kind": "mobilenet-v2", key: value}})


# -- what it computes --------------------------------------------------------------------------------------------------


def grouped(x: torch.Tensor) -> torch.Tensor:
    """GroupNorm in two groups, eps 1e-5, scale 1, offset 0."""
    rows = x.reshape(len(x), 2, -1)
    out = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return out.reshape(x.shape)


def relu6(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(0.0, 6.0)


def test_a_block_widens_looks_at_each_channel_and_narrows_without_a_relu():
    made = GROUPED.build(COLOUR, 5).double()
    wider, deep, narrow = (m.weight for m in made.stage3[0].modules() if isinstance(m, nn.Conv2d))
    x = 3 * torch.randn(2, 24, 8, 8, dtype=torch.float64)
    wide = relu6(grouped(torch.einsum("oi,nihw->nohw", wider[:, :, 0, 0], x)))
    padded = F.pad(wide, (1, 1, 1, 1))
    each = sum(
        deep[:, 0, i, j, None, None] * padded[:, :, i : i + 8 : 2, j : j + 8 : 2] for i in (0, 1, 2) for j in (0, 1, 2)
    )
    out = grouped(torch.einsum("oi,nihw->nohw", narrow[:, :, 0, 0], relu6(grouped(each))))
    torch.testing.assert_close(made.stage3[0](x), out)
    assert out.min() < 0
    block = made.stage3[1]
    torch.testing.assert_close(block(out), out + block.body(out))


def test_the_feature_is_the_mean_of_the_last_convolution():
    made = branched(CIFAR.build(SMALL, 5), "head", 3).eval()
    logits, features = made(pictures(SMALL))
    assert (logits.shape, features.shape) == ((3, 4, 5), (4, 1280))
    net = made.model
    x = pictures(SMALL)
    for name, layer in net.named_children():
        if name == "mean":
            break
        x = layer(x)
    torch.testing.assert_close(features, x.mean((2, 3)))
    for k, head in enumerate(net.head.copies):
        torch.testing.assert_close(logits[k], features @ head.weight.T + head.bias)


def test_dropout_stands_before_the_head_and_can_be_left_out():
    names = [name for name, _ in built(CIFAR, COLOUR, 10).named_children()]
    assert names[-2:] == ["dropout", "head"]
    assert built(CIFAR, COLOUR, 10).dropout.p == 0.2
    assert "dropout" not in dict(built(MobileNetV2(dropout=0.0), COLOUR, 10).named_children())


# -- how it starts and trains ------------------------------------------------------------------------------------------


def test_first_weights_are_those_of_torchvision():
    """Convolutions N(0, 2 / (channels * pixels)) whatever the groups, head N(0, 0.01^2), biases 0, norms 1 and 0."""
    torch.manual_seed(0)
    made = branched(USUAL.build(COLOUR, 110), "head", 2)
    for name, m in made.named_modules():
        if isinstance(m, nn.Conv2d) and m.weight.numel() > 1000:
            std = (2 / (m.out_channels * m.kernel_size[0] ** 2)) ** 0.5
            assert float(m.weight.detach().std()) == pytest.approx(std, rel=0.1), name
            assert abs(float(m.weight.detach().mean())) < 0.1 * std, name
        if isinstance(m, nn.BatchNorm2d):
            assert (m.weight == 1).all()
            assert not m.bias.any()
    first, second = made.model.head.copies
    for head in (first, second):
        assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.02)
        assert not head.bias.any()
    assert not torch.equal(first.weight, second.weight)
