"""The re-weighted softmax by pencil and paper: three classes, a client with labels 0, 0, 0, 1 and one with 2, 2.

The first has the fractions (3/4, 1/4, 0). The loss of a row is the cross-entropy of the logits plus the logarithm of
the fractions, so that the softmax of z is (3 e^z0, e^z1, 0) / (3 e^z0 + e^z1).
"""

import math

import pytest
import torch
from torch import nn

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Shard, Weights
from fedtide.data.population import Population
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.task import Task
from helpers.quadratics import after
from helpers.stages import holding

LABELS = torch.tensor([0, 0, 0, 1])
SHARD = Shard(torch.zeros(4, 1), LABELS, torch.arange(4))


def loss_of(logits: list[list[float]], labels: list[int], loss: WSM = WSM(blend=0.0), shard: Shard = SHARD):
    """Value and gradient in the logits."""
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    value = loss.value(z, torch.tensor(labels), *loss.prepare(shard))
    (gradient,) = torch.autograd.grad(value, z)
    return float(value.detach()), gradient


def test_where_all_logits_are_equal_the_prediction_is_the_fractions():
    """z = 0: softmax (3/4, 1/4, 0). Losses -log 3/4 and -log 1/4, gradients (3/4 - 1, 1/4, 0) and (3/4, 1/4 - 1, 0)."""
    value, gradient = loss_of([[0.0, 0.0, 0.0]], [0])
    assert value == pytest.approx(-math.log(3 / 4), abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([-1 / 4, 1 / 4, 0.0], abs=1e-15)
    value, gradient = loss_of([[0.0, 0.0, 0.0]], [1])
    assert value == pytest.approx(math.log(4), abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([3 / 4, -3 / 4, 0.0], abs=1e-15)


def test_a_row_with_other_logits():
    """z = (log 2, 0, 5), y = 1: 3 * 2 = 6 against 1, softmax (6/7, 1/7, 0), loss log 7. The third is as nothing."""
    value, gradient = loss_of([[math.log(2), 0.0, 5.0]], [1])
    assert value == pytest.approx(math.log(7), abs=1e-14)
    assert gradient[0].tolist() == pytest.approx([6 / 7, -6 / 7, 0.0], abs=1e-14)
    assert gradient[0, 2] == 0.0


def test_half_of_each_weight_is_that_of_equal_fractions():
    """b = 1/2: (3/8 + 1/6, 1/8 + 1/6, 1/6) = (13, 7, 4)/24, z = 0: softmax the same; the loss of y = 1 is log 24/7."""
    value, gradient = loss_of([[0.0, 0.0, 0.0]], [1], WSM(blend=0.5))
    assert value == pytest.approx(math.log(24 / 7), abs=1e-14)
    assert gradient[0].tolist() == pytest.approx([13 / 24, -17 / 24, 4 / 24], abs=1e-14)


def test_a_label_that_is_not_held_has_a_loss_with_a_blend_alone():
    assert loss_of([[0.0, 0.0, 0.0]], [2], WSM(blend=0.5))[0] == pytest.approx(math.log(6), abs=1e-14)
    assert loss_of([[0.0, 0.0, 0.0]], [2])[0] == math.inf


def test_a_blend_of_one_is_cross_entropy():
    """z = (log 2, 0, 0), y = 0: softmax (1/2, 1/4, 1/4), loss log 2."""
    value, gradient = loss_of([[math.log(2), 0.0, 0.0]], [0], WSM(blend=1.0))
    assert value == pytest.approx(math.log(2), abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([-1 / 2, 1 / 4, 1 / 4], abs=1e-15)


def test_smoothed_labels_leave_absent_classes_alone():
    """z = 0, eps 0.2: over classes 0 and 1 softmax (3/4, 1/4), labels (0.9, 0.1) and (0.1, 0.9).

    Loss of a row of class 0: -0.9 log 3/4 - 0.1 log 1/4; gradient (3/4 - 0.9, 1/4 - 0.1, 0).
    """
    z = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    shared, _ = WSM(blend=0.0).prepare(SHARD)
    both = WSM(blend=0.0).each(z, torch.tensor([0, 1]), shared, 0.2).mean()
    first, second = -0.9 * math.log(3 / 4) - 0.1 * math.log(1 / 4), -0.1 * math.log(3 / 4) - 0.9 * math.log(1 / 4)
    assert both.item() == pytest.approx((first + second) / 2)
    (gradient,) = torch.autograd.grad(2 * both, z)
    assert gradient.tolist() == [pytest.approx([-0.15, 0.15, 0.0]), pytest.approx([0.65, -0.65, 0.0])]
    assert gradient[:, 2].tolist() == [0.0, 0.0]


def test_two_clients_at_once():
    """z = 0, y = 1 of the first client: log 4 and (3/4, 1/4 - 1, 0), smoothed as above; the other has one class."""
    loss, other = WSM(blend=0.0), Shard(torch.zeros(2, 1), torch.tensor([2, 2]), torch.arange(2))
    counts = loss.stacked([loss.prepare(shard)[0] for shard in (SHARD, other)])
    z, y = torch.zeros(2, 1, 3, dtype=torch.float64), torch.tensor([[1], [2]])
    found, gradient = loss.graded(z, y, counts)
    assert found.flatten().tolist() == pytest.approx([math.log(4), 0.0], abs=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([3 / 4, -3 / 4, 0.0, 0.0, 0.0, 0.0], abs=1e-14)
    found, gradient = loss.graded(z, y, counts, torch.full((2, 1), 0.2, dtype=torch.float64))
    second = -0.1 * math.log(3 / 4) - 0.9 * math.log(1 / 4)
    assert found.flatten().tolist() == pytest.approx([second, 0.0], abs=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([0.65, -0.65, 0.0, 0.0, 0.0, 0.0], abs=1e-14)


def test_validation_rows_may_count_too():
    """Labels 1, 1, 2, 2 beside: counts (3, 3, 2), z = 0: the loss of y = 2 is log 4, of y = 0 log 8/3."""
    both = Shard(SHARD.x, SHARD.y, SHARD.ids, fetch_val=lambda: Shard(SHARD.x, torch.tensor([1, 1, 2, 2]), SHARD.ids))
    for labels, expected in (([2], math.log(4)), ([0], math.log(8 / 3))):
        value, _ = loss_of([[0.0, 0.0, 0.0]], labels, WSM(blend=0.0, val=True), both)
        assert value == pytest.approx(expected, abs=1e-14)
    assert loss_of([[0.0, 0.0, 0.0]], [0], WSM(blend=0.0), both)[0] == pytest.approx(-math.log(3 / 4), abs=1e-14)


def test_steps_of_sequences_count_by_their_mask():
    """Labels (0, 1 | 0, -) and (0, -): counts (3, 1); z = 0 everywhere: (3 * -log 3/4 + log 4) / 4."""
    y = torch.tensor([[0, 1, 0], [0, 2, 2]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    shard = Shard(torch.zeros(2, 3, dtype=torch.int64), y, torch.arange(2), mask=mask)
    shared, columns = WSM(blend=0.0).prepare(shard)
    value = WSM(blend=0.0).value(torch.zeros(2, 3, 3, dtype=torch.float64), y, shared, columns)
    assert float(value) == pytest.approx((-3 * math.log(3 / 4) + math.log(4)) / 4, abs=1e-14)


# -- a round of FedAvg -------------------------------------------------------------------------------------------------

STEP = LocalTrainer(lr=1.0, batch_size=0)


def population() -> Population:
    """Client 0: x = 1, 1, 1, -1 with labels 0, 0, 0, 1. Client 1: x = 1, 1 with labels 2, 2."""
    x, y = torch.tensor([[1.0], [1.0], [1.0], [-1.0]], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    return holding([(x, y), (x[:2], torch.tensor([2, 2]))], classes=3)


def moved(loss) -> list[float]:
    """The three weights after one round that began at zero."""
    task = Task(lambda: nn.Linear(1, 3, bias=False), loss, torch.float64)
    start = OneModel(Weights({"weight": torch.zeros(3, 1, dtype=torch.float64)}), None)
    algorithm = fedavg(task, STEP, cohort=Everyone())
    return after(algorithm, start, who=population()).weights.params["weight"].flatten().tolist()


def test_a_round():
    """Client 0, all logits 0, softmax (3/4, 1/4, 0). Mean of x (p - onehot) over its rows:

    class 0: (3 * (3/4 - 1) - 3/4) / 4 = -3/8; class 1: (3 * 1/4 - (1/4 - 1)) / 4 = 3/8; class 2: 0.
    Client 1 has one class: softmax (0, 0, 1), gradient 0. Weighted 4 to 2: w = (4/6)(3/8, -3/8, 0) = (1/4, -1/4, 0).
    """
    assert moved(WSM(blend=0.0)) == pytest.approx([1 / 4, -1 / 4, 0.0], abs=1e-15)


def test_the_same_round_with_cross_entropy():
    """Client 0, p = 1/3. Class 0: (3 * -2/3 - 1/3)/4 = -7/12; class 1: (3/3 + 2/3)/4 = 5/12; class 2: (3/3 - 1/3)/4.

    Client 1: (1/3, 1/3, -2/3). w = (4 (7/12, -5/12, -1/6) + 2 (-1/3, -1/3, 2/3)) / 6 = (5/18, -7/18, 1/9).
    """
    assert moved(CrossEntropy()) == pytest.approx([5 / 18, -7 / 18, 1 / 9], abs=1e-15)
