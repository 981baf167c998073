"""Initialization of a mixture's Gaussians: by federated k-means++ before training, from public samples, or random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.array_kmeans import best_kmeans, summary
from fedtide.cohorts import Cohort
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Holdings,
    Memory,
    Moment,
    Reply,
    Shard,
    Simulation,
    Weighted,
    Weights,
    Work,
)
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, OfShift, ingredient
from fedtide.learn.features import Extract, Features
from fedtide.learn.task import Task


@ingredient
class KMeansPlusPlus:
    """k-means++ over centers that clients send in rounds before round 0; the server sees these centers.

    Args:
        rounds: number of these rounds. None is half a cycle of the experiment's mixture, of three components or more a
            whole one: so all domains are seen alike. From Python it is one round, which suffices if that shows samples
            of all kinds.
    """

    rounds: Annotated[Count | None, OfShift("seen")] = None
    kind: Literal["k-means++"] = "k-means++"


@ingredient
class Public:
    """k-means++ over public samples."""

    kind: Literal["public"] = "public"


@ingredient
class Random:
    """Means drawn from N(0, 0.1^2), and variances of 1."""

    kind: Literal["random"] = "random"


GaussianInit = Annotated[KMeansPlusPlus | Public | Random, Field(discriminator="kind")]
"""Initialization of the Gaussians of a mixture."""

SEEN = ("centers", "counts", "spreads")
"""Values revealed per client during collection."""


@dataclass(frozen=True)
class Collected:
    """Collected answers of clients: centers (n, d), samples of each (n,), variances around each (n, d)."""

    centers: Tensor
    counts: Tensor
    spreads: Tensor

    @staticmethod
    def nothing() -> Collected:
        """Return the empty collection, as before the first round and when answers are no longer needed."""
        return Collected(torch.empty(0), torch.empty(0), torch.empty(0))

    def plus(self, reply: Reply) -> Collected:
        """Add the answers of one more round."""
        if reply.total is None:
            return self
        counts = reply.rows["counts"].flatten()
        there = counts > 0
        centers, spreads = (reply.rows[name].flatten(0, 1)[there] for name in ("centers", "spreads"))
        return Collected(
            torch.cat([self.centers.reshape(-1, centers.shape[1]), centers]),
            torch.cat([self.counts, counts[there]]),
            torch.cat([self.spreads.reshape(-1, spreads.shape[1]), spreads]),
        )


def collect_question(extract: Extract, count: int) -> Work:
    """Build a client's work before training: `count` centers of its features, their counts and their variances."""

    def collect(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        z = extract(payload, shard.x) if len(shard) else torch.empty(0, 1)
        z = z[z.isfinite().all(1)]
        if not len(z):
            return None
        found = summary(z.double().numpy(), count, rng.at("seeds"))
        rows = {name: torch.from_numpy(part) for name, part in zip(SEEN, found, strict=True)}
        return Answer({"rows": Weighted(float(len(z)))}, rows)

    return collect


S = TypeVar("S", bound=Any)
"""State of a method with Gaussians: a dataclass with `weights`, `mu` (K, d), `spread` of each, `collected`, and the
memo of `cohort`."""


@dataclass(frozen=True)
class GaussianSetup:
    """Initialization of a method's Gaussians, and the rounds before round 0 for it.

    Args:
        how: kind of initialization.
        task: the task, with the public samples.
        features: feature space of the Gaussians.
        count: K.
        spread: maps variances (K, d) to the method's own representation.
    """

    how: GaussianInit
    task: Task
    features: Features
    count: int
    spread: Callable[[Tensor], Tensor] = lambda var: var

    def __post_init__(self) -> None:
        public = 0 if self.task.public is None else len(self.task.public)
        if isinstance(self.how, Public) and public < self.count:
            allowed = f"data.public_samples of {self.count} or more, or gaussian_init = 'random'"
            raise refused("gaussian_init", "public", allowed, f"the task has {public} public rows")

    @cached_property
    def extract(self) -> Extract:
        """Feature extractor, given the first model."""
        return self.features.of(self.task)

    @property
    def before(self) -> int:
        """Number of rounds before round 0."""
        return self.how.rounds or 1 if isinstance(self.how, KMeansPlusPlus) else 0

    @property
    def reveals(self) -> tuple[str, ...]:
        """Values revealed per client in these rounds."""
        return SEEN if self.before else ()

    def initial(self, model: Weights, rng: Rng) -> tuple[Tensor, Tensor]:
        """Return means (K, d) and spreads, float64, available before any round: from public samples, or random."""
        public = self.task.public
        if not isinstance(self.how, Public):
            rows = public if public is not None else self.task.example
            wide = 1 if rows is None else self.extract(model, rows[:1]).shape[1]
            drawn = torch.from_numpy(rng.at("mu").numpy().normal(0.0, 0.1, (self.count, wide)))
            return drawn, self.spread(torch.ones_like(drawn))
        assert public is not None
        z = self.extract(model, public).double()
        return self.fit(Collected(z, torch.ones(len(z), dtype=torch.float64), torch.zeros_like(z)), rng)

    def fit(self, held: Collected, rng: Rng) -> tuple[Tensor, Tensor]:
        """Return means (K, d) and spreads from the collection."""
        mu, var = fit_centers(held, self.count, rng.at("centres"))
        return mu, self.spread(var)

    def added_to(self, made: Algorithm[S], cohort: Cohort) -> Algorithm[S]:
        """Put the rounds of the initialization, if it has any, before those of a method."""
        extract = self.extract  # now, because it raises if the network has no such features
        if not self.before:
            return made

        def round(state: S, fleet: Simulation, rng: Rng) -> tuple[S, Facts]:
            if fleet.moment.round >= 0:
                return made.round(state, fleet, rng)
            return self.collect(state, fleet, cohort.pick(state.cohort, fleet, rng, None), rng), {}

        works = {"collect": collect_question(extract, self.count), **made.works}
        traits = replace(made.traits, reveals=self.reveals, before=self.before)
        return replace(made, works=works, round=round, traits=traits)

    def collect(self, state: S, fleet: Fleet, clients: Tensor, rng: Rng) -> S:
        """Collect the centers of one more round; the last round before round 0 fits the Gaussians to all of them."""
        payload = state.weights[0] if self.features.moves else Weights({})
        held = state.collected.plus(fleet.ask("collect", clients, payload, reveal=SEEN))
        if fleet.moment.round < -1:
            return replace(state, collected=held)
        mu, spread = self.fit(held, rng) if len(held.counts) else (state.mu, state.spread)
        return replace(state, mu=mu, spread=spread, collected=Collected.nothing())


def enough_rows_for(**counts: int) -> Callable[[Holdings], None]:
    """Build the `check` of methods that divide a client's samples into parts: every client must hold enough of them.

    Args:
        counts: number of parts, by the option that sets it.
    """

    def check(clients: Holdings) -> None:
        fewest = int(clients.counts(clients.clients, "train").min())
        for key, count in counts.items():
            if count > fewest:
                allowed = f"at most {fewest}, the training rows of the client that holds fewest, as they are divided"
                raise refused(key, count, allowed)

    return check


def fit_centers(collected: Collected, count: int, rng: Rng) -> tuple[Tensor, Tensor]:
    """Return means and variances (K, d) of weighted k-means from the best of several k-means++ seeds.

    An empty component gets the variance of all.
    """
    x, n, spread = (part.double().numpy() for part in (collected.centers, collected.counts, collected.spreads))
    centers, member = best_kmeans(x, count, rng, weights=n)
    whole = n @ (spread + (x - n @ x / n.sum()) ** 2) / n.sum()
    var = np.stack([
        n[mine] @ (spread[mine] + (x[mine] - center) ** 2) / n[mine].sum() if (mine := member == k).any() else whole
        for k, center in enumerate(centers)
    ])  # fmt: skip
    return torch.from_numpy(centers), torch.from_numpy(var)
