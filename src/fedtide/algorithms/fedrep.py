"""FedRep: a client first fits its head to the trunk that it received, and then the trunk to its head.

Collins, Hassani, Mokhtari, Shakkottai: *Exploiting Shared Representations for Personalized Federated Learning*, ICML
2021, Algorithm 1. With default options it follows the paper's experiments on CIFAR-10 with two classes a client: ten
epochs of the head, one of the trunk.

| symbol | meaning |
| --- | --- |
| `phi` | the representation: the trunk, which the server averages |
| `h_i` | head of client i, which stays with it |
| `tau_h`, `tau` | epochs of the head, and of the trunk |

    h_i   <- tau_h epochs of SGD on f_i(h_i, phi), with phi as it was received
    phi_i <- tau epochs of SGD on f_i(h_i, phi_i), with h_i fixed
    phi   <- phi + mean of (phi_i - phi)

When to use it: as FedPer, if clients have few samples or take part seldom: a head is fitted before the trunk moves.

Choices:
    - paper: the server averages trunks with equal weights. `weighting = "samples"` weights them by samples.
    - paper: ten epochs of the head and one of the trunk. In the released code other experiments take ten and five, and
      weight trunks by samples. In its last round a client trains its head alone, for ten epochs or more.
    - ours: all clients begin with the same head, drawn from a seed that the server sends.
    - paper: a client that never took part fits a head to its samples before it is evaluated.
    - ours: `home` names other layers that stay; those are fitted first.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.fields.types import Positive, Whole
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting, answer_update
from fedtide.learn.layers import HEAD, Layers, Part, match_layers
from fedtide.learn.schedules import Constant
from fedtide.transforms.at_home import with_home


def fedrep(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    head_epochs: Whole = 10,
    head_lr: Positive | None = None,
    home: Layers = (HEAD,),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """A trunk for all, and a head for each client, trained by turns.

    Args:
        local: training of the trunk.
        head_epochs: epochs of the head before that.
        head_lr: learning rate of the head; None is that of the trunk.
        home: layers that stay: "head" for the last layer, or names.
    """
    is_head = match_layers(task, home, "home", whole=False)
    of_head, of_trunk = Part.of(task, lambda name: not is_head(name)), Part.of(task, is_head)
    rate = local.lr if head_lr is None else head_lr
    heads = replace(local, lr=rate, epochs=max(head_epochs, 1), local_steps=None)

    def fit_head(heads: LocalTrainer, w: Weights, shard: Shard, moment: Moment, rng: Rng) -> Steps[Weights]:
        if not head_epochs:
            return w
        headed, _ = yield from of_head.train(heads, w, shard, moment, rng.at("head"))
        return headed

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        headed = yield from fit_head(heads, w, shard, moment, rng)
        after, fitted = yield from of_trunk.train(local, headed, shard, moment, rng)
        if not fitted.steps:
            return None
        return answer_update(sub(after, w), fitted.loss, shard, weighting)

    @Stepwise
    def adapt(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        fitted = yield from fit_head(replace(heads, lr_schedule=Constant()), w, shard, moment, rng)
        return Answer({}, update=sub(fitted, w))

    def trained(rows: Tensor) -> Tensor:
        return local.samples(rows) + (heads.samples(rows) if head_epochs else 0)

    plain = build_method("fedrep", task, local, server, cohort, train, trained=trained)
    return with_home(replace(plain, adapt=adapt), task, home, only_newcomers_adapt=True)


ENTRY = Entry(
    "fedrep", fedrep, "the trunk down, its update up", "personal", keeps="its head", helps=("meaning", "labels"),
)  # fmt: skip
