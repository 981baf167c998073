"""pFedEM: clients' data are a changing mixture of K base distributions, with one model for each of those.

Chen, Liu, Zhang, Xu, Lin, Chen: *Adaptive Personalized Federated Learning for Non-IID Data with Continual Distribution
Shift*, IWQoS 2024, section III, Algorithm 1. With default options it follows Algorithm 1 with the backbone network as
f, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w_k` | model of base distribution k = 1..K |
| `z = f(x)` | features of a sample |
| `mu_k`, `var_k`, `pi_k` | mean, variance and share of base distribution k: a diagonal Gaussian of the features |
| `gamma_k(z)` | posterior of base distribution k for a sample |
| `D_ik` | samples of client i whose largest posterior is that of k; n_ik of them, n_i in total |

    gamma_k(z) = pi_k N(z | mu_k, var_k) / sum_q pi_q N(z | mu_q, var_q)                               Eq. 8
    mu_ik, var_ik, pi_ik = mean, variance and share of the client's samples under gamma                Eq. 9 to 11
    w_ik  = w_k after J mini-batch steps on D_ik                                                       Eq. 4
    w_k  += sum_i p_i (w_ik - w_k)                                                                     Eq. 5
    mu_k, var_k = sum_i n_ik (mu_ik, var_ik) / sum_j n_jk,  pi_k = sum_i n_ik / sum_q sum_j n_jq       Eq. 12 to 14
    h(x)  = sum_k pi_k h_k(x)                                                                          Eq. 15

When to use it: each client's data are a mixture of a few distributions whose shares drift with time, and one model
cannot fit all of them well. If the features of all distributions are alike the split is arbitrary: check its purity, or
the entropy of the posteriors.

Choices:
    - paper: f is "the backbone network". No code was found. It reads as the network in training (`features =
      "network"`). One that was trained before and stays (`{ kind = "frozen", weights = ... }`) is another reading.
    - ours: f is the inputs of `layer` ("head"), in training those of the first model. "frozen" without weights is a
      random network, and "pca" takes principal components of public samples.
    - ours: `gaussian_init = "random"` draws the first Gaussians. "k-means++" finds them before round 0.
    - paper: `update = "overwrite"` is Eq. 12 and 13. With "certainty", ours, a component moves only as far as its share
      is above 1/K; with "share" by its share.
    - paper: `normalize_by = "participants"` is Eq. 5, with the n_i of the round (ours). "members" is Eq. 6.
    - ours: one epoch by default. `local.local_steps` is the paper's J, the same for all K models.
    - ours: variances are at least `var_floor` times their mean, and shares are clipped in the E-step.
    - paper: `inference = "global"` is Eq. 15. "posterior" weights models by the sample's own posterior.
    - ours: the split is that of the last E-step. A client begins with the global shares in each round (paper).
    - ours: a component without samples anywhere keeps its model, its Gaussian and a share of 1e-3.

Line numbers in the code are those of Algorithm 1. The safe form begins with k-means++, moves by certainty (a0 = 0.3),
and weights by members and posteriors. It has an anchor, and features of PCA by default (docs/never-worse.md).
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import UNPRIVATE, Divisor, step_models
from fedtide.cohorts import Arrivals, Cohort, play_rounds
from fedtide.core.base import Algorithm, Answer, Facts, Moment, Notes, Prediction, Reply, Shard, Slotted, Weighted, mean
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.fields.types import ModelCount, Positive, StepCount
from fedtide.learn import SGD, Server, Steps, Stepwise, Task, Train, Weighting, client_weight
from fedtide.learn.features import PCA, Features, Network
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import mixture_notes
from fedtide.learn.task import join_models, with_branches
from fedtide.mixtures import Certainty, GaussianInit, KMeansPlusPlus, Overwrite, Random, Update
from fedtide.mixtures.branches import blend_branches, shares_of
from fedtide.mixtures.feature_gaussians import GaussianSetup, MixtureState, floor_variances, posteriors
from fedtide.models.branched import WHOLE
from fedtide.transforms import Anchored

LEAST_SHARE = 1e-3
"""Share of a component without samples."""
LEAST_MASS = 1e-8
"""Total posterior of a component below which it keeps its Gaussian."""

Inference = Literal["posterior", "uniform", "client", "global"]
"""Weights of the models at inference: the sample's posterior, under global or uniform shares; the client's shares; or
the global shares."""


def pfedem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    components: ModelCount = 2,
    features: Features = Network(),
    gaussian_init: GaussianInit = Random(),
    em_steps: StepCount = 1,
    update: Update = Overwrite(),
    normalize_by: Divisor = "participants",
    inference: Inference = "global",
    var_floor: Positive = 1e-3,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[MixtureState]:
    """EM over base distributions, with one model each.

    Sends all models and the mixture down; the updates of the models that a client has samples for, and their Gaussians,
    up in sums. Before round 0, with `gaussian_init = "k-means++"`, the server sees K centers of each client's features.

    Args:
        task: model and loss; `public` set, for features of PCA.
        local: local training of each model on its part of the samples; `local_steps` is the paper's J.
        components: number of base distributions, K.
        features: feature space f of the Gaussians.
        gaussian_init: initialization of the Gaussians.
        em_steps: EM steps of a client in a round.
        update: step sizes of the global Gaussians.
        normalize_by: divisor of a model's update: samples of its distribution ("members"), or all ("participants").
        inference: weights of the models at inference.
        var_floor: smallest variance, as a fraction of the mean variance.
    """
    whole = with_branches(task, WHOLE, components)
    setup = GaussianSetup(gaussian_init, task, features, components)
    even = torch.full((components,), 1 / components, dtype=torch.float64)
    init = setup.init_of(components, server, cohort, even)

    def em(payload: Any, z: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return posteriors and log(pi N) of the last E-step, and the resulting Gaussians (lines 6 and 7)."""
        mu, var, pi = payload.mu, payload.spread, payload.pi
        for step in range(em_steps):
            gamma, joints = posteriors(z, mu, floor_variances(var, var_floor) if step else var, pi)  # Eq. 8
            mu, var, pi = fit_gaussians(z, gamma, mu, var)  # Eq. 9 to 11
        return gamma, joints, (mu, var, pi)

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        gamma, joints, (mu, var, pi) = em(payload, setup.extract(payload.models[0], shard.x))
        component, n, weight = gamma.argmax(1), len(shard), client_weight(shard, weighting)
        deltas, gaussians, losses, done = {}, {}, 0.0, 0
        for k in component.unique().tolist():
            # Lines 9 to 12: D_ik, and the model that it trains (Eq. 4).
            samples = shard.pick(component == k)
            n_k = len(samples)
            trained = yield Train(task, local, payload.models[k], samples, moment, rng)
            if trained.steps:  # a single sample with BatchNorm makes none
                deltas[k] = Weighted(detached(trained.delta), weight * (n_k / n if normalize_by == "members" else 1.0))
                losses, done = losses + n_k * trained.loss, done + n_k
            gaussians[k] = Weighted({"mu": mu[k], "var": var[k]}, weight * (n_k / n))
        if not deltas:
            return None
        shares = torch.bincount(component, minlength=components).double() / n
        total = {
            "delta": Slotted(deltas, components),
            "gaussians": Slotted(gaussians, components),
            "shares": Weighted(shares, weight),
            "loss": Weighted(losses / done, done),
        } | mixture_notes(gamma, joints)
        update = {k: part.value for k, part in deltas.items()}
        next_memory = {"pi": pi} if inference == "client" else None
        return Answer(total, memory=next_memory, notes=Notes(component=component), update=update)

    def step(state: MixtureState, reply: Reply, moment: Moment, rng: Rng) -> tuple[MixtureState, Facts]:
        got, everyone = mean(reply.total), reply.total["shares"].weight
        # Line 14: the models, Eq. 5.
        state = step_models(state, server, reply.total["delta"], normalize_by, everyone)
        # Line 15: the Gaussians, Eq. 12 and 13, and the shares, Eq. 14.
        steps, mu, var = update(got["shares"], got["shares"]), state.mu.clone(), state.spread.clone()
        for k, gaussian in enumerate(got["gaussians"]):
            if gaussian is not None:
                mu[k] += steps[k] * (gaussian["mu"] - mu[k])
                var[k] += steps[k] * (gaussian["var"] - var[k])
        shares = got["shares"].clamp(min=LEAST_SHARE)
        pi = shares / shares.sum()
        facts = {"pi": pi} | {name: got[name] for name in ("loss", "entropy", "log_likelihood")}
        return replace(state, mu=mu, spread=var, pi=pi), facts

    def adapt(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Estimate the client's shares from its current samples; no labels are needed."""
        if not len(shard):
            return None
        return Answer({}, memory={"pi": em(payload, setup.extract(payload.models[0], shard.x))[2][2]})

    def by_mixture(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        models, mu, var, pi = payload.models, payload.mu, payload.spread, payload.pi
        z = setup.extract(models[0], x)
        gamma, joints = posteriors(z, mu, var, pi)
        flat, of_clients = posteriors(z, mu, var, even)[0], shares_of(memories, pi)[owner]
        others = {"posterior": gamma, "uniform": flat, "client": of_clients, "global": pi.expand(len(z), -1)}
        shares = others.pop(inference)  # "global" is Eq. 15
        reported = others if components > 1 else None
        return blend_branches(whole, join_models(models, WHOLE), x, shares, reported, joints.logsumexp(1))

    once = int(not isinstance(features, PCA))
    forward = {"train": once, "collect": once, "loss": components + 2 * once}
    round, serve = play_rounds(
        cohort, step, lambda state: replace(state.sent(), spread=floor_variances(state.spread, var_floor))
    )
    algorithm = Algorithm("pfedem", init, {"train": train}, round, serve, by_mixture, adapt)
    trained, parts = partial(split_samples, local, components), {"components": components}
    return setup.with_cohort(algorithm, cohort, local, forward, trained, parts, unprivate=UNPRIVATE[normalize_by])


def fit_gaussians(z: Tensor, gamma: Tensor, mu: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take the M-step (Eq. 9 to 11): means and variances (K, d) and shares (K,) from rows and posteriors.

    A component with total posterior below 1e-8 keeps its mean and variance.

    Args:
        z: (rows, d) features.
        gamma: (rows, K) posteriors.
        mu: (K, d) current means.
        var: (K, d) current variances.

    >>> z, gamma = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> [part.flatten().tolist() for part in fit_gaussians(z[:2], gamma[:2], torch.zeros(2, 1), torch.ones(2, 1))]
    [[2.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    """
    z, gamma = z.double(), gamma.double()
    mass = gamma.sum(0)
    center = gamma.T @ z / mass.clamp(min=LEAST_MASS)[:, None]
    # Around the new mean, one component at a time: no (rows, K, d) array and no cancellation.
    spread = torch.stack([g @ (z - m).square() for g, m in zip(gamma.T, center, strict=True)])
    has_mass = (mass >= LEAST_MASS)[:, None]
    spread = spread / mass.clamp(min=LEAST_MASS)[:, None]
    return torch.where(has_mass, center, mu.double()), torch.where(has_mass, spread, var.double()), gamma.mean(0)


def split_samples(local: LocalTrainer, parts: int, rows: Tensor) -> Tensor:
    """Count the samples that clients process (clients,) if they split theirs evenly among several models and train all.

    >>> split_samples(LocalTrainer(epochs=2), 2, torch.tensor([30]))
    tensor([60])
    """
    return torch.stack([local.samples((rows + k) // parts) for k in range(parts)]).sum(0)


ENTRY = Entry(
    "pfedem", pfedem, "K models and Gaussians down, updates of some up", "mixture", keeps="nothing, or its shares",
    helps=("groups", "meaning", "holdings", "nothing"),
    safe=Safe({"gaussian_init": KMeansPlusPlus(), "update": Certainty(a0=0.3), "inference": "posterior",
               "normalize_by": "members"}, {"features": PCA()}, (Anchored(),)),
)  # fmt: skip
