"""Frozen sketches of clients in sums: what a learned prior reads, and no training moves."""

from __future__ import annotations

from collections.abc import Callable

from fedtide.clusters.representation import Gradient
from fedtide.core.base import Shard, Weighted
from fedtide.learn.steps import Steps
from fedtide.learn.task import Task
from fedtide.mixtures.priors import Prior


def sketching(prior: Prior, task: Task) -> Callable[[Shard], Steps[dict[str, Weighted]]]:
    """Return what clients add to their sums for a prior: the leaf "sketch", or nothing for all priors but "learned".

    A sketch is the direction of the gradient of the last layer of a network that is never trained, in a few random
    sums: of length 1 whatever the samples, so that 1 is its bound under privacy. Labels and what they are put on are
    both in it, and each client counts the same.

    Args:
        prior: the prior.
        task: the task of a single model.
    """
    if prior.sketch is None:
        return _nothing
    represent = Gradient(last_layer=True, sketch=prior.sketch).steps(task, "prior")

    def sketch(shard: Shard) -> Steps[dict[str, Weighted]]:
        return {"sketch": Weighted((yield from represent(None, shard)), 1.0)}

    return sketch


def _nothing(shard: Shard) -> Steps[dict[str, Weighted]]:
    yield from ()
    return {}
