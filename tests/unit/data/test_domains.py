"""Domains: several sources side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.sources import NPZ, DayNightCharacters, Domains, Gaussians


def two(labels, **night) -> Rows:
    day = Gaussians(samples=9, test_samples=3, classes=3, domains=1)
    return Domains(
        ("sun", "moon"), (day, Gaussians(**{"samples": 8, "classes": 4, "domains": 1, **night})), labels
    ).load(None, 0)


def test_domains_are_the_sources_one_after_the_other():
    rows = two("shared")
    assert (rows.domain_names, rows.domain.tolist()) == (("sun", "moon"), [0] * 12 + [1] * 8)
    assert (len(rows), rows.shape) == (20, (8,))
    assert rows.held_out.tolist() == [False] * 9 + [True] * 3 + [False] * 8


def test_shared_labels_stay_and_disjoint_labels_follow_one_another():
    shared, disjoint = two("shared"), two("disjoint")
    assert (shared.classes, disjoint.classes) == (4, 7)
    assert sorted(set(shared.y[shared.domain == 1].tolist())) == [0, 1, 2, 3]
    assert sorted(set(disjoint.y[disjoint.domain == 1].tolist())) == [3, 4, 5, 6]
    assert torch.equal(shared.y[:12], disjoint.y[:12])


def words(*labels: str) -> Rows:
    sizes = (3, 4, 2, 5)[: len(labels)]
    sources = tuple(Gaussians(samples=4 * size, classes=size, domains=1) for size in sizes)
    return Domains(tuple("abcd"[: len(labels)]), sources, labels).load(None, 0)


@pytest.mark.parametrize(
    ("labels", "first", "classes"),
    [
        (("x", "x", "y"), (0, 0, 4), 6),
        (("x", "y", "x"), (0, 3, 0), 7),
        (("x", "y", "x", "y"), (0, 3, 0, 3), 8),
        (("x", "y", "z", "x"), (0, 5, 9, 0), 11),
        (("disjoint", "shared"), (0, 3), 7),
        (("x", "x", "x"), (0, 0, 0), 4),
    ],
)
def test_sources_with_the_same_word_share_their_labels(labels, first, classes):
    rows = words(*labels)
    assert rows.classes == classes
    assert tuple(int(rows.y[rows.domain == k].min()) for k in range(len(labels))) == first
    assert [int(rows.y[rows.domain == k].max()) - first[k] + 1 for k in range(len(labels))] == [3, 4, 2, 5][
        : len(labels)
    ]


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (("x",), "found 1 labels for 2 sources; allowed: a word for each source"),
        (("x", "y", "z"), "found 3 labels for 2 sources"),
        ("both", "found 'both', allowed: 'disjoint', 'shared', or a list of a word for each source"),
        ((1, 2), "found .1, 2., allowed: 'disjoint'"),
        (3, "found 3, allowed: 'disjoint'"),
    ],
)
def test_labels_that_cannot_be_are_one_line(labels, line):
    with pytest.raises(FedtideError, match=line):
        two(labels)


@pytest.mark.parametrize(("labels", "classes"), [("shared", (10, 10)), ("disjoint", (10, 26))])
def test_one_domain_of_the_characters_is_the_same_rows_as_of_both(labels, classes):
    both = DayNightCharacters(labels).load(None, 0)
    for k, (name, count) in enumerate(zip(("day", "night"), classes, strict=True)):
        one, same = DayNightCharacters(labels, name).load(None, 0), both.pick(both.domain == k)
        assert (one.domain, one.domain_names, one.classes) == (None, ("all",), count)
        assert torch.equal(one.x, same.x)
        assert torch.equal(one.held_out, same.held_out)
        assert torch.equal(one.y, same.y - (10 if k and labels == "disjoint" else 0))
        assert one.y.unique().tolist() == list(range(count))


def test_domains_of_other_shapes_are_one_line():
    with pytest.raises(FedtideError, match=r"shapes of rows: found .\(5,\), \(8,\)., allowed: a single one"):
        two("shared", dims=5)


def test_domains_of_pictures_and_numbers_keep_their_scale(tmp_path):
    # uint8 pictures are read as 0..1; beside float pictures they must not become 0..255.
    for name, x in (("bytes", np.full((2, 1, 3, 3), 255, np.uint8)), ("floats", np.ones((2, 1, 3, 3), np.float32))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=[0, 1])
    rows = Domains(("day", "night"), (NPZ("bytes.npz"), NPZ("floats.npz"))).load(tmp_path, 0)
    assert rows.x.float().mean((1, 2, 3)).tolist() == [1.0] * 4


def test_domains_of_one_source_with_the_same_settings_are_other_rows():
    plain = Gaussians(samples=10, domains=1)
    rows = Domains(("day", "night"), (plain, plain)).load(None, 0)
    assert not torch.equal(rows.x[:10], rows.x[10:])
