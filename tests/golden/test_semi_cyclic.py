"""Plural semi-cyclic SGD: its models of blocks by hand, and against FedAvg."""

import pytest
import torch

from fedtide.algorithms.semi_cyclic import semi_cyclic
from fedtide.core.base import Sum, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves, same
from fedtide.learn.server import SGD
from fedtide.mixtures.priors import Block
from fedtide.models.branched import unbranched
from helpers.answering import Answering, begun, identity
from helpers.toys import played, toy


def models(state) -> list[Weights]:
    return unbranched(state.blocks)


def test_two_blocks_by_hand():
    """A day of two rounds and a night of two: the one model moves by 2, 3, -7 and 1 from where it begins, w.

    It stands at w + 2, w + 5, w - 2, w - 1. The day model follows in rounds 0 and 1 and then stays at w + 5. The night
    model stays at w and follows in rounds 2 and 3, from where day left the one model.
    """
    algorithm = semi_cyclic(identity(), prior=Block(period=4, phase=0), server=SGD())
    state = begun(algorithm)
    first = state.weights
    seen = []
    for number, (total, weight) in enumerate([(6.0, 3.0), (12.0, 4.0), (-7.0, 1.0), (2.0, 2.0)]):
        moved = map_leaves(lambda p, total=total: torch.full_like(p, total), first)
        fleet = Answering({"delta": Sum(moved, weight), "loss": Sum(torch.tensor(1.0), 1.0)}, round=number)
        state, _ = algorithm.round(state, fleet, Rng(0))
        trained = [fleet.asked[0][1], state.weights, *models(state)]
        seen.append([float((w.params["head.bias"] - first.params["head.bias"])[0]) for w in trained])
    # received, one model, day model, night model
    expected = [[0, 2, 2, 0], [2, 5, 5, 0], [5, -2, 5, -2], [-2, -1, 5, -1]]
    assert [[round(value, 9) for value in row] for row in seen] == expected


@pytest.mark.parametrize("server", [{"kind": "sgd"}, {"kind": "adam", "lr": 0.05}], ids=["sgd", "adam"])
def test_a_block_keeps_the_model_that_fedavg_has_at_its_end(server):
    """Blocks of three rounds: bit for bit, and whatever the server's optimizer remembers."""
    shift = {"who": {"kind": "block-cyclic", "period": 6}}
    run = played(toy("semi-cyclic", {"server": server, "prior": "block"}, rounds=12, shift=shift))
    plain = played(toy("fedavg", {"server": server}, rounds=12, shift=shift))
    at = [step.state.weights for step in plain.steps]
    for number, step in enumerate(run.steps):
        day, night = models(step.state)
        assert same(step.state.weights, at[number])
        assert same(day, at[max(r for r in range(number + 1) if r % 6 < 3)])
        if number >= 3:
            assert same(night, at[max(r for r in range(number + 1) if r % 6 >= 3)])
