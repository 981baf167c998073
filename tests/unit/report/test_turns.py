"""Forgetting over time by hand: turns, what fell, what was forgotten, what came back and how soon."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.data.shift.who import Periodic
from fedtide.data.targets import Labels, Number
from fedtide.report import forgetting
from fedtide.report.forgetting import Transfer, Turn, measure, turns
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from helpers import studies
from helpers.examples import examples
from helpers.studies import STEADY, A, study

NAN = math.nan
law = examples(100)


def run(after, rows, owners: str) -> Transfer:
    """A run whose round r is the turn of the distribution `owners[r]`, a digit."""
    shares = np.eye(10)[[int(k) for k in owners]][:, : len(rows[0])]
    return Transfer(after, np.array(rows, dtype=np.float64), turns(shares))


def near(values) -> object:
    return pytest.approx(np.array(values) if isinstance(values, list) else values, abs=1e-12, nan_ok=True)


# -- turns -------------------------------------------------------------------------------------------------------------


def test_a_turn_lasts_as_long_as_nobody_else_is_larger():
    assert turns(np.array([[0.5, 0.5]] * 3)) == [Turn(0, 0, 3)]
    assert turns(np.array([[0.4, 0.6], [0.5, 0.5], [0.6, 0.4]])) == [Turn(1, 0, 2), Turn(0, 2, 3)]
    assert turns(np.array([[0.2, 0.4, 0.4], [0.3, 0.3, 0.4]])) == [Turn(1, 0, 1), Turn(2, 1, 2)]
    assert turns(np.empty((0, 2))) == []


def test_day_and_night_take_turns_of_half_a_period():
    """Linear with T = 8: q of the day is 1, .75, .5, .25, 0, .25, .5, .75; a tie leaves the turn where it was."""
    shares = np.array([Periodic(period=8).shares(float(r), np.array([5, 5])) for r in range(16)])
    assert turns(shares) == [Turn(0, 0, 3), Turn(1, 3, 7), Turn(0, 7, 11), Turn(1, 11, 15), Turn(0, 15, 16)]


# -- the formulas of the papers ----------------------------------------------------------------------------------------

R = np.array([[0.9, 0.2, 0.1], [0.7, 0.8, 0.3], [0.6, 0.5, 0.9]])
ONCE = run([2, 4, 6], R, "001122")


def test_where_every_task_comes_once_backward_transfer_is_that_of_gem():
    """BWT = 1/2 ((R_31 - R_11) + (R_32 - R_22)) = ((.6 - .9) + (.5 - .8)) / 2."""
    assert ONCE.backward() == near(-0.3)
    assert ONCE.fallen == near([[NAN] * 3, [-0.2, NAN, NAN], [-0.3, -0.3, NAN]])


def test_where_every_task_comes_once_forward_transfer_is_that_of_gem():
    """FWT: R_12 - b = .2 - .1, R_23 - b = .3 - .1; the first task has none."""
    assert ONCE.forward(0.1) == near([NAN, 0.1, 0.2])


def test_where_every_task_comes_once_forgetting_is_that_of_chaudhry():
    """f_1^3 = max(.9, .7) - .6, f_2^3 = max(.2, .8) - .5; after the second task f_1^2 = .9 - .7."""
    assert ONCE.forgotten == near([[NAN] * 3, [0.2, NAN, NAN], [0.3, 0.3, NAN]])
    assert ONCE.forgetting(window=1) == near(0.3)
    assert ONCE.forgetting() == near((0.2 + 0.3 + 0.3) / 3)
    assert ONCE.forgetting(which=0) == near(0.25)
    assert math.isnan(ONCE.forgetting(which=2))


def test_the_highest_accuracy_may_be_that_of_another_turn():
    """Day gains in the night before it loses: .9 + .05 is its highest, its level is .9."""
    made = run([2, 3, 4], [[0.9, 0.1], [0.95, 0.2], [0.5, 0.3]], "0011")
    assert made.fallen[:, 0] == near([NAN, 0.05, -0.4])
    assert made.forgotten[:, 0] == near([NAN, -0.05, 0.45])


# -- what comes again --------------------------------------------------------------------------------------------------

# Judged after every round; day (0) and night (1) take turns of three rounds.
DAY = [0.5, 0.6, 0.8, 0.6, 0.5, 0.4, 0.6, 0.795, 0.9, 0.7, 0.8, 0.7]
NIGHT = [0.1, 0.1, 0.2, 0.5, 0.6, 0.7, 0.3, 0.2, 0.1, 0.4, 0.6, 0.65]
AGAIN = run(range(1, 13), list(zip(DAY, NIGHT, strict=True)), "000111000111")


def test_an_absence_ends_where_the_next_turn_begins():
    """Absences: day .8 -> .4 and .9 -> .7 (to the end), night .7 -> .1."""
    assert AGAIN.backward() == near((-0.4 - 0.2 - 0.6) / 3)
    assert AGAIN.backward(window=4) == near((-0.2 - 0.6) / 2)
    assert AGAIN.backward(window=3) == near(-0.2)


def test_after_each_absence_it_is_measured_from_the_newest_turn():
    assert AGAIN.fallen[:, 0] == near([NAN] * 3 + [-0.2, -0.3, -0.4] + [NAN] * 3 + [-0.2, -0.1, -0.2])
    assert AGAIN.fallen[:, 1] == near([NAN] * 6 + [-0.4, -0.5, -0.6] + [NAN] * 3)


def test_a_distribution_recovers_when_it_is_within_a_point_of_the_end_of_its_last_turn(monkeypatch):
    """Day fell from .8 to .4 and has .795 after two rounds. Night needs .69 and has .65 when the run is over."""
    assert AGAIN.recoveries() == [2.0]
    for tolerance, recovered in ((0.0, [3.0]), (0.05, [2.0, 3.0]), (0.45, [0.0, 1.0])):
        monkeypatch.setattr(forgetting, "TOLERANCE", tolerance)
        assert AGAIN.recoveries() == recovered
    monkeypatch.setattr(forgetting, "TOLERANCE", 0.05)
    assert AGAIN.recoveries(window=3) == [3.0]


def test_a_turn_that_is_too_short_to_recover_is_said_so():
    made = run(range(1, 9), [[a, 0.5] for a in (0.8, 0.8, 0.3, 0.3, 0.5, 0.5, 0.2, 0.2)], "00110011")
    assert made.recoveries() == [math.inf, 0.0]


# -- what is not known -------------------------------------------------------------------------------------------------


def unknown(made: Transfer) -> bool:
    rest = [made.backward(), made.forgetting(), *made.forward(0.5)]
    return all(map(math.isnan, rest)) and made.recoveries() == []


def test_a_run_that_was_never_judged_says_nothing():
    assert unknown(Transfer([], np.empty((0, 2)), turns(np.eye(2)[[0, 1, 0]])))


def test_a_group_that_was_not_judged_is_unknown_and_the_other_is_not():
    made = run([2, 4, 6], [[0.9, NAN], [0.7, NAN], [0.8, NAN]], "001100")
    assert made.backward() == near(-0.2)
    assert made.forgetting() == near(0.2)
    assert np.isnan(made.forward(0.5)).all()
    assert made.recoveries() == []


def test_a_turn_in_which_nobody_was_judged_has_no_level():
    """The second turn (rounds 2 and 3) lies between evaluations: night's level is unknown, day's is not."""
    made = run([2, 5, 6, 8], [[0.9, 0.1], [0.5, 0.6], [0.9, 0.5], [0.4, 0.9]], "00110011")
    assert made.fallen[:, 1] == near([NAN] * 4)
    assert made.forgotten[1:3, 1] == near([-0.5, 0.1])
    assert made.recoveries() == [2.0]


# -- laws --------------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw) -> Transfer:
    rounds, groups = draw(st.integers(1, 30)), draw(st.integers(2, 4))
    owners = draw(st.lists(st.integers(0, groups - 1), min_size=rounds, max_size=rounds))
    every = draw(st.integers(1, 5))
    after = sorted({*range(every, rounds + 1, every), rounds})
    values = st.integers(0, 20).map(lambda n: n / 20)
    rows = [draw(st.lists(values, min_size=groups, max_size=groups)) for _ in after]
    return Transfer(after, np.array(rows), turns(np.eye(groups)[owners]))


@law
@given(runs())
def test_turns_cover_every_round_once_and_change_hands(made):
    assert made.turns[0].first == 0
    for left, right in zip(made.turns, made.turns[1:], strict=False):
        assert left.end == right.first
        assert left.which != right.which
    assert all(turn.first < turn.end for turn in made.turns)


@law
@given(runs())
def test_what_fell_since_the_last_turn_is_at_most_what_was_forgotten(made):
    known = ~np.isnan(made.fallen)
    assert (made.forgotten[known] >= -made.fallen[known] - 1e-12).all()
    for i, which in zip(*np.nonzero(known), strict=True):
        assert not any(t.first < made.after[i] <= t.end and t.which == which for t in made.turns)


@law
@given(runs(), st.floats(0, 1))
def test_a_shift_of_the_whole_curve_changes_nothing_and_names_of_groups_do_not_matter(made, lift):
    lifted = Transfer(made.after, made.accuracy + lift, made.turns)
    assert lifted.backward() == near(made.backward())
    assert lifted.forgetting() == near(made.forgetting())
    groups = made.accuracy.shape[1]
    turned = [Turn(groups - 1 - turn.which, turn.first, turn.end) for turn in made.turns]
    mirrored = Transfer(made.after, made.accuracy[:, ::-1], turned)
    assert mirrored.backward() == near(made.backward())
    assert mirrored.forgetting() == near(made.forgetting())
    assert mirrored.recoveries() == made.recoveries()


@law
@given(runs())
def test_a_model_that_never_changes_forgets_nothing_and_is_never_behind(made):
    flat = Transfer(made.after, np.broadcast_to(made.accuracy[:1], made.accuracy.shape), made.turns)
    for value, known in ((flat.backward(), made.fallen), (flat.forgetting(), made.forgotten)):
        assert value == near(0.0 if np.isfinite(known).any() else NAN)
    assert all(np.isfinite(flat.recoveries()))


# -- a small study -----------------------------------------------------------------------------------------------------


def finished(root, *methods, **changes):
    return read_experiment(studies.finished(root, study(*methods, **changes)))[0]


def test_what_was_forgotten_of_groups_is_what_their_curves_say(tmp_path):
    record = finished(tmp_path / "run", A, STEADY, rounds=12, eval_every=1, seeds=[0, 1])
    shifted, steady = record.methods
    for run in shifted.runs:
        day, night = (run.accuracy("held_out_clients", group)[1] for group in ("day", "night"))
        # Shares of the day with T = 4: 1, .5, 0, .5: turns day 0-2, night 2-4, day 4-6, ...; the window is 8 rounds.
        ends = [("night", 4, 6), ("day", 6, 8), ("night", 8, 10), ("day", 10, 12)]
        curves = {"day": day, "night": night}
        fell = [curves[group][end - 1] - curves[group][start - 1] for group, start, end in ends]
        got = measure(record, shifted, run)
        assert got["backward_transfer"] == pytest.approx(np.mean(fell))
        past = {"day": [6, 7, 10, 11], "night": [4, 5, 8, 9]}
        for group, rounds in past.items():
            gaps = [curves[group][:i].max() - curves[group][i] for i in rounds]
            assert got[f"forgetting_{group}"] == pytest.approx(np.mean(gaps))
        assert got["forward_transfer"] == pytest.approx(night[1] - 1 / 3)
        assert 0 <= got["recovered"] <= 1
    assert "backward_transfer" in summarize(record).method("A").measures
    assert "backward_transfer" not in summarize(record).method("steady").measures
    assert measure(record, steady, steady.runs[0]) == {}


def test_before_its_first_turn_a_group_is_compared_with_chance_if_there_is_any(tmp_path):
    """One in three classes; nothing for numbers, whose score is a skill; not known for several labels at once."""
    record = finished(tmp_path / "run", A, rounds=4, eval_every=1, seeds=[0])
    method, experiment = record.methods[0], record.experiment
    first = {}
    for target in (experiment.data.target, Number(), Labels()):
        data = experiment.data.model_copy(update={"target": target})
        told = replace(record, experiment=experiment.model_copy(update={"data": data}))
        first[target.kind] = measure(told, method, method.runs[0]).get("forward_transfer")
    assert first["number"] == pytest.approx(first["classes"] + 1 / 3)
    assert first["labels"] is None
