"""FLUX-like: clients in clusters by the density of their profiles, made once, and a model for each cluster.

After Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski: *FLUX: Efficient Descriptor-Driven Clustered Federated
Learning under Arbitrary Distribution Shifts*, NeurIPS 2025 (arXiv 2511.22305). It is named so because profiles are
those of FEROMA, its successor, and not all of the paper was at hand.

| symbol | meaning |
| --- | --- |
| `g` | model of FedAvg after `warmup` rounds, frozen |
| `p_i` | profile of client i under `g`, its groups of numbers scaled |
| `d_i` | distance of `p_i` from the nearest other profile |

    warm-up     FedAvg
    once        each client sends p_i;   eps = eps_scale * (elbow of the sorted d_i)
                clusters = DBSCAN of the p_i, with two clients within eps;   all others are clusters of one
                each cluster begins with g
    then        FedAvg inside each cluster
    newcomer    joins the nearest mean profile; without labels by the label-free part

When to use it: clients are of an unknown number of kinds that stay as they are, and the server may see profiles. Models
come from sums. Clusters are never made again: with drift take FEROMA or Fielding.

Choices:
    - released code: eps is the distance at the elbow, and clients in no cluster get a model of their own.
    - released code: each group of numbers of a profile is scaled by its least number and its range when clusters are
      made.
    - ours: the elbow is the point farthest below the line between the ends of the sorted distances.
    - ours: the warm-up has `warmup` rounds, as in FEROMA. The released code ends it when accuracy rises by less than
      6 points in a round, from the third round on.
    - ours: a profile is of validation rows, or of training rows if there are none. The released code takes
      training rows.
    - ours: profiles are those of FEROMA in their layer and points, without noise.
    - ours: all reachable clients are profiled at once. A participant without a cluster is profiled when it comes, and
      joins the nearest mean profile. Without rows it does not train.
    - paper: clients without a cluster are evaluated with the model whose label-free part is nearest to that of the
      rows that are to be predicted.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.clusterer import dbscan
from fedtide.clusters.distance import between
from fedtide.clusters.profile import ProfileMap, Profiler, predict_by_profile, profile_question
from fedtide.clusters.rounds import build_clustered, serve_clusters, train_clusters
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Payload, Slot, Weights, Work
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import Positive, Whole
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting


@dataclass(frozen=True)
class State:
    """The clusters' models, the optimizer's memo of each, and the clusters; there is one model before they are made.

    cluster: (registered,) of each client, -1 for none; places: g, the mean scaled profiles (K, q), and their scales;
    cohort: the cohort's memo.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    cluster: Tensor = field(metadata=per_client(new=-1))
    places: ProfileMap | None = None
    cohort: Any = None


def flux_like(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    warmup: Whole = 5,
    layer: str = "head",
    eps_scale: Positive = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated averaging in clusters by the density of profiles.

    Sends a cluster's model down and its update up in sums; the server sees one profile of each client.

    Args:
        task: model and loss; `example` set.
        warmup: rounds of FedAvg before profiles are asked.
        layer: layer whose inputs are the features; "head" is the last one.
        eps_scale: factor on the distance of neighbors.
    """
    profiler = Profiler(task, layer, key="flux-like")

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, nobody = task.init(rng), torch.full((len(fleet.clients),), -1)
        return State((weights,), (server.init(weights),), nobody, cohort=cohort.init(fleet))

    def make_clusters(state: State, fleet: Fleet) -> State:
        """Cluster all reachable clients; unchanged if none answers."""
        reply = fleet.ask("profile", fleet.reachable, state.weights[0], reveal=("profile",))
        if not len(reply.clients):
            return state
        with fleet.clustering:
            scales = profiler.scales_of(reply.rows["profile"])
            profiles = profiler.scale(reply.rows["profile"], scales)
            label = density_groups(profiles, eps_scale)
        count = int(label.max()) + 1
        centers = torch.stack([profiles[label == k].mean(0) for k in range(count)])
        places = ProfileMap(state.weights[0], centers, scales)
        cluster = state.cluster.index_copy(0, reply.clients, label)
        return State(state.weights * count, state.server * count, cluster, places, cohort.renewed(state.cohort))

    def place(state: State, places: ProfileMap, fleet: Fleet, clients: Tensor) -> State:
        """Let newcomers among the participants join the clusters with the nearest mean profiles."""
        late = clients[state.cluster[clients] < 0]
        reply = fleet.ask("profile", late, places.extractor, reveal=("profile",)) if len(late) else None
        if reply is None or not len(reply.clients):
            return state
        with fleet.clustering:
            nearest = between(profiler.scale(reply.rows["profile"], places.scales), places.profiles, "l2").argmin(1)
        return replace(state, cluster=state.cluster.index_copy(0, reply.clients, nearest))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        if fleet.moment.round >= warmup and state.places is None:
            state = make_clusters(state, fleet)
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        if state.places is not None:
            state = place(state, state.places, fleet, clients)
            clients = clients[state.cluster[clients] >= 0]
        state, _, facts = train_clusters(fleet, state, clients, state.cluster[clients].clamp(min=0), server, cohort)
        return state, {**facts, "clusters": len(state.weights)}

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        places = None if state.places is None else profiler.label_free(state.places)
        return serve_clusters(state.weights, state.cluster, clients, places=places)

    works: dict[str, Work] = {"profile": profile_question(profiler), "train": Training(task, local, weighting)}
    traits: Any = {"sends": (ProfileMap,), "reveals": ("profile",)}
    algorithm = build_clustered("flux-like", task, local, cohort, init, round, serve, works, **traits)
    return replace(algorithm, predict=predict_by_profile(profiler))


def elbow(values: Tensor) -> float:
    """Return the value at the elbow of the sorted curve, the farthest below the line between its ends.

    Satopää, Albrecht, Irwin, Raghavan: *Finding a "Kneedle" in a Haystack*, ICDCS Workshops 2011, without its
    smoothing. A straight line has its elbow at the end, because ties go to the last.

    >>> elbow(torch.tensor([0.3, 0.1, 4.0, 0.2])), elbow(torch.tensor([1.0, 1.0]))
    (0.30000001192092896, 1.0)
    """
    curve = values.sort().values
    line = torch.linspace(float(curve[0]), float(curve[-1]), len(curve), dtype=curve.dtype)
    below = line - curve
    return float(curve[int((below >= below.max()).nonzero()[-1])])


def density_groups(x: Tensor, eps_scale: float = 1.0) -> Tensor:
    """Return the cluster (rows,) of each row by density; rows in no cluster are clusters of one.

    Neighbors are at most as far apart as the elbow of the distances of rows from their nearest ones, times `eps_scale`.

    >>> density_groups(torch.tensor([[0.0], [5.0], [0.1], [9.0], [0.2]])).tolist()
    [0, 1, 0, 2, 0]
    """
    far = between(x, x, "l2")
    nearest = far.clone().fill_diagonal_(torch.inf).min(1).values
    label = dbscan(far, elbow(nearest) * eps_scale if len(x) > 1 else 0.0)
    single = (label < 0).nonzero().flatten()
    return label.index_copy(0, single, torch.arange(len(single)) + int(label.max()) + 1)


ENTRY = Entry(
    "flux-like", flux_like, "weights of a cluster down, update up", "clustered", reveals=("profile",),
    tells="its cluster", helps=("labels", "groups"),
)  # fmt: skip
