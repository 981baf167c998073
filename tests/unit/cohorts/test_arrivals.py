"""Cohorts: who is asked."""

import pytest
import torch

from fedtide.cohorts import Arrivals, Everyone, PickedBy, Uniform
from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from helpers.handmade import fleet, people
from helpers.toys import TOY


class Some:
    """A fleet of which only some clients can be reached."""

    moment, clients = Moment(0, 1), torch.arange(10)
    reachable = torch.tensor([1, 4, 5, 8])

    def arrivals(self, m):
        return torch.tensor([2, 7])[:m]


def test_arrivals_are_those_of_the_shift_whatever_the_key():
    for seed in range(3):
        assert Arrivals(2).pick(None, Some(), Rng(seed), None).tolist() == [2, 7]
    made = fleet({}, people(12))
    assert Arrivals(5).pick(None, made, Rng(0), None).tolist() == made.arrivals(5).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_a_uniform_draw_is_of_reachable_clients_without_repetition_and_sorted(size):
    for seed in range(20):
        drawn = Uniform(size).pick(None, Some(), Rng(seed), None).tolist()
        assert len(drawn) == min(size, 4)
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= {1, 4, 5, 8}


def test_code_of_a_person_is_not_called_where_no_client_is_wanted():
    calls = []
    cohort = PickedBy(lambda there, m, moment, rng: calls.append(m) or there[:1])
    assert cohort.pick(None, Some(), Rng(0), None, torch.tensor([1, 4]), 0).tolist() == []
    assert cohort.pick(None, Some(), Rng(0), None, torch.tensor([1, 4]), 1).tolist() == [1]
    assert calls == [1]


@pytest.mark.parametrize(("spelled", "cohort"), [
    (7, Arrivals(7)),
    ("arrivals", Arrivals(10)),
    ("uniform", Uniform(10)),
    ("everyone", Everyone()),
    ({"kind": "uniform", "clients_per_round": 3}, Uniform(3)),
])  # fmt: skip
def test_a_cohort_may_be_spelled_in_short(spelled, cohort):
    assert (
        from_dict({**TOY, "method": [{"algorithm": "fedavg", "cohort": spelled}]}).method[0].settings()["cohort"]
        == cohort
    )


def test_the_arrivals_of_a_round_are_the_same_for_everyone_who_asks():
    made = fleet({}, people(30))
    first = made.arrivals(6).tolist()
    made.begin(Moment(1, 10, 0.0))
    assert made.arrivals(6).tolist() != first
    made.begin(Moment(0, 10, 0.0))
    assert made.arrivals(6).tolist() == first
