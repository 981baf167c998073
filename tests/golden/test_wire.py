"""The vector of a total and its fixed point, by hand.

Two clients and IFCA's kind of answer: an update of two numbers for one of two models, and a loss over rows.

    first:  model 0, update (0.5, -1) with weight 2; loss 0.25 of 2 rows   second: model 1, update (3, 1) with weight 1

    places    model 0            model 1            loss
    first     1    -2    2       0    0    0        0.5   2
    second    0     0    0       3    1    1        0     0      (it left the loss out)
    sum       1    -2    2       3    1    1        0.5   2
"""

import pytest
import torch

from fedtide.core.base import Slotted, Sum, Weighted
from fedtide.core.errors import FedtideError
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.vector import BITS, Form, Leaf, TooLarge, added, as_total, as_vector, form_of, opened, quantized

FIRST = {"models": Slotted({0: Weighted(torch.tensor([0.5, -1.0]), 2.0)}, 2), "loss": Weighted(0.25, 2.0)}
SECOND = {"models": Slotted({1: Weighted(torch.tensor([3.0, 1.0]), 1.0)}, 2)}
FORM = Form((Leaf("models", 2, slots=2), Leaf("loss", 1)), people=2)


def test_a_vector_has_every_slot_and_every_weight():
    assert form_of(FIRST, 2) == FORM
    assert as_vector(FORM, FIRST).tolist() == [1, -2, 2, 0, 0, 0, 0.5, 2]
    assert as_vector(FORM, SECOND).tolist() == [0, 0, 0, 3, 1, 1, 0, 0]


def test_sums_come_back_as_the_algorithm_reads_them():
    total = None
    for answer in (FIRST, SECOND):
        total = added(total, Wire().send(FORM, answer))
    opening = Opening("train", (0, 0), None, (0, 1), FORM)
    made = Wire().receive(total, opening, FIRST)
    assert made["loss"] == Sum(0.5, 2.0)
    assert [part.weight for part in made["models"]] == [2.0, 1.0]
    assert [part.value.tolist() for part in made["models"]] == [[1.0, -2.0], [3.0, 1.0]]


def test_what_nobody_sent_is_none_or_left_out():
    made = as_total(FORM, as_vector(FORM, SECOND), FIRST, frozenset({"loss"}))
    assert list(made) == ["models"]
    assert made["models"][0] is None
    assert as_total(FORM, as_vector(FORM, SECOND), FIRST)["loss"] == Sum(0.0, 0.0)


def test_a_slot_whose_weights_cancel_is_there():
    """Of two values in slot 0 the sums weigh 1 and -1, as noise may have it; slot 1 has nothing."""
    like = {"models": Slotted({0: {"a": Weighted(0.0), "b": Weighted(0.0)}}, 2)}
    made = as_total(form_of(like, 1), torch.tensor([3.0, 1.0, 0.0, 0.0, 2.0, -1.0, 0.0, 0.0]), like)
    assert made["models"] == [{"a": Sum(3.0, 1.0), "b": Sum(2.0, -1.0)}, None]


def test_a_slot_cannot_have_more_clients_than_the_sum():
    """Behind the values of two slots stands of how many clients each is: 3 of 1, and 0."""
    form = Form((Leaf("models", 1, slots=2),), 4, counted=True)
    vector = torch.tensor([0.5, 1.0, 0.0, 0.0, 3.0, 0.0])
    assert Wire().fault(quantized(vector, 4), form, 1, 1.0) == "total: found 3 clients in a slot, allowed: 0 to 1"


def test_fixed_point_by_hand():
    """1.5 is 1.5 * 2^34; -1 wraps to 2^64 - 2^34 as an unsigned number; a third of 2^-34 is rounded away."""
    assert BITS == 34
    made = quantized(torch.tensor([1.5, -1.0, 2.0**-34 / 3], dtype=torch.float64), 2)
    assert made.tolist() == [25769803776, -17179869184, 0]
    assert int(made.numpy().view("uint64")[1]) == 2**64 - 2**34
    assert opened(made).tolist() == [1.5, -1.0, 0.0]


def test_a_number_that_does_not_fit_is_refused_and_never_cut():
    """Of two clients each has room for less than 2^28, so that their sum is below 2^29."""
    quantized(torch.tensor([2.0**28 - 1], dtype=torch.float64), 2)
    with pytest.raises(TooLarge):  # rounded, 4096 of them would be 2^63
        quantized(torch.tensor([(2.0**51 - 0.25) / 2.0**34], dtype=torch.float64), 4096)
    for number in (2.0**28, -(2.0**28), float("inf"), float("nan")):
        with pytest.raises(TooLarge, match=r"beyond 2.68e\+08, which is the room of each in a sum of 2"):
            quantized(torch.tensor([1.0, number], dtype=torch.float64), 2)


@pytest.mark.parametrize(
    "total",
    [
        {"loss": Weighted(torch.zeros(2), 1.0)},
        {"other": Weighted(0.0, 1.0)},
        {"models": Slotted({2: Weighted(torch.zeros(2), 1.0)}, 2)},
        {"models": Slotted({0: Weighted(torch.zeros(2), 1.0)}, 3)},
        {"models": Weighted(torch.zeros(2), 1.0)},
        {"loss": 3.0},
    ],
)
def test_a_total_of_another_form_is_refused(total):
    with pytest.raises(FedtideError):
        as_vector(FORM, total)
