"""AEM: clustered models with exploration, mixed with a local expert of each client.

Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in Federated
Learning*, FL-IJCAI 2022, Algorithms 1 to 4 and Eq. 5. With default options it follows all of these, except for the
choices below.

| symbol | meaning |
| --- | --- |
| `w_g^j` | global cluster model j = 1..J |
| `eps` | probability that a client explores |
| `J_t` | the models that are still trained |

    j_k    = argmin_{j in J_t} loss_k(w_g^j) with probability 1 - eps, else uniform over J_t          Algorithm 3
    w_g^j  = sum_{k: j_k = j} (n_k / n_j) w^k                                                         Eqs. 2 and 3
    y_k(x) = g_l(x) f_l(x) + sum_j g_j(x) f_g^j(x)                                                    Eq. 5

When to use it: clients hold few classes or have styles of their own, and the goal is a model for each client. Each
needs labeled samples to spare.

Choices:
    - paper: `exploration = { epsilon = 0.0 }` with the way "choice" is IFCA's averaging. The number of participants
      does not depend on J.
    - ours: ties of losses go to the first model; the released code draws one.
    - ours: exploration is uniform over the models that are still trained (the pseudo-code says over all), and an
      explorer does not compute losses.
    - released code: the kinds of exploration that fall over the rounds.
    - ours: with `freeze`, the validation loss of a model, over participants that trained it since the last check, is
      checked every `check_every` rounds. A model without improvement in `patience` checks is frozen at its best weights
      and no longer sent; a check without members does not count. Only frozen models are served at their best weights
      (in the released code all are, by test rows). If all are frozen, nobody trains any more.
    - paper: before evaluation a client chooses on validation samples. The released code takes training samples.
    - ours: gate and local expert stop early on a real validation set; the released code uses its test set.
    - ours: experts have no dropout while a gate trains alone. In the released code they have it.
    - paper: all models are in the mixture. `drop_unused` (ours) leaves out experts that no participant has chosen by
      loss for ten rounds. The released code leaves out experts that no evaluated client picks. A model that was in
      use when it froze stays in it.
    - ours: the gate is a small MLP by default, and the local expert the network of the models. The paper's are
      convolutional networks of other widths (Table 1).

The transform `personalized` evaluates other things that clients make of the same models; the paper compares choice,
fine-tuning, ensembles and training alone. In the safe form a client chooses a model, and an anchor is mixed into it: a
client has too few validation samples to train a gate everywhere (docs/never-worse.md).
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import (
    NOT_POOLED,
    Served,
    answer_model,
    at_most_registered,
    find_model,
    init_models,
    predict_by_cluster,
    refuse_equal_start,
    step_models,
)
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Slotted, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, Flag, Fraction, ModelCount, Spelled, ingredient
from fedtide.learn import SGD, LocalTrainer, Losses, Server, Steps, Stepwise, Task, Train, Weighting, mean_losses
from fedtide.personal.client_networks import Networks
from fedtide.personal.ways import Choice, Mixture
from fedtide.transforms import Anchored, Personalized
from fedtide.transforms.personalized import with_way

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
class Sent:
    """Payload of participants: the models that train, and their numbers."""

    models: list[Weights]
    active: Tensor


@dataclass(frozen=True)
class State:
    """The models and the optimizer's memo of each.

    chosen: (J,) how often each was chosen by loss so far. last: (J,) the round of its last choice, if any, which moves
    along once it is frozen. active: (J,) mask of models still trained. best: the models at their lowest validation
    loss, None before a check; least: (J,) that loss, if any; stale: (J,) checks since. losses: (J, 2) sum of validation
    losses and their weight since the last check.
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
    cohort: Any = None


def aem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    exploration: Annotated[Exploration, Spelled] = Constant(),
    mixture: Annotated[Mixture, Spelled] = Mixture(),
    drop_unused: Flag = False,
    freeze: Freeze | None = None,
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
        mixture: how a client trains its gate and its local expert before evaluation.
        drop_unused: leave models that no client chooses by loss any more out of personalization.
        freeze: freezing of models that no longer improve; None means never.
    """
    if exploration == Constant(0.0):
        refuse_equal_start(task, clusters, ", or `exploration`", is_best_chosen=True)
    none = torch.zeros(clusters, dtype=torch.float64)

    def init(fleet: Fleet, rng: Rng) -> State:
        models = init_models(task, rng, clusters)
        return State(
            weights=models,
            server=tuple(map(server.init, models)),
            chosen=none,
            last=none,
            active=none == 0,
            best=(None,) * clusters,
            least=none,
            stale=none,
            losses=torch.zeros(clusters, 2, dtype=torch.float64),
            cohort=cohort.init(fleet),
        )

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        # Algorithm 3: the model with the lowest loss, or a random one.
        draw = rng.at("explore").numpy()
        explored = bool(draw.random() < exploration.probability(clusters, moment))
        models = payload.models
        place = int(draw.integers(len(models))) if explored else int((yield Losses(task, models, shard)).argmin())
        j, received = int(payload.active[place]), models[place]
        judged = validation(task, received, shard) if freeze else None
        # Algorithm 4: local training.
        fitted = yield Train(task, local, received, shard, moment, rng)
        if not fitted.steps:
            return None
        chosen = F.one_hot(torch.tensor(j), clusters).double()
        more: dict[str, Weighted | Slotted] = {"chosen": Weighted(chosen * (not explored), 1.0)}
        if judged is not None:
            more["val"] = Slotted({j: Weighted(judged)}, clusters)
        return answer_model(j, fitted.delta, fitted.loss, shard, clusters, weighting, **more)

    def as_served(payload: Any, memory: Any, answer: Answer) -> tuple[Served, None] | None:
        if not answer.total["chosen"].value.any():
            return None  # a client that explores has chosen no model
        j = answer.total["members"].value.argmax()
        place = int((payload.active == j).nonzero())
        return Served((payload.models[place],), j[None], 0, clusters), None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        active = state.active.nonzero().flatten()
        if not len(active):
            return state, {"active": 0}
        payload = Sent([state.weights[j] for j in active.tolist()], active)
        state, reply = take_part(cohort, fleet, state, rng, serve, payload)
        if reply.total is None:
            return state, {"active": len(active)}
        # Algorithm 1, lines 8 to 10.
        after = step_models(state, server, reply.total["delta"])
        chosen = reply.total["chosen"].value
        last = torch.where(chosen > 0, float(fleet.moment.round), state.last)
        # Nobody can choose a frozen model, which is not sent: it stays in use if it was when it froze.
        last = torch.where(~state.active & in_use(state), last.max(), last)
        losses = state.losses
        if "val" in reply.total:
            judged = [torch.zeros(2) if val is None else val.value for val in reply.total["val"]]
            losses = losses + torch.stack(judged)
        after = replace(after, chosen=state.chosen + chosen, last=last, losses=losses)
        # Lines 11 and 12.
        if freeze and (fleet.moment.round + 1) % freeze.check_every == 0:
            after = freeze_stale(state, after, freeze.patience)
        facts = {"loss": mean(reply.total)["loss"], "active": len(active), "members": reply.total["members"].value}
        return after, facts

    def serve(state: State, clients: Tensor) -> tuple[Served, None]:
        used = in_use(state)
        served = used.nonzero().flatten() if drop_unused and used.any() else torch.arange(clusters)
        models, usual = [state.weights[j] for j in served.tolist()], state.chosen[served].argmax()
        return Served(models, served, usual, clusters), None

    predict, adapt, check = predict_by_cluster(task), find_model(task), at_most_registered(clusters)
    algorithm = Algorithm("aem", init, {"train": train}, round, serve, predict, adapt, as_served, check)
    # As if no client explored, and no model were frozen or out of use.
    forward = {"train": clusters, "loss": clusters + 1}
    traits: Any = {"sends": (Sent, Served), "models": "clusters", "refuses": NOT_POOLED}
    traits |= {"personal": {"mixture": Mixture()}}
    choosing = with_cohort(algorithm, cohort, task, local, forward=forward, **traits)
    return replace(with_way(choosing, mixture, Networks(task), "mixture", clusters=clusters), unpersonalized=choosing)


def in_use(state: State) -> Tensor:
    """Return the mask (J,) of models that were chosen by loss in the last ten rounds."""
    return (state.chosen > 0) & (state.last > state.last.max() - IN_USE)


def freeze_stale(before: State, after: State, patience: int) -> State:
    """Update the state after a check: models without improvement for too long are reset to their best, and frozen."""
    summed, weight = after.losses.T
    value, checked = summed / weight.clamp(min=1e-12), after.active & (weight > 0)
    first = torch.tensor([model is None for model in after.best])
    gained = checked & (first | (value < after.least))
    stale = torch.where(gained, 0.0, after.stale + checked.double())
    # Participants evaluated the weights they had received, of which the last are kept.
    best = tuple(before.weights[j] if gained[j] else model for j, model in enumerate(after.best))
    frozen = after.active & (stale >= patience)
    weights = tuple(
        best_model if best_model and frozen[j] else model
        for j, (best_model, model) in enumerate(zip(best, after.weights, strict=True))
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


ENTRY = Entry(
    "aem", aem, "J models down, the update of one up", "clustered", helps=("groups", "meaning"),
    tells="which model it trained, unless sums are secure", keeps="nothing; its gate and expert never leave it",
    safe=Safe({}, {"drop_unused": True}, (Anchored(), Personalized(Choice()))),
)  # fmt: skip
