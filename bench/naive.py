"""Federated averaging as everyone first writes it in plain torch: the yardstick of the benchmarks."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset


class NaiveFedAvg:
    """A global model, and a data loader for each client.

    Args:
        model: the global model; it is trained in place.
        dataset: all samples.
        clients: for each client the positions of its samples.
        batch: rows in a mini-batch.
        rate: learning rate.
    """

    def __init__(
        self, model: nn.Module, dataset: Dataset, clients: Sequence[Sequence[int]], batch: int, rate: float
    ) -> None:
        self.model = model
        self.lr = rate
        self.loaders = [DataLoader(Subset(dataset, rows), batch_size=batch, shuffle=True) for rows in clients]

    def round(self) -> None:
        """One round: every client trains a copy for one epoch, and the copies are averaged."""
        states, sizes = [], []
        for loader in self.loaders:
            states.append(self.train(loader))
            sizes.append(len(loader.dataset))
        self.model.load_state_dict(average(states, sizes))

    def train(self, loader: DataLoader) -> dict[str, Tensor]:
        """One local epoch on a copy of the global model."""
        model = copy.deepcopy(self.model)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return model.state_dict()


def average(states: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """The average of state dicts, weighted by the clients' rows."""
    total = sum(sizes)
    mean = {name: torch.zeros_like(value) for name, value in states[0].items()}
    for state, size in zip(states, sizes, strict=True):
        for name in mean:
            mean[name] += state[name] * (size / total)
    return mean
