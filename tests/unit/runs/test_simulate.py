"""The same from Python: a simulation in memory, and a whole experiment in one call."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import fedtide as ft
from fedtide.core.record import plain
from fedtide.core.trees import same
from fedtide.data.shift.how import Rotation as Turned
from fedtide.runs.build import algorithm_of, host_of
from helpers.studies import SCAFFOLD, A, lines_of, raw, record_of, run_of, study

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("method", [A, SCAFFOLD], ids=lambda m: m["name"])
def test_a_simulation_is_what_a_run_would_have_recorded(tmp_path, method):
    experiment = study(method)
    host = host_of(experiment, experiment.method[0], 0)
    result = ft.simulate(host.algorithm, host.population, rounds=6, eval_every=2)
    run = run_of(experiment, tmp_path)
    told = list(run.play())
    assert json.loads(json.dumps(plain(result.lines))) == lines_of(run.folder)
    assert result.rounds == [2, 4, 6]
    assert result.accuracy == [p.accuracy for p in told if p.accuracy is not None]


@pytest.mark.parametrize("bounds", [{"over_selection": 1.5}, {"deadline": 0.08}], ids=lambda bounds: next(iter(bounds)))
def test_a_cohort_counts_the_same_answers_from_python_and_from_a_file(tmp_path, bounds):
    cohort = {"kind": "uniform", "clients_per_round": 4}
    experiment = study({**A, "cohort": {**cohort, **bounds}}, devices="log-normal")
    host = host_of(experiment, experiment.method[0], 0)
    result = ft.simulate(host.algorithm, host.population, rounds=6, eval_every=2, devices=experiment.timing)
    run = run_of(experiment, tmp_path)
    list(run.play())
    lines = lines_of(run.folder)
    assert json.loads(json.dumps(plain(result.lines))) == lines
    assert any(line["trained"][1] < line["trained"][0] for line in lines)
    assert any(line["trained"][1] for line in lines)


def test_arrays_become_a_population():
    x, y = torch.randn(60, 2), torch.arange(60) % 3
    people = ft.population(
        x, y, ft.data.IID(clients=6), domain=["day", "night"] * 30, held_out=torch.arange(60) >= 48,
        groups=ft.data.ByDomain(), held_out_clients=ft.data.HeldOutClients(clients=2), seed=3,
        shift=ft.Shift(who=ft.shift.Periodic(period=4)),
    )  # fmt: skip
    assert people.registered == 6
    assert people.group_names == ("day", "night")
    assert people.held_out_clients.tolist() == [6, 7]
    assert int(people.counts(people.held_out_clients, "test").sum()) == 12
    assert people.seed == 3
    written = ft.population(x, y, ft.data.Natural(), client=[f"writer {i % 4}" for i in range(60)])
    assert written.registered == 4


@pytest.mark.parametrize(
    ("shift", "angles"), [(ft.Shift(), (0, 180)), (ft.Shift(how=Turned(angles=(90, 270))), (90, 270))]
)
def test_a_rotation_turns_the_pictures_of_its_groups_unless_the_shift_says_how(shift, angles):
    x, y = torch.arange(360.0).reshape(40, 1, 3, 3), torch.arange(40) % 2
    people = ft.population(x, y, ft.data.Rotation(clients=4, angles=(0, 180)), shift=shift)
    for client in range(4):
        shard = people.shard(client, ft.base.Moment(0, 1))
        assert torch.equal(shard.x, torch.rot90(x[shard.ids], angles[client // 2] // 90, (-2, -1)))


def test_every_algorithm_of_the_registry_is_in_its_namespace():
    for name, entry in ft.algorithms.REGISTRY.items():
        assert getattr(ft.algorithms, name.replace("-", "_")).__wrapped__ is entry.make


@pytest.mark.parametrize("form", ["dicts", "experiment", "file"])
def test_an_experiment_is_run_in_one_call(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    values = raw(A, title="My study", rounds=2)
    given = {"dicts": values, "experiment": ft.config.from_dict(values), "file": tmp_path / "study.toml"}[form]
    if form == "file":
        from fedtide.config import to_toml

        given.write_text(to_toml(ft.config.from_dict(values)))
    done = ft.run(given, workers=1)
    assert done.folder.resolve() == tmp_path / "runs" / ("study" if form == "file" else "my-study")
    assert done.report.is_file()
    assert [summary.methods[0].name for summary in done.summaries] == ["A"]
    again = ft.run(given, tmp_path / "again", workers=1)
    ours, theirs = record_of(done.folder), record_of(again.folder)
    assert ours == theirs


def test_what_cannot_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(ft.FedtideError, match="found 9, allowed: at most 8"):
        ft.run(raw({**A, "cohort": 9}), tmp_path / "run")
    with pytest.raises(ft.FedtideError, match="unknown key"):
        ft.run({**raw(A), "ruonds": 3}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(ft.FedtideError, match="already exists"):
        ft.run(raw(A), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_an_algorithm_made_by_hand_is_that_of_the_configuration():
    experiment = study({**A, "algorithm": "fedavgm", "server": {"momentum": 0.5}})
    host = host_of(experiment, experiment.method[0], 0)
    task = ft.Task(lambda: experiment.model.build((4,), 3))
    by_hand = ft.algorithms.fedavgm(
        task, ft.LocalTrainer(lr=0.1, batch_size=4), server=ft.server.SGD(momentum=0.5), cohort=ft.cohorts.Arrivals(4)
    )
    configured = algorithm_of(experiment.method[0], task)
    results = [ft.simulate(a, host.population, rounds=3) for a in (by_hand, configured, host.algorithm)]
    assert same(results[0].state, results[1].state)
    assert same(results[0].state, results[2].state)


def test_class_weights_that_do_not_fit_are_one_line():
    people = ft.population(torch.randn(60, 3), torch.arange(60) % 4, ft.data.IID(clients=5))
    weighed = ft.Task(lambda: torch.nn.Linear(3, 4), torch.nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(ft.FedtideError, match=r"loss: it does not fit the model's outputs: .*all 4 classes"):
        ft.simulate(ft.algorithms.fedavg(weighed, cohort=ft.cohorts.Arrivals(2)), people, rounds=1)


def test_a_metric_is_a_function_of_scores_or_a_name():
    def wrong_rows(scores):
        return (scores.rows - scores.correct).sum()

    people = ft.population(torch.randn(60, 3), torch.arange(60) % 2, ft.data.IID(4))
    method = ft.algorithms.fedavg(ft.Task(lambda: torch.nn.Linear(3, 2)), cohort=2)
    run = ft.simulate(method, people, rounds=1, metrics=[wrong_rows, "macro-f1"])
    scores = run.lines[-1]["scores"]["train_clients"]
    assert scores["wrong_rows"] == pytest.approx((1 - scores["accuracy"]) * scores["rows"])
    assert 0 <= scores["macro-f1"] <= 1
    for metrics, said in (
        ([3], r"metrics\[0\]: found 3, allowed: a function of scores"),
        ([lambda scores: "none"], "returns a number"),
    ):
        with pytest.raises(ft.FedtideError, match=said):
            ft.simulate(method, people, rounds=1, metrics=metrics)
    numbers = ft.population(torch.randn(60, 3), torch.randn(60), ft.data.IID(4), target="number")
    method = ft.algorithms.fedavg(ft.Task(lambda: torch.nn.Linear(3, 1), target=numbers.target), cohort=2)
    assert (
        "wrong_rows"
        in ft.simulate(method, numbers, rounds=1, metrics=[wrong_rows]).lines[-1]["scores"]["train_clients"]
    )
    with pytest.raises(ft.FedtideError, match=r"metrics\[0\]: found 'macro-f1', but the target is 'number'; allowed: "):
        ft.simulate(method, numbers, rounds=1, metrics=["macro-f1"])


# -- wrong use ---------------------------------------------------------------------------------------------------------


def small() -> tuple[Any, Any]:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    people = ft.population(x, (x[:, 0] > 0).long(), ft.data.IID(clients=6))
    return people, ft.algorithms.fedavg(ft.Task(lambda: torch.nn.Linear(4, 2)), cohort=3)


def test_threads_take_turns_so_that_each_has_its_own_numbers():
    people, algorithm = small()

    def play(seed: int) -> list[float]:
        result = ft.simulate(algorithm, people, rounds=8, seed=seed)
        return result.trained.predict(torch.ones(2, 4)).told.flatten().tolist()

    alone = [play(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(play, range(4))) == alone


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metrics": "auc"}, r"simulate.metrics: found 'auc', allowed: a list"),
        ({"metrics": len}, r"simulate.metrics: found .*, allowed: a list"),
        ({"metrics": ["auc", "auc"]}, r"simulate.metrics\[1\].name: found 'auc', allowed: a name that no other"),
    ],
)  # fmt: skip
def test_metrics_are_a_list_of_names_that_no_other_measure_has(options, line):
    people, algorithm = small()
    with pytest.raises(ft.FedtideError, match=line):
        ft.simulate(algorithm, people, rounds=1, **options)


def test_a_metric_does_not_take_the_place_of_the_score():
    people, algorithm = small()

    def accuracy(scores: Any) -> float:
        return 0.99

    with pytest.raises(ft.FedtideError, match=r"simulate.metrics\[0\].name: found 'accuracy'"):
        ft.simulate(algorithm, people, rounds=1, metrics=[accuracy])


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(2, 5), torch.zeros(0, 4), np.zeros((2, 4)), [[0.0] * 4]])
def test_rows_of_another_shape_are_not_predicted(x):
    people, algorithm = small()
    trained = ft.simulate(algorithm, people, rounds=1).trained
    with pytest.raises(ft.FedtideError, match=r"predict.x: found .*, allowed: a tensor \(rows, 4\)"):
        trained.predict(x)


def test_a_target_beside_rows_is_refused_and_numbers_of_numpy_are_numbers():
    people, algorithm = small()
    with pytest.raises(ft.FedtideError, match="population: target"):
        ft.population(people.rows, target="number")
    seeded = ft.simulate(algorithm, people, rounds=np.int64(2), seed=np.int64(1))
    assert seeded.accuracy == ft.simulate(algorithm, people, rounds=2, seed=1).accuracy


def test_a_copy_of_a_result_has_its_models_and_a_pickled_one_says_why_it_has_none():
    people, algorithm = small()
    result = ft.simulate(algorithm, people, rounds=1)
    assert copy.copy(result).trained is result.trained
    assert result == result
    assert result != ft.simulate(algorithm, people, rounds=1)
    assert len({result}) == 1
    with pytest.raises(ft.FedtideError, match="the algorithm has no task, or the result was pickled"):
        _ = copy.deepcopy(result).model


@pytest.mark.parametrize(
    "options", [{"rounds": 0}, {"rounds": -3}, {"clients_per_round": -3}, {"clients_per_round": 0}]
)
def test_a_population_is_shown_for_a_round_or_more(options):
    with pytest.raises(ft.FedtideError, match=rf"show.{next(iter(options))}: found .*, allowed: 1 or more"):
        ft.show(small()[0], **options)
