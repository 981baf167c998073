"""Gaussians in feature space: densities and posteriors, and where they begin.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 5, 6 and 24 (FedTEM); Chen, Liu, Zhang, Xu, Lin, Chen:
*Adaptive Personalized Federated Learning for Non-IID Data with Continual Distribution Shift*, Eq. 8 (pFedEM).
Covariances are diagonal. All computation is in float64 and in logarithms. The floor of the variances and the range of
the shares are ours.

They begin by federated k-means++ before training, from public samples, or random.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.clusterer import best_kmeans, summary
from fedtide.clusters.rounds import init_models
from fedtide.cohorts import Cohort, collect_before, with_cohort
from fedtide.core.base import Algorithm, Answer, Fleet, Holdings, Moment, Reply, Shard, Weighted, Weights, Work
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, OfShift, ingredient
from fedtide.learn import LocalTrainer, Server, Task
from fedtide.learn.features import Extract, Features

LEAST_SHARE = 1e-6
LEAST_VARIANCE = 1e-6


def log_densities(z: Tensor, mu: Tensor, var: Tensor) -> Tensor:
    """Return log N(z | mu_k, diag var_k) for every row and component.

    Args:
        z: (rows, d) features.
        mu: (K, d) means.
        var: (K, d) variances above zero; see `floor_variances`.

    Returns:
        (rows, K), float64.

    >>> one = torch.ones(1, 2)
    >>> log_densities(3 * one, one, 4 * one)  # -(1 + 1)/2 - log 4 - log 2 pi
    tensor([[-4.2242]], dtype=torch.float64)
    """
    z, mu, var = z.double(), mu.double(), var.double()
    # One component at a time: no (rows, K, d), and no z^2 - 2 z mu + mu^2, which cancels where features are large.
    distance = torch.stack([(z - m).square_().div_(v).sum(1) for m, v in zip(mu, var, strict=True)], 1)
    return -0.5 * (distance + var.log().sum(1) + z.shape[1] * math.log(2 * math.pi))


def posteriors(z: Tensor, mu: Tensor, var: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
    """Return the posterior of each component for each row, and the log-joint of component and row.

    Shares are kept away from 0 and 1 (`clip_shares`). A row that is impossible under all components, or not finite, has
    the posterior pi.

    Args:
        z: (rows, d) features.
        mu: (K, d) means.
        var: (K, d) variances above zero; see `floor_variances`.
        pi: (K,) shares of the components.

    Returns:
        gamma (rows, K), which sums to 1 over K, and log(pi_k N_k) (rows, K), not finite where the row is not; float64.

    >>> mu, var, pi = torch.tensor([[0.0], [2.0]]), torch.ones(2, 1), torch.tensor([0.5, 0.5])
    >>> gamma, joint = posteriors(torch.tensor([[0.0], [1.0]]), mu, var, pi)
    >>> gamma  # at 0 the odds are e^2, at 1 they are even
    tensor([[0.8808, 0.1192],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    pi = clip_shares(pi)
    joint = log_densities(z, mu, var) + pi.log()
    gamma = joint.softmax(1)
    return torch.where(gamma.isfinite().all(1, keepdim=True), gamma, pi), joint


def clip_shares(pi: Tensor) -> Tensor:
    """Clip shares (K,) to [1e-6, 1 - 1e-6], sum 1, float64, so that no component is lost forever; K = 1 stays 1.

    >>> clip_shares(torch.tensor([0.0, 1.0]))
    tensor([1.0000e-06, 1.0000e+00], dtype=torch.float64)
    """
    pi = pi.double().clamp(LEAST_SHARE, 1 - LEAST_SHARE)
    return pi / pi.sum()


def floor_variances(var: Tensor, floor: float = 1e-3) -> Tensor:
    """Raise variances (K, d) to at least max(1e-6, floor * their mean over components and dimensions), float64.

    A unit behind a ReLU that is dead on a client has variance 0, and would alone decide every posterior.

    >>> floor_variances(torch.tensor([[4.0, 0.0]]))
    tensor([[4.0000e+00, 2.0000e-03]], dtype=torch.float64)
    """
    var = var.double()
    return var.clamp_min(max(LEAST_VARIANCE, floor * float(var.mean())))


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

    def plus(self, reply: Reply) -> "Collected":
        """Add the answers of one more round."""
        if reply.total is None:
            return self
        counts = reply.rows["counts"].flatten()
        filled = counts > 0
        centers, spreads = (reply.rows[name].flatten(0, 1)[filled] for name in ("centers", "spreads"))
        return Collected(
            torch.cat([self.centers.reshape(-1, centers.shape[1]), centers]),
            torch.cat([self.counts, counts[filled]]),
            torch.cat([self.spreads.reshape(-1, spreads.shape[1]), spreads]),
        )


NOTHING = Collected(torch.empty(0), torch.empty(0), torch.empty(0))
"""The empty collection, as before the first round and when answers are no longer needed."""


@dataclass(frozen=True)
class SentMixture:
    """The payload of clients: K models, and means mu, spreads and shares pi of Gaussians."""

    models: list[Weights]
    mu: Tensor
    spread: Tensor
    pi: Tensor | None = None


@dataclass(frozen=True)
class MixtureState:
    """The models, the optimizer's memo of each, the Gaussians, and the collection for their initialization.

    mu (K, d): means. spread: variances (K, d) or covariances (K, d, d). pi (K,): shares, if the server knows them. All
    in float64.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    mu: Tensor
    spread: Tensor
    collected: Collected
    pi: Tensor | None = None
    cohort: Any = None

    def sent(self) -> SentMixture:
        """Return the payload of clients."""
        return SentMixture(list(self.weights), self.mu, self.spread, self.pi)


def collect_question(extract: Extract, count: int) -> Work:
    """Build a client's work before training: `count` centers of its features, their counts and their variances."""

    def collect(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        z = extract(payload, shard.x) if len(shard) else torch.empty(0, 1)
        z = z[z.isfinite().all(1)]
        if not len(z):
            return None
        summaries = summary(z.double().numpy(), count, rng.at("seeds"))
        rows = {name: torch.from_numpy(part) for name, part in zip(SEEN, summaries, strict=True)}
        return Answer({"rows": Weighted(float(len(z)))}, rows)

    return collect


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

    def fit(self, collected: Collected, rng: Rng) -> tuple[Tensor, Tensor]:
        """Return means (K, d) and spreads from the collection."""
        mu, var = fit_centers(collected, self.count, rng.at("centres"))
        return mu, self.spread(var)

    def init_of(self, models: int, server: Server, cohort: Cohort, pi: Tensor | None = None) -> Any:
        """Return the `init` of a method with so many models."""

        def init(fleet: Fleet, rng: Rng) -> MixtureState:
            weights = init_models(self.task, rng, models)
            mu, spread = self.initial(weights[0], rng)
            memos = tuple(map(server.init, weights))
            return MixtureState(weights, memos, mu, spread, NOTHING, pi, cohort.init(fleet))

        return init

    def with_cohort(
        self,
        algorithm: Algorithm[MixtureState],
        cohort: Cohort,
        local: LocalTrainer,
        forward: Mapping[str, float],
        trained: Callable[[Tensor], Tensor],
        parts: Mapping[str, int],
        **traits: Any,
    ) -> Algorithm[MixtureState]:
        """Finish a method as `with_cohort`, with the rounds of the initialization before its own.

        Its clients divide their samples into `parts`, the number of which is by the option that sets it.
        """
        algorithm = replace(algorithm, check=enough_rows_for(**parts))
        extract, traits = self.extract, {"sends": (SentMixture,), "models": "mixture", "remembers": True, **traits}
        algorithm = with_cohort(algorithm, cohort, self.task, local, forward=forward, trained=trained, **traits)
        if not self.before:
            return algorithm

        def send(state: MixtureState) -> Weights:
            return state.weights[0] if self.features.moves else Weights({})

        work = collect_question(extract, self.count)
        return collect_before(algorithm, cohort, work, self.before, SEEN, self.gather, send)

    def gather(self, state: MixtureState, reply: Reply, moment: Moment, rng: Rng) -> MixtureState:
        """Collect the centers of one more round; the last round before round 0 fits the Gaussians to all of them."""
        collected = state.collected.plus(reply)
        if moment.round < -1:
            return replace(state, collected=collected)
        mu, spread = self.fit(collected, rng) if len(collected.counts) else (state.mu, state.spread)
        return replace(state, mu=mu, spread=spread, collected=NOTHING)


def enough_rows_for(**counts: int) -> Callable[[Holdings], None]:
    """Build the `check` of methods that divide a client's samples into parts: some client must fill all of them.

    Parts of clients with fewer samples stay empty.

    Args:
        counts: number of parts, by the option that sets it.
    """

    def check(clients: Holdings) -> None:
        most = int(clients.counts(clients.clients, "train").max())
        for key, count in counts.items():
            if count > most:
                allowed = f"at most {most}, the training rows of the client that holds most, as they are divided"
                raise refused(key, count, allowed)

    return check


def fit_centers(collected: Collected, count: int, rng: Rng) -> tuple[Tensor, Tensor]:
    """Return means and variances (K, d) of weighted k-means from the best of several k-means++ seeds.

    An empty component gets the variance of all.
    """
    x, n, spread = (part.double().numpy() for part in (collected.centers, collected.counts, collected.spreads))
    centers, member = best_kmeans(x, count, rng, weights=n)
    whole = n @ (spread + (x - n @ x / n.sum()) ** 2) / n.sum()
    var = np.stack([whole] * count)
    for k in np.unique(member):
        mine = member == k
        var[k] = n[mine] @ (spread[mine] + (x[mine] - centers[k]) ** 2) / n[mine].sum()
    return torch.from_numpy(centers), torch.from_numpy(var)
