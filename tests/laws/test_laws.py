"""The laws. `test_<law>__<what>`; a registry line may declare an exemption from `<law>`, with its reason.

conftest.py says over which algorithms each runs.
"""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fedtide.core import codec, sums
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, detached, leaves, same, size_in_bytes
from fedtide.core.types import Answer, Moment
from fedtide.data.ragged import Ragged
from fedtide.fleets import stacked
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.workers import WorkersEngine
from fedtide.runs.build import host_of, spec_of
from fedtide.runs.runner import Run
from helpers.toys import played, reference, toy


class Watched:
    """A fleet that shows only what the protocol names, and keeps what was asked and answered."""

    def __init__(self, fleet, change=lambda clients, slot: (clients, slot)):
        self._fleet, self._change, self.asks, self.told = fleet, change, [], set()

    moment = property(lambda self: self._fleet.moment)
    clients = property(lambda self: self._fleet.clients)
    reachable = property(lambda self: self._fleet.reachable)

    @property
    def truth(self):
        self.told.add("truth")
        return self._fleet.truth

    def begin(self, moment):
        self._fleet.begin(moment)

    def elapsed(self):
        return self._fleet.elapsed()

    def arrivals(self, m):
        return self._fleet.arrivals(m)

    def spend(self, seconds):
        self._fleet.spend(seconds)

    def score(self, *given, **named):
        return self._fleet.score(*given, **named)

    def ask(self, question, clients, payload, *, slot=None, **named):
        before = clients
        clients, slot = self._change(clients, slot)
        if named.get("began") is not None:  # goes with the clients
            named["began"] = named["began"][[before.tolist().index(client) for client in clients.tolist()]]
        reply = self._fleet.ask(question, clients, payload, slot=slot, **named)
        self.asks.append((question, clients, payload, slot, named, reply))
        return reply


class InAnyOrder(LocalEngine):
    """Runs the blocks in reverse and yields the results in their order, as a pool of processes may."""

    def ask(self, jobs, payload):
        done = {i: self.host.ask(jobs[i], payload) for i in reversed(range(len(jobs)))}
        yield from (done[i] for i in range(len(jobs)))


class ByWire(LocalEngine):
    """Everything goes through bytes."""

    def ask(self, jobs, payload):
        for job in jobs:
            arrived = codec.from_bytes(codec.to_bytes({"job": job, "payload": payload}))
            yield codec.from_bytes(codec.to_bytes(self.host.ask(arrived["job"], arrived["payload"])))


def totals(fleet: Watched) -> list[Any]:
    return [reply.total for *_, reply in fleet.asks]


# -- 1. parity ---------------------------------------------------------------------------------------------------------


def test_parity__workers_give_the_same_totals_and_state_as_one_process(lawful, pool, tmp_path):
    experiment = toy(lawful)
    here, there = [], []
    alone = played(experiment, fleet=lambda f: here.append(Watched(f)) or here[0], rounds=3)
    spec = spec_of(experiment, experiment.method[0], 0, tmp_path)
    many = played(
        experiment, rounds=3, memory=MemoryStore(tmp_path, small=0), engine=lambda host: WorkersEngine(pool, spec),
        fleet=lambda f: there.append(Watched(f)) or there[0],
    )  # fmt: skip
    assert same(totals(here[0]), totals(there[0]))
    assert same(alone.state, many.state)
    clients = alone.host.population.clients
    payload, slot = alone.host.algorithm.serve(alone.state, clients)
    assert same(alone.fleet.score(payload, clients, slot=slot), many.fleet.score(payload, clients, slot=slot))


@pytest.mark.engine
def test_parity__actors_of_ray_give_the_same_totals_and_state_as_one_process(lawful, actors, tmp_path):
    """As on a cluster of several nodes: rows of memory travel."""
    experiment = toy(lawful)
    here, there = [], []
    alone = played(experiment, fleet=lambda f: here.append(Watched(f)) or here[0], rounds=2)
    spec, memory = spec_of(experiment, experiment.method[0], 0, None), MemoryStore(tmp_path, small=0)
    many = played(
        experiment, rounds=2, memory=memory, engine=lambda host: WorkersEngine(actors, spec, memory),
        fleet=lambda f: there.append(Watched(f)) or there[0],
    )  # fmt: skip
    assert same(totals(here[0]), totals(there[0]))
    assert same(alone.state, many.state)
    for client in alone.fleet.clients.tolist():
        assert same(*(run.fleet.memory.read(client, (9, 0)) for run in (alone, many)))


def test_parity__the_order_in_which_blocks_finish_changes_nothing(lawful):
    assert same(reference(lawful).state, played(toy(lawful), engine=InAnyOrder).state)


def test_parity__clients_trained_together_give_the_same_to_a_tolerance(lawful):
    experiment = toy(lawful, precision="fp64")
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    try:
        stacked.check(host)
    except FedtideError as error:
        pytest.skip(str(error))
    here, there = [], []
    alone = played(experiment, host=host, fleet=lambda f: here.append(Watched(f)) or here[0], rounds=3)
    many = played(
        experiment, host=host, fleet=lambda f: there.append(Watched(f)) or there[0], rounds=3,
        engine=stacked.StackedEngine,
    )  # fmt: skip
    ours, theirs = (leaves([totals(fleet), run.state]) for fleet, run in ((here[0], alone), (there[0], many)))
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor | float):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        else:
            assert a == b


# -- 2. resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_resume__stopping_and_going_on_changes_nothing(lawful, tmp_path):
    experiment = toy(lawful)
    whole, halves = (
        Run(experiment, experiment.method[0], 0, tmp_path / part / "m" / "0") for part in ("whole", "halves")
    )
    assert [p.round for p in whole.play()] == [1, 2, 3, 4, 5, 6]
    rounds = iter(range(1, 7))
    assert [p.round for p in halves.play(stop=lambda: next(rounds) == 3)] == [1, 2, 3]
    assert [p.round for p in halves.play()] == [4, 5, 6]
    for name in ("rounds.jsonl", "clients.csv"):
        assert (whole.folder / name).read_bytes() == (halves.folder / name).read_bytes()
    for name in ("state", "memory"):
        path = f"checkpoints/00000006/{name}.safetensors"
        assert same(codec.from_file(whole.folder / path), codec.from_file(halves.folder / path))


def test_resume__a_round_begun_twice_gives_the_same_bits(lawful, tmp_path):
    """A server that dies in mid-round and starts the round again, with memory written in between."""
    experiment = toy(lawful)
    memory = MemoryStore(tmp_path, small=0)
    run = played(experiment, rounds=3, memory=memory)
    memory.settle((3, 0))  # a checkpoint before round 3
    results = []
    for _ in range(2):
        run.fleet.begin(Moment(3, experiment.rounds, 3.0))
        results.append(run.host.algorithm.round(run.state, run.fleet, Rng(0).at(3, "server"))[0])
    assert same(*results)
    assert same(results[0], reference(lawful).steps[3].state)


# -- 3. determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_determinism__the_same_seed_gives_the_same_result_and_another_seed_another(lawful):
    experiment = toy(lawful)
    assert same(reference(lawful).state, played(experiment).state)
    assert not same(reference(lawful).state, played(experiment, seed=1).state)


def test_determinism__the_order_of_the_cohort_changes_nothing(lawful):
    def shuffled(clients, slot):
        order = torch.from_numpy(np.random.default_rng(len(clients)).permutation(len(clients)))
        return clients[order], None if slot is None else slot[order]

    experiment = toy(lawful)
    assert same(reference(lawful).state, played(experiment, fleet=lambda f: Watched(f, shuffled)).state)


def test_determinism__global_randomness_is_neither_used_nor_disturbed(lawful):
    experiment = toy(lawful)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = played(experiment, rounds=2).state
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()
    torch.manual_seed(2), np.random.seed(2), random.seed(2)  # noqa: NPY002
    assert same(first, played(experiment, rounds=2).state)


# -- 5. sums only ------------------------------------------------------------------------------------------------------


def test_sums__what_is_revealed_is_declared(lawful):
    watched = []
    run = played(toy(lawful), fleet=lambda f: watched.append(Watched(f)) or watched[0])
    asked = {name for *_, named, _ in watched[0].asks for name in named.get("reveal", ())}
    assert asked | watched[0].told == set(run.host.algorithm.reveals)


def test_sums__an_algorithm_that_reveals_nothing_runs_on_a_fleet_that_refuses(lawful):
    experiment = toy(lawful)
    if reference(lawful).host.algorithm.reveals:
        with pytest.raises(Exception, match="sums only"):
            played(experiment, sums_only=True)
        return
    assert same(played(experiment, sums_only=True).state, reference(lawful).state)


def test_memory__no_client_keeps_more_of_the_model_than_the_algorithm_says(lawful):
    run = played(toy(lawful, model={"kind": "mlp", "hidden": [300]}), rounds=3)
    algorithm = run.host.algorithm
    model = size_in_bytes(algorithm.serve(run.state, torch.tensor([0]))[0])
    for client in run.fleet.clients.tolist():
        assert size_in_bytes(run.fleet.memory.read(client, (99, 0))) <= algorithm.keeps * model + 2048


def test_sums__two_halves_of_the_cohort_add_up_to_the_whole(lawful):
    watched = []
    run = played(toy(lawful), rounds=1, fleet=lambda f: watched.append(Watched(f)) or watched[0])
    question, clients, payload, slot, named, _ = watched[0].asks[-1]
    named = {key: value for key, value in named.items() if key not in ("first", "began")}
    parts = []
    for half in (slice(0, 2), slice(2, None), slice(None)):
        run.fleet.begin(Moment(0, 6, 0.0))
        run.fleet.memory.clear()
        run.fleet.queries = []
        for before in watched[0].asks[:-1]:
            if before[0] == question:
                pytest.skip("the question is asked twice: its keys differ")
        parts.append(
            run.fleet.ask(question, clients[half], payload, slot=None if slot is None else slot[half], **named).total
        )
    *halves, whole = parts
    for ours, theirs in zip(leaves(whole), leaves(sums.merge(*halves)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


# -- 6. cover ----------------------------------------------------------------------------------------------------------


def test_cover__every_client_belongs_to_exactly_one_slot(lawful):
    run = reference(lawful)
    clients = torch.cat([run.host.population.clients, run.host.population.held_out_clients])
    for step in run.steps:
        payload, slot = run.host.algorithm.serve(step.state, clients)
        if slot is not None:
            assert slot.shape == clients.shape
            assert bool(((slot >= 0) & (slot < len(payload))).all())
    scores = run.fleet.score(payload, clients, slot=slot)
    if scores.choice is not None:
        assert torch.equal(scores.choice.sum(1), scores.rows)
    # Clusters that a state names: who is in which, or which is whose.
    belongs = getattr(run.state, "belongs", None)
    assert belongs is None or torch.equal(belongs.sum(0), torch.ones(belongs.shape[1], dtype=torch.int64))


# -- 7. alignment ------------------------------------------------------------------------------------------------------


def test_alignment__the_order_of_a_clients_stored_rows_changes_nothing(lawful):
    experiment = toy(lawful)
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    draw = np.random.default_rng(0)
    parts = {
        name: Ragged.of([draw.permutation(part[i].numpy()) for i in range(len(part))])
        for name, part in host.population.parts.items()
    }
    shuffled = replace(host, population=replace(host.population, parts=parts))
    assert same(reference(lawful).state, played(experiment, host=shuffled).state)


# -- 8. drop-outs ------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_dropouts__any_subset_may_be_absent_all_of_it_included(lawful):
    experiment = toy(lawful, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always", "dropout_rate": 0.5}})
    for seed in range(2):
        for step in played(experiment, seed=seed).steps:
            assert all_finite(step.state)
    gone = toy(lawful, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always", "dropout_rate": 0.999999}})
    run = played(gone)
    assert all_finite(run.state)
    assert all(len(query.answered) == 0 for query in run.fleet.queries)
    assert same(run.steps[0].received.weights, run.state.weights)
    assert same(run.steps[0].state, run.state)  # who is waited for is noted at once, and nothing else


# -- 9. purity ---------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_purity__a_work_changes_none_of_its_inputs(lawful):
    experiment = toy(lawful)
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))

    def guarded(work):
        def run(payload, memory, shard, moment, rng):
            before = detached((payload, memory, shard.x, shard.y, shard.ids))
            answer = work(payload, memory, shard, moment, rng)
            assert same(before, (payload, memory, shard.x, shard.y, shard.ids))
            return answer

        return run

    works = {question: guarded(work) for question, work in host.algorithm.works.items()}
    adapt = None if host.algorithm.adapt is None else guarded(host.algorithm.adapt)
    pure = replace(host, algorithm=replace(host.algorithm, works=works, adapt=adapt))
    run = played(experiment, host=pure, fleet=Watched)
    clients = pure.population.clients
    payload, slot = pure.algorithm.serve(run.state, clients)
    run.fleet.score(payload, clients, slot=slot)


def test_purity__a_round_leaves_the_state_it_received(lawful):
    run = played(toy(lawful), rounds=1)
    before = detached(run.state)
    run.fleet.begin(Moment(1, 6, 1.0))
    run.host.algorithm.round(run.state, run.fleet, Rng(0).at(1, "server"))
    assert same(before, run.state)


# -- 10. degenerate data -----------------------------------------------------------------------------------------------


ODD = ("no sample", "one sample", "one class", "constant features", "infinite loss")


@pytest.mark.every
def test_degenerate__state_rows_and_memory_stay_finite_and_the_client_is_counted(lawful, cases):
    experiment = toy(lawful, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    for case in ODD[:cases]:
        _finite(experiment, host, case)


def _finite(experiment, host, case):
    population, first = host.population, host.population.parts["train"][0]
    lists = [population.parts["train"][i] for i in range(len(population.group))]
    rows = population.rows
    x, y = rows.x.clone(), rows.y.clone()
    if case == "one class":
        y[first] = 0
    elif case == "one sample":
        lists[0] = first[:1]
    elif case == "no sample":
        lists[0] = first[:0]
    elif case == "constant features":
        x[first] = 1.0
    else:
        x[first] = 3e38
    parts = {**population.parts, "train": Ragged.of([part.numpy() for part in lists])}
    memory = MemoryStore(None)
    odd = replace(host, population=replace(population, rows=replace(rows, x=x, y=y), parts=parts), memory=memory)
    watched = []
    run = played(
        experiment, host=odd, memory=memory, fleet=lambda f: watched.append(Watched(f)) or watched[0], rounds=4
    )
    assert all_finite([step.state for step in run.steps])
    for *_, reply in watched[0].asks:
        assert all_finite(dict(reply.rows))
        assert all_finite(reply.total)
    # Where there are several models, the client may well have found one that has a loss.
    weights = run.state.weights
    several = isinstance(weights, tuple) or all(".copies." in name for name in weights.params)
    if case == "infinite loss" and not several:
        assert any(0 in reply.refused.tolist() for *_, reply in watched[0].asks)
    clients = odd.population.clients
    payload, slot = odd.algorithm.serve(run.state, clients)
    scores = run.fleet.score(payload, clients, slot=slot)
    assert bool((scores.rows > 0).all())


def test_degenerate__a_client_without_rows_is_as_if_it_had_not_been_asked(lawful):
    def others(clients, slot):
        return clients[clients != 3], None if slot is None else slot[clients != 3]

    experiment = toy(lawful, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    train = host.population.parts["train"]
    lists = Ragged.of([[] if i == 3 else train[i].numpy() for i in range(len(train))])
    emptied = replace(host, population=replace(host.population, parts={**host.population.parts, "train": lists}))
    watched: list[Watched] = []
    asked, left_out = (
        played(experiment, host=emptied, fleet=lambda f, c=change: watched.append(Watched(f, *c)) or watched[-1])
        for change in ((), (others,))
    )
    if any("began" in named for *_, named, _ in watched[0].asks):
        pytest.skip("who is at work, and has not been asked after yet, is part of its state")
    assert any(3 in query.ask.clients for query in asked.fleet.queries)
    assert not any(3 in query.ask.clients for query in left_out.fleet.queries)
    assert same(asked.state, left_out.state)


# -- 11. memory --------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_memory__resident_memory_is_flat_over_rounds(lawful):
    experiment = toy(lawful, rounds=60, model={"kind": "mlp", "hidden": [64]})
    process = psutil.Process()
    played(experiment, rounds=20)
    gc.collect()
    before = process.memory_info().rss
    played(experiment, rounds=60)
    gc.collect()
    assert process.memory_info().rss - before < 6 * 2**20


@pytest.mark.engine
def test_memory__answers_do_not_pile_up(lawful, monkeypatch):
    experiment = toy(lawful, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
    alive: weakref.WeakSet[Answer] = weakref.WeakSet()
    most = 0

    def counted(work):
        def run(*given):
            nonlocal most
            answer = work(*given)
            if answer is not None:
                alive.add(answer)
            most = max(most, len(alive))
            return answer

        return run

    works = {question: counted(work) for question, work in host.algorithm.works.items()}
    monkeypatch.setattr(Answer, "__hash__", object.__hash__)
    played(experiment, host=replace(host, algorithm=replace(host.algorithm, works=works)), rounds=2)
    assert most <= 2


@pytest.mark.engine
def test_memory__clients_are_judged_alike_wherever_their_memory_lies(lawful, tmp_path):
    """In files it is read when a prediction looks at it."""
    kept, filed = reference(lawful), played(toy(lawful), memory=MemoryStore(tmp_path, small=0))
    clients = torch.cat([kept.host.population.clients, kept.host.population.held_out_clients])
    payload, slot = kept.host.algorithm.serve(kept.state, clients)
    in_memory, in_files = (run.fleet.score(payload, clients, slot=slot) for run in (kept, filed))
    assert same(in_memory, in_files)


# -- 12. wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_wire__payloads_answers_and_memory_survive_as_bytes(lawful, tmp_path):
    experiment = toy(lawful)
    by_wire = played(experiment, engine=ByWire, memory=MemoryStore(tmp_path, small=0))
    assert same(by_wire.state, reference(lawful).state)
    assert same(codec.from_bytes(codec.to_bytes(by_wire.state)), by_wire.state)


# -- 13. pooled prediction ---------------------------------------------------------------------------------------------


def test_pooled__predicting_many_clients_at_once_equals_client_by_client(lawful):
    run = reference(lawful)
    population, algorithm = run.host.population, run.host.algorithm
    clients = torch.cat([population.clients, population.held_out_clients])
    payload, slot = algorithm.serve(run.state, clients)
    pooled = run.fleet.score(payload, clients, slot=slot)
    for i in range(len(clients)):
        alone = run.fleet.score(payload, clients[i : i + 1], slot=None if slot is None else slot[i : i + 1])
        torch.testing.assert_close(alone.correct, pooled.correct[i : i + 1])
        torch.testing.assert_close(alone.loss, pooled.loss[i : i + 1], rtol=1e-6, atol=1e-6)


def test_pooled__the_size_of_a_batch_changes_nothing(lawful, monkeypatch):
    run = reference(lawful)
    clients = torch.cat([run.host.population.clients, run.host.population.held_out_clients])
    payload, slot = run.host.algorithm.serve(run.state, clients)
    whole = run.fleet.score(payload, clients, slot=slot)
    monkeypatch.setattr("fedtide.fleets.host.ROWS", 7)
    parts = run.fleet.score(payload, clients, slot=slot)
    assert same((whole.clients, whole.rows, whole.correct, whole.choice),
                (parts.clients, parts.rows, parts.correct, parts.choice))  # fmt: skip
    torch.testing.assert_close(parts.loss, whole.loss, rtol=1e-6, atol=1e-6)
    assert (parts.weights is None) == (whole.weights is None)
    if whole.weights is not None:
        torch.testing.assert_close(parts.weights, whole.weights, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(whole.weights.sum(1), whole.choice.sum(1), rtol=1e-6, atol=1e-6)  # of a row, one


def test_pooled__prediction_needs_no_memory(lawful):
    run = reference(lawful)
    clients = run.host.population.clients
    payload, slot = run.host.algorithm.serve(run.state, clients)
    scores = run.fleet.score(payload, clients, slot=slot, personal=False)
    assert all_finite(scores)
