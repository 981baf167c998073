"""The record of a round: who took part, what it cost, how losses, groups and drift stand, and the headline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.clusters.distance import Kind, distances_within
from fedtide.core.base import Cost, Scores
from fedtide.core.errors import FedtideError
from fedtide.core.loop import Step
from fedtide.data.population import Population
from fedtide.data.saved import CLASSES
from fedtide.draw.tables import is_cell
from fedtide.evaluate.judge import Judge
from fedtide.fleets.ask import Query
from fedtide.fleets.devices import samples_of
from fedtide.learn.local import question_cost
from fedtide.wire.ledger import Ledger


def headline(line: Mapping[str, Any]) -> float | None:
    """Return the accuracy of an evaluation: of held-out clients, else on test rows, else on validation rows.

    >>> headline({"scores": {"val": {"accuracy": 0.5}, "train_clients": {"accuracy": 0.25}, "held_out_clients": {}}})
    0.25
    """
    shown = _shown(line)
    return score_in(shown[0]) if shown else None


def noise_of(line: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of the noise on the accuracy of an evaluation; None without noise or evaluation.

    >>> noise_of({"scores": {"val": {"accuracy": 0.5, "noise": 0.1}}}), noise_of({"round": 3})
    (0.1, None)
    """
    shown = _shown(line) if "scores" in line else []
    return shown[0].get("noise") if shown else None


def _shown(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of an evaluation, that of the headline first."""
    return [line["scores"][view] for view in ("held_out_clients", "train_clients", "val") if line["scores"].get(view)]


def score_in(entry: Mapping[str, Any]) -> Any:
    """Return the headline number in an entry of the record: an accuracy, or of numbers a skill; None without any."""
    return entry.get("accuracy", entry.get("skill"))


def rows_in(line: Mapping[str, Any], view: str) -> float | None:
    """Return the weight of a number per row in a mean: the rows of a window of wall-clock time, else None (all equal).

    An evaluation by sums says how many clients answered, and not how many rows they have.
    """
    entry = line["scores"][view]
    return entry.get("rows", entry.get("clients")) if "window" in line else None


def size_in(line: Mapping[str, Any], view: str) -> float | None:
    """Return the weight of an accuracy in a mean: as `rows_in`, or the clients if accuracies are means over clients."""
    return line["scores"][view].get("clients", rows_in(line, view)) if "window" in line else None


def weight_in(line: Mapping[str, Any], view: str) -> float | None:
    """Return the weight of the headline number in a mean: for a skill the summed error of the constant, else the rows.

    >>> line = {"window": {}, "scores": {"val": {"rows": 5, "accuracy": 1.0}}}
    >>> weight_in(line, "val"), weight_in({**line, "scores": {"val": {"rows": 5, "reference": 2.5}}}, "val")
    (5, 2.5)
    """
    return line["scores"][view].get("reference", size_in(line, view))


def weight_of_group(group: str) -> Callable[[Mapping[str, Any], str], float | None]:
    """Return the function like `weight_in` for the headline number of a group of clients.

    >>> entry = {"rows": 5, "groups": {"day": 1.0, "night": 0.5}, "group_weights": {"day": 2.0, "night": 3.0}}
    >>> weight_of_group("day")({"window": {}, "scores": {"val": entry}}, "val")
    2.0
    """

    def weigh(line: Mapping[str, Any], view: str) -> float | None:
        usual = weight_in(line, view)
        of_groups: Mapping[str, float] = line["scores"][view].get("group_weights", {})
        return usual if usual is None else of_groups.get(group, usual)

    return weigh


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the accuracy of every evaluation that a record has."""
    return [headline(line) for line in lines if "scores" in line]


def describe(step: Step, judge: Judge, cost: Mapping[str, Cost]) -> dict[str, Any]:
    """Return the line of a round in `rounds.jsonl`.

    Args:
        step: the round.
        judge: of the algorithm.
        cost: cost of each question; that of round 0 includes what was spent before it.
    """
    fleet, truth = judge.fleet, judge.fleet.truth
    trained = [query for query in fleet.queries if query.ask.question == "train"]
    # A client that began earlier and is only asked after takes part when its answer counts.
    took = [query.ask.clients if query.sent is None else query.answered for query in trained]
    participants = remaining(truth, torch.cat(took) if took else torch.empty(0, dtype=torch.int64))
    return {
        "round": step.moment.round,
        "seconds": step.seconds,
        "asked": sum(map(_sent, fleet.queries)),
        "answered": sum(len(query.answered) for query in fleet.queries),
        "refused": sum(len(query.refused) for query in fleet.queries),
        "trained": [sum(map(_sent, trained)), sum(len(query.answered) for query in trained)],
        **asdict(sum(cost.values(), Cost())),
        **clustering(judge, cost),
        **samples(truth, step, judge),
        **({} if fleet.substituted is None else {"substituted": fleet.substituted}),
        **({} if fleet.ledger is None else describe_spending(fleet.ledger, step.moment.round)),
        **shares(truth, step, participants),
        **branches(truth, trained),
        **blends(truth, step, trained),
        **losses(trained),
        **drifts(truth, step),
        **windows(truth, step),
        "participants": judge.participants(step.received, participants.unique()),
        "facts": step.facts,
    }


def remaining(truth: Population | None, clients: Tensor) -> Tensor:
    """Return the clients that have not left; of real ones the roster says who they are."""
    return clients if truth is None else clients[truth.remains(clients)]


def describe_spending(ledger: Ledger, number: int) -> dict[str, Any]:
    """Return the epsilon of any one client up to a round, and how participants are drawn."""
    return {"epsilon": ledger.spent(number), **ledger.draws(number)}


def clustering(judge: Judge, cost: Mapping[str, Cost]) -> dict[str, Any]:
    """Return the bytes of the questions by which a method groups clients, if there are any."""
    questions = judge.algorithm.traits.groups_by
    return {"clustering": asdict(sum((cost.get(name, Cost()) for name in questions), Cost()))} if questions else {}


def samples(truth: Population | None, step: Step, judge: Judge) -> dict[str, float]:
    """Count the samples that clients whose answers counted put through a model, forward and back, if rows are known."""
    if truth is None:
        return {}
    cost = question_cost(judge.algorithm)
    counts = [(query.ask, truth.counts(query.answered, "train", step.moment)) for query in judge.fleet.queries]
    return {"samples": sum(float(samples_of(ask, rows, cost).sum()) for ask, rows in counts)}


def _sent(query: Query) -> int:
    """Count the clients that were sent a question in this round."""
    return len(query.ask.clients) if query.sent is None else int(query.sent.sum())


def _notes(trained: list[Query], name: str) -> list[tuple[int, Any]]:
    """Return each client with this note of its work, if it has any."""
    notes = [(client, getattr(note, name)) for query in trained for client, note in query.notes.items()]
    return [(client, note) for client, note in notes if note is not None]


def branches(truth: Population | None, trained: list[Query]) -> dict[str, Any]:
    """Count the participants of each group that trained each branch or model (groups, K); a single row if unknown.

    The model is the slot if the server asked by slots, else the note of the work.
    """
    noted = [(client, int(branch)) for client, branch in _notes(trained, "branch")]
    for query in trained:
        counted = query.ask.of(torch.isin(query.ask.clients, query.answered))
        if counted.slot is not None:
            noted += zip(counted.clients.tolist(), counted.slot.tolist(), strict=True)
    if not noted:
        return {}
    clients, branch = torch.tensor(noted).T
    group = torch.zeros_like(clients) if truth is None else truth.group[clients]
    groups = 1 if truth is None else len(truth.group_names)
    table = torch.zeros(groups, int(branch.max()) + 1, dtype=torch.int64)
    return {"branches": table.index_put_((group, branch), torch.tensor(1), accumulate=True)}


def blends(truth: Population | None, step: Step, trained: list[Query]) -> dict[str, Any]:
    """Return the domains of the participants' training rows, if the source has several.

    `domains` (domains,): the share of each domain, under a shift that blends domains. `split` (domains, K): number of
    rows of each domain at each component, if works note components.
    """
    if truth is None or truth.rows.domain is None or len(truth.rows.domain_names) < 2:
        return {}
    domain, several, moment = truth.rows.domain.long(), len(truth.rows.domain_names), step.moment
    out = {}
    if trained and truth.shift.cycle(moment.rounds) is not None:
        asked = remaining(truth, torch.cat([query.ask.clients for query in trained]).unique())
        rows, _ = truth.pooled(asked, moment, "train")
        out["domains"] = torch.bincount(domain[rows.long()], minlength=several).double() / max(len(rows), 1)
    noted = [(client, component.long()) for client, component in _notes(trained, "component")]
    if noted:
        rows_of = [truth.held(client, moment, "train") for client, _ in noted]
        for (client, component), own_rows in zip(noted, rows_of, strict=True):
            if len(own_rows) != len(component):
                raise FedtideError(
                    f"note 'component': found {len(component)} rows, client {client} trains on {len(own_rows)}; "
                    "allowed: one for each"
                )
        domains, components = domain[torch.cat(rows_of).long()], torch.cat([component for _, component in noted])
        reported = torch.as_tensor(step.facts.get("pi", 0.0)).numel()
        wide = max(reported, int(components.max()) + 1 if len(components) else 1)
        table = torch.zeros(several, wide, dtype=torch.int64)
        out["split"] = table.index_put_((domains, components), torch.tensor(1), accumulate=True)
    return out


def drifts(truth: Population | None, step: Step) -> dict[str, Any]:
    """Count the clients that drifted since the round before, and name the events, if rows or labels change."""
    if truth is None or not truth.shift.drifts:
        return {}
    now = step.moment
    then = replace(now, round=now.round - 1, seconds=step.before)
    return {"drifted": len(remaining(truth, truth.changed(now, then))), "events": list(truth.events(now, then))}


def windows(truth: Population | None, step: Step) -> dict[str, Any]:
    """Return the window of wall-clock time of the round, if it has one."""
    window = None if truth is None else truth.window(step.moment)
    return {} if window is None else {"window": asdict(window)}


def heterogeneity(judge: Judge, scores: Scores, slot: torch.Tensor | None) -> dict[str, Any]:
    """Return the heterogeneity of the judged clients within clusters, by their current rows, if these drift.

    `within` is the mean L1 distance of label shares, 0 to 2, between clients of a cluster (arXiv 2411.01580, section 2
    and table 3). It is null if all clients are at their own experts. A method without clusters has a single one. `all`
    is the same with all clients in one cluster. "embedding" is the same by the features of a network, if there is one.
    """
    truth, moment = judge.fleet.truth, judge.fleet.moment
    if truth is None or not (truth.shift.drifts or judge.embedded is not None):
        return {}
    if truth.rows.steps is not None or truth.rows.classes > CLASSES:
        return {}
    shares = truth.label_shares(scores.clients, moment)
    clusters = judge.clusters(scores, slot)
    nowhere = -1 if any(number is not None for number in clusters) else 0
    cluster = torch.tensor([nowhere if number is None else number for number in clusters], dtype=torch.int64)
    has_rows = shares.any(1)
    entry = {"heterogeneity": _spread(shares[has_rows], cluster[has_rows], "l1")}
    if judge.embedded is not None and has_rows.any():
        holders = scores.clients[has_rows].tolist()
        means = [judge.embedded.mean(truth.shard(client, moment)) for client in holders]
        entry["embedding"] = _spread(torch.stack(means), cluster[has_rows], judge.embedded.distance)
    return entry


def _spread(vectors: torch.Tensor, cluster: torch.Tensor, distance: Kind) -> dict[str, float]:
    """Return heterogeneity within clusters, and of all; cluster -1 is none. NaN without clients."""
    x, clustered = vectors.double(), cluster >= 0
    within = distances_within(x[clustered], cluster[clustered], distance)
    everyone = distances_within(x, torch.zeros_like(cluster), distance)
    return {"within": round(float(within.mean()), 6), "all": round(float(everyone.mean()), 6)}


def losses(trained: list[Query]) -> dict[str, Any]:
    """Return quantiles of the training loss over the participants that counted; {} if no work reports it."""
    reported = [float(loss) for _, loss in _notes(trained, "loss")]
    if not reported:
        return {}
    with np.errstate(invalid="ignore"):  # infinite losses may have no quantile
        quantiles = np.quantile(reported, [0.0, 0.25, 0.5, 0.75, 1.0]).round(6).tolist()
    return {"client_loss": dict(zip(("min", "q25", "q50", "q75", "max"), quantiles, strict=True))}


def shares(truth: Population | None, step: Step, participants: torch.Tensor) -> dict[str, Any]:
    """Return the number of participants of each group, and their expected shares; {} for a single group."""
    if truth is None or len(truth.group_names) < 2:
        return {}
    counts = torch.bincount(truth.group[participants], minlength=len(truth.group_names))
    expected = truth.expected(step.moment).tolist()
    return {"groups": counts, "expected": expected}


# -- rows for tables ---------------------------------------------------------------------------------------------------

Row = dict[str, Any]
"""Cells by the name of their column."""


def rows_of_rounds(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each round: the cells of its line, and the facts of the method.

    >>> list(rows_of_rounds([{"round": 0, "up": 8, "groups": [1, 2], "facts": {"loss": 0.5}}]))
    [{'round': 0, 'up': 8, 'loss': 0.5}]
    """
    for line in lines:
        yield {name: value for name, value in {**line, **line.get("facts", {}), **line}.items() if is_cell(value)}


def rows_of_scores(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each evaluation and view: its scores, and the accuracy of each group of clients.

    >>> line = {"round": 7, "scores": {"val": {"accuracy": 0.5, "groups": {"day": 0.25}}, "train_clients": {}}}
    >>> list(rows_of_scores([line]))
    [{'round': 7, 'view': 'val', 'accuracy': 0.5, 'accuracy_day': 0.25}]
    """
    for line in lines:
        for view, scores in line.get("scores", {}).items():
            if scores:  # real clients may all be away
                cells = {name: value for name, value in scores.items() if is_cell(value)}
                score = "skill" if "skill" in scores else "accuracy"
                groups = {f"{score}_{group}": value for group, value in scores.get("groups", {}).items()}
                yield {"round": line["round"], "view": view, **cells, **groups}
