"""Layers that stay at home: FedPer, LG-FedAvg, FedBN, FedRep and FedBABU, by hand and against a naive implementation.

By hand the model is h * (u * x) with trunk u and head h, on x = 1, and the loss of a row is (h u - y)^2 / 2. So the
gradient by h is (h u - y) u, and by u it is (h u - y) h. Client 0 has one row with y = 0, client 1 three rows with
y = 4. All begin with u = h = 1 and take one step of 1/2 on all rows.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.algorithms.fedbabu import fedbabu
from fedtide.algorithms.fedbn import fedbn
from fedtide.algorithms.fedper import fedper
from fedtide.algorithms.fedrep import fedrep
from fedtide.algorithms.lg_fedavg import lg_fedavg
from fedtide.cohorts import Everyone
from fedtide.config.schema import Forgetting
from fedtide.core.base import Moment, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.data.partition import Split
from fedtide.learn import LocalTrainer, Task
from fedtide.transforms import KINDS
from fedtide.transforms.at_home import with_home
from fedtide.transforms.robust import Median
from fedtide.transforms.transform import OF_MODELS
from helpers import quadratics
from helpers.stages import holding
from helpers.toys import network_of, played, toy

NOW = Moment(9, 9)
STEP = LocalTrainer(lr=0.5, batch_size=0)
ONE = torch.ones(1, 1, dtype=torch.float64)
TWO = Task(
    lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)),
    quadratics.Half(), torch.float64, begin=Weights({"0.weight": ONE, "1.weight": ONE}), example=ONE,
)  # fmt: skip


def after(algorithm, rounds: int):
    """The numbers of the server, those at home of each client, and the fleet, after some rounds."""
    fleet = quadratics.fleet_of(algorithm)
    *_, (state, _) = quadratics.played(algorithm, fleet, algorithm.init(fleet, Rng(0)), rounds)
    kept = [fleet.engine.memory.read(client, (99, 0)) for client in range(2)]
    homes = [None if row is None else [float(leaf) for leaf in leaves(row["home"])] for row in kept]
    return [float(leaf) for leaf in state.weights.params.values()], homes, (fleet, state)


def test_fedper_by_hand():
    """Round 1: client 0 has h u - y = 1, so h = u = 1/2. Client 1 has -3, so h = u = 5/2. u = (1/2 + 3 * 5/2) / 4 = 2.

    Round 2: client 0 has 1/2 * 2 = 1, so h = 1/2 - 1/2 * 2 = -1/2 and u = 2 - 1/4 = 7/4. Client 1 has 5 - 4 = 1, so
    h = 5/2 - 1 = 3/2 and u = 2 - 5/4 = 3/4. u = (7/4 + 3 * 3/4) / 4 = 1. The head of the server stays 1.
    """
    assert after(fedper(TWO, STEP, cohort=Everyone()), 1)[:2] == ([2.0, 1.0], [[0.5], [2.5]])
    assert after(fedper(TWO, STEP, cohort=Everyone()), 2)[:2] == ([1.0, 1.0], [[-0.5], [1.5]])


def test_lg_fedavg_by_hand():
    """As FedPer with trunk and head in each other's place, because the loss is symmetric in them."""
    assert after(lg_fedavg(TWO, STEP, cohort=Everyone()), 1)[:2] == ([1.0, 2.0], [[0.5], [2.5]])
    assert after(lg_fedavg(TWO, STEP, cohort=Everyone()), 2)[:2] == ([1.0, 1.0], [[-0.5], [1.5]])


def test_fedrep_by_hand():
    """The head first: client 0 has h = 1/2, client 1 h = 5/2. Then the trunk: (1/2) * (1/2), so u = 1 - 1/8 = 7/8;
    and (5/2 - 4) * 5/2 = -15/4, so u = 1 + 15/8 = 23/8. Equal weights: u = 15/8.
    """
    assert after(fedrep(TWO, STEP, head_epochs=1, cohort=Everyone()), 1)[:2] == ([1.875, 1.0], [[0.5], [2.5]])


def test_fedbabu_by_hand():
    """The head stays 1: u = 1/2 and 5/2, so u = 2. Tuning of client 0: h u = 2, so h = 1 - 2 = -1, u = 2 - 1 = 1."""
    algorithm = fedbabu(TWO, STEP, tuning=STEP, cohort=Everyone())
    numbers, _, (fleet, state) = after(algorithm, 1)
    assert numbers == [2.0, 1.0]
    shard = fleet.population.shard(0, NOW)
    tuned = algorithm.adapt(state.weights, None, shard, NOW, Rng(1)).memory
    assert [float(leaf) for leaf in leaves(tuned)] == [1.0, -1.0]


def test_fedbabu_tunes_for_five_epochs_as_in_a_round_by_default():
    shard = quadratics.population().shard(1, NOW)
    one = replace(STEP, lr=0.01)
    methods = [fedbabu(TWO, replace(one, local_steps=1)), fedbabu(TWO, one, tuning=replace(one, epochs=5))]
    first, second = (method.adapt(TWO.begin, None, shard, NOW, Rng(1)).memory for method in methods)
    assert same(first, second)


def normed() -> nn.Module:
    """A norm of one channel, and then the sum of h * z; h = (1, 0), whatever the key."""
    model = nn.Sequential(nn.BatchNorm1d(1, eps=1e-30), nn.Flatten(), nn.Linear(2, 1, bias=False))
    model[2].weight.data = torch.tensor([[1.0, 0.0]])
    return model


def test_fedbn_by_hand():
    """A row is two numbers of one channel. The loss is (h (gamma z + beta) - y)^2 / 2.

    Client 0 has two rows (3, 1): mean 2, deviation 1, z = (1, -1). h z = 1, y = 0, so the error is 1. h = (1, 0) -
    (1, -1) / 2 = (1/2, 1/2), gamma = 1 - 1/2, beta = 0 - 1/2. Running statistics take a tenth: of the mean, 0.2,
    and of the variance, which is 4/3 with one less than its four numbers.

    Client 1 has six rows (1, 5): mean 3, deviation 2, z = (-1, 1). h z = -1, y = 4, so the error is -5. h = (1, 0) -
    (5, -5) / 2 = (-3/2, 5/2), gamma = 1 - 5/2, beta = 5/2. The mean is 0.3, and the variance is of 4 * 12 / 11.

    With equal weights h = (-1/2, 3/2). By rows it would be (-1, 2).
    """
    rows = [([[3.0, 1.0]] * 2, [0] * 2), ([[1.0, 5.0]] * 6, [4] * 6)]
    who = holding([(torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y)) for x, y in rows], classes=5)
    task = Task(normed, quadratics.Half(), torch.float64, example=torch.ones(1, 1, 2, dtype=torch.float64))
    algorithm = fedbn(task, STEP, cohort=Everyone())
    fleet = quadratics.fleet_of(algorithm, who=who)
    (state, _), *_ = quadratics.played(algorithm, fleet, algorithm.init(fleet, Rng(0)), 1)
    served = algorithm.serve(state, torch.tensor([0]))[0].method
    assert list(served.params) == ["2.weight"]
    assert served.params["2.weight"].flatten().tolist() == pytest.approx([-0.5, 1.5])
    homes = [fleet.engine.memory.read(client, (99, 0))["home"] for client in range(2)]
    names = "0.weight", "0.bias", "0.running_mean", "0.running_var"
    values = [[float((home.params | home.buffers)[name]) for name in names] for home in homes]
    assert values == [pytest.approx([0.5, -0.5, 0.2, 0.9 + 0.4 / 3]), pytest.approx([-1.5, 2.5, 0.3, 0.9 + 4.8 / 11])]


# -- an independent naive implementation -------------------------------------------------------------------------------

ROUNDS = 6
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 0.5, "min_samples": 5}}


def steps(model: nn.Module, shard, key: Rng, names: list[str], epochs: int) -> None:
    """Epochs of plain SGD of some parameters, in batches of four."""
    shuffle = key.at("shuffle").torch()
    params = [p for name, p in model.named_parameters() if name in names]
    for _ in range(epochs):
        for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
            loss = F.cross_entropy(model(shard.x.double()[batch]), shard.y[batch])
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.data -= 0.1 * g


def naive(population, model: nn.Module, home: list[str], head_epochs: int | None, uniform: bool):
    """State dicts of a model for all and of layers at home by client; FedRep's turns if there are `head_epochs`."""
    homes = {}
    names = [name for name, _ in model.named_parameters()]
    for r in range(ROUNDS):
        mean, total = dict.fromkeys(names, 0.0), 0.0
        for client in population.arrivals(4, Moment(r, ROUNDS, float(r))).tolist():
            shard, key = population.shard(client, Moment(r, ROUNDS, float(r))), Rng(0).at(r, client, "train")
            own = copy.deepcopy(model)
            own.load_state_dict(homes.get(client, {}), strict=False)
            if head_epochs is None:
                steps(own, shard, key, names, 2)
            else:
                if head_epochs:
                    steps(own, shard, key.at("head"), home, head_epochs)
                steps(own, shard, key, [name for name in names if name not in home], 2)
            homes[client] = {name: own.state_dict()[name].clone() for name in home}
            weight = 1.0 if uniform else len(shard)
            total += weight
            for name in names:
                mean[name] += weight * (own.state_dict()[name] - model.state_dict()[name])
        moved = {n: p if n in home else p + mean[n] / total for n, p in model.state_dict().items()}
        model.load_state_dict(moved)
    return model.state_dict(), homes


HEAD, TRUNK = ["head.weight", "head.bias"], ["dense1.weight", "dense1.bias"]
CASES = {
    "fedper": ("fedper", {}, HEAD, None, False),
    "lg-fedavg": ("lg-fedavg", {}, TRUNK, None, False),
    "fedrep": ("fedrep", {"head_epochs": 3}, HEAD, 3, True),
    "fedrep without steps of the head": ("fedrep", {"head_epochs": 0}, HEAD, 0, True),
    "transform": ("fedavg", {"transforms": [{"kind": "at-home", "layers": ["dense1"]}]}, TRUNK, None, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_naive_implementation_agrees_to_1e_9(case):
    name, options, home, head_epochs, uniform = CASES[case]
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    run = played(toy(name, {"local": local, **options}, rounds=ROUNDS, precision="fp64", data=DATA))
    model = network_of(run.steps[0].received.weights)
    expected, homes = naive(run.host.population, model, home, head_epochs, uniform)
    for key, value in run.state.weights.params.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)
    for client, layers in homes.items():
        kept = run.host.memory.read(client, (99, 0))["home"].params
        assert list(kept) == home
        for key, value in kept.items():
            torch.testing.assert_close(value, layers[key], rtol=1e-9, atol=1e-9)


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg", "fedrep", "fedbabu", "ifca"])
def test_nothing_of_a_layer_at_home_travels(name):
    options = {"transforms": ["at-home"]} if name == "ifca" else {}
    experiment = toy(name, options)
    run = played(experiment, rounds=2)
    home = TRUNK if name == "lg-fedavg" else HEAD
    host = run.host
    payload, _ = host.algorithm.serve(run.state, torch.tensor([0]))
    answer = host.algorithm.works["train"](payload, None, host.population.shard(0, NOW), NOW, Rng(1))
    assert not any(key in str(answer.total) for key in home)
    if name != "fedbabu":  # whose head is the same for all, and is sent down
        assert not any(key in str(payload) for key in home)


def test_fedrep_without_a_step_of_the_head_is_fedbabu_with_equal_weights():
    rep = fedrep(TWO, STEP, head_epochs=0, cohort=Everyone())
    babu = fedbabu(TWO, STEP, cohort=Everyone(), weighting="uniform")
    assert after(rep, 3)[0] == after(babu, 3)[0]


def test_running_statistics_stay_with_their_layer():
    run = played(toy("fedbn", {"home": ["norm"]}, model="python:helpers.toys:normed"), rounds=2)
    kept = next(row for client in range(8) if (row := run.host.memory.read(client, (99, 0))) is not None)["home"]
    assert sorted({*kept.params, *kept.buffers}) == ["1.bias", "1.running_mean", "1.running_var", "1.weight"]
    served = run.host.algorithm.serve(run.state, torch.tensor([0]))[0].method
    assert not any(name.startswith("1.") for name in (*served.params, *served.buffers))


@pytest.mark.parametrize(("options", "said"), [
    ({"home": "hed"}, r"home: found 'hed', did you mean 'head'\? Allowed: head, trunk, dense1$"),
    ({"home": "norm"}, "home: found 'norm', allowed: other layers, because the model has none that normalizes"),
    ({"home": "all"}, "home: found all layers, allowed: some of them"),
    ({"home": ["head", "trunk"]}, "home: found all layers, allowed: some of them"),
    ({"transforms": ["at-home"]}, "'at-home' is not allowed with 'fedper', because layers of it stay at home"),
])  # fmt: skip
def test_layers_that_cannot_stay_are_one_line(options, said):
    with pytest.raises(FedtideError, match=said) as error:
        played(toy("fedper", options), rounds=1)
    assert "\n" not in str(error.value)


def test_a_method_with_layers_at_home_keeps_what_it_refuses_already():
    inner = ft.algorithms.fedavg(Task(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))))
    inner = replace(inner, traits=replace(inner.traits, refuses={"on-need": "it says so"}))
    refuses = with_home(inner, inner.task, ("head",)).traits.refuses
    assert set(refuses) == {*OF_MODELS, "on-need"}
    assert set(KINDS) == {*OF_MODELS, "on-need", "robust", "trusted", "watch"}
    assert refuses["on-need"] == "it says so"


@pytest.mark.parametrize("make", [
    fedper, fedrep, lg_fedavg, lambda task: ft.transforms.apply(ft.algorithms.ifca(task), ft.transforms.AtHome()),
])  # fmt: skip
def test_a_model_of_one_layer_is_refused_in_one_line(make):
    with pytest.raises(FedtideError, match=r"found (no layer|all layers), allowed: some of them, because nothing"):
        make(Task(lambda: torch.nn.Linear(4, 3)))


def test_a_client_is_judged_with_its_layers_and_a_newcomer_with_the_first_ones():
    run = played(toy("fedper", rounds=3))
    algorithm, host = run.host.algorithm, run.host
    payload, _ = algorithm.serve(run.state, torch.arange(8))
    row = next(row for client in range(8) if (row := host.memory.read(client, (99, 0))) is not None)
    x = torch.randn(6, 4)
    told = algorithm.predict(payload, [row, None], x, torch.tensor([1, 0, 0, 1, 1, 0])).told
    whole = run.state.weights
    own = Weights(whole.params | row["home"].params)
    for place, weights in ((0, own), (1, whole)):
        rows = torch.tensor([1, 0, 0, 1, 1, 0]) == place
        torch.testing.assert_close(told[rows], algorithm.task.predict_rows(weights, x[rows]), rtol=1e-6, atol=1e-6)


def test_what_a_client_forgets_is_measured_with_its_own_layers():
    """The model of the only client is that of the round, with the head that it has trained and not the first one."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=g)
    people = ft.population(x, (x[:, 0] > 0).long(), client=torch.zeros(200, dtype=torch.int64), split=Split(test=0.5))
    task = Task(lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    method = fedper(task, LocalTrainer(lr=0.5), cohort=Everyone())
    run = ft.simulate(method, people, rounds=3, forgetting=Forgetting(rounds=(2,), part="test"))
    judged = run.lines[-1]["scores"]["train_clients"]["accuracy"]
    assert run.forgetting[0]["accuracy"]["local"] == [[pytest.approx(judged)]]
    assert judged > 0.85


@pytest.mark.parametrize(
    ("name", "why"),
    [("fedcurv", "clients take their own part"), ("scaffold", "its control variate"), ("feddyn", "the server's mean")],
)
def test_no_sum_is_robust_of_which_clients_keep_their_part(name, why):
    for transform in (ft.transforms.Robust(Median(), 1), ft.transforms.Trusted()):
        with pytest.raises(FedtideError, match=f"is not allowed with '{name}', because {why}"):
            ft.transforms.apply(getattr(ft.algorithms, name)(TWO), transform)
