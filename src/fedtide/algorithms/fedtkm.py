"""FedTKM: k-means over day and night with a prior that knows the hour, from sums only.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal?*, ICLR 2022, section 3.2, Algorithm 2, Eq. 11-13 and 27.

| symbol | meaning |
| --- | --- |
| `w` | trunk and K branches |
| `c_k` | center of mode k in feature space |
| `alpha_k` | factor on the distance to center k; alpha_1 = 1 |
| `d_ik` | alpha_k times client i's mean distance to c_k |
| `r_ik` | 1 for the mode that client i is nearest to under the network it has just trained |
| `q(t)` | the assumed share of each mode |
| `qbar` | the share of participants that were nearest to each mode |

Where more participants than the prior expects fall to a mode, the distance to its center is stretched:
`log alpha_2 += eta(t) * (q_1(t) - qbar_1)`, with `eta(t) = 2 |1/2 - q_1(t)| * eta_max` (Eq. 27).

When to use it: as FedTEM, where the server must not see single clients: everything sent is added up.

Choices:
    `distance = "mean"` is the paper's (mean of norms, not squared), "vote" the released code's: each row votes for its
    nearest center. A tie goes to the last branch, as branch 1 needs a strictly smaller distance in the code. `centers =
    "overwrite"` is Eq. 12; "certainty" moves a center only while the prior gives its mode the majority. log alpha stays
    within [-5, 5]. `rescale` applies alpha at inference too, as Eq. 11 has it; off is the default of the released code.
    For K > 2 each log alpha_k moves by `-eta/2 * (q_k - qbar_k)` and all are taken relative to the first, which for two
    is the formula above. With lam = 0 a branch that nobody trained is not stepped. With K = 1 it is FedAvg with the
    same server optimizer. Where the prior has the wrong exponent, alpha moves away from what would be right: then
    `eta = 0`, k-means without a prior, is better (recipe fedtem-zero-mid), and where it is right as good; the default
    stays the paper's, which needs alpha where modes overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Count, Flag, Fraction, NonNegative, Positive
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
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
from fedtide.parts.prior import Linear, Prior
from fedtide.parts.step_size import step_sizes, zero_mid
from fedtide.parts.weighting import Weighting, client_weight

LARGEST = 5.0
"""Bound on |log alpha|."""


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, centers (K, d) and log alpha (K,) in float64.

    share: q_1 of the round before, for the soft prior. started: (K,) whether a center was ever moved.
    """

    weights: Weights
    server: Any
    centers: Tensor
    log_alpha: Tensor
    share: float | None
    started: Tensor
    cohort: Any = None


def fedtkm(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Prior = Linear(),
    branches: Count = 2,
    layer: str = "head",
    feature: Feature = "shared",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    server: Server = KERAS,
    distance: Literal["mean", "vote"] = "mean",
    eta: NonNegative = 0.02,
    eta_schedule: Literal["zero-mid", "constant"] = "zero-mid",
    centers: Literal["overwrite", "certainty"] = "overwrite",
    a0: Fraction = 1.0,
    clip: Positive | None = None,
    rescale: Flag = False,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Federated k-means with a temporal prior.

    Sends the network, the centers and their factors down; the update, feature means and counts up, as sums.

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
        distance: of a client to a center: "mean" over its rows, or a "vote" of its rows.
        eta: eta_max, how fast alpha follows the prior.
        eta_schedule: "zero-mid" (Eq. 27) or "constant".
        centers: how they move.
        a0: step of "certainty", at most.
        clip: largest norm of a client's update; None does not clip.
        rescale: apply alpha at inference.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    prior.check(branches)
    task = with_branches(task, layer, branches, feature, vectors=True)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        start = torch.from_numpy(rng.at("centres").numpy().normal(0.0, 0.1, (branches, width(task, weights))))
        zero, started = torch.zeros(branches, dtype=torch.float64), torch.zeros(branches, dtype=torch.bool)
        return State(weights, server.init(weights), start, zero, None, started, cohort.init(fleet))

    def scaled(z: Tensor, payload: Payload) -> Tensor:
        """alpha_k times the distance of each row to each center (rows, K)."""
        return torch.cdist(z.double(), payload["centers"]) * payload["log_alpha"].exp()

    def nearest(far: Tensor) -> int:
        """The mode of a client whose rows are so far from each center (rows, K); a tie goes to the last."""
        if distance == "mean":
            return _last_least(far.mean(0))
        votes = torch.bincount(_last_least_rows(far), minlength=branches)
        return _last_least(-votes.double())

    def train(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        weights = payload["weights"]
        if not len(shard):
            return None
        # Step 2: the branch, by the received network.
        k = nearest(scaled(features(task, weights, shard.x), payload))
        # Step 3: local training with the branch fixed.
        fitted = local(task, BranchLoss(task.loss, k, lam, eps), weights, shard, moment, rng)
        if not fitted.steps:
            return None
        # Step 4: the mode and the mean feature, by the updated network.
        z = features(task, fitted.weights, shard.x).double()
        r = F.one_hot(torch.tensor(nearest(scaled(z, payload))), branches).double()
        delta = fitted.delta if clip is None else within_norm(fitted.delta, clip)
        # Step 5: sums.
        total = {
            "delta": Weighted(delta, client_weight(shard, weighting)),
            "loss": Weighted(fitted.loss, len(shard)),
            "branches": Weighted(F.one_hot(torch.tensor(k), branches).double(), 1.0),
            "modes": Weighted(r, 1.0),
            "features": Weighted(r[:, None] * z.mean(0), len(shard)),
            "rows": Weighted(r, len(shard)),
        }
        return Answer(total, notes=Notes(branch=torch.tensor(k)))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        payload = {"weights": state.weights, "centers": state.centers, "log_alpha": state.log_alpha}
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        reply = fleet.ask("train", clients, payload, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        active = with_gradient(got["branches"], lam)
        weights, memo = step(server, state.weights, state.server, got["delta"], active)
        qbar = got["modes"]
        q = prior.shares(fleet.moment, branches, float(qbar[0]), state.share)
        # Step 6: the centers, Eq. 12.
        mass = reply.total["rows"].value
        found = reply.total["features"].value / mass.clamp(min=1e-12)[:, None]
        hour = q if prior.timed else None
        a = step_sizes(hour, mass, a0) if centers == "certainty" else torch.ones_like(mass)
        moved = (mass > 0) & (a > 0)
        a = torch.where(state.started, a, 1.0) * moved
        new = state.centers + a[:, None] * (found - state.centers)
        # Step 7: alpha, Eq. 13, with the step of Eq. 27.
        log_alpha = state.log_alpha
        if q is not None and branches > 1:
            rate = zero_mid(q, eta) if eta_schedule == "zero-mid" else eta
            log_alpha = log_alpha - rate / 2 * (q - qbar)
            log_alpha = (log_alpha - log_alpha[0]).clamp(-LARGEST, LARGEST)
        share = None if q is None else float(q[0])
        facts: dict[str, Any] = {"loss": got["loss"], "nearest": qbar, "alpha": log_alpha.exp()}
        if q is not None:
            facts["prior"] = q
        return State(weights, memo, new, log_alpha, share, state.started | moved, state.cohort), facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, None]:
        log_alpha = state.log_alpha if rescale else torch.zeros_like(state.log_alpha)
        return {"weights": state.weights, "centers": state.centers, "log_alpha": log_alpha}, None

    def predict(payload: Payload, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, z = read(task, payload["weights"], x)
        far = scaled(z, payload)
        if distance == "vote":
            far = -F.one_hot(_last_least_rows(far), branches).double()
        return chosen(logits, _last_least_rows(mean_by_owner(far, owner))[owner])

    effort = costing(local, {"train": 2})  # features before training and after it
    made = Algorithm("fedtkm", init, {"train": train}, round, serve, predict, effort=effort)
    return with_cohort(made, cohort, task, local)


def within_norm(delta: Weights, largest: float) -> Weights:
    """An update scaled so that the norm over its parameters is at most `largest`.

    >>> within_norm(Weights({"w": torch.tensor([3.0, 4.0])}), 1.0).params["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    norm = torch.stack([change.double().norm() for change in delta.params.values()]).norm()
    factor = min(1.0, largest / max(float(norm), 1e-30))
    return Weights(map_leaves(lambda change: change * factor, delta.params), delta.buffers)


def _last_least(values: Tensor) -> int:
    return int(_last_least_rows(values[None])[0])


def _last_least_rows(values: Tensor) -> Tensor:
    """The position of the smallest value of each row (rows, K); the last of equals."""
    return values.shape[1] - 1 - values.flip(1).argmin(1)
