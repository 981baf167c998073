"""Pictures of a run: what each is called on a page and in `ft.plot`, its caption, who draws it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedtide.data.rows import BASELINES
from fedtide.evaluate.metrics import FADING
from fedtide.report import (
    budget,
    clock,
    cluster_maps,
    dates,
    drift_pictures,
    figures,
    gating,
    heatmaps,
    mixtures,
    nodes,
    server_clock,
)
from fedtide.report.figures import Drawn
from fedtide.report.reading import CLIENTS, ExperimentRecord
from fedtide.report.summary import Summary

Pictured = tuple[str, str, Drawn | None]
"""Title of a picture, its caption, and the figure, None where it has nothing to show."""


@dataclass(frozen=True)
class Kind:
    """A kind of picture.

    Args:
        title: above it, on a page; in it, too, `{Score}` and others stand for what a record says.
        draw: from a record; None where it has nothing of the kind.
        caption: below it: a text in which `{band}` and the others of `_words` stand for what a record says, or what
            makes it.
        needs: what a run has to have, for the error of one that has not.
    """

    title: str
    draw: Callable[[ExperimentRecord, Summary], Drawn | None]
    caption: str | Callable[[ExperimentRecord, Summary], str]
    needs: str = ""

    def about(self, record: ExperimentRecord, summary: Summary) -> str:
        """Return the caption."""
        return self.caption.format(**_words(record)) if isinstance(self.caption, str) else self.caption(record, summary)


def pictures_of(record: ExperimentRecord, summary: Summary) -> list[Pictured]:
    """Return all pictures, in the order of a page."""
    words = _words(record)
    return [
        (kind.title.format(**words), kind.about(record, summary), kind.draw(record, summary))
        for kind in PICTURES.values()
    ]


def _of_record(draw: Callable[[ExperimentRecord], Drawn | None]) -> Callable[[ExperimentRecord, Summary], Drawn | None]:
    return lambda record, summary: draw(record)


# -- captions ----------------------------------------------------------------------------------------------------------


def _words(record: ExperimentRecord) -> dict[str, str]:
    """Return what captions say of a record."""
    seeds = max(len(method.runs) for method in record.methods)
    several = seeds > 1
    return {
        "score": record.experiment.score,
        "Score": record.experiment.score.capitalize(),
        "whose": record.whose,
        "span": record.span,
        "first_group": (record.groups or ["first"])[0],
        "band": f" Lines are means over {seeds} seeds, bands one standard error." if several else "",
        "means": ", means over seeds" if several else "",
        "mean": ", a mean over seeds" if several else "",
        "first_seed": ", of the first seed" if several else "",
        "together": f" The clients of {seeds} seeds are taken together." if several else "",
    }


def _about_accuracy(record: ExperimentRecord, summary: Summary) -> str:
    every = record.experiment.eval_every
    if record.dated:
        return (
            f"Test, then train: {summary.score} of {record.whose} on the rows of the next window, of which the model "
            f"has seen none, {f'every {every} rounds' if every > 1 else 'in every round'}; a mean in which the past "
            f"counts {FADING:g} times as much after each evaluation. Below: clients to which something new came "
            f"in the window.{_words(record)['band']}"
        )
    marked = "; dashed lines are events at which many change at once" if drift_pictures.events_of(record) else ""
    return (
        f"{summary.score.capitalize()} on held-out rows of {record.whose}, "
        f"every {f'{every} rounds' if every > 1 else 'round'}."
        + _words(record)["band"]
        + (f" The dotted line is what always {summary.target.constant} gets." if summary.floor else "")
        + (" Gray lines say the value of a day or a week ago, where they are not below all that is drawn."
           if any(name in method.measures for method in summary.methods for name in BASELINES) else "")
        + (" Below: who was expected to take part, and who came." if any(m.shifted for m in record.methods) else "")
        + (" Below: how many clients hold other rows, or rows with other labels, than in the round before"
           f"{marked}." if any(m.drifts for m in record.methods) else "")
        + (" Below: of which domains participants' training rows were, in the first seed." if record.blended else "")
    )  # fmt: skip


def _seen(record: ExperimentRecord) -> str:
    """Say which rounds the picture of what the server sees has."""
    span, rounds = figures.seen_rounds(record), record.experiment.rounds
    if span == rounds:
        return "The whole run."
    return f"The last four periods, {span} of {rounds} rounds, so that single turns can be told apart."


def _about_clusters(record: ExperimentRecord, _: Summary) -> str:
    """Return the caption of the maps of clusters."""
    view = record.clustered
    regrouped = any(run.regrouped for method in record.methods for run in method.runs)
    grouped = ", by their true group (black lines part the groups)" if record.groups else ""
    if regrouped:
        grouped = ", by their true group at the end (black lines part these) and by those before it"
    several = " of the first seed" if any(len(method.runs) > 1 for method in record.methods) else ""
    evenly = ", evenly over groups" if record.groups or regrouped else ""
    first = "The first map shows the true groups of the same clients, in colors of their own. " if regrouped else ""
    return (
        f"Rows are {CLIENTS[view]}{several}{grouped}; the color is the model or branch that answers for most of a "
        f"client's data, at each evaluation. {first}At most {cluster_maps.DRAWN} clients are drawn{evenly}. "
        "Numbers of models mean nothing by themselves and are those of the record. Below: the share of all these "
        "clients at each model; a single color is a collapse, except where every client holds the same blend of rows."
    )


def _about_drift(record: ExperimentRecord, _: Summary) -> str:
    """Return the caption of the curves of drift."""
    told = {
        "apart": "how far clients are, on average, from the others of their cluster, by the L1 distance of the shares "
        "of labels that they really hold; the wide gray line is that of all clients, which is what a method without "
        "clusters has",
        "counts": "how many clusters there are, empty ones included: a triangle is a round in which a method "
        "re-clustered, in any seed",
        "moves": "clients that were moved to another cluster",
    }
    said = ". Then ".join(told[name] for name in drift_pictures.panels(record))
    return (
        "What a round did or found stands at its end, and an event where it struck, between two rounds. Drawn is "
        f"{said}. {'Dashed lines are known events. ' if drift_pictures.events_of(record) else ''}There is a line for "
        "every method that tells." + _words(record)["band"]
    )


def _about_forgetting(record: ExperimentRecord, summary: Summary) -> str:
    """Return the caption of the maps of local forgetting."""
    probed = record.experiment.forgetting
    rounds = 0 if probed is None else len(probed.rounds)
    some = f" Of {rounds} rounds {heatmaps.ROUNDS} are drawn." if rounds > heatmaps.ROUNDS else ""
    return (
        f"What a client's training costs: {summary.score} of the received model minus that of the client's own model, "
        "before anything is averaged, on rows of other clients. Red is forgotten, blue is gained, gray has no rows; a "
        f"dot marks a model on its own client's rows, which no mean counts. One scale for all maps, one seed.{some}"
    )


# -- the table ---------------------------------------------------------------------------------------------------------

PICTURES = {
    "accuracy": Kind(
        "{Score} over rounds",
        lambda record, summary: (
            dates.accuracy_over_dates(record)
            if record.dated
            else figures.accuracy_over_rounds(record, summary.at_floor)
        ),
        _about_accuracy,
    ),
    "by_hour": Kind(
        "By hour, weekday and month",
        _of_record(dates.accuracy_by_cycle),
        "{Score} of {whose} on the next window, by when it begins on the clocks of its zone: of all rows of that "
        "hour, weekday or month. Below: how many of the rows are of that time.{band}",
        'shift.what = "calendar", with windows short enough and a run long enough to tell',
    ),
    "metrics": Kind(
        "More metrics over rounds",
        _of_record(figures.metrics_over_rounds),
        "What the experiment asks for beside {score}, on held-out rows of {whose}.{band}",
        "metrics = [...]",
    ),
    "accuracy_over_time": Kind(
        "{Score} over simulated time",
        _of_record(clock.accuracy_over_seconds),
        "The same against the clock of the simulation: how long clients compute and send.{band}",
        "rounds of different lengths",
    ),
    "budget_spent": Kind(
        "Privacy budget",
        _of_record(budget.epsilon_and_accuracy),
        "What everybody may see of the run says at most so much of any one client (left), and the {score} at which "
        "that much was spent (right).{band}",
        "[wire] privacy",
    ),
    "rhythm": Kind(
        "The server's clock",
        _of_record(server_clock.server_clock),
        "What methods that are told nothing find out from sums: the share of the first group among the participants "
        "as read in each round (dots), between the extremes seen; the forecast that was made before the round (line), "
        "from when a period is believed (dashes); and that of the next period. The area is the truth. One seed.",
        'a method with prior = "learned"',
    ),
    "period": Kind(
        "One period, hour by hour",
        _of_record(figures.one_period),
        "{Score} over {span}, folded into one period. The background shows whose hour it is: light where the "
        "{first_group} clients take part, dark where the others do.",
        "a whole period in which groups take turns",
    ),
    "blend": Kind(
        "The blend that was learned",
        _of_record(mixtures.blend_learned),
        "How large a method takes each component to be (lines), and the true share of the domain that the component "
        "matches best over all rounds (dashes of the same color), in the seeds in which it matches one.{band}",
        "a method with components, and clients with a blend of domains",
    ),
    "split_purity": Kind(
        "How pure the split is",
        _of_record(mixtures.split_purity),
        "Above: training rows that were given to the component of their domain. One matching of components and "
        "domains holds for all rounds of a run. The gray dashes are what a split is worth that puts everything into "
        "one component. Below: how undecided methods are about a row, where they say so; 0 is certain, and K "
        "components log K is no idea, 0.69 for two and 1.1 for three.{band}",
        "a method that splits rows, and clients with a blend of domains",
    ),
    "client_losses": Kind(
        "Training loss over clients",
        _of_record(mixtures.client_losses),
        "Above: the median over the participants of a round, and their middle half as a band{means}. Below: minimum, "
        "quartiles and maximum over the participants, each as a mean over the rounds of the last cycle. A method's "
        "loss is what it trains on, and need not be that of another.",
        "clients with a blend of domains",
    ),
    "branches": Kind(
        "Which branch or model",
        _of_record(figures.branches),
        "Above: held-out rows of {whose} that the branch or model of their true group answers, as they match best; the "
        "dotted line is what a single one for all would have. Below: participants that train that of the first group, "
        "against the share of that group that was expected, over {span}.",
        "groups of clients, and a method with branches or models",
    ),
    "drift": Kind(
        "Drift, round by round",
        _of_record(drift_pictures.following_over_rounds),
        _about_drift,
        "clients that drift",
    ),
    "clusters": Kind(
        "Clusters over time",
        lambda record, summary: cluster_maps.clusters_over_time(record, summary.clustered),
        _about_clusters,
        "clusters of clients",
    ),
    "gate_weights": Kind(
        "Gate weights",
        _of_record(gating.gate_weights),
        "How much of a prediction comes from which expert, as a mean over held-out rows of {whose} and the evaluations "
        "of {span}{first_seed}.",
        "a method that mixes experts",
    ),
    "participants": Kind(
        "What the server sees",
        _of_record(figures.participants),
        lambda record, _: (
            f"{_seen(record)} {record.experiment.score.capitalize()} of the model as it was sent out, on the "
            "participants' own training rows, before they train on them: the signal that gives a rhythm away without "
            "anyone looking at data. Not of methods whose clients choose or train for themselves before they are "
            "judged."
        ),
        "a method whose clients take the model as it is",
    ),
    "groups": Kind(
        "Groups over all rounds",
        _of_record(heatmaps.groups_over_rounds),
        "{Score} of each group of clients{mean}. A white line marks the turns of a group: the rounds in which more of "
        "the participants were expected from it than from any other.",
        "three groups of clients, or no whole period to fold",
    ),
    "nodes_over_rounds": Kind(
        "What became of each node",
        _of_record(nodes.nodes_over_rounds),
        "A column is a round, and a cell the worst that happened to the node's clients in it.",
        "real clients",
    ),
    "labels": Kind(
        "Who holds which labels",
        _of_record(heatmaps.label_shares),
        "A column is a client: the darker a cell, the more of its training rows belong to that class.",
        "labels that differ between clients",
    ),
    "forgetting": Kind(
        "Local client forgetting", _of_record(heatmaps.local_forgetting), _about_forgetting, "[forgetting]"
    ),
    "local_models": Kind(
        "After local training",
        _of_record(heatmaps.after_local_training),
        "{Score} of each participant's own model on the rows of every client, in the last of these rounds; below it "
        "that of the model that all of them received. A model that remembers is as good in every column as that was; "
        "one that forgets is good at its own rows, the dots, and poor elsewhere. One seed.",
        "[forgetting]",
    ),
    "forgetting_over_rounds": Kind(
        "Local forgetting over rounds",
        _of_record(heatmaps.forgetting_over_rounds),
        "The mean over all models and all rows of other clients, at the rounds where it was measured.{band}",
        "[forgetting] of several rounds",
    ),
    "clients": Kind(
        "Clients",
        _of_record(figures.client_distribution),
        "How {score} is spread over clients: the further right a curve, the better; the steeper, the more even."
        "{together}",
        "evaluations of clients",
    ),
}  # fmt: skip
"""Pictures of a run by their names in `ft.plot`, in the order of a page."""
