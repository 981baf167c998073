"""What came of trials: late accuracy, medians, lines of the file."""

from dataclasses import replace

import pytest
import torch

from fedtide.config import resolved
from fedtide.core.base import Scores
from fedtide.tuning.tune import Call, Curve, Trial, best_of, bounds, hopeless, late, play_trial
from helpers.toys import toy


def trial(number, accuracy, *curves, state="finished"):
    made = tuple(Curve(seed, (2, 4, 8), values) for seed, values in enumerate(curves))
    value = accuracy if state == "finished" else None
    return Trial("s", "A", number, {"method.local.lr": 0.1}, state, made, (), value, "", "c")


FOUR = [trial(i, 0.5, (0.1 * i, 0.2 * i, 0.3 * i), (0.0, 0.1 * i, 0.1 * i)) for i in range(4)]


def test_late_accuracy_is_the_mean_of_the_window_as_a_sweep_has_it():
    curve = Curve(0, (2, 4, 6, 8), (0.0, 0.25, 0.5, 1.0))
    assert late([curve, replace(curve, seed=1)], {"": (4, 8)}) == (0.75, 0.75)
    other = replace(curve, point="b", accuracy=(0.0, 0.0, 0.0, 0.5))
    assert late([curve, other], {"": (4, 8), "b": (4, 8)}) == (0.5,)
    assert late([curve, replace(other, rounds=(4, 8, 12, 16))], {"": (4, 8), "b": (1, 16)}) == (0.625,)
    assert late([curve], {"": (1, 8)}) == (1.0,)


def test_a_late_skill_is_that_of_all_rows_of_the_window():
    """Errors 4 of a constant's 1 and 4.5 of 9: skills -3 and 0.5, of all these rows 1 - 8.5 / 10, not their mean -1.25.

    Before them an evaluation that is not late.
    """
    curve = Curve(0, (2,), (0.9,), (7.0,))
    for done, error, constant in ((4, 4.0, 1.0), (6, 4.5, 9.0)):
        one = torch.ones(1, dtype=torch.float64)
        sums = {"reference": torch.tensor([constant], dtype=torch.float64)}
        curve = curve.then(done, Scores(torch.tensor([0]), one, -error * one, one, sums=sums).credited, dated=False)
    assert curve.accuracy == (0.9, -3.0, 0.5)
    assert curve.weights == (7.0, 1.0, 9.0)
    assert late([curve], {"": (4, 6)}) == (pytest.approx(0.15),)


def test_windows_of_time_count_by_their_rows():
    curve = Curve(0, (), ())
    for done, rows, right in ((1, 500.0, 400.0), (2, 5.0, 0.0)):
        one = torch.ones(1, dtype=torch.float64)
        curve = curve.then(done, Scores(torch.tensor([0]), rows * one, right * one, one), dated=True)
    assert late([curve], {"": (2, 2)}) == (pytest.approx(400 / 505),)


def test_a_bound_is_the_median_of_the_finished_trials_at_the_same_seed_and_round():
    found = bounds(FOUR)
    assert found == {
        0: {"": {4: pytest.approx(0.3), 8: pytest.approx(0.45)}},
        1: {"": {4: pytest.approx(0.15), 8: pytest.approx(0.15)}},
    }


def test_there_is_no_bound_from_too_few_trials_and_others_than_finished_do_not_count():
    assert bounds(FOUR[:3]) == {}
    assert bounds([*FOUR[:3], trial(3, None, (0.9,) * 3, state="pruned")]) == {}
    assert bounds([*FOUR, trial(4, None, (0.9,) * 3, state="failed")]) == bounds(FOUR)


@pytest.mark.parametrize(
    ("accuracy", "ends"), [((0.1, 0.29), True), ((0.1, 0.31), False), ((0.35, 0.1), False), ((0.0,), False)]
)
def test_a_trial_is_ended_that_was_never_as_good_as_the_median_is_now(accuracy, ends):
    assert hopeless(Curve(0, (2, 4, 8)[: len(accuracy)], accuracy), bounds(FOUR)) is ends


@pytest.mark.parametrize(("seeds", "state"), [((0,), "finished"), ((0, 1), "pruned")])
def test_at_its_last_evaluation_a_trial_is_finished(seeds, state, monkeypatch):
    """Accuracy 0.5 after both rounds, where the median is 0.4 and 0.6."""
    half = Scores(torch.tensor([0]), *torch.tensor([[2.0], [1.0], [1.0]]).double())
    monkeypatch.setattr("fedtide.tuning.tune.judged", lambda *_: iter([(1, half), (2, half)]))
    known = {0: {"": {1: 0.4, 2: 0.6}}}
    call = Call(Trial("s", "A", 0, {}), resolved(toy("fedavg", rounds=2)), seeds, known, "")
    ended = []

    def outcome():
        ended.append((yield from play_trial(call, lambda: False)))

    list(outcome())
    assert [trial.state for trial in ended] == [state]


def test_the_best_is_the_first_of_the_highest():
    trials = [trial(0, 0.2), trial(1, 0.7), trial(2, 0.7), trial(3, None, state="failed")]
    assert best_of(trials) is trials[1]
    assert best_of(trials[3:]) is None
