"""Traces of who is awake: by hand, with groups, on both clocks, and in runs that are stopped."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core import checkpoint, codec
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.data.partition import IID, ByDomain, Natural
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import Shift
from fedtide.data.shift.who import Availability, AvailabilityPlan, Timetable, read_timetable
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.examples import examples
from helpers.studies import SCAFFOLD, A, lines_of, record_of, run_of, study

NAMES = ("ann", "bob", "cid", "dan", "eve")


def rows(n: int = 240) -> Rows:
    i = torch.arange(n)
    domain = (i // 5 % 2, ("day", "night"))
    return Rows("toy", i.float()[:, None], i % 4, 4, *domain, client=i % 5, client_names=NAMES)


def trace(tmp_path, *lines: str, **options) -> Availability:
    (tmp_path / "awake.csv").write_text("\n".join(["client,start,end", *lines]) + "\n")
    return Availability(path=str(tmp_path / "awake.csv"), **options)


def people(who, partition=IID(clients=4), clock="seconds", **more):
    return build(rows(), partition, shift=Shift(who=who, clock=clock), **more)


def at(seconds: float, r: int = 0) -> Moment:
    return Moment(r, 100, seconds)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_who_is_awake_when(tmp_path):
    """0 in [0, 10), 1 in [5, 8) and [9, 12), 2 round midnight in [11, 14); 3 is not there; it repeats after 12."""
    who = trace(tmp_path, "0,0,10", "1,5,8", "1,9,12", "2,11,14", period=12.0)
    population = people(who)
    told = {
        0: [0, 2], 1.5: [0, 2], 2: [0], 5: [0, 1], 8: [0], 9: [0, 1], 10: [1], 11: [1, 2], 12: [0, 2], 14: [0],
        17: [0, 1],
    }  # fmt: skip
    assert {time: population.reachable(at(time)).tolist() for time in told} == told
    assert {time: population.arrivals(4, at(time)).tolist() for time in told} == told
    assert population.arrivals(1, at(11.0)).tolist() in ([1], [2])
    assert population.wait(at(3.0)) == 0.0


def test_rounds_are_read_where_the_clock_says_so(tmp_path):
    population = people(trace(tmp_path, "0,0,2", "1,2,3"), clock="rounds")
    assert [population.reachable(Moment(r, 9, 77.0)).tolist() for r in range(5)] == [[0], [0], [1], [0], [0]]
    assert population.wait(Moment(2, 9, 77.0)) == 0.0


def test_clients_may_be_called_as_the_source_calls_them(tmp_path):
    population = people(trace(tmp_path, "bob,0,2", "eve,1,4"), partition=Natural())
    assert [population.reachable(at(time)).tolist() for time in (0, 1, 3)] == [[1], [1, 4], [4]]
    with pytest.raises(FedtideError, match=r"awake.csv: client: found 'zoe', allowed: ann, .*, or match = 'drawn'"):
        people(trace(tmp_path, "zoe,0,2"), partition=Natural())


def test_json_says_the_same(tmp_path):
    entries = [{"client": 0, "start": 0, "end": 4}, {"client": "1", "start": 6, "end": 8.0}]
    (tmp_path / "awake.json").write_text(json.dumps(entries))
    trace(tmp_path, "0,0,4", "1,6,8")
    csv, made = (read_timetable(tmp_path / name, None) for name in ("awake.csv", "awake.json"))
    assert csv.names == made.names
    for key in ("start", "length", "owner", "period"):
        assert np.array_equal(getattr(csv, key), getattr(made, key))


def test_published_traces_repeat_each_after_its_own_length(tmp_path):
    devices = {
        "681": {"trace_start": 100.0, "trace_end": 110.0, "ready_time": [[101.0, 104.0], [105.0, 105.0]]},
        "9": {"trace_start": 0.0, "trace_end": 4.0, "ready_time": [[1.0, 2.0]]},
        "7": {"isSuccess": False, "trace_start": None, "trace_end": None, "ready_time": None},
    }
    (tmp_path / "flash.json").write_text(json.dumps(devices))
    table = read_timetable(tmp_path / "flash.json", None)
    assert (table.names, table.period.tolist()) == (("681", "9"), [10.0, 4.0])
    assert [table.awake(time).tolist() for time in (1.0, 3.9, 4.0, 5.0, 101.0)] == [
        [True, True], [True, False], [False, False], [False, True], [True, True]
    ]  # fmt: skip


@pytest.mark.shared
def test_the_published_phones(real_data):
    table = read_timetable(real_data / "device-traces/flash_availability_1000.json", None)
    assert len(table.names) == 704  # of 710 with a trace six are never ready for longer than an instant
    days = table.period / 86400
    assert ((days == days.round()) & (days >= 1) & (days <= 10)).all()
    by_hour = [np.mean([table.awake(86400.0 * d + 3600.0 * h).mean() for d in range(10)]) for h in range(24)]
    assert max(by_hour) > 1.7 * min(by_hour)  # as its README says, about twice


# -- properties --------------------------------------------------------------------------------------------------------

eighths = st.integers(0, 720).map(lambda k: k / 8)
spans = st.lists(st.tuples(st.integers(0, 3), eighths, st.integers(1, 80).map(lambda k: k / 8)), min_size=1, max_size=8)


@examples(60)
@given(spans=spans, time=st.integers(0, 4000).map(lambda k: k / 8), turns=st.integers(1, 5))
def test_a_device_is_awake_in_its_intervals_and_wakes_after_the_wait(spans, time, turns):
    owner, start, length = (np.array(column) for column in zip(*spans, strict=True))
    table = Timetable(tuple("abcd"), start.astype(float), length.astype(float), owner, np.full(4, 100.0))
    naive = [
        any(0 <= time - s - 100 * k < n for o, s, n in spans if o == device for k in range(-1, 7))
        for device in range(4)
    ]
    assert table.awake(time).tolist() == naive
    assert table.awake(time + 100.0 * turns).tolist() == naive
    wait = AvailabilityPlan(table, np.arange(4)).wait(time)
    assert (wait == 0) == any(naive)
    assert table.awake(time + wait).any()
    assert wait == 0 or not table.awake(time + 0.999 * wait).any()


def test_the_wait_always_ends_somewhere_else_than_where_it_began():
    """Sums of fractions that no binary number is: the clock of a run must not stand still."""
    table = Timetable(("a",), np.array([0.1]), np.array([0.05]), np.array([0]), np.array([0.3]))
    time, woken = 0.0, 0
    for _ in range(2000):
        wait = float(table.next(time)[0])
        time += wait if wait else 0.05
        woken += wait == 0
    assert time > 200
    assert 900 < woken < 1500


def test_a_trace_that_is_drawn_follows_the_seed_and_repeats(tmp_path):
    who = trace(tmp_path, *(f"d{k},{k},{k + 1}" for k in range(5)), match="drawn")

    def of(seed):
        return build(
            rows(), IID(clients=40), shift=Shift(who=who, clock="seconds"), seed=seed
        ).availability.device.tolist()

    assert of(0) == of(0)
    assert of(0) != of(1)
    assert set(of(0)) == set(range(5))


# -- with groups -------------------------------------------------------------------------------------------------------


def test_groups_expect_their_share_of_those_who_are_awake(tmp_path):
    """By domain two clients are of the day and two of the night."""
    who = trace(tmp_path, "0,0,6", "1,2,4", "2,2,6", period=8.0)
    population = people(who, groups=ByDomain())
    assert population.group.tolist() == [0, 0, 1, 1]
    assert [population.expected(at(time)).tolist() for time in (0, 2, 5)] == [[1, 0], [2 / 3, 1 / 3], [0.5, 0.5]]
    assert population.expected(at(7.0)).tolist() == [0.5, 0.5]  # all asleep: of all clients


# -- in a run ----------------------------------------------------------------------------------------------------------

PAIRED = {"kind": "gaussians", "samples": 240, "dims": 4, "classes": 3, "domains": 2}
FLEET = {"kind": "log-normal", "compute": 0.1}


def awake_in(tmp_path, period: float = 12.0):
    lines = [f"{c},{c % 3 * 2},{c % 3 * 2 + 3}" for c in range(8)]
    path = trace(tmp_path, *lines).path
    return {"kind": "availability", "path": path, "period": period, "dropout_rate": 0.1}


@pytest.mark.parametrize("what", ["static", {"kind": "change-points", "when": {"kind": "drawn", "every": 5.0}}])
@pytest.mark.parametrize("who", ["availability", "periodic"])
def test_a_run_on_the_clock_of_seconds_that_is_stopped_goes_on_with_the_same_bytes(tmp_path, who, what):
    """Seconds drive who is awake and what they hold; the record says who drifted."""
    who = awake_in(tmp_path) if who == "availability" else {"kind": "periodic", "period": 20}
    # Groups by domain and concepts that are domains do not go together: clients of a group have rows of one domain.
    labels = {"groups": {"by": "labels", "labels": [[0], [1, 2]]}, "source": PAIRED}
    data = {} if what == "static" else labels
    experiment = study(
        SCAFFOLD, devices=FLEET, shift={"clock": "seconds", "who": who, "what": what}, data=data, rounds=10
    )
    preflight(experiment)
    whole, cut = (run_of(experiment, tmp_path / name) for name in ("whole", "cut"))
    list(whole.play())
    list(cut.play(lambda: True))
    list(cut.play(lambda: len(lines_of(cut.folder)) == 6))
    list(cut.play())
    assert record_of(tmp_path / "whole") == record_of(tmp_path / "cut")
    states = [
        checkpoint.load(run.folder / "checkpoints", MemoryStore(None), config=digest_of(experiment, run.method, 0))
        for run in (whole, cut)
    ]
    assert codec.to_bytes(states[0][0].state) == codec.to_bytes(states[1][0].state)
    assert states[0][0].seconds == states[1][0].seconds
    if what != "static":
        # A change point lies between the beginnings of two rounds where their seconds say so.
        lines = lines_of(whole.folder)
        began = [0.0, *(line["seconds"] for line in lines)]
        crossed = [int(now // 5) > int(then // 5) for then, now in zip([0.0, *began], began, strict=False)][:10]
        assert [line["drifted"] > 0 for line in lines] == crossed
        assert any(crossed)


def test_a_round_in_which_nobody_is_awake_lasts_until_somebody_wakes(tmp_path):
    who = {**awake_in(tmp_path, period=40.0), "dropout_rate": 0.0}
    experiment = study(A, devices={"kind": "steady", "seconds": 3.0}, shift={"clock": "seconds", "who": who}, rounds=8)
    run = run_of(experiment, tmp_path / "run")
    list(run.play())
    lines = lines_of(run.folder)
    assert [line["seconds"] for line in lines] == [3.0, 6.0, 9.0, 40.0, 43.0, 46.0, 49.0, 80.0]
    assert [line["asked"] for line in lines] == [3, 3, 2, 0, 3, 3, 2, 0]
    saved = codec.from_file(tmp_path / "run" / "shift" / "0.safetensors")
    assert len(saved["arrivals"]) == 0  # as nobody knew


# -- files and digests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["changes.csv", "shares.csv", "latency.json", "lines.csv", "saved", "replay"])
def test_the_content_of_a_file_is_part_of_the_digest(tmp_path, name):
    path = tmp_path / name

    def digest(text: str) -> str:
        path.write_text(text)
        (tmp_path / "other").write_text("[]")
        changes = {
            "changes.csv": {"shift": {"what": {"kind": "change-points", "when": f"file:{path}"}}},
            "shares.csv": {"shift": {"what": {"kind": "change-points", "concepts": f"label-shares:{path}"}}},
            "latency.json": {"devices": {"kind": "traces", "latency": str(path), "lines": str(tmp_path / "other")}},
            "lines.csv": {"devices": {"kind": "traces", "latency": str(tmp_path / "other"), "lines": str(path)}},
            "saved": {"data": {"partition": f"saved:{path}"}},
            "replay": {"shift": {"who": f"replay:{path}"}},
        }
        experiment = study(A, **changes[name])
        return digest_of(experiment, experiment.method[0], 0)

    assert digest("one") == digest("one")
    assert digest("one") != digest("two")
    path.unlink()
    missing = study(A, shift={"what": {"kind": "change-points", "when": f"file:{path}"}})
    with pytest.raises(FedtideError, match="no such file"):
        digest_of(missing, missing.method[0], 0)
