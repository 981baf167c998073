"""Power-of-choice by hand.

Client k holds 1, 2, 3, 4, 2, 0 rows x = s_k of label 1; one model has the logits (0, x). The loss of client k is
ln(1 + exp(-s_k)):

    k      0      1      2      3      4
    s_k    0      ln 3   -ln 3  1/2    -2
    loss   ln 2   ln 4/3 ln 4   0.474  2.127

With d = 5 all that hold rows are candidates, and m = 2 takes the largest losses: clients 4 and 2. With d = m = 2
no client is asked, and the candidates themselves take part. A candidate that does not answer (client 5 has no rows) is
not picked.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from fedtide.cohorts import PowerOfChoice
from fedtide.cohorts.participation import loss_question
from fedtide.core.base import Algorithm, Cost, Moment, Reply, Shard, Weights, shared_weights
from fedtide.core.rng import Rng
from fedtide.learn.task import Task

S = [0.0, math.log(3), -math.log(3), 0.5, -2.0]
ROWS = [1, 2, 3, 4, 2, 0]
LOSSES = [math.log(2), math.log(4 / 3), math.log(4), math.log1p(math.exp(-0.5)), math.log1p(math.exp(2))]
TASK = Task(lambda: torch.nn.Linear(1, 2, bias=False))
MODEL = Weights({"weight": torch.tensor([[0.0], [1.0]])})


@dataclass
class State:
    weights: Weights = MODEL


class Fleet:
    """Clients that answer "count" and "loss" by the works that are run on devices, too."""

    moment, clients = Moment(0, 1), torch.arange(6)
    reachable = clients

    def __init__(self, count=None):
        self.asked = []
        self.count = ROWS if count is None else count

    def ask(self, question, clients, payload, *, slot=None, reveal=()):
        self.asked.append((question, clients.tolist()))
        answers = {int(c): self.answer(question, int(c), payload) for c in clients}
        kept = {c: rows for c, rows in answers.items() if rows is not None}
        table = torch.stack(list(kept.values())) if kept else torch.zeros(0, 1)
        return Reply({}, {question: table}, torch.tensor(list(kept), dtype=torch.int64), torch.ones(len(kept)), Cost())

    def answer(self, question, client, payload):
        if question == "count":
            return torch.tensor([float(self.count[client])] * 2) if self.count[client] else None
        assert payload is MODEL
        return told(ROWS[client], S[client] if ROWS[client] else 0.0)


@cache
def told(rows: int, value: float):
    """What a client with these rows answers to "loss"."""
    shard = Shard(torch.full((rows, 1), value), torch.ones(rows, dtype=torch.int64), torch.arange(rows))
    made = Algorithm("x", None, {}, None, shared_weights, TASK.predict)
    answer = loss_question(made, TASK.target)(MODEL, None, shard, Fleet.moment, Rng(0))
    return None if answer is None else answer.rows["loss"]


def picked(cohort, fleet, seed=0, **among):
    return cohort.pick(cohort.init(fleet), fleet, Rng(seed), partial(shared_weights, State()), **among).tolist()


def test_the_losses_are_those_by_hand():
    reply = Fleet().ask("loss", torch.arange(6), MODEL)
    assert reply.clients.tolist() == [0, 1, 2, 3, 4]
    assert reply.rows["loss"].flatten().tolist() == pytest.approx(LOSSES, abs=1e-6)


def test_of_all_candidates_those_with_the_largest_losses_take_part():
    for seed in range(5):
        fleet = Fleet()
        assert picked(PowerOfChoice(2, d=6), fleet, seed) == [2, 4]
        assert fleet.asked[1] == ("loss", [0, 1, 2, 3, 4, 5])
    assert picked(PowerOfChoice(3, d=6), Fleet()) == [0, 2, 4]
    # In a cluster of clients 0, 1 and 3.
    assert picked(PowerOfChoice(2, d=6), Fleet(), among=torch.tensor([0, 1, 3]), m=1) == [0]


def test_candidates_are_as_many_as_twice_the_cohort_or_as_d_says():
    for cohort, many in ((PowerOfChoice(2), 4), (PowerOfChoice(2, d=3), 3), (PowerOfChoice(1, over_selection=2.0), 4)):
        fleet = Fleet()
        assert len(picked(cohort, fleet)) == 2
        assert len(fleet.asked[1][1]) == many


def test_with_as_many_candidates_as_places_the_draw_is_by_size_and_no_loss_is_asked():
    """The first of one draw is client k with probability n_k / 14.4, as 12 + 2.4; one without rows counts as 2.4."""
    fleet = Fleet()
    found = torch.zeros(6)
    memo = PowerOfChoice(1, d=1).init(fleet)
    for seed in range(4000):
        found[PowerOfChoice(1, d=1).pick(memo, fleet, Rng(seed), partial(shared_weights, State()))] += 1
    assert [question for question, _ in fleet.asked] == ["count"]
    assert (found / 4000).tolist() == pytest.approx([n / 14.4 for n in (1, 2, 3, 4, 2, 2.4)], abs=0.03)


def test_several_candidates_are_drawn_by_size_without_replacement():
    """Of clients with 1, 2 and 3 rows two are candidates: client 0 first or after 1 or 2, 1/6 + 1/3 1/4 + 1/2 1/3.

    Client 1: 1/3 + 1/6 2/5 + 1/2 2/3; client 2: 1/2 + 1/6 3/5 + 1/3 3/4.
    """
    found, cohort, among = torch.zeros(6), PowerOfChoice(1, d=2), torch.tensor([0, 1, 2])
    memo = cohort.init(Fleet())
    for seed in range(4000):
        fleet = Fleet()
        cohort.pick(memo, fleet, Rng(seed), partial(shared_weights, State()), among=among)
        found[fleet.asked[0][1]] += 1
    assert (found / 4000).tolist() == pytest.approx([5 / 12, 11 / 15, 17 / 20, 0, 0, 0], abs=0.03)


def test_where_there_is_no_model_yet_they_are_drawn_by_size():
    fleet, cohort = Fleet(), PowerOfChoice(2)
    assert len(cohort.pick(cohort.init(fleet), fleet, Rng(0), None)) == 2
    assert [question for question, _ in fleet.asked] == ["count"]


def test_a_candidate_that_does_not_answer_is_not_picked():
    cohort = PowerOfChoice(1, d=6)
    assert picked(cohort, Fleet(), among=torch.tensor([1, 5]), m=1) == [1]
    assert picked(cohort, Fleet(), among=torch.tensor([5]), m=1) == [5]  # none to compare
