"""What clients make of K models for themselves: choices, mixtures, ensembles, fine-tuning and their own models."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtide as ft
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM
from fedtide.learn.schedules import Constant, Steps
from fedtide.learn.task import Task
from fedtide.models import MLP, Linear
from fedtide.personal.client_networks import Networks, train_early_stopping
from fedtide.personal.ways import (
    Alone,
    Choice,
    Ensemble,
    FineTuned,
    Mixed,
    Mixture,
    merge_networks,
    predict_personal,
    split_for_gate,
    split_networks,
)
from helpers import quadratics

NOW, KEY = Moment(5, 6), Rng(0).at(5, 1, "adapt")
FEW = LocalTrainer(lr=0.05, epochs=6, batch_size=4, optimizer="adamw")
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def task_of(classes: int = 4) -> Task:
    return Task(lambda: nn.Linear(3, classes), dtype=torch.float64, example=X[:1])


TASK = task_of()
NETS = Networks(TASK)
MODELS = [TASK.init(Rng(seed)) for seed in (1, 2)]


def shard(rows: int = 12, val: int = 6) -> Shard:
    y = torch.arange(rows) % 4
    judged = Shard(X[:val] + 0.1, torch.arange(val) % 4, torch.arange(100, 100 + val))
    return Shard(X[:rows], y, torch.arange(rows), fetch_val=(lambda: judged) if val else None)


def kept_of(gate: list[float]) -> dict[str, Weights]:
    """A gate that gives every row these logits, and an expert of the client's own."""
    weights = {
        "head.weight": torch.zeros(3, 3, dtype=torch.float64),
        "head.bias": torch.tensor(gate, dtype=torch.float64),
    }
    return {"own": TASK.init(Rng(9)), "gate": Weights(weights)}


STILL = Mixture(gate=Linear())


def log_p(weights: Weights) -> torch.Tensor:
    return F.log_softmax(TASK.logits(weights, X), -1)


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_gate_that_trusts_one_expert_gives_exactly_its_prediction(expert):
    gate = [-1e9] * 3
    gate[expert] = 0.0
    kept = kept_of(gate)
    found = STILL.predict(NETS, MODELS, kept, X)
    torch.testing.assert_close(found.told, log_p([kept["own"], *MODELS][expert]), rtol=1e-12, atol=1e-12)
    assert found.choice.unique().tolist() == [expert]


def test_an_even_gate_is_the_ensemble_of_probabilities():
    kept = kept_of([0.0, 0.0, 0.0])
    found = STILL.predict(NETS, MODELS, kept, X).told
    torch.testing.assert_close(found, Ensemble().predict(NETS, MODELS, {"own": kept["own"]}, X).told)
    by_hand = sum(log_p(w).exp() for w in [kept["own"], *MODELS]) / 3
    torch.testing.assert_close(found.exp(), by_hand)


def test_an_ensemble_of_logits_is_the_softmax_of_their_sum():
    own = TASK.init(Rng(9))
    found = Ensemble(of="logits").predict(NETS, MODELS, {"own": own}, X).told
    expected = F.log_softmax(sum(TASK.logits(w, X) for w in [own, *MODELS]), -1)
    torch.testing.assert_close(found, expected)


def test_the_loss_of_a_gate_by_hand():
    """Experts that give the label 0.5 and 0: with even weights -log(1/4), finite though one of them says impossible."""
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    table = torch.tensor([[math.log(0.5), -1e9]], dtype=torch.float64)
    value = Mixed(()).value(logits, torch.tensor([0]), None, (table,))
    assert value.item() == pytest.approx(math.log(4))
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.tolist() == [pytest.approx([-0.5, 0.5])]


def test_training_a_gate_leaves_the_experts_alone_and_is_no_worse_than_the_best_of_them():
    before = detached(MODELS)
    made = Mixture(
        gate=MLP(hidden=(8,)), gating=LocalTrainer(lr=0.05, epochs=150, batch_size=0, optimizer="adamw"), solver=FEW
    )
    rows = shard(val=0)
    kept = made.fit(NETS, MODELS, rows, NOW, KEY)
    assert same(before, MODELS)
    assert set(kept) == {"own", "gate"}
    mixed = made.predict(NETS, MODELS, kept, X).told
    loss = float(F.nll_loss(mixed, rows.y))
    assert loss <= min(float(F.nll_loss(log_p(w), rows.y)) for w in [kept["own"], *MODELS]) + 1e-3


def test_tuned_experts_are_the_clients_own():
    made = Mixture(gate=Linear(), gating=FEW, solver=FEW, tune=True)
    before = detached(MODELS)
    kept = made.fit(NETS, MODELS, shard(), NOW, KEY)
    assert same(before, MODELS)
    gate, *experts = split_networks(kept["mixture"], 4)
    assert not any(same(tuned, model) for tuned, model in zip(experts[1:], MODELS, strict=True))
    still = Mixture(gate=Linear()).predict(NETS, experts[1:], {"own": experts[0], "gate": gate}, X).told
    torch.testing.assert_close(made.predict(NETS, MODELS, kept, X).told, still)


def test_gate_and_experts_as_one_network_are_what_they_are_apart():
    whole, kept = NETS.mixture(None, Linear(), 2), kept_of([0.2, 0.1, -0.4])
    together = merge_networks(
        {"gate": kept["gate"], "experts.0": kept["own"], "experts.1": MODELS[0], "experts.2": MODELS[1]}
    )
    torch.testing.assert_close(whole.logits(together, X), STILL.predict(NETS, MODELS, kept, X).told)
    assert same(split_networks(together, 4), [kept["gate"], kept["own"], *MODELS])


def test_the_model_that_fits_best_is_chosen_and_tuned_from_there():
    rows = shard()
    losses = [float(F.cross_entropy(TASK.logits(w, rows.val.x), rows.val.y)) for w in MODELS]
    best = losses.index(min(losses))
    assert int(Choice().fit(NETS, MODELS, rows, NOW, KEY)["model"]) == best
    kept = FineTuned(solver=FEW).fit(NETS, MODELS, rows, NOW, KEY)
    assert int(kept["model"]) == best
    tuned = float(F.cross_entropy(TASK.logits(kept["own"], rows.val.x), rows.val.y))
    assert tuned <= losses[best]
    still = FineTuned(solver=LocalTrainer(lr=1e-12, epochs=1)).fit(NETS, MODELS, rows, NOW, KEY)["own"]
    torch.testing.assert_close(still.params, MODELS[best].params, rtol=0, atol=1e-9)


def test_a_network_of_its_own_begins_as_it_is_told():
    """Glorot's weights come with biases of 0, torch's do not."""
    for init, zero in (("glorot", True), ("torch", False)):
        weights = NETS.of(MLP(hidden=(4,), init=init)).init(Rng(0))
        assert all(not value.any() for name, value in weights.params.items() if name.endswith("bias")) == zero


def test_a_network_of_its_own_has_as_many_classes():
    own = NETS.of(MLP(hidden=(5,)))
    assert own.logits(own.init(Rng(0)), X).shape == (12, 4)
    kept = Alone(solver=FEW, model=MLP(hidden=(5,))).fit(NETS, MODELS, shard(), NOW, KEY)
    assert Alone(model=MLP(hidden=(5,))).predict(NETS, MODELS, kept, X).told.shape == (12, 4)
    with pytest.raises(FedtideError, match=r"^Task\.example: found None"):
        Networks(Task(lambda: nn.Linear(3, 2))).of(MLP())


def test_a_client_without_rows_has_no_expert_of_its_own_and_all_weight_is_on_the_usual_model():
    found = predict_personal(STILL, NETS, MODELS, 0, [None], X[:2], torch.tensor([0, 0]))
    torch.testing.assert_close(found.told, log_p(MODELS[0])[:2])
    assert (found.choice.tolist(), found.weights.tolist()) == ([1, 1], [[0, 1, 0]] * 2)


@pytest.mark.parametrize(
    ("rows", "held", "sizes"),
    [(12, 0.25, (9, 3)), (2, 0.01, (1, 1)), (2, 0.9, (1, 1)), (1, 0.5, (1, 1)), (5, 0.0, (5, 5))],
)
def test_rows_for_expert_and_gate_are_apart_where_there_are_enough(rows, held, sizes):
    expert, gate = split_for_gate(shard(rows), held, KEY)
    assert (len(expert), len(gate)) == sizes
    if held and rows > 1:
        assert not set(expert.ids.tolist()) & set(gate.ids.tolist())
        assert expert.val is not None


def test_pictures_are_not_changed_at_random_where_experts_have_judged_them_before():
    changed = LocalTrainer(augment=({"kind": "flip"},))
    with pytest.raises(FedtideError, match=r"gating\.augment: found some, allowed: none without `tune`"):
        Mixture(gating=changed)
    assert Mixture(gating=changed, tune=True).gating.augment


def test_the_whole_mixture_is_trained_by_its_likelihood_whatever_the_federation_minimizes():
    """One row of three has class 1: its fraction, 1/3, is not in the loss."""
    task = Task(lambda: nn.Linear(2, 2), WSM(blend=0.0), example=torch.zeros(1, 2))
    made = Networks(task).mixture(None, MLP(hidden=(2,)), 1)
    rows = Shard(torch.zeros(3, 2), torch.tensor([0, 0, 1]), torch.arange(3))
    log_p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]]).log()
    found = made.loss.value(log_p, rows.y, *made.loss.prepare(rows))
    assert float(found) == pytest.approx(-math.log(0.9 * 0.6 * 0.5) / 3)


def test_a_gate_leaves_the_clients_own_expert_as_it_was_trained_alone():
    rows = shard()
    alone = Alone(solver=FEW).fit(NETS, MODELS, rows, NOW, KEY)["own"]
    assert same(Mixture(solver=FEW, gating=FEW, gate=Linear()).fit(NETS, MODELS, rows, NOW, KEY)["own"], alone)


@pytest.mark.parametrize("upper", [{}, {"epochs": 7}, {"local_steps": 2}, {"local_steps": 33}])
def test_training_that_ends_between_two_looks_is_judged_at_its_end(upper):
    """Three steps are an epoch, and validation rows are looked at every five epochs: 1, 7, 2/3 and 11 end between."""
    rows = Shard(X, torch.arange(12) % 4, torch.arange(12), fetch_val=lambda: rows)
    solver = LocalTrainer(lr=0.05, batch_size=4, **upper)
    found, _ = train_early_stopping(TASK, solver, TASK.loss, MODELS[0], rows, NOW, KEY)
    assert same(found, solver(TASK, TASK.loss, MODELS[0], rows, NOW, KEY).weights)


# -- training of a client before it is judged --------------------------------------------------------------------------


FADING = Steps(at=(0.5,), factor=1e-6)


@pytest.mark.parametrize("method", [ft.algorithms.fedbabu, ft.algorithms.fedrep, ft.algorithms.fesem])
def test_a_newcomer_is_trained_with_the_rate_without_its_schedule(method):
    """The schedule is over the rounds of the run, and this is none of them."""
    task = Task(lambda: MLP((4,)).build((3,), 4), dtype=torch.float64, example=X[:1])
    made = []
    for schedule in (Constant(), FADING):
        algorithm = method(task, LocalTrainer(lr=0.5, batch_size=4, lr_schedule=schedule))
        served, _ = algorithm.serve(algorithm.init(quadratics.fleet_of(algorithm), Rng(0)), torch.tensor([0]))
        if isinstance(served, list):  # of a cluster each
            served = replace(served[0], models=tuple(task.init(Rng(seed)) for seed in (1, 2)))
        made.append(algorithm.adapt(served, None, shard(), NOW, KEY))
    assert same(made[0], made[1])
