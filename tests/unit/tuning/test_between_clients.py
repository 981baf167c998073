"""A tournament between clients: entries side by side, judged by sums."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.core.base import Sum
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.data.partition import IID, Split
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Vectors
from fedtide.learn.task import Task
from fedtide.remote.offline import near_fleet
from fedtide.runs.build import algorithm_of
from fedtide.tuning.between_clients import (
    Difference,
    State,
    added,
    empty,
    kinds_of,
    methods_of,
    rung_ends,
    standings,
    tournament,
    why_alone,
    written_out,
)
from fedtide.wire.pipeline import FLOATING, Wire

CLIENTS = 6


def table(name: str, algorithm: str = "fedavg", lr: float = 0.1, **options):
    return {"name": name, "algorithm": algorithm, "cohort": 4, "local": {"lr": lr, "epochs": 1}, **options}


SLOW, FAST, IFCA, ALONE = (
    table("slow", lr=0.001), table("fast", lr=0.5), table("IFCA", "ifca", clusters=2),
    {"name": "alone", "algorithm": "local", "solver": {"lr": 0.1, "epochs": 1}},
)  # fmt: skip


def people():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.randn(240, 4, generator=draw) + 2 * torch.eye(4)[y]
    return build(Rows("rows", x, y, 3), IID(clients=CLIENTS), split=Split(val=0.4, test=0.1))


def host_with(make, wire: Wire = FLOATING) -> Host:
    population = people()
    task = Task(lambda: nn.Linear(4, 3), example=population.few()[0].x[:1])
    return Host(make(task), population, 0, MemoryStore(None), wire=wire)


def entered(*tables):
    return lambda task: tournament(task, written_out(tables))


def simulated(one: Host) -> SimulatedFleet:
    return SimulatedFleet(
        one.population, LocalEngine(one), vectors=Vectors.of(one.wire, one.algorithm, one.population.few())
    )


def last(one: Host, rounds: int, fleet=None):
    fleet = simulated(one) if fleet is None else fleet
    start = begin(one.algorithm, fleet, seed=0, rounds=rounds)
    *_, step = play(one.algorithm, fleet, start, seed=0, rounds=rounds)
    return step.state


# -- sums, by hand -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_clients():
    # Scores of three clients: entry 0 has 0.2, 0.5, 0.8 and entry 1 has 0.4, 0.6, 0.8. Differences are 0.2, 0.1 and 0:
    # mean 0.1, variance 0.01, error 0.1 / sqrt(3). Unpaired errors would be above 0.2.
    one, two = torch.tensor([0.2, 0.5, 0.8]).double(), torch.tensor([0.4, 0.6, 0.8]).double()
    apart = torch.zeros(2, 3).double()
    apart[0] = torch.tensor([3.0, float((two - one).sum()), float(((two - one) ** 2).sum())])
    rung = empty((0, 1), 2)
    for entry, scores in enumerate((one, two)):
        total = {
            "score": Sum(torch.stack([scores.sum(), (scores**2).sum()]), 3.0),
            "apart": Sum(apart if entry else torch.zeros(2, 3).double(), 3.0),
        }
        rung = added(rung, entry, total)
    rung = replace(rung, times=1)
    found = rung.difference(1, 0)
    assert (found.mean, found.error) == pytest.approx((0.1, 0.1 / math.sqrt(3)))
    assert rung.difference(0, 1).mean == -found.mean
    assert rung.score(0) == pytest.approx(0.5)
    assert math.isnan(empty((0, 1), 2).score(1))


def test_clients_that_are_asked_twice_are_no_more_clients():
    """Differences 1, 1, 0, 0 twice: mean 1/2, variance 1/3, error sqrt(1/12), of 4 clients as if asked once."""
    twice = Difference.of(8.0, 4.0, 4.0, 2)
    assert twice == Difference.of(4.0, 2.0, 2.0, 1)
    assert (twice.mean, twice.error, twice.margin) == pytest.approx((0.5, 0.2887, 0.9187), abs=5e-5)


@pytest.mark.parametrize(
    ("differences", "verdict"), [((-1.0, -1.0, 0.0, 0.0), "cannot be told apart"), ((-1.0, -1.0, -1.0, -0.9), "behind")]
)
def test_an_entry_is_behind_if_the_interval_of_the_difference_lies_below_0(differences, verdict):
    """Means -0.5 and -0.975, margins 0.919 and 3.182 * 0.025."""
    found, rung = torch.tensor(differences).double(), empty((0, 1), 2)
    rung.apart[1, 0] = torch.tensor([4.0, float(found.sum()), float((found**2).sum())])
    rung.scores[:] = torch.tensor([[4.0, 4.0, 4.0], [4.0, 4.0 + float(found.sum()), 4.0]])
    state = State((None, None), (0, 1), empty((0, 1), 2), (replace(rung, times=1),))
    assert [row.verdict for row in standings(state, ["one", "other"])] == ["highest", verdict]


def test_scores_are_compared_with_those_before_them_in_the_same_round(monkeypatch):
    """Two rounds, both judged by 6 clients."""
    monkeypatch.setattr("fedtide.tuning.between_clients.JUDGED", 1)
    (rung,) = last(host_with(entered(SLOW, FAST)), 2).rungs
    assert (rung.times, rung.scores[:, 0].tolist(), float(rung.apart[1, 0, 0])) == (2, [12.0] * 2, 12.0)
    assert rung.apart[1, 0, 1] == pytest.approx(float(rung.scores[1, 1] - rung.scores[0, 1]))
    assert rung.apart[1, 0, 1] > 0
    assert not rung.apart[0, 1].any()


def test_the_better_half_of_the_methods_plays_on_and_of_each_its_better_entry():
    assert kinds_of(written_out((SLOW, FAST, IFCA))) == ["slow", "slow", "IFCA"]
    assert rung_ends(8, 4) == (4, 8)
    one = host_with(entered(SLOW, FAST, IFCA, ALONE, table("FedProx", "fedprox")))
    state = last(one, 4)
    assert [rung.rounds for rung in state.rungs] == [2, 4]
    assert state.rungs[0].entries == (0, 1, 2, 3, 4)
    first = state.rungs[0]
    ranked = sorted((max((0, 1), key=first.score), 2, 3, 4), key=first.score)
    assert set(state.rungs[1].entries) == set(state.playing) == set(ranked[2:])
    assert 0 not in state.playing
    rows = standings(state, ["slow", "fast", "IFCA", "alone", "FedProx"])
    assert (rows[0].verdict, rows[0].difference, len(rows)) == ("highest", None, 5)
    assert {row.verdict for row in rows if row.rounds == 2} == {"dropped"}
    assert rows[0].score.mean == max(map(state.rungs[1].score, state.playing)) > 1 / 3


def test_of_two_methods_the_worse_entry_of_each_is_dropped():
    state = last(host_with(entered(SLOW, FAST, IFCA)), 2)
    rows = {row.number: row.verdict for row in standings(state, ["slow", "fast", "IFCA"])}
    assert len(state.rungs) == 1
    assert {number for number, verdict in rows.items() if verdict == "dropped"} == {0, 1, 2} - set(state.playing)


# -- bits --------------------------------------------------------------------------------------------------------------


def test_the_first_entry_has_the_bits_that_it_has_alone():
    first = written_out((IFCA, FAST))[:1]
    alone = host_with(lambda task: algorithm_of(methods_of(first)[0], task))
    assert same(last(alone, 3), last(host_with(entered(IFCA, FAST)), 3).states[0])


@pytest.mark.parametrize("wire", [FLOATING, Wire(secure=True, fewest=3)], ids=["plain", "masked"])
def test_nodes_have_the_bits_of_the_simulation(wire, tmp_path):
    make = entered(FAST, IFCA, table("SCAFFOLD", "scaffold"), ALONE)
    state = last(one := host_with(make, wire), 4)
    fleet = near_fleet(host_with(make, wire), CLIENTS, tmp_path)
    assert same(last(one, 4, fleet), state)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_entries_name_no_code_and_no_weights():
    for changes, words in (
        ({"algorithm": "mine:method"}, "mine:method"),
        ({"algorithm": "inspection"}, "'inspection'"),
        ({"init_from": "model.safetensors"}, "init_from: found a value, allowed: no such key in an entry"),
    ):
        with pytest.raises(FedtideError, match=words):
            written_out((SLOW, {"name": "other", "algorithm": "fedavg", **changes}))


def test_methods_with_late_answers_or_a_past_play_alone():
    task = Task(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    late = {"clients_per_round": 4, "deadline": 3.0}
    for name, options, words in (
        ("fedbuff", {}, "in later rounds"),
        ("t-shot", {"shots": 2, "branch_layer": "0"}, "before the first"),
        ("oracle", {}, "only a simulation"),
        ("fedavg", {"cohort": late}, "leaves late answers out"),
    ):
        (method,) = methods_of([{"name": name, "algorithm": name, **options}])
        assert words in why_alone(algorithm_of(method, task))


def test_without_validation_rows_nothing_is_judged():
    one = host_with(entered(SLOW, IFCA))
    bare = build(people().rows, IID(clients=CLIENTS), split=Split(val=0.0, test=0.2))
    with pytest.raises(FedtideError, match=r"data\.split\.val"):
        one.algorithm.check(bare)
    with pytest.raises(FedtideError, match="at most 3, the registered clients"):
        one.algorithm.check(build(people().rows, IID(clients=3), split=Split(val=0.2, test=0.2)))
