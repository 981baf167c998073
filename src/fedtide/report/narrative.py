"""Text of the report: alarms, the setting, the headline, and one sentence per method."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from operator import itemgetter

from fedtide.core.errors import FEW, printable
from fedtide.data.targets import TargetWords
from fedtide.draw.prose import counted, listed
from fedtide.evaluate.metrics import Measure
from fedtide.fleets.ask import NOT_FINITE
from fedtide.fleets.liars import Backdoor
from fedtide.remote.asks import REFUSED, TOO_LARGE
from fedtide.report.formats import percent, points
from fedtide.report.lead import find_doubt, find_level
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.summary import NO_SCORES, MethodSummary, Summary

ORACLE = "oracle"
"""Name of the algorithm that is an upper bound and no method."""

SAME_RUN = (
    "the same run as {}: often there was nothing to cluster, or every client makes a single local step in a round "
    "(local.batch_size, epochs), or all clients are of one size, or every round needed training"
)
"""Sentence about two methods that are the same run, with the likely reasons."""

ONE = 0.98
"""Share of the clients or rows at one model above which the others hardly count."""

# -- alarms ------------------------------------------------------------------------------------------------------------

SOME = 0.1
"""Share of refused answers above which a headline does not praise a method."""

GROUPED = 0.15
"""Mean silhouette of clusters if clients have groups: .2 to .5, without groups .05 to .12."""

RISE, LOUD = 10.0, 10.0
"""Rise of an exploded loss as a factor of the first one, and smallest first loss for it (in nats).

A guess among a thousand classes costs 7 nats.
"""


CAUSES = "usual causes are features that are not scaled (data.source.scaled) and too large a learning rate"
"""Why a model explodes."""


def alarms(summary: Summary) -> list[str]:
    """Return a sentence for each method whose training went wrong, or that made clusters without groups."""
    lines = [line for method in summary.methods for line in _alarms_of(method, summary.target)]
    if not lines and summary.methods and all(m.seeds and m.measure(m.score).mean is None for m in summary.methods):
        unjudged = "nothing was judged: no client has test rows (data.split.test), and no client is held out"
        lines = [NO_SCORES if all(method.withheld for method in summary.methods) else unjudged]
    return lines


def broken(method: MethodSummary) -> bool:
    """Tell whether a method's training went so wrong that no headline may praise it."""
    refused = _not_finite(method)
    useless = (bool(_explosions(method)) and method.no_better) or bool(_total(method, "one_answer"))
    return useless or bool(_total(method, "diverged")) or refused > SOME * (_total(method, "answered") + refused)


def _explosions(method: MethodSummary) -> list[tuple[float, float]]:
    """Return the first and the highest training loss of every seed with an exploded loss."""
    first, peak = method.by_seed("first_loss"), method.by_seed("peak_loss")
    return [(first[seed], peak[seed]) for seed in first if peak[seed] > RISE * max(first[seed], LOUD)]


def _total(method: MethodSummary, name: str) -> int:
    return int(sum(value for value in method.measure(name).values if math.isfinite(value)))


def _not_finite(method: MethodSummary) -> int:
    """Return the number of answers that were refused for their numbers; a simulation refuses no others."""
    if not method.refusals:
        return _total(method, "refused")
    return sum(method.refusals.get(reason, 0) for reason in (NOT_FINITE, TOO_LARGE))


def _refusals(method: MethodSummary) -> list[str]:
    """Return a sentence on answers that were refused for their numbers, and one on others, with the reasons."""
    wild, asked = _not_finite(method), _total(method, "answered") + _total(method, "refused")
    others = Counter({why: count for why, count in method.refusals.items() if why not in (NOT_FINITE, TOO_LARGE)})
    reasons = ", ".join(f"{why.removeprefix(REFUSED)} ({count:,})" for why, count in others.most_common(3))
    wide = "because they were not finite, or with [wire] too large for fixed point; try a smaller learning rate"
    whys = {wide: wild, f"as the table of nodes says: {printable(reasons)}": others.total()}
    return [
        f"{method.name}: {f'all {asked:,}' if count >= asked else f'{count:,} of {asked:,}'} answers of clients were "
        f"refused, {why}"
        for why, count in whys.items()
        if count
    ]


def _alarms_of(method: MethodSummary, words: TargetWords) -> list[str]:
    diverged = _total(method, "diverged")
    out = _refusals(method)
    if len(set(method.rows_judged)) > 1:
        fewest, most = min(method.rows_judged), max(method.rows_judged)
        why = "because clients were away: points of its curve are of other rows"
        out.append(f"{method.name}: evaluations are of {fewest:,.0f} to {most:,.0f} rows, {why}")
    if diverged:
        at = counted(diverged, "evaluation")
        out.append(f"{method.name}: at {at} its predictions were NaN, so it has no {words.score}")
    if _total(method, "one_answer"):
        out.append(f"{method.name}: it seems to answer one class for all rows, at every evaluation; {CAUSES}")
    elif exploded := _explosions(method):
        first, peak = max(exploded, key=itemgetter(1))
        after = f", and in the end it is no better than always {words.constant}" * method.no_better
        out.append(f"{method.name}: the training loss rose from {first:,.4g} to {peak:,.4g}{after}; {CAUSES}")
    clusters, silhouette = (method.measure(name).mean for name in ("clusters", "silhouette"))
    if clusters is not None and clusters > 1 and silhouette is not None and silhouette < GROUPED:
        out.append(
            f"{method.name}: clients hardly have clusters, with a mean silhouette of {silhouette:.2f}; clients of "
            f"a few kinds have more than {GROUPED}, else one model may do as well"
        )
    return out


# -- one sentence per method -------------------------------------------------------------------------------------------


def sentence(summary: Summary, method: MethodSummary) -> str:
    """Describe the result of one method."""
    measure, words = method.measure, summary.target
    if measure(method.score).mean is None:
        return f"{method.name} {f'has {NO_SCORES}' if method.withheld else _unjudged(method, words)}."
    text = f"{method.name} has {words.a_score} of {percent(measure(method.score))} {summary.late}"
    if measure("swing").mean is not None:
        text += f", and {percent(measure('worst_point'))} at its worst moment"
    text += "."
    if method.no_better:
        text += f" That is no better than {_floor(method, words)}."
    if method.untrained:
        text += " New clients have no model of their own, so this is an untrained one."
    # If each client holds a blend of domains, clients may well be alike.
    fullest = "fullest_component" if "split_purity" in method.measures else "fullest_cluster"
    if any(share > ONE for share in measure(fullest).values):
        text += " Nearly all clients or rows are at one of its models."
    rounds, reached = measure("rounds_to_target").mean, measure("reached_target").values
    if rounds is not None:
        times = f"in {sum(reached):.0f} of {counted(len(reached), 'run')}"
        when = f"after {counted(rounds, 'round')}" if all(reached) else times
        text += f" It reaches the target {when}."
    return f"{text}{_against(summary, method)}"


def _unjudged(method: MethodSummary, words: TargetWords) -> str:
    """Say why a method has no mean: some runs have no score at their end, or none was ever judged."""
    scores = method.by_seed(method.score).values()
    if not _total(method, "diverged") and not any(map(math.isfinite, scores)):
        return "was never judged"
    without = sum(not math.isfinite(score) for score in scores)
    return f"has no {words.score} at the end in {without} of {counted(len(scores), 'run')}"


def _floor(method: MethodSummary, words: TargetWords) -> str:
    return f"always {words.constant} ({percent(method.measures['commonest_class'])})"


def _against(summary: Summary, method: MethodSummary) -> str:
    """Compare a method with the baseline."""
    pair = next((p for p in summary.paired if p.name == method.name), None)
    if pair is None or pair.difference.mean is None:
        return ""
    if pair.same_run:
        return (
            f" It is {SAME_RUN.format(pair.baseline)}." if summary.rounds else f" It is judged as {pair.baseline} is."
        )
    return f" Against {pair.baseline} that is {points(pair.difference, signed=True)}{_doubt(pair.difference)}."


def _doubt(difference: Measure) -> str:
    """Return the doubt about a difference; "" for a clear one."""
    if len(difference.values) == 1:
        return ", from one seed"
    words = {"clear": "", "unclear": ", no clear difference", "too few seeds": ", from too few seeds to tell"}
    return words[difference.clarity(difference.mean or 0.0)]


# -- headline ----------------------------------------------------------------------------------------------------------


def headline(record: ExperimentRecord, summary: Summary) -> str:
    """Return the effect of the shift if an algorithm runs with and without it, else the best method."""
    left = sum(method.unfinished for method in summary.methods if not method.federation)
    planned = record.experiment.method  # without other uses of their models
    absent = {m.name: m.unfinished for m in record.methods if m.method in planned and m.unfinished and not m.runs}
    left += sum(absent.values())
    so_far = f"So far, {counted(left, 'run')} {'is' if left == 1 else 'are'} not finished and not counted. "
    if absent:
        so_far += f"{listed([*absent])} {'has' if len(absent) == 1 else 'have'} no finished run. "
    return f"{so_far if left else ''}{_effect(record, summary) or _best(summary, complete=not left)}".strip()


def _effect(record: ExperimentRecord, summary: Summary) -> str:
    """Return the cost of the shift; "" without two methods that differ by the shift alone."""
    pair = [m for name in _with_and_without(record) for m in summary.methods if m.name == name and not broken(m)]
    if len(pair) < 2:
        return ""
    shifted, steady = pair
    cost = steady.against(shifted, steady.score)
    if cost.mean is None:
        return ""
    text = f"The shift costs {shifted.name} {points(cost)} of {summary.score} on average{_doubt(cost)}"
    if cost.mean < 0:
        gain = shifted.against(steady, steady.score)
        text = f"{shifted.name} has {points(gain)} more {summary.score} with the shift on average{_doubt(cost)}"
    worst = steady.against(shifted, "worst_point")
    if None in (shifted.measure("swing").mean, steady.measure("swing").mean) or worst.mean is None:
        return f"{text}."
    moments = [percent(method.measure("worst_point")) for method in (shifted, steady)]
    return f"{text}; at the worst moment it is {moments[0]} instead of {moments[1]}."


def _with_and_without(record: ExperimentRecord) -> tuple[str, ...]:
    """Return the names of two methods that differ by the shift alone; () without such methods."""
    for shifted, steady in product(record.methods, repeat=2):
        settings = [m.method.model_dump(exclude={"name", "shift"}) for m in (shifted, steady)]
        if settings[0] == settings[1] and shifted.shift.who.changes and not steady.shift.who.changes:
            return shifted.name, steady.name
    return ()


def _best(summary: Summary, *, complete: bool) -> str:
    """Return the method with the highest mean, and whether it leads."""
    judged = [m for m in summary.methods if m.measure(m.score).mean is not None and not broken(m)]
    ranked = sorted(judged, key=lambda m: m.measures[m.score].mean or 0.0, reverse=True)
    bounds = [m for m in ranked if m.algorithm == ORACLE]
    ranked = [m for m in ranked if m.algorithm != ORACLE]
    if not ranked:
        return "No method was trained as it should be." if any(map(broken, summary.methods)) else ""
    text = _lead(ranked, summary, complete=complete)
    for bound in bounds:
        text += f" {bound.name}, which knows the true groups, has {percent(bound.measures[bound.score])}."
    return text


def _lead(ranked: list[MethodSummary], summary: Summary, *, complete: bool) -> str:
    first, *others = ranked
    accuracy = f"{percent(first.measures[first.score])} {summary.late}"
    twins = [method.name for method in others if method.same_run(first)]
    rivals = [method for method in others if method.name not in twins]
    names = f"{listed([first.name, *twins])}, whose predictions are equal," if twins else first.name
    verb = "have" if twins else "has"
    scores = {method.name: method.by_seed(method.score) for method in rivals}
    references = {} if first.untrained else summary.references_of(first)
    ours = first.by_seed(first.score)
    doubt = find_doubt(ours, scores, references, complete=complete)
    if not rivals and not find_level(ours, references):
        return f"{names} {verb} {summary.target.a_score} of {accuracy}."
    if doubt:
        mean = first.measures[first.score].mean
        level = [method.name for method in rivals if method.measures[method.score].mean == mean]
        if level:
            alike = f"{percent(Measure(mean, None, []))} {summary.late}"
            return f"{doubt}: {listed([first.name, *twins, *level])} have the same mean, {alike}."
        return f"{doubt}: {names} {verb} the highest mean, {accuracy}."
    ahead = points(first.against(rivals[0], first.score))
    return f"{names} lead{'' if twins else 's'} with {accuracy}: {ahead} more than {rivals[0].name}."


# -- setting -----------------------------------------------------------------------------------------------------------


def setting(record: ExperimentRecord) -> str:
    """Describe the experiment."""
    experiment, shift = record.experiment, record.experiment.shift
    clients = getattr(experiment.data.partition, "clients", None)
    simulated = f"{clients} clients of a simulation" if clients else "Clients of a simulation"
    text = "Real clients" if record.real else simulated
    if not (clients or record.real or record.private) and record.accuracies:  # the data alone say how many there are
        judged_clients = {*record.runs[0].clients(record.clustered)["client"].to_pylist()}
        text += f", of whom {len(judged_clients)} are judged"
    text += f"; {counted(len(experiment.seeds), 'seed')}, {counted(experiment.rounds, 'round')}. "
    several = len(experiment.method) * len(experiment.seeds) > 1
    for method in record.methods:
        for run in method.runs:
            whose = f" ({method.name}, seed {run.seed})" if several else ""
            for line in [] if run.other else run.lines:  # other uses of its models have the same lines
                if "rolled_back_to" in line:
                    text += f"Round {line['round'] + 1} began with the model after round {line['rolled_back_to']}"
                    text += f"{whose}. "
    text += "" if experiment.rounds else "Nothing is trained: the models that methods begin with are judged. "
    if not record.real:
        text += shift.who.words(record.groups, shift.clock)
        text += shift.words(record.groups, record.domains, experiment.rounds)
        text += experiment.timing.words()
        if experiment.liars is not None and (experiment.rounds or isinstance(experiment.liars.attack, Backdoor)):
            text += experiment.liars.words()  # in evaluations there are liars' marks alone
        text += describe_left(experiment.data.without_clients or ())
    judged = {
        "held_out_clients": "The model is judged on clients of every group that never take part in training.",
        "train_clients": "The model is judged on the rows of the next window, in which clients may be new."
        if record.dated
        else "The model is judged on rows that the clients kept back.",
        "val": "There are no test rows: the model is judged on the clients' validation rows.",
    }
    without = record.private and not record.accuracies
    private = ["The study is private: numbers of single clients are left out."] * record.private
    return " ".join([text + ("" if without else judged[record.view]), *private, *_not_probed(record)])


def describe_left(names: Sequence[str]) -> str:
    """Name the clients that have left.

    >>> describe_left(["7"]), describe_left([])
    ('Without client 7, which has left. ', '')
    """
    if not names:
        return ""
    who = f"clients {listed(names)}, which have left" if len(names) > 1 else f"client {names[0]}, which has left"
    return f"Without {who if len(names) <= FEW else f'{len(names)} clients, which have left'}. "


def _not_probed(record: ExperimentRecord) -> list[str]:
    """Return the reasons for missing local forgetting, of methods for which it was requested."""
    lines = {method.name: method.runs[0].forgetting for _, method in record.numbered}
    skipped = {name: of_run[0]["skipped"] for name, of_run in lines.items() if of_run and "skipped" in of_run[0]}
    return [f"Local forgetting of {name} cannot be measured: {reason}." for name, reason in skipped.items()]
