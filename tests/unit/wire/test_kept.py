"""Releases of a server that is killed: nothing is released twice, and what was released is used again."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import kolmogorov, ndtr

pytest.importorskip("cryptography")

from fedtide.core import checkpoint, codec
from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS, read_lines
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.evaluate.judge import Judge, views
from fedtide.laws.case import toy
from fedtide.remote.offline import near_fleet
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire
from fedtide.runs.runner import Run
from fedtide.wire import ledger as ledger_module
from fedtide.wire.accounting import Plan
from fedtide.wire.ledger import LEDGER, Ledger, Line, Safe, check_released, digest, eligible, read, safe_of
from fedtide.wire.noise import SystemNoise, normal, simulated_noise

BOUNDS = {
    "fedavg": ("delta", "loss"),
    "scaffold": ("delta", "loss", "control"),
    "ifca": ("delta", "loss", "members"),
    "fedtkm": ("delta", "loss", "branches", "modes", "features"),
}
OPTIONS = {"scaffold": {"max_control_norm": 1.0}, "ifca": {}, "fedtkm": {}}


class Killed(BaseException):
    """As if the process were gone."""


def experiment_of(name: str, secure: bool = False, **privacy: Any) -> Any:
    wanted = {"epsilon": 8.0, "clip": dict.fromkeys(BOUNDS[name], 1.0), "distance": 2, "noise": "banded", **privacy}
    wire = {"secure": secure, "fewest": 3, "privacy": wanted}
    return toy(name, OPTIONS.get(name), wire=wire, rounds=3, eval_every=3, checkpoint_every=1)


def run_of(experiment: Any, root: Path) -> Run:
    return Run(experiment, experiment.method[0], 0, root / "run" / "toy" / "0")


def served(experiment: Any, root: Path, draw: Any = None) -> Any:
    """Play on nodes in this process, as a server that keeps what it released; return the judge."""
    run, made = run_of(experiment, root), []

    def judge_of(run: Run) -> Judge:
        host = host_of(experiment, run.method, 0)
        safe = safe_of(run.folder)
        wire = server_wire(experiment, run.method, host, draw or simulated_noise(0), run.folder / LEDGER, safe)
        fleet = near_fleet(host, 8 if experiment.wire.secure else 3, root / "nodes", wire=wire, patience=5.0)
        made.append(Judge(host.algorithm, fleet, views(host.population), run.method.decide_per))
        return made[0]

    for _ in run.play(judge_of=judge_of):
        pass
    return made[0]


def state_of(run: Run) -> Any:
    return codec.from_file(checkpoint.file_of(run.folder))


@pytest.fixture
def kill(monkeypatch):
    """Kill the server once, at a step of round 1: (name of the step) -> None."""

    def at(step: str) -> None:
        def deadly(kind: Any, name: str, *, after: bool, number: Any) -> None:
            does, left = getattr(kind, name), [1]

            def do(self: Any, *given: Any) -> Any:
                dies = number(*given) == 1 and left
                if dies and not after:
                    left.clear()
                    raise Killed
                done = does(self, *given)
                if dies:
                    left.clear()
                    raise Killed
                return done

            monkeypatch.setattr(kind, name, do)

        line = lambda line, *rest: line.round  # noqa: E731
        if step == "before it is kept":
            deadly(Safe, "keep", after=False, number=line)
        elif step == "kept, not in the ledger":
            deadly(Safe, "keep", after=True, number=line)
        elif step == "in the ledger":
            deadly(Ledger, "add", after=True, number=line)
        else:
            deadly(checkpoint_of(monkeypatch), "save", after=False, number=lambda ahead: ahead - 1)

    return at


def checkpoint_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A place to be killed in before a checkpoint is written, after the round's line of the record is."""

    class Place:
        def save(self, ahead: int) -> None:
            return None

    place, save = Place(), checkpoint.save

    def saves(folder: Any, ahead: Any, *rest: Any, **named: Any) -> Any:
        place.save(ahead.round)
        return save(folder, ahead, *rest, **named)

    monkeypatch.setattr(checkpoint, "save", saves)
    return Place


STEPS = ["before it is kept", "kept, not in the ledger", "in the ledger", "released, no checkpoint"]
CASES = [
    *(("scaffold", False, step) for step in STEPS),
    *((name, True, "in the ledger") for name in ("fedavg", "ifca", "fedtkm")),
    ("scaffold", True, "before it is kept"),
]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    found: dict[str, Run] = {}

    def play(name: str) -> Run:
        if name not in found:
            found[name] = run_of(experiment_of(name), tmp_path_factory.mktemp(name))
            list(found[name].play())
        return found[name]

    return play


@pytest.mark.parametrize(("name", "secure", "step"), CASES)
def test_a_server_that_is_killed_comes_to_the_bits_of_the_simulation(tmp_path, kill, simulated, name, secure, step):
    experiment, reference = experiment_of(name, secure), simulated(name)
    kill(step)
    with pytest.raises(Killed):
        served(experiment, tmp_path)
    fleet = served(experiment, tmp_path).fleet
    run = run_of(experiment, tmp_path)
    assert same(state_of(run), state_of(reference))
    assert (run.folder / LEDGER).read_text() == (reference.folder / LEDGER).read_text()
    ours, theirs = (read_lines(each.folder) for each in (run, reference))
    for key in ("asked", "answered", "refused", "trained", "epsilon", "facts"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    names = {path.name for path in (tmp_path / "private" / "released").iterdir()}
    stay = {"lines", "offered"} if secure else {"lines"}
    assert {name.split(".")[0] for name in names} == {"2"} | stay, "rounds that a checkpoint holds are forgotten"
    assert fleet.ledger.epsilon() <= 8.0 * (1 + 1e-9)


@pytest.mark.parametrize("step", ["in the ledger", "released, no checkpoint"])
def test_with_noise_of_the_system_a_killed_round_has_the_sum_that_was_released(tmp_path, monkeypatch, kill, step):
    """Fresh noise on the same sum, or the same noise on another one, would be a second release."""
    experiment, read_by_algorithm = experiment_of("fedavg", noise="plain"), defaultdict(set)
    from fedtide.fleets import totals as vectors

    as_total, released = vectors.Vectors.read_released, []

    def again(self: Any, ask: Any, payload: Any, sums: Any) -> Any:
        released.append((ask.version, {slot: vector.clone() for slot, vector in sums.items()}))
        return as_total(self, ask, payload, sums)

    monkeypatch.setattr(vectors.Vectors, "read_released", again)
    kept = Safe.keep

    def keep(self: Any, line: Any, vector: Any) -> None:
        read_by_algorithm[line.place].add(vector.numpy().tobytes())
        kept(self, line, vector)

    monkeypatch.setattr(Safe, "keep", keep)
    kill(step)
    with pytest.raises(Killed):
        served(experiment, tmp_path, SystemNoise())
    served(experiment, tmp_path, SystemNoise())
    assert [len(sums) for sums in read_by_algorithm.values()] == [1] * 3
    ((version, sums),) = released
    assert version == (1, 0)
    assert {sums[0].numpy().tobytes()} == read_by_algorithm[1, 0, None]
    lines = read(run_of(experiment, tmp_path).folder / LEDGER)
    assert [line.round for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["gone", "changed", "not noted"])
def test_a_round_whose_sum_is_gone_is_lost_and_accounted_for(tmp_path, kill, damage):
    experiment = experiment_of("scaffold", distance=1)
    kill("in the ledger")
    with pytest.raises(Killed):
        served(experiment, tmp_path, SystemNoise(tmp_path / "private" / "seeds"))
    whole, noted = (tmp_path / "private" / "released" / name for name in ("1.0.all", "1.0.asked"))
    assert whole.stat().st_mode & 0o077 == 0
    if damage == "changed":
        whole.write_bytes(whole.read_bytes()[:-8] + bytes(8))
    else:
        (whole if damage == "gone" else noted).unlink()
    before = state_of(run_of(experiment, tmp_path))
    judge = served(experiment, tmp_path, SystemNoise(tmp_path / "private" / "seeds"))
    run = run_of(experiment, tmp_path)
    lines = {line["round"]: line for line in read_lines(run.folder)}
    assert lines[1]["answered"] == 0
    assert lines[2]["answered"] > 0
    assert not same(before, state_of(run))
    assert [line.round for line in read(run.folder / LEDGER)] == [0, 1, 2], "what was spent is not forgotten"
    asks = {line["round"]: line for line in read_lines(run.folder, "asks.jsonl")}
    words = {word for node in asks[1]["asks"][0]["nodes"].values() for word in node["clients"].values()}
    assert words == {"lost: its sum was released before the server ended, and is gone"}
    assert judge.fleet.ledger.lines[1].clients


def test_a_ledger_that_cannot_be_written_releases_nothing(tmp_path, monkeypatch):
    plan, line = experiment_of("fedavg"), {"n": 0}

    def full(handle: int) -> None:
        line["n"] += 1
        if line["n"] == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        served(plan, tmp_path)
    monkeypatch.undo()
    path = run_of(plan, tmp_path).folder / LEDGER
    written = path.read_text() if path.exists() else ""
    served(plan, tmp_path)
    assert path.read_text().startswith(written)
    assert [each.round for each in read(path)] == [0, 1, 2]


# -- noise of the system -----------------------------------------------------------------------------------------------


def test_a_released_sum_is_taken_again_only_for_its_own_question_and_clients(tmp_path):
    experiment = experiment_of("fedavg", distance=1)
    host = host_of(experiment, experiment.method[0], 0)

    def asked(clients: Any) -> Any:
        wire = server_wire(
            experiment, experiment.method[0], host, simulated_noise(0), tmp_path / LEDGER, Safe(tmp_path / "safe")
        )
        fleet = near_fleet(host, 3, tmp_path / "nodes", wire=wire, patience=5.0)
        fleet.begin(replace(fleet.moment, round=0, rounds=3))
        reply = fleet.ask("train", clients, host.algorithm.init(fleet, Rng(0)).weights)
        return reply, {word for line in fleet.record.asks[0]["nodes"].values() for word in line["clients"].values()}

    first, _ = asked(torch.arange(5))
    again, said = asked(torch.arange(5))
    assert same(again.total, first.total)
    assert said == {"answered"}
    for other in (torch.arange(4), torch.arange(1, 6)):
        reply, said = asked(other)
        assert reply.total is None
        assert said == {"lost: its sum was released before the server ended, and is gone"}


def test_released_sums_of_rounds_that_are_over_go_to_the_record(tmp_path):
    """One without a line in the ledger was seen by nobody, as its server was killed before, and goes."""
    safe, sums = (
        Safe(tmp_path / "private", tmp_path / "record"),
        [torch.full((2,), float(n)).double() for n in range(3)],
    )
    line = {"ask": 0, "question": "train", "slot": None, "z": 1.0, "bounds": {}, "clients": (0,), "epsilon": 0.0}
    lines = [Line(round=number, sha256=digest(made), **line) for number, made in enumerate(sums)]
    for each, made in zip(lines, sums, strict=True):
        safe.keep(each, made)
    safe.settle(2, lines[1:])
    assert [path.name for path in sorted(tmp_path.glob("*/*.all"))] == ["2.0.all", "1.0.all"]
    assert safe.read_sum(lines[0]) is None
    assert [safe.read_sum(each).tolist() for each in lines[1:]] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_released_sum_of_the_last_round_that_is_gone_is_found(tmp_path):
    record, made = tmp_path / "run" / "toy" / "0", torch.zeros(2, dtype=torch.float64)
    about = {"ask": 0, "question": "train", "slot": None, "z": 1.0, "bounds": {}, "clients": (0,)}
    line = Line(round=1, sha256=digest(made), **about)
    safe_of(record).keep(line, made)
    safe_of(record).settle(2, [line])
    (record / LEDGER).write_text(line.model_dump_json() + "\n")
    (record / ASKS).write_text(json.dumps({"round": 1, "asks": [{"answered": [0]}]}) + "\n")
    check_released(record, 2)
    (record / "released" / "1.0.all").unlink()
    with pytest.raises(FedtideError, match=r"1\.0\.all: missing"):
        check_released(record, 2)


def test_who_was_asked_to_open_a_sum_is_known_after_a_restart(tmp_path):
    safe = Safe(tmp_path / "private" / "released")
    assert safe.offered() == []
    safe.offer(0, [0, 2])
    safe.offer(3, [1])
    with open(safe.folder / "offered", "a") as file:
        file.write("[4, [0")
    assert Safe(safe.folder).offered() == [(0, [0, 2]), (3, [1])]
    safe.settle(9, [])
    assert len(safe.offered()) == 2
    ledger = Ledger(Plan(9, 2, 2), 1.0, 1e-5)
    assert [ledger.offer(*each) for each in [*safe.offered(), (0, [2])]] == [True, True, False]
    for number, there in ((0, [True] * 3), (1, [False, True, False]), (2, [True] * 3), (4, [True, False, True])):
        assert eligible(ledger, torch.arange(3), number).tolist() == there
    ledger.offer(5, [0])
    assert eligible(ledger, torch.arange(3), 8).tolist() == [False, True, True]


def test_normal_numbers():
    made = normal(bytes(32), 200_000).numpy()
    shares, expected = np.arange(len(made) + 1) / len(made), ndtr(np.sort(made))
    apart = max((shares[1:] - expected).max(), (expected - shares[:-1]).max())  # of Kolmogorov and Smirnov
    assert kolmogorov(apart * len(made) ** 0.5) > 0.01
    assert abs(float(np.corrcoef(made[:-1], made[1:])[0, 1])) < 0.01
    assert np.array_equal(normal(bytes(32), 70_000).numpy(), made[:70_000])
    assert not np.isclose(normal(bytes(31) + b"\1", 1000).numpy(), made[:1000]).any()


def test_draws_are_fresh_and_those_of_bands_the_same_again(tmp_path):
    fresh = SystemNoise()
    assert not torch.equal(fresh("train", 0, 5), fresh("train", 0, 5))
    path = tmp_path / "private" / "seeds"
    noise = SystemNoise(path)
    made = {number: noise("train", number, 5) for number in range(3)}
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes() + b'["train", 3, "ab')  # what a kill left
    again = SystemNoise(path)
    assert all(torch.equal(again("train", number, 5), made[number]) for number in made)
    assert len({noise(stream, 0, 1).item() for stream in ("train", "other", "train/1")}) == 3
    again.forget(lambda stream, number: number > 1)
    assert torch.equal(again("train", 1, 5), made[1])
    anew = again("train", 2, 5)
    assert not torch.equal(anew, made[2])
    assert torch.equal(SystemNoise(path)("train", 2, 5), anew), "of two seeds of a draw the later one counts"
    path.write_text("nothing\n")
    with pytest.raises(FedtideError, match=r"seeds: line 1 is damaged"):
        SystemNoise(path)


def test_no_seed_and_no_sum_lies_in_the_run_folder(tmp_path):
    experiment = experiment_of("fedavg")
    served(experiment, tmp_path, SystemNoise(tmp_path / "private" / "seeds"))
    seeds = [json.loads(line)[2] for line in (tmp_path / "private" / "seeds").read_text().splitlines()]
    assert len(set(seeds)) == 3
    for path in (tmp_path / "run").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(seed.encode() in content or bytes.fromhex(seed) in content for seed in seeds)
    rounds = [line.clients for line in read(run_of(experiment, tmp_path).folder / LEDGER)]
    assert not any(set(a) & set(b) for a, b in itertools.pairwise(rounds)), "two rounds apart"
