"""The report in words and tables: the setting, the headline, one sentence a method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedtide.config import Experiment
from fedtide.data.shift.who import Periodic
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Judged, Measure, MethodSummary, Summary


def percent(measure: Measure | None, digits: int = 1) -> str:
    """A share as percent with its standard error.

    >>> percent(Measure(0.915, 0.002, [0.913, 0.917]))
    '91.5 ± 0.2 %'
    """
    if measure is None or measure.mean is None:
        return "-"
    error = "" if measure.error is None else f" ± {100 * measure.error:.{digits}f}"
    return f"{100 * measure.mean:.{digits}f}{error} %"


def points(measure: Measure | None, digits: int = 1, *, signed: bool = False) -> str:
    """A difference of shares as percentage points with its standard error.

    >>> points(Measure(-0.017, 0.002, [-0.015, -0.019]), signed=True)
    '-1.7 ± 0.2 points'
    """
    if measure is None or measure.mean is None:
        return "-"
    error = "" if measure.error is None else f" ± {100 * measure.error:.{digits}f}"
    sign = "+" if signed else ""
    return f"{100 * measure.mean:{sign}.{digits}f}{error} points"


def sentence(summary: Summary, method: MethodSummary) -> str:
    """What one method did, in plain words."""
    measures = method.measures
    if measures.get("accuracy") is None or measures["accuracy"].mean is None:
        return f"{method.name} was never judged."
    span = f"the last {summary.window} rounds"
    said = f"{method.name} is right {percent(measures['accuracy'])} of the time over {span}"
    if _known(measures.get("swing")):
        said += f", {percent(measures['worst_point'])} at its worst moment"
        apart = [f"{points(measures.get(f'swing_{g}'))} for {g} clients" for g in summary.groups]
        said += f"; within a period its accuracy swings by {points(measures['swing'])}"
        said += f" ({', '.join(apart)})" if apart else ""
    else:
        said += f"; the worst-served tenth of the clients gets {percent(measures.get('worst_decile'))}"
    return f"{said}. {_against(summary, method)}".strip()


def _known(measure: Measure | None) -> bool:
    return measure is not None and measure.mean is not None


def _against(summary: Summary, method: MethodSummary) -> str:
    pair = next((p for p in summary.paired if p.name == method.name), None)
    if pair is None:
        return "The others are compared with it." if summary.paired else ""
    mean, error = pair.difference.mean, pair.difference.error
    if mean is None:
        return ""
    if error is None:
        return f"That is {points(pair.difference, signed=True)} against {pair.baseline}, from one seed."
    clear = abs(mean) > 2 * error
    amount = points(Measure(abs(mean), error, []))
    if clear:
        return (
            f"Its accuracy is {amount} {'higher' if mean > 0 else 'lower'} than that of {pair.baseline}, seed by seed."
        )
    return f"Against {pair.baseline} that is no clear difference: {points(pair.difference, signed=True)}, seed by seed."


# -- settings and headlines --------------------------------------------------------------------------------------------


def setting(record: ExperimentRecord) -> str:
    """What was simulated, for someone who has never heard of it."""
    experiment = record.experiment
    partition = experiment.data.partition
    clients = getattr(partition, "clients", None)
    who = experiment.shift.who
    said = f"{clients or 'The'} clients hold {_source(experiment)}; {_plural(len(experiment.seeds), 'seed')}, "
    said += f"{experiment.rounds} rounds. "
    if isinstance(who, Periodic) and record.groups:
        first, others = record.groups[0], record.groups[1:]
        unit = "rounds" if experiment.shift.clock == "rounds" else "seconds"
        turn = f"from only {first} clients to only {others[0]} clients and back"
        if len(others) > 1:
            turn = f"from {first} clients by way of {_listed(others)} clients to {first} clients again"
        said += (
            f"They belong to groups, {_listed(record.groups)}, that take turns: every {who.period:g} {unit} the "
            f"participants change {turn}{', from one block to the next' if who.curve == 'block' else ''}. "
        )
    judged = {
        "unseen": "The model is judged on clients of every group that never take part in training.",
        "seen": "The model is judged on rows that the clients kept back.",
        "valid": "There are no test rows: the model is judged on the clients' validation rows.",
    }
    return " ".join([said + judged.get(record.view, ""), *_not_probed(record)]).strip()


def _not_probed(record: ExperimentRecord) -> list[str]:
    """Why there is no local forgetting of some methods although it was asked for."""
    lines = {method.name: method.runs[0].forgetting for method in record.methods if method.runs}
    why = {name: found[0]["skipped"] for name, found in lines.items() if found and "skipped" in found[0]}
    return [f"Local forgetting of {name} cannot be measured: {reason}." for name, reason in why.items()]


def headline(record: ExperimentRecord, summary: Summary) -> str:
    """What the shift did, where the experiment has the same algorithm with and without it; else the best method."""
    left = sum(method.unfinished for method in summary.methods)
    so_far = f"So far, {left} {'run is' if left == 1 else 'runs are'} not finished and not counted. " if left else ""
    return f"{so_far}{_found(record, summary)}".strip()


def _found(record: ExperimentRecord, summary: Summary) -> str:
    pair = _with_and_without(record)
    done = {m.name: m for m in summary.methods}
    if pair and pair[0] in done and pair[1] in done:
        shifted, steady = done[pair[0]], done[pair[1]]
        said = f"The shift costs {points(_difference(steady, shifted, 'accuracy'))} of accuracy on average"
        if _known(shifted.measures.get("swing")) and _known(steady.measures.get("swing")):
            said += f" and {points(_difference(steady, shifted, 'worst_point'))} at the worst moment"
            apart = [
                f"that of {group} clients by {points(shifted.measures[f'swing_{group}'])} instead of "
                f"{points(steady.measures[f'swing_{group}'])}"
                for group in summary.groups
            ]
            said += f". Within every period accuracy swings: {_listed(apart)}" if apart else ""
        return f"{said}. {_cure(done, shifted, steady)}".strip()
    ranked = [m for m in summary.methods if m.measures["accuracy"].mean is not None]
    if not ranked:
        return ""
    first, *others = sorted(ranked, key=lambda m: m.measures["accuracy"].mean or 0.0, reverse=True)
    got = f"{percent(first.measures['accuracy'])} over the last {summary.window} rounds"
    if not others:
        return f"{first.name} is right {got}."
    ahead = _difference(first, others[0], "accuracy")
    if ahead.mean is not None and ahead.error is not None and ahead.mean > 2 * ahead.error:
        return f"{first.name} came out first, with {got}: {points(ahead)} more than {others[0].name}, seed by seed."
    return f"{first.name} has the highest mean, {got}, and no clear lead over {others[0].name}."


def _cure(done: dict[str, MethodSummary], shifted: MethodSummary, steady: MethodSummary) -> str:
    """Which of the other methods clearly gains over the shifted one, and how it stands to no shift at all."""
    gains = {name: _difference(m, shifted, "accuracy") for name, m in done.items() if m not in (shifted, steady)}
    clear = {n: g for n, g in gains.items() if g.mean is not None and g.error is not None and g.mean > 2 * g.error}
    if not clear:
        return "None of the others clearly gains on that." if gains else ""
    best = max(clear, key=lambda name: clear[name].mean or 0.0)
    rest = _difference(done[best], steady, "accuracy")
    said = f"{best} copes best: it wins back {points(clear[best])}"
    if rest.mean is None or rest.error is None or abs(rest.mean) <= 2 * rest.error:
        return f"{said}, about all that the shift costs."
    more = "more" if rest.mean > 0 else "less"
    return f"{said}, which is {points(Measure(abs(rest.mean), rest.error, []))} {more} than without the shift."


def _with_and_without(record: ExperimentRecord) -> tuple[str, str] | None:
    """Names of two methods that differ by the shift alone."""
    for shifted in record.methods:
        for steady in record.methods:
            same = (shifted.method.algorithm, shifted.method.options) == (
                steady.method.algorithm,
                steady.method.options,
            )
            if same and shifted.shifted and not steady.shifted:
                return shifted.name, steady.name
    return None


def _difference(left: MethodSummary, right: MethodSummary, name: str) -> Measure:
    ours, theirs = (dict(zip(m.seeds, m.measures[name].values, strict=True)) for m in (left, right))
    return Measure.of([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def _source(experiment: Experiment) -> str:
    source = experiment.data.source
    if source.kind == "day-night-characters":
        return "real pictures of handwriting, digits by day and letters by night"
    if source.kind == "play-roles":
        return "what Shakespeare's roles say, comedies by day and tragedies and histories by night"
    found = getattr(source, "path", None) or getattr(source, "function", None) or source.kind
    return f"rows of {found if isinstance(found, str) else _listed(list(found))}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# -- tables ------------------------------------------------------------------------------------------------------------


Column = tuple[str, str, Callable[[Measure | None], str]]
"""Of a table: its title, the measure, and how that is written."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is a name."""

    header: list[str]
    rows: list[list[str]]


def accuracy_table(summary: Summary) -> Table:
    """Accuracy in all its forms, a row per method."""
    columns: list[tuple[str, str, Callable[[Measure | None], str]]] = [
        (f"mean of last {summary.window} rounds", "accuracy", percent),
        ("last round", "last", percent),
        ("best", "best", percent),
        *((f"{group} clients", f"accuracy_{group}", percent) for group in summary.groups),
        ("worst point", "worst_point", percent),
        ("swing", "swing", points),
        *((f"swing, {group}", f"swing_{group}", points) for group in summary.groups),
        ("branch of the true group", "branch_accuracy", percent),
        ("worst tenth of clients", "worst_decile", percent),
        ("variance of client accuracy (share²)", "client_variance", _number),
        *([] if summary.view == "valid" else [("validation rows", "valid_accuracy", percent)]),
    ]
    known = [c for c in columns if any(c[1] in m.measures for m in summary.methods)]
    header = ["method", *(title for title, _, _ in known)]
    rows = [[m.name, *(show(m.measures.get(name)) for _, name, show in known)] for m in summary.methods]
    if summary.paired:
        header.insert(2, f"against {summary.paired[0].baseline}, paired")
        by_name = {p.name: points(p.difference, signed=True) for p in summary.paired}
        rows = [[*row[:2], by_name.get(row[0], "-"), *row[2:]] for row in rows]
    return Table(header, rows)


def local_forgetting_table(summary: Summary) -> Table | None:
    """What local training cost on rows of other clients, a row per method; None where it was not measured."""
    columns: list[Column] = [
        ("on rows of other clients", "local_forgetting", points),
        ("of those without a common class", "local_forgetting_apart", points),
        ("on own rows", "local_forgetting_own", points),
        ("increase of the loss, other clients", "local_loss_increase", _number),
    ]
    return _known_table(summary, columns)


def transfer_table(summary: Summary) -> Table | None:
    """What was forgotten of groups that were away, a row per method; None where nobody was away."""
    columns: list[Column] = [
        ("backward transfer", "backward_transfer", lambda measure: points(measure, signed=True)),
        ("forgetting", "forgetting", points),
        *((f"forgetting, {group} clients", f"forgetting_{group}", points) for group in summary.groups),
        ("forward transfer", "forward_transfer", lambda measure: points(measure, signed=True)),
        ("turns that recover", "recovered", percent),
        ("rounds to recover", "recovery_rounds", _count),
    ]
    return _known_table(summary, columns)


def _known_table(summary: Summary, columns: Sequence[Column]) -> Table | None:
    """The columns of which anything is known; None where that is none."""
    known = [c for c in columns if any(_finite(m.measures.get(c[1])) for m in summary.methods)]
    rows = [[m.name, *(show(m.measures.get(name)) for _, name, show in known)] for m in summary.methods]
    return Table(["method", *(title for title, _, _ in known)], rows) if known else None


def _finite(measure: Measure | None) -> bool:
    return measure is not None and any(math.isfinite(value) for value in measure.values)


def brief_table(summary: Summary) -> Table:
    """The few columns that a terminal has room for."""
    columns = [
        (f"last {summary.window} rounds", "accuracy", percent),
        ("worst point", "worst_point", percent),
        ("swing", "swing", points),
        ("right branch", "branch_accuracy", percent),
        ("local forgetting", "local_forgetting", points),
    ]
    known = [c for c in columns if any(c[1] in m.measures for m in summary.methods)]
    header = ["method", *(title for title, _, _ in known)]
    rows = [[m.name, *(show(m.measures.get(name)) for _, name, show in known)] for m in summary.methods]
    if summary.paired:
        header.append(f"against {summary.paired[0].baseline}")
        by_name = {p.name: points(p.difference, signed=True) for p in summary.paired}
        rows = [[*row, by_name.get(row[0], "-")] for row in rows]
    return Table(header, rows)


def claims_table(summary: Summary) -> Table:
    """What the study set out to see, with numbers and verdicts."""
    rows = [[j.claim, signed(j), j.verdict] for j in summary.claims]
    return Table(["claim", "found", "verdict"], rows)


def signed(judged: Judged) -> str:
    """The number of a claim: points for accuracies, as it is for the rest."""
    if judged.number.mean is None:
        return "-"
    shares = ("accuracy", "point", "swing", "last", "best", "decile", "q10", "forgetting", "transfer", "recovered")
    if any(word in judged.measure for word in shares):
        return points(judged.number, signed=True) if judged.paired else percent(judged.number)
    return _number(judged.number)


def cost_table(summary: Summary) -> Table:
    """What it cost: bytes on the wire, wall clock, refused answers, time to the baseline's accuracy."""
    header = ["method", "to clients", "from clients", "training", "evaluation", "refused answers"]
    names: list[tuple[str, Callable[[Measure | None], str]]] = [
        ("down", _bytes), ("up", _bytes), ("seconds", _seconds), ("evaluation_seconds", _seconds), ("refused", _count),
    ]  # fmt: skip
    if summary.paired:
        header.append(f"simulated time to the accuracy of {summary.paired[0].baseline}")
        names.append(("time_to_accuracy", _seconds))
    rows = [[m.name, *(show(m.measures.get(name)) for name, show in names)] for m in summary.methods]
    return Table(header, rows)


def sweep_table(summaries: Sequence[Summary], chosen: Mapping[str, Summary]) -> Table:
    """Late accuracy at every point of a sweep; the point that each method chose by validation rows is marked."""
    names = list(dict.fromkeys(method.name for summary in summaries for method in summary.methods))
    rows = []
    for summary in summaries:
        done = {m.name: m for m in summary.methods}
        cells = []
        for name in names:
            mark = " ← chosen" if chosen.get(name) is summary else ""
            cells.append((percent(done[name].measures.get("accuracy")) if name in done else "-") + mark)
        rows.append([summary.point, *cells])
    return Table(["point", *names], rows)


def _number(measure: Measure | None) -> str:
    if measure is None or measure.mean is None:
        return "-"
    return f"{measure.mean:.4f}" + ("" if measure.error is None else f" ± {measure.error:.4f}")


def _bytes(measure: Measure | None) -> str:
    if measure is None or measure.mean is None:
        return "-"
    size, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _seconds(measure: Measure | None) -> str:
    if measure is None or measure.mean is None:
        never = sum(value == math.inf for value in measure.values) if measure else 0
        return f"not reached ({never} of {len(measure.values)} seeds)" if measure and never else "-"
    return f"{measure.mean:.1f} s" if measure.mean < 600 else f"{measure.mean / 60:.1f} min"


def _count(measure: Measure | None) -> str:
    return "-" if measure is None or measure.mean is None else f"{measure.mean:.4g}"
