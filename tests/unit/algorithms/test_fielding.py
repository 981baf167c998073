"""Fielding: who moves, when everybody is clustered anew, who is asked, and what a cluster takes over."""

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fielding import MovingCenters, State, cluster_reports, recluster
from fedtide.clusters.clusterer import KMeans
from fedtide.clusters.distance import means
from fedtide.clusters.representation import Embedding, Gradient, Labels
from fedtide.core.base import Moment, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.server import Moments
from fedtide.runs.build import host_of, task_of
from fedtide.runs.preflight import preflight
from helpers.toys import TOY, played, toy


def by_labels(*labels: int, **options):
    """Eight clients of one label each, so that label shares say everything; (run, experiment)."""
    clustering = {"kind": "k-means", "n_init": 2, **options.pop("clustering", {})}
    options = {"cohort": "arrivals", "clustering": clustering, **options}
    experiment = toy("fielding", options, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0)
    rows = host.population.rows
    y = rows.y.clone()
    for client, label in enumerate(labels):
        y[host.population.parts["train"][client]] = label
    host = replace(host, population=replace(host.population, rows=replace(rows, y=y)))
    return played(experiment, host=host), host


def test_clients_of_the_same_labels_are_together_and_nothing_moves_without_drift():
    run, _ = by_labels(0, 1, 2, 0, 1, 2, 0, 1)
    assert run.state.cluster.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(run.state.weights) == 3
    for step in run.steps:
        assert (step.facts["moved"], step.facts["reclustered"]) == (0, 0)
        assert step.facts["spread"] == 0.0
        assert torch.equal(step.state.centers, run.steps[0].state.centers)


def test_a_learned_threshold_hears_validation_accuracies_and_settles_on_one():
    run = played(toy("fielding learned", rounds=10))
    events = sum(1 for step in run.steps if step.facts.get("drifted"))
    assert events > 2
    kept = run.state.inner.trigger
    assert kept.events == events
    assert all(0 < step.facts["val"] <= 1 for step in run.steps)
    assert sum(kept.count) > 0
    assert kept.best in (0, 1)
    means = [total / count for total, count in zip(kept.total, kept.count, strict=True)]
    assert means[kept.best] == max(means)


def test_a_learned_threshold_without_validation_rows_is_refused_before_anything_runs():
    data = {**TOY["data"], "split": {"val": 0.0, "test": 0.25}}
    with pytest.raises(FedtideError, match=r"trigger: found 'learned', allowed: data\.split\.val above 0"):
        preflight(toy("fielding", {"trigger": "learned"}, data=data))


@pytest.mark.parametrize("kind", ["momentum", "moments"])
def test_the_optimizers_memo_of_a_new_cluster_is_the_mean_of_those_that_its_members_had(kind):
    """Clients say 0, 0, 0, 1, 1 and were in clusters 0, 1, 1, 1, 2, whose memos are 4, 1 and 7.

    So the new clusters, in either order, have (4 + 1 + 1) / 3 and (1 + 7) / 2, and the counts of steps of clusters 1
    and 1, as of clusters 1 and 2 the first counts.
    """

    def memo(value, steps):
        held = {"w": torch.tensor([value])}
        return held if kind == "momentum" else Moments(held, held, {"w": steps})

    models = tuple(Weights({"w": torch.tensor([value])}) for value in (4.0, 1.0, 7.0))
    memos = tuple(memo(value, steps) for value, steps in ((4.0, 9), (1.0, 5), (7.0, 3)))
    said = torch.eye(2, dtype=torch.float64)[[0, 0, 0, 1, 1]]
    was = torch.tensor([0, 1, 1, 1, 2])
    state = State(models, memos, said, was, said[:3], said[:3], "l1")
    after = recluster(state, cluster_reports(state, KMeans(k_min=2, k_max=2, n_init=2), Rng(0)))
    one, two = after.cluster[[0, 4]].tolist()
    assert after.cluster.tolist() == [one] * 3 + [two] * 2
    assert one != two
    for new, value in ((one, 2.0), (two, 4.0)):
        assert after.weights[new].params["w"].item() == value
        held = after.server[new]
        assert (held if kind == "momentum" else held.first)["w"].item() == value
        assert kind == "momentum" or held.steps == {"w": 5}


def test_centers_may_be_found_with_some_clients_and_the_others_go_to_the_nearest():
    """Forty clients say 0 or 1 and twelve of them are looked at: everybody is with those who say the same."""
    said = torch.eye(2, dtype=torch.float64)[torch.arange(40) % 2]
    model = Weights({"w": torch.zeros(1)})
    state = State((model,), (None,), said, torch.zeros(40, dtype=torch.int64), said[:1], said[:1], "l1")
    cluster = recluster(
        state, cluster_reports(state, KMeans(k_min=2, k_max=2, n_init=2, fit_samples=12), Rng(0))
    ).cluster
    assert torch.equal(cluster[::2], cluster[0].repeat(20))
    assert torch.equal(cluster[1::2], 1 - cluster[::2])


def test_a_new_client_takes_the_model_of_the_cluster_that_it_is_like():
    run, host = by_labels(0, 1, 2, 0, 1, 2, 0, 1)
    payload, slot = host.algorithm.serve(run.state, torch.tensor([8, 0]))
    assert slot.tolist() == [3, 0]
    shard = run.host.population.shard(1, Moment(0, 6))
    found = host.algorithm.adapt(payload[3], None, shard, Moment(0, 6), Rng(0))
    assert found.memory["found"].item() == run.state.cluster[1]
    assert host.algorithm.adapt(payload[0], None, shard, Moment(0, 6), Rng(0)) is None


@pytest.mark.parametrize("kind", ["uniform", "in-turn", "by-size", "nearest", "oort", "power-of-choice"])
def test_every_cohort_picks_as_many_of_each_cluster(kind):
    run, _ = by_labels(0, 0, 0, 0, 1, 1, 2, 0, cohort={"kind": kind, "clients_per_round": 5})
    train = run.fleet.queries[-1]
    # Of clusters of 5, 2 and 1 clients five are asked: one each, and one more of the two largest.
    assert torch.bincount(run.state.cluster[train.ask.clients], minlength=3).tolist() == [2, 2, 1]
    assert torch.equal(train.ask.slot, run.state.cluster[train.ask.clients])


@pytest.mark.parametrize(("options", "most"), [
    ({"k_max": 100}, 3), ({"k_max": 8, "k_min": 3}, 3), ({"k_min": 50, "k_max": 100}, 7), ({"k_max": 1}, 1),
])  # fmt: skip
def test_there_are_fewer_clusters_than_clients_whatever_is_asked_for(options, most):
    run, _ = by_labels(0, 1, 2, 0, 1, 2, 0, 1, clustering=options)
    assert len(run.state.weights) == most
    assert sorted(run.state.cluster.unique().tolist()) == list(range(most))


@pytest.mark.parametrize(("options", "said"), [
    ({"representation": {"kind": "gradient", "distance": "js"}}, "representation.distance: found 'js'"),
    ({"representation": {"kind": "embedding", "distance": "js"}}, "representation.distance: found 'js'"),
    ({"clustering": {"kind": "k-means", "k_min": 5, "k_max": 3}},
     "method 'toy'.clustering: found k_max 3 and k_min 5; allowed: k_max of k_min or more, or 1"),
    ({"clustering": {"kind": "k-means", "k_max": 0}}, "method 'toy'.clustering.k_max: found 0, allowed: 1 or more"),
    ({"drift_eps": -0.1}, "method 'toy'.drift_eps: found -0.1"),
    ({"trigger": {"kind": "fraction", "tau": -1}}, "method 'toy'.trigger.tau: found -1"),
    ({"trigger": {"kind": "adaptive", "c": 0}}, "method 'toy'.trigger.c: found 0"),
    ({"trigger": {"kind": "learned", "tried": []}}, "method 'toy'.trigger.tried"),
    ({"representation": {"kind": "labels", "malicious": 1.5}}, "malicious: found 1.5, allowed: 1.0 or less"),
    ({"drift_baseline": "last"}, "method 'toy'.drift_baseline: found 'last'"),
    ({"clustering": "k-center"}, "clustering.k"),
    ({"clustering": {"kind": "k-center", "k": 3, "n_init": 5}}, "n_init: unknown key"),
    ({"representation": {"kind": "combined", "parts": ["labels"]}}, "parts: found"),
    ({"representation": {"kind": "combined", "parts": ["labels", "emb"]}}, "did you mean 'embedding'"),
    ({"representation": {"kind": "combined", "parts": ["labels", {"kind": "embedding", "distance": "cosine"}]}},
     "found labels or an embedding by 'cosine'"),
    ({"reassign": "al"}, "reassign: found 'al', did you mean 'all'"),
])  # fmt: skip
def test_settings_that_cannot_be_are_one_line(options, said):
    with pytest.raises(FedtideError) as raised:
        preflight(toy("fielding", options))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parts_of_a_combined_representation_say_what_each_says_alone_and_only_labels_are_permuted():
    """Labels 0 to 2, then features of the frozen network, then a gradient of length one."""
    parts = [{"kind": "labels", "malicious": 1.0}, "embedding", "gradient"]
    run = played(toy("fielding", {"representation": {"kind": "combined", "parts": parts}}, rounds=1))
    experiment = toy("fielding")
    task = task_of(experiment, experiment.method[0], run.host.population.rows)
    for client in range(8):
        shard, said = run.host.population.shard(client, Moment(0, 1)), run.state.reported[client]
        labels, embedding, gradient = (part.of(task)(None, shard) for part in (Labels(), Embedding(), Gradient()))
        torch.testing.assert_close(said[:3].sort().values, labels.sort().values)
        torch.testing.assert_close(said[3:], torch.cat([embedding, gradient]))
    honest = {"kind": "combined", "parts": ["labels", *parts[1:]]}
    told = played(toy("fielding", {"representation": honest}, rounds=1)).state.reported
    assert not torch.equal(told[:, :3], run.state.reported[:, :3])


def test_scales_are_those_of_the_last_clustering():
    run = played(toy("fielding combined", rounds=8))
    before = run.steps[0].received.inner
    changed = [step.facts["reclustered"] for step in run.steps]
    assert 0 < sum(changed) < 8
    for step, anew in zip(run.steps, changed, strict=True):
        assert (step.state.inner.distance != before.distance) == bool(anew)
        before = step.state.inner


def test_a_frozen_gradient_is_frozen_beside_one_that_follows():
    parts = [{"kind": "gradient"}, {"kind": "gradient", "at": "global"}]
    run = played(toy("fielding", {"representation": {"kind": "combined", "parts": parts}}, rounds=3))
    first, last = (run.steps[place].state.reported.chunk(2, dim=1) for place in (0, -1))
    assert torch.equal(first[0], last[0])
    assert not torch.equal(first[1], last[1])


def test_nobody_was_ever_heard_of_and_all_are_judged():
    """Not even before round 0: a new client takes the model of the only cluster."""
    run = played(toy("fielding", rounds=1, shift={"who": {"kind": "always", "dropout_rate": 0.999999}}))
    clients = torch.cat([run.host.population.clients, run.host.population.held_out_clients])
    payload, slot = run.host.algorithm.serve(run.state, clients)
    assert run.fleet.score(payload, clients, slot=slot).rows.sum() > 0


def test_who_is_not_asked_says_nothing_where_only_those_asked_report():
    """In the toy labels change; after the start only the four of a cohort may say so."""
    run = played(toy("fielding asked", rounds=8))
    reports, trainings = (
        [query.ask.clients.tolist() for query in run.fleet.queries if query.ask.question == question]
        for question in ("report", "train")
    )
    assert reports[-1] == trainings[-1]
    before = run.steps[0].received.inner
    for step in run.steps:
        changed = (step.state.inner.reported != before.reported).any(1).nonzero().flatten()
        assert len(changed) <= 4
        before = step.state.inner
    assert sum(step.facts.get("drifted", 0) for step in run.steps) > 0


# -- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["l1", "sq-l2", "cosine", "js"])
def test_centers_are_those_of_all_members_after_each_move(kind):
    """A cluster that is left by all keeps its center."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(12, 4, generator=draw, dtype=torch.float64)
    x = x / x.sum(1, keepdim=True)
    label = torch.tensor([0, 1, 2, 2, 1, 0, -1, 1, 2, 0, -1, 0])
    centers = means(x[label >= 0], label[label >= 0], 3, x[:3], kind)
    clusters = MovingCenters(x, label, centers, kind)
    for i in [*range(12), 3, 8]:
        new = i % 2
        clusters.move(i, new)
        label[i] = new
        centers = means(x[label >= 0], label[label >= 0], 3, centers, kind)
        torch.testing.assert_close(clusters.centers, centers, rtol=0, atol=1e-12)
    assert clusters.counts.tolist() == label.bincount(minlength=3).tolist() == [6, 6, 0]


def test_clusters_of_nobody_are_left_out_and_the_first_of_equals_is_taken():
    x, centers = torch.tensor([[9.0], [0.0], [9.0]]), torch.tensor([[0.0], [1.0], [-1.0]])
    assert MovingCenters(x, torch.tensor([1, -1, 2]), centers, "l1").nearest(1) == 1
