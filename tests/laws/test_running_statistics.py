"""Running statistics of a normalization are means over those who trained a model, whatever divides its steps."""

import pytest
import torch
from torch import nn

from fedtide.core.base import Weights
from fedtide.laws.every import with_rows
from fedtide.runs.build import host_of
from helpers.toys import played, toy

ROUNDS, VALUE = 4, 3.0
WHOLE = {"branch_layer": "*", "lam": 0.0}
METHODS = [
    ("fedavg", {}), ("q-fedavg", {}), ("fednova", {}), ("fedem", {"component_layer": "*", "normalize_by": "everyone"}),
    ("pfedem", {"normalize_by": "participants"}), ("pfedem", {"normalize_by": "members"}),
    ("ifca", {"variant": "gradient"}), ("ifca safe", {}), ("fielding", {"safe": True}), ("flexcfl", {"safe": True}),
    ("fedtem", WHOLE), ("fedtkm", WHOLE), ("scsgd", WHOLE), ("min-loss", WHOLE | {"normalize_by": "members"}),
    ("k-fed", WHOLE), ("t-shot", WHOLE),
]  # fmt: skip


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], classes))


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_a_model_has_the_statistics_of_as_many_rounds_as_it_was_trained(name, options):
    """All features of all rows are 3: one step a round leads to 3 (1 - 0.9^r) after r rounds, and nowhere else."""
    local = {"lr": 0.1, "batch_size": 0, "epochs": 1}
    model = f"python:{__name__}:normed"
    experiment = toy(name, {"local": local, **options}, model=model, shift={"who": "always"})
    host = host_of(experiment, experiment.method[0], 0)
    train, rows = host.population.parts["train"], host.population.rows
    host = with_rows(host, (train[i] for i in range(len(train))), x=torch.full_like(rows.x, VALUE))
    weights = played(experiment, host=host, rounds=ROUNDS).state.weights
    models = [weights] if isinstance(weights, Weights) else weights
    means = [value[0] for each in models for key, value in each.buffers.items() if key.endswith("running_mean")]
    allowed = VALUE * (1 - 0.9 ** torch.arange(4 * ROUNDS))  # some train before the first round, too
    assert means
    assert max(means) > 0
    for mean in means:
        assert (allowed - mean).abs().min() < 1e-5, (name, means)
