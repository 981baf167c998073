"""The works that are timed: model, federation, data; and each of them as an experiment and as a naive loop.

The data are random pictures made from a seed, so no files are needed, and any process can make the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedtide.config import Experiment, from_dict
from fedtide.core.base import Weights
from fedtide.data.population import Population
from naive import NaiveFedAvg

RATE = 0.02
"""Learning rate of every work."""
CLASSES = 10
ENDLESS = 1_000_000
"""Rounds that are planned: more than anyone plays here."""


@dataclass(frozen=True)
class Goal:
    """How many times as long as ours a peer should take, on two cores.

    Args:
        ratio: so many times.
        ours: of which of our fleets the fastest counts: any in float32, those that train clients one by one, those that
            train them stacked, or those in bfloat16.
        against: the peer; None for the fastest of all.
        limit: what is in the way, told where the goal is not reached.
    """

    ratio: float
    ours: Literal["any", "one by one", "stacked", "bf16"] = "any"
    against: str | None = None
    limit: str = ""


@dataclass(frozen=True)
class Work:
    """One federation: all clients take part, one local epoch of SGD, fp32.

    Args:
        title: for tables.
        model: the `[model]` table of an experiment.
        clients: how many.
        rows: pictures each.
        batch: rows in a mini-batch.
        convolutional: whether the memory format of convolutions matters.
        goals: what we want to be ahead by; contenders in bfloat16 play where one is about them.
    """

    title: str
    model: dict[str, Any]
    clients: int
    rows: int
    batch: int
    convolutional: bool = False
    goals: tuple[Goal, ...] = ()


FEW_CHANNELS = (
    "convolutions of one to sixteen channels are products of few rows, half of a round or more, and do a quarter of "
    "the arithmetic a second that large ones do (below), one by one, stacked, and in the library that peers call, too"
)
WORKS = {
    "logistic": Work(
        "logistic regression 784-10, 10 x 60 rows, batch 10", {"kind": "linear"}, 10, 60, 10,
        goals=(Goal(2.0, limit="nine tenths of a round are calls of Python and torch, not arithmetic"),),
    ),
    "mlp": Work(
        "MLP 784-200-10, 100 x 50 rows, batch 10", {"kind": "mlp", "hidden": [200]}, 100, 50, 10,
        goals=(Goal(2.0, limit="half of a round is products near the speed of large ones, the rest moves weights"),),
    ),
    "lenet": Work(
        "LeNet-5, 10 x 100 rows, batch 20", {"kind": "lenet5"}, 10, 100, 20, True,
        goals=(Goal(2.0, "one by one", limit=FEW_CHANNELS), Goal(2.0, "stacked", limit=FEW_CHANNELS)),
    ),
    "cnn": Work(
        "CNN of 1.2 M parameters, 10 x 100 rows, batch 20", {"kind": "cnn"}, 10, 100, 20, True,
        goals=(
            Goal(1.35, limit="its large convolution is as fast as a product of large matrices, for peers as for us"),
            Goal(2.4, "bf16", limit="pools, activations, losses and steps stay in float32, and convolutions gain less "
                 "than products"),
        ),
    ),
    "small-cnn": Work(
        "small-cnn, 10 x 60 rows, batch 20", {"kind": "small-cnn"}, 10, 60, 20, True,
        goals=(
            Goal(2.0, "one by one", "pfl", FEW_CHANNELS),
            Goal(2.0, "stacked", "pfl", FEW_CHANNELS),
            Goal(12.0, against="flower", limit=FEW_CHANNELS),
        ),
    ),
}  # fmt: skip


def pictures(rows: int, seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Random pictures (rows, 28, 28) uint8 and labels: the source of every work."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (rows, 28, 28), dtype=torch.uint8, generator=generator)
    return x, torch.arange(rows) % classes


def source(rows: int, classes: int = CLASSES) -> dict[str, Any]:
    """The `[data.source]` table of `pictures`; worker processes find this module as they get our `sys.path`."""
    return {"kind": "python", "function": "works:pictures", "options": {"rows": rows, "classes": classes}}


def federation(work: Work) -> dict[str, Any]:
    """What every experiment on a work begins with: its rows, its clients, its model, and rounds without end."""
    return {
        "rounds": ENDLESS,
        "data": {
            "source": source(work.clients * work.rows),
            "partition": {"kind": "iid", "clients": work.clients, "samples": work.rows},
            "split": {"val": 0.0, "test": 0.0},
        },
        "model": work.model,
    }


def experiment(work: Work, *, batch: int, settings: Mapping[str, Any] | None = None) -> Experiment:
    """A work as an experiment.

    Args:
        work: which.
        batch: rows in a mini-batch; 0 means all rows of a client at once.
        settings: further tables and keys, for example `{"fleet": {"channels_last": False}}`.
    """
    return from_dict(
        {
            **federation(work),
            **(settings or {}),
            "method": [
                {
                    "name": "FedAvg",
                    "algorithm": "fedavg",
                    "cohort": {"kind": "everyone"},
                    "local": {"lr": RATE, "epochs": 1, "batch_size": batch},
                }
            ],
        }
    )


def naive(work: Work, population: Population, weights: Weights, *, batch: int) -> NaiveFedAvg:
    """A work as a naive loop, over the same rows of the same clients and from the same weights."""
    x, y = pictures(work.clients * work.rows)
    dataset = TensorDataset(x.unsqueeze(1).float() / 255, y)
    model = experiment(work, batch=batch).model.build((1, 28, 28), CLASSES)
    model.load_state_dict(weights.params)
    clients = [population.parts["train"][client].tolist() for client in range(work.clients)]
    return NaiveFedAvg(model, dataset, clients, batch or work.rows, RATE)
