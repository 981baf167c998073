"""FlexCFL by pencil and paper: a client with target y goes half the way to it with every step, from w0 = 1."""

import sys

import pytest
import torch
from torch import nn

from fedtide.algorithms.flexcfl import edc, flexcfl, groups_of, inter_group, nearest_group
from fedtide.core.base import Moment, Weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.quadratics import Half, models
from helpers.stages import begun, holding, rounds


def one() -> nn.Module:
    """w = 1, whatever the key."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    return module


TASK = Task(one, Half(), torch.float64)
HALF = LocalTrainer(lr=0.5, batch_size=0)
TWO = {"local": HALF, "clusters": 2, "pretrain": 2}


def targets(*ys: int, registered: int | None = None):
    """A client with one row for each target; none for a negative one."""
    rows = [torch.tensor([y] if y >= 0 else [], dtype=torch.int64) for y in ys]
    return holding([(torch.ones(len(y), 1, dtype=torch.float64), y) for y in rows], classes=9, registered=registered)


def questions(fleet) -> list[tuple[str, list[int]]]:
    return [(query.ask.question, query.ask.clients.tolist()) for query in fleet.queries]


def test_groups_begin_at_the_mean_of_what_their_members_made_of_the_first_weights():
    """Two steps from 1 go 3/4 of the way: to 1/4 for the target 0, u = -3/4; to 13/4 for 4, u = 9/4; to 25/4 for 8.

    Cosines of numbers are signs: {0, 2} against {1, 3, 4}, whose means are -3/4 and (2 * 9/4 + 21/4) / 3 = 13/4.
    In the round the groups go half the way to the means of their targets, 0 and 16/3.
    """
    who = targets(0, 4, 0, 4, 8)
    algorithm = flexcfl(TASK, **TWO)
    state, _, fleet = begun(algorithm, who)
    assert questions(fleet) == [("cold", [0, 1, 2, 3, 4])]
    assert state.group.tolist() == [0, 1, 0, 1, 1]
    assert state.directions.flatten().tolist() == [-0.75, 3.25]
    assert models(state) == [0.25, 4.25]
    ((after, facts, fleet),) = rounds(algorithm, [who])
    assert questions(fleet) == [("shifted", [0, 1, 2, 3, 4]), ("train", [0, 1, 2, 3, 4])]
    assert models(after) == pytest.approx([1 / 8, (17 / 4 + 16 / 3) / 2])
    assert after.directions.equal(state.directions)
    assert (facts["moved"], facts["newcomers"], facts["members"].tolist()) == (0, 0, [2, 3])
    same, *_ = begun(flexcfl(TASK, **TWO, group_init="same"), who)
    assert models(same) == [1.0, 1.0]
    assert same.group.equal(state.group)


def test_a_newcomer_goes_where_it_would_go_from_the_first_weights():
    """Four of six are grouped at the start; the others when they first take part, from w0 and not from the models."""
    who = targets(0, 4, 0, 4, 0, 4)
    algorithm = flexcfl(TASK, **TWO, alpha=2)
    first, _, fleet = begun(algorithm, who)
    ((_, asked),) = questions(fleet)
    assert len(asked) == 4
    late = sorted({0, 1, 2, 3, 4, 5} - set(asked))
    assert first.group[late].tolist() == [-1, -1]
    ((state, facts, fleet),) = rounds(algorithm, [who])
    assert questions(fleet)[1:] == [("cold", late), ("train", [0, 1, 2, 3, 4, 5])]
    assert facts["newcomers"] == 2
    assert all(state.group[i] == state.group[i % 2] for i in range(6))
    assert state.group[0] != state.group[1]
    assert state.directions.equal(first.directions)


def test_only_whose_labels_have_shifted_is_grouped_again_and_from_the_first_weights():
    """Client 0 turns to 4 and client 1 to 5: labels of both move by 2 in L1, and only client 0 changes its group."""
    algorithm = flexcfl(TASK, **TWO, migrate=1.9)
    before, after = targets(0, 4, 0, 4), targets(4, 5, 0, 4)
    _, (state, facts, fleet), (_, later, quiet) = rounds(algorithm, [before, after, after])
    assert questions(fleet) == [("shifted", [0, 1, 2, 3]), ("cold", [0, 1]), ("train", [0, 1, 2, 3])]
    assert fleet.queries[0].answered.tolist() == [0, 1]
    assert state.group.tolist() == [1, 1, 0, 1]
    assert facts["moved"] == 1
    # It is registered with its new labels and does not signal again.
    assert questions(quiet) == [("shifted", [0, 1, 2, 3]), ("train", [0, 1, 2, 3])]
    assert later["moved"] == 0
    *_, (state, _, fleet) = rounds(flexcfl(TASK, **TWO, migrate=2.0), [before, after])
    assert state.group.tolist() == [0, 1, 0, 1]
    assert [question for question, _ in questions(fleet)] == ["train"]


def test_directions_are_those_of_the_singular_value_decomposition_and_their_signs_do_not_matter(monkeypatch):
    updates = torch.randn(9, 30, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(3, 30).repeat(3, 1)
    _, _, v = torch.linalg.svd(updates.double(), full_matrices=False)
    wanted = torch.nn.functional.cosine_similarity(updates.double()[:, None], v[None, :3], dim=2)
    torch.testing.assert_close(torch.from_numpy(edc(updates, 3)).abs(), wanted.abs(), rtol=1e-9, atol=1e-9)
    plain = groups_of(updates, 3, Rng(1))
    monkeypatch.setattr(sys.modules[groups_of.__module__], "edc", lambda updates, m: edc(updates, m) * [1, -1, 1])
    assert groups_of(updates, 3, Rng(1)).equal(plain)


def test_of_clients_that_are_alike_there_is_one_group_and_the_others_have_no_direction():
    state, *_ = begun(flexcfl(TASK, **TWO), targets(4, 4, 4))
    assert state.group.tolist() == [0, 0, 0]
    assert (models(state), state.directions.flatten().tolist()) == ([3.25, 1.0], [2.25, 0.0])
    # Whoever turns away gets the group without a direction: distances are 1 and 1/2.
    assert nearest_group(torch.tensor([[-1.0], [1.0]]), state.directions).tolist() == [1, 0]


def test_the_step_between_groups():
    """w = (3, 4) and (0, 2), norms 5 and 2, eta_g = 1: (3, 4) takes (0, 1) and is divided by 1 + 1/2."""
    three, two = (Weights({"w": torch.tensor(values)}) for values in ([3.0, 4.0], [0.0, 2.0]))
    one, other = inter_group([three, two], 1.0)
    torch.testing.assert_close(one.params["w"], torch.tensor([2.0, 10 / 3]))
    torch.testing.assert_close(other.params["w"], torch.tensor([0.6, 2.8]) / 1.2)
    assert inter_group([three, two], 0.0) == (three, two)
    still, _ = inter_group([three, Weights({"w": torch.zeros(2)})], 1.0)
    assert still.params["w"].tolist() == [3.0, 4.0]


def test_until_as_many_as_there_are_groups_have_answered_nobody_trains():
    """One of three clients has rows at first; with two the groups are made and trained in the same round."""
    algorithm = flexcfl(TASK, **TWO)
    stages = [targets(0, -1, -1), targets(0, 4, -1)]
    (state, facts, fleet), (later, after, _) = rounds(algorithm, stages)
    assert questions(fleet) == [("cold", [0, 1, 2])]
    assert (models(state), state.group.tolist()) == ([1.0, 1.0], [-1, -1, -1])
    assert "loss" not in facts
    assert (later.group.tolist(), models(later)) == ([0, 1, -1], [1 / 8, 29 / 8])
    assert after["newcomers"] == 2


def test_a_client_that_was_never_grouped_finds_its_group_before_it_is_judged():
    who = targets(0, 4, 0, 4, 0, 7, -1, registered=4)
    algorithm = flexcfl(TASK, **TWO)
    state, *_ = begun(algorithm, who)
    served, slot = algorithm.serve(state, torch.tensor([0, 1, 4, 5, 6]))
    assert slot.tolist() == [0, 1, 2, 2, 2]
    now = Moment(0, 1, 0.0)
    found = [algorithm.adapt(served[2], None, who.shard(i, now), now, Rng(0)) for i in (4, 5)]
    assert [int(each.memory["found"]) for each in found] == [0, 1]
    assert algorithm.adapt(served[2], None, who.shard(6, now), now, Rng(0)) is None
    assert algorithm.adapt(served[0], {"labels": torch.ones(1)}, who.shard(0, now), now, Rng(0)) is None
    x, owner = torch.ones(3, 1, dtype=torch.float64), torch.tensor([0, 1, 2])
    memories = [found[0].memory, found[1].memory, {"labels": torch.ones(1)}]
    assert algorithm.predict(served[2], memories, x, owner).choice.tolist() == [0, 1, 0]
    assert algorithm.predict(served[1], [None], x, torch.zeros(3, dtype=torch.int64)).choice.tolist() == [1, 1, 1]
