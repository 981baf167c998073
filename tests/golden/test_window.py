"""The window by hand: two rows at 1 and -1, whose labels the concept B swaps."""

import torch

from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.window import window
from fedtide.cohorts import Everyone
from fedtide.core.base import Shard
from fedtide.learn.kept_rows import merge_shards
from helpers.stages import TASK, TURN, A, B, X, concepts, holding, rounds


def played(*stages: str, **options):
    """Rounds of steps of one round; every stage has samples of its own, so that rows of the past are other rows."""
    algorithm = window(TASK, TURN, rounds_per_step=1, **options)
    return list(rounds(algorithm, [concepts(names, 100 * number) for number, names in enumerate(stages)]))


def test_rows_that_are_older_than_the_window_are_neither_kept_nor_trained_on():
    *_, (_, _, fleet) = played("AA", "AA", "AB", window=3)
    kept = fleet.engine.memory.read(1, (99, 0))["kept"]
    assert [(each.step, len(each.rows)) for each in kept] == [(0, 2), (1, 2), (2, 2)]
    *_, (_, _, fleet) = played("AA", "AA", "AB", "AB", "AB", window=2)
    assert [each.step for each in fleet.engine.memory.read(1, (99, 0))["kept"]] == [3, 4]


def test_it_is_fedavg_on_the_rows_of_the_window():
    """Steps of one round, windows of two steps: FedAvg where every client holds the rows of this round and the last."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, 1, generator=draw, dtype=torch.float64)  # steps, clients, rows
    y = torch.randint(2, (4, 3, 5), generator=draw)
    one = [holding([(x[s, i], y[s, i]) for i in range(3)], classes=2, before=100 * s) for s in range(4)]
    both = [
        holding(
            [(torch.cat([*x[max(s - 1, 0) : s + 1, i]]), torch.cat([*y[max(s - 1, 0) : s + 1, i]])) for i in range(3)],
            classes=2,
        )
        for s in range(4)
    ]
    *_, (ours, _, _) = rounds(window(TASK, TURN, rounds_per_step=1, window=2), one)
    *_, (theirs, _, _) = rounds(fedavg(TASK, TURN, cohort=Everyone()), both)
    torch.testing.assert_close(ours.weights.params["weight"], theirs.weights.params["weight"], rtol=1e-12, atol=1e-12)
    *_, (short, _, _) = rounds(window(TASK, TURN, rounds_per_step=1, window=1), one)
    assert (short.weights.params["weight"] - ours.weights.params["weight"]).abs().max() > 1e-3


def test_rows_that_are_held_again_count_once():
    first = Shard(X, A, torch.tensor([3, 5]), mask=torch.ones(2, 1) > 0, bins=torch.tensor([6, 7]))
    again = Shard(-X, B, torch.tensor([5, 9]), mask=torch.zeros(2, 1) > 0, bins=torch.tensor([7, 8]))
    both = merge_shards([first, again])
    assert (both.ids.tolist(), both.y.tolist()) == ([3, 5, 9], [1, 0, 1])
    assert (both.x.flatten().tolist(), both.mask.flatten().tolist()) == ([1.0, -1.0, 1.0], [True, True, False])
    assert both.labels.tolist() == [6, 7, 8]
    assert both.time is None
    assert merge_shards([first]) is first
