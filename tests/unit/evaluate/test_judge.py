"""Judging: which clients on which rows, and what is kept of it."""

from dataclasses import replace

import pytest
import torch

from fedtide.core.base import Scores
from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.evaluate.judge import Judge, View, views
from fedtide.evaluate.metrics import summarized
from fedtide.evaluate.rounds import describe, rows_in, weight_in
from fedtide.runs.build import host_of, population_of
from helpers.handmade import people
from helpers.toys import played, toy


def population(**data):
    experiment = toy("fedavg", data=data)
    return population_of(experiment, experiment.shift, 0)


def found(population, at_most=None, seed=0) -> dict[str, tuple[list[int], str]]:
    return {view.name: (view.clients.tolist(), view.part) for view in views(population, at_most, seed)}


def test_seen_clients_are_judged_on_test_and_validation_rows_and_unseen_ones_on_test_rows():
    assert found(population()) == {
        "train_clients": (list(range(8)), "test"), "held_out_clients": ([8, 9], "test"), "val": (list(range(8)), "val"),
    }  # fmt: skip


def test_a_view_without_rows_is_left_out():
    assert set(found(population(held_out_clients={"clients": 0}))) == {"train_clients", "val"}
    assert set(found(population(split={"val": 0.0}))) == {"train_clients", "held_out_clients"}
    assert set(found(population(split={"val": 0.0, "test": 0.0}))) == {"held_out_clients"}
    assert found(population(split={"val": 0.0, "test": 0.0}, held_out_clients={"clients": 0})) == {}


def test_of_the_views_only_those_that_are_named_are_judged():
    assert [view.name for view in views(population(), named=("val", "train_clients"))] == ["train_clients", "val"]
    with pytest.raises(
        FedtideError, match=r"eval_splits: found 'held_out_clients', but no clients .* allowed: train_clients, val"
    ):
        views(population(held_out_clients={"clients": 0}), named=("train_clients", "held_out_clients"))


def test_clients_without_rows_are_not_judged():
    who = people(5, held_out_clients=1)
    nothing = {**who.parts, "test": who.parts["test"].__class__.of([[2], [], [8], [], [14], [17]])}
    assert found(replace(who, parts=nothing)) == {
        "train_clients": ([0, 2, 4], "test"),
        "held_out_clients": ([5], "test"),
    }


def test_a_sample_of_the_clients_is_drawn_once_per_seed_for_each_view():
    who = population(
        partition={"kind": "iid", "clients": 30}, split={"val": 0.34, "test": 0.25}, held_out_clients={"clients": 6}
    )
    drawn = found(who, at_most=5)
    assert [len(clients) for clients, _ in drawn.values()] == [5, 5, 5]
    for clients, _ in drawn.values():
        assert clients == sorted(set(clients))
    assert all(c >= 30 for c in drawn["held_out_clients"][0])
    assert found(who, at_most=5) == drawn
    assert found(who, at_most=5, seed=1) != drawn
    assert found(who, at_most=100) == found(who)
    assert drawn["train_clients"][0] != drawn["val"][0]


# -- what is kept ------------------------------------------------------------------------------------------------------


def judge(algorithm: str = "fedavg", **changes):
    run = played(toy(algorithm, **changes), rounds=2)
    return run, Judge(run.host.algorithm, run.fleet, views(run.host.population))


def test_the_commonest_class_of_the_judged_rows_by_hand():
    run, who = judge()
    population = run.host.population
    for view, scores, _ in who.scores(run.state):
        part = population.parts[view.part]
        labels = [int(population.rows.y[row]) for client in view.clients.tolist() for row in part[client].tolist()]
        most = max(labels.count(label) for label in set(labels))
        assert who.line(view, scores)["commonest"] == most / len(labels)


def test_a_line_is_what_the_rows_of_its_clients_say():
    run, who = judge()
    names = run.host.population.group_names
    for view, scores, slot in who.scores(run.state):
        line, rows = who.line(view, scores), list(who.rows(7, view, scores, slot))
        assert {row[0] for row in rows} == {7}
        assert {row[1] for row in rows} == {view.name}
        assert [row[2] for row in rows] == view.clients.tolist()
        assert line["rows"] == sum(row[4] for row in rows)
        correct = [round(row[5] * row[4]) for row in rows]
        assert line["accuracy"] == pytest.approx(sum(correct) / line["rows"])
        assert line["loss"] == pytest.approx(sum(row[6] * row[4] for row in rows) / line["rows"], abs=1e-6)
        assert line["client_mean"] == pytest.approx(sum(row[5] for row in rows) / len(rows), abs=1e-6)
        for k, name in enumerate(names):
            mine = [i for i, row in enumerate(rows) if row[3] == name]
            assert all(run.host.population.group[rows[i][2]] == k for i in mine)
            pooled = sum(correct[i] for i in mine) / sum(rows[i][4] for i in mine)
            assert line["groups"][name] == pytest.approx(pooled)
        assert {row[7] for row in rows} == {None}


def test_over_clients_each_counts_the_same_in_every_accuracy():
    """Three clients with 4, 2 and no rows, of which 4 and 0 are right: 4 of 6 rows, and half of the clients' shares."""
    run, who = judge()
    rows, correct = torch.tensor([4.0, 2.0, 0.0]).double(), torch.tensor([4.0, 0.0, 0.0]).double()
    scores = Scores(torch.arange(3), rows, correct, rows, others={"other": rows / 2})
    groups = torch.tensor([0, 0, 1])
    by_rows = summarized(scores, groups, ("day", "night"))
    by_clients = summarized(replace(scores, over="clients"), groups, ("day", "night"))
    assert (by_rows["accuracy"], by_rows["groups"]) == (4 / 6, {"day": 4 / 6})
    assert (by_clients["accuracy"], by_clients["groups"], by_clients["clients"]) == (1 / 2, {"day": 1 / 2}, 2)
    assert by_clients["others"] == {"other": 1 / 2}
    for line in ({"window": {}, "scores": {"val": entry}} for entry in (by_rows, by_clients)):
        assert weight_in(line, "val") == line["scores"]["val"].get("clients", 6)
        assert rows_in(line, "val") == 6
    # In a run the accuracy is the mean over clients, and so is that of the commonest class.
    for view, scores, _ in replace(who, over="clients").scores(run.state):
        line, people = replace(who, over="clients").line(view, scores), run.host.population
        labels = [people.rows.y[people.held(client, run.fleet.moment, view.part)] for client in view.clients.tolist()]
        usual = torch.bincount(torch.cat(labels)).argmax()
        assert line["accuracy"] == pytest.approx(line["client_mean"])
        assert line["commonest"] == pytest.approx(
            sum(float((y == usual).double().mean()) for y in labels) / len(labels)
        )


def test_the_slot_of_a_client_is_kept_where_there_are_slots():
    run, who = judge("helpers.sketches:fielding")
    for view, scores, slot in who.scores(run.state):
        kept = [row[7] for row in who.rows(0, view, scores, slot)]
        assert kept == slot.tolist()
        assert set(kept) <= {0, 1}


def test_an_expert_of_a_clients_own_is_slot_minus_one_and_shared_models_count_from_0():
    """Rows of three clients by expert, (own, model 0, model 1): most of them at their own, at model 0, at model 1."""
    _, who = judge()
    choice = torch.tensor([[3.0, 1, 0], [1, 2, 1], [0, 1, 3]], dtype=torch.float64)
    four, clients = torch.full((3,), 4.0), torch.tensor([0, 1, 2])
    scores = Scores(clients, four, four, four * 0, choice=choice)
    view = View("train_clients", clients, "test")
    mixing = replace(who, algorithm=replace(who.algorithm, traits=replace(who.algorithm.traits, own_expert=True)))
    assert [row[7] for row in mixing.rows(0, view, scores, None)] == [-1, 0, 1]
    assert [row[7] for row in who.rows(0, view, scores, None)] == [0, 1, 2]


def test_a_client_without_rows_is_kept_without_numbers():
    run, who = judge()
    view = View("train_clients", torch.tensor([0]), "test")
    scores = run.fleet.score(run.state.weights, view.clients)
    empty = type(scores)(*(getattr(scores, n) * (n == "clients") for n in ("clients", "rows", "correct", "loss")))
    assert list(who.rows(0, view, empty, None)) == [(0, "train_clients", 0, "day", 0, None, None, None, None)]


def test_the_received_model_is_judged_on_the_participants_own_training_rows():
    run, who = judge()
    clients = torch.tensor([1, 5, 6])
    told = who.participants(run.state, clients)
    population, task = run.host.population, run.host.algorithm
    right, loss, rows = 0, 0.0, 0
    for client in clients.tolist():
        shard = population.shard(client, run.fleet.moment)
        logp = task.predict(run.state.weights, [None], shard.x, torch.zeros(len(shard), dtype=torch.int64)).told
        right += int((logp.argmax(-1) == shard.y).sum())
        loss -= float(logp.gather(1, shard.y[:, None]).sum())
        rows += len(shard)
    assert told["accuracy"] == pytest.approx(right / rows)
    assert told["loss"] == pytest.approx(loss / rows, rel=1e-6)


def test_where_clients_adapt_or_complete_what_was_sent_it_says_nothing():
    for name in ("ifca", "aem", "fedem", "fedper", "fedbabu"):
        run, who = judge(name)
        assert who.participants(run.state, torch.arange(8)) == {}


def test_who_has_left_is_no_participant_and_puts_no_samples_through_a_model():
    """Everyone is asked, and would train two epochs of 8 rows; client 0 has left."""
    experiment = toy("fedavg", {"cohort": "everyone", "local": {"lr": 0.1, "epochs": 2}}, shift={"who": "always"})
    host = host_of(experiment, experiment.method[0], 0)
    people = host.population.without(["0"], "left")
    run = played(experiment, rounds=1, host=replace(host, population=people))
    line = describe(run.steps[-1], Judge(host.algorithm, run.fleet, []), {})
    there = torch.arange(1, 8)
    assert (line["asked"], line["answered"]) == (8, 7)
    assert line["groups"].tolist() == people.group[there].bincount().tolist()
    assert line["samples"] == 2 * 7 * 8


def test_judging_changes_nothing():
    experiment = toy("scaffold")
    host = host_of(experiment, experiment.method[0], 0)
    run = played(experiment, host=host, memory=host.memory)
    before = [run.fleet.engine.memory.read(c, (99, 0)) for c in range(8)]
    state, ledger = run.state, list(run.fleet.queries)
    who = Judge(host.algorithm, run.fleet, views(host.population))
    first, second = (list(who.scores(state)) for _ in range(2))
    assert same([s for _, s, _ in first], [s for _, s, _ in second])
    assert same(before, [run.fleet.engine.memory.read(c, (99, 0)) for c in range(8)])
    assert len(run.fleet.queries) == len(ledger)
