"""Laws of single algorithms, which `fedtide check` runs on a person's own (`fedtide.laws.every`), and laws of fleets.

conftest.py says over which algorithms each runs.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from fedtide.core.base import Answer
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same, size_in_bytes
from fedtide.fleets.engines import LocalEngine, WorkersEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.laws.case import Case, NotApplicable, judged
from fedtide.runs.build import host_of, spec_of
from helpers.toys import played, toy


@pytest.fixture(scope="session")
def case_of(request: pytest.FixtureRequest) -> Callable[[str], Case]:
    """The toy of a method, whose rounds are played once for all laws that only read them."""
    return lru_cache(maxsize=2)(lambda name: Case(partial(toy, name), partial(request.getfixturevalue, "pool")))


@pytest.fixture
def case(name: str, case_of: Callable[[str], Case]) -> Case:
    return case_of(name)


def test_law(law, case):
    try:
        law.check(case)
    except NotApplicable as why:
        if "have no update" in str(why):
            pytest.fail(f"forgetting cannot be measured: {why}")
        pytest.skip(str(why))


@pytest.mark.engine
def test_actors_of_ray_give_the_same_totals_and_state_as_one_process(name, case, actors, tmp_path, monkeypatch):
    """As on a cluster of several nodes: rows of memory travel."""
    monkeypatch.setattr(actors, "multi_node", True)
    spec = spec_of(case.experiment, case.experiment.method[0], 0, None)
    memory = MemoryStore(tmp_path, small=0)
    alone, here = case.watched(rounds=2)
    many, there = case.watched(rounds=2, memory=memory, engine=lambda host: WorkersEngine(host, actors, spec))
    assert same(here.totals, there.totals)
    assert same(alone.state, many.state)
    for client in alone.fleet.clients.tolist():
        assert same(*(run.fleet.engine.memory.read(client, (9, 0)) for run in (alone, many)))


def held() -> tuple[int, int]:
    """Bytes of all living tensors, and how many objects of this package there are."""
    gc.collect()
    objects = gc.get_objects()
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in objects
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    }
    kinds = Counter(map(type, objects))
    return sum(stored.values()), sum(n for kind, n in kinds.items() if str(kind.__module__).startswith("fedtide"))


@pytest.mark.engine
def test_what_is_held_does_not_grow_over_rounds(name):
    experiment = toy(name, rounds=20, model={"kind": "mlp", "hidden": [64]})
    memory = MemoryStore(None)
    host = host_of(experiment, experiment.method[0], 0, memory)
    fleet = SimulatedFleet(host.population, LocalEngine(host))
    seen = []
    gc.collect()
    gc.freeze()  # what was there before stays, and is not looked at
    for step in play(host.algorithm, fleet, begin(host.algorithm, fleet, seed=0, rounds=20), seed=0, rounds=20):
        if step.moment.round % 10 == 9:
            seen.append(held())
    (before, fewer), (after, more) = seen
    model = size_in_bytes(host.algorithm.serve(step.state, torch.tensor([0]))[0])
    assert after - before < 5 * model
    assert more - fewer < 10


@pytest.mark.engine
def test_answers_do_not_pile_up(name, monkeypatch):
    experiment = toy(name, {"cohort": {"kind": "everyone"}}, shift={"who": {"kind": "always"}})
    host = host_of(experiment, experiment.method[0], 0)
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
def test_clients_are_judged_alike_wherever_their_memory_lies(case, tmp_path):
    """In files it is read when a prediction looks at it."""
    in_files = played(case.experiment, memory=MemoryStore(tmp_path, small=0))
    assert same(judged(case.reference)[-1], judged(in_files)[-1])
