"""`fedtide recommend` as a person types it."""

import csv
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tomli_w

import fedtide as ft
from fedtide.config import read
from fedtide.personal.client_networks import ALONE
from fedtide.tuning import tournament
from fedtide.tuning.ladder import Ladder
from helpers.shell import done, refused
from helpers.studies import A, raw

PROX = {**A, "name": "prox", "algorithm": "fedprox"}


@pytest.fixture(autouse=True)
def here(here, monkeypatch):
    """One plan whatever time methods take."""
    monkeypatch.setattr(tournament, "planned", lambda costs, rounds, step, _: Ladder((min(6, rounds),), 1, len(costs)))
    monkeypatch.setattr("fedtide.tuning.tournament.SEEDS", 2)
    return here


def written(*methods, **changes) -> Path:
    path = Path("study.toml")
    values = raw(*(methods or (A, PROX)), **{"rounds": 2, "eval_every": 1, "data": {"split": {"val": 0.3}}, **changes})
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    return path


def baskets() -> Path:
    """Shops in half of which full baskets are paid by card, and in half nearly empty ones."""
    draw, path = random.Random(0), Path("baskets.csv")
    rows = []
    for _ in range(400):
        shop, basket = draw.randrange(8), draw.gauss(10, 4)
        rows.append([f"shop-{shop}", round(basket, 1), "card" if (basket > 10) == (shop < 4) else "cash"])
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["shop", "basket", "label"], *rows])
    return path


def test_from_a_study_to_a_study_with_the_survivors(here, capsys):
    written()
    assert done("recommend", "study.toml", "--workers", 1) == 0
    out = capsys.readouterr().out
    root = here / "runs" / "study-recommend"
    assert f"Next: fedtide run {root.relative_to(here) / 'study.toml'}" in out
    ready = read(root / "study.toml")
    assert ready.seeds == read("study.toml").seeds
    assert {method.name for method in ready.method} == {"A", "prox"}
    # Nothing is left to do; the page is made again.
    assert done("resume", root, "--quiet", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["survivors"][0] in ("A", "prox")
    assert {each["verdict"] for each in found["standings"]} <= {
        "highest",
        "cannot be told apart",
        "too few seeds to tell",
    }
    assert not found["leads"]
    (root / "report.html").unlink()
    assert done("report", root) == 0
    assert (root / "report.html").is_file()


@pytest.mark.parametrize("kind", ["stacked", "auto"])
def test_studies_of_any_fleet_of_this_machine_are_entered(here, kind):
    written(fleet={"kind": kind})
    assert done("recommend", "study.toml", "--workers", 1, "--quiet") == 0
    assert read(here / "runs" / "study-recommend" / "study.toml").fleet.kind == kind


def test_from_data_to_a_study(here, capsys):
    baskets()
    assert done("recommend", "baskets.csv", "--workers", 1, "--out", "shops", "--quiet") == 0
    assert capsys.readouterr().out == ""
    made = tournament.read_tournament(here / "shops")
    assert {each.method for each in made.candidates} >= {
        "FedAvg",
        "Each alone, short training",
        "Each alone, full training",
        "IFCA, K = 2 (safe)",
    }
    rates = [each.entry.removesuffix(" (safe)").rpartition(" ")[2] for each in made.candidates]
    assert set(rates[:-2]) == {"0.05", "0.2"}
    assert rates[-2:] == ["0.00015", "0.0006"]
    assert read("shops/config.toml").method[-1].settings()["solver"] == replace(ALONE, lr=0.0006)
    assert (here / "shops" / "inspection" / "inspection.html").is_file()
    ready = read("shops/study.toml")
    assert len(ready.method) < len(made.candidates)
    assert ready.data.split.val == 0.2


@pytest.mark.thorough
def test_from_python_with_rows_in_memory(here):
    with open(baskets(), newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in ("shop", "label")}
    data = columns | {"basket": [float(row["basket"]) for row in rows]}
    found = ft.recommend(data, "shops", budget="10m", workers=1, quiet=True)
    assert re.fullmatch(r"Recommendation\('shops', .* has the highest score; not told apart from it: .*\)", repr(found))
    assert "verdict" not in found._repr_html_()
    assert found.study.is_file()


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, ["study.toml", "--budget", "5"], "--budget: found '5', allowed: a number and s, m, h or d, such as '90s'"),
        (
            {},
            ["study.toml", "--label", "y"],
            "--label: found 'y', but with data .*|--label: found 'y', allowed: with data",
        ),
        ({}, ["none.csv"], "recommend: no such file or folder: none.csv; name a CSV, ARFF, Parquet or NPZ file"),
        ({"method": [A]}, ["study.toml"], "study.toml: method: found 1, allowed: two methods or more"),
        (
            {"data": {"split": {"val": 0.0}}},
            ["study.toml"],
            "study.toml: data.split.val: found 0, allowed: a share of the rows, by which methods are judged",
        ),
        ({"sweep": {"rounds": [1, 2]}}, ["study.toml"], "study.toml: sweep: found 'rounds', allowed: none"),
        ({"fleet": {"kind": "ray"}}, ["study.toml"], "study.toml: fleet.kind: found 'ray', allowed: local, workers, "),
    ],
)
def test_what_a_person_may_get_wrong(here, capsys, changes, arguments, said):
    written(*changes.pop("method", ()), **changes)
    assert re.search(said, refused(capsys, here, "recommend", *arguments))


@pytest.mark.parametrize("data", ["baskets.csv", "study.toml"])
def test_a_budget_that_is_too_short_says_which_would_do_and_leaves_nothing(here, capsys, monkeypatch, data):
    baskets()
    written()
    monkeypatch.setattr("fedtide.api.jobs.time", SimpleNamespace(monotonic=lambda: time.monotonic() - 60))
    said = refused(capsys, here, "recommend", data, "--budget", "1m")
    assert re.fullmatch(rf"--budget: {data}: found 60 s, allowed: \d+m or more, as \d+ s went into reading .*", said)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    Path("runs").mkdir()

    def over(*_: object, **__: object) -> None:
        raise tournament.TooShort("over")

    monkeypatch.setattr(tournament, "execute", over)
    assert refused(capsys, here, "recommend", data, "--budget", "10m") == "over"
    monkeypatch.setattr(tournament, "execute", lambda *_, **__: False)
    assert done("recommend", data, "--budget", "10m") == 130
    (left,) = Path("runs").iterdir()
    monkeypatch.setattr(tournament, "execute", over)
    notes = left / "notes.txt"
    notes.write_text("mine")
    assert done("resume", left) == 2
    assert [*left.iterdir()] == [notes]


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)])
@pytest.mark.parametrize("step", ["check_judged", "fill_folder"])
def test_a_folder_about_data_is_whole_or_not_there(here, capsys, monkeypatch, step, error, status):
    baskets()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tournament, step, Mock(side_effect=error))
    assert done("recommend", "baskets.csv", "--out", "found") == status
    assert not [path for path in here.iterdir() if path.is_dir() and path.name.startswith("found")]
    assert "making-" not in capsys.readouterr().err
