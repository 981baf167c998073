"""Vision transformers: their size, what they compute beside torch's own layers, how they start and train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.models import ResNet18, ViT, branched
from helpers.networks import COLOUR, LARGE, SMALL, built, parameters, pictures

TINY, BASE = ViT(), ViT(size="b/16")


# -- parameter counts (ALGORITHMS 8.4, 8.5) ----------------------------------------------------------------------------


def test_vit_b16_has_the_published_number_of_parameters():
    made = built(BASE, LARGE, 1000)
    assert parameters(made) == 86_567_656
    assert parameters(made) - parameters(made.head) == 85_798_656
    assert len(made.blocks) == 12
    assert [parameters(block) for block in made.blocks] == [7_087_872] * 12


def by_hand(shape, classes, patch=4, depth=2, width=32, mlp=128):
    tokens = 1 + shape[1] * shape[2] // patch**2
    start = shape[0] * patch**2 * width + width + width + tokens * width
    block = 4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width
    return start + depth * block + 2 * width + (width + 1) * classes


OPTIONS = [
    {}, {"patch": 8}, {"patch": 2}, {"depth": 1}, {"width": 64, "mlp": 256}, {"mlp": 48}, {"depth": 3, "patch": 16},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "classes"), [(COLOUR, 10), ((1, 16, 48), 3)])
def test_the_number_of_parameters_follows_from_the_options(options, shape, classes):
    assert parameters(built(ViT(**options), shape, classes)) == by_hand(shape, classes, **options)


def test_what_is_not_said_is_that_of_the_size():
    wide = built(ViT(width=48), COLOUR, 10)
    assert wide.blocks[0].mlp.dense1.out_features == 4 * 48
    assert wide.blocks[0].attention.heads == 4
    assert len(built(ViT(size="b/16", depth=2), LARGE, 10).blocks) == 2


def test_resnet18_in_the_imagenet_form_has_the_size_that_fielding_trains():
    assert parameters(built(ResNet18(form="imagenet"), LARGE, 62)) == 11_208_318
    assert parameters(built(ResNet18(form="imagenet", norm="batch"), LARGE, 62)) == 11_208_318


# -- shapes and mistakes -----------------------------------------------------------------------------------------------


def test_a_patch_that_leaves_something_over_is_one_clear_line():
    line = r"^model.patch: found 5, allowed: a divisor of both sides of pictures of 32 x 30$"
    with pytest.raises(FedtideError, match=line):
        ViT(patch=5).build((3, 32, 30), 3)


def test_a_file_may_name_it_and_mistakes_are_refused():
    raw = {"method": [{"algorithm": "fedavg"}], "model": "vit"}
    assert from_dict(raw).model == ViT("tiny", None, None, None, None, None, 0.0)
    assert from_dict({**raw, "model": {"kind": "vit", "size": "b/16", "dropout": 0.1}}).model == ViT(
        "b/16", dropout=0.1
    )
    for key, value in {"size": "l/16", "depth": 0, "patch": 2.5, "dropout": 1.0, "norm": "batch"}.items():
        with pytest.raises(FedtideError, match=rf"model\.{key}"):
            from_dict({**raw, "model": {"kind": "vit", key: value}})
    with pytest.raises(FedtideError, match=r"heads = 5 with width = 32; allowed: heads that divide the width$"):
        from_dict({**raw, "model": {"kind": "vit", "heads": 5}})
    with pytest.raises(FedtideError, match="heads = 4 with width = 30"):
        ViT(width=30)


# -- what it computes --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("heads", [1, 4])
def test_a_block_is_torchs_own(heads):
    block = moved(ViT(heads=heads).build(COLOUR, 5).double()).blocks[1]
    x = torch.randn(3, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(block(x), torchs_block(block)(x))


def test_tokens_are_a_class_token_and_the_patches_row_by_row():
    tokens = moved(ViT(patch=4).build((3, 8, 12), 5).double()).tokens
    x = pictures((3, 8, 12)).double()
    out = tokens(x) - tokens.positions
    assert out.shape == (4, 7, 32)
    torch.testing.assert_close(out[:, 0], tokens.token[0].expand(4, -1))
    kernel, bias = tokens.patches.weight, tokens.patches.bias
    for place in range(6):
        i, j = divmod(place, 3)
        patch = x[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        torch.testing.assert_close(out[:, 1 + place], torch.einsum("nchw,ochw->no", patch, kernel) + bias)


def test_the_feature_is_the_class_token_after_the_last_norm():
    made = branched(moved(TINY.build(SMALL, 5)), "head", 3).eval()
    logits, features = made(pictures(SMALL))
    assert (logits.shape, features.shape) == ((3, 4, 5), (4, 32))
    net = made.model
    tokens = net.blocks(net.tokens(pictures(SMALL)))
    torch.testing.assert_close(features, net.norm(tokens)[:, 0])
    for k, head in enumerate(net.head.copies):
        torch.testing.assert_close(logits[k], features @ head.weight.T + head.bias)


def test_dropout_stands_after_positions_attention_and_dense_layers():
    made = ViT(dropout=0.5).build(SMALL, 10)
    assert [m.p for m in made.modules() if isinstance(m, nn.Dropout)] == [0.5] * 7
    x = pictures(SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(made(x), made(x))
    made.eval()
    assert torch.equal(made(x), made(x))


# -- how it starts and trains ------------------------------------------------------------------------------------------


def test_first_weights_are_those_of_the_authors():
    torch.manual_seed(0)
    made = ViT(width=64, patch=8).build(COLOUR, 200)
    assert not made.tokens.token.any()
    assert float(made.tokens.positions.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(made.tokens.patches.weight.detach().std()) == pytest.approx(192**-0.5, rel=0.05)
    assert float(made.head.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    block = made.blocks[0]
    for linear in (block.attention.query, block.attention.out, block.mlp.dense1, block.mlp.dense2):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.95 * bound < float(linear.weight.detach().abs().max()) <= bound
        assert not linear.bias.any()
    assert not torch.equal(block.attention.query.weight, made.blocks[1].attention.query.weight)
