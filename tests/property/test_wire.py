"""Statements about vectors in fixed point, for all totals."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core import sums
from fedtide.core.base import Slotted, Sum, Weighted
from fedtide.core.trees import leaves
from fedtide.wire.vector import BITS, added, as_total, as_vector, form_of, opened, quantized
from helpers.examples import examples

NUMBERS = st.floats(-1e4, 1e4, width=32)
WEIGHTS = st.integers(1, 500).map(float)
SLOTS = 3


@st.composite
def totals(draw: st.DrawFn) -> dict:
    """An answer with a tensor, a number, and some of three slots."""
    update = torch.tensor(draw(st.lists(NUMBERS, min_size=4, max_size=4)))
    chosen = draw(st.sets(st.integers(0, SLOTS - 1)))
    models = {k: Weighted({"w": update * (k + 1), "b": draw(NUMBERS)}, draw(WEIGHTS)) for k in sorted(chosen)}
    return {"delta": Weighted(update, draw(WEIGHTS)), "models": Slotted(models, SLOTS), "n": Weighted(draw(NUMBERS))}


LIKE = {
    "delta": Weighted(torch.zeros(4)), "models": Slotted({0: Weighted({"w": torch.zeros(4), "b": 0.0})}, SLOTS),
    "n": Weighted(0.0),
}  # fmt: skip


@examples(60)
@given(st.lists(totals(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_sums_are_those_of_floating_point_within_the_resolution_in_any_order(answers, random):
    form = form_of(LIKE, len(answers))
    vectors = [quantized(as_vector(form, answer), form.people) for answer in answers]
    plain, total, again = None, None, None
    for answer in answers:
        plain = sums.add(plain, answer)
    for vector in vectors:
        total = added(total, vector)
    for vector in random.sample(vectors, len(vectors)):
        again = added(again, vector)
    assert total.equal(again)
    near, made = sums.finish(plain), as_total(form, opened(total), LIKE)
    assert [each is None for each in near["models"]] == [each is None for each in made["models"]]
    for ours, theirs in zip(leaves(near), leaves(made), strict=True):
        if ours is not None:
            bound = len(answers) * 2.0 ** -(BITS + 1)
            torch.testing.assert_close(
                torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64),
                rtol=1e-12, atol=bound,
            )  # fmt: skip


@examples(100)
@given(st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=20))
def test_numbers_of_the_grid_come_back_exactly(whole):
    numbers = torch.tensor(whole, dtype=torch.int64)
    assert quantized(opened(numbers), 1).equal(numbers)


@examples(100)
@given(st.lists(st.floats(-(2.0**29) / 5, 2.0**29 / 5, exclude_max=True, exclude_min=True), min_size=5, max_size=5))
def test_a_sum_of_what_fits_never_wraps_around(values):
    total = None
    for value in values:
        total = added(total, quantized(torch.tensor([value], dtype=torch.float64), 5))
    assert abs(float(opened(total)) - sum(values)) < 1e-4


def test_an_empty_sum_weighs_nothing():
    form = form_of(LIKE, 3)
    made = as_total(form, torch.zeros(form.size, dtype=torch.float64), LIKE)
    assert made["models"] == [None] * SLOTS
    assert made["n"] == Sum(0.0, 0.0)
