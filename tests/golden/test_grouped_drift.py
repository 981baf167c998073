"""Grouped drift with four clients, small enough for pencil and paper.

There are two training rows and one test row of each of four labels. Client i was dealt rows 3i and 3i + 1 for training
and 3i + 2 for testing, all of label i. A client draws two training rows and one test row, so of the one label of its
group it draws them all:

    a client of label c holds the training rows {3c, 3c + 1} and the test row 3c + 2, whoever was dealt them.

With a group for each of two labels, (0,) and (1,), and everyone moving at every small drift (move = 1), there is only
one other group to go to. Two clients begin in each. Every 4 rounds they change places: who is in group g at the start
is in group (g + r // 4) mod 2 at round r.

At round 6 a mass event takes all clients (fraction 1) to two new groups, 2 and 3, two clients each. Their labels are
dealt in turn from the groups before, one label each: group 2 gets label 0 and group 3 label 1. From round 8 on there
are four groups, and a client that moves goes to one of three others.
"""

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.shift import ClusterDrift, Shift


def population(what: ClusterDrift, seed: int) -> Population:
    rows = Rows("four", torch.arange(12.0).unsqueeze(1), torch.arange(12) // 3, 4)
    parts = {
        "train": Ragged.of([[3 * i, 3 * i + 1] for i in range(4)]),
        "val": Ragged.empty(4),
        "test": Ragged.of([[3 * i + 2] for i in range(4)]),
    }
    return Population(rows, parts, torch.zeros(4, dtype=torch.int64), ("all",), 4, Shift(what=what), seed)


def at(r: int) -> Moment:
    return Moment(r, 20)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_four_clients_change_places_and_are_dealt_anew(seed):
    what = ClusterDrift(
        groups=2,
        labels=((0,), (1,)),
        every=4,
        migrate_fraction=1.0,
        resample_fraction=0.0,
        events={"at": (6,), "fraction": 1.0},
        samples=2,
        test_samples=1,
    )
    people = population(what, seed)
    start = people.group_at(at(0))
    assert start.bincount().tolist() == [2, 2]
    for r in range(6):
        group = people.group_at(at(r))
        assert group.tolist() == [(int(g) + r // 4) % 2 for g in start]
        for client, label in enumerate(group.tolist()):
            assert people.held(client, at(r), "train").tolist() == [3 * label, 3 * label + 1]
            assert people.held(client, at(r), "test").tolist() == [3 * label + 2]
            assert people.shard(client, at(r)).y.tolist() == [label, label]
            assert not len(people.held(client, at(r), "val"))
    dealt = people.group_at(at(6))
    assert dealt.bincount(minlength=4).tolist() == [0, 0, 2, 2]
    for client, group in enumerate(dealt.tolist()):
        label = group - 2
        for r in (6, 7):
            assert people.held(client, at(r), "train").tolist() == [3 * label, 3 * label + 1]
    assert (people.group_at(at(8)) != dealt).all()

    events = {r: people.events(at(r)) for r in range(13) if people.events(at(r))}
    assert events == {4: ("drift",), 6: ("mass",), 8: ("drift",), 12: ("drift",)}
    assert [people.changed(at(r)).tolist() for r in range(6)] == [[]] * 4 + [[0, 1, 2, 3], []]
    # At the mass event only those drifted whose new group has another label.
    before = people.group_at(at(5))
    assert people.changed(at(6)).tolist() == [i for i in range(4) if dealt[i] - 2 != before[i]]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_a_mass_event_every_group_has_labels_of_both_old_ones(seed):
    # Of (0, 2) and (1, 3) the new groups are {0, 1} and {2, 3}, or {0, 3} and {1, 2}: one even and one odd label each.
    what = ClusterDrift(
        groups=2, labels=((0, 2), (1, 3)), every=50, events=(3,), samples=60, test_samples=4, concentration=1e6
    )
    people = population(what, seed)
    old, new = (people.group_at(at(r)) for r in (0, 3))
    assert old.bincount().tolist() == [2, 2]
    assert (new >= 2).sum() == 2
    for client, group in enumerate(new.tolist()):
        labels = set(people.shard(client, at(3)).y.tolist())
        assert labels == {0 + group, 2 + group} if group < 2 else labels in ({0, 1}, {2, 3}, {0, 3}, {1, 2})
    assert people.changed(at(3)).tolist() == (new >= 2).nonzero().flatten().tolist()
