"""FedEM: every client's data are a mixture of K distributions; each sample trains K models, weighted by posteriors.

Marfoq, Neglia, Bellet, Kameni, Vidal: *Federated Multi-Task Learning under a Mixture of Distributions*, NeurIPS 2021,
Algorithm 1; with `component_layer = "head"` the models share a trunk, as compared in Zhu et al.: *Diurnal or
Nocturnal?*, ICLR 2022.

| symbol | meaning |
| --- | --- |
| `pi_i` | client i's mixture of the K components (K,), kept on the client |
| `q_k(s)` | posterior of component k for row s |

    q_k(s)  = softmax_k( log pi_ik - loss_k(s) )
    pi_ik   = mean_s q_k(s)
    minimize (1/B) sum_{s in batch} sum_k q_k(s) * loss_k(s)

When to use it: clients are mixtures rather than members of one group, and participate repeatedly.

Choices:
    The E-step runs once a round, in evaluation mode, on plain cross-entropy whatever the training loss; its posteriors
    stay with their samples through every shuffle. `loss_k` of the M-step is the training loss of a sample. The sum over
    a batch is divided by B and not by the sum of posteriors, as in the released code. The mean is over participants;
    `normalize_by = "everyone"` also counts clients that were not asked, as the code does, which damps every step. The K
    models are one network with a repeated layer, or repeated as a whole, so shared layers are run once. At inference a
    client's own mixture weights the models' probabilities. Before evaluation a client adapts its mixture by `e_steps`
    on its own training samples; one without samples keeps the uniform mixture. (The periodic-shift paper runs EM on
    labeled test data, which are not available in practice.) Shares are at least 1e-12.
    The `anchor` is ours, and `anchor = false` the paper: FedAvg's model, one more component for all clients, whose
    weight in the mixture clients' validation samples choose (`fedtide.multi.anchor`). The others neither see it nor
    train otherwise. In ten small settings over five seeds the paper's form lost up to 4.1 points to the best
    single model and gained up to 3.4, anchored it lost 0.3 at most and gained as much (recipe never-worse).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import ModelCount, StepCount
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
    Prediction,
    Shard,
    Weighted,
    Weights,
    to_everyone,
)
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import take_part, with_cohort
from fedtide.learn.server import SGD, Server, step_server
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.models.branched import WHOLE
from fedtide.multi.anchor import Anchor, Anchored, Anchoring
from fedtide.multi.branches import BranchLosses, blend_branches, losses_of, with_branches
from fedtide.multi.clusters import init_models, join_models, refuse_equal_start
from fedtide.multi.mixture_loss import LEAST, Blended, mixture_notes, needs_likelihood, weighs_rows
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The network, the server optimizer's memo, and the total weight of all clients if `normalize_by` needs it.

    anchor: the model of all samples, if any.
    """

    weights: Weights
    server: Any
    everyone: float = 0.0
    anchor: Anchor | None = None
    cohort: Any = None


def fedem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    components: ModelCount = 3,
    component_layer: str = WHOLE,
    e_steps: StepCount = 5,
    normalize_by: Literal["participants", "everyone"] = "participants",
    anchor: Anchored = True,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated EM.

    Sends the network down and its update up in a sum.

    Args:
        task: model and loss, which must be defined per label; components are weighted by plain cross-entropy.
        components: number of components, K.
        component_layer: the layer to repeat; "*" repeats the whole network, as in the paper.
        e_steps: E-steps of a client before evaluation.
        normalize_by: divisor of the sum of updates: weights of the participants that answered, or of all clients.

    Raises:
        FedtideError: the loss has only a mean.
    """
    weighs_rows(task.loss, "FedEM")
    needs_likelihood(task, "algorithm", "fedem")
    refuse_equal_start(task, components)
    beside = Anchoring(anchor, task, local, server, weighting)
    plain, task = task, with_branches(task, component_layer, components, key="component_layer")
    even = torch.full((components,), 1 / components, dtype=torch.float64)

    def init(fleet: Fleet, rng: Rng) -> State:
        whole = component_layer == WHOLE
        weights = join_models(init_models(plain, rng, components), WHOLE) if whole else task.init(rng)
        reply = fleet.ask("weigh", fleet.clients, {}) if normalize_by == "everyone" else None
        known = None if reply is None else reply.total
        everyone = 0.0 if known is None else known["rows"].weight
        return State(weights, server.init(weights), everyone, beside.start(rng), cohort.init(fleet))

    def broadcast(state: State) -> dict[str, Any]:
        return {"weights": state.weights, **beside.sent(state)}

    def weigh(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer:
        return Answer({"rows": Weighted(0.0, client_weight(shard, weighting))})

    def e_step(losses: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
        """Return log pi_k p_k(row) (rows, K) and posteriors (rows, K), from losses (K, rows)."""
        joints = pi.clamp(min=LEAST).log() - losses.double().T
        return joints, joints.softmax(1)

    @Stepwise
    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        weights, pi = payload["weights"], even if memory is None else memory["pi"]
        joints, q = e_step((yield BranchLosses(task, weights, shard)), pi)
        pi = q.mean(0)
        parts = yield from beside.train(by_mixture, payload, {"pi": pi}, shard, moment, rng)
        fitted = yield Train(task, local, weights, shard, moment, rng, loss=Blended(q, task.loss))
        if not fitted.steps:
            return None
        weight, notes = client_weight(shard, weighting), Notes(branch=pi.argmax(), component=q.argmax(1))
        total = {
            "delta": Weighted(fitted.delta, weight),
            "loss": Weighted(fitted.loss, len(shard)),
            "pi": Weighted(pi, weight),
        } | mixture_notes(q, joints)
        return Answer(total | parts, memory={"pi": pi}, notes=notes, update=total["delta"].value)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        state, reply = take_part(cohort, fleet, state, rng, serve, broadcast(state))
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        if normalize_by == "everyone":
            total = reply.total["delta"]
            got["delta"] = mean(replace(total, weight=max(state.everyone, total.weight)))
        moved, facts = step_server(state, server, got)
        facts = {**facts, **{name: got[name] for name in ("pi", "entropy", "log_likelihood")}}
        moved, weighed = beside.step(moved, reply.total)
        return moved, {**facts, **weighed}

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        losses = losses_of(task, payload["weights"], shard)
        pi = even if memory is None else memory["pi"]
        for _ in range(e_steps):
            pi = e_step(losses, pi)[1].mean(0)
        return Answer({}, memory={"pi": pi})

    def by_mixture(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        blends = torch.stack([even if memory is None else memory["pi"] for memory in memories])
        pi = blends[owner]
        told, _ = blend_branches(task, payload["weights"], x, pi)
        return Prediction(told, pi.argmax(1), pi)

    # K whole models cost K times as much as one; with a shared trunk the branches cost next to nothing.
    models = components if component_layer == WHOLE else 1
    works = {"train": train} | ({"weigh": weigh} if normalize_by == "everyone" else {})
    forward, serve = {"train": models, "weigh": 0, "loss": 2 * models}, to_everyone(broadcast)
    made = beside.added_to(Algorithm("fedem", init, works, round, serve, by_mixture, adapt))
    trained = beside.trained(lambda rows: models * local.samples(rows))
    return with_cohort(made, cohort, task, local, forward=forward, trained=trained)
