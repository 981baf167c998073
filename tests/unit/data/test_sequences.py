"""Rows whose labels are sequences: what counts, what is scored, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.data.build import build
from fedtide.data.groups import ByLabels, OneGroup
from fedtide.data.partition import (
    IID,
    Dirichlet,
    DirichletClass,
    LabelShards,
    Majority,
    Pachinko,
    Rotation,
)
from fedtide.data.rows import Rows
from fedtide.data.sources import Domains, Python
from fedtide.data.sources.synthetic import Gaussians

Y = torch.tensor([[1, 2, 0], [3, 0, 0], [1, 1, 2], [2, 3, 3]])


def rows(**columns) -> Rows:
    return Rows(**{"name": "toy", "x": torch.zeros(4, 3, dtype=torch.int64), "y": Y, "classes": 4, **columns})


def sequences() -> Rows:
    """What a function of the user's own gives."""
    return rows(padding=0, unscored=(2,))


def test_steps_that_are_padding_do_not_count():
    assert rows(padding=0).mask(Y).int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert rows().mask(Y).all()
    assert rows(padding=0).mask(Y[1:2]).tolist() == [[True, False, False]]


def test_labels_that_are_not_scored_count_all_the_same():
    assert rows(padding=0, unscored=(2, 3)).mask(Y).sum() == 9
    assert rows(padding=0, unscored=(2, 3)).scored(Y).int().tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert rows(unscored=(0,)).scored(Y).int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(("columns", "line"), [
    ({"y": torch.zeros(4, 2, 2, dtype=torch.int64)}, r"^toy: shape of labels: found \(4, 2, 2\), allowed: \(rows,\)"),
    ({"y": torch.zeros(4, 0, dtype=torch.int64)}, r"^toy: shape of labels: found \(4, 0\)"),
    ({"y": torch.zeros(4, dtype=torch.int64), "padding": 0}, "^toy: padding: found 0, allowed: None"),
    ({"padding": 3, "y": Y.index_fill(0, torch.tensor([2]), 3)}, "^toy: row 2: every step is padding"),
    ({"classes": 3}, "^toy: row 1: label: found 3, allowed: 0 to 2$"),
    ({"y": Y.float()}, "type of labels: found torch.float32"),
])  # fmt: skip
def test_labels_that_are_no_sequences_are_one_line(columns, line):
    with pytest.raises(FedtideError, match=line):
        rows(**columns)


@pytest.mark.parametrize("partition", [
    Dirichlet(2), DirichletClass(2, min_samples=1), LabelShards(2), Majority(2), Pachinko(2),
], ids=lambda p: p.kind)  # fmt: skip
def test_partitions_by_label_refuse_sequences(partition):
    with pytest.raises(
        FedtideError, match=f"data.partition.kind: found '{partition.kind}', but it deals by .* allowed: iid"
    ):
        build(rows(padding=0), partition)


def test_groups_by_label_and_turned_pictures_refuse_sequences():
    with pytest.raises(FedtideError, match=r"data.groups.by: found 'labels', but rows of toy are sequences"):
        build(rows(padding=0), IID(2), ByLabels(((0, 1), (2, 3))))
    with pytest.raises(FedtideError, match=r"found 'rotation', but rows have shape \(3,\)"):
        build(rows(padding=0), Rotation(2), OneGroup())


def test_the_rows_of_a_population_are_the_sequences_and_not_their_stand_ins():
    told = rows(padding=0)
    assert build(told, IID(2)).rows is told


def test_sequences_of_two_sources_are_not_put_together():
    source = Python("unit.data.test_sequences:sequences")
    with pytest.raises(FedtideError, match=r"data.source.sources: found 'b', but it gives sequences"):
        Domains(("a", "b"), (Gaussians(samples=4, dims=3, classes=4), source)).load(None, 0)
