"""CFL by pencil and paper, on the quadratics: a client with target y sends (y - w) / 2, so that w goes half the way."""

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.cfl import cfl
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from helpers.cfl_released import cfl_released
from helpers.handmade import By
from helpers.quadratics import TASK, at, fleet_of, models, played, population

HALF = LocalTrainer(lr=0.5, batch_size=0)
EAGER = {"eps1": 1e9, "eps2": 0.0, "split_after": 0, "gamma": 0.0}


def begun(targets, start=1.0, make=cfl, **options):
    """Algorithm, fleet and first state."""
    algorithm = make(TASK, HALF, **options)
    fleet = fleet_of(algorithm, [[y] for y in targets])
    return algorithm, fleet, replace(algorithm.init(fleet, Rng(0)), weights=(at(start),))


def states(targets, rounds, start=1.0, **options):
    """The state and the facts after each round."""
    return played(*begun(targets, start, **options), rounds)


def clusters(state) -> list[list[int]]:
    return [(state.model == k).nonzero().flatten().tolist() for k in range(len(state.weights))]


def test_it_averages_until_the_mean_update_is_a_tenth_of_the_largest_and_then_splits():
    """w_t = 2 - 2^-t and the mean update 2^-(t+1): 1/2, 1/4, 1/8, 1/16, 1/32 < 1/20. Six times 1/20 is below 31/32.

    Then both halves leave 31/16: to 0 by 31/32, to 4 by 33/32.
    """
    *early, (last, facts) = states([0, 4, 0, 4], 5, split_after=0)
    assert [models(state) for state, _ in early] == [[1.5], [1.75], [1.875], [1.9375]]
    assert models(last) == [0.96875, 2.96875]
    assert clusters(last) == [[0, 2], [1, 3]]
    assert (float(facts["mean_update"]), float(facts["largest_update"])) == (1 / 32, 33 / 32)
    assert facts["members"].tolist() == [2, 2]


def test_there_is_no_split_before_its_time_nor_of_two_clients_nor_where_all_agree_nor_within_gamma():
    assert [len(s.weights) for s, _ in states([0, 4, 0, 4], 4, **{**EAGER, "split_after": 2})] == [1, 1, 2, 2]
    assert [len(s.weights) for s, _ in states([0, 4], 2, **EAGER)] == [1, 1]
    # The mean update falls below a tenth, 1/20, and so does the largest: nobody complains.
    assert [len(s.weights) for s, _ in states([0, 0, 0], 8, split_after=0)] == [1] * 8
    # Everybody pulls to the right: cosines are 1 and the sides no distance apart.
    assert [len(s.weights) for s, _ in states([4, 5, 6], 1, start=0.0, **{**EAGER, "gamma": 0.01})] == [1]
    assert [len(s.weights) for s, _ in states([0, 8, 4, 6], 1, start=1.0, **{**EAGER, "gamma": 0.999})] == [2]


TARGETS = [8, 12, 0, 8, 12, 0]
TWICE = {**EAGER, "eps1": 0.25}
"""A mean update below 1/4 settles a cluster, and any largest update will do."""


def test_splits_follow_each_other_and_every_client_is_in_one_cluster():
    """From w = 20/3 all of it settled: {8, 12} against {0}. The four then go from 20/3 by (2/3 + 8/3) / 2 to 25/3.

    Their mean update halves, 5/6, 5/12, 5/24 < 1/4: in the third round from there, w = 10 - 5/12, {8} leaves {12}.
    """
    found = list(states(TARGETS, 4, start=20 / 3, **TWICE))
    assert [clusters(state) for state, _ in found] == [
        [[0, 1, 3, 4], [2, 5]],
        [[0, 1, 3, 4], [2, 5]],
        [[0, 1, 3, 4], [2, 5]],
        [[0, 3], [2, 5], [1, 4]],
    ]
    w = 10 - 10 / 24
    assert models(found[2][0])[0] == pytest.approx(w)
    assert models(found[3][0]) == pytest.approx([(w + 8) / 2, 20 / 3 / 16, (w + 12) / 2])


def test_as_released_places_are_taken_for_ids():
    """The four are clients 0, 1, 3 and 4; {8} are its places 0 and 2, {12} its places 1 and 3.

    So client 2 is in two clusters and client 4 in none. Client 2 gets the mean of clients 0 and 2 and that of 2 and 5.
    """
    options = {"eps1": 0.25, "eps2": 0.0, "split_after": 0}
    found = list(states(TARGETS, 5, start=20 / 3, make=cfl_released, **options))

    def clusters(state):
        return [members.nonzero().flatten().tolist() for members in state.belongs]

    assert clusters(found[2][0]) == [[0, 1, 3, 4], [2, 5]]
    assert clusters(found[3][0]) == [[0, 2], [2, 5], [1, 3]]
    assert (found[3][1]["in_none"], found[3][1]["in_several"]) == (1, 1)

    def held(state):
        return [models(state)[k] for k in state.model.tolist()]

    w, low = 10 - 10 / 24, 20 / 3 / 8
    zero, two, one = ((8 - w) / 2 - low / 2) / 2, -low / 2, ((12 - w) / 2 + (8 - w) / 2) / 2
    after = [w + zero, w + one, low + zero + two, w + one, w, low + two]
    assert held(found[3][0]) == pytest.approx(after)
    # In the next round client 4 still trains, for nobody; its cluster's mates go on from where they are.
    d = [(y - at) / 2 for y, at in zip(TARGETS, after, strict=True)]
    zero, two, one = (d[0] + d[2]) / 2, (d[2] + d[5]) / 2, (d[1] + d[3]) / 2
    more = [after[0] + zero, after[1] + one, after[2] + zero + two, after[3] + one, w, after[5] + two]
    assert held(found[4][0]) == pytest.approx(more)


def test_a_client_that_slept_through_two_splits_goes_through_both():
    """Clients 6 (target 24) and 7 (target 0) sleep while {0, 4} leaves {20, 24} and both fall apart."""
    targets = [0, 4, 20, 24, 0, 24, 24, 0]
    awake = [0, 1, 2, 3, 4, 5]
    cohorts = [awake] * 12 + [[6, 7]]
    options = {**EAGER, "eps1": 0.2}
    found = list(with_cohorts(cohorts, targets, start=12.0, **options))
    state, fleet, algorithm = found[-2]
    assert [(state.model[k] == state.model[3]).item() for k in range(6)] == [False, False, False, True, False, True]
    new, _, _ = found[-1]
    assert [asked.ask.question for asked in found[-1][1].queries][-1] == "train"
    assert int(new.model[6]) == int(new.model[3])
    assert int(new.model[7]) == int(new.model[0])
    served, slot = algorithm.serve(state, torch.tensor([6, 99]))
    assert slot.tolist() == [len(state.weights)] * 2
    shard = population([[y] for y in targets]).shard(6, fleet.moment)
    assert int(algorithm.adapt(served[-1], None, shard, fleet.moment, Rng(0)).memory["found"]) == int(state.model[3])


def with_cohorts(cohorts, targets, **options):
    algorithm, fleet, state = begun(
        targets, cohort=By(lambda rng, fleet: torch.tensor(cohorts[fleet.moment.round])), **options
    )
    for number in range(len(cohorts)):
        fleet.begin(Moment(number, 9, 0.0))
        state, _ = algorithm.round(state, fleet, Rng(0).at(number, "server"))
        yield state, fleet, algorithm


def test_who_was_not_heard_of_is_placed_by_its_update_at_the_weights_of_the_split():
    """Clients 3 (target 4) and 4 (target 0) sleep through the split at w = 1. Then w is 0.5 and 2.5.

    Client 3 would send (4 - 1) / 2 from w = 1 like client 1: the second side. Client 4 like client 0: it stays.
    """
    played = list(with_cohorts([[0, 1, 2], [3, 4], [3]], [0, 4, 4, 4, 0], **EAGER))
    state, fleet, _ = played[0]
    assert (models(state), clusters(state)) == ([0.5, 2.5], [[0, 3, 4], [1, 2]])
    state, fleet, _ = played[1]
    assert clusters(state) == [[0, 4], [1, 2, 3]]
    assert models(state) == [0.25, 3.25]
    state, fleet, _ = played[2]
    assert [query.ask.question for query in fleet.queries] == ["train"]


def test_old_updates_do_not_count():
    """Of three clients one a round: with two rounds remembered there are never three to split."""
    cohorts = [[0], [1], [2], [0]]
    assert [len(s.weights) for s, *_ in with_cohorts(cohorts, [0, 4, 4], **EAGER, update_ttl=2)] == [1] * 4
    assert [len(s.weights) for s, *_ in with_cohorts(cohorts, [0, 4, 4], **EAGER, update_ttl=3)] == [1, 1, 2, 2]


def test_a_client_that_was_never_asked_finds_its_model_before_it_is_judged():
    (state, fleet, algorithm), *_ = with_cohorts([[0, 1, 2]], [0, 4, 4, 4, 0], **EAGER)
    served, slot = algorithm.serve(state, torch.tensor([0, 1, 3, 4, 9]))
    assert slot.tolist() == [0, 1, 2, 2, 2]
    who = population([[0], [4], [4], [4], [0]])
    for client, model in ((3, 1), (4, 0)):
        shard = who.shard(client, fleet.moment)
        kept = algorithm.adapt(served[2], None, shard, fleet.moment, Rng(0)).memory
        assert int(kept["found"]) == model
    assert served[2].usual == 1  # clients 3 and 4 are in neither yet
