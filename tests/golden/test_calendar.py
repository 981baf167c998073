"""Windows of wall-clock time, what is held in them, and test-then-train scores, by hand."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
import torch

import fedtide as ft
from fedtide.core.base import Algorithm, Answer, Moment, Prediction, Weighted, to_everyone
from fedtide.data.partition import Natural, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import Calendar

NAMES = ("ann", "bob")


def log(*lines: tuple[str, str, int]) -> Rows:
    """A row for each line of a log: time in UTC, client, label; the feature is the number of the line."""
    time = [datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp() for when, _, _ in lines]
    client = torch.tensor([NAMES.index(name) for _, name, _ in lines])
    number = torch.arange(len(lines)).float()[:, None]
    label = torch.tensor([label for *_, label in lines])
    return Rows("log", number, label, 2, client=client, client_names=NAMES, time=torch.tensor(time).double())


def people(rows: Rows, calendar: Calendar, who: object = None) -> Population:
    shift = ft.Shift(who=who or ft.shift.Always(), what=calendar)
    return build(rows, Natural(), split=Split(val=0.0), shift=shift)


def at(number: int) -> Moment:
    return Moment(number, 10, float(number))


def held(population: Population, number: int, part: str = "train") -> list[list[int]]:
    return [population.held(client, at(number), part).tolist() for client in (0, 1)]


# In Berlin clocks are set forward on 29 March 2026 at 2:00 (1:00 UTC), to 3:00. In UTC the 28th begins there at 23:00
# of the 27th, the 29th at 23:00 of the 28th, and the 30th at 22:00 of the 29th: the 29th has 23 hours.
SPRING = log(
    ("2026-03-27 12:00", "ann", 0),  # 0  before the first window
    ("2026-03-27 22:59", "bob", 1),  # 1  a minute before it
    ("2026-03-27 23:00", "ann", 1),  # 2  window 0, its first moment: midnight of the 28th
    ("2026-03-28 22:59", "bob", 0),  # 3  window 0, its last minute
    ("2026-03-28 23:00", "ann", 0),  # 4  window 1
    ("2026-03-29 21:59", "bob", 1),  # 5  window 1, its last minute: 23:59 in summer time
    ("2026-03-29 22:30", "ann", 1),  # 6  window 2: half past midnight in summer time; by UTC it is still the 29th
    ("2026-03-31 12:00", "bob", 0),  # 7  window 3
)


def test_days_begin_at_midnight_in_their_zone_and_one_of_them_has_23_hours():
    plan = people(SPRING, Calendar(window="1d", begin="2026-03-28", zone="Europe/Berlin")).plan
    starts = [datetime.fromtimestamp(edge, UTC).strftime("%d %H:%M") for edge in plan.edges]
    assert starts == ["27 23:00", "28 23:00", "29 22:00", "30 22:00", "31 22:00"]
    assert (plan.edges[1:] - plan.edges[:-1]).tolist() == [24 * 3600, 23 * 3600, 24 * 3600, 24 * 3600]
    # By the clock of the run all days are equally long, so that an hour of the day is one number.
    assert [plan.clock(number) for number in range(3)] == [0.0, 86400.0, 172800.0]


def test_a_round_trains_on_what_has_come_and_tests_on_the_next_window():
    population = people(SPRING, Calendar(window="1d", hold="1d", begin="2026-03-28", zone="Europe/Berlin"))
    assert [held(population, number) for number in range(4)] == [
        [[2], [3]],
        # 24 hours back from 22:00 UTC on the 29th is 22:00 on the 28th: row 3 came at 22:59 and is still there.
        [[4], [3, 5]],
        [[6], []],
        [[], [7]],
    ]
    assert [held(population, number, "test") for number in range(4)] == [[[4], [5]], [[6], []], [[], [7]], [[], []]]


def test_what_came_before_the_first_window_is_held_as_long_as_any():
    population = people(SPRING, Calendar(window="1d", hold="2d", begin="2026-03-28", zone="Europe/Berlin"))
    assert held(population, 0) == [[0, 2], [1, 3]]  # 48 hours back from 23:00 on the 28th
    assert held(people(SPRING, Calendar(begin="2026-03-29", zone="Europe/Berlin")), 0) == [[0, 2, 4], [1, 3, 5]]


def test_labels_that_are_late_are_trained_on_later_and_tested_on_at_once():
    """Labels half a day late: held is what would be without, half a day earlier.

    round 0    from 11:00 on the 27th until 11:00 on the 28th: rows 0, 1, 2
    round 1    from 10:00 on the 28th until 10:00 on the 29th: rows 3, 4
    round 2    from 10:00 on the 29th until 10:00 on the 30th: rows 5, 6
    round 3    from 10:00 on the 30th until 10:00 on the 31st: none, as row 7 comes at noon
    """
    calendar = Calendar(window="1d", hold="1d", delay="12h", begin="2026-03-28", zone="Europe/Berlin")
    population = people(SPRING, calendar)
    assert [held(population, number) for number in range(4)] == [[[0, 2], [1]], [[4], [3]], [[6], [5]], [[], []]]
    assert [held(population, number, "test") for number in range(3)] == [[[4], [5]], [[6], []], [[], [7]]]


# In Berlin clocks are set back on 25 October 2026 at 3:00 (1:00 UTC), to 2:00: the hour from 2:00 comes twice.
AUTUMN = log(
    ("2026-10-24 22:30", "ann", 0),  # 0  0:30
    ("2026-10-25 00:30", "ann", 1),  # 1  2:30, summer time
    ("2026-10-25 01:30", "bob", 0),  # 2  2:30 again
    ("2026-10-25 02:30", "bob", 1),  # 3  3:30
    ("2026-10-25 22:30", "ann", 1),  # 4  23:30
    ("2026-10-25 23:30", "bob", 1),  # 5  0:30 on the 26th
)


def test_the_hour_that_comes_twice_is_one_window():
    plan = people(AUTUMN, Calendar(window="1h", begin="2026-10-25", zone="Europe/Berlin")).plan
    starts = [datetime.fromtimestamp(edge, UTC).strftime("%d %H:%M") for edge in plan.edges[:6]]
    assert starts == ["24 22:00", "24 23:00", "25 00:00", "25 02:00", "25 03:00", "25 04:00"]
    assert held(people(AUTUMN, Calendar(window="1h", hold="1h", begin="2026-10-25", zone="Europe/Berlin")), 2) == [
        [1], [2],
    ]  # fmt: skip


def test_the_hour_that_is_left_out_is_an_empty_window():
    plan = people(SPRING, Calendar(window="1h", begin="2026-03-29", zone="Europe/Berlin")).plan
    starts = [datetime.fromtimestamp(edge, UTC).strftime("%d %H:%M") for edge in plan.edges[:6]]
    assert starts == ["28 23:00", "29 00:00", "29 01:00", "29 01:00", "29 02:00", "29 03:00"]


def test_a_day_of_25_hours_loses_no_row_with_a_hold_of_a_day():
    population = people(AUTUMN, Calendar(window="1d", hold="1d", begin="2026-10-25", zone="Europe/Berlin"))
    # From 22:00 UTC on the 24th to 23:00 on the 25th; 24 hours back is 23:00, after row 0.
    assert held(population, 0) == [[0, 1, 4], [2, 3]]


def test_who_has_rows_in_the_window_arrives_and_whoever_has_rows_in_the_next_is_judged():
    population = people(SPRING, Calendar(window="1d", begin="2026-03-28", zone="Europe/Berlin"), ft.shift.Data())
    came = [population.arrivals(2, at(number)).tolist() for number in range(4)]
    assert came == [[0, 1], [0, 1], [0], [1]]
    assert [population.window(at(number)).came for number in range(4)] == [2, 2, 1, 1]
    judged = [population.judged(population.clients, "test", at(number)).tolist() for number in range(4)]
    assert judged == [[0, 1], [0], [1], []]


def test_rows_to_validate_on_come_as_others_do_and_judge_in_the_next_window_beside_test_rows():
    shift = ft.Shift(who=ft.shift.Always(), what=Calendar(window="1d", begin="2026-03-28", zone="Europe/Berlin"))
    plain, split = (build(SPRING, Natural(), split=Split(val=share), shift=shift) for share in (0.0, 0.5))
    assert split.has_val
    for number in range(4):
        assert split.window(at(number)).came == plain.window(at(number)).came
        parts = zip(held(split, number, "test"), held(split, number, "val"), strict=True)
        assert [sorted(a + b) for a, b in parts] == held(plain, number, "test")
        aside = [split.aside(client, at(number)).ids.tolist() for client in range(split.registered)]
        assert [sorted(a + b) for a, b in zip(held(split, number), aside, strict=True)] == held(plain, number)
        shards = split.shards(split.clients, at(number))
        assert [shard.val.ids.tolist() for shard in shards] == aside


def test_a_window_is_said_in_the_time_of_its_zone():
    population = people(SPRING, Calendar(window="1d", begin="2026-03-28", zone="Europe/Berlin"))
    window = population.window(at(1))
    assert (window.begin, window.next) == ("2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00")


@pytest.mark.parametrize(("begin", "first"), [(None, "28 23:00"), ("2026-03-28T23:00:00+00:00", "28 23:00")])
def test_the_first_window_begins_at_the_midnight_after_the_earliest_tenth(begin, first):
    """With rows 0 and 1 a day later the earliest is row 2, at 0:00 on the 28th: the next midnight is of the 29th."""
    rows = SPRING
    if begin is None:
        later = rows.time.clone()
        later[:2] += 86400.0
        rows = replace(rows, time=later)
    plan = people(rows, Calendar(begin=begin, zone="Europe/Berlin")).plan
    assert datetime.fromtimestamp(plan.edges[0], UTC).strftime("%d %H:%M") == first


# -- test, then train -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Most:
    """The commonest label among what participants held."""

    label: torch.Tensor


def commonest() -> Algorithm[Most]:
    """A method whose scores can be counted: it answers the commonest label of the last round that had participants."""

    def count(payload, memory, shard, moment, rng):
        return Answer({"labels": Weighted(torch.bincount(shard.y, minlength=2).double())}) if len(shard) else None

    def play(state, fleet, rng):
        reply = fleet.ask("train", fleet.reachable, {})
        return (state if reply.total is None else Most(reply.total["labels"].value.argmax())), {}

    def predict(payload, memories, x, owner):
        sure = torch.nn.functional.one_hot(payload["label"].expand(len(x)), 2)
        return Prediction((0.9 * sure + 0.05).log().float())

    return Algorithm(
        "commonest", lambda fleet, rng: Most(torch.tensor(0)), {"train": count}, play,
        to_everyone(lambda state: {"label": state.label}), predict,
    )  # fmt: skip


DAYS = log(
    ("2026-06-01 10:00", "ann", 0), ("2026-06-01 20:00", "bob", 0),
    ("2026-06-02 10:00", "ann", 1), ("2026-06-02 11:00", "ann", 1), ("2026-06-02 12:00", "bob", 0),
    ("2026-06-04 10:00", "ann", 0), ("2026-06-04 11:00", "bob", 0), ("2026-06-04 12:00", "bob", 1),
    ("2026-06-05 10:00", "ann", 1), ("2026-06-05 11:00", "bob", 0), ("2026-06-05 12:00", "bob", 0),
    ("2026-06-06 10:00", "bob", 1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("delay", "scores"),
    [
        # Trained on the 1st: 0, and on the 2nd one of three is 0. Trained on the 2nd: 1, and on the 3rd there is no
        # row. On the 3rd nothing is trained on: still 1, which is one of three on the 4th. Trained on the 4th: 0, two
        # of three on the 5th. Trained on the 5th: 0, none on the 6th.
        (None, {1: 1 / 3, 3: 1 / 3, 4: 2 / 3, 5: 0.0}),
        # A day late. Nothing is known on the 1st: 0, as at the start. On the 3rd, the 2nd: 1. On the 4th, the 3rd, so
        # nothing: still 1, which is one of three on the 5th. On the 5th, the 4th: 0.
        ("1d", {1: 1 / 3, 3: 1 / 3, 4: 1 / 3, 5: 0.0}),
    ],
)
@pytest.mark.parametrize("who", [ft.shift.Always(), ft.shift.Data()])
def test_a_model_is_tested_on_each_window_before_it_is_trained_on_it(delay, scores, who):
    population = people(DAYS, Calendar(window="1d", hold="1d", delay=delay, begin="2026-06-01"), who)
    result = ft.simulate(commonest(), population, rounds=5, eval_every=1)
    assert dict(zip(result.rounds, result.accuracy, strict=True)) == pytest.approx(scores)
    # The commonest class is that of all rows before: 0 of the 1st, of the 2nd 0 (three of five), to the 4th 0 (five of
    # eight), to the 5th 0 again (seven of eleven). A day late on the 1st nothing is known, then these again.
    floor = {1: None if delay else 1 / 3, 3: 2 / 3, 4: 2 / 3, 5: 0.0}
    floors = {line["round"] + 1: line["scores"]["train_clients"].get("commonest") for line in result.lines}
    assert {number: floors[number] for number in scores} == floor
    empty = result.lines[3 if delay else 2]  # on the 4th the labels of the 3rd would come
    assert (empty["window"]["begin"][:10], empty["window"]["came"]) == (f"2026-06-0{4 if delay else 3}", 0)
    assert (empty["asked"], empty["answered"]) == (0, 0)
    assert [line["seconds"] for line in result.lines] == [86400.0 * (number + 1) for number in range(5)]
