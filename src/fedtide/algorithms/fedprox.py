"""FedProx: FedAvg with a pull of every client towards the model it received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: *Federated Optimization in Heterogeneous Networks*, MLSys 2020,
Algorithm 2. Client i minimizes `L_i(v) + (mu/2) * ||v - w||^2`, so every local gradient gains `mu * (v - w)`.

When to use it: clients differ, do many local steps, and drift apart. Keep `rate * mu` well below 2, where the pull
itself diverges.

Choices:
    Cohort drawn by the shift and weighted by rows, as in the released code (the paper draws clients in proportion to
    their rows and averages uniformly; `weighting = "uniform"` is the second half of that, and alone it minimizes the
    plain mean over clients). By default every client does all its local work. With `stragglers = 0.9` nine of ten do a
    random part of it, 1 to epochs - 1 epochs as in the released code (or 1 to steps - 1 steps), and what they did is
    kept and counts in full. Who is slow in a round is the same for every `mu`. To see what FedAvg loses that drops
    them, give it `shift.who.dropout_rate = 0.9`.
    Only trainable parameters are pulled. `mu = 0` without stragglers is FedAvg bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Fraction, NonNegative
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Algorithm, Answer, Memory, Moment, Shard, Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.learn.training import Training, varied
from fedtide.parts.weighting import Weighting


def fedprox(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    mu: NonNegative = 0.1,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
    stragglers: Fraction = 0.0,
) -> Algorithm:
    """FedAvg whose clients are pulled back to the model they received.

    Args:
        task: model and loss.
        local: local training.
        mu: strength of the pull.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
        stragglers: the share of clients that do only a random part of their local work in a round.

    Raises:
        FedtideError: there are stragglers, and local work of one epoch or one step, of which there is no part.
    """
    if stragglers and (local.local_steps or local.epochs) == 1:
        raise FedtideError(
            f"stragglers: found {stragglers}, allowed: 0, as the local work of one epoch or step has no part; or "
            "local.epochs of 2 or more"
        )
    made = varied(fedavg(task, local, server, cohort, weighting), "fedprox", term=Proximal(mu))
    if not stragglers:
        return made
    plain = made.works["train"]
    assert isinstance(plain, Training)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        slow = rng.at("straggler").numpy().random() < stragglers
        work = replace(plain, local=local.shortened(rng.at("work"))) if slow else plain
        return work(payload, memory, shard, moment, rng)

    return replace(made, works={**made.works, "train": train})
