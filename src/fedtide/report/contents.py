"""Tables of a page about an experiment, in their order and with their captions."""

from __future__ import annotations

from fedtide.evaluate.metrics import LOWER_IS_BETTER
from fedtide.report import clock, nodes, tables
from fedtide.report.reading import CLIENTS, ExperimentRecord
from fedtide.report.summary import Summary
from fedtide.report.tables import Table

Told = tuple[str, Table | None, str]
"""Title of a table, the table, None where it has no content, and its caption."""

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
    score, span, swings = summary.score, summary.span, any("swing" in method.measures for method in summary.methods)
    return [
        ("Claims", tables.claims_table(summary.claims, verdicts=not nano) if summary.claims else None,
         "What this study set out to see." if nano else VERDICTS + CUT * any(each.reached for each in summary.claims)),
        (score.capitalize(), tables.accuracy_table(summary),
         "Means over seeds ± one standard error. The last round alone is one moment of a period and can flatter: "
         "compare means and worst points."
         + (f" A swing is the highest minus the lowest {score} within a period." if swings else "")
         + summary.target.explained),
        ("Over groups", tables.groups_table(summary),
         f"Means over {span}, of each group alone."
         + (" The branch or model of the true group: how many rows are answered by that of their group, as they match "
            "groups best." if any("branch_accuracy" in m.measures for m in summary.methods) else "")),
        ("Swings of groups", tables.swings_table(summary),
         f"The highest minus the lowest {score} of each group alone within a period."),
        ("Peaks and troughs", tables.peaks_table(record, summary),
         f"The highest and the lowest {score} of {record.whose} among the evaluations of each cycle of the blend. A "
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
         f"tenth is the mean {summary.score} of those clients that are served worst at that evaluation."),
        ("More metrics", tables.metrics_table(summary),
         f"Means over the evaluations of {span}, of all rows together."
         + (" Of scores in bins the AUC is off by auc_bound at most." if "auc" in summary.metrics else "")
         + (" Errors are in the units of the labels." if {*summary.target.metrics} & {*LOWER_IS_BETTER} else "")),
        ("Forgetting within a round", tables.measured(summary, tables.LOCAL_FORGETTING),
         f"{summary.score.capitalize()} that a client's training costs, as a mean over the rounds where it was "
         "measured; below zero it gains."),
    ]  # fmt: skip


def _on_shift(record: ExperimentRecord, summary: Summary) -> list[Told]:
    """Return tables on clusters, and on what changes with time."""
    clustered, span, part = record.clustered, summary.span, summary.window < summary.rounds
    return [
        ("Clusters", tables.measured(summary, tables.CLUSTERS),
         f"{CLIENTS[clustered].capitalize()} by the model or branch that answers for them: means over the evaluations "
         f"of {span}{', but the change of cluster over those of the whole run' if part else ''}. The adjusted Rand "
         "index is 1 where clusters are the known groups and about 0 where they are drawn at random; purity is at "
         "least the largest group's share. Evenness is the entropy of cluster sizes: 0 where all clients are in one "
         "cluster, 1 where clusters are equally large."
         + (" In a mixture a client is where most of its rows have their largest weight; where that is its own expert "
            "it is in no cluster." if any("own_weight" in m.measures for m in summary.methods) else "")),
        ("Known events", tables.measured(summary, tables.EVENTS),
         "Means over the events at which many clients change at once, each until the next one. Fall: the last "
         f"{summary.score} before minus the lowest one after; below zero it only rose. Recovered: back within a point "
         "of the level before; where that never happens the rounds are those until the next event, or the end of the "
         "run, which cut it off. An event is noticed by the first re-clustering at or after it; others are false "
         "alarms."),
        ("Following drift", tables.drift_table(summary), _about_drift_table(summary)),
        ("Forgetting over time", tables.transfer_table(summary),
         f"Over {span}. Backward transfer: how far a group has risen since its last turn when its next one "
         f"begins. Forgetting: its highest {summary.score} before minus that of now, while others have their turn; "
         f"below zero it gained. Forward transfer: its {summary.score} before its first turn, minus chance. A turn "
         "recovers when its group is back within a point of the end of its last turn."),
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


# -- captions ----------------------------------------------------------------------------------------------------------


def _about_arrivals(summary: Summary) -> str:
    """Return what the times in the table of costs mean."""
    if not summary.paired:
        return ""
    return (
        f" The final {summary.score} is that of {summary.paired[0].baseline} after its last round, at the same seed; a "
        "method is there once it stays there to the end. A seed that never gets there counts with the end of its run "
        "(≥)."
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
