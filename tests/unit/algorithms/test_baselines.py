"""The baselines of the periodic shift, and which rows decide together at inference."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.fedem import Blended, fedem
from fedtide.algorithms.minloss import minloss
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import Sent, tshot
from fedtide.core.base import Moment, Shard, Sum, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.evaluate.metrics import branch_accuracy
from fedtide.fleets.ask import Ask, Scoring
from fedtide.fleets.scoring import BATCH, decision_units
from fedtide.learn.branched_task import logits_and_features, with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.mixtures.branches import branch_losses, certainty, losses_of
from fedtide.mixtures.priors import Block, Linear
from fedtide.models.branched import Averaged, branched
from fedtide.models.image_networks import MLP
from fedtide.runs.build import host_of, task_of
from helpers.answering import DIMS, Answering, begun, identity, plain_names, task
from helpers.branchnet import Noted
from helpers.studies import lines_of, run_of, study
from helpers.toys import played, toy

KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
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


@pytest.mark.parametrize("prior", ["linear", "block"])
@pytest.mark.parametrize("lam", [0.0, 0.25])
def test_with_block_cyclic_arrivals_everyone_trains_the_branch_of_its_group(prior, lam):
    """Both clocks agree where blocks are blocks; the clock is the shift's where nothing else is said."""
    shift = {"who": {"kind": "block-cyclic", "period": 6, "phase": 0}}
    experiment = toy("scsgd", {"prior": prior, "lam": lam}, rounds=13, shift=shift)
    assert experiment.method[0].options["prior"]["phase"] == (1.0 if prior == "linear" else 0)
    run, branches = noted(experiment)
    group = run.host.population.group
    assert len(branches) == 13
    for t, trained in enumerate(branches):
        assert len(trained) == 4
        assert all(k == int(group[client]) for client, k in trained.items()), f"round {t}"
    assert {k for trained in branches for k in trained.values()} == {0, 1}


@pytest.mark.parametrize(
    ("prior", "expected"), [(Linear, [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]), (Block, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0])]
)
@pytest.mark.parametrize("phase", [0, 3])
def test_the_clock_by_hand(prior, expected, phase):
    """T = 8: the prior is 1, 3/4, 1/2, 1/4, 0, 1/4, 1/2, 3/4 and branch 1 has the ties; halves are halves."""
    algorithm = scsgd(task(), LocalTrainer(0.01, batch_size=0), prior(8, phase))
    payload, shard = begun(algorithm).weights, rows()
    found = []
    for t in range(11):
        answer = algorithm.works["train"](payload, None, shard, Moment(t + phase, 20), Rng(0))
        found.append(int(answer.notes.branch))
    assert found == expected


@pytest.mark.parametrize("server", [KERAS, {"kind": "sgd", "momentum": 0.9}], ids=["keras", "momentum"])
def test_the_branch_of_the_other_block_waits_without_lam(server):
    shift = {"who": {"kind": "block-cyclic", "period": 6}}
    options = {"prior": "block", "lam": 0.0, "server": server}
    run = played(toy("scsgd", options, rounds=12, shift=shift))
    for t, step in enumerate(run.steps):
        active = 0 if t % 6 < 3 else 1
        before, after = step.received.weights.params, step.state.weights.params
        for name in before:
            if ".copies." in name:
                assert torch.equal(before[name], after[name]) == (f".copies.{active}." not in name), (t, name)
            else:
                assert not torch.equal(before[name], after[name])


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


def test_scsgd_answers_by_the_surer_branch():
    for sure in ("row", "client"):
        algorithm = scsgd(task(), prior=Linear(8), choose_per=sure)
        weights = begun(algorithm).weights
        x = 8 * rows(30).x
        owner = torch.arange(30) // 5
        made = algorithm.predict(weights, [None] * 6, x, owner)
        logits, _ = logits_and_features(with_branches(task(), "head", 2), weights, x)
        certain = certainty(logits)
        if sure == "row":
            expected = certain.argmax(0)
        else:
            expected = torch.stack([certain[:, owner == i].mean(1).argmax() for i in range(6)])[owner]
        assert torch.equal(made.choice, expected)
        assert len(expected.unique()) == 2


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


def test_it_starts_from_the_weights_that_all_methods_start_from():
    ours, theirs = (played(toy(name), rounds=1).steps[0].received.weights for name in ("t-shot", "min-loss"))
    assert same(ours, theirs)


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


def test_clients_with_a_single_row_and_without_rows_can_be_collected_too():
    algorithm = tshot(identity(2, 2), shots=8)
    one = Shard(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), torch.arange(1))
    answer = algorithm.works["collect"]({}, None, one, Moment(-1, 10), Rng(0))
    assert answer.rows["centers"].tolist() == [[3.0, 4.0], [0.0, 0.0]]
    assert answer.rows["counts"].tolist() == [1.0, 0.0]
    none = Shard(one.x[:0], one.y[:0], one.ids[:0])
    assert algorithm.works["collect"]({}, None, none, Moment(-1, 10), Rng(0)) is None


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


# -- Min Loss ----------------------------------------------------------------------------------------------------------


def test_min_loss_chooses_as_plain_losses_say():
    """As IFCA with a shared trunk: the branch with the smaller mean cross-entropy of the received network."""
    experiment = toy("min-loss", {"lam": 0.5, "eps": 0.9}, rounds=8, data=DATA)
    run, branches = noted(experiment)
    population = run.host.population
    branched_task = with_branches(task_of(experiment, experiment.method[0], population.rows), "head", 2)
    seen = set()
    for step, trained in zip(run.steps, branches, strict=True):
        for client, k in trained.items():
            shard = population.shard(client, step.moment)
            logits, _ = logits_and_features(branched_task, step.received.weights, shard.x)
            losses = [float(F.cross_entropy(z, shard.y)) for z in logits]
            assert k == losses.index(min(losses))
            seen.add(k)
    assert seen == {0, 1}


def test_min_loss_by_hand_for_one_client():
    """One full-batch step on the chosen branch; without lam the other one gets nothing."""
    algorithm = minloss(task(), LocalTrainer(0.1, batch_size=0), lam=0.0)
    weights, shard = begun(algorithm).weights, rows()
    answer = trained_by(algorithm, weights, shard)
    logits, _ = logits_and_features(with_branches(task(), "head", 2), weights, shard.x)
    losses = [float(F.cross_entropy(z, shard.y)) for z in logits]
    k = losses.index(min(losses))
    assert answer.total["branches"].value.tolist() == [float(k == 0), float(k == 1)]
    assert answer.total["loss"].value == pytest.approx(losses[k])
    delta = answer.total["delta"].value.params
    assert not delta[f"model.head.copies.{1 - k}.weight"].any()
    assert delta[f"model.head.copies.{k}.weight"].any()


def test_members_step_as_far_as_if_they_were_alone():
    """Three rows chose branch 1, one chose branch 2; lam = 0."""
    for heads, factors in (("participants", (1.0, 1.0)), ("members", (4 / 3, 4.0))):
        algorithm = minloss(task(), lam=0.0, normalize_by=heads, server=SGD())
        state = begun(algorithm)
        delta = Weights({name: torch.ones_like(p) for name, p in state.weights.params.items()})
        shares = torch.tensor([3.0, 1.0], dtype=torch.float64)
        total = {"delta": Sum(delta, 1.0), "loss": Sum(1.0, 1.0), "branches": Sum(shares, 4.0)}
        new, facts = algorithm.round(state, Answering(total), Rng(0))
        assert facts["branches"].tolist() == [0.75, 0.25]
        for name, value in new.weights.params.items():
            factor = factors[0] if "copies.0" in name else factors[1] if "copies.1" in name else 1.0
            torch.testing.assert_close(value - state.weights.params[name], torch.full_like(value, factor))


# -- Vanilla -----------------------------------------------------------------------------------------------------------


def test_one_branch_of_vanilla_is_fedadam_bit_for_bit():
    ours = played(toy("vanilla", {"branches": 1, "server": {**KERAS, "lr": 0.02}}, data=DATA))
    theirs = played(toy("fedadam", {"server": {"kind": "keras-adam", "lr": 0.02, "eps": 1e-4}}, data=DATA))
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert same(plain_names(mine.state.weights.params), other.state.weights.params)


def test_vanilla_averages_logits_in_training_and_at_inference():
    run = played(toy("vanilla", rounds=2))
    algorithm, x = run.host.algorithm, run.host.population.rows.x[:20]
    made = algorithm.predict(run.state.weights, [None], x, torch.zeros(20).long())
    net = Averaged(branched(MLP(hidden=(5,)).build((4,), 3), "head", 2))
    net.load_state_dict(run.state.weights.params)
    with torch.no_grad():
        logits, _ = net.model(x)
    torch.testing.assert_close(made.told, F.log_softmax((logits[0] + logits[1]) / 2, -1))
    assert made.choice is None
    # In training too: both heads get the same gradient, so they keep their distance under plain SGD.
    run = played(toy("vanilla", {"server": {"kind": "sgd"}}, precision="fp64"))
    start, end = run.steps[0].received.weights.params, run.state.weights.params
    for part in ("weight", "bias"):
        before, after = (p[f"model.model.head.copies.0.{part}"] - p[f"model.model.head.copies.1.{part}"]
                         for p in (start, end))  # fmt: skip
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-12)
        assert not torch.equal(start[f"model.model.head.copies.0.{part}"], end[f"model.model.head.copies.0.{part}"])


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


@pytest.mark.parametrize("server", [KERAS, {"kind": "sgd"}], ids=["keras", "sgd"])
def test_one_component_is_fedavg_with_the_same_server_optimizer_bit_for_bit(server):
    ours = played(toy("fedem", {"components": 1, "server": server}, data=DATA))
    theirs = played(toy("fedavg", {"server": server}, data=DATA))
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert same(plain_names(mine.state.weights.params), other.state.weights.params)
        assert mine.facts["loss"] == pytest.approx(other.facts["loss"], rel=1e-6)  # a sum over a batch, divided


def alike(weights: Weights, k: int = 2) -> Weights:
    """The same network with all heads equal to the first."""
    params = dict(weights.params)
    for name in params:
        for j in range(1, k):
            params[name] = params[name.replace(f"copies.{j}.", "copies.0.")] if f"copies.{j}." in name else params[name]
    return Weights(params, weights.buffers)


@pytest.mark.parametrize("server", [KERAS, {"kind": "sgd"}], ids=["keras", "sgd"])
def test_identical_components_stay_identical_and_blends_uniform(server):
    """Losses are the same, so are posteriors, so are steps: nothing ever tells them apart."""
    memory = MemoryStore(None)
    options = {"components": 3, "cohort": {"kind": "everyone"}, "server": server}
    experiment = toy("fedem", {**options}, shift={"who": {"kind": "always"}}, precision="fp64")
    host = host_of(experiment, experiment.method[0], 0, memory)
    first = host.algorithm.init

    def init(fleet, rng):
        state = first(fleet, rng)
        return replace(state, weights=alike(state.weights, 3))

    run = played(experiment, host=replace(host, algorithm=replace(host.algorithm, init=init)), memory=memory)
    params = run.state.weights.params
    for part in ("weight", "bias"):
        head = params[f"model.head.copies.0.{part}"]
        assert not torch.equal(head, run.steps[0].received.weights.params[f"model.head.copies.0.{part}"])
        for j in (1, 2):
            torch.testing.assert_close(params[f"model.head.copies.{j}.{part}"], head, rtol=1e-12, atol=1e-14)
    for client in range(8):
        assert memory.read(client, (6, 0))["pi"].tolist() == pytest.approx([1 / 3] * 3, abs=1e-12)


def test_blends_stay_on_the_simplex_and_on_their_clients():
    memory = MemoryStore(None)
    run = played(toy("fedem", {"components": 3}, rounds=10), memory=memory)
    assert run.host.algorithm.traits.reveals == ()
    held = [memory.read(client, (10, 0)) for client in range(8)]
    held = [m["pi"] for m in held if m is not None]
    assert len(held) >= 4
    for pi in held:
        assert pi.dtype == torch.float64
        assert (pi >= 0).all()
        assert float(pi.sum()) == pytest.approx(1.0, abs=1e-12)
        assert pi.tolist() != [1 / 3] * 3


@pytest.mark.parametrize("constant", [-3.0, 50.0, 1e4])
def test_a_constant_added_to_all_losses_changes_no_posterior(constant, monkeypatch):
    algorithm = fedem(task(), LocalTrainer(0.1, batch_size=2), components=2, component_layer="head")
    weights, shard = begun(algorithm).weights, rows()
    plain = trained_by(algorithm, weights, shard)
    # `fedtide.algorithms.fedem` is the function of that name; its module is found under the same one.
    module = sys.modules["fedtide.algorithms.fedem"]
    monkeypatch.setattr(module, "losses_of", lambda *given: losses_of(*given) + constant)
    shifted = trained_by(algorithm, weights, shard)
    torch.testing.assert_close(plain.memory["pi"], shifted.memory["pi"], rtol=1e-9, atol=1e-11)
    for a, b in zip(leaves(plain.total["delta"].value), leaves(shifted.total["delta"].value), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


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


@pytest.mark.parametrize("blend", [None, (0.9, 0.1)])
def test_posteriors_follow_their_rows_through_shuffles(blend):
    """Three epochs of batches of two, by hand: gradient (1/B) sum_s q_k(s) (p_k(s) - onehot), q from the beginning."""
    algorithm = fedem(identity(3, 3), LocalTrainer(0.2, batch_size=2, epochs=3), components=2, component_layer="head")
    weights = begun(algorithm).weights
    draw = torch.Generator().manual_seed(5)
    x, y = 2 * torch.randn(7, 3, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    shard = Shard(x, y, torch.arange(7))
    memory = None if blend is None else {"pi": torch.tensor(blend, dtype=torch.float64)}
    answer = trained_by(algorithm, weights, shard, memory)
    w = [weights.params[f"model.head.copies.{k}.weight"].clone() for k in range(2)]
    b = [weights.params[f"model.head.copies.{k}.bias"].clone() for k in range(2)]
    losses = torch.stack([F.cross_entropy(x @ w[k].T + b[k], y, reduction="none") for k in range(2)])
    q, pi = e_step(losses, blend or (0.5, 0.5))
    assert answer.memory["pi"].tolist() == pytest.approx(pi, abs=1e-12)
    assert int(answer.notes.branch) == pi.index(max(pi))
    shuffle = Rng(0).at(0, 3, "train", "shuffle").torch()
    for _ in range(3):
        order = torch.randperm(7, generator=shuffle)
        for part in order.split(2):
            for k in range(2):
                p = F.softmax(x[part] @ w[k].T + b[k], -1)
                error = q[part, k, None] * (p - F.one_hot(y[part], 3)) / len(part)
                w[k] -= 0.2 * error.T @ x[part]
                b[k] -= 0.2 * error.sum(0)
    delta = answer.total["delta"].value.params
    for k in range(2):
        made_w, made_b = (
            weights.params[f"model.head.copies.{k}.{part}"] + delta[f"model.head.copies.{k}.{part}"]
            for part in ("weight", "bias")
        )
        torch.testing.assert_close(made_w, w[k], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(made_b, b[k], rtol=1e-10, atol=1e-12)


def test_the_blended_loss_is_divided_by_the_batch():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, q = torch.tensor([0, 3, 1]), torch.tensor([[0.1, 0.2], [0.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    each = torch.stack([F.cross_entropy(z, y, reduction="none") for z in logits], 1)
    found = Blended(q).value((logits, torch.zeros(3, 1)), y, None, (q,))
    torch.testing.assert_close(found, (q * each).sum() / 3)


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
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
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


def test_a_blend_weighs_probabilities():
    algorithm = fedem(task(), components=2, component_layer="head")
    weights, shard = begun(algorithm).weights, rows(9)
    owner = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 2])
    blends = [{"pi": torch.tensor([0.8, 0.2]).double()}, None, {"pi": torch.tensor([0.0, 1.0]).double()}]
    made = algorithm.predict(weights, blends, shard.x, owner)
    logits, _ = logits_and_features(with_branches(task(), "head", 2), weights, shard.x)
    pi = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.0, 1.0]]).double()[owner]
    expected = (pi.T[:, :, None] * F.softmax(logits, -1)).sum(0)
    torch.testing.assert_close(made.told.exp(), expected)
    torch.testing.assert_close(made.weights, pi)
    assert made.choice.tolist() == pi.argmax(1).tolist()


def test_a_client_without_rows_keeps_the_uniform_blend():
    algorithm = fedem(task(), components=2, component_layer="head")
    weights = begun(algorithm).weights
    empty = Shard(torch.zeros(0, DIMS), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert trained_by(algorithm, weights, empty) is None
    assert algorithm.adapt(weights, None, empty, Moment(0, 10), Rng(0)) is None
    assert algorithm.predict(weights, [None], rows(2).x, torch.zeros(2).long()).weights.tolist() == [[0.5, 0.5]] * 2


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
    with pytest.raises(FedtideError, match=r"lam: found 0.25, allowed: 0 with branch_layer = '\*'"):
        scsgd(task(), branch_layer="*", lam=0.25)


@pytest.mark.parametrize(("name", "options", "meant"), [
    ("min-loss", {"branch_average": "members"}, "normalize_by"),
    ("fedavg", {"server": {"kind": "adam", "style": "keras"}}, "kind"),
])  # fmt: skip
def test_a_key_of_before_leads_to_that_of_now(name, options, meant):
    with pytest.raises(FedtideError, match=f"did you mean '{meant}'"):
        toy(name, options)


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
        host_of(experiment, experiment.method[0], 0, MemoryStore(None))
