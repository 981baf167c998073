"""A client's own model: its update in the slots that it trained, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from fedtide.core.base import Weights
from fedtide.core.trees import detached, same
from fedtide.core.weights import placed


def weights(number: float, buffer: float = 0.0, **more: float) -> Weights:
    params = {"a": number, **more}
    return Weights({n: torch.full((2,), v) for n, v in params.items()}, {"mean": torch.full((1,), buffer)})


HERE = weights(1.0, 5.0)
STEP = weights(0.25, 0.5)
AFTER = weights(1.25, 5.5)


def test_an_update_of_one_model_is_added_to_it():
    assert same(placed(HERE, STEP), AFTER)


def test_the_numbers_stay_in_the_type_of_the_weights():
    double = Weights({"a": torch.full((2,), 0.25, dtype=torch.float64)}, {})
    made = placed(HERE, double)
    assert made.params["a"].dtype == torch.float32
    assert same(made.buffers, HERE.buffers)


def test_parameters_that_an_update_does_not_name_stay():
    held = weights(1.0, 5.0, b=3.0)
    assert same(placed(held, STEP), weights(1.25, 5.5, b=3.0))


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
    assert same(placed(held, update, slot), expected)
    assert same(before, [held, update])


def test_a_single_model_in_a_tuple_stays_one():
    assert same(placed((HERE,), STEP), (AFTER,))
    assert same(placed((HERE,), {0: STEP}), (AFTER,))
    assert same(placed(HERE, {0: STEP}), AFTER)


@pytest.mark.parametrize(
    ("held", "update", "slot"),
    [
        ((HERE, HERE), STEP, None),
        ((HERE, HERE), STEP, 2),
        (HERE, {1: STEP}, None),
        (HERE, {0: STEP, 1: STEP}, None),
    ],
)
def test_an_update_for_nobody_knows_whom_is_refused(held, update, slot):
    with pytest.raises(LookupError, match=r"does not say which of [12] models it belongs to"):
        placed(held, update, slot)


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
        placed(HERE, update)
