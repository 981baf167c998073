"""Laws of real time: every row is tested on once, and trained on later; windows follow the clocks of their zone."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.data.partition import HeldOutClients, Natural, Resample, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import Calendar, Shift
from fedtide.data.shift.who import Always, Data
from fedtide.fields.types import seconds_of
from helpers.examples import examples
from helpers.toys import PARTS

law = examples(25)

# Around both nights in which clocks are set in Berlin, and that of New York.
NIGHTS = [datetime(2026, month, day, tzinfo=UTC) for month, day in ((3, 27), (10, 23), (10, 30))]
calendars = st.builds(
    lambda window, longer, delay, zone: Calendar(
        window=window,
        hold="all" if longer is None else f"{seconds_of(window) / 60 + longer:g}m",
        delay=delay,
        zone=zone,
    ),
    st.sampled_from(["20m", "1h", "7h", "1d", "2d"]),
    st.sampled_from([None, 0, 90, 3000]),
    st.sampled_from([None, "10m", "1d"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
)


def log(night: int, seed: int, clients: int = 5, rows: int = 80) -> Rows:
    """Rows at random times of six days."""
    draw = torch.Generator().manual_seed(seed)
    minutes = torch.randint(0, 6 * 24 * 60, (rows,), generator=draw).double()
    owner = torch.cat([torch.arange(clients), torch.randint(0, clients, (rows - clients,), generator=draw)])
    y = torch.arange(rows) % 3
    time = NIGHTS[night].timestamp() + 60 * minutes
    return Rows("log", y.float()[:, None], y, 3, client=owner, client_names=tuple("abcde"), time=time)


def people(calendar: Calendar, rows: Rows, **settings) -> Population:
    settings = {"partition": Natural(), "split": Split(val=0.2), "shift": Shift(what=calendar)} | settings
    return build(rows, **settings)


def at(number: int) -> Moment:
    return Moment(number, 1000, float(number))


worlds = st.builds(log, st.integers(0, 2), st.integers(0, 9))


@law
@given(calendars, worlds)
def test_every_row_is_tested_on_once_and_only_then_trained_on(calendar, rows):
    population = people(calendar, rows, held_out_clients=HeldOutClients(1))
    plan = population.plan
    for client in range(len(population.group)):
        seen: dict[str, dict[int, list[int]]] = {part: {} for part in PARTS}
        for part in PARTS:
            for number in range(-1, plan.windows):
                for row in population.held(client, at(number), part).tolist():
                    seen[part].setdefault(row, []).append(number)
            assert not set(seen["test"]) & set(seen["val"])
        aside = {number: set(plan.aside(client, at(number)).tolist()) for number in range(-1, plan.windows)}
        for row in (row for part in ("test", "val") for row in population.parts[part][client].tolist()):
            when = float(rows.time[row])
            tested = seen["test"].get(row, []) + seen["val"].get(row, [])
            assert len(tested) == (plan.edges[0] <= when)
            assert all(plan.edges[number + 1] <= when < plan.edges[number + 2] for number in tested)
            trained = seen["train"].get(row, []) or [number for number, rows in aside.items() if row in rows]
            assert trained == list(range(trained[0], trained[-1] + 1)) if trained else True
            assert all(first > number for first in trained[:1] for number in tested)
        # Of a client that takes part each row is for training and testing, or for validation.
        own = [set(population.parts[part][client].tolist()) for part in PARTS]
        assert client >= population.registered or (own[0] == own[2] and not own[0] & own[1])


@law
@given(calendars, worlds)
def test_windows_follow_the_clocks(calendar, rows):
    """By an own reading of the clocks: a window is what the clocks of the zone say, but in an hour that comes twice."""
    population = people(calendar, rows)
    edges, zone = population.plan.edges, ZoneInfo(calendar.zone)
    begin = datetime.fromtimestamp(edges[0], UTC).astimezone(zone).replace(tzinfo=None)
    assert (begin.hour, begin.minute) == (0, 0)
    assert all(before <= after for before, after in pairwise(edges))
    assert edges[-2] <= float(rows.time.max()) < edges[-1]
    length = timedelta(seconds=seconds_of(calendar.window))
    for when in rows.time[rows.time >= edges[0]].tolist():
        moment = datetime.fromtimestamp(when, UTC).astimezone(zone)
        other = moment.replace(fold=1 - moment.fold)
        if moment.utcoffset() == other.utcoffset():
            number = (moment.replace(tzinfo=None) - begin) // length
            assert edges[number] <= when < edges[number + 1]


@law
@given(calendars, worlds, st.integers(-1, 60))
def test_counts_are_those_of_what_is_held_and_who_drifted_holds_other_rows(calendar, rows, number):
    population = people(calendar, rows)
    everyone = torch.arange(len(population.group))
    for part in PARTS:
        counted = population.counts(everyone, part, at(number)).tolist()
        assert counted == [len(population.held(client, at(number), part)) for client in everyone.tolist()]
    held = [
        [[population.held(client, at(n), part).tolist() for part in PARTS] for client in population.clients.tolist()]
        for n in (number - 1, number)
    ]
    truth = [client for client, (then, now) in enumerate(zip(*held, strict=True)) if then != now]
    assert population.changed(at(number)).tolist() == truth
    assert population.may_differ(at(number), at(number - 1)).tolist() == truth


@law
@given(calendars, worlds, st.integers(0, 60), st.sampled_from([Always(), Data()]))
def test_who_arrives_holds_something_and_with_data_something_new(calendar, rows, number, who):
    population = people(calendar, rows, shift=Shift(who=who, what=calendar))
    delay = 0 if calendar.delay is None else seconds_of(calendar.delay)
    begin, end = (population.plan.edge(number + step) - delay for step in (0, 1))
    expected = []
    for client in population.clients.tolist():
        times = rows.time[population.parts["test"][client].long()]
        new = bool(((times >= begin) & (times < end)).any())
        holds = len(population.held(client, at(number), "train")) > 0
        expected += [client] if holds and (new or who.kind == "always") else []
    assert population.reachable(at(number)).tolist() == expected
    assert population.arrivals(5, at(number)).tolist() == expected
    assert len(population.arrivals(2, at(number))) == min(2, len(expected))


@law
@given(worlds)
def test_clients_that_share_rows_are_tested_on_those_to_come(rows):
    """No row is divided off: what one client trains on, others did not meet in their test before."""
    calendar = Calendar(window="1d")
    population = people(calendar, rows, partition=Resample(clients=4, samples=30))
    for number in range(population.plan.windows - 1):
        now = population.plan.edges[number + 1]
        for client in population.clients.tolist():
            assert (rows.time[population.held(client, at(number), "train").long()] < now).all()
            assert (rows.time[population.held(client, at(number), "test").long()] >= now).all()
