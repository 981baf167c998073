"""Numbers of a population before a run: rows, labels, participation and change, over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.draw.prose import listed

ROUNDS = 240
"""Rounds that are looked at."""
CLIENTS = 300
"""Clients whose labels are looked at."""
CLASSES = 200
"""Classes up to which labels are told apart."""


@dataclass(frozen=True)
class Preview:
    """A population, and the rounds of an experiment.

    Args:
        population: made with the first seed.
        rounds: of a run.
        cohort: number of clients that arrive in a round.
        seconds: length of a round on the clock.
        methods: the methods that meet this population, if others meet another; () for all.
    """

    population: Population
    rounds: int
    cohort: int
    seconds: float = 1.0
    methods: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The methods that meet this population; "" for all methods."""
        return listed(self.methods)

    @cached_property
    def moments(self) -> list[Moment]:
        """The rounds that are looked at: all of a few, the first of many with a short period, else some of all."""
        period = self.population.shift.period
        if self.rounds <= ROUNDS or (period is not None and period <= ROUNDS / 4):
            numbers = np.arange(min(self.rounds, ROUNDS))
        else:
            numbers = np.linspace(0, self.rounds - 1, ROUNDS).round().astype(int)
        return [Moment(int(number), self.rounds, int(number) * self.seconds) for number in numbers]

    @property
    def looked_at(self) -> str:
        """The rounds that are looked at, in words."""
        count = len(self.moments)
        if count == self.rounds:
            return f"all {self.rounds} rounds"
        if self.moments[-1].round == count - 1:
            return f"the first {count} of {self.rounds} rounds"
        return f"{count} of {self.rounds} rounds, evenly spread"

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows that each registered client trains on at some time (clients,)."""
        return self.population.counts(self.population.clients, "train").numpy()

    @property
    def labeled(self) -> bool:
        """True if rows have labels that can be told apart."""
        return self.population.rows.steps is None and self.population.rows.classes <= CLASSES

    @cached_property
    def labels(self) -> np.ndarray:
        """Rows of each class (clients, classes) that clients train on at the start; of many clients some."""
        registered = self.population.registered
        clients = torch.linspace(0, registered - 1, min(CLIENTS, registered)).round().long()
        shares = self.population.label_shares(clients, self.moments[0])
        counts = self.population.counts(clients, "train", self.moments[0])
        return (shares * counts[:, None]).round().numpy()

    @cached_property
    def arrivals(self) -> list[torch.Tensor]:
        """The clients that arrive in each round."""
        return [self.population.arrivals(self.cohort, moment) for moment in self.moments]

    @cached_property
    def expected(self) -> np.ndarray:
        """Expected share of each group among the clients that arrive (rounds, groups)."""
        return np.array([self.population.expected(moment) for moment in self.moments])

    @cached_property
    def arrived(self) -> np.ndarray:
        """Share of each group among the clients that arrive (rounds, groups)."""
        groups = len(self.population.group_names)
        counts = [self.population.group[clients].bincount(minlength=groups).numpy() for clients in self.arrivals]
        return _shares(np.array(counts))

    @cached_property
    def reachable(self) -> np.ndarray:
        """Number of clients that can be reached in each round."""
        return np.array([len(self.population.reachable(moment)) for moment in self.moments])

    @cached_property
    def mix(self) -> np.ndarray:
        """Share of each class among the rows of arriving clients (rounds, classes); NaN if there are no rows."""
        mixes = []
        for moment, clients in zip(self.moments, self.arrivals, strict=True):
            mix = np.full(self.population.rows.classes, np.nan)
            if len(clients):
                counts = self.population.counts(clients, "train", moment).double()
                mixed = (self.population.label_shares(clients, moment) * counts[:, None]).sum(0)
                mix = (mixed / mixed.sum()).numpy()
            mixes.append(mix)
        return np.array(mixes)

    @cached_property
    def domains(self) -> np.ndarray | None:
        """Share of each domain among the rows of arriving clients (rounds, domains); None if there is one."""
        domain, names = self.population.rows.domain, self.population.rows.domain_names
        if domain is None or len(names) < 2:
            return None
        counts = []
        for moment, clients in zip(self.moments, self.arrivals, strict=True):
            rows = self.population.pooled(clients, moment, "train")[0]
            counts.append(torch.bincount(domain[rows.long()].long(), minlength=len(names)).numpy())
        return _shares(np.array(counts))

    @cached_property
    def changed(self) -> np.ndarray | None:
        """Number of clients with other rows, or labels, than at the round before; None without drift."""
        if not self.population.shift.drifts:
            return None
        pairs = zip(self.moments[1:], self.moments, strict=False)
        return np.array([0, *(len(self.population.changed(now, before)) for now, before in pairs)])

    @property
    def label_distance(self) -> tuple[float, float]:
        """Mean total variation between a client's label mix and that of all, and the same of rows dealt at random."""
        counts = self.labels[self.labels.sum(1) > 0]
        pooled = counts.sum(0) / counts.sum()
        dealt = [Rng(0).at("dealt", k).numpy().multinomial(int(n), pooled) for k, n in enumerate(counts.sum(1))]
        real, chance = (float(_variation(_shares(rows), pooled).mean()) for rows in (counts, np.array(dealt)))
        return real, chance

    def lines(self) -> list[str]:
        """Describe the population in a few lines."""
        population, shift, rows = self.population, self.population.shift, self.rows
        groups, held_out = population.group_names, len(population.group) - population.registered
        clients = f"{population.registered:,} clients" + (f" and {held_out:,} held out" if held_out else "")
        sizes = f"{rows.min():,} to {rows.max():,} a client, {np.median(rows):,.0f} for the median one"
        lines = [
            f"{clients}; {len(population.rows):,} rows of shape {tuple(population.rows.shape)}, "
            f"{population.rows.labeled}",
            *population.rows.said[1:],
            f"rows to train on: {sizes if rows.min() < rows.max() else f'{rows.min():,} a client'}",
        ]
        if self.labeled and self.labels.any():
            real, chance = self.label_distance
            most = int(np.median((self.labels > 0).sum(1)))
            lines.append(
                f"labels{' at the first round' * shift.drifts}: the median client has {most} of "
                f"{population.rows.classes} classes; a client's mix is "
                f"{real:.2f} from that of all (total variation), {chance:.2f} if rows were dealt at random"
            )
        if len(groups) > 1:
            counts = population.group[: population.registered].bincount(minlength=len(groups)).tolist()
            lines.append(f"groups: {listed([f'{name} {count}' for name, count in zip(groups, counts, strict=True)])}")
        words = shift.who.words(groups, shift.clock), shift.words(groups, population.rows.domain_names, self.rounds)
        lines += [line.strip() for line in words if line.strip()]
        lines.append(f"below: {self.looked_at}, {self.cohort} clients in each")
        if len(groups) > 1:
            share = 100 * self.arrived[:, 0]
            lines.append(f"of those who arrive {share.min():.0f} to {share.max():.0f} % are {groups[0]}")
        if self.reachable.min() < population.registered:
            lines.append(f"{self.reachable.min():,} to {self.reachable.max():,} clients can be reached")
        if self.labeled:
            mixes = self.mix[np.isfinite(self.mix).all(1)]
            far = _variation(mixes, mixes.mean(0)).max() if len(mixes) else 0.0
            lines.append(f"the mix of labels that arrives is up to {far:.2f} from its mean (total variation)")
        if self.changed is not None:
            count = int((self.changed > 0).sum())
            lines.append(f"clients change in {count} of these rounds, {self.changed.max():,} at most")
        return lines


def _shares(counts: np.ndarray) -> np.ndarray:
    """Divide each row by its sum; a row of zeros stays."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _variation(mix: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return half the sum of absolute differences, of each row."""
    return 0.5 * np.abs(mix - other).sum(1)
