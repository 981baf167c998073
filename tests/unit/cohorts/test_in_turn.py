"""Clients in turn: laps against a naive play, by hand, and in a run."""

import numpy as np
import pytest
import torch

from fedtide.cohorts import InTurn
from fedtide.cohorts.selection import Lap
from fedtide.core.base import Cost, Moment, Reply
from fedtide.core.rng import Rng
from fedtide.core.trees import grown
from helpers.toys import played, toy

STILL = {"who": {"kind": "always"}}


class There:
    """A fleet of so many clients."""

    def __init__(self, clients: int):
        self.clients = self.reachable = torch.arange(clients)


def reply(clients) -> Reply:
    ids = torch.tensor(sorted(clients), dtype=torch.int64)
    return Reply(None, {}, ids, torch.zeros(len(ids)), Cost())


def lap(clients: int, m: int, seed: int = 0, rounds: int = 40):
    """Whom it picks where all answer."""
    cohort, memo, fleet = InTurn(m), InTurn(m).init(There(clients)), There(clients)
    for t in range(rounds):
        picked = cohort.pick(memo, fleet, Rng(seed).at(t), None)
        memo = cohort.learn(memo, reply(picked.tolist()), Moment(t, rounds))
        yield picked.tolist()


@pytest.mark.parametrize(("clients", "m"), [(12, 3), (12, 4), (5, 5), (7, 1)])
def test_in_laps_of_whole_rounds_each_has_one_turn(clients, m):
    each = list(lap(clients, m))
    size = clients // m
    laps = [each[k : k + size] for k in range(0, len(each) - size + 1, size)]
    for one in laps:
        assert sorted(client for picked in one for client in picked) == list(range(clients))
    if size > 1:
        assert len({tuple(one[0]) for one in laps}) > 1  # other ones come first in another lap


def test_naively_where_some_are_away_and_some_do_not_answer():
    """A set of those who have had a turn, cleared as soon as one of them answers again."""
    draw, cohort, memo, had = np.random.default_rng(0), InTurn(4), InTurn(4).init(There(15)), set()
    ended = 0
    for t in range(100):
        there = torch.tensor(sorted(draw.choice(15, 10, replace=False).tolist()))
        picked = set(cohort.pick(memo, There(15), Rng(1).at(t), None, there).tolist())
        waiting = set(there.tolist()) - had
        assert len(picked) == 4
        assert picked <= waiting or waiting <= picked
        came = {client for client in picked if draw.random() < 0.8}
        again = came & had
        had = again or had | came
        ended += bool(again)
        memo = cohort.learn(memo, reply(came), Moment(t, 100))
        assert memo.waits.tolist() == [client not in had for client in range(15)]
    assert 10 < ended < 60


def test_who_joins_waits():
    lap = Lap(torch.tensor([False, True]))
    assert grown(lap, 4).waits.tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", ["fielding-by-sums drifts", "fielding drifts"])
def test_where_clusters_are_made_anew_a_lap_begins(name):
    """Two of eight train in a round: six wait after the first of a lap, and none after its fourth."""
    options = {"cohort": {"kind": "in-turn", "clients_per_round": 2}, "trigger": {"kind": "fraction", "tau": 0.0}}
    run = played(toy(name, options, shift=STILL))
    anew = [step.facts["reclustered"] for step in run.steps]
    assert sorted(set(anew)) == [0, 1]
    if name == "fielding-by-sums drifts":  # where it sees them, a cluster of few may be through before the others
        waited = 8
        for again, step in zip(anew, run.steps, strict=True):
            waited = (8 if again or not waited else waited) - 2
            assert int(step.state.cohort.waits.sum()) == waited
    assert all(int(step.state.cohort.waits.sum()) == 6 for again, step in zip(anew, run.steps, strict=True) if again)
