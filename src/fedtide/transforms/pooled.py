"""Pooled: a cluster's mean update is drawn toward that of all clusters as far as chance sets them apart. Our own.

A model of random effects for each layer, with variances by the method of moments (DerSimonian, Laird: *Meta-Analysis in
Clinical Trials*, Controlled Clinical Trials 1986) and shrinkage by them (Efron, Morris: *Data Analysis Using Stein's
Estimator and its Generalizations*, JASA 1975).

| symbol | meaning |
| --- | --- |
| `d_i` | update of client i, in one layer |
| `D_k`, `n_k` | mean update and number of the participants of cluster k |
| `p_k`, `D` | share of cluster k among all clients, mean update of all clusters |
| `s2`, `tau2` | variance of the clients of a cluster, and of clusters |

    d_i  = D + u_k + e_i,  E |u_k|^2 = tau2,  E |e_i|^2 = s2
    s2   = sum_k n_k (mean_i |d_i|^2 - |D_k|^2) / sum_k (n_k - 1)
    tau2 = max(0, (sum_k p_k |D_k - D|^2 - s2 sum_k p_k (1 - p_k) / n_k) / sum_k p_k (1 - p_k))
    b_k  = tau2 / (tau2 + s2 / n_k),  and model k steps along  D + b_k (D_k - D)

If clusters are alike b is near 0 and all models stay one model. If clusters are far apart b is near 1.

Choices:
    - ours: squares are summed over all numbers of a layer, so variances are those of its vector.
    - ours: with unequal weights w of clients `n_k` is (sum w)^2 / sum w^2.
    - ours: numerators and denominators are sums over rounds that fade by `FADE`. Those of tau2 begin anew with new
      clusters.
    - ours: s2 is unknown until a cluster has two participants in a round, and all clusters step along D. So draw at
      least twice as many participants as there are clusters.
    - ours: clients may lie. So squares are at least 0. `n_k` is at least 1/2, and at most twice the number of answers
      plus 1, as that of honest clients is. A cluster whose clients weigh nothing steps along D.
    - ours: a cluster without participants steps along D. Running statistics are those of its own participants, else
      of all clusters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.clusters.rounds import mean_of_all
from fedtide.core.base import Algorithm, Answer, Extended, Fleet, Payload, Slotted, Sum, Weighted, Weights, Work, mean
from fedtide.core.trees import map_leaves
from fedtide.core.weights import layers_of, squared_lengths
from fedtide.fields.types import ingredient
from fedtide.learn.training import Training, sum_update
from fedtide.transforms.transform import Transform, changed_answer, keep_beside, models_in, shares_of

FADE = 0.8
"""Factor on the evidence of earlier rounds."""
LEAST = 0.5
"""Participants of a cluster at least: one, with room for rounding."""
TINY = 1e-300
"""Less than any weight that is not zero."""


@dataclass(frozen=True)
class Evidence:
    """Evidence about the variances of each layer: fading sums, float64.

    within: (layers, 2) numerator and denominator of s2. between: (layers, 3) sums of p_k |D_k - D|^2, of
    p_k (1 - p_k) / n_k and of p_k (1 - p_k).
    """

    within: Tensor
    between: Tensor


def pool_updates(
    totals: Sequence[Any], middle: Weights, share: Tensor, earlier: Evidence | None, most: float = math.inf
) -> tuple[list[Weights], Evidence | None, Tensor]:
    """Draw the mean updates of clusters toward their mean.

    Args:
        totals: sums of "delta", "squares" and "weight" of each cluster's participants, as of `Training` with squares;
            None without any.
        middle: D.
        share: (K,) float64, what each cluster counts for in D; 0 without participants.
        earlier: the evidence of earlier rounds.
        most: number of participants of all clusters.

    Returns:
        The update of each model, the evidence, and b (layers, K), 0 without participants.
    """
    means_of = {k: mean(total) for k, total in enumerate(totals) if total is not None and share[k] > 0}
    trained = [k for k, means in means_of.items() if means["squares"] is not None and means["weight"] is not None]
    got, layers = [means_of[k] for k in trained], layers_of(middle)
    shares = torch.zeros(len(layers), len(totals), dtype=torch.float64)
    if not trained:
        return [middle] * len(totals), earlier, shares
    heavy = [max(float(means["weight"]), TINY) for means in got]
    participants = [totals[k]["delta"].weight / weight for k, weight in zip(trained, heavy, strict=True)]
    n = torch.tensor(participants, dtype=torch.float64).clamp(LEAST, 2 * most + 1)
    p = share[trained] / share.sum()
    far = [Weights({name: d - middle.params[name] for name, d in means["delta"].params.items()}) for means in got]
    inside = [n[j] * (means["squares"].clamp(min=0) - squared_lengths(means["delta"])) for j, means in enumerate(got)]
    outside = [p[j] * squared_lengths(difference) for j, difference in enumerate(far)]
    one = torch.ones(len(layers), dtype=torch.float64)
    within = torch.stack([torch.stack(inside).sum(0), (n - 1).sum() * one], 1)
    chance = (p * (1 - p) / n).sum() * one, (p * (1 - p)).sum() * one
    between = torch.stack([torch.stack(outside).sum(0), *chance], 1)
    if earlier is not None:
        within, between = within + FADE * earlier.within, between + FADE * earlier.between
    shares[:, trained] = shares_kept(within, between, n)
    factor = {name: row for row, names in zip(shares, layers.values(), strict=True) for name in names}
    updates = [middle] * len(totals)
    for k, difference, means in zip(trained, far, got, strict=True):
        params = {name: middle.params[name] + float(factor[name][k]) * d for name, d in difference.params.items()}
        updates[k] = Weights(params, means["delta"].buffers)
    return updates, Evidence(within, between), shares


def shares_kept(within: Tensor, between: Tensor, n: Tensor) -> Tensor:
    """Return b (layers, K) from the evidence (layers, 2), (layers, 3) and the numbers of participants (K,).

    >>> within, between = torch.tensor([[4.0, 2.0]]), torch.tensor([[9.0, 0.25, 0.5]])
    >>> shares_kept(within, between, torch.tensor([2.0, 0.5])).round(decimals=3)
    tensor([[0.9440, 0.8100]])
    """
    s2 = within[:, 0].clamp(min=0) / within[:, 1].clamp(min=1e-9)
    tau2 = ((between[:, 0] - s2 * between[:, 1]) / between[:, 2].clamp(min=1e-9)).clamp(min=0)
    noise = s2[:, None] / n
    # Without a second participant anywhere nothing is known about s2.
    is_known = (within[:, 1] > 1e-9)[:, None] & (tau2[:, None] > 0)
    return torch.where(is_known, tau2[:, None] / (tau2[:, None] + noise).clamp(min=TINY), 0.0)


@dataclass(frozen=True)
class Pool:
    """Memo between rounds: the evidence, None before any, and the number of models that it is about."""

    evidence: Evidence | None = None
    models: int = 1


@ingredient
class Pooled(Transform):
    """The update of each cluster is drawn toward that of all, as far as chance sets them apart.

    Clients also send the squared length of their update in each layer.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.flexcfl(task), ft.transforms.Pooled()).transforms
    (Pooled(kind='pooled'),)
    """

    kind: Literal["pooled"] = "pooled"
    place: ClassVar[int] = 0

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        if algorithm.traits.models != "clusters":
            return "it pools the models of clusters, and this method has none"
        if algorithm.options.get("q"):
            return "with q > 0 a cluster's step is no mean of updates"
        divided = algorithm.options.get("variant") == "gradient"
        return "its gradients are divided by all participants, and are no mean over members" if divided else ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Let clients send squared lengths, and draw the sums of clusters together before the method steps."""

        def ask(state: Extended, fleet: Fleet, clients: Tensor, payload: Payload, options: Any) -> Any:
            pool, evidence = state.own, state.own.evidence
            # The number of models that are trained now.
            count = len(payload) if options.get("slot") is not None else len(state.weights)
            models_before = {id(model) for model in state.weights}
            anew = count != pool.models or any(id(model) not in models_before for model in models_in(payload))
            if evidence is not None and anew:
                evidence = replace(evidence, between=torch.zeros_like(evidence.between))
            reply = fleet.ask("train", clients, payload, **options)
            if reply.total is None:
                return reply, pool, {}
            totals = parts_of(reply.total)
            sums = [None if part is None else part["delta"] for part in totals]
            share = shares_of(sums, reply, clients, options)
            middle, most = mean_of_all(sums, share), len(reply.clients)
            updates, evidence, shares = pool_updates(totals, middle, share, evidence, most)
            reply = replace(reply, total=with_updates(reply.total, updates, share))
            return reply, Pool(evidence, count), {"apart": float(shares[:, share > 0].mean())}

        works = {**algorithm.works, "train": with_squares(algorithm.works["train"])}
        return replace(keep_beside(algorithm, lambda inner, rng: Pool(), ask), works=works)


def with_squares(train: Work) -> Work:
    """Let a client also send what pooling needs: squared lengths of its update's layers, and the squared weight."""
    if isinstance(train, Training):
        return replace(train, squares=True)

    def change(answer: Answer) -> Answer:
        delta = answer.total["delta"]
        if isinstance(delta, Weighted):
            return replace(answer, total=answer.total | sum_update(delta.value, delta.weight, squares=True))
        squares = {k: sum_update(part.value, part.weight, squares=True) for k, part in delta.parts.items()}
        more = {name: Slotted({k: part[name] for k, part in squares.items()}, delta.slots) for name in SQUARES}
        return replace(answer, total={**answer.total, **more})

    return changed_answer(train, change)


SQUARES = ("squares", "weight")
"""Sums that clients send for pooling."""


def parts_of(total: Any) -> list[Any]:
    """Return the sums that pooling needs of each cluster's participants, None without any.

    Args:
        total: of the question "train": a list with the sums of each slot, or sums in slots.
    """
    if isinstance(total, list):
        return total
    names = ("delta", *SQUARES)
    return [
        None if delta is None else {name: total[name][k] for name in names} for k, delta in enumerate(total["delta"])
    ]


def with_updates(total: Any, updates: Sequence[Weights], share: Tensor) -> Any:
    """Return the sums of "train" with other mean updates; a cluster without participants has one, too.

    Args:
        total: the sums, as of `parts_of`.
        updates: the update of each model.
        share: (K,) the weight of each cluster's participants.
    """
    if not isinstance(total, list):
        sums = [_sum(update, float(weight) or 1.0) for update, weight in zip(updates, share, strict=True)]
        return {name: leaf for name, leaf in total.items() if name not in SQUARES} | {"delta": sums}
    example = next(part for part in total if part is not None)
    nothing = {name: Sum(map_leaves(lambda leaf: leaf * 0.0, leaf.value), 0.0) for name, leaf in example.items()}
    return [
        {name: leaf for name, leaf in (part or nothing).items() if name not in SQUARES} | {"delta": _sum(update)}
        for part, update in zip(total, updates, strict=True)
    ]


def _sum(update: Weights, weight: float = 1.0) -> Sum:
    """Return a sum whose mean is an update."""
    return Sum(map_leaves(lambda leaf: leaf.double() * weight, update), weight)
