"""Curves of several seeds: values of the same round are averaged."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedtide.draw.figures import accuracies, band, look


@pytest.mark.parametrize(
    ("first", "second", "rounds", "means"),
    [
        ([1, 2, 3], [1, 2, 4], [1, 2], [20.0, 40.0]),
        ([1, 2, 3], [1, 3], [1, 3], [20.0, 45.0]),
        ([1, 2, 3], [1, 2], [1, 2], [20.0, 40.0]),
        ([1, 2, 3], [], [1, 2, 3], [10.0, 20.0, 30.0]),
    ],
)
def test_a_band_has_the_rounds_that_all_seeds_have(first, second, rounds, means):
    axes = Figure().subplots()
    curves = [
        (np.array(first), np.array([0.1, 0.2, 0.3])),
        (np.array(second), np.array([0.3, 0.6, 0.5])[: len(second)]),
    ]
    band(axes, curves, "method", look(0))
    x, y = axes.lines[0].get_data()
    assert (list(x), list(y)) == (rounds, pytest.approx(means))
    assert len(axes.collections) == (1 if second else 0)


def test_scores_below_0_lie_on_their_axis():
    axes = Figure().subplots()
    accuracies(axes, {0: [(np.arange(4), np.array([-0.35, -0.3, -0.25, -0.2]))]}, ["behind the mean"], "skill, %")
    bottom, top = axes.get_ylim()
    assert bottom < -30 < -20 < top
