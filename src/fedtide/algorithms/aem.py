"""AEM: clustered models with exploration, optionally mixed with a local expert of each client.

Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in Federated
Learning*, FL-IJCAI 2022, Algorithms 1 to 4 and Eq. 5.

| symbol | meaning |
| --- | --- |
| `w_g^j` | global cluster model j = 1..J |
| `eps` | probability that a client explores |
| `J_t` | the models that are still trained |

    j_k    = argmin_{j in J_t} loss_k(w_g^j) with probability 1 - eps, else uniform over J_t          Algorithm 3
    w_g^j  = sum_{k: j_k = j} (n_k / n_j) w^k                                                         Eqs. 2 and 3
    y_k(x) = g_l(x) f_l(x) + sum_j g_j(x) f_g^j(x)                                                    Eq. 5

When to use it: clients hold few classes or have styles of their own, each has labeled samples to spare, and the goal is
a model for each client, not one for all.

Choices:
    `exploration = { epsilon = 0.0 }` is IFCA's averaging. The number of participants does not depend on J, as in the
    paper. Ties of losses go to the first model (the authors' code draws one). Exploration is uniform over the models
    that are still trained (the pseudo-code says over all), and an explorer does not compute losses. The kinds of
    exploration that fall over the rounds are those of the authors' code.
    With `freeze`, the validation loss of a model, over participants that trained it since the last check, is checked
    every `check_every` rounds. A model without improvement in `patience` checks is frozen at its best weights and no
    longer sent; a check without members does not count. Only frozen models are served at their best weights (in the
    code all are).
    Personalization (`personal`) uses a real validation set (the authors' code uses its test set). It leaves out models
    that no participant has chosen by loss for ten rounds (`drop_unused`; the code leaves out those that no evaluated
    client picks). A model that was in use when it froze stays in it.
    `personal = "stacking"` is not the paper's: it weighs all models that a client has by its validation samples.
    The `anchor` is ours, and `anchor = false` the paper: FedAvg's model beside the J models, never chosen in training
    and never frozen. A client has too few validation samples to choose by itself between models that are about as good,
    so the anchor is mixed into what it chooses, with one weight for all that the validation samples of those choose who
    do not explore (`fedtide.multi.anchor`). It is weighed beside the model that a client trains, chosen on training
    samples among those still trained; with the last of these frozen the weight stays as it is. For other
    personalizations it is one more model, and the model of clients without labeled samples. In ten small settings over
    five seeds AEM without it lost up to 2.7 points to the best single model and gained up to 6.5, anchored it lost 0.2
    at most and gained as much (recipe never-worse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Count, Flag, Fraction, ModelCount, Spelled, ingredient
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Holdings,
    Memory,
    Moment,
    Notes,
    Payload,
    Prediction,
    Shard,
    Weighted,
    Weights,
)
from fedtide.learn.judging import mean_losses
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import take_part, with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.steps import Losses, Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.multi.anchor import Anchor, Anchored, Anchoring
from fedtide.multi.clusters import (
    at_most_registered,
    in_slot,
    init_models,
    refuse_equal_start,
    step_models,
)
from fedtide.multi.expert_nets import Networks
from fedtide.multi.personal import Choice, Personal, names_of, predict_personal
from fedtide.multi.personalization import Personalization
from fedtide.parts.weighting import Weighting, client_weight

LARGEST = 1e6
"""Value of an infinite validation loss."""

IN_USE = 10
"""Rounds that a model stays in use after a client chose it by loss."""


@ingredient
class Constant:
    """Exploration with a constant probability.

    Args:
        epsilon: probability that a participant trains a random model.
    """

    epsilon: Fraction = 0.33
    kind: Literal["constant"] = "constant"

    def probability(self, clusters: int, moment: Moment) -> float:
        """Return the probability that a client explores in a round."""
        return self.epsilon


@ingredient
class Inverse:
    """Exploration with probability 1 / t in round t = 1, 2, ..."""

    kind: Literal["inverse"] = "inverse"

    def probability(self, clusters: int, moment: Moment) -> float:
        """Return the probability that a client explores in a round."""
        return 1 / (moment.round + 1)


@ingredient
class Power:
    """Exploration with a power of the round t = 1, 2, ... that falls to `epsilon` at an eighth of the rounds.

    Args:
        epsilon: probability at an eighth of the rounds.

    >>> round(Power(0.25).probability(2, Moment(3, 24)), 4)
    0.25
    """

    epsilon: Annotated[Fraction, Field(gt=0)] = 0.33
    kind: Literal["power"] = "power"

    def probability(self, clusters: int, moment: Moment) -> float:
        """Return the probability that a client explores in a round."""
        return (moment.round + 1) ** (math.log(self.epsilon) / math.log(moment.rounds / 8 + 1))


@ingredient
class ByClusters:
    """Exploration with probability t^(-2/J) in round t = 1, 2, ...: the more models, the slower it falls."""

    kind: Literal["clusters"] = "clusters"

    def probability(self, clusters: int, moment: Moment) -> float:
        """Return the probability that a client explores in a round."""
        return (moment.round + 1) ** (-2 / clusters)


Exploration = Annotated[Constant | Inverse | Power | ByClusters, Field(discriminator="kind")]


@ingredient
class Freeze:
    """Freezing of models whose validation loss no longer improves.

    Args:
        patience: checks without improvement after which a model is frozen.
        check_every: rounds between two checks.
    """

    patience: Count
    check_every: Count = 10


@dataclass(frozen=True)
class State:
    """The models and the optimizer's memo of each.

    chosen: (J,) how often each was chosen by loss so far. last: (J,) the round of its last choice, if any, which moves
    along once it is frozen. active: (J,) mask of models still trained. best: the models at their lowest validation
    loss, None before a check; least: (J,) that loss, if any; stale: (J,) checks since. losses: (J, 2) sum of validation
    losses and their weight since the last check. anchor: the model that everybody trains, if any.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    chosen: Tensor
    last: Tensor
    active: Tensor
    best: tuple[Weights | None, ...]
    least: Tensor
    stale: Tensor
    losses: Tensor
    anchor: Anchor | None = None
    cohort: Any = None


def aem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    exploration: Annotated[Exploration, Spelled] = Constant(),
    personal: Annotated[Personal, Spelled] = Choice(),
    personal_others: tuple[Annotated[Personal, Spelled], ...] = (),
    anchor: Anchored = True,
    drop_unused: Flag = True,
    freeze: Freeze | None = None,
    hide_choice: Flag = False,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Adaptive expert models.

    Sends the models that are still trained down, and the update of one of them up, in a sum per model.

    Args:
        task: model and loss; `example` set if clients have networks of their own.
        clusters: number of models, J.
        exploration: probability that a participant trains a random model.
        personal: personalization of the models by a client before evaluation.
        personal_others: further personalizations of the same models, each judged and reported as a method of its own.
        drop_unused: leave models that no client chooses by loss any more out of personalization.
        freeze: freezing of models that no longer improve; None means never.
        hide_choice: hide which model a client trained, by sums for all of them, at J times the upload.
    """
    if exploration == Constant(0.0):
        refuse_equal_start(task, clusters, ", or `exploration`")
    none = torch.zeros(clusters, dtype=torch.float64)
    nets = Networks(task)
    beside = Anchoring(anchor, task, local, server, weighting)
    # Other ways have the anchor among their models, and weigh it themselves.
    weighed = any(isinstance(way, Choice) for way in (personal, *personal_others))
    for way in (personal, *personal_others):
        if not isinstance(way, Personalization):
            raise refused("personal", type(way).__name__, "one of fedtide.personal, such as Choice()")
        way.check(nets, clusters + anchor)
    if "loss" in cohort.asks and not isinstance(personal, Choice):
        raise refused("personal", personal.kind, "'choice' with a cohort that asks for losses, as others train first")

    def init(fleet: Fleet, rng: Rng) -> State:
        models = init_models(task, rng, clusters)
        memos = tuple(map(server.init, models))
        best, losses = (None,) * clusters, torch.zeros(clusters, 2, dtype=torch.float64)
        start = beside.start(rng)
        return State(models, memos, none, none, none == 0, best, none, none, losses, start, cohort.init(fleet))

    @Stepwise
    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        if not payload["models"]:
            parts = yield from beside.train_alone(payload, shard, moment, rng)
            return Answer(parts) if parts else None
        # Algorithm 3: the model with the lowest loss, or a random one.
        draw = rng.at("explore").numpy()
        explored = bool(draw.random() < exploration.probability(clusters, moment))
        models = payload["models"]
        place = int(draw.integers(len(models))) if explored else int((yield Losses(task, models, shard)).argmin())
        j, received = int(payload["active"][place]), models[place]
        judged = validation(task, received, shard) if freeze else None
        # A client that explores has chosen no model to weigh the anchor by.
        own = chosen_model if weighed and not explored else None
        parts = yield from beside.train(own, {**payload, "chosen": received}, None, shard, moment, rng)
        # Algorithm 4: local training.
        fitted = yield Train(task, local, received, shard, moment, rng)
        if not fitted.steps:
            return None
        chosen = F.one_hot(torch.tensor(j), clusters).double()
        total = {
            "delta": in_slot(fitted.delta, client_weight(shard, weighting), j, clusters, hidden=hide_choice),
            "loss": Weighted(fitted.loss, len(shard)),
            "trained": Weighted(chosen, 1.0),
            "chosen": Weighted(chosen * (not explored), 1.0),
        }
        if judged is not None:
            total["val"] = Weighted(chosen[:, None] * judged, 1.0)
        return Answer(total | parts, notes=Notes(branch=torch.tensor(j)), update={j: fitted.delta})

    def chosen_model(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        return Prediction(task.told(payload["chosen"], x))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        active = state.active.nonzero().flatten()
        if not len(active) and state.anchor is None:
            return state, {"active": 0}
        payload = {"models": [state.weights[j] for j in active.tolist()], "active": active, **beside.sent(state)}
        state, reply = take_part(cohort, fleet, state, rng, serve, payload)
        if reply.total is None:
            return state, {"active": len(active)}
        state, share = beside.step(state, reply.total)
        told = {**(share if weighed else {}), "loss": mean(reply.total)["loss"], "active": len(active)}
        if not len(active):
            return state, told
        # Algorithm 1, lines 8 to 10.
        after = step_models(state, server, reply.total["delta"])
        chosen = reply.total["chosen"].value
        last = torch.where(chosen > 0, float(fleet.moment.round), state.last)
        # Nobody can choose a frozen model, which is not sent: it stays in use if it was when it froze.
        last = torch.where(~state.active & in_use(state), last.max(), last)
        losses = state.losses + reply.total["val"].value if "val" in reply.total else state.losses
        after = replace(after, chosen=state.chosen + chosen, last=last, losses=losses)
        # Lines 11 and 12.
        if freeze and (fleet.moment.round + 1) % freeze.check_every == 0:
            after = freeze_stale(state, after, freeze.patience)
        return after, {**told, "members": reply.total["trained"].value}

    def serve(state: State, clients: Tensor) -> tuple[Payload, None]:
        used = in_use(state)
        kept = used.nonzero().flatten() if drop_unused and used.any() else torch.arange(clusters)
        models, usual = [state.weights[j] for j in kept.tolist()], state.chosen[kept].argmax()
        return {"models": models, "numbers": kept, "usual": usual, **beside.sent(state)}, None

    def personalized(way: Personalization) -> Algorithm[State]:
        # A client alone can hardly tell the better of two models: the anchor is mixed into what it chooses. Whatever
        # else it does, the anchor is one of the models, and the last of them.
        as_model = anchor and not isinstance(way, Choice)

        def received(payload: Any) -> Any:
            if not as_model:
                return payload
            models, numbers = payload["models"], payload["numbers"]
            return {
                "models": [*models, payload["anchor"]["weights"]],
                "numbers": torch.cat([numbers, torch.tensor([clusters])]),
                "usual": len(models),
            }

        def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
            kept = way.fit(nets, received(payload)["models"], shard, moment, rng)
            return None if kept is None else Answer({}, memory=kept)

        def predict(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
            got = received(payload)
            found = predict_personal(way, nets, got["models"], int(got["usual"]), memories, x, owner)
            return renumber(found, got["numbers"], clusters + as_model, own=way.own_expert)

        works, check = {"train": train}, at_most_registered(clusters)
        made = Algorithm("aem", init, works, round, serve, predict, adapt, own_expert=way.own_expert, check=check)
        return made if as_model else beside.added_to(made)

    others = dict(zip(names_of(personal_others), map(personalized, personal_others), strict=True))
    # As if no client explored, and no model were frozen or out of use.
    forward = {"train": clusters, "loss": clusters + anchor + 1}
    made = replace(personalized(personal), others=others)

    def check(held: Holdings) -> None:
        for each in (made, *others.values()):
            if each.check is not None:
                each.check(held)

    return with_cohort(replace(made, check=check), cohort, task, local, forward=forward, trained=beside.trained())


def renumber(found: Prediction, numbers: Tensor, clusters: int, *, own: bool) -> Prediction:
    """Renumber a prediction of some of the models by the server's numbers.

    Args:
        found: prediction with choices and weights of the models that were sent, in their order; with `own` preceded by
            the local expert.
        numbers: server numbers of the models that were sent.
        clusters: number of all models; one that was not sent has no weight.
        own: whether the first expert is the local one; then model j has number j + 1.
    """
    if found.choice is None:
        return found
    places = torch.cat([torch.zeros(1, dtype=torch.int64), numbers + 1]) if own else numbers
    weights = None
    if found.weights is not None:
        weights = torch.zeros(len(found.choice), clusters + own, dtype=torch.float64)
        weights[:, places] = found.weights
    return Prediction(found.told, places[found.choice], weights)


def in_use(state: State) -> Tensor:
    """Return the mask (J,) of models that were chosen by loss in the last ten rounds."""
    return (state.chosen > 0) & (state.last > state.last.max() - IN_USE)


def freeze_stale(before: State, after: State, patience: int) -> State:
    """Update the state after a check: models without improvement for too long are reset to their best, and frozen."""
    summed, weight = after.losses.T
    value, checked = summed / weight.clamp(min=1e-12), after.active & (weight > 0)
    first = torch.tensor([held is None for held in after.best])
    gained = checked & (first | (value < after.least))
    stale = torch.where(gained, 0.0, after.stale + checked.double())
    # Participants evaluated the weights they had received, of which the last are kept.
    best = tuple(before.weights[j] if gained[j] else held for j, held in enumerate(after.best))
    frozen = after.active & (stale >= patience)
    weights = tuple(
        kept if kept and frozen[j] else held for j, (kept, held) in enumerate(zip(best, after.weights, strict=True))
    )
    least, losses = torch.where(gained, value, after.least), torch.zeros_like(after.losses)
    return replace(
        after, weights=weights, best=best, least=least, stale=stale, active=after.active & ~frozen, losses=losses
    )


def validation(task: Task, weights: Weights, shard: Shard) -> Tensor | None:
    """Return the summed loss of a client's validation samples, and their number (2,)."""
    if shard.val is None or not len(shard.val):
        return None
    rows = len(shard.val)
    loss = float(mean_losses(task, [weights], shard.val)[0].clamp(max=LARGEST))
    return torch.tensor([loss * rows, rows], dtype=torch.float64)
