"""Trusted: clients whose updates point against those of the others, round after round, are left out. Our own.

Rules that look at one round alone (`robust`) cannot tell a liar from an honest client that is unlike the others. Over
rounds the two differ: an honest update agrees with the others a little more often than not.

    x_b   = update of bucket b, no longer than the median
    a_b   = cos(x_b, sum of x_c over trusted buckets c other than b)
    t_i  <- FADE * t_i + a_b,  q_i <- FADE^2 * q_i + a_b^2               for each client i of b
    a bucket is trusted unless  sum_i t_i < -SURE * sqrt(sum_i q_i)      over its clients
    sums are means over trusted buckets, in each value no longer than 1 + p medians of their lengths,
    with p the share of them with  sum_i t_i > SURE * sqrt(sum_i q_i);
    an update is also no longer than 1 + p medians of the updates of all models

Clients are dealt to buckets in the order of t / sqrt(q). So liars come to share buckets, which are left out as a whole:
the server needs no sum of fewer than `bucket` clients, and masks stay.

When to use it: some clients may send anything, for many rounds. Where honest clients want opposite things it leaves the
fewer of them out, so give such groups models of their own first.

Choices:
    - ours: agreement is about updates of models, of each model of the server by itself. Its mean over them counts.
    - ours: clients that are left out go on training, so that they can come back.
    - ours: nobody is proven at first, so sums of the first rounds are clipped at the median. Later that would cost
      honest clients half a point.
    - ours: sums weigh as many times the median weight of trusted buckets as there are trusted ones.
    - ours: with fewer than three buckets of a model there is nothing to compare, and all are trusted. Lengths are
      compared over all models, so a liar among few is still bounded.
    - ours: with fewer than three buckets of all models the median length is at most that of the last question with
      more. So a liar who is alone in a round is bounded, too. Before such a question nothing bounds it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.core.base import Algorithm, Extended, Facts, Reply, Sum, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, children, is_node
from fedtide.core.weights import mul
from fedtide.fields.types import Count, ingredient
from fedtide.transforms.robust import (
    Clipped,
    Median,
    ask_buckets,
    bucket_traits,
    combine,
    in_words,
    numbers_of,
    shorten,
    why_no_buckets,
)
from fedtide.transforms.transform import Through, Transform, with_own

FADE = 0.9
"""Factor on earlier agreement, at each time that a client takes part."""
SURE = 1.0
"""Standard deviations by which agreement has to be below zero, or above."""
TINY = 1e-12
"""Less than any agreement."""
FEWEST = 3
"""Buckets below which nothing is compared."""


@dataclass(frozen=True)
class Trust:
    """Faded sums of agreement t and of its squares q: (clients, 2) float32 by id.

    length: median length of updates when there were three buckets last, 0 before.
    """

    sums: Tensor
    length: float = 0.0


@ingredient
class Trusted(Transform):
    """Clients that disagree with the others over rounds are left out of the sums of training.

    Args:
        bucket: number of clients in a bucket, at least. With 1 the server sees the update of each client.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.Trusted()).transforms
    (Trusted(bucket=1, kind='trusted'),)
    """

    bucket: Count = 1
    kind: Literal["trusted"] = "trusted"
    place: ClassVar[int] = 7

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return in_words(self.kind, self.bucket)

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        return why_no_buckets(algorithm)

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Ask clients in buckets, and hand the method the sums of trusted ones."""

        def begin(inner: Any, fleet: Any, rng: Rng) -> Extended:
            return Extended(inner, Trust(torch.zeros(int(fleet.clients.max()) + 1, 2)))

        def round(state: Extended, fleet: Any, rng: Rng) -> tuple[Extended, Facts]:
            trust, before, asked, left_out = state.own.sums, state.own.length, 0, 0.0

            def train(clients: Tensor, payload: Any, **options: Any) -> Reply:
                nonlocal asked
                asked += 1

                def join(totals: list[list[Tree]], members: list[list[Tensor]]) -> list[Tree]:
                    nonlocal trust, before, left_out
                    parts = [total for sums in totals for total in sums]
                    several = any(len(sums) > 1 for sums in totals)
                    usual = median_length(parts)
                    length = usual if several else math.inf
                    if len(parts) >= FEWEST:
                        before = usual or before
                    elif before:
                        length = min(length, before)
                    joined = []
                    for sums, buckets in zip(totals, members, strict=True):
                        proof = [float(certainty(trust[ids].sum(0))) for ids in buckets]
                        total, agreement = join_buckets(sums, proof, length)
                        joined.append(total)
                        trust = remember(trust, buckets, agreement)
                        left_out += sum(len(ids) for ids, p in zip(buckets, proof, strict=True) if p < -SURE)
                    return joined

                key = rng.at("buckets", asked)
                return ask_buckets(fleet, clients, payload, options, self.bucket, key, join, rank=certainty(trust))

            inner, facts = algorithm.round(state.inner, Through(fleet, train), rng)  # type: ignore[arg-type]
            return Extended(inner, Trust(trust, before)), {**facts, "left_out": left_out}

        return replace(with_own(algorithm, begin, round), traits=bucket_traits(algorithm, self.bucket))


def certainty(sums: Tensor) -> Tensor:
    """Return t / sqrt(q) of sums (..., 2), to four digits, 0 where there are none.

    One observation has just 1 or -1, and its last bit must decide nothing.

    >>> certainty(torch.tensor([[-2.0, 4.0], [0.0, 0.0]])).tolist()
    [-1.0, 0.0]
    """
    return (sums[..., 0] / sums[..., 1].sqrt().clamp(min=TINY)).round(decimals=4)


def mean_updates(total: Tree, place: str = "") -> dict[str, Tensor]:
    """Return the mean update (d,) of each model in the sums of a bucket, by its place in them.

    >>> mean_updates({"delta": [None, Sum(Weights({"w": torch.ones(2)}), 2.0)], "loss": Sum(3.0, 1.0)})
    {'/delta/1': tensor([0.5000, 0.5000], dtype=torch.float64)}
    """
    if isinstance(total, Sum):
        is_update = isinstance(total.value, Weights) and total.weight > 0
        return {place: numbers_of(total.value) / total.weight} if is_update else {}
    parts = children(total) if is_node(total) else []
    return {key: x for name, part in parts for key, x in mean_updates(part, f"{place}/{name}").items()}


def join_buckets(sums: Sequence[Tree], proof: Sequence[float], length: float) -> tuple[Tree, list[float]]:
    """Return the sums of a model's trusted buckets, and how much each of its buckets agrees with the others.

    Args:
        sums: of each bucket.
        proof: certainty that its clients agree with others; below -SURE it is not trusted.
        length: median length of the updates of all models.
    """
    trusted = [p >= -SURE for p in proof]
    agreement = agree_with_others([mean_updates(shorten_updates(total, length)) for total in sums], trusted)
    believed = [total for total, ok in zip(sums, trusted, strict=True) if ok]
    factor = 1 + sum(p > SURE for p in proof) / max(len(believed), 1)
    bounded = [shorten_updates(total, factor * length) for total in believed or sums]
    return combine(bounded, Clipped(factor)) if bounded else None, agreement


def remember(trust: Tensor, buckets: Sequence[Tensor], agreement: Sequence[float]) -> Tensor:
    """Return the faded sums of agreement (clients, 2) after a question, given the clients of each bucket."""
    trust = trust.clone()
    for ids, a in zip(buckets, agreement, strict=True):
        trust[ids] = trust[ids] * torch.tensor([FADE, FADE**2]) + torch.tensor([a, a * a])
    return trust


def median_length(totals: Sequence[Tree]) -> float:
    """Return the median length of the mean updates in the sums of buckets; 0 without any."""
    lengths = [torch.linalg.vector_norm(x) for total in totals for x in mean_updates(total).values()]
    return float(Median()(torch.stack(lengths)[:, None])) if lengths else 0.0


def shorten_updates(total: Tree, bound: float) -> Tree:
    """Return the sums of a bucket with no mean update longer than a bound.

    >>> shorten_updates({"delta": Sum(Weights({"w": 8 * torch.ones(1)}), 2.0), "loss": Sum(3.0, 1.0)}, 1.0)["delta"]
    Sum(value=Weights(params={'w': tensor([2.])}, buffers={}), weight=2.0)
    """
    if isinstance(total, Sum):
        length = max((float(torch.linalg.vector_norm(x)) for x in mean_updates(total).values()), default=0.0)
        return total if length <= bound else replace(total, value=mul(total.value, bound / length))
    if isinstance(total, Mapping):
        return {name: shorten_updates(part, bound) for name, part in total.items()}
    return [shorten_updates(part, bound) for part in total] if isinstance(total, list) else total


def agree_with_others(updates: Sequence[Mapping[str, Tensor]], trusted: Sequence[bool]) -> list[float]:
    """Return how much each bucket agrees with the trusted others: mean cosines over its models.

    Args:
        updates: of each bucket, the updates (d,) of models, by name.
        trusted: whether a bucket is.

    >>> east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    >>> agree_with_others([{"delta": east}, {"delta": north}, {"delta": -east}], [True, True, False])
    [0.0, 0.0, -0.7071067811865475]
    """
    cosines: list[list[float]] = [[] for _ in updates]
    for name in dict.fromkeys(name for of_bucket in updates for name in of_bucket):
        holders = [b for b, of_bucket in enumerate(updates) if name in of_bucket]
        if len(holders) < FEWEST:
            continue
        x = shorten(torch.stack([updates[b][name] for b in holders]).double())
        counts = torch.tensor([trusted[b] for b in holders], dtype=torch.float64)[:, None]
        others = (x * counts).sum(0) - x * counts
        for b, cosine in zip(holders, torch.cosine_similarity(x, others, dim=1).tolist(), strict=True):
            cosines[b].append(cosine)
    return [sum(of_bucket) / max(len(of_bucket), 1) for of_bucket in cosines]
