"""Fielding: clusters that follow drift; drifted clients move, and large drift re-clusters all clients.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, arXiv 2024
(2411.01580), Algorithms 1 to 3, section 2; Algorithm 4 of appendix A. With default options it follows Algorithms 1 to
3, except for the choices below.

| symbol | meaning |
| --- | --- |
| `r_i` | last reported representation of client i: label distribution, embedding, gradient, or several |
| `c_k`, `w_k` | center and model of cluster k |
| `theta` | mean distance between centers |
| `tau` | largest movement of a center, as a fraction of theta |
| `M` | participants of a round in total |

    for each client that drifted, which reports r_i:                                                  Algorithm 2
        it moves to argmin_k dist(r_i, c_k), and the centers of the clusters that it left and joined are recomputed
    if max_k dist(c_k now, c_k before) >= tau * theta:  cluster all r_i anew (Algorithm 3), K by the silhouette;
                                              w_k = mean over members of the model that each had
    M / K participants of each cluster train w_k; FedAvg within the cluster                           Algorithm 1

When to use it: clients are of a few kinds and change, and can report their kind by a small vector. Label distributions
detect label shift, embeddings input shift, and only gradients a change of what labels mean; "combined" detects several.
If the server must not see single clients, use fielding-by-sums.

Variants: `reporters = "once"` with `trigger = { kind = "fraction", tau = inf }` is static clustering. Algorithm 4 is
close to `clustering = { kind = "k-center", k = 4 }` with `reassign = "all"` and `trigger = "adaptive"`.

Choices:
    - paper: centers are recomputed after each move (line 3 of Algorithm 2), in the order of clients' numbers (ours).
      Section 2.2 says that they are held until all have moved. If they are held, Fielding with WSM has 86.1 ± 0.4 %
      in place of 81.5 ± 0.8 (fielding-aggregators, seeds 0 to 4). With FedProx it has 87.4 ± 0.4 in place of 87.2 ±
      0.4. The held runs are not kept.
    - ours: K is 2 to 10, and the silhouette is of 1,000 drawn clients if there are more. The paper names no bound.
    - paper: drift is handled before each round (appendix C). Algorithm 1 has R rounds between.
    - paper: `drift_baseline = "last-event"` measures movements in this drift event alone.
    - paper: clients have equal weights within a cluster. With `q` clusters aggregate as in q-FedAvg.
    - paper: with `cohort = "uniform"` each cluster has M / K participants. With "arrivals" it has those that arrive.
    - ours: embeddings are clustered by squared Euclidean distance, gradients by cosine. The paper has L1 for labels,
      and none for these. Centers are means under each distance, L1 too. The trigger compares roots of squared and
      cosine distances.
    - ours: a cluster smaller than its share trains whole. The rest of M / K goes to the largest clusters.
    - ours: a center without members stays where it is. With a single cluster the next event always re-clusters.
    - ours: running statistics and the optimizer's moments are mixed as models are.
    - ours: a client that never reported trains with the largest cluster, and is not counted as its member.

The safe form has one cluster if the best silhouette is below 0.15, and pools updates. Its default cohort is "arrivals"
(docs/never-worse.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.clusterer import Clusterer, Clustering, KMeans
from fedtide.clusters.distance import Distance, between, heterogeneity, means, renormalize, unit
from fedtide.clusters.representation import Labels, Representation, drifted_from
from fedtide.clusters.rounds import (
    accuracy_question,
    build_clustered,
    mean_over_slots,
    mix_clusters,
    mix_models,
    serve_clusters,
    train_clusters,
)
from fedtide.clusters.triggers import Adaptive, FixedFraction, Gain, Learned, Trigger, event_of, has_val, trigger_on
from fedtide.cohorts import Arrivals, Cohort, Nearest, Uniform
from fedtide.cohorts.selection import Known, Serve
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Shard,
    Slot,
    Weighted,
    Weights,
    Work,
)
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import NonNegative, Spelled
from fedtide.learn import SGD, FairTraining, LocalTrainer, Server, Task, Training, Weighting, fair_totals
from fedtide.transforms import Pooled

Triggers = Annotated[FixedFraction | Gain | Adaptive | Learned, Field(discriminator="kind")]


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, the reports of clients, and the clusters.

    reported: (registered, r) each client's last representation. cluster: (registered,) of each client, -1 before its
    first report. centers: (K, r) now; baseline: (K, r) at the last clustering; distance: with the scales of the last
    clustering. trigger, cohort: their memos. silhouette: the largest mean silhouette of the last clustering, None if
    its number of clusters was no choice.
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

    @property
    def clustered(self) -> Tensor:
        """Clients in a cluster, which are those that have reported."""
        return (self.cluster >= 0).nonzero().flatten()

    @property
    def members(self) -> Tensor:
        """Number of clients (K,) in each cluster; all clients count if none has reported yet."""
        labels = self.cluster[self.clustered] if len(self.clustered) else torch.zeros_like(self.cluster)
        return torch.bincount(labels, minlength=len(self.weights))

    @property
    def trains_with(self) -> Tensor:
        """Cluster (registered,) that each client trains with: its own, else the largest."""
        return torch.where(self.cluster < 0, self.members.argmax(), self.cluster)


@dataclass(frozen=True)
class Places:
    """Payload to find a cluster by: centers (K, r), the mask (K,) of those with members, and the model to report at."""

    centers: Tensor
    filled: Tensor
    distance: Distance
    at: Weights | None


def fielding(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    representation: Representation = Labels(),
    trigger: Annotated[Triggers, Spelled] = FixedFraction(),
    clustering: Annotated[Clusterer, Spelled] = KMeans(),
    reassign: Literal["drifted", "all"] = "drifted",
    reporters: Literal["reachable", "participants", "once"] = "reachable",
    drift_baseline: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    q: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Uniform(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Clustered federated learning that follows drift.

    Sends a cluster's model down and its update up in sums; the server sees the representation of every client that
    drifted.

    Args:
        task: model and loss; `example` set, for label distributions.
        representation: representation that clients report, and its distance.
        trigger: condition for re-clustering all clients.
        clustering: clustering method; "k-center" is for a given number of clusters.
        reassign: clients that move at a drift event: those that "drifted", or "all".
        reporters: clients that may report drift: all "reachable" ones, the round's "participants", or each client
            "once", at its first report.
        drift_baseline: start of the measured movement of centers.
        drift_eps: distance from the last report above which a representation is reported again.
        q: fairness within a cluster, as in q-FedAvg; 0 is the plain mean.
        cohort: selection of participants: "arrivals" are taken whatever their cluster, of others equally many of each
            cluster.
    """
    train = FairTraining(task, local, weighting, q=q) if q else Training(task, local, weighting)
    totals = fair_totals if q else None
    by_reports = isinstance(cohort, Nearest)  # it compares the representations that clients report anyway

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, count = task.init(rng), len(fleet.clients)
        none, unknown = torch.zeros(count, 1, dtype=torch.float64), torch.full((count,), -1)
        state = State(
            weights=(weights,),
            server=(server.init(weights),),
            reported=none,
            cluster=unknown,
            centers=none[:1],
            baseline=none[:1],
            distance=representation.distance_of(task),
            trigger=trigger.start(),
            cohort=None if by_reports else cohort.init(fleet),
        )
        state, drifted = ask_reports(state, fleet, fleet.reachable)
        if not len(drifted):
            return state
        with fleet.clustering:  # Algorithm 1, line 1
            return recluster(state, cluster_reports(state, clustering, rng.at("cluster")))

    def model_to_report(state: State) -> Weights | None:
        """Return the model for gradients: the mean over clients."""
        return mix_models(state.weights, state.members) if representation.needs_model else None

    def ask_reports(state: State, fleet: Fleet, clients: Tensor) -> tuple[State, Tensor]:
        """Record the reports of some clients; return also the clients (n,) that reported, because they drifted."""
        if not len(clients):
            return state, clients
        reply = fleet.ask("report", clients, model_to_report(state), reveal=("representation",))
        if not len(reply.clients):
            return state, reply.clients
        return with_reports(state, reply.clients, reply.rows["representation"]), reply.clients

    def pick_participants(state: State, fleet: Fleet, rng: Rng) -> Tensor:
        """Pick M / K clients of each cluster (Algorithm 1, line 9)."""
        models, cluster = partial(serve, state), state.trains_with
        memo = Known(state.reported, state.cluster >= 0) if by_reports else state.cohort
        return pick_per_cluster(cohort, memo, fleet, rng, models, cluster, len(state.weights))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        participants = pick_participants(state, fleet, rng) if reporters == "participants" else None
        may = fleet.reachable if participants is None else participants
        if reporters == "once" and (len(state.weights) > 1 or clustering.k_max == 1):
            may = may[state.cluster[may] < 0]
        state, facts = follow_drift(state, fleet, may, rng.at("cluster"))  # Algorithm 1, line 4
        clients = pick_participants(state, fleet, rng) if participants is None else participants
        # Algorithm 1, lines 10 to 15.
        cluster = state.trains_with[clients]
        sizes = torch.bincount(state.trains_with, minlength=len(state.weights))
        state, reply, trained = train_clusters(
            fleet, state, clients, cluster, server, cohort, totals=totals, sizes=sizes
        )
        if trigger.uses_accuracy and reply.total is not None:
            slot = state.trains_with[fleet.reachable]
            judged = fleet.ask("val", fleet.reachable, list(state.weights), slot=slot)
            facts["val"] = mean_over_slots(judged.total, "right")
            state = replace(state, trigger=trigger.record(state.trigger, facts["val"]))
        return state, {**trained, **facts}

    def follow_drift(state: State, fleet: Fleet, clients: Tensor, rng: Rng) -> tuple[State, dict[str, Any]]:
        """Let clients report drift, and handle it; one cluster is divided by any drift, if the trigger says so."""
        state, drifted = ask_reports(state, fleet, clients)
        facts: dict[str, Any] = {"moved": 0, "reclustered": 0}
        if len(drifted):
            movers = drifted if reassign == "drifted" else torch.cat([state.clustered, drifted]).unique()
            with fleet.clustering:
                if len(state.weights) == 1 and clustering.k_max > 1 and trigger.splits_one:
                    state = recluster(state, cluster_reports(state, clustering, rng))
                    state = replace(state, trigger=trigger.after(state.trigger, True))
                    facts["reclustered"] = int(len(state.weights) > 1)
                else:
                    state, facts = handle_drift(state, movers, clustering, trigger, drift_baseline, rng)
            if facts["reclustered"]:
                state = replace(state, cohort=cohort.renewed(state.cohort))
            facts["drifted"] = len(drifted)
        facts |= {"clusters": len(state.weights), "members": state.members}
        if state.silhouette is not None:
            facts["silhouette"] = state.silhouette
        if reporters != "once":  # else reports are old
            facts["spread"] = heterogeneity(
                state.reported[state.clustered], state.cluster[state.clustered], state.distance
            )
        return state, facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # A client that is not registered, or never reported, finds its cluster by itself, in `adapt`.
        if not len(state.clustered):
            return serve_clusters(state.weights, state.trains_with, clients)
        places = Places(state.centers, state.members > 0, state.distance, model_to_report(state))
        return serve_clusters(state.weights, state.cluster, clients, places=places)

    report, passes = report_question(task, representation, drift_eps), 3 * representation.passes
    works: dict[str, Work] = {"report": report, "train": train, "val": accuracy_question(task)}
    return build_clustered(
        "fielding",
        task,
        local,
        cohort,
        init,
        round,
        serve,
        works,
        find_nearest(task, representation),
        has_val(trigger),
        sends=(Places,),
        forward={"report": passes},
        asks=() if by_reports else cohort.asks,
        reveals=("representation",),
        unless_changed=() if representation.needs_model else ("report",),
        unmaskable="its server sees of each client that drifts a gradient" if representation.of_update else "",
    )


def with_reports(state: State, clients: Tensor, reports: Tensor) -> State:
    """Record reports (n, r) of some clients; with a single cluster they join it at once."""
    reported = state.reported
    if reported.shape[1] != reports.shape[1]:
        reported = torch.zeros(len(reported), reports.shape[1], dtype=torch.float64)
        state = replace(state, centers=reported[:1], baseline=reported[:1])
    cluster = state.cluster if len(state.weights) > 1 else state.cluster.index_fill(0, clients, 0)
    return replace(state, reported=reported.index_copy(0, clients, reports), cluster=cluster)


def handle_drift(
    state: State, drifted: Tensor, clustering: Clusterer, trigger: Trigger, baseline: str, rng: Rng
) -> tuple[State, dict[str, Any]]:
    """Handle drift (Algorithm 2): clients move to the closest centers; all are clustered anew if the trigger fires.

    Args:
        state: the state, with the reports of the clients that drifted.
        drifted: (n,) these clients, in ascending order.
        clustering: clusters all clients (Algorithm 3).
        trigger: tells whether centers moved too far.
        baseline: since when movements are measured: "last-event" or "last-clustering".
        rng: the key of the clustering.
    """
    distance, reported = state.distance, state.reported
    clusters = MovingCenters(reported, state.cluster, state.centers, distance)
    for i in drifted.tolist():  # line 1
        clusters.move(i, clusters.nearest(i))  # lines 2 and 3
    label, filled = clusters.label, clusters.counts > 0
    moved, reporters = (state.cluster >= 0) & (label != state.cluster), label >= 0
    # The same centers without the rounding of sums from which reports were taken out.
    centers = means(reported[reporters], label[reporters], len(clusters.centers), state.centers, distance)
    since = state.centers if baseline == "last-event" else state.baseline
    state = replace(state, cluster=label, centers=centers)
    anew = cache(lambda: cluster_reports(state, clustering, rng))
    event = event_of(since, centers, filled, reported[reporters], label[reporters], distance, lambda: anew().label)
    fired, memo, facts = trigger_on(event, trigger, state.trigger, clustering.k_max)  # lines 4 and 5
    state, facts = replace(state, trigger=memo), {"moved": int(moved.sum()), "reclustered": int(fired), **facts}
    return recluster(state, anew()) if fired else state, facts  # lines 6 to 10


def mixing_matrix(old_label: Tensor, new_label: Tensor, old_k: int, new_k: int) -> Tensor:
    """Return the mixing matrix A (new, old) float64 with rows that sum to one; new models are A times old models.

    A[k, l] is the share of members of new cluster k that were in old cluster l. So a new model is the mean of its
    members' old models. An empty new cluster takes the mean over all clients.

    >>> mixing_matrix(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]), 2, 2).round(decimals=2).tolist()
    [[0.67, 0.33], [0.0, 1.0]]
    """
    counts = torch.bincount(new_label * old_k + old_label, minlength=new_k * old_k).reshape(new_k, old_k).double()
    counts[counts.sum(1) == 0] = counts.sum(0)
    return counts / counts.sum(1, keepdim=True)


def recluster(state: State, new: Clustering) -> State:
    """Make new clusters (Algorithm 2, lines 6 to 10): the model of each is the mean of its members' old models."""
    clients = state.clustered
    share = mixing_matrix(state.cluster[clients], new.label, len(state.weights), new.k)
    silhouette = new.silhouette.get(new.k, max(new.silhouette.values(), default=None))
    label = state.cluster.index_copy(0, clients, new.label)
    state = replace(mix_clusters(state, share), cluster=label, silhouette=silhouette)
    return replace(state, centers=new.centers, baseline=new.centers, distance=new.distance)


def cluster_reports(state: State, clustering: Clusterer, rng: Rng) -> Clustering:
    """Cluster the last reports of all clients (Algorithm 3)."""
    return clustering.fit(state.reported[state.clustered], state.distance, rng)


def report_question(task: Task, representation: Representation, eps: float) -> Work:
    """Build the question "report": a client's representation, unless it is within `eps` of the last reported one.

    The payload is the model for the representation, if it needs one.
    """
    represent, distance = representation.of(task), representation.distance_of(task)

    def report(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard.labels):
            return None
        vector = represent(payload, shard)
        order = representation.draw_order(task, rng) if memory is None else memory["order"]
        vector = vector if order is None else vector[order]
        if memory is not None and not drifted_from(vector, memory["reported"], distance, eps):
            return None
        next_memory = {"reported": vector, "order": order}
        return Answer({"reports": Weighted(1.0)}, {"representation": vector}, memory=next_memory)

    return report


def find_nearest(task: Task, representation: Representation) -> Work:
    """Build `adapt`: a client without a cluster takes the nearest center with members."""
    represent = representation.of(task)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        places = payload.places
        if places is None or not len(shard.labels):
            return None
        far = between(represent(places.at, shard)[None], places.centers, places.distance)[0]
        return Answer({}, memory={"found": far.where(places.filled, torch.inf).argmin()})

    return adapt


def pick_per_cluster(
    cohort: Cohort, memo: Any, fleet: Fleet, rng: Rng, serve: Serve, cluster: Tensor, count: int
) -> Tensor:
    """Pick equally many participants from each cluster (clients,), sorted; for one cluster those of the cohort.

    Args:
        cohort: the selection of participants.
        memo: the cohort's memo.
        rng: the round's key.
        serve: models that clients would be evaluated with now.
        cluster: (registered,) the cluster of each client.
        count: number of clusters.
    """
    reachable = fleet.reachable
    members = [reachable[cluster[reachable] == k] for k in range(count)]
    wanted = cohort.asked(len(reachable))
    picked = [
        cohort.pick(memo, fleet, rng, serve, among, m)
        for among, m in zip(members, quotas([len(among) for among in members], wanted), strict=True)
    ]
    return torch.cat(picked).sort().values


def quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """Divide participants among clusters: equally, the rest to the largest; others fill the gap of a small cluster.

    >>> quotas([10, 2, 0, 5], 9)
    [4, 2, 0, 3]
    """
    out = [0] * len(sizes)
    order = sorted((k for k, size in enumerate(sizes) if size), key=lambda k: (-sizes[k], k))
    for place, k in enumerate(order):
        out[k] = min(wanted // len(order) + (place < wanted % len(order)), sizes[k])
    while (room := [k for k in order if out[k] < sizes[k]]) and sum(out) < wanted:
        for k in room[: wanted - sum(out)]:
            out[k] += 1
    return out


class MovingCenters:
    """Clusters whose members move one by one; the centers that a move concerns are recomputed at once.

    The cost of a move grows with the number of clusters, not of clients. An empty cluster keeps its
    center and is nobody's nearest.

    Args:
        x: (rows, d) the last report of every client.
        label: (rows,) int64, the cluster of each client, -1 for none.
        centers: (K, d), centers before.
        kind: the distance.

    >>> x, label = torch.tensor([[0.0], [4.0], [2.0], [9.0]]), torch.tensor([0, 0, 1, 1])
    >>> clusters = MovingCenters(x, label, torch.tensor([[2.0], [7.0]]), "l1")
    >>> clusters.nearest(2)
    0
    >>> clusters.move(2, 0)
    >>> clusters.label.tolist(), clusters.centers.flatten().tolist()
    ([0, 0, 0, 1], [2.0, 9.0])
    """

    def __init__(self, x: Tensor, label: Tensor, centers: Tensor, kind: Distance) -> None:
        self.x, self.label, self.centers, self.kind = x, label.clone(), centers.clone(), kind
        self.rows = (unit(x) if kind == "cosine" else x).double()
        in_cluster = label >= 0
        self.sums = torch.zeros(centers.shape, dtype=torch.float64).index_add_(
            0, label[in_cluster], self.rows[in_cluster]
        )
        self.counts = torch.bincount(label[in_cluster], minlength=len(centers))
        self.stale = set(range(len(centers)))  # reports are new, and the centers are those of the reports before

    def nearest(self, i: int) -> int:
        """Return the cluster with members whose center is nearest to client i; ties go to the first."""
        filled = self.counts.nonzero()[:, 0]
        return int(filled[between(self.x[i : i + 1], self.centers[filled], self.kind).argmin()])

    def move(self, i: int, new: int) -> None:
        """Move client i, and recompute the centers of the clusters that it left and joined, if those changed."""
        old = int(self.label[i])
        if new != old:
            self.label[i] = new
            for k, change in ((old, -1), (new, 1)) if old >= 0 else ((new, 1),):
                self.sums[k].add_(self.rows[i], alpha=change)
                self.counts[k] += change
                self.stale.add(k)
        for k in {old, new} & self.stale:
            self._recompute(k)
            self.stale.remove(k)

    def _recompute(self, k: int) -> None:
        if self.counts[k]:
            mean = (self.sums[k] / self.counts[k])[None]
            self.centers[k] = renormalize(mean, self.kind, self.centers[k : k + 1])[0]


ENTRY = Entry(
    "fielding", fielding, "a cluster's model down, its update up", "clustered", reveals=("representation",),
    keeps="its last report", helps=("labels", "groups", "drift"),
    exempt={"newcomers": "clients that join without a report count as members of the largest cluster"},
    safe=Safe({"clustering": KMeans(min_silhouette=0.15)}, {"cohort": Arrivals()}, (Pooled(),)),
)  # fmt: skip
