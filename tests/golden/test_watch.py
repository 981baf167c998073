"""Windows that are watched: calibration, estimate, scores and alarms by hand, and rounds of the transform.

Windows have two classes and no inputs, if nothing else is said. Their confidences are few, so that sums are short.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from scipy import stats

import fedtide as ft
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Sum
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.laws import every
from fedtide.laws.case import Case
from fedtide.learn import LocalTrainer
from fedtide.learn.target import NumberTarget
from fedtide.runs.build import host_of
from fedtide.transforms import Watch, apply
from fedtide.transforms.watch import as_window, count_rows, find_others, odd
from fedtide.transforms.windows import (
    BINS,
    FAR,
    LOOSE,
    Group,
    Layout,
    calibrate,
    compare,
    factors,
    look,
    tells_drift,
    variances,
)
from helpers import quadratics
from helpers.pulled import TASK, number
from helpers.stages import holding
from helpers.toys import played, toy

TWO = Layout(classes=2, inputs=0)


def window(*bins: tuple[int, int, int], labels: int | None = 50, predicted: int = 50, layout: Layout = TWO):
    """A window: of each bin its place, rows and right rows; how many rows have class 0, and are predicted so."""
    rows = sum(count for _, count, _ in bins)
    made = torch.zeros(layout.size + 1, dtype=torch.float64)
    for place, count, right in bins:
        made[place], made[BINS + place] = count / rows, 0.0 if labels is None else right / rows
    made[2 * BINS : 2 * BINS + 2] = torch.tensor([predicted, rows - predicted], dtype=torch.float64) / rows
    if labels is not None:
        made[2 * BINS + 2 : 2 * BINS + 4] = torch.tensor([labels, rows - labels], dtype=torch.float64) / rows
    made[-1] = rows
    return made


# -- accuracy without labels -------------------------------------------------------------------------------------------


def test_bins_are_calibrated_by_how_often_their_rows_were_right():
    """Bin 10 has 100 rows, 50 right; bin 18 has 100, 90 right.

    Both windows have as many right rows as their bins tell, so the factor is 1. A window of 50 rows has a quarter of
    them in bin 10: the estimate is 0.25 * 0.5 + 0.75 * 0.9 = 0.8. Its variance is
    0.25^2 * 0.25 / 100 + 0.75^2 * 0.09 / 100 + (0.25 * 0.25 + 0.75 * 0.09) / 50 = 0.0006625 + 0.0026.
    """
    found = calibrate(torch.stack([window((10, 40, 20), (18, 60, 54)), window((10, 60, 30), (18, 40, 36))]), TWO)
    assert found is not None
    assert (found.rows[10], found.right[10], found.rows[18]) == (100, 0.5, 100)
    assert float(found.right[18]) == pytest.approx(0.9, abs=1e-12)
    assert (found.factor, found.degrees) == (1.0, 11)
    confidence = torch.zeros(BINS, dtype=torch.float64)
    confidence[10], confidence[18] = 0.25, 0.75
    estimate, error = found.estimate(confidence, 50)
    assert estimate == pytest.approx(0.8, abs=1e-12)
    assert error == pytest.approx(math.sqrt(0.0032625), abs=1e-12)


def test_a_bin_that_the_reference_lacks_counts_as_its_center_and_is_told():
    found = calibrate(window((10, 100, 50))[None], TWO)
    confidence = torch.zeros(BINS, dtype=torch.float64)
    confidence[10], confidence[19] = 0.5, 0.5
    assert found.estimate(confidence, 100)[0] == pytest.approx(0.25 + 0.5 * 0.975, abs=1e-12)
    assert found.unseen(confidence) == 0.5


def test_windows_whose_accuracy_confidence_does_not_tell_make_the_error_larger():
    """Of 100 rows in bin 10, 60 are right and then 40. Each is 0.1 off: 100 * 0.01 / 0.25 = 4, and 8 / (2 - 1) is 8."""
    found = calibrate(torch.stack([window((10, 100, 60)), window((10, 100, 40))]), TWO)
    assert found.factor == pytest.approx(8, abs=1e-9)
    assert found.factor > LOOSE
    confidence = torch.zeros(BINS, dtype=torch.float64)
    confidence[10] = 1.0
    assert found.estimate(confidence, 100)[1] == pytest.approx(math.sqrt(0.25 / 200 + 8 * 0.25 / 100), abs=1e-9)


def test_windows_without_labels_calibrate_nothing():
    assert calibrate(window((10, 100, 0), labels=None)[None], TWO) is None


def test_the_estimate_follows_confidence_and_not_raw_confidence():
    """Rows of confidence 0.975 are right in 7 of 10; a window of them alone has an estimate of 0.7."""
    group = Group.begin(TWO, 1, 2)
    for _ in range(2):
        group, line = look(group, window((10, 50, 25), (19, 50, 35)), 0, TWO)
        assert (line["estimate"], line["unknown"], line["accuracy"]) == (None, ["reference"], 0.6)
    _, line = look(group, window((19, 100, 0), labels=None), 0, TWO)
    assert line["estimate"] == pytest.approx(0.7, abs=1e-12)
    assert (line["accuracy"], "meaning" in line["far"], "labels" in line["far"]) == (None, False, False)


# -- scores ------------------------------------------------------------------------------------------------------------


def pair() -> Group:
    """A reference of two windows of 100 rows, in which class 0 has 40 rows and 60."""
    group = Group.begin(TWO, 1, 2)
    for labels in (40, 60):
        group, _ = look(group, window((10, 100, 50), labels=labels), 0, TWO)
    return group


def test_a_share_is_compared_with_those_of_the_reference_by_how_they_differ():
    """Shares are 0.1 off 0.5 with a variance of 0.25: 4 of each window, 8 with one degree of freedom, of both classes.

    So the factor is (10 * 8 + 8) / 11 = 8 with 11 degrees. A share of 0.9 in 100 rows lies
    0.4 / sqrt(8 * 0.25 * (1/100 + 1/200)) = 4 / sqrt(3) deviations off; the chance of one of two is 1 - (1 - p)^2.
    """
    factor, degrees = factors(pair().reference, TWO, "labels")
    assert factor.tolist() == pytest.approx([8, 8], abs=1e-9)
    assert degrees == 11
    far = compare(window((10, 100, 50), labels=90), pair(), 0, TWO, "labels")
    p = 2 * stats.t.sf(4 / math.sqrt(3), 11)
    assert far.score == pytest.approx(stats.norm.isf(1 - (1 - p) ** 2), abs=1e-9)
    assert (far.place, far.sign) == (0, 1)


def test_a_rare_share_is_as_uncertain_as_two_rows():
    """A class without rows has a variance of 2 / n, so four rows of 100 are (4/100) / sqrt(2/100 * ...) off."""
    mean = window((10, 100, 50), labels=0)[:-1]
    assert variances(mean, TWO, "labels", 100).tolist() == [0.02, 0.02]
    assert variances(window((10, 100, 50), labels=30)[:-1], TWO, "labels", 100).tolist() == pytest.approx([0.21, 0.21])


def test_confidence_has_the_variance_of_its_bins():
    """Half of the rows at 0.525 and half at 0.925: 0.2 from the mean each."""
    mean = window((10, 50, 25), (18, 50, 45))[:-1]
    assert float(variances(mean, TWO, "predictions", 100)[-1]) == pytest.approx(0.04, abs=1e-12)


def test_inputs_have_the_variance_of_their_mean_and_squares():
    layout = Layout(2, 1)
    mean = torch.zeros(layout.size, dtype=torch.float64)
    mean[-2:] = torch.tensor([0.3, 0.25], dtype=torch.float64)
    assert variances(mean, layout, "inputs", 100).tolist() == pytest.approx([0.16, 0.1875], abs=1e-12)


def test_an_hour_when_nobody_is_there_does_not_keep_the_others_waiting():
    """Nobody is there by night. By day four windows: three are the reference, and the fourth is compared with them."""
    group = Group.begin(TWO, 2, 3)
    for _ in range(3):
        group, line = look(group, window((10, 100, 50), labels=80), 0, TWO)
        assert line["unknown"] == ["reference"]
    group, line = look(group, window((10, 100, 50), labels=80), 0, TWO)
    assert "labels" in line["far"]
    # The first window of the night begins its reference, and takes no score of the day away.
    group, line = look(group, window((10, 100, 50), labels=20), 1, TWO)
    assert line["unknown"] == ["reference"]
    assert len(group.scores["labels"]) == 4


def test_one_row_of_a_thousand_is_no_drift_of_a_model_that_is_always_right():
    """An accuracy of 1 has no variance, so two rows of the window are taken for wrong: 1 of 1000 is within chance."""
    group = Group.begin(TWO, 1, 10)
    for _ in range(10):
        group, _ = look(group, window((18, 1000, 1000), labels=500), 0, TWO)
    _, line = look(group, window((18, 1000, 999), labels=500), 0, TWO)
    assert line["error"] == pytest.approx((2 / 1000 / 1000) ** 0.5)
    assert line["far"]["meaning"]["score"] < FAR
    assert line["unknown"] == line["alarms"] == []


def test_a_window_is_compared_with_those_of_its_phase():
    """By day class 0 has 80 rows of 100, by night 20: neither is drift. Without a period day is far from the mean."""
    by_day, by_night = window((10, 100, 50), labels=80), window((10, 100, 50), labels=20)
    group = Group.begin(TWO, 2, 3)
    for _ in range(3):
        group, _ = look(group, by_day, 0, TWO)
        group, _ = look(group, by_night, 1, TWO)
    assert not group.learns(0)
    assert not group.learns(1)
    assert compare(by_day, group, 0, TWO, "labels").score < 0
    assert compare(by_night, group, 0, TWO, "labels").score > FAR


def test_rows_that_are_right_less_often_than_confidence_tells_have_another_meaning():
    """90 of 100 are right in the reference of 300 rows; 50 are then, 0.4 / sqrt(0.09 / 300 + 0.09 / 100) off: 11.5."""
    group = Group.begin(TWO, 1, 3)
    for _ in range(3):
        group, _ = look(group, window((18, 100, 90)), 0, TWO)
    _, line = look(group, window((18, 100, 50)), 0, TWO)
    t = 0.4 / math.sqrt(0.09 / 300 + 0.09 / 100)
    assert line["far"]["meaning"]["score"] == pytest.approx(stats.norm.isf(2 * stats.t.sf(t, 12)), abs=1e-9)
    assert line["far"]["meaning"]["sign"] == -1
    assert line["unknown"] == ["not as counted"]


def test_all_that_makes_an_estimate_unsure_is_told():
    group = Group.begin(TWO, 1, 2)
    for right in (60, 40):
        group, _ = look(group, window((10, 100, right)), 0, TWO)
    _, line = look(group, window((10, 40, 20), (15, 10, 5), predicted=25, labels=25), 0, TWO)
    assert line["unknown"] == ["new confidences", "not calibrated", "few rows"]
    unlabeled = Group.begin(TWO, 1, 1)
    unlabeled, _ = look(unlabeled, window((10, 100, 0), labels=None), 0, TWO)
    _, line = look(unlabeled, window((10, 100, 50)), 0, TWO)
    assert (line["unknown"], line["estimate"]) == (["no labels"], None)


def test_a_model_that_trains_is_calibrated_by_as_many_windows_as_the_reference_has():
    group = Group.begin(TWO, 1, 2)
    for right in range(50, 55):
        group, _ = look(group, window((10, 100, right)), 0, TWO, trains=True)
    assert torch.equal(group.recent, torch.stack([window((10, 100, right)) for right in (53, 54)]))


@pytest.mark.parametrize(("before", "told"), [([4.0, 1.0], True), ([4.0, 4.0], False), ([1.0], True)])
def test_inputs_are_new_to_a_model_that_trains_if_a_recent_window_was_not_as_far(before, told):
    """Inputs were at 0, and are at 1 in all rows. A model that was calibrated on far windows alone knows them."""
    layout = Layout(2, 1)
    quiet = window((10, 100, 50), layout=layout)
    far = quiet.clone()
    far[-3:-1] = 1.0
    group = Group.begin(layout, 1, 2)
    for _ in range(2):
        group, _ = look(group, quiet, 0, layout, trains=True)
    group = replace(group, scores={**group.scores, "inputs": torch.tensor(before, dtype=torch.float64)})
    _, line = look(group, far, 0, layout, trains=True)
    assert line["far"]["inputs"]["score"] > FAR
    assert ("new inputs" in line["unknown"]) == told


# -- alarms ------------------------------------------------------------------------------------------------------------


def test_page_hinkley_by_hand():
    """After nine zeros the sum of rises is -9, its least. A score of 4 has a mean of 0.4, and 2.6 is below 3.

    A second 4 has a mean of 8/11, and adds 2.27. A score of 8 rises by 8 - 0.8 - 1 = 6.2 at once. Eight streams have
    a limit of 3 + log(8) / 2 = 4.04, and a score of 5.5 rises by 5.5 - 0.55 - 1 = 3.95.
    """
    quiet = [0.0] * 9
    assert not tells_drift([*quiet, 4.0])
    assert tells_drift([*quiet, 4.0, 4.0])
    assert tells_drift([*quiet, 8.0])
    assert not tells_drift([*quiet, 5.5], streams=8)
    assert tells_drift([*quiet, 5.5], streams=1)


def test_a_quiet_stream_stays_quiet_for_long():
    """With river's own fading sum the limit would be reached by chance after some thousand windows."""
    assert not tells_drift([0.5, -0.5] * 10_000)


def test_an_alarm_is_told_once_and_again_if_it_becomes_worse():
    group, told = Group.begin(TWO, 1, 5), []
    for labels in (48, 52, 50, 49, 51, *[50] * 3, *[75] * 5, *[100] * 4):
        group, line = look(group, window((10, 100, 50), labels=labels), 0, TWO)
        told.append("labels" in line["alarms"])
    assert told.index(True) in (8, 9)
    assert 1 <= sum(told) <= 2


def test_without_river_one_line_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "river.drift", None)
    experiment = toy("fedavg", {"transforms": ["watch"]})
    with pytest.raises(FedtideError, match=r'"watch" needs river; pip install "fedtide\[watch\]"'):
        host_of(experiment, experiment.method[0], 0)


# -- what clients count ------------------------------------------------------------------------------------------------


def test_inputs_are_bounded_columns_and_their_squares():
    logp = torch.tensor([[0.9, 0.1]]).log()
    counted = count_rows(logp, None, torch.tensor([[2.0, float("inf")]]))
    z = math.tanh(1.0)
    assert counted[-4:].tolist() == pytest.approx([z, 1.0, z * z, 1.0])
    assert float(counted[2 * BINS + 2 : 2 * BINS + 4].sum()) == 0


def test_rows_of_which_the_model_says_nothing_are_not_right():
    counted = count_rows(torch.full((2, 2), float("nan")), torch.tensor([0, 1]), torch.zeros(2, 1))
    assert (float(counted[0]), float(counted[BINS : 2 * BINS].sum())) == (1.0, 0.0)


ODD = {
    "shares of confidence do not add up": lambda made: made[10:11].mul_(0.5),
    "shares of predicted do not add up": lambda made: made[2 * BINS : 2 * BINS + 1].add_(0.1),
    "shares of labels do not add up": lambda made: made[2 * BINS + 2 : 2 * BINS + 3].add_(0.1),
    "more rows are right than there are": lambda made: made[BINS + 4 : BINS + 5].add_(0.5),
    "shares of confidence are below 0 or above 1": lambda made: made[3:5].add_(torch.tensor([-0.5, 0.5]).double()),
}


@pytest.mark.parametrize("why", ODD)
def test_counts_that_no_rows_have_are_refused(why):
    made = window((10, 100, 50))
    assert odd(made, TWO) == ""
    ODD[why](made)
    assert odd(made, TWO) == why


def test_inputs_that_no_rows_have_are_refused():
    layout = Layout(2, 1)
    made = window((10, 100, 50), layout=layout)
    made[-3:-1] = torch.tensor([0.9, 0.1])
    assert odd(made, layout) == "inputs have a negative variance"
    made[-3:-1] = torch.tensor([-1.5, 1.0])
    assert odd(made, layout) == "shares of inputs are below -1 or above 1"


def test_a_window_is_what_a_sum_says_for_each_row():
    assert as_window(Sum(torch.tensor([1.0, 3.0]), 4.0)).tolist() == [0.25, 0.75, 4.0]


# -- rounds ------------------------------------------------------------------------------------------------------------

OLD, NEW = [[0] * 90 + [1] * 10] * 2, [[0] * 10 + [1] * 90] * 2
"""Labels of two clients. The model says class 0 to all, so 9 of 10 are right, and then 1 of 10."""


def method(**options):
    return apply(ft.algorithms.fedavg(TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone()), Watch(**options))


def rounds(algorithm, state, numbers, labels, who=None):
    """State, facts and questions of each round, while clients hold these labels."""
    fleet = quadratics.fleet_of(algorithm, labels, who)
    for turn in numbers:
        fleet.begin(Moment(turn, 99, 0.0))
        state, facts = algorithm.round(state, fleet, Rng(0).at(turn, "server"))
        yield state, facts, [query.ask.question for query in fleet.queries]


def begun(algorithm):
    return algorithm.init(quadratics.fleet_of(algorithm, OLD), Rng(0))


def test_who_never_trains_is_asked_one_question_and_the_model_stays():
    algorithm = method(train="never", windows=3)
    state = begun(algorithm)
    run = list(rounds(algorithm, state, range(4), OLD))
    assert [asked for *_, asked in run] == [["watch"]] * 4
    assert all(now.inner is state.inner for now, *_ in run)
    seen = run[-1][1]["watch"]
    assert (seen["rows"], seen["accuracy"], seen["estimate"], seen["alarms"]) == (200, 0.9, 0.9, [])
    assert run[-1][1]["estimated"] == pytest.approx(0.9)
    (last,) = rounds(algorithm, run[-1][0], (4,), NEW)
    assert [alarm["kind"] for alarm in last[1]["watch"]["alarms"]] == ["labels", "meaning"]
    assert last[1]["watch"]["alarms"][1]["text"] == "meaning: rows are right less often than their confidence tells"


def test_labels_of_later_windows_are_not_counted_if_they_are_not_there():
    algorithm = method(train="never", windows=3, labels="first")
    run = list(rounds(algorithm, begun(algorithm), range(3), OLD))
    assert [facts["watch"]["accuracy"] for _, facts, _ in run] == [0.9] * 3
    (last,) = rounds(algorithm, run[-1][0], (3,), NEW)  # nothing can tell
    assert (last[1]["watch"]["accuracy"], last[1]["watch"]["alarms"]) == (None, [])
    assert last[1]["estimated"] == pytest.approx(0.9)


def test_an_alarm_trains_for_some_rounds_and_then_the_reference_begins_anew():
    algorithm = method(train="alarm", windows=2, rounds=2)
    run = list(rounds(algorithm, begun(algorithm), range(5), OLD))
    assert [asked for *_, asked in run] == [["train"]] * 2 + [["watch"]] * 3
    again = list(rounds(algorithm, run[-1][0], range(5, 9), NEW))
    assert [asked for *_, asked in again] == [["watch", "train"], ["train"], ["watch"], ["watch"]]
    assert again[0][1]["watch"]["alarms"]
    assert again[2][1]["watch"]["unknown"] == ["reference"]
    assert number(again[1][0]) == number(again[3][0]) < number(run[-1][0])


def test_no_predictions_are_compared_while_the_model_is_trained():
    algorithm = method(windows=2)
    run = list(rounds(algorithm, begun(algorithm), range(3), OLD))
    assert [asked for *_, asked in run] == [["watch", "train"]] * 3
    assert set(run[-1][1]["watch"]["far"]) == {"inputs", "labels", "meaning"}


def test_a_window_without_rows_changes_nothing():
    algorithm = method(train="never", windows=2)
    run = list(rounds(algorithm, begun(algorithm), range(3), OLD))
    nobody = holding([(torch.ones(0, 1, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))] * 2, classes=2)
    ((after, facts, _),) = rounds(algorithm, run[-1][0], (3,), None, nobody)
    assert facts == {"watch": {"rows": 0}}
    assert same(after, run[-1][0])


def test_a_client_that_lies_ends_in_a_window_that_is_refused():
    algorithm = method(train="never", windows=2)
    count = algorithm.works["watch"]

    def lie(payload, memory, shard, moment, rng):
        answer = count(payload, memory, shard, moment, rng)
        value = answer.total["window"].value.clone()
        value[0] += 5.0
        return replace(answer, total={"window": replace(answer.total["window"], value=value)})

    lying = replace(algorithm, works={**algorithm.works, "watch": lie})
    ((after, facts, _),) = rounds(lying, begun(algorithm), (0,), OLD)
    assert facts == {"watch": {"rows": 0, "refused": "shares of confidence are below 0 or above 1"}}
    assert after.own.groups == ()

    def boast(payload, memory, shard, moment, rng):
        answer = count(payload, memory, shard, moment, rng)
        return replace(answer, total={"window": replace(answer.total["window"], weight=1e6)})

    boasting = replace(algorithm, works={**algorithm.works, "watch": boast})
    ((_, facts, _),) = rounds(boasting, begun(algorithm), (0,), OLD)
    assert facts == {"watch": {"rows": 0, "refused": "more rows than clients may count"}}


def test_clusters_are_watched_one_by_one():
    """Fielding serves clients by slots: each has a line of its own, and all together are the whole."""
    run = played(toy("fielding", {"transforms": [{"kind": "watch", "windows": 1}]}), rounds=4)
    groups = run.state.own.groups
    assert len(groups) == 1 + len(run.host.algorithm.serve(run.state, torch.arange(8))[0])


def test_a_slot_of_other_clients_is_another_group():
    run = played(toy("fielding", {"transforms": [{"kind": "watch", "windows": 2}]}), rounds=3)
    known = run.state.own
    assert known.homes.tolist() == run.host.algorithm.serve(run.state, torch.arange(8))[1].tolist()
    state = replace(run.state, own=replace(known, homes=(known.homes + 1) % 4))
    run.fleet.begin(Moment(3, 4, 3.0))
    after = run.host.algorithm.round(state, run.fleet, Rng(0).at(3, "server"))[0].own
    assert after.groups[0].reference.equal(known.groups[0].reference)
    counts = [int((group.reference[0, :, -1] > 0).sum()) for group in after.groups]
    assert all(count <= 1 for count in counts[1:4])  # of slot 3 a single client has moved
    assert after.homes.equal(known.homes)
    # A group is another one if more than half of its clients are others.
    homes, clients = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.arange(7)
    for slots, expected in (
        ([0, 0, 0, 0, 1, 1, 1], set()),
        ([0, 0, 1, 1, 1, 1, 1], set()),
        ([0, 1, 1, 1, 1, 1, 1], set()),  # 3 of 6 are others
        ([1, 1, 1, 1, 1, 1, 0], {1}),  # one client of four tells nothing of slot 0
        ([1, 1, 1, 1, 1, 0, 0], {0, 1}),
    ):
        _, others = find_others(homes, clients, torch.tensor(slots))
        assert others == expected
    # Clients that were not there are no others.
    grown, others = find_others(homes[:2], torch.tensor([1, 4]), torch.tensor([0, 0]))
    assert (grown.tolist(), others) == ([0, 0, -1, -1, 0], set())


def test_a_method_without_classes_is_refused():
    numbers = ft.Task(lambda: ft.models.Linear().build((3,), 1), target=NumberTarget(0.0, 1.0, 0.0))
    with pytest.raises(FedtideError, match="'watch' is not allowed with 'fedavg', because it predicts no classes"):
        apply(ft.algorithms.fedavg(numbers), Watch())


WATCHED = Case(lambda given=None, **changes: toy(
    "ifca", {**(given or {}), "transforms": [{"kind": "watch", "windows": 1, "train": "alarm", "rounds": 1}]}, **changes
), None)  # fmt: skip


@pytest.mark.parametrize("law", [
    every.deployed, every.deployed_again, every.masked, every.round_again, every.left, every.no_rows,
    every.clients_join, every.stops,
], ids=lambda law: law.__name__)  # fmt: skip
def test_nodes_and_masks_give_the_bits_of_a_simulation(law):
    law(WATCHED)
