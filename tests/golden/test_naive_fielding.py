"""Fielding against plain loops in numpy: softmax regression, float64, 30 rounds of grouped drift, to 1e-8.

Every four rounds some clients change group and some draw other shares of labels; in rounds 10 and 20 more than half of
them are dealt to new groups that cut across the old ones, so that everybody is clustered anew.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.fielding import fielding
from fedtide.algorithms.fielding_by_sums import fielding_by_sums
from fedtide.clusters.clusterer import KMeans
from fedtide.clusters.distance import between
from fedtide.clusters.representation import Gradient, Labels
from fedtide.clusters.triggers import FixedFraction
from fedtide.cohorts import Uniform
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.shift import ClusterDrift, Shift
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import Task
from helpers.naive_drift import Kept, Play, close_models, direction_at, label_shares, naive_by_sums, naive_fielding
from helpers.stages import begun

CLIENTS, DIMS, CLASSES, ROUNDS = 18, 3, 6, 30
DRIFT = ClusterDrift(
    groups=3,
    labels=2,
    concentration=20.0,
    every=4,
    migrate_fraction=0.12,
    resample_fraction=0.1,
    events={"at": (10, 20), "fraction": 0.6},
    samples=24,
)
TASK = Task(
    lambda: nn.Linear(DIMS, CLASSES, bias=False), dtype=torch.float64, example=torch.zeros(1, DIMS, dtype=torch.float64)
)


@cache
def people(seed: int, drift: ClusterDrift = DRIFT) -> Population:
    """Clients that were dealt rows of every label, from which they draw as they drift."""
    draw = np.random.default_rng(seed)
    middle = draw.normal(size=(CLASSES, DIMS)) * 2
    y = np.tile(np.arange(CLASSES), CLIENTS * 6)
    x = middle[y] + draw.normal(size=(len(y), DIMS))
    rows = Rows("naive", torch.from_numpy(x), torch.from_numpy(y), classes=CLASSES)
    each = len(y) // CLIENTS
    lists = Ragged.of([list(range(i * each, (i + 1) * each)) for i in range(CLIENTS)])
    nothing, group = Ragged.empty(CLIENTS), torch.zeros(CLIENTS, dtype=torch.int64)
    parts = {"train": lists, "val": nothing, "test": nothing}
    return Population(rows, parts, group, ("all",), CLIENTS, Shift(what=drift), seed)


def held(who: Population):
    @cache
    def of(client: int, t: int):
        shard = who.shard(client, Moment(t, ROUNDS))
        return shard.x.numpy(), shard.y.numpy()

    return of


def algorithm_of(play: Play, representation, method=fielding, **options):
    local = LocalTrainer(lr=play.rate, epochs=play.epochs, batch_size=play.batch, proximal=play.mu)
    server = SGD(lr=play.server_rate, momentum=play.momentum)
    return method(
        TASK,
        local,
        representation,
        trigger=FixedFraction(tau=play.tau),
        drift_baseline=play.reference,
        clustering=KMeans(k_max=play.k_max, n_init=play.n_init),
        server=server,
        cohort=Uniform(play.ask),
        **options,
    )


GRADIENT = Gradient(sketch=1_000_000)
FROZEN = TASK.init(Rng(0).at("gradients")).params["weight"].numpy()
START = TASK.init(Rng(0).at(-1, "server")).params["weight"].numpy()
PLAYS = {
    "label shares": (Play("l1"), Labels(), 8),
    "gradients": (Play("cosine", tau=1 / 4), GRADIENT, 4),
    "proximal": (Play("l1", mu=0.4, epochs=2), Labels(), 3),
    "many are asked": (Play("l1", ask=16), Labels(), 9),
    "momentum": (Play("l1", momentum=0.7, server_rate=0.5), Labels(), 6),
    "since the last clustering": (Play("l1", reference="last-clustering"), Labels(), 14),
    "always anew": (Play("l1", tau=0.0), Labels(), 8),
    "never anew": (Play("l1", tau=math.inf, mu=0.1), Labels(), 8),
    "all at once": (
        Play("cosine", tau=1 / 6, mu=0.2, epochs=2, momentum=0.5, server_rate=0.8, reference="last-clustering", ask=12),
        GRADIENT,
        3,
    ),
}
"""How it is played, what clients say, and the seed of the drift."""
EVENTS = [4, 8, 10, 12, 16, 20, 24, 28]
BOTH = 21
"""Rounds until both mass events are over."""


@cache
def played_naively(play: Play, seed: int) -> list[Kept]:
    represent = label_shares(CLASSES) if play.distance == "l1" else direction_at(FROZEN)
    return list(islice(naive_fielding(START, CLIENTS, held(people(seed)), represent, play), ROUNDS))


def follow(algorithm, who: Population, naive: list[Kept], clusters_of) -> None:
    """Play as many rounds as the naive implementation, and compare all that is known after each."""
    state, memory, fleet = begun(algorithm, who)
    for t, now in enumerate(naive):
        fleet.begin(Moment(t, ROUNDS, float(t)))
        state, facts = algorithm.round(state, fleet, Rng(0).at(t, "server"))
        assert clusters_of(state, memory) == now.cluster, f"round {t}"
        assert fleet.queries[-1].ask.clients.tolist() == now.asked, f"round {t}"
        happened = (facts.get("drifted", 0), facts["moved"], facts["reclustered"])
        assert happened == (now.drifted, now.moved, now.reclustered), f"round {t}"
        np.testing.assert_allclose(state.centers.numpy(), np.array(now.centers), rtol=0, atol=1e-8)
        close_models(state.weights, now.models)


ALIKE = ("proximal", "momentum", "since the last clustering")
"""Of options that "all at once" has together, or sums have, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in ALIKE else []) for name in PLAYS]
)
def test_thirty_rounds(name):
    play, representation, seed = PLAYS[name]
    algorithm = algorithm_of(play, representation)
    naive = played_naively(play, seed)
    follow(algorithm, people(seed), naive, lambda state, memory: state.cluster.tolist())
    # Both mass events cluster anew; small drifts move clients, and most do no more.
    assert [t for t, now in enumerate(naive) if now.drifted] == EVENTS
    if play.tau == 0:
        assert all(naive[t].reclustered for t in EVENTS)
    elif play.tau == math.inf:
        assert not any(now.reclustered for now in naive)
    else:
        assert all(naive[t].reclustered for t in (10, 20))
        assert sum(now.reclustered for now in naive) <= 3
        assert sum(now.moved for now in naive if not now.reclustered) >= 5
        assert len({len(now.models) for now in naive}) > 1


BY_SUMS = [
    ("label shares", 3), ("gradients", 1), ("momentum", 3), ("since the last clustering", 1), ("never anew", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fewest"),
    [*BY_SUMS, *(pytest.param(name, 4 - fewest, marks=pytest.mark.thorough) for name, fewest in BY_SUMS)],
)
def test_rounds_by_sums(name, fewest):
    """Where the server sees sums alone; what clients like is in their memory."""
    play, representation, seed = PLAYS[name]
    who = people(seed)
    algorithm = algorithm_of(play, representation, fielding_by_sums, fewest=fewest)
    represent = label_shares(CLASSES) if play.distance == "l1" else direction_at(FROZEN)
    naive = list(islice(naive_by_sums(START, CLIENTS, held(who), represent, play, fewest), BOTH))
    follow(algorithm, who, naive, lambda state, memory: [memory.read(i, (99, 0))["cluster"] for i in range(CLIENTS)])
    assert any(now.reclustered for now in naive) == (play.tau != math.inf)
    assert any(now.moved for now in naive)


def test_the_plays_meet_what_they_are_there_for():
    # One cluster has fewer clients than its share of those asked, and the others give what it lacks.
    play, _, seed = PLAYS["many are asked"]
    short = 0
    for now in played_naively(play, seed):
        sizes = [now.cluster.count(k) for k in range(len(now.models))]
        short += min(sizes) < play.ask // len(sizes)
        assert len(now.asked) == play.ask
    assert short
    # Some cluster is left by all of its clients.
    play, _, seed = PLAYS["momentum"]
    assert any(len(set(now.cluster)) < len(now.models) for now in played_naively(play, seed))
    # Centers creep, a little at each event, until they are far from where clients were clustered last.
    play, _, seed = PLAYS["since the last clustering"]
    far, crept = (
        [t for t, now in enumerate(played_naively(each, seed)) if now.reclustered]
        for each in (replace(play, reference="last-event"), play)
    )
    assert (far, crept) == ([10, 20], [10, 20, 28])


def test_who_holds_the_same_rows_says_nothing_though_rounding_moves_its_vector():
    play, representation, seed = PLAYS["gradients"]
    still = replace(DRIFT, every=100, events=None)
    who = people(seed, still)
    vectors = torch.tensor([direction_at(FROZEN)(held(who)(i, 0)) for i in range(CLIENTS)], dtype=torch.float64)
    assert between(vectors, vectors, "cosine").diagonal().max() > 0
    algorithm = algorithm_of(replace(play, tau=0.0), representation)
    state, _, fleet = begun(algorithm, who)
    for t in range(3):
        fleet.begin(Moment(t, ROUNDS, float(t)))
        state, facts = algorithm.round(state, fleet, Rng(0).at(t, "server"))
        assert facts.get("drifted", 0) == facts["reclustered"] == 0
