"""IFCA, CFL, FlexCFL, FedDrift and Auxo against plain loops in numpy: softmax regression, float64, to 1e-8.

Partitions are found by trying all, directions by the singular value decomposition, linkage pair by pair.
"""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.auxo import AtRounds, auxo
from fedtide.algorithms.cfl import cfl
from fedtide.algorithms.feddrift import Eager, Isolate, feddrift
from fedtide.algorithms.flexcfl import flexcfl
from fedtide.algorithms.ifca import State, ifca
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.branchnet import softmax
from helpers.naive_drift import close_models, gradient_of
from helpers.quadratics import fleet_of
from helpers.stages import begun, holding, rounds

CLIENTS, DIMS, CLASSES, ROUNDS = 9, 3, 4, 30
RATE, EPOCHS = 1.0, 4
EVERY = 5
TASK = Task(lambda: nn.Linear(DIMS, CLASSES, bias=False), dtype=torch.float64)
LOCAL = LocalTrainer(lr=RATE, epochs=EPOCHS, batch_size=0)

CONCEPTS = [[0, 1, 2, 0, 1, 2, 0, 1, 2], [1, 1, 2, 0, 1, 2, 0, 0, 2], [1, 1, 2, 1, 1, 2, 2, 0, 0]]
"""Of each client in rounds 0 to 9, 10 to 19 and 20 to 29: concept g calls class c by the name c + g."""
ONE, TWO = [0] * CLIENTS, [0, 1, 0, 1, 0, 1, 0, 1, 0]


def stages(concepts):
    """The rows (x, y) of each client in every round; clients have different numbers of them."""
    draw = np.random.default_rng(4)
    truth = draw.normal(size=(CLASSES, DIMS)) * 2
    x = [draw.normal(size=(20 + 2 * i, DIMS)) + 0.7 for i in range(CLIENTS)]
    calls = [np.argmax(own @ truth.T, axis=1) for own in x]
    return [
        [(x[i], (calls[i] + concepts[min(t // 10, len(concepts) - 1)][i]) % CLASSES) for i in range(CLIENTS)]
        for t in range(ROUNDS)
    ]


def populations(held):
    return [holding([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in now], classes=CLASSES) for now in held]


def update_of(w, x, y, steps=EPOCHS):
    own = w.copy()
    for _ in range(steps):
        own -= RATE * gradient_of(own, x, y)
    return own - w


def error_of(w, x, y):
    return float(np.mean(np.argmax(x @ w.T, axis=1) != y))


def fedavg_inside(models, member, now):
    """A step of each model along the mean update of its clients, weighted by rows."""
    made = [model.copy() for model in models]
    for k, model in enumerate(models):
        mine = [i for i in range(CLIENTS) if member[i] == k]
        if mine:
            n = [len(now[i][0]) for i in mine]
            made[k] += sum(m * update_of(model, *now[i]) for m, i in zip(n, mine, strict=True)) / sum(n)
    return made


def best_partition(x, k):
    """Of all ways to put rows in k clusters, that with the least squared distances to means; by lowest member."""
    best, least = None, np.inf
    for labels in product(range(k), repeat=len(x)):
        seen = list(dict.fromkeys(labels))
        if seen != list(range(len(seen))):
            continue  # the same clusters by other names
        labels = np.array(labels)
        cost = sum(((x[labels == j] - x[labels == j].mean(0)) ** 2).sum() for j in range(len(seen)))
        if cost < least - 1e-12:
            best, least = labels, cost
    return best


def cosine(a, b):
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def shares(y):
    return np.bincount(y, minlength=CLASSES) / len(y)


# -- FlexCFL -----------------------------------------------------------------------------------------------------------


def naive_flexcfl(start, held, m, steps, limit):
    """Models and groups after each round."""
    u = np.stack([update_of(start, *own, steps=steps).ravel() for own in held[0]])
    _, _, v = np.linalg.svd(u, full_matrices=False)
    group = best_partition(np.array([[cosine(own, v[j]) for j in range(m)] for own in u]), m)
    pulls = [u[group == g].mean(0).reshape(start.shape) for g in range(m)]
    models, known = [start + pull for pull in pulls], [shares(y) for _, y in held[0]]
    for now in held:
        for i, (x, y) in enumerate(now):
            if np.abs(shares(y) - known[i]).sum() > limit:
                again = update_of(start, x, y, steps=steps)
                group[i] = np.argmin([(1 - cosine(again, pull)) / 2 for pull in pulls])
                known[i] = shares(y)
        models = fedavg_inside(models, group, now)
        yield models, group.tolist()


def test_flexcfl():
    held = stages(CONCEPTS)
    algorithm = flexcfl(TASK, LOCAL, clusters=3, pretrain=6, cohort=Everyone())
    who = populations(held)
    first, *_ = begun(algorithm, who[0])
    moved, seen = 0, []
    naive = naive_flexcfl(first.start.params["weight"].numpy(), held, 3, 6, 0.2)
    for (state, facts, _), (models, group) in zip(rounds(algorithm, who), naive, strict=True):
        assert state.group.tolist() == group
        close_models(state.weights, models)
        moved += facts["moved"]
        seen.append(group)
    assert seen[0] == CONCEPTS[0]
    assert seen[10] != seen[9]
    assert moved >= 3


# -- FedDrift ----------------------------------------------------------------------------------------------------------


def complete_linkage(d, cut):
    """Groups of positions: the two closest by their farthest pair are put together while that is at most `cut`."""
    groups = [[i] for i in range(len(d))]
    while len(groups) > 1:
        pairs = [(max(d[i][j] for i in a for j in b), a, b) for n, a in enumerate(groups) for b in groups[n + 1 :]]
        far, a, b = min(pairs, key=lambda pair: pair[0])
        if far > cut:
            break
        groups = [each for each in groups if each not in (a, b)] + [a + b]
    return [sorted(each) for each in groups]


def naive_feddrift(start, held, delta, eager):
    """Models in use by their place, whose is which, and how many there are, after each round."""
    models, member, least, pairs = {0: start.copy()}, [0] * CLIENTS, None, {0: 0}
    for t, now in enumerate(held):
        if t % EVERY == 0:
            old, had = sorted(models), list(member)
            bad = {k: [error_of(models[k], *own) for own in now] for k in old}
            best = [min(old, key=lambda k: bad[k][i]) for i in range(CLIENTS)]
            value = [bad[best[i]][i] for i in range(CLIENTS)]
            left = [i for i in range(CLIENTS) if least is not None and value[i] - least[i] > delta]
            member, least = list(best), value
            for leavers in [left] if eager and left else [[i] for i in left]:
                place = next(k for k in range(CLIENTS + 3) if k not in models)
                models[place], pairs[place] = models[member[leavers[0]]].copy(), 0
                for i in leavers:
                    member[i] = place
            for i in range(CLIENTS):
                pairs[member[i]] += 1
            stands = {
                k: [
                    i for i in range(CLIENTS)
                    if member[i] == k or (had[i] == k and i not in left and bad[k][i] <= value[i] + delta)
                ]
                for k in old
            }  # fmt: skip
            there = [k for k in old if stands[k]]
            n = [len(y) for _, y in now]

            def lost(i, j, bad=bad, stands=stands, n=n):
                return sum(bad[i][c] * n[c] for c in stands[j]) / sum(n[c] for c in stands[j])

            d = [
                [max(lost(i, j) - lost(i, i), lost(j, i) - lost(j, j), 0.0) if i != j else 0.0 for j in there]
                for i in there
            ]
            for group in [] if eager else complete_linkage(d, delta):
                first, *rest = (there[k] for k in group)
                total = sum(pairs[k] for k in [first, *rest])
                models[first] = sum(pairs[k] * models[k] for k in [first, *rest]) / total
                pairs[first] = total
                for k in rest:
                    del models[k], pairs[k]
                member = [first if k in rest else k for k in member]
        places = sorted(models)
        made = fedavg_inside([models[k] for k in places], [places.index(k) for k in member], now)
        models = dict(zip(places, made, strict=True))
        yield models, list(member)


@pytest.mark.parametrize("eager", [False, True])
def test_feddrift(eager):
    held = stages([ONE, TWO, [1 - k for k in TWO]])
    algorithm = feddrift(
        TASK, LOCAL, variant=Eager() if eager else Isolate(), rounds_per_step=EVERY, delta=0.1, max_clusters=12
    )
    who = populations(held)
    first, *_ = begun(algorithm, who[0])
    counts, members, left, merges = [], [], 0, 0
    naive = naive_feddrift(first.start.params["weight"].numpy(), held, 0.1, eager)
    for (state, facts, _), (models, member) in zip(rounds(algorithm, who), naive, strict=True):
        assert state.places.in_use.nonzero().flatten().tolist() == sorted(models)
        assert state.model.tolist() == member
        for k, wanted in models.items():
            np.testing.assert_allclose(state.weights[k].params["weight"].numpy(), wanted, rtol=0, atol=1e-8)
        counts.append(len(models))
        members.append(member)
        left, merges = left + facts.get("left", 0), merges + facts.get("merged", 0)
    assert left
    assert (merges > 0) != eager
    assert counts[9] == 1
    # Each concept has a model at the end, and clients of one concept have the same.
    assert len(set(members[-1])) == 2
    assert all(members[-1][i] == members[-1][i % 2] for i in range(CLIENTS))


# -- Auxo --------------------------------------------------------------------------------------------------------------


def naive_auxo(start, held, split_rounds, sketch, drawn):
    """Models, whose is which, and rewards after each round; whoever never learned goes where it was `drawn` to."""
    models, R, S = [start.copy()], np.ones((CLIENTS, 1)), np.full((CLIENTS, 1, 2), 0.5)
    times, divided, had = np.zeros((CLIENTS, 1), dtype=int), [False], [0]
    for now in held:
        new = times.sum(1) == 0
        where = np.where(new & (len(models) > 1), drawn[-1], R.argmax(1))
        updates = [update_of(models[where[i]], *now[i]).ravel() for i in range(CLIENTS)]
        models = fedavg_inside(models, where, now)
        ends = np.stack([each[-sketch:] for each in updates])
        for c in range(len(models)):
            P = [i for i in range(CLIENTS) if where[i] == c]
            if len(P) < 2:
                continue
            x = ends[P] - ends[P].mean(0)
            unit = x / np.linalg.norm(x, axis=1, keepdims=True)
            had[c] += 1
            side = [2 if S[i, c, 0] == S[i, c, 1] or R[i, c] < 0 else int(S[i, c, 1] > S[i, c, 0]) for i in P]
            told = {}
            if not divided[c]:
                begins = [n for n, i in enumerate(P) if len(models) == 1 or (times[i, c] > 0 and R[i, c] > 1)]
                if len(begins) >= 2:
                    told = dict(zip(begins, best_partition(unit[begins], 2).tolist(), strict=True))
                    divided[c] = True
            elif set(side) - {2} == {0, 1}:
                labeled = [n for n in range(len(P)) if side[n] != 2]
                for n in range(len(P)):
                    if side[n] == 2:
                        told[n] = side[min(labeled, key=lambda o: np.linalg.norm(unit[o] - unit[n]))]
            elif set(side) - {2}:
                first = next(n for n in range(len(P)) if side[n] != 2)
                far = np.linalg.norm(unit - unit[first], axis=1)
                told = {int(n): side[first] for n in np.argsort(far, kind="stable")[: len(P) // 4]}
            for n, k in told.items():
                S[P[n], c, k] += 1
                S[P[n], c, 1 - k] -= 1
                times[P[n], c] += 1
            known = [n for n, i in enumerate(P) if times[i, c] > 0 and R[i, c] > 1]
            if len(models) > 1 and len(known) >= 2:
                d = np.linalg.norm(x - x[known].mean(0), axis=1)
                for n, i in enumerate(P):
                    more = (5 - d[n] * 5 / (d.mean() + d.std())) * len(known) / len(P)
                    R[i, c] += more
                    S[i, c] += more / 2
                    times[i, c] += 1
                    if more < 0:
                        S[i, c], times[i, c] = R[i, c] / 2, 1
            mine = [i for i in range(CLIENTS) if R[i].argmax() == c]
            sides = [2 if S[i, c, 0] == S[i, c, 1] or R[i, c] < 0 else int(S[i, c, 1] > S[i, c, 0]) for i in mine]
            if had[c] in split_rounds and 0 in sides and 1 in sides:
                a, b = S[:, c, 0] > S[:, c, 1], S[:, c, 1] > S[:, c, 0]
                R = np.hstack([R, R[:, c : c + 1] + b[:, None]])
                R[:, c] += a
                times = np.hstack([times, times[:, c : c + 1] * b[:, None]])
                times[:, c] *= a
                S = np.concatenate([S, np.repeat(R[:, -1:, None] / 2, 2, axis=2)], axis=1)
                S[:, c] = R[:, c : c + 1] / 2
                models, had = [*models, models[c].copy()], [*had, had[c]]
                divided = [*divided, False]
                divided[c] = False
        yield models, R.argmax(1).tolist(), R


def test_auxo():
    held = stages([TWO, TWO, [1 - k for k in TWO]])
    algorithm = auxo(
        TASK, LOCAL, split=AtRounds((3, 12)), min_participants=2, epsilon=0.0, update_fraction=0.5, cohort=Everyone()
    )
    who = populations(held)
    first, *_ = begun(algorithm, who[0])
    drawn = []

    def noted():
        for state, _, fleet in rounds(algorithm, who):
            drawn.append(fleet.queries[0].ask.slot.numpy())
            yield state

    naive = naive_auxo(first.weights[0].params["weight"].numpy(), held, (3, 12), CLASSES * DIMS // 2, drawn)
    counts = []
    for state, (models, where, reward) in zip(noted(), naive, strict=True):
        assert state.reward.argmax(1).tolist() == where
        np.testing.assert_allclose(state.reward.numpy(), reward, rtol=0, atol=1e-8)
        close_models(state.weights, models)
        counts.append(len(models))
        if len(counts) == 9:
            assert len({where[0], where[1]}) == 2
            assert all(where[i] == where[i % 2] for i in range(CLIENTS))
    assert counts[:4] == [1, 1, 2, 2]
    assert counts[-1] > 2


# -- CFL ---------------------------------------------------------------------------------------------------------------


def cross(halves, updates):
    """The largest cosine across."""
    one, two = halves
    return max(cosine(updates[i], updates[j]) for i in one for j in two)


def best_halves(cluster, updates):
    """Of all ways to put a cluster in two, that with the least cosine across."""
    first, *rest = cluster
    ways = []
    for sides in product([0, 1], repeat=len(rest)):
        if any(sides):
            one = [first, *(i for i, side in zip(rest, sides, strict=True) if not side)]
            ways.append((one, [i for i, side in zip(rest, sides, strict=True) if side]))
    return min(ways, key=lambda halves: cross(halves, updates))


def naive_cfl(start, clients):
    """Models and clusters after each round."""
    clusters, models, largest = [list(range(len(clients)))], [start], [0.0]
    for number in range(ROUNDS):
        updates = {i: update_of(models[k], *clients[i]) for k, cluster in enumerate(clusters) for i in cluster}
        for k in range(len(clusters)):
            cluster = clusters[k]
            mean = np.linalg.norm(np.mean([updates[i] for i in cluster], axis=0))
            largest[k] = max(largest[k], mean)
            most = max(np.linalg.norm(updates[i]) for i in cluster)
            if number < 6 or len(cluster) <= 2 or mean >= largest[k] / 10 or most <= 6 * largest[k] / 10:
                continue
            halves = best_halves(cluster, updates)
            if np.sqrt((1 - cross(halves, updates)) / 2) > 0.1:
                clusters[k] = halves[0]
                clusters.append(halves[1])
                models.append(models[k])
                largest.append(largest[k])
        models = [
            model + np.mean([updates[i] for i in cluster], axis=0)
            for model, cluster in zip(models, clusters, strict=True)
        ]
        yield list(models), [sorted(cluster) for cluster in clusters]


def test_cfl():
    """Halves are found by trying all."""
    draw = np.random.default_rng(1)
    truth = draw.normal(size=(CLASSES, DIMS)) * 2
    clients = []
    for i in range(10):  # group g calls class c by the name c + g
        x = draw.normal(size=(12, DIMS))
        clients.append((x, (np.argmax(x @ truth.T, axis=1) + i % 3) % CLASSES))
    (who,) = populations([clients])
    algorithm = cfl(TASK, LOCAL, split_after=6)
    start, counts = begun(algorithm, who)[0].weights[0].params["weight"].numpy(), []
    for (state, _, fleet), (models, clusters) in zip(
        rounds(algorithm, [who] * ROUNDS), naive_cfl(start, clients), strict=True
    ):
        found = [(state.model == k).nonzero().flatten().tolist() for k in range(len(clusters))]
        assert found == clusters, f"round {fleet.moment.round}"
        close_models(state.weights, models)
        counts.append(len(clusters))
    assert counts[0] == 1
    assert counts[-1] == 3
    assert all(len({i % 3 for i in cluster}) == 1 for cluster in clusters)


# -- IFCA --------------------------------------------------------------------------------------------------------------


def loss_of(w, x, y):
    return float(-np.log(softmax(x @ w.T)[np.arange(len(y)), y]).mean())


def naive_ifca(models, clients, variant, mu, rate=0.3, epochs=2):
    """The models after each round, and who chose which."""
    rounds = []
    for _ in range(20):
        chosen = [int(np.argmin([loss_of(w, x, y) for w in models])) for x, y in clients]
        after = []
        for j, w in enumerate(models):
            members = [(x, y) for (x, y), k in zip(clients, chosen, strict=True) if k == j]
            if not members:
                after.append(w.copy())
            elif variant == "gradient":
                after.append(w - rate / len(clients) * sum(gradient_of(w, x, y) for x, y in members))
            else:
                rows, moved = sum(len(y) for _, y in members), np.zeros_like(w)
                for x, y in members:
                    own = w.copy()
                    for _ in range(epochs):
                        own -= rate * (gradient_of(own, x, y) + mu * (own - w))
                    moved += len(y) / rows * own
                after.append(moved)
        models = after
        rounds.append((models, chosen))
    return rounds


@pytest.mark.parametrize(("variant", "mu"), [("averaging", 0.0), ("averaging", 0.4), ("gradient", 0.0)])
def test_ifca(variant, mu):
    draw = np.random.default_rng(3)
    truth = draw.normal(size=(3, CLASSES, DIMS)) * 2
    clients = []
    for i in range(CLIENTS):
        x = draw.normal(size=(5 + i, DIMS))
        clients.append((x, np.argmax(x @ truth[i % 3].T, axis=1)))
    start = draw.normal(size=(3, CLASSES, DIMS))
    (who,) = populations([clients])
    local = LocalTrainer(lr=0.3, epochs=2, batch_size=0, proximal=mu)
    alike = {"weighting": "uniform" if variant == "gradient" else "samples"}
    algorithm = ifca(TASK, local, clusters=3, variant=variant, cohort=Everyone(), **alike)
    fleet = fleet_of(algorithm, who=who)
    models = tuple(Weights({"weight": torch.from_numpy(w)}) for w in start)
    state = State(models, (None,) * 3, torch.zeros(3, dtype=torch.float64))
    seen = set()
    for number, (expected, chosen) in enumerate(naive_ifca(list(start), clients, variant, mu)):
        fleet.begin(Moment(number, 20, 0.0))
        state, _ = algorithm.round(state, fleet, Rng(0).at(number, "server"))
        notes = fleet.queries[-1].notes
        assert [int(notes[i].branch) for i in range(CLIENTS)] == chosen, f"round {number}"
        close_models(state.weights, expected)
        seen |= set(chosen)
    assert len(seen) > 1
