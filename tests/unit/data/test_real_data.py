"""The real data sets: sizes, classes, checksums, orientation. Skipped where they are not beside the checkout."""

import csv
import gzip
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtide.core.base import Moment
from fedtide.data.partition import IID, ByDomain, DirichletClass, LabelsInOrder, Natural, Split
from fedtide.data.population_builder import build
from fedtide.data.shift import Shift, Stream
from fedtide.data.sources import CIFAR, CSV, IDX, LEAF, DayNightCharacters, GasSensors, Images, Series, Text
from fedtide.data.sources.published import PUBLISHED, check_published, read_idx

pytestmark = pytest.mark.shared


def real(name: str) -> Path:
    """The data directory, where it has a folder of that name."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    directory = Path(os.environ.get("FEDTIDE_DATA") or beside)
    if not (directory / name).is_dir():
        pytest.skip(f"no folder {directory / name}")
    return directory


@pytest.fixture(scope="module")
def mnist():
    return IDX("mnist").load(real("mnist"), 0)


@pytest.fixture(scope="module")
def letters():
    return IDX("emnist-letters").load(real("emnist-letters"), 0)


@pytest.mark.parametrize("partition", [
    LabelsInOrder(clients=20), DirichletClass(clients=20, alpha=0.1, min_samples=40, tries=1000),
], ids=["pathological", "practical"])  # fmt: skip
def test_merged_clothes_are_dealt_as_in_pfllib(partition):
    """All 70,000 rows are dealt to 20 clients, who train on three quarters each."""
    rows = IDX("fashion-mnist").load(real("fashion-mnist"), 0)
    population = build(rows, partition, split=Split(val=0.0, test=0.25, merge=True))
    train, test = (population.counts(population.clients, part) for part in ("train", "test"))
    assert int((train + test).sum()) == 70_000
    assert int((train + test).min()) >= 40
    assert (((train + test) * 0.25 - test).abs() <= 0.5).all()
    held = population.label_shares(population.clients, Moment(0, 1)) > 0
    assert (held.sum(1) == 2).all() if partition.kind == "labels-in-order" else (held.sum(1) <= 10).all()


def test_color_is_three_equal_channels():
    rows = IDX("fashion-mnist", channels=3).load(real("fashion-mnist"), 0)
    assert rows.shape == (3, 28, 28)
    assert torch.equal(rows.x[:, 0], rows.x[:, 2])


def test_mnist_has_its_published_sizes(mnist):
    assert (len(mnist), mnist.shape, mnist.x.dtype, mnist.classes) == (70_000, (1, 28, 28), torch.uint8, 10)
    assert int(mnist.held_out.sum()) == 10_000
    train = torch.bincount(mnist.y[~mnist.held_out])
    assert train.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.y[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert mnist.y[60_000:60_004].tolist() == [7, 2, 1, 0]
    assert abs(mnist.x[~mnist.held_out].float().mean() / 255 - 0.1307) < 1e-4


@pytest.mark.parametrize("file", PUBLISHED)
def test_checksums_are_the_published_ones(file):
    check_published(real(file.split("/")[0]) / file)


def test_emnist_letters_have_their_published_sizes(letters):
    assert (len(letters), letters.shape, letters.classes) == (145_600, (1, 28, 28), 26)
    assert int(letters.held_out.sum()) == 20_800
    assert torch.bincount(letters.y[~letters.held_out]).tolist() == [4800] * 26
    assert torch.bincount(letters.y[letters.held_out]).tolist() == [800] * 26


def test_bundled_characters_are_pictures_of_mnist_and_upright_emnist(mnist, letters):
    for labels in ("shared", "disjoint"):
        bundled = DayNightCharacters(labels).load(None, 0)
        for domain, source, first in ((0, mnist, 0), (1, letters, 10 if labels == "disjoint" else 0)):
            mine = bundled.pick(bundled.domain == domain)
            known = {(h, y, x.tobytes()) for h, y, x in _pictures(source, int(mine.y.max()) - first)}
            lost = [y for h, y, x in _pictures(mine, 99) if (h, y - first, x.tobytes()) not in known]
            assert lost == []


def _pictures(rows, last: int) -> list:
    """(in the test set, label, pixels) of the rows with labels up to `last`."""
    rows = rows.pick(rows.y <= last)
    return list(zip(rows.held_out.tolist(), rows.y.tolist(), rows.x.numpy(), strict=True))


def test_the_lossless_part_of_cifar_10_is_read():
    directory = real("cifar-10")
    rows = CIFAR("cifar-10").load(directory, 0)
    assert (rows.shape, rows.x.dtype, rows.classes) == ((3, 32, 32), torch.uint8, 10)
    assert (len(rows), int(rows.held_out.sum())) == (8660, 932)
    assert rows.y[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile
    assert rows.x[0, :, 0, 0].tolist() == [59, 62, 63]
    labels = read_idx(directory / "cifar-10" / "cifar10-train-labels-idx1-ubyte.gz")
    batches = [labels[:4000], *(labels[10_000 * k : 10_000 * k + 932] for k in range(1, 5))]
    assert np.array_equal(rows.y[~rows.held_out].numpy(), np.concatenate(batches))
    test = read_idx(directory / "cifar-10" / "cifar10-test-labels-idx1-ubyte.gz")
    assert np.array_equal(rows.y[rows.held_out].numpy(), test[:932])


@pytest.mark.thorough  # decodes 60,000 pictures
def test_cifar_10_as_jpeg_has_its_original_order():
    """Every picture that is there without loss too is at most as far from it as the data's own README says."""
    directory = real("cifar-10")
    labels = [f"cifar-10/cifar10-{part}-labels-idx1-ubyte.gz" for part in ("train", "test")]
    rows = Images("cifar-10/cifar10_jpg_yoongikim.tar.gz", order=tuple(labels)).load(directory, 0)
    assert (rows.shape, rows.x.dtype, rows.classes) == ((3, 32, 32), torch.uint8, 10)
    assert (len(rows), int(rows.held_out.sum())) == (60_000, 10_000)
    for path, part in zip(labels, (~rows.held_out, rows.held_out), strict=True):
        assert np.array_equal(rows.y[part].numpy(), read_idx(directory / path))
    lossless = CIFAR("cifar-10").load(directory, 0)
    batches = [torch.arange(4000), *(10_000 * k + torch.arange(932) for k in range(1, 6))]
    same = rows.pick(torch.cat(batches))
    assert torch.equal(same.y, lossless.y)
    away = (same.x.float() - lossless.x.float()).abs().mean((1, 2, 3))
    assert 5.0 < float(away.mean()) < 6.5
    assert float(away.max()) <= 13.0


def test_the_writers_of_femnist_are_read():
    """The counts are those of the data's own README."""
    rows = LEAF("femnist-leaf", shape=(1, 28, 28), classes=62).load(real("femnist-leaf"), 0)
    assert (rows.shape, rows.x.dtype, rows.classes) == ((1, 28, 28), torch.float32, 62)
    assert rows.client_names == ("f3797_07", "f3793_06", "f3728_28", "f3687_48", "f3785_26")
    assert torch.bincount(rows.client[~rows.held_out]).tolist() == [11, 16, 17, 18, 16]
    assert torch.bincount(rows.client[rows.held_out]).tolist() == [19, 17, 19, 18, 16]
    assert (float(rows.x.min()), float(rows.x.max())) == (0.0, 1.0)
    assert rows.x.mean() > 0.8  # black on white
    population = build(rows, Natural())
    assert population.registered == 5
    assert population.parts["test"].counts.tolist() == [19, 17, 19, 18, 16]


def test_shakespeare_is_read_role_by_role():
    """The counts of roles and plays are those of the data's own README."""
    options = {"text": "speeches", "client": ("play", "role"), "vocabulary": 1000}
    rows = Text("shakespeare/mit_shakespeare_roles.jsonl.gz", **options).load(real("shakespeare"), 0)
    assert (len(rows.client_names), rows.classes, rows.shape) == (1347, 1004, (20,))
    assert len({name.split("/")[0] for name in rows.client_names}) == 37
    first = rows.y[rows.client == rows.client_names.index("hamlet/HAMLET")][0].tolist()
    # "[Aside]  A little more than kin, and less than kind.", his first words
    assert first[4] == first[8] > 3
    assert (first[5], first[10:]) == (3, [2] + [0] * 9)
    train, counts = rows.y[~rows.held_out], torch.bincount(rows.y[~rows.held_out].flatten(), minlength=1004)
    assert (counts[4:-1] >= counts[5:]).all()
    known = counts[4:].sum() / (train > 2).sum()
    assert 0.79 < known < 0.84  # a thousand words make four fifths of what is said
    population = build(rows, Natural(min_samples=20))
    assert population.registered > 400
    assert (population.parts["test"].counts > 0).sum() > 400


def test_two_sites_of_stack_exchange_are_day_and_night():
    directory = real("stackexchange")
    paths = [f"stackexchange/{site}_Posts.xml" for site in ("cardano", "beer")]
    options = {"text": "Body", "client": ("file", "OwnerUserId"), "domain": "file", "time": "CreationDate"}
    sites = {"domains": ("cardano_Posts", "beer_Posts"), "domain_names": ("cardano", "beer")}
    rows = Text(paths, **options, **sites, vocabulary=1000, max_samples=512).load(directory, 0)
    assert rows.domain_names == ("cardano", "beer")
    assert 1300 < len(rows.client_names) <= 701 + 782  # all users of both, but for those that wrote no word
    first, last = ({float(rows.time[rows.domain == k].min()), float(rows.time[rows.domain == k].max())} for k in (1, 0))
    assert min(first) == pytest.approx(1390335965, abs=86_400)  # 2014-01-21
    assert max(last) == pytest.approx(1638576000, abs=2 * 86_400)  # 2021-12-04
    assert int(torch.bincount(rows.client[~rows.held_out]).max()) <= 512
    population = build(rows, Natural(min_samples=20), ByDomain())
    assert population.group_names == ("cardano", "beer")
    assert (torch.bincount(population.group) > 50).all()
    shard = population.shard(0, Moment(0, 1))
    assert torch.equal(shard.mask, shard.y != 0)
    assert (shard.time.diff() >= 0).all()


# -- streams by time stamps -------------------------------------------------------------------------------------------


def test_gas_sensors_stream_batch_by_batch():
    rows = GasSensors("gas-sensor-drift").load(real("gas-sensor-drift"), 0)
    assert (len(rows), rows.shape, rows.classes) == (6_697, (128,), 6)
    sizes = torch.bincount(rows.time.long(), minlength=11).tolist()
    assert sizes == [0, 445, 1244, 1586, 161, 197, 2300, 0, 294, 470, 0]
    first = rows.x[rows.time == 1]
    assert torch.allclose(first.mean(0), torch.zeros(128), atol=1e-4)
    # Nine spans of one batch each, of which two are there at a time.
    stream = Stream(by="time", intervals=9, gap=10, retention=20, empty="wait")
    population = build(rows, IID(clients=10), shift=Shift(what=stream))
    population.check(90)
    for r, batches in ((0, {1, 2}), (10, {2, 3}), (50, {6}), (60, {8}), (70, {8, 9}), (89, {9})):
        held = torch.cat([population.held(client, Moment(r, 90), "train") for client in range(10)])
        assert set(rows.time[held].tolist()) == batches


@pytest.mark.slow
def test_stations_stream_by_the_hour():
    folder = real("beijing-air")
    names = sorted(path.name for path in (folder / "beijing-air").glob("*.csv.gz"))[:3]
    source = CSV(
        tuple(f"beijing-air/{name}" for name in names),
        label="PM2.5",
        cuts=(35.0, 75.0, 150.0),
        client="station",
        time=("year", "month", "day", "hour"),
        features=("TEMP", "PRES", "DEWP", "RAIN", "WSPM", "hour"),
        missing="drop",
    )
    rows = source.load(folder, 0)
    assert rows.client_names == ("Aotizhongxin", "Changping", "Dingling")
    assert (rows.shape, rows.classes) == ((6,), 4)
    assert 100_000 < len(rows) < 3 * 35_064
    assert (float(rows.time.min()), float(rows.time.max())) == (1362096000.0, 1488322800.0)  # 2013-03-01 to 2017-02-28
    # A quarter of a year every ten rounds, of which the last two are there.
    stream = Stream(by="time", intervals=16, gap=10, retention=20)
    population = build(rows, Natural(), shift=Shift(what=stream))
    population.check(160)
    held = population.held(1, Moment(35, 160), "train")
    months = {datetime.fromtimestamp(t, UTC).strftime("%Y-%m") for t in rows.time[held].tolist()}
    assert (
        {"2013-12", "2014-02", "2014-04"}
        <= months
        <= {f"2013-{m}" for m in (11, 12)} | {f"2014-0{m}" for m in range(1, 7)}
    )
    assert population.changed(Moment(40, 160)).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_series_is_what_a_dictionary_of_its_hours_says():
    """The hour that comes twice when clocks are set back is one value, and the one that is left out is none."""
    folder = real("pjm-load")
    with gzip.open(folder / "pjm-load" / "EKPC_hourly.csv.gz", "rt", newline="") as file:
        _, *lines = csv.reader(file)
    told: dict[float, list[float]] = {}
    for when, value in lines:
        told.setdefault(datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp(), []).append(float(value))
    value_at = {at: sum(values) / len(values) for at, values in told.items()}
    lags = (86_400, 604_800)
    wanted = [at for at in sorted(value_at) if all(at - lag in value_at for lag in lags)]
    rows = Series("pjm-load/EKPC_hourly.csv.gz", "Datetime", clock=("hour",)).load(folder, 0, measured=True)
    assert rows.client_names == ("EKPC_MW",)
    assert len(told) < len(lines)
    assert rows.time.tolist() == wanted
    assert rows.value.tolist() == pytest.approx([value_at[at] for at in wanted])
    assert rows.x[:, :2].flatten().tolist() == pytest.approx([value_at[at - lag] for at in wanted for lag in lags])
    assert rows.x[:, 2:].argmax(1).tolist() == [datetime.fromtimestamp(at, UTC).hour for at in wanted]
