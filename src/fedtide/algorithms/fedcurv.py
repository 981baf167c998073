"""FedCurv: FedAvg whose clients keep away from changes that would hurt what the others learned, by Fisher information.

Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: *Overcoming Forgetting in Federated Learning on Non-IID
Data*, NeurIPS workshop on federated learning for data privacy and confidentiality 2019, section 3.

| symbol | meaning |
| --- | --- |
| `w_j`, `F_j` | client j's weights after its last training, and there the diagonal of its Fisher information |
| `lam` | strength of the pull |

    minimize  L_i(v) + lam * sum over j other than i of (v - w_j)^T F_j (v - w_j)

The server sends the sums of `F_j` and of `F_j w_j` over the last participants, from which a client takes its own.

When to use it: clients differ, and much local work makes them forget what others taught. It sends three times as much
as FedAvg both ways, and each client takes one more gradient for each of its samples. `local.lr * lam` times the sum of
Fisher information has to stay below 1.

Choices:
    - ours: the sums are over the participants of the last round that somebody answered. With everybody in each round
      they are the paper's.
    - ours: Fisher information is the mean square of the gradients of a client's samples. They are of the plain loss, in
      evaluation mode and without augmentation.
    - ours: `lam` is 1 and has to be tuned. With 0 it is FedAvg.
    - ours: clients are weighted by their samples in the mean of updates, and not in the sums, as in the paper.
    - ours: only trainable parameters are pulled; running statistics are averaged.
"""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import add, map_leaves, sub, zeros_like
from fedtide.fields.types import NonNegative
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, answer_update, step_server
from fedtide.learn.terms import Curvature


@dataclass(frozen=True)
class Sums:
    """Sums of `F_j`, "fisher", and of `F_j w_j`, "pulled", and the number of the round that they are of."""

    parts: dict[str, dict[str, Tensor]]
    number: int


@dataclass(frozen=True)
class Sent:
    """Payload of participants: the weights, and the sums of the last round."""

    weights: Weights
    sums: Sums


@dataclass(frozen=True)
class State:
    """The global weights, the memo of the server optimizer, the sums, and the memo of the cohort."""

    weights: Weights
    server: Any
    sums: Sums
    cohort: Any = None


def fedcurv(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lam: NonNegative = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """FedAvg with a pull towards the weights of the other clients, by their Fisher information.

    Sends the weights and two sums down, and the update and two values of its size up. A client keeps its part of the
    sums.

    Args:
        lam: strength of the pull.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        zero = zeros_like(weights.params)
        return State(weights, server.init(weights), Sums({"fisher": zero, "pulled": zero}, 0), cohort.init(fleet))

    @Stepwise
    def train(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        w, others, number = payload.weights, payload.sums.parts, payload.sums.number
        if memory is not None and memory["number"] == number:  # its own part is in the sums
            others = sub(others, memory["parts"])
        curvature = Curvature(scaled(others["fisher"], 2 * lam), scaled(others["pulled"], -2 * lam))
        fitted = yield Train(task, local, w, shard, moment, rng, curvature)
        if not fitted.steps:
            return None
        delta, after = fitted.delta, fitted.weights
        diagonal = task.fisher(after, shard)  # F_i
        parts = {"fisher": diagonal, "pulled": map_leaves(torch.mul, diagonal, after.params)}
        next_memory = {"parts": parts, "number": number + 1}
        sums = {name: Weighted(part) for name, part in parts.items()}
        return answer_update(delta, fitted.loss, shard, weighting, next_memory, **sums)

    def scaled(part: dict[str, Tensor], factor: float) -> list[Tensor]:
        return list(torch._foreach_mul(task.to_device(tuple(part[name] for name in task.scratch.names)), factor))

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        # Sums are in float64, and clients compute in the type of the weights.
        totals = {name: reply.total[name].value for name in state.sums.parts}
        parts = add(zeros_like(state.sums.parts), totals)
        state = replace(state, sums=Sums(parts, state.sums.number + 1))
        return step_server(state, server, mean(reply.total))

    send = attrgetter("weights"), lambda state: Sent(state.weights, state.sums)
    algorithm = Algorithm("fedcurv", init, {"train": train}, *play_rounds(cohort, step, *send), task.predict)
    traits: Any = {"sends": (Sent, Sums), "keeps": 2, "remembers": True}
    traits["unprivate"] = "clients take their own part from the sums, and clipping would change that part"
    traits["refuses"] = dict.fromkeys(("robust", "trusted"), "clients take their own part from plain sums")
    return with_cohort(algorithm, cohort, task, local, forward={"train": 3}, **traits)  # a gradient is three passes


ENTRY = Entry(
    "fedcurv", fedcurv, "weights and two sums of their size down, update and two values of its size up", "global",
    helps=("labels",), keeps="its Fisher information and the pull of it, each as large as the weights",
)  # fmt: skip
