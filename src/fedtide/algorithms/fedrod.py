"""FedRoD: one network for all with a balanced loss, and beside its head a second one that each client keeps.

Chen, Chao: *On Bridging Generic and Personalized Federated Learning for Image Classification*, ICLR 2022, with the
linear personalized head. With default options its loss is the paper's balanced softmax.

| symbol | meaning |
| --- | --- |
| `theta` | the trunk, with features z = f(x; theta) |
| `psi`, `phi_m` | generic head G of all clients, and personalized head P of client m |
| `n_(m,c)` | number of samples of class c of client m |

    theta, psi <- a step on  -log softmax_y(G(z) + log n_m)                 sent, and averaged as in FedAvg
    phi_m      <- a step on  -log softmax_y(G(z) + P(z))                    kept; no gradient for theta and psi

When to use it: clients hold few of the classes. One model for all and one for each client come of the same training.

Choices:
    - paper: both steps are taken on the same batches with the same optimizer. The recorded loss is the sum of both.
    - ours: P begins as a copy of G whose last layer is zero; in PFLlib it is a whole copy. A client that never trained
      is evaluated with G.
    - paper: G alone is evaluated beside the personalized predictions, as "generic head".
    - paper: P has the form of the last layer of the network.
    - ours: the loss of P is that of the method, cross-entropy by default.
    - paper: a class that a client does not hold gets no gradient in G. A client of one class changes only its P, and
      what moves without a gradient: running statistics, and all weights under weight decay (ours).
    - ours: `max_grad_norm` limits the gradients of G and P together. FedProx's pull on P is to where P began the round.
    - paper: clients are weighted by their samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Prediction, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.core.weights import add, layers_of, renamed
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, answer_update
from fedtide.learn.layers import last_layer, pick_layers, put_layers
from fedtide.learn.local import refuse_terms
from fedtide.learn.losses import WSM, Columns, known_part, mask_of, mean_of_each, refuse_mean_loss
from fedtide.learn.task import refuse_numbers
from fedtide.models.branched import in_layer
from fedtide.models.two_headed import TwoHeaded
from fedtide.personal import OWN_MODELS
from fedtide.personal.own_models import by_own_weights

OWN = "own."
"""Beginning of the names of P's parameters."""


class TwoHeads:
    """A task, and the task on its model with a second head P of a client beside its last layer G.

    Args:
        plain: the task without P; its loss is that of G + P.
    """

    def __init__(self, plain: Task) -> None:
        layer = last_layer(plain)
        task = replace(plain, build=lambda: TwoHeaded(plain.build(), layer), begin=None, init_layers=None)
        self.task = replace(task, loss=TwoLosses(plain.loss))
        self._names = {name: place(name, layer) for name in (*plain.scratch.names, *plain.scratch.weights.buffers)}
        self._plain_names = {new: old for old, new in self._names.items()}
        head = pick_layers(task.scratch.weights, is_own)
        within = f"model.{layer}.layer." if layer else "model.layer."
        self._first = {f"{within}{name.removeprefix(OWN)}": name for name in (*head.params, *head.buffers)}
        self._last = list(layers_of(head).values())[-1]

    def join(self, weights: Weights, own: Weights | None) -> Weights:
        """Return the weights of the model with G and P; None is a P that gives zeros."""
        joined = renamed(weights, self._names)
        return put_layers(joined, self._begin(joined) if own is None else own)

    def _begin(self, joined: Weights) -> Weights:
        copied = renamed(joined, self._first)
        zeros = {name: torch.zeros_like(copied.params[name]) for name in self._last}
        return replace(copied, params=copied.params | zeros)

    def split(self, weights: Weights) -> tuple[Weights, Weights]:
        """Return the part of weights, or of an update, without P, and that of P."""
        return renamed(weights, self._plain_names), pick_layers(weights, is_own)

    def predict(self, payload: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        """Predict samples by the sum of G and the P that their clients keep as their "own"."""
        by_sum = by_own_weights(self.task, lambda _, memory: self.join(payload, memory["own"]))
        return by_sum(self.join(payload, None), memories, x, owner)


def is_own(name: str) -> bool:
    """Tell whether a parameter is one of P."""
    return name.startswith(OWN)


def place(name: str, layer: str) -> str:
    """Return the name that a parameter has in the model with two heads; layer "" is the whole model.

    >>> place("conv.weight", "head"), place("head.weight", "head"), place("weight", "")
    ('model.conv.weight', 'model.head.layer.weight', 'model.layer.weight')
    """
    if layer and not in_layer(name, layer):
        return f"model.{name}"
    return f"model.{layer}.layer{name[len(layer) :]}" if layer else f"model.layer.{name}"


@dataclass(frozen=True)
class TwoLosses:
    """The balanced softmax of G, and the loss of G + P, whose gradient reaches P alone.

    Args:
        base: loss of G + P.
        balanced: loss of G.
    """

    base: Any
    balanced: WSM = WSM()

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare both losses; the only column is the mask of sequences."""
        return tuple(loss.prepare(shard)[0] for loss in (self.balanced, self.base)), mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean sum of both over the labels that count."""
        return mean_of_each(self, outputs, y, columns, shared, 0.0)

    def each(self, outputs: Tensor, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
        """Return the sum of both for every label, given the logits of G and P side by side."""
        generic, personal = outputs.chunk(2, -1)
        both = generic.detach() + personal
        return self.balanced.each(generic, y, shared[0], eps) + self.base.each(both, y, shared[1], eps)

    @property
    def graded(self) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] | None:
        """Return the function of losses and gradients by the logits of G and P; None without that of the base."""
        base = known_part(self.base, "graded")

        def both(outputs: Tensor, y: Tensor, shared: Any) -> tuple[Tensor, Tensor]:
            generic, personal = outputs.chunk(2, -1)
            balanced, by_generic = self.balanced.graded(generic, y, shared[0])
            losses, by_sum = base(generic + personal, y, shared[1])
            return balanced + losses, torch.cat([by_generic, by_sum], -1)

        return None if base is None else both

    def stacked(self, shared: Sequence[Any]) -> tuple[Any, ...]:
        """Stack the prepared values of several clients."""
        balanced, base = zip(*shared, strict=True)
        return self.balanced.stacked(balanced), self.base.stacked(base)


def fedrod(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with a balanced loss, and a second head for each client.

    Sends the weights of one head down and their update up, as a weighted sum; clients keep the other head.
    """
    refuse_numbers(task, "algorithm", "fedrod", "its loss counts classes")
    refuse_mean_loss(task.loss, "two heads have two losses for a label")
    refuse_terms(local, "the method trains two heads at once")
    heads = TwoHeads(task)

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        start = heads.join(w, None if memory is None else memory["own"])
        fitted = yield Train(heads.task, local, start, shard, moment, rng)
        if not fitted.steps:
            return None
        delta, change = heads.split(fitted.delta)
        head = add(heads.split(start)[1], change)
        next_memory = {"own": head} if all_finite(head) else None
        return answer_update(delta, fitted.loss, shard, weighting, next_memory)

    traits: dict[str, Any] = {"keeps": 1, "refuses": OWN_MODELS}
    plain = build_method("fedrod", task, local, server, cohort, train, **traits)
    return replace(plain, predict=heads.predict, others={"generic head": plain})


ENTRY = Entry(
    "fedrod", fedrod, "weights down, update up", "personal", keeps="a second head", helps=("labels",),
    exempt={"numbers": "it cannot predict numbers, because its loss counts classes"},
)  # fmt: skip
