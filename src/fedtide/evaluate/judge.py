"""Evaluation contract: the clients and held-out rows on which a state is evaluated after a round."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.clusters.distance import Kind
from fedtide.core.base import Algorithm, EvalSplit, Grouping, Holdings, Over, Scores, Shard, State
from fedtide.core.errors import refused
from fedtide.core.rng import Rng, draw_some
from fedtide.evaluate.metrics import METRICS, Metric, summarized
from fedtide.evaluate.references import References
from fedtide.fleets.ask import ScoreOptions
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.remote.fleet import RemoteFleet

NOT_JUDGED = "no client has a row to test, so there is no accuracy"
"""Note about an evaluation without views."""

Recorded = SimulatedFleet | RemoteFleet
"""A fleet whose rounds can be judged and recorded."""


@dataclass(frozen=True)
class View:
    """Clients and the part of their rows that they are evaluated on."""

    name: str
    clients: Tensor
    part: str


def views(
    holdings: Holdings, at_most: int | None = None, seed: int = 0, named: Sequence[EvalSplit] | None = None
) -> list[View]:
    """Return the views: training and held-out clients on test rows, training clients on validation rows.

    Args:
        holdings: the clients, and how many rows they hold.
        at_most: maximum number of clients of each kind, drawn once.
        seed: seed of that draw.
        named: names of the views to return; None means all.

    Raises:
        FedtideError: a named view has no rows.
    """
    kinds = {
        "train_clients": (holdings.clients, "test", "no client has test rows (data.split.test)"),
        "held_out_clients": (holdings.held_out_clients, "test", "no clients are held out (data.held_out_clients)"),
        "val": (holdings.clients, "val", "no client has validation rows (data.split.val)"),
    }
    out = []
    for name, (clients, part, _) in kinds.items():
        judged = draw_some(clients[holdings.counts(clients, part) > 0], at_most, Rng(seed).at("judged", name))
        if len(judged):
            out.append(View(name, judged, part))
    names = [view.name for view in out]
    for name in named or ():
        if name not in names:
            raise refused("eval_splits", name, ", ".join(names) or "clients with more rows", kinds[name][2])
    return [view for view in out if named is None or view.name in named]


@dataclass(frozen=True)
class Embedded:
    """Features by which clients of a cluster are compared beside their labels.

    mean: of a client's training rows (d,) float64; distance: between two clients.
    """

    mean: Callable[[Shard], Tensor]
    distance: Kind


@dataclass(frozen=True)
class Judge:
    """Evaluation of a state on views of the clients."""

    algorithm: Algorithm
    fleet: Recorded
    views: list[View]
    grouping: Grouping = "client"
    metrics: Sequence[Metric] = METRICS
    embedded: Embedded | None = None
    references: References | None = None
    over: Over = "rows"

    def scores(self, state: State, other: str = "") -> Iterator[tuple[View, Scores, Tensor | None]]:
        """Yield each view with the scores and slots of those of its clients that have rows to evaluate now.

        `other` is the name of another use of the state.
        """
        pooled = tuple(dict.fromkeys(metric.needs for metric in self.metrics if metric.needs))
        options: ScoreOptions = {"grouping": self.grouping, "other": other, "record": True}
        if pooled:
            options["pooled"] = pooled
        for whole in self.views:
            view = replace(whole, clients=self.fleet.judged(whole.clients, whole.part))
            payload, slot = self.algorithm.serve(state, view.clients)
            scores = self.fleet.score(payload, view.clients, **options | {"slot": slot, "part": view.part})
            yield view, replace(scores, over=self.over), slot

    def others(self) -> Iterator[tuple[str, "Judge"]]:
        """Yield each other use of the state, by name, with a judge that describes its scores."""
        for name, algorithm in self.algorithm.others.items():
            yield name, replace(self, algorithm=algorithm)

    def participants(self, state: State, clients: Tensor) -> dict[str, float]:
        """Return accuracy and loss of the received state on the participants' own training rows, before they train.

        This signal reveals the rhythm of the shift. The payload is used as sent, without memory or adaptation. Empty if
        clients adapt the payload, or keep a part of the model. Empty for real clients, who would get one more question
        in every round.
        """
        algorithm = self.algorithm
        if not len(clients) or algorithm.adapt is not None or algorithm.traits.at_home or self.fleet.truth is None:
            return {}
        payload, slot = algorithm.serve(state, clients)
        scores = self.fleet.score(payload, clients, slot=slot, part="train", personal=False, grouping=self.grouping)
        scores = replace(scores, over=self.over)
        rows = float(scores.rows.sum())
        return {self.metrics[0].name: scores.accuracy, "loss": float(scores.loss.sum()) / rows} if rows else {}

    def line(self, view: View, scores: Scores) -> dict[str, Any]:
        """Return the entry of one view in `rounds.jsonl`, with the scores of answers without a federation.

        If the server is told sums alone it has what they tell, and nothing else.
        """
        if scores.summed:
            entry = {} if scores.by_sum is None else asdict(scores.by_sum)
            return {name: value for name, value in entry.items() if name != "noise" or value}
        truth, own_expert = self.fleet.truth, self.algorithm.traits.own_expert
        group, names = self._groups(scores.clients)
        scores = replace(scores, group=None if truth is None else group, moment=self.fleet.moment)
        entry = summarized(scores, group, names, own_expert=own_expert, metrics=self.metrics)
        if truth is None:
            return entry
        commonest = truth.commonest(scores.clients, self.fleet.moment, view.part, self.over)
        baselines = truth.baselines(scores.clients, self.fleet.moment, view.part)
        entry |= {} if commonest is None else {"commonest": commonest}
        return entry | ({"baselines": baselines} if baselines else {})

    def refer(self, entries: Mapping[str, dict[str, Any]], clients: Mapping[str, Tensor]) -> None:
        """Add the scores of references to the entries of views, whose judged `clients` are given by name."""
        if self.references is None:
            return
        for view in self.views:
            scores = self.references.scores(clients[view.name], self.fleet.moment, view.part)
            if scores:
                entries[view.name].setdefault("baselines", {}).update(scores)

    def _groups(self, clients: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """Return the true group of each of `clients`, and the names of all groups; a single "" if unknown."""
        truth = self.fleet.truth
        return (torch.zeros_like(clients), ("",)) if truth is None else (truth.group[clients], truth.group_names)

    def rows(self, number: int, view: View, scores: Scores, slot: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of one view for `clients.csv`, one per client; slot -1 if its own expert answered.

        If groups drift, the number of the client's true group comes last.
        """
        group, names = self._groups(scores.clients)
        called, truth = self.fleet.names, self.fleet.truth
        drifting = None if truth is None else truth.drifting_group(self.fleet.moment)
        clusters = self.clusters(scores, slot)
        columns = (scores.clients, scores.rows, scores.correct, scores.loss)
        numbers = zip(*(column.tolist() for column in columns), strict=True)
        for i, (client, rows, correct, lost) in enumerate(numbers):
            accuracy = round(correct / rows, 6) if rows and not math.isnan(lost) else None
            loss = round(lost / rows, 6) if rows else None
            name = called[client] if called else None
            row = (number, view.name, client, names[group[i]], int(rows), accuracy, loss, clusters[i], name)
            yield row if drifting is None else (*row, int(drifting[client]))

    def clusters(self, scores: Scores, slot: Tensor | None) -> list[int | None]:
        """Return the cluster of each scored client; -1 if its own expert answers, None without one."""
        clusters: list[int | None] = [None] * len(scores.clients) if slot is None else slot.tolist()
        if scores.choice is not None:
            for i in scores.rows.nonzero().flatten().tolist():
                # The branch or model that answered for most of the client's rows; shared ones count from 0.
                clusters[i] = int(scores.choice[i].argmax()) - self.algorithm.traits.own_expert
        return clusters
