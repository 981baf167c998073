"""FedTKM: k-means over modes (such as day and night) with a prior that knows the time, from sums only.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal?*, ICLR 2022, section 3.2, Algorithm 2, Eq. 11-13 and 27.
With default options it follows Algorithm 2, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | trunk and K branches |
| `c_k` | center of mode k in feature space |
| `alpha_k` | factor on the distance to center k; alpha_1 = 1 |
| `d_ik` | alpha_k times client i's mean distance to c_k |
| `r_ik` | 1 for the nearest mode of client i under the network it has just trained; the paper's q_i(t) is `r_i1` |
| `q(t)` | the assumed share of each mode |
| `qbar` | the share of participants nearest to each mode |

If too many participants are nearest to a mode, the distance to its center is stretched:
`log alpha_2 = (1 - rho) * log alpha_2 + eta(t) * (q_1(t) - qbar_1)`, with `eta(t) = 2 |1/2 - q_1(t)| * eta` (Eq. 27)
and rho = 0 in the paper.

Line numbers in the code are those of Algorithm 2.

When to use it: like FedTEM, if the server must not see single clients. All answers are sums, with a cohort that asks
for nothing (arrivals, uniform, everyone).

Choices:
    - paper: `distance = "mean"` is the mean of norms. In the released code ("vote") each sample votes for its center.
    - paper: a tie goes to the last branch, because branch 1 needs a strictly smaller distance (line 10).
    - paper: `update = "overwrite"` is Eq. 12. With "certainty", ours, a center moves while its mode has the majority.
    - ours: with `carry_centers` a center without participants moves by the mean move of the others, and all centers
      begin as N(0, 0.01^2). So no center is left behind while training moves the features.
    - paper: `alpha = "integral"` is Eq. 13. It adds up what the prior is wrong by, even if all are assigned rightly.
    - ours: "per-period" steps by eta / T. "leaky" forgets rho of log alpha in each round. All stay within [-5, 5].
    - released code: eta = .02 is of its command for Stack Overflow. Its default is .2. The paper prints none.
    - paper: `rescale` applies alpha at inference too (Eq. 11).
    - ours: for K > 2 each log alpha_k moves by `-eta/2 * (q_k - qbar_k)`, relative to the first.
    - ours: lam = .25 and eps = .5. Released commands have (.5, .1), (.1, .5) and (.25, 0), as the recipes do.
    - ours: with lam = 0 an untrained branch is not stepped.
    - released code: the server's Adam is that of Keras. lr = 0.01 and eps = 1e-4 are ours.
    - released code: centers begin as N(0, 0.1^2). Ours: a mode without participants keeps its center
      (but for `carry_centers`).
    - ours: at test time all samples of a client choose together; the paper takes batches.
    - ours: `prior = "learned"` finds the rhythm in sums (docs/learned-rhythm.md).

The safe form has leaky factors, which apply in training alone, carries centers, and has an anchor
(docs/never-worse.md).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Slotted, Weighted, Weights, mean
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.fields.types import Flag, Fraction, NonNegative, Positive
from fedtide.learn import KERAS, Server, Task, Weighting
from fedtide.learn.local import LocalTrainer, clip
from fedtide.learn.steps import Features, Steps, Stepwise, Train
from fedtide.learn.task import width, with_branches
from fedtide.mixtures.branches import BranchLoss, answer_branch, mean_by_owner, predict_by_branch, step_branches
from fedtide.mixtures.priors import Linear, Prior, sketching
from fedtide.mixtures.step_size import Alpha, Integral, Leaky, Overwrite, PerPeriod, Update, carry_along, first_whole
from fedtide.models.branched import BranchCount, Feature
from fedtide.transforms import Anchored

CLOSE = 0.01
"""Standard deviation of centers at the beginning if they are carried: so close that none is far from every client."""


@dataclass(frozen=True)
class Sent:
    """Payload of clients: the network, and centers and log alpha of the modes."""

    weights: Weights
    centers: Tensor
    log_alpha: Tensor


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, centers (K, d) and log alpha (K,) in float64.

    prior: the memo of the prior. started: (K,) mask of centers that were ever moved.
    """

    weights: Weights
    server: Any
    centers: Tensor
    log_alpha: Tensor
    prior: Any
    started: Tensor
    cohort: Any = None


def fedtkm(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Prior = Linear(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    feature: Feature = "shared",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    server: Server = KERAS,
    distance: Literal["mean", "vote"] = "mean",
    alpha: Alpha = Integral(),
    update: Update = Overwrite(),
    carry_centers: Flag = False,
    max_update_norm: Positive | None = None,
    rescale: Flag = True,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated k-means with a temporal prior.

    Sends the network, the centers and their factors down; the update, feature means and counts up, as sums.

    Args:
        task: model and loss; `example` set.
        prior: the assumed share of each mode, over time.
        branch_layer: the layer to repeat; in a language model the paper repeats the projection.
        feature: features of the modes: "shared", the inputs of that layer (the paper's words), or "branches", the
            outputs of all copies, side by side (the released code, for language).
        lam: weight of the branches that a client does not train.
        eps: label smoothing of these branches.
        distance: distance of a client to a center: "mean" over its samples, or a "vote" of its samples.
        alpha: how the factors alpha follow the prior.
        update: step sizes of the centers.
        carry_centers: whether a center without participants moves by the mean move of others; all begin closer, too.
        max_update_norm: largest norm of a client's update; None means no clipping.
        rescale: apply alpha at inference too, as the paper does.
    """
    prior.check(branches)
    if isinstance(alpha, PerPeriod) and not isinstance(getattr(prior, "period", None), int | float):
        raise refused("alpha", alpha.kind, f"'leaky' or 'integral': prior = '{prior.kind}' has no period in rounds")
    sketch = sketching(prior, task)
    task = with_branches(task, branch_layer, branches, feature, vectors=True)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        spread = CLOSE if carry_centers else 0.1
        centers = torch.from_numpy(rng.at("centres").numpy().normal(0.0, spread, (branches, width(task, weights))))
        zero, memo, joined = torch.zeros(branches, dtype=torch.float64), prior.init(branches), cohort.init(fleet)
        modes = {"centers": centers, "log_alpha": zero, "started": zero > 0}
        return State(weights=weights, server=server.init(weights), **modes, prior=memo, cohort=joined)

    def broadcast(state: State) -> Sent:
        return Sent(state.weights, state.centers, state.log_alpha)

    def distances(z: Tensor, payload: Sent) -> Tensor:
        """Return alpha_k times the distance of rows to centers (rows, K), Eq. 11; votes are -1 (nearest) or 0."""
        far = torch.cdist(z.double(), payload.centers) * payload.log_alpha.exp()
        return far if distance == "mean" else -F.one_hot(nearest(far), branches).double()

    @Stepwise
    def train(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        weights = payload.weights
        if not len(shard):
            return None
        # Lines 7 and 8: the branch, by the received network (Eq. 11).
        received = yield Features(task, weights, shard.x)
        k = nearest(distances(received, payload).mean(0))
        parts = sketch(shard)
        # Line 9: local training with the branch fixed (Eq. 4).
        objective = BranchLoss(task.loss, int(k), lam, eps)
        fitted = yield Train(task, local, weights, shard, moment, rng, loss=objective, features=True)
        if not fitted.steps:
            return None
        # Lines 10 and 11: q_i(t), which is r_i1, and the mean feature, by the updated network.
        z = fitted.features.double()
        mode = int(nearest(distances(z, payload).mean(0)))
        answer = answer_branch(fitted, k, branches, shard, weighting, lam)
        if max_update_norm is not None:
            answer = replace(answer, update=detached(answer.update))  # what it trained, before it is clipped in place
            clip(list(answer.total["delta"].value.params.values()), max_update_norm)
        modes = {
            "modes": Weighted(F.one_hot(torch.tensor(mode), branches).double(), 1.0),
            "features": Slotted({mode: Weighted(z.mean(0), len(shard))}, branches),
        }
        return replace(answer, total=answer.total | parts | modes)

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        # Line 12: the sums.
        got = mean(reply.total)
        qbar, summed = got["modes"], reply.total["features"]
        mass = torch.tensor([0.0 if mode is None else mode.weight for mode in summed], dtype=torch.float64)
        prior_memo = prior.see(state.prior, moment, got, rng, int(reply.total["modes"].weight))
        q = prior.shares(moment, branches, prior_memo)
        # Line 13: alpha (Eq. 13), with the step of Eq. 27.
        log_alpha = state.log_alpha
        if q is not None:
            log_alpha = alpha(log_alpha, q, qbar, getattr(prior, "period", None))
        # Line 14: the centers (Eq. 12).
        modes = zip(state.centers, got["features"], strict=True)
        estimates = torch.stack([old if new is None else new for old, new in modes])
        a = first_whole(update(q if prior.timed else None, mass), mass > 0, state.started)
        moves, started = a[:, None] * (estimates - state.centers), state.started | (a > 0)
        centers = state.centers + (carry_along(moves, mass) if carry_centers else moves)
        # Line 15: the network.
        state, _ = step_branches(state, reply, server=server, lam=lam)
        facts = {"loss": got["loss"], "nearest": qbar, "alpha": log_alpha.exp()}
        facts |= prior.facts(prior_memo) | ({} if q is None else {"prior": q})
        return replace(state, centers=centers, log_alpha=log_alpha, prior=prior_memo, started=started), facts

    def at_inference(payload: Sent) -> Sent:
        return payload if rescale else replace(payload, log_alpha=torch.zeros_like(payload.log_alpha))

    def choose(payload: Sent, logits: Tensor, z: Tensor, x: Tensor, owner: Tensor) -> Tensor:
        return nearest(mean_by_owner(distances(z, payload), owner))[owner]

    def as_served(payload: Sent, memory: Any, answer: Answer) -> tuple[Sent, None]:
        return at_inference(payload), None

    round, serve = play_rounds(cohort, step, lambda state: at_inference(broadcast(state)), broadcast)
    predict = predict_by_branch(task, choose)
    algorithm = Algorithm("fedtkm", init, {"train": train}, round, serve, predict, None, as_served)
    forward = {"train": 2 if prior.sketch is None else 5}  # features twice; a sketch costs 3 passes
    return with_cohort(algorithm, cohort, task, local, forward=forward, sends=(Sent,), models="branches")


def nearest(far: Tensor) -> Tensor:
    """Return the position of the smallest value along the last dimension; ties: the last."""
    return far.shape[-1] - 1 - far.flip(-1).argmin(-1)


ENTRY = Entry(
    "fedtkm", fedtkm, "weights and centers down, update, feature means and counts up", "branches", helps=("hours",),
    safe=Safe(options={"alpha": Leaky(), "carry_centers": True, "rescale": False}, transforms=(Anchored(),)),
)  # fmt: skip
