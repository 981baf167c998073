"""The recipes on Fielding: settings of its tables, and its data where one has tables like those of the page."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtide.config import points, read
from fedtide.runs.preflight import preflight
from helpers.idx_files import idx_bytes
from helpers.shell import done, refused

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"
NAMES = [path.stem for path in sorted(FOLDER.glob("fielding-*.toml"))]

# Tables 1 and 2: rounds, rounds between new data, learning rate, batch, local steps, participants.
TABLES = {
    "fmow": (2000, 2, 0.05, 20, 20, 50),
    "cityscapes": (200, 30, 0.001, 20, 20, 20),
    "waymo": (100, 20, 0.001, 20, 20, 20),
    "openimages": (400, 50, 0.05, 20, 20, 200),
}
FIGURES = {
    **{f"fielding-{name}": name for name in TABLES},
    **{f"fielding-{name}": "fmow" for name in (
        "aggregators", "feddrift", "heterogeneity", "malicious", "selection", "static", "threshold")},
    **{f"fielding-{name}": "cityscapes" for name in ("concept-drift", "representations")},
}  # fmt: skip
LAST = {"fmow": 100, "cityscapes": 30, "waymo": 20, "openimages": 100}
"""Rounds that final accuracy is a mean of: one arrival or more, of Open Images the paper's own (section 3.1)."""
STILL = ("fielding-concept-drift", "fielding-static")
"""All data are there throughout."""
TIMED = [
    *(f"fielding-{name}" for name in TABLES), "fielding-aggregators", "fielding-concept-drift", "fielding-feddrift",
    "fielding-representations", "fielding-selection",
]  # fmt: skip
"""Figures whose axis is time."""
WITHOUT_TERM = ("FedYogi", "Fielding, Yogi", "q-FedAvg", "Fielding, q = 1")
"""Methods without the term of FedProx: two rivals that have none, and their clusters."""
OWN = ("fielding-characters", "fielding-real-time", "fielding-small-model", "fielding-by-sums")
"""On other data, or of another kind."""


def recipe(name: str, scale: str = "paper", *sets: str):
    return read(FOLDER / f"{name}.toml", scale=scale, sets=sets)


def local_of(method):
    return method.settings()["local"]


def test_every_recipe_is_of_some_figure():
    assert sorted([*FIGURES, *OWN]) == NAMES


@pytest.mark.parametrize(("name", "data"), FIGURES.items())
def test_settings_of_the_paper_are_those_of_its_tables(name, data):
    rounds, gap, lr, batch, steps, participants = TABLES[data]
    experiment = recipe(name)
    assert (experiment.rounds, experiment.average_last) == (rounds, LAST[data])
    assert data in experiment.data.source.path.lower().replace("openimage", "openimages")
    what = experiment.shift.what
    assert what.kind == "static" if name in STILL else (what.kind, what.gap, what.retention) == ("stream", gap, 100)
    for method in experiment.method:
        options = method.settings()
        local, cohort = options["local"], options["cohort"]
        assert (local.lr, local.batch_size, local.local_steps) == (lr, batch, steps)
        assert cohort.kind == "everyone" if name == "fielding-feddrift" else cohort.clients_per_round == participants
        assert options["weighting"] == "uniform"
        assert local_of(method).proximal == (0.0 if method.name in WITHOUT_TERM else 0.1)
        if method.algorithm == "flexcfl" and name not in STILL[:1]:
            assert options["clusters"] == "silhouette"
    if name in TIMED:
        assert experiment.devices.kind == "traces"
        assert experiment.devices.network == ("vit" if data == "waymo" else "resnet")


@pytest.mark.parametrize("name", sorted({*FIGURES, *OWN} - {"fielding-small-model"}))
@pytest.mark.parametrize("scale", ["nano", "cpu", "paper"])
def test_the_rivals_of_a_recipe_weigh_clients_alike_and_pull_alike(name, scale):
    for method in recipe(name, scale).method:
        options = method.settings()
        assert options["weighting"] == "uniform"
        assert local_of(method).proximal == (0.0 if method.name in WITHOUT_TERM else 0.1)
    experiment = recipe(name, scale)
    pull = {method.name: local_of(method).proximal for method in experiment.method}
    for claim in experiment.claim:
        assert {pull[rival] for rival in claim.rivals} <= {pull[claim.method]}, claim.text


# -- with tables that look like those of the page ----------------------------------------------------------------------


def pictures(root: Path, rows: list[tuple[object, ...]], *columns: str) -> None:
    """A table of rows with their label first, and the same few pictures again and again."""
    root.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for k in range(3):
        Image.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(root / f"{k}.png")
    with open(root / "manifest.csv", "w", newline="") as table:
        out = csv.writer(table)
        out.writerow(["path", "label", *columns])
        out.writerows((f"{k % 3}.png", *row) for k, row in enumerate(rows))


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A data directory with a little of everything that the recipes read; commands run there, too."""
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    zones = range(50)
    day = "2015-{:02}-{:02}T00:00:00"
    fmow = [(f"use {(k + z) % 12}", f"zone {z}", day.format(k % 12 + 1, (k + z) % 28 + 1)) for z in zones
            for k in range(16)]  # fmt: skip
    pictures(tmp_path / "fmow", fmow, "client", "time")
    for folder, clients in (("cityscapes-objects", 40), ("waymo_classification_images", 20)):
        frames = [(f"kind {k % 6}", f"camera {c}", k) for c in range(clients) for k in range(40)]
        pictures(tmp_path / folder, frames, "client", "time")
    people = [(f"thing {k % 20}", f"person {c}") for c in range(20) for k in range(40)]
    pictures(tmp_path / "openImage", people, "client")
    (tmp_path / "device-traces").mkdir()
    latencies = [{"ResNet Latency": 50.0, "Vit Latency": 300.0}, {"ResNet Latency": 90.0, "Vit Latency": 500.0}]
    (tmp_path / "device-traces/training_latency.json").write_text(json.dumps(latencies))
    (tmp_path / "device-traces/mobiperf_sampled_devices.csv").write_text("case,tcp_speed_kbps\n1,800 900\n2,20\n")
    folder, draw = tmp_path / "emnist-letters", np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", 4000), ("test", 2000)):
        labels = (np.arange(count) % 26 + 1).astype(np.uint8)
        for what, array in (
            ("images-idx3", draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            ("labels-idx1", labels),
        ):
            (folder / f"emnist-letters-{part}-{what}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array), 1))
    (tmp_path / "gas-sensor-drift").mkdir()
    lines = [f"{k % 6 + 1};10.0 " + " ".join(f"{j}:{v:.2f}" for j, v in enumerate(draw.random(128), 1))
             for k in range(150)]  # fmt: skip
    for batch in range(1, 11):
        (tmp_path / f"gas-sensor-drift/batch{batch}.dat").write_text("\n".join(lines) + "\n")
    return tmp_path


SMALLER = {
    "fielding-openimages": ["defaults.cohort.clients_per_round=20"],
    "fielding-waymo": ["model.depth=1", "model.width=16", "model.heads=2"],
    "fielding-small-model": ["data.partition.samples=600"],
}


ALIKE = ("aggregators", "heterogeneity", "malicious", "representations", "selection", "static", "threshold")
"""Data and network of fielding-fmow or fielding-concept-drift, and algorithms that a smaller scale plays."""


def sized(name: str) -> object:
    alike = name.removeprefix("fielding-") in ALIKE
    return pytest.param(name, marks=[pytest.mark.thorough] if alike else [], id=name)


# The points of fielding-by-sums are four of the others.
@pytest.mark.parametrize("name", [sized(name) for name in NAMES if name != "fielding-by-sums"])
def test_the_papers_size_fits_tables_like_those_of_the_page(tables, monkeypatch, name):
    small = [] if name in OWN[:2] else ["data.source.size=32", "data.source.cache=pixels.npz"]
    if name in ("fielding-representations", "fielding-concept-drift"):
        monkeypatch.setattr("fedtide.report.page.pictures_of", lambda *given: [])
        assert done("run", "recipe:fielding-small-model", "--scale", "paper", "--out", "small-model", "--workers", 1,
                    "--set", "rounds=1", "--set", "eval_every=1", "--set", "data.partition.samples=20",
                    *(part for each in small for part in ("--set", each))) == 0  # fmt: skip
    preflight(recipe(name, "paper", "seeds=[0]", *small, *SMALLER.get(name, [])), name)


@pytest.mark.parametrize(
    "name", [pytest.param("fielding-representations", marks=pytest.mark.thorough), "fielding-concept-drift"]
)
def test_without_the_small_network_the_line_says_where_it_was_looked_for(capsys, tables, name):
    small = ("--set", "data.source.size=32", "--set", "seeds=[0]")
    (tables / "runs").mkdir()  # beside it pixels are cached
    out = tables / "runs"
    said = refused(capsys, out, "run", f"recipe:{name}", "--scale", "paper", "--out", out / "one", *small)
    assert "representation.weights: no such file or folder: small-model/central/0" in said.replace(f"{tables}/", "")


def test_a_small_network_of_the_same_scale_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda *given: [])
    short = ("--scale", "nano", "--workers", 1, "--seeds", 0, "--set", "rounds=2", "--set", "eval_every=2")
    assert done("run", "recipe:fielding-small-model", *short, "--out", "small-model") == 0
    weights = '{ kind = "gradient", weights = "small-model/central/0" }'
    assert done("run", "recipe:fielding-representations", *short, "--out", "run", "--set",
                f"method.Gradient.representation={weights}") == 0  # fmt: skip


@pytest.mark.parametrize("name", ["fielding-representations", "fielding-concept-drift"])
def test_the_small_network_is_the_clients(name):
    for scale in ("nano", "cpu", "paper"):
        small, theirs = recipe("fielding-small-model", scale), recipe(name, scale)
        if (name, scale) == ("fielding-concept-drift", "cpu"):
            continue  # its digits are no letters
        assert small.model == theirs.model
        assert small.data.source == theirs.data.source
        assert small.data.transforms == theirs.data.transforms


def test_shared_concepts_are_dealt_and_private_swaps_are_the_papers():
    for scale in ("nano", "cpu", "paper"):
        shared, private = (p.experiment.shift.how for p in points(recipe("fielding-concept-drift", scale), "recipe"))
        assert (shared.concepts, shared.begin) == (4, "dealt")
        assert (private.concepts, private.begin, private.fraction, private.local_labels_only) == (
            None,
            "source",
            0.5,
            True,
        )
