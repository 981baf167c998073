"""Fielding: clusters that follow drift; drifted clients move, and large drift re-clusters all clients.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, arXiv 2024
(2411.01580), Algorithms 1 to 3, section 2; Algorithm 4 of appendix A.

| symbol | meaning |
| --- | --- |
| `r_i` | last reported representation of client i: label distribution, embedding, gradient, or several |
| `c_k`, `w_k` | center and model of cluster k |
| `theta` | mean distance between centers |
| `tau` | largest movement of a center, as a fraction of theta |
| `M` | participants of a round in total |

    drifted clients report r_i;  each moves to argmin_k dist(r_i, c_k), centers held fixed            Algorithm 2
    c_k' = mean of its members' r_i
    if max_k dist(c_k', c_k) >= tau * theta:  cluster all r_i anew (Algorithm 3), K by the silhouette;
                                              w_k = mean over members of the model that each had
    else                                      c_k = c_k'
    M / K participants of each cluster train w_k; FedAvg within the cluster                           Algorithm 1

When to use it: clients are of a few kinds and change, some all the time, many at once now and then, and can report
their kind by a small vector. Label distributions detect label shift, embeddings input shift; if the meaning of labels
changes, only gradients detect it; `{ kind = "combined", parts = ["labels", "gradient"] }` detects both.

Variants: `reporters = "once"` with `trigger = { kind = "fraction", tau = inf }` is static clustering: a client joins
the nearest cluster at its first report and stays; centers follow those that join. `tau = inf` alone moves clients and
never re-clusters. Algorithm 4, the subject of the theory, is close to `clustering = { kind = "k-center", k = 4 }` with
`reassign = "all"` and `trigger = "adaptive"`: after a drift event every client goes to the nearest center, and if two
clients of one cluster are too far apart, k-center clustering starts over.

Choices:
    No code was found. A client reports if its representation is more than `drift_eps` away from its last report; no
    model is sent for that unless gradients are taken at the global one. A center without members stays where it is and
    counts neither for moves nor for the threshold. With a single cluster the next drift event always re-clusters.
    `drift_baseline = "last-event"` measures the movement of centers in this drift event alone, as in the paper, so that
    slow drift never triggers; "last-clustering" measures it since the last clustering. Models, running statistics and
    the optimizer's moments are mixed in proportion to the members' previous clusters. If a cluster is smaller than its
    share, all its members train, and the others get the rest. What M / K leaves over goes to the largest clusters, in
    every round: with fewer participants than clusters the smaller ones never train. That is `cohort = "uniform"`; the
    default takes the clients that the shift sends, whatever their cluster. Clients have equal weights within
    a cluster, as in the pseudo-code. A client that never reported trains with the largest cluster and is not counted as
    its member; before evaluation it finds its cluster by its own representation, as held-out clients do. With
    `trigger = "learned"` all reachable clients receive their cluster's model in every round and report its accuracy on
    their validation samples: a question that costs bytes, and as many seconds as a forward pass over the training
    samples. Under k-center clustering, too, centers are means of members, participants are drawn without replacement,
    and each takes one or more steps of local training. Algorithm 4 has a given threshold; here it is the adaptive one
    of appendix F.2. How far centers moved and theta are lengths: roots of distances that grow with the square, as those
    of embeddings and gradients. A third of a mean squared distance would be 58 % of the way between two centers, and a
    mass event moves them by about half. The length of combined representations is the sum of their lengths, each in its
    own unit.
    With one cluster participants are those that FedAvg with the same cohort has; with several, first as many of them as
    each cluster's share allows. With `reporters = "participants"` they are drawn before they move. `cohort = "nearest"`
    takes distances (its own `distance`) to the mean report of a cluster's reachable members.

    Our own: `trigger = "gain"`; `cluster_layer`; `pooling` (see `fedtide.multi.pooling`), by which clusters that are
    alike train one model; `min_silhouette` of k-means, below which there is one cluster; and `cohort = "arrivals"`, as
    pooling needs two participants in some cluster to learn how much chance does, and M / K of each may never give it.
    The paper's form is `pooling = false`, `clustering = "k-means"`, `cohort = "uniform"`: where clients are of no kinds
    its clusters lose to one model, as each has few samples. In ten small settings over five seeds it lost up to 12.0
    points to the best single model and gained up to 13.1, there with arrivals; the default lost 0.1 at most and gained
    up to 16.2 (recipe never-worse).

    If `cluster_layer` is not "*" clusters share all other layers. These move by the mean update of all clusters, in
    which that of a cluster counts for all of its members, whatever the cohort, times the mean weight of those that
    answered. With "none" all train one model, as in Table 3, where clusters are made by gradients of a global
    model and none trains.

    Combined representations are compared by the sum of the distances of their parts, each in units of its mean between
    two clients at the last clustering (of a thousand clients). A client uses the plain sum to decide whether it
    drifted, as it does not know these units.

    `reveal = "nothing"` is our own, too: clients find their clusters themselves, and the server sees sums alone. Then a
    client gets all K models, participants are drawn whatever their cluster, silhouettes and "gain" are of distances
    from centers, and clusters have `fewest` members (`fedtide.algorithms.fielding_by_sums`). With ten
    participants of forty clients, drawn by "uniform", a third of up to ten clusters has none, which costs accuracy;
    with `cohort = "in-turn"` both are level (0.0 ± 0.4 points over four worlds and five seeds, recipe
    fielding-by-sums). Two sums may differ by one client, whose representation is then their difference: only noise
    hides that.

    With `q` clusters aggregate as in q-FedAvg, weighted by the loss before training; `server` steps along the result.
    Computation of the server takes time on a clock of devices if `reassign_seconds` and `clustering_seconds` are set.
    The paper measured 2.0 s for moves and 15.6 s for a re-clustering of 5078 clients: 0.0004 and 0.003 for each client.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.fielding_by_sums import Nothing, Reports, Reveal, fielding_by_sums
from fedtide.algorithms.fielding_by_sums import State as StateOfSums
from fedtide.algorithms.qfedavg import FairTraining, fair_totals
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Flag, NonNegative, Spelled
from fedtide.core.errors import refused
from fedtide.core.ids import per_client
from fedtide.core.rng import Rng
from fedtide.core.types import Algorithm, Answer, Facts, Fleet, Memory, Moment, Payload, Shard, Slot, Timed, Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Pull, proximal
from fedtide.learn.training import Training
from fedtide.models.branched import WHOLE
from fedtide.multi.clusters import (
    NOTHING,
    accuracy_question,
    check_layer,
    mean_over_slots,
    mix_clusters,
    mix_models,
    pick_per_cluster,
    predict_by_cluster,
    serve_clusters,
    train_clusters,
)
from fedtide.multi.pooling import Evidence
from fedtide.multi.representation import Labels, Representation, report_question
from fedtide.parts.clusterer import Clusterer, Clustering, KMeans
from fedtide.parts.distance import Distance, means
from fedtide.parts.drift import (
    Adaptive,
    FixedFraction,
    Gain,
    Learned,
    Trigger,
    center_moves,
    event_of,
    has_val,
    heterogeneity,
    mixing_matrix,
    move_to_nearest,
    theta,
)
from fedtide.parts.weighting import Weighting

Triggers = Annotated[FixedFraction | Gain | Adaptive | Learned, Field(discriminator="kind")]


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, the reports of clients, and the clusters.

    reported: (registered, r) each client's last representation. cluster: (registered,) of each client, -1 before its
    first report. centers: (K, r) now; baseline: (K, r) at the last clustering; distance: with the scales of the last
    clustering. trigger, cohort: their memos. silhouette: the largest mean silhouette of the last clustering, None if
    its number of clusters was no choice. evidence: of `pooling`.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    reported: Tensor = field(metadata=per_client(new=0.0))
    cluster: Tensor = field(metadata=per_client(new=-1))
    centers: Tensor
    baseline: Tensor
    distance: Distance
    trigger: Any = None
    cohort: Any = None
    silhouette: float | None = None
    evidence: Evidence | None = None

    @property
    def known(self) -> Tensor:
        """Clients in a cluster, which are those that have reported."""
        return (self.cluster >= 0).nonzero().flatten()

    @property
    def members(self) -> Tensor:
        """Number of clients (K,) in each cluster; all clients count if none has reported yet."""
        known = self.cluster[self.known] if len(self.known) else torch.zeros_like(self.cluster)
        return torch.bincount(known, minlength=len(self.weights))

    @property
    def trains_with(self) -> Tensor:
        """Cluster (registered,) that each client trains with: its own, else the largest."""
        return torch.where(self.cluster < 0, self.members.argmax(), self.cluster)


def fielding(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    representation: Representation = Labels(),
    trigger: Annotated[Triggers, Spelled] = FixedFraction(),
    clustering: Annotated[Clusterer, Spelled] = KMeans(min_silhouette=0.15),
    cluster_layer: str = WHOLE,
    pooling: Flag = True,
    reassign: Literal["drifted", "all"] = "drifted",
    reporters: Literal["reachable", "participants", "once"] = "reachable",
    drift_baseline: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    mu: Pull = 0.0,
    q: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
    reassign_seconds: NonNegative = 0.0,
    clustering_seconds: NonNegative = 0.0,
    reveal: Reveal = Reports(),
) -> Algorithm[State] | Algorithm[StateOfSums]:
    """Clustered federated learning that follows drift.

    Sends a cluster's model down and its update up in sums; the server sees the representation of every client that
    drifted.

    Args:
        task: model and loss; `example` set, for label distributions.
        representation: representation that clients report, and its distance.
        trigger: condition for re-clustering all clients.
        clustering: clustering method; "k-center" is for a given number of clusters, and "k-means" by name, the paper's,
            finds clusters in any case.
        cluster_layer: the only layer in which the models of clusters differ, for example "head"; "*" for whole models;
            "none" trains one model for all, beside which clusters are made.
        pooling: draw the update of each cluster toward that of all, as far as chance sets them apart; clients then also
            send the squared length of their update in each layer. "false" is the paper, and needed with `q`.
        reassign: clients that move at a drift event: those that "drifted", or "all".
        reporters: clients that may report drift: all "reachable" ones, the round's "participants", or each client
            "once", at its first report.
        drift_baseline: start of the measured movement of centers.
        drift_eps: distance from the last report above which a representation is reported again.
        q: fairness within a cluster, as in q-FedAvg; 0 is the plain mean.
        cohort: selection of participants; "arrivals" are taken whatever their cluster, of others equally many of each
            cluster; the paper has "uniform".
        reassign_seconds: server seconds for each client that may move, on a clock of devices.
        clustering_seconds: server seconds for each client in a re-clustering.
        reveal: what the server sees of a client: its "representation", whenever it drifts; or "nothing", with which
            clients find their clusters themselves and only sums are sent (see `fedtide.algorithms.fielding_by_sums`).

    Raises:
        FedtideError: medians represent clusters of representations other than label distributions.
    """
    if clustering.center == "median" and representation.kind != "labels":
        raise refused("clustering.center", "median", f"'mean' with representation '{representation.kind}', no shares")
    if pooling and q:
        raise refused("pooling", True, f"false with q = {q:g}, whose mean is none of updates")
    if cluster_layer != NOTHING:
        check_layer(task, cluster_layer, "cluster_layer")
    term, totals = proximal(mu), fair_totals if q else None
    train = Training(task, local, weighting, term, squares=pooling)
    if q:
        train = FairTraining(task, local, weighting, term, q=q)
    if isinstance(reveal, Nothing):
        return fielding_by_sums(
            task, local, train, totals, representation, trigger, clustering, cluster_layer, pooling, reassign,
            reporters, drift_baseline, drift_eps, server, cohort, reassign_seconds, clustering_seconds, reveal,
        )  # fmt: skip
    represent = representation.of(task)
    average = partial(
        train_clusters, server=server, cohort=cohort, own_layer=cluster_layer, pooling=pooling, totals=totals
    )

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, count = task.init(rng), len(fleet.clients)
        reported, unknown = torch.zeros(count, 1, dtype=torch.float64), torch.full((count,), -1)
        state = State((weights,), (server.init(weights),), reported, unknown, reported[:1], reported[:1],
                      representation.distance_of(task), trigger.start(), cohort.init_unasked(fleet))  # fmt: skip
        state, drifted = heard(state, fleet, fleet.reachable)
        if not len(drifted):
            return state
        # Algorithm 1, line 1.
        return adopt(state, cluster_reports(state, clustering, rng.at("cluster")), cluster_layer)

    def heard(state: State, fleet: Fleet, clients: Tensor) -> tuple[State, Tensor]:
        """Record the reports of some clients; return also the clients (n,) that reported, as they drifted."""
        payload = {"model": mix_models(state.weights, state.members)} if representation.needs_model else {}
        reply = fleet.ask("report", clients, payload, reveal=("representation",)) if len(clients) else None
        if reply is None or not len(reply.clients):
            return state, clients[:0]
        state = with_reports(state, reply.clients, reply.rows["representation"])
        memo = cohort.record(state.cohort, reply.clients, reply.rows["representation"])
        return replace(state, cohort=memo), reply.clients

    def pick_participants(state: State, fleet: Fleet, rng: Rng) -> Tensor:
        """Pick M / K clients of each cluster (Algorithm 1, line 9)."""
        models, cluster = partial(serve, state), state.trains_with
        return pick_per_cluster(cohort, state.cohort, fleet, rng, models, cluster, len(state.weights))

    def round(state: State, fleet: Timed, rng: Rng) -> tuple[State, Facts]:
        participants = pick_participants(state, fleet, rng) if reporters == "participants" else None
        may = fleet.reachable if participants is None else participants
        if reporters == "once" and (len(state.weights) > 1 or clustering.k_max == 1):
            may = may[state.cluster[may] < 0]
        state, facts = handle_drift(state, fleet, may, rng.at("cluster"))  # Algorithm 1, line 4
        clients = pick_participants(state, fleet, rng) if participants is None else participants
        members = torch.bincount(state.trains_with, minlength=len(state.weights))
        # Algorithm 1, lines 10 to 15. In shared layers a cluster counts for all of its members, whatever the cohort.
        state, reply, trained = average(fleet, state, clients, state.trains_with[clients], members=members)
        if trigger.uses_accuracy and reply.total is not None:
            slot = state.trains_with[fleet.reachable]
            judged = fleet.ask("val", fleet.reachable, list(state.weights), slot=slot)
            facts["val"] = mean_over_slots(judged.total, "right")
            state = replace(state, trigger=trigger.record(state.trigger, facts["val"]))
        return state, {**trained, **facts}

    def handle_drift(state: State, fleet: Timed, clients: Tensor, rng: Rng) -> tuple[State, dict[str, Any]]:
        """Handle drift (Algorithm 2): reports, moves and, if these are not enough, a clustering of all clients."""
        state, drifted = heard(state, fleet, clients)
        facts: dict[str, Any] = {"moved": 0, "reclustered": 0}
        if len(drifted):
            movers = drifted if reassign == "drifted" else torch.cat([state.known, drifted]).unique()
            if len(state.weights) == 1 and clustering.k_max > 1 and trigger.splits_one:
                state = replace(state, trigger=trigger.after(state.trigger, True))
                state = adopt(state, cluster_reports(state, clustering, rng), cluster_layer)
                facts["reclustered"] = int(len(state.weights) > 1)
            else:
                state, facts = reassign_clients(state, movers, clustering, trigger, drift_baseline, rng, cluster_layer)
            if facts["reclustered"]:
                state = replace(state, cohort=cohort.renewed(state.cohort))
            facts["drifted"] = len(drifted)
            reclustered = facts["reclustered"] * len(state.known)
            fleet.add_server_time(reassign_seconds * len(movers) + clustering_seconds * reclustered)
        facts |= {"clusters": len(state.weights), "members": state.members}
        if state.silhouette is not None:
            facts["silhouette"] = state.silhouette
        if reporters != "once":  # else reports are old
            facts["spread"] = heterogeneity(state.reported[state.known], state.cluster[state.known], state.distance)
        return state, facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # A client that is not registered, or never reported, finds its cluster by itself, in `adapt`.
        cluster, more = state.trains_with, dict[str, Any]()
        if len(state.known):
            model = mix_models(state.weights, state.members) if representation.needs_model else None
            more = {"centers": state.centers, "filled": state.members > 0, "distance": state.distance, "at": model}
            cluster = state.cluster
        return serve_clusters(state.weights, cluster, clients, **more)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if "centers" not in payload or not len(shard.labels):
            return None
        vector, first = represent(payload["at"], shard)[None], torch.zeros(1, dtype=torch.int64)
        own = move_to_nearest(vector, first, first, payload["centers"], payload["distance"], payload["filled"])
        return Answer({}, memory={"found": own[0]})

    report, passes = report_question(task, representation, drift_eps), 3 * representation.passes
    made = Algorithm(
        "fielding", init, {"report": report, "train": train, "val": accuracy_question(task)}, round, serve,
        predict_by_cluster(task), adapt, ("representation",), check=has_val(trigger),
        unless_changed=() if representation.needs_model else ("report",),
        unmaskable="its server sees of each client that drifts a gradient" if representation.of_update else "",
    )  # fmt: skip
    asks = [question for question in cohort.asks if question not in cohort.recorded]
    return with_cohort(made, cohort, task, local, forward={"report": passes}, adapt=False, asks=asks)


def with_reports(state: State, clients: Tensor, reports: Tensor) -> State:
    """Record reports (n, r) of some clients; with a single cluster they join it at once."""
    reported = state.reported
    if reported.shape[1] != reports.shape[1]:
        reported = torch.zeros(len(reported), reports.shape[1], dtype=torch.float64)
        state = replace(state, centers=reported[:1], baseline=reported[:1])
    cluster = state.cluster if len(state.weights) > 1 else state.cluster.index_fill(0, clients, 0)
    return replace(state, reported=reported.index_copy(0, clients, reports), cluster=cluster)


def reassign_clients(
    state: State, movers: Tensor, clustering: Clusterer, trigger: Trigger, baseline: str, rng: Rng, layer: str = WHOLE
) -> tuple[State, dict[str, Any]]:
    """Move clients to the closest centers, update centers, and re-cluster if triggered (Algorithm 2 after reports)."""
    distance = state.distance
    label = move_to_nearest(state.reported, state.cluster, movers, state.centers, distance, state.members > 0)  # line 2
    moved = (state.cluster >= 0) & (label != state.cluster)
    known, reported = label >= 0, state.reported[label >= 0]
    filled = torch.bincount(label[known], minlength=len(state.weights)) > 0
    centers = means(reported, label[known], len(filled), state.centers, distance, clustering.center)  # line 3
    since = state.centers if baseline == "last-event" else state.baseline
    state = replace(state, cluster=label, centers=centers)
    anew = cache(lambda: cluster_reports(state, clustering, rng))
    event = event_of(since, centers, filled, reported, label[known], distance, lambda: anew().label)
    fired = clustering.k_max > 1 and trigger.fires(state.trigger, event)  # lines 4 and 5
    state = replace(state, trigger=trigger.after(state.trigger, fired))
    return adopt(state, anew(), layer) if fired else state, {
        "moved": int(moved.sum()),
        "reclustered": int(fired),
        "theta": theta(centers, filled, distance),
        "way": float(center_moves(since, centers, distance)[filled].max()),
    }


def cluster_reports(state: State, clustering: Clusterer, rng: Rng) -> Clustering:
    """Cluster the last reports of all clients (Algorithm 3)."""
    return clustering.fit(state.reported[state.known], state.distance, rng)


def adopt(state: State, found: Clustering, layer: str = WHOLE) -> State:
    """Adopt a clustering (Algorithm 2, lines 6 to 10); a new model is the mean of its members' old models."""
    known = state.known
    share = mixing_matrix(state.cluster[known], found.label, len(state.weights), found.k)
    silhouette = found.silhouette.get(found.k, max(found.silhouette.values(), default=None))
    label = state.cluster.index_copy(0, known, found.label)
    state = replace(mix_clusters(state, share, layer), cluster=label, silhouette=silhouette)
    return replace(state, centers=found.centers, baseline=found.centers, distance=found.distance)
