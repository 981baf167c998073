"""Local: each client trains a model of its own, alone. No federation, and the floor under every personalized method.

When to use it: as a baseline. A federation that is no better than this is not worth its messages.

Choices:
    - ours: a client trains from scratch with early stopping on its validation samples, once, and again whenever its
      samples have changed; nothing is sent either way. All reachable clients look for that in every round, so there is
      no cohort.
    - ours: a client that never takes part, such as a held-out one, trains on its labeled samples before evaluation. One
      without any is evaluated with an untrained model.
    - ours: validation samples by which training stopped cannot judge it. They judge the model at the end of the same
      training, after all epochs. The client keeps this model as well.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Traits, Weights, shared_weights
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, raw
from fedtide.fields.types import Spelled
from fedtide.learn import LocalTrainer, Task, training_cost
from fedtide.learn.device import to_cpu
from fedtide.models import Model
from fedtide.personal.client_networks import ALONE, Networks, train_alone
from fedtide.personal.ways import Alone, predict_personal


@dataclass(frozen=True)
class State:
    """The untrained weights."""

    weights: Weights


def local_only(
    task: Task, solver: LocalTrainer = ALONE, model: Annotated[Model, Spelled] | None = None
) -> Algorithm[State]:
    """Training of each client alone, without a federation.

    Sends nothing; clients keep their model, the one that validation samples judge, and checksums of the samples that
    they were trained on.

    Args:
        task: model and loss; `example` set if clients have another network.
        solver: training of a client's model; its epochs are an upper bound.
        model: network of the clients; None is that of the experiment.
    """
    way, nets = Alone(solver, model), Networks(task)
    way.check(nets, 0, "local")

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(task.init(rng))

    def fit(memory: Any, shard: Shard, moment: Moment, rng: Rng, both: bool) -> Answer | None:
        seen = checksum(shard)
        if not len(shard) or (memory is not None and torch.equal(memory["seen"], seen)):
            return None
        best, last = train_alone(nets.of(model), solver, shard, moment, rng, both)
        next_memory = {"own": best, "seen": seen}
        if both and all_finite(last):  # else that would cost the client its model
            next_memory["judged"] = {"own": last, "seen": checksum(replace(shard, fetch_val=None))}
        return Answer({}, memory=next_memory)

    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return fit(memory, shard, moment, rng, both=bool(shard.val) and not shard.apart)

    def adapt(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        judged = None if memory is None else memory.get("judged")
        if judged is not None and torch.equal(judged["seen"], checksum(shard)):
            return Answer({}, memory=judged)
        return fit(memory, shard, moment, rng, both=False)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        return state, {"trained": len(fleet.ask("train", fleet.reachable, {}).clients)}

    def predict(payload: Weights, memories: Any, x: Tensor, owner: Tensor) -> Any:
        return predict_personal(way, nets, (payload,), 0, memories, x, owner)

    traits = Traits(models="none", keeps=2, compute_cost=training_cost(solver, {}))
    return Algorithm("local", init, {"train": train}, round, shared_weights, predict, adapt, traits=traits)


def checksum(shard: Shard) -> Tensor:
    """Return a checksum (16,) of a client's training and validation samples."""
    digest = hashlib.blake2b(digest_size=16)
    for rows in (shard, shard.val):
        for part in () if rows is None else (to_cpu(rows.x), rows.y, rows.ids):
            digest.update(raw(part).numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


ENTRY = Entry(
    "local", local_only, "nothing", "baseline", tells="nothing",
    keeps="its model, the one that validation rows judge, and checksums of its rows",
    exempt={
        "degenerate": "a client whose rows break its training spoils its own model alone, and nothing is summed",
        "update": "it starts from nothing that others have trained, so it cannot forget what is theirs",
    },
)  # fmt: skip
