"""Parts of naive implementations of methods that take steps of their own, batch by batch: plain autograd in float64."""

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from fedtide.core.base import Moment
from fedtide.core.rng import Rng

LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
ROUNDS = 5

Point = list[torch.Tensor]


def point(model: nn.Module) -> Point:
    return [p.detach().clone() for p in model.parameters()]


def gradient(model: nn.Module, at: Point, x: torch.Tensor, y: torch.Tensor) -> Point:
    """Of the mean cross-entropy of a batch, at some point."""
    net = copy.deepcopy(model)
    with torch.no_grad():
        for p, value in zip(net.parameters(), at, strict=True):
            p.copy_(value)
    return list(torch.autograd.grad(F.cross_entropy(net(x.double()), y), list(net.parameters())))


def batches(shard, key: Rng, size: int = 4, epochs: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of epochs, shuffled by the key of a client's training."""
    shuffle = key.at("shuffle").torch()
    for _ in range(epochs):
        for batch in torch.randperm(len(shard.y), generator=shuffle).split(size):
            yield shard.x[batch], shard.y[batch]


def rounds(
    population, model: nn.Module, work: Callable[..., tuple[Point, object]], memories: dict[int, object]
) -> Iterator[Point]:
    """The global point after each round: means of what clients send, by samples.

    `work(w, what it keeps or None, shard, key)` returns a client's point and what it keeps, which goes into `memories`.
    """
    w = point(model)
    for r in range(ROUNDS):
        moment = Moment(r, ROUNDS, float(r))
        sent, sizes = [], []
        for client in population.arrivals(4, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(r, client, "train")
            own, memories[client] = work(w, memories.get(client), shard, key)
            sent.append(own)
            sizes.append(len(shard))
        w = [
            sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
            for parts in zip(*sent, strict=True)
        ]
        yield w


def close(found, expected: Point, tolerance: float = 1e-10) -> None:
    """Weights of the package against a point."""
    for value, other in zip(found.params.values(), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
