"""EM over components: K models of which each client is a mixture, as in FedEM and FedRC."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedtide.clusters.rounds import init_models, refuse_equal_start
from fedtide.cohorts import with_cohort
from fedtide.cohorts.selection import Picking
from fedtide.core.base import Algorithm, Answer, Facts, Memory, Moment, Notes, Prediction, Shard, Weighted, Weights
from fedtide.core.rng import Rng
from fedtide.learn import LocalTrainer, Server, Steps, Train, Weighting, client_weight, step_server
from fedtide.learn.losses import LEAST, Blended, mixture_notes, refuse_mean_loss
from fedtide.learn.task import Task, join_models, refuse_without_likelihood, with_branches
from fedtide.mixtures.branches import BranchLosses, blend_branches, losses_of, shares_of
from fedtide.models.branched import WHOLE


def e_step(losses: Tensor, pi: Tensor, penalty: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Return log pi_k p_k(row) (rows, K) and posteriors (rows, K), from losses (K, rows) and shares (K,).

    A penalty (rows, K) lowers the posteriors alone.

    >>> _, q = e_step(torch.tensor([[0.0], [1.0986123]]), torch.tensor([0.5, 0.5]))
    >>> [round(value, 6) for value in q[0].tolist()]
    [0.75, 0.25]
    """
    joints = pi.clamp(min=LEAST).log() - losses.double().T
    return joints, (joints - penalty).softmax(1)


@dataclass(frozen=True)
class Components:
    """K models in one network with a repeated layer, and what clients do with them.

    A client keeps its mixture "pi" (K,), and begins with equal shares.

    Args:
        name: of the method, as papers spell it.
        plain: task of one model.
        local: local training.
        count: number of components, K.
        layer: the layer to repeat; "*" repeats the whole network.
        e_steps: E-steps of a client before evaluation.
        weighting: weight of a client.

    Raises:
        FedtideError: the loss has only a mean, is no likelihood, or all components would begin equal.
    """

    name: str
    plain: Task
    local: LocalTrainer
    count: int
    layer: str
    e_steps: int
    weighting: Weighting

    def __post_init__(self) -> None:
        refuse_mean_loss(self.plain.loss, f"{self.name} weights samples")
        refuse_without_likelihood(self.plain, "algorithm", self.name.lower())
        refuse_equal_start(self.plain, self.count)

    @cached_property
    def task(self) -> Task:
        """The task on the network with the repeated layer."""
        return with_branches(self.plain, self.layer, self.count, key="component_layer")

    @property
    def even(self) -> Tensor:
        """Equal shares (K,)."""
        return torch.full((self.count,), 1 / self.count, dtype=torch.float64)

    def init(self, rng: Rng) -> Weights:
        """Return the initial network: copies of a layer, or K models that are drawn one by one."""
        if self.layer != WHOLE:
            return self.task.init(rng)
        return join_models(init_models(self.plain, rng, self.count), WHOLE)

    def posteriors(
        self, weights: Weights, memory: Any, shard: Shard, penalty: Tensor | float = 0.0
    ) -> Steps[tuple[Tensor, Tensor]]:
        """Return log pi_k p_k(row) and the posteriors (rows, K) of a client's samples, in steps; see `e_step`."""
        (pi,) = shares_of([memory], self.even)
        losses = yield BranchLosses(self.task, weights, shard)
        return e_step(losses, pi, penalty)

    def train(
        self, weights: Weights, joints: Tensor, q: Tensor, shard: Shard, moment: Moment, rng: Rng, **more: Weighted
    ) -> Steps[Answer | None]:
        """Train all components, each sample by its posteriors q (rows, K), in steps; None without a step.

        Args:
            weights: the network.
            joints: log pi_k p_k(row) (rows, K), for the record.
            q: posteriors, whose mean is the client's next mixture.
            shard: the client's samples.
            rng: the client's key.
            more: further sums.
        """
        fitted = yield Train(self.task, self.local, weights, shard, moment, rng, loss=Blended(q, self.plain.loss))
        if not fitted.steps:
            return None
        pi, weight = q.mean(0), client_weight(shard, self.weighting)
        total = {"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))}
        total |= {"pi": Weighted(pi, weight), **more} | mixture_notes(q, joints)
        notes = Notes(branch=pi.argmax(), component=q.argmax(1))
        return Answer(total, memory={"pi": pi}, notes=notes, update=fitted.delta)

    def adapt(self, weights: Weights, memory: Any, shard: Shard, penalty: Tensor | float = 0.0) -> Answer | None:
        """Fit the client's mixture to its samples, as all that it keeps; None without samples."""
        if not len(shard):
            return None
        losses = losses_of(self.task, weights, shard)
        (pi,) = shares_of([memory], self.even)
        for _ in range(self.e_steps):
            pi = e_step(losses, pi, penalty)[1].mean(0)
        return Answer({}, memory={"pi": pi})

    def step(self, state: Any, server: Server, got: Any) -> tuple[Any, Facts]:
        """Take the server's step along the mean update; facts are of the training and of the mixtures."""
        state, facts = step_server(state, server, got)
        return state, {**facts, **{name: got[name] for name in ("pi", "entropy", "log_likelihood")}}

    def build(self, algorithm: Algorithm[Any], cohort: Picking, **traits: Any) -> Algorithm[Any]:
        """Complete an algorithm whose participants train all components; K whole models cost K times as much as one."""
        models = self.count if self.layer == WHOLE else 1
        refuses = {"shared": "component_layer says in which layer components differ"}
        return with_cohort(
            algorithm, cohort, self.task, self.local, forward={"train": models, "weigh": 0, "loss": 2 * models},
            trained=lambda rows: models * self.local.samples(rows), models="mixture", refuses=refuses, remembers=True,
            **traits,
        )  # fmt: skip

    def predict(self, weights: Weights, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        """Predict samples by the mixtures of their clients."""
        return blend_branches(self.task, weights, x, shares_of(memories, self.even)[owner])
