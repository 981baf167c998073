"""Formats of measures as text."""

import math

import pytest

from fedtide.evaluate.metrics import UNKNOWN, Measure
from fedtide.report import formats
from fedtide.report.formats import difference


def measure(mean: float | None, error: float | None = None) -> Measure:
    return Measure(mean, error, [])


@pytest.mark.parametrize(("written", "given", "text"), [
    (formats.percent, measure(0.9149, 0.0021), "91.5 ± 0.2 %"),
    (formats.percent, measure(0.5), "50.0 %"),
    (formats.percent, measure(1.0, 0.0), "100.0 %"),
    (formats.points, measure(0.017), "1.7 points"),
    (formats.signed_points, measure(0.017, 0.002), "+1.7 ± 0.2 points"),
    (formats.signed_points, measure(-0.0), "+0.0 points"),
    *((formats.size, measure(size), text) for size, text in [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (12_345, "12.3 kB"), (1e6, "1 MB"), (2.5e9, "2.5 GB"),
        (1e12, "1 TB"), (5e15, "5000 TB"),
    ]),
    (formats.seconds, measure(1.25), "1.2 s"),
    (formats.seconds, measure(599.9), "599.9 s"),
    (formats.seconds, measure(600.0), "10.0 min"),
    (formats.seconds, Measure(None, None, [math.nan]), "-"),
    (formats.count, measure(3.5), "3.5"),
    (formats.number, measure(0.01234, 0.001), "0.0123 ± 0.0010"),
    (formats.number, measure(0.01234), "0.0123"),
])  # fmt: skip
def test_a_measure_has_its_unit_and_its_error(written, given, text):
    assert written(given) == text
    assert written(UNKNOWN) == "-"


@pytest.mark.parametrize(("written", "value", "text"), [
    (formats.rounds_count, 1.0, "+1 round"), (formats.rounds_count, -2.5, "-2.5 rounds"), (formats.count, 3.0, "+3"),
    (formats.percent, 0.5, "+50.0 points"), (formats.size, 2e6, "+2 MB"), (formats.seconds, -5.0, "-5.0 s"),
])  # fmt: skip
def test_a_difference_has_a_sign_and_its_unit(written, value, text):
    assert difference(Measure(value, None, [value]), written) == text
