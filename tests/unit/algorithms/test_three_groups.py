"""Three groups and three branches: morning, noon and night, for every method that has branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.fedtem import fedtem
from fedtide.algorithms.scsgd import scsgd
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard, Sum, Weights
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.evaluate.metrics import branch_accuracy
from fedtide.learn.branched_task import logits_and_features, with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.mixtures.priors import Block, EMOnly, Linear
from fedtide.mixtures.step_size import Certainty
from fedtide.runs.build import host_of, task_of
from helpers.answering import DIMS, WIDTH, Answering, begun, moving, still, task
from helpers.relabeling import branches_relabeled
from helpers.toys import played, toy

KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
THREE = {
    "source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 3},
    "partition": {"kind": "iid", "clients": 12},
}
FAR = {
    "source": {
        "kind": "gaussians",
        "samples": 450,
        "dims": 8,
        "classes": 3,
        "domains": 3,
        "offset": 4.0,
        "separation": 1.0,
    },
    "partition": {"kind": "iid", "clients": 45},
}


def branches_of(fleet) -> dict[int, int]:
    """The branch that each client of the round trained."""
    return {client: int(note.branch) for client, note in fleet.queries[-1].notes.items()}


# -- who is who --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "identical", "seed"),
    [
        ("fedtem", {"update": Certainty(a0=0.2)}, True, 0),
        pytest.param("fedtem", {"update": Certainty(a0=0.2)}, False, 1, marks=pytest.mark.thorough),
        pytest.param("fedtkm", {"update": Certainty(a0=0.2)}, False, 0, marks=pytest.mark.thorough),
    ],
    ids=["fedtem from identical components", "fedtem", "fedtkm"],
)
def test_three_populations_that_lie_apart_get_a_branch_each(algorithm, options, identical, seed):
    """T = 24, three periods, linear prior, certainty with 0.2: over 95% of clients at the right branch at the end.

    Features are the inputs and do not move, so this is about the bookkeeping alone: where they are trained, those of a
    group that is away for a third of a period leave its component behind.
    """
    timed = {"prior": {"kind": "linear", "period": 24}, "branches": 3, "cohort": 12, "server": KERAS}
    local = {"lr": 0.1, "batch_size": 30}
    shift = {"who": {"kind": "periodic", "period": 24}}
    experiment = toy(algorithm, {**timed, "local": local, **options}, rounds=72, data=FAR, shift=shift, model="linear")
    run = played(experiment, rounds=1, seed=seed)
    rounds, fleet, state = run.host.algorithm.round, run.fleet, run.steps[0].received
    group, clients = run.host.population.group, run.host.population.clients
    if identical:
        state = replace(state, mu=torch.zeros_like(state.mu))
    trained = torch.zeros(3, 3)
    for t in range(72):
        fleet.begin(Moment(t, 72, float(t)))
        state, _ = rounds(state, fleet, Rng(seed).at(t, "server"))
        for client, k in branches_of(fleet).items() if t >= 48 else ():
            trained[group[client], k] += 1
    judged = torch.zeros(3, 3, dtype=torch.float64)
    scores = fleet.score(run.host.algorithm.serve(state, clients)[0], clients)
    judged.index_add_(0, group[clients], scores.choice)
    assert branch_accuracy(trained) > 0.95
    assert branch_accuracy(judged) > 0.95
    if algorithm == "fedtem":
        # Group k peaks as the prior says, so it is mode k. FedTKM's prior only stretches distances: names may differ.
        assert trained.argmax(1).tolist() == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("exponent", [0.25, 4.0])
def test_a_prior_that_is_wrong_about_the_exponent_still_tells_two_groups_apart(exponent):
    """The shift has another exponent than the prior assumes; features are the inputs, T = 32, three periods."""
    data = {**FAR, "source": {**FAR["source"], "domains": 2}, "partition": {"kind": "iid", "clients": 30}}
    prior = {"kind": "linear", "period": 32}
    options = {"prior": prior, "update": Certainty(a0=0.2), "cohort": 10, "local": {"lr": 0.1, "batch_size": 30}}
    shift = {"who": {"kind": "periodic", "period": 32, "exponent": exponent}}
    run = played(toy("fedtem", options, rounds=96, data=data, shift=shift, model="linear"), rounds=1)
    state, trained = run.steps[0].received, torch.zeros(2, 2)
    for t in range(96):
        run.fleet.begin(Moment(t, 96, float(t)))
        state, _ = run.host.algorithm.round(state, run.fleet, Rng(0).at(t, "server"))
        for client, k in branches_of(run.fleet).items() if t >= 64 else ():
            trained[run.host.population.group[client], k] += 1
    assert branch_accuracy(trained) > 0.95
    assert trained.argmax(1).tolist() == [0, 1]


def test_three_far_blobs_are_the_branches_of_their_groups():
    """T-shot k-means: from raw inputs, without a prior."""
    data = {**FAR, "source": {**FAR["source"], "samples": 90, "offset": 30.0}}
    run = played(toy("t-shot", {"shots": 9, "branches": 3}, data=data, shift={"who": {"kind": "always"}}))
    group, clients = run.host.population.group, run.host.population.clients
    scores = run.fleet.score(run.host.algorithm.serve(run.state, clients)[0], clients)
    table = torch.zeros(3, 3, dtype=torch.float64).index_add_(0, group[clients], scores.choice)
    assert branch_accuracy(table) == 1.0


# -- FedTEM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize("alone", [0, 1, 2])
def test_where_one_of_three_is_alone_everyone_is_its_and_the_others_stay(update, alone):
    prior = {"kind": "block", "period": 3000, "phase": -1000 * alone}
    run = played(toy("fedtem", {"prior": prior, "branches": 3, "update": moving(update, 0.5)}, data=THREE))
    start, others = run.steps[0].received, [k for k in range(3) if k != alone]
    one = torch.eye(3, dtype=torch.float64)[alone]
    for step in run.steps:
        assert step.facts["assigned"].tolist() == (4 * one).tolist()
        assert torch.equal(step.state.mu[others], start.mu[others])
        assert torch.equal(step.state.var[others], start.var[others])
        assert not torch.equal(step.state.mu[alone], step.received.mu[alone])
        assert step.state.started.tolist() == one.bool().tolist()
        torch.testing.assert_close(step.state.pi, 0.99 * step.received.pi + 0.01 * one, rtol=1e-12, atol=0)


def revealed(posterior: torch.Tensor, n: torch.Tensor, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """What participants with these mean posteriors would reveal."""
    features = torch.rand(2, len(n), WIDTH, generator=draw, dtype=torch.float64)
    return {"pi": posterior, "odds": posterior.clamp(min=1e-12).log(), "mu": features[0], "var": features[1], "n": n}


def after(algorithm, state, rows, round):
    """A round in which participants revealed `rows` and sent no update."""
    n = float(rows["n"].sum())
    total = {
        "delta": Sum(still(state.weights), 1.0),
        "loss": Sum(1.0, 1.0),
        "modes": Sum(rows["n"] @ rows["pi"], n),
        "branches": Sum(rows["pi"].sum(0), float(len(rows["n"]))),
    }
    return algorithm.round(state, Answering(total, rows, round), Rng(0))


@pytest.mark.parametrize(("prior", "beta"), [(Linear(33), 0.99), (EMOnly(), 0.5), (Linear(7), 0.0)])
def test_shares_of_three_stay_on_the_simplex(prior, beta, thorough):
    """Some rounds have nobody in a mode."""
    algorithm = fedtem(task(), prior=prior, branches=3, server=SGD(), cohort=Arrivals(5), beta=beta)
    state, draw = begun(algorithm), torch.Generator().manual_seed(1)
    cohorts = [
        revealed((4 * torch.randn(5, 3, generator=draw, dtype=torch.float64)).softmax(1),
                 torch.randint(1, 50, (5,), generator=draw).double(), draw)
        for _ in range(50)
    ]  # fmt: skip
    lowest, highest, drift = 1.0, 0.0, 0.0
    for t in range(1000 if thorough else 250):
        state, _ = after(algorithm, state, cohorts[t % 50], t)
        shares = state.pi.tolist()
        lowest, highest = min(lowest, *shares), max(highest, *shares)
        drift = max(drift, abs(sum(shares) - 1))
    assert lowest >= 0.0
    assert highest <= 1.0
    assert drift < 1e-12


@pytest.mark.parametrize("branches", [2, 3])
def test_without_a_prior_identical_components_send_everybody_to_the_first(branches):
    """The tie rule; nothing tells the components apart in the first round."""
    run = played(toy("fedtem", {"prior": "em-only", "branches": branches}, data=THREE), rounds=1)
    state = run.steps[0].received
    state = replace(state, mu=torch.zeros_like(state.mu))
    run.fleet.begin(Moment(0, 6, 0.0))
    new, facts = run.host.algorithm.round(state, run.fleet, Rng(0).at(0, "server"))
    assert facts["assigned"].tolist() == [4] + [0] * (branches - 1)
    assert set(branches_of(run.fleet).values()) == {0}
    assert torch.equal(new.mu[1:], state.mu[1:])


# -- names of modes ----------------------------------------------------------------------------------------------------

TURN = [1, 2, 0]
"""Mode k is called TURN[k]; its peak is a third of a period before that of the mode that had the name."""


def turned(state):
    """A state with the modes' other names."""
    new = branches_relabeled(state, TURN)
    back = torch.tensor(TURN).argsort()
    for name in ("mu", "var", "pi", "started", "centers"):
        if hasattr(state, name):
            new = replace(new, **{name: getattr(state, name)[back]})
    if hasattr(state, "log_alpha"):
        log_alpha = state.log_alpha[back]
        new = replace(new, log_alpha=log_alpha - log_alpha[0])  # all relative to the first
    return replace(new, prior=None) if hasattr(state, "prior") else new


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param("fedtem", {"prior": "linear", "update": "overwrite"}, marks=pytest.mark.thorough),
        ("fedtem", {"prior": "cosine", "update": Certainty(a0=0.5)}),
        ("fedtem", {"prior": "em-only"}),
        ("fedtkm", {"prior": "linear", "alpha": {"kind": "integral", "eta": 0.2}}),
        pytest.param("fedtkm", {"prior": "cosine", "update": Certainty(a0=0.5)}, marks=pytest.mark.thorough),
        ("scsgd", {"prior": "linear", "lam": 0.0}),
        ("min-loss", {"normalize_by": "members"}),
    ],
)
def test_other_names_and_a_third_of_a_period_give_the_renamed_result(algorithm, options):
    """T = 9 and m = 4: no round in which shares, or what is left of them, tie."""
    states, predictions = [], []
    for phase in (0, -3):
        given = {**options, "branches": 3, "server": KERAS}
        if "prior" in options:
            rhythm = {} if options["prior"] == "em-only" else {"period": 9, "phase": phase}
            given["prior"] = {"kind": options["prior"], **rhythm}
        run = played(toy(algorithm, given, precision="fp64", rounds=12, data=THREE), rounds=1)
        made, fleet, start = run.host.algorithm, run.fleet, run.steps[0].received
        state = turned(start) if phase else start
        for t in range(12):
            fleet.begin(Moment(t, 12, float(t)))
            state, _ = made.round(state, fleet, Rng(0).at(t, "server"))
        states.append(state)
        payload, _ = made.serve(state, run.host.population.clients)
        x = run.host.population.rows.x[:40]
        predictions.append(made.predict(payload, [None] * 8, x, torch.arange(40) // 5))
    ours, theirs = turned(states[0]), states[1]
    for name, value in ours.weights.params.items():
        torch.testing.assert_close(theirs.weights.params[name], value, rtol=1e-9, atol=1e-9)
    for part in ("mu", "var", "pi", "centers", "log_alpha"):
        if hasattr(ours, part):
            torch.testing.assert_close(getattr(theirs, part), getattr(ours, part), rtol=1e-9, atol=1e-9)
    assert torch.equal(torch.tensor(TURN)[predictions[0].choice], predictions[1].choice)
    torch.testing.assert_close(predictions[0].told, predictions[1].told, rtol=1e-8, atol=1e-8)


# -- SCSGD -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["linear", "block"])
def test_with_three_blocks_everyone_trains_the_branch_of_its_group(prior):
    """Both clocks agree where blocks are blocks; the clock is the shift's where nothing else is said."""
    shift = {"who": {"kind": "block-cyclic", "period": 9}}
    experiment = toy("scsgd", {"prior": prior, "branches": 3}, rounds=19, data=THREE, shift=shift)
    assert experiment.method[0].options["prior"]["phase"] == (1.0 if prior == "linear" else 0)
    run = played(experiment, rounds=1)
    group, state = run.host.population.group, run.steps[0].received
    for t in range(19):
        run.fleet.begin(Moment(t, 19, float(t)))
        state, _ = run.host.algorithm.round(state, run.fleet, Rng(0).at(t, "server"))
        assert len(branches_of(run.fleet)) == 4
        assert all(k == int(group[client]) == t % 9 // 3 for client, k in branches_of(run.fleet).items()), f"round {t}"


@pytest.mark.parametrize("server", [KERAS, {"kind": "sgd", "momentum": 0.5}], ids=["keras", "momentum"])
def test_without_a_trunk_every_block_has_a_fedavg_of_its_own(server):
    """All of a softmax regression is its head; a model that waits for its block keeps its moments."""
    shift = {"who": {"kind": "block-cyclic", "period": 6}}
    given = {"data": THREE, "shift": shift, "model": "linear", "rounds": 14}
    options = {"prior": "block", "branches": 3, "lam": 0.0, "server": server}
    ours = played(toy("scsgd", options, **given))
    alone = played(toy("fedavg", {"server": server}, **given), rounds=1)
    start, algorithm = ours.steps[0].received.weights, alone.host.algorithm
    names = {name: name.split(".")[-1] for name in alone.state.weights.params}
    states = []
    for k in range(3):
        own = Weights({name: start.params[f"model.head.copies.{k}.{part}"] for name, part in names.items()})
        states.append(replace(alone.steps[0].received, weights=own))
    for t, step in enumerate(ours.steps):
        alone.fleet.begin(Moment(t, 14, float(t)))
        k = t % 6 // 2
        states[k], _ = algorithm.round(states[k], alone.fleet, Rng(0).at(t, "server"))
        for j in range(3):
            for name, part in names.items():
                found = step.state.weights.params[f"model.head.copies.{j}.{part}"]
                torch.testing.assert_close(found, states[j].weights.params[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("prior", "expected"),
    [(Linear, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0]), (Block, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0])],
)
@pytest.mark.parametrize("phase", [0, 5])
def test_the_clock_of_three_by_hand(prior, expected, phase):
    """T = 12: peaks at 0, 4 and 8; at 2, 6 and 10 two shares are one half, and the first of equals is trained."""
    algorithm = scsgd(task(), LocalTrainer(0.01, batch_size=0), prior(12, phase), branches=3)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(5, DIMS, generator=draw, dtype=torch.float64)
    shard, payload = Shard(x, torch.arange(5) % 3, torch.arange(5)), begun(algorithm).weights
    work = algorithm.works["train"]
    found = [int(work(payload, None, shard, Moment(t + phase, 20), Rng(0)).notes.branch) for t in range(13)]
    assert found == expected


# -- Min Loss ----------------------------------------------------------------------------------------------------------


def test_the_least_of_three_losses_decides():
    """As IFCA with a shared trunk: the branch with the smallest mean cross-entropy of the received network."""
    experiment = toy("min-loss", {"branches": 3, "lam": 0.5, "eps": 0.9}, rounds=8, data=THREE)
    run = played(experiment, rounds=1)
    population, state = run.host.population, run.steps[0].received
    network = with_branches(task_of(experiment, experiment.method[0], population.rows), "head", 3)
    seen = set()
    for t in range(8):
        moment, received = Moment(t, 8, float(t)), state
        run.fleet.begin(moment)
        state, _ = run.host.algorithm.round(received, run.fleet, Rng(0).at(t, "server"))
        for client, k in branches_of(run.fleet).items():
            shard = population.shard(client, moment)
            losses = [
                float(F.cross_entropy(z, shard.y)) for z in logits_and_features(network, received.weights, shard.x)[0]
            ]
            assert k == losses.index(min(losses))
            seen.add(k)
    assert len(seen) > 1


# -- FedEM -------------------------------------------------------------------------------------------------------------


def test_other_names_of_three_components_rename_a_clients_answer():
    algorithm = fedem(task(), LocalTrainer(0.1, batch_size=2, epochs=2), components=3, component_layer="head")
    weights, draw = begun(algorithm).weights, torch.Generator().manual_seed(2)
    x = torch.randn(9, DIMS, generator=draw, dtype=torch.float64)
    shard, back = Shard(x, torch.arange(9) % 3, torch.arange(9)), torch.tensor(TURN).argsort()

    def answered(received, pi):
        answer = algorithm.works["train"](received, {"pi": pi}, shard, Moment(0, 9), Rng(0))
        return answer.memory["pi"], detached(answer.total["delta"].value)

    pi = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    blend, delta = answered(weights, pi)
    other, renamed = answered(branches_relabeled(weights, TURN), pi[back])
    torch.testing.assert_close(other, blend[back], rtol=1e-12, atol=1e-14)
    for name, value in branches_relabeled(delta, TURN).params.items():
        torch.testing.assert_close(renamed.params[name], value, rtol=1e-9, atol=1e-12)
    made, other = (
        algorithm.predict(received, [{"pi": mine}], shard.x, torch.zeros(9).long())
        for received, mine in ((weights, blend), (branches_relabeled(weights, TURN), blend[back]))
    )
    torch.testing.assert_close(other.told, made.told, rtol=1e-12, atol=1e-14)
    assert torch.equal(other.choice, torch.tensor(TURN)[made.choice])


@pytest.mark.thorough  # as two kinds do, in test_baselines.py
def test_three_kinds_of_clients_end_in_a_component_each():
    """The same rows, whose labels each kind of client turns by another number of classes: blends near one-hot."""
    data = {
        "source": {"kind": "gaussians", "samples": 600, "dims": 4, "classes": 3, "domains": 1, "separation": 3.0},
        "partition": {"kind": "iid", "clients": 9},
        "groups": {"by": "none"},
        "held_out_clients": {"clients": 0},
    }
    local = {"lr": 0.2, "batch_size": 10, "epochs": 2}
    options = {"components": 3, "cohort": {"kind": "everyone"}, "local": local, "server": {"kind": "sgd"}}
    experiment = toy("fedem", {**options}, rounds=40, data=data, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    y, train = host.population.rows.y.clone(), host.population.parts["train"]
    for client in range(9):
        y[train[client].long()] = (y[train[client].long()] + client) % 3
    turned_labels = replace(host.population, rows=replace(host.population.rows, y=y))
    memory = MemoryStore(None)
    played(experiment, host=replace(host, population=turned_labels), memory=memory)
    pi = torch.stack([memory.read(client, (40, 0))["pi"] for client in range(9)])
    assert (pi.max(1).values > 0.9).all()
    assert len(pi.argmax(1)[:3].unique()) == 3
    assert torch.equal(pi.argmax(1), pi.argmax(1)[:3].repeat(3))
