"""FEROMA: a model for each client, mixed from those of clients whose rows had a similar profile a round ago.

Li, Fenoglio, Gjoreski, Langheinrich: *Federated Learning with Profile Mapping under Distribution Shifts and Drifts*,
ICLR 2026 (arXiv 2602.07671). With default options it follows the released code, except for the choices below.

| symbol | meaning |
| --- | --- |
| `g` | model of FedAvg after `warmup` rounds, frozen |
| `p_i` | profile of client i: means and deviations of its features under `g`, over all rows and by label |
| `w_j`, `n_j` | model that client j trained in the round before, and its rows |
| `q_j` | profile of client j in the round before |
| `C` | number of classes; a profile has 2 (C + 1) groups of C numbers |

    warm-up     FedAvg
    then, in each round:
      1         client i sends p_i; the server scales each group of C numbers to 0..1 in the first round
      2         a_ij  proportional to  1 / (||p_i - q_j|| + 1e-8);   equal in the first of these rounds
                client i receives  sum_j n_j a_ij w_j / sum_j n_j a_ij,  and trains it
    newcomer    without labels: the w_j with the nearest label-free profile

When to use it: rows differ between clients and change over time, of kinds that nobody knows, and the server may see
single models and profiles. Training needs no client identity. The default evaluation does.

Choices:
    - paper: features are projected to C numbers by principal components of 200 uniform random points. There are fewer
      if the layer has fewer inputs.
    - released code: the least number and the range of each group are those of the first round's profiles.
    - ours: features are the inputs of `layer`, by default the head. The released code takes those of the first dense
      layer of LeNet-5. Its points follow the largest feature of all clients, which is sent. Ours lie between 0 and 2.
    - released code: a profile is of three random halves of the validation rows, here training rows if there are none.
      A label with fewer than two rows has -1 in place of its numbers.
    - released code: a profile is of the round's rows, and is asked before training. So the models that are mixed belong
      to the profiles of the round before.
    - ours: if only some clients participate, mixtures are of those that trained in the last round with an answer.
    - ours: mixtures weight clients by training samples, the released code by validation samples.
    - ours: the warm-up is `warmup` rounds of FedAvg; the released code averages twice in each of its five.
    - ours: a client that trained in the last round is evaluated with its model. All others are newcomers: the rows that
      are to be predicted make the label-free profile. Transforms that need one model for newcomers give them the mean
      model.
    - ours: by default drift at test time does not reach a client that trained in the last round. `judged_by =
      "profile"` chooses the nearest model for every client by the profile of its test rows, as the released code does
      in its final test. If the meaning of labels differs, that code adds the part by label, of 20 labeled rows of each
      class.
    - ours: the default of `local` is that of all methods.
    - ours: the noise of the released code is left out, because it bounds nothing. It is Laplace noise of scale
      range / (rows epsilon) on each number of a profile. The range is that of the client's own rows and random points.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.client_models import (
    APART,
    REVEALED,
    ClientModels,
    mix_client_models,
    no_models,
    reveal_model,
    shape_model,
    train_apart,
)
from fedtide.clusters.distance import between
from fedtide.clusters.profile import ProfileMap, Profiler, predict_by_profile, profile_question
from fedtide.clusters.rounds import Served, build_clustered, mean_over_slots, serve_clusters
from fedtide.cohorts import Cohort, Everyone, ask_to_train
from fedtide.core.base import Algorithm, Facts, Fleet, Weights, Work, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import add
from fedtide.fields.types import Whole
from fedtide.learn import LocalTrainer, Task, Training, Weighting

NEAREST = 1e-8
"""Distance that is added to each."""


@dataclass(frozen=True)
class State:
    """The model of the warm-up, which is frozen after it, and the models of single clients.

    trained: models of the participants of the last round; profiles: (n, q) of these; scales: (2, groups) least
    number and range of each group of numbers of the first profiles, or (2, 0); cohort: the cohort's memo.
    """

    weights: Weights
    trained: ClientModels
    profiles: Tensor
    scales: Tensor
    cohort: Any = None


def feroma(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    warmup: Whole = 5,
    layer: str = "head",
    halves: Whole = 3,
    cohort: Cohort = Everyone(),
    weighting: Weighting = "samples",
    judged_by: Literal["own", "profile"] = "own",
) -> Algorithm[State]:
    """Federated learning with profile mapping.

    Sends a model for each client down, and its update and its profile up; the server sees both of every client.

    Args:
        task: model and loss; `example` set.
        warmup: rounds of FedAvg, whose model is then frozen.
        layer: layer whose inputs are the features; "head" is the last one.
        halves: number of random halves of the rows in a profile; 0 takes all rows.
        judged_by: "own" evaluates a client that trained in the last round with its model; "profile" chooses the nearest
            model for every client.
    """
    profiler = Profiler(task, layer, halves, "feroma")

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, none = task.init(rng), profiler.nothing
        return State(weights, no_models(weights), none, none.new_zeros(2, 0), cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        if fleet.moment.round < warmup:
            state, reply = ask_to_train(cohort, fleet, state, clients, state.weights)
            if reply.total is None:
                return state, {}
            got = mean(reply.total)
            return replace(state, weights=add(state.weights, got["delta"])), {"loss": got["loss"]}
        asked = fleet.ask("profile", clients, state.weights, reveal=("profile",))
        if not len(asked.clients):
            return state, {}
        profiles = asked.rows["profile"]  # p_i
        if not state.scales.numel():
            state = replace(state, scales=profiler.scales_of(profiles))
        models = mixtures(state, profiles)
        place = torch.arange(len(asked.clients)).clamp(max=len(models) - 1)
        state, reply, trained = train_apart(fleet, state, asked.clients, models, place, cohort)
        if reply.total is None:
            return state, {}
        answered = torch.isin(asked.clients, trained.clients)
        return replace(state, trained=trained, profiles=profiles[answered]), {
            "loss": mean_over_slots(reply.total, "loss")
        }

    def mixtures(state: State, profiles: Tensor) -> list[Weights]:
        """Return the model for each of the profiles (n, q), or one for all while no client has trained one."""
        if not len(state.trained.clients):
            return [state.weights]
        now, before = (profiler.scale(part, state.scales) for part in (profiles, state.profiles))
        far = between(now, before, "l2")
        mixed = mix_client_models(state.trained, 1 / (far + NEAREST))  # a_ij
        return [shape_model(model, state.weights) for model in mixed]

    def serve(state: State, clients: Tensor) -> tuple[list[Served], Tensor]:
        if not len(state.trained.clients):
            return [Served((state.weights,), usual=0)], torch.zeros_like(clients)
        n, numbers = len(state.trained.clients), torch.cat([clients, state.trained.clients])
        position = torch.full((int(numbers.max()) + 1,), -1).index_copy(0, state.trained.clients, torch.arange(n))
        models = [shape_model(model, state.weights) for model in state.trained.models]
        places = ProfileMap(state.weights, profiler.scale(state.profiles, state.scales), state.scales)
        served, slot = serve_clusters(models, position, clients, places=profiler.label_free(places))
        mean_model = shape_model(mix_client_models(state.trained, torch.ones(1, n))[0], state.weights)
        match = replace(served[-1], models=(*models, mean_model), usual=n, numbers=None)
        return ([match], torch.zeros_like(slot)) if judged_by == "profile" else ([*served[:-1], match], slot)

    works: dict[str, Work] = {
        "profile": profile_question(profiler),
        "train": reveal_model(Training(task, local, weighting)),
    }
    traits: Any = {**APART, "sends": (ProfileMap,), "reveals": (*REVEALED, "profile")}
    algorithm = build_clustered("feroma", task, local, cohort, init, round, serve, works, **traits)
    predict = predict_by_profile(profiler)
    # Models are of clients and no clusters, so a choice among them is none to report.
    return replace(algorithm, predict=lambda *inputs: replace(predict(*inputs), choice=None))


ENTRY = Entry(
    "feroma", feroma, "a model of its own down, its update and its profile up", "clustered",
    reveals=(*REVEALED, "profile"), helps=("labels", "groups", "drift"),
)  # fmt: skip
