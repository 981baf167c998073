"""Devices: how long answers and rounds take, over-selection, deadlines."""

import json
from dataclasses import replace

import pytest
import torch

from fedtide.core import checkpoint, codec
from fedtide.core.base import Answer, Moment, Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.fleets.ask import Ask
from fedtide.fleets.devices import DeviceClock, LogNormal, Traces
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.local import LocalTrainer
from fedtide.runs.digest import digest_of
from helpers.handmade import client_of, fleet, people
from helpers.studies import A, lines_of, record_of, run_of, study


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def whole(question, rows):
    return rows


CLOCK = DeviceClock(doubles(0.1, 0.2, 0.4), doubles(10, 20, 40), doubles(5, 10, 20), whole, overhead=2.0)


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_compute_and_transfer_by_hand():
    """Client 0: 10 rows take 1 s, 40 bytes down 4 s, 10 up 2 s; client 2: 4 rows 1.6 s, then 1 s and 0.5 s."""
    ask = Ask("train", "train", Moment(0, 1), torch.tensor([0, 2]))
    assert CLOCK.answers(ask, torch.tensor([10, 4]), 40, 10).tolist() == pytest.approx([7.0, 3.1])
    assert CLOCK.round([3.0, 4.0]) == 9.0
    assert CLOCK.round([]) == 2.0


def test_the_fleet_charges_what_is_sent_both_ways_and_the_overhead():
    """Two rows each; 40 bytes down, an answer of two numbers up, 16 bytes."""

    def work(payload, memory, shard, moment, rng):
        return Answer({"n": Weighted(1.0)}, {"train_clients": torch.zeros(2)})  # 8 + 8 for the weight, 8 revealed

    plain = fleet({"q": work}, people(3))
    made = SimulatedFleet(plain.population, plain.engine, CLOCK)
    made.begin(Moment(0, 10, 0.0))
    reply = made.ask("q", torch.arange(3), {"w": torch.zeros(10)}, reveal=("train_clients",))
    up = reply.cost.up / 3
    expected = [2 * 0.1 + 40 / 10 + up / 5, 2 * 0.2 + 40 / 20 + up / 10, 2 * 0.4 + 40 / 40 + up / 20]
    assert reply.seconds.tolist() == pytest.approx(expected)
    made.ask("q", torch.tensor([2]), {}, reveal=("train_clients",))
    second = 2 * 0.4 + up / 20
    assert made.elapsed() == pytest.approx(expected[0] + second + 2.0)
    made.begin(Moment(1, 10, 0.0))
    assert made.elapsed() == 2.0


def test_whoever_was_counted_was_in_time_however_large_its_answer():
    """Decided with as many bytes up as down: client 2 alone is in time. Its real answer would have been late."""

    def work(payload, memory, shard, moment, rng):
        return Answer({"n": Weighted(torch.zeros(100))})

    plain = fleet({"q": work}, people(3))
    made = SimulatedFleet(plain.population, plain.engine, CLOCK)
    made.begin(Moment(0, 10, 0.0))
    reply = made.ask("q", torch.arange(3), {"w": torch.zeros(10)}, deadline=4.0)
    assert reply.clients.tolist() == [2]
    assert reply.seconds.tolist() == [4.0]
    assert made.queries[-1].seconds == 4.0


# -- over-selection and deadlines --------------------------------------------------------------------------------------


def counted(payload, memory, shard, moment, rng):
    return Answer({"n": Weighted(1.0)}, {"who": torch.tensor([client_of(shard)])})


def patient(seconds, shift=None, **patience):
    plain = fleet({"train": counted, "q": counted}, people(len(seconds), shift=shift), seconds=seconds)
    made = SimulatedFleet(plain.population, plain.engine, plain.clock, **patience)
    made.begin(Moment(0, 10, 0.0))
    return made


def test_it_waits_until_the_deadline_for_whoever_is_late_and_no_longer_than_needed():
    late = patient([4.0, 1.0, 3.0, 2.0], deadline=3.5)
    assert late.ask("train", torch.arange(4), {}).clients.tolist() == [1, 2, 3]
    assert late.elapsed() == 3.5
    in_time = patient([4.0, 1.0, 3.0, 2.0], deadline=9.0)
    in_time.ask("train", torch.arange(4), {})
    assert in_time.elapsed() == 4.0
    enough = patient([4.0, 1.0, 3.0, 2.0], deadline=3.5, first=3)
    enough.ask("train", torch.arange(4), {})
    assert enough.elapsed() == 3.0
    nobody = patient([4.0, 1.0], deadline=0.5)
    assert nobody.ask("train", torch.arange(2), {}).total is None
    assert nobody.elapsed() == 0.5


# -- what work costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "rows", "samples"),
    [
        ({"epochs": 3}, 10, 30),
        ({"local_steps": 2, "batch_size": 20}, 50, 40),
        ({"local_steps": 3, "batch_size": 20}, 50, 50),  # 20, 20 and the 10 that are left
        ({"local_steps": 4, "batch_size": 20}, 50, 70),
        ({"local_steps": 5, "batch_size": 20}, 7, 35),
        ({"local_steps": 5, "batch_size": 0}, 7, 35),
        ({"local_steps": 5, "batch_size": 20}, 0, 0),
    ],
)
def test_rows_that_a_solver_puts_through_the_model(local, rows, samples):
    assert LocalTrainer(**local).samples(torch.tensor([rows, rows])).tolist() == [samples] * 2


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_drawn_fleet_has_its_medians_and_spreads_and_follows_its_seed():
    drawn = LogNormal(compute=0.02, compute_spread=0.5, bandwidth=1e6, bandwidth_spread=1.5, upload=0.25)
    clock = drawn.clock(20000, 0, None, whole)
    assert float(clock.compute.median()) == pytest.approx(0.02, rel=0.05)
    assert float(clock.compute.log().std()) == pytest.approx(0.5, rel=0.05)
    assert float(clock.bandwidth.median()) == pytest.approx(1e6, rel=0.05)
    assert float(clock.bandwidth.log().std()) == pytest.approx(1.5, rel=0.05)
    assert torch.equal(clock.upload, clock.bandwidth * 0.25)
    assert abs(float(torch.corrcoef(torch.stack([clock.compute.log(), clock.bandwidth.log()]))[0, 1])) < 0.05
    assert torch.equal(drawn.clock(20000, 0, None, whole).compute, clock.compute)
    assert not torch.equal(drawn.clock(20000, 1, None, whole).compute, clock.compute)
    alike = replace(drawn, compute_spread=0.0, bandwidth_spread=0.0).clock(5, 3, None, whole)
    assert alike.compute.tolist() == [0.02] * 5
    assert alike.bandwidth.tolist() == [1e6] * 5


LATENCIES = [{"ResNet Latency": 50.0, "Vit Latency": 7.0}, {"ResNet Latency": 0}, {"ResNet Latency": 200}]
LINES = "case,tcp_speed_kbps\n1,8 16\n1,80\n2,800\n"


def files(folder, latency=LATENCIES, lines=LINES):
    (folder / "latency.json").write_text(latency if isinstance(latency, str) else json.dumps(latency))
    (folder / "lines.csv").write_text(lines)
    return Traces(latency="latency.json", lines="lines.csv")


def test_traces_by_hand(tmp_path):
    traces = files(tmp_path)
    clock = traces.clock(200, 0, tmp_path, whole)
    assert set(clock.compute.tolist()) == {0.05, 0.2}
    assert set(clock.bandwidth.tolist()) == {1500.0, 10000.0, 100000.0}
    assert torch.equal(clock.upload, clock.bandwidth)
    first = replace(traces, case=1, network="vit", unit=1.0).clock(50, 0, tmp_path, whole)
    assert set(first.compute.tolist()) == {7.0}
    assert set(first.bandwidth.tolist()) == {1500.0, 10000.0}


@pytest.mark.parametrize(
    ("latency", "lines", "said"),
    [
        ("{", LINES, r"devices.latency: .*latency.json: damaged or not JSON"),
        ("{}", LINES, r"devices.latency: .*: found {}, allowed: a list of objects"),
        (
            [{"ResNet Latency": -1}],
            LINES,
            r"devices.latency: .*positive numbers under 'ResNet Latency': found 0, allowed",
        ),
        (LATENCIES, "case,speed\n1,2\n", r"devices.lines: .*columns: found .*, allowed: 'tcp_speed_kbps'"),
        (LATENCIES, "case,tcp_speed_kbps\n1,2 fast\n", r"devices.lines: .*line 2: found '2 fast', allowed: positive"),
        (LATENCIES, "case,tcp_speed_kbps\n1,5\n1,\n", r"devices.lines: .*line 3: found '', allowed: positive"),
    ],
)
def test_files_that_are_no_traces_are_named(tmp_path, latency, lines, said):
    with pytest.raises(FedtideError, match=said):
        files(tmp_path, latency, lines).clock(3, 0, tmp_path, whole)


def test_a_case_that_is_not_there_and_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FedtideError, match=r"devices.case: found 7, allowed: 1, 2, as .*lines.csv has"):
        replace(files(tmp_path), case=7).clock(3, 0, tmp_path, whole)
    with pytest.raises(FedtideError, match=r"devices.case: found 7, allowed: 1, as .*lines.csv has"):
        replace(files(tmp_path, LATENCIES, "tcp_speed_kbps,case\n8,1\n8\n"), case=7).clock(3, 0, tmp_path, whole)
    with pytest.raises(FedtideError, match=r"devices.latency: no such file or folder: .*nowhere.json"):
        replace(files(tmp_path), latency="nowhere.json").clock(3, 0, tmp_path, whole)


# -- in a run ----------------------------------------------------------------------------------------------------------

FLEET = {"kind": "log-normal", "compute": 0.1}


def test_a_run_on_devices_that_is_stopped_goes_on_with_the_same_bytes(tmp_path):
    def experiment():
        cohort = {"kind": "oort", "clients_per_round": 3, "over_selection": 1.4, "pacer_step": 1}
        method = {**A, "cohort": cohort}
        return study(method, devices=FLEET, shift={"clock": "seconds", "who": {"kind": "always", "dropout_rate": 0.1}})

    whole_run, cut = run_of(experiment(), tmp_path / "whole"), run_of(experiment(), tmp_path / "cut")
    list(whole_run.play())
    list(cut.play(lambda: True))
    list(cut.play(lambda: len(lines_of(cut.folder)) == 4))
    list(cut.play())
    assert record_of(tmp_path / "whole") == record_of(tmp_path / "cut")
    states = [
        checkpoint.load(run.folder / "checkpoints", MemoryStore(None), config=digest_of(run.experiment, run.method, 0))[
            0
        ]
        for run in (whole_run, cut)
    ]
    assert codec.to_bytes(states[0].state) == codec.to_bytes(states[1].state)
    assert states[0].seconds == states[1].seconds


def test_arrivals_that_seconds_decide_are_not_known_in_advance(tmp_path):
    periodic = {"clock": "seconds", "who": {"kind": "periodic", "period": 4}}
    run = run_of(study(A, devices=FLEET, shift=periodic), tmp_path)
    list(run.play())
    saved = tmp_path / "shift" / "0.safetensors"
    assert len(codec.from_file(saved)["arrivals"]) == 0
    replayed = run_of(study(A, shift={"who": {"kind": "replay", "path": str(saved)}}), tmp_path / "again")
    with pytest.raises(FedtideError, match=r"has no arrivals; allowed: a run with clock"):
        list(replayed.play())
    steady = run_of(study(A, devices={"kind": "steady", "seconds": 2.0}, shift=periodic), tmp_path / "steady")
    list(steady.play())
    kept = codec.from_file(tmp_path / "steady" / "shift" / "0.safetensors")
    assert kept["expected"][:, 0].tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert [line["expected"][0] for line in lines_of(steady.folder)] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
