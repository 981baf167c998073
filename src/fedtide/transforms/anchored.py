"""Anchored: FedAvg's model beside a method's own, mixed into its predictions. Our own.

Each participant also trains one model for all, as in FedAvg. The two predictions are mixed with one weight for all
clients. This weight is one of 0, 0.1, ..., 1: the validation samples of participants are likeliest under it. Clients
send the log-likelihood at each weight, summed over their samples, so the server learns eleven sums and nothing of one
client. A round has few participants, so the sums of earlier rounds count as well, less with each round.

The method's own models neither see the anchor nor train otherwise. Clients train up to twice as much.

When to use it: it is not known whether clients are of different kinds. If they are alike, K models of fewer samples
each lose to one model of all, and the anchor gets the weight (docs/never-worse.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Extended, Fleet, Moment, Prediction, Shard, Weighted, Weights, mean
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import merge
from fedtide.core.trees import detached
from fedtide.fields.types import ingredient
from fedtide.learn import LocalUpdate, Server, Steps, Stepwise, client_weight, local_update, training_cost
from fedtide.learn.target import CLASSES, Target
from fedtide.transforms.transform import Transform, each_slot, keep_beside, made_with, stepwise

WEIGHTS = torch.linspace(0, 1, 11, dtype=torch.float64)
"""Weights of the anchor that are tried."""

LEAST = -1e6
"""Log-likelihood of a sample at least."""

DECAY = 0.9
"""What the sums of a round count for in the next one. With 0 the weight follows a round's few participants, and
accuracy was 0.6 ± 0.2 points lower (33 runs of eight methods in four settings); with 1 it follows too late."""

PARTS = ("anchor", "likelihoods")
"""Sums that participants send for the anchor."""

Predict = Callable[[Any, Any, Tensor, Tensor], Prediction]
"""The `predict` of an algorithm: (payload, memories, inputs, owner of each row) -> prediction."""


@dataclass(frozen=True)
class Anchor:
    """State of an anchor: its weights, the server optimizer's memo, and its share, which is its weight in the mixture.

    likelihoods: (11,) of validation samples at each of `WEIGHTS`, decayed sums over rounds.
    """

    weights: Weights
    memo: Any
    share: float = 0.5
    likelihoods: Tensor = field(default_factory=lambda: torch.zeros_like(WEIGHTS))

    def step(self, server: Server, delta: Any, likelihoods: Any) -> "Anchor":
        """Return the anchor after a server step, with the share of highest likelihood; without any as it was."""
        weights, memo = server.step(self.weights, self.memo, mean(delta))
        if likelihoods is None or not likelihoods.weight:
            return replace(self, weights=weights, memo=memo)
        summed = DECAY * self.likelihoods + likelihoods.value
        return Anchor(weights, memo, float(WEIGHTS[int(summed.argmax())]), summed)


@dataclass(frozen=True)
class Received:
    """Payload of clients: the payload of the method, the anchor, and its share."""

    method: Any
    anchor: Weights
    share: float


@ingredient
class Anchored(Transform):
    """One more model on all samples, mixed in with a weight that clients' validation samples choose.

    Clients need validation samples (`data.split.val`), and train up to twice as much.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.ifca(task), ft.transforms.Anchored()).transforms
    (Anchored(kind='anchored'),)
    """

    kind: Literal["anchored"] = "anchored"
    place: ClassVar[int] = 2

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        return "it trains one model for all, as an anchor does" if algorithm.traits.models == "one" else ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Train the anchor beside the algorithm's models, and mix it into what they predict."""
        task, local, server, weighting = made_with(algorithm, "task", "local", "server", "weighting")
        variant: LocalUpdate = "gradient" if algorithm.options.get("variant") == "gradient" else "averaging"
        work = algorithm.works["train"]

        def begin(inner: Any, rng: Rng) -> Anchor:
            weights = task.init(rng)
            return Anchor(weights, server.init(weights))

        @Stepwise
        def train(payload: Received, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
            answer = yield from stepwise(work, payload.method, memory, shard, moment, rng)
            if answer is None:
                return None
            answer = replace(answer, total=detached(answer.total), update=detached(answer.update))
            fitted = yield from local_update(task, local, variant, payload.anchor, shard, moment, rng)
            if fitted is None:
                return answer
            total = {**answer.total, "anchor": Weighted(detached(fitted[0]), client_weight(shard, weighting))}
            if (likelihoods := weigh(payload, memory, answer, shard)) is not None:
                total["likelihoods"] = likelihoods
            return replace(answer, total=total)

        def weigh(payload: Received, memory: Any, answer: Answer, shard: Shard) -> Weighted | None:
            """Weigh the anchor on a client's validation samples, beside what the method would have predicted."""
            as_served, val = algorithm.as_served, shard.val
            next_memory = memory if answer.memory is None else answer.memory
            served = (payload.method, next_memory) if as_served is None else as_served(payload.method, memory, answer)
            if served is None or val is None or not len(val):
                return None
            method = algorithm.predict(served[0], [served[1]], val.x, torch.zeros(len(val), dtype=torch.int64)).told
            anchor = task.predict_rows(payload.anchor, val.x, double=True)
            return likelihoods_of(method, anchor, val, task.target)

        def ask(state: Extended, fleet: Fleet, clients: Tensor, payload: Any, options: Any) -> Any:
            anchor = state.own
            reply = fleet.ask("train", clients, each_slot(payload, options, partial(receive, anchor)), **options)
            total, parts = without_parts(reply.total)
            if "anchor" not in parts:  # no client of the round could train it
                return replace(reply, total=total), anchor, {}
            anchor = anchor.step(server, parts["anchor"], parts.get("likelihoods"))
            return replace(reply, total=total), anchor, {"anchor": anchor.share}

        def serve(state: Extended, clients: Tensor) -> tuple[Any, Tensor | None]:
            payload, slot = algorithm.serve(state.inner, clients)
            return each_slot(payload, {"slot": slot}, partial(receive, state.own)), slot

        def adapting(adapt: Any) -> Any:
            return adapt and (lambda payload, *args: adapt(payload.method, *args))

        def mixing(predict: Predict) -> Predict:
            """Mix the anchor into a prediction, of a mixture as one more component; others are the labels of each."""

            def mixed(payload: Received, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
                prediction, share = predict(payload.method, memories, x, owner), payload.share
                other, says = task.predict_rows(payload.anchor, x, double=True), task.target.predict_labels
                choice, weights = prediction.choice, prediction.weights
                if weights is not None:
                    last = torch.full((len(x), 1), share, dtype=torch.float64)
                    weights = torch.cat([weights * (1 - share), last], 1)
                    choice = weights.argmax(1)
                labels = {**prediction.others, "components": says(prediction.told), "anchor": says(other)}
                log_probs = mix(prediction.told.double(), other, share, task.target)
                return replace(prediction, told=log_probs, choice=choice, weights=weights, others=labels)

            return mixed

        def check(clients: Any) -> None:
            if algorithm.check is not None:
                algorithm.check(clients)
            if not clients.has_val:
                raise FedtideError(
                    "transforms: 'anchored' is not allowed without validation samples, because they choose its weight; "
                    "set data.split.val, or leave 'anchored' and safe out"
                )

        base = algorithm.traits.compute_cost or training_cost(local, {})

        def cost(question: str, rows: Tensor) -> Tensor:
            once = rows if variant == "gradient" else local.samples(rows)
            return base(question, rows) + once if question == "train" else base(question, rows)

        others = {
            name: replace(other, predict=mixing(other.predict), adapt=adapting(other.adapt))
            for name, other in algorithm.others.items()
        }
        return replace(
            keep_beside(algorithm, begin, ask),
            works={**algorithm.works, "train": train},
            serve=serve,
            predict=mixing(algorithm.predict),
            adapt=adapting(algorithm.adapt),
            check=check,
            others=others,
            traits=replace(algorithm.traits, compute_cost=cost, sends=(*algorithm.traits.sends, Received)),
        )


def receive(anchor: Anchor, payload: Any) -> Received:
    """Return the payload of clients, with an anchor beside that of the method."""
    return Received(payload, anchor.weights, anchor.share)


def without_parts(total: Any) -> tuple[Any, Any]:
    """Take the anchor's sums out of those of the method, which may be in slots; return both."""
    if total is None:
        return None, {}
    if isinstance(total, list):
        split = [without_parts(part) for part in total]
        return [rest for rest, _ in split], reduce(merge, [parts for _, parts in split], {})
    parts = {name: total[name] for name in PARTS if name in total}
    return {name: leaf for name, leaf in total.items() if name not in parts}, parts


def mix(method: Tensor, anchor: Tensor, share: float, target: Target = CLASSES) -> Tensor:
    """Return log((1 - share) p + share p_anchor), or what a target makes of both; at share 0 or 1 one, unchanged.

    >>> mix(torch.tensor([0.2]).log(), torch.tensor([0.6]).log(), 0.5).exp()
    tensor([0.4000])
    """
    if share in (0.0, 1.0):
        return anchor if share else method
    parts = torch.stack([method, anchor])
    return target.mix(parts, torch.tensor([1 - share, share]).log().to(parts).reshape(-1, *[1] * method.dim()))


def likelihoods_of(method: Tensor, anchor: Tensor, val: Shard, target: Target = CLASSES) -> Weighted:
    """Return the mean log-likelihood (11,) of a client's validation labels at each of `WEIGHTS`.

    Of other targets it is minus the plain loss of what the mixture tells.

    Args:
        method: what the mixture tells without the anchor: log-probabilities (rows, ..., classes).
        anchor: what the anchor tells.
        val: the samples.
        target: what rows are labeled with.
    """
    if target != CLASSES:
        blends = (mix(method.double(), anchor, share, target) for share in WEIGHTS.tolist())
        likelihoods = torch.stack([-target.losses(blend, val.y).double() for blend in blends])
    else:
        each_row = [-target.losses(outputs, val.y).double() for outputs in (method, anchor)]
        ours, theirs = (rows if val.mask is None else rows[val.mask] for rows in each_row)
        likelihoods = torch.stack([mix(ours.flatten(), theirs.flatten(), share) for share in WEIGHTS.tolist()])
    rows = likelihoods.shape[1]
    return Weighted(likelihoods.nan_to_num(nan=LEAST).clamp(min=LEAST).sum(1) / max(rows, 1), rows)
