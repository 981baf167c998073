"""What can be known of a population before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
        cohort: how many clients arrive in a round.
        seconds: length of a round on the clock.
        methods: who meet this population, where others meet another; () for all.
    """

    population: Population
    rounds: int
    cohort: int
    seconds: float = 1.0
    methods: Sequence[str] = ()

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
        if len(self.moments) == self.rounds:
            return f"all {self.rounds} rounds"
        whole = self.moments[-1].round == len(self.moments) - 1
        return f"the first {len(self.moments)} of {self.rounds} rounds" if whole else (
            f"{len(self.moments)} of {self.rounds} rounds, evenly spread"
        )  # fmt: skip

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
        some = (
            torch.linspace(0, self.population.registered - 1, min(CLIENTS, self.population.registered)).round().long()
        )
        shares = self.population.label_shares(some, self.moments[0])
        counts = self.population.counts(some, "train", self.moments[0])
        return (shares * counts[:, None]).round().numpy()

    @cached_property
    def arrivals(self) -> list[torch.Tensor]:
        """The clients that arrive in each round."""
        return [self.population.arrivals(self.cohort, moment) for moment in self.moments]

    @cached_property
    def expected(self) -> np.ndarray:
        """Expected share of each group among those who arrive (rounds, groups)."""
        return np.array([self.population.expected(moment) for moment in self.moments])

    @cached_property
    def came(self) -> np.ndarray:
        """Share of each group among those who arrive (rounds, groups)."""
        groups = len(self.population.group_names)
        counts = np.array([self.population.group[a].bincount(minlength=groups).numpy() for a in self.arrivals])
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)

    @cached_property
    def reachable(self) -> np.ndarray:
        """How many clients can be reached in each round."""
        return np.array([len(self.population.reachable(moment)) for moment in self.moments])

    @cached_property
    def mix(self) -> np.ndarray:
        """Share of each class among the rows of those who arrive (rounds, classes); NaN where nobody has any."""
        out = []
        for moment, came in zip(self.moments, self.arrivals, strict=True):
            counts = self.population.counts(came, "train", moment).double()
            mixed = (self.population.label_shares(came, moment) * counts[:, None]).sum(0) if len(came) else None
            out.append(
                np.full(self.population.rows.classes, np.nan) if mixed is None else (mixed / mixed.sum()).numpy()
            )
        return np.array(out)

    @cached_property
    def domains(self) -> np.ndarray | None:
        """Share of each domain among the rows of those who arrive (rounds, domains); None where there is one."""
        domain, names = self.population.rows.domain, self.population.rows.domain_names
        if domain is None or len(names) < 2:
            return None
        rows = (
            self.population.pooled(came, moment, "train")[0]
            for moment, came in zip(self.moments, self.arrivals, strict=True)
        )
        counts = np.array([torch.bincount(domain[r.long()].long(), minlength=len(names)).numpy() for r in rows])
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)

    @cached_property
    def changed(self) -> np.ndarray | None:
        """How many clients hold other rows, or labels, than at the round looked at before; None without drift."""
        if not self.population.shift.drifts:
            return None
        pairs = zip(self.moments[1:], self.moments, strict=False)
        return np.array([0, *(len(self.population.changed(now, before)) for now, before in pairs)])

    @property
    def apart(self) -> tuple[float, float]:
        """Mean total variation between a client's label mix and that of all, and the same of rows dealt at random."""
        held = self.labels[self.labels.sum(1) > 0]
        pooled = held.sum(0) / held.sum()
        chance = np.array(
            [Rng(0).at("dealt", k).numpy().multinomial(int(n), pooled) for k, n in enumerate(held.sum(1))]
        )
        real, dealt = (
            float(_variation(counts / held.sum(1, keepdims=True), pooled).mean()) for counts in (held, chance)
        )
        return real, dealt

    def lines(self) -> list[str]:
        """Say what there is, in a few lines."""
        population, shift, rows = self.population, self.population.shift, self.rows
        groups, aside = population.group_names, len(population.group) - population.registered
        who = f"{population.registered:,} clients" + (f" and {aside:,} held out" if aside else "")
        said = [f"{who}; {len(population.rows):,} rows of shape {tuple(population.rows.shape)}, "
                f"{population.rows.labeled}", *population.rows.said[1:]]  # fmt: skip
        each = f"{rows.min():,} to {rows.max():,} a client, {np.median(rows):,.0f} for the median one"
        said.append(f"rows to train on: {each if rows.min() < rows.max() else f'{rows.min():,} a client'}")
        if self.labeled and self.labels.any():
            real, dealt = self.apart
            most = int(np.median((self.labels > 0).sum(1)))
            said.append(
                f"labels{' at the first round' * shift.drifts}: the median client has {most} of "
                f"{population.rows.classes} classes; a client's mix is "
                f"{real:.2f} from that of all (total variation), {dealt:.2f} if rows were dealt at random"
            )
        if len(groups) > 1:
            sizes = population.group[: population.registered].bincount(minlength=len(groups)).tolist()
            said.append(f"groups: {listed([f'{name} {size}' for name, size in zip(groups, sizes, strict=True)])}")
        told = shift.who.words(groups, shift.clock), shift.words(groups, population.rows.domain_names, self.rounds)
        said += [line.strip() for line in told if line.strip()]
        said.append(f"below: {self.looked_at}, {self.cohort} clients in each")
        if len(groups) > 1:
            share = 100 * self.came[:, 0]
            said.append(f"of those who arrive {share.min():.0f} to {share.max():.0f} % are {groups[0]}")
        if self.reachable.min() < population.registered:
            said.append(f"{self.reachable.min():,} to {self.reachable.max():,} clients can be reached")
        if self.labeled:
            known = self.mix[np.isfinite(self.mix).all(1)]
            far = _variation(known, known.mean(0)).max() if len(known) else 0.0
            said.append(f"the mix of labels that arrives is up to {far:.2f} from its mean (total variation)")
        if self.changed is not None:
            at = int((self.changed > 0).sum())
            said.append(f"clients change in {at} of these rounds, {self.changed.max():,} at most")
        return said

    @property
    def title(self) -> str:
        """Who meets this population; "" for all methods."""
        return listed(self.methods)


@dataclass(frozen=True, repr=False)
class Shown:
    """Previews of an experiment, one for each shift that its methods meet: printed they are lines.

    Args:
        name: of the experiment.
        previews: what is shown.
    """

    name: str
    previews: Sequence[Preview]

    def __repr__(self) -> str:
        return "\n".join(
            line for each in self.previews for line in ([f"{each.title}:"] if each.title else []) + each.lines()
        )

    def _repr_html_(self) -> str:
        from fedtide.inspection.preview_page import shown

        return shown(self)

    def write(self, page: str | Path) -> Path:
        """Write a page with pictures, which opens offline, and return its path."""
        from fedtide.inspection.preview_page import write

        return write(self, Path(page))


def _variation(mix: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return half the sum of absolute differences, of each row."""
    return 0.5 * np.abs(mix - other).sum(1)
