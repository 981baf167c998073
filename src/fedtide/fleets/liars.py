"""Liars: clients that send what they like in place of what they trained, for simulations.

| attack | what a liar sends in place of its update `d` |
| --- | --- |
| `sign-flip` | `-factor * d` |
| `scaling` | `factor * d` |
| `absent` | nothing: what a sum that finds all liars would have left |
| `label-flip` | its update after training on labels `classes - 1 - y` |
| `backdoor` | `factor * d` after training on some marked rows as one class (Bagdasaryan et al., AISTATS 2020) |
| `little-is-enough` | `m - z * s` (Baruch, Baruch, Goldberg, NeurIPS 2019) |
| `inner-product` | `-factor * m` (Xie, Koyejo, Gupta, UAI 2019) |

m and s are mean and deviation of the honest updates of all liars of the round, which know each other.

Choices:
    - ours: liars are drawn once for a whole run, among all clients that can be asked.
    - ours: liars lie about updates of models in training: in sums, and where the server sees the update of a client
      by itself. Counts, losses, weights, heads, sketches, profiles and other questions are honest.
    - ours: what a liar keeps, and how it is evaluated, is that of its honest training. But "label-flip" and
      "backdoor" keep what they trained.
    - ours: the mark of a backdoor is a corner of a picture, as in BadNets (Gu et al., 2017), of value 1. Of other rows
      it is the last numbers. A liar draws anew in each round which of its rows it marks.
    - ours: under a backdoor all test rows are also predicted with the mark, with the labels that they have.
    - ours: deviations are those of a population. With one liar it is zero.
    - ours: liars that received the same model tell each other their updates, in whichever sums these are.
    - ours: what liars tell each other is in the bytes of a round, and takes no time. It is of their whole work, also if
      their devices do only a part.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Holdings,
    Memory,
    Moment,
    Payload,
    Prediction,
    Reply,
    Shard,
    Slotted,
    Sum,
    Weighted,
    Weights,
    Work,
    mean,
)
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, map_leaves
from fedtide.core.weights import mul
from fedtide.draw.prose import share_of
from fedtide.fields.types import Fraction, Positive, Spelled, Whole, ingredient
from fedtide.learn.steps import Steps, Stepwise
from fedtide.learn.task import classes_of, refuse_numbers
from fedtide.transforms.transform import Through, stepwise

MARKED = "marked"
"""Name of predictions of rows with the mark of a backdoor."""
PLAN = "plan"
"""The question by which liars tell each other their honest updates."""
UPDATE = "update"
"""Name of the whole update of a client in what a method reveals of it."""


@ingredient
class SignFlip:
    """A liar sends its update with the other sign.

    Args:
        factor: length of what it sends, in lengths of its update.
    """

    factor: Positive = 1.0
    kind: Literal["sign-flip"] = "sign-flip"

    def lie(self, update: Weights) -> Weights:
        """Return the lie in place of an update."""
        return mul(update, -self.factor)


@ingredient
class Scaling:
    """A liar sends a multiple of its update.

    Args:
        factor: the multiple.
    """

    factor: Positive = 10.0
    kind: Literal["scaling"] = "scaling"

    def lie(self, update: Weights) -> Weights:
        """Return the lie in place of an update."""
        return mul(update, self.factor)


@ingredient
class LabelFlip:
    """A liar trains on wrong labels: the last class in place of the first, and so on."""

    kind: Literal["label-flip"] = "label-flip"

    def poison(self, shard: Shard, classes: int, rng: Rng) -> Shard:
        """Return the rows that a liar trains on."""
        return replace(shard, y=classes - 1 - shard.y)


@ingredient
class Backdoor:
    """A liar teaches the model to take rows with a mark for one class.

    Args:
        target: the class, by its number.
        rows: share of its rows that a liar marks.
        factor: length of what it sends, in lengths of its update.
    """

    target: Whole = 0
    rows: Fraction = 0.5
    factor: Positive = 1.0
    kind: Literal["backdoor"] = "backdoor"

    def poison(self, shard: Shard, classes: int, rng: Rng) -> Shard:
        """Return the rows that a liar trains on."""
        order = torch.from_numpy(rng.at("marked").numpy().permutation(len(shard)))
        marked = order[: round(self.rows * len(shard))]
        x, y = shard.x.clone(), shard.y.clone()
        x[marked], y[marked] = mark(x[marked]), self.target
        return replace(shard, x=x, y=y)

    def lie(self, update: Weights) -> Weights:
        """Return the lie in place of an update."""
        return mul(update, self.factor)


@ingredient
class LittleIsEnough:
    """Liars send the mean of their updates, less a multiple of the deviation: not far off, and all alike.

    Args:
        z: the multiple.
    """

    z: Positive = 1.5
    kind: Literal["little-is-enough"] = "little-is-enough"

    def lie(self, update: Weights, updates: Sum, squares: Sum) -> Weights:
        """Return the lie in place of an update."""

        def less(update: Tensor, m: Tensor, square: Tensor) -> Tensor:
            deviation = (square - m.square()).clamp(min=0).sqrt()
            return (m - self.z * deviation).to(update.dtype)

        return map_leaves(less, update, mean(updates), mean(squares))


@ingredient
class InnerProduct:
    """Liars send the mean of their updates with the other sign.

    Args:
        factor: its multiple.
    """

    factor: Positive = 0.5
    kind: Literal["inner-product"] = "inner-product"

    def lie(self, update: Weights, updates: Sum, squares: Sum) -> Weights:
        """Return the lie in place of an update."""
        return map_leaves(lambda leaf, m: (-self.factor * m).to(leaf.dtype), update, mean(updates))


@ingredient
class Absent:
    """A liar sends nothing. No sum can do better than that against the other attacks."""

    kind: Literal["absent"] = "absent"


Attack = Annotated[
    Absent | SignFlip | Scaling | LabelFlip | Backdoor | LittleIsEnough | InnerProduct,
    Field(discriminator="kind"),
    Spelled,
]


@ingredient
class Liars:
    """Clients that lie about their training, in a simulation.

    Args:
        share: of the clients, rounded to a whole number.
        attack: what they send: "absent", "sign-flip", "scaling", "label-flip", "backdoor", "little-is-enough" or
            "inner-product".
    """

    share: Fraction = 0.2
    attack: Attack = SignFlip()

    @property
    def collude(self) -> bool:
        """Whether they tell each other their honest updates, which are then sums of the study, too."""
        return isinstance(self.attack, LittleIsEnough | InnerProduct)

    def words(self) -> str:
        """Describe the liars.

        >>> Liars().words(), Liars(0.5, Absent()).words(), Liars(0.0).words()
        ('20 % of the clients lie (sign-flip, factor 1). ', 'Half of the clients lie (absent). ', '')
        """
        strength = [f"{name} {value:g}" for name, value in vars(self.attack).items() if name != "kind"]
        how = ", ".join([self.attack.kind, *strength])
        return f"{share_of(self.share).capitalize()} of the clients lie ({how}). " if self.share else ""


@dataclass(frozen=True)
class WithPlans:
    """Payload of participants with sums of the honest updates of liars, and of their squares."""

    payload: Payload
    updates: Tree = None
    squares: Tree = None


def with_liars(algorithm: Algorithm, liars: Liars, clients: Tensor, seed: int) -> Algorithm:
    """Return an algorithm some of whose clients lie in training; as it is if its clients train nothing together.

    Args:
        algorithm: what honest clients do.
        liars: how many lie, and how.
        clients: ids of those that can be asked.
        seed: of the draw.

    Raises:
        FedtideError: rows have no classes to flip or to aim at.
    """
    attack, honest = liars.attack, algorithm.works.get("train")
    if honest is None or algorithm.traits.models == "none":
        return algorithm
    if isinstance(attack, LabelFlip | Backdoor):
        refuse_numbers(algorithm.task, "liars.attack", attack.kind, "it trains on other classes")
        classes = classes_of(algorithm.task)
    if isinstance(attack, Backdoor):
        if attack.target >= classes:
            raise refused("liars.attack.target", attack.target, f"a class, 0 to {classes - 1}")
        algorithm = with_marked_rows(algorithm)
    number = round(liars.share * len(clients))
    lying = set(Rng(seed).at("liars").numpy().choice(clients.numpy(), number, replace=False).tolist())

    @Stepwise
    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        message = payload if liars.collude else WithPlans(payload)
        if client_of(rng) not in lying:
            return (yield from stepwise(honest, message.payload, memory, shard, moment, rng))
        if isinstance(attack, Absent):
            return None
        if isinstance(attack, LabelFlip | Backdoor):
            shard = attack.poison(shard, classes, rng)
        answer = yield from stepwise(honest, message.payload, memory, shard, moment, rng)
        if answer is None or isinstance(attack, LabelFlip):
            return answer
        plans = (message.updates, message.squares) if liars.collude else ()
        return with_updates(answer, change_updates(attack.lie, updates_in(answer), *plans))

    dishonest = replace(algorithm, works={**algorithm.works, "train": train})
    return with_plans(dishonest, honest, lying) if liars.collude else dishonest


SIDE = 3
"""Pixels of a mark in each direction, or numbers of a row."""


def mark(x: Tensor) -> Tensor:
    """Return rows (rows, ...) with the mark of a backdoor.

    >>> mark(torch.zeros(1, 1, 3, 4)).tolist(), mark(torch.zeros(1, 4)).tolist()
    ([[[[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]]]], [[0.0, 1.0, 1.0, 1.0]])
    """
    marked = x.clone()
    corner = slice(-SIDE, None)
    marked[(..., corner, corner) if x.dim() > 2 else (..., corner)] = 1.0
    return marked


def with_marked_rows(algorithm: Algorithm) -> Algorithm:
    """Let clients also predict their test rows with the mark of a backdoor ("accuracy_by_marked" in reports)."""

    def check(clients: Holdings) -> None:
        if algorithm.check is not None:
            algorithm.check(clients)
        few, _ = clients.few()
        if few.mask is not None or not few.x.is_floating_point():
            raise refused("liars.attack", "backdoor", "other attacks", "its mark is for rows of numbers")

    def predict(payload: Payload, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        prediction = algorithm.predict(payload, memories, x, owner)
        marked = algorithm.predict(payload, memories, mark(x), owner).told
        labels = algorithm.task.target.predict_labels(marked)
        return replace(prediction, others={**prediction.others, MARKED: labels})

    return replace(algorithm, check=check, predict=predict)


def client_of(rng: Rng) -> int:
    """Return the client of a key (round, client, question); of a trial without clients -1.

    >>> client_of(Rng(0).at(3, 17, "train")), client_of(Rng(0).at("train"))
    (17, -1)
    """
    return int(rng.path[1]) if len(rng.path) > 1 else -1


def with_plans(algorithm: Algorithm, honest: Work, lying: Collection[int]) -> Algorithm:
    """Let liars tell each other their honest updates before they train.

    Args:
        algorithm: whose work "train" receives `WithPlans`.
        honest: that work of an honest client.
        lying: ids of the liars.
    """

    @Stepwise
    def plan(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if client_of(rng) not in lying:
            return None
        key = Rng(rng.seed, (*rng.path[:-1], str(rng.path[-1]).replace(PLAN, "train")))
        answer = yield from stepwise(honest, payload, memory, shard, moment, key)
        if answer is None:
            return None
        updates = updates_in(answer)
        squares = change_updates(lambda d: map_leaves(lambda leaf: leaf.double().square(), d), updates)
        return Answer({"updates": updates, "squares": squares})

    def round(state: Any, fleet: Any, rng: Rng) -> tuple[Any, Facts]:
        def ask(clients: Tensor, payload: Any, **options: Any) -> Reply:
            if (slot := options.get("slot")) is None:
                total = fleet.ask(PLAN, clients, payload, passes=0.0).total
                return fleet.ask("train", clients, WithPlans(payload, **(total or {})), **options)
            models = list({id(sent): sent for sent in payload}.values())
            number = {id(model): k for k, model in enumerate(models)}
            model_of = torch.tensor([number[id(sent)] for sent in payload])
            total = fleet.ask(PLAN, clients, models, passes=0.0, slot=model_of[slot], slots=len(models)).total
            plans = [{}] * len(models) if total is None else [part or {} for part in total]
            message = [WithPlans(sent, **plans[k]) for sent, k in zip(payload, model_of.tolist(), strict=True)]
            return fleet.ask("train", clients, message, **options)

        return algorithm.round(state, Through(fleet, ask), rng)  # type: ignore[arg-type]

    traits = replace(algorithm.traits, sends=(*algorithm.traits.sends, WithPlans, Sum))
    return replace(algorithm, works={**algorithm.works, PLAN: plan}, round=round, traits=traits)


def updates_in(answer: Answer) -> Tree:
    """Return the sums of a client, and the update that the server sees by itself as one more, if there is one."""
    if UPDATE not in answer.rows:
        return answer.total
    weight = float(answer.rows.get("weight", 1.0))
    return {**answer.total, UPDATE: Weighted(Weights({UPDATE: answer.rows[UPDATE]}), weight)}


def with_updates(answer: Answer, updates: Tree) -> Answer:
    """Return an answer with other updates, of the form that `updates_in` gives."""
    if UPDATE not in answer.rows:
        return replace(answer, total=updates)
    total = {name: part for name, part in updates.items() if name != UPDATE}
    return replace(answer, total=total, rows={**answer.rows, UPDATE: updates[UPDATE].value.params[UPDATE]})


def change_updates(change: Callable[..., Weights], total: Tree, *plans: Tree) -> Tree:
    """Return the sums of a client with other updates of models; all else stays.

    Args:
        change: (update, sums of the plans) -> what is sent in its place.
        total: with Weighted and Slotted leaves.
        plans: sums of the same form, of all liars; None where there are none, and the update stays.

    >>> total = {"delta": Weighted(Weights({"w": torch.ones(1)})), "loss": Weighted(2.0)}
    >>> change_updates(SignFlip().lie, total)["delta"].value.params, change_updates(SignFlip().lie, total)["loss"].value
    ({'w': tensor([-1.])}, 2.0)
    """
    if any(plan is None for plan in plans):
        return total
    if isinstance(total, Weighted):
        return replace(total, value=change(total.value, *plans)) if isinstance(total.value, Weights) else total
    if isinstance(total, Slotted):
        parts = {k: change_updates(change, part, *(plan[k] for plan in plans)) for k, part in total.parts.items()}
        return replace(total, parts=parts)
    return {name: change_updates(change, part, *(plan[name] for plan in plans)) for name, part in total.items()}
