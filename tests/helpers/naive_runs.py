"""What naive implementations are given of a run of the package: rows with their shuffles, and models as arrays."""

import re

import numpy as np
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from helpers.branchnet import as_numpy, shard_of
from helpers.naive_em import Rows


def clients_of(population, t, rounds):
    """Who takes part in a round, with their rows; each model starts the generator of the shuffles anew."""
    moment = Moment(t, rounds, float(t))
    return {
        client: Rows(*shard_of(population, client, moment), shuffled(Rng(0).at(t, client, "train", "shuffle")))
        for client in population.arrivals(4, moment).tolist()
    }


def shuffled(key: Rng):
    def start(k: int):
        generator = key.torch()
        return lambda count: torch.randperm(count, generator=generator).numpy()

    return start


def copies_of(weights) -> list[dict[str, np.ndarray]]:
    """The three models in the weights of a network that is repeated as a whole."""
    models: list[dict[str, np.ndarray]] = [{} for _ in range(3)]
    for name, value in as_numpy(weights.params).items():
        k, own = re.fullmatch(r"model\.copies\.(\d)\.(.*)", name).groups()
        models[int(k)][own] = value.astype(np.float64)
    return models
