"""FedBABU: FedAvg of the trunk under a head that stays random; each client then tunes the whole for itself.

Oh, Kim, Yun: *FedBABU: Toward Enhanced Representation for Federated Image Classification*, ICLR 2022, Algorithm 1. With
default options it follows Algorithm 1, and clients tune for five epochs before they are evaluated.

When to use it: clients differ in labels, have some samples, and can train before they predict.

Choices:
    - paper: the head is never trained in rounds, and is the same for all clients.
    - paper: before it is evaluated a client tunes all layers by `tuning`, on its training samples. `tuned` names other
      layers, such as "head".
    - ours: the model before the tuning is evaluated beside it, as "not tuned".
    - ours: the head is sent down with the model, and nothing of it up.
    - paper: clients are weighted by their samples. In the released code clients have equal weights; its rate falls
      tenfold at a half and three quarters of the rounds.
"""

from dataclasses import replace
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting, answer_update
from fedtide.learn.layers import ALL, HEAD, Layers, Part, check_trunk, match_layers, pick_layers
from fedtide.learn.schedules import Constant
from fedtide.personal import by_own_weights


def fedbabu(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    tuning: LocalTrainer | None = None,
    tuned: Layers = (ALL,),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """A trunk for all under a fixed head, tuned by each client before it is evaluated.

    Args:
        tuning: training before a client is evaluated; None is five epochs of `local`, without its schedule.
        tuned: layers that it trains: "all", "head", "trunk", or names.
    """
    if tuning is None:  # it is no round of the run, so its rate does not fall with them
        tuning = replace(local, epochs=5, local_steps=None, lr_schedule=Constant())
    check_trunk(task, "fedbabu")
    is_head, is_tuned = match_layers(task, (HEAD,), "head"), match_layers(task, tuned, "tuned")
    of_trunk, of_tuned = Part.of(task, is_head), Part.of(task, lambda name: not is_tuned(name))

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        after, fitted = yield from of_trunk.train(local, w, shard, moment, rng)
        if not fitted.steps:
            return None
        delta = pick_layers(sub(after, w), lambda name: not is_head(name))
        return answer_update(delta, fitted.loss, shard, weighting)

    @Stepwise
    def adapt(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        after, fitted = yield from of_tuned.train(tuning, w, shard, moment, rng)
        return Answer({}, memory={"own": after}) if fitted.steps else None

    refuses = {"at-home": "clients train and send the trunk alone"}
    plain = build_method("fedbabu", task, local, server, cohort, train, refuses=refuses)
    return replace(plain, adapt=adapt, predict=by_own_weights(task), others={"not tuned": plain})


ENTRY = Entry(
    "fedbabu", fedbabu, "weights down, the trunk's update up", "personal", helps=("labels",),
)  # fmt: skip
