"""Auxo by pencil and paper, on the quadratics: a client with target y sends (y - w) / 2, which is all of its sketch."""

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.auxo import AtRounds, ByEvidence, State, add_evidence, auxo, rewards, sides_of, split_cluster
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from helpers.handmade import By
from helpers.quadratics import TASK, at, fleet_of, models, played, population

HALF = LocalTrainer(lr=0.5, batch_size=0)
PLAIN = {"epsilon": 0.0, "min_participants": 2}


def states(targets, took, start=1.0, seed=0, **options):
    """The state, the facts and what was asked in each round, of which each has these participants."""
    options = {**PLAIN, "cohort": By(lambda rng, fleet: torch.tensor(took[fleet.moment.round])), **options}
    algorithm = auxo(TASK, HALF, **options)
    fleet = fleet_of(algorithm, [[y] for y in targets])
    state = replace(algorithm.init(fleet, Rng(0)), weights=(at(start),))
    for after, facts in played(algorithm, fleet, state, len(took), seed):
        yield after, facts, fleet.queries[0]


def where(state) -> list[int]:
    return state.reward.argmax(1).tolist()


EVERYONE = [0, 1, 2, 3, 4, 5]


def test_two_groups_that_pull_apart_split_in_the_round_that_is_given():
    """Updates from w = 1 are -1/2 and 3/2, sketches -1 and 1. All learn sides, 1/2 and then 3/2 against -1/2.

    In the first round w = 3/2. In the second it is 7/4, the cluster splits, and who is on a side has R = 2 there.
    Then the clusters go half the way to 0 and to 4. In each all sketches are alike, 0, and the reward is the full 5.
    """
    one, two, three = states([0, 4, 0, 4, 0, 4], [EVERYONE] * 3, split=AtRounds((2,)))
    state, facts, _ = one
    assert (models(state), facts["clusters"]) == ([1.5], 1)
    assert state.sides[:, 0].tolist() == [[1.5, -0.5], [-0.5, 1.5]] * 3
    state, facts, _ = two
    assert (models(state), facts["clusters"]) == ([1.75, 1.75], 2)
    assert state.reward.tolist() == [[2.0, 1.0], [1.0, 2.0]] * 3
    assert state.sides[0].tolist() == [[1.0, 1.0], [0.5, 0.5]]
    assert state.times.tolist() == [[1, 0], [0, 1]] * 3
    state, facts, _ = three
    assert models(state) == [0.875, 2.875]
    assert (where(state), facts["members"].tolist()) == ([0, 1] * 3, [3, 3])
    assert state.reward[:2].tolist() == [[7.0, 1.0], [1.0, 7.0]]
    assert (state.rounds.tolist(), state.divided.tolist()) == ([3, 3], [True, True])


def test_by_evidence_a_cluster_splits_when_both_sides_are_large_enough():
    """Of six clients three are on either side: more than 0.4 of all is 2.4, more than 0.5 is 3."""
    for share, count in ((0.4, 2), (0.5, 1)):
        (state, facts, _), *_ = states([0, 4, 0, 4, 0, 4], [EVERYONE], split=ByEvidence(share))
        assert (len(state.weights), facts["clusters"]) == (count, count)
    (state, *_), *_ = states([0, 4, 0, 4, 0, 4], [EVERYONE], split=ByEvidence(0.0), max_clusters=1)
    assert len(state.weights) == 1


def test_clients_that_are_alike_do_not_split_nor_do_too_few_participants():
    for state, *_ in states([4] * 6, [EVERYONE] * 3, split=ByEvidence(0.0)):
        assert len(state.weights) == 1
    for state, *_ in states([0, 4, 0, 4, 0, 4], [EVERYONE] * 3, split=ByEvidence(0.0), min_participants=7):
        assert (len(state.weights), state.rounds.tolist()) == (1, [0])
    for state, *_ in states([0, 4, 0, 4, 0, 4], [EVERYONE] * 3, split=AtRounds(())):
        assert len(state.weights) == 1


def test_who_does_not_take_part_is_not_moved():
    """Clients 4 and 5 sleep through the split; then only who takes part is rewarded, and only they may move."""
    awake = [0, 1, 2, 3]
    first, *rest = states([0, 4, 0, 4, 0, 4, 4], [awake, awake, [0, 1, 5], [0, 1], [4, 2]], split=AtRounds((1,)))
    state = first[0]
    assert len(state.weights) == 2
    assert state.reward[4:].tolist() == [[1.0, 1.0]] * 3
    for state_after, _, asked in rest:
        took = asked.ask.clients
        others = ~torch.isin(torch.arange(7), took)
        assert state_after.reward[others].equal(state.reward[others])
        assert state_after.sides[others].equal(state.sides[others])
        state = state_after


def test_a_client_that_never_was_in_a_cluster_begins_with_a_random_one_and_explorers_go_anywhere():
    cohorts = [[0, 1, 2, 3]] + [[4, 5]] * 40
    seen = [
        asked.ask.slot.tolist()
        for *_, asked in states([0, 4, 0, 4, 0, 4], cohorts, split=AtRounds((1,)), min_participants=9)
    ]
    assert seen == [[0, 0, 0, 0]] + [[0, 0]] * 40  # nothing is learned, nothing splits
    options = {"split": AtRounds((1,)), "min_participants": 3}
    seen = [asked.ask.slot.tolist() for *_, asked in states([0, 4, 0, 4, 0, 4], cohorts, **options)][1:]
    assert {tuple(each) for each in seen} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for epsilon, decay, slots in ((0.0, 1.0, {(0, 1)}), (1.0, 1.0, 4), (1.0, 0.0, {(0, 1)})):
        options = {"split": AtRounds((1,)), "min_participants": 4, "epsilon": epsilon, "decay": decay}
        cohorts = [[0, 1, 2, 3]] + [[0, 1]] * 40
        *seen, _ = [tuple(asked.ask.slot.tolist()) for *_, asked in states([0, 4, 0, 4], cohorts, **options)][1:]
        assert set(seen) == slots if isinstance(slots, set) else len(set(seen)) == slots


# -- evidence ----------------------------------------------------------------------------------------------------------


def table(sides, reward=None, *, divided=True) -> State:
    """A cluster with this evidence for sides, everybody labeled once."""
    sides = torch.tensor(sides, dtype=torch.float64)[:, None]
    n = len(sides)
    reward = torch.ones(n, 1, dtype=torch.float64) if reward is None else torch.tensor(reward)[:, None].double()
    times = torch.ones(n, 1, dtype=torch.int64)
    return State((at(0.0),), (None,), reward, sides, times, torch.tensor([divided]), torch.tensor([1]))


def test_who_has_no_side_gets_that_of_the_nearest():
    state = table([[1.5, -0.5], [-0.5, 1.5], [0.5, 0.5], [0.5, 0.5]])
    unit = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, 0.6]]).double()
    at_, side = sides_of(state, 0, torch.arange(4), unit, torch.ones(4) > 0, Rng(0))
    assert (at_.tolist(), side.tolist()) == ([2, 3], [1, 0])


def test_if_one_side_alone_has_clients_the_nearest_quarter_gets_it():
    """Of eight two: the first that has a side, itself the nearest, and client 5."""
    state = table([[0.5, 0.5]] * 2 + [[-0.5, 1.5]] + [[0.5, 0.5]] * 5)
    unit = torch.tensor([[float(x)] for x in (9, -9, 0, 5, 6, 1, 7, 8)]).double()
    at_, side = sides_of(state, 0, torch.arange(8), unit, torch.ones(8) > 0, Rng(0))
    assert (at_.tolist(), side.tolist()) == ([2, 5], [1, 1])
    for sides in ([[0.5, 0.5]] * 8,):
        at_, side = sides_of(table(sides), 0, torch.arange(8), unit, torch.ones(8) > 0, Rng(0))
        assert len(at_) == len(side) == 0


def test_only_who_is_known_begins_the_sides_of_a_later_cluster():
    unit = torch.tensor([[1.0], [-1.0], [1.0]]).double()
    state = table([[0.5, 0.5]] * 3, divided=False)
    at_, side = sides_of(state, 0, torch.arange(3), unit, torch.tensor([True, True, False]), Rng(0))
    assert (at_.tolist(), side.tolist()) == ([0, 1], [0, 1])
    assert len(sides_of(state, 0, torch.arange(3), unit, torch.tensor([True, False, False]), Rng(0))[0]) == 0
    assert add_evidence(state, 0, torch.arange(3), unit, Rng(0)).divided.tolist() == [True]
    assert add_evidence(state, 0, torch.arange(1), unit[:1], Rng(0)).divided.tolist() == [False]


def test_rewards_fall_with_the_distance_from_those_that_are_known():
    """Sketches 0, 2, 4, of which the first two are known: 1, 1 and 3 from their mean 1. Mean 5/3, std sqrt(8)/3."""
    made = rewards(torch.tensor([[0.0], [2.0], [4.0]]).double(), torch.tensor([True, True, False]))
    scale = 5 / 3 + 8**0.5 / 3
    assert made.tolist() == pytest.approx([(5 - 5 * far / scale) * 2 / 3 for far in (1, 1, 3)])
    assert made[2] < 0


def test_a_negative_reward_takes_the_evidence_for_sides_away():
    """Two clusters, and three participants of the first, of whom the third is far off: S is half of R on each side."""
    state = table([[1.5, -0.5], [1.5, -0.5], [-0.5, 1.5]], [2.0, 2.0, 2.0])
    state = replace(split_cluster(state, 0), times=torch.ones(3, 2).long(), divided=torch.tensor([True, False]))
    assert len(state.weights) == 2
    state = replace(state, sides=torch.tensor([1.5, -0.5]).double().expand(3, 2, 2))
    reward = state.reward.clone()
    sketches = torch.tensor([[0.0], [0.1], [9.0]]).double()
    after = add_evidence(state, 0, torch.arange(3), sketches - sketches.mean(0), Rng(0))
    more = after.reward[:, 0] - reward[:, 0]
    assert (more > 0).tolist() == [True, True, False]
    assert after.sides[2, 0].tolist() == [float(after.reward[2, 0]) / 2] * 2
    assert (after.sides[0, 0] - state.sides[0, 0]).tolist() == pytest.approx([float(more[0]) / 2] * 2)
    assert after.reward[:, 1].equal(reward[:, 1])
    assert after.times[:, 0].tolist() == [2, 2, 1]


def test_a_client_that_was_never_asked_takes_the_model_that_fits():
    *_, (state, *_) = states([0, 4, 0, 4, 0, 4], [[0, 1, 2, 3]], split=AtRounds((1,)))
    now = Moment(1, 2, 0.0)
    algorithm = auxo(TASK, HALF)
    served, slot = algorithm.serve(state, torch.tensor([0, 1, 4, 9]))
    assert slot.tolist() == [0, 1, 2, 2]
    assert len(served[2].models) == 2
    shard = population([[0], [4]]).shard(1, now)
    assert algorithm.adapt(served[2], None, replace(shard, x=shard.x[:0], y=shard.y[:0]), now, Rng(0)) is None
    (state, *_), *_ = states([0, 4], [[0]])
    assert algorithm.serve(state, torch.tensor([0, 1, 9]))[1].tolist() == [0, 0, 1]
