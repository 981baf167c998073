"""An independent naive AEM in plain torch and float64: rounds, mixtures, ensembles, fine-tuning, to 1e-8.

Softmax, cross-entropy, the mixture's `-log sum_e g_e p_e(y)`, AdamW, early stopping and all averages are written out;
autograd alone takes the derivatives. It shares no code with the package but the population (who is there, who holds
what), the modules that initial weights are drawn with, and the keys of shuffles, exploration and held-back rows.
"""

import math
from dataclasses import replace
from itertools import count

import pytest
import torch

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.runs.build import host_of
from helpers.branchnet import close, close_params, noted_run
from helpers.toys import played, toy

DIMS, CLASSES, J, ROUNDS = 4, 3, 3, 16
EPS, RATE, BATCH, EPOCHS = 0.3, 0.3, 4, 2
DATA = {
    "source": {"kind": "gaussians", "samples": 160, "dims": DIMS, "classes": CLASSES, "domains": 2},
    "partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 8},
}
LOCAL = {"lr": RATE, "batch_size": BATCH, "epochs": EPOCHS}


# -- networks and losses ----------------------------------------------------------------------------------------------


def probabilities(w, x):
    """softmax(V relu(U x + a) + b), (rows, outputs)."""
    return softmax(scores(w, x))


def scores(w, x):
    """V relu(U x + a) + b, (rows, outputs)."""
    hidden = x @ w["dense1.weight"].T + w["dense1.bias"]
    return torch.where(hidden > 0, hidden, 0.0) @ w["head.weight"].T + w["head.bias"]


def softmax(z):
    e = (z - z.max(1, keepdim=True).values).exp()
    return e / e.sum(1, keepdim=True)


def cross_entropy(w, x, y):
    return -probabilities(w, x)[torch.arange(len(y)), y].log().mean()


def mixed(gate, experts, x):
    """Eq. 5: sum_e g_e(x) p_e(y | x), (rows, classes); the client's own expert is the first."""
    g = probabilities(gate, x)
    return sum(g[:, e : e + 1] * probabilities(w, x) for e, w in enumerate(experts))


def gradient(loss, w, x, y):
    at = {name: value.clone().requires_grad_() for name, value in w.items()}
    return dict(zip(at, torch.autograd.grad(loss(at, x, y), list(at.values())), strict=True))


def batches(rows, generator, size=BATCH):
    order = torch.randperm(rows, generator=generator)
    return [order[i : i + size] for i in range(0, rows, size)]


# -- Algorithms 1 to 4 ------------------------------------------------------------------------------------------------


def exploring(decay, t):
    """The probability of a random model in round t = 0, 1, ..."""
    if decay == "constant":
        return EPS
    if decay == "inverse":
        return 1 / (t + 1)
    if decay == "power":
        return 1 / (t + 1) ** (-math.log(EPS) / math.log(ROUNDS / 8 + 1))
    return 1 / (t + 1) ** (2 / J)


def federated(population, models, rounds=ROUNDS, exploration="constant", freeze=None, weighting="samples"):
    """After each round: models, who took which, how many chose each by its loss so far, which are still trained."""
    models, active, picked = list(models), list(range(J)), [0] * J
    best, least, stale, judged = list(models), [math.inf] * J, [0] * J, [[] for _ in range(J)]
    for t in range(rounds):
        moment, taken, updates = Moment(t, ROUNDS, float(t)), {}, {j: [] for j in range(J)}
        received = list(models)
        for client in population.arrivals(4, moment).tolist() if active else []:
            shard, key = population.shard(client, moment), Rng(0).at(t, client, "train")
            x, y = shard.x.double(), shard.y
            draw = key.at("explore").numpy()
            if draw.random() < exploring(exploration, t):
                j = active[draw.integers(len(active))]
            else:
                losses = {j: float(cross_entropy(models[j], x, y)) for j in active}
                j = min(losses, key=losses.get)
                picked[j] += 1
            if shard.val is not None:
                loss = float(cross_entropy(models[j], shard.val.x.double(), shard.val.y))
                judged[j] += [loss] * len(shard.val)
            own, shuffle = dict(models[j]), key.at("shuffle").torch()
            for _ in range(EPOCHS):
                for rows in batches(len(y), shuffle):
                    g = gradient(cross_entropy, own, x[rows], y[rows])
                    own = {name: own[name] - RATE * g[name] for name in own}
            taken[client] = j
            updates[j].append((len(y) if weighting == "samples" else 1, own))
        for j, members in updates.items():
            n = sum(rows for rows, _ in members)
            if n:
                models[j] = {name: sum(rows / n * own[name] for rows, own in members) for name in models[j]}
        if freeze and (t + 1) % freeze["check_every"] == 0:
            for j in list(active):
                if not judged[j]:
                    continue
                value = sum(judged[j]) / len(judged[j])
                if value < least[j]:
                    best[j], least[j], stale[j] = received[j], value, 0
                else:
                    stale[j] += 1
                if stale[j] >= freeze["patience"]:
                    models[j] = best[j]
                    active.remove(j)
            judged = [[] for _ in range(J)]
        yield list(models), taken, list(picked), list(active)


CASES = [
    pytest.param({}, marks=pytest.mark.thorough),  # as others, but for what these say
    pytest.param({"exploration": "power"}, marks=pytest.mark.thorough),
    {"exploration": "inverse"}, {"exploration": "clusters"}, {"weighting": "uniform"},
    {"freeze": {"patience": 1, "check_every": 2}},
    {"freeze": {"patience": 2, "check_every": 1}, "exploration": "power"},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())) or "plain")
def test_rounds_agree_to_1e_8(case):
    kind = case.get("exploration", "constant")
    exploration = {"kind": kind, **({"epsilon": EPS} if kind in ("constant", "power") else {})}
    options = {"local": LOCAL, "clusters": J, **case, "exploration": exploration}
    run, noted = noted_run("aem", {"drop_unused": True, **options}, rounds=ROUNDS, data=DATA)
    start = [w.params for w in run.steps[0].received.weights]
    every = federated(run.host.population, start, **case)
    asked, seen, explorers = iter(noted.branches), set(), 0
    for t, (step, (models, taken, picked, active)) in enumerate(zip(run.steps, every, strict=True)):
        assert (next(asked) if taken else {}) == taken, f"round {t}"
        assert step.state.chosen.tolist() == picked, f"round {t}"
        assert step.state.active.nonzero().flatten().tolist() == active, f"round {t}"
        for j, (made, wanted) in enumerate(zip(step.state.weights, models, strict=True)):
            assert all(value.dtype == torch.float64 for value in made.params.values())
            close_params(made.params, wanted, f"of model {j} after round {t}")
        seen |= set(taken.values())
        explorers += len(taken)
    explorers -= sum(picked)
    assert seen == set(range(J))
    assert explorers
    assert sum(picked)
    assert (len(active) < J) == ("freeze" in case)


# -- what a client makes of the models --------------------------------------------------------------------------------

OWN = {"lr": 0.15, "epochs": 90, "batch_size": 8, "optimizer": "adamw", "weight_decay": 0.02}
GATE = {"lr": 0.1, "epochs": 80, "batch_size": 8, "optimizer": "adamw", "weight_decay": 0.1}
TUNE = {"lr": 0.03, "epochs": 80, "batch_size": BATCH, "optimizer": "adamw"}
WIDE = {"kind": "mlp", "hidden": [7]}
SMALL = {"kind": "mlp", "hidden": [6]}
WAYS = {
    "choice": {"kind": "choice"},
    "fine-tuned": {"kind": "fine-tuned", "solver": TUNE},
    "alone": {"kind": "alone", "solver": OWN, "model": WIDE},
    "ensemble of probabilities": {"kind": "ensemble", "solver": OWN, "model": WIDE},
    "ensemble of logits": {"kind": "ensemble", "solver": OWN, "of": "logits"},
    "mixture": {"kind": "mixture", "gate": SMALL, "gating": GATE, "solver": OWN},
    "mixture held": {"kind": "mixture", "gate": SMALL, "gating": GATE, "solver": OWN, "model": WIDE, "held": 0.3},
    "mixture tuned": {"kind": "mixture", "gate": SMALL, "gating": GATE, "solver": OWN, "model": WIDE, "tune": True},
    "mixture tuned held": {
        "kind": "mixture", "gate": SMALL, "gating": GATE, "solver": OWN, "tune": True, "held": 0.3,
    },
}  # fmt: skip
WHOSE = torch.tensor([1, 6])


def fresh(model, outputs, key):
    """A network's initial weights, drawn from a key."""
    built = from_dict({"model": model, "data": {"source": {"kind": "gaussians"}}, "method": [{"algorithm": "fedavg"}]})
    before = torch.get_rng_state()
    torch.manual_seed(key.at("module").number)
    module = built.model.build((DIMS,), outputs)
    torch.set_rng_state(before)
    return {name: value.detach().double() for name, value in module.named_parameters()}


def early_stopped(w, loss, train, val, solver, key, every, patience):
    """AdamW from `w` until `patience` looks in a row, one every so many epochs, have found nothing better.

    Returns the best of what was looked at, the start among it, and how many epochs it took.
    """
    rate, decay, b1, b2 = solver["lr"], solver.get("weight_decay", 0.0), 0.9, 0.999
    w, shuffle, steps = dict(w), key.at("shuffle").torch(), count(1)
    m, v = ({name: torch.zeros_like(value) for name, value in w.items()} for _ in range(2))
    best, stale = dict(w), 0
    least = float(loss(w, *val)) if val else None
    for epoch in range(1, solver["epochs"] + 1):
        for rows in batches(len(train[1]), shuffle, solver["batch_size"]):
            t, g = next(steps), gradient(loss, w, train[0][rows], train[1][rows])
            for name in w:
                m[name] = b1 * m[name] + (1 - b1) * g[name]
                v[name] = b2 * v[name] + (1 - b2) * g[name] ** 2
                moved = (m[name] / (1 - b1**t)) / ((v[name] / (1 - b2**t)).sqrt() + 1e-8)
                w[name] = w[name] - rate * decay * w[name] - rate * moved
        if not val:
            best = dict(w)
        elif epoch % every == 0:
            value = float(loss(w, *val))
            if value < least:
                best, least, stale = dict(w), value, 0
            else:
                stale += 1
                if stale == patience:
                    break
    return best, epoch


def parted(w, part):
    return {name.removeprefix(f"{part}/"): value for name, value in w.items() if name.startswith(f"{part}/")}


def personal(way, models, shard, key, x_test, model):
    """A client's probabilities of its test rows, and how many epochs each of its trainings took."""
    train, val = (shard.x.double(), shard.y), None
    if shard.val is not None and len(shard.val):
        val = (shard.val.x.double(), shard.val.y)
    kind = way["kind"]
    if kind in ("choice", "fine-tuned"):
        rows = train if val is None else val
        losses = [float(cross_entropy(w, *rows)) for w in models]
        chosen = models[losses.index(min(losses))]
        if kind == "choice":
            return probabilities(chosen, x_test), ()
        tuned, took = early_stopped(chosen, cross_entropy, train, val, way["solver"], key, every=5, patience=10)
        return probabilities(tuned, x_test), (took,)

    ours = theirs = train
    if way.get("held"):
        order = torch.from_numpy(key.at("held").numpy().permutation(len(shard)))
        cut = round(way["held"] * len(shard))
        theirs, ours = (tuple(part[rows.sort().values] for part in train) for rows in (order[:cut], order[cut:]))
    start = fresh(way.get("model", model), CLASSES, key.at("own"))
    own, took = early_stopped(start, cross_entropy, ours, val, way["solver"], key.at("alone"), every=5, patience=10)
    experts = [own, *models]
    if kind == "alone":
        return probabilities(own, x_test), (took,)
    if kind == "ensemble":
        if way.get("of") == "logits":
            return softmax(sum(scores(w, x_test) for w in experts)), (took,)
        return sum(probabilities(w, x_test) for w in experts) / len(experts), (took,)

    gate = fresh(way["gate"], len(experts), key.at("gate"))
    parts = {f"gate/{name}": value for name, value in gate.items()}
    if way.get("tune"):
        parts |= {f"{e}/{name}": value for e, w in enumerate(experts) for name, value in w.items()}

    def blend(w, x):
        return mixed(parted(w, "gate"), [parted(w, e) or still for e, still in enumerate(experts)], x)

    def loss(w, x, y):
        return -blend(w, x)[torch.arange(len(y)), y].log().mean()

    theirs = train if way.get("tune") else theirs  # experts that are tuned see all rows
    parts, gating = early_stopped(parts, loss, theirs, val, way["gating"], key.at("gating"), every=2, patience=20)
    return blend(parts, x_test), (took, gating)


def agree(way, rounds, data=DATA):
    """Naive rounds, then each client on its own, against the run and `fleet.score`.

    Returns how many epochs each training took, a row for each client, and how many clients chose each model.
    """
    options = {"local": LOCAL, "clusters": J, "exploration": {"epsilon": EPS}, "transforms": [way]}
    experiment, memory, made = (
        toy("aem", {"drop_unused": True, **options}, rounds=ROUNDS, precision="fp64", data=data),
        MemoryStore(None),
        {},
    )
    host = host_of(experiment, experiment.method[0], 0, memory)

    def adapt(payload, kept, shard, moment, key):
        answer = host.algorithm.adapt(payload, kept, shard, moment, key)
        made[key] = answer.memory
        return answer

    watched = replace(host, algorithm=replace(host.algorithm, adapt=adapt))
    run = played(experiment, rounds=rounds, host=watched, memory=memory)
    start = [w.params for w in run.steps[0].received.weights]
    *_, (models, _, picked, _) = federated(run.host.population, start, rounds)
    models = [w for w, by in zip(models, picked, strict=True) if by]
    algorithm, population, moment = run.host.algorithm, run.host.population, run.fleet.moment
    payload, _ = algorithm.serve(run.state, population.clients)
    judged = run.fleet.score(payload, WHOSE)
    epochs = []
    for place, client in enumerate(WHOSE.tolist()):
        ids, owner = population.pooled(WHOSE[place : place + 1], moment, "test")
        x, y = population.fetch(ids, torch.full_like(owner, client), moment)
        shard, key = population.shard(client, moment), Rng(0).at(moment.round, client, "adapt")
        p, took = personal(way, models, shard, key, x.double(), {"kind": "mlp", "hidden": [5]})
        found = algorithm.predict(payload, [made[key]], x, torch.zeros(len(x), dtype=torch.int64)).told
        close(found, p.log(), f"client {client}")
        close(judged.loss[place], -p[torch.arange(len(y)), y].log().sum(), f"loss of client {client}")
        assert int(judged.correct[place]) == int((p.argmax(1) == y).sum())
        epochs.append(took)
    return epochs, picked


@pytest.mark.parametrize(
    "name",  # that tuned experts see all rows is tried without validation rows, too
    [pytest.param(name, marks=[pytest.mark.thorough] if name == "mixture tuned held" else []) for name in WAYS],
)
def test_what_clients_make_of_the_models_agrees_to_1e_8(name):
    way = WAYS[name]
    epochs, _ = agree(way, rounds=4)
    # Some were stopped before the end, so that what is kept is the best and not the last.
    for took, solver in zip(zip(*epochs, strict=True), ("solver", "gating"), strict=False):
        assert min(took) < way[solver]["epochs"], took


@pytest.mark.parametrize("tune", [False, True])
def test_without_validation_rows_all_epochs_are_trained(tune):
    """The last weights are taken. A model that nobody chose in the only round is left out."""
    short = {"epochs": 7}
    way = {**WAYS["mixture held"], "tune": tune, "gating": {**GATE, **short}, "solver": {**OWN, **short}}
    epochs, picked = agree(way, rounds=1, data={**DATA, "split": {"val": 0.0, "test": 0.25}})
    assert epochs == [(7, 7)] * len(WHOSE)
    assert 0 < sum(by > 0 for by in picked) < J
