"""Large networks for images: their sizes and layers as published, what a block computes, how they begin and train."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, leaves, same
from fedtide.learn.device import Scratch
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.models import MobileNetV2, ResNet8, ResNet18, ShuffleNetV2, ViT, branched
from helpers.networks import COLOUR, GREY, LARGE, SMALL, built, parameters, pictures

NETWORKS = {
    "resnet18": (ResNet18(), 512),
    "resnet18 cifar": (ResNet18(form="cifar", norm="mixed"), 512),
    "resnet18 imagenet": (ResNet18(form="imagenet"), 512),
    "resnet8": (ResNet8(width=4), 16),
    "mobilenet": (MobileNetV2(), 1280),
    "mobilenet imagenet": (MobileNetV2(form="imagenet"), 1280),
    "mobilenet group": (MobileNetV2(norm="group"), 1280),
    "shufflenet": (ShuffleNetV2(), 1024),
    "shufflenet imagenet": (ShuffleNetV2(form="imagenet"), 1024),
    "shufflenet group": (ShuffleNetV2(norm="group"), 1024),
    "vit": (ViT(), 32),
    "vit dropout": (ViT(dropout=0.1), 32),
}
"""Network, and the width of what its head sees."""

LEARNING = {
    "resnet8": 0.1, "mobilenet": 0.01, "mobilenet group": 0.01, "shufflenet": 0.1, "shufflenet group": 0.1, "vit": 0.1,
    "vit dropout": 0.1,
}  # fmt: skip
"""Learning rates of those that train in a second."""


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param][0]


@pytest.fixture(params=LEARNING)
def learner(request):
    return NETWORKS[request.param][0], LEARNING[request.param]


def sides(network):
    """Shapes that a network takes."""
    if network.kind == "vit":  # multiples of the patch
        return (1, 4, 4), GREY, SMALL, COLOUR, (2, 20, 16)
    if getattr(network, "form", None) == "cifar" and network.kind == "resnet18":  # what ends as 3 or 4
        return tuple((3, side, side) for side in (17, 24, 28, 32))
    return (1, 7, 7), GREY, SMALL, COLOUR, (2, 20, 17)


def test_pictures_of_many_sizes_will_do(network, thorough):
    """With `--thorough` those between the smallest and the oddest, too."""
    shapes = sides(network)
    for shape in shapes if thorough else (shapes[0], shapes[-1]):
        assert built(network, shape, 7)(torch.zeros(2, *shape, device="meta")).shape == (2, 7)


def test_rows_that_are_no_pictures_are_one_clear_line(network):
    least = 4 if network.kind == "vit" else 7
    line = rf"^model.kind: '{network.kind}' needs pictures .* of {least} x {least} or more, found"
    for shape in ((4,), (28, 28), (1, least - 1, 28), (1, 2, 28, 28), ()):
        with pytest.raises(FedtideError, match=line):
            network.build(shape, 3)


@pytest.mark.parametrize(("network", "width"), NETWORKS.values(), ids=NETWORKS)
def test_branches_share_everything_but_the_head_and_give_what_it_sees(network, width):
    for count in (1, 3):
        made = built(network, SMALL, 7)
        before, head = parameters(made), parameters(made.head)
        net = branched(made, "head", count)
        assert parameters(net) == before + (count - 1) * head
        logits, features = net(torch.zeros(5, *SMALL, device="meta"))
        assert (logits.shape, features.shape) == ((count, 5, 7), (5, width))


def test_a_row_sees_its_batch_under_batch_norm_alone(network):
    alone = getattr(network, "norm", "group") == "group"
    assert Scratch(built(network, COLOUR, 10), torch.float32, False, "meta").needs_pairs != alone
    made, x = network.build(SMALL, 10).eval().double(), pictures(SMALL, 3).double()
    torch.testing.assert_close(made(x), torch.cat([made(row) for row in x.split(1)]))


def test_a_step_moves_every_layer_and_is_repeatable(learner):
    network, rate = learner
    task = Task(lambda: network.build(SMALL, 10), channels_last=True)
    weights = task.init(Rng(0))
    shard = Shard(pictures(SMALL, 6), torch.arange(6), torch.arange(6))
    solver = LocalTrainer(lr=rate, batch_size=3)
    runs = []
    for _ in range(2):
        with torch.random.fork_rng():  # dropout draws from torch's own generator
            torch.manual_seed(0)
            runs.append(detached(solver(task, task.loss, weights, shard, Moment(0, 1), Rng(0)).delta))
    assert same(*runs)
    assert all(moved.any() for moved in runs[0].params.values())
    assert all(moved.any() for moved in runs[0].buffers.values())
    norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in task.scratch.module.modules())
    assert len(runs[0].buffers) == 2 * norms
    assert bool(norms) == (getattr(network, "norm", "group") != "group")
    assert all(torch.isfinite(t).all() for t in leaves(runs[0]))


# -- sizes as published ------------------------------------------------------------------------------------------------

# model, shape, classes, branches of the head, parameters
COUNTS = [
    (MobileNetV2(form="imagenet"), LARGE, 1000, 1, 3_504_872),
    (MobileNetV2(form="imagenet"), COLOUR, 10, 1, 2_236_682),
    (MobileNetV2(), SMALL, 110, 1, 2_364_782),
    (MobileNetV2(), COLOUR, 110, 2, 2_364_782 + 110 * 1281),
    (MobileNetV2(norm="group", dropout=0.0), COLOUR, 110, 1, 2_364_782),
    (MobileNetV2(), GREY, 10, 1, 2_236_682 - 2 * 9 * 32),
    (ShuffleNetV2(form="imagenet"), LARGE, 1000, 1, 2_278_604),
    (ShuffleNetV2(form="imagenet"), LARGE, 100, 1, 1_356_104),
    (ShuffleNetV2(norm="group"), SMALL, 100, 1, 1_356_104),
    (ShuffleNetV2(), COLOUR, 100, 2, 1_356_104 + 100 * 1025),
    (ShuffleNetV2(), GREY, 100, 1, 1_356_104 - 2 * 9 * 24),
    (ResNet18(), SMALL, 110, 1, 11_223_342),
    (ResNet18(), SMALL, 110, 2, 11_279_772),
    (ResNet18(norm="batch"), SMALL, 110, 1, 11_232_942),
    (ResNet18(form="cifar"), COLOUR, 10, 1, 11_178_762),
    (ResNet18(form="cifar", norm="mixed"), COLOUR, 100, 1, 11_224_932),
    (ResNet18(form="cifar", norm="batch"), GREY, 62, 1, 11_204_286),
    (ResNet18(form="imagenet"), LARGE, 1000, 1, 11_689_512),
    (ResNet18(form="imagenet"), LARGE, 62, 1, 11_208_318),
    (ResNet18(form="imagenet", norm="batch"), LARGE, 62, 1, 11_208_318),
    (ResNet8(width=8), COLOUR, 10, 1, 19_954),
    (ResNet8(width=16), COLOUR, 10, 1, 78_042),
    (ViT(size="b/16"), LARGE, 1000, 1, 86_567_656),
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


def test_every_block_of_vit_b16_has_the_published_number_of_parameters():
    made = built(ViT(size="b/16"), LARGE, 1000)
    assert parameters(made) - parameters(made.head) == 85_798_656
    assert len(made.blocks) == 12
    assert [parameters(block) for block in made.blocks] == [7_087_872] * 12


# -- layers ------------------------------------------------------------------------------------------------------------

Convolution = tuple[int, int, int, int, int]
"""Channels in and out, size, stride and groups."""


def mobilenet_layers(depth: int, small: bool) -> list[Convolution]:
    """Every convolution by Table 2 of Sandler et al. 2018: expansion, channels, blocks, stride of the first."""
    table = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    layers, a = [(depth, 32, 3, 1 if small else 2, 1)], 32
    for t, c, n, s in table:
        for block in range(n):
            stride = s if block == 0 and not (small and c == 24) else 1
            if t > 1:
                layers.append((a, t * a, 1, 1, 1))
            layers += [(t * a, t * a, 3, stride, t * a), (t * a, c, 1, 1, 1)]
            a = c
    return [*layers, (320, 1280, 1, 1, 1)]


def shufflenet_layers(depth: int, small: bool) -> list[Convolution]:
    """Every convolution by Table 5 of Ma et al. 2018: channels, blocks."""
    layers, a = [(depth, 24, 3, 1 if small else 2, 1)], 24
    for c, n in [(116, 4), (232, 8), (464, 4)]:
        h = c // 2
        layers += [(a, a, 3, 2, a), (a, h, 1, 1, 1), (a, h, 1, 1, 1), (h, h, 3, 2, h), (h, h, 1, 1, 1)]
        layers += [(h, h, 1, 1, 1), (h, h, 3, 1, h), (h, h, 1, 1, 1)] * (n - 1)
        a = c
    return [*layers, (464, 1024, 1, 1, 1)]


@pytest.mark.parametrize(
    ("kind", "layers_of", "relu", "relus"),
    [(MobileNetV2, mobilenet_layers, nn.ReLU6, 35), (ShuffleNetV2, shufflenet_layers, nn.ReLU, 37)],
)
@pytest.mark.parametrize("form", ["cifar", "imagenet"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_layers_are_those_of_the_table(kind, layers_of, relu, relus, form, norm):
    made = built(kind(form=form, norm=norm), GREY, 10)
    convs = [m for m in made.modules() if isinstance(m, nn.Conv2d)]
    found = [(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], m.groups) for m in convs]
    assert found == layers_of(1, form == "cifar")
    assert all(m.bias is None for m in convs)
    norms = [type(m) for m in made.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    assert norms == [nn.BatchNorm2d if norm == "batch" else nn.GroupNorm] * len(convs)
    assert sum(isinstance(m, relu) for m in made.modules()) == relus


def test_ten_blocks_of_mobilenet_add_their_input():
    made = built(MobileNetV2(), COLOUR, 10)
    added = [[hasattr(block, "shortcut") for block in getattr(made, f"stage{i}")] for i in range(1, 8)]
    assert added == [[block > 0 for block in range(n)] for n in (1, 2, 3, 4, 3, 3, 1)]


SIDES = [
    (MobileNetV2(), COLOUR, [32, 32, 32, 16, 8, 8, 4, 4]),
    (MobileNetV2(form="imagenet"), LARGE, [112, 112, 56, 28, 14, 14, 7, 7]),
    (ShuffleNetV2(), GREY, [28, 14, 7, 4]),
    (ShuffleNetV2(form="imagenet"), LARGE, [112, 28, 14, 7]),
    (ResNet18(), SMALL, [12, 6, 6, 6, 6]),
    (ResNet18(form="cifar"), COLOUR, [32, 32, 16, 8, 4]),
    (ResNet18(form="imagenet"), LARGE, [112, 56, 28, 14, 7]),
    (ResNet8(), GREY, [28, 28, 14, 7]),
]


@pytest.mark.parametrize(("model", "shape", "sides"), SIDES, ids=lambda v: str(v)[:40])
def test_where_the_picture_gets_smaller(model, shape, sides):
    """After the stem and after each stage."""
    made, x, found = built(model, shape, 10), torch.zeros(2, *shape, device="meta"), []
    for name, layer in made.named_children():
        x = layer(x)
        if name == "stem" or name.startswith("stage"):
            found.append(x.shape[-1])
    assert found == sides


def test_the_last_domain_of_the_cifar_form_leaves_out_the_last_row_and_column():
    made = ResNet18(form="cifar").build(COLOUR, 10)
    last = torch.rand(2, 512, 4, 4)
    assert torch.allclose(made.flatten(made.mean(last)), last[:, :, :3, :3].mean((2, 3)))


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 33, 33), (3, 32, 16), (1, 224, 224)])
def test_the_cifar_form_refuses_other_pictures_in_one_clear_line(shape):
    with pytest.raises(FedtideError, match=r"^model.form: 'cifar' needs pictures of 17 x 17 to 32 x 32, found rows of"):
        ResNet18(form="cifar").build(shape, 10)


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


MISTAKES = [
    ("mobilenet-v2", {"form": "pre-activation", "norm": "mixed", "dropout": 1.0}),
    ("shufflenet-v2", {"form": "pre-activation", "norm": "mixed", "width": 2}),
    ("vit", {"size": "l/16", "dropout": 1.0, "norm": "batch"}),
]


@pytest.mark.parametrize(("kind", "mistakes"), MISTAKES)
def test_mistakes_in_a_file_are_refused(kind, mistakes):
    for key, value in mistakes.items():
        with pytest.raises(FedtideError, match=rf"model\.{key}"):
            from_dict({"method": [{"algorithm": "fedavg"}], "model": {"kind": kind, key: value}})


def test_options_that_do_not_fit_each_other_are_refused():
    with pytest.raises(FedtideError, match="norm = 'mixed' belongs to form = 'cifar', not to 'imagenet'"):
        ResNet18(form="imagenet", norm="mixed")
    line = r"^model.size: found 'tiny', allowed: a patch of 4 that divides both sides of pictures of 32 x 30$"
    with pytest.raises(FedtideError, match=line):
        ViT().build((3, 32, 30), 3)


# -- what a block computes ---------------------------------------------------------------------------------------------


def grouped(x: torch.Tensor, eps: float) -> torch.Tensor:
    """GroupNorm in two groups without scale and offset."""
    rows = x.reshape(len(x), 2, -1)
    out = (rows - rows.mean(2, keepdim=True)) / (rows.var(2, unbiased=False, keepdim=True) + eps).sqrt()
    return out.reshape(x.shape)


def test_a_block_widens_looks_at_each_channel_and_narrows_without_a_relu():
    made = MobileNetV2(norm="group").build(COLOUR, 5).double()
    wider, deep, narrow = (m.weight for m in made.stage3[0].modules() if isinstance(m, nn.Conv2d))
    x = 3 * torch.randn(2, 24, 8, 8, dtype=torch.float64)
    wide = F.relu6(grouped(torch.einsum("oi,nihw->nohw", wider[:, :, 0, 0], x), 1e-5))
    padded = F.pad(wide, (1, 1, 1, 1))
    each = sum(
        deep[:, 0, i, j, None, None] * padded[:, :, i : i + 8 : 2, j : j + 8 : 2] for i in (0, 1, 2) for j in (0, 1, 2)
    )
    out = grouped(torch.einsum("oi,nihw->nohw", narrow[:, :, 0, 0], F.relu6(grouped(each, 1e-5))), 1e-5)
    torch.testing.assert_close(made.stage3[0](x), out)
    assert out.min() < 0
    block = made.stage3[1]
    torch.testing.assert_close(block(out), out + block.body(out))


def test_a_block_keeps_half_of_the_channels_and_shuffles():
    """Channel 2k is channel k of the first half; channel 2k + 1 is channel k of what became of the second."""
    block = ShuffleNetV2(norm="group").build(COLOUR, 5).double().stage2[1]
    x = torch.randn(2, 116, 6, 6, dtype=torch.float64)
    out = block(x)
    torch.testing.assert_close(out[:, 0::2], x[:, :58])
    torch.testing.assert_close(out[:, 1::2], block.body(x[:, 58:]))


def test_the_first_block_of_a_stage_sees_all_channels_twice():
    block = ShuffleNetV2(norm="group").build(COLOUR, 5).double().stage2[0]
    x = torch.randn(2, 24, 8, 8, dtype=torch.float64)
    out = block(x)
    assert out.shape == (2, 116, 4, 4)
    torch.testing.assert_close(out[:, 0::2], block.shortcut(x))
    torch.testing.assert_close(out[:, 1::2], block.body(x))


def test_pre_activation_blocks_compute_what_the_authors_code_does():
    made = ResNet18().build(SMALL, 5).double()
    convs = {name: m.weight for name, m in made.named_modules() if isinstance(m, nn.Conv2d)}

    def conv(name, x):
        return F.conv2d(x, convs[name], padding=convs[name].shape[-1] // 2)

    x = torch.randn(2, 64, 6, 6, dtype=torch.float64)
    first, second = made.stage1
    inner = conv("stage1.0.body.0", x)  # without a norm before it
    torch.testing.assert_close(first(x), x + conv("stage1.0.body.3", F.relu(grouped(inner, 1e-3))))
    inner = conv("stage1.1.body.2", F.relu(grouped(x, 1e-3)))
    torch.testing.assert_close(second(x), x + conv("stage1.1.body.5", F.relu(grouped(inner, 1e-3))))
    inner = conv("stage2.0.body.2", F.relu(grouped(x, 1e-3)))
    shortcut = grouped(conv("stage2.0.shortcut.0", x), 1e-3)
    torch.testing.assert_close(made.stage2[0](x), shortcut + conv("stage2.0.body.5", F.relu(grouped(inner, 1e-3))))
    last = torch.randn(2, 512, 6, 6, dtype=torch.float64)
    after = made.flatten(made.mean(made.relu2(made.norm2(last))))
    torch.testing.assert_close(after, F.relu(grouped(last, 1e-3)).mean((2, 3)))


def test_post_activation_blocks_end_with_relu():
    block = ResNet8(width=2).build(COLOUR, 5).stage2[0]
    conv1, norm1, _, conv2, norm2 = block.body
    x = torch.randn(2, 2, 8, 8)
    inner = norm2(conv2(F.relu(norm1(conv1(x)))))
    torch.testing.assert_close(block(x), F.relu(inner + block.shortcut[1](block.shortcut[0](x))))
    assert block(x).shape == (2, 4, 4, 4)


def torchs_block(block: nn.Module) -> nn.Module:
    """torch's own layer with the weights of one of ours."""
    width, mlp = block.norm1.normalized_shape[0], block.mlp.dense1.out_features
    made = nn.TransformerEncoderLayer(
        width, block.attention.heads, mlp, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True
    ).double()
    a = block.attention
    made.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([a.query.weight, a.key.weight, a.value.weight]),
            "self_attn.in_proj_bias": torch.cat([a.query.bias, a.key.bias, a.value.bias]),
            "self_attn.out_proj.weight": a.out.weight, "self_attn.out_proj.bias": a.out.bias,
            "linear1.weight": block.mlp.dense1.weight, "linear1.bias": block.mlp.dense1.bias,
            "linear2.weight": block.mlp.dense2.weight, "linear2.bias": block.mlp.dense2.bias,
            "norm1.weight": block.norm1.weight, "norm1.bias": block.norm1.bias,
            "norm2.weight": block.norm2.weight, "norm2.bias": block.norm2.bias,
        }
    )  # fmt: skip
    return made


def moved(module: nn.Module) -> nn.Module:
    """The module with all its weights drawn anew, so that none is 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def test_a_block_is_torchs_own():
    block = moved(ViT().build(COLOUR, 5).double()).blocks[1]
    x = torch.randn(3, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(block(x), torchs_block(block)(x))


def test_tokens_are_a_class_token_and_the_patches_row_by_row():
    tokens = moved(ViT().build((3, 8, 12), 5).double()).tokens
    x = pictures((3, 8, 12)).double()
    out = tokens(x) - tokens.positions
    assert out.shape == (4, 7, 32)
    torch.testing.assert_close(out[:, 0], tokens.token[0].expand(4, -1))
    kernel, bias = tokens.patches.weight, tokens.patches.bias
    for place in range(6):
        i, j = divmod(place, 3)
        patch = x[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        torch.testing.assert_close(out[:, 1 + place], torch.einsum("nchw,ochw->no", patch, kernel) + bias)


# -- how they begin and train ------------------------------------------------------------------------------------------


def test_first_weights_of_mobilenet_are_those_of_torchvision():
    """Convolutions N(0, 2 / (channels * pixels)) whatever the groups, head N(0, 0.01^2), biases 0, norms 1 and 0."""
    torch.manual_seed(0)
    made = branched(MobileNetV2(form="imagenet").build(COLOUR, 110), "head", 2)
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
    [ResNet18(), pytest.param(ResNet18(form="cifar", norm="mixed"), marks=pytest.mark.thorough), ResNet8()],
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


def test_first_weights_of_vit_are_those_of_the_authors():
    torch.manual_seed(0)
    made = ViT().build(COLOUR, 200)
    assert not made.tokens.token.any()
    assert float(made.tokens.positions.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(made.tokens.patches.weight.detach().std()) == pytest.approx(48**-0.5, rel=0.05)
    assert float(made.head.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    block = made.blocks[0]
    for linear in (block.attention.query, block.attention.out, block.mlp.dense1, block.mlp.dense2):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.95 * bound < float(linear.weight.detach().abs().max()) <= bound
        assert not linear.bias.any()
    assert not torch.equal(block.attention.query.weight, made.blocks[1].attention.query.weight)


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
