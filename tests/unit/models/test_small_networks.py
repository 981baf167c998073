"""Models: how large they are, what branches share, and which inputs are refused."""

import pytest
import torch
from torch import nn

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.task import Task
from fedtide.models import CNN, LSTM, MLP, CifarCNN, LeafCNN, LeNet5, Linear, Python, ResNet18, SmallCNN, branched
from fedtide.models.networks import sequence
from helpers.networks import COLOUR, GREY, parameters

# -- parameter counts --------------------------------------------------------------------------------------------------

# model, shape, classes, branches of the head, parameters
COUNTS = [
    (CNN(), GREY, 62, 1, 1_206_590),
    (CNN(), GREY, 62, 2, 1_214_588),
    (CNN(dropout=(0.25, 0.5)), GREY, 62, 1, 1_206_590),
    (CNN(dropout=(0.25, 0.5)), GREY, 10, 1, 1_199_882),
    (CNN(), GREY, 10, 1, 1_199_882),
    (LeafCNN(), GREY, 62, 1, 6_603_710),
    (LeafCNN(padding="valid"), GREY, 62, 1, 2_278_334),
    (CifarCNN((128, 32), (1024,), (0.0, 0.8)), COLOUR, 10, 1, 942_634),
    (CifarCNN((32, 256), (256,), (0.0, 0.76)), COLOUR, 10, 1, 1_848_714),
    (CifarCNN((12, 12), (8,), (0.78, 0.78)), COLOUR, 7, 1, 6_995),
    (CifarCNN(), COLOUR, 10, 1, 878_538),
    (CifarCNN((64, 64), (384, 194), response=True), COLOUR, 10, 1, 798_752),
    (CifarCNN((8, 8), (16,)), GREY, 10, 1, 4_050),
    (LeNet5(), GREY, 10, 1, 61_706),
    (SmallCNN(), GREY, 36, 1, 29_252),
    (SmallCNN(), GREY, 36, 2, 31_592),
    (SmallCNN(), GREY, 10, 1, 27_562),
    (SmallCNN(), GREY, 10, 2, 28_212),
    (MLP((64,)), (196,), 26, 1, 14_298),
    (MLP((200,)), GREY, 10, 1, 159_010),
    (Linear(), GREY, 10, 1, 7_850),
    (MLP(()), GREY, 10, 1, 7_850),
    (MLP((5,)), (4,), 3, 1, 43),
]


@pytest.mark.parametrize(("model", "shape", "classes", "branches", "count"), COUNTS, ids=lambda v: str(v)[:40])
def test_a_model_has_the_published_number_of_parameters(model, shape, classes, branches, count):
    made = model.build(shape, classes)
    if branches > 1:
        made = branched(made, "head", branches)
    assert parameters(made) == count


def test_the_layers_of_the_periodic_shift_network():
    """ALGORITHMS 8.1: 320, 18,496, 1,179,776, and 7,998 a head."""
    made = CNN().build(GREY, 62)
    sizes = {name: parameters(layer) for name, layer in made.named_children() if parameters(layer)}
    assert sizes == {"conv1": 320, "conv2": 18_496, "dense": 1_179_776, "head": 7_998}
    assert parameters(branched(CNN().build(GREY, 62), "head", 3)) == 1_206_590 + 2 * 7_998


@pytest.mark.parametrize(("padding", "dense"), [("same", 6_424_576), ("valid", 2_099_200)])
def test_the_layers_of_the_network_of_leaf(padding, dense):
    """ALGORITHMS 8.2: 832, 51,264, (3136 or 1024) * 2048 + 2048, 127,038."""
    made = LeafCNN(padding=padding).build(GREY, 62)
    sizes = {name: parameters(layer) for name, layer in made.named_children() if parameters(layer)}
    assert sizes == {"conv1": 832, "conv2": 51_264, "dense": dense, "head": 127_038}


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)], ids=["apart", "overlapping"])
def test_a_relu_after_the_max_pool_gives_the_bits_of_one_before_it(pool):
    x = torch.randint(-3, 3, (4, 2, 9, 9), generator=torch.Generator().manual_seed(0)).float().requires_grad_()
    factor = torch.randn(*pool(x).shape, generator=torch.Generator().manual_seed(1))
    made = []
    for net in (nn.Sequential(nn.ReLU(), pool), sequence(relu=nn.ReLU(), pool=pool)):
        out = net(x)
        made.append((out, *torch.autograd.grad((out * factor).sum(), x)))
    assert [name for name, _ in net.named_children()] == ["pool", "relu"]
    assert same(*made)


@pytest.mark.parametrize(
    ("model", "smallest"),
    [(SmallCNN(), 9), (LeNet5(), 16), (CNN(channels=(2, 2), dense=3), 6), (LeafCNN(), 4), (LeafCNN("valid"), 16)],
)
def test_the_smallest_picture_that_is_allowed_works(model, smallest):
    assert model.build((1, smallest, smallest), 3)(torch.zeros(2, 1, smallest, smallest)).shape == (2, 3)
    for shape in ((1, smallest - 1, smallest), (1, smallest, smallest - 1)):
        with pytest.raises(FedtideError, match=f"{smallest} x {smallest} or more"):
            model.build(shape, 3)


@pytest.mark.parametrize("model", [SmallCNN(), LeNet5(), CNN(), LeafCNN()], ids=lambda m: m.kind)
@pytest.mark.parametrize("shape", [(4,), (28, 28), (1, 2, 28, 28), ()])
def test_rows_that_are_no_pictures_are_one_clear_line(model, shape):
    with pytest.raises(FedtideError, match=rf"^model.kind: '{model.kind}' needs pictures .* allowed: 'linear', 'mlp'$"):
        model.build(shape, 3)


# -- branches ----------------------------------------------------------------------------------------------------------

# model, shape of a row, classes, the layer that is repeated, parameters of a branch, overhead in percent
PAPER = [
    pytest.param(CNN(), (1, 28, 28), 62, "head", 7_998, 0.7, id="EMNIST"),
    pytest.param(ResNet18(), (3, 24, 24), 110, "head", 56_430, 0.5, id="CIFAR"),
    pytest.param(LSTM(), (20,), 10_004, "projection", 64_416, 1.6, id="Stack Overflow"),
]


@pytest.mark.parametrize(("model", "shape", "classes", "layer", "branch", "percent"), PAPER)
def test_the_second_branch_costs_what_the_paper_says(model, shape, classes, layer, branch, percent):
    """Section 4: 0.7 %, 0.5 % and 1.6 %, as parameters of the branch over those of the network with one."""
    with torch.device("meta"):
        one = model.build(shape, classes)
        single = parameters(one)
        double = parameters(branched(one, layer, 2))
    assert double - single == branch
    assert round(100 * (double - single) / single, 1) == percent


def layered() -> nn.Module:
    model = nn.Sequential()
    for name, layer in (("a", nn.Linear(4, 6)), ("r", nn.ReLU()), ("b", nn.Linear(6, 6)), ("n", nn.LayerNorm(6)),
                        ("c", nn.Linear(6, 3))):  # fmt: skip
        model.add_module(name, layer)
    return model


@pytest.mark.parametrize("layer", ["a", "b", "c"])
def test_one_branch_is_the_plain_model(layer):
    plain, single = Task(layered), Task(lambda: branched(layered(), layer, 1))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    first, second = plain.init(Rng(0)), single.init(Rng(0))
    assert [t.shape for t in first.params.values()] == [t.shape for t in second.params.values()]
    assert same(list(first.params.values()), list(second.params.values()))
    ((logits, _),) = single.outputs(second, x)
    assert torch.equal(logits[0], plain.logits(first, x))


@pytest.mark.parametrize("layer", ["a", "b", "c"])
def test_every_branch_is_the_model_with_its_copy_of_the_layer(layer):
    made = branched(layered(), layer, 3)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    logits, features = made(x)
    copies = made.model.get_submodule(layer).copies
    shared = dict(made.model.named_children())
    for k in range(3):
        alone = nn.Sequential(*(copies[k] if name == layer else part for name, part in shared.items()))
        torch.testing.assert_close(logits[k], alone(x))
    upto = nn.Sequential(*[part for name, part in shared.items()][: list(shared).index(layer)])
    torch.testing.assert_close(features, upto(x))


def test_a_layer_that_is_not_reached_is_told():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(RuntimeError, match="was not reached"):
        branched(Skipping(), "idle", 2)(torch.zeros(1, 4))


@pytest.mark.parametrize("layer", ["hed", "", "model.head", "nothing"])
def test_a_layer_that_does_not_exist_is_one_clear_line(layer):
    with pytest.raises(FedtideError, match=rf"layer: found '{layer}', .*llowed: .*head") as error:
        branched(SmallCNN().build(GREY, 10), layer, 2)
    assert ("did you mean 'head'?" in str(error.value)) == (layer == "hed")


# -- the user's own ----------------------------------------------------------------------------------------------------


def test_a_users_own_model_gets_shape_and_classes_where_it_takes_them(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def both(shape, classes, wide=3):\n"
        "    return nn.Sequential(nn.Linear(shape[0], wide), nn.Linear(wide, classes))\n"
        "def neither():\n"
        "    return nn.Linear(4, 2)\n"
        "def nothing(classes):\n"
        "    return 'a word'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert parameters(Python("own_models:both", {"wide": 5}).build((4,), 3)) == 4 * 5 + 5 + 5 * 3 + 3
    assert parameters(Python("own_models:neither").build((4,), 3)) == 10
    assert isinstance(Python("torch.nn:Linear", {"in_features": 4, "out_features": 3}).build((4,), 3), nn.Linear)
    with pytest.raises(FedtideError, match=r"model.function: 'own_models:nothing' returned str, allowed: nn.Module"):
        Python("own_models:nothing").build((4,), 3)


def test_responses_are_normalized_as_in_the_code_of_adaptive_expert_models():
    """Models.py, CNNIFCA: `LocalResponseNorm(4, alpha=0.001 / 9)` after the first pool and before the second."""
    net = CifarCNN((4, 4), (8,), response=True).build(COLOUR, 10)
    names = [name for name, _ in net.named_modules()]
    norms = [module for module in net.modules() if isinstance(module, nn.LocalResponseNorm)]
    assert [(norm.size, norm.alpha, norm.beta, norm.k) for norm in norms] == [(4, 0.001 / 9, 0.75, 1.0)] * 2
    ordered = ["pool1", "norm1", "norm2", "pool2"]
    assert [name.split(".")[-1] for name in names if name.split(".")[-1] in ordered] == ordered
