"""Sums in fixed point in a simulated fleet: what is opened, and what becomes of the others."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fedtide.algorithms.scaffold import Sent
from fedtide.core.base import Weighted
from fedtide.laws import every
from fedtide.laws.case import Case, played, toy

WIRE = {"secure": False, "fewest": 2}


def begun(name: str, **changes: object):
    run = played(toy(name, wire=WIRE, **changes), rounds=1)
    run.fleet.begin(replace(run.fleet.moment, round=1))
    return run


def test_a_slot_with_too_few_clients_is_never_opened():
    run = begun("scaffold")
    payload = run.host.algorithm.serve(run.state, run.fleet.clients)[0]
    sent = Sent(payload, payload.params)
    before = {client: run.fleet.memory.read(client, (1, 0)) for client in range(3)}
    reply = run.fleet.ask("train", torch.arange(3), [sent, sent], slot=torch.tensor([0, 1, 0]))
    assert reply.total[1] is None
    assert reply.total[0]["delta"].weight > 0
    assert reply.clients.tolist() == [0, 2]
    assert not len(reply.refused)
    assert not len(reply.silent)
    after = {client: run.fleet.memory.read(client, (2, 0)) for client in range(3)}
    assert after[1] is before[1]
    assert after[0] is not before[0]


def with_a_loss_too_large(run, client: int) -> list[int]:
    """One client answers with a number that does not fit; return whose work is done from now on."""
    train, worked, whose = run.host.algorithm.works["train"], [], {}
    for each in range(4):
        whose[int(run.host.population.shard(each, run.fleet.moment).ids[0])] = each

    def large(payload, memory, shard, moment, rng):
        answer = train(payload, memory, shard, moment, rng)
        worked.append(whose[int(shard.ids[0])])
        fits = worked[-1] != client
        return answer if fits else replace(answer, total={**answer.total, "loss": Weighted(1e9, 1.0)})

    works = {**run.host.algorithm.works, "train": large}
    host = replace(run.host, algorithm=replace(run.host.algorithm, works=works))
    run.fleet.engine = replace(run.fleet.engine, host=host)
    return worked


def test_a_client_whose_number_does_not_fit_is_refused():
    run = begun("fedavg")
    with_a_loss_too_large(run, 1)
    reply = run.fleet.ask("train", torch.arange(4), run.state.weights)
    assert reply.refused.tolist() == [1]
    assert reply.clients.tolist() == [0, 2, 3]


def test_clients_of_too_small_a_sum_are_not_asked_and_what_is_not_opened_is_not_remembered():
    """Client 1 is alone in its slot; of the two in the other, one is refused, and so the other is not opened."""
    run = begun("scaffold")
    payload, memory = run.host.algorithm.serve(run.state, run.fleet.clients)[0], run.fleet.memory
    worked, before = with_a_loss_too_large(run, 2), memory.read(0, (1, 0))
    sent = Sent(payload, payload.params)
    reply = run.fleet.ask("train", torch.arange(3), [sent, sent], slot=torch.tensor([0, 1, 0]))
    assert (sorted(worked), reply.clients.tolist(), reply.refused.tolist()) == ([0, 2], [], [2])
    assert memory.read(0, (2, 0)) is before
    assert not memory.hand_over()


@pytest.mark.parametrize("law", [every.block_order, every.stops, every.round_again, every.dropouts])
@pytest.mark.parametrize("name", ["scaffold", "ifca", pytest.param("fedem", marks=pytest.mark.thorough)])
def test_laws_of_fleets_hold_in_fixed_point(name, law):
    law(Case(partial(toy, name, wire=WIRE), lambda: pytest.fail("no processes")))
