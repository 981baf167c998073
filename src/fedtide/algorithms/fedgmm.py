"""FedGMM: FedEM that also models the inputs, by Gaussians of their features next to the K learners.

Wu, Zhang, Yu, Liu, Gu, Zhou, Chen, Cheng: *Personalized Federated Learning under Mixture of Distributions*, ICML 2023,
Algorithm 1. With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `z` | features of a sample |
| `m1 = 1..M1`, `m2 = 1..M2` | Gaussian, learner |
| `mu_m1`, `S_m1` | mean and full covariance of a Gaussian |
| `pi_i(m1, m2)` | client i's mixture of the pairs, kept on the client |
| `g(s, m1, m2)` | posterior of a pair for sample s |

    g(s, m1, m2) = softmax over pairs ( log pi_i(m1, m2) + log N(z_s | mu_m1, S_m1) - loss_m2(s) )
    pi_i         = mean_s g
    mu_i,m1      = sum_s r z_s / (sum_s r + rho),   r = sum_m2 g
    S_i,m1       = sum_s r (z_s - mu_i,m1)(z_s - mu_i,m1)^T / (sum_s r + rho) + rho I
    minimize       (1/B) sum_{s in batch} sum_m2 q(s, m2) loss_m2(s),   q = sum_m1 g
    mu_m1, S_m1  = means weighted by n_i sum_m2 pi_i(m1, m2);  learner m2 by n_i sum_m1 pi_i(m1, m2)
    p(y | x)     = sum_m2 p(m2 | x) p_m2(y | x),    p(m2 | x) = sum_m1 softmax over pairs ( log pi_i + log N(z) )

When to use it: like FedEM, if the inputs tell which learner to use, or if new clients have few labels. Its density
measures the novelty of a sample.

Choices:
    - ours: z are principal components of public samples; the released code takes those of a pretrained network.
    - released code: rho = 0.1.
    - ours: means are over participants. In Algorithm 1 a client that is not drawn counts with its last answer.
    - ours: k-means runs once, on the server (`gaussian_init`). The released code begins with k-means on each client, so
      clients average components that do not belong together.
    - released code: covariances are averaged without the spread of the clients' means.
    - ours: predictions weigh by log pi; the released code adds pi instead.
    - ours: with several `em_steps` the E-steps after the first use the client's own Gaussians. Learners train once, on
      the last posteriors.
    - ours: the E-step runs in evaluation mode on plain cross-entropy, and its posteriors stay with their samples.
    - ours: before evaluation a client adapts its mixture by `e_steps` on its own training samples; one without samples
      keeps the uniform mixture.
    - ours: a Gaussian stays as it was if the mean covariance is not definite, which only lies or noise bring.
    - paper: with one Gaussian it is FedEM, but for the weights of the learners.

The safe form has an anchor (docs/never-worse.md).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import refuse_equal_start, step_models
from fedtide.cohorts import Arrivals, Cohort, play_rounds
from fedtide.core.base import Algorithm, Answer, Facts, Moment, Notes, Prediction, Reply, Shard, Slotted, Weighted, mean
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.fields.types import ModelCount, NonNegative, StepCount
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Train, Weighting, client_weight
from fedtide.learn.features import PCA, Features
from fedtide.learn.losses import LEAST, Blended, mixture_notes, refuse_mean_loss
from fedtide.learn.task import Task, join_models, refuse_without_likelihood, split_models, with_branches
from fedtide.mixtures import GaussianInit, KMeansPlusPlus
from fedtide.mixtures.branches import BranchLosses, blend_branches, losses_of, shares_of
from fedtide.mixtures.feature_gaussians import LEAST_VARIANCE, GaussianSetup, MixtureState
from fedtide.models.branched import WHOLE
from fedtide.transforms import Anchored

LEAST_MASS = 1e-8
"""Least that is added to the mass of a Gaussian."""


def fedgmm(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    components: ModelCount = 3,
    gaussians: ModelCount = 3,
    features: Features = PCA(width=32),
    gaussian_init: GaussianInit = KMeansPlusPlus(),
    em_steps: StepCount = 1,
    e_steps: StepCount = 5,
    rho: NonNegative = 0.1,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[MixtureState]:
    """Federated EM over pairs of a Gaussian and a learner.

    Sends all learners and Gaussians down, and the updates of all of them up in sums. Before round 0, with
    `gaussian_init = "k-means++"`, the server sees M1 centers of each client's features.

    Args:
        task: model and loss, which must be defined per label; `public` set, for the default features.
        components: number of learners, M2.
        gaussians: number of Gaussians, M1.
        features: feature space of the Gaussians.
        gaussian_init: initialization of the Gaussians.
        em_steps: EM steps of a client in a round.
        e_steps: E-steps of a client before evaluation.
        rho: added to the mass of a component and to the diagonal of its covariance.

    Raises:
        FedtideError: the loss has only a mean.
    """
    refuse_mean_loss(task.loss, "FedGMM weights samples")
    refuse_without_likelihood(task, "algorithm", "fedgmm")
    refuse_equal_start(task, components)
    whole = with_branches(task, WHOLE, components)
    setup = GaussianSetup(gaussian_init, task, features, gaussians, lambda var: torch.diag_embed(var + diagonal))
    extract, diagonal = setup.extract, max(rho, LEAST_VARIANCE)
    even = torch.full((gaussians, components), 1 / (gaussians * components), dtype=torch.float64)
    init = setup.init_of(components, server, cohort)

    def pairs(pi: Tensor, z: Tensor, mu: Tensor, cov: Tensor) -> Tensor:
        """Return log pi(m1, m2) N(z | m1) (rows, M1, M2)."""
        return pi.clamp(min=LEAST).log() + full_log_densities(z, mu, cov)[:, :, None]

    def posteriors(scores: Tensor) -> Tensor:
        """Return the posteriors over the pairs of each row."""
        return scores.flatten(1).softmax(1).view_as(scores)

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        models = payload.models
        joined, z = join_models(models, WHOLE), extract(models[0], shard.x)
        losses = (yield BranchLosses(whole, joined, shard)).double().T[:, None]
        pi, mu, cov = shares_of([memory], even)[0], payload.mu, payload.spread
        for _ in range(em_steps):
            scores = pairs(pi, z, mu, cov) - losses
            g = posteriors(scores)
            pi = g.mean(0)
            mu, cov = fit_full_gaussians(z, g.sum(2), rho)
        q = g.sum(1)
        trained = yield Train(whole, local, joined, shard, moment, rng, loss=Blended(q, task.loss))
        if not trained.steps:
            return None
        n = client_weight(shard, weighting)
        deltas = split_models(trained.delta, models[0], WHOLE, components)
        total = {
            "delta": Slotted(
                {k: Weighted(delta, n * float(pi[:, k].sum())) for k, delta in enumerate(deltas)}, components
            ),
            "gaussians": Slotted(
                {k: Weighted({"mu": mu[k], "cov": cov[k]}, n * float(pi[k].sum())) for k in range(gaussians)}, gaussians
            ),
            "pi": Weighted(pi, n),
            "loss": Weighted(trained.loss, len(shard)),
        } | mixture_notes(q, scores)
        update = dict(enumerate(deltas))
        return Answer(total, memory={"pi": pi}, notes=Notes(component=q.argmax(1)), update=update)

    def step(state: MixtureState, reply: Reply, moment: Moment, rng: Rng) -> tuple[MixtureState, Facts]:
        got = mean(reply.total)
        state = step_models(state, server, reply.total["delta"])
        mu, cov = state.mu.clone(), state.spread.clone()
        for k, gaussian in enumerate(got["gaussians"]):
            if gaussian is not None and is_definite(gaussian):
                mu[k], cov[k] = gaussian["mu"], gaussian["cov"]
        facts = {name: got[name] for name in ("loss", "entropy", "log_likelihood")}
        return replace(state, mu=mu, spread=cov), {**facts, "pi": got["pi"].sum(0)}

    def adapt(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        models = payload.models
        losses = losses_of(whole, join_models(models, WHOLE), shard).double().T[:, None]
        pi, z = shares_of([memory], even)[0], extract(models[0], shard.x)
        for _ in range(e_steps):
            pi = posteriors(pairs(pi, z, payload.mu, payload.spread) - losses).mean(0)
        return Answer({}, memory={"pi": pi})

    def by_mixture(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        models, pi = payload.models, shares_of(memories, even)[owner]
        scores = pairs(pi, extract(models[0], x), payload.mu, payload.spread)
        others = {"client": pi.sum(1)} if components > 1 else None
        density = scores.flatten(1).logsumexp(1)
        return blend_branches(whole, join_models(models, WHOLE), x, posteriors(scores).sum(1), others, density)

    # Learners multiply the cost by their number; features other than PCA cost another pass without gradients.
    once = int(not isinstance(features, PCA))
    forward = {"train": components + once, "collect": once, "loss": 2 * (components + once)}
    round, serve = play_rounds(cohort, step, MixtureState.sent)
    algorithm = Algorithm("fedgmm", init, {"train": train}, round, serve, by_mixture, adapt)
    trained, parts = lambda rows: components * local.samples(rows), {"components": components, "gaussians": gaussians}
    return setup.with_cohort(algorithm, cohort, local, forward, trained, parts)


def full_log_densities(z: Tensor, mu: Tensor, cov: Tensor) -> Tensor:
    """Return log N(z | mu_k, cov_k) for every row and component, full covariances; NaN if one is not definite.

    Args:
        z: (rows, d) features.
        mu: (K, d) means.
        cov: (K, d, d) positive definite.

    Returns:
        (rows, K), float64.

    >>> full_log_densities(torch.tensor([[3.0, 3.0]]), torch.ones(1, 2), 4 * torch.eye(2)[None])
    tensor([[-4.2242]], dtype=torch.float64)
    """
    z, mu, cov = z.double(), mu.double(), cov.double()
    densities = []
    roots, failed = torch.linalg.cholesky_ex(cov)
    for m, root in zip(mu, roots.masked_fill(failed[:, None, None] > 0, math.nan), strict=True):
        away = torch.linalg.solve_triangular(root, (z - m).T, upper=False)
        densities.append(-0.5 * away.square().sum(0) - root.diagonal().log().sum())
    return torch.stack(densities, 1) - 0.5 * z.shape[1] * math.log(2 * math.pi)


def fit_full_gaussians(z: Tensor, r: Tensor, rho: float) -> tuple[Tensor, Tensor]:
    """Take the M-step: means (K, d) and full covariances (K, d, d) from rows and posteriors.

    sum r z / (sum r + rho) and sum r (z - mu)(z - mu)^T / (sum r + rho) + rho I, as in the released code. rho = 0 gives
    the usual M-step plus 1e-6 on the diagonal.

    Args:
        z: (rows, d) features, float64.
        r: (rows, K) posteriors.
        rho: strength of the pull of components towards a unit ball around 0.

    >>> mu, cov = fit_full_gaussians(torch.tensor([[1.0], [3.0]]).double(), torch.ones(2, 1).double(), 0.0)
    >>> round(mu.item(), 6), round(cov.item(), 6)
    (2.0, 1.000001)
    """
    mass = r.sum(0) + max(rho, LEAST_MASS)
    mu = r.T @ z / mass[:, None]
    cov = []
    for k, center in enumerate(mu):
        away = z - center
        cov.append((r[:, k, None] * away).T @ away / mass[k])
    return mu, torch.stack(cov) + max(rho, LEAST_VARIANCE) * torch.eye(z.shape[1], dtype=z.dtype)


def is_definite(gaussian: Mapping[str, Tensor]) -> bool:
    """Tell whether "mu" and "cov" are finite, and the covariance is positive definite.

    >>> [is_definite({"mu": torch.zeros(2), "cov": scale * torch.eye(2)}) for scale in (1.0, 0.0, -1.0, torch.inf)]
    [True, False, False, False]
    """
    return all_finite(gaussian) and not int(torch.linalg.cholesky_ex(gaussian["cov"]).info)


ENTRY = Entry(
    "fedgmm", fedgmm, "K models and Gaussians down, updates of all up", "mixture", keeps="its mixture",
    helps=("groups", "meaning", "holdings", "nothing"), reveals=("centers", "counts", "spreads"),
    safe=Safe(transforms=(Anchored(),)),
)  # fmt: skip
