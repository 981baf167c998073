"""Units and formats of all measures, by their names in summary.json."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedtide.config import Experiment, matching
from fedtide.config import points as points_of
from fedtide.config.schema import units_of
from fedtide.core.errors import refused, unknown
from fedtide.data.targets import TARGET_WORDS
from fedtide.evaluate.measure import Measure
from fedtide.evaluate.metrics import METRICS, NO_METRICS, Unit, metrics_for

Written = Callable[[Measure], str]
"""Format of a measure; "-" for an unknown value."""


def percent(measure: Measure, digits: int = 1) -> str:
    """Format a share as percent with its standard error.

    >>> percent(Measure(0.915, 0.002, [0.913, 0.917]))
    '91.5 ± 0.2 %'
    """
    return _with_error(measure, digits, "%", 100.0)


def points(measure: Measure, digits: int = 1, *, signed: bool = False) -> str:
    """Format a difference of shares as percentage points with its standard error.

    >>> points(Measure(-0.017, 0.002, [-0.015, -0.019]), signed=True)
    '-1.7 ± 0.2 points'
    """
    return _with_error(measure, digits, "points", 100.0, signed=signed)


def _with_error(
    measure: Measure, digits: int | None = None, unit: str = "", scale: float = 1.0, *, signed: bool = False
) -> str:
    """Format a mean with its standard error, if that is known and above 0, and with its unit.

    Without `digits` the error has two significant ones, or the mean three.
    """
    if measure.mean is None:
        return "-"
    mean, error = scale * measure.mean, scale * (measure.error or 0.0)
    error = error if error > 1e-9 else 0.0
    if digits is None:
        leading = error or abs(mean) / 10 or 0.1
        digits = min(max(1 - math.floor(math.log10(leading)), 0), 4)
    mean = round(mean, digits) + 0.0  # no minus before a zero
    said = f"{mean:{'+' if signed else ''}.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")
    return f"{said} {unit}".rstrip()


def signed_points(measure: Measure) -> str:
    """Format a difference of shares as percentage points with its sign."""
    return points(measure, signed=True)


def number(measure: Measure) -> str:
    """Format a plain number with its standard error.

    >>> number(Measure(1.0, 0.0, [1.0, 1.0])), number(Measure(-0.0984, 0.0321, [])), number(Measure(0.01234, None, []))
    ('1.00', '-0.098 ± 0.032', '0.0123')
    """
    return _with_error(measure)


def nats(measure: Measure) -> str:
    """Format a mean log-density with its standard error.

    >>> nats(Measure(-12.345, 0.678, []))
    '-12.35 ± 0.68'
    """
    return _with_error(measure, 2)


def size(measure: Measure) -> str:
    """Format a number of bytes in a suitable unit."""
    if measure.mean is None:
        return "-"
    left, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(left) < 1000:
            break
        left, unit = left / 1000, larger
    return f"{left:.3g} {unit}" if abs(left) < 1000 else f"{left:.0f} {unit}"


def bytes_of(count: int) -> str:
    """Format a number of bytes that is known.

    >>> bytes_of(1_234_567)
    '1.23 MB'
    """
    return size(Measure(float(count), None, []))


def seconds(measure: Measure, *, signed: bool = False) -> str:
    """Format a time in seconds, or from ten minutes on in minutes, with its standard error.

    >>> seconds(Measure(12.5, 0.5, [12.0, 13.0])), seconds(Measure(1230.0, None, [1230.0]))
    ('12.5 ± 0.5 s', '20.5 min')
    """
    long = measure.mean is not None and abs(measure.mean) >= 600
    return _with_error(measure, 1, "min" if long else "s", 1 / 60 if long else 1.0, signed=signed)


def rounds(measure: Measure, *, signed: bool = False) -> str:
    """Format a number of rounds with its standard error.

    >>> rounds(Measure(12.5, 0.5, [12.0, 13.0])), rounds(Measure(-2.0, 0.0, [-2.0, -2.0]), signed=True)
    ('12.5 ± 0.5 rounds', '-2 rounds')
    """
    if measure.mean is None:
        return "-"
    whole = not measure.error and measure.mean.is_integer()
    unit = "round" if whole and abs(measure.mean) == 1 else "rounds"
    return _with_error(measure, 0 if whole else 1, unit, signed=signed)


def arrival(time: Measure, reached: Measure, written: Written) -> str:
    """Format a time until a target; where some seeds never arrive it is at least so long, and says how many do.

    >>> arrival(Measure(7.5, None, [5.0, 10.0]), Measure(0.5, None, [1.0, 0.0]), rounds)
    '≥ 7.5 rounds (1 of 2 seeds)'
    """
    if time.mean is None:
        return "-"
    there, seeds = int(sum(reached.values)), len(reached.values)
    if there == seeds:
        return written(time)
    return f"≥ {written(time)} ({there} of {seeds} seeds)" if there else "not reached"


def count(measure: Measure) -> str:
    """Format a mean count."""
    return "-" if measure.mean is None else f"{measure.mean:.4g}"


FORMATS: dict[Unit, Written] = {
    "share": percent, "points": points, "number": number, "count": count, "seconds": seconds, "rounds": rounds,
    "bytes": size,
}  # fmt: skip
"""Format of each unit."""

WRITTEN: dict[Written, str] = {
    percent: "last best worst_point mean_over_rounds branch_accuracy val_accuracy own_weight recovered split_purity "
    "skill val_skill yesterday last_week "
    "fullest_component events_recovered events_detected counted reached_accuracy reached_target commonest_class purity "
    "fullest_cluster churn period_known period_found shares_known",
    points: "swing std_over_rounds client_std local_forgetting local_forgetting_own local_forgetting_apart forgetting "
    "share_error shares_error event_fall",
    signed_points: "peak_gain trough_gain backward_transfer forward_transfer",
    number: "share_correlation posterior_entropy log_likelihood training_loss first_loss peak_loss loss_spread "
    "ari_over_rounds ari_last heterogeneity heterogeneity_all embedding_heterogeneity embedding_heterogeneity_all "
    "spread silhouette ari nmi evenness local_loss_increase",
    size: "down up",
    seconds: "seconds evaluation_seconds time_to_accuracy time_to_target simulated_seconds",
    rounds: "rounds_to_target rounds_to_period learned_period",
    count: "answered refused diverged recovery_rounds moves reclusterings clusters clusters_last event_recovery "
    "detection_delay false_alarms events_known asked_to_train counted_in_a_round",
}
"""Measures of each format that are no metrics of an evaluation."""

UNITS: dict[str, Written] = {metric.name: FORMATS[metric.unit] for metric in METRICS}
UNITS |= {name: written for written, names in WRITTEN.items() for name in names.split()}
"""Format of every measure of a run; docs/reports.md describes the measures."""

NAMES = {
    **dict.fromkeys(("ari", "ari_over_rounds", "ari_last"), "adjusted Rand index"),
    **dict.fromkeys(("heterogeneity", "heterogeneity_all"), "L1 distance"),
    **dict.fromkeys(("embedding_heterogeneity", "embedding_heterogeneity_all"), "between embeddings"),
    **dict.fromkeys(("posterior_entropy", "log_likelihood"), "nats"),
    "nmi": "mutual information",
    "evenness": "evenness",
    "spread": "of its own distance",
    "silhouette": "mean silhouette",
    "share_correlation": "correlation",
}
"""What measures without a unit are called after their number, in claims."""

IN_ROUNDS = ("event_recovery", "recovery_rounds", "detection_delay")
"""Measures in rounds, whose differences are written with that unit."""

ARRIVALS = {
    "time_to_accuracy": "reached_accuracy", "rounds_to_target": "reached_target", "time_to_target": "reached_target",
    "rounds_to_period": "period_found",
}  # fmt: skip
"""Times until something that a seed may never reach, each with the measure that is 1 where it does, else 0.

A seed that does not counts with the time at which its run ended.
"""

BY_GROUP = ("accuracy", "skill", "swing", "forgetting")
"""Measures that also exist for every group of clients, as `accuracy_day`."""

BY_WAY = "accuracy_by_"
"""Prefix of accuracies of other ways to combine a method's models, as `accuracy_by_global`."""


def unit_of(name: str) -> Written | None:
    """Return the format of the measure of this name; None for an unknown name.

    >>> unit_of("accuracy_night") is unit_of("accuracy_by_global") is percent, unit_of("acuracy") is None
    (True, True)
    """
    base = next((base for base in BY_GROUP if name.startswith(f"{base}_")), name)
    return UNITS.get(name, UNITS.get(base))


def difference(name: str, measure: Measure, written: Written) -> str:
    """Format a difference of two measures of this name and format, signed but for sizes.

    >>> difference("accuracy", Measure(0.017, 0.002, []), percent), difference("down", Measure(-2e6, None, []), size)
    ('+1.7 ± 0.2 points', '-2 MB')
    >>> difference("event_recovery", Measure(-2.5, 0.5, []), count)
    '-2.5 ± 0.5 rounds'
    """
    if name in IN_ROUNDS or written is rounds:
        return rounds(measure, signed=True)
    if written is seconds:
        return seconds(measure, signed=True)
    if written is number:
        return _with_error(measure, signed=True)
    return signed_points(measure) if written in (percent, points, signed_points) else written(measure)


def check_measures(experiment: Experiment, where: str = "experiment") -> None:
    """Reject metrics whose name is taken, and claims about an unknown measure, before any run starts.

    Raises:
        FedtideError: with the metric, or with the claim and the nearest measure.
    """
    own = [metric.name for metric in metrics_for(TARGET_WORDS[experiment.data.target.kind])]
    for place, metric in enumerate(experiment.metrics):
        for name in units_of(metric):
            if name in (*own, *NO_METRICS) or unit_of(name) is not None:
                raise refused(f"{where}: metrics[{place}].name", name, "a name that no other measure has")
        own += units_of(metric)
    own += experiment.metric_units
    for place, claim in enumerate(experiment.claim):
        if claim.measured in {"accuracy", "skill"} - {experiment.score}:
            wanted = f"{experiment.score}, the score of this target"
            raise refused(f"{where}: claim[{place}].measure", claim.measured, wanted)
        if unit_of(claim.measured) is not None or claim.measured in own:
            continue
        there = own if claim.at is None else [*own, *_metrics_at(experiment, claim.at, where)]
        if claim.measured not in there:
            known = [*UNITS, *there, *(f"{base}_<group>" for base in BY_GROUP), f"{BY_WAY}<way to predict>"]
            raise unknown(f"{where}: claim[{place}].measure", claim.measured, known)


def _metrics_at(experiment: Experiment, part: str, where: str) -> list[str]:
    """Return the metrics of the targets at a part of a sweep."""
    targets = {point.name: TARGET_WORDS[point.experiment.data.target.kind] for point in points_of(experiment, where)}
    return [metric.name for name in matching(part, list(targets)) for metric in metrics_for(targets[name])]
