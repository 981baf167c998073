"""FedTEM: what its specification says, one statement after the other."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.fedtem import Sent, fedtem
from fedtide.algorithms.fedtkm import fedtkm
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard, Sum
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, same
from fedtide.evaluate.metrics import branch_accuracy
from fedtide.learn.branched_task import logits_and_features, with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import Task
from fedtide.mixtures.gaussian import clip_shares, floor_variances, log_densities, posteriors
from fedtide.mixtures.priors import Block, EMOnly, Linear, Soft, Uniform
from fedtide.mixtures.step_size import Certainty, Overwrite
from fedtide.models.image_networks import MLP
from fedtide.runs.build import host_of, task_of
from helpers.answering import DIMS, WIDTH, Answering, begun, moving, plain_names, still, task
from helpers.relabeling import branches_relabeled
from helpers.toys import Played, played, toy

REVEALS = ("pi", "odds", "mu", "var", "n")
KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
ALWAYS_FIRST, ALWAYS_SECOND = {"kind": "block", "period": 1000}, {"kind": "block", "period": 1000, "phase": 500}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def rows_of(pt, n=None, mu=None, var=None, odds=None) -> dict[str, torch.Tensor]:
    """What participants with these posteriors of mode 1 would reveal."""
    first = torch.tensor(pt, dtype=torch.float64)
    pi = torch.stack([first, 1 - first], 1)
    m = len(first)
    draw = torch.Generator().manual_seed(0)
    return {
        "pi": pi,
        "odds": pi.clamp(min=1e-12).log() if odds is None else torch.tensor(odds, dtype=torch.float64),
        "mu": torch.rand(m, WIDTH, generator=draw, dtype=torch.float64) if mu is None else mu,
        "var": torch.rand(m, WIDTH, generator=draw, dtype=torch.float64) if var is None else var,
        "n": torch.arange(1.0, m + 1, dtype=torch.float64) if n is None else torch.tensor(n, dtype=torch.float64),
    }


def server(prior, **options):
    """The algorithm with plain SGD on the server, and its first state."""
    algorithm = fedtem(task(), prior=prior, server=SGD(), cohort=Arrivals(4), **options)
    return algorithm, begun(algorithm)


def after(algorithm, state, rows, round=0, likelier=0.5):
    """The state and the facts after a round in which participants revealed `rows` and sent no update."""
    n = float(rows["n"].sum())
    modes = torch.tensor([likelier, 1 - likelier], dtype=torch.float64) * n
    total = {"delta": Sum(still(state.weights), 1.0), "loss": Sum(1.0, 1.0), "modes": Sum(modes, n)}
    total["branches"] = Sum(torch.ones_like(modes), 1.0)
    return algorithm.round(state, Answering(total, rows, round), Rng(0))


# -- 1. one branch -----------------------------------------------------------------------------------------------------


@cache
def fedavg_of(optimizer: str) -> Played:
    return played(toy("fedavg", {"server": json.loads(optimizer)}, data=DATA))


@pytest.mark.parametrize("prior", ["linear", "cosine", "block", "soft", "uniform", "em-only"])
@pytest.mark.parametrize("optimizer", [KERAS, {"kind": "sgd", "lr": 0.7, "momentum": 0.5}], ids=["keras", "sgd"])
def test_one_branch_is_fedavg_with_the_same_server_optimizer_bit_for_bit(prior, optimizer):
    timed = {"kind": prior} | ({} if prior in ("uniform", "em-only") else {"period": 4})
    ours = played(toy("fedtem", {"branches": 1, "prior": timed, "server": optimizer}, data=DATA))
    theirs = fedavg_of(json.dumps(optimizer))
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert same(plain_names(mine.state.weights.params), other.state.weights.params)
        assert mine.facts["loss"] == other.facts["loss"]
        assert mine.state.pi.tolist() == [1.0]


# -- 2. at the peaks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize(("prior", "alone"), [(ALWAYS_FIRST, 0), (ALWAYS_SECOND, 1)])
def test_where_one_mode_is_alone_everyone_is_its_and_the_other_component_stays(update, prior, alone):
    run = played(toy("fedtem", {"prior": prior, "update": moving(update, 0.5)}))
    start = run.steps[0].received
    for step in run.steps:
        assert step.facts["assigned"].tolist() == [4 * (alone == 0), 4 * (alone == 1)]
        assert torch.equal(step.state.mu[1 - alone], start.mu[1 - alone])
        assert torch.equal(step.state.var[1 - alone], start.var[1 - alone])
        assert not torch.equal(step.state.mu[alone], step.received.mu[alone])
        assert step.state.started.tolist() == [alone == 0, alone == 1]
        expected = 0.99 * step.received.pi + 0.01 * torch.eye(2, dtype=torch.float64)[alone]
        torch.testing.assert_close(step.state.pi, expected, rtol=1e-12, atol=0)


# -- 3. a single participant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "a0", "rounds"), [("overwrite", 0.2, 4), ("certainty", 0.2, 1), ("certainty", 1.0, 4)]
)
@pytest.mark.parametrize(("prior", "alone"), [(ALWAYS_FIRST, 0), (ALWAYS_SECOND, 1)])
def test_a_single_participants_features_are_the_component(update, a0, rounds, prior, alone):
    """With a rate of 1 the server's network is the one that the client has just trained."""
    options = {"prior": prior, "update": moving(update, a0), "cohort": 1, "server": {"kind": "sgd"}}
    experiment = toy("fedtem", options, precision="fp64")
    run = played(experiment, rounds=rounds)
    population = run.host.population
    branched = with_branches(task_of(experiment, experiment.method[0], population.rows), "head", 2)
    moment = run.steps[-1].moment
    (client,) = population.arrivals(1, moment).tolist()
    _, z = logits_and_features(branched, run.state.weights, population.shard(client, moment).x)
    torch.testing.assert_close(run.state.mu[alone], z.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(run.state.var[alone], z.var(0, correction=0), rtol=1e-10, atol=1e-12)


def test_later_steps_of_certainty_move_a_part_of_the_way():
    algorithm, state = server(Block(1000), update=Certainty(a0=0.2))
    state, _ = after(algorithm, state, rows_of([0.9] * 4))
    rows = rows_of([0.9] * 4, mu=torch.full((4, WIDTH), 7.0, dtype=torch.float64))
    new, _ = after(algorithm, state, rows)
    torch.testing.assert_close(new.mu[0], state.mu[0] + 0.2 * (7.0 - state.mu[0]))


# -- 4. the prior and the participants' own view -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_prior_that_says_what_the_posteriors_say_changes_nothing(seed):
    """q(t) = n_1/m, with n_1 the participants whose own posterior says 1."""
    free = played(toy("fedtem", {"prior": {"kind": "em-only"}, "update": "overwrite"}), rounds=1, seed=seed)
    first = int(free.steps[0].facts["assigned"][0])
    # q(0) = 1, 3/4, ..., 0 for a peak at round 0, -1, ..., -4.
    prior = {"kind": "linear", "period": 8, "phase": -(4 - first)}
    timed = played(toy("fedtem", {"prior": prior, "update": "overwrite"}), rounds=1, seed=seed)
    assert float(timed.steps[0].facts["prior"][0]) == first / 4
    assert same(replace(timed.state, prior=None), free.state)


@pytest.mark.parametrize("first", range(5))
def test_so_it_is_for_any_number_of_them(first):
    pt = [0.5, 0.9, 0.75, 0.6][:first] + [0.1, 0.4, 0.3, 0.49][first:]
    linear, state = server(Linear(8, phase=-(4 - first)), update=Overwrite())
    free, alike = server(EMOnly(), update=Overwrite())
    assert same(state, alike)
    ours, facts = after(linear, state, rows_of(pt))
    theirs, _ = after(free, alike, rows_of(pt))
    assert facts["assigned"].tolist() == [first, 4 - first]
    assert same(replace(ours, prior=None), theirs)


@pytest.mark.parametrize(
    ("q", "first"), [(0.25, 3), (0.05, 1), (0.049, 0), (0.0, 0), (1.0, 10), (0.95, 10), (0.949, 9)]
)
def test_how_many_of_ten_are_of_the_first_mode(q, first):
    algorithm, state = server(Linear(2000, phase=-(1 - q) * 1000))
    _, facts = after(algorithm, state, rows_of([0.1 * i for i in range(10)]))
    assert float(facts["prior"][0]) == pytest.approx(q, abs=1e-12)
    assert facts["assigned"].tolist() == [first, 10 - first]


def test_the_likeliest_are_of_the_first_mode_whatever_they_thought():
    """Sorted by posterior, then log-odds, then id; statistics of the members, weighted by their rows."""
    odds = [[0.0, 9.0], [2.0, 0.0], [3.0, 0.0], [2.0, 0.0]]
    rows = rows_of([0.2, 0.2, 0.2, 0.2], odds=odds, n=[1, 2, 3, 4])
    algorithm, state = server(Linear(8, phase=-2), update=Overwrite(), beta=0.9)
    new, facts = after(algorithm, state, rows)
    assert facts["assigned"].tolist() == [2, 2]
    members = [[2, 1], [3, 0]]  # log-odds 3, then 2 with the lower id
    for k, inside in enumerate(members):
        n = rows["n"][inside]
        torch.testing.assert_close(new.mu[k], n @ rows["mu"][inside] / n.sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(new.var[k], n @ rows["var"][inside] / n.sum(), rtol=1e-12, atol=0)
    assert new.pi.tolist() == pytest.approx([0.9 * 0.5 + 0.1 * 0.5, 0.5], abs=1e-15)


def test_whoever_dropped_out_is_not_counted():
    """m is how many answered: of three with q = 3/4, floor(2.25 + 1/2) = 2 are of the first mode."""
    algorithm, state = server(Linear(8, phase=-1))
    _, facts = after(algorithm, state, rows_of([0.1, 0.2, 0.3]))
    assert facts["assigned"].tolist() == [2, 1]
    assert algorithm.round(state, Answering(None), Rng(0)) == (state, {})


def test_total_variance_counts_the_spread_of_the_means():
    rows = rows_of([0.9] * 4)
    algorithm, state = server(Block(1000), update=Overwrite(), variance="total")
    new, _ = after(algorithm, state, rows)
    n = rows["n"] / rows["n"].sum()
    center = n @ rows["mu"]
    torch.testing.assert_close(new.var[0], n @ rows["var"] + n @ (rows["mu"] - center) ** 2, rtol=1e-12, atol=0)


def test_those_who_disagree_can_be_left_out_of_the_statistics_but_not_of_the_share():
    rows = rows_of([0.9, 0.2, 0.8, 0.4], n=[1, 1, 1, 1])
    algorithm, state = server(Block(1000), update=Overwrite(), consistent_only=True, beta=0.0)
    new, facts = after(algorithm, state, rows)
    assert facts["assigned"].tolist() == [4, 0]
    torch.testing.assert_close(new.mu[0], rows["mu"][[0, 2]].mean(0), rtol=1e-12, atol=0)
    assert new.pi.tolist() == [1.0, 0.0]
    # Where nobody agrees, everyone counts.
    nobody = rows_of([0.1] * 4, n=[1, 1, 1, 1])
    new, _ = after(algorithm, state, nobody)
    torch.testing.assert_close(new.mu[0], nobody["mu"].mean(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
def test_without_a_prior_a_component_moves_by_its_share(update):
    rows = rows_of([0.9, 0.2, 0.8, 0.4], n=[1, 1, 1, 5])
    algorithm, state = server(EMOnly(), update=moving(update, 0.5))
    once, _ = after(algorithm, state, rows)  # the first update goes all the way
    shifted = {**rows, "mu": rows["mu"] + 1.0}
    twice, _ = after(algorithm, once, shifted)
    for k, share in enumerate((2 / 8, 6 / 8)):
        moved = 1.0 if update == "overwrite" else 0.5 * share
        torch.testing.assert_close(twice.mu[k] - once.mu[k], torch.full((WIDTH,), moved, dtype=torch.float64))


def test_where_a_linear_prior_says_one_half_no_component_is_certain():
    """a_k = a0 * max(0, 2 q_k - 1) = 0 at s = T/4."""
    algorithm, state = server(Linear(8), update=Certainty(a0=0.5))
    new, facts = after(algorithm, state, rows_of([0.9, 0.2, 0.8, 0.4]), round=2)
    assert facts["prior"].tolist() == [0.5, 0.5]
    assert torch.equal(new.mu, state.mu)
    assert torch.equal(new.var, state.var)


# -- 5. names of modes -------------------------------------------------------------------------------------------------


def mirrored(state):
    return replace(
        branches_relabeled(state, [1, 0]),
        mu=state.mu.flip(0),
        var=state.var.flip(0),
        pi=state.pi.flip(0),
        started=state.started.flip(0),
        prior=None if state.prior is None else 1 - state.prior,
    )


@pytest.mark.parametrize(
    ("kind", "update"),
    [("linear", "certainty"), ("cosine", "overwrite"), ("block", "certainty"), ("em-only", "overwrite")],
)
def test_the_other_names_and_half_a_period_later_give_the_mirrored_result(kind, update):
    """T = 6 and m = 4: q m + 1/2 is never whole."""
    states, predictions = [], []
    for phase in (0, 3):
        prior = {"kind": kind} | ({} if kind == "em-only" else {"period": 6, "phase": phase})
        options = {"prior": prior, "update": moving(update, 0.5), "server": KERAS}
        run = played(toy("fedtem", options, precision="fp64", rounds=12), rounds=1)
        algorithm, fleet, start = run.host.algorithm, run.fleet, run.steps[0].received
        state = mirrored(start) if phase else start
        for t in range(12):
            fleet.begin(Moment(t, 12, float(t)))
            state, _ = algorithm.round(state, fleet, Rng(0).at(t, "server"))
        states.append(state)
        payload, _ = algorithm.serve(state, run.host.population.clients)
        x = run.host.population.rows.x[:40]
        predictions.append(algorithm.predict(payload, [None] * 8, x, torch.arange(40) // 5))
    ours, theirs = states[0], mirrored(states[1])
    for name, value in ours.weights.params.items():
        torch.testing.assert_close(theirs.weights.params[name], value, rtol=1e-9, atol=1e-9)
    for part in ("mu", "var", "pi"):
        torch.testing.assert_close(getattr(theirs, part), getattr(ours, part), rtol=1e-9, atol=1e-9)
    assert torch.equal(theirs.started, ours.started)
    assert torch.equal(predictions[0].choice, 1 - predictions[1].choice)
    torch.testing.assert_close(predictions[0].told, predictions[1].told, rtol=1e-8, atol=1e-8)


# -- 6. day and night --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identical", "seed"),
    [
        pytest.param(True, 1, id="identical components", marks=pytest.mark.thorough),  # in test_three_groups.py, three
        pytest.param(False, 0, id="random components", marks=pytest.mark.thorough),
    ],
)
def test_two_populations_that_lie_apart_get_a_branch_each(identical, seed):
    """T = 32, three periods, linear prior, certainty with 0.2: over 95% of clients at the right branch at the end."""
    experiment = toy(
        "fedtem",
        {
            "prior": {"kind": "linear", "period": 32},
            "update": Certainty(a0=0.2),
            "cohort": 10,
            "server": KERAS,
            "local": {"lr": 0.1, "batch_size": 8},
        },
        rounds=96,
        data={
            "source": {"kind": "gaussians", "samples": 600, "dims": 8, "classes": 3, "offset": 3.0, "separation": 1.0},
            "partition": {"kind": "iid", "clients": 40},
        },
        shift={"who": {"kind": "periodic", "period": 32}},
        model={"kind": "mlp", "hidden": [16]},
    )
    run = played(experiment, rounds=1, seed=seed)
    algorithm, fleet, state = run.host.algorithm, run.fleet, run.steps[0].received
    group = run.host.population.group
    if identical:
        state = replace(state, mu=torch.zeros_like(state.mu))
    trained, judged = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64)
    for t in range(96):
        fleet.begin(Moment(t, 96, float(t)))
        state, _ = algorithm.round(state, fleet, Rng(seed).at(t, "server"))
        if t < 64:
            continue
        for client, note in fleet.queries[-1].notes.items():
            trained[group[client], int(note.branch)] += 1
        if t % 8 == 7:
            clients = run.host.population.clients
            scores = fleet.score(algorithm.serve(state, clients)[0], clients)
            judged.index_add_(0, group[clients], scores.choice)
    assert branch_accuracy(trained) > 0.95
    assert branch_accuracy(judged) > 0.95
    # The day peak comes first, so the day is mode 1.
    assert trained[0, 0] > trained[0, 1]


# -- 7. shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prior", "beta"), [(Linear(32), 0.99), (EMOnly(), 0.5), (Block(50), 0.0)])
def test_shares_stay_on_the_simplex(prior, beta):
    algorithm, state = server(prior, beta=beta)
    draw = torch.Generator().manual_seed(1)
    rows = [rows_of(torch.rand(4, generator=draw).tolist(), n=torch.randint(1, 50, (4,), generator=draw).tolist())
            for _ in range(50)]  # fmt: skip
    lowest, highest, drift = 1.0, 0.0, 0.0
    for t in range(500):
        state, _ = after(algorithm, state, rows[t % 50], round=t)
        low, high = state.pi.tolist()
        lowest, highest = min(lowest, low, high), max(highest, low, high)
        drift = max(drift, abs(low + high - 1))
    assert lowest >= 0.0
    assert highest <= 1.0
    assert drift < 1e-12


def test_shares_may_be_kept_uniform():
    run = played(toy("fedtem", {"beta": 1.0}))
    assert all(step.state.pi.tolist() == [0.5, 0.5] for step in run.steps)


# -- 8. degenerate features --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize("level", [0.0, -1.0, 3.0, 1e4])
def test_constant_features_leave_everything_finite(update, level):
    """Every row the same, so that all variances are 0, with ReLU units that may be dead."""
    local = {"lr": 1e-3, "batch_size": 4, "max_grad_norm": 1.0}
    experiment = toy("fedtem", {"update": update, "local": local}, rounds=8)
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    rows = replace(host.population.rows, x=torch.full_like(host.population.rows.x, level))
    run = played(experiment, host=replace(host, population=replace(host.population, rows=rows)))
    for step in run.steps:
        assert all_finite([step.state, step.facts])
        assert len(step.facts["assigned"]) == 2
        assert int(step.facts["assigned"].sum()) == 4
    payload, _ = run.host.algorithm.serve(run.state, host.population.clients)
    assert (payload.mixture[1] >= 1e-6).all()
    assert not run.state.var.all()
    made = run.host.algorithm.predict(payload, [None], rows.x[:7], torch.zeros(7, dtype=torch.int64))
    assert all_finite(made.told)


# -- 10. a drawn branch ------------------------------------------------------------------------------------------------


def client(pi, mu=((0.0,) * WIDTH, (0.3,) * WIDTH), selection="sample", rows=7):
    """The work of one client and what it receives."""
    algorithm = fedtem(task(), LocalTrainer(0.01, batch_size=0), Linear(256), selection=selection)
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(rows, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (rows,), generator=draw), torch.arange(rows))
    payload = Sent(
        state.weights,
        (
            torch.tensor(mu, dtype=torch.float64),
            torch.full((2, WIDTH), 0.3, dtype=torch.float64),
            torch.tensor(pi, dtype=torch.float64),
        ),
    )
    _, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    own = posteriors(z, *payload.mixture)[0].mean(0)
    return algorithm.works["train"], payload, shard, z, own


def branch_at(work, payload, shard, key) -> int:
    return int(work(payload, None, shard, Moment(0, 10), key).notes.branch)


def test_a_drawn_branch_is_the_same_for_the_same_key_and_as_frequent_as_its_posterior():
    for given in ([0.5, 0.5], [0.2, 0.8]):
        work, payload, shard, _, own = client(given)
        assert 0.05 < float(own[0]) < 0.95
        keys = [Rng(0).at(t, 3, "train") for t in range(200)]
        drawn = [branch_at(work, payload, shard, key) for key in keys]
        assert drawn[:20] == [branch_at(work, payload, shard, key) for key in keys[:20]]
        deviation = (float(own[0] * own[1]) / 200) ** 0.5
        assert sum(drawn) / 200 == pytest.approx(float(own[1]), abs=4 * deviation)


def test_components_that_are_alike_are_drawn_as_the_shares_say():
    work, payload, shard, _, own = client([0.3, 0.7], mu=((0.0,) * WIDTH,) * 2)
    assert own.tolist() == pytest.approx([0.3, 0.7], abs=1e-12)
    drawn = [branch_at(work, payload, shard, Rng(1).at(t, "train")) for t in range(200)]
    assert sum(drawn) / 200 == pytest.approx(0.7, abs=4 * (0.21 / 200) ** 0.5)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 0.9])
def test_greedy_takes_the_largest_mean_posterior_and_bayes_that_of_all_rows_together(share):
    for selection in ("greedy", "bayes"):
        work, payload, shard, z, own = client([share, 1 - share], selection=selection)
        together = clip_shares(payload.mixture[2]).log() + log_densities(z, *payload.mixture[:2]).sum(0)
        expected = own.argmax() if selection == "greedy" else together.argmax()
        assert branch_at(work, payload, shard, Rng(0)) == int(expected)


def test_the_lowest_of_equals():
    for selection in ("greedy", "bayes"):
        work, payload, shard, _, _ = client([0.5, 0.5], mu=((0.0,) * WIDTH,) * 2, selection=selection)
        assert branch_at(work, payload, shard, Rng(0)) == 0


# -- what travels ------------------------------------------------------------------------------------------------------


def test_what_the_server_sees_of_a_client_is_what_is_said():
    run = played(toy("fedtem"), rounds=1)
    assert run.host.algorithm.traits.reveals == REVEALS
    assert fedtem(task(), prior=Uniform()).traits.reveals == REVEALS
    assert REGISTRY["fedtem"].keeps == "nothing"
    work, payload, shard, _, _ = client([0.5, 0.5])
    answer = work(payload, None, shard, Moment(0, 10), Rng(0))
    assert tuple(answer.rows) == REVEALS
    assert {name: tuple(value.shape) for name, value in answer.rows.items()} == {
        "pi": (2,), "odds": (2,), "mu": (WIDTH,), "var": (WIDTH,), "n": (),
    }  # fmt: skip
    assert all(value.dtype == torch.float64 for value in answer.rows.values())
    assert answer.memory is None
    algorithm, state = server(Linear(8))
    fleet = Answering(None)
    algorithm.round(state, fleet, Rng(0))
    assert [(question, names) for question, _, names in fleet.asked] == [("train", REVEALS)]


def test_statistics_are_those_of_the_updated_network_under_the_received_mixture():
    work, payload, shard, z_before, _ = client([0.2, 0.8], selection="greedy")
    answer = work(payload, None, shard, Moment(0, 10), Rng(0))
    delta = answer.total["delta"].value
    weights = replace(payload.weights, params={n: p + delta.params[n] for n, p in payload.weights.params.items()})
    _, z = logits_and_features(with_branches(task(), "head", 2), weights, shard.x)
    assert not torch.allclose(z, z_before)
    gamma, joint = posteriors(z, *payload.mixture)
    torch.testing.assert_close(answer.rows["pi"], gamma.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(answer.rows["odds"], joint.mean(0) - joint.mean(0)[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(answer.rows["mu"], z.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(answer.rows["var"], z.var(0, correction=0), rtol=1e-10, atol=1e-12)
    assert float(answer.rows["n"]) == 7.0
    assert answer.total["delta"].weight == 7.0
    likelier = (gamma[:, 0] > gamma[:, 1]).double().mean()
    torch.testing.assert_close(answer.total["modes"].value[0], likelier)


def test_statistics_are_taken_without_dropout():
    """Twice the same client with the same key, and features that are those of the network in evaluation mode."""

    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(DIMS, WIDTH), nn.ReLU(), nn.Dropout(0.5))
        net.add_module("head", nn.Linear(WIDTH, 3))
        return net

    dropping = Task(build, dtype=torch.float64, example=torch.zeros(1, DIMS))
    algorithm = fedtem(dropping, LocalTrainer(0.1, batch_size=0), Linear(256))
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(7, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (7,), generator=draw), torch.arange(7))
    payload = Sent(state.weights, (state.mu, state.var, state.pi))
    answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
    params = state.weights.params
    trained = {name: p + answer.total["delta"].value.params[name] for name, p in params.items()}
    z = (x @ trained["model.0.weight"].T + trained["model.0.bias"]).clamp(min=0)
    torch.testing.assert_close(answer.rows["mu"], z.mean(0), rtol=1e-10, atol=1e-12)
    gamma = posteriors(
        (x @ params["model.0.weight"].T + params["model.0.bias"]).clamp(min=0), state.mu, state.var, state.pi
    )[0]
    assert int(answer.notes.branch) == int(gamma.mean(0).argmax())


def test_variances_are_floored_where_they_are_used_and_not_where_they_are_kept():
    algorithm, state = server(Linear(8))
    var = torch.ones(2, WIDTH, dtype=torch.float64)
    var[0, 0] = 0.0
    state = replace(state, var=var)
    fleet = Answering(None)
    algorithm.round(state, fleet, Rng(0))
    assert torch.equal(fleet.asked[0][1].mixture[1], floor_variances(var, 1e-3))
    assert float(fleet.asked[0][1].mixture[1][0, 0]) == pytest.approx(1e-3 * 0.9, abs=1e-15)
    assert float(state.var[0, 0]) == 0.0


def test_a_client_without_rows_says_nothing():
    work, payload, shard, _, _ = client([0.5, 0.5])
    empty = Shard(shard.x[:0], shard.y[:0], shard.ids[:0])
    assert work(payload, None, empty, Moment(0, 10), Rng(0)) is None


# -- inference ---------------------------------------------------------------------------------------------------------


def test_all_rows_of_an_owner_choose_together_with_uniform_shares():
    algorithm, state = server(Linear(8))
    levels = torch.tensor([[0.5], [1.5]], dtype=torch.float64).expand(2, WIDTH)
    state = replace(state, pi=torch.tensor([0.999, 0.001], dtype=torch.float64), mu=levels)
    payload, slot = algorithm.serve(state, torch.arange(3))
    assert slot is None
    assert payload.mixture[2].tolist() == [0.5, 0.5]
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(30, DIMS, generator=draw, dtype=torch.float64)
    owner = torch.randint(6, (30,), generator=draw)
    made = algorithm.predict(payload, [None] * 6, x, owner)
    logits, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    gamma, _ = posteriors(z, state.mu, floor_variances(state.var), torch.tensor([0.5, 0.5]))
    for i in range(6):
        k = int(gamma[owner == i].mean(0).argmax())
        assert made.choice[owner == i].unique().tolist() == [k]
        torch.testing.assert_close(made.told[owner == i], logits[k, owner == i].log_softmax(-1))
    alone = algorithm.predict(payload, [None] * 30, x, torch.arange(30))
    assert torch.equal(alone.choice, gamma.argmax(1))
    assert len(alone.choice.unique()) == 2


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fedtem, fedtkm])
def test_a_soft_prior_over_three_groups_is_refused_when_the_algorithm_is_made(make):
    with pytest.raises(FedtideError, match="soft"):
        make(task(), prior=Soft(4), branches=3)


# -- where it begins ---------------------------------------------------------------------------------------------------


def test_the_first_components_are_small_random_means_and_the_first_centers_alike():
    """mu and c ~ N(0, 0.1^2), var = 1, pi uniform, alpha = 1; drawn by the key alone."""
    wide = Task(lambda: MLP(hidden=(2000,)).build((DIMS,), 3), example=torch.zeros(1, DIMS))
    for make, name in ((fedtem, "mu"), (fedtkm, "centers")):
        state = begun(make(wide, prior=Linear(8)))
        means = getattr(state, name)
        assert means.shape == (2, 2000)
        assert means.dtype == torch.float64
        assert float(means.mean()) == pytest.approx(0.0, abs=0.01)
        assert float(means.std()) == pytest.approx(0.1, abs=0.005)
        assert same(begun(make(wide, prior=Linear(8))), state)
        assert not state.started.any()
    state = begun(fedtem(wide, prior=Linear(8), branches=3))
    assert (state.var == 1).all()
    assert state.pi.tolist() == pytest.approx([1 / 3] * 3)
    assert state.prior is None
    assert begun(fedtkm(wide, prior=Linear(8))).log_alpha.tolist() == [0.0, 0.0]
