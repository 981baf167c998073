"""The laws. `test_<law>__<what>`; a registry line may declare an exemption from `<law>`, with its reason.

conftest.py says over which algorithms each runs. Laws of single algorithms are those of `fedtide.laws.every`, which
`fedtide check` runs on a person's own; laws of fleets stand here.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import lru_cache, partial

import psutil
import pytest
import torch

from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.core.types import Answer
from fedtide.fleets.workers import WorkersEngine
from fedtide.laws import every
from fedtide.laws.case import Case, NotApplicable
from fedtide.runs.build import host_of, spec_of
from helpers.toys import played, reference, toy


@lru_cache(maxsize=2)
def case_of(name: str) -> Case:
    """The toy of a method, whose rounds are played once for all laws that only read them."""
    return Case(partial(toy, name))


def holds(law, name: str, pool=None) -> None:
    """Check a law of the package; skips it where it has nothing to say of the algorithm."""
    case = case_of(name) if pool is None else Case(partial(toy, name), lambda: pool)
    try:
        law(case)
    except NotApplicable as why:
        pytest.skip(str(why))


def test_state__it_is_a_frozen_dataclass_that_other_processes_find(lawful):
    holds(every.plays, lawful)
    holds(every.frozen_state, lawful)


# -- 1. parity ---------------------------------------------------------------------------------------------------------


def test_parity__workers_give_the_same_totals_and_state_as_one_process(lawful, pool):
    holds(every.workers, lawful, pool)


@pytest.mark.engine
def test_parity__actors_of_ray_give_the_same_totals_and_state_as_one_process(lawful, actors, tmp_path):
    """As on a cluster of several nodes: rows of memory travel."""
    case = case_of(lawful)
    spec = spec_of(case.experiment, case.experiment.method[0], 0, None)
    memory = MemoryStore(tmp_path, small=0)
    alone, here = case.watched(rounds=2)
    many, there = case.watched(rounds=2, memory=memory, engine=lambda host: WorkersEngine(actors, spec, memory))
    assert same(here.totals, there.totals)
    assert same(alone.state, many.state)
    for client in alone.fleet.clients.tolist():
        assert same(*(run.fleet.memory.read(client, (9, 0)) for run in (alone, many)))


def test_parity__the_order_in_which_blocks_finish_changes_nothing(lawful):
    holds(every.block_order, lawful)


def test_parity__clients_trained_together_give_the_same_to_a_tolerance(lawful):
    holds(every.stacks, lawful)


# -- 2. resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_resume__stopping_and_going_on_changes_nothing(lawful):
    holds(every.stops, lawful)


def test_resume__a_round_begun_twice_gives_the_same_bits(lawful):
    holds(every.round_again, lawful)


# -- 3. determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_determinism__the_same_seed_gives_the_same_result_and_another_seed_another(lawful):
    holds(every.same_seed, lawful)


def test_determinism__the_order_of_the_cohort_changes_nothing(lawful):
    holds(every.cohort_order, lawful)


def test_determinism__global_randomness_is_neither_used_nor_disturbed(lawful):
    holds(every.global_randomness, lawful)


# -- 5. sums only ------------------------------------------------------------------------------------------------------


def test_sums__what_is_revealed_is_declared(lawful):
    holds(every.declared_reveals, lawful)


def test_sums__an_algorithm_that_reveals_nothing_runs_on_a_fleet_that_refuses(lawful):
    holds(every.sums_only, lawful)


def test_memory__no_client_keeps_more_of_the_model_than_the_algorithm_says(lawful):
    holds(every.kept_memory, lawful)


def test_sums__two_halves_of_the_cohort_add_up_to_the_whole(lawful):
    holds(every.halves_add_up, lawful)


# -- 6. cover ----------------------------------------------------------------------------------------------------------


def test_cover__every_client_belongs_to_exactly_one_slot(lawful):
    holds(every.one_slot_each, lawful)


# -- 7. alignment ------------------------------------------------------------------------------------------------------


def test_alignment__the_order_of_a_clients_stored_rows_changes_nothing(lawful):
    holds(every.row_order, lawful)


# -- 8. drop-outs ------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_dropouts__any_subset_may_be_absent_all_of_it_included(lawful):
    holds(every.dropouts, lawful)


# -- 9. purity ---------------------------------------------------------------------------------------------------------


@pytest.mark.every
def test_purity__a_work_changes_none_of_its_inputs(lawful):
    holds(every.pure_works, lawful)


def test_purity__a_round_leaves_the_state_it_received(lawful):
    holds(every.pure_round, lawful)


# -- 10. degenerate data -----------------------------------------------------------------------------------------------


@pytest.mark.every
def test_degenerate__state_rows_and_memory_stay_finite_and_the_client_is_counted(lawful, cases):
    every.degenerate(case_of(lawful), every.ODD[:cases])


def test_degenerate__a_client_without_rows_is_as_if_it_had_not_been_asked(lawful):
    holds(every.no_rows, lawful)


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
def test_wire__payloads_answers_and_memory_survive_as_bytes(lawful):
    holds(every.wire, lawful)


# -- 13. pooled prediction ---------------------------------------------------------------------------------------------


def test_pooled__predicting_many_clients_at_once_equals_client_by_client(lawful):
    holds(every.pooled, lawful)


def test_pooled__the_size_of_a_batch_changes_nothing(lawful):
    holds(every.batch_size, lawful)


def test_pooled__prediction_needs_no_memory(lawful):
    holds(every.no_memory, lawful)
