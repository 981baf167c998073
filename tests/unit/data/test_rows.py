"""Rows, sequences and ragged lists: the result of every source, and mistakes with the row named."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.errors import FedtideError
from fedtide.data.partition import (
    IID,
    ByLabels,
    Dirichlet,
    DirichletClass,
    LabelShards,
    Majority,
    OneGroup,
    Pachinko,
    Rotation,
)
from fedtide.data.population_builder import build
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows, check_classes
from fedtide.data.sources import Domains, Python
from fedtide.data.sources.synthetic import Gaussians
from helpers.examples import examples

law = examples(40)
lists = st.lists(st.lists(st.integers(0, 50), unique=True, max_size=8), max_size=8)


def rows(**columns) -> Rows:
    return Rows(**{"name": "toy", "x": torch.zeros(4, 3), "y": torch.tensor([0, 1, 2, 1]), "classes": 3, **columns})


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "row"), [(3, 2), (-1, 0), (10**12, 3)])
def test_a_label_out_of_range_names_the_row(label, row):
    y = torch.tensor([0, 1, 2, 1])
    y[row] = label
    with pytest.raises(FedtideError, match=f"^toy: row {row}: label: found {label}, allowed: 0 to 2$"):
        rows(y=y)


@pytest.mark.parametrize(("names", "found"), [((), "1"), (("no", "yes"), "'yes'")])
def test_a_label_that_every_row_has_is_named_as_the_source_does(names, found):
    alone = rows(y=torch.ones(4, dtype=torch.int64), label_names=names)
    with pytest.raises(FedtideError, match=f"^toy: labels: found {found}, but that is the label of every row; allowed"):
        check_classes(alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2, 2)], ids=str)
def test_a_feature_that_is_no_number_names_the_row(shape, value):
    x = torch.zeros(shape)
    x.view(4, -1)[2:, -1] = value
    with pytest.raises(FedtideError, match=r"^toy: row 2, counted from 0: a feature is NaN or beyond 3.4e"):
        rows(x=x)


def test_infinities_that_cancel_are_found():
    with pytest.raises(FedtideError, match="row 1"):
        rows(x=torch.tensor([[0.0, 0.0], [float("inf"), -float("inf")], [0.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("column", ["y", "domain", "client", "time", "held_out"])
def test_columns_of_another_length_are_named(column):
    with pytest.raises(FedtideError, match=f"^toy: rows of {column}: found 3, allowed: 4, as in x$"):
        rows(**{column: torch.zeros(3, dtype=torch.int64)})


def test_picked_rows_keep_every_column():
    full = rows(
        domain=torch.tensor([0, 0, 1, 1]),
        client=torch.tensor([5, 6, 7, 8]),
        time=torch.arange(4.0),
        held_out=torch.tensor([True, False, False, True]),
    )
    for where in (torch.tensor([True, False, True, False]), torch.tensor([0, 2])):
        picked = full.pick(where)
        assert picked.y.tolist() == [0, 2]
        assert (picked.domain.tolist(), picked.client.tolist()) == ([0, 1], [5, 7])
        assert (picked.time.tolist(), picked.held_out.tolist()) == ([0.0, 2.0], [True, False])
        assert picked.shape == full.shape == (3,)


# -- ragged lists -----------------------------------------------------------------------------------------------------


@law
@given(lists)
def test_ragged_lists_are_the_lists_sorted(of):
    ragged = Ragged.of(of)
    assert len(ragged) == len(of)
    assert [ragged[i].tolist() for i in range(len(of))] == [sorted(rows) for rows in of]
    assert ragged.counts.tolist() == [len(rows) for rows in of]
    assert ragged.owner.tolist() == [i for i, rows in enumerate(of) for _ in rows]


@law
@given(lists, lists)
def test_joined_lists_follow_one_another(first, second):
    joined = Ragged.join([Ragged.of(first), Ragged.of(second)])
    assert [joined[i].tolist() for i in range(len(joined))] == [sorted(rows) for rows in [*first, *second]]


@law
@given(st.lists(st.integers(-1, 4), max_size=40))
def test_owners_and_lists_are_inverse(owner):
    ragged = Ragged.from_owner(np.array(owner, dtype=np.int64), 5)
    for client in range(5):
        assert ragged[client].tolist() == [row for row, who in enumerate(owner) if who == client]


@law
@given(st.lists(st.integers(0, 9), unique=True, max_size=10))
def test_translated_lists_are_the_rows_of_the_subset(chosen):
    where = torch.tensor([3 * i + 1 for i in range(10)])
    lists, wanted = Ragged.of([chosen, []]), [3 * i + 1 for i in sorted(chosen)]
    assert lists.translated(where)[0].tolist() == wanted
    assert lists[0].tolist() == sorted(chosen)
    assert lists.translated(where, in_place=True)[0].tolist() == lists[0].tolist() == wanted


def test_lists_of_a_table_are_sorted():
    table = Ragged.equal(np.array([[3, 1], [0, 2]], dtype=np.int32))
    assert [table[0].tolist(), table[1].tolist()] == [[1, 3], [0, 2]]


Y = torch.tensor([[1, 2, 0], [3, 0, 0], [1, 1, 2], [2, 3, 3]])


def words_of(**columns) -> Rows:
    return Rows(**{"name": "toy", "x": torch.zeros(4, 3, dtype=torch.int64), "y": Y, "classes": 4, **columns})


def sequences() -> Rows:
    """What a function of the user's own gives."""
    return words_of(padding=0, unscored=(2,))


def test_steps_that_are_padding_do_not_count():
    assert words_of(padding=0).mask(Y).int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert words_of().mask(Y).all()
    assert words_of(padding=0).mask(Y[1:2]).tolist() == [[True, False, False]]


def test_labels_that_are_not_scored_count_all_the_same():
    assert words_of(padding=0, unscored=(2, 3)).mask(Y).sum() == 9
    assert words_of(padding=0, unscored=(2, 3)).scored(Y).int().tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert words_of(unscored=(0,)).scored(Y).int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]


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
        words_of(**columns)


@pytest.mark.parametrize("partition", [
    Dirichlet(2), DirichletClass(2, min_samples=1), LabelShards(2), Majority(2), Pachinko(2),
], ids=lambda p: p.kind)  # fmt: skip
def test_partitions_by_label_refuse_sequences(partition):
    with pytest.raises(
        FedtideError, match=f"data.partition.kind: found '{partition.kind}', but it deals by .* allowed: iid"
    ):
        build(words_of(padding=0), partition)


def test_groups_by_label_and_turned_pictures_refuse_sequences():
    with pytest.raises(FedtideError, match=r"data.groups.by: found 'labels', but rows of toy are sequences"):
        build(words_of(padding=0), IID(2), ByLabels(((0, 1), (2, 3))))
    with pytest.raises(FedtideError, match=r"found 'rotation', but rows have shape \(3,\)"):
        build(words_of(padding=0), Rotation(2), OneGroup())


def test_sequences_and_single_labels_are_not_put_together():
    source = Python("unit.data.test_rows:sequences")
    parts = Gaussians(samples=4, dims=3, classes=4), source
    with pytest.raises(FedtideError, match=r"data.source.labels: found 'disjoint', but sources give sequences"):
        Domains(("a", "b"), parts).load(None, 0)
    with pytest.raises(FedtideError, match=r"steps, padding and marks: found \[\(3, 0, \(2,\)\), \(None, None, "):
        Domains(("a", "b"), parts, "shared").load(None, 0)
