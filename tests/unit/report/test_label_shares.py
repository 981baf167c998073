"""Classes of clients: which differences are drawn, and the picture of a run."""

import numpy as np
import pytest
import torch

from fedtide.core import codec
from fedtide.data.partition import IID
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.saved import labels
from fedtide.draw.holdings import heterogeneous
from fedtide.report.clients import label_shares
from fedtide.report.run_records import read_experiment
from helpers import studies
from helpers.pages import texts
from helpers.studies import A, study


def finished(root, *methods, **changes):
    return read_experiment(studies.finished(root, study(*methods, **changes)))[0]


def dealt(rows: int, classes: int, clients: int, alpha: float | None, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    shares = np.full((clients, classes), 1 / classes) if alpha is None else draw.dirichlet([alpha] * classes, clients)
    return np.array([draw.multinomial(rows, share) for share in shares])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("rows", "classes", "clients"), [(5, 3, 8), (20, 10, 60), (200, 10, 60), (500, 62, 60), (3, 2, 2)]
)
def test_labels_that_were_dealt_at_random_are_not_drawn(seed, rows, classes, clients):
    assert not heterogeneous(dealt(rows, classes, clients, None, seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.05, 0.1, 1.0])
def test_labels_that_differ_are(seed, alpha):
    assert heterogeneous(dealt(100, 10, 20, alpha, seed))


@pytest.mark.parametrize("counts", [np.zeros((3, 4)), np.ones((1, 4)), np.array([[3.0, 0], [5, 0]]), np.zeros((0, 2))])
def test_without_two_clients_and_two_classes_nobody_differs(counts):
    assert not heterogeneous(counts)


def test_the_labels_of_a_run_are_counted_once_for_a_few_clients(tmp_path):
    record = finished(
        tmp_path / "run", A, rounds=1, shift={"who": "always"},
        data={"groups": {"by": "none"}, "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.05}},
    )  # fmt: skip
    (run,) = record.methods[0].runs
    saved = codec.from_file(tmp_path / "run" / "shift" / "0.safetensors")
    assert run.labels["clients"].tolist() == list(range(8))
    assert (run.labels["classes"], run.labels["of"]) == (3, 8)
    train = saved["parts"]["train"]
    assert run.labels["counts"].sum(1).tolist() == train["start"].diff()[:8].tolist()
    svg = label_shares(record)
    assert 'aria-label="who holds which labels"' in svg
    assert "8 clients, by the class that they have most of" in texts(svg)


def test_of_many_clients_sixty_are_counted_and_of_sequences_none():
    made = labels(build(Rows("rows", torch.zeros(700, 2), torch.arange(700) % 2, 2), IID(clients=130)))
    assert len(made["clients"]) == len(made["counts"]) == 60
    assert (made["clients"][0], made["clients"][-1], made["of"]) == (0, 129, 130)
    assert made["clients"].unique().tolist() == made["clients"].tolist()
    steps = torch.ones(20, 3, dtype=torch.int64)
    for rows in (Rows("text", steps, steps, 2), Rows("many", torch.zeros(20, 2), steps[:, 0], 1001)):
        assert labels(build(rows, IID(clients=2)))["counts"] is None
