"""Methods whose models are told apart by nothing but their place: put elsewhere, the result is the same elsewhere."""

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from helpers.relabeling import branches_relabeled, models_relabeled
from helpers.toys import played, toy


@pytest.mark.parametrize(
    ("algorithm", "of_models"),
    [("min-loss", None), ("ifca", ("members",)), ("flexcfl", ("directions",)), ("pfedem pca", ("mu", "spread", "pi"))],
)
def test_a_round_of_relabeled_models_gives_the_relabeled_result(algorithm, of_models):
    run = played(toy(algorithm), rounds=2)

    def relabeled(state):
        if of_models is None:
            return branches_relabeled(state, [1, 0])
        return models_relabeled(state, [1, 0, *range(2, len(state.weights))], *of_models)

    def after(state):
        run.fleet.begin(Moment(2, 6, 2.0))
        return run.host.algorithm.round(state, run.fleet, Rng(0).at(2, "server"))[0]

    run.fleet.engine.memory.settle((2, 0))
    assert not same(relabeled(run.state), run.state)
    found, wanted = after(relabeled(run.state)), relabeled(after(run.state))
    if of_models is not None:
        assert same(found, wanted)
    else:  # the trunk's gradient is one product, which adds up the branches in their order
        torch.testing.assert_close(leaves(found), leaves(wanted), rtol=1e-5, atol=1e-6)
