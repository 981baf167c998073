"""Fielding by sums: the server moves, counts and clusters clients without seeing what any of them reports. Our own.

After Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*,
arXiv 2024. With default options it pools no updates, and follows no paper. Clients get the K centers, find the nearest
one themselves and send sums: what they count for in each cluster, and nothing that names them.

| symbol | meaning |
| --- | --- |
| `r_i`, `k_i` | representation of client i and its cluster, which it keeps to itself |
| `c_k`, `w_k` | center and model of cluster k |
| `m` | `fewest` clients whose sum may be asked for |

    all reachable clients: r_i where it drifted, k_i = argmin_k dist(r_i, c_k);   sum of [k_i = k], how many drifted
    if any drifted:   c_k' = sum of [k_i = k] r_i / sum of [k_i = k]              where k has m members or more
    if max_k dist(c_k', c_k) >= tau * theta, or new clusters are tighter by a tenth:
                      k-means by sums (`fedtide.clusters.kmeans_by_sums`), K by a silhouette of sums;
                      w_k = mean over members of the model that each had, by the sum of [k_i = k] [was in l]
    participants train w_k of their own cluster and send the update in the sum of that cluster

When to use it: as Fielding, if the server must see no single client.

Choices:
    - ours: all of it. Fielding's server sees the report of every client that drifted.
    - ours: participants are drawn whatever their cluster, M of N clients. With `cohort = "in-turn"` each cluster trains
      with all of its members in every lap.
    - ours: each participant gets all K models and sends one update into one of K sums. Only secure sums hide which.
    - ours: with `fewest_updates` clusters with fewer participants share a sum.
    - ours: all reachable clients answer in every round with K + 3 numbers; the server stays idle unless some drifted.
    - ours: a cluster with fewer than `fewest` members is closed. A cluster without any can be found again.
    - ours: centers are of the clients that can be reached at the moment. Sums of two rounds may
      differ by one client: nothing hides that here, and noise is refused because clients are asked before round 0.
    - ours: the first centers come of no client: the mean of all is split again and again, along what varies most.
    - ours: all that moved are taken at once. All clients count for the silhouette.

The safe form is that of Fielding: one cluster if the best silhouette is below 0.15, and pooled updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.clusterer import KMeans
from fedtide.clusters.distance import Distance, between
from fedtide.clusters.kmeans_by_sums import (
    Cells,
    FoundBySums,
    Groups,
    Sets,
    cluster_by_sums,
    divide_sums,
    group_questions,
    nearest,
    summed,
)
from fedtide.clusters.representation import Labels, Represent, Representation, drifted_from
from fedtide.clusters.rounds import accuracy_question, mix_clusters, mix_models, predict_by_cluster, step_models
from fedtide.clusters.triggers import Event, FixedFraction, Gain, Learned, has_val, trigger_on
from fedtide.cohorts import Arrivals, Cohort, ask_to_train, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Notes, Shard, Slotted, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, NonNegative, Spelled
from fedtide.learn import SGD, FairTraining, LocalTrainer, Server, Task, Training, Weighting, fair_totals
from fedtide.transforms import Pooled

Triggers = Annotated[FixedFraction | Gain | Learned, Field(discriminator="kind")]

Own = Callable[[Any, Any, Shard], int]
"""Cluster of a client: (what it needs to find it, its memory, its samples) -> number."""


@dataclass(frozen=True)
class Sent:
    """Payload of clients: the centers to find its cluster by, models, and the number of each cluster's sum.

    centers: (K, d). open, full: (K,) clusters that a client may take, and those with others in them. made: number of
    clusterings so far. usual: cluster of a client without samples. at: model for the representation. again: whether it
    may report once more. numbers, count: none, because all models are sent.
    """

    centers: Tensor
    open: Tensor
    full: Tensor
    made: int
    usual: int | Tensor
    distance: Distance
    at: Weights | None
    models: Sequence[Weights] = ()
    slots: Tensor | None = None
    again: bool | None = None
    numbers: None = None
    count: None = None


@dataclass(frozen=True)
class New:
    """A clustering that is new, and what the client needs to tell which cluster it leaves."""

    centers: Tensor
    distance: Distance
    made: int
    old: Sent


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, and the clusters.

    centers: (K, d) now; baseline: (K, d) at the last clustering; members: (K,) number of clients that were nearest to
    each when they were last counted; made: number of clusterings so far, by which a client knows whether it has heard
    of the last; distance: with the scales of the last clustering. trigger, cohort: their memos. silhouette: of the last
    clustering, None if its number of clusters was no choice.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    centers: Tensor
    baseline: Tensor
    members: Tensor
    made: int
    distance: Distance
    trigger: Any = None
    cohort: Any = None
    silhouette: float | None = None


def fielding_by_sums(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    representation: Representation = Labels(),
    trigger: Annotated[Triggers, Spelled] = FixedFraction(),
    clustering: Annotated[KMeans, Spelled] = KMeans(),
    reassign: Literal["drifted", "all"] = "drifted",
    reporters: Literal["reachable", "participants", "once"] = "reachable",
    drift_baseline: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    fewest: Count = 3,
    fewest_updates: Count = 1,
    q: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Clustered federated learning that follows drift, by sums alone.

    Sends all models and centers down, and counts, reports and updates up in sums of a cluster. Sums of two rounds may
    differ by one client, whose representation is then their difference: nothing hides that here.

    Args:
        task: model and loss; `example` set, for label distributions.
        representation: representation that clients sum, and its distance.
        trigger: condition for re-clustering all clients.
        clustering: k-means by sums; centers are no clients.
        reassign: clients that move at a drift event: those that "drifted", or "all".
        reporters: clients that may report drift: all "reachable" ones, the round's "participants", or each client
            "once", at its first report.
        drift_baseline: start of the measured movement of centers.
        drift_eps: distance from the last report above which a client has drifted.
        fewest: smallest number of clients whose representations are summed; clusters with fewer members are closed.
        fewest_updates: smallest number of participants whose updates are summed; clusters with fewer in a round are
            trained together. 1 sums those of each cluster by themselves, as IFCA does.
        q: fairness within a cluster, as in q-FedAvg; 0 is the plain mean.
    """
    training = FairTraining(task, local, weighting, q=q) if q else Training(task, local, weighting)
    cluster_of = own_cluster(representation.of(task))

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, none = task.init(rng), torch.zeros(1, 1, dtype=torch.float64)
        state = State(
            weights=(weights,),
            server=(server.init(weights),),
            centers=none,
            baseline=none,
            members=none[0],
            made=0,
            distance=representation.distance_of(task),
            trigger=trigger.start(),
            cohort=cohort.init(fleet),
        )
        state, facts = count_members(state, fleet, fleet.reachable, places(state), anew=True)
        return adopt(state, fleet, find_clusters(state, fleet, rng.at("cluster")))[0] if facts["drifted"] else state

    def places(state: State) -> Sent:
        """Return the payload to find a cluster; a closed cluster has members, but not as many as `fewest`."""
        model = mix_models(state.weights, state.members + 1e-9) if representation.needs_model else None
        full = state.members >= fewest
        full = full if full.any() else torch.ones_like(full)
        usual, here = int(state.members.argmax()), full | (state.members == 0)
        return Sent(state.centers, here, full, state.made, usual, state.distance, model)

    def adopt(state: State, fleet: Fleet, clustering: FoundBySums | None) -> tuple[State, int]:
        """Adopt a clustering (Algorithm 2, lines 6 to 10); return also whether it was adopted."""
        if clustering is None:
            return state, 0
        centers, number = clustering.groups.centers, state.made + 1
        reply = fleet.ask("settle", fleet.reachable, New(centers, clustering.distance, number, places(state)))
        if reply.total is None:
            return state, 0
        share = reply.total["share"].value.view(len(centers), len(state.weights))
        rows = torch.where(share.sum(1, keepdim=True) > 0, share, share.sum(0))
        silhouette = clustering.silhouette.get(len(centers), max(clustering.silhouette.values(), default=None))
        state = replace(mix_clusters(state, rows), centers=centers, baseline=centers, members=share.sum(1))
        memo = cohort.renewed(state.cohort)
        return replace(state, made=number, distance=clustering.distance, silhouette=silhouette, cohort=memo), 1

    def find_clusters(state: State, fleet: Fleet, rng: Rng) -> FoundBySums | None:
        """Cluster all clients that can be reached (Algorithm 3)."""
        now = Groups(state.centers, state.members, torch.zeros_like(state.centers)) if state.made else None
        return cluster_by_sums(fleet, fleet.reachable, clustering, state.distance, fewest, rng, now)

    def handle_drift(state: State, fleet: Fleet, clients: Tensor, rng: Rng) -> tuple[State, dict[str, Any]]:
        """Handle drift (Algorithm 2): moves and, if these are not enough, a clustering of all clients."""
        one = len(state.weights) == 1
        anew = reporters != "once" or (one and clustering.k_max > 1)
        state, facts = count_members(state, fleet, clients, places(state), anew=anew)
        facts |= {"reclustered": 0}
        if facts["drifted"]:
            if one and clustering.k_max > 1 and trigger.splits_one:
                state = replace(state, trigger=trigger.after(state.trigger, True))
                state, _ = adopt(state, fleet, find_clusters(state, fleet, rng))
                facts["reclustered"] = int(len(state.weights) > 1)
            else:
                state, more = reassign_clients(state, fleet, rng)
                facts |= more
        else:
            del facts["drifted"]
        facts |= {"clusters": len(state.weights), "members": state.members}
        return state, facts | ({} if state.silhouette is None else {"silhouette": state.silhouette})

    def reassign_clients(state: State, fleet: Fleet, rng: Rng) -> tuple[State, dict[str, Any]]:
        """Update the centers of clients that have moved, and re-cluster if triggered (Algorithm 2 after reports)."""
        before = state.centers if drift_baseline == "last-event" else state.baseline
        state, filled = update_centers(state, fleet, places(state), fewest)
        if not filled.any() or before.shape != state.centers.shape:
            return replace(state, baseline=state.centers), {}
        anew = cache(lambda: find_clusters(state, fleet, rng))
        event = Event(before, state.centers, filled, state.distance, lambda: _spreads(anew()))
        fired, memo, facts = trigger_on(event, trigger, state.trigger, clustering.k_max)  # lines 4 and 5
        state = replace(state, trigger=memo)
        state, new = adopt(state, fleet, anew()) if fired else (state, 0)
        return state, {"reclustered": new, **facts}

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        def picked(now: State) -> Tensor:
            return cohort.pick(now.cohort, fleet, rng, lambda clients: serve(now, clients))

        participants = picked(state) if reporters == "participants" else None
        may = fleet.reachable if participants is None else participants
        state, facts = handle_drift(state, fleet, may, rng.at("cluster"))  # Algorithm 1, line 4
        clients = picked(state) if participants is None else participants  # line 9: whatever their cluster
        state, trained = train_clusters(state, fleet, clients)
        if trained and trigger.uses_accuracy:
            judged = fleet.ask("val", fleet.reachable, replace(places(state), models=state.weights))
            facts["val"] = float("nan") if judged.total is None else float(mean(judged.total)["right"])
            state = replace(state, trigger=trigger.record(state.trigger, facts["val"]))
        return state, {**trained, **facts}

    def train_clusters(state: State, fleet: Fleet, clients: Tensor) -> tuple[State, Facts]:
        """Train the model of each participant's cluster, and step those that were trained (lines 10 to 15)."""
        slots = share_sums(state, fleet, clients)
        if slots is None:
            return state, {}
        payload = replace(places(state), models=list(state.weights), slots=slots)
        state, reply = ask_to_train(cohort, fleet, state, clients, payload)
        if reply.total is None:
            return state, {}
        leaves = {name: leaf for name, leaf in reply.total.items() if isinstance(leaf, list)}
        sums = [{name: leaf[k] for name, leaf in leaves.items()} for k in slots.tolist()]
        deltas = [None if one["delta"] is None else (fair_totals(one) if q else one)["delta"] for one in sums]
        return step_models(state, server, deltas), {"loss": mean(reply.total)["loss"]}

    def share_sums(state: State, fleet: Fleet, clients: Tensor) -> Tensor | None:
        """Return the sum (K,) that each cluster's participants send their updates into; None if there are too few."""
        slots = torch.arange(len(state.weights))
        if fewest_updates == 1:
            return slots
        reply = fleet.ask("present", clients, places(state)) if len(clients) else None
        counted = None if reply is None else reply.total
        return None if counted is None else join_small(counted["present"].value, fewest_updates)

    def serve(state: State, clients: Tensor) -> tuple[Sent, None]:
        return replace(places(state), models=state.weights), None

    def adapt(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if memory is None and not len(shard.labels):
            return None
        return Answer({}, memory={"found": cluster_of(payload, memory, shard)})

    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        models = payload.models
        k = cluster_of(payload, memory, shard)
        answer = training(models[k], None, shard, moment, rng)
        if answer is None:
            return None
        slot = int(payload.slots[k])
        slotted = {name: Slotted({slot: leaf}, len(models)) for name, leaf in answer.total.items() if name != "loss"}
        total, notes = {**slotted, "loss": answer.total["loss"]}, Notes(branch=torch.tensor(k))
        assert isinstance(answer.update, Weights)
        return Answer(total, answer.rows, notes=notes, update={k: answer.update})

    right = accuracy_question(task)

    def val(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return right(payload.models[cluster_of(payload, memory, shard)], memory, shard, moment, rng)

    def as_served(payload: Any, memory: Any, answer: Answer) -> tuple[Sent, None]:
        return replace(payload, usual=answer.notes.branch if answer.notes else 0), None

    asked = cluster_questions(task, representation, cluster_of, reassign, drift_eps, clustering.k_max)
    works, predict, passes = {**asked, "train": train, "val": val}, predict_by_cluster(task), 3 * representation.passes
    check = has_val(trigger)
    algorithm = Algorithm("fielding-by-sums", init, works, round, serve, predict, adapt, as_served, check)
    forward = {**dict.fromkeys(asked, 0.0), "move": passes, "train": training.forward_passes, "loss": 1 + passes}
    traits: Any = {"sends": (Sent, New, Cells, Sets), "models": "clusters", "remembers": True, "fewest": fewest}
    traits["groups_by"] = (*asked, "val")
    return with_cohort(algorithm, cohort, task, local, forward=forward, **traits)


def own_cluster(represent: Represent) -> Own:
    """Build what tells a client its cluster: as it noted, unless that is closed or old; else the nearest one.

    A client that reports goes to a cluster with others, or it would be alone in a sum.
    """

    def cluster_of(where: Any, memory: Any, shard: Shard) -> int:
        if memory is not None and memory["made"] == where.made and where.open[memory["cluster"]]:
            return int(memory["cluster"])
        if memory is None and not len(shard.labels):
            return int(where.usual)
        if len(where.centers) == 1:
            return 0
        vector = represent(where.at, shard) if memory is None else memory["reported"]
        return nearest(vector, where.centers, where.distance, where.open if memory is None else where.full)

    return cluster_of


def cluster_questions(
    task: Task,
    representation: Representation,
    cluster_of: Own,
    reassign: Literal["drifted", "all"],
    eps: float,
    k_max: int,
) -> dict[str, Any]:
    """Build the questions about clusters: "move", "center", "settle", "present", and those of k-means by sums.

    Args:
        task: model and loss.
        representation: representation of a client.
        cluster_of: tells a client its cluster.
        reassign: clients that move: those that "drifted", or "all".
        eps: distance from the last report above which a client has drifted.
        k_max: largest number of clusters.
    """
    represent, plain_distance = representation.of(task), representation.distance_of(task)

    def move(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard.labels):
            return None
        vector = represent(payload.at, shard)
        order = representation.draw_order(task, rng) if memory is None else memory["order"]
        vector = vector if order is None else vector[order]
        reports = memory is None or (payload.again and drifted_from(vector, memory["reported"], plain_distance, eps))
        report = vector if memory is None or reports else memory["reported"]
        centers, distance = payload.centers, payload.distance
        noted = memory is not None and memory["made"] == payload.made
        stays = noted and not reports and reassign == "drifted"
        k = int(memory["cluster"]) if stays else nearest(report, centers, distance)
        before = memory["cluster"] if noted else k
        far = float(between(report[None], centers[k : k + 1], distance)) if centers.shape[1] == len(report) else 0.0
        total = {
            "members": Weighted(F.one_hot(torch.tensor(k), len(centers)).double()),
            "drifted": Weighted(float(reports)),
            "moved": Weighted(float(k != before)),
            "far": Weighted(far),
        }
        return Answer(total, memory={"reported": report, "order": order, "cluster": k, "made": payload.made})

    def center(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Add the report to the sum of the client's cluster."""
        if memory is None:
            return None
        k = cluster_of(payload, memory, shard)
        return Answer({"members": summed(memory["reported"], k, len(payload.open), payload.distance)})

    def settle(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Take the nearest of new centers, and count which cluster was left for it."""
        if memory is None:
            return None
        k = nearest(memory["reported"], payload.centers, payload.distance)
        left, models = cluster_of(payload.old, memory, shard), len(payload.old.open)
        share = F.one_hot(torch.tensor(k * models + left), len(payload.centers) * models).double()
        return Answer({"share": Weighted(share)}, memory={**memory, "cluster": k, "made": payload.made})

    def present(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        k = cluster_of(payload, memory, shard)
        return Answer({"present": Weighted(F.one_hot(torch.tensor(k), len(payload.open)).double())})

    return {"move": move, "center": center, "settle": settle, "present": present, **group_questions(k_max)}


def count_members(
    state: State, fleet: Fleet, clients: Tensor, where: Sent, *, anew: bool
) -> tuple[State, dict[str, Any]]:
    """Let clients find their clusters, and count them; return also how many drifted and moved, and the "radius".

    Args:
        state: the state.
        fleet: the clients.
        clients: those that may report; the others that can be reached are counted where they last were.
        where: what a client needs to find its cluster.
        anew: whether a client that has reported before may again.
    """
    others = fleet.reachable[~torch.isin(fleet.reachable, clients)]  # counted only: their reports stay
    totals = [
        fleet.ask("move", asked, replace(where, again=again)).total
        for asked, again in ((clients, anew), (others, False))
        if len(asked)
    ]
    counted = [total for total in totals if total is not None]
    if not counted:
        return state, {"drifted": 0, "moved": 0}
    members, drifted, moved, far = (
        sum(total[name].value for total in counted) for name in ("members", "drifted", "moved", "far")
    )
    facts = {"drifted": int(drifted), "moved": int(moved)}
    if far:
        facts["radius"] = far / sum(total["far"].weight for total in counted)
    return replace(state, members=members), facts


def update_centers(state: State, fleet: Fleet, where: Sent, fewest: int) -> tuple[State, Tensor]:
    """Set centers to the means of their members (Algorithm 2, line 3); return the mask (K,) of those with any."""
    none = torch.zeros(len(state.weights), dtype=torch.bool)
    if not bool((state.members >= fewest).any()):
        return state, none
    reply = fleet.ask("center", fleet.reachable, where)
    if reply.total is None:
        return state, none
    groups = divide_sums(reply.total["members"], state.centers)
    filled = groups.sizes > 0
    members = torch.where(filled, groups.sizes, state.members)
    return replace(state, centers=groups.centers, members=members), filled


def join_small(members: Tensor, fewest: int) -> Tensor | None:
    """Return for each cluster the slot (K,) of its sum: clusters with too few participants share one.

    If these are too few together, the smallest of the others shares it as well; None if there are too few in all.

    >>> join_small(torch.tensor([1.0, 5.0, 0.0, 2.0, 4.0]), 3), join_small(torch.tensor([1.0, 5.0, 4.0]), 3)
    (tensor([0, 1, 2, 0, 4]), tensor([0, 1, 0]))
    """
    if members.sum() < fewest:
        return None
    slots, small = torch.arange(len(members)), (members > 0) & (members < fewest)
    if small.any() and members[small].sum() < fewest:
        small[members.where(members >= fewest, torch.inf).argmin()] = True
    return slots.where(~small, slots[small].min()) if small.any() else slots


def _spreads(clustering: FoundBySums | None) -> tuple[float, float]:
    """Return the spread of the clusters now and of those found; equal if none could be."""
    return (0.0, 0.0) if clustering is None else (clustering.spread_now, clustering.spread)


ENTRY = Entry(
    "fielding-by-sums", fielding_by_sums, "K models and centers down, one update and counts up", "clustered",
    tells="sums of two rounds may differ by one client, whose representation is then their difference",
    keeps="its last report", helps=("labels", "groups", "drift"),
    safe=Safe({"clustering": KMeans(min_silhouette=0.15)}, transforms=(Pooled(),)),
)  # fmt: skip
