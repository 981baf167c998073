"""Text of the report: the setting, the headline, one sentence per method."""

from __future__ import annotations

from fedtide.config import Experiment
from fedtide.data.targets import TargetWords
from fedtide.draw.prose import listed
from fedtide.evaluate.measure import Measure
from fedtide.fields.user_code import SESSION
from fedtide.report import dates
from fedtide.report.alarms import broken
from fedtide.report.blends import COLLAPSED as TAKEN
from fedtide.report.measures import percent, points
from fedtide.report.nodes import are_real
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import MethodSummary, Summary

ONE = 0.98
"""Share of the clients at one model or branch above which the others hardly count."""


ORACLE = "oracle"
"""Name of the algorithm that is an upper bound and no method."""

REACTIONS = {"re-clusters": "reclusterings", "moves clients": "moves"}
"""What a method does about drift, and the measures that count it."""

TARGET = "rounds_to_target"
"""Name of the measure that exists where runs stop at a target."""


def sentence(summary: Summary, method: MethodSummary) -> str:
    """Describe the result of one method in plain words."""
    of = method.measure
    if of(method.score).mean is None:
        return f"{method.name} was never judged."
    words = summary.target
    said = f"{method.name} has {words.a_score} of {percent(of(method.score))} over {summary.span}"
    if of("swing").mean is not None:
        said += f", and of {percent(of('worst_point'))} at its worst moment"
        apart = [f"{points(of(f'swing_{g}'))} for {g} clients" for g in summary.groups]
        said += f"; within a period its {words.score} swings by {points(of('swing'))}"
        said += f" ({', '.join(apart)})" if apart else ""
    else:
        said += f"; the worst-served tenth of the clients gets {percent(of('worst_decile'))}"
    if of("own_weight").mean is not None:
        said += f"; clients' own experts have {percent(of('own_weight'))} of the weight in its mixtures"
    collapsed = _taken(
        of("fullest_component"),
        TAKEN,
        "one of its components has nearly all training rows, of whatever domain: the mixture collapsed. ",
    )
    if "split_purity" not in method.measures:  # where every client holds a blend of domains, all may well be alike
        collapsed += _taken(
            of("fullest_cluster"),
            ONE,
            "nearly all clients are at one of its models or branches: in effect there is no other. ",
        )
    drift = f"{_followed(method)}{_at_events(method)}"
    floor = f"That is no better than {_floor(method, words)}. " if method.no_better else ""
    floor += "New clients have no model of their own, so this is an untrained one. " * method.untrained
    return f"{said}. {floor}{_to_target(method)}{drift}{collapsed}{_against(summary, method)}".strip()


def _floor(method: MethodSummary, words: TargetWords) -> str:
    return f"always {words.constant} ({percent(method.measures['commonest_class'])})"


def _to_target(method: MethodSummary) -> str:
    """Describe when a method reached the accuracy at which runs stop; "" without such a target."""
    rounds, seconds = (method.measure(name).mean for name in (TARGET, "time_to_target"))
    if rounds is None:
        return ""
    reached = method.measure("reached_target").values
    there, runs = int(sum(reached)), len(reached)
    if not there:
        return "It does not get to the target. "
    if there < runs:
        return f"It gets to the target in {there} of {runs} runs. "
    timed = "simulated_seconds" in method.measures and seconds is not None
    took = f", {seconds:.3g} simulated seconds" if timed else ""
    return f"It gets to the target after {_plural_of(rounds, 'round')}{took}. "


def _followed(method: MethodSummary) -> str:
    """Describe a method's reactions to drift."""
    means = {verb: method.measure(name).mean for verb, name in REACTIONS.items()}
    known = {verb: mean for verb, mean in means.items() if mean is not None}
    if not known:
        return ""
    if not any(known.values()):
        return "Its clusters never change. "
    return f"Over a run it {listed([_how_often(verb, mean) for verb, mean in known.items()])}. "


def _at_events(method: MethodSummary) -> str:
    """Describe the effect of known events on a method and its detection of them."""
    fall, noticed, back = (method.measure(name) for name in ("event_fall", "events_detected", "events_recovered"))
    if fall.mean is None:
        return ""
    single = method.measure("events_known").mean == 1
    of, event = ("runs", "The known event") if single else ("of them", "Each known event")
    said = f"{event} leaves its {method.score} as it was" if fall.mean <= 0 else f"{event} costs it {points(fall)}"
    if fall.mean > 0 and back.mean is not None:
        until = "before the end of the run" if single else "before the next one, or the end of the run,"
        said += f", which it makes up for {until} {_how_much('in' if single else 'after', of, back)}"
    if noticed.mean is None:
        return f"{said}. "
    if not noticed.mean:
        return f"{said}; it does not notice {'it' if single else 'any'}. "
    alarms, delay = (method.measure(name).mean for name in ("false_alarms", "detection_delay"))
    late = "" if delay is None else f" {_after(delay)}"
    often = f"with {_plural_of(alarms, 'false alarm')}" if alarms else "without a false alarm"
    seen = f"it {_how_much('in', 'runs', noticed)}" if single else f"{_part(noticed)} of them"
    return f"{said}; it notices {seen}{late}, {often}. "


def _how_much(where: str, of: str, share: Measure) -> str:
    """Describe a share of events or of runs.

    >>> _how_much("in", "runs", Measure(1.0, None, [1.0])), _how_much("after", "of them", Measure(0.5, None, []))
    ('in all runs', 'after 50 % of them')
    """
    if share.mean in (0.0, 1.0):
        return f"{where} {'all' if share.mean else 'none'} {of}".replace("none runs", "no run")
    return f"{where} {_part(share)} {of if of != 'runs' else 'of the runs'}"


def _part(measure: Measure) -> str:
    return "-" if measure.mean is None else f"{100 * measure.mean:.0f} %"


def _after(rounds: float) -> str:
    return f"after {_plural_of(rounds, 'round')}" if rounds else "in the same round"


def _how_often(verb: str, times: float) -> str:
    return f"{verb} {_plural_of(times, 'time')}" if times else f"never {verb}"


def _plural_of(count: float, word: str) -> str:
    """Format a mean count with its noun.

    >>> _plural_of(1.0, "round"), _plural_of(0.0, "round"), _plural_of(7.66, "round")
    ('1 round', '0 rounds', '7.7 rounds')
    """
    return f"{count:.0f} {word}{'s' * (count != 1)}" if count == round(count) else f"{count:.1f} {word}s"


def _taken(fullest: Measure, most: float, said: str) -> str:
    """Return a warning, and the seeds that it is about, where the fullest of several has a larger share than `most`."""
    seeds = [share > most for share in fullest.values]
    if not any(seeds):
        return ""
    where = "" if all(seeds) else f"In {sum(seeds)} of {len(seeds)} seeds "
    return where + (said if where else said.capitalize())


def _against(summary: Summary, method: MethodSummary) -> str:
    pair = next((p for p in summary.paired if p.name == method.name), None)
    if pair is None:
        return "The others are compared with it." if summary.paired else ""
    mean, base = pair.difference.mean, pair.baseline
    signed = points(pair.difference, signed=True)
    if mean is None:
        return ""
    if pair.same_run:
        return f"It is {SAME_RUN.format(base)}."
    if len(pair.difference.values) == 1:
        return f"That is {signed} against {base}, from one seed."
    clarity = pair.difference.clarity(mean)
    if clarity == "clear":
        higher = f"{points(_size(pair.difference))} {'higher' if mean > 0 else 'lower'}"
        return f"Its {summary.score} is {higher} than that of {base}, seed by seed."
    if clarity == "unclear":
        return f"Against {base} that is no clear difference: {signed}, seed by seed."
    return f"Against {base} that is {signed}, seed by seed: too few seeds to tell."


def _size(difference: Measure) -> Measure:
    return Measure(abs(difference.mean or 0.0), difference.error, difference.values)


# -- settings and headlines --------------------------------------------------------------------------------------------


def setting(record: ExperimentRecord) -> str:
    """Describe the experiment to a newcomer."""
    experiment = record.experiment
    real = are_real(record)
    partition = experiment.data.partition
    clients = getattr(partition, "clients", None)
    shift = experiment.shift
    held = "The clients are real, and have rows of their own"
    said = held if real else f"{clients or 'The'} clients hold {_source(experiment)}{_dealt(experiment)}"
    said += f"; {_plural(len(experiment.seeds), 'seed')}, {_plural(experiment.rounds, 'round')}. "
    said += "" if real else shift.who.words(record.groups, shift.clock)
    if experiment.stop_at is not None:
        row = experiment.stop_at.evaluations
        times = "the first evaluation" if row == 1 else f"{row} evaluations in a row"
        said += f"A run ends after {times} at {100 * experiment.stop_at.accuracy:g} % or more. "
    said += "" if real else shift.words(record.groups, record.domains, experiment.rounds)
    said += _met(record) + dates.in_words(record) + _begun(record) + ("" if real else experiment.timing.words())
    moving = ", of what they hold at that moment" if shift.drifts else ""
    ahead = (
        "The model is judged on the rows of the next window, in which clients may be new. In means every row counts "
        "the same; moments, as the worst, are those of a mean in which the past fades, as a window may have few rows."
    )
    judged = {
        "held_out_clients": "The model is judged on clients of every group that never take part in training.",
        "train_clients": ahead if record.dated else f"The model is judged on rows that the clients kept back{moving}.",
        "val": f"There are no test rows: the model is judged on the clients' validation rows{moving}.",
    }
    return " ".join([said + judged.get(record.view, ""), *_not_probed(record)]).strip()


SAME_RUN = (
    "the same run as {}, to the last digit at every seed: often because there was nothing to cluster, so that one "
    "model was left, because every client makes a single local step in a round (local.batch_size, epochs), in which a "
    "pull or a correction of later steps does nothing, or because all clients are of one size, so that cohorts drawn "
    "by size and at random are the same"
)
"""What is said of two methods that are one, with the likely reasons."""

HAPPENS = {"mass": "mass events", "change": "change points", "swap": "label swaps"}
"""Names of known events in text."""

FEW = 4
"""Maximum number of rounds that are listed."""


def _met(record: ExperimentRecord) -> str:
    """Describe the drift in the first seed of the first method that meets any."""
    run = next((run for method in record.methods for run in method.runs[:1] if method.drifts and run.lines), None)
    if run is None:
        return ""
    lines = run.lines[1:]  # events at round 0 change nothing
    happened = [(line["round"], set(line.get("events", ()))) for line in lines]
    known = [at for at, events in happened if events & HAPPENS.keys()]
    if len(known) > max(FEW, len(lines) // 2):
        return f"Something changes in {len(known)} of the {len(run.lines)} rounds. "
    if known:
        kinds = listed([word for key, word in HAPPENS.items() if any(key in events for _, events in happened)])
        when = f"after {listed([str(at) for at in known])}" if len(known) <= FEW else f"before {len(known)} of the"
        told = f"The known event is a {kinds.removesuffix('s')}" if len(known) == 1 else f"Known events are its {kinds}"
        return f"{told}, {when} round{'s' * (known != [1])}. "
    came, went = (sum(word in events for _, events in happened) for word in ("arrival", "expiry"))
    if not came and not went:
        return ""
    moved = [line.get("drifted", 0) for line, (_, events) in zip(lines, happened, strict=True) if events]
    return (
        f"Over the run something arrives in {_plural(came, 'round')} and expires in {_plural(went, 'round')}; at such "
        f"a round {sum(moved) / len(moved):.3g} clients hold other rows than before, on average. "
    )


def _begun(record: ExperimentRecord) -> str:
    """Name the methods that begin with given weights."""
    files: dict[str, list[str]] = {}
    for method in record.experiment.method:
        if method.init_from is not None:
            files.setdefault(method.init_from, []).append(method.name)
    return "".join(
        f"{listed(names)} {'begins' if len(names) == 1 else 'begin'} with the weights of {path}. "
        for path, names in files.items()
    )


def _not_probed(record: ExperimentRecord) -> list[str]:
    """Return the reasons for missing local forgetting, of methods for which it was requested."""
    lines = {method.name: method.runs[0].forgetting for method in record.methods if method.runs}
    why = {name: found[0]["skipped"] for name, found in lines.items() if found and "skipped" in found[0]}
    return [f"Local forgetting of {name} cannot be measured: {reason}." for name, reason in why.items()]


def headline(record: ExperimentRecord, summary: Summary) -> str:
    """Return the effect of the shift where an algorithm runs with and without it, else the best method."""
    left = sum(method.unfinished for method in summary.methods)
    so_far = f"So far, {left} {'run is' if left == 1 else 'runs are'} not finished and not counted. " if left else ""
    return f"{so_far}{_found(record, summary)}".strip()


def _found(record: ExperimentRecord, summary: Summary) -> str:
    pair = _with_and_without(record)
    done = {m.name: m for m in summary.methods if not broken(m)}
    if pair and pair[0] in done and pair[1] in done:
        shifted, steady = done[pair[0]], done[pair[1]]
        cost = steady.against(shifted, steady.score)
        costs = (cost.mean or 0.0) >= 0
        said = f"The shift costs {points(cost)} of {summary.score} on average"
        if not costs:
            said = f"With the shift {summary.score} is {points(_size(cost))} higher on average"
        if None not in (shifted.measure("swing").mean, steady.measure("swing").mean):
            worst = steady.against(shifted, "worst_point")
            lower = (worst.mean or 0.0) >= 0
            if costs and not lower:
                said += f"{_doubt(cost)}; at the worst moment {summary.score} is {points(_size(worst))} higher with it"
            else:
                way = "" if costs else " lower" if lower else " higher"
                said += f" and {points(_size(worst))}{way} at the worst moment{_doubt(cost)}"
            apart = [
                f"that of {group} clients by {points(shifted.measures[f'swing_{group}'])} instead of "
                f"{points(steady.measures[f'swing_{group}'])}"
                for group in summary.groups
            ]
            said += f". Within every period {summary.score} swings: {listed(apart)}" if apart else ""
        else:
            said += _doubt(cost)
        return f"{said}. {_cure(done, shifted, steady)}".strip()
    ranked = [m for m in done.values() if m.measures[m.score].mean is not None and m.algorithm != ORACLE]
    if not ranked:
        return "" if len(done) == len(summary.methods) else "No method was trained as it should be."
    bounds = [m for m in done.values() if m.measures[m.score].mean is not None and m.algorithm == ORACLE]
    return (
        _first(ranked, summary)
        + _had_anyway(ranked)
        + "".join(
            f" {m.name}, which knows the true groups and is no method, has {percent(m.measures[m.score])}."
            for m in bounds
        )
    )


def _had_anyway(ranked: list[MethodSummary]) -> str:
    """Say which baselines of time series no method is better than; "" where all are beaten."""
    best = max(ranked, key=lambda method: method.measures[method.score].mean or 0.0)
    level = {words: best.measures[name] for name, words in best.known.items() if best.no_better_than(name)}
    return "".join(
        f" That is no better than saying {words}, which needs no training and gets {percent(measure)}."
        for words, measure in level.items()
    )


def _doubt(difference: Measure) -> str:
    """Return what is to be said of a difference that is not clear; "" for one that is."""
    words = {"clear": "", "unclear": ", no clear difference", "too few seeds": ", from too few seeds to tell"}
    one = ", from one seed" if len(difference.values) == 1 else ""
    return one or words[difference.clarity(difference.mean or 0.0)]


def _first(ranked: list[MethodSummary], summary: Summary) -> str:
    first, *others = sorted(ranked, key=lambda m: m.measures[m.score].mean or 0.0, reverse=True)
    got = f"{percent(first.measures[first.score])} over {summary.span}"
    if first.no_better:
        return f"No method is better than {_floor(first, summary.target)}: {first.name} has the highest mean, {got}."
    twins = [method.name for method in others if method.same_run(first)]
    rivals = [method for method in others if method.name not in twins]
    who = f"{listed([first.name, *twins])}, which are the same run," if twins else first.name
    has = "have" if twins else "has"
    if not rivals:
        return f"{who} {has} {summary.target.a_score} of {got}."
    rival, ahead = rivals[0].name, first.against(rivals[0], first.score)
    if ahead.side() > 0:
        return f"{who} came out first, with {got}: {points(ahead)} more than {rival}, seed by seed."
    lead = "and no clear lead" if ahead.clarity(ahead.mean or 0.0) == "unclear" else "from too few seeds to tell a lead"
    return f"{who} {has} the highest mean, {got}, {lead} over {rival}."


def _cure(done: dict[str, MethodSummary], shifted: MethodSummary, steady: MethodSummary) -> str:
    """Describe the best method that clearly gains over the shifted one, and compare it with no shift."""
    gains = {name: m.against(shifted, m.score) for name, m in done.items() if m not in (shifted, steady)}
    clear = {name: gain for name, gain in gains.items() if gain.side() > 0}
    if not clear:
        few = any(gain.mean and gain.mean > 0 and gain.clarity(gain.mean) == "too few seeds" for gain in gains.values())
        return f"None of the others clearly gains on that{': too few seeds to tell' * few}." if gains else ""
    best = max(clear, key=lambda name: clear[name].mean or 0.0)
    rest = done[best].against(steady, done[best].score)
    ahead = [name for name, gain in gains.items() if name != best and (gain.mean or 0.0) > 0]
    level = [name for name in ahead if done[best].against(done[name], done[best].score).side() <= 0]
    said = f"{best} copes best: it wins back {points(clear[best])}"
    if level:
        both = f"{listed([best, *level])} cope best, without a clear difference between them"
        said = f"{both}: {best} wins back {points(clear[best])}"
    if rest.mean is None:
        return f"{said}."
    if not rest.side():
        return f"{said}; beside no shift that is {points(rest, signed=True)}{_doubt(rest)}."
    return f"{said}, which is {points(_size(rest))} {'more' if rest.mean > 0 else 'less'} than without the shift."


def _with_and_without(record: ExperimentRecord) -> tuple[str, str] | None:
    """Return the names of two methods that differ by the shift alone."""
    for shifted in record.methods:
        for steady in record.methods:
            same = (shifted.method.algorithm, shifted.method.options) == (
                steady.method.algorithm,
                steady.method.options,
            )
            if same and shifted.shifted and not steady.shifted:
                return shifted.name, steady.name
    return None


def _source(experiment: Experiment) -> str:
    source = experiment.data.source
    if source.kind == "day-night-characters":
        what = {"day": "digits", "night": "letters"}.get(source.domain, "digits and letters")
        return f"real pictures of handwritten {what}"
    if source.kind == "play-roles":
        return "what Shakespeare's roles say"
    found = getattr(source, "path", None) or getattr(source, "function", None) or source.kind
    if isinstance(found, str) and found.startswith(SESSION):
        return "rows of a Python session"
    return f"rows of {found if isinstance(found, str) else listed(list(found))}"


def _dealt(experiment: Experiment) -> str:
    """Describe who holds which rows: how they are dealt, and by which groups."""
    groups, partition = experiment.data.groups, experiment.data.partition
    said = {
        "iid": "dealt at random",
        "resample": "drawn at random for each of them",
        "natural": "as they were made" if groups.by == "none" else "",
        "rotation": f"dealt at random, in groups whose pictures are turned by {_angles(partition)} degrees",
        "dirichlet": "with label shares of their own (Dirichlet)",
        "dirichlet-class": "with label shares of their own (Dirichlet)",
        "pachinko": "with label shares of their own (Pachinko)",
        "label-shards": "each of a few labels",
        "majority": "most of them of two labels each",
    }.get(getattr(partition, "kind", ""), "")
    own = {"domain": _domains(experiment), "labels": "those of their group's labels"}.get(groups.by, "")
    # Under some shifts what a client holds changes all the time, and the shift says how.
    parts = [] if experiment.shift.what.kind != "static" else [own, said]
    parts += (
        [f"after {listed([step.kind for step in experiment.data.transforms])}"] if experiment.data.transforms else []
    )
    return "".join(f", {part}" for part in parts if part)


def _domains(experiment: Experiment) -> str:
    kind = experiment.data.source.kind
    known = {"day-night-characters": "digits (day) or letters (night)",
             "play-roles": "comedies (day) or tragedies and histories (night)"}  # fmt: skip
    return f"each {known.get(kind, 'those of one domain')}"


def _angles(partition: object) -> str:
    return listed([str(angle) for angle in getattr(partition, "angles", ())])


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
