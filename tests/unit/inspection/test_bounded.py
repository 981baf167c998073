"""Bounded questions between clients: no client moves a sum by more than 1, and noise leaves no false word."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Shard
from fedtide.core.rng import Rng
from fedtide.inspection.answers import DISTANCE
from fedtide.inspection.bounded import (
    HOURS,
    PARTS,
    VALUES,
    Interval,
    Reading,
    State,
    asked_by,
    bounded_answers,
    distance_between,
    far_terms,
    length_of,
    nearest_shares,
    noise_on,
    share_terms,
)
from fedtide.inspection.row_sums import shares_apart
from helpers.planted import WORLDS, expected, planted, positive
from helpers.planted_clients import BOUNDS, answered, answered_with_noise, bounded_sums

SHARES = {"stage": "shares", "seed": 1, "classes": 3}


def shard(label, seconds) -> Shard:
    label = torch.tensor(label)
    time = None if seconds is None else torch.tensor(seconds, dtype=torch.float64)
    return Shard(torch.zeros(len(label), 1), label, torch.arange(len(label)), time)


# -- a client ----------------------------------------------------------------------------------------------------------


rows = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.none() | st.lists(st.floats(-1e9, 4e9), min_size=n, max_size=n),
    )
)


@given(rows, st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.lists(st.floats(-2, 2), min_size=8, max_size=8))
def test_no_client_moves_a_value_by_more_than_1(held, labels, hours):
    client = shard(*held)
    means = {"labels": torch.tensor(labels).double(), "hours": torch.tensor(hours).double()}
    asked = asked_by(State(3, 1, 1, means, (9.0,)))
    terms = share_terms(client, SHARES) | far_terms(client, asked, Rng(0))
    assert set(terms) == set(VALUES)
    for name, value in terms.items():
        assert np.linalg.norm(value) <= 1 + 1e-9, name


def test_shares_and_moves_by_hand():
    # Labels 0, 0, 1, 1 at six-hour steps of a day: each part holds one row.
    terms = share_terms(shard([0, 0, 1, 1], [0.0, 6 * 3600.0, 12 * 3600.0, 18 * 3600.0]), SHARES)
    assert terms["labels"].tolist() == [0.5, 0.5, 0.0]
    assert terms["hours"].tolist() == [0.25, 0, 0.25, 0, 0.25, 0, 0.25, 0]
    assert terms["parts"].tolist() == [[0.125, -0.125, 0]] * 2 + [[-0.125, 0.125, 0]] * 2
    # All at once: one part, which holds the mix of all times.
    assert not np.any(share_terms(shard([0, 0, 1, 1], [5.0] * 4), SHARES)["parts"])
    # Classes beyond those that are told apart are one with the last.
    assert share_terms(shard([0, 4], None), SHARES)["labels"].tolist() == [0.5, 0.0, 0.5]


def test_distance_and_chance_by_hand():
    # All hold label 0 and 1 alike; a client with 0 alone is at distance 1/2. One draw of one row is, too.
    pooled = torch.tensor([0.5, 0.5, 0.0]).double()
    asked = {"stage": "far", "seed": 1, "classes": 3, "labels": pooled, "hours": torch.full((HOURS,), 1 / HOURS)}
    terms = far_terms(shard([0], None), asked, Rng(0))
    assert (terms["labels_far"], terms["labels_chance"]) == ([0.0], [0.5])
    assert far_terms(shard([0] * 400, None), asked, Rng(0))["labels_far"][0] == pytest.approx(0.48, abs=0.02)


# -- what noise leaves sure --------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 10**6))
def test_noise_on_shares_moves_a_distance_no_farther_than_is_said(weights, seed):
    draw = np.random.default_rng(seed)
    true = (np.array(weights) + 0.01) / (np.sum(weights) + 0.04)
    noise = draw.normal(size=4) * 0.03
    found = nearest_shares(true + noise)
    assert found.sum() == pytest.approx(1.0)
    counts = draw.multinomial(30, true)
    moved = abs(shares_apart(counts, found) - shares_apart(counts, true))
    assert moved <= 0.5 * np.sqrt(4) * np.linalg.norm(noise) + 1e-9  # of which `length_of` is the quantile


def test_the_length_of_noise_is_passed_once_in_thousands():
    draw = np.random.default_rng(0)
    for size in (1, 4, 16):
        half = 0.5 * np.abs(draw.normal(size=(20_000, size))).sum(1)
        assert half.max() < 1.1 * length_of(1.0, size)


@given(
    st.floats(0, 0.6), st.floats(0, 0.3), st.floats(-4, 4), st.floats(-4, 4), st.floats(-3, 3), st.floats(-2, 2)
)  # fmt: skip
def test_the_interval_has_the_true_distance(beyond, chance, off, other, moved, by_chance):
    noise, length = 0.01, 0.02
    found = distance_between(
        beyond + noise * off + length * moved, chance + noise * other + length * by_chance, noise, length, 10**9
    )
    true = np.sqrt((beyond + chance) ** 2 - chance**2)
    assert found.low <= true + 1e-9
    assert true <= found.high + 1e-9
    assert found.level(DISTANCE) in (None, Interval(true, true).level(DISTANCE))


def test_noise_has_the_parts_of_its_sum():
    means = {name: torch.zeros(size) for name, size in zip(VALUES, (4, HOURS, 4 * PARTS, 1, 1, 1, 1), strict=True)}
    noise = noise_on(State(4, 1, 2, means, (9.0, 9.0)), BOUNDS, 3.0)
    assert noise["labels_far"] == noise["hours_chance"] == pytest.approx(6.0)  # 3 * sqrt(4): four parts are equal
    for stage in (VALUES[:3], VALUES[3:]):  # one client of length 1 moves a sum by 1 / 3 of its noise
        assert sum(1 / noise[name] ** 2 for name in stage) == pytest.approx(1 / 9)


def test_drift_is_said_if_it_is_surely_strong():
    parts = torch.zeros(PARTS, 2).double()
    parts[:2], parts[2:] = torch.tensor([0.125, -0.125]), torch.tensor([-0.125, 0.125])  # a distance of 1/2
    assert Reading({"parts": parts}, {"parts": 0.0}, 1000.0).drift().level == "strong"
    assert Reading({"parts": parts}, {"parts": 0.1}, 1000.0).drift() is None
    assert Reading({"parts": parts}, {"parts": 0.0}, 10.0).drift() is None  # chance may be as large
    assert Reading({"parts": parts / 4}, {"parts": 0.0}, 1000.0).drift() is None


# -- words -------------------------------------------------------------------------------------------------------------


def test_without_noise_the_distances_are_those_of_the_pooled_table():
    table = planted("labels 1", 0)
    keep = np.concatenate([np.flatnonzero(table.client == name)[:60] for name in np.unique(table.client)])
    columns = {name: getattr(table, name)[keep] for name in ("label", "features", "client", "time")}
    table = replace(table, **columns)  # clients that hold alike count alike
    far = answered(table).clients.labels
    state, _ = bounded_sums(table, 1e6)
    beyond, chance = (float(state.means[f"labels_{name}"]) for name in ("far", "chance"))
    assert beyond + chance == pytest.approx(far.seen, abs=1e-3)
    assert chance == pytest.approx(far.chance, rel=0.05)


def check(world: str, seed: int, clients: int, epsilon: float) -> dict[str, str]:
    must, may = expected(world)
    found = answered_with_noise(planted(world, seed, 50 * clients, clients), epsilon, seed)
    assert positive(found) <= may, f"{world}, seed {seed}: {found}"
    levels = {one.question: one.level for one in found if one.level != "not asked"}
    assert not {name for name, level in levels.items() if level == "no"} & {name.split(":")[0] for name in must}
    return levels


def test_few_clients_hide_everything():
    assert check("labels 0.3", 0, 24, 4.0) == {}
    assert "(24 clients, epsilon 4)" in answered_with_noise(planted("labels 0.3", 0), 4.0)["labels"].said


def test_words_that_noise_leaves_sure():
    assert check("labels 0.3", 1, 150, 20.0) == {"labels": "strong"}
    assert check("nothing", 1, 150, 1000.0) == {"labels": "no", "presence": "no"}
    assert check("gradual", 1, 600, 1000.0)["drift"] == "strong"


@pytest.mark.thorough
@pytest.mark.parametrize("clients", [24, 500])
@pytest.mark.parametrize("world", WORLDS)
def test_no_word_is_false_at_epsilon_4(world, clients):
    for seed in range(3):
        check(world, seed, clients, 4.0)


def test_a_site_that_opened_nothing_has_no_words():
    found = bounded_answers(State(3, 1, 2, {}, (0.0, 0.0)), {}, "site", 4.0)
    assert {one.level for one in found} == {"not asked"}
    assert "0 clients" in str(found)
