"""Sums: what leaves a client is added in float64, however it is cut into blocks; means are taken once."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core import sums
from fedtide.core.base import Slotted, Sum, Weighted, mean
from fedtide.core.trees import leaves, same
from helpers.examples import examples

law = examples(80)


@dataclass(frozen=True)
class Moments:
    first: Any
    second: Any


# Whole numbers below 2^20 are summed exactly in float64, so that every order gives the same bits.
whole = st.integers(-(2**10), 2**10)
weights = st.integers(0, 16)


@st.composite
def answers(draw):
    """One client's total: a tensor, a tree under one weight, a number, slots; some keys left out."""
    total: dict[Any, Any] = {
        "delta": Weighted(
            {"w": torch.tensor([float(draw(whole)), float(draw(whole))]), "b": (torch.tensor(float(draw(whole))),)},
            draw(weights),
        ),
        "loss": Weighted(float(draw(whole)), draw(weights)),
        "nested": {"n": Weighted(draw(whole)), "more": [Weighted(float(draw(whole)), 2.0), Weighted(1)]},
    }
    if draw(st.booleans()):
        total["sometimes"] = Weighted(float(draw(whole)), draw(weights))
    chosen = draw(st.lists(st.integers(0, 3), max_size=3, unique=True))
    total["slots"] = Slotted({k: Weighted(torch.tensor([float(draw(whole))]), draw(weights)) for k in chosen}, 4)
    return total


def added(totals):
    partial = None
    for total in totals:
        partial = sums.add(partial, total)
    return partial


def ordered(tree):
    """The same tree with its dicts and slots sorted by key."""
    if isinstance(tree, dict):
        return {key: ordered(tree[key]) for key in sorted(tree, key=str)}
    if isinstance(tree, list):
        return [ordered(child) for child in tree]
    return tree


@law
@given(st.lists(answers(), max_size=6), st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_blocks_gives_the_whole(totals, cuts):
    edges = [0, *sorted(min(cut, len(totals)) for cut in cuts), len(totals)]
    merged = None
    for first, last in itertools.pairwise(edges):
        merged = sums.merge(merged, added(totals[first:last]))
    assert same(ordered(sums.finish(merged)), ordered(sums.finish(added(totals))))


@law
@given(st.lists(answers(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_sums_of_whole_numbers_do_not_depend_on_the_order(totals, random):
    shuffled = list(totals)
    random.shuffle(shuffled)
    assert same(ordered(sums.finish(added(totals))), ordered(sums.finish(added(shuffled))))


@law
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.125, 100)), min_size=1, max_size=6))
def test_the_mean_is_the_weighted_mean(pairs):
    got = mean(sums.finish(added([{"x": Weighted(torch.tensor([v]), w)} for v, w in pairs])))
    expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    assert float(got["x"]) == pytest.approx(expected, rel=1e-9, abs=1e-4)
    assert got["x"].dtype == torch.float64


@law
@given(st.lists(st.tuples(whole, st.integers(1, 16)), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_weights_that_are_scaled_all_alike_leave_the_mean(pairs, factor):
    def mean_of(factor):
        return mean(added({"v": Weighted(torch.tensor([float(v)]), w * factor)} for v, w in pairs))["v"]

    assert torch.equal(mean_of(2.0), mean_of(1.0))
    torch.testing.assert_close(mean_of(factor), mean_of(1.0), rtol=1e-12, atol=1e-9)


def test_values_are_summed_in_double_precision_with_their_weight():
    """In float32 the small ones would be lost: 2^25 + 1 = 2^25 there."""
    total = added([{"x": Weighted(torch.tensor([2.0**25]))}, *[{"x": Weighted(torch.tensor([0.5]), 2)}] * 3])
    assert total["x"].value.tolist() == [2.0**25 + 3]
    assert total["x"].value.dtype == torch.float64
    third = torch.tensor([1 / 3])
    assert added([{"x": Weighted(third, 3.0)}])["x"].value.item() == 3.0 * third.double().item()
    assert added([{"x": Weighted(third, 3.0)}] * 2)["x"].value.item() == 6.0 * third.double().item()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_every_kind_of_number_is_summed(dtype):
    one = torch.tensor([1, 0, 1]).to(dtype)
    total = added([{"x": Weighted(one, 2.0)}, {"x": Weighted(one, 0.5)}])
    assert total["x"].value.tolist() == [2.5, 0.0, 2.5]
    assert total["x"].value.dtype == torch.float64
    assert one.dtype == dtype


# -- nothing, and parts that are missing -------------------------------------------------------------------------------


def test_the_sum_of_nothing_is_nothing_and_has_no_mean():
    assert sums.merge(None, None) is None
    assert sums.finish(None) is None
    assert mean(None) is None
    some = {"x": Sum(1.0, 1.0)}
    assert sums.merge(None, some) is some
    assert sums.merge(some, None) is some


def test_a_weight_of_zero_has_no_mean():
    total = sums.finish(added([{"x": Weighted(5.0, 0.0), "y": Weighted(1.0, 2.0)}] * 2))
    assert total["x"] == Sum(0.0, 0.0)
    assert mean(total) == {"x": None, "y": 1.0}


def test_a_key_that_some_clients_leave_out_is_summed_over_the_others():
    totals = [{"a": Weighted(1.0)}, {"b": Weighted(2.0)}, {"a": Weighted(3.0), "b": Weighted(4.0, 3.0)}]
    assert mean(sums.finish(added(totals))) == {"a": 2.0, "b": 3.5}
    assert mean(sums.finish(sums.merge(added(totals[:1]), added(totals[1:])))) == {"a": 2.0, "b": 3.5}


# -- slots -------------------------------------------------------------------------------------------------------------


def test_every_slot_is_a_sum_of_its_own_and_an_unfed_one_is_none():
    totals = [
        {"delta": Slotted({0: Weighted(torch.tensor([1.0]), 2.0)}, 3)},
        {"delta": Slotted({2: Weighted(torch.tensor([5.0]), 1.0), 0: Weighted(torch.tensor([3.0]), 1.0)}, 3)},
        {"delta": Slotted({}, 3)},
    ]
    got = sums.finish(added(totals))["delta"]
    assert got[1] is None
    assert (got[0].value.tolist(), got[0].weight) == ([5.0], 3.0)
    assert (got[2].value.tolist(), got[2].weight) == ([5.0], 1.0)
    means = mean(got)
    assert means[1] is None
    assert [m.tolist() for m in (means[0], means[2])] == [[5.0 / 3.0], [5.0]]


def test_slots_are_found_at_any_depth_and_in_any_kind_of_node():
    total = Moments({"deep": [Slotted({0: Weighted(1.0)}, 1)]}, (Weighted(2.0, 2.0),))
    got = sums.finish(added([total, total]))
    assert type(got) is Moments
    assert got.first == {"deep": [[Sum(2.0, 2.0)]]}
    assert got.second == (Sum(8.0, 4.0),)
    assert mean(got) == Moments({"deep": [[1.0]]}, (2.0,))


# -- what cannot be summed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [1.0, torch.ones(2), "word", None])
def test_a_total_holds_weighted_leaves_only(leaf):
    with pytest.raises(TypeError, match="Weighted and Slotted leaves only"):
        sums.add(None, {"a": leaf})


@pytest.mark.parametrize("value", ["word", None, object()])
def test_only_numbers_can_be_summed(value):
    with pytest.raises(TypeError, match="only tensors and numbers"):
        sums.add(None, {"a": Weighted({"b": value})})


def test_values_are_aligned_by_key_and_not_by_place():
    """Clients may build their dicts in any order."""
    first = {"delta": Weighted({"w": torch.tensor([1.0]), "b": torch.tensor([10.0])}, 2.0)}
    second = {"delta": Weighted({"b": torch.tensor([30.0]), "w": torch.tensor([3.0])}, 1.0)}
    total = sums.finish(added([first, second]))["delta"].value
    assert (total["w"].item(), total["b"].item()) == (5.0, 50.0)
    plain = [{"x": Weighted({"a": 1.0, "b": 10.0})}, {"x": Weighted({"b": 30.0, "a": 3.0})}]
    assert sums.finish(added(plain))["x"].value == {"a": 4.0, "b": 40.0}


@pytest.mark.parametrize("second", [{"w": 1.0}, {"w": 1.0, "c": 2.0}, {"w": 1.0, "b": 2.0, "c": 3.0}, [1.0, 2.0], 1.0])
@pytest.mark.parametrize("made", [float, lambda v: torch.tensor([v])], ids=["numbers", "tensors"])
def test_values_of_different_structure_are_an_error(made, second):
    def built(value):
        if isinstance(value, dict):
            return {key: made(v) for key, v in value.items()}
        return [made(v) for v in value] if isinstance(value, list) else made(value)

    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        added([{"x": Weighted(built({"w": 1.0, "b": 2.0}))}, {"x": Weighted(built(second))}])


def test_a_sum_over_no_memory_of_its_parts_grows_in_place():
    """The accumulators are kept: no tensor is made for a further answer."""
    partial = sums.add(None, {"x": Weighted(torch.ones(3))})
    held = leaves(partial)[0]
    more = sums.add(partial, {"x": Weighted(torch.ones(3))})
    assert leaves(more)[0] is held
    assert sums.merge(more, {"x": Sum(torch.ones(3, dtype=torch.float64), 1.0)})["x"].value is held
    assert held.tolist() == [3.0, 3.0, 3.0]


def test_a_total_is_contiguous_as_that_of_another_process():
    stored = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    total = sums.finish(sums.add(sums.add(None, {"delta": Weighted(stored, 1.0)}), {"delta": Weighted(stored, 2.0)}))
    assert total["delta"].value.is_contiguous()
    assert total["delta"].value.allclose(3 * stored.double())
