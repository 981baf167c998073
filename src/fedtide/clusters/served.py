"""Models that a client is served, its choice of one, and what it predicts by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Cohort, with_cohort
from fedtide.core.base import Algorithm, Answer, Moment, Notes, Prediction, Shard, Slotted, Weighted, Weights, Work
from fedtide.core.rng import Rng
from fedtide.learn import LocalTrainer, Task, Training, Weighting, client_weight, mean_losses
from fedtide.learn.target import CLASSES


@dataclass(frozen=True)
class Served:
    """Models that a client is served, of which it takes one.

    numbers: server numbers of the models; None for their places. usual: place of the model for a client that finds
    none. count: number of all models of the method; None if these are all. places: payload to find a model by, if the
    method has a way of its own.
    """

    models: Sequence[Weights]
    numbers: Tensor | None = None
    usual: int | Tensor | None = None
    count: int | None = None
    places: Any = None


def decision_rows(shard: Shard) -> Shard:
    """Return the samples for decisions: validation samples if there are any, else training samples."""
    return shard.val if shard.val is not None and len(shard.val) else shard


def serve_clusters(
    models: Sequence[Weights], model: Tensor, clients: Tensor, among: Tensor | None = None, places: Any = None
) -> tuple[list[Served], Tensor]:
    """Build the `serve` of methods whose server knows each client's model: slot k has model k, the last slot all.

    Args:
        models: K models.
        model: (registered,) the model of each client; -1 if unknown.
        clients: the clients to serve. Clients without a known model, such as held-out ones, get the last slot. They
            find a model by `find_model`, or by the method's own way.
        among: (n,) the models that they may find; None means all. A client that finds none gets the model
            that most clients are known to have, the "usual" one.
        places: what clients of the last slot find their model by; None for `find_model`.

    >>> models = [Weights({"w": torch.tensor(k)}) for k in (0.0, 1.0)]
    >>> served, slot = serve_clusters(models, torch.tensor([1, -1, -1]), torch.tensor([0, 1, 9]))
    >>> slot.tolist(), served[2].usual
    ([1, 2, 2], 1)
    """
    served = [Served((weights,), torch.tensor([k]), usual=0) for k, weights in enumerate(models)]
    among = torch.arange(len(models)) if among is None else among
    usual = int(torch.bincount(model[model >= 0], minlength=len(models))[among].argmax())
    registered = clients < len(model)
    slot = torch.full_like(clients, -1)
    slot[registered] = model[clients[registered]]
    everything = Served(tuple(models[k] for k in among.tolist()), among, usual, places=places)
    return [*served, everything], torch.where(slot < 0, len(models), slot)


def as_served_in_cluster(payload: Weights, memory: Any, answer: Answer) -> tuple[Served, None]:
    """Return the payload that would be served to a client asked in the slot of its cluster; see `Algorithm`."""
    return Served((payload,), usual=0), None


def find_model(task: Task) -> Work:
    """Build the `adapt` of methods whose clients take the model with the lowest loss on their validation samples.

    A client without validation samples judges on its training samples. The memory gets the place of the one "found".
    """

    def adapt(payload: Served, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = decision_rows(shard)
        if len(payload.models) == 1 or not len(rows):
            return None
        return Answer({}, memory={"found": mean_losses(task, payload.models, rows).argmin()})

    return adapt


def predict_by_cluster(task: Task) -> Any:
    """Build the `predict` for `find_model`: by the model that a client has "found", else by the usual one."""

    def predict(payload: Any, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        places = [payload.usual if memory is None else memory.get("found", payload.usual) for memory in memories]
        model = torch.tensor([int(k) for k in places])[owner]
        log_probs: Tensor | None = None
        for k in model.unique().tolist():
            rows = model == k
            part = task.predict_rows(payload.models[k], x[rows])
            log_probs = part.new_empty(len(x), *part.shape[1:]) if log_probs is None else log_probs
            log_probs[rows] = part
        assert log_probs is not None
        return Prediction(log_probs, model if payload.numbers is None else payload.numbers[model])

    return predict


def build_clustered(
    name: str,
    task: Task,
    local: LocalTrainer,
    cohort: Cohort,
    init: Any,
    round: Any,
    serve: Any,
    works: Mapping[str, Work],
    adapt: Work | None = None,
    check: Any = None,
    sends: tuple[type, ...] = (),
    **options: Any,
) -> Algorithm[Any]:
    """Build a method whose server knows the model of each client, or lets it `adapt`; options are of `with_cohort`."""
    predict, sends = predict_by_cluster(task), (Served, *sends)
    algorithm = Algorithm(name, init, works, round, serve, predict, adapt, as_served_in_cluster, check)
    return with_cohort(algorithm, cohort, task, local, adapt=False, sends=sends, models="clusters", **options)


def reveal_update(training: Training, show: Callable[[Weighted], dict[str, Tensor]], repeated: str) -> Work:
    """Build local training whose update the server sums, and of which it sees something by itself.

    Args:
        training: local training.
        show: weighted update -> values revealed per client.
        repeated: the one of these values that repeats a part of the update.
    """

    def train(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        answer = training(payload, memory, shard, moment, rng)
        return None if answer is None else replace(answer, rows=show(answer.total["delta"]), repeated=(repeated,))

    return train


def answer_model(
    j: int, delta: Weights, loss: float, shard: Shard, models: int, weighting: Weighting, **more: Weighted
) -> Answer:
    """Build the answer of a client that has trained one of several models: its update, its loss and its choice."""
    chosen = F.one_hot(torch.tensor(j), models).double()
    total = {
        "delta": Slotted({j: Weighted(delta, client_weight(shard, weighting))}, models),
        "loss": Weighted(loss, len(shard)),
        "members": Weighted(chosen, 1.0),
    }
    return Answer(total | more, notes=Notes(branch=torch.tensor(j)), update={j: delta})


def accuracy_question(task: Task) -> Work:
    """Build the question "val": accuracy of a client's model on its validation samples."""

    def val(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = shard.val if len(shard) else None
        if rows is None or not len(rows.labels):
            return None
        right = 1 - errors_of(task, payload, rows)
        return Answer({"right": Weighted(float(right.mean()), right.numel())})

    return val


def errors_of(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Return 1 for each label that counts and that a model does not predict, else 0 (labels,), float64.

    Of other targets return the plain losses of the rows, which of numbers is about 1 for a model that says the mean.
    """
    if task.target != CLASSES:
        return task.losses(weights, shard).double()
    wrong = (task.logits(weights, task.inputs(shard.x)).argmax(-1) != shard.y).double()
    return wrong if shard.mask is None else wrong[shard.mask]
