"""Recipes at the size of their papers: without their data one line says so; data in the published formats fit."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtide.config import points, read
from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.learn.task import with_branches
from fedtide.runs.build import population_of, rows_of, task_of
from fedtide.runs.preflight import preflight
from helpers.image_files import write_idx
from helpers.shell import done, refused

FOLDER = Path(__file__).parents[2] / "src/fedtide/recipes"


def recipe(name: str, *sets: str):
    return read(FOLDER / f"{name}.toml", scale="paper", sets=sets)


@pytest.mark.parametrize(("name", "scale", "missing"), [
    ("fedtem-emnist", "paper", "emnist-byclass"), ("fedtem-stackoverflow", "paper", "stackoverflow.jsonl"),
    ("wsm-cifar10", "paper", "cifar-10-batches-bin"), ("wsm-femnist", "paper", "femnist"),
    ("wsm-fmnist", "cpu", "fashion-mnist"),
])  # fmt: skip
def test_without_its_data_a_recipe_stops_with_one_line(capsys, tmp_path, monkeypatch, name, scale, missing):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path / "data"))
    said = refused(capsys, tmp_path, "run", f"recipe:{name}", "--scale", scale, "--out", tmp_path / "run")
    tried = f"{tmp_path / 'data' / missing}, {missing}"
    assert said == f"data.source: no such file or folder: {tried}; set data.directory or FEDTIDE_DATA"


# -- fedtem ------------------------------------------------------------------------------------------------------------

FEW = {
    group: [f"data.partition.of.{group}.clients=3" for group in ("day", "night")] for group in ("emnist", "cifar110")
} | {"stackoverflow": []}
ROWS = {"emnist": 15, "cifar110": 40}
PARAMETERS = {"emnist": 1_214_588, "cifar110": 11_279_772}
"""Of the paper's networks with two branches."""


def small(name: str) -> list[str]:
    rows = [f"data.partition.of.{group}.samples={ROWS[name]}" for group in ("day", "night") if name in ROWS]
    return [*FEW[name], *rows, "method.cohort=3"]


@pytest.mark.parametrize("name", FEW)
def test_the_size_of_fedtem_fits_data_in_the_published_formats(data, name):
    experiment = recipe(f"fedtem-{name}", *small(name))
    methods = tuple(method for method in experiment.method if method.name == "FedTEM")
    experiment = experiment.model_copy(update={"method": methods, "claim": (), "baseline": None})
    preflight(experiment)
    rows = rows_of(experiment, 0)
    population = population_of(experiment, experiment.shift, 0)
    train = population.parts["train"]
    assert population.group_names == ("day", "night")
    assert population.expected(Moment(0, 256)).tolist() == [1, 0]
    labels = [set(rows.y[train.rows[population.group[train.owner] == k]].flatten().tolist()) for k in (0, 1)]
    if name == "emnist":
        assert labels[0] == set(range(10))
        assert labels[1] <= set(range(10, 62))
    if name == "cifar110":
        assert labels[0] <= set(range(100, 110))
        assert labels[1] <= set(range(100))
        assert (rows.classes, tuple(population.shard(0, Moment(0, 1)).x.shape[1:])) == (110, (3, 24, 24))
    if name == "stackoverflow":
        assert [population.names[i].split("/")[1] for i in (0, 1)] == ["answer", "question"]
        assert population.group.tolist() == [1, 0] * 4
        assert population.counts(population.clients, "test").tolist() == [2] * 8
    else:
        task = with_branches(task_of(experiment, experiment.method[0], rows), "head", 2)
        assert sum(p.numel() for p in task.init(Rng(0)).params.values()) == PARAMETERS[name]


ABLATIONS = ("priors", "branch-choice", "smoothing", "selection", "period-length", "local-size")


@pytest.mark.parametrize("name", ABLATIONS)
def test_figures_of_fedtem_are_on_its_data(data, name):
    """The first point of each figure, with few clients, on rows in EMNIST's format."""
    few = recipe(f"fedtem-{name}", *small("emnist"), "data.held_out_clients={clients = 4, samples = 10}")
    assert (few.data.source.kind, few.data.source.path, few.rounds) == ("idx", "emnist-byclass", 2049)
    main = recipe("fedtem-emnist")
    assert (few.data.groups, few.model) == (main.data.groups, main.model)
    assert recipe(f"fedtem-{name}").data.partition == main.data.partition
    experiment = points(few)[0].experiment
    preflight(experiment)
    for method in experiment.method:
        options = method.settings()
        server, local = options["server"], options["local"]
        assert (server.kind, server.lr, server.eps, local.lr) == ("keras-adam", 10**-2.5, 1e-4, 10**-1.5)
        if name != "smoothing" and options.get("lam"):
            assert (options["lam"], options["eps"]) == (0.5, 0.1)


# -- wsm ---------------------------------------------------------------------------------------------------------------

WSM = (
    "cifar10",
    "cifar100",
    "femnist",
    "baselines",
    "norms",
    "forgetting",
    "heterogeneity",
    "participation",
    "local-work",
)
SHAPES = {"femnist": (62, (1, 28, 28)), "cifar100": (100, (3, 32, 32))}


@pytest.mark.parametrize("name", WSM)
def test_the_size_of_wsm_fits_data_in_the_published_formats(data, name):
    few = ("data.partition.clients=12", "method.cohort=2", "data.held_out_clients.clients=5")
    point = points(recipe(f"wsm-{name}", *few))[0].experiment
    first = point.model_copy(update={"method": point.method[:1], "claim": (), "baseline": None})
    preflight(first)
    rows = rows_of(first, 0)
    assert (rows.classes, tuple(rows.shape)) == SHAPES.get(name, (10, (3, 32, 32)))
    judged = population_of(first, first.shift, 0).parts["test"].rows
    assert len(judged) > 0
    assert rows.held_out[judged].all()


# -- fielding ----------------------------------------------------------------------------------------------------------

FIELDING = [path.stem for path in sorted(FOLDER.glob("fielding-*.toml"))]


def pictures(root: Path, rows: list[tuple[object, ...]], *columns: str) -> None:
    """Write a table of rows with their label first, and the same few pictures again and again."""
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
    day, pairs = "2015-{:02}-{:02}T00:00:00", [(z, k) for z in range(50) for k in range(16)]
    fmow = [(f"use {(k + z) % 12}", f"zone {z}", day.format(k % 12 + 1, (k + z) % 28 + 1)) for z, k in pairs]
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
    draw = np.random.default_rng(0)
    for part, count in (("train", 4000), ("test", 2000)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 26 + 1).astype(np.uint8)
        write_idx(tmp_path / "emnist-letters", f"emnist-letters-{part}", images, labels)
    (tmp_path / "gas-sensor-drift").mkdir()
    sensors = [[f"{k}:{v:.2f}" for k, v in enumerate(draw.random(128), 1)] for _ in range(150)]
    lines = [" ".join([f"{row % 6 + 1};10.0", *values]) for row, values in enumerate(sensors)]
    for batch in range(1, 11):
        (tmp_path / f"gas-sensor-drift/batch{batch}.dat").write_text("\n".join(lines) + "\n")
    return tmp_path


SMALLER = {
    "fielding-openimages": ["defaults.cohort.clients_per_round=20"],
    "fielding-small-model": ["data.partition.samples=600"],
}
ALIKE = ("aggregators", "heterogeneity", "malicious", "representations", "selection", "static", "threshold")
"""Data and network of fielding-fmow or fielding-concept-drift, and algorithms that a smaller scale plays."""


def sized(name: str) -> object:
    alike = name.removeprefix("fielding-") in ALIKE
    return pytest.param(name, marks=[pytest.mark.thorough] if alike else [], id=name)


# The points of fielding-by-sums are four of the others.
@pytest.mark.parametrize("name", [sized(name) for name in FIELDING if name != "fielding-by-sums"])
def test_the_size_of_fielding_fits_tables_like_those_of_its_page(tables, monkeypatch, name):
    own = name in ("fielding-characters", "fielding-real-time")
    pixels = [] if own else ["data.source.size=32", "data.source.cache=pixels.npz"]
    if name in ("fielding-representations", "fielding-concept-drift"):
        monkeypatch.setattr("fedtide.report.page.pictures_of", lambda *given: [])
        sets = ["rounds=1", "eval_every=1", "data.partition.samples=20", *pixels]
        arguments = ["--scale", "paper", "--out", "small-model", "--workers", 1]
        arguments += [part for assignment in sets for part in ("--set", assignment)]
        assert done("run", "recipe:fielding-small-model", *arguments) == 0
    preflight(recipe(name, "seeds=[0]", *pixels, *SMALLER.get(name, [])), name)


@pytest.mark.parametrize(
    "name", [pytest.param("fielding-representations", marks=pytest.mark.thorough), "fielding-concept-drift"]
)
def test_without_the_small_network_the_line_says_where_it_was_looked_for(capsys, tables, name):
    sets = ("--set", "data.source.size=32", "--set", "seeds=[0]")
    (tables / "runs").mkdir()  # beside it pixels are cached
    out = tables / "runs"
    said = refused(capsys, out, "run", f"recipe:{name}", "--scale", "paper", "--out", out / "one", *sets)
    assert "representation.weights: no such file or folder: small-model/central/0" in said.replace(f"{tables}/", "")


def test_a_small_network_of_the_same_scale_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda *given: [])
    short = ("--scale", "nano", "--workers", 1, "--seeds", 0, "--set", "rounds=2", "--set", "eval_every=2")
    assert done("run", "recipe:fielding-small-model", *short, "--out", "small-model") == 0
    weights = 'method.Gradient.representation={ kind = "gradient", weights = "small-model/central/0" }'
    assert done("run", "recipe:fielding-representations", *short, "--out", "run", "--set", weights) == 0
