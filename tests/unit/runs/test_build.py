"""From a configuration to objects, and everything that is found out before the first byte is written."""

import pytest
import torch
from torch import nn

from fedtide.config import from_dict, points, resolved
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.data.rows import Rows
from fedtide.learn.local import check_fit
from fedtide.runs import build
from fedtide.runs.build import (
    built,
    cohort_size,
    host_from,
    host_of,
    population_of,
    rows_for,
    rows_of,
    spec_of,
    task_of,
)
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.studies import MOMENTUM, STEADY, A, raw, study

NOW = Moment(0, 6)


def test_a_host_is_the_same_from_its_spec_as_from_the_experiment(tmp_path):
    experiment = study(A, MOMENTUM, seeds=[0, 3])
    for method in experiment.method:
        here = host_of(experiment, method, 3)
        there = host_from(spec_of(experiment, method, 3, tmp_path), "worker")
        assert there.memory.name == "worker"
        assert there.memory.directory == tmp_path
        assert (there.seed, there.algorithm.name) == (3, method.algorithm)
        for client in range(8):
            for part in ("train", "val", "test"):
                shards = [host.population.shard(client, NOW, part) for host in (here, there)]
                assert same(*[(s.x, s.y, s.ids) for s in shards])
        assert here.population.arrivals(4, NOW).tolist() == there.population.arrivals(4, NOW).tolist()
        tasks = [task_of(experiment, method, host.population.rows) for host in (here, there)]
        assert same(*[task.init(Rng(3)) for task in tasks])


def test_an_algorithm_looks_at_the_clients_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(
        "from dataclasses import replace\nfrom fedtide.algorithms import fedavg\n"
        "from fedtide.core.errors import refused\n"
        "def picky(task, pairs: int = 1):\n"
        "    def check(people):\n"
        "        if 2 * pairs > people.registered:\n"
        "            raise refused('pairs', pairs, f'at most {people.registered // 2}')\n"
        "    return replace(fedavg(task), check=check)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    picky = {"name": "picky", "algorithm": "own_algorithm:picky"}
    preflight(study({**picky, "pairs": 4}))
    with pytest.raises(FedtideError, match=r"method 'picky'.pairs: found 5, allowed: at most 4"):
        preflight(study({**picky, "pairs": 5}))


def test_rows_are_read_once_for_all_methods_and_drawn_anew_for_every_seed():
    experiment = study(A, STEADY)
    steady = experiment.model_copy(update={"shift": experiment.shift_of(experiment.method[1])})
    assert rows_of(experiment, 0) is rows_of(steady, 0)
    assert not torch.equal(rows_of(experiment, 0).x, rows_of(experiment, 1).x)
    fixed = study(data={"seed": 7})
    assert rows_of(fixed, 0) is rows_of(fixed, 1)
    assert population_of(experiment, experiment.shift, 0).rows is rows_of(experiment, 0)


@pytest.mark.parametrize(("model", "dtype"), [
    (lambda: nn.Linear(3, 2), torch.float32), (lambda: nn.Embedding(4, 2), torch.int64),
    (lambda: nn.EmbeddingBag(4, 2), torch.int64), (lambda: IndexesByItself(), torch.int64),
])  # fmt: skip
def test_integers_are_floats_once_unless_a_model_takes_integers_alone(model, dtype):
    """Some ids are beyond each vocabulary, which is told later, and of integers."""
    rows = Rows("ids", torch.arange(12).reshape(4, 3) + 2, torch.tensor([0, 1, 0, 1]), 2)
    first, second = rows_for(rows, model), rows_for(rows, model)
    assert first is second
    assert first.x.dtype == dtype
    assert (first is rows) == (dtype == torch.int64)


class IndexesByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        return self.table[x[:, 0]]


def test_integers_for_no_module():
    rows = Rows("ids", torch.arange(6).reshape(2, 3), torch.tensor([0, 1]), 2)
    with pytest.raises(FedtideError, match=r"model: found 'dict', allowed: a torch.nn.Module"):
        rows_for(rows, dict)


def test_with_a_seed_of_the_data_every_run_meets_the_same_rows_and_other_arrivals():
    experiment = study(data={"seed": 7})
    first, second = (population_of(experiment, experiment.shift, seed) for seed in (0, 1))
    assert torch.equal(first.rows.x, second.rows.x)
    assert all(same(first.parts[part], second.parts[part]) for part in ("train", "val", "test"))
    came = [[p.arrivals(4, Moment(r, 20)).tolist() for r in range(20)] for p in (first, second)]
    assert came[0] != came[1]


PICTURES = """
import numpy as np
def load():
    return np.arange(960.0).reshape(60, 1, 4, 4), np.arange(60) % 3
"""


def test_every_point_of_a_sweep_over_angles_turns_by_its_own(tmp_path, monkeypatch):
    (tmp_path / "pictures_of_mine.py").write_text(PICTURES)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = study(
        data={"source": "python:pictures_of_mine:load", "partition": {"kind": "rotation", "clients": 4},
              "groups": {"by": "none"}},
        shift={"who": "always"},
        sweep={"data.partition.angles": [[0, 180], [0, 90], [270, 180]]},
    )  # fmt: skip
    preflight(experiment)
    for point, angles in zip(points(experiment), [(0, 180), (0, 90), (270, 180)], strict=True):
        population = population_of(point.experiment, point.experiment.shift, 0)
        for client in range(4):
            shard = population.shard(client, NOW)
            turned = torch.rot90(population.rows.x[shard.ids], angles[client // 2] // 90, (-2, -1))
            assert torch.equal(shard.x, turned)


def test_the_precision_is_that_of_the_task():
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        experiment = study(precision=precision)
        assert task_of(experiment, experiment.method[0], rows_of(experiment, 0)).dtype == dtype


@pytest.mark.parametrize(("cohort", "size"), [
    (4, 4), ({"kind": "uniform", "clients_per_round": 3}, 3), ("everyone", 8), ("arrivals", 10),
])  # fmt: skip
def test_how_many_are_asked_is_what_the_cohort_says_or_everyone(cohort, size):
    assert cohort_size(study({**A, "cohort": cohort}).method[0], 8) == size


OWN_COHORT = """
class First:
    asks = reveals = ()
    clients_per_round, over_selection, deadline = 2, 1.0, None
    init = renewed = learn = lambda self, memo, *others: memo
    pick = lambda self, memo, fleet, rng, serve, among=None, m=None: fleet.reachable[:2]
    asked = lambda self, reachable=0: 2
"""


def test_a_cohort_of_ones_own_needs_no_base_class(tmp_path, monkeypatch):
    (tmp_path / "cohort_of_mine.py").write_text(OWN_COHORT)
    monkeypatch.syspath_prepend(tmp_path)
    assert cohort_size(study({**A, "cohort": "python:cohort_of_mine:First"}).method[0], 8) == 2


def test_a_task_knows_the_public_rows_of_the_population(tmp_path):
    experiment = study(A, MOMENTUM, data={"public_samples": 12, "seed": 7})
    host = host_of(experiment, experiment.method[0], 0)
    assert len(host.population.public) == 12
    assert host.population.public.tolist() == population_of(experiment, experiment.shift, 1).public.tolist()
    task = built(experiment, experiment.method[0], 0, population=host.population).task
    assert torch.equal(task.public, host.population.public_features())
    assert task.public.shape == (12, *host.population.rows.shape)
    assert built(study(A), study(A).method[0], 0).task.public is None
    assert task_of(experiment, experiment.method[0], host.population.rows).public is None
    preflight(experiment)


def test_a_worker_computes_on_the_device_that_the_run_found_or_says_that_it_cannot(monkeypatch):
    experiment = study(A, fleet={"device": "auto"})
    method, gpus = experiment.method[0], {"auto": "cuda", "cuda": "cuda"}
    assert host_from(spec_of(experiment, method, 0, None), "worker").population.device == "cpu"
    monkeypatch.setattr(build, "find_device", gpus.__getitem__)
    monkeypatch.setattr(build, "name_of", lambda device: f"{device} A")
    spec = spec_of(experiment, method, 0, None)
    monkeypatch.setattr(build, "name_of", lambda device: f"{device} B")
    with pytest.raises(
        FedtideError, match=r"^fleet\.device: found 'cuda B', but this worker's is .*; allowed: cuda A$"
    ):
        host_from(spec, "worker")
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FedtideError, match=r"^fleet\.device: found 'cuda', but torch finds no GPU on this machine"):
        host_from(spec, "worker")


# -- digests -----------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_one_run_and_of_nothing_else():
    experiment = study(A, MOMENTUM)
    a, momentum = experiment.method
    digests = {digest_of(experiment, a, 0), digest_of(experiment, a, 1), digest_of(experiment, momentum, 0)}
    assert len(digests) == 3
    assert all(len(digest) == 16 for digest in digests)
    assert digest_of(study(A), study(A).method[0], 0) == digest_of(experiment, a, 0)


# -- before anything is written ----------------------------------------------------------------------------------------


ONE_DOMAIN = {"kind": "gaussians", "samples": 64, "domains": 1}
WRONG = [
    ({"data": {"partition": {"kind": "natural"}}}, "found 'natural', but gaussians names no clients"),
    ({"data": {"partition": {"kind": "iid", "clients": 1}}}, "found 1, but of 2 groups 'night' gets no clients"),
    ({"data": {"groups": {"by": "labels", "labels": [[0], [7]]}}}, "data.groups.labels: found 7, allowed: each from 0"),
    ({"data": {"source": ONE_DOMAIN}}, "data.groups.by: found 'domain', but gaussians has one"),
    ({"model": "python:no_such_module:f"}, "model.function: cannot import"),
    ({"shift": {"who": "always", "how": {"kind": "rotation", "angles": [0, 180]}}}, "'rotation', but rows have shape"),
    ({"shift": {"who": "always", "how": {"kind": "rotation", "angles": [0]}}}, "found .0,., allowed: one per"),
]


@pytest.mark.parametrize(("change", "line"), WRONG, ids=lambda v: str(v)[:50])
def test_what_cannot_run_is_one_clear_line(change, line):
    with pytest.raises(FedtideError, match=line) as error:
        preflight(from_dict(raw(A, **change), where="study.toml"), "study.toml")
    assert "\n" not in str(error.value)


def test_every_method_and_every_point_is_looked_at():
    with pytest.raises(FedtideError, match=r"method 'B'.cohort: found 9"):
        preflight(study(A, {**A, "name": "B", "cohort": 9}))
    with pytest.raises(FedtideError, match="found 9, allowed: at most 8"):
        preflight(study(A, sweep={"method.cohort": [3, 9]}))


OWN = """
from torch import nn
def normed(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, classes))
def narrow(classes):
    return nn.Linear(99, classes)
def few(shape):
    return nn.Linear(shape[0], 2)
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "python:models_of_mine"


def test_the_model_is_tried_once_for_all_that_train_it_alike(own_models, monkeypatch):
    tried = []
    checked = lambda *given: tried.append(given[-1]) or check_fit(*given)  # noqa: E731
    monkeypatch.setattr("fedtide.runs.preflight.check_fit", checked)
    normed, twin, single = f"{own_models}:normed", {**A, "name": "twin"}, {"local": {"batch_size": 1}}
    preflight(study(A, twin, {**twin, "name": "more", "loss": "wsm"}, model=normed, sweep={"rounds": [3, 4]}))
    assert tried == ["method 'A'.local", "method 'more'.local"]
    with pytest.raises(FedtideError, match=r"^method 'twin'\.local.*batch"):
        preflight(study(A, {**twin, **single}, model=normed))
    with pytest.raises(FedtideError, match=r"rows"):
        preflight(study(A, model=normed, sweep={"data.source.dims": [4, 5], "model": [normed, f"{own_models}:narrow"]}))


@pytest.mark.parametrize("function", ["narrow", "few"])
def test_a_model_of_the_users_own_that_does_not_fit_the_data_is_told_before_the_run_begins(own_models, function):
    with pytest.raises(FedtideError, match="model"):
        preflight(study(A, model=f"{own_models}:{function}"))


def test_steady_devices_written_by_hand_are_the_default_and_say_how_long_seconds_last():
    plain, written = study(A), study(A, devices="steady")
    assert digest_of(plain, plain.method[0], 0) == digest_of(written, written.method[0], 0)
    for clocked in (study(A, shift={"clock": "seconds"}), from_dict(resolved(study(A, shift={"clock": "seconds"})))):
        with pytest.raises(FedtideError, match=r"shift\.clock: found 'seconds', but no \[devices\] says how long"):
            preflight(clocked)
    preflight(study(A, shift={"clock": "seconds"}, devices="steady"))
