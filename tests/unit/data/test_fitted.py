"""Scales, means for gaps and categories are those of the rows on which clients train."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.data.groups import HeldOutClients, Split
from fedtide.data.partition import IID, Partition
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows, with_target
from fedtide.data.saved import Saved, save
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.frames import table
from fedtide.data.targets import Counts, Number, Quantiles

ROWS = 120
OWNER = np.arange(ROWS) % 4
SEEDS = range(3)

Columns = dict[str, np.ndarray]


def columns(seed: int = 0) -> Columns:
    """Two numbers, the second with gaps, and a category."""
    draw = np.random.default_rng(seed)
    number = draw.normal(50, 9, ROWS)
    gaps = np.where(draw.random(ROWS) < 0.2, np.nan, draw.normal(3, 1, ROWS))
    return {"a": number, "b": gaps, "wind": draw.choice(["N", "E", "S"], ROWS)}


def from_table(made: Columns) -> Rows:
    shown = {**made, "label": np.arange(ROWS) // 4 % 2, "user": OWNER}
    named = {"label": "label", "client": "user", "time": "", "features": [*made]}
    return table(shown, **named, missing="mean", scaled=True, quiet=True)


def from_npz(made: Columns) -> Rows:
    return from_arrays("toy", made["a"][:, None], np.arange(ROWS) // 4 % 2, client=OWNER, scaled=True)


def people(rows: Rows, seed: int = 0, partition: Partition | None = None, **settings) -> Population:
    return build(rows, partition, **{"split": Split(val=0.2, test=0.2), **settings}, seed=seed)


def elsewhere(made: Columns, rows: torch.Tensor) -> Columns:
    """Other features in all rows but these."""
    others = np.setdiff1d(np.arange(ROWS), rows.numpy())
    changed = {name: column.astype(object if name == "wind" else float) for name, column in made.items()}
    changed["a"][others], changed["b"][others], changed["wind"][others] = 1e4 * others, -7e3, "a storm"
    return changed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", [
    {}, {"partition": IID(clients=6)}, {"held_out_clients": HeldOutClients(1, labeled=0.5)}, {"public_samples": 20},
], ids=["natural", "iid", "held-out clients", "public rows"])  # fmt: skip
@pytest.mark.parametrize("source", [from_table, from_npz])
def test_other_rows_decide_nothing_about_those_for_training(source: Callable[[Columns], Rows], settings, seed):
    made = columns(seed)
    one = people(source(made), seed, **settings)
    other = people(source(elsewhere(made, one.trained_on)), seed, **settings)
    assert torch.equal(one.trained_on, other.trained_on)
    assert len(one.trained_on) < ROWS
    assert torch.equal(one.rows.x[one.trained_on], other.rows.x[one.trained_on])
    there = one.rows.x[one.trained_on][:, 0]
    assert (float(there.mean()), float(there.std(unbiased=False))) == pytest.approx((0, 1), abs=1e-5)


@pytest.mark.parametrize("source", [from_table, from_npz])
def test_where_all_rows_are_for_training_they_stay_as_they_were_read(source):
    rows = source(columns())
    assert torch.equal(people(rows, split=Split(val=0.0, test=0.0)).rows.x, rows.x)


def test_a_category_that_only_other_rows_have_is_none_of_those_there_are():
    made = columns()
    known = people(from_table(made)).trained_on
    found = people(from_table(elsewhere(made, known))).rows
    other = torch.ones(ROWS, dtype=torch.bool).index_fill_(0, known, False)
    assert found.shape == (5,)
    assert bool((found.x[other, 2:] == 0).all())
    assert bool((found.x[~other, 2:].sum(1) == 1).all())


def test_a_column_without_a_number_to_train_on_is_one_line():
    made = columns()
    made["b"][people(from_table(made)).trained_on] = np.nan
    with pytest.raises(FedtideError, match=r"table: b: no number in the \d+ rows known when training begins"):
        people(from_table(made))


def test_the_earliest_rows_decide_where_rows_have_a_time():
    rows = from_arrays("toy", OWNER[:, None], OWNER % 2, client=OWNER, time=3600 * np.arange(ROWS), scaled=True)
    assert people(rows).rows.x is rows.x
    made = {**columns(), "label": OWNER % 2, "user": OWNER, "when": 3600 * np.arange(ROWS)}
    named = {"label": "label", "client": "user", "time": "when", "features": ["a", "b", "wind"]}
    rows = table(made, **named, missing="mean", scaled=True, quiet=True)
    assert people(rows).rows.x is rows.x


def test_features_that_were_put_in_their_place_stay():
    rows = from_table(columns())
    assert torch.equal(people(replace(rows, x=rows.x[:, :2])).rows.x, rows.x[:, :2])


def test_some_of_the_rows_are_read_as_a_table_of_them_would_be():
    made, few = columns(), torch.arange(0, ROWS, 2)
    picked = from_npz(made).pick(few)
    alone = from_arrays("toy", made["a"][few][:, None], picked.y.numpy(), client=OWNER[few], scaled=True)
    assert torch.equal(people(picked).rows.x, people(alone).rows.x)


@pytest.mark.parametrize("source", [from_table, from_npz])
def test_another_process_and_a_replay_have_the_same_features(source, tmp_path):
    rows = source(columns())
    one = people(rows)
    save(one, tmp_path / "0.safetensors", rounds=1, cohort=2)
    again = people(rows, seed=5, partition=Saved(str(tmp_path / "0.safetensors")))
    others = [again, people(pickle.loads(pickle.dumps(rows))), people(one.rows)]
    assert all(torch.equal(other.rows.x, one.rows.x) for other in others)


@pytest.mark.parametrize("source", [from_table, from_npz])
def test_seeds_have_features_of_their_own_and_the_same_data(source):
    rows = source(columns())
    found = [people(rows, seed).rows for seed in SEEDS]
    assert not torch.equal(found[0].x, found[1].x)
    assert {made.digest for made in found} == {rows.digest}
    assert rows.digest != source({**columns(), "a": np.arange(ROWS) ** 2.0}).digest


@pytest.mark.parametrize("setting", [Number(), Number("huber"), Quantiles(), Counts()])
def test_numbers_are_standardized_by_the_training_rows_alone(setting):
    values = np.random.default_rng(0).integers(0, 30, ROWS).astype(float)

    def dealt(values: np.ndarray, **settings) -> Population:
        rows = from_arrays("toy", np.ones((ROWS, 1)), values, client=OWNER, measured=True)
        return people(with_target(rows, setting), **settings)

    one = dealt(values)
    others = np.setdiff1d(np.arange(ROWS), one.trained_on.numpy())
    changed = dealt(np.where(np.isin(np.arange(ROWS), others), values + 1000, values)).target
    assert (changed.center, changed.scale) == (one.target.center, one.target.scale)
    assert one.target.center == pytest.approx(values[one.trained_on].mean())
    whole = dealt(values, split=Split(val=0.0, test=0.0))
    assert whole.target.center == values.mean()
    assert replace(one.target, center=0.0, scale=1.0) == replace(whole.target, center=0.0, scale=1.0)


def test_counts_of_which_none_is_for_training_are_one_line():
    values = np.random.default_rng(0).integers(1, 30, ROWS).astype(float)
    rows = from_arrays("toy", np.ones((ROWS, 1)), values, client=OWNER, measured=True)
    values[people(with_target(rows, Counts())).trained_on] = 0
    rows = from_arrays("toy", np.ones((ROWS, 1)), values, client=OWNER, measured=True)
    with pytest.raises(FedtideError, match=r"data.target: found 0 in all rows that are known"):
        people(with_target(rows, Counts()))
