"""Bounds and noise of sums: golden numbers, a naive implementation, and properties of random totals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Slotted, Weighted
from fedtide.core.errors import FedtideError
from fedtide.wire.clip import HALF, Adaptive, Clip, adapted, with_bounds
from fedtide.wire.noise import Group, deviations, groups_of, noised
from fedtide.wire.vector import Form, Leaf, as_vector, opened, quantized

BOUNDS = {"delta": 1.0, "models": 2.0, "loss": 5.0}


def naive(total, bounds):
    """What a client sends, leaf by leaf: lists of (numbers, weight) by slot."""
    sent = {}
    for name, leaf in total.items():
        parts = {0: leaf} if isinstance(leaf, Weighted) else leaf.parts
        whole = sum(part.weight for part in parts.values())
        pairs = {}
        for k, part in parts.items():
            share = part.weight / whole if whole else 0.0
            pairs[k] = ([share * x for x in np.asarray(part.value, float).ravel()], share)
        length = math.sqrt(sum(x * x for values, _ in pairs.values() for x in values))
        factor = min(1.0, bounds[name] / length) if length else 1.0
        scaled = {k: ([factor * x for x in values], share) for k, (values, share) in pairs.items()}
        sent[name] = {0: (scaled[0][0], 1.0)} if isinstance(leaf, Weighted) else scaled
    return sent


numbers = st.floats(-1e3, 1e3, width=32)
weights = st.sampled_from([0.0, 0.5, 1.0, 7.0, 300.0])


@st.composite
def totals(draw):
    delta = Weighted(torch.tensor(draw(st.lists(numbers, min_size=3, max_size=3))), draw(weights))
    slots = draw(st.lists(st.integers(0, 3), unique=True, max_size=4))
    models = {k: Weighted(torch.tensor([draw(numbers), draw(numbers)]), draw(weights)) for k in slots}
    return {"delta": delta, "models": Slotted(models, 4), "loss": Weighted(draw(numbers), draw(weights))}


FORM = Form((Leaf("delta", 3), Leaf("models", 2, slots=4), Leaf("loss", 1)), people=10)


@given(totals())
def test_clipped_as_by_hand_and_never_beyond_a_bound(total):
    sent = Clip(BOUNDS).apply(as_vector(FORM, total), FORM)
    tables = FORM.tables(sent)
    for name, parts in naive(total, BOUNDS).items():
        expected = torch.zeros_like(tables[name])
        for k, (values, weight) in parts.items():
            expected[k] = torch.tensor([*values, weight])
        torch.testing.assert_close(tables[name], expected, rtol=1e-8, atol=1e-8)
    for name, table in FORM.tables(opened(quantized(sent, 10))).items():  # what is added, after rounding
        assert float(table[:, :-1].norm()) <= BOUNDS[name]
        assert float(table[:, -1].norm()) <= 1.0


def test_a_client_by_hand():
    """Lengths 5 and 0.5; in slots (3, 0) with 1/4 and (0, 4) with 3/4: (.75, 3), of length 3.0923."""
    total = {
        "delta": Weighted(torch.tensor([0.0, 3.0, 4.0]), 4.0),
        "models": Slotted({1: Weighted(torch.tensor([3.0, 0.0]), 1), 3: Weighted(torch.tensor([0.0, 4.0]), 3)}, 4),
        "loss": Weighted(0.5, 2.0),
    }
    tables = FORM.tables(Clip(BOUNDS).apply(as_vector(FORM, total), FORM))
    assert tables["delta"].tolist() == [pytest.approx([0.0, 0.6, 0.8, 1.0])]
    f = 2 / math.hypot(0.75, 3.0)
    assert tables["models"].tolist() == [
        [0, 0, 0], pytest.approx([0.75 * f, 0.0, 0.25]), [0, 0, 0], pytest.approx([0.0, 3 * f, 0.75]),
    ]  # fmt: skip
    assert tables["loss"].tolist() == [[0.5, 1.0]]


def test_who_has_no_numbers_sends_zeros_and_counts():
    form = Form((Leaf("delta", 2),), 1)
    for bad in (math.nan, math.inf, 0.0):
        sent = Clip({"delta": 1.0}).apply(torch.tensor([bad, 0.0, 0.0 if bad == 0 else 1.0]), form)
        assert sent.tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(FedtideError, match=r"wire.privacy.clip.delta: found 1000000000.0, allowed: below 5.37e\+08"):
        Clip({"delta": 1e9}).apply(torch.ones(3), form)


@pytest.mark.parametrize("slots", [1, 2])
def test_who_has_a_weight_without_an_inverse_sends_zeros_and_counts(slots):
    form = Form((Leaf("models", 1, slots=slots),), 3)
    vector = torch.tensor([1e-309, 1e-310, 0.0, 0.0][: form.size], dtype=torch.float64)
    assert (
        quantized(Clip({"models": 1.0}).apply(vector, form), 3).tolist()
        == [0, 2**34 if slots == 1 else 0, 0, 0][: form.size]
    )


def test_every_leaf_needs_a_bound():
    with pytest.raises(FedtideError, match=r"wire.privacy.clip: no bound of 'loss', which clients send too"):
        Clip({"delta": 1.0, "models": 1.0}).apply(torch.zeros(FORM.size), FORM)
    assert Clip({"total": 0.5}).apply(torch.ones(2).double(), Form((Leaf("", 1),), 1))[0] < 0.5
    with pytest.raises(FedtideError, match="negative weight"):
        Clip({"delta": 1.0}).apply(torch.tensor([1.0, 1.0, -1.0]), Form((Leaf("delta", 2),), 1))


def test_a_bound_finds_its_quantile():
    """Lengths 1 to 100: three quarters of them are within 75 or a little more."""
    lengths, bound = np.arange(1, 101), 0.1
    for _ in range(200):
        bound = adapted(bound, float(np.mean(lengths <= bound)), 0.75, 0.2)
    assert 74 <= bound <= 77


def test_deviations_make_one_multiplier_and_waste_least():
    """1/z^2 = sum C^2/s^2, and no other such deviations have a smaller sum of relative errors."""
    from scipy.optimize import minimize  # here, as it takes long to import

    groups = {"delta": Group(1000, 1.0), "loss": Group(1, 5.0), "models#": Group(2, 1.0)}
    z = 1.7
    ours = deviations(groups, z)
    assert sum((g.bound / ours[name]) ** 2 for name, g in groups.items()) == pytest.approx(1 / z**2)

    def relative(deviation):
        return sum(s * math.sqrt(g.size) / g.bound for s, g in zip(deviation, groups.values(), strict=True))

    def of(logits):  # any parts that add up to one
        parts = np.exp(logits) / np.exp(logits).sum()
        return [z * g.bound / math.sqrt(part) for g, part in zip(groups.values(), parts, strict=True)]

    best = minimize(lambda logits: relative(of(logits)), np.zeros(3))
    assert relative(ours.values()) == pytest.approx(best.fun, rel=1e-4)
    one_for_all = z * math.sqrt(sum(g.bound**2 for g in groups.values()))
    assert ours["delta"] < one_for_all / 3


def test_noise_by_hand():
    """Groups of 3, 8, 4 and 1: every number gets its deviation times what was drawn, a weight without slots nothing."""
    bounds, z = BOUNDS, 0.1
    sizes = {"delta": 3, "models": 8, "models#": 4, "loss": 1}
    assert {name: group.size for name, group in groups_of(FORM, bounds).items()} == sizes
    whole = sum(size ** (1 / 3) for size in sizes.values())
    s = {
        name: z * bound * math.sqrt(whole / sizes[name] ** (1 / 3))
        for name, bound in {**bounds, "models#": 1.0}.items()
    }
    total = torch.zeros(FORM.size, dtype=torch.float64)
    FORM.tables(total)["models"][:, -1] = torch.tensor([10.0, 2.9, 3.1, 0.0]) * s["models#"]
    FORM.tables(total)["delta"][:, -1] = 5.0
    noise = torch.ones_like(total)
    FORM.tables(noise)["models"][:, -1] = 0.0
    tables = FORM.tables(noised(total, FORM, bounds, z, noise))
    torch.testing.assert_close(tables["delta"][0], torch.tensor([s["delta"]] * 3 + [5.0]).double())
    torch.testing.assert_close(tables["loss"][0], torch.tensor([s["loss"], 0.0]).double())
    each = s["models"]
    expected = [[each, each, 10 * s["models#"]], [0, 0, 0], [each, each, 3.1 * s["models#"]], [0, 0, 0]]
    torch.testing.assert_close(tables["models"], torch.tensor(expected).double())


@given(totals())
def test_one_client_moves_a_release_by_one_over_z(total):
    """The distance between sums with and without a client, in deviations of their noise."""
    z = 2.5
    scale = deviations(groups_of(FORM, BOUNDS), z)
    sent = opened(quantized(Clip(BOUNDS).apply(as_vector(FORM, total), FORM), 10))
    squared = 0.0
    for name, table in FORM.tables(sent).items():
        squared += float((table[:, :-1] / scale[name]).square().sum())
        if len(table) > 1:
            squared += float((table[:, -1] / scale[f"{name}#"]).square().sum())
    assert math.sqrt(squared) <= 1 / z * (1 + 1e-12)


@pytest.mark.parametrize(("said", "fits"), [(HALF, True), (-HALF, True), (0.9, False), (-2 * HALF, False)])
def test_a_client_says_once_whether_it_was_within(said, fits):
    adaptive = {"delta": Adaptive(0.5, 0.2)}
    form = with_bounds(Form((Leaf("delta", 2),), 10), {"delta": 1.0})
    sent = Clip({"delta": 1.0}, adaptive).apply(torch.zeros(form.size, dtype=torch.float64), form)
    form.tables(sent)["delta?"][0, 0] = said
    assert (Clip({"delta": 1.0}, adaptive).fault(sent, form, 1) is None) == fits
