"""FedTEM: EM over modes (such as day and night) with a prior that knows the time, and a network branch for each mode.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 3.1, Algorithm 1, appendix A.4. With default options it follows
Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | trunk and K branches |
| `z = f(x)` | features, the input of the branches |
| `mu_k`, `var_k` | mean and variance of mode k's features, a diagonal Gaussian |
| `pi` | running share of each mode |
| `gamma_k(x)` | posterior of mode k for a sample |
| `pt_i` | client i's mean posterior under the network it has just trained |
| `q(t)` | the assumed share of each mode among the participants |
| `n_k` | number of participants that the prior gives to mode k |

A client picks its branch by its own posterior and trains it. The server then ranks the participants. The `n_1` that
look most like mode 1 are assigned to it, and their feature statistics make its new component.

Line numbers in the code are those of Algorithm 1.

When to use it: two or more populations take turns, and share too little for one model. The server sees per-client
feature statistics; if it may not, use FedTKM.

Choices:
    - ours: no code of FedTEM was found. The initial components are mu ~ N(0, 0.1^2), var = 1 and pi uniform.
    - paper: `update = "overwrite"` is Eq. 10. With "certainty", ours, a component moves only while the prior gives its
      mode the majority.
    - ours: `consistent_only` takes statistics from participants whose own posterior agrees with their mode.
    - ours: a component without members stays as it was, where Eq. 10 is 0/0.
    - ours: `beta` is the decay of the running average of pi; the extra `pi_k` of A.4 is taken for a typo.
    - ours: variances are at least `var_floor` times their mean, because dead units of a ReLU would decide everything.
    - ours: lam and eps, which the paper does not print. With lam = 0 an untrained branch is not stepped.
    - ours: ties of saturated posteriors are broken by log-odds, then by id. Clients cut log-odds at `LARGEST`,
      because a server of real clients refuses larger numbers. A component may be as far away as a liar says.
    - ours: `selection` is of training. Eq. 22 may be meant for inference, too, where Eq. 5 decides.
    - ours: the server's lr = 0.01 and eps = 1e-4.
    - paper: at inference pi is uniform, and all samples use one branch together (Eq. 5); ours: all samples of a client.
    - ours: for K > 2 participants are assigned at the least cost, and idle branches have the mean of their losses.
    - ours: `prior = "learned"` finds the rhythm in sums (docs/learned-rhythm.md).

The safe form moves by certainty, takes consistent statistics alone, and has an anchor (docs/never-worse.md).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import LARGEST, Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import Flag, Fraction, NonNegative, Positive
from fedtide.learn import KERAS, LocalTrainer, Server, Task, Weighting
from fedtide.learn.steps import Features, Steps, Stepwise, Train
from fedtide.learn.task import width, with_branches
from fedtide.mixtures.assign import assign, capacities
from fedtide.mixtures.branches import BranchLoss, answer_branch, mean_by_owner, predict_by_branch, step_branches
from fedtide.mixtures.feature_gaussians import clip_shares, floor_variances, log_densities, posteriors
from fedtide.mixtures.priors import Linear, Prior, sketching
from fedtide.mixtures.step_size import Certainty, Overwrite, Update, first_whole
from fedtide.models.branched import BranchCount, Feature
from fedtide.transforms import Anchored

Selection = Literal["greedy", "sample", "bayes"]
"""A client's choice of branch: largest mean posterior, a draw from it, or posterior of all samples together."""


REVEALS = ("pi", "odds", "mu", "var", "n")


@dataclass(frozen=True)
class Sent:
    """Payload of clients: the network, and the means, variances and shares of the modes."""

    weights: Weights
    mixture: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, and the mixture: mu and var (K, d), pi (K,) in float64.

    prior: the memo of the prior. started: (K,) mask of components that were ever updated.
    """

    weights: Weights
    server: Any
    mu: Tensor
    var: Tensor
    pi: Tensor
    prior: Any
    started: Tensor
    cohort: Any = None


def fedtem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Prior = Linear(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    feature: Feature = "shared",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    server: Server = KERAS,
    selection: Selection = "greedy",
    update: Update = Overwrite(),
    consistent_only: Flag = False,
    beta: Fraction = 0.99,
    var_floor: Positive = 1e-3,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated EM with a temporal prior.

    Sends the network and the mixture down, and the update and the trained branches up in sums. Reveals per client: mean
    posteriors, mean log-odds against mode 1, feature mean and variance, and the number of samples.

    Args:
        task: model and loss; `example` set.
        prior: the assumed share of each mode, over time.
        branch_layer: the layer to repeat; in a language model the paper repeats the projection.
        feature: features of the modes: "shared", the inputs of that layer (the paper's words), or "branches", the
            outputs of all copies, side by side (the released code, for language).
        lam: weight of the branches that a client does not train.
        eps: label smoothing of these branches.
        selection: a client's choice of branch: the largest mean posterior, a draw from it, or the posterior of all its
            samples together.
        update: step sizes of the components.
        consistent_only: take statistics only from participants whose own posterior agrees with their mode.
        beta: decay of the running average of pi; 0 forgets at once, 1 keeps pi uniform.
        var_floor: smallest variance, as a fraction of the mean variance.
    """
    prior.check(branches)
    sketch = sketching(prior, task)
    task = with_branches(task, branch_layer, branches, feature, vectors=True)
    uniform = torch.full((branches,), 1 / branches, dtype=torch.float64)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        mu = torch.from_numpy(rng.at("mu").numpy().normal(0.0, 0.1, (branches, width(task, weights))))
        none, joined, memo = torch.zeros(branches, dtype=torch.bool), cohort.init(fleet), prior.init(branches)
        mixture = {"mu": mu, "var": torch.ones_like(mu), "pi": uniform}
        return State(weights=weights, server=server.init(weights), **mixture, prior=memo, started=none, cohort=joined)

    def broadcast(state: State, pi: Tensor) -> Sent:
        return Sent(state.weights, (state.mu, floor_variances(state.var, var_floor), pi))

    @Stepwise
    def train(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        weights, mixture = payload.weights, payload.mixture
        if not len(shard):
            return None
        # Line 7: the branch, by the received network (Eq. 5).
        received = yield Features(task, weights, shard.x)
        k = choose_branch(selection, received, *mixture, rng)
        parts = sketch(shard)
        # Line 8: local training with the branch fixed (Eq. 4).
        objective = BranchLoss(task.loss, k, lam, eps)
        fitted = yield Train(task, local, weights, shard, moment, rng, loss=objective, features=True)
        if not fitted.steps:
            return None
        # Line 9: statistics by the updated network, under the received mixture (Eq. 6 and 9).
        z = fitted.features
        gamma, joint = posteriors(z, *mixture)
        own_mean, own_var = mean_and_variance(z)
        n = torch.tensor(float(len(shard)), dtype=torch.float64)
        pi, odds = gamma.mean(0), (joint.mean(0) - joint.mean(0)[0]).clamp(-LARGEST, LARGEST)
        rows = {"pi": pi, "odds": odds, "mu": own_mean, "var": own_var, "n": n}
        modes = F.one_hot(joint.argmax(1), branches).double().sum(0) / len(shard)
        answer = answer_branch(fitted, k, branches, shard, weighting, lam)
        return replace(answer, total=answer.total | parts | {"modes": Weighted(modes, len(shard))}, rows=rows)

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        # Lines 10 and 11: the network.
        got, rows = mean(reply.total), reply.rows
        state, _ = step_branches(state, reply, server=server, lam=lam)
        # Lines 12 and 13: the mode of each participant (m,) by the prior, and the mixture (Eq. 10 and A.4).
        prior_memo = prior.see(state.prior, moment, got, rng, len(reply.clients))
        q = prior.shares(moment, branches, prior_memo)
        choices = rows["pi"].argmax(1)
        member = choices if q is None else assign(rows["pi"], rows["odds"], capacities(q, len(choices)))
        mass = torch.zeros(branches, dtype=torch.float64).index_add_(0, member, rows["n"])
        n = rows["n"] * members_of(member, branches, choices if consistent_only else None)
        a = first_whole(update(q if prior.timed else None, mass), n.sum(1) > 0, state.started)
        estimates = pool_moments(n, rows["mu"], rows["var"])
        mu, var = (old + a[:, None] * (new - old) for old, new in zip((state.mu, state.var), estimates, strict=True))
        pi = beta * state.pi + (1 - beta) * mass / mass.sum() if mass.any() else state.pi
        facts = {"loss": got["loss"], "pi": pi, "assigned": torch.bincount(member, minlength=branches)}
        facts |= prior.facts(prior_memo) | ({} if q is None else {"prior": q})
        started = state.started | (a > 0)
        return replace(state, mu=mu, var=var, pi=pi / pi.sum(), prior=prior_memo, started=started), facts

    def as_served(payload: Sent, memory: Any, answer: Answer) -> tuple[Sent, None]:
        return replace(payload, mixture=(*payload.mixture[:2], uniform)), None

    def choose(payload: Sent, logits: Tensor, z: Tensor, x: Tensor, owner: Tensor) -> Tensor:
        gamma, _ = posteriors(z, *payload.mixture)
        return mean_by_owner(gamma, owner)[owner].argmax(1)

    round, serve = play_rounds(
        cohort, step, lambda state: broadcast(state, uniform), lambda state: broadcast(state, state.pi), REVEALS
    )
    predict = predict_by_branch(task, choose)
    algorithm = Algorithm("fedtem", init, {"train": train}, round, serve, predict, None, as_served)
    forward = {"train": 2 if prior.sketch is None else 5}  # features twice; a sketch costs 3 passes
    traits: Any = {"reveals": REVEALS, "sends": (Sent,), "models": "branches"}
    return with_cohort(algorithm, cohort, task, local, forward=forward, **traits)


def choose_branch(selection: Selection, z: Tensor, mu: Tensor, var: Tensor, pi: Tensor, rng: Rng) -> int:
    """Choose the branch of a client (Eq. 5); "bayes" is from appendix A.1.

    Args:
        selection: kind of choice.
        z: (rows, d) features of the client's samples.
        mu: (K, d) means.
        var: (K, d) variances.
        pi: (K,) shares.
        rng: the client's key.
    """
    if selection == "bayes":
        return int((clip_shares(pi).log() + log_densities(z, mu, var).sum(0)).argmax())
    posterior = posteriors(z, mu, var, pi)[0].mean(0)
    if selection == "sample":
        return int(rng.at("branch").numpy().choice(len(pi), p=(posterior / posterior.sum()).numpy()))
    return int(posterior.argmax())


def mean_and_variance(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of features (rows, d), each (d,) float64; variance 0 for one row, NaN for none.

    >>> mean_and_variance(torch.tensor([[1.0], [3.0]]))
    (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    z = z.double()
    mean = z.mean(0)
    return mean, (z - mean).square_().mean(0)


def pool_moments(n: Tensor, mu: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return means of clients' means and variances, by rows (Eq. 10), for each of K groups of clients (K, d).

    Args:
        n: (K, clients) number of rows of each group that each client has.
        mu: (clients, d) the mean of each client's rows.
        var: (clients, d) their variance.

    >>> n, mu, var = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0], [4.0]]), torch.tensor([[1.0], [1.0]])
    >>> pool_moments(n, mu, var)
    (tensor([[3.]]), tensor([[1.]]))
    """
    share = n / n.sum(1).clamp(min=1.0)[:, None]
    return share @ mu, share @ var


def members_of(member: Tensor, groups: int, preferred: Tensor | None = None) -> Tensor:
    """Return the mask (K, m) of each component's members; only of those that agree, where there are any.

    Args:
        member: (m,) assigned components.
        groups: K.
        preferred: (m,) components that participants prefer themselves; None asks for no agreement.

    >>> members_of(torch.tensor([0, 0, 1]), 2, torch.tensor([0, 1, 0])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    inside = F.one_hot(member, groups).T.double()
    if preferred is None:
        return inside
    agreeing = inside * F.one_hot(preferred, groups).T
    return torch.where(agreeing.any(1, keepdim=True), agreeing, inside)


ENTRY = Entry(
    "fedtem", fedtem, "weights and mixture down, update up", "branches", REVEALS, helps=("hours",),
    safe=Safe(options={"update": Certainty(), "consistent_only": True}, transforms=(Anchored(),)),
)  # fmt: skip
