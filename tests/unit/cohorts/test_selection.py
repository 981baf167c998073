"""Cohorts that choose: by size, by likeness, by losses, and Oort against a naive one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtide.algorithms.fedavg import fedavg
from fedtide.clusters import rounds as clusters
from fedtide.clusters.rounds import Served
from fedtide.cohorts import BySize, InTurn, Nearest, Oort, PowerOfChoice, Uniform
from fedtide.cohorts.selection import draw_clients
from fedtide.core import codec
from fedtide.core.base import Cost, Moment, Reply
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.steps import utility
from fedtide.learn.task import Task
from helpers.toys import played, toy

KINDS = [
    Uniform(), InTurn(), BySize(), Nearest(), Nearest(temperature=0.0), Nearest(distance="l2"), Oort(), PowerOfChoice(),
]  # fmt: skip
EVERYONE = torch.arange(12)


@dataclass
class At:
    """A fleet of `n` clients, of which some say something when they are asked."""

    round: int = 0
    n: int = 12
    who: Sequence[int] = ()
    said: Any = ()
    losses: Sequence[float] = ()

    @property
    def moment(self) -> Moment:
        return Moment(self.round, 100)

    @property
    def clients(self) -> torch.Tensor:
        return torch.arange(self.n)

    reachable = clients

    def ask(self, question, clients, payload, *, slot=None, reveal=()):
        if question == "loss":
            return answered(clients, loss=torch.tensor(self.losses)[clients, None])
        return answered(self.who, **{question: torch.as_tensor(self.said).double()})


def answered(clients, seconds=None, **rows):
    """A reply of some clients."""
    clients = torch.as_tensor(clients, dtype=torch.int64)
    seconds = torch.ones(len(clients)) if seconds is None else torch.as_tensor(seconds)
    return Reply({}, rows, clients, seconds, Cost())


def memo_of(cohort, n=12, who=(), said=()):
    """A memo in which some said something before round 0."""
    return cohort.init(At(n=n, who=who, said=said))


def learned(cohort, memo, clients, utilities, seconds, round):
    """A memo after a round of training."""
    reply = answered(clients, seconds, utility=torch.as_tensor(utilities).reshape(-1, 1))
    return cohort.learn(memo, reply, Moment(round, 100))


def tried(cohort, utilities, seconds=None, round=0):
    """A memo in which everyone was tried in one round."""
    n = len(utilities)
    return learned(cohort, memo_of(cohort, n), torch.arange(n), utilities, seconds, round)


def pick(cohort, memo, rng, fleet, among, m):
    return cohort.pick(memo, fleet, rng, None, among, m)


def frequency(select, memo, m=3, draws=600, among=None, round=0):
    """How often each client is picked."""
    among = torch.arange(12) if among is None else among
    counts = Counter(c for seed in range(draws) for c in pick(select, memo, Rng(seed), At(round), among, m).tolist())
    return np.array([counts[c] / draws for c in range(12)])


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", KINDS, ids=repr)
@pytest.mark.parametrize("heard", [False, True])
def test_exactly_so_many_distinct_clients_of_those_that_are_there(select, heard):
    memo = memo_of(select)
    if heard:
        memo = memo_of(select, who=[1, 4, 9], said=[[3.0, 2.0], [5.0, 1.0], [1.0, 1.0]])
        memo = learned(select, memo, [1, 7], [2.0, 1.0], [3.0, 4.0], 0)
    among = torch.tensor([9, 1, 4, 7, 8])
    for m in (0, 1, 2, 4, 5, 20):
        for seed in range(10):
            picked = pick(select, memo, Rng(seed), At(1), among, m).tolist()
            assert picked == sorted(set(picked))
            assert len(picked) == min(m, 5)
            assert set(picked) <= set(among.tolist())
    assert pick(select, memo, Rng(0), At(1), among[:0], 3).tolist() == []


@pytest.mark.parametrize("select", KINDS, ids=repr)
def test_a_memo_travels_and_is_left_as_it_was(select):
    memo = memo_of(select, who=EVERYONE, said=torch.rand(12, 3))
    before = codec.from_bytes(codec.to_bytes(memo))
    learned(select, memo, torch.tensor([2]), torch.tensor([5.0]), torch.tensor([1.0]), 3)
    picked = pick(select, memo, Rng(0), At(2), EVERYONE, 4)
    assert same(before, memo)
    assert pick(select, before, Rng(0), At(2), EVERYONE, 4).tolist() == picked.tolist()


def test_draws_are_in_proportion_and_the_hopeless_come_last():
    """The first of two drawn with weights 3 and 1 is the former three times in four."""
    weights = torch.tensor([3.0, 1.0, 0.0, 0.0]).log()
    drawn = [draw_clients(torch.arange(4), weights, 1, Rng(seed)).item() for seed in range(2000)]
    assert np.bincount(drawn, minlength=4) / 2000 == pytest.approx([0.75, 0.25, 0, 0], abs=0.03)
    assert draw_clients(torch.arange(4), weights, 2, Rng(0)).tolist() == [0, 1]
    last = Counter(draw_clients(torch.arange(4), weights, 3, Rng(seed)).tolist()[-1] for seed in range(400))
    assert abs(last[2] - 200) < 50


def test_draws_in_clusters_take_first_whom_a_draw_among_all_takes():
    """Of ten, 4 are drawn; of those among 0 to 4 as many as fit are drawn there, too, whatever the others are."""
    likely = torch.zeros(10)
    for seed in range(50):
        whole = set(draw_clients(torch.arange(10), likely, 4, Rng(seed)).tolist())
        part = set(draw_clients(torch.arange(5), likely[:5], 2, Rng(seed)).tolist())
        first = {client for client in whole if client < 5}
        assert part <= first or first <= part


# -- by size -----------------------------------------------------------------------------------------------------------


# -- nearest -----------------------------------------------------------------------------------------------------------


def placed(points):
    return memo_of(Nearest(), who=range(len(points)), said=points)


def test_the_nearest_are_taken_at_temperature_zero_by_hand():
    """The center of 0, 1, 2, 9 is 3: distances 3, 2, 1, 6."""
    memo = placed([[0.0], [1.0], [2.0], [9.0]])
    for m, picked in ((1, [2]), (2, [1, 2]), (3, [0, 1, 2])):
        assert pick(Nearest(temperature=0.0), memo, Rng(5), At(), torch.arange(4), m).tolist() == picked
    # Of the members of one cluster the center is theirs: that of 0 and 1 and 9 is 10/3, and 1 is nearest.
    assert pick(Nearest(temperature=0.0), memo, Rng(5), At(), torch.tensor([0, 1, 3]), 1).tolist() == [1]


@pytest.mark.parametrize("points", [[[0.0], [2.0], [0.0]], [[8.0], [10.0], [0.0]]])
def test_who_reported_nothing_is_as_far_as_the_farthest_and_moves_no_center(points):
    """The center of the two that reported is 1 from each, wherever the third is taken to be."""
    of, reported = torch.tensor(points, dtype=torch.float64), torch.tensor([True, True, False])
    assert Nearest()._distances(of, reported).tolist() == [1, 1, 1]


def test_two_clients_by_the_softmax():
    """Distances 0, 0 and 2 (L1 from the mean is 2/3, 2/3, 4/3): the median is 2/3, so weights 1/e, 1/e, 1/e^2."""
    memo = placed([[0.0], [0.0], [2.0]])
    found = frequency(Nearest(), memo, m=1, draws=4000, among=torch.arange(3))[:3]
    weights = np.exp([-1.0, -1.0, -2.0])
    assert found == pytest.approx(weights / weights.sum(), abs=0.03)


# -- Oort --------------------------------------------------------------------------------------------------------------


def test_utility_by_hand():
    """Losses 1 and 7: the root of their mean square is 5; of ten rows it is 50."""
    assert utility(torch.tensor([1.0, 7.0]), 10).tolist() == [50.0]


def test_scores_by_hand():
    """Utilities 1, 3 and 11 clipped at 3 (the quantile 0.5): worth 0, 0.2 and 0.2; round 8, tried in 1, 2 and 4."""
    oort = Oort(clip_bound=0.5)
    memo = tried(oort, [1.0, 3.0, 11.0])
    memo = replace(memo, last=torch.tensor([1, 2, 4]))
    stale = [math.sqrt(0.1 * math.log(8) / last) for last in (1, 2, 4)]
    assert oort.scores(memo, torch.arange(3), 8).tolist() == pytest.approx([stale[0], 0.2 + stale[1], 0.2 + stale[2]])


def test_the_pacer_lets_slower_clients_in_where_nothing_changes_and_fewer_where_much_does():
    oort = Oort(pacer_step=2, pacer_delta=5.0, round_threshold=30.0)

    def after(brought):
        memo = memo_of(oort)
        for round, utility_ in enumerate(brought):
            memo = learned(oort, memo, torch.tensor([0]), torch.tensor([utility_]), torch.ones(1), round)
        return memo.percent

    assert after([1.0, 1.0, 1.0]) == 30.0  # too early
    assert after([1.0, 1.0, 1.0, 1.05]) == 35.0
    assert after([1.0, 1.0, 1.0, 2.0]) == 30.0
    assert after([1.0, 1.0, 6.0, 6.0]) == 25.0
    assert after([1.0] * 5) == 35.0
    assert after([1.0] * 6) == 40.0
    assert after([1.0] * 60) == 100.0
    assert after([float(10**i) for i in range(20)]) == 5.0
    oort = Oort(pacer_step=2, pacer_delta=40.0, round_threshold=30.0)
    assert after([1.0, 1.0, 6.0, 6.0]) == 30.0  # a step too long for it lets nobody in where it should keep some out


def naive(known, rng, t, among, k, percent, s):
    """Oort with dicts and loops, on the same draws."""
    key = {"exploit": rng.at("exploit"), "explore": rng.at("explore")}
    if k >= len(among):
        return sorted(among)
    old = [c for c in among if known[c]["last"]]
    new = [c for c in among if not known[c]["last"]]
    share = max(s.exploration_factor * s.exploration_decay ** (t - 1), s.exploration_min)
    explored = min(int(share * k + 1e-9), len(new))
    exploited = min(k - explored, len(old))
    took = sorted(client["seconds"] for client in known if client["last"])
    preferred = took[min(int(len(took) * percent / 100), len(took) - 1)] if took and percent < 100 else math.inf

    def slow(client):
        seconds = known[client]["seconds"]
        return (preferred / seconds) ** s.round_penalty if known[client]["last"] and seconds > preferred else 1.0

    def ordered(clients, value, rng):
        mixed = [clients[i] for i in rng.numpy().permutation(len(clients))]
        return sorted(mixed, key=lambda c: -value[c])

    def draw(clients, value, n, rng):
        waits = rng.numpy().standard_exponential(max(clients, default=-1) + 1)
        late = {c: waits[c] / value[c] if value[c] else math.inf for c in clients}
        return sorted(clients, key=late.get)[:n]

    picked = []
    if exploited:
        us = sorted(known[c]["utility"] for c in old)
        top = us[min(int(len(us) * s.clip_bound), len(us) - 1)]
        width = max(us[-1] - us[0], 1e-4)
        score = {
            c: ((min(known[c]["utility"], top) - us[0]) / width + math.sqrt(0.1 * math.log(t) / known[c]["last"]))
            * slow(c)
            for c in old
        }
        order = ordered(old, score, key["exploit"].at("order"))
        cut = s.cut_off_util * score[order[exploited - 1]]
        near = []
        for c in order:
            if score[c] < cut and len(near) > s.least_candidates * exploited:
                break
            near.append(c)
        picked += draw(near, score, exploited, key["exploit"])
    reward = {c: float(known[c]["rows"]) for c in new}
    order = ordered(new, reward, key["explore"].at("order"))[: s.sample_window * (k - exploited)]
    return sorted(picked + draw(order, reward, k - exploited, key["explore"]))


@pytest.mark.parametrize(
    "select",
    [
        Oort(pacer_step=3),
        Oort(pacer_step=2, exploration_factor=0.4, exploration_min=0.1, cut_off_util=0.05, clip_bound=0.5),
        Oort(exploration_factor=0.2, exploration_min=0.2, least_candidates=1.5),
    ],
)
def test_a_naive_oort_picks_the_same_over_twenty_rounds(select):
    draw, n = np.random.default_rng(0), 40
    rows = draw.integers(1, 50, n)
    speed = draw.lognormal(0, 1, n)
    known = [{"rows": r, "utility": 0.0, "seconds": 0.0, "last": 0} for r in rows]
    memo = memo_of(select, n, range(n), rows[:, None])
    sums, percent = [], select.round_threshold
    for round in range(20):
        among = sorted(draw.choice(n, 30, replace=False).tolist())
        rng = Rng(7).at(round)
        picked = pick(select, memo, rng, At(round), torch.tensor(among), 8).tolist()
        assert picked == naive(known, rng, round + 1, among, 8, percent, select)
        came = [c for c in picked if draw.random() < 0.8]
        worth = [float(rows[c] * math.exp(-0.1 * round) * draw.uniform(0.5, 1.5)) for c in came]
        for c, value in zip(came, worth, strict=True):
            known[c] |= {"utility": value, "seconds": speed[c], "last": round + 1}
        seconds = torch.tensor([speed[c] for c in came])
        memo = learned(select, memo, torch.tensor(came), torch.tensor(worth, dtype=torch.float64), seconds, round)
        sums.append(sum(worth))
        if (round + 1) % select.pacer_step == 0 and len(sums) >= 2 * select.pacer_step:
            now, before = sum(sums[-select.pacer_step :]), sum(sums[-2 * select.pacer_step : -select.pacer_step])
            if abs(now - before) <= 0.1 * before:
                percent = min(percent + 5, 100.0)
            elif abs(now - before) >= 5 * before:
                percent = max(percent - 5, 5.0)
        assert memo.percent == percent


# -- in a run ----------------------------------------------------------------------------------------------------------

STILL = {"who": {"kind": "always"}}


def test_a_solver_with_few_steps_makes_use_of_few_rows():
    local = {"local_steps": 1, "batch_size": 4, "lr": 0.1}
    run = played(toy("fedavg", {"cohort": "oort", "local": local}, shift=STILL), rounds=1)
    assert set(run.state.cohort.reward.of.flatten().tolist()) == {4.0}


def test_by_size_asks_once_and_sees_rows_alone():
    run = played(toy("fedavg", {"cohort": "by-size"}, shift=STILL), rounds=2)
    assert run.host.algorithm.traits.reveals == ("count",)
    asks = [query.ask.question for query in run.fleet.queries]
    assert asks == ["train"]
    assert run.state.cohort.of[:, 0].tolist() == run.fleet.population.counts(run.fleet.clients, "train").tolist()


def test_nearest_has_to_know_the_classes():
    with pytest.raises(FedtideError, match=r"^Task\.example: found None, .*for labels"):
        fedavg(Task(lambda: torch.nn.Linear(4, 3)), cohort=Nearest())
    run = played(toy("fedavg", {"cohort": "nearest"}, shift=STILL), rounds=1)
    assert run.state.cohort.of.sum(1).tolist() == pytest.approx([1.0] * 8)
    assert run.state.cohort.of.shape == (8, 3)


@pytest.mark.parametrize("name", ["auxo", "cfl", "feddrift", "fielding", "flexcfl"])
def test_a_client_that_the_server_does_not_know_tells_the_loss_of_the_largest_cluster(name, monkeypatch):
    run = played(toy(name, {"cohort": "power-of-choice"}, shift=STILL), rounds=2)
    monkeypatch.setattr(LocalTrainer, "__call__", None)  # it would train, or try all models
    monkeypatch.setattr(clusters, "mean_losses", None)
    algorithm, shard = run.host.algorithm, run.host.population.shard(0, Moment(0, 1))
    payload, slot = algorithm.serve(run.state, torch.tensor([1000]))
    everything = payload[int(slot)]
    usual = Served((everything.models[everything.usual],), torch.tensor([0]), 0)
    told, expected = (algorithm.works["loss"](each, None, shard, Moment(0, 1), Rng(0)) for each in (everything, usual))
    assert torch.equal(told.rows["loss"], expected.rows["loss"])


@pytest.mark.parametrize("kind", ["uniform", "in-turn", "by-size", "nearest", "oort", "power-of-choice"])
def test_so_many_are_asked_as_the_cohort_says(kind):
    cohort = {"kind": kind, "clients_per_round": 2, "over_selection": 2.0}
    run = played(toy("fedavg", {"cohort": cohort}, shift=STILL), rounds=1)
    assert len(run.fleet.queries[-1].ask.clients) == 4
