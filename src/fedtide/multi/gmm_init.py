"""Where the Gaussians of a mixture begin: found by federated k-means++ before training, from public rows, or drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Answer, Fleet, Memory, Moment, Reply, Shard, Weighted, Weights, Work
from fedtide.learn.task import Task
from fedtide.multi.features import Extract
from fedtide.parts.cluster import kmeans, seeded, summary

Start = Literal["k-means++", "public", "random"]
"""k-means over centers that clients send, over public rows, or means of N(0, 0.1^2)."""

SEEN = ("centers", "counts", "spreads")
"""What the server sees of a client while it collects."""

TRIES = 10
"""Seeds from which k-means is begun; the tightest is kept."""


@dataclass(frozen=True)
class Collected:
    """What clients have sent so far: centers (n, d), rows behind each (n,), variances around each (n, d)."""

    centers: Tensor
    counts: Tensor
    spreads: Tensor

    @staticmethod
    def nothing() -> Collected:
        """Before anybody has answered, and when nothing is needed any more."""
        return Collected(torch.empty(0), torch.empty(0), torch.empty(0))

    def plus(self, reply: Reply) -> Collected:
        """With the answers of one more round."""
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


def collecting(extract: Extract, count: int) -> Work:
    """The work of a client before training: so many centers of its features, their counts and their variances."""

    def collect(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        z = extract(payload.get("first", Weights({})), shard.x) if len(shard) else torch.empty(0, 1)
        z = z[z.isfinite().all(1)]
        if not len(z):
            return None
        found = summary(z.double().numpy(), count, rng.at("seeds"))
        rows = {name: torch.from_numpy(part) for name, part in zip(SEEN, found, strict=True)}
        return Answer({"rows": Weighted(float(len(z)))}, rows)

    return collect


@dataclass(frozen=True)
class Opening:
    """How the Gaussians of a method begin.

    Args:
        start: how.
        rounds: of collecting, for "k-means++".
        task: with the public rows.
        extract: the features.
        count: K.
        moves: whether features need the first model, which clients then receive.
    """

    start: Start
    rounds: int
    task: Task
    extract: Extract
    count: int
    moves: bool = False

    def __post_init__(self) -> None:
        public = 0 if self.task.public is None else len(self.task.public)
        if self.start == "public" and public < self.count:
            raise FedtideError(
                f"start: 'public' needs {self.count} public rows or more, found {public}; allowed: data.public_samples "
                f"of {self.count} or more, or start = 'random'"
            )

    @property
    def before(self) -> int:
        """Rounds that are played before round 0."""
        return self.rounds if self.start == "k-means++" else 0

    @property
    def reveals(self) -> tuple[str, ...]:
        """What the server sees of a client meanwhile."""
        return SEEN if self.before else ()

    @property
    def work(self) -> Work:
        """What a client does meanwhile."""
        return collecting(self.extract, self.count)

    def first(self, model: Weights, rng: Rng) -> tuple[Tensor, Tensor]:
        """Means and variances (K, d) that are there at once, float64: of public rows, or drawn."""
        public = self.task.public
        if self.start != "public":
            rows = public if public is not None else self.task.example
            wide = 1 if rows is None else self.extract(model, rows[:1]).shape[1]
            drawn = torch.from_numpy(rng.at("mu").numpy().normal(0.0, 0.1, (self.count, wide)))
            return drawn, torch.ones_like(drawn)
        assert public is not None
        z = self.extract(model, public).double()
        alone = Collected(z, torch.ones(len(z), dtype=torch.float64), torch.zeros_like(z))
        return tightest(alone, self.count, rng.at("centres"))

    def collected(self, held: Collected, fleet: Fleet, clients: Tensor, first: Weights) -> Collected:
        """With the centers of one more round."""
        return held.plus(fleet.ask("collect", clients, {"first": first} if self.moves else {}, reveal=SEEN))

    def found(self, held: Collected, rng: Rng) -> tuple[Tensor, Tensor] | None:
        """Means and variances (K, d) by what was collected; None where nobody has sent anything."""
        return tightest(held, self.count, rng.at("centres")) if len(held.counts) else None


def tightest(collected: Collected, count: int, rng: Rng) -> tuple[Tensor, Tensor]:
    """Means and variances (K, d) of weighted k-means from the best of several k-means++ seeds.

    A component that got nothing has the variance of all.
    """
    x, n, spread = (part.double().numpy() for part in (collected.centers, collected.counts, collected.spreads))
    tries = [kmeans(x, seeded(x, count, rng.at(k), weights=n), weights=n) for k in range(TRIES)]
    centers, member = min(tries, key=lambda found: float(n @ ((x - found[0][found[1]]) ** 2).sum(1)))
    whole = n @ (spread + (x - n @ x / n.sum()) ** 2) / n.sum()
    var = np.stack([
        n[mine] @ (spread[mine] + (x[mine] - center) ** 2) / n[mine].sum() if (mine := member == k).any() else whole
        for k, center in enumerate(centers)
    ])  # fmt: skip
    return torch.from_numpy(centers), torch.from_numpy(var)
