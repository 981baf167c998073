"""Fielding by sums: what it refuses, what its server is never told, and few clients."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fedtide.clusters.distance import Joint
from fedtide.clusters.kmeans_by_sums import Groups, group_questions, scaled_by_sums, split, sum_cells
from fedtide.core import sums
from fedtide.core.errors import FedtideError
from fedtide.laws.case import Case
from helpers.toys import played, toy

BY_SUMS = {"fewest": 2, "clustering": {"kind": "k-means", "k_max": 3, "n_init": 2}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trigger": "adaptive"}, "found 'adaptive', allowed: fraction, gain, learned"),
        ({"clustering": {"kind": "k-center"}}, "found 'k-center', allowed: k-means"),
        ({"fewest": 0}, "fewest"),
    ],
)
def test_what_needs_single_clients_is_refused(options, said):
    with pytest.raises(FedtideError) as error:
        played(toy("fielding-by-sums", {**BY_SUMS, **options}), rounds=1)
    assert said in str(error.value)


def test_no_sum_of_representations_is_of_fewer_clients_than_fewest():
    """As the clients that are asked twice, first for sizes, stay: over all asks of a run with drift."""
    case = Case(lambda *given, **changes: toy("fielding-by-sums drifts", *given, **changes), lambda: None)
    _, fleet = case.watched()
    sums = [ask for ask in fleet.asks if ask.question == "sums"]
    assert len(sums) > 5
    for ask in sums:
        assert all(one is None or one.weight == 0 or one.weight >= 2 for one in ask.reply.total["cells"])
    for ask in fleet.asks:
        if ask.question == "center":
            assert all(one is None or one.weight >= 2 for one in ask.reply.total["members"])
        assert not ask.reply.rows
        assert ask.slot is None  # who is asked is asked the same, whatever its cluster


def test_no_arithmetic_with_the_sums_of_a_clustering_tells_of_fewer_clients_than_fewest():
    """Clients that are together in all sums, or in none, cannot be told apart: there are as many of each kind."""
    data = {"source": {"kind": "gaussians", "samples": 480, "dims": 4, "classes": 5}, "held_out_clients": {},
            "partition": {"kind": "dirichlet", "clients": 24, "alpha": 0.5}, "groups": {"by": "none"}}  # fmt: skip
    clustering = {"kind": "k-means", "k_max": 6, "n_init": 3}
    changes = {"data": data, "shift": {"who": "always"}, "rounds": 2}
    case = Case(lambda: toy("fielding-by-sums", {"fewest": 3, "clustering": clustering}, **changes), lambda: None)
    run, fleet = case.watched()
    vectors = [run.host.memory.read(client, (99, 0))["reported"] for client in run.host.population.clients.tolist()]
    trees = [ask.payload for ask in fleet.asks if ask.question == "sums"]
    assert len(trees) > 2
    leaves = [[tree.leaf_of(vector) for tree in trees] for vector in vectors]
    sums_of_client = [
        tuple(leaf if leaf >= tree.new else None for leaf, tree in zip(path, trees, strict=True)) for path in leaves
    ]
    assert min(Counter(sums_of_client).values()) >= 3
    assert len(set(sums_of_client)) > 3


def test_participants_that_report_are_counted_with_the_others():
    """Else the server would not know how many a sum of all is of."""
    options = {"reporters": "participants", "trigger": {"kind": "fraction", "tau": 0.0}}
    case = Case(lambda *given, **changes: toy("fielding-by-sums drifts", options, **changes), lambda: None)
    _, fleet = case.watched()
    centers = [ask for ask in fleet.asks if ask.question == "center"]
    assert centers
    for ask in centers:
        assert all(one is None or one.weight >= 2 for one in ask.reply.total["members"])


def test_fewer_clients_than_fewest_are_one_cluster():
    run = played(toy("fielding-by-sums", {**BY_SUMS, "fewest": 20}))
    assert [step.facts["clusters"] for step in run.steps] == [1] * 6


def test_too_few_participants_train_nothing():
    options = {**BY_SUMS, "fewest_updates": 5}
    run = played(toy("fielding-by-sums", options))
    assert all("loss" not in step.facts for step in run.steps)


def test_cells_are_split_along_the_first_of_what_varies_most():
    """Shares of two classes vary equally, but for rounding."""
    variance = torch.tensor([[0.1, 0.2, 0.2 + 1e-12]], dtype=torch.float64)
    cells = Groups(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64), variance)
    _, points = split(cells, 2)
    assert (points[0] != 0).tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize(("vanished", "sizes"), [((), [2, 2]), ((0,), [4])])
def test_a_cell_stays_whole_if_one_of_its_clients_vanished(vanished, sizes):
    """Of 0, 1, 2 and 3 client 0 answers until all are summed; else the cells would be {0, 1} and {2, 3}."""
    works, asked = group_questions(1), []

    def ask(question, clients, payload):
        asked.append(question)
        total = None
        for client in clients.tolist():
            if len(asked) <= 2 or client not in vanished:
                memory = {"reported": torch.tensor([float(client)], dtype=torch.float64)}
                total = sums.add(total, works[question](payload, memory, None, None, None).total)
        return SimpleNamespace(total=sums.finish(total))

    whole, cells, _ = sum_cells(SimpleNamespace(ask=ask), torch.arange(4), "l1", 1, 2)
    assert (whole.sizes.tolist(), cells.sizes.tolist()) == ([4], sizes)


def test_scales_of_shares_from_their_variance():
    """Two clients: (x - y)^2 is 2 * 0.01 * 2 = 0.04 on average. Then js is sqrt((0.04/0.25 + 0.04/0.75) / 8), and l1 is
    twice the mean sqrt(0.08 / pi) of a normal number without its sign."""
    means, variance = (torch.tensor([row], dtype=torch.float64) for row in ([0.25, 0.75] * 2, [0.01] * 4))
    whole = Groups(means, torch.tensor([2.0]), variance)
    scaled = scaled_by_sums(Joint(("js", "l1"), (2, 2), (1.0, 1.0)), whole)
    assert scaled.scales == pytest.approx((0.163299, 0.319154), rel=1e-5)
