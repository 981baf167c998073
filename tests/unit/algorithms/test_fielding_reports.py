"""Fielding: what clients say of themselves, when, and what it costs."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedtide.algorithms.fielding import Places, fielding
from fedtide.algorithms.fielding_by_sums import fielding_by_sums
from fedtide.clusters.clusterer import KMeans
from fedtide.clusters.representation import Embedding, Gradient, Labels, hashing
from fedtide.clusters.rounds import Served
from fedtide.clusters.triggers import Adaptive, FixedFraction, event_of
from fedtide.cohorts import Everyone, Nearest
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import size_in_bytes
from fedtide.data.shift.how import LabelSwaps
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.runs.build import host_of, task_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.stages import holding, rounds
from helpers.toys import played, toy

TASK = Task(lambda: nn.Linear(2, 3), example=torch.zeros(1, 2))
LOCAL = LocalTrainer(lr=0.1, batch_size=0)


def shares(run, client: int, round: int) -> torch.Tensor:
    y = run.host.population.shard(client, Moment(round, 6)).y
    return torch.bincount(y, minlength=3).double() / len(y)


# -- label vectors -----------------------------------------------------------------------------------------------------


def test_who_permutes_its_labels_does_so_in_the_same_way_after_it_drifted():
    options = {"representation": {"kind": "labels", "malicious": 0.5}}
    run = played(toy("fielding drifts", options, shift={"who": {"kind": "always"}}))
    orders = [run.fleet.engine.memory.read(client, (99, 0))["order"] for client in range(8)]
    assert 0 < sum(order is not None for order in orders) < 8
    drifted = 0
    for client, order in enumerate(orders):
        for step in run.steps:
            honest = shares(run, client, step.moment.round)
            assert torch.equal(step.state.reported[client], honest if order is None else honest[order])
        drifted += not torch.equal(shares(run, client, 0), shares(run, client, 5))
    assert drifted


def test_nobody_permutes_at_zero_and_about_so_many_else():
    assert all(Labels().draw_order(TASK, Rng(seed)) is None for seed in range(50))
    found = [Labels(malicious=0.3).draw_order(TASK, Rng(seed)) for seed in range(2000)]
    assert sum(order is not None for order in found) / 2000 == pytest.approx(0.3, abs=0.03)
    assert all(order.tolist() != [0, 1, 2] for order in found if order is not None)


# -- clients without rows ----------------------------------------------------------------------------------------------


def test_an_empty_client_keeps_what_it_said_and_one_that_never_spoke_trains_with_the_largest():
    """Rows by label; clients 0 to 3 are of two kinds, client 4 has none at first, and client 0 loses its own."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    def stage(*labels: list[int], before: int):
        return holding([(x[own], torch.tensor(own, dtype=torch.int64)) for own in labels], classes=3, before=before)

    first = stage([0, 0], [1, 1], [0, 0], [1, 2], [], before=1)
    later = stage([], [1, 1], [0, 0], [1, 2], [0, 0], before=100)
    algorithm = fielding(TASK, LOCAL, clustering=KMeans(k_max=2), cohort=Everyone())
    (one, facts, _), (two, moved, fleet), (three, still, _) = rounds(algorithm, [first, later, later])
    assert one.clustered.tolist() == [0, 1, 2, 3]
    assert (one.cluster[:4].tolist(), int(one.trains_with[4])) == ([0, 1, 0, 1], 0)
    assert "drifted" not in facts
    assert (moved["drifted"], moved["moved"], moved["reclustered"]) == (1, 0, 0)
    assert len(two.clustered) == 5
    assert two.reported[0].tolist() == [1.0, 0.0, 0.0]
    assert two.cluster.tolist() == [0, 1, 0, 1, 0]
    assert fleet.queries[-1].answered.tolist() == [1, 2, 3, 4]
    assert "drifted" not in still
    assert torch.equal(three.reported, two.reported)


def test_sequences_of_which_no_step_counts_say_nothing():
    task = Task(lambda: nn.Embedding(3, 3), example=torch.zeros(1, 2, dtype=torch.int64))
    algorithm = fielding(task, LOCAL)
    y = torch.tensor([[0, 2], [2, 0]])
    shard = Shard(torch.zeros(2, 2, dtype=torch.int64), y, torch.arange(2), mask=y == 2)
    report = algorithm.works["report"]
    assert report(None, None, shard, Moment(0, 1), Rng(0)).rows["representation"].tolist() == [0.0, 0.0, 1.0]
    nothing = replace(shard, mask=torch.zeros(2, 2, dtype=torch.bool))
    assert report(None, None, nothing, Moment(0, 1), Rng(0)) is None
    places = Places(torch.eye(3), torch.ones(3, dtype=torch.bool), "l1", None)
    unseen = Served((), places=places)
    assert algorithm.adapt(unseen, None, shard, Moment(0, 1), Rng(0)).memory["found"].item() == 2
    assert algorithm.adapt(unseen, None, nothing, Moment(0, 1), Rng(0)) is None


# -- what tells of which drift -----------------------------------------------------------------------------------------


def test_swapped_labels_change_label_shares_and_gradients_and_no_embedding():
    run = played(toy("fedavg"), rounds=1)
    population = run.host.population
    swaps = replace(population.shift, how=LabelSwaps(every=5, fraction=1.0))
    population = replace(population, shift=swaps)
    experiment = toy("fedavg")
    task = task_of(experiment, experiment.method[0], population.rows)
    told = {"labels": 0, "embedding": 0, "gradient": 0}
    for client in range(8):
        before, after = (population.shard(client, Moment(r, 20)) for r in (4, 5))
        counts = torch.bincount(before.y, minlength=3)
        assert not torch.equal(before.y, after.y)
        for kind in (Labels(), Embedding(), Gradient()):
            say = kind.of(task)
            told[kind.kind] += not torch.equal(say(None, before), say(None, after))
        if len(counts[counts > 0].unique()) == len(counts):  # no two labels are equally many
            assert not torch.equal(counts, torch.bincount(after.y, minlength=3))
    assert told["gradient"] == 8
    assert told["embedding"] == 0
    assert told["labels"] > 0


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_sketches_keep_inner_products_in_the_mean_and_within_the_variance_of_gaussian_projections():
    x, y = (torch.from_numpy(Rng(0).at(name).numpy().standard_normal(3000)) for name in ("x", "y"))
    x, y = x / x.norm(), 0.6 * x / x.norm() + 0.8 * y / y.norm()
    exact, sketches = float(x @ y), [hashing(3000, 64, Rng(seed)) for seed in range(1000)]
    found = torch.stack([sketch(x) @ sketch(y) for sketch in sketches])
    bound = float((x @ x) * (y @ y) + exact**2) / 64
    assert abs(float(found.mean()) - exact) < 4 * math.sqrt(bound / 1000)
    assert 0.8 * bound < float(found.var()) < 1.15 * bound
    one = sketches[0]
    torch.testing.assert_close(one(2 * x - y), 2 * one(x) - one(y))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def test_whose_rows_stay_says_the_same_gradient_again_though_the_model_drops_units():
    experiment = toy("fielding", shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0)
    say, shard = Gradient().of(Task(dropping)), host.population.shard(0, Moment(0, 6))
    assert torch.equal(say(None, shard), say(None, shard))
    algorithm = fielding(Task(dropping), LOCAL, Gradient(), cohort=Everyone())
    run = played(experiment, host=replace(host, algorithm=algorithm), rounds=3)
    assert all("drifted" not in step.facts for step in run.steps)


def linear(folder, weight: list[list[float]]) -> str:
    save_file({"weight": torch.tensor(weight), "bias": torch.zeros(len(weight))}, folder / "net.safetensors")
    return str(folder / "net.safetensors")


def test_a_gradient_is_taken_at_the_network_of_a_file(tmp_path):
    """A row (1, 0) of label 0 at logits (a, 0): the gradient is -s for the first logit and s for the other.

    s is 1 / (1 + e^a). Of the row (0, 1) of label 1 it is (1/2, -1/2), as the logits are even. So the mean over both
    is, weights first: ((-s, 1/2), (s, -1/2)) / 2, and the bias (1/2 - s, s - 1/2) / 2.
    """
    task = Task(lambda: nn.Linear(2, 2), example=torch.zeros(1, 2))
    shard = Shard(torch.eye(2), torch.tensor([0, 1]), torch.arange(2))
    for a in (0.0, 2.0):
        kind = Gradient(weights=linear(tmp_path, [[a, 0.0], [0.0, 0.0]]), sketch=1_000_000)
        s = 1 / (1 + math.exp(a))
        by_hand = torch.tensor([-s, 0.5, s, -0.5, 0.5 - s, s - 0.5], dtype=torch.float64)
        torch.testing.assert_close(kind.of(task)(None, shard), by_hand / by_hand.norm(), rtol=1e-5, atol=1e-6)


def toy_net(experiment, folder, seed: int) -> str:
    rows = host_of(experiment, experiment.method[0], 0).population.rows
    save_file(task_of(experiment, experiment.method[0], rows).init(Rng(seed)).params, folder / "toy.safetensors")
    return str(folder / "toy.safetensors")


@pytest.mark.parametrize("combined", [False, True])
def test_what_is_in_the_file_decides_what_is_said_and_the_digest_of_a_run(tmp_path, combined):
    said, digests = [], set()
    for seed in (1, 2):
        kind = {"kind": "gradient", "weights": toy_net(toy("fedavg"), tmp_path, seed)}
        kind = {"kind": "combined", "parts": ["labels", kind]} if combined else kind
        experiment = toy("fielding", {"representation": kind})
        digests.add(digest_of(experiment, experiment.method[0], 0))
        said.append(played(experiment, rounds=1).state.reported)
    assert len(digests) == 2
    assert not torch.equal(*said)


@pytest.mark.parametrize(("embedding", "line"), [
    ({"layer": "body"}, "embedding.layer: found 'body'"),
    ({"weights": "absent.safetensors"}, "embedding.weights: no such file or folder: .*absent.safetensors"),
])  # fmt: skip
def test_a_network_by_which_clusters_cannot_be_compared_is_one_line_before_a_run(embedding, line):
    with pytest.raises(FedtideError, match=line):
        preflight(toy("fedavg", embedding=embedding))


@pytest.mark.parametrize(("options", "line"), [
    ({"weights": "WRONG"}, "representation.weights: WRONG: shape of 'dense1.weight': found None, allowed: (5, 4)"),
    ({"weights": "NONE"}, "representation.weights: no such file or folder: NONE; allowed: a file of safetensors"),
    ({"weights": "WRONG", "at": "global"}, "found weights and at 'global'; allowed: at"),
])  # fmt: skip
def test_weights_that_cannot_be_are_one_line(tmp_path, options, line):
    files = {"WRONG": linear(tmp_path, [[1.0]]), "NONE": str(tmp_path / "none")}
    options = {**options, "weights": files[options["weights"]]}
    with pytest.raises(FedtideError) as caught:
        preflight(toy("fielding", {"representation": {"kind": "gradient", **options}}))
    for name, path in files.items():
        line = line.replace(name, path)
    assert line in str(caught.value)
    assert "representation" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_only_who_drifted_sends_its_vector_and_no_model_travels_for_it():
    run = played(toy("fielding drifts", rounds=3))
    drifted = run.steps[2].facts["drifted"]
    report, train = run.fleet.queries
    assert 0 < drifted == len(report.answered) < 8
    assert report.cost.down == 0
    assert report.cost.up == drifted * (3 + 2) * 8  # float64: a share of each label, and that it is one client
    weights = size_in_bytes(run.state.weights[0])
    assert train.cost.down == len(train.ask.clients) * weights
    frozen, following = (
        played(toy("fielding", {"representation": {"kind": "gradient", "at": at, "sketch": 8}}, rounds=1))
        for at in ("frozen", "global")
    )
    assert frozen.fleet.queries[0].cost.down == 0
    assert following.fleet.queries[0].cost.down == len(following.fleet.queries[0].ask.clients) * weights


# -- clients that are heard of late ------------------------------------------------------------------------------------

TWO_STARTS = KMeans(n_init=2)
STATIC = {"reporters": "once", "trigger": FixedFraction(float("inf"))}
KINDS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def stage(*labels: list[int], before: int):
    held = [(KINDS[own], torch.tensor(own, dtype=torch.int64)) for own in labels]
    return holding(held, classes=3, before=before)


@pytest.mark.parametrize("options", [
    {}, STATIC, {"reassign": "all"}, {"trigger": FixedFraction(float("inf"))}, {"trigger": Adaptive()},
])  # fmt: skip
@pytest.mark.parametrize("first", [[[], [], [], [], [], []], [[0, 0], [1, 1], [], [], [], []], [[2, 2]] * 6])
def test_where_nobody_was_told_apart_yet_everybody_is_clustered_as_soon_as_there_is_something_to_tell(options, first):
    """At first none, two, or six that are all alike say something; then three kinds of two each."""
    algorithm = fielding(TASK, LOCAL, cohort=Everyone(), clustering=TWO_STARTS, **options)
    later = stage([0, 0], [1, 1], [2, 2], [0, 0], [1, 1], [2, 2], before=100)
    (one, _, _), (two, facts, _), (three, still, _) = rounds(algorithm, [stage(*first, before=1), later, later])
    assert len(one.weights) == 1
    assert two.cluster.tolist() == [0, 1, 2, 0, 1, 2]
    assert facts["reclustered"] == 1
    assert torch.equal(three.cluster, two.cluster)
    assert still["reclustered"] == 0


@pytest.mark.parametrize("method", [fielding, partial(fielding_by_sums, fewest=2)])
def test_a_trigger_counts_what_makes_clusters_of_one(method):
    """Six are alike, then of three kinds, then stay: one event, which clusters everybody whatever the trigger."""

    class Counted(FixedFraction):
        def start(self):
            return ()

        def after(self, kept, fired):
            return *kept, fired

    trigger = Counted(tau=float("inf"))
    algorithm = method(TASK, LOCAL, cohort=Everyone(), clustering=TWO_STARTS, trigger=trigger)
    later = stage([0, 0], [1, 1], [2, 2], [0, 0], [1, 1], [2, 2], before=100)
    followed = rounds(algorithm, [stage(*[[2, 2]] * 6, before=1), later, later])
    assert [state.trigger for state, _, _ in followed] == [(), (True,), (True,)]


@pytest.mark.parametrize(("options", "asked"), [
    ({}, [[4, 5], []]), ({"clustering": KMeans(k_max=1)}, [[4, 5], []]), ({"cohort": Nearest()}, [[4, 5], []]),
    ({"reporters": "reachable"}, [[*range(6)], [*range(6)]]),
])  # fmt: skip
def test_with_static_clusters_nobody_is_asked_for_a_report_that_changes_nothing(options, asked):
    """Clients 4 and 5 hold nothing at first, so nobody has heard of them; then everybody has been heard of."""
    first = stage([0, 0], [1, 1], [0, 0], [1, 1], [], [], before=1)
    later = stage([1, 1], [0, 0], [0, 0], [1, 1], [0, 0], [1, 1], before=100)
    algorithm = fielding(TASK, LOCAL, **{"cohort": Everyone(), "clustering": TWO_STARTS, **STATIC, **options})
    _, *followed = rounds(algorithm, [first, later, later])
    for (_, facts, fleet), clients in zip(followed, asked, strict=True):
        reports = [query.ask.clients.tolist() for query in fleet.queries if query.ask.question == "report"]
        assert reports == ([clients] if clients else [])
        assert ("spread" in facts) == (len(clients) == 6)


def unasked() -> torch.Tensor:
    raise AssertionError("clustered anew")


def test_an_empty_cluster_that_once_crept_does_not_count_for_the_threshold():
    """Of two clusters the second creeps by 1 and empties; the first never moves: nothing is far, at any tau but 0."""
    before, after = torch.tensor([[0.0], [5.0]]), torch.tensor([[0.0], [6.0]])
    event = event_of(
        before, after, torch.tensor([True, False]), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), "l1", unasked
    )
    both = replace(event, filled=torch.tensor([True, True]))
    assert FixedFraction(0.1).fires(None, both)
    assert not FixedFraction(float("inf")).fires(None, event)
    three = event_of(
        torch.tensor([[0.0], [5.0], [9.0]]),
        torch.tensor([[0.0], [6.0], [9.0]]),
        torch.tensor([True, False, True]),
        torch.zeros(3, 1),
        torch.tensor([0, 0, 2]),
        "l1",
        unasked,
    )
    assert not FixedFraction(0.01).fires(None, three)


def test_what_a_learned_threshold_hears_costs_bytes_and_seconds():
    """Every client receives its cluster's model for it; what it says is the accuracy of all validation rows."""
    experiment = toy("fielding learned", rounds=3, devices="log-normal")
    run = played(experiment)
    report, train, val = run.fleet.queries
    assert (report.ask.question, train.ask.question, val.ask.question) == ("report", "train", "val")
    weights = size_in_bytes(run.steps[-1].state.weights[0])
    assert val.cost.down == len(val.ask.clients) * weights > 0
    assert val.seconds > 0
    payload, slot = run.host.algorithm.serve(run.state, val.ask.clients)
    scores = run.fleet.score(payload, val.ask.clients, slot=slot, part="val")
    assert run.steps[-1].facts["val"] == pytest.approx(scores.accuracy)
