"""Three groups and three branches: morning, noon and night, for every method that has branches."""

from dataclasses import replace

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.evaluate.metrics import branch_accuracy
from fedtide.mixtures.step_size import Certainty
from helpers.toys import played, toy

KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
FAR = {
    "source": {
        "kind": "gaussians",
        "samples": 450,
        "dims": 8,
        "classes": 3,
        "domains": 3,
        "offset": 4.0,
        "separation": 1.0,
    },
    "partition": {"kind": "iid", "clients": 45},
}


def branches_of(fleet) -> dict[int, int]:
    """The branch that each client of the round trained."""
    return {client: int(note.branch) for client, note in fleet.queries[-1].notes.items()}


# -- who is who --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "identical", "seed"),
    [
        ("fedtem", {"update": Certainty(a0=0.2)}, True, 0),
        pytest.param("fedtem", {"update": Certainty(a0=0.2)}, False, 1, marks=pytest.mark.thorough),
        pytest.param("fedtkm", {"update": Certainty(a0=0.2)}, False, 0, marks=pytest.mark.thorough),
    ],
    ids=["fedtem from identical components", "fedtem", "fedtkm"],
)
def test_three_populations_that_lie_apart_get_a_branch_each(algorithm, options, identical, seed):
    """T = 24, three periods, linear prior, certainty with 0.2: over 95% of clients at the right branch at the end.

    Features are the inputs and do not move, so this is about the bookkeeping alone: where they are trained, those of a
    group that is away for a third of a period leave its component behind.
    """
    timed = {"prior": {"kind": "linear", "period": 24}, "branches": 3, "cohort": 12, "server": KERAS}
    local = {"lr": 0.1, "batch_size": 30}
    shift = {"who": {"kind": "periodic", "period": 24}}
    experiment = toy(algorithm, {**timed, "local": local, **options}, rounds=72, data=FAR, shift=shift, model="linear")
    run = played(experiment, rounds=1, seed=seed)
    rounds, fleet, state = run.host.algorithm.round, run.fleet, run.steps[0].received
    group, clients = run.host.population.group, run.host.population.clients
    if identical:
        state = replace(state, mu=torch.zeros_like(state.mu))
    trained = torch.zeros(3, 3)
    for t in range(72):
        fleet.begin(Moment(t, 72, float(t)))
        state, _ = rounds(state, fleet, Rng(seed).at(t, "server"))
        for client, k in branches_of(fleet).items() if t >= 48 else ():
            trained[group[client], k] += 1
    judged = torch.zeros(3, 3, dtype=torch.float64)
    scores = fleet.score(run.host.algorithm.serve(state, clients)[0], clients)
    judged.index_add_(0, group[clients], scores.choice)
    assert branch_accuracy(trained) > 0.95
    assert branch_accuracy(judged) > 0.95
    if algorithm == "fedtem":
        # Group k peaks as the prior says, so it is mode k. FedTKM's prior only stretches distances: names may differ.
        assert trained.argmax(1).tolist() == [0, 1, 2]
