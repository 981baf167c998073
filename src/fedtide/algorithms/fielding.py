"""Fielding: clusters of clients that follow drift; who drifted moves, and everybody is clustered anew when need be.

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

Algorithm 4, which the theory is about, is near to `clustering = "k-center"` with `k_min = k_max`, `moves = "all"` and
`trigger = "adaptive"`: after a drift event every client goes to the nearest center, and where two of one cluster are
too far apart k-center clustering begins anew.

Choices:
    No code was found. A client reports when its representation is more than `drift_eps` away from what it last said,
    and no model travels for that unless gradients are taken at the global one. A center without members stays where it
    is and counts neither for moves nor for the threshold. With one cluster theta is 0, so that everybody is clustered
    anew at the next event; so they are, whatever the trigger, while nobody was told apart yet. `reference =
    "last-event"` measures how far centers moved in this drift event alone, as in the paper, so that slow creep never
    triggers; "last-clustering" measures it since clients were last clustered. Models are mixed by who comes from where,
    running statistics and the optimizer's moments alike. Of clusters smaller than their share all members train, and
    the others get the rest. `select = None` takes whoever the cohort says, whatever their cluster. Clients weigh alike
    within a cluster, as in the pseudo-code. A client that was never heard of trains with the largest cluster and counts
    for none; it finds its cluster by its own representation before it is judged, as held-out ones do. With `trigger =
    "learned"` all reachable clients receive their cluster's model in every round and say how often it is right on their
    validation rows: a question that costs bytes, and seconds as a look at the training rows
    would, which is more than a look at those. `moves = "nobody"` is static
    clustering, in which clients join when they are first heard of and are asked for no more reports, unless `select`
    wants them; with `trigger = { kind = "fraction", tau = inf }`
    clients move and are never clustered anew. Centers are means of members under k-center clustering, too, and
    participants are drawn without replacement, one step or more of local training each; the threshold of Algorithm 4,
    which is given, is that of appendix F.2, which adapts. Squared distances and cosines, which embeddings and gradients
    are compared by, are compared with tau theta as they are: a third of theta is 58 % of the way between two centers.
    With `reports = "asked"` participants are drawn before they move. `select = "nearest"` takes the mean of what a
    cluster's reachable members report for its center, and L1.

    Combined representations are compared by the sum of the distances of their parts, each in units of its mean between
    two clients when all were clustered last (of as many clients as silhouettes are taken among). Whether it drifted a
    client judges by the plain sum, as it does not know these.

    With `q` clusters aggregate as q-FedAvg does, which weighs by the loss before training; `server` steps along that.
    What the server computes takes time on a clock of devices where `move_seconds` and `cluster_seconds` say so. The
    paper measured 2.0 s for moves and 15.6 s for a re-clustering of 5078 clients: 0.0004 and 0.003 for each client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from fedtide.core.config_types import Count, NonNegative, Spelled
from fedtide.core.errors import FedtideError, shown
from fedtide.core.rng import Rng
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Shard,
    Slot,
    Timed,
    Weighted,
    Weights,
    Work,
)
from fedtide.learn.fair import Fair, fairly
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.learn.training import Training
from fedtide.multi.clusters import by_given_model, given, loss_of, mixed, stepped
from fedtide.multi.representation import Labels, Representation
from fedtide.parts.cohort import Arrivals, Cohort, wanted
from fedtide.parts.distance import Center, Distance, Joint, Kind, between, means, scaled
from fedtide.parts.drift import Adaptive, Event, Fraction, Learned, Trigger, heterogeneity, shifted, theta, transfer
from fedtide.parts.drift import moves as moved
from fedtide.parts.recluster import clusters, k_center, sampled
from fedtide.parts.select import AtRandom, Select, counting, introduced, utility
from fedtide.parts.weighting import Weighting, client_weight


def whoever(value: Any) -> Any:
    """Who moves, where it is said by true or false.

    >>> whoever(True), whoever(False), whoever("all")
    ('drifted', 'nobody', 'all')
    """
    return value if not isinstance(value, bool) else "drifted" if value else "nobody"


Moves = Annotated[Literal["drifted", "all", "nobody"], BeforeValidator(whoever)]
Triggers = Annotated[Fraction | Adaptive | Learned, Field(discriminator="kind")]


@dataclass(frozen=True)
class Rule:
    """How clients are clustered: the distance of their representations, and the range of K; see `fielding`."""

    kind: Distance
    clustering: Literal["k-means", "k-center"]
    k_min: int
    k_max: int
    n_init: int
    center: Center
    silhouette_rows: int | None
    fit_rows: int | None


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, what is known of clients, and the clusters.

    said: (registered, r) what each client last reported. heard: (registered,) bool, who ever did. cluster:
    (registered,) of each client. centers: (K, r) now; before: (K, r) when clients were last clustered; kind: the
    distance, in the units of then. trigger, select: their memos.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    said: Tensor
    heard: Tensor
    cluster: Tensor
    centers: Tensor
    before: Tensor
    kind: Distance
    trigger: Any
    select: Any


def fielding(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    representation: Representation = Labels(),
    distance: Kind | None = None,
    trigger: Annotated[Triggers, Spelled] = Fraction(),
    clustering: Literal["k-means", "k-center"] = "k-means",
    moves: Moves = "drifted",
    reports: Literal["reachable", "asked"] = "reachable",
    reference: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    k_min: Count = 2,
    k_max: Count = 10,
    n_init: Count = 10,
    center: Center = "mean",
    silhouette_rows: Count | None = 1000,
    fit_rows: Count | None = 20_000,
    mu: NonNegative = 0.0,
    q: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    select: Annotated[Select | None, Spelled] = AtRandom(),
    weighting: Weighting = "uniform",
    move_seconds: NonNegative = 0.0,
    cluster_seconds: NonNegative = 0.0,
) -> Algorithm:
    """Clustered federated learning that follows drift.

    Sends a cluster's model down and its update up in sums; the server sees the representation of every client that
    drifted.

    Args:
        task: model and loss; `example` set, for label shares.
        local: local training.
        representation: what clients report.
        distance: how representations are compared; None is as suits them, and the only choice for combined ones; "js"
            is for shares of labels alone.
        trigger: when everybody is clustered anew.
        clustering: how; "k-center" has as many clusters as `k_min` and `k_max` both say.
        moves: who moves when somebody drifted: those that "drifted" (or true), "all", or "nobody" (or false), in which
            case everybody stays where it first was.
        reports: who may say that it drifted: all that are "reachable", or only those "asked" to train, whatever became
            of the others since they were last asked.
        reference: since when a center's way is measured.
        drift_eps: how far a representation must be from what was said last to be said again.
        k_min: the fewest clusters; one where representations are all the same, or there are fewer than three.
        k_max: the most; there is always one less than clients at the most, whatever is asked for.
        n_init: starts of k-means.
        center: what stands for a cluster; "median" is for shares of labels alone.
        silhouette_rows: clients among which silhouettes are taken; None means all.
        fit_rows: clients that k-means finds centers with, drawn anew each time, and the others go to the nearest; None
            means all.
        mu: pull of every client towards the model that it received, as FedProx.
        q: fairness within a cluster, as q-FedAvg; 0 is the plain mean.
        server: what the server does with a cluster's mean update.
        cohort: how many are asked in all; without `select`, who.
        select: who is asked within a cluster; None means whoever the cohort says, of all clusters together.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
        move_seconds: seconds of the server for each client that may move, on a clock of devices.
        cluster_seconds: seconds of the server for each client that is clustered anew.

    Raises:
        FedtideError: the range of K is empty or too wide, or a distance or center that combined parts have not.
    """
    if k_max < k_min and k_max != 1:
        raise FedtideError(f"k_max: found {k_max}, allowed: k_min, which is {k_min}, or more; or 1 for one cluster")
    if clustering == "k-center" and k_max not in (1, k_min):
        raise FedtideError(f"k_max: found {k_max}, allowed: k_min, which is {k_min}, as 'k-center' counts no clusters")
    own = representation.distance(task)
    for key, found, allowed in (("distance", distance, None), ("center", center, "mean")):
        if isinstance(own, Joint) and found != allowed:
            raise FedtideError(f"{key}: found '{found}', allowed: {allowed or 'none'}, as parts are compared each so")
    if representation.kind != "labels":
        no_shares = f"which is of shares that sum to one, and representation is '{representation.kind}'"
        if distance == "js":
            raise FedtideError(f"distance: found 'js', {no_shares}; allowed: l1, l2, sq-l2, cosine")
        if center == "median":
            raise FedtideError(f"center: found 'median', {no_shares}; allowed: mean")
    who = whoever(moves)
    if clustering == "k-center" and n_init != 10:
        raise FedtideError(f"n_init: found {n_init}, allowed: none with 'k-center', which begins in one way")
    if clustering == "k-center" and fit_rows != 20_000:
        raise FedtideError(f"fit_rows: found {fit_rows}, allowed: none with 'k-center', which looks at all clients")
    if clustering == "k-center" and silhouette_rows != 1000 and not isinstance(own, Joint):
        raise FedtideError(f"silhouette_rows: found {silhouette_rows}, allowed: none with 'k-center', which takes none")
    for option, said, usual in (("trigger", trigger, Fraction()), ("reference", reference, "last-event")):
        if who == "nobody" and said != usual:
            kind = shown(getattr(said, "kind", said))
            raise FedtideError(
                f"{option}: found {kind}, allowed: the default with moves = 'nobody', as nobody moves then"
            )
    rule = Rule(distance or own, clustering, k_min, k_max, n_init, center, silhouette_rows, fit_rows)
    represent = representation.of(task)
    extra = Proximal(mu) if mu else None
    fair = Fair(q, 1.0 / local.lr) if q else None
    wants = ("utility",) if select is not None and select.learns else ()
    counts = select is not None and select.needs == "count"

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        count = len(fleet.clients)
        said = torch.full((count, 1), 1.0, dtype=torch.float64)
        nobody, one = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
        memo = None if select is None else introduced(select, fleet) if counts else select.init(count)
        single = (weights,), (server.init(weights),), said, nobody, one, said[:1], said[:1]
        state = State(*single, rule.kind, trigger.start(), memo)
        state, drifted = reported(state, fleet, fleet.reachable)
        return clustered(state, rule, rng.at("cluster")) if len(drifted) else state

    def reported(state: State, fleet: Fleet, clients: Tensor) -> tuple[State, Tensor]:
        """The state with what some clients say now, and which of them (n,) said something."""
        payload = {"model": mixed(state.weights, members(state))} if representation.follows else {}
        reply = fleet.ask("report", clients, payload, reveal=("said",))
        if not len(reply.clients):
            return state, reply.clients
        state = with_said(state, reply.clients, reply.rows["said"])
        if select is not None and select.needs == "labels":
            state = replace(state, select=select.told(state.select, reply.clients, reply.rows["said"]))
        return state, reply.clients

    def settled(state: State) -> bool:
        """Whether what a client says now that was heard of would change nothing."""
        told_apart = len(state.weights) > 1 or k_max == 1
        return who == "nobody" and told_apart and (select is None or select.needs != "labels")

    def report(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not telling(shard):
            return None
        vector = represent(payload.get("model"), shard)
        order = representation.order(task, rng) if memory is None else memory["order"]
        vector = vector if order is None else vector[order]
        if memory is not None and near(vector, memory["said"]):
            return None  # it did not drift: nothing is sent
        return Answer({"reports": Weighted(1.0)}, {"said": vector}, memory={"said": vector, "order": order})

    def near(vector: Tensor, said: Tensor) -> bool:
        """Whether a client says what it said; rounding puts some vectors at a cosine distance from themselves."""
        return torch.equal(vector, said) or float(between(vector[None], said[None], rule.kind)) <= drift_eps

    def asked(state: State, fleet: Fleet, rng: Rng) -> Tensor:
        """M / K participants of each cluster; the rest from the largest, and what a small one lacks from the others."""
        if select is None:
            return cohort(rng, fleet)
        reachable = fleet.reachable
        each = [reachable[belongs(state)[reachable] == k] for k in range(len(state.weights))]
        sizes = quotas([len(among) for among in each], wanted(cohort, fleet))
        picked = [
            select.pick(state.select, rng.at("cluster", k) if k else rng, fleet, among, m)
            for k, (among, m) in enumerate(zip(each, sizes, strict=True))
            if m
        ]
        return torch.cat(picked).sort().values if picked else reachable[:0]

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = int(local.distinct(torch.tensor(len(shard))))
        seen = {"utility": utility(task.losses(payload, shard), rows)} if wants else {}
        felt = fair.felt(task, payload, shard) if fair is not None else None
        fitted = local(task, task.loss, payload, shard, moment, rng, extra=extra)
        if not fitted.steps:
            return None
        weight = client_weight(shard, weighting)
        update = {"delta": Weighted(fitted.delta, weight)}
        if fair is not None and felt is not None:
            update = fair.sent(fitted, felt, weight)
        return Answer({**update, "loss": Weighted(fitted.loss, len(shard))}, seen)

    def round(state: State, fleet: Timed, rng: Rng) -> tuple[State, Facts]:
        known = state.heard
        early = asked(state, fleet, rng) if reports == "asked" else None
        may = fleet.reachable if early is None else early
        done = settled(state)
        if done:
            may = may[~state.heard[may]]
        state, drifted = reported(state, fleet, may) if len(may) else (state, may)
        facts: dict[str, Any] = {"moved": 0, "reclustered": 0}
        if len(drifted):
            # Who is heard of for the first time is put into a cluster even where nobody moves.
            movers = {"nobody": drifted[~known[drifted]], "drifted": drifted, "all": state.heard.nonzero()[:, 0]}[who]
            if len(state.weights) == 1 and k_max > 1:
                # Nobody was told apart yet: too few had been heard of, or all said the same.
                state = clustered(state, rule, rng.at("cluster"))
                facts["reclustered"] = int(len(state.weights) > 1)
            elif who == "nobody":
                joined = moved(state.said, state.cluster, movers, state.centers, state.kind, members(state) > 0)
                state = replace(state, cluster=joined)
            else:
                state, facts = followed(state, movers, rule, trigger, reference, rng.at("cluster"))
            facts["drifted"] = len(drifted)
            fleet.spend(move_seconds * len(movers) + cluster_seconds * facts["reclustered"] * int(state.heard.sum()))
        slots = len(state.weights)
        facts |= {"clusters": slots, "members": members(state)}
        if not done:  # else what clients said is from long ago
            facts["spread"] = spread(state)
        chosen = asked(state, fleet, rng) if early is None else early
        slot = belongs(state)[chosen]
        reply = fleet.ask("train", chosen, list(state.weights), slot=slot, slots=slots, reveal=wants)
        if reply.total is None:
            return state, facts
        totals = reply.total if fair is None else [fairly(total) for total in reply.total]
        deltas = [None if total is None else total["delta"] for total in totals]
        weights, memos = stepped(server, state.weights, state.server, deltas)
        state = replace(state, weights=weights, server=memos)
        if select is not None and wants:
            seen, number = reply.rows["utility"], fleet.moment.round
            state = replace(state, select=select.learn(state.select, reply.clients, seen, reply.seconds, number))
        if trigger.listens:
            slot = belongs(state)[fleet.reachable]
            told = fleet.ask("val", fleet.reachable, list(state.weights), slot=slot, slots=slots).total or ()
            right = [total["right"] for total in told if total is not None]
            rows = sum(each.weight for each in right)
            accuracy = sum(float(each.value) for each in right) / rows if rows else math.nan
            state = replace(state, trigger=trigger.noted(state.trigger, accuracy))
            facts["val"] = accuracy
        return state, {"loss": loss_of(reply.total), **facts}

    def val(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """How often its cluster's model is right on a client's validation rows."""
        rows = shard.val if len(shard) else None
        if rows is None or not telling(rows):
            return None
        right = task.logits(payload, task.inputs(rows.x)).argmax(-1) == rows.y
        right = right if rows.mask is None else right[rows.mask]
        return Answer({"right": Weighted(float(right.double().mean()), right.numel())})

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # Whoever is not registered, or was never heard of, finds its cluster by itself, in `adapt`.
        cluster, more = state.cluster, dict[str, Any]()
        if state.heard.any():
            model = mixed(state.weights, members(state)) if representation.follows else None
            more = {"centers": state.centers, "filled": members(state) > 0, "kind": state.kind, "at": model}
            cluster = torch.where(state.heard, cluster, -1)
        every = torch.arange(len(state.weights))
        return given(state.weights, cluster, clients, every, int(members(state).argmax()), **more)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if "centers" not in payload or not telling(shard):
            return None
        vector, nobody = represent(payload["at"], shard)[None], torch.zeros(1, dtype=torch.int64)
        own = moved(vector, nobody, torch.tensor([0]), payload["centers"], payload["kind"], payload["filled"])
        return Answer({}, memory={"found": own[0]})

    alone = not wants and fair is None  # nothing but training is asked of clients
    works: dict[str, Work] = {"report": report, "train": Training(task, local, weighting, extra) if alone else train}
    if counts:
        works["count"] = counting(local.distinct)
    if trigger.listens:
        works["val"] = val
    reveals = ("said", *wants, *(["count"] if counts else []))
    predict = by_given_model(task)
    looks = len(wants) + (fair is not None)  # losses before training, where those are wanted
    effort = costing(local, {"train": looks, "report": 3 * representation.passes, "count": 0})
    return Algorithm("fielding", init, works, round, serve, predict, adapt=adapt, reveals=reveals, effort=effort)


def telling(shard: Shard) -> bool:
    """Whether a client has labels that count, of which it can say something."""
    return len(shard) > 0 and (shard.mask is None or bool(shard.mask.any()))


def with_said(state: State, clients: Tensor, said: Tensor) -> State:
    """The state with what some clients say (n, r); at first everybody else is taken to be even."""
    if state.said.shape[1] != said.shape[1]:
        even = torch.full((len(state.said), said.shape[1]), 1 / said.shape[1], dtype=torch.float64)
        state = replace(state, said=even, centers=even[:1], before=even[:1])
    known, heard = state.said.clone(), state.heard.clone()
    known[clients], heard[clients] = said, True
    return replace(state, said=known, heard=heard)


def clustered(state: State, rule: Rule, rng: Rng) -> State:
    """Everybody who was ever heard of, clustered anew, with models mixed by who comes from where (Algorithm 3)."""
    heard = state.heard.nonzero().flatten()
    said = state.said[heard]
    kind = scaled(rule.kind, sampled(said, rule.silhouette_rows, rng.at("scales")))
    if rule.clustering == "k-center":
        found = k_center(said, rule.k_max, kind)
        found = replace(found, centers=means(said, found.label, found.k, found.centers, kind, rule.center))
    else:
        found = clusters(
            said,
            kind,
            rng,
            k_min=rule.k_min,
            k_max=rule.k_max,
            n_init=rule.n_init,
            center=rule.center,
            silhouette_rows=rule.silhouette_rows,
            fit_rows=rule.fit_rows,
        )
    label = torch.zeros_like(state.cluster)
    label[heard] = found.label
    share = transfer(state.cluster[heard], found.label, len(state.weights), found.k)
    weights, server = (tuple(mixed(held, row) for row in share) for held in (state.weights, state.server))
    after = replace(state, weights=weights, server=server, cluster=label, kind=kind)
    return replace(after, centers=found.centers, before=found.centers)


def followed(
    state: State, movers: Tensor, rule: Rule, trigger: Trigger, reference: str, rng: Rng
) -> tuple[State, dict[str, Any]]:
    """Moves of who drifted, or of all, new centers, and whether that is enough (Algorithm 2)."""
    kind, heard = state.kind, state.heard
    cluster = moved(state.said, state.cluster, movers, state.centers, kind, members(state) > 0)
    filled = torch.bincount(cluster[heard], minlength=len(state.weights)) > 0
    now = means(state.said[heard], cluster[heard], len(filled), state.centers, kind, rule.center)
    since = state.centers if reference == "last-event" else state.before
    event = Event(since, now, filled, state.said[heard], cluster[heard], kind)
    fired = rule.k_max > 1 and trigger.fires(state.trigger, event)
    facts = {
        "moved": int((cluster != state.cluster).sum()),
        "reclustered": int(fired),
        "theta": theta(now, filled, kind),
        "way": float(shifted(since, now, kind)[filled].max()),
    }
    state = replace(state, cluster=cluster, trigger=trigger.after(state.trigger, fired))
    return (clustered(state, rule, rng) if fired else replace(state, centers=now)), facts


def members(state: State) -> Tensor:
    """How many clients (K,) each cluster has, of those that were ever heard of; of all where nobody was."""
    heard = state.heard if state.heard.any() else torch.ones_like(state.heard)
    return torch.bincount(state.cluster[heard], minlength=len(state.weights))


def belongs(state: State) -> Tensor:
    """The cluster (registered,) that a client trains with: its own, or the largest where it was never heard of."""
    return torch.where(state.heard, state.cluster, members(state).argmax())


def spread(state: State) -> float:
    """How unlike each other the clients of a cluster are, of those that were ever heard of."""
    return heterogeneity(state.said[state.heard], state.cluster[state.heard], state.kind) if state.heard.any() else 0.0


def quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """How many participants each cluster sends: as many each, the rest the largest; what one lacks the others send.

    >>> quotas([10, 2, 0, 5], 9)
    [4, 2, 0, 3]
    """
    filled = [k for k, size in enumerate(sizes) if size]
    out = [0] * len(sizes)
    if not filled:
        return out
    order = sorted(filled, key=lambda k: (-sizes[k], k))
    for place, k in enumerate(order):
        out[k] = wanted // len(filled) + (place < wanted % len(filled))
    lacking = sum(max(out[k] - sizes[k], 0) for k in filled)
    out = [min(n, size) for n, size in zip(out, sizes, strict=True)]
    while lacking and any(out[k] < sizes[k] for k in filled):
        for k in order:
            if lacking and out[k] < sizes[k]:
                out[k] += 1
                lacking -= 1
    return out
