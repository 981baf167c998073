"""The baselines of the periodic shift, and which rows decide together at inference."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import tshot
from fedtide.core.base import Moment, Shard, Sum
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.evaluate.metrics import branch_accuracy
from fedtide.fleets.ask import Ask, Scoring
from fedtide.fleets.scoring import BATCH, decision_units
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import logits_and_features, with_branches
from fedtide.mixtures.branches import branch_losses, certainty
from fedtide.mixtures.centers import Sent, cluster_reports, nearest
from fedtide.models.branched import Averaged, branched
from fedtide.models.networks import MLP
from fedtide.runs.build import host_of
from helpers.answering import DIMS, Answering, begun, identity, task
from helpers.branchnet import Noted
from helpers.studies import lines_of, run_of, study
from helpers.toys import played, toy

KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
FAR = {
    "source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "offset": 30.0},
    "partition": {"kind": "iid", "clients": 8},
}


def noted(experiment, **named):
    """A run, and for each ask the branch that each client trained."""
    seen = []
    run = played(experiment, fleet=lambda fleet: seen.append(Noted(fleet)) or seen[0], **named)
    return run, seen[0].branches


def rows(count: int = 7, seed: int = 2) -> Shard:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIMS, generator=draw, dtype=torch.float64)
    return Shard(x, torch.randint(3, (count,), generator=draw), torch.arange(count))


def trained_by(algorithm, payload, shard, memory=None):
    return algorithm.works["train"](payload, memory, shard, Moment(0, 10), Rng(0).at(0, 3, "train"))


# -- SCSGD -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [KERAS, {"kind": "sgd"}], ids=["keras", "sgd"])
def test_with_a_whole_model_for_each_block_scsgd_is_fedavg_that_sleeps(server):
    """Blocks of three rounds: the first model learns in rounds 0-2 as FedAvg's does, and waits in rounds 3-5."""
    shift = {"who": {"kind": "block-cyclic", "period": 6}}
    whole = {"prior": "block", "branch_layer": "*", "server": server}
    run = played(toy("scsgd", whole, rounds=12, shift=shift))
    plain = played(toy("fedavg", {"server": server}, rounds=12, shift=shift), rounds=3)

    def model(step, k: int) -> dict:
        return {
            name.partition(f"copies.{k}.")[2]: p for name, p in step.state.weights.params.items() if f".{k}." in name
        }

    assert set(model(run.steps[0], 0)) == set(plain.state.weights.params)
    for ours, theirs in zip(run.steps[:3], plain.steps, strict=True):
        assert same(model(ours, 0), theirs.state.weights.params)
        assert same(model(ours, 1), model(run.steps[0], 1))
    for step in run.steps[3:6]:
        assert same(model(step, 0), plain.state.weights.params)
    assert not same(model(run.steps[5], 1), model(run.steps[2], 1))


# -- T-shot ------------------------------------------------------------------------------------------------------------


def test_two_far_blobs_are_the_branches_of_their_groups():
    run, branches = noted(toy("t-shot", {"shots": 4}, data=FAR))
    group, population = run.host.population.group, run.host.population
    clients = torch.cat([population.clients, population.held_out_clients])
    scores = run.fleet.score(run.host.algorithm.serve(run.state, clients)[0], clients)
    table = torch.zeros(2, 2, dtype=torch.float64).index_add_(0, group[clients], scores.choice)
    assert branch_accuracy(table) == 1.0
    trained = torch.zeros(2, 2)
    for asked in branches[4:]:
        for client, k in asked.items():
            trained[group[client], k] += 1
    assert branch_accuracy(trained) == 1.0
    means = torch.stack([population.rows.x[population.rows.domain == k].mean(0) for k in range(2)])
    assert float(torch.cdist(run.state.centers, means).min(1).values.max()) < 1.0


def test_rounds_of_collecting_are_no_rounds(tmp_path):
    """Nothing is trained in them and they are not on record; what they cost is told."""
    shots = {"name": "shots", "algorithm": "t-shot", "shots": 3, "cohort": 4, "local": {"lr": 0.1, "batch_size": 4}}
    alone = {**shots, "name": "alone", "algorithm": "min-loss"}
    del alone["shots"]
    experiment = study(shots, alone, rounds=5)
    numbers = []
    for method in (0, 1):
        run = run_of(experiment, tmp_path, method=method)
        list(run.play())
        numbers.append([line["round"] for line in lines_of(run.folder)])
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 5
    run, branches = noted(toy("t-shot", {"shots": 3}, rounds=5))
    assert [len(trained) for trained in branches] == [0] * 3 + [4] * 5
    assert [step.moment.round for step in run.steps] == [0, 1, 2, 3, 4]
    assert run.steps[0].received.centers.shape == (2, 4)
    assert run.steps[0].facts["collected"] == run.steps[4].facts["collected"] > 0
    untouched = run.host.algorithm.init(run.fleet, Rng(0).at(-1, "server"))
    assert same(run.steps[0].received.weights, untouched.weights)
    assert same(run.steps[0].received.server, untouched.server)


def test_without_a_report_all_rows_train_the_first_branch():
    centers = cluster_reports(lambda x, counts: x[:2], torch.empty(0), torch.empty(0), 2)
    assert nearest(Sent(None, centers), torch.ones(3, 4)).tolist() == [0, 0, 0]


def test_every_row_trains_the_branch_of_its_center():
    """A client with rows of both modes trains both branches, each by its rows, as shares of the batch."""
    algorithm = tshot(identity(2, 3), LocalTrainer(0.1, batch_size=0), 8, lam=0.0)
    state = begun(algorithm)
    x = torch.tensor([[5.0, 5.0], [-5.0, -5.0], [6.0, 5.0], [5.0, 4.0]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([0, 1, 2, 0]), torch.arange(4))
    centers = torch.tensor([[-5.0, -5.0], [5.0, 5.0]])
    answer = trained_by(algorithm, Sent(state.weights, centers), shard)
    k = torch.tensor([1, 0, 1, 1])
    assert answer.total["branches"].value.tolist() == [0.25, 0.75]
    assert int(answer.notes.branch) == 1
    delta = answer.total["delta"].value.params
    for branch in range(2):
        w, b = (state.weights.params[f"model.head.copies.{branch}.{part}"] for part in ("weight", "bias"))
        mine = k == branch
        error = (F.softmax(x[mine] @ w.T + b, -1) - F.one_hot(shard.y[mine], 3)) / 4
        torch.testing.assert_close(delta[f"model.head.copies.{branch}.weight"], -0.1 * error.T @ x[mine])
        torch.testing.assert_close(delta[f"model.head.copies.{branch}.bias"], -0.1 * error.sum(0))
    made = algorithm.predict(Sent(state.weights, centers), [None], x, torch.zeros(4).long())
    assert torch.equal(made.choice, k)


def test_centers_of_empty_clusters_are_not_taken_for_centers():
    """The server takes the largest first, then the farthest, and no padding at the origin."""
    algorithm = tshot(identity(2, 2), shots=1)
    state = begun(algorithm)
    rows = {
        "centers": torch.tensor([[[9.0, 9.0], [0.0, 0.0]], [[8.0, 9.0], [5.0, 5.0]]]),
        "counts": torch.tensor([[4.0, 0.0], [2.0, 1.0]]),
    }
    fleet = Answering({"rows": Sum(7.0, 2.0)}, rows, round=-1)
    new, facts = algorithm.round(state, fleet, Rng(0))
    assert facts == {}
    assert [(question, names) for question, _, names in fleet.asked] == [("collect", ("centers", "counts"))]
    torch.testing.assert_close(new.centers, torch.tensor([[(4 * 9.0 + 2 * 8.0) / 6, 9.0], [5.0, 5.0]]))
    assert len(new.found) == len(new.counts) == 0


# -- Vanilla -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["row", "client"])
def test_the_more_certain_branch_of_vanilla_may_answer(per):
    run = played(toy("vanilla", {"choose_per": per}, rounds=2))
    x, owner = run.host.population.rows.x[:20], torch.arange(20) % 3
    made = run.host.algorithm.predict(run.state.weights, [None] * 3, x, owner)
    net = Averaged(branched(MLP(hidden=(5,)).build((4,), 3), "head", 2))
    net.load_state_dict(run.state.weights.params)
    with torch.no_grad():
        logits, _ = net.model(x)
    sure = certainty(logits)
    chosen = sure.argmax(0)
    if per == "client":
        chosen = torch.stack([sure[:, owner == i].mean(1).argmax() for i in range(3)])[owner]
    assert torch.equal(made.choice, chosen)
    torch.testing.assert_close(made.told, F.log_softmax(logits[chosen, torch.arange(20)], -1))
    plain = played(toy("vanilla", rounds=2))
    assert same(plain.state.weights.params, run.state.weights.params)


# -- FedEM -------------------------------------------------------------------------------------------------------------


def e_step(losses, pi):
    """q and the new blend, with explicit loops."""
    q = torch.zeros(losses.shape[1], losses.shape[0], dtype=torch.float64)
    for s in range(losses.shape[1]):
        joint = [math.log(pi[k]) - float(losses[k, s]) for k in range(len(pi))]
        top = max(joint)
        whole = sum(math.exp(j - top) for j in joint)
        for k in range(len(pi)):
            q[s, k] = math.exp(joint[k] - top) / whole
    return q, [float(q[:, k].mean()) for k in range(len(pi))]


def test_the_likelihood_does_not_fall_over_adaptation():
    """sum_s log sum_k pi_k exp(-loss_k(s)) over one, two, ... E-steps; nothing flows back."""
    last = -math.inf
    for steps in (1, 2, 5, 20):
        algorithm = fedem(task(), components=3, component_layer="head", e_steps=steps)
        weights, shard = begun(algorithm).weights, rows(12)
        answer = algorithm.adapt(weights, None, shard, Moment(0, 10), Rng(0))
        losses = branch_losses(logits_and_features(with_branches(task(), "head", 3), weights, shard.x)[0], shard)
        pi = [1 / 3] * 3
        for _ in range(steps):
            _, pi = e_step(losses, pi)
        assert answer.memory["pi"].tolist() == pytest.approx(pi, abs=1e-12)
        assert answer.total == {}
        likelihood = float(torch.logsumexp(answer.memory["pi"].log()[:, None] - losses, 0).sum())
        assert likelihood >= last - 1e-12
        last = likelihood


def test_clients_that_mean_opposite_things_end_in_a_component_each():
    """The same rows, labels turned by the client's parity: blends near one-hot, opposite for the two kinds."""
    data = {
        "source": {"kind": "gaussians", "samples": 400, "dims": 4, "classes": 2, "domains": 1, "separation": 3.0},
        "partition": {"kind": "iid", "clients": 8},
        "groups": {"by": "none"},
        "held_out_clients": {"clients": 0},
    }
    local = {"lr": 0.2, "batch_size": 10, "epochs": 2}
    options = {"cohort": {"kind": "everyone"}, "local": local, "server": {"kind": "sgd"}}
    experiment = toy("fedem", {**options}, rounds=40, data=data, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0)
    y, train = host.population.rows.y.clone(), host.population.parts["train"]
    for client in range(1, 8, 2):
        y[train[client].long()] = 1 - y[train[client].long()]
    turned = replace(host.population, rows=replace(host.population.rows, y=y))
    memory = MemoryStore(None)
    played(experiment, host=replace(host, population=turned), memory=memory)
    pi = torch.stack([memory.read(client, (40, 0))["pi"] for client in range(8)])
    assert (pi.max(1).values > 0.9).all()
    assert pi.argmax(1).unique(return_counts=True)[1].tolist() == [4, 4]
    assert len(pi.argmax(1)[::2].unique()) == 1


# -- which rows decide together ----------------------------------------------------------------------------------------


def grouped(owner, group, grouping):
    unit, first = decision_units(torch.tensor(owner), torch.tensor(group), grouping)
    return unit.tolist(), first.tolist()


def test_units_by_hand(monkeypatch):
    """Owners 0, 1, 2 of groups 1, 0, 1; batches of two rows instead of 64."""
    monkeypatch.setattr("fedtide.fleets.scoring.BATCH", 2)
    owner, group = [0, 0, 0, 1, 2, 2, 2], [1, 0, 1]
    assert grouped(owner, group, "client") == ([0, 0, 0, 1, 2, 2, 2], [0, 3, 4])
    assert grouped(owner, group, "sample") == ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6])
    assert grouped(owner, group, "batch") == ([0, 0, 1, 2, 3, 3, 4], [0, 2, 3, 4, 6])
    # Group 0 has one row; group 1 has those of owners 0 and 2, in order: batches (0, 1), (2, 4), (5, 6).
    assert grouped(owner, group, "oracle") == ([1, 1, 2, 0, 2, 3, 3], [3, 0, 2, 5])


def test_mixed_owners_are_told_apart():
    assert grouped([1, 0, 1, 0], [0, 0], "client") == ([1, 0, 1, 0], [1, 0])
    assert grouped([1, 0, 1, 0], [0, 0], "batch") == ([1, 0, 1, 0], [1, 0])
    assert grouped([1, 0, 1, 0], [0, 0], "oracle") == ([0, 0, 0, 0], [0])
    assert grouped([1, 0, 1, 0], [1, 0], "oracle") == ([0, 1, 0, 1], [0, 1])


@pytest.mark.parametrize("grouping", ["batch", "oracle"])
def test_at_most_64_rows_decide_together(grouping):
    assert BATCH == 64
    owner = torch.arange(3).repeat_interleave(torch.tensor([64, 65, 200]))
    unit, first = decision_units(owner, torch.tensor([0, 1, 0]), grouping)
    sizes = torch.bincount(unit)
    assert int(sizes.max()) == 64
    assert int(sizes.sum()) == len(owner)
    expected = [64, 64, 1, 64, 64, 64, 8] if grouping == "batch" else [64, 64, 64, 64, 8, 64, 1]
    assert sizes.tolist() == expected
    for u, i in enumerate(first.tolist()):
        assert int((unit == u).nonzero()[0]) == i
    groups = torch.tensor([0, 1, 0])[owner]
    owners_of_unit = [owner[unit == u].unique() for u in range(len(sizes))]
    if grouping == "batch":
        assert all(len(own) == 1 for own in owners_of_unit)
    assert all(len(groups[unit == u].unique()) == 1 for u in range(len(sizes)))


@pytest.mark.parametrize("grouping", ["client", "batch", "sample", "oracle"])
def test_a_method_is_judged_with_the_grouping_it_asks_for(grouping):
    """FedTEM on rows that lie far apart: who decides together changes nothing but is passed on."""
    experiment = toy("fedtem", {"decide_per": grouping}, data=FAR)
    run = played(experiment)
    assert experiment.method[0].decide_per == grouping
    population = run.host.population
    seen = []
    predict = run.host.algorithm.predict

    def watched(payload, memories, x, owner):
        seen.append((len(memories), owner))
        return predict(payload, memories, x, owner)

    host = replace(run.host, algorithm=replace(run.host.algorithm, predict=watched))
    ask = Ask("adapt", "adapt", Moment(5, 6), population.clients)
    payload, _ = run.host.algorithm.serve(run.state, population.clients)
    host.score(
        Scoring(ask, "train", grouping=grouping, group=population.group if grouping == "oracle" else None), payload
    )
    ((count, owner),) = seen
    rows_in_all = int(population.sizes(population.clients, "train").sum())
    expected = {"client": 8, "batch": 8, "sample": rows_in_all, "oracle": 2}[grouping]
    assert count == int(owner.max()) + 1 == expected


def test_whole_models_of_scsgd_that_are_not_trained_cannot_be_trained_along():
    with pytest.raises(FedtideError, match=r"lam: found 0.25, allowed: 0 if branch_layer = '\*'"):
        scsgd(task(), branch_layer="*", lam=0.25)


# -- FedSGD, and IFCA by gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "options"), [("fedsgd", {}), ("ifca", {"variant": "gradient"})])
@pytest.mark.parametrize(
    ("local", "line"),
    [
        ({"optimizer": "adam"}, "optimizer: found 'adam', allowed: 'sgd'"),
        ({"momentum": 0.9}, "momentum: found 0.9, allowed: 0"),
        ({"max_grad_norm": 1.0}, "max_grad_norm: found 1.0, allowed: none"),
        ({"weight_decay": 0.1}, "weight_decay: found 0.1, allowed: 0"),
        ({"augment": ["flip"]}, r"augment: found \['flip'\], allowed: none"),
    ],
)
def test_what_one_gradient_would_leave_without_effect_is_refused(algorithm, options, local, line):
    experiment = toy(algorithm, {**options, "local": local})
    with pytest.raises(FedtideError, match=rf"^method 'toy'\.local\.{line}, as each client takes one gradient$"):
        host_of(experiment, experiment.method[0], 0)
