"""Units and formats of all measures, by their names in summary.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedtide.config import Experiment
from fedtide.core.errors import refused, unknown
from fedtide.evaluate.metrics import METRICS, NO_METRICS, Unit, mean_and_error

SURE = 2.0
"""Number of standard errors from a bound at which a value surely lies on one side of it."""


@dataclass(frozen=True)
class Measure:
    """A quantity over seeds: mean, standard error (None for one seed), and the value of each seed."""

    mean: float | None
    error: float | None
    values: list[float]

    @staticmethod
    def of(values: list[float]) -> Measure:
        """Compute a measure from the value of each seed."""
        finite = [v for v in values if math.isfinite(v)]
        mean, error = mean_and_error(finite if len(finite) == len(values) else [])
        return Measure(mean if math.isfinite(mean) else None, error if math.isfinite(error) else None, values)

    def side(self, bound: float = 0.0) -> int:
        """Return 1 for a mean two or more standard errors above the bound, -1 for one as far below, else 0.

        >>> [Measure(mean, 0.1, []).side(1.0) for mean in (1.3, 1.1, 0.7)], Measure(2.0, None, [2.0]).side(1.0)
        ([1, 0, -1], 0)
        """
        if self.mean is None or self.error is None or self.mean == bound:
            return 0
        return int(math.copysign(abs(self.mean - bound) >= SURE * self.error, self.mean - bound))


Written = Callable[[Measure | None], str]
"""Format of a measure; "-" for an unknown value."""


def percent(measure: Measure | None, digits: int = 1) -> str:
    """Format a share as percent with its standard error.

    >>> percent(Measure(0.915, 0.002, [0.913, 0.917]))
    '91.5 ± 0.2 %'
    """
    return _with_error(measure, digits, "%", 100.0)


def points(measure: Measure | None, digits: int = 1, *, signed: bool = False) -> str:
    """Format a difference of shares as percentage points with its standard error.

    >>> points(Measure(-0.017, 0.002, [-0.015, -0.019]), signed=True)
    '-1.7 ± 0.2 points'
    """
    return _with_error(measure, digits, "points", 100.0, signed=signed)


def _with_error(
    measure: Measure | None, digits: int | None = None, unit: str = "", scale: float = 1.0, *, signed: bool = False
) -> str:
    """Format a mean with its standard error, if that is known and above 0, and with its unit.

    Without `digits` the error has two significant ones, or the mean three.
    """
    if measure is None or measure.mean is None:
        return "-"
    mean, error = scale * measure.mean, scale * (measure.error or 0.0)
    error = error if error > 1e-9 else 0.0
    if digits is None:
        leading = error or abs(mean) / 10 or 0.1
        digits = min(max(1 - math.floor(math.log10(leading)), 0), 4)
    mean = round(mean, digits) + 0.0  # no minus before a zero
    said = f"{mean:{'+' if signed else ''}.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")
    return f"{said} {unit}".rstrip()


def signed_points(measure: Measure | None) -> str:
    """Format a difference of shares as percentage points with its sign."""
    return points(measure, signed=True)


def number(measure: Measure | None) -> str:
    """Format a plain number with its standard error.

    >>> number(Measure(1.0, 0.0, [1.0, 1.0])), number(Measure(-0.0984, 0.0321, [])), number(Measure(0.01234, None, []))
    ('1.00', '-0.098 ± 0.032', '0.0123')
    """
    return _with_error(measure)


def nats(measure: Measure | None) -> str:
    """Format a mean log-density with its standard error.

    >>> nats(Measure(-12.345, 0.678, []))
    '-12.35 ± 0.68'
    """
    return _with_error(measure, 2)


def size(measure: Measure | None) -> str:
    """Format a number of bytes in a suitable unit."""
    if measure is None or measure.mean is None:
        return "-"
    left, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(left) < 1000:
            break
        left, unit = left / 1000, larger
    return f"{left:.3g} {unit}" if abs(left) < 1000 else f"{left:.0f} {unit}"


def seconds(measure: Measure | None) -> str:
    """Format a time in seconds or minutes, or the number of seeds that never reached it, if any."""
    if measure is None or measure.mean is None:
        never = sum(value == math.inf for value in measure.values) if measure else 0
        return f"not reached ({never} of {len(measure.values)} seeds)" if measure and never else "-"
    return f"{measure.mean:.1f} s" if measure.mean < 600 else f"{measure.mean / 60:.1f} min"


def rounds(measure: Measure | None, second: float = 1.0) -> str:
    """Format a number of rounds of `second` each, or the number of seeds that never reached it, if any.

    >>> rounds(Measure(12.5, 0.5, [12.0, 13.0])), rounds(Measure(None, None, [12.0, math.inf]))
    ('12.5', 'not reached (1 of 2 seeds)')
    """
    if measure is None or measure.mean is None:
        return seconds(measure)
    return f"{measure.mean / second:.4g}"


def count(measure: Measure | None) -> str:
    """Format a mean count."""
    return "-" if measure is None or measure.mean is None else f"{measure.mean:.4g}"


FORMATS: dict[Unit, Written] = {
    "share": percent, "points": points, "number": number, "count": count, "seconds": seconds, "bytes": size,
}  # fmt: skip
"""Format of each unit."""

UNITS: dict[str, Written] = {
    **{metric.name: FORMATS[metric.unit] for metric in METRICS},
    **dict.fromkeys(
        (
            "last",
            "best",
            "worst_point",
            "mean_over_rounds",
            "branch_accuracy",
            "val_accuracy",
            "own_weight",
            "recovered",
            "split_purity",
            "fullest_component",
            "events_recovered",
            "events_detected",
            "counted",
        ),
        percent,
    ),
    **dict.fromkeys(
        (
            "swing",
            "std_over_rounds",
            "client_std",
            "local_forgetting",
            "local_forgetting_own",
            "local_forgetting_apart",
            "forgetting",
            "share_error",
            "event_fall",
        ),
        points,
    ),
    **dict.fromkeys(("peak_gain", "trough_gain"), signed_points),
    **dict.fromkeys(
        (
            "share_correlation",
            "posterior_entropy",
            "log_likelihood",
            "training_loss",
            "loss_spread",
            "ari_over_rounds",
            "ari_last",
            "heterogeneity",
            "heterogeneity_all",
            "spread",
        ),
        number,
    ),
    "backward_transfer": signed_points,
    "forward_transfer": signed_points,
    "ari": number,
    "nmi": number,
    "purity": percent,
    "evenness": number,
    "churn": percent,
    "local_loss_increase": number,
    "down": size,
    "up": size,
    "seconds": seconds,
    "evaluation_seconds": seconds,
    "time_to_accuracy": seconds,
    "time_to_target": seconds,
    "rounds_to_target": rounds,
    "simulated_seconds": seconds,
    "answered": count,
    "refused": count,
    "diverged": count,
    "recovery_rounds": count,
    **dict.fromkeys(
        (
            "moves",
            "reclusterings",
            "clusters",
            "clusters_last",
            "event_recovery",
            "detection_delay",
            "false_alarms",
            "events_known",
            "asked_to_train",
            "counted_in_a_round",
        ),
        count,
    ),
}
"""Format of every measure of a run; docs/reports.md describes the measures."""

NAMES = {
    "ari": "adjusted Rand index",
    "ari_over_rounds": "adjusted Rand index",
    "ari_last": "adjusted Rand index",
    "nmi": "mutual information",
    "evenness": "evenness",
    "heterogeneity": "L1 distance",
    "heterogeneity_all": "L1 distance",
    "spread": "of its own distance",
    "share_correlation": "correlation",
    "posterior_entropy": "nats",
    "log_likelihood": "nats",
}
"""What measures without a unit are called after their number, in claims."""

IN_ROUNDS = ("event_recovery", "recovery_rounds", "detection_delay", "rounds_to_target")
"""Measures in rounds, whose differences are written with that unit."""

BY_GROUP = ("accuracy", "swing", "forgetting")
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


def difference(name: str, measure: Measure, written: Written = number) -> str:
    """Format a difference of two measures of this name, signed but for sizes and times; `written` is for unknown names.

    >>> difference("accuracy", Measure(0.017, 0.002, [])), difference("down", Measure(-2e6, None, [-2e6]))
    ('+1.7 ± 0.2 points', '-2 MB')
    >>> difference("event_recovery", Measure(-2.5, 0.5, [-2.0, -3.0]))
    '-2.5 ± 0.5 rounds'
    """
    if name in IN_ROUNDS:
        whole = not measure.error and (measure.mean or 0.0).is_integer()
        unit = "round" if whole and abs(measure.mean or 0.0) == 1 else "rounds"
        return _with_error(measure, 0 if whole else 1, unit, signed=True)
    written = unit_of(name) or written
    if written is number:
        return _with_error(measure, signed=True)
    return signed_points(measure) if written in (percent, points, signed_points) else written(measure)


def check_measures(experiment: Experiment, where: str = "experiment") -> None:
    """Reject metrics whose name is taken, and claims about an unknown measure, before any run starts.

    Raises:
        FedtideError: with the metric, or with the claim and the nearest measure.
    """
    own: list[str] = []
    for place, metric in enumerate(experiment.metrics):
        if metric.key in (*own, *NO_METRICS) or unit_of(metric.key) is not None:
            raise refused(f"{where}: metrics[{place}].name", metric.key, "a name that no other measure has")
        own.append(metric.key)
    for place, claim in enumerate(experiment.claim):
        if unit_of(claim.measure) is None and claim.measure not in own:
            known = [*UNITS, *own, *(f"{base}_<group>" for base in BY_GROUP), f"{BY_WAY}<way to predict>"]
            raise unknown(f"{where}: claim[{place}].measure", claim.measure, known)
