"""Trees: leaves, structure, equality bit for bit, finiteness and size."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtide.cohorts.selection import no_reports
from fedtide.core.base import Sum, Weights
from fedtide.core.trees import (
    all_finite,
    children,
    detached,
    grown,
    is_node,
    leaves,
    map_leaves,
    per_client,
    rebuild,
    same,
    size_in_bytes,
)
from fedtide.core.weights import add, add_update
from helpers.examples import examples

law = examples(60)
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Pair:
    left: object
    right: object = None
    made: int = field(default=0, init=False)


def nested(leaf):
    return st.recursive(
        leaf,
        lambda below: (
            st.lists(below, max_size=3)
            | st.lists(below, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), below, max_size=3)
            | st.builds(Pair, below, below)
        ),
        max_leaves=8,
    )


trees = nested(st.integers() | st.none() | st.text(max_size=3) | st.floats(allow_nan=False))


# -- leaves and structure ----------------------------------------------------------------------------------------------


@law
@given(trees)
def test_mapping_the_identity_changes_nothing(tree):
    assert same(map_leaves(lambda leaf: leaf, tree), tree)


@law
@given(trees)
def test_a_map_calls_the_function_once_per_leaf_in_the_order_of_leaves(tree):
    seen = []
    map_leaves(seen.append, tree)
    assert seen == leaves(tree)


@law
@given(trees)
def test_a_node_is_rebuilt_from_its_children(tree):
    if is_node(tree):
        assert same(rebuild(tree, [child for _, child in children(tree)]), tree)
    else:
        assert children(tree) == []


def test_a_node_at_which_the_map_stops_is_handed_over_whole():
    tree = {"a": Sum(1.0, 2.0), "b": [Sum(3.0, 4.0), 5.0]}
    made = map_leaves(lambda leaf: leaf.weight if isinstance(leaf, Sum) else leaf, tree, stop=lambda n: type(n) is Sum)
    assert made == {"a": 2.0, "b": [4.0, 5.0]}


@pytest.mark.parametrize("leaf", [None, 3, 2.5, "word", True, torch.zeros(2), torch.nn.Parameter(torch.zeros(2))])
def test_plain_values_and_tensors_are_leaves(leaf):
    assert not is_node(leaf)
    assert leaves(leaf) == [leaf]


@pytest.mark.parametrize("node", [{}, [], (), Pair(1), Weights({})])
def test_containers_are_nodes_even_when_they_are_empty(node):
    assert is_node(node)


# -- equality ----------------------------------------------------------------------------------------------------------

DIFFERENT = {
    "value": ({"a": 1}, {"a": 2}),
    "key": ({"a": 1}, {"b": 1}),
    "kind of key": ({1: 0}, {"1": 0}),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "length": ([1], [1, 1]),
    "list and tuple": ([1], (1,)),
    "dict and dataclass": ({"left": 1, "right": None}, Pair(1)),
    "leaf and node": ({"a": 1}, 1),
    "node and none": ([], None),
    "int and float": (1, 1.0),
    "bool and int": (True, 1),
    "number and tensor": (1.0, torch.tensor(1.0)),
    "none and nan": (None, NAN),
    "dtype": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "dtype of the same width": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "shape of nothing": (torch.zeros(0, 3), torch.zeros(3, 0)),
    "dimension": (torch.zeros(()), torch.zeros(1)),
    "sign of zero in a tensor": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "last bit": (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_trees_differ_in(case):
    left, right = DIFFERENT[case]
    assert not same(left, right)
    assert not same(right, left)
    assert same(left, left)


@pytest.mark.parametrize(
    "leaf",
    [NAN, INF, -INF, None, "", torch.tensor(NAN), torch.tensor([NAN, INF]), torch.zeros(0), torch.tensor(True),
     torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, 3).t(),
     torch.zeros(2)[::2], torch.zeros(0, 3)[:, ::2], torch.zeros(4, 4)[1:2, ::4]],
)  # fmt: skip
def test_everything_is_the_same_as_its_copy(leaf):
    assert same({"leaf": leaf}, {"leaf": leaf.clone() if isinstance(leaf, torch.Tensor) else leaf})


def test_nans_are_compared_by_their_bits():
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan()
    assert other.isnan()
    assert not same(quiet, other)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_detached_copy_shares_neither_storage_nor_graph():
    held = torch.ones(2, requires_grad=True)
    tree = Pair({"w": held * 2, "held": held}, (3, "x"))
    copy = detached(tree)
    assert same(copy, map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree))
    assert not copy.left["w"].requires_grad
    with torch.no_grad():
        tree.left["held"].add_(1)
    assert copy.left["held"].tolist() == [1.0, 1.0]


# -- size and finiteness -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ({}, 0),
        (None, 0),
        ("a long string", 0),
        (3, 8),
        (True, 8),
        (2.5, 8),
        (torch.zeros(3, 2), 24),
        (torch.zeros(3, dtype=torch.float64), 24),
        (torch.zeros(3, dtype=torch.bfloat16), 6),
        (torch.zeros(5, dtype=torch.bool), 5),
        (torch.zeros(()), 4),
        (torch.zeros(0), 0),
        (Weights({"w": torch.zeros(2)}, {"m": torch.zeros(1)}), 12),
        ([1, {"a": (2.0, torch.zeros(1))}], 20),
    ],
)
def test_what_a_tree_weighs_on_the_wire(tree, size):
    assert size_in_bytes(tree) == size


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("where", [0, 500, 999])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(odd, where):
    tensor = torch.ones(1000)
    assert all_finite({"x": [tensor, 1.0]})
    tensor[where] = odd
    assert not all_finite({"x": [tensor, 1.0]})
    assert not all_finite(Pair(odd))


def test_infinities_that_cancel_are_found():
    assert not all_finite(torch.tensor([INF, -INF]))


def test_a_sum_that_overflows_is_not_taken_for_a_number_that_is_not_finite():
    assert all_finite(torch.full((1000,), 3e38))
    assert all_finite(torch.full((1000,), 60000.0, dtype=torch.float16))


def test_integers_words_and_nothing_are_finite():
    assert all_finite([torch.tensor([2**62]), torch.tensor([True]), 2**80, "inf", None, {}, torch.zeros(0)])


# -- weights -----------------------------------------------------------------------------------------------------------


def test_adding_keeps_the_type_of_the_weights():
    moved = add(Weights({"w": torch.ones(1)}), Weights({"w": torch.ones(1, dtype=torch.float64)}))
    assert moved.params["w"].dtype == torch.float32
    assert moved.params["w"].tolist() == [2.0]


# -- fields with an entry for each client grow where clients join, wherever in a stat ----------------------------------


@dataclass(frozen=True)
class State:
    weights: tuple[Weights, ...]
    cluster: Tensor = field(metadata=per_client(new=lambda state: int(state.cluster.max())))
    reports: Tensor = field(metadata=per_client(new=0.5))
    cohort: Any = None


def state_of_clients(clients: int) -> State:
    return State(
        (Weights({"w": torch.ones(2)}),), torch.arange(clients), torch.zeros(clients, 3), no_reports(clients, 1)
    )


def test_all_fields_and_the_cohorts_memo_grow():
    more = grown(state_of_clients(4), 6)
    assert more.cluster.tolist() == [0, 1, 2, 3, 3, 3]
    assert more.reports.tolist() == [[0.0] * 3] * 4 + [[0.5] * 3] * 2
    assert more.cohort.heard.tolist() == [False] * 6
    assert more.cohort.of.shape == (6, 1)
    assert same(more.weights, state_of_clients(4).weights)


def test_a_state_with_room_stays_what_it_is():
    before = state_of_clients(4)
    assert grown(before, 4) is grown(before, 3) is before
    assert grown(None, 4) is None
    assert grown((1, 2), 4) == (1, 2)


# -- a client's own model ----------------------------------------------------------------------------------------------


def weights(number: float, buffer: float = 0.0, **more: float) -> Weights:
    params = {"a": number, **more}
    return Weights({n: torch.full((2,), v) for n, v in params.items()}, {"mean": torch.full((1,), buffer)})


HERE = weights(1.0, 5.0)
STEP = weights(0.25, 0.5)
AFTER = weights(1.25, 5.5)


def test_an_update_of_one_model_is_added_to_it():
    assert same(add_update(HERE, STEP), AFTER)


def test_the_numbers_stay_in_the_type_of_the_weights():
    double = Weights({"a": torch.full((2,), 0.25, dtype=torch.float64)}, {})
    made = add_update(HERE, double)
    assert made.params["a"].dtype == torch.float32
    assert same(made.buffers, HERE.buffers)


def test_parameters_that_an_update_does_not_name_stay():
    held = weights(1.0, 5.0, b=3.0)
    assert same(add_update(held, STEP), weights(1.25, 5.5, b=3.0))


@pytest.mark.parametrize(
    ("update", "slot", "expected"),
    [
        (STEP, 0, (AFTER, HERE)),
        (STEP, 1, (HERE, AFTER)),
        ({1: STEP}, None, (HERE, AFTER)),
        ({0: STEP, 1: STEP}, None, (AFTER, AFTER)),
        ({}, None, (HERE, HERE)),
        ({0: STEP, 1: weights(0.0)}, None, (AFTER, HERE)),
    ],
)
def test_an_update_goes_into_the_slots_that_it_was_made_for(update, slot, expected):
    held = (HERE, HERE)
    before = detached([held, update])
    assert same(add_update(held, update, slot), expected)
    assert same(before, [held, update])


def test_a_single_model_in_a_tuple_stays_one():
    assert same(add_update((HERE,), STEP), (AFTER,))
    assert same(add_update((HERE,), {0: STEP}), (AFTER,))
    assert same(add_update(HERE, {0: STEP}), AFTER)


@pytest.mark.parametrize(
    ("held", "update", "slot"),
    [((HERE, HERE), STEP, None), ((HERE, HERE), STEP, 2), (HERE, {1: STEP}, None), (HERE, {0: STEP, 1: STEP}, None)],
)
def test_an_update_for_nobody_knows_whom_is_refused(held, update, slot):
    with pytest.raises(LookupError, match=r"does not say which of [12] models it belongs to"):
        add_update(held, update, slot)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (torch.ones(2), "its update is no Weights, and no mapping from numbers of models to Weights"),
        ({0: {"a": torch.ones(2)}}, "its update is no Weights, and no mapping from numbers of models to Weights"),
        (weights(0.25, b=1.0), "its update has other parameters than the model"),
        (Weights({"a": torch.ones(1)}), "its update has other parameters than the model"),
    ],
)
def test_an_update_of_something_else_is_refused_in_words(update, words):
    with pytest.raises(LookupError, match=words):
        add_update(HERE, update)
