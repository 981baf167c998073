"""Residual networks: their sizes, what a block computes, where they halve the picture, how they start and train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, leaves
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.models import ResNet8, ResNet18, branched
from helpers.networks import COLOUR, GREY, SMALL, built, parameters, pictures

NARROW = ResNet8(width=4)


# -- parameter counts (ALGORITHMS 8.4) ---------------------------------------------------------------------------------

# model, shape, classes, branches of the head, parameters
COUNTS = [
    (ResNet18(), SMALL, 110, 1, 11_223_342),
    (ResNet18(), SMALL, 110, 2, 11_279_772),
    (ResNet18(norm="batch"), SMALL, 110, 1, 11_232_942),
    (ResNet18(norm="batch"), SMALL, 110, 2, 11_289_372),
    (ResNet18(form="cifar"), COLOUR, 10, 1, 11_178_762),
    (ResNet18(form="cifar"), COLOUR, 100, 1, 11_224_932),
    (ResNet18(form="cifar"), GREY, 62, 1, 11_204_286),
    (ResNet18(form="cifar", norm="batch"), COLOUR, 10, 1, 11_178_762),
    (ResNet18(form="cifar", norm="mixed"), COLOUR, 10, 1, 11_178_762),
    (ResNet18(form="cifar", norm="mixed"), COLOUR, 100, 1, 11_224_932),
    (ResNet18(form="cifar", norm="mixed"), GREY, 62, 1, 11_204_286),
    (ResNet8(width=8), COLOUR, 10, 1, 19_954),
    (ResNet8(width=16), COLOUR, 10, 1, 78_042),
    (ResNet18(form="imagenet"), (3, 224, 224), 1000, 1, 11_689_512),
    (ResNet18(form="imagenet", norm="batch"), (3, 224, 224), 62, 1, 11_208_318),
]


@pytest.mark.parametrize(("model", "shape", "classes", "branches", "count"), COUNTS, ids=lambda v: str(v)[:60])
def test_a_network_has_the_published_number_of_parameters(model, shape, classes, branches, count):
    made = built(model, shape, classes)
    assert parameters(made if branches == 1 else branched(made, "head", branches)) == count


@pytest.mark.parametrize(("classes", "count"), [(10, 11_173_962), (100, 11_220_132)])
def test_without_the_biases_of_its_convolutions_the_cifar_form_has_the_other_published_number(classes, count):
    made = built(ResNet18(form="cifar"), COLOUR, classes)
    biases = sum(m.bias.numel() for m in made.modules() if isinstance(m, nn.Conv2d))
    assert parameters(made) - biases == count


def test_the_layers_of_the_periodic_shift_network():
    """Stem 7*7*3*64; stages 4*9*64^2, then 9*a*2a + 3*9*(2a)^2 + 2a^2 each; head 512*110 + 110."""
    made = built(ResNet18(), SMALL, 110)
    sizes = {name: parameters(layer) for name, layer in made.named_children() if parameters(layer)}
    stages = {"stage1": 147_456, "stage2": 524_288, "stage3": 2_097_152, "stage4": 8_388_608}
    assert sizes == {"stem": 9_408, **stages, "head": 56_430}


@pytest.mark.parametrize("width", [1, 3, 8, 16])
@pytest.mark.parametrize("norm", ["group", "batch", "mixed"])
def test_the_small_network_has_as_many_parameters_as_paper_and_pencil_say(width, norm):
    """With w = width: stem 27w; blocks 18w^2, 9*2w^2 + 9*4w^2 + 2w^2, four times that; 2 a channel of each norm."""
    w = width
    norms = 2 * (w + 2 * w + 3 * 2 * w + 3 * 4 * w)
    blocks = 18 * w**2 + 56 * w**2 + 224 * w**2
    assert parameters(built(ResNet8(width=w, norm=norm), COLOUR, 10)) == 27 * w + blocks + norms + 40 * w + 10


# -- shapes ------------------------------------------------------------------------------------------------------------


def sides(made, x) -> dict[str, int]:
    """The height of the picture after each layer."""
    found = {}
    for name, layer in made.named_children():
        x = layer(x)
        if x.dim() == 4:
            found[name] = x.shape[-1]
    return found


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (ResNet18(), SMALL, {"stem": 12, "pool": 6, "stage1": 6, "stage2": 6, "stage3": 6, "stage4": 6, "mean": 1}),
        (ResNet18(form="cifar"), COLOUR, {"stem": 32, "stage1": 32, "stage2": 16, "stage3": 8, "stage4": 4, "mean": 1}),
        (ResNet18(form="cifar"), GREY, {"stem": 28, "stage1": 28, "stage2": 14, "stage3": 7, "stage4": 4, "mean": 1}),
        (ResNet18(form="cifar"), SMALL, {"stem": 24, "stage1": 24, "stage2": 12, "stage3": 6, "stage4": 3, "mean": 1}),
        (
            ResNet18(form="imagenet"),
            (3, 224, 224),
            {"stem": 112, "pool": 56, "stage1": 56, "stage2": 28, "stage3": 14, "stage4": 7, "mean": 1},
        ),
        (ResNet8(), GREY, {"stem": 28, "stage1": 28, "stage2": 14, "stage3": 7, "mean": 1}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_where_the_picture_gets_smaller(model, shape, expected):
    found = sides(built(model, shape, 10), torch.zeros(2, *shape, device="meta"))
    assert {name: side for name, side in found.items() if not name.startswith(("norm", "relu"))} == expected


def test_the_last_domain_of_the_cifar_form_leaves_out_the_last_row_and_column():
    made = ResNet18(form="cifar").build(COLOUR, 10)
    last = torch.rand(2, 512, 4, 4)
    assert torch.allclose(made.flatten(made.mean(last)), last[:, :, :3, :3].mean((2, 3)))


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 33, 33), (3, 32, 16), (1, 224, 224)])
def test_the_cifar_form_refuses_other_pictures_in_one_clear_line(shape):
    with pytest.raises(FedtideError, match=r"^model.form: 'cifar' needs pictures of 17 x 17 to 32 x 32, found rows of"):
        ResNet18(form="cifar").build(shape, 10)


# -- what a block computes ---------------------------------------------------------------------------------------------


def normed(x: torch.Tensor) -> torch.Tensor:
    """ReLU of GroupNorm in two groups, eps 1e-3, without scale and offset."""
    rows = x.reshape(len(x), 2, -1)
    out = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, unbiased=False, keepdim=True) + 1e-3).sqrt()
    return out.reshape(x.shape)


def test_pre_activation_blocks_compute_what_the_authors_code_does():
    made = ResNet18().build(SMALL, 5).double()
    convs = {name: m.weight for name, m in made.named_modules() if isinstance(m, nn.Conv2d)}

    def conv(name, x):
        return F.conv2d(x, convs[name], padding=convs[name].shape[-1] // 2)

    x = torch.randn(2, 64, 6, 6, dtype=torch.float64)
    first, second = made.stage1
    inner = conv("stage1.0.body.0", x)  # without a norm before it
    torch.testing.assert_close(first(x), x + conv("stage1.0.body.3", F.relu(normed(inner))))
    inner = conv("stage1.1.body.2", F.relu(normed(x)))
    torch.testing.assert_close(second(x), x + conv("stage1.1.body.5", F.relu(normed(inner))))
    inner = conv("stage2.0.body.2", F.relu(normed(x)))
    shortcut = normed(conv("stage2.0.shortcut.0", x))
    torch.testing.assert_close(made.stage2[0](x), shortcut + conv("stage2.0.body.5", F.relu(normed(inner))))
    last = torch.randn(2, 512, 6, 6, dtype=torch.float64)
    after = made.flatten(made.mean(made.relu2(made.norm2(last))))
    torch.testing.assert_close(after, F.relu(normed(last)).mean((2, 3)))


def test_post_activation_blocks_end_with_relu():
    block = ResNet8(width=2).build(COLOUR, 5).stage2[0]
    conv1, norm1, _, conv2, norm2 = block.body
    x = torch.randn(2, 2, 8, 8)
    inner = norm2(conv2(F.relu(norm1(conv1(x)))))
    torch.testing.assert_close(block(x), F.relu(inner + block.shortcut[1](block.shortcut[0](x))))
    assert block(x).shape == (2, 4, 4, 4)


@pytest.mark.parametrize(("model", "eps", "affine"), [(ResNet18(), 1e-3, False), (ResNet18(form="cifar"), 1e-5, True)])
def test_the_settings_of_group_norm(model, eps, affine):
    groups = [m for m in built(model, COLOUR, 10).modules() if isinstance(m, nn.GroupNorm)]
    assert {(m.num_groups, m.eps, m.affine) for m in groups} == {(2, eps, affine)}
    assert len(groups) == 20


@pytest.mark.parametrize("model", [ResNet18(form="cifar", norm="mixed"), ResNet8(norm="mixed")], ids=lambda m: m.kind)
def test_mixed_norms_stand_where_the_thesis_has_them(model):
    made = built(model, COLOUR, 10)
    assert isinstance(made.norm, nn.BatchNorm2d)
    for block in (b for name, stage in made.named_children() if name.startswith("stage") for b in stage):
        assert isinstance(block.body[1], nn.BatchNorm2d)
        assert isinstance(block.body[4], nn.GroupNorm)
        assert isinstance(block.shortcut, nn.Identity) or isinstance(block.shortcut[1], nn.GroupNorm)


@pytest.mark.parametrize("form", ["pre-activation", "imagenet"])
def test_mixed_norms_of_another_form_are_refused(form):
    with pytest.raises(FedtideError, match=f"norm = 'mixed' belongs to form = 'cifar', not to '{form}'"):
        ResNet18(form=form, norm="mixed")
    raw = {"method": [{"algorithm": "fedavg"}], "model": {"kind": "resnet18", "form": form, "norm": "mixed"}}
    with pytest.raises(FedtideError, match=r"norm = 'mixed' belongs to form = 'cifar'"):
        from_dict(raw)


# -- how they start and train ------------------------------------------------------------------------------------------


def test_the_first_weights_of_the_periodic_shift_network_are_the_authors():
    torch.manual_seed(0)
    made = branched(ResNet18().build(SMALL, 110), "head", 2)
    weight = made.model.get_submodule("stage4.1.body.2").weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    first, second = made.model.head.copies
    for head in (first, second):
        assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.02)
        assert not head.bias.any()
    assert not torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    "model",
    [ResNet18(), pytest.param(ResNet18(form="cifar", norm="mixed"), marks=pytest.mark.thorough), NARROW],
    ids=repr,
)
def test_a_step_is_the_same_in_both_memory_formats_and_moves_every_layer(model):
    def build():
        return model.build(SMALL, 10)

    plain, last = (Task(build, dtype=torch.float64, channels_last=c) for c in (False, True))
    weights = plain.init(Rng(0))
    assert plain.scratch.module.stem.weight.is_contiguous()
    assert last.scratch.module.stem.weight.is_contiguous(memory_format=torch.channels_last)
    shard = Shard(pictures(SMALL, 3), torch.arange(3), torch.arange(3))
    solver = LocalTrainer(lr=0.01, batch_size=3)
    contiguous, fitted = (
        detached(solver(t, t.loss, weights, shard, Moment(0, 1), Rng(0)).delta) for t in (plain, last)
    )
    for name, moved in fitted.params.items():
        torch.testing.assert_close(moved, contiguous.params[name], rtol=1e-6, atol=1e-12)
        assert moved.abs().max() > 1e-9 or name.endswith("bias"), name  # a norm takes out the bias before it
    assert all(torch.isfinite(t).all() for t in leaves(fitted))


# -- running statistics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "layers"), [("group", 0), ("mixed", 9), ("batch", 20)])
def test_each_batch_norm_has_two_running_statistics(norm, layers):
    """Stem, eight blocks of two, three projections: 20 norms. Mixed: BatchNorm in the stem and first in each block."""
    weights = Task(lambda: ResNet18(form="cifar", norm=norm).build(COLOUR, 10)).scratch.weights
    assert len(weights.buffers) == 2 * layers
    assert all(name.endswith(("running_mean", "running_var")) for name in weights.buffers)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("norm", ["batch", "mixed"])
def test_running_statistics_are_averaged_like_parameters_and_used_to_predict(norm, weighting):
    """Three clients of 4, 6 and 10 rows, from the same keys, client by client."""
    task = ft.Task(lambda: ResNet8(width=2, norm=norm).build((1, 8, 8), 3), dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 6, 10]))
    x, y = pictures((1, 8, 8), 20) + owner[:, None, None, None], torch.arange(20) % 3
    people = ft.population(x, y, ft.data.Natural(), client=owner, split=ft.data.Split(val=0.0, test=0.0))
    local = LocalTrainer(lr=0.1, batch_size=2)
    algorithm = ft.algorithms.fedavg(task, local, cohort=ft.cohorts.Everyone(), weighting=weighting)
    found = ft.simulate(algorithm, people, rounds=1).state.weights
    start = task.init(Rng(0).at(-1, "server"))
    made = []
    for client in range(3):
        key, shard = Rng(0).at(0, client, "train"), people.shard(client, Moment(0, 1))
        made.append(detached(local(task, task.loss, start, shard, Moment(0, 1), key).weights))
    shares = torch.tensor([4.0, 6.0, 10.0] if weighting == "samples" else [1.0, 1.0, 1.0], dtype=torch.float64)
    shares = shares / shares.sum()
    for kind in ("params", "buffers"):
        for name, value in getattr(found, kind).items():
            expected = sum(share * getattr(own, kind)[name] for share, own in zip(shares, made, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
            assert not torch.equal(value, getattr(start, kind)[name]), name
    other = Weights(found.params, start.buffers)
    assert not torch.allclose(task.logits(found, x), task.logits(other, x))
