"""What every network for pictures keeps to, whatever its layers: a table of networks, and the tests of all of them."""

from __future__ import annotations

import pytest
import torch

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, leaves, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Scratch, Task
from fedtide.models import MobileNetV2, ResNet8, ResNet18, ShuffleNetV2, ViT, branched
from helpers.networks import COLOUR, GREY, SMALL, built, parameters, pictures

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


def test_what_the_head_sees_makes_the_logits(learner):
    made = branched(learner[0].build(SMALL, 5), "head", 3).eval()
    logits, features = made(pictures(SMALL))
    for k, head in enumerate(made.model.head.copies):
        torch.testing.assert_close(logits[k], features @ head.weight.T + head.bias)


def test_a_row_sees_its_batch_under_batch_norm_alone(network):
    alone = getattr(network, "norm", "group") == "group"
    assert Scratch(built(network, COLOUR, 10), torch.float32, False, "meta").needs_pairs != alone
    made, x = network.build(SMALL, 10).eval().double(), pictures(SMALL, 3).double()
    torch.testing.assert_close(made(x), torch.cat([made(row) for row in x.split(1)]))


def test_whole_copies_start_differently(learner):
    """All that starts from random numbers: what starts as 0 or 1 is the same."""
    made = branched(learner[0].build(SMALL, 5), "*", 2)
    first, second = (dict(copy.named_parameters()) for copy in made.model.copies)
    for name, value in first.items():
        fixed = bool((value == 0).all() or (value == 1).all())
        assert torch.equal(value, second[name]) == fixed, name


def test_the_same_key_starts_the_same_network_and_another_key_another(learner):
    def build():
        return branched(learner[0].build(SMALL, 10), "head", 2)

    task, again = Task(build), Task(build, channels_last=True)
    assert same(task.init(Rng(0)), again.init(Rng(0)))
    assert not same(task.init(Rng(0)), task.init(Rng(1)))


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


@pytest.mark.parametrize(
    ("network", "rate"),
    [
        (ResNet8(width=4), 0.1), (MobileNetV2(norm="group", dropout=0.0), 0.01), (ShuffleNetV2(norm="group"), 0.03),
        (ViT(), 0.1),
    ],
    ids=lambda v: getattr(v, "kind", ""),
)  # fmt: skip
def test_training_lowers_the_loss(network, rate):
    task = Task(lambda: network.build((3, 16, 16), 4))
    weights, y = task.init(Rng(0)), torch.arange(16) % 4
    noise = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    shard = Shard(noise[16:][y] + 0.3 * noise[:16], y, torch.arange(16))
    solver = LocalTrainer(lr=rate, batch_size=16, epochs=15)
    trained = detached(solver(task, task.loss, weights, shard, Moment(0, 1), Rng(0)).weights)
    assert task.objective(trained, shard) < 0.5 * task.objective(weights, shard)
