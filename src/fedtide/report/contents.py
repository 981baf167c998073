"""What a page tells of an experiment: its tables and its pictures, in their order and with their captions."""

from __future__ import annotations

from fedtide.report import (
    budget,
    clock,
    cluster_maps,
    drift_pictures,
    figures,
    gating,
    heatmaps,
    mixtures,
    nodes,
    server_clock,
    tables,
)
from fedtide.report.figures import Drawn
from fedtide.report.reading import CLIENTS, ExperimentRecord
from fedtide.report.summary import Summary
from fedtide.report.tables import Table

Told = tuple[str, Table | None, str]
"""Title of a table, the table, None where it has no content, and its caption."""

Pictured = tuple[str, str, Drawn | None]
"""Title of a picture, its caption, and the figure, None where it has nothing to show."""

VERDICTS = (
    "What this study set out to see. A claim holds, or does not, where the 95 % confidence interval of its number over "
    "seeds (Student's t) lies beyond the bound, or short of it; in between it is not seen. Too few seeds: one or two, "
    "or so few that two standard errors, enough with many, are not enough. The same run: both methods predict the same "
    "to the last digit. Each claim is judged by itself: with nothing behind them, one in twenty would be clear."
)

CUT = (
    " A time is cut at the end of a run that never arrives, so that a difference of times is at least what is written."
)
"""What is added where seeds never arrive."""


# -- tables ------------------------------------------------------------------------------------------------------------


def tables_of(record: ExperimentRecord, summary: Summary, *, nano: bool = False) -> list[Told]:
    """Return all tables; with `nano` claims have no verdicts."""
    return [
        *_on_accuracy(record, summary, nano=nano),
        *_on_blends(record, summary),
        *_on_clients(summary),
        *_on_shift(record, summary),
        *_on_cost(record, summary),
    ]


def _on_accuracy(record: ExperimentRecord, summary: Summary, *, nano: bool) -> list[Told]:
    """Return tables on claims and accuracy."""
    span = summary.span
    return [
        ("Claims", tables.claims_table(summary.claims, verdicts=not nano) if summary.claims else None,
         "What this study set out to see." if nano else VERDICTS + CUT * any(each.reached for each in summary.claims)),
        ("Accuracy", tables.accuracy_table(summary),
         "Means over seeds ± one standard error. The last round alone is one moment of a period and can flatter: "
         "compare means and worst points. A swing is the highest minus the lowest accuracy within a period."),
        ("Over groups", tables.groups_table(summary),
         f"Means over {span}, of each group alone."
         + (" The branch of the true group: how many rows are answered by the branch that is their group's, as "
            "branches match groups best." if any("branch_accuracy" in m.measures for m in summary.methods) else "")),
        ("Swings of groups", tables.swings_table(summary),
         "The highest minus the lowest accuracy of each group alone within a period."),
        ("Peaks and troughs", tables.peaks_table(record, summary),
         f"The highest and the lowest accuracy of {record.whose} among the evaluations of each cycle of the blend. A "
         "method that goes on learning has peaks and troughs that rise from cycle to cycle."),
        ("Other ways to predict", tables.ways_table(summary),
         f"The same models put together in other ways and judged on the same rows, over {span}."),
    ]  # fmt: skip


def _on_blends(record: ExperimentRecord, summary: Summary) -> list[Told]:
    """Return tables on blends of domains, and what mixtures make of them."""
    span = summary.span
    return [
        ("Steadiness", tables.measured(summary, tables.STEADINESS) if record.blended else None,
         "Over all evaluations of the run, not only the last. The spread of losses is that of the middle half of a "
         f"round's participants, a mean over {span}."),
        ("What was made of the blend", tables.measured(summary, tables.BLEND),
         "Over the second half of the run, with one matching of components and domains for all of its rounds. The "
         "error is the mean distance of a component's learned share from the true share of its domain; the correlation "
         "is that of the first domain, over the whole run. Entropy (0 is certain) and likelihood are means over "
         f"{span}, in nats."),
        ("How likely the inputs look", tables.density_table(record),
         f"The mean log-density of the inputs' features under what the method has learned, in nats, over {span}: the "
         "lower, the more novel. It is comparable between groups, not between methods with features of their own."),
    ]  # fmt: skip


def _on_clients(summary: Summary) -> list[Told]:
    """Return tables on single clients."""
    span = summary.span
    return [
        ("Over clients", tables.clients_table(summary),
         f"Every client counts the same, however many rows it has. Means over the evaluations of {span}. The worst "
         "tenth is the mean accuracy of those clients that are served worst at that evaluation."),
        ("Your own metrics", tables.metrics_table(summary), f"Means over the evaluations of {span}."),
        ("Forgetting within a round", tables.measured(summary, tables.LOCAL_FORGETTING),
         "Accuracy that a client's training costs, as a mean over the rounds where it was measured; below zero it "
         "gains."),
    ]  # fmt: skip


def _on_shift(record: ExperimentRecord, summary: Summary) -> list[Told]:
    """Return tables on clusters, and on what changes with time."""
    clustered, span = record.clustered, summary.span
    return [
        ("Clusters", tables.measured(summary, tables.CLUSTERS),
         f"{CLIENTS[clustered].capitalize()} by the model or branch that answers for them: means over the evaluations "
         f"of {span}, but the change of cluster over those of the whole run. The adjusted Rand index is 1 where "
         "clusters are the known groups and about 0 where they are drawn at random; purity is at least the "
         "largest group's share. Evenness is the entropy of cluster sizes: 0 where all clients "
         "are in one cluster, 1 where clusters are equally large."
         + (" In a mixture a client is where most of its rows have their largest weight; where that is its own expert "
            "it is in no cluster." if any("own_weight" in m.measures for m in summary.methods) else "")),
        ("Known events", tables.measured(summary, tables.EVENTS),
         "Means over the events at which many clients change at once, each until the next one. Fall: the last accuracy "
         "before minus the lowest one after; below zero it only rose. Recovered: back within a point of the level "
         "before; where that never happens the rounds are those until the next event, or the end of the run, which cut "
         "it off. An event is noticed by the first re-clustering at or after it; others are false alarms."),
        ("Following drift", tables.drift_table(summary), _about_drift_table(summary)),
        ("Forgetting over time", tables.transfer_table(summary),
         f"Over {span}. Backward transfer: how far a group has risen since its last turn when its next one "
         "begins. Forgetting: its highest accuracy before minus that of now, while others have their turn; below zero "
         "it gained. Forward transfer: its accuracy before its first turn, minus chance. A turn recovers when its "
         "group is back within a point of the end of its last turn."),
        ("The learned rhythm", tables.measured(summary, tables.RHYTHM),
         "What learned priors found by themselves. Where no period is ever believed the rounds are those of the run. "
         "The error of the shares is the root mean square difference to the shares of groups among those who came."),
    ]  # fmt: skip


def _on_cost(record: ExperimentRecord, summary: Summary) -> list[Told]:
    """Return tables on what it costs."""
    return [
        ("The simulated clock", clock.clock_table(record, summary),
         "Means over the rounds of a run. A client that was asked to train and does not count was late, not among the "
         "first that were wanted, or never answered."),
        ("Nodes", nodes.nodes_table(record),
         "Answers of clients, not rounds: a node stands for one client or more. What is shown by client, the server "
         "sees of each of them; all else is summed. Bytes are those of questions and answers, without what carries "
         "them."),
        ("Cost", tables.cost_table(summary),
         "Bytes and wall-clock seconds of one run, over the whole run." + _about_arrivals(summary)),
    ]  # fmt: skip


# -- pictures ----------------------------------------------------------------------------------------------------------


def pictures_of(record: ExperimentRecord, summary: Summary) -> list[Pictured]:
    """Return all pictures."""
    return [
        *_of_courses(record, summary),
        *_of_blends(record),
        *_of_models(record, summary),
        *_of_clients(record),
    ]


def _of_courses(record: ExperimentRecord, summary: Summary) -> list[Pictured]:
    """Return pictures of how accuracy goes, over rounds, time, budget and a period."""
    band = _band(record)
    marked = "; dashed lines are events at which many change at once" if drift_pictures.events_of(record) else ""
    return [
        ("Accuracy over rounds",
         f"Accuracy on held-out rows of {record.whose}, {_every(record.experiment.eval_every)}.{band}"
         + (" The dotted line is what always answering the commonest class gets." if summary.floor else "")
         + (" Below: who was expected to take part, and who came." if any(m.shifted for m in record.methods) else "")
         + (" Below: how many clients hold other rows, or rows with other labels, than in the round before"
            f"{marked}." if any(m.drifts for m in record.methods) else "")
         + (" Below: of which domains participants' training rows were, in the first seed." if record.blended else ""),
         figures.accuracy_over_rounds(record, summary.at_floor)),
        ("Accuracy over simulated time",
         f"The same against the clock of the simulation: how long clients compute and send.{band}",
         clock.accuracy_over_seconds(record)),
        ("Privacy budget",
         "What everybody may see of the run says at most so much of any one client (left), and the accuracy at which "
         f"that much was spent (right).{band}",
         budget.epsilon_and_accuracy(record)),
        ("The server's clock",
         "What methods that are told nothing find out from sums: the share of the first group among the participants "
         "as read in each round (dots), between the extremes seen; the forecast that was made before the round (line), "
         "from when a period is believed (dashes); and that of the next period. The area is the truth. One seed.",
         server_clock.server_clock(record)),
        ("One period, hour by hour",
         f"{record.span.capitalize()}, folded into one period. The background shows whose hour it is: light where "
         f"the {(record.groups or ['first'])[0]} clients take part, dark where the others do.",
         figures.one_period(record)),
    ]  # fmt: skip


def _of_blends(record: ExperimentRecord) -> list[Pictured]:
    """Return pictures of what mixtures make of a blend of domains."""
    seeds, band = _seeds(record), _band(record)
    return [
        ("The blend that was learned",
         "How large a method takes each component to be (lines), and the true share of the domain that the component "
         f"matches best over all rounds (dashes of the same color), in the seeds in which it matches one.{band}",
         mixtures.blend_learned(record)),
        ("How pure the split is",
         "Above: training rows that were given to the component of their domain. One matching of components and "
         "domains holds for all rounds of a run. The gray dashes are what a split is worth that puts everything into "
         "one component. Below: how undecided methods are about a row, where they say so; 0 is certain, and K "
         f"components log K is no idea, 0.69 for two and 1.1 for three.{band}",
         mixtures.split_purity(record)),
        ("Training loss over clients",
         "Above: the median over the participants of a round, and their middle half as a band"
         f"{', means over seeds' if seeds > 1 else ''}. Below: minimum, quartiles and maximum over the participants, "
         "each as a mean over the rounds of the last cycle. A method's loss is what it trains on, and need not be that "
         "of another.",
         mixtures.client_losses(record)),
    ]  # fmt: skip


def _of_models(record: ExperimentRecord, summary: Summary) -> list[Pictured]:
    """Return pictures of which model answers for which client."""
    seeds, band = _seeds(record), _band(record)
    return [
        ("Which branch or model",
         f"Above: held-out rows of {record.whose} that the branch or model of their true group answers, as they match "
         "best; the dotted line is what a single one for all would have. Below: participants that train that of the "
         f"first group, against the share of that group that was expected, over {record.span}.",
         figures.branches(record)),
        ("Drift, round by round", _about_drift(record, band), drift_pictures.following_over_rounds(record)),
        ("Clusters over time", _about_clusters(record), cluster_maps.clusters_over_time(record, summary.clustered)),
        ("Gate weights",
         f"How much of a prediction comes from which expert, as a mean over held-out rows of {record.whose} and the "
         f"evaluations of {record.span}{', of the first seed' if seeds > 1 else ''}.",
         gating.gate_weights(record)),
    ]  # fmt: skip


def _of_clients(record: ExperimentRecord) -> list[Pictured]:
    """Return pictures of participants, groups, nodes and clients."""
    seeds, band = _seeds(record), _band(record)
    return [
        ("What the server sees",
         f"{_seen(record)} Accuracy of the model as it was sent out, on the participants' own training rows, before "
         "they train on them: the signal that gives a rhythm away without anyone looking at data. Not of "
         "methods whose clients choose or train for themselves before they are judged.",
         figures.participants(record)),
        ("Groups over all rounds",
         f"Accuracy of each group of clients{', a mean over seeds' if seeds > 1 else ''}. A white line marks the turns "
         "of a group: the rounds in which more of the participants were expected from it than from any other.",
         heatmaps.groups_over_rounds(record)),
        ("What became of each node",
         "A column is a round, and a cell the worst that happened to the node's clients in it.",
         nodes.nodes_over_rounds(record)),
        ("Who holds which labels",
         "A column is a client: the darker a cell, the more of its training rows belong to that class.",
         heatmaps.label_shares(record)),
        ("Local client forgetting", _about_forgetting(record), heatmaps.local_forgetting(record)),
        ("After local training",
         "Accuracy of each participant's own model on the rows of every client, in the last of these rounds; below it "
         "that of the model that all of them received. A model that remembers is as good in every column as that was; "
         "one that forgets is good at its own rows, the dots, and poor elsewhere. One seed.",
         heatmaps.after_local_training(record)),
        ("Local forgetting over rounds",
         f"The mean over all models and all rows of other clients, at the rounds where it was measured.{band}",
         heatmaps.forgetting_over_rounds(record)),
        ("Clients",
         "How accuracy is spread over clients: the further right a curve, the better; the steeper, the more even."
         + (f" The clients of {seeds} seeds are taken together." if seeds > 1 else ""),
         figures.client_distribution(record)),
    ]  # fmt: skip


# -- captions ----------------------------------------------------------------------------------------------------------


def _seeds(record: ExperimentRecord) -> int:
    """Return the number of seeds that lines are means over."""
    return max(len(method.runs) for method in record.methods)


def _band(record: ExperimentRecord) -> str:
    """Say what lines and bands are."""
    seeds = _seeds(record)
    return f" Lines are means over {seeds} seeds, bands one standard error." if seeds > 1 else ""


def _about_arrivals(summary: Summary) -> str:
    """Return what the times in the table of costs mean."""
    if not summary.paired:
        return ""
    return (
        f" The final accuracy is that of {summary.paired[0].baseline} after its last round, at the same seed; a method "
        "is there once it stays there to the end. A seed that never gets there counts with the end of its run (≥)."
    )


def _every(rounds: int) -> str:
    return f"every {rounds} rounds" if rounds > 1 else "every round"


def _seen(record: ExperimentRecord) -> str:
    """Say which rounds the picture of what the server sees has."""
    span, rounds = figures.seen_rounds(record), record.experiment.rounds
    if span == rounds:
        return "The whole run."
    return f"The last four periods, {span} of {rounds} rounds, so that single turns can be told apart."


def _about_clusters(record: ExperimentRecord) -> str:
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


def _about_drift(record: ExperimentRecord, band: str) -> str:
    """Return the caption of the curves of drift."""
    return (
        "All panels count the rounds done: what a round did or found stands at its end, and an event where it struck, "
        "between two rounds. Above: how far clients are, on average, from the others of their cluster, by the L1 "
        "distance of the shares of labels that they really hold; the wide gray line is that of all clients, which "
        "is what a method without clusters has. Then how many clusters there are, empty ones included: a "
        "triangle is a round in which a method re-clustered, in any seed. Then clients that were moved to another "
        f"cluster. {'Dashed lines are known events. ' if drift_pictures.events_of(record) else ''}There is a line for "
        f"every method that tells.{band}"
    )


def _about_drift_table(summary: Summary) -> str:
    """Return the caption of the table of drift."""
    own = any("spread" in method.measures for method in summary.methods)
    return (
        "The distance within clusters is the mean L1 distance of clients from the others of their cluster, by the "
        "shares of labels that they really hold (0 to 2), over all evaluations."
        + (" By its own measure: the same by what clients report, with the method's own distance." if own else "")
        + " Re-clusterings and moves of clients are those of the whole run, where a method tells. The Rand index is a "
        "mean over all evaluations; where groups drift, it is about those of that moment."
    )


def _about_forgetting(record: ExperimentRecord) -> str:
    """Return the caption of the maps of local forgetting."""
    probed = record.experiment.forgetting
    rounds = 0 if probed is None else len(probed.rounds)
    some = f" Of {rounds} rounds {heatmaps.ROUNDS} are drawn." if rounds > heatmaps.ROUNDS else ""
    return (
        "What a client's training costs: accuracy of the received model minus that of the client's own model, before "
        "anything is averaged, on rows of other clients. Red is forgotten, blue is gained, gray has no rows; a dot "
        f"marks a model on its own client's rows, which no mean counts. One scale for all maps, one seed.{some}"
    )
