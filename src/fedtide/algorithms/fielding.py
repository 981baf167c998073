"""Fielding: clusters of clients that follow drift: drifted clients move, and all are clustered anew when need be.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, Algorithms 1 to
3, section 2; Algorithm 4 of appendix A.

| symbol | meaning |
| --- | --- |
| `r_i` | representation of client i as it last reported it: shares of labels, an embedding, a gradient, or several |
| `c_k`, `w_k` | center and model of cluster k |
| `theta` | mean distance between centers |
| `tau` | how far a center may move, as a share of theta |
| `M` | participants of a round in all |

    drifted clients report r_i;  each moves to argmin_k dist(r_i, c_k), centers held fixed            Algorithm 2
    c_k' = mean of its members' r_i
    if max_k dist(c_k', c_k) >= tau * theta:  cluster all r_i anew (Algorithm 3), K by the silhouette;
                                              w_k = mean over members of the model that each had
    else                                      c_k = c_k'
    M / K participants of each cluster train w_k; FedAvg within the cluster                           Algorithm 1

When to use it: clients are of a few kinds and change, some all the time, many at once now and then, and may say what
kind they are by a vector that costs little. Label shares tell shifts of labels, embeddings those of inputs; where the
meaning of labels changes, only gradients tell; `{ kind = "combined", parts = ["labels", "gradient"] }` tells both.

Variants: `reporters = "once"` with `trigger = { kind = "fraction", tau = inf }` is static clustering, in which a client
joins the nearest cluster when it is first heard of and stays; `tau = inf` alone moves clients and never clusters them
anew. Algorithm 4, which the theory is about, is near to `clustering = { kind = "k-center", k = 4 }` with `reassign =
"all"` and `trigger = "adaptive"`: after a drift event every client goes to the nearest center, and where two of one
cluster are too far apart k-center clustering begins anew.

Choices:
    No code was found. A client reports when its representation is more than `drift_eps` away from what it last
    reported, and no model travels for that unless gradients are taken at the global one. A center without members stays
    where it is and counts neither for moves nor for the threshold. With a single cluster the next drift event always
    clusters anew. `drift_baseline = "last-event"` measures how far centers moved in this drift event alone, as in the
    paper, so that slow creep never triggers; "last-clustering" measures it since clients were last clustered. Models
    are mixed in proportion to where members come from, running statistics and the optimizer's moments alike. Of
    clusters smaller than their share all members train, and the others get the rest. `cohort = "arrivals"` takes those
    that the shift sends, whatever their cluster. Clients weigh alike within a cluster, as in the pseudo-code. A client
    that never reported trains with the largest cluster and counts for none; it finds its cluster by its own
    representation before it is judged, as held-out ones do. With `trigger = "learned"` all reachable clients receive
    their cluster's model in every round and say how often it is right on their validation rows: a question that costs
    bytes, and as many seconds as a look at the training rows. Centers are means of members under k-center clustering,
    too, and participants are drawn without replacement, one step or more of local training each; the threshold of
    Algorithm 4, which is given, is that of appendix F.2, which adapts. Squared distances and cosines, which embeddings
    and gradients are compared by, are compared with tau theta as they are: a third of theta is 58 % of the way between
    two centers. With `reporters = "participants"` these are drawn before they move. `cohort = "nearest"` takes the mean
    of what a cluster's reachable members reported for its center, and L1.

    Combined representations are compared by the sum of the distances of their parts, each in units of its mean between
    two clients when all were clustered last (of a thousand clients). A client judges by the plain sum whether it
    drifted, as it does not know these.

    With `q` clusters aggregate as q-FedAvg does, which weighs by the loss before training; `server` steps along that.
    What the server computes takes time on a clock of devices where `reassign_seconds` and `clustering_seconds` say so.
    The paper measured 2.0 s for moves and 15.6 s for a re-clustering of 5078 clients: 0.0004 and 0.003 for each client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.qfedavg import fairly
from fedtide.cohorts import Cohort, Nearest, Uniform
from fedtide.cohorts.draw import silent
from fedtide.core.config_types import NonNegative, Spelled
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Holdings,
    Memory,
    Moment,
    Payload,
    Shard,
    Slot,
    Timed,
    Weights,
    Work,
)
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.learn.training import Training
from fedtide.multi.clusters import by_given_model, given, mixed, picked_per_cluster, train_clusters, validating
from fedtide.multi.representation import Labels, Representation, has_labels, reporting
from fedtide.parts.distance import Distance, means
from fedtide.parts.drift import (
    Adaptive,
    Event,
    Fraction,
    Learned,
    Trigger,
    heterogeneity,
    moves,
    shifted,
    theta,
    transfer,
)
from fedtide.parts.recluster import Clusterer, KMeans
from fedtide.parts.weighting import Weighting

Triggers = Annotated[Fraction | Adaptive | Learned, Field(discriminator="kind")]


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, what clients reported, and the clusters.

    reported: (registered, r) each client's last representation. cluster: (registered,) of each client, -1 before it
    ever reported. centers: (K, r) now; baseline: (K, r) when clients were last clustered; distance: in the units of
    then. trigger, cohort: their memos.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    reported: Tensor
    cluster: Tensor
    centers: Tensor
    baseline: Tensor
    distance: Distance
    trigger: Any = None
    cohort: Any = None

    @property
    def known(self) -> Tensor:
        """The clients that are in a cluster, as they have reported."""
        return (self.cluster >= 0).nonzero().flatten()

    @property
    def members(self) -> Tensor:
        """How many clients (K,) each cluster has; all, where none has reported yet."""
        known = self.cluster[self.known] if len(self.known) else torch.zeros_like(self.cluster)
        return torch.bincount(known, minlength=len(self.weights))

    @property
    def trains_with(self) -> Tensor:
        """The cluster (registered,) that each client trains with: its own, else the largest."""
        return torch.where(self.cluster < 0, self.members.argmax(), self.cluster)


def fielding(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    representation: Representation = Labels(),
    trigger: Annotated[Triggers, Spelled] = Fraction(),
    clustering: Annotated[Clusterer, Spelled] = KMeans(),
    reassign: Literal["drifted", "all"] = "drifted",
    reporters: Literal["reachable", "participants", "once"] = "reachable",
    drift_baseline: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    mu: NonNegative = 0.0,
    q: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Uniform(),
    weighting: Weighting = "uniform",
    reassign_seconds: NonNegative = 0.0,
    clustering_seconds: NonNegative = 0.0,
) -> Algorithm:
    """Clustered federated learning that follows drift.

    Sends a cluster's model down and its update up in sums; the server sees the representation of every client that
    drifted.

    Args:
        task: model and loss; `example` set, for label shares.
        local: local training.
        representation: what clients report, and how it is compared.
        trigger: when all clients are clustered anew.
        clustering: how; "k-center" is for a number of clusters that is given.
        reassign: which clients move at a drift event: those that "drifted", or "all".
        reporters: which clients may report drift: all "reachable" ones, the round's "participants", or each "once",
            when it is first heard of.
        drift_baseline: since when a center's way is measured.
        drift_eps: how far a representation must be from the last report to be reported again.
        mu: pull of every client towards the model that it received, as FedProx.
        q: fairness within a cluster, as q-FedAvg; 0 is the plain mean.
        server: what the server does with a cluster's mean update.
        cohort: who is asked, as many of each cluster; "arrivals" are as they come, whatever their cluster.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
        reassign_seconds: seconds of the server for each client that may move, on a clock of devices.
        clustering_seconds: seconds of the server for each client that is clustered anew.

    Raises:
        FedtideError: clusters are to be represented by medians of what are no shares.
    """
    if clustering.center == "median" and representation.kind != "labels":
        raise refused("clustering.center", "median", f"'mean' with representation '{representation.kind}', no shares")
    represent = representation.of(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, count = task.init(rng), len(fleet.clients)
        reported, unknown = torch.zeros(count, 1, dtype=torch.float64), torch.full((count,), -1)
        memo = silent(count, 0) if isinstance(cohort, Nearest) else cohort.init(fleet)
        state = State((weights,), (server.init(weights),), reported, unknown, reported[:1], reported[:1],
                      representation.compared(task), trigger.start(), memo)  # fmt: skip
        state, drifted = heard(state, fleet, fleet.reachable)
        return clustered(state, clustering, rng.at("cluster")) if len(drifted) else state  # Algorithm 1, line 1

    def heard(state: State, fleet: Fleet, clients: Tensor) -> tuple[State, Tensor]:
        """The state with what some clients report now, and which of them (n,) did: those that drifted."""
        payload = {"model": mixed(state.weights, state.members)} if representation.follows else {}
        reply = fleet.ask("report", clients, payload, reveal=("representation",)) if len(clients) else None
        if reply is None or not len(reply.clients):
            return state, clients[:0]
        state = with_reports(state, reply.clients, reply.rows["representation"])
        if isinstance(cohort, Nearest):  # near by what clients report, which need not be shares of labels
            memo = cohort.told(state.cohort, reply.clients, reply.rows["representation"])
            state = replace(state, cohort=memo)
        return state, reply.clients

    def sampled(state: State, fleet: Fleet, rng: Rng) -> Tensor:
        """Algorithm 1, line 9: M / K clients of each cluster."""
        served = partial(serve, state)
        return picked_per_cluster(cohort, state.cohort, fleet, rng, served, state.trains_with, len(state.weights))

    def round(state: State, fleet: Timed, rng: Rng) -> tuple[State, Facts]:
        participants = sampled(state, fleet, rng) if reporters == "participants" else None
        may = fleet.reachable if participants is None else participants
        if reporters == "once" and (len(state.weights) > 1 or clustering.k_max == 1):
            may = may[state.cluster[may] < 0]
        state, facts = handle_drift(state, fleet, may, rng.at("cluster"))  # Algorithm 1, line 4
        clients = sampled(state, fleet, rng) if participants is None else participants
        cluster, totals = state.trains_with[clients], fairly if q else None
        # Algorithm 1, lines 10 to 15.
        state, reply, trained = train_clusters(fleet, state, clients, cluster, server, cohort, totals=totals)
        if trigger.listens and reply.total is not None:
            facts["val"] = accuracy = validation_accuracy(state, fleet)
            state = replace(state, trigger=trigger.noted(state.trigger, accuracy))
        return state, {**trained, **facts}

    def handle_drift(state: State, fleet: Timed, clients: Tensor, rng: Rng) -> tuple[State, dict[str, Any]]:
        """Algorithm 2: reports, moves and, where these are not enough, a clustering of all clients."""
        state, drifted = heard(state, fleet, clients)
        facts: dict[str, Any] = {"moved": 0, "reclustered": 0}
        if len(drifted):
            movers = drifted if reassign == "drifted" else torch.cat([state.known, drifted]).unique()
            if len(state.weights) == 1 and clustering.k_max > 1:
                state = clustered(state, clustering, rng)
                facts["reclustered"] = int(len(state.weights) > 1)
            else:
                state, facts = reassigned(state, movers, clustering, trigger, drift_baseline, rng)
            facts["drifted"] = len(drifted)
            fleet.spend(reassign_seconds * len(movers) + clustering_seconds * facts["reclustered"] * len(state.known))
        facts |= {"clusters": len(state.weights), "members": state.members}
        if reporters != "once":  # else what clients reported is from long ago
            facts["spread"] = heterogeneity(state.reported[state.known], state.cluster[state.known], state.distance)
        return state, facts

    def validation_accuracy(state: State, fleet: Fleet) -> float:
        """How often clusters' models are right on the validation rows of all reachable clients."""
        slot = state.trains_with[fleet.reachable]
        totals = fleet.ask("val", fleet.reachable, list(state.weights), slot=slot).total or ()
        right = [total["right"] for total in totals if total is not None]
        rows = sum(each.weight for each in right)
        return sum(float(each.value) for each in right) / rows if rows else math.nan

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # A client that is not registered, or never reported, finds its cluster by itself, in `adapt`.
        cluster, more = state.trains_with, dict[str, Any]()
        if len(state.known):
            model = mixed(state.weights, state.members) if representation.follows else None
            more = {"centers": state.centers, "filled": state.members > 0, "distance": state.distance, "at": model}
            cluster = state.cluster
        every = torch.arange(len(state.weights))
        return given(state.weights, cluster, clients, every, int(state.members.argmax()), **more)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if "centers" not in payload or not has_labels(shard):
            return None
        vector, first = represent(payload["at"], shard)[None], torch.zeros(1, dtype=torch.int64)
        own = moves(vector, first, first, payload["centers"], payload["distance"], payload["filled"])
        return Answer({}, memory={"found": own[0]})

    def check(held: Holdings) -> None:
        if trigger.listens and not held.has_val:
            allowed = "data.split.val above 0, as it scores thresholds on validation rows; or 'fraction', 'adaptive'"
            raise refused("trigger", trigger.kind, allowed)

    train = Training(task, local, weighting, Proximal(mu) if mu else None, q=q or None)
    works: dict[str, Work] = {"report": reporting(task, representation, drift_eps), "train": train}
    if trigger.listens:
        works["val"] = validating(task)
    made = Algorithm(
        "fielding",
        init,
        works,
        round,
        serve,
        by_given_model(task),
        adapt=adapt,
        reveals=("representation",),
        effort=costing(local, {"train": train.looks, "report": 3 * representation.passes}),
        check=check,
    )
    return with_cohort(made, cohort, task, local)


def with_reports(state: State, clients: Tensor, reports: Tensor) -> State:
    """The state with what some clients report (n, r); in a single cluster they are at once."""
    reported = state.reported
    if reported.shape[1] != reports.shape[1]:
        reported = torch.zeros(len(reported), reports.shape[1], dtype=torch.float64)
        state = replace(state, centers=reported[:1], baseline=reported[:1])
    cluster = state.cluster if len(state.weights) > 1 else state.cluster.index_fill(0, clients, 0)
    return replace(state, reported=reported.index_copy(0, clients, reports), cluster=cluster)


def reassigned(
    state: State, movers: Tensor, clustering: Clusterer, trigger: Trigger, baseline: str, rng: Rng
) -> tuple[State, dict[str, Any]]:
    """Algorithm 2 but for the reports: moves to the closest centers, new centers, and whether that is enough."""
    distance = state.distance
    cluster = moves(state.reported, state.cluster, movers, state.centers, distance, state.members > 0)  # line 2
    moved = (state.cluster >= 0) & (cluster != state.cluster)
    known, reported = cluster >= 0, state.reported[cluster >= 0]
    filled = torch.bincount(cluster[known], minlength=len(state.weights)) > 0
    centers = means(reported, cluster[known], len(filled), state.centers, distance, clustering.center)  # line 3
    since = state.centers if baseline == "last-event" else state.baseline
    fired = clustering.k_max > 1 and trigger.fires(
        state.trigger, Event(since, centers, filled, reported, cluster[known], distance)
    )  # lines 4 and 5
    state = replace(state, cluster=cluster, centers=centers, trigger=trigger.after(state.trigger, fired))
    return clustered(state, clustering, rng) if fired else state, {
        "moved": int(moved.sum()),
        "reclustered": int(fired),
        "theta": theta(centers, filled, distance),
        "way": float(shifted(since, centers, distance)[filled].max()),
    }


def clustered(state: State, clustering: Clusterer, rng: Rng) -> State:
    """Algorithm 3, and lines 6 to 10 of Algorithm 2: a cluster's model is the mean of those that its members had."""
    known = state.known
    found = clustering.fit(state.reported[known], state.distance, rng)
    share = transfer(state.cluster[known], found.label, len(state.weights), found.k)
    weights, server = (tuple(mixed(held, row) for row in share) for held in (state.weights, state.server))
    cluster = state.cluster.index_copy(0, known, found.label)
    after = replace(state, weights=weights, server=server, cluster=cluster, distance=found.distance)
    return replace(after, centers=found.centers, baseline=found.centers)
