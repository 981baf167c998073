"""A client's own model: its update in the slots that it trained, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from fedtide.core.trees import detached, same
from fedtide.core.types import Slotted, Weighted, Weights
from fedtide.core.weights import placed


def weights(number: float, buffer: float = 0.0, **more: float) -> Weights:
    params = {"a": number, **more}
    return Weights({n: torch.full((2,), v) for n, v in params.items()}, {"mean": torch.full((1,), buffer)})


HERE = weights(1.0, 5.0)
STEP = weights(0.25, 0.5)
AFTER = weights(1.25, 5.5)


@pytest.mark.parametrize("weight", [0.0, 1.0, 7.0])
def test_how_much_an_update_counts_for_does_not_matter(weight):
    assert same(placed(HERE, Weighted(STEP, weight)), AFTER)


def test_the_numbers_stay_in_the_type_of_the_weights():
    double = Weights({"a": torch.full((2,), 0.25, dtype=torch.float64)}, {})
    made = placed(HERE, Weighted(double))
    assert made.params["a"].dtype == torch.float32
    assert same(made.buffers, HERE.buffers)


def test_parameters_that_an_update_does_not_name_stay():
    held = weights(1.0, 5.0, b=3.0)
    assert same(placed(held, Weighted(STEP)), weights(1.25, 5.5, b=3.0))


@pytest.mark.parametrize(
    ("delta", "slot", "expected"),
    [
        (Weighted(STEP), 0, (AFTER, HERE)),
        (Weighted(STEP), 1, (HERE, AFTER)),
        (Slotted({1: Weighted(STEP, 3.0)}, 2), None, (HERE, AFTER)),
        (Slotted({0: Weighted(STEP), 1: Weighted(STEP)}, 2), None, (AFTER, AFTER)),
        (Slotted({}, 2), None, (HERE, HERE)),
        (Weighted((STEP, weights(0.0))), None, (AFTER, HERE)),
        (Weighted([weights(0.0), STEP]), None, (HERE, AFTER)),
    ],
)
def test_an_update_goes_into_the_slots_that_it_was_made_for(delta, slot, expected):
    held = (HERE, HERE)
    before = detached([held, delta])
    assert same(placed(held, delta, slot), expected)
    assert same(before, [held, delta])


def test_a_single_model_in_a_tuple_stays_one():
    assert same(placed((HERE,), Weighted(STEP)), (AFTER,))
    assert same(placed((HERE,), Slotted({0: Weighted(STEP)}, 1)), (AFTER,))
    assert same(placed(HERE, Slotted({0: Weighted(STEP)}, 1)), AFTER)


@pytest.mark.parametrize(
    ("held", "delta", "slot"),
    [
        ((HERE, HERE), Weighted(STEP), None),
        ((HERE, HERE), Weighted(STEP), 2),
        (HERE, Slotted({1: Weighted(STEP)}, 2), None),
        (HERE, Weighted((STEP, STEP)), None),
    ],
)
def test_an_update_for_nobody_knows_whom_is_refused(held, delta, slot):
    with pytest.raises(LookupError, match=r"does not say which of [12] models it belongs to"):
        placed(held, delta, slot)
