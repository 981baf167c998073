"""A user's own loss: any function of outputs and labels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals
from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.runs.build import host_of
from helpers.toys import played, toy


def trained(task: ft.Task) -> dict:
    people = ft.population(torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 2, ft.data.IID(clients=4))
    algorithm = ft.algorithms.fedavg(task, ft.LocalTrainer(lr=0.1, batch_size=5), cohort=ft.cohorts.Arrivals(2))
    return ft.simulate(algorithm, people, rounds=3).state.weights.params


def test_a_function_or_a_module_of_torch_is_a_loss():
    expected = trained(ft.Task(lambda: nn.Linear(4, 2)))
    assert same(trained(ft.Task(lambda: nn.Linear(4, 2), F.cross_entropy)), expected)
    assert same(trained(ft.Task(lambda: nn.Linear(4, 2), nn.CrossEntropyLoss())), expected)
    assert not same(trained(ft.Task(lambda: nn.Linear(4, 2), nn.CrossEntropyLoss(label_smoothing=0.5))), expected)


def test_a_module_in_the_place_of_the_function_that_makes_it_is_one_clear_line():
    with pytest.raises(FedtideError, match="found 'Linear', allowed: a function that makes a fresh module"):
        ft.Task(nn.Linear(4, 2))


@pytest.mark.parametrize(("rounds", "every"), [(-1, 1), (2, 0)])
def test_impossible_rounds_are_one_clear_line(rounds, every):
    people = ft.population(torch.zeros(20, 4), torch.arange(20) % 2, ft.data.IID(clients=4))
    with pytest.raises(FedtideError, match=r"found -1, allowed: 1 or more|eval_every: found 0, allowed: 1 or more"):
        ft.simulate(ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, 2))), people, rounds=rounds, eval_every=every)


@pytest.mark.parametrize(("loss", "said"), [
    (lambda outputs, y: 3.0, "loss: found 3.0, allowed: a tensor without dimensions"),
    (lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), r"loss: shape: found \(\d+,\), allowed"),
    (lambda outputs, y: torch.tensor(1.0), r"loss: found tensor\(1\.\), allowed: .* follows from the outputs"),
    (lambda outputs, y: {}["weight"], "loss: it failed with KeyError: 'weight'"),
    (lambda outputs: outputs.sum(), "loss: it failed with TypeError: .* positional argument"),
])  # fmt: skip
def test_a_loss_by_which_nothing_can_be_trained_is_one_clear_line(loss, said):
    with pytest.raises(FedtideError, match=said) as error:
        trained(ft.Task(lambda: nn.Linear(4, 2), loss))
    assert "\n" not in str(error.value)


# -- dropout knows only the global generator ---------------------------------------------------------------------------


def model(drop: float) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(drop), torch.nn.Linear(16, 3))


def run(seed: int = 0, disturb: bool = False, drop: float = 0.5):
    """Two rounds with a model that drops some of its hidden units."""
    experiment = toy("fedavg")
    host = host_of(experiment, experiment.method[0], 0)
    algorithm = fedavg(Task(lambda: model(drop)), LocalTrainer(lr=0.5, batch_size=4), cohort=Arrivals(4))
    if disturb:
        torch.manual_seed(12345)
        torch.rand(7)
    before = torch.get_rng_state()
    made = played(experiment, host=replace(host, algorithm=algorithm), rounds=2, seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    return made


def test_dropout_is_the_same_for_the_same_key_whatever_else_was_drawn():
    assert same(run().state, run(disturb=True).state)


def test_dropout_matters():
    assert not same(run().state, run(drop=0.0).state)


def test_nothing_is_dropped_when_it_is_judged():
    made = run()
    clients = made.host.population.clients
    first, second = (made.fleet.score(made.state.weights, clients) for _ in range(2))
    assert same(first, second)


# -- modules are looked at before the first round ----------------------------------------------------------------------


X, Y = torch.arange(160.0).reshape(40, 4) / 160, torch.arange(40) % 2
OWNERS = {"client": torch.arange(40) % 4, "client_names": tuple("abcd")}


def simulated(build, rows: ft.data.Rows | None = None, rounds: int = 3, **options):
    people = ft.population(rows or ft.data.Rows("own", X, Y, 2, **OWNERS))
    algorithm = ft.algorithms.fedavg(ft.Task(build, **options), ft.LocalTrainer(lr=0.1), cohort=4)
    return ft.simulate(algorithm, people, rounds=rounds)


class Net(nn.Module):
    """A linear layer, and what a test adds to it."""

    def __init__(self, add=lambda net: None, use=lambda net, outputs: outputs) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 2), use
        add(self)

    def forward(self, x):
        return self.use(self, self.layer(x))


SHARED = nn.Linear(4, 2)


@pytest.mark.parametrize(("build", "said"), [
    (lambda: SHARED, "the same module in two calls"),
    (lambda: nn.Sequential(nn.Linear(4, 4), SHARED), "the same '1.weight' in two calls"),
    (lambda: Net(lambda net: setattr(net, "w", nn.Parameter(torch.ones(2, dtype=torch.cfloat)))), "'w' is complex"),
    (lambda: Net(lambda net: setattr(net, "w", nn.Parameter(torch.ones(2) / 0))), "parameter 'w': found 'a number"),
    (lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)), "found 'LazyLinear'"),
    (lambda: Net(use=lambda net, outputs: (outputs, outputs)), "returns a tuple"),
    (lambda: Net(use=lambda net, outputs: {"logits": outputs}), "returns a dict"),
    (lambda: 3, "model: found 'int', allowed: a torch.nn.Module"),
    (lambda: Net(lambda net: net.register_buffer("low", torch.tensor(float("inf"))), lambda net, outputs: (
        net.low.fill_(0), outputs)[1]), "buffer 'low' begins infinite and changes"),
])  # fmt: skip
def test_a_module_that_cannot_be_trained_is_one_clear_line(build, said):
    before = [value.clone() for value in SHARED.parameters()]
    with pytest.raises(FedtideError, match=said) as error:
        simulated(build)
    assert "\n" not in str(error.value)
    assert same(before, [value.detach() for value in SHARED.parameters()])


def test_a_mask_of_minus_infinity_plays_and_stays():
    def mask(net) -> None:
        net.register_buffer("mask", torch.triu(torch.full((2, 2), -torch.inf), 1))

    plain = simulated(Net)
    masked = simulated(lambda: Net(mask, lambda net, outputs: outputs + net.mask.softmax(1).sum() * 0))
    assert same(masked.state.weights, plain.state.weights)
    assert [line["answered"] for line in masked.lines] == [4, 4, 4]
    assert masked.model.mask.isinf().sum() == 1


def test_a_frozen_part_may_be_shared():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    one, other = (simulated(lambda: nn.Sequential(frozen, nn.Linear(4, 2))).state.weights for _ in range(2))
    assert same(one, other)


@pytest.mark.parametrize(("build", "said"), [
    (lambda: nn.Linear(4, 2).double(), "converted from float64 to float32"),
    (lambda: nn.Linear(4, 7), "7 outputs for 2 classes"),
    (lambda: nn.Linear(4, 2).half(), "converted from float16 to float32"),
    (lambda: nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), "sum to one"),
    (lambda: Net(lambda net: setattr(net, "scale", torch.ones(2))), "tensor 'scale' is no parameter or buffer"),
    (lambda: Net(lambda net: setattr(net, "more", [nn.Linear(2, 2)])), "'more' are not trained"),
])  # fmt: skip
def test_what_a_module_may_not_mean_is_said_once(capsys, build, said):
    simulated(build)
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("build", [
    lambda: nn.Linear(4, 2), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
    lambda: Net(lambda net: setattr(net, "seen", [net.layer])),
])  # fmt: skip
def test_of_a_sound_module_nothing_is_said(capsys, build):
    simulated(build)
    assert capsys.readouterr().err == ""


def test_a_module_of_another_type_keeps_it_if_the_task_says_so(capsys):
    weights = simulated(lambda: nn.Linear(4, 2).double(), dtype=torch.float64).state.weights
    assert weights.params["weight"].dtype == torch.float64
    assert capsys.readouterr().err == ""


def test_labels_from_1_are_said():
    rows = ft.data.Rows("own", X, torch.arange(40) % 3 + 1, 4, **OWNERS)
    with pytest.raises(FedtideError, match="labels begin at 1: class 0 has no rows"):
        simulated(lambda: nn.Linear(4, 3), rows)


IDS = torch.arange(120).reshape(40, 3) % 50


@pytest.mark.parametrize("ids", [IDS, IDS.flip(0)])  # the first rows fit, or do not
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_ids_beyond_an_embedding_are_told_before_the_first_round(kind, ids):
    width = 2 if kind is nn.EmbeddingBag else 6
    build = lambda entries: lambda: nn.Sequential(kind(entries, 2), nn.Flatten(), nn.Linear(width, 2))  # noqa: E731
    rows = ft.data.Rows("ids", ids, Y, 2, **OWNERS)
    assert simulated(build(50), rows).model(ids[:3]).shape == (3, 2)
    for entries in (49, 30):
        with pytest.raises(FedtideError, match=rf"rows have the id \d\d, allowed: 0 to {entries - 1}"):
            simulated(build(entries), rows)
    with pytest.raises(FedtideError, match=r"found 'float32', but nn.Embedding.* takes whole numbers"):
        simulated(build(50), ft.data.Rows("ids", IDS.float(), Y, 2, **OWNERS))


def test_a_model_may_read_ids_from_floats():
    """Rows that are made up are such ids, too."""

    def build(size):
        return lambda: Net(lambda net: setattr(net, "layer", nn.Sequential(AsIds(), nn.Embedding(size, 2))))

    rows = ft.data.Rows("ids", IDS[:, :1].float(), Y, 2, **OWNERS)
    assert simulated(build(50), rows).model(IDS[:3, :1].float()).shape == (3, 2)
    with pytest.raises(FedtideError, match="rows have the id"):
        simulated(build(1), rows)


class AsIds(nn.Module):
    def forward(self, x):
        return x[:, 0].long()
