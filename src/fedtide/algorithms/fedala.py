"""FedALA: each client starts a round from its own last layers and the received ones, mixed element by element.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: *FedALA: Adaptive Local Aggregation for Personalized Federated Learning*, AAAI
2023, Algorithm 1. With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w`, `v` | the global weights; client i's after its last local training, which it keeps in the last p layers |
| `W` | weights of the mix, one for each parameter of the last p layers, which client i keeps |
| `p`, `s` | number of layers with a mix, here `layers`; share of the samples that `W` is learned on, here `share` |

    v^ <- v + (w - v) * W in the last p layers, w in the others
    W  <- W - eta * grad f_i(v^) * (w - v), clipped to [0, 1]             for each batch of a share s of the samples
    v  <- local training from v^                                          sent, and averaged as in FedAvg

When to use it: clients differ and take part often. It sends what FedAvg sends, and takes from the global model what
lowers the loss of the client.

Choices:
    - paper: a client is evaluated with `v^`, the mix of the global model as it is now with its own layers. Before that
      it learns `W` as before training, and forgets it. With `layers = 0` it is FedAvg.
    - paper: `W` starts at 1. The first time it is learned until the last ten losses deviate by less than 0.1, later in
      one pass a round. A loss is the mean of a pass (ours); the released code takes its last batch. There are at most
      100 passes (ours).
    - ours: a client that has never trained, also one that joins late, starts from `w`, and is evaluated with it.
    - paper: `eta = 1` and `share = 0.8`. The share is drawn at random; the released code takes consecutive samples.
    - ours: `layers` counts layers, 1 by default; the released code counts tensors, 2 by default: weight and bias.
    - ours: running statistics are those of `w`, and learning `W` does not move them.
    - ours: FedProx's pull (`local.proximal`) is to `v^`, from which a client trains.
    - ours: the clock of devices counts one pass over the share in each round, also where `W` takes more or none.
    - paper: clients are weighted by their samples.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng, draw_some
from fedtide.core.weights import sub
from fedtide.fields.types import ForWeights, Positive, PositiveFraction, Whole
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, answer_update
from fedtide.learn.by_batch import ModelByBatch, mean_loss
from fedtide.learn.device import to_cpu
from fedtide.learn.layers import last_layers
from fedtide.personal import OWN_MODELS, by_own_weights

LOSSES, DEVIATION, PASSES = 10, 0.1, 100
"""Losses that are compared, their deviation at which learning ends, and passes at most."""


def fedala(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    layers: Whole = 1,
    share: PositiveFraction = 0.8,
    eta: Annotated[Positive, ForWeights] = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg whose clients mix the received last layers with their own before training and evaluation.

    Sends the weights down and the update up, as a weighted sum; clients keep their last layers, and weights of the mix.

    Args:
        layers: number of layers with a mix, from the last one on.
        share: share of the samples on which the mix is learned.
        eta: learning rate of the mix.

    Raises:
        FedtideError: the model has fewer layers.
    """
    names = last_layers(task, layers, "layers")
    one_pass = replace(local, epochs=1, local_steps=None, augment=(), terms=())

    def learn(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Any]:
        """Return the memory with weights of the mix after one pass, or at first after several."""
        if memory is None or not names or not len(shard):
            return memory
        rows = shard.pick(draw_some(torch.arange(len(shard)), max(int(share * len(shard)), 1), rng.at("rows")))
        model, first = ModelByBatch(task, one_pass, w, moment), memory["mix"] is None
        old = [task.to_device(memory["own"][name]) for name in names]
        gap = torch._foreach_sub([model.weights.params[name] for name in names], old)
        mix = [torch.ones_like(d) for d in gap] if first else [task.to_device(memory["mix"][k]) for k in names]
        losses = list[float]()
        for number in range(PASSES if first else 1):
            seen = []
            for batch in one_pass.batches(task, task.loss, rows, replace(moment, part=None), rng.at(number)):
                at = {**model.weights.params, **dict(zip(names, torch._foreach_addcmul(old, gap, mix), strict=True))}
                value, gradient = yield model.ask(batch, list(at.values()), names)
                mix = [(m - eta * g * d).clamp(0, 1) for m, g, d in zip(mix, gradient, gap, strict=True)]
                seen.append((value, batch.labels))
            losses.append(mean_loss(seen))
            if len(losses) > LOSSES and torch.tensor(losses[-LOSSES:]).std(correction=0) < DEVIATION:
                break
        return {**memory, "mix": dict(zip(names, map(to_cpu, mix), strict=True))}

    @Stepwise
    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        memory = yield from learn(w, memory, shard, moment, rng.at("mix"))
        fitted = yield Train(task, local, start_of(w, memory), shard, moment, rng)
        if not fitted.steps:
            return None
        last = {k: fitted.weights.params[k].clone() for k in names}
        next_memory = {"own": last, "mix": None if memory is None else memory["mix"]}
        return answer_update(sub(fitted.weights, w), fitted.loss, shard, weighting, next_memory)

    @Stepwise
    def adapt(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        return Answer({}, memory=(yield from learn(w, memory, shard, moment, rng.at("mix"))))

    traits: dict[str, Any] = {"keeps": 2, "refuses": OWN_MODELS}
    traits["trained"] = lambda rows: local.samples(rows) + share * rows * bool(names)
    plain = build_method("fedala", task, local, server, cohort, train, **traits)
    return replace(plain, adapt=adapt, predict=by_own_weights(task, start_of))


def start_of(w: Weights, memory: Any) -> Weights:
    """Return the mix from which a client trains and by which it judges.

    >>> mixed = {"own": {"b": torch.tensor([3.0])}, "mix": {"b": torch.tensor([0.25])}}
    >>> start_of(Weights({"a": torch.tensor([1.0]), "b": torch.tensor([7.0])}), mixed).params
    {'a': tensor([1.]), 'b': tensor([4.])}
    """
    if memory is None or memory["mix"] is None:
        return w
    last = {k: torch.addcmul(v, w.params[k] - v, memory["mix"][k]) for k, v in memory["own"].items()}
    return Weights({**w.params, **last}, w.buffers)


ENTRY = Entry(
    "fedala", fedala, "weights down, update up", "personal", helps=("labels", "groups", "meaning"),
    keeps="its last layers, and weights of their mix",
    exempt={"update": "measured forgetting includes the mix of the received last layers with its own"},
)  # fmt: skip
