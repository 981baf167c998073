"""IFCA by pencil and paper: two softmax regressions on x = 1, three clients with one row or two.

Model 0 starts with the weights (log 3, 0), so that it says (3/4, 1/4); model 1 with (0, log 3), so (1/4, 3/4). Client 0
has two rows of class 0, clients 1 and 2 a row of class 1 each: client 0 fits model 0 best, the others model 1. The
gradient of a row is the prediction minus one-hot: (-1/4, 1/4) for client 0 and (1/4, -1/4) for the others.
"""

import math

import pytest
import torch
from torch import nn

from fedtide.algorithms.ifca import State, ifca
from fedtide.cohorts import Everyone
from fedtide.core.base import Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.quadratics import after, population
from helpers.stages import holding

LOG3 = math.log(3)
TASK = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)
STEP = LocalTrainer(lr=1.0, batch_size=0)


def model(*weights: float) -> Weights:
    return Weights({"weight": torch.tensor(weights, dtype=torch.float64)[:, None]})


def moved(start, who=None, **options) -> list[list[float]]:
    """The weights of every model after one round of everybody."""
    state = State(tuple(start), (None,) * len(start), torch.zeros(len(start), dtype=torch.float64))
    algorithm = ifca(TASK, STEP, clusters=len(start), cohort=Everyone(), **options)
    made = after(algorithm, state, who=who or population([[0, 0], [1], [1]]))
    return [each.params["weight"].flatten().tolist() for each in made.weights]


TWO = (model(LOG3, 0), model(0, LOG3))
GRADIENT = {"variant": "gradient", "weighting": "uniform"}


def test_averaging_moves_each_model_by_the_mean_of_those_who_chose_it():
    """All of its members do the same step here: model 0 by (1/4, -1/4), model 1 by (-1/4, 1/4)."""
    assert moved(TWO) == [pytest.approx([LOG3 + 1 / 4, -1 / 4]), pytest.approx([-1 / 4, LOG3 + 1 / 4])]


def test_gradients_are_divided_by_all_participants():
    """One of three chose model 0, two of three model 1."""
    found = moved(TWO, **GRADIENT)
    assert found == [pytest.approx([LOG3 + 1 / 12, -1 / 12]), pytest.approx([-1 / 6, LOG3 + 1 / 6])]


@pytest.mark.parametrize("variant", ["averaging", "gradient"])
def test_a_model_that_nobody_chose_stays_bit_for_bit(variant):
    third = model(0.1, 0.2)
    assert moved((*TWO, third), variant=variant)[2] == [0.1, 0.2]


def test_of_equals_the_first_is_chosen_and_identical_models_never_part():
    """Of three clients two have rows of class 0 and one a row of class 1: (2 (1/2, -1/2) + (-1/2, 1/2)) / 3."""
    found = moved((model(0, 0), model(0, 0)), population(((0, 0), (0,), (1,))))
    assert found == [pytest.approx([1 / 6, -1 / 6]), [0, 0]]


def test_a_model_without_a_loss_is_never_chosen():
    """Client 0 would lose 0 with model 1 if its weights were not infinite."""
    found = moved((model(-5, 0), model(math.inf, 0)), population(((0,),)))
    assert found[1] == [math.inf, 0]
    assert found[0] != [-5, 0]


def test_members_weigh_by_their_rows_or_alike():
    """Clients with rows (0, 0, 0) and (0, 1) both take model 0, which says (3/4, 1/4).

    Steps: (1/4, -1/4), and the mean of (1/4, -1/4) and (-3/4, 3/4), that is (-1/4, 1/4). By rows, 3 to 2:
    (1/20, -1/20); alike: 0.
    """
    who = population(((0, 0, 0), (0, 1)))
    start = (model(LOG3, 0), model(-50, 50))
    assert moved(start, who, weighting="samples")[0] == pytest.approx([LOG3 + 1 / 20, -1 / 20])
    assert moved(start, who, weighting="uniform")[0] == pytest.approx([LOG3, 0])


@pytest.mark.parametrize("variant", ["averaging", "gradient"])
def test_two_opposite_regressions_are_recovered(variant):
    """Labels are [v.x > 0] for half of the clients and [-v.x > 0] for the others.

    The starts lean to v by a cosine of 0.38 and to -v by one of 0.20; the models end along v, one in each direction.
    """
    draw = torch.Generator().manual_seed(0)
    v = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    x = torch.randn(8, 40, 3, generator=draw, dtype=torch.float64)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
    y = (sign[:, None] * (x @ v) > 0).long()
    who = holding(list(zip(x, y, strict=True)), classes=2)
    task = Task(lambda: nn.Linear(3, 2, bias=False), dtype=torch.float64)
    starts = [torch.tensor([[0, 0, 0], w], dtype=torch.float64) for w in ([0.2, 0.2, 0.2], [-0.2, 0.1, 0.5])]
    state = State(tuple(Weights({"weight": w}) for w in starts), (None, None), torch.zeros(2, dtype=torch.float64))
    local = LocalTrainer(lr=1.0, batch_size=0, epochs=2)
    algorithm = ifca(task, local, variant=variant, cohort=Everyone())
    made = after(algorithm, state, rounds=60, who=who)
    for s, each in zip((1, -1), made.weights, strict=True):
        weight = each.params["weight"]
        assert s * float(torch.cosine_similarity(weight[1] - weight[0], v, 0)) > 0.98
    assert (made.members - 4 * 60).abs().max() <= 8  # all but a few choices of the first rounds
