"""FedTEM: EM over day and night with a prior that knows the hour, on a network with a branch for each.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 3.1, Algorithm 1, appendix A.4.

| symbol | meaning |
| --- | --- |
| `w` | trunk and K branches |
| `z = f(x)` | features, the input of the branches |
| `mu_k`, `var_k` | mean and variance of mode k's features, a diagonal Gaussian |
| `pi` | running share of each mode |
| `gamma_k(x)` | posterior of mode k for a row |
| `pt_i` | client i's mean posterior under the network it has just trained |
| `q(t)` | the assumed share of each mode among the participants |
| `n_k` | how many participants the prior gives to mode k |

A client picks its branch by its own posterior and trains it. The server then ranks the participants: the `n_1` that
look most like mode 1 are mode 1, whatever each thought of itself, and their feature statistics make the mode's new
component.

When to use it: two or more populations take turns, their rhythm is roughly known, they mean different things by the
same label or share too little for one model, and the server may see per-client feature statistics. If it may not, use
FedTKM.

Choices:
    No code of FedTEM was found (that of FedTKM was released). The first components are mu ~ N(0, 0.1^2), var = 1, pi
    uniform. `update = "overwrite"` is the paper's Eq. 10; "certainty" moves a component only while the prior gives its
    mode the majority, by `a0 * (K q_k - 1) / (K - 1)`, and is the default, as overwriting lets an outlier near a peak
    take over the absent mode's component. `agreeing` leaves participants out of the statistics whose own posterior
    speaks against the mode the server gave them, as long as others are left; it is the default, as it is as good where
    the prior is right and much better where it is wrong (recipe fedtem-wrong-prior). `update = "overwrite"` with
    `agreeing = false` is the paper to the letter. The paper's extra `pi_k` in the running average (A.4) is taken for a
    typo. The prior has exponent 1 whatever the true one. Variances are at least 1e-6 and `floor` times their mean: dead
    units of a ReLU would decide everything. With lam = 0 a branch that nobody trained is not stepped. Where nothing is
    expected (em-only, uniform) a component moves by its share of the rows. lam and eps, which the paper does not print,
    are ours. Ties of saturated posteriors go by log-odds, then by id. At inference pi is uniform and all rows of a
    client choose one branch together by their mean posterior, whatever `selection` says of training. With K = 1 it is
    FedAvg with the same server optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Count, Flag, Fraction, NonNegative, OpenFraction, Positive
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Notes,
    Payload,
    Prediction,
    Shard,
    Weighted,
    Weights,
)
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import KERAS, Server
from fedtide.learn.task import Task
from fedtide.models.branched import Feature
from fedtide.multi.branches import (
    BranchLoss,
    chosen,
    features,
    mean_by_owner,
    read,
    step,
    width,
    with_branches,
    with_gradient,
)
from fedtide.parts.assign import assign, capacities
from fedtide.parts.gaussian import clipped, floored, log_densities, moments, posteriors
from fedtide.parts.prior import Linear, Prior
from fedtide.parts.step_size import step_sizes
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, and the mixture: mu and var (K, d), pi (K,) in float64.

    share: q_1 of the round before, for the soft prior. started: (K,) whether a component was ever updated.
    """

    weights: Weights
    server: Any
    mu: Tensor
    var: Tensor
    pi: Tensor
    share: float | None
    started: Tensor
    cohort: Any = None


def fedtem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Prior = Linear(),
    branches: Count = 2,
    layer: str = "head",
    feature: Feature = "shared",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    server: Server = KERAS,
    selection: Literal["greedy", "sample", "bayes"] = "greedy",
    update: Literal["certainty", "overwrite"] = "certainty",
    a0: Fraction = 1.0,
    above: OpenFraction | None = None,
    agreeing: Flag = True,
    beta: Fraction = 0.99,
    running: Literal["average", "uniform"] = "average",
    variance: Literal["within", "total"] = "within",
    floor: Positive = 1e-3,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Federated EM with a temporal prior.

    Sends the network and the mixture down, the update and how many trained each branch up in sums, and per client in
    clear: mean posteriors, mean log-odds against mode 1, feature mean and variance, and the number of rows.

    Args:
        task: model and loss; `example` set.
        local: local training.
        prior: the assumed share of each mode, over time.
        branches: K.
        layer: the layer that is repeated; of a language model the paper repeats the projection.
        feature: what tells modes apart: "shared", what goes into that layer (the paper's words), or "branches", what
            comes out of each copy, side by side (the released code, for language).
        lam: weight of the branches that a client does not train.
        eps: label smoothing there.
        server: what the server does with the mean update.
        selection: how a client picks its branch: the largest mean posterior, a draw from it, or the posterior of all
            its rows together.
        update: how the components move.
        a0: step of "certainty", at most.
        above: the share that a mode must be expected to have before "certainty" moves it; None means 1/K.
        agreeing: take statistics only from participants whose own posterior agrees with their mode.
        beta: of the running average of pi; 0 forgets at once.
        running: "uniform" keeps pi uniform instead.
        variance: "within" clients, as the paper, or "total" with the spread of their means.
        floor: smallest variance, as a share of the mean variance.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    prior.check(branches)
    task = with_branches(task, layer, branches, feature, vectors=True)
    reveals = ("pi", "odds", "mu", "var", "n")
    uniform = torch.full((branches,), 1 / branches, dtype=torch.float64)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        normal = rng.at("mu").numpy().normal(0.0, 0.1, (branches, width(task, weights)))
        mu = torch.from_numpy(normal)
        started = torch.zeros(branches, dtype=torch.bool)
        return State(weights, server.init(weights), mu, torch.ones_like(mu), uniform, None, started, cohort.init(fleet))

    def sent(state: State, pi: Tensor) -> Payload:
        return {"weights": state.weights, "mu": state.mu, "var": floored(state.var, floor), "pi": pi}

    def train(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        weights, mu, var, pi = payload["weights"], payload["mu"], payload["var"], payload["pi"]
        if not len(shard):
            return None
        # Step 2: the branch, by the received network.
        z = features(task, weights, shard.x)
        k = choose(selection, z, mu, var, pi, rng)
        # Step 3: local training with the branch fixed.
        fitted = local(task, BranchLoss(task.loss, k, lam, eps), weights, shard, moment, rng)
        if not fitted.steps:
            return None
        # Step 4: statistics by the updated network, under the received mixture.
        z = features(task, fitted.weights, shard.x)
        gamma, joint = posteriors(z, mu, var, pi)
        own_mean, own_var = moments(z)
        rows = {
            "pi": gamma.mean(0),
            "odds": joint.mean(0) - joint.mean(0)[0],
            "mu": own_mean,
            "var": own_var,
            "n": torch.tensor(float(len(shard)), dtype=torch.float64),
        }
        likeliest = F.one_hot(joint.argmax(1), branches).double().sum(0)
        total = {
            "delta": Weighted(fitted.delta, client_weight(shard, weighting)),
            "loss": Weighted(fitted.loss, len(shard)),
            "modes": Weighted(likeliest / len(shard), len(shard)),
            "branches": Weighted(F.one_hot(torch.tensor(k), branches).double(), 1.0),
        }
        return Answer(total, rows, notes=Notes(branch=torch.tensor(k)))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        payload = sent(state, state.pi)
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        reply = fleet.ask("train", clients, payload, reveal=(*reveals, *cohort.reveals))
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {}
        # Step 6: the network.
        got = mean(reply.total)
        active = with_gradient(got["branches"], lam)
        weights, memo = step(server, state.weights, state.server, got["delta"], active)
        # Step 7: who belongs to which mode.
        q = prior.shares(fleet.moment, branches, float(got["modes"][0]), state.share)
        member = modes(reply.rows, q)
        # Steps 8 and 9: the components and the running shares.
        mass = torch.zeros(branches, dtype=torch.float64).index_add_(0, member, reply.rows["n"])
        mu, var, started = moved(state, reply.rows, member, q, mass)
        pi = beta * state.pi + (1 - beta) * mass / mass.sum() if running == "average" else state.pi
        share = None if q is None else float(q[0])
        facts = {"loss": got["loss"], "pi": pi, "assigned": torch.bincount(member, minlength=branches)}
        if q is not None:
            facts["prior"] = q
        return State(weights, memo, mu, var, pi / pi.sum(), share, started, state.cohort), facts

    def modes(rows: Any, q: Tensor | None) -> Tensor:
        """Step 7: the mode of each participant (m,)."""
        if q is None:
            return rows["pi"].argmax(1)
        return assign(rows["pi"], rows["odds"], capacities(q, len(rows["pi"])))

    def moved(state: State, rows: Any, member: Tensor, q: Tensor | None, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step 8: the components, by what their members' features look like."""
        inside = F.one_hot(member, branches).T.double()
        if agreeing:
            own = inside * F.one_hot(rows["pi"].argmax(1), branches).T
            inside = torch.where(own.any(1, keepdim=True), own, inside)
        n = inside * rows["n"]
        total = n.sum(1)
        share = n / total.clamp(min=1.0)[:, None]
        center, spread = share @ rows["mu"], share @ rows["var"]
        if variance == "total":
            spread = spread + torch.einsum("km,kmd->kd", share, (rows["mu"] - center[:, None]).square())
        hour = q if prior.timed else None
        a = step_sizes(hour, mass, a0, above) if update == "certainty" else torch.ones_like(mass)
        a = torch.where((total > 0) & (a > 0) & ~state.started, 1.0, a * (total > 0))[:, None]
        mu, var = (old + a * (new - old) for old, new in ((state.mu, center), (state.var, spread)))
        return mu, var, state.started | (a[:, 0] > 0)

    def serve(state: State, clients: Tensor) -> tuple[Payload, None]:
        return sent(state, uniform), None

    def predict(payload: Payload, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, z = read(task, payload["weights"], x)
        gamma, _ = posteriors(z, payload["mu"], payload["var"], payload["pi"])
        return chosen(logits, mean_by_owner(gamma, owner)[owner].argmax(1))

    effort = costing(local, {"train": 2})  # features before training and after it
    made = Algorithm("fedtem", init, {"train": train}, round, serve, predict, reveals=reveals, effort=effort)
    return with_cohort(made, cohort, task, local)


def choose(selection: str, z: Tensor, mu: Tensor, var: Tensor, pi: Tensor, rng: Rng) -> int:
    """Step 2: the branch of a client whose rows have features z (rows, d)."""
    if selection == "bayes":
        return int((clipped(pi).log() + log_densities(z, mu, var).sum(0)).argmax())
    own = posteriors(z, mu, var, pi)[0].mean(0)
    if selection == "sample":
        return int(rng.at("branch").numpy().choice(len(pi), p=(own / own.sum()).numpy()))
    return int(own.argmax())
