"""Robust: the sum of a round is made of sums of random buckets of clients, so that a few liars cannot choose it.

| rule | mean of the buckets' means `x_1 ... x_n` |
| --- | --- |
| `median` | of each number its median (Yin, Chen, Ramchandran, Bartlett, ICML 2018, definition 1) |
| `trimmed` | of each number the mean without the `share` smallest and largest (there, definition 2) |
| `clipped` | `mean of x_b min(1, C / |x_b|)`, with C the median of the lengths |
| `centered` | `v <- v + mean of (x_b - v) min(1, C / |x_b - v|)`, from the median (Karimireddy, He, Jaggi, ICML 2021) |
| `krum` | mean of the `n - f` of them that are closest to their neighbors (Blanchard et al., NeurIPS 2017) |

Buckets are those of Karimireddy, He, Jaggi: *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing*, ICLR
2022. They make means of unlike clients more alike, so rules discard fewer honest ones. The server sees sums of buckets
alone. So masks stay, if a bucket has as many clients as masks open (`wire.fewest`).

When to use it: some clients may send anything. It costs accuracy where honest clients differ. Clusters help, because
buckets are dealt within each cluster. A bucket of three has a liar nearly three times as often as a client is one. So
against many strong liars take `bucket = 1`.

Choices:
    - ours: the sums of training alone are robust, each for itself: updates, losses, counts. Answers to other questions
      are not, such as reports by which clients are clustered, nor are values that a method reveals of single clients.
    - ours: a bucket's mean weighs what its clients claim, and buckets have equal weights. The sum weighs as many times
      the median weight as there are buckets.
    - ours: a rule knows no other round. So one bucket alone is the sum, whatever its clients send.
    - ours: buckets of a round are dealt anew. Each has `bucket` clients or up to twice as many less one; with fewer
      clients there is one.
    - ours: the bound C is learned in each round: the median of the lengths, or of the distances to v. In the paper of
      centered clipping it is given, and v begins at the sum of the last round.
    - ours: C is of a value's whole vector, all layers and running statistics. `centered` takes `STEPS` steps.
    - ours: f is `share` of the buckets, rounded up, and multi-Krum takes all others. Its scores need `n >= f + 3`; with
      fewer the median is taken. The paper's guarantee needs `n >= 2 f + 3`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Algorithm, Facts, Reply, Sum, Traits
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, leaves, map_leaves
from fedtide.fields.types import Count, Positive, Spelled, ingredient
from fedtide.transforms.transform import Through, Transform

STEPS = 3
"""Steps of centered clipping."""

Minority = Annotated[float, Field(ge=0, lt=0.5)]


@ingredient
class Median:
    """Of each number the median of the buckets.

    >>> Median()(torch.tensor([[1.0], [2.0], [3.0], [99.0]]))
    tensor([2.5000])
    """

    kind: Literal["median"] = "median"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the median (d,) of vectors (n, d)."""
        ordered, n = x.sort(0).values, len(x)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@ingredient
class Trimmed:
    """Of each number the mean of the buckets without the smallest and the largest.

    Args:
        share: of the buckets that are left out on each side, rounded up.

    >>> Trimmed(share=0.25)(torch.tensor([[1.0], [2.0], [4.0], [99.0]]))
    tensor([3.])
    """

    share: Minority = 0.2
    kind: Literal["trimmed"] = "trimmed"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the trimmed mean (d,) of vectors (n, d)."""
        few = min(math.ceil(round(self.share * len(x), 9)), (len(x) - 1) // 2)
        return x.sort(0).values[few : len(x) - few].mean(0)


@ingredient
class Clipped:
    """The mean of the buckets, none of them much longer than the others.

    Args:
        factor: the largest length, in median lengths.

    >>> Clipped()(torch.tensor([[3.0, 0.0], [0.0, 3.0], [30.0, 0.0]]))
    tensor([2., 1.])
    """

    factor: Positive = 1.0
    kind: Literal["clipped"] = "clipped"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mean (d,) of clipped vectors (n, d)."""
        return shorten(x, self.factor).mean(0)


@ingredient
class Centered:
    """The mean of the buckets, none of them further from a center than their median distance.

    >>> Centered()(torch.tensor([[1.0], [2.0], [4.0], [99.0]]))  # it begins at 3, and 1.5 clips
    tensor([3.])
    """

    kind: Literal["centered"] = "centered"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the center (d,) of vectors (n, d)."""
        center = Median()(x)
        for _ in range(STEPS):
            center = center + shorten(x - center).mean(0)
        return center


@ingredient
class Krum:
    """The mean of those buckets that are closest to their neighbors.

    Args:
        share: of the buckets that are left out, rounded up.

    >>> Krum(share=0.25)(torch.tensor([[1.0], [2.0], [3.0], [99.0]]))
    tensor([2.])
    """

    share: Minority = 0.2
    kind: Literal["krum"] = "krum"

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mean (d,) of the chosen vectors (n, d)."""
        n = len(x)
        few = math.ceil(round(self.share * n, 9))
        if n < few + 3:
            return Median()(x)
        between = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
        score = between.sort(1).values[:, 1 : n - few - 1].sum(1)  # without 0, that to itself
        return x[score.argsort(stable=True)[: n - few]].mean(0)


AnyRule = Annotated[Median | Trimmed | Clipped | Centered | Krum, Field(discriminator="kind"), Spelled]


def shorten(x: Tensor, factor: float = 1.0) -> Tensor:
    """Return vectors (n, d), none longer than a multiple of their median length."""
    length = torch.linalg.vector_norm(x, dim=1)
    return x * (factor * Median()(length[:, None]) / length.clamp(min=1e-300)).clamp(max=1)[:, None]


@ingredient
class Robust(Transform):
    """The sums of training are a robust mean of the sums of random buckets of clients.

    Args:
        rule: the mean of buckets: "median", "trimmed", "clipped", "centered" or "krum".
        bucket: number of clients in a bucket, at least. With 1 the server sees the update of each client.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.Robust()).transforms[0].label
    'centered in buckets of 3'
    """

    rule: AnyRule = Centered()
    bucket: Count = 3
    kind: Literal["robust"] = "robust"
    place: ClassVar[int] = 6

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return in_words(self.rule.kind, self.bucket)

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        return why_no_buckets(algorithm)

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Ask clients in buckets, and hand the method robust sums."""

        def round(state: Any, fleet: Any, rng: Rng) -> tuple[Any, Facts]:
            asked = 0

            def train(clients: Tensor, payload: Any, **options: Any) -> Reply:
                nonlocal asked
                asked += 1
                key = rng.at("buckets", asked)

                def join(totals: list[list[Tree]], _: Any) -> list[Tree]:
                    return [combine(of_slot, self.rule) for of_slot in totals]

                return ask_buckets(fleet, clients, payload, options, self.bucket, key, join)

            return algorithm.round(state, Through(fleet, train), rng)  # type: ignore[arg-type]

        return replace(algorithm, round=round, traits=bucket_traits(algorithm, self.bucket))


def in_words(what: str, bucket: int) -> str:
    """Return the words for sums of buckets.

    >>> in_words("median", 1), in_words("median", 3)
    ('median', 'median in buckets of 3')
    """
    return f"{what} in buckets of {bucket}" if bucket > 1 else what


def why_no_buckets(algorithm: Algorithm) -> str:
    """Return the reason why clients cannot be asked in buckets; "" if they can."""
    return "" if algorithm.traits.first is None else "its rounds count the first answers, and buckets wait for all"


def bucket_traits(algorithm: Algorithm, bucket: int) -> Traits:
    """Return the declarations of an algorithm if its server sees sums of so many clients."""
    traits = algorithm.traits
    fewest = bucket if traits.fewest is None else min(traits.fewest, bucket)
    reveals = traits.reveals if bucket > 1 else tuple(dict.fromkeys((*traits.reveals, "update")))
    return replace(traits, fewest=fewest, reveals=reveals)


def ask_buckets(
    fleet: Any,
    clients: Tensor,
    payload: Any,
    options: Mapping[str, Any],
    size: int,
    rng: Rng,
    join: Callable[[list[list[Tree]], list[list[Tensor]]], list[Tree]],
    rank: Tensor | None = None,
) -> Reply:
    """Put the question "train" to clients in buckets.

    Args:
        clients: ids of those that are asked.
        payload: what they receive.
        options: of the question.
        size: number of clients in a bucket, at least.
        rng: key of the dealing.
        join: (by slot the sums of its buckets, ids of those in each) -> by slot its sums; None without any.
        rank: by id, alike clients share a bucket; None deals them at random.
    """
    slot, slots = options.get("slot"), options.get("slots")
    others = {key: value for key, value in options.items() if key not in ("slot", "slots", "sizes")}
    bucket, slot_of = deal_buckets(clients, slot, size, rng, rank)
    sent = [payload if slot is None else payload[k] for k in slot_of]
    reply: Reply = fleet.ask("train", clients, sent, slot=bucket, slots=len(slot_of), **others)
    if reply.total is None:
        return reply
    answered = torch.isin(clients, reply.clients)
    many = 1 if slot is None else len(payload) if slots is None else slots
    totals: list[list[Tree]] = [[] for _ in range(many)]
    members: list[list[Tensor]] = [[] for _ in range(many)]
    for b, k in enumerate(slot_of):
        if reply.total[b] is not None:
            totals[k].append(reply.total[b])
            members[k].append(clients[answered & (bucket == b)])
    joined = join(totals, members)
    return replace(reply, total=joined[0] if slot is None else joined)


def deal_buckets(
    clients: Tensor, slot: Tensor | None, size: int, rng: Rng, rank: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """Deal clients to buckets of at least `size`, within each slot.

    Args:
        slot: of each; None puts all into slot 0.
        size: number of clients in a bucket, at least, if there are so many.
        rng: key of the dealing.
        rank: by id, alike clients share a bucket; None deals them at random.

    Returns:
        The bucket of each client (clients,), and the slot of each bucket.

    >>> deal_buckets(torch.arange(5), torch.tensor([0, 2, 2, 2, 2]), 2, Rng(0), torch.tensor([0, 3, 1, 4, 2]))
    (tensor([0, 2, 1, 2, 1]), [0, 2, 2])
    """
    where = torch.zeros_like(clients) if slot is None else slot
    bucket, slot_of = torch.empty_like(clients), list[int]()
    order = clients.argsort()
    for k in where.unique().tolist():
        members = order[where[order] == k]
        dealt = members[torch.from_numpy(rng.at(k).numpy().permutation(len(members)))]
        if rank is not None:
            dealt = dealt[rank[clients[dealt]].argsort(stable=True)]
        count = max(len(members) // size, 1)
        bucket[dealt] = len(slot_of) + torch.arange(len(members)) * count // max(len(members), 1)
        slot_of += [k] * count
    return bucket, slot_of


def combine(totals: Sequence[Tree], rule: AnyRule) -> Tree:
    """Return the robust sums of the sums of buckets, which are all of one form; None if no bucket has any.

    >>> combine([{"n": Sum(2.0, 1.0)}, None, {"n": Sum(90.0, 9.0)}, {"n": Sum(8.0, 2.0)}], Median())
    {'n': Sum(value=24.0, weight=6.0)}
    """
    parts = [total for total in totals if total is not None]
    if not parts:
        return None
    if isinstance(parts[0], Sum):
        return combine_sums(parts, rule)
    if isinstance(parts[0], Mapping):
        names = dict.fromkeys(name for total in parts for name in total)  # answers may leave some out
        return {name: combine([total[name] for total in parts if name in total], rule) for name in names}
    return [combine(leaf, rule) for leaf in zip(*parts, strict=True)]


def combine_sums(sums: Sequence[Sum], rule: AnyRule) -> Sum:
    """Return the robust sum of one value. Buckets of no weight have no mean, and are left out unless all are."""
    buckets = [one for one in sums if one.weight > 0] or list(sums)
    if len(buckets) == 1:
        return buckets[0]
    weights = torch.tensor([one.weight for one in buckets], dtype=torch.float64)
    means = torch.stack([numbers_of(one.value) / (one.weight or 1.0) for one in buckets])
    weight = float(Median()(weights[:, None])) * len(buckets)
    left = rule(means) * (weight or 1.0)

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return float(next(cut))
        return next(cut).reshape(leaf.shape)

    sizes = [leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in leaves(buckets[0].value)]
    cut: Iterator[Tensor] = iter(left.split(sizes))
    return Sum(map_leaves(part, buckets[0].value), weight)


def numbers_of(value: Tree) -> Tensor:
    """Return all numbers of a value (d,) in float64."""
    return torch.cat([torch.as_tensor(leaf, dtype=torch.float64).flatten() for leaf in leaves(value)])
