"""Measuring forgetting: a question put again gives the same bits, and nothing else notices.

No algorithm knows of it, so this is a law of fleets and not of algorithms.
"""

import json

import numpy as np
import pytest
import torch

from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import detached, same
from fedtide.evaluate.probe import Probe
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.totals import Block, join, split_blocks
from fedtide.runs.build import host_of
from fedtide.runs.runner import Run
from helpers.toys import Played, toy

pytestmark = pytest.mark.engine

PROBED = {"rounds": [0, 2, 5], "eval_clients": 6}


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "forgetting.jsonl").read_text().splitlines()]


def run_of(name, folder, pool=None, **changes) -> Run:
    experiment = toy(name, **changes)
    return Run(experiment, experiment.method[0], 0, folder / "m" / "0", pool)


def others(run: Run) -> dict[str, bytes]:
    """All that a run leaves but for wall clock, its forgetting and the digest of its configuration."""
    apart = ("timings.jsonl", "forgetting.jsonl", "checkpoint.json")
    files = sorted(path for path in run.folder.parents[1].rglob("*") if path.is_file() and path.name not in apart)
    return {str(path.relative_to(run.folder.parents[1])): path.read_bytes() for path in files}


def test_the_rest_of_the_record_is_that_of_a_run_without_and_stopping_changes_nothing(name, tmp_path):
    plain = run_of(name, tmp_path / "plain")
    whole, halves = (run_of(name, tmp_path / part, forgetting=PROBED) for part in ("whole", "halves"))
    for run in (plain, whole):
        list(run.play())
    rounds = iter(range(1, 7))
    assert [p.round for p in halves.play(stop=lambda: next(rounds) == 3)] == [1, 2, 3]
    assert [line["round"] for line in lines_of(halves.folder)] == [0, 2]
    list(halves.play())
    assert others(whole) == others(plain) == others(halves)
    assert (whole.folder / "forgetting.jsonl").read_bytes() == (halves.folder / "forgetting.jsonl").read_bytes()
    assert not (plain.folder / "forgetting.jsonl").exists()
    lines = lines_of(whole.folder)
    assert [line["round"] for line in lines] == [0, 2, 5]
    measured = [line for line in lines if "skipped" not in line]
    assert measured
    assert name.startswith(("fielding", "feddrift", "fedbuff")) or len(measured) == 3
    for line in lines:
        if "skipped" in line:  # who clusters anew in the round mixes models before they are sent
            assert "made anew" in line["skipped"]
            continue
        assert 1 <= len(line["models"]) <= 4
        assert len(line["owners"]) == len(line["rows"]) == 6
        assert np.shape(line["accuracy"]["local"]) == np.shape(line["loss"]["local"]) == (len(line["models"]), 6)
        assert all(0 <= a <= 1 for row in line["accuracy"]["local"] for a in row)
    assert any(np.any(line["loss"]["local"] != np.array(line["loss"]["received"])) for line in measured)


def test_workers_write_the_same_bytes(name, tmp_path, pool):
    probed = PROBED | {"rounds": [0, 2]}
    alone, many = (
        run_of(name, tmp_path / ("many" if p else "alone"), p, forgetting=probed, rounds=3) for p in (None, pool)
    )
    for run in (alone, many):
        list(run.play())
    assert (alone.folder / "forgetting.jsonl").read_bytes() == (many.folder / "forgetting.jsonl").read_bytes()
    assert others(alone) == others(many)


# -- one round, looked at closely --------------------------------------------------------------------------------------


def kept(name, folder, *, rounds: int, options=None) -> tuple[Played, list]:
    """Some rounds whose questions may all be put again, with the memory of clients in files; the last one's replies."""
    experiment = toy(name, options)
    memory = MemoryStore(folder, small=0)
    host = host_of(experiment, experiment.method[0], 0, memory)
    fleet = SimulatedFleet(
        host.population, LocalEngine(host), reveals=host.algorithm.traits.reveals, replayable=range(experiment.rounds)
    )
    replies, asked = [], fleet.ask

    def ask(question, clients, payload, **named):
        reply = asked(question, clients, payload, **named)
        replies.append((question, clients.sort().values, reply))
        return reply

    fleet.ask = ask  # type: ignore[method-assign]
    steps, start = [], begin(host.algorithm, fleet, seed=0, rounds=experiment.rounds)
    replies.clear()
    for step in play(host.algorithm, fleet, start, seed=0, rounds=experiment.rounds):
        steps.append(step)
        if len(steps) == rounds:
            return Played(host, fleet, steps, fleet), replies
        replies.clear()
    raise AssertionError


@pytest.mark.parametrize("rounds", [1, 4])
def test_what_is_repeated_is_what_was_summed(name, tmp_path, rounds):
    """The answers of a round, had again one by one and added up as the fleet does, are its total bit for bit."""
    run, replies = kept(name, tmp_path, rounds=rounds)
    (number, clients, reply), *more = [(n, c, r) for n, (q, c, r) in enumerate(replies) if q == "train"]
    assert not more
    query = run.fleet.queries[number]
    blocks = []
    for places in split_blocks(torch.isin(clients, reply.clients)):
        ask = query.ask.of(places)
        block = Block(ask)
        for client, received in ask.sent(query.payload):
            block.count(client, run.host.clients.answer(ask, client, received))
        blocks.append(block.result())
    assert same(join(blocks, len(blocks)).total, reply.total)


def test_asking_again_changes_nothing(name, tmp_path):
    run, _ = kept(name, tmp_path, rounds=3)
    step, fleet = run.steps[-1], run.fleet
    before = detached([step.received, step.state, [query.payload for query in fleet.queries]])
    memory = {client: fleet.engine.memory.read(client, (99, 0)) for client in range(8)}
    files, queries, randomness = sorted(tmp_path.iterdir()), list(fleet.queries), torch.get_rng_state()
    first = Probe(fleet).line(step)
    assert same(before, [step.received, step.state, [query.payload for query in fleet.queries]])
    assert same(memory, {client: fleet.engine.memory.read(client, (99, 0)) for client in range(8)})
    assert (sorted(tmp_path.iterdir()), fleet.queries) == (files, queries)
    assert torch.equal(randomness, torch.get_rng_state())
    assert same(first, Probe(fleet).line(step))


def test_without_a_step_nothing_is_forgotten(name, tmp_path):
    """A rate that is lost in rounding: the local models are the received one, and F is zero, not nearly zero."""
    run, _ = kept(name, tmp_path, rounds=2, options={"local": {"lr": 1e-44, "batch_size": 4, "epochs": 2}})
    line = Probe(run.fleet).line(run.steps[-1])
    for kind in ("forgetting", "loss_increase"):
        assert line[kind]["mean"] == line[kind]["own"] == 0.0
    for kind in ("accuracy", "loss"):
        assert all(row == line[kind]["received"] for row in line[kind]["local"])


@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "fedprox", "scaffold", "helpers.sketches:fielding"])
def test_every_client_gets_the_model_that_its_own_update_makes(name, tmp_path):
    """One client alone in the round: with plain averaging its model is the next state of the server."""
    run, _ = kept(name, tmp_path, rounds=2, options={"cohort": 1})
    step, algorithm = run.steps[-1], run.host.algorithm
    line = Probe(run.fleet, owners=torch.arange(8)).line(step)
    payload, slot = algorithm.serve(step.state, torch.arange(8))
    scores = run.fleet.score(payload, torch.arange(8), slot=slot, part="val", personal=False)
    assert len(line["models"]) == 1
    assert line["accuracy"]["local"][0] == (scores.correct / scores.rows).tolist()
    assert line["loss"]["local"][0] == pytest.approx((scores.loss / scores.rows).tolist(), abs=1e-6)
