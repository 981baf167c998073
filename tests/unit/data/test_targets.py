"""Rows without classes, and features and targets that follow from the training rows."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import IID, Dirichlet, HeldOutClients, Partition, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows, with_target
from fedtide.data.saved import Saved, save
from fedtide.data.sources import CSV, NPZ, Gaussians
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.frames import table
from fedtide.data.targets import TARGET_WORDS, Counts, Labels, Number, Quantiles
from fedtide.laws.case import toy
from fedtide.learn.target import CLASSES
from fedtide.report.topics import check_measures
from fedtide.runs.build import host_of, metrics_of

NOW = Moment(0, 1)


def written(folder: Path, text: str) -> str:
    (folder / "data.csv").write_text(text)
    return str(folder / "data.csv")


def hours(days: int, value: Any) -> Rows:
    """An hourly series of one client."""
    time = torch.arange(24.0 * days, dtype=torch.float64) * 3600
    x = torch.zeros(len(time), 1)
    y = torch.zeros(len(time), dtype=torch.int64)
    return with_target(Rows("hours", x, y, 1, time=time, value=torch.as_tensor(value, dtype=torch.float32)), Number())


def test_a_column_of_numbers_is_a_target_where_it_is_said(tmp_path):
    path = written(tmp_path, "a,load\n1,10.5\n2,20.5\n3,30.5\n4,40.5\n")
    rows = with_target(CSV(path, label="load").load(None, 0, measured=True), Number())
    assert rows.value is not None
    assert rows.value.tolist() == [10.5, 20.5, 30.5, 40.5]
    assert rows.target.center == 25.5
    assert rows.y.tolist() == sorted(rows.y.tolist())
    assert rows.classes == len(rows.target.edges) + 1
    with pytest.raises(FedtideError, match=r"row 2: label: found '10\.5', .*data.target = 'number' takes"):
        CSV(path, label="load").load(None, 0)


def test_several_labels_are_several_columns(tmp_path):
    path = written(tmp_path, "a,wind,rain\n1,0,1\n2,1,1\n3,0,0\n")
    rows = with_target(CSV(path, label=("wind", "rain")).load(None, 0, measured=True), Labels())
    assert rows.value is not None
    assert rows.value.tolist() == [[0, 1], [1, 1], [0, 0]]
    assert (rows.y.tolist(), rows.classes, rows.shape) == ([1, 0, 2], 3, (1,))
    with pytest.raises(FedtideError, match=r"data.source.label: found \['wind', 'rain'\], allowed: one column"):
        CSV(path, label=("wind", "rain")).load(None, 0)
    with pytest.raises(FedtideError, match=r"shape of y: found .*allowed: .*rows,.* with target 'number'"):
        with_target(CSV(path, label=("wind", "rain")).load(None, 0, measured=True), Number())


def test_values_come_from_npz_and_from_tables_too(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.linspace(0, 1, 6)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    rows = NPZ(str(tmp_path / "rows.npz")).load(None, 0, measured=True)
    assert rows.value is not None
    np.testing.assert_allclose(rows.value.numpy(), y)
    table = ft.data.table({"a": x[:, 0], "load": y}, label="load", quiet=True)
    assert table.said[1].startswith("label: load (numbers from 0 to 1)")
    assert table.target.kind == "number"
    whole = ft.data.table({"a": x[:, 0], "bikes": [0, 3, 0, 2, 1, 4]}, label="bikes", target="counts", quiet=True)
    assert whole.target.kind == "counts"
    plain = ft.data.table({"a": x[:, 0], "bikes": [0, 3, 0, 2, 1, 4]}, label="bikes", target="classes", quiet=True)
    assert plain.target == CLASSES


def test_clients_hold_values_and_whoever_reads_labels_has_bins():
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(200, generator=draw)
    people = ft.population(torch.randn(200, 3), value, Dirichlet(clients=4, alpha=0.1), target="number")
    shard = people.shard(0, NOW)
    assert shard.y.dtype == torch.float32
    assert torch.equal(shard.y, value[shard.ids.long()])
    assert torch.equal(shard.labels, people.rows.y[shard.ids.long()])
    assert torch.equal(shard.pick(slice(0, 2)).labels, shard.labels[:2])
    shares = people.label_shares(people.clients, NOW)
    assert shares.shape == (4, people.rows.classes)
    assert float(shares.max()) > 0.3  # ten bins hold a tenth each, and clients few of them
    assert people.commonest(people.clients, NOW, "train") == 0.0


def test_a_simulation_from_python_tells_skill():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=draw)
    y = 50 + 10 * (x @ torch.tensor([1.0, -1.0, 0.5])) + torch.randn(400, generator=draw)
    people = ft.population(x, y, IID(clients=4), target="number")
    task = ft.Task(lambda: nn.Linear(3, people.target.width), target=people.target)
    result = ft.simulate(ft.algorithms.fedavg(task, cohort=4), people, rounds=20, eval_every=20)
    entry = result.lines[-1]["scores"]["train_clients"]
    assert result.accuracy[-1] == entry["skill"] > 0.95  # noise has 1 % of the variance
    assert entry["rmse"] == pytest.approx(1.0, rel=0.3)
    assert entry["mae"] < entry["rmse"]
    assert "skill" in result.lines[-1]["participants"]
    with pytest.raises(FedtideError, match=r"target=population.target"):
        ft.simulate(ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(3, 1)), cohort=4), people, rounds=1)


def test_yesterday_says_the_value_of_the_same_hour():
    """A day's curve comes again but for noise of one hour: yesterday errs twice, in that hour and a day later."""
    curve = np.tile(np.sin(np.arange(24) * 2 * math.pi / 24), 16)
    curve[200] += 1.0
    rows = hours(16, curve)
    earlier = rows.earlier
    assert earlier["yesterday"][:24].tolist() == [-1] * 24
    assert earlier["yesterday"][24:].tolist() == list(range(24 * 15))
    assert earlier["last_week"][168:].tolist() == list(range(24 * 16 - 168))
    people = build(rows, IID(clients=1))
    found = people.baselines(people.clients, NOW, "train")
    held = people.held(0, NOW, "train").long()
    kept = held.numpy()
    off = curve[kept] - np.where(kept >= 24, curve[kept - 24], curve.mean())  # the first day has no yesterday
    rival = curve[kept] - curve.mean()
    assert found["yesterday"] == pytest.approx(1 - (off**2).sum() / (rival**2).sum(), abs=1e-5)
    assert found["yesterday"] > 0.85


@pytest.mark.parametrize(("held", "names"), [([0, 1, 24], []), ([0, 24], ["yesterday"]), ([0, 24, 25], ["yesterday"])])
def test_a_rival_is_left_out_if_fewer_than_half_of_the_rows_have_its_value(held, names):
    """Hours 24 and 25 have a yesterday, hours 0 and 1 have none."""
    people = build(hours(2, np.arange(48.0)), IID(clients=1))
    people = replace(people, parts={**people.parts, "train": Ragged.of([held])})
    assert list(people.baselines(people.clients, NOW, "train")) == names


@pytest.mark.parametrize(("delay", "rivals"), [(None, 2), ("1d", 2), ("25h", 1), ("7d", 1), ("8d", 0)])
def test_a_rival_says_no_value_that_is_not_known_yet(delay, rivals):
    rows = hours(16, np.sin(np.arange(24 * 16)))
    shift = ft.Shift(what=ft.shift.Calendar(window="1d", hold="all", delay=delay))
    people = build(rows, IID(clients=1), split=Split(val=0.0), shift=shift)
    assert len(people.baselines(people.clients, Moment(5, 15), "test")) == rivals


def test_there_is_no_yesterday_without_a_clock_or_where_times_come_twice():
    assert hours(3, np.arange(72.0)).earlier["last_week"].tolist() == [-1] * 72
    rows = hours(2, np.arange(48.0))
    twice = torch.zeros(48, dtype=torch.float64)
    people = build(with_target(Rows("twice", rows.x, rows.y * 0, 1, time=twice, value=rows.value), Number()), IID(2))
    assert people.baselines(people.clients, NOW, "train") == {}


def test_yesterday_is_the_nearest_row_where_clocks_are_a_little_off():
    """Times are seconds off by up to 10 minutes; hour 30 is missing, so hour 54 has no yesterday."""
    late = (torch.arange(72.0, dtype=torch.float64) * 397) % 1200 - 600
    rows = hours(3, np.arange(72.0))
    kept = torch.tensor([hour for hour in range(72) if hour != 30])
    found = replace(rows, time=rows.time + late).pick(kept).earlier["yesterday"]
    assert kept[found[found >= 0]].tolist() == [hour - 24 for hour in kept.tolist() if hour >= 24 and hour != 54]


def test_a_row_a_week_apart_is_not_its_own_yesterday():
    weekly = hours(4, np.arange(96.0))
    weekly = replace(weekly, time=weekly.time * 24 * 7)
    assert weekly.earlier["yesterday"].tolist() == [-1] * 96
    assert weekly.earlier["last_week"].tolist() == [-1, *range(95)]


def test_domains_at_the_same_time_are_series_of_their_own():
    rows = with_target(Gaussians(samples=60, dims=2, every=43_200.0).load(None, 0, measured=True), Counts())
    assert rows.earlier["yesterday"][:4].tolist() == [-1, -1, 0, 1]
    assert rows.earlier["yesterday"][60:64].tolist() == [-1, -1, 60, 61]


NUMBERS: dict[str, Any] = {"data": {"target": "number"}}


@pytest.mark.parametrize(
    ("algorithm", "options", "changes", "line"),
    [
        ("fedavg", {"loss": "wsm"}, NUMBERS, "loss: found 'wsm'.*rows have no classes.*the loss of data.target"),
        ("fedem", {}, NUMBERS, r"found 'fedem', allowed: .*data.target = .*gaussian"),
        ("aem", {}, NUMBERS, "mixture: found 'mixture', allowed: .*data.target"),
        ("min-loss", {}, NUMBERS, "by the branch that is more certain of a class"),
        ("fedavg", {}, {**NUMBERS, "shift": {"how": {"kind": "label-swaps", "every": 2, "fraction": 0.5}}},
         "shift.how.kind: found 'label-swaps', but it exchanges labels, and rows have no classes"),
        ("fedavg", {}, {"data": {"target": "labels"}}, "shape of y"),
    ],
)  # fmt: skip
def test_what_needs_classes_is_refused_before_a_run(algorithm, options, changes, line):
    experiment = toy(algorithm, options, **changes)
    with pytest.raises(FedtideError, match=line):
        host_of(experiment, experiment.method[0], 0)


def test_metrics_of_classes_are_refused_and_own_errors_are_recorded():
    experiment = toy("fedavg", **NUMBERS)
    assert [metric.name for metric in metrics_of(experiment)][0::9] == ["skill", "rmse"]
    assert experiment.metric_units == {"mae": "number", "rmse": "number"}
    mine = {"kind": "python", "function": "mine:cost", "name": "mae"}
    with pytest.raises(FedtideError, match=r"metrics\[0\].name: found 'mae'"):
        check_measures(toy("fedavg", metrics=[mine], **NUMBERS))
    assert (TARGET_WORDS["labels"].score, TARGET_WORDS["counts"].score) == ("accuracy", "skill")


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
