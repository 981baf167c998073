"""FedDrift by hand: two rows, x = 1 and x = -1, and two concepts, which row is of class 1. The model is d = w_1 - w_0.

With d = 0 both rows are called class 0, and half of them is wrong. Concept A (x = 1 is class 1) is right with d > 0,
concept B with d < 0; what is right for one is all wrong for the other. In one round of ten steps of rate 4 a client
turns the sign of d.
"""

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.feddrift import Eager, Places, distances, feddrift, linked_groups, merge_models, with_new
from fedtide.core.base import Shard
from fedtide.core.rng import Rng
from fedtide.learn.server import SGD
from helpers.stages import TASK, TURN, A, B, X, begun, concepts, rounds


def played(*stages: str, **options):
    algorithm = feddrift(TASK, TURN, **{"rounds_per_step": 1, "delta": 0.1, **options})
    # Every stage has samples of its own, so that rows of the past are other rows.
    return list(rounds(algorithm, [concepts(names, 100 * number) for number, names in enumerate(stages)]))


def in_use(state) -> list[int]:
    return state.places.in_use.nonzero().flatten().tolist()


def turned(state) -> list[int]:
    """The sign of d of each model in use."""
    return [int(state.weights[k].params["weight"].diff(dim=0).sign()) for k in in_use(state)]


def test_two_concepts_are_two_models_after_the_merge():
    """Before any training half is wrong, then nothing; in step 2 everything is at clients 2 and 3, and each leaves.

    In step 3 both of their models are right for either of them: the first of equals is taken, and that of client 3 is
    as good on its rows, so their distance is 0. They merge: two (client, step) pairs of step 3 and one of step 2
    against the one of client 3.
    """
    one, two, three, four = played("AAAA", "AAAA", "AABB", "AABB")
    assert one[0].least.tolist() == [0.5] * 4
    assert two[0].least.tolist() == [0.0] * 4
    state, facts, _ = three
    assert (facts["left"], facts["new"], facts["merged"]) == (2, 2, 0)
    assert state.model.tolist() == [0, 0, 1, 2]
    assert state.least.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert turned(state) == [1, -1, -1]
    state, facts, _ = four
    assert (facts["left"], facts["new"], facts["merged"]) == (0, 0, 1)
    assert (in_use(state), state.model.tolist(), turned(state)) == ([0, 1], [0, 0, 1, 1], [1, -1])
    # Model 0: four clients in two steps, then two in two.
    assert state.places.pairs[:2].tolist() == [12.0, 4.0]


def test_a_concept_that_comes_back_finds_its_model_again():
    *_, (state, facts, _) = played("AAAA", "AAAA", "AABB", "AABB", "AAAA")
    assert (facts["left"], state.model.tolist(), in_use(state)) == (0, [0, 0, 0, 0], [0, 1])
    *_, (state, facts, _) = played("AAAA", "AAAA", "AABB", "AABB", "AAAA", "BBAA")
    assert (facts["left"], state.model.tolist(), in_use(state)) == (0, [1, 1, 0, 0], [0, 1])


def test_eager_has_one_new_model_for_all_and_does_not_merge():
    *_, (state, facts, _) = played("AAAA", "AAAA", "AABB", variant=Eager())
    assert (facts["left"], facts["new"], state.model.tolist()) == (2, 1, [0, 0, 1, 1])
    assert turned(state) == [1, -1]


def test_a_new_model_begins_as_the_one_that_is_left_or_as_the_run_did():
    """Without a step of training to speak of, it is the one or the other."""
    for fresh in ("previous", "start"):
        algorithm = feddrift(TASK, TURN, rounds_per_step=1, init_new_from=fresh)
        (*_, (before, _, _)) = rounds(algorithm, [concepts("AA")] * 2)
        after = with_new(before, torch.tensor([1]), fresh, SGD())
        wanted = before.weights[0] if fresh == "previous" else before.start
        assert after.weights[1] is wanted
        assert not before.start.params["weight"].any()


def test_a_step_begins_every_so_many_rounds_and_again_where_nobody_answered():
    stages = played("AAAA", "AAAA", "AAAA", "AABB", "AABB", rounds_per_step=2)
    asked = [[query.ask.question for query in fleet.queries] for *_, fleet in stages]
    assert asked == [["judge", "train"], ["train"]] * 2 + [["judge", "train"]]
    assert [state.step for state, *_ in stages] == [0, 0, 1, 1, 2]
    assert [state.model.tolist() for state, *_ in stages][3:] == [[0, 0, 0, 0], [0, 0, 1, 2]]
    stages = played("....", "AA..", "AAAA", rounds_per_step=3)
    assert [state.step for state, *_ in stages] == [-1, 0, 0]
    last = stages[-1][0]
    assert (last.judged.tolist(), last.least[:2].tolist()) == ([True, True, False, False], [0.5, 0.5])


def test_there_are_never_more_models_than_allowed_and_that_used_longest_ago_makes_room():
    for most in (1, 2, 3):
        for state, _, _ in played("AAAA", "AAAA", "AABB", "BBAA", "ABAB", max_clusters=most):
            assert len(in_use(state)) <= most
            assert len(state.weights) == most
    *_, (state, facts, _) = played("AAAA", "AAAA", "AABB", max_clusters=2)
    assert (facts["left"], facts["new"], state.model.tolist()) == (2, 1, [0, 0, 1, 0])
    # Both models are in use: nobody gets a third. Later nobody has had model 1 for a step, and it makes room.
    algorithm = feddrift(TASK, TURN, max_clusters=2)
    state = replace(begun(algorithm, concepts("AA"))[0], step=0)
    state = with_new(state, torch.tensor([0]), "start", SGD())
    assert with_new(state, torch.tensor([1]), "start", SGD()) is state
    later = replace(state, step=5, model=torch.zeros(2, dtype=torch.int64))
    new = with_new(later, torch.tensor([1]), "start", SGD())
    assert new.model.tolist() == [0, 1]
    assert (new.places.used.tolist(), new.places.pairs.tolist()) == ([0, 5], [0.0, 0.0])


def test_distances_are_symmetric_with_zeros_on_the_diagonal():
    """L = [[1, 4, 2], [3, 2, 2], [9, 1, 5]]: D(0, 1) = max(4 - 1, 3 - 2), D(0, 2) = max(1, 4), D(1, 2) = max(0, -4)."""
    losses = torch.tensor([[1.0, 4.0, 2.0], [3.0, 2.0, 2.0], [9.0, 1.0, 5.0]])
    assert distances(losses).tolist() == [[0.0, 3.0, 4.0], [3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    for seed in range(20):
        d = distances(torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)))
        assert d.equal(d.T)
        assert not d.diagonal().any()
        assert (d >= 0).all()


def test_linkage_is_complete_and_a_distance_of_just_the_cut_merges():
    """D(0, 1) = 1, D(1, 2) = 2, D(0, 2) = 4: after {0, 1} model 2 is 4 away, not 2."""
    losses = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 2.0], [4.0, 2.0, 0.0]])
    assert [[group.tolist() for group in linked_groups(losses, cut)] for cut in (0.9, 1.0, 3.9, 4.0)] == [
        [], [[0, 1]], [[0, 1]], [[0, 1, 2]],
    ]  # fmt: skip
    assert linked_groups(losses[:1, :1], 9.0) == []


def test_what_merges_is_the_mean_by_pairs():
    """Models 0, 2 and 8 with 3, 1 and 4 pairs: (0 * 3 + 2 + 8 * 4) / 8 = 4.25, in the first place."""
    state, *_ = begun(feddrift(TASK, TURN, max_clusters=4), concepts("AAA"))
    weights = tuple(type(state.start)({"weight": torch.full((2, 1), v).double()}) for v in (0.0, 2.0, 7.0, 8.0))
    state = replace(
        state,
        weights=weights,
        places=Places(
            pairs=torch.tensor([3.0, 1.0, 9.0, 4.0]).double(),
            in_use=torch.ones(4, dtype=torch.bool),
            used=torch.tensor([2, 3, 3, 1]),
            fresh=torch.zeros(4, dtype=torch.bool),
        ),
        model=torch.tensor([3, 2, 1]),
    )
    made = merge_models(state, [0, 1, 3], SGD())
    assert [float(w.params["weight"][0]) for w in made.weights] == [4.25, 0.0, 7.0, 0.0]
    places = made.places
    assert (places.pairs.tolist(), places.in_use.tolist()) == ([8.0, 0.0, 9.0, 0.0], [True, False, True, False])
    assert places.used[places.in_use].tolist() == [3, 3]
    assert made.model.tolist() == [0, 2, 0]


def test_with_the_loss_as_measure_it_is_cross_entropy_that_rises():
    """Before training log 2; a model that is right with certainty loses more than that on the other concept."""
    one, _, three = played("AAAA", "AAAA", "AABB", criterion="loss", delta=0.5)
    assert one[0].least.tolist() == pytest.approx([0.6931471805599453] * 4)
    assert three[0].model.tolist() == [0, 0, 1, 2]
    assert float(three[0].least[2]) > 2


def test_whoever_never_answered_takes_what_fits_its_rows():
    algorithm = feddrift(TASK, TURN, rounds_per_step=1)
    stages = [concepts("AAAA."), concepts("AAAA."), concepts("AABB.")]
    *_, (state, _, fleet) = rounds(algorithm, stages)
    served, slot = algorithm.serve(state, torch.tensor([0, 2, 3, 4, 77]))
    assert slot.tolist() == [0, 1, 2, 10, 10]
    assert served[10].numbers.tolist() == [0, 1, 2]
    empty = torch.zeros(0, dtype=torch.int64)
    for y, wanted in ((A, 0), (B, 1)):
        shard = Shard(X, y, torch.arange(2))
        assert int(algorithm.adapt(served[10], None, shard, fleet.moment, Rng(0)).memory["found"]) == wanted
    assert algorithm.adapt(served[10], None, Shard(X[:0], empty, empty), fleet.moment, Rng(0)) is None
    found = algorithm.predict(served[10], [{"found": torch.tensor(2)}, None], X, torch.tensor([0, 1]))
    assert found.choice.tolist() == [2, 0]
